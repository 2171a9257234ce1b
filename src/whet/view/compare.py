"""Two runs side by side: settings, metrics, and replies to the same task."""

from __future__ import annotations

from whet.config.keys import dotted
from whet.config.tree import leaves
from whet.diff.runs import shared_lines
from whet.track.compare import metrics
from whet.track.overview import Lines
from whet.types import Json
from whet.view.rollouts import summaries
from whet.view.source import Ask, Shown

MOST_PAIRS = 2000


def compare(ask: Ask) -> Json:
    """The settings that differ, the metrics that both have, how many lines of metrics.jsonl both have, and the first
    number in them that is not equal."""
    one, other = _both(ask)
    first, second = (dict(leaves(run.config)) for run in (one, other))
    keys = [
        path for path in dict.fromkeys((*first, *second)) if first.get(path, ...) != second.get(path, ...)
    ]
    lines = [run.lines("metrics.jsonl") for run in (one, other)]
    names = [{name for line in some for name in line} - {"stage", "step"} for some in lines]
    return {
        "a": {"id": one.id, "name": one.name},
        "b": {"id": other.id, "name": other.name},
        "config": [[dotted(path), first.get(path), second.get(path)] for path in keys],
        "metrics": sorted(names[0] & names[1]),
        "lines": len(shared_lines(*lines)[0]),
        "first_difference": first_difference(*lines),
    }


def _both(ask: Ask) -> tuple[Shown, Shown]:
    return ask.runs.run(ask.text("a")), ask.runs.run(ask.text("b"))


def first_difference(one: Lines, other: Lines) -> Json:
    """Stage, step and name of the first number that differs in a line of metrics.jsonl that both runs have, as `whet
    diff` compares them; None if there is none."""
    for (stage, step, _), mine, theirs in shared_lines(one, other)[0]:
        if found := metrics(mine, theirs):
            return {"stage": stage, "step": step, "name": found[0].field}
    return None


def replies(ask: Ask) -> Json:
    """Replies of two runs to the same task, paired by task and number in the group: how many, and the first of them."""
    stage, step = ask.text("stage"), ask.number("step")
    sides = []
    for run in _both(ask):
        rows = run.kept(summaries, run.file(stage, step)).to_pylist()
        sides.append({(row["uid"], row["index"]): row for row in reversed(rows)})
    pairs = [
        key
        for key in sorted(sides[0])
        if key in sides[1] and sides[0][key]["prompt"] == sides[1][key]["prompt"]
    ]
    shown = [
        {
            "uid": key[0],
            "index": key[1],
            "prompt": sides[0][key]["prompt"],
            "a": _reply(sides[0][key]),
            "b": _reply(sides[1][key]),
        }
        for key in pairs[:MOST_PAIRS]
    ]
    return {"pairs": shown, "count": len(pairs)}


def _reply(row: dict[str, Json]) -> Json:
    return {name: row[name] for name in ("row", "text", "reward", "tokens", "finish_reason")}
