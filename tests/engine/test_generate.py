"""Generation over several requests: slots, limits, stops, interruption, reuse of earlier turns, independence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from magicpig_cli.config import GenerationOptions
from magicpig_cli.engine.engine import Engine, Request
from magicpig_cli.errors import ContextError
from magicpig_cli.events import Failed, Finished, PrefillProgress, StepStats, TokenEvent
from magicpig_cli.model import blocks, linear
from magicpig_cli.model.segments import Segments
from magicpig_cli.ui.answer import Interrupts, stream_answer
from tests.model.fake_graphs import FakeGraphs

GREEDY = GenerationOptions(max_tokens=12, temperature=0.0)


def ask(engine: Engine, key: str, ids: list[int], options: GenerationOptions = GREEDY, **kwargs) -> Request:
    return engine.request(key, ids, options, **kwargs)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [3 + (i * 7 + seed * 31 + i * i) % 250 for i in range(length)]


def answers(engine: Engine, requests: list[Request], batch_size: int) -> dict[str, Finished]:
    events = engine.generate(requests, batch_size)
    return {event.key: event for event in events if isinstance(event, Finished)}


def test_events_of_one_answer_in_order(tiny_engine):
    engine = tiny_engine()
    events = list(engine.generate([ask(engine, "a", prompt(700))]))
    kinds = [type(event) for event in events]
    assert kinds[0] is PrefillProgress
    assert kinds[-1] is Finished
    progress = [event.done for event in events if isinstance(event, PrefillProgress)]
    assert progress == [0, 512, 700]
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    done = events[-1]
    assert tuple(token.token_id for token in tokens) == done.token_ids
    assert "".join(token.text for token in tokens) + done.tail == done.text
    assert done.reason == "length"
    assert len(done.token_ids) == 12
    # The first token comes from the prompt's last logits, each further one from a step.
    assert kinds.count(StepStats) == 11 == len(done.timing.tpot_ms)
    assert done.prompt_tokens == 700
    assert done.reused_tokens == 0


@pytest.mark.parametrize(
    ("mode", "options"),
    [("exact", {}), ("lsh", {}), ("rabitq", {}), ("rabitq", {"target_error": 0.2}), ("lsh", {"tail": 0.5})],
)
def test_neighbours_do_not_change_an_answer(tiny_engine, mode, options):
    engine = tiny_engine(mode, K=4, L=20, **options)
    lengths = (5, 400, 70, 333, 1, 64, 69)
    requests = [ask(engine, str(i), prompt(n, seed=i)) for i, n in enumerate(lengths)]
    alone = {r.key: answers(engine, [r], 1)[r.key] for r in requests}
    for batch_size in (2, 3, 7):
        together = answers(engine, requests, batch_size)
        for key, finished in alone.items():
            assert together[key].token_ids == finished.token_ids
            assert together[key].sampled == finished.sampled
            assert together[key].offloaded == finished.offloaded
            assert together[key].error_estimate == finished.error_estimate
            assert together[key].budget == finished.budget


def test_next_request_starts_when_a_slot_is_free(tiny_engine):
    engine = tiny_engine()
    short = GenerationOptions(max_tokens=2, temperature=0.0)
    requests = [ask(engine, "long", prompt(9)), *(ask(engine, f"short{i}", prompt(9, i), short) for i in range(3))]
    batches = [event.batch for event in engine.generate(requests, 2) if isinstance(event, StepStats)]
    assert max(batches) == 2
    assert len(batches) == 11  # the long one's steps; the short ones ran beside it
    order = [event.key for event in engine.generate(requests, 2) if isinstance(event, Finished)]
    assert order == ["short0", "short1", "short2", "long"]


def test_full_context_ends_with_length(tiny_engine):
    engine = tiny_engine(context=100)
    done = answers(engine, [ask(engine, "a", prompt(97), GenerationOptions(temperature=0.0))], 1)["a"]
    assert done.reason == "length"
    assert len(done.token_ids) == 3
    one = answers(engine, [ask(engine, "a", prompt(99), GenerationOptions(temperature=0.0))], 1)["a"]
    assert len(one.token_ids) == 1


def test_too_long_is_refused_with_both_numbers(tiny_engine):
    engine = tiny_engine(context=100)
    with pytest.raises(ContextError, match=r"90 prompt tokens \+ 12 answer tokens .* 100 tokens"):
        ask(engine, "a", prompt(90))
    with pytest.raises(ContextError, match="100 prompt tokens"):
        ask(engine, "a", prompt(100), GenerationOptions())


def test_a_request_that_cannot_run_fails_alone(tiny_engine):
    engine = tiny_engine(context=100)
    good = ask(engine, "good", prompt(20))
    bad = Request("bad", prompt(500), good.sampling)
    events = list(engine.generate([bad, good], 2))
    failed = [event for event in events if isinstance(event, Failed)]
    assert [(event.key, event.code) for event in failed] == [("bad", "ContextError")]
    assert "500" in failed[0].message
    assert [event.key for event in events if isinstance(event, Finished)] == ["good"]


def test_unusable_logits_fail_their_own_request_only(tiny_engine, monkeypatch):
    engine = tiny_engine()
    decode = engine.runner.decode

    def poisoned(sequences, tokens, *rest, **options):
        step = decode(sequences, tokens, *rest, **options)
        step = replace(step, logits=step.logits.clone())
        for row, sequence in enumerate(sequences):
            if sequence.ids[0] == 77 and sequence.length > 8:
                step.logits[row] = float("nan")
        return step

    monkeypatch.setattr(engine.runner, "decode", poisoned)
    events = list(engine.generate([ask(engine, "good", prompt(20)), ask(engine, "bad", [77, 5, 6])], 2))
    assert [event.key for event in events if isinstance(event, Failed)] == ["bad"]
    (good,) = (event for event in events if isinstance(event, Finished))
    assert len(good.token_ids) == 12


def test_second_turn_reads_only_what_is_new(tiny_engine):
    engine = tiny_engine()
    sequence = engine.new_sequence()
    first = answers(engine, [ask(engine, "1", prompt(300), sequence=sequence)], 1)["1"]
    history = prompt(300) + list(first.token_ids) + prompt(40, seed=9)
    second = answers(engine, [ask(engine, "2", history, sequence=sequence)], 1)["2"]
    assert second.reused_tokens == 300 + len(first.token_ids) - 1  # the last token was never fed
    fresh = answers(engine, [ask(engine, "3", history)], 1)["3"]
    assert second.token_ids == fresh.token_ids


def test_changed_history_keeps_the_common_prefix(tiny_engine):
    engine = tiny_engine()
    sequence = engine.new_sequence()
    answers(engine, [ask(engine, "1", prompt(300), sequence=sequence)], 1)
    edited = prompt(210) + prompt(50, seed=5)
    assert edited[210] != prompt(300)[210]
    again = answers(engine, [ask(engine, "2", edited, sequence=sequence)], 1)["2"]
    assert again.reused_tokens == 210
    assert again.token_ids == answers(engine, [ask(engine, "3", edited)], 1)["3"].token_ids
    # Asking the very same again runs only the last token.
    same = answers(engine, [ask(engine, "4", edited, sequence=sequence)], 1)["4"]
    assert same.reused_tokens == len(edited) - 1
    assert same.token_ids == again.token_ids


def test_cancel_while_decoding_keeps_what_is_there(tiny_engine):
    engine = tiny_engine()
    sequence = engine.new_sequence()
    events = engine.generate([ask(engine, "a", prompt(80), sequence=sequence)])
    seen = 0
    for event in events:
        if isinstance(event, TokenEvent):
            seen += 1
            if seen == 4:
                engine.cancel("a")
        if isinstance(event, Finished):
            done = event
    assert done.reason == "interrupted"
    assert 4 <= len(done.token_ids) <= 5
    assert sequence.length == 80 + len(done.token_ids) - 1


def test_cancel_while_prefilling_keeps_the_chunks_that_were_read(tiny_engine):
    engine = tiny_engine()
    sequence = engine.new_sequence()
    answers(engine, [ask(engine, "a", prompt(80), sequence=sequence)], 1)
    longer = prompt(80) + prompt(1500, seed=3)
    for event in engine.generate([ask(engine, "b", longer, sequence=sequence)]):
        if isinstance(event, PrefillProgress) and event.done > 580:
            engine.cancel("b")
        if isinstance(event, Finished):
            done = event
    assert done.reason == "interrupted"
    assert done.token_ids == ()
    assert 580 < sequence.length < len(longer)
    assert sequence.ids == longer[: sequence.length]
    assert {layer.length for layer in sequence.layers} == {sequence.length}
    read = sequence.length
    again = answers(engine, [ask(engine, "c", longer, sequence=sequence)], 1)["c"]
    assert again.reused_tokens == read
    assert again.token_ids == answers(engine, [ask(engine, "d", longer)], 1)["d"].token_ids


def test_abandoned_generator_leaves_a_usable_sequence(tiny_engine):
    engine = tiny_engine()
    sequence = engine.new_sequence()
    events = engine.generate([ask(engine, "a", prompt(1200), sequence=sequence)])
    for event in events:
        if isinstance(event, PrefillProgress) and event.done > 500:
            break
    events.close()
    assert {layer.length for layer in sequence.layers} == {sequence.length}
    done = answers(engine, [ask(engine, "b", prompt(1200), sequence=sequence)], 1)["b"]
    assert done.token_ids == answers(engine, [ask(engine, "c", prompt(1200))], 1)["c"].token_ids


def test_stop_string_ends_the_answer_before_it(tiny_engine):
    engine = tiny_engine()
    free = answers(engine, [ask(engine, "a", prompt(60), GenerationOptions(max_tokens=40, temperature=1.0, seed=1))], 1)
    text = free["a"].text
    stop = text[10:12]
    options = GenerationOptions(max_tokens=40, temperature=1.0, seed=1, stop=(stop,))
    stopped = answers(engine, [ask(engine, "a", prompt(60), options)], 1)["a"]
    assert stopped.reason == "stop"
    assert stopped.text == text[: text.index(stop)]


def test_same_seed_same_answer(tiny_engine):
    engine = tiny_engine()

    def drawn(seed: int | None, default_seed: int | None = None) -> Finished:
        options = GenerationOptions(max_tokens=20, temperature=1.5, seed=seed)
        return answers(engine, [ask(engine, "a", prompt(50), options, default_seed=default_seed)], 1)["a"]

    assert drawn(7).token_ids == drawn(7).token_ids
    assert drawn(7).token_ids != drawn(8).token_ids
    assert drawn(None, default_seed=7).token_ids == drawn(7).token_ids
    reported = drawn(None)
    assert drawn(reported.seed).token_ids == reported.token_ids


def test_auto_samples_long_sequences_only(tiny_engine):
    engine = tiny_engine("auto", K=4, L=20, context=2048)
    short = answers(engine, [ask(engine, "a", prompt(400))], 1)["a"]
    assert short.sampled_ratio is None
    assert engine.plan.auto_lsh_from > 400
    forced = tiny_engine("lsh", K=4, L=20)
    assert 0 < answers(forced, [ask(forced, "a", prompt(400))], 1)["a"].sampled_ratio < 1
    assert answers(forced, [ask(forced, "a", prompt(300))], 1)["a"].sampled_ratio is None  # fewer than 256 offloaded


def test_generated_tokens_enter_the_index(tiny_engine):
    engine = tiny_engine("lsh", K=4, L=20)
    sequence = engine.new_sequence()
    options = GenerationOptions(max_tokens=200, temperature=0.0)
    answers(engine, [ask(engine, "a", prompt(400), options, sequence=sequence)], 1)
    layer = sequence.layers[1]
    assert layer.store.length == engine.plan.offloaded(sequence.length)
    assert layer.index.length == layer.store.length
    assert sequence.index_bytes > 0
    assert sequence.layers[0].index is None  # layer 0 is dense


def test_answers_by_graphs_are_the_same_and_what_has_none_is_said_after_the_answer(tiny_engine, capsys, monkeypatch):
    monkeypatch.setattr(linear, "hold", lambda *_, **__: None)  # as on a GPU: layers of torch
    monkeypatch.setattr(blocks, "compute_by_kernels", lambda _: 0)
    engine = tiny_engine()
    requests = [("a", prompt(90)), ("b", prompt(70, 1)), ("c", prompt(80, 2))]
    wanted = answers(engine, [ask(engine, *request) for request in requests], batch_size=2)
    engine.runner.segments = Segments(engine.runner.model, FakeGraphs)
    found = answers(engine, [ask(engine, *request) for request in requests], batch_size=2)
    assert {key: done.token_ids for key, done in found.items()} == {key: d.token_ids for key, d in wanted.items()}
    assert engine.runner.segments.replayed > 12
    assert engine.new_notices() == []
    engine.runner.segments = Segments(engine.runner.model, lambda: FakeGraphs(fail_at=2))
    again = stream_answer(engine, ask(engine, *requests[0]), Interrupts(), show_text=False, quiet=False, live=False)
    assert again.token_ids == wanted["a"].token_ids
    assert "decode steps of 1 run without CUDA graphs, which is slower: CUDA out of memory" in capsys.readouterr().err
    assert engine.new_notices() == []
