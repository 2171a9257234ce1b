"""The training data of a step, token by token, as a table: every field of the batch by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from whet.batch import Batch, LossTerms, tokens_of

_REDUNDANT = ("segment_N", "rollout_N", "rollout_S")
_NAMES = {"uid_R": "uid", "index_R": "index"}
"""Columns that have the names of the other records."""
_LARGE = ("routed_NLE",)
"""Kept with the rollouts of a checkpoint alone."""
_SAID = ("logp_old_N", "logp_ref_N")
"""Outputs of models before the step: null at tokens of skipped rollouts, which no model computed."""


def to_table(batch: Batch, logp_N: Tensor | None = None, terms: Sequence[LossTerms] = ()) -> pa.Table:
    """A row for each rollout: uid and index, [R] fields as numbers, [RC] fields as lists, [S] fields as lists over its
    segments, [N] fields as lists over the tokens of all its segments, one after the other.

    logp_N: by the policy before the step. terms: of the losses of the optimizer steps; their columns are
    `update_1/loss_N` and so on, for the first update epoch.
    """
    offsets = {
        "S": _offsets(batch.segments_R),
        "N": _offsets(torch.bincount(batch.rollout_N, minlength=batch.rollouts)),
    }
    columns: dict[str, pa.Array] = {}
    for field in fields(batch):
        tensor = getattr(batch, field.name)
        if not isinstance(tensor, Tensor) or field.name in (*_REDUNDANT, *_LARGE):
            continue
        values = tensor.detach().cpu()
        nowhere = _nowhere(batch, values) if field.name in _SAID else None
        flat = pa.array(list(values.numpy()) if values.dim() > 1 else values.numpy(), mask=nowhere)
        within = offsets.get(field.name.rpartition("_")[2])
        name = _NAMES.get(field.name, field.name)
        columns[name] = flat if within is None else pa.ListArray.from_arrays(within, flat)
    found = _spread(batch, terms) | ({} if logp_N is None else {"logp_N": _masked(logp_N)})
    for name, known in found.items():
        flat, within = pa.array(known.data, mask=known.mask), offsets.get(name[-1])
        columns[name] = flat if within is None else pa.ListArray.from_arrays(within, flat)
    return pa.table(columns)


def _spread(batch: Batch, terms: Sequence[LossTerms]) -> dict[str, np.ma.MaskedArray]:
    """The terms of all optimizer steps by column, at their places in the batch."""
    out: dict[str, np.ma.MaskedArray] = {}
    times: Counter[int] = Counter()
    for number, each in enumerate(terms, start=1):
        rows = each.rows.tolist()
        epoch = 1 + max((times[row] for row in rows), default=0)
        times.update(rows)
        places = {"N": tokens_of(batch, each.rows.to(batch.length_S.device)).cpu(), "R": each.rows.cpu()}
        values = {**each.values, "optimizer_step_R": torch.full((len(rows),), number)}
        for name, x in values.items():
            letter = name[-1]
            data = x.cpu().numpy()
            key, size = f"update_{epoch}/{name}", {"N": batch.tokens, "R": batch.rollouts}[letter]
            if key not in out:
                out[key] = np.ma.masked_all(size, data.dtype)
            out[key][places[letter].numpy()] = data
    return out


def _masked(x_N: Tensor) -> np.ma.MaskedArray:
    """Null where no model has computed it."""
    return np.ma.masked_invalid(x_N.cpu().numpy())


def _offsets(count_R: Tensor) -> pa.Array:
    return pa.array(np.concatenate([[0], count_R.cpu().numpy().cumsum()]).astype(np.int32))


def _nowhere(batch: Batch, said_N: Tensor) -> np.ndarray | None:
    if batch.skipped_R is None:
        return None
    return (batch.skipped_R[batch.rollout_N].cpu() & said_N.isnan()).numpy()
