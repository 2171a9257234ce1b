"""What is learned: ours and TRL's from the same start, on the same tasks with the same hyperparameters.

    python benchmarks/bench_learn.py [--seeds 0 1 2] [--steps 300]      `make bench-learn` runs it

Imitates the sloppy teacher of examples/first_run.yaml once, then trains both sides from that model by GRPO.
Prints held-out accuracy (256 words, greedy, exact) by step, and the CPU seconds spent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TRL = HERE.parent / ".bench-venv" / "bin" / "python"


def start(folder: Path) -> Path:
    """The model after imitation."""
    import whet

    with contextlib.redirect_stdout(sys.stderr):
        whet.train(
            HERE.parent / "examples/first_run.yaml",
            run_dir=str(folder),
            overrides=["stages.rl.train.steps=1"],
        )
    return folder / "export" / "sft"


def side(python: str, script: str, *, model: Path, words: Path, seed: int, steps: int) -> dict[str, Any]:
    command = [python, str(HERE / script), "learn", "--model", str(model), "--seed", str(seed)]
    command += ["--prompts", str(words / "pool.json"), "--held-out", str(words / "held_out.json")]
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--steps", str(steps)], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, words = start(Path(folder) / "run"), Path(folder) / "words"
        subprocess.run(
            [sys.executable, str(HERE / "make_case.py"), "learn", "--out", str(words)],
            check=True,
            capture_output=True,
        )
        head = None
        for seed in args.seeds:
            for name, python, script in (
                ("whet", sys.executable, "whet_grpo.py"),
                ("TRL", str(TRL), "trl_grpo.py"),
            ):
                found = side(python, script, model=model, words=words, seed=seed, steps=args.steps)
                if head is None:
                    head = [str(int(look["step"])) for look in found["held_out"]]
                    print("| side, seed | " + " | ".join(f"step {step}" for step in head) + " | CPU s |")
                    print("|---" * (len(head) + 2) + "|")
                looks = " | ".join(f"{look['accuracy']:.3f}" for look in found["held_out"])
                print(f"| {name}, {seed} | {looks} | {found['cpu_s']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
