"""The training data of a step, token by token, as a table: every field of the batch by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from whet.batch import Batch
from whet.types import Group

_REDUNDANT = ("segment_N", "rollout_N", "rollout_S")
_SAID = ("logp_old_N", "logp_ref_N")
"""Outputs of models before the step: null at tokens of skipped rollouts, which no model computed."""


def to_table(batch: Batch, groups: Sequence[Group]) -> pa.Table:
    """A row for each rollout: uid and index, [R] fields as numbers, [S] fields as lists over its segments, [N] fields
    as lists over the tokens of all its segments, one after the other.

    groups: what the batch was packed from.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    offsets = {
        "S": _offsets(batch.segments_R),
        "N": _offsets(torch.bincount(batch.rollout_N, minlength=batch.rollouts)),
    }
    columns = {
        "uid": pa.array([r.task.uid for r in rollouts], pa.int64()),
        "index": pa.array([r.index for r in rollouts], pa.int32()),
    }
    for field in fields(batch):
        tensor = getattr(batch, field.name)
        if not isinstance(tensor, Tensor) or field.name in _REDUNDANT:
            continue
        values = tensor.detach().cpu()
        nowhere = _nowhere(batch, values) if field.name in _SAID else None
        flat = pa.array(values.numpy(), mask=nowhere)
        within = offsets.get(field.name.rpartition("_")[2])
        columns[field.name] = flat if within is None else pa.ListArray.from_arrays(within, flat)
    return pa.table(columns)


def _offsets(count_R: Tensor) -> pa.Array:
    return pa.array(np.concatenate([[0], count_R.cpu().numpy().cumsum()]).astype(np.int32))


def _nowhere(batch: Batch, said_N: Tensor) -> np.ndarray | None:
    if batch.skipped_R is None:
        return None
    return (batch.skipped_R[batch.rollout_N].cpu() & said_N.isnan()).numpy()
