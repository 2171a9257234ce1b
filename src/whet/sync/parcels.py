"""Weights that are sent as a letter: a manifest and references into an object store, Ray's. Who has the handle of a
receiver hands it over."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from whet.sync.manifest import Held, Manifest, Piece, TensorEntry, Tensors, lacking, myself, not_sent, pieces
from whet.sync.transport import BUCKET_BYTES, buckets, flatten, split
from whet.types import WhetError


@dataclass(frozen=True)
class Letter:
    """One version that is being sent."""

    manifest: Manifest
    parcels: tuple[tuple[tuple[str, ...], Any], ...]
    """(names, reference) of the tensors that were sent, one array of bytes for each reference."""
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
    """A `Transport` by letters. It serves both ends in a process; between processes the caller brings `letter` of the
    one to `accept` of the other.

    put: a numpy uint8 array in, a reference out; get: the other way, read-only is fine. A store that counts references,
    as Ray's, frees a version's memory when its letter goes: here are the last one, and the last that was whole.
    """

    def __init__(
        self,
        put: Callable[[Any], Any],
        get: Callable[[Any], Any],
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.put, self.get, self.bucket_bytes = put, get, bucket_bytes
        self.last: Letter | None = None
        self.base: Letter | None = None
        """The last that was whole."""

    def send(self, version: int, tensors: Tensors, *, held: Held | None = None) -> Manifest:
        def packed(bucket: list[Piece]) -> Any:
            return self.put(flatten([t for _, t in bucket if t is not None]).cpu().numpy())

        return self._send(version, pieces(tensors, held or {}), packed, by=myself())

    def post(self, written: Manifest, put: Callable[[list[str]], Any], *, held: Held) -> Manifest:
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
        whole = all(e.sent for e in entries)
        self.last = Letter(
            Manifest(version, tuple(entries), by), tuple(parcels), None if whole else self.base
        )
        self.base = self.last if whole else self.base
        return self.last.manifest

    def letter(self, version: int) -> Letter:
        """The letter to hand to the other side. Raises WhetError for a version that is not the last."""
        if self.last is None or self.last.manifest.version != version:
            raise WhetError(f"weights version {version} is not in the object store; send it again")
        return self.last

    def accept(self, letter: Letter) -> None:
        """Make a version receivable in this process."""
        self.last = letter

    def receive(self, version: int, *, held: Manifest | None = None) -> Generator[Piece, None, Manifest]:
        letter = self.letter(version)
        named = letter.manifest.named
        came = set()
        for sender, names, reference, wanted in letter.needed(held):
            there = sender.manifest.named
            if strange := [n for n in names if n not in there]:
                raise WhetError(
                    f"weights version {version}: received {strange[0]!r}, which its manifest does not list"
                )
            with warnings.catch_warnings():
                # nothing here writes into it
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                flat = torch.from_numpy(self.get(reference))
            tensors = split(flat, [there[name] for name in names])
            yield from ((named[n], tensor) for n, tensor in zip(names, tensors) if n in wanted)
            came |= wanted
        yield from not_sent(letter.manifest, held, came)
        return letter.manifest

    def close(self) -> None:
        self.last = self.base = None
