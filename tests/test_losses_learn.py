"""Policy losses in a whole run, with two optimizer steps a batch: what they are paid for rises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swept import except_for
from test_learning import learn

RECIPES: dict[str, dict[str, Any]] = {
    "gspo": {"loss": {"clip_low": 0.1, "clip_high": 0.1}},
    "cispo": {},
    "sapo": {},
    "gmpo": {},
    "clip_cov": {"loss": {"clip_cov_lb": 0.1}},
    "kl_cov": {},
    "dppo": {},
    "softmax_ppo": {},
    "m2po": {"loss": {"m2_threshold": 0.001}},
    "vespo": {},
    "dro": {},
    "reinforce_pp": {"loss": "reinforce_is"},
    "rec": {"loss": {"rec_clip_mode": "ring"}},
    "opmd": {},
    "grpo": {"loss": "rollout_is", "positive_nll_coef": 0.1},
    "rloo": {"top_entropy_quantile": 0.5, "loss": "ppo"},
}

FEW = ("gspo", "clip_cov", "opmd", "grpo")
"""Ratios of sequences, a choice of tokens, no ratios, weights of what was sampled. tests/test_losses_oracle.py has the
formula and the gradient of each loss, tests/test_dead_native.py runs each."""


@pytest.mark.parametrize("name", except_for(FEW.__contains__, RECIPES))
def test_reward_rises(tmp_path: Path, name: str) -> None:
    train = {"steps": 15, "tasks_per_step": 8, "minibatches": 2, "optimizer": {"lr": 1e-2}}
    metrics = learn(tmp_path, {"name": name, **RECIPES[name]}, train=train)
    rewards = [m["reward/mean"] for m in metrics]
    assert sum(rewards[:3]) / 3 < 0.3, "a new model must not know it yet"
    assert sum(rewards[-3:]) / 3 > 0.5
    if name.endswith("_cov"):
        assert all(m["train/cov_picked_frac"] >= 0 for m in metrics)
        assert sum(m["train/cov_picked_frac"] for m in metrics) > 0


def test_topr_learns_from_rewards_of_both_signs(tmp_path: Path) -> None:
    """Its advantage is the reward itself; whitened, half of it is negative."""
    metrics = learn(tmp_path, {"name": "topr", "whiten": True})
    assert metrics[-1]["reward/mean"] > 0.6
    assert 0 < metrics[-1]["train/taper"] <= 1
