"""KL and attention error of every sampler and baseline on two texts: `magicpig eval` with the options of the roadmap.

    python scripts/eval_samplers.py [further options of `magicpig eval`]

Mean over 4 hash seeds, 128 positions at the end of 4,608 tokens, tables of (10, 150), budgets of 2 and 4%.
"""

from __future__ import annotations

import sys

from magicpig_cli.__main__ import main

OPTIONS = (
    "--tasks", "kl", "--text", "pydoc_data.topics", "--text", "stdlib", "-c", "4.5k", "--positions", "128",
    "--hash-seeds", "4", "-K", "10", "-L", "150", "--dense-layers", "0", "--budget", "0.02,0.04",
    "--quantize", "none",
)  # fmt: skip

if __name__ == "__main__":
    sys.argv = ["magicpig", "eval", *OPTIONS, *sys.argv[1:]]  # what a run that is ended tells to type
    main()
