"""Attention of packed batches and of decode steps, for whet's own models and for any transformers causal LM.

A model calls `attend(layer, q_NHD, k_NKD, v_NKD, scale=, window=, softcap=, sinks=)` and does not depend on which of
the two it got: `PackedAttention` (training) or `CachedAttention` (sampling: prefill and decode steps). Both give a
token the same bits.

Shape letters: N packed tokens, B rows of the cache, H query heads, K key/value heads, D head size, P pages of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from whet.models.activations import KnownOutputs, LayerOutput, NewRows
from whet.models.compiled import attend_and_lse
from whet.models.compiled_layers import CachedTokens
from whet.models.kernels import Ops
from whet.models.lazy_memory import lazy_zeros
from whet.models.segments import Bounds, Segments
from whet.models.torch_ops import PAGE, Weighing, cache_dtype
from whet.types import ConfigError

__all__ = [
    "PAGE",
    "Attend",
    "CachedAttention",
    "KvCache",
    "PackedAttention",
    "Segments",
    "hf_attention",
    "register_hf_attention",
]

HF_NAME = "whet"


class Attend(Protocol):
    """What a model's layers call."""

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, **how: Unpack[Weighing]
    ) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class KvCache:
    """Pages of 16 tokens, all layers. The scheduler owns the page numbers.

    A rollout is a row of page numbers and a length; position t of it lies in slot t % 16 of its page t // 16.
    Pages may be shared between rollouts. Keys are transposed inside a page, so that 16 keys are one vector.
    """

    k: Tensor
    """[layers, pages, K, D, 16]"""
    v: Tensor
    """[layers, pages, K, 16, D]"""
    ops: Ops

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        pages: int,
        kv_heads: int,
        head_dim: int,
        ops: Ops,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> KvCache:
        """An empty cache for a model of this dtype. Zeros: memory that nothing has written must hold finite numbers."""
        device = torch.device(device)
        dtype = cache_dtype(dtype, device)
        k = _zeros((layers, pages, kv_heads, head_dim, PAGE), dtype=dtype, device=device)
        v = _zeros((layers, pages, kv_heads, PAGE, head_dim), dtype=dtype, device=device)
        return cls(k, v, ops)

    @property
    def nbytes(self) -> int:
        """Memory of all pages, in bytes."""
        return self.k.nbytes + self.v.nbytes

    @property
    def pages(self) -> int:
        return self.k.shape[1]

    def write(self, layer: int, page_N: Tensor, slot_N: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> None:
        """Stores keys and values of N tokens of one layer, token i in slot slot_N[i] of page page_N[i]."""
        self.ops.write_kv(
            self.k[layer], self.v[layer], k_NKD.detach(), v_NKD=v_NKD.detach(), page_N=page_N, slot_N=slot_N
        )

    def copy_page(self, src: int, dst: int) -> None:
        """Page dst becomes a copy of page src in every layer (the last, partly filled page of a shared
        prompt)."""
        self.k[:, dst] = self.k[:, src]
        self.v[:, dst] = self.v[:, src]


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.zeros; on a CPU pages that are never used take no memory."""
    if device.type == "cpu":
        return lazy_zeros(shape, dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


@dataclass(frozen=True, eq=False)
class PackedAttention:
    """Attention over a packed batch."""

    segments: Segments
    ops: Ops
    known: KnownOutputs | None = None
    """Asked for what has been computed of these tokens."""

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, **how: Unpack[Weighing]
    ) -> Tensor:
        if self.known is not None:
            seen, lse = (self.known.given(layer, kind) for kind in (LayerOutput.SEEN, LayerOutput.LSE))
            known = None if seen is None or lse is None else (seen().view_as(q_NHD), lse())
            out_NHD, lse_NH = attend_and_lse(q_NHD, k_NKD, v_NKD, self.segments, known=known, **how)
            self.known.note(layer, LayerOutput.SEEN, out_NHD)
            self.known.note(layer, LayerOutput.LSE, lse_NH)
            return out_NHD
        return self.ops.attend_packed(q_NHD, k_NKD, v_NKD, self.segments, **how)


class CachedAttention:
    """Attention of new tokens of rows of the cache: those of row b stand at the positions from length_B[b] on.

    A call writes their keys and values into the pages, then each token attends over the positions up to its own.
    `table_BP` [B, P] names the pages of each row (entries past its last page are not read). No gradient.

    queries_B: None: one new token a row, a decode step. Else prefill: [B] int64, how many tokens of each row, packed
    row by row; queries_B, table_BP and length_B are then on the CPU.
    """

    def __init__(
        self,
        cache: KvCache,
        table_BP: Tensor,
        length_B: Tensor,
        ops: Ops,
        *,
        queries_B: Tensor | None = None,
    ) -> None:
        self.cache, self.ops, self.queries_B = cache, ops, queries_B
        self.kept: NewRows | None = None
        """Where the activations of the tokens are to be written, see `Activations.at`."""
        self.written = False
        """They have been."""
        length_B, table_BP = length_B.to(torch.int64), table_BP.to(torch.int32).contiguous()
        place = _place_on_cpu if table_BP.device.type == "cpu" else _place
        self.keys_B, self.position_N, page_N, slot_N = place(table_BP, length_B, queries_B, cache.pages)
        device = cache.k.device
        self.page_N, self.slot_N, self.table_BP = page_N, slot_N, table_BP
        if device.type != "cpu":
            self.page_N, self.slot_N, self.table_BP = (x.to(device) for x in (page_N, slot_N, table_BP))
        # once for all layers: whoever copies numbers to a GPU waits for what it computes
        self.bounds: Bounds | None = None
        if queries_B is not None and device.type == "cuda":
            self.bounds = Bounds.of(queries_B, self.keys_B, device)

    @property
    def tokens(self) -> CachedTokens:
        """The new tokens, for whole layers."""
        place = (self.table_BP, self.keys_B, self.queries_B, self.page_N, self.slot_N)
        return CachedTokens(self.cache.k, self.cache.v, *place, self.kept)

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, **how: Unpack[Weighing]
    ) -> Tensor:
        self.cache.write(layer, self.page_N, self.slot_N, k_NKD, v_NKD)
        return self.ops.attend_cached(
            q_NHD,
            self.cache.k[layer],
            self.cache.v[layer],
            table_BP=self.table_BP,
            keys_B=self.keys_B,
            queries_B=self.queries_B,
            bounds=self.bounds,
            **how,
        )


def _place_on_cpu(
    table_BP: Tensor, length_B: Tensor, queries_B: Tensor | None, pages: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """([B] keys, then of each new token its position, page and slot) of what stands in the memory of the CPU. By numpy,
    whose calls take a fraction of torch's on so few numbers.

    Raises ValueError for a page that does not exist."""
    table, length = table_BP.numpy(), length_B.numpy()
    new = 1 if queries_B is None else queries_B.numpy()
    keys, row = length + new, np.arange(len(length))
    if table.size and not (table.min() >= 0 and table.max() < pages):
        # a wrong page would be foreign memory to C: pages up to the last one must exist, later ones may be anything
        used = np.where(np.arange(table.shape[1]) <= ((keys - 1) // PAGE)[:, None], table, 0)
        low, high = int(used.min()), int(used.max())
        if low < 0 or high >= pages:
            raise ValueError(f"page numbers {low} .. {high}, but the cache has pages 0 .. {pages - 1}")
    position = length
    if queries_B is not None:
        row = np.repeat(row, new)
        position = np.arange(len(row)) + (keys - np.cumsum(new))[row]
    page = table[row, position // PAGE].astype(np.int64)
    keys_B, position_N, page_N, slot_N = map(torch.from_numpy, (keys, position, page, position % PAGE))
    return keys_B, position_N, page_N, slot_N


def _place(
    table_BP: Tensor, length_B: Tensor, queries_B: Tensor | None, pages: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of a decode step's tokens on a device, which the host does not wait for: indexing checks itself."""
    assert queries_B is None
    page_B = table_BP.gather(1, (length_B // PAGE)[:, None]).squeeze(1)
    return length_B + 1, length_B, page_B.to(torch.int64), length_B % PAGE


@torch.compiler.disable
def hf_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: Attend | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, heads, N, D] in, ([1, N, heads, D], None) out.

    `plan` is passed as a keyword of `model(...)` through every layer, also when a layer is recomputed in the backward
    pass. The mask is not read: the plan defines which tokens each token attends to.
    """
    if plan is None:
        raise ConfigError(
            f"the model cannot be packed: {type(module).__name__} was not given the keyword `plan` of model(...), "
            "because its layers do not pass on keywords; choose another decoder-only model"
        )
    if dropout:
        raise ConfigError(
            f"attention dropout is {dropout}, which whet does not support; set attention_dropout=0"
        )
    q_NHD, k_NKD, v_NKD = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    scale = q_NHD.shape[-1] ** -0.5 if scaling is None else scaling
    out_NHD = plan(
        int(module.layer_idx),  # type: ignore[arg-type]
        q_NHD,
        k_NKD,
        v_NKD,
        scale=scale,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out_NHD.view(query.shape[0], -1, *out_NHD.shape[1:]), None


def register_hf_attention() -> str:
    """Makes `attn_implementation="whet"` known to transformers; safe to call again. Returns the name.

    No mask function is registered under the name, on purpose: transformers then builds no dense mask.
    """
    from transformers import AttentionInterface  # heavy: kept out of the command line's start-up

    AttentionInterface.register(HF_NAME, hf_attention)
    return HF_NAME
