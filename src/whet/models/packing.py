"""The parts of a batch that have to be computed: each group's prompt once, and no token whose hidden state is never
used.

Shape letters: N tokens of the batch, U tokens to compute, R rollouts, S segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whet.batch import Batch
from whet.models.segments import Segments
from whet.types import DataError


@dataclass(frozen=True)
class Layout:
    """The forward pass of a batch. Tensors lie on the batch's device, the segments on the CPU."""

    token_ids_U: Tensor
    """int64, in the batch's order."""
    position_U: Tensor
    """int64: position in the rollout, from 0."""
    segments: Segments
    predictor_N: Tensor
    """int64: row in U of the hidden state that predicts batch token n; -1 for the first token of a rollout
    and for tokens after its last sampled one."""
    row_N: Tensor
    count_R: Tensor | None
    """The batch's."""


def layout(batch: Batch, *, share_prompts: bool) -> Layout:
    """How to compute the log-probs (and values) of all sampled tokens of a batch.

    A rollout is computed up to the token before its last sampled one; a rollout without sampled tokens not
    at all. With `share_prompts`, neighbouring rollouts of a group whose prompts are equal token by token
    (compared here, never assumed) share the first one's prompt: its last token predicts every first response
    token.

    Errors: DataError where a rollout's first token counts as sampled, for nothing predicts it.
    """
    token_ids_N, row_N, position_N = batch.token_ids_N, batch.row_N, batch.position_N
    if bool((batch.mask_N & (position_N == 0)).any()):
        raise DataError(
            "a rollout's first token is marked as sampled, but nothing precedes it: give it a prompt"
        )
    need_R = _last_sampled(batch, position_N)
    owner_R = _prompt_owner(batch, position_N, need_R=need_R, share=share_prompts)
    prompt_N = position_N < batch.prompt_R[row_N]
    own_N = owner_R == torch.arange(batch.rollouts, device=owner_R.device)
    keep_N = (position_N < need_R[row_N]) & (own_N[row_N] | ~prompt_N)
    index_N = keep_N.cumsum(0) - 1

    before_N = position_N - 1
    source_row_N = torch.where(before_N < batch.prompt_R[row_N], owner_R[row_N], row_N)
    source_N = (batch.start_R[source_row_N] + before_N).clamp(min=0)
    predicted_N = (before_N >= 0) & (position_N <= need_R[row_N])
    return Layout(
        token_ids_U=token_ids_N[keep_N],
        position_U=position_N[keep_N],
        segments=_segments(batch, index_N, need_R=need_R, owner_R=owner_R),
        predictor_N=torch.where(predicted_N, index_N[source_N], -1),
        row_N=row_N,
        count_R=batch.count_R,
    )


def _last_sampled(batch: Batch, position_N: Tensor) -> Tensor:
    """[R] position of each rollout's last sampled token (as many tokens are computed); 0 without one."""
    last_R = position_N.new_zeros(batch.rollouts)
    return last_R.scatter_reduce(0, batch.row_N, position_N * batch.mask_N, "amax")


def _prompt_owner(batch: Batch, position_N: Tensor, *, need_R: Tensor, share: bool) -> Tensor:
    """[R] rollout that computes each rollout's prompt: the first of a run of equal prompts, or itself."""
    rows_R = torch.arange(batch.rollouts, device=need_R.device)
    if not share or batch.rollouts < 2:
        return rows_R
    previous_R = (rows_R - 1).clamp(min=0)
    row_N = batch.row_N
    in_reach_N = position_N < torch.minimum(batch.prompt_R, batch.prompt_R[previous_R])[row_N]
    other_N = torch.where(in_reach_N, batch.start_R[previous_R][row_N] + position_N, 0)
    differs_N = in_reach_N & (batch.token_ids_N != batch.token_ids_N[other_N])
    differs_R = torch.zeros_like(rows_R).index_add_(0, row_N, differs_N.long())
    follows_R = (
        (rows_R > 0)
        & (batch.group_R == batch.group_R[previous_R])
        & (batch.prompt_R == batch.prompt_R[previous_R])
        & (differs_R == 0)
        & (need_R > 0)
        & (need_R[previous_R] > 0)
    )
    return torch.where(follows_R, 0, rows_R).cummax(0).values


def _segments(batch: Batch, index_N: Tensor, *, need_R: Tensor, owner_R: Tensor) -> Segments:
    """A segment for each shared prompt and each response to it, and for each rollout that shares nothing."""
    start_R, prompt_R = batch.start_R, batch.prompt_R
    sharers_R = torch.bincount(owner_R, minlength=batch.rollouts)
    shared_R = sharers_R[owner_R] > 1
    alone_R = ~shared_R & (need_R > 0)
    leads_R = sharers_R > 1
    answers_R = shared_R & (need_R > prompt_R)
    none_R = torch.zeros_like(start_R)
    parts = (  # which rollouts; first token, tokens, first token of the prefix, its tokens
        (alone_R, start_R, need_R, none_R, none_R),
        (leads_R, start_R, prompt_R, none_R, none_R),
        (answers_R, start_R + prompt_R, need_R - prompt_R, start_R[owner_R], prompt_R),
    )
    first_S, len_S, prefix_S, prefix_len_S = (
        torch.cat([part[column][part[0]] for part in parts]) for column in range(1, 5)
    )
    q_start_S = index_N[first_S]
    order_S = q_start_S.argsort()
    prefix_start_S = torch.where(prefix_len_S > 0, index_N[prefix_S], 0)
    return Segments(*(x[order_S].cpu() for x in (q_start_S, len_S, prefix_start_S, prefix_len_S)))
