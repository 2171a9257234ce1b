"""Runs cases of a fuzzer in forked children, each within limits of time and memory, and says what is wrong.

A case is right (it was read), refused (a WhetError with a message), or a fault: any other exception, a signal, a hang,
too much memory, or a wrong input that was read. A case follows from the fuzzer's name and its number alone.

    python -m fuzz.run config 10000      (below tests/)
"""

from __future__ import annotations

import faulthandler
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import whet
from fuzz.case import Case
from fuzz.readers import FUZZERS
from whet.types import WhetError

CPU_S = 10.0
MEMORY = 3 * 2**30
PACKAGE = Path(whet.__file__).parent
PIECE = 500
"""Cases that one process makes, before it says how far it is."""
RIGHT, REFUSED = "right", "refused"


@dataclass(frozen=True)
class Fault:
    fuzzer: str
    number: int
    what: str
    case: Case

    def __str__(self) -> str:
        data = self.case.files[self.case.touched]
        return f"{self.fuzzer} {self.number}: {self.what}\n  {self.case.touched} ({len(data)} bytes): {data[:400]!r}"


def case(fuzzer: str, number: int) -> Case:
    return FUZZERS[fuzzer].make(Random(f"{fuzzer} {number}"))


def run(
    fuzzer: str, numbers: Sequence[int], *, cpu_s: float = CPU_S, tries: int = 40
) -> tuple[Counter[str], list[Fault]]:
    """(how many were right and refused, the faults, one of each kind made small)."""
    counts: Counter[str] = Counter()
    faults: dict[str, Fault] = {}
    for number, what in verdicts(fuzzer, [(n, case(fuzzer, n)) for n in numbers], cpu_s=cpu_s):
        counts[what if what in (RIGHT, REFUSED) else "fault"] += 1
        if what not in (RIGHT, REFUSED):
            faults.setdefault(what, Fault(fuzzer, number, what, case(fuzzer, number)))
    return counts, [minimised(fault, cpu_s=cpu_s, tries=tries) for fault in faults.values()]


def verdicts(fuzzer: str, cases: Sequence[tuple[int, Case]], *, cpu_s: float) -> Iterator[tuple[int, str]]:
    """(number, verdict) of each case. One child reads them one after another; where it dies, the next goes on."""
    left = list(cases)
    while left:
        for (number, _), what in zip(left, _child(fuzzer, [c for _, c in left], cpu_s)):
            yield number, what
            left = left[1:]


def _child(fuzzer: str, cases: Sequence[Case], cpu_s: float) -> Iterator[str]:
    """Verdicts until all are given or the child is dead; its death is the last."""
    out, into = os.pipe()
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of forking where threads are; the child needs none
        pid = os.fork()
    if pid == 0:
        os.close(out)
        _judge_all(fuzzer, cases, into, cpu_s)
    os.close(into)
    given = 0
    try:
        with os.fdopen(out) as lines:
            for line in lines:
                given += 1
                yield line.rstrip("\n")
    finally:
        if given < len(cases) and not _ended(pid):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if given < len(cases):
        yield _death(status)


def _ended(pid: int) -> bool:
    """Whether a child is dead, or about to be: it has closed its end of the pipe. It is not waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _death(status: int) -> str:
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number in (signal.SIGPROF, signal.SIGALRM):
        return "did not come to an end"
    return (
        f"died of {signal.Signals(number).name}"
        if number
        else f"exited with {os.waitstatus_to_exitcode(status)}"
    )


def _judge_all(fuzzer: str, cases: Sequence[Case], into: int, cpu_s: float) -> None:
    """In the child. Its time is CPU time, so that a busy machine is no fault; what only waits is ended later."""
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        faulthandler.disable()
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        for one in cases:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            signal.setitimer(signal.ITIMER_REAL, 20 * cpu_s)
            os.write(into, (judge(fuzzer, one) + "\n").encode())
        code = 0
    finally:
        os._exit(code)


def judge(fuzzer: str, one: Case) -> str:
    """The verdict on a case, in one line, here and now."""
    folder = Path(tempfile.mkdtemp(prefix="whet-fuzz-"))
    try:
        for name, data in one.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        FUZZERS[fuzzer].read(folder)
    except WhetError as e:
        if isinstance(e.__cause__, MemoryError) or isinstance(e.__context__, MemoryError):
            return "took too much memory"
        return REFUSED if str(e).strip() else f"{type(e).__name__} without a message"
    except MemoryError:
        return "took too much memory"
    except BaseException as e:
        at = traceback.extract_tb(e.__traceback__)
        own = [f for f in at if Path(f.filename).is_relative_to(PACKAGE)] or at
        place = f"{Path(own[-1].filename).name}:{own[-1].name}"
        return f"{type(e).__name__} in {place}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return "wrong, but was read" if one.wrong else RIGHT


def minimised(fault: Fault, *, cpu_s: float, tries: int) -> Fault:
    """The same fault with less of the damaged file: parts are left out as long as it stays."""
    data = fault.case.files[fault.case.touched]
    size = len(data) // 2
    while size and tries:
        at = 0
        while at < len(data) and tries:
            tries -= 1
            shorter = replace(
                fault.case, files={**fault.case.files, fault.case.touched: data[:at] + data[at + size :]}
            )
            (_, what), *_ = verdicts(fault.fuzzer, [(0, shorter)], cpu_s=cpu_s)
            if what == fault.what:
                fault, data = replace(fault, case=shorter), data[:at] + data[at + size :]
            else:
                at += size
        size //= 2
    return fault


def main() -> None:
    """NAME COUNT [FIRST]: says every few hundred cases how far it is; exits with 1 where there is a fault."""
    name, count, *first = sys.argv[1:]
    begin = int(first[0]) if first else 0
    os.chdir(Path(__file__).parents[2])
    wrong = False
    for fuzzer in FUZZERS if name == "all" else [name]:
        sums: Counter[str] = Counter()
        for at in range(begin, begin + int(count), PIECE):
            counts, faults = run(fuzzer, range(at, min(at + PIECE, begin + int(count))))
            sums += counts
            print(
                f"{fuzzer}, to {min(at + PIECE, begin + int(count))}: {dict(sums)}",
                *faults,
                sep="\n",
                flush=True,
            )
            wrong = wrong or bool(faults)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
