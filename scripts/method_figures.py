"""Figures of docs/method.md: how well the signature sampler knows itself, on real tensors of the demo model.

    python scripts/method_figures.py                          prints them
    python scripts/method_figures.py --write docs/method.md   also puts them between the marks in that page

Takes about ten minutes on two cores: 200 rotations of three layers and 8 of eight, for two texts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from magicpig_cli.bench.capture import capture
from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.corpus import SHIPPED
from magicpig_cli.engine.engine import Engine
from magicpig_cli.evals.calibration import Calibration, OwnError, Sampling, SignedLayer, as_tables, calibrate, own_error

BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"
FEW_LAYERS, MANY_LAYERS = (5, 15, 25), range(1, 30, 4)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="page with the two marks")
    parser.add_argument("--tokens", type=int, default=4352, help="of each text (%(default)s)")
    parser.add_argument("--rotations", type=int, default=200, help="for the probabilities (%(default)s)")
    options = parser.parse_args(arguments)
    engine = Engine.load(Settings(ModelOptions("demo", quantize="none"), AttentionOptions(mode="exact")))
    calibrations: dict[str, Calibration] = {}
    errors: dict[str, OwnError] = {}
    for name, text in SHIPPED.items():
        print(f"{name}: reading {options.tokens:,} tokens", file=sys.stderr, flush=True)
        few, many = (
            [SignedLayer(part) for part in capture(engine, options.tokens, layers, steps, text=text())]
            for layers, steps in ((FEW_LAYERS, 2), (MANY_LAYERS, 8))
        )
        print(f"{name}: {options.rotations} rotations", file=sys.stderr, flush=True)
        calibrations[name] = calibrate(few, Sampling(), options.rotations)
        errors[name] = own_error(many, Sampling(), 8, engine.threads)
    tables = as_tables(calibrations, errors)
    print(tables, end="")
    if options.write is not None:
        page = options.write.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        options.write.write_text(before + BEGIN + tables + END + rest.split(END)[1], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
