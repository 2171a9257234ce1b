"""Reading a Trinity-RFT file's values: its empty texts, its open dicts and lists, the names of its functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from whet.config.faults import shown
from whet.config.keys import dotted
from whet.config.tree import leaves
from whet.dialects.row import NotSupportedYet, Values
from whet.tables import near
from whet.types import ConfigError, Json

TASKSET = "buffer.explorer_input.taskset"
EVAL_TASKSETS = "buffer.explorer_input.eval_tasksets"
EXPERIENCES = "buffer.trainer_input.experience_buffer"
CONFIG = "trainer.trainer_config"
MODEL = f"{CONFIG}.actor_rollout_ref.model"
ACTOR = f"{CONFIG}.actor_rollout_ref.actor"
REF = f"{CONFIG}.actor_rollout_ref.ref"
CRITIC = f"{CONFIG}.critic"
VERL_TRAINER = f"{CONFIG}.trainer"


def given(value: Json) -> Json:
    """The value; None for the texts by which a Trinity file says so ('None', 'null', '')."""
    return None if value in ("None", "null", "") else value


def text(values: Values, key: str) -> str | None:
    """A nullable text. In Trinity's YAML `None` is a string, and means what it says."""
    value = given(values.get(key))
    return None if value is None else str(value)


def whole(values: Values, key: str, *, least: int = 1) -> int | None:
    """A whole number, or None where the file says null. ConfigError for anything else."""
    value = given(values.get(key))
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key}: got {shown(value)}, expected a whole number >= {least}.")
    return value


def count(values: Values, key: str, *, least: int = 1) -> int:
    """A whole number that must be there."""
    number = whole(values, key, least=least)
    if number is None:
        raise ConfigError(f"{key}: got null, expected a whole number >= {least}.")
    return number


def arguments(values: Values, key: str, defaults: Mapping[str, Json]) -> dict[str, Json]:
    """The arguments of a function of Trinity's, defaults filled in. ConfigError for one that it does not have."""
    found = values[f"{key}.*"] or {}
    for name in found:
        if name not in defaults:
            raise ConfigError(
                f"{key}.{name}: no such argument{near(name, defaults)}; there are: {', '.join(defaults) or 'none'}."
            )
    return {**defaults, **{k: v for k, v in found.items() if v is not None}}


def entries(values: Values, key: str) -> list[dict[str, Json]]:
    """The entries of a list of sections, each by dotted names inside it."""
    return [{dotted(path): v for path, v in leaves(entry)} for entry in values.get(key) or []]


def entry(values: Values, key: str, name: str) -> dict[str, Json]:
    """One section of the user's name, by dotted names inside it. ConfigError without it."""
    given = values.get(key)
    there: dict[str, Json] = given if isinstance(given, dict) else {}
    found = there.get(name)
    if not isinstance(found, dict):
        raise ConfigError(f"{key}.{name}: must be given; there are: {', '.join(there) or 'none'}.")
    return {dotted(path): v for path, v in leaves(found)}


def agreed(values: Values, defaults: Mapping[str, Json]) -> Json:
    """One meaning that several keys name: the value that differs from its default; the first default, if none does.

    ConfigError where two differ from their defaults and from one another.
    """
    told = {
        key: values.get(key) for key, default in defaults.items() if values.get(key) not in (None, default)
    }
    if len(set(map(repr, told.values()))) > 1:
        listed = ", ".join(f"{key}: {value}" for key, value in told.items())
        raise ConfigError(f"{listed}: these are one setting; give one of them, or the same value twice.")
    return next(iter(told.values()), next(iter(defaults.values())))


def known_as(name: str, known: Mapping[str, object], *, key: str, coming: Collection[str] = ()) -> None:
    """NotSupportedYet for a name that Trinity has and whet has not yet, ConfigError for one that neither knows."""
    if name in coming:
        raise NotSupportedYet(f"{key}: {name} is coming, not built yet; here: {', '.join(known)}.")
    if name not in known:
        raise ConfigError(f"{key}: {name} is not known{near(name, known)}; here: {', '.join(known)}.")


def accepted(values: Values) -> Mapping[str, Json]:
    """Nothing is asked for."""
    return {}
