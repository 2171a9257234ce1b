"""Trinity-RFT's monitor, log, data services and studio fields."""

from __future__ import annotations

from collections.abc import Mapping

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.values import entries, given, known_as, text
from whet.dialects.typed import flag
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
            raise NotSupportedYet(
                f"{_TASKS}.operators[{n}].args.api_key: {_JUICER} are coming, not built yet."
            )
    return {}


def log_level(values: Values) -> Mapping[str, Json]:
    """DEBUG is debug."""
    return {"track.log_level": str(values["log.level"]).lower()}


def record(values: Values) -> Mapping[str, Json]:
    """save_input: the record of the rollouts."""
    return {"track.rollouts_every": 1 if values["data_processor.experience_pipeline.save_input"] else 0}


# ---------------------------------------------------------------- rows
