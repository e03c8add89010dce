#!/usr/bin/env bash
# The kernel tests on an emulated aarch64: kernels (neon and portable) are cross-compiled, a Python of Debian's arm64 is
# unpacked into build/neon, and QEMU runs both. Nothing is installed outside build/. Arguments go to pytest.
# Exit status 2: the emulator or the compiler is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/build/neon

for tool in qemu-aarch64-static aarch64-linux-gnu-gcc apt-get dpkg-deb; do
  if ! command -v $tool > /dev/null; then
    echo "test_neon: $tool is missing; on Debian or Ubuntu:" >&2
    echo "  apt-get install --no-install-recommends qemu-user-static gcc-aarch64-linux-gnu libc6-dev-arm64-cross" >&2
    exit 2
  fi
done

# Debian's aarch64 Python, with all that it needs. apt works on a state of its own here, so it needs no rights.
unpack_python() {
  local apt=$folder/apt
  rm -rf "$folder/root" "$apt"
  mkdir -p "$folder/root" "$apt/state/lists/partial" "$apt/cache/archives/partial"
  : > "$apt/status"
  local options=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$apt/state"
    -o Dir::State::status="$apt/status" -o Dir::Cache="$apt/cache" -o APT::Sandbox::User=)
  apt-get "${options[@]}" update
  apt-get "${options[@]}" install --yes --no-install-recommends --download-only \
    python3 libpython3-dev libgomp1 libstdc++6
  for package in "$apt"/cache/archives/*.deb; do dpkg-deb --extract "$package" "$folder/root"; done
  rm -rf "$apt"
  ls "$folder"/root/usr/bin | sed -n 's/^python\(3\.[0-9]*\)$/\1/p' > "$folder/version"
}

# A command that behaves like a Python of this machine, for CMake and for tests that start another one.
write_command() {
  mkdir -p "$folder/bin"
  cat > "$folder/bin/python" << END
#!/bin/sh
exec env PYTHONHOME="$folder/root/usr" qemu-aarch64-static -L "$folder/root" -0 "$folder/bin/python" \\
  "$folder/root/usr/bin/python$version" "\$@"
END
  chmod +x "$folder/bin/python"
}

install_packages() {
  rm -rf "$folder/packages"
  .venv/bin/python -m pip --disable-pip-version-check --quiet install --target "$folder/packages" \
    --only-binary=:all: --implementation cp --python-version "$version" --platform manylinux2014_aarch64 \
    --platform manylinux_2_27_aarch64 --platform manylinux_2_28_aarch64 \
    numpy pytest pytest-timeout hypothesis
}

bash scripts/setup.sh --dev
if [ ! -s "$folder/version" ]; then unpack_python; fi
version=$(cat "$folder/version")
write_command
if [ ! -d "$folder/packages/numpy" ]; then install_packages; fi

# CMake starts an emulated Python through "an emulator"; this command emulates by itself.
bash scripts/build_kernels.sh build/neon -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DPython_EXECUTABLE="$folder/bin/python" \
  -DCMAKE_POLICY_DEFAULT_CMP0190=NEW -DCMAKE_CROSSCOMPILING_EMULATOR="$(command -v env)" \
  -DCMAKE_C_FLAGS="-idirafter $folder/root/usr/include" # pyconfig.h of Debian is split by architecture

# From a folder without sources, so that every interpreter a test starts finds these kernels too. The reference has been
# tested natively, and beside torch there would be one OpenMP runtime, but there is no torch here.
cd "$folder"
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$folder/site:$folder/packages" OMP_NUM_THREADS=2 OPENBLAS_NUM_THREADS=1
bin/python -c 'from magicpig_cli.kernels import isa; assert isa.runnable() == ("portable", "neon")'
exec bin/python -m pytest -c ../../pyproject.toml --rootdir ../.. -o pythonpath="build/neon/site ." \
  -p no:cacheprovider ../../tests/kernels -k "not reference" \
  --deselect tests/kernels/test_isa_choice.py::test_one_openmp_runtime_beside_torch "$@"
