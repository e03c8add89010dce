"""Copies between host and device, waited for neither too early nor too late, on a device made for finding that out."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.layer import LayerCache, LayerSpec
from magicpig_cli.cache.ring_shape import DEPTH
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.store import RowStore
from magicpig_cli.cache.window import WindowShape
from tests.fake_device import FakeDevice

SLOW = 0.01


def slow(direction: str):
    return lambda asked, _: SLOW if asked == direction else 0.0


def on_device(staging: Staging, *values: float) -> torch.Tensor:
    return staging.to_device(torch.tensor(values))


def test_on_a_cpu_nothing_is_copied():
    staging, tensor, came = Staging(torch.device("cpu")), torch.ones(3), []
    assert staging.to_device(tensor) is staging.to_host(tensor) is tensor
    assert staging.bring("x", tensor, then=came.append).wait()[0] is came[0] is tensor
    with staging.sent("x", tensor) as (there,):
        assert there is tensor
    assert [rows is tensor for _, rows in staging.stream("x", [(0, tensor)])] == [True]
    assert staging.mark() is None
    staging.settle()


def test_who_waits_has_what_was_brought_and_who_does_not_has_poison():
    staging = Staging(device := FakeDevice(slow("back")))
    arrival = staging.bring("x", on_device(staging, 1.0, 2.0), staging.to_device(torch.tensor([7], dtype=torch.int16)))
    assert arrival._tensors[0].isnan().all()
    floats, codes = arrival.wait()
    assert (floats.tolist(), codes.tolist(), codes.dtype) == ([1.0, 2.0], [7], torch.int16)
    assert device.problems == []


def test_what_is_to_be_done_is_done_once_and_before_the_buffer_is_used_again():
    staging, came = Staging(FakeDevice(slow("back"))), []
    arrivals = [
        staging.bring("x", on_device(staging, float(n)), then=lambda x: came.append(x.item())) for n in range(DEPTH + 2)
    ]
    assert came == [0.0, 1.0]
    arrivals[2].settle()
    staging.settle()
    staging.settle()
    assert came == [0.0, 1.0, 2.0, 3.0]


def test_what_an_interrupt_has_stopped_is_done_again():
    staging, came = Staging(FakeDevice()), []

    def take(tensor: torch.Tensor) -> None:
        came.append(tensor.item())
        if len(came) == 1:
            raise KeyboardInterrupt

    arrival = staging.bring("x", on_device(staging, 5.0), then=take)
    with pytest.raises(KeyboardInterrupt):
        arrival.settle()
    staging.settle()
    assert came == [5.0, 5.0]


def test_what_was_sent_may_be_changed_at_once():
    staging = Staging(device := FakeDevice(slow("there")))
    host, sums = torch.tensor([1.0, 2.0]), []
    for number in range(2 * DEPTH + 1):
        host.fill_(number)
        with staging.sent("x", host, torch.tensor([number])) as (floats, integers):
            host.fill_(-1)
            sums.append(floats.sum() + integers.sum())
    assert [float(staging.to_host(total)) for total in sums] == [3.0 * n for n in range(2 * DEPTH + 1)]
    assert device.problems == []


def test_a_host_that_runs_ahead_overwrites_nothing_that_is_still_to_be_copied():
    staging = Staging(device := FakeDevice(slow("there")))
    device.host_runs_ahead = True
    for number in range(2 * DEPTH + 1):
        with staging.sent("x", torch.tensor([float(number)])):
            pass
    staging.settle()
    block = torch.zeros(4)  # neither pinned nor kept by anybody
    for number, _ in staging.stream("y", ((n, block.fill_(n)) for n in range(2 * DEPTH + 1))):
        assert number <= 2 * DEPTH
    staging.settle()
    sent = [float(part[:4].view(torch.float32)) for part in device.made]
    assert sent == [float(n) for n in range(2 * DEPTH + 1)] * 2


@pytest.mark.parametrize("pins", [True, False])
def test_while_one_block_is_used_the_next_one_is_copied(pins):
    staging = Staging(device := FakeDevice(slow("there"), pins=pins))
    blocks = [np.full((2, 3), n, dtype=np.float32) for n in range(6)]
    for block in blocks:
        staging.pin(block)
    seen, given = [], []
    for label, there in staging.stream("x", ((n, torch.from_numpy(block)) for n, block in enumerate(blocks))):
        given.append(device.copies["there"] - label)
        seen.append((there + label).sum())
    assert [float(staging.to_host(total)) for total in seen] == [12.0 * n for n in range(6)]
    assert given == [2, 2, 2, 2, 2, 1]
    assert device.held["pinned"] == 0  # pinned blocks are copied from where they lie, and others cannot be pinned
    assert device.problems == []


def test_a_part_of_a_block_goes_by_way_of_a_pinned_buffer():
    staging = Staging(device := FakeDevice())
    block = np.arange(24, dtype=np.float32).reshape(2, 6, 2)
    staging.pin(block)
    part = torch.from_numpy(block)[:, 1:4]
    ((_, there),) = [(n, rows.clone()) for n, rows in staging.stream("x", [(0, part)])]
    assert torch.equal(staging.to_host(there), part)
    assert device.held["pinned"] == 64


def test_a_steady_state_allocates_nothing_and_a_larger_batch_once():
    staging = Staging(device := FakeDevice())

    def step(size: int) -> int:
        before = device.allocations
        for _ in range(3):
            with staging.sent("x", torch.zeros(size)):
                pass
        return device.allocations - before

    assert [step(size) for size in (16, 16, 32, 16, 32)] == [DEPTH, 0, DEPTH, 0, 0]
    assert device.held["buffers"] == device.held["pinned"] == DEPTH * 128


def test_a_refusal_to_pin_is_said_once_and_nothing_is_asked_for_any_more():
    staging = Staging(device := FakeDevice(pins=False))
    memory = np.zeros(64, dtype=np.uint8)
    for _ in range(2):
        staging.pin(memory)
        assert staging.bring("x", on_device(staging, 4.0)).wait()[0].tolist() == [4.0]
    (notice,) = staging.new_notices()
    assert "pinned" in notice
    device.pins = True
    staging.pin(memory)
    assert device.held["blocks"] == 0


def test_memory_is_unpinned_when_the_last_array_over_it_is_gone():
    staging = Staging(device := FakeDevice())
    pool = BlockPool(1, 8, "float32", 4, staging.pin)
    store = RowStore(pool)
    store.append(torch.ones(1, 3, 2, 8))
    slab = device.held["blocks"]
    assert slab >= pool.block_bytes
    rows = next(store.stored(0, 1))
    store.truncate(0)
    gc.collect()
    assert device.held["blocks"] == slab
    del rows
    gc.collect()
    assert device.held["blocks"] == 0


def test_rows_on_their_way_are_waited_for_by_whoever_reads_or_moves_them():
    readers = {
        "stored": lambda store: np.concatenate(list(store.stored(0, 12)), axis=1),
        "read": lambda store: store.read(0, 12).numpy(),
        "kernels": lambda store: store.table.read(0, 12),
        "fork": lambda store: store.fork()._table.read(0, 12),
        "cut": lambda store: store.truncate(12) or store._table.read(0, 12),
    }
    wanted = torch.arange(12.0).repeat_interleave(8).view(1, 12, 2, 4)
    for name, read in readers.items():
        staging = Staging(device := FakeDevice(slow("back")))
        store = RowStore(BlockPool(1, 4, "float32", 8))
        rows = staging.to_device(wanted.clone())
        store.append_from(12, lambda *, then, rows=rows, staging=staging: staging.bring("rows", rows, then=then))
        assert np.array_equal(read(store), wanted.numpy()), name
        assert device.problems == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_layer_on_a_device_holds_what_one_on_the_host_holds(dtype):
    """Rows come in chunks and one by one and are cut, with slow copies; read by pieces on the device and at once."""
    shape, row_type = WindowShape(2, 4, 4), torch.float32 if dtype == "float32" else torch.bfloat16
    device = FakeDevice(slow("back"))
    layers = [
        LayerCache(LayerSpec(2, 8), shape, BlockPool(2, 8, dtype, 8), staging)
        for staging in (Staging(torch.device("cpu")), Staging(device))
    ]
    draw = torch.Generator().manual_seed(0)
    for kind, amount in (("more", 30), ("one", 9), ("cut", 11), ("more", 7), ("one", 3), ("cut", 30), ("more", 50)):
        rows = torch.randn(2, amount, 2, 8, generator=draw).to(row_type)
        for layer in layers:
            given = layer._staging.to_device(rows)
            if kind == "more":
                layer.extend(given)
            elif kind == "cut":
                layer.truncate(layer.length - amount)
            else:
                for row in given.unbind(1):
                    layer.append_one(*row.unbind(1))
        there = [(at, layers[1]._staging.to_host(piece)) for at, piece in layers[1].pieces_there()]
        here = list(layers[0].pieces(at_most=8))
        assert [at for at, _ in there] == [at for at, _ in here]
        assert all(torch.equal(a.float(), b.float()) for (_, a), (_, b) in zip(there, here, strict=True))
        assert torch.equal(layers[0].copy_rows(), layers[1].copy_rows())
    assert device.problems == []
