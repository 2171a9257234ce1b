"""The cluster: attach to one or start one, reserve resources on its machines, end its processes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from whet.cluster import head, private
from whet.environment import pools
from whet.guard import stacks
from whet.guard.processes import kill
from whet.guard.watch import own_signals
from whet.types import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from whet.config.sections.cluster import ClusterConfig

log = logging.getLogger(__name__)

CONNECT_S = 10.0
"""Longest wait for a cluster's address to take a connection."""

GPUS = "CUDA_VISIBLE_DEVICES"

END_S = 2.0
"""How long a process that Ray has told to end may take."""

Bundle = dict[str, float]
"""What one process needs of its machine, by Ray's names."""

_own_head: list[head.HeadNode | None] = []
"""Of the cluster that was started here, if any."""


def connect(
    address: str | None, model: PreTrainedModel | int | None, *, gpus: Sequence[str] | None = None
) -> None:
    """Attach to the cluster at `address`, or start one here that ends with this process and that only this machine
    reaches.

    model: whose weights its object store has to hold, or their bytes; None leaves its size to Ray. gpus: names of those
    that a cluster started here may use; None: all.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # an actor without GPUs: leave the variable alone
    quiet: Any = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.WARNING}
    if ray.is_initialized():
        return
    logging.getLogger("ray").setLevel(logging.WARNING)
    with own_signals(), visible(gpus if address is None else None):
        if address is None:
            private.token()
            with private.loopback():
                ray.init(
                    "local",
                    include_dashboard=False,
                    num_cpus=_cores(),
                    object_store_memory=_store_bytes(model),
                    _temp_dir=str(private.sessions()),
                    **quiet,
                )
            _own_head.append(head.watched())
            return
        _reach(address)
        try:
            ray.init(address, **quiet)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise ConfigError(
                f"cluster.address={address}: {first_line(error)}. Start a cluster with `ray start --head`, give its "
                "host:port, or leave it out to start one on this machine. Where a cluster needs a token, set it in the "
                "environment: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or ~/.ray/auth_token)"
            ) from error


@contextmanager
def visible(gpus: Sequence[str] | None) -> Generator[None]:
    """What is started inside sees these GPUs alone: Ray gives its processes parts of what it sees itself. None: all."""
    before = os.environ.get(GPUS)
    if gpus is not None:
        os.environ[GPUS] = ",".join(gpus)
    try:
        yield
    finally:
        if gpus is not None:
            os.environ.pop(GPUS)
            os.environ.update({} if before is None else {GPUS: before})


def _reach(address: str) -> None:
    """Raise ConfigError at once where nobody listens; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    if not port.isdigit() or not host or address.startswith("ray://"):
        raise ConfigError(f"cluster.address={address}: expected host:port of a cluster's head, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cluster.address={address}: no cluster answers ({error}). Start a cluster with `ray start --head`, give "
            "its host:port, or leave it out to start one on this machine"
        ) from error


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _store_bytes(model: PreTrainedModel | int | None) -> int | None:
    """Two versions of the weights, the old and the new, and some room."""
    if model is None:
        return None
    weights = model if isinstance(model, int) else sum(p.nbytes for p in model.parameters())
    return max(128 << 20, 3 * weights + (64 << 20))


def bundle_of(c: ClusterConfig, *, cuda: bool) -> Bundle:
    """What an engine process needs. cuda: the run is on CUDA."""
    gpus = c.gpus if c.gpus is not None else float(cuda)
    return {"CPU": float(c.cpus)} | ({"GPU": gpus} if gpus else {})


def resources() -> list[Bundle]:
    """Of each machine that lives."""
    return [dict(n["Resources"]) for n in ray.nodes() if n["Alive"]]


def words(bundle: Bundle) -> str:
    return " and ".join(f"{value:g} {key}" for key, value in bundle.items())


def place(
    bundle: Bundle,
    count: int,
    *,
    strategy: Literal["pack", "spread"],
    start_timeout_s: float,
    asked: str | None = None,
    beside: int = 0,
) -> PlacementGroup:
    """Room for `count` replicas. Raises ConfigError at once if there will never be, else after `start_timeout_s`.

    asked: by what, for the message; default rollout.replicas. beside: how many of this run have a place already.
    """
    nodes = resources()
    fits = sum(min(int(node.get(k, 0) // v) for k, v in bundle.items()) for node in nodes)
    needs = words(bundle)
    there = "; ".join(", ".join(f"{n.get(k, 0):g} {k}" for k in bundle) for n in nodes)
    asked = asked or f"rollout.replicas={count}"
    advice = "Lower rollout.replicas, cluster.cpus or cluster.gpus, or attach to a larger cluster (cluster.address)"
    if fits < count + beside:
        raise ConfigError(
            f"{asked}: each needs {needs} on one machine, and the {len(nodes)} machine(s) have {there}, "
            f"which is room for {fits}. {advice}"
        )
    group = placement_group([dict(bundle) for _ in range(count)], strategy=strategy.upper())
    try:
        ray.get(group.ready(), timeout=start_timeout_s)
    except GetTimeoutError:
        remove_placement_group(group)  # or it would take the room as soon as there is some
        raise ConfigError(
            f"{asked}: {count} times {needs} did not become free within cluster.start_timeout_s={start_timeout_s:g} "
            f"s; other jobs use the cluster ({there} in total). {advice}"
        ) from None
    return group


@dataclass(frozen=True)
class Room:
    """Where replicas stand: those of the start together, each that comes later by itself."""

    group: PlacementGroup
    """Of the start."""
    bundle: Bundle
    """What each needs."""
    count: int
    """How many there are at the start."""
    strategy: Literal["pack", "spread"]
    start_timeout_s: float
    later: set[str] = field(default_factory=set)
    """Those that came later."""

    async def of(self, name: str) -> tuple[PlacementGroup, int]:
        """The place of a replica: a group and the number in it. Raises ConfigError where there is none."""
        number = int(name.rpartition("-")[2])
        if number < self.count:
            return self.group, number
        how = {
            "strategy": self.strategy,
            "start_timeout_s": self.start_timeout_s / 2,
            "asked": f"whet scale, {name}",
        }
        how |= {"beside": self.count + len(self.later - {name})}
        placing = asyncio.ensure_future(asyncio.to_thread(place, self.bundle, 1, **how))  # type: ignore[arg-type]
        try:
            group = await asyncio.shield(placing)
        except asyncio.CancelledError:
            placing.add_done_callback(lambda p: None if p.exception() else self.leave(name, p.result()))
            raise
        self.later.add(name)
        return group, 0

    def leave(self, name: str, group: PlacementGroup) -> None:
        """Give back the place of one that came later; those of the start keep theirs for another."""
        if group is not self.group:
            self.later.discard(name)
            remove_placement_group(group)


def disconnect() -> None:
    """Leave the cluster; one that was started here goes down."""
    while _own_head:
        if (own := _own_head.pop()) is not None:
            own.leave()
    if ray.is_initialized():
        with own_signals():
            ray.shutdown()


def logs() -> str:
    """The folder, on this machine, of what the cluster's processes print."""
    node: Any = ray._private.worker._global_node
    return str(node.get_logs_dir_path())


# ---------------------------------------------------------------- processes


def node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def end_actor(actor: Any, node: str, processes: Sequence[tuple[int, int]]) -> None:
    """End an actor's processes, on whatever node. Ray's own way needs one that still listens; SIGKILL does not."""
    try:
        ray.kill(actor)
        if node == node_id():
            for each in processes:
                kill(each, END_S)
            return
        affinity = NodeAffinitySchedulingStrategy(node, soft=False)
        task: Any = ray.remote(kill).options(num_cpus=0, scheduling_strategy=affinity)
        ray.get([task.remote(each, END_S) for each in processes], timeout=CONNECT_S)
    except RayError as error:  # its machine is gone, and the process with it
        log.info("could not confirm that a process ended: %s", first_line(error))


def answered(reference: Any) -> Callable[[float], str]:
    """What a call that was made will have given within so many seconds, as `stacks.Ask` has it."""

    def collect(within_s: float) -> str:
        try:
            return str(ray.get(reference, timeout=within_s))
        except RayError as error:
            return f"(it does not answer within {stacks.FAR_S:g} s: {first_line(error)})"

    return collect


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:1]) or type(error).__name__


def environment_of(threads: int) -> dict[str, str]:
    """The variables that have to be there before torch is imported, as they are here."""
    names = ("HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_VERBOSITY",
             "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_CBWR")  # fmt: skip
    own = {name: os.environ[name] for name in names if name in os.environ}
    return own | pools(threads)
