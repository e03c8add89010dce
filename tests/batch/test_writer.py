"""Records on disk: one write each, whole lines whatever happens, synced in time; manifest; lock."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from magicpig_cli.batch import writer
from magicpig_cli.batch.writer import Output, OutputPaths, RecordFile, write_manifest
from magicpig_cli.errors import MagicpigError, UsageError
from magicpig_cli.lock import locked


class Raw(io.FileIO):
    """A file that counts writes and, after `room` bytes, is on a full disk."""

    room: int | None = None

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self.writes: list[bytes] = []

    def write(self, data) -> int:
        self.writes.append(bytes(data))
        if self.room is None:
            return super().write(data)
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(bytes(data)[: self.room])
        self.room -= written
        return written


def test_companions_of_an_output():
    paths = OutputPaths.beside(Path("d/o.jsonl"))
    assert [str(p) for p in (paths.errors, paths.manifest, paths.lock)] == [
        "d/o.errors.jsonl", "d/o.meta.json", "d/o.lock",
    ]  # fmt: skip
    assert OutputPaths.beside(Path("v1.2")).errors == Path("v1.2.errors.jsonl")


def test_a_record_is_one_write_of_one_line(tmp_path):
    raw = Raw(tmp_path / "o.jsonl")
    file = RecordFile(raw, "o.jsonl", on_disk=True)
    records = [{"text": "né \N{PIG FACE} \u2028\n"}, {"text": "x" * 100_000}, {"path": "\udcff"}]
    for record in records:
        file.write(record)
    assert len(raw.writes) == 3
    lines = (tmp_path / "o.jsonl").read_bytes().split(b"\n")
    assert [json.loads(line) for line in lines[:-1]] == [*records[:2], {"path": "?"}]
    assert lines[-1] == b""


@pytest.mark.parametrize("room", [0, 1, 5, 20])
def test_a_full_disk_leaves_whole_lines(tmp_path, room):
    raw = Raw(tmp_path / "o.jsonl")
    file = RecordFile(raw, "o.jsonl", on_disk=True)
    file.write({"n": 1})
    raw.room = room
    for _ in range(2):
        with pytest.raises(MagicpigError, match=r"o\.jsonl: No space left"):
            file.write({"text": "x" * 50})
    raw.room = None
    file.write({"n": 2})
    assert [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()] == [{"n": 1}, {"n": 2}]


def test_an_interrupted_write_leaves_whole_lines(tmp_path):
    class Interrupted(Raw):
        def write(self, data) -> int:
            io.FileIO.write(self, bytes(data)[:5])
            raise KeyboardInterrupt

    file = RecordFile(Interrupted(tmp_path / "o.jsonl"), "o.jsonl", on_disk=True)
    with pytest.raises(KeyboardInterrupt):
        file.write({"n": 1})
    assert (tmp_path / "o.jsonl").read_bytes() == b""


def test_what_is_gone_on_with_stays(tmp_path):
    paths = OutputPaths.beside(tmp_path / "o.jsonl")
    for n in range(2):
        with Output.to_files(paths, "append") as output:
            output.answer({"n": n})
            output.error({"e": n})
    assert paths.answers.read_text() == '{"n": 0}\n{"n": 1}\n'
    assert paths.errors.read_text() == '{"e": 0}\n{"e": 1}\n'


def test_what_a_killed_process_has_begun_is_removed_and_nothing_else(tmp_path):
    paths = OutputPaths.beside(tmp_path / "o.jsonl")
    for path in (paths.answers, paths.errors, paths.manifest):
        (tmp_path / paths.temporary(path)).write_text("half")
    (tmp_path / ".other.jsonl.new").write_text("")
    paths.answers.write_text("")
    paths.remove_unfinished()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.jsonl.new", "o.jsonl"]


def test_a_reader_that_is_gone_passes_through(tmp_path):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb", buffering=0) as pipe, pytest.raises(BrokenPipeError):
        RecordFile(pipe, "stdout", on_disk=False).write({})


class Stopwatch:
    """Stands for the module `time`; what is synced is noted with the time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.synced: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def fsync(self, _descriptor: int) -> None:
        self.synced.append(self.now)


def test_a_record_is_synced_once_it_is_old_enough(tmp_path, monkeypatch):
    watch = Stopwatch()
    monkeypatch.setattr(writer, "time", watch)
    monkeypatch.setattr(writer.os, "fsync", watch.fsync)
    file = RecordFile(Raw(tmp_path / "o.jsonl"), "o.jsonl", on_disk=True)
    watch.now = 200.0
    file.sync(5.0)
    assert watch.synced == []  # nothing was written
    file.write({})
    for watch.now in (201.0, 204.9, 205.0, 206.0):
        file.sync(5.0)
    assert watch.synced == [205.0]
    watch.now = 210.0
    file.write({})
    watch.now = 214.0
    file.write({})  # does not make the older one wait longer
    watch.now = 215.0
    file.sync(5.0)
    assert watch.synced == [205.0, 215.0]


@pytest.fixture
def impatient(monkeypatch):
    """Records are synced after a twentieth of a second."""
    monkeypatch.setattr(writer, "SYNC_EVERY_S", 0.05)


def until(holds) -> None:
    while not holds():  # the timeout of all tests is the limit
        time.sleep(0.005)


def test_records_are_synced_while_nothing_else_happens(tmp_path, monkeypatch, impatient):
    synced: list[int] = []
    monkeypatch.setattr(writer.os, "fsync", synced.append)
    paths = OutputPaths.beside(tmp_path / "o.jsonl")
    with Output.to_files(paths, "new") as output:
        synced.clear()  # the directory, which has a new file
        output.answer({})
        until(lambda: synced)
        synced.clear()
        output.answer({})
        until(lambda: synced)


def test_records_are_synced_at_the_end(tmp_path, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(writer.os, "fsync", synced.append)
    with Output.to_files(OutputPaths.beside(tmp_path / "o.jsonl"), "new") as output:
        output.answer({})
        output.error({})
        synced.clear()
    assert len(synced) == 2


def test_a_disk_that_fails_later_is_told_with_the_next_record(tmp_path, monkeypatch, impatient):
    paths = OutputPaths.beside(tmp_path / "o.jsonl")

    def broken(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Output.to_files(paths, "new") as output:
        monkeypatch.setattr(writer.os, "fsync", broken)
        output.answer({"n": 1})
        until(lambda: output._problem is not None)
        with pytest.raises(MagicpigError, match=r"o\.jsonl: Input/output"):
            output.answer({"n": 2})
        output._problem = None
    assert paths.answers.read_text() == '{"n": 1}\n'


def test_ctrl_c_while_the_disk_is_slow_leaves_the_files_to_whom_uses_them(tmp_path, monkeypatch, impatient):
    begun, goes_on, problems = threading.Event(), threading.Event(), []
    monkeypatch.setattr(threading, "excepthook", problems.append)

    def slow(_descriptor: int) -> None:
        begun.set()
        goes_on.wait()

    def interrupt() -> None:
        until(lambda: output._ended.is_set())
        time.sleep(0.1)  # it waits for the thread by now
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    output = Output.to_files(OutputPaths.beside(tmp_path / "o.jsonl"), "new")
    output.answer({"n": 1})
    output.error({"n": 2})
    monkeypatch.setattr(writer.os, "fsync", slow)
    presser = threading.Thread(target=interrupt)
    presser.start()
    try:
        with pytest.raises(KeyboardInterrupt), output:
            assert begun.wait(10)
    finally:
        goes_on.set()
    presser.join()
    output._syncing.join()
    assert problems == []
    assert (tmp_path / "o.errors.jsonl").read_text() == '{"n": 2}\n'


def test_failures_have_a_file_of_their_own_if_there_are_any(tmp_path):
    paths = OutputPaths.beside(tmp_path / "o.jsonl")
    with Output.to_files(paths, "new") as output:
        output.answer({"n": 1})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.jsonl"]
    with Output.to_files(paths, "overwrite") as output:
        output.error({"n": 2})
        output.error({"n": 3})
    assert paths.answers.read_bytes() == b""
    assert paths.errors.read_text() == '{"n": 2}\n{"n": 3}\n'
    with Output.to_files(paths, "overwrite"):
        pass
    assert not paths.errors.exists()


def test_a_stream_takes_both_and_stays_open():
    stream = io.BytesIO()
    with Output.to_stream(stream) as output:
        output.error({"n": 1})
        output.answer({"n": 2})
    assert stream.getvalue() == b'{"n": 1}\n{"n": 2}\n'


def test_what_is_there_is_not_written_over(tmp_path):
    paths = OutputPaths.beside(tmp_path / "o.jsonl")
    for path in (paths.answers, paths.errors):
        path.write_text("precious")
        with pytest.raises(UsageError, match="exists") as caught:
            paths.refuse_existing()
        assert "--overwrite" in str(caught.value.hint)
        path.unlink()
    paths.refuse_existing()
    paths.answers.write_text("precious")  # appeared in the meantime
    with pytest.raises(UsageError, match="exists"):
        Output.to_files(paths, "new")
    assert paths.answers.read_text() == "precious"


def test_an_input_is_never_an_output(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    OutputPaths.beside(tmp_path / "o.jsonl").refuse_input(source)
    (tmp_path / "o.errors.jsonl").symlink_to(source)
    os.link(source, tmp_path / "p.meta.json")
    for name in ("in.jsonl", "o.jsonl", "p.jsonl", "./x/../in.jsonl"):
        with pytest.raises(UsageError, match="is the input"):
            OutputPaths.beside(tmp_path / name).refuse_input(source)


WORDS = ("holds it", "wait", "elsewhere")
HOLDER = """
import sys
import time
from pathlib import Path
from magicpig_cli.lock import locked
with locked(Path(sys.argv[1]), "holds it", "wait", "elsewhere"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of `o` until it is told to end."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "o.lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_two_writers_are_kept_apart(tmp_path, holder):
    path = tmp_path / "o.lock"
    with pytest.raises(MagicpigError, match=f"process {holder.pid} holds it"), locked(path, *WORDS):
        pass
    holder.communicate()
    assert not path.exists()
    with locked(path, *WORDS):
        assert path.read_text() == f"{os.getpid()}\n"
    assert not path.exists()


def test_the_lock_of_a_killed_writer_is_free(tmp_path, holder):
    holder.kill()
    holder.wait()
    path = tmp_path / "o.lock"
    assert path.exists()
    with locked(path, *WORDS):
        assert path.read_text() == f"{os.getpid()}\n"


def test_no_place_for_a_lock(tmp_path):
    with pytest.raises(MagicpigError, match="cannot write") as caught, locked(tmp_path / "none" / "o.lock", *WORDS):
        pass
    assert caught.value.hint == WORDS[-1]


def test_a_manifest_that_cannot_be_written_leaves_the_old_one_and_no_rest(tmp_path, monkeypatch):
    paths = OutputPaths.beside(tmp_path / "o.jsonl")
    write_manifest(paths, {"state": "running"})

    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MagicpigError, match=r"o\.meta\.json: No space left on device") as raised:
        write_manifest(paths, {"state": "finished"})
    assert "free some space" in raised.value.hint
    assert json.loads(paths.manifest.read_text()) == {"state": "running"}
    assert [file.name for file in tmp_path.iterdir()] == ["o.meta.json"]
