"""Trinity-RFT's policy losses with their arguments, and how token losses become one number."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.presets import Preset, preset
from whet.dialects.trinity.values import arguments, known_as, text
from whet.types import ConfigError, Json

KEY = "algorithm.policy_loss_fn"
ARGS = f"{KEY}_args"
Given = Mapping[str, Json]
Native = dict[str, Json]

AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum-norm": "token-sum-norm",
}

_CLIP: dict[str, Json] = {"clip_range": 0.2, "clip_range_low": None, "clip_range_high": None}
_AGG: dict[str, Json] = {"loss_agg_mode": "token-mean"}
_BOOKS = dict.fromkeys(
    (
        "use_dynamic_bsz",
        "ppo_mini_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "ngpus_trainer",
        "train_batch_size_usual",
        "train_batch_size_expert",
    )
)
"""What Trinity's mixed losses count with; here the counts are those of the batch itself."""
_MIX: dict[str, Json] = {**_CLIP, **_AGG, "sft_loss_agg_mode": None, "grpo_loss_agg_mode": None, **_BOOKS}

LOSSES: dict[str, dict[str, Json]] = {
    "ppo": {
        **_CLIP,
        **_AGG,
        "clip_ratio_c": 3.0,
        "enable_sequence_masking": False,
        "delta_sequence_masking": 0.1,
        "fallback_to_policy_gradient": False,
    },
    "gspo": {
        "clip_range": None,
        "clip_range_low": 3e-4,
        "clip_range_high": 4e-4,
        "loss_agg_mode": "seq-mean-token-mean",
    },
    "cispo": {
        **_AGG,
        "clip_range_low": 1.0,
        "clip_range_high": 0.28,
        "enable_mask_clip": False,
        "mask_clip_range_low": 1.0,
        "mask_clip_range_high": 0.28,
    },
    "sapo": {**_AGG, "tau_pos": 1.0, "tau_neg": 1.05},
    "sppo": {**_AGG, "epsilon": 0.3},
    "topr": {**_AGG, "advantage_threshold": 0.0},
    "opmd": {**_AGG, "tau": 1.0},
    "importance_sampling": _AGG,
    "rec": {
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "epsilon_low_prime": 0.6,
        "epsilon_high_prime": 2.0,
        "clip_mode": "none",
        "weight": "none",
        "regularizer": "none",
        "regularizer_coef": 0.0,
        "temp": 1.0,
    },
    "sft": {**_AGG, "use_token_level_loss": True},
    "sft_is": {**_AGG, "use_token_level_loss": True},
    "sft_phi": {**_AGG, "use_token_level_loss": True, "cutoff_prob": 1.0},
    "dpo": {"beta": 0.1, "label_smoothing": 0.0},
    "mix": {**_MIX, "mu": 0.1},
    "mix_chord": {
        **_MIX,
        "mu_warmup_steps": 0,
        "mu_decay_steps": 0,
        "mu_peak": 0.1,
        "mu_valley": 0.1,
        "enable_phi_function": True,
    },
}
"""The losses with their arguments and defaults."""

COMING = ("sft_phi_normalized",)
OF_FILES = ("sft", "sft_is", "sft_phi")


def loss_name(values: Values) -> str:
    """The policy loss: the one named, or the preset's. ConfigError where it cannot go with algorithm_type."""
    base = preset(values)
    name = text(values, KEY) or base.loss
    known_as(name, LOSSES, key=KEY, coming=COMING)
    if base.kind == "online":
        fits = (
            name == base.loss if base.mixes else name not in ("sft_is", "sft_phi", "dpo", "mix", "mix_chord")
        )
    else:
        fits = name in OF_FILES if base.kind == "sft" else name == "dpo"
    if not fits:
        raise ConfigError(
            f"{KEY}: {name} does not go with algorithm_type {values['algorithm.algorithm_type']}."
        )
    return name


def given_arguments(values: Values) -> Given:
    """The arguments of the policy loss, defaults filled in."""
    return arguments(values, ARGS, LOSSES[loss_name(values)])


def recipe(values: Values) -> Mapping[str, Json]:
    """algorithm_type: the native recipe. The losses of sft have one each."""
    base = preset(values)
    return {"algorithm.name": loss_name(values) if base.kind == "sft" else base.recipe}


def policy_loss(values: Values) -> Mapping[str, Json]:
    """policy_loss_fn with its arguments. The ratio is to the engine's own log-probs, as in Trinity."""
    base, name, given = preset(values), loss_name(values), given_arguments(values)
    if name == "dpo":
        return {"algorithm.beta": given["beta"], "algorithm.label_smoothing": given["label_smoothing"]}
    out: Native = {"algorithm.aggregation": _aggregation(values, name, given)}
    if base.kind == "sft":
        return out | ({"algorithm.phi_cutoff": given["cutoff_prob"]} if name == "sft_phi" else {})
    return {
        **out,
        **{f"algorithm.{key}": value for key, value in _settings(values, base, name, given).items()},
        "algorithm.old_logprobs": "sampled",
    }


def _settings(values: Values, base: Preset, name: str, given: Given) -> Native:
    if base.mixes:
        return {"loss": "ppo", **_clip(given), "dual_clip": 3.0}
    if name == "ppo":
        return _ppo(values[f"{ARGS}.*"] or {}, given)
    if name == "opmd":
        return _opmd(values, given)
    if name == "sft":
        return {"loss": "cross_entropy"}
    return {"loss": name, **_OTHERS[name](given)}


def _clip(given: Given) -> Native:
    low, high, both = (given[f"clip_range{end}"] for end in ("_low", "_high", ""))
    return {"clip_low": both if low is None else low, "clip_high": both if high is None else high}


def _ppo(said: Mapping[str, Json], given: Given) -> Native:
    out: Native = {"loss": "ppo", "dual_clip": given["clip_ratio_c"]}
    if given["fallback_to_policy_gradient"]:
        out["fallback_to_policy_gradient"] = True
        clips = [key for key in (*_CLIP, "enable_sequence_masking") if said.get(key)]
        if clips:
            raise ConfigError(
                f"{ARGS}.{clips[0]}: has no effect with fallback_to_policy_gradient; leave it out."
            )
        return out
    if given["enable_sequence_masking"]:
        out["sequence_mask_delta"] = given["delta_sequence_masking"]
    elif given["delta_sequence_masking"] != LOSSES["ppo"]["delta_sequence_masking"]:
        raise ConfigError(f"{ARGS}.delta_sequence_masking: has no effect without enable_sequence_masking.")
    return out | _clip(given)


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


def _cispo(given: Given) -> Native:
    out: Native = {"clip_low": given["clip_range_low"], "clip_high": given["clip_range_high"]}
    for end in ("low", "high"):
        key = f"mask_clip_range_{end}"
        if given["enable_mask_clip"] and given[key] != given[f"clip_range_{end}"]:
            raise NotSupportedYet(
                f"{ARGS}.{key}: {given[key]} beside clip_range_{end} {given[f'clip_range_{end}']} is coming, not built "
                "yet: the mask has the bounds of the clip."
            )
        if not given["enable_mask_clip"] and given[key] != LOSSES["cispo"][key]:
            raise ConfigError(f"{ARGS}.{key}: has no effect without enable_mask_clip.")
    return out | {"cispo_mask": given["enable_mask_clip"]}


def _sapo(given: Given) -> Native:
    if given["tau_neg"] < given["tau_pos"]:
        raise ConfigError(f"{ARGS}.tau_neg: {given['tau_neg']} is less than tau_pos {given['tau_pos']}.")
    return {"tau_pos": given["tau_pos"], "tau_neg": given["tau_neg"]}


def _rec(given: Given) -> Native:
    """What the modes do not read is left out unless it was changed; then whet says that it has no effect."""
    known = LOSSES["rec"]
    own: Native = {"rec_clip_mode": given["clip_mode"], "rec_weight": given["weight"]}
    own["rec_regularizer"] = given["regularizer"] if given["regularizer_coef"] else "none"
    for theirs, native, read in (
        ("epsilon_low", "clip_low", given["clip_mode"] != "none"),
        ("epsilon_high", "clip_high", given["clip_mode"] != "none"),
        ("epsilon_low_prime", "rec_ring_low", given["clip_mode"] == "ring"),
        ("epsilon_high_prime", "rec_ring_high", given["clip_mode"] == "ring"),
        ("temp", "rec_temperature", given["weight"] == "advantage"),
        ("regularizer_coef", "rec_regularizer_coef", own["rec_regularizer"] != "none"),
    ):
        if read or given[theirs] != known[theirs]:
            own[native] = given[theirs]
    return own


def _gspo(given: Given) -> Native:
    both = given["clip_range"]
    low, high = (given["clip_range_low"], given["clip_range_high"]) if both is None else (both, both)
    return {"gspo_form": "token", "clip_low": low, "clip_high": high}


_OTHERS: dict[str, Callable[[Given], Native]] = {
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "rec": _rec,
    "sppo": lambda given: {"sppo_epsilon": given["epsilon"]},
    "topr": lambda given: {"topr_threshold": given["advantage_threshold"]},
    "importance_sampling": lambda given: {},
}


def _aggregation(values: Values, name: str, given: Given) -> Json:
    """loss_agg_mode, of the file or of the loss; the two parts of a mix must have the same."""
    mode = text(values, "algorithm.loss_agg_mode") or given.get("loss_agg_mode", "token-mean")
    if not given.get("use_token_level_loss", True) or (
        name == "rec" and given["clip_mode"] == "gspo-one-side"
    ):
        mode = "seq-mean-token-mean"
    own = {part: given.get(f"{part}_loss_agg_mode") or mode for part in ("sft", "grpo")}
    if own["sft"] != own["grpo"]:
        raise NotSupportedYet(
            f"{ARGS}.sft_loss_agg_mode: {own['sft']} beside {own['grpo']} for the policy's loss is coming, not built "
            "yet; here: one for both."
        )
    mode = own["grpo"]
    known_as(str(mode), AGGREGATIONS, key="algorithm.loss_agg_mode")
    return AGGREGATIONS[str(mode)]
