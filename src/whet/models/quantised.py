"""Weights in 8 or 4 bits, and the matrix products of such numbers.

A matrix is held as numbers of 8 bits and one float32 scale for each of its rows, so that the row's largest number is
the format's largest. What it is multiplied with is scaled in the same way by the numbers at hand (dynamic, one scale a
token); the product takes the scales out again. float8 is e4m3 (Micikevicius et al. 2022, arXiv:2209.05433), whose error
is relative to each number; int8 has even steps, 127 to a row's largest (Dettmers et al. 2022, arXiv:2208.07339).
Products are torch's `_scaled_mm`, in bfloat16, and `_int_mm`, in int32 and so without rounding of their own.

mxfp4 is for the experts of a mixture: e2m1 numbers, and a power of two for each BLOCK of a row (OCP Microscaling
Formats 1.0). What it is multiplied with is not rounded.

Shape letters: O, I rows and columns of a weight, which are columns of output and input; M, K, P of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whet.config.learns import STACKS, is_matrix, is_stack
from whet.config.sections.rollout import Quantization
from whet.models.experts import is_turned
from whet.models.lora import adapted, merged
from whet.models.products import linear
from whet.models.router import gates
from whet.types import ConfigError, WhetError

Scaling = Literal["rowwise", "tensorwise"]
NUMBERS = {"float8": torch.float8_e4m3fn, "int8": torch.int8}
SIDE = 16
"""What the sides of a matrix have to be multiples of."""
LEAST_ROWS = 32
"""CUDA's int8 products take more rows than 16."""
BLOCK = 32
"""Numbers of a row with one scale in mxfp4."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Absolute values by their code."""

Scaled = tuple[Tensor, Tensor]
"""(numbers of 8 bits [M, K], scale [M, 1] or [1, 1] float32)."""


# ---------------------------------------------------------------- products


def quantised(x_MK: Tensor, kind: torch.dtype, scaling: Scaling) -> Scaled:
    """x as numbers of `kind`, row after row, and their scale; x is about their product."""
    largest = x_MK.abs().amax(1, keepdim=True) if scaling == "rowwise" else x_MK.abs().amax()[None, None]
    whole = not kind.is_floating_point
    top = torch.iinfo(kind).max if whole else torch.finfo(kind).max
    scale = largest.float().clamp(min=1e-12) / top
    numbers = (x_MK.float() / scale).clamp(-top, top)
    return (numbers.round() if whole else numbers).to(kind).contiguous(), scale


def multiplied(a: Scaled, b: Scaled) -> Tensor:
    """[M, P] a b^T; bfloat16 of float8 (CUDA's rowwise products are), float32 of int8."""
    (a_MK, scale_M), (b_PK, scale_P) = a, b
    if a_MK.dtype == torch.int8:
        return torch._int_mm(a_MK, b_PK.t()).float() * scale_M * scale_P.t()
    return torch._scaled_mm(a_MK, b_PK.t(), scale_a=scale_M, scale_b=scale_P.t(), out_dtype=torch.bfloat16)


def filled(x_NI: Tensor, *, least: int = 0) -> Tensor:
    """With rows of zeros up to a multiple of SIDE, and at least so many."""
    rows = max(-(-len(x_NI) // SIDE) * SIDE, least)
    return F.pad(x_NI, (0, 0, 0, rows - len(x_NI)))


def check_products(device: torch.device, kind: torch.dtype, *, key: str) -> None:
    """Errors: ConfigError about `key` where the device does not support such products, which is tested by one."""
    x = torch.ones(LEAST_ROWS, SIDE, device=device, dtype=torch.bfloat16)
    scalings: tuple[Scaling, ...] = ("rowwise", "tensorwise")
    for scaling in scalings:
        try:
            multiplied(quantised(x, kind, scaling), quantised(x, kind, scaling))
            if kind == torch.int8 and device.type == "cpu":
                _check_sums()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
            what, gpu = (
                ("int8", "7.5 or more (T4, A100")
                if kind == torch.int8
                else ("float8", "8.9 or more (L4, H100")
            )
            raise ConfigError(
                f"{key}: {name} has no products in {what} ({str(error).splitlines()[0]}); use an NVIDIA GPU of "
                f"compute capability {gpu} ...), or leave it out"
            ) from error


def _check_sums() -> None:
    """Errors: ValueError where this CPU's sums of int8 products are not exact. One without VNNI adds two products in 16
    bits, if the library lets it, and what does not fit is cut off."""
    generator = torch.Generator().manual_seed(0)
    a_MK, b_PK = (
        torch.where(torch.rand(n, 4 * SIDE, generator=generator) < 0.5, 127, -127).to(torch.int8)
        for n in (LEAST_ROWS + SIDE, 2 * SIDE)
    )
    for rows in (LEAST_ROWS, len(a_MK)):
        found, wanted = torch._int_mm(a_MK[:rows], b_PK.t()), a_MK[:rows].double() @ b_PK.double().t()
        if not torch.equal(found.double(), wanted):
            raise ValueError("their sums are cut off at 16 bits")


# ---------------------------------------------------------------- weights


def _turned(size: torch.Size, turned: bool) -> torch.Size:
    return torch.Size((*size[:-2], size[-1], size[-2])) if turned else size


class Quantised:
    """[..., O, I] weights in 8 bits. It replaces a module's parameter: `F.linear` multiplies with it, and no other
    function accepts it."""

    sides = (SIDE, SIDE)
    """O and I have to be multiples of these."""

    def __init__(self, numbers: Tensor, scale: Tensor, *, turned: bool = False) -> None:
        self.numbers, self.scale, self.turned = numbers, scale, turned
        """turned: it stands for a parameter [..., I, O]."""

    @classmethod
    def like(cls, weight: Tensor, kind: Quantization, *, turned: bool = False) -> Quantised:
        """The same numbers, about."""
        if kind == "mxfp4":
            return MicroScaled.like(weight, kind, turned=turned)
        size = _turned(weight.shape, turned)
        numbers = torch.empty(size, dtype=NUMBERS[kind], device=weight.device)
        scale = torch.empty(*size[:-1], 1, dtype=torch.float32, device=weight.device)
        return cls(numbers, scale, turned=turned).copy_(weight)

    @property
    def by_outputs(self) -> torch.Size:
        """[..., O, I]"""
        return self.numbers.shape

    @property
    def shape(self) -> torch.Size:
        """Of the parameter."""
        return _turned(self.by_outputs, self.turned)

    @torch.no_grad()
    def copy_(self, weight: Tensor) -> Quantised:
        """Take these weights, in place."""
        rows = self._turn(weight).to(self.numbers.device).reshape(-1, self.by_outputs[-1])
        numbers, scale = quantised(rows, self.numbers.dtype, "rowwise")
        self.numbers.copy_(numbers.view_as(self.numbers))
        self.scale.copy_(scale.view_as(self.scale))
        return self

    def _turn(self, weight: Tensor) -> Tensor:
        return weight.mT.contiguous() if self.turned else weight

    def to(self, device: torch.device) -> None:
        self.numbers, self.scale = self.numbers.to(device), self.scale.to(device)

    def unbind(self) -> list[Quantised]:
        """The matrices [O, I] of a stack."""
        return [type(self)(n, s) for n, s in zip(self.numbers.unbind(), self.scale.unbind())]

    def times(self, x: Tensor) -> Tensor:
        """x W^T, [..., O] in x's dtype for [..., I]."""
        rows = x.reshape(-1, x.shape[-1])
        kind = self.numbers.dtype
        least = LEAST_ROWS if x.is_cuda and kind == torch.int8 else SIDE
        left = quantised(filled(rows, least=least), kind, "rowwise")
        y = multiplied(left, (self.numbers, self.scale))[: len(rows)].to(x.dtype)
        return y.view(*x.shape[:-1], self.by_outputs[-2])

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not F.linear or kwargs or not isinstance(args[1], cls):
            return NotImplemented
        x, weight, bias = (*args, None)[:3]
        y = weight.times(x)
        return y if bias is None else y + bias


class MicroScaled(Quantised):
    """The same in mxfp4: two codes a byte, the first in its lower half; a power of two's exponent plus 127 a block.

    The scale is the smallest power of two by which the block's largest number is at most 6; a number between two others
    becomes the nearer one, and the larger one in the middle. As triton_kernels' downcast_to_mxfp, with which Cosmos-RL
    0.4.7 gives weights, rounded to bfloat16 before, to vLLM.
    """

    sides = (1, BLOCK)

    @classmethod
    def like(cls, weight: Tensor, kind: Quantization, *, turned: bool = False) -> MicroScaled:
        *above, columns = _turned(weight.shape, turned)
        numbers = torch.empty(*above, columns // 2, dtype=torch.uint8, device=weight.device)
        scale = torch.empty(*above, columns // BLOCK, dtype=torch.uint8, device=weight.device)
        return cls(numbers, scale, turned=turned).copy_(weight)

    @property
    def by_outputs(self) -> torch.Size:
        return torch.Size((*self.numbers.shape[:-1], 2 * self.numbers.shape[-1]))

    @torch.no_grad()
    def copy_(self, weight: Tensor) -> MicroScaled:
        between = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1)], device=self.numbers.device)
        stack = self._turn(weight).to(self.numbers.device).reshape(-1, *self.by_outputs[-2:])
        for matrix_OI, numbers, scale in zip(
            stack, *(t.view(-1, *t.shape[-2:]) for t in (self.numbers, self.scale))
        ):
            blocks = matrix_OI.to(torch.bfloat16).float().unflatten(-1, (-1, BLOCK))
            least = blocks.abs().amax(-1, keepdim=True) / E2M1[-1]
            exponent = (least.view(torch.int32) + 0x7FFFFF) >> 23  # rounded up, unless it is a power of two
            exponent = torch.where(least.isfinite(), exponent, 255)  # a NaN stays one
            size = blocks.abs() * _power(254 - exponent)
            code = torch.bucketize(size, between, right=True) + 8 * blocks.signbit()
            code = torch.where(exponent == 0, 0, code).flatten(-2).to(torch.uint8)
            numbers.copy_(code[:, ::2] | code[:, 1::2] << 4)
            scale.copy_(exponent.squeeze(-1))
        return self

    def whole(self, dtype: torch.dtype) -> Tensor:
        """[..., O, I] the numbers."""
        values = torch.tensor([*E2M1, *(-x for x in E2M1)], device=self.numbers.device)
        code = torch.stack((self.numbers & 15, self.numbers >> 4), -1).flatten(-2)
        return (values[code.int()] * _power(self.scale).repeat_interleave(BLOCK, -1)).to(dtype)

    def times(self, x: Tensor) -> Tensor:
        return linear(x, self.whole(x.dtype))


def _power(exponent: Tensor) -> Tensor:
    """2^(exponent - 127) exactly; 0 for the exponent 0, infinity for 255."""
    return (exponent.int() << 23).view(torch.float32)


@torch.no_grad()
def quantise(model: nn.Module, kind: Quantization, *, experts: bool) -> list[str]:
    """Quantise a model's matrices, in place, except for embedding, output layer and routers. experts: their stacks,
    too; mxfp4 takes these alone.

    Returns the names of other matrices that are not quantised: their sides are no multiples of what the kind needs, or
    they are in modules of unknown types. Errors: ConfigError where nothing is left to be quantised.
    """
    four = kind == "mxfp4"
    sides = (MicroScaled if four else Quantised).sides
    output = model.get_output_embeddings()  # type: ignore[operator]
    still = {id(m) for m in (output, *gates(model))}
    for module in model.modules():
        for name in _matrices(module, linears=not four, experts=experts):
            weight = module._parameters[name]
            if (
                weight is not None
                and id(module) not in still
                and not any(n % side for n, side in zip(_turned(weight.shape, is_turned(module))[-2:], sides))
            ):
                del module._parameters[name]
                setattr(module, name, Quantised.like(weight, kind, turned=is_turned(module)))
    if not held(model):
        what = (
            f"experts with inputs by {BLOCK}" if four else f"linear layer whose sides are multiples of {SIDE}"
        )
        raise ConfigError(
            f"rollout.quantization={kind}: {type(model).__name__} has no {what}, so nothing would be quantised; leave "
            "it out"
        )
    owners = {
        n: m for n, m in model.named_modules() if id(m) not in still and not isinstance(m, nn.Embedding)
    }
    return [
        f"{at}.{n}"
        for at, m in owners.items()
        for n, p in m._parameters.items()
        if p is not None and is_matrix(n, p.shape) and (not four or is_stack(f"{at}.{n}"))
    ]


def _matrices(module: nn.Module, *, linears: bool, experts: bool) -> tuple[str, ...]:
    """Parameters that only `F.linear` reads."""
    if linears and type(module) is nn.Linear:
        return ("weight",)
    return tuple(STACKS) if experts and all(n in module._parameters for n in STACKS) else ()


def held(module: nn.Module) -> dict[str, Quantised]:
    """The quantised weights, by the names of the parameters in whose places they stand."""
    return {
        f"{at}.{name}": value
        for at, owner in module.named_modules()
        for name, value in vars(owner).items()
        if isinstance(value, Quantised)
    }


@torch.no_grad()
def follow(mine: nn.Module, model: Any) -> None:
    """Update a quantised model from the current weights of another one, adapters with their effect: quantised ones are
    quantised again, all others are taken by reference.

    Raises WhetError where their shapes differ.
    """
    for name, module in (merged(model) if adapted(model) else model).named_modules():
        own = mine.get_submodule(name)
        for key, parameter in module._parameters.items():
            before = getattr(own, key)
            if parameter is None or before is parameter:
                continue
            if before.shape != parameter.shape:
                raise WhetError(
                    f"the new module's {name}.{key} is {tuple(parameter.shape)}, but the engine was built for "
                    f"{tuple(before.shape)}; create a new engine"
                )
            if isinstance(before, Quantised):
                before.copy_(parameter)
            else:
                own._parameters[key] = parameter
