"""How much of a model learns, and what that takes: adapters, frozen parameters, the optimizer's state."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from whet.config.schema import LoraConfig, OptimizerConfig
from whet.config.sizes import DTYPE_BYTES

Tensors = Mapping[str, tuple[int, ...]]
"""Shapes of a model's parameters by their names."""

_FLOAT32 = 4
_BLOCK = 256
"""Entries of an 8-bit moment that share a scale (`models.adam8`)."""
_ENDS = ("embed_tokens", "lm_head")
_NO_LINEAR = (*_ENDS, ".experts.", ".mlp.gate.")
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Endings of layers that Megatron-LM computes as one: linear_qkv, linear_fc1."""


@dataclass(frozen=True)
class Learns:
    """Numbers of parameters."""

    base: int
    """Of the model without adapters."""
    own: int
    """Of these that learn."""
    adapters: int = 0
    adapted: int = 0
    """Of the base under adapters: kept twice, without and with their effect."""
    hidden: int = 0
    """That learn in matrices between embedding and output layer, where muon takes them."""

    @property
    def learned(self) -> int:
        return self.own + self.adapters

    def train_bytes(self, optimizer: OptimizerConfig, dtype: str, *, masters: bool = True) -> int:
        """Weights, gradients, moments, and (masters) float32 copies of what learns in another dtype."""
        weights = (self.base + self.adapted) * DTYPE_BYTES[dtype] + self.adapters * _FLOAT32
        gradients = self.own * DTYPE_BYTES[dtype] + self.adapters * _FLOAT32
        return weights + gradients + self._state_bytes(optimizer, dtype, masters=masters)

    def checkpoint_bytes(
        self, optimizer: OptimizerConfig, dtype: str, *, whole: bool, masters: bool = True
    ) -> int:
        """On disk. whole: with the weights under adapters."""
        plain = self.base if whole or not self.adapters else self.own
        weights = plain * DTYPE_BYTES[dtype] + self.adapters * _FLOAT32
        return weights + self._state_bytes(optimizer, dtype, masters=masters)

    def _state_bytes(self, optimizer: OptimizerConfig, dtype: str, *, masters: bool) -> int:
        kept = self.own * _FLOAT32 if masters and dtype != "float32" else 0
        one = _FLOAT32 if masters else DTYPE_BYTES[dtype]
        two = 2 + 8 / _BLOCK if optimizer.state_dtype == "int8" else 2 * one
        if optimizer.name == "sgd":
            return kept + (self.learned * one if optimizer.momentum else 0)
        if optimizer.name == "muon":
            return kept + self.hidden * one + int((self.learned - self.hidden) * two)
        return kept + int(self.learned * two)


def learns(tensors: Tensors, lora: LoraConfig | None, trainable: Mapping[str, bool]) -> Learns:
    """What of these learns under a section of adapters and rules by name (`train.trainable`)."""
    base = sum(map(prod, tensors.values()))
    adapted = {} if lora is None else {n: s for n, s in tensors.items() if _targeted(n, lora)}
    pairs = dict(_pairs(adapted, lora)) if lora is not None else {}
    own = {n: s for n, s in tensors.items() if lora is None or _whole(n, lora)}
    own, pairs = ({n: s for n, s in named.items() if _on(n, trainable)} for named in (own, pairs))
    inside = [
        prod(s) for n, s in {**own, **pairs}.items() if len(s) > 1 and not any(end in n for end in _ENDS)
    ]
    return Learns(
        base=base,
        own=sum(map(prod, own.values())),
        adapters=sum(map(prod, pairs.values())),
        adapted=sum(map(prod, adapted.values())),
        hidden=sum(inside),
    )


def _on(name: str, trainable: Mapping[str, bool]) -> bool:
    return next((on for pattern, on in trainable.items() if re.search(pattern, name)), True)


def _targeted(name: str, lora: LoraConfig) -> bool:
    """Whether a weight gets an adapter, as peft decides by the layer's name."""
    layer, _, kind = name.rpartition(".")
    if kind != "weight" or "norm" in layer.rpartition(".")[2] or any(part in name for part in _NO_LINEAR):
        return False
    if _fits(layer, lora.exclude_modules):
        return False
    return lora.targets == "all-linear" or _fits(layer, lora.targets)


def _fits(layer: str, names: str | tuple[str, ...]) -> bool:
    """names: endings, or one regular expression for the whole name."""
    if isinstance(names, str):
        return re.fullmatch(names, layer) is not None
    return f".{layer}".endswith(tuple(f".{name}" for name in names))


def _whole(name: str, lora: LoraConfig) -> bool:
    """Whether a tensor is of a module that learns in full beside the adapters."""
    parts = name.split(".")
    modules = (f".{'.'.join(parts[:n])}" for n in range(1, len(parts)))
    ends = tuple(f".{ending}" for ending in lora.modules_to_save)
    return any(module.endswith(ends) for module in modules)


def fused_as(layer: str) -> str:
    """What a layer is fused into, by its name; its own name if into nothing."""
    parent, _, ending = layer.rpartition(".")
    return next((f"{parent}.{'+'.join(endings)}" for endings in _FUSED if ending in endings), layer)


def _pairs(adapted: Tensors, lora: LoraConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A and B of every adapter; one A for what is fused."""
    fused = set()
    for name, (rows, columns) in adapted.items():
        layer = name.rpartition(".")[0]
        rank = next(
            (r for at, r in lora.rank_pattern.items() if re.match(rf"(.*\.)?({at})$", layer)), lora.rank
        )
        if not lora.fused or fused_as(layer) not in fused:
            yield f"{layer}.lora_A", (rank, columns)
        fused.add(fused_as(layer))
        yield f"{layer}.lora_B", (rows, rank)
