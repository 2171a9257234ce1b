"""Records held against each other bit for bit: rollouts, batches and metrics of two runs, or of a run and its replay.

Two numbers are equal if their bits are: 0.0 and -0.0 differ, a NaN equals itself.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from whet.data.parquet import read_parquet
from whet.track.report import printable, shorten
from whet.track.written import ROLLOUTS
from whet.types import Json

Row = Mapping[str, Json]
Name = tuple[int, int]
"""Of a rollout in a step: the task's uid, and its index in the group."""

PER_TOKEN = ("token_ids", "mask", "versions", "logprobs", "sample_logprobs")
"""Columns of a rollout file with an entry for each token."""
SAMPLED = ("versions", "logprobs", "sample_logprobs")
"""Those of them that say something of sampled tokens only."""
ABSENT = "absent"
"""Stands for a value on the side that does not have it."""
_ORDER = (*PER_TOKEN, "strand_tokens", "text", "reward", "reward_parts", "advantage")
"""What is compared first, because the rest follows from it."""


@dataclass(frozen=True)
class ValueDifference:
    """Two values that should be equal."""

    field: str
    a: Json
    """What was recorded, or what the first run has."""
    b: Json
    """What was recomputed, or what the second run has."""
    rollout: Name | None = None
    strand: int | None = None
    place: int | None = None
    """Of a token in its strand, from 0."""

    @property
    def where(self) -> str:
        """'task 3, rollout 1, strand 0, token 17'; empty for what is of no rollout."""
        if self.rollout is None:
            return ""
        parts = [f"task {self.rollout[0]}", f"rollout {self.rollout[1]}"]
        if self.place is not None:
            parts += [f"strand {self.strand}"] * bool(self.strand) + [f"token {self.place}"]
        return ", ".join(parts)

    @property
    def values(self) -> tuple[str, str]:
        """Both for a screen; numbers that print alike in hexadecimal."""
        return pair(self.a, self.b)

    def to_json(self, sides: tuple[str, str] = ("a", "b")) -> dict[str, Json]:
        """sides: what the two are called. Floats also in hexadecimal."""
        out: dict[str, Json] = {"field": self.field, "rollout": list(self.rollout) if self.rollout else None}
        out |= {"strand": self.strand, "token": self.place}
        for side, value in zip(sides, (self.a, self.b)):
            out |= {side: value, f"{side}_hex": value.hex() if isinstance(value, float) else None}
        return out


@dataclass(frozen=True)
class ComparedColumn:
    """One field, everywhere that it was compared."""

    field: str
    count: int
    """Values that were compared."""
    differing: int
    first: ValueDifference | None

    @property
    def equal(self) -> int:
        return self.count - self.differing

    def to_json(self, sides: tuple[str, str] = ("a", "b")) -> dict[str, Json]:
        """sides: see `ValueDifference.to_json`."""
        first = self.first.to_json(sides) if self.first else None
        return {"field": self.field, "compared": self.count, "equal": self.equal, "first_difference": first}


def pair(a: Json, b: Json) -> tuple[str, str]:
    """Two values for a screen; two numbers that differ and print alike in hexadecimal."""
    shown = _shown(a), _shown(b)
    if shown[0] == shown[1] and isinstance(a, float) and isinstance(b, float) and not same(a, b):
        return a.hex(), b.hex()
    return shown


def _shown(value: Json) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return shorten(value if isinstance(value, str) else str(value))


# ---------------------------------------------------------------- values


def same(a: Json, b: Json) -> bool:
    """Whether two values are equal in every bit."""
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def differing(a: Sequence[Json], b: Sequence[Json]) -> list[int]:
    """Places where two lists of numbers, or of null, differ; those that only one of them has do."""
    both = min(len(a), len(b))
    x, y = _bits(a[:both]), _bits(b[:both])
    if x is not None and y is not None:
        found = np.flatnonzero(x != y).tolist()
    else:
        found = [n for n in range(both) if not same(a[n], b[n])]
    return [*found, *range(both, max(len(a), len(b)))]


def _bits(values: Sequence[Json]) -> np.ndarray | None:
    """[n] int64 that are equal where the numbers are; None for other values."""
    array = np.asarray(values) if len(values) else np.empty(0)
    if array.dtype.kind == "f":
        return array.astype(np.float64).view(np.int64)
    return array.astype(np.int64) if array.dtype.kind in "biu" else None


# ---------------------------------------------------------------- rollouts


def by_name(rows: Iterable[Row]) -> dict[Name, Row]:
    """Rows of a rollout or batch file by their rollout."""
    return {(row["uid"], row["index"]): row for row in rows}


def rollouts(a: Sequence[Row], b: Sequence[Row]) -> list[ComparedColumn]:
    """Each column of two rollout files, of the rollouts that both have; and which only one has."""
    mine, theirs = by_name(a), by_name(b)
    names = [name for name in mine if name in theirs]
    fields = dict.fromkeys([*_ORDER, *ROLLOUTS.names])
    known = [f for f in fields if f not in ("uid", "index") and all(f in r for r in (*a[:1], *b[:1]))]
    out = [_compared(field, [(name, mine[name], theirs[name]) for name in names]) for field in known]
    return [_presence(a, b), *out]


def _presence(a: Sequence[Row], b: Sequence[Row]) -> ComparedColumn:
    """Whether the rollouts are the same ones, in the same order, each as often."""
    mine, theirs = ([(row["uid"], row["index"]) for row in rows] for rows in (a, b))
    either = list(dict.fromkeys([*mine, *theirs]))
    counts = Counter(mine), Counter(theirs)
    odd = [name for name in either if counts[0][name] != counts[1][name]]
    first = None
    if odd:
        there = [{0: ABSENT, 1: "there"}.get(n := side[odd[0]], f"{n} times there") for side in counts]
        first = ValueDifference("rollouts", there[0], there[1], odd[0])
    elif mine != theirs:
        at = next(n for n, (x, y) in enumerate(zip(mine, theirs)) if x != y)
        odd, first = [mine[at]], ValueDifference("rollouts", list(mine[at]), list(theirs[at]), mine[at])
    return ComparedColumn("rollouts", len(either), len(odd), first)


def _compared(field: str, pairs: Sequence[tuple[Name, Row, Row]]) -> ComparedColumn:
    count, odd, first = 0, 0, None
    for name, a, b in pairs:
        if field in PER_TOKEN:
            told = _told(field, a, b)
            found = [at for at in differing(a[field], b[field]) if at in told]
            count += len(told)
        else:
            found = [] if same(a[field], b[field]) else [0]
            count += 1
        odd += len(found)
        if found and first is None:
            whole = ValueDifference(field, a[field], b[field], name)
            first = _at_token(field, name, a, b, found[0]) if field in PER_TOKEN else whole
    return ComparedColumn(field, count, odd, first)


def _told(field: str, a: Row, b: Row) -> Collection[int]:
    """Tokens of which a column says something, in either rollout."""
    if field in SAMPLED:
        return {n for row in (a, b) for n, sampled in enumerate(row["mask"]) if sampled}
    return range(max(len(a[field]), len(b[field])))


def _at_token(field: str, name: Name, a: Row, b: Row, at: int) -> ValueDifference:
    strand, place = token_place(a if at < len(a[field]) else b, at)
    return ValueDifference(field, _nth(a[field], at), _nth(b[field], at), name, strand, place)


def _nth(values: Sequence[Json], at: int) -> Json:
    return values[at] if at < len(values) else ABSENT


def token_place(row: Row, at: int) -> tuple[int, int]:
    """Strand of a token of a rollout, and its place there."""
    start = 0
    for strand, end in enumerate(accumulate(row["strand_tokens"])):
        if at < end:
            return strand, at - start
        start = end
    return len(row["strand_tokens"]) - 1, at


# ---------------------------------------------------------------- batches and metrics


def read_batch(path: Path) -> list[dict[str, Json]]:
    """The rows of a batch file."""
    rows: list[dict[str, Json]] = read_parquet(path).to_pylist()
    return rows


def batches(a: Sequence[Row], b: Sequence[Row]) -> list[ComparedColumn]:
    """Each column that two batch files have, of the rollouts that both have; what only one has, too: rollouts, and
    columns."""
    mine, theirs = by_name(a), by_name(b)
    names = [name for name in mine if name in theirs]
    either = dict.fromkeys(name for rows in (a[:1], b[:1]) for row in rows for name in row)
    fields = [f for f in either if f not in ("uid", "index")]
    out = [
        _column(f, [(n, mine[n].get(f, ABSENT), theirs[n].get(f, ABSENT)) for n in names], mine)
        for f in fields
    ]
    return [_presence(a, b), *out]


def _column(field: str, pairs: Sequence[tuple[Name, Json, Json]], rows: Mapping[Name, Row]) -> ComparedColumn:
    count, odd, first = 0, 0, None
    for name, a, b in pairs:
        lists = isinstance(a, list) and isinstance(b, list)
        found = differing(a, b) if lists else [0] * (not same(a, b))
        count += max(len(a), len(b)) if lists else 1
        odd += len(found)
        if found and first is None:
            first = ValueDifference(field, a, b, name)
            if lists and field.endswith("_N"):
                at = found[0]
                strand, place = token_place({"strand_tokens": rows[name].get("length_S", [len(a)])}, at)
                first = ValueDifference(field, _nth(a, at), _nth(b, at), name, strand, place)
    return ComparedColumn(field, count, odd, first)


def metrics(a: Row, b: Row) -> list[ValueDifference]:
    """The numbers of two lines of metrics.jsonl that differ, in the order of the first."""
    names = [name for name in dict.fromkeys([*a, *b]) if name not in ("stage", "step")]
    pairs = [(name, a.get(name, ABSENT), b.get(name, ABSENT)) for name in names]
    return [ValueDifference(printable(name), x, y) for name, x, y in pairs if not same(_plain(x), _plain(y))]


def _plain(value: Json) -> Json:
    """1 and 1.0 are written by one run or another for the same number."""
    return float(value) if isinstance(value, int | float) else value
