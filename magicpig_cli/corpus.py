"""English text that every Python installation has, so that nothing needs to be downloaded to measure something."""

from __future__ import annotations


def natural_text() -> str:
    """Prose and examples: the help topics of the language."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def repeat_ids(ids: list[int], length: int) -> list[int]:
    """The first `length` ids, from the start again where they end."""
    return (ids * -(-length // len(ids)))[:length]
