"""The minibatches of a step's batch in every update epoch, each for one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from whet import seeds
from whet.batch import Batch, select, split
from whet.config.schema import TrainConfig
from whet.types import Metrics


def passes(batch: Batch, train: TrainConfig, *, stream: int, fill: bool = False) -> Iterator[Tensor]:
    """Numbers of the rollouts of `train.minibatches` minibatches of whole groups (a group each where there are fewer),
    `train.update_epochs` times over. Groups are cut where the minibatches do not divide the tasks of a step.

    stream: seeds.key of the step; with `shuffle_minibatches` it and the number of the pass decide who learns with whom.
    fill: where there are fewer groups, they come again in turn, as the same tensors, until there are as many
    minibatches. So a step whose groups are copied has all of its optimizer steps, which the schedule counts.
    """
    cut = train.tasks_per_step % train.minibatches != 0
    for number in range(train.update_epochs):
        if train.shuffle_minibatches:
            parts = deal(batch, train.minibatches, cut=cut, stream=seeds.key(stream, number))
        else:
            parts = split(batch, train.minibatches, cut=cut)
        yield from (parts[n % len(parts)] for n in range(train.minibatches if fill else len(parts)))


def minibatch(batch: Batch, rows: Tensor, parts: Sequence[Tensor]) -> Batch:
    """The rollouts of one of the minibatches `parts`. Those that come several times in an update epoch count as often
    in all of it as they do in the batch."""
    part, times = select(batch, rows), sum(other is rows for other in parts)
    return part if times == 1 or part.count_R is None else replace(part, count_R=part.count_R / times)


def deal(batch: Batch, parts: int, *, stream: int, cut: bool = False) -> list[Tensor]:
    """`split` after shuffling the groups, or rollouts. Inside a minibatch they keep their order: a gradient is a
    sum."""
    units = batch.rollouts if cut else int(batch.group_R[-1]) + 1
    return split(batch, parts, cut=cut, place=torch.from_numpy(seeds.permutation(stream, units)))


def untaught(
    batch: Batch, parts: Sequence[Tensor], steps: Sequence[Metrics]
) -> tuple[tuple[int, ...], str | None]:
    """(numbers, among the sampled groups, of those that only such updates had whose gradient was not finite; that in
    words). parts: numbers of the rollouts of `batch` that each of the updates `steps` had."""
    taken = [not any(v for k, v in told.items() if k.endswith("/skipped_steps")) for told in steps]
    if all(taken):
        return (), None
    learned = {g for rows, ok in zip(parts, taken, strict=True) if ok for g in batch.group_R[rows].tolist()}
    own_R = batch.group_R if batch.expert_R is None else batch.group_R[~batch.expert_R]
    own = sorted(set(own_R.tolist()))
    lost = tuple(n for n, group in enumerate(own) if group not in learned)
    return lost, (
        f"the norm of the gradient was not finite in {taken.count(False)} of {len(taken)} optimizer steps, which were "
        f"skipped; {len(lost)} of {len(own)} groups were not trained on"
    )
