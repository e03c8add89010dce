"""What one input line asks for, in any of the three forms, or what is wrong with it (CASES 11, 12, 14).

In order of detection: an OpenAI Batch request (`body`), `messages`, `prompt`. No text is rendered or tokenised here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from magicpig_cli.batch.reader import RawLine
from magicpig_cli.config import MAX_SEED, REPETITION_PENALTY_RANGE, GenerationOptions
from magicpig_cli.errors import MagicpigError

INVALID_JSON, INVALID_UTF8, INVALID_REQUEST = "invalid_json", "invalid_utf8", "invalid_request"
_MAX_COUNT = 2**31 - 1
_LONGEST_MESSAGE = 400  # characters
_MAX_DEPTH = 100  # of arrays and objects; a bound of our own, since Python's depends on who calls
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
_SERVED_URLS = ("/chat/completions", "/completions")


def shortened(text: str, longest: int) -> str:
    """The text, cut where it is longer: what a line holds may be of any length."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


class BadLine(MagicpigError):
    """Why a line cannot be answered. `code` is short and stable, for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(shortened(message, _LONGEST_MESSAGE))
        self.code = code


@dataclass(frozen=True, slots=True)
class LineError:
    """A line that cannot be answered, as it is reported."""

    number: int
    custom_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Line:
    """One request. Either `messages` or `prompt` is set; `options` holds only what the line itself says."""

    number: int
    custom_id: str
    named: bool  # whether the line gives that id itself
    messages: list[dict[str, Any]] | None
    prompt: str | None
    file: str | None
    system: str | None
    options: GenerationOptions
    model: str | None  # the model it names; one model answers all lines
    ignored: tuple[str, ...]  # keys that mean nothing here


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a value must be. `holds` is only asked about values of that type."""

    wanted: str
    is_type: Callable[[Any], bool]
    holds: Callable[[Any], bool] = lambda value: True


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_stop(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, list) and all(map(_is_text, value)))


_TEXT = _Kind("a string", _is_text)
_NOT_EMPTY = _Kind("a string that is not empty", _is_text, lambda text: bool(text.strip()))
_SHARE = _Kind("a number from 0 to 1", _is_number, lambda value: 0 <= value <= 1)
_COUNT = _Kind(f"an integer of at least 1, up to {_MAX_COUNT:,}", _is_integer, lambda value: 1 <= value <= _MAX_COUNT)
_LEAST_PENALTY, _MOST_PENALTY = REPETITION_PENALTY_RANGE

_KINDS: dict[str, _Kind] = {
    "body": _Kind("an object", lambda value: isinstance(value, dict)),
    "custom_id": _NOT_EMPTY,
    "id": _NOT_EMPTY,
    "url": _Kind("the address of chat or text completions, like /v1/chat/completions", _is_text,
        lambda url: url.rstrip("/").endswith(_SERVED_URLS)),
    "method": _Kind("POST", _is_text, lambda method: method.upper() == "POST"),
    "messages": _Kind("an array with at least one message", lambda value: isinstance(value, list), bool),
    "prompt": _TEXT,
    "file": _NOT_EMPTY,
    "system": _TEXT,
    "model": _TEXT,
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "temperature": _Kind("a number of at least 0", _is_number, lambda value: 0 <= value <= sys.float_info.max),
    "top_p": _SHARE,
    "top_k": _Kind("an integer of at least -1", _is_integer, lambda value: value >= -1),
    "min_p": _SHARE,
    "repetition_penalty": _Kind(f"a number from {_LEAST_PENALTY:g} to {_MOST_PENALTY:g}", _is_number,
        lambda value: _LEAST_PENALTY <= value <= _MOST_PENALTY),
    "seed": _Kind("an integer from 0 to 2^64 - 1", _is_integer, lambda value: 0 <= value <= MAX_SEED),
    "stop": _Kind("a string or an array of strings, none of them empty", _is_stop,
        lambda value: "" not in ([value] if isinstance(value, str) else value)),
    "n": _Kind("1: a line has one answer", _is_integer, lambda value: value == 1),
}  # fmt: skip
_SILENT = frozenset({"stream", "stream_options", "user", "metadata", "store"})  # change no answer


def parse_line(raw: RawLine) -> Line | LineError:
    """The request of a line, or what is wrong with it. An error keeps the line's id where that can be read."""
    custom_id = f"line-{raw.number}"
    try:
        content = _json_object(raw.data)
        given = _custom_id(content)
        custom_id = given or custom_id
        return _request(raw.number, custom_id, given is not None, content)
    except BadLine as problem:
        return LineError(raw.number, custom_id, problem.code, problem.message)


def _json_object(data: bytes) -> dict[str, Any]:
    content = _json_value(_decoded(data))
    if not isinstance(content, dict):
        raise BadLine(INVALID_REQUEST, f"the line: want an object, got {_got(content)}")
    if _deeper_than(content, _MAX_DEPTH):
        raise BadLine(INVALID_JSON, f"not readable JSON: nested too deeply, more than {_MAX_DEPTH} levels")
    if _HALF_CHARACTER.search(data):
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError as problem:
            half = f"\\u{ord(problem.object[problem.start]):04x}"
            raise BadLine(INVALID_JSON, f"not text: {half} is half of a character") from None
    return content


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise BadLine(
            INVALID_UTF8, f"not UTF-8: byte 0x{data[problem.start]:02x} at offset {problem.start:,} of the line"
        ) from None


def _json_value(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as problem:
        what = problem.msg[:1].lower() + problem.msg[1:]
        if problem.msg == "Extra data":
            what = "a second value begins"
        raise BadLine(INVALID_JSON, f"not one JSON object: {what} at column {problem.pos + 1:,}") from None
    except RecursionError:
        raise BadLine(INVALID_JSON, "not readable JSON: nested too deeply") from None
    except ValueError as problem:  # an integer of more digits than Python converts, and _refuse_constant
        raise BadLine(INVALID_JSON, f"not readable JSON: {str(problem).partition(';')[0]}") from None


def _deeper_than(value: Any, levels: int) -> bool:
    """Whether more than `levels` arrays and objects stand within each other."""
    layer = [value]
    for _ in range(levels):
        inner = [item for outer in layer for item in (outer.values() if isinstance(outer, dict) else outer)]
        layer = [item for item in inner if isinstance(item, (dict, list))]
        if not layer:
            return False
    return True


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _got(value: Any) -> str:
    """How JSON calls a value's type."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "an integer",
             float: "a number", type(None): "null"}  # fmt: skip
    return names[type(value)]


def _shown(value: Any) -> str:
    return shortened(json.dumps(value, ensure_ascii=False), 40)


def _checked(holder: Mapping[str, Any], key: str) -> Any:
    """The value of a key, or None where it is absent or null. Raises BadLine naming key, wanted and given type."""
    value = holder.get(key)
    if value is None:
        return None
    kind = _KINDS[key]
    if not kind.is_type(value):
        raise BadLine(INVALID_REQUEST, f"{key}: want {kind.wanted}, got {_got(value)}: {_shown(value)}")
    if not kind.holds(value):
        raise BadLine(INVALID_REQUEST, f"{key}: want {kind.wanted}, got {_shown(value)}")
    return value


def _custom_id(content: Mapping[str, Any]) -> str | None:
    given: str | None = _checked(content, "custom_id") or _checked(content, "id")
    return given


def _request(number: int, custom_id: str, named: bool, content: dict[str, Any]) -> Line:
    body = _checked(content, "body")
    # Keys beside the body (`file`, `system`, …) count where the body does not say them itself.
    values = content if body is None else {**content, **{key: v for key, v in body.items() if v is not None}}
    for key in ("url", "method", "n"):
        _checked(values, key)
    messages, prompt = _asked(values)
    return Line(
        number=number,
        custom_id=custom_id,
        named=named,
        messages=messages,
        prompt=prompt,
        file=_checked(values, "file"),
        system=_checked(values, "system"),
        options=_options(values),
        model=_checked(values, "model"),
        ignored=_ignored(values, both=messages is not None and values.get("prompt") is not None),
    )


def _asked(values: Mapping[str, Any]) -> tuple[list[dict[str, Any]] | None, str | None]:
    """(messages, None) or (None, prompt)."""
    messages = _checked(values, "messages")
    if messages is not None:
        for number, message in enumerate(messages, start=1):
            _check_message(f"message {number}", message)
        return messages, None
    prompt = _checked(values, "prompt")
    if prompt is None:
        keys = ", ".join(sorted(map(_shown, values))[:8]) or "none"
        raise BadLine(INVALID_REQUEST, f"neither messages nor prompt is there; the keys are: {keys}")
    if not prompt.strip() and values.get("file") is None:
        raise BadLine(INVALID_REQUEST, "prompt: it is empty")
    return None, prompt


def _check_message(where: str, message: Any) -> None:
    """Types only: which roles there are and what a template makes of them is the codec's matter."""
    if not isinstance(message, dict):
        raise BadLine(INVALID_REQUEST, f"messages: {where}: want an object, got {_got(message)}")
    for key, wanted, kinds in (("role", "a string", str), ("content", "a string or an array of parts", (str, list))):
        value = message.get(key)
        if not isinstance(value, kinds):
            got = _got(value) if key in message else "nothing"
            raise BadLine(INVALID_REQUEST, f"messages: {key} of {where}: want {wanted}, got {got}")


def _options(values: Mapping[str, Any]) -> GenerationOptions:
    stop = _checked(values, "stop") or ()
    short, long = _checked(values, "max_tokens"), _checked(values, "max_completion_tokens")
    return GenerationOptions(
        max_tokens=short if long is None else long,
        temperature=_checked(values, "temperature"),
        top_p=_checked(values, "top_p"),
        top_k=_checked(values, "top_k"),
        min_p=_checked(values, "min_p"),
        repetition_penalty=_checked(values, "repetition_penalty"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=_checked(values, "seed"),
    )


def _ignored(values: Mapping[str, Any], *, both: bool) -> tuple[str, ...]:
    unknown = [key for key in values if key not in _KINDS and key not in _SILENT]
    return tuple([*unknown, "prompt"] if both else unknown)
