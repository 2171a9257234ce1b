"""Matrix products in 8 bits: about twice as fast as bfloat16 on a GPU that has them (Micikevicius et al. 2022,
arXiv:2209.05433). Parameters, gradients and everything between the products keep their dtype.

Both factors are scaled so that their largest number is float8's largest, by the numbers at hand (dynamic), for a whole
tensor or for each row and column; the product takes the scales out again (`models.quantised`). Activations and weights
are e4m3, gradients e5m2, which reaches further and rounds coarser.

Scales are of the numbers that are multiplied at once, so the result depends on how a batch is cut into micro-batches
and over ranks, as far as float8 rounds.

What stays as it is: matrices with a side that 16 does not divide, routers, the output layer.

Shape letters: N tokens, I and O columns of input and output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from whet.models.quantised import SIDE, Scaling, check_products, filled, multiplied, quantised

NUMBERS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


@contextmanager
def products(scaling: Scaling, plain: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Inside it, and where a forward inside it is recomputed, `F.linear` computes in float8. plain: modules whose
    weight stays out of it."""
    with _Products(scaling, plain) as mode:
        token = _ACTIVE.set(mode)
        try:
            yield
        finally:
            _ACTIVE.reset(token)


def recomputed(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same, computed again in the backward pass: what the forward computes in float8, its repetition does, too."""
    return partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False, context_fn=_again)


def _again() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    mode = _ACTIVE.get()
    return nullcontext(), nullcontext() if mode is None else products(mode.scaling, mode.plain)


def check(device: torch.device) -> None:
    """Errors: ConfigError where the device does not support such products."""
    check_products(device, NUMBERS, key="train.precision.float8")


class _Products(TorchFunctionMode):
    def __init__(self, scaling: Scaling, plain: Sequence[nn.Module]) -> None:
        super().__init__()
        self.scaling, self.plain = scaling, plain

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and not kwargs and self._takes(args[0], args[1]):
            x, weight, bias = (*args, None)[:3]
            autocast = torch.is_autocast_enabled(x.device.type)
            dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
            y = _Float8Linear.apply(x if x.ndim == 2 else x.flatten(0, -2), weight, self.scaling, dtype)
            y = y if x.ndim == 2 else y.view(*x.shape[:-1], len(weight))
            return y if bias is None else y + bias.to(y.dtype)
        return func(*args, **(kwargs or {}))

    def _takes(self, x: Tensor, weight: Tensor) -> bool:
        fits = all(size % SIDE == 0 for size in weight.shape) and x.numel() > 0
        return fits and not any(weight is module.weight for module in self.plain)


_ACTIVE: ContextVar[_Products | None] = ContextVar("float8 products", default=None)


class _Float8Linear(torch.autograd.Function):
    """x_NI weight_OI^T. Tokens are filled up with zeros to a multiple of SIDE."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, scaling: Scaling, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.scaling = scaling
        return _product(filled(x_NI), weight_OI, NUMBERS, scaling)[: len(x_NI)].to(dtype)

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        dx_NI = dw_OI = None
        dy = filled(dy_NO)
        if ctx.needs_input_grad[0]:
            dx_NI = _product(dy, weight_OI.t(), GRADIENTS, ctx.scaling)[: len(x_NI)].to(x_NI.dtype)
        if ctx.needs_input_grad[1]:
            dw_OI = _product(dy.t(), filled(x_NI).t(), GRADIENTS, ctx.scaling).to(weight_OI.dtype)
        return dx_NI, dw_OI, None, None


def _product(a_MK: Tensor, b_PK: Tensor, kind: torch.dtype, scaling: Scaling) -> Tensor:
    """[M, P] a b^T, bfloat16. kind: float8 of a; b is e4m3."""
    return multiplied(quantised(a_MK, kind, scaling), quantised(b_PK, NUMBERS, scaling))
