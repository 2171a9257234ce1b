"""The critic's value of the state that a limit left: of where a truncated rollout would have gone on.

A value stands at the token that was chosen in its state, so the state after the last token has no place of its own.
Each truncated rollout gets one more token for the critic alone; what it is has no effect on the value at it.

Shape letters: N tokens, S segments, R rollouts, T truncated rollouts that have sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from whet.algos.segments import last_sampled_R, need
from whet.batch import Batch


@dataclass(frozen=True)
class Lengthened:
    """A batch whose truncated rollouts have a token more."""

    batch: Batch
    at_N: Tensor
    """[N] where the tokens of the batch as it was are in it."""
    row_T: Tensor
    """[T] the truncated rollouts."""
    at_T: Tensor
    """[T] where their further tokens are."""

    def parted(self, value_N: Tensor) -> tuple[Tensor, Tensor]:
        """The values of the batch as it was, and [R] of the states after its truncated rollouts; 0 for the others."""
        last_R = value_N.new_zeros(self.batch.rollouts)
        return value_N[self.at_N.to(value_N.device)], last_R.index_put(
            (self.row_T.to(value_N.device),), value_N[self.at_T.to(value_N.device)]
        )


def lengthened(batch: Batch) -> Lengthened:
    """Each truncated rollout with one more token at the end of the segment of its last sampled one."""
    last_R = last_sampled_R(batch)
    row_T = (need(batch.truncated_R, "batch.truncated_R") & (last_R >= 0)).nonzero().flatten()
    segment_T = batch.segment_N[last_R[row_T]]
    more_S = torch.zeros_like(batch.length_S).index_put((segment_T,), batch.length_S.new_ones(()))
    length_S = batch.length_S + more_S
    at_N = torch.arange(batch.tokens, device=more_S.device) + (more_S.cumsum(0) - more_S)[batch.segment_N]
    at_T = length_S.cumsum(0)[segment_T] - 1

    def spread(x_N: Tensor) -> Tensor:
        return x_N.new_zeros(int(length_S.sum())).index_put((at_N,), x_N)

    given = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name.endswith("_N")}
    longer = {name: spread(x_N) for name, x_N in given.items() if x_N is not None}
    segment_N = torch.arange(batch.segments, device=length_S.device).repeat_interleave(length_S)
    longer |= {"segment_N": segment_N, "rollout_N": batch.rollout_S[segment_N]}
    longer["token_ids_N"][at_T] = longer["token_ids_N"][at_T - 1]
    longer["mask_N"][at_T] = True
    return Lengthened(
        replace(batch, length_S=length_S, routed_NLE=None, reprompted=None, **longer), at_N, row_T, at_T
    )


def with_last(next_M: Tensor, row_M: Tensor, batch: Batch) -> Tensor:
    """[M] the values of the states that follow, with those after truncated rollouts. M: tokens or turns; those of a
    rollout stand together, the last of them has 0 where nothing follows."""
    ends_M = torch.ones_like(row_M, dtype=torch.bool)
    ends_M[:-1] = row_M[:-1] != row_M[1:]
    last_R = need(batch.last_value_R, "batch.last_value_R").to(next_M.dtype)
    return torch.where(ends_M, last_R[row_M], next_M)
