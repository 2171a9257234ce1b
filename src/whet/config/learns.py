"""How much of a model learns, and what that takes: adapters, frozen parameters, the optimizer's state."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from whet.config.schema import LoraConfig, OptimizerConfig
from whet.config.sizes import DTYPE_BYTES
from whet.types import ConfigError

T = TypeVar("T")
Tensors = Mapping[str, tuple[int, ...]]
"""Shapes of a model's parameters by their names."""

_FLOAT32 = 4
_BLOCK = 256
"""Entries of an 8-bit moment that share a scale (`models.narrow_adam`)."""
_ENDS = ("embed_tokens", "lm_head")
ROUTERS = (".mlp.gate.", ".mlp.router.")
"""Parts of the names of what routers have."""
_NO_LINEAR = (*_ENDS, ".experts.", *ROUTERS)
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Endings of layers that Megatron-LM computes as one: linear_qkv, linear_fc1."""
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Endings of the stacked matrices of experts, and what each expert has there."""


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
        two = {"int8": 2 + 8 / _BLOCK, "bfloat16": 4, "float32": 2 * one}[optimizer.state_dtype]
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
        prod(s) for n, s in {**own, **pairs}.items() if is_matrix(n, s) and not any(end in n for end in _ENDS)
    ]
    return Learns(
        base=base,
        own=sum(map(prod, own.values())),
        adapters=sum(map(prod, pairs.values())),
        adapted=sum(map(prod, adapted.values())),
        hidden=sum(inside),
    )


def is_matrix(name: str, size: Sequence[int]) -> bool:
    """Whether a parameter is a matrix or a stack of them: the biases of a layer's experts are a stack, too."""
    return len(size) > 1 and not name.endswith("bias")


def _on(name: str, trainable: Mapping[str, bool]) -> bool:
    return next((on for pattern, on in trainable.items() if re.search(pattern, name)), True)


def _targeted(name: str, lora: LoraConfig) -> bool:
    """Whether a weight gets an adapter, as peft decides by the layer's name."""
    if is_stack(name):
        return bool(ranks_of_stack(name, lora))
    layer, _, kind = name.rpartition(".")
    if kind != "weight" or "norm" in layer.rpartition(".")[2] or any(part in name for part in _NO_LINEAR):
        return False
    return layer_targeted(layer, lora)


def layer_targeted(layer: str, lora: LoraConfig) -> bool:
    """Whether a linear layer, which is not the output layer, gets an adapter."""
    if fits(layer, lora.exclude_modules):
        return False
    return every_linear(lora) or fits(layer, lora.targets)


def every_linear(lora: LoraConfig) -> bool:
    """Whether all linear layers get adapters, maybe beside experts."""
    return "all-linear" in ((lora.targets,) if isinstance(lora.targets, str) else lora.targets)


def is_stack(name: str) -> bool:
    """Whether a parameter is a stack of experts' matrices."""
    module, _, ending = name.rpartition(".")
    return module.rpartition(".")[2] == "experts" and ending in STACKS


def inside_stack(name: str) -> list[str]:
    """The names of the layers that each expert has in a stack."""
    module, _, ending = name.rpartition(".")
    return [f"{module}.{one}" for one in STACKS[ending]]


def ranks_of_stack(name: str, lora: LoraConfig, key: str = "model.lora") -> int:
    """How many adapters of layers the one of a stack stands for: 0 where it has none, 2 where gate and up are named and
    not fused. As in peft, its rank is so many times that of a layer.

    Errors: ConfigError where one of the two is named without the other.
    """
    inside = inside_stack(name)
    if any(fits(n, lora.exclude_modules) for n in (name, *inside)):
        return 0
    if fits(name, lora.targets):
        return 1
    named = [n for n in inside if fits(n, lora.targets)]
    if named and len(named) < len(inside):
        raise ConfigError(
            f"{key}.targets: {named[0]} is named alone, but experts have gate_proj and up_proj in one matrix; name "
            f"both, or {name.rpartition('.')[2]}"
        )
    return (1 if lora.fused else len(inside)) if named else 0


def shares_experts(lora: LoraConfig) -> bool:
    """Whether all experts of a layer have one A and one B."""
    return lora.fused if lora.experts is None else lora.experts == "shared"


def pattern_of(layer: str, patterns: Mapping[str, T]) -> T | None:
    """The value of the first pattern that fits the end of a layer's name."""
    return next((value for at, value in patterns.items() if re.match(rf"(.*\.)?({at})$", layer)), None)


def fits(layer: str, names: str | tuple[str, ...]) -> bool:
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
    for name, shape in adapted.items():
        if is_stack(name):
            yield from _stack_pairs(name, shape, lora)
            continue
        (rows, columns), layer = shape, name.rpartition(".")[0]
        rank = pattern_of(layer, lora.rank_pattern) or lora.rank
        if not lora.fused or fused_as(layer) not in fused:
            yield f"{layer}.lora_A", (rank, columns)
        fused.add(fused_as(layer))
        yield f"{layer}.lora_B", (rows, rank)


def _stack_pairs(
    name: str, shape: tuple[int, ...], lora: LoraConfig
) -> Iterator[tuple[str, tuple[int, ...]]]:
    *experts, rows, columns = shape
    many = () if shares_experts(lora) else tuple(experts)
    rank = stack_rank(name, lora)
    module, _, ending = name.rpartition(".")
    yield f"{module}.lora.{ending}.lora_A", (*many, rank, columns)
    yield f"{module}.lora.{ending}.lora_B", (*many, rows, rank)


def stack_rank(name: str, lora: LoraConfig) -> int:
    """Rank of a stack's adapters."""
    return ranks_of_stack(name, lora) * (pattern_of(name, lora.rank_pattern) or lora.rank)
