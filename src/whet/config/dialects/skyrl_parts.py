"""SkyRL's values as native ones. Each function takes all values of a file and gives the native keys of one matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from whet.config.dialects.key import Values
from whet.config.dialects.skyrl_rules import (
    check_batches,
    evaluates,
    has_critic,
)
from whet.config.dialects.typed import choose, flag, number, whole
from whet.config.faults import shown
from whet.types import ConfigError, Json

Native = Mapping[str, Json]

KEEP_ALL = 1_000_000
"""Checkpoints kept where all are wanted."""

# ---------------------------------------------------------------- data and rewards


def training_data(v: Values) -> Native:
    """All files one after the other, as one source: every row counts the same."""
    return {"data.train.0.path": _files(v, "data.train_data")} | dict(_columns(v, "data.train.0"))


def prompt_limit(v: Values) -> Native:
    """The last tokens of a longer prompt are kept, so that what asks for the reply survives."""
    return {
        "data.max_prompt_tokens": whole(v, "trainer.max_prompt_length"),
        "data.overlong": "truncate_left",
    }


def evaluation(v: Values) -> Native:
    """Each file is a source of its own; nothing at all where eval_interval or val_data switch it off."""
    if not evaluates(v):
        return {}
    files = _files(v, "data.val_data")
    stems = [PurePath(f).stem for f in files]
    out: dict[str, Json] = {}
    for n, (file, stem) in enumerate(zip(files, stems)):
        name = stem if stems.count(stem) == 1 else file
        out |= {f"data.eval.{n}.name": name, f"data.eval.{n}.path": file} | dict(
            _columns(v, f"data.eval.{n}")
        )
    return out | {
        "data.exclude_eval": False,
        "eval.every": v["trainer.eval_interval"],
        "eval.at_start": flag(v, "trainer.eval_before_train"),
        "eval.at_end": True,
        "eval.samples": v["generator.eval_n_samples_per_prompt"],
        **sampling(v, "generator.eval_sampling_params", "eval.sampling"),
    }


def environment(v: Values) -> Native:
    """gsm8k only judges the reply's number; other environments are coming, or a function of yours judges."""
    name = v["environment.env_class"]
    if name == "gsm8k":
        return {"rewards.gsm8k.function": "number"}
    if isinstance(name, str) and ":" in name:
        return {"rewards.environment.function": name}
    raise ConfigError(
        f"environment.env_class={shown(name)}: only gsm8k is built in today, other environments are coming. One "
        "that judges a single reply can be a reward function: environment.env_class=path/to/file.py:name"
    )


def _columns(v: Values, source: str) -> Native:
    """gsm8k reads its answer from reward_spec; a function of yours is given all columns."""
    return {f"{source}.answer": "reward_spec.ground_truth"} if v["environment.env_class"] == "gsm8k" else {}


def _files(v: Values, key: str) -> list[str]:
    value = v[key]
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, Sequence) or not files or not all(isinstance(f, str) for f in files):
        raise ConfigError(f"{key}: got {shown(value)}, expected a list of files")
    return list(files)


# ---------------------------------------------------------------- steps and batches


def epochs(v: Values) -> Native:
    """Passes over the rows."""
    return {"train.epochs": whole(v, "trainer.epochs")}


def batches(v: Values) -> Native:
    """B prompts a step in B / mini optimizer steps; micro-batches that fit both of SkyRL's limits.

    (micro_train is for forward and backward, micro_forward for forward alone; here one cut serves both.)
    """
    check_batches(v)
    B, mini = whole(v, "trainer.train_batch_size"), whole(v, "trainer.policy_mini_batch_size")
    if has_critic(v) and v["trainer.critic_mini_batch_size"] != mini:
        raise ConfigError(
            f"trainer.critic_mini_batch_size={v['trainer.critic_mini_batch_size']} other than "
            f"trainer.policy_mini_batch_size={mini} is not built yet (coming); today both are equal"
        )
    micro = [whole(v, f"trainer.micro_{use}_batch_size_per_gpu") for use in ("train", "forward")]
    return {"train.tasks_per_step": B, "train.minibatches": B // mini, "train.micro_rollouts": min(micro)}


# ---------------------------------------------------------------- algorithm

ESTIMATORS: dict[str, dict[str, Json] | None] = {
    "grpo": {"name": "grpo"},
    "gae": {"name": "ppo"},
    "rloo": {"name": "rloo", "loss": "ppo"},
    "reinforce++": {"name": "reinforce", "loss": "ppo", "whiten": True},
    "maxrl": None,
}
"""Keys of `algorithm`; None: not built yet. All but grpo and gae are of newer versions."""

REDUCTIONS = {
    "sequence_mean": "seq-mean-token-mean",
    "token_mean": "token-mean",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
    "prompt_mean": "prompt-mean",
    "token_mean_legacy": None,
}

LOSSES = {
    "regular": "ppo",
    "dual_clip": "ppo",
    **dict.fromkeys(
        ("gspo", "cispo", "sapo", "clip_cov", "kl_cov", "importance_sampling", "cross_entropy", "dppo")
    ),
}


def advantages(v: Values) -> Native:
    """The recipe of an estimator, and the settings that this estimator reads."""
    has_critic(v)
    name = choose(
        v,
        "trainer.algorithm.advantage_estimator",
        {k: k if parts else None for k, parts in ESTIMATORS.items()},
    )
    out = {f"algorithm.{key}": value for key, value in (ESTIMATORS[name] or {}).items()}
    if name == "grpo" and not flag(v, "trainer.algorithm.grpo_norm_by_std"):
        out["algorithm.normalize_std"] = False
    if name in ("gae", "reinforce++"):
        out["algorithm.gamma"] = v["trainer.algorithm.gamma"]
    if name == "gae":
        out["algorithm.lam"] = v["trainer.algorithm.lambd"]
    if flag(v, "trainer.algorithm.advantage_batch_normalize"):
        out["algorithm.whiten"] = True
    return out


def kl(v: Values) -> Native:
    """In the loss or in the reward, never both; k3 is never negative, so its absolute value is itself."""
    in_loss, in_reward = (flag(v, f"trainer.algorithm.use_kl_{place}") for place in ("loss", "in_reward"))
    coef = number(v, "trainer.algorithm.kl_loss_coef")
    if in_loss and in_reward:
        raise ConfigError(
            "trainer.algorithm.use_kl_in_reward and trainer.algorithm.use_kl_loss exclude each other: set one false"
        )
    if coef < 0:
        raise ConfigError(f"trainer.algorithm.kl_loss_coef={coef}: expected a number >= 0")
    if coef == 0 or not (in_loss or in_reward):
        return {}
    return {
        "algorithm.kl.place": "loss" if in_loss else "reward",
        "algorithm.kl.coef": coef,
        "algorithm.kl.estimator": _estimator(v),
    }


def _estimator(v: Values) -> str:
    """kl_estimator_type of newer versions, if it is given; else by the two switches."""
    if v["trainer.algorithm.kl_estimator_type"] is not None:
        return choose(v, "trainer.algorithm.kl_estimator_type", {k: k for k in ("k1", "k2", "k3", "abs")})
    if flag(v, "trainer.algorithm.use_kl_estimator_k3"):
        return "k3"
    return "abs" if flag(v, "trainer.algorithm.use_abs_kl") else "k1"


def policy_loss(v: Values) -> Native:
    """regular has no bound for negative advantages, dual_clip has clip_ratio_c."""
    choose(v, "trainer.algorithm.ppo_loss_type", LOSSES)
    dual = v["trainer.algorithm.ppo_loss_type"] == "dual_clip"
    return {"algorithm.dual_clip": v["trainer.algorithm.clip_ratio_c"]} if dual else {}


def reduction(v: Values) -> Native:
    """How token losses become one number."""
    mode = choose(v, "trainer.algorithm.loss_reduction", REDUCTIONS)
    out: dict[str, Json] = {"algorithm.aggregation": mode}
    if mode == "seq-mean-token-sum-norm":
        reply = whole(v, "generator.sampling_params.max_generate_length")
        out["algorithm.norm_tokens"] = whole(v, "generator.max_input_length") + reply
    return out


# ---------------------------------------------------------------- optimizers

SCHEDULES = {
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    **dict.fromkeys(("cosine_with_restarts", "cosine_with_min_lr", "polynomial", "inverse_sqrt")),
}


def policy_optimizer(v: Values) -> Native:
    """Clipping and schedule of the policy."""
    return _clip_and_schedule(v, "policy", "train.optimizer")


def critic(v: Values) -> Native:
    """The whole critic, where one learns (gae)."""
    if not has_critic(v):
        return {}
    if not v["trainer.critic.model.path"]:
        raise ConfigError(
            "trainer.critic.model.path must be given for trainer.algorithm.advantage_estimator=gae: "
            "the folder that the value model starts from (usually trainer.policy.model.path)"
        )
    given = "trainer.critic.optimizer_config"
    return {
        "critic.path": v["trainer.critic.model.path"],
        "critic.clip_value": v["trainer.algorithm.value_clip"],
        "critic.optimizer.lr": v[f"{given}.lr"],
        "critic.optimizer.betas": v[f"{given}.adam_betas"],
        "critic.optimizer.weight_decay": v[f"{given}.weight_decay"],
        **_clip_and_schedule(v, "critic", "critic.optimizer"),
    }


def _clip_and_schedule(v: Values, role: str, optimizer: str) -> Native:
    """Warm-up in optimizer steps; a norm of 0 or less is no clipping."""
    given = f"trainer.{role}.optimizer_config"
    own = v[f"{given}.num_warmup_steps"]
    warmup = whole(v, "trainer.num_warmup_steps" if own is None else f"{given}.num_warmup_steps", least=0)
    norm = number(v, f"{given}.max_grad_norm")
    return {
        f"{optimizer}.grad_clip": norm if norm > 0 else None,
        f"{optimizer}.schedule.kind": choose(v, f"{given}.scheduler", SCHEDULES),
        f"{optimizer}.schedule.warmup_steps": warmup,
    }


# ---------------------------------------------------------------- sampling


def training_sampling(v: Values) -> Native:
    """Sampling of training rollouts."""
    return sampling(v, "generator.sampling_params", "rollout.sampling")


PASSED = ("repetition_penalty", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
"""Parameters of vLLM that are the same here, name and meaning."""


def sampling(v: Values, given: str, native: str) -> Native:
    """One section of sampling parameters; top_k -1 is off, which is 0 here."""
    top_k, more = whole(v, f"{given}.top_k", least=-1), v[f"{given}.*"]
    if top_k == 0:
        raise ConfigError(f"{given}.top_k=0 keeps no token; write -1 for no limit")
    if strange := sorted(more.keys() - set(PASSED)):
        raise ConfigError(
            f"{given}: {strange[0]} is handed on to vLLM, which is coming; of such parameters these work today: "
            f"{', '.join(PASSED)}"
        )
    return {
        f"{native}.max_tokens": v[f"{given}.max_generate_length"],
        f"{native}.temperature": v[f"{given}.temperature"],
        f"{native}.top_p": v[f"{given}.top_p"],
        f"{native}.min_p": v[f"{given}.min_p"],
        f"{native}.top_k": max(top_k, 0),
        **{f"{native}.{name}": value for name, value in more.items()},
    }


def rollout_engine(v: Values) -> Native:
    """The embedded engine stands in for one that the trainer would start; SkyRL's rules for engines hold."""
    backend = choose(v, "generator.backend", {"vllm": "vllm", "sglang": "sglang"})
    if not flag(v, "generator.run_engines_locally"):
        raise ConfigError(
            "generator.run_engines_locally=false: inference servers are not built yet (coming); today the engine "
            "runs in the trainer's process: leave the key out"
        )
    if backend == "sglang":
        raise ConfigError(
            "generator.backend=sglang is for remote engines only (generator.run_engines_locally=false)"
        )
    return {"rollout.engine": "native"}


def dtype(v: Values) -> Native:
    """bfloat16 where the device is fast at it (CUDA), which is what whet derives; float32 if asked for."""
    wanted = choose(
        v, "generator.model_dtype", {"bfloat16": "bfloat16", "float32": "float32", "float16": None}
    )
    return {} if wanted == "bfloat16" and flag(v, "trainer.bf16") else {"model.dtype": "float32"}


# ---------------------------------------------------------------- checkpoints and tracking


def resume(v: Values) -> Native:
    """latest goes on where the directory stands; from_path at resume_path; null and none want a fresh directory."""
    mode, path = v["trainer.resume_mode"], v["trainer.resume_path"]
    if mode == "from_path":
        if not isinstance(path, str):
            raise ConfigError(
                "trainer.resume_mode=from_path needs trainer.resume_path, a checkpoint's folder"
            )
        return {"checkpoint.resume": path}
    if path is not None:
        raise ConfigError(
            f"trainer.resume_path is read only with trainer.resume_mode=from_path, not {shown(mode)}"
        )
    if mode is None:
        return {"checkpoint.resume": "never"}
    return {
        "checkpoint.resume": choose(
            v, "trainer.resume_mode", {"none": "never", "latest": "auto", "from_path": ""}
        )
    }


def checkpoints(v: Values) -> Native:
    """How often, and how many of the newest stay; an interval of 0 or less: only the last."""
    keep = whole(v, "trainer.max_ckpts_to_keep", least=None)
    if keep == 0:
        raise ConfigError("trainer.max_ckpts_to_keep must not be 0: -1 keeps all, N the newest N")
    every = whole(v, "trainer.ckpt_interval", least=None)
    return {"checkpoint.every": max(every, 0), "checkpoint.keep": keep if keep > 0 else KEEP_ALL}


def export(v: Values) -> Native:
    """No export below 1; exports every N steps are coming."""
    every = whole(v, "trainer.hf_save_interval", least=None)
    if every > 0:
        raise ConfigError(
            f"trainer.hf_save_interval={every}: exports every so many steps are not built yet (coming); leave it at "
            "-1; every checkpoint has the weights in policy/model.safetensors"
        )
    return {"checkpoint.export": False}


TRACKERS = {
    "console": "console",
    "wandb": "console",
    "tensorboard": "tensorboard",
    **dict.fromkeys(("mlflow", "swanlab", "vemlp_wandb")),
}


def trackers(v: Values) -> Native:
    """jsonl always; wandb, the document's default, is kept on this machine."""
    given = v["trainer.logger"]
    names = given if isinstance(given, list) else [given]
    chosen = [choose({"trainer.logger": name}, "trainer.logger", TRACKERS) for name in names]
    return {"track.trackers": [*dict.fromkeys(chosen), "jsonl"]}


def run_name(v: Values) -> Native:
    """A run is known as project/run."""
    return {"name": f"{v['trainer.project_name']}/{v['trainer.run_name']}"}
