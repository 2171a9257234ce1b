"""A step's batch dealt out: the minibatches of every pass, each for one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from whet import seeds
from whet.batch import Batch, select, split
from whet.config.schema import Train


def passes(batch: Batch, train: Train, *, stream: int) -> Iterator[Batch]:
    """`train.minibatches` minibatches of whole groups (a group each where there are fewer), `train.passes` times over.

    stream: seeds.key of the step; with `shuffle_passes` it and the number of the pass decide who learns with whom.
    """
    parts = min(train.minibatches, int(batch.group_R[-1]) + 1)
    for number in range(train.passes):
        if train.shuffle_passes:
            yield from deal(batch, parts, stream=seeds.key(stream, number))
        else:
            yield from split(batch, parts)


def deal(batch: Batch, parts: int, *, stream: int) -> list[Batch]:
    """`split` after shuffling the groups. Inside a minibatch they keep their order: a gradient is a sum."""
    part_R = _dealt(batch, parts, stream=stream)
    return [select(batch, torch.nonzero(part_R == p).flatten()) for p in range(parts)]


def _dealt(batch: Batch, parts: int, *, stream: int | None) -> Tensor:
    """[R] number of the minibatch that each rollout is in; stream None: in order, as `split` has it."""
    groups = int(batch.group_R[-1]) + 1
    if stream is None:
        return batch.group_R * parts // groups
    place_G = torch.from_numpy(seeds.permutation(stream, groups)).to(batch.group_R.device)
    return place_G[batch.group_R] * parts // groups


def members(batch: Batch, train: Train, *, stream: int) -> Iterator[set[int]]:
    """The numbers in `batch` of the groups of each minibatch of `passes`."""
    parts = min(train.minibatches, int(batch.group_R[-1]) + 1)
    for number in range(train.passes):
        part_R = _dealt(batch, parts, stream=seeds.key(stream, number) if train.shuffle_passes else None)
        yield from (set(batch.group_R[part_R == part].tolist()) for part in range(parts))
