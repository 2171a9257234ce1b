"""Cross entropy to a distribution that another hidden state gives under the same output layer, without keeping [A, V]
logits.

Shape letters: A rows asked for, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whet.models.logprobs import OutputHead, logits, slope
from whet.models.products import product

_CHUNK = 256
"""Rows of both logits at a time."""


def soft_cross_entropy(
    hidden_AD: Tensor, target_AD: Tensor, *, head: OutputHead, top_k: int | None = None
) -> Tensor:
    """[A] float32, nats: -sum over the vocabulary of p log q, p of the target's hidden states, q of the others; at
    temperature 1. The gradient flows to `hidden_AD` alone: by a logit it is q - p. Logits are computed again in
    backward. top_k: over the so many likeliest tokens of p alone, both renormalized over them."""
    found_A: Tensor = _SoftCrossEntropy.apply(hidden_AD, target_AD.detach(), head, top_k)
    return found_A


def _log_probs(
    head: OutputHead, hidden_AD: Tensor, target_AD: Tensor, top_k: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """([A, V] logits, [A, S] log q and log p of the tokens that are compared, [A, S] these tokens; None: all)."""
    z_AV, target_AV = logits(head, hidden_AD, 1.0), logits(head, target_AD, 1.0)
    if top_k is None:
        return z_AV, head.log_softmax(z_AV), head.log_softmax(target_AV), None
    target_AS, token_AS = target_AV.topk(min(top_k, target_AV.shape[1]), dim=-1)
    return z_AV, z_AV.gather(1, token_AS).log_softmax(-1), target_AS.log_softmax(-1), token_AS


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_AD: Tensor, target_AD: Tensor, head: OutputHead, top_k: int | None
    ) -> Tensor:
        ctx.save_for_backward(hidden_AD, target_AD)
        ctx.head, ctx.top_k = head, top_k
        found_A = torch.empty(len(hidden_AD), dtype=torch.float32, device=hidden_AD.device)
        for at in _spans(len(hidden_AD)):
            _, logq_AS, logp_AS, _ = _log_probs(head, hidden_AD[at], target_AD[at], top_k)
            found_A[at] = -logp_AS.exp_().mul_(logq_AS).sum(-1)
        return found_A

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dfound_A: Tensor) -> tuple[Tensor, None, None, None]:
        hidden_AD, target_AD = ctx.saved_tensors
        head: OutputHead = ctx.head
        weight_VD = head.linear.weight
        dhidden_AD = torch.empty_like(hidden_AD)
        for at in _spans(len(hidden_AD)):
            z_AV, logq_AS, logp_AS, token_AS = _log_probs(head, hidden_AD[at], target_AD[at], ctx.top_k)
            dz_AV = logq_AS.exp_().sub_(logp_AS.exp_()).mul_(dfound_A[at, None])
            if token_AS is not None:
                dz_AV = torch.zeros_like(z_AV).scatter_(1, token_AS, dz_AV)
            steep = slope(z_AV, head, 1.0)
            dz_AV = (dz_AV if steep is None else dz_AV.mul_(steep)).to(weight_VD.dtype)
            product(dz_AV, weight_VD, out=dhidden_AD[at])
        return dhidden_AD, None, None, None


def _spans(rows: int) -> list[slice]:
    return [slice(start, start + _CHUNK) for start in range(0, rows, _CHUNK)]
