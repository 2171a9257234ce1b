"""Two runs side by side: settings, metrics, and replies to the same task."""

from __future__ import annotations

from whet.config.keys import dotted
from whet.config.tree import leaves
from whet.diff.runs import shared_lines
from whet.track.compare import metrics
from whet.track.overview import Lines
from whet.track.written import read_table
from whet.types import Json
from whet.view.rollouts import summaries
from whet.view.source import Ask, Shown

MOST_PAIRS = 2000
MOST_PROMPT, MOST_TEXT = 200, 400
"""Characters of a prompt and a reply: more than the page shows."""


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
    mine, theirs = (_replies(run, stage, step) for run in _both(ask))
    pairs = [key for key in sorted(mine) if key in theirs and mine[key]["prompt"] == theirs[key]["prompt"]]
    shown = [
        {
            "uid": key[0],
            "index": key[1],
            "prompt": (mine[key]["prompt"] or "")[:MOST_PROMPT],
            "differ": mine[key]["text"] != theirs[key]["text"],
            "a": _reply(mine[key]),
            "b": _reply(theirs[key]),
        }
        for key in pairs[:MOST_PAIRS]
    ]
    return {"pairs": shown, "count": len(pairs)}


def _replies(run: Shown, stage: str, step: int) -> dict[tuple[int, int], dict[str, Json]]:
    """Summaries with whole prompts and replies: two that are longer may begin alike."""
    path = run.file(stage, step)
    rows = zip(run.kept(summaries, path).to_pylist(), read_table(path, ("prompt", "text")).to_pylist())
    return {(row["uid"], row["index"]): row | texts for row, texts in reversed(list(rows))}


def _reply(row: dict[str, Json]) -> Json:
    some = {name: row[name] for name in ("row", "reward", "tokens", "finish_reason")}
    return {**some, "text": (row["text"] or "")[:MOST_TEXT]}
