"""A file is replaced whole or stays as it was."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from magicpig_cli.files import is_stream, refuse_unwritable, replace_file


def test_content_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    file = tmp_path / "a"
    replace_file(file, b"one")
    file.chmod(0o640)
    replace_file(file, b"two")
    assert file.read_bytes() == b"two"
    assert file.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["a"]


def test_a_failure_leaves_the_old_content(tmp_path, monkeypatch):
    file = tmp_path / "a"
    file.write_bytes(b"old")

    def full(_number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(file, b"new")
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there/a")
    refuse_unwritable(tmp_path / "link")
    replace_file(tmp_path / "link", b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there/a").read_bytes() == b"x"


def test_a_device_and_a_pipe_are_written_in_place(tmp_path):
    refuse_unwritable(Path("/dev/null"))
    replace_file(Path("/dev/null"), b"x")
    assert not Path("/dev/null").is_file()
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    replace_file(tmp_path / "pipe", b"through")
    reader.join()
    assert read == [b"through"]


def test_asking_is_not_the_end_of_a_pipe(tmp_path):
    """Its reader is there already and must still be there for the content."""
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    refuse_unwritable(tmp_path / "pipe")
    reader.join(0.2)
    assert reader.is_alive()
    replace_file(tmp_path / "pipe", b"through")
    reader.join()
    assert read == [b"through"]


def test_a_pipe_without_a_name_is_written_to():
    """`/dev/stdout` in front of a pipe, or `>(program)`: the link leads to no path."""
    reading, writing = os.pipe()
    path = Path(f"/dev/fd/{writing}")
    assert is_stream(path)
    refuse_unwritable(path)
    replace_file(path, b"through")
    os.close(writing)
    with open(reading, "rb") as reader:
        assert reader.read() == b"through"


def test_asking_leaves_no_trace(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    refuse_unwritable(tmp_path / "old")
    refuse_unwritable(tmp_path / "new")
    assert os.listdir(tmp_path) == ["old"]
    assert (tmp_path / "old").read_bytes() == b"old"


@pytest.mark.parametrize("name", [".", "none/a", "x" * 300, "file/a"])
def test_what_cannot_be_written_is_refused_first(tmp_path, name):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match=r".") as asked:
        refuse_unwritable(tmp_path / name)
    with pytest.raises(OSError, match=r".") as tried:
        replace_file(tmp_path / name, b"x")
    assert asked.value.errno == tried.value.errno
    assert os.listdir(tmp_path) == ["file"]
