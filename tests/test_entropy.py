"""The weight of the entropy bonus that follows a target: by hand, as laws, and in runs that stop and go on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import whet
from batches import logp_now, ragged
from test_learning import ROOT, SETUP, learn, share_of_a
from whet.algos.entropy import EntropyBonus, EntropyControl
from whet.algos.recipes import build
from whet.batch import Outputs
from whet.config import schema

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
    cfg = schema.AlgorithmConfig(name="grpo", entropy_target=0.5, entropy_coef=0.3)
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


ALGORITHM = {"name": "grpo", "entropy_target": 2.5, "entropy_coef_delta": 0.05, "entropy_coef_max": 0.4}
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
