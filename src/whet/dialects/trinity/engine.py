"""The rows of Trinity-RFT's inference engines: the one of the policy, and those of models beside it."""

from __future__ import annotations

from collections.abc import Mapping

from whet.dialects.row import Values
from whet.dialects.trinity.data import ENGINE
from whet.dialects.trinity.presets import preset
from whet.dialects.trinity.values import entries, given
from whet.types import ConfigError, Json

OTHERS = "explorer.auxiliary_models"
LIMITS = (
    "max_model_len",
    "max_prompt_tokens",
    "max_response_tokens",
    "min_response_tokens",
    "enable_prompt_truncation",
    "repetition_penalty",
)


def like_the_model(values: Values) -> Mapping[str, Json]:
    """The engine's own limits must be the model's, which the trainer goes by."""
    for key in LIMITS:
        own, model = given(values[f"{ENGINE}.{key}"]), values[f"model.{key}"]
        if own is not None and own != model:
            raise ConfigError(f"{ENGINE}.{key}: {own} is not model.{key} = {model}; write it there.")
    return {}


def thinking(values: Values) -> Mapping[str, Json]:
    """enable_thinking is a variable of the chat template, given where the file gives it."""
    value = values[f"{ENGINE}.enable_thinking"]
    return {} if value is None else {"tokenizer.chat_arguments": {"enable_thinking": value}}


def cache(values: Values) -> Mapping[str, Json]:
    """A share of a GPU's memory, between 0 and 1."""
    named = {"": values[f"{ENGINE}.gpu_memory_utilization"]}
    named |= {
        f"[{n}]": own.get("gpu_memory_utilization", 0.9) for n, own in enumerate(entries(values, OTHERS))
    }
    for at, share in named.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            key = f"{OTHERS}{at}" if at else ENGINE
            raise ConfigError(
                f"{key}.gpu_memory_utilization: got {share!r}, expected a number above 0, at most 1."
            )
    return {}


def graphs(values: Values) -> Mapping[str, Json]:
    """CUDA graphs change no number."""
    return {}


def room(values: Values) -> Mapping[str, Json]:
    """A teacher must be able to read what the policy writes."""
    if preset(values).advantage != "on_policy_distill":
        return {}
    need, lengths = (
        values["model.max_model_len"],
        [own.get("max_model_len") for own in entries(values, OTHERS)],
    )
    for n, length in enumerate(lengths):
        if given(length) is not None and need is not None and length < need:
            raise ConfigError(
                f"{OTHERS}[{n}].max_model_len: {length} is less than model.max_model_len = {need}."
            )
    return {}
