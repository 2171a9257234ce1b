"""Cosmos-RL, train: optimizer, dtypes, length of a run; its checkpoints, validation and trackers."""

from __future__ import annotations

from whet.config.dialects.cosmos_data import validation
from whet.config.dialects.cosmos_run import (
    checkpoint,
    compiled,
    dtype,
    low,
    offload,
    place,
    reduced,
    resume,
    scales,
    seed,
    sync,
    trackers,
    transfer,
)
from whet.config.dialects.cosmos_shared import BATCH, EITHER, LOADING, NO_FP4, SIZES, size, switch, upload
from whet.config.dialects.cosmos_steps import batch, length, optimizer, reshard, schedule
from whet.config.dialects.key import Key, derived, inert, mapped, refused, translated
from whet.config.dialects.layout import PARALLEL

EIGHT = (
    "Matrix products inside the trained models, with rowwise or tensorwise scales of the present numbers; "
    "delayed_scaling is coming. Refused where the GPU has none."
)
ADAM = "Of all parameters."
RATE = (
    "(k+1)/w in the warm-up of w steps, then flat or falling over the last d steps; all optimizer steps of a training "
    "step have the same rate. A ratio is rounded as in Cosmos where max_num_steps says how many steps there are, else "
    "down."
)
SAMPLES = "Sampled as in training where null, top_k -1 is 0; read where validation.enable is true."

TRAIN: tuple[Key, ...] = (
    translated(
        "train.optm_name",
        optimizer,
        "train.optimizer.kind",
        "train.optimizer.decay_all",
        "train.optimizer.state",
        default="AdamW",
        reason="AdamW, or Adam, which adds weight decay to the gradient; on all parameters. AdamW8bit, Adam8bit: "
        "moments in blocks of 8 bits.",
    ),
    translated(
        "train.optm_lr",
        optimizer,
        "train.optimizer.lr",
        default=1e-6,
        reason="One value; the model is one part.",
    ),
    translated(
        "train.optm_impl",
        optimizer,
        "train.optimizer.implementation",
        default="fused",
        reason="Ways to compute the same step; for-loop is loop.",
    ),
    mapped("train.optm_weight_decay", "train.optimizer.weight_decay", default=0.01, reason=ADAM),
    mapped("train.optm_betas", "train.optimizer.betas", default=[0.9, 0.999]),
    translated(
        "train.optm_warmup_steps",
        schedule,
        "train.optimizer.schedule.warmup_steps",
        "train.optimizer.schedule.warmup_fraction",
        "train.optimizer.schedule.warmup_ends",
        "train.optimizer.schedule.unit",
        default=20,
        reason=f"A whole number counts steps, a float up to 1.0 is a share of all. {RATE}",
    ),
    translated(
        "train.optm_decay_ratio",
        schedule,
        "train.optimizer.schedule.decay_fraction",
        default=None,
        reason=RATE,
    ),
    translated(
        "train.optm_decay_type",
        schedule,
        "train.optimizer.schedule.kind",
        "train.optimizer.schedule.decay_shape",
        default=None,
        reason=RATE,
    ),
    translated(
        "train.optm_min_lr_factor",
        schedule,
        "train.optimizer.schedule.min_factor",
        default=0.0,
        reason="Where a decay ends; nothing without one.",
    ),
    translated(
        "train.optm_grad_norm_clip",
        optimizer,
        "train.optimizer.grad_clip",
        default=1.0,
        reason="0 or less: only measured.",
    ),
    mapped(
        "train.epsilon",
        "train.optimizer.eps",
        default=1e-6,
        reason="Given to Adam; Cosmos 0.3.6 forgot to and ran with 1e-8.",
    ),
    translated(
        "train.master_dtype",
        dtype,
        "train.precision.master_weights",
        default="float32",
        reason="float32, or param_dtype: then there are no master weights.",
    ),
    translated("train.param_dtype", dtype, "model.dtype", default="bfloat16", reason="Forward and backward."),
    derived(
        "train.transfer_dtype",
        transfer,
        default=None,
        reason="Rollouts read the trained weights themselves: param_dtype.",
    ),
    translated(
        "train.fsdp_reduce_dtype",
        reduced,
        "train.precision.reduce",
        default="float32",
        reason="float32, the only one there: of the sum over ranks and micro-batches, where param_dtype is another.",
    ),
    translated(
        "train.fsdp_offload",
        offload,
        "train.offload",
        default=False,
        reason="Weights (where several devices train), gradients and moments. Left out where there is no GPU.",
    ),
    translated(
        "train.fsdp_reshard_after_forward",
        reshard,
        f"{PARALLEL}.reshard_after_forward",
        default="default",
        reason="default: always, in pipelines never. Read where tensors are cut (dp_shard_size).",
    ),
    translated(
        "train.train_batch_per_replica",
        batch,
        "train.tasks_per_step",
        default=8,
        reason=f"{BATCH} SFT: conversations of one data-parallel worker.",
    ),
    translated(
        "train.resume",
        resume,
        "checkpoint.resume",
        default=False,
        reason="true: go on with the newest run below output_dir, text: from that checkpoint, false: never "
        "(a folder that holds a run is refused).",
    ),
    translated(
        "train.epoch",
        length,
        "train.epochs",
        default=1,
        reason="The run ends here or after max_num_steps, whichever comes first.",
    ),
    translated(
        "train.output_dir",
        place,
        "run_dir",
        default="./outputs",
        reason="Its folder with the timestamp holds all that the run writes.",
    ),
    translated(
        "train.timestamp",
        place,
        "run_dir",
        default="",
        reason="A folder below output_dir; empty: the moment of the run's first start.",
    ),
    switch(
        "train.async_tp_enabled",
        "How the traffic of tensor parallelism is hidden; no number changes.",
        default=False,
    ),
    translated(
        "train.compile",
        compiled,
        "train.compile",
        default=True,
        reason="Every layer, on a GPU; not on a CPU, on several ranks, or with train.fp8. No number changes beyond "
        "rounding.",
    ),
    translated(
        "train.sync_weight_interval",
        sync,
        "rollout.sync_every",
        default=1,
        reason="RL jobs; also at the last step and before every validation. on_policy needs 1.",
    ),
    translated(
        "train.deterministic",
        seed,
        "seed",
        default=False,
        reason="Runs are deterministic in any case; true also makes 42 the seed where none is given.",
    ),
    translated(
        "train.activation_offload",
        offload,
        "train.offload",
        default=False,
        reason="What layers keep for the backward pass lies in the host's memory. Left out where there is no GPU.",
    ),
    size(
        "train.fa_version",
        "whet's attention is its own; it agrees with FlashAttention but for rounding.",
        default=None,
        nullable=True,
    ),
    translated(
        "train.seed",
        seed,
        "seed",
        "data.seed",
        default=None,
        reason="0 is a seed (Cosmos ignores it); null is 0, so that a run can be repeated. Beside "
        "rollout.seed it orders the data.",
    ),
    switch("train.local_dataset", LOADING, default=True),
    translated(
        "train.max_num_steps",
        length,
        "train.steps",
        default=None,
        reason="The run ends here or after the epochs, whichever comes first.",
    ),
    inert(
        "train.sequence_packing",
        "Batches are packed in any case: there is no padding.",
        default=False,
        harmless=EITHER,
    ),
    *(
        translated(f"train.fp8.{name}", low, "train.precision.float8", default=default, reason=EIGHT)
        for name, default in (
            ("enable_fp8", False),
            ("fp8_recipe", "dynamic_scaling"),
            ("quant_recipe", "rowwise"),
        )
    ),
    refused("train.fp4.enable_fp4", NO_FP4, default=False),
    *(
        derived(
            f"train.fp4.{name}",
            scales,
            default=default,
            reason="Of train.fp4, which is refused: none are made.",
        )
        for name, default in (("fp4_recipe", "dynamic_scaling"), ("quant_recipe", "rowwise"))
    ),
)

CHECKPOINT: tuple[Key, ...] = (
    translated(
        "train.ckpt.enable_checkpoint",
        checkpoint,
        "checkpoint.every",
        "checkpoint.export",
        default=False,
        reason="false: only the last step is saved, without an export.",
    ),
    translated(
        "train.ckpt.save_freq",
        checkpoint,
        "checkpoint.every",
        default=20,
        reason="And at the end of the run.",
    ),
    translated(
        "train.ckpt.save_freq_in_epoch",
        checkpoint,
        "checkpoint.every_epochs",
        default=0,
        reason="Above 0 it takes the place of save_freq.",
    ),
    translated(
        "train.ckpt.save_mode",
        checkpoint,
        "checkpoint.background",
        default="async",
        reason="async: written while the next steps go on; sync: the step waits. Read with enable_checkpoint.",
    ),
    translated(
        "train.ckpt.max_keep",
        checkpoint,
        "checkpoint.keep",
        default=5,
        reason="-1 keeps all (Cosmos 0.3.6 deletes all). Exports are all kept.",
    ),
    translated(
        "train.ckpt.export_safetensors",
        checkpoint,
        "checkpoint.export",
        "checkpoint.export_every",
        default=True,
        reason="A Hugging Face folder with every checkpoint; with save_freq_in_epoch at the end of the run "
        "only.",
    ),
    upload("train.ckpt.upload_hf", default=False, reason="Exports, each a commit of the repository."),
    upload(
        "train.ckpt.hf_repo_name",
        default="Comos-Reason1",
        reason="Read with upload_hf, as ORG/NAME. The default is the document's, typo included.",
    ),
    upload(
        "train.ckpt.upload_s3",
        default=False,
        reason="all: every checkpoint and export; final: the last; below s3://s3_bucket/s3_prefix.",
    ),
    upload("train.ckpt.s3_bucket", default=None, reason="Must be given with upload_s3."),
    upload("train.ckpt.s3_prefix", default="outputs", reason="Read with upload_s3. Each run needs its own."),
)

VALIDATION: tuple[Key, ...] = (
    translated(
        "validation.enable",
        validation,
        "data.eval",
        "data.exclude_eval",
        "eval.at_start",
        default=False,
        reason="Every freq steps and at the end, not before the first. SFT: the loss of the held-out "
        "replies.",
    ),
    translated(
        "validation.freq",
        validation,
        "eval.every",
        default=20,
        reason="Read where validation.enable is true.",
    ),
    inert(
        "validation.batch_size",
        "How many replies are decoded at once changes none of them.",
        default=None,
        harmless=SIZES,
    ),
    translated(
        "validation.temperature", validation, "eval.sampling.temperature", default=0.0, reason=SAMPLES
    ),
    translated("validation.top_p", validation, "eval.sampling.top_p", default=None, reason=SAMPLES),
    translated("validation.top_k", validation, "eval.sampling.top_k", default=1, reason=SAMPLES),
    translated(
        "validation.repetition_penalty",
        validation,
        "eval.sampling.repetition_penalty",
        default=1.0,
        reason=SAMPLES,
    ),
    translated("validation.n_generation", validation, "eval.samples", default=1, reason=SAMPLES),
    translated(
        "validation.max_response_length", validation, "eval.sampling.max_tokens", default=None, reason=SAMPLES
    ),
    translated(
        "validation.reward_function",
        validation,
        "eval.reward",
        default=[],
        reason="A weighted sum of components; training's where empty.",
    ),
)

LOGGING: tuple[Key, ...] = (
    translated(
        "logging.logger",
        trackers,
        "track.trackers",
        default=[],
        reason="console, wandb, tensorboard, mlflow, swanlab (the last four are packages of their own). "
        "Numbers also go to metrics.jsonl.",
    ),
    translated(
        "logging.project_name",
        place,
        "track.project",
        default="cosmos_rl",
        reason="Where trackers list the run; read where wandb, mlflow or swanlab is on.",
    ),
    translated(
        "logging.experiment_name",
        place,
        "name",
        default=None,
        reason="The run's name; output_dir's last part where null.",
    ),
)
