"""Histograms over the angle give what the float64 formulas give key by key; captures are what steps attend with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from magicpig_cli.attention.base import LogitRule
from magicpig_cli.attention.estimator import (
    collision_probability,
    cosine,
    inclusion_probability,
    predicted_error,
)
from magicpig_cli.tuning.angles import TableCurve, measure_angles, total
from magicpig_cli.tuning.capture import SHARES, Capture, depths
from tests import tolerances

SIZES = [(1, 2), (6, 40), (10, 150), (16, 1000), (16, 2)]


def direct(capture: Capture, number: int, K: int, L: int) -> dict[str, float]:
    """Ratio, error and visited ids of one layer, by the formulas of DESIGN.md, pair by pair in float64."""
    layer = capture.layer(number)
    rows, q = layer.rows.double().numpy(), layer.q.double().numpy()
    group = q.shape[2] // rows.shape[0]
    ratios, squares, visits = [], [], []
    for depth, (length, offloaded) in enumerate(zip(capture.lengths, capture.offloaded, strict=True)):
        middle = slice(capture.sink, capture.sink + offloaded)
        for step in range(q.shape[1]):
            for head in range(q.shape[2]):
                keys, values = rows[head // group, : length + step + 1].transpose(1, 0, 2)
                logits = layer.rule.scale * keys @ q[depth, step, head]
                if layer.rule.softcap:
                    logits = layer.rule.softcap * np.tanh(logits / layer.rule.softcap)
                w = np.exp(logits - logits.max())
                w /= w.sum()
                cos = cosine(q[depth, step, head], keys[middle] - keys[middle].mean(axis=0))
                u = inclusion_probability(cos, K, L)
                ratios.append(u.mean() * offloaded)
                squares.append(predicted_error(w[middle], u, values[middle], w @ values) ** 2)
                visits.append(L * collision_probability(np.arccos(np.clip(cos, -1, 1)), K).sum())
    keys_seen = sum(capture.offloaded) * len(ratios) / len(capture.offloaded)
    return {
        "ratio": sum(ratios) / keys_seen, "error": float(np.sqrt(np.mean(squares))), "visited": float(np.mean(visits)),
    }  # fmt: skip


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("K", "L"), SIZES)
def test_histograms_give_the_direct_formulas(captured, K, L, softcap):
    rules = {number: LogitRule(rule.scale, softcap) for number, rule in captured.rules.items()}
    capture = replace(captured, rules=rules)
    angles = total(measure_angles(capture, capture.layer(1)))
    curve, wanted = TableCurve.of(K, L), direct(capture, 1, K, L)
    for name in ("ratio", "error", "visited"):
        assert getattr(curve, name)(angles) == pytest.approx(wanted[name], rel=tolerances.HISTOGRAM), name


def test_every_key_is_counted_once_for_each_head_and_step(captured):
    for layer in captured.queries:
        for angles, offloaded in zip(measure_angles(captured, captured.layer(layer)), captured.offloaded, strict=True):
            assert angles.pairs == captured.steps * 4
            assert angles.keys.sum() == pytest.approx(offloaded * angles.pairs, rel=1e-12)


def test_depths_end_at_a_flush_and_leave_room_for_the_steps(engine):
    plan = engine.plan
    for context in (400, 1000, 1024, 4096, 100_000):
        found = depths(plan, context, steps=16)
        for length in found:
            assert plan.offloaded(length) == length - plan.sink - plan.local
            assert plan.offloaded(length + 16) == plan.offloaded(length)
        assert context - plan.flush < found[-1] + 16 <= context
        assert len(found) <= len(SHARES)
        assert list(found) == sorted(set(found))


def test_captured_steps_are_those_of_a_prefill(engine, captured):
    """Rows equal those of one prefill over the same tokens up to rounding, wherever decode steps came between."""
    sequence = engine.new_sequence()
    list(engine.runner.prefill(sequence, captured.sequence.ids))
    assert captured.tokens == sequence.length
    for number in captured.queries:
        mine, theirs = captured.layer(number).rows, sequence.layers[number].copy_rows()
        size = theirs.norm(dim=-1)
        assert ((mine - theirs).norm(dim=-1) <= tolerances.LOGITS * tolerances.U * size).all()
        assert captured.queries[number].shape == (len(captured.lengths), 4, 4, 16)
        assert captured.queries[number].dtype == torch.float32
