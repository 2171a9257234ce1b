"""Arguments of the public functions. One of a wrong type is refused by its name, before anything is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple

from whet.config.load import Loaded
from whet.config.schema import Config
from whet.types import ConfigError, WhetError

RewardFunction = Callable[..., Any]
Rewards = Mapping[str, RewardFunction | Mapping[str, Any] | str] | RewardFunction | None
"""One function, or several by name; or config sections, or what their `function` would name."""


class ArgumentKind(NamedTuple):
    """What an argument has to be."""

    fits: Callable[[object], bool]
    words: str


def _whole(value: object) -> bool:
    """numpy's numbers are whole, too: the step of a line of a table."""
    return value is None or (isinstance(value, Integral) and not isinstance(value, bool))


PATH = ArgumentKind(lambda v: isinstance(v, str | os.PathLike), "a path (str or pathlib.Path)")
FILE = ArgumentKind(lambda v: v is None or PATH.fits(v), f"{PATH.words}, or None")
TEXT = ArgumentKind(lambda v: v is None or isinstance(v, str), "a text (str), or None")
WHOLE = ArgumentKind(_whole, "a whole number (int), or None")
FLAG = ArgumentKind(lambda v: isinstance(v, bool), "True or False")
FUNCTION = ArgumentKind(callable, "a function")
TEXTS = ArgumentKind(
    lambda v: (
        isinstance(v, Sequence) and not isinstance(v, str | bytes) and all(isinstance(t, str) for t in v)
    ),
    "a list of texts: ['train.steps=5']",
)


def expect_overrides(given: object) -> None:
    """`overrides` of the public functions."""
    if isinstance(given, str):
        raise ConfigError(f"overrides: got the text {given!r}; expected a list of such texts: [{given!r}]")
    expect({"overrides": (given, TEXTS)})


def expect(given: Mapping[str, tuple[object, ArgumentKind]], error: type[WhetError] = ConfigError) -> None:
    """given: value and kind of each argument, by its name."""
    for name, (value, kind) in given.items():
        if not kind.fits(value):
            raise error(f"{name}: got {_shown(value)}, expected {kind.words}")


def _shown(value: object) -> str:
    """A value of the caller's, whose own words may fail."""
    try:
        return f"{value!r:.100}"
    except Exception:  # noqa: BLE001  foreign code
        return f"a {type(value).__name__}"


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
    """Rewards given from Python replace the file's rewards in every stage, and no others."""
    here = (path for path, place in loaded.origins.items() if not place.startswith(f"{loaded.file}:"))
    own = (path[2:] if path[:1] == ("stages",) else path for path in here)
    kept = {*names, *(path[1] for path in own if path[:1] == ("rewards",) and len(path) > 1)}

    def keep(cfg: Config) -> Config:
        return cfg.model_copy(update={"rewards": {n: r for n, r in cfg.rewards.items() if n in kept}})

    return replace(loaded, config=keep(loaded.config), stages=tuple(map(keep, loaded.stages)))
