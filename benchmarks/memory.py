"""The memory plan against measured peaks: every case is a run of its own process, three steps at full length.

    python benchmarks/memory.py             all cases, a table
    python benchmarks/memory.py NAME ...    some of them
    python benchmarks/memory.py --phases NAME    with the peak of every phase (Linux: /proc/self/clear_refs)

Measured is the growth of the process's peak resident memory (ru_maxrss) from after the imports to the end of the run;
predicted is the largest phase of `whet plan`. Prompts and replies have exactly the lengths of the limits.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def rows(length: int, count: int) -> list[dict[str, str]]:
    """Prompts of so many characters, each a token."""
    made = (LETTERS[n % 26 :] + LETTERS[: n % 26] for n in range(count))
    return [
        {"prompt": (word * (length // 26 + 1))[:length], "answer": word[0], "response": word * 40}
        for word in made
    ]


def case(
    *, scratch: dict[str, Any], prompt: int, reply: int, tasks: int, group: int, **more: Any
) -> dict[str, Any]:
    """A config at full length; the embedding has as many rows as the tokenizer built here, or as `vocab` says."""
    vocab = scratch.pop("vocab", 64)
    base = {
        "model": {
            "scratch": {"max_positions": prompt + reply, **scratch},
            "overrides": {"vocab_size": vocab},
        },
        "tokenizer": {"build": "chars", "vocab_size": vocab},
        "data": {"train": [{"rows": rows(prompt, 64)}], "max_prompt_tokens": prompt},
        "rewards": {"right": {"function": "exact"}},
        "rollout": {
            "group_size": group,
            "max_batch": tasks * group,
            "sampling": {"max_tokens": reply, "ignore_eos": True},
        },
        "train": {"steps": 3, "tasks_per_step": tasks, "optimizer": {"lr": 1e-4}},
        "checkpoint": {"export": False},
        "track": {"trackers": ["jsonl"]},
    }
    for key, value in more.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    return base


SMALL = {"architecture": "qwen3", "hidden_size": 256, "layers": 4, "heads": 8, "kv_heads": 4, "head_dim": 32}
WIDE = {"architecture": "llama", "hidden_size": 512, "layers": 6, "heads": 8, "kv_heads": 2, "ffn_size": 2048}

CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "grpo": lambda: case(scratch={**SMALL}, prompt=64, reply=64, tasks=4, group=8),
    "grpo wide, checkpointed": lambda: case(
        scratch={**WIDE},
        prompt=128,
        reply=64,
        tasks=2,
        group=8,
        train={"steps": 3, "tasks_per_step": 2, "gradient_checkpointing": True, "micro_tokens": 4096},
    ),
    "grpo wide, reference": lambda: case(
        scratch={**WIDE}, prompt=64, reply=64, tasks=2, group=8, algorithm={"kl": {"coef": 0.1}}
    ),
    "grpo, large vocabulary": lambda: case(
        scratch={**SMALL, "vocab": 50_000}, prompt=64, reply=32, tasks=4, group=8
    ),
    "ppo": lambda: case(
        scratch={**SMALL, "hidden_size": 384},
        prompt=64,
        reply=64,
        tasks=4,
        group=4,
        algorithm={"name": "ppo", "kl": {"coef": 0.1}},
    ),
    "moe": lambda: case(
        scratch={**SMALL, "architecture": "qwen3_moe", "experts": 8}, prompt=64, reply=64, tasks=4, group=8
    ),
    "kept apart": lambda: case(
        scratch={**SMALL},
        prompt=256,
        reply=32,
        tasks=4,
        group=8,
        train={"steps": 3, "tasks_per_step": 4, "share_prompts": False, "micro_tokens": 4096},
    ),
}


def main(names: list[str], *, by_phase: bool) -> None:
    """A line a case."""
    print(f"{'case':28} {'predicted':>10} {'measured':>10} {'ratio':>6}  largest phase")
    for name in names or CASES:
        command = [sys.executable, __file__, "--one", name, *(["--phases"] if by_phase else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr}")
        found = json.loads(done.stdout.splitlines()[-1])
        ratio = found["predicted"] / found["measured"]
        print(
            f"{name:28} {mb(found['predicted'])} {mb(found['measured'])} {ratio:6.2f}  {found['phase']}",
            flush=True,
        )
        for phase, (told, seen) in found["phases"].items():
            print(f"    {phase:34} {mb(told)} {mb(seen)}")
        if by_phase:
            for part, count in found["parts"].items():
                print(f"        {part:30} {mb(count)}")


def mb(count: float) -> str:
    return f"{count / 2**20:7.1f} MB"


def one(name: str, *, by_phase: bool) -> dict[str, Any]:
    """Run a case in this process."""
    import whet.stages  # noqa: F401  before the peak is taken: what is imported is not the run's
    from whet.api import run_training
    from whet.config.footprint import phases
    from whet.config.load import load
    from whet.config.memory import largest
    from whet.config.plan import plans

    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(None, (), {**CASES[name](), "run_dir": folder + "/run"})
        (plan,) = plans(loaded)
        found = phases(plan)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seen: dict[str, int] = {}
        with watched(seen) if by_phase else patch.dict({}):
            run_training(loaded)
    most = largest(found)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told: dict[str, int] = {}
    for phase in found:
        told[phase.name] = max(told.get(phase.name, 0), phase.total)
    return {
        "predicted": most.total,
        "measured": (peak - before) * 1024,
        "phase": most.name,
        "parts": most.parts,
        "phases": {k: (told.get(k, 0), 0) for k in told} | {"seen " + str(seen): (0, 0)} if by_phase else {},
    }


def warm_up() -> None:
    """Load what the first run of a process loads: model classes, kernels, BLAS."""
    from whet.api import run_training
    from whet.config.load import load

    tiny = {"architecture": "qwen3", "hidden_size": 32, "layers": 1, "heads": 2}
    with tempfile.TemporaryDirectory() as folder:
        values = case(scratch=tiny, prompt=8, reply=4, tasks=2, group=2)
        run_training(load(None, (), {**values, "run_dir": folder + "/run"}))


@contextmanager
def watched(seen: dict[str, int]) -> Iterator[None]:
    """Peaks of every phase, above what the process has now."""
    from whet.run import Run

    base, phase = status("VmRSS"), Run.phase

    @contextmanager
    def noted(run: Run, name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")
        with phase(run, name):
            yield
        seen.setdefault(name, []).append((status("VmHWM") - base) >> 20)

    with patch.object(Run, "phase", noted):
        yield


def status(key: str) -> int:
    """A number of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    if "--one" in sys.argv:
        print(json.dumps(one(given[0], by_phase="--phases" in sys.argv)))
    else:
        main(given, by_phase="--phases" in sys.argv)
