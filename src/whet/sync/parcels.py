"""Weights that are sent as a letter: a manifest and a list of parcels, handed over by the process that has both ends.

Two transports use this module with different parcels: references into an object store (Ray's, filled by the caller),
and handles to memory of the same GPU.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whet.sync.manifest import Manifest, Piece, TensorEntry, lacking, myself, not_sent, pieces
from whet.sync.transport import BUCKET_BYTES, Patience, buckets, flatten, split
from whet.types import Receipt, WhetError

Pack = Callable[[list[Tensor]], Any]
Unpack = Callable[[Any, Sequence[TensorEntry]], Sequence[Tensor]]


@dataclass(frozen=True)
class Letter:
    """One version that is being sent."""

    manifest: Manifest
    parcels: tuple[tuple[tuple[str, ...], Any], ...]
    """(names, reference) of the tensors that were sent; what a reference is, `pack` and `unpack` know."""
    base: Letter | None = None
    """The last version that was sent whole: who comes later finds there what was not sent with this one."""

    def needed(self, held: Manifest | None) -> list[tuple[Letter, tuple[str, ...], Any, set[str]]]:
        """(letter, names, reference, those that are lacking) of the parcels that a receiver has to open."""
        lacks = set(lacking(self.manifest, held))
        of_base = {e.name for e in self.manifest.entries if not e.sent and e.name in lacks}
        found = [(self, lacks - of_base)]
        if self.base is not None:
            there = self.base.manifest.named
            found.append((self.base, {n for n in of_base if self.manifest.named[n].same(there.get(n))}))
        return [
            (letter, names, reference, set(names) & wanted)
            for letter, wanted in found
            for names, reference in letter.parcels
            if not wanted.isdisjoint(names)
        ]


class Parcels:
    """A `Transport` by letters. One object serves both ends in a process; between processes the caller brings
    `letter(version)` of the one to `accept` of the other, and the receipt back to `confirm`.

    keep: versions that stay fetchable, the newest. Their parcels stay alive with them.
    """

    def __init__(
        self,
        pack: Pack,
        unpack: Unpack,
        *,
        timeout_s: float = 600.0,
        keep: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.pack, self.unpack = pack, unpack
        self.timeout_s, self.keep, self.bucket_bytes = timeout_s, keep, bucket_bytes
        self.letters: dict[int, Letter] = {}
        self.base: Letter | None = None
        """The last that was whole."""
        self.arrived = threading.Condition()
        self.answers: dict[str, Receipt] = {}

    def send(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        held: Mapping[str, TensorEntry] | None = None,
    ) -> Manifest:
        def packed(bucket: list[Piece]) -> Any:
            return self.pack([tensor for _, tensor in bucket if tensor is not None])

        return self._send(version, pieces(tensors, held or {}), packed, by=myself())

    def post(
        self, written: Manifest, put: Callable[[list[str]], Any], *, held: Mapping[str, TensorEntry]
    ) -> Manifest:
        """`send` of a version that another process has. put: lets that process put the tensors of these names where a
        reference finds them, and returns the reference."""
        stream = (
            (replace(entry, sent=not entry.same(held.get(entry.name))), None) for entry in written.entries
        )
        return self._send(
            written.version, stream, lambda bucket: put([entry.name for entry, _ in bucket]), by=written.by
        )

    def _send(
        self, version: int, stream: Iterable[Piece], pack: Callable[[list[Piece]], Any], *, by: str
    ) -> Manifest:
        entries: list[TensorEntry] = []
        parcels: list[tuple[tuple[str, ...], Any]] = []
        for bucket in buckets(stream, self.bucket_bytes):
            entries += [entry for entry, _ in bucket]
            if sent := [piece for piece in bucket if piece[0].sent]:
                parcels.append((tuple(entry.name for entry, _ in sent), pack(sent)))
        manifest = Manifest(version, tuple(entries), by)
        with self.arrived:  # later ones go, too: the trainer has gone back to a checkpoint
            self.letters = {v: letter for v, letter in self.letters.items() if v < version}
        whole = all(e.sent for e in entries)
        letter = Letter(manifest, tuple(parcels), None if whole else self.base)
        self.base = letter if whole else self.base
        self.accept(letter)
        return manifest

    def letter(self, version: int) -> Letter:
        """The letter to hand to the other side. KeyError: it is no longer kept."""
        return self.letters[version]

    def accept(self, letter: Letter) -> None:
        """Make a version receivable in this process; the oldest beyond `keep` are deleted. Raises WhetError for a late
        version.

        The same version again replaces the first: it was sent in full for a receiver that lacked something.
        """
        version = letter.manifest.version
        with self.arrived:
            newest = self.newest()
            if newest is not None and version < newest:
                raise WhetError(
                    f"weights version {version} by {letter.manifest.by} arrived late: version {newest} came first. "
                    "If the trainer restarted from an older checkpoint, close this end and open a new one"
                )
            self.letters[version] = letter
            for old in sorted(self.letters)[: -self.keep]:
                del self.letters[old]
            self.arrived.notify_all()

    def receive(self, version: int, *, held: Manifest | None = None) -> Generator[Piece, None, Manifest]:
        letter = self._await(version)
        named = letter.manifest.named
        came = set()
        for sender, names, reference, wanted in letter.needed(held):
            there = sender.manifest.named
            if strange := [n for n in names if n not in there]:
                raise WhetError(
                    f"weights version {version}: received {strange[0]!r}, which its manifest does not list"
                )
            entries = [there[name] for name in names]
            tensors = self.unpack(reference, entries)
            if len(tensors) != len(entries):
                raise WhetError(
                    f"weights version {version}: got {len(tensors)} tensors for the {len(entries)} from {names[0]!r} "
                    f"to {names[-1]!r}"
                )
            yield from ((named[n], tensor) for n, tensor in zip(names, tensors) if n in wanted)
            came |= wanted
        yield from not_sent(letter.manifest, held, came)
        return letter.manifest

    def newest(self) -> int | None:
        return max(self.letters, default=None)

    def confirm(self, receipt: Receipt) -> None:
        self.answers[receipt.receiver] = receipt

    def receipts(self) -> Sequence[Receipt]:
        return list(self.answers.values())

    def close(self) -> None:
        self.letters, self.base = {}, None

    def _await(self, version: int) -> Letter:
        patience = Patience(self.timeout_s)
        with self.arrived:
            while version not in self.letters:
                newest = self.newest()
                if newest is not None and newest > version:
                    raise WhetError(
                        f"weights version {version} was deleted, the newest is {newest}; load that, or raise sync.keep"
                    )
                if patience.over:
                    state = "none has arrived yet" if newest is None else f"the newest is {newest}"
                    raise patience.error(
                        f"weights version {version}", f"{state}; check that the trainer is running"
                    )
                self.arrived.wait(patience.left)
            return self.letters[version]


def in_store(
    put: Callable[[Any], Any], get: Callable[[Any], Any], *, timeout_s: float = 600.0, keep: int = 1
) -> Parcels:
    """Through an object store. put: a numpy uint8 array in, a reference out; get: the other way, read-only is fine.

    A store that counts references, as Ray's, frees a version's memory when its letter goes.
    """

    def pack(tensors: list[Tensor]) -> Any:
        return put(flatten(tensors).cpu().numpy())

    def unpack(reference: Any, entries: Sequence[TensorEntry]) -> list[Tensor]:
        with warnings.catch_warnings():
            # nothing here writes into it
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return split(torch.from_numpy(get(reference)), entries)

    return Parcels(pack, unpack, timeout_s=timeout_s, keep=keep)
