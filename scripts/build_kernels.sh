#!/usr/bin/env bash
# build_kernels.sh FOLDER [CMAKE OPTION...]: a second copy of the package with kernels of its own in FOLDER/site, beside
# the installed one and without touching it. For scripts/test_sanitized.sh and scripts/test_neon.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
shift

bin=.venv/bin
modules=$($bin/python -c 'import cython_cmake, pathlib; print(pathlib.Path(cython_cmake.__file__).parent / "cmake")')
$bin/cmake -S cyext -B "$folder/cmake" -DCMAKE_BUILD_TYPE=Release -DCMAKE_MODULE_PATH="$modules" \
  -DPython_EXECUTABLE="$PWD/$bin/python" -DCYTHON_EXECUTABLE="$PWD/$bin/cython" "$@"
$bin/cmake --build "$folder/cmake" --parallel "$(nproc)"

rm -rf "$folder/site"
mkdir -p "$folder/site"
cp -r magicpig_cli "$folder/site/"
$bin/cmake --install "$folder/cmake" --prefix "$folder/site"
