"""Values that follow from a config and are not keys themselves: what the conditions of rules may look at, by name.

`facts.tsv` has a line for each: its name, what it is of the resolved algorithm (else it is computed here), its meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from whet.config.checks_parallel import world
from whet.config.environments import played
from whet.config.evaluation import evaluates, judges, writes_replies
from whet.config.recipes import Resolved
from whet.config.schema import Config
from whet.config.sections.rollout import TOOL_TIMEOUT_S, TOOLS
from whet.config.sources import order_of
from whet.config.trackers import lists_runs, shows_rollouts
from whet.tables import lines
from whet.types import Json

Fact = Callable[[Config, Resolved], Json]


def _tools_outlast_step(cfg: Config) -> bool:
    env = cfg.rollout.env
    tools = [] if env is None else [each for each in played(env) if each.make == TOOLS]
    limits_s = [each.arguments.get("tool_timeout_s", TOOL_TIMEOUT_S) for each in tools]
    # what is no number, the tools refuse
    return env is not None and any(isinstance(s, int | float) and s >= env.timeout_s for s in limits_s)


_COMPUTED: dict[str, Fact] = {
    "own_function": lambda cfg, algorithm: ":" in algorithm.advantage + algorithm.loss,
    "own_weight": lambda cfg, algorithm: (
        (chosen := algorithm.settings.get("correction.weight")) is not None and chosen.is_own
    ),
    "needs_greedy_reply": lambda cfg, algorithm: "baseline" in algorithm.needs,
    "optimizer_steps": lambda cfg, algorithm: cfg.train.minibatches * cfg.train.update_epochs,
    "ranks": lambda cfg, algorithm: world(cfg.train.parallel),
    "mixes": lambda cfg, algorithm: algorithm.mix is not None,
    "reprompts": lambda cfg, algorithm: algorithm.reprompt is not None,
    "lists_runs": lambda cfg, algorithm: lists_runs(cfg),
    "shows_rollouts": lambda cfg, algorithm: shows_rollouts(cfg),
    "evaluates": lambda cfg, algorithm: evaluates(cfg),
    "judges": lambda cfg, algorithm: judges(cfg),
    "writes_replies": lambda cfg, algorithm: writes_replies(cfg),
    "order": lambda cfg, algorithm: order_of(cfg.data).name,
    "profiles": lambda cfg, algorithm: (
        min(cfg.profile.steps, default=0) <= (math.inf if cfg.train.steps is None else cfg.train.steps)
    ),
    "tools_outlast_step": lambda cfg, algorithm: _tools_outlast_step(cfg),
    "samples": lambda cfg, algorithm: algorithm.kind == "online" or judges(cfg),
}


def _of_algorithm(name: str) -> Fact:
    return lambda cfg, algorithm: getattr(algorithm, name)


NAMED: dict[str, tuple[str, Fact]] = {
    line["name"]: (line["meaning"], _of_algorithm(line["of"]) if line["of"] else _COMPUTED[line["name"]])
    for line in lines("whet.config", "facts.tsv")
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
