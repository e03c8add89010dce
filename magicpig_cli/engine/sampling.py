"""From logits to a token: the parameters of one answer, where they come from, and the draw itself.

The warpers are transformers' own, in the order of its `generate`: repetition penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from magicpig_cli.config import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_TEMPERATURE,
    MAX_SEED,
    REPETITION_PENALTY_RANGE,
    GenerationOptions,
)
from magicpig_cli.errors import ModelError, UsageError

_SAMPLING_TEMPERATURE = 1.0  # what transformers means by `do_sample: true` without a temperature
_GREEDY_BELOW = 1e-5  # of temperature: the draw is the likeliest token, and dividing by less leaves float32
_HOTTEST = 1e30  # of temperature: long before it all tokens are alike, and beyond 3e38 it is no float32
_SEED_BITS = 32  # of a drawn seed: short to type again, exact in any JSON reader
_LONGEST_SHOWN_BITS = 128  # of an integer in a message


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one answer are drawn, nothing left open but the seed. Raises UsageError for a bad value.

    temperature 0, or below 1e-5, takes the likeliest token. None, top_p 1, top_k 0 or −1, min_p 0 and
    repetition_penalty 1 are off.
    """

    max_tokens: int
    temperature: float
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_whole("--max-tokens", self.max_tokens, 1, None)
        _check_real("--temperature", self.temperature, "0 or more", lambda value: value >= 0)
        _check_real("--top-p", self.top_p, "0 to 1", lambda value: 0 <= value <= 1)
        _check_whole("--top-k", self.top_k, -1, None)
        _check_real("--min-p", self.min_p, "0 to 1", lambda value: 0 <= value <= 1)
        low, high = REPETITION_PENALTY_RANGE
        _check_real(
            "--repetition-penalty", self.repetition_penalty, f"{low:g} to {high:g}", lambda value: low <= value <= high
        )
        _check_whole("--seed", self.seed, 0, MAX_SEED)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise UsageError("--stop is empty: every answer would end before its first letter", hint='--stop "###"')

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < _GREEDY_BELOW


def _check_real(option: str, value: Any, allowed: str, holds: Any) -> None:
    if value is None:
        return
    # A comparison: math.isfinite cannot take an integer beyond a float's range.
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not number or not holds(value):
        raise UsageError(f"{option} is {_shown(value)}, allowed is {allowed}", hint=f"a number, {allowed}")


def _shown(value: Any) -> str:
    """A value in a message; what is absurdly long is only described."""
    if isinstance(value, int) and value.bit_length() > _LONGEST_SHOWN_BITS:
        return f"a number of {value.bit_length()} bits"
    return repr(value)


def _check_whole(option: str, value: Any, low: int, high: int | None) -> None:
    if value is None:
        return
    allowed = f"{low} or more" if high is None else f"{low} to {high}"
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        raise UsageError(
            f"{option} is {_shown(value)}, allowed is {allowed}", hint=f"give {option} a whole number: {allowed}"
        )


def resolve_sampling(options: GenerationOptions, generation_config: GenerationConfig | None) -> SamplingParams:
    """Fill what was not said from the model's generation config, and the rest from the defaults. Raises UsageError.

    A value counts as the model's word only if its file holds it: transformers' own fall-backs (top-k 50, 20 tokens)
    are nobody's choice and are not used. Temperature, if the option is silent:
    the file's temperature, whatever `do_sample` says (files that give one mean it, though `generate` would ignore it
    without `do_sample: true`); `do_sample: false` alone is greedy; `do_sample: true` alone is 1, as in `generate`;
    a file that says neither (base models, most conversions) gets 0.7.
    `max_length` is not an answer's length and is ignored; `max_new_tokens` is.
    """

    def either(option: Any, name: str) -> Any:
        return option if option is not None else getattr(generation_config, name, None)

    max_tokens = either(options.max_tokens, "max_new_tokens")
    temperature = either(options.temperature, "temperature")
    stop = options.stop or getattr(generation_config, "stop_strings", None) or ()
    return SamplingParams(
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        temperature=_silent_temperature(generation_config) if temperature is None else temperature,
        top_p=either(options.top_p, "top_p"),
        top_k=either(options.top_k, "top_k"),
        min_p=either(options.min_p, "min_p"),
        repetition_penalty=either(options.repetition_penalty, "repetition_penalty"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=options.seed,
    )


def _silent_temperature(generation_config: GenerationConfig | None) -> float:
    """The temperature where neither the option nor the file gives a number."""
    do_sample = getattr(generation_config, "do_sample", None)
    if do_sample is None:
        return DEFAULT_TEMPERATURE
    return _SAMPLING_TEMPERATURE if do_sample else 0.0


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    """What shapes the distribution before a draw; empty where none is made."""
    warpers = LogitsProcessorList()
    if params.greedy:
        return warpers
    if params.temperature != 1:
        warpers.append(TemperatureLogitsWarper(min(float(params.temperature), _HOTTEST)))
    if params.top_k is not None and params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p is not None and params.top_p < 1:
        warpers.append(TopPLogitsWarper(float(params.top_p)))
    if params.min_p:
        warpers.append(MinPLogitsWarper(float(params.min_p)))
    return warpers


def _want_numbers(scores: torch.Tensor) -> None:
    """Raise ModelError unless the largest of the scores is finite. A −inf beside it is a forbidden token."""
    if not torch.isfinite(scores.max()):
        raise ModelError("the model's output is not a number (NaN or infinity)", hint="try --dtype float32")


class TokenSampler:
    """Draws the tokens of one sequence with a generator of its own, so that neighbours in a batch change nothing.

    The seed is that of `params`, else `default_seed`, else drawn; `seed` tells which it was.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], default_seed: int | None = None) -> None:
        chosen = params.seed if params.seed is not None else default_seed
        self.seed: int = secrets.randbits(_SEED_BITS) if chosen is None else chosen
        self._greedy = params.greedy
        self._warpers = _warpers(params)
        self._generator = torch.Generator("cpu").manual_seed(self.seed)
        self._penalty: RepetitionPenaltyLogitsProcessor | None = None
        if params.repetition_penalty is not None and params.repetition_penalty != 1:
            self._penalty = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
            # The penalty asks which tokens occurred, not how often: a long prompt is kept as its distinct ids.
            self._seen = set(prompt_ids)
            self._seen_ids = torch.tensor([sorted(self._seen)], dtype=torch.long)  # [1, distinct]

    def pick(self, logits: torch.Tensor) -> int:
        """The next token for logits [V] of any float type, on any device. Raises ModelError if they hold no number."""
        _want_numbers(logits)
        if self._greedy and self._penalty is None:
            return int(logits.argmax())
        scores = logits.detach().to("cpu", torch.float32)[None]  # [1, V]
        if self._penalty is not None:
            scores = self._penalty(self._seen_ids, scores)
            _want_numbers(scores)
        token = int(scores.argmax()) if self._greedy else self._draw(scores)
        if self._penalty is not None:
            self._remember(token)
        return token

    def _draw(self, scores: torch.Tensor) -> int:
        # From the maximum down, so that dividing by a small temperature overflows to −inf, never to +inf.
        scores = self._warpers(torch.LongTensor(1, 0), scores - scores.max())  # these warpers look at no ids
        probabilities = scores.softmax(-1)
        _want_numbers(probabilities)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def _remember(self, token: int) -> None:
        if token not in self._seen:
            self._seen.add(token)
            self._seen_ids = torch.cat([self._seen_ids, torch.tensor([[token]])], dim=1)
