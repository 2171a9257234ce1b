"""The process between a run and the inference server that it starts: at the end of a line, so that the server ends when
the run does, however that ends, and with all processes that it has started itself (a killed vLLM leaves its workers
behind). What the server prints goes to a log of bounded size, without secrets.

It is told once: {"command": [...], "env": {...}, "log": path}. It answers {"pid": ...} or {"error": ...}, and later
{"ended": exit status}. {"end": seconds} ends the server, which has so long to do so by itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from whet import secrets
from whet.guard.last import outlive
from whet.guard.processes import die_with, wake_with_parent
from whet.track.files import not_linked

LOG_BYTES = 8 << 20
"""Of the log, and of the one before it (engine.log.1)."""
LINE_BYTES = 16384
LONGEST = 8192
"""Characters of a longer line that the log has: what is cut off may end in the middle of a secret, so more is read."""
LOOK_S = 0.1


def serve(connection: Connection) -> None:
    """Start the server and stay until it ends, or the line does."""
    outlive()  # workers in a session of their own, and all of them where this process is killed, too
    wake_with_parent()  # nothing else would end what the server has started: the end of the line tells
    order = json.loads(connection.recv_bytes())
    log = EngineLog(Path(order["log"]))
    try:
        process = subprocess.Popen(
            order["command"],
            env={**without_ours(os.environ), **order["env"]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with(None),
        )
    except OSError as error:
        tell(connection, {"error": f"{type(error).__name__}: {error}"})
        return
    assert process.stdout is not None
    reader = threading.Thread(target=log.copy, args=(process.stdout,), daemon=True)
    reader.start()
    tell(connection, {"pid": process.pid})
    try:
        while process.poll() is None and (grace_s := asked_to_end(connection)) is None:
            pass
        if process.poll() is None and grace_s:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            until = time.monotonic() + grace_s
            while process.poll() is None and time.monotonic() < until:
                time.sleep(LOOK_S)
    finally:
        end_group(process.pid)
    reader.join(timeout=2.0)
    tell(connection, {"ended": process.wait()})


def without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what has this process find its packages: a server has others of its own."""
    return {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def asked_to_end(connection: Connection) -> float | None:
    """Seconds that the server has to end by itself, if it is to end: none when the line has ended."""
    try:
        if connection.poll(LOOK_S):
            return float(json.loads(connection.recv_bytes())["end"])
    except (EOFError, OSError):
        return 0.0
    return None


def end_group(leader: int) -> None:
    """End all that a process has started, whether it lives itself or not."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def tell(connection: Connection, what: dict[str, object]) -> None:
    """Nobody may listen any more."""
    with suppress(OSError):
        connection.send_bytes(json.dumps(what).encode())


class EngineLog:
    """A log of bounded size. When it is full it becomes `NAME.1`, and the `NAME.1` before it is lost."""

    def __init__(self, path: Path, *, most_bytes: int = LOG_BYTES) -> None:
        self.path, self.most_bytes = path, most_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self._opened()
        """The one that is written now."""

    def copy(self, source: IO[bytes]) -> None:
        """Every line, to the end; a long one is cut. A line that cannot be written (a full disk) is lost: nobody else
        reads what the server prints, and it would wait for that."""
        while line := source.readline(LINE_BYTES):
            text = secrets.redact(line.decode(errors="replace").rstrip("\n"))
            if not line.endswith(b"\n"):
                text = text[:LONGEST]
                while (more := source.readline(LINE_BYTES)) and not more.endswith(b"\n"):
                    pass
            with suppress(OSError):
                self._write(text.encode() + b"\n")

    def _write(self, line: bytes) -> None:
        if self.file.tell() >= self.most_bytes:
            os.replace(self.path, f"{self.path}.1")
            full, self.file = self.file, self._opened()
            full.close()
        self.file.write(line)

    def _opened(self) -> IO[bytes]:
        """Without a buffer, which would keep what could not be written."""
        return open(self.path, "ab", buffering=0, opener=not_linked)
