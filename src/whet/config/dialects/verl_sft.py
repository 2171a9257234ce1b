"""verl's SFT file: every key, and what it is natively."""

from __future__ import annotations

from whet.config.dialects.key import Key, Values, coming, derived, inert, mapped, translated
from whet.config.dialects.typed import choose, flag, number, whole
from whet.config.dialects.verl_loop import run_directory, trackers
from whet.config.dialects.verl_policy import DECAY, NO_CODE, OFFLOAD, SHARDED, section
from whet.config.dialects.verl_rules import (
    ALL,
    ANY,
    NOTHING,
    Native,
    here,
    is_one_of,
    local,
    texts,
)
from whet.config.faults import shown
from whet.types import ConfigError, Json


def recipe(v: Values) -> Native:
    """Supervised fine-tuning from a folder; prompts go through the chat template as the words of a user."""
    return {"algorithm.name": "sft", "model.path": local(v, "model.partial_pretrain"), "data.chat": True}


def data(v: Values) -> Native:
    """All files one after the other; keys into a column's dict become dots."""
    files = [here(path, key="data.train_files") for path in texts(v, "data.train_files")]
    return {
        "data.train.0.path": files if len(files) > 1 else files[0],
        "data.train.0.prompt": _column(v, "prompt"),
        "data.train.0.response": _column(v, "response"),
    }


def _column(v: Values, which: str) -> str:
    inside = v[f"data.{which}_dict_keys"] or []
    return ".".join([v[f"data.{which}_key"], *([inside] if isinstance(inside, str) else inside)])


def lengths(v: Values) -> Native:
    """max_length is of prompt and response together; natively each has a limit of its own."""
    known = {"error": "error", "left": "truncate_left", "right": "truncate_right"}
    most = whole(v, "data.max_length")
    return {
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


def optimizer(v: Values) -> Native:
    """AdamW with a linear warm-up and half a cosine."""
    choose(v, "optim.lr_scheduler", {"cosine": "cosine", "wsd": None})
    return {
        "train.optimizer.schedule.kind": "cosine",
        "train.optimizer.schedule.warmup_fraction": number(v, "optim.warmup_steps_ratio"),
        "train.optimizer.betas": v["optim.betas"],
    }


def dtype(v: Values) -> Native:
    """Of the parameters; verl computes in bfloat16 whatever it is, whet in the same dtype."""
    known = {"fp32": "float32", "bf16": "bfloat16", "fp16": None}
    return {"model.dtype": choose(v, "model.fsdp_config.model_dtype", known)}


def length(v: Values) -> Native:
    """total_training_steps, where it is given, stands over total_epochs."""
    steps = v["trainer.total_training_steps"]
    return {"train.epochs": whole(v, "trainer.total_epochs")} if steps is None else {"train.steps": steps}


def checkpoints(v: Values) -> Native:
    """verl's SFT checkpoints are Hugging Face folders, so the last is exported."""
    every, resume = max(whole(v, "trainer.save_freq", least=ANY), 0), v["trainer.resume_path"]
    keep = v["trainer.max_ckpt_to_keep"] or (ALL if every else 1)
    out: dict[str, Json] = {"checkpoint.every": every, "checkpoint.keep": keep, "checkpoint.export": True}
    return out | ({"checkpoint.resume": local(v, "trainer.resume_path")} if resume else {})


def no_validation(v: Values) -> Native:
    """A loss on held-out demonstrations is coming, so test_freq must not ask for one."""
    if whole(v, "trainer.test_freq", least=ANY) > 0:
        raise ConfigError(
            f"trainer.test_freq={shown(v['trainer.test_freq'])}: the loss on data.val_files is coming, not built yet; "
            "set it to -1"
        )
    return NOTHING


_B = "verl's rules for batch, micro batch and devices must hold."
_VAL = "a loss on held-out demonstrations"
_CLASS = "dataset classes of yours; today data.train.0.function gives rows"
_TURNS = "demonstrations of several turns"
_COSINE = "cosine; wsd (with a cosine decay) is coming."

DOCUMENTED: tuple[Key, ...] = (
    mapped("optim.lr", "train.optimizer.lr", default=1e-5),
    mapped("optim.weight_decay", "train.optimizer.weight_decay", default=0.01, reason=DECAY),
    translated(
        "optim.warmup_steps_ratio",
        optimizer,
        "train.optimizer.schedule.warmup_fraction",
        default=0.1,
        reason="Of all optimizer steps.",
    ),
    mapped("optim.clip_grad", "train.optimizer.grad_clip", default=1.0),
    translated(
        "optim.lr_scheduler", optimizer, "train.optimizer.schedule.kind", default="cosine", reason=_COSINE
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
    coming("model.fsdp_config.wrap_policy.min_num_params", SHARDED, default=0),
    coming("model.fsdp_config.cpu_offload", OFFLOAD, default=False, harmless=(True,)),
    coming("model.fsdp_config.offload_params", OFFLOAD, default=False, harmless=(True,)),
    coming("model.external_lib", "importing modules of yours before the model is built", default=None),
    mapped("model.enable_gradient_checkpointing", "train.gradient_checkpointing", default=False),
    inert("model.trust_remote_code", NO_CODE, default=False, harmless=(True,)),
    coming("model.lora_rank", "LoRA", default=0),
    coming("model.lora_alpha", "LoRA", default=16),
    coming("model.target_modules", "LoRA", default="all-linear"),
    coming("model.use_liger", "fused kernels of liger", default=False),
    coming("data.custom_cls.path", _CLASS, default=None),
    coming("data.custom_cls.name", _CLASS, default=None),
)

NEWER: tuple[Key, ...] = (
    coming("data.use_shm", "staging in shared memory; it changes no number", default=False, harmless=(True,)),
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
    Key(
        name="data.val_files",
        status="coming",
        default="~/data/gsm8k/test.parquet",
        reason=_VAL,
        translate=no_validation,
    ),
    translated("data.prompt_key", data, "data.train.0.prompt", default="question", reason="A column."),
    translated("data.response_key", data, "data.train.0.response", default="answer", reason="A column."),
    translated(
        "data.prompt_dict_keys", data, "data.train.0.prompt", default=None, reason="Dots into the column."
    ),
    translated(
        "data.response_dict_keys", data, "data.train.0.response", default=None, reason="Dots into the column."
    ),
    coming("data.multiturn.enable", _TURNS, default=False),
    coming("data.multiturn.messages_key", _TURNS, default="messages"),
    coming("data.multiturn.tools_key", _TURNS, default="tools"),
    coming("data.multiturn.enable_thinking_key", _TURNS, default="enable_thinking"),
    translated(
        "data.max_length",
        lengths,
        "data.max_prompt_tokens",
        "rollout.sampling.max_tokens",
        default=1024,
        reason="verl's limit is on both together; natively each has it.",
    ),
    translated(
        "data.truncation", lengths, "data.overlong", default="error", reason="Of prompt and response."
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
    coming(
        "model.use_shm", "staging in shared memory; it changes no number", default=False, harmless=(True,)
    ),
    translated("optim.betas", optimizer, "train.optimizer.betas", default=[0.9, 0.95], reason="Of AdamW."),
    derived("ulysses_sequence_parallel_size", batch, default=1, reason=_B),
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
    coming("trainer.default_hdfs_dir", "copies on remote file systems", default=None),
    translated(
        "trainer.resume_path",
        checkpoints,
        "checkpoint.resume",
        default=None,
        reason="A checkpoint that whet wrote.",
    ),
    translated(
        "trainer.project_name",
        run_directory,
        "run_dir",
        default="gsm8k-sft",
        reason="Part of the default of default_local_dir.",
    ),
    mapped("trainer.experiment_name", "name", default="test"),
    translated(
        "trainer.total_epochs",
        length,
        "train.epochs",
        default=4,
        reason="verl drops the last, short batch of every epoch; whet goes on into the next epoch.",
    ),
    translated(
        "trainer.total_training_steps",
        length,
        "train.steps",
        default=None,
        reason="Stands over total_epochs.",
    ),
    translated(
        "trainer.logger",
        trackers,
        "track.trackers",
        default=["console", "wandb"],
        reason="metrics.jsonl always; wandb is written there instead.",
    ),
    mapped("trainer.seed", "seed", default=1),
    translated("trainer.save_freq", checkpoints, "checkpoint.every", default=-1, reason="And at the end."),
    Key(name="trainer.test_freq", status="coming", default=-1, reason=_VAL, translate=no_validation),
    derived("trainer.nnodes", batch, default=1, reason=_B),
    derived("trainer.n_gpus_per_node", batch, default=8, reason=_B),
    translated("trainer.max_ckpt_to_keep", checkpoints, "checkpoint.keep", default=None, reason="null: all."),
)

SFT: tuple[Key, ...] = (*DOCUMENTED, section("data.custom_cls"), *NEWER)
