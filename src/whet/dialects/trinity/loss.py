"""Trinity-RFT's policy losses with their arguments, how token losses become one number, and mixes of own rollouts with
demonstrations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.values import (
    CONFIG,
    Native,
    arguments_of,
    functions,
    known_as,
    number,
    preset,
    repeat_times,
    text,
)
from whet.dialects.typed import choices
from whet.types import ConfigError, Json

KEY = "algorithm.policy_loss_fn"
ARGS = f"{KEY}_args"
BYPASS = f"{CONFIG}.algorithm.rollout_correction.bypass_mode"
Given = Mapping[str, Json]

AGGREGATIONS = choices("trinity", "aggregation")

_CLIPS = ("clip_range", "clip_range_low", "clip_range_high")
COMING = ("sft_phi_normalized",)
OF_FILES = ("sft", "sft_is", "sft_phi")
_NEVER_ONLINE = ("sft_is", "sft_phi", "dpo", "mix", "mix_chord")


def loss_name(values: Values) -> str:
    """The policy loss: the one named, or the preset's. ConfigError where it cannot go with algorithm_type."""
    base = preset(values)
    name = text(values, KEY) or base.loss
    known_as(name, functions("loss"), key=KEY, coming=COMING)
    fits = {"online": name not in _NEVER_ONLINE, "sft": name in OF_FILES, "dpo": name == "dpo"}[base.kind]
    if not (name == base.loss if base.mixes else fits):
        raise ConfigError(
            f"{KEY}: {name} does not go with algorithm_type {values['algorithm.algorithm_type']}."
        )
    return name


def is_m2po(values: Values) -> bool:
    """Whether tokens that make the second moment of the ratio large are left out."""
    return loss_name(values) == "m2po"


def averages(values: Values) -> str:
    """How token losses become one number: loss_agg_mode of the file, or of the loss."""
    own = given_arguments(values).get("loss_agg_mode", "token-mean")
    return text(values, "algorithm.loss_agg_mode") or str(own)


def given_arguments(values: Values) -> Given:
    """The arguments of the policy loss, defaults filled in."""
    return arguments_of(values, KEY, functions("loss")[loss_name(values)])


def recipe(values: Values) -> Native:
    """algorithm_type: the native recipe. The losses of sft have one each."""
    base = preset(values)
    return {"algorithm.name": loss_name(values) if base.kind == "sft" else base.recipe}


def recomputes(values: Values) -> bool:
    """Whether the trainer computes the log-probs before a step again: the ratio is to them, else to the engine's."""
    return not values[BYPASS]


def policy_loss(values: Values) -> Native:
    """policy_loss_fn with its arguments."""
    base, name, given = preset(values), loss_name(values), given_arguments(values)
    if name == "dpo":
        return {
            "algorithm.loss.beta": given["beta"],
            "algorithm.loss.label_smoothing": given["label_smoothing"],
        }
    out: Native = {"algorithm.loss_agg_mode": _aggregation(values, name, given)}
    if base.kind == "sft":
        return out | ({"algorithm.loss.phi_cutoff": given["cutoff_prob"]} if name == "sft_phi" else {})
    return {
        **out,
        **{
            "algorithm.loss" if key == "loss" else f"algorithm.loss.{key}": value
            for key, value in _settings(values, name, given).items()
        },
        "algorithm.old_logprobs": "recompute" if recomputes(values) else "sampled",
    }


def _settings(values: Values, name: str, given: Given) -> Native:
    if preset(values).mixes:
        return {"loss": "ppo", **_clip(given), "dual_clip": 3.0}
    if name == "ppo":
        return _ppo(values[f"{ARGS}.*"] or {}, given)
    if name == "opmd":
        return _opmd(values, given)
    if name == "sft":
        return {"loss": "cross_entropy"}
    if name == "rec":
        return {"loss": "rec", **_rec(values[f"{ARGS}.*"] or {}, given)}
    function = functions("loss")[name]
    out: Native = {
        "loss": function.native,
        **{native: given[theirs] for theirs, native in function.natives.items()},
    }
    if name == "gspo":
        both = given["clip_range"]
        out |= {} if both is None else dict.fromkeys(function.natives.values(), both)
        return {**out, "gspo_form": "token"}
    if name == "sapo":
        positive, negative = (number(given[tau], f"{ARGS}.{tau}") for tau in ("tau_pos", "tau_neg"))
        if negative < positive:
            raise ConfigError(f"{ARGS}.tau_neg: {negative} is less than tau_pos {positive}.")
        return {**out, "sapo_detach": True}  # Trinity does not differentiate the gate, as the paper does
    if name == "m2po" and number(given["log_ratio_clip"], f"{ARGS}.log_ratio_clip") != 20:
        raise NotSupportedYet(
            f"{ARGS}.log_ratio_clip: {given['log_ratio_clip']} is coming, not built yet: log-ratios are bounded to "
            "+-20; leave it out."
        )
    if name == "cispo" and not given["enable_mask_clip"]:
        return {key: value for key, value in out.items() if not key.startswith("mask_")}
    return out


def _clip(given: Given) -> Native:
    low, high, both = (given[f"clip_range{end}"] for end in ("_low", "_high", ""))
    return {"clip_low": both if low is None else low, "clip_high": both if high is None else high}


def _ppo(said: Given, given: Given) -> Native:
    out: Native = {"loss": "ppo", "dual_clip": given["clip_ratio_c"]}
    if not given["fallback_to_policy_gradient"]:
        masks = given["enable_sequence_masking"]
        return (
            out | _clip(given) | ({"sequence_mask_delta": given["delta_sequence_masking"]} if masks else {})
        )
    clips = [key for key in (*_CLIPS, "enable_sequence_masking") if said.get(key)]
    if clips:
        raise ConfigError(f"{ARGS}.{clips[0]}: has no effect with fallback_to_policy_gradient; leave it out.")
    return out | {"fallback_to_policy_gradient": True}


def _opmd(values: Values, given: Given) -> Native:
    """-A log pi / (1 + tau). With tau 0 it is that of reinforce."""
    if given["tau"] == 0:
        return {"loss": "reinforce"}
    soft = values["algorithm.advantage_fn_args.*"] or {}
    other = soft.get("tau", 1.0)
    if soft.get("opmd_baseline", "mean") != "mean" and other != given["tau"]:
        raise NotSupportedYet(
            f"{ARGS}.tau: {given['tau']} beside advantage_fn_args.tau {other} is coming, not built yet: one tau is "
            "what is built; give both the same."
        )
    return {"loss": "opmd", "tau": given["tau"]}


def _rec(said: Given, given: Given) -> Native:
    """What the modes do not read is left out unless the file changes it; then whet says that it has no effect."""
    clips, ring, regular = (
        given["clip_mode"] != "none",
        given["clip_mode"] == "ring",
        given["regularizer_coef"],
    )
    own: Native = {"rec_clip_mode": given["clip_mode"], "rec_weight": given["weight"]}
    own["rec_regularizer"] = given["regularizer"] if regular else "none"
    for theirs, native, read in (
        ("epsilon_low", "clip_low", clips),
        ("epsilon_high", "clip_high", clips),
        ("epsilon_low_prime", "rec_ring_low", ring),
        ("epsilon_high_prime", "rec_ring_high", ring),
        ("temp", "rec_temperature", given["weight"] == "advantage"),
        ("regularizer_coef", "rec_regularizer_coef", own["rec_regularizer"] != "none"),
    ):
        if read or said.get(theirs) not in (None, functions("loss")["rec"].defaults[theirs]):
            own[native] = given[theirs]
    return own


def _aggregation(values: Values, name: str, given: Given) -> Json:
    """loss_agg_mode, of the file or of the loss; the two parts of a mix must have the same."""
    mode = text(values, "algorithm.loss_agg_mode") or given.get("loss_agg_mode", "token-mean")
    one_sided = name == "rec" and given["clip_mode"] == "gspo-one-side"
    if one_sided or not given.get("use_token_level_loss", True):
        mode = "seq-mean-token-mean"
    sft, grpo = (given.get(f"{part}_loss_agg_mode") or mode for part in ("sft", "grpo"))
    if sft != grpo:
        raise NotSupportedYet(
            f"{ARGS}.sft_loss_agg_mode: {sft} beside {grpo} for the policy's loss is coming, not built yet; here: one "
            "for both."
        )
    known_as(str(grpo), AGGREGATIONS, key="algorithm.loss_agg_mode")
    return AGGREGATIONS[str(grpo)]


def leaves_its_own_mean(values: Values) -> bool:
    """Whether Trinity's policy loss has another mean than loss_agg_mode says: it is told only where no arguments of the
    loss are given, or this one is."""
    own, mode = values[f"{ARGS}.*"] or {}, text(values, "algorithm.loss_agg_mode")
    its = given_arguments(values).get("loss_agg_mode", mode)
    return bool(own) and "loss_agg_mode" not in own and mode not in (None, its)


def keeps_its_own_mean(values: Values) -> bool:
    """Whether the policy loss has the mean of its arguments here, where Trinity puts token-mean, the default of
    loss_agg_mode, in its place: with the loss's default arguments, and where this one is given."""
    own = values[f"{ARGS}.*"] or {}
    is_told = not own or "loss_agg_mode" in own
    return text(values, "algorithm.loss_agg_mode") is None and is_told and averages(values) != "token-mean"


# ---------------------------------------------------------------- mixes

STRATEGY = "algorithm.sample_strategy"


def strategy(values: Values) -> tuple[str, Native]:
    """sample_strategy with its arguments. Raises ConfigError where it cannot go with algorithm_type."""
    mixes = preset(values).mixes
    name = text(values, STRATEGY) or ("mix" if mixes else "default")
    known_as(name, functions("strategy"), key=STRATEGY)
    if (name == "mix") != mixes:
        raise ConfigError(
            f"{STRATEGY}: {name} does not go with algorithm_type {values['algorithm.algorithm_type']}: the algorithms "
            "mix and mix_chord, and only they, learn from demonstrations among rollouts. Leave it out."
        )
    return name, arguments_of(values, STRATEGY, functions("strategy")[name])


def step(values: Values) -> tuple[int, int]:
    """(own tasks, demonstrations) of a step of train_batch_size experiences: ceil(ratio * size) are demonstrations."""
    tasks, times = values["buffer.batch_size"], repeat_times(values)
    size = values["buffer.train_batch_size"] or tasks * times
    ratio = number(strategy(values)[1].get("expert_data_ratio", 0), f"{STRATEGY}_args.expert_data_ratio")
    experts = math.ceil(Fraction(str(ratio)) * size)
    if size - experts != tasks * times:
        raise NotSupportedYet(
            f"buffer.train_batch_size: of {size} experiences {experts} are demonstrations "
            f"(algorithm.sample_strategy_args.expert_data_ratio) and {size - experts} are not buffer.batch_size * "
            f"algorithm.repeat_times = {tasks} * {times} = {tasks * times}: training on more or "
            "fewer than a step explores is coming, not built yet."
        )
    return tasks, experts


def weight(values: Values) -> Native:
    """algorithm.mix: how many demonstrations, and what they weigh."""
    given = given_arguments(values)
    own, experts = step(values)
    size = own * repeat_times(values) + experts
    for key, here in (
        ("train_batch_size_expert", experts),
        ("train_batch_size_usual", size - experts),
        ("ppo_mini_batch_size", size),
    ):
        if given[key] not in (None, here):
            raise ConfigError(f"{ARGS}.{key}: {given[key]} is not {here}, which is what a step has here.")
    out: Native = {"demonstration_ratio": share(experts, own + experts), "loss": "sft"}
    if preset(values).loss == "mix":
        return out | {"mu": given["mu"]}
    out |= {"mu": given["mu_peak"]} | ({"loss": "sft_phi"} if given["enable_phi_function"] else {})
    falls = given["mu_valley"] != given["mu_peak"]
    schedule = {
        "warmup_steps": given["mu_warmup_steps"] or None,
        "valley": given["mu_valley"] if falls else None,
    }
    schedule |= {"decay_steps": (falls and given["mu_decay_steps"]) or None}
    told = {key: value for key, value in schedule.items() if value is not None}
    return out | ({"mu_schedule": {"name": "cosine", **told}} if told else {})


def share(part: int, whole: int) -> float:
    """A decimal of at most six digits that, times `whole` and rounded up, is `part`."""
    return math.floor(10**6 * part / whole) / 10**6


def outside_mu(values: Values, coef: Json, *, key: str) -> Json:
    """A term that Trinity adds to the mixed loss as it is, and whet inside the policy's part, which has 1 - mu."""
    base = preset(values)
    if not base.mixes or not coef:
        return coef
    given = given_arguments(values)
    if base.loss == "mix_chord" and (given["mu_valley"] != given["mu_peak"] or given["mu_warmup_steps"]):
        raise NotSupportedYet(
            f"{key}: {coef} beside a mu that changes (mu_warmup_steps, mu_valley) is coming, not built yet: here the "
            "term moves with mu. Set its coefficient to 0."
        )
    name = "mu" if base.loss == "mix" else "mu_peak"
    mu = number(given[name], f"{ARGS}.{name}")
    if mu == 1:
        raise ConfigError(
            f"{key}: {coef} has no effect with mu 1, where the policy's own loss has no weight."
        )
    return number(coef, key) / (1 - mu)
