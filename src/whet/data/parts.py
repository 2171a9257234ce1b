"""Rows in memory: Python dicts, or an Arrow table whose rows become Python only when they are read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Protocol

from whet.guard.foreign import shown
from whet.inputs import parse_json
from whet.types import DataError, Json

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Json]

_SURROGATE = re.compile("[\ud800-\udfff]")


class FileRows(Protocol):
    """The rows of one file (or generator), in order."""

    @property
    def origin(self) -> str: ...

    def __len__(self) -> int: ...

    def columns(self) -> set[str]:
        """Names of the columns that some row has."""
        ...

    def slice(self, start: int, stop: int, columns: Sequence[str] | None) -> list[Row]: ...

    def arrow(self, start: int, stop: int) -> pa.Table:
        """Rows start .. stop-1 as columns. Raises pyarrow's errors where the values of a column have no common type."""
        ...

    def cut(self, start: int, stop: int) -> FileRows:
        """Rows start .. stop-1; `where` still tells their places in the file."""
        ...

    def where(self, i: int) -> str: ...


@dataclass(frozen=True)
class ListPart:
    """Rows that are Python already. `numbers[i]` is the line, or the number of the row, for messages."""

    origin: str
    rows: Sequence[Row]
    unit: str = "row"
    numbers: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def columns(self) -> set[str]:
        return set().union(*self.rows)

    def slice(self, start: int, stop: int, columns: Sequence[str] | None) -> list[Row]:
        return list(self.rows[start:stop])

    def arrow(self, start: int, stop: int) -> pa.Table:
        import pyarrow as pa

        rows = self.rows[start:stop]
        names = dict.fromkeys(name for row in rows for name in row)
        return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})

    def cut(self, start: int, stop: int) -> ListPart:
        numbers = self.numbers or range(1, len(self.rows) + 1)
        return replace(self, rows=self.rows[start:stop], numbers=numbers[start:stop])

    def where(self, i: int) -> str:
        return f"{self.origin}, {self.unit} {self.numbers[i] if self.numbers else i + 1}"


@dataclass(frozen=True)
class ArrowPart:
    """Rows in an Arrow table."""

    origin: str
    table: pa.Table
    first: int = 0
    """Rows of the file before the table's."""

    def __len__(self) -> int:
        return self.table.num_rows

    def columns(self) -> set[str]:
        return set(self.table.column_names)

    def slice(self, start: int, stop: int, columns: Sequence[str] | None) -> list[Row]:
        names = self.table.column_names
        table = self.table if columns is None else self.table.select([n for n in names if n in columns])
        if not table.column_names:
            return [{} for _ in range(min(stop, len(self)) - start)]
        return table.slice(start, stop - start).to_pylist()

    def arrow(self, start: int, stop: int) -> pa.Table:
        return self.table.slice(start, stop - start)

    def cut(self, start: int, stop: int) -> ArrowPart:
        return replace(self, table=self.table.slice(start, stop - start), first=self.first + start)

    def where(self, i: int) -> str:
        return f"{self.origin}, row {self.first + i + 1}"


@dataclass(frozen=True)
class SourceRows:
    """All rows of one source, numbered from 0."""

    name: str
    """Label of the source: `Source.name`, or the file's stem, the task's or the function's name."""
    parts: tuple[FileRows, ...]

    def __len__(self) -> int:
        return sum(len(p) for p in self.parts)

    def columns(self) -> set[str]:
        """Names of the columns that some row has."""
        return set().union(*(part.columns() for part in self.parts))

    def row(self, i: int) -> Row:
        part, at = self._find(i)
        return part.slice(at, at + 1, None)[0]

    def where(self, i: int) -> str:
        """The file and the line or row number of row i, for messages."""
        part, at = self._find(i)
        return part.where(at)

    def slice(self, start: int, stop: int, columns: Sequence[str] | None = None) -> list[Row]:
        """Rows start .. stop-1; from Arrow only the named columns, other rows may hold more."""
        found = (part.slice(begin, end, columns) for part, begin, end in self._between(start, stop))
        return [row for rows in found for row in rows]

    def arrow(self, start: int, stop: int) -> pa.Table:
        """Rows start .. stop-1 as columns; a row has null where its file has no such column. Raises pyarrow's errors
        where the values of a column have no common type."""
        import pyarrow as pa

        found = [part.arrow(begin, end) for part, begin, end in self._between(start, stop)]
        return pa.concat_tables(found, promote_options="permissive")

    def cut(self, start: int, stop: int) -> SourceRows:
        """Rows start .. stop-1 alone, numbered from 0."""
        return replace(self, parts=tuple(p.cut(begin, end) for p, begin, end in self._between(start, stop)))

    def _between(self, start: int, stop: int) -> Iterator[tuple[FileRows, int, int]]:
        """The parts that rows start .. stop-1 lie in, and where in them."""
        first = 0
        for part in self.parts:
            begin, end = max(start - first, 0), min(stop - first, len(part))
            if begin < end:
                yield part, begin, end
            first += len(part)

    def _find(self, i: int) -> tuple[FileRows, int]:
        for part in self.parts:
            if i < len(part):
                return part, i
            i -= len(part)
        raise IndexError(i)


def loads(text: bytes, where: str) -> Json:
    """JSON from a file. Raises DataError that names `where`."""
    value = parse_json(text, where, DataError)
    if b"\\ud" in text.lower() and (fault := flaw(value)) is not None:
        raise DataError(f"{where}: {fault}")
    return value


def json_copy(value: Json, where: str) -> Json:
    """The value after it is written as JSON and read back."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as e:
        raise DataError(f"{where} cannot be written as JSON: {e}") from e


def as_row(value: Json, where: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row must be an object with named columns; found {describe(value)}.")
    return value


def flaw(value: object, path: str = "") -> str | None:
    """'column x.0 holds a set' for the first value inside that is not JSON (or not Unicode), else None."""
    if type(value) is float and not isfinite(value):
        return (
            f"column {path.lstrip('.')} holds {value}, which is not a JSON value; write null, or leave it out"
        )
    if value is None or type(value) in (int, float, bool):
        return None
    if type(value) is str:
        half = not value.isascii() and _SURROGATE.search(value)
        return (
            f"column {path.lstrip('.')} holds half of a surrogate pair, which is not valid text"
            if half
            else None
        )
    if type(value) is list:
        return next(filter(None, (flaw(v, f"{path}.{i}") for i, v in enumerate(value))), None)
    if type(value) is dict:
        if odd := [k for k in value if type(k) is not str]:
            return f"column {path.lstrip('.') or 'names'} has the key {odd[0]!r}"
        return next(filter(None, (flaw(v, f"{path}.{k}") for k, v in value.items())), None)
    return f"column {path.lstrip('.')} holds {describe(value)}"


def describe(value: object) -> str:
    return f"a {type(value).__name__} ({shown(value, 60)})"
