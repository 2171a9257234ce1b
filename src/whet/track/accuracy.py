"""Metrics of an evaluation as a table for users: a column for each source."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from whet.track.report import printable
from whet.types import Metrics

FIRST = ("mean", "pass", "maj", "reward_mean", "best", "worst", "std")
"""The order of the lines; other metrics come last, in the given order."""


def by_source(metrics: Metrics, title: str = "") -> Table:
    """`eval/SOURCE/NAME` as a table of names and sources; the cell is blank if a source does not have the metric."""
    columns: dict[str, Metrics] = {}
    for key, value in metrics.items():
        source, name = parted(key)
        if source:
            columns.setdefault(source, {})[name] = value
    columns = dict(sorted(columns.items(), key=lambda column: column[0] == "all"))  # the rest as given
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(title, no_wrap=True)
    for source in columns:
        table.add_column(Text(printable(source)), justify="right")
    for name in sorted({n: None for numbers in columns.values() for n in numbers}, key=_place):
        table.add_row(
            Text(printable(name)),
            *(f"{numbers[name]:.4g}" if name in numbers else "" for numbers in columns.values()),
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
