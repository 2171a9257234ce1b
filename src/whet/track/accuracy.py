"""Metrics of an evaluation as a table for users: a column for each source."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from whet.track.report import columns, printable
from whet.types import Metrics

FIRST = ("mean", "pass", "maj", "reward_mean", "best", "worst", "std")
"""The order of the lines; other metrics come last, in the given order."""


def by_source(metrics: Metrics, title: str = "") -> Table:
    """`eval/SOURCE/NAME` as a table of names and sources; the cell is blank if a source does not have the metric."""
    sources: dict[str, Metrics] = {}
    for key, value in metrics.items():
        source, name = parted(key)
        if source:
            sources.setdefault(source, {})[name] = value
    sources = dict(sorted(sources.items(), key=lambda item: item[0] == "all"))  # the rest as given
    table = columns(title, *map(printable, sources), gap=2)
    table.columns[0].no_wrap = True
    for name in sorted({n: None for numbers in sources.values() for n in numbers}, key=_place):
        table.add_row(
            Text(printable(name)),
            *(f"{numbers[name]:.4g}" if name in numbers else "" for numbers in sources.values()),
        )
    return table


def parted(key: str) -> tuple[str, str]:
    """Source and name of `eval/SOURCE/NAME`; the source is '' where the number is of no single one. A source may have
    slashes, and so may the name of a part of the rewards (`part/NAME_mean`)."""
    whole = key.removeprefix("eval/")
    source, mark, part = whole.partition("/part/")
    if mark:
        return source, f"part/{part}"
    source, _, name = whole.rpartition("/")
    return source, name


def _place(name: str) -> tuple[int, int]:
    """mean@8 before pass@2 before pass@16."""
    kind, _, n = name.partition("@")
    return (FIRST.index(kind) if kind in FIRST else len(FIRST), int(n) if n.isdecimal() else 0)
