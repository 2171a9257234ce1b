"""Whet's numbers for a random batch, and how far they are from a peer's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from whet.algos.advantages import token_rewards
from whet.algos.recipes import Algorithm, build
from whet.batch import Batch, LossFn, Outputs
from whet.config.schema import Config
from whet.prove.cases import Case

Numbers = dict[str, Tensor]
"""What is compared, by name; padded [R, T], a list, or a scalar."""


def before(made: Algorithm, batch: Batch) -> Batch:
    """A batch as it is before the advantages: with old log-probs if the algorithm has the trainer recompute them."""
    known = replace(batch, logp_old_N=batch.logp_old_N if made.needs_old(False) else None)
    return made.correct(known, 0)[0]


def advantage(made: Algorithm, case: Case, *, kl: bool = True) -> Numbers:
    """`advantage`, and `return` where a critic learns; with or without the KL in the reward."""
    batch = made.advantage(before(made, case.batch), made.kl_coef if kl else 0.0)
    assert batch.adv_N is not None
    out = {"advantage": case.padded(batch.adv_N)}
    if batch.return_N is not None:
        out["return"] = case.padded(batch.return_N)
    return out


def loss(made: Algorithm, case: Case) -> Numbers:
    """`loss`, a scalar, and `grad`, its gradient by the log-probs of the policy."""
    batch = before(made, case.batch)
    batch = replace(batch, weight_N=made.weights(batch, 1))

    def forward(part: Batch, what: str) -> Tensor:
        return case.logp_N

    return with_gradient(
        made.loss_of(batch, forward, made.entropy.coef), batch, case.logp_N.clone().requires_grad_(), case
    )


def with_gradient(function: LossFn, batch: Batch, logp_N: Tensor, case: Case) -> Numbers:
    """A loss of the whole batch by its weights, and its gradient."""
    result = function(batch, Outputs(logp_N=logp_N, entropy_N=torch.zeros_like(logp_N)))
    assert batch.weight_N is not None
    total = (result.loss_N * batch.weight_N).sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert logp_N.grad is not None
    return {"loss": total.detach(), "grad": case.padded(logp_N.grad)}


def value_loss(made: Algorithm, case: Case) -> Numbers:
    """The critic's loss and its gradient by the values."""
    assert made.value_loss is not None
    weight_N = made.value_weights(case.batch)
    value_N = case.value_N.clone().requires_grad_()
    out = made.value_loss(replace(case.batch, weight_N=weight_N), Outputs(value_N=value_N))
    total = (out.loss_N * weight_N).sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert value_N.grad is not None
    return {"loss": total.detach(), "grad": case.padded(value_N.grad)}


def reward_kl(config: Config, case: Case) -> Numbers:
    """What the KL in the reward takes from each sampled token."""
    batch, estimator = case.batch, config.algorithm.reward_kl.estimator
    with_kl = token_rewards(batch, kl_coef=built(config, case).kl_coef, estimator=estimator)
    return {"taken": case.padded(token_rewards(batch, kl_coef=0.0, estimator=estimator) - with_kl)}


def built(config: Config, case: Case, *, kl: bool = True) -> Algorithm:
    """The algorithm of a config for the lengths of a batch, or the same without the KL in the loss."""
    section = config.algorithm
    if not kl:
        section = section.model_copy(update={"kl": section.kl.model_copy(update={"coef": 0.0})})
    return build(section, critic=config.critic, max_tokens=case.width)


def bare_loss(config: Config, case: Case) -> Numbers:
    """The loss of a config without its KL, and the gradient."""
    return loss(built(config, case, kl=False), case)


def kl_in_loss(config: Config, case: Case) -> Numbers:
    """What the KL adds to the loss and its gradient."""
    return apart(loss(built(config, case), case), bare_loss(config, case))


def apart(one: Numbers, other: Numbers) -> Numbers:
    """The first less the second."""
    return {name: one[name] - other[name] for name in one}


def difference(theirs: Numbers, ours: Numbers, names: tuple[str, ...], mask: Tensor) -> float:
    """The largest difference, relative to the larger of 1 and their number; padded numbers count where sampled. names:
    what is compared; () for all that they have. ValueError where they have none, or ours lack one."""
    names = names or tuple(theirs)
    if not names:
        raise ValueError(f"theirs have no numbers; ours have {', '.join(ours)}")
    if missing := [name for name in names if name not in ours]:
        raise ValueError(f"theirs have {', '.join(missing)}; ours have {', '.join(ours)}")
    worst = 0.0
    for name in names:
        a, b = theirs[name].detach().double(), ours[name].detach().double()
        if a.shape != b.shape:
            raise ValueError(f"{name}: theirs has shape {tuple(a.shape)}, ours {tuple(b.shape)}")
        if a.shape == mask.shape:
            a, b = a[mask > 0], b[mask > 0]
        apart = ((a - b).abs() / a.abs().clamp(min=1.0)).nan_to_num(nan=torch.inf)
        worst = max([worst, *apart.flatten().tolist()])
    return worst
