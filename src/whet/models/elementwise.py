"""Functions of single numbers that have the same bits wherever a number stands.

torch computes the last numbers of a tensor, or of a thread's share of it, with other instructions than the rest, which
round differently: a token's log-prob would depend on its place in the batch. Here all are computed alike, in C
(`whet_activate` in kernels.c), on every x86 CPU with fused multiply-add to the same bits. Where there is no compiler,
and on other devices, they are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, c_int, c_int64, c_void_p
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from whet.models.build import if_built

Kind = Literal["silu", "gelu", "gelu_tanh", "tanh", "sigmoid", "erf"]
_CODES: dict[Kind, int] = {"silu": 0, "gelu_tanh": 1, "tanh": 3, "sigmoid": 4, "gelu": 5, "erf": 6}
"""`activate` of kernels.c."""
TORCH: dict[Kind, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
}
_HALF = (torch.bfloat16, torch.float16)


@cache
def _lib() -> CDLL | None:
    p, n, i = c_void_p, c_int64, c_int
    if (lib := if_built()) is not None:
        lib.whet_activate.argtypes = [p, p, n, i, i]
        lib.whet_activate_backward.argtypes = [p, p, p, n, i, i]
    return lib


def computes(x: Tensor) -> bool:
    """Whether this module does, and not torch: plain tensors on a CPU, if there is a compiler."""
    plain = type(x) in (Tensor, nn.Parameter) and x.is_cpu and (x.dtype is torch.float32 or x.dtype in _HALF)
    return plain and not torch.compiler.is_compiling() and _lib() is not None


def activation(x: Tensor, kind: Kind) -> Tensor:
    """With gradient. Half precision is computed in float32, and rounded once."""
    if not computes(x):
        return TORCH[kind](x)
    if torch.is_grad_enabled() and x.requires_grad:
        y: Tensor = _Activation.apply(x, kind)
        return y
    return _made(x, kind)


def tanh_(x: Tensor) -> Tensor:
    """In place, of a contiguous float32 tensor, without gradient."""
    if not computes(x) or x.dtype is not torch.float32 or not x.is_contiguous():
        return x.tanh_()
    lib = _lib()
    assert lib is not None
    lib.whet_activate(x.data_ptr(), x.data_ptr(), x.numel(), _CODES["tanh"], torch.get_num_threads())
    return x


def _made(x: Tensor, kind: Kind) -> Tensor:
    lib, dense = _lib(), x.detach().float().contiguous()
    assert lib is not None
    out = torch.empty_like(dense)
    lib.whet_activate(dense.data_ptr(), out.data_ptr(), out.numel(), _CODES[kind], torch.get_num_threads())
    return out.to(x.dtype)


class _Activation(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: Kind) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(x)
        return _made(x, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        lib, dense, given = _lib(), x.float().contiguous(), dout.float().contiguous()
        assert lib is not None
        dx = torch.empty_like(dense)
        pointers = (dense.data_ptr(), given.data_ptr(), dx.data_ptr())
        lib.whet_activate_backward(*pointers, dx.numel(), _CODES[ctx.kind], torch.get_num_threads())
        return dx.to(x.dtype), None
