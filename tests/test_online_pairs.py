"""Preferences between the policy's own replies: the best and the worst of a group (online DPO)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batches import doubles, logp_now, make_batch
from test_learning import learn
from whet.algos.preference import dpo
from whet.algos.recipes import build
from whet.batch import Outputs
from whet.config import schema
from whet.config.functions import LOSSES as ROWS
from whet.config.recipes import resolve
from whet.types import ConfigError


def made(**keys: Any) -> Any:
    cfg = schema.AlgorithmConfig.model_validate({"name": "online_dpo", **keys})
    return build(cfg, critic=schema.CriticConfig(), max_tokens=8)


def test_by_hand() -> None:
    # Two groups. d of the better reply less d of the worse: (1 + 0.5) - 0.5 = 1 and 0.2 - 1.2 = -1; beta = 1/2.
    batch = make_batch([["paa", "pa"], ["pa", "pa"]], [1.0, 0.0, -2.0, 3.0])
    gap = {1: 1.0, 2: 0.5, 4: 0.5, 6: 1.2, 8: 0.2}
    logp_N = doubles([gap.get(n, 0.0) - 3 for n in range(batch.tokens)]).requires_grad_()
    batch = replace(batch, logp_ref_N=torch.full((batch.tokens,), -3.0).double())
    algorithm = made(loss={"beta": 0.5})
    batch = algorithm.advantage(batch, 0.0)
    batch = replace(batch, weight_N=algorithm.weights(batch, 1))
    found = algorithm.loss_of(batch, lambda b, want: logp_now(b), 0.0)(batch, Outputs(logp_N=logp_N))
    total = (found.loss_N * batch.weight_N).sum()
    # mean of log(1 + e^-0.5) and log(1 + e^0.5)
    assert total.item() == pytest.approx((math.log1p(math.exp(-0.5)) + math.log1p(math.exp(0.5))) / 2)
    (gradient,) = torch.autograd.grad(total, logp_N)
    # 1/2 beta s(-beta z) for the better one's tokens, minus that for the worse one's: s(-0.5) = 0.37754
    push = [0, -0.0943852, -0.0943852, 0, 0.0943852, 0, 0.1556148, 0, -0.1556148]
    assert gradient.tolist() == pytest.approx(push, abs=1e-6)
    plain = dpo(batch, Outputs(logp_N=logp_N), **ROWS["dpo"].settings(beta=0.5).model_dump())
    assert torch.equal(plain.loss_N, found.loss_N), "DPO's own loss"
    assert found.stats["accuracy"].tolist() == [1, 1, 0, 0]


def test_its_parts() -> None:
    r = resolve(schema.AlgorithmConfig(name="online_dpo"))
    assert (r.kind, r.pairs, r.loss_agg_mode, r.dynamic_sampling) == ("online", True, "pair-mean", True)
    assert (r.groups.keep_best, r.groups.keep_worst, r.needs_reference) == (1, 1, True)
    assert made().whole_groups, "no micro-batch cuts a pair"
    other = resolve(schema.AlgorithmConfig(name="grpo", loss="online_dpo"))
    assert (other.loss_agg_mode, other.groups.keep_best) == ("pair-mean", 1), "whatever the recipe"
    with pytest.raises(ConfigError, match="is not a loss on pairs"):
        resolve(schema.AlgorithmConfig(name="online_dpo", loss="ppo"))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"advantage": "grpo"}, "without advantages and ratios"),
        ({"correction": {"weight": "token"}}, "without advantages and ratios"),
        ({"groups": {"keep_best": 2}}, "compares the best and the worst reply of each group"),
        ({"entropy_coef": 0.1}, "one number per pair"),
    ],
)
def test_what_has_no_effect_is_refused(tmp_path: Path, keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        learn(tmp_path, {"name": "online_dpo", **keys})


@pytest.mark.parametrize("group_size", [2, 4])
def test_it_learns_from_two_replies_of_each_group(tmp_path: Path, group_size: int) -> None:
    train = {"steps": 10, "tasks_per_step": 8, "minibatches": 2, "optimizer": {"lr": 5e-3}}
    lines = learn(
        tmp_path,
        {"name": "online_dpo"},
        train=train,
        rollout={"group_size": group_size, "sampling": {"max_tokens": 5, "ignore_eos": True}},
    )
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[:3]) / 3 < 0.4
    assert sum(rewards[-3:]) / 3 > 0.5
    assert lines[-1]["train/margin"] > lines[0]["train/margin"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(row["train/loss"]) for row in rows)
