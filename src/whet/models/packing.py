"""The parts of a batch that have to be computed: a prompt that segments of a group share once, and no token whose
hidden state is never used.

Shape letters: N tokens of the batch, U tokens to compute, S segments of the batch, C segments of the computed tokens, L
layers, E experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from whet.batch import Batch
from whet.models.segments import Segments
from whet.types import DataError


@dataclass(frozen=True)
class PackedLayout:
    """The forward pass of a batch. Tensors lie on the batch's device, the segments on the CPU."""

    token_ids_U: Tensor
    """int64, in the batch's order."""
    position_U: Tensor
    """int64: position in the batch's segment, from 0."""
    segments: Segments
    at_U: Tensor
    """int64: which token of the batch each of them is."""
    row_N: Tensor
    """int64: row in U of batch token n, of the first one's where segments share a prompt; -1 where it is not
    computed."""
    predictor_N: Tensor
    """int64: row in U of the hidden state that predicts batch token n; -1 for the first token of a segment
    and for tokens after its last sampled one."""
    rollout_N: Tensor
    count_R: Tensor | None
    """The batch's."""
    routed_ULE: Tensor | None = None
    """The experts of each token in each layer; None: those that routers choose."""


def layout(batch: Batch, *, share_prompts: bool, ahead: int = 0, whole: bool = False) -> PackedLayout:
    """How to compute the log-probs (and values) of all sampled tokens of a batch.

    A segment is computed up to the token before its last sampled one, or with `whole` to its end; a segment without
    sampled tokens not at all. With `share_prompts`, segments of a group whose prompts are equal token by token,
    recorded experts included (compared here, never assumed), share the first one's prompt: its last token predicts
    every first response token.

    ahead: of a layer that reads at each token also the so many tokens that follow it, and predicts the one after
    these. So it stops so many tokens earlier, and segments share so many tokens less of a prompt.

    Errors: DataError where a segment's first token counts as sampled, for nothing predicts it.
    """
    token_ids_N, segment_N, position_N = batch.token_ids_N, batch.segment_N, batch.position_N
    if bool((batch.mask_N & (position_N == 0)).any()):
        raise DataError(
            "a rollout's first token is marked as sampled, but nothing precedes it: give it a prompt"
        )
    last_S = _last_sampled(batch, position_N)
    owner_S = _prompt_owner(batch, need_S=last_S, share=share_prompts)
    need_S = (torch.where(last_S > 0, batch.length_S, 0) if whole else last_S).sub(ahead).clamp(min=0)
    prompt_S = batch.prompt_S.sub(ahead).clamp(min=0)
    prompt_N = position_N < prompt_S[segment_N]
    own_N = owner_S == torch.arange(batch.segments, device=owner_S.device)
    keep_N = (position_N < need_S[segment_N]) & (own_N[segment_N] | ~prompt_N)
    index_N = keep_N.cumsum(0) - 1
    at_U = torch.nonzero(keep_N).flatten()  # waits for its length once; a mask waits at each use

    source_N = batch.start_S[torch.where(prompt_N, owner_S[segment_N], segment_N)] + position_N
    row_N = torch.where(position_N < need_S[segment_N], index_N[source_N], -1)
    before_N = torch.arange(batch.tokens, device=row_N.device) - 1 - ahead
    return PackedLayout(
        token_ids_U=token_ids_N[at_U],
        position_U=position_N[at_U],
        segments=_segments(batch, index_N, need_S=need_S, prompt_S=prompt_S, owner_S=owner_S),
        at_U=at_U,
        row_N=row_N,
        predictor_N=torch.where(position_N > ahead, row_N[before_N.clamp(min=0)], -1),
        rollout_N=batch.rollout_N,
        count_R=batch.count_R,
        routed_ULE=None if batch.routed_NLE is None else batch.routed_NLE[at_U],
    )


def spread(packed: PackedLayout, x_U: Tensor) -> Tensor:
    """[N] what computed tokens have, for the tokens of the batch; a shared prompt's to all that share it; 0 for tokens
    that are not computed. x_U may have further dims."""
    # what predicts the next token is the token itself
    next_N = F.pad(packed.predictor_N[1:], (0, 1), value=-1)
    found_N = x_U[next_N.clamp(min=0)]
    return found_N.masked_fill((next_N < 0).view(-1, *[1] * (x_U.ndim - 1)), 0)


def _last_sampled(batch: Batch, position_N: Tensor) -> Tensor:
    """[S] position of each segment's last sampled token (as many tokens are computed); 0 without one."""
    last_S = position_N.new_zeros(batch.segments)
    return last_S.scatter_reduce(0, batch.segment_N, position_N * batch.mask_N, "amax")


def _prompt_owner(batch: Batch, *, need_S: Tensor, share: bool) -> Tensor:
    """[S] segment that computes each segment's prompt: the first of its group with an equal prompt, or itself. Compared
    token by token; the loop is over segments."""
    own_S = torch.arange(batch.segments, device=need_S.device)
    if not share or batch.segments < 2:
        return own_S
    tokens = batch.token_ids_N.cpu().numpy()
    routed = None if batch.routed_NLE is None else batch.routed_NLE.cpu().numpy()

    def prompt_of(start: int, prompt: int) -> bytes:
        own = slice(start, start + prompt)
        return tokens[own].tobytes() + (b"" if routed is None else routed[own].tobytes())

    columns = (batch.group_R[batch.rollout_S], batch.start_S, batch.prompt_S, need_S)
    first: dict[tuple[int, bytes], int] = {}
    owners = [
        first.setdefault((group, prompt_of(start, prompt)), segment) if need else segment
        for segment, (group, start, prompt, need) in enumerate(zip(*(x.tolist() for x in columns)))
    ]
    return torch.tensor(owners, device=own_S.device)


def _segments(
    batch: Batch, index_N: Tensor, *, need_S: Tensor, prompt_S: Tensor, owner_S: Tensor
) -> Segments:
    """One for each shared prompt and each response to it, and one for each segment that shares nothing."""
    start_S = batch.start_S
    sharers_S = torch.bincount(owner_S, minlength=batch.segments)
    shared_S = sharers_S[owner_S] > 1
    alone_S = ~shared_S & (need_S > 0)
    leads_S = (sharers_S > 1) & (prompt_S > 0)
    answers_S = shared_S & (need_S > prompt_S)
    none_S = torch.zeros_like(start_S)
    parts = (  # which segments; first token, tokens, first token of the prefix, its tokens
        (alone_S, start_S, need_S, none_S, none_S),
        (leads_S, start_S, prompt_S, none_S, none_S),
        (answers_S, start_S + prompt_S, need_S - prompt_S, start_S[owner_S], prompt_S),
    )
    first_C, len_C, prefix_C, prefix_len_C = (
        torch.cat([part[column][part[0]] for part in parts]) for column in range(1, 5)
    )
    q_start_C = index_N[first_C]
    order_C = q_start_C.argsort()
    prefix_start_C = torch.where(prefix_len_C > 0, index_N[prefix_C], 0)
    return Segments(*(x[order_C].cpu() for x in (q_start_C, len_C, prefix_start_C, prefix_len_C)))
