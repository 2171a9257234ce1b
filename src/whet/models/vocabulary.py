"""A vocabulary spread over ranks: embedding, output layer, log-probs and entropies without the full [A, V] logits on
any rank.

Each rank has some rows of the embedding and the same of the output layer. Values with one number per row (log-sum-exp,
entropy) are summed over the ranks; logits are never sent.

Shape letters: U tokens, A requested rows, V tokens of the vocabulary that this rank has, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.models.collectives import Peers, summed
from whet.models.products import linear


@dataclass(frozen=True)
class Vocabulary:
    """This rank's part of the vocabulary. `logprobs` and `logprobs_backward` stand for those of `Ops`."""

    size: int
    """Tokens in all."""
    peers: Peers

    @property
    def span(self) -> slice:
        return self.peers.span(self.size)

    def local(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(row of each token in this rank's part, 0 where it is another's; whether it is this rank's)."""
        own = (token_ids >= self.span.start) & (token_ids < self.span.stop)
        return torch.where(own, token_ids - self.span.start, 0), own

    def add(self, x: Tensor) -> Tensor:
        return self.peers.add(x)

    def logsumexp(self, logits_AV: Tensor) -> Tensor:
        """[A] over the whole vocabulary, without gradient."""
        most_A = self.peers.largest(logits_AV.amax(-1))
        return self.add((logits_AV - most_A[:, None]).exp_().sum(-1)).log_().add_(most_A)

    def logprobs(self, logits_AV: Tensor, targets_A: Tensor) -> tuple[Tensor, Tensor]:
        """(log-prob of the target [A], entropy [A] in nats) of softmax over the whole vocabulary."""
        row_A, own_A = self.local(targets_A)
        logp_AV = logits_AV - self.logsumexp(logits_AV)[:, None]
        entropy_A = torch.special.entr(logp_AV.exp()).sum(-1)
        logp_A = torch.where(own_A, logp_AV.gather(1, row_A[:, None]).squeeze(1), 0.0)
        logp_A, entropy_A = self.add(torch.stack((logp_A, entropy_A)))
        return logp_A, entropy_A

    def logprobs_backward(
        self,
        logits_AV: Tensor,
        targets_A: Tensor,
        logp_N: Tensor,
        entropy_N: Tensor,
        dlogp_N: Tensor,
        dentropy_N: Tensor | None,
    ) -> None:
        """Overwrites this rank's logits with their gradient; see the twin of the same name."""
        row_A, own_A = self.local(targets_A)
        logp_AV = logits_AV.sub_(self.logsumexp(logits_AV)[:, None])
        p_AV = logp_AV.exp()
        if dentropy_N is None:
            torch.mul(p_AV, -dlogp_N[:, None], out=logits_AV)
        else:
            logp_AV.masked_fill_(p_AV == 0, 0.0)  # p log p is 0 at p = 0, not NaN
            logp_AV.add_(entropy_N[:, None]).mul_(-dentropy_N[:, None]).sub_(dlogp_N[:, None]).mul_(p_AV)
        logits_AV.scatter_add_(1, row_A[:, None], torch.where(own_A, dlogp_N, 0.0)[:, None])


class VocabularyEmbedding(nn.Module):
    """This rank's rows of an embedding; returns the full embedding's vectors."""

    def __init__(self, embedding: nn.Embedding, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.weight, self.vocabulary = embedding.weight, vocabulary
        self.num_embeddings, self.embedding_dim = vocabulary.size, embedding.embedding_dim
        self.register_buffer("embed_scale", getattr(embedding, "embed_scale", None), persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        row, own = self.vocabulary.local(token_ids)
        found = summed(
            F.embedding(row, self.weight) * own[..., None].to(self.weight.dtype), self.vocabulary.peers
        )
        scale: Any = self.embed_scale
        return found if scale is None else found * scale.to(self.weight.dtype)


class VocabularyHead(nn.Module):
    """This rank's rows of an output layer; returns their logits."""

    def __init__(self, layer: nn.Linear, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.weight, self.bias, self.vocabulary = layer.weight, layer.bias, vocabulary
        self.in_features, self.out_features = layer.in_features, len(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
