"""The section about how weights get from a trainer to engines in processes of their own."""

from __future__ import annotations

from typing import Literal

from whet.config.parts.base import Above0, Positive, Section


class Sync(Section):
    """How new weights get from the trainer to engines in processes of their own: explorers of mode=explore, or engine
    replicas (rollout.replicas). Every tensor has a digest, which each of them checks and confirms."""

    method: Literal["auto", "files", "object_store", "collective", "ipc"] = "auto"
    """The way. files: a folder for each version in run_dir/weights, for explorers of their own (their auto).
    object_store: Ray's, for engine replicas (their auto). collective: one broadcast from the trainer to all replicas,
    by gloo between CPUs and NCCL between GPUs, for replicas on several machines. ipc: handles of GPU memory."""
    content: Literal["auto", "full", "delta", "adapters"] = "auto"
    """What travels. full: every weight, every time. delta: what has changed, which pays where part of the model is
    frozen. adapters: those of model.lora, without the model under them; the receivers merge them and prove that they
    have the trainer's weights. Whoever comes new gets all. auto: adapters where there are any, else full."""
    driven_by: Literal["trainer", "explorer"] = "trainer"
    """schedule=async: who says when new weights are due. trainer: every rollout.sync_interval steps of training.
    explorer: once so many steps' worth of groups were asked of explorers since the last, at the end of the trainer's
    step."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What the numbers are cast to before they travel. auto: as they are, so nothing is lost. A narrower one is faster,
    and the rollouts then come from other weights than are trained."""
    timeout_s: Above0 = 600.0
    """Longest wait for one version to be taken by all replicas, of an explorer for a sign of its trainer, and of a
    bench for the next checkpoint. A replica that is late is dropped."""
    keep: Positive = 2
    """method=files: versions that stay on disk. A reader that is slower than so many takes a newer one."""
