"""Why everything in a plan is as it is: one line per choice, with where it came from."""

from __future__ import annotations

from dataclasses import replace

from magicpig_cli.config import BUDGET_RANGE, Settings
from magicpig_cli.hardware import Hardware
from magicpig_cli.model.shape import ModelShape
from magicpig_cli.planner import memory
from magicpig_cli.planner.plan import Plan, most_together
from magicpig_cli.planner.predict import predict
from magicpig_cli.profiles import BUILT_IN, Profile
from magicpig_cli.units import format_bytes

_ROWS = {"float32": "parity mode", "bfloat16": "half the memory of float32", "int8": "a quarter of the memory, coarser"}

_QUANTIZED_BY = {
    "int8": "torchao, a scale per row; half the memory of bfloat16, but longer steps, as each product casts",
    "int4": "bitsandbytes NF4, a scale for 64 values; a quarter of the memory, coarser",
}


def of(
    plan: Plan, hardware: Hardware, settings: Settings, profile: Profile, why: str, *, wanted: int,
    too_large: Plan | None, other: Plan | None, no_shares: str | None,
) -> tuple[str, ...]:  # fmt: skip
    """One line per choice. wanted: the context before memory had a say; too_large: with recommended tables, if they
    do not fit; other: with the sampler that could have been chosen too; no_shares: see `against_shares`."""
    origin = "default" if profile.name == BUILT_IN.name else f"profile {profile.name}"
    asked = settings.attention
    lines = [
        _context(plan, settings, wanted),
        f"profile {profile.name}" + (f": {why}" if why else ""),
        _attention(plan, asked.mode != "auto", origin),
    ]
    if plan.sampled_layers:
        if other is not None and plan.mode == "auto":
            lines.append(_sampler(plan, other))
        if plan.sampler == "lsh":
            lines.append(_tables(plan, settings, origin, too_large))
        else:
            lines += _signatures(plan, settings, profile, no_shares)
            lines += _scan(plan, settings)
        if tail := plan.tail_share:
            lines.append(f"tail {tail:g}: {_tail(plan, settings, profile)}")
        lines.append(_expected(plan, profile))
    lines += _unused(plan, settings)
    if plan.mode != "exact":
        layers = ", ".join(map(str, plan.dense_layers)) or "none"
        lines.append(f"dense layers {layers}: {'as asked' if asked.dense_layers is not None else origin}")
    windowed = plan.shape.layers - len(plan.shape.full_layers)
    if windowed:
        lines.append(f"{windowed} of {plan.shape.layers} layers attend through a sliding window: exact, no index")
    if plan.shape.rope in ("longrope", "dynamic"):
        lines.append(f"rotary frequencies: those of {plan.context:,} tokens at every length ({plan.shape.rope})")
    lines += [
        f"sink {plan.sink}: {'as asked' if asked.sink is not None else origin}",
        f"local {plan.local}: {'as asked' if asked.local is not None else origin}",
        _chunk(plan, profile, origin),
        _threads(plan, hardware, settings, profile),
        _weights(plan, settings),
        f"rows {plan.row_dtype}: {'as asked' if asked.kv_dtype != 'auto' else 'default'}, {_ROWS[plan.row_dtype]}",
        _batch(plan, profile),
        _host_memory(plan),
    ]
    if plan.gpu is not None:
        lines += [_graphs(plan, settings), _device_memory(plan)]
    lines.append(_time(plan))
    return tuple(lines)


def _context(plan: Plan, settings: Settings, wanted: int) -> str:
    shape = plan.shape
    if plan.context < wanted:
        return f"context {plan.context:,}: what fits in memory of the model's {shape.context:,}"
    if settings.context is None:
        scaled = f", {shape.rope} scaling of {shape.trained_context:,}" if shape.trained_context else ""
        return f"context {plan.context:,}: the model's own{scaled}"
    return f"context {plan.context:,}: as asked, the model's own is {shape.context:,}"


def _attention(plan: Plan, asked: bool, origin: str) -> str:
    source = "as asked" if asked else "default"
    if plan.mode == "exact":
        return f"attention exact: {source}"
    if not plan.sampled_layers:
        return f"attention {plan.mode}: {source}, but no layer can be sampled, all are dense or windowed"
    when = f" from {plan.auto_lsh_from:,} tokens on ({origin}), exact below" if plan.mode == "auto" else ""
    return f"attention {plan.mode}: {source}, {len(plan.sampled_layers)} layers sampled by {plan.sampler}{when}"


def _sampler(plan: Plan, other: Plan) -> str:
    error, its = plan.expected_error or 0.0, other.expected_error or 0.0
    errors = f"relative error of attention about {error:.1%}, with {other.sampler} {its:.1%}"
    if error <= its:
        return f"sampler {plan.sampler}: the more accurate one, {errors}"
    return f"sampler {plan.sampler}: faster here, also at the same error; {errors}"


def _tables(plan: Plan, settings: Settings, origin: str, too_large: Plan | None) -> str:
    asked = settings.attention
    line = f"tables K={plan.K} L={plan.L}: "
    if too_large is not None:
        need = format_bytes(too_large.sequence_bytes(too_large.context))
        return line + (
            f"{origin} has K={too_large.K} L={too_large.L}, but {too_large.context:,} tokens then need {need} of "
            f"{format_bytes(plan.budget_bytes)}; these sample more keys and take less memory"
        )
    if asked.K is not None and asked.L is not None:
        return line + "as asked"
    if asked.K is not None or asked.L is not None:
        return line + f"{'K' if asked.K is not None else 'L'} as asked, the other {origin}"
    return line + f"{origin}, for sequences of {plan.context:,} tokens"


def _source(asked: object, kept: object, profile: Profile) -> str:
    """Where a value comes from that most profiles do not name."""
    if asked is not None:
        return "as asked"
    return f"profile {profile.name}" if kept is not None else "default"


def _signatures(plan: Plan, settings: Settings, profile: Profile, no_shares: str | None) -> list[str]:
    asked = settings.attention
    lines = [f"bits {plan.bits}: {_source(asked.bits, profile.bits, profile)}, per key in the index"]
    if plan.target_error is None:
        source = _source(asked.budget, profile.budget, profile)
        return [*lines, f"budget {plan.budget:.2%} of the keys: {source}", *_head_shares(plan, profile, no_shares)]
    low, high = BUDGET_RANGE
    return [
        *lines,
        f"target error {plan.target_error:g}: {_source(asked.target_error, profile.target_error, profile)}; each "
        f"head's budget moves between {low:.2%} and {high:.0%} of the keys, from {plan.budget:.2%} on",
    ]


def _scan(plan: Plan, settings: Settings) -> list[str]:
    """Who scans signatures, where there are two."""
    asked = settings.attention.signatures
    if plan.gpu is None:
        return []
    each, _ = plan.index.device_copy(plan.indexed_keys(plan.context))
    if plan.scans_there:
        return [
            f"signatures device: as asked, {format_bytes(plan.signature_room)} on {plan.gpu.name} for copies; one of "
            f"{plan.context:,} tokens takes {format_bytes(each)}"
        ]
    if asked == "device":
        short = memory.total(memory.device(replace(plan, signature_room=each), 1)) - plan.gpu.free_bytes
        return [
            f"signatures host: {plan.gpu.name} has {format_bytes(short)} too little for a copy of {format_bytes(each)} "
            f"and for scanning it; the CPU scans them"
        ]
    why = "as asked" if asked == "host" else "default, as no GPU has been measured yet that scans them faster"
    return [f"signatures host: {why}"]


def against_shares(profile: Profile, shape: ModelShape, model: str | None) -> str | None:
    """Why the profile's `head_shares` are not for this model, as the end of a sentence; None where they are, or none.

    model: its name, as profiles have it.
    """
    measured_on = profile.match.model
    if not profile.head_shares:
        return None
    if measured_on is None:
        return "which does not say on which model they were measured (match.model)"
    if model != measured_on:
        return f"which were measured on {measured_on}"
    if all(layer < shape.layers and len(heads) == shape.heads for layer, heads in profile.head_shares.items()):
        return None
    return f"which were measured on a {measured_on} with other layers or heads"


def _head_shares(plan: Plan, profile: Profile, no_shares: str | None) -> list[str]:
    if no_shares is not None:
        return [f"head shares: not those of profile {profile.name}, {no_shares}"]
    if not plan.head_shares:
        return []
    all_of_them = [share for heads in plan.head_shares.values() for share in heads]
    return [
        f"head shares: profile {profile.name}, a query head reads {min(all_of_them):g} to {max(all_of_them):g} times "
        f"the budget"
    ]


def _tail(plan: Plan, settings: Settings, profile: Profile) -> str:
    source = _source(settings.attention.tail, profile.tail, profile)
    if plan.sampler == "lsh":
        return f"{source}, {plan.tables.tail_rate:.2%} of the keys are drawn uniformly beside the tables"
    return f"{source}, share of the budget that is drawn uniformly"


def _unused(plan: Plan, settings: Settings) -> list[str]:
    """Options of a sampler that is not used: no error, as config.yaml may hold them for all runs."""
    asked = settings.attention
    options: dict[str, dict[str, float | None]] = {
        "lsh": {"-K": asked.K, "-L": asked.L},
        "rabitq": {"--budget": asked.budget, "--bits": asked.bits, "--target-error": asked.target_error},
    }
    given = [
        f"{name} {value:g}"
        for sampler, values in options.items()
        for name, value in values.items()
        if value is not None and sampler != plan.sampler
    ]
    if plan.sampler is None and asked.tail is not None:
        given.append(f"--tail {asked.tail:g}")
    if asked.signatures == "device" and (plan.sampler != "rabitq" or plan.gpu is None):
        given.append("--signatures device" + (", as no GPU is used" if plan.gpu is None else ""))
    return [f"without effect on attention {plan.mode}: {', '.join(given)}"] if given else []


def _expected(plan: Plan, profile: Profile) -> str:
    source = "by --budget" if plan.sampler == "rabitq" else _ratio_source(plan, profile)
    return (
        f"sampled ratio {plan.sampled_ratio:.1%} expected: {source}; relative error of attention about "
        f"{plan.expected_error:.1%}"
    )


def _ratio_source(plan: Plan, profile: Profile) -> str:
    if any((t.K, t.L, t.sampled_ratio) == (plan.K, plan.L, plan.table_ratio) for t in profile.tables):
        return f"profile {profile.name}"
    return "angles as measured on real text (docs/decisions/007)"


def _chunk(plan: Plan, profile: Profile, origin: str) -> str:
    if plan.chunk == profile.chunk:
        return f"chunk {plan.chunk}: {origin}, prompt tokens per forward"
    return f"chunk {plan.chunk}: {origin} has {profile.chunk}, for which the GPU has no room"


def _threads(plan: Plan, hardware: Hardware, settings: Settings, profile: Profile) -> str:
    if settings.threads:
        return f"threads {plan.threads}: as asked"
    facts = f"cores {hardware.cores_physical}, usable {hardware.cores_usable}"
    if profile.threads is not None and profile.threads < hardware.threads:
        return f"threads {plan.threads}: profile {profile.name} has no more; {facts}"
    return f"threads {plan.threads}: {facts}"


def _weights(plan: Plan, settings: Settings) -> str:
    if plan.shape.published is not None:
        return f"weights {plan.weight_type}: as they were published; by transformers' own code"
    why = _why_weights(plan, settings)
    if plan.gpu is not None and settings.model.quantize in ("int8", "int4"):
        why += f", made of bfloat16 while they are read; {_QUANTIZED_BY[plan.weight_type]}"
    if plan.windows_on_host and plan.weight_type != "float32":
        if plan.weight_type == "int4":
            why += ", embedding and output layer int8"
        why += "; multiplied as such while generating, in float32 while reading a prompt"
    return f"weights {plan.weight_type}: {why}"


def _why_weights(plan: Plan, settings: Settings) -> str:
    in_file = plan.shape.in_file
    if plan.as_stored and in_file is not None:
        others = "" if in_file.all_int4 else "; int8 where 4 bits would not give it back"
        return f"as the file's linear layers are stored ({in_file.words}){others}"
    if settings.model.dtype != "auto" or settings.model.quantize != "auto":
        return "as asked"
    if plan.gpu is not None:
        return "bfloat16 on GPUs"
    if in_file is not None:
        return f"the file's linear layers are {in_file.words}, of which nothing is to be lost"
    return f"the model was published in {plan.shape.dtype}"


def _batch(plan: Plan, profile: Profile) -> str:
    batch, one = plan.batch_size, plan.sequence_bytes(plan.context)
    fit = plan.budget_bytes // max(1, one)
    if fit <= plan.max_batch:
        return (
            f"batch {batch}: what fits in host memory, {format_bytes(plan.budget_bytes)} by {format_bytes(one)} for a "
            f"sequence of {plan.context:,} tokens"
        )
    if plan.max_batch < most_together(profile, on_gpu=plan.gpu is not None):
        limit = "what fits on the GPU"
    elif profile.max_batch is not None:
        limit = f"profile {profile.name} decodes no more together"
    else:
        limit = "no more are decoded together on a GPU" if plan.gpu is not None else "more gain nothing on a CPU"
    return f"batch {batch}: {limit}; host memory has room for {fit:,}"


def _host_memory(plan: Plan) -> str:
    parts = memory.sequence_parts(plan, plan.context)
    return (
        f"memory: {memory.written_out(parts)} per sequence of {plan.context:,} tokens, "
        f"{format_bytes(plan.budget_bytes)} for sequences, up to {plan.batch_size} together"
    )


def _graphs(plan: Plan, settings: Settings) -> str:
    if plan.graphs:
        return "CUDA graphs: decode steps, between calls of attention"
    why = "as asked" if settings.model.no_cuda_graphs else "the GPU has no room for them"
    return f"no CUDA graphs: {why}, every operator is launched by itself"


def _device_memory(plan: Plan) -> str:
    assert plan.gpu is not None
    parts = memory.written_out(memory.device(plan, plan.batch_size))
    return f"GPU memory: {parts} of {format_bytes(plan.gpu.free_bytes)} free on {plan.gpu.name}"


def _time(plan: Plan) -> str:
    found = predict(plan, plan.context)
    if found.ms_per_token is not None:
        return f"speed: {found.ms_per_token:.0f} ms per token expected at {plan.context:,} tokens, one sequence"
    known = f"{sum(found.stages_ms.values()):.0f} ms per token and " if found.stages_ms else ""
    return f"speed: {known}{', '.join(found.missing)}"
