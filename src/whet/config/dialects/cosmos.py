"""Cosmos-RL (0.3.6): every key of its schema, for RL jobs (`COSMOS_GRPO`) and for SFT jobs (`COSMOS_SFT`).

An SFT job reads the keys of RL outside train.train_policy as well; those that Cosmos gives to RL alone (rollout.*)
are accepted there and mean nothing, as in Cosmos. What runs in several processes there runs in one here.
"""

from __future__ import annotations

from whet.config.dialects.cosmos_data import data, order, validation
from whet.config.dialects.cosmos_learn import DATA, HELD_OUT, POLICY
from whet.config.dialects.cosmos_loop import CHECKPOINT, LOGGING, TRAIN, VALIDATION
from whet.config.dialects.cosmos_lora import adapters
from whet.config.dialects.cosmos_loss import algorithm, reference
from whet.config.dialects.cosmos_model import ADAPTERS, MODEL, POLICY_MESH, PROFILER, ROLLOUT, ROLLOUT_MESH
from whet.config.dialects.cosmos_run import sync
from whet.config.dialects.cosmos_shared import (
    EITHER,
    HUB,
    LOADING,
    ROWS,
    machinery,
    section,
    size,
    switch,
)
from whet.config.dialects.cosmos_steps import batch, schedule
from whet.config.dialects.key import Key, inert, mapped, translated

SECTIONS: tuple[Key, ...] = (
    translated(
        "custom",
        data,
        "data.train.0.arguments",
        default={},
        reason="Arguments of a data set that is a function of yours; any keys. No launch script reads it "
        "here.",
    ),
    section("train"),
    section("rollout"),
    section("policy"),
    section("logging"),
    section("profiler"),
    section("validation"),
    section("train.train_policy"),
    section("train.fp8"),
    section("train.fp4"),
    section("train.ckpt"),
    section("policy.parallelism"),
    translated(
        "policy.lora",
        adapters,
        "model.lora",
        default=None,
        reason="A section; where it stands, be it empty, adapters are trained. Upstream wants train.compile=false and "
        "tp_size=1 with it; here both are free.",
    ),
    section("rollout.parallelism"),
    section("rollout.sampling_config"),
    section("rollout.multi_turn_config"),
    section("profiler.sub_profiler_config"),
    section("train.train_policy.overlong_reward"),
    section("train.train_policy.dataset"),
    section("validation.dataset"),
)

NEWER: tuple[Key, ...] = (
    machinery("redis", "Where Cosmos's own processes meet; there is one process here."),
    machinery("eth_ips", "Where Cosmos's own processes meet; there is one process here."),
    machinery(
        "policy.parallelism.cp_rotate_method", "Of context parallelism before 0.3; a model here is whole."
    ),
    translated(
        "mode",
        sync,
        "rollout.max_staleness",
        default="disaggregated",
        reason="disaggregated: rollouts beside training, ahead of it; colocated, colocated_separated: in turn.",
    ),
    switch(
        "logging.report_mfu",
        "speed/mfu stands in metrics.jsonl wherever the device's peak is known, always.",
        default=False,
    ),
    mapped(
        "train.train_policy.advantage_low",
        "algorithm.advantage_low",
        default=None,
        reason="A bound of advantages, of newer versions.",
    ),
    mapped(
        "train.train_policy.advantage_high",
        "algorithm.advantage_high",
        default=None,
        reason="A bound of advantages, of newer versions.",
    ),
    translated(
        "train.train_policy.unbiased_kl_estimate",
        reference,
        "algorithm.kl.estimator",
        default=False,
        reason="Of newer versions: k3 times the ratio, here at most 2. Where kl_beta is not 0.",
    ),
    translated(
        "train.optm_warmup_start_factor",
        schedule,
        "train.optimizer.schedule.warmup_start",
        "train.optimizer.schedule.warmup_ends",
        default=None,
        reason="Of newer versions: where the warm-up starts, in its first step. Null: as in 0.3.6, 1/w.",
    ),
    translated(
        "validation.val_before_train",
        validation,
        "eval.at_start",
        default=False,
        reason="Read where validation.enable is true.",
    ),
)
"""Keys that the document does not have: hidden ones of its version, and of other versions."""

COSMOS_GRPO: tuple[Key, ...] = (
    *SECTIONS,
    *DATA,
    *POLICY,
    *LOGGING,
    *MODEL,
    *ADAPTERS,
    *POLICY_MESH,
    *ROLLOUT_MESH,
    *PROFILER,
    *ROLLOUT,
    *TRAIN,
    *CHECKPOINT,
    *VALIDATION,
    *NEWER,
)
"""RL jobs: 200 keys of the document, and `NEWER`. All but train.train_policy.* is read by SFT jobs, too."""

COSMOS_SFT: tuple[Key, ...] = (
    section("train.train_policy.dataset"),
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
        "train.train_policy.type",
        algorithm,
        "algorithm.name",
        default="sft",
        reason="The file's own word counts.",
    ),
    translated(
        "train.train_policy.mini_batch",
        batch,
        "train.micro_rollouts",
        default=2,
        reason="Conversations of one forward and backward; divides train_batch_per_replica.",
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
    translated(
        "train.train_policy.conversation_column_name",
        data,
        "data.train.0.messages",
        default="conversations",
        reason="Conversations that end with a reply; every reply in them is learned. Empty: rows have "
        "prompt and response.",
    ),
    translated(
        "train.train_policy.system_prompt",
        data,
        "data.train.0.system",
        default="",
        reason="A system message before every conversation.",
    ),
    inert(
        "train.train_policy.balance_dp_token",
        "Token counts are over the whole step, whatever the mesh.",
        default=True,
        harmless=EITHER,
    ),
)
"""SFT jobs: the keys of train.train_policy."""

ALIASES = {
    "train.enable_validation": "validation.enable",
    "train.validation_step": "validation.freq",
    "train.validation_batch_per_replica": "validation.batch_size",
}
"""A name of an older version -> the name in the tables."""
