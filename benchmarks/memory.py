"""The memory plan against measured peaks: every case is a run of its own process, two steps at full length.

    python benchmarks/memory.py                 all cases, a table, and memory.json of this one sweep
    python benchmarks/memory.py --only NAME     one case (give it again for more); writes nothing
    python benchmarks/memory.py --parts --only NAME     with what the plan counts
    python benchmarks/memory.py --live --only NAME      not as users run it, half the time
    python benchmarks/memory.py --show          the table of memory.json, as benchmarks/README.md has it

Predicted is the largest phase of `whet plan`, of one rank where training is spread over ranks. Measured is the growth
of the process's peak resident memory (VmHWM) from before the run to its end, of the rank with most. Live: what is
freed is given back at once, so it is what the run needs at one time. Resident: as users run it; whet lets the C library
keep what is freed (it saves page faults), and pieces that fit nothing stay there. Prompts and replies have exactly the
lengths of the limits. Linux. A case that fails or takes too long is said, the others go on, and memory.json stays as
it is.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
            "scratch": {"max_position_embeddings": prompt + reply, **scratch},
            "overrides": {"vocab_size": vocab},
        },
        "tokenizer": {"build": "chars", "vocab_size": vocab},
        "data": {"train": [{"rows": rows(prompt, 64)}], "max_prompt_tokens": prompt},
        "rewards": {"right": {"function": "exact"}},
        "rollout": {
            "group_size": group,
            "max_num_seqs": tasks * group,
            "sampling": {"max_tokens": reply, "ignore_eos": True},
        },
        "train": {
            "steps": 2,
            "tasks_per_step": tasks,
            "skip_zero_weight": False,  # rewards are equal
            "optimizer": {"lr": 1e-4},
        },
        "checkpoint": {"export": False},
        "track": {"trackers": ["jsonl"]},
    }
    for key, value in more.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    return base


def trained(**more: Any) -> dict[str, Any]:
    """A section `train` with these settings."""
    return {"steps": 2, "tasks_per_step": 2, **more}


SMALL = {
    "name": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
WIDE = {
    "name": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 2048,
}

MIXTURE = {**SMALL, "name": "qwen3_moe", "num_experts": 8}
SHARD = {"dp_shard": 2}
ADAPTERS = {"rank": 8, "init": "random"}
"""They do something from the first step on; with rewards of 0 none would learn to, and take its memory."""

CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "grpo": lambda: case(scratch={**SMALL}, prompt=64, reply=64, tasks=4, group=8),
    "grpo wide, checkpointed": lambda: case(
        scratch={**WIDE},
        prompt=128,
        reply=64,
        tasks=2,
        group=8,
        train={"steps": 2, "tasks_per_step": 2, "gradient_checkpointing": True, "micro_batch_tokens": 4096},
    ),
    "grpo wide, reference": lambda: case(
        scratch={**WIDE}, prompt=64, reply=64, tasks=2, group=8, algorithm={"kl": {"coef": 0.1}}
    ),
    "256, vocabulary 50k": lambda: case(
        scratch={**SMALL, "vocab": 50_000}, prompt=64, reply=32, tasks=4, group=8
    ),
    "512, vocabulary 32k": lambda: case(
        scratch={**WIDE, "vocab": 32_000}, prompt=64, reply=32, tasks=2, group=4
    ),
    "256, vocabulary 152k": lambda: case(
        scratch={**SMALL, "vocab": 151_936}, prompt=64, reply=32, tasks=2, group=4
    ),
    "lora": lambda: case(scratch={**WIDE}, prompt=64, reply=64, tasks=2, group=8, model={"lora": ADAPTERS}),
    **{
        name: partial(
            case, scratch={**WIDE}, prompt=64, reply=32, tasks=2, group=4, train=trained(optimizer=optimizer)
        )
        for name, optimizer in (
            ("sgd", {"lr": 1e-4, "name": "sgd"}),
            ("muon", {"lr": 1e-4, "name": "muon"}),
            ("8-bit adamw", {"lr": 1e-4, "state_dtype": "int8"}),
        )
    },
    "bfloat16": lambda: case(
        scratch={**SMALL}, prompt=64, reply=32, tasks=2, group=4, model={"dtype": "bfloat16"}
    ),
    "bfloat16, wide": lambda: case(
        scratch={**WIDE}, prompt=64, reply=64, tasks=2, group=8, model={"dtype": "bfloat16"}
    ),
    "ppo": lambda: case(
        scratch={**SMALL, "hidden_size": 384},
        prompt=64,
        reply=64,
        tasks=4,
        group=4,
        algorithm={"name": "ppo", "kl": {"coef": 0.1}},
    ),
    "moe": lambda: case(scratch={**MIXTURE}, prompt=64, reply=64, tasks=4, group=8),
    "rollouts in 8 bits": lambda: case(
        scratch={**WIDE}, prompt=64, reply=32, tasks=2, group=8, rollout={"quantization": "int8"}
    ),
    "ahead 1": lambda: case(
        scratch={**WIDE}, prompt=64, reply=32, tasks=2, group=8, rollout={"max_staleness": 1}
    ),
    **{
        name: partial(
            case,
            scratch={**WIDE},
            prompt=64,
            reply=64,
            tasks=2,
            group=8,
            train=trained(parallel=layout),
            **more,
        )
        for name, layout, more in (
            ("dp_replicate 2", {"dp_replicate": 2}, {}),
            ("dp_shard 2", SHARD, {}),
            ("dp_shard 2, kept", {**SHARD, "reshard_after_forward": False}, {}),
            ("tp 2", {"tp": 2}, {}),
            ("cp 2", {"cp": 2}, {}),
            ("pp 2", {"pp": 2}, {}),
            ("dp_shard 2, lora", SHARD, {"model": {"lora": ADAPTERS}}),
            ("tp 2, lora", {"tp": 2}, {"model": {"lora": ADAPTERS}}),
        )
    },
    "moe, ep 2": lambda: case(
        scratch={**MIXTURE},
        prompt=64,
        reply=64,
        tasks=4,
        group=8,
        train={"steps": 2, "tasks_per_step": 4, "parallel": {**SHARD, "ep": 2}},
    ),
    "dp_shard 2, vocabulary 32k": lambda: case(
        scratch={**WIDE, "vocab": 32_000},
        prompt=64,
        reply=32,
        tasks=2,
        group=4,
        train=trained(parallel={"dp_shard": 2}),
    ),
    "tp 2, vocabulary 32k": lambda: case(
        scratch={**WIDE, "vocab": 32_000},
        prompt=64,
        reply=32,
        tasks=2,
        group=4,
        train=trained(parallel={"tp": 2}),
    ),
    "kept apart": lambda: case(
        scratch={**SMALL},
        prompt=256,
        reply=32,
        tasks=4,
        group=8,
        train={"steps": 2, "tasks_per_step": 4, "share_prompts": False, "micro_batch_tokens": 4096},
    ),
}


LIMIT_S = 180
"""Of one run, on a machine that does something else, too; alone none takes 30 s."""
FILE = Path(__file__).with_suffix(".json")


def main(given: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run at work is ended, too
    if given.show:
        show(json.loads(FILE.read_text()))
        return
    names = given.only or list(CASES)
    if strange := [name for name in names if name not in CASES]:
        raise SystemExit(f"no case {strange[0]!r}; there are: {', '.join(CASES)}")
    begun, table = time.monotonic(), measured(names, parts=given.parts, resident=not given.live)
    print(f"{time.monotonic() - begun:.0f} s")
    if len(table) < len(names):
        raise SystemExit(f"{len(names) - len(table)} of {len(names)} cases failed; nothing is written")
    if not given.only and not given.live:
        FILE.write_text(json.dumps(table, indent=1) + "\n")
        show(table)


def measured(names: list[str], *, parts: bool, resident: bool) -> list[dict[str, Any]]:
    """Of each case that has an answer: what is predicted and what it took, told as it comes."""
    import whet.api
    import whet.stages  # noqa: F401  imported once: what is imported is not the run's

    print(
        f"{'':5} {'case':28} {'predicted':>10} {'live':>10} {'ratio':>6} {'resident':>10}    s  largest phase"
    )
    table = []
    for number, name in enumerate(names, 1):
        print(f"{number:2}/{len(names):<2} {name:28} ", end="", flush=True)
        start = time.monotonic()
        try:
            live = apart(name, by_live=True)
            kept = apart(name, by_live=False)["measured"] if resident else None
        except RuntimeError as error:
            print(f"failed: {error}", flush=True)
            continue
        row = {"case": name, "predicted": live["predicted"], "live": live["measured"], "resident": kept}
        row |= {"ratio": round(live["predicted"] / live["measured"], 3), "phase": live["phase"]}
        table.append(row)
        last = f"{'-':>10}" if kept is None else mb(kept)
        print(f"{mb(row['predicted'])} {mb(row['live'])} {row['ratio']:6.2f} {last}", end=" ")
        print(f"{time.monotonic() - start:4.0f}  {row['phase']}", flush=True)
        for part, count in live["parts"].items() if parts else ():
            print(f"        {part:30} {mb(count)}")
    return table


def show(table: list[dict[str, Any]]) -> None:
    """The table of benchmarks/README.md, in MB."""
    print("| case | predicted | live | as run | predicted/live | as run/live | largest phase |")
    print("|---|---|---|---|---|---|---|")
    for row in table:
        numbers = " | ".join(f"{row[key] / 2**20:.1f}" for key in ("predicted", "live", "resident"))
        ratios = f"{row['ratio']:.2f} | {row['resident'] / row['live']:.2f}"
        print(f"| {row['case']} | {numbers} | {ratios} | {row['phase']} |")


def apart(name: str, *, by_live: bool) -> dict[str, Any]:
    """Run a case in a process of its own, which has imported everything and run nothing. RuntimeError: why it has no
    answer."""
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        os.setsid()  # with the processes that it starts, to be ended together
        with os.fdopen(into, "w") as pipe, open(os.devnull, "w") as silent:
            os.dup2(silent.fileno(), 1)
            os.dup2(silent.fileno(), 2)
            try:
                json.dump(one(name, by_live=by_live), pipe)
            except BaseException as error:
                json.dump({"error": repr(error)}, pipe)
            pipe.flush()
            os._exit(0)
    os.close(into)
    said = ""
    try:
        with os.fdopen(out) as pipe:
            said = pipe.read() if select.select([pipe], [], [], LIMIT_S)[0] else ""
    finally:
        if not said:
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    found = json.loads(said) if said else {"error": f"no answer within {LIMIT_S} s"}
    if "error" in found:
        raise RuntimeError(found["error"])
    return dict(found)


def mb(count: float) -> str:
    return f"{count / 2**20:7.1f} MB"


def one(name: str, *, by_live: bool) -> dict[str, Any]:
    """Run a case in this process. by_live: what is freed leaves the process at once."""
    from whet.api import run_training
    from whet.config.load import load
    from whet.config.memory import largest
    from whet.config.memory_estimate import phases, rank_phases
    from whet.config.plan import plans

    if by_live:
        give_back()
    values = CASES[name]()
    warm_up(values["model"].get("dtype", "float32"))
    found: list[int] = []
    if values["train"].get("parallel"):
        watch_ranks(found)
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(None, (), {**values, "run_dir": folder + "/run"})
        (plan,) = plans(loaded)
        most = largest(rank_phases(plan) or phases(plan))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = status("VmRSS")
        run_training(loaded)
    if values["train"].get("parallel") and not found:
        raise RuntimeError("the ranks of the run were not seen")
    return {
        "predicted": most.total,
        "measured": max(found) if found else status("VmHWM") - before,
        "phase": most.name,
        "parts": most.parts,
    }


def give_back() -> None:
    """Let the C library give freed memory back at once, whatever whet asks it to keep."""
    from whet import environment

    environment.keep_memory = lambda: None
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    libc.mallopt(m_mmap_threshold, 1 << 16)
    libc.mallopt(m_trim_threshold, 1 << 16)
    os.environ |= {
        "MALLOC_MMAP_THRESHOLD_": str(1 << 16),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 16),
    }  # of the ranks


def watch_ranks(found: list[int]) -> None:
    """Put into `found` by how much each rank's peak grew, when the ranks of a run end."""
    import whet.placement
    from whet.guard.line import LocalLine
    from whet.training import ranks

    class Watched(ranks.Ranks):
        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            self.pids = [line.process.pid for line in self.lines.lines if isinstance(line, LocalLine)]
            self.before = [begin_anew(pid) for pid in self.pids]

        def close(self) -> None:
            if self._end.alive:
                found.extend(status("VmHWM", pid) - before for pid, before in zip(self.pids, self.before))
            super().close()

    whet.placement.Ranks = Watched  # type: ignore[misc]


def begin_anew(pid: int) -> int:
    """Let a process's peak begin at what it has now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return status("VmRSS", pid)


def warm_up(dtype: str) -> None:
    """Load what the first run of a process loads: model classes, kernels, BLAS and its code for this dtype."""
    from whet.api import run_training
    from whet.config.load import load

    tiny = {"name": "qwen3", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with tempfile.TemporaryDirectory() as folder:
        values = case(scratch=tiny, prompt=8, reply=4, tasks=2, group=2)
        values["model"]["dtype"] = dtype
        run_training(load(None, (), {**values, "run_dir": folder + "/run"}))


def status(key: str, pid: int | str = "self") -> int:
    """A number of /proc/PID/status, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The memory plan against measured peaks.")
    parser.add_argument("--only", action="append", metavar="NAME", help="one case; writes nothing")
    parser.add_argument("--live", action="store_true", help="not as users run it; writes nothing")
    parser.add_argument("--parts", action="store_true", help="with what the plan counts")
    parser.add_argument("--show", action="store_true", help="the table of memory.json")
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
