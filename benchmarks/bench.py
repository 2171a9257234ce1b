"""Ours against TRL's, alternately, one process each: CPU seconds a step and their parts, tokens/s, peak memory.

    python benchmarks/bench.py [--cases S/32 S/128 ...] [--repeats 2] [--dtype bfloat16] [--output FILE]  (`make bench`)

Prints a table as it goes, and writes benchmarks/results.json, results_bfloat16.json, or FILE. Needs a machine with
nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import floor

HERE = Path(__file__).parent
TRL = HERE.parent / ".bench-venv" / "bin" / "python"
CASES = ("S/32", "S/128", "M/32", "M/128", "L/32", "S/32/512", "S/128/512", "M/32/512")
"""Size / longest reply / prompt tokens (7 to 24 if not given)."""


def side(python: str, script: str, *, case: Path, tokens: str, steps: int, dtype: str) -> dict[str, Any]:
    """One process of one side; its JSON."""
    command = [python, str(HERE / script), "speed", "--model", str(case / "model")]
    command += ["--prompts", str(case / "prompts.json"), "--max-tokens", tokens, "--steps", str(steps)]
    command += ["--dtype", dtype]
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, folder: Path, *, repeats: int, dtype: str) -> dict[str, Any]:
    """Medians over `repeats` alternating pairs."""
    size, tokens, *prompt = name.split("/")
    case = folder / name.replace("/", "-")
    make = [sys.executable, str(HERE / "make_case.py"), "speed", "--size", size, "--out", str(case)]
    subprocess.run([*make, "--prompt-tokens", *(prompt or ["short"])], check=True, capture_output=True)
    steps = {"S": 6, "M": 4, "L": 3}[size] - (1 if prompt and size != "S" else 0)
    one = partial(side, case=case, tokens=tokens, steps=steps, dtype=dtype)
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(one(sys.executable, "whet_grpo.py"))
        theirs.append(one(str(TRL), "trl_grpo.py"))

    def medians(runs: list[dict[str, Any]]) -> dict[str, float]:
        return {k: statistics.median(r[k] for r in runs) for k in runs[0] if isinstance(runs[0][k], float)}

    pairs = [t["step_s"] / o["step_s"] for o, t in zip(ours, theirs)]
    speed, whose = floor.rate(case, dtype)
    return {
        "case": name,
        "dtype": dtype,
        "floor_s": floor.floor_s(case, generated=medians(ours)["tokens_per_step"], rate=speed),
        "gflops": speed / 1e9,
        "fastest_products": whose,
        "whet": medians(ours),
        "trl": medians(theirs),
        "faster": statistics.median(pairs),
        "faster_range": [min(pairs), max(pairs)],
    }


def row(r: dict[str, Any]) -> str:
    def cells(x: dict[str, float], update_s: float) -> str:
        split = f"{x['generate_s']:.3f} + {update_s:.3f} + {x['rest_s']:.3f}"
        return f"{x['step_s']:.3f} | {split} | {x['generated_tokens_per_s']:,.0f} | {x['peak_rss_mb']:,.0f}"

    low, high = r["faster_range"]
    over = r["whet"]["step_s"] / r["floor_s"]
    times = f"{r['floor_s']:.3f} ({r['gflops']:.0f}, {r['fastest_products']}) | {over:.2f}"
    ours = cells(r["whet"], r["whet"]["update_s"])
    theirs = cells(r["trl"], r["trl"]["loss_backward_s"] + r["trl"]["optimizer_s"])
    return f"| {r['case']} | {ours} | {theirs} | **{r['faster']:.2f}x** ({low:.2f}-{high:.2f}) | {times} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--output", type=Path, help="where the results are written (default: beside this file)"
    )
    args = parser.parse_args()
    split = "generate + update + rest"
    print(
        f"| case | whet s/step | {split} | tokens/s | MB | TRL s/step | {split} | tokens/s | MB | whet is faster "
        "| floor s (GFLOP/s) | whet over floor |"
    )
    print("|---" * 12 + "|")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.cases:
            results.append(compare(name, Path(folder), repeats=args.repeats, dtype=args.dtype))
            print(row(results[-1]), flush=True)
    name = "results.json" if args.dtype == "float32" else f"results_{args.dtype}.json"
    (args.output or HERE / name).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
