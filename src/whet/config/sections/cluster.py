"""Section about the parts of a run that Ray places, on this machine or several."""

from __future__ import annotations

from typing import Literal

from whet.config.sections.base import Above0, Count, NonNegative, Positive, Section


class ClusterConfig(Section):
    """Placement of engine replicas (rollout.replicas above 0) and of the parts named here, by Ray. Ray is an extra: pip
    install 'whet[ray]'."""

    address: str | None = None
    """Address of a running Ray cluster: host:port of its head, or auto for the cluster on this machine. Default: whet
    starts a cluster that only this machine can reach and that ends with the run."""
    placement: Literal["pack", "spread"] = "pack"
    """pack: processes of one kind on as few machines as possible; spread: on as many machines as possible."""
    ranks: bool = False
    """Place the ranks of train.parallel on any machines of the cluster, with one GPU each where the run is on CUDA.
    Ranks on several machines communicate over the network between these machines. false: the ranks are processes of
    this machine."""
    reward_hosts: Count = 0
    """Number of reward hosts: groups of reward workers in the cluster (reward_workers.count each, which is also their
    number of CPUs). Rollouts are distributed over the hosts for scoring. A host that dies is replaced, and its rollouts
    are scored again. 0: only the workers of this machine."""
    explorers: Count = 0
    """Number of explorers (mode=explore) that a run with mode=train starts, each with a copy of the model. An explorer
    that dies or hangs is replaced. Explorers read the folder of the run and write to buffer.url. 0: you start the
    explorers yourself."""
    cpus: Positive = 1
    """CPU cores of each replica, rank and explorer, which is also its number of threads."""
    gpus: NonNegative | None = None
    """GPUs of each replica and explorer; with 0.5 two processes share one GPU. Default: 1 where the run is on CUDA,
    else none."""
    restarts: Count = 3
    """How often a replica, reward host or explorer that died or hangs is replaced. Requests of a lost replica are
    retried on another one, with the same tokens. 0: the run continues with the remaining processes."""
    health_timeout_s: Above0 = 60.0
    """Seconds without progress after which a replica that has work is dropped; choose more than its longest prefill or
    decode step takes. For loading new weights a replica has sync.timeout_s, but its process must still answer within
    this time."""
    start_timeout_s: Above0 = 300.0
    """Longest wait for resources in the cluster, for the start of the replicas, and for a new replica when none is
    left."""
