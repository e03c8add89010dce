"""Profiles travel inside the package: built without kernels, which takes no compiler and a fraction of a second."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(path.name for path in (ROOT / "profiles").iterdir())


def build(kind: str, folder: Path) -> Path:
    """`wheel` or `sdist` of this checkout, made by the build backend in a process of its own."""
    code = (
        f"from scikit_build_core.build import build_{kind} as build\n"
        f"print(build({str(folder)!r}, {{'wheel.cmake': 'false', 'build-dir': {str(folder / 'build')!r}}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_all_profiles_inside_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    folder = "magicpig_cli/data/profiles/"
    assert sorted(name.removeprefix(folder) for name in names if name.startswith(folder)) == SHIPPED
    assert not [name for name in names if not name.startswith(("magicpig_cli/", "magicpig_cli-"))]


def test_an_installed_package_finds_them(wheel, tmp_path):
    """Without `site`, so that this checkout's own editable install is out of the way."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {sysconfig.get_path('purelib')!r}]\n"
        "from magicpig_cli import profiles\n"
        "for profile in profiles.shipped(): print(profile.path)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(tmp_path / "magicpig_cli/data/profiles" / name) for name in SHIPPED]


def test_the_source_archive_holds_them(tmp_path):
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = [Path(name) for name in archive.getnames()]
    assert sorted(name.name for name in names if name.parent.name == "profiles" and name.suffix == ".yaml") == SHIPPED
