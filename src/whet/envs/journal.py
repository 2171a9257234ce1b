"""What environments have answered, on the disk before a rollout has it.

    RUN/journal/0001-0-000012.jsonl    a line of JSON for each answer after step 12 of stage 0, by the first process

A killed run asks the same environments the same questions again, and is told what they said then (`envs.journaled`).
The process that plays the rollouts writes the files: hosts die. One thread writes and syncs whatever has come
meanwhile, so many episodes share a sync and none holds up the event loop. A line that a kill has cut short was told to
no rollout.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from whet.envs.env import EnvBroken
from whet.track.files import file_error, not_linked, sync_path
from whet.types import Json, WhetError

log = logging.getLogger(__name__)

_NAME = re.compile(r"(\d{4,})-(\d+)-(\d{6,})\.jsonl")


@dataclass(frozen=True, slots=True)
class _Line:
    """Where an answer stands."""

    path: Path
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class _PendingAnswer:
    """An answer that is to be written."""

    path: Path
    name: tuple[str, int]
    asked: str
    data: bytes
    written: asyncio.Future[None]


class Journal:
    """The answers of one run. Close it with the run; one per run directory."""

    def __init__(self, folder: Path) -> None:
        """Reads what the run's earlier processes have written. WhetError if a file cannot be read."""
        self.folder = folder
        self.lines: dict[tuple[str, int], tuple[str, _Line]] = {}
        """By episode and turn: what was asked there last, and where the answer stands."""
        self._writes: SimpleQueue[_PendingAnswer | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._broken: WhetError | None = None
        starts = [0]
        for start, _, path in self._files():
            starts.append(start)
            self._read(path)
        self._start = max(starts) + 1
        self.at(0, 0)

    def at(self, stage: int, step: int) -> None:
        """What is written from here on comes after `step` steps of a stage."""
        self.place = stage, step
        self._path = self.folder / f"{self._start:04d}-{stage}-{step:06d}.jsonl"

    # -- answers

    def find(self, episode: str, turn: int, asked: str) -> Json | None:
        """What was answered to this question, the last time that it was. None: nothing."""
        known, line = self.lines.get((episode, turn), (None, None))
        return None if line is None or known != asked else _read_line(line)

    def other(self, episode: str, turn: int) -> Json | None:
        """What was answered there last, to any question. None: nothing was asked there."""
        known = self.lines.get((episode, turn))
        return None if known is None else _read_line(known[1])

    async def write(self, episode: str, turn: int, asked: str, answer: Json) -> None:
        """The answer is on the disk when this returns. EnvBroken if it cannot be written: the run must not go on."""
        if self._broken is not None:
            raise EnvBroken(str(self._broken))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="whet-journal", daemon=True)
            self._thread.start()
        data = json.dumps([episode, turn, asked, answer], allow_nan=False).encode() + b"\n"
        written = asyncio.get_running_loop().create_future()
        self._writes.put(_PendingAnswer(self._path, (episode, turn), asked, data, written))
        await written

    def forget(self, episode: str, turn: int = 0) -> None:
        """The episode goes on otherwise from this turn on, and other answers follow."""
        while self.lines.pop((episode, turn), None) is not None:
            turn += 1

    def drop(self, stage: int, step: int) -> None:
        """Remove what was answered before `step` steps of a stage were done: no resume asks for it again."""
        gone = {path for _, place, path in self._files() if place < (stage, step) and path != self._path}
        for path in gone:
            with suppress(FileNotFoundError):
                path.unlink()
        self._forget_in(gone)

    def over(self, stage: int, step: int) -> None:
        """No rollout of this process asks for what was answered before `step` steps of a stage were done: it stays on
        the disk alone, for a process that resumes from an earlier checkpoint."""
        paths = {line.path for _, line in self.lines.values()}
        self._forget_in({path for path in paths if _named(path)[1] < (stage, step)})

    def _forget_in(self, gone: Collection[Path]) -> None:
        if gone:
            self.lines = {name: known for name, known in self.lines.items() if known[1].path not in gone}

    def close(self) -> None:
        """All that was given to `write` is written."""
        if self._thread is not None:
            self._writes.put(None)
            self._thread.join()
            self._thread = None

    # -- files

    def _files(self) -> Iterator[tuple[int, tuple[int, int], Path]]:
        """(number of the process, (stage, step), path), in the order in which they were written."""
        found = [path for path in self.folder.glob("*.jsonl") if _NAME.fullmatch(path.name)]
        return iter(sorted((*_named(path), path) for path in found))

    def _read(self, path: Path) -> None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise WhetError(f"cannot read {path}: {error.strerror}") from error
        start, damaged = 0, 0
        for line in data.splitlines(keepends=True):
            if line.endswith(b"\n"):  # else a kill has cut it short
                match _parsed(line):
                    case [str(episode), int(turn), str(asked), _]:
                        self._know((episode, turn), asked, _Line(path, start, len(line)))
                    case _:
                        damaged += 1
            start += len(line)
        if damaged:
            log.warning(
                "%s: %d damaged lines; the environment is asked again for these answers", path, damaged
            )

    def _work(self) -> None:
        """A thread: write and sync what has come, all of it at once."""
        ended = False
        while not ended:
            got = [self._writes.get()]
            with suppress(Empty):
                while True:
                    got.append(self._writes.get_nowait())
            writes = [each for each in got if each is not None]
            ended = len(writes) < len(got)
            for path in dict.fromkeys(write.path for write in writes):
                mine = [write for write in writes if write.path == path]
                start = self.append(path, b"".join(write.data for write in mine))
                for write in mine:
                    line = _Line(path, start, len(write.data))
                    start += line.size
                    with suppress(RuntimeError):  # its loop has ended
                        write.written.get_loop().call_soon_threadsafe(self._settle, write, line)

    def append(self, path: Path, data: bytes) -> int:
        """Bring lines to the disk. Returns where they begin. Nothing follows a write that failed, not even in part."""
        if self._broken is not None:
            return 0
        try:
            if fresh := not path.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
            with open(path, "ab", opener=not_linked) as file:
                start = file.tell()
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if fresh:
                sync_path(self.folder)
            return start
        except OSError as error:
            self._broken = file_error(error, path)
            return 0

    def _settle(self, write: _PendingAnswer, line: _Line) -> None:
        """In the event loop: the answer is on the disk, or cannot be."""
        if self._broken is None:
            self._know(write.name, write.asked, line)
        if write.written.done():  # nobody waits any more
            return
        if self._broken is None:
            write.written.set_result(None)
        else:
            write.written.set_exception(EnvBroken(str(self._broken)))

    def _know(self, name: tuple[str, int], asked: str, line: _Line) -> None:
        """What followed an earlier answer does not follow this one."""
        self.forget(*name)
        self.lines[name] = asked, line


def _named(path: Path) -> tuple[int, tuple[int, int]]:
    """(number of the process, (stage, step)) of a file of the journal."""
    start, stage, step = map(int, path.stem.split("-"))
    return start, (stage, step)


def _parsed(line: bytes) -> Json | None:
    """None for what is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _read_line(line: _Line) -> Json:
    """EnvBroken if it is not there any more."""
    try:
        with open(line.path, "rb") as file:
            file.seek(line.start)
            return json.loads(file.read(line.size))[3]
    except (OSError, ValueError, LookupError) as error:
        raise EnvBroken(
            f"{line.path}: an answer that was there at the start of the run cannot be read ({error}); another process "
            "has changed the file. Start the run again"
        ) from error
