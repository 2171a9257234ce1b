"""Whether whet runs on this machine's GPU, and how fast: every check in a process of its own, with a time limit.

    make check-gpu                                     the environment, then this
    python benchmarks/check_gpu.py                     with the torch that is there, on CUDA; about ten minutes
    python benchmarks/check_gpu.py --device cpu        the same program at small size on a CPU; minutes
    python benchmarks/check_gpu.py --only "CUDA graphs" "decode, qwen2.5-0.5b"

Needs no network. Prints one table and writes one JSON (check_gpu.json). A check that fails, dies or takes too long is a
row with its error, and the others go on. The exit code is 0 if none did; what a CPU cannot have is skipped with the
reason. Where torch is not the version that whet pins, the first row says so, and the checks run all the same. On a GPU
several checks that compare numbers run at once (--at-once); what is timed has the machine for itself, after them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SRC = HERE.parent / "src"
sys.path[:0] = [str(HERE), str(SRC)]  # also where whet is not installed; what a check starts finds it, too:
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SRC), os.environ.get("PYTHONPATH"))))

from gpu import measured  # noqa: E402
from gpu_case import Case, Skipped  # noqa: E402
from gpu_checks import CHECKS  # noqa: E402

WHOLE_S = 600
"""Seconds for everything; what is left over then is not started."""
AT_ONCE = 4
"""Checks that run together, at most: a process begins with about ten seconds of one core."""
MARK = "check_gpu: "
"""Begins the line in which a process says its result."""


def rows(case: Case) -> dict[str, tuple[int, Any]]:
    return CHECKS | measured(["tiny"] if case.small else ["qwen2.5-0.5b", "qwen2.5-1.5b"])


def one(name: str, case: Case) -> dict[str, Any]:
    """The result of a check, in this process."""
    try:
        return {"status": "passed", **rows(case)[name][1](case)}
    except Skipped as why:
        return {"status": "skipped", "why": str(why)}
    except Exception as error:
        return {"status": "failed", "why": f"{type(error).__name__}: {error}"[:800]}


def apart(name: str, case: Case, limit_s: float, threads: int | None = None) -> dict[str, Any]:
    """The result of a check, in a process of its own that ends after `limit_s`. threads: None: one for each core."""
    command = [sys.executable, __file__, "--one", name, "--device", case.device]
    command += ["--small"] if case.small else []
    start = time.perf_counter()
    env = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=env
    )
    RUNNING.add(process)
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        end(process)
        process.communicate()
        return {"status": "failed", "why": f"took longer than {limit_s:.0f} s", "took_s": limit_s}
    finally:
        RUNNING.discard(process)
    found = [line.removeprefix(MARK) for line in said.splitlines() if line.startswith(MARK)]
    if not found:
        last = " | ".join(said.strip().splitlines()[-4:])[-600:]
        return {"status": "failed", "why": f"ended with code {process.returncode}: {last}"}
    return json.loads(found[-1]) | {"took_s": round(time.perf_counter() - start, 1)}


RUNNING: set[subprocess.Popen[str]] = set()


def end(process: subprocess.Popen[str]) -> None:
    """With what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def told(result: dict[str, Any]) -> str:
    """The numbers of a row, in words."""
    if "why" in result:
        return str(result["why"])
    left = {k: v for k, v in result.items() if k not in ("status", "took_s")}
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in left.items())


def table(results: dict[str, dict[str, Any]]) -> Any:
    from rich.table import Table

    made = Table("check", "", "s", "numbers", title="whet on this GPU")
    colour = {"passed": "green", "failed": "red", "skipped": "yellow"}
    for name, result in results.items():
        status = result["status"]
        made.add_row(
            name,
            f"[{colour[status]}]{status}[/]",
            str(result.get("took_s", "")),
            told(result).replace("[", r"\["),
        )
    return made


def everything(case: Case, names: list[str], at_once: int = 1) -> dict[str, dict[str, Any]]:
    """The results by name. at_once: how many of the checks that compare numbers run together."""
    until = time.monotonic() + (WHOLE_S if case.gpu else 3 * WHOLE_S)

    def row(name: str) -> dict[str, Any]:
        if (left := until - time.monotonic()) < 5:
            return {"status": "failed", "why": "not started: the time for all checks is over"}
        slow = (1 if case.gpu else 3) * (1 if at_once == 1 else 2)
        share = max(1, (os.cpu_count() or 1) // at_once) if name in CHECKS else None
        result = apart(name, case, min(left, rows(case)[name][0] * slow), share)
        print(f"{name}: {result['status']}  {told(result)}", flush=True)
        return result

    compared = [name for name in names if name in CHECKS]
    with ThreadPoolExecutor(at_once) as pool:
        try:
            results = dict(zip(compared, pool.map(row, compared)))
            results |= {name: pool.submit(row, name).result() for name in names if name not in CHECKS}
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(RUNNING):
                end(process)
            raise
    return {name: results[name] for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a trial; always on a CPU")
    parser.add_argument("--only", nargs="+", help="names of checks")
    most = max(1, min(AT_ONCE, (os.cpu_count() or 1) // 4))
    parser.add_argument(
        "--at-once", type=int, default=most, help="checks that run together (%(default)s here)"
    )
    parser.add_argument("--out", type=Path, default=Path("check_gpu.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    case = Case(args.device, small=args.small or args.device == "cpu")
    if strange := [n for n in [*(args.only or ()), *([args.one] if args.one else ())] if n not in rows(case)]:
        parser.error(f"no check {strange[0]!r}; there are: {', '.join(rows(case))}")
    if args.one:
        print(MARK + json.dumps(one(args.one, case)), flush=True)
        return 0
    if case.gpu:
        import torch

        if not torch.cuda.is_available():
            parser.error(
                f"torch {torch.__version__} finds no CUDA device here; --device cpu tries the program itself"
            )
    results = everything(case, args.only or list(rows(case)), args.at_once)
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 160).print(table(results))
    args.out.write_text(
        json.dumps({"device": case.device, "small": case.small, "checks": results}, indent=1) + "\n"
    )
    failed = [name for name, result in results.items() if result["status"] == "failed"]
    print(f"{len(failed)} of {len(results)} failed" + (f": {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
