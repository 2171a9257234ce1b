"""Log-probs of given tokens, as the trainer computes them: packed, without a cache.

Letters: U tokens of a pack, A scored tokens of a request, D hidden, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from whet.models.attention import PackedAttention, Segments
from whet.models.forward import Decoder
from whet.models.kernels import Ops
from whet.models.logprobs import logits, token_logprobs
from whet.types import ScoreRequest, TokenLogprobs

_ROWS = 128
"""Rows of logits at a time, where the likeliest tokens are asked for."""


def packs(requests: Sequence[ScoreRequest], tokens: int) -> Iterator[list[ScoreRequest]]:
    """The requests in their order, together at most so many tokens, or one that is longer."""
    pack: list[ScoreRequest] = []
    for request in requests:
        if pack and sum(len(r.token_ids) for r in (*pack, request)) > tokens:
            yield pack
            pack = []
        pack.append(request)
    if pack:
        yield pack


@torch.no_grad()
def scored(decoder: Decoder, ops: Ops, pack: Sequence[ScoreRequest], *, version: int) -> list[TokenLogprobs]:
    """Of each request of one pack."""
    device = decoder.head.linear.weight.device
    lengths = [len(r.token_ids) for r in pack]
    segments = Segments.of_lengths(torch.tensor(lengths))
    token_U = torch.tensor([token for r in pack for token in r.token_ids]).to(device)
    hidden_UD = decoder.hidden(token_U, segments.position_N.to(device), PackedAttention(segments, ops))
    found = []
    for request, hidden_TD, token_T in zip(pack, hidden_UD.split(lengths), token_U.split(lengths)):
        hidden_AD = hidden_TD[request.start - 1 : -1].contiguous()
        logp_A, _ = token_logprobs(
            hidden_AD,
            token_T[request.start :],
            head=decoder.head,
            ops=ops,
            temperature=request.temperature,
        )
        top = likeliest(decoder, hidden_AD, request) if request.top_k else []
        found.append(TokenLogprobs(version=version, logprobs=logp_A.tolist(), top=top))
    return found


def likeliest(decoder: Decoder, hidden_AD: Tensor, request: ScoreRequest) -> list[list[tuple[int, float]]]:
    """`TokenLogprobs.top`."""
    found: list[list[tuple[int, float]]] = []
    for rows_AD in hidden_AD.split(_ROWS):
        logp_AV = logits(decoder.head, rows_AD, request.temperature).log_softmax(-1)
        found += as_pairs(*logp_AV.topk(request.top_k))
    return found


def as_pairs(logp_AK: Tensor, token_AK: Tensor) -> list[list[tuple[int, float]]]:
    """(token, log-prob) of each row, in the order given."""
    return [list(zip(tokens, logps)) for tokens, logps in zip(token_AK.tolist(), logp_AK.tolist())]
