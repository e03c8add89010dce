#!/usr/bin/env bash
# build_kernels.sh FOLDER [CMAKE OPTION...]: a second copy of the package with kernels of its own in FOLDER/site, beside
# the installed one and without touching it. For scripts/test_sanitized.sh and scripts/test_neon.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
shift

tools=build/tools # cython and its CMake module: pip keeps those of an ordinary build to itself
if [ ! -x $tools/bin/cython ]; then
  "${PYTHON:-python3}" -m venv $tools
  $tools/bin/pip --disable-pip-version-check --quiet install cython cython-cmake cmake
fi
modules=$($tools/bin/python -c 'import cython_cmake, pathlib; print(pathlib.Path(cython_cmake.__file__).parent / "cmake")')

$tools/bin/cmake -S cyext -B "$folder/cmake" -DCMAKE_BUILD_TYPE=Release -DCMAKE_MODULE_PATH="$modules" \
  -DPython_EXECUTABLE="$PWD/.venv/bin/python" \
  -DCYTHON_EXECUTABLE="$PWD/$tools/bin/cython" "$@"
$tools/bin/cmake --build "$folder/cmake" --parallel "$(nproc)"

rm -rf "$folder/site"
mkdir -p "$folder/site"
cp -r magicpig_cli "$folder/site/"
$tools/bin/cmake --install "$folder/cmake" --prefix "$folder/site"
