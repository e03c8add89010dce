"""Ways to attend with one layer, taking turns: data cold, code warm, every repetition with another step's queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from magicpig_cli.bench.layer_tensors import IndexedLayer
from magicpig_cli.bench.timing import ColdCache, Timed, interleave

Attend = Callable[[int], Any]  # with the queries of this step
Way = Callable[[IndexedLayer], Attend]  # prepares a layer


def in_turns(layer: IndexedLayer, ways: Mapping[str, Way], reps: int, cold: ColdCache) -> dict[str, list[Timed]]:
    """Repetition i of each way attends with step i modulo the steps of the layer.

    Before each call the caches are driven out, then the same way attends over a few other rows. A decode step makes
    this call once per layer, so code and interpreter are warm there, rows and tables are not. With both cold a call
    costs 0.15–0.25 ms more whatever it does (demo shape at 8k: 470 instead of 235 µs for lsh, 600 instead of 470 for
    exact), which would be most of what is measured.
    """
    steps = layer.tensors.steps
    calls = {name: way(layer) for name, way in ways.items()}
    others = {name: way(layer.few) for name, way in ways.items()}

    def between(name: str) -> None:
        cold()
        others[name](0)

    return interleave({name: _in_rotation(call, steps) for name, call in calls.items()}, reps, between)


def _in_rotation(call: Attend, steps: int) -> Attend:
    return lambda rep: call(rep % steps)
