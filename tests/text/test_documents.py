"""Documents: what is read as text, what is refused, and where the question stands."""

import pytest

from magicpig_cli.engine.documents import document_message, read_document
from magicpig_cli.errors import MagicpigError


def test_documents_and_question():
    assert document_message([], "why?") == "why?"
    assert document_message([("a.txt", "one\n")], "why?") == "one\n\nwhy?"
    both = document_message([("a.txt", "\none\n"), ("b.txt", "two")], "why?")
    assert both == "Document: a.txt\none\n\nDocument: b.txt\ntwo\n\nwhy?"
    assert document_message([("a.txt", "one")], " \n") == "one"


def test_read_document(tmp_path):
    path = tmp_path / "a.txt"
    for data, text in [
        ("\ufeffnaïve\r\n你好\r\n".encode(), "naïve\n你好\n"),  # byte order mark, CRLF
        (b"[/INST] plain", "[/INST] plain"),
    ]:
        path.write_bytes(data)
        assert read_document(str(path)) == text


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"abc\xff\xfedef", "0xff at offset 3"),
        (b"\xef\xbb\xbfabc\xe4\xbd", "0xe4 at offset 6"),  # counted in the file, byte order mark included
        (b"PK\x03\x04\x00\x00", "0x00 at offset 4"),
        (b"\xff\xfea\x00", "0xff at offset 0"),
        (b" \r\n", "is empty"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, data, named):
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    with pytest.raises(MagicpigError, match=named) as caught:
        read_document(str(path))
    assert caught.value.hint
    assert ("UTF-16" in caught.value.hint) == (data[:2] == b"\xff\xfe")


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(MagicpigError, match="there is no file"):
        read_document(str(tmp_path / "missing.txt"))
    with pytest.raises(MagicpigError, match="is a directory"):
        read_document(str(tmp_path))
    with pytest.raises(MagicpigError, match="is a device"):
        read_document("/dev/zero")
