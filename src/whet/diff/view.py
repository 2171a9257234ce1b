"""What `whet diff` prints: tables as those of `whet show`, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whet.diff.runs import Parting, Row, RunDiff
from whet.replay.view import table
from whet.track.compare import ValueDifference, pair
from whet.track.dumps import finite_json
from whet.track.report import printable, shorten
from whet.types import Json

MOST = 12
"""Largest number of metrics that are listed."""
UNKNOWN = "the two records do not explain the difference: config, code, data and arithmetic are the same"


def view(found: RunDiff) -> RenderableType:
    """Tables of what differs, and the verdict."""
    config = [(c.key, c.old, c.new) for c in found.config]
    sections = (
        ("config", config),
        ("environment", found.environment),
        ("code", found.code),
        ("data", found.data),
    )
    parts: list[RenderableType] = []
    for title, rows in sections:
        if rows:
            parts += [Text(title, "bold"), _rows(rows), ""]
    for path, names in found.only.items():
        told = f"numbers that only {path} has, which are not compared: {', '.join(names)}"
        parts += [Text(printable(told), "dim"), ""]
    if found.parting is not None:
        parts += [*_parting(found.parting), "", Text("why", "bold")]
        parts += [Text(printable(why)) for why in found.why or [UNKNOWN]]
        parts.append("")
    return Group(*parts, _verdict(found))


def _rows(rows: Sequence[Row]) -> Table:
    made = table("", "A", "B", left=range(3))
    for name, a, b in rows:
        made.add_row(*(Text(shorten(_said(value))) for value in (name, a, b)))
    return made


def _said(value: Json) -> str:
    return (
        "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )


def _parting(parting: Parting) -> list[RenderableType]:
    kind = "the evaluation after " if parting.folder == "eval" else ""
    parts: list[RenderableType] = [Text(f"they part at {kind}{parting.stage} step {parting.step}", "bold")]
    if (first := parting.first) is not None:
        a, b = first.values
        where = f"{first.where}: {first.field}" if first.where else first.field
        parts.append(Text(printable(f"first rollout that differs: {where} is {a} in A, {b} in B")))
        columns = ", ".join(f"{each.field} ({each.differing} of {each.count})" for each in parting.rollouts)
        parts.append(Text(printable(f"columns that differ: {columns}"), "dim"))
    elif parting.metrics:
        parts.append(Text("its rollouts are equal, or were not recorded by both", "dim"))
    if parting.metrics:
        parts.append(_metrics(parting.metrics))
    return parts


def _metrics(found: Sequence[ValueDifference]) -> Table:
    made = table("metric", "A", "B")
    for each in found[:MOST]:
        made.add_row(Text(printable(each.field)), *pair(each.a, each.b))
    if len(found) > MOST:
        made.add_row(Text(f"and {len(found) - MOST} more", "dim"))
    return made


def _verdict(found: RunDiff) -> Text:
    longer = "".join(f"; lines that are only in {path}: {count}" for path, count in found.longer.items())
    if found.uncompared:
        longer = f"; lines whose rollouts only one record has, not compared: {found.uncompared}{longer}"
    upto = "" if found.equal_to is None else f"{found.equal_to[0]} step {found.equal_to[1]}"
    if found.equal:
        return Text(f"equal in every bit up to {upto}{longer}", "bold green")
    if found.parting is None:
        return Text(f"no step is in both records{longer}", "bold red")
    return Text(f"equal up to {upto}" if upto else "the first step differs", "bold red")


def as_json(found: RunDiff) -> Json:
    parting = None
    if (p := found.parting) is not None:
        parting = {
            "stage": p.stage,
            "step": p.step,
            "evaluation": p.folder == "eval",
            "metrics": [each.to_json() for each in p.metrics],
            "rollouts": [each.to_json() for each in p.rollouts],
            "first": p.first.to_json() if p.first else None,
        }
    return finite_json(
        {
            "a": str(found.a),
            "b": str(found.b),
            "equal": found.equal,
            "equal_to": list(found.equal_to) if found.equal_to else None,
            "lines_in_one_only": found.longer,
            "numbers_in_one_only": {path: list(names) for path, names in found.only.items()},
            "rollouts_in_one_only": found.uncompared,
            "config": [{"key": c.key, "a": c.old, "b": c.new, "changes": c.kind} for c in found.config],
            **{name: [_row(row) for row in getattr(found, name)] for name in ("environment", "code", "data")},
            "parts_at": parting,
            "why": list(found.why),
        }
    )


def _row(row: Row) -> Json:
    return dict(zip(("name", "a", "b"), row))
