"""From logits to tokens: pure functions on [B, V].

The order is penalty, temperature, top-k, top-p, min-p. Each filter keeps every token whose score is at least
that of the last one it has to keep, so ties are kept together and nothing depends on the order of a sort or
on other rows. Letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.types import Sampling

HEAD = 1024
"""top-p looks at this many of the likeliest tokens first; only rows that need more are sorted whole."""


@dataclass(frozen=True)
class Filters:
    """The sampling parameters of B rows, [B] each."""

    penalty_B: Tensor
    temperature_B: Tensor
    """1 where the row is greedy."""
    greedy_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    penalises: bool
    """Some row has a penalty; this and the next three are known to the host, so that no step has to ask."""
    widest: int
    """The largest top-k, 0 where no row has one."""
    nuclei: bool
    """Some row has a top-p."""
    floors: bool
    """Some row has a min-p."""

    @staticmethod
    def of(samplings: Sequence[Sampling], device: torch.device | str = "cpu") -> Filters:
        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return Filters(
            penalty_B=column([s.repetition_penalty for s in samplings], torch.float32),
            temperature_B=column([s.temperature or 1.0 for s in samplings], torch.float32),
            greedy_B=column([s.temperature == 0 for s in samplings], torch.bool),
            top_k_B=column([s.top_k for s in samplings], torch.int64),
            top_p_B=column([s.top_p for s in samplings], torch.float64),
            min_p_B=column([s.min_p for s in samplings], torch.float32),
            penalises=any(s.repetition_penalty != 1.0 for s in samplings),
            widest=max((s.top_k for s in samplings), default=0),
            nuclei=any(s.top_p < 1.0 for s in samplings),
            floors=any(s.min_p > 0.0 for s in samplings),
        )


def is_plain(sampling: Sampling) -> bool:
    """Temperature alone: the distribution sampled from is the one trained on."""
    s = sampling
    off = s.repetition_penalty == 1.0 and s.top_k == 0 and s.top_p == 1.0 and s.min_p == 0.0
    return off and s.temperature > 0 and s.min_tokens == 0


def filtered(logits_BV: Tensor, filters: Filters, *, seen_BV: Tensor, banned_BV: Tensor) -> Tensor:
    """[B, V] logits of the distribution sampled from; -inf where a token cannot be sampled.

    logits_BV: raw, float32. seen_BV, banned_BV: bool, tokens that have occurred, and tokens not allowed here.
    """
    if filters.penalises:
        logits_BV = penalise(logits_BV, filters.penalty_B, seen_BV)
    logits_BV = logits_BV.masked_fill(banned_BV, -torch.inf) / filters.temperature_B[:, None]
    if filters.widest:
        logits_BV = keep_top_k(logits_BV, filters.top_k_B, widest=filters.widest)
    if filters.nuclei:
        logits_BV = keep_top_p(logits_BV, filters.top_p_B)
    return keep_min_p(logits_BV, filters.min_p_B) if filters.floors else logits_BV


def penalise(logits_BV: Tensor, penalty_B: Tensor, seen_BV: Tensor) -> Tensor:
    """Divide the logits of tokens seen by the penalty, multiply them if negative (arXiv:1909.05858 section
    4.1)."""
    penalty_B1 = penalty_B[:, None]
    lowered_BV = torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    return torch.where(seen_BV, lowered_BV, logits_BV)


def keep_top_k(logits_BV: Tensor, k_B: Tensor, *, widest: int) -> Tensor:
    """Keep the k largest of each row (0: all). widest: no k is larger."""
    on_B = (k_B > 0) & (k_B < logits_BV.shape[1])
    width = min(max(widest, 1), logits_BV.shape[1])
    largest_BK = logits_BV.topk(width).values
    least_B1 = largest_BK.gather(1, (k_B.clamp(1, width) - 1)[:, None])
    return logits_BV.masked_fill((logits_BV < least_B1) & on_B[:, None], -torch.inf)


def keep_top_p(logits_BV: Tensor, p_B: Tensor, *, head: int = HEAD) -> Tensor:
    """Keep the smallest set of likeliest tokens whose probability is at least p (1: all)."""
    on_B = p_B < 1
    prob_BV = logits_BV.softmax(-1)
    width = min(head, logits_BV.shape[1])
    least_B, reached_B = _nucleus(prob_BV.topk(width).values, p_B)
    if width < logits_BV.shape[1]:  # here the host waits: to sort every row would take longer
        wide_R = torch.nonzero(on_B & ~reached_B).flatten()
        if len(wide_R):
            least_B[wide_R] = _nucleus(prob_BV[wide_R].sort(descending=True).values, p_B[wide_R])[0]
    return logits_BV.masked_fill((prob_BV < least_B[:, None]) & on_B[:, None], -torch.inf)


def _nucleus(prob_BK: Tensor, p_B: Tensor) -> tuple[Tensor, Tensor]:
    """Of falling probabilities: the last one needed for a sum of p [B], and whether the sum was reached
    [B]."""
    before_BK = prob_BK.double().cumsum(1) < p_B[:, None]
    needed_B = before_BK.sum(1)
    reached_B = needed_B < prob_BK.shape[1]
    return prob_BK.gather(1, needed_B.clamp(max=prob_BK.shape[1] - 1)[:, None]).squeeze(1), reached_B


def keep_min_p(logits_BV: Tensor, min_p_B: Tensor) -> Tensor:
    """Keep tokens at least min_p times as likely as the likeliest (arXiv:2407.01082); 0 keeps all."""
    least_B1 = logits_BV.amax(-1, keepdim=True) + min_p_B.log()[:, None]
    return logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)


def draw(logits_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row by inverting the distribution function: (token [B] int64, its log-prob [B] float32).

    uniform_B: float64 in [0, 1). A token of probability 0 is never drawn: `right=True` steps over its empty
    interval, and the point drawn is held below the total. Where the logits are no distribution, the log-prob is NaN.
    """
    weight_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)).exp()
    below_BV = weight_BV.double().cumsum(1)
    total_B1 = below_BV[:, -1:]
    point_B1 = torch.minimum(uniform_B[:, None] * total_B1, total_B1.nextafter(torch.zeros_like(total_B1)))
    token_B1 = torch.searchsorted(below_BV, point_B1, right=True)
    token_B1 = token_B1.clamp_(max=logits_BV.shape[1] - 1)  # of NaN, none is found
    return token_B1.squeeze(1), logits_BV.log_softmax(-1).gather(1, token_B1).squeeze(1)


def pick(logits_BV: Tensor, filters: Filters, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw, or take the likeliest where the row is greedy (the smallest id of equals; log-prob 0)."""
    token_B, logp_B = draw(logits_BV, uniform_B)
    token_B = torch.where(filters.greedy_B, logits_BV.argmax(-1), token_B)
    return token_B, logp_B.masked_fill(filters.greedy_B, 0.0)
