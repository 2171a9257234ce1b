"""SkyRL's keys of data, placement, steps, evaluation, checkpoints and tracking."""

from __future__ import annotations

from whet.config.dialects.key import Key, coming, derived, inert, mapped, translated
from whet.config.dialects.skyrl_models import ONLY_CRITIC
from whet.config.dialects.skyrl_parts import (
    batches,
    checkpoints,
    epochs,
    evaluation,
    export,
    policy_optimizer,
    prompt_limit,
    resume,
    run_name,
    trackers,
    training_data,
)
from whet.config.dialects.skyrl_rules import check_eval_batch, check_placement

BATCHES = "B prompts a step, B / mini optimizer steps a pass; SkyRL's rules of divisibility hold."
PLACED = (
    "One process here; the value enters SkyRL's rules of placement and of batch sizes, and must fit them."
)
EVALUATED = "Only where eval_interval > 0 and data.val_data names files, as there."
FIRST_STEP = (
    "Warm-up reaches (s+1)/(W+1) of the peak in its step s from 0, SkyRL s/W, which wastes the first step."
)

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
        derived(f"trainer.placement.{name}", check_placement, default=default, reason=PLACED)
        for name, default in (("colocate_all", True), ("colocate_policy_ref", True))
    ),
    coming("trainer.placement.colocate_critic_reward", "reward models", default=False),
    *(
        derived(f"trainer.placement.{role}_num_{size}", check_placement, default=default, reason=PLACED)
        for role in ("policy", "critic", "ref")
        for size, default in (("nodes", 1), ("gpus_per_node", 4))
    ),
    coming("trainer.placement.reward_num_nodes", "reward models", default=1),
    coming("trainer.placement.reward_num_gpus_per_node", "reward models", default=4),
)

TRAINING: tuple[Key, ...] = (
    translated(
        "trainer.epochs",
        epochs,
        "train.epochs",
        default=1,
        reason="Steps are ceil(rows * epochs / B) here; SkyRL drops the last, short batch of every epoch.",
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
        "train.minibatches",
        default=256,
        reason=f"{ONLY_CRITIC} Must equal policy_mini_batch_size until the critic has mini batches of its own.",
    ),
    *(
        translated(
            f"trainer.micro_{use}_batch_size_per_gpu",
            batches,
            "train.micro_rollouts",
            default=1,
            reason="The smaller of micro_train and micro_forward cuts both passes; memory and speed, never the "
            "gradient.",
        )
        for use in ("train", "forward")
    ),
    coming(
        "trainer.update_ref_every_epoch", "a reference that is replaced at the end of an epoch", default=False
    ),
    translated(
        "trainer.num_warmup_steps",
        policy_optimizer,
        "train.optimizer.schedule.warmup_steps",
        "critic.optimizer.schedule.warmup_steps",
        default=0,
        reason=f"Of policy and critic, in optimizer steps, honoured on every strategy. {FIRST_STEP}",
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
        reason="latest: auto; null and none: never, which refuses a directory that holds a run, where SkyRL writes "
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
        reason="Below 0: all (a million). 0 is refused, as there.",
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
        default=-1,
        reason="-1: no export; exports every so many steps are coming and refused.",
    ),
    coming(
        "trainer.export_path",
        "a directory of its own for exports and dumps",
        default="${oc.env:HOME}/exports/",
    ),
)

TRACKING: tuple[Key, ...] = (
    *(
        translated(
            f"trainer.{name}", run_name, "name", default=default, reason="The run is called project/run."
        )
        for name, default in (("project_name", "skyrl"), ("run_name", "test_run"))
    ),
    translated(
        "trainer.logger",
        trackers,
        "track.trackers",
        default="wandb",
        reason="metrics.jsonl always. wandb, the default, is coming: until then its numbers stay in ckpt_path and on "
        "the console.",
    ),
    coming(
        "trainer.dump_data_batch", "batches under export_path/dumped_data (rollouts/ has them)", default=False
    ),
    coming(
        "trainer.dump_eval_results",
        "evaluations under export_path/dumped_eval (they are in eval/ of ckpt_path whatever this says)",
        default=True,
        harmless=(False,),
    ),
)
