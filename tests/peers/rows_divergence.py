"""Divergences from a teacher over the vocabulary, or over likely tokens: TRL (its distillation trainer, GKD, GOLD and
SDPO), verl and Cosmos-RL.

Each peer's own function gets the logits of both models, or the log-probs that its trainer makes of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from peers import ours, vocabulary
from peers.table import Row
from peers.vocabulary import V, logits, padded
from whet.prove.cases import Case
from whet.prove.numbers import Numbers
from whet.types import Json

FLOAT32 = 2e-6
"""Both sides compute in float32."""
NEAR = ("one turn", "several turns", "a group of one")
"""Where float32 has digits for what is left beside the likeliest tokens."""
KINDS = (*NEAR, "far apart")


def both(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """[R, T, V] the policy's logits, which want a gradient, and the teacher's; [R, T] bool the sampled tokens."""
    policy, teacher = (padded(case, x_NV) for x_NV in logits(case))
    return policy.requires_grad_(), teacher, case.mask.bool()


def given(total: Tensor, policy: Tensor) -> Numbers:
    """A loss and its gradient by the policy's logits."""
    total.backward()  # type: ignore[no-untyped-call]
    assert policy.grad is not None
    return {"loss": total.detach(), "grad": policy.grad}


def generalized(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """`generalized_jsd_loss` of GKD and GOLD: a mean over the tokens that have a label."""
    policy, teacher, at = both(case)
    labels = torch.where(at, 1, -100)
    return given(function(policy, teacher, labels=labels, beta=keys["beta"]), policy)


def chunked(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """The distillation trainer's, which gets hidden states and output layers."""
    policy, teacher, at = both(case)
    one = torch.eye(V)
    return given(function(policy, teacher, one, one, at, keys["beta"])[0], policy)


def of_self(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """SDPO's divergences of two models at each token, as a mean over the tokens."""
    policy, teacher, at = both(case)
    return given(function(policy, teacher, **keys)[at].mean(), policy)


def sampled_token(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """SDPO's estimate at the sampled tokens, from logits whose log-probs there are the case's."""
    logp = case.padded(case.logp_N).requires_grad_()
    ref, at = case.padded(case.batch.logp_ref_N), case.mask.bool()

    def two(x: Tensor) -> Tensor:
        """[R, T, 2] logits of two tokens, the first of which has these log-probs where one was sampled."""
        x = torch.where(at, x, -1.0)
        return torch.stack([x, torch.log(-torch.expm1(x))], -1)

    ids = torch.zeros_like(at, dtype=torch.long)
    loss = function(two(logp), two(ref), ids, distillation_alpha=1.0)[at].mean()
    return given(loss, logp)


def forward_topk(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """verl's KL of the teacher to the policy over the teacher's likeliest tokens, with the bounds of
    `distillation_loss` and its mean over tokens."""
    policy, teacher, at = both(case)
    k, floor = int(keys["topk"]), keys.get("log_prob_min_clamp")  # type: ignore[call-overload]
    found = teacher.log_softmax(-1)[at].topk(k)
    settings = SimpleNamespace(log_prob_min_clamp=floor, use_chunked_topk=False)

    def nested(x: Tensor) -> Tensor:
        return torch.nested.nested_tensor([x], layout=torch.jagged)

    said = function(
        policy[at][None],
        nested(found.values),
        nested(found.indices),
        SimpleNamespace(distillation_loss=settings),
        "thd",
    )
    losses = said["distillation_losses"] if isinstance(said, Mapping) else said[0]
    return given(losses.clamp(min=0.0).mean(), policy)


def of_cosmos(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """Minus the advantage that Cosmos-RL makes of the divergence over the policy's likeliest tokens, where that of the
    reward is 0. The policy's log-probs have a gradient there."""
    policy, teacher, at = both(case)
    k = int(keys["distillation.top_k"])  # type: ignore[call-overload]
    token = policy.detach().topk(k).indices
    own, others = (x.log_softmax(-1).gather(-1, token) for x in (policy, teacher))
    names = ("jsd_beta", "kl_penalty_coef")
    settings = SimpleNamespace(
        **{name: keys[f"distillation.{name}"] for name in names}, kl_discount_factor=0.0
    )
    own_trainer = SimpleNamespace(config=SimpleNamespace(distillation=settings), device="cpu")
    own_trainer.post_process_teacher_kl_advantages = lambda *args, **more: (
        function.post_process_teacher_kl_advantages(own_trainer, *args, **more)
    )
    ends = torch.cat([torch.zeros(1, dtype=torch.long), at.sum(-1).cumsum(0)])
    adv, _ = function.compute_teacher_topk_jsd_kl_advantages(
        own_trainer, own[at], others, torch.zeros_like(case.mask, dtype=torch.float32), at, ends
    )
    return given(-adv.mean(), policy)


def row(
    peer: str,
    what: str,
    path: str,
    call: Any,
    keys: Mapping[str, Json],
    native: Mapping[str, Json],
    **rest: Any,
) -> Row:
    return Row(
        peer=peer,
        what=", ".join([what, *(f"{key.rpartition('.')[2]}={value}" for key, value in keys.items())]),
        theirs=path,
        call=call,
        keys=keys,
        native={"name": "gkd", **native},
        covers=("loss gkd",),
        **{"ours": vocabulary.loss, "kinds": KINDS, "tolerance": FLOAT32, **rest},
    )


def jsd(beta: float, **top: Json) -> dict[str, Json]:
    """Whet's settings, over the vocabulary or over likely tokens."""
    return {"divergence": "jsd_topk" if top else "jsd", "jsd_beta": beta, **top}


BETAS = (0.0, 0.3, 1.0)

WHOLE = (
    *(
        row("trl", what, f"trl.{path}", call, {"beta": beta}, jsd(beta))
        for what, path, call in (
            ("distillation", "trainer.distillation_trainer:_chunked_divergence_loss", chunked),
            ("GKD", "experimental.gkd.gkd_trainer:GKDTrainer.generalized_jsd_loss", generalized),
            ("GOLD", "experimental.gold.gold_trainer:GOLDTrainer.generalized_jsd_loss", generalized),
        )
        for beta in BETAS
    ),
)

SDPO = "trl.experimental.sdpo.loss_utils:"

OF_SDPO = (
    *(
        row(
            "trl",
            "SDPO's divergence",
            f"{SDPO}compute_full_logit_self_distillation_loss",
            of_self,
            {"distillation_alpha": beta},
            jsd(beta),
        )
        for beta in BETAS
    ),
    *(
        row(
            "trl",
            "SDPO's divergence",
            f"{SDPO}compute_topk_self_distillation_loss",
            of_self,
            {"distillation_topk": 4, "distillation_alpha": beta, "distillation_add_tail": tail},
            jsd(beta, top_k=4, top_k_of="policy", top_k_rest="tail" if tail else "renormalize"),
            kinds=NEAR if tail else KINDS,
        )
        for beta in BETAS
        for tail in (True, False)
    ),
    row(
        "trl",
        "SDPO's gradient at the sampled tokens",
        f"{SDPO}compute_sampled_token_self_distillation_loss",
        sampled_token,
        {},
        {"divergence": "k2"},
        ours=ours.loss,
        only=("grad",),
        tolerance=1e-9,
    ),
)

OTHERS = (
    *(
        row(
            "verl",
            "distillation_loss.loss_mode=forward_kl_topk",
            "verl.trainer.distillation.fsdp.losses:compute_forward_kl_topk",
            forward_topk,
            {"topk": 4, **({"log_prob_min_clamp": floor} if floor else {})},
            {"divergence": "forward_topk", "top_k": 4, "min_logprob": floor},
        )
        for floor in (None, -3.0)
    ),
    *(
        row(
            "cosmos",
            "teacher's advantage over likely tokens",
            "cosmos_rl.policy.trainer.llm_trainer.grpo_trainer:GRPOTrainer",
            of_cosmos,
            {
                "distillation.top_k": 4,
                "distillation.jsd_beta": beta,
                "distillation.kl_penalty_coef": 2.0,
            },
            jsd(beta, top_k=4, top_k_of="policy", top_k_rest="drop") | {"distill_coef": 2.0},
        )
        for beta in BETAS
    ),
)

ROWS = (*WHOLE, *OF_SDPO, *OTHERS)
