"""Restricts the opened files of a model's folder to the safetensors files in it.

transformers joins whatever an index names to the folder's path, and reads files other than safetensors with torch's own
loader, which is pickle. So all files that it would open are checked before. A file may be a link that leads out of the
folder, as each is in a hub cache (snapshots/ links into blobs/): its name makes it be read as safetensors, which runs
no code whatever it holds. A name in an index may not lead out of the folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from whet.config.sizes import Head
from whet.inputs import check_regular, read_json_object
from whet.types import CheckpointError, Json

_FILE = re.compile(r"[^/\\]+\.safetensors")
_FLOAT = re.compile(r"F64|F32|BF16|F16|F8_\w+")
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def check_weights(folder: Path, files: Sequence[Head], *, key: str, named: Json = None) -> None:
    """Raise CheckpointError, naming `key`, unless a model's folder can be opened as safetensors alone. It has a
    config.json. files: the heads of its safetensors files. named: the file that the config, with overrides, names as
    transformers_weights."""
    place = f"{key}={folder}"
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{place}: holds adapter_config.json, so transformers would add adapters to the model; give the model "
            "without them, and the adapters as model.lora.path"
        )
    named = named or read_json_object(folder / "config.json", CheckpointError).get("transformers_weights")
    named = named or (_WHOLE if (folder / _WHOLE).is_file() else _INDEX)
    if not isinstance(named, str) or not _FILE.fullmatch(named.removesuffix(".index.json")):
        raise CheckpointError(f"{place}: its config names {named!r} as transformers_weights; {_ONLY}")
    if named.endswith(".index.json") and (folder / named).exists():
        _check_index(folder, named, place)
    if not files:
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        hint = (
            f"only {', '.join(pickles)}, which is pickle and never opened; convert it" if pickles else "none"
        )
        raise CheckpointError(f"{place}: needs *.safetensors files, found {hint}")
    for head in files:
        _check_file(*head)


_ONLY = "only *.safetensors files of the folder itself are opened"


def _check_index(folder: Path, name: str, place: str) -> None:
    index = read_json_object(folder / name, CheckpointError)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names or not isinstance(index.get("metadata", {}), dict):
        raise CheckpointError(f"{place}: {name} has no weight_map of tensors to files; copy it again")
    for file in sorted({str(file) for file in names.values()}):
        if not _FILE.fullmatch(file):
            raise CheckpointError(f"{place}: {name} names {file!r}; {_ONLY}")
        if not (folder / file).is_file():
            raise CheckpointError(f"{place}: {name} names {file}, which is missing; copy it, too")


def _check_file(file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    from safetensors import SafetensorError, safe_open

    check_regular(file, CheckpointError)
    try:
        with safe_open(file, framework="numpy"):
            pass  # it has compared what the head says with the size of the file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or incomplete ({error}); copy it again") from error
    if odd := [(n, t) for n, (t, _) in tensors.items() if n.endswith(".weight") and not _FLOAT.fullmatch(t)]:
        raise CheckpointError(
            f"{file}: {odd[0][0]} is of dtype {odd[0][1]}; weights are floating-point numbers"
        )
