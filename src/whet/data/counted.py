"""How many rows a plan finds in the training data: of files that are here and are counted in a moment, and of rows in
the config, and which files are not here. Data elsewhere is not fetched, and functions are not called."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from whet.config.evaluation import trains
from whet.config.plan import Plan, total_steps
from whet.config.schema import SourceConfig
from whet.data.files import find_files, is_here
from whet.data.rows import read_rows
from whet.inputs import MIB
from whet.types import DataError

MOST_BYTES = 64 * MIB
"""Of files of one source: more would take a plan seconds."""


def told(plans: Sequence[Plan]) -> Iterator[str]:
    """A line for each stage whose training rows can be counted, and what follows from their number."""
    for plan in plans:
        counts = [count(source) for source in plan.cfg.data.train] if trains(plan.cfg) else []
        if not counts or None in counts:
            continue
        rows, drawn = sum(n or 0 for n in counts), plan.sampled_tasks_per_step
        each = f" of {len(counts)} sources" if len(counts) > 1 else ""
        if rows < drawn and plan.train.drop_last is True:
            follows = f"a step takes {drawn} tasks, so with train.drop_last=true an epoch has no step, and the run ends"
        elif rows < drawn:
            follows = f"a step takes {drawn} tasks, so it has some of them several times"
        elif plan.total_steps is None:
            most = total_steps(plan.train, rows, tasks=drawn)
            follows = f"{plan.train.epochs:g} epochs of them have at most {most} steps of {drawn} tasks"
        else:
            follows = (
                f"{plan.steps} steps of {drawn} tasks pass them {plan.steps * drawn / rows:.3g} times or more"
            )
        yield f"stage {plan.name}: {rows} training rows{each}, before a run leaves any out; {follows}"


def absent(plans: Sequence[Plan]) -> Iterator[str]:
    """A line for each source whose files are not on this machine, in the words of the run that would read them."""
    for plan in plans:
        data = plan.cfg.data
        learned = {"data.train": data.train, "data.demonstrations": data.demonstrations}
        for key, sources in {**(learned if trains(plan.cfg) else {}), "data.eval": data.eval}.items():
            for number, source in enumerate(sources):
                if source.path is None or _is_elsewhere(source.path) or is_here(source.path):
                    continue
                try:
                    find_files(source.path, subset=source.subset, split=source.split)
                except DataError as error:
                    yield f"stage {plan.name}: {key}[{number}].path: {error}"


def _is_elsewhere(path: str | tuple[str, ...]) -> bool:
    """Whether a run fetches one of these files first."""
    return any("://" in each for each in ((path,) if isinstance(path, str) else path))


def count(source: SourceConfig) -> int | None:
    """The rows of a source; None where they are not known yet, or cannot be read: the run says why."""
    try:
        known = source.rows is not None or (source.path is not None and _is_small(source.path, source))
        return len(read_rows(source)) if known else None
    except (DataError, OSError):
        return None


def _is_small(path: str | tuple[str, ...], source: SourceConfig) -> bool:
    """Whether the files of a source are here, and not too large to be read in a moment."""
    if not is_here(path):
        return False
    files = find_files(path, subset=source.subset, split=source.split)
    return sum(map(_bytes, files)) <= MOST_BYTES


def _bytes(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    return sum(os.path.getsize(Path(at, name)) for at, _, names in os.walk(path) for name in names)
