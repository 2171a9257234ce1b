"""Weights for another process on the same GPU by memory handle: nothing is copied, the engine reads the trainer's
memory.

The trainer must not change the weights until every receiver has confirmed; the digest detects a step that comes too
early. A handle is plain numbers and bytes, so a letter can be sent over any channel for plain values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from whet.sync.manifest import DTYPES, TensorEntry
from whet.sync.parcels import Parcels
from whet.types import ConfigError, WhetError


def by_handle(*, timeout_s: float = 600.0, keep: int = 1) -> Parcels:
    """Raises ConfigError without CUDA."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "sync.method=ipc shares CUDA memory, and torch finds no CUDA device here; use memory in one process, "
            "files or collective between processes"
        )
    return Parcels(_handles, _opened, timeout_s=timeout_s, keep=keep)


def _handles(tensors: list[Tensor]) -> list[dict[str, Any]]:
    for tensor in tensors:
        if tensor.device.type != "cuda":
            raise WhetError(f"sync.method=ipc: a tensor is on {tensor.device}; put the policy on the GPU")
    torch.cuda.synchronize()  # the receivers' streams know nothing of this one
    return [_handle(tensor) for tensor in tensors]


def _handle(tensor: Tensor) -> dict[str, Any]:
    device, *shared = tensor.untyped_storage()._share_cuda_()
    return {
        "gpu": str(torch.cuda.get_device_properties(device).uuid),
        "stride": tuple(tensor.stride()),
        "offset": tensor.storage_offset(),
        "shared": tuple(shared),
    }


def _opened(reference: Sequence[dict[str, Any]], entries: Sequence[TensorEntry]) -> list[Tensor]:
    return [_open(one, entry) for one, entry in zip(reference, entries, strict=True)]


def _open(handle: dict[str, Any], entry: TensorEntry) -> Tensor:
    memory, size, offset, *counters = handle["shared"]
    return rebuild_cuda_tensor(
        Tensor,
        torch.Size(entry.shape),
        handle["stride"],
        handle["offset"],
        torch.UntypedStorage,
        DTYPES[entry.dtype],
        _device_of(handle["gpu"], entry.name),
        memory,
        size,
        offset,
        False,
        *counters,
    )


def _device_of(uuid: str, name: str) -> int:
    """The number that this process gives to a GPU."""
    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == uuid:
            return number
    raise WhetError(
        f"sync.method=ipc: {name!r} is on GPU {uuid}, which is not visible here; put engine and trainer on the "
        "same GPU, or use collective"
    )
