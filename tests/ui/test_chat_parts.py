"""Parts of the chat that need no terminal: history, toolbar, statistics, work that Ctrl-C leaves behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from magicpig_cli.errors import MagicpigError
from magicpig_cli.events import Finished, StepStats, Timing
from magicpig_cli.ui.chat import history, sessions
from magicpig_cli.ui.chat.completing import SlashCompleter
from magicpig_cli.ui.chat.history import CappedHistory
from magicpig_cli.ui.chat.patience import interruptible
from magicpig_cli.ui.chat.toolbar import fit
from magicpig_cli.ui.chat.totals import Totals
from magicpig_cli.ui.ending import ending_by_signal


def entries(path: Path) -> list[str]:
    """The newest first, as another chat reads them."""
    return list(CappedHistory(path).load_history_strings())


def test_history_keeps_lines_and_is_private(tmp_path):
    path = tmp_path / "new" / "history"
    mine = CappedHistory(path)
    mine.append_string("one\ntwo\n\nthree # [/INST]")
    mine.append_string("naïve 渡轮 \ud800")
    assert entries(path) == ["naïve 渡轮 ?", "one\ntwo\n\nthree # [/INST]"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    mine.append_string("again")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_history_is_capped_and_keeps_the_newest_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "MAX_BYTES", 4000)
    monkeypatch.setattr(history, "_KEEP_BYTES", 2000)
    path = tmp_path / "history"
    mine = CappedHistory(path)
    for number in range(300):
        mine.append_string(f"entry {number}\nof two lines")
        assert path.stat().st_size <= 4000
    kept = entries(path)
    assert len(kept) > 10
    assert kept == [f"entry {number}\nof two lines" for number in range(299, 299 - len(kept), -1)]


def test_a_pasted_book_is_not_kept(tmp_path):
    path = tmp_path / "history"
    mine = CappedHistory(path)
    mine.append_string("x" * 100_000)
    mine.append_string("short")
    assert entries(path) == ["short"]
    assert mine.get_strings()[-2:] == ["x" * 100_000, "short"]  # but for this chat


def test_a_history_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    mine = CappedHistory(tmp_path / "file" / "history")
    mine.append_string("one")
    assert mine.get_strings() == ["one"]
    (tmp_path / "folder").mkdir()
    assert entries(tmp_path / "folder") == []


def _write(path: Path, name: str) -> None:
    history.MAX_BYTES, history._KEEP_BYTES = 20_000, 16_000
    mine = CappedHistory(path)
    for number in range(150):
        mine.append_string(f"{name} {number}\nand more")


def test_several_chats_lose_nothing_of_each_other(tmp_path):
    path = tmp_path / "history"
    context = multiprocessing.get_context("forkserver")
    writers = [context.Process(target=_write, args=(path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    kept = entries(path)
    for name in "ab":
        numbers = [int(entry.split()[1]) for entry in kept if entry.startswith(name)]
        assert numbers[0] == 149
        assert numbers == list(range(149, 149 - len(numbers), -1))
    assert all(entry.endswith("\nand more") for entry in kept)


PARTS = [(1, "a model"), (0, "context 5/100 (5%)"), (2, "exact"), (3, "1.0 tok/s")]


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (100, "a model · context 5/100 (5%) · exact · 1.0 tok/s"), (40, "a model · context 5/100 (5%) · exact"),
        (30, "a model · context 5/100 (5%)"), (20, "context 5/100 (5%)"), (10, "context 5/"), (0, ""), (-1, ""),
    ],
)  # fmt: skip
def test_the_toolbar_leaves_out_what_has_no_room(columns, shown):
    assert fit(PARTS, columns) == shown


def test_wide_characters_of_a_name_count_double():
    assert fit([(1, "渡轮渡轮"), (0, "context")], 16) == "context"
    assert fit([(1, "渡轮渡轮"), (0, "context")], 18) == "渡轮渡轮 · context"


def finished(tpot_ms: tuple[float, ...], reused: int = 0) -> Finished:
    return Finished(
        "chat", "stop", tuple(range(len(tpot_ms) + 1)), "text", "", 100, reused, Timing(2.0, 2.5, tpot_ms), 5, 100, 7
    )  # fmt: skip


def test_statistics_of_the_last_answer_and_of_all():
    totals = Totals()
    assert totals.lines() == ["no answer yet"]
    for ms, sampled in ((10.0, 3), (20.0, 9)):
        totals.begin()
        totals.observe(StepStats(1, ms, {}, {1: sampled, 2: 0}, {1: 100, 2: 100}))
        totals.observe(finished((ms,), reused=40))
    assert totals.tok_s == pytest.approx(50)
    lines = totals.lines()
    cut = lines.index("all 2 answers")
    assert "  sampled  4.5% of the offloaded keys; by layer 1: 9.0%, 2: 0.0%" in lines[:cut]
    assert "  sampled  3.0% of the offloaded keys; by layer 1: 6.0%, 2: 0.0%" in lines[cut:]
    assert "  tokens   120 read in 4.0 s, 80 reused, 4 generated" in lines[cut:]
    assert "  decode   66.7 tok/s, p50 15.0 ms, p99 19.9 ms per token" in lines[cut:]


def completions(line: str, names: list[str] | None = None) -> list[str]:
    chat = SimpleNamespace(sessions=None if names is None else SimpleNamespace(names=lambda: names))
    found = SlashCompleter(chat).get_completions(Document(line), CompleteEvent(completion_requested=True))
    return [completion.text for completion in found]


def test_completions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a report.txt").touch()
    (tmp_path / "attic").mkdir()
    assert completions("/re") == ["/regen", "/retry"]
    assert completions("re") == completions("/set\nre") == completions("/nothing ") == []
    assert completions("/set m") == ["max_tokens", "min_p", "markdown"]
    assert completions("/set think ") == ["on", "off"]
    assert completions("/load b", ["book", "other", "bees"]) == ["book", "bees"]
    assert completions("/load b") == completions("/load b c", ["c"]) == []
    assert completions("/file a") == ["\\ report.txt", "ttic"]
    assert completions("/file 'a ") == ["report.txt"]
    assert completions("/file x.txt a\\ r") == ["eport.txt"]


def test_where_nothing_is_kept_the_commands_say_so():
    chat = SimpleNamespace(sessions=None)
    for command in (sessions.save, sessions.load, sessions.list_sessions):
        with pytest.raises(MagicpigError, match="not available"):
            command(chat, "x")


def test_signals_that_are_ignored_or_unknown_are_left_alone(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with ending_by_signal():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
        monkeypatch.delattr(signal, "SIGHUP")  # as on Windows
        with ending_by_signal():
            assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_does_not_end_what_the_first_one_began():
    kept = []

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            kept.append("text")

    with pytest.raises(KeyboardInterrupt), ending_by_signal():
        work()
    assert kept


def test_names_of_sessions_stand_in_columns_whatever_their_width(capsys):
    table = SimpleNamespace(table=lambda: (["name", "turns"], [["本の話", "1"], ["work", "2"]]))
    sessions.list_sessions(SimpleNamespace(sessions=table), "")
    assert capsys.readouterr().err.splitlines() == ["name    turns", "本の話  1", "work    2"]


def test_work_returns_and_raises():
    assert interruptible(lambda: 3) == 3
    with pytest.raises(KeyError, match="no"):
        interruptible(lambda: {}["no"])


def test_ctrl_c_leaves_work_behind():
    done = threading.Event()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    begin = time.monotonic()
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            interruptible(lambda: done.wait(60))
    finally:
        done.set()
    assert time.monotonic() - begin < 30
