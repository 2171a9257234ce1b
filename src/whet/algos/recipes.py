"""An algorithm is a value made of functions: a recipe (`config.recipes`) with functions in place of names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from whet.algos.advantages import ADVANTAGES, token_rewards, whiten
from whet.algos.aggregate import weights
from whet.algos.kl import adapt, mean_kl
from whet.algos.losses import LOSSES, regularized, value_loss
from whet.batch import Batch, LossFn
from whet.config import schema
from whet.config.recipes import SETTINGS, Kind, Resolved, refuse_unused, resolve
from whet.tables import find
from whet.types import ConfigError, WhetError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What the step needs to know about what is learned."""

    name: str
    kind: Kind
    needs_reference: bool
    """`logp_ref_N` must be filled in."""
    needs_critic: bool
    """`value_N` must be filled in, and the critic learns with `value_loss`."""
    needs_old: Callable[[bool], bool]
    """Given whether sampled log-probs are exact: must the trainer recompute `logp_old_N`? Else None."""
    entropy_grad: bool
    """The loss asks for the gradient of the entropy."""
    whole_groups: bool
    """The loss joins rollouts of a group: never cut one between micro-batches."""
    drop_uniform_groups: bool
    kl_coef: float
    """First weight of the KL in the reward (0: none there)."""
    next_kl_coef: Callable[[Batch, float], float]
    """The weight after a step that used the given one."""
    advantage: Callable[[Batch, float], Batch]
    """The batch, given the weight of the KL in the reward, with `adv_N` (and `return_N`) set."""
    loss: LossFn
    weights: Callable[[Batch], Tensor]
    """`weight_N` of a whole minibatch."""
    value_loss: LossFn | None
    value_weights: Callable[[Batch], Tensor]
    """`weight_N` for the critic: the mean over tokens."""


def build(cfg: schema.Algorithm, *, critic: schema.Critic, max_tokens: int) -> Algorithm:
    """The algorithm that a config names; max_tokens: longest reply, Dr. GRPO's constant if none is given."""
    r = resolve(cfg)
    advantage = find(ADVANTAGES, r.advantage, what="advantage")
    loss = find(LOSSES, r.loss, what="loss")
    refuse_unused(cfg, r, _keywords(advantage) | _keywords(loss))
    in_reward = r.kl.place == "reward" and r.kl.coef > 0
    if in_reward and "reward_N" not in _keywords(advantage):
        raise ConfigError(
            f"advantage {r.advantage!r} does not take reward_N, the rewards of the tokens with the KL taken "
            "off: add the keyword argument reward_N, or set algorithm.kl.place=loss."
        )
    uses_old = in_reward or r.loss == "ppo" or ":" in r.loss or ":" in r.advantage
    norm_tokens = r.norm_tokens or max_tokens
    return Algorithm(
        name=r.name,
        kind=r.kind,
        needs_reference=r.needs_reference,
        needs_critic=r.needs_critic,
        needs_old=partial(_needs_old, r, uses_old),
        entropy_grad=r.entropy_coef != 0,
        whole_groups=r.kind == "preferences",
        drop_uniform_groups=r.drop_uniform_groups,
        kl_coef=r.kl.coef if in_reward else 0.0,
        next_kl_coef=partial(_next_kl_coef, r.kl),
        advantage=partial(_with_advantage, r, _bind(advantage, r, what="advantage", positional=1)),
        loss=regularized(
            _bind(loss, r, what="loss", positional=2),
            kl_coef=0.0 if in_reward else r.kl.coef,
            estimator=r.kl.estimator,
            entropy_coef=r.entropy_coef,
        ),
        weights=partial(weights, mode=r.aggregation, norm_tokens=norm_tokens),
        value_loss=partial(value_loss, clip=critic.clip_value) if r.needs_critic else None,
        value_weights=partial(weights, mode="token-mean", norm_tokens=norm_tokens),
    )


def _keywords(function: Callable[..., object]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


def _bind(function: Callable[..., T], r: Resolved, *, what: str, positional: int) -> Callable[..., T]:
    """The function with the settings that its signature names. ConfigError if it asks for anything else."""
    names = _keywords(function)
    settings = {name: getattr(r, name) for name in SETTINGS & names}
    later = dict.fromkeys({"reward_N"} & names) if what == "advantage" else {}
    try:
        inspect.signature(function).bind(*[None] * positional, **settings, **later)
    except TypeError as e:
        call = "f(batch, *, reward_N, ...)" if what == "advantage" else "f(batch, outputs, *, ...)"
        raise ConfigError(
            f"{what} {getattr(r, what)!r} cannot be called as {call}: {e}. By keyword it may take: "
            f"{', '.join(sorted(SETTINGS))}."
        ) from e
    return partial(function, **settings)


def _with_advantage(r: Resolved, function: Callable[..., object], batch: Batch, kl_coef: float) -> Batch:
    reward_N = token_rewards(batch, kl_coef=kl_coef, estimator=r.kl.estimator)
    takes_rewards = "reward_N" in _keywords(function)
    result = function(batch, reward_N=reward_N) if takes_rewards else function(batch)
    adv_N, return_N = _checked(result, batch, name=r.advantage)
    if r.whiten:
        adv_N = whiten(adv_N, batch.mask_N)
    return replace(batch, adv_N=torch.where(batch.mask_N, adv_N, adv_N.new_zeros(())), return_N=return_N)


def _checked(result: object, batch: Batch, *, name: str) -> tuple[Tensor, Tensor | None]:
    """What an advantage returned, if it is one number a token; the function may be the user's own."""
    match result:
        case (Tensor() as adv_N, (Tensor() | None) as return_N):
            if all(x is None or x.shape == batch.mask_N.shape for x in (adv_N, return_N)):
                return adv_N, return_N
    raise WhetError(
        f"advantage {name!r} must return (adv_N, return_N or None), each of {batch.tokens} numbers."
    )


def _needs_old(r: Resolved, uses_old: bool, exact: bool) -> bool:
    """'auto' leaves exact engines their own log-probs: they are the trainer's, bit for bit."""
    if r.kind != "online":
        return False
    return r.old_logprobs == "recompute" or (r.old_logprobs == "auto" and uses_old and not exact)


def _next_kl_coef(kl: schema.Kl, batch: Batch, coef: float) -> float:
    """The adaptive controller, or the same weight again."""
    if kl.target is None:
        return coef
    now = mean_kl(batch, kl.estimator)
    return adapt(coef, now, target=kl.target, horizon=kl.horizon, rollouts=batch.rollouts)
