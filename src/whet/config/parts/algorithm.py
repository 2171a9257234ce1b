"""Sections about what is learned from a batch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from whet.config.parts.aggregation import Aggregation
from whet.config.parts.base import Above0, Count, Fraction, NonNegative, Positive, Section
from whet.config.parts.correction import Correction
from whet.config.parts.groups import Groups
from whet.config.parts.kl import Kl, RewardKl
from whet.config.parts.mix import Mix
from whet.config.parts.reward_model import RewardModel


class Algorithm(Section):
    """What is learned from a batch. `name` picks a recipe; every other key replaces one part of it."""

    name: str = "grpo"
    """Recipe, e.g. grpo, dapo, ppo, sft, dpo. `whet keys --algorithms` lists all, `whet explain algorithm.name=dapo`
    prints what one sets."""
    advantage: str | dict[str, Any] | None = None
    """Advantage estimator: its name, 'package.module:name' of a function of yours, or a table of its settings, with
    `name` where it is not the recipe's: {name: gae, lam: 0.95}. Default: the recipe's."""
    loss: str | dict[str, Any] | None = None
    """Loss: its name, 'package.module:name' of a function of yours, or a table of its settings, with `name` where it is
    not the recipe's: {name: gspo, clip_low: 3e-4}. Default: the recipe's."""
    loss_agg_mode: Aggregation | None = None
    """How token losses become one number; counts are global, so it does not depend on micro-batches."""
    norm_tokens: Positive | None = None
    """Constant of seq-mean-token-sum-norm (Dr. GRPO) and token-sum-norm. Default: rollout.sampling.max_tokens."""
    mean_over_rollouts: Positive | None = None
    """token-mean: take the mean over the tokens of each block of this many consecutive rollouts, then the mean over the
    blocks (SkyRL's token_mean_legacy, whose blocks are micro-batches). Default: one mean over the minibatch."""
    whiten: bool | None = None
    """Shift and scale advantages to mean 0 and variance 1 over the batch. Default: the recipe's."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; 0 is off (entropy is measured anyway where it costs nothing)."""
    kl: Kl = Field(default_factory=Kl)
    """KL to the reference, in the loss."""
    reward_kl: RewardKl = Field(default_factory=RewardKl)
    """KL to the reference, taken off the reward. Both may be on."""
    correction: Correction = Field(default_factory=Correction)
    """What is done about tokens of another policy, or of an engine that computes in another way."""
    old_logprobs: Literal["auto", "sampled", "recompute"] = "auto"
    """The ratio's denominator: the engine's own log-probs, or recomputed by the trainer before the update.
    auto: sampled in exact mode (they are equal bit for bit), else recompute."""
    dynamic_sampling: bool | None = None
    """Dynamic sampling (DAPO): drop groups whose rewards are all equal and ask for more. Default: the recipe's."""
    max_refills: Count = 10
    """Groups that were dropped or failed are asked for again: at most so many times tasks_per_step more tasks for one
    step, then the run stops and names the cause."""

    # -- advantages
    whiten_ddof: Literal[1, 0] = 1
    """With whiten: 1 divides by sqrt(variance + 1e-8), n - 1 below (verl); 0 by sqrt(max(variance, 1e-8)), n below
    (SkyRL)."""
    advantage_low: float | None = None
    """Lowest advantage a token can have, after whitening. Default: no bound."""
    advantage_high: float | None = None
    """Highest advantage a token can have, after whitening. Default: no bound."""
    resample: Literal["none", "pow", "max_min", "max_random", "balance"] = "none"
    """How often rollouts count. Drawn with replacement, as many as there are (PF-PPO, arXiv:2409.06957), by weight:
    pow |reward|^resample_power; max_min 1 for the batch's extremes, 0 between; max_random 0.4 for the best, 0.1 for the
    others. balance: of a group's rollouts below the mean, no more than of the others."""
    resample_power: NonNegative = 2.0
    """Exponent of resample=pow."""
    groups: Groups = Field(default_factory=Groups)
    """Which rollouts of a group are trained on, and as what."""
    refill: Literal["sample", "copy"] = "sample"
    """What stands for groups that were dropped: new tasks, or random copies of the step's other groups."""

    # -- policy losses
    positive_nll_coef: NonNegative = 0.0
    """Added to any policy loss: this times the mean of -log pi over the tokens of rollouts with a reward above 0."""
    entropy_agg_mode: Literal["token-mean"] | None = None
    """Mean of the entropy bonus: over the tokens, whatever the aggregation of the loss. Default: as the loss."""

    # -- demonstrations and preferences
    mix: Mix | None = None
    """Demonstrations among the policy's own rollouts. Default: the recipe's (mix and mix_chord have them)."""


class Reward(Section):
    """A function or a model that judges replies; a run's reward is the weighted sum of all."""

    function: str | None = None
    """Give this or `model`. Built in (exact, choice, number, math, format, overlong, reasoning_gym) or yours:
    'package.module:name' or 'path/to/file.py:name'."""
    weight: float = 1.0
    """Factor in the sum. 0 only measures."""
    model: RewardModel | None = None
    """A reward model, in place of a function. It reads in the main process, one rollout at a time."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments given to the function on every call. What is a secret by its key (api_key, token, password ...)
    or in a URL is written nowhere; best given as `api_key: "${oc.env:JUDGE_KEY}"`."""
