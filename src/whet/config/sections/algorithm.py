"""Sections about the algorithm."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from whet.config.sections.base import Above0, Count, Fraction, NonNegative, Positive, Section

Aggregation = Literal[
    "token-mean",
    "token-sum",
    "token-sum-norm",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
]
"""Modes that reduce token losses to one number."""


class KlConfig(Section):
    """A term of the loss: coef times the KL to the reference at every token, with gradient. Beside a loss on pairs
    (dpo) it is the mean over the tokens of both replies."""

    coef: NonNegative = 0.0
    """Weight. (verl: kl_loss_coef; TRL: beta) 0: there is no such term; above 0 the reference takes memory and a
    forward pass over each step's tokens."""
    estimator: Literal[
        "k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k2+", "k3+", "low_var_kl+", "abs+",
        "corrected_k3", "unbiased_k3", "full",
    ] = "low_var_kl"  # fmt: skip
    """Estimator per token, with d = log pi - log ref (Schulman 2020): k1 = d (verl: kl), k2 = d^2/2 (verl: mse), k3 =
    exp(-d)-1+d, low_var_kl = k3 with d bounded to +-20 and k3 to 10 (so that one outlier token cannot dominate a step),
    abs = |d|. (verl: kl_loss_type) With +: the value of the named estimator, the gradient of k2. corrected_k3: k3 times
    the ratio pi / pi_old, at most 2. unbiased_k3: k3 times that ratio, at most 10. full: the exact sum over the
    vocabulary; the reference runs again with every update."""


class RewardKlConfig(Section):
    """A penalty: coef times the KL to the reference, subtracted from the reward of every token, without gradient."""

    coef: NonNegative = 0.0
    """Weight, or initial weight of the adaptive controller. (verl: kl_ctrl.kl_coef) 0: there is no penalty; above 0 the
    reference takes memory and a forward pass over each step's tokens."""
    estimator: Literal["k1", "k2", "k3", "low_var_kl", "abs"] = "k1"
    """Estimator, as in algorithm.kl. k1 is unbiased, and a penalty needs no gradient. (verl: kl_penalty)"""
    target: Above0 | None = None
    """Target of the adaptive controller, which raises `coef` after a step with a larger KL and lowers it after one with
    a smaller: KL in nats per token, the mean over rollouts of their means. (verl: target_kl) null: `coef` stays."""
    horizon: Positive = 10000
    """Horizon of the adaptive controller, in rollouts: a step of R rollouts changes `coef` by at most 0.2 R / horizon
    of its value."""


class RejectConfig(Section):
    """One test that tokens or rollouts must pass. r = pi_old / pi_sampled, the trainer over the engine; with
    reject_policy=current r = pi / pi_sampled."""

    statistic: Literal["ratio", "k2", "k3"] = "ratio"
    """Statistic of each token: ratio = r; k2 = (log r)^2 / 2; k3 = r - 1 - log r, in nats."""
    over: Literal["token", "sum", "mean", "max"] = "token"
    """Scope of the test. token: each token is tested alone. sum, mean: the rollout is tested by the sum or mean over
    its sampled tokens (for a ratio: the product, the geometric mean). max: the rollout is tested by all its tokens; one
    token outside the bounds rejects the rollout."""
    low: NonNegative | None = None
    """Smallest value that passes. null: no bound."""
    high: Above0 | None = None
    """Largest value that passes. null: no bound."""


class CorrectionConfig(Section):
    """Off-policy correction: the policy loss is weighted by w = pi_old / pi_sampled, and tokens can be rejected.

    Without `weight`, `reject`, `second_moment` and `staleness_decay` it is off. KL and entropy are never weighted.
    """

    weight: str | dict[str, Any] | None = None
    """Importance weight: of the token, of the whole rollout (sequence: product over its sampled tokens), or the
    geometric mean of that product. A name, or a table of the name and its settings: {name: token, high: 2.0}. Or your
    own function, 'my/file.py:name', called with the batch and the log-ratios [N]. (verl: rollout_correction.rollout_is)
    null: no weight."""
    staleness_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Multiply the weight of a token by this factor to the power of the age of its policy, in versions. 1: off."""
    reject: tuple[RejectConfig, ...] = ()
    """Tests of tokens or rollouts; a token or rollout that fails one test has weight 0."""
    reject_policy: Literal["old", "current"] = "old"
    """Policy that `reject` compares with the engine. old: the policy before the step, once a step. current: the policy
    that learns, in every optimizer step (verl's bypass_mode). What current rejects has no policy loss, but counts in
    the averages, in KL and in entropy; with seq-mean-token-mean the mean of a rollout is over its remaining tokens."""
    second_moment: Above0 | None = None
    """Reject the tokens with the largest (log w)^2 until the mean of the others over the step is below this (M2PO,
    arXiv:2510.01161; AReaL's example: 0.04). null: off."""
    denominator: Literal["kept", "all"] = "kept"
    """Denominator of the averages in the loss. kept: tokens of weight 0 are excluded from the loss, KL and entropy
    (verl); all: these tokens count in the denominator, in KL and in entropy (Cosmos-RL, IcePop)."""


class GroupsConfig(Section):
    """Filters of a scored group before training. They apply in the order of the keys; by default there is none."""

    truncated: Literal["keep", "zero", "mask", "drop"] = "keep"
    """Treatment of a truncated rollout (finish reason not 'stop': it reached a limit of tokens). keep: no change; zero:
    its reward becomes 0; mask: its tokens have no loss, but its reward still counts in the mean of the group (TRL:
    mask_truncated_completions; DAPO's overlong filtering); drop: it is removed from the group."""
    min_reward: float | None = None
    """Drop rollouts with a lower reward. Default: no rollout is dropped."""
    keep_best: Positive | None = None
    """Keep only this number of rollouts with the highest rewards (best-of-n), plus those of keep_worst. null: none but
    those of keep_worst, or, where that is null too, all."""
    keep_worst: Positive | None = None
    """Keep only this number of rollouts with the lowest rewards, plus those of keep_best. null: none but those of
    keep_best, or, where that is null too, all."""
    min_shared_prefix: Positive | None = None
    """Mask shared prefixes of at least this many tokens: where replies begin with the same tokens but have different
    rewards, the tokens of the shared prefix have no loss. Not with the advantages optimal_token_baseline and
    tir_optimal_token_baseline, which compare replies place by place. Default: no prefix is masked."""
    uniform: str | dict[str, Any] | None = None
    """Drop groups that are too uniform to be trained on, a table of settings: {min_std: 0.1} drops those whose rewards
    deviate less, and {by: [accuracy], above: 0.0} says what algorithm.dynamic_sampling compares. Default: only
    algorithm.dynamic_sampling drops groups, those whose rewards are all equal."""


class MixConfig(Section):
    """Training on demonstrations (`data.demonstrations`) and own rollouts in one step."""

    demonstration_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Share of the tasks of a step (train.tasks_per_step, rounded up) whose reply is a demonstration, one per task."""
    loss: str | dict[str, Any] | None = None
    """Loss of the demonstrations: sft, sft_is, sft_phi, or a table of its settings, as algorithm.loss: {name: sft_phi,
    phi_cutoff: 0.5}. Default: the recipe's (mix: sft; mix_chord: sft_phi)."""
    mu: Fraction = 0.1
    """Weight of the loss of the demonstrations; the loss of the policy, with its KL and entropy terms, has weight 1 -
    mu."""
    mu_schedule: str | dict[str, Any] | None = None
    """How mu changes over the training steps: cosine, or a table of its settings: {warmup_steps: 200, valley: 0.02,
    decay_steps: 400}. Default: it is constant."""


class RepromptConfig(Section):
    """Self-distillation (SDPO, arXiv:2601.20802): the reference scores each reply after a prompt that also shows a
    successful reply of the same group, or a text from the row. Templates and defaults are those of the authors' code
    and of TRL 1.16."""

    success_reward: float = 1.0
    """Smallest reward of a reply that is shown. (TRL: success_reward_threshold) The first such reply of a group is
    shown; a rollout without one, and without `feedback`, is not trained on."""
    own_success: bool = False
    """A successful rollout may be shown its own reply. false: it is shown the reply of another rollout. (TRL:
    dont_reprompt_on_self_success, negated)"""
    thoughts: bool = True
    """The shown reply includes its thoughts. false: only what follows them. (TRL: remove_thinking_from_demonstration,
    negated)"""
    feedback: str | None = None
    """Column of the row whose text is shown, e.g. a reference solution or the message of a failed test. (TRL:
    privileged_context) Default: no column."""
    template: str = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n"
    """The new prompt: {prompt} stands for the text of the last message of the user (or the whole prompt if it is plain
    text), {solution} and {feedback} for the two templates below, or for nothing. (TRL: reprompt_template)"""
    solution_template: str = "\nCorrect solution:\n\n{reply}\n\n"
    """How the successful reply is shown. (TRL: solution_template)"""
    feedback_template: str = (
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback}\n\n"
    )
    """How the text of the column is shown. (TRL: feedback_template)"""
    max_prompt_tokens: Positive = 10240
    """Longest new prompt in tokens. (TRL: max_reprompt_len) A rollout with a longer one, or one that together with its
    reply exceeds the positions of the model, is not trained on and counted in train/reprompt_overlong; TRL cuts the
    prompt instead."""


class AlgorithmConfig(Section):
    """The training objective. `name` selects a recipe; every other key replaces one part of the recipe."""

    name: str = "grpo"
    """Recipe, e.g. grpo, dapo, ppo, sft, dpo: it sets advantage, loss, aggregation and more. `whet keys --algorithms`
    lists all, `whet explain algorithm.name=dapo` prints what one sets."""
    advantage: str | dict[str, Any] | None = None
    """Advantage estimator: its name, 'package.module:name' of your own function, or a table of its settings, with
    `name` where it is not the recipe's: {name: gae, lam: 0.95}. (verl: adv_estimator) `whet explain
    algorithm.advantage` lists them. Default: the recipe's."""
    loss: str | dict[str, Any] | None = None
    """Loss: its name, 'package.module:name' of your own function, or a table of its settings, with `name` where it is
    not the recipe's: {name: gspo, clip_low: 3e-4}. (verl: policy_loss.loss_mode; TRL: loss_type) `whet explain
    algorithm.loss` lists them. Default: the recipe's."""
    loss_agg_mode: Aggregation | None = None
    """What the sum of the token losses of a minibatch is divided by. token-mean: its tokens. seq-mean-token-mean: the
    tokens of each rollout, then the rollouts (GRPO). seq-mean-token-sum: the rollouts. seq-mean-token-sum-norm: the
    rollouts times norm_tokens (Dr. GRPO). prompt-mean: the tokens of each group, then the groups. token-sum: 1.
    token-sum-norm: norm_tokens, which is what verl calls seq-mean-token-sum-norm; with both the gradient grows with the
    batch. Only sampled tokens count. The counts are those of the whole minibatch, so the result does not depend on
    micro-batches and ranks. (TRL: loss_type) Default: the recipe's."""
    norm_tokens: Positive | None = None
    """Constant divisor of seq-mean-token-sum-norm (Dr. GRPO) and token-sum-norm. Default:
    rollout.sampling.max_tokens."""
    mean_over_rollouts: Positive | None = None
    """token-mean: take the mean over the tokens of each block of this many consecutive rollouts, then the mean over the
    blocks (SkyRL's token_mean_legacy, whose blocks are micro-batches). Default: one mean over the minibatch."""
    whiten: bool | Literal["population"] | None = None
    """Normalize advantages to mean 0 and variance 1 over the batch. true divides by sqrt(variance + 1e-8), with n - 1
    in the denominator of the variance (verl); population by sqrt(max(variance, 1e-8)), with n in it (SkyRL). Default:
    the recipe's."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus: this times the entropy of each token, in nats, is subtracted from its loss. (verl:
    entropy_coeff) With entropy_control it is the first weight. 0: off; entropy is then still measured where it costs
    nothing."""
    entropy_control: str | dict[str, Any] | None = None
    """Move the weight of the entropy bonus in every optimizer step so that the entropy stays at a target (Skywork-OR1):
    adaptive, or a table of its settings: {target: 0.2}. Default: the weight is constant."""
    kl: KlConfig = Field(default_factory=KlConfig)
    """KL to the reference, as a term of the loss."""
    reward_kl: RewardKlConfig = Field(default_factory=RewardKlConfig)
    """KL to the reference, subtracted from the reward. Both KL terms may be on."""
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    """Off-policy correction: weights or rejects tokens that were sampled by an older policy, or by an engine that
    computes differently."""
    old_logprobs: Literal["auto", "sampled", "recompute"] = "auto"
    """Where log pi_old, the denominator of the ratio, comes from. sampled: the engine's own log-probs; recompute: a
    forward pass of the trainer before the update. auto: recompute, but sampled where a self-test has shown both to be
    equal bit for bit (machine.logprob_parity) and where only metrics read them. A correction that compares the two
    always recomputes."""
    dynamic_sampling: bool | None = None
    """Dynamic sampling (DAPO): drop groups whose rewards are all equal, in which a comparison within the group finds no
    better reply, and sample more tasks until the step is full (see max_refills). (verl: filter_groups.enable) Default:
    the recipe's."""
    max_refills: Count = 10
    """Limit on refills of one step. Groups that were dropped or failed are replaced by new tasks: at most this many
    times tasks_per_step more tasks for one step, then the run stops and names the cause. (verl: max_num_gen_batches,
    which counts the first batch, too)"""

    # -- advantages
    advantage_clip: tuple[float | None, float | None] = (None, None)
    """Lowest and highest advantage of a token, after whitening: [-5.0, 5.0]. null in a place: no bound there."""
    resample: str | dict[str, Any] | None = None
    """Draw the rollouts of the batch again, so that some count several times and others not at all: pow, max_min,
    max_random, balance, or a table: {name: pow, power: 1.0}; `whet explain algorithm.resample` says what each does.
    Default: each rollout counts once."""
    groups: GroupsConfig = Field(default_factory=GroupsConfig)
    """Which rollouts of a group are trained on, and with what reward or mask."""
    oversample: str | dict[str, Any] | None = None
    """Sample more tasks than a step trains on, and choose among their groups (PRIME): mean_reward, or a table of its
    settings: {factor: 4.0, low: 0.2, high: 0.8}. Default: a step samples what it trains on."""
    refill: Literal["sample", "copy"] = "sample"
    """Replacement of dropped groups: new tasks (sample), or random copies of the other groups of the step (copy)."""

    # -- policy losses
    top_entropy_quantile: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of a step's tokens that the policy loss learns from: those where the policy before the step had the highest
    entropy; the paper: 0.2 (arXiv:2506.01939). The other tokens still count in averages. 1: all."""
    entropy_clip: str | dict[str, Any] | None = None
    """Leave out tokens with a negative advantage whose update would lower the entropy most, measured with the policy
    before the step (arXiv:2602.03392): batch or vocabulary, or a table: {name: batch, mu: 2.0}. Averages still count
    all tokens, also those left out. Default: no token is left out."""
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
