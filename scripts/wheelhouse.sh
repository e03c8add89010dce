#!/usr/bin/env bash
# wheelhouse.sh --wheelhouse DIR [--python VERSION]...: what scripts/gpu_check.sh installs where nothing can be
# downloaded. DIR gets the wheel of this package for the Python of .venv, its sources for other Pythons (a C compiler
# is needed there) with what builds them, and the dependencies that an environment with torch and transformers may
# lack, for these versions of Python (3.11 and 3.12 if none is named). Not torch: that is the machine's own.
set -euo pipefail
cd "$(dirname "$0")/.."

target=
versions=()
while [ $# -gt 0 ]; do
  case $1 in
    --wheelhouse) target=${2:?--wheelhouse needs a folder}; shift 2 ;;
    --python) versions+=("${2:?--python needs a version}"); shift 2 ;;
    *) echo "error: $1 is unknown" >&2; exit 2 ;;
  esac
done
[ -n "$target" ] || { echo "error: --wheelhouse DIR is missing" >&2; exit 2; }
[ ${#versions[@]} -gt 0 ] || versions=(3.11 3.12)
limit_mb=60

python=.venv/bin/python
pip() { $python -m pip --disable-pip-version-check --quiet "$@"; }
mkdir -p "$target"
rm -f "$target"/*.whl "$target"/*.tar.gz

pip wheel --no-deps --no-build-isolation --wheel-dir "$target" .
$python -c 'import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])' "$target" 1>&2

# Requirements as pyproject.toml states them, without what comes with torch and transformers.
needed=$($python - <<'NEEDED'
import tomllib

content = tomllib.load(open("pyproject.toml", "rb"))
there = ("torch", "transformers", "numpy", "safetensors")
found = [need for need in content["project"]["dependencies"] if not need.startswith(there)]
print(*found, *content["build-system"]["requires"], "cmake>=3.31", "ninja", sep="\n")
NEEDED
)
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux2010 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done
for version in "${versions[@]}"; do
  pip download --only-binary=:all: --implementation cp --python-version "$version" "${platforms[@]}" --dest "$target" \
    --requirement <(echo "$needed")
done

size_mb=$(du --apparent-size --block-size=1M --summarize "$target" | cut -f1)
echo "wheelhouse: $(ls "$target" | wc -l) files, $size_mb MB in $target" >&2
if [ "$size_mb" -gt $limit_mb ]; then
  echo "error: more than $limit_mb MB: name fewer versions with --python" >&2
  exit 1
fi
