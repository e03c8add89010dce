"""Inputs of a few lines, makers over a tokenizer of one token per byte, and a tiny model in a directory."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, LlamaConfig

from magicpig_cli.batch.check import Checked, check
from magicpig_cli.batch.reader import JsonlSource
from magicpig_cli.batch.request import RequestMaker
from magicpig_cli.config import GenerationOptions, Settings
from magicpig_cli.engine.conversation import ChatCodec
from magicpig_cli.hardware import Hardware
from magicpig_cli.model.shape import shape_from_config
from magicpig_cli.planner import Plan, plan
from tests import warm
from tests.batch.desk import FAILS, Desk, as_bytes
from tests.batch.fakes import FakeEngine
from tests.text.vocabularies import CHATML, byte_level
from tests.tiny import tiny_config, tiny_model

GIB = 1 << 30


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., JsonlSource]:
    """`source(line, …)`: an open input in a file."""

    def write(*lines: Any) -> JsonlSource:
        path = tmp_path / "in.jsonl"
        path.write_bytes(as_bytes(*lines))
        return JsonlSource.open(str(path), io.BytesIO())

    return write


@pytest.fixture(scope="session")
def planned() -> Plan:
    """A plan of the tiny model; tests set its budget, context and chunk."""
    machine = Hardware(
        cpu_model="test", isa="portable", tiers=("portable",), cores_physical=2, cores_usable=2, threads=2,
        numa_nodes=1, memory_total=8 * GIB, memory_free=8 * GIB, memory_limit=None, process_bytes=0,
    )  # fmt: skip
    return plan(machine, shape_from_config(tiny_config("llama")), Settings())


@pytest.fixture
def maker(tmp_path: Path, planned: Plan) -> Callable[..., RequestMaker]:
    """`maker(template=…, context=…, chunk=…, …)`: without the special tokens of a template a token is a byte."""

    def make(template: str | None = CHATML, **changes: Any) -> RequestMaker:
        tokenizer = byte_level(adds_bos=changes.pop("adds_bos", False))
        tokenizer.chat_template = template
        context = changes.pop("context", 1000)
        of_plan = {key: changes.pop(key) for key in ("chunk", "budget_bytes") if key in changes}
        values = {
            "codec": ChatCodec(tokenizer, LlamaConfig(eos_token_id=None), GenerationConfig()),
            "generation_config": None, "plan": replace(planned, context=context, **of_plan), "longest": context,
            "defaults": GenerationOptions(), "system": None, "raw": False, "directory": tmp_path,
            "allow_outside_files": False, "identity": "a model",
        }  # fmt: skip
        return RequestMaker(**{**values, **changes})

    return make


@pytest.fixture
def checked(maker) -> Callable[..., Checked]:
    """`checked(source, maker)`: its check, with a maker of raw prompts by default."""
    return lambda opened, chosen=None: check(opened, chosen or maker(raw=True), lambda lines, done: None)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory) -> Path:
    """A random model with tokenizer, template and its own answer length, as a user would have it on disk."""
    directory = tmp_path_factory.mktemp("tiny-model")
    model = tiny_model("llama", vocab_size=320, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    model.generation_config = GenerationConfig(max_new_tokens=6, do_sample=False)
    model.save_pretrained(directory)
    tokenizer = byte_level(adds_bos=False)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def desks(maker, planned, tmp_path_factory, monkeypatch) -> Callable[[], Desk]:
    """`desks()`: a directory of its own for runs over a scripted engine. Nothing waits for the disk: no test here
    could see the difference."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return lambda: Desk(tmp_path_factory.mktemp("desk"), maker(raw=True), planned, monkeypatch)


@pytest.fixture
def desk(desks) -> Desk:
    """One of them, whose engine fails the lines that `FAILS` names."""
    made = desks()
    made.engine = FakeEngine(fails=FAILS)
    return made


@pytest.fixture
def process(tiny_directory, tmp_path) -> Iterator[Callable[..., warm.Program]]:
    """`process(*arguments)`: a `magicpig batch` of the tiny model, in an empty directory."""
    started = []

    def start(*arguments: str, **options: Any) -> warm.Program:
        environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}
        command = ("batch", *arguments, "-m", str(tiny_directory), "-t", "1")
        started.append(warm.Program(*command, cwd=tmp_path, env=environment, text=True, **options))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()
