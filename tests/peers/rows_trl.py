"""TRL: the losses of its trainers.

Each trainer's own method computes the loss, with a stand-in for the trainer that has the settings, and for the model
that has the log-probs. Its group advantages are part of the generation loop and cannot be called apart, so they are not
compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from peers import ours
from peers.table import Row
from whet.prove.cases import Case, in_pair_order
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
        gather=same, gather_for_metrics=same, reduce=same, num_processes=1, device=torch.device("cpu")
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
        top_entropy_quantile=1.0,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        max_completion_length=case.width,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *args, **more: (logp, torch.zeros_like(logp), None),
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
    total = method(made, None, inputs)
    total.backward()
    return {"loss": total.detach(), "grad": logp.grad}


def policy(keys: Mapping[str, Json], native: Mapping[str, Json], covers: tuple[str, ...], **rest: Any) -> Row:
    return Row(
        peer="trl",
        what="GRPO, " + ", ".join(f"{key}={value}" for key, value in keys.items()),
        theirs="trl.trainer.grpo_trainer:GRPOTrainer._compute_loss",
        call=grpo,
        ours=ours.loss,
        keys=keys,
        native={"name": "grpo", "old_logprobs": "recompute", **native},
        covers=covers,
        **{"kinds": NEAR, **rest},
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
)

# ---------------------------------------------------------------- pairs and labels


def outputs(logps: Tensor, mask: Tensor) -> SimpleNamespace:
    """What the model's fused head gives."""
    return SimpleNamespace(
        log_probs=logps * mask,
        entropy=torch.zeros_like(logps),
        mean_logits=torch.zeros_like(logps),
        is_top1=torch.zeros_like(logps, dtype=torch.bool),
        label_mask=mask,
    )


def sequences(mask: Tensor) -> dict[str, Tensor]:
    """Token ids and masks with one token of prompt before the replies."""
    whole = torch.cat([torch.zeros(len(mask), 1), mask], -1)
    return {
        "input_ids": torch.ones_like(whole).long(),
        "attention_mask": torch.ones_like(whole).long(),
        "completion_mask": whole.long(),
    }


def dpo(method: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    logp = case.padded(case.logp_N).requires_grad_()
    mask = in_pair_order(case, case.mask)
    ref = (in_pair_order(case, case.padded(case.batch.logp_ref_N)) * mask).sum(-1)
    made = trainer(
        beta=keys["beta"],
        label_smoothing=keys.get("label_smoothing", 0.0),
        loss_types=[keys["loss_type"]],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        precompute_ref_logps=True,
        use_weighting=False,
    )
    chosen, rejected = ref.chunk(2)
    inputs = {**sequences(mask), "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    total = method(made, lambda **more: outputs(in_pair_order(case, logp), mask), inputs, False)
    total.backward()
    return {"loss": total.detach(), "grad": logp.grad}


def kto(method: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    logp = case.padded(case.logp_N).requires_grad_()
    mask = case.mask
    made = trainer(
        beta=keys["beta"],
        desirable_weight=keys["desirable_weight"],
        undesirable_weight=keys["undesirable_weight"],
        loss_type="kto",
        calculate_KL=True,
        precompute_ref_logps=True,
        _compute_kl_logps=lambda model, batch: case.batch.kl_zero_R,
    )
    inputs = {
        **sequences(mask),
        "label": case.batch.reward_R > 0,
        "ref_logps": (case.padded(case.batch.logp_ref_N) * mask).sum(-1),
        "ref_KL_logps": torch.zeros_like(case.batch.kl_zero_R),
    }
    total = method(made, lambda **more: outputs(logp, mask), inputs, False)
    total.backward()
    return {"loss": total.detach(), "grad": logp.grad}


def means(case: Case, logp: Tensor) -> tuple[Tensor, Tensor]:
    """[pairs] mean log-probs of the chosen and of the rejected replies."""
    mean = (logp * case.mask).sum(-1) / case.mask.sum(-1)
    chosen, rejected = in_pair_order(case, mean).chunk(2)
    return chosen, rejected


def orpo(made: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """`get_batch_loss_metrics` with a forward pass whose cross entropy is TRL's: over the tokens of the batch, or
    (first_term=reply) the paper's."""
    logp = case.padded(case.logp_N).requires_grad_()
    chosen, rejected = means(case, logp)
    mask = in_pair_order(case, case.mask).chunk(2)[0]
    by_token = -(in_pair_order(case, logp).chunk(2)[0] * mask).sum() / mask.sum()
    nll = -chosen.mean() if keys["first_term"] == "reply" else by_token
    self = trainer(beta=keys["beta"])
    self.odds_ratio_loss = lambda *told: made.odds_ratio_loss(self, *told)
    nothing = torch.zeros(1)
    self.concatenated_forward = lambda model, batch: (chosen, rejected, nothing, nothing, nll)
    total, _ = made.get_batch_loss_metrics(self, None, {})
    total.backward()
    return {"loss": total.detach(), "grad": logp.grad}


def simpo(method: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """CPO's trainer with loss_type=simpo and cpo_alpha=0."""
    logp = case.padded(case.logp_N).requires_grad_()
    made = trainer(
        alpha=0.0,
        beta=keys["beta"],
        simpo_gamma=keys["simpo_gamma"],
        label_smoothing=0.0,
        loss_type="simpo",
    )
    total = method(made, *means(case, logp))[0].mean()
    total.backward()
    return {"loss": total.detach(), "grad": logp.grad}


def sft(method: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    logp = case.padded(case.logp_N).requires_grad_()
    made = trainer(
        compute_loss_func=None,
        label_smoother=None,
        args=SimpleNamespace(loss_type=keys["loss_type"], average_tokens_across_devices=True),
    )
    made.accelerator.parallelism_config, made.get_tp_size = None, lambda: 1
    inputs = {**sequences(case.mask), "labels": case.mask.long()}
    total = method(made, lambda **more: outputs(logp, case.mask), inputs, False, case.mask.sum())
    total.backward()
    return {"loss": total.detach(), "grad": logp.grad}


def given(
    what: str, path: str, call: Any, keys: Mapping[str, Json], native: Mapping[str, Json], **rest: Any
) -> Row:
    return Row(
        peer="trl",
        what=f"{what}, " + ", ".join(f"{key}={value}" for key, value in keys.items()),
        theirs=f"trl.{path}",
        call=call,
        ours=ours.loss,
        keys=keys,
        native=native,
        covers=rest.pop("covers", (f"loss {native['name']}",)),
        **{"kinds": ("pairs",), **rest},
    )


DPO = "trainer.dpo_trainer:DPOTrainer._compute_loss"

GIVEN = (
    given("DPO", DPO, dpo, {"loss_type": "sigmoid", "beta": 0.3}, {"name": "dpo", "beta": 0.3}),
    given(
        "DPO",
        DPO,
        dpo,
        {"loss_type": "robust", "beta": 0.3, "label_smoothing": 0.1},
        {"name": "dpo", "beta": 0.3, "pair_loss": "robust", "label_smoothing": 0.1},
    ),
    given(
        "DPO",
        DPO,
        dpo,
        {"loss_type": "hinge", "beta": 0.3},
        {"name": "dpo", "beta": 0.3, "pair_loss": "hinge"},
    ),
    given(
        "DPO",
        DPO,
        dpo,
        {"loss_type": "ipo", "beta": 0.3},
        {"name": "dpo", "beta": 0.3, "pair_loss": "ipo"},
    ),
    given(
        "KTO",
        "trainer.kto_trainer:KTOTrainer._compute_loss",
        kto,
        {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8},
        {"name": "kto", "beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8},
    ),
    given(
        "ORPO",
        "experimental.orpo.orpo_trainer:ORPOTrainer",
        orpo,
        {"beta": 0.2, "first_term": "reply"},
        {"name": "orpo", "odds_weight": 0.2},
        tolerance=FLOAT32,
    ),
    given(
        "ORPO",
        "experimental.orpo.orpo_trainer:ORPOTrainer",
        orpo,
        {"beta": 0.2, "first_term": "token"},
        {"name": "orpo", "odds_weight": 0.2},
        tolerance=FLOAT32,
        differs="TRL's first term is a mean over the tokens of the batch (docs/algorithms.md, `orpo`)",
    ),
    given(
        "SimPO (CPO's trainer)",
        "experimental.cpo.cpo_trainer:CPOTrainer.cpo_loss",
        simpo,
        {"beta": 2.0, "simpo_gamma": 0.5},
        {"name": "simpo", "beta": 2.0, "target_margin": 0.5},
    ),
    given(
        "SFT",
        "trainer.sft_trainer:SFTTrainer.compute_loss",
        sft,
        {"loss_type": "nll"},
        {"name": "sft"},
        kinds=("one turn", "several turns"),
    ),
    given(
        "SFT",
        "trainer.sft_trainer:SFTTrainer.compute_loss",
        sft,
        {"loss_type": "dft"},
        {"name": "sft_is"},
        kinds=("one turn", "several turns"),
    ),
)

ROWS = (*GRPO, *GIVEN)
