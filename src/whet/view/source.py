"""What the viewer reads: the runs that were named, and what has been read of their files, until a file changes."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import unquote

import pyarrow as pa
from tokenizers import Tokenizer

from whet.config.tree import stage_names
from whet.data.parquet import count_rows
from whet.track.overview import Lines, state_of, tokenizer_of
from whet.track.timeline import Span, SpanReader
from whet.track.written import list_steps, read_config, read_manifest, read_more, read_table
from whet.types import ConfigError, DataError, Json, WhetError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

MARKS = ("metrics.jsonl", "run.log", "manifest.json", "config.yaml")
"""A folder with one of them is a run directory: a run that was killed during its start has no metrics yet."""
RECORDS = (
    *MARKS,
    "timings.jsonl",
    "timeline.json",
    "lock",
    "rollouts",
    "eval",
    "batches",
    "seconds",
    "checkpoints",
    "export",
)
"""Whatever a run adds to its record, one of these changes."""
LISTS = ("names",)
"""Parameters that are lists of texts: each is encoded, commas stand between them."""
MOST_RUNS = 1000
MOST_FACTS = 20_000
"""Of what was made of single files of a run."""
MOST_COUNTS = 1_000_000
"""Files whose number of rollouts is kept: the page of a run asks for all of them, every two seconds."""


class NotThere(WhetError):
    """What was asked for is not in the record."""


class BadQuestion(WhetError):
    """A parameter that is missing, or has a value that cannot be read."""


def find_runs(given: Sequence[Path]) -> list[Path]:
    """The run directories: those given, and those in given folders, by name. DataError for a path with neither."""
    found: list[Path] = []
    for path in given:
        if not path.exists():
            raise DataError(
                f"{path}: no such folder; expected a run directory, or a folder with run directories"
            )
        inner = [path] if _is_run(path) else sorted(p for p in path.glob("*") if _is_run(p))
        if not inner:
            raise DataError(
                f"{path} is not a run directory and has none: a run directory has metrics.jsonl or run.log"
            )
        found += inner
    if len(found) > MOST_RUNS:
        raise ConfigError(f"{len(found)} run directories; name at most {MOST_RUNS}")
    return list(dict.fromkeys(found))


def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in MARKS)


@dataclass
class FileCache:
    """What was made of files, until a file is another one: at most so many, the last used ones."""

    most: int
    _values: OrderedDict[Any, tuple[Json, Any]] = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)

    def of(self, make: Callable[[Path], T], path: Path) -> T:
        """`make(path)`, made again when time, size or inode of the file have changed."""
        stamp = stamp_of(path)
        with self._lock:
            before = self._values.get((make, path))
            if before is not None and before[0] == stamp:
                self._values.move_to_end((make, path))
                return before[1]
        value = make(path)
        with self._lock:
            self._values[make, path] = stamp, value
            while len(self._values) > self.most:
                self._values.popitem(last=False)
        return value


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """Time, size and inode of a file or folder; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class GrowingReader(Protocol[T_co]):
    """Reads a file that grows."""

    @property
    def end(self) -> int:
        """Bytes that have been read."""

    def read(self, path: Path) -> T_co:
        """What is made of all of the file, of which only what is new is read."""


class LineReader:
    """Reads metrics.jsonl or timings.jsonl."""

    def __init__(self) -> None:
        self.end = 0
        self._lines: Lines = []

    def read(self, path: Path) -> Lines:
        """All lines so far."""
        more, self.end = read_more(path, self.end, len(self._lines) + 1)
        self._lines = [*self._lines, *more]
        return self._lines


@dataclass
class GrowingFile(Generic[T]):
    """A file that grows, or is written anew: then it is read from its beginning."""

    make: Callable[[], GrowingReader[T]]
    _inode: int = -1
    _last: bytes = b""
    """What was read last: another file may have the inode of one that was deleted, and be longer."""
    _reader: GrowingReader[T] | None = None
    _lock: Lock = field(default_factory=Lock)

    def read(self, path: Path) -> T | None:
        """What is made of all of it; None where there is none."""
        with self._lock:
            stamp = stamp_of(path)
            if stamp is None:
                return None
            _, size, inode = stamp
            reader = self._reader
            if (
                reader is None
                or inode != self._inode
                or size < reader.end
                or self._last != _before(path, reader.end)
            ):
                self._inode, self._reader = inode, (reader := self.make())
            found = reader.read(path)
            self._last = _before(path, reader.end)
            return found


def _before(path: Path, end: int, most: int = 4096) -> bytes:
    """At most so many bytes of a file before its byte `end`."""
    if end == 0:
        return b""
    with path.open("rb") as file:
        file.seek(max(end - most, 0))
        return file.read(min(end, most))


class Shown:
    """One run directory, read bit by bit. Files that cannot be read raise DataError."""

    def __init__(self, number: int, path: Path) -> None:
        self.id, self.path, self.name = str(number), path, path.resolve().name
        self._facts, self._whole = FileCache(MOST_FACTS), FileCache(2)
        self._counts = FileCache(MOST_COUNTS)
        self._lines = {name: GrowingFile(LineReader) for name in ("metrics.jsonl", "timings.jsonl")}
        self._spans: defaultdict[Path, GrowingFile[list[Span]]] = defaultdict(
            partial(GrowingFile, SpanReader)
        )

    def look(self) -> None:
        """DataError where the run directory is gone."""
        if not self.path.is_dir():
            raise DataError(f"{self.path} is gone: it was moved or deleted since the viewer was started")

    def stamp(self) -> str:
        """Another text whenever the record has changed."""
        told = [state_of(self.path), *(stamp_of(self.path / name) for name in RECORDS)]
        return hashlib.sha256(repr(told).encode()).hexdigest()[:20]

    def lines(self, name: str) -> Lines:
        """The lines of metrics.jsonl or timings.jsonl."""
        return self._lines[name].read(self.path / name) or []

    def spans(self, path: Path) -> list[Span]:
        """The spans of a timeline, of the run or of a process beside it."""
        return self._spans[path].read(path) or []

    @property
    def config(self) -> dict[str, Json]:
        return self._facts.of(_config, self.path / "config.yaml")

    @property
    def manifest(self) -> dict[str, Json]:
        return self._facts.of(_manifest, self.path / "manifest.json")

    @property
    def stages(self) -> list[str]:
        """In the order in which they ran. A damaged metrics.jsonl does not hide the stages of rollout files."""
        ran = [
            line["stage"] for line in tried([], lambda: self.lines("metrics.jsonl"), list[dict[str, Json]]())
        ]
        files = [stage for stage, _, _ in list_steps(self.path / "rollouts")]
        named = [name for name in tried([], lambda: stage_names(self.config), list[str]()) if name in files]
        return list(dict.fromkeys([*ran, *named, *files]))

    def files(self, folder: str = "rollouts", stage: str | None = None) -> list[tuple[str, int, Path]]:
        """(stage, step, path) of the files of steps, in the run's order."""
        order = {name: n for n, name in enumerate(self.stages)}
        found = sorted(list_steps(self.path / folder), key=lambda f: (order.get(f[0], len(order)), f[:2]))
        return [f for f in found if stage in (None, f[0])]

    def file(self, stage: str, step: int, folder: str = "rollouts") -> Path:
        """NotThere if the step has none."""
        for at, number, path in list_steps(self.path / folder):
            if (at, number) == (stage, step):
                return path
        raise NotThere(f"{self.path} has no file of step {step} of stage {stage!r} in {folder}")

    def kept(self, make: Callable[[Path], T], path: Path) -> T:
        """`make(path)`, made once."""
        return self._facts.of(make, path)

    def rows(self, path: Path) -> int:
        """Rollouts in a file."""
        return self._counts.of(count_rows, path)

    def table(self, path: Path) -> pa.Table:
        """A file of rollouts with all columns; few are held at once."""
        return self._whole.of(read_table, path)

    def batch(self, read: Callable[[Path], pa.Table], path: Path) -> pa.Table:
        """A file of batches; few are held at once."""
        return self._whole.of(read, path)

    def read_tokenizer(self) -> Tokenizer | None:
        """Of the newest export or checkpoint; looked for again when one is added. WhetError if it is damaged."""
        exported = self._facts.of(tokenizer_of, self.path / "export")
        return exported or self._facts.of(tokenizer_of, self.path / "checkpoints")

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None of a damaged one, too: tokens are shown without their text then, and the run's page says why."""
        try:
            return self.read_tokenizer()
        except WhetError:
            return None


def _config(path: Path) -> dict[str, Json]:
    return read_config(path.parent)


def _manifest(path: Path) -> dict[str, Json]:
    return read_manifest(path.parent)


class ShownRuns:
    """The runs that are shown, by the numbers they have in addresses: those of these run directories, and those that
    come into these folders later."""

    def __init__(self, paths: Iterable[Path], folders: Sequence[Path] = ()) -> None:
        self.runs = tuple(Shown(number, path) for number, path in enumerate(paths))
        self._folders, self._lock = folders, Lock()

    def look(self) -> None:
        """Add the runs that have come since. A folder that is gone has none; its runs say so."""
        with self._lock, suppress(WhetError, OSError):
            known = {run.path for run in self.runs}
            new = [path for path in find_runs(self._folders) if path not in known]
            self.runs += tuple(Shown(number, path) for number, path in enumerate(new, len(self.runs)))

    def run(self, number: str) -> Shown:
        """NotThere if there is no such run."""
        for run in self.runs:
            if run.id == number:
                return run
        raise NotThere(f"no run {number[:20]!r}; runs: 0 to {len(self.runs) - 1}")


@dataclass(frozen=True)
class Ask:
    """One question: the runs, and the parameters of its address."""

    runs: ShownRuns
    params: Mapping[str, str]

    @property
    def run(self) -> Shown:
        return self.runs.run(self.params["run"])

    def get(self, name: str) -> str | None:
        return self.params.get(name) or None

    def text(self, name: str) -> str:
        """BadQuestion if it is missing."""
        if not (value := self.params.get(name)):
            raise BadQuestion(f"parameter {name} is missing")
        return value

    def list(self, name: str) -> list[str]:
        """The texts of one of `LISTS`; whatever is in them, a comma or a new line too."""
        value = self.params.get(name)
        return [unquote(one) for one in value.split(",")] if value else []

    def number(self, name: str, default: int | None = None) -> int:
        """BadQuestion if it is missing and has no default, or is no number of at most 18 digits."""
        value = self.params.get(name)
        if not value and default is not None:
            return default
        if not value:
            raise BadQuestion(f"parameter {name} is missing")
        if not value.isascii() or not value.isdigit() or len(value) > 18:
            raise BadQuestion(f"parameter {name} is {value[:40]!r}, expected a whole number from 0 on")
        return int(value)

    @property
    def stage(self) -> str:
        """The stage asked for; the last one that there is, if none is named. NotThere if the run has none."""
        stages = self.run.stages
        if (named := self.get("stage")) is not None:
            if named not in stages:
                raise NotThere(
                    f"{self.run.path} has no stage {named[:60]!r}; stages: {', '.join(stages) or 'none'}"
                )
            return named
        if not stages:
            raise NotThere(f"{self.run.path} has no stage yet")
        return stages[-1]

    @property
    def folder(self) -> str:
        """Where the files of steps lie that are asked for."""
        return "eval" if self.params.get("of") == "eval" else "rollouts"


def tried(problems: list[str], make: Callable[[], T], default: T) -> T:
    """What `make` gives, or the default: then the problems say why."""
    try:
        return make()
    except (WhetError, OSError) as e:
        problems.append(str(e))
        return default


def finite(value: float | None) -> float | None:
    """None in place of a number that JSON does not have."""
    return None if value is None or not math.isfinite(value) else value
