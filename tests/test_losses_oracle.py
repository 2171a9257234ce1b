"""Every policy loss against a loop over Python floats, its gradient against finite differences, and its laws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import loss_oracles as naive
from batches import by_rollout, concat, logp_now, make_batch, micro_batches, ragged
from loss_oracles import Lists, Rec, Tokens
from swept import one_each
from whet.algos.aggregate import weights
from whet.algos.losses import LOSSES, LOSSES_OVER
from whet.batch import Batch, LossFn, Outputs, select

Case = tuple[str, dict[str, Any], Callable[[Tokens], Lists]]
CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}
PPO = CLIP | {"sequence_mask_delta": None, "fallback_to_policy_gradient": False}
VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
REC: dict[str, Any] = {
    "rec_clip_mode": "none",
    "rec_ring_low": 0.6,
    "rec_ring_high": 2.0,
    "rec_weight": "none",
    "rec_temperature": 1.0,
    "rec_regularizer": "none",
    "rec_regularizer_coef": 0.0,
}


def plain(f: Callable[[float, float, float], float]) -> Callable[[Tokens], Lists]:
    return lambda t: naive.each(t, lambda a, lp, r, _: f(a, lp, r))


def rec_case(mode: str, weight: str, regularizer: str) -> Case:
    keys = {"rec_clip_mode": mode, "rec_weight": weight, "rec_regularizer": regularizer}
    more = {"rec_regularizer_coef": 0.3, "rec_temperature": 2.0, "clip_low": 0.2, "clip_high": 0.28}
    said = Rec(
        low=0.2, high=0.28, mode=mode, weight=weight, temperature=2.0, regularizer=regularizer, coef=0.3
    )
    return "rec", REC | keys | more, lambda t: naive.rec(t, said)


CASES: list[Case] = [
    ("ppo", PPO | {"dual_clip": None}, lambda t: naive.ppo(t, 0.2, 0.28, None, None)),
    ("ppo", PPO | {"dual_clip": 3.0}, lambda t: naive.ppo(t, 0.2, 0.28, 3.0, None)),
    (
        "ppo",
        PPO | {"dual_clip": 3.0, "sequence_mask_delta": 0.1},
        lambda t: naive.ppo(t, 0.2, 0.28, 3.0, 0.1),
    ),
    ("ppo", PPO | {"dual_clip": None, "clip_low": None}, lambda t: naive.ppo(t, 1e9, 0.28, None, None)),
    ("ppo", PPO | {"dual_clip": None, "clip_high": None}, lambda t: naive.ppo(t, 0.2, 1e9, None, None)),
    ("ppo", PPO | {"dual_clip": None, "clip_high": 1e9}, lambda t: naive.ppo(t, 0.2, 1e9, None, None)),
    ("gspo", CLIP | {"gspo_form": "sequence"}, lambda t: naive.gspo(t, 0.2, 0.28)),
    ("gspo", CLIP | {"gspo_form": "token"}, lambda t: naive.gspo(t, 0.2, 0.28)),
    ("geo_mean", CLIP, lambda t: naive.geo_mean(t, 0.2, 0.28)),
    ("self_play", {"eta": 1.5}, lambda t: naive.self_play(t, 1.5)),
    ("cispo", CLIP | {"cispo_mask": False}, lambda t: naive.cispo(t, 0.2, 0.28, False)),
    ("cispo", CLIP | {"cispo_mask": True}, lambda t: naive.cispo(t, 0.2, 0.28, True)),
    (
        "sapo",
        {"tau_pos": 1.0, "tau_neg": 1.5, "sapo_detach": False},
        lambda t: naive.sapo(t, 1.0, 1.5, False),
    ),
    ("sapo", {"tau_pos": 1.0, "tau_neg": 1.5, "sapo_detach": True}, lambda t: naive.sapo(t, 1.0, 1.5, True)),
    ("aipo", {"aipo_rho": 1.5}, plain(lambda a, lp, r: -min(r, 1.5) * a)),
    ("importance_sampling", {}, plain(lambda a, lp, r: -a * r)),
    ("rollout_is", CLIP, lambda t: naive.rollout_is(t, 0.2, 0.28)),
    ("softmax_ppo", {"ratio_epsilon": 0.3}, lambda t: naive.softmax_ppo(t, 0.3)),
    (
        "ppo",
        PPO | {"dual_clip": None, "sequence_mask_delta": 0.1, "sequence_mask_anchor": "sampled"},
        lambda t: naive.ppo(t, 0.2, 0.28, None, 0.1, engine=True),
    ),
    (
        "cispo",
        {"clip_low": 1.0, "clip_high": 0.5, "cispo_mask": True, "mask_low": 0.1, "mask_high": 0.2},
        lambda t: naive.cispo(t, 1.0, 0.5, True, mask=(0.1, 0.2)),
    ),
    ("vespo", VESPO, lambda t: naive.vespo(t, (2.0, 3.0), (3.0, 2.0))),
    ("dro", {"dro_beta": 0.3}, plain(lambda a, lp, r: -a * lp + 0.15 * math.log(r) ** 2)),
    *[
        (
            "reinforce_is",
            {
                "weight_over": over,
                "weight_low": 0.5,
                "weight_high": 1.5,
                "weight_outside": outside,
                "weight_normalize": False,
            },
            lambda t, over=over, outside=outside: naive.reinforce_is(t, over, 0.5, 1.5, outside),
        )
        for over in ("none", "token", "sequence", "geometric")
        for outside in ("truncate", "mask")
    ],
    ("reinforce", {}, plain(lambda a, lp, r: -a * lp)),
    ("gpg", {}, plain(lambda a, lp, r: -a * lp)),
    ("opmd", {"tau": 0.5}, plain(lambda a, lp, r: -a * lp / 1.5)),
    ("topr", {"topr_threshold": 0.0}, lambda t: naive.topr(t, 0.0)),
    ("topr", {"topr_threshold": 0.5}, lambda t: naive.topr(t, 0.5)),
    ("cross_entropy", {}, plain(lambda a, lp, r: -lp)),
    *[
        (
            "dppo",
            {"dppo_divergence": kind, "dppo_delta_low": 0.05, "dppo_delta_high": 0.08},
            lambda t, kind=kind: naive.dppo(t, kind, 0.05, 0.08),
        )
        for kind in ("binary_tv", "binary_kl")
    ],
    *[rec_case(mode, "none", "none") for mode in ("none", "one-side", "two-side", "ring", "gspo-one-side")],
    *[
        rec_case("one-side", weight, "k2")
        for weight in ("importance_sampling", "gspo_importance_sampling", "advantage")
    ],
    rec_case("two-side", "none", "forward-kl"),
]
OVER_MINIBATCH: list[Case] = [
    ("kl_cov", {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7}, lambda t: naive.kl_cov(t, 0.1, 0.7)),
    ("kl_cov", {"kl_cov_ratio": 1e-4, "ppo_kl_coef": 0.7}, lambda t: naive.kl_cov(t, 1e-4, 0.7)),
    ("kl_cov", {"kl_cov_ratio": 1.0, "ppo_kl_coef": 0.7}, lambda t: naive.kl_cov(t, 1.0, 0.7)),
    *[
        ("m2po", {"m2_threshold": most}, lambda t, most=most: naive.m2po(t, most))
        for most in (0.0, 0.005, 0.1, 100.0)
    ],
    *[
        (
            "reinforce_is",
            {
                "weight_over": over,
                "weight_low": 0.5,
                "weight_high": 1.5,
                "weight_outside": "mask",
                "weight_normalize": True,
            },
            lambda t, over=over: naive.reinforce_is(t, over, 0.5, 1.5, "mask", normalize=True),
        )
        for over in ("none", "token", "sequence", "geometric")
    ],
]
CLIP_COV = CLIP | {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.0, "clip_cov_ub": 5.0}
ALL = [*CASES, *OVER_MINIBATCH]
NAMES = [f"{name}-{n}" for n, (name, _, _) in enumerate(ALL)]


def noisy(
    seed: int, *, spread: float, groups: int = 4, dtype: torch.dtype = torch.float64
) -> tuple[Batch, Tensor]:
    """A ragged batch with advantages, sampled log-probs apart from the old ones, and the log-probs now."""
    batch, rng = ragged(seed, groups=groups), np.random.default_rng(seed + 1000)
    normal = torch.tensor(rng.normal(size=(3, batch.tokens)))
    old = -(batch.logp_sample_N - 0.05 + spread * normal[0]).abs() - 1e-3
    now = -(old + spread * normal[1]).abs() - 1e-3
    whole = (rng.random(batch.rollouts) < 0.7)[batch.rollout_N.numpy()]
    adv = torch.where(torch.tensor(whole), batch.reward_R[batch.rollout_N], normal[2])
    batch = replace(batch, logp_old_N=old * batch.mask_N, adv_N=adv * batch.mask_N)
    return lowered(batch, dtype), (now * batch.mask_N).to(dtype).requires_grad_()


def lowered(batch: Batch, dtype: torch.dtype) -> Batch:
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    floats = {k: v.to(dtype) for k, v in values.items() if v is not None and v.is_floating_point()}
    return replace(batch, **floats)


def as_lists(batch: Batch, logp: Tensor) -> Tokens:
    assert batch.adv_N is not None
    assert batch.logp_old_N is not None
    parts = (logp.detach(), batch.logp_old_N, batch.logp_sample_N, batch.adv_N)
    return Tokens(*(by_rollout(batch, x.double()) for x in parts))


def check(case: Case, batch: Batch, logp: Tensor) -> None:
    name, keys, oracle = case
    loss = LOSSES[name](batch, Outputs(logp_N=logp), **keys).loss_N
    assert (loss[~batch.mask_N] == 0).all()
    expected = torch.tensor([x for row in oracle(as_lists(batch, logp)) for x in row], dtype=torch.float64)
    got = torch.tensor([x for row in by_rollout(batch, loss.detach()) for x in row], dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    if loss.requires_grad:
        assert torch.isfinite(torch.autograd.grad(loss.sum(), logp)[0]).all()


# ---------------------------------------------------------------- the formula


@pytest.mark.parametrize("case", ALL, ids=NAMES)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.0, 0.1, 0.7]))
def test_a_loss_is_its_formula(case: Case, seed: int, spread: float) -> None:
    check(case, *noisy(seed, spread=spread))


@pytest.mark.parametrize("case", CASES, ids=NAMES[: len(CASES)])
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), where=st.sampled_from(["old", "engine", "both"]))
def test_infinite_log_ratios_leave_loss_and_gradient_finite(case: Case, seed: int, where: str) -> None:
    batch, logp = noisy(seed, spread=0.3)
    rng = np.random.default_rng(seed)
    holes = torch.tensor(rng.random(batch.tokens) < 0.2) & batch.mask_N
    assert batch.logp_old_N is not None
    if where != "engine":
        batch = replace(batch, logp_old_N=batch.logp_old_N.masked_fill(holes, -torch.inf))
    if where != "old":
        batch = replace(batch, logp_sample_N=batch.logp_sample_N.masked_fill(holes, -torch.inf))
    check(case, batch, logp)


@pytest.mark.parametrize("case", CASES, ids=NAMES[: len(CASES)])
def test_groups_of_one_rows_without_a_token_and_equal_rewards(case: Case) -> None:
    pictures = [["paa"], ["p", "pa", "pp"], ["paoa", "paoa"], ["pp"]]
    for reward in (0.0, 1.0):
        batch = make_batch(pictures, [reward] * 7)
        assert batch.logp_old_N is not None
        batch = replace(batch, adv_N=batch.reward_R[batch.rollout_N] * batch.mask_N)
        check(case, batch, -logp_now(batch, scale=0.4).abs())


@pytest.mark.parametrize("case", ALL, ids=NAMES)
def test_nothing_was_sampled(case: Case) -> None:
    batch = make_batch([["pp", "p"]], [1.0, 0.0])
    batch = replace(batch, adv_N=torch.zeros(3).double())
    loss = LOSSES[case[0]](batch, Outputs(logp_N=torch.zeros(3).double().requires_grad_()), **case[1])
    assert loss.loss_N.tolist() == [0, 0, 0]


def test_every_policy_loss_stands_here() -> None:
    mine = {name for name, _, _ in ALL} | {"clip_cov", "gkd"}  # gkd: test_divergence.py
    assert mine == LOSSES.keys() - {
        "sft",
        "sft_is",
        "sft_phi",
        "dpo",
        "online_dpo",
        "simpo",
        "cpo",
        "orpo",
        "kto",
    }


# ---------------------------------------------------------------- the gradient


def frozen_loss(name: str, batch: Batch, logp: Tensor, keys: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """A function of the log-probs whose true derivative is the loss's gradient: what is detached is held."""
    adv, old = batch.adv_N, batch.logp_old_N
    assert adv is not None
    assert old is not None
    held = logp.detach()
    d = torch.where(batch.mask_N, held - old, 0.0)

    def weighted(x: Tensor) -> Tensor:
        """The loss at the held log-probs, moved along -(weight) (lp - held)."""
        at = LOSSES[name](batch, Outputs(logp_N=held), **keys).loss_N
        coef = torch.where(held != 0, at / held, 0.0)
        return coef * x

    def gspo_token(x: Tensor) -> Tensor:
        mean = (batch.sum_R(d) / batch.sum_R(torch.ones_like(d)).clamp(min=1))[batch.rollout_N]
        r = (x - held + mean).exp()
        return torch.maximum(-adv * r, -adv * r.clamp(0.8, 1.28)) * batch.mask_N

    return gspo_token if name == "gspo" else weighted


SMOOTH = [
    (case, name) for case, name in zip(ALL, NAMES, strict=True) if case[1].get("rec_regularizer") != "k2"
]
"""Not rec with k2, whose weight is held but whose regularizer is not: it has a test of its own."""


@pytest.mark.parametrize("case", [case for case, _ in SMOOTH], ids=[name for _, name in SMOOTH])
@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.sweep)])
def test_the_gradient_is_that_of_the_loss(case: Case, seed: int) -> None:
    """Central differences in float64; where a factor is detached, of the loss with that factor held."""
    name, keys, _ = case
    batch, logp = noisy(seed, spread=0.3)
    held = (
        (name in {"cispo", "topr", "rollout_is", "reinforce_is", "vespo"})
        or (name == "sapo" and keys["sapo_detach"])
        or (name == "gspo" and keys["gspo_form"] == "token")
        or (name == "rec" and keys["rec_regularizer"] == "none" and keys["rec_weight"] != "advantage")
    )
    if held:
        value = frozen_loss(name, batch, logp, keys)
    elif name in LOSSES_OVER:  # the choice of tokens is held, too
        loss = LOSSES_OVER[name](batch, logp.detach, **keys)
        value = lambda x: loss(batch, Outputs(logp_N=x)).loss_N  # noqa: E731
    else:
        value = lambda x: LOSSES[name](batch, Outputs(logp_N=x), **keys).loss_N  # noqa: E731
    (grad,) = torch.autograd.grad(LOSSES[name](batch, Outputs(logp_N=logp), **keys).loss_N.sum(), logp)
    step = 1e-7
    for i in batch.mask_N.nonzero().flatten().tolist()[:40]:
        moved = logp.detach().clone()
        moved[i] += step
        above = value(moved).sum()
        moved[i] -= 2 * step
        below = value(moved).sum()
        assert grad[i].item() == pytest.approx(float(above - below) / (2 * step), rel=2e-6, abs=2e-6)


def test_rec_adds_the_gradient_of_its_regularizer() -> None:
    batch, logp = noisy(5, spread=0.3)
    name, keys, _ = rec_case("one-side", "importance_sampling", "k2")

    def grad(**more: Any) -> Tensor:
        loss = LOSSES[name](batch, Outputs(logp_N=logp), **(keys | more))
        return torch.autograd.grad(loss.loss_N.sum(), logp)[0]

    assert batch.logp_old_N is not None
    extra = 2 * 0.3 * (logp - batch.logp_old_N).detach() * batch.mask_N
    torch.testing.assert_close(grad() - grad(rec_regularizer="none"), extra, rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------- laws


def over(case: Case, batch: Batch, logp: Tensor) -> LossFn:
    name, keys, _ = case
    if name in LOSSES_OVER:
        return LOSSES_OVER[name](batch, logp.detach, **keys)
    return lambda b, o: LOSSES[name](b, o, **keys)


LAWFUL: list[Case] = [*ALL, ("clip_cov", CLIP_COV, plain(lambda a, lp, r: 0.0))]
LAWFUL_NAMES = [*NAMES, "clip_cov"]
KINDS = one_each(LAWFUL, kind=lambda case: case[0])
"""Each loss once; its other settings in the sweep."""


@pytest.mark.parametrize("case", KINDS, ids=LAWFUL_NAMES)
@pytest.mark.parametrize("mode", ["seq-mean-token-mean", pytest.param("token-mean", marks=pytest.mark.sweep)])
def test_any_cut_gives_the_same_gradient_in_float32(case: Case, mode: str) -> None:
    batch, logp = noisy(8, spread=0.3, groups=6, dtype=torch.float32)
    batch = replace(batch, weight_N=weights(batch, mode, norm_tokens=8))
    loss = over(case, batch, logp)

    def gradient(sizes: dict[str, int | None]) -> Tensor:
        total, seen = torch.zeros_like(logp), 0
        for part in micro_batches(batch, **sizes, shared=False, whole_groups=False):
            assert part.weight_N is not None
            out = Outputs(logp_N=logp[seen : seen + part.tokens])
            total += torch.autograd.grad((loss(part, out).loss_N * part.weight_N).sum(), logp)[0]
            seen += part.tokens
        assert seen == batch.tokens
        return total

    whole = gradient({"max_tokens": None, "max_rollouts": None})
    assert whole.abs().sum() > 0
    for sizes in ({"max_tokens": 16, "max_rollouts": None}, {"max_tokens": None, "max_rollouts": 1}):
        torch.testing.assert_close(gradient(sizes), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", [*OVER_MINIBATCH, LAWFUL[-1]], ids=[*NAMES[len(CASES) :], "clip_cov"])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_tokens_without_a_weight_change_nothing_of_the_others(case: Case, seed: int) -> None:
    """Of rollouts that count 0 times (groups.truncated=mask), or rejected: as if they were not there."""
    batch, logp = noisy(seed, spread=0.5)
    counts = torch.arange(batch.rollouts) % 3 > 0
    batch = replace(batch, count_R=counts.double())
    batch = replace(batch, weight_N=weights(batch, "token-mean", norm_tokens=8))
    rest, at = select(batch, counts.nonzero().flatten()), counts[batch.rollout_N]
    one = over(case, batch, logp)(batch, Outputs(logp_N=logp)).loss_N[at]
    two = over(case, rest, logp[at])(rest, Outputs(logp_N=logp[at])).loss_N
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", KINDS, ids=LAWFUL_NAMES)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), order=st.integers(0, 10**6))
def test_the_order_of_rollouts_does_not_matter(case: Case, seed: int, order: int) -> None:
    batch, logp = noisy(seed, spread=0.3)
    rows = np.random.default_rng(order).permutation(batch.rollouts)
    at = torch.cat([(batch.rollout_N == r).nonzero().flatten() for r in rows])
    other = concat(
        [select(batch, torch.tensor([r])) for r in rows], group_R=batch.group_R[torch.tensor(rows)]
    )
    one = over(case, batch, logp)(batch, Outputs(logp_N=logp)).loss_N
    two = over(case, other, logp[at])(other, Outputs(logp_N=logp[at])).loss_N
    torch.testing.assert_close(two, one[at], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", CASES, ids=NAMES[: len(CASES)])
def test_a_part_of_the_loss_is_the_loss_of_the_part(case: Case) -> None:
    batch, logp = noisy(6, spread=0.4)
    whole = LOSSES[case[0]](batch, Outputs(logp_N=logp), **case[1]).loss_N
    keep = torch.isin(batch.rollout_N, torch.tensor([0, 2, 5]))
    part = LOSSES[case[0]](
        select(batch, torch.tensor([0, 2, 5])), Outputs(logp_N=logp[keep]), **case[1]
    ).loss_N
    torch.testing.assert_close(part, whole[keep], rtol=1e-13, atol=0)


@pytest.mark.parametrize("case", LAWFUL, ids=LAWFUL_NAMES)
def test_stats_are_one_number_a_token_without_gradient(case: Case) -> None:
    batch, logp = noisy(2, spread=0.4)
    stats = over(case, batch, logp)(batch, Outputs(logp_N=logp)).stats
    assert not stats.keys() & {"logp", "weight", "loss"}, "the record of a batch has these of every loss"
    for name, x in stats.items():
        assert not x.requires_grad, name
        assert len(x) == batch.tokens, name
        assert x.is_floating_point(), name
        assert torch.isfinite(x[batch.mask_N]).all(), name
