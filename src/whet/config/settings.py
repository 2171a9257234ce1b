"""Settings of advantages, losses and importance weights: a section for each function, with the names in its signature.

`algorithm.loss: {name: gspo, clip_low: 3e-4}` gives the function `gspo` of `whet.algos.losses` its `clip_low`. Readable
without torch; a test holds every section to the signature of its function. A function of the user's has no section: its
settings are those of its own signature.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from whet.config.sections.base import Above0, Fraction, NonNegative, Section

Part = Annotated[float, Field(gt=0.0, le=1.0)]


class NoSettings(Section):
    """A function without settings."""


# ---------------------------------------------------------------- advantages


class Std(Section):
    """Division by the standard deviation of a group's rewards."""

    normalize_std: bool = True
    """Divide by the group's standard deviation."""
    std_epsilon: Above0 = 1e-6
    """Added to the standard deviation."""


class GroupStd(Std):
    """The same, with its denominator."""

    std_ddof: Literal[1, 0] = 1
    """Denominator of the standard deviation: 1 is n - 1 (as verl, TRL, Trinity), 0 is n (as Cosmos-RL)."""


class Grpo(GroupStd):
    """Reward minus the group's mean, divided by its standard deviation."""

    std_floor: NonNegative = 0.0
    """Lower bound of the standard deviation, before std_epsilon is added."""
    std_scope: Literal["group", "batch"] = "group"
    """The standard deviation of the group's rewards, or of all rewards of the batch."""
    rank_penalty: Fraction = 0.0
    """Lower the reward of the group's likelier replies, the likeliest by nearly this share, so that rare good replies
    count more (arXiv:2506.02355). 0 is off."""


class Gdpo(GroupStd):
    """Parts of the reward, each minus its own mean in the group, summed and whitened over the batch (GDPO)."""

    parts: tuple[str, ...] = ()
    """Names of the parts: a reward, or REWARD/KEY for another number that the reward returns."""
    part_weights: tuple[float, ...] | None = None
    """A weight for each part, in their order. None: 1 for each."""


class Rloo(Section):
    """Reward minus the mean of the group's other rewards."""

    single_rollout: Literal["zero", "raw"] = "zero"
    """The advantage of a rollout alone in its group: 0 (and its group is dropped), or its reward."""


class RecAdvantage(Std):
    """Reward minus the group's mean (REC)."""

    normalize_std: bool = False
    """Divide by the group's standard deviation."""


class OpmdAdvantage(Section):
    """Reward minus a baseline of the group (OPMD)."""

    opmd_baseline: Literal["mean", "logavgexp"] = "mean"
    """The group's mean reward, or tau log mean exp(reward / tau)."""
    tau: Above0 = 1.0
    """Temperature of logavgexp, in units of reward."""


class Asymre(Section):
    """Reward minus the shifted mean of the group (AsymRE)."""

    baseline_shift: float = -0.1
    """Added to the group's mean; below 0 good replies count more than bad replies."""


class Maxrl(Section):
    """Reward minus the group's mean, divided by that mean."""

    std_epsilon: Above0 = 1e-6
    """Added to the mean in the denominator."""


class Discount(Section):
    """A discount of later rewards."""

    gamma: Fraction = 1.0
    """Discount factor per token."""


class ReinforcePlusPlus(Discount):
    """Discounted returns, normalized over the batch (REINFORCE++)."""

    reset_at_turns: bool = False
    """The return restarts at the end of each turn, as in SkyRL 0.3 and verl 0.8.0. false: rewards of later turns count
    for earlier turns, as in verl since 0.9.0."""


class OptimalTokenBaseline(Section):
    """A baseline for each position of a reply."""

    handle_zero_tail: bool = True
    """The part of a reply that is longer than all other replies of the group has no baseline. false: it is its own
    baseline, so its advantage is 0 there."""


class Gpg(Section):
    """Reward minus the group's mean, scaled up (GPG)."""

    gpg_alpha: Literal["mixed_groups", "nonzero"] = "mixed_groups"
    """Scale: all rollouts over those of groups whose rewards differ (arXiv:2504.02546), or over those whose reward is
    not 0 (verl)."""


class Gae(Discount):
    """Generalized advantage estimation (arXiv:1506.02438), with a critic."""

    lam: Fraction = 1.0
    """Lambda: 1 is the return less the value, 0 the one-step error."""
    bootstrap_truncated: bool = False
    """true: where a limit ended a rollout (tokens, turns, cost, observations, context, an environment's `truncated`),
    the critic's value of the state after its last token stands for what would have followed. false: a rollout that a
    limit ends is worth no more than its rewards, as in verl, SkyRL and TRL."""


class TurnLevelGae(Section):
    """Generalized advantage estimation over turns, with a critic."""

    gamma: Fraction = 1.0
    """Discount factor per turn."""
    lam: Fraction = 1.0
    """Lambda: 1 is the return less the value, 0 the error of one turn."""
    bootstrap_truncated: bool = False
    """true: where a limit ended a rollout (tokens, turns, cost, observations, context, an environment's `truncated`),
    the critic's value of the state after its last token stands for what would have followed. false: a rollout that a
    limit ends is worth no more than its rewards."""


class Gigpo(Std):
    """GRPO over episodes, beside an advantage for each turn (GiGPO)."""

    gamma: Fraction = 1.0
    """Discount factor per turn (the paper: 0.95)."""
    turn_weight: NonNegative = 1.0
    """Weight of a turn's own advantage beside the episode's."""


class StepWiseGrpo(Section):
    """GRPO over the last turns, for all turns of an episode."""

    std_epsilon: Above0 = 1e-6
    """Added to the standard deviation."""
    std_ddof: Literal[1, 0] = 1
    """Denominator of the standard deviation: 1 is n - 1, 0 is n."""
    std_scope: Literal["group", "batch"] = "group"
    """The standard deviation of the group's rewards, or of all rewards of the batch."""
    divide_by_turns: bool = False
    """Divide an episode's advantage by its number of turns."""


class Distill(Section):
    """On-policy distillation from the reference."""

    distill_coef: Above0 = 1.0
    """Factor on log teacher - log policy."""
    distill_estimator: Literal["k1", "k2", "low_var_kl", "abs", "jsd"] = "k1"
    """Divergence from the teacher at the sampled token; the advantage is minus the divergence. k1: log policy - log
    teacher. jsd: b log teacher + (1 - b) log policy - log(b teacher + (1 - b) policy) (generalized Jensen-Shannon)."""
    distill_mixture: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """jsd: b, the weight of the teacher in the mixture."""
    distill_discount: Fraction = 0.0
    """Discount of later tokens: the advantage of a token also includes that of the k-th later token of its reply, times
    this to the power k. 0: each token by itself."""


# ---------------------------------------------------------------- losses


class Clip(Section):
    """Bounds of the ratio of the policy to the policy before the step."""

    clip_low: Above0 = 0.2
    """Ratio clip below 1: 1 - clip_low; 1 or more leaves that side open."""
    clip_high: Above0 = 0.2
    """Ratio clip above 1: 1 + clip_high (clip-higher of DAPO: 0.28); 1e9 leaves that side open."""


class Ppo(Clip):
    """PPO's clipped objective (arXiv:1707.06347)."""

    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Bound the loss of negative advantages at this multiple (arXiv:1912.09729). None: off."""
    sequence_mask_delta: Above0 | None = None
    """A rollout whose mean log pi_old/pi (nats per token) is above this has no loss at tokens with negative advantages.
    None: off."""
    sequence_mask_anchor: Literal["old", "sampled"] = "old"
    """sequence_mask_delta compares the policy with the one before the step, or with the engine's own log-probs, so that
    the difference of engine and trainer counts, too (DeepSeek-V3.2)."""
    fallback_to_policy_gradient: bool = False
    """Take the ratio to the policy itself, so that the gradient is that of -A log pi. Correct for one optimizer step
    per batch."""


class Gspo(Section):
    """Clipped ratios of whole sequences (arXiv:2507.18071)."""

    clip_low: Above0 = 3e-4
    """Ratio clip below 1: 1 - clip_low."""
    clip_high: Above0 = 4e-4
    """Ratio clip above 1: 1 + clip_high."""
    gspo_form: Literal["sequence", "token"] = "sequence"
    """Gradient through the rollout's mean log-ratio, or through each token's own log-prob (GSPO-token)."""


class Vespo(Section):
    """A soft gate on the ratio w of a whole rollout: w^k exp(lambda (1 - w)) (VESPO, arXiv:2602.10693)."""

    vespo_k_pos: NonNegative = 2.0
    """k where the advantage is not negative: how fast the gate closes below w = 1."""
    vespo_lambda_pos: Above0 = 3.0
    """lambda where the advantage is not negative: how fast it closes above."""
    vespo_k_neg: NonNegative = 3.0
    """k where the advantage is negative."""
    vespo_lambda_neg: Above0 = 2.0
    """lambda where the advantage is negative."""


class GeoMean(Section):
    """Geometric means of ratios (GMPO, arXiv:2507.20673)."""

    clip_low: Above0 = 0.4
    """Clip of the log-ratio below 0: -clip_low."""
    clip_high: Above0 = 0.4
    """Clip of the log-ratio above 0: clip_high."""


class Cispo(Section):
    """Clipped importance weights with the gradient of log pi (arXiv:2506.13585)."""

    clip_low: Above0 = 1.0
    """Weight clip below 1: 1 - clip_low; 1 or more leaves that side open."""
    clip_high: Above0 = 4.0
    """Weight clip above 1: 1 + clip_high."""
    cispo_mask: bool = False
    """Tokens that PPO would clip count 0."""
    mask_low: Above0 | None = None
    """cispo_mask: with a negative advantage a ratio below 1 - this counts 0. None: clip_low."""
    mask_high: Above0 | None = None
    """cispo_mask: with a positive advantage a ratio above 1 + this counts 0. None: clip_high."""


class Sapo(Section):
    """A soft gate in place of a clip (SAPO, arXiv:2511.20347)."""

    tau_pos: Above0 = 1.0
    """Temperature of the gate where the advantage is positive; larger closes faster."""
    tau_neg: Above0 = 1.05
    """The same for other advantages; a slightly larger value stabilizes training."""
    sapo_detach: bool = False
    """Weight log pi by the gate (Trinity) instead of differentiating the gate (the paper)."""


class ClipCov(Clip):
    """PPO without some tokens of high covariance (arXiv:2505.22617)."""

    clip_cov_ratio: Part = 2e-4
    """Share of the minibatch's tokens that are left out, at least one."""
    clip_cov_lb: float = 1.0
    """Lower bound of the covariance of advantage and log-prob of tokens that may be left out."""
    clip_cov_ub: float = 5.0
    """Upper bound of this covariance."""


class KlCov(Section):
    """A KL penalty at tokens of high covariance (arXiv:2505.22617)."""

    kl_cov_ratio: Part = 2e-4
    """Share of the minibatch's tokens with the penalty, those with the largest covariance; at least one."""
    ppo_kl_coef: NonNegative = 1.0
    """Weight of |log ratio| at those tokens; the paper's 1 (verl's configuration: 0.1)."""


class Dppo(Section):
    """Bounds on the divergence in place of the ratio (DPPO, arXiv:2602.04879)."""

    dppo_divergence: Literal["binary_tv", "binary_kl"] = "binary_tv"
    """How far the sampled token's probability has moved: its difference, or the KL of two Bernoulli distributions."""
    dppo_delta_low: Above0 = 0.15
    """Bound on the divergence of a token with negative advantage whose probability has fallen (0.05 is usual for
    binary_kl, in nats)."""
    dppo_delta_high: Above0 = 0.15
    """Bound on the divergence of a token with positive advantage whose probability has risen."""
    dppo_anchor: Literal["sampled", "old"] = "sampled"
    """What the policy is compared with: the engine's log-probs (the paper), or those of the policy before the step."""
    dppo_max_ratio: Above0 = 20.0
    """Upper bound of the ratio; tokens above it keep a gradient with this weight (section 5.4 of the paper: 20). 1e9:
    no limit."""


class Aipo(Section):
    """Capped importance weights (arXiv:2505.24034)."""

    aipo_rho: Above0 = 4.0
    """Cap of the ratio; the paper's range is 2 to 10."""


class SoftmaxPpo(Section):
    """Policy gradient of tokens with a ratio near 1 only (arXiv:2108.05828)."""

    ratio_epsilon: Above0 = 0.3
    """Tokens with a ratio outside 1 / (1 + e) .. 1 + e count 0."""


class ReinforceIs(Section):
    """REINFORCE with importance weights: the policy being trained over the engine (verl's bypass mode)."""

    weight_over: Literal["none", "token", "sequence", "geometric"] = "token"
    """Weight of a token: 1, its ratio, the product of the rollout's ratios, or their geometric mean."""
    weight_low: NonNegative | None = None
    """Smallest weight. None: no bound."""
    weight_high: Above0 | None = 2.0
    """Largest weight. 1e9: no bound."""
    weight_outside: Literal["truncate", "mask"] = "truncate"
    """A weight outside the bounds becomes the bound (truncate) or 0 (mask)."""


class Dro(Section):
    """A square of the log-ratio in place of a clip (DRO, arXiv:2405.19107)."""

    dro_beta: Above0 = 0.1
    """Weight of half the squared log-ratio to the policy before the step."""


class Opmd(Section):
    """Online policy mirror descent."""

    tau: Above0 = 1.0
    """The loss is divided by 1 + this, in units of reward."""


class Topr(Section):
    """Tapered off-policy REINFORCE (arXiv:2503.14286)."""

    topr_threshold: float = 0.0
    """Tokens with an advantage above this have weight 1, others at most their ratio."""


class Rec(Clip):
    """REINFORCE with clipped or weighted tokens (REC, arXiv:2509.24203)."""

    rec_clip_mode: Literal["none", "one-side", "two-side", "ring", "gspo-one-side"] = "one-side"
    """Selects the tokens with a gradient, by their ratio (docs/algorithms.md)."""
    rec_ring_low: Above0 = 0.6
    """ring: tokens with a positive advantage and a ratio below 1 - this also have a gradient."""
    rec_ring_high: Above0 = 2.0
    """ring: tokens with a negative advantage and a ratio above 1 + this also have a gradient."""
    rec_weight: Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"] = "none"
    """Weight of a token: 1, its ratio, the rollout's, or exp(A / rec_temperature), at most e^20."""
    rec_temperature: Above0 = 1.0
    """rec_weight=advantage: temperature."""
    rec_regularizer: Literal["none", "k2", "forward-kl"] = "none"
    """Added at every token: (log ratio)^2, or -log pi."""
    rec_regularizer_coef: NonNegative = 0.0
    """Weight of the regularizer."""


class Gkd(Section):
    """The divergence from a teacher at the policy's own tokens (arXiv:2306.13649)."""

    divergence: Literal["low_var_kl", "k2", "k3", "abs", "full", "forward_topk", "jsd", "jsd_topk"] = (
        "low_var_kl"
    )
    """An estimator of the KL of the policy to the teacher at the sampled token; full: that KL over the vocabulary;
    forward_topk: the KL of the teacher to the policy over the teacher's top_k likeliest tokens; jsd: the generalized
    Jensen-Shannon divergence over the vocabulary; jsd_topk: the same over likely tokens."""
    jsd_beta: Fraction = 0.5
    """jsd, jsd_topk: weight of the teacher in the mixture that both are compared with. 0: the KL of the teacher to the
    policy; 1: the KL of the policy to the teacher."""
    top_k: Annotated[int, Field(ge=1)] = 32
    """Number of likely tokens that forward_topk and jsd_topk compare at each position."""
    top_k_of: Literal["teacher", "policy", "both"] = "both"
    """jsd_topk: whose top_k likeliest tokens. both: all that are among either's."""
    top_k_rest: Literal["tail", "renormalize", "drop"] = "tail"
    """jsd_topk: the probability of the other tokens is compared as one more token (tail), distributed over the compared
    tokens (renormalize), or left out (drop)."""
    min_logprob: Annotated[float, Field(lt=0.0)] | None = None
    """forward_topk: lower bound of the log-probs of both models, in nats. None: no bound."""
    max_divergence: Above0 | None = None
    """Upper bound of a token's divergence, in nats, without gradient above. None: no limit."""
    distill_coef: Above0 = 1.0
    """Factor on the divergence."""


class SftPhi(Section):
    """Cross entropy without tokens that the policy knows (CHORD, arXiv:2508.11408)."""

    phi_cutoff: Part = 1.0
    """Tokens with a probability above this under the policy have no gradient. 1: none is left out."""


PairLoss = Literal[
    "sigmoid",
    "sigmoid_norm",
    "robust",
    "hinge",
    "ipo",
    "exo",
    "nca",
    "bco",
    "self_play",
    "apo_zero",
    "apo_down",
    "sft",
]


class Dpo(Section):
    """Direct preference optimization (arXiv:2305.18290)."""

    beta: Above0 = 0.1
    """Inverse temperature."""
    pair_loss: PairLoss | tuple[PairLoss, ...] = ("sigmoid",)
    """Loss of a pair: DPO's own log-sigmoid, or another (docs/algorithms.md). Several are summed: [sigmoid, sft] is DPO
    with the likelihood of the chosen reply."""
    pair_weights: tuple[NonNegative, ...] | None = None
    """A weight for each of several losses, in their order. None: 1 for each."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """sigmoid, robust, exo: assumed share of flipped labels; exo needs one above 0."""
    ipo_mean: bool = True
    """ipo: compare means over the tokens of a reply, like its authors (and TRL), instead of sums."""


class Simpo(Section):
    """Preferences without a reference (arXiv:2405.14734)."""

    beta: Above0 = 2.0
    """Scale of the rewards."""
    target_margin: NonNegative = 1.0
    """By how much the chosen reply's reward should be above the other's; half of beta is a good start."""
    reward_alpha: float = 0.0
    """Shape of a reply's reward: (1 - p^-alpha) / alpha, p its geometric mean probability per token (AlphaPO,
    arXiv:2501.03884). 0: log p, SimPO's own."""


class Cpo(Section):
    """DPO without a reference, beside the likelihood of the chosen reply (CPO, arXiv:2401.08417)."""

    beta: Above0 = 0.1
    """Inverse temperature."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Assumed share of flipped labels."""
    nll_weight: NonNegative = 1.0
    """Weight of the chosen reply's mean -log pi."""


class Orpo(Section):
    """Cross entropy with an odds ratio (arXiv:2403.07691)."""

    odds_weight: NonNegative = 0.1
    """Weight of the odds ratio against the cross entropy of the chosen reply (the paper's lambda)."""


class Kto(Section):
    """Replies marked as desirable or not (arXiv:2402.01306)."""

    beta: Above0 = 0.1
    """Inverse temperature."""
    desirable_weight: NonNegative = 1.0
    """Weight of a desirable reply; raise the weight of the rarer kind so that both kinds have about the same
    influence."""
    undesirable_weight: NonNegative = 1.0
    """Weight of an undesirable reply."""


# ---------------------------------------------------------------- importance weights


class ImportanceWeight(Section):
    """Bounds of w = pi_old / pi_sampled."""

    low: NonNegative | None = None
    """Smallest weight. None: no bound."""
    high: Above0 | None = None
    """Largest weight; 2 to 5 is usual. None: no bound."""
    outside: Literal["truncate", "mask"] = "truncate"
    """What happens to a weight outside the bounds: truncate sets it to the bound (TIS), mask sets it to 0 (MIS, IcePop,
    the cap of AReaL)."""
    normalize: bool = False
    """Divide the weights by their mean over the step: over its tokens, or over its rollouts where the weight is per
    rollout."""
