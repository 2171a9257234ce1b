"""Run a config to its end in forked children, killing them with SIGKILL at random moments on the way.

Usage: driver.py RUN_DIR KILLS SEED. Prints JSON: how often it was killed, and the steps the kills fell on.
Forking saves importing torch for every start; nothing of torch has run before the fork.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import whet.stages  # noqa: F401  (imported here, once)
from whet.api import run_training
from whet.config.load import load


def start(run_dir: str) -> int:
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        log = os.open(f"{run_dir}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = run_training(load("tests/resume/config.yaml", [f"run_dir={run_dir}"]))
        os._exit(code)
    return pid


def ended(pid: int, *, until: Callable[[], bool], within_s: float = 120.0) -> bool:
    """Wait for the end of the run, or for the moment of the next kill."""
    deadline = time.monotonic() + within_s
    while not until():
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0, Path(f"{sys.argv[1]}.log").read_text()[-3000:]
            return True
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.001)
    return False


def lines(run_dir: str) -> int:
    path = Path(run_dir) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def moment(run_dir: str, rng: random.Random) -> Callable[[], bool]:
    """A random moment: some time after the start, or a hair after some more lines of metrics have been written."""
    if rng.random() < 0.3:
        at = time.monotonic() + rng.uniform(0.0, 0.6)
        return lambda: time.monotonic() >= at
    wanted, more = None, rng.randint(1, 5)
    pause_s = rng.uniform(0.0, 0.04)

    def come() -> bool:
        nonlocal wanted
        if wanted is None:
            wanted = lines(run_dir) + more
        if lines(run_dir) < wanted:
            return False
        time.sleep(pause_s)
        return True

    return come


def main(run_dir: str, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    at: list[int] = []
    pid = start(run_dir)
    while len(at) < kills and not ended(pid, until=moment(run_dir, rng)):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        at.append(lines(run_dir))
        pid = start(run_dir)
    if len(at) == kills:
        ended(pid, until=lambda: False)
    print(json.dumps({"kills": len(at), "lines_at_kill": at}))


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
