"""Rewards given from Python, in place of those of a config file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from whet.config.load import Loaded, is_of_call
from whet.config.schema import Config
from whet.rewards.bind import RewardFunction
from whet.types import ConfigError

Rewards = Mapping[str, RewardFunction | Mapping[str, Any] | str] | RewardFunction | None
"""One function, or several by name; or config sections, or what their `function` would name."""


def named_functions(rewards: Rewards) -> tuple[dict[str, RewardFunction], dict[str, Any] | None]:
    """The functions among rewards by name, and the section `rewards` of a config; None where none are given."""
    if callable(rewards):
        rewards = {"reward": rewards}
    if rewards is not None and not isinstance(rewards, Mapping):
        raise ConfigError(
            f"rewards: got {rewards!r}, expected a function, or a mapping of functions and config sections by "
            'name: rewards={"mine": my_function, "right": {"function": "exact"}}'
        )
    functions = {name: r for name, r in (rewards or {}).items() if callable(r)}
    if rewards is None:
        return functions, None
    return functions, {
        name: {"function": f"object:{name}"} if callable(r) else r for name, r in rewards.items()
    }


def only_rewards(loaded: Loaded, names: Collection[str]) -> Loaded:
    """Rewards given from Python replace those of the file in every stage, and no others: what the call gives to a stage
    or by an override stays."""
    here = (path for path, place in loaded.origins.items() if is_of_call(place))
    own = (path[2:] if path[:1] == ("stages",) else path for path in here)
    kept = {*names, *(path[1] for path in own if path[:1] == ("rewards",) and len(path) > 1)}

    def keep(cfg: Config) -> Config:
        return cfg.model_copy(update={"rewards": {n: r for n, r in cfg.rewards.items() if n in kept}})

    return replace(loaded, config=keep(loaded.config), stages=tuple(map(keep, loaded.stages)))
