"""The contents of one version of the weights: every tensor's name, shape, dtype and digest.

A digest is XXH3-128 of a tensor's bytes: it detects accidents, not attacks, at about the speed of memory. The digest of
a manifest identifies the weights, however they were sent: in full or as a difference, by any sender.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import torch
import xxhash
from torch import Tensor

from whet.types import Json, WhetError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
"""Tensors that can travel, by the name that a manifest gives them."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a version."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str
    sent: bool = True
    """False: its bytes are those that the receivers hold already, so it does not travel."""

    def same(self, other: TensorEntry | None) -> bool:
        """Whether both are of the same content, sent or not."""
        return other is not None and replace(self, sent=True) == replace(other, sent=True)


Tensors: TypeAlias = Iterable[tuple[str, Tensor]]
"""Those of a version, by name."""
Held: TypeAlias = Mapping[str, TensorEntry]
"""What all receivers have already, by name."""
Piece: TypeAlias = tuple[TensorEntry, Tensor | None]
"""A tensor on its way; None where it is not sent."""


@dataclass(frozen=True)
class Manifest:
    """All tensors of one version, in the order they were sent."""

    version: int
    entries: tuple[TensorEntry, ...]
    by: str = ""
    """Who sent it: process and host."""

    @cached_property
    def digest(self) -> str:
        """Of all names, shapes, dtypes and digests; neither of the version nor of what was left out."""
        told = [[e.name, e.shape, e.dtype, e.digest] for e in sorted(self.entries, key=lambda e: e.name)]
        return xxhash.xxh3_128_hexdigest(json.dumps(told).encode())

    @cached_property
    def named(self) -> Mapping[str, TensorEntry]:
        return {e.name: e for e in self.entries}

    def to_json(self) -> Json:
        entries = [[e.name, list(e.shape), e.dtype, e.digest, e.sent] for e in self.entries]
        return {"version": self.version, "digest": self.digest, "by": self.by, "entries": entries}

    @staticmethod
    def from_json(value: Json) -> Manifest:
        """Raises WhetError if it was changed after it was written."""
        try:
            entries = tuple(TensorEntry(n, tuple(s), t, d, sent) for n, s, t, d, sent in value["entries"])
            found, told = Manifest(value["version"], entries, value["by"]), value["digest"]
        except (KeyError, TypeError, ValueError) as error:
            raise WhetError(f"a weights manifest is damaged: {type(error).__name__} at {error}") from error
        if found.digest != told:
            raise WhetError(
                f"the manifest of weights version {found.version} is damaged: its entries' digest is "
                f"{found.digest}, but it states {told}"
            )
        return found


def myself() -> str:
    """This process, as a readable name."""
    return f"process {os.getpid()} on {socket.gethostname()}"


# ---------------------------------------------------------------- made


def digest_of(tensor: Tensor) -> str:
    """Of a tensor's bytes in row-major order, read from host memory."""
    host = tensor.detach().reshape(-1).to("cpu").contiguous()
    return xxhash.xxh3_128_hexdigest(host.view(torch.uint8).numpy().data)


def entry_of(name: str, tensor: Tensor) -> TensorEntry:
    """Raises WhetError for a dtype that cannot be sent."""
    dtype = dtype_name(tensor)
    if dtype not in DTYPES:
        raise WhetError(
            f"weight sync: {name!r} has dtype {dtype}, which cannot be sent; use {', '.join(DTYPES)}"
        )
    return TensorEntry(name, tuple(tensor.shape), dtype, digest_of(tensor))


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def describe(version: int, tensors: Tensors) -> Manifest:
    """The manifest of the given tensors."""
    return Manifest(version, tuple(entry_of(name, t) for name, t in tensors), myself())


def pieces(tensors: Tensors, held: Held) -> Iterator[Piece]:
    """Tensors with their entries; tensors that all receivers hold already are not sent."""
    for name, tensor in tensors:
        entry = entry_of(name, tensor)
        if entry.same(held.get(name)):
            yield replace(entry, sent=False), None
        else:
            yield entry, tensor.detach()


def lacking(manifest: Manifest, held: Manifest | None) -> list[str]:
    """Names of the tensors that a receiver needs: all that it does not hold with these values."""
    return [e.name for e in manifest.entries if held is None or not e.same(held.named.get(e.name))]


def not_sent(manifest: Manifest, held: Manifest | None, came: Collection[str]) -> Iterator[Piece]:
    """The entries whose tensors stay as they are: those held already, and those left out that nobody has brought.
    What was sent and did not come is not among them, so that it is missed."""
    lacks = set(lacking(manifest, held))
    for entry in manifest.entries:
        if entry.name not in came and (entry.name not in lacks or not entry.sent):
            yield entry, None


# ---------------------------------------------------------------- checked


def checked(
    stream: Generator[Piece, None, Manifest], version: int, held: Manifest | None
) -> Generator[tuple[str, Tensor | None], None, Manifest]:
    """(name, tensor), or (name, None) for one that stays unchanged; returns the manifest, once it has been verified.

    held: what the receiver has. Raises WhetError naming tensor and version if one is missing, is sent twice, has
    another shape, dtype or content than was sent, was not sent and is not held, or if the version is another one.
    """
    seen: dict[str, TensorEntry] = {}
    with closing(stream):
        while True:
            try:
                entry, tensor = next(stream)
            except StopIteration as end:
                manifest: Manifest = end.value
                break
            where = f"weights version {version}: {entry.name!r}"
            if entry.name in seen:
                raise WhetError(f"{where} was received twice")
            if tensor is None:
                _check_held(where, entry, held)
            else:
                _check_content(where, entry, tensor)
            seen[entry.name] = entry
            yield entry.name, tensor
    _check_whole(version, manifest, seen)
    return manifest


def _check_held(where: str, entry: TensorEntry, held: Manifest | None) -> None:
    if held is None:
        raise WhetError(
            f"{where} was not sent because it has not changed, but this receiver holds no earlier version"
        )
    if not entry.same(held.named.get(entry.name)):
        raise WhetError(
            f"{where} was not sent because it has not changed, but this receiver holds different values of it, from "
            f"version {held.version}"
        )


def _check_content(where: str, entry: TensorEntry, tensor: Tensor) -> None:
    if tuple(tensor.shape) != entry.shape or dtype_name(tensor) != entry.dtype:
        raise WhetError(
            f"{where} was received as {dtype_name(tensor)} {tuple(tensor.shape)}, sent as {entry.dtype} {entry.shape}"
        )
    if (digest := digest_of(tensor)) != entry.digest:
        raise WhetError(f"{where} has different bytes than were sent (digest {digest}, sent {entry.digest})")


def _check_whole(version: int, manifest: Manifest, seen: Mapping[str, TensorEntry]) -> None:
    if manifest.version != version:
        raise WhetError(
            f"weights version {version} was requested, but version {manifest.version} by {manifest.by} was received"
        )
    if len(manifest.named) != len(manifest.entries):
        raise WhetError(f"weights version {version}: its manifest lists a tensor twice")
    if lost := [name for name in manifest.named if name not in seen]:
        raise WhetError(
            f"weights version {version}: {len(lost)} of {len(manifest.entries)} tensors were not received: "
            f"{', '.join(map(repr, lost[:3]))}"
        )
    if odd := [name for name, entry in seen.items() if entry != manifest.named.get(name)]:
        raise WhetError(f"weights version {version}: {odd[0]!r} does not match its manifest")
