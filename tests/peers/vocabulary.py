"""What needs the logits of both models, not only log-probs of the sampled tokens: divergences over a vocabulary and the
discriminants of the entropy.

Both sides get the same logits in float32: whet through an output head with the identity for a matrix, so that the
gradient of its hidden states is that of the logits. V: tokens of the vocabulary.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from peers import ours
from peers.table import Row
from whet.models.divergence import divergence
from whet.models.logprobs import OutputHead, discriminants
from whet.prove.cases import KINDS, Case
from whet.prove.numbers import Numbers, before

V = 13


def logits(case: Case) -> tuple[Tensor, Tensor]:
    """[N, V] of the policy and of the teacher, which is near it; the same for the same case."""
    kinds = (*KINDS, "pairs")
    made = torch.Generator().manual_seed(1000 * kinds.index(case.kind) + case.seed)
    far = 20.0 if case.kind == "far apart" else 1.0
    policy_NV = 2 * torch.randn(case.batch.tokens, V, generator=made)
    return policy_NV, policy_NV + far * torch.randn(case.batch.tokens, V, generator=made)


def padded(case: Case, x_NV: Tensor) -> Tensor:
    """[R, T, V] as `Case.padded`."""
    at = case.column_N >= 0
    out = x_NV.new_zeros(case.batch.rollouts, case.width, x_NV.shape[1])
    return out.index_put((case.batch.rollout_N[at], case.column_N[at]), x_NV[at])


@cache
def head() -> OutputHead:
    """The identity."""
    linear = nn.Linear(V, V, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(V))
    return OutputHead(linear)


def loss(row: Row, case: Case) -> Numbers:
    """Of whet: what the engine adds to the loss, and its gradient by the policy's logits [R, T, V]."""
    made = ours.algorithm(row, width=case.width)
    policy_NV, teacher_NV = logits(case)
    policy_NV.requires_grad_()
    batch = before(made, case.batch)
    at, weight_N = batch.mask_N, made.weights(batch, 1)
    found_A = divergence(policy_NV[at], teacher_NV[at], heads=(head(), head()), of=made.divergence)
    total = made.full_kl_coef * (found_A * weight_N[at]).sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert policy_NV.grad is not None
    return {"loss": total.detach(), "grad": padded(case, policy_NV.grad)}


def tokens(case: Case) -> Tensor:
    """[N] the tokens of the batch, as ones of this vocabulary."""
    return case.batch.token_ids_N % V


def discriminant(case: Case, *, centred: bool) -> Tensor:
    """[N] by whet, float64."""
    policy_NV, _ = logits(case)
    with torch.no_grad():
        return discriminants(policy_NV, tokens(case), head=head(), centred=centred).double()
