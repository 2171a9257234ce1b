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
    advantage: str | None = None
    """Advantage estimator by name, or 'package.module:name' of yours. Default: the recipe's."""
    loss: str | None = None
    """Loss by name, or 'package.module:name' of yours. Default: the recipe's."""
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
    normalize_std: bool | None = None
    """GRPO and kin: divide by the group's standard deviation. Default: true (rec: false), or the recipe's."""
    std_epsilon: Above0 = 1e-6
    """Added to the standard deviation that is divided by; maxrl: to the mean."""
    std_ddof: Literal[1, 0] = 1
    """The standard deviation's denominator: 1 is n - 1 (as verl, TRL, Trinity), 0 is n (as Cosmos-RL)."""
    std_floor: NonNegative = 0.0
    """GRPO: the standard deviation counts as at least this, before std_epsilon is added."""
    std_scope: Literal["group", "batch"] = "group"
    """GRPO: the standard deviation of the group's rewards, or of all of the batch."""
    rank_penalty: Fraction = 0.0
    """GRPO: lower the reward of the group's likelier replies, the likeliest by nearly this share, so that rare good
    ones count more (arXiv:2506.02355). 0 is off."""
    single_rollout: Literal["zero", "raw"] = "zero"
    """RLOO: the advantage of a rollout alone in its group: 0 (and its group is dropped), or its reward."""
    opmd_baseline: Literal["mean", "logavgexp"] = "mean"
    """OPMD: the group's mean reward, or tau log mean exp(reward / tau)."""
    tau: Above0 = 1.0
    """OPMD, in units of reward: temperature of logavgexp; its loss is divided by 1 + this."""
    baseline_shift: float = -0.1
    """AsymRE: added to the group's mean; below 0 good replies count more than bad ones."""
    turn_weight: NonNegative = 1.0
    """GiGPO: weight of a turn's own advantage beside the episode's."""
    divide_by_turns: bool = False
    """Step-wise GRPO: divide an episode's advantage by its number of turns."""
    distill_coef: Above0 = 1.0
    """Distillation: factor on log teacher - log policy."""
    gamma: Fraction = 1.0
    """Discount a token of GAE, reinforce and reinforce_plus_plus; a turn of GiGPO (its paper: 0.95)."""
    lam: Fraction = 1.0
    """GAE's lambda."""
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
    clip_low: Above0 | None = None
    """Ratio clip below 1: 1 - clip_low; 1 or more leaves that side open. In log space for geo_mean. Default: that of
    the loss (0.2 for ppo) or the recipe."""
    clip_high: Above0 | None = None
    """Ratio clip above 1: 1 + clip_high (clip-higher of DAPO: 0.28); 1e9 leaves that side open. Default: that of the
    loss or the recipe."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Bound the loss of negative advantages at this multiple (arXiv:1912.09729). Default: the recipe's (off)."""
    sequence_mask_delta: Above0 | None = None
    """ppo: a rollout whose mean log pi_old/pi (nats a token) is above this learns nothing from negative advantages.
    None: off."""
    fallback_to_policy_gradient: bool = False
    """ppo: the ratio against the policy itself, so that the gradient is that of -A log pi. Right for one optimizer step
    a batch."""
    gspo_form: Literal["sequence", "token"] | None = None
    """gspo: gradient through the rollout's mean log-ratio, or through each token's own log-prob (GSPO-token). Default:
    the recipe's (sequence)."""
    cispo_mask: bool = False
    """cispo: tokens that PPO would clip count 0."""
    tau_pos: Above0 = 1.0
    """sapo: temperature of the gate where the advantage is positive; larger closes faster."""
    tau_neg: Above0 = 1.05
    """sapo: the same where it is not; a little larger keeps training steady."""
    sapo_detach: bool = False
    """sapo: weigh log pi by the gate (Trinity) in place of differentiating it (the paper)."""
    clip_cov_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 2e-4
    """clip_cov: share of the minibatch's tokens that are left out, at least one."""
    clip_cov_lb: float = 1.0
    """clip_cov: they are chosen among those with a larger covariance of advantage and log-prob than this."""
    clip_cov_ub: float = 5.0
    """clip_cov: and a smaller one than this."""
    kl_cov_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 2e-4
    """kl_cov: share of the minibatch's tokens that are held back, those with the largest covariance; at least one."""
    ppo_kl_coef: NonNegative = 1.0
    """kl_cov: weight of |log ratio| at those tokens; the paper's 1 (verl's configuration: 0.1)."""
    dppo_divergence: Literal["binary_tv", "binary_kl"] = "binary_tv"
    """dppo: how far the sampled token's probability has moved: its difference, or the KL of two Bernoulli laws."""
    dppo_delta_low: Above0 = 0.15
    """dppo: the farthest a token with negative advantage may have fallen (0.05 is usual for binary_kl, in nats)."""
    dppo_delta_high: Above0 = 0.15
    """dppo: the farthest a token with positive advantage may have risen."""
    aipo_rho: Above0 = 4.0
    """aipo: cap of the ratio; the paper's range is 2 to 10."""
    sppo_epsilon: Above0 = 0.3
    """sppo: tokens with a ratio outside 1 / (1 + e) .. 1 + e count 0."""
    topr_threshold: float = 0.0
    """topr: tokens with an advantage above this count fully, others at most by their ratio."""
    rec_clip_mode: Literal["none", "one-side", "two-side", "ring", "gspo-one-side"] = "one-side"
    """rec: from which tokens is learned, by their ratio (docs/algorithms.md)."""
    rec_ring_low: Above0 = 0.6
    """rec, ring: a ratio below 1 - this is learned from again where the advantage is positive."""
    rec_ring_high: Above0 = 2.0
    """rec, ring: a ratio above 1 + this is learned from again where it is negative."""
    rec_weight: Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"] = "none"
    """rec: weight of a token: 1, its ratio, the rollout's, or exp(A / rec_temperature)."""
    rec_temperature: Above0 = 1.0
    """rec, weight=advantage: temperature."""
    rec_regularizer: Literal["none", "k2", "forward-kl"] = "none"
    """rec: added at every token: (log ratio)^2, or -log pi."""
    rec_regularizer_coef: NonNegative = 0.0
    """rec: weight of the regularizer."""
    positive_nll_coef: NonNegative = 0.0
    """Added to any policy loss: this times the mean of -log pi over the tokens of rollouts with a reward above 0."""
    entropy_agg_mode: Literal["token-mean"] | None = None
    """Mean of the entropy bonus: over the tokens, whatever the aggregation of the loss. Default: as the loss."""

    # -- demonstrations and preferences
    mix: Mix | None = None
    """Demonstrations among the policy's own rollouts. Default: the recipe's (mix and mix_chord have them)."""
    phi_cutoff: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """sft_phi: tokens that the policy gives more than this probability teach nothing. 1: none is left out."""
    beta: Above0 | None = None
    """DPO and KTO: inverse temperature; SimPO: scale of its rewards. Default: 0.1, SimPO 2."""
    pair_loss: Literal["sigmoid", "robust", "hinge", "ipo"] = "sigmoid"
    """DPO: what is made of a pair's margin: DPO's own log-sigmoid, or that of robust DPO, SLiC (hinge) or IPO."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """DPO (sigmoid, robust): assumed share of flipped labels."""
    target_margin: NonNegative = 1.0
    """SimPO: by how much the chosen reply's reward should be above the other's; half of beta is a good start."""
    odds_weight: NonNegative = 0.1
    """ORPO: weight of the odds ratio against the cross entropy of the chosen reply (the paper's lambda)."""
    desirable_weight: NonNegative = 1.0
    """KTO: what a desirable reply counts; raise the weight of the rarer kind so that both count about the same."""
    undesirable_weight: NonNegative = 1.0
    """KTO: what an undesirable reply counts."""


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
