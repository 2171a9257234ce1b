"""Versions of the weights on their way to servers: a folder of safetensors for each, and what proves it."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from whet.models.kernels import Ops
from whet.models.published import weights_of
from whet.rollout.engine import WeightUpdate
from whet.rollout.http.canary import Canary, Expected
from whet.rollout.weights import Shipment, copy_weights
from whet.track.files import atomic_folder

log = logging.getLogger(__name__)

KEPT = 2
"""Versions that stay: a server that starts again may still read the one before the last."""
FILE_BYTES = 1 << 30
"""Tensors share a file up to so many bytes."""


@dataclass(frozen=True)
class Version:
    """What a server loads."""

    path: Path
    expected: Expected
    before: Expected | None
    """Of the version that was published before."""


class Written(Iterator[tuple[str, Tensor]]):
    """One version, written when the first server asks for it, and once: a server that starts again gets these files,
    whatever the trainer has learned since."""

    def __init__(self, folder: Folder, update: WeightUpdate) -> None:
        self.folder, self.update = folder, update
        self._lock = asyncio.Lock()
        self._version: Version | None = None
        self._named: Iterator[tuple[str, Any]] | None = None

    def __next__(self) -> tuple[str, Tensor]:
        """For an engine that reads tensors."""
        self._named = self._named or self.update.named()
        return next(self._named)

    async def there(self) -> Version:
        """The files. Raises WhetError for tensors that do not fit the model, CheckpointError (full disk ...)."""
        async with self._lock:
            if self._version is None:
                self._version = await asyncio.to_thread(self.folder.write, self.update)
            return self._version


class Folder:
    """Where versions pass to the servers.

    root: a folder that servers see under this path. model: takes tensors that come without a module; its structure is
    that of the policy.
    """

    def __init__(self, root: Path, *, model: PreTrainedModel, ops: Ops, canary: Canary) -> None:
        self.root, self.model, self.ops, self.canary = root, model, ops, canary
        self.last: Expected | None = None

    def ship(self, update: WeightUpdate) -> Shipment:
        """See `Router`: one version for every server."""
        written = Written(self, update)
        return lambda: WeightUpdate(version=update.version, tensors=written)

    def write(self, update: WeightUpdate) -> Version:
        """The weights as files, with the effect of adapters, and the trainer's log-probs under them."""
        began = time.monotonic()
        module = update.module
        if module is None:
            copy_weights(self.model, update.named())
            module = self.model
        path = self.root / f"weights-{update.version:08d}"
        with atomic_folder(path, durable=False) as new:
            size = write_weights(module, new)
        written_s = time.monotonic() - began
        expected, before = self.canary.expected(module, self.ops, update.version), self.last
        self.last = expected
        self._drop_old(path)
        log.info(
            "weights version %d: %d MiB written in %.2f s, the canary computed in %.2f s",
            update.version, size >> 20, written_s, time.monotonic() - began - written_s,
        )  # fmt: skip
        return Version(path, expected, before)

    def _drop_old(self, newest: Path) -> None:
        there = sorted(self.root.glob("weights-*"), key=lambda p: p.stat().st_mtime_ns)
        for path in [p for p in there if p != newest][: 1 - KEPT]:
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove all versions."""
        for path in self.root.glob("weights-*"):
            shutil.rmtree(path, ignore_errors=True)


def write_weights(module: PreTrainedModel, folder: Path) -> int:
    """All weights, with the effect of adapters, as safetensors. Returns their bytes."""
    size = 0
    for number, tensors in enumerate(_files(module)):
        name = f"model-{number:05d}.safetensors" if number else "model.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        size += sum(t.nbytes for t in tensors.values())
    return size


def _files(module: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Names and tensors of one file after the other.

    A tensor that has several names is sent under each: a server that has packed a tied output layer for itself keeps
    the old one otherwise, without an error (seen with vLLM 0.32 on a CPU).
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    also = {first: rest for first, *rest in names.values()}
    tensors: dict[str, Tensor] = {}
    size = 0
    for weight in weights_of(module):
        if weight.merged is None:
            continue
        for name in (weight.name, *also.get(weight.name, ())):
            tensor = weight.merged.detach().to("cpu", copy=True).contiguous()
            if tensors and size + tensor.nbytes > FILE_BYTES:
                yield tensors
                tensors, size = {}, 0
            tensors[name] = tensor
            size += tensor.nbytes
    if tensors:
        yield tensors
