"""Section about the transfer of weights from a trainer to engines in separate processes."""

from __future__ import annotations

from typing import Literal

from whet.config.sections.base import Above0, Positive, Section


class SyncConfig(Section):
    """Transfer of new weights from the trainer to engines in separate processes: explorers of mode=explore, or engine
    replicas (rollout.replicas). Every tensor has a digest that each receiver checks and confirms."""

    method: Literal["auto", "files", "object_store", "collective"] = "auto"
    """Transport. files: a folder for each version in run_dir/weights, for explorers in separate processes (auto selects
    it for them). object_store: the object store of Ray, for engine replicas (auto selects it for them); with
    train.parallel, a process beside the ranks puts into it what these write to /dev/shm, or to run_dir/weights where it
    has no room, and replicas on the machine of the ranks map these files. collective: one broadcast to all replicas, by
    gloo between CPUs and NCCL between GPUs, for replicas on several machines; with train.parallel it starts in a
    rank."""
    content: Literal["auto", "full", "delta", "adapters"] = "auto"
    """Content of a transfer. full: all weights, every time. delta: only changed weights, which saves time where part of
    the model is frozen. adapters: the adapters of model.lora without the base model; the receivers merge them and
    verify that the result equals the weights of the trainer. A new receiver gets all weights. auto: adapters where
    there are any, else full."""
    driven_by: Literal["trainer", "explorer"] = "trainer"
    """schedule=async: which process triggers a weight sync. trainer: every rollout.sync_interval steps of training.
    explorer: once the groups of that many steps were requested from explorers since the last sync, at the end of the
    current step of the trainer."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the transferred weights. auto: that of the weights, so nothing is lost. A narrower dtype is faster, and
    the rollouts then come from other weights than those in training."""
    timeout_s: Above0 = 600.0
    """Longest wait for all replicas or servers to load one version (for a server also to sleep or wake up), of an
    explorer for a sign of its trainer, and of an evaluation process (mode=eval) for the next checkpoint. A replica that
    exceeds it is dropped."""
    keep: Positive = 2
    """method=files: number of versions kept on disk. A reader that falls further behind takes a newer version."""
