"""What a run did when: spans of work and of waiting, in RUN/timeline.json.

The file is a JSON array of Chrome trace events, one a line, in microseconds of wall time; chrome://tracing,
ui.perfetto.dev and speedscope open it. Each start of the run is a process of the trace, and in it are lanes: `steps`
(phases), `waits`, `sampling`, one for each model that trains, and one for each trainer rank and engine replica, with
what that process says of itself (see `lanes`). An array is closed after every write, in the same
system call that adds to it, so the file is whole JSON whenever a run was killed between two writes; a kill inside one
leaves a last line cut short, which `read` and those viewers leave out.

Spans are kept in memory until the step is written down. They cost microseconds and never enter metrics.jsonl.
"""

from __future__ import annotations

import errno
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal, Protocol

from whet.inputs import MOST_RECORD_BYTES, MOST_ROW_BYTES, check_regular, parse_json
from whet.track.files import file_error, write_bytes
from whet.types import DataError, Json

STEPS, WAITS, SAMPLING, EXPLORING = "steps", "waits", "sampling", "exploring"
"""Lanes that every run may have; the others are named after models that train."""

START_UP, OPEN_STAGE = "start-up", "open stage"
"""Phases before the first step."""

Kind = Literal["phase", "wait", "work", "part", "asked"]
"""work: sampling or training computes; part: what work is made of; asked: what ranks were asked to do, as long as this
process waited for them: in their own lanes it is work."""

_KINDS: dict[str, Kind] = {STEPS: "phase", WAITS: "wait", EXPLORING: "phase"}
_TAIL = b"\n]\n"
MERGE_NS = 1_000_000
"""Pieces of the same work that follow each other this closely become one span (decode steps)."""

clock = time.perf_counter_ns


@dataclass(slots=True, kw_only=True)
class Span:
    """One line of the timeline. Times are nanoseconds of `clock` while it is written, of wall time when it is read."""

    name: str
    lane: str
    kind: Kind
    stage: str
    step: int
    start_ns: int
    end_ns: int
    busy_ns: int
    """Time really spent in it: less than its length where it stands for many pieces."""
    pieces: int = 1
    process: int = 0
    """Number of the start of the run, from 1; known when it is read."""
    of: str = ""
    """What the process is one of that did it (`lanes.RANKS`, `lanes.REPLICAS`); none: the one that writes."""


class Beside(Protocol):
    """The lane of another process, drawn into this timeline."""

    over: bool
    """It will have no more."""

    def drawn(self) -> list[Span]:
        """What it has had since the last time."""


class Timeline:
    """Writes one run's timeline. One a process, under the run's lock; what an earlier start wrote stays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at: tuple[str, int] = ("", 0)
        """Stage and step that spans belong to from now on."""
        self.beside: list[Beside] = []
        """Other processes whose spans are written here."""
        self.opened_ns = clock()
        self.wall_ns = time.time_ns() - self.opened_ns
        """From this process's clock to the time of day, which the file has."""
        self._spans: list[Span] = []
        self._last: dict[str, Span] = {}
        self._depth: dict[str, int] = {}
        self._lanes: dict[str, int] = {}
        self._file: io.FileIO | None = None
        self._process = 0

    # -- noted

    @contextmanager
    def span(self, name: str, lane: str, *, kind: Kind = "work") -> Iterator[None]:
        """What happens inside, however it ends. On a lane of work, a span in a span is a part of it."""
        depth = self._depth.get(lane, 0)
        self._depth[lane] = depth + 1
        at, start_ns = self.at, clock()
        try:
            yield
        finally:
            self._depth[lane] = depth
            self._add(name, lane, _KINDS.get(lane) or ("part" if depth else kind), start_ns=start_ns, at=at)

    def since(self, start_ns: int, name: str, lane: str) -> float:
        """A span that ends now; returns its seconds."""
        self._add(name, lane, _KINDS.get(lane, "work"), start_ns=start_ns, at=self.at)
        return self._last[lane].busy_ns / 1e9

    def piece(self, name: str, lane: str) -> AbstractContextManager[None]:
        """One of many short pieces of work, joined with the one before if that was the same and has just ended."""
        return _Piece(self, name, lane)

    def spans_of(
        self, lane: str, *, skip: str | None = None, kind: Kind = "work"
    ) -> Callable[[str], AbstractContextManager[None]]:
        """`span` of one lane, for an engine that knows of no timeline; spans called `skip` are left out."""
        return lambda name: nullcontext() if name == skip else self.span(name, lane, kind=kind)

    def _add(self, name: str, lane: str, kind: Kind, *, start_ns: int, at: tuple[str, int]) -> None:
        end_ns = clock()
        stage, step = at
        span = Span(
            name=name,
            lane=lane,
            kind=kind,
            stage=stage,
            step=step,
            start_ns=start_ns,
            end_ns=end_ns,
            busy_ns=end_ns - start_ns,
        )
        self._spans.append(span)
        self._last[lane] = span

    def _join(self, name: str, lane: str, start_ns: int) -> None:
        last = self._last.get(lane)
        if last is None or last.name != name or start_ns - last.end_ns > MERGE_NS:
            self.since(start_ns, name, lane)
            return
        last.end_ns = clock()
        last.busy_ns += last.end_ns - start_ns
        last.pieces += 1

    # -- written

    def flush(self) -> None:
        """Bring what is noted into the file. WhetError, as for every file of the run, if that cannot be."""
        beside, self.beside = self.beside, [lane for lane in self.beside if not lane.over]
        for lane in beside:
            self._spans += lane.drawn()
        if not self._spans:
            return
        if self._file is None:
            self._open()
        events = [event for span in self._spans for event in self._events(span)]
        self._spans.clear()
        self._last.clear()
        self._append(events)

    def keep(self, wanted: Callable[[str, int], bool]) -> None:
        """Leave out what earlier starts wrote of steps (stage, step) that are not wanted; call it before `flush`."""
        if not self.path.exists():
            return

        def stays(event: Json) -> bool:
            return not _is_head(event) and wanted(event["args"]["stage"], event["args"]["step"])

        if any(stays(event) for _, event in _events(self.path)):
            kept = (line for line, event in _events(self.path) if _is_head(event) or stays(event))
            write_bytes(self.path, _array(kept))
        else:
            self.path.unlink()

    def sync(self) -> None:
        """Bring it onto the disk."""
        self.flush()
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self, *, write: bool = True) -> None:
        """Write what is left, if it is to be written. Safe to call twice."""
        if write:
            self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        """One more start of the run, after the others."""
        self._lanes.clear()
        write_bytes(self.path, _array(self._begun()))
        self._file = io.FileIO(self.path, "r+")

    def _begun(self) -> Iterator[bytes]:
        """The lines of earlier starts, and the first of this one."""
        self._process = 0
        for line, event in _events(self.path) if self.path.exists() else ():
            self._process = max(self._process, event["pid"])
            yield line
        self._process += 1
        yield _line(self._head("process", 0, f"start {self._process} (process {os.getpid()})"))

    def _append(self, events: list[Json]) -> None:
        assert self._file is not None
        handle = self._file.fileno()
        end = os.fstat(handle).st_size - len(_TAIL)
        data = b"".join(b",\n" + _line(event) for event in events) + _TAIL
        try:
            if os.pwrite(handle, data, end) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            os.pwrite(handle, _TAIL, end)  # its place is taken already, on a full disk too
            os.ftruncate(handle, end + len(_TAIL))
            raise file_error(e, self.path) from e

    def _events(self, span: Span) -> Iterator[Json]:
        if span.lane not in self._lanes:
            self._lanes[span.lane] = len(self._lanes)
            yield self._head("thread", self._lanes[span.lane], span.lane, of=span.of)
        args: dict[str, Json] = {"stage": span.stage, "step": span.step}
        start_us = (self.wall_ns + span.start_ns) // 1000
        if span.pieces > 1:
            args |= {"pieces": span.pieces, "busy_us": span.busy_ns // 1000}
        yield {
            "name": span.name,
            "cat": span.kind,
            "ph": "X",
            "ts": start_us,
            "dur": (self.wall_ns + span.end_ns) // 1000 - start_us,
            "pid": self._process,
            "tid": self._lanes[span.lane],
            "args": args,
        }

    def _head(self, what: Literal["process", "thread"], lane: int, name: str, *, of: str = "") -> Json:
        args = {"name": name} | ({"of": of} if of else {})
        return {"name": f"{what}_name", "ph": "M", "pid": self._process, "tid": lane, "args": args}


class Together:
    """What many do at once, as one span: from when the first begins until none is left."""

    def __init__(self) -> None:
        self._inside: dict[str, int] = {}
        self._since_ns: dict[str, int] = {}

    @contextmanager
    def span(self, name: str, ended: Callable[[str, int], object]) -> Iterator[None]:
        """`ended` is called with the name and when it began."""
        count = self._inside.get(name, 0)
        if count == 0:
            self._since_ns[name] = clock()
        self._inside[name] = count + 1
        try:
            yield
        finally:
            self._inside[name] -= 1
            if self._inside[name] == 0:
                ended(name, self._since_ns[name])


class _Piece:
    """A context without a generator: it is entered at every decode step."""

    __slots__ = ("lane", "name", "start_ns", "timeline")

    def __init__(self, timeline: Timeline, name: str, lane: str) -> None:
        self.timeline, self.name, self.lane, self.start_ns = timeline, name, lane, 0

    def __enter__(self) -> None:
        self.start_ns = clock()

    def __exit__(self, *_: object) -> None:
        self.timeline._join(self.name, self.lane, self.start_ns)


# ---------------------------------------------------------------- read back


def read(path: Path) -> list[Span]:
    """The spans of a timeline, in the order written. DataError if it is none."""
    return SpanReader().read(path)


class SpanReader:
    """Reads a timeline that a run may still write; each time only what is new."""

    def __init__(self) -> None:
        self._place = _Place()
        self._lanes: dict[tuple[int, int], tuple[str, str]] = {}
        self._spans: list[Span] = []

    @property
    def end(self) -> int:
        """Bytes of the file that have been read."""
        return self._place.byte

    def read(self, path: Path) -> list[Span]:
        """All spans so far, in the order written. DataError if the file is no timeline, and again at the next call."""
        for _, event in _events(path, self._place, most=MOST_RECORD_BYTES):
            lane = event["pid"], event["tid"]
            if _is_head(event):
                self._lanes[lane] = event["args"]["name"], event["args"].get("of", "")
            elif lane in self._lanes:
                self._spans.append(_span(event, *self._lanes[lane]))
            else:
                name = event["name"][:100]
                raise DataError(f"{path}: {name!r} is on a lane that has no name; is a line missing?")
        return [*self._spans]


def _span(e: dict[str, Json], lane: str, of: str) -> Span:
    start_ns, length_ns, args = e["ts"] * 1000, e["dur"] * 1000, e["args"]
    return Span(
        name=e["name"],
        lane=lane,
        kind=e["cat"],
        stage=args["stage"],
        step=args["step"],
        start_ns=start_ns,
        end_ns=start_ns + length_ns,
        busy_ns=args.get("busy_us", e["dur"]) * 1000,
        pieces=args.get("pieces", 1),
        process=e["pid"],
        of=of,
    )


@dataclass
class _Place:
    """Where the last event that was read ends. The writer puts the next ones there, in the place of the bracket."""

    byte: int = 0
    line: int = 1


def _events(
    path: Path, place: _Place | None = None, *, most: int | None = None
) -> Iterator[tuple[bytes, dict[str, Json]]]:
    """(text, event) of every whole line but the brackets; only the last may be broken, by a kill. One line at a time is
    in memory: a run resumes whatever the size of the file. place: where to begin; it moves with the events. most: bytes
    of a file that is read for people."""
    place = place or _Place()
    check_regular(path, DataError, most=most)
    try:
        with path.open("rb") as file:
            file.seek(begin := place.byte)
            for number in count(place.line):
                if not (raw := file.readline(MOST_ROW_BYTES)):
                    return
                line = raw.rstrip(b"\r\n").rstrip(b",")
                begin, at = begin + len(raw), begin
                if line in (b"[", b"]", b""):
                    continue
                try:
                    event = parse_json(line, "", DataError)
                except DataError as e:
                    if not file.read(1):
                        return
                    raise DataError(
                        f"{path} line {number} is not JSON{str(e).removeprefix(': not JSON')}"
                    ) from e
                if not _is_event(event):
                    raise DataError(f"{path} line {number} is not an event of a timeline")
                yield line, event
                place.byte, place.line = at + len(line), number
    except OSError as e:
        raise DataError(f"{path}: cannot be read: {e.strerror}") from e


def _array(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The text of a file with these lines."""
    before = b"[\n"
    for line in lines:
        yield before + line
        before = b",\n"
    yield _TAIL


def _is_event(event: Json) -> bool:
    """Whether a line is one that `Timeline` writes."""
    match event:
        case {"ph": "M", "pid": int(), "tid": int(), "args": {"name": str(), **more}}:
            return isinstance(more.get("of", ""), str)
        case {
            "ph": "X",
            "name": str(),
            "cat": "phase" | "wait" | "work" | "part" | "asked",
            "ts": int() as start,
            "dur": int() as length,
            "pid": int(),
            "tid": int(),
            "args": {"stage": str(), "step": int(), **more},
        }:
            numbers = (start, length, more.get("pieces", 1), more.get("busy_us", 0))
            return all(type(n) is int and 0 <= n < 2**63 for n in numbers)
        case _:
            return False


def _is_head(event: dict[str, Json]) -> bool:
    return event["ph"] == "M"


def _line(event: Json) -> bytes:
    return json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode()
