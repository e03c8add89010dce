#!/usr/bin/env bash
# Lint, types, import contracts and tests, these in two processes. With --slow also every "must show" of the roadmap, on
# the demo model, and the kernel tests with sanitizers.
# Further arguments go to pytest: `-n 0` for one process, which -s needs, `-n 8` where there are more cores.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = "--slow" ]; then
  slow=yes
  shift
fi

bash scripts/setup.sh --dev
bin=.venv/bin
export PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1

$bin/ruff check .
$bin/ruff format --check .
$bin/mypy
$bin/lint-imports

# Neighbours in a file share fixtures, so each process gets one half and then takes from the end of the other's. Two
# processes with two threads each would wait for one another (docs/decisions/002).
together=(env OMP_NUM_THREADS=1 $bin/python -m pytest -m "not slow" -n 2 --dist worksteal)
if [ -z "${slow:-}" ]; then exec "${together[@]}" "$@"; fi

bash scripts/test_sanitized.sh -q
# What times things runs after the rest, alone. Arguments may choose nothing of one part (5), not of both.
"${together[@]}" "$@" || { nothing=$?; [ $nothing = 5 ] || exit $nothing; }
$bin/python -m pytest -m slow "$@" -n 0 || { status=$?; [ $status = 5 ] && [ -z "${nothing:-}" ] || exit $status; }
