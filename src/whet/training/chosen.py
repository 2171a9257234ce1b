"""The train engine that `train.engine` names, where it is one of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel

from whet.config.engines import TRAIN_ENGINES
from whet.config.schema import TrainConfig
from whet.models.kernels import Ops
from whet.tables import check_settings, load_object
from whet.training.engine import TrainEngine
from whet.training.torch import TorchEngine
from whet.types import ConfigError, Json

KEY = "train.engine"
_OURS = frozenset(inspect.signature(TorchEngine).parameters)
"""Names of what every train engine is called with."""
_PARTS = sorted(
    name for name in {**vars(TrainEngine), **inspect.get_annotations(TrainEngine)} if not name.startswith("_")
)


def of_user(train: TrainConfig) -> tuple[str, Mapping[str, Json]] | None:
    """Its name, which any process of this machine finds, and its settings; None: the engine is one of whet's."""
    if train.engine in TRAIN_ENGINES:
        return None
    place, colon, name = train.engine.rpartition(":")
    if place.endswith(".py"):
        place = str(Path(place).resolve())
    assert isinstance(train.engine_arguments, dict), "checked with the config"
    return place + colon + name, train.engine_arguments


def maker(name: str, settings: Mapping[str, Json], *, on_ranks: bool) -> Callable[..., Any]:
    """What makes the engine `name`: called with all that TorchEngine is called with, and gives a `TrainEngine`.

    on_ranks: the engine is one part of several processes, which is for TorchEngine and its subclasses. Raises
    ConfigError for code that cannot be loaded, and for settings that it does not have.
    """
    make = load_object(name, what=KEY, asked=True)
    if on_ranks and not (isinstance(make, type) and issubclass(make, TorchEngine)):
        raise ConfigError(
            f"{KEY} {name}: with train.parallel an engine is a subclass of whet.training.torch.TorchEngine, which "
            f"knows the ranks; got {make!r}. Make it one, or leave train.parallel out"
        )
    if taken := [setting for setting in settings if setting in _OURS]:
        raise ConfigError(
            f"{KEY}_arguments.{taken[0]}: whet gives {name} its {taken[0]} itself; rename the setting"
        )
    check_settings(_with_all_settings(make), settings, key=f"{KEY}_arguments", name=name, given=2, also=_OURS)
    return make


def _with_all_settings(make: Callable[..., Any]) -> Callable[..., Any]:
    """Of a subclass, whose `**how` goes on to TorchEngine, a stand-in whose signature has the settings of all its
    classes by name."""
    if not (isinstance(make, type) and issubclass(make, TorchEngine)):
        return make
    inits = [
        vars(each)["__init__"] for each in make.__mro__ if "__init__" in vars(each) and each is not object
    ]
    own = {p.name: p for init in reversed(inits) for p in _settings_of(init)}

    def stand_in() -> None: ...

    first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("model", "ops")]
    stand_in.__signature__ = inspect.Signature([*first, *own.values()])  # type: ignore[attr-defined]
    return stand_in


def _settings_of(init: Callable[..., Any]) -> list[inspect.Parameter]:
    """What it takes by name, behind itself, the model and the kernels, whatever it calls these."""
    parameters = list(enumerate(inspect.signature(init).parameters.values()))
    return [
        p.replace(kind=p.KEYWORD_ONLY)
        for at, p in parameters
        if p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and at > 2)
    ]


def made(
    name: str,
    settings: Mapping[str, Json],
    model: PreTrainedModel,
    ops: Ops,
    **how: Any,
) -> TrainEngine:
    """The engine, in this process. Raises ConfigError also where what was made lacks a part of the interface."""
    make = maker(name, settings, on_ranks=False)
    signature = inspect.signature(make)
    try:
        signature.bind(model, ops, **how, **settings)
    except TypeError as e:
        raise ConfigError(
            f"{KEY} {name} takes {signature}: {e}; it is called as whet.training.torch.TorchEngine is: take **how for "
            "what you do not read"
        ) from e
    engine = make(model, ops, **how, **settings)
    if lacks := [part for part in _PARTS if not hasattr(engine, part)]:
        raise ConfigError(
            f"{KEY} {name}: got a {type(engine).__name__} without {', '.join(lacks)}; expected a "
            "whet.training.engine.TrainEngine"
        )
    return cast(TrainEngine, engine)
