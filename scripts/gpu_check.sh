#!/usr/bin/env bash
# gpu_check.sh [--wheelhouse DIR] [--dry-run] [--limit SECONDS] [--device cuda:N]: what a machine with a GPU and without
# a way to download anything can tell in eight minutes; one JSON document is the last line of stdout.
#
# With --wheelhouse the package is installed from there (scripts/wheelhouse.sh makes it) into an environment of its own
# that sees the machine's torch and transformers; otherwise it runs as installed. PYTHON names the Python that has torch.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

wheelhouse=
arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    --wheelhouse) wheelhouse=$(cd "${2:?--wheelhouse needs a folder}" && pwd); shift 2 ;;
    *) arguments+=("$1"); shift ;;
  esac
done

python=${PYTHON:-}
if [ -z "$python" ] && [ -z "$wheelhouse" ] && [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; fi
python=$(command -v "${python:-python3}") || { echo "error: there is no ${PYTHON:-python3}" >&2; exit 2; }

# Whether the machine's own torch and transformers are in the range that pyproject.toml states.
"$python" - "$root/pyproject.toml" <<'CHECK'
import re
import sys
from importlib import metadata

from pip._vendor.packaging.specifiers import SpecifierSet

text, wrong = open(sys.argv[1], encoding="utf-8").read(), []
for name in ("torch", "transformers"):
    wanted = SpecifierSet(re.search(rf'^  "{name}([^"]*)"', text, re.MULTILINE)[1])
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        wrong.append(f"{name} is not installed, wanted is {wanted}")
        continue
    print(f"gpu_check: {name} {version}, supported is {wanted}", file=sys.stderr)
    if not wanted.contains(version, prereleases=True):
        wrong.append(f"{name} {version} is outside of {wanted}")
if wrong:
    print(f"error: {'; '.join(wrong)} ({sys.executable})", file=sys.stderr)
    print("hint: PYTHON=/path/to/python names another one", file=sys.stderr)
    sys.exit(2)
CHECK

if [ -n "$wheelhouse" ]; then
  folder=$(mktemp -d "${TMPDIR:-/tmp}/gpu-check.XXXXXX")
  trap 'rm -rf "$folder"' EXIT
  "$python" -m venv --without-pip --system-site-packages "$folder/venv"
  own=$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # If that Python is one of an environment itself, its packages are not the system's: name them.
  "$python" -c 'import sysconfig; print(*{sysconfig.get_path(name) for name in ("purelib", "platlib")}, sep="\n")' \
    > "$own/of-the-machine.pth"
  install() {
    "$python" -m pip --disable-pip-version-check --quiet --python "$folder/venv/bin/python" install \
      --no-index --find-links "$wheelhouse" --no-compile "$@" magicpig-cli 1>&2
  }
  install --no-deps --ignore-installed  # also where that Python has another version of it
  install                               # what it needs and the machine has not
  python=$folder/venv/bin/python
  cd "$folder"  # not to import the package from the working directory
fi

export GOMP_SPINCOUNT=1000 HF_HUB_OFFLINE=1  # as the command does; read when torch is loaded
"$python" -m magicpig_cli.bench.gpu_check ${arguments[@]+"${arguments[@]}"}
