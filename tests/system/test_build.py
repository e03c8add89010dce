"""The build where the compiler knows less than this one (case 20), and what the kernel tests need elsewhere."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import cython_cmake
import pytest

SOURCES = Path(__file__).parents[2] / "cyext"
TIERS = {"x86_64": {"avx512": "-mavx512f", "avx2": "-mavx2"}, "aarch64": {"neon": "-march=armv8-a"}}
KNOWN = TIERS.get(platform.machine(), {})


def configure(folder: Path, refused: str) -> tuple[str, set[str]]:
    """What CMake says, and the tiers it would build, with a compiler that refuses the flag `refused`."""
    compiler = folder / "old-compiler"
    compiler.write_text(f'''#!/bin/sh
for flag; do
  if [ "$flag" = "{refused}" ]; then echo "unrecognized command-line option $flag" >&2; exit 1; fi
done
exec {shutil.which("cc")} "$@"
''')
    compiler.chmod(0o755)
    cmake = [
        str(Path(sys.executable).parent / "cmake"), "-S", str(SOURCES), "-B", str(folder / "build"),
        f"-DCMAKE_C_COMPILER={compiler}", f"-DPython_EXECUTABLE={sys.executable}",
        f"-DCMAKE_MODULE_PATH={Path(cython_cmake.__file__).parent / 'cmake'}", "-G", "Unix Makefiles",
    ]  # fmt: skip
    done = subprocess.run(cmake, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr, {path.name.split("_native_")[1][:-4] for path in folder.glob("build/CMakeFiles/_native_*.dir")}


@pytest.mark.parametrize("tier", KNOWN)
def test_a_tier_that_the_compiler_does_not_know_is_left_out_and_named(tmp_path, tier):
    said, built = configure(tmp_path, KNOWN[tier])
    assert f"the {tier} tier is left out" in " ".join(said.split())
    without = {name for name, flag in KNOWN.items() if name == tier or (tier == "avx2" and name == "avx512")}
    assert built == {"portable", *KNOWN} - without


def test_a_compiler_that_knows_all_leaves_none_out(tmp_path):
    said, built = configure(tmp_path, "-mno-such-flag")
    assert "left out" not in said
    assert built == {"portable", *KNOWN}


def test_the_kernel_tests_need_no_torch():
    """An emulated machine has none (scripts/test_neon.sh)."""
    root = SOURCES.parent
    names = [f"tests.kernels.{path.stem}" for path in sorted((root / "tests/kernels").glob("*.py"))]
    code = f"import sys, {', '.join(names)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
