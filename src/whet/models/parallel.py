"""A model spread over ranks: layers (pp), matrices (tp), experts (ep) and tokens (cp), applied in this order.

Activation checkpointing, compilation and FSDP2 follow, on the part that is left on this rank. Parameters keep their
Hugging Face names everywhere; a rank has parts of them, and lacks those of other stages. Gradients are sums over tokens
with global weights, so everything here is a sum, never a mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from whet.models import expert_parallel, forward, fused_forward, hf_forward, pipeline, tensor_parallel
from whet.models.collectives import Peers, SplitDim, summed
from whet.models.context_parallel import Share
from whet.models.forward import Decoder, Hidden
from whet.models.kernels import Ops
from whet.models.mesh import Dims
from whet.models.packing import PackedLayout
from whet.models.regions import Region

_NOBODY = Peers()


@dataclass(frozen=True, eq=False)
class Parallel:
    """The part of a model on this rank, and the reductions that it needs. The default is a single process."""

    dims: Dims = field(default_factory=Dims)
    tp: Peers = _NOBODY
    cp: Peers = _NOBODY
    ep: Peers = _NOBODY
    pp: Peers = _NOBODY
    cuts: Mapping[str, tuple[SplitDim, ...]] = field(default_factory=dict)
    """How parameters are cut, by name, the first cut first. Those not named are whole."""
    partial: Mapping[str, Peers] = field(default_factory=dict)
    """Parameters that are alike on several ranks but get a part of their gradient on each."""
    experts: frozenset[str] = frozenset()
    """Parameters of experts: the dp_shard ranks of one ep group have different ones, so their gradients are summed over
    the ranks of `expert_mesh["dp_replicate", "expert_shard"]` alone. Those of all others: over all of dp."""
    stage: pipeline.PipelineStage | None = None
    """Which layers, with pp above 1."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the whole model's parameters, those of other stages among them."""

    def decoder(self, model: PreTrainedModel, ops: Ops, *, compile: bool = False) -> Decoder:
        """The decoder, by reference. With pp it is to be called inside `stage.running(part)`, and takes the hidden
        states of the part before in place of token ids; the head is None where another rank has it."""
        if self.stage is None:
            return forward.decoder(model, ops, compile=compile)
        config = model.config.get_text_config()
        own = self.tp.size > 1 or self.ep.size > 1  # they work in the model's own modules
        hidden: Hidden
        if own:
            hidden = hf_forward.modules(model, config, compile=compile)
        else:
            hidden, _ = fused_forward.functional(model, ops, family=self.stage.family, compile=compile)
        head = forward.output_head(model, config) if self.stage.last else None
        kv_heads = (
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        ) // self.tp.size
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        path: Literal["functional", "modules"] = "modules" if own else "functional"
        return Decoder(hidden, head, path, config.num_hidden_layers, kv_heads, head_dim)  # type: ignore[arg-type]

    def share(self, packed: PackedLayout) -> Share:
        """This rank's tokens of a packed batch."""
        return Share(packed, self.cp)

    def merged(self, x_N: Tensor) -> Tensor:
        """[N] numbers of all sampled tokens, from what this rank has of them (0 elsewhere). Each rank goes on with all
        of them alike, so the gradient passes unchanged."""
        return summed(x_N, self.cp)

    def sums(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[Peers, dict[str, nn.Parameter]]]:
        """Over which ranks of cp, tp and pp which gradients are summed."""
        if self.cp.size > 1:
            yield self.cp, dict(parameters)
        for peers in {id(p): p for p in self.partial.values()}.values():
            yield peers, {n: p for n, p in parameters.items() if self.partial.get(n) is peers}

    def counts(self, name: str) -> bool:
        """Whether this rank counts the parameter in sums over the ranks of tp and pp (the norm of the gradient): one of
        those that have the same part does. Ranks of dp (ep among them) and cp are not looked at."""
        spread = any(cut.peers is self.tp for cut in self.cuts.get(name, ()))
        copy = self.stage is not None and self.stage.copies(name)
        return (spread or self.tp.rank == 0) and not copy

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter, or of what is kept of it (`exp_avg.NAME`). Single numbers have no parts."""
        for cut in self._cuts_of(name) if whole.ndim else ():
            whole = cut.part(whole)
        return whole

    def region(self, name: str, shape: Sequence[int]) -> Region:
        """Which part `part` keeps of a whole tensor of this shape."""
        region = Region.whole(shape)
        for cut in self._cuts_of(name) if shape else ():
            region = cut.kept(region)
        return region

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The tensor from its parts; to be called by all ranks of tp and ep that have the name."""
        for cut in reversed(self._cuts_of(name) if part.ndim else ()):
            part = cut.whole(part)
        return part

    def _cuts_of(self, name: str) -> tuple[SplitDim, ...]:
        return self.cuts.get(name, self.cuts.get(name.partition(".")[2], ()))

    def gathered(
        self, named: Iterable[tuple[str, Tensor]], device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors of all stages one at a time, on every rank; to be called, and run to its end, by all.

        named: the whole tensors that this rank has (parameters, or what is kept of them).
        """
        yield from named if self.stage is None else self.stage.gathered(named, device)

    def elsewhere(self, name: str) -> bool:
        """Whether another stage has a parameter of this name, if this one has it not."""
        return self.stage is not None and (name in self.stage.owners or name.startswith("value_head."))

    @property
    def learning(self) -> dict[str, torch.dtype]:
        """What learns of the model on any stage, with its dtype; empty where there is one."""
        return {} if self.stage is None else self.stage.learning

    @property
    def ends(self) -> bool:
        """Whether this rank has the end of the layers, and with it what follows: output layer, head of a critic."""
        return self.stage is None or self.stage.last


def parallelize(
    model: PreTrainedModel, mesh: DeviceMesh, dims: Dims, *, ep: DeviceMesh | None = None, chunks: int = 1
) -> Parallel:
    """Reduce a full model to this rank's part, in place. Call it after adapters are attached and the trainable
    parameters are chosen; before the engine, its optimizer and FSDP2.

    ep: `expert_mesh(...)["ep"]`, where dims.ep is above 1. chunks: parts of the layers on each rank of pp. Errors:
    ConfigError where a size does not divide or the model is not supported.
    """
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    tp, cp, pp = (Peers.of(mesh[name]) for name in ("tp", "cp", "pp"))
    experts = _NOBODY if ep is None else Peers.of(ep)
    stage = None
    partial: dict[str, Peers] = {}
    if pp.size > 1:
        stage = pipeline.apply(model, mesh, chunks=chunks)
        partial |= stage.tied
    by_tp = tensor_parallel.apply(model, tp)
    by_ep = expert_parallel.apply(model, experts)
    partial |= dict.fromkeys(by_tp.partial, tp)
    cuts = {
        name: tuple(c[name] for c in (by_tp.cuts, by_ep) if name in c)
        for name in by_tp.cuts.keys() | by_ep.keys()
    }
    return Parallel(dims, tp, cp, experts, pp, cuts, partial, frozenset(by_ep), stage, shapes)
