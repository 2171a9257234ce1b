"""Reading a Trinity-RFT file's values, and what its algorithm_type stands for."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from whet.config.keys import Path as Keys
from whet.config.keys import dotted
from whet.dialects.kinds import same
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.row import lines as rows
from whet.dialects.versions import GIVEN, since
from whet.tables import lines, near
from whet.types import ConfigError, Json

Native = dict[str, Json]
Own = Mapping[str, Json]
"""One buffer, taskset or model of a list, by dotted names inside it."""

INPUT = "buffer.explorer_input"
TASKSET = f"{INPUT}.taskset"
TASKSETS = f"{INPUT}.tasksets"
EVAL_TASKSETS = f"{INPUT}.eval_tasksets"
EXPERIENCES = "buffer.trainer_input.experience_buffer"
AUXILIARY = "buffer.trainer_input.auxiliary_buffers"
CONFIG = "trainer.trainer_config"
MODEL = f"{CONFIG}.actor_rollout_ref.model"
ACTOR = f"{CONFIG}.actor_rollout_ref.actor"
REF = f"{CONFIG}.actor_rollout_ref.ref"
CRITIC = f"{CONFIG}.critic"
VERL_TRAINER = f"{CONFIG}.trainer"

BY_EXPLORER = ("dynamic_by_explorer", "explorer_driven")
"""Values of synchronizer.sync_style with which the explorer's steps say when weights are synchronized."""

# ---------------------------------------------------------------- values


def at_least(values: Values, version: str) -> bool:
    """Whether a file is read as this release or a newer one."""
    return since(values, "trinity", version)


def given(value: Json) -> Json:
    """The value; None for the texts by which a Trinity file says so ('None', 'null', '')."""
    return None if value in ("None", "null", "") else value


def text(values: Values, key: str) -> str | None:
    """A nullable text. In Trinity's YAML `None` is a string, and means what it says."""
    value = given(values.get(key))
    return None if value is None else str(value)


def arguments(
    values: Values, key: str, defaults: Mapping[str, Json], *, needs: Mapping[str, str] | None = None
) -> Native:
    """The arguments of a function of Trinity's, defaults filled in. ConfigError for one that it does not have, or that
    has no effect without the one that it needs."""
    found = values[f"{key}.*"] or {}
    for name in found:
        if name not in defaults:
            raise ConfigError(
                f"{key}.{name}: no such argument{near(name, defaults)}; there are: {', '.join(defaults) or 'none'}."
            )
    out = {**defaults, **{k: v for k, v in found.items() if v is not None}}
    for name, other in (needs or {}).items():
        if name in out and out[name] != defaults[name] and out[other] in (None, False):
            raise ConfigError(f"{key}.{name}: has no effect without {other}; leave it out.")
    return out


def number(value: Json, key: str) -> float:
    """A number in a dict of arguments, whose kinds no row says."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{key}: got {value!r}, expected a number.")
    return value


def folder_of(path: str, key: str) -> str:
    """The folder of recorded rollouts that stands for a file of Trinity's: its path without the suffix."""
    if not Path(path).name:
        raise ConfigError(f"{key}: got {path}, expected the path of a file.")
    return str(Path(path).with_suffix(""))


def entries(values: Values, key: str) -> list[Native]:
    """The entries of a list of sections, each by dotted names inside it, of its values and of its sections."""
    return [{dotted(path): v for path, v in _inner(entry)} for entry in values.get(key) or []]


def _inner(tree: Json, path: Keys = ()) -> Iterator[tuple[Keys, Json]]:
    """The values in sections, and the sections, with their paths. A list is one value."""
    if path:
        yield path, tree
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield from _inner(value, (*path, key))


def inside(values: Values, section: str) -> Native:
    """The values of a section, by the names inside it."""
    return {key.removeprefix(f"{section}."): v for key, v in values.items() if key.startswith(f"{section}.")}


def section(own: Own, name: str) -> Own:
    """A section of the user's arguments, whole, with the sections in it."""
    whole = own.get(name)
    if isinstance(whole, dict):
        return whole
    return {key.removeprefix(f"{name}."): value for key, value in own.items() if key.startswith(f"{name}.")}


def agreed(values: Values, defaults: Mapping[str, Json]) -> Json:
    """One meaning that several keys name: the value that is given, or differs from its default; the first default, if
    none is. ConfigError where two of these differ. A default in the veRL section says nothing: whole ones are copied.
    """
    given = [key for key in values.get(GIVEN, ()) if not key.startswith(CONFIG)]
    told = {
        key: values[key]
        for key, default in defaults.items()
        if values.get(key) is not None and (key in given or values[key] != default)
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


# ---------------------------------------------------------------- tasksets of training


def training(values: Values) -> list[tuple[Own, str]]:
    """The tasksets of training, each with its key: those of tasksets, else taskset alone."""
    several = entries(values, TASKSETS)
    if not several:
        return [(inside(values, TASKSET), TASKSET)]
    for key, default in _of_a_taskset().items():
        if not same(values.get(key, default), default):
            raise ConfigError(
                f"{key}: given beside {TASKSETS}, which stands in place of taskset; leave one of the two out."
            )
    return [(own, f"{TASKSETS}[{n}]") for n, own in enumerate(several)]


def evaluating(values: Values) -> list[tuple[Own, str]]:
    """The tasksets of evaluation, each with its key."""
    return [(own, f"{EVAL_TASKSETS}[{n}]") for n, own in enumerate(entries(values, EVAL_TASKSETS))]


def draws_tasks(values: Values) -> bool:
    """Whether the process has tasksets of training. A trainer by itself and a bench may have none."""
    by_itself = values["mode"] in ("train", "bench") and online(values)
    return not by_itself or given(training(values)[0][0].get("path")) is not None


def in_rounds(values: Values) -> bool:
    """Explorers go in step with the trainer: the step says which version of the weights plays which task. Not where a
    step takes what happens to be newest, or of the highest priority."""
    used = values[f"{EXPERIENCES}.replay_buffer.enable"] or values[f"{EXPERIENCES}.storage_type"] == "sql"
    return values["synchronizer.sync_style"] == "fixed" and not used


@functools.cache
def _of_a_taskset() -> dict[str, Json]:
    """The keys of taskset, and their defaults."""
    inner = (line for line in rows("trinity") if line["key"].startswith(f"{TASKSET}."))
    return {line["key"]: json.loads(line["default"]) for line in inner if line["default"]}


def selector(own: Own) -> Own:
    """The task_selector of a taskset, defaults filled in."""
    told = inside(own, "task_selector")
    defaults: Native = {"selector_type": "sequential", "seed": 42, "feature_keys": []}
    return {**defaults, **told, "kwargs.*": told.get("kwargs.*") or section(told, "kwargs")}


def chooses_by_difficulty(values: Values) -> bool:
    """The selectors follow how the tasks went."""
    return any(selector(own)["selector_type"] == "difficulty_based" for own, _ in training(values))


# ---------------------------------------------------------------- functions


@dataclass(frozen=True, kw_only=True)
class TrinityFunction:
    """A function that a key of Trinity's names: its lines in functions.tsv."""

    native: str
    """Its native name; of a workflow that is not read empty."""
    reason: str
    """Why it is not read."""
    defaults: Native = field(default_factory=dict)
    """By argument."""
    beside: Native = field(default_factory=dict)
    """Those that are others where the file gives some argument: Trinity calls the constructor with these alone."""
    needs: dict[str, str] = field(default_factory=dict)
    """Arguments that only another one makes count: that one."""
    natives: dict[str, str] = field(default_factory=dict)
    """The native names of arguments that have one."""


@functools.cache
def functions(kind: str) -> dict[str, TrinityFunction]:
    """The functions of a kind (advantage, loss, strategy, selector, workflow), in the order of functions.tsv."""
    out: dict[str, TrinityFunction] = {}
    for line in lines(__package__, "functions.tsv"):
        name, argument = line["name"], line["argument"]
        if line["kind"] != kind:
            continue
        if not argument:
            out[name] = TrinityFunction(native=line["native"], reason=line["reason"])
            continue
        alone, _, beside = line["default"].partition(" | ")
        out[name].defaults[argument] = json.loads(alone)
        if beside:
            out[name].beside[argument] = json.loads(beside)
        for told, column in ((out[name].needs, "needs"), (out[name].natives, "native")):
            if line[column]:
                told[argument] = line[column]
    return out


def arguments_of(values: Values, key: str, function: TrinityFunction) -> Native:
    """The arguments of one of `functions`, defaults filled in."""
    beside = function.beside if values[f"{key}_args.*"] else {}
    return arguments(values, f"{key}_args", function.defaults | beside, needs=function.needs)


# ---------------------------------------------------------------- algorithm_type


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What an algorithm_type stands for where its functions are not named: a line of algorithms.tsv."""

    name: str
    recipe: str
    """The native recipe."""
    advantage: str
    loss: str
    kl_loss: str
    entropy: str
    repeat_times: int
    kind: Literal["online", "sft", "dpo"]
    in_trainer: bool
    """Advantages are computed in the trainer, so a KL penalty in the rewards has an effect."""

    @property
    def mixes(self) -> bool:
        """Demonstrations stand among the own rollouts."""
        return self.loss in ("mix", "mix_chord")


PRESETS = {
    line["name"]: Preset(
        **{**line, "repeat_times": int(line["repeat_times"]), "in_trainer": line["in_trainer"] == "yes"}  # type: ignore[arg-type]
    )
    for line in lines(__package__, "algorithms.tsv")
}

NEWER = ("cpt",)
"""Those of versions after the document that are not built."""


def preset(values: Values) -> Preset:
    """The preset of algorithm.algorithm_type. NotSupportedYet for a newer one, ConfigError for an unknown one."""
    name = str(values["algorithm.algorithm_type"])
    if name in PRESETS:
        return PRESETS[name]
    known = f"here: {', '.join(PRESETS)}"
    if name in NEWER:
        raise NotSupportedYet(
            f"algorithm.algorithm_type: {name}, of a newer version, is coming, not built yet; {known}."
        )
    raise ConfigError(f"algorithm.algorithm_type: {name!r} is not known{near(name, PRESETS)}; {known}.")


def distills(values: Values) -> bool:
    """Whether a teacher judges the tokens."""
    return preset(values).recipe == "distill"


def online(values: Values) -> bool:
    """Whether the policy learns from its own rollouts, and not from a file."""
    return preset(values).kind == "online"


def mixes(values: Values) -> bool:
    """Whether demonstrations stand among the policy's own rollouts."""
    return preset(values).mixes


def is_megatron(values: Values) -> bool:
    """Whether Megatron-LM trains there, which says what its keys mean. From 0.6.0 on (with veRL 0.8 or newer) the veRL
    section does not say so."""
    own = [] if at_least(values, "0.6.0") else [values[f"{ACTOR}.strategy"]]
    return "megatron" in (values["trainer.trainer_strategy"], *own)


def repeat_times(values: Values) -> int:
    """Rollouts of a task: the preset's where the file does not say."""
    times: int = values["algorithm.repeat_times"] or preset(values).repeat_times
    return times
