"""The operations between the matrix products on an NVIDIA GPU: each one Triton kernel forward and one backward, where
PyTorch's launch five to ten and write what lies between to memory. Everything else goes to the PyTorch fallback.

Semantics, shapes and errors are documented at the fallbacks of the same name (`models.torch_ops`). In half precision a
kernel computes in float32 and rounds its result once. A sampled token's log-prob has the bits of `logprobs`.
`attend_packed` and `attend_cached` are the fallback's: these have kernels of their own (flash attention, `paged`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from whet.models import paged, torch_ops
from whet.models.torch_ops import ACTS, Act, attend_cached, attend_packed

__all__ = ["attend_cached", "attend_packed", "call"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 1 << 15
"""Numbers of a row that one program holds."""
_BLOCK = 4096
"""Logits of a program."""
_COLUMNS = 1024
"""Numbers of a program of `glu`."""
_ROWS = 16
"""Rows of a program of a backward pass, at least: each leaves its part of the weight's gradient."""
_PROGRAMS = 1024
_HEADS = 16
"""Heads of a program, at most."""


def fits(*tensors: Tensor) -> bool:
    """Whether the kernels can read these: plain tensors of a GPU, and Triton is there."""
    plain = all(t.is_cuda and t.dtype in DTYPES and type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
    return plain and paged.lacks() is None


def _kernels() -> Any:
    from whet.models import triton_kernels  # here: it needs Triton

    return triton_kernels


def next_power(n: int) -> int:
    """The next power of two."""
    return 1 << max(n - 1, 0).bit_length()


def _warps(wide: int) -> int:
    return 4 if wide <= 2048 else 8 if wide <= 8192 else 16


def call(function: type[Function], *args: Any) -> Any:
    """A function that has `compute`, which is called directly where no gradient is asked for."""
    return function.apply(*args) if torch.is_grad_enabled() else function.compute(*args)  # type: ignore[attr-defined]


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _RmsNorm(Function):
    """(normed, x + residual or None)."""

    @staticmethod
    def compute(
        x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor | None]:
        x, width = x.contiguous(), x.shape[-1]
        out, wide = torch.empty_like(x), next_power(width)
        total = None if residual is None else torch.empty_like(x)
        more = x if residual is None else residual.contiguous()
        if x.numel():
            _kernels().norm[(x.numel() // width,)](
                x, more, weight, out, x if total is None else total, width, eps, offset,
                ADD=residual is not None, WIDE=wide, num_warps=_warps(wide),
            )  # fmt: skip
        return out, total

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor | None]:
        out, total = _RmsNorm.compute(x, residual, weight, eps, offset)
        ctx.eps, ctx.offset = eps, offset
        ctx.save_for_backward(x if total is None else total, weight)
        ctx.set_materialize_grads(False)
        return out, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, more: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if dy is None:
            return more, more, None, None, None
        x, dy, width = x.contiguous(), dy.contiguous(), x.shape[-1]
        rows, wide = x.numel() // width, next_power(width)
        each = max(_ROWS, -(-rows // _PROGRAMS))
        parts = -(-rows // each)
        dx, part = torch.empty_like(x), x.new_empty(parts, width, dtype=torch.float32)
        if rows:
            _kernels().norm_backward[(parts,)](
                x, weight, dy, x if more is None else more.contiguous(), dx, part, rows, width, ctx.eps, ctx.offset,
                each, ADD=more is not None, WEIGHT=ctx.needs_input_grad[2], WIDE=wide, num_warps=_warps(wide),
            )  # fmt: skip
        dw = part.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return dx, dx if ctx.needs_input_grad[1] else None, dw, None, None


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    if not fits(x_ND, weight_D) or x_ND.shape[-1] > _WIDEST:
        return torch_ops.rms_norm(x_ND, weight_D, eps, offset=offset)
    return call(_RmsNorm, x_ND, None, weight_D, eps, offset)[0]


def add_rms_norm(
    x_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    same = x_ND.dtype == residual_ND.dtype and x_ND.shape == residual_ND.shape
    if not same or not fits(x_ND, residual_ND, weight_D) or x_ND.shape[-1] > _WIDEST:
        return torch_ops.add_rms_norm(x_ND, residual_ND, weight_D, eps, offset=offset)
    found: tuple[Tensor, Tensor] = call(_RmsNorm, x_ND, residual_ND, weight_D, eps, offset)
    return found


class _NormRope(Function):
    @staticmethod
    def compute(
        x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, offset: float
    ) -> Tensor:
        x = _dense_rows(x)
        tokens, heads, size = x.shape
        out, block = x.new_empty(x.shape), min(_HEADS, next_power(heads))
        if x.numel():
            _kernels().turn[(tokens, -(-heads // block))](
                x, x if weight is None else weight, cos, sin, out, heads, size // 2, eps, offset, *x.stride()[:2],
                NORM=weight is not None, HEADS=block, HALF=next_power(size // 2),
            )  # fmt: skip
        return out

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, offset: float
    ) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.eps, ctx.offset = eps, offset
        ctx.save_for_backward(*(() if weight is None else (x, weight)), cos, sin)
        return _NormRope.compute(x, weight, eps, cos, sin, offset)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *normed, cos, sin = ctx.saved_tensors
        dy = dy.contiguous()
        x, weight = (_dense_rows(normed[0]), normed[1]) if normed else (dy, None)
        tokens, heads, size = dy.shape
        block = min(_HEADS, next_power(heads))
        each, groups = max(_ROWS, -(-tokens // _PROGRAMS)), -(-heads // block)
        parts = -(-tokens // each)
        dx = torch.empty_like(dy)
        part = dy if weight is None else dy.new_empty(parts * groups, size, dtype=torch.float32)
        if dy.numel():
            _kernels().turn_backward[(parts, groups)](
                x, x if weight is None else weight, cos, sin, dy, dx, part, tokens, heads, size // 2, ctx.eps,
                ctx.offset, *x.stride()[:2], each, NORM=weight is not None, HEADS=block, HALF=next_power(size // 2),
            )  # fmt: skip
        dw = None if weight is None else part.sum(0).to(weight.dtype)
        return dx, dw, None, None, None, None


def norm_rope(
    x_NHD: Tensor,
    weight_D: Tensor | None,
    eps: float,
    cos_ND: Tensor,
    sin_ND: Tensor,
    *,
    offset: float = 0.0,
) -> Tensor:
    given = (x_NHD, cos_ND, sin_ND) if weight_D is None else (x_NHD, cos_ND, sin_ND, weight_D)
    whole = (len(x_NHD), x_NHD.shape[2])
    fine = cos_ND.dtype is sin_ND.dtype is torch.float32 and cos_ND.shape == sin_ND.shape == whole
    if not fine or not fits(*given) or x_NHD.shape[2] > _COLUMNS or x_NHD.shape[2] % 2:
        return torch_ops.norm_rope(x_NHD, weight_D, eps, cos_ND, sin_ND, offset=offset)
    return call(_NormRope, x_NHD, weight_D, eps, cos_ND.contiguous(), sin_ND.contiguous(), offset)


class _Glu(Function):
    @staticmethod
    def compute(gate: Tensor, up: Tensor, act: int) -> Tensor:
        gate, up = _dense_rows(gate), _dense_rows(up)
        out = gate.new_empty(gate.shape)
        if out.numel():
            _kernels().glu[(gate.shape[0], -(-gate.shape[1] // _COLUMNS))](
                gate, up, out, gate.shape[1], gate.stride(0), up.stride(0), ACT=act, BLOCK=_COLUMNS
            )
        return out

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: int) -> Tensor:
        ctx.act = act
        ctx.save_for_backward(gate, up)
        return _Glu.compute(gate, up, act)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = (_dense_rows(t) for t in ctx.saved_tensors)
        dout = dout.contiguous()
        dgate, dup = torch.empty_like(dout), torch.empty_like(dout)
        if dout.numel():
            _kernels().glu_backward[(gate.shape[0], -(-gate.shape[1] // _COLUMNS))](
                gate, up, dout, dgate, dup, gate.shape[1], gate.stride(0), up.stride(0), ACT=ctx.act, BLOCK=_COLUMNS
            )  # fmt: skip
        return dgate, dup, None


def glu(gate_NF: Tensor, up_NF: Tensor, *, act: Act) -> Tensor:
    same = gate_NF.dtype == up_NF.dtype and gate_NF.shape == up_NF.shape
    if gate_NF.dim() != 2 or not same or not fits(gate_NF, up_NF):
        return torch_ops.glu(gate_NF, up_NF, act=act)
    return call(_Glu, gate_NF, up_NF, ACTS[act])


def _of_blocks(logits: Tensor) -> tuple[list[Tensor], int]:
    """([rows, blocks] float32: the largest logit, the sum of exp below it and that of their products; blocks)."""
    rows, size = logits.shape
    count = -(-size // _BLOCK)
    found = [logits.new_empty(rows, count) for _ in range(3)]
    _kernels().blocks[(rows, count)](logits, *found, size, count, BLOCK=_BLOCK, num_warps=8)
    return found, count


def _logits(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_contiguous() and len(x) > 0 and fits(x)


def logprobs(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    if not _logits(logits_NV):
        return torch_ops.logprobs(logits_NV, targets_N)
    (top, mass, tilt), count = _of_blocks(logits_NV)
    logp_N, entropy_N = (logits_NV.new_empty(len(logits_NV)) for _ in range(2))
    _kernels().logprobs[(len(logits_NV),)](
        logits_NV, targets_N.contiguous(), top, mass, tilt, logp_N, entropy_N, logits_NV.shape[1], count,
        COUNT=next_power(count), enable_fp_fusion=False,
    )  # fmt: skip
    return logp_N, entropy_N


def logprobs_backward(
    logits_NV: Tensor,
    targets_N: Tensor,
    logp_N: Tensor,
    entropy_N: Tensor,
    dlogp_N: Tensor,
    dentropy_N: Tensor | None,
) -> None:
    if not _logits(logits_NV):
        torch_ops.logprobs_backward(logits_NV, targets_N, logp_N, entropy_N, dlogp_N, dentropy_N)
        return
    lse_N = logits_NV.gather(1, targets_N[:, None]).squeeze(1) - logp_N
    rows, size = logits_NV.shape
    slopes = (dlogp_N.contiguous(), dlogp_N if dentropy_N is None else dentropy_N.contiguous())
    _kernels().logprobs_backward[(rows, -(-size // _BLOCK))](
        logits_NV, targets_N.contiguous(), lse_N, entropy_N.contiguous(), *slopes, size,
        ENTROPY=dentropy_N is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


def sample(logits_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    if not _logits(logits_BV):
        return torch_ops.sample(logits_BV, uniform_B)
    (top, mass, _), count = _of_blocks(logits_BV)
    rows, size = logits_BV.shape
    token_B, logp_B = logits_BV.new_empty(rows, dtype=torch.int64), logits_BV.new_empty(rows)
    _kernels().pick[(rows,)](
        logits_BV, uniform_B.to(torch.float64).contiguous(), top, mass, token_B, logp_B, size, count,
        COUNT=next_power(count), BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return token_B, logp_B


def write_kv(
    k_pages: Tensor, v_pages: Tensor, k_NKD: Tensor, *, v_NKD: Tensor, page_N: Tensor, slot_N: Tensor
) -> None:
    given = (k_pages, v_pages, k_NKD, v_NKD)
    same = len({t.dtype for t in given}) == 1
    if not same or not len(k_NKD) or not fits(*given):
        torch_ops.write_kv(k_pages, v_pages, k_NKD, v_NKD=v_NKD, page_N=page_N, slot_N=slot_N)
        return
    k, v = _dense_rows(k_NKD), _dense_rows(v_NKD)
    tokens, heads, size = k.shape
    _kernels().write_kv[(tokens,)](
        k_pages, v_pages, k, v, page_N.contiguous(), slot_N.contiguous(), heads, size, *k.stride()[:2],
        *v.stride()[:2], k_pages.stride(0), v_pages.stride(0), PAGE=paged.PAGE, HEADS=next_power(heads),
        WIDE=next_power(size),
    )  # fmt: skip
