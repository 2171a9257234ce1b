"""The weight of the entropy bonus that follows a target, and tokens left out for what they do to the entropy: by hand,
as laws, and in runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import whet
from batches import doubles, logp_now, make_batch, ragged
from test_learning import ROOT, SETUP, learn, share_of_a
from whet.algos.entropy import EntropyBonus, EntropyControl
from whet.algos.recipes import build
from whet.algos.whitening import without_entropy_losers
from whet.batch import Batch, Outputs
from whet.config import schema
from whet.models.logprobs import OutputHead, discriminants

CONTROL = EntropyControl(coef=0.01, target_nats=0.5, delta=0.005, low=0.0, high=0.02)


def test_by_hand() -> None:
    # entropies 0.7 0.6 0.5 0.4 0.3 0.2 0.9: down, down, up to the target itself, up ... to the bound, down
    bonus, seen = EntropyBonus(0.01), []
    for entropy in (0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.9, 0.1):
        seen.append((CONTROL.weight(bonus), bonus.coef))
        bonus = CONTROL.after(bonus, entropy)
    weights, coefs = zip(*seen, strict=True)
    assert coefs == pytest.approx((0.01, 0.005, 0.0, 0.005, 0.01, 0.015, 0.02, 0.02, 0.015))
    assert weights == pytest.approx((0, 0, 0, 0.005, 0.01, 0.015, 0.02, 0.02, 0)), "0.9 was above the target"
    assert bonus == EntropyBonus(pytest.approx(0.02), 0.1)


def test_a_constant_weight_and_a_step_that_measured_nothing() -> None:
    constant = EntropyControl(coef=-0.1, target_nats=None, delta=0.005, low=0.0, high=1.0)
    assert constant.weight(constant.after(EntropyBonus(-0.1), 0.3)) == -0.1
    assert (constant.is_on, EntropyControl(0.0, None, 1.0, 0.0, 1.0).is_on, CONTROL.is_on) == (
        True,
        False,
        True,
    )
    for nothing in (None, math.nan, math.inf):
        assert CONTROL.after(EntropyBonus(0.01, 0.3), nothing) == EntropyBonus(0.01, 0.3)


@given(st.lists(st.floats(0, 3), max_size=40), st.floats(0.001, 0.1))
def test_the_weight_stays_in_its_bounds_and_moves_by_delta(entropies: list[float], delta: float) -> None:
    control = EntropyControl(0.05, 0.5, delta, 0.02, 0.3)
    bonus = EntropyBonus(control.coef)
    for entropy in entropies:
        now = control.after(bonus, entropy)
        assert 0.02 <= now.coef <= 0.3
        assert abs(now.coef - bonus.coef) <= delta * (1 + 1e-9)
        assert (now.coef - bonus.coef) * (0.5 - entropy) >= 0, "towards the target"
        assert control.weight(now) in (0.0, now.coef)
        bonus = now


def test_the_loss_has_the_weight_of_the_step() -> None:
    batch = ragged(0)
    cfg = schema.AlgorithmConfig(name="grpo", entropy_control={"target": 0.5}, entropy_coef=0.3)
    made = build(cfg, critic=schema.CriticConfig(), max_tokens=4)
    weight_N = made.weights(batch, 1)
    batch = replace(batch, weight_N=weight_N, adv_N=torch.zeros_like(weight_N))
    entropy_N = torch.rand(batch.tokens, dtype=weight_N.dtype, generator=torch.Generator().manual_seed(0))
    out = Outputs(logp_N=logp_now(batch), entropy_N=entropy_N)

    def loss(coef: float) -> float:
        return float(
            (
                made.loss_of(batch, lambda b, want: logp_now(b), coef)(batch, out).loss_N.detach() * weight_N
            ).sum()
        )

    assert loss(0.0) == pytest.approx(0.0, abs=1e-9), "no advantage, no bonus"
    assert loss(0.2) == pytest.approx(-0.2 * float((entropy_N * batch.mask_N * weight_N).sum()), rel=1e-5)


ALGORITHM = {"name": "grpo", "entropy_control": {"target": 2.5, "delta": 0.05, "max": 0.4}}
TRAIN = {"tasks_per_step": 8, "minibatches": 2, "optimizer": {"lr": 1e-2}}


def test_it_holds_the_entropy_up_and_a_run_that_stopped_goes_on_with_the_same_weight(tmp_path: Path) -> None:
    values = SETUP | {
        "data": {"max_prompt_tokens": 8, "train": [{"path": str(ROOT / "tests/data/words.jsonl")}]},
        "rollout": {"group_size": 4, "sampling": {"max_tokens": 5, "ignore_eos": True}},
        "algorithm": ALGORITHM,
        "checkpoint": {"interval": 1, "export": False},
        "rewards": share_of_a,
    }
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    lines = whet.train(run_dir=str(whole), **values, train=TRAIN | {"steps": 20}).metrics
    for steps in (9, 13, 20):
        whet.train(run_dir=str(parted), **values, train=TRAIN | {"steps": steps})
    assert (whole / "metrics.jsonl").read_bytes() == (parted / "metrics.jsonl").read_bytes()
    weights = [line["train/entropy_coef"] for line in lines]
    assert weights[0] == 0, "nothing was measured before the first step"
    assert max(weights) == pytest.approx(0.4), "as far as it may"
    free = learn(tmp_path / "free", {"name": "grpo"}, train=TRAIN | {"steps": 20})
    assert lines[-1]["train/entropy_nats"] > free[-1]["train/entropy_nats"] + 0.3


# ---------------------------------------------------------------- tokens that make the entropy fall


def test_a_discriminant_is_by_how_much_the_entropy_falls_with_the_logit() -> None:
    # p = (1/2, 1/4, 1/4): H = 1.0397208, S = 1/2 (H - log 2) = 0.1732868 and 1/4 (H - log 4) = -0.0866434 twice;
    # their mean over p: 0.0866434 - 0.0433217.
    head = OutputHead(torch.nn.Linear(1, 3, bias=False))
    with torch.no_grad():
        head.linear.weight.copy_(torch.tensor([[0.5], [0.25], [0.25]]).log())
    ones, tokens = torch.ones(3, 1), torch.arange(3)
    for chunk in (2, 128):
        found = discriminants(ones, tokens, head=head, chunk=chunk)
        assert found.tolist() == pytest.approx([0.1732868, -0.0866434, -0.0866434], abs=1e-6)
        centred = discriminants(ones, tokens, head=head, centred=True, chunk=chunk)
        assert centred.tolist() == pytest.approx([x - 0.0433217 for x in found.tolist()], abs=1e-6)
    logits = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    (slope,) = torch.autograd.grad(torch.distributions.Categorical(logits=logits).entropy(), logits)
    wide = OutputHead(torch.nn.Linear(1, 7, bias=False))
    with torch.no_grad():
        wide.linear.weight.copy_(logits.detach().float()[:, None] * 0.7)
    found = discriminants(torch.ones(7, 1), torch.arange(7), head=wide, temperature=0.7)
    torch.testing.assert_close(found.double(), -slope, rtol=1e-5, atol=1e-6)


def advantages(batch: Batch, **keys: object) -> list[float]:
    cfg = schema.AlgorithmConfig.model_validate({"name": "dr_grpo", **keys})
    made = build(cfg, critic=schema.CriticConfig(), max_tokens=8)
    adv_N = made.advantage(batch, 0.0).adv_N
    assert adv_N is not None
    assert made.weights(batch, 1)[batch.mask_N].tolist() == [1 / 16] * int(batch.mask_N.sum()), (
        "they keep their place"
    )
    return adv_N[batch.mask_N].tolist()


def test_entropy_clip_by_hand() -> None:
    # Advantages 1/2 (two tokens) and -1/2 (four); v = -S = 4 1 | 3 1 -1 -8.
    batch = make_batch([["paa", "paaaa"]], [1.0, 0.0])
    s = [-4.0, -1.0, -3.0, -1.0, 1.0, 8.0]
    batch = replace(batch, discriminant_N=doubles([0, *s[:2], 0, *s[2:]]))
    # Mean 0, std = sqrt((16 + 1 + 9 + 1 + 1 + 64) / 6) = 3.9158: v = 4 is a good token's, 3 > 0.7 std, 1 > 0.2 std.
    kept = [0.5, 0.5, -0.5, -0.5, -0.5, -0.5]
    first, both = [0.5, 0.5, 0, -0.5, -0.5, -0.5], [0.5, 0.5, 0, 0, -0.5, -0.5]
    for mu, expected in ((0.8, kept), (0.7, first), (0.2, both)):
        assert advantages(batch, entropy_clip={"name": "batch", "mu": mu}) == expected
        assert advantages(batch, entropy_clip={"name": "vocabulary", "mu": mu}) == expected, "the mean is 0"
    one = {"name": "batch", "mu": 0.2, "max_frac": 0.3}
    assert advantages(batch, entropy_clip=one) == first, "int(0.3 * 6) = 1, the farthest"
    assert advantages(batch, entropy_clip={**one, "max_frac": 1e-4}) == first, "at least one"
    moved = replace(
        batch, discriminant_N=doubles([0, *(x - 3.2 for x in s[:2]), 0, *(x - 3.2 for x in s[2:])])
    )
    assert advantages(moved, entropy_clip={"name": "batch", "mu": 0.7}) == first, "against their mean"
    # v = 7.2 4.2 | 6.2 4.2 2.2 -4.8 against 0.7 * 3.9158 = 2.74.
    assert advantages(moved, entropy_clip={"name": "vocabulary", "mu": 0.7}) == both, "as they are"
    equal = replace(batch, discriminant_N=torch.full_like(batch.discriminant_N, -1.0))
    assert advantages(equal, entropy_clip={"name": "vocabulary", "mu": 0.1}) == kept, (
        "no deviation, nothing to compare"
    )


@given(st.integers(0, 10_000), st.booleans(), st.floats(0.05, 3.0), st.none() | st.floats(0.01, 1.0))
@settings(max_examples=60, deadline=None)
def test_entropy_clip_against_lists(seed: int, centred: bool, mu: float, max_frac: float | None) -> None:
    batch = ragged(seed)
    rng = torch.Generator().manual_seed(seed)
    s_N = torch.randn(batch.tokens, generator=rng).double()
    adv_N = torch.randint(-1, 2, (batch.tokens,), generator=rng).double() * batch.mask_N
    got = without_entropy_losers(adv_N, s_N, batch.mask_N, centred=centred, mu=mu, max_frac=max_frac)
    at = [n for n, sampled in enumerate(batch.mask_N.tolist()) if sampled]
    v = {n: -float(s_N[n]) for n in at}
    mean = sum(v.values()) / len(at)
    std = math.sqrt(sum((x - mean) ** 2 for x in v.values()) / len(at))
    out = [
        n for n in at if float(adv_N[n]) < 0 and (v[n] if centred else v[n] - mean) > mu * std >= 1e-12 * mu
    ]
    out.sort(key=lambda n: -v[n])
    if max_frac is not None:
        out = out[: max(1, int(max_frac * len(at)))]
    assert got.tolist() == [0.0 if n in out else a for n, a in enumerate(adv_N.tolist())]


@pytest.mark.parametrize("by", ["batch", pytest.param("vocabulary", marks=pytest.mark.sweep)])
def test_entropy_clip_learns_and_keeps_entropy(tmp_path: Path, by: str) -> None:
    lines = learn(tmp_path / by, {"name": "grpo", "entropy_clip": {"name": by, "mu": 1.0}})
    assert sum(line["reward/mean"] for line in lines[-3:]) / 3 > 0.8
