"""Physical lines: numbers, offsets, byte order mark, line ends (CASES 12); inputs that cannot be read twice."""

from __future__ import annotations

import hashlib
import io
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli.batch.reader import JsonlSource
from magicpig_cli.errors import UsageError

BOM = b"\xef\xbb\xbf"


def opened(data: bytes) -> JsonlSource:
    return JsonlSource.open("-", io.BytesIO(data))


def test_numbers_are_physical_and_blank_lines_are_skipped():
    lines = list(opened(BOM + b"a\r\n\r\n  b\n \t\nc").lines())
    assert [(line.number, line.data) for line in lines] == [(1, b"a"), (3, b"  b"), (5, b"c")]


def test_only_the_first_line_has_a_byte_order_mark():
    assert [line.data for line in opened(BOM + b"a\n" + BOM + b"b\n").lines()] == [b"a", BOM + b"b"]


@given(
    st.lists(st.tuples(st.binary(max_size=8).filter(lambda b: b"\n" not in b), st.sampled_from([b"\n", b"\r\n"]))),
    st.booleans(),
)
def test_lines_are_found_again(lines, bom):
    data = (BOM if bom else b"") + b"".join(content + end for content, end in lines)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return
    source = opened(data)
    wanted = [(number, content.rstrip(b" \t\r")) for number, (content, _) in enumerate(lines, start=1)]
    found = list(source.lines())
    if not (lines and lines[0][0].startswith(BOM)):  # a doubled mark loses one
        assert [(line.number, line.data) for line in found] == [pair for pair in wanted if pair[1]]
    for line in reversed(found):
        assert source.line_at(line.number, line.offset) == line
    assert source.sha256 == hashlib.sha256(data).hexdigest()


def test_reading_back_while_iterating_does_not_lose_the_place():
    source = opened(b"a\nb\nc\n")
    seen = []
    for line in source.lines():
        seen.append(line.data)
        assert source.line_at(1, 0).data == b"a"
    assert seen == [b"a", b"b", b"c"]


def test_a_file_knows_its_directory_and_a_pipe_is_spooled(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a\n")
    source = JsonlSource.open(str(path), io.BytesIO())
    assert (source.path, source.directory, source.size_bytes) == (path, tmp_path.resolve(), 2)
    read, write = os.pipe()
    os.write(write, b"a\nb\n")
    os.close(write)
    piped = JsonlSource.open(f"/dev/fd/{read}", io.BytesIO())
    os.close(read)
    assert piped.path is None
    for _ in range(2):
        assert [line.data for line in piped.lines()] == [b"a", b"b"]


def test_one_end_of_file_on_a_terminal_is_enough():
    class Typed(io.RawIOBase):
        """Each read is a line; the empty one is Ctrl-D, after which a terminal would wait for more."""

        def __init__(self) -> None:
            self.typed = [b"a\n", b"b\n", b""]

        def readable(self) -> bool:
            return True

        def readinto(self, buffer) -> int:
            line = self.typed.pop(0)
            buffer[: len(line)] = line
            return len(line)

    source = JsonlSource.open("-", io.BufferedReader(Typed()))
    assert [line.data for line in source.lines()] == [b"a", b"b"]


def test_what_cannot_be_opened_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no file"):
        JsonlSource.open(str(tmp_path / "none"), io.BytesIO())
    with pytest.raises(UsageError, match="directory"):
        JsonlSource.open(str(tmp_path), io.BytesIO())
    with pytest.raises(UsageError, match="UTF-16") as caught:
        opened('{"prompt": "x"}'.encode("utf-16"))
    assert "iconv" in str(caught.value.hint)
