"""The weights of a policy as they leave it, one at a time: with the effect of its adapters, and without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from whet.models.lora import adapted, effect

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter."""

    name: str
    own: Tensor
    """As the model has it."""
    merged: Tensor | None
    """With the effect of its adapter, if it has one. None: it is a part of an adapter."""
    adapted: bool = False
    """It has an adapter."""


Send = Callable[[Iterator[Weight]], T]
"""Takes the weights, to the last. Where they are in another process it is called there: then it is a function of a
module, or a `functools.partial` of one, whose arguments can be pickled."""


@dataclass(frozen=True)
class Adapter:
    """How one weight is changed: W + scale B A."""

    scale: float
    a: str
    """Name of the parameter A, which several adapters may share."""
    b: str


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """By the name of the weight that is changed. The parameters need no data."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    return {
        f"{name}.weight": Adapter(layer.scale, name_of[id(layer.lora_A)], name_of[id(layer.lora_B)])
        for name, layer in adapted(model).items()
    }


def weights_of(model: nn.Module) -> Iterator[Weight]:
    """All parameters of a model in this process, with the effective weights that its layers keep."""
    layers = {f"{name}.weight": layer for name, layer in adapted(model).items()}
    parts = {id(p) for layer in layers.values() for p in (layer.lora_A, layer.lora_B)}
    for name, p in model.named_parameters():
        own, layer = p.detach(), layers.get(name)
        if layer is not None:
            yield Weight(name, own, own if layer.effective is None else layer.effective, adapted=True)
        else:
            yield Weight(name, own, None if id(p) in parts else own)


def merging(named: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Adapter]) -> Iterator[Weight]:
    """Whole tensors as they come, in any order. A weight that has an adapter waits for it, so that little waits where
    adapters come first (`parts_first`)."""
    parts = {name for adapter in adapters.values() for name in (adapter.a, adapter.b)}
    came: dict[str, Tensor] = {}
    waiting: dict[str, Tensor] = {}
    for name, tensor in named:
        if name in parts:
            came[name] = tensor
            yield Weight(name, tensor, None)
        elif name in adapters:
            waiting[name] = tensor
        else:
            yield Weight(name, tensor, tensor)
        for ready in [n for n in waiting if adapters[n].a in came and adapters[n].b in came]:
            adapter, own = adapters[ready], waiting.pop(ready)
            yield Weight(
                ready, own, effect(own, came[adapter.a], came[adapter.b], adapter.scale), adapted=True
            )


def parts_first(
    named: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Adapter]
) -> Iterator[tuple[str, Tensor]]:
    """The same tensors; those of adapters before all others."""
    parts = {name for adapter in adapters.values() for name in (adapter.a, adapter.b)}
    yield from sorted(named, key=lambda one: one[0] not in parts)
