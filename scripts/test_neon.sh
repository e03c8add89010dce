#!/usr/bin/env bash
# The kernel tests on an emulated aarch64 (QEMU): the neon tier, cross-compiled. Arguments go to pytest.
# Needs Debian packages, which scripts/neon_python.sh names where they are missing.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/build/neon

bash scripts/setup.sh --dev
bash scripts/neon_python.sh

# CMake starts the Python of another machine through "an emulator"; this command emulates by itself.
bash scripts/build_kernels.sh "$folder" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DPython_EXECUTABLE="$folder/bin/python" \
  -DCMAKE_POLICY_DEFAULT_CMP0190=NEW -DCMAKE_CROSSCOMPILING_EMULATOR="$(command -v env)" \
  -DCMAKE_C_FLAGS="-idirafter $folder/root/usr/include" # pyconfig.h of Debian is split by architecture

# From a folder without sources, so that every interpreter a test starts finds these kernels too. Only what is done once
# per tier, the rest runs natively. Left out: statistics and others that repeat the same calls, which takes minutes here.
tests=$PWD/tests/kernels
cd "$folder"
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$folder/site:$folder/packages" OMP_NUM_THREADS=1
export MAGICPIG_TEST_EXAMPLES=6
bin/python -c 'from magicpig_cli.kernels import isa; assert isa.runnable() == ("portable", "neon"), isa.runnable()'
exec bin/python -m pytest -n 2 --dist worksteal -c ../../pyproject.toml --rootdir ../.. \
  -o pythonpath="build/neon/site ." -p no:cacheprovider \
  "$tests" --ignore-glob "$tests/*statistics.py" -k "neon and not everything_sampled and not no_bit_depends" "$@"
