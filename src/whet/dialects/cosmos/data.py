"""Cosmos-RL: data sets, rewards and validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whet.config.urls import is_remote
from whet.dialects.cosmos.values import (
    POLICY,
    at_revision,
    is_sft,
    number,
    text,
    texts,
    weights,
    whole,
)
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.typed import flag
from whet.types import ConfigError, Json

FILES = (".parquet", ".jsonl", ".json", ".csv")
THINK_ANSWER = r"<think>(?:(?!</?think>).)*</think>\n\n<answer>.*</answer>"
"""Cosmos's form of a reply: thoughts without a nested tag, a blank line, an answer, and nothing around them."""

REWARDS: dict[str, dict[str, Json]] = {
    "single_choice": {"function": "whet.rewards.tagged:single_choice"},
    "boxed_math": {"function": "math"},
    "direct_math": {"function": "whet.rewards.answer_line:direct_math"},
    "gsm8k": {"function": "number"},
    "format": {"function": "format", "arguments": {"pattern": THINK_ANSWER}},
    "overlong": {"function": "overlong"},
}
"""Cosmos's reward components as native ones."""


# ---------------------------------------------------------------- data sets


def data(values: Values) -> dict[str, Json]:
    """The training source, without the rows that validation takes from it."""
    rows = held_out(values)
    source = _training(values) | ({} if rows is None else {"skip": rows})
    return {f"data.train.0.{key}": value for key, value in source.items()}


def order(values: Values) -> dict[str, Json]:
    """Rows shuffled in every epoch, or as they stand."""
    return {"data.order": "shuffle" if flag(values, POLICY + "dataloader_shuffle") else "sequential"}


def held_out(values: Values) -> int | float | None:
    """The first rows of the training set, a number or a share, that validation asks where it has no set of its own.

    An SFT job holds out a tenth unless it says otherwise; an RL job only what it says.
    """
    if not values["validation.enable"] or values["validation.dataset.name"]:
        return None
    if values[POLICY + "dataset.test_size"] is None:
        return 0.1 if is_sft(values) else None
    return _test_size(values, POLICY + "dataset.test_size")


def _test_size(values: Values, key: str) -> int | float:
    """An int counts rows, a float is a share of them; at least one row."""
    size = number(values, key)
    if size < 0 or (isinstance(size, float) and size >= 1):
        raise ConfigError(f"{key}={size}: a share from 0.0 to below 1.0, or a whole number of rows.")
    return size or 1


def _training(values: Values) -> dict[str, Json]:
    source = _source(values, POLICY + "dataset")
    return source | _columns(values, source)


def _source(values: Values, at: str) -> dict[str, Json]:
    """What `load_dataset(name, subset, split=split)` would read, from this machine alone."""
    name, subset = (text(values, f"{at}.{key}") for key in ("name", "subset"))
    name = at_revision(values, name, f"{at}.revision", kind="datasets/")
    splits: list[Json] = [*texts(values, f"{at}.split")]
    split = splits[0] if len(splits) == 1 else splits
    if not name:
        raise ConfigError(
            f"{at}.name is empty: give a local file or folder. A data set that a launch script would pass is named as "
            "'file.py:function', a function that returns the rows."
        )
    if ":" in name and not is_remote(name):
        arguments = values["custom"] | _without_empty({"subset": subset, "split": split})
        return {"function": name} | _without_empty({"arguments": arguments})
    if name.endswith(FILES):
        if subset or splits not in ([], ["train"]):
            raise ConfigError(
                f"{at}: {name} is one file and has no subset, and no split but 'train'; leave them out."
            )
        return {"path": name}
    if any("[" in str(each) for each in splits):
        raise NotSupportedYet(
            f"{at}.split={split!r}: parts of a split are coming; name whole ones, or put whet.data.train on top."
        )
    return {"path": name} | _without_empty({"subset": subset, "split": split})


def _without_empty(given: Mapping[str, Json]) -> dict[str, Json]:
    return {key: value for key, value in given.items() if value}


def _columns(values: Values, source: Mapping[str, Json]) -> dict[str, Json]:
    """The columns by name; rows of a function have native ones unless the file says otherwise."""
    if is_sft(values):
        column, system = (text(values, POLICY + k) for k in ("conversation_column_name", "system_prompt"))
        return _without_empty({"messages": column, "system": system})
    prompt, answer = (text(values, POLICY + k) for k in ("prompt_column_name", "response_column_name"))
    if not prompt and "path" in source:
        raise ConfigError(f"{POLICY}prompt_column_name is empty: it is required with a data set of columns.")
    return _without_empty({"prompt": prompt, "answer": answer})


# ---------------------------------------------------------------- rewards


def training_rewards(values: Values) -> dict[str, float]:
    """The components that training weighs, the length penalty where it is on."""
    mine = weights(values, POLICY + "reward_function")
    if not mine:
        raise ConfigError(f"{POLICY}reward_function is empty: give at least one of {', '.join(REWARDS)}.")
    return {"overlong": 1.0} | mine if values[POLICY + "overlong_reward.enable_overlong_penalty"] else mine


def rewards(values: Values) -> dict[str, Json]:
    """The weighted components, and what validation alone reads (weight 0)."""
    if is_sft(values):
        return {}
    mine = training_rewards(values)
    judging = weights(values, "validation.reward_function") if values["validation.enable"] else {}
    out: dict[str, Json] = {}
    for name in mine | judging:
        at = f"rewards.{short(name)}."
        entry = _reward(name, values) | {"weight": _weight(name, mine.get(name, 0.0), values)}
        out |= {at + key: value for key, value in entry.items()}
    return out


def short(name: str) -> str:
    """What a component is called here: your own 'file.py:name' by its last part."""
    return name.rpartition(":")[2]


def _reward(name: str, values: Values) -> dict[str, Any]:
    """The function of a component, and its arguments."""
    if name not in REWARDS and ":" not in name:
        raise ConfigError(
            f"reward function {name!r} is not known: {', '.join(REWARDS)}, or your own as 'file.py:name'."
        )
    if name != "overlong":
        return REWARDS.get(name, {"function": name})
    buffer = whole(values, POLICY + "overlong_reward.buffer_length")
    longest = whole(values, "rollout.max_response_length")
    if not 0 < buffer <= longest:
        raise ConfigError(
            f"{POLICY}overlong_reward.buffer_length={buffer} must be above 0 and at most "
            f"rollout.max_response_length={longest}."
        )
    return REWARDS[name] | {"arguments": {"max_tokens": longest, "buffer": buffer}}


def _weight(name: str, weight: float, values: Values) -> float:
    """The penalty ends at -1 here, at -penalty_factor in Cosmos."""
    return weight * (number(values, POLICY + "overlong_reward.penalty_factor") if name == "overlong" else 1)


# ---------------------------------------------------------------- validation


TRAINING = {
    "top_k": "rollout.sampling_config.top_k",
    "top_p": "rollout.sampling_config.top_p",
    "max_response_length": "rollout.max_response_length",
}
"""What validation takes from training where its own value is null."""


def validation(values: Values) -> dict[str, Json]:
    """Evaluation every freq steps and at the end; an SFT job measures the loss of the held-out replies."""
    if not values["validation.enable"]:
        return {}
    out = {f"data.eval.0.{key}": value for key, value in _held_out_source(values).items()}
    out |= {
        "data.exclude_eval": False,
        "eval.every": whole(values, "validation.freq", least=1),
        "eval.at_start": values["validation.val_before_train"],
    }
    return out if is_sft(values) else out | _asked(values) | _judge(values)


def _held_out_source(values: Values) -> dict[str, Json]:
    """validation.dataset, or the first rows of the training set."""
    rows = held_out(values)
    if rows is not None:
        return _training(values) | {"limit": rows}
    source = _source(values, "validation.dataset")
    most = "validation.dataset.test_size"
    limit = {} if values[most] is None else {"limit": _test_size(values, most)}
    return source | _columns(values, source) | limit


def _asked(values: Values) -> dict[str, Json]:
    """How held-out prompts are asked."""
    used = {key: _first(values, f"validation.{key}", other) for key, other in TRAINING.items()}
    return {
        "eval.samples": values["validation.n_generation"],
        "eval.sampling.temperature": values["validation.temperature"],
        "eval.sampling.top_k": max(whole(values, used["top_k"]), 0),
        "eval.sampling.top_p": values[used["top_p"]],
        "eval.sampling.repetition_penalty": values["validation.repetition_penalty"],
        "eval.sampling.max_tokens": values[used["max_response_length"]],
    }


def _first(values: Values, key: str, other: str) -> str:
    """The key, or the other one where it is null."""
    return other if values[key] is None else key


def _judge(values: Values) -> dict[str, Json]:
    """By what replies are judged: a weighted sum of components, training's if none is given."""
    mine = weights(values, "validation.reward_function")
    if not mine or mine == training_rewards(values):
        return {}
    return {"eval.reward": {short(name): _weight(name, weight, values) for name, weight in mine.items()}}
