"""Self-play: SPPO's regression of log-ratios, and SPIN's DPO on pairs of the policy's own replies.

The oracles are written from verl's recipes (recipe/sppo/dp_actor.py, sppo_ray_trainer.py, recipe/spin/core_algos.py of
0.5.0), sequence by sequence in Python floats.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batches import by_rollout, doubles, logp_now, make_batch, micro_batches
from test_learning import learn
from whet.algos.advantages import token_rewards
from whet.algos.baselines import softmean, win_rate
from whet.algos.recipes import Algorithm, build
from whet.algos.sequence import self_play
from whet.batch import Batch, Outputs
from whet.config import schema
from whet.types import ConfigError


def made(**keys: Any) -> Algorithm:
    cfg = schema.AlgorithmConfig.model_validate(keys)
    return build(cfg, critic=schema.CriticConfig(), max_tokens=8)


def ragged(seed: int, *, groups: int, each: int) -> Batch:
    rng = np.random.default_rng(seed)
    pictures = [["pp" + "a" * int(rng.integers(1, 7)) for _ in range(each)] for _ in range(groups)]
    rewards = rng.integers(0, 3, groups * each).astype(float)
    return make_batch(pictures, rewards.tolist(), seed=seed)


def total(algorithm: Algorithm, batch: Batch, logp_N: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
    """The loss of a whole minibatch."""
    batch = algorithm.advantage(batch, 0.0)
    batch = replace(batch, weight_N=algorithm.weights(batch, 1))
    loss = algorithm.loss_of(batch, lambda b, want: logp_now(b), algorithm.entropy.coef)
    assert batch.weight_N is not None
    return (loss(batch, Outputs(logp_N=logp_N, **out)).loss_N * batch.weight_N).sum()


# ---------------------------------------------------------------- advantages


def of_rollouts(batch: Batch, adv_N: torch.Tensor) -> list[float]:
    return [row[0] for row in by_rollout(batch, adv_N)]


def test_softmean_by_hand() -> None:
    # eta 2: log((e^0 + e^2 + e^4) / 3) / 2 of rewards 0, 1, 2; eta 0: their mean.
    batch = make_batch([["pa", "paa"], ["pa"]], [0.0, 1.0, 2.0])
    value = math.log((1 + math.exp(2) + math.exp(4)) / 3) / 2
    sharp = softmean(batch, reward_N=token_rewards(batch), softmean_eta=2.0)[0]
    assert of_rollouts(batch, sharp) == pytest.approx([-value, 1 - value, 2 - value], rel=1e-14)
    flat = softmean(batch, reward_N=token_rewards(batch), softmean_eta=0.0)[0]
    assert of_rollouts(batch, flat) == [-1, 0, 1]


def test_softmean_stays_finite_and_counts_no_empty_reply() -> None:
    batch = make_batch([["pa", "pp"], ["pa"]], [1000.0, 5.0, -1000.0])
    adv_N = softmean(batch, reward_N=token_rewards(batch), softmean_eta=1.0)[0]
    assert of_rollouts(
        make_batch([["pa"], ["pa"]]), adv_N[batch.mask_N].repeat_interleave(2)
    ) == pytest.approx([math.log(2), math.log(2) - 2000], rel=1e-12)
    nothing = make_batch([["pp"]], [1.0])
    assert softmean(nothing, reward_N=token_rewards(nothing), softmean_eta=1.0)[0].tolist() == [0, 0]


def test_win_rate_by_hand() -> None:
    # Of 0, 1, 1, 3 the first beats none, the second one and half of itself and its equal: 2 / 4.
    batch = make_batch([["pa", "paa", "pa", "pa"], ["pa", "pp", "pa"], ["pa"]], [0, 1, 1, 3, 2, 9, 1, 5])
    adv_N = win_rate(batch, reward_N=token_rewards(batch))[0]
    rows = by_rollout(batch, adv_N)
    assert [row[0] for row in rows if row] == [-0.375, 0, 0, 0.375, 0.25, -0.25, 0]


@pytest.mark.parametrize("seed", range(4))
def test_win_rate_against_a_loop(seed: int) -> None:
    batch = ragged(seed, groups=3, each=5)
    adv_N = win_rate(batch, reward_N=token_rewards(batch))[0]
    rewards, groups = batch.reward_R.tolist(), batch.group_R.tolist()
    for mine, group, got in zip(rewards, groups, of_rollouts(batch, adv_N), strict=True):
        others = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        wins = sum((mine > r) + 0.5 * (mine == r) for r in others)
        assert got == pytest.approx(wins / len(others) - 0.5, abs=1e-15)


# ---------------------------------------------------------------- SPPO's loss


def sppo(
    batch: Batch, logp_N: torch.Tensor, *, eta: float, sharpness: float, kl: float = 0.0, entropy: float = 0.0
) -> float:
    """verl's loss of one mini batch in one micro-batch: compute_advantage, compute_sppo_loss, and agg_loss of the two
    terms, whose mean is over tokens."""
    assert batch.logp_old_N is not None
    rewards = batch.reward_R.tolist()
    top = max(sharpness * r for r in rewards)
    soft = (top + math.log(sum(math.exp(sharpness * r - top) for r in rewards) / len(rewards))) / sharpness
    now, old = by_rollout(batch, logp_N.detach()), by_rollout(batch, batch.logp_old_N)
    loss = 0.0
    for r, lp, lo in zip(rewards, now, old, strict=True):
        loss += (sum(lp) - sum(lo) - eta * (r - soft)) ** 2 / len(rewards)
    tokens = sum(len(row) for row in now)
    if kl:
        assert batch.logp_ref_N is not None
        ref = by_rollout(batch, batch.logp_ref_N)
        squares = [(x - y) ** 2 / 2 for a, b in zip(now, ref, strict=True) for x, y in zip(a, b, strict=True)]
        loss += kl * sum(squares) / tokens
    if entropy:
        loss -= entropy * sum(0.1 * n for n in range(tokens)) / tokens
    return loss


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("each", [1, 3])
def test_sppo_is_verls(seed: int, each: int) -> None:
    batch = ragged(seed, groups=4, each=each)
    logp_N = logp_now(batch, seed=seed, scale=0.3)
    algorithm = made(name="self_play", advantage={"name": "softmean", "softmean_eta": 0.7}, loss={"eta": 2.0})
    assert total(algorithm, batch, logp_N).item() == pytest.approx(
        sppo(batch, logp_N, eta=2.0, sharpness=0.7), rel=1e-12
    )


def test_sppo_with_kl_and_entropy_takes_their_means_over_tokens() -> None:
    batch = ragged(5, groups=3, each=2)
    assert batch.logp_old_N is not None
    batch = replace(batch, logp_ref_N=batch.logp_old_N - 0.1)
    logp_N = logp_now(batch, scale=0.3)
    entropy_N = torch.zeros_like(logp_N).masked_scatter(
        batch.mask_N, 0.1 * torch.arange(batch.tokens, dtype=torch.float64)
    )
    algorithm = made(
        name="self_play", advantage="softmean", kl={"coef": 0.3, "estimator": "k2"}, entropy_coef=0.2
    )
    got = total(algorithm, batch, logp_N, entropy_N=entropy_N).item()
    assert got == pytest.approx(sppo(batch, logp_N, eta=1.0, sharpness=1.0, kl=0.3, entropy=0.2), rel=1e-12)


def test_no_cut_changes_the_gradient_with_its_terms() -> None:
    batch = ragged(7, groups=4, each=2)
    assert batch.logp_old_N is not None
    batch = replace(batch, logp_ref_N=batch.logp_old_N - 0.1)
    logp_N = logp_now(batch, scale=0.3)
    algorithm = made(name="self_play", kl={"coef": 0.3, "estimator": "k2"})
    (whole,) = torch.autograd.grad(total(algorithm, batch, logp_N), logp_N)
    batch = algorithm.advantage(batch, 0.0)
    batch = replace(batch, weight_N=algorithm.weights(batch, 1))
    loss, parts, at = algorithm.loss_of(batch, lambda b, want: logp_now(b), 0.0), [], 0
    for part in micro_batches(batch, max_tokens=None, max_rollouts=1, shared=False, whole_groups=False):
        assert part.weight_N is not None
        own = logp_N[at : at + part.tokens]
        parts.append((loss(part, Outputs(logp_N=own)).loss_N * part.weight_N).sum())
        at += part.tokens
    (cut,) = torch.autograd.grad(sum(parts), logp_N)
    torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-14)


def test_the_loss_by_hand() -> None:
    # Log-ratios 0.5 + 0.25 and -1; advantages 1 and -0.5; eta 0.5: (0.75 - 0.5)^2 and (-1 + 0.25)^2.
    batch = make_batch([["paa", "pa"]], [1.0, 0.0])
    batch = replace(batch, logp_old_N=doubles([0, -2, -2, 0, -2]), adv_N=doubles([0, 1, 1, 0, -0.5]))
    logp_N = doubles([0, -1.5, -1.75, 0, -3]).requires_grad_()
    found = self_play(batch, Outputs(logp_N=logp_N), eta=0.5)
    assert found.loss_N.tolist() == [0, 0, 0.0625, 0, 0.5625]
    (gradient,) = torch.autograd.grad(found.loss_N.sum(), logp_N)
    assert gradient.tolist() == [0, 0.5, 0.5, 0, -1.5]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"loss_agg_mode": "token-mean"}, "one number per pair or per reply"),
        ({"correction": {"weight": "token"}}, "without weights of tokens"),
        ({"kl": {"coef": 0.1, "estimator": "full"}}, "full is a sum at every token"),
        ({"top_entropy_quantile": 0.5}, "joins the advantages of several tokens"),
        ({"entropy_coef": 0.1, "entropy_agg_mode": "token-mean"}, "always a mean over tokens"),
    ],
)
def test_what_has_no_meaning_beside_it_is_refused(tmp_path: Path, keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        learn(tmp_path, {"name": "self_play", **keys})


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "self_play", "loss": {"eta": 4.0}},
        {"name": "self_play", "advantage": "softmean", "loss": {"eta": 4.0}, "entropy_coef": 0.001},
    ],
)
def test_it_learns(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    train = {"steps": 20, "tasks_per_step": 8, "minibatches": 2, "optimizer": {"lr": 1e-2}}
    rewards = [m["reward/mean"] for m in learn(tmp_path, algorithm, train=train)]
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-3:]) / 3 > 0.5


# ---------------------------------------------------------------- SPIN's pairs


def spin(batch: Batch, logp_N: torch.Tensor, *, beta: float, kind: str, smoothing: float) -> float:
    """verl's compute_onlinedpo_pref and compute_online_dpo_loss: rollouts 2k and 2k + 1 of the batch are a pair, of
    which the first is chosen if its score is not lower."""
    assert batch.logp_ref_N is not None
    now, ref = by_rollout(batch, logp_N.detach()), by_rollout(batch, batch.logp_ref_N)
    rewards = batch.reward_R.tolist()
    losses = []
    for k in range(0, batch.rollouts, 2):
        win, lose = (k, k + 1) if rewards[k] >= rewards[k + 1] else (k + 1, k)
        logits = (sum(now[win]) - sum(now[lose])) - (sum(ref[win]) - sum(ref[lose]))
        if kind == "ipo":
            losses.append((logits - 1 / (2 * beta)) ** 2)
        else:
            up, down = (math.log1p(math.exp(-s * beta * logits)) for s in (1, -1))
            losses.append((1 - smoothing) * up + smoothing * down)
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)])
@pytest.mark.parametrize("each", [2, 4])
def test_spin_is_verls(each: int, kind: str, smoothing: float) -> None:
    batch = ragged(3, groups=4, each=each)
    assert (batch.reward_R[0::2] == batch.reward_R[1::2]).any(), "ties are in it"
    batch = replace(batch, logp_ref_N=logp_now(batch, seed=9, scale=0.4).detach())
    logp_N = logp_now(batch, scale=0.3)
    loss: dict[str, Any] = {"pairs_of": "neighbours", "beta": 0.3, "pair_loss": [kind]}
    loss |= {"ipo_mean": False} if kind == "ipo" else {"label_smoothing": smoothing}
    algorithm = made(name="online_dpo", dynamic_sampling=False, loss=loss)
    got = total(algorithm, batch, logp_N).item()
    assert got == pytest.approx(spin(batch, logp_N, beta=0.3, kind=kind, smoothing=smoothing), rel=1e-12)


NEIGHBOURS = {"name": "online_dpo", "dynamic_sampling": False, "loss": {"pairs_of": "neighbours"}}


@pytest.mark.parametrize(
    "group_size", [pytest.param(1, marks=pytest.mark.sweep), 2, pytest.param(4, marks=pytest.mark.sweep)]
)
def test_neighbours_learn(tmp_path: Path, group_size: int) -> None:
    """With one reply to a task a pair has the replies to two tasks, and no micro-batch or minibatch parts them."""
    lines = learn(
        tmp_path,
        NEIGHBOURS,
        rollout={"group_size": group_size, "sampling": {"max_tokens": 5, "ignore_eos": True}},
        train={
            "steps": 12,
            "tasks_per_step": 24 // group_size,
            "minibatches": 2,
            "micro_batch_rollouts": 1,
            "share_prompts": group_size > 1,
            "optimizer": {"lr": 5e-3},
        },
        reference={"reset_interval": 1},
    )
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])
    assert [line["train/kl_reference_nats"] for line in lines] == [0.0] * 12, (
        "it begins each step as the policy"
    )


def test_one_task_a_pair_needs_an_even_number(tmp_path: Path) -> None:
    rollout = {"group_size": 1, "sampling": {"max_tokens": 5}}
    train = {"steps": 1, "tasks_per_step": 6, "minibatches": 2, "share_prompts": False}
    with pytest.raises(ConfigError, match="multiple of 4"):
        learn(tmp_path, NEIGHBOURS, rollout=rollout, train=train)


def test_a_reference_is_renewed_from_a_first_step_on(tmp_path: Path) -> None:
    """After the steps 1, 3, 5 it is the policy, so in steps 2, 4, 6 it begins as that."""
    algorithm = {"name": "grpo", "kl": {"coef": 0.01}}
    train = {"steps": 6, "tasks_per_step": 4, "optimizer": {"lr": 1e-2}}

    def gaps(name: str, every: int | str) -> list[bool]:
        lines = learn(tmp_path / name, algorithm, train=train, reference={"reset_interval": every})
        return [line["train/kl_reference_nats"] == 0 for line in lines]

    assert gaps("plain", 2) == [True, False, True, False, True, False]
    assert gaps("from", "2 steps from 1") == [True, True, False, True, False, True]


def test_a_stopped_run_goes_on_with_its_reference_and_its_pairs(tmp_path: Path) -> None:
    def run(name: str, steps: int) -> Path:
        learn(
            tmp_path / name,
            NEIGHBOURS,
            rollout={"group_size": 2, "sampling": {"max_tokens": 5}},
            train={"steps": steps, "tasks_per_step": 4, "optimizer": {"lr": 1e-2}},
            reference={"reset_interval": "3 steps from 2"},
            checkpoint={"interval": 1, "export": False},
        )
        return tmp_path / name / "run" / "metrics.jsonl"

    whole = run("whole", 6)
    for steps in (3, 6):
        parted = run("parted", steps)
    assert whole.read_bytes() == parted.read_bytes()
