"""verl's reward model: where it is enabled, its score alone is what a rollout gets."""

from __future__ import annotations

from whet.config.faults import shown
from whet.dialects.row import Values
from whet.dialects.typed import flag, whole
from whet.dialects.verl.rules import (
    MODEL,
    NOTHING,
    Native,
    anywhere,
    has_reward_model,
)
from whet.types import ConfigError

RM = "reward_model"


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
