"""A real conversation with the demo model on a pseudo-terminal, as a person would see it: the one in README.

    python scripts/record_session.py                     # prints it
    python scripts/record_session.py --write README.md   # puts it between the file's markers

Answers are greedy, so that they are the same on every machine; times are those of this one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from magicpig_cli.files import replace_file  # noqa: E402
from tests.ui.emulator import Emulator  # noqa: E402

BEGIN, END = "<!-- recorded session: scripts/record_session.py -->", "<!-- end of recorded session -->"
COLUMNS, LINES = 108, 40
ARGUMENTS = ("chat", "-m", "demo", "-f", "LICENSE", "--temperature", "0", "-n", "48")
TYPED = (
    "Who may sue over patents under this license?",
    "Summarize that in three short bullet points.",
    "/contxt",
    "/context",
    "/undo",
)
PATIENCE_S = 300.0


def at_prompt(rows: list[str]) -> bool:
    """Whether the last thing on the screen is an empty prompt with the line below it."""
    shown = [row for row in rows if row]
    return len(shown) > 1 and shown[-2] == ">" and "context" in shown[-1]


def type_and_wait(terminal: Emulator, line: str) -> None:
    """Send a line and wait for the next prompt."""
    terminal.type(line)
    terminal.wait_for(f"> {line}")
    typed = prompts(terminal.everything())
    terminal.type("\r")
    more: Callable[[list[str]], bool] = lambda rows: at_prompt(rows) and prompts(terminal.everything()) > typed  # noqa: E731
    terminal.wait_until(more, PATIENCE_S)


def prompts(rows: list[str]) -> int:
    return sum(row.startswith(">") for row in rows)


def record() -> list[str]:
    """The rows of the session."""
    terminal = Emulator(COLUMNS, LINES)
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")
        } | {"TERM": "xterm-256color", "XDG_STATE_HOME": folder, "PYTHONUTF8": "1"}  # fmt: skip
        process = terminal.start([sys.executable, "-m", "magicpig_cli", *ARGUMENTS], env=environment, cwd=ROOT)
        try:
            terminal.wait_until(at_prompt, PATIENCE_S)
            for line in TYPED:
                type_and_wait(terminal, line)
            rows = [row for row in terminal.everything() if row.strip()]
            terminal.type("\x04")
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            terminal.close()
    if process.returncode != 0:
        raise SystemExit(f"the chat ended with {process.returncode}")
    return rows


def write_between_markers(path: Path, rows: list[str]) -> None:
    """Put the session into a file that has both markers."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{path} has no lines {BEGIN} and {END}")
    block = "\n".join(["```", f"$ magicpig {' '.join(ARGUMENTS)}", *rows, "```"])
    replace_file(path, f"{before}{begin}\n{block}\n{end}{after}".encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put it between the markers of this file")
    wanted = parser.parse_args()
    rows = record()
    if wanted.write is None:
        print("\n".join(rows))
    else:
        write_between_markers(wanted.write, rows)


if __name__ == "__main__":
    main()
