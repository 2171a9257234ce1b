"""The trackers that come with whet, by name, read without importing any of them. A line of `trackers.tsv` adds one.

A tracker of yours is a class, named in `track.trackers` as 'package.module:Class' or 'path/to/file.py:Class'. It is
called with `Sinks` (the config, the run directory, where the run goes on from) and its `track.arguments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whet.config.schema import Config
from whet.tables import lines


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


def _row(line: Mapping[str, str]) -> TrackerRow:
    return TrackerRow(
        about=line["about"],
        at=line["at"],
        package=line["package"],
        lists_runs=bool(line["lists_runs"]),
        shows_rollouts=bool(line["shows_rollouts"]),
        takes=None if line["takes"] == "init" else tuple(line["takes"].split()),
        secret=line["secret"],
    )


TRACKERS: Mapping[str, TrackerRow] = {
    line["name"]: _row(line) for line in lines("whet.config", "trackers.tsv")
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
