"""Weights for engine replicas in separate processes: by files on one machine, by letters through an object store, or
by broadcast.

A policy in other processes (ranks) writes each version itself, into a folder of its machine (`Staging`): replicas of
that machine map the files, and this process passes on no more than the manifest. A broadcast of these files starts in
one of the policy's processes (`relay`). For replicas of other machines a process beside the files puts them into the
store; this one has the references. Weights of a module of this process it puts there itself.

`Shipper` is the trainer's end and is passed as a Router's `ship`; `Inbox` is a replica's. The replica's handle carries
a `Letter` or a `Seat` between them. A replica that joins late or restarts gets all tensors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from whet.config.schema import Config
from whet.models.published import weights_of
from whet.models.quantised import held as quantised
from whet.rollout.engine import RolloutEngine, WeightUpdate
from whet.rollout.weights import Shipment
from whet.sync.collective import Collective
from whet.sync.exchange import (
    Policy,
    Publisher,
    Receiver,
    carried,
    publisher_of,
    with_adapters,
)
from whet.sync.files import Files
from whet.sync.manifest import DTYPES, Manifest, Tensors
from whet.sync.parcels import Letter, Parcels
from whet.sync.relay import Relay
from whet.sync.transport import Patience
from whet.types import Receipt, WhetError

log = logging.getLogger(__name__)

_KEPT = 2
"""Versions that ranks have written and that stay: the one before the last may still be read by a replica that joins."""
_GRACE_S = 5.0
"""After a broadcast that failed: time for the replicas that live to say so."""


@dataclass(frozen=True)
class Seat:
    """A replica's place in one broadcast."""

    version: int
    receivers: tuple[str, ...]
    rank: int
    host: str
    port: int
    device: str
    timeout_s: float


@dataclass(frozen=True)
class WrittenVersion:
    """A version in a folder of the policy's machine, as `Files` writes it."""

    root: Path
    manifest: Manifest


class Staging(Protocol):
    """A folder on the policy's machine for the versions that its processes write."""

    machine: str | None
    """Ray's name for it; None: it is this one."""
    path: Path

    def put(self, version: int, names: Sequence[str]) -> Any:
        """A process of that machine puts these tensors of a version into the object store, as one array of bytes
        (`transport.flatten`). Returns the reference; raises WhetError."""

    def close(self) -> None: ...


Delivery: TypeAlias = Letter | Seat | WrittenVersion


def machine_of(update: WeightUpdate) -> str | None:
    """That of the process which has the weights; None: it is this one."""
    return None if update.source is None else update.source.machine


def within_s(cfg: Config) -> float:
    """A replica that has not loaded a version after this time is lost: sync.timeout_s, and time to report why."""
    return cfg.sync.timeout_s + 6 * _GRACE_S


class Replicated(Protocol):
    """The handle of a replica."""

    label: str
    """Its process, for people."""
    held: Manifest | None
    """What it has confirmed."""

    async def deliver(self, delivery: Delivery) -> Receipt:
        """Send it to the replica; `Inbox.take` is its answer. Raises WhetError where that did, other errors where the
        replica has ended."""

    async def give(self) -> Letter:
        """The weights that it has, for another replica: `Inbox.give`."""


class Shipped(Iterator[tuple[str, Tensor]]):
    """One version on its way: who goes through it gets the tensors, a replica is brought them by `to`."""

    def __init__(self, tensors: Tensors, to: Callable[[Replicated], Awaitable[Receipt]]) -> None:
        self.tensors, self.to = iter(tensors), to

    def __next__(self) -> tuple[str, Tensor]:
        return next(self.tensors)


# ---------------------------------------------------------------- the trainer's end


class Shipper:
    """Gives each version to all replicas, and to replicas that join later the tensors that they lack.

    store: for the letters. members: the replicas that serve. host: the address at which all of them, and the policy's
    machine, can reach this process; None: nothing is broadcast. near: whether a replica is on a machine. stage: opens a
    staging folder on a machine, for so many bytes. timeout_s: for one version, including all failures.
    """

    def __init__(self, cfg: Config, store: Parcels, *, device: str = "cpu") -> None:
        self.cfg, self.store, self.device = cfg, store, device
        self.letters = publisher_of(cfg, store)
        self.timeout_s = cfg.sync.timeout_s
        self.members: Callable[[], Sequence[Replicated]] = list
        self.host: Callable[[Sequence[Replicated], str | None], str] | None = None
        self.end: Collective | None = None
        self.seated: list[Replicated] = []
        """Who is in the group of `end`, in the order of ranks."""
        self.root: Policy | None = None
        """Whose process is rank 0 of that group; None: this one."""
        self.near: Callable[[Replicated, str | None], bool] = lambda replica, machine: False
        self.stage: Callable[[str | None, int], Staging] | None = None
        self.staging: Staging | None = None
        """What ranks write into, from the first version on that they write."""
        self.files: Publisher | None = None
        """What they write by."""

    def ship(self, update: WeightUpdate) -> Shipment:
        """See `Router`. Called once a version; what it returns, once a replica."""
        written = None if update.source is None else self.written(update.source)
        if self.host is not None and update.tensors is None:
            to = Broadcast(self, update, written).to
        elif written is not None:
            to = Mapped(self, update, written).to
        else:
            to = partial(hand, self.letter(update))
        return lambda: WeightUpdate(version=update.version, tensors=Shipped(self.carried(update), to))

    def written(self, policy: Policy) -> WrittenVersion:
        """Let the policy's own processes write its version."""
        if self.staging is None or self.files is None or self.staging.machine != policy.machine:
            assert self.stage is not None
            self.close()
            size = sum(p.numel() * p.element_size() for p in policy.structure.parameters())
            self.staging = self.stage(policy.machine, (_KEPT + 2) * size)
            files = Files(self.staging.path, timeout_s=self.timeout_s, keep=_KEPT)
            self.files = publisher_of(self.cfg, files, there=True)
            log.info("weights for replicas: the ranks write them to %s", files.root)
        manifest = self.files.publish(policy)
        return WrittenVersion(self.staging.path, manifest)

    def carried(self, update: WeightUpdate) -> Tensors:
        """The tensors of a version that this process has; none, where ranks have them."""
        if update.module is None:
            return update.tensors or iter(())
        return carried(weights_of(update.module), adapters=self.letters.adapters)

    def close(self) -> None:
        """Remove what was written for replicas; to call when they have ended."""
        if self.staging is not None:
            self.staging.close()
        self.staging = None

    def letter(
        self, update: WeightUpdate, written: WrittenVersion | None = None, *, whole: bool = False
    ) -> Letter:
        """Put one version into the store. The version before it is freed with the last replica that reads it."""
        if written is None:
            self.letters.send(update.version, self.carried(update), whole=whole)
        else:
            assert self.staging is not None
            put = partial(self.staging.put, update.version)
            self.letters.by(lambda held: self.store.post(written.manifest, put, held=held), whole=whole)
        return self.store.letter(update.version)

    def seat(
        self, members: Sequence[Replicated], update: WeightUpdate, timeout_s: float
    ) -> tuple[Publisher, list[Seat]]:
        """The trainer's end of a group of these replicas, and their places. A broken group is created again."""
        assert self.host is not None
        same = self.seated == list(members) and self.root is update.source
        if self.end is None or self.end.broken is not None or not same:
            if self.end is not None:
                self.end.close()
            names = [m.label for m in members]
            self.end = Collective(
                names,
                rank=0,
                host=self.host(members, machine_of(update)),
                device=self.device,
                timeout_s=timeout_s,
            )
            self.seated, self.root = list(members), update.source
        end = self.end
        end.timeout_s = timeout_s
        through = (
            end if self.staging is None or self.root is None else Relay(end, self.root, self.staging.path)
        )
        out = publisher_of(self.cfg, through)
        for member in members:
            out.join(member.label, member.held)
        receivers = tuple(end.names[1:])
        place = {"host": end.host, "port": end.port, "device": self.device, "timeout_s": timeout_s}
        return out, [Seat(update.version, receivers, rank, **place) for rank in range(1, len(end.names))]  # type: ignore[arg-type]


async def hand(letter: Letter | WrittenVersion, replica: Replicated) -> Receipt:
    """Give one version to one replica. Raises WhetError if it confirms something else."""
    replica.held = None  # as long as it may be a mix
    receipt = await replica.deliver(letter)
    check(receipt, letter.manifest)
    replica.held = letter.manifest
    return receipt


def check(receipt: Receipt, sent: Manifest) -> None:
    told = (receipt.version, receipt.proof)
    if told != (sent.version, sent.digest):
        raise WhetError(
            f"weights version {sent.version}: {receipt.receiver} has (version, digest) {told}, but sent was "
            f"{(sent.version, sent.digest)}"
        )


class Mapped:
    """One version that ranks have written: a replica of their machine reads the files, another gets a letter."""

    def __init__(self, shipper: Shipper, update: WeightUpdate, written: WrittenVersion) -> None:
        self.shipper, self.update, self.written = shipper, update, written
        self.machine = machine_of(update)
        self.letter: asyncio.Future[Letter] | None = None

    async def to(self, replica: Replicated) -> Receipt:
        if self.shipper.near(replica, self.machine):
            return await hand(self.written, replica)
        if self.letter is None or (self.letter.done() and self.letter.exception() is not None):
            posting = asyncio.to_thread(self.shipper.letter, self.update, self.written)
            self.letter = asyncio.ensure_future(posting)
        return await hand(await asyncio.shield(self.letter), replica)


class Broadcast:
    """One version for all replicas that are present now, in one broadcast; a replica that joins later gets it from one
    of them.

    A replica that dies or hangs during the broadcast breaks the group: the others get the version in another group,
    within the shipper's deadline.
    """

    def __init__(self, shipper: Shipper, update: WeightUpdate, written: WrittenVersion | None) -> None:
        self.shipper, self.source, self.version, self.written = shipper, update, update.version, written
        self.machine = machine_of(update)
        self.answers: dict[Replicated, asyncio.Future[None]] = {}
        self.sent: Manifest | None = None
        self.running: asyncio.Task[None] | None = None

    async def to(self, replica: Replicated) -> Receipt:
        """Wait until this replica has the version. Raises the error that prevented it."""
        if self.running is None:
            loop = asyncio.get_running_loop()
            self.answers = {member: loop.create_future() for member in self.shipper.members()}
            self.running = loop.create_task(self._run(dict(self.answers)))
        if (answer := self.answers.pop(replica, None)) is not None:
            await asyncio.shield(answer)
            assert self.sent is not None
            return Receipt(replica.label, self.version, self.sent.digest)
        await asyncio.shield(self.running)
        return await self._later(replica)

    async def _run(self, answers: dict[Replicated, asyncio.Future[None]]) -> None:
        error: Exception | None = None
        try:
            await self._all(answers)
        except Exception as raised:  # noqa: BLE001  whatever it is, each of them is told
            error = raised
        for answer in answers.values():
            if not answer.done():
                _answer(answer, error or WhetError(f"weights version {self.version} was not sent"))

    async def _all(self, answers: dict[Replicated, asyncio.Future[None]]) -> None:
        """Group after group, each without those that were lost in the one before."""
        left, patience = list(answers), Patience(self.shipper.timeout_s)
        while left:
            outcome = await self._attempt(left, patience.left / 2)
            again = [m for m, error in outcome.items() if isinstance(error, _Broken)]
            for member, error in outcome.items():
                if member not in again:
                    _answer(answers[member], error)
            if again and (len(again) == len(left) or patience.over):
                raise WhetError(f"weights version {self.version} could not be broadcast: {outcome[again[0]]}")
            if again:
                lost = ", ".join(m.label for m in outcome if m not in again)
                log.warning("weights version %d: the broadcast is repeated without %s", self.version, lost)
            left = again

    async def _attempt(
        self, members: Sequence[Replicated], timeout_s: float
    ) -> dict[Replicated, BaseException | None]:
        """One send to a group of these. For each what failed: _Broken if it lives and the group did."""
        out, seats = await asyncio.to_thread(self.shipper.seat, members, self.source, timeout_s)
        end = self.shipper.end
        assert end is not None
        asked = {m: asyncio.ensure_future(m.deliver(s)) for m, s in zip(members, seats)}
        for member, ask in asked.items():
            member.held = None
            ask.add_done_callback(lambda done, label=member.label: _give_up(end, label, done))  # type: ignore[misc]
        sending = asyncio.to_thread(out.send, self.version, self.shipper.carried(self.source))
        try:
            manifest = await sending
        except WhetError as error:
            lost = {members[rank - 1] for rank in end.missing}
            if there := [ask for m, ask in asked.items() if m not in lost]:
                await asyncio.wait(there, timeout=_GRACE_S)
            return {m: _why(ask, error, lost=m in lost) for m, ask in asked.items()}
        self.sent = manifest
        await asyncio.wait(asked.values(), timeout=_GRACE_S + timeout_s)
        return {m: _took(m, ask, manifest) for m, ask in asked.items()}

    async def _later(self, replica: Replicated) -> Receipt:
        """From a replica that has it; else from the trainer, if nothing has been learned since."""
        for member in self.shipper.members():
            if member is not replica and member.held is not None and member.held.version == self.version:
                try:
                    letter = await member.give()
                except (WhetError, RuntimeError) as error:
                    log.info("%s cannot give its weights: %s", member.label, error)
                    continue
                return await hand(letter, replica)
        if self.written is not None and self.shipper.near(replica, self.machine):
            return await hand(self.written, replica)
        letter = await asyncio.to_thread(self.shipper.letter, self.source, self.written, whole=True)
        self.shipper.store.close()  # for this one alone
        if self.sent is not None and letter.manifest.digest != self.sent.digest:
            raise WhetError(
                f"weights version {self.version} is no longer available, because the trainer has updated since; "
                f"{replica.label} has to rejoin"
            )
        return await hand(letter, replica)


class _Broken(WhetError):
    """The group failed under a replica that lives."""


def _give_up(end: Collective, label: str, done: asyncio.Future[Receipt]) -> None:
    """A replica that has ended ends the broadcast, too: nobody waits for it until the deadline."""
    if not done.cancelled() and (error := done.exception()) is not None and not isinstance(error, WhetError):
        end.abort(f"{label}: {error}")


def _why(ask: asyncio.Future[Receipt], error: WhetError, *, lost: bool) -> BaseException:
    """What became of a replica whose group failed with `error`; lost: it was missing there."""
    if not ask.done():
        ask.cancel()
        return WhetError(f"the replica did not answer: {error}")
    if lost:
        return ask.exception() or error
    own = ask.exception()
    return own if own is not None and not isinstance(own, WhetError) else _Broken(str(own or error))


def _took(member: Replicated, ask: asyncio.Future[Receipt], manifest: Manifest) -> BaseException | None:
    """What keeps a replica from having the version, if anything."""
    if not ask.done():
        ask.cancel()
        return WhetError(f"weights version {manifest.version} was sent, but the replica did not confirm it")
    if (error := ask.exception()) is not None:
        return error
    try:
        check(ask.result(), manifest)
    except WhetError as odd:
        return odd
    member.held = manifest
    return None


def _answer(future: asyncio.Future[None], error: BaseException | None) -> None:
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # its replica may not wait any more


# ---------------------------------------------------------------- a replica's end


class Inbox:
    """Handles deliveries in a replica's process, on its event loop: while weights arrive, nothing is sampled.

    module: the engine's own. adapters: it has them, and they are sent separately from the weights that they adapt. put:
    into the object store, for `give`.
    """

    def __init__(self, module: nn.Module, *, name: str, adapters: bool, put: Callable[[Any], Any]) -> None:
        self.module, self.adapters = module, adapters
        self.fetched: dict[Any, Any] = {}
        self.letters = Parcels(put, self.fetched.__getitem__)
        self.receiver = Receiver(self.letters, name=name, staged=False)
        self.receiver.module = module if adapters else None  # without weights yet: nothing is held
        self.end: Collective | None = None
        self.at: tuple[str, int] | None = None

    async def take(
        self,
        engine: RolloutEngine,
        delivery: Delivery,
        fetch: Callable[[Iterable[Any]], Awaitable[list[Any]]],
    ) -> Receipt:
        """Sample from this version from now on. fetch: references to what they refer to."""
        if isinstance(delivery, Seat):
            self.receiver.transport = self._seated(delivery)
            version = delivery.version
        elif isinstance(delivery, WrittenVersion):
            self.receiver.transport = Files(delivery.root)
            version = delivery.manifest.version
        else:
            version = delivery.manifest.version
            references = [reference for _, _, reference, _ in delivery.needed(self.receiver.held)]
            self.fetched.update(zip(references, await fetch(references)))
            self.letters.close()
            self.letters.accept(delivery)
            self.receiver.transport = self.letters
        try:
            return await self.receiver.load(engine, version, finish=False, again=True)
        finally:
            self.fetched.clear()
            self.letters.close()

    def give(self) -> Letter:
        """The current version, for another replica. Raises WhetError if there is none."""
        held = self.receiver.held
        if held is None:
            raise WhetError(f"{self.receiver.name} has no full version of the weights")
        if quantised(self.module):
            raise WhetError(f"{self.receiver.name} has its weights only quantised")
        named = with_adapters(self.module) if self.adapters else self.module.named_parameters()
        tensors = ((n, t.detach().to(DTYPES[held.named[n].dtype])) for n, t in named)
        sent = self.letters.send(held.version, tensors)
        letter = self.letters.letter(held.version)
        self.letters.close()
        if sent.digest != held.digest:
            raise WhetError(f"{self.receiver.name}: its weights no longer match version {held.version}")
        return letter

    def _seated(self, seat: Seat) -> Collective:
        """This process's end of the seat's group."""
        if self.end is None or self.at != (seat.host, seat.port) or self.end.broken is not None:
            if self.end is not None:
                self.end.close()
            self.end, self.at = None, (seat.host, seat.port)
            place = {"rank": seat.rank, "port": seat.port, "host": seat.host, "device": seat.device}
            self.end = Collective(seat.receivers, **place, timeout_s=seat.timeout_s)  # type: ignore[arg-type]
        self.end.timeout_s = seat.timeout_s
        return self.end
