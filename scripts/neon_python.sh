#!/usr/bin/env bash
# For scripts/test_neon.sh: a Python for aarch64 in build/neon (Debian's arm64 packages, unpacked) and the command
# build/neon/bin/python, which runs it under QEMU. Nothing is installed outside build/; done once.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/build/neon

for tool in qemu-aarch64-static aarch64-linux-gnu-gcc apt-get dpkg-deb; do
  if ! command -v $tool > /dev/null; then
    echo "neon: $tool is missing; on Debian or Ubuntu:" >&2
    echo "  apt-get install --no-install-recommends qemu-user-static gcc-aarch64-linux-gnu libc6-dev-arm64-cross" >&2
    exit 2
  fi
done
# What the kernel tests and their fixtures import, wheels alone: nothing is built for the other machine.
packages=(numpy pytest pytest-timeout pytest-xdist hypothesis platformdirs psutil)
if [ "$(cat "$folder/ready" 2> /dev/null)" = "${packages[*]}" ]; then exit; fi
rm -rf "$folder"
mkdir -p "$folder/root" "$folder/bin"

# apt works on a state of its own here, as if nothing were installed yet: it needs no rights and finds all that is needed.
apt=$folder/apt
mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial"
: > "$apt/status"
options=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User= -o Acquire::http::Timeout=20
  -o Dir::State="$apt/state" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt/cache")
echo "neon: fetching Python for aarch64" >&2
apt-get "${options[@]}" update
apt-get "${options[@]}" install --yes --no-install-recommends --download-only python3 libpython3-dev libgomp1 libstdc++6
for package in "$apt"/cache/archives/*.deb; do dpkg-deb --extract "$package" "$folder/root"; done
rm -rf "$apt"

version=$(basename "$(readlink "$folder/root/usr/bin/python3")" | sed 's/^python//')
cat > "$folder/bin/python" << END
#!/bin/sh
exec env PYTHONHOME="$folder/root/usr" qemu-aarch64-static -L "$folder/root" -0 "$folder/bin/python" \\
  "$folder/root/usr/bin/python$version" "\$@"
END
chmod +x "$folder/bin/python"

.venv/bin/python -m pip --disable-pip-version-check --quiet install --target "$folder/packages" \
  --only-binary=:all: --implementation cp --python-version "$version" --platform manylinux2014_aarch64 \
  --platform manylinux_2_27_aarch64 --platform manylinux_2_28_aarch64 "${packages[@]}"
echo "${packages[*]}" > "$folder/ready"
