"""Tensors by name on the disk: one whole safetensors file, or parts with an index, read slice by slice.

model.safetensors                    whole
model.parts.json                     or: of each tensor dtype, shape and the boxes that it was cut into
model-00001-of-00002.safetensors     NAME@START: the box of NAME that begins there

Who reads either takes the slices that it needs, so no process ever holds more than its own part of a model, and how
the tensors were cut when they were written is nothing to it. Each number is written once. Why not torch's own
distributed checkpoints: docs/decisions/011.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from whet.guard import pulse
from whet.models.regions import Region, Sizes
from whet.types import CheckpointError, Json

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_PART = re.compile(r"[\w.-]+\.safetensors")
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, to be written."""

    name: str
    dtype: torch.dtype
    shape: Sizes
    """Of the whole tensor."""
    start: Sizes
    size: Sizes

    @property
    def key(self) -> str:
        """Its name in its file."""
        return f"{self.name}@{','.join(map(str, self.start))}"


def pieces(name: str, tensor: Tensor, region: Region) -> Iterator[tuple[Piece, Tensor]]:
    """The boxes of what lies here of a tensor, and the numbers in them (views)."""
    for box in region.boxes():
        yield Piece(name, tensor.dtype, region.shape, box.start, box.size), tensor[box.here()]


def assigned(held: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
    """Who writes what, rank by rank: of those that hold a piece, the one with least to write so far.

    held: the pieces of each rank. Errors: CheckpointError where together they are not the whole tensors.
    """
    holders: dict[Piece, list[int]] = {}
    for rank, own in enumerate(held):
        for piece in own:
            holders.setdefault(piece, []).append(rank)
    out: list[list[Piece]] = [[] for _ in held]
    load = [0] * len(held)
    left: dict[str, int] = {}
    for piece, ranks in holders.items():
        rank = min(ranks, key=load.__getitem__)
        out[rank].append(piece)
        load[rank] += prod(piece.size) * piece.dtype.itemsize
        left[piece.name] = left.get(piece.name, prod(piece.shape)) - prod(piece.size)
    if odd := [name for name, numbers in left.items() if numbers]:
        raise CheckpointError(
            f"the ranks' parts of {odd[:3]} do not cover the whole tensor ({left[odd[0]]} values missing); this is a "
            "bug in whet: set checkpoint.sharded=false, and report it"
        )
    return out


def part_file(stem: str, number: int, count: int) -> str:
    """The name of one of `count` files; numbers begin with 0."""
    return f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors"


def index_file(file: str) -> str:
    """The name of the index that stands in the place of `file`, such as model.safetensors."""
    return f"{file.removesuffix('.safetensors')}.parts.json"


def index(file: str, written: Sequence[Sequence[Piece]], metadata: Mapping[str, str] | None) -> Json:
    """The index of a tensor file in parts. written: what each rank writes of it."""
    stem = file.removesuffix(".safetensors")
    tensors: dict[str, dict[str, Any]] = {}
    for number, own in enumerate(written):
        for piece in own:
            about = {"dtype": _NAMES[piece.dtype], "shape": list(piece.shape), "parts": []}
            found = tensors.setdefault(piece.name, about)
            found["parts"].append([number, list(piece.start), list(piece.size)])
    return {
        "format": 1,
        "files": [part_file(stem, n, len(written)) for n in range(len(written))],
        "metadata": dict(metadata or {}),
        "tensors": {name: tensors[name] for name in sorted(tensors)},
    }


def exists(path: Path) -> bool:
    """Whether there is such a file, whole or in parts."""
    return path.exists() or path.with_name(index_file(path.name)).exists()


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies."""

    dtype: torch.dtype
    shape: Sizes
    boxes: list[tuple[int, str, Sizes, Sizes]]
    """(number of the file, name in it, start, size)"""


@dataclass(frozen=True)
class TensorFile:
    """Tensors of one file, or of its parts. Open it with `opened`."""

    path: Path
    metadata: dict[str, str]
    tensors: Mapping[str, _Stored]
    handles: Sequence[Any] = field(repr=False)

    def shape(self, name: str) -> Sizes:
        return self.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """A tensor, or a region of it. Errors: CheckpointError where the parts do not have all of it."""
        stored = self.tensors[name]
        region = region or Region.whole(stored.shape)
        pulse.beat(f"reading {self.path.name}")
        out = torch.empty(region.here, dtype=stored.dtype)
        missing = out.numel()
        for wanted in region.boxes():
            for number, key, start, size in stored.boxes:
                common = wanted.meets(start, size)
                if common is None:
                    continue
                inside = tuple(slice(a - b, a - b + n) for a, b, n in zip(common.start, start, common.size))
                out[common.here()] = self._slice(number, key, inside)
                missing -= common.numbers
        if missing:
            raise CheckpointError(f"{self.path}: {missing} values of {name} are missing from its parts")
        return out

    def _slice(self, number: int, key: str, inside: tuple[slice, ...]) -> Tensor:
        try:
            handle = self.handles[number]
            return handle.get_slice(key)[inside] if inside else handle.get_tensor(key)  # type: ignore[no-any-return]
        except SafetensorError as e:
            raise _damaged(self.path, e) from e


@contextmanager
def opened(path: Path) -> Iterator[TensorFile]:
    """A tensor file to read, whole or in parts. path: of the whole one, such as policy/model.safetensors.

    Errors: CheckpointError for one that is damaged, or lacks a part.
    """
    with ExitStack() as stack:
        yield _found(path, stack)


def _found(path: Path, stack: ExitStack) -> TensorFile:
    beside = path.with_name(index_file(path.name))
    whole = path.exists() or not beside.exists()
    try:
        if whole:
            handle = stack.enter_context(safe_open(path, framework="pt"))
            slices = {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118
            stored = {key: _whole(key, s.get_dtype(), s.get_shape()) for key, s in slices.items()}
            return TensorFile(path, handle.metadata() or {}, stored, [handle])
        said = json.loads(beside.read_text(encoding="utf-8"))
        if odd := [name for name in said["files"] if not _PART.fullmatch(name)]:
            raise ValueError(f"{str(odd[0])[:100]!r} is not a file of tensor parts")
        files = [path.with_name(name) for name in said["files"]]
        if absent := [file.name for file in files if not file.is_file()]:
            raise CheckpointError(f"{beside}: its part {absent[0]} is missing; use an older checkpoint")
        handles = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        stored = {name: _parts(name, about, handles) for name, about in said["tensors"].items()}
        return TensorFile(beside, dict(said["metadata"]), stored, handles)
    except (
        OSError,
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as e:
        raise _damaged(path if whole else beside, e) from e


def _dtype(name: str, of: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"{of} is of dtype {str(name)[:20]}; known: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _whole(key: str, dtype: str, shape: Sequence[int]) -> _Stored:
    return _Stored(_dtype(dtype, key), tuple(shape), [(0, key, (0,) * len(shape), tuple(shape))])


def _parts(name: str, about: Mapping[str, Any], handles: Sequence[Any]) -> _Stored:
    dtype, shape, boxes = _dtype(about["dtype"], name), _sizes(about["shape"]), []
    for number, start, size in about["parts"]:
        piece = Piece(name, dtype, shape, _sizes(start), _sizes(size))
        ends = [at + n for at, n in zip(piece.start, piece.size, strict=True)]
        if not 0 <= number < len(handles) or any(end > most for end, most in zip(ends, shape, strict=True)):
            raise ValueError(
                f"a part of {name} lies outside the tensor, or in none of the {len(handles)} files"
            )
        there = handles[number].get_slice(piece.key)
        if (said := there.get_dtype()) != about["dtype"]:
            raise ValueError(f"{piece.key} is of dtype {said}, its index says {about['dtype']}")
        if (said := tuple(there.get_shape())) != piece.size:
            raise ValueError(f"{piece.key} has the shape {said}, its index says {piece.size}")
        boxes.append((int(number), piece.key, piece.start, piece.size))
    if (missing := math.prod(shape) - sum(math.prod(size) for *_, size in boxes)) > 0:
        # before memory is taken for them
        raise ValueError(f"{missing} values of {name} are missing from its parts")
    return _Stored(dtype, shape, boxes)


def _sizes(said: Sequence[Any]) -> Sizes:
    if not all(type(n) is int and 0 <= n < 2**63 for n in said):
        raise ValueError(f"{str(said)[:100]} is not a shape")
    return tuple(said)


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read ({error}); the checkpoint is damaged, use an older one")


# ---------------------------------------------------------------- writing


def write(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """One safetensors file."""
    pulse.beat(f"writing {path.name}")
    save_file({name: _own(t) for name, t in tensors.items()}, path, metadata=metadata)
    pulse.beat(f"writing {path.name}")


def _own(tensor: Tensor) -> Tensor:
    """In memory of its own, as the library asks for: a view of a part becomes a copy."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
