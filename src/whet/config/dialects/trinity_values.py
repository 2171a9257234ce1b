"""Reading a Trinity-RFT file's values: its empty texts, its open dicts and lists, and what the algorithm is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from whet.config.dialects.key import Key, Values
from whet.config.faults import shown
from whet.config.keys import dotted
from whet.config.tree import leaves
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


def section(name: str, *native: str, default: Json = None) -> Key:
    """The row of a section: what is in it has rows of its own."""
    return Key(
        name=name,
        status="mapped",
        default=default,
        native=native,
        reason="a section; its keys have their own rows",
    )


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


# ---------------------------------------------------------------- algorithms

Kind = Literal["online", "sft", "dpo"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What an algorithm_type stands for where its functions are not named."""

    recipe: str
    """The native recipe."""
    advantage: str
    loss: str
    kl_loss: str = "k2"
    repeat_times: int = 1
    kind: Kind = "online"
    in_trainer: bool = False
    """Advantages are computed in the trainer, so a KL penalty in the rewards has an effect."""


PRESETS: dict[str, Preset] = {
    "ppo": Preset(recipe="ppo", advantage="ppo", loss="ppo", in_trainer=True),
    "grpo": Preset(recipe="grpo", advantage="grpo", loss="ppo", repeat_times=2),
    "rloo": Preset(recipe="rloo", advantage="rloo", loss="ppo", repeat_times=2, in_trainer=True),
    "reinforceplusplus": Preset(
        recipe="reinforce", advantage="reinforceplusplus", loss="ppo", in_trainer=True
    ),
    "sft": Preset(recipe="sft", advantage="none", loss="sft", kl_loss="none", kind="sft"),
    "dpo": Preset(recipe="dpo", advantage="none", loss="dpo", kl_loss="none", repeat_times=2, kind="dpo"),
}

COMING_ALGORITHMS = (
    "opmd",
    "mix",
    "asymre",
    "topr",
    "cispo",
    "gspo",
    "sapo",
    "mix_chord",
    "raft",
    "sppo",
    "rec",
    "multi_step_grpo",
    "on_policy_distill",
    "cpt",
    "dapo",
    "gigpo",
    "jsd",
    "grpo_verl",
)


def preset(values: Values) -> Preset:
    """The preset of algorithm.algorithm_type. ConfigError for one that is not here."""
    name = str(values["algorithm.algorithm_type"])
    if name in PRESETS:
        return PRESETS[name]
    known = f"here: {', '.join(PRESETS)}"
    if name in COMING_ALGORITHMS:
        raise ConfigError(f"algorithm.algorithm_type: {name} is coming, not built yet; {known}.")
    raise ConfigError(f"algorithm.algorithm_type: {name!r} is not known{near(name, PRESETS)}; {known}.")


def online(values: Values) -> bool:
    """Whether the policy learns from its own rollouts, and not from a file."""
    return preset(values).kind == "online"


def repeat_times(values: Values) -> int:
    """Rollouts of a task: the preset's where the file does not say."""
    return whole(values, "algorithm.repeat_times") or preset(values).repeat_times
