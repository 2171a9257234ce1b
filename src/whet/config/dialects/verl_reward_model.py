"""verl's reward model: where it is enabled, its score alone is what a rollout gets."""

from __future__ import annotations

from whet.config.dialects.key import Key, Unbuilt, Values, derived, translated
from whet.config.dialects.kinds import same
from whet.config.dialects.typed import flag, whole
from whet.config.dialects.verl_loop import imports
from whet.config.dialects.verl_rules import (
    MODEL,
    NOTHING,
    Native,
    anywhere,
    at_least,
    has_reward_model,
    is_flag,
    is_one_of,
)
from whet.config.faults import shown
from whet.types import ConfigError

RM = "reward_model"
_ONE = "Rollouts are read one at a time, so that no cut changes a score."
_WHOLE = "One process holds it whole; no number changes."
_LATER = "sharded, offloaded or trained reward models; read there only with reward_model.enable=True"


def reward_model(v: Values) -> Native:
    """Its score, weight 1. Without an input_tokenizer it is given the policy's tokens; else the conversation in its own
    template, cut at the right as there."""
    if not has_reward_model(v):
        return NOTHING
    native = "rewards.rm.model"
    out: Native = {f"{native}.path": anywhere(v, f"{RM}.model.path")}
    limit, decoder = v[f"{RM}.max_length"], v[f"{RM}.model.input_tokenizer"]
    if decoder is None:
        if limit is not None:
            raise ConfigError(
                f"{RM}.max_length={shown(limit)} is read where {RM}.model.input_tokenizer is given; leave it out"
            )
        return {**out, f"{native}.reads": "tokens"}
    if decoder not in (v[f"{MODEL}.path"], v["data.tokenizer"]):
        raise ConfigError(
            f"{RM}.model.input_tokenizer={shown(decoder)}: it decodes the policy's tokens, so it is the policy's own: "
            f"{v[f'{MODEL}.path']}, or null where both models share tokens and template"
        )
    if limit is None:
        most = whole(v, "data.max_prompt_length") + whole(v, "data.max_response_length")
    else:
        most = whole(v, f"{RM}.max_length")
    return {**out, f"{native}.max_tokens": most, f"{native}.overlong": "truncate_right"}


def _own_code(v: Values) -> Native:
    key = f"{RM}.model.trust_remote_code"
    if flag(v, key) and has_reward_model(v):
        raise ConfigError(f"{key}=True: code that comes with a model is never run; leave it out")
    return NOTHING


def later(name: str, default: object) -> Key:
    """A key of the reward model that is not built yet: any value passes as long as there is none."""
    key = f"{RM}.{name}"

    def check(v: Values) -> Native:
        value = v.get(key, default)
        if has_reward_model(v) and not same(value, default):
            raise Unbuilt(f"{key}={shown(value)} is coming, not built yet; today: {shown(default)}")
        return NOTHING

    return Key(name=key, status="coming", default=default, reason=_LATER, translate=check)


def _model(name: str, *native: str, default: object, reason: str) -> Key:
    fed = (f"rewards.rm.model.{key}" for key in native)
    return translated(f"{RM}.{name}", reward_model, *fed, default=default, reason=reason)


KEYS: tuple[Key, ...] = (
    _model(
        "enable",
        default=False,
        reason="Its score alone is the reward, as there. A function of yours judges validation; without one the model "
        "does, where verl's table would.",
    ),
    _model(
        "model.input_tokenizer",
        "reads",
        "overlong",
        default=f"${{{MODEL}.path}}",
        reason="null: the policy's tokens as they are. Else the conversation in the reward model's own template.",
    ),
    _model("model.path", "path", default="~/models/Anomy-RM-v0.1", reason="Read where it is enabled."),
    _model(
        "max_length",
        "max_tokens",
        default=None,
        reason="Longer ones are cut at the right. null: prompt and response at their longest, as there.",
    ),
    translated(
        f"{RM}.model.external_lib",
        imports,
        "imports",
        default=f"${{{MODEL}.external_lib}}",
        reason="Where it is enabled.",
    ),
    derived(f"{RM}.model.trust_remote_code", _own_code, default=False, reason="Code of models is never run."),
    *(
        derived(f"{RM}.{name}", at_least(f"{RM}.{name}", 1), default=default, reason=_ONE)
        for name, default in (
            ("micro_batch_size_per_gpu", 16),
            ("micro_batch_size", None),
            ("forward_max_token_len_per_gpu", "${critic.forward_max_token_len_per_gpu}"),
        )
    ),
    derived(
        f"{RM}.use_dynamic_bsz",
        is_flag(f"{RM}.use_dynamic_bsz"),
        default="${critic.use_dynamic_bsz}",
        reason=_ONE,
    ),
    derived(
        f"{RM}.model.use_remove_padding",
        is_flag(f"{RM}.model.use_remove_padding"),
        default=False,
        reason="Nothing is padded.",
    ),
    derived(
        f"{RM}.strategy",
        is_one_of(f"{RM}.strategy", "fsdp", "fsdp2", "megatron"),
        default="fsdp",
        reason=_WHOLE,
    ),
    later("model.fsdp_config.param_offload", False),
    *(
        derived(f"{RM}.{name}", at_least(f"{RM}.{name}", least), default=default, reason=_WHOLE)
        for name, default, least in (
            ("model.fsdp_config.min_num_params", 0, 0),
            ("model.fsdp_config.wrap_policy.min_num_params", 0, 0),
            ("model.fsdp_config.fsdp_size", -1, -1),
            ("ulysses_sequence_parallel_size", 1, 1),
        )
    ),
)
