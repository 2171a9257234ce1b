"""How a foreign file spreads its models over devices, as native keys: ranks that train together, and engines.

The sizes are those of the file's machine. `here.fitted` makes them those of this one before a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from whet.config.faults import shown
from whet.dialects.row import NotSupportedYet, Values
from whet.types import ConfigError, Json

DIMS = ("pp", "tp", "cp", "dp_shard", "dp_replicate", "ep")
"""Of train.parallel. Where there are fewer devices, the first of them keep theirs: they are what a model needs."""

PARALLEL = "train.parallel"
REPLICAS = "rollout.replicas"
RANKS = "cluster.ranks"
APART = f"{PARALLEL}.separate_ranks"


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """Sizes as a file has them."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    engines: int = 1
    """Inference engines; a single one is the trainer's own."""
    nodes: int = 1
    """Machines."""

    def flat(self) -> FileLayout:
        """All ranks of a copy hold parts of each tensor, and tokens of their own: for what is not spread otherwise."""
        shards = self.dp_shard * self.tp * self.cp * self.pp
        return replace(self, dp_shard=shards, tp=1, cp=1, pp=1, ep=1)

    def natives(self) -> dict[str, Json]:
        """Those above 1, which is the native size of all.

        Megatron's ep may span the ranks of tp and cp, too, where experts are whole. Here those of tp hold a part of
        each expert, so ep is what is left of it for the ranks of dp_shard, and a rank holds as much.
        """
        own = replace(self, ep=math.gcd(self.ep, self.dp_shard)) if self.dp_shard > 0 else self
        sizes = {f"{PARALLEL}.{dim}": getattr(own, dim) for dim in DIMS} | {REPLICAS: self.engines}
        out: dict[str, Json] = {key: size for key, size in sizes.items() if size > 1}
        return out | ({RANKS: True} if self.nodes > 1 else {})


def native(size: str) -> str:
    """The native key that a size of a layout feeds."""
    return {"engines": REPLICAS, "nodes": RANKS}.get(size, f"{PARALLEL}.{size}")


def groups(size: int, ranks: int, *, key: str, each: int = 1) -> tuple[int, int]:
    """(dp_replicate, dp_shard) of FSDP over so many data-parallel ranks of `each` devices, in groups of `size` devices;
    -1 and too large ones: one group. There devices that share a sequence hold shards, too, and here copies; a group
    that takes only some of them becomes one group of all ranks, which needs less memory."""
    if size < -1 or size == 0:
        raise ConfigError(f"{key}={size}: expected -1 (all devices) or how many share one copy")
    if size == -1 or size >= ranks:
        return 1, ranks
    if ranks % size and each > 1 and (ranks * each) % size == 0:
        return 1, ranks
    if ranks % size:
        raise ConfigError(f"{key}={size} must divide the {ranks} data-parallel ranks")
    return ranks // size, size


def resharded(v: Values, key: str) -> bool:
    """reshard_after_forward: yes, no, or (not built) into groups of another size."""
    value = v[key]
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        raise NotSupportedYet(
            f"{key}={value}: resharding to another group is coming, not built yet; today: true, false"
        )
    raise ConfigError(f"{key}: got {shown(value)}, expected true or false")
