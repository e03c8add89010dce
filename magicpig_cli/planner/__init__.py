"""What a run will do on this machine with this model: a pure function from facts and wishes to a Plan. No I/O.

`plan` chooses everything that nobody has asked for (`choose`) and refuses what cannot be meant (`checks`) or does not
fit, with ways out that were planned too (`ways_out`). A `Plan` counts bytes and holds the reason for every choice
(`memory`, `reasons`); `predict` tells what a run of it will take. Decisions: docs/decisions/007.
"""

from magicpig_cli.planner.choose import plan
from magicpig_cli.planner.indexes import most_segments
from magicpig_cli.planner.memory import Part
from magicpig_cli.planner.plan import FLUSH, Plan
from magicpig_cli.planner.predict import Prediction, predict

__all__ = ["FLUSH", "Part", "Plan", "Prediction", "most_segments", "plan", "predict"]
