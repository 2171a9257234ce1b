"""Trinity-RFT's global keys, its models and machines, explorer, synchronizer, trainer, monitor, services and log."""

from __future__ import annotations

from collections.abc import Mapping

from whet.config.dialects.key import Key, Values, coming, derived, inert, translated
from whet.config.dialects.trinity_algorithm import optimizer
from whet.config.dialects.trinity_data import batch, evaluation, length, mode, sampling, token_limits
from whet.config.dialects.trinity_trainer import critic, export, micro, resume
from whet.config.dialects.trinity_values import MODEL as VERL_MODEL
from whet.config.dialects.trinity_values import count, given, online, repeat_times, section, text
from whet.tables import near
from whet.types import ConfigError, Json

# ---------------------------------------------------------------- the run and its folder


def run(values: Values) -> Mapping[str, Json]:
    """<checkpoint_root_dir>/<project>/<name>, as the document says; a group, where one is given, before the name."""
    name, group = str(values["name"]), text(values, "group")
    folder = [
        text(values, "checkpoint_root_dir") or "./checkpoints",
        str(values["project"]),
        *([group] if group else []),
    ]
    return {"name": name, "run_dir": "/".join([*folder, name])}


def any_name(values: Values) -> Mapping[str, Json]:
    """A name of an actor: there are no actors, and nothing else is called by it."""
    return {}


# ---------------------------------------------------------------- model


def model(values: Values) -> Mapping[str, Json]:
    """The folder of the policy and what is put over its config.json."""
    path = text(values, "model.model_path")
    if path is None:
        raise ConfigError("model.model_path: must be given: the folder of a Hugging Face model.")
    rope = {
        key: values[f"model.{key}"]
        for key in ("rope_scaling", "rope_theta")
        if given(values[f"model.{key}"]) is not None
    }
    override = values[f"{VERL_MODEL}.override_config"]
    if not isinstance(override, dict | None):
        raise ConfigError(f"{VERL_MODEL}.override_config: got {override!r}, expected keys of config.json.")
    over = {**(override or {}), **rope}
    return {"model.path": path, **({"model.overrides": over} if over else {})}


def chat_template(values: Values) -> Mapping[str, Json]:
    """The file wins over the text."""
    template = text(values, "model.chat_template_path") or text(values, "model.custom_chat_template")
    return {} if template is None else {"tokenizer.chat_template": template}


# ---------------------------------------------------------------- explorer and synchronizer


def engine_type(values: Values) -> Mapping[str, Json]:
    """The embedded engine stands in for vLLM."""
    name = values["explorer.rollout_model.engine_type"]
    if name not in ("vllm", "vllm_async", "sglang"):
        raise ConfigError(
            f"explorer.rollout_model.engine_type: {name} is coming, not built yet; here: vllm and vllm_async (the "
            "embedded engine stands in)."
        )
    return {}


def at_once(values: Values) -> Mapping[str, Json]:
    """Each of engine_num * runner_per_model runners has a task in hand, with all its repeats."""
    runners = count(values, "explorer.rollout_model.engine_num") * count(values, "explorer.runner_per_model")
    return {"rollout.max_batch": runners * repeat_times(values)}


def timeout(values: Values) -> Mapping[str, Json]:
    """Seconds of one attempt."""
    return {"rollout.timeout_s": values["explorer.max_timeout"]}


STYLES = (
    "fixed",
    "dynamic_by_explorer",
    "dynamic_by_trainer",
    "explorer_driven",
    "trainer_driven",
    "fully_async",
)


def synchronizer(values: Values) -> Mapping[str, Json]:
    """Every step in both mode: the engine samples from the trainer's own weights. What runs ahead is coming."""
    style, method = values["synchronizer.sync_style"], values["synchronizer.sync_method"]
    if style not in STYLES:
        raise ConfigError(f"synchronizer.sync_style: {style!r} is not known{near(str(style), STYLES)}.")
    if method not in ("nccl", "checkpoint", "memory"):
        raise ConfigError(
            f"synchronizer.sync_method: {method!r} is not known; it is nccl, checkpoint or memory."
        )
    if not online(values):
        return {}
    for key, built in (("sync_style", "fixed"), ("sync_interval", 1), ("sync_offset", 0)):
        if values[f"synchronizer.{key}"] != built:
            raise ConfigError(
                f"synchronizer.{key}: {values[f'synchronizer.{key}']} lets the explorer run ahead of the trainer, "
                f"which is coming, not built yet; here: {built}."
            )
    return {}


# ---------------------------------------------------------------- monitor and log


def monitor(values: Values) -> Mapping[str, Json]:
    """The tracker, beside the console and metrics.jsonl."""
    kind = values["monitor.monitor_type"]
    if kind != "tensorboard":
        what = "is coming, not built yet" if kind in ("wandb", "mlflow", "swanlab") else "is not known"
        raise ConfigError(f"monitor.monitor_type: {kind} {what}; here: tensorboard.")
    return {"track.trackers": ["console", "jsonl", "tensorboard"]}


def secrets(values: Values) -> Mapping[str, Json]:
    """Refuses keys and passwords without showing them."""
    for name, owner in (("api_key", "Weights & Biases"), ("password", "MLflow")):
        if text(values, f"monitor.monitor_args.{name}") is not None:
            raise ConfigError(
                f"monitor.monitor_args.{name}: coming, not built yet: {owner}; leave it out of the file."
            )
    return {}


def log_level(values: Values) -> Mapping[str, Json]:
    """DEBUG is debug."""
    return {"track.log_level": str(values["log.level"]).lower()}


# ---------------------------------------------------------------- rows


def _name(name: str, *, default: Json) -> Key:
    """Inert at any value."""
    reason = "names an actor, and there are none: everything is one process"
    return Key(name=name, status="inert", default=default, reason=reason, translate=any_name)


def _secret(name: str, feature: str) -> Key:
    """Coming, and never shown."""
    return Key(name=name, status="coming", default=None, native=("track",), reason=feature, translate=secrets)


def _coming(feature: str, **defaults: Json) -> tuple[Key, ...]:
    """Rows of one feature; `__` stands for a dot, `_I_` for the `[]` of a list."""
    return tuple(
        coming(name.replace("_I_", "[]").replace("__", "."), feature, default=default)
        for name, default in defaults.items()
    )


_LIMITS = "prompt and reply share max_model_len; what is not given is what the others leave"

GLOBAL: tuple[Key, ...] = (
    translated("project", run, "run_dir", default="Trinity-RFT", reason="a part of the run's folder"),
    translated("name", run, "name", "run_dir", default="rft", reason="the run, and a part of its folder"),
    translated(
        "mode", mode, default="both", reason="both explores and trains in turn; train is for sft and dpo"
    ),
    translated(
        "checkpoint_root_dir",
        run,
        "run_dir",
        default="${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}",
        reason="<checkpoint_root_dir>/<project>/<name>",
    ),
    translated(
        "continue_from_checkpoint",
        resume,
        "checkpoint.resume",
        default=True,
        reason="false: a folder that holds a run is refused, not renamed",
    ),
    _name("ray_namespace", default=None),
)

MODEL: tuple[Key, ...] = (
    section("model", "model"),
    translated(
        "model.model_path", model, "model.path", default="", reason="a local folder; its code is never run"
    ),
    translated(
        "model.critic_model_path", critic, "critic.path", default=None, reason="null: as the policy starts"
    ),
    translated(
        "model.custom_chat_template",
        chat_template,
        "tokenizer.chat_template",
        default=None,
        reason="Jinja text",
    ),
    translated(
        "model.chat_template_path",
        chat_template,
        "tokenizer.chat_template",
        default=None,
        reason="wins over the text",
    ),
    translated(
        "model.max_model_len", token_limits, "rollout.sampling.max_tokens", default=None, reason=_LIMITS
    ),
    translated(
        "model.max_prompt_tokens", token_limits, "data.max_prompt_tokens", default=None, reason=_LIMITS
    ),
    translated(
        "model.max_response_tokens", token_limits, "rollout.sampling.max_tokens", default=None, reason=_LIMITS
    ),
    translated(
        "model.min_response_tokens",
        sampling,
        "rollout.sampling.min_tokens",
        default=0,
        reason="0, not the example's 1",
    ),
    translated(
        "model.enable_prompt_truncation",
        token_limits,
        "data.overlong",
        default=True,
        reason="Trinity trains on no token of a prompt that was cut; here it is left out and counted. false: an error",
    ),
    translated(
        "model.repetition_penalty",
        sampling,
        "rollout.sampling.repetition_penalty",
        default=1.0,
        reason="as in vLLM",
    ),
    *_coming("LoRA", model__lora_configs=None),
    *(
        coming(f"model.lora_configs[].{key}", "LoRA", default=default)
        for key, default in {
            "name": None,
            "path": None,
            "base_model_name": None,
            "lora_rank": 32,
            "lora_alpha": 32,
            "lora_dtype": "auto",
            "target_modules": "all-linear",
        }.items()
    ),
    translated("model.rope_scaling", model, "model.overrides", default=None, reason="put over config.json"),
    translated("model.rope_theta", model, "model.overrides", default=None, reason="put over config.json"),
    section("model.tinker"),
    *_coming(
        "training by a remote service",
        model__tinker__enable=False,
        model__tinker__rank=32,
        model__tinker__seed=None,
        model__tinker__train_mlp=True,
        model__tinker__train_attn=True,
        model__tinker__train_unembed=True,
    ),
)

_GPUS = "this machine's own devices are used; train_batch_size must be divisible by the trainer's GPUs that these leave"

CLUSTER: tuple[Key, ...] = (
    section("cluster", "machine"),
    derived("cluster.node_num", batch, default=None, reason=_GPUS),
    derived("cluster.gpu_per_node", batch, default=None, reason=_GPUS),
)

_ASYNC = "fixed, interval 1, offset 0: the engine samples from the trainer's own weights"

EXPLORER: tuple[Key, ...] = (
    section("explorer", "rollout"),
    _name("explorer.name", default="explorer"),
    translated(
        "explorer.runner_per_model",
        at_once,
        "rollout.max_batch",
        default=8,
        reason="times engine_num, times repeats",
    ),
    translated("explorer.max_timeout", timeout, "rollout.timeout_s", default=1800, reason="of one attempt"),
    coming("explorer.max_retry_times", "repeating a rollout that failed", default=2, harmless=(0,)),
    coming("explorer.env_vars", "an environment for rewards", default={}),
    section("explorer.rollout_model", "rollout"),
    derived(
        "explorer.rollout_model.engine_type",
        engine_type,
        default="vllm",
        reason="the embedded engine stands in",
    ),
    translated(
        "explorer.rollout_model.engine_num",
        at_once,
        "rollout.max_batch",
        default=1,
        reason="rollouts at once",
    ),
    derived("explorer.rollout_model.tensor_parallel_size", batch, default=1, reason=_GPUS),
    coming("explorer.rollout_model.enable_history", "workflows of your own", default=False),
    coming("explorer.auxiliary_models", "models beside the policy", default=[]),
    coming("explorer.auxiliary_models[].model_path", "models beside the policy", default=None),
    coming("explorer.auxiliary_models[].tensor_parallel_size", "models beside the policy", default=1),
    translated("explorer.eval_interval", evaluation, "eval.every", default=100, reason="steps"),
    translated(
        "explorer.eval_on_startup",
        evaluation,
        "eval.at_start",
        default=True,
        reason="not again after a resume",
    ),
    section("explorer.over_rollout"),
    *_coming(
        "steps that end before all their tasks",
        explorer__over_rollout__ratio=0.0,
        explorer__over_rollout__wait_after_min=30.0,
    ),
    section("explorer.dynamic_timeout"),
    *_coming(
        "time limits that follow the tasks",
        explorer__dynamic_timeout__enable=False,
        explorer__dynamic_timeout__ratio=3.0,
    ),
    coming("explorer.runner_state_report_interval", "a table of what runs at the moment", default=0),
)

SYNCHRONIZER: tuple[Key, ...] = (
    section("synchronizer", "rollout"),
    derived(
        "synchronizer.sync_method",
        synchronizer,
        default="nccl",
        reason="the engine samples from the trainer's weights",
    ),
    derived("synchronizer.sync_interval", synchronizer, default=1, reason=_ASYNC),
    derived("synchronizer.sync_offset", synchronizer, default=0, reason=_ASYNC),
    inert(
        "synchronizer.sync_timeout",
        "weights are handed over inside one process: there is no peer to wait for",
        default=3600,
        harmless=(60, 300, 600, 900, 1200, 1800, 7200, 86400),
    ),
    derived("synchronizer.sync_style", synchronizer, default="fixed", reason=_ASYNC),
)

TRAINER: tuple[Key, ...] = (
    section("trainer", "train"),
    _name("trainer.name", default="trainer"),
    coming("trainer.trainer_type", "other trainers than the embedded one", default="verl"),
    coming(
        "trainer.trainer_strategy",
        "Megatron; one device needs no sharding",
        default="fsdp",
        harmless=("fsdp2",),
    ),
    translated(
        "trainer.total_steps",
        length,
        "train.steps",
        default=None,
        reason="the taskset starts again where Trinity would end for want of tasks",
    ),
    Key(
        name="trainer.save_interval",
        status="mapped",
        native=("checkpoint.every",),
        default=0,
        reason="0: only at the end",
    ),
    inert(
        "trainer.save_strategy",
        "one process writes, so all of them are the same",
        default="unrestricted",
        harmless=("single_thread", "single_process", "single_node"),
    ),
    translated(
        "trainer.save_hf_checkpoint", export, "checkpoint.export", default="last", reason="last or never"
    ),
    translated(
        "trainer.grad_clip",
        optimizer,
        "train.optimizer.grad_clip",
        default=1.0,
        reason="of the policy and the critic",
    ),
    translated(
        "trainer.use_dynamic_bsz",
        micro,
        "train.micro_tokens",
        default=True,
        reason="by tokens, else by rollouts",
    ),
    translated(
        "trainer.max_token_len_per_gpu",
        micro,
        "train.micro_tokens",
        default=None,
        reason="twice max_model_len at least, and where it is not given",
    ),
    coming("trainer.ulysses_sequence_parallel_size", "parallel training", default=1),
    section("trainer.trainer_config"),
)

MONITOR: tuple[Key, ...] = (
    section("monitor", "track"),
    translated(
        "monitor.monitor_type",
        monitor,
        "track.trackers",
        default="tensorboard",
        reason="beside console and jsonl",
    ),
    section("monitor.monitor_args", "track"),
    coming("monitor.monitor_args.base_url", "Weights & Biases", default=None),
    _secret("monitor.monitor_args.api_key", "Weights & Biases"),
    coming("monitor.monitor_args.uri", "MLflow", default="http://localhost:5000"),
    coming("monitor.monitor_args.username", "MLflow", default=None),
    _secret("monitor.monitor_args.password", "MLflow"),
    coming("monitor.enable_ray_timeline", "a timeline of the run", default=False),
)

_JUICER = "data services (Data-Juicer)"
_OPERATORS = "data_processor.experience_pipeline.operators"
_TASK_OPERATORS = "data_processor.task_pipeline.operators"

SERVICES: tuple[Key, ...] = (
    section("service"),
    section("service.data_juicer"),
    coming("service.data_juicer.server_url", _JUICER, default=None),
    coming("service.data_juicer.auto_start", _JUICER, default=False),
    coming("service.data_juicer.port", _JUICER, default=None),
    section("data_processor"),
    section("data_processor.task_pipeline"),
    coming("data_processor.task_pipeline.num_process", _JUICER, default=4),
    coming(_TASK_OPERATORS, _JUICER, default=[]),
    coming(f"{_TASK_OPERATORS}[].name", _JUICER, default=""),
    coming(f"{_TASK_OPERATORS}[].args", _JUICER, default={}),
    *(
        coming(f"{_TASK_OPERATORS}[].args.{key}", _JUICER, default=None)
        for key in ("api_or_hf_model", "min_score", "input_keys", "field_names")
    ),
    coming("data_processor.task_pipeline.inputs", _JUICER, default=[]),
    coming("data_processor.task_pipeline.target_fields", _JUICER, default=[]),
    section("data_processor.experience_pipeline"),
    coming(_OPERATORS, _JUICER, default=[]),
    coming(f"{_OPERATORS}[].name", _JUICER, default=""),
    coming(f"{_OPERATORS}[].args", _JUICER, default={}),
    coming(f"{_OPERATORS}[].args.config_path", _JUICER, default=None),
    coming(f"{_OPERATORS}[].args.reward_shaping_configs", "shaping rewards by statistics", default=[]),
    coming(
        f"{_OPERATORS}[].args.reward_shaping_configs[].stats_key",
        "shaping rewards by statistics",
        default=None,
    ),
    coming(
        f"{_OPERATORS}[].args.reward_shaping_configs[].op_type",
        "shaping rewards by statistics",
        default="ADD",
    ),
    coming(
        f"{_OPERATORS}[].args.reward_shaping_configs[].weight", "shaping rewards by statistics", default=1.0
    ),
)

LOG: tuple[Key, ...] = (
    section("log", "track"),
    translated(
        "log.level", log_level, "track.log_level", default="INFO", reason="of run.log and the console"
    ),
    coming("log.group_by_node", "logs of several machines", default=False),
)

_STUDIO = "a field of the config studio; in a file write"

GUI: tuple[Key, ...] = (
    coming("gui:train_batch_size", f"{_STUDIO} buffer.train_batch_size", default=96),
    coming("gui:_train_batch_size_per_gpu", f"{_STUDIO} buffer.train_batch_size", default=16),
    coming("gui:trainer_gpu_num", f"{_STUDIO} cluster.gpu_per_node", default=None),
    coming("gui:total_epochs", f"{_STUDIO} buffer.total_epochs", default=20),
)

MORE_RUN: tuple[Key, ...] = (
    coming("monitor.monitor_args.*", "arguments of the tracker", default={}),
    coming(f"{_TASK_OPERATORS}[].args.*", _JUICER, default={}),
    coming(f"{_OPERATORS}[].args.*", _JUICER, default={}),
    translated("group", run, "run_dir", default=None, reason="a part of the run's folder, before the name"),
)
"""Keys that the document leaves to the source code."""
