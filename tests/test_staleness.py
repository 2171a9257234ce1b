"""Weights that are synced every few steps: what is sampled from which version, and what the trainer divides by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import whet
from whet.types import Task

ROWS = [{"prompt": f"copy {n}", "answer": "a"} for n in range(8)]


def share_of_a(response: str, task: Task) -> float:
    return response.count("a") / max(len(response), 1)


def run(tmp_path: Path, **sections: Any) -> Any:
    tree: dict[str, Any] = {
        "run_dir": str(tmp_path / "run"),
        "model": {
            "scratch": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
        },
        "tokenizer": {"build": "chars"},
        "data": {
            "train": [{"rows": ROWS}],
            "eval": [{"rows": ROWS[:2], "name": "held"}],
            "exclude_eval": False,
        },
        "rollout": {"group_size": 4, "sampling": {"max_tokens": 4}},
        "train": {"steps": 6, "tasks_per_step": 2, "optimizer": {"lr": 1e-2}},
        "eval": {"at_start": False, "at_end": False, "interval": 0},
        "machine": {"threads": 1},
        "track": {"trackers": ["jsonl"]},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    if tree["eval"].get("interval") == 0:
        tree["data"].pop("eval")
        tree["data"].pop("exclude_eval")
        tree.pop("eval")
    return whet.train(**tree, rewards={"a": share_of_a})


def versions(result: Any) -> list[set[int]]:
    """Policy versions that each step's tokens were sampled from."""
    out = []
    for step in range(1, 7):
        table = pq.read_table(result.run_dir / "rollouts" / f"main-step-{step:06d}.parquet")
        out.append({v for row in table["versions"].to_pylist() for v in row if v >= 0})
    return out


def test_between_syncs_tokens_come_from_the_last_synced_version(tmp_path: Path) -> None:
    result = run(tmp_path, rollout={"group_size": 4, "sampling": {"max_tokens": 4}, "sync_interval": 3})
    assert versions(result) == [{0}, {0}, {0}, {3}, {3}, {3}]
    lines = [line for line in result.metrics if "train/loss" in line]
    assert [line["train/staleness_mean"] for line in lines] == [0, 1, 2, 0, 1, 2]
    # the trainer's log-probs are of another policy than the engine's, but in the first step after a sync
    assert [line["train/mismatch_max_nats"] > 0 for line in lines] == [False, True, True, False, True, True]
    assert [line["train/ratio_max"] for line in lines] == pytest.approx([1.0] * 6), (
        "old log-probs are the trainer's"
    )


def test_an_evaluation_has_the_present_weights(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        rollout={"group_size": 4, "sampling": {"max_tokens": 4}, "sync_interval": 100},
        eval={"interval": 2, "at_start": False, "at_end": False},
    )
    assert versions(result) == [{0}, {0}, {2}, {2}, {4}, {4}]


def test_every_step_is_the_default(tmp_path: Path) -> None:
    assert versions(run(tmp_path)) == [{0}, {1}, {2}, {3}, {4}, {5}]


def test_the_trainer_may_divide_by_another_temperature(tmp_path: Path) -> None:
    """Then the engine's log-probs are not its own: they are computed anew, and the first ratio is 1 all the same."""
    train = {"steps": 6, "tasks_per_step": 2, "optimizer": {"lr": 1e-2}, "temperature": 0.5}
    lines = [line for line in run(tmp_path, train=train).metrics if "train/loss" in line]
    assert lines[0]["train/mismatch_max_nats"] > 0.01
    assert lines[0]["train/ratio_max"] == pytest.approx(1.0)
