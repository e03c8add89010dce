"""The threads that share a call (cyext/simd/crew.h): many callers, forks, signals, more threads than cores."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from magicpig_cli import kernels
from tests.kernels.test_product import make_weights, vectors


@pytest.mark.parametrize("threads", [2, 5, 64, 1000])
def test_more_threads_than_cores_do_the_same(native_isa, threads):
    weights, x = make_weights([20_000], 64, "float32"), vectors(2, 64)
    wanted = kernels.multiply(x, weights, threads=1)
    for _ in range(20):
        assert np.array_equal(kernels.multiply(x, weights, threads=threads), wanted)


def test_callers_at_the_same_time_get_their_own_results(native_isa):
    weights = [make_weights([3000], 128, "int8", seed) for seed in range(4)]
    x = vectors(1, 128)
    wanted = [kernels.multiply(x, each, threads=1) for each in weights]
    wrong: list[int] = []

    def call(number: int) -> None:
        done = (kernels.multiply(x, weights[number], threads=3) for _ in range(300))
        wrong.extend(number for result in done if not np.array_equal(result, wanted[number]))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_calls_after_pauses_of_any_length(native_isa):
    """Workers that are awake, falling asleep and asleep: none is missed, none comes too late."""
    weights, x = make_weights([20_000], 64, "bfloat16"), vectors(1, 64)
    wanted = kernels.multiply(x, weights, threads=1)
    for number in range(200):
        time.sleep(number % 40 * 50e-6)
        assert np.array_equal(kernels.multiply(x, weights, threads=3), wanted)


def run(code: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip


SETUP = """
import os, signal, sys, threading, time
import numpy as np
from magicpig_cli import kernels
from tests.kernels.test_product import make_weights, vectors
weights, x = make_weights([20_000], 64, "float32"), vectors(1, 64)
def work(): return kernels.multiply(x, weights, threads=3)
wanted = work()
"""


def test_a_fork_starts_workers_of_its_own():
    """Forked while another thread is in the middle of calls."""
    done = run(f"""{SETUP}
stop = False
def busy():
    while not stop: work()
thread = threading.Thread(target=busy)
thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        same = all(np.array_equal(work(), wanted) for _ in range(20))
        os._exit(0 if same and len(os.listdir("/proc/self/task")) > 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
stop = True
thread.join()
print("fine")""")
    assert done.stdout == "fine\n", done.stderr


def test_signals_reach_the_main_thread_only():
    done = run(f"""{SETUP}
for thread in os.listdir("/proc/self/task"):
    blocked = [line for line in open(f"/proc/self/task/{{thread}}/status") if line.startswith("SigBlk")][0]
    print(int(thread) == os.getpid(), int(blocked.split()[1], 16) >> (signal.SIGINT - 1) & 1)
""")
    shown = done.stdout.splitlines()
    assert shown.count("True 0") == 1, done.stderr
    assert shown.count("False 1") == len(shown) - 1 >= 2  # an emulator has a thread of its own


def test_workers_sleep_when_there_is_nothing_to_do():
    done = run(f"""{SETUP}
time.sleep(0.2)
before = time.process_time()
time.sleep(0.3)
print(time.process_time() - before < 0.1)""")
    assert done.stdout == "True\n", done.stderr
