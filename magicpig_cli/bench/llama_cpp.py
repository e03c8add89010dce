"""llama.cpp as a peer to be measured: its server, as the wheel `xllamacpp` brings it, in a process of its own.

Of its own, because torch and llama.cpp use libgomp, whose threads wait as the environment of their process says:
torch's as the `magicpig` command sets it (docs/decisions/002), llama.cpp's as libgomp does by default. Token ids go in,
llama.cpp's own timings come out.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from magicpig_cli.errors import MagicpigError

WHEEL = "xllamacpp"
Timings = dict[str, float]  # llama.cpp's: prompt_n, prompt_ms, cache_n, predicted_n, predicted_per_token_ms, …


def require() -> str:
    """Version of the wheel. Raises MagicpigError with the install command where it is not installed."""
    if importlib.util.find_spec(WHEEL) is None:
        raise MagicpigError(
            f"llama.cpp is not installed: this needs the Python package {WHEEL}", hint=f"pip install {WHEEL}"
        )
    return metadata.version(WHEEL)


class LlamaCpp:
    """A model in llama.cpp: CPU only, f16 keys and values, weights read into memory, flash attention on or off."""

    name = "llama.cpp"

    def __init__(self, model: Path, *, flash: bool, threads: int, context: int) -> None:
        self.weights = model.stem.rpartition(".")[2]  # a GGUF file is called NAME.QUANTIZATION.gguf
        self.flash = flash
        processes = multiprocessing.get_context("spawn")
        self._pipe, other = processes.Pipe()
        self._process = processes.Process(target=_serve, args=(other, str(model), flash, threads, context), daemon=True)
        self._process.start()
        other.close()
        self.system: str = self._receive()

    def prefill(self, ids: list[int]) -> float:
        """Seconds to read a prompt of which nothing is held."""
        return self._complete(ids, 1, fresh=True)["prompt_ms"] / 1000

    def decode(self, ids: list[int], count: int) -> float:
        """Milliseconds per token of `count` greedy steps after `ids`; as much of ids as is held is not read again."""
        # The first token comes out of the prompt; the mean is over the others.
        done = self._complete(ids, count + 1)
        if done["predicted_n"] != count + 1:
            raise MagicpigError(f"llama.cpp made {done['predicted_n']} tokens instead of {count + 1}")
        return done["predicted_per_token_ms"]

    def count(self, text: str) -> int:
        """Tokens that its tokenizer makes of a text."""
        done = self._complete(text, 1, fresh=True)
        return int(done["prompt_n"])

    def _complete(self, prompt: list[int] | str, count: int, *, fresh: bool = False) -> Timings:
        self._pipe.send(
            {
                "prompt": prompt, "n_predict": count, "cache_prompt": not fresh, "ignore_eos": True,
                "temperature": 0.0, "top_k": 1, "samplers": ["top_k"],
            }
        )  # fmt: skip
        timings: Timings = self._receive()["timings"]
        return timings

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise MagicpigError("llama.cpp ended; what it said stands above", hint="try fewer tokens") from None
        if isinstance(answer, Exception):
            raise MagicpigError(f"llama.cpp: {answer}")
        return answer

    def close(self) -> None:
        """End the process and free its memory."""
        self._pipe.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, model: str, flash: bool, threads: int, context: int) -> None:
    """The process: load, report the build, then answer requests until the other end closes."""
    os.environ.pop("GOMP_SPINCOUNT", None)  # before libgomp is loaded
    os.dup2(2, 1)  # what it logs is no result
    try:
        import xllamacpp

        server = xllamacpp.Server(_parameters(xllamacpp, model, flash, threads, context))
        pipe.send(str(xllamacpp.get_system_info()).strip())
        while True:
            request = pipe.recv()
            pipe.send(server.handle_completions(request))
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        return
    except Exception as problem:  # the parent says it in words
        pipe.send(RuntimeError(str(problem)))


def _parameters(xllamacpp: Any, model: str, flash: bool, threads: int, context: int) -> Any:
    """Settings of the server: nothing but what is measured, and nothing that would save work behind our back."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE  # no page faults of a mapped file later
    params.n_gpu_layers = 0
    params.fit_params = False  # take the numbers as given
    params.n_ctx = context
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F16
    on_off = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = on_off.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else on_off.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_ram_mib = 0  # no copies of earlier prompts
    params.n_ctx_checkpoints = 0
    params.ui = False
    params.verbosity = 1  # errors only
    return params
