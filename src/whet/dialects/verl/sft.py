"""verl's SFT file: every key, and what it is natively."""

from __future__ import annotations

import math
from functools import partial

from whet.dialects.layout import FileLayout
from whet.dialects.megatron import learned, learns, router_terms
from whet.dialects.row import NOTHING, Native, NotSupportedYet, Values
from whet.dialects.typed import choices, choose, share_of_steps
from whet.dialects.verl import optimizer as ppo
from whet.dialects.verl.data import rows
from whet.dialects.verl.loop import PARTS, check_loaded, contents, exports_only
from whet.dialects.verl.roles import ENGINES, FAMILIES, anywhere, texts
from whet.dialects.verl.sizes import copies_and_shards
from whet.types import ConfigError

_FSDP = "model.fsdp_config"


def over_engines(v: Values) -> bool:
    """Whether the file is of the trainer over engines (the only one since 0.7.1): its model has a path."""
    return v["model.path"] is not None and v["model.partial_pretrain"] in (None, UNGIVEN)


UNGIVEN = "~/models/gemma-1.1-7b-it"
"""The older file's model, which is another than that of any run."""


def engine_of(v: Values) -> str:
    """The engine by its strategy, whose row says which are built, and Megatron also by the class of its section: verl's
    file for it has no strategy. Automodel is of this trainer alone."""
    name = str(v["model.strategy"])
    if name == "automodel":
        return name
    family = FAMILIES.get(name) or "fsdp"
    named = str(v.get("engine._target_")).endswith(".McoreEngineConfig")
    return "megatron" if family == "fsdp" and named else family


def is_megatron(v: Values) -> bool:
    return engine_of(v) == "megatron"


routers = partial(router_terms, at="engine.override_transformer_config")
mtp = partial(learned, at="model.mtp")


def recipe(v: Values) -> Native:
    """The folder of the model."""
    key = "model.path" if over_engines(v) else "model.partial_pretrain"
    return {"model.path": anywhere(v, key)}


def has_turns(v: Values) -> bool:
    """Whether rows are conversations, as they always are over engines."""
    return bool(v["data.multiturn.enable"] or over_engines(v))


def data(v: Values) -> Native:
    """All files one after the other, or a dataset class of yours over them."""
    return {
        **rows(v, "train", "data.train.0"),
        **_columns(v, "data.train.0"),
        **({"data.learn_turns": "all"} if has_turns(v) else {}),
    }


def _columns(v: Values, native: str) -> Native:
    """A column of conversations, or one of prompts and one of replies; keys into a column's dict become dots."""
    if has_turns(v):
        tools = v["data.multiturn.tools_key"]
        return {
            f"{native}.messages": v["data.multiturn.messages_key"],
            **({f"{native}.tools": tools} if tools != "tools" else {}),
            f"{native}.chat_template_kwargs": v["data.multiturn.enable_thinking_key"],
        }
    return {f"{native}.{which}": _column(v, which) for which in ("prompt", "response")}


def _column(v: Values, which: str) -> str:
    inside = v[f"data.{which}_dict_keys"] or []
    return ".".join([v[f"data.{which}_key"], *([inside] if isinstance(inside, str) else inside)])


def template_kwargs(v: Values) -> Native:
    """Variables of the chat template; enable_thinking_default comes after the others, as in verl."""
    kwargs, default = dict(v["data.apply_chat_template_kwargs"]), v.get("data.enable_thinking_default")
    if has_turns(v) and isinstance(default, bool):
        kwargs["enable_thinking"] = default
    return {"tokenizer.chat_template_kwargs": kwargs}


def imports(v: Values) -> Native:
    """Modules that are imported before the model is built."""
    return {"imports": texts(v, "model.external_lib")} if v["model.external_lib"] is not None else NOTHING


def batch(v: Values) -> Native:
    """B sequences a step; a pass has micro_batch_size_per_gpu of them, which must divide a rank's share; over engines
    it may have so many tokens, times the ranks that share a sequence."""
    B, W, sp = v["data.train_batch_size"], _world(v), v["ulysses_sequence_parallel_size"]
    if W % sp:
        raise ConfigError(
            f"ulysses_sequence_parallel_size={sp} must divide the {W} devices (trainer.n_gpus_per_node)"
        )
    dp = _ranks(v)
    if B % dp:
        raise ConfigError(f"data.train_batch_size={B} must be divisible by the {dp} data-parallel ranks")
    if over_engines(v) and v["data.use_dynamic_bsz"]:
        shared = v[_parallel_keys(v)[ENGINES[engine_of(v)].sharing]]
        return {
            "train.tasks_per_step": B,
            "train.micro_batch_tokens": v["data.max_token_len_per_gpu"] * shared,
        }
    each, together = v["data.micro_batch_size_per_gpu"], v["data.micro_batch_size"]
    each = each if together is None else max(1, together // dp)
    if B // dp % each:
        raise ConfigError(
            f"data.micro_batch_size_per_gpu={each} must divide data.train_batch_size={B} / {dp} ranks = {B // dp}"
        )
    return {"train.tasks_per_step": B, "train.micro_batch_rollouts": each}


def _world(v: Values) -> int:
    return int(v["trainer.nnodes"] * v["trainer.n_gpus_per_node"])


def _parallel_keys(v: Values) -> dict[str, str]:
    """By dimension: the key of its size."""
    engine = engine_of(v)
    if engine == "fsdp":
        return {"cp": "ulysses_sequence_parallel_size"}
    return {dim: f"engine.{name}" for dim, name in ENGINES[engine].sizes.items()}


def _ranks(v: Values) -> int:
    """Data-parallel ranks."""
    shared = math.prod(v[key] for dim, key in _parallel_keys(v).items() if dim != "ep")
    return max(_world(v) // int(shared), 1)


def layout(v: Values) -> Native:
    """The sizes of the engine over all devices; `batch` has their rules."""
    sizes = {dim: v[key] for dim, key in _parallel_keys(v).items()}
    dp, engine = _ranks(v), ENGINES[engine_of(v)]
    copies, shards = copies_and_shards(v, engine, "engine", dp=dp, each=_world(v) // dp)
    made = FileLayout(dp_replicate=copies, dp_shard=shards, nodes=v["trainer.nnodes"], **sizes)
    flat = is_megatron(v) and learns(v, "model.mtp")
    return (made.flat() if flat else made).natives()


def optimizer(v: Values) -> Native:
    """Over engines as in verl's PPO."""
    every = {**v, "optim.lr_warmup_steps_ratio": v["optim.warmup_steps_ratio"]}
    return ppo.settings(
        every, "optim", native="train.optimizer", engine=engine_of(v), clip=v["optim.clip_grad"]
    )


def warmup_share(v: Values) -> float:
    """The share of all steps that the older trainer warms up over."""
    return share_of_steps(v["optim.warmup_steps_ratio"], "optim.warmup_steps_ratio")


def decay_steps(v: Values) -> float | None:
    """Of N steps and W of warm-up the last (N - W) - floor(0.9 (N - W)). Without N its share, rounded otherwise."""
    ratio, steps = v["optim.warmup_steps_ratio"], v["trainer.total_training_steps"]
    if steps is None:
        return round(0.1 * (1.0 - ratio), 12)
    rest = steps - math.floor(ratio * steps)
    return rest - math.floor(0.9 * rest) or None


DTYPES = choices("verl", "sft dtype")


def dtype(v: Values) -> Native:
    """Of the parameters; verl computes in bfloat16 whatever it is, whet in the same dtype. Over engines bfloat16 is
    left to the device, with master weights unless the parameters themselves are to be bfloat16, and Automodel's
    FusedAdam keeps none beside them."""
    if not over_engines(v):
        return {"model.dtype": choose(v, f"{_FSDP}.model_dtype", DTYPES)}
    engine, weights = engine_of(v), choose(v, "engine.model_dtype", DTYPES)
    if engine == "mlite":  # its weights are always in bfloat16, with master weights
        return NOTHING
    narrow = weights == "bfloat16" and engine in ("fsdp", "automodel") and not v.get("optim.master_weights")
    if narrow or (engine == "veomni" and v["engine.mixed_precision"] is False):
        return {"model.dtype": "bfloat16", "train.precision.master_weights": False}
    return {} if choose(v, "engine.dtype", DTYPES) == "bfloat16" else {"model.dtype": "float32"}


def checkpoints(v: Values) -> Native:
    """The older trainer's checkpoints are Hugging Face folders, so each is exported; else the contents say so."""
    every = v["trainer.save_freq"]
    every = "1 epoch" if every == "after_each_epoch" else max(every, 0)
    saved, loaded = (contents(v, f"trainer.checkpoint.{which}_contents") for which in ("save", "load"))
    if "model" in saved and "extra" not in loaded:
        raise NotSupportedYet(
            f"trainer.checkpoint.load_contents={loaded}: resuming without schedule, data position and random state "
            "(extra) is coming, not built yet"
        )
    if "model" not in saved:
        return {**exports_only(every), "checkpoint.keep": v["trainer.max_ckpt_to_keep"]}
    check_loaded("trainer.checkpoint.load_contents", loaded)
    exports = not over_engines(v) or "hf_model" in saved
    return {
        "checkpoint.interval": every,
        "checkpoint.keep": v["trainer.max_ckpt_to_keep"],
        "checkpoint.save_contents": [part for part in PARTS if part in saved],
        "checkpoint.load_contents": [part for part in PARTS if part in loaded],
        "checkpoint.export": exports,
        "checkpoint.export_interval": every if exports else 0,
    }


def validation(v: Values) -> Native:
    """The held-out demonstrations."""
    return {**rows(v, "val", "data.eval.0"), **_columns(v, "data.eval.0")}
