"""The interface of weight sync: how tensors get from the trainer's process to an engine's."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from whet.sync.manifest import DTYPES, Held, Manifest, Piece, TensorEntry, Tensors
from whet.types import WhetError

BUCKET_BYTES = 256 << 20
"""Tensors travel together up to so many bytes: few large transfers, and bounded memory beside the weights."""

_ALIGN = 16
"""Bytes; a tensor's place in a flat buffer is a multiple of every dtype's size."""


class Sender(Protocol):
    """The trainer's end of one way to send weights."""

    def send(self, version: int, tensors: Tensors, *, held: Held | None = None) -> Manifest:
        """Send one version, tensor by tensor. held: tensors that all receivers already have, which are not sent."""


class Source(Protocol):
    """An engine process's end."""

    def receive(self, version: int, *, held: Manifest | None = None) -> Generator[Piece, None, Manifest]:
        """The pieces of a version as they arrive, unchecked (see `manifest.checked`); returns its manifest.

        Where it waits for the version, it raises WhetError naming it, its sender and the time waited if it does not
        arrive.
        """


class Transport(Sender, Source, Protocol):
    """Both."""


def buckets(stream: Iterable[Piece], most_bytes: int = BUCKET_BYTES) -> Iterator[list[Piece]]:
    """Pieces in lists of so many bytes at most, or of a single larger tensor."""
    bucket: list[Piece] = []
    total = 0
    for piece in stream:
        size = _bytes(piece[0]) if piece[0].sent else 0
        if bucket and total + size > most_bytes:
            yield bucket
            bucket, total = [], 0
        bucket.append(piece)
        total += size
    if bucket:
        yield bucket


def flat_bytes(entries: Iterable[TensorEntry]) -> int:
    """Length of the flat buffer of these entries' tensors."""
    return sum(_padded(_bytes(e)) for e in entries)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One uint8 buffer of all tensors' bytes, each at a multiple of 16."""
    device = tensors[0].device
    flat = torch.zeros(sum(_padded(t.nbytes) for t in tensors), dtype=torch.uint8, device=device)
    at = 0
    for tensor in tensors:
        flat[at : at + tensor.nbytes].copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        at += _padded(tensor.nbytes)
    return flat


def split(flat: Tensor, entries: Sequence[TensorEntry]) -> list[Tensor]:
    """The tensors of a flat buffer, as views of it. Raises WhetError if its length is not theirs."""
    if flat.numel() != flat_bytes(entries):
        raise WhetError(
            f"weight sync: got a buffer of {flat.numel()} bytes for {entries[0].name!r} and {len(entries) - 1} more, "
            f"expected {flat_bytes(entries)}"
        )
    out, at = [], 0
    for e in entries:
        out.append(flat[at : at + _bytes(e)].view(DTYPES[e.dtype]).view(e.shape))
        at += _padded(_bytes(e))
    return out


def _bytes(entry: TensorEntry) -> int:
    return prod(entry.shape) * DTYPES[entry.dtype].itemsize


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class Patience:
    """A wait with a deadline, and its error."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.since, self.began = seconds, time.strftime("%H:%M:%S"), time.monotonic()

    @property
    def left(self) -> float:
        return max(0.0, self.began + self.seconds - time.monotonic())

    @property
    def over(self) -> bool:
        return self.left == 0.0

    def error(self, what: str, state: str) -> WhetError:
        """what: that was waited for. state: what is there instead, or what to look at."""
        return WhetError(
            f"{what} did not arrive within sync.timeout_s={self.seconds:g} s (since {self.since}); {state}"
        )
