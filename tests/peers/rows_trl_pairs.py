"""TRL: the losses of its trainers on pairs, labels and demonstrations, and its moves of the reference.

As in `rows_trl`, each trainer's own method computes the loss, with stand-ins for the trainer and the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from peers import ours
from peers.rows_trl import FLOAT32, trainer
from peers.table import Row
from whet.config.schema import ModelConfig
from whet.models import kernels
from whet.models.load import build
from whet.prove.cases import Case, in_pair_order
from whet.prove.numbers import Numbers
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import Json


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
        loss_types=[keys["loss_type"]] if isinstance(keys["loss_type"], str) else keys["loss_type"],
        loss_weights=keys.get("loss_weights", [1.0]),
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
    """CPO's trainer with loss_type=simpo, which takes means over tokens, and cpo_alpha=0."""
    return cpo(method, case, {"loss_type": "simpo", **keys}, of=means)


def sums(case: Case, logp: Tensor) -> tuple[Tensor, Tensor]:
    """[pairs] log-probs of the chosen and of the rejected replies."""
    chosen, rejected = in_pair_order(case, (logp * case.mask).sum(-1)).chunk(2)
    return chosen, rejected


def cpo(method: Any, case: Case, keys: Mapping[str, Json], *, of: Any = sums) -> Numbers:
    """CPO's trainer without the likelihood of the chosen reply, which another of its methods adds."""
    logp = case.padded(case.logp_N).requires_grad_()
    made = trainer(
        **{"alpha": 0.0, "label_smoothing": 0.0, "simpo_gamma": 0.0, "loss_type": "sigmoid", **keys}
    )
    total = method(made, *of(case, logp))[0].mean()
    total.backward()
    return {"loss": total.detach(), "grad": logp.grad}


def online(method: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """`training_step`, whose pairs are two replies to each prompt: first the first ones, then the second ones."""
    logp = case.padded(case.logp_N).requires_grad_()
    ref = case.padded(case.batch.logp_ref_N)
    order = torch.cat([torch.arange(0, case.batch.rollouts, 2), torch.arange(1, case.batch.rollouts, 2)])
    mask = case.mask[order]
    policy, reference = SimpleNamespace(train=lambda: None), object()
    said = {id(policy): logp[order] * mask, id(reference): ref[order] * mask}
    made = trainer(
        args=SimpleNamespace(
            use_vllm=False,
            missing_eos_penalty=None,
            loss_type=keys["loss_type"],
            torch_empty_cache_steps=None,
            optim="adamw",
            n_gpu=1,
            gradient_accumulation_steps=1,
        ),
        beta=keys["beta"],
        ref_model=reference,
        eos_token_ids=[0],
        reward_funcs=[],
        stats=defaultdict(list),
        processing_class=SimpleNamespace(batch_decode=lambda ids, **more: [""] * len(ids)),
        _generate=lambda *told: (None, None, torch.zeros_like(mask, dtype=torch.long), mask, None),
        _forward=lambda model, *told: said[id(model)],
        _calculate_rewards_from_functions=lambda **told: case.batch.reward_R[order],
    )
    made.accelerator.backward = lambda loss, **more: loss.backward()
    total = method(made, policy, {"prompt": ["a prompt"] * (case.batch.rollouts // 2)})
    return {"loss": total, "grad": logp.grad}


def soft(method: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """`_sync_target_model`: a reference after two moves towards policies."""
    target, *policies = models(case)
    for policy in policies:
        method(policy, target, keys["ref_model_mixup_alpha"])
    return {"weights": weights(target)}


def our_soft(row: Row, case: Case) -> Numbers:
    """The same by whet's engines."""
    target, *policies = (engine(model) for model in models(case))
    for policy in policies:
        target.copy_from(policy, row.keys["ref_model_mixup_alpha"])  # type: ignore[arg-type]
    return {"weights": weights(target.module)}


def models(case: Case) -> list[Any]:
    """The reference and two policies."""
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    return [
        build(
            ModelConfig(scratch=shape),
            vocab_size=13,
            eos_token_id=1,
            pad_token_id=0,
            seed=10 * case.seed + number,
            device="cpu",
            dtype=torch.float32,
        )
        for number in range(3)
    ]


def engine(model: Any) -> TorchEngine:
    return TorchEngine(model, kernels.load("auto"), cut=MicroBatchPolicy())


def weights(model: Any) -> Tensor:
    """All of a model in one list."""
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


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
        keys=keys,
        native=native,
        covers=rest.pop("covers", (f"loss {native['name']}",)),
        **{"ours": ours.loss, "kinds": ("pairs",), **rest},
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
    *(
        given(
            "DPO",
            DPO,
            dpo,
            {"loss_type": theirs_name, "beta": 0.3, **more},
            {"name": "dpo", "beta": 0.3, "pair_loss": own, **more},
            tolerance=FLOAT32 if own == "exo" else 1e-9,  # TRL has the share of flipped labels in float32
        )
        for theirs_name, own, more in (
            ("sigmoid_norm", "sigmoid_norm", {}),
            ("exo_pair", "exo", {"label_smoothing": 0.1}),
            ("nca_pair", "nca", {}),
            ("bco_pair", "bco", {}),
            ("sppo_hard", "self_play", {}),
            ("apo_zero", "apo_zero", {}),
            ("apo_down", "apo_down", {}),
        )
    ),
    given(
        "DPO",
        DPO,
        dpo,
        {"loss_type": ["sigmoid", "bco_pair"], "loss_weights": [0.8, 0.2], "beta": 0.3},
        {"name": "dpo", "beta": 0.3, "pair_loss": ["sigmoid", "bco"], "pair_weights": [0.8, 0.2]},
    ),
    given(
        "DPO",
        DPO,
        dpo,
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0], "beta": 0.3},
        {"name": "mpo", "beta": 0.3},
        covers=("loss dpo",),
        differs="TRL's likelihood of the chosen replies is a mean over the tokens of the batch (docs/algorithms.md, "
        "`mpo`)",
    ),
    *(
        given(
            "online DPO",
            "experimental.online_dpo.online_dpo_trainer:OnlineDPOTrainer.training_step",
            online,
            {"loss_type": name, "beta": 0.3},
            {"name": "online_dpo", "beta": 0.3, "pair_loss": name, "ipo_mean": False},
        )
        for name in ("sigmoid", "ipo")
    ),
    given(
        "soft reference",
        "trainer.callbacks:SyncRefModelCallback._sync_target_model",
        soft,
        {"ref_model_mixup_alpha": 0.6},
        {"name": "dpo"},
        ours=our_soft,
        tolerance=FLOAT32,
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
        "AlphaPO (CPO's trainer)",
        "experimental.cpo.cpo_trainer:CPOTrainer.cpo_loss",
        simpo,
        {"beta": 2.0, "simpo_gamma": 0.5, "alpha": 0.25},
        {"name": "alphapo", "beta": 2.0, "target_margin": 0.5, "reward_alpha": 0.25},
        covers=("loss simpo",),
    ),
    given(
        "CPO",
        "experimental.cpo.cpo_trainer:CPOTrainer.cpo_loss",
        cpo,
        {"beta": 0.3, "label_smoothing": 0.1},
        {"name": "cpo", "beta": 0.3, "label_smoothing": 0.1, "nll_weight": 0.0},
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

ROWS = GIVEN
