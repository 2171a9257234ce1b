"""Changes of a run that was resumed from a checkpoint: logged in run.log, kept in manifest.json under `changes`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from whet.config.resuming import Change, free_changes
from whet.track.files import reading
from whet.track.manifest import other_arithmetic, other_data
from whet.track.record import RunDirectory
from whet.track.written import read_config
from whet.types import DataError, Json

log = logging.getLogger(__name__)


def since_last_start(run_dir: Path, now: Json) -> list[Change]:
    """The keys that may change, whose values differ between a config and the config of the run's last start."""
    try:
        before = read_config(run_dir)
        with reading(run_dir / "config.yaml", error=DataError, advice="compare it with a copy"):
            return free_changes(before, now) if before else []
    except DataError as error:
        log.warning("changes since the last start are not logged: %s", error)
        return []


def write_down(
    directory: RunDirectory, found: Sequence[Change], state: Json, *, unasked: Sequence[Change] = ()
) -> None:
    """Changes with which the run goes on from a checkpoint in this state. One that was made at a later place, or here
    and is made again, is no more part of the run. unasked: those that no setting tells of; the display shows them."""
    place = state["stage_name"], state["step"]
    for change in found:
        log.info("resuming with %s%s", change, said_of(change, place))
    for change in unasked:
        log.warning("resuming with changed %s%s", change, said_of(change, place))
    directory.write_changes(
        [row(change, *place) for change in (*found, *unasked)], since=(state["stage"], state["step"])
    )


def said_of(change: Change, place: tuple[str, int]) -> str:
    """The effect of a change on the results of the run."""
    if change.kind == "numbers":
        return f": a branch of the run, from step {place[1]} of stage {place[0]!r}"
    if change.kind == "rounding":
        return "; the order of sums changes, so bits may differ from here on"
    return ""


def row(change: Change, stage: str, step: int) -> dict[str, Json]:
    """As manifest.json has it."""
    kind = "branch" if change.kind == "numbers" else "free"
    return {
        "stage": stage, "step": step, "key": change.key, "old": change.old, "new": change.new, "kind": kind
    }  # fmt: skip


def other_rows(
    directory: RunDirectory, sources: Sequence[tuple[str, str, str]], stage: str, step: int
) -> None:
    """Files of the same name that hold other rows than before: a branch, like another key. sources: name, digests."""
    if sources:
        where = {"stage": stage, "step": step, "kind": "branch"}
        directory.write_changes(
            [{**where, "key": f"rows of {n!r}", "old": a, "new": b} for n, a, b in sources]
        )


def compare_starts(directory: RunDirectory, now: Mapping[str, Json]) -> None:
    """A run that resumes on another machine, or with other data files: whether its results may differ, and why."""
    if not (before := directory.last_start):
        return
    if told := other_arithmetic(before, now):
        log.warning("%s", told)
    for file in other_data(before, now):
        log.warning(
            "data %s has changed since the previous start. A checkpoint knows the prompts, answers and replies of the "
            "training rows alone: held-out rows, and other columns, which rewards and environments read, may differ",
            file,
        )
