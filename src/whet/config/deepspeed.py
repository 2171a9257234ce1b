"""The config that DeepSpeed is given, and what in the user's own contradicts the run. Without torch or deepspeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from whet.config.checks_parallel import shards
from whet.config.faults import shown
from whet.config.schema import Config, OptimizerConfig, TrainConfig
from whet.config.tree import get
from whet.inputs import read_json_object
from whet.tables import is_installed
from whet.types import ConfigError, Json

KEY = "train.engine_arguments"
VERSION = "0.19.8"
"""The release that was seen running."""
INSTALL = "pip install 'whet[deepspeed]'"
AUTO = "auto"
ZERO = "zero_optimization"

OWN: Json = {
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
"""What whet needs: torch's optimizer is used everywhere."""

WIDE: Json = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
"""Gradients summed in float32, over ranks and over micro-batches: train.precision.reduce."""

REFUSED = {
    "amp": "train.precision.compute is the key for autocast",
    "fp16": "loss scaling is that of whet: use model.dtype=bfloat16 or float32, or train.engine=torch",
    "torch_autocast": "use train.precision.compute",
    "data_types": "use train.precision.reduce",
    "scheduler": "use train.optimizer.schedule",
    "elasticity": "it changes the batch size",
    "compression_training": "it changes the model that is trained",
    "data_efficiency": "it changes the data that is trained on",
    "curriculum_learning": "use data.curriculum",
    "progressive_layer_drop": "it changes the model that is trained",
    "eigenvalue": "it is for compression, which is not supported",
    "hybrid_engine": "rollouts are sampled by rollout.engine",
    "tensor_parallel": "use train.engine=torch with train.parallel.tp",
    "pipeline": "use train.engine=torch with train.parallel.pp",
    "sequence_parallel_size": "use train.engine=torch with train.parallel.cp",
    "managed_gradient_accumulation": "whet says where an optimizer step ends",
    "autotuning": "a run is no search for settings",
    "compile": "use train.engine=torch with train.compile",
    "sparse_gradients": "embeddings have dense gradients here",
    "activation_checkpointing": "use train.gradient_checkpointing",
    f"{ZERO}.zenflow": "it postpones updates, so that steps are no longer those of the run",
    f"{ZERO}.leaf_module": "whet gathers layer by layer",
    f"{ZERO}.ignore_unused_parameters": "whet decides what is trained (train.trainable)",
}
"""Keys of a deepspeed_config that are not passed on, and what to do. Switched off, or "auto", they say nothing."""

SAYS_NOTHING: Json = {"sequence_parallel_size": 1, f"{ZERO}.ignore_unused_parameters": True}
"""The value with which such a key changes nothing; of all others it is false."""

SECTIONS = (
    *("bf16", "bfloat16", "optimizer", "optimizer.params"),
    *(ZERO, f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"),
)
"""Keys of a deepspeed_config that whet looks into."""

PLACES = ("none", "cpu", "nvme")
"""Where DeepSpeed may keep what it offloads."""


def user_config(given: str | Json) -> Json:
    """The user's deepspeed_config. Errors: ConfigError for a file that holds no JSON object."""
    if not isinstance(given, str):
        return given
    try:
        return read_json_object(Path(given).expanduser(), ConfigError)
    except ConfigError as error:
        raise ConfigError(f"{KEY}: {error}") from error


def engine_config(train: TrainConfig, optimizer: OptimizerConfig | None, dtype: str) -> Json:
    """What `deepspeed.initialize` is given for one model. dtype: of its parameters."""
    own = user_config(train.engine_arguments)
    norm = None if optimizer is None else optimizer.max_grad_norm
    kept = {k: v for k, v in own.items() if k not in _set_here() and k not in REFUSED and v != AUTO}
    zero = {k: v for k, v in _section(own, ZERO).items() if v != AUTO}
    return {
        **kept,
        **(WIDE if train.precision.reduce else {}),
        **OWN,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": norm or 0.0,
        "bf16": {**_section(own, "bf16"), "enabled": dtype == "bfloat16", "check_grad_overflow": True},
        ZERO: {**zero, "stage": stage(own)},
    }


def stage(own: Json) -> Any:
    """Of ZeRO, in the user's deepspeed_config."""
    found = _get(own, f"{ZERO}.stage")
    return 3 if found in (None, AUTO) else found


def problems(cfg: Config) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of train.engine=deepspeed in one stage's config."""
    if cfg.train.engine != "deepspeed":
        return
    if shards(cfg.train.parallel) < 2:
        yield (
            "train.engine",
            "deepspeed shards the models over ranks, but train.parallel.dp_shard is 1; give the number, or use "
            "engine=torch",
        )
    try:
        own = user_config(cfg.train.engine_arguments)
    except ConfigError as error:
        key, _, text = str(error).partition(": ")
        yield key, text
        return
    yield from _contradicted(cfg, own)
    yield from _zero(own)
    if cfg.train.precision.reduce and stage(own) == 1:
        yield (
            "train.precision.reduce",
            "float32: at ZeRO's stage 1 DeepSpeed does it with another optimizer, whose state whet does not read; "
            f"use {KEY}.{ZERO}.stage=2, or leave it out",
        )


def not_installed(cfg: Config) -> Iterator[tuple[str, str]]:
    if cfg.train.engine == "deepspeed" and not is_installed("deepspeed"):
        yield "train.engine", f"deepspeed is not installed; {INSTALL}, or use engine=torch"


def _set_here() -> set[str]:
    return {*OWN, "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
            "gradient_clipping", "optimizer", "bf16", "bfloat16", ZERO}  # fmt: skip


def _contradicted(cfg: Config, own: Json) -> Iterator[tuple[str, str]]:
    """Where the user's deepspeed_config says something else than the run."""
    for key in SECTIONS:
        given = _get(own, key)
        if given not in (None, AUTO) and not isinstance(given, Mapping):
            yield KEY, f"{key}={shown(given)}: expected a table of keys"
    for key, (wanted, of) in run_values(cfg).items():
        given = _get(own, key)
        if given not in (None, AUTO, wanted):
            says = f"{shown(wanted)} ({of})" if wanted is not None else f"nothing that could be equal ({of})"
            yield (
                KEY,
                f"{key}={shown(given)} contradicts the run, which has {says}; leave it out, or set it to auto",
            )
    for key, why in REFUSED.items():
        if not _says_nothing(key, _get(own, key)):
            yield KEY, f"{key} is not passed on: {why}; leave it out"


def _says_nothing(key: str, given: Any) -> bool:
    """Whether a key that is not passed on is left out, switched off, or auto."""
    if isinstance(given, Mapping):
        return not given or given.get("enabled", True) in (False, AUTO)
    off = SAYS_NOTHING.get(key, False)
    return given in (None, AUTO) or (type(given) is type(off) and given == off)  # true is not 1


def run_values(cfg: Config) -> dict[str, tuple[Any, str]]:
    """By the key of a deepspeed_config: what the run has, and where it says so. None: nothing that is one number."""
    train, opt = cfg.train, cfg.train.optimizer
    rollouts = train.tasks_per_step * cfg.rollout.group_size // train.minibatches
    micro, ranks = train.micro_batch_rollouts, shards(train.parallel)
    whole = micro is not None and rollouts % (micro * ranks) == 0
    adam = {"optimizer.params.betas": (list(opt.betas), "train.optimizer.betas"),
            "optimizer.params.eps": (opt.eps, "train.optimizer.eps")}  # fmt: skip
    wide = {"communication_data_type": ("fp32", "train.precision.reduce")} if train.precision.reduce else {}
    return {
        **{key: (value, "set by whet") for key, value in OWN.items()},
        **wide,
        "train_batch_size": (rollouts, "tasks_per_step * group_size / minibatches"),
        "train_micro_batch_size_per_gpu": (micro, "train.micro_batch_rollouts"),
        "gradient_accumulation_steps": (
            rollouts // (micro * ranks) if whole and micro else None,
            "micro-batches follow from train.micro_batch_tokens or micro_batch_rollouts",
        ),
        "gradient_clipping": (opt.max_grad_norm or 0.0, "train.optimizer.max_grad_norm"),
        "optimizer.type": (_optimizer_type(cfg, opt), "train.optimizer.name"),
        "optimizer.params.lr": (opt.lr, "train.optimizer.lr"),
        "optimizer.params.weight_decay": (opt.weight_decay, "train.optimizer.weight_decay"),
        **(adam if opt.name in ("adam", "adamw") else {}),
        "bf16.enabled": (cfg.model.dtype == "bfloat16", "model.dtype"),
        "bfloat16.enabled": (cfg.model.dtype == "bfloat16", "model.dtype"),
        "bf16.check_grad_overflow": (True, "set by whet: gradients that are not finite skip a step"),
        "bf16.bf16_master_weights_and_grads": (False, "train.precision.master_weights"),
    }


def _optimizer_type(cfg: Config, opt: OptimizerConfig) -> str:
    """As the user has written it, where it means the same: DeepSpeed reads these names in any case."""
    given = _get(user_config(cfg.train.engine_arguments), "optimizer.type")
    return given if isinstance(given, str) and given.lower() == opt.name else opt.name


def _zero(own: Json) -> Iterator[tuple[str, str]]:
    """What does not go together in the settings of ZeRO."""
    at, n = f"{KEY}.{ZERO}", stage(own)
    if n not in (1, 2, 3) or isinstance(n, bool):
        said = "expected 1, 2 or 3; stage 0 shards nothing: use train.engine=torch with train.parallel.dp_replicate"
        yield f"{at}.stage", f"{shown(n)}: {said}"
        return
    for name in ("offload_optimizer", "offload_param"):
        where, path = (_get(own, f"{ZERO}.{name}.{key}") for key in ("device", "nvme_path"))
        if where not in (None, AUTO, *PLACES):
            yield f"{at}.{name}.device", f"{shown(where)}: expected {', '.join(PLACES)}"
        elif n < 3 and (where == "nvme" or (where == "cpu" and name == "offload_param")):
            yield f"{at}.{name}.device", f"{where} needs stage 3, but the stage is {n}"
        elif where == "nvme" and path in (None, AUTO):
            yield f"{at}.{name}.nvme_path", "nvme needs it: a folder on that disk"
    if n < 3 and _get(own, f"{ZERO}.zero_hpz_partition_size") not in (None, AUTO, 1):
        said = f"is a copy of sharded parameters, which stage {n} does not shard"
        yield f"{at}.zero_hpz_partition_size", said


def _get(own: Json, key: str) -> Any:
    """The value at a dotted key, None where it is not given."""
    return get(own, tuple(key.split(".")))


def _section(own: Json, key: str) -> Json:
    """What a section gives."""
    found = _get(own, key)
    return found if isinstance(found, dict) else {}
