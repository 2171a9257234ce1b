"""What one rank of train.parallel has of a model, from its config alone.

Counted is how `models.sharded`, `tensor_parallel`, `pipeline` and `expert_parallel` cut it: pp gives a rank some of the
layers (the plan tells of the rank that takes most), tp a part of every matrix, ep some experts, dp_shard a part of
every tensor, of which a layer at a time is gathered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from whet.config.checks_parallel import shards, world
from whet.config.learns import Learns, learns
from whet.config.memory import Model, Parts, Phase, forward_bytes, update_parts
from whet.config.schema import Lora, Parallel
from whet.config.sizes import Shape

Tensors = Mapping[str, tuple[int, ...]]

BUCKET = 1 << 25
"""Gradients that are added up over the ranks in one call (`models.sharded`)."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_WHOLE = ("norm", "mlp.gate.weight", "o_proj.bias", "down_proj.bias")
"""What tp leaves whole: ends or parts of names."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Sizes of the layout."""

    ranks: int
    replicate: int
    shard: int
    tp: int
    cp: int
    pp: int
    ep: int
    reshard: bool
    prefetch: int
    gathers: bool
    """One rank gathers what is cut, to save it whole."""

    @classmethod
    def of(cls, p: Parallel, *, gathers: bool = False) -> Spread:
        return cls(
            gathers=gathers and shards(p) * p.tp * p.pp > 1,
            ranks=world(p),
            replicate=p.dp_replicate,
            shard=shards(p),
            tp=p.tp,
            cp=p.cp,
            pp=p.pp,
            ep=p.ep,
            reshard=p.reshard_after_forward,
            prefetch=p.prefetch,
        )

    @property
    def dp(self) -> int:
        """Parts of the batch."""
        return self.replicate * self.shard

    @property
    def modules(self) -> bool:
        """The model's own modules compute, not the lean functions of a known family."""
        return self.tp > 1 or self.ep > 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """A model as one rank has it. Numbers of parameters."""

    shape: Shape
    learns: Learns
    """Of what it keeps."""
    whole: int
    """Of the whole model, which is there when it is opened."""
    layer: int = 0
    """Of one layer that is gathered for use; 0: nothing is cut by dp_shard."""
    rest: int = 0
    """Of embedding, output layer and last norm, which stay gathered."""
    learned: tuple[int, int] = (0, 0)
    """Of such a layer and of the rest, those that have gradients, with adapters."""


def part(
    shape: Shape, spread: Spread, *, lora: Lora | None, trainable: Mapping[str, bool], at: int = 0
) -> Part:
    """What the at-th rank of pp has."""
    held = {name: _cut(name, size, spread) for name, size in shape.tensors.items()}
    mine = _stage(held, shape, spread, at)
    layers = [0] * shape.layers
    for name, size in mine.items():
        if found := _LAYER.search(name):
            layers[int(found[1])] += prod(size)
    small = {
        name: _sharded(size, spread.shard // spread.ep if ".experts." in name else spread.shard)
        for name, size in mine.items()
    }
    by_layer: list[dict[str, tuple[int, ...]]] = [{} for _ in range(shape.layers + 1)]  # the last: the rest
    for name, size in mine.items():
        by_layer[int(found[1]) if (found := _LAYER.search(name)) else -1][name] = size
    learned = [learns(tensors, lora, trainable).learned for tensors in by_layer]
    own = learns(small, lora, trainable)
    if spread.shard > 1:
        own = replace(own, adapted=0)
    vocab = None if shape.vocab_size is None else -(-shape.vocab_size // spread.tp)
    local = replace(
        shape,
        layers=sum(map(bool, layers)),
        heads=max(1, shape.heads // spread.tp),
        kv_heads=max(1, shape.kv_heads // spread.tp),
        ffn=shape.ffn // spread.tp,
        vocab_size=vocab,
        tensors=small,
    )
    cut = spread.shard > 1
    return Part(
        shape=local,
        learns=own,
        whole=sum(map(prod, shape.tensors.values())),
        layer=max(layers) if cut else 0,
        rest=sum(map(prod, mine.values())) - sum(layers) if cut else 0,
        learned=(max(learned[:-1]), learned[-1]) if cut else (0, 0),
    )


def _stage(tensors: Tensors, shape: Shape, spread: Spread, at: int) -> Tensors:
    """What the at-th rank of pp has: equal numbers of layers, the first the embedding, the last norm and output."""
    low, high = at * shape.layers // spread.pp, (at + 1) * shape.layers // spread.pp
    first, last = at == 0, at == spread.pp - 1

    def mine(name: str) -> bool:
        if found := _LAYER.search(name):
            return low <= int(found[1]) < high
        if "embed_tokens" in name:
            return first or (last and shape.tied)
        return last

    return {name: size for name, size in tensors.items() if mine(name)}


def _cut(name: str, size: tuple[int, ...], spread: Spread) -> tuple[int, ...]:
    """A tensor's part under tp and ep, as large as it is."""
    if ".experts." in name:
        at = 1 if "gate_up_proj" in name else 2
        return tuple(
            -(-n // (spread.ep if dim == 0 else spread.tp if dim == at else 1)) for dim, n in enumerate(size)
        )
    if any(part in name for part in _WHOLE):
        return size
    at = 1 if "o_proj.weight" in name or "down_proj.weight" in name else 0
    return tuple(-(-n // spread.tp) if dim == at else n for dim, n in enumerate(size))


def _sharded(size: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    return (-(-size[0] // ranks), *size[1:]) if size else size


# ---------------------------------------------------------------- what a rank takes, phase by phase


@dataclass(frozen=True, kw_only=True)
class Hosted:
    """A model on a rank, in bytes."""

    model: Model
    whole: int
    """All of its weights, as they are read."""
    saved: int
    """The largest file of it that one rank gathers and writes; 0 where each writes parts, or all is there."""
    layer: int
    rest: int
    learned: tuple[int, int]
    """See `Part`."""
    reshard: bool
    prefetch: int

    @property
    def layers(self) -> int:
        return self.model.setting.shape.layers

    @property
    def gathered(self) -> int:
        """Whole tensors while it computes: the rest, the layer at work, those ahead and the one that arrives."""
        if not self.layer:
            return 0
        there = min(self.layers, 2 + self.prefetch) if self.reshard else self.layers + 1
        return self.rest + there * self.layer

    @property
    def unreduced(self) -> int:
        """Whole gradients in the backward pass: a layer's, once more as it is sent, and those of the rest."""
        layer, rest = self.learned
        return 2 * layer + rest if self.model.gradients else 0


def rank_phases(hosted: Sequence[Hosted], *, beside: Parts) -> list[Phase]:
    """Of a rank: reading each model, a forward of each, the update of those that learn. beside: what is there all the
    time."""
    held: Parts = {**beside}
    out: list[Phase] = []
    for h in hosted:
        m = h.model
        out.append(Phase(f"reading the {m.name}", {**held, f"{m.name}, whole": h.whole}))
        held |= {m.name: m.weights} | ({f"optimizer of the {m.name}": m.state} if m.state else {})
    for h in hosted:
        m = h.model
        seen = {**held, "gathered layers": h.gathered}
        out.append(Phase(f"forward of the {m.name}", {**seen, "activations": forward_bytes(m)}))
        if m.gradients:
            out += [Phase(f"update of the {m.name}", {**seen, **parts}) for parts in _moments(h)]
            summed = 0 if h.layer else min(m.stepping, BUCKET * 4)
            step = {f"gradients of the {m.name}": m.stepping, "gradients as they are summed": summed}
            out.append(Phase(f"optimizer step of the {m.name}", {**held, **step}))
        if h.saved:
            out.append(Phase(f"saving the {m.name}", {**held, "whole tensors of one file": h.saved}))
    return out


def _moments(h: Hosted) -> Iterator[Parts]:
    """Those of `memory.update_parts`, three a micro-batch; in the second and third gradients are whole for a while."""
    for number, parts in enumerate(update_parts(h.model)):
        yield {**parts, "gradients before they are cut": h.unreduced if number % 3 else 0}
