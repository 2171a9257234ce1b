"""TRL: the losses of its GRPO trainer.

Each trainer's own method computes the loss, with a stand-in for the trainer that has the settings, and for the model
that has the log-probs. Its group advantages are part of the generation loop and cannot be called apart, so they are not
compared.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from peers import ours
from peers.table import Row
from whet.algos.entropy import EntropyBonus
from whet.algos.segments import need
from whet.algos.whitening import of_top_entropy
from whet.batch import Outputs
from whet.config.schema import AlgorithmConfig
from whet.prove import numbers
from whet.prove.cases import Case
from whet.prove.numbers import Numbers
from whet.prove.peers import theirs
from whet.types import Json

FLOAT32 = 2e-6
NEAR = ("one turn", "several turns", "a group of one")


def trainer(**settings: Any) -> Any:
    """What the methods read of a trainer on one process."""

    def same(x: Any, *rest: Any, **more: Any) -> Any:
        return x

    accelerator = SimpleNamespace(
        gather=same,
        gather_for_metrics=same,
        reduce=same,
        pad_across_processes=same,
        num_processes=1,
        device=torch.device("cpu"),
    )
    common = {
        "accelerator": accelerator,
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**common | settings)


# ---------------------------------------------------------------- GRPO


def grpo(method: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """`_compute_loss` over one generation batch; advantages are one number a reply."""
    logp = case.padded(case.logp_N).requires_grad_()
    made, inputs = of_grpo(case, keys, logp, torch.zeros_like(logp))
    total = method(made, None, inputs)
    total.backward()
    return {"loss": total.detach(), "grad": logp.grad}


def of_grpo(
    case: Case, keys: Mapping[str, Json], logp: Tensor, entropy: Tensor
) -> tuple[Any, dict[str, Tensor]]:
    """The trainer with these settings, whose policy gives these log-probs and entropies, and a batch for it."""
    args = theirs("trl", "trl.trainer.grpo_config:GRPOConfig")
    told = {name: field.default for name, field in args.__dataclass_fields__.items()} | dict(keys)
    told |= {"steps_per_generation": 1}
    has_high = told["epsilon_high"] is not None
    made = trainer(
        args=SimpleNamespace(**told),
        beta=told["beta"],
        loss_type=told["loss_type"],
        importance_sampling_level=told["importance_sampling_level"],
        epsilon_low=told["epsilon"],
        epsilon_high=told["epsilon_high"] if has_high else told["epsilon"],
        off_policy_mask_threshold=told["off_policy_mask_threshold"],
        get_gamma_weights=theirs("trl", "trl.trainer.grpo_trainer:GRPOTrainer.get_gamma_weights"),
        get_off_policy_mask=theirs("trl", "trl.trainer.grpo_trainer:GRPOTrainer.get_off_policy_mask"),
        get_high_entropy_mask=lambda *args: theirs(
            "trl", "trl.trainer.grpo_trainer:GRPOTrainer.get_high_entropy_mask"
        )(made, *args),
        top_entropy_quantile=told["top_entropy_quantile"],
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        max_completion_length=case.width,
        entropy_coef=told["entropy_coef"],
        use_adaptive_entropy=told["use_adaptive_entropy"],
        _entropy_bonus_enabled=told["entropy_coef"] != 0 or told["use_adaptive_entropy"],
        _last_world_entropy=float("inf"),
        _entropy_window_stats=None,
        _get_per_token_logps_and_entropies=lambda *args, **more: (logp, entropy, None),
    )
    nothing = torch.zeros(case.batch.rollouts, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": case.exists.long(),
        "completion_mask": case.exists,
        "tool_mask": case.mask,
        "advantages": case.padded(case.batch.adv_N)[:, 0],
        "old_per_token_logps": case.padded(case.batch.logp_old_N),
        "ref_per_token_logps": case.padded(case.batch.logp_ref_N),
        "sampling_per_token_logps": case.padded(case.batch.logp_sample_N),
        "num_items_in_batch": case.mask.sum(),
    }
    return made, inputs


def entropies(case: Case, step: int) -> Tensor:
    """[N] of the policy in an optimizer step, in nats: by the step their mean is above 0.5 or below. Float32 has them
    all, for TRL rounds the bound of a quantile to it."""
    made = torch.Generator().manual_seed(100 * case.seed + step)
    most = (0.3, 1.6, 0.8, 0.9, 1.4, 0.2)[step]
    return (most * torch.rand(case.batch.tokens, generator=made)).double() * case.batch.mask_N


STEPS = 6


def adaptive(method: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """The loss, and the weight of the entropy after it, in a few optimizer steps."""
    logp, losses, weights = case.padded(case.logp_N), [], []
    made, inputs = of_grpo(case, keys, logp, torch.zeros_like(logp))
    made.accelerator.sync_gradients = True
    for step in range(STEPS):
        entropy = case.padded(entropies(case, step))
        made._get_per_token_logps_and_entropies = lambda *args, x=entropy, **more: (logp, x, None)
        losses.append(method(made, None, inputs))
        weights.append(made.entropy_coef)
    return {"losses": torch.stack(losses), "coef": torch.tensor(weights, dtype=torch.float64)}


def our_adaptive(row: Row, case: Case) -> Numbers:
    """The same of whet, as the learner takes its steps."""
    made = ours.algorithm(row, width=case.width)
    batch = numbers.before(made, case.batch)
    batch = replace(batch, weight_N=made.weights(batch, 1))
    bonus, losses, weights = EntropyBonus(made.entropy.coef), [], []
    for step in range(STEPS):
        entropy_N = entropies(case, step)
        loss = made.loss_of(batch, lambda *said: case.logp_N, made.entropy.weight(bonus))
        found = loss(batch, Outputs(logp_N=case.logp_N, entropy_N=entropy_N))
        losses.append((found.loss_N * batch.weight_N).sum())
        bonus = made.entropy.after(bonus, float(entropy_N[batch.mask_N].mean()))
        weights.append(bonus.coef)
    return {"losses": torch.stack(losses), "coef": torch.tensor(weights, dtype=torch.float64)}


def of_entropy(method: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """The loss where only tokens of high entropy are learned from."""
    logp = case.padded(case.logp_N).requires_grad_()
    made, inputs = of_grpo(case, keys, logp, case.padded(entropies(case, 0)))
    total = method(made, None, inputs)
    total.backward()
    return {"loss": total.detach(), "grad": logp.grad}


def our_top_entropy(row: Row, case: Case) -> Numbers:
    """The same of whet, which takes the advantage off the other tokens. The advantage of the case is given."""
    made = ours.algorithm(row, width=case.width)
    chosen = AlgorithmConfig.model_validate_json(json.dumps(dict(row.native or {})))
    adv_N = of_top_entropy(
        need(case.batch.adv_N, "adv_N"),
        entropies(case, 0),
        case.batch.mask_N,
        quantile=chosen.top_entropy_quantile,
    )
    return numbers.loss(made, replace(case, batch=replace(case.batch, adv_N=adv_N)))


def policy(keys: Mapping[str, Json], native: Mapping[str, Json], covers: tuple[str, ...], **rest: Any) -> Row:
    return Row(
        peer="trl",
        what="GRPO, " + ", ".join(f"{key}={value}" for key, value in keys.items()),
        theirs="trl.trainer.grpo_trainer:GRPOTrainer._compute_loss",
        keys=keys,
        native={"name": "grpo", "old_logprobs": "recompute", **native},
        covers=covers,
        **{"call": grpo, "ours": ours.loss, "kinds": NEAR, **rest},
    )


GRPO = (
    policy({"loss_type": "grpo"}, {}, ("loss ppo", "aggregation seq-mean-token-mean")),
    policy(
        {"loss_type": "bnpo", "epsilon_high": 0.28},
        {"loss_agg_mode": "token-mean", "clip_high": 0.28},
        ("loss ppo", "aggregation token-mean"),
    ),
    policy(
        {"loss_type": "dr_grpo"},
        {"loss_agg_mode": "seq-mean-token-sum-norm"},
        ("aggregation seq-mean-token-sum-norm",),
    ),
    policy({"loss_type": "dapo"}, {"loss_agg_mode": "token-mean"}, ("aggregation token-mean",)),
    policy({"loss_type": "grpo", "delta": 1.5}, {"dual_clip": 1.5}, ("loss ppo",)),
    policy(
        {"loss_type": "cispo", "epsilon_high": 1.3},
        {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.3, "loss_agg_mode": "token-mean"},
        ("loss cispo",),
    ),
    policy(
        {"loss_type": "sapo"},
        {"loss": "sapo", "tau_pos": 1.0, "tau_neg": 1.05},
        ("loss sapo",),
    ),
    policy(
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05},
        {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.05},
        ("loss gspo",),
    ),
    policy(
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
        {"kl": {"coef": 0.3, "estimator": "k3"}},
        ("kl k3",),
    ),
    policy(
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": True},
        {"kl": {"coef": 0.3, "estimator": "unbiased_k3"}},
        ("kl unbiased_k3",),
    ),
    policy(
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": True},
        {"kl": {"coef": 0.3, "estimator": "unbiased_k3"}},
        ("kl unbiased_k3",),
        kinds=("far apart",),
        differs="TRL's KL has no bounds (docs/algorithms.md, `unbiased_k3`)",
    ),
    policy(
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
        {"sequence_mask_delta": 0.05, "sequence_mask_anchor": "sampled"},
        ("loss ppo",),
    ),
    policy(
        {"loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_neg": 2.5},
        {"loss": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_neg": 2.5, "loss_agg_mode": "token-mean"},
        ("loss vespo",),
        kinds=(*NEAR, "far apart"),
    ),
    policy(
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.05},
        {"name": "luspo", "clip_low": 0.05, "clip_high": 0.05},
        ("loss gspo", "aggregation seq-mean-token-sum"),
    ),
    policy(
        {"loss_type": "dapo", "top_entropy_quantile": 0.3},
        {"loss_agg_mode": "token-mean", "top_entropy_quantile": 0.3},
        ("loss ppo",),
        call=of_entropy,
        ours=our_top_entropy,
    ),
    policy(
        {
            "loss_type": "dapo",
            "use_adaptive_entropy": True,
            "entropy_coef": 0.1,
            "entropy_target": 0.5,
            "entropy_coef_delta": 0.02,
            "entropy_coef_min": 0.07,
            "entropy_coef_max": 0.13,
        },
        {
            "loss_agg_mode": "token-mean",
            "entropy_agg_mode": "token-mean",
            "entropy_coef": 0.1,
            "entropy_control": {"target": 0.5, "delta": 0.02, "min": 0.07, "max": 0.13},
        },
        ("loss ppo",),
        call=adaptive,
        ours=our_adaptive,
    ),
)

ROWS = GRPO
