"""What README shows of the demo model, recorded on a pseudo-terminal as a person would see it: a conversation, and the
live panel in the middle of an answer.

    python scripts/record_session.py                     # prints both
    python scripts/record_session.py --write README.md   # puts them between the file's markers

Answers are greedy, so that they are the same on every machine; times are those of this one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from magicpig_cli.errors import INTERRUPTED  # noqa: E402
from magicpig_cli.files import replace_file  # noqa: E402
from tests.ui.emulator import Emulator  # noqa: E402


@dataclass(frozen=True)
class Recording:
    """A part of README: `magicpig ARGUMENTS…` on a terminal of this size."""

    name: str
    arguments: tuple[str, ...]
    columns: int

    @property
    def markers(self) -> tuple[str, str]:
        """The lines of a file between which it stands."""
        return f"<!-- recorded {self.name}: scripts/record_session.py -->", f"<!-- end of recorded {self.name} -->"

    @property
    def command(self) -> str:
        return " ".join(("magicpig", *(f'"{word}"' if " " in word else word for word in self.arguments)))


SESSION = Recording("session", ("chat", "-m", "demo", "-f", "LICENSE", "--temperature", "0", "-n", "48"), columns=108)
TYPED = (
    "Who may sue over patents under this license?",
    "Summarize that in three short bullet points.",
    "/contxt",
    "/context",
    "/undo",
)
PANEL = Recording(
    "panel",
    ("chat", "-m", "demo", "-f", "LICENSE", "-f", "docs/method.md", "--attention", "lsh", "--temperature", "0",
     "What is the license about?"),
    columns=84,
)  # fmt: skip
ANSWERED = 48  # tokens of it when the panel is looked at
LINES = 40
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


@contextlib.contextmanager
def started(recording: Recording, status: int = 0) -> Iterator[Emulator]:
    """The terminal on which the program runs, as if nobody had set up theirs. It ends with `status` at the end."""
    terminal = Emulator(recording.columns, LINES)
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")
        } | {"TERM": "xterm-256color", "XDG_STATE_HOME": folder, "PYTHONUTF8": "1"}  # fmt: skip
        process = terminal.start(
            [sys.executable, "-m", "magicpig_cli", *recording.arguments], env=environment, cwd=ROOT
        )
        try:
            yield terminal
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            terminal.close()
    if process.returncode != status:
        raise SystemExit(f"{recording.command} ended with {process.returncode}")


def session() -> list[str]:
    """The rows of the conversation."""
    with started(SESSION) as terminal:
        terminal.wait_until(at_prompt, PATIENCE_S)
        for line in TYPED:
            type_and_wait(terminal, line)
        rows = [row for row in terminal.everything() if row.strip()]
        terminal.type("\x04")
    return rows


def panel() -> list[str]:
    """The rows on the screen while a long prompt is answered."""
    before: list[str] = []

    def in_the_middle(rows: list[str]) -> bool:
        nonlocal before
        same, before = rows == before, rows  # a frame may come in two parts
        answering = re.search(r"answering +(\d+) tokens", "\n".join(rows))
        return same and answering is not None and int(answering[1]) >= ANSWERED

    with started(PANEL, INTERRUPTED) as terminal:
        rows = terminal.wait_until(in_the_middle, PATIENCE_S)
        terminal.type("\x03")
    return [row for row in rows if row]


def write_between_markers(path: Path, recording: Recording, rows: list[str]) -> None:
    """Put a recording into a file that has both of its markers."""
    text = path.read_text(encoding="utf-8")
    begin, end = recording.markers
    before, found, rest = text.partition(begin)
    _, found_too, after = rest.partition(end)
    if not (found and found_too):
        raise SystemExit(f"{path} has no lines {begin} and {end}")
    replace_file(path, f"{before}{begin}\n{block(recording, rows)}\n{end}{after}".encode())


def block(recording: Recording, rows: list[str]) -> str:
    """Of Markdown."""
    return "\n".join(["```", f"$ {recording.command}", *rows, "```"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put them between the markers of this file")
    wanted = parser.parse_args()
    for recording, record in ((SESSION, session), (PANEL, panel)):
        rows = record()
        if wanted.write is None:
            print(block(recording, rows))
        else:
            write_between_markers(wanted.write, recording, rows)


if __name__ == "__main__":
    main()
