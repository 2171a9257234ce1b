"""The small run, three times in a separate process: unbroken, killed at a step, and resumed from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from whet.config.parse import as_yaml
from whet.config.secrets import by_environment
from whet.environment import module_path
from whet.rehearsal.findings import Finding, fails, works
from whet.rehearsal.shrink import check
from whet.track.metrics import is_evaluation
from whet.track.written import read_lines
from whet.types import Json

TIMEOUT_S = 300.0
"""Time limit of one process."""

_CHILD = """
import sys
from whet.guard.confine import die_with
die_with(int(sys.argv.pop(1)))
from whet.cli import main
main()
"""
"""The command line, ended with the process that started it."""


@dataclass(frozen=True)
class TrialEnd:
    code: int | None
    """None: it reached the time limit and was killed."""
    said: str
    """The end of what it printed."""

    @property
    def how(self) -> str:
        return "ended" if self.code is not None else f"hung (no end within {TIMEOUT_S:g} s)"

    @property
    def why(self) -> str:
        return self.said or f"exit code {self.code}"


def trial(tree: dict[str, Json], folder: Path) -> Iterator[Finding]:
    """Train the small config; then again with a kill -9 during the run, and compare."""
    check(tree)
    whole = start(tree, folder, "whole")
    ended = _wait(whole, folder / "whole.txt")
    lines = read_lines(folder / "whole" / "metrics.jsonl")
    if ended.code != 0:
        steps = sum(not is_evaluation(line) for line in lines)
        yield fails("the run", f"{ended.how} after {steps} steps: {ended.why}")
        return
    yield from _seen(lines, folder / "whole")
    broken = start(tree, folder, "killed")
    if why := kill_within(broken, folder / "killed" / "metrics.jsonl"):
        yield fails("kill -9", why)
        return
    ended = _wait(start(tree, folder, "killed"), folder / "killed.txt")
    if ended.code != 0:
        yield fails("resume", f"after kill -9 the same command {ended.how}: {ended.why}")
    elif _bytes(folder, "whole") == _bytes(folder, "killed"):
        yield works("kill -9 and resume", "metrics equal those of the uninterrupted run, byte for byte")
    else:
        yield fails("resume", "after kill -9 the metrics differ from those of the uninterrupted run")


def _seen(lines: list[dict[str, Json]], run_dir: Path) -> Iterator[Finding]:
    """The findings of the unbroken run, from its record."""
    evaluations = sum(map(is_evaluation, lines))
    steps = [line for line in lines if not is_evaluation(line)]
    yield works("steps", f"{len(steps)} training steps: rollouts, rewards, advantages, updates, weight sync")
    last = steps[-1] if steps else {}
    if "train/mismatch_max_nats" in last:
        yield works(
            "sampled = trained", f"largest difference of log-probs {last['train/mismatch_max_nats']:.2g} nats"
        )
    if evaluations:
        yield works("evaluation", f"{evaluations} evaluations")
    if (run_dir / "checkpoints").is_dir():
        yield works("checkpoints", f"{len(list((run_dir / 'checkpoints').iterdir()))} written and kept")
    if (run_dir / "export").is_dir():
        yield works("export", f"Hugging Face folders of {len(list((run_dir / 'export').iterdir()))} stages")


def _bytes(folder: Path, name: str) -> bytes:
    return (folder / name / "metrics.jsonl").read_bytes()


def start(tree: dict[str, Json], folder: Path, name: str) -> subprocess.Popen[bytes]:
    """`whet train` on the small config, in a process group of its own so that it ends with all its children."""
    file = folder / f"{name}.yaml"
    open_tree, variables = by_environment(tree)  # no secret goes into a file
    file.write_text(as_yaml(open_tree | {"run_dir": str(folder / name)}), encoding="utf-8")
    with (folder / f"{name}.txt").open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, str(os.getpid()), "train", str(file), "--dialect", "native"],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | variables | {"PYTHONPATH": module_path()},
            start_new_session=True,
        )


def _wait(process: subprocess.Popen[bytes], printed: Path) -> TrialEnd:
    try:
        code: int | None = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end(process)
    text = printed.read_text(encoding="utf-8", errors="replace").strip()
    at = text.rfind("whet: ")
    return TrialEnd(code, text[at + 6 :] if at >= 0 else text[-1500:])


def kill_within(process: subprocess.Popen[bytes], metrics: Path) -> str:
    """SIGKILL once a step has been recorded. Returns why none was, or ''."""
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if not all(map(is_evaluation, read_lines(metrics))):
                return ""
            if process.poll() is not None:
                return "the run ended before its first step"
            time.sleep(0.02)
        return f"the run hung: no step within {TIMEOUT_S:g} s"
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children, if they still run."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
