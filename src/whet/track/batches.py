"""What a step trained on, token by token, as a table: every field of the batch by its own name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pyarrow as pa
from torch import Tensor

from whet.batch import Batch
from whet.types import Group

_REDUNDANT = ("row_N",)


def to_table(batch: Batch, groups: Sequence[Group]) -> pa.Table:
    """A row for each rollout: uid and index, [R] fields as numbers, [N] fields as lists over its tokens.

    groups: what the batch was packed from.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    offsets = np.concatenate([[0], batch.length_R.cpu().numpy().cumsum()]).astype(np.int32)
    columns = {
        "uid": pa.array([r.task.uid for r in rollouts], pa.int64()),
        "index": pa.array([r.index for r in rollouts], pa.int32()),
    }
    for field in fields(batch):
        tensor = getattr(batch, field.name)
        if not isinstance(tensor, Tensor) or field.name in _REDUNDANT:
            continue
        flat = pa.array(tensor.detach().cpu().numpy())
        columns[field.name] = (
            pa.ListArray.from_arrays(pa.array(offsets), flat) if field.name.endswith("_N") else flat
        )
    return pa.table(columns)
