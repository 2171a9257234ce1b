"""whet's side of the benchmark: the whole loop (jail, records and all) on a case that make_case.py wrote.

    python benchmarks/whet_grpo.py speed --model /tmp/case/model --prompts /tmp/case/prompts.json
    python benchmarks/whet_grpo.py learn --model MODEL --prompts POOL --held-out HELD_OUT --steps 100

One line of JSON on stdout, with the same names as trl_grpo.py. Seconds are process CPU seconds; those of the reward
processes are added to `step_s` and `rest_s`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

PROMPTS, GROUP = 16, 8


def config(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The same task, hyperparameters and sampling as trl_grpo.py gives TRL."""
    rows = folder / "prompts.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in json.loads(args.prompts.read_text())))
    longest = max(len(json.loads(line)["prompt"]) for line in rows.read_text().splitlines())
    here = Path(__file__).parent
    linear = {"type": "linear", "warmup_steps": 4, "min_lr_ratio": 0.1}
    values: dict[str, Any] = {
        "seed": args.seed,
        "run_dir": str(folder / "run"),
        "model": {"path": str(args.model), "dtype": args.dtype},
        "data": {"train": [{"path": str(rows), "name": "case"}], "max_prompt_tokens": max(longest, 16)},
        "algorithm": {"name": "grpo", "loss_agg_mode": "token-mean", "advantage": {"std_epsilon": 1e-4}},
        "rewards": {"reward": {"function": f"{here}/reward.py:digits" if args.kind == "speed" else "exact"}},
        "rollout": {"group_size": GROUP, "sampling": {"max_tokens": args.max_tokens}},
        "train": {
            "steps": args.steps,
            "tasks_per_step": PROMPTS,
            "skip_zero_weight": args.kind == "learn",  # speed: the same work on both sides
            "optimizer": {
                "lr": args.lr,
                "betas": [0.9, 0.99],
                "schedule": linear if args.kind == "learn" else {},
            },
        },
        "checkpoint": {"interval": 0, "export": False},
        "track": {"trackers": ["jsonl"]},
        "machine": {"threads": args.threads, "kernels": args.kernels},
    }
    if args.kind == "learn":
        held_out = folder / "held_out.jsonl"
        held_out.write_text("".join(json.dumps(row) + "\n" for row in json.loads(args.held_out.read_text())))
        values["data"]["eval"] = [{"path": str(held_out), "name": "held-out"}]
        values["eval"] = {"every": args.eval_every}
    return values


def run(args: argparse.Namespace, folder: Path) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """(timings, metrics) of every step; `reward_s` of a timing: CPU seconds of the reward processes."""
    import whet.track.monitor
    from whet.recorder import Recorder
    from whet.track.written import read_lines

    whet.track.monitor.clock = time.process_time
    rewards: list[float] = []
    looking: list[float] = []  # seconds of each step in which this script looks for the reward processes
    record = Recorder.record

    def recorded(self: Any, *step: Any) -> Any:
        begin = time.process_time()
        workers = psutil.Process().children(recursive=True)
        rewards.append(sum(sum(worker.cpu_times()[:2]) for worker in workers))
        looking.append(time.process_time() - begin)
        return record(self, *step)

    Recorder.record = recorded  # type: ignore[method-assign, assignment]
    with contextlib.redirect_stdout(sys.stderr):
        result = whet.train(**config(args, folder))
    timings = [t for t in read_lines(result.run_dir / "timings.jsonl") if "time/step_s" in t]
    for t, (before, now), own in zip(timings, itertools.pairwise([rewards[0], *rewards]), looking):
        t["reward_s"] = max(now - before, 0.0)
        t["time/step_s"] -= own
        t["time/other_s"] -= own
    return timings, result.metrics


def speed(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    timings, metrics = run(args, folder)
    tokens = [m["rollout/tokens_sum"] for m in metrics if "rollout/tokens_sum" in m]
    kept, kept_tokens = timings[args.warmup :], tokens[args.warmup :]

    def mean(name: str) -> float:
        return sum(t.get(name, 0.0) for t in kept) / len(kept)

    return {
        "step_s": mean("time/step_s") + mean("reward_s"),
        "generate_s": mean("time/generate_s"),
        "update_s": mean("time/logprobs_s") + mean("time/update_s"),
        "rest_s": mean("time/other_s") + mean("time/reward_s") + mean("reward_s"),
        "generated_tokens_per_s": sum(kept_tokens) / sum(t["time/generate_s"] for t in kept),
        "tokens_per_step": sum(kept_tokens) / len(kept),
        "steps": [t["time/step_s"] + t["reward_s"] for t in timings],
    }


def learn(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    timings, metrics = run(args, folder)
    spent = 0.0
    looks = [{"step": 0, "accuracy": metrics[0]["eval/accuracy"], "cpu_s": 0.0}]
    by_step = {m["step"]: m["eval/accuracy"] for m in metrics if "eval/accuracy" in m}
    for t in timings:
        spent += t["time/step_s"] + t["reward_s"]
        if t["step"] in by_step:
            looks.append({"step": t["step"], "accuracy": by_step[t["step"]], "cpu_s": spent})
    return {"held_out": looks, "accuracy": looks[-1]["accuracy"], "cpu_s": looks[-1]["cpu_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, tokens, steps, lr in (("speed", 32, 4, 1e-6), ("learn", 7, 300, 3e-4)):
        one = kinds.add_parser(kind)
        one.add_argument("--model", type=Path, required=True)
        one.add_argument("--prompts", type=Path, required=True, help="JSON list of {prompt, answer}")
        one.add_argument("--max-tokens", type=int, default=tokens)
        one.add_argument("--steps", type=int, default=steps)
        one.add_argument("--lr", type=float, default=lr)
        one.add_argument("--threads", type=int, default=1)
        one.add_argument("--seed", type=int, default=0)
        one.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
        one.add_argument("--kernels", default="auto", choices=["auto", "torch", "compiled"])
    kinds.choices["speed"].add_argument("--warmup", type=int, default=1)
    kinds.choices["learn"].add_argument("--held-out", type=Path, required=True)
    kinds.choices["learn"].add_argument("--eval-every", type=int, default=50)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        numbers = {"speed": speed, "learn": learn}[args.kind](args, Path(folder))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({**numbers, "peak_rss_mb": peak_mb}))


if __name__ == "__main__":
    main()
