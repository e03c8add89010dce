"""What is launched on a GPU, recorded once and launched again by one call: CUDA graphs, in pieces.

A forward is recorded while the model's own code runs: the attention function ends one graph when it is called and
begins the next when it returns (`segments.py`), so that a graph is whatever lies between two calls of attention.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Replayable(Protocol):
    """What was recorded: `replay` does it again, on the current stream, in the memory of the first time."""

    def replay(self) -> None: ...


class GraphExecutor(Protocol):
    """Records pieces of a forward, for one lane: they are replayed in the order in which they were recorded, and never
    two at once, so that they may share memory. Tensors made meanwhile keep their place as long as somebody holds them.

    Errors are RuntimeErrors, as torch's are; CaptureRefused where nothing can be recorded any more.
    """

    def recording(self) -> AbstractContextManager[None]:
        """Everything that belongs to a recording, warming up included, happens inside."""
        ...

    def begin(self) -> None: ...

    def end(self) -> Replayable: ...

    def abandon(self) -> bool:
        """Forget a piece that was begun, if there is one; whether anything can be recorded afterwards."""
        ...


class CaptureRefused(RuntimeError):
    """CUDA or the model's code do not allow recording, whatever the batch."""


_one_at_a_time = threading.Lock()
_broken: list[torch.cuda.CUDAGraph] = []  # captures that CUDA has not let end


class CudaGraphs:
    """CUDA graphs over one pool of memory.

    They are captured on a stream of their own, as the default stream cannot be, and because products keep their scratch
    memory by stream: two lanes that are replayed at the same time must not share it. Any stream may replay them.
    Capturing only forbids its own thread what cannot be captured: the other lane goes on meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """On this lane's own stream, which begins after what the current one was given, and which that waits for."""
        current = torch.cuda.current_stream(self._stream.device)
        with _one_at_a_time, _nothing_collected():
            torch.cuda.empty_cache()  # of what torch keeps, a graph's pool gets nothing
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            except BaseException:
                self._pool = torch.cuda.graph_pool_handle()  # torch takes no pool of which no graph is alive any more
                raise
            finally:
                current.wait_stream(self._stream)

    def begin(self) -> None:
        if _broken:
            raise CaptureRefused("an earlier capture has failed")
        graph = torch.cuda.CUDAGraph()
        self._graph = graph  # first: what fails half-way is to be ended too
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Replayable:
        graph, self._graph = self._graph, None
        assert graph is not None, "nothing was begun"
        try:
            graph.capture_end()
        except RuntimeError as problem:
            # torch leaves its allocator with what it knew of the capture: the graph must outlive that, and nothing more
            # is captured in this process (docs/decisions/018).
            _broken.append(graph)
            raise CaptureRefused(str(problem)) from problem
        return graph

    def abandon(self) -> bool:
        if self._graph is not None:
            with suppress(CaptureRefused):
                self.end()
        return not _broken


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Without Python's garbage collector, which may free a graph or memory of CUDA in the middle of a capture."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def executor_of(device: torch.device) -> Callable[[], GraphExecutor] | None:
    """How to make the executor of a lane; None where there is nothing to record."""
    return (lambda: CudaGraphs(device)) if device.type == "cuda" else None


class NoHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what a graph cannot hold: reading a result on the host, or a shape that depends on one.

    CUDA refuses it too, but a capture that has failed leaves torch unable to capture again: this asks first. Raises
    CaptureRefused.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _reads_results(func, args):
            raise CaptureRefused(f"{func} reads a result on the host")
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _COPIES and any(_elsewhere(out, given) for given in args):
            raise CaptureRefused(f"{func} copies from one device to another")
        return out


_COPIES = (torch.ops.aten.to, torch.ops.aten._to_copy, torch.ops.aten.copy_)


def _reads_results(func: Any, args: tuple[Any, ...]) -> bool:
    aten = torch.ops.aten
    if func is aten.index.Tensor:  # by numbers or by masks
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if func is aten.one_hot.default and len(args) > 1:
        return bool(args[1] < 0)  # the number of classes; else it is looked for
    if torch.Tag.dynamic_output_shape in func.tags:
        return True
    return torch.Tag.data_dependent_output in func.tags or func is aten.is_nonzero.default


def _elsewhere(out: torch.Tensor, given: Any) -> bool:
    return isinstance(given, torch.Tensor) and given.device != out.device
