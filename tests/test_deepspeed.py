"""DeepSpeed as a train engine: its numbers against those of one process, its files, and what its config may say.

One start of two ranks holds an engine of each stage. tests/test_train_contract.py has the whole contract for each of
them (`make test-backends`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forked import near
from test_train_torch import CUT, assert_near, pg_loss, weighted
from tiny import tiny_model
from whet.config import deepspeed
from whet.config.load import load
from whet.config.schema import OptimizerConfig
from whet.models import kernels
from whet.models.mesh import Dims
from whet.training.ranks import RankGroup, Ranks
from whet.training.torch import TorchEngine
from whet.types import ConfigError, Json

ADAM = OptimizerConfig(name="adamw", lr=0.02, weight_decay=0.1)
BASE: Json = {
    "model": {"scratch": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}},
    "tokenizer": {"build": "chars"},
    "data": {"max_prompt_tokens": 16, "train": [{"path": "tests/data/words.jsonl"}]},
    "rewards": {"letters": {"function": "tests/resume/rewards.py:shared_letters"}},
    "rollout": {"group_size": 4},
    "train": {"steps": 2, "tasks_per_step": 8, "minibatches": 2, "engine": "deepspeed", "parallel": {"dp_shard": 2}},
}  # fmt: skip


def given(config: Json | None = None, *overrides: str) -> Any:
    base = {**BASE, "train": {**BASE["train"], "deepspeed": {"config": config or {}}}}
    return load(None, overrides, base).stages[0]


def zero(stage: int, **more: Any) -> Json:
    """What `placement` has DeepSpeed start with. Small tensors are cut, too, unless the config says otherwise."""
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more}}
    return deepspeed.engine_config(given(config), ADAM, "float32")


CPU = {"device": "cpu"}
ZERO = {
    "stage 1": zero(1),
    "stage 2": zero(2),
    "stage 3": zero(3),
    "stage 3, small tensors whole": zero(3, stage3_param_persistence_threshold="auto"),
    "stage 1, optimizer on the host": zero(1, offload_optimizer=CPU),
    "stage 2, optimizer on the host": zero(2, offload_optimizer=CPU),
    "stage 3, all on the host": zero(3, offload_optimizer=CPU, offload_param=CPU),
    "stage 3, hpZ": zero(3, zero_hpz_partition_size=2),
}
HERE = ("stage 1", "stage 2", "stage 3", "stage 3, all on the host")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pytest.importorskip("deepspeed")
    ranks = Ranks(Dims(dp_shard=2), timeout_s=120.0, open_lines=near)
    try:
        yield ranks
    finally:
        ranks.close()


HOW: dict[str, Any] = {"cut": replace(CUT, max_tokens=40), "total_steps": 8}


def one_process(**how: Any) -> TorchEngine:
    return TorchEngine(tiny_model(), kernels.load("auto"), **{**HOW, "optimizer": ADAM, **how})


def saved(engine: Any, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    engine.save(folder)
    return {file: load_file(folder / f"{file}.safetensors") for file in ("model", "optimizer")}


@pytest.mark.parametrize("name", HERE)
def test_three_steps_are_those_of_one_process(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """Gradient norms, clipped at 1.0, weights and moments; then each reads what the other has saved, and goes on."""
    engine = RankGroup(ranks, f"{name}: trained", tiny_model(), deepspeed=ZERO[name], optimizer=ADAM, **HOW)
    plain = one_process()
    for seed in range(3):
        numbers, wanted = engine.update(weighted(seed), pg_loss), plain.update(weighted(seed), pg_loss)
        assert wanted["grad_norm"] > 1.0, "clipping is tested"
        assert numbers == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    mine, theirs = saved(engine, tmp_path / "mine"), saved(plain, tmp_path / "theirs")
    for file in mine:
        assert_near(mine[file], theirs[file], 1e-4)
    logp_N = engine.forward(weighted(), "logprobs")
    torch.testing.assert_close(logp_N, plain.forward(weighted(), "logprobs"), rtol=1e-4, atol=1e-5)
    engine.load(tmp_path / "theirs")
    plain.load(tmp_path / "mine")
    for one in (engine, plain):
        one.update(weighted(3), pg_loss)
    assert_near(saved(engine, tmp_path / "a")["model"], saved(plain, tmp_path / "b")["model"], 1e-4)
