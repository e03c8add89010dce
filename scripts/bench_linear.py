"""Linear layers on this CPU: the demo model as transformers and torch run it in float32, and with our float32,
bfloat16, int8 and int4 weights, side by side in one process.

    python scripts/bench_linear.py --json

Prints decode and prefill speed at a short context, where linear layers are nearly everything, the ratios to float32,
and what the rounding costs: KL(plain ‖ form) of the next token over positions of English text. With --json one JSON
document is the last line: {"meta","forms":[{"form","weights_bytes","decode_ms","decode_tok_s","prefill_tok_s",
"decode_ratio","prefill_ratio","kl_mean","kl_max","same_token"}]}.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch is loaded, as the command does

import argparse
import json
import statistics
import time

import torch

from magicpig_cli import hardware
from magicpig_cli.bench.fill import fill_ids
from magicpig_cli.bench.report import meta
from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.engine.engine import Engine
from magicpig_cli.model import linear
from magicpig_cli.model.stored import Holder

PLAIN = "plain"  # float32 weights in torch's own layers
FORMS = {
    PLAIN: ModelOptions(dtype="float32", quantize="none"),
    "float32": ModelOptions(dtype="float32", quantize="none"),
    "bfloat16": ModelOptions(dtype="bfloat16", quantize="none"),
    "int8": ModelOptions(dtype="float32", quantize="int8"),
    "int4": ModelOptions(dtype="float32", quantize="int4"),
}
PROMPT = 256  # tokens before the decode steps
POSITIONS = 128
STEPS = 8  # decode steps of one form before the next has its turn


def load(model: str, threads: int) -> dict[str, Engine]:
    engines = {}
    hold = linear.hold
    for form, options in FORMS.items():
        linear.hold = hold if form != PLAIN else lambda *_, **__: None
        options = ModelOptions(model, dtype=options.dtype, quantize=options.quantize, device="cpu")
        engines[form] = Engine.load(Settings(options, AttentionOptions("exact"), threads=threads))
    linear.hold = hold
    return engines


def next_token_logs(engine: Engine, ids: list[int], positions: int) -> torch.Tensor:
    """Log-probabilities [positions, V] in float64 of decode steps over given tokens."""
    sequence = engine.new_sequence()
    list(engine.runner.prefill(sequence, ids[:-positions]))
    logs = [engine.runner.decode([sequence], [token]).logits[0].double().log_softmax(-1) for token in ids[-positions:]]
    return torch.stack(logs)


def divergences(engines: dict[str, Engine], positions: int) -> dict[str, dict[str, float]]:
    """KL(plain ‖ form) per form: mean and maximum over positions, and how often both prefer the same token."""
    ids = fill_ids(engines[PLAIN], PROMPT + positions)
    truth = next_token_logs(engines[PLAIN], ids, positions)
    found = {}
    for form, engine in engines.items():
        logs = next_token_logs(engine, ids, positions)
        kl = (truth.exp() * (truth - logs)).sum(-1)
        same = (truth.argmax(-1) == logs.argmax(-1)).double().mean()
        found[form] = {"kl_mean": float(kl.mean()), "kl_max": float(kl.max()), "same_token": float(same)}
    return found


def weights_bytes(engine: Engine) -> int:
    """Of all weights and their scales, tied ones once."""
    model = engine.runner.model
    scales = [module.scale for module in model.modules() if isinstance(module, Holder) and module.scale is not None]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *scales)}.values())


def decode_times(engines: dict[str, Engine], rounds: int, batch: int) -> dict[str, list[float]]:
    """Milliseconds of single steps, the forms taking turns. Every step grows the sequences by one token."""
    sequences, times = {}, {form: [] for form in engines}
    for form, engine in engines.items():
        sequences[form] = [engine.new_sequence() for _ in range(batch)]
        for sequence in sequences[form]:
            list(engine.runner.prefill(sequence, fill_ids(engine, PROMPT)))
    for turn in range(rounds + 1):
        for form, engine in engines.items():
            for _ in range(STEPS):
                begin = time.perf_counter()
                engine.runner.decode(sequences[form], [5] * batch)
                if turn:  # the first warms up
                    times[form].append((time.perf_counter() - begin) * 1000)
    return times


def prefill_speeds(engines: dict[str, Engine], tokens: int, rounds: int) -> dict[str, float]:
    """Tokens per second of reading a prompt, median of rounds, the forms taking turns."""
    speeds = {form: [] for form in engines}
    for turn in range(rounds + 1):
        for form, engine in engines.items():
            ids = fill_ids(engine, tokens if turn else 64)
            begin = time.perf_counter()
            list(engine.runner.prefill(engine.new_sequence(), ids))
            if turn:
                speeds[form].append(tokens / (time.perf_counter() - begin))
    return {form: statistics.median(values) for form, values in speeds.items()}


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    engines = load(arguments.model, arguments.threads)
    times = decode_times(engines, arguments.rounds, arguments.batch)
    speeds = prefill_speeds(engines, arguments.prompt_tokens, arguments.prefill_rounds)
    losses = divergences(engines, POSITIONS) if arguments.kl else {form: {} for form in engines}
    medians = {form: statistics.median(values) for form, values in times.items()}
    rows = [
        {
            "form": form,
            "weights_bytes": weights_bytes(engine),
            "decode_ms": medians[form],
            "decode_tok_s": arguments.batch * 1000 / medians[form],
            "prefill_tok_s": speeds[form],
            "decode_ratio": medians[PLAIN] / medians[form],
            "prefill_ratio": speeds[form] / speeds[PLAIN],
            **losses[form],
        }
        for form, engine in engines.items()
    ]
    about = meta(engines[PLAIN], hardware.probe())
    return {"meta": about | {"batch": arguments.batch, "prompt_tokens": arguments.prompt_tokens}, "forms": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document as the last line")
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1, help="sequences decoded together")
    parser.add_argument("--rounds", type=int, default=8, help=f"turns of {STEPS} decode steps per form")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--prefill-rounds", type=int, default=1)
    parser.add_argument("--no-kl", dest="kl", action="store_false", help="speed only")
    arguments = parser.parse_args()
    document = measure(arguments)
    for row in document["forms"]:
        print(
            "  ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
            )
        )
    if arguments.json:
        print(json.dumps(document))


if __name__ == "__main__":
    main()
