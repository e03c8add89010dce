"""The live view between the events: what signals may do to a frame."""

from __future__ import annotations

import os
import signal

import pytest

from magicpig_cli.ui import live
from magicpig_cli.ui.live import PanelView
from magicpig_cli.ui.live_state import LiveState, Setup


@pytest.fixture
def happened(monkeypatch) -> list[str]:
    """What became of the terminal, in order; this process is not stopped."""
    found: list[str] = []
    monkeypatch.setattr(live, "in_front", lambda _: True)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "kill", lambda *_: found.append("stopped"))
    return found


@pytest.fixture
def panel(happened) -> PanelView:
    """Ctrl-Z comes in the middle of each of its frames, as often as `keys` says."""

    class Below:
        shown = True
        keys = 1

        def draw(self) -> None:
            happened.append("frame begins")
            for _ in range(self.keys):
                view._on_stop(signal.SIGTSTP, None)
            happened.append("frame ends")

        def erase(self) -> None:
            happened.append("erased")

        def begin_line(self) -> None:
            happened.append("goes on")

    view = PanelView(LiveState(Setup("m", ("dense",), 1, 100)), dict)
    view._below = Below()
    view._open = True
    return view


def test_ctrl_z_within_a_frame_leaves_no_part_of_it(panel, happened):
    panel.show()
    assert happened == ["frame begins", "frame ends", "erased", "stopped", "goes on"]


def test_a_second_ctrl_z_does_not_wait(panel, happened):
    panel._below.keys = 2
    panel.show()
    assert happened == ["frame begins", "stopped", "goes on", "frame ends"]


def test_ctrl_z_between_frames(panel, happened):
    panel._on_stop(signal.SIGTSTP, None)
    assert happened == ["erased", "stopped", "goes on"]
