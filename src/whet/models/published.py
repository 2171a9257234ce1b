"""The weights of a policy as they leave it, one at a time: with the effect of its adapters, and without."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from whet.environment import give_memory_back
from whet.models.lora import adapted, adapted_weights
from whet.models.lora_layers import effect
from whet.track.files import atomic_folder

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


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
        name: Adapter(layer.scale, name_of[id(layer.lora_A)], name_of[id(layer.lora_B)])
        for name, layer in adapted_weights(model).items()
    }


def weights_of(model: nn.Module) -> Iterator[Weight]:
    """All parameters of a model in this process, with the effective weights that its layers keep."""
    layers = adapted_weights(model)
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


# ---------------------------------------------------------------- a model whose values are in files


def write_own(folder: Path, weights: Iterator[Weight]) -> None:
    """A `Send`: a file for each weight as the model has it. Raises CheckpointError (full disk ...)."""
    with atomic_folder(folder, durable=False) as new:
        for number, weight in enumerate(weights):
            save_file(
                {weight.name: weight.own.detach().cpu().contiguous()}, new / f"{number:05d}.safetensors"
            )


def read_own(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of `write_own`. They are mapped files, which the system reads when they are used and may drop again;
    writing copies a page. They stay readable when the folder goes."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118  it is no mapping


def structure_of(model: M) -> M:
    """A copy without the values of its parameters, which are on the device `meta`. Buffers are copied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    memo |= {id(layer.effective): None for layer in adapted(model).values() if layer.effective is not None}
    structure = copy.deepcopy(model, memo)
    for layer in adapted(structure).values():
        layer.effective = None
    return structure


def without_values(structure: M, device: torch.device) -> M:
    """The same model with parameters that take no memory, of their shapes and dtypes and on this device. Whoever reads
    a value finds NaN."""
    return _replaced(structure, {n: _nothing(p, device) for n, p in structure.named_parameters()}, device)


def filled(structure: M, folder: Path, device: torch.device | str = "cpu") -> M:
    """The same model with the parameters of `write_own`. On the CPU they are mapped files, see `read_own`."""
    found = {name: tensor.to(device) for name, tensor in read_own(folder)}
    return _replaced(structure, found, device)


def _replaced(model: M, values: Mapping[str, Tensor], device: torch.device | str) -> M:
    """In place: parameters with these values, and buffers on the device. Modules that share one go on sharing it."""
    named = dict(model.named_parameters())
    assert named.keys() == values.keys(), f"other weights: {sorted(named.keys() ^ values.keys())[:3]}"
    made = {id(p): nn.Parameter(values[n], requires_grad=p.requires_grad) for n, p in named.items()}
    for module in model.modules():
        for key, own in list(module._parameters.items()):
            if own is not None:
                module._parameters[key] = made[id(own)]
        for key, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[key] = buffer.to(device)
    return model


def _nothing(p: Tensor, device: torch.device) -> Tensor:
    return torch.full((1,), math.nan, dtype=p.dtype, device=device).expand(p.shape)


# ---------------------------------------------------------------- a model that is in memory only while it is read


@torch.no_grad()
def let_go(model: nn.Module) -> None:
    """Free the memory of all parameters. Names, shapes and dtypes stay; whoever reads a value finds NaN."""
    for p in model.parameters():
        p.data = _nothing(p, p.device)
    for layer in adapted(model).values():
        layer.effective = None
    give_memory_back()


@torch.no_grad()
def bring_back(model: nn.Module, folder: Path, device: torch.device) -> None:
    """The parameters of `write_own`, in place, and remove the folder. On the CPU they are mapped files: `read_own`."""
    parameters = dict(model.named_parameters())
    for name, tensor in read_own(folder):
        parameters.pop(name).data = tensor.to(device)
    assert not parameters, f"{folder} lacks {sorted(parameters)}"
    shutil.rmtree(folder, ignore_errors=True)
