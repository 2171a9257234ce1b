"""Cosmos-RL: data sets, rewards and validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whet.config.dialects.cosmos_values import POLICY, is_sft, number, text, texts, weights, whole
from whet.config.dialects.key import Values
from whet.types import ConfigError, Json

FILES = (".parquet", ".jsonl", ".json", ".csv")
CONVERSATIONS = "whet.data.conversations:demonstrations"
THINK_ANSWER = r"<think>(?:(?!</?think>).)*</think>\n\n<answer>.*</answer>"
"""Cosmos's form of a reply: thoughts without a nested tag, a blank line, an answer, and nothing around them."""

REWARDS: dict[str, dict[str, Json]] = {
    "single_choice": {"function": "whet.rewards.tagged:single_choice"},
    "boxed_math": {"function": "math"},
    "gsm8k": {"function": "number"},
    "format": {"function": "format", "arguments": {"pattern": THINK_ANSWER}},
    "overlong": {"function": "overlong"},
}
"""Cosmos's reward components as native ones."""


# ---------------------------------------------------------------- data sets


def data(values: Values) -> dict[str, Json]:
    """The training source: a file, a folder with its splits, or a function of yours by 'file.py:name'."""
    at = "data.train.0."
    source = _source(values, POLICY + "dataset")
    if is_sft(values):
        column, system = (text(values, POLICY + k) for k in ("conversation_column_name", "system_prompt"))
        return _conversations(source, column=column, system=system)
    return {at + k: v for k, v in (source | _columns(values, source)).items()}


def _conversations(source: Mapping[str, Json], *, column: str, system: str) -> dict[str, Json]:
    """Conversations become a prompt and its last reply; a function of yours gives prompt and response itself."""
    if "function" in source:
        return {f"data.train.0.{k}": v for k, v in source.items()}
    arguments: dict[str, Json] = {"path": source["path"], "column": column}
    if system:
        arguments["system"] = system
    return {"data.train.0.function": CONVERSATIONS, "data.train.0.arguments": arguments}


def _source(values: Values, at: str) -> dict[str, Json]:
    """What `load_dataset(name, subset, split=split)` would read, from this machine alone."""
    name, subset, splits = (
        text(values, f"{at}.name"),
        text(values, f"{at}.subset"),
        texts(values, f"{at}.split"),
    )
    if not name:
        raise ConfigError(
            f"{at}.name is empty: give a local file or folder. A data set that a launch script would pass is named as "
            "'file.py:function', a function that returns the rows."
        )
    if ":" in name:
        given = {"subset": subset, "split": splits[0] if len(splits) == 1 else splits}
        arguments = values["custom"] | {k: v for k, v in given.items() if v}
        return {"function": name, **({"arguments": arguments} if arguments else {})}
    if name.endswith(FILES):
        if subset or splits not in ([], ["train"]):
            raise ConfigError(
                f"{at}: {name} is one file and has no subset, and no split but 'train'; leave them out."
            )
        return {"path": name}
    folder = f"{name}/{subset}" if subset else name
    return {"path": [f"{folder}/{s}*" for s in splits] if splits else folder}


def _columns(values: Values, source: Mapping[str, Json]) -> dict[str, str]:
    """The columns by name; rows of a function have them as prompt and answer unless the file says otherwise."""
    prompt, answer = (text(values, POLICY + k) for k in ("prompt_column_name", "response_column_name"))
    if not prompt and "path" in source:
        raise ConfigError(f"{POLICY}prompt_column_name is empty: it is required with a data set of columns.")
    return {k: v for k, v in (("prompt", prompt), ("answer", answer)) if v}


# ---------------------------------------------------------------- rewards


def rewards(values: Values) -> dict[str, Json]:
    """The weighted components, the length penalty where it is on, and what validation alone reads (weight 0)."""
    if is_sft(values):
        return {}
    mine = weights(values, POLICY + "reward_function")
    if not mine:
        raise ConfigError(f"{POLICY}reward_function is empty: give at least one of {', '.join(REWARDS)}.")
    if values[POLICY + "overlong_reward.enable_overlong_penalty"]:
        mine = {"overlong": 1.0} | mine
    out: dict[str, Json] = {}
    for name, weight in mine.items():
        out |= _reward(name, weight, values)
    for name in weights(values, "validation.reward_function") if values["validation.enable"] else {}:
        if name not in mine:
            out |= _reward(name, 0.0, values)
    return out


def _reward(name: str, weight: float, values: Values) -> dict[str, Json]:
    """One native reward; your own function is named as 'file.py:name' and called by its last part."""
    if name not in REWARDS and ":" not in name:
        raise ConfigError(
            f"reward function {name!r} is not known here: {', '.join(REWARDS)}, or your own as 'file.py:name' "
            "(direct_math is coming)."
        )
    at = f"rewards.{name.rpartition(':')[2]}."
    entry: dict[str, Any] = REWARDS.get(name, {"function": name})
    if name == "overlong":
        buffer = whole(values, POLICY + "overlong_reward.buffer_length")
        longest = whole(values, "rollout.max_response_length")
        if not 0 < buffer <= longest:
            raise ConfigError(
                f"{POLICY}overlong_reward.buffer_length={buffer} must be above 0 and at most "
                f"rollout.max_response_length={longest}."
            )
        entry = entry | {"arguments": {"max_tokens": longest, "buffer": buffer}}
        weight *= number(values, POLICY + "overlong_reward.penalty_factor")
    return {at + k: v for k, v in {**entry, "weight": weight}.items()}


# ---------------------------------------------------------------- validation


TRAINING = {
    "top_k": "rollout.sampling_config.top_k",
    "top_p": "rollout.sampling_config.top_p",
    "max_response_length": "rollout.max_response_length",
}
"""What validation takes from training where its own value is null."""


def validation(values: Values) -> dict[str, Json]:
    """Evaluation every freq steps and at the end, with sampling of its own."""
    if not values["validation.enable"]:
        return {}
    if is_sft(values):
        raise ConfigError("validation.enable: the held-out loss of an SFT job is coming; set it to false.")
    source = _source(values, "validation.dataset")
    out = {f"data.eval.0.{k}": v for k, v in (source | _columns(values, source)).items()}
    used = {k: _first(values, f"validation.{k}", key) for k, key in TRAINING.items()}
    out |= {
        "data.exclude_eval": False,
        "eval.every": values["validation.freq"],
        "eval.at_start": values["validation.val_before_train"],
        "eval.samples": values["validation.n_generation"],
        "eval.sampling.temperature": values["validation.temperature"],
        "eval.sampling.top_k": max(whole(values, used["top_k"]), 0),
        "eval.sampling.top_p": values[used["top_p"]],
        "eval.sampling.repetition_penalty": values["validation.repetition_penalty"],
        "eval.sampling.max_tokens": values[used["max_response_length"]],
    }
    return out | _judge(values)


def _first(values: Values, key: str, other: str) -> str:
    """The key, or the other one where it is null."""
    return other if values[key] is None else key


def _judge(values: Values) -> dict[str, Json]:
    """Which reward judges: the training sum if none is given, or one of them."""
    mine, training = (
        weights(values, key) for key in ("validation.reward_function", POLICY + "reward_function")
    )
    if not mine or mine == training:
        return {}
    if len(mine) > 1:
        raise ConfigError(
            "validation.reward_function: a weighted sum that is not training's is coming; give one name, or leave it "
            "out."
        )
    return {"eval.reward": next(iter(mine)).rpartition(":")[2]}
