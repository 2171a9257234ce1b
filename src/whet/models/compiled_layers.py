"""Whole layers over the cache in one call of C: a decode step of a small model is otherwise mostly calls.

What is computed is what `fused_forward.one_layer` computes, by the same kernels in the same order, so bits are the
same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from whet.config.sizes import VECTOR
from whet.models.activations import LayerOutput, NewRows
from whet.models.compiled import MAX_HEAD, CachedStruct, c_library, check_memory
from whet.models.products import multiplies
from whet.models.torch_ops import ACTS, Act


class LayerWeights(NamedTuple):
    """Of a decoder layer whose products are plain: the pointers of Layer in kernels.c, in its order."""

    norm_in: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    norm_mid: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    o_bias: Tensor | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


class LayerNumbers(NamedTuple):
    """What is no tensor, the same in all layers."""

    head_dim: int
    scale: float
    eps: float
    offset: float
    """Added to the weight of RMS norms."""
    act: Act


class CachedTokens(NamedTuple):
    """Where the tokens of a call stand in the cache: see `attention.CachedAttention`."""

    k: Tensor
    v: Tensor
    table_BP: Tensor
    keys_B: Tensor
    queries_B: Tensor | None
    page_N: Tensor
    slot_N: Tensor
    kept: NewRows | None = None
    """Where their activations are written; None: they are not kept."""


class LayersStruct(ctypes.Structure):
    """Layers of kernels.c."""

    _fields_ = [
        *(("cached", CachedStruct), ("layer", c_void_p), ("layers", c_int64), ("layer_pages", c_int64)),
        *((name, c_void_p) for name in ("h", "cos", "sin", "page", "slot")),
        *((name, c_int64) for name in ("N", "D", "F")),
        *(("eps", c_float), ("offset", c_float), ("act", c_int64)),
        *(("kept", c_void_p * len(LayerOutput)), ("kept_layer", c_int64 * len(LayerOutput))),
    ]


def cached_layers(
    layers: Sequence[LayerWeights],
    windows: Sequence[int],
    numbers: LayerNumbers,
    h_ND: Tensor,
    *,
    tokens: CachedTokens,
    cos_ND: Tensor,
    sin_ND: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """(what the last block adds, residual), [N, D] each, after all layers, without gradient.

    windows: 0 where a layer has none. None where it does not compute this: not everything is a dense float32 tensor
    that `products` multiplies.
    """
    k, v, table, keys, queries, page, slot, kept = tokens
    given = (h_ND, cos_ND, sin_ND, k, v, *(t for t in chain(*layers) if t is not None))
    if not computes(given, numbers):
        return None
    what, _memory_of_layers = described(layers, windows, numbers, k, v)
    cached = what.cached
    cached.table, cached.keys = table.data_ptr(), keys.data_ptr()
    cached.queries = 0 if queries is None else queries.data_ptr()
    cached.rows, cached.table_n = table.shape
    if kept is not None:
        check_kept(kept, layers, h_ND.shape[1], cached.heads)
        keep(what, kept)
    what.h, what.cos, what.sin, what.page, what.slot = (
        t.data_ptr() for t in (h_ND, cos_ND, sin_ND, page, slot)
    )
    what.N = len(h_ND)
    delta_ND, sum_ND = torch.empty_like(h_ND), torch.empty_like(h_ND)
    check_memory(c_library().whet_cached_layers(ctypes.byref(what), delta_ND.data_ptr(), sum_ND.data_ptr()))
    return delta_ND, sum_ND


def computes(given: Sequence[Tensor], numbers: LayerNumbers) -> bool:
    """Whether C does: dense float32 tensors that `products` multiplies, heads of whole vectors."""
    dense = multiplies(*given) and all(t.is_contiguous() for t in given)
    return (
        dense
        and given[0].dtype is torch.float32
        and not numbers.head_dim % VECTOR
        and numbers.head_dim <= MAX_HEAD
    )


def described(
    layers: Sequence[LayerWeights], windows: Sequence[int], numbers: LayerNumbers, k: Tensor, v: Tensor
) -> tuple[LayersStruct, ctypes.Array[c_int64]]:
    """These layers for C, over this cache; and memory of theirs, to be held as long as they are used."""
    rows = [
        (*(0 if t is None else t.data_ptr() for t in layer), window) for layer, window in zip(layers, windows)
    ]
    layer = (c_int64 * (len(rows) * len(rows[0])))(*chain(*rows))
    first, size = layers[0], numbers.head_dim
    heads, kv_heads = len(first.q) // size, len(first.k) // size
    cached = CachedStruct(
        *(0, k.data_ptr(), v.data_ptr()),
        *(heads * size, size, heads, kv_heads, size, 0, numbers.scale, 0.0),
        threads=torch.get_num_threads(),
    )
    what = LayersStruct(cached, ctypes.addressof(layer), len(rows), k.stride(0))
    what.D, what.F = first.q.shape[1], len(first.gate)
    what.eps, what.offset, what.act = numbers.eps, numbers.offset, ACTS[numbers.act]
    return what, layer


def keep(what: LayersStruct, kept: NewRows) -> None:
    """Activations are written there."""
    what.kept[:] = [x.data_ptr() + kept.first * x.stride(1) * x.element_size() for x in kept.kinds]
    what.kept_layer[:] = [x.stride(0) for x in kept.kinds]


def check_kept(kept: NewRows, layers: Sequence[LayerWeights], hidden: int, heads: int) -> None:
    """C writes as many numbers as the weights have rows."""
    first = layers[0]
    own, shared, ffn = len(first.q), len(first.k), len(first.gate)
    widths = (own, shared, shared, own, heads, hidden, ffn, ffn, hidden)
    room = len(kept.kinds[0][0]) if kept.kinds else 0
    wanted = [(len(layers), room, width) for width in widths]
    dense = all(x.is_contiguous() and x.dtype is torch.float32 for x in kept.kinds)
    if (
        not dense
        or [tuple(x.shape) for x in kept.kinds] != wanted
        or not 0 <= kept.first <= room - kept.tokens
    ):
        raise ValueError(
            f"activations: room of {[tuple(x.shape) for x in kept.kinds]}, rows {kept.first} to "
            f"{kept.first + kept.tokens}, expected {wanted}"
        )
