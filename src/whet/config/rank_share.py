"""The part of a model on one rank of train.parallel, computed from its config alone.

The counts follow `models.sharded`, `tensor_parallel`, `pipeline` and `expert_parallel`: with pp a rank has some of the
layers (the plan reports the rank with the most memory), with tp a part of every matrix, with ep some experts, with
dp_shard a shard of every tensor, of which one layer at a time is gathered.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from whet.config.checks_parallel import shards
from whet.config.learns import ROUTERS, Learns, learns
from whet.config.memory import ModelMemory, Parts, Phase, forward_bytes, update_parts
from whet.config.schema import LoraConfig, ParallelConfig
from whet.config.sizes import Shape

Tensors = Mapping[str, tuple[int, ...]]

BUCKET = 1 << 25
"""Number of gradients that are summed over the ranks in one call (`models.sharded`)."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_REST = -1
"""In the place of a layer's number: tensors of none."""
_WHOLE = ("norm", *ROUTERS, "o_proj.bias", "down_proj.bias")
"""Tensors that tp does not shard: ends or parts of names."""


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """The part of a model on one rank, in numbers of parameters."""

    shape: Shape
    learns: Learns
    """Trained parameters in this part."""
    whole: int
    """Parameters of the whole model, which is in memory when it is loaded."""
    layer: int = 0
    """Parameters of one gathered layer; 0: dp_shard shards nothing."""
    rest: int = 0
    """Parameters of embedding, output layer and last norm, which stay gathered."""
    learned: tuple[int, int] = (0, 0)
    """Parameters with gradients in such a layer and in the rest, including adapters."""


def part(
    shape: Shape,
    layout: ParallelConfig,
    *,
    lora: LoraConfig | None,
    trainable: Mapping[str, bool],
    at: int = 0,
) -> RankShare:
    """The part of the at-th rank of pp."""
    shard = shards(layout)
    held = {name: held_size(name, size, layout) for name, size in shape.tensors.items()}
    mine = _stage(held, shape, layout, at)
    by_layer: dict[int, dict[str, tuple[int, ...]]] = {_REST: {}}
    for name, size in mine.items():
        by_layer.setdefault(_layer(name), {})[name] = size
    layers = {at: sum(map(prod, tensors.values())) for at, tensors in by_layer.items() if at != _REST}
    small = {
        name: _sharded(size, shard // layout.ep if ".experts." in name else shard)
        for name, size in mine.items()
    }
    learned = {at: learns(tensors, lora, trainable).learned for at, tensors in by_layer.items()}
    rest = learned.pop(_REST)
    own = learns(small, lora, trainable)
    if shard > 1:
        own = replace(own, adapted=0)
    vocab = None if shape.vocab_size is None else -(-shape.vocab_size // layout.tp)
    local = replace(
        shape,
        layers=sum(at < shape.layers for at in layers),  # those that predict further tokens come after them
        heads=max(1, shape.heads // layout.tp),
        kv_heads=max(1, shape.kv_heads // layout.tp),
        ffn=shape.ffn // layout.tp,
        vocab_size=vocab,
        tensors=small,
    )
    cut = shard > 1
    return RankShare(
        shape=local,
        learns=own,
        whole=sum(map(prod, shape.tensors.values())),
        layer=max(layers.values(), default=0) if cut else 0,
        rest=sum(map(prod, mine.values())) - sum(layers.values()) if cut else 0,
        learned=(max(learned.values(), default=0), rest) if cut else (0, 0),
    )


def _layer(name: str) -> int:
    """The number of the layer that a tensor is of; _REST of none."""
    found = _LAYER.search(name)
    return int(found[1]) if found else _REST


def _stage(tensors: Tensors, shape: Shape, layout: ParallelConfig, at: int) -> Tensors:
    """Tensors of the at-th rank of pp: as `pipeline.apply` cuts the layers into parts, and deals these out in turn; the
    first has the embedding, the last the output."""
    parts = layout.pp * layout.pipeline_chunks
    ends = [(part + 1) * shape.layers // parts for part in range(parts)]
    first, last = at == 0, at == layout.pp - 1

    def mine(name: str) -> bool:
        if (layer := _layer(name)) != _REST:
            return min(bisect_right(ends, layer), parts - 1) % layout.pp == at
        if "embed_tokens" in name:
            return first or (last and shape.tied)
        return last

    return {name: size for name, size in tensors.items() if mine(name)}


def held_size(name: str, size: tuple[int, ...], layout: ParallelConfig) -> tuple[int, ...]:
    """The size of a tensor on one rank of tp and ep, rounded up."""
    if ".experts." in name:
        at = 1 if "gate_up_proj" in name else 2
        return tuple(
            -(-n // (layout.ep if dim == 0 else layout.tp if dim == at else 1)) for dim, n in enumerate(size)
        )
    if any(part in name for part in _WHOLE):
        return size
    at = 1 if "o_proj.weight" in name or "down_proj.weight" in name else 0
    return tuple(-(-n // layout.tp) if dim == at else n for dim, n in enumerate(size))


def _sharded(size: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    return (-(-size[0] // ranks), *size[1:]) if size else size


# ---------------------------------------------------------------- memory of a rank by phase


@dataclass(frozen=True, kw_only=True)
class HostedModel:
    """A model on a rank."""

    model: ModelMemory
    share: RankShare
    size: int
    """Bytes of a parameter."""
    layout: ParallelConfig
    saved: int
    """Bytes of the largest file that one rank gathers and writes; 0 where every rank writes shards, or nothing is
    sharded."""

    @property
    def gathered(self) -> int:
        """Bytes of full tensors during computation: the rest, the current layer, prefetched layers and the one in
        transfer."""
        layers, share = self.model.setting.shape.layers, self.share
        if not share.layer:
            return 0
        there = min(layers, 2 + self.layout.prefetch) if self.layout.reshard_after_forward else layers + 1
        return (share.rest + there * share.layer) * self.size

    @property
    def unreduced(self) -> int:
        """Bytes of full gradients in the backward pass: those of a layer, a second copy in transfer, and those of the
        rest."""
        layer, rest = self.share.learned
        return (2 * layer + rest) * self.size if self.model.gradients else 0


def rank_phases(hosted: Sequence[HostedModel], *, beside: Parts) -> list[Phase]:
    """The phases of a rank: reading each model, a forward of each, the update of trained models. beside: memory that is
    always in use."""
    held: Parts = {**beside}
    out: list[Phase] = []
    for h in hosted:
        m = h.model
        out.append(Phase(f"reading the {m.name}", {**held, f"{m.name}, whole": h.share.whole * h.size}))
        held |= {m.name: m.weights} | ({f"optimizer of the {m.name}": m.state} if m.state else {})
    for h in hosted:
        m = h.model
        seen = {**held, "gathered layers": h.gathered}
        out.append(Phase(f"forward of the {m.name}", {**seen, "activations": forward_bytes(m)}))
        if m.gradients:
            out += [Phase(f"update of the {m.name}", {**seen, **parts}) for parts in _moments(h)]
            summed = 0 if h.share.layer else min(m.stepping, BUCKET * 4)
            step = {f"gradients of the {m.name}": m.stepping, "gradients as they are summed": summed}
            out.append(Phase(f"optimizer step of the {m.name}", {**held, **step}))
        if h.saved:
            out.append(Phase(f"saving the {m.name}", {**held, "whole tensors of one file": h.saved}))
    return out


def _moments(h: HostedModel) -> Iterator[Parts]:
    """The peaks of `memory.update_parts`, three per micro-batch; in two of these, gradients are full."""
    for number, parts in enumerate(update_parts(h.model)):
        yield {**parts, "gradients before they are sharded": h.unreduced if number % 3 else 0}
