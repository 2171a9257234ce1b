"""A step's batch dealt out: the minibatches of every pass, each for one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from whet import seeds
from whet.batch import Batch, split
from whet.config.schema import Train


def passes(batch: Batch, train: Train, *, stream: int) -> Iterator[Tensor]:
    """Numbers of the rollouts of `train.minibatches` minibatches of whole groups (a group each where there are fewer),
    `train.passes` times over.

    stream: seeds.key of the step; with `shuffle_passes` it and the number of the pass decide who learns with whom.
    """
    for number in range(train.passes):
        if train.shuffle_passes:
            yield from deal(batch, train.minibatches, stream=seeds.key(stream, number))
        else:
            yield from split(batch, train.minibatches)


def deal(batch: Batch, parts: int, *, stream: int) -> list[Tensor]:
    """`split` after shuffling the groups. Inside a minibatch they keep their order: a gradient is a sum."""
    groups = int(batch.group_R[-1]) + 1
    return split(batch, parts, place_G=torch.from_numpy(seeds.permutation(stream, groups)))
