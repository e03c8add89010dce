"""Entry point of `magicpig` and of `python -m magicpig_cli`."""

import os

# Waiting threads of libgomp spin by default. When other programs want the cores, the spinning one keeps the working one
# from running (docs/decisions/002). libgomp reads this when it is loaded, with torch or the kernels.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from magicpig_cli.cli.app import main

if __name__ == "__main__":
    main()
