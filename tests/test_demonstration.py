"""Losses on given replies, alone and among own rollouts: numbers by hand, loops, laws about mixes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batches import doubles, logp_now, make_batch, micro_batches, ragged
from whet.algos.aggregate import AGGREGATIONS, weights
from whet.algos.demonstration import (
    among_experts,
    mixed,
    mixed_weights,
    mu_at,
    own,
    sft,
    sft_is,
    sft_phi,
    without_experts,
)  # fmt: skip
from whet.algos.losses import LOSSES, ppo, regularized
from whet.algos.recipes import build
from whet.batch import Batch, LossFn, Outputs, select
from whet.config.recipes import resolve
from whet.config.schema import AlgorithmConfig, CriticConfig, MixConfig

SEEDS = st.integers(0, 10_000)
PHI = partial(sft_phi, phi_cutoff=0.6)
CLIP: LossFn = partial(ppo, clip_low=0.2, clip_high=0.28, dual_clip=None)


def with_experts(seed: int, *, groups: int = 5) -> Batch:
    """Own rollouts in groups, with a demonstration, a group of its own, after every second one."""
    batch = ragged(seed, groups=groups)
    expert_R = (batch.group_R % 2 == 1) & (torch.arange(batch.rollouts) == first_of_group(batch))
    keep = torch.nonzero((batch.group_R % 2 == 0) | expert_R).flatten()
    batch = select(replace(batch, expert_R=expert_R), keep)
    assert batch.expert_R is not None
    adv_N = torch.randn(batch.tokens, generator=torch.Generator().manual_seed(seed)).double()
    return replace(batch, adv_N=adv_N * batch.mask_N * ~batch.expert_R[batch.rollout_N])


def first_of_group(batch: Batch) -> Tensor:
    """[R] the number of the first rollout of each one's group."""
    return torch.searchsorted(batch.group_R, batch.group_R)


def experts(batch: Batch) -> Batch:
    assert batch.expert_R is not None
    return select(batch, torch.nonzero(batch.expert_R).flatten())


def at_rows(batch: Batch, rows_R: Tensor) -> Tensor:
    """[N] bool: tokens of these rollouts."""
    return rows_R[batch.rollout_N]


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("p", "plain", "by_p", "by_phi"),
    [
        (0.5, math.log(2), 0.5 * math.log(2), 0.25 * -math.log(0.5)),
        (0.1, -math.log(0.1), -0.1 * math.log(0.1), -0.09 * math.log(0.1)),
        (0.9, -math.log(0.9), -0.9 * math.log(0.9), -0.09 * math.log(0.6)),  # above the cutoff of 0.6
    ],
)
def test_one_token_by_hand(p: float, plain: float, by_p: float, by_phi: float) -> None:
    batch, logp = make_batch([["pa"]]), doubles([0, math.log(p)]).requires_grad_()
    expected: list[tuple[LossFn, float, float]] = [
        (sft, plain, -1.0),
        (sft_is, by_p, -p),
        (PHI, by_phi, -p * (1 - p) if p < 0.6 else 0.0),
    ]
    for loss, value, slope in expected:
        out = loss(batch, Outputs(logp_N=logp))
        assert out.loss_N.tolist() == pytest.approx([0, value], rel=1e-12)
        assert out.stats["nll_nats"].tolist() == pytest.approx([0, -math.log(p)], rel=1e-12)
        assert not out.stats["nll_nats"].requires_grad
        assert torch.autograd.grad(out.loss_N.sum(), logp)[0].tolist() == pytest.approx([0, slope], rel=1e-12)


def test_without_a_cutoff_no_token_is_left_out() -> None:
    batch, logp = make_batch([["paa"]]), doubles([0, -1e-3, -3.0]).requires_grad_()
    (gradient,) = torch.autograd.grad(sft_phi(batch, Outputs(logp_N=logp), phi_cutoff=1.0).loss_N.sum(), logp)
    p = [math.exp(-1e-3), math.exp(-3.0)]
    assert gradient.tolist() == pytest.approx([0, *(-x * (1 - x) for x in p)], rel=1e-12)


def test_mu_by_hand() -> None:
    chord = {"mu": 0.8, "mu_schedule": {"warmup_steps": 4, "decay_steps": 4, "valley": 0.2}}

    def at(mix: dict[str, Any], *steps: int) -> list[float]:
        r = resolve(AlgorithmConfig(name="mix", mix=MixConfig(**mix)))
        return [mu_at(r, step) for step in steps]

    steps = at(chord, 1, 2, 4, 5, 6, 8, 100)
    down = [0.2 + 0.6 * (1 + math.cos(math.pi / 4)) / 2, 0.5, 0.2, 0.2]
    assert steps == pytest.approx([0.2, 0.4, 0.8, *down])
    assert at({"mu": 0.3}, 1, 7) == [0.3, 0.3]
    warm = {"mu": 0.6, "mu_schedule": {"warmup_steps": 3}}
    assert at(warm, 1, 3, 9) == pytest.approx([0.2, 0.6, 0.6])
    assert at({"mu": 0.6, "mu_schedule": {"valley": 0.1}}, 1, 2) == pytest.approx([0.1, 0.1])


def test_a_mix_by_hand() -> None:
    # Own: two tokens with A = 2 and -1 at ratio 1, mean -(2 - 1) / 2. Demonstration: three tokens, mean of -log pi.
    batch = make_batch([["paa"], ["paaa"]], [1, 0])
    batch = replace(batch, expert_R=torch.tensor([False, True]), adv_N=doubles([0, 2, -1, 0, 0, 0, 0]))
    batch = replace(batch, logp_old_N=doubles([0, -1, -1, 0, 0, 0, 0]))
    logp = doubles([0, -1, -1, 0, -0.5, -1, -3])
    weight_N = mixed_weights(batch, weights=partial(weights, mode="token-mean", norm_tokens=1), mu=0.25)
    assert weight_N.tolist() == pytest.approx([0, 0.375, 0.375, 0, 0.25 / 3, 0.25 / 3, 0.25 / 3])
    loss = mixed(CLIP, sft)(batch, Outputs(logp_N=logp))
    assert (loss.loss_N * weight_N).sum().item() == pytest.approx(0.75 * -0.5 + 0.25 * 1.5, rel=1e-12)
    assert loss.stats["expert_nll_nats"].tolist() == [0.5, 1, 3]
    assert len(loss.stats["ratio"]) == 2


# ---------------------------------------------------------------- against loops


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS)
def test_single_losses_against_a_loop(seed: int) -> None:
    batch = ragged(seed)
    logp = -logp_now(batch, seed=seed, scale=1.0).detach().abs()
    losses: dict[str, LossFn] = {"sft": sft, "sft_is": sft_is, "sft_phi": PHI}
    for name, loss in losses.items():
        found = loss(batch, Outputs(logp_N=logp)).loss_N.tolist()
        for i, x in enumerate(logp.tolist()):
            p = math.exp(x)
            expected = {"sft": -x, "sft_is": -p * x, "sft_phi": p * math.expm1(x) * min(x, math.log(0.6))}[
                name
            ]
            assert found[i] == pytest.approx(expected if batch.mask_N[i] else 0.0, rel=1e-12, abs=1e-300)


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS, mu=st.floats(0, 1))
@pytest.mark.parametrize(
    ("mode", "block"), [*((m, None) for m in AGGREGATIONS if m != "pair-mean"), ("token-mean", 2)]
)
def test_a_mix_is_two_losses_side_by_side(mode: str, block: int | None, seed: int, mu: float) -> None:
    """Each part as if the other were not there: select it, reduce it by itself, add the two."""
    batch = with_experts(seed)
    logp = logp_now(batch, seed=seed)
    out = Outputs(logp_N=logp, entropy_N=logp.detach().exp())
    plain = partial(weights, mode=mode, norm_tokens=7, block=block)
    policy = regularized(CLIP, kl_coef=0.1, estimator="k3", entropy_coef=0.05)
    expected = 0.0
    for part, loss, share in ((without_experts(batch), policy, 1 - mu), (experts(batch), sft, mu)):
        assert batch.expert_R is not None
        mine = at_rows(batch, batch.expert_R if loss is sft else ~batch.expert_R)
        alone = Outputs(logp_N=logp[mine], entropy_N=logp.detach().exp()[mine])
        part = replace(part, weight_N=plain(part))
        expected += share * float((loss(part, alone).loss_N * plain(part)).sum().detach())
    weight_N = mixed_weights(batch, weights=plain, mu=mu)
    found = mixed(policy, sft)(replace(batch, weight_N=weight_N), out).loss_N * weight_N
    assert float(found.sum().detach()) == pytest.approx(expected, rel=1e-10, abs=1e-13)


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("loss", [sft, PHI], ids=["sft", "sft_phi"])
def test_gradients_of_a_mix_are_the_slopes_where_nothing_is_held_fixed(loss: LossFn) -> None:
    batch = with_experts(3)
    logp = (-logp_now(batch).detach().abs() - 0.6 * batch.mask_N).requires_grad_()
    fixed = logp.detach().clone()
    plain = partial(weights, mode="token-mean", norm_tokens=7)
    weight_N = mixed_weights(batch, weights=plain, mu=0.3)

    def total(x: Tensor) -> Tensor:
        if loss is sft:
            return (mixed(CLIP, sft)(batch, Outputs(logp_N=x)).loss_N * weight_N).sum()
        # The stop gradient of phi, written out: its factor at the point, and the slope of the rest.
        p = fixed.exp()
        assert batch.expert_R is not None
        given_N = batch.mask_N & batch.expert_R[batch.rollout_N]
        expert = torch.where(given_N, -p * (1 - p) * x.clamp(max=math.log(0.6)), 0.0)
        return ((CLIP(own(batch), Outputs(logp_N=x)).loss_N + expert) * weight_N).sum()

    (gradient,) = torch.autograd.grad(
        (mixed(CLIP, loss)(batch, Outputs(logp_N=logp)).loss_N * weight_N).sum(), logp
    )
    for i in torch.nonzero(batch.mask_N).flatten().tolist():
        step = torch.zeros_like(fixed)
        step[i] = 1e-6
        slope = float(total(fixed + step) - total(fixed - step)) / 2e-6
        assert gradient[i].item() == pytest.approx(slope, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_micro_batches_change_neither_gradient_nor_numbers(seed: int, most: int) -> None:
    batch = with_experts(seed)
    loss = mixed(regularized(CLIP, kl_coef=0.1, estimator="k3", entropy_coef=0.1), sft_is)
    weight_N = mixed_weights(batch, weights=partial(weights, mode="token-mean", norm_tokens=7), mu=0.4)
    batch = replace(batch, weight_N=weight_N)
    logp = logp_now(batch, seed=seed)

    def parts(x: Tensor, cut: list[Batch]) -> tuple[Tensor, dict[str, float]]:
        begin, total, sums, counts = 0, torch.zeros(()).double(), dict[str, float](), dict[str, int]()
        for part in cut:
            at = slice(begin, begin + part.tokens)
            result = loss(part, Outputs(logp_N=x[at], entropy_N=x[at].exp()))
            assert part.weight_N is not None
            total = total + (result.loss_N * part.weight_N).sum()
            for name, numbers in result.stats.items():
                sums[name] = sums.get(name, 0.0) + float(numbers.sum())
                counts[name] = counts.get(name, 0) + len(numbers)
            begin += part.tokens
        return torch.autograd.grad(total, x)[0], {k: sums[k] / n for k, n in counts.items() if n}

    cut = list(micro_batches(batch, max_tokens=None, max_rollouts=most, shared=True, whole_groups=False))
    assert len(cut) > 1
    whole, numbers = parts(logp, [batch])
    found, again = parts(logp, cut)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-15)
    assert again == pytest.approx(numbers, rel=1e-12)


def test_demonstrations_are_in_no_number_of_the_policy() -> None:
    batch = with_experts(1)
    logp = logp_now(batch).detach()
    assert batch.expert_R is not None
    elsewhere = at_rows(batch, batch.expert_R) & batch.mask_N
    moved = torch.where(elsewhere, logp - 3, logp)
    policy = regularized(CLIP, kl_coef=0.1, estimator="k3", entropy_coef=0.1)
    a, b = (mixed(policy, sft)(batch, Outputs(logp_N=x, entropy_N=x.exp())).stats for x in (logp, moved))
    for name in a:
        equal = torch.equal(a[name], b[name])
        assert equal != name.startswith("expert_"), name
        assert len(a[name]) == int((elsewhere if name.startswith("expert_") else own(batch).mask_N).sum())


ONLINE = ["grpo", "rloo", "reinforce"]


def algorithm(**settings: Any) -> Any:
    return build(AlgorithmConfig(**settings), critic=CriticConfig(), max_tokens=8)


@pytest.mark.parametrize("name", ONLINE)
def test_advantages_do_not_see_demonstrations(name: str) -> None:
    batch = with_experts(2)
    a = algorithm(name="mix", advantage=name, whiten=True)
    whole = a.advantage(batch, 0.0)
    assert batch.expert_R is not None
    mine = at_rows(batch, ~batch.expert_R)
    alone = a.advantage(without_experts(batch), 0.0)
    torch.testing.assert_close(whole.adv_N[mine], alone.adv_N, rtol=1e-12, atol=1e-14)
    assert whole.adv_N[~mine].abs().sum() == 0
    assert whole.adv_N.abs().sum() > 0
    assert torch.equal(whole.mask_N, batch.mask_N), "what is trained on stays trained on"


def test_numbers_of_the_own_rollouts_at_their_places() -> None:
    batch = replace(
        make_batch([["pa", "pa"], ["pa"], ["pa"]]), expert_R=torch.tensor([False, False, True, False])
    )
    assert among_experts(batch, torch.tensor([2.0, 0.0, 3.0])).tolist() == [2, 0, 1, 3]
    assert without_experts(batch).group_R.tolist() == [0, 0, 1]
    plain = replace(batch, expert_R=None)
    assert own(plain) is plain
    assert without_experts(plain) is plain


# ---------------------------------------------------------------- recipes


@pytest.mark.parametrize(("name", "expert"), [("mix", "sft"), ("mix_chord", "sft_phi"), ("grpo", None)])
def test_a_recipe_says_whether_and_how_it_mixes(name: str, expert: str | None) -> None:
    a = algorithm(name=name)
    assert (a.mu is None) == (expert is None)
    if expert is None:
        return
    batch = with_experts(4)
    batch = replace(batch, weight_N=a.weights(batch, 1))
    logp = logp_now(batch).detach()
    settings = {"phi_cutoff": 1.0} if expert == "sft_phi" else {}
    alone = LOSSES[expert](experts(batch), Outputs(logp_N=logp[at_rows(batch, batch.expert_R)]), **settings)  # type: ignore[arg-type]
    found = a.loss(batch, Outputs(logp_N=logp)).loss_N[at_rows(batch, batch.expert_R)]  # type: ignore[arg-type]
    torch.testing.assert_close(found, alone.loss_N)
    assert float(a.weights(batch, 1)[at_rows(batch, batch.expert_R)].sum()) == pytest.approx(a.mu(1))  # type: ignore[arg-type]
    assert a.mu(1) == 0.1


def test_the_weight_follows_its_schedule() -> None:
    a = algorithm(
        name="mix", mix=MixConfig(mu=0.8, mu_schedule={"warmup_steps": 2, "decay_steps": 2, "valley": 0.2})
    )
    batch = with_experts(4)
    shares = [float(a.weights(batch, step)[at_rows(batch, batch.expert_R)].sum()) for step in (1, 2, 3, 4)]  # type: ignore[arg-type]
    assert shares == pytest.approx([0.4, 0.8, 0.5, 0.2])
    assert [float(a.weights(batch, step).sum()) for step in (1, 4)] == pytest.approx([1, 1])


@settings(deadline=None, max_examples=20)
@given(seed=SEEDS, mu=st.floats(0.01, 0.99), step=st.integers(1, 4))
def test_terms_with_a_mean_of_their_own_belong_to_the_policys_part(seed: int, mu: float, step: int) -> None:
    """Beside a loss that is a mean over tokens, an entropy with a mean of its own is the same; each has 1 - mu."""
    batch = with_experts(seed)
    logp = logp_now(batch, seed=seed).detach()
    out = Outputs(logp_N=logp, entropy_N=logp.exp())

    def total(**said: Any) -> float:
        mix = MixConfig(mu=mu, mu_schedule={"warmup_steps": 3})
        a = algorithm(name="mix", loss_agg_mode="token-mean", kl={"coef": 0.0}, mix=mix, **said)
        weighted = replace(batch, weight_N=a.weights(batch, step))
        loss = a.loss_of(weighted, lambda b, want: logp, a.entropy.coef, step=step)
        assert weighted.weight_N is not None
        return float((loss(weighted, out).loss_N * weighted.weight_N).sum())

    mine = own(batch)
    positive_N = mine.mask_N & (batch.reward_R > 0)[batch.rollout_N]
    nll = float(-logp[positive_N].mean()) if positive_N.any() else 0.0
    share, plain = 1 - mu * min(step / 3, 1), total()
    assert total(entropy_coef=0.5, entropy_agg_mode="token-mean") == pytest.approx(
        total(entropy_coef=0.5), rel=1e-9, abs=1e-12
    )
    assert total(entropy_coef=0.5, entropy_agg_mode="token-mean") - plain == pytest.approx(
        -0.5 * share * float(logp.exp()[mine.mask_N].mean()), rel=1e-6, abs=1e-9
    )
    assert total(positive_nll_coef=0.5) - plain == pytest.approx(0.5 * share * nll, rel=1e-6, abs=1e-9)
