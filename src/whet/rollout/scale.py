"""The number of engine replicas that a user requests of an active run with `whet scale`, in a small file in the run
directory.

The file names the process that it is for, so a later start of the run begins with rollout.replicas again.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from whet.config.load import load
from whet.guard.processes import process
from whet.track.files import holder, is_running, write_json
from whet.types import WhetError

log = logging.getLogger(__name__)

FILE = "replicas.json"


@dataclass(frozen=True)
class Wish:
    """A requested number of replicas."""

    count: int
    at_ns: int
    """When it was asked for: the same number asked for again is another wish."""


def ask(run_dir: Path, count: int) -> None:
    """Request replicas of the process that runs in `run_dir`. Raises WhetError if there is none, or if it has no
    replicas."""
    who = holder(run_dir)
    if who is None or is_running(run_dir) is False:
        raise WhetError(
            f"{run_dir}: no run is active here, so there is nothing to scale; rollout.replicas sets the initial number"
        )
    if load(run_dir / "config.yaml").config.rollout.replicas == 0:
        raise WhetError(
            f"{run_dir}: this run samples in its own process (rollout.replicas=0); stop it and restart it with "
            "rollout.replicas=1 or more; it resumes where it stopped"
        )
    pid, host = who
    began = process(pid)[1] if host == socket.gethostname() else 0
    asked = {"replicas": count, "at_ns": time.time_ns(), "process": pid, "began": began, "host": host}
    write_json(run_dir / FILE, asked, durable=False)


def wish(run_dir: Path) -> Wish | None:
    """The last request to this process; None if there is none."""
    path = run_dir / FILE
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        if (said["process"], said["host"]) != (os.getpid(), socket.gethostname()):
            return None
        if said["began"] not in (0, process(os.getpid())[1]):  # 0: not known where it was asked for
            return None  # of an earlier process of this number: the first of a container has the same at every start
        found = Wish(int(said["replicas"]), int(said["at_ns"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.debug("%s cannot be read: %s: %s", path, type(error).__name__, error)
        return None
    return found if found.count > 0 else None


def number_of(name: str) -> int:
    """Of `engine-3`: 3. Names of another kind come first."""
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else -1
