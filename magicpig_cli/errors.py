"""Errors that a user can act on: one line naming cause and numbers, and a hint of what to type."""

from __future__ import annotations

INTERRUPTED = 130  # exit status of a run that Ctrl-C or a signal ended
UNREAD = 141  # of one whose output nobody reads any more (`| head -1`), as a shell tells of SIGPIPE


class MagicpigError(Exception):
    """The cause in one line, and optionally what to type next.

    `exit_code` is the status with which the command line ends (1 failed, 2 wrong usage).
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(MagicpigError):
    """What was typed cannot be meant."""

    exit_code = 2


class ModelError(MagicpigError):
    """A model cannot be found, read or supported."""


class ContextError(MagicpigError):
    """A prompt and its answer do not fit the context; both numbers are in the message."""


class MemoryBudgetError(MagicpigError):
    """What was asked for does not fit this machine's memory; the sum is in the message."""
