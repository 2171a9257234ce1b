"""The rows of Trinity-RFT's inference engines: the one of the policy, and those of models beside it."""

from __future__ import annotations

from collections.abc import Mapping

from whet.config.dialects.key import Key, Values, coming, derived, mapped, translated
from whet.config.dialects.trinity_data import ENGINE, batch
from whet.config.dialects.trinity_presets import preset
from whet.config.dialects.trinity_run import chat_template, teacher
from whet.config.dialects.trinity_values import at_any_value, entries, given
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
_GPUS = "counted with the machine's GPUs: train_batch_size must be divisible by those that are left"


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


def _speed(at: str) -> tuple[Key, ...]:
    """vLLM's own means, which never change what is sampled."""
    return (
        at_any_value(f"{at}.use_v1", "vLLM's older and newer engine", default=True),
        at_any_value(f"{at}.enable_prefix_caching", "a group's prompt is computed once anyway", default=True),
        at_any_value(f"{at}.enable_chunked_prefill", "vLLM's own way with long prompts", default=True),
        derived(
            f"{at}.enforce_eager",
            graphs,
            default=False,
            reason="the embedded engine chooses by itself: on a GPU CUDA graphs where a model allows it",
        ),
        derived(f"{at}.gpu_memory_utilization", cache, default=0.9, reason="sized by machine.kv_cache_mb"),
        coming(f"{at}.dtype", "another dtype than the trainer's", default="bfloat16", harmless=("auto",)),
        coming(f"{at}.enable_log_requests", "an OpenAI server over the engine", default=False),
        coming(f"{at}.enable_openai_api", "an OpenAI server over the engine", default=False),
        coming(f"{at}.enable_auto_tool_choice", "tools", default=False),
        coming(f"{at}.tool_call_parser", "tools", default=None),
        coming(f"{at}.reasoning_parser", "an OpenAI server over the engine", default=None),
    )


AUXILIARY_MODELS: tuple[Key, ...] = (
    translated(
        OTHERS,
        teacher,
        "reference.path",
        default=[],
        reason="the teacher of on_policy_distill; other models beside the policy are coming",
    ),
    translated(
        f"{OTHERS}[].model_path",
        teacher,
        "reference.path",
        default=None,
        reason="the teacher of on_policy_distill",
    ),
    derived(f"{OTHERS}[].tensor_parallel_size", batch, default=1, reason=_GPUS),
)

MORE_ENGINE: tuple[Key, ...] = (
    mapped(f"{ENGINE}.seed", "seed", default=42, reason="of the whole run"),
    mapped(f"{ENGINE}.ignore_eos", "rollout.sampling.ignore_eos", default=False, reason="vLLM's name"),
    translated(
        f"{ENGINE}.enable_thinking",
        thinking,
        "tokenizer.chat_arguments",
        default=None,
        reason="left to the template where it is not given",
    ),
    translated(
        f"{ENGINE}.chat_template",
        chat_template,
        "tokenizer.chat_template",
        default=None,
        reason="null: the model's",
    ),
    *(
        derived(f"{ENGINE}.{key}", like_the_model, default=None, reason=f"must be model.{key}")
        for key in LIMITS
    ),
    at_any_value(f"{ENGINE}.name", "a name; nothing is called by it", default=None),
    *_speed(ENGINE),
    derived(f"{OTHERS}[].engine_num", batch, default=1, reason=_GPUS),
    at_any_value(f"{OTHERS}[].name", "a name; nothing is called by it", default=None),
    at_any_value(f"{OTHERS}[].seed", "a teacher samples nothing", default=42),
    derived(
        f"{OTHERS}[].max_model_len",
        room,
        default=None,
        reason="a teacher must read all that the policy writes",
    ),
    *(
        at_any_value(f"{OTHERS}[].{key}", "a teacher writes nothing", default=None)
        for key in (*LIMITS[1:], "enable_thinking", "ignore_eos")
    ),
    coming(f"{OTHERS}[].engine_type", "other engines for models beside the policy", default="vllm"),
    coming(f"{OTHERS}[].enable_history", "workflows of your own", default=False),
    coming(f"{OTHERS}[].chat_template", "a template of a model beside the policy", default=None),
    *_speed(OTHERS + "[]"),
)
"""Keys that the document leaves to the source code."""
