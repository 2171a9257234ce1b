"""SkyRL's keys of data, placement, steps, evaluation, checkpoints and tracking."""

from __future__ import annotations

from whet.config.dialects.key import Key, derived, inert, mapped, translated
from whet.config.dialects.layout import FITTED
from whet.config.dialects.skyrl_learn import policy_optimizer, reference
from whet.config.dialects.skyrl_models import NO_REWARD_MODEL, ONLY_CRITIC
from whet.config.dialects.skyrl_parts import (
    batches,
    checkpoints,
    dump,
    epochs,
    evaluation,
    export,
    prompt_limit,
    resume,
    trackers,
    training_data,
)
from whet.config.dialects.skyrl_rules import (
    apart,
    check_eval_batch,
    check_placement,
    check_reward_placement,
    layout,
)

BATCHES = (
    "B prompts a step, B / mini optimizer steps a pass, as the document says; SkyRL's rules of divisibility hold, "
    "rounded down as there."
)
PLACED = "The value enters SkyRL's rules of placement and of batch sizes, and must fit them."
EVALUATED = "Only where eval_interval > 0 and data.val_data names files, as there."

DATA: tuple[Key, ...] = (
    translated(
        "data.train_data",
        training_data,
        "data.train.0.path",
        "data.train.0.answer",
        default=["${oc.env:HOME}/data/gsm8k/train.parquet"],
        reason="One source of all files in order: columns prompt and, for gsm8k, reward_spec.ground_truth. A column "
        "env_class of single rows is not read.",
    ),
    translated(
        "data.val_data",
        evaluation,
        "data.eval.0.name",
        "data.eval.0.path",
        "data.eval.0.answer",
        "data.exclude_eval",
        default=["${oc.env:HOME}/data/gsm8k/validation.parquet"],
        reason=f"{EVALUATED} Each file is one source of metrics, beside all together; training rows that also stand "
        "here are kept (data.exclude_eval=false).",
    ),
)

PLACEMENT: tuple[Key, ...] = (
    *(
        translated(
            f"trainer.placement.{name}",
            apart,
            "train.parallel.apart",
            default=default,
            reason=f"Models that do not share the policy's GPUs compute at the same time. {PLACED} {FITTED}",
        )
        for name, default in (("colocate_all", True), ("colocate_policy_ref", True))
    ),
    derived(
        "trainer.placement.colocate_critic_reward",
        check_reward_placement,
        default=False,
        reason=NO_REWARD_MODEL,
    ),
    *(
        translated(
            f"trainer.placement.policy_num_{size}",
            layout,
            "train.parallel.dp_shard",
            "train.parallel.dp_replicate",
            *(["cluster.ranks"] if size == "nodes" else []),
            default=default,
            reason=f"The ranks of all models. {PLACED} {FITTED}",
        )
        for size, default in (("nodes", 1), ("gpus_per_node", 4))
    ),
    *(
        derived(
            f"trainer.placement.{role}_num_{size}",
            check_placement,
            default=default,
            reason=f"{PLACED} It has as many ranks as the policy, its own or the same.",
        )
        for role in ("critic", "ref")
        for size, default in (("nodes", 1), ("gpus_per_node", 4))
    ),
    *(
        derived(f"trainer.placement.{name}", check_reward_placement, default=default, reason=NO_REWARD_MODEL)
        for name, default in (("reward_num_nodes", 1), ("reward_num_gpus_per_node", 4))
    ),
)

TRAINING: tuple[Key, ...] = (
    translated(
        "trainer.epochs",
        epochs,
        "train.epochs",
        "train.drop_last",
        default=1,
        reason="The last, short batch of every epoch is dropped, as there.",
    ),
    mapped("trainer.update_epochs_per_batch", "train.passes", default=1),
    translated(
        "trainer.train_batch_size",
        batches,
        "train.tasks_per_step",
        "train.minibatches",
        default=1024,
        reason=BATCHES,
    ),
    translated(
        "trainer.policy_mini_batch_size",
        batches,
        "train.minibatches",
        default=256,
        reason=BATCHES,
    ),
    translated(
        "trainer.critic_mini_batch_size",
        batches,
        "critic.minibatches",
        default=256,
        reason=f"{ONLY_CRITIC} {BATCHES}",
    ),
    *(
        translated(
            f"trainer.micro_{use}_batch_size_per_gpu",
            batches,
            native,
            default=1,
            reason="Of all models, in sequences; memory and speed, never the gradient.",
        )
        for use, native in (("train", "train.micro_rollouts"), ("forward", "train.micro_rollouts_forward"))
    ),
    translated(
        "trainer.update_ref_every_epoch",
        reference,
        "reference.reset_every_epochs",
        default=False,
        reason="In the step that completes an epoch; only where a KL needs a reference, as there.",
    ),
    translated(
        "trainer.num_warmup_steps",
        policy_optimizer,
        "train.optimizer.schedule.warmup_steps",
        "train.optimizer.schedule.warmup_ends",
        "critic.optimizer.schedule.warmup_steps",
        "critic.optimizer.schedule.warmup_ends",
        default=0,
        reason="Of policy and critic, in optimizer steps, honoured on every strategy. Step s of W, from 0, has s/W of "
        "the peak, so the first moves nothing.",
    ),
    inert(
        "trainer.use_sample_packing",
        "Sequences are always packed and nothing is padded; padded or packed, the numbers are the same.",
        default=True,
        harmless=(False,),
    ),
    translated(
        "trainer.max_prompt_length",
        prompt_limit,
        "data.max_prompt_tokens",
        "data.overlong",
        default=512,
        reason="Longer prompts are truncated, as the document says (its code drops them); the last tokens are kept.",
    ),
    mapped("trainer.gradient_checkpointing", "train.gradient_checkpointing", default=True),
    mapped("trainer.seed", "seed", default=42),
)

EVALUATION: tuple[Key, ...] = (
    derived(
        "trainer.eval_batch_size",
        check_eval_batch,
        default=1024,
        reason="Evaluation asks as many tasks at once as the engine decodes (generator.max_num_seqs); no value "
        "changes a number.",
    ),
    translated("trainer.eval_before_train", evaluation, "eval.at_start", default=True, reason=EVALUATED),
    translated(
        "trainer.eval_interval",
        evaluation,
        "eval.every",
        "eval.at_end",
        default=5,
        reason="Every so many steps and after the last; 0 and below: never. The present weights are judged.",
    ),
)

CHECKPOINTS: tuple[Key, ...] = (
    translated(
        "trainer.resume_mode",
        resume,
        "checkpoint.resume",
        default="latest",
        reason="latest: auto; null and none: fresh, which moves a run that ckpt_path holds aside, where SkyRL writes "
        "over it; from_path: trainer.resume_path.",
    ),
    translated(
        "trainer.resume_path",
        resume,
        "checkpoint.resume",
        default=None,
        reason="A checkpoint that whet wrote (ckpt_path/checkpoints/...); read only with resume_mode=from_path.",
    ),
    mapped(
        "trainer.ckpt_path",
        "run_dir",
        default="${oc.env:HOME}/ckpts/",
        reason="Everything the run writes lies in here, checkpoints in checkpoints/.",
    ),
    translated(
        "trainer.max_ckpts_to_keep",
        checkpoints,
        "checkpoint.keep",
        default=-1,
        reason="Below 0: all. 0 is refused, as there.",
    ),
    translated(
        "trainer.ckpt_interval",
        checkpoints,
        "checkpoint.every",
        default=10,
        reason="And after the last step, under its own number; 0 and below: only then and on Ctrl-C.",
    ),
    translated(
        "trainer.hf_save_interval",
        export,
        "checkpoint.export",
        "checkpoint.export_every",
        default=-1,
        reason="Of the policy, every so many steps and after the last; 0 and below: never.",
    ),
    translated(
        "trainer.export_path",
        export,
        "checkpoint.export_dir",
        default="${oc.env:HOME}/exports/",
        reason="Exports go to export_path/project_name/run_name, since a folder belongs to one run here; read where "
        "hf_save_interval asks for them. Dumps go right below it, as there: runs write over each other's.",
    ),
)

TRACKING: tuple[Key, ...] = (
    mapped(
        "trainer.project_name", "track.project", default="skyrl", reason="Read by W&B, MLflow and SwanLab."
    ),
    mapped("trainer.run_name", "name", default="test_run"),
    translated(
        "trainer.logger",
        trackers,
        "track.trackers",
        default="wandb",
        reason="metrics.jsonl always. A package that is not installed is refused, also wandb, the default: name "
        "another, e.g. console. vemlp_wandb is coming.",
    ),
    translated(
        "trainer.dump_data_batch",
        dump,
        "track.batches_every",
        "track.batches_dump",
        default=False,
        reason="What every step trained on, token by token: export_path/dumped_data/"
        "global_step_N_training_input.parquet, since a pickle is never written.",
    ),
    translated(
        "trainer.dump_eval_results",
        dump,
        "track.eval_dump",
        default=True,
        reason="export_path/dumped_eval/global_step_N_eval_results: SOURCE.jsonl of each source, and the numbers in "
        "aggregated_results.jsonl. Read where there is an evaluation; eval/ of ckpt_path has it all in any case.",
    ),
)
