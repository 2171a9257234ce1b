"""Every recipe learns, through `whet.train` and nothing else: what it is paid for rises in a few seconds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import whet
from swept import except_for

ROOT = Path(__file__).parents[1]
SETUP: dict[str, Any] = {
    "model": {
        "scratch": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
        }
    },
    "tokenizer": {"build": "chars"},
    "machine": {"threads": 1},
    "track": {"trackers": ["jsonl"]},
    "checkpoint": {"interval": 0, "export": False},
}


def share_of_a(response: str, task: whet.Task) -> float:
    return response.count("a") / max(len(response), 1)


def learn(tmp_path: Path, algorithm: dict[str, Any], **sections: Any) -> list[dict[str, Any]]:
    values = SETUP | {
        "data": {"max_prompt_tokens": 8, "train": [{"path": str(ROOT / "tests/data/words.jsonl")}]},
        "rollout": {"group_size": 4, "sampling": {"max_tokens": 5, "ignore_eos": True}},
        "train": {"steps": 40, "tasks_per_step": 8, "optimizer": {"lr": 1e-2}},
        "algorithm": algorithm,
        "track": {"trackers": ["jsonl"], "rollouts_interval": 0},
    }
    result = whet.train(rewards=share_of_a, run_dir=str(tmp_path / "run"), **(values | sections))
    assert result.finished
    return result.metrics


ONLINE = {
    "grpo": {},
    "dr_grpo": {},
    "dapo": {},
    "rloo": {},
    "reinforce": {"whiten": True},
    "ppo": {},
}
FEW = ("grpo", "dapo", "ppo")
"""The advantages of the others have their tests in test_advantages*.py."""


@pytest.mark.parametrize("name", except_for(FEW.__contains__, ONLINE))
def test_reward_rises(tmp_path: Path, name: str) -> None:
    steps = 12 if name == "dapo" else 40  # once every reply is right, dapo finds no group that is not uniform
    train = {"steps": steps, "tasks_per_step": 8, "optimizer": {"lr": 1e-2}}
    extra: dict[str, Any] = {"critic": {"optimizer": {"lr": 1e-2}}} if name == "ppo" else {}
    rewards = [
        m["reward/mean"] for m in learn(tmp_path, {"name": name, **ONLINE[name]}, train=train, **extra)
    ]
    assert sum(rewards[:3]) / 3 < 0.3, "a new model must not know it yet"
    assert sum(rewards[-3:]) / 3 > (0.6 if name == "dapo" else 0.8)


SLOW = {"steps": 15, "tasks_per_step": 8, "optimizer": {"lr": 3e-3}}


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The metrics of a run that no KL holds back."""
    return learn(tmp_path_factory.mktemp("free"), {"name": "grpo"}, train=SLOW)


@pytest.mark.parametrize(
    ("key", "estimator"),
    [("kl", "k2"), pytest.param("kl", "k1+", marks=pytest.mark.sweep), ("reward_kl", "k1")],
)
def test_a_strong_kl_keeps_the_policy_where_it_was(
    tmp_path: Path, free: list[dict[str, Any]], key: str, estimator: str
) -> None:
    algorithm = {"name": "grpo", key: {"coef": 100.0, "estimator": estimator}}
    metrics = learn(tmp_path, algorithm, train=SLOW)
    assert metrics[-1]["reward/mean"] < 0.4
    assert free[-1]["reward/mean"] > metrics[-1]["reward/mean"] + 0.1


def test_several_optimizer_steps_on_a_batch(tmp_path: Path) -> None:
    train = {
        "steps": 12,
        "tasks_per_step": 8,
        "minibatches": 2,
        "update_epochs": 2,
        "optimizer": {"lr": 5e-3},
    }
    metrics = learn(tmp_path, {"name": "grpo"}, train=train)
    assert metrics[-1]["reward/mean"] > 0.7
    assert metrics[-1]["train/clip_frac"] > 0, "with several updates a batch the clip must bite somewhere"


OFFLINE: dict[str, Any] = {"rollout": {"sampling": {"max_tokens": 8}}}


def test_sft_learns_its_demonstrations(tmp_path: Path) -> None:
    whet.train(
        run_dir=str(tmp_path / "run"),
        **SETUP | OFFLINE,
        data={"max_prompt_tokens": 8, "train": [{"path": str(ROOT / "tests/data/words.jsonl")}]},
        algorithm={"name": "sft"},
        train={"steps": 60, "tasks_per_step": 16, "optimizer": {"lr": 1e-2}},
    )
    losses = [m["train/loss"] for m in whet.Result(tmp_path / "run", finished=True).metrics]
    assert losses[0] > 2.0
    assert losses[-1] < 0.6 * losses[0]


def test_dpo_prefers_the_chosen(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(
        "".join(f'{{"prompt": "{c}>", "response": "{c}a", "rejected": "{c}b"}}\n' for c in "abcdefgh")
    )
    result = whet.train(
        run_dir=str(tmp_path / "run"),
        **SETUP | OFFLINE,
        data={"max_prompt_tokens": 8, "train": [{"path": str(pairs)}]},
        algorithm={"name": "dpo"},
        train={"steps": 30, "tasks_per_step": 4, "optimizer": {"lr": 3e-3}},
    )
    first, last = result.metrics[0], result.metrics[-1]
    assert first["train/loss"] == pytest.approx(0.6931, abs=1e-3), "reference = policy: log 2"
    assert last["train/accuracy"] == 1.0
    assert last["train/margin"] > 0.5


def test_rows_can_be_given_as_they_are(tmp_path: Path) -> None:
    rows = [{"prompt": f"{c}>", "answer": c} for c in "abcdefgh"]
    data = {"max_prompt_tokens": 8, "train": [{"rows": rows}]}
    train = {"steps": 2, "tasks_per_step": 4, "optimizer": {"lr": 1e-3}}
    assert len(learn(tmp_path, {"name": "grpo"}, data=data, train=train)) == 2


HOSTILE = '''
import os, time

def hostile(response):
    """By the reply alone: it raises, hangs, ends its process, gives no number, or scores."""
    how = sum(map(ord, response)) % 12
    if how == 0:
        raise ValueError("no")
    if how == 1:
        time.sleep(60)
    if how == 2:
        os._exit(3)
    return float("nan") if how == 3 else response.count("a") / max(len(response), 1)
'''


def test_a_reward_that_fails_in_every_way_costs_its_own_rollouts_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HOSTILE)
    sections = SETUP | {
        "run_dir": str(tmp_path / "run"),
        "data": {"max_prompt_tokens": 8, "train": [{"path": str(ROOT / "tests/data/words.jsonl")}]},
        "rewards": {"a": {"function": f"{tmp_path}/mine.py:hostile"}},
        "reward_workers": {"timeout_s": 0.5, "max_failure_rate": 0.9},
        "rollout": {"group_size": 8, "sampling": {"max_tokens": 5, "ignore_eos": True}},
        "train": {"steps": 3, "tasks_per_step": 4},
        "algorithm": {"name": "grpo"},
        "track": {"trackers": ["jsonl"], "rollouts_interval": 1},
    }
    result = whet.train(**sections)
    assert result.finished
    reasons: set[str] = set()
    for number, line in enumerate(result.metrics, 1):
        rows = result.rollouts(step=number).to_pylist()
        unscored = 0
        for row in rows:
            how = sum(map(ord, row["text"])) % 12
            assert (row["reward"] is None) == (how < 4)
            assert how < 4 or row["reward"] == row["text"].count("a") / max(len(row["text"]), 1)
            unscored += how < 4
        assert line["rollout/failed_count"] == unscored
        assert line["ledger/requested_rollouts"] == len(rows)
        booked = sum(
            value for key, value in line.items() if key.startswith("ledger/") and "requested" not in key
        )
        assert booked == len(rows), "trained on, rejected or failed"
        reasons |= {row["error"][:19] for row in rows if row["error"]}
    assert len(result.metrics) == 3
    assert len(reasons) == 4, reasons
    assert any(line["train/grad_norm"] > 0 for line in result.metrics)


@pytest.mark.sweep  # a minute or two of one core
def test_the_demo_learns_what_the_readme_says(tmp_path: Path) -> None:
    """Held-out accuracy before and after the reinforcement learning, as it is rounded there."""
    result = whet.train(ROOT / "examples" / "first_run.yaml", run_dir=str(tmp_path / "run"))
    assert result.finished
    found = [
        line["eval/accuracy"] for line in result.metrics if line["stage"] == "rl" and "eval/accuracy" in line
    ]
    told = re.search(
        r"accuracy rises from ([\d.]+) to ([\d.]+\d)", (ROOT / "README.md").read_text(encoding="utf-8")
    )
    assert told is not None
    assert [f"{found[0]:.2f}", f"{found[-1]:.2f}"] == list(told.groups())
