"""How CUDA is asked for graphs, as far as a stand-in for torch.cuda can tell."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from magicpig_cli.model import graphs
from magicpig_cli.model.segments import Segments
from tests.tiny import tiny_model


class Driver:
    """Stands for torch.cuda: notes what is asked of it."""

    def __init__(self, monkeypatch):
        self.done: list[object] = []
        self.pools = 0
        driver = self

        class Graph:
            refuses = False

            def capture_begin(self, pool, capture_error_mode):
                driver.done.append(("begin", pool, capture_error_mode))

            def capture_end(self):
                driver.done.append("end")
                if Graph.refuses:
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

        class Stream:
            def __init__(self, device):
                self.device = device

            def wait_stream(self, other):
                driver.done.append(("waits", self is driver.current, other is driver.current))

        self.graph, self.current = Graph, Stream("cuda")
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.pool)
        monkeypatch.setattr(graphs, "_broken", [])

    def pool(self) -> int:
        self.pools += 1
        return self.pools

    @contextmanager
    def on(self, stream):
        self.done.append("enter")
        yield
        self.done.append("leave")


@pytest.fixture
def driver(monkeypatch):
    return Driver(monkeypatch)


def test_cuda_captures_on_a_stream_that_both_sides_wait_for(driver):
    executor = graphs.executor_of(torch.device("cuda"))()
    with executor.recording():
        executor.begin()
        executor.end()
        executor.begin()
        executor.end()
    piece = [("begin", 1, "thread_local"), "end"]
    own_waits, current_waits = ("waits", False, True), ("waits", True, False)
    assert driver.done == [own_waits, "enter", *piece, *piece, "leave", current_waits]


def test_a_pool_of_which_no_graph_is_left_is_not_used_again(driver):
    executor = graphs.CudaGraphs(torch.device("cuda"))

    def interrupted() -> None:
        with executor.recording():
            executor.begin()
            assert executor.abandon()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with executor.recording():
        executor.begin()
    assert [pool for name, pool, *_ in (e for e in driver.done if e[0] == "begin")] == [1, 2]
    assert driver.done[-1][0] == "waits"


def test_nothing_is_captured_after_a_capture_that_cuda_has_refused(driver):
    model = tiny_model("llama")
    driver.graph.refuses = True
    first = Segments(model, graphs.executor_of(torch.device("cuda")))
    assert first.prepare(1) is None
    assert "previous error during capture" in first.why_never
    begun = driver.done.count(("begin", 1, "thread_local"))
    second = Segments(model, graphs.executor_of(torch.device("cuda")))
    assert second.prepare(1) is None
    assert second.why_never == "an earlier capture has failed"
    assert driver.done.count(("begin", 1, "thread_local")) == begun == 1
    assert len(graphs._broken) == 1  # torch's allocator still knows it


def test_an_error_of_cuda_in_the_middle_of_a_capture_is_told_by_its_own_words(driver):
    model = tiny_model("llama")
    calls = SimpleNamespace(count=0)

    def fail(*_) -> None:
        calls.count += 1
        if calls.count == 3:  # after warming up and the model's own step
            driver.graph.refuses = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    model.model.layers[0].mlp.register_forward_pre_hook(fail)
    found = Segments(model, graphs.executor_of(torch.device("cuda")))
    assert found.prepare(1) is None
    assert found.why_never == "CUDA error: operation not permitted when stream is capturing"


def test_a_cpu_has_nothing_to_record():
    assert graphs.executor_of(torch.device("cpu")) is None
