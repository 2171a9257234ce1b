"""verl's keys of data, rewards, algorithm and trainer, in the order of its document."""

from __future__ import annotations

from whet.config.dialects.key import Key, coming, derived, inert, mapped, translated
from whet.config.dialects.verl_critic import CRITIC, ONLY_CRITIC
from whet.config.dialects.verl_loop import (
    checkpoints,
    length,
    resume,
    run_directory,
    trackers,
)
from whet.config.dialects.verl_parts import (
    advantage,
    discount,
    kl,
    no_reward_model,
    overlong,
    rewards,
    training_data,
    validation,
)
from whet.config.dialects.verl_policy import (
    BATCHES,
    NO_CODE,
    TP,
    section,
)
from whet.config.dialects.verl_rules import (
    MODEL,
    at_least,
    batches,
)

WHOLE_TASK = "Every reward is given the whole task, its messages included; nothing else would read it."
DROPPED = "Whole numbers of rows: verl drops the last, short batch of every epoch, whet goes on into the next epoch."
JUDGED = (
    "A reward of yours, as path:name; without a path verl's table by data source (gsm8k, MATH, math_dapo)."
)
LATER = "reward models; read there only with reward_model.enable=True"

DATA: tuple[Key, ...] = (
    mapped("data.tokenizer", "tokenizer.path", default=None, reason="null: the model's own."),
    translated(
        "data.train_files",
        training_data,
        "data.train.0.path",
        "data.train.0.answer",
        "data.train.0.label",
        default="~/data/rlhf/gsm8k/train.parquet",
        reason="One source of all files in order, in verl's columns: reward_model.ground_truth, data_source.",
    ),
    translated(
        "data.val_files",
        validation,
        "data.eval.0.path",
        "data.exclude_eval",
        "eval.at_end",
        default="~/data/rlhf/gsm8k/test.parquet",
        reason="Used if test_freq > 0 or val_before_train. Training rows that also stand here are kept.",
    ),
    translated(
        "data.prompt_key",
        training_data,
        "data.train.0.prompt",
        default="prompt",
        reason="For validation, too.",
    ),
    mapped("data.max_prompt_length", "data.max_prompt_tokens", default=512),
    mapped("data.max_response_length", "rollout.sampling.max_tokens", default=512),
    translated("data.train_batch_size", batches, "train.tasks_per_step", default=1024, reason=BATCHES),
    *(
        inert(f"data.{name}", WHOLE_TASK, default=False, harmless=(True,))
        for name in ("return_raw_chat", "return_full_prompt")
    ),
    coming(
        "data.return_raw_input_ids",
        "reward models with their own template",
        default=False,
        harmless=(True,),
    ),
    mapped("data.shuffle", "data.shuffle", default=True),
    translated(
        "data.filter_overlong_prompts",
        overlong,
        "data.overlong",
        default=False,
        reason="Overlong prompts are dropped and counted.",
    ),
    derived(
        "data.filter_overlong_prompts_workers",
        at_least("data.filter_overlong_prompts_workers", 1),
        default=1,
        reason="One process filters here; the number changes no result, there or here.",
    ),
    translated(
        "data.truncation", overlong, "data.overlong", default="error", reason="middle is accepted, too."
    ),
    coming("data.image_key", "prompts with images", default="images"),
    inert(
        "data.trust_remote_code",
        f"{NO_CODE} (The document's example says True.)",
        default=False,
        harmless=(True,),
    ),
    coming(
        "data.custom_cls.path",
        "dataset classes of yours; today data.train.0.function gives rows",
        default=None,
    ),
    coming(
        "data.custom_cls.name",
        "dataset classes of yours; today data.train.0.function gives rows",
        default=None,
    ),
    section("data.custom_cls"),
)


def later(name: str, default: object) -> Key:
    """A key of the reward model: any value passes as long as there is none."""
    return Key(
        name=f"reward_model.{name}", status="coming", default=default, reason=LATER, translate=no_reward_model
    )


REWARD: tuple[Key, ...] = (
    later("enable", False),
    section("reward_model.model"),
    later("model.input_tokenizer", f"${{{MODEL}.path}}"),
    later("model.path", "~/models/Anomy-RM-v0.1"),
    later("model.external_lib", f"${{{MODEL}.external_lib}}"),
    later("model.trust_remote_code", False),
    later("model.fsdp_config.min_num_params", 0),
    later("model.fsdp_config.param_offload", False),
    later("micro_batch_size_per_gpu", 16),
    later("max_length", None),
    translated(
        "reward_model.reward_manager",
        rewards,
        "guard.workers",
        "guard.timeout_s",
        default="naive",
        reason="Rewards run in processes of their own either way; prime: four, and verl's 300 s a call. A call that "
        "fails leaves its rollout unscored and counted; verl's prime scores it 0.",
    ),
    section("custom_reward_function"),
    translated("custom_reward_function.path", rewards, "rewards.score.function", default=None, reason=JUDGED),
    translated(
        "custom_reward_function.name",
        rewards,
        "rewards.score.function",
        default="compute_score",
        reason=JUDGED,
    ),
)

ALGORITHM: tuple[Key, ...] = (
    translated(
        "algorithm.gamma",
        discount,
        "algorithm.gamma",
        default=1.0,
        reason="Read by gae and reinforce_plus_plus, as there.",
    ),
    coming("algorithm.gemma", "nothing: a misprint of algorithm.gamma; write gamma", default=1.0),
    translated("algorithm.lam", discount, "algorithm.lam", default=1.0, reason="Read by gae, as there."),
    translated(
        "algorithm.adv_estimator",
        advantage,
        "algorithm.name",
        "algorithm.loss",
        "algorithm.whiten",
        default="gae",
        reason="gae, grpo, reinforce_plus_plus(_baseline), rloo; reward: the score at every token; none: each "
        "token's own reward. The last two stand in the older document alone and are defined here.",
    ),
    translated(
        "algorithm.use_kl_in_reward",
        kl,
        "algorithm.kl.place",
        "algorithm.kl.coef",
        default=False,
        reason="Together with use_kl_loss: coming.",
    ),
    translated(
        "algorithm.kl_penalty",
        kl,
        "algorithm.kl.estimator",
        default="kl",
        reason="Read with use_kl_in_reward, as there; kl is k1, mse k2, low_var_kl k3; full is coming.",
    ),
    section("algorithm.kl_ctrl"),
    translated(
        "algorithm.kl_ctrl.type", kl, "algorithm.kl.target", default="fixed", reason="fixed or adaptive."
    ),
    translated(
        "algorithm.kl_ctrl.kl_coef",
        kl,
        "algorithm.kl.coef",
        default=0.001,
        reason="The document's example says 0.005, its text and verl itself 0.001.",
    ),
    translated(
        "algorithm.kl_ctrl.horizon",
        kl,
        "algorithm.kl.horizon",
        default=10000,
        reason="In rollouts; adaptive.",
    ),
    translated(
        "algorithm.kl_ctrl.target_kl",
        kl,
        "algorithm.kl.target",
        default=0.1,
        reason="Nats a token; adaptive.",
    ),
)

TRAINER: tuple[Key, ...] = (
    translated("trainer.total_epochs", length, "train.epochs", default=30, reason=DROPPED),
    translated(
        "trainer.project_name",
        run_directory,
        "run_dir",
        default="verl_examples",
        reason="Part of the default of default_local_dir.",
    ),
    mapped("trainer.experiment_name", "name", default="gsm8k"),
    translated(
        "trainer.logger",
        trackers,
        "track.trackers",
        default=["console", "wandb"],
        reason="metrics.jsonl always; wandb, the document's default, stays on this machine: it is written there. "
        "swanlab, mlflow and others are coming.",
    ),
    coming("trainer.log_val_generations", "validation generations in a tracker", default=0),
    derived("trainer.nnodes", batches, default=1, reason=TP),
    derived("trainer.n_gpus_per_node", batches, default=8, reason=TP),
    translated(
        "trainer.save_freq",
        checkpoints,
        "checkpoint.every",
        default=-1,
        reason="Besides, whet saves at the end and when stopped, where verl with -1 keeps nothing.",
    ),
    translated(
        "trainer.val_before_train", validation, "eval.at_start", default=True, reason="Of data.val_files."
    ),
    translated(
        "trainer.test_freq",
        validation,
        "eval.every",
        default=2,
        reason="And after the last step, if above 0.",
    ),
    mapped(
        "trainer.critic_warmup",
        "critic.warmup_steps",
        default=0,
        reason=f"Exactly so many steps; verl skips one less. {ONLY_CRITIC}",
    ),
    coming(
        "trainer.default_hdfs_dir",
        "copies on remote file systems; the document's own path, which verl itself leaves out, counts as null",
        default="~/experiments/gsm8k/ppo/${trainer.experiment_name}",
        harmless=(None,),
    ),
    translated(
        "trainer.default_local_dir",
        run_directory,
        "run_dir",
        default="checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        reason="The run's folder: checkpoints lie in it, with all else that a run writes.",
    ),
    translated(
        "trainer.resume_mode",
        resume,
        "checkpoint.resume",
        default="auto",
        reason="disable wants a fresh folder: whet overwrites no run.",
    ),
    translated(
        "trainer.resume_from_path",
        resume,
        "checkpoint.resume",
        default=None,
        reason="A checkpoint that whet wrote; verl's own are not read. False means null.",
    ),
    translated(
        "trainer.remove_previous_ckpt_in_save",
        checkpoints,
        "checkpoint.keep",
        default=False,
        reason="True keeps the newest; else all are kept.",
    ),
    inert(
        "trainer.del_local_ckpt_after_load",
        "verl deletes only what it had downloaded; whet downloads nothing.",
        default=False,
        harmless=(True,),
    ),
    derived(
        "trainer.ray_wait_register_center_timeout",
        at_least("trainer.ray_wait_register_center_timeout", 1),
        default=300,
        reason="There is no Ray to wait for.",
    ),
)

RUN: tuple[Key, ...] = (*CRITIC, *REWARD, *ALGORITHM, *TRAINER)
