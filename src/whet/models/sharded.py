"""One engine's parameters over the data-parallel ranks: replicas (dp_replicate), shards (dp_shard, FSDP2), or both.

FSDP2 gathers a module's tensors in a hook before its forward, frees them in one after it, and the same in backward.
whet's decoder reads parameters without calling the modules that own them, so `within` calls a function inside the hooks
of a module. Gradients are sums over tokens with global weights: ranks are summed, never averaged.

The optimizer sees the local tensors of its rank as plain tensors, so every elementwise one works as in one process.
torch.distributed is imported only by processes that have ranks, here and in `mesh` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from whet.models.collectives import Peers
from whet.models.lora import adapted
from whet.models.lora_layers import LoraStack
from whet.models.mtp import layers_of
from whet.models.precision import sum_of_squares, total_norm
from whet.models.regions import Region

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

_CALLER = "whet_caller"
"""Where a module keeps what is to be called in its place, so that its parameters are whole."""
_BUCKET = 1 << 25
"""Numbers that are added up over the ranks in one call."""


def within(module: nn.Module, function: Callable[..., T], *args: Any) -> T:
    """function(*args), while the module's parameters are whole. Tensors in args and in the result carry its gradient's
    hooks, so pass them by themselves or in tuples."""
    caller = module.__dict__.get(_CALLER)
    return function(*args) if caller is None else caller(function, *args)  # type: ignore[no-any-return]


def is_sharded(module: nn.Module) -> bool:
    """Its parameters are whole only `within` it."""
    return _CALLER in module.__dict__


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
    """One process: all parameters are local."""

    writes = True

    def place(self, model: PreTrainedModel, *, functional: bool, sums_wide: bool = False) -> None:
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

    def gathered(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        yield from named

    def part(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    def shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def region(self, name: str, shape: Sequence[int]) -> Region:
        return Region.whole(shape)

    def here(self, p: Tensor) -> torch.Size:
        return p.shape

    def get(self, name: str, p: Tensor) -> Tensor:
        return p.detach()

    def put(self, name: str, p: Tensor, x: Tensor) -> None:
        p.detach().copy_(x)

    def add(self, x: Tensor) -> Tensor:
        return x

    def done(self, model: nn.Module) -> None:
        pass


class OtherDims(Protocol):
    """What data parallelism needs of the layout's other dims; see `parallel.Parallel`."""

    @property
    def tp(self) -> Peers: ...

    @property
    def pp(self) -> Peers: ...

    @property
    def experts(self) -> Collection[str]: ...

    def sums(
        self, parameters: Mapping[str, nn.Parameter]
    ) -> Iterator[tuple[Peers, dict[str, nn.Parameter]]]: ...

    def counts(self, name: str) -> bool: ...

    def whole(self, name: str, part: Tensor) -> Tensor: ...

    def gathered(
        self, named: Iterable[tuple[str, Tensor]], device: torch.device
    ) -> Iterator[tuple[str, Tensor]]: ...

    def part(self, name: str, whole: Tensor) -> Tensor: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def region(self, name: str, shape: Sequence[int]) -> Region: ...


class DataParallel:
    """The parameters of one model on one rank. Make one for each engine; every method is called on all ranks."""

    def __init__(
        self, mesh: DeviceMesh, how: Sharding, parallel: OtherDims, *, experts: DeviceMesh | None = None
    ) -> None:
        """mesh: of all ranks, dims as in `mesh.MESH_DIMS`. parallel: what the other dims have made of the model.
        experts: with ep the second mesh, `mesh.expert_mesh`."""
        self.parallel, self.expert_mesh = parallel, experts
        self.mesh, self.how = mesh["dp_replicate", "dp_shard"], how
        self.group = self.mesh._flatten("dp").get_group()
        self.shards = mesh["dp_shard"].size()
        self.shard_group = mesh["dp_shard"].get_group()
        self.writes = mesh.get_rank() == 0
        self.sharded: dict[str, Any] = {}
        """DTensors by name."""

    def place(self, model: PreTrainedModel, *, functional: bool, sums_wide: bool = False) -> None:
        """Cut the model, layer by layer. functional: its layers are never called, see `within`. sums_wide: gradients of
        the ranks are added up in float32.

        Parameters may be mapped files: afterwards this rank has a copy of its part, and maps none."""
        if self.shards > 1:
            self._shard(model, functional=functional, sums_wide=sums_wide)
        for p in model.parameters():
            if not _cut(p) and p.device.type == "cpu":
                p.data = p.data.clone(memory_format=torch.contiguous_format)

    def _shard(self, model: PreTrainedModel, *, functional: bool, sums_wide: bool) -> None:
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        dtypes = MixedPrecisionPolicy(reduce_dtype=torch.float32 if sums_wide else None)
        pinned = self.mesh.device_type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=pinned) if self.how.offload else OffloadPolicy()
        over = _over(self.mesh, "dp_shard")
        for layer in adapted(model).values():
            layer.keeps, layer.effective = False, None
        blocks = [
            m
            for m in model.get_decoder().modules()
            if isinstance(m, GradientCheckpointingLayer)
            and sum(p.numel() for p in m.parameters()) >= self.how.min_parameters
        ]
        ahead = {layer.module for layer in layers_of(model)}  # of them more is read than their forward calls
        how: dict[str, Any] = {"offload_policy": offload, "mp_policy": dtypes}
        apart = self._place_experts(model, reshard_after_forward=self.how.reshard, **how)
        how |= {"mesh": over, "ignored_params": apart}
        for block in blocks:
            fully_shard(block, reshard_after_forward=self.how.reshard, **how)
            if functional or block in ahead:
                called(block)
        fully_shard(model, reshard_after_forward=False, **how)
        called(model)
        for at, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[at + 1 : at + 1 + self.how.prefetch])  # type: ignore[operator]
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.sharded = {name: p for name, p in model.named_parameters() if _cut(p)}

    def _place_experts(self, model: PreTrainedModel, **how: Any) -> set[nn.Parameter]:
        """Cut experts over the ranks that have the same ones. Returns those of which each rank has its own."""
        from torch.distributed.fsdp import fully_shard

        named = dict(model.named_parameters())
        own = {named[name] for name in self.parallel.experts}
        if self.expert_mesh is None or self.expert_mesh["expert_shard"].size() == 1:
            return own
        dense, mesh = _over(self.mesh, "dp_shard"), _over(self.expert_mesh, "expert_shard")
        for module in reversed(list(model.modules())):  # the inner ones first
            if any(p in own for p in module.parameters(recurse=False)):
                fully_shard(module, mesh=mesh, **how)
            elif isinstance(module, LoraStack):  # of all experts, inside what is cut for some of them
                fully_shard(module, mesh=dense, **how)
        return set()

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
        rest = {n: p for n, p in parameters.items() if n not in self.sharded}
        experts = {n: p for n, p in rest.items() if n in self.parallel.experts}
        self._add_up({n: p for n, p in rest.items() if n not in experts}, wide, self.group)
        if self.expert_mesh is not None:  # what is left of them lies on dp_replicate alone
            self._add_up(experts, wide, self.expert_mesh["dp_replicate"].get_group())
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
            # some may be on the host
            flat = torch.cat([g.flatten() for g in bucket]).to(self.mesh.device_type)
            dist.all_reduce(flat, group=group)
            for g, summed in zip(bucket, flat.split([g.numel() for g in bucket])):
                g.copy_(summed.view_as(g))

    @torch.no_grad()
    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Norm of the whole gradient, float64."""
        import torch.distributed as dist

        device = torch.device(self.mesh.device_type)
        counted = {n: g for n, g in gradients.items() if self.parallel.counts(n)}
        apart = {n for n in counted if n in self.sharded or n in self.parallel.experts}
        whole = sum_of_squares(g for n, g in counted.items() if n not in apart)
        parts = sum_of_squares(g for n, g in counted.items() if n in apart)
        squares = torch.stack([whole.to(device), parts.to(device)])
        if self.shards > 1:
            dist.all_reduce(squares[1:], group=self.shard_group)
        return self.parallel.pp.add(self.parallel.tp.add(squares.sum())).sqrt()

    def whole(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of what this stage has parts of, one at a time. A name ends with the parameter's
        (`exp_avg.NAME`); numbers that are no part of a tensor stay."""
        for name, tensor in named:
            wide = self.sharded.get(name, self.sharded.get(name.partition(".")[2]))
            if no_part(name, tensor):
                yield name, local(tensor)
                continue
            here = local(tensor).to(self.mesh.device_type)
            yield name, self.parallel.whole(name, here if wide is None else _joined(here, wide))

    def gathered(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of all stages, one at a time, on all ranks. named: as for `whole`."""
        yield from self.parallel.gathered(self.whole(named), torch.device(self.mesh.device_type))

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """What lies here of a whole tensor."""
        if no_part(name, tensor):
            return tensor
        tensor = self.parallel.part(name, tensor)
        wide = self.sharded.get(name, self.sharded.get(name.partition(".")[2]))
        if wide is None:
            return tensor
        mesh = wide.device_mesh
        size, at = math.ceil(len(tensor) / mesh.size(mesh.ndim - 1)), mesh.get_local_rank(mesh.ndim - 1)
        return tensor[size * at : size * (at + 1)]

    def shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """Of the whole tensor, of which this lies here."""
        own = tuple(tensor.shape)
        if no_part(name, tensor):
            return own
        shapes = self.parallel.shapes
        return shapes.get(name) or shapes.get(name.partition(".")[2]) or own

    def region(self, name: str, shape: Sequence[int]) -> Region:
        """Which part `part` gives of a whole tensor of this shape."""
        if no_part(name, torch.empty(tuple(shape), device="meta")):
            return Region.whole(shape)
        region = self.parallel.region(name, shape)
        wide: Any = self.sharded.get(name, self.sharded.get(name.partition(".")[2]))
        for dim, placement in enumerate(wide.placements) if wide is not None else ():
            if placement.is_shard():
                mesh, long = wide.device_mesh, region.here[placement.dim]
                size = math.ceil(long / mesh.size(dim))
                at = min(long, size * mesh.get_local_rank(dim))
                region = region.cut(placement.dim, [(at, min(long, at + size))])
        return region

    def here(self, p: Tensor) -> torch.Size:
        """Shape of the region of a parameter that `put` takes."""
        return local(p).shape

    def get(self, name: str, p: Tensor) -> Tensor:
        """What `put` takes, as it is now: another engine on these ranks with this layout has the same part."""
        return local(p.detach())

    def put(self, name: str, p: Tensor, x: Tensor) -> None:
        """Give a parameter's part other values."""
        local(p.detach()).copy_(x)

    def add(self, x: Tensor) -> Tensor:
        """The sum over the data-parallel ranks, in place."""
        import torch.distributed as dist

        dist.all_reduce(x, group=self.group)
        return x

    def done(self, model: nn.Module) -> None:
        """After passes without gradient: free what they have gathered."""
        for module in model.modules():
            if self.sharded and hasattr(module, "reshard"):
                module.reshard()  # type: ignore[operator]


@dataclass(frozen=True, eq=False)
class Wholes:
    """Whole tensors for what cannot be computed in parts, and the parts of the result. All ranks that have a part of
    a parameter call it for that parameter, in one order."""

    across: Alone | DataParallel
    names: Mapping[nn.Parameter, str]

    def of(self, p: nn.Parameter, x: Tensor) -> Tensor:
        """The whole of x, which is cut as p is."""
        return next(iter(self.across.whole([(self.names[p], x)])))[1]

    def part(self, p: nn.Parameter, x: Tensor) -> Tensor:
        """This rank's part of x, which is as large as p's whole."""
        found = self.across.part(self.names[p], x)
        return x if found is x else found.to(p.device, copy=True)


def local(tensor: Tensor) -> Tensor:
    """What lies here of a tensor that may be cut."""
    return tensor._local_tensor if _cut(tensor) else tensor  # type: ignore[attr-defined, no-any-return]


def no_part(name: str, tensor: Tensor) -> bool:
    """Whether all ranks have it alike, though it is kept of a parameter that is cut: single numbers, and the scales of
    8-bit moments (`exp_avg_scale.NAME`)."""
    return tensor.ndim == 0 or name.partition(".")[0].endswith("_scale")


@torch.no_grad()
def _joined(part: Tensor, wide: Any) -> Tensor:
    """The whole tensor of which this rank has a part, cut as the DTensor `wide`: in dim 0, over the mesh's last dim.
    To be called by all ranks. `DTensor.full_tensor` takes 1.7 times as long for small tensors on gloo, and copies more.
    """
    import torch.distributed as dist

    mesh, rows = wide.device_mesh, wide.shape[0]
    shards = mesh.size(mesh.ndim - 1)
    padded = part.new_zeros((math.ceil(rows / shards), *part.shape[1:]))
    padded[: len(part)] = part  # the last ranks have fewer rows, or none
    whole = part.new_empty((len(padded) * shards, *part.shape[1:]))
    dist.all_gather_single(whole, padded, group=mesh.get_group(mesh.ndim - 1))
    return whole[:rows]


def _over(mesh: DeviceMesh, shards: str) -> DeviceMesh:
    """Over which ranks tensors are cut: those of one dim, with copies where there are any."""
    return mesh["dp_replicate", shards] if mesh["dp_replicate"].size() > 1 else mesh[shards]


def _cut(tensor: Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def called(module: nn.Module, caller: Callable[..., Any] | None = None) -> None:
    """From now on `within` calls the module, whose forward is then any function; or a caller in its place."""
    if caller is None:
        module.forward = _apply
    module.__dict__[_CALLER] = caller or module  # an attribute would make it a submodule of its own


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
