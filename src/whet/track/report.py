"""The formatting of tables, numbers and foreign text for a screen."""

from __future__ import annotations

from collections.abc import Collection
from math import isfinite
from typing import Any

from rich.table import Table
from rich.text import Text


def columns(*titles: str, left: Collection[int] = (0,), gap: int = 3, **how: Any) -> Table:
    """A table without lines, to be filled; without titles it has no head. left: the columns of text, by number; numbers
    stand at the right. gap: characters between two columns. how: as `Table.add_column` has it."""
    made = Table(
        box=None, pad_edge=False, header_style="dim", padding=(0, gap, 0, 0), show_header=any(titles)
    )
    for place, title in enumerate(titles):
        made.add_column(Text(title), justify="left" if place in left else "right", **how)
    return made


def printable(text: str) -> str:
    """Text of a model or a file made safe for a terminal: control characters written out, ESC as \\x1b."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def shorten(text: str, limit: int = 160) -> str:
    """On one line, with the middle left out where it is longer than `limit` characters."""
    line = printable(" ".join(text.split()))
    if len(line) <= limit:
        return line
    half = (limit - 3) // 2
    return f"{line[:half].rstrip()} … {line[-half:].lstrip()}"


def count(number: float) -> str:
    """950, 30.4k, 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def share(number: float | None) -> Text:
    """0.957, or a dash where it is not known."""
    return Text("-", "dim") if number is None else Text(f"{number:.3f}", "bold")


def duration(seconds: float | None) -> str:
    """0:31, 2:05:09; '-' where it is not known."""
    if seconds is None or not isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
