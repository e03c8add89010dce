"""Documents: the text of a file, and the message that asks about some."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from magicpig_cli.errors import MagicpigError

BETWEEN = "\n\n"  # texts that become one


def document_message(documents: Sequence[tuple[str, str]], question: str) -> str:
    """One user message: the documents, given as (name, text), then the question about them.

    The question comes last because small models answer what they read last. Only several documents need their names.
    """
    parts = [text.strip("\n") for _, text in documents]
    if len(documents) > 1:
        parts = [f"Document: {name}\n{part}" for (name, _), part in zip(documents, parts, strict=True)]
    return BETWEEN.join([*parts, question] if question.strip() else parts)


def read_document(path: str) -> str:
    """`document_text` of a file. Raises MagicpigError."""
    return document_text(path, _read_bytes(path))


def document_text(path: str, data: bytes) -> str:
    """Text of UTF-8 bytes, byte order mark removed, lines ended by a line feed; `path` is for the errors.

    Raises MagicpigError for bytes that are no text, and for none.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_text(path, data, error.start) from error
    if "\0" in text:
        raise _not_text(path, data, data.index(0))
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if not text.strip():
        raise MagicpigError(f"{path} is empty", hint="give a document with text in it")
    return text


def _read_bytes(path: str) -> bytes:
    try:
        place = Path(path).expanduser()
        if place.is_char_device() and place.resolve() != Path("/dev/null"):  # it may never end
            raise MagicpigError(f"{path} is a device", hint="name a file")
        return place.read_bytes()
    except FileNotFoundError:
        raise MagicpigError(f"there is no file {path}", hint="check the path; relative ones start here") from None
    except IsADirectoryError:
        raise MagicpigError(f"{path} is a directory", hint="name its files one by one") from None
    except OSError as error:
        raise MagicpigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (RuntimeError, ValueError) as error:  # ~ of a user who is not there, a NUL in the name
        raise MagicpigError(f"{path} cannot be read: {error}", hint="check the path") from error


def _not_text(path: str, data: bytes, offset: int) -> MagicpigError:
    hint = "convert the document to plain text first"
    if data.startswith(b"%PDF-"):
        hint = f"pdftotext {path} takes the text out of it"
    elif data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        hint = f"it looks like UTF-16: iconv -f UTF-16 -t UTF-8 {path}"
    return MagicpigError(f"{path} is not UTF-8 text: byte 0x{data[offset]:02x} at offset {offset:,}", hint=hint)
