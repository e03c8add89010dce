#!/usr/bin/env bash
# Lint, types, import contracts and tests. With --slow also every "must show" of the roadmap, on the demo model, and the
# kernel tests with sanitizers.
# Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

select=(-m "not slow")
if [ "${1:-}" = "--slow" ]; then
  select=()
  sanitized=yes
  shift
fi

bash scripts/setup.sh --dev
bin=.venv/bin
export PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1

$bin/ruff check .
$bin/ruff format --check .
$bin/mypy
$bin/lint-imports
if [ -n "${sanitized:-}" ]; then bash scripts/test_sanitized.sh -q; fi
exec $bin/python -m pytest "${select[@]}" "$@"
