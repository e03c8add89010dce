"""Entry point of `magicpig` and of `python -m magicpig_cli`."""

import os

# Threads of libgomp that wait for each other spin by default. When other programs want the cores, the spinning one keeps
# the working one from running (docs/decisions/002). libgomp reads this when it is loaded, with torch or the kernels.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from magicpig_cli.cli.app import main  # noqa: E402

if __name__ == "__main__":
    main()
