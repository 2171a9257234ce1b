"""Weights by way of a folder on a disk that both sides see: a folder of safetensors for each version.

weights/00000007/            version 7, whole
weights/00000008-changed/    version 8: what is not as in the last whole one before it, which stays as long
    manifest.json            names, shapes, dtypes, digests
    00000.safetensors ...
weights/confirmed/NAME.json  the last answer of the receiver NAME

A version is there in one rename or not at all, so no reader sees half of one, and nobody holds a lock: a reader that
dies keeps nobody waiting. Nothing waits for the disk: after a power cut a file may be torn, which its digest tells.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from whet.sync.manifest import Held, Manifest, Piece, TensorEntry, Tensors, lacking, myself, not_sent, pieces
from whet.sync.transport import BUCKET_BYTES, Patience, buckets
from whet.track.files import atomic_folder, drop_folder, tidy, write_json
from whet.types import CheckpointError, Receipt, WhetError

log = logging.getLogger(__name__)

_VERSION = re.compile(r"(\d{8,})(-changed)?")
_POLL_S = 0.05
"""Seconds between two looks for a version."""
_RECEIVER = re.compile(r"\w[\w.-]*")


class Files:
    """A `Transport` through the folder `root`.

    keep: number of newest versions that are kept; a slower reader finds its version deleted. There is one writer; its
    `tidy` removes what a killed writer left.
    """

    def __init__(
        self,
        root: Path,
        *,
        timeout_s: float = 600.0,
        keep: int = 2,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.root, self.timeout_s, self.keep = root, timeout_s, keep
        self.bucket_bytes = bucket_bytes

    def send(self, version: int, tensors: Tensors, *, held: Held | None = None) -> Manifest:
        """See `Transport`. Raises CheckpointError (full disk ...); earlier versions are then untouched."""
        name = f"{version:08d}" + ("-changed" if held else "")
        entries: list[TensorEntry] = []
        written = 0
        try:
            with atomic_folder(self.root / name, durable=False) as folder:
                for number, bucket in enumerate(buckets(pieces(tensors, held or {}), self.bucket_bytes)):
                    entries += [entry for entry, _ in bucket]
                    sent = {entry.name: tensor.contiguous() for entry, tensor in bucket if tensor is not None}
                    if sent:
                        save_file(_untied(sent), folder / f"{number:05d}.safetensors")
                        written += sum(t.nbytes for t in sent.values())
                manifest = Manifest(version, tuple(entries), myself())
                write_json(folder / "manifest.json", manifest.to_json(), durable=False)
        except CheckpointError as error:
            free = shutil.disk_usage(self.root).free if self.root.is_dir() else 0
            raise CheckpointError(
                f"{error}; weights version {version}: {written >> 20} MiB had been written, {free >> 20} MiB "
                "are free"
            ) from error
        self._drop_others(version)
        for other, path in self._there():
            if other == version and path.name != name and _read_manifest(path).digest != manifest.digest:
                drop_folder(path)  # of before the trainer went back
        return manifest

    def receive(self, version: int, *, held: Manifest | None = None) -> Generator[Piece, None, Manifest]:
        """See `Transport`. Tensors are views of the mapped files, which stay readable when the folder goes."""
        folder = self._await(version, held)
        manifest = _read_manifest(folder)
        named, lacks = manifest.named, set(lacking(manifest, held))
        came = set()
        for name, tensor in _tensors(folder, named, lacks):
            came.add(name)
            yield named[name], tensor
        left = {n for n in lacks - came if not named[n].sent}
        base = self._base(version) if left else None
        if base is not None:
            there = _read_manifest(base).named
            for name, tensor in _tensors(base, there, {n for n in left if named[n].same(there.get(n))}):
                came.add(name)
                yield named[name], tensor
        yield from not_sent(manifest, held, came)
        return manifest

    def newest(self) -> int | None:
        return max((version for version, _ in self._there()), default=None)

    def written(self, version: int) -> Sequence[tuple[int, int]]:
        """Changes when a version is written again."""
        there = (path.stat() for path in self._folders_of(version) if path.is_dir())
        return [(folder.st_ino, folder.st_mtime_ns) for folder in there]

    def digest(self, version: int) -> str:
        """Of the tensors of a version that is there. Raises WhetError if it is not."""
        whole, changed = self._folders_of(version)
        return _read_manifest(whole if whole.is_dir() else changed).digest

    def confirm(self, receipt: Receipt) -> None:
        if not _RECEIVER.fullmatch(receipt.receiver):
            raise WhetError(
                f"weight sync: {receipt.receiver!r} cannot be a file name; name receivers with letters and digits"
            )
        folder = self.root / "confirmed"
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{receipt.receiver}.json", asdict(receipt), durable=False)

    def receipts(self) -> Sequence[Receipt]:
        return [_read_receipt(path) for path in sorted((self.root / "confirmed").glob("[!.]*.json"))]

    def tidy(self) -> None:
        """Remove partial files of a killed writer, answers that it got, and versions that a power cut has left without
        a whole manifest. Only for the writer."""
        if self.root.is_dir():
            tidy(self.root)
            shutil.rmtree(self.root / "confirmed", ignore_errors=True)
        for _, path in self._there():
            try:
                _read_manifest(path)
            except WhetError as error:
                log.warning("%s; it is removed", error)
                drop_folder(path)

    def _there(self) -> list[tuple[int, Path]]:
        if not self.root.is_dir():
            return []
        return [(int(m[1]), p) for p in self.root.iterdir() if (m := _VERSION.fullmatch(p.name))]

    def _drop_others(self, version: int) -> None:
        """All but the newest few and the whole ones that they go by, and later ones: the trainer has gone back to a
        checkpoint."""
        kept = sorted({v for v, _ in self._there() if v <= version})[-self.keep :]
        bases = {self._base(v) for v in kept}
        for other, path in self._there():
            if other not in kept and path not in bases:
                drop_folder(path)

    def _base(self, version: int) -> Path | None:
        """The newest version up to this one that is there whole."""
        there = sorted((path for v, path in self._there() if v <= version), reverse=True)
        return next((path for path in there if path.name.isdigit() or _is_whole(path)), None)

    def _folders_of(self, version: int) -> tuple[Path, Path]:
        """Where a version is: whole, or what has changed."""
        return self.root / f"{version:08d}", self.root / f"{version:08d}-changed"

    def _await(self, version: int, held: Manifest | None) -> Path:
        """The folder of a version; who holds one already takes the smaller one of the two that there may be."""
        whole, changed = self._folders_of(version)
        patience = Patience(self.timeout_s)
        while True:
            if whole.is_dir():
                return changed if held is not None and _covers(changed, held) else whole
            if changed.is_dir():
                return changed
            newest = self.newest()
            if newest is not None and newest > version:
                raise WhetError(
                    f"weights version {version} is not in {self.root}, the newest there is {newest}; load that, or "
                    "raise sync.keep"
                )
            if patience.over:
                raise patience.error(f"weights version {version} in {self.root}", self._state(newest))
            time.sleep(min(_POLL_S, patience.left))

    def _state(self, newest: int | None) -> str:
        if newest is None:
            return "none has arrived yet; check that the trainer writes to this folder"
        path = next(p for v, p in self._there() if v == newest)
        ago = time.time() - path.stat().st_mtime
        return f"the newest is {newest}, written {ago:.0f} s ago by {_read_manifest(path).by}; check that it is running"


def _tensors(
    folder: Path, named: Mapping[str, TensorEntry], wanted: Collection[str]
) -> Generator[tuple[str, Tensor], None, None]:
    """(name, tensor) of those wanted that the folder's files have."""
    with ExitStack() as stack:
        try:
            files = [
                stack.enter_context(safe_open(path, framework="pt"))
                for path in sorted(folder.glob("*.safetensors"))
            ]
            for file in files:
                for name in file.keys():  # noqa: SIM118  it is no mapping
                    if name not in named:
                        raise WhetError(f"{folder}: holds {name!r}, which the manifest does not list")
                    if name in wanted:
                        yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(folder, error) from error


def _is_whole(folder: Path) -> bool:
    """Whether all tensors are in this folder: everything may have changed."""
    return all(e.sent for e in _read_manifest(folder).entries)


def _covers(folder: Path, held: Manifest) -> bool:
    """Whether a version's folder of changes is there and holds all that this receiver lacks."""
    if not folder.is_dir():
        return False
    return all(e.sent or e.same(held.named.get(e.name)) for e in _read_manifest(folder).entries)


def _untied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses two names for one memory."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        at = tensor.untyped_storage().data_ptr()
        out[name] = tensor.clone() if at in seen else tensor
        seen.add(at)
    return out


def _read_manifest(folder: Path) -> Manifest:
    try:
        return Manifest.from_json(json.loads((folder / "manifest.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception) -> WhetError:
    if not folder.is_dir():
        return WhetError(
            f"{folder} was removed while it was read, as newer versions were written; raise sync.keep"
        )
    return WhetError(
        f"the weights in {folder} cannot be read: {error}; let the trainer send this version again"
    )


def _read_receipt(path: Path) -> Receipt:
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        return Receipt(**value)
    except (OSError, ValueError, TypeError) as error:
        raise WhetError(f"{path} is not a receipt of weights: {error}; remove it") from error
