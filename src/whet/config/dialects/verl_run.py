"""verl's keys of data, rewards, algorithm and trainer, in the order of its document."""

from __future__ import annotations

from whet.config.dialects.key import Key, coming, derived, inert, mapped, refused, translated
from whet.config.dialects.verl_algorithm import advantage, discount, kl
from whet.config.dialects.verl_critic import CRITIC, ONLY_CRITIC
from whet.config.dialects.verl_layout import sized
from whet.config.dialects.verl_loop import (
    DOCUMENTED,
    checkpoints,
    copies,
    length,
    resume,
    run_directory,
    trackers,
)
from whet.config.dialects.verl_parts import (
    order,
    overlong,
    rewards,
    training_data,
    validation,
)
from whet.config.dialects.verl_policy import (
    BATCHES,
    NO_CODE,
    section,
)
from whet.config.dialects.verl_reward_model import KEYS as REWARD_MODEL
from whet.config.dialects.verl_rules import (
    at_least,
    batches,
)

WHOLE_TASK = "Every reward is given the whole task, its messages included; nothing else would read it."
DEVICES = "All of the run: verl's rules for batches and layouts must hold."
DROPPED = "Each ends with its last full batch, as there."
CLASS = (
    "A dataset class of yours is made with data_files alone and must give rows of text; tokenizing is whet's."
)
JUDGED = (
    "A reward of yours, as path:name; without a path verl's table by data source (gsm8k, MATH, math_dapo)."
)

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
    inert("data.return_raw_input_ids", WHOLE_TASK, default=False, harmless=(True,)),
    translated(
        "data.shuffle", order, "data.order", default=True, reason="shuffle, or the order of the file."
    ),
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
    translated("data.custom_cls.path", training_data, "data.train.0.function", default=None, reason=CLASS),
    translated("data.custom_cls.name", training_data, "data.train.0.function", default=None, reason=CLASS),
    section("data.custom_cls"),
)


REWARD: tuple[Key, ...] = (
    section("reward_model.model"),
    *REWARD_MODEL,
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
    refused("algorithm.gemma", "a misprint of the document; write algorithm.gamma", default=1.0),
    translated("algorithm.lam", discount, "algorithm.lam", default=1.0, reason="Read by gae, as there."),
    translated(
        "algorithm.adv_estimator",
        advantage,
        "algorithm.name",
        "algorithm.advantage",
        "algorithm.whiten",
        default="gae",
        reason="The recipe of its name; grpo_vectorized is grpo with a floor under the deviation, rloo_vectorized "
        "rloo with 0 for a response alone in its group. reward: the score at every token; none: each token's own "
        "reward (these two stand in the older document alone and are defined here). With one response a prompt: what "
        "remains without a baseline.",
    ),
    translated(
        "algorithm.use_kl_in_reward",
        kl,
        "algorithm.reward_kl.coef",
        default=False,
        reason="May stand beside use_kl_loss, as in verl's code.",
    ),
    translated(
        "algorithm.kl_penalty",
        kl,
        "algorithm.reward_kl.estimator",
        default="kl",
        reason="Read with use_kl_in_reward, as there; kl is k1, mse k2, k3 the bounded low_var_kl. "
        "full is coming in the reward.",
    ),
    section("algorithm.kl_ctrl"),
    translated(
        "algorithm.kl_ctrl.type",
        kl,
        "algorithm.reward_kl.target",
        default="fixed",
        reason="fixed or adaptive.",
    ),
    translated(
        "algorithm.kl_ctrl.kl_coef",
        kl,
        "algorithm.reward_kl.coef",
        default=0.001,
        reason="The document's example says 0.005, its text and verl itself 0.001.",
    ),
    translated(
        "algorithm.kl_ctrl.horizon",
        kl,
        "algorithm.reward_kl.horizon",
        default=10000,
        reason="In rollouts; adaptive.",
    ),
    translated(
        "algorithm.kl_ctrl.target_kl",
        kl,
        "algorithm.reward_kl.target",
        default=0.1,
        reason="Nats a token; adaptive.",
    ),
)

TRAINER: tuple[Key, ...] = (
    translated("trainer.total_epochs", length, "train.epochs", default=30, reason=DROPPED),
    mapped(
        "trainer.project_name",
        "track.project",
        default="verl_examples",
        reason="Read by wandb, mlflow and swanlab; and part of the default of default_local_dir.",
    ),
    mapped("trainer.experiment_name", "name", default="gsm8k"),
    translated(
        "trainer.logger",
        trackers,
        "track.trackers",
        default=["console", "wandb"],
        reason="By the same names, metrics.jsonl besides. wandb, the document's default, must be installed.",
    ),
    mapped("trainer.log_val_generations", "eval.log_samples", default=0, reason="The same ones every time."),
    sized("trainer.nnodes", "dp_shard", "dp_replicate", "engines", "nodes", default=1, reason=DEVICES),
    sized("trainer.n_gpus_per_node", "dp_shard", "dp_replicate", "engines", default=8, reason=DEVICES),
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
        reason=f"Exactly so many steps; verl skips one less. {ONLY_CRITIC} A schedule of the policy whose length "
        "follows from total_epochs is these steps shorter here.",
    ),
    translated(
        "trainer.default_hdfs_dir",
        copies,
        "checkpoint.upload_to",
        default=DOCUMENTED,
        reason="Checkpoints are copied there, too. The document's own path, which verl itself leaves out, counts as "
        "null.",
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
        reason="disable moves what is there aside: whet overwrites no run.",
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
        "verl deletes only what it had downloaded; whet keeps such copies in its cache, for the next run.",
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
