"""verl's SFT file: every key, and what it is natively."""

from __future__ import annotations

import math

from whet.config.dialects.key import Key, Values, coming, derived, inert, mapped, translated
from whet.config.dialects.layout import FITTED, PARALLEL, Layout, native
from whet.config.dialects.typed import choose, flag, number, whole
from whet.config.dialects.verl_loop import copies, length, run_directory, trackers
from whet.config.dialects.verl_lora import lora_keys, sft_lora
from whet.config.dialects.verl_parts import rows
from whet.config.dialects.verl_policy import (
    IMPORTED,
    KERNELS,
    NO_CODE,
    own,
    section,
    unstaged,
)
from whet.config.dialects.verl_rules import ANY, NOTHING, Native, anywhere, is_one_of, texts
from whet.types import ConfigError, Json

_FSDP = "model.fsdp_config"


def recipe(v: Values) -> Native:
    """Supervised fine-tuning from a folder; prompts go through the chat template as the words of a user."""
    return {"algorithm.name": "sft", "model.path": anywhere(v, "model.partial_pretrain"), "data.chat": True}


def data(v: Values) -> Native:
    """All files one after the other, or a dataset class of yours over them."""
    turns = flag(v, "data.multiturn.enable")
    return {
        **rows(v, "data.train_files", "data.train.0"),
        **_columns(v, "data.train.0"),
        **({"data.learn_turns": "all"} if turns else {}),
    }


def _columns(v: Values, native: str) -> Native:
    """A column of conversations, or one of prompts and one of replies; keys into a column's dict become dots."""
    if flag(v, "data.multiturn.enable"):
        return {f"{native}.messages": v["data.multiturn.messages_key"]}
    return {f"{native}.{which}": _column(v, which) for which in ("prompt", "response")}


def _column(v: Values, which: str) -> str:
    inside = v[f"data.{which}_dict_keys"] or []
    return ".".join([v[f"data.{which}_key"], *([inside] if isinstance(inside, str) else inside)])


def imports(v: Values) -> Native:
    """Modules that are imported before the model is built."""
    return {"imports": texts(v, "model.external_lib")} if v["model.external_lib"] is not None else NOTHING


def lengths(v: Values) -> Native:
    """max_length is of prompt and reply together; each alone may be as long."""
    known = {"error": "error", "left": "truncate_left", "right": "truncate_right"}
    most = whole(v, "data.max_length", least=2)
    return {
        "data.max_total_tokens": most,
        "data.max_prompt_tokens": most,
        "rollout.sampling.max_tokens": most,
        "data.overlong": choose(v, "data.truncation", known),
    }


def batch(v: Values) -> Native:
    """B sequences a step; a pass has micro_batch_size_per_gpu of them, which must divide a rank's share."""
    B, W = whole(v, "data.train_batch_size"), whole(v, "trainer.nnodes") * whole(v, "trainer.n_gpus_per_node")
    sp, each = whole(v, "ulysses_sequence_parallel_size"), whole(v, "data.micro_batch_size_per_gpu")
    if sp > 1 and not flag(v, "use_remove_padding"):
        raise ConfigError(
            f"ulysses_sequence_parallel_size={sp}: sequence parallelism needs use_remove_padding=True"
        )
    if W % sp:
        raise ConfigError(
            f"ulysses_sequence_parallel_size={sp} must divide the {W} devices (trainer.n_gpus_per_node)"
        )
    dp = W // sp
    if B % dp:
        raise ConfigError(f"data.train_batch_size={B} must be divisible by the {dp} data-parallel ranks")
    if v["data.micro_batch_size"] is not None:
        each = max(1, whole(v, "data.micro_batch_size") // dp)
    if B // dp % each:
        raise ConfigError(
            f"data.micro_batch_size_per_gpu={each} must divide data.train_batch_size={B} / {dp} ranks = {B // dp}"
        )
    return {"train.tasks_per_step": B, "train.micro_rollouts": each}


def layout(v: Values) -> Native:
    """FSDP over all devices, Ulysses inside; `batch` has its rules."""
    cp = whole(v, "ulysses_sequence_parallel_size")
    nodes, each = whole(v, "trainer.nnodes"), whole(v, "trainer.n_gpus_per_node")
    return Layout(dp_shard=max(nodes * each // cp, 1), cp=cp, nodes=nodes).natives()


def sharding(v: Values) -> Native:
    """The smallest layers that FSDP gathers by themselves."""
    least = whole(v, f"{_FSDP}.wrap_policy.min_num_params", least=0)
    return {f"{PARALLEL}.wrap_min_parameters": least}


def offload(v: Values) -> Native:
    """FSDP's CPUOffload: cpu_offload switches it on, offload_params says that it does something."""
    wanted = flag(v, f"{_FSDP}.cpu_offload") and flag(v, f"{_FSDP}.offload_params")
    return {"train.offload": ["optimizer", "policy"] if wanted else []}


def optimizer(v: Values) -> Native:
    """AdamW over all parameters; a linear warm-up whose first step moves nothing, then half a cosine, or a stable part
    and half a cosine in the last tenth of what is left."""
    at = "train.optimizer"
    kind = choose(v, "optim.lr_scheduler", {"cosine": "cosine", "wsd": "wsd"})
    return {
        f"{at}.decay_all": True,
        f"{at}.betas": v["optim.betas"],
        f"{at}.schedule.kind": kind,
        f"{at}.schedule.warmup_fraction": number(v, "optim.warmup_steps_ratio"),
        f"{at}.schedule.warmup_ends": "start",
        f"{at}.schedule.total_steps": v["trainer.total_training_steps"],
        **({f"{at}.schedule.{key}": value for key, value in _decay(v).items()} if kind == "wsd" else {}),
    }


def _decay(v: Values) -> Native:
    """Of N steps and W of warm-up the last (N - W) - floor(0.9 (N - W)). Without N its share, rounded otherwise."""
    ratio, steps = number(v, "optim.warmup_steps_ratio"), v["trainer.total_training_steps"]
    if steps is None:
        return {"decay_shape": "cosine", "decay_fraction": round(0.1 * (1.0 - ratio), 12)}
    rest = steps - math.floor(ratio * steps)
    return {"decay_shape": "cosine", "decay_steps": rest - math.floor(0.9 * rest) or None}


def dtype(v: Values) -> Native:
    """Of the parameters; verl computes in bfloat16 whatever it is, whet in the same dtype."""
    known = {"fp32": "float32", "bf16": "bfloat16", "fp16": None}
    return {"model.dtype": choose(v, "model.fsdp_config.model_dtype", known)}


def checkpoints(v: Values) -> Native:
    """verl's SFT checkpoints are Hugging Face folders, so each is exported."""
    every, keep = max(whole(v, "trainer.save_freq", least=ANY), 0), v["trainer.max_ckpt_to_keep"]
    out: dict[str, Json] = {
        "checkpoint.every": every,
        "checkpoint.keep": None if keep is None else whole(v, "trainer.max_ckpt_to_keep"),
        "checkpoint.export": True,
        "checkpoint.export_every": every,
    }
    resume = v["trainer.resume_path"]
    return out | ({"checkpoint.resume": anywhere(v, "trainer.resume_path")} if resume else {})


def validation(v: Values) -> Native:
    """The loss on held-out demonstrations, every test_freq steps and after the last; 0 and less: none."""
    every = whole(v, "trainer.test_freq", least=ANY)
    if every <= 0:
        return NOTHING
    return {
        **rows(v, "data.val_files", "data.eval.0"),
        **_columns(v, "data.eval.0"),
        "data.exclude_eval": False,
        "eval.every": every,
        "eval.at_start": False,
        "eval.at_end": True,
    }


def _sized(name: str, *dims: str, default: int) -> Key:
    return translated(name, layout, *map(native, dims), default=default, reason=f"{_B} {FITTED}")


_B = "verl's rules for batch, micro batch and devices must hold."
_LOSS = "The loss on held-out demonstrations, if test_freq is above 0."
_CLASS = (
    "A dataset class of yours is made with data_files alone and must give rows of text; tokenizing is whet's."
)
_TURNS = "Whole conversations; every reply in them is learned from."
_WSD = (
    "cosine, or wsd: stable, then a cosine in the last tenth after the warm-up (in steps, to the step, with "
)
_WSD += "total_training_steps; else by its share)."
_DECAY = "Of all parameters, norms and biases too, as there."

DOCUMENTED: tuple[Key, ...] = (
    mapped("optim.lr", "train.optimizer.lr", default=1e-5),
    mapped("optim.weight_decay", "train.optimizer.weight_decay", default=0.01, reason=_DECAY),
    translated(
        "optim.warmup_steps_ratio",
        optimizer,
        "train.optimizer.schedule.warmup_fraction",
        default=0.1,
        reason="Of all optimizer steps.",
    ),
    mapped("optim.clip_grad", "train.optimizer.grad_clip", default=1.0),
    translated(
        "optim.lr_scheduler", optimizer, "train.optimizer.schedule.kind", default="cosine", reason=_WSD
    ),
    translated(
        "model.partial_pretrain",
        recipe,
        "model.path",
        "algorithm.name",
        "data.chat",
        default="~/models/gemma-1.1-7b-it",
        reason="Supervised fine-tuning from a Hugging Face folder.",
    ),
    section("model.fsdp_config"),
    translated(
        "model.fsdp_config.model_dtype",
        dtype,
        "model.dtype",
        default="fp32",
        reason="Of parameters and computation alike; verl computes in bfloat16.",
    ),
    translated(
        f"{_FSDP}.wrap_policy.min_num_params",
        sharding,
        f"{PARALLEL}.wrap_min_parameters",
        default=0,
        reason="Of decoder layers; smaller ones wait. Read where FSDP cuts tensors, which is on several devices.",
    ),
    *(
        translated(
            f"{_FSDP}.{name}",
            offload,
            "train.offload",
            default=False,
            reason="Both: weights, gradients and moments, where several devices train. Left out where there is no GPU.",
        )
        for name in ("cpu_offload", "offload_params")
    ),
    translated("model.external_lib", imports, "imports", default=None, reason=IMPORTED),
    mapped("model.enable_gradient_checkpointing", "train.gradient_checkpointing", default=False),
    inert("model.trust_remote_code", NO_CODE, default=False, harmless=(True,)),
    *lora_keys("model", sft_lora, "model.lora"),
    own("model.use_liger", KERNELS),
    translated("data.custom_cls.path", data, "data.train.0.function", default=None, reason=_CLASS),
    translated("data.custom_cls.name", data, "data.train.0.function", default=None, reason=_CLASS),
)

NEWER: tuple[Key, ...] = (
    unstaged("data.use_shm"),
    translated("data.train_batch_size", batch, "train.tasks_per_step", default=256, reason=_B),
    translated("data.micro_batch_size", batch, "train.micro_rollouts", default=None, reason=_B),
    translated("data.micro_batch_size_per_gpu", batch, "train.micro_rollouts", default=4, reason=_B),
    translated(
        "data.train_files",
        data,
        "data.train.0.path",
        default="~/data/gsm8k/train.parquet",
        reason="One source of all files in order.",
    ),
    translated(
        "data.val_files",
        validation,
        "data.eval.0.path",
        default="~/data/gsm8k/test.parquet",
        reason=f"{_LOSS} Training rows that also stand here are kept.",
    ),
    translated("data.prompt_key", data, "data.train.0.prompt", default="question", reason="A column."),
    translated("data.response_key", data, "data.train.0.response", default="answer", reason="A column."),
    translated(
        "data.prompt_dict_keys", data, "data.train.0.prompt", default=None, reason="Dots into the column."
    ),
    translated(
        "data.response_dict_keys", data, "data.train.0.response", default=None, reason="Dots into the column."
    ),
    translated("data.multiturn.enable", data, "data.learn_turns", default=False, reason=_TURNS),
    translated(
        "data.multiturn.messages_key", data, "data.train.0.messages", default="messages", reason=_TURNS
    ),
    coming("data.multiturn.tools_key", "tools in a chat template", default="tools"),
    coming(
        "data.multiturn.enable_thinking_key",
        "an argument of the chat template for each row; today whet.tokenizer.chat_arguments has one for all",
        default="enable_thinking",
    ),
    translated(
        "data.max_length",
        lengths,
        "data.max_total_tokens",
        "data.max_prompt_tokens",
        "rollout.sampling.max_tokens",
        default=1024,
        reason="Prompt and reply together; each alone may be as long.",
    ),
    translated(
        "data.truncation",
        lengths,
        "data.overlong",
        default="error",
        reason="error, left (cuts the prompt) or right (cuts the reply).",
    ),
    inert(
        "data.balance_dp_token",
        "Losses are always over the tokens of the whole batch.",
        default=False,
        harmless=(True,),
    ),
    mapped("data.chat_template", "tokenizer.chat_template", default=None),
    derived(
        "model.strategy",
        is_one_of("model.strategy", "fsdp", "fsdp2"),
        default="fsdp2",
        reason="One process shards nothing.",
    ),
    unstaged("model.use_shm"),
    translated("optim.betas", optimizer, "train.optimizer.betas", default=[0.9, 0.95], reason="Of AdamW."),
    _sized("ulysses_sequence_parallel_size", "dp_shard", "cp", default=1),
    derived(
        "use_remove_padding",
        batch,
        default=False,
        reason="Nothing is ever padded here; sequence parallelism needs it in verl.",
    ),
    translated(
        "trainer.default_local_dir",
        run_directory,
        "run_dir",
        default="checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        reason="The run's folder.",
    ),
    translated(
        "trainer.default_hdfs_dir",
        copies,
        "checkpoint.upload_to",
        default=None,
        reason="Checkpoints are copied there, too.",
    ),
    translated(
        "trainer.resume_path",
        checkpoints,
        "checkpoint.resume",
        default=None,
        reason="A checkpoint that whet wrote.",
    ),
    mapped(
        "trainer.project_name",
        "track.project",
        default="gsm8k-sft",
        reason="Read by wandb, mlflow and swanlab; and part of the default of default_local_dir.",
    ),
    mapped("trainer.experiment_name", "name", default="test"),
    translated(
        "trainer.total_epochs",
        length,
        "train.epochs",
        default=4,
        reason="Each ends with its last full batch, as there.",
    ),
    translated(
        "trainer.total_training_steps",
        length,
        "train.steps",
        default=None,
        reason="Ends the run in the midst of the epochs; the schedule is as long.",
    ),
    translated(
        "trainer.logger",
        trackers,
        "track.trackers",
        default=["console", "wandb"],
        reason="By the same names, metrics.jsonl besides. wandb, the default, must be installed.",
    ),
    mapped("trainer.seed", "seed", default=1),
    translated("trainer.save_freq", checkpoints, "checkpoint.every", default=-1, reason="And at the end."),
    translated(
        "trainer.test_freq", validation, "eval.every", default=-1, reason=f"{_LOSS} And after the last step."
    ),
    _sized("trainer.nnodes", "dp_shard", "nodes", default=1),
    _sized("trainer.n_gpus_per_node", "dp_shard", default=8),
    translated("trainer.max_ckpt_to_keep", checkpoints, "checkpoint.keep", default=None, reason="null: all."),
)

SFT: tuple[Key, ...] = (*DOCUMENTED, section("data.custom_cls"), *NEWER)
