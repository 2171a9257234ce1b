"""Values that follow from a config and are not keys themselves: what the conditions of rules may look at, by name."""

from __future__ import annotations

import math
from collections.abc import Callable

from whet.config.checks_parallel import world
from whet.config.evaluation import evaluates, judges
from whet.config.recipes import Resolved
from whet.config.schema import Config
from whet.config.sections.rollout import TOOL_TIMEOUT_S, TOOLS
from whet.config.trackers import lists_runs, shows_rollouts
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
    "compares": (
        "The advantage compares the rollouts of a group with each other.",
        lambda cfg, algorithm: algorithm.compares,
    ),
    "judged": (
        "Training depends on rewards: the advantage reads them and the loss reads the advantage, or they decide "
        "which reply the reference is shown.",
        lambda cfg, algorithm: algorithm.judged,
    ),
    "needs_greedy_reply": (
        "The advantage needs the reward of a greedy reply to each task.",
        lambda cfg, algorithm: "baseline" in algorithm.needs,
    ),
    "has_ratio": (
        "Several optimizer steps on one batch are valid: the loss has a ratio to the policy before the step, or "
        "needs none.",
        lambda cfg, algorithm: algorithm.ratio,
    ),
    "optimizer_steps": (
        "Optimizer steps on one batch: train.minibatches times train.update_epochs.",
        lambda cfg, algorithm: cfg.train.minibatches * cfg.train.update_epochs,
    ),
    "ranks": ("Number of ranks of the policy.", lambda cfg, algorithm: world(cfg.train.parallel)),
    "needs_reference": (
        "A KL term is on, or the advantage or loss needs a reference policy.",
        lambda cfg, algorithm: algorithm.needs_reference,
    ),
    "mixes": (
        "Demonstrations are mixed with own rollouts: algorithm.mix, or the recipe's.",
        lambda cfg, algorithm: algorithm.mix is not None,
    ),
    "reprompts": (
        "The reference scores rollouts after other prompts: algorithm.reprompt, or the recipe's.",
        lambda cfg, algorithm: algorithm.reprompt is not None,
    ),
    "lists_runs": (
        "track.trackers names wandb, mlflow, swanlab, trackio or your own class.",
        lambda cfg, algorithm: lists_runs(cfg),
    ),
    "shows_rollouts": (
        "track.trackers names tensorboard, wandb, mlflow, swanlab, trackio or your own class.",
        lambda cfg, algorithm: shows_rollouts(cfg),
    ),
    "evaluates": ("There are held-out tasks, and evaluation is on.", lambda cfg, algorithm: evaluates(cfg)),
    "judges": ("Rewards score the replies to held-out tasks.", lambda cfg, algorithm: judges(cfg)),
    "profiles": (
        "profile.steps is empty, or contains a step that the stage has.",
        lambda cfg, algorithm: min(cfg.profile.steps, default=0) <= (cfg.train.steps or math.inf),
    ),
    "tools_outlast_step": (
        "rollout.env.make is whet.envs.tool_env:tools, and a call of a tool may take as long as a whole step or longer "
        "(rollout.env.arguments.tool_timeout_s, which is 30 where it is not given).",
        lambda cfg, algorithm: _tools_outlast_step(cfg),
    ),
    "samples": (
        "Replies are sampled: in training (kind is online) or in evaluation.",
        lambda cfg, algorithm: algorithm.kind == "online" or judges(cfg),
    ),
}
"""Named conditions: what each means, and its value in one stage."""


def _tools_outlast_step(cfg: Config) -> bool:
    env = cfg.rollout.env
    if env is None or env.make != TOOLS:
        return False
    limit_s = env.arguments.get("tool_timeout_s", TOOL_TIMEOUT_S)
    # what is no number, the tools refuse
    return isinstance(limit_s, int | float) and limit_s >= env.timeout_s


def named(cfg: Config, algorithm: Resolved) -> dict[str, Json]:
    """The value of every named condition in one stage, settings of its advantage and losses among them."""
    settings = {
        f"{part}.{name}": value
        for part, chosen in algorithm.settings.items()
        for name, value in chosen.settings.items()
    }
    return settings | {name: value(cfg, algorithm) for name, (_, value) in NAMED.items()}
