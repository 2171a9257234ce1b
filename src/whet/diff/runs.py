"""Two run directories held against each other: configs, environments, and the first step at which their records part.

Only what both have recorded is compared. Two numbers are equal if their bits are (`track.compare`).
"""

from __future__ import annotations

import filecmp
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.config.resuming import Change, changes
from whet.track import compare
from whet.track.compare import ComparedColumn, ValueDifference
from whet.track.files import reading
from whet.track.manifest import other_arithmetic
from whet.track.metrics import is_evaluation
from whet.track.overview import Lines, RunRecord, read
from whet.track.written import read_rollouts
from whet.types import DataError, Json

Key = tuple[str, int, str]
"""Of a line of metrics.jsonl: stage, step, and the folder of its replies."""
Line = dict[str, Json]
Row = tuple[str, Json, Json]
"""A name, and its value in each run."""

ABOUT = ("python", "platform", "cpu", "cores", "host")
"""Entries of a start in manifest.json that are compared as they are."""
MAPS = ("packages", "arithmetic", "environment")
"""Entries that are objects."""
ELSEWHERE = ("run_dir",)
"""Keys that differ in any two runs."""


@dataclass(frozen=True)
class Parting:
    """The first step at which two records differ."""

    stage: str
    step: int
    folder: str
    """`rollouts`, or `eval` where it is an evaluation."""
    metrics: Sequence[ValueDifference]
    rollouts: Sequence[ComparedColumn]
    """Columns that differ of what was sampled in the step, if both have recorded it."""

    @property
    def first(self) -> ValueDifference | None:
        """The first rollout, and the token in it, that differs: of the columns that others follow from."""
        found = {each.field: each.first for each in self.rollouts if each.first is not None}
        of_tokens = [found[name] for name in compare.PER_TOKEN if name in found]
        return min(of_tokens, key=_place) if of_tokens else next(iter(found.values()), None)


def _place(found: ValueDifference) -> tuple[int, int, int, int]:
    task, index = found.rollout or (0, 0)
    return task, index, found.strand or 0, found.place or 0


@dataclass(frozen=True)
class RunDiff:
    """What `whet diff` prints."""

    a: Path
    b: Path
    config: Sequence[Change]
    environment: Sequence[Row]
    code: Sequence[Row]
    """Digests of the user's code by file."""
    data: Sequence[Row]
    """Digests of data by file."""
    parting: Parting | None
    equal_to: tuple[str, int] | None
    """Stage and step up to which all that both have recorded is equal. None: the first step differs, or no step is in
    both."""
    longer: Mapping[str, int]
    """Lines of metrics.jsonl that only one run has, by its path."""
    only: Mapping[str, Sequence[str]]
    """Names of numbers that the lines of only one run have, by its path. They are not compared."""
    uncompared: int
    """Lines that both have, and whose rollouts only one has, up to the first that differs."""
    why: Sequence[str]
    """Causes that the records tell of."""

    @property
    def equal(self) -> bool:
        return self.parting is None and self.equal_to is not None


def compared(a: Path, b: Path) -> RunDiff:
    """Raises DataError if one is no run directory, or a file in it was not written by a run."""
    one, other = read(a), read(b)
    with reading(f"config.yaml of {a} or {b}", error=DataError, advice="put it back from a copy"):
        config = [c for c in changes(one.config, other.config) if c.key not in ELSEWHERE]
    shared, only_a, only_b = shared_lines(one.metrics, other.metrics)
    parting, equal_to, uncompared = None, None, 0
    for key, mine, theirs in shared:
        parting = _parting(one, other, key, mine, theirs)
        if parting is not None:
            break
        equal_to = key[:2]
        uncompared += len({file.exists() for file in _files(one, other, key)}) > 1
    code, data = (_rows(one.manifest, other.manifest, name) for name in ("code_sha256", "data_sha256"))
    if sorted(_values(one, "data_sha256")) == sorted(_values(other, "data_sha256")):
        data = []  # the same files at other places
    only = {str(a): only_a, str(b): only_b}
    longer = {str(run.path): len(run.metrics) - len(shared) for run in (one, other)}
    return RunDiff(
        a=a,
        b=b,
        config=config,
        environment=_environment(one.manifest, other.manifest),
        code=code,
        data=data,
        parting=parting,
        equal_to=equal_to,
        longer={path: count for path, count in longer.items() if count},
        only={path: names for path, names in only.items() if names},
        uncompared=uncompared,
        why=[] if parting is None else _why(one, other, parting, config, code, data),
    )


def shared_lines(one: Lines, other: Lines) -> tuple[list[tuple[Key, Line, Line]], list[str], list[str]]:
    """Lines of metrics.jsonl that two runs have, in the order of the first, each with the numbers that lines of both
    have; and the names of numbers that only those of the first, and of the second, have."""
    beside = {_key(line): line for line in other}
    pairs = [(_key(line), line, beside[_key(line)]) for line in one if _key(line) in beside]
    first = dict.fromkeys(name for _, mine, _ in pairs for name in mine)
    second = dict.fromkeys(name for _, _, theirs in pairs for name in theirs)

    def common(line: Line) -> Line:
        return {n: value for n, value in line.items() if n in first and n in second}

    shared = [(key, common(mine), common(theirs)) for key, mine, theirs in pairs]
    return shared, [n for n in first if n not in second], [n for n in second if n not in first]


def _key(line: Line) -> Key:
    return line["stage"], line["step"], "eval" if is_evaluation(line) else "rollouts"


def _files(one: RunRecord, other: RunRecord, key: Key) -> list[Path]:
    """Of the rollouts of a line, in each of both."""
    stage, step, folder = key
    return [run.path / folder / f"{stage}-step-{step:06d}.parquet" for run in (one, other)]


def _parting(one: RunRecord, other: RunRecord, key: Key, mine: Line, theirs: Line) -> Parting | None:
    """How the records of one line differ. None: they do not."""
    stage, step, folder = key
    metrics, files = compare.metrics(mine, theirs), _files(one, other, key)
    rollouts: list[ComparedColumn] = []
    if all(file.exists() for file in files) and not filecmp.cmp(files[0], files[1], shallow=False):
        found = compare.rollouts(*(read_rollouts(file) for file in files))
        rollouts = [each for each in found if each.differing]
    return Parting(stage, step, folder, metrics, rollouts) if metrics or rollouts else None


# ---------------------------------------------------------------- what they were made of


def _values(run: RunRecord, name: str) -> list[Json]:
    return list((run.manifest.get(name) or {}).values())


def _rows(a: Mapping[str, Json], b: Mapping[str, Json], name: str) -> list[Row]:
    """Entries of an object of manifest.json that differ."""
    mine, theirs = a.get(name) or {}, b.get(name) or {}
    either = dict.fromkeys([*mine, *theirs])
    return [(key, mine.get(key), theirs.get(key)) for key in either if mine.get(key) != theirs.get(key)]


def _environment(a: Mapping[str, Json], b: Mapping[str, Json]) -> list[Row]:
    plain = [(name, a.get(name), b.get(name)) for name in ABOUT if a.get(name) != b.get(name)]
    inner = [(f"{name}.{key}", x, y) for name in MAPS for key, x, y in _rows(a, b, name)]
    return plain + inner


# ---------------------------------------------------------------- why


def _why(
    one: RunRecord,
    other: RunRecord,
    parting: Parting,
    config: Sequence[Change],
    code: Sequence[Row],
    data: Sequence[Row],
) -> list[str]:
    """Causes that the records tell of, the surest first; which of them it was is not known."""
    out = [
        f"config: {c} is known to change numbers" for c in _of(parting, one, config, "identity", "numbers")
    ]
    out += [f"code: {file} differs" for file, _, _ in code]
    out += [f"data: {file} differs" for file, _, _ in data]
    for run in (one, other):
        out += [
            f"{run.path} was continued with a different {c['key']} after step {c['step']} of stage {c['stage']!r}"
            for c in run.changes
            if c["kind"] == "branch" and _before(run, c, parting)
        ]
    if told := other_arithmetic(one.manifest, other.manifest):
        out.append(f"arithmetic: {told.partition(': ')[2].partition('. From')[0]}")
    versions = [((run.manifest.get("packages") or {}).get("whet")) for run in (one, other)]
    if versions[0] != versions[1]:
        out.append(f"whet: {versions[0]} -> {versions[1]}")
    out += [
        f"config: {c} changes the order of sums, so bits may differ"
        for c in _of(parting, one, config, "rounding")
    ]
    return out


def _of(parting: Parting, run: RunRecord, config: Sequence[Change], *kinds: str) -> list[Change]:
    """Changes of these kinds that the stage of the parting, or one before it, can have felt."""
    felt = run.stages[: run.stages.index(parting.stage) + 1]
    return [c for c in config if c.kind in kinds and (c.stage is None or c.stage in felt)]


def _before(run: RunRecord, change: Mapping[str, Json], parting: Parting) -> bool:
    stages = run.stages
    if change["stage"] not in stages:
        return True
    return (stages.index(change["stage"]), change["step"]) < (stages.index(parting.stage), parting.step)
