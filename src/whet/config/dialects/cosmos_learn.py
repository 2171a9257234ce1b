"""Cosmos-RL, train.train_policy of RL jobs: rewards, loss, batches and their data."""

from __future__ import annotations

from whet.config.dialects.cosmos_data import data, rewards, validation
from whet.config.dialects.cosmos_run import aggregation, algorithm, normalize, reference, trained_temperature
from whet.config.dialects.cosmos_shared import BATCH, EITHER, HOLDOUT, HUB, LOADING, ROWS, SIZES, size
from whet.config.dialects.cosmos_steps import batch
from whet.config.dialects.key import Key, coming, derived, inert, mapped, translated

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
        "data.train.0.path",
        "data.train.0.arguments",
        default="",
        reason=ROWS,
    ),
    coming("train.train_policy.dataset.revision", HUB, default="", harmless=(None,)),
    translated(
        "train.train_policy.dataset.split",
        data,
        "data.train.0.path",
        "data.train.0.arguments",
        default="",
        reason=ROWS,
    ),
    coming("train.train_policy.dataset.test_size", HOLDOUT, default=None),
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
        "data.eval.0.path",
        "data.eval.0.arguments",
        default="",
        reason=ROWS,
    ),
    coming("validation.dataset.revision", HUB, default="", harmless=(None,)),
    translated(
        "validation.dataset.split",
        validation,
        "data.eval.0.path",
        "data.eval.0.arguments",
        default="",
        reason=ROWS,
    ),
    coming("validation.dataset.test_size", HOLDOUT, default=None),
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
        "algorithm.max_refills",
        default="grpo",
        reason="dapo drops groups of equal rewards and asks for more; gspo is coming. The standard deviation has "
        "n-1 below here, n in Cosmos.",
    ),
    mapped("train.train_policy.dataloader_shuffle", "data.shuffle", default=True),
    coming("train.train_policy.enable_dataset_cache", LOADING, default=False, harmless=EITHER),
    size("train.train_policy.dataloader_num_workers", LOADING, default=0),
    coming("train.train_policy.dataloader_prefetch_factor", LOADING, default=None, harmless=SIZES),
    coming("train.train_policy.dataloader_batch_size", LOADING, default=1, harmless=(None, *SIZES)),
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
        reason="Weighted sum of single_choice, boxed_math, format, gsm8k, overlong, or your own as 'file.py:name'.",
    ),
    translated(
        "train.train_policy.filter_reward_metric",
        algorithm,
        "algorithm.name",
        default=[],
        reason="With dapo, groups are dropped by the total reward; by a part of it is coming. Else nothing is dropped.",
    ),
    derived(
        "train.train_policy.temperature",
        trained_temperature,
        default=1.0,
        reason="Equals the temperature of rollout.sampling_config; training at another one is coming.",
    ),
    mapped("train.train_policy.epsilon_low", "algorithm.clip_low", default=0.2),
    mapped(
        "train.train_policy.epsilon_high",
        "algorithm.clip_high",
        default=0.2,
        reason="The document's 'epsilon', which it would follow, does not exist.",
    ),
    coming(
        "train.train_policy.positive_nll_coef",
        "a likelihood term on replies with a reward",
        default=None,
        harmless=(0,),
    ),
    mapped(
        "train.train_policy.lower_bound_ratio",
        "algorithm.dual_clip",
        default=3.0,
        reason="Caps the loss of negative advantages at this multiple of |A|.",
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
        default=False,
        reason="true: not divided by the standard deviation (the document's text is inverted).",
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
    coming("train.train_policy.aipo_rho", "one-sided caps of the importance ratio (AIPO)", default=None),
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
    mapped(
        "train.train_policy.entropy_coeff",
        "algorithm.entropy_coef",
        default=0.0,
        reason="Differentiated; Cosmos 0.3.6 only reports it.",
    ),
    coming(
        "train.train_policy.allowed_outdated_steps",
        "asynchronous rollouts; every rollout here is of the present policy, within any bound",
        default=4,
        harmless=SIZES,
    ),
    coming(
        "train.train_policy.on_policy",
        "asynchronous rollouts; every rollout here is of the present policy",
        default=False,
        harmless=EITHER,
    ),
    size(
        "train.train_policy.outdated_rollout_fetch_batch_size",
        "asynchronous rollouts; none is outdated here",
        default=1,
    ),
    coming(
        "train.train_policy.min_filter_prefix_tokens",
        "masking prefixes that rollouts share",
        default=None,
        harmless=(0,),
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
        "reference.reset_every",
        default=True,
        reason="Where the reference is reset: false; a new optimizer with it is coming.",
    ),
    inert(
        "train.train_policy.balance_dp_token",
        "Token counts are over the whole optimizer step, whatever the mesh.",
        default=False,
        harmless=EITHER,
    ),
    coming(
        "train.train_policy.use_decoupled_loss", "weighing by the ratio of trainer to engine", default=False
    ),
    coming(
        "train.train_policy.behav_imp_weight_cap", "weighing by the ratio of trainer to engine", default=None
    ),
    inert(
        "train.train_policy.rollout_as_token_ids",
        "Replies stay the tokens that were sampled, always.",
        default=False,
        harmless=EITHER,
    ),
)
