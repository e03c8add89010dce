"""Another way to sample in the middle of a sequence: what it reads is what an engine loaded for that would read."""

from __future__ import annotations

import pytest

from magicpig_cli.config import AttentionOptions
from magicpig_cli.errors import UsageError

PROMPT = [(7 * i) % 250 + 3 for i in range(900)]


def filled(engine):
    sequence = engine.new_sequence()
    list(engine.runner.prefill(sequence, PROMPT))
    return sequence


def step(engine, sequence):
    done = engine.runner.decode([sequence], [5])
    sequence.truncate(len(PROMPT))
    return done


def test_budget_target_and_exact_attention_change_what_the_next_step_reads(tiny_engine):
    engine, other = tiny_engine(mode="rabitq"), tiny_engine(mode="rabitq", budget=0.3)
    sequence, known = filled(engine), filled(other)
    first = step(engine, sequence)
    engine.sample_as(AttentionOptions(budget=0.3))
    assert engine.plan.budget == 0.3
    changed, wanted = step(engine, sequence), step(other, known)
    assert changed.sampled == wanted.sampled > first.sampled
    assert (changed.logits == wanted.logits).all()

    engine.sample_as(AttentionOptions(mode="exact"))
    assert engine.sampler is None
    assert step(engine, sequence).stats.sampled_ratio is None

    engine.sample_as(AttentionOptions(target_error=1e-6))
    for _ in range(3):
        raised = step(engine, sequence)
    assert raised.sampled > first.sampled
    engine.sample_as(AttentionOptions())
    again = step(engine, sequence)  # what was learnt for the target is not used
    assert again.sampled == first.sampled
    assert (again.logits == first.logits).all()


@pytest.mark.parametrize("mode", ["lsh", "exact"])
def test_options_of_another_sampler_are_refused(tiny_engine, mode):
    engine = tiny_engine(mode=mode)
    before = engine.plan
    with pytest.raises(UsageError, match=f"options of rabitq, and attention is {mode} here"):
        engine.sample_as(AttentionOptions(budget=0.1))
    with pytest.raises(UsageError, match="no share of the keys"):
        engine.sample_as(AttentionOptions(budget=3.0))
    assert engine.plan == before
