"""What this machine does in a second, measured in less than two: memory, table look-ups, products and small operators.
Each through the code that does the work later: the kernels' probes, `model/stored.py`, torch.

Nothing may find in a cache what a real run would fetch from memory. So reads and products walk through one buffer of
several times the last-level cache, each going on where the one before stopped; it comes round when everything else has
been read since. Rounds are spread over half a second and more, and medians taken: a neighbour that wants the cores for
a moment spoils a few of them. One that keeps a core busy halves every figure of two threads on two cores, best rounds
included (34 GB/s became 17); that cannot be seen in the figures, but in the CPU time that this process got.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from magicpig_cli import kernels
from magicpig_cli.hardware import Speeds
from magicpig_cli.kernels.memory import aligned_bytes
from magicpig_cli.model.stored import Form, Products, Stored, StoredLinear
from magicpig_cli.sampler_probe import LookUps, Scan, per_id_and_visit

ROUNDS_S = 0.6  # for as long rounds are made,
MIN_ROUNDS, MAX_ROUNDS = 5, 25  # but at least and at most so many
CACHE_FACTOR = (
    4  # size of the buffer in last-level caches: hypervisors and victim caches keep some of what is read once
)
MAX_BUFFER_BYTES = 1 << 30
MIN_BUFFER_BYTES = 32 << 20  # a machine with so little free memory runs no model either
FREE_SHARE = 8  # the buffer takes at most one part in so many of the free memory
FILL_S = 0.9  # what is not there by then is left out: the first touch may take 4 ms per 2 MiB in a virtual machine
PART = 4  # sequential and sorted-row reads go through one part in so many of the buffer per round,
PRODUCT_PART = 16  # a product through one in so many at most

HEAD_DIM = 128
ROW_BYTES = kernels.row_bytes(HEAD_DIM, "bfloat16")
ROW_GAP = 20  # from one row to the next on average: the union of a group at 2% per query head (EVIDENCE.md section 1)
WIDTH = 4096  # of the weight matrices
PROMPT_ROWS, PROMPT_OUTPUTS = 256, 512  # tokens of a chunk, and columns of what they are multiplied with
# That the buffer is full of: 0.75 as bfloat16 or float32, 63 as int8, 1.8 as float16; nothing that arithmetic is slow
# on.
BYTE = 0x3F

Probe = Callable[[int], float]  # number of the round → its figure


def measure(threads: int, free_bytes: int, cache_bytes: int) -> Speeds:
    """Speeds with `threads` threads. free_bytes: of memory, of which an eighth at most is taken meanwhile.

    cache_bytes: last-level cache of the CPUs in use.
    Raises MemoryError, OSError or RuntimeError where memory is short. torch's thread count is put back.
    """
    walk = Walk(filled_buffer(buffer_size(free_bytes, cache_bytes)))  # by all cores
    with _torch_threads(threads), torch.inference_mode():
        long, short = LookUps.of_this_tier()
        scan = Scan.of_this_tier()
        share = CpuShare(1 if kernels.isa.current() == kernels.reference.TIER else threads)  # NumPy reads with one
        found = medians({
            "sequential": lambda _: _sequential(walk, threads, share),
            "rows": lambda number: _sorted_rows(walk, threads, number),
            "float32": lambda _: _product(walk, "float32"),
            "bfloat16": lambda _: _product(walk, "bfloat16"),
            "int8": lambda _: _product(walk, "int8"),
            "int4": lambda _: _product(walk, "int4"),
            "prompt": lambda _: _prompt_product(walk),
            "long": long.head_ns,
            "short": short.head_ns,
            "scan": scan.signature_ns,
            "operator": lambda _: _operator_us(),
        })  # fmt: skip
    count_ns, visit_ns = per_id_and_visit(long, found["long"], short, found["short"])
    return Speeds(
        threads=threads,
        sequential_bytes_s=found["sequential"],
        gather_bytes_s=found["rows"],
        count_ns=count_ns,
        visit_ns=visit_ns,
        scan_ns=found["scan"],
        product_bytes_s={form: found[form] for form in ("float32", "bfloat16", "int8", "int4")},
        operator_us=found["operator"],
        prompt_multiply_adds_s=found["prompt"],
        buffer_bytes=walk.size,
        cache_bytes=cache_bytes,
        cpu_share=share.value,
    )


def medians(probes: Mapping[str, Probe]) -> dict[str, float]:
    """Call all probes in turns, round after round, and take the median figure of each; a first round warms up."""
    figures: dict[str, list[float]] = {name: [] for name in probes}
    begin = time.perf_counter()
    for number in range(1 + MAX_ROUNDS):
        if number > MIN_ROUNDS and time.perf_counter() - begin > ROUNDS_S:
            break
        for name, probe in probes.items():
            figure = probe(number)
            if number:
                figures[name].append(figure)
    return {name: statistics.median(values) for name, values in figures.items()}


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def buffer_size(free_bytes: int, cache_bytes: int) -> int:
    """Bytes to walk through: as many as the caches ask for, within what a guest may take. Whole MiB."""
    most = max(MIN_BUFFER_BYTES, min(MAX_BUFFER_BYTES, free_bytes // FREE_SHARE))
    return min(most, max(MIN_BUFFER_BYTES, CACHE_FACTOR * cache_bytes)) >> 20 << 20


def filled_buffer(size: int) -> np.ndarray:
    """uint8 [bytes], every page touched; shorter than `size` where touching takes too long."""
    buffer = aligned_bytes(size)
    begin, done = time.perf_counter(), 0
    while done < size and (done < MIN_BUFFER_BYTES or time.perf_counter() - begin < FILL_S):
        step = min(MIN_BUFFER_BYTES, size - done)
        torch.from_numpy(buffer[done : done + step]).fill_(BYTE)
        done += step
    return buffer[:done]


class Walk:
    """A buffer uint8 [bytes] that is read piece by piece, round and round."""

    def __init__(self, buffer: np.ndarray) -> None:
        self._buffer = buffer
        self._at = 0
        rows = len(buffer) // ROW_BYTES
        self.rows = kernels.RowTable(1, HEAD_DIM, "bfloat16", rows)
        self.rows.append_block(buffer[: rows * ROW_BYTES].view(np.uint16).reshape(1, rows, 2, HEAD_DIM))

    @property
    def size(self) -> int:
        return len(self._buffer)

    def next(self, size: int) -> slice:
        """The next `size` bytes; what is left at the end of the buffer is skipped if it is less."""
        start = self._at if self._at + size <= self.size else 0
        self._at = start + size
        return slice(start, start + size)

    def bytes(self, size: int) -> np.ndarray:
        """The next bytes, uint8 [size]."""
        return self._buffer[self.next(size)]


class CpuShare:
    """How much of the cores this process got while all of its threads had work."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._cpu_s = self._wall_s = 0.0

    @property
    def value(self) -> float:
        """CPU seconds per second and thread, at most 1."""
        return min(1.0, self._cpu_s / self._wall_s / self._threads) if self._wall_s else 1.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self._cpu_s += time.process_time() - cpu
        self._wall_s += time.perf_counter() - wall


def _sequential(walk: Walk, threads: int, share: CpuShare) -> float:
    """Bytes per second, front to back."""
    data = walk.bytes(walk.size // PART)
    with share.counted():
        spent_ns = kernels.read_sequential(data, threads)
    return len(data) / spent_ns * 1e9


def _sorted_rows(walk: Walk, threads: int, number: int) -> float:
    """Bytes per second of K and V of ascending rows, with gaps that no prefetcher can guess."""
    part = walk.next(walk.size // PART)
    first, last = part.start // ROW_BYTES, part.stop // ROW_BYTES
    gaps = np.random.default_rng(number).integers(1, 2 * ROW_GAP, (last - first) // ROW_GAP)
    rows = first + np.cumsum(gaps)
    rows = rows[rows < last]
    return len(rows) * ROW_BYTES / kernels.read_rows(walk.rows, 0, rows, threads) * 1e9


def _product(walk: Walk, form: Form) -> float:
    """Bytes of weights per second that a product with one row reads, as decode multiplies weights of that form."""
    held, x = _weights(walk, form), torch.ones(1, WIDTH)
    layer = StoredLinear(held, None, Products(), few_rows=True)
    read = held.weight.nbytes if form == "int8" else held.nbytes  # the plan counts scales of int4 alone
    return read / seconds(lambda: layer(x))


def _weights(walk: Walk, form: Form) -> Stored:
    """Weights of that form over the next bytes; those of int4's scales are numbers as well."""
    dtype = torch.uint8 if form == "int4" else getattr(torch, form)
    row_bytes = WIDTH // 2 if form == "int4" else WIDTH * dtype.itemsize
    scale_bytes = WIDTH // 8 if form == "int4" else 0
    rows = min(WIDTH, walk.size // PRODUCT_PART // (row_bytes + scale_bytes))
    weight = torch.from_numpy(walk.bytes(rows * row_bytes)).view(dtype).view(rows, -1)
    scale: torch.Tensor | None = None
    if form == "int8":
        scale = torch.ones(rows, dtype=torch.bfloat16)
    if form == "int4":
        scale = torch.from_numpy(walk.bytes(rows * scale_bytes)).view(torch.float16).view(rows, -1, 2)
    return Stored(nn.Parameter(weight, requires_grad=False), scale)


def _prompt_product(walk: Walk) -> float:
    """Multiply-adds per second of a prompt chunk's rows with a weight matrix that was in no cache, float32."""
    outputs = min(PROMPT_OUTPUTS, walk.size // PRODUCT_PART // (WIDTH * 4))
    weight = torch.from_numpy(walk.bytes(outputs * WIDTH * 4)).view(torch.float32).view(outputs, WIDTH)
    x = torch.ones(PROMPT_ROWS, WIDTH)
    return PROMPT_ROWS * outputs * WIDTH / seconds(lambda: nn.functional.linear(x, weight))


def seconds(call: Callable[[], object]) -> float:
    """Of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _operator_us(repeats: int = 20) -> float:
    """Microseconds of one torch operator on few values: the mean over those of a norm and a residual sum."""
    x = torch.ones(1, 1, 512)

    def five_operators() -> None:
        for _ in range(repeats):
            _ = (x + x, x * x, x.to(torch.bfloat16), x.pow(2).mean(-1))

    return seconds(five_operators) / (5 * repeats) * 1e6
