"""The section about parts of a run in processes of their own, on this machine or many."""

from __future__ import annotations

from typing import Literal

from whet.config.parts.base import Above0, Count, NonNegative, Positive, Section


class Cluster(Section):
    """Where engine replicas (rollout.replicas above 0) and the parts named here live, by Ray. It is an extra:
    pip install 'whet[ray]'."""

    address: str | None = None
    """host:port of the head of a running Ray cluster, or auto for the one on this machine. Default: one is started here
    that only this machine reaches and that ends with the run."""
    placement: Literal["pack", "spread"] = "pack"
    """pack: processes of a kind on as few machines as they fit; spread: on as many as there are."""
    ranks: bool = False
    """The ranks of train.parallel on any machines of the cluster, with a GPU each where the run is on CUDA. Those on
    several machines talk over the network between these. Without: processes of this machine."""
    reward_hosts: Count = 0
    """Machines' worth of reward workers (reward_workers.count each, which are their CPUs, too), over which rollouts are
    spread to be judged; one that dies is replaced, and its rollouts are asked again. 0: the workers of this machine."""
    explorers: Count = 0
    """With mode=train: explorers (mode=explore) that this run starts, each with a copy of the model; one that dies or
    hangs is replaced. They read the run's folder and write to buffer.url. 0: you start them."""
    cpus: Positive = 1
    """CPU cores of each replica, rank and explorer, which are its threads, too."""
    gpus: NonNegative | None = None
    """GPUs of each replica and explorer; 0.5: two share one. Default: 1 where the run is on CUDA, else none."""
    restarts: Count = 3
    """How often a replica that has died or hangs is replaced (and a reward host, and an explorer); its requests are
    asked again elsewhere, with the same tokens. 0: the run goes on with the others."""
    health_timeout_s: Above0 = 60.0
    """Seconds that a replica may have work and not get on before it is dropped: more than its longest prefill or decode
    step takes. One that takes new weights has sync.timeout_s, but its process has to show that it lives as often."""
    start_timeout_s: Above0 = 300.0
    """Longest wait for room in the cluster, for the replicas to be up, and for a new one when none is left."""
