"""Layers with low-rank adapters: a matrix, and the stacked matrices of experts (see `models.lora`).

Shape letters: U rows, I in features, O out features, K rank, X experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from whet.models.dropout import Noise
from whet.models.products import column_sums, linear, product


class LoraLinear(nn.Module):
    """A linear layer with an adapter. `refresh` it whenever weight, A or B have changed."""

    effective: Tensor | None

    def __init__(
        self, linear: nn.Linear, a_KI: Tensor, b_OK: Tensor, *, scale: float, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale, self.dropout = scale, dropout
        self.first = 0
        """Number of the first feature of the input, where this rank has the weight's columns from there."""
        self.drops_as = ""
        """The name by which its input is dropped, where that is another layer's."""
        self.noise: Noise | None = None
        """While it is given, the adapter's input is dropped by it: see `dropping`."""
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A, self.lora_B = nn.Parameter(a_KI), nn.Parameter(b_OK)
        self.keeps = True
        """Keep W + s B A. Not where W is gathered for a moment only: then W x and s B A x are added."""
        self.register_buffer("effective", None, persistent=False)
        """W + s B A, at one address for as long as the layer lives; None where B is 0: then it is W itself."""

    def forward(self, x: Tensor) -> Tensor:
        weight_OI = self.weight if self.effective is None else self.effective
        noise = self.noise if torch.is_grad_enabled() else None
        if noise is not None or not self.keeps:
            a_KI, b_OK = self.lora_A.to(x.dtype), self.lora_B.to(x.dtype)
            seen = x if noise is None else noise.drop(x, self.dropout, first=self.first)
            low_UK = linear(seen, a_KI)
            return linear(x, self.weight, self.bias) + self.scale * linear(low_UK, b_OK)
        if not torch.is_grad_enabled():
            return linear(x, weight_OI, self.bias)
        return Adapted.apply(x, weight_OI, self.bias, self.lora_A, self.lora_B, self.scale)

    def refresh(self) -> None:
        _refresh(self)


def _sum(weight_OI: Tensor, a_KI: Tensor, b_OK: Tensor, scale: float) -> Tensor:
    """W + s B A, in the dtype of B."""
    return product(b_OK, a_KI).mul_(scale).add_(weight_OI.to(b_OK.dtype))


@torch.no_grad()
def effect(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The effective weight of a layer or a stack with these tensors: equal, bit for bit, to what `refresh` keeps."""
    return _write(torch.empty_like(weight), weight, a, b, scale) if b.any() else weight


def _write(out: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s B A, of each expert where there is a stack."""
    if weight.ndim == 2:
        return out.copy_(_sum(weight, a, b, scale))
    experts = len(weight)
    for out_OI, weight_OI, a_KI, b_OK in zip(out, weight, _each(a, experts), _each(b, experts)):
        out_OI.copy_(_sum(weight_OI, a_KI, b_OK, scale))
    return out


def _each(part: Tensor, experts: int) -> Sequence[Tensor]:
    """A or B of each expert; of two dims it is that of all."""
    return part.unbind() if part.ndim == 3 else [part] * experts


class LoraStack(nn.Module):
    """The adapters of a stack of experts [X, O, I]: A [X, K, I] and B [X, O, K]; or A [K, I] and B [O, K], which all
    experts share. `refresh` it whenever weight, A or B have changed."""

    effective: Tensor | None
    dropout = 0.0
    """A row of an expert is no token of the batch, by which an adapter's input is dropped elsewhere."""
    drops_as = ""
    noise: Noise | None = None

    def __init__(self, experts: nn.Module, name: str, a: Tensor, b: Tensor, *, scale: float) -> None:
        super().__init__()
        self.owner, self.name, self.scale = (experts,), name, scale
        """Where the stack is, in a tuple, so that it is no part of this module."""
        self.lora_A, self.lora_B = nn.Parameter(a), nn.Parameter(b)
        self.keeps = True
        """See `LoraLinear`."""
        self.register_buffer("effective", None, persistent=False)

    @property
    def weight(self) -> nn.Parameter:
        return getattr(self.owner[0], self.name)  # type: ignore[no-any-return]

    def forward(self, part_X: Mapping[int, Tensor], weight_X: Sequence[Tensor]) -> dict[int, Tensor]:
        """Rows of some experts, by the experts' numbers, times the effective matrix of each."""
        if not self.keeps:
            a_X, b_X = self._pairs(len(weight_X))
            return {
                x: linear(part, weight_X[x])
                + self.scale * linear(linear(part, a_X[x].to(part.dtype)), b_X[x].to(part.dtype))
                for x, part in part_X.items()
            }
        made_X = weight_X if self.effective is None else self.effective.unbind()
        if not torch.is_grad_enabled():
            return {x: linear(part, made_X[x]) for x, part in part_X.items()}
        a_X, b_X = self._pairs(len(weight_X))
        return {
            x: Adapted.apply(part, made_X[x], None, a_X[x], b_X[x], self.scale) for x, part in part_X.items()
        }

    def _pairs(self, experts: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return _each(self.lora_A, experts), _each(self.lora_B, experts)

    def refresh(self) -> None:
        _refresh(self)


@torch.no_grad()
def _refresh(layer: LoraLinear | LoraStack) -> None:
    if not layer.keeps:
        return
    if layer.effective is None:
        if not layer.lora_B.any():
            return
        layer.effective = torch.empty_like(layer.weight)
    _write(layer.effective, layer.weight, layer.lora_A, layer.lora_B, layer.scale)


class Adapted(torch.autograd.Function):
    """x W'^T + b with W' = W + s B A given: dA = s B^T dy^T x and dB = s dy^T x A^T, by way of [U, K]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        a_KI: Tensor,
        b_OK: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_OI, a_KI, b_OK)
        ctx.scale = scale
        return linear(x, weight_OI.detach(), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI, a_KI, b_OK = ctx.saved_tensors
        needs_x, _, needs_bias, needs_a, needs_b, _ = ctx.needs_input_grad
        x_UI, dy_UO = x.flatten(0, -2), dy.flatten(0, -2)
        dx = product(dy_UO, weight_OI).view(x.shape) if needs_x else None
        da_KI = db_OK = None
        if needs_a:
            da_KI = product(product(dy_UO, b_OK.to(dy.dtype)).t(), x_UI).to(a_KI.dtype).mul_(ctx.scale)
        if needs_b:
            db_OK = product(dy_UO.t(), product(x_UI, a_KI.to(x.dtype).t())).to(b_OK.dtype).mul_(ctx.scale)
        return dx, None, column_sums(dy_UO) if needs_bias else None, da_KI, db_OK, None
