"""The tasks that there are, by name."""

from __future__ import annotations

from collections.abc import Mapping

from magicpig_cli.evals import needles, word_lists
from magicpig_cli.evals.tasks import Task

TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("niah", needles.single),
        Task("multikey", needles.many),
        Task("passkey", needles.passkey),
        Task("tenkeys", needles.ten_keys, questions=needles.KEYS),
        Task("vt", needles.variables),
        Task("cwe", word_lists.common, uses_text=False),
        Task("fwe", word_lists.frequent, uses_text=False),
    )
}
TEACHER_FORCED = ("ppl", "kl")  # tasks whose tokens are those of the text itself
NAMES = (*TASKS, *TEACHER_FORCED)
