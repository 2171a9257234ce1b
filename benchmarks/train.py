"""The update alone, whet's against TRL's: the same random Qwen2.5 model, rollouts and machine, in turns.

    python benchmarks/train.py                                  the `small` shape on the CPU, about 5 minutes
    python benchmarks/train.py --shape tiny --rounds 1          a trial, seconds
    python benchmarks/train.py --device cuda --shape qwen2.5-1.5b

An update is forward, backward and optimizer step over one batch that is given. Every contestant is a process of its
own in every round; the medians of all its updates but each first one count. Seconds are process CPU seconds with one
thread, on a GPU of the wall. MFU is what the model needs of a batch without padding over what the largest square
product reached in the same process. That all compute the same is seen by their first gradient norms. Prints a table
and writes train.json (cuda: train-SHAPE.json). Without .bench-venv (`make bench-train` makes it) TRL is left out, and
that is said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from train_case import make_case

HERE = Path(__file__).parent
TRL = HERE.parent / ".bench-venv" / "bin" / "python"
CONTESTANTS = ("TRL", "whet", "prompts not shared", "padded", "logits in chunks")
ON_GPU = ("TRL", "TRL, checkpointed", "whet", "checkpointed", "compiled", "prompts not shared", "logits kept")
SAME = 1e-3
"""Gradient norms may differ by so much, relatively, in float32; in bfloat16 by fifty times that."""


def child(command: list[str], threads: int) -> dict[str, Any]:
    """One process; the JSON of its last line. {"error": ...} where it fails, as by memory that does not do."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["killed"])[-1][-300:]}
    return json.loads(done.stdout.splitlines()[-1])


def command(name: str, case: Path, args: argparse.Namespace) -> list[str]:
    more = ["--case", str(case), "--updates", str(args.updates + 1), "--threads", str(args.threads)]
    if name.startswith("TRL"):
        slow = ["--checkpoint"] if name.endswith("checkpointed") else []
        return [str(args.trl), str(HERE / "trl_update.py"), *more, *slow]
    return [sys.executable, str(HERE / "whet_update.py"), "update", *more, "--variant", name]


def updates(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Medians by contestant."""
    case = make_case(args.shape, args.device)
    names = list(args.only or (ON_GPU if args.device == "cuda" else CONTESTANTS))
    if not args.trl.exists():
        print(f"TRL is left out: there is no {args.trl}", file=sys.stderr)
        names = [n for n in names if not n.startswith("TRL")]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.json"
        path.write_text(json.dumps(case))
        for _ in range(args.rounds):
            for name in names:
                runs[name].append(child(command(name, path, args), args.threads))
    failed = {name: found[0] for name, found in runs.items() if "error" in found[0]}
    kept = {name: [r for r in found if "error" not in r] for name, found in runs.items()}
    same(kept, args.device)
    return {name: combined(found) for name, found in kept.items() if found} | failed


def combined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One process after the other, as one."""
    seconds = [s for r in runs for s in r["seconds"]]
    middle = {k: median(r[k] for r in runs) for k in runs[0] if k != "seconds"}
    return {**middle, "seconds": median(seconds), "fastest": min(seconds), "slowest": max(seconds)}


def same(runs: dict[str, list[dict[str, Any]]], device: str) -> None:
    """SystemExit where two contestants did not compute the same gradient."""
    norms = {name: found[0]["grad_norm"] for name, found in runs.items() if found}
    bound = SAME * (50 if device == "cuda" else 1)
    if norms and max(norms.values()) - min(norms.values()) > bound * max(norms.values()):
        raise SystemExit(f"the contestants did not compute the same gradient; its norms: {norms}")


def logprobs(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    base = [sys.executable, str(HERE / "whet_update.py"), "logprobs", "--rows", str(args.rows)]
    base += ["--device", args.device, "--threads", str(args.threads)]
    return {how: child([*base, "--how", how], args.threads) for how in ("chunked", "kept")}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown. Faster than: the first row, TRL if it is there."""
    ours = next((r for name, r in found.items() if not name.startswith("TRL") and "error" not in r), None)
    first = next((r for r in found.values() if "error" not in r), None)
    if ours is None or first is None:
        return "\n".join(f"- {name}: {r['error']}" for name, r in found.items())
    head = f"| contestant | s/update | range | tokens/s | times {next(iter(found))} | peak MB | growth MB | MFU |"
    lines = [head, "|---" * 8 + "|"]
    for name, r in found.items():
        if "error" in r:
            lines.append(f"| {name} | failed: {r['error']} |" + " |" * 6)
            continue
        alone = name.startswith("TRL") or name in ("prompts not shared", "padded")
        needed = ours["flops_separate" if alone else "flops_shared"]
        lines.append(
            f"| {name} | {r['seconds']:.3f} | {r['fastest']:.3f}-{r['slowest']:.3f} "
            f"| {ours['tokens'] / r['seconds']:,.0f} | {first['seconds'] / r['seconds']:.2f}x "
            f"| {r['peak_mb']:,.0f} | {r['growth_mb']:,.0f} | {needed / r['seconds'] / r['ceiling']:.0%} |"
        )
    return "\n".join(lines)


def logprob_table(found: dict[str, dict[str, Any]]) -> str:
    lines = ["| log-probs | s | peak MB | of the logits' size |", "|---" * 4 + "|"]
    for how, r in found.items():
        if "error" in r:
            lines.append(f"| {how} | failed: {r['error']} | | |")
        else:
            share = r["peak_mb"] / r["logits_mb"]
            lines.append(f"| {how} | {r['seconds'][0]:.2f} | {r['peak_mb']:,.0f} | {share:.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", default="small", help="a name of train_case.SHAPES")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--updates", type=int, default=2, help="timed, in each process")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=4096, help="tokens of the log-prob step")
    parser.add_argument("--only", nargs="+", help="contestants")
    parser.add_argument("--trl", type=Path, default=TRL, help="Python of TRL's environment")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = updates(args)
    ours = next((r for r in found.values() if "tokens" in r), None)
    if ours is not None:
        print(
            f"{args.shape} on {args.device}: {ours['parameters'] / 1e6:,.1f} million parameters, {ours['tokens']:,.0f}"
            f" tokens ({ours['sampled']:,.0f} sampled), ceiling {ours['ceiling'] / 1e9:,.0f} GFLOP/s\n"
        )
    print(table(found), flush=True)
    steps = logprobs(args)
    print(f"\nLog-probs of {args.rows:,} tokens, vocabulary 151,936, forward and backward:\n")
    print(logprob_table(steps))
    name = "train.json" if args.device == "cpu" else f"train-{args.shape}.json"
    out = args.out or HERE / name
    settings = {k: v for k, v in vars(args).items() if isinstance(v, (str, int))}
    out.write_text(json.dumps({"settings": settings, "updates": found, "logprobs": steps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
