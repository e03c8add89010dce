"""What a bench yields, as a view understands it: how far it is, and the steps of the mode that is measured now."""

from __future__ import annotations

import time

from magicpig_cli.bench.measure import BenchStep
from magicpig_cli.events import Working
from magicpig_cli.ui.live import View
from magicpig_cli.ui.live_state import Work


class BenchView:
    """Feeds a view. What is shown of steps is of one context, batch size and mode, never a mixture."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._round = Working("", 0, 0)  # rounds done and in all, of (repetition, mode)
        self._measured: tuple[int, int, str] | None = None
        self._began = time.monotonic()

    def show(self, update: Working | BenchStep) -> None:
        """Show one update."""
        if isinstance(update, Working):
            if update.done == 0 or update.what != self._round.what:
                self._began = time.monotonic()
            self._round = update
            self._view.show(work=self._work(""))
            return
        measured = (update.context, update.batch, update.mode)
        if measured != self._measured:
            self._measured = measured
            self._view.forget_steps()
        where = f"{update.context:,} tokens, batch {update.batch}, {update.mode}, rep {update.rep}/{update.reps}"
        self._view.show(update.stats, self._work(where))

    def _work(self, where: str) -> Work:
        now = self._round
        return Work(now.what, now.done, now.total, detail=where, elapsed_s=time.monotonic() - self._began)
