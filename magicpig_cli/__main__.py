"""Entry point of `magicpig` and of `python -m magicpig_cli`."""

import os

# torch's waiting threads spin by default. When other programs want the cores, the spinning one keeps the working one
# from running (docs/decisions/002). libgomp reads this when it is loaded, with torch; the kernels do without.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from magicpig_cli.cli.app import main

if __name__ == "__main__":
    main()
