"""A divergence of the policy and the reference over the whole vocabulary, or over likely tokens, without keeping [A, V]
logits of either model.

Shape letters: A rows asked for, D hidden, V vocabulary, S tokens that are compared (all, or the likeliest and a rest).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whet.algos.distillation import Divergence, TopK, of_support
from whet.models.logprobs import OutputHead, Temperature, cast, logits, slope, temperature_of
from whet.models.products import column_sums, product
from whet.types import WhetError


def divergence(
    hidden_AD: Tensor,
    reference_AD: Tensor,
    *,
    heads: tuple[OutputHead, OutputHead],
    of: Divergence,
    temperature: Temperature = 1.0,
    chunk: int = 256,
) -> Tensor:
    """[A] float32, nats: the divergence `of` of p, of the first head, and q, of the second, bounded as it says.

    The gradient flows to `hidden_AD` and the first head's parameters only. `chunk` rows of both logits at a time,
    computed again in backward. WhetError where whole vocabularies are compared and the two heads' differ; among likely
    tokens one vocabulary may have more rows at its end.
    """
    sizes = [h.size for h in heads]
    if of.top is None and sizes[0] != sizes[1]:
        raise WhetError(
            f"whole vocabularies are compared, and the policy's has {sizes[0]} tokens, but the reference's {sizes[1]}: "
            "take another algorithm.kl.estimator or algorithm.loss.divergence, or a reference with the same tokenizer"
        )
    job = _Job(heads[0], heads[1], temperature, chunk, of)
    found_A = _Divergence.apply(hidden_AD, heads[0].linear.weight, heads[0].linear.bias, reference_AD, job)
    return found_A if of.least is None and of.most is None else found_A.clamp(min=of.least, max=of.most)


@dataclass(frozen=True)
class _Support:
    """The tokens that some rows compare."""

    logp_AS: Tensor
    logq_AS: Tensor
    kept_AS: Tensor | None = None
    """False where a token stands a second time. None: none does."""
    token_AS: Tensor | None = None
    """None: all tokens that this rank has."""


@dataclass(frozen=True)
class _Job:
    head: OutputHead
    reference: OutputHead
    temperature: Temperature
    chunk: int
    of: Divergence

    def spans(self, rows: int) -> list[slice]:
        return [slice(start, start + self.chunk) for start in range(0, rows, self.chunk)]

    def compared(
        self, hidden_AD: Tensor, reference_AD: Tensor, rows: slice
    ) -> tuple[Tensor, Tensor, _Support]:
        """[A, V] logits and log p of some rows, and the tokens that are compared."""
        temperature = temperature_of(self.temperature, rows)
        z_AV = logits(self.head, hidden_AD[rows], temperature)
        logp_AV = self.head.log_softmax(z_AV)
        logq_AV = self.reference.log_softmax(logits(self.reference, reference_AD[rows], temperature))
        if self.of.top is None:
            return z_AV, logp_AV, _Support(logp_AV, logq_AV)
        token_AS, kept_AS = self._likely(self.of.top, logp_AV, logq_AV)
        logp_AS = self.head.of_tokens(logp_AV, token_AS)
        logq_AS = self.reference.of_tokens(logq_AV, token_AS)
        return z_AV, logp_AV, _Support(logp_AS, logq_AS, kept_AS, token_AS)

    def _likely(self, top: TopK, logp_AV: Tensor, logq_AV: Tensor) -> tuple[Tensor, Tensor | None]:
        """([A, S] the likeliest tokens, [A, S] bool False where the policy's stand among the teacher's already)."""
        below = min(self.head.size, self.reference.size)
        found = {
            "policy": lambda: likeliest(self.head, logp_AV, k=top.k, below=below),
            "teacher": lambda: likeliest(self.reference, logq_AV, k=top.k, below=below),
        }
        if top.of != "both":
            return found[top.of](), None
        theirs_AK, own_AK = found["teacher"](), found["policy"]()
        new_AK = (own_AK[:, :, None] != theirs_AK[:, None]).all(-1)
        return torch.cat((theirs_AK, own_AK), 1), torch.cat((torch.ones_like(new_AK), new_AK), 1)

    def whole(self, x_A: Tensor) -> Tensor:
        """Sums over the tokens compared, from those of this rank's part."""
        return self.head.add(x_A) if self.of.top is None else x_A


def likeliest(head: OutputHead, logp_AV: Tensor, *, k: int, below: int) -> Tensor:
    """[A, K] the tokens with the largest log-probs of the whole vocabulary, all of them smaller than `below`."""
    start = 0 if head.vocabulary is None else head.vocabulary.span.start
    own = min(max(below - start, 0), logp_AV.shape[1])
    logp_AK, token_AK = logp_AV[:, :own].topk(min(k, own))
    if head.vocabulary is None:
        return token_AK
    peers = head.vocabulary.peers
    found = logp_AK.new_zeros(2, peers.size, len(logp_AK), k, dtype=torch.float64)  # exact for tokens, too
    found[0, peers.rank] = -torch.inf
    found[0, peers.rank, :, : logp_AK.shape[1]] = logp_AK.double()
    found[1, peers.rank, :, : logp_AK.shape[1]] = token_AK.double() + start
    every_AW, tokens_AW = peers.add(found).transpose(1, 2).flatten(2)
    return tokens_AW.gather(1, every_AW.topk(min(k, below)).indices).long()


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_AD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        reference_AD: Tensor,
        job: _Job,
    ) -> Tensor:
        found_A = torch.empty(len(hidden_AD), dtype=torch.float32, device=hidden_AD.device)
        for rows in job.spans(len(hidden_AD)):
            _, _, s = job.compared(hidden_AD, reference_AD, rows)
            found_A[rows] = job.whole(of_support(job.of, s.logp_AS, s.logq_AS, s.kept_AS)[0].sum(-1))
        ctx.save_for_backward(hidden_AD, weight_VD, bias_V, reference_AD)
        ctx.job = job
        return found_A

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dfound_A: Tensor) -> tuple[Tensor | None, ...]:
        """d / d logit_v = g_v - p_v (sum of g), g_v the derivative by log p_v, 0 of tokens that are not compared."""
        hidden_AD, weight_VD, bias_V, reference_AD = ctx.saved_tensors
        job: _Job = ctx.job
        dhidden_AD = torch.empty_like(hidden_AD)
        dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        dbias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for rows in job.spans(len(hidden_AD)):
            z_AV, logp_AV, s = job.compared(hidden_AD, reference_AD, rows)
            g_AS = of_support(job.of, s.logp_AS, s.logq_AS, s.kept_AS)[1]
            dz_AV = logp_AV.exp().mul_(-job.whole(g_AS.sum(-1))[:, None])
            if s.token_AS is None:
                dz_AV += g_AS
            else:
                row_AS, own_AS = job.head.local(s.token_AS)
                dz_AV.scatter_add_(1, row_AS, torch.where(own_AS, g_AS, 0.0))
            dz_AV.mul_(dfound_A[rows, None])
            steep = slope(z_AV, job.head, temperature_of(job.temperature, rows))
            dz_AV = (dz_AV if steep is None else dz_AV.mul_(steep)).to(weight_VD.dtype)
            product(dz_AV, weight_VD, out=dhidden_AD[rows])
            product(dz_AV.t(), hidden_AD[rows], out=dweight_VD, add=True)
            if dbias_V is not None:
                dbias_V += column_sums(dz_AV)
            del z_AV, logp_AV, s, g_AS, dz_AV  # before the next rows' logits come
        job.head.add(dhidden_AD)
        return dhidden_AD, cast(dweight_VD, weight_VD), cast(dbias_V, bias_V), None, None
