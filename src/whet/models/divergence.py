"""The KL divergence over the whole vocabulary, or over the likeliest tokens of a teacher, without keeping [A, V] logits
of either model.

Shape letters: A rows asked for, D hidden, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whet.algos.distillation import TopK
from whet.models.logprobs import OutputHead, logits, slope
from whet.models.products import column_sums, product
from whet.types import WhetError


def full_kl(
    hidden_AD: Tensor,
    reference_AD: Tensor,
    *,
    heads: tuple[OutputHead, OutputHead],
    temperature: float = 1.0,
    chunk: int = 256,
) -> Tensor:
    """[A] float32: sum over the vocabulary of p (log p - log q), nats; p of the first head, q of the second.

    The gradient flows to `hidden_AD` and the first head's parameters only: with e = log p - log q - KL,
    d KL / d logit = p e. `chunk` rows of both logits at a time, computed again in backward. WhetError where the two
    heads are not over the same vocabulary.
    """
    sizes = [h.size for h in heads]
    if sizes[0] != sizes[1]:
        raise WhetError(
            f"algorithm.kl.estimator=full compares whole vocabularies, and the policy's has {sizes[0]} tokens, but the "
            f"reference's {sizes[1]}: use another estimator, or a reference with the same tokenizer"
        )
    job = _DivergenceJob(heads[0], heads[1], temperature, chunk)
    return _FullKl.apply(hidden_AD, heads[0].linear.weight, heads[0].linear.bias, reference_AD, job)


@dataclass(frozen=True)
class _DivergenceJob:
    head: OutputHead
    reference: OutputHead
    temperature: float
    chunk: int

    def spans(self, rows: int) -> list[slice]:
        return [slice(start, start + self.chunk) for start in range(0, rows, self.chunk)]

    def terms(self, hidden_AD: Tensor, reference_AD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[A, V] logits, probabilities, log p - log q."""
        z_AV = logits(self.head, hidden_AD, self.temperature)
        logp_AV = self.head.log_softmax(z_AV)
        gap_AV = logp_AV - self.reference.log_softmax(logits(self.reference, reference_AD, self.temperature))
        return z_AV, logp_AV.exp_(), gap_AV


class _FullKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_AD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        reference_AD: Tensor,
        job: _DivergenceJob,
    ) -> Tensor:
        kl_A = torch.empty(len(hidden_AD), dtype=torch.float32, device=hidden_AD.device)
        for at in job.spans(len(hidden_AD)):
            _, p_AV, gap_AV = job.terms(hidden_AD[at], reference_AD[at])
            kl_A[at] = job.head.add((p_AV * gap_AV).sum(-1))
        ctx.save_for_backward(hidden_AD, weight_VD, bias_V, reference_AD, kl_A)
        ctx.job = job
        return kl_A

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dkl_A: Tensor) -> tuple[Tensor | None, ...]:
        hidden_AD, weight_VD, bias_V, reference_AD, kl_A = ctx.saved_tensors
        job: _DivergenceJob = ctx.job

        def slopes(at: slice) -> tuple[Tensor, Tensor]:
            z_AV, p_AV, gap_AV = job.terms(hidden_AD[at], reference_AD[at])
            return z_AV, p_AV.mul_(gap_AV.sub_(kl_A[at, None])).mul_(dkl_A[at, None])

        return *_gradients(job, slopes, hidden_AD, weight_VD, bias_V), None, None


def _gradients(
    job: _DivergenceJob,
    slopes: Callable[[slice], tuple[Tensor, Tensor]],
    hidden_AD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the hidden states, the weight and the bias. slopes: of some rows, [A, V] the logits and the
    derivative of the loss by them."""
    dhidden_AD = torch.empty_like(hidden_AD)
    dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
    dbias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
    for at in job.spans(len(hidden_AD)):
        z_AV, dz_AV = slopes(at)
        steep = slope(z_AV, job.head, job.temperature)
        dz_AV = (dz_AV if steep is None else dz_AV.mul_(steep)).to(weight_VD.dtype)
        product(dz_AV, weight_VD, out=dhidden_AD[at])
        product(dz_AV.t(), hidden_AD[at], out=dweight_VD, add=True)
        if dbias_V is not None:
            dbias_V += column_sums(dz_AV)
    job.head.add(dhidden_AD)
    db_V = dbias_V if bias_V is None or dbias_V is None else dbias_V.to(bias_V.dtype)
    return dhidden_AD, dweight_VD.to(weight_VD.dtype), db_V


# ---------------------------------------------------------------- over the likeliest tokens of a teacher


def forward_kl(
    hidden_AD: Tensor,
    teacher_AD: Tensor,
    *,
    heads: tuple[OutputHead, OutputHead],
    top: TopK,
    temperature: float = 1.0,
    chunk: int = 256,
) -> Tensor:
    """[A] float32: sum over the teacher's K likeliest tokens of q (log q - log p), nats; p of the first head, q of the
    second, neither of them renormalized; at least 0.

    The gradient flows to `hidden_AD` and the first head's parameters only: d / d logit_v = p_v Q - q_v, where Q is the
    sum of q over the K tokens, and q_v is 0 for the others. The teacher's vocabulary may have more rows at its end.
    """
    job = _TopKJob(heads[0], heads[1], temperature, chunk, top)
    kl_A = _ForwardKl.apply(hidden_AD, heads[0].linear.weight, heads[0].linear.bias, teacher_AD, job)
    return kl_A.clamp(min=0.0, max=top.most)


@dataclass(frozen=True)
class _TopKJob(_DivergenceJob):
    top: TopK

    def chosen(self, hidden_AD: Tensor, teacher_AD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """[A, V] logits and log p; [A, K] the tokens, and log q and log p there."""
        z_AV = logits(self.head, hidden_AD, self.temperature)
        logp_AV = self.head.log_softmax(z_AV)
        logq_AV = self.reference.log_softmax(logits(self.reference, teacher_AD, self.temperature))
        logq_AK, token_AK = likeliest(self.reference, logq_AV, k=self.top.k, below=self.head.size)
        row_AK, own_AK = _rows(self.head, token_AK)
        logp_AK = self.head.add(torch.where(own_AK, logp_AV.gather(1, row_AK), 0.0))
        return z_AV, logp_AV, token_AK, logq_AK, logp_AK

    def floored(self, logp_AK: Tensor) -> Tensor:
        return logp_AK if self.top.floor is None else logp_AK.clamp(min=self.top.floor)


def likeliest(head: OutputHead, logp_AV: Tensor, *, k: int, below: int) -> tuple[Tensor, Tensor]:
    """[A, K] the largest log-probs of the whole vocabulary, and their tokens, all of them smaller than `below`."""
    start = 0 if head.vocabulary is None else head.vocabulary.span.start
    own = min(max(below - start, 0), logp_AV.shape[1])
    logp_AK, token_AK = logp_AV[:, :own].topk(min(k, own))
    if head.vocabulary is None:
        return logp_AK, token_AK
    peers = head.vocabulary.peers
    found = logp_AK.new_zeros(2, peers.size, len(logp_AK), k, dtype=torch.float64)  # exact for tokens, too
    found[0, peers.rank] = -torch.inf
    found[0, peers.rank, :, : logp_AK.shape[1]] = logp_AK.double()
    found[1, peers.rank, :, : logp_AK.shape[1]] = token_AK.double() + start
    every_AW, tokens_AW = peers.add(found).transpose(1, 2).flatten(2)
    best_AK, at_AK = every_AW.topk(min(k, below))
    return best_AK.float(), tokens_AW.gather(1, at_AK).long()


def _rows(head: OutputHead, token_AK: Tensor) -> tuple[Tensor, Tensor]:
    """(row of each token in this rank's part of a vocabulary, whether it is this rank's)."""
    if head.vocabulary is None:
        return token_AK, torch.ones_like(token_AK, dtype=torch.bool)
    return head.vocabulary.local(token_AK)


class _ForwardKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_AD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        teacher_AD: Tensor,
        job: _TopKJob,
    ) -> Tensor:
        kl_A = torch.empty(len(hidden_AD), dtype=torch.float32, device=hidden_AD.device)
        for at in job.spans(len(hidden_AD)):
            _, _, _, logq_AK, logp_AK = job.chosen(hidden_AD[at], teacher_AD[at])
            logq_AK = job.floored(logq_AK)
            kl_A[at] = (logq_AK.exp() * (logq_AK - job.floored(logp_AK))).sum(-1)
        ctx.save_for_backward(hidden_AD, weight_VD, bias_V, teacher_AD)
        ctx.job = job
        return kl_A

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dkl_A: Tensor) -> tuple[Tensor | None, ...]:
        hidden_AD, weight_VD, bias_V, teacher_AD = ctx.saved_tensors
        job: _TopKJob = ctx.job

        def slopes(at: slice) -> tuple[Tensor, Tensor]:
            z_AV, logp_AV, token_AK, logq_AK, logp_AK = job.chosen(hidden_AD[at], teacher_AD[at])
            q_AK = job.floored(logq_AK).exp()
            if job.top.floor is not None:
                q_AK = torch.where(logp_AK >= job.top.floor, q_AK, 0.0)
            row_AK, own_AK = _rows(job.head, token_AK)
            dz_AV = logp_AV.exp_().mul_(q_AK.sum(-1, keepdim=True))
            return z_AV, dz_AV.scatter_add_(1, row_AK, torch.where(own_AK, -q_AK, 0.0)).mul_(dkl_A[at, None])

        return *_gradients(job, slopes, hidden_AD, weight_VD, bias_V), None, None
