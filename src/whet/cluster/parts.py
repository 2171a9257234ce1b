"""The resources that a run requests of the cluster: all of them are checked before the first process starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from whet.cluster.lines import Far
from whet.cluster.nodes import GPUS, Bundle, bundle_of, connect, place, resources, words
from whet.config.checks_parallel import local_gpus, ranks_of
from whet.config.hardware import cuda_count
from whet.config.load import Loaded
from whet.config.plan import Plan
from whet.config.schema import Config
from whet.config.sizes import DTYPE_BYTES
from whet.guard.line import OpenLines
from whet.training import ranks
from whet.types import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClusterPart:
    """Processes of one kind."""

    asked: str
    """The setting that asks for them."""
    bundle: Bundle
    """Of each."""
    count: int


def parts(loaded: Loaded, *, cuda: bool) -> list[ClusterPart]:
    """All that a run has in the cluster at the same time."""
    cfg = loaded.config
    c, engine = cfg.cluster, bundle_of(cfg.cluster, cuda=cuda)
    most = max(
        (ranks_of(stage.train.parallel) for stage in loaded.stages), key=lambda ranks: sum(ranks.values())
    )
    sets: list[object] = []  # as `api.reward_sets` makes them
    for stage in loaded.stages:
        if (stage.rewards, stage.reward_workers) not in sets:
            sets.append((stage.rewards, stage.reward_workers))
    found = [
        ClusterPart(f"rollout.replicas={cfg.rollout.replicas}", engine, cfg.rollout.replicas),
        ClusterPart(f"cluster.explorers={c.explorers}", engine, c.explorers),
        *(
            ClusterPart(f"cluster.ranks: {count} ranks of the {name}", rank_bundle(cfg, cuda=cuda), count)
            for name, count in most.items()
            if c.ranks
        ),
        ClusterPart(
            f"cluster.reward_hosts={c.reward_hosts}",
            {"CPU": float(cfg.reward_workers.count)},
            c.reward_hosts * len(sets),
        ),
    ]
    return [part for part in found if part.count]


def rank_bundle(cfg: Config, *, cuda: bool) -> Bundle:
    """A GPU for each rank where the run is on CUDA."""
    return {"CPU": float(cfg.cluster.cpus)} | ({"GPU": 1.0} if cuda else {})


def enter(loaded: Loaded, planned: Sequence[Plan]) -> None:
    """Attach to the cluster, or start one, and see that everything fits.

    Raises ConfigError for a cluster that cannot be reached, or that will never have room for all parts at once.
    """
    shape, dtype = planned[0].shape, planned[0].dtype
    size = shape.parameters if shape is not None else None
    cuda = planned[0].device == "cuda"
    wanted = parts(loaded, cuda=cuda)
    gpus = gpus_left(loaded, wanted) if cuda else None
    connect(loaded.config.cluster.address, None if size is None else size * DTYPE_BYTES[dtype], gpus=gpus)
    check_room(wanted, resources())


def gpus_left(loaded: Loaded, wanted: Sequence[ClusterPart]) -> list[str] | None:
    """GPUs of this machine that the run's own process and its ranks leave to a cluster started here. None, and a
    warning: they are too few, so parts share GPUs."""
    c = loaded.config.cluster
    own = 1 if c.ranks else max(local_gpus(stage.train.parallel) for stage in loaded.stages)
    named = [name.strip() for name in os.environ.get(GPUS, "").split(",") if name.strip()]
    here = named or [str(number) for number in range(cuda_count())]
    needed = sum(part.bundle.get("GPU", 0.0) * part.count for part in wanted)
    if len(here) - own >= needed:
        return here[own:]
    if c.address is None:
        log.warning(
            "the cluster's processes need %g GPUs, this process and its ranks %d; this machine has %d: they share them",
            *(needed, own, len(here)),
        )
    return None


def check_room(wanted: Sequence[ClusterPart], machines: Sequence[Bundle]) -> None:
    """Raises ConfigError where the parts do not all fit on the machines together, each process on one machine."""
    free = [dict(m) for m in machines]
    largest_first = sorted(wanted, key=lambda p: (-p.bundle.get("GPU", 0.0), -p.bundle.get("CPU", 0.0)))
    for part in largest_first:
        for done in range(part.count):
            at = next((m for m in free if all(m.get(k, 0.0) >= v for k, v in part.bundle.items())), None)
            if at is None:
                raise ConfigError(no_room(wanted, machines, part=part, done=done))
            for key, value in part.bundle.items():
                at[key] -= value


def no_room(
    wanted: Sequence[ClusterPart], machines: Sequence[Bundle], *, part: ClusterPart, done: int
) -> str:
    """The error text: the requested resources, the available ones, and the settings to change."""
    keys = sorted({key for p in wanted for key in p.bundle})
    asked = "; ".join(f"{p.asked}: {p.count} times {words(p.bundle)}" for p in wanted)
    there = "; ".join(words({k: m.get(k, 0.0) for k in keys}) for m in machines)
    return (
        f"the cluster has no room for all requested processes: only {done} of {part.count} fit for {part.asked}. "
        f"Requested: {asked}. Its {len(machines)} machine(s) have {there}. Lower one of these, or cluster.cpus and "
        "cluster.gpus, or attach to a larger cluster (cluster.address)"
    )


def rank_lines(cfg: Config, model: PreTrainedModel) -> OpenLines:
    """What starts the ranks of a stage in the cluster."""

    def start(count: int, threads: int) -> Far:
        del threads  # those of its place
        c = cfg.cluster
        bundle = rank_bundle(cfg, cuda=model.device.type == "cuda")
        group = place(
            bundle,
            count,
            strategy=c.placement,
            start_timeout_s=c.start_timeout_s,
            asked=f"cluster.ranks: {count} ranks",
        )
        folder = os.getcwd() if cfg.imports else None
        return Far(
            count, c.cpus, module=ranks.MODULE, group=group, folder=folder, start_timeout_s=c.start_timeout_s
        )

    return start
