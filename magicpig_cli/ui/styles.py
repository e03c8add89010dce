"""Styled text that Rich does not write: (text, style) pieces, the styles as Rich defines them ("bold cyan")."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

Piece = tuple[str, str]


@lru_cache(maxsize=256)
def sgr(style: str) -> str:
    """The escape sequence that switches a style on; nothing for none."""
    from rich.color import ColorSystem
    from rich.style import Style

    return Style.parse(style).render("x", color_system=ColorSystem.STANDARD).partition("x")[0] if style else ""


def styled(text: str, style: str) -> str:
    """Text with the escape sequences of its style. The text is to be printable already."""
    codes = sgr(style)
    return f"{codes}{text}\x1b[0m" if codes and text else text


def joined(*styles: str) -> str:
    """One style after another."""
    return " ".join(style for style in styles if style)


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with neighbours of one style as one piece, empty ones left out."""
    result: list[Piece] = []
    for text, style in pieces:
        if result and result[-1][1] == style:
            result[-1] = (result[-1][0] + text, style)
        elif text:
            result.append((text, style))
    return result
