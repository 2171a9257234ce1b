"""Versions of the weights on their way to servers: a folder of safetensors for each, and what proves it.

Adapters alone go as a folder of peft's, all of one rank and with their scale in B: so servers read any of whet's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from whet.guard.temporary import sweep
from whet.models import mtp
from whet.models.kernels import Ops
from whet.models.lora import adapted, learned
from whet.models.lora_layers import LoraStack
from whet.models.published import weights_of
from whet.rollout.engine import WeightUpdate
from whet.rollout.http.canary import Canary, Expected
from whet.rollout.weights import Shipment, copy_weights
from whet.track.files import atomic_folder
from whet.types import ConfigError

log = logging.getLogger(__name__)

KEPT = 2
"""Versions that stay: a server that starts again may still read the one before the last."""
_VERSION = re.compile(r"weights-\d{8,}")
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
        self._writing: asyncio.Future[Version] | None = None
        self._named: Iterator[tuple[str, Any]] | None = None

    def __next__(self) -> tuple[str, Tensor]:
        """For an engine that reads tensors."""
        self._named = self._named or self.update.named()
        return next(self._named)

    async def there(self) -> Version:
        """The files. Raises WhetError for tensors that do not fit the model, CheckpointError (full disk ...)."""
        if self._writing is None or (self._writing.done() and self._writing.exception() is not None):
            self._writing = asyncio.ensure_future(asyncio.to_thread(self.folder.write, self.update))
        # a thread goes on when its server is given up: the others wait for it, and none writes a second time
        return await asyncio.shield(self._writing)


class Folder:
    """Where versions pass to the servers.

    root: a folder that servers see under this path. model: takes tensors that come without a module; its structure is
    that of the policy. adapters: only these travel. Raises ConfigError if the policy is not changed by adapters alone.
    """

    def __init__(
        self, root: Path, *, model: PreTrainedModel, ops: Ops, canary: Canary, adapters: bool = False
    ) -> None:
        self.root, self.model, self.ops, self.canary, self.adapters = root, model, ops, canary, adapters
        if adapters:
            check_adapters(model)
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
            size = (write_adapters if self.adapters else write_weights)(module, new)
        written_s = time.monotonic() - began
        expected, before = self.canary.expected(module, self.ops, update.version), self.last
        self.last = expected
        self._drop_old(path)
        log.info(
            "weights version %d: %d MiB written in %.2f s, the canary computed in %.2f s",
            update.version, size >> 20, written_s, time.monotonic() - began - written_s,
        )  # fmt: skip
        return Version(path, expected, before)

    def _versions(self) -> list[Path]:
        """Those that are there; the folder may have others of the user's."""
        return [path for path in self.root.glob("weights-*") if _VERSION.fullmatch(path.name)]

    def _drop_old(self, newest: Path) -> None:
        there = sorted(self._versions(), key=lambda p: p.stat().st_mtime_ns)
        for path in [p for p in there if p != newest][: 1 - KEPT]:
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove all versions, and those that were not whole when their run was killed."""
        for path in self._versions():
            shutil.rmtree(path, ignore_errors=True)
        sweep(rf"\.{_VERSION.pattern}\.new-", self.root)


RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM 0.32 can be started with (--max-lora-rank)."""


def check_adapters(model: PreTrainedModel) -> None:
    """Raises ConfigError if a model has no adapters, or learns something else, too, or if they are too large."""
    layers = adapted(model).values()
    if not layers:
        raise ConfigError(
            "rollout.server.lora=adapter: the model of this process has no adapters; set model.lora (for explorers, "
            "leave sync.content at auto), or use merge"
        )
    if any(isinstance(layer, LoraStack) for layer in layers):
        raise ConfigError(
            "rollout.server.lora=adapter: adapters of experts are sent to vLLM merged alone; use merge, or remove the "
            "experts from model.lora.targets"
        )
    parts = {id(p) for layer in layers for p in (layer.lora_A, layer.lora_B)}
    if whole := [name for name, p in learned(model) if id(p) not in parts]:
        raise ConfigError(
            f"rollout.server.lora=adapter: {whole[0]} is trained in full (model.lora.modules_to_save), which vLLM does "
            "not load with adapters; use merge"
        )
    if largest_rank(model) > RANKS[-1]:
        raise ConfigError(
            f"rollout.server.lora=adapter: vLLM has adapters of rank {RANKS[-1]} at most; use merge"
        )


def largest_rank(model: PreTrainedModel) -> int:
    """Of the adapters of a model."""
    return max(layer.lora_A.shape[0] for layer in adapted(model).values())


def write_adapters(module: PreTrainedModel, folder: Path) -> int:
    """The adapters alone. Returns their bytes."""
    layers, rank = adapted(module), largest_rank(module)
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        lacks = rank - layer.lora_A.shape[0]
        at = f"base_model.model.{name}.lora"
        tensors[f"{at}_A.weight"] = pad(layer.lora_A.detach(), (0, 0, 0, lacks)).to("cpu", copy=True)
        tensors[f"{at}_B.weight"] = pad(layer.lora_B.detach() * layer.scale, (0, lacks)).to("cpu", copy=True)
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "use_rslora": False}
    told |= {"target_modules": sorted(layers), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(told, indent=1))
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return sum(t.nbytes for t in tensors.values())


def write_weights(module: PreTrainedModel, folder: Path, *, base: bool = False) -> int:
    """All weights as safetensors, with the effect of adapters; or, base, without it. Returns their bytes."""
    size = 0
    for number, tensors in enumerate(_files(module, base=base)):
        name = f"model-{number:05d}.safetensors" if number else "model.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        size += sum(t.nbytes for t in tensors.values())
    return size


def _files(module: PreTrainedModel, *, base: bool) -> Iterator[dict[str, Tensor]]:
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
    unread = mtp.unserved(module)
    for weight in weights_of(module):
        if weight.merged is None or weight.name in unread:
            continue
        for name in (weight.name, *also.get(weight.name, ())):
            tensor = (weight.own if base else weight.merged).detach().to("cpu", copy=True).contiguous()
            if tensors and size + tensor.nbytes > FILE_BYTES:
                yield tensors
                tensors, size = {}, 0
            tensors[name] = tensor
            size += tensor.nbytes
    if tensors:
        yield tensors
