"""`magicpig batch --dry-run`: what a run would meet, as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magicpig_cli.ui import console
from magicpig_cli.units import format_seconds

if TYPE_CHECKING:
    from magicpig_cli.batch.dry_run import DryRun, Room

_HISTOGRAM_WIDTH = 40


def print_page(dry: DryRun, *, shared: bool) -> None:
    """Counts, histogram of prompt lengths, what is shared, the plan, what fits together, how long it takes.

    shared: whether anything may be.
    """
    checked = dry.checked
    print(f"{count(checked.total, 'line')}: {checked.good:,} good, {len(checked.errors):,} bad")
    answers = checked.sequence_tokens - checked.prompt_tokens
    print(f"{checked.prompt_tokens:,} prompt tokens, at most {answers:,} answer tokens")
    _print_histogram(checked.histogram())
    if not shared:
        print("every prompt is read by itself, as asked")
    elif dry.prefixes:
        print(
            f"{count(dry.prefixes, 'shared prefix', 'es')}: {dry.saved_tokens:,} prompt tokens need not be read again"
        )
    else:
        print("no shared prefixes: no two lines begin with the same chunk of " + count(dry.plan.chunk, "token"))
    for reason in dry.plan.reasons:
        print(reason)
    print(f"batch size {dry.batch_size}: sequences decoded together, as far as memory lets them")
    if checked.good:
        print(f"memory has room for {_room(dry.longest, 'longest')}, {_room(dry.typical, 'typical')}, each by itself")
        print(_duration(dry))


def count(number: int, what: str, plural: str = "s") -> str:
    """`1 line`, `2,001 lines`."""
    return f"{number:,} {what}" + ("" if number == 1 else plural)


def _print_histogram(histogram: list[tuple[int, int]]) -> None:
    if not histogram:
        return
    most = max(lines for _, lines in histogram)
    rows = [(f"≤ {up_to:,}", f"{lines:,}", "█" * -(-lines * _HISTOGRAM_WIDTH // most)) for up_to, lines in histogram]
    console.print_table(("prompt tokens", "lines", ""), rows, right=("prompt tokens", "lines"))


def _room(room: Room, which: str) -> str:
    return f"{room.sequences:,} of the {which} lines ({room.tokens:,} tokens)"


def _duration(dry: DryRun) -> str:
    """`about 3h20m, every answer at its longest: 2h10m prompts, 1h10m answers, 8 together; loading not counted`."""
    found = dry.duration
    together = f"{dry.together} together"
    if found.prefill_s is not None and found.decode_s is not None:
        parts = f"{format_seconds(found.prefill_s)} prompts, {format_seconds(found.decode_s)} answers, {together}"
        total = format_seconds(found.prefill_s + found.decode_s)
        return f"duration: about {total}, with every answer at its longest ({parts}); loading the model comes on top"
    known = f"{format_seconds(found.decode_s)} for answers at their longest, {together}; " if found.decode_s else ""
    return f"duration: {known}not known as a whole: {', '.join(found.missing)}"
