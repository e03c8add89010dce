#!/usr/bin/env bash
# The kernel tests on kernels built with AddressSanitizer and UndefinedBehaviorSanitizer, on every instruction set that
# this CPU can run. Stops at the first finding. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/setup.sh --dev
bash scripts/build_kernels.sh build/sanitized -DMAGICPIG_SANITIZE=ON
runtime=$("${CC:-cc}" -print-file-name=libasan.so)
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# -S: without the .pth file that would find the installed kernels first. PYTHONMALLOC=malloc: every object between
# guarded bytes. Leaks are not asked for: an interpreter leaves its own behind. The report of a finding goes past pytest,
# which dies with it, and whose place nobody takes. The reference has no kernels, and the statistics only repeat the same
# calls for minutes.
exec env PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$packages" PYTHONMALLOC=malloc LD_PRELOAD="$runtime" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=1 \
  .venv/bin/python -S -m pytest --tx "2*popen//python=.venv/bin/python -S" --dist worksteal --max-worker-restart 0 \
  --capture=sys -p no:cacheprovider -o pythonpath="build/sanitized/site ." \
  tests/kernels --ignore-glob '*_statistics.py' -k "not reference" "$@"
