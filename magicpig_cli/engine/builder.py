"""Builds layers' indexes beside a forward: a layer's rows are complete while later layers still compute."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from magicpig_cli.cache.layer import LayerCache


class IndexBuilder:
    """One worker thread that calls `build(layer, cache)` in the order of `add`.

    Leaving the `with` block waits for all layers and raises what one of them raised. If the block itself fails, layers
    that have not begun are dropped and the current one is waited for, so that nobody writes to the caches afterwards.
    """

    def __init__(self, build: Callable[[int, LayerCache], None]) -> None:
        self._build = build
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="magicpig-index")
        self._layers: list[Future[None]] = []

    def add(self, layer: int, cache: LayerCache) -> None:
        """The cache has taken in all its rows."""
        self._layers.append(self._worker.submit(self._build, layer, cache))

    def __enter__(self) -> IndexBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                for layer in self._layers:
                    layer.result()
        finally:  # also of an interrupt while waiting
            self._worker.shutdown(wait=True, cancel_futures=True)
