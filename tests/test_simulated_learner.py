"""train.engine=simulated: steps that take their time and learn nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import whet
from test_early_stopping import ROWS, SCRATCH
from whet.config.load import load
from whet.config.plan import plans
from whet.types import CheckpointError, ConfigError, Json

STEP_S = 0.3


def tree(run_dir: Path, **train: Any) -> Json:
    how = {"steps": 3, "tasks_per_step": 2, "engine": "simulated", "engine_arguments": {"step_s": STEP_S}}
    return {
        "data": {"train": ROWS, "eval": ROWS[:2], "exclude_eval": False, "max_prompt_tokens": 16},
        "model": {"scratch": SCRATCH},
        "tokenizer": {"build": "chars"},
        "rewards": {"length": {"function": "whet.rewards.made_up:coin"}},
        "rollout": {"group_size": 2, "sampling": {"max_tokens": 4}},
        "track": {"trackers": ["jsonl"]},
        "checkpoint": {"interval": 1, "keep": None},
        "run_dir": str(run_dir),
        "train": {**how, **train},
    }


def of_file(tmp_path: Path, **train: Any) -> Json:
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    data = {"train": [{"path": str(tmp_path / "rows.jsonl")}], "max_prompt_tokens": 16}
    return tree(tmp_path / "run", **train) | {"data": data}


def lines(result: whet.Result) -> list[dict[str, Any]]:
    return [line for line in result.metrics if "train/version" in line]


@pytest.mark.parametrize("schedule", [{}, {"schedule": "async", "max_staleness": 1}])
def test_steps_wait_and_the_model_stays(tmp_path: Path, schedule: Json) -> None:
    given = tree(tmp_path / "run")
    given["rollout"] |= schedule
    found = lines(whet.train(**given))
    assert [line["train/version"] for line in found] == [1.0, 2.0, 3.0]
    assert not any("train/loss" in line for line in found)
    assert all("reward/mean" in line for line in found)
    saved = [
        load_file(p / "policy" / "model.safetensors")
        for p in sorted((tmp_path / "run" / "checkpoints").iterdir())
    ]
    assert len(saved) == 3
    assert all(torch.equal(saved[0][name], one[name]) for one in saved[1:] for name in saved[0])


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "grpo", "reward_kl": {"coef": 0.1, "target": 1.0, "horizon": 10}},
        {"name": "grpo", "kl": {"coef": 0.001}},
        {"name": "ppo"},
    ],
    ids=["kl in the reward, controlled", "kl", "critic"],
)
def test_what_a_loss_would_read_is_not_asked_for(tmp_path: Path, algorithm: Json) -> None:
    given = tree(tmp_path / "run", steps=2, engine_arguments={"step_s": 0.0}) | {"algorithm": algorithm}
    given["track"]["batches_interval"] = 1
    assert len(lines(whet.train(**given))) == 2


def test_a_step_and_a_sync_take_their_seconds(tmp_path: Path) -> None:
    for name, arguments in (("a", {"step_s": STEP_S}), ("b", {"step_s": 0.0, "sync_s": STEP_S})):
        whet.train(**tree(tmp_path / name, engine_arguments=arguments))
        timed = [json.loads(line) for line in (tmp_path / name / "timings.jsonl").read_text().splitlines()]
        steps = [line["time/step_s"] for line in timed if "time/step_s" in line]
        assert len(steps) == 3
        assert min(steps) > 0.99 * STEP_S


def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    whet.train(**tree(tmp_path / "run", steps=2))
    found = lines(whet.train(**tree(tmp_path / "run", steps=4)))
    assert [line["step"] for line in found] == [1, 2, 3, 4]


def test_a_run_is_simulated_to_its_end_or_not_at_all(tmp_path: Path) -> None:
    real = {"engine": "torch", "engine_arguments": {}}
    whet.train(**tree(tmp_path / "a", steps=1))
    with pytest.raises(
        CheckpointError, match=r"training was simulated up to here, and train\.engine=torch now"
    ):
        whet.train(**tree(tmp_path / "a", steps=2, **real))
    whet.train(**tree(tmp_path / "b", steps=1, **real))
    with pytest.raises(
        CheckpointError, match=r"was not simulated up to here, and train\.engine=simulated now"
    ):
        whet.train(**tree(tmp_path / "b", steps=2))


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (
            {"engine_arguments": {"step_s": -1}},
            r"engine_arguments.step_s: got -1, expected a number >= 0",
        ),
        (
            {"engine_arguments": {"step": 1}},
            r"engine_arguments.step: unknown key; did you mean 'step_s'.*; expected step_s, sync_s",
        ),
        (
            {"engine_arguments": "ds.json"},
            r"engine_arguments: got .ds.json., expected a section \(keys: step_s, sync_s\)",
        ),
        ({"parallel": {"dp_shard": 2}}, r"simulated: nothing is trained, so there are no ranks"),
        ({"engine": "torch"}, r"has no effect: train.engine is torch"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, train: Json, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plans(load(None, (), of_file(tmp_path, **train)))


def test_data_is_learned_or_not_but_not_simulated(tmp_path: Path) -> None:
    given = of_file(tmp_path) | {"algorithm": {"name": "sft"}}
    with pytest.raises(ConfigError, match=r"it is for runs that sample, and algorithm\.name=sft"):
        plans(load(None, (), given))


def test_the_plan_counts_no_optimizer_and_says_so(tmp_path: Path) -> None:
    from whet.config.describe import facts

    for engine, there in (("simulated", False), ("torch", True)):
        (plan,) = plans(load(None, (), of_file(tmp_path, engine=engine, engine_arguments={})))
        said = facts(plan)
        assert ("optimizer of the policy" in said["memory"]) == there
        assert ("none: each training step waits 30 s" in said["optimizer steps"]) != there
