"""Runs programs that nobody has read: `python -m whet.guard.program`.

Standard input is `Programs` as JSON, standard output a `ProgramOutcome` for each run. A run is a process in
`guard.sandbox`: it can read Python and its packages, and compute; it can open no other file, write none, and start no
program, process or connection. What it printed is judged elsewhere: nothing that a run could read says what is
expected of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import linecache
import math
import os
import resource
import select
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from whet.environment import module_command, module_path
from whet.guard import confine, sandbox

MOST_PRINTED = 2**20
"""Bytes of standard output. A run that prints more is ended."""
MOST_ERRORS = 2**14
"""Bytes of standard error that are kept: the last ones."""
_FILE = "<program>"
_START_S = 20.0
"""For an interpreter to begin, and the processes of all runs to end, beside their own limits."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Python code with its standard input, once for each run, and the limits of one run."""

    runs: Sequence[tuple[str, str]]
    seconds: float
    memory_mb: int
    before: str = ""
    """Trusted code, whose names all of them find: it runs once."""
    stops: bool = False
    """Whether the first that does not end well is the last."""


@dataclass(frozen=True, kw_only=True)
class ProgramOutcome:
    """One run."""

    ended: str
    """well: at the end of its code; exit: the code called exit with status 0; error: an exception or another status;
    time: the time limit; printed: too much output."""
    printed: str = ""
    """Standard output."""
    errors: str = ""
    """The end of standard error, with the traceback of an exception that ended it."""


def longest_s(runs: int, seconds: float) -> float:
    """The longest wait for `run`."""
    return runs * seconds + _START_S


async def run(programs: Programs) -> list[ProgramOutcome]:
    """All runs, one after the other, in an interpreter of their own, which knows no variable of this process but its
    path. OSError where this system has no sandbox, or the interpreter fails."""
    if why := sandbox.lacking():
        raise OSError(f"programs of the policy run only in a sandbox: {why}")
    process = await asyncio.create_subprocess_exec(
        *module_command(__name__),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": module_path(), "PYTHONUTF8": "1"} | dict.fromkeys(_THREADS, "1"),
    )  # fmt: skip
    limit_s = longest_s(len(programs.runs), programs.seconds)
    try:
        async with asyncio.timeout(limit_s):
            said, error = await process.communicate(json.dumps(asdict(programs)).encode())
    except TimeoutError:
        raise OSError(f"{len(programs.runs)} runs of programs have not ended within {limit_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        told = error.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise OSError(f"the process that runs programs ended with status {process.returncode}: {told[:300]}")
    return [ProgramOutcome(**each) for each in json.loads(said)]


# ---------------------------------------------------------------- in that interpreter


def main() -> None:
    programs = Programs(**json.load(sys.stdin))
    confine.die_with(os.getppid())
    confine.adopt_orphans()
    names: dict[str, object] = {"__name__": "__main__"}
    exec(programs.before, names)
    done: list[ProgramOutcome] = []
    for each in programs.runs:
        done.append(_ran(programs, names, *each))
        if programs.stops and done[-1].ended not in ("well", "exit"):
            break
    json.dump([asdict(each) for each in done], sys.stdout)


def _ran(limits: Programs, names: dict[str, object], code: str, text: str) -> ProgramOutcome:
    """One run, to its end or to the first limit that it reaches."""
    with tempfile.TemporaryFile() as given:
        given.write(text.encode("utf-8", "surrogatepass"))
        given.seek(0)
        out, printed_to = os.pipe()
        err, told_to = os.pipe()
        marks, marked_to = os.pipe()
        if not (child := os.fork()):
            for number, fd in enumerate((given.fileno(), printed_to, told_to, marked_to)):
                os.dup2(fd, number)
            _become(limits, names, code)
    for fd in (printed_to, told_to, marked_to):
        os.close(fd)
    printed, told, ended, exits = bytearray(), bytearray(), "", dict[int, int]()
    heard = {out: printed, err: told}
    try:
        end = time.monotonic() + limits.seconds
        while heard and not ended:
            ready = select.select([*heard], [], [], max(0.0, end - time.monotonic()))[0]
            ended = "time" if not ready or time.monotonic() > end else ""
            for fd in ready:
                if piece := os.read(fd, 2**16):
                    heard[fd] += piece
                else:
                    del heard[fd]
            del told[:-MOST_ERRORS]
            ended = "printed" if len(printed) > MOST_PRINTED else ended
        while not ended and child not in exits:  # it has closed its outputs, and may go on
            confine.reap(exits)
            ended = "time" if time.monotonic() > end else ""
            time.sleep(0.001)
    finally:
        confine.sweep(set(), exits)
        mark = os.read(marks, 1)
        for fd in (out, err, marks):
            os.close(fd)
    ended = ended or {(0, b"w"): "well", (0, b"x"): "exit"}.get((exits.get(child, -1), mark), "error")
    return ProgramOutcome(
        ended=ended,
        printed=printed[:MOST_PRINTED].decode("utf-8", "replace"),
        errors=told.decode("utf-8", "replace"),
    )


def _become(limits: Programs, names: dict[str, object], code: str) -> None:
    """In the child: the limits, the sandbox, the program. Does not return."""
    status = 1
    with contextlib.suppress(BaseException):
        confine.die_with(os.getppid())
        os.setsid()
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        seconds = math.ceil(limits.seconds) + 1
        for kind, most in (
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_AS, limits.memory_mb * 2**20),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_CORE, 0),
        ):
            confine.bound(kind, most)
        sandbox.enter()
        sys.stdin, sys.stdout = open(0, encoding="utf-8"), open(1, "w", encoding="utf-8")  # noqa: SIM115
        mark, last = b"w", ""
        try:
            exec(compile(code, _FILE, "exec", dont_inherit=True), names)
        except SystemExit as asked:
            mark = b"x" if asked.code in (None, 0) else b""
            last = "" if mark or isinstance(asked.code, int) else f"{asked.code}\n"
        except BaseException as error:  # noqa: BLE001  the program's own
            mark = b""
            linecache.cache[_FILE] = (len(code), None, code.splitlines(keepends=True), _FILE)
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            last = "".join(traceback.format_exception(error))
        _tell(last)
        sys.stdout.flush()
        os.write(3, mark)
        status = 0 if mark else 1
    os._exit(status)


def _tell(what: str) -> None:
    """Write it to standard error, after what the program has written there."""
    with contextlib.suppress(BaseException):  # the program's own object
        sys.stderr.flush()
    os.write(2, what.encode("utf-8", "backslashreplace"))


if __name__ == "__main__":
    main()
