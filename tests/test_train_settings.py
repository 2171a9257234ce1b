"""Settings of training end to end: epochs that end with a full step, cuts that change no number, the critic's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import whet
from batches import ragged
from tiny import VOCAB, tiny_model
from whet.algos.recipes import build
from whet.algos.skipping import Skipping
from whet.config.load import load
from whet.config.plan import plan
from whet.config.schema import DataConfig, SourceConfig, TokenizerConfig
from whet.data.tasks import TaskStream
from whet.data.tokenizer import load_tokenizer
from whet.learner import Learner
from whet.trained_models import model_at
from whet.types import ConfigError

ROOT = Path(__file__).parents[1]


# ---------------------------------------------------------------- drop_last


def stream(rows: int, multiple_of: int, seed: int = 0) -> TaskStream:
    source = SourceConfig(rows=tuple({"prompt": f"{n}"} for n in range(rows)))
    tokenizer = load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=["0123456789"])
    return TaskStream((source,), DataConfig(), tokenizer=tokenizer, seed=seed, multiple_of=multiple_of)


def test_an_epoch_ends_with_its_last_full_step() -> None:
    """Ten rows in steps of four: eight of each epoch's order are asked, the last two are not."""
    whole, cut = stream(10, 1), stream(10, 4)
    assert (whole.rows_per_epoch, cut.rows_per_epoch) == (10, 8)
    epochs = [[t.prompt for t in whole.next(10)] for _ in range(5)]
    assert [[t.prompt for t in cut.next(8)] for _ in range(5)] == [epoch[:8] for epoch in epochs]
    assert cut.epoch == 5
    assert len({tuple(sorted(epoch[8:])) for epoch in epochs}) > 1, "others are left out each time"


def test_the_stream_goes_on_over_the_end_of_a_cut_epoch() -> None:
    unbroken = [t.prompt for t in stream(10, 4).next(24)]
    for drawn in (3, 7, 8, 9, 16):
        first, again = stream(10, 4), stream(10, 4)
        first.next(drawn)
        again.restore(first.state())
        assert [t.prompt for t in again.next(24 - drawn)] == unbroken[drawn:]


def test_rows_that_fill_no_step_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.drop_last: .* 3 rows, but a step takes 4 tasks"):
        stream(3, 4)


# ---------------------------------------------------------------- the critic's own updates


def updates(step: int, *overrides: str) -> list[tuple[str, int]]:
    """(who, number of groups) of every optimizer step of one training step, on sixteen groups."""
    values = {"model": {"scratch": {}}, "tokenizer": {"build": "chars"}, "data": {"train": [{"path": "a"}]}}
    values |= {
        "rewards": {"acc": {"function": "exact"}},
        "train": {"steps": 10},
        "algorithm": {"name": "ppo"},
    }
    cfg = load(None, overrides, values).config
    seen: list[tuple[str, int]] = []

    def learner(who: str) -> Callable[..., dict[str, float]]:
        def learn(self: Learner, *given: Any) -> dict[str, float]:
            seen.append((who, len(given[-1].group_R.unique())))
            return {}

        return learn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "update_policy", learner("policy"))
        patch.setattr(Learner, "update_critic", learner("critic"))
        algorithm = build(cfg.algorithm, critic=cfg.critic, max_tokens=cfg.rollout.sampling.max_tokens)
        context: Any = SimpleNamespace(cfg=cfg, plan=plan(cfg), name="main", algorithm=algorithm)
        model: Any = object()
        Learner(context, model, (), critic=model, skipping=Skipping(), exact=True).update(
            step, ragged(3, groups=16)
        )
    return seen


def test_the_critic_has_its_own_minibatches_and_passes() -> None:
    own = ["train.minibatches=2", "train.update_epochs=2", "critic.minibatches=4", "critic.update_epochs=1"]
    assert updates(0, *own) == [("policy", 8)] * 4 + [("critic", 4)] * 4
    assert updates(0, "train.minibatches=4") == [("policy", 4)] * 4 + [("critic", 4)] * 4


def test_the_warm_up_is_exactly_so_many_steps() -> None:
    waits = [all(who == "critic" for who, _ in updates(step, "critic.warmup_steps=3")) for step in range(5)]
    assert waits == [True, True, True, False, False]
    assert [who for who, _ in updates(0)] == ["policy", "critic"], "0 steps: both from the start"


# ---------------------------------------------------------------- models of their own


def test_overrides_of_a_role(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    models: Any = SimpleNamespace(model=tiny_model("llama"), tokenizer=Sized(VOCAB))
    policy = {"path": "x", "overrides": {"initializer_range": 0.125}}

    def epsilon(overrides: dict[str, Any] | None) -> tuple[float, float]:
        cfg = load(
            None, (), {"model": policy, "critic": {"path": str(tmp_path), "overrides": overrides}}
        ).config
        context: Any = SimpleNamespace(cfg=cfg)
        config = model_at(models, context, str(tmp_path), role="critic")().config
        return config.rms_norm_eps, config.initializer_range

    plain = tiny_model("llama").config
    assert epsilon({"rms_norm_eps": 0.25}) == (0.25, plain.initializer_range)
    assert epsilon({}) == (plain.rms_norm_eps, plain.initializer_range)
    assert epsilon(None) == (plain.rms_norm_eps, 0.125), "the policy's"


class Sized:
    """A tokenizer, as far as loading a model asks."""

    eos_token_id, pad_token_id = 1, 0

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


# ---------------------------------------------------------------- no cut changes a number


def share_of_a(response: str, task: whet.Task) -> float:
    return response.count("a") / max(len(response), 1)


def trained(tmp_path: Path, name: str, **sections: Any) -> list[dict[str, Any]]:
    values: dict[str, Any] = {
        "model": {
            "scratch": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "max_position_embeddings": 64,
            }
        },
        "tokenizer": {"build": "chars"},
        "data": {"max_prompt_tokens": 8, "train": [{"path": str(ROOT / "tests/data/words.jsonl")}]},
        "rollout": {"group_size": 4, "sampling": {"max_tokens": 5}},
        "algorithm": {"name": "ppo", "kl": {"coef": 0.01}},
        "machine": {"threads": 1},
        "track": {"trackers": ["jsonl"]},
        "checkpoint": {"interval": 0, "export": False},
    }
    result = whet.train(rewards=share_of_a, run_dir=str(tmp_path / name), **(values | sections))
    assert result.finished
    return result.metrics


def test_no_cut_changes_a_number(tmp_path: Path) -> None:
    train = {"steps": 3, "tasks_per_step": 8, "minibatches": 2, "optimizer": {"lr": 3e-3}}
    critic = {"update_epochs": 2, "optimizer": {"lr": 3e-3}}
    plain = trained(tmp_path, "plain", train=train, critic=critic)
    cut = trained(
        tmp_path,
        "cut",
        train=train | {"forward_micro_batch_tokens": 20, "micro_batch_rollouts": 5},
        critic=critic | {"micro_batch_tokens": 30, "gradient_checkpointing": True},
    )
    assert len(plain) == len(cut) == 3
    for a, b in zip(plain, cut, strict=True):
        for key in ("train/loss", "train/grad_norm", "critic/loss", "critic/grad_norm", "reward/mean"):
            assert a[key] == pytest.approx(b[key], rel=2e-3, abs=1e-5), key


@pytest.mark.parametrize("unit", ["train_step", "optimizer_step"])
def test_the_schedules_run_over_the_steps_of_the_stage(tmp_path: Path, unit: str) -> None:
    """Three steps; two updates of the policy in each, four of the critic. What is written down is their mean."""
    optimizer = {"lr": 1e-2, "schedule": {"type": "linear", "unit": unit}}
    metrics = trained(
        tmp_path,
        unit,
        train={"steps": 3, "tasks_per_step": 4, "minibatches": 2, "optimizer": optimizer},
        critic={"minibatches": 4, "optimizer": optimizer},
    )

    def rate(step: int, updates: int) -> float:
        late = 0.0 if unit == "train_step" else (updates - 1) / 2 / updates
        return 1e-2 * (1 - (step + late) / 3)

    assert [m["train/lr"] for m in metrics] == pytest.approx([rate(s, 2) for s in range(3)])
    assert [m["critic/lr"] for m in metrics] == pytest.approx([rate(s, 4) for s in range(3)])


def test_shuffled_passes_are_other_minibatches(tmp_path: Path) -> None:
    """The first step plays the same rollouts; who learns with whom is another matter, and the seed decides it."""
    train = {"steps": 1, "tasks_per_step": 8, "minibatches": 4, "optimizer": {"lr": 1e-2}}
    as_they_came = trained(tmp_path, "a", train=train)[0]
    shuffled, again = (trained(tmp_path, n, train=train | {"shuffle_minibatches": True})[0] for n in "bc")
    assert shuffled["reward/mean"] == as_they_came["reward/mean"]
    assert shuffled["train/grad_norm"] != as_they_came["train/grad_norm"]
    assert shuffled["train/grad_norm"] == again["train/grad_norm"]
