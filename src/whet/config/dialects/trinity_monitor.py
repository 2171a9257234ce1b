"""Trinity-RFT's monitor, log, data services and studio fields."""

from __future__ import annotations

from collections.abc import Mapping

from whet.config.dialects.key import Key, Unbuilt, Values, coming, derived, translated
from whet.config.dialects.trinity_advantage import OPERATORS, operators
from whet.config.dialects.trinity_values import entries, given, known_as, section, text
from whet.config.dialects.typed import flag
from whet.tables import near
from whet.types import ConfigError, Json

ARGS = "monitor.monitor_args"
_TASKS = "data_processor.task_pipeline"
_JUICER = "data services (Data-Juicer)"

TRACKERS: dict[str, tuple[str, ...]] = {
    "tensorboard": (),
    "wandb": ("base_url",),
    "mlflow": ("uri",),
    "swanlab": ("workspace", "mode", "description", "tags", "reinit", "settings"),
}
"""Trackers with the arguments that each takes from a file."""

_NATIVE = {"base_url": "wandb.settings.base_url", "uri": "mlflow.tracking_uri"}
_SECRETS = {
    "api_key": "WANDB_API_KEY or SWANLAB_API_KEY",
    "username": "MLFLOW_TRACKING_USERNAME",
    "password": "MLFLOW_TRACKING_PASSWORD",
}


def timeline(values: Values) -> Mapping[str, Json]:
    """Always there."""
    flag(values, "monitor.enable_ray_timeline")
    return {}


def one_log(values: Values) -> Mapping[str, Json]:
    """There is nothing to group."""
    flag(values, "log.group_by_node")
    return {}


def monitor(values: Values) -> Mapping[str, Json]:
    """The tracker, beside the console and metrics.jsonl, with its project, group and arguments."""
    kind = str(values["monitor.monitor_type"])
    known_as(kind, TRACKERS, key="monitor.monitor_type")
    out: dict[str, Json] = {"track.trackers": ["console", "jsonl", kind]}
    if kind != "tensorboard":
        out["track.project"] = str(values["project"])
        out |= {"track.group": group} if (group := text(values, "group")) else {}
    return out | _arguments(values, kind)


def _arguments(values: Values, kind: str) -> dict[str, Json]:
    """monitor_args: those of this tracker; a given argument that it does not have is refused."""
    named = {"base_url": values[f"{ARGS}.base_url"]}
    if kind == "mlflow" or values[f"{ARGS}.uri"] != "http://localhost:5000":
        named["uri"] = values[f"{ARGS}.uri"]
    told = {
        key: value
        for key, value in {**named, **(values[f"{ARGS}.*"] or {})}.items()
        if given(value) is not None
    }
    for key in told:
        if key not in TRACKERS[kind]:
            known = ", ".join(TRACKERS[kind]) or "none"
            raise ConfigError(
                f"{ARGS}.{key}: {kind} takes no such argument{near(key, TRACKERS[kind])}; it takes: {known}."
            )
    tags = told.pop("tags", None)
    out = {f"track.arguments.{_NATIVE.get(key, f'{kind}.{key}')}": value for key, value in told.items()}
    return out | ({"track.tags": tags} if tags else {})


def secrets(values: Values) -> Mapping[str, Json]:
    """Refuses keys and passwords without showing them."""
    for name, variable in _SECRETS.items():
        if text(values, f"{ARGS}.{name}") is not None:
            raise ConfigError(
                f"{ARGS}.{name}: secrets stay out of configs: leave it out and set {variable} in the environment."
            )
    return {}


def operator_secrets(values: Values) -> Mapping[str, Json]:
    """The same of an operator's service."""
    for n, own in enumerate(entries(values, f"{_TASKS}.operators")):
        if text(own, "args.api_key") is not None:
            raise Unbuilt(f"{_TASKS}.operators[{n}].args.api_key: {_JUICER} are coming, not built yet.")
    return {}


def log_level(values: Values) -> Mapping[str, Json]:
    """DEBUG is debug."""
    return {"track.log_level": str(values["log.level"]).lower()}


def record(values: Values) -> Mapping[str, Json]:
    """save_input: the record of the rollouts."""
    return {"track.rollouts_every": 1 if values["data_processor.experience_pipeline.save_input"] else 0}


# ---------------------------------------------------------------- rows


def _secret(name: str) -> Key:
    """Never taken from a file, and never shown."""
    why = f"set {_SECRETS[name]} in the environment"
    return Key(
        name=f"{ARGS}.{name}",
        status="refused",
        default=None,
        native=("track",),
        reason=why,
        translate=secrets,
    )


MONITOR: tuple[Key, ...] = (
    section("monitor", "track"),
    translated(
        "monitor.monitor_type",
        monitor,
        "track.trackers",
        "track.project",
        "track.group",
        default="tensorboard",
        reason="beside console and jsonl; wandb, mlflow and swanlab are packages of their own",
    ),
    section(ARGS, "track"),
    translated(f"{ARGS}.base_url", monitor, "track.arguments", default=None, reason="wandb's server"),
    _secret("api_key"),
    translated(
        f"{ARGS}.uri",
        monitor,
        "track.arguments",
        default="http://localhost:5000",
        reason="mlflow's tracking_uri",
    ),
    _secret("username"),
    _secret("password"),
    derived(
        "monitor.enable_ray_timeline",
        timeline,
        default=False,
        reason="timeline.json is always written, into the run's folder, also by a run that fails",
    ),
)

_SHAPING = "shaping rewards by statistics"
_PIPELINE = "data_processor.experience_pipeline"

SERVICES: tuple[Key, ...] = (
    section("service"),
    section("service.data_juicer"),
    coming("service.data_juicer.server_url", _JUICER, default=None),
    coming("service.data_juicer.auto_start", _JUICER, default=False),
    coming("service.data_juicer.port", _JUICER, default=None),
    section("data_processor"),
    section(_TASKS),
    coming(f"{_TASKS}.num_process", _JUICER, default=4),
    coming(f"{_TASKS}.operators", _JUICER, default=[]),
    coming(f"{_TASKS}.operators[].name", _JUICER, default=""),
    coming(f"{_TASKS}.operators[].args", _JUICER, default={}),
    *(
        coming(f"{_TASKS}.operators[].args.{key}", _JUICER, default=None)
        for key in ("api_or_hf_model", "min_score", "input_keys", "field_names")
    ),
    coming(f"{_TASKS}.inputs", _JUICER, default=[]),
    coming(f"{_TASKS}.target_fields", _JUICER, default=[]),
    section(_PIPELINE),
    translated(
        OPERATORS,
        operators,
        "algorithm.groups",
        default=[],
        reason="reward_filter, reward_std_filter; data_juicer, reward_shaping_mapper and others are coming",
    ),
    translated(f"{OPERATORS}[].name", operators, "algorithm.groups", default="", reason="which operator"),
    translated(f"{OPERATORS}[].args", operators, "algorithm.groups", default={}, reason="threshold"),
    coming(f"{OPERATORS}[].args.config_path", _JUICER, default=None),
    coming(f"{OPERATORS}[].args.reward_shaping_configs", _SHAPING, default=[]),
    *(
        coming(f"{OPERATORS}[].args.reward_shaping_configs[].{key}", _SHAPING, default=default)
        for key, default in (("stats_key", None), ("op_type", "ADD"), ("weight", 1.0))
    ),
)

LOG: tuple[Key, ...] = (
    section("log", "track"),
    translated(
        "log.level", log_level, "track.log_level", default="INFO", reason="of run.log and the console"
    ),
    derived(
        "log.group_by_node",
        one_log,
        default=False,
        reason="the run writes one log, run.log, whatever the machines of its parts",
    ),
)

_STUDIO = "a field of the config studio; in a file write"

GUI: tuple[Key, ...] = (
    coming("gui:train_batch_size", f"{_STUDIO} buffer.train_batch_size", default=96),
    coming("gui:_train_batch_size_per_gpu", f"{_STUDIO} buffer.train_batch_size", default=16),
    coming("gui:trainer_gpu_num", f"{_STUDIO} cluster.gpu_per_node", default=None),
    coming("gui:total_epochs", f"{_STUDIO} buffer.total_epochs", default=20),
)

MORE_SERVICES: tuple[Key, ...] = (
    translated(
        f"{ARGS}.*", monitor, "track.arguments", "track.tags", default={}, reason="arguments of swanlab"
    ),
    Key(
        name=f"{_TASKS}.operators[].args.api_key",
        status="coming",
        default=None,
        reason=_JUICER,
        translate=operator_secrets,
    ),
    coming(f"{_TASKS}.operators[].args.*", _JUICER, default={}),
    *(
        coming(f"{_TASKS}.{key}", _JUICER, default=default)
        for key, default in (("config_path", None), ("priority_weights", {}), ("top_k", -1), ("output", None))
    ),
    translated(
        f"{OPERATORS}[].args.*",
        operators,
        "algorithm.groups",
        default={},
        reason="threshold, 0 where it is not given",
    ),
    translated(
        f"{_PIPELINE}.save_input",
        record,
        "track.rollouts_every",
        default=True,
        reason="the record of the rollouts, as parquet",
    ),
    coming(f"{_PIPELINE}.input_save_path", "a record of the rollouts at a place of yours", default=None),
    coming(f"{_PIPELINE}.inputs", "further buffers of experiences", default={}),
    coming(f"{_PIPELINE}.output", "further buffers of experiences", default=None),
)
"""Keys that the document leaves to the source code."""
