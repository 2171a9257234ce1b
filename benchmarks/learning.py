"""Does every recipe learn? Each from the same start, on the same task, with about as many rollouts. And do the
examples with an environment, beside their controls?

    python benchmarks/learning.py [--seeds 0 1 2] [--jobs 2] [--only grpo ppo]

Runs that stand in benchmarks/learning.json with the settings of today are not run again, so it can be stopped and goes
on; delete that file to measure all anew. At the end it writes the tables in docs/algorithms.md and the pictures in
docs/assets. Seconds are CPU seconds of the training process in its steps, one torch thread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import learning_cases
import learning_report
import yaml
from learning_cases import Case, cases

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "learning.json"
DOCUMENT = ROOT / "docs" / "algorithms.md"

Result = dict[str, Any]
"""`name`, `seed`, `settings`, and `curve` [[replies asked for, held-out reward], ...] with `cpu_s`, or `error`. An
example with tools also has `calls` [[replies asked for, calls a rollout], ...]."""


def settings(case: Case, seed: int) -> dict[str, Any]:
    """What a result is the result of; models stand in it by their part."""
    if case.example:
        asked = learning_cases.of_example(case, seed)
        return asked | {"file": yaml.safe_load(Path(case.example).read_text(encoding="utf-8"))}
    return learning_cases.run(case, seed, start="start", teacher="teacher")


def imitate(folder: Path, part: str, seed: int) -> None:
    """Train the start or the teacher of a seed; nothing if that is done, in the way of today."""
    import whet

    how = {"start": learning_cases.START, "teacher": learning_cases.TEACHER}[part]
    wanted = json.dumps(learning_cases.imitation(seed, **how))
    run_dir = folder / f"{part}-{seed}"
    made = run_dir / "made.json"
    if made.exists() and made.read_text(encoding="utf-8") == wanted:
        return
    with contextlib.redirect_stdout(sys.stderr):
        whet.train(run_dir=str(run_dir), **json.loads(wanted))
    made.write_text(wanted, encoding="utf-8")


def measure(name: str, seed: int, folder: Path) -> Result:
    """One run. A run that cannot go on is a result too."""
    import whet
    import whet.track.monitor

    whet.track.monitor.clock = time.process_time
    case = cases()[name]
    models = {part: str(folder / f"{part}-{seed}" / "export" / "main") for part in ("start", "teacher")}
    out: Result = {"name": name, "seed": seed, "settings": settings(case, seed)}
    if case.example:
        asked = learning_cases.of_example(case, seed)
    else:
        asked = learning_cases.run(case, seed, **models)
    with tempfile.TemporaryDirectory() as run_dir:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                run = whet.train(run_dir=run_dir, **asked)
        except whet.WhetError as e:
            return out | {"error": str(e)}
        timings = [json.loads(line) for line in (Path(run_dir) / "timings.jsonl").read_text().splitlines()]
        cpu_s = sum(line.get("time/step_s", 0.0) for line in of_last_stage(timings))
        lines = of_last_stage(run.metrics)
        out |= {"cpu_s": round(cpu_s, 2), "curve": curve(lines, greedy=case.greedy)}
        return out | ({"calls": made} if (made := calls(lines)) else {})


def of_last_stage(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("stage") == lines[-1].get("stage")]


def calls(lines: Sequence[dict[str, Any]], each: int = 5) -> list[tuple[int, float]]:
    """(replies asked for until then, calls of a rollout) as means of so many steps; [] where there are no tools."""
    asked, found, out = 0, [], []
    for line in lines:
        asked += int(line.get("ledger/requested_rollouts", 0))
        if "rollout/calls_mean" in line:
            found.append(line["rollout/calls_mean"])
            if len(found) % each == 0:
                out.append((asked, round(sum(found[-each:]) / each, 4)))
    return out


def curve(lines: Sequence[dict[str, Any]], *, greedy: bool = False) -> list[tuple[int, float]]:
    """(replies asked for until then, mean held-out reward) of every evaluation. greedy: one more a group, which the
    ledger does not count."""
    asked, out = 0, []
    for line in lines:
        new = int(line.get("ledger/requested_rollouts", 0))
        asked += new + (new // learning_cases.GROUP_SIZE if greedy else 0)
        if "eval/accuracy" in line:
            out.append((asked, round(line["eval/accuracy"], 4)))
    return out


def read() -> dict[tuple[str, int], Result]:
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    return {(result["name"], result["seed"]): result for result in found}


def write(results: dict[tuple[str, int], Result]) -> None:
    order = list(cases())
    kept = sorted(
        (r for r in results.values() if r["name"] in order), key=lambda r: (order.index(r["name"]), r["seed"])
    )
    temporary = RESULTS.with_suffix(".tmp")
    temporary.write_text("[\n" + ",\n".join(json.dumps(r) for r in kept) + "\n]\n", encoding="utf-8")
    temporary.replace(RESULTS)


def open_runs(names: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    """What is to be run: no result yet, or one of other settings."""
    done, known = read(), cases()
    return [
        (name, seed)
        for seed in seeds
        for name in names
        if done.get((name, seed), {}).get("settings") != json.loads(json.dumps(settings(known[name], seed)))
    ]


def run_all(todo: Sequence[tuple[str, int]], *, folder: Path, jobs: int) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        known = cases()
        seeds = sorted({seed for name, seed in todo if not known[name].example})
        parts = [(part, seed) for seed in seeds for part in ("start", "teacher")]
        for made in [pool.submit(imitate, folder, *part) for part in parts]:
            made.result()
        runs: list[Future[Result]] = [pool.submit(measure, name, seed, folder) for name, seed in todo]
        for n, ended in enumerate(as_completed(runs), start=1):
            result = ended.result()
            write(read() | {(result["name"], result["seed"]): result})
            print(f"{n}/{len(todo)}  {learning_report.line(result)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases by name; default: all")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "learning", help="for the start models"
    )
    parser.add_argument("--report", action="store_true", help="run nothing, write tables and pictures")
    parser.add_argument("--list", action="store_true", help="print the names of all cases")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    os.chdir(ROOT)  # cases name their functions by path
    if unknown := sorted(set(args.only or ()) - cases().keys()):
        raise SystemExit(f"not a case: {', '.join(unknown)}; --list prints all")
    if args.list:
        print("\n".join(cases()))
        return
    if not args.report:
        todo = open_runs(args.only or list(cases()), args.seeds)
        run_all(todo, folder=args.folder.resolve(), jobs=args.jobs)
    learning_report.write_all(list(read().values()), document=DOCUMENT)


if __name__ == "__main__":
    main()
