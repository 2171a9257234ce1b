"""One engine's parameters over the data-parallel ranks: whole copies (dp_replicate), parts (dp_shard, FSDP2), or both.

FSDP2 gathers a module's tensors in a hook before its forward, frees them in one after it, and the same in backward.
Our decoder reads parameters without calling the modules that own them, so `within` calls a function inside the
hooks of a module. Gradients are sums over tokens with global weights: ranks are added up, never averaged.

The optimizer sees what lies on its rank as plain tensors, so every elementwise one works as in one process.
torch.distributed is imported by those who have ranks, in here alone and in `mesh`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from whet.models.collectives import Peers
from whet.models.lora import adapted
from whet.models.precision import total_norm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

_BUCKET = 1 << 25
"""Numbers that are added up over the ranks in one call."""


def within(module: nn.Module, function: Callable[..., T], *args: Any) -> T:
    """function(*args), while the module's parameters are whole. Tensors in args and in the result carry its gradient's
    hooks, so pass them by themselves or in tuples."""
    if getattr(module, "whet_sharded", False):
        return module(function, *args)  # type: ignore[no-any-return]
    return function(*args)


def _apply(function: Callable[..., T], *args: Any) -> T:
    return function(*args)


@dataclass(frozen=True)
class Sharding:
    """How tensors are cut and kept."""

    reshard: bool = True
    """Free a layer's gathered tensors after its forward, and gather them once more for its backward."""
    offload: bool = False
    """Keep parts, gradients and optimizer state in the host's memory."""
    prefetch: int = 1
    """Layers that are gathered ahead of the one at work."""
    min_parameters: int = 0
    """Layers with fewer are gathered with the whole model's rest."""


class Alone:
    """One process: everything is here."""

    writes = True

    def place(self, model: PreTrainedModel, *, functional: bool) -> None:
        pass

    def own(self, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
        yield from named

    def collect(self, parameters: Mapping[str, nn.Parameter]) -> None:
        pass

    def add_up(self, parameters: Mapping[str, nn.Parameter], wide: dict[str, Tensor]) -> None:
        pass

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return total_norm(gradients.values())

    def whole(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        yield from named

    def part(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    def done(self, model: nn.Module) -> None:
        pass


class Spread(Protocol):
    """What data parallelism asks of the layout's other dims; see `parallel.Parallel`."""

    @property
    def tp(self) -> Peers: ...

    def sums(
        self, parameters: Mapping[str, nn.Parameter]
    ) -> Iterator[tuple[Peers, dict[str, nn.Parameter]]]: ...

    def counts(self, name: str) -> bool: ...

    def whole(self, name: str, part: Tensor) -> Tensor: ...

    def part(self, name: str, whole: Tensor) -> Tensor: ...


class DataParallel:
    """The parameters of one model on one rank. Make one for each engine; every method is called on all ranks."""

    def __init__(self, mesh: DeviceMesh, how: Sharding, parallel: Spread) -> None:
        """mesh: of all ranks, dims as in `mesh.MESH_DIMS`. parallel: what tp and cp have made of the model."""
        self.parallel = parallel
        self.mesh, self.how = mesh["dp_replicate", "dp_shard"], how
        self.group = self.mesh._flatten("dp").get_group()
        self.shards = mesh["dp_shard"].size()
        self.shard_group, self.shard = mesh["dp_shard"].get_group(), mesh["dp_shard"].get_local_rank()
        self.writes = mesh.get_rank() == 0
        self.sharded: dict[str, Any] = {}
        """DTensors by name."""

    def place(self, model: PreTrainedModel, *, functional: bool) -> None:
        """Cut the model, layer by layer. functional: its layers are never called, see `within`."""
        if self.shards == 1:
            return
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

        pinned = self.mesh.device_type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=pinned) if self.how.offload else OffloadPolicy()
        over = self.mesh if self.mesh["dp_replicate"].size() > 1 else self.mesh["dp_shard"]
        for layer in adapted(model).values():
            layer.keeps, layer.effective = False, None
        blocks = [
            m
            for m in model.get_decoder().modules()
            if isinstance(m, GradientCheckpointingLayer)
            and sum(p.numel() for p in m.parameters()) >= self.how.min_parameters
        ]
        for block in blocks:
            fully_shard(block, mesh=over, reshard_after_forward=self.how.reshard, offload_policy=offload)
            if functional:
                _called(block)
        fully_shard(model, mesh=over, reshard_after_forward=False, offload_policy=offload)
        _called(model)
        for at, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[at + 1 : at + 1 + self.how.prefetch])  # type: ignore[operator]
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.sharded = {name: p for name, p in model.named_parameters() if _cut(p)}

    def own(self, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
        """What lies here of each parameter, as a parameter that shares its memory."""
        for name, p in named:
            if name in self.sharded:
                yield name, nn.Parameter(local(p.detach()), requires_grad=p.requires_grad)
            else:
                yield name, p

    def collect(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take over the gradients of cut tensors, which are sums over the ranks already. parameters: of `own`."""
        for name, p in parameters.items():
            if name in self.sharded:
                cut = self.sharded[name]
                p.grad, cut.grad = None if cut.grad is None else local(cut.grad), None

    @torch.no_grad()
    def add_up(self, parameters: Mapping[str, nn.Parameter], wide: dict[str, Tensor]) -> None:
        """Add up all other gradients over the ranks. wide: those that do not lie at their parameter."""
        self._add_up({n: p for n, p in parameters.items() if n not in self.sharded}, wide, self.group)
        for peers, some in self.parallel.sums(parameters):
            self._add_up(some, wide, peers.group)

    def _add_up(
        self, rest: Mapping[str, nn.Parameter], wide: dict[str, Tensor], group: ProcessGroup | None
    ) -> None:
        """Over the ranks of one group."""
        import torch.distributed as dist

        if not rest:
            return
        # what has a gradient nowhere keeps none: an optimizer passes over it
        has_P = torch.tensor([float(p.grad is not None or n in wide) for n, p in rest.items()])
        has_P = has_P.to(self.mesh.device_type)
        dist.all_reduce(has_P, op=dist.ReduceOp.MAX, group=group)
        where_P = torch.tensor([float(n in wide) for n in rest]).to(self.mesh.device_type)
        dist.all_reduce(where_P, op=dist.ReduceOp.MAX, group=group)
        for (name, p), has, is_wide in zip(rest.items(), has_P.tolist(), where_P.tolist()):
            if has and is_wide:
                wide.setdefault(name, torch.zeros_like(p, dtype=torch.float32))
            elif has and p.grad is None:
                p.grad = torch.zeros_like(p)
        gradients = {n: p.grad for n, p in rest.items() if p.grad is not None}
        for bucket in _buckets([*gradients.values(), *(g for n, g in wide.items() if n in rest)]):
            flat = torch.cat([g.flatten() for g in bucket])
            dist.all_reduce(flat, group=group)
            for g, summed in zip(bucket, flat.split([g.numel() for g in bucket])):
                g.copy_(summed.view_as(g))

    @torch.no_grad()
    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Norm of the whole gradient, float64."""
        import torch.distributed as dist

        device = torch.device(self.mesh.device_type)
        squares = torch.zeros(2, dtype=torch.float64, device=device)
        for name, g in gradients.items():
            if self.parallel.counts(name):
                squares[int(name in self.sharded)] += g.norm(dtype=torch.float64).square().to(device)
        if self.sharded:
            dist.all_reduce(squares[1:], group=self.shard_group)
        return self.parallel.tp.add(squares.sum()).sqrt()

    def whole(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of these parts, one at a time. A name ends with the parameter's (`exp_avg.NAME`); numbers that
        are no part of a tensor stay."""
        from torch.distributed.tensor import DTensor

        for name, tensor in named:
            wide = self.sharded.get(name, self.sharded.get(name.partition(".")[2]))
            if wide is None or tensor.ndim == 0:
                yield name, self.parallel.whole(name, local(tensor))
                continue
            here = local(tensor).to(self.mesh.device_type)
            gathered = DTensor.from_local(
                here, wide.device_mesh, wide.placements, shape=wide.shape, stride=wide.stride()
            ).full_tensor()
            yield name, self.parallel.whole(name, gathered)

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """What lies here of a whole tensor."""
        tensor = self.parallel.part(name, tensor)
        wide = self.sharded.get(name, self.sharded.get(name.partition(".")[2]))
        if wide is None or tensor.ndim == 0:
            return tensor
        size = math.ceil(len(tensor) / self.shards)
        return tensor[size * self.shard : size * (self.shard + 1)]

    def done(self, model: nn.Module) -> None:
        """After passes without gradient: free what the model's own forward has gathered."""
        for module in model.modules():
            if getattr(module, "whet_sharded", False):
                module.reshard()  # type: ignore[operator]


def local(tensor: Tensor) -> Tensor:
    """What lies here of a tensor that may be cut."""
    return tensor._local_tensor if _cut(tensor) else tensor  # type: ignore[attr-defined, no-any-return]


def _cut(tensor: Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def _called(module: nn.Module) -> None:
    """From now on a call is `within`."""
    module.forward = _apply
    module.whet_sharded = True  # type: ignore[assignment]


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, together as large as one call takes."""
    bucket: list[Tensor] = []
    size = 0
    for g in gradients:
        if bucket and (g.dtype != bucket[0].dtype or size + g.numel() > _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(g)
        size += g.numel()
    if bucket:
        yield bucket
