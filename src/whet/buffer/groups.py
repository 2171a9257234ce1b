"""A group of rollouts as bytes: one Arrow IPC stream, a row a strand. Every float comes back to the bit.

8 rollouts of 300 tokens are 49 kB. Anything that reads Arrow can look into it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pyarrow as pa

from whet.types import (
    TOKEN_TYPES,
    ExpertIds,
    Group,
    Json,
    Message,
    Rollout,
    Strand,
    Task,
    Turn,
    WhetError,
)

_TOKENS = pa.schema({name: pa.list_(pa.from_numpy_dtype(dtype)) for name, dtype in TOKEN_TYPES.items()})
_REST = tuple(f.name for f in fields(Rollout) if f.name not in ("strands", "task", "seconds"))


def encode(group: Group) -> bytes:
    """The group's rollouts, which share its task."""
    rest = {
        "task": group.task.to_json(),
        "rollouts": [
            {name: getattr(r, name) for name in _REST}
            | {"strands": [s.turns for s in r.strands], "messages": [m.to_json() for m in r.messages]}
            for r in group.rollouts
        ],
    }
    strands = [s for r in group.rollouts for s in r.strands]
    ends = np.cumsum([0, *(len(s.token_ids) for s in strands)], dtype=np.int32)
    columns = [
        pa.ListArray.from_arrays(ends, _joined([getattr(s, name) for s in strands], dtype))
        for name, dtype in TOKEN_TYPES.items()
    ]
    schema = _TOKENS
    if any(s.experts is not None for s in strands):
        columns.append(_experts(strands))
        schema = schema.append(pa.field("experts", columns[-1].type))
    rows = pa.RecordBatch.from_arrays(
        columns, schema=schema.with_metadata({"rest": json.dumps(rest, default=asdict)})
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return bytes(sink.getvalue().to_pybytes())


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _experts(strands: Sequence[Strand]) -> pa.Array:
    """`Strand.experts` of each: for each token a list of layers, each a list of experts; null where there are none."""
    given = [s.experts for s in strands if s.experts is not None]
    _, layers, experts = given[0].shape
    values = np.concatenate(given, axis=None)
    of_layer = pa.FixedSizeListArray.from_arrays(pa.array(values), experts)
    of_token = pa.FixedSizeListArray.from_arrays(of_layer, layers)
    ends = np.cumsum([0, *(0 if s.experts is None else len(s.experts) for s in strands)], dtype=np.int32)
    absent = [s.experts is None for s in strands]
    return pa.ListArray.from_arrays(ends, of_token, mask=pa.array(absent))


def _read_experts(column: pa.Array) -> list[ExpertIds | None]:
    """What `_experts` wrote. ValueError for another column."""
    inner: list[pa.DataType] = [column.type]
    for kind in (pa.types.is_list, pa.types.is_fixed_size_list, pa.types.is_fixed_size_list):
        if not kind(inner[-1]):
            raise ValueError(f"not a group of rollouts: its experts are {column.type}")
        inner.append(inner[-1].value_type)
    if inner[-1] not in (pa.uint8(), pa.int16()):
        raise ValueError(f"not a group of rollouts: its experts are {column.type}")
    layers, experts = inner[1].list_size, inner[2].list_size
    values = column.values.flatten().flatten().to_numpy(zero_copy_only=False).reshape(-1, layers, experts)
    spans = zip(column.offsets.to_numpy()[:-1], column.offsets.to_numpy()[1:], column.is_valid().tolist())
    return [values[start:end] if valid else None for start, end, valid in spans]


def decode(data: bytes) -> Group:
    """The group that `encode` was given. Also reads what was written before there were strands: a row a rollout, and
    by 0.1 with wider numbers and without turns.

    Raises ValueError, TypeError or LookupError for bytes that are no group.
    """
    try:
        with pa.ipc.open_stream(data) as reader:
            rows = reader.read_next_batch()
        rows.validate(full=True)  # offsets that lead elsewhere would be read as they are
    except (pa.ArrowException, OSError, StopIteration) as e:  # arrow has an OSError, too
        raise ValueError(f"not a group of rollouts: {e}") from e
    rest = json.loads(rows.schema.metadata[b"rest"])
    task = Task.from_json(rest["task"])
    tokens = {
        name: [row.values.to_numpy(zero_copy_only=False) for row in rows.column(name)] for name in TOKEN_TYPES
    }
    if "experts" in rows.schema.names:
        tokens["experts"] = _read_experts(rows.column("experts"))
    strands = iter([dict(zip(tokens, arrays)) for arrays in zip(*tokens.values(), strict=True)])
    rollouts = [_rollout(task, row, strands) for row in rest["rollouts"]]
    if left := len(list(strands)):
        raise ValueError(f"not a group of rollouts: {left} strands belong to none")
    return Group(task, tuple(rollouts))


def _rollout(task: Task, row: dict[str, Json], strands: Iterator[dict[str, np.ndarray]]) -> Rollout:
    """A rollout and the turns of its strands, with the tokens of as many strands as it has."""
    before = row.pop("turns", ())  # of the only strand, where a row was a rollout
    made = [
        Strand(turns=tuple(Turn(**turn) for turn in turns), **_next(strands))
        for turns in row.pop("strands", (before,))
    ]
    said = tuple(Message.from_json(message) for message in row.pop("messages", ()))
    return Rollout(task=task, strands=tuple(made), messages=said, **row)


def _next(strands: Iterator[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    if (tokens := next(strands, None)) is None:
        raise ValueError("not a group of rollouts: the tokens of a strand are missing")
    return tokens


def checked(data: bytes | None, *, uid: int, checksum: int, where: str) -> Group:
    """`decode`, of bytes that are those that were written. Raises WhetError if they are not."""
    if data is None or zlib.crc32(data) != checksum:
        what = "is missing" if data is None else "has changed since it was written (its checksum differs)"
        raise WhetError(
            f"{where} is damaged: the group of task {uid} {what}; restart with an empty store from the last "
            "checkpoint"
        )
    return decode(data)


def oldest_version(group: Group) -> int:
    """The oldest policy version of a sampled token; -1 if nothing was sampled."""
    return min((v for r in group.rollouts for v in r.sampled_versions), default=-1)


def restored(value: bytes | Json) -> Group:
    """A group of a checkpoint: `decode`, or the JSON that 0.1 wrote, which this release reads for the last time."""
    if isinstance(value, bytes):
        return decode(value)
    rows = value["rollouts"] if isinstance(value, dict) else value
    task = Task.from_json(value["task"] if isinstance(value, dict) else rows[0]["task"])
    return Group(task, tuple(Rollout.one_strand(**{**row, "task": task}) for row in rows))


def write(path: Path, groups: Sequence[bytes]) -> None:
    """A file of encoded groups, a row each."""
    table = pa.table({"group": pa.array(groups, pa.large_binary())})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def read(path: Path) -> list[bytes]:
    """What `write` was given. Raises OSError or ValueError for another file."""
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
            table.validate(full=True)  # offsets that lead elsewhere would be read as they are
            return list(table["group"].to_pylist())
    except (pa.ArrowException, KeyError) as e:
        raise ValueError(f"not a file of groups: {e}") from e
