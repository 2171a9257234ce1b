"""The trackers that come with whet, by name, read without importing any of them: one row adds one.

A tracker of yours is a class, named in `track.trackers` as 'package.module:Class' or 'path/to/file.py:Class'. It is
called with `Sinks` (the config, the run directory, where the run goes on from) and its `track.arguments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whet.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class TrackerRow:
    """What a config may say of a tracker."""

    about: str
    at: str = ""
    """Its class, as 'module:name'. '' for the console, which the run shows itself."""
    package: str = ""
    """What must be installed."""
    lists_runs: bool = False
    """It lists runs of many machines under a project, and may send numbers and the config away."""
    shows_rollouts: bool = False
    """It takes text, so it can show rollouts (`track.log_samples`)."""
    takes: tuple[str, ...] | None = ()
    """Arguments that it has in `track.arguments`; None: those of its package's own init."""
    secret: str = ""
    """The environment variable of its key."""


TRACKERS: Mapping[str, TrackerRow] = {
    "console": TrackerRow(about="The live display; without it a line a step."),
    "jsonl": TrackerRow(
        about="metrics.jsonl and timings.jsonl; always written.", at="whet.track.trackers:Jsonl"
    ),
    "tensorboard": TrackerRow(
        about="Event files in RUN/tensorboard.",
        at="whet.track.trackers:TensorBoard",
        package="tensorboard",
        shows_rollouts=True,
    ),
    "wandb": TrackerRow(
        about="Weights & Biases.",
        at="whet.track.remote:Wandb",
        package="wandb",
        lists_runs=True,
        shows_rollouts=True,
        takes=None,
        secret="WANDB_API_KEY",
    ),
    "mlflow": TrackerRow(
        about="An MLflow server, or RUN/mlflow.db.",
        at="whet.track.remote:Mlflow",
        package="mlflow",
        lists_runs=True,
        shows_rollouts=True,
        takes=("tracking_uri",),
        secret="MLFLOW_TRACKING_PASSWORD",
    ),
    "swanlab": TrackerRow(
        about="SwanLab.",
        at="whet.track.remote:SwanLab",
        package="swanlab",
        lists_runs=True,
        shows_rollouts=True,
        takes=None,
        secret="SWANLAB_API_KEY",
    ),
    "trackio": TrackerRow(
        about="trackio: a local dashboard, a server or a Space of Hugging Face.",
        at="whet.track.remote:Trackio",
        package="trackio",
        lists_runs=True,
        shows_rollouts=True,
        takes=None,
        secret="HF_TOKEN",
    ),
}

LISTS = tuple(name for name, row in TRACKERS.items() if row.lists_runs)


def lists_runs(cfg: Config) -> bool:
    """A tracker reads project, group and tags: one of those in `LISTS`, or a class of yours may."""
    return any(name in LISTS or ":" in name for name in cfg.track.trackers)


def shows_rollouts(cfg: Config) -> bool:
    """A tracker can show rollouts: one that comes with whet, or a class of yours may."""
    return any(
        ":" in name or (name in TRACKERS and TRACKERS[name].shows_rollouts) for name in cfg.track.trackers
    )
