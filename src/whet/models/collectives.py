"""Collectives along one dim of the mesh: sums and exchanges with exact gradients, partitioned and gathered tensors.

Shape letters: U tokens of this rank, W tokens that were received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from whet.models.regions import Region


@dataclass(frozen=True, eq=False)
class Peers:
    """The ranks along one dim of the mesh, this one among them."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """None where there is nobody else."""

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Peers:
        """Those of a mesh of one dim."""
        return cls(mesh.get_local_rank(), mesh.size(), mesh.get_group()) if mesh.size() > 1 else cls()

    def __deepcopy__(self, memo: dict[int, Any]) -> Peers:
        return self

    def span(self, size: int, rank: int | None = None) -> slice:
        """This rank's part (or another's) of so many things: parts differ by one at most, in the ranks' order."""
        at = self.rank if rank is None else rank
        return slice(at * size // self.size, (at + 1) * size // self.size)

    def spans(self, size: int) -> list[int]:
        """How many of so many things each rank has."""
        return [span.stop - span.start for span in (self.span(size, rank) for rank in range(self.size))]

    def add(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place, without gradient."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """The maximum over the ranks, in place, without gradient."""
        if self.size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x


def copied(x: Tensor, peers: Peers) -> Tensor:
    """x, equal on all ranks, which each uses for its part of the work: the gradient is the sum of theirs."""
    return x if peers.size == 1 else _Copied.apply(x, peers)


def summed(x: Tensor, peers: Peers) -> Tensor:
    """The sum of the ranks' x, which all ranks continue with: each x has the gradient of the sum."""
    return x if peers.size == 1 else _Summed.apply(x, peers)


def exchanged(x: Tensor, peers: Peers, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Rows of x, the first send[0] to rank 0 and so on; the rows received, in the ranks' order."""
    return x if peers.size == 1 else _Exchanged.apply(x, peers, tuple(send), tuple(receive))


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.add(dy.clone(memory_format=torch.contiguous_format)), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        return peers.add(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, send: tuple[int, ...], receive: tuple[int, ...]) -> Tensor:
        ctx.peers, ctx.send, ctx.receive = peers, send, receive
        return _exchange(x, peers, send, receive)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(dy, ctx.peers, ctx.receive, ctx.send), None, None, None


def _exchange(x: Tensor, peers: Peers, send: tuple[int, ...], receive: tuple[int, ...]) -> Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=peers.group)
    return out


# ---------------------------------------------------------------- tensors in parts


@dataclass(frozen=True)
class SplitDim:
    """How a tensor is cut: this rank has a part of one of its dims."""

    dim: int
    peers: Peers
    blocks: int = 1
    """Matrices that lie in that dim one after the other (gate and up); each is cut by itself."""

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part, as a tensor of its own."""
        span = self.peers.span(whole.shape[self.dim] // self.blocks)
        parts = [block[_at(self.dim, span)] for block in whole.chunk(self.blocks, self.dim)]
        return torch.cat(parts, self.dim).contiguous()

    def kept(self, region: Region) -> Region:
        """What of a region `part` keeps."""
        size = region.here[self.dim] // self.blocks
        span = self.peers.span(size)
        return region.cut(
            self.dim, [(n * size + span.start, n * size + span.stop) for n in range(self.blocks)]
        )

    @torch.no_grad()
    def whole(self, part: Tensor) -> Tensor:
        """The tensor from all ranks' parts; to be called by all of them."""
        if self.peers.size == 1:
            return part
        size = part.new_tensor(part.shape[self.dim], dtype=torch.int64)
        sizes = self.peers.spans(int(self.peers.add(size)))
        shape = list(part.shape)
        shape[self.dim] = max(sizes)
        padded = part.new_zeros(shape)
        padded[_at(self.dim, slice(0, part.shape[self.dim]))] = part
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded, group=self.peers.group)
        parts = [t[_at(self.dim, slice(0, n))].chunk(self.blocks, self.dim) for t, n in zip(found, sizes)]
        return torch.cat([part for block in zip(*parts) for part in block], self.dim)


def _at(dim: int, span: slice) -> tuple[slice, ...]:
    return (*(slice(None) for _ in range(dim)), span)
