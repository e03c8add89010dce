"""Entry point of `magicpig` and of `python -m magicpig_cli`."""

from magicpig_cli.cli.app import main

if __name__ == "__main__":
    main()
