"""What a command prints for people."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement, measure_renderables
from rich.protocol import rich_cast
from rich.table import Table

LEGIBLE = 80
"""Characters in a line of a table that a narrower terminal is given, at most."""


def show(view: RenderableType) -> None:
    """Print to standard output. In a terminal that is too narrow for a table, its lines are longer and the terminal
    wraps them: cut to fit, it would lose digits and names."""
    console, shown = Console(), rich_cast(view)
    keep_whole(console, shown)
    console.print(shown, crop=False)


def keep_whole(console: Console, view: RenderableType) -> None:
    """Columns of tables that would be cut keep the width of their longest word; those that are folded lose nothing."""
    for part in view.renderables if isinstance(view, Group) else ():
        keep_whole(console, part)
    if not isinstance(view, Table):
        return
    wide = console.options.update(width=max(console.width, LEGIBLE))
    for column in view.columns:
        if column.overflow != "fold":
            word = measure_renderables(console, wide, [column.header, *column.cells])
            column.min_width = min(word.maximum if column.no_wrap else word.minimum, LEGIBLE // 2)
    needed = Measurement.get(console, wide, view).minimum
    if needed > console.width:
        view.width = needed
