"""Row-invariant matrix products: every product of a model is computed here.

The rule, for float32 on a CPU: an element is the sum, in order, of the sums over 256 terms each, and each of these is
one chain of fused multiply-adds from 0. So a row has the same bits however many rows are computed with it (a decode
step, a packed batch), on any number of threads, on every processor that has fused multiply-add, whatever its vectors'
width. `products.c` implements it, at the speed of the libraries. Where there is no compiler, oneDNN's products of 256
terms each are used, if a test at the first use shows that they follow the rule; where they do not, products are
torch's, and the start-up self-test reports what that means for a run. Other devices and dtypes use torch's own
products.

In half precision numbers are widened to float32, multiplied, and the result is rounded once. float16 has the same rule.
bfloat16 has that of the tiles of a CPU (AMX), which `products_bf16.c` multiplies by; `products.c` has the same bits by
multiply-adds where there are no tiles, at the speed of float32. A CPU that multiplies a dtype itself in another way
(AVX512_BF16) is twice as fast or more: there oneDNN's products are taken, if a test at the first use shows that their
rows agree, and unless `own_halves` was asked for.

Shape letters: I, K rows and columns of the left factor, J columns of the right one.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from whet.config.hardware import multiplies_half
from whet.models import elementwise
from whet.models.build import BuildError, library
from whet.types import WhetError

log = logging.getLogger(__name__)

TERMS = 256
"""Terms of a chain; TERMS of products.c."""
TILE_TERMS = 32
"""Terms of two bfloat16 that are summed before they are added to the others; STEP of products.c and products_bf16.c."""
HALF = (torch.bfloat16, torch.float16)

Multiply = Callable[[Tensor, Tensor, Tensor, bool], None]
"""(a_IK, b_KJ, out_IJ, add): out = a b, or out += a b, for any strides. The factors may be of half precision; out is
float32, or what `rounds` is true of."""


@dataclass(frozen=True)
class Products:
    """What multiplies matrices on this process's CPU."""

    name: str
    """compiled, onednn, torch."""
    lawful: bool
    """It keeps the law above."""
    reason: str
    multiply: Multiply

    def linear(self, x: Tensor, weight: Tensor, y: Tensor) -> None:
        """y = x W^T. The way of most products, so a short one. y: as `Multiply` has it."""
        if isinstance(self.multiply, _Compiled) and x.stride(1) == weight.stride(1) == 1:
            self.multiply.linear(x, weight, y)
        else:
            self.multiply(x, weight.t(), y, False)

    def column_sums(self, x: Tensor) -> Tensor:
        """[J] of [I, J]: what the product with a row of ones gives."""
        if isinstance(self.multiply, _Compiled):
            return self.multiply.column_sums(x)
        return product(x.new_ones(1, len(x)), x).squeeze(0)


@cache
def chosen() -> Products:
    """The first of compiled, oneDNN, torch that is available here. The first two have the same bits; the compiled one's
    rows agree on a processor without fused multiply-add, too, but with other bits."""
    try:
        lib, how = library()
    except BuildError as error:
        why = f"no compiled kernels: {error}"
        if _obeys(_onednn):
            return Products("onednn", True, why, _onednn)
        return Products("torch", False, f"{why}; oneDNN's products sum in another order here", _by_torch)
    operand: list[Any] = [c_void_p, c_int64, c_int64]
    sizes: list[Any] = [c_int64, c_int64, c_int64]
    lib.whet_product.argtypes = [*operand, *operand, *operand, *sizes, c_int, c_int, c_int]
    lib.whet_linear.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_void_p, *sizes, c_int, c_int]
    lib.whet_column_sums.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int64]
    lib.whet_product_bf16.argtypes = [*operand, *operand, *operand, *sizes, c_int, c_int, c_int]
    compiled = _Compiled(lib)
    return Products("compiled", _obeys(compiled), how, compiled)


# ---------------------------------------------------------------- for the layers above


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, known: Callable[[], Tensor] | None = None
) -> Tensor:
    """x W^T + b for x [..., K], W [J, K], as `F.linear`; with gradients. known: gives the result, where it has been
    computed before."""
    if known is None and not multiplies(x, weight):
        return F.linear(x, weight, bias)
    if known is not None or torch.is_grad_enabled():
        y: Tensor = _Linear.apply(x, weight, bias, known)
        return y
    return _linear(x, weight, bias)


def product(a_IK: Tensor, b_KJ: Tensor, *, out: Tensor | None = None, add: bool = False) -> Tensor:
    """a b, without gradient, into `out` where given; `add`: to what stands there."""
    if out is None:
        out = a_IK.new_empty(a_IK.shape[0], b_KJ.shape[1])
    if a_IK.shape[1] != b_KJ.shape[0] or out.shape != (a_IK.shape[0], b_KJ.shape[1]):
        raise ValueError(
            f"product: {tuple(a_IK.shape)} times {tuple(b_KJ.shape)} into {tuple(out.shape)}: expected [I, K] times "
            "[K, J] into [I, J]"
        )
    multiply = chosen().multiply if multiplies(a_IK, b_KJ) else _by_torch
    exact = torch.float32 if multiply is not _by_torch else a_IK.dtype
    if out.dtype == exact or (out.dtype == a_IK.dtype and rounds(out.dtype) and not add):
        multiply(a_IK, b_KJ, out, add)
    elif out.dtype == torch.float32 and wide_sums(a_IK, b_KJ):
        found = wide_product(a_IK, b_KJ)
        out.add_(found) if add else out.copy_(found)
    else:
        found = torch.empty(out.shape, dtype=exact, device=out.device)
        multiply(a_IK, b_KJ, found, False)
        out.add_(found) if add else out.copy_(found)
    return out


def wide_sums(a: Tensor, b: Tensor) -> bool:
    """Whether torch gives the sums of a product in half precision as they are, in float32: on a GPU."""
    return a.is_cuda and a.dtype == b.dtype in HALF


def wide_product(a_IK: Tensor, b_KJ: Tensor) -> Tensor:
    """[I, J] float32: a b where `wide_sums`, not rounded to half precision on the way."""
    return torch.mm(a_IK, b_KJ, out_dtype=torch.float32)


def column_sums(x_IJ: Tensor) -> Tensor:
    """[J] sums over the rows, by the rule."""
    return chosen().column_sums(x_IJ.float()).to(x_IJ.dtype) if multiplies(x_IJ) else x_IJ.sum(0)


_ACTIVATIONS: dict[Any, elementwise.Kind] = {
    F.silu: "silu",
    F.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    Tensor.sigmoid: "sigmoid",
    F.tanh: "tanh",
    torch.tanh: "tanh",
    Tensor.tanh: "tanh",
    torch.erf: "erf",
    Tensor.erf: "erf",
}
_GELUS: dict[str, elementwise.Kind] = {"none": "gelu", "tanh": "gelu_tanh"}
"""By F.gelu's argument `approximate`."""


class Everywhere(TorchFunctionMode):
    """Inside it, `F.linear` and `torch.addmm` (the layers of GPT-2) are `linear`, and activations are those of
    `elementwise`: for modules that are not ours."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _torch_linear(*args, **kwargs)
        if func is torch.addmm and not kwargs and args[0].ndim == 1:
            bias, x, weight = args
            return linear(x, weight.t(), bias)
        kind = _ACTIVATIONS.get(func)
        if func is F.gelu:
            kind = _GELUS.get(kwargs.get("approximate", "none"))
        if kind is None or kwargs.get("inplace") or "out" in kwargs or len(args) != 1:
            return func(*args, **kwargs)
        return elementwise.activation(args[0], kind)


def _torch_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` with the names of `F.linear`, which takes a vector as the weight, too."""
    return linear(input, weight, bias) if weight.ndim == 2 else F.linear(input, weight, bias)


def multiplies(*tensors: Tensor) -> bool:
    """Whether this module does: plain tensors of one dtype on a CPU, float32 or one that the CPU does not multiply
    itself; and nothing else asks to be told of products (a compiler, float8, autocast)."""
    for t in tensors:
        if type(t) not in _PLAIN or not t.is_cpu or t.dtype is not tensors[0].dtype:
            return False
    if tensors[0].dtype is not torch.float32 and half_by(tensors[0].dtype) == "torch":
        return False
    asked = torch._C._len_torch_function_stack() or torch.is_autocast_enabled("cpu")
    return not asked and not torch.compiler.is_compiling()


_PLAIN = (Tensor, nn.Parameter)


def own_halves(own: bool) -> None:
    """From here on products of half precision in this process are this module's even where the CPU multiplies the dtype
    itself: slower, with the bits of every x86 CPU that has fused multiply-add. machine.kernels=compiled."""
    global _own_halves
    _own_halves = own


_own_halves = False


def half_by(dtype: torch.dtype) -> Literal["tiles", "float32", "torch"]:
    """Whose products of this dtype are on this CPU, if not those of float32: of this module by the rule of tiles, with
    tiles or without; of this module in float32, rounded; or torch's, as the CPU multiplies the dtype itself and rows
    agree when it does."""
    return _half_by(dtype, _own_halves)


@cache
def _half_by(dtype: torch.dtype, own: bool) -> Literal["tiles", "float32", "torch"]:
    if dtype not in HALF:
        return "torch"
    name = str(dtype).removeprefix("torch.")
    if rounds(dtype) or own or not multiplies_half(name):
        return _by_rule(dtype)
    if _rows_agree(dtype):
        return "torch"
    tiles = " (tiles need an x86 CPU with AMX, and gcc 11 or newer)" if dtype is torch.bfloat16 else ""
    log.warning(
        "this CPU multiplies %s itself, but a row's bits depend on the rows beside it%s: products are computed in "
        "float32 and rounded, which is slower",
        name,
        tiles,
    )
    return _by_rule(dtype)


def _by_rule(dtype: torch.dtype) -> Literal["tiles", "float32"]:
    multiply = chosen().multiply
    by_tiles = dtype is torch.bfloat16 and isinstance(multiply, _Compiled) and _tiles_obey(multiply)
    return "tiles" if by_tiles else "float32"


@cache
def rounds(dtype: torch.dtype) -> bool:
    """Whether a product of this dtype is rounded where it is computed, with no float32 tensor between: by tiles."""
    if dtype is not torch.bfloat16:  # in float32 `chosen` asks, before there is an answer
        return False
    multiply = chosen().multiply
    return isinstance(multiply, _Compiled) and multiply.multiplies_by_tiles()


@torch.no_grad()
def _rows_agree(dtype: torch.dtype) -> bool:
    """Of torch's products, for 1 to 65 rows and more terms than one chain has."""
    generator = torch.Generator().manual_seed(7)
    for terms, columns in ((64, 40), (600, 256), (1024, 1000)):
        x, weight = (_drawn(n, terms, generator=generator).to(dtype) for n in (65, columns))
        whole = F.linear(x, weight)
        if any(not torch.equal(F.linear(x[:n], weight), whole[:n]) for n in (1, 2, 3, 4, 7, 16, 33)):
            return False
    return True


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    if rows.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear: x is {tuple(x.shape)}, the weight {tuple(weight.shape)}: inner sizes differ"
        )
    dtype = x.dtype if bias is None and rounds(x.dtype) else torch.float32
    y = room(len(rows), len(weight), dtype=dtype)
    chosen().linear(rows, weight, y)
    if bias is not None:
        y += bias
    if y.dtype is not x.dtype:
        y = y.to(x.dtype)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, known: Callable[[], Tensor] | None = None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _linear(x, weight, bias) if known is None else known()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = dy if dy.ndim == 2 else dy.reshape(-1, dy.shape[-1])
        dx = product(rows, weight).view(x.shape) if needs_x else None
        dw = product(rows.t(), x.reshape(-1, x.shape[-1])) if needs_weight else None
        return dx, dw, column_sums(rows) if needs_bias else None, None


# ---------------------------------------------------------------- who multiplies


def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor for C to write to: of this dtype and on the CPU, whatever torch's defaults are."""
    return torch.empty(shape, dtype=dtype, device=_CPU)


_CPU = torch.device("cpu")


def _drawn(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=_CPU)


@dataclass(frozen=True)
class _Compiled:
    """`whet_product` of products.c, and `whet_product_bf16`. The calls release the interpreter's lock."""

    lib: ctypes.CDLL

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
        if rounds(a.dtype):
            self.by_tiles(a, b, out, add)
            return
        a, b, half = _read(a, b)
        size, threads = (a.shape[0], b.shape[1], a.shape[1]), torch.get_num_threads()
        operands = (a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride(), out.data_ptr(), *out.stride())
        if self.lib.whet_product(*operands, *size, half, add, threads):
            raise _no_memory()

    def linear(self, x: Tensor, weight: Tensor, y: Tensor) -> None:
        if rounds(x.dtype):
            self.by_tiles(x, weight.t(), y, False)
            return
        x, weight, half = _read(x, weight)
        (rows, terms), columns, threads = x.shape, weight.shape[0], torch.get_num_threads()
        operands = (x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(0), y.data_ptr())
        if self.lib.whet_linear(*operands, rows, columns, terms, half, threads):
            raise _no_memory()

    def by_tiles(self, a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
        """out: float32, or bfloat16 where not `add`."""
        size, half = (a.shape[0], b.shape[1], a.shape[1]), out.dtype is torch.bfloat16
        operands = (a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride(), out.data_ptr(), *out.stride())
        if self.lib.whet_product_bf16(*operands, *size, half, add, torch.get_num_threads()):
            raise _no_memory()

    def multiplies_by_tiles(self) -> bool:
        """This CPU and its kernel have tiles for bfloat16, and they sum by the rule of products_bf16.c."""
        return bool(self.lib.whet_tiles()) and _tiles_obey(self.by_tiles)

    def column_sums(self, x: Tensor) -> Tensor:
        x = x.detach() if x.stride(1) == 1 else x.detach().contiguous()
        out = x.new_empty(x.shape[1])
        self.lib.whet_column_sums(x.data_ptr(), x.stride(0), out.data_ptr(), *x.shape)
        return out


def _read(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, bool]:
    """The factors as products.c reads them, and whether they are bfloat16: float16 it does not know."""
    if a.dtype is torch.float16:
        return a.float(), b.float(), False
    return a, b, a.dtype is torch.bfloat16


def _no_memory() -> WhetError:
    return WhetError("a matrix product could not get scratch memory; make the micro-batch smaller")


@torch.no_grad()
def _onednn(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """Chain by chain. oneDNN takes another road for a single row, and for a single column."""
    rows, columns = out.shape
    left, right = (F.pad(x, (0, 0, 0, 1)) if len(x) == 1 else x for x in (a.float(), b.float().t()))
    for k in range(0, a.shape[1], TERMS):
        parts = (left[:, k : k + TERMS].contiguous(), right[:, k : k + TERMS].contiguous())
        part = torch.ops.mkldnn._linear_pointwise(*parts, None, "none", [], "")[:rows, :columns]
        out.add_(part) if add or k else out.copy_(part)
    if not a.shape[1] and not add:
        out.zero_()


@torch.no_grad()
def _by_torch(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)


@torch.no_grad()
def _obeys(multiply: Multiply) -> bool:
    """Try it: for 1 to 65 rows, one column and many, up to three chains, both backwards' strides, all equal to the
    law's own numbers."""
    generator = torch.Generator().manual_seed(7)
    a_IK, b_KJ = _drawn(65, 600, generator=generator), _drawn(600, 40, generator=generator)
    try:
        for terms in (64, TERMS, 600):
            wanted = lawful(a_IK[:, :terms], b_KJ[:terms])
            for rows in (1, 2, 3, 4, 7, 16, 33, 65):
                for b in (b_KJ[:terms], b_KJ[:terms].t().contiguous().t(), b_KJ[:terms, :1]):
                    found = room(rows, b.shape[1])
                    multiply(a_IK[:rows, :terms], b, found, False)
                    if not torch.equal(found, wanted[:rows, : b.shape[1]]):
                        return False
            turned = room(40, 65)
            multiply(b_KJ[:terms].t(), a_IK[:, :terms].t(), turned, False)
            if not torch.equal(turned, wanted.t()):
                return False
    except (RuntimeError, AttributeError, NotImplementedError):  # no such operation in this build of torch
        return False
    return True


def lawful(a_IK: Tensor, b_KJ: Tensor) -> Tensor:
    """a b exactly by the rule, slowly. A product of two float32 is exact in float64, and so is its sum with a third but
    for the rarest cases, which the inputs of `_obeys` do not have."""
    total = room(len(a_IK), b_KJ.shape[1]).zero_()
    for start in range(0, a_IK.shape[1], TERMS):
        chain = torch.zeros_like(total)
        for k in range(start, min(start + TERMS, a_IK.shape[1])):
            chain = (a_IK[:, k, None].double() * b_KJ[k].double() + chain.double()).float()
        total = total + chain if start else chain
    return total


@torch.no_grad()
def _tiles_obey(multiply: Multiply) -> bool:
    """As `_obeys`, for the other rule: rows that lie as tiles and others, either way round."""
    generator = torch.Generator().manual_seed(7)
    a_IK, b_KJ = (_drawn(*n, generator=generator).bfloat16() for n in ((65, 200), (200, 40)))
    for terms in (64, 200):
        a, b = a_IK[:, :terms].contiguous(), b_KJ[:terms]
        wanted = lawful_tiles(a, b)
        for rows in (1, 16, 33, 65):
            for right in (b, b.t().contiguous().t()):
                found, turned = room(rows, 40), room(40, rows)
                multiply(a[:rows], right, found, False)
                multiply(right.t(), a[:rows].t(), turned, False)
                if not torch.equal(found, wanted[:rows]) or not torch.equal(turned.t(), found):
                    return False
    return True


def lawful_tiles(a_IK: Tensor, b_KJ: Tensor, start_IJ: Tensor | None = None) -> Tensor:
    """[I, J] float32: a b of bfloat16, plus `start`, exactly by the rule of products_bf16.c, slowly. A product of two
    bfloat16 is exact in float32. Sums below the smallest normal number are not flushed here."""
    a_IK, b_KJ = a_IK.float(), b_KJ.float()
    total = room(len(a_IK), b_KJ.shape[1]).zero_() if start_IJ is None else start_IJ
    for start in range(0, a_IK.shape[1], TILE_TERMS):
        chains = [torch.zeros_like(total), torch.zeros_like(total)]
        for k in range(start, min(start + TILE_TERMS, a_IK.shape[1])):
            chains[k % 2] = chains[k % 2] + a_IK[:, k, None] * b_KJ[k]
        total = total + (chains[0] + chains[1])
    return total
