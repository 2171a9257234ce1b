"""What episodes of many turns cost: tokens prefilled by turn, and the overhead of many episodes at once.

    python benchmarks/agents.py [--out benchmarks/agents.json]

Two tables. The first: one conversation of 8 turns with the native engine, a model of 0.1 million parameters; by turn
the tokens of the history, and how many of them were prefilled because the cache did not have them. Without a cache the
whole history is. The second: 64 to 512 episodes of 8 turns at once, each turn a call of a tool, with the scripted
engine and the environment in one host process; no model works, so everything is overhead. CPU seconds are of the driver
and of the host, bytes are their growth at the peak. Each size has processes of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

TURNS, PROMPT, SAID, TOLD = 8, 200, 40, 60
SIZES = (64, 128, 256, 512)

TOOL = '''
def look_up(key: str) -> str:
    """Looks a key up.

    Args:
        key: what to look for
    """
    return "the value of " + key
'''


def prefill() -> list[dict[str, int]]:
    """By turn of one conversation: tokens of the history, and those of them that were prefilled."""
    import random

    import torch

    from whet.config.schema import ModelConfig
    from whet.models import kernels
    from whet.models.load import build
    from whet.rollout.native.engine import NativeEngine
    from whet.types import Request, Sampling

    scratch = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
    model = build(
        ModelConfig(scratch=scratch),
        vocab_size=512,
        eos_token_id=1,
        pad_token_id=0,
        seed=0,
        device="cpu",
        dtype=torch.float32,
    )
    engine = NativeEngine(model, kernels.load("auto"), end_token_ids=(1,), max_context=2048)

    async def converse() -> list[dict[str, int]]:
        draw, rows = random.Random(0), []
        history = [draw.randrange(2, 512) for _ in range(PROMPT)]
        for turn in range(1, TURNS + 1):
            before = engine.counts.prefilled_tokens
            sampling = Sampling(max_tokens=SAID, ignore_eos=True, key=turn)
            done = await engine.generate(
                Request(id=str(turn), session="s", prompt=tuple(history), sampling=sampling)
            )
            rows.append(
                {"turn": turn, "history": len(history), "prefilled": engine.counts.prefilled_tokens - before}
            )
            history += done.token_ids + [draw.randrange(2, 512) for _ in range(TOLD)]
        return rows

    return asyncio.run(converse())


def overhead(episodes: int, out: Any) -> None:
    """In a process of its own: plays so many episodes at once and sends what they cost."""
    from whet.config.schema import EnvironmentConfig, TokenizerConfig
    from whet.data.codec import MessageCodec
    from whet.data.tokenizer import load_tokenizer
    from whet.envs.hosts import EnvHosts
    from whet.rollout.episode import play_groups
    from whet.rollout.limits import EpisodeLimits
    from whet.rollout.scripted import ScriptedEngine
    from whet.types import Message, Sampling, Task

    call = '{"name": "look_up", "arguments": {"key": "k17"}}'
    texts = [call, "what is the value of k17?"]
    tokenizer = load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=texts)
    codec = MessageCodec(tokenizer, calls="json")
    said = [*tokenizer(call, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tool.py").write_text(TOOL)
        env = EnvironmentConfig(
            make="whet.envs.tool_env:tools",
            arguments={"functions": [f"{folder}/tool.py:look_up"]},
            max_turns=TURNS,
        )
        hosts = EnvHosts(env)
        try:
            prompt = (Message("user", "what is the value of k17?"),)
            ids = tuple(codec.encode_prompt(prompt))
            tasks = [Task(uid=n, source="s", prompt=prompt, token_ids=ids) for n in range(episodes)]
            engine = ScriptedEngine(
                lambda prompt, sampling, version: list(said), end_token_ids=(tokenizer.eos_token_id,)
            )
            options: dict[str, Any] = {
                "group_size": 1, "sampling": Sampling(max_tokens=10_000), "seed": 0, "purpose": "train",
                "decode": lambda ids: "", "end_token_ids": (tokenizer.eos_token_id,), "timeout_s": 300.0,
                "make_env": hosts.make, "codec": codec,
                "limits": EpisodeLimits(max_turns=TURNS, observation_tokens=10_000),
            }  # fmt: skip
            asyncio.run(play_groups(engine, tasks[:8], **options))  # imports and caches
            host = hosts._shared[0].line.process.pid
            at_rest = memory(os.getpid()), memory(host)
            cpu, start = cpu_s(os.getpid()) + cpu_s(host), time.perf_counter()
            groups = asyncio.run(play_groups(engine, tasks, **options))
            wall = time.perf_counter() - start
            spent = cpu_s(os.getpid()) + cpu_s(host) - cpu
            turns = sum(len(g.rollouts[0].turns) for g in groups)
            assert turns == episodes * TURNS, (turns, groups[0].rollouts[0].error)
            grown = memory(os.getpid()) - at_rest[0], memory(host) - at_rest[1]
            out.send(
                {
                    "episodes": episodes,
                    "cpu_ms_per_turn": 1000 * spent / turns,
                    "wall_ms_per_turn": 1000 * wall / turns,
                    "driver_kib_per_episode": grown[0] / episodes / 1024,
                    "host_kib_per_episode": grown[1] / episodes / 1024,
                }
            )
        finally:
            hosts.close()


def memory(pid: int) -> int:
    """Peak resident bytes of a process so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no VmHWM of process {pid}")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = prefill()
    print(f"{'turn':>6}{'history':>10}{'prefilled':>11}{'without cache':>15}")
    for row in rows:
        print(f"{row['turn']:>6}{row['history']:>10}{row['prefilled']:>11}{row['history']:>15}")
    sums = sum(r["prefilled"] for r in rows), sum(r["history"] for r in rows)
    print(f"   all{'':>10}{sums[0]:>11}{sums[1]:>15}   {sums[1] / sums[0]:.1f} times as many")
    found = []
    spawn = multiprocessing.get_context("spawn")
    print(
        f"{'episodes':>10}{'CPU ms/turn':>13}{'ms/turn':>9}{'driver KiB/episode':>20}{'host KiB/episode':>18}"
    )
    for episodes in SIZES:
        here, there = spawn.Pipe(duplex=False)
        child = spawn.Process(target=overhead, args=(episodes, there))
        child.start()
        there.close()
        found.append(row := here.recv())
        child.join()
        print(
            f"{episodes:>10}{row['cpu_ms_per_turn']:>13.2f}{row['wall_ms_per_turn']:>9.2f}"
            f"{row['driver_kib_per_episode']:>20.0f}{row['host_kib_per_episode']:>18.0f}"
        )
    if given.out:
        report = {"machine": platform.processor() or platform.machine(), "prefill": rows, "episodes": found}
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
