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


def soft_cross_entropy(hidden_AD: Tensor, target_AD: Tensor, *, head: OutputHead) -> Tensor:
    """[A] float32, nats: -sum over the vocabulary of p log q, p of the target's hidden states, q of the others; at
    temperature 1. The gradient flows to `hidden_AD` alone: by a logit it is q - p. Logits are computed again in
    backward."""
    found_A: Tensor = _SoftCrossEntropy.apply(hidden_AD, target_AD.detach(), head)
    return found_A


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_AD: Tensor, target_AD: Tensor, head: OutputHead) -> Tensor:
        ctx.save_for_backward(hidden_AD, target_AD)
        ctx.head = head
        found_A = torch.empty(len(hidden_AD), dtype=torch.float32, device=hidden_AD.device)
        for at in _spans(len(hidden_AD)):
            p_AV = head.log_softmax(logits(head, target_AD[at], 1.0)).exp_()
            found_A[at] = -p_AV.mul_(head.log_softmax(logits(head, hidden_AD[at], 1.0))).sum(-1)
        return found_A

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dfound_A: Tensor) -> tuple[Tensor, None, None]:
        hidden_AD, target_AD = ctx.saved_tensors
        head: OutputHead = ctx.head
        weight_VD = head.linear.weight
        dhidden_AD = torch.empty_like(hidden_AD)
        for at in _spans(len(hidden_AD)):
            z_AV = logits(head, hidden_AD[at], 1.0)
            dz_AV = head.log_softmax(z_AV).exp_()
            dz_AV -= head.log_softmax(logits(head, target_AD[at], 1.0)).exp_()
            dz_AV *= dfound_A[at, None]
            steep = slope(z_AV, head, 1.0)
            dz_AV = (dz_AV if steep is None else dz_AV.mul_(steep)).to(weight_VD.dtype)
            product(dz_AV, weight_VD, out=dhidden_AD[at])
        return dhidden_AD, None, None


def _spans(rows: int) -> list[slice]:
    return [slice(start, start + _CHUNK) for start in range(0, rows, _CHUNK)]
