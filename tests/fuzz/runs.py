"""The fuzzers of what whet itself or a foreign trainer wrote: a run's record, adapters, a reward model."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from safetensors.torch import load_file

from fuzz.case import Case
from fuzz.mutate import as_json, changed, damaged
from whet.config.schema import LoraConfig, RewardModelConfig
from whet.models.lora import adapted, attach, export_adapter
from whet.rewards.model import ModelReward
from whet.track import costs, curve, history, show, time_report
from whet.track.timeline import SAMPLING, STEPS, Timeline
from whet.types import WhetError

Damage = Callable[[Random, str, bytes], bytes]


def _files(folder: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    shutil.rmtree(folder)
    return found


# ---------------------------------------------------------------- a run's record


@cache
def run_files() -> dict[str, bytes]:
    from fuzz.readers import tokenizer
    from test_show import make

    folder = Path(mkdtemp(prefix="whet-fuzz-"))
    make(folder).close()
    line = Timeline(folder / "timeline.json")
    for step in (1, 2):
        line.at = "grpo", step
        with line.span("update", STEPS), line.span("decode", SAMPLING):
            pass
    line.close()
    tokenizer().save_pretrained(folder / "export")
    found = _files(folder)
    (change,) = [{"stage": "grpo", "step": 1, "key": "seed", "old": 1, "new": [2], "kind": "branch"}]
    manifest = {**json.loads(found["manifest.json"]), "changes": [change]}
    names = [n for n in found if not n.startswith("export/") or n.endswith("tokenizer.json")]
    return {n: found[n] for n in names} | {"manifest.json": json.dumps(manifest).encode()}


def make_run(random: Random, damage: Damage) -> Case:
    name = random.choice([n for n in sorted(run_files()) if n != "lock"])
    return Case({**run_files(), name: _damaged_record(random, name, run_files()[name], damage)}, name)


def _damaged_record(random: Random, name: str, data: bytes, damage: Damage) -> bytes:
    if random.random() < 0.3:
        return damaged(random, data)
    if name.endswith(".jsonl"):
        lines = data.splitlines()
        number = random.randrange(len(lines))
        lines[number] = as_json(changed(random, json.loads(lines[number])))
        return b"\n".join(lines) + b"\n"
    if name == "timeline.json":
        return b"[\n" + b",\n".join(map(as_json, changed(random, json.loads(data)))) + b"\n]\n"
    if name.endswith(".parquet"):
        return _other_rows(random, data)
    return damage(random, name, data)


def _other_rows(random: Random, data: bytes) -> bytes:
    """Rows with other values, or other columns."""
    table = pq.read_table(io.BytesIO(data))
    rows = changed(random, table.to_pylist())
    parts = (
        [row.get("reward_parts") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    )
    if any(isinstance(pairs, list) and None in pairs for pairs in parts):  # Arrow would end the process
        return damaged(random, data)
    try:
        made = pa.Table.from_pylist(rows, schema=table.schema if random.random() < 0.7 else None)
        sink = pa.BufferOutputStream()
        pq.write_table(made, sink)
    except (pa.ArrowException, AttributeError, TypeError, ValueError, OverflowError):
        return damaged(random, data)
    return bytes(sink.getvalue().to_pybytes())


def read_run(folder: Path) -> object:
    """Every view of it: the first refusal counts, the others are looked at nevertheless."""
    refused: list[WhetError] = []
    views: list[Callable[[], object]] = [
        lambda: show.summary(folder),
        lambda: show.report(folder),
        lambda: show.rollouts(folder, 1, tokens=True),
        lambda: time_report.show(folder),
        lambda: costs.measured(folder, "grpo", slots=2),
        lambda: curve.series(folder),
        lambda: history.since_last_start(folder, {}),
    ]
    for view in views:
        try:
            Console(file=io.StringIO(), width=100).print(view())
        except WhetError as e:
            refused.append(e)
    if refused:
        raise refused[0]
    return None


# ---------------------------------------------------------------- adapters

LORA = LoraConfig(rank=4, alpha=8.0)


@cache
def adapter_files() -> dict[str, bytes]:
    from tiny import tiny_model

    folder, model = Path(mkdtemp(prefix="whet-fuzz-")), tiny_model(layers=1)
    attach(model, LORA, seed=0)
    export_adapter(model, folder / "a", cfg=LORA, base="somewhere")
    return {n.removeprefix("a/"): data for n, data in _files(folder).items()}


def make_adapter(random: Random, damage: Damage) -> Case:
    name = random.choice(("adapter_config.json", "adapter_model.safetensors"))
    return Case({**adapter_files(), name: damage(random, name, adapter_files()[name])}, name)


def read_adapter(folder: Path) -> object:
    from tiny import tiny_model

    model = tiny_model(layers=1)
    attach(model, LORA.model_copy(update={"path": str(folder)}), seed=0)
    said = load_file(folder / "adapter_model.safetensors")
    for name, layer in adapted(model).items():
        for part, found in (("A", layer.lora_A), ("B", layer.lora_B)):
            expected = said[f"base_model.model.{name}.lora_{part}.weight"].float()
            assert torch.equal(found.nan_to_num(), expected.nan_to_num()), name
    return model


# ---------------------------------------------------------------- a reward model


@cache
def judge_files() -> dict[str, bytes]:
    from test_reward_model import folder as made

    return _files(made(Path(mkdtemp(prefix="whet-fuzz-"))))


def make_judge(random: Random, damage: Damage) -> Case:
    names = ("config.json", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    name = random.choice(names)
    return Case({**judge_files(), name: damage(random, name, judge_files()[name])}, name)


def read_judge(folder: Path) -> object:
    from test_reward_model import rollout

    reward = ModelReward("rm", RewardModelConfig(path=str(folder)), device="cpu")
    reward.load()
    return reward.score(rollout("1+2=", "3"))
