"""Arrow tables as rows: only what JSON has."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc

from whet.data.parts import ArrowPart, FileRows, flaw
from whet.types import DataError


def arrow_rows(origin: str, table: pa.Table, limit: int | None) -> FileRows:
    """The first `limit` rows of a table. DataError for values that are no JSON."""
    for column in table.schema:
        if (fault := _not_json(column.type)) is not None:
            raise DataError(
                f"{origin}: column {column.name!r} holds {fault}. Drop or convert it, or give the rows with a "
                "`function`."
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
        return _has_strange_number(_once(values).field("values"))
    if _is_list(kind):
        return _has_strange_number(values.flatten())
    return pa.types.is_floating(kind) and pc.all(pc.is_finite(values)).as_py() is False


def decoded_bytes(values: pa.Array) -> int:
    """The memory of an array in which each row has its own copy of what a dictionary has once."""
    kind = values.type
    if pa.types.is_struct(kind) or _is_list(kind):
        parts = values.flatten()
        return sum(map(decoded_bytes, parts if isinstance(parts, list) else [parts]))
    if not pa.types.is_dictionary(kind):
        return int(values.nbytes)
    once = _once(values)
    texts = pa.types.is_string(kind.value_type) or pa.types.is_large_string(kind.value_type)
    if not texts:  # numbers: not larger than the places of them
        return int(values.nbytes)
    return pc.sum(pc.multiply(pc.binary_length(once.field("values")), once.field("counts"))).as_py() or 0


def _once(values: pa.DictionaryArray) -> pa.StructArray:
    """{values, counts}: each entry of the dictionary that is used, once. A few bytes may use a long one many times."""
    counted = pc.value_counts(values.indices.drop_null())
    used = values.dictionary.take(counted.field("values"))
    return pa.StructArray.from_arrays([used, counted.field("counts")], names=["values", "counts"])


def _is_list(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind))


def _not_json(kind: pa.DataType) -> str | None:
    """What is in `kind` that Python does not read as dict, list, str, int, float, bool or None."""
    t = pa.types
    if t.is_dictionary(kind) or _is_list(kind):
        return _not_json(kind.value_type)
    if t.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        counts = Counter(field.name for field in fields)
        if twice := [name for name, count in counts.items() if count > 1]:
            return f"a struct in which two fields have the name {twice[0]!r}"
        return next(filter(None, (_not_json(field.type) for field in fields)), None)
    plain = (
        t.is_null,
        t.is_boolean,
        t.is_integer,
        t.is_floating,
        t.is_string,
        t.is_large_string,
        t.is_string_view,
    )
    return None if any(test(kind) for test in plain) else f"{kind}, which is not a JSON type"
