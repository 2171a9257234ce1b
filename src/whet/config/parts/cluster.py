"""The section about engines in processes of their own."""

from __future__ import annotations

from typing import Literal

from whet.config.parts.base import Above0, Count, NonNegative, Positive, Section


class Cluster(Section):
    """Where the engine replicas live (rollout.replicas above 0), by Ray. It is an extra: pip install 'whet[ray]'."""

    address: str | None = None
    """host:port of the head of a running Ray cluster, or auto for the one on this machine. Default: one is started here
    and ends with the run."""
    placement: Literal["pack", "spread"] = "pack"
    """pack: replicas on as few machines as they fit; spread: on as many as there are."""
    cpus: Positive = 1
    """CPU cores of each replica, which are its threads, too."""
    gpus: NonNegative | None = None
    """GPUs of each replica; 0.5: two share one. Default: 1 where the run is on CUDA, else none."""
    restarts: Count = 3
    """How often a replica that has died or hangs is replaced; its requests are asked again elsewhere, with the same
    tokens. 0: the run goes on with the others."""
    health_s: Above0 = 60.0
    """Seconds that a replica may have work and not get on before it is dropped: more than its longest prefill or decode
    step takes."""
    start_s: Above0 = 300.0
    """Longest wait for room in the cluster, for the replicas to be up, and for a new one when none is left."""
