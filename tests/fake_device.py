"""A device without a GPU: tensors in host memory, copies that happen later, and an eye on who waits for whom.

Torch's operators run at once, in the thread that calls them, so a stream that computes has come as far as its thread. A
stream of copies has a thread of its own: the target of a copy is poison until it is made, and it may be made late. What
waits for too little reads poison, or overwrites what has not been copied yet.

Waiting for too little may also go well by chance. So every stream and the host have a clock, events carry clocks, and
whoever touches memory of the device must have heard of who wrote it, and, to write, of who read it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch

from magicpig_cli.cache.device import contiguous_copy

PATIENCE_S = 20
_WAITING = {"numpy", "item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__"}
Clock = dict[int, int]  # stream (0: the host) → how much of what it did is known


class OnDevice(torch.Tensor):
    """A tensor of the fake. What is computed of it is one too; the host sees none of it by the way."""

    born: tuple[int, int] | None = None  # stream and its time

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        device = FakeDevice.current
        if device.nobody_may_wait and (name in _WAITING or _uploads(name, args)):
            raise AssertionError(f"{name} waits for the device")
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            device.note(name, args, out)
            return _wrapped(out, device)


def _uploads(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an index is a list, which torch makes a tensor of and copies."""
    keys = args[1] if len(args) > 1 and name in ("__getitem__", "__setitem__") else ()
    return any(isinstance(key, list) for key in (keys if isinstance(keys, tuple) else (keys,)))


def _wrapped(out: Any, device: FakeDevice) -> Any:
    if isinstance(out, (list, tuple)):
        made = [_wrapped(item, device) for item in out]
        return type(out)(*made) if hasattr(out, "_fields") else type(out)(made)
    if type(out) is torch.Tensor:
        out = out.as_subclass(OnDevice)
        out.born = device.moment()
    return out


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


class FakeStream:
    """In order. Whoever has been made current does what it is given at once; others have a thread for it."""

    def __init__(self, device: FakeDevice, *, computes: bool = False) -> None:
        self.device, self.computes = device, computes
        self.number = device.new_number()
        self.clock: Clock = {}
        self._queue: SimpleQueue | None = None

    def give(self, work: Callable[[], None]) -> None:
        """The host gives it something to do."""
        with self.device.lock:
            _join(self.clock, self.device.host)
            self.clock[self.number] = self.clock.get(self.number, 0) + 1
        if self.computes:
            work()
            return
        if self._queue is None:
            self._queue = SimpleQueue()
            threading.Thread(target=_work_off, args=(self._queue, self.device.problems), daemon=True).start()
            weakref.finalize(self, self._queue.put, None).atexit = False
        self._queue.put(work)

    def wait_event(self, event: FakeEvent) -> None:
        token = event.token
        with self.device.lock:
            _join(self.clock, event.clock)
        if token is not None and not (self.computes and self.device.host_runs_ahead):
            self.give(lambda: _await(token))


def _work_off(queue: SimpleQueue, problems: list[BaseException]) -> None:
    while (work := queue.get()) is not None:
        try:
            with torch.inference_mode():
                work()
        except BaseException as problem:
            problems.append(problem)


def _await(token: threading.Event) -> None:
    assert token.wait(PATIENCE_S), "nobody has recorded what is waited for"


def _join(clock: Clock, other: Clock) -> None:
    for stream, moment in other.items():
        clock[stream] = max(clock.get(stream, 0), moment)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.token: threading.Event | None = None
        self.clock: Clock = {}
        self.at: list[float] = []

    def record(self, stream: FakeStream) -> None:
        token, at = threading.Event(), []
        self.token, self.at = token, at

        def come() -> None:
            at.append(time.perf_counter())
            token.set()

        stream.give(come)
        with self.device.lock:
            self.clock = dict(stream.clock)

    def synchronize(self) -> None:
        if self.token is not None:
            _await(self.token)
            with self.device.lock:
                _join(self.device.host, self.clock)

    def elapsed_time(self, end: FakeEvent) -> float:
        with self.device.lock:
            known = all(self.device.host.get(stream, 0) >= moment for stream, moment in end.clock.items())
        assert known, "the device may not have done it"
        return 1e3 * (end.at[0] - self.at[0])


class FakeDevice:
    """delay: seconds before a copy is made, by direction (`there`, `back`) and how many there were before it.

    pins: whether memory is pinned. out_of_memory_at: which allocation on the device fails, counted from 0.
    host_runs_ahead: streams that compute do not hold up their thread, as on a real device; nothing is to be computed
    then. made: what was copied meanwhile.
    """

    current: FakeDevice
    on_host = False

    def __init__(self, delay: Callable[[str, int], float] = lambda *_: 0.0, *, pins: bool = True) -> None:
        self.pins, self.delay = pins, delay
        self.out_of_memory_at: int | None = None
        self.allocations = 0
        self.held = {"windows": 0, "buffers": 0, "pinned": 0, "blocks": 0}  # bytes
        self.copies = {"there": 0, "back": 0}
        self.copied_bytes = {"there": 0, "back": 0}
        self.waited = 0  # times that the host asked for something at once
        self.nobody_may_wait = self.host_runs_ahead = False
        self.made: list[torch.Tensor] = []
        self.problems: list[BaseException] = []
        self.host: Clock = {}
        self.lock = threading.RLock()
        self._numbers = 0
        self._threads = threading.local()
        self._default = FakeStream(self, computes=True)
        self._pinned: dict[int, int] = {}  # address → bytes
        self._written: dict[int, tuple[int, int]] = {}  # memory → stream and its time
        self._read: dict[int, dict[int, int]] = {}  # memory → stream → its time
        FakeDevice.current = self

    # Streams and clocks

    def new_number(self) -> int:
        with self.lock:
            self._numbers += 1
            return self._numbers

    def new_stream(self) -> FakeStream:
        return FakeStream(self)

    def current_stream(self) -> FakeStream:
        return getattr(self._threads, "stream", self._default)

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        stream.computes = True
        self._threads.stream = stream
        try:
            yield
        finally:
            self._threads.stream = before

    def new_event(self, *, timed: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def moment(self) -> tuple[int, int]:
        """Of the current stream, which does one thing more."""
        stream = self.current_stream()
        with self.lock:
            _join(stream.clock, self.host)
            stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
            return stream.number, stream.clock[stream.number]

    def note(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        """An operator has run in the current stream."""
        tensors = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        changes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        made = out[0] if isinstance(out, (list, tuple)) and out else out
        if not tensors or not (changes or (isinstance(made, torch.Tensor) and _memory(made) != _memory(tensors[0]))):
            return  # a view, or a fact about a tensor
        stream = self.current_stream()
        self.moment()
        for place, tensor in enumerate(tensors):
            self._touch(tensor, stream, writes=changes and place == 0)

    def _touch(self, tensor: torch.Tensor, stream: FakeStream, *, writes: bool) -> None:
        """Check that the stream knows of everybody whom this concerns."""
        memory = _memory(tensor)
        with self.lock:
            if memory not in self._written:
                return
            now = (stream.number, stream.clock[stream.number])
            known = [self._written[memory], *(self._read[memory].items() if writes else ())]
            for other, moment in known:
                if other != stream.number and stream.clock.get(other, 0) < moment:
                    self.problems.append(AssertionError(f"stream {stream.number} did not wait for stream {other}"))
            if writes:
                self._written[memory], self._read[memory] = now, {}
            else:
                self._read[memory][now[0]] = now[1]

    def _follow(self, tensor: torch.Tensor) -> None:
        """From now on see who touches its memory."""
        memory = _memory(tensor)
        with self.lock:
            self._written[memory], self._read[memory] = self.moment(), {}

    # Memory

    def _allocated(self, tensor: torch.Tensor, kind: str) -> torch.Tensor:
        number, self.allocations = self.allocations, self.allocations + 1
        if number == self.out_of_memory_at:
            raise torch.OutOfMemoryError("no memory on the fake device")
        made = tensor.as_subclass(OnDevice)
        self._follow(made)
        self._count(made, kind)
        return made

    def _count(self, tensor: torch.Tensor, kind: str) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            size = tensor.nbytes
        self.held[kind] += size

        def gone() -> None:
            self.held[kind] -= size

        weakref.finalize(tensor, gone)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._allocated(torch.zeros(shape, dtype=dtype), "windows")

    def buffer(self, size: int) -> torch.Tensor:
        return self._allocated(torch.full((size,), 255, dtype=torch.uint8), "buffers")

    def pinned_buffer(self, size: int) -> torch.Tensor:
        if not self.pins:
            raise RuntimeError("the fake device pins nothing")
        made = torch.full((size,), 255, dtype=torch.uint8)
        self._pinned[made.data_ptr()] = size
        self._count(made, "pinned")
        return made

    def pin(self, address: int, size: int) -> bool:
        if self.pins:
            self._pinned[address] = size
            self.held["blocks"] += size
        return self.pins

    def unpin(self, address: int) -> None:
        self.held["blocks"] -= self._pinned.pop(address)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return any(address <= at < address + size for address, size in list(self._pinned.items()))

    # Copies

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: FakeStream) -> None:
        contiguous_copy(target, source)
        assert isinstance(target, OnDevice) != isinstance(source, OnDevice), "one side is on the device"
        assert not stream.computes
        direction = "there" if isinstance(target, OnDevice) else "back"
        number, self.copies[direction] = self.copies[direction], self.copies[direction] + 1
        born = getattr(source, "born", None)
        to, of = _plain(target), _plain(source)
        self.copied_bytes[direction] += to.nbytes
        to.reshape(-1).view(torch.uint8).fill_(255)

        def make() -> None:
            time.sleep(self.delay(direction, number))
            to.copy_(of)
            if self.host_runs_ahead:
                self.made.append(of.clone())

        stream.give(make)
        if born is not None and stream.clock.get(born[0], 0) < born[1] and _memory(source) not in self._written:
            self.problems.append(AssertionError("a copy did not wait for what it copies"))
        self._touch(source, stream, writes=False)
        self._touch(target, stream, writes=True)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, OnDevice):
            return tensor
        self._waits("to_device")
        return tensor.clone().as_subclass(OnDevice)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self._waits("to_host")
        return _plain(tensor).clone()

    def _waits(self, name: str) -> None:
        if self.nobody_may_wait:
            raise AssertionError(f"{name} waits for the device")
        self.waited += 1
