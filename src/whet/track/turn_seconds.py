"""How long each turn of a rollout took: a file for a step, beside what equal runs share (`record.SECONDS`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from whet.data.parquet import read_parquet
from whet.types import DataError, Rollout

Seconds = list[tuple[float | None, float | None]]
"""Of each reply of a rollout: sampled, environment."""

_LIST = pa.list_(pa.float64())
SCHEMA = pa.schema(
    [("uid", pa.int64()), ("index", pa.int32()), ("sampling_s", _LIST), ("environment_s", _LIST)]
)


def to_table(rollouts: Sequence[Rollout]) -> pa.Table:
    """A row for each rollout that has told its seconds."""
    told = [r for r in rollouts if r.seconds]
    columns = {
        "uid": [r.task.uid for r in told],
        "index": [r.index for r in told],
        "sampling_s": [[sampled for sampled, _ in r.seconds] for r in told],
        "environment_s": [[answered for _, answered in r.seconds] for r in told],
    }
    return pa.table(columns, schema=SCHEMA)


def read(path: Path) -> dict[tuple[int, int], Seconds]:
    """Those of a file, by (uid, index). DataError if it is none."""
    table = read_parquet(path)
    if not table.schema.equals(SCHEMA):
        raise DataError(f"{path} is not a file of seconds: expected the columns {', '.join(SCHEMA.names)}")
    return {
        (row["uid"], row["index"]): list(zip(row["sampling_s"] or (), row["environment_s"] or ()))
        for row in table.to_pylist()
    }
