"""How this machine is measured: what is read, what is counted, and that real probes give figures of this world."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from magicpig_cli import hardware, kernels, speed_probe
from magicpig_cli.config import DEFAULT_K, DEFAULT_L
from magicpig_cli.kernels.memory import HUGE_PAGE_BYTES
from magicpig_cli.sampler_probe import LookUps, per_id_and_visit
from magicpig_cli.speed_probe import (
    CACHE_FACTOR,
    FREE_SHARE,
    MAX_BUFFER_BYTES,
    MAX_ROUNDS,
    MIN_BUFFER_BYTES,
    MIN_ROUNDS,
    CpuShare,
    Walk,
    buffer_size,
    filled_buffer,
    medians,
)

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("free", "cache", "wanted"),
    [
        (64 * GIB, 32 * MIB, 128 * MIB),
        (64 * GIB, 260 * MIB, MAX_BUFFER_BYTES),
        (64 * GIB, 1100 * MIB, MAX_BUFFER_BYTES),
        (2 * GIB, 260 * MIB, 256 * MIB),
        (64 * GIB, 1 * MIB, MIN_BUFFER_BYTES),
        (0, 260 * MIB, MIN_BUFFER_BYTES),
        (1000 * MIB + 7, 260 * MIB, 125 * MIB),
    ],
)
def test_the_buffer_is_some_caches_large_and_a_small_part_of_what_is_free(free, cache, wanted):
    assert buffer_size(free, cache) == wanted
    assert wanted <= max(free // FREE_SHARE, MIN_BUFFER_BYTES)


def test_the_whole_buffer_is_written_in_pages_as_rows_have_them():
    buffer = filled_buffer(3 * MIN_BUFFER_BYTES // 2)
    assert buffer.nbytes == 3 * MIN_BUFFER_BYTES // 2
    assert buffer.ctypes.data % HUGE_PAGE_BYTES == 0
    assert (buffer == speed_probe.BYTE).all()


def test_a_buffer_that_takes_too_long_stays_as_large_as_it_is(monkeypatch):
    clock = itertools.count(0, 1000)
    monkeypatch.setattr(speed_probe.time, "perf_counter", lambda: next(clock))
    assert filled_buffer(4 * MIN_BUFFER_BYTES).nbytes == MIN_BUFFER_BYTES


def test_what_the_buffer_holds_is_finite_in_every_type():
    raw = torch.full((64,), speed_probe.BYTE, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        assert 0.7 < raw.view(dtype)[0].item() < 0.8
    assert raw.view(torch.int8)[0].item() == 63


def test_a_walk_comes_round_after_everything_else():
    walk = Walk(np.zeros(1 * MIB, dtype=np.uint8))
    sizes = itertools.cycle([256 * 1024, 64 * 1024, 100 * 1024])
    read = np.zeros(1 * MIB, dtype=np.int64)
    for size in itertools.islice(sizes, 30):
        piece = walk.next(size)
        assert piece.stop - piece.start == size
        assert 0 <= piece.start < piece.stop <= walk.size
        before = read[piece].max()
        read[piece] += 1
        assert read.max() - before <= 1  # none is read a third time before its piece is read a second time
    assert walk.rows.rows == 1 * MIB // speed_probe.ROW_BYTES


def test_sorted_rows_ascend_with_gaps_and_stay_in_their_part(monkeypatch):
    asked: list[np.ndarray] = []
    monkeypatch.setattr(kernels, "read_rows", lambda table, head, rows, threads: asked.append(rows) or 1000)
    walk = Walk(np.zeros(8 * MIB, dtype=np.uint8))
    rates = [speed_probe._sorted_rows(walk, 2, number) for number in (1, 2)]
    quarter = 2 * MIB // speed_probe.ROW_BYTES
    for part, rows in enumerate(asked):
        gaps = np.diff(rows)
        assert part * quarter <= rows[0] < rows[-1] < (part + 1) * quarter
        assert gaps.min() >= 1
        assert gaps.mean() == pytest.approx(speed_probe.ROW_GAP, rel=0.15)
        assert len(set(gaps)) > 10
        assert rates[part] == len(rows) * speed_probe.ROW_BYTES / 1e-6


def test_medians_leave_out_the_first_round_and_shrug_off_a_bad_one(monkeypatch):
    clock = itertools.count(0, 1000)
    monkeypatch.setattr(speed_probe.time, "perf_counter", lambda: next(clock))
    seen: list[str] = []

    def probe(name: str, figures):
        return lambda number: seen.append(name) or figures(number)

    found = medians({
        "a": probe("a", lambda number: 1e9 if number in (0, 3) else 5.0),
        "b": probe("b", lambda number: float(number)),
    })  # fmt: skip
    assert found == {"a": 5.0, "b": (1 + MIN_ROUNDS) / 2}
    assert seen == ["a", "b"] * (1 + MIN_ROUNDS)


def test_there_is_an_end_to_rounds(monkeypatch):
    monkeypatch.setattr(speed_probe.time, "perf_counter", lambda: 0.0)
    assert medians({"a": float})["a"] == (1 + MAX_ROUNDS) / 2


def test_share_of_the_cores(monkeypatch):
    wall, cpu = iter([0.0, 1.0, 5.0, 6.0]), iter([0.0, 1.5, 7.0, 7.5])
    monkeypatch.setattr(speed_probe.time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(speed_probe.time, "process_time", lambda: next(cpu))
    share = CpuShare(2)
    assert share.value == 1.0
    with share.counted():
        pass
    assert share.value == 0.75
    with share.counted():
        pass
    assert share.value == 0.5


def test_costs_of_ids_and_tables_are_told_apart():
    long, short = LookUps(4096, heads=2), LookUps(1024, heads=2)
    assert (long.ids, short.ids) == (DEFAULT_L * 4096 / 2**DEFAULT_K, DEFAULT_L * 1024 / 2**DEFAULT_K)
    times = [look.tables * 20 + look.ids * 1.5 for look in (long, short)]
    assert per_id_and_visit(long, times[0], short, times[1]) == pytest.approx((1.5, 20))


@pytest.mark.parametrize(("long_ns", "short_ns"), [(600.0, 900.0), (600.0, 600.0)])
def test_noise_does_not_make_costs_negative(long_ns, short_ns):
    long, short = LookUps(4096, heads=1), LookUps(1024, heads=1)
    assert per_id_and_visit(long, long_ns, short, short_ns) == (long_ns / long.ids, 0.0)
    count_ns, visit_ns = per_id_and_visit(long, 4 * 150.0, short, 100.0)
    assert count_ns > 0
    assert visit_ns == 0


def test_look_ups_count_what_they_say_and_visit_no_bucket_twice_before_all_others(monkeypatch):
    look = LookUps(4096, heads=32)
    asked: list[np.ndarray] = []
    attend = kernels.lsh_attend

    def spy(q, codes, groups, *rest, **more):
        asked.append(codes)
        return attend(q, codes, groups, *rest, **more)

    monkeypatch.setattr(kernels, "lsh_attend", spy)
    rounds = 2**DEFAULT_K // 32
    assert all(look.head_ns(number) > 0 for number in range(rounds))
    visited = np.concatenate([codes[0] for codes in asked])  # [2**K, L]
    assert (np.sort(visited, axis=0) == np.arange(2**DEFAULT_K)[:, None]).all()
    (segment,) = look._source.segments
    assert segment.ids.size / 2**DEFAULT_K == look.ids  # so all of them are counted once per turn


def test_products_are_those_of_decode(monkeypatch):
    """Each form of weights goes through the layer that multiplies it in a decode step."""
    walk = Walk(filled_buffer(MIN_BUFFER_BYTES))
    seen: list[tuple[torch.dtype, tuple[int, ...]]] = []
    forward = speed_probe.StoredLinear.forward

    def spy(self, x):
        out = forward(self, x)
        seen.append((self.weight.dtype, tuple(self.weight.shape)))
        assert out.shape == (1, self.weight.shape[0])
        assert torch.isfinite(out).all()
        return out

    monkeypatch.setattr(speed_probe.StoredLinear, "forward", spy)
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}
    with torch.inference_mode():
        for form in types:
            assert speed_probe._product(walk, form) > 0
    share = MIN_BUFFER_BYTES // speed_probe.PRODUCT_PART
    assert [dtype for dtype, _ in seen] == list(types.values())
    *plain, codes = [shape[0] * shape[1] * dtype.itemsize for dtype, shape in seen]
    assert plain == [share] * 3
    assert codes * 5 // 4 == pytest.approx(share, rel=0.01)  # beside them a scale and a minimum for 16 bytes


def test_this_machine():
    machine = hardware.probe()
    before = torch.get_num_threads()
    found = speed_probe.measure(1, machine.memory_free, hardware.cache_bytes())
    assert torch.get_num_threads() == before
    assert found.threads == 1
    assert MIN_BUFFER_BYTES <= found.buffer_bytes <= max(MIN_BUFFER_BYTES, machine.memory_free // FREE_SHARE)
    assert found.buffer_bytes <= CACHE_FACTOR * max(found.cache_bytes, MIN_BUFFER_BYTES)
    for speed in (found.sequential_bytes_s, found.gather_bytes_s, *found.product_bytes_s.values()):
        assert 1e7 < speed < 1e12
    assert 1e8 < found.prompt_multiply_adds_s < 1e13
    assert 0.05 < found.count_ns < 1000
    assert 0.05 < found.operator_us < 1000
    assert (found.host_to_device_bytes_s, found.device_to_host_bytes_s) == (None, None)
    assert 0 < found.cpu_share <= 1


def test_torch_threads_come_back_after_an_error(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(speed_probe, "medians", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        speed_probe.measure(before + 1, 0, 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("tier", ["reference", *kernels.isa.runnable()])
def test_every_tier_can_be_measured(monkeypatch, tier):
    monkeypatch.setattr(kernels.isa, "_backend", kernels.isa.load(tier))
    monkeypatch.setattr(speed_probe, "MIN_ROUNDS", 1)
    monkeypatch.setattr(speed_probe, "ROUNDS_S", 0.0)
    found = speed_probe.measure(2, 0, 1)
    assert found.buffer_bytes == MIN_BUFFER_BYTES
    assert found.gather_bytes_s > 0
    assert found.count_ns > 0
