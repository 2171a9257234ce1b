"""Losses: numbers worked by hand, naive loops, and laws about gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from batches import by_rollout, doubles, logp_now, make_batch, micro_batches, pair_batch, ragged
from whet.algos.aggregate import AGGREGATIONS, weights
from whet.algos.critic import value_loss
from whet.algos.losses import dpo, ppo, regularized, reinforce, sft
from whet.batch import Batch, LossFn, Outputs, select
from whet.types import DataError, WhetError

SEEDS = range(6)
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}


def with_adv(batch: Batch, *, seed: int = 5) -> Batch:
    noise = torch.tensor(np.random.default_rng(seed).normal(size=batch.tokens))
    return replace(batch, adv_N=noise * batch.mask_N)


def one_token(adv: float, ratio: float) -> tuple[Batch, Tensor]:
    """One sampled token with that advantage, and the log-prob now that makes that ratio."""
    batch = make_batch([["pa"]])
    assert batch.logp_old_N is not None
    batch = replace(batch, adv_N=doubles([0, adv]))
    logp = batch.logp_old_N + doubles([0, math.log(ratio)])
    return batch, logp.requires_grad_()


def share(logp: Tensor, loss: LossFn, part: Batch, at: slice) -> Tensor:
    """Gradient of sum(loss * weight) over a micro-batch, whose tokens stand `at`, by the log-probs of all."""
    assert part.weight_N is not None
    out = Outputs(logp_N=logp[at], entropy_N=logp[at].exp())
    return torch.autograd.grad((loss(part, out).loss_N * part.weight_N).sum(), logp)[0]


def gradient(loss: LossFn, batch: Batch, logp: Tensor) -> Tensor:
    return share(logp, loss, batch, slice(0, batch.tokens))


# ---------------------------------------------------------------- ppo


@pytest.mark.parametrize(
    ("adv", "ratio", "expected", "clipped", "gradient_is_zero"),
    [
        (2.0, 1.1, -2.2, 0, False),  # inside: -2 * 1.1
        (2.0, 1.5, -2.56, 1, True),  # above 1.28: -2 * 1.28
        (2.0, 0.5, -1.0, 0, False),  # below, A > 0: the pessimistic branch is the unclipped one, -2 * 0.5
        (-2.0, 0.5, 1.6, 1, True),  # below 0.8, A < 0: 2 * 0.8
        (-2.0, 1.5, 3.0, 0, False),  # above, A < 0: 2 * 1.5, unbounded without dual clip
        (-2.0, 9.0, 18.0, 0, False),
        (0.0, 9.0, 0.0, 0, True),
    ],
)
def test_ppo_by_hand(adv: float, ratio: float, expected: float, clipped: int, gradient_is_zero: bool) -> None:
    batch, logp = one_token(adv, ratio)
    loss = ppo(batch, Outputs(logp_N=logp), **CLIP)
    assert loss.loss_N.tolist() == pytest.approx([0, expected], rel=1e-12)
    assert loss.stats["clip_frac"].tolist() == [0, clipped]
    (grad,) = torch.autograd.grad(loss.loss_N.sum(), logp)
    # d/dlogp of -A r is -A r
    assert grad.tolist() == pytest.approx([0, 0 if gradient_is_zero else -adv * ratio], rel=1e-12)


def test_dual_clip_by_hand() -> None:
    # A = -2, c = 3: the loss is at most 6. Ratio 1.5: 3. Ratio 9: 18 -> 6, no gradient. A > 0 is untouched.
    for adv, ratio, expected, lower in [(-2.0, 1.5, 3.0, 0), (-2.0, 9.0, 6.0, 1), (2.0, 9.0, -2.56, 0)]:
        batch, logp = one_token(adv, ratio)
        loss = ppo(batch, Outputs(logp_N=logp), clip_low=0.2, clip_high=0.28, dual_clip=3.0)
        assert loss.loss_N[1].item() == pytest.approx(expected, rel=1e-12)
        assert loss.stats["clip_frac_lower"].tolist() == [0, lower]
        (grad,) = torch.autograd.grad(loss.loss_N.sum(), logp)
        assert grad[1].item() == pytest.approx(3.0 if ratio == 1.5 else 0.0, rel=1e-12)


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_against_a_loop(seed: int, dual_clip: float | None) -> None:
    batch = with_adv(ragged(seed))
    logp = logp_now(batch, scale=1.0)
    loss = ppo(batch, Outputs(logp_N=logp), clip_low=0.2, clip_high=0.3, dual_clip=dual_clip)
    assert batch.adv_N is not None
    assert batch.logp_old_N is not None
    for i in range(batch.tokens):
        if not batch.mask_N[i]:
            assert loss.loss_N[i] == 0
            continue
        a, r = float(batch.adv_N[i]), math.exp(float(logp.detach()[i]) - float(batch.logp_old_N[i]))
        expected = max(-a * r, -a * min(max(r, 0.8), 1.3))
        if dual_clip is not None and a < 0:
            expected = min(expected, -dual_clip * a)
        assert loss.loss_N[i].item() == pytest.approx(expected, rel=1e-12)


def test_ppo_uses_the_engines_logprobs_when_none_were_recomputed() -> None:
    batch = with_adv(ragged(2))
    logp = logp_now(batch)
    sampled = ppo(replace(batch, logp_old_N=None), Outputs(logp_N=logp), **CLIP).loss_N
    recomputed = ppo(replace(batch, logp_old_N=batch.logp_sample_N), Outputs(logp_N=logp), **CLIP).loss_N
    assert torch.equal(sampled, recomputed)
    assert not torch.equal(sampled, ppo(batch, Outputs(logp_N=logp), **CLIP).loss_N)


def test_a_huge_log_ratio_stays_finite() -> None:
    batch, _ = one_token(-1.0, 1.0)
    logp = torch.tensor([0, 500.0], requires_grad=True)
    loss = ppo(batch, Outputs(logp_N=logp), **CLIP)
    assert loss.loss_N[1].item() == pytest.approx(math.exp(20))
    assert torch.isfinite(torch.autograd.grad(loss.loss_N.sum(), logp)[0]).all()


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_at_ratio_1_ppo_has_the_gradient_of_reinforce(seed: int, dual_clip: float | None) -> None:
    batch = with_adv(ragged(seed))
    batch = replace(batch, weight_N=weights(batch, "token-mean", norm_tokens=8))
    logp = logp_now(batch, scale=0.0)
    clipped = gradient(lambda b, o: ppo(b, o, clip_low=0.2, clip_high=0.2, dual_clip=dual_clip), batch, logp)
    torch.testing.assert_close(clipped, gradient(reinforce, batch, logp), rtol=1e-13, atol=0)
    assert clipped.abs().sum() > 0


def test_drift_by_hand() -> None:
    # Log-ratios 0.1 and -0.2: k1 = -d; k3 = e^d - 1 - d; the largest ratio of the rollout is e^0.1.
    batch = replace(make_batch([["paa", "p"]]), adv_N=torch.zeros(4).double())
    assert batch.logp_old_N is not None
    logp = batch.logp_old_N + doubles([0, 0.1, -0.2, 0])
    for stats in (
        ppo(batch, Outputs(logp_N=logp), **CLIP).stats,
        reinforce(batch, Outputs(logp_N=logp)).stats,
    ):
        assert stats["ratio"][1:3].tolist() == pytest.approx([math.exp(0.1), math.exp(-0.2)])
        assert float(stats["ratio_max"].max()) == pytest.approx(math.exp(0.1))
        assert stats["approx_kl_k1_nats"][1:3].tolist() == pytest.approx([-0.1, 0.2])
        k3 = [math.exp(0.1) - 1.1, math.exp(-0.2) - 0.8]
        assert stats["approx_kl_k3_nats"][1:3].tolist() == pytest.approx(k3)


def test_stats_carry_no_gradient_and_the_documented_shapes() -> None:
    batch = with_adv(ragged(0))
    logp = logp_now(batch)
    entropy, value = logp.detach().square().requires_grad_(), logp.detach().clone().requires_grad_()
    batch = replace(batch, return_N=torch.ones(batch.tokens).double())
    loss = regularized(lambda b, o: ppo(b, o, **CLIP), kl_coef=0.1, estimator="k3", entropy_coef=0.1)
    stats = loss(batch, Outputs(logp_N=logp, entropy_N=entropy)).stats
    stats |= (
        value_loss(batch, Outputs(value_N=value), clip=0.5).stats | sft(batch, Outputs(logp_N=logp)).stats
    )
    assert {"clip_frac", "kl_loss_nats", "entropy_nats", "value_clip_frac", "nll_nats"} < stats.keys()
    for name, x in stats.items():
        assert not x.requires_grad, name
        assert len(x) == batch.tokens, name
        assert x.is_floating_point(), name


# ---------------------------------------------------------------- reinforce, sft


def test_reinforce_and_sft_by_hand() -> None:
    batch = replace(make_batch([["paoa"]]), adv_N=doubles([0, 2.0, 0, -3.0]))
    logp = doubles([0, -0.5, 0, -1.5])
    assert reinforce(batch, Outputs(logp_N=logp)).loss_N.tolist() == [0, 1.0, 0, -4.5]
    loss = sft(batch, Outputs(logp_N=logp))
    assert loss.loss_N.tolist() == [0, 0.5, 0, 1.5]
    assert loss.stats["nll_nats"].tolist() == [0, 0.5, 0, 1.5]


def test_a_missing_field_is_named() -> None:
    batch = make_batch([["pa"]])
    with pytest.raises(WhetError, match="adv_N"):
        reinforce(batch, Outputs(logp_N=batch.logp_sample_N))
    with pytest.raises(WhetError, match="logp_N"):
        sft(batch, Outputs())


# ---------------------------------------------------------------- kl and entropy


@pytest.mark.parametrize("seed", SEEDS)
def test_kl_and_entropy_are_added_per_token(seed: int) -> None:
    batch = with_adv(ragged(seed))
    logp = logp_now(batch)
    assert batch.logp_ref_N is not None
    entropy = torch.rand(batch.tokens).double()
    whole = regularized(reinforce, kl_coef=0.3, estimator="k2", entropy_coef=0.7)
    got = whole(batch, Outputs(logp_N=logp, entropy_N=entropy)).loss_N
    base = reinforce(batch, Outputs(logp_N=logp)).loss_N
    for i in range(batch.tokens):
        d = float(logp.detach()[i]) - float(batch.logp_ref_N[i])
        extra = 0.3 * d * d / 2 - 0.7 * float(entropy[i]) if batch.mask_N[i] else 0.0
        assert got[i].item() == pytest.approx(base[i].item() + extra, rel=1e-12, abs=1e-15)


def test_entropy_is_measured_but_not_added_without_a_weight() -> None:
    batch = with_adv(ragged(0))
    out = Outputs(logp_N=logp_now(batch), entropy_N=torch.ones(batch.tokens).double())
    loss = regularized(reinforce, kl_coef=0.0, estimator="k3", entropy_coef=0.0)(batch, out)
    assert torch.equal(loss.loss_N, reinforce(batch, out).loss_N)
    assert "entropy_nats" in loss.stats
    assert "kl_loss_nats" not in loss.stats


def test_an_entropy_bonus_needs_the_entropy() -> None:
    batch = with_adv(ragged(0))
    with pytest.raises(WhetError, match="entropy_N"):
        regularized(reinforce, kl_coef=0.0, estimator="k3", entropy_coef=0.1)(
            batch, Outputs(logp_N=logp_now(batch))
        )


# ---------------------------------------------------------------- dpo


def test_dpo_by_hand() -> None:
    # Rollout 0 (rejected): log-ratio 1. Rollout 1 (chosen): 2 + 1 = 3. beta 0.5: z = 0.5 * (3 - 1) = 1.
    # loss = log(1 + e^-1) at the chosen one's last sampled token (index 5).
    batch = make_batch([["pa", "paoa"]], [0.0, 1.0])
    batch = replace(batch, logp_ref_N=doubles([0, -2.0, 0, -3, 0, -4]))
    logp = doubles([0, -1.0, 0, -1, 0, -3]).requires_grad_()
    loss = dpo(batch, Outputs(logp_N=logp), beta=0.5, label_smoothing=0.0)
    assert loss.loss_N.tolist() == pytest.approx([0, 0, 0, 0, 0, math.log1p(math.exp(-1))])
    (grad,) = torch.autograd.grad(loss.loss_N.sum(), logp)
    pull = 0.5 / (1 + math.exp(1))  # beta * sigmoid(-z): chosen tokens up (negative gradient), rejected down
    assert grad.tolist() == pytest.approx([0, pull, 0, -pull, 0, -pull])
    assert loss.stats["accuracy"].tolist() == [1, 1]
    assert loss.stats["margin"].tolist() == pytest.approx([1, 1])
    assert loss.stats["chosen_reward"].tolist() == pytest.approx([1.5, 1.5])
    assert loss.stats["rejected_reward"].tolist() == pytest.approx([0.5, 0.5])


def test_dpo_label_smoothing_by_hand() -> None:
    # As above with e = 0.1: 0.9 * log(1 + e^-1) + 0.1 * log(1 + e)
    batch = make_batch([["pa", "paoa"]], [0.0, 1.0])
    batch = replace(batch, logp_ref_N=doubles([0, -2.0, 0, -3, 0, -4]))
    logp = doubles([0, -1.0, 0, -1, 0, -3])
    loss = dpo(batch, Outputs(logp_N=logp), beta=0.5, label_smoothing=0.1)
    expected = 0.9 * math.log1p(math.exp(-1)) + 0.1 * math.log1p(math.e)
    assert loss.loss_N.sum().item() == pytest.approx(expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_dpo_against_a_loop_and_the_sign_of_its_gradient(seed: int) -> None:
    batch = pair_batch(5, seed=seed)
    batch = replace(batch, weight_N=weights(batch, "pair-mean", norm_tokens=8))
    logp = logp_now(batch, seed=seed, scale=2.0)
    assert batch.logp_ref_N is not None
    ratio = [sum(x) for x in by_rollout(batch, (logp - batch.logp_ref_N).detach())]
    reward = batch.reward_R.tolist()
    total = 0.0
    for first in range(0, batch.rollouts, 2):
        win, lose = (first, first + 1) if reward[first] > reward[first + 1] else (first + 1, first)
        z = 0.3 * (ratio[win] - ratio[lose])
        total += 0.8 * math.log1p(math.exp(-z)) + 0.2 * math.log1p(math.exp(z))
    loss = dpo(batch, Outputs(logp_N=logp), beta=0.3, label_smoothing=0.2)
    assert batch.weight_N is not None
    assert (loss.loss_N * batch.weight_N).sum().item() == pytest.approx(total / 5, rel=1e-12)
    grad = gradient(lambda b, o: dpo(b, o, beta=0.3, label_smoothing=0.0), batch, logp)
    wins = batch.reward_R[batch.rollout_N] > 0
    assert (grad[batch.mask_N & wins] < 0).all()
    assert (grad[batch.mask_N & ~wins] > 0).all()


@pytest.mark.parametrize(
    ("pictures", "rewards", "why"),
    [
        ([["pa", "pa", "pa"]], [1, 0, 0], "groups of two"),
        ([["pa"], ["pa"]], [1, 0], "groups of two"),
        ([["pa", "pa", "pa"], ["pa"]], [1, 0, 1, 0], "groups of two"),
        ([["pa", "p"]], [1, 0], "empty"),
    ],
)
def test_dpo_refuses_what_is_no_pair(pictures: list[list[str]], rewards: list[float], why: str) -> None:
    batch = make_batch(pictures, rewards)
    with pytest.raises(DataError, match=why):
        dpo(batch, Outputs(logp_N=batch.logp_sample_N), beta=0.1, label_smoothing=0.0)


# ---------------------------------------------------------------- value


@pytest.mark.parametrize(
    ("value", "clip", "expected", "clipped"),
    [
        (1.0, None, 2.0, None),  # R = 3: (1 - 3)^2 / 2
        (1.0, 0.5, 3.125, 1),  # V = 0: clipped to 0.5, (0.5 - 3)^2 / 2
        (0.2, 0.5, 3.92, 0),  # not clipped: (0.2 - 3)^2 / 2
        (-2.0, 0.5, 12.5, 0),  # clipped to -0.5 would be smaller; the larger error counts: (-2 - 3)^2 / 2
    ],
)
def test_value_loss_by_hand(value: float, clip: float | None, expected: float, clipped: int | None) -> None:
    batch = replace(make_batch([["pa"]]), value_N=torch.zeros(2).double(), return_N=doubles([7, 3.0]))
    loss = value_loss(batch, Outputs(value_N=doubles([9.0, value])), clip=clip)
    assert loss.loss_N.tolist() == pytest.approx([0, expected])
    if clipped is None:
        assert "value_clip_frac" not in loss.stats
    else:
        assert loss.stats["value_clip_frac"][1].item() == clipped


# ---------------------------------------------------------------- the same gradient however the work is cut


ONLINE = [mode for mode in AGGREGATIONS if mode != "pair-mean"]


@pytest.mark.parametrize("mode", ONLINE)
@pytest.mark.parametrize("seed", range(3))
def test_micro_batches_do_not_change_the_gradient(seed: int, mode: str) -> None:
    batch = with_adv(ragged(seed, groups=6))
    batch = replace(batch, weight_N=weights(batch, mode, norm_tokens=16))
    logp = logp_now(batch, scale=0.5)
    policy: LossFn = lambda b, o: ppo(b, o, clip_low=0.2, clip_high=0.28, dual_clip=2.0)  # noqa: E731
    loss = regularized(policy, kl_coef=0.1, estimator="k3", entropy_coef=0.01)

    def cut(sizes: dict[str, int | None]) -> Tensor:
        total, seen = torch.zeros_like(logp), 0
        for part in micro_batches(batch, **sizes, shared=False, whole_groups=False):
            at = slice(seen, seen + part.tokens)
            total += share(logp, loss, part, at)
            seen += part.tokens
        assert seen == batch.tokens
        return total

    whole = cut({"max_tokens": None, "max_rollouts": None})
    assert whole.abs().sum() > 0
    for sizes in ({"max_tokens": 12, "max_rollouts": None}, {"max_tokens": None, "max_rollouts": 1}):
        torch.testing.assert_close(cut(sizes), whole, rtol=0, atol=1e-12)


def test_micro_batches_of_whole_pairs_do_not_change_dpo() -> None:
    batch = pair_batch(6)
    batch = replace(batch, weight_N=weights(batch, "pair-mean", norm_tokens=8))
    logp = logp_now(batch)
    loss: LossFn = lambda b, o: dpo(b, o, beta=0.2, label_smoothing=0.1)  # noqa: E731
    whole = gradient(loss, batch, logp)
    total, seen = torch.zeros_like(logp), 0
    for part in micro_batches(batch, max_tokens=None, max_rollouts=2, shared=False, whole_groups=True):
        total += share(logp, loss, part, slice(seen, seen + part.tokens))
        seen += part.tokens
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-12)
    assert whole.abs().sum() > 0


@pytest.mark.parametrize("mode", ONLINE)
def test_order_of_rollouts_does_not_change_the_loss(mode: str) -> None:
    pictures, rewards = [["paa", "paoa"], ["pa"], ["ppaa", "p", "poa"]], [[1.0, 2], [3.0], [0.5, -1, 4]]

    def total(order: list[int]) -> float:
        batch = make_batch([pictures[g] for g in order], [x for g in order for x in rewards[g]])
        score = batch.reward_R[batch.rollout_N] * (batch.position_N + 1) * batch.mask_N
        batch = replace(batch, adv_N=score, logp_old_N=torch.zeros_like(score))
        loss = ppo(batch, Outputs(logp_N=0.1 * score), **CLIP).loss_N
        return float((loss * weights(batch, mode, norm_tokens=5)).sum())

    assert total([2, 0, 1]) == pytest.approx(total([0, 1, 2]), rel=1e-13)


def test_a_loss_of_a_part_is_the_part_of_the_loss() -> None:
    batch = with_adv(ragged(4))
    logp = logp_now(batch)
    whole = ppo(batch, Outputs(logp_N=logp), **CLIP).loss_N
    rows = torch.tensor([0, 2])
    keep = torch.isin(batch.rollout_N, rows)
    assert torch.equal(ppo(select(batch, rows), Outputs(logp_N=logp[keep]), **CLIP).loss_N, whole[keep])
