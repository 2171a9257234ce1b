"""Runs that the page starts: `whet rehearse` and `whet train` as processes of their own, each with its log."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.environment import module_command
from whet.guard.temporary import OwnFolder
from whet.secrets import redact
from whet.track.files import runs_here
from whet.types import ConfigError

COMMANDS = {"rehearse": False, "train": True}
"""What may be started, and whether it writes a run directory."""
MOST_LOG_BYTES = 256 * 2**10
"""Of one answer; the page asks again from where it ends."""
PATIENCE_S = 60.0
"""How long a run may take to save and end, when the studio ends."""


def _hear_stops() -> None:
    """In the new process: a shell starts background commands with SIGINT ignored, and their children inherit it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class ChildRun:
    """One process and its log."""

    command: str
    file: str
    process: subprocess.Popen[bytes]
    log: Path
    began: float = field(default_factory=time.time)

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def interrupt(self) -> None:
        """As Ctrl-C in a terminal."""
        os.killpg(self.process.pid, signal.SIGINT)


@dataclass
class FoundRun:
    """A run that no studio that lives has started: its studio was killed, or a user has started it in a terminal."""

    file: str
    run_dir: Path
    pid: int
    command: str = "train"
    began: float = field(default_factory=time.time)

    @property
    def log(self) -> Path:
        return self.run_dir / "run.log"

    @property
    def exit_code(self) -> int | str | None:
        """Only the process that started it is told."""
        return None if runs_here(self.run_dir) == self.pid else "unknown; the log has how it ended"

    def interrupt(self) -> None:
        """To itself alone: its group may be that of a terminal."""
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGINT)


class Jobs:
    """At most one run at a time; the one before stays to be read. A context manager: at its end the run that it started
    is stopped."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.current: ChildRun | FoundRun | None = None
        self._folder = OwnFolder("studio")
        self._count = 0

    def find(self, file: str, run_dir: Path) -> None:
        """Take the run that goes on in a run directory for the current one, if there is one."""
        if self.current is not None and self.current.exit_code is None:
            return
        pid = runs_here(run_dir)
        if pid is not None and (run_dir / "run.log").is_file():
            self._count += 1
            self.current = FoundRun(file, run_dir, pid)

    def start(self, command: str, file: str) -> ChildRun:
        """Start a command on a config file, without a shell. ConfigError while another one runs."""
        if command not in COMMANDS:
            raise ConfigError(f"command {command!r}: expected {' or '.join(COMMANDS)}")
        if self.current is not None and self.current.exit_code is None:
            raise ConfigError(f"whet {self.current.command} {self.current.file} still runs; stop it first")
        self._count += 1
        log = self._folder.path / f"{self._count}.log"
        arguments = [*module_command("whet"), command, "--", str(self.root / file)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                arguments,
                cwd=self.root,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "110", "NO_COLOR": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that a stop reaches all of its processes, as Ctrl-C in a terminal does
                preexec_fn=_hear_stops,
            )
        self.current = ChildRun(command, file, process, log)
        return self.current

    def stop(self) -> None:
        """Ask the run to end, as Ctrl-C does."""
        if self.current is not None and self.current.exit_code is None:
            self.current.interrupt()

    def state(self, start: int) -> dict[str, Any] | None:
        """The run, and its log from a byte on; `next` is where the next piece begins. None before the first run."""
        job = self.current
        if job is None:
            return None
        code = job.exit_code  # before the log: what is written before the end is read
        with job.log.open("rb") as file:
            file.seek(start)
            read = file.read(MOST_LOG_BYTES)
        whole = read if code is not None and len(read) < MOST_LOG_BYTES else read[: read.rfind(b"\n") + 1]
        whole = whole or (read if len(read) == MOST_LOG_BYTES else b"")
        return {
            "job": self._count,
            "command": job.command,
            "file": job.file,
            "writes_run": COMMANDS[job.command],
            "began": job.began,
            "exit_code": code,
            "start": start,
            "log": redact(whole.decode("utf-8", "replace")),
            "next": start + len(whole),
            "more": len(read) == MOST_LOG_BYTES,
        }

    def close(self) -> None:
        """Stop the run that was started here and wait for it. One that does not end, or for which a user who presses
        Ctrl-C once more does not wait, is killed."""
        job = self.current
        try:
            if isinstance(job, ChildRun) and job.exit_code is None:
                self.stop()
                try:
                    job.process.wait(PATIENCE_S)
                except (subprocess.TimeoutExpired, KeyboardInterrupt):
                    os.killpg(job.process.pid, signal.SIGKILL)
                    job.process.wait()
        finally:
            self._folder.close()

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
