"""Cosmos-RL, train.train_policy of RL jobs: rewards, loss, batches and their data."""

from __future__ import annotations

from whet.config.dialects.cosmos_data import data, order, rewards, validation
from whet.config.dialects.cosmos_loss import (
    aggregation,
    algorithm,
    clipping,
    decoupled,
    entropy,
    likelihood,
    normalize,
    prefixes,
    reference,
)
from whet.config.dialects.cosmos_run import sync, throttled, trained_temperature
from whet.config.dialects.cosmos_shared import BATCH, EITHER, HUB, LOADING, ROWS, size, switch
from whet.config.dialects.cosmos_steps import batch
from whet.config.dialects.key import Key, derived, inert, mapped, translated

CLIP = "Below 0: that side is open (newer versions). Nothing with aipo_rho."
HELD_OUT = (
    "The first rows, a number or a share, are for validation where that is on and has no data set of its own. Null: an "
    "SFT job holds out a tenth; Cosmos's RL jobs never read it."
)

DATA: tuple[Key, ...] = (
    translated(
        "train.train_policy.dataset.name",
        data,
        "data.train.0.path",
        "data.train.0.function",
        default="",
        reason=ROWS,
    ),
    translated(
        "train.train_policy.dataset.subset",
        data,
        "data.train.0.subset",
        "data.train.0.arguments",
        default="",
        reason=ROWS,
    ),
    translated("train.train_policy.dataset.revision", data, "data.train.0.path", default="", reason=HUB),
    translated(
        "train.train_policy.dataset.split",
        data,
        "data.train.0.split",
        "data.train.0.arguments",
        default="",
        reason=ROWS,
    ),
    translated(
        "train.train_policy.dataset.test_size",
        data,
        "data.train.0.skip",
        "data.eval.0.limit",
        default=None,
        reason=HELD_OUT,
    ),
    translated(
        "validation.dataset.name",
        validation,
        "data.eval.0.path",
        "data.eval.0.function",
        default="",
        reason=ROWS,
    ),
    translated(
        "validation.dataset.subset",
        validation,
        "data.eval.0.subset",
        "data.eval.0.arguments",
        default="",
        reason=ROWS,
    ),
    translated("validation.dataset.revision", validation, "data.eval.0.path", default="", reason=HUB),
    translated(
        "validation.dataset.split",
        validation,
        "data.eval.0.split",
        "data.eval.0.arguments",
        default="",
        reason=ROWS,
    ),
    translated(
        "validation.dataset.test_size",
        validation,
        "data.eval.0.limit",
        default=None,
        reason="Only the first so many rows are asked, a number or a share (Cosmos never reads it).",
    ),
)

POLICY: tuple[Key, ...] = (
    translated(
        "train.train_policy.type",
        algorithm,
        "algorithm.name",
        default="grpo",
        reason="The file's own word counts; no other key changes it, as it does in Cosmos.",
    ),
    translated(
        "train.train_policy.variant",
        algorithm,
        "algorithm.name",
        default="grpo",
        reason="gspo: the ratio of whole replies, without a dual clip. dapo: groups of equal rewards are "
        "dropped and others asked for.",
    ),
    translated(
        "train.train_policy.dataloader_shuffle",
        order,
        "data.order",
        default=True,
        reason="shuffle, or the order of the file.",
    ),
    switch("train.train_policy.enable_dataset_cache", LOADING, default=False),
    size("train.train_policy.dataloader_num_workers", LOADING, default=0, least=0),
    size("train.train_policy.dataloader_prefetch_factor", LOADING, default=None, nullable=True),
    size("train.train_policy.dataloader_batch_size", LOADING, default=1, nullable=True),
    translated(
        "train.train_policy.prompt_column_name",
        data,
        "data.train.0.prompt",
        default="",
        reason="Required with a file or folder; text stands as it is, messages get the chat template.",
    ),
    translated(
        "train.train_policy.response_column_name",
        data,
        "data.train.0.answer",
        default="",
        reason="The reference answer that rewards read.",
    ),
    translated(
        "train.train_policy.reward_function",
        rewards,
        "rewards",
        default=["single_choice"],
        reason="Weighted sum of single_choice, boxed_math, direct_math, format, gsm8k, overlong, or your "
        "own as 'file.py:name'.",
    ),
    translated(
        "train.train_policy.filter_reward_metric",
        algorithm,
        "algorithm.groups.uniform_by",
        default=[],
        reason="With dapo: the components whose sum must differ in a group; empty or all of them: the "
        "reward. Else nothing is dropped.",
    ),
    translated(
        "train.train_policy.temperature",
        trained_temperature,
        "train.temperature",
        default=1.0,
        reason="What the trainer divides logits by, whatever was sampled with; up to 1e-6 it is 1.",
    ),
    translated("train.train_policy.epsilon_low", clipping, "algorithm.clip_low", default=0.2, reason=CLIP),
    translated(
        "train.train_policy.epsilon_high",
        clipping,
        "algorithm.clip_high",
        default=0.2,
        reason=f"{CLIP} The document's 'epsilon', which it would follow, does not exist.",
    ),
    translated(
        "train.train_policy.positive_nll_coef",
        likelihood,
        "algorithm.positive_nll_coef",
        default=None,
        reason="null, 0 or less: off.",
    ),
    translated(
        "train.train_policy.lower_bound_ratio",
        clipping,
        "algorithm.dual_clip",
        default=3.0,
        reason="Caps the loss of negative advantages at this multiple of |A|. Nothing with gspo or aipo_rho.",
    ),
    translated(
        "train.train_policy.loss_type",
        aggregation,
        "algorithm.aggregation",
        default="token-mean",
        reason="Means over a whole optimizer step, not over mini-batches and then over those.",
    ),
    translated(
        "train.train_policy.unbiased_loss_max_tokens",
        aggregation,
        "algorithm.aggregation",
        "algorithm.norm_tokens",
        default=None,
        reason="With seq-mean-token-mean: the constant of seq-mean-token-sum-norm.",
    ),
    translated(
        "train.train_policy.unbiased_advantage",
        normalize,
        "algorithm.normalize_std",
        "algorithm.std_ddof",
        default=False,
        reason="true: not divided by the standard deviation (the document's text is inverted). false: by "
        "the one with n below.",
    ),
    translated(
        "train.train_policy.overlong_reward.enable_overlong_penalty",
        rewards,
        "rewards.overlong.weight",
        default=False,
        reason="true adds the reward overlong with weight 1 (Cosmos 0.3.6 never reads it).",
    ),
    translated(
        "train.train_policy.overlong_reward.buffer_length",
        rewards,
        "rewards.overlong.arguments",
        default=4096,
        reason="The zone before rollout.max_response_length in which the penalty grows.",
    ),
    translated(
        "train.train_policy.overlong_reward.penalty_factor",
        rewards,
        "rewards.overlong.weight",
        default=1.0,
        reason="Factor of the penalty, which ends at -1.",
    ),
    mapped(
        "train.train_policy.kl_beta",
        "algorithm.kl.coef",
        default=0.0,
        reason="k3 in the loss, with Cosmos's bounds.",
    ),
    translated(
        "train.train_policy.aipo_rho",
        clipping,
        "algorithm.loss",
        "algorithm.aipo_rho",
        default=None,
        reason="The ratio is bounded from above only; the epsilons and the dual clip mean nothing then. "
        "With gspo it is coming.",
    ),
    mapped("train.train_policy.mu_iterations", "train.passes", default=1),
    translated("train.train_policy.mini_batch", batch, "train.micro_rollouts", default=2, reason=BATCH),
    translated(
        "train.train_policy.batch_size_per_optimize", batch, "train.minibatches", default=None, reason=BATCH
    ),
    translated(
        "train.train_policy.max_token_len_per_mini_batch",
        batch,
        "train.micro_tokens",
        default=None,
        reason="Tokens of one forward and backward, times cp_size; takes the place of mini_batch.",
    ),
    translated(
        "train.train_policy.entropy_coeff",
        entropy,
        "algorithm.entropy_coef",
        "algorithm.entropy_aggregation",
        default=0.0,
        reason="Differentiated, mean over tokens; Cosmos 0.3.6 only reports it. 0 or less: off.",
    ),
    translated(
        "train.train_policy.allowed_outdated_steps",
        sync,
        "rollout.max_staleness",
        default=4,
        reason="Steps that exploring is ahead of training, always as many (Cosmos: at most); without on_policy, and in "
        "mode disaggregated.",
    ),
    translated(
        "train.train_policy.on_policy",
        sync,
        "rollout.max_staleness",
        default=False,
        reason="true: a step's rollouts are of its own weights, and none is ahead.",
    ),
    derived(
        "train.train_policy.outdated_rollout_fetch_batch_size",
        throttled,
        default=1,
        reason="Prompts that may be fetched beyond the bound; here it holds, as with 0.",
    ),
    translated(
        "train.train_policy.min_filter_prefix_tokens",
        prefixes,
        "algorithm.groups.min_shared_prefix",
        default=None,
        reason="Takes tokens out of the loss, not replies out of the group. null or below 1: off.",
    ),
    translated(
        "train.train_policy.max_retry_for_on_policy",
        algorithm,
        "algorithm.max_refills",
        default=10,
        reason="With dapo and on_policy: batches of prompts that one step may take, the first one included.",
    ),
    translated(
        "train.train_policy.reference_reset_interval",
        reference,
        "reference.reset_every",
        default=None,
        reason="Where kl_beta is not 0.",
    ),
    translated(
        "train.train_policy.reset_optimizer_with_reference",
        reference,
        "reference.reset_optimizer",
        default=True,
        reason="Where the reference is reset.",
    ),
    inert(
        "train.train_policy.balance_dp_token",
        "Token counts are over the whole optimizer step, whatever the mesh.",
        default=False,
        harmless=EITHER,
    ),
    translated(
        "train.train_policy.use_decoupled_loss",
        decoupled,
        "algorithm.correction.weight",
        default=False,
        reason="Token losses weighed by the trainer's probability over the engine's.",
    ),
    translated(
        "train.train_policy.behav_imp_weight_cap",
        decoupled,
        "algorithm.correction.high",
        "algorithm.correction.outside",
        "algorithm.correction.denominator",
        default=None,
        reason="With use_decoupled_loss: a larger weight is 0 (the document says clipped); null: no cap.",
    ),
    inert(
        "train.train_policy.rollout_as_token_ids",
        "Replies stay the tokens that were sampled, always.",
        default=False,
        harmless=EITHER,
    ),
)
