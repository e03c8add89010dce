"""Decoder blocks that a decode step on a CPU computes by two calls of the kernels, one on each side of attention.

The families' own code takes some 25 small operators and a dozen modules for a block: with a small model as long as all
its products (docs/decisions/013). Which blocks the kernels can compute is no list of families. A block's parts are
found by their names; then both ways are run on the same input, block by block, when the model is loaded. Where
attention is given the same, and the same comes out within the rounding of float32, the kernels compute decode steps
from then on. Other blocks, and all prompt chunks, run their own code.

Blocks between which the model does nothing are computed by the first of them, so that nothing becomes a tensor on the
way; the others hand on what they are given.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from magicpig_cli import kernels
from magicpig_cli.attention.base import LogitRule
from magicpig_cli.cache.store import as_array
from magicpig_cli.kernels import Activation, Norm
from magicpig_cli.model import hook
from magicpig_cli.model.stored import Part, StoredLinear, weights_of
from magicpig_cli.model.trial import Attended, Trial, close

Rotary = tuple[torch.Tensor, torch.Tensor]  # cosine and sine, float32 [B or 1, 1, R]

_POSITIONS = (3, 1234)  # of the tokens that both ways are run on
# Of the largest value: what differs less is rounding. Measured 1e-6, and a residual left out is 1. Before int4 weights
# vectors are rounded too, and a value that lies between two integers may go to either, which makes 1e-3.
_SAME, _SAME_INT4 = 1e-4, 0.02


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a block's own forward in a trial."""

    x: torch.Tensor  # [B, 1, E]
    rotary: Rotary
    attended: Attended
    out: torch.Tensor


class _Angles:
    """Rotary angles as the kernels take them: a forward gives all of its blocks the same tensors."""

    def __init__(self) -> None:
        self._last: Rotary | None = None  # kept, so that no other tensor is it
        self._arrays: tuple[np.ndarray, np.ndarray] | None = None

    def arrays(self, rotary: Rotary, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and sine, float32 [count, R]."""
        last, arrays = self._last, self._arrays
        if last is None or arrays is None or last[0] is not rotary[0] or last[1] is not rotary[1]:
            cosine, sine = (part.expand(count, 1, -1).reshape(count, -1).contiguous().numpy() for part in rotary)
            self._last, self._arrays = rotary, (arrays := (cosine, sine))
        return arrays


@dataclass(frozen=True, slots=True)
class _Step:
    """A block as the kernels compute it, and how its attention is called."""

    block: kernels.Block
    angles: _Angles | None  # None: some layers of some families have no positions
    layer: int
    window: int | None
    rule: LogitRule

    def inputs(self, x: np.ndarray, rotary: Rotary) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q [B, H, D], k and v [B, Hkv, D] of x [B, E]."""
        angles = None if self.angles is None else self.angles.arrays(rotary, len(x))
        return kernels.block_inputs(x, self.block, angles, threads=torch.get_num_threads())

    def output(self, x: np.ndarray, attended: np.ndarray) -> np.ndarray:
        """[B, E] of x [B, E] and attention's [B, H, D]."""
        return kernels.block_output(x, attended.reshape(len(x), -1), self.block, threads=torch.get_num_threads())


@dataclass(frozen=True, slots=True)
class _Computed:
    """A block that the kernels can compute, and what its own forward did in the trial."""

    layer: nn.Module
    step: _Step
    call: _Call

    def follows(self, before: _Computed) -> bool:
        """Whether it is given what the one before gives, as that gives it, with the same angles."""
        same_angles = all(a is b for a, b in zip(self.call.rotary, before.call.rotary, strict=True))
        return same_angles and torch.equal(self.call.x, before.call.out)

    def take_over(self, steps: list[_Step]) -> None:
        """In decode steps compute these in place of the block: of a run of blocks all by its first one."""
        self.layer.forward = functools.partial(_forward, self.layer.forward, steps)


def compute_by_kernels(model: PreTrainedModel) -> int:
    """Let the kernels compute the decode steps of all blocks of which they have shown that they can; how many that are.

    The model's linear layers are held by `linear.hold`.
    """
    found = {layer: block for layer in model.modules() if (block := _parts_of(layer, model.config.get_text_config()))}
    if not found:
        return 0
    runs: list[list[_Computed]] = []
    angles = _Angles()
    for layer, call in _own_calls(model, list(found)).items():
        for turned in (angles, None):
            attended = call.attended
            step = _Step(found[layer], turned, attended.layer, attended.window, attended.rule)
            if _same(step, call):
                one = _Computed(layer, step, call)
                if runs and one.follows(runs[-1][-1]):
                    runs[-1].append(one)
                else:
                    runs.append([one])
                break
    for first, *others in runs:
        first.take_over([first.step, *(other.step for other in others)])
        for other in others:
            other.take_over([])
    return sum(map(len, runs))


def _forward(own: Callable[..., Any], steps: list[_Step], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A block's forward: in a decode step what the kernels compute of it and of those that follow, else its own."""
    magicpig: hook.Attends | None = kwargs.get("magicpig")
    if magicpig is None or magicpig.prefill:
        return own(x, *args, **kwargs)
    if not steps:
        return x
    rows = x.view(x.shape[0], -1).numpy()
    for step in steps:
        q, k, v = step.inputs(rows, kwargs["position_embeddings"])
        rows = step.output(rows, magicpig.attend_here(step.layer, step.window, q, k, v, step.rule))
    return torch.from_numpy(rows[:, None])


# Both ways, side by side


def _own_calls(model: PreTrainedModel, layers: list[nn.Module]) -> dict[nn.Module, _Call]:
    """What these blocks compute by their own forward in one decode step of the model; without those that fail."""
    calls: dict[nn.Module, _Call] = {}
    trial = Trial()

    def note(layer: nn.Module, own: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        before = len(trial.seen)
        out = own(x, *args, **kwargs)
        rotary = kwargs.get("position_embeddings")
        if len(trial.seen) == before + 1 and isinstance(out, torch.Tensor) and isinstance(rotary, tuple):
            calls[layer] = _Call(x, rotary, trial.seen[-1], out)
        return out

    with _instead_of_forward(layers, note):
        run_trial(model, trial)
    return calls


def run_trial(model: PreTrainedModel, trial: Trial | None = None) -> None:
    """One decode step of two tokens, in which attention only notes what it is given. Raises what the model raises."""
    ids = torch.arange(len(_POSITIONS), device=model.device).unsqueeze(1) + 1
    positions = torch.tensor(_POSITIONS, device=model.device).unsqueeze(1)
    with torch.inference_mode():
        hook.run(model, ids, positions, trial or Trial())


@contextmanager
def _instead_of_forward(layers: list[nn.Module], call: Callable[..., Any]) -> Iterator[None]:
    """Have `call(layer, its own forward, …)` called for a while."""
    own = [layer.forward for layer in layers]
    try:
        for layer, forward in zip(layers, own, strict=True):
            layer.forward = functools.partial(call, layer, forward)
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            layer.forward = forward


def _same(step: _Step, call: _Call) -> bool:
    """Whether the kernels give attention the same as the block's own code, and the same comes out."""
    x = call.x[:, 0].contiguous().numpy()
    try:
        given = step.inputs(x, call.rotary)
        attended = call.attended.result()[:, 0].contiguous().numpy()
        out = torch.from_numpy(step.output(x, attended)[:, None])
    except (TypeError, ValueError):  # sizes that the kernels do not know
        return False
    wanted = call.attended.q, call.attended.k, call.attended.v
    tensors = [torch.from_numpy(part).unsqueeze(2) for part in given]
    pairs = [*zip(tensors, wanted, strict=True), (out - call.x, call.out - call.x)]
    bound = _SAME_INT4 if step.block.rounds_vectors else _SAME
    return all(close(a, b, bound) for a, b in pairs)


# What a block is made of


class _Unknown(Exception):
    """A part is missing, or not as the kernels know it."""


def _parts_of(layer: nn.Module, config: Any) -> kernels.Block | None:
    """The block of the kernels with this layer's weights; None if it has other parts than they know."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    try:
        head_dim = int(getattr(attention, "head_dim", 0))
        qkv, output = _qkv(attention, config, head_dim), _whole(attention, "o_proj")
        gate_up, down = _gate_up(mlp), _whole(mlp, "down_proj")
        if any(part.layer.bias is not None for part in (*gate_up, *output, *down)):
            return None
        return kernels.Block(
            heads=qkv[0].rows // head_dim, kv_heads=qkv[1].rows // head_dim, head_dim=head_dim,
            qkv=weights_of(qkv), qkv_bias=_bias(qkv), output=weights_of(output), gate_up=weights_of(gate_up),
            down=weights_of(down), activation=_activation(mlp), q_norm=_norm(attention, "q_norm"),
            k_norm=_norm(attention, "k_norm"), **_norms(layer),
        )  # fmt: skip
    except (_Unknown, TypeError, ValueError):  # the latter: sizes that the door to the kernels refuses
        return None


def _whole(owner: nn.Module | None, name: str) -> list[Part]:
    """A linear layer of `owner`."""
    layer = getattr(owner, name, None)
    if not isinstance(layer, StoredLinear):
        raise _Unknown(name)
    return [Part(layer, 0, layer.weight.shape[0])]


def _cut(part: Part, *rows: int) -> list[Part]:
    """Parts of so many rows each, which is all of it."""
    ends = list(itertools.accumulate(rows))
    if not ends or min(rows) < 1 or ends[-1] != part.stop:
        raise _Unknown("rows")
    return [Part(part.layer, stop - count, stop) for count, stop in zip(rows, ends, strict=True)]


def _qkv(attention: nn.Module | None, config: Any, head_dim: int) -> list[Part]:
    if not head_dim:
        raise _Unknown("head_dim")
    if not hasattr(attention, "qkv_proj"):
        return [*_whole(attention, "q_proj"), *_whole(attention, "k_proj"), *_whole(attention, "v_proj")]
    heads, kv_heads = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    (all_three,) = _whole(attention, "qkv_proj")
    return _cut(all_three, heads, kv_heads, kv_heads)


def _gate_up(mlp: nn.Module | None) -> list[Part]:
    if not hasattr(mlp, "gate_up_proj"):
        return [*_whole(mlp, "gate_proj"), *_whole(mlp, "up_proj")]
    (both,) = _whole(mlp, "gate_up_proj")
    return _cut(both, both.rows // 2, both.rows // 2)


def _bias(parts: list[Part]) -> np.ndarray | None:
    """float32, of all parts one after the other."""
    biases = [part.layer.bias for part in parts]
    if all(bias is None for bias in biases):
        return None
    if any(bias is None for bias in biases):
        raise _Unknown("bias")
    return np.concatenate([as_array(part.layer.bias.detach())[part.start : part.stop] for part in parts])  # type: ignore[union-attr]


def _activation(mlp: nn.Module | None) -> Activation:
    """Which of the kernels' activations an MLP has, by what it gives."""
    own = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    x = torch.linspace(-8, 8, 129)
    known: dict[Activation, torch.Tensor] = {
        "silu": nn.functional.silu(x), "gelu_tanh": nn.functional.gelu(x, approximate="tanh"),
    }  # fmt: skip
    for name, wanted in known.items():
        if callable(own) and torch.allclose(own(x), wanted, rtol=0, atol=1e-6):
            return name
    raise _Unknown("activation")


def _norms(layer: nn.Module) -> dict[str, Norm | None]:
    """The norms of a block by where they stand: the same name means two places in different families."""
    sandwich = hasattr(layer, "post_feedforward_layernorm")
    after_attention, before_mlp = "post_attention_layernorm", "pre_feedforward_layernorm"
    return {
        "before_attention": _norm(layer, "input_layernorm"),
        "after_attention": _norm(layer, after_attention) if sandwich else None,
        "before_mlp": _norm(layer, before_mlp if sandwich else after_attention),
        "after_mlp": _norm(layer, "post_feedforward_layernorm"),
    }


def _norm(owner: nn.Module | None, name: str) -> Norm | None:
    """An RMS norm, whose factor is its weight or, in Gemma, one more than that."""
    module = getattr(owner, name, None)
    if module is None:
        return None
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or eps is None:
        raise _Unknown(name)
    x = torch.linspace(-1, 1, len(weight)).unsqueeze(0)
    given = module(x)
    for factor in (weight, 1 + weight):
        if torch.allclose(given, nn.functional.rms_norm(x, x.shape[1:], factor, eps), rtol=1e-5, atol=1e-6):
            return Norm(as_array(factor.detach()), eps)
    raise _Unknown(name)
