"""The ledger, the timeline and the evaluations of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from whet.inputs import parse_json
from whet.track.accuracy import parted
from whet.track.metrics import is_evaluation
from whet.track.overview import Lines, passes
from whet.track.time_report import measure, processes_beside
from whet.track.timeline import Span
from whet.track.written import read_table
from whet.types import DataError, Json
from whet.view.runs import files_of
from whet.view.source import Ask, finite

# ---------------------------------------------------------------- the ledger


Row = dict[str, Any]


def _count(name: str) -> Callable[[Row], float | None]:
    return lambda line: line.get(name)


def _of(name: str, count: str) -> Callable[[Row], float | None]:
    """Of a mean or a share the sum."""
    return lambda line: line[name] * line[count] if name in line and count in line else None


def _told(what: str) -> Callable[[Row], float | None]:
    """What environments have counted."""
    return _of(f"reward/part/env/{what}_mean", f"reward/part/env/{what}_count")


FIXED: tuple[tuple[str, str | None, Callable[[Row], float | None]], ...] = (
    ("requested", None, _count("ledger/requested_rollouts")),
    ("finished", "", _count("rollout/count")),
    ("trained on", None, _count("ledger/trained_rollouts")),
    ("pending", None, _count("ledger/pending_rollouts")),
    ("scored", "fault=0", _count("reward/scored_count")),
    ("without a reward", "fault=1", _count("rollout/failed_count")),
    ("calls", "calls=1", _told("calls")),
    ("failed calls", "calls=1", _told("calls_failed")),
    ("malformed replies", "malformed=1", _told("malformed")),
    ("results cut", "calls=1", _told("results_cut")),
)
"""(name, filter of the rollouts page, number of a line of metrics.jsonl). No filter: the rollouts are not recorded, or
not told apart there."""

FAMILIES: tuple[tuple[str, str, str, str | None], ...] = (
    ("ledger/rejected/", "_rollouts", "dropped: {}", None),
    ("ledger/failed/", "_rollouts", "failed: {}", "fault=1"),
    ("rollout/failed/", "_count", "fault: {}", "fault=1"),
    ("rollout/finish_", "_frac", "ended by {}", "finish={}"),
    ("rollout/stop_", "_frac", "episode ended by {}", "stop={}"),
)
"""(before, after) a word in a metric's name; what it is called, and its filter. Shares become counts."""


def ledger(ask: Ask) -> Json:
    """Counts of each stage and step, and the filter that lists their rollouts."""
    run = ask.run
    lines = [line for line in run.lines("metrics.jsonl") if not is_evaluation(line)]
    filters: dict[str, str | None] = {}
    stages = []
    for stage in dict.fromkeys(line["stage"] for line in lines):
        own = [line for line in lines if line["stage"] == stage]
        counts = {}
        for name, wanted, number in _accounts(own):
            values = [finite(number(line)) for line in own]
            if any(value is not None for value in values):
                counts[name] = [None if v is None else round(v) for v in values]
                filters[name] = wanted
        totals = {name: sum(v for v in values if v is not None) for name, values in counts.items()}
        if "pending" in counts:
            totals["pending"] = counts["pending"][-1] or 0
        stages.append(
            {"stage": stage, "steps": [line["step"] for line in own], "counts": counts, "totals": totals}
        )
    return {"stages": stages, "filters": filters}


def _accounts(lines: Lines) -> Iterator[tuple[str, str | None, Callable[[Row], float | None]]]:
    yield from FIXED
    names = sorted({name for line in lines for name in line})
    for before, after, called, wanted in FAMILIES:
        for name in names:
            if name.startswith(before) and name.endswith(after):
                word = name.removeprefix(before).removesuffix(after)
                number = _of(name, "rollout/count") if after == "_frac" else _count(name)
                yield called.format(word), wanted and wanted.format(word), number


# ---------------------------------------------------------------- the timeline

MOST_SPANS = 5000


def timeline(ask: Ask) -> Json:
    """What each process did when, in seconds from the first span, and how busy it was."""
    run = ask.run
    path = run.path / "timeline.json"
    if not path.exists():
        return {"lanes": [], "seconds": 0.0, "bubble": {"columns": [], "rows": []}}
    own = run.spans(path)
    beside = {p.parent.name: run.spans(p) for p in processes_beside(run.path)}
    lanes: dict[tuple[str, str], list[Span]] = {}
    for process, spans in (("", own), *beside.items()):
        for span in spans:
            lanes.setdefault((f"{process} {span.of}".strip(), f"{process} {span.lane}".strip()), []).append(
                span
            )
    first = min((s.start_ns for some in lanes.values() for s in some), default=0)
    last = max((s.end_ns for some in lanes.values() for s in some), default=0)
    drawn = merged(lanes, (last - first) / 1e9)
    return {
        "lanes": [
            {
                "name": name,
                "of": of,
                "spans": [[n, k, (a - first) / 1e9, (b - first) / 1e9] for n, k, a, b in some],
            }
            for (of, name), some in drawn.items()
        ],
        "seconds": (last - first) / 1e9,
        "bubble": _bubble(own, beside),
    }


Drawn = tuple[str, str, int, int]


def merged(lanes: dict[tuple[str, str], list[Span]], seconds: float) -> dict[tuple[str, str], list[Drawn]]:
    """(name, kind, start, end) of each lane, about MOST_SPANS in all where there are more: neighbours of one kind that
    are close become one, with the name of the longer. A lane keeps one of each kind."""
    drawn: dict[tuple[str, str], list[Drawn]] = {
        key: [
            (s.name, s.kind, s.start_ns, s.end_ns)
            for s in sorted(some, key=lambda s: (s.start_ns, -s.end_ns))
        ]
        for key, some in lanes.items()
    }
    width = seconds * 1e9 / MOST_SPANS / 4
    while sum(map(len, drawn.values())) > MOST_SPANS:
        drawn = {key: closer(some, width) for key, some in drawn.items()}
        if width >= seconds * 1e9:  # there is nothing left to join
            break
        width *= 2
    return drawn


def closer(some: Sequence[Drawn], width: float) -> list[Drawn]:
    """Spans that begin within `width` after the last of their kind has, joined with it."""
    out: list[Drawn] = []
    last: dict[str, int] = {}
    for name, kind, start, end in some:
        at = last.get(kind)
        if at is not None and start - out[at][3] <= width and end - out[at][2] <= 2 * width:
            before = out[at]
            longer = before[0] if before[3] - before[2] >= end - start else name
            out[at] = (longer, kind, before[2], max(before[3], end))
        else:
            last[kind] = len(out)
            out.append((name, kind, start, end))
    return out


def _bubble(own: Sequence[Span], beside: dict[str, list[Span]]) -> Json:
    columns = ["stage", "process", "busy s", "wait s", "bubble", "mostly"]
    rows: list[Json] = []
    for stage in measure(own, beside=beside):
        for p in stage.processes:
            bubble = round(1 - p.busy, 4)
            rows.append([stage.stage, p.name, round(p.busy_s, 3), round(p.wait_s, 3), bubble, p.mostly])
        busy, wait = (sum(getattr(p, name) for p in stage.processes) for name in ("busy_s", "wait_s"))
        rows.append([stage.stage, "all", round(busy, 3), round(wait, 3), round(stage.bubble, 4), ""])
    return {"columns": columns, "rows": rows}


# ---------------------------------------------------------------- evaluations

MOST_FLIPS = 1000
ALL = "all"
"""The source that stands for all of them together."""


def evals(ask: Ask) -> Json:
    """Numbers of each evaluation by source, the stages with their last steps, and the files of the replies."""
    run = ask.run
    found: dict[tuple[str, int, str], dict[str, float | None]] = {}
    stages: dict[str, int] = {}
    for line in run.lines("metrics.jsonl"):
        stages[line["stage"]] = line["step"]
        for name, number in line.items():
            if name.startswith("eval/"):
                source, what = parted(name)
                found.setdefault((line["stage"], line["step"], source or ALL), {})[what] = finite(number)
    first = ("accuracy", "reward_mean")
    names = sorted({n for row in found.values() for n in row}, key=lambda n: (n not in first, n))
    return {
        "columns": names,
        "rows": [[*place, *(row.get(name) for name in names)] for place, row in found.items()],
        "stages": [list(stage) for stage in stages.items()],
        "files": files_of(run, "eval"),
    }


def flips(ask: Ask) -> Json:
    """Held-out tasks that were right at one evaluation and wrong at the other, by their first replies: how many, and
    the first of them."""
    run, stage = ask.run, ask.stage
    config = run.config
    before, after = (_first_replies(run.file(stage, ask.number(end), "eval")) for end in ("from", "to"))
    mended: list[dict[str, Json]] = []
    broken: list[dict[str, Json]] = []
    for uid in before.keys() & after.keys():
        one, other = before[uid], after[uid]
        was, now = passes(one, config, stage), passes(other, config, stage)
        if was != now:
            (mended if now else broken).append(
                {
                    "uid": uid,
                    "prompt": other["prompt"],
                    "answer": _answer(other["answer"]),
                    "before": one["text"],
                    "after": other["text"],
                    "row_before": one["row"],
                    "row_after": other["row"],
                }
            )
    both = [sorted(some, key=lambda flip: flip["uid"])[:MOST_FLIPS] for some in (mended, broken)]
    counts = {"mended": len(mended), "broken": len(broken)}
    return {
        "mended": both[0],
        "broken": both[1],
        "counts": counts,
        "tasks": len(before.keys() & after.keys()),
    }


def _first_replies(path: Path) -> dict[int, Row]:
    table = read_table(path, ("uid", "prompt", "answer", "text", "reward"))
    table = table.append_column("row", pa.array(range(table.num_rows), pa.int32()))
    return {row["uid"]: row for row in reversed(table.to_pylist())}


def _answer(text: str | None) -> str:
    """An answer for people: a text as it is, anything else as JSON."""
    value = parse_json((text or "null").encode(), "answer", DataError, constants=True)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
