"""verl's SFT file: every key, and what it is natively."""

from __future__ import annotations

import math

from whet.dialects.layout import PARALLEL, Layout
from whet.dialects.row import Values
from whet.dialects.typed import choose, flag, number, whole
from whet.dialects.verl.parts import rows
from whet.dialects.verl.rules import ANY, NOTHING, Native, anywhere, texts
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


_WSD = (
    "cosine, or wsd: stable, then a cosine in the last tenth after the warm-up (in steps, to the step, with "
)
_WSD += "total_training_steps; else by its share)."
