"""The parallel layout: its dims, and the device mesh that they span.

Dims go from the outermost to the innermost, so neighbours communicate most: pp (layers), dp_replicate (full copies),
dp_shard (copies whose tensors are sharded), cp (tokens of a sequence), tp (columns and rows of a matrix). Experts have
no dim of their own: ep ranks are neighbours along dp_shard, seen through a second mesh (`expert_mesh`) over the same
ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from whet.types import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Names of the mesh's dims, outermost first."""
EXPERT_DIMS = ("pp", "dp_replicate", "expert_shard", "ep", "cp", "tp")
"""Those of the second mesh: dp_shard is expert_shard x ep."""


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Sizes of the dims of a layout; all 1 is one process."""

    dp_replicate: int = 1
    """Copies of the model that add up their gradients."""
    dp_shard: int = 1
    """Ranks that hold a part of every tensor each, and gather them for use (FSDP2)."""
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    """Ranks that hold a part of the experts each; these are dp_shard ranks, so it divides dp_shard."""

    def __post_init__(self) -> None:
        if low := [f.name for f in fields(self) if getattr(self, f.name) < 1]:
            raise ConfigError(f"train.parallel.{low[0]}={getattr(self, low[0])}: expected at least 1")
        if self.dp_shard % self.ep:
            raise ConfigError(
                f"train.parallel.ep={self.ep} does not divide dp_shard={self.dp_shard}: experts are spread over ranks "
                "of dp_shard; set dp_shard to a multiple of ep"
            )

    @property
    def world(self) -> int:
        """Ranks in all."""
        return math.prod(getattr(self, name) for name in MESH_DIMS)

    @property
    def dp(self) -> int:
        """Parts into which a batch is partitioned: ranks of one tp, cp and pp group have the same part."""
        return self.dp_replicate * self.dp_shard

    def part_of(self, rank: int) -> int:
        """Number of the batch's part that a rank has, 0..dp-1."""
        if not 0 <= rank < self.world:
            raise ConfigError(f"rank {rank} is not in 0..{self.world - 1}")
        return rank // (self.cp * self.tp) % self.dp


def make_mesh(dims: Dims, device_type: str) -> DeviceMesh:
    """The mesh over all ranks of the default process group, with the dims named MESH_DIMS (also those of size 1).

    `mesh["tp"]` is one dim; `mesh["dp_replicate", "dp_shard"]` the two of HSDP.
    """
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(
        device_type, tuple(getattr(dims, name) for name in MESH_DIMS), mesh_dim_names=MESH_DIMS
    )


def expert_mesh(dims: Dims, device_type: str) -> DeviceMesh:
    """The same ranks with dp_shard seen as expert_shard x ep: `mesh["ep"]` is the group that exchanges tokens,
    `mesh["dp_replicate", "expert_shard"]` those that hold the same experts and add up their gradients."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = (dims.pp, dims.dp_replicate, dims.dp_shard // dims.ep, dims.ep, dims.cp, dims.tp)
    return init_device_mesh(device_type, sizes, mesh_dim_names=EXPERT_DIMS)
