"""PRIME: rewards of tokens by a language model that learns from outcomes beside the policy.

The oracles are written from verl's recipe (recipe/prime of 0.5.0: prime_core_algos.py, prime_dp_rm.py), one response
after the other in Python floats.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batches import by_rollout, doubles, logp_now, make_batch
from test_learning import SETUP, learn
from whet.algos.implicit import labels, model_loss, prime, rivals
from whet.algos.recipes import Algorithm, build
from whet.batch import Batch, Outputs
from whet.config import schema
from whet.types import ConfigError, DataError

Lists = list[list[float]]


def made(**settings: Any) -> Algorithm:
    given = {"name": "prime", "advantage": settings} if settings else {"name": "prime"}
    cfg = schema.AlgorithmConfig.model_validate(given)
    return build(cfg, critic=schema.CriticConfig(), max_tokens=8)


def scored(seed: int, *, groups: int = 3, each: int = 4, soft: bool = False) -> Batch:
    """Ragged groups with outcomes, and log-probs of the model and its reference."""
    rng = np.random.default_rng(seed)
    pictures = [["pp" + "a" * int(rng.integers(1, 7)) for _ in range(each)] for _ in range(groups)]
    n = groups * each
    rewards = rng.random(n) if soft else rng.integers(0, 2, n).astype(float)
    batch = make_batch(pictures, rewards.tolist(), seed=seed)
    both = (logp_now(batch, seed=s, scale=0.5).detach() for s in (seed + 1, seed + 2))
    return replace(batch, implicit_N=next(both), logp_ref_N=next(both))


def q_of(batch: Batch) -> Lists:
    assert batch.implicit_N is not None
    assert batch.logp_ref_N is not None
    return by_rollout(batch, batch.implicit_N - batch.logp_ref_N)


def members(batch: Batch) -> list[list[int]]:
    groups = batch.group_R.tolist()
    return [[r for r, g in enumerate(groups) if g == group] for group in sorted(set(groups))]


# ---------------------------------------------------------------- the advantage


def oracle(
    batch: Batch, *, process: float, outcome: float, beta: float, whole: bool = False, norm: bool = True
) -> Lists:
    """token_level_score of _forward_micro_batch, prime_norm, compute_rloo_advantage_return up to its whitening."""
    scores = []
    for q in q_of(batch):
        r = [beta * x for x in q]
        scores.append([0.0] * (len(r) - 1) + [sum(r)] if whole else [*r[:-1], 0.0])
    if norm:
        most = max(abs(sum(row[t:])) for row in scores for t in range(len(row)))
        scores = [[x / (most + 1e-6) for x in row] for row in scores]
    acc = batch.reward_R.tolist()
    out: Lists = [[0.0] * len(row) for row in scores]
    for group in members(batch):
        n = len(group)
        base = sum(sum(scores[i]) / len(scores[i]) for i in group) / (n - 1)
        for i in group:
            total = [process * (x * n / (n - 1) - base) for x in scores[i]]
            total[-1] += outcome * (acc[i] * n / (n - 1) - sum(acc[j] for j in group) / (n - 1))
            out[i] = [sum(total[t:]) for t in range(len(total))]
    return out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("whole", "norm"), [(False, True), (False, False), (True, True)])
def test_the_advantage_is_verls(seed: int, whole: bool, norm: bool) -> None:
    batch = scored(seed, soft=seed == 2)
    got, _ = prime(
        batch,
        process_coef=5.0,
        outcome_coef=3.0,
        implicit_beta=0.05,
        implicit_granularity="whole" if whole else "token",
        implicit_normalize=norm,
    )
    expected = oracle(batch, process=5.0, outcome=3.0, beta=0.05, whole=whole, norm=norm)
    for mine, theirs in zip(by_rollout(batch, got), expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-11, abs=1e-12)


def test_the_recipe_whitens_the_returns() -> None:
    batch = scored(1)
    expected = [x for row in oracle(batch, process=5.0, outcome=5.0, beta=0.05) for x in row]
    mean = sum(expected) / len(expected)
    var = sum((x - mean) ** 2 for x in expected) / (len(expected) - 1)
    got = made().advantage(batch, 0.0).adv_N
    assert got is not None
    assert got[batch.mask_N].tolist() == pytest.approx(
        [(x - mean) / math.sqrt(var + 1e-8) for x in expected], rel=1e-9, abs=1e-10
    )


def test_the_advantage_by_hand() -> None:
    # q: 2, 4, and 6; beta 0.5: scores 1, 0 and 0 (the last token has none). Largest return 1, so no scale.
    # Means 1/2 and 0; n = 2: 2 x - 1/2 at each token, doubled: 3, -1 and -1. Outcomes 1 and 0: 2 - 1 and 0 - 1 at the
    # end. Returns.
    batch = make_batch([["paa", "pa"]], [1.0, 0.0])
    batch = replace(batch, implicit_N=doubles([0, -1, -1, 0, -1]), logp_ref_N=doubles([0, -3, -5, 0, -7]))
    got, _ = prime(
        batch,
        process_coef=2.0,
        outcome_coef=1.0,
        implicit_beta=0.5,
        implicit_granularity="token",
        implicit_normalize=True,
    )
    assert got.tolist() == pytest.approx([0, 3, 0, 0, -2], abs=1e-5)


def test_a_group_of_one_and_empty_replies_teach_nothing() -> None:
    batch = make_batch([["paa"], ["pa", "pp"]], [1.0, 1.0, 0.0])
    batch = replace(batch, implicit_N=batch.logp_ref_N)
    adv_N, _ = prime(
        batch,
        process_coef=5.0,
        outcome_coef=5.0,
        implicit_beta=0.05,
        implicit_granularity="token",
        implicit_normalize=True,
    )
    assert adv_N.tolist() == [0] * batch.tokens


# ---------------------------------------------------------------- the model's loss


def mean_loss(batch: Batch, name: str, beta: float, logp_N: Tensor) -> Tensor:
    algorithm = made(implicit_loss=name, implicit_beta=beta)
    weight_N = algorithm.value_weights(batch)
    assert algorithm.value_loss is not None
    return (
        algorithm.value_loss(replace(batch, weight_N=weight_N), Outputs(logp_N=logp_N)).loss_N * weight_N
    ).sum()


@pytest.mark.parametrize("soft", [False, True])
def test_cross_entropy_is_verls(soft: bool) -> None:
    batch = scored(4, soft=soft)
    assert batch.implicit_N is not None
    total = 0.0
    for q, acc in zip(q_of(batch), batch.reward_R.tolist(), strict=True):
        p = 1 / (1 + math.exp(-0.3 * sum(q)))
        total -= acc * math.log(p) + (1 - acc) * math.log(1 - p)
    got = mean_loss(batch, "ce", 0.3, batch.implicit_N).item()
    assert got == pytest.approx(total / batch.rollouts, rel=1e-12)


def test_the_comparison_is_verls() -> None:
    """compute_detach_dpo_loss_rm with bon_mode none: the others of the group as they were before the update."""
    before, batch = scored(5), scored(5)
    rival_R = rivals(before, 0.3)
    moved_N = logp_now(batch, seed=9, scale=0.5).detach()
    batch = replace(batch, implicit_N=moved_N, rival_R=rival_R)
    acc, old, now = batch.reward_R.tolist(), q_of(before), q_of(batch)
    total = 0.0
    for group in members(batch):
        for i in group:
            others = [j for j in group if (acc[j] < acc[i] if acc[i] > 0 else acc[j] > acc[i])]
            rival = sum(sum(old[j]) for j in others) / len(others) * 0.3 if others else 0.0
            sign = 1.0 if acc[i] > 0 else -1.0
            total -= math.log(1 / (1 + math.exp(-(0.3 * sum(now[i]) - rival) * sign)))
    assert mean_loss(batch, "dpo", 0.3, moved_N).item() == pytest.approx(total / batch.rollouts, rel=1e-12)


def test_the_loss_learns_and_tells_how_often_it_is_right() -> None:
    batch = make_batch([["paa", "pa"]], [1.0, 0.0])
    batch = replace(batch, logp_ref_N=doubles([0, -2, -2, 0, -2]))
    logp_N = doubles([0, -1, -1.5, 0, -1]).requires_grad_()
    found = model_loss(batch, Outputs(logp_N=logp_N), name="ce", beta=2.0)
    # beta sum q: 2 (1 + 0.5) = 3, and 2 with a label of 0.
    assert found.loss_N[[2, 4]].tolist() == pytest.approx([math.log1p(math.exp(-3)), math.log1p(math.exp(2))])
    assert found.stats["accuracy"].tolist() == [1, 0]
    assert found.stats["implied_reward"].tolist() == [3, 2]
    (gradient,) = torch.autograd.grad(found.loss_N.sum(), logp_N)
    assert (gradient[[1, 2]] < 0).all()
    assert gradient[4] > 0


def test_a_reward_that_is_no_label_is_refused() -> None:
    with pytest.raises(DataError, match="between 0 and 1; a rollout has -2"):
        labels(make_batch([["pa", "pa"]], [1.0, -2.0]))


# ---------------------------------------------------------------- runs

TRAIN = {"steps": 12, "tasks_per_step": 8, "minibatches": 2, "optimizer": {"lr": 1e-2}}
CRITIC = {"optimizer": {"lr": 1e-2}, "minibatches": 4}


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"implicit_update": "after", "implicit_loss": "dpo"}, marks=pytest.mark.sweep)],
)
def test_it_learns_and_its_model_tells_outcomes_apart(tmp_path: Path, settings: dict[str, Any]) -> None:
    lines = learn(
        tmp_path, {"name": "prime", "advantage": settings}, train=TRAIN | {"steps": 20}, critic=CRITIC
    )
    rewards = [m["reward/mean"] for m in lines]
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-3:]) / 3 > 0.5
    assert all(math.isfinite(m["critic/loss"]) for m in lines)


def test_without_outcomes_the_models_rewards_alone_are_learned_from(tmp_path: Path) -> None:
    settings = {"outcome_coef": 0.0}
    lines = learn(
        tmp_path, {"name": "prime", "advantage": settings}, train=TRAIN | {"steps": 25}, critic=CRITIC
    )
    rewards = [m["reward/mean"] for m in lines]
    assert sum(rewards[-3:]) > 1.3 * sum(rewards[:3]), "only the model has seen them"


def test_a_stopped_run_goes_on_with_its_model(tmp_path: Path) -> None:
    def run(name: str, steps: int) -> Path:
        learn(
            tmp_path / name,
            {"name": "prime", "advantage": {"implicit_update": "after"}},
            train=TRAIN | {"steps": steps},
            critic=CRITIC,
            checkpoint={"interval": 1, "export": False},
        )
        return tmp_path / name / "run" / "metrics.jsonl"

    whole = run("whole", 5)
    for steps in (2, 5):
        parted = run("parted", steps)
    assert whole.read_bytes() == parted.read_bytes()


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_shard": 2},
        *(
            pytest.param(other, marks=pytest.mark.sweep)
            for other in ({"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp_shard": 1, "separate_ranks": ("critic",)})
        ),
    ],
)
def test_two_ranks_give_the_numbers_of_one_process(tmp_path: Path, layout: dict[str, Any]) -> None:
    def run(name: str, **parallel: Any) -> list[dict[str, Any]]:
        train = TRAIN | {"steps": 2, "parallel": parallel}
        scratch = SETUP["model"]["scratch"] | {"num_hidden_layers": 2}
        return learn(
            tmp_path / name, {"name": "prime"}, train=train, critic=CRITIC, model={"scratch": scratch}
        )

    one, two = run("one"), run("two", **layout)
    for a, b in zip(one, two, strict=True):
        for key in ("critic/loss", "critic/grad_norm", "train/loss", "train/grad_norm", "reward/mean"):
            assert a[key] == pytest.approx(b[key], rel=2e-3, abs=1e-5), key


def test_the_policy_waits_while_the_model_warms_up(tmp_path: Path) -> None:
    lines = learn(
        tmp_path, {"name": "prime"}, train=TRAIN | {"steps": 3}, critic=CRITIC | {"warmup_steps": 2}
    )
    assert ["train/loss" in m for m in lines] == [False, False, True]
    assert all("critic/loss" in m for m in lines)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"critic": {"value_clip": 0.2}}, "without a value head"),
        ({"reference": {"reset_interval": 1}}, "would replace the model that the rewards"),
        ({"algorithm": {"name": "prime", "reward_kl": {"coef": 0.1}}}, "label of its outcome"),
        ({"rollout": {"group_size": 1, "sampling": {"max_tokens": 5}}}, "compares the rollouts of a group"),
    ],
)
def test_what_does_not_go_with_it_is_refused(tmp_path: Path, sections: dict[str, Any], why: str) -> None:
    algorithm = sections.pop("algorithm", {"name": "prime"})
    with pytest.raises(ConfigError, match=why):
        learn(tmp_path, algorithm, **sections)
