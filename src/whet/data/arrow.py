"""Arrow tables as rows: only what JSON has."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from whet.data.parts import ArrowPart, FileRows, flaw
from whet.types import DataError


def arrow_rows(origin: str, table: pa.Table, limit: int | None) -> FileRows:
    """The first `limit` rows of a table. DataError for values that are no JSON."""
    for column in table.schema:
        kind = _not_json(column.type)
        if kind is not None:
            raise DataError(
                f"{origin}: column {column.name!r} holds {kind}, which is not a JSON type. Drop or convert "
                "it, or give the rows with a `function`."
            )
    part = ArrowPart(origin, table.slice(0, limit))
    for column in part.table.schema.names:
        if any(map(_has_strange_number, part.table.column(column).chunks)):
            faults = (flaw(row) for i in range(len(part)) for row in part.slice(i, i + 1, [column]))
            number, fault = next((n, said) for n, said in enumerate(faults, 1) if said)
            raise DataError(f"{origin}, row {number}: {fault}")
    return part


def _has_strange_number(values: pa.Array) -> bool:
    """NaN or infinity, at any depth: JSON has neither, and a run keeps its tasks as JSON."""
    kind = values.type
    if pa.types.is_struct(kind):
        return any(map(_has_strange_number, values.flatten()))
    if pa.types.is_dictionary(kind):
        return _has_strange_number(values.dictionary.take(values.indices))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _has_strange_number(values.flatten())
    return pa.types.is_floating(kind) and pc.all(pc.is_finite(values)).as_py() is False


def _not_json(kind: pa.DataType) -> str | None:
    """The first type inside `kind` that Python does not read as dict, list, str, int, float, bool or None."""
    t = pa.types
    if t.is_dictionary(kind) or t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        return _not_json(kind.value_type)
    if t.is_struct(kind):
        return next(filter(None, (_not_json(kind.field(i).type) for i in range(kind.num_fields))), None)
    plain = (
        t.is_null,
        t.is_boolean,
        t.is_integer,
        t.is_floating,
        t.is_string,
        t.is_large_string,
        t.is_string_view,
    )
    return None if any(test(kind) for test in plain) else str(kind)
