"""Lanes of ranks and replicas: work and waits of other processes on the clock of this one, and what is counted."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from whet.track import lanes, time_report
from whet.track.lanes import MOST, REPLICAS, Lane, Notes, Told, folded
from whet.track.timeline import SAMPLING, STEPS, Span, Timeline, read

MS = 1_000_000
AHEAD = 3_600_000 * MS + 77
"""Of a clock elsewhere."""


def picture(path: Path) -> dict[str, list[Span]]:
    """A timeline's lanes of other processes, as every viewer has them: all is named, what is at the top of a lane
    follows one another, parts lie inside of their work."""
    events = json.loads(path.read_text())
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == named
    assert {pid for pid, _ in named} == {e["pid"] for e in events if e["name"] == "process_name"}
    found: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for s in read(path):
        if s.of:
            found[s.process, s.lane].append(s)
    for some in found.values():
        top = sorted((s for s in some if s.kind in ("work", "wait")), key=lambda s: s.start_ns)
        assert all(0 <= s.busy_ns <= s.end_ns - s.start_ns + 1000 for s in some)
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(top))
        for part in (s for s in some if s.kind == "part"):
            assert any(s.start_ns <= part.start_ns <= part.end_ns <= s.end_ns for s in top)
    out: dict[str, list[Span]] = defaultdict(list)
    for (_, name), some in found.items():
        out[name] += some
    return out


class Clock:
    """A clock that stands still until told."""

    def __init__(self, ahead_ns: int = 0) -> None:
        self.now = 5 * MS
        self.ahead_ns = ahead_ns

    def __call__(self) -> int:
        return self.now

    def there(self) -> int:
        """What the clock of the other process says at this moment."""
        return self.now + self.ahead_ns

    def tick(self, ms: float) -> None:
        self.now += round(ms * MS)


def opened(
    tmp_path: Path, clock: Clock, *, near: bool = False, name: str = "rank 0"
) -> tuple[Timeline, Lane]:
    timeline = Timeline(tmp_path / "timeline.json")
    timeline.at = "s", 1
    return timeline, Lane(timeline, name, of="ranks", near=near, waits="idle", clock=clock)


def shown(spans: list[Span], since_ns: int = 5 * MS) -> list[tuple[str, str, float, float]]:
    return [(s.kind, s.name, (s.start_ns - since_ns) / MS, (s.end_ns - since_ns) / MS) for s in spans]


# ---------------------------------------------------------------- told and drawn


def test_work_parts_and_the_waits_between(tmp_path: Path) -> None:
    clock = Clock()
    _, lane = opened(tmp_path, clock, near=True)
    notes = Notes(clock)
    clock.tick(10)
    with notes.span("policy update"):
        clock.tick(4)
        with notes.span("optimizer step"):
            clock.tick(2)
    clock.tick(20)
    with pytest.raises(FileNotFoundError), notes.span("save"):
        Path(clock.tick(3) or "nowhere").read_text()
    lane.take(notes.told(clock()), clock())
    assert shown(lane.drawn()) == [
        ("wait", "idle", 0, 10), ("work", "policy update", 10, 16), ("part", "optimizer step", 14, 16),
        ("wait", "idle", 16, 36), ("work", "save", 36, 39),
    ]  # fmt: skip
    assert notes.told(clock()).spans == lane.drawn() == []


def test_decode_steps_are_one_span_also_over_an_answer_between_them(tmp_path: Path) -> None:
    clock = Clock()
    _, lane = opened(tmp_path, clock, near=True)
    notes = Notes(clock)
    for name in ("prefill", *["decode"] * 6):
        with notes.piece(name):
            clock.tick(2)
        clock.tick(0.5)
        lane.take(notes.told(clock()), clock())
    prefill, decode = lane.drawn()
    assert (prefill.name, decode.name, decode.pieces, decode.busy_ns) == ("prefill", "decode", 6, 12 * MS)
    assert decode.end_ns - decode.start_ns == 14_500_000


def test_what_is_decoded_while_weights_come_is_a_part_of_that(tmp_path: Path) -> None:
    clock = Clock()
    _, lane = opened(tmp_path, clock, near=True)
    notes = Notes(clock)
    with notes.piece("decode"):
        clock.tick(2)
    with notes.span("load weights"):
        clock.tick(0.1)
        with notes.piece("decode"):
            clock.tick(2)
    lane.take(notes.told(clock()), clock())
    assert [(s.kind, s.name) for s in lane.drawn()] == [
        ("work", "decode"), ("work", "load weights"), ("part", "decode"),
    ]  # fmt: skip


def test_there_are_never_many_and_none_is_lost(tmp_path: Path) -> None:
    clock = Clock()
    notes = Notes(clock)
    for n in range(20 * MOST):
        with notes.piece(f"{'decode' if n % 2 else 'prefill'}"):
            clock.tick(2 + n % 2)
    assert len(notes.spans) <= 4 * MOST + 1
    told = notes.told(clock()).spans
    assert len(told) <= MOST
    assert sum(s.busy_ns for s in told) == 20 * MOST * 2.5 * MS
    assert sum(s.pieces for s in told) == 20 * MOST
    assert {s.name for s in told} == {"decode"}


def test_parts_of_different_works_stay_apart() -> None:
    made = Notes(clock := Clock())
    for _ in range(20):
        with made.span("update"):
            for _ in range(40):
                with made.span("micro-batch"):
                    clock.tick(1)
    kinds = [s.kind for s in folded(made.told(0).spans)]
    assert kinds.count("work") == 20
    assert len(kinds) <= MOST


# ---------------------------------------------------------------- clocks


def ask(clock: Clock, lane: Lane, notes: Notes, *, there_ms: float, work_ms: float, back_ms: float) -> None:
    """One question that is on its way, worked on, and on its way back for so long."""
    sent_ns = clock()
    clock.tick(there_ms)
    heard_ns = clock.there()
    with notes.span("update"):
        clock.tick(work_ms)
    told = notes.told(heard_ns)
    clock.tick(back_ms)
    lane.take(told, sent_ns)


def test_the_shortest_trip_says_how_far_a_clock_is_ahead(tmp_path: Path) -> None:
    clock = Clock(AHEAD)
    _, lane = opened(tmp_path, clock)
    notes = Notes(clock.there)
    ask(clock, lane, notes, there_ms=40, work_ms=500, back_ms=10)
    assert (lane.trip_ns, lane.ahead_ns - AHEAD) == (50 * MS, 15 * MS)
    ask(clock, lane, notes, there_ms=2, work_ms=900, back_ms=3)
    assert (lane.trip_ns, lane.ahead_ns - AHEAD) == (5 * MS, -MS / 2)
    ask(clock, lane, notes, there_ms=3, work_ms=1, back_ms=3)
    assert lane.trip_ns == 5 * MS, "a longer one says less"
    clock.tick(3.6e6)  # until the clocks may have drifted apart
    clock.ahead_ns += 30 * MS
    ask(clock, lane, notes, there_ms=3, work_ms=1, back_ms=3)
    assert (lane.trip_ns, lane.ahead_ns) == (6 * MS, clock.ahead_ns)


trips = st.tuples(*[st.floats(0.01, 30)] * 4, st.booleans())


@settings(max_examples=60, deadline=None)
@given(st.lists(trips, min_size=1, max_size=25))
def test_a_far_lane_is_in_order_and_wrong_by_half_a_trip_at_most(tmp_path_factory, story) -> None:  # type: ignore[no-untyped-def]
    tmp_path = tmp_path_factory.mktemp("far")
    clock = Clock(AHEAD)
    timeline, lane = opened(tmp_path, clock)
    notes = Notes(clock.there)
    true: list[tuple[int, int]] = []
    for pause_ms, there_ms, work_ms, back_ms, written in story:
        clock.tick(pause_ms)
        true.append((clock() + round(there_ms * MS), round(work_ms * MS)))
        ask(clock, lane, notes, there_ms=there_ms, work_ms=work_ms, back_ms=back_ms)
        assert lane.trip_ns is not None
        assert abs(lane.ahead_ns - AHEAD) <= lane.trip_ns / 2 + 1
        if written:
            timeline.flush()
    timeline.close()
    drawn = picture(tmp_path / "timeline.json")["rank 0"]
    work = [s for s in drawn if s.kind == "work"]
    assert sum(s.pieces for s in work) == len(true)
    assert {s.of for s in drawn} == {"ranks"}


# ---------------------------------------------------------------- counted


def span(name: str, lane: str, start_ms: float, length_ms: float, **more) -> Span:  # type: ignore[no-untyped-def]
    given = {"kind": "work", "stage": "s", "step": 1, "busy_ns": round(length_ms * MS), **more}
    start_ns = round(start_ms * MS)
    return Span(name=name, lane=lane, start_ns=start_ns, end_ns=start_ns + round(length_ms * MS), **given)


def run_of(count: int) -> list[Span]:
    """Two steps of 100 ms after 50 ms of opening: the driver samples for 30 of each, rank n trains for 40 + n / 4 of
    the first one, all for 50 of the second one."""
    spans = [
        span("open stage", STEPS, 0, 50, kind="phase", step=0),
        span("decode", SAMPLING, 50, 30), span("update", STEPS, 90, 60, kind="phase"),
        span("decode", SAMPLING, 150, 30, step=2), span("update", STEPS, 190, 60, kind="phase", step=2),
        span("update", "policy", 90, 60, kind="asked"), span("update", "policy", 190, 60, kind="asked", step=2),
    ]  # fmt: skip
    for n in range(count):
        lane = {"lane": f"rank {n}", "of": "ranks"}
        spans += [
            span("load weights", start_ms=0, length_ms=50, **lane),
            span("idle", start_ms=50, length_ms=40, kind="wait", **lane),
            span("policy update", start_ms=90, length_ms=40 + n / 4, **lane),
            span("idle", start_ms=130 + n / 4, length_ms=60 - n / 4, kind="wait", step=2, **lane),
            span("policy update", start_ms=190, length_ms=50, step=2, **lane),
            span("optimizer step", start_ms=230, length_ms=10, kind="part", step=2, **lane),
            span("idle", start_ms=240, length_ms=10, kind="wait", step=2, **lane),
        ]
    return spans


def test_ranks_and_the_bubble_by_hand() -> None:
    (stage,) = time_report.measure(run_of(2))
    assert (stage.seconds, stage.steps) == (pytest.approx(0.250), 2)
    driver, first, second = stage.processes
    assert (driver.name, driver.busy_s, driver.wait_s, driver.mostly) == ("driver", 0.06, 0.14, "decode")
    assert (first.name, first.busy_s, first.wait_s, first.mostly) == ("rank 0", 0.09, 0.11, "policy update")
    assert second.steps == (0.4025, 0.5)
    assert stage.bubble == pytest.approx((0.14 + 0.11 + 0.10975) / 0.6)
    assert stage.still == pytest.approx(1 - (30 + 40.25 + 30 + 50) / 200)
    assert {x.lane for x in stage.spent} == {STEPS, SAMPLING, "policy"}


def test_a_driver_that_only_asks_is_no_process_that_could_work() -> None:
    (stage,) = time_report.measure([s for s in run_of(2) if s.lane != SAMPLING])
    assert [p.name for p in stage.processes] == ["rank 0", "rank 1"]


def test_a_process_counts_while_it_is_there() -> None:
    """A replica that comes at 100 ms and is lost at 140; another one in its place works from 200 on."""
    where = {"lane": "replica engine-0", "of": REPLICAS}
    came = [
        span("idle", start_ms=100, length_ms=20, kind="wait", **where),
        span("decode", start_ms=120, length_ms=20, **where),
        span("decode", start_ms=200, length_ms=50, busy_ns=25 * MS, step=2, **where),
    ]
    (stage,) = time_report.measure([*run_of(0), *came])
    (_, replica) = stage.processes
    assert (replica.busy_s, replica.wait_s) == pytest.approx((0.045, 0.045))


def tells(spans: list[Span]) -> Any:
    """A process beside the run that has these to tell, and ends."""
    return SimpleNamespace(over=True, drawn=lambda: spans)


def printed(path: Path) -> str:
    console = Console(width=150, record=True)
    console.print(time_report.show(path))
    return console.export_text()


def test_many_of_a_kind_are_three_lines(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    timeline.beside.append(tells(run_of(64)))
    timeline.close()
    out = printed(tmp_path)
    lines = [line.split() for line in out.splitlines()]
    assert "share of the time of 65 processes" in out
    assert ["ranks", "(64)", "mean", "0.098", "0.102", "48.9%", "40.0%", "50.0%", "55.8%"] in lines
    assert [
        "rank",
        "0",
        "least",
        "0.090",
        "0.110",
        "45.0%",
        "40.0%",
        "45.0%",
        "50.0%",
        "policy",
        "update",
    ] in lines
    assert ["rank", "63", "most"] in [line[:3] for line in lines]
    assert len(lines) < 25


def test_replicas_of_an_explorer_are_its_own(tmp_path: Path) -> None:
    """The run's own process trains; an explorer beside it only asks its replica."""
    for place, spans in [
        (".", [span("update", STEPS, 0, 100, kind="phase"), span("update", "policy", 0, 60)]),
        ("explorers/one", [span("explore", "exploring", 20, 80, kind="phase"),
                           span("decode", "replica engine-0", 20, 60, of=REPLICAS)]),
    ]:  # fmt: skip
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        timeline = Timeline(tmp_path / place / "timeline.json")
        timeline.wall_ns = 0
        timeline.beside.append(tells(spans))
        timeline.close()
    beside = {"one": read(tmp_path / "explorers/one/timeline.json")}
    (stage,) = time_report.measure(read(tmp_path / "timeline.json"), beside=beside)
    assert [(p.name, p.busy_s) for p in stage.processes] == [
        ("driver", 0.06), ("replica engine-0 of one", 0.06),
    ]  # fmt: skip
    assert stage.bubble == pytest.approx(0.04 / 0.16)
    assert "replica engine-0" in printed(tmp_path)


def test_told_travels_as_a_plain_value() -> None:
    import pickle

    notes = Notes()
    with notes.span("update"):
        pass
    told = notes.told(3)
    assert pickle.loads(pickle.dumps(told, protocol=5)) == told
    assert isinstance(told, Told)
    assert lanes.RANKS != lanes.REPLICAS
