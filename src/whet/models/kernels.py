"""The operations between the matrix products: compiled C on CPU, the PyTorch fallback everywhere else.

`load(kind)` gives an `Ops`, a table of functions. Every function computes a row (a token, a head) with an arithmetic
order that depends on that row's data alone: not on the batch, the row's place in it, the tiling or the number of
threads, and in attention not on whether a key lies in a shared prompt. So a log-prob in decode equals the trainer's bit
for bit, as the matrix products are row-invariant too (`products`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Literal, Protocol, Unpack

import torch
from torch import Tensor

from whet.models import compiled, paged, products, torch_ops
from whet.models.build import BuildError, library
from whet.models.compiled_layers import CachedTokens, LayerNumbers, LayerWeights, cached_layers
from whet.models.segments import Bounds, Segments
from whet.models.torch_ops import Act, Weighing
from whet.types import ConfigError

Kind = Literal["auto", "torch", "compiled"]
"""machine.kernels."""


class RmsNorm(Protocol):
    def __call__(self, x_ND: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0) -> Tensor: ...


class AddRmsNorm(Protocol):
    def __call__(
        self, x_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]: ...


class NormRope(Protocol):
    def __call__(
        self,
        x_NHD: Tensor,
        weight_D: Tensor | None,
        eps: float,
        cos_ND: Tensor,
        sin_ND: Tensor,
        *,
        offset: float = 0.0,
    ) -> Tensor: ...


class Glu(Protocol):
    def __call__(self, gate_NF: Tensor, up_NF: Tensor, *, act: Act) -> Tensor: ...


class AttendPacked(Protocol):
    def __call__(
        self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, segments: Segments, **how: Unpack[Weighing]
    ) -> Tensor: ...


class AttendCached(Protocol):
    def __call__(
        self,
        q_NHD: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        table_BP: Tensor,
        keys_B: Tensor,
        queries_B: Tensor | None = None,
        bounds: Bounds | None = None,
        **how: Unpack[Weighing],
    ) -> Tensor: ...


class WriteKv(Protocol):
    def __call__(
        self,
        k_pages: Tensor,
        v_pages: Tensor,
        k_NKD: Tensor,
        *,
        v_NKD: Tensor,
        page_N: Tensor,
        slot_N: Tensor,
    ) -> None: ...


class CachedLayers(Protocol):
    def __call__(
        self,
        layers: Sequence[LayerWeights],
        windows: Sequence[int],
        numbers: LayerNumbers,
        h_ND: Tensor,
        *,
        tokens: CachedTokens,
        cos_ND: Tensor,
        sin_ND: Tensor,
    ) -> tuple[Tensor, Tensor] | None: ...


class Logprobs(Protocol):
    def __call__(self, logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]: ...


class LogprobsBackward(Protocol):
    def __call__(
        self,
        logits_NV: Tensor,
        targets_N: Tensor,
        logp_N: Tensor,
        entropy_N: Tensor,
        dlogp_N: Tensor,
        dentropy_N: Tensor | None,
    ) -> None: ...


class Sample(Protocol):
    def __call__(self, logits_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Ops:
    """The table of functions; semantics and shapes are documented at the fallbacks of the same name
    (`models.torch_ops`).

    The compiled functions take fp32 CPU tensors and pass everything else to their fallback.
    """

    name: Literal["torch", "compiled"]
    reason: str
    """Why these: what was asked for, or what the compiler said."""
    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    norm_rope: NormRope
    glu: Glu
    attend_packed: AttendPacked
    attend_cached: AttendCached
    write_kv: WriteKv
    logprobs: Logprobs
    logprobs_backward: LogprobsBackward
    sample: Sample
    cached_layers: CachedLayers | None = None
    """Whole layers over the cache at once (`models.compiled_layers`); None: operation by operation."""


def used(ops: Ops, device: torch.device) -> str:
    """What computes a model on this device, in words."""
    if device.type != "cuda" or ops.name == "torch":
        return f"{ops.name} ({ops.reason})"
    why = paged.lacks()
    return "Triton, on the GPU" if why is None else f"torch, on the GPU ({why})"


FUNCTIONS = tuple(f.name for f in fields(Ops) if f.name not in ("name", "reason", "cached_layers"))
"""The operations that every implementation has."""


def load(kind: Kind) -> Ops:
    """The operations of `machine.kernels`, for all that this process computes from here on: it also says whose the
    products of half precision are (`products.own_halves`). As `table`."""
    ops = table(kind)
    products.own_halves(kind == "compiled")
    return ops


@cache
def table(kind: Kind) -> Ops:
    """The operations alone; compiled at the first use on a machine (a few seconds), then cached.

    Raises ConfigError, with the compiler's output, where `compiled` was requested and cannot be built.
    """
    if kind == "torch":
        return _torch("asked for: machine.kernels=torch")
    try:
        _, reason = library()
    except BuildError as error:
        if kind == "compiled":
            raise ConfigError(
                f"machine.kernels=compiled, but the kernels cannot be built: {error}. Install a C compiler "
                "(cc, gcc or clang) or set machine.kernels=torch."
            ) from error
        return _torch(f"no compiled kernels: {error}")
    functions = {f: getattr(compiled, f) for f in FUNCTIONS}
    return Ops(name="compiled", reason=reason, cached_layers=cached_layers, **functions)


def _torch(reason: str) -> Ops:
    return Ops(name="torch", reason=reason, **{f: getattr(torch_ops, f) for f in FUNCTIONS})
