"""The two ends of weight sync: the trainer publishes a version, receivers load and confirm it, the trainer compares.

A receiver checks every tensor before its engine uses it, and the trainer waits for an equal digest from every receiver
before the next optimizer step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, TypeVar
from uuid import uuid4

import torch
from torch import Tensor, nn

from whet.config.derived import content_of
from whet.config.schema import Config
from whet.models.lora import adapted, refresh
from whet.models.published import Send, Weight, weights_of
from whet.rollout.engine import RolloutEngine, WeightUpdate
from whet.sync.manifest import Held, Manifest, TensorEntry, Tensors, checked, describe, entry_of
from whet.sync.transport import Sender, Source
from whet.types import Receipt, WhetError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Policy(Protocol):
    """What of a `TrainEngine` is published."""

    version: int
    apart: bool
    machine: str | None

    def publish(self, send: Send[T], *, there: bool = False) -> T: ...

    def call(self, function: Callable[[], T]) -> T: ...

    @property
    def structure(self) -> nn.Module: ...

    @property
    def module(self) -> nn.Module: ...


_REMEMBERED = 100
"""Versions whose digest a trainer knows, for receipts that come late."""

MERGED = "digest of the merged weights"
"""Travels behind adapters, as if it were a tensor."""


class Publisher:
    """The trainer's end. `join` names receivers and what they have; who does hears their answers. Where none is named
    they come and go as they like: `send`, and `look` at what they have answered.

    receipts: the last answers of receivers without a name. whole: send every tensor every time; else only what some
    receiver lacks, or, to receivers without a name, what has changed since the last version that was whole. adapters:
    the policy's own tensors travel, with adapters apart; else its weights with their effect. dtype: what floating point
    tensors are cast to before they travel; None: as they are. there: the transport writes on the policy's machine, else
    on this one.
    """

    def __init__(
        self,
        transport: Sender,
        *,
        receipts: Callable[[], Iterable[Receipt]] = tuple,
        whole: bool = True,
        adapters: bool = False,
        dtype: torch.dtype | None = None,
        there: bool = False,
    ) -> None:
        self.transport, self.whole, self.adapters, self.dtype = transport, whole, adapters, dtype
        self.receipts, self.there = receipts, there
        self.base: Manifest | None = None
        """The last version that was whole; None: the next one is."""
        self.digests: dict[int, str] = {}
        """Of the last versions."""
        self.warned: set[tuple[str, int]] = set()
        """(receiver, version) of the failures that were said."""
        self.held: dict[str, Manifest | None] = {}
        """What each receiver has."""

    def join(self, name: str, holds: Manifest | None = None) -> None:
        """Add a receiver, or one that restarts. holds: the weights that it already has, from its `Receiver.held`."""
        self.held[name] = holds

    def send(self, version: int, tensors: Tensors, *, whole: bool = False) -> Manifest:
        """Send one version. whole: also the tensors that the receivers are assumed to have."""
        stream = cast(tensors, self.dtype)
        return self.by(lambda held: self.transport.send(version, stream, held=held), whole=whole)

    def publish(self, policy: Policy) -> Manifest:
        """`send` of a policy's weights, by the process that has them; if that is another one, it gets a copy of the
        transport, so this must be one through a folder."""
        written = partial(_written, self.transport, policy.version, adapters=self.adapters, dtype=self.dtype)
        return self.by(lambda held: policy.publish(partial(written, held=held), there=self.there))

    def by(self, send: Callable[[Held], Manifest], *, whole: bool = False) -> Manifest:
        """Let `send` send one version; it gets what need not be sent, as `Transport.send` does."""
        sent = send({} if whole or self.whole else self._stays())
        version, travelled = sent.version, sum(e.sent for e in sent.entries)
        if travelled == len(sent.entries):
            self.base = sent
        elif 2 * travelled > len(sent.entries):
            self.base = None
        self.digests = {v: d for v, d in self.digests.items() if version - _REMEMBERED < v < version}
        self.digests[version] = sent.digest
        return sent

    def look(self) -> None:
        """Check the answers that receivers have sent in the meantime; call it before the next optimizer step.

        Raises WhetError for a receiver that has other weights than were sent; a failed receiver is logged, once.
        """
        for receipt in self.receipts():
            name, version, sent = receipt.receiver, receipt.version, self.digests.get(receipt.version)
            if receipt.error:
                if (name, version) not in self.warned:
                    log.warning("weights version %d was not loaded by %s: %s", version, name, receipt.error)
                self.warned.add((name, version))
            elif sent is not None and receipt.proof != sent:
                raise WhetError(
                    f"{name} confirms weights version {version} with digest {receipt.proof}; version {version} with "
                    f"digest {sent} was sent. Its rollouts would use other weights, so the run stops"
                )

    def _stays(self) -> Held:
        """What every receiver has alike, or what was in the last whole version."""
        manifests = list(self.held.values()) or [self.base]
        if any(m is None for m in manifests):
            return {}
        first, *others = [m.named for m in manifests if m is not None]
        return {name: e for name, e in first.items() if all(e.same(o.get(name)) for o in others)}


def publisher_of(
    cfg: Config,
    transport: Sender,
    *,
    receipts: Callable[[], Iterable[Receipt]] = tuple,
    there: bool = False,
) -> Publisher:
    """The publisher that the section `sync` describes."""
    content = content_of(cfg)
    return Publisher(
        transport,
        receipts=receipts,
        whole=content == "full",
        adapters=content == "adapters",
        dtype=None if cfg.sync.dtype == "auto" else getattr(torch, cfg.sync.dtype),
        there=there,
    )


def shared(policy: Policy, folder: Path) -> bool:
    """Whether the policy's machine reaches this folder by the same path, as on a file system of the cluster. Each of
    both processes reads what the other one writes there."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".shared.new-", dir=folder) as name:
        asked, answer = Path(name, "asked"), Path(name, "answer")
        asked.write_text(uuid4().hex)
        try:
            policy.call(partial(_answer, asked, answer))
            return answer.read_text() == asked.read_text()
        except OSError:
            return False


class Receiver:
    """An engine's end, in the engine's process.

    module: the engine's own, if it holds weights already that need not be sent (a base under adapters): its tensors are
    digested once. staged: a version is fetched and checked off the event loop and whole, so that the engine samples on
    meanwhile and a failed fetch leaves it as it was, at the price of a second copy in memory; else it streams in.
    confirm: brings a receipt to the trainer, where the answer of `load` does not reach it.
    """

    def __init__(
        self,
        transport: Source,
        *,
        name: str,
        module: nn.Module | None = None,
        staged: bool = True,
        confirm: Callable[[Receipt], object] = lambda receipt: None,
    ) -> None:
        self.transport, self.name, self.module, self.staged = transport, name, module, staged
        self.confirm = confirm
        self.held = None if module is None else describe(-1, module.named_parameters())
        self.version: int | None = None
        self.arrived: Manifest | None = None

    async def load(
        self, engine: RolloutEngine, version: int, *, finish: bool = True, again: bool = False
    ) -> Receipt:
        """Load one version into the engine and confirm it. finish: rollouts in flight finish first; else they continue
        with the new weights. again: the current version is sent once more, because another receiver needs it.

        Raises WhetError, which the receipt also reports to the trainer. A staged version that cannot be fetched leaves
        the engine unchanged; once tensors have been copied, a fault makes the engine refuse to sample until a full
        version has been loaded.
        """
        try:
            self._refuse_late(version, again)
            tensors = self._stream(version, self.held)
            if self.staged:
                tensors = iter(await asyncio.to_thread(list, tensors))
            await engine.pause(finish=finish)
            await self._fill(engine, tensors, version)
        except WhetError as error:
            self.confirm(Receipt(self.name, version, "", error=str(error)))
            raise
        receipt = Receipt(self.name, version, self.held.digest if self.held else "")
        self.confirm(receipt)
        return receipt

    async def _fill(
        self, engine: RolloutEngine, tensors: Iterator[tuple[str, Tensor | None]], version: int
    ) -> None:
        self.held = self.version = None  # for as long as they may be a mix
        update = WeightUpdate(version=version, tensors=self._proved(tensors, version))
        receipt = await engine.update_weights(update)
        if self.arrived is None:
            raise WhetError(f"weights version {version}: the engine of {self.name} did not load its tensors")
        if (receipt.version, engine.version) != (version, version):
            raise WhetError(
                f"weights version {version}: the engine of {self.name} is at version {engine.version} after loading it"
            )
        self.held, self.version = self.arrived, version

    def _refuse_late(self, version: int, again: bool) -> None:
        here = self.version
        if here is not None and (version < here or (version == here and not again)):
            raise WhetError(
                f"weights version {version} for {self.name} arrived {'late' if version < here else 'twice'}: version "
                f"{here} is already loaded"
            )

    def _stream(self, version: int, held: Manifest | None) -> Iterator[tuple[str, Tensor | None]]:
        self.arrived = None
        stream = self.transport.receive(version, held=held)
        self.arrived = yield from checked(stream, version, held)

    def _proved(
        self, tensors: Iterator[tuple[str, Tensor | None]], version: int
    ) -> Iterator[tuple[str, Tensor | None]]:
        """The tensors; once all adapters are in, proof that they make the trainer's weights."""
        adapters, told = False, None
        for name, tensor in tensors:
            if name == MERGED:
                adapters, told = True, tensor
            else:
                yield name, tensor
        if adapters:
            self._check_merged(told, version)

    def _check_merged(self, told: Tensor | None, version: int) -> None:
        """A proof that was not sent is that of the version before."""
        if self.module is None:
            raise WhetError(
                f"weights version {version} are adapters; {self.name} needs its engine's module to merge them"
            )
        refresh(self.module)
        if told is not None and not torch.equal(told.cpu(), _merged_digest(self.module)):
            raise WhetError(
                f"weights version {version}: the adapters of {self.name} do not reproduce the trainer's weights; base "
                "model, scale and device must be the same on both sides, or use sync.content=full"
            )


# ---------------------------------------------------------------- what is sent


def cast(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    """Floating point tensors in this dtype; None: as they are."""
    for name, tensor in tensors:
        yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def carried(weights: Iterable[Weight], *, adapters: bool) -> Tensors:
    """What of a policy travels. adapters: its own tensors, adapters apart from what they adapt, and the proof of what
    they make together; what is frozen is among them: a `Publisher` that does not send whole leaves it out where a
    receiver has it. Else its weights as others see them."""
    effective: list[TensorEntry] = []
    for weight in weights:
        if adapters and weight.adapted and weight.merged is not None:
            effective.append(entry_of(weight.name.removesuffix(".weight"), weight.merged))
        if adapters or weight.merged is not None:
            yield weight.name, weight.own if adapters or weight.merged is None else weight.merged
    if adapters:
        yield MERGED, _as_tensor(Manifest(-1, tuple(effective)))


def with_adapters(module: nn.Module) -> Tensors:
    """A module's own tensors and their proof."""
    return carried(weights_of(module), adapters=True)


def _written(
    transport: Sender,
    version: int,
    weights: Iterator[Weight],
    *,
    adapters: bool,
    dtype: torch.dtype | None,
    held: Held,
) -> Manifest:
    """Send one version, from the process that has its weights."""
    return transport.send(version, cast(carried(weights, adapters=adapters), dtype), held=held)


def _merged_digest(module: nn.Module) -> Tensor:
    """[32] uint8: over the effective weights of all layers with adapters, as `models.lora.merged` has them."""
    effective = (
        (name, layer.weight if layer.effective is None else layer.effective)
        for name, layer in adapted(module).items()
    )
    return _as_tensor(describe(-1, effective))


def _answer(asked: Path, answer: Path) -> None:
    """Called in the policy's process."""
    with suppress(OSError):  # it is another folder of this name, or none: no answer
        answer.write_text(asked.read_text())


def _as_tensor(manifest: Manifest) -> Tensor:
    return torch.tensor(list(manifest.digest.encode()), dtype=torch.uint8)
