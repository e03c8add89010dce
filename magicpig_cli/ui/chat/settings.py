"""/set and /show. Values are checked where those of the options are: `SamplingParams`, `Engine.sample_as`."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from magicpig_cli.config import AttentionOptions, GenerationOptions
from magicpig_cli.engine.sampling import resolve_sampling
from magicpig_cli.errors import MagicpigError, UsageError
from magicpig_cli.ui import console
from magicpig_cli.units import format_count

if TYPE_CHECKING:
    from magicpig_cli.ui.chat.state import Chat

_WHOLE = ("max_tokens", "top_k", "seed")
_SWITCHES = ("think", "markdown")
_ALIASES = {"temp": "temperature", "max_new_tokens": "max_tokens"}
_DEFAULT = "default"
_ATTENTION = ("attention", "budget", "target_error")
KEYS = (*(field.name for field in fields(GenerationOptions)), *_ATTENTION, *_SWITCHES)
_HINT = '/set temperature 0.3, /set stop "###", /set seed default'


def choices(key: str) -> Iterable[str]:
    """Values to offer after a key."""
    if key == "attention":
        return (_DEFAULT, "exact")
    return ("on", "off") if key in _SWITCHES else (_DEFAULT,)


def set_value(chat: Chat, argument: str) -> None:
    """/set KEY VALUE; without a value it shows one, without a key all."""
    key, _, value = argument.partition(" ")
    if not key:
        for line in _settings_lines(chat):
            console.say(line)
        return
    key = key.replace("-", "_")
    key = _ALIASES.get(key, key)
    if key not in KEYS:
        close = difflib.get_close_matches(key, KEYS, n=1)
        raise MagicpigError(f"there is no setting {key}", hint=close[0] if close else ", ".join(KEYS))
    if value.strip() and key in _SWITCHES:
        changes: dict[str, Any] = {key: _switch(key, value.strip())}
        chat.look = replace(chat.look, **changes)
    elif value.strip() and key in _ATTENTION:
        _set_attention(chat, key, value.strip())
    elif value.strip():
        options = replace(chat.settings.generation, **{key: _value(key, value.strip())})
        try:
            resolve_sampling(options, chat.engine.generation_config)
        except UsageError as problem:  # it names the option
            raise UsageError(problem.message.removeprefix("--"), hint=f"/set {key} {_DEFAULT}") from problem
        chat.settings = replace(chat.settings, generation=options)
    console.say(_setting_line(chat, key))


def _set_attention(chat: Chat, key: str, text: str) -> None:
    """Sample in another way from the next answer on; `attention` is `default` or `exact`."""
    if key == "attention" and text not in choices(key):
        raise UsageError(f"attention is {_DEFAULT} or exact here, not {text!r}", hint="/set attention exact")
    value: Any = ("auto" if text == _DEFAULT else text) if key == "attention" else _value(key, text)
    options = replace(chat.sampling, **{"mode" if key == "attention" else key: value})
    try:
        chat.engine.sample_as(options)
    except UsageError as problem:  # it names the option
        raise UsageError(problem.message.removeprefix("--"), hint=problem.hint) from problem
    chat.sampling = options


def show(chat: Chat, _: str) -> None:
    """/show: all settings, and where the model, K, L, attention and the profile come from."""
    engine, plan = chat.engine, chat.engine.plan
    summary = engine.attention_summary()
    lines = [
        f"model      {engine.model_name}, {format_count(engine.params)} parameters, weights {plan.weight_types}, "
        f"{engine.device}, {engine.threads} threads, kernels {engine.isa}",
        f"context    {engine.context:,} tokens (the model's own {engine.shape.context:,})",
        "attention  " + ", ".join(f"{key} {value}" for key, value in summary.items() if value is not None),
        f"profile    {plan.profile}",
        *(f"because    {reason}" for reason in plan.reasons),
        f"system     {chat.conversation.system or 'none'}",
        *_settings_lines(chat),
    ]
    for line in lines:
        console.say(line)


def _value(key: str, text: str) -> Any:
    """What a text means for a key; None (or no stop text) for `default`."""
    if key == "stop":
        try:
            return () if text == _DEFAULT else tuple(shlex.split(text))
        except ValueError as problem:
            raise UsageError(f"stop {text}: {problem}", hint='/set stop "###"') from problem
    if text == _DEFAULT:
        return None
    try:
        return int(text) if key in _WHOLE else float(text)
    except ValueError:
        kind = "a whole number" if key in _WHOLE else "a number"
        raise UsageError(f"{key} is {kind}, not {text!r}", hint=_HINT) from None


def _switch(key: str, text: str) -> bool:
    words = {"on": True, "true": True, "yes": True, _DEFAULT: True, "off": False, "false": False, "no": False}
    if text.lower() not in words:
        raise UsageError(f"{key} is on or off, not {text!r}", hint=f"/set {key} off")
    return words[text.lower()]


def _settings_lines(chat: Chat) -> list[str]:
    return [_setting_line(chat, key) for key in KEYS]


def _setting_line(chat: Chat, key: str) -> str:
    if key in _SWITCHES:
        return f"{key} {'on' if getattr(chat.look, key) else 'off'}"
    if key in _ATTENTION:
        return _attention_line(chat, key)
    value = getattr(resolve_sampling(chat.settings.generation, chat.engine.generation_config), key)
    return f"{key} {_shown(key, value)} ({_origin(chat, key)})"


def _attention_line(chat: Chat, key: str) -> str:
    plan = chat.engine.plan
    option = "mode" if key == "attention" else key
    changed = getattr(chat.sampling, option) != getattr(AttentionOptions(), option)
    value: object = plan.mode if key == "attention" else plan.options_of("rabitq")[key]
    if key != "attention" and chat.engine.sampler_at_start != "rabitq":
        return f"{key} not used (of rabitq)"
    return f"{key} {'off' if value is None else value} ({'set' if changed else _DEFAULT})"


def _shown(key: str, value: Any) -> str:
    if key == "stop":
        return " ".join(map(repr, value)) or "none"
    if value is None:
        return "drawn anew for each answer" if key == "seed" else "off"
    return f"{value:,}" if key == "max_tokens" else f"{value:g}" if isinstance(value, float) else str(value)


def _origin(chat: Chat, key: str) -> str:
    """Who has said so."""
    if getattr(chat.settings.generation, key) not in (None, ()):
        return "set"
    config = chat.engine.generation_config
    own = {"max_tokens": "max_new_tokens", "stop": "stop_strings"}.get(key, key)
    if key != "seed" and getattr(config, own, None) is not None:
        return "the model's own"
    if key == "temperature" and getattr(config, "do_sample", None) is not None:
        return "the model's own"
    return _DEFAULT
