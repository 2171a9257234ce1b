"""`whet keys`: the keys of all dialects, one object each."""

from __future__ import annotations

import functools
import json
import shutil
import textwrap
from typing import Any, get_args

from whet import tables
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
            "reason": what_happens(row, TABLES[name][0]),
            "unbuilt": list(unbuilt(TABLES[name][0]).get(row.key, ())),
        }
        for name in names
        for row in every_line(name)
        if status is None or row.status == status
    ]


def what_happens(row: Row, system: str) -> str:
    """What happens with the key, when it is read, and where whet knowingly differs, as sentences."""
    said = row.what
    if row.when:
        end = "" if said.endswith(".") or not said else "."
        said = f"{said}{end} Only read {conditions(system)[row.when]}.".lstrip()
    return said + differing(row, system)


@functools.cache
def conditions(system: str) -> dict[str, str]:
    """When rows of a system's table count, in words that follow `Only read`."""
    found = tables.lines(__package__, "conditions.tsv")
    return {line["when"]: line["words"] for line in found if line["system"] == system}


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


def as_text(found: list[dict[str, Any]]) -> str:
    """The same for people: each key in a line that can be searched for, and what happens to it below. No table: its
    columns would be too narrow for the keys, and thousands of rows take seconds."""
    indented = textwrap.TextWrapper(
        shutil.get_terminal_size().columns, "    ", "    ", break_on_hyphens=False, break_long_words=False
    ).fill
    lines: list[str] = []
    for row in found:
        status = f"{row['status']}: {', '.join(row['native'])}" if row["native"] else row["status"]
        lines.append(
            "  ".join(filter(None, (row["dialect"], row["key"], span(row["since"], row["until"]), status)))
        )
        lines += [indented(row["reason"])] if row["reason"] else []
        lines += [indented(f"values not built: {'; '.join(row['unbuilt'])}")] if row["unbuilt"] else []
    return "\n".join(lines)
