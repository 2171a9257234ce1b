"""Keys that nothing reads in a stage, with the reason: the table `idle_rules` applied to one config.

The same table determines when a form shows a key (`forms`). Values that follow from a config and are not keys
themselves are in `NAMED`, with their meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from whet.config.conditions import met
from whet.config.evaluation import evaluates, judges
from whet.config.idle_rules import RULES
from whet.config.recipes import Resolved, unread_settings
from whet.config.schema import Config
from whet.config.trackers import lists_runs
from whet.types import Json

NAMED: dict[str, tuple[str, Callable[[Config, Resolved], Json]]] = {
    "kind": (
        "Kind of training data: 'online' (rollouts of the policy), 'demonstrations', 'preferences' or 'labels' "
        "(replies in the data). It follows from algorithm.name.",
        lambda cfg, algorithm: algorithm.kind,
    ),
    "advantage": (
        "algorithm.advantage, or the advantage of the recipe algorithm.name.",
        lambda cfg, algorithm: algorithm.advantage,
    ),
    "loss": ("algorithm.loss, or the loss of the recipe.", lambda cfg, algorithm: algorithm.loss),
    "own_function": (
        "algorithm.advantage or algorithm.loss is your own function (it may read any setting).",
        lambda cfg, algorithm: ":" in algorithm.advantage + algorithm.loss,
    ),
    "loss_agg_mode": (
        "algorithm.loss_agg_mode, or the mode of the recipe.",
        lambda cfg, algorithm: algorithm.loss_agg_mode,
    ),
    "whiten": ("algorithm.whiten, or the value of the recipe.", lambda cfg, algorithm: algorithm.whiten),
    "dynamic_sampling": (
        "algorithm.dynamic_sampling, or the value of the recipe.",
        lambda cfg, algorithm: algorithm.dynamic_sampling,
    ),
    "needs_critic": ("The advantage needs a value model.", lambda cfg, algorithm: algorithm.needs_critic),
    "needs_reference": (
        "A KL term is on, or the advantage or loss needs a reference policy.",
        lambda cfg, algorithm: algorithm.needs_reference,
    ),
    "mixes": (
        "Demonstrations are mixed with own rollouts: algorithm.mix, or the recipe's.",
        lambda cfg, algorithm: algorithm.mix is not None,
    ),
    "lists_runs": (
        "track.trackers names wandb, mlflow, swanlab or your own class.",
        lambda cfg, algorithm: lists_runs(cfg),
    ),
    "evaluates": ("There are held-out tasks, and evaluation is on.", lambda cfg, algorithm: evaluates(cfg)),
    "judges": ("Rewards score the replies to held-out tasks.", lambda cfg, algorithm: judges(cfg)),
    "profiles": (
        "profile.steps is empty, or contains a step that the stage has.",
        lambda cfg, algorithm: min(cfg.profile.steps, default=0) <= (cfg.train.steps or math.inf),
    ),
    "samples": (
        "Replies are sampled: in training (kind is online) or in evaluation.",
        lambda cfg, algorithm: algorithm.kind == "online" or judges(cfg),
    ),
}
"""Named conditions: what each means, and its value in one stage."""


def named(cfg: Config, algorithm: Resolved) -> dict[str, Json]:
    """The value of every named condition in one stage, settings of its advantage and losses among them."""
    settings = {
        f"{part}.{name}": value
        for part, chosen in algorithm.settings.items()
        for name, value in chosen.settings.items()
    }
    return settings | {name: value(cfg, algorithm) for name, (_, value) in NAMED.items()}


def idle(cfg: Config, algorithm: Resolved) -> Iterator[tuple[str, str, bool]]:
    """(key or section, with * for any name or number; why nothing reads it; whether its default passes) in a stage."""
    known = named(cfg, algorithm)
    words: Mapping[str, Any] = {"cfg": cfg, **known}
    yield from ((key, why, False) for key, why in unread_settings(cfg.algorithm))
    for rule in RULES:
        if not met(rule.read_when, cfg, known):
            for key in rule.keys:
                yield key, rule.why.format_map(words), rule.default_passes
