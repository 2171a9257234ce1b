"""Context parallelism: the tokens of a packed batch are spread over ranks (DeepSpeed Ulysses, arXiv:2309.14509).

Everything but attention works token by token, each rank by itself. For attention, an all-to-all turns "some tokens, all
heads" into "all tokens, some heads", and another one back. The attention plan is that of the full packed batch, so
shared prompts, windows and positions are the same as on one rank, and attention is spread evenly for any lengths. A
parameter's gradient is the sum over the ranks.

Shape letters: U tokens of the packed batch, T those of this rank, N tokens of the batch, A sampled tokens, H query
heads, K key/value heads, D head size, C ranks, L layers, E experts of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.models.attention import Attend
from whet.models.collectives import Peers, exchanged, summed
from whet.models.packing import PackedLayout
from whet.models.torch_ops import Weighing
from whet.types import ConfigError


@dataclass(frozen=True, eq=False)
class Share:
    """This rank's tokens of a packed batch."""

    packed: PackedLayout
    """The whole."""
    peers: Peers

    @property
    def span(self) -> slice:
        """Which of the U tokens."""
        return self.peers.span(len(self.packed.token_ids_U))

    @property
    def token_ids_T(self) -> Tensor:
        return self.packed.token_ids_U[self.span]

    @property
    def position_T(self) -> Tensor:
        return self.packed.position_U[self.span]

    @property
    def routed_TLE(self) -> Tensor | None:
        return None if self.packed.routed_ULE is None else self.packed.routed_ULE[self.span]

    def predicted(self, mask_N: Tensor) -> tuple[Tensor, Tensor]:
        """([A] the sampled tokens, as places in the batch, that this rank's hidden states predict; [A] the row of T of
        each). Over all ranks each sampled token is there once."""
        at_A = torch.nonzero(mask_N).flatten()
        row_A = self.packed.predictor_N[at_A]
        own_A = (row_A >= self.span.start) & (row_A < self.span.stop)
        return at_A[own_A], row_A[own_A] - self.span.start

    def predicting(self, mask_N: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """([A, D] the hidden states that predict the sampled tokens, with cp those of this rank; [A] where in the batch
        those are)."""
        at_A, row_A = self.predicted(mask_N)
        return F.embedding(row_A, hidden_TD), at_A

    def gathered(self, own_T: Tensor, *over: Peers) -> Tensor:
        """[U, ...] whole numbers of all ranks' tokens. over: ranks that have other parts of these, and else zeros."""
        all_U = own_T.new_zeros(len(self.packed.token_ids_U), *own_T.shape[1:], dtype=torch.int32)
        all_U[self.span] = own_T.int()  # collectives do not have every small type
        for peers in (self.peers, *over):
            all_U = summed(all_U, peers)
        return all_U.to(own_T.dtype)

    def attend(self, inner: Attend) -> Attend:
        """Attention for this rank's tokens, from attention over the whole packed batch."""
        return inner if self.peers.size == 1 else Ulysses(inner, self.peers, len(self.packed.token_ids_U))


@dataclass(frozen=True, eq=False)
class Ulysses:
    """Attention of tokens spread over ranks, each of which computes some of the heads."""

    inner: Attend
    """Attention over all tokens."""
    peers: Peers
    tokens: int
    """U"""

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, **how: Unpack[Weighing]
    ) -> Tensor:
        ranks, heads, kv_heads = self.peers.size, q_NHD.shape[1], k_NKD.shape[1]
        if heads % ranks:
            raise ConfigError(
                f"train.parallel.cp={ranks} does not divide the {heads} attention heads of a rank; each needs the "
                "same number: choose another cp or tp"
            )
        repeat = ranks // math.gcd(kv_heads, ranks)
        k_NKD, v_NKD = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (k_NKD, v_NKD))
        parts = [x.unflatten(1, (ranks, -1)) for x in (q_NHD, k_NKD, v_NKD)]
        sizes = [part.shape[2] for part in parts]
        q_UHD, k_UKD, v_UKD = self._to_heads(torch.cat(parts, 2)).split(sizes, 1)
        if how["sinks"] is not None:
            how = {**how, "sinks": how["sinks"].chunk(ranks)[self.peers.rank]}
        out_UHD = self.inner(layer, q_UHD, k_UKD, v_UKD, **how)
        return self._to_tokens(out_UHD)

    def _to_heads(self, x_TCHD: Tensor) -> Tensor:
        """[U, H / C, D] all tokens of this rank's heads, from all heads [T, C, H / C, D] of its tokens."""
        spans = self.peers.spans(self.tokens)
        sent = x_TCHD.transpose(0, 1).flatten(0, 1)
        return exchanged(sent, self.peers, send=[x_TCHD.shape[0]] * self.peers.size, receive=spans)

    def _to_tokens(self, x_UHD: Tensor) -> Tensor:
        """[T, H, D] back."""
        spans = self.peers.spans(self.tokens)
        own = spans[self.peers.rank]
        found = exchanged(x_UHD, self.peers, send=spans, receive=[own] * self.peers.size)
        return found.unflatten(0, (self.peers.size, own)).transpose(0, 1).flatten(1, 2)
