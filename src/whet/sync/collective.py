"""Weights by broadcast from the trainer to every engine process: gloo between CPUs, NCCL between GPUs.

The group is its own, over its own store: `torch.distributed`'s default group, if there is one, is not touched. Small
things (headers, roll call) go through the store, so that every wait can name whom it waits for; the bytes of
the tensors go through the group. All ranks take part in every send: the receivers are fixed when the group is made. A
rank that fails breaks the group for good, and another one is to be made of those that live.

Keys of the store, for the n-th send: n/ready/RANK, n/BUCKET (a header), n/done/RANK, n/failed/RANK. The key `aborted`
says why nobody is to wait any more.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whet.sync.manifest import Held, Manifest, Piece, TensorEntry, Tensors, myself, pieces
from whet.sync.transport import BUCKET_BYTES, Patience, buckets, flat_bytes, flatten, split
from whet.types import ConfigError, Json, WhetError

_GRACE_S = 5.0
"""After a failure: time for those that live to say so."""


class Collective:
    """One end of a `Transport` by broadcast. Rank 0 is the trainer; ranks 1, 2, ... are the receivers, by name.

    port: where the trainer's end listens (its `port`); the trainer gives 0 and gets a free one. serves: this end keeps
    the store; default: the trainer's does. An end of rank 0 that does not serve sends for the one that does
    (`sync.relay`), which can `abort` it. device: what tensors are received on, and which library moves them: cpu is
    gloo, cuda is NCCL. The group itself is made at the first send and receive, by all ranks together.
    """

    def __init__(
        self,
        receivers: Sequence[str],
        *,
        rank: int,
        port: int = 0,
        host: str = "127.0.0.1",
        serves: bool | None = None,
        device: str = "cpu",
        timeout_s: float = 600.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "NCCL weight sync needs a CUDA device, and torch finds none on this machine; use device cpu (gloo)"
            )
        if not 0 <= rank <= len(receivers):
            raise ConfigError(
                f"weight sync: rank {rank} of {len(receivers)} receivers and a trainer; expected 0 to {len(receivers)}"
            )
        self.names = ("the trainer", *receivers)
        self.rank, self.device = rank, torch.device(device)
        self.host, self.timeout_s, self.bucket_bytes = host, timeout_s, bucket_bytes
        self.sends = 0
        self.group: Any = None
        self.broken: str | None = None
        """Why nothing goes through any more."""
        self.missing: Sequence[int] = ()
        """Ranks that did not come, where that is why."""
        serves = rank == 0 if serves is None else serves
        self.store, self.port = _open_store(host, port, serves=serves, timeout_s=timeout_s)
        self.store.set(f"here/{rank}", myself())

    # -- the trainer's end

    def send(self, version: int, tensors: Tensors, *, held: Held | None = None) -> Manifest:
        """See `Transport`. Returns when every receiver has all bytes; raises WhetError naming those who have not."""
        try:
            patience = self._begin(version)
            manifest = self._send(version, pieces(tensors, held or {}), patience)
        except BaseException as error:
            # the receivers need not wait for the deadline
            self.group, self.broken = None, self.broken or f"sending version {version} failed: {error!r}"
            if self.store is not None:
                with suppress(RuntimeError):  # who keeps the store has gone: nobody waits
                    self.store.set(f"{self.sends}/failed/0", self.broken)
            raise
        self.sends += 1
        return manifest

    def _send(self, version: int, stream: Iterable[Piece], patience: Patience) -> Manifest:
        self._roll_call(f"{self.sends}/ready", f"to receive weights version {version}", patience)
        entries: list[TensorEntry] = []
        number = 0
        for number, bucket in enumerate(buckets(stream, self.bucket_bytes), start=1):
            of_bucket = [entry for entry, _ in bucket]
            entries += of_bucket
            self._tell(number - 1, Manifest(version, tuple(of_bucket)), last=False)
            sent = [tensor for _, tensor in bucket if tensor is not None]
            if sent:
                self._broadcast(flatten(sent).to(self.device), version, patience)
        manifest = Manifest(version, tuple(entries), myself())
        self._tell(number, manifest, last=True)
        self._roll_call(f"{self.sends}/done", f"to the end of weights version {version}", patience)
        self._forget(number)
        return manifest

    # -- a receiver's end

    def receive(self, version: int, *, held: Manifest | None = None) -> Generator[Piece, None, Manifest]:
        """See `Transport`. What is left when the caller stops is taken and thrown away: the others wait for it."""
        headers: list[Manifest] = []
        parts = self._parts(version, headers)
        try:
            for bucket in parts:
                if headers[0].version != version:
                    raise WhetError(
                        f"weights version {version} was requested, but the trainer sends version {headers[0].version}"
                    )
                yield from bucket
        finally:
            for _ in parts:
                pass
        return headers[-1]

    def newest(self) -> int | None:
        text = self._read("newest")
        return None if text is None else int(text)

    def abort(self, why: str) -> None:
        """The trainer, from another thread: a receiver is known to have ended, so wait for nobody any more."""
        if self.store is not None:
            self._store("to give up", lambda: self.store.set("aborted", why))

    def close(self) -> None:
        """Leave the group; the trainer's end takes the store along."""
        self.broken = self.broken or "the group was closed"
        self.group = self.store = None

    # -- inside

    def _begin(self, version: int) -> Patience:
        if self.broken is not None:
            raise WhetError(
                f"weights version {version} cannot be broadcast: {self.broken}; open a new group with the "
                "receivers that still run"
            )
        patience = Patience(self.timeout_s)
        if self.rank == 0:
            self.store.set("newest", str(version))
        if self.group is None:
            self._join(patience)
        return patience

    def _join(self, patience: Patience) -> None:
        """Make the group, all ranks together."""
        self._roll_call("here", "to make a group", patience)
        size, store = len(self.names), dist.PrefixStore("group", self.store)
        try:
            if self.device.type == "cuda":
                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout = timedelta(seconds=self.timeout_s)
                self.group = dist.ProcessGroupNCCL(store, self.rank, size, nccl)
            else:
                gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                gloo._timeout = timedelta(seconds=self.timeout_s)
                gloo._devices = [
                    dist.ProcessGroupGloo.create_device(hostname=_own_address(self.host, self.port))
                ]
                self.group = dist.ProcessGroupGloo(store, self.rank, size, gloo)
        except (RuntimeError, OSError) as error:
            raise self._failed("the process group could not be created", error) from error

    def _parts(self, version: int, headers: list[Manifest]) -> Iterator[list[Piece]]:
        """The buckets of one send; `headers` gets theirs, then the whole manifest."""
        patience = self._begin(version)
        self._store("to say it is ready", lambda: self.store.set(f"{self.sends}/ready/{self.rank}", myself()))
        number = 0
        while True:
            header, last = self._hear(number, version, patience)
            headers.append(header)
            if last:
                break
            sent = [e for e in header.entries if e.sent]
            tensors: list[Tensor] = []
            if sent:
                flat = torch.empty(flat_bytes(sent), dtype=torch.uint8, device=self.device)
                self._broadcast(flat, version, patience)
                tensors = split(flat, sent)
            named = dict(zip((e.name for e in sent), tensors))
            yield [(e, named.get(e.name) if e.sent else None) for e in header.entries]
            number += 1
        self._store("to say it is done", lambda: self.store.set(f"{self.sends}/done/{self.rank}", myself()))
        self.sends += 1

    def _tell(self, number: int, header: Manifest, *, last: bool) -> None:
        value = {"last": last, "manifest": header.to_json()}
        self._store("a header", lambda: self.store.set(f"{self.sends}/{number}", json.dumps(value)))

    def _hear(self, number: int, version: int, patience: Patience) -> tuple[Manifest, bool]:
        key = f"{self.sends}/{number}"
        if not self._wait([key], patience):
            told = self.newest()
            state = (
                "it has sent none yet"
                if told is None
                else f"the last version that it began to send is {told}"
            )
            raise self._failed(
                str(patience.error(f"weights version {version} (bucket {number}) from {self._who(0)}", state))
            )
        value: Json = json.loads(self.store.get(key))
        return Manifest.from_json(value["manifest"]), bool(value["last"])

    def _broadcast(self, flat: Tensor, version: int, patience: Patience) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=max(patience.left, 0.001))
        try:
            self.group.broadcast([flat], options).wait(options.timeout)
        except RuntimeError as error:
            what = f"weights version {version}: the broadcast failed after {self.timeout_s - patience.left:.0f} s"
            raise self._failed(what, error) from error

    def _roll_call(self, prefix: str, what: str, patience: Patience) -> None:
        """Wait for a key of every other rank; the error names those who are missing."""
        others = [r for r in range(len(self.names)) if r != self.rank]
        if not self._wait([f"{prefix}/{r}" for r in others], patience):
            self.missing = [r for r in others if self._read(f"{prefix}/{r}") is None]
            raise self._failed(
                f"{self._listed(self.missing)} did not join {what} within {self.timeout_s:g} s "
                f"(since {patience.since}); sync.timeout_s is the limit"
            )

    def _failed(self, what: str, error: Exception | None = None) -> WhetError:
        """The group is broken. The trainer waits a little for who lives to say so, and names the others."""
        self.group, self.broken = None, what  # closes this rank's connections, so nobody waits for it
        reason = "" if error is None else f" ({str(error).splitlines()[0][:200]})"
        if self.rank != 0:
            # best effort: without a trainer there is nobody to tell
            try:
                self.store.set(f"{self.sends}/failed/{self.rank}", what)
            except RuntimeError:
                return WhetError(f"{what}{reason}; {self.names[0]} is unreachable")
            return WhetError(f"{what}{reason}")
        if error is not None:
            silent = self._silent()
            self.broken = what = what + (f"; no message from {self._listed(silent)}" if silent else "")
        return WhetError(f"{what}{reason}")

    def _heard_of_failure(self) -> str | None:
        """What a receiver says that failed."""
        said = [(r, self._read(f"{self.sends}/failed/{r}")) for r in range(1, len(self.names))]
        return next((f"{self._who(r)}: {why}" for r, why in said if why is not None), None)

    def _silent(self) -> list[int]:
        end = time.monotonic() + min(_GRACE_S, self.timeout_s)
        silent = list(range(1, len(self.names)))
        while silent and time.monotonic() < end:
            silent = [
                r
                for r in silent
                if not any(self.store.check([f"{self.sends}/{key}/{r}"]) for key in ("failed", "done"))
            ]
            time.sleep(0.05)
        return silent

    def _who(self, rank: int) -> str:
        place = self._read(f"here/{rank}")
        return f"{self.names[rank]} (rank {rank}, {place or 'never connected'})"

    def _listed(self, ranks: Sequence[int]) -> str:
        return ", ".join(map(self._who, ranks))

    def _read(self, key: str) -> str | None:
        def read() -> str | None:
            return self.store.get(key).decode() if self.store.check([key]) else None

        return self._store(key, read)

    def _wait(self, keys: list[str], patience: Patience) -> bool:
        """Whether all keys are there by the deadline."""
        while not self._store(keys[0], lambda: self.store.check(keys)):
            if self.rank != 0 and (why := self._read(f"{self.sends}/failed/0")) is not None:
                raise self._failed(f"{self._who(0)} stopped the broadcast: {why}")
            if self.rank == 0 and (why := self._read("aborted") or self._heard_of_failure()) is not None:
                raise self._failed(why)
            if patience.over:
                return False
            time.sleep(0.002)
        return True

    def _store(self, what: str, act: Any) -> Any:
        """Ask the store, which lives and dies with the trainer."""
        if self.store is None:
            raise WhetError(f"weight sync: {what}: this end of the broadcast was closed")
        try:
            return act()
        except RuntimeError as error:
            self.group, self.broken = None, f"{self.names[0]} is unreachable"
            raise WhetError(
                f"weight sync, {what}: {self.names[0]} at {self.host}:{self.port} is unreachable ({error})"
            ) from error

    def _forget(self, last: int) -> None:
        """Remove the keys of the send that has just ended."""
        n = self.sends
        for rank in range(1, len(self.names)):
            self.store.delete_key(f"{n}/ready/{rank}")
            self.store.delete_key(f"{n}/done/{rank}")
        for number in range(last + 1):
            self.store.delete_key(f"{n}/{number}")


def _own_address(host: str, port: int) -> str:
    """The address at which this machine reaches the trainer, and the others reach this process."""
    family, kind, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)  # sends nothing: it chooses the interface
        return str(probe.getsockname()[0])


def _open_store(host: str, port: int, *, serves: bool, timeout_s: float) -> tuple[Any, int]:
    """The store and its port. It listens on `host` alone, where torch by itself would listen everywhere."""
    patience = timedelta(seconds=timeout_s)
    try:
        if not serves:
            return dist.TCPStore(host, port, is_master=False, timeout=patience, wait_for_workers=False), port
        with socket.create_server((host, port), backlog=128) as server:
            port = server.getsockname()[1]
            fd = server.detach()
        store = dist.TCPStore(
            host, port, is_master=True, timeout=patience, wait_for_workers=False, master_listen_fd=fd
        )
        return store, port
    except (RuntimeError, OSError) as error:
        raise WhetError(
            f"weight sync: cannot {'listen' if serves else 'reach the trainer'} at {host}:{port} within "
            f"{timeout_s:g} s: {str(error).splitlines()[0]}"
        ) from error
