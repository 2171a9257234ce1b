"""The compiled kernels as torch functions: float32 and half precision on the CPU use C, an NVIDIA GPU Triton
(`triton_ops`), everything else the PyTorch fallback.

Semantics, shapes and errors are documented at the fallbacks of the same name (`models.torch_ops`). Calls release the
interpreter's lock. In half precision a kernel computes with the same numbers in float32 and rounds its result, once;
tensors kept for the backward pass stay in half precision. Functions with a gradient are `autograd.Function`s; without
gradient their `compute` is called directly. They have no `setup_context`: with one, torch inspects the signature at
every call, which costs small models 4 % of an update.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from whet.config.sizes import VECTOR
from whet.models import torch_ops, triton_ops
from whet.models.build import library
from whet.models.products import room
from whet.models.segments import Bounds, Segments
from whet.models.torch_ops import ACTS, Act, Weighing
from whet.models.triton_ops import call
from whet.types import WhetError

_CHUNK = 64
"""CHUNK of kernels.c."""
MAX_HEAD = 512
"""MAX_HEAD of kernels.c."""


class _Packed(ctypes.Structure):
    """Packed of kernels.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v")),
        *(
            (name, c_int64)
            for name in ("q_n", "q_h", "k_n", "k_h", "v_n", "v_h", "heads", "kv_heads", "size", "window")
        ),
        *((name, c_float) for name in ("scale", "cap")),
        *(
            (name, c_void_p)
            for name in ("sinks", "q_start", "q_len", "prefix_start", "prefix_len", "order", "family_start")
        ),
        *((name, c_int64) for name in ("families", "threads")),
    ]


class _Grads(ctypes.Structure):
    """Grads of kernels.c."""

    _fields_ = [(name, c_void_p) for name in ("out", "lse", "dout", "dq", "dk", "dv")]


class CachedStruct(ctypes.Structure):
    """Cached of kernels.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v")),
        *((name, c_int64) for name in ("q_n", "q_h", "heads", "kv_heads", "size", "window")),
        *((name, c_float) for name in ("scale", "cap")),
        *((name, c_void_p) for name in ("sinks", "table", "keys", "queries")),
        *((name, c_int64) for name in ("rows", "table_n", "threads")),
        ("lse", c_void_p),
    ]


@cache
def c_library() -> ctypes.CDLL:
    """kernels.c, with the types of its functions' arguments."""
    lib, _ = library()
    p, n, f, i = c_void_p, c_int64, c_float, c_int
    lib.whet_rms_norm.argtypes = [p, p, p, p, p, n, n, f, f, i]
    lib.whet_rms_norm_backward.argtypes = [p, p, p, p, p, p, p, n, n, f, f, i]
    lib.whet_norm_rope.argtypes = [p, n, n, p, p, p, p, n, n, n, f, f, i]
    lib.whet_norm_rope_backward.argtypes = [p, n, n, p, p, p, p, p, p, p, n, n, n, f, f, i]
    lib.whet_glu.argtypes = [p, n, p, n, p, n, n, i, i, i]
    lib.whet_glu_backward.argtypes = [p, n, p, n, p, p, p, n, n, i, i, i]
    lib.whet_logprobs.argtypes = [p, p, p, p, n, n, i]
    lib.whet_logprobs_backward.argtypes = [p, p, p, p, p, p, n, n, i]
    lib.whet_sample.argtypes, lib.whet_sample.restype = [p, p, p, p, n, n, i], n
    lib.whet_attend_packed.argtypes = [p, p, p]
    lib.whet_attend_packed_backward.argtypes = [p, p]
    lib.whet_sinks_backward.argtypes = [p, p, p, n, n, n, i]
    lib.whet_attend_cached.argtypes = [p, p]
    lib.whet_cached_layers.argtypes = [p, p, p]
    lib.whet_decode_step.argtypes, lib.whet_decode_step.restype = [p, p], n
    lib.whet_write_kv.argtypes = [p, p, p, n, n, p, n, n, p, p, n, n, n, i]
    return lib


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _native(*tensors: Tensor) -> bool:
    return all(t.dtype in _DTYPES and t.device.type == "cpu" for t in tensors)


def _float32(*tensors: Tensor) -> bool:
    return all(t.dtype is torch.float32 and t.device.type == "cpu" for t in tensors)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float32 else x.float()


def _as(like: Tensor, x: Tensor) -> Tensor:
    """x in the dtype of `like`."""
    return x if like.dtype is torch.float32 else x.to(like.dtype)


def _ptr(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _dense_rows(x: Tensor) -> Tensor:
    """float32; the same tensor where its last dimension is dense (views of a fused projection), else a copy."""
    x = _wide(x)
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(x: Tensor) -> Tensor:
    """float32, contiguous."""
    return _wide(x).contiguous()


class _RmsNorm(Function):
    """(normed, x + residual or None)."""

    @staticmethod
    def compute(
        x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor | None]:
        rows_x, weight = _dense(x), _dense(weight)
        out = torch.empty_like(rows_x)
        total = None if residual is None else torch.empty_like(rows_x)
        residual = None if residual is None else residual.contiguous()
        width = x.shape[-1]
        pointers = (_ptr(rows_x), _ptr(residual), _ptr(weight), _ptr(out), _ptr(total))
        rows = x.numel() // max(width, 1)
        c_library().whet_rms_norm(*pointers, rows, width, eps, offset, torch.get_num_threads())
        return _as(x, out), total

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
        given = x, weight
        x, weight, dy = _dense(x), _dense(weight), _dense(dy)
        more = None if more is None else more.contiguous()
        width = x.shape[-1]
        rows = x.numel() // max(width, 1)
        dx, dw, part = torch.empty_like(x), torch.empty_like(weight), _parts(rows, width)
        pointers = [t if t is None else t.data_ptr() for t in (x, weight, dy, more, dx, dw, part)]
        c_library().whet_rms_norm_backward(
            *pointers, rows, width, ctx.eps, ctx.offset, torch.get_num_threads()
        )
        dx, dw = _as(given[0], dx), _as(given[1], dw)
        return dx, dx if ctx.needs_input_grad[1] else None, dw, None, None


def _parts(rows: int, width: int) -> Tensor:
    return room(-(-rows // _CHUNK), width).zero_()


def _check_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    if residual.shape != x.shape or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: x {tuple(x.shape)}, what is added {tuple(residual.shape)} and weight {tuple(weight.shape)} do "
            "not fit: the first two must have one shape, the weight its last dimension"
        )


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    if not _native(x_ND, weight_D):
        return triton_ops.rms_norm(x_ND, weight_D, eps, offset=offset)
    _check_norm(x_ND, x_ND, weight_D)
    return call(_RmsNorm, x_ND, None, weight_D, eps, offset)[0]


def add_rms_norm(
    x_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    if _float32(x_ND, residual_ND, weight_D):
        _check_norm(x_ND, residual_ND, weight_D)
        found: tuple[Tensor, Tensor] = call(_RmsNorm, x_ND, residual_ND, weight_D, eps, offset)
        return found
    if x_ND.device.type != "cpu":
        return triton_ops.add_rms_norm(x_ND, residual_ND, weight_D, eps, offset=offset)
    sum_ND = x_ND + residual_ND  # rounded, as the residual that goes on is
    return rms_norm(sum_ND, weight_D, eps, offset=offset), sum_ND


class _NormRope(Function):
    @staticmethod
    def compute(
        x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, offset: float
    ) -> Tensor:
        heads, cos, sin = _dense_rows(x), _dense(cos), _dense(sin)
        weight = None if weight is None else _dense(weight)
        out = room(*x.shape)
        head = (_ptr(heads), heads.stride(0), heads.stride(1), _ptr(weight), _ptr(cos), _ptr(sin), _ptr(out))
        c_library().whet_norm_rope(*head, *x.shape, eps, offset, torch.get_num_threads())
        return _as(x, out)

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, offset: float
    ) -> Tensor:
        ctx.eps, ctx.offset = eps, offset
        ctx.save_for_backward(*(() if weight is None else (x, weight)), cos, sin)
        return _NormRope.compute(x, weight, eps, cos, sin, offset)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *normed, cos, sin = ctx.saved_tensors
        given, dy, cos, sin = dy, _dense(dy), _dense(cos), _dense(sin)
        x, weight = (_dense_rows(normed[0]), _dense(normed[1])) if normed else (dy, None)
        dx = room(*dy.shape)
        dw = None if weight is None else torch.empty_like(weight)
        part = None if weight is None else _parts(dy.shape[0], dy.shape[2])
        head = (_ptr(x), x.stride(0), x.stride(1), *(_ptr(t) for t in (weight, cos, sin, dy, dx, dw, part)))
        c_library().whet_norm_rope_backward(*head, *dy.shape, ctx.eps, ctx.offset, torch.get_num_threads())
        dw = dw if dw is None else _as(normed[1], dw)
        return _as(given, dx), dw, None, None, None, None


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
    if not _native(*given) or x_NHD.shape[-1] > MAX_HEAD:
        return triton_ops.norm_rope(x_NHD, weight_D, eps, cos_ND, sin_ND, offset=offset)
    if cos_ND.shape != sin_ND.shape or cos_ND.shape != (x_NHD.shape[0], x_NHD.shape[2]):
        raise ValueError(
            f"norm_rope: cos and sin must be [N, D] of x {tuple(x_NHD.shape)}, got {tuple(cos_ND.shape)}"
        )
    if weight_D is not None:
        _check_norm(x_NHD, x_NHD, weight_D)
    return call(_NormRope, x_NHD, weight_D, eps, cos_ND, sin_ND, offset)


class _Glu(Function):
    @staticmethod
    def compute(gate: Tensor, up: Tensor, act: int) -> Tensor:
        like, (gate, up) = gate, _rows_as_they_are(gate, up)
        out = room(*gate.shape, dtype=gate.dtype)
        head = (_ptr(gate), gate.stride(0), _ptr(up), up.stride(0), _ptr(out))
        c_library().whet_glu(*head, *gate.shape, act, gate.dtype is torch.bfloat16, torch.get_num_threads())
        return out.to(like.dtype)

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: int) -> Tensor:
        ctx.act = act
        ctx.save_for_backward(gate, up)
        return _Glu.compute(gate, up, act)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        like, (gate, up, dout) = dout.dtype, _rows_as_they_are(*ctx.saved_tensors, dout)
        half, dout = dout.dtype is torch.bfloat16, dout.contiguous()
        dgate, dup = (room(*gate.shape, dtype=dout.dtype) for _ in range(2))
        head = (_ptr(gate), gate.stride(0), _ptr(up), up.stride(0), _ptr(dout), _ptr(dgate), _ptr(dup))
        c_library().whet_glu_backward(*head, *gate.shape, ctx.act, half, torch.get_num_threads())
        return dgate.to(like), dup.to(like), None


def _rows_as_they_are(*tensors: Tensor) -> list[Tensor]:
    """All bfloat16, or all float32; the same tensors where that holds and their last dimension is dense."""
    if any(t.dtype is not torch.bfloat16 for t in tensors):
        return [_dense_rows(t) for t in tensors]
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def glu(gate_NF: Tensor, up_NF: Tensor, *, act: Act) -> Tensor:
    if not _native(gate_NF, up_NF) or gate_NF.dim() != 2:
        return triton_ops.glu(gate_NF, up_NF, act=act)
    if gate_NF.shape != up_NF.shape:
        raise ValueError(f"glu: gate {tuple(gate_NF.shape)} and up {tuple(up_NF.shape)} differ in shape")
    return call(_Glu, gate_NF, up_NF, ACTS[act])


def _rows_and_targets(logits: Tensor, targets: Tensor) -> None:
    rows, vocabulary = logits.shape
    if targets.dtype is not torch.int64:
        raise ValueError(f"logprobs: targets must be torch.int64, got {targets.dtype}")
    if targets.shape != (rows,) or (rows and not 0 <= int(targets.min()) <= int(targets.max()) < vocabulary):
        raise ValueError(
            f"logprobs: targets {tuple(targets.shape)} must be [{rows}], each in 0..{vocabulary - 1}"
        )


def logprobs(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    if not _float32(logits_NV):
        return triton_ops.logprobs(logits_NV, targets_N)
    _rows_and_targets(logits_NV, targets_N)
    logits, targets = logits_NV.contiguous(), targets_N.contiguous()
    logp_N, entropy_N = room(len(targets)), room(len(targets))
    pointers = (_ptr(logits), _ptr(targets), _ptr(logp_N), _ptr(entropy_N))
    c_library().whet_logprobs(*pointers, *logits.shape, torch.get_num_threads())
    return logp_N, entropy_N


def logprobs_backward(
    logits_NV: Tensor,
    targets_N: Tensor,
    logp_N: Tensor,
    entropy_N: Tensor,
    dlogp_N: Tensor,
    dentropy_N: Tensor | None,
) -> None:
    given = [logp_N, entropy_N, dlogp_N, *([] if dentropy_N is None else [dentropy_N])]
    if not _float32(logits_NV, *given) or not logits_NV.is_contiguous():
        triton_ops.logprobs_backward(logits_NV, targets_N, logp_N, entropy_N, dlogp_N, dentropy_N)
        return
    _rows_and_targets(logits_NV, targets_N)
    kept = [t.contiguous() for t in (targets_N, *given)]
    pointers = [logits_NV.data_ptr(), *(t.data_ptr() for t in kept), *([None] if dentropy_N is None else [])]
    c_library().whet_logprobs_backward(*pointers, *logits_NV.shape, torch.get_num_threads())


def sample(logits_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    if not _float32(logits_BV):
        return triton_ops.sample(logits_BV, uniform_B)
    logits, uniform = logits_BV.contiguous(), uniform_B.to(torch.float64).contiguous()
    rows, vocabulary = logits.shape
    if uniform.shape != (rows,):
        raise ValueError(f"sample: uniform must be [{rows}], got {tuple(uniform.shape)}")
    token_B, logp_B = room(rows, dtype=torch.int64), room(rows)
    pointers = (_ptr(logits), _ptr(uniform), _ptr(token_B), _ptr(logp_B))
    bad = c_library().whet_sample(*pointers, rows, vocabulary, torch.get_num_threads())
    if bad > 0:
        raise torch_ops.bad_logits(bad)
    check_memory(bad)
    return token_B, logp_B


def check_memory(failed: int) -> None:
    """WhetError where a kernel failed: the only reason is that it got no scratch memory."""
    if failed:
        raise WhetError(
            "a kernel could not get scratch memory; make the micro-batch or the sequences smaller"
        )


class _Shape(NamedTuple):
    """What of a `Weighing` is no tensor; 0 where there is no window or soft-cap."""

    scale: float
    window: int
    cap: float

    @classmethod
    def of(cls, how: Weighing) -> _Shape:
        return cls(how["scale"], how["window"] or 0, how["softcap"] or 0.0)


def _describe(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, segments: Segments, shape: _Shape
) -> _Packed:
    order_S, start_F = segments.by_family
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    fields = (
        segments.q_start_S,
        segments.q_len_S,
        segments.prefix_start_S,
        segments.prefix_len_S,
        order_S,
        start_F,
    )
    return _Packed(
        *(_ptr(t) for t in (q, k, v)),
        *(*strides, q.shape[1], k.shape[1], q.shape[2], shape.window, shape.scale, shape.cap),
        *(_ptr(t) for t in (sinks, *fields)),
        *(len(start_F) - 1, torch.get_num_threads()),
    )


class _AttendPacked(Function):
    """(out, log-sum-exp of the scores [N, H], the sink among them)."""

    @staticmethod
    def compute(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        segments: Segments,
        shape: _Shape,
        known: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        if known is not None:
            return known
        given, q, k, v = q, _dense_rows(q), _dense_rows(k), _dense_rows(v)
        sinks = None if sinks is None else _dense(sinks)
        out, lse = room(*q.shape), room(*q.shape[:2])
        what = _describe(q, k, v, sinks, segments=segments, shape=shape)
        check_memory(c_library().whet_attend_packed(ctypes.byref(what), _ptr(out), _ptr(lse)))
        return _as(given, out), lse

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        """given: what `compute` takes."""
        q, k, v, sinks, segments, shape, _ = given
        out, lse = _AttendPacked.compute(*given)
        ctx.segments, ctx.shape = segments, shape
        ctx.save_for_backward(q, k, v, out, lse, *(() if sinks is None else (sinks,)))
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *sunk = ctx.saved_tensors
        given, q, k, v = q, _dense_rows(q), _dense_rows(k), _dense_rows(v)
        out, dout = _dense(out), _dense(dout)
        dq, dk, dv = room(*q.shape), room(*k.shape).zero_(), room(*v.shape).zero_()
        what = _describe(q, k, v, None, segments=ctx.segments, shape=ctx.shape)
        grads = _Grads(*(_ptr(t) for t in (out, lse, dout, dq, dk, dv)))
        # with the sink in out and lse, it is the backward pass of any softmax
        check_memory(c_library().whet_attend_packed_backward(ctypes.byref(what), ctypes.byref(grads)))
        dsinks = None
        if sunk and ctx.needs_input_grad[3]:
            sinks = _dense(sunk[0])
            dsinks = torch.empty_like(sinks)
            pointers = (_ptr(sinks), ctypes.byref(grads), _ptr(dsinks))
            c_library().whet_sinks_backward(*pointers, *q.shape, torch.get_num_threads())
            dsinks = _as(sunk[0], dsinks)
        return *(_as(given, t) for t in (dq, dk, dv)), dsinks, None, None, None


def attend_packed(
    q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, segments: Segments, **how: Unpack[Weighing]
) -> Tensor:
    if not _native(q_NHD, k_NKD, v_NKD) or q_NHD.shape[2] % VECTOR:
        return torch_ops.attend_packed(q_NHD, k_NKD, v_NKD, segments, **how)
    whole = segments.tokens == len(q_NHD) == len(k_NKD) and k_NKD.shape == v_NKD.shape
    if not whole or q_NHD.shape[2] != k_NKD.shape[2] or q_NHD.shape[1] % k_NKD.shape[1]:
        raise ValueError(
            f"attend_packed: {segments.tokens} tokens in the segments, but q {tuple(q_NHD.shape)}, "
            f"k {tuple(k_NKD.shape)}, v {tuple(v_NKD.shape)}: expected as many tokens in each, heads of one size, and "
            "a multiple of k's heads in q"
        )
    _check_sinks(how["sinks"], q_NHD)
    return call(_AttendPacked, q_NHD, k_NKD, v_NKD, how["sinks"], segments, _Shape.of(how), None)[0]


def attend_and_lse(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    segments: Segments,
    *,
    known: tuple[Tensor, Tensor] | None,
    **how: Unpack[Weighing],
) -> tuple[Tensor, Tensor]:
    """`attend_packed` in float32, with the log-sum-exps of the scores [N, H], and with its backward pass. known: both,
    where they have been computed before."""
    shape = _Shape.of(how)
    found: tuple[Tensor, Tensor] = call(
        _AttendPacked, q_NHD, k_NKD, v_NKD, how["sinks"], segments, shape, known
    )
    return found


def _check_sinks(sinks_H: Tensor | None, q_NHD: Tensor) -> None:
    if sinks_H is not None and sinks_H.shape != q_NHD.shape[1:2]:
        raise ValueError(f"sinks {tuple(sinks_H.shape)}, but q {tuple(q_NHD.shape)}: one for each head")


def attend_cached(
    q_NHD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    table_BP: Tensor,
    keys_B: Tensor,
    queries_B: Tensor | None = None,
    bounds: Bounds | None = None,
    **how: Unpack[Weighing],
) -> Tensor:
    _, heads, size = q_NHD.shape
    if not _native(q_NHD) or not _float32(k_pages, v_pages) or size % VECTOR:
        return torch_ops.attend_cached(
            q_NHD,
            k_pages,
            v_pages,
            table_BP=table_BP,
            keys_B=keys_B,
            queries_B=queries_B,
            bounds=bounds,
            **how,
        )
    if len(q_NHD) != (len(table_BP) if queries_B is None else int(queries_B.sum())):
        given = "one each" if queries_B is None else queries_B.tolist()
        raise ValueError(
            f"attend_cached: {len(q_NHD)} queries, but {len(table_BP)} rows with queries: {given}"
        )
    q, out = _dense_rows(q_NHD.detach()), room(*q_NHD.shape)
    table, keys = table_BP.to(torch.int32).contiguous(), keys_B.to(torch.int64).contiguous()
    queries = None if queries_B is None else queries_B.to(torch.int64).contiguous()
    _check_sinks(how["sinks"], q_NHD)
    sinks = None if how["sinks"] is None else _dense(how["sinks"].detach())
    scale, window, cap = _Shape.of(how)
    what = CachedStruct(
        *(_ptr(t) for t in (q, k_pages, v_pages)),
        *(q.stride(0), q.stride(1), heads, k_pages.shape[1], size, window, scale, cap),
        *(_ptr(sinks), _ptr(table), _ptr(keys), _ptr(queries), *table.shape, torch.get_num_threads()),
    )
    check_memory(c_library().whet_attend_cached(ctypes.byref(what), _ptr(out)))
    return _as(q_NHD, out)


def write_kv(
    k_pages: Tensor, v_pages: Tensor, k_NKD: Tensor, *, v_NKD: Tensor, page_N: Tensor, slot_N: Tensor
) -> None:
    if not _float32(k_pages, v_pages) or not _native(k_NKD, v_NKD):
        triton_ops.write_kv(k_pages, v_pages, k_NKD, v_NKD=v_NKD, page_N=page_N, slot_N=slot_N)
        return
    k, v = _dense_rows(k_NKD), _dense_rows(v_NKD)
    page, slot = (t.to(torch.int64).contiguous() for t in (page_N, slot_N))
    head = (
        _ptr(k_pages),
        _ptr(v_pages),
        _ptr(k),
        *k.stride()[:2],
        _ptr(v),
        *v.stride()[:2],
        _ptr(page),
        _ptr(slot),
    )
    c_library().whet_write_kv(*head, *k.shape, torch.get_num_threads())
