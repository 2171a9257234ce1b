"""Where the time of a run went: `whet show RUN --timeline`, from the timeline.json of each of its processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whet.track.report import printable
from whet.track.timeline import OPEN_STAGE, START_UP, Kind, Span, read
from whet.types import DataError


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
class StageTime:
    """One stage: wall time over all starts of the run, without the time between them."""

    stage: str
    steps: int
    seconds: float
    rest_s: float
    """What no phase and no wait claims."""
    bubble: float
    """Share of the time after start-up in which neither sampling nor training computed, in no process of the run."""
    spent: tuple[Spent, ...]


def show(run_dir: Path) -> RenderableType:
    """A table a stage, of the run itself and of each process beside it. DataError if the run has no timeline."""
    path = run_dir / "timeline.json"
    if not path.exists():
        raise DataError(
            f"{run_dir} holds no timeline.json: it is no run directory, or its first step is not done"
        )
    beside = {p.parent.name: read(p) for p in processes_beside(run_dir)}
    parts = [part for stage in measure(read(path), beside=beside.values()) for part in _drawn(stage)]
    for name, spans in beside.items():
        parts += [part for stage in measure(spans) for part in _drawn(stage, process=name)]
    return Group(*parts)


def processes_beside(run_dir: Path) -> list[Path]:
    """The timelines of explorers and bench with processes of their own."""
    return sorted((*run_dir.glob("explorers/*/timeline.json"), *run_dir.glob("bench/timeline.json")))


def measure(spans: Sequence[Span], *, beside: Iterable[Sequence[Span]] = ()) -> list[StageTime]:
    """The stages in the order they ran. beside: what other processes of the run did."""
    stages = dict.fromkeys(s.stage for s in spans)
    work = [s for other in beside for s in other if s.kind == "work"]
    return [_stage(name, [s for s in spans if s.stage == name], work) for name in stages]


def _stage(name: str, spans: Sequence[Span], beside: Sequence[Span]) -> StageTime:
    starts: dict[int, list[Span]] = defaultdict(list)
    for s in spans:
        starts[s.process].append(s)
    wall_ns = sum(max(s.end_ns for s in own) - min(s.start_ns for s in own) for own in starts.values()) or 1
    opening_ns = sum(s.busy_ns for s in spans if s.name in (START_UP, OPEN_STAGE))
    busy_ns = sum(_computed_ns(own, beside) for own in starts.values())
    groups: dict[tuple[Kind, str, str], list[Span]] = defaultdict(list)
    for s in spans:
        groups[s.kind, s.lane, s.name].append(s)
    spent = [_spent(kind, lane, what, own, wall_ns) for (kind, lane, what), own in groups.items()]
    claimed_s = sum(x.seconds for x in spent if x.kind in ("phase", "wait"))
    return StageTime(
        stage=name,
        steps=len({s.step for s in spans if s.kind == "phase" and s.name == "update"}),
        seconds=wall_ns / 1e9,
        rest_s=max(0.0, wall_ns / 1e9 - claimed_s),
        bubble=1 - busy_ns / max(wall_ns - opening_ns, 1),
        spent=tuple(sorted(spent, key=lambda x: -x.seconds)),
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


def _computed_ns(own: Sequence[Span], beside: Sequence[Span]) -> int:
    """Time in which this process computed or, once it was open, another one."""
    opened = max(
        (s.end_ns for s in own if s.name in (START_UP, OPEN_STAGE)), default=min(s.start_ns for s in own)
    )
    ended = max(s.end_ns for s in own)
    cut = (_within(s, opened, ended) for s in beside)
    return covered_ns([*(s for s in own if s.kind == "work"), *(s for s in cut if s is not None)])


def _within(span: Span, start_ns: int, end_ns: int) -> Span | None:
    """The part of a span between two moments, busy in the same proportion."""
    first, last = max(span.start_ns, start_ns), min(span.end_ns, end_ns)
    if first >= last:
        return None
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
    head = Text.assemble(
        (printable(stage.stage), "bold"),
        f"  {what} in {stage.seconds:.1f} s, bubble {stage.bubble:.1%}",
        (" (share of the time after start-up in which neither sampling nor training computed)", "dim"),
    )
    return [head, _table(stage), ""]


def _table(stage: StageTime) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
    table.add_column("")
    table.add_column("what")
    for title in ("seconds", "share", "step: median", "max", "times"):
        table.add_column(title, justify="right")
    for kind in ("phase", "wait", "work", "part"):
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
    table.add_row("", Text("rest", "dim"), f"{stage.rest_s:.3f}", f"{stage.rest_s / stage.seconds:.1%}")
    return table
