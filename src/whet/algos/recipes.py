"""An algorithm is a value made of functions: a recipe (`config.recipes`) with functions in place of names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from whet.algos.advantages import ADVANTAGES, token_rewards, whiten
from whet.algos.aggregate import weights
from whet.algos.correction import WEIGHTS, Reject, Weigh, correct, kept, without_rejected
from whet.algos.critic import value_loss
from whet.algos.demonstration import among_experts, mixed, mixed_weights, mu_at, own, without_experts
from whet.algos.distillation import KL, OF_ENGINE, Divergence, over_tokens
from whet.algos.entropy import EntropyControl
from whet.algos.implicit import model_loss
from whet.algos.kl import RATIO_ESTIMATORS, adapt, mean_kl
from whet.algos.losses import LOSSES, LOSSES_OVER, regularized
from whet.algos.preference import Forward
from whet.algos.ratios import sampled
from whet.algos.resample import RESAMPLE, counts
from whet.algos.segments import need
from whet.algos.terms import Totals
from whet.algos.whitening import bounded, of_top_entropy, without_entropy_losers
from whet.batch import Batch, Loss, LossFn, Outputs
from whet.config import schema
from whet.config.functions import Need
from whet.config.recipes import Chosen, Kind, Resolved, compares, resolve
from whet.tables import annotations_of, as_annotated, find, near
from whet.types import ConfigError, Metrics, WhetError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Implicit:
    """How a language model whose log-probs are rewards learns beside the policy."""

    beta: float
    before: bool
    """It learns from a whole batch before it gives rewards; else it gives them to each minibatch first."""
    compares: bool
    """Its loss compares rollouts of a group, by the model before the update: `rival_R` must be filled in."""


class LossOf(Protocol):
    def __call__(self, minibatch: Batch, forward: Forward, entropy_coef: float, *, step: int = 1) -> LossFn:
        """The loss for parts of a minibatch, which is given with its weights; whole-minibatch values come first. step:
        number of the training step, as for the weights, which a mix depends on."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The parts of an algorithm that the step uses."""

    name: str
    kind: Kind
    needs_reference: bool
    """`logp_ref_N` must be filled in."""
    needs: frozenset[Need]
    """Everything that is needed besides rewards."""
    needs_critic: bool
    """`value_N` must be filled in, and the critic learns with `value_loss`."""
    implicit: Implicit | None
    """The critic is a language model: `implicit_N` must be filled in, in place of `value_N`."""
    bootstraps: bool
    """`last_value_R` must be filled in."""
    needs_old: Callable[[bool], bool]
    """Given whether sampled log-probs are exact: must the trainer recompute `logp_old_N`? Else None."""
    entropy: EntropyControl
    """The weight of the entropy bonus; where there may be one the loss needs the gradient of the entropy."""
    parts: tuple[str, ...]
    """Parts of the reward that the advantage reads apart: `part_RC` has a column for each."""
    whole_groups: bool
    """The loss joins rollouts of a group: never split a group between micro-batches."""
    dynamic_sampling: bool
    kl_coef: float
    """First weight of the KL in the reward (0: none there)."""
    full_kl_coef: float
    """Weight of the divergence over many tokens, which the engine adds to the loss (0: none)."""
    divergence: Divergence
    """Which one it is."""
    next_kl_coef: Callable[[Batch, float], float]
    """The weight after a step that used the given one."""
    correct: Callable[[Batch, int], tuple[Batch, Metrics]]
    """The batch, given the policy's version, with `correction_N` set if there is a correction, and its numbers."""
    resample: Callable[[Batch, int, int], Batch]
    """The batch, given a stream of random numbers and a step's number of groups, with `count_R` if some count more."""
    advantage: Callable[[Batch, float], Batch]
    """The batch, given the weight of the KL in the reward, with `adv_N` (and `return_N`) set."""
    loss: LossFn
    """The loss of a whole minibatch, or of any batch on its own, in the first step."""
    loss_of: LossOf
    weights: Callable[[Batch, int], Tensor]
    """`weight_N` of a whole minibatch, given the number of the training step (the first is 1)."""
    mu: Callable[[int], float] | None
    """The weight of a mix's demonstrations in a step. None: there is no mix."""
    value_loss: LossFn | None
    value_weights: Callable[[Batch], Tensor]
    """`weight_N` for the critic."""


def build(cfg: schema.AlgorithmConfig, *, critic: schema.CriticConfig, max_tokens: int) -> Algorithm:
    """The algorithm that a config names; max_tokens: longest reply, Dr. GRPO's constant if none is given."""
    r = resolve(cfg)
    advantage = find(ADVANTAGES, r.advantage, what="advantage")
    loss = find(LOSSES, r.loss, what="loss")
    in_reward = r.reward_kl.coef > 0
    if in_reward and "reward_N" not in _keywords(advantage):
        raise ConfigError(
            f"advantage {r.advantage!r} does not take reward_N, the token rewards with the KL "
            "subtracted: add the keyword argument reward_N, or use algorithm.kl instead of algorithm.reward_kl."
        )
    uses_old = (
        in_reward
        or "old" in r.needs
        or (r.ratio and r.anchor == "old")
        or (r.kl.coef > 0 and r.kl.estimator in RATIO_ESTIMATORS)
        or ":" in r.loss
        or ":" in r.advantage
    )
    norm_tokens = r.norm_tokens or max_tokens
    policy = _bind(loss, r.settings["loss"], what="loss", positional=2)
    if r.settings["loss"].is_own:
        policy = partial(_own_loss, policy, r)
    whole = partial(
        regularized,
        kl_coef=0.0 if r.kl.estimator == "full" else r.kl.coef,
        estimator=r.kl.estimator,
        entropy_own_mean=r.entropy_own_mean,
        positive_nll_coef=r.positive_nll_coef,
        one_per="pair" if r.loss_agg_mode == "pair-mean" else "reply" if r.whole_replies else "token",
        reject=_reject(r),
    )
    return Algorithm(
        name=r.name,
        kind=r.kind,
        needs_reference=r.needs_reference,
        needs=r.needs,
        needs_critic=r.needs_critic,
        implicit=_implicit(r),
        bootstraps=bool(r.settings["advantage"].settings.get("bootstrap_truncated", False)),
        needs_old=partial(_needs_old, r, uses_old),
        entropy=_entropy(r),
        parts=tuple(r.settings["advantage"].settings.get("parts", ())) if r.advantage == "gdpo" else (),
        whole_groups=r.pairs,
        dynamic_sampling=r.dynamic_sampling,
        kl_coef=r.reward_kl.coef,
        full_kl_coef=_full_kl_coef(r),
        divergence=_divergence(r),
        next_kl_coef=partial(_next_kl_coef, r.reward_kl),
        correct=partial(correct, cfg=r.correction, weigh=_weigh(r)),
        resample=partial(_resampled, r),
        advantage=partial(
            _with_advantage, r, _bind(advantage, r.settings["advantage"], what="advantage", positional=1)
        ),
        loss=_with_experts(
            r, whole(policy, entropy_coef=r.entropy_coef, totals=None, share=_share(r, step=1))
        ),
        loss_of=partial(_loss_of, r, policy, whole),
        weights=partial(_weights, r, norm_tokens=norm_tokens),
        mu=partial(mu_at, r) if r.mix else None,
        value_loss=_of_critic(r, critic) if r.needs_critic else None,
        value_weights=partial(
            weights,
            mode="seq-mean-token-sum" if r.implicit_reward else critic.loss_agg_mode,
            norm_tokens=norm_tokens,
        ),
    )


def _implicit(r: Resolved) -> Implicit | None:
    if not r.implicit_reward:
        return None
    said = r.settings["advantage"].settings
    return Implicit(
        beta=said["implicit_beta"],
        before=said["implicit_update"] == "before",
        compares=said["implicit_loss"] == "dpo",
    )


def _of_critic(r: Resolved, critic: schema.CriticConfig) -> LossFn:
    """The loss of the critic."""
    if r.implicit_reward:
        said = r.settings["advantage"].settings
        return partial(model_loss, name=said["implicit_loss"], beta=said["implicit_beta"])
    return partial(value_loss, clip=critic.value_clip)


def _full_kl_coef(r: Resolved) -> float:
    """The weight of the term that the engine computes from both models' output layers."""
    if r.loss == "gkd":
        given = r.settings["loss"].settings
        return given["distill_coef"] if given["divergence"] in OF_ENGINE else 0.0
    return r.kl.coef if r.kl.estimator == "full" else 0.0


def _divergence(r: Resolved) -> Divergence:
    """What that term is: the KL to the reference, if nothing else is named."""
    of_engine = r.loss == "gkd" and r.settings["loss"].settings["divergence"] in OF_ENGINE
    return over_tokens(**_taken(over_tokens, r.settings["loss"])) if of_engine else KL


def _loss_of(
    r: Resolved,
    policy: Callable[..., Loss],
    whole: Callable[..., LossFn],
    minibatch: Batch,
    forward: Forward,
    entropy_coef: float,
    *,
    step: int = 1,
) -> LossFn:
    """The loss for the parts of one minibatch."""
    if r.loss in LOSSES_OVER:
        over = LOSSES_OVER[r.loss]
        logprobs = partial(forward, minibatch, "logprobs")
        policy = over(own(minibatch), logprobs, **_taken(over, r.settings["loss"]))
    if step == 1 and r.settings["loss"].is_own:
        policy = partial(policy, first=True)
    own_means = (
        r.entropy_own_mean
        or r.positive_nll_coef > 0
        or r.whole_replies
        or (r.loss_agg_mode == "pair-mean" and r.kl.coef > 0)
    )
    totals = Totals.of(minibatch) if own_means else None
    share = _share(r, step=step)
    return _with_experts(r, whole(policy, entropy_coef=entropy_coef, totals=totals, share=share))


def _share(r: Resolved, *, step: int) -> float:
    """What the policy's own loss is multiplied with: 1 - mu in a mix."""
    return 1.0 - mu_at(r, step) if r.mix else 1.0


def _with_experts(r: Resolved, policy: LossFn) -> LossFn:
    """The policy's loss, or that of a mix."""
    if r.mix is None:
        return policy
    expert = LOSSES[r.settings["mix.loss"].name]
    return mixed(policy, partial(expert, **_taken(expert, r.settings["mix.loss"])))


def _entropy(r: Resolved) -> EntropyControl:
    control = r.settings.get("entropy_control")
    if control is None:
        return EntropyControl(r.entropy_coef)
    said = control.settings
    return EntropyControl(r.entropy_coef, said["target"], said["delta"], said["min"], said["max"])


def _weigh(r: Resolved) -> Weigh | None:
    """The importance weight of the correction. A function of the user's gives one number a token, and has no bounds."""
    chosen = r.settings.get("correction.weight")
    if chosen is None:
        return None
    function = _bind(find(WEIGHTS, chosen.name, what=_WEIGHT), chosen, what=_WEIGHT, positional=2)
    return partial(_own_weight, function, chosen.name) if chosen.is_own else function


def _reject(r: Resolved) -> Reject | None:
    """The tests that the policy which learns is put to."""
    if r.correction.reject_policy == "old" or not r.correction.reject:
        return None
    over_rollouts = r.loss_agg_mode == "seq-mean-token-mean"
    return partial(without_rejected, tests=r.correction.reject, over_rollouts=over_rollouts)


_WEIGHT = "correction.weight"


def _own_weight(
    function: Callable[..., object], name: str, batch: Batch, log_N: Tensor
) -> tuple[Tensor, None]:
    match _called(f"{_WEIGHT} {name!r}", function, batch, log_N=log_N):
        case Tensor() as weight_N if weight_N.shape == log_N.shape:
            return weight_N.detach(), None
        case other:
            got = f"shape {tuple(other.shape)}" if isinstance(other, Tensor) else type(other).__name__
    raise WhetError(
        f"{_WEIGHT} {name!r} must return one weight a token, shape {tuple(log_N.shape)}; got {got}."
    )


def _called(what: str, function: Callable[..., object], batch: Batch, **more: Outputs | Tensor) -> object:
    """What a function of the user's returns. WhetError if it has ended the process, or changed a tensor that it was
    given: other optimizer steps read the same tensor, or copies of it, as the batch is cut."""
    held = {
        f"{name}.{field}": x for name, of in {"batch": batch, **more}.items() for field, x in _tensors(of)
    }
    before = {name: x._version for name, x in held.items()}
    try:
        result = function(batch, *more.values())
    except SystemExit as error:  # the run would end, and not say why
        raise WhetError(
            f"{what} has called sys.exit({error.code!r}): raise an error in its place."
        ) from error
    except Exception as error:
        error.add_note(f"This is an error of {what}.")
        raise
    for name, x in held.items():
        if x._version != before[name]:
            raise WhetError(
                f"{what} has changed {name.rstrip('.')} in place, which the run goes on reading: let it change a copy, "
                f"e.g. {name.rstrip('.')}.clone()."
            )
    return result


def _tensors(given: Batch | Outputs | Tensor) -> list[tuple[str, Tensor]]:
    if isinstance(given, Tensor):
        return [("", given)]
    return [(name, x) for name, x in vars(given).items() if isinstance(x, Tensor)]


def _keywords(function: Callable[..., object]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


def _taken(function: Callable[..., object], chosen: Chosen) -> dict[str, Any]:
    """The settings that a function's signature names."""
    return {name: value for name, value in chosen.settings.items() if name in _keywords(function)}


_OF_THE_RUN = frozenset([
    "logp", "weight", "optimizer_step", "loss", "loss_scale", "lr", "grad_norm", "skipped_steps", "version",
    "staleness_mean", "skipped_rollouts_frac", "skipped_tokens_frac", "replayed_groups", "mtp_loss", "router_aux",
    "router_max_load", "router_z", "entropy_nats", "entropy_coef", "kl_loss_nats", "kl_reference_nats", "kl_coef",
    "rejected_frac", "mu", "reprompted_frac", "reprompt_overlong",
    "replies", "reward_mean", "tokens_mean", "tasks", "unscored",
])  # fmt: skip
"""Numbers of an update, of a recorded batch or, in the last line, of a held-out source, that a statistic of the same
name would replace, or be replaced by."""


def _misnamed(key: str) -> str | None:
    """Why a statistic of the user's loss cannot have this name."""
    if key in _OF_THE_RUN or key.startswith(("mismatch_", "expert_")):
        return "has the name of a number of the run"
    words = key.split("_")
    if words[-1] in ("count", "sum") or "min" in words:  # `track.metrics.merge` goes by such names
        return (
            "is reported as a mean over the update, and would be added up, or the smallest taken, over a step"
        )
    return None


def _own_loss(
    function: Callable[..., object], r: Resolved, batch: Batch, out: Outputs, *, first: bool = False
) -> Loss:
    """A loss of the user's, if it is one number a token: any other shape would be broadcast, and mean something else in
    every micro-batch. first: in the first step it has to be finite, with its gradient, where the log-probs are: later
    the weights may be what is wrong, or single rollouts."""
    if first and (logp_N := need(out.logp_N, "outputs.logp_N")).requires_grad:
        given, alone_N = replace(batch, mask_N=batch.mask_N & logp_N.isfinite()), logp_N.view_as(logp_N)
        out = replace(out, logp_N=alone_N)  # its gradient is that of this loss alone
        alone_N.register_hook(
            partial(_expect_finite, r=r, batch=given, what=f"the gradient of loss {r.loss!r} is")
        )
        made = _own_loss(function, r, batch, out)
        _expect_finite(made.loss_N.detach(), r, given, what=f"loss {r.loss!r} returned")
        return made
    wants = f"loss {r.loss!r} must return whet.batch.Loss(loss_N, stats), loss_N of shape ({batch.tokens},)"
    match _called(f"loss {r.loss!r}", function, batch, outputs=out):
        case Loss(loss_N=Tensor() as loss_N, stats=dict() as stats):
            if loss_N.shape != batch.mask_N.shape:
                raise WhetError(
                    f"{wants}, the unreduced loss of every token; got shape {tuple(loss_N.shape)}. It is reduced by "
                    "algorithm.loss_agg_mode."
                )
            if need(out.logp_N, "outputs.logp_N").requires_grad and not loss_N.requires_grad:
                raise WhetError(
                    f"{wants}; its loss_N has no gradient: compute it from outputs.logp_N, not detached."
                )
            for key, x in stats.items():
                if not (isinstance(x, Tensor) and x.dim() == 1):
                    got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                    raise WhetError(f"{wants}; stats[{key!r}] must be [tokens] or [rollouts], got {got}.")
                if why := _misnamed(key):
                    raise WhetError(f"{wants}; stats[{key!r}] {why}: give it another name.")
            # in a mix the other tokens are those of demonstrations, whose weights are those of their own loss
            return Loss(sampled(batch, loss_N), stats)
        case Tensor() as x:
            raise WhetError(f"{wants}; got a bare tensor of shape {tuple(x.shape)}: return Loss(loss_N).")
        case Loss(loss_N=loss_N, stats=stats):
            parts = f"loss_N of type {type(loss_N).__name__} and stats of type {type(stats).__name__}"
            raise WhetError(f"{wants}; got {parts}, expected a tensor and a dict of tensors.")
        case other:
            raise WhetError(f"{wants}; got {type(other).__name__}.")


_TAKES = {
    "advantage": "batch, *, reward_N",
    "loss": "batch, outputs, *",
    "correction.weight": "batch, log_N, *",
}
"""What a function of the user's is called with."""


def _bind(function: Callable[..., T], chosen: Chosen, *, what: str, positional: int) -> Callable[..., T]:
    """The function with its settings. ConfigError if it asks for anything else, or cannot take what is given."""
    settings = (
        _own_settings(function, chosen, what=what, positional=positional)
        if chosen.is_own
        else _taken(function, chosen)
    )
    later = dict.fromkeys({"reward_N"} & _keywords(function)) if what == "advantage" else {}
    try:
        inspect.signature(function).bind(*[None] * positional, **settings, **later)
    except TypeError as e:
        call = f"f({_TAKES[what]}, ...)"
        raise ConfigError(
            f"{what} {chosen.name!r} cannot be called as {call}: {e}. Its settings are its keyword arguments: give "
            f"them as algorithm.{what}.NAME."
        ) from e
    return partial(function, **settings)


def _own_settings(
    function: Callable[..., object], chosen: Chosen, *, what: str, positional: int
) -> dict[str, Any]:
    """Settings of a user's function, held to the names and the annotations of its signature."""
    hints = annotations_of(function)
    takes = list(inspect.signature(function).parameters.values())[positional:]
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in takes if p.kind in by_name and p.name != "reward_N"]
    out: dict[str, Any] = {}
    for name, value in chosen.settings.items():
        key = f"algorithm.{what}.{name}"
        if name not in names:
            raise ConfigError(
                f"{key}: {chosen.name} has no setting {name!r}{near(name, names)}; it has: "
                f"{', '.join(names) or 'none'}."
            )
        out[name] = as_annotated(value, hints.get(name, Any), key=key, name=chosen.name)
    return out


def _with_advantage(r: Resolved, function: Callable[..., object], entire: Batch, kl_coef: float) -> Batch:
    batch = own(entire)
    reward_N = token_rewards(batch, kl_coef=kl_coef, estimator=r.reward_kl.estimator)
    if "reward_N" in _keywords(function):
        function = partial(function, reward_N=reward_N)
    result = _called(f"advantage {r.advantage!r}", function, batch)
    adv_N, return_N = _checked(result, batch, name=r.advantage)
    if r.settings["advantage"].is_own:
        _expect_finite(adv_N, r, batch, what=f"advantage {r.advantage!r} returned")
    if r.whiten:
        adv_N = whiten(adv_N, batch.mask_N, ddof=r.whiten_ddof)
    adv_N = bounded(adv_N, *r.advantage_clip)
    if "entropy" in r.needs:
        entropy_N = need(batch.entropy_N, "batch.entropy_N")
        adv_N = of_top_entropy(adv_N, entropy_N, batch.mask_N, quantile=r.top_entropy_quantile)
    if (clip := r.settings.get("entropy_clip")) is not None:
        adv_N = without_entropy_losers(
            adv_N,
            need(batch.discriminant_N, "batch.discriminant_N"),
            batch.mask_N,
            centred=clip.name == "vocabulary",
            **clip.settings,
        )
    return replace(entire, adv_N=torch.where(batch.mask_N, adv_N, adv_N.new_zeros(())), return_N=return_N)


def _resampled(r: Resolved, batch: Batch, stream: int, groups: int) -> Batch:
    chosen = r.settings.get("resample")
    count_R = counts(
        without_experts(batch),
        None if chosen is None else partial(RESAMPLE[chosen.name], **chosen.settings),
        stream=stream,
        groups=groups if r.refill == "copy" else 0,
        finished_only=r.groups.truncated == "mask",
    )
    return replace(batch, count_R=None if count_R is None else among_experts(batch, count_R))


def _checked(result: object, batch: Batch, *, name: str) -> tuple[Tensor, Tensor | None]:
    """What an advantage returned, if it is one number a token; the function may be the user's own. Any dtype will do:
    True is 1. It is a constant to the loss."""

    def plain(x: Tensor) -> Tensor:
        return x.detach().to(batch.reward_R.dtype)

    match result:
        case (Tensor() as adv_N, (Tensor() | None) as return_N):
            if all(x is None or x.shape == batch.mask_N.shape for x in (adv_N, return_N)):
                return plain(adv_N), None if return_N is None else plain(return_N)
    parts = result if isinstance(result, tuple) else (result,)
    got = ", ".join(
        f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ if x is not None else "None"
        for x in parts
    )
    raise WhetError(
        f"advantage {name!r} must return (adv_N, return_N or None), each of shape ({batch.tokens},), one number a "
        f"token; got {f'({got})' if isinstance(result, tuple) else got}."
    )


def _expect_finite(x_N: Tensor, r: Resolved, batch: Batch, *, what: str) -> None:
    """WhetError where an advantage or a loss of the user's is not finite at a sampled token: the gradient would not be
    either, and the run would skip its steps without saying why."""
    wrong_M = (batch.mask_N & ~x_N.isfinite()).nonzero().squeeze(1)
    if not len(wrong_M):
        return
    first, count = wrong_M[0], int(batch.mask_N.sum())
    rollout = int(batch.rollout_N[first])
    uid, index = (int(need(x_R, "batch.uid_R")[rollout]) for x_R in (batch.uid_R, batch.index_R))
    reward = f", whose reward is {float(batch.reward_R[rollout]):g}" if r.kind == "online" else ""
    raise WhetError(
        f"{what} {float(x_N[first])} for {len(wrong_M)} of {count} sampled tokens, first for rollout {index} of task "
        f"{uid}{reward}; expected finite numbers. A division by 0, as by the standard deviation of equal numbers, is "
        "NaN: add a small number to the divisor, or give such rollouts 0. The gradient of a root is infinite at 0, "
        "also where torch.where takes another branch."
    )


def _needs_old(r: Resolved, uses_old: bool, exact: bool) -> bool:
    """'auto' leaves exact engines their own log-probs: they are the trainer's, bit for bit."""
    if r.kind != "online":
        return False
    if compares(r.correction):
        return True  # also of exact engines: what they sampled may be of an older version
    return r.old_logprobs == "recompute" or (r.old_logprobs == "auto" and uses_old and not exact)


def _weights(r: Resolved, batch: Batch, step: int, *, norm_tokens: int) -> Tensor:
    """Weights of the tokens; rejected tokens are left out of denominators if the correction is set so."""
    counted = kept(batch) if r.correction.denominator == "kept" else batch
    plain = partial(weights, mode=r.loss_agg_mode, norm_tokens=norm_tokens, block=r.mean_over_rollouts)
    return mixed_weights(counted, weights=plain, mu=mu_at(r, step)) if r.mix else plain(counted)


def _next_kl_coef(kl: schema.RewardKlConfig, batch: Batch, coef: float) -> float:
    """The adaptive controller, or the same weight again."""
    if kl.target is None:
        return coef
    now = mean_kl(batch, kl.estimator)
    return adapt(coef, now, target=kl.target, horizon=kl.horizon, rollouts=batch.rollouts)
