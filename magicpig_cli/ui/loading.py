"""Loading a model with something to look at meanwhile."""

from __future__ import annotations

from magicpig_cli.config import Settings
from magicpig_cli.engine.engine import Engine
from magicpig_cli.events import MEASURING, LoadProgress
from magicpig_cli.planner import Plan
from magicpig_cli.ui import console


def load_engine(settings: Settings, *, quiet: bool, planned: Plan | None = None) -> Engine:
    """`Engine.load` with progress on stderr. Its errors pass through."""
    with console.Track("loading the model", unit="", quiet=quiet) as progress:

        def show(event: LoadProgress) -> None:
            if event.stage == MEASURING:
                progress.note(event.stage)
            else:
                progress.update(event.done, event.total, description=event.stage)

        engine = Engine.load(settings, show, planned)
    for line in engine.plan.reasons:
        console.detail(line)
    return engine
