"""Sections about the algorithm and the rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from whet.config.sections.aggregation import Aggregation
from whet.config.sections.base import Above0, Count, NonNegative, Positive, Section
from whet.config.sections.correction import CorrectionConfig
from whet.config.sections.groups import GroupsConfig
from whet.config.sections.kl import KlConfig, RewardKlConfig
from whet.config.sections.mix import MixConfig
from whet.config.sections.reprompt import RepromptConfig
from whet.config.sections.reward_model import RewardModelConfig


class AlgorithmConfig(Section):
    """The training objective. `name` selects a recipe; every other key replaces one part of the recipe."""

    name: str = "grpo"
    """Recipe, e.g. grpo, dapo, ppo, sft, dpo. `whet keys --algorithms` lists all, `whet explain algorithm.name=dapo`
    prints what one sets."""
    advantage: str | dict[str, Any] | None = None
    """Advantage estimator: its name, 'package.module:name' of your own function, or a table of its settings, with
    `name` where it is not the recipe's: {name: gae, lam: 0.95}. Default: the recipe's."""
    loss: str | dict[str, Any] | None = None
    """Loss: its name, 'package.module:name' of your own function, or a table of its settings, with `name` where it is
    not the recipe's: {name: gspo, clip_low: 3e-4}. Default: the recipe's."""
    loss_agg_mode: Aggregation | None = None
    """How token losses are reduced to one number. Counts are global, so the result does not depend on the
    micro-batches."""
    norm_tokens: Positive | None = None
    """Constant divisor of seq-mean-token-sum-norm (Dr. GRPO) and token-sum-norm. Default:
    rollout.sampling.max_tokens."""
    mean_over_rollouts: Positive | None = None
    """token-mean: take the mean over the tokens of each block of this many consecutive rollouts, then the mean over the
    blocks (SkyRL's token_mean_legacy, whose blocks are micro-batches). Default: one mean over the minibatch."""
    whiten: bool | None = None
    """Normalize advantages to mean 0 and variance 1 over the batch. Default: the recipe's."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, with entropy_target the first one; 0 is off (entropy is still measured where it
    costs nothing)."""
    entropy_target: Above0 | None = None
    """Adaptive entropy control (Skywork-OR1): mean entropy in nats per token. In every optimizer step the weight of the
    bonus rises by entropy_coef_delta if the entropy was at most this, else it falls; the bonus applies only after a
    step with such an entropy. Default: the weight is constant."""
    entropy_coef_delta: Above0 = 0.005
    """With entropy_target: by how much the weight of the entropy moves in an optimizer step."""
    entropy_coef_min: NonNegative = 0.0
    """With entropy_target: smallest weight of the entropy."""
    entropy_coef_max: Above0 = 1.0
    """With entropy_target: largest weight of the entropy."""
    kl: KlConfig = Field(default_factory=KlConfig)
    """KL to the reference, as a term of the loss."""
    reward_kl: RewardKlConfig = Field(default_factory=RewardKlConfig)
    """KL to the reference, subtracted from the reward. Both KL terms may be on."""
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    """Off-policy correction: weights or rejects tokens that were sampled by an older policy, or by an engine that
    computes differently."""
    old_logprobs: Literal["auto", "sampled", "recompute"] = "auto"
    """Denominator of the ratio: the engine's own log-probs (sampled), or log-probs that the trainer computes before the
    update (recompute). auto: sampled in exact mode (both are equal bit for bit), else recompute."""
    dynamic_sampling: bool | None = None
    """Dynamic sampling (DAPO): drop groups whose rewards are all equal and sample more tasks. (verl:
    filter_groups.enable) Default: the recipe's."""
    max_refills: Count = 10
    """Limit on refills of one step. Groups that were dropped or failed are replaced by new tasks: at most this many
    times tasks_per_step more tasks for one step, then the run stops and names the cause."""

    # -- advantages
    whiten_ddof: Literal[1, 0] = 1
    """With whiten: 1 divides by sqrt(variance + 1e-8), with n - 1 in the denominator of the variance (verl); 0 divides
    by sqrt(max(variance, 1e-8)), with n in it (SkyRL)."""
    advantage_low: float | None = None
    """Lower bound of the advantage of a token, after whitening. Default: no bound."""
    advantage_high: float | None = None
    """Upper bound of the advantage of a token, after whitening. Default: no bound."""
    resample: Literal["none", "pow", "max_min", "max_random", "balance"] = "none"
    """Resampling of the batch. pow, max_min, max_random: as many rollouts as there are, drawn with replacement (PF-PPO,
    arXiv:2409.06957) by weight: pow |reward|^resample_power; max_min 1 for the extremes of the batch, 0 between;
    max_random 0.4 for the best, 0.1 for the others. balance: of the rollouts of a group below its mean, keep no more
    than there are others."""
    resample_power: NonNegative = 2.0
    """Exponent of resample=pow."""
    groups: GroupsConfig = Field(default_factory=GroupsConfig)
    """Which rollouts of a group are trained on, and with what reward or mask."""
    refill: Literal["sample", "copy"] = "sample"
    """Replacement of dropped groups: new tasks (sample), or random copies of the other groups of the step (copy)."""

    # -- policy losses
    top_entropy_quantile: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of a step's tokens that the policy loss learns from: those where the policy before the step had the highest
    entropy; the paper: 0.2 (arXiv:2506.01939). The other tokens still count in averages. 1: all."""
    entropy_clip: Literal["none", "batch", "vocabulary"] = "none"
    """Leave out tokens with a negative advantage whose update would lower the entropy most, measured with the policy
    before the step (arXiv:2602.03392). batch: relative to the mean over the step's tokens (Clip_B); vocabulary:
    relative to the expected value at each position (Clip_V). Averages still count all tokens, also those left out."""
    entropy_clip_mu: Above0 = 2.5
    """entropy_clip: tokens are left out that deviate by more than this many standard deviations of the step's tokens
    (Clip_B: 2.5; Clip_V: 8.5)."""
    entropy_clip_max_frac: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """entropy_clip: largest share of the step's tokens that is left out, at least one token: those that deviate most
    (Clip_V: 1e-4). Default: no limit."""
    positive_nll_coef: NonNegative = 0.0
    """Term added to any policy loss: this weight times the mean of -log pi over the tokens of rollouts with a reward
    above 0."""
    entropy_agg_mode: Literal["token-mean"] | None = None
    """Aggregation of the entropy bonus: token-mean is the mean over the tokens, with any aggregation of the loss.
    Default: the same as the loss."""

    # -- demonstrations and preferences
    mix: MixConfig | None = None
    """Demonstrations mixed with the policy's own rollouts. Default: the recipe's (mix and mix_chord have one)."""

    # -- distillation
    reprompt: RepromptConfig | None = None
    """Self-distillation: the reference is the teacher, and sees a different prompt from the policy's. With loss=gkd or
    advantage=distill. Default: the recipe's (sdpo has one)."""


class RewardConfig(Section):
    """A function or a model that scores replies; the reward of a run is the weighted sum of all rewards."""

    function: str | None = None
    """Name of a reward function; give this or `model`. Built in: exact, choice, number, math, format, overlong,
    reasoning_gym. Your own: 'package.module:name' or 'path/to/file.py:name'."""
    weight: float = 1.0
    """Factor in the sum. 0: the reward is only measured."""
    model: RewardModelConfig | None = None
    """A reward model, instead of a function. It runs in the main process, one rollout at a time."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, passed on every call. A secret is never written to any file; whet recognizes
    secrets by their key (api_key, token, password ...) and in URLs. Best give a secret as `api_key:
    "${oc.env:JUDGE_KEY}"`."""
