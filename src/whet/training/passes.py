"""A step's batch dealt out: the minibatches of every pass, each for one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from whet import seeds
from whet.batch import Batch, select
from whet.config.schema import Train


def passes(batch: Batch, train: Train, *, stream: int) -> Iterator[Batch]:
    """`train.minibatches` minibatches of whole groups (a group each where there are fewer), `train.passes` times over.

    stream: seeds.key of the step; with `shuffle_passes` it and the number of the pass decide who learns with whom.
    """
    for part_R in _dealt(batch, train, stream=stream):
        parts = int(part_R.max()) + 1
        yield from (
            [batch]
            if parts == 1
            else [select(batch, torch.nonzero(part_R == p).flatten()) for p in range(parts)]
        )


def members(batch: Batch, train: Train, *, stream: int) -> Iterator[set[int]]:
    """The numbers in `batch` of the groups of each of these minibatches."""
    for part_R in _dealt(batch, train, stream=stream):
        for part in range(int(part_R.max()) + 1):
            yield set(batch.group_R[part_R == part].tolist())


def _dealt(batch: Batch, train: Train, *, stream: int) -> Iterator[Tensor]:
    """[R] number of the minibatch of each rollout, for every pass. Inside a minibatch groups keep their order: a
    gradient is a sum."""
    groups = int(batch.group_R[-1]) + 1
    parts = min(train.minibatches, groups)
    for number in range(train.passes):
        place_R = batch.group_R
        if train.shuffle_passes:
            place_G = torch.from_numpy(seeds.permutation(seeds.key(stream, number), groups))
            place_R = place_G.to(place_R.device)[place_R]
        yield place_R * parts // groups
