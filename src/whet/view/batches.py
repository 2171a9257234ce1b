"""What the batches of a run say of each token, where it records them (track.batches_interval)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from whet.data.parquet import read_parquet, read_schema
from whet.track.written import list_steps
from whet.types import DataError, Json
from whet.view.source import Shown

_FLOATS = pa.list_(pa.float32())
COLUMNS: dict[str, pa.DataType] = {
    "uid": pa.int64(),
    "index": pa.int32(),
    "token_ids_N": pa.list_(pa.int64()),
    "mask_N": pa.list_(pa.bool_()),
    "logp_sample_N": _FLOATS,
    "logp_old_N": _FLOATS,
    "logp_ref_N": _FLOATS,
    "adv_N": _FLOATS,
    "entropy_N": _FLOATS,
}
"""The fields of `Batch` that are read; those with `_FLOATS` may be absent."""

PER_TOKEN = {
    "trainer_logprobs": "logp_old_N",
    "reference_logprobs": "logp_ref_N",
    "advantages": "adv_N",
    "entropy": "entropy_N",
}
"""What a batch knows beside what is in a rollout file: the name that the page gets, and the column."""


def read_batch(path: Path) -> pa.Table:
    """`COLUMNS` of a file of batches, as far as it has them. DataError if no run writes it."""
    schema = read_schema(path)
    for name, kind in COLUMNS.items():
        if name not in schema.names and kind != _FLOATS:
            raise DataError(f"{path} is not a file of batches: it has no column {name}; is it damaged?")
        if name in schema.names and not schema.field(name).type.equals(kind):
            raise DataError(f"{path}: {name} is {schema.field(name).type}, expected {kind}; is it damaged?")
    return read_parquet(path, COLUMNS)


def batch_files(run: Shown, stage: str) -> dict[int, Path]:
    """By step."""
    return {step: path for name, step, path in list_steps(run.path / "batches") if name == stage}


def per_token(run: Shown, stage: str, step: int, row: dict[str, Json]) -> dict[str, Json]:
    """Lists for the tokens of a rollout, by the names of `PER_TOKEN`; nothing if its batch is not recorded."""
    path = batch_files(run, stage).get(step)
    if path is None:
        return {}
    table = run.batch(read_batch, path)
    uid, index = (table[name].to_numpy() for name in ("uid", "index"))
    for at in np.flatnonzero((uid == row["uid"]) & (index == row["index"])).tolist():
        if table["token_ids_N"][at].as_py() == row["token_ids"]:
            known = {name: column for name, column in PER_TOKEN.items() if column in table.column_names}
            return {name: table[column][at].as_py() for name, column in known.items()}
    return {}
