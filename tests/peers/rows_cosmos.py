"""Cosmos-RL: its advantage, its loss with variants, KL and aggregation, DPO and learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from peers import ours
from peers.ours import TOTAL, schedule
from peers.table import Row
from whet.prove import cosmos
from whet.prove.cases import Case, in_pair_order
from whet.prove.cosmos import ADVANTAGE, FLOAT32, GRPO, SCHEDULERS, P
from whet.prove.numbers import Numbers
from whet.types import Json

NEAR = ("one turn", "several turns", "a group of one")


def loss(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    return cosmos.loss(function, case, cosmos.section(keys))


def advantage(made: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    return cosmos.advantage(made, case, cosmos.section(keys))


def rates(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    told = {key.removeprefix("train."): value for key, value in keys.items() if key.startswith("train.optm")}
    defaults = {"optm_warmup_start_factor": 0.0, "optm_decay_ratio": None, "optm_min_lr_factor": 0.0}
    return {"factor": cosmos.rates(SimpleNamespace(**defaults | told), TOTAL)}


def dpo(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    logp = case.padded(case.logp_N).requires_grad_()

    def sums(x: Tensor) -> tuple[Tensor, ...]:
        return in_pair_order(case, (x * case.mask).sum(-1)).chunk(2)

    ref = sums(case.padded(case.batch.logp_ref_N))
    total = function(
        *sums(logp),
        float(keys["dpo_beta"]),
        reference_chosen_logps=ref[0],
        reference_rejected_logps=ref[1],
    )
    total.backward()
    return {"loss": total.detach(), "grad": logp.grad}


def policy(keys: Mapping[str, Json], covers: tuple[str, ...], **rest: Any) -> Row:
    return Row(
        peer="cosmos",
        what=", ".join(f"{key}={value}" for key, value in keys.items()),
        theirs=GRPO,
        call=loss,
        ours=ours.loss,
        keys={P + key: value for key, value in keys.items()},
        covers=covers,
        **{"tolerance": 1e-7, **rest},
    )


LOSSES = (
    policy({"epsilon_low": 0.2, "epsilon_high": 0.28, "lower_bound_ratio": 1.5}, ("loss ppo",)),
    policy({"epsilon_low": -1.0, "epsilon_high": -1.0}, ("loss ppo",)),
    policy({"variant": "gspo", "epsilon_low": 0.05, "epsilon_high": 0.1}, ("loss gspo",)),
    policy({"aipo_rho": 1.2}, ("loss aipo",)),
    policy({"off_policy_masking_delta": 0.05}, ("loss ppo",)),
    policy({"use_rollout_logprobs_for_loss": True}, ("loss ppo",)),
    policy(
        {"use_decoupled_loss": True, "behav_imp_weight_cap": 1.2},
        ("correction weight: token", "correction denominator: all"),
        kinds=NEAR,
    ),
    policy({"loss_type": "seq-mean-token-mean"}, ("aggregation seq-mean-token-mean",)),
    policy({"loss_type": "seq-mean-token-sum"}, ("aggregation seq-mean-token-sum",)),
    policy({"loss_type": "token-mean"}, ("aggregation token-mean",)),
    policy({"loss_type": "token-sum"}, ("aggregation token-sum",)),
    policy(
        {"unbiased_loss_max_tokens": 24, "loss_type": "seq-mean-token-mean"},
        ("aggregation seq-mean-token-sum-norm",),
    ),
    policy({"kl_beta": 0.3}, ("kl low_var_kl",)),
    policy({"kl_beta": 0.3, "unbiased_kl_estimate": True}, ("kl unbiased_k3",)),
)


def estimator(unbiased: bool, **rest: Any) -> Row:
    return Row(
        peer="cosmos",
        what=f"advantage of GRPO, unbiased_advantage={unbiased}",
        theirs=ADVANTAGE,
        call=advantage,
        ours=ours.advantage,
        keys={f"{P}unbiased_advantage": unbiased},
        covers=("advantage grpo",),
        tolerance=FLOAT32,
        **rest,
    )


ADVANTAGES = (
    estimator(False, kinds=("one turn", "several turns")),
    estimator(True, kinds=("one turn", "several turns")),
    estimator(
        False,
        kinds=("a group of one",),
        differs="a reply alone keeps its reward as the advantage here; Cosmos trains only groups of two or more "
        "(docs/algorithms.md, `grpo`)",
    ),
)


def rate(kind: str, ratio: float | None) -> Row:
    keys = {
        "train.max_num_steps": TOTAL,
        "train.optm_warmup_steps": 5,
        "train.optm_decay_type": kind,
        "train.optm_min_lr_factor": 0.1,
        "train.optm_decay_ratio": ratio,
    }
    return Row(
        peer="cosmos",
        what=f"learning rate, optm_decay_type={kind}, optm_decay_ratio={ratio}",
        theirs=SCHEDULERS,
        call=rates,
        ours=schedule,
        keys=keys,
        covers=("schedule",),
        kinds=("one turn",),
    )


OTHERS = (
    Row(
        peer="cosmos",
        what="DPO with a reference, dpo_beta=0.3",
        theirs="cosmos_rl.policy.trainer.llm_trainer.dpo_trainer:dpo_loss",
        call=dpo,
        ours=ours.loss,
        keys={"dpo_beta": 0.3},
        native={"name": "dpo", "beta": 0.3},
        covers=("loss dpo",),
        kinds=("pairs",),
    ),
    *(rate(kind, ratio) for kind in ("linear", "cosine", "sqrt") for ratio in (None, 0.5)),
)

ROWS = (*ADVANTAGES, *LOSSES, *OTHERS)
