"""docs/plans.md: what the planner makes of well-known models on well-known cards and amounts of host memory.

    python scripts/plan_table.py            writes docs/plans.md
    python scripts/plan_table.py --check    exits 1 if it is not what the planner says now

No weights, no GPU and no measurement are needed: configs stand in plan_models.json, machines below.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoConfig

from magicpig_cli.cards import card
from magicpig_cli.config import ModelOptions, Settings
from magicpig_cli.errors import MagicpigError
from magicpig_cli.hardware import Hardware
from magicpig_cli.model.shape import ModelShape, shape_from_config
from magicpig_cli.planner import plan
from magicpig_cli.planner.memory import device, reserved_host, total
from magicpig_cli.profiles import choose
from magicpig_cli.units import format_bytes, parse_bytes, parse_tokens

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "scripts" / "plan_models.json"
TARGET = ROOT / "docs" / "plans.md"
CPU = "cpu"

# A desktop or server around the cards: 16 cores, no limits but its memory.
MACHINE = Hardware(
    cpu_model="16-core CPU", isa="avx2", tiers=("portable", "avx2"), cores_physical=16, cores_usable=32, threads=16,
    numa_nodes=1, memory_total=0, memory_free=0, memory_limit=None, process_bytes=0,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row: a model at a context on a card (or `cpu`) beside so much free host memory."""

    model: str
    context: str
    card: str
    memory: str
    extrapolate: bool = False
    quantize: str = "none"


def cases() -> list[Case]:
    """A subset that shows where memory decides: each model from short to long, little to much memory."""
    found = [Case("Llama-3.1-8B", c, "RTX 4090", "64GiB") for c in ("8k", "32k", "96k", "128k")]
    found += [Case("Llama-3.1-8B", "96k", "RTX 4090", m) for m in ("32GiB", "128GiB", "256GiB")]
    found += [Case("Llama-3.1-8B", "128k", c, "256GiB") for c in ("L20", "A100-SXM4-80GB")]
    found += [Case("Llama-3.1-8B", c, "A100-SXM4-80GB", "512GiB", True) for c in ("256k", "512k")]
    found += [Case("Llama-3.1-8B", "512k", "RTX 4090", "64GiB", True)]
    found += [Case("Llama-3.1-8B", c, CPU, "64GiB") for c in ("8k", "96k")]
    found += [Case("Llama-3.1-8B", "128k", CPU, "32GiB"), Case("Llama-3.1-8B", "64k", CPU, "32GiB", quantize="int8")]
    found += [Case("Qwen2.5-7B", c, "RTX 4090", m) for c in ("32k", "128k") for m in ("32GiB", "64GiB", "128GiB")]
    found += [Case("Qwen2.5-7B", "128k", c, "128GiB") for c in ("L20", CPU)]
    found += [Case("Qwen2.5-7B", "512k", "A100-SXM4-80GB", "256GiB", True)]
    found += [Case("Mistral-7B-v0.3", c, "RTX 4090", m) for c in ("8k", "32k") for m in ("32GiB", "64GiB")]
    found += [Case("Mistral-7B-v0.3", "32k", c, "128GiB") for c in ("L20", "A100-SXM4-80GB", CPU)]
    found += [Case("Mistral-7B-v0.3", "64k", "RTX 4090", "64GiB")]
    found += [Case("Llama-3.1-70B", "32k", c, "256GiB") for c in ("RTX 4090", "L20", "A100-SXM4-80GB", "H200")]
    found += [Case("Llama-3.1-70B", c, CPU, "256GiB") for c in ("32k", "128k")]
    found += [Case("Llama-3.1-70B", "128k", CPU, "512GiB"), Case("Llama-3.1-70B", "128k", "H200", "512GiB")]
    return [*found, Case("Llama-3.1-70B", "32k", CPU, "128GiB", quantize="int8")]


def shapes() -> dict[str, ModelShape]:
    """The models of plan_models.json."""
    configs = json.loads(MODELS.read_text(encoding="utf-8"))
    return {name: shape_from_config(AutoConfig.for_model(**fields)) for name, fields in configs.items()}


def machine_of(case: Case) -> Hardware:
    """The machine of a row."""
    memory = parse_bytes(case.memory)
    gpus = () if case.card == CPU else (card(case.card),)
    return replace(MACHINE, memory_total=memory, memory_free=memory, gpus=gpus)


def settings_of(case: Case) -> Settings:
    """What a user would have typed for it."""
    model = ModelOptions(device=CPU if case.card == CPU else "auto", quantize=case.quantize)
    return Settings(context=parse_tokens(case.context), model=model, allow_extrapolation=case.extrapolate)


COLUMNS = ("model", "context", "card", "free DRAM", "batch", "sampler", "host bytes", "device bytes")


def cells(case: Case, shape: ModelShape) -> list[str]:
    """A row of the table: the plan, or the refusal in short."""
    machine, settings = machine_of(case), settings_of(case)
    name = case.model + (" int8" if case.quantize == "int8" else "")
    context = case.context + ("*" if case.extrapolate and parse_tokens(case.context) > shape.context else "")
    begin = [name, context, case.card, case.memory]
    profile, why = choose(machine, case.card != CPU, own=())
    try:
        chosen = plan(machine, shape, settings, profile, why)
    except MagicpigError as refusal:
        need = refusal.message.rpartition(" = ")[2]  # of a sum, what it comes to and what there is
        return [*begin, "-", "-", f"refused: {need}. {refusal.hint}", "-"]
    host = reserved_host(chosen, chosen.context, chosen.batch_size)
    there = device(chosen, chosen.batch_size)
    on_device = format_bytes(total(there)) if there else "-"
    numbers = [str(chosen.batch_size), f"{chosen.sampler} {chosen.title.partition(' ')[2]}"]
    return [*begin, *numbers, format_bytes(total(host)), on_device]


def document() -> str:
    """All of docs/plans.md."""
    known = shapes()
    rows = [cells(case, known[case.model]) for case in cases()]
    table = [list(COLUMNS), ["---"] * len(COLUMNS), *rows]
    return "\n".join([
        "# What fits where",
        "",
        "Written by `python scripts/plan_table.py` from the planner and the shipped profiles; a test compares. Weights",
        "are bfloat16 unless int8 is said, rows bfloat16. Host bytes are what the plan reserves for the whole batch at",
        "that context, the program included; `magicpig models check` writes the sum out for one model and machine.",
        "A star: beyond what the model was made for (`--allow-extrapolation`).",
        "",
        *("| " + " | ".join(row) + " |" for row in table),
        "",
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="compare only")
    if not parser.parse_args().check:
        TARGET.write_text(document(), encoding="utf-8")
        return 0
    if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == document():
        return 0
    print(f"{TARGET.name} is not what the planner says: python scripts/plan_table.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
