"""Weights in 8 bits, and the matrix products of such numbers.

A matrix is held as numbers of 8 bits and one float32 scale for each of its rows, so that the row's largest number is
the format's largest. What it is multiplied with is scaled in the same way by the numbers at hand (dynamic, one scale a
token); the product takes the scales out again. float8 is e4m3 (Micikevicius et al. 2022, arXiv:2209.05433), whose error
is relative to each number; int8 has even steps, 127 to a row's largest (Dettmers et al. 2022, arXiv:2208.07339).
Products are torch's `_scaled_mm`, in bfloat16, and `_int_mm`, in int32 and so without rounding of their own.

Shape letters: O, I rows and columns of a weight, which are columns of output and input; M, K, P of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whet.models.lora import adapted, merged
from whet.models.router import gates
from whet.types import ConfigError, WhetError

Kind = Literal["float8", "int8"]
Scaling = Literal["rowwise", "tensorwise"]
NUMBERS = {"float8": torch.float8_e4m3fn, "int8": torch.int8}
SIDE = 16
"""What the sides of a matrix have to be multiples of."""
LEAST_ROWS = 32
"""CUDA's int8 products take more rows than 16."""

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


# ---------------------------------------------------------------- weights


class Quantised:
    """[..., O, I] weights in 8 bits. It replaces a module's parameter: `F.linear` multiplies with it, and no other
    function accepts it."""

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    @classmethod
    def like(cls, weight: Tensor, kind: Kind) -> Quantised:
        """The same numbers, about."""
        numbers = torch.empty(weight.shape, dtype=NUMBERS[kind], device=weight.device)
        scale = torch.empty(*weight.shape[:-1], 1, dtype=torch.float32, device=weight.device)
        return cls(numbers, scale).copy_(weight)

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @torch.no_grad()
    def copy_(self, weight: Tensor) -> Quantised:
        """Take these weights, in place."""
        rows = weight.to(self.numbers.device).reshape(-1, self.shape[-1])
        numbers, scale = quantised(rows, self.numbers.dtype, "rowwise")
        self.numbers.copy_(numbers.view_as(self.numbers))
        self.scale.copy_(scale.view_as(self.scale))
        return self

    def to(self, device: torch.device) -> None:
        self.numbers, self.scale = self.numbers.to(device), self.scale.to(device)

    def unbind(self) -> list[Quantised]:
        """The matrices of a stack."""
        return [Quantised(n, s) for n, s in zip(self.numbers.unbind(), self.scale.unbind())]

    def times(self, x: Tensor) -> Tensor:
        """x W^T, [..., O] in x's dtype for [..., I]."""
        rows = x.reshape(-1, x.shape[-1])
        kind = self.numbers.dtype
        least = LEAST_ROWS if x.is_cuda and kind == torch.int8 else SIDE
        left = quantised(filled(rows, least=least), kind, "rowwise")
        y = multiplied(left, (self.numbers, self.scale))[: len(rows)].to(x.dtype)
        return y.view(*x.shape[:-1], self.shape[-2])

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


@torch.no_grad()
def quantise(model: nn.Module, kind: Kind, *, experts: bool) -> list[str]:
    """Quantise a model's matrices to 8 bits, in place, except for embedding, output layer and routers. experts: their
    stacks, too.

    Returns the names of other matrices that are not quantised: SIDE does not divide their sides, or they are in modules
    of unknown types. Errors: ConfigError where nothing is left to be quantised.
    """
    output = model.get_output_embeddings()  # type: ignore[operator]
    still = {id(m) for m in (output, *gates(model))}
    for module in model.modules():
        for name in _matrices(module, experts=experts):
            weight = module._parameters[name]
            if (
                weight is not None
                and id(module) not in still
                and not any(n % SIDE for n in weight.shape[-2:])
            ):
                del module._parameters[name]
                setattr(module, name, Quantised.like(weight, kind))
    if not held(model):
        raise ConfigError(
            f"rollout.quantization: {type(model).__name__} has no linear layer whose sides are multiples of {SIDE}, so "
            "nothing would be quantised; leave it out"
        )
    owners = {
        n: m for n, m in model.named_modules() if id(m) not in still and not isinstance(m, nn.Embedding)
    }
    return [
        f"{at}.{n}"
        for at, m in owners.items()
        for n, p in m._parameters.items()
        if p is not None and p.ndim > 1
    ]


def _matrices(module: nn.Module, *, experts: bool) -> tuple[str, ...]:
    """Parameters that only `F.linear` reads."""
    if type(module) is nn.Linear:
        return ("weight",)
    stacks = ("gate_up_proj", "down_proj")
    return stacks if experts and all(n in module._parameters for n in stacks) else ()


def held(module: nn.Module) -> dict[str, Quantised]:
    """The weights in 8 bits, by the names of the parameters in whose places they stand."""
    return {
        f"{at}.{name}": value
        for at, owner in module.named_modules()
        for name, value in vars(owner).items()
        if isinstance(value, Quantised)
    }


@torch.no_grad()
def follow(mine: nn.Module, model: Any) -> None:
    """Update a quantised model from the current weights of another one, adapters with their effect: those in 8 bits are
    requantised, all others are taken by reference.

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
