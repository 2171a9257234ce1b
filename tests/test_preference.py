"""Losses on compared and judged replies: numbers worked by hand, loops that are easy to believe, laws, and learning."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import whet
from batches import Tokens, by_rollout, doubles, logp_now, make_batch, micro_batches, pair_batch
from sections import algorithm as algorithm_section
from swept import except_for
from whet.algos.aggregate import weights
from whet.algos.losses import regularized
from whet.algos.preference import PAIR_LOSSES as OF_DPO
from whet.algos.preference import cpo, dpo, kl_zero, kto, mismatched, orpo, simpo
from whet.algos.terms import Totals
from whet.batch import Batch, LossFn, Outputs, select
from whet.config.algorithms_listing import choices
from whet.config.functions import LOSSES
from whet.config.load import load
from whet.config.plan import plans
from whet.config.recipes import resolve
from whet.config.schema import AlgorithmConfig
from whet.training.balance import deal
from whet.training.micro_batches import MicroBatchLimits
from whet.types import ConfigError, DataError

SEEDS = st.integers(0, 10_000)

PAIR_LOSSES: dict[str, LossFn] = {
    "dpo": partial(dpo, beta=0.3, label_smoothing=0.1),
    "robust": partial(dpo, beta=0.3, label_smoothing=0.1, pair_loss="robust"),
    "hinge": partial(dpo, beta=0.3, label_smoothing=0.0, pair_loss="hinge"),
    "ipo": partial(dpo, beta=0.3, label_smoothing=0.0, pair_loss="ipo", ipo_mean=False),
    "ipo_mean": partial(dpo, beta=0.3, label_smoothing=0.0, pair_loss="ipo"),
    **{
        name: partial(dpo, beta=0.3, label_smoothing=0.1, pair_loss=name)
        for name in ("sigmoid_norm", "exo", "nca", "bco", "self_play", "apo_zero", "apo_down", "sft")
    },
    "several": partial(
        dpo,
        beta=0.3,
        label_smoothing=0.1,
        pair_loss=["sigmoid", "bco", "sft"],
        pair_weights=[0.8, 0.2, 1.0],
    ),
    "cpo": partial(cpo, beta=0.3, label_smoothing=0.1, nll_weight=0.5),
    "simpo": partial(simpo, beta=2.0, target_margin=0.7),
    "alphapo": partial(simpo, beta=2.0, target_margin=0.7, reward_alpha=0.25),
    "orpo": partial(orpo, odds_weight=0.2),
}
KTO = partial(kto, beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def one_pair(chosen: list[float], rejected: list[float]) -> tuple[Batch, Tensor]:
    """A pair whose replies have these log-probs now; the reference's are 0."""
    batch = make_batch([["p" + "a" * len(chosen), "p" + "a" * len(rejected)]], [1, 0])
    batch = replace(batch, logp_ref_N=torch.zeros(batch.tokens).double())
    return batch, doubles([0, *chosen, 0, *rejected]).requires_grad_()


def label_batch(replies: int, *, seed: int) -> Batch:
    """Single replies, every third one desirable, with a reference point of 0.2."""
    batch = make_batch([["pp" + "a" * (1 + (seed + i) % 5)] for i in range(replies)], seed=seed)
    batch = replace(batch, reward_R=doubles([float((seed + i) % 3 == 0) for i in range(replies)]))
    return replace(batch, kl_zero_R=doubles([0.2] * replies))


def mean_loss(batch: Batch, logp: Tensor, loss: LossFn) -> Tensor:
    """The loss of a minibatch, as a training step reduces it."""
    pairs = len(batch.group_R) == 2 * len(torch.unique(batch.group_R))
    weight = weights(batch, "pair-mean" if pairs else "seq-mean-token-sum", norm_tokens=8)
    return (loss(batch, Outputs(logp_N=logp)).loss_N * weight).sum()


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("pair_loss", "smoothing", "expected"),
    [
        ("sigmoid", 0.0, -log_sigmoid(0.4)),  # z = -1 - (-3) = 2, beta z = 0.4
        ("sigmoid", 0.1, -0.9 * log_sigmoid(0.4) - 0.1 * log_sigmoid(-0.4)),
        ("robust", 0.0, -log_sigmoid(0.4)),
        ("robust", 0.1, (-0.9 * log_sigmoid(0.4) + 0.1 * log_sigmoid(-0.4)) / 0.8),
        ("hinge", 0.0, 0.6),  # 1 - 0.4
        ("ipo", 0.0, 0.0),  # means -0.5 and -3: (2.5 - 1 / 0.4)^2
        ("sigmoid_norm", 0.0, -log_sigmoid(0.5)),  # 0.2 * 2.5
        (
            "exo",
            0.1,
            sigmoid(0.4) * math.log(sigmoid(0.4) / 0.9) + sigmoid(-0.4) * math.log(sigmoid(-0.4) / 0.1),
        ),
        # beta u = -0.2, beta v = -0.6
        ("nca", 0.0, -log_sigmoid(-0.2) - (log_sigmoid(0.2) + log_sigmoid(0.6)) / 2),
        ("bco", 0.0, -log_sigmoid(-0.2) - log_sigmoid(0.6)),
        ("self_play", 0.0, 12.5),  # (-1 - 2.5)^2 + (-3 + 2.5)^2
        ("apo_zero", 0.0, 1 - sigmoid(-0.2) + sigmoid(-0.6)),
        ("apo_down", 0.0, sigmoid(-0.2) + 1 - sigmoid(0.4)),
        ("sft", 0.0, 0.5),
    ],
)
def test_dpo_and_its_kin_by_hand(pair_loss: str, smoothing: float, expected: float) -> None:
    batch, logp = one_pair([-0.25, -0.75], [-3.0])
    loss = dpo(batch, Outputs(logp_N=logp), beta=0.2, label_smoothing=smoothing, pair_loss=pair_loss)
    assert loss.loss_N.tolist() == pytest.approx([0, 0, expected, 0, 0], rel=1e-12)
    assert loss.stats["margin"].tolist() == pytest.approx([0.4, 0.4])
    assert loss.stats["chosen_reward"].tolist() == pytest.approx([-0.2, -0.2])
    assert loss.stats["rejected_reward"].tolist() == pytest.approx([-0.6, -0.6])
    assert loss.stats["accuracy"].tolist() == [1, 1]


def test_a_kl_beside_pairs_is_the_mean_over_the_tokens_of_both_replies() -> None:
    # d = -0.25, -0.75 and -3: k2 = (0.0625 + 0.5625 + 9) / 2 over 3 tokens.
    batch, logp = one_pair([-0.25, -0.75], [-3.0])
    batch = replace(batch, weight_N=weights(batch, "pair-mean", norm_tokens=8))
    policy = partial(dpo, beta=0.2, label_smoothing=0.0)
    whole = regularized(policy, kl_coef=0.1, estimator="k2", entropy_coef=0.0, one_per="pair")
    loss = whole(batch, Outputs(logp_N=logp))
    total = (loss.loss_N * batch.weight_N).sum()
    assert total.item() == pytest.approx(-log_sigmoid(0.4) + 0.1 * 9.625 / 2 / 3, rel=1e-6)
    assert loss.stats["kl_loss_nats"].tolist() == pytest.approx([0, 0.03125, 0.28125, 0, 4.5])


@given(seed=SEEDS)
@settings(max_examples=20)
def test_a_kl_beside_pairs_does_not_depend_on_the_cut_into_micro_batches(seed: int) -> None:
    batch = pair_batch(5, seed=seed)
    batch = replace(batch, weight_N=weights(batch, "pair-mean", norm_tokens=8))
    logp = logp_now(batch)
    kl = {"kl_coef": 0.3, "estimator": "k3", "entropy_coef": 0.0, "one_per": "pair"}
    policy = PAIR_LOSSES["dpo"]
    whole = regularized(policy, **kl)(batch, Outputs(logp_N=logp)).loss_N
    part_of = regularized(policy, **kl, totals=Totals.of(batch))
    parts = torch.zeros(())
    for pair in range(5):
        rows = torch.tensor([2 * pair, 2 * pair + 1])
        part, at_N = select(batch, rows), (batch.rollout_N // 2) == pair
        parts = parts + (part_of(part, Outputs(logp_N=logp[at_N])).loss_N * part.weight_N).sum()
    d = logp - batch.logp_ref_N
    k3 = (torch.exp(-d) - 1 + d)[batch.mask_N].mean()
    plain = (policy(batch, Outputs(logp_N=logp)).loss_N * batch.weight_N).sum()
    assert (whole * batch.weight_N).sum().item() == pytest.approx((plain + 0.3 * k3).item(), rel=1e-6)
    assert parts.item() == pytest.approx((whole * batch.weight_N).sum().item(), rel=1e-6)


def test_a_pair_that_only_keeps_step_with_other_ranks_has_no_gradient_of_the_kl() -> None:
    batch = pair_batch(3, seed=0)
    batch = replace(batch, weight_N=weights(batch, "pair-mean", norm_tokens=8))
    ranks = deal(batch, 2, MicroBatchLimits(max_rollouts=2, whole_groups=True))
    assert [(len(rank.micros), rank.real) for rank in ranks] == [(2, 2), (2, 1)]
    idle = ranks[1].micros[1]
    logp = logp_now(idle).requires_grad_()
    kl = {"kl_coef": 0.3, "estimator": "k3", "entropy_coef": 0.0, "one_per": "pair"}
    loss = regularized(PAIR_LOSSES["dpo"], **kl, totals=Totals.of(batch))(idle, Outputs(logp_N=logp))
    total = (loss.loss_N * idle.weight_N).sum()
    total.backward()
    assert total.item() == 0
    assert logp.grad is not None
    assert logp.grad.tolist() == [0.0] * idle.tokens


def test_ipo_by_sums_by_hand() -> None:
    batch, logp = one_pair([-0.25, -0.75], [-3.0])
    loss = dpo(batch, Outputs(logp_N=logp), beta=0.2, label_smoothing=0.0, pair_loss="ipo", ipo_mean=False)
    assert loss.loss_N[2].item() == pytest.approx(0.25, rel=1e-12)  # (2 - 1 / 0.4)^2


def test_losses_of_pairs_are_summed_with_their_weights_by_hand() -> None:
    """MPO's weights. z = 2, u = -1, v = -3, beta 0.2; mean log-prob of the chosen reply -0.5."""
    batch, logp = one_pair([-0.25, -0.75], [-3.0])
    given = resolve(AlgorithmConfig(name="mpo")).settings["loss"].settings
    loss = dpo(batch, Outputs(logp_N=logp), **{**given, "beta": 0.2})
    bco = -log_sigmoid(-0.2) - log_sigmoid(0.6)
    assert loss.loss_N[2].item() == pytest.approx(-0.8 * log_sigmoid(0.4) + 0.2 * bco + 0.5, rel=1e-12)
    assert loss.stats["margin"][0].item() == pytest.approx(0.4)


def test_every_loss_of_pairs_has_a_value_by_hand_and_a_setting() -> None:
    (mark,) = (m for m in test_dpo_and_its_kin_by_hand.pytestmark if m.name == "parametrize")  # type: ignore[attr-defined]
    known = set(choices(LOSSES["dpo"].settings, "pair_loss"))
    assert {case[0] for case in mark.args[1]} == OF_DPO.keys() == known


def test_cpo_by_hand() -> None:
    # No reference: z = -1 + 3, so beta z = 0.4; the mean log-prob of the chosen reply is -0.5.
    batch, logp = one_pair([-0.25, -0.75], [-3.0])
    loss = cpo(batch, Outputs(logp_N=logp), beta=0.2, label_smoothing=0.0, nll_weight=2.0)
    assert loss.loss_N[2].item() == pytest.approx(-log_sigmoid(0.4) + 1.0, rel=1e-12)
    assert loss.stats["chosen_nll_nats"].tolist() == pytest.approx([0.5, 0.5])


def test_alphapo_by_hand() -> None:
    # Mean probabilities 1/2 and 1/4, alpha 1: rewards 1 - 2 = -1 and 1 - 4 = -3, times beta 2: a difference of 4.
    batch, logp = one_pair([math.log(0.5)] * 2, [math.log(0.25)])
    loss = simpo(batch, Outputs(logp_N=logp), beta=2.0, target_margin=0.5, reward_alpha=1.0)
    assert loss.loss_N[2].item() == pytest.approx(-log_sigmoid(3.5), rel=1e-12)
    assert loss.stats["chosen_reward"][0].item() == pytest.approx(-2.0)


def test_alphapo_has_the_limit_of_simpo() -> None:
    batch, logp = one_pair([-0.2, -0.8], [-1.0, -1.5])
    near, at = (
        simpo(batch, Outputs(logp_N=logp), beta=2.0, target_margin=0.4, reward_alpha=a).loss_N[2].item()
        for a in (1e-9, 0.0)
    )
    assert near == pytest.approx(at, rel=1e-8)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (
            {"pair_loss": ["sigmoid", "sft"], "pair_weights": [1.0]},
            "pair_weights: got 1 weights for 2 losses",
        ),
        ({"pair_loss": []}, "pair_loss: is empty"),
        ({"pair_loss": "exo"}, "the logarithm of label_smoothing"),
        ({"pair_loss": ["sigmoid", "sppo"]}, "pair_loss: got"),
    ],
)
def test_losses_of_pairs_that_cannot_be_summed_are_refused(loss: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve(AlgorithmConfig(name="dpo", loss=loss))


def test_one_name_is_a_list_of_one() -> None:
    for pair_loss in ("hinge", ["hinge"]):
        chosen = resolve(AlgorithmConfig(name="dpo", loss={"pair_loss": pair_loss})).settings["loss"]
        assert list(chosen.settings["pair_loss"]) == ["hinge"]


def test_hinge_is_flat_beyond_its_margin() -> None:
    batch, logp = one_pair([-1.0], [-12.0])
    loss = dpo(batch, Outputs(logp_N=logp), beta=0.1, label_smoothing=0.0, pair_loss="hinge").loss_N.sum()
    assert loss == 0
    assert torch.autograd.grad(loss, logp)[0].abs().sum() == 0


def test_ipo_is_least_at_its_target() -> None:
    batch, logp = one_pair([-1.0], [-6.0])  # z = 5 = 1 / (2 * 0.1), as sums and as means
    loss = dpo(batch, Outputs(logp_N=logp), beta=0.1, label_smoothing=0.0, pair_loss="ipo").loss_N.sum()
    assert loss.item() == pytest.approx(0)
    assert torch.autograd.grad(loss, logp)[0].abs().sum() == pytest.approx(0)


def test_simpo_by_hand() -> None:
    # Mean log-probs -0.5 and -1.25, times 2: -1 and -2.5; their difference less the margin: 1.5 - 0.4.
    batch, logp = one_pair([-0.2, -0.8], [-1.0, -1.5])
    loss = simpo(batch, Outputs(logp_N=logp), beta=2.0, target_margin=0.4)
    assert loss.loss_N[2].item() == pytest.approx(-log_sigmoid(1.1), rel=1e-12)
    assert loss.stats["chosen_reward"][0].item() == pytest.approx(-1.0)
    assert loss.stats["rejected_reward"][0].item() == pytest.approx(-2.5)


def test_orpo_by_hand() -> None:
    # Mean probabilities 1/2 and 1/4: odds 1 and 1/3, their ratio 3; sigmoid(log 3) = 3/4.
    batch, logp = one_pair([math.log(0.5)] * 2, [math.log(0.25)])
    loss = orpo(batch, Outputs(logp_N=logp), odds_weight=0.1)
    assert loss.loss_N[2].item() == pytest.approx(math.log(2) - 0.1 * math.log(0.75), rel=1e-12)
    assert loss.stats["margin"][0].item() == pytest.approx(math.log(3))
    assert loss.stats["chosen_nll_nats"].tolist() == pytest.approx([math.log(2)] * 2)


def test_orpo_stays_finite_where_a_reply_is_certain() -> None:
    batch, logp = one_pair([0.0], [-0.5])
    loss = orpo(batch, Outputs(logp_N=logp), odds_weight=0.1).loss_N.sum()
    assert torch.isfinite(loss)
    assert torch.isfinite(torch.autograd.grad(loss, logp)[0]).all()


def test_kto_by_hand() -> None:
    # log pi/ref 1.5 (desirable) and -0.5 (not), z0 = 0.5, beta = 2: gains 2 and -2.
    batch = make_batch([["paa"], ["pa"]], [1, 0])
    batch = replace(batch, logp_ref_N=doubles([0, -1, -2, 0, -0.5]), kl_zero_R=doubles([0.5, 0.5]))
    logp = doubles([0, -0.5, -1, 0, -1]).requires_grad_()
    loss = kto(batch, Outputs(logp_N=logp), beta=2.0, desirable_weight=1.0, undesirable_weight=3.0)
    bad = 1 / (1 + math.exp(2))  # 1 - sigmoid(2)
    assert loss.loss_N.tolist() == pytest.approx([0, 0, bad, 0, 3 * bad], rel=1e-12)
    assert loss.stats["accuracy"].tolist() == [1, 1]
    assert loss.stats["desirable_reward"].tolist() == pytest.approx([3])
    assert loss.stats["undesirable_reward"].tolist() == pytest.approx([-1])
    slope = 2 * bad * (1 - bad)  # beta sigmoid'(2)
    (gradient,) = torch.autograd.grad(loss.loss_N.sum(), logp)
    assert gradient.tolist() == pytest.approx([0, -slope, -slope, 0, 3 * slope], rel=1e-12)


def test_mismatched_by_hand() -> None:
    batch = make_batch([["ppa"], ["paoa"], ["pppaa"]])
    batch = replace(batch, token_ids_N=torch.arange(12))
    other = mismatched(batch)
    #  prompts 0 1 | 3 | 7 8 9; replies 2 | 4 5 6 (5 from the environment) | 10 11
    assert other.token_ids_N.tolist() == [0, 1, 4, 5, 6, 3, 10, 11, 7, 8, 9, 2]
    assert other.mask_N.int().tolist() == [0, 0, 1, 0, 1, 0, 1, 1, 0, 0, 0, 1]
    assert other.rollout_N.tolist() == [0] * 5 + [1] * 3 + [2] * 4
    assert other.length_S.tolist() == [5, 3, 4]
    assert other.prompt_S.tolist() == [2, 1, 3]


Model = Callable[[Batch, Literal["logprobs"]], Tensor]


def by_prompt(factor: float) -> Model:
    """A model whose log-prob of a token is factor times (token + 10 * the rollout's first token)."""

    def forward(batch: Batch, want: Literal["logprobs"]) -> Tensor:
        first_R = batch.token_ids_N[batch.start_S]
        return factor * (batch.token_ids_N + 10 * first_R[batch.rollout_N]).double() * batch.mask_N

    return forward


def test_kl_zero_by_hand() -> None:
    batch = replace(make_batch([["pa"], ["paa"]]), token_ids_N=torch.tensor([1, 2, 3, 4, 5]))
    # Mismatched: prompt 1 with tokens 4 5: 14 + 15; prompt 3 with token 2: 32. Mean of 29 and 32, times 0.1.
    zero = kl_zero(batch, policy=by_prompt(0.3), reference=by_prompt(0.2))
    assert zero.tolist() == pytest.approx([3.05, 3.05])
    # Never below 0.
    assert kl_zero(batch, policy=by_prompt(0.2), reference=by_prompt(0.3)).tolist() == [0, 0]


def test_one_reply_has_no_other_prompt() -> None:
    with pytest.raises(DataError, match="at least two"):
        mismatched(make_batch([["pa"]]))


# ---------------------------------------------------------------- against loops


def pair_by_loop(name: str, now: list[Tokens], ref: list[Tokens]) -> float:
    """now, ref: log-probs of the chosen and of the rejected reply."""
    z = sum(now[0]) - sum(ref[0]) - sum(now[1]) + sum(ref[1])  # type: ignore[arg-type]
    a, b = (sum(tokens) / len(tokens) for tokens in now)  # type: ignore[arg-type]
    n, m = len(now[0]), len(now[1])
    u, v = (0.3 * (sum(x) - sum(y)) for x, y in zip(now, ref, strict=True))  # type: ignore[arg-type]
    if name == "simpo":
        return -log_sigmoid(2.0 * a - 2.0 * b - 0.7)
    if name == "alphapo":
        a, b = ((1 - math.exp(x) ** -0.25) / 0.25 for x in (a, b))
        return -log_sigmoid(2.0 * a - 2.0 * b - 0.7)
    if name == "cpo":
        x = 0.3 * (sum(now[0]) - sum(now[1]))  # type: ignore[arg-type]
        return -0.9 * log_sigmoid(x) - 0.1 * log_sigmoid(-x) - 0.5 * a
    if name == "several":
        return sum(
            weight * pair_by_loop(part, now, ref)
            for part, weight in (("dpo", 0.8), ("bco", 0.2), ("sft", 1.0))
        )
    if name == "sigmoid_norm":
        x = u / n - v / m
        return -0.9 * log_sigmoid(x) - 0.1 * log_sigmoid(-x)
    if name == "exo":
        s = sigmoid(u - v)
        return s * math.log(s / 0.9) + (1 - s) * math.log((1 - s) / 0.1)
    if name == "self_play":
        return (u / 0.3 - 1 / 0.6) ** 2 + (v / 0.3 + 1 / 0.6) ** 2
    if name == "ipo_mean":
        return (u / 0.3 / n - v / 0.3 / m - 1 / 0.6) ** 2
    plain = {
        "nca": -log_sigmoid(u) - 0.5 * log_sigmoid(-u) - 0.5 * log_sigmoid(-v),
        "bco": -log_sigmoid(u) - log_sigmoid(-v),
        "apo_zero": 1 - sigmoid(u) + sigmoid(v),
        "apo_down": sigmoid(u) + 1 - sigmoid(u - v),
        "sft": -a,
    }
    if name in plain:
        return plain[name]
    if name == "orpo":
        odds = [math.exp(x) / (1 - math.exp(x)) for x in (a, b)]
        return -a - 0.2 * math.log(odds[0] / (odds[0] + odds[1]))
    if name == "hinge":
        return max(0.0, 1 - 0.3 * z)
    if name == "ipo":
        return (z - 1 / 0.6) ** 2
    good, bad = -log_sigmoid(0.3 * z), -log_sigmoid(-0.3 * z)
    return 0.9 * good + 0.1 * bad if name == "dpo" else (0.9 * good - 0.1 * bad) / 0.8


def negative(logp: Tensor, batch: Batch) -> Tensor:
    """Log-probs below 0, near the given ones, where something was sampled."""
    return (-logp.detach().abs() - 1e-3 * batch.mask_N).requires_grad_()


@settings(deadline=None, max_examples=25)
@given(seed=SEEDS, pairs=st.integers(1, 6))
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_pairs_against_a_loop(name: str, seed: int, pairs: int) -> None:
    batch = pair_batch(pairs, seed=seed)
    assert batch.logp_ref_N is not None
    logp = negative(logp_now(batch, seed=seed, scale=1.0), batch)
    now, ref = by_rollout(batch, logp.detach()), by_rollout(batch, batch.logp_ref_N)
    expected = 0.0
    for first in range(0, 2 * pairs, 2):
        order = (
            [first, first + 1] if batch.reward_R[first] > batch.reward_R[first + 1] else [first + 1, first]
        )
        expected += pair_by_loop(name, [now[i] for i in order], [ref[i] for i in order]) / pairs  # type: ignore[misc]
    assert mean_loss(batch, logp, PAIR_LOSSES[name]).item() == pytest.approx(expected, rel=1e-11)


@settings(deadline=None, max_examples=25)
@given(seed=SEEDS, replies=st.integers(2, 7))
def test_kto_against_a_loop(seed: int, replies: int) -> None:
    batch = label_batch(replies, seed=seed)
    assert batch.logp_ref_N is not None
    logp = logp_now(batch, seed=seed, scale=1.0)
    now, ref = by_rollout(batch, logp.detach()), by_rollout(batch, batch.logp_ref_N)
    expected = 0.0
    for i in range(replies):
        gain = 0.3 * (sum(now[i]) - sum(ref[i]) - 0.2)
        good = bool(batch.reward_R[i] > 0)
        value = 1 / (1 + math.exp(-gain if good else gain))
        expected += (1.5 if good else 0.5) * (1 - value) / replies
    assert mean_loss(batch, logp, KTO).item() == pytest.approx(expected, rel=1e-11)


@settings(deadline=None, max_examples=25)
@given(seed=SEEDS, replies=st.integers(2, 6))
def test_kl_zero_against_a_loop(seed: int, replies: int) -> None:
    batch = label_batch(replies, seed=seed)
    ids, start = batch.token_ids_N.tolist(), batch.start_S.tolist()
    total = 0.0
    for i in range(replies):
        j = (i + 1) % replies
        reply = range(start[j] + int(batch.prompt_S[j]), start[j] + int(batch.length_S[j]))
        total += sum(0.01 * (ids[t] + 10 * ids[start[i]]) for t in reply)
    zero = kl_zero(batch, policy=by_prompt(0.03), reference=by_prompt(0.02))
    assert zero.tolist() == pytest.approx([total / replies] * replies, rel=1e-9)


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("name", [*PAIR_LOSSES, "kto"])
@pytest.mark.parametrize("seed", except_for((0).__eq__, range(3)))
def test_gradients_are_the_slopes(name: str, seed: int) -> None:
    batch = label_batch(4, seed=seed) if name == "kto" else pair_batch(3, seed=seed)
    loss = KTO if name == "kto" else PAIR_LOSSES[name]
    logp = negative(logp_now(batch, seed=seed), batch)
    assert torch.autograd.gradcheck(lambda x: mean_loss(batch, x, loss), (logp,))


@pytest.mark.parametrize("name", [*PAIR_LOSSES, "kto"])
@pytest.mark.parametrize("most", [1, 3, 100])
def test_micro_batches_change_nothing(name: str, most: int) -> None:
    batch = label_batch(6, seed=2) if name == "kto" else pair_batch(5, seed=2)
    loss = KTO if name == "kto" else PAIR_LOSSES[name]
    mode = "seq-mean-token-sum" if name == "kto" else "pair-mean"
    batch = replace(batch, weight_N=weights(batch, mode, norm_tokens=8))
    logp = negative(logp_now(batch, seed=2), batch)
    (whole,) = torch.autograd.grad(mean_loss(batch, logp, loss), logp)
    cut, begin = torch.zeros_like(whole), 0
    for part in micro_batches(
        batch, max_tokens=None, max_rollouts=most, shared=True, whole_groups=name != "kto"
    ):
        assert part.weight_N is not None
        out = Outputs(logp_N=logp[begin : begin + part.tokens])
        cut += torch.autograd.grad((loss(part, out).loss_N * part.weight_N).sum(), logp)[0]
        begin += part.tokens
    torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-15)
    assert whole.abs().sum() > 0


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_which_of_a_pair_stands_first_does_not_matter(name: str) -> None:
    batch = make_batch([["paa", "pa"], ["pa", "paaa"]], [1, 0, 1, 0], seed=3)
    logp = negative(logp_now(batch), batch)
    order = torch.tensor([1, 0, 3, 2])
    starts, lengths = batch.start_S.tolist(), batch.length_S.tolist()
    at = torch.cat([torch.arange(starts[i], starts[i] + lengths[i]) for i in order.tolist()])
    assert batch.logp_ref_N is not None
    swapped = make_batch([["pa", "paa"], ["paaa", "pa"]], [0, 1, 0, 1], seed=3)
    swapped = replace(swapped, logp_ref_N=batch.logp_ref_N[at])
    loss = PAIR_LOSSES[name]
    assert mean_loss(swapped, logp[at], loss).item() == pytest.approx(
        mean_loss(batch, logp, loss).item(), rel=1e-13
    )


def test_the_order_of_pairs_does_not_matter() -> None:
    batch = pair_batch(4, seed=7)
    logp = negative(logp_now(batch), batch)
    for loss in PAIR_LOSSES.values():
        parts = []
        for pair in (2, 0, 3, 1):
            part = select(batch, torch.tensor([2 * pair, 2 * pair + 1]))
            at = torch.isin(batch.rollout_N, torch.tensor([2 * pair, 2 * pair + 1]))
            parts.append(mean_loss(part, logp[at], loss))
        assert torch.stack(parts).mean().item() == pytest.approx(
            mean_loss(batch, logp, loss).item(), rel=1e-12
        )


def test_simpo_and_orpo_do_not_count_length() -> None:
    """A reply said twice over, with the same log-probs, is worth the same; to dpo it is worth twice as much."""
    once, logp = one_pair([-0.3, -0.7], [-2.0])
    twice, logp2 = one_pair([-0.3, -0.7] * 2, [-2.0])
    for name in ("simpo", "orpo"):
        loss = PAIR_LOSSES[name]
        assert mean_loss(once, logp, loss).item() == pytest.approx(
            mean_loss(twice, logp2, loss).item(), rel=1e-12
        )
    assert mean_loss(once, logp, PAIR_LOSSES["dpo"]) != mean_loss(twice, logp2, PAIR_LOSSES["dpo"])


def test_only_dpo_and_kto_look_at_the_reference() -> None:
    batch = pair_batch(3, seed=1)
    logp = negative(logp_now(batch), batch)
    away = replace(batch, logp_ref_N=None)
    for name in ("simpo", "orpo"):
        assert mean_loss(away, logp, PAIR_LOSSES[name]) == mean_loss(batch, logp, PAIR_LOSSES[name])
    with pytest.raises(whet.WhetError, match="logp_ref_N"):
        mean_loss(away, logp, PAIR_LOSSES["dpo"])


# ---------------------------------------------------------------- configs


ROWS = [{"prompt": f"{c}>", "response": f"{c}a", "rejected": f"{c}b"} for c in "abcdefgh"]
LABELLED = [{"prompt": f"{c}>", "response": f"{c}{x}", "good": x == "a"} for c in "abcdefgh" for x in "ab"]
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
    "rollout": {"sampling": {"max_tokens": 8}},
}


def sections(name: str, **algorithm: Any) -> dict[str, Any]:
    source = {"rows": LABELLED, "desirable": "good"} if name == "kto" else {"rows": ROWS}
    return SETUP | {
        "data": {"max_prompt_tokens": 8, "train": [source]},
        "algorithm": algorithm_section(name, **algorithm),
        "train": {"steps": 30, "tasks_per_step": 8, "optimizer": {"lr": 3e-3}},
    }


@pytest.mark.parametrize(
    ("name", "algorithm", "said"),
    [
        ("dpo", {"pair_loss": "hinge", "label_smoothing": 0.1}, "label_smoothing: has no effect"),
        ("simpo", {"label_smoothing": 0.1}, "no effect"),
        ("orpo", {"beta": 0.2}, "no effect"),
        ("kto", {"target_margin": 0.2}, "no effect"),
        ("kto", {"loss_agg_mode": "token-mean"}, "one number per pair or per reply"),
        ("simpo", {"entropy_coef": 0.1}, "one number per pair or per reply"),
        ("kto", {"kl": {"coef": 0.1}}, "no KL per token"),
        ("simpo", {"kl": {"coef": 0.1, "estimator": "full"}}, "pairs are given"),
        ("dpo", {"loss": "kto"}, "labels data"),
    ],
)
def test_what_cannot_work_is_refused(name: str, algorithm: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plans(load(None, [], sections(name, **algorithm)))


def test_kto_needs_two_replies_a_step() -> None:
    with pytest.raises(ConfigError, match="2 or more"):
        plans(load(None, ["train.tasks_per_step=1"], sections("kto")))


def test_only_what_looks_at_a_reference_loads_one() -> None:
    needs = {
        n: plans(load(None, [], sections(n)))[0].needs_reference for n in ("dpo", "kto", "simpo", "orpo")
    }
    assert needs == {"dpo": True, "kto": True, "simpo": False, "orpo": False}
    with pytest.raises(ConfigError, match="no reference is needed"):
        plans(load(None, ["reference.reset_interval=2"], sections("simpo")))


def test_a_column_that_nothing_reads_is_refused() -> None:
    values = sections("dpo")
    values["data"]["train"][0]["desirable"] = "good"
    with pytest.raises(ConfigError, match="only kto reads it"):
        plans(load(None, [], values))


@pytest.mark.parametrize("value", ["yes", 2, None])
def test_a_label_that_is_none_is_refused(tmp_path: Path, value: object) -> None:
    values = sections("kto")
    values["data"]["train"][0]["rows"] = [{**row, "good": value} for row in LABELLED]
    with pytest.raises(DataError, match="true or false"):
        whet.train(run_dir=str(tmp_path / "run"), **values)


# ---------------------------------------------------------------- learning


def learn(tmp_path: Path, name: str, **algorithm: Any) -> list[dict[str, Any]]:
    return whet.train(run_dir=str(tmp_path / "run"), **sections(name, **algorithm)).metrics


def test_kto_learns_labels(tmp_path: Path) -> None:
    metrics = learn(tmp_path, "kto")
    assert metrics[0]["train/loss"] == pytest.approx(0.5, abs=1e-6), "policy = reference: 1 - sigmoid(0)"
    assert metrics[0]["train/kl_zero_nats"] == 0
    assert sum(m["train/accuracy"] for m in metrics[-5:]) / 5 > 0.85
    assert metrics[-1]["train/desirable_reward"] > metrics[-1]["train/undesirable_reward"] + 0.5
    assert metrics[-1]["train/loss"] < 0.4


@pytest.mark.parametrize("name", ["simpo", pytest.param("orpo", marks=pytest.mark.sweep)])
def test_pairs_are_learned_without_a_reference(tmp_path: Path, name: str) -> None:
    metrics = learn(tmp_path, name)
    assert metrics[-1]["train/accuracy"] == 1.0
    assert metrics[-1]["train/margin"] > metrics[0]["train/margin"] + 1.0
    assert metrics[-1]["train/loss"] < 0.5 * metrics[0]["train/loss"]


@pytest.mark.parametrize("pair_loss", except_for("ipo".__eq__, ["robust", "hinge", "ipo"]))
def test_the_kin_of_dpo_learn(tmp_path: Path, pair_loss: str) -> None:
    metrics = learn(tmp_path, "dpo", pair_loss=pair_loss)
    assert metrics[-1]["train/accuracy"] == 1.0
    assert metrics[-1]["train/margin"] > 0.1
