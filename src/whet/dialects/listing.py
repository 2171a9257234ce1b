"""`whet keys`: the keys of all dialects, one object each."""

from __future__ import annotations

import json
from typing import Any, get_args

from whet.config.faults import shown
from whet.dialects.row import Row, Status, differences, unbuilt
from whet.dialects.tables import TABLES, every_line
from whet.dialects.versions import meet, span
from whet.types import ConfigError


def listed(dialect: str | None = None, status: str | None = None) -> list[dict[str, Any]]:
    """Objects with `dialect`, `key`, `since`, `until`, `status`, `native`, `reason` and `unbuilt` (documented
    values that are refused), in the order of the tables."""
    names = [n for n in TABLES if dialect is None or n == dialect or n.startswith(f"{dialect}-")]
    if not names:
        raise ConfigError(
            f"--dialect {dialect}: expected verl, skyrl, cosmos, trinity or one of {', '.join(TABLES)}"
        )
    if status is not None and status not in get_args(Status):
        raise ConfigError(f"--status {status}: expected one of {', '.join(get_args(Status))}")
    return [
        {
            "dialect": name,
            "key": row.key,
            "since": row.since,
            "until": row.until,
            "status": row.status,
            "native": list(row.native),
            "reason": row.what + differing(row, TABLES[name][0]),
            "unbuilt": list(unbuilt(TABLES[name][0]).get(row.key, ())),
        }
        for name in names
        for row in every_line(name)
        if status is None or row.status == status
    ]


def differing(row: Row, system: str) -> str:
    """Where whet knowingly differs from a system, as sentences after the reason; '' for nowhere."""
    found: list[str] = []
    for each in differences(system):
        if (each.key, each.file) == (row.key, row.file) and meet(each, row, system):
            values = ", ".join(map(shown, json.loads(each.values.removeprefix("!")))) if each.values else ""
            of = (
                ""
                if not values
                else f" (not with {values})"
                if each.values[0] == "!"
                else f" (with {values})"
            )
            when = f" ({span(each.since, each.until)})" if each.since or each.until else ""
            found.append(f" Differs{of}{when}: {each.reason}")
    return "".join(found)


def as_table(found: list[dict[str, Any]]) -> None:
    """Print them for people."""
    # `whet keys --json` needs no table.
    from rich.table import Table

    from whet.config.screen import show

    columns = {
        "key": [row["key"] for row in found],
        "versions": [span(row["since"], row["until"]) for row in found],
        "status": [row["status"] for row in found],
        "native": [", ".join(row["native"]) for row in found],
        "what happens": [row["reason"] for row in found],
        "values not built": ["; ".join(row["unbuilt"]) for row in found],
    }
    told = {head: cells for head, cells in columns.items() if any(cells)}
    view = Table(pad_edge=False, show_lines=False)
    for head in told:
        view.add_column(head, overflow="fold")
    for cells in zip(*told.values()):
        view.add_row(*cells)
    show(view)
