"""A tiny random model as a directory, for tests that start the program, and a chat whose answers a test writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli import scripted as program
from tests.ui.emulator import Emulator

if TYPE_CHECKING:
    from magicpig_cli.engine.engine import Engine
    from tests.cli.keeping import Said

PROMPT = ">"


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory as people have them: config, weights, tokenizer."""
    from magicpig_cli.model.loader import _byte_tokenizer
    from tests.tiny import tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", eos_token_id=None, max_position_embeddings=8192).save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def engine(tiny_directory: Path) -> Engine:
    """The same, loaded to be asked by `keeping.turn`."""
    from tests.cli.keeping import load

    return load(tiny_directory)


@pytest.fixture
def said() -> Said:
    from tests.cli.keeping import Said

    return Said()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sessions are kept: a data directory of this test's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "magicpig-cli" / "sessions"


class ScriptedChat:
    """`magicpig chat` on a terminal, with a model that says what the test wants."""

    def __init__(self, terminal: Emulator, process: ForkServerProcess, home: Path) -> None:
        self.terminal, self.process, self.home = terminal, process, home

    def type(self, keys: str) -> None:
        self.terminal.type(keys)

    def paste(self, text: str) -> None:
        self.terminal.type(f"\x1b[200~{text}\x1b[201~")

    def at_prompt(self) -> list[str]:
        """Wait until an empty prompt is the last thing above the toolbar; returns all rows without it."""

        def waits(rows: list[str]) -> bool:
            shown = [row for row in rows if row]
            return len(shown) > 1 and shown[-2] == PROMPT and "context" in shown[-1]

        self.terminal.wait_until(waits)
        return [row for row in self.terminal.everything() if row][:-2]

    def say(self, text: str) -> list[str]:
        """Send a line; returns all rows once it has been dealt with."""
        self.type(text)
        self.terminal.wait_for(f"> {text[:12]}".rstrip())
        before = sum(row.startswith(PROMPT) for row in self.terminal.everything())
        self.type("\r")
        self.terminal.wait_until(lambda _: sum(row.startswith(PROMPT) for row in self.terminal.everything()) > before)
        return self.at_prompt()

    def interrupt_prompt(self) -> list[str]:
        """Ctrl-C at a prompt; returns all rows once the next one is there, which may look the same."""
        before = self._prompts
        self.type("\x03")
        self.terminal.wait_until(lambda _: self._prompts > before)
        return self.at_prompt()

    @property
    def _prompts(self) -> int:
        """How many there were. Each says how it wants to be pasted into once keys come to it, and are no signals."""
        return self.terminal.bytes_seen.count(b"\x1b[?2004h")

    def sees(self, text: str) -> list[str]:
        """Wait for a text; returns the rows of the screen."""
        return self.terminal.wait_for(text)

    def ends_with(self, status: int) -> list[str]:
        """Wait for the end of the program; returns all rows."""
        self.process.join(60)
        assert self.process.exitcode == status
        self.terminal.settle()
        return self.terminal.everything()

    @property
    def history(self) -> Path:
        return self.home / "state" / "magicpig-cli" / "chat_history"


@pytest.fixture(scope="session")
def scripted_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template; a byte that no text has ends an answer."""
    from magicpig_cli.model.loader import _byte_tokenizer
    from tests.tiny import tiny_model

    tokenizer = _byte_tokenizer()
    tokenizer.chat_template = program.TEMPLATE
    end = tokenizer.convert_tokens_to_ids(program.END)
    folder = tmp_path_factory.mktemp("scripted") / "tiny"
    tiny_model("llama", eos_token_id=end, max_position_embeddings=8192).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


StartProgram = Callable[..., ForkServerProcess]


@pytest.fixture
def start_scripted(scripted_directory: Path, tmp_path: Path) -> Iterator[StartProgram]:
    """Starts `magicpig chat` with these answers on the terminal at a path."""
    running: list[ForkServerProcess] = []

    def start(
        terminal: str, *answers: str, arguments: tuple[str, ...] = (), environment: dict[str, str] | None = None,
        pause_s: float = 0.0, piece_s: float = 0.0,
    ) -> ForkServerProcess:  # fmt: skip
        given = {"TERM": "xterm-256color"}
        for kind in ("config", "state", "data", "cache"):
            given[f"XDG_{kind.upper()}_HOME"] = str(tmp_path / kind)
        running.append(
            program.start(
                program.Program(
                    ("chat", "-m", str(scripted_directory), *arguments), program.Script(answers, pause_s, piece_s),
                    terminal, tmp_path, given | (environment or {}),
                )
            )
        )  # fmt: skip
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.join()


@pytest.fixture
def scripted(start_scripted: StartProgram, tmp_path: Path) -> Iterator[Callable[..., ScriptedChat]]:
    """Starts a chat with these answers and waits for its prompt."""
    terminals: list[Emulator] = []

    def start(
        *answers: str, columns: int = 100, lines: int = 40, ready: bool = True, **options: object
    ) -> ScriptedChat:
        terminals.append(Emulator(columns, lines))
        process = start_scripted(os.ttyname(terminals[-1].theirs), *answers, **options)
        chat = ScriptedChat(terminals[-1], process, tmp_path)
        if ready:
            chat.at_prompt()
        return chat

    yield start
    for terminal in terminals:
        terminal.close()
