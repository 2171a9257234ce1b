"""Where the time of a run went: `whet show RUN --timeline`, from the timeline.json of each of its processes.

The bubble is the share of the processes' time in which one that could work waited: the driver where it samples or
trains, and each trainer rank, engine replica, explorer and evaluation process while it is there and the run is open. A
rank that waits for another rank in the middle of an update counts as working. The bubble of a single process is the
time in which it computed nothing.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from statistics import mean, median

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whet.track.report import columns, printable
from whet.track.timeline import MERGE_NS, OPEN_STAGE, START_UP, Kind, Span, read
from whet.types import DataError

UPDATE = "update"
"""The phase that every step has."""
MOST_LINES = 8
"""Of more processes of one kind the mean is shown, and the two that were busy the least and the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What one kind of span took in a stage."""

    kind: Kind
    lane: str
    name: str
    seconds: float
    share: float
    """Of the stage's wall time."""
    median_s: float
    """Of a step, over the steps that have it."""
    max_s: float
    pieces: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process that computes, from the moment when it is there and the stage is open until that ends."""

    name: str
    of: str
    """What it is one of: `Span.of`; "" stands alone."""
    busy_s: float
    wait_s: float
    mostly: str
    """The work that took it longest."""
    steps: tuple[float, ...]
    """The share of each step in which it was busy."""

    @property
    def busy(self) -> float:
        """Share of its time."""
        return self.busy_s / max(self.busy_s + self.wait_s, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """One stage: wall time over all starts of the run, without the time between them."""

    stage: str
    steps: int
    seconds: float
    other_s: float
    """What no phase and no wait claims."""
    bubble: float
    """Share of the processes' time in which they waited."""
    still: float
    """Share of the time after start-up in which neither sampling nor training computed, in no process of the run."""
    spent: tuple[Spent, ...]
    processes: tuple[Process, ...]


def show(run_dir: Path) -> RenderableType:
    """A table a stage, of the run itself and of each process beside it. DataError if the run has no timeline."""
    path = run_dir / "timeline.json"
    if not path.exists():
        raise DataError(
            f"{run_dir} has no timeline.json: it is not a run directory, or its first step is not done"
        )
    beside = {p.parent.name: read(p) for p in processes_beside(run_dir)}
    parts = [part for stage in measure(read(path), beside=beside) for part in _drawn(stage)]
    for name, spans in beside.items():
        parts += [part for stage in measure(spans) for part in _drawn(stage, process=name)]
    return Group(*parts)


def processes_beside(run_dir: Path) -> list[Path]:
    """The timelines of explorers and of the evaluation process."""
    return sorted((*run_dir.glob("explorers/*/timeline.json"), *run_dir.glob("bench/timeline.json")))


def measure(spans: Sequence[Span], *, beside: Mapping[str, Sequence[Span]] | None = None) -> list[StageTime]:
    """The stages in the order they ran. beside: what other processes of the run wrote, by their names."""
    stages = dict.fromkeys(s.stage for s in spans if not s.of)
    others = [s for name, some in (beside or {}).items() for s in _whole(name, some)]
    return [_stage(name, spans, others) for name in stages]


def _whole(process: str, spans: Sequence[Span]) -> list[Span]:
    """What a process beside did, as one lane: it is there from the first span of a start to the last. Its own
    replicas keep theirs; where these do all the work, it is no process that could."""
    out = [replace(s, lane=f"{s.lane} of {process}", of=f"{s.of} of {process}") for s in spans if s.of]
    if out and not any(s.kind == "work" and not s.of for s in spans):
        return out
    own: dict[int, list[Span]] = defaultdict(list)
    for s in spans:
        if not s.of:
            own[s.process].append(s)
    for some in own.values():
        out += [replace(s, lane=process) for s in [_throughout(some), *some] if s.kind in ("wait", "work")]
    return out


def _throughout(spans: Sequence[Span]) -> Span:
    """A wait from the first to the last: a process is there whether it does something or not."""
    start_ns, end_ns = min(s.start_ns for s in spans), max(s.end_ns for s in spans)
    return replace(spans[0], kind="wait", start_ns=start_ns, end_ns=end_ns, busy_ns=end_ns - start_ns)


def _stage(name: str, spans: Sequence[Span], beside: Sequence[Span]) -> StageTime:
    starts: dict[int, list[Span]] = defaultdict(list)
    for s in spans:
        if s.stage == name and not s.of:
            starts[s.process].append(s)
    own = [s for of_start in starts.values() for s in of_start]
    wall_ns = (
        sum(max(s.end_ns for s in some) - min(s.start_ns for s in some) for some in starts.values()) or 1
    )
    lanes = [s for s in spans if s.of]
    opened = [
        _Open.of(some, [*(s for s in lanes if s.process == at), *beside]) for at, some in starts.items()
    ]
    groups: dict[tuple[Kind, str, str], list[Span]] = defaultdict(list)
    for s in own:
        groups[s.kind, s.lane, s.name].append(s)
    spent = [_spent(kind, lane, what, some, wall_ns) for (kind, lane, what), some in groups.items()]
    claimed_ns = covered_ns(s for s in own if s.kind in ("phase", "wait"))  # phases may lie beside others
    processes = _processes(opened)
    lived_s = sum(p.busy_s + p.wait_s for p in processes)
    return StageTime(
        stage=name,
        steps=len({s.step for s in own if s.kind == "phase" and s.name == UPDATE}),
        seconds=wall_ns / 1e9,
        other_s=max(0, wall_ns - claimed_ns) / 1e9,
        bubble=sum(p.wait_s for p in processes) / max(lived_s, 1e-9),
        still=1 - sum(o.computed_ns for o in opened) / max(sum(o.length_ns for o in opened), 1),
        spent=tuple(sorted(spent, key=lambda x: -x.seconds)),
        processes=processes,
    )


def _spent(kind: Kind, lane: str, name: str, spans: Sequence[Span], wall_ns: int) -> Spent:
    by_step: dict[int, int] = defaultdict(int)
    for s in spans:
        by_step[s.step] += s.busy_ns
    total = sum(by_step.values())
    return Spent(
        kind=kind,
        lane=lane,
        name=name,
        seconds=total / 1e9,
        share=total / wall_ns,
        median_s=median(by_step.values()) / 1e9,
        max_s=max(by_step.values()) / 1e9,
        pieces=sum(s.pieces for s in spans),
    )


@dataclass(frozen=True)
class _Open:
    """One start's time in a stage, after it was open."""

    start_ns: int
    end_ns: int
    steps: tuple[tuple[int, int], ...]
    """Where each begins and ends."""
    spans: dict[tuple[str, str], list[Span]]
    """What each process did in it, by what it is one of and its name."""

    @classmethod
    def of(cls, own: Sequence[Span], others: Sequence[Span]) -> _Open:
        first = min(s.start_ns for s in own)
        start = max((s.end_ns for s in own if s.name in (START_UP, OPEN_STAGE)), default=first)
        end = max(s.end_ns for s in own)
        ends: dict[int, int] = defaultdict(int)
        for s in own:
            if s.kind == "phase" and s.end_ns > start:
                ends[s.step] = max(ends[s.step], s.end_ns)
        marks = [start, *sorted({*ends.values()})]
        learned = {ends[s.step] for s in own if s.name == UPDATE and s.step in ends}
        spans: dict[tuple[str, str], list[Span]] = {}
        computes = [s for s in own if s.kind == "work"]
        if computes or not others:
            spans["", "driver"] = [replace(own[0], kind="wait", start_ns=start, end_ns=end), *computes]
        for s in others:
            if (part := _within(s, start, end)) is not None:
                spans.setdefault((s.of, s.lane), []).append(part)
        return cls(start, end, tuple((a, b) for a, b in pairwise(marks) if b in learned), spans)

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def computed_ns(self) -> int:
        """Time in which any of them computed."""
        return covered_ns(s for some in self.spans.values() for s in some if s.kind == "work")


def _processes(opened: Sequence[_Open]) -> tuple[Process, ...]:
    found = []
    for of, name in dict.fromkeys(key for o in opened for key in o.spans):
        busy_ns = lived_ns = 0
        steps: list[float] = []
        by_name: Counter[str] = Counter()
        for o in opened:
            spans = o.spans.get((of, name), [])
            work = [s for s in spans if s.kind == "work"]
            busy_ns += covered_ns(work)
            for s in work:
                by_name[s.name] += s.busy_ns
            lived_ns += _lived_ns(spans)
            steps += _shares(spans, o.steps)
        wait_ns = max(lived_ns - busy_ns, 0)
        mostly = max(by_name, key=by_name.__getitem__, default="-")
        numbers = {"busy_s": busy_ns / 1e9, "wait_s": wait_ns / 1e9}
        found.append(Process(name=name, of=of, mostly=mostly, steps=tuple(steps), **numbers))
    return tuple(sorted(found, key=lambda p: (bool(p.of), p.of, _in_order(p.name))))


def _in_order(name: str) -> list[tuple[str, int]]:
    """`rank 2` before `rank 10`."""
    return [(words, int(number or 0)) for words, number in re.findall(r"(\D*)(\d*)", name)]


def _shares(spans: Sequence[Span], steps: Sequence[tuple[int, int]]) -> list[float]:
    """The share of each step in which a process was busy, if it was there."""
    first, last = min((s.start_ns for s in spans), default=0), max((s.end_ns for s in spans), default=0)
    begins = [begin for begin, _ in steps]
    cut: dict[int, list[Span]] = {n: [] for n, (a, b) in enumerate(steps) if a < last and b > first}
    for s in spans:
        if s.kind == "work":
            for n in range(max(0, bisect_right(begins, s.start_ns) - 1), bisect_left(begins, s.end_ns)):
                if (part := _within(s, *steps[n])) is not None:
                    cut[n].append(part)
    return [covered_ns(parts) / (steps[n][1] - steps[n][0]) for n, parts in cut.items()]


def _lived_ns(spans: Sequence[Span]) -> int:
    """Time that the spans of a process claim, with the moments between them."""
    lived_ns, upto_ns = 0, min((s.start_ns for s in spans), default=0)
    for s in sorted(spans, key=lambda s: s.start_ns):
        since_ns = upto_ns if s.start_ns - upto_ns <= MERGE_NS else s.start_ns
        lived_ns += max(0, s.end_ns - since_ns)
        upto_ns = max(upto_ns, s.end_ns)
    return lived_ns


def _within(span: Span, start_ns: int, end_ns: int) -> Span | None:
    """The part of a span between two moments, busy in the same proportion."""
    first, last = max(span.start_ns, start_ns), min(span.end_ns, end_ns)
    if first >= last:
        return None
    if (first, last) == (span.start_ns, span.end_ns):
        return span
    busy = span.busy_ns * (last - first) // (span.end_ns - span.start_ns)
    return replace(span, start_ns=first, end_ns=last, busy_ns=busy)


def covered_ns(spans: Iterable[Span]) -> int:
    """Time in which any of the spans was busy. One that was busy for a part of its length counts so at every moment of
    it, and several at once count as at most one."""
    edges: list[tuple[int, float]] = []
    for s in spans:
        density = s.busy_ns / max(s.end_ns - s.start_ns, 1)
        edges += [(s.start_ns, density), (s.end_ns, -density)]
    covered, level, before = 0.0, 0.0, 0
    for at, change in sorted(edges):
        covered += min(max(level, 0.0), 1.0) * (at - before)
        level, before = level + change, at
    return round(covered)


# ---------------------------------------------------------------- drawn


def _drawn(stage: StageTime, *, process: str | None = None) -> list[RenderableType]:
    """process: one beside the run's own, which has no steps."""
    what = f"{stage.steps} steps" if process is None else f"process {printable(process)}"
    many = len(stage.processes) > 1
    head = Text.assemble(
        (printable(stage.stage), "bold"),
        f"  {what} in {stage.seconds:.1f} s, bubble {stage.bubble:.1%}",
        (f" (share of the time of {len(stage.processes)} processes, after start-up, in which they waited)", "dim")
        if many
        else (" (share of the time after start-up in which neither sampling nor training computed)", "dim"),
        f"\nnothing computed anywhere: {stage.still:.1%} of the time" if many else "",
    )  # fmt: skip
    crews: list[RenderableType] = [_crews(stage.processes), ""] if many else []
    return [head, _table(stage), "", *crews]


def _table(stage: StageTime) -> Table:
    table = columns("", "what", "seconds", "share", "step: median", "max", "times", left=(0, 1))
    for kind in ("phase", "wait", "asked", "work", "part"):
        for x in (x for x in stage.spent if x.kind == kind):
            where = kind if kind in ("phase", "wait") else printable(x.lane)
            name = f"  {printable(x.name)}" if kind == "part" else printable(x.name)
            numbers = (
                f"{x.seconds:.3f}",
                f"{x.share:.1%}",
                f"{x.median_s:.4f}",
                f"{x.max_s:.4f}",
                str(x.pieces),
            )
            table.add_row(Text(where, "dim"), Text(name), *numbers)
    table.add_row("", Text("other", "dim"), f"{stage.other_s:.3f}", f"{stage.other_s / stage.seconds:.1%}")
    return table


def _crews(processes: Sequence[Process]) -> Table:
    """A line a process: how long it was busy and waited. Many of a kind are three lines."""
    titles = ("process", "", "busy s", "wait s", "busy", "step: least", "median", "most", "mostly")
    table = columns(*titles, left=(0, 1))
    for of in dict.fromkeys(p.of for p in processes):
        some = [p for p in processes if p.of == of]
        if not of or len(some) <= MOST_LINES:
            for p in some:
                table.add_row(Text(printable(p.name)), "", *_numbers([p]))
            continue
        table.add_row(Text(printable(f"{of} ({len(some)})")), Text("mean", "dim"), *_numbers(some))
        busy = attrgetter("busy")
        for which, p in (("least", min(some, key=busy)), ("most", max(some, key=busy))):
            table.add_row(Text(f"  {printable(p.name)}"), Text(which, "dim"), *_numbers([p]))
    return table


def _numbers(some: Sequence[Process]) -> list[str | Text]:
    """Means over the processes; of their steps the extremes and the median over all."""
    shares = [share for p in some for share in p.steps] or [0.0]
    return [
        f"{mean(p.busy_s for p in some):.3f}",
        f"{mean(p.wait_s for p in some):.3f}",
        *(f"{x:.1%}" for x in (mean(p.busy for p in some), min(shares), median(shares), max(shares))),
        Text(printable(some[0].mostly)) if len(some) == 1 else "",
    ]
