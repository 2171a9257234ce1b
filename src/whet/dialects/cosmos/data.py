"""Cosmos-RL: data sets, rewards and validation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from whet.config.urls import is_remote
from whet.dialects.cosmos.steps import together_up
from whet.dialects.cosmos.values import POLICY, at_revision, is_sft, since, texts, weights
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.typed import rows_of_split
from whet.tables import unknown
from whet.types import ConfigError, Json

FILES = (".parquet", ".jsonl", ".json", ".csv")
THINK_ANSWER = r"<think>(?:(?!</?think>).)*</think>\n\n<answer>.*</answer>"
"""Cosmos's form of a reply: thoughts without a nested tag, a blank line, an answer, and nothing around them."""

REWARDS: dict[str, dict[str, Json]] = {
    "single_choice": {"function": "whet.rewards.tagged:single_choice"},
    "boxed_math": {"function": "math"},
    "direct_math": {"function": "whet.rewards.answer_line:direct_math"},
    "gsm8k": {"function": "whet.rewards.gsm8k:gsm8k"},
    "format": {"function": "format", "arguments": {"pattern": THINK_ANSWER}},
    "overlong": {"function": "overlong"},
}
"""Cosmos's reward components as native ones."""

A_QUARTER, A_TENTH = 0.25, 0.1
"""What is held out unless the file says how much: of a data set that it names, and of a script's."""


# ---------------------------------------------------------------- data sets


def data(values: Values) -> dict[str, Json]:
    """The training source without the rows that validation takes from it, shuffled in every epoch or as it stands."""
    source = _source(values, POLICY + "dataset")
    source |= _columns(values, source)
    if _is_shared(values):
        source |= _held_out(values, source)[0]
    order = "shuffle" if values[POLICY + "dataloader_shuffle"] else "sequential"
    return {f"data.train.0.{key}": value for key, value in source.items()} | {"data.order": order}


def _is_shared(values: Values) -> bool:
    """Whether validation takes rows of the training set. RL jobs do from 0.4.0 on; before, if they say how many."""
    own = not values["validation.enable"] or values["validation.dataset.name"]
    says = is_sft(values) or since(values, "0.4.0") or values[POLICY + "dataset.test_size"] is not None
    return not own and says


def _held_out(values: Values, source: Mapping[str, Json]) -> tuple[dict[str, Json], dict[str, Json]]:
    """The rows for training and for validation, where they share a data set.

    Of a data set that the file names the last rows are held out, of a script's the first.
    """
    if source.keys() & {"skip", "limit"}:
        raise NotSupportedYet(
            f"{POLICY}dataset.split={values[POLICY + 'dataset.split']!r}, of which validation would take a part, is "
            "coming; give validation.dataset a split of its own."
        )
    is_file = "path" in source
    size = _test_size(values, POLICY + "dataset.test_size", otherwise=A_QUARTER if is_file else A_TENTH)
    if not is_file:
        return {"skip": size}, {"limit": size}
    kept = round(1 - size, 12) if isinstance(size, float) else -size
    return {"limit": kept}, {"skip": kept}


def _test_size(values: Values, key: str, *, otherwise: float) -> int | float:
    """An int counts rows, a float is a share of them; at least one row."""
    size: int | float = otherwise if values[key] is None else values[key]
    if isinstance(size, float) and size >= 1:
        raise ConfigError(f"{key}={size}: expected a share from 0.0 to below 1.0, or a whole number of rows.")
    return size or 1


def _source(values: Values, at: str) -> dict[str, Json]:
    """What `load_dataset(name, subset, split=split)` would read, from this machine alone."""
    name, subset = (values[f"{at}.{key}"] or "" for key in ("name", "subset"))
    splits = texts(values, f"{at}.split")
    name = at_revision(values, name, f"{at}.revision", kind="datasets/")
    split: Json = splits[0] if len(splits) == 1 else splits
    if not name:
        raise ConfigError(
            f"{at}.name is empty: give a local file or folder. A data set that a launch script would pass is named as "
            "'file.py:function', a function that returns the rows."
        )
    # of the last part alone: a folder above it may be ~/.pyenv
    of_python = re.search(r"\.py\b", name.rpartition("/")[2]) and not name.endswith(FILES)
    if of_python and not is_remote(name) and (wrong := unknown({}, name)):
        raise ConfigError(f"{at}.name: {wrong}, a function that returns the rows.")
    if ":" in name and not is_remote(name):
        arguments = (values["custom"] or {}) | _without_empty({"subset": subset, "split": split})
        return {"function": name} | _without_empty({"arguments": arguments})
    if name.endswith(FILES):
        if subset or splits not in ([], ["train"]):
            raise ConfigError(
                f"{at}: {name} is one file and has no subset, and no split but 'train'; leave them out."
            )
        return {"path": name}
    part: dict[str, Json] = {"split": split}
    if len(splits) == 1:
        part = rows_of_split(splits[0], f"{at}.split")
    elif any("[" in each for each in splits):
        raise NotSupportedYet(f"{at}.split={split!r}: sums of parts of splits are coming; name whole ones.")
    return {"path": name} | _without_empty({"subset": subset} | part)


def _without_empty(given: Mapping[str, Json]) -> dict[str, Json]:
    return {key: value for key, value in given.items() if value}


def _columns(values: Values, source: Mapping[str, Json]) -> dict[str, Json]:
    """The columns by name; rows of a function have native ones unless the file says otherwise."""
    if is_sft(values):
        columns = {"messages": "conversation_column_name", "system_prompt": "system_prompt"}
    else:
        columns = {"prompt": "prompt_column_name", "answer": "response_column_name"}
    named = _without_empty({native: values[POLICY + key] for native, key in columns.items()})
    if not is_sft(values) and "prompt" not in named and "path" in source:
        raise ConfigError(f"{POLICY}prompt_column_name is empty: it is required with a data set of columns.")
    return named


# ---------------------------------------------------------------- rewards


def training_rewards(values: Values) -> dict[str, float]:
    """The components that training weighs, the length penalty where it is on."""
    mine = weights(values, POLICY + "reward_function")
    if not mine:
        raise ConfigError(f"{POLICY}reward_function is empty: give at least one of {', '.join(REWARDS)}.")
    return {"overlong": 1.0} | mine if values[POLICY + "overlong_reward.enable_overlong_penalty"] else mine


def rewards(values: Values) -> dict[str, Json]:
    """The weighted components, and what validation alone reads (weight 0)."""
    mine = training_rewards(values)
    judging = weights(values, "validation.reward_function") if values["validation.enable"] else {}
    out: dict[str, Json] = {}
    for name in mine | judging:
        entry = _reward(name, values) | {"weight": _weight(name, mine.get(name, 0.0), values)}
        out |= {f"rewards.{short(name)}.{key}": value for key, value in entry.items()}
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
    buffer, longest = values[POLICY + "overlong_reward.buffer_length"], values["rollout.max_response_length"]
    if not 0 < buffer <= longest:
        raise ConfigError(
            f"{POLICY}overlong_reward.buffer_length={buffer} must be above 0 and at most "
            f"rollout.max_response_length={longest}."
        )
    return REWARDS[name] | {"arguments": {"max_tokens": longest, "buffer": buffer}}


def _weight(name: str, weight: float, values: Values) -> float:
    """The penalty ends at -1 here, at -penalty_factor in Cosmos."""
    factor: float = values[POLICY + "overlong_reward.penalty_factor"] if name == "overlong" else 1
    return weight * factor


# ---------------------------------------------------------------- validation


def validation(values: Values) -> dict[str, Json]:
    """The source, how often it is asked, and by what replies are judged."""
    out = {f"data.eval.0.{key}": value for key, value in _validation_source(values).items()}
    out |= {"eval.interval": together_up(values, values["validation.freq"])}
    return out if is_sft(values) else out | _judge(values)


def _validation_source(values: Values) -> dict[str, Json]:
    """validation.dataset, or what is held out of the training set."""
    source = _source(values, POLICY + "dataset" if _is_shared(values) else "validation.dataset")
    source |= _columns(values, source)
    if _is_shared(values):
        return source | _held_out(values, source)[1]
    most = "validation.dataset.test_size"
    if values[most] is not None and source.keys() & {"skip", "limit"}:
        raise NotSupportedYet(
            f"{most}={values[most]} beside a part of a split is coming; leave one of the two out."
        )
    return source | ({} if values[most] is None else {"limit": _test_size(values, most, otherwise=0)})


def _judge(values: Values) -> dict[str, Json]:
    """By what replies are judged: a weighted sum of components, training's if none is given."""
    mine = weights(values, "validation.reward_function")
    if not mine or mine == training_rewards(values):
        return {}
    return {"eval.reward": {short(name): _weight(name, weight, values) for name, weight in mine.items()}}
