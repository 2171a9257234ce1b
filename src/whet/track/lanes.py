"""What other processes of the run do, on its timeline: trainer ranks and engine replicas, a lane each.

Such a process notes its spans on its own clock (`Notes`) and hands them over with its next answer (`Told`); the process
of the run puts them on its clock and draws the waits between them (`Lane`). The clocks of two processes on one machine
are one clock. Of a machine elsewhere the shortest trip of a question and its answer says how far its clock is ahead:
what it read lies in the middle between what was read here before and after, wrong by half that trip at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from whet.track.timeline import MERGE_NS, Kind, Span, Timeline, clock

MOST = 256
"""Of more spans than these neighbours are joined, before they travel and before they are written."""
DRIFT = 1e-4
"""Clocks of two machines may drift apart by so much: the older a trip is, the less its shortness is worth."""

RANKS, REPLICAS = "ranks", "replicas"
"""`Span.of`"""


@dataclass(frozen=True, slots=True)
class Told:
    """What comes with an answer. Times are of the clock of the process that answers."""

    heard_ns: int
    """When the question came."""
    said_ns: int
    spans: list[Span]


class Notes:
    """Spans of a process that writes no timeline, until they are sent. They cost microseconds."""

    def __init__(self, clock: Callable[[], int] = clock) -> None:
        self.clock = clock
        self.spans: list[Span] = []
        """What was noted since the last question; folded, where nobody asks."""
        self._depth = 0

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """What happens inside, however it ends. A span in a span is a part of it."""
        start_ns = self.clock()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._add(self._ended(name, start_ns))

    @contextmanager
    def piece(self, name: str) -> Iterator[None]:
        """One of many short pieces of work, joined with the one before if that was the same and has just ended."""
        start_ns = self.clock()
        try:
            yield
        finally:
            last = self.spans[-1] if self.spans else None
            kind: Kind = "part" if self._depth else "work"
            if last is None or (last.name, last.kind) != (name, kind) or start_ns - last.end_ns > MERGE_NS:
                self._add(self._ended(name, start_ns))
            else:
                last.end_ns = self.clock()
                last.busy_ns += last.end_ns - start_ns
                last.pieces += 1

    def told(self, heard_ns: int) -> Told:
        """All that was noted since the last time. heard_ns: when the question came that is answered now."""
        spans, self.spans = folded(self.spans), []
        return Told(heard_ns, self.clock(), spans)

    def _ended(self, name: str, start_ns: int) -> Span:
        """A span that ends now. Lane and step are known where it is written."""
        kind: Kind = "part" if self._depth else "work"
        end_ns = self.clock()
        busy_ns = end_ns - start_ns
        return Span(
            name=name, lane="", kind=kind, stage="", step=0, start_ns=start_ns, end_ns=end_ns, busy_ns=busy_ns
        )

    def _add(self, span: Span) -> None:
        self.spans.append(span)
        if len(self.spans) > 4 * MOST:  # nobody asks
            self.spans = folded(self.spans)


class Lane:
    """The lane of one process: takes its spans, until `end`."""

    def __init__(
        self,
        timeline: Timeline,
        name: str,
        *,
        of: str,
        near: bool,
        waits: str,
        clock: Callable[[], int] = clock,
    ) -> None:
        """of: what it is one of. near: it runs on this machine. waits: what its waits are called."""
        self.timeline, self.clock = timeline, clock
        self.name, self.of, self.near, self.waits = name, of, near, waits
        self.ahead_ns = 0
        """How far its clock is before the one here."""
        self.trip_ns: int | None = None
        """Of the trip that says so."""
        self.over = False
        self._tripped_ns = 0
        self._upto_ns = clock()
        """So far it is drawn."""
        self._spans: deque[Span] = deque()
        timeline.beside.append(self)

    def take(self, told: Told, sent_ns: int) -> None:
        """sent_ns: time of the request, by the local clock. May be called in any thread."""
        if not self.near:
            self._compare(told, sent_ns)
        stage, step = self.timeline.at
        for span in told.spans:
            start_ns, end_ns = span.start_ns - self.ahead_ns, span.end_ns - self.ahead_ns
            self._spans.append(
                replace(
                    span,
                    lane=self.name,
                    of=self.of,
                    stage=stage,
                    step=step,
                    start_ns=start_ns,
                    end_ns=end_ns,
                )
            )

    def end(self) -> None:
        """The process is asked no more; what it did since its last answer nobody knows."""
        self.over = True

    def drawn(self) -> list[Span]:
        """What it has told since the last time, with its waits, work after work; parts lie inside of their work."""
        taken: list[Span] = []
        while self._spans:
            taken.append(self._spans.popleft())
        taken.sort(key=lambda s: (s.start_ns, -s.end_ns))
        out: list[Span] = []
        first_ns = self._upto_ns
        for span in folded(_runs(taken)):
            if span.kind == "work":
                if span.start_ns - self._upto_ns > MERGE_NS:
                    out.append(self._wait(span.start_ns, like=span))
                first_ns = self._upto_ns if span.end_ns > self._upto_ns else span.start_ns
                self._upto_ns = max(self._upto_ns, span.end_ns)
            # a better comparison of the clocks may have moved it back a little, over what is drawn already
            span.start_ns = max(span.start_ns, first_ns)
            span.end_ns = max(span.start_ns, span.end_ns)
            span.busy_ns = min(span.busy_ns, span.end_ns - span.start_ns)
            out.append(span)
        return out

    # -- inside

    def _wait(self, end_ns: int, *, like: Span) -> Span:
        return replace(
            like,
            name=self.waits,
            kind="wait",
            start_ns=self._upto_ns,
            end_ns=end_ns,
            busy_ns=end_ns - self._upto_ns,
            pieces=1,
        )

    def _compare(self, told: Told, sent_ns: int) -> None:
        now_ns = self.clock()
        trip_ns = now_ns - sent_ns - (told.said_ns - told.heard_ns)
        if self.trip_ns is None or trip_ns <= self.trip_ns + DRIFT * (now_ns - self._tripped_ns):
            self.trip_ns, self._tripped_ns = trip_ns, now_ns
            self.ahead_ns = (told.heard_ns - sent_ns + told.said_ns - now_ns) // 2


def _runs(spans: list[Span]) -> list[Span]:
    """Work that goes on after an answer in the middle of it becomes one span again."""
    out: list[Span] = []
    for span in spans:
        last = out[-1] if out else None
        if last is not None and span.kind == "work" and _follows(last, span):
            _join(last, span)
        else:
            out.append(span)
    return out


def folded(spans: list[Span]) -> list[Span]:
    """At most about `MOST` spans that were busy as long: neighbours of one kind are joined, the busier one names
    both. Parts of different works stay apart."""
    while len(spans) > MOST:
        fewer: list[Span] = []
        pairs = iter(spans)
        for span in pairs:
            other = next(pairs, None)
            fewer.append(span)
            if other is None:
                break
            if _alike(span, other):
                _join(span, other)
            else:
                fewer.append(other)
        if len(fewer) == len(spans):
            return spans
        spans = fewer
    return spans


def _alike(span: Span, other: Span) -> bool:
    return (span.kind, span.stage, span.step) == (other.kind, other.stage, other.step)


def _follows(last: Span, span: Span) -> bool:
    return _alike(last, span) and last.name == span.name and span.start_ns - last.end_ns <= MERGE_NS


def _join(span: Span, other: Span) -> None:
    if other.busy_ns > span.busy_ns:
        span.name = other.name
    span.start_ns, span.end_ns = min(span.start_ns, other.start_ns), max(span.end_ns, other.end_ns)
    span.busy_ns += other.busy_ns
    span.pieces += other.pieces
