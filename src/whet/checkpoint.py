"""The whole run as a folder of safetensors and JSON: written whole or not at all, read only if undamaged.

checkpoints/0-sft-000300/   stage 0 ('sft') after step 300
    manifest.json           size and SHA-256 of every other file
    state.json              position in data, buffer, ledger, versions, ...
    policy/ critic/ reference/
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from whet.track.files import atomic_folder, tidy, write_json
from whet.types import CheckpointError, Json

log = logging.getLogger(__name__)

_NAME = re.compile(r"(\d+)-(.+)-(\d{6,})")

ALL = ("model", "optimizer")


class Saved(Protocol):
    """What a checkpoint asks of a training engine."""

    def save(self, path: Path, *, moments: bool) -> None:
        """Weights and the schedule's place; with `moments` the optimizer's, too."""

    def load(self, path: Path) -> None: ...

    def forget(self) -> None:
        """Begin the optimizer's moments anew."""


def save(
    root: Path,
    engines: Mapping[str, Saved],
    state: Json,
    *,
    keep: int | None,
    contents: Collection[str] = ALL,
) -> Path:
    """Write one checkpoint, then drop all but the newest `keep`. `state` has `stage`, `stage_name` and `step`.

    contents: "model" and, if they are to be kept, the moments of the "optimizer".
    Later ones are dropped, too: the run went on from an older one, and they may be damaged.
    Raises CheckpointError (full disk, no permission ...); older checkpoints are then untouched.
    """
    path = root / f"{state['stage']}-{state['stage_name']}-{state['step']:06d}"
    with atomic_folder(path) as folder:
        for name, engine in engines.items():
            engine.save(folder / name, moments="optimizer" in contents)
        write_json(folder / "state.json", {**state, "contents": list(contents)}, durable=False)
        write_json(folder / "manifest.json", _manifest(folder), durable=False)
    found = all_in(root)
    later = found.index(path) + 1
    old = found[:later][:-keep] if keep is not None else []
    for other in (*found[later:], *old):
        shutil.rmtree(other)
    return path


def all_in(root: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    found = [(p, m) for p in root.glob("*-*") if (m := _NAME.fullmatch(p.name))]
    return [p for p, m in sorted(found, key=lambda x: (int(x[1][1]), int(x[1][3])))]


def newest(root: Path) -> Path | None:
    """The newest checkpoint, after mending what a kill left half-done. Call it holding the run's lock."""
    if not root.is_dir():
        return None
    tidy(root)
    found = all_in(root)
    return found[-1] if found else None


def read_state(path: Path) -> Json:
    """The state of a checkpoint whose every file is as it was written. Raises CheckpointError naming the first
    that is not."""
    older = [p for p in all_in(path.parent) if p < path]
    instead = (
        f"checkpoint.resume={older[-1]} goes on from the one before"
        if older
        else "give a checkpoint's folder"
    )
    advice = f"{instead}; or start anew in another run_dir"
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
    except (OSError, ValueError, KeyError) as e:
        raise CheckpointError(f"{path} is not a whole checkpoint (manifest.json: {e}); {advice}") from e
    for name, (size, digest) in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path}: {name} is missing; {advice}")
        if file.stat().st_size != size:
            raise CheckpointError(
                f"{path}: {name} has {file.stat().st_size} bytes, {size} were written; {advice}"
            )
        if _digest(file) != digest:
            raise CheckpointError(
                f"{path}: {name} has changed since it was written (its SHA-256 differs); {advice}"
            )
    return json.loads((path / "state.json").read_text())


def glance(root: Path) -> Json:
    """Where the newest checkpoint says that the run stands, taken on trust; not done if there is none to read."""
    found = all_in(root)
    try:
        return json.loads((found[-1] / "state.json").read_text()) if found else {"done": False}
    except (OSError, ValueError):
        return {"done": False}


def check_contents(path: Path, state: Json, wanted: Collection[str]) -> None:
    """Raise CheckpointError if a checkpoint lacks what `checkpoint.load` wants of it."""
    if missing := [part for part in wanted if part not in state["contents"]]:
        raise CheckpointError(
            f"{path} holds no {', '.join(missing)} (checkpoint.contents was {', '.join(state['contents'])}), so the "
            "run cannot go on as if it had never stopped; checkpoint.load=[model] goes on with moments that begin "
            "at zero"
        )


def load(path: Path, engines: Mapping[str, Saved], *, wanted: Collection[str] = ALL) -> None:
    """Fill the engines from a checkpoint that `read_state` has approved.

    wanted: without "optimizer", moments begin at zero; weights and the schedule's place are always read.
    """
    for name, engine in engines.items():
        if not (path / name).is_dir():
            raise CheckpointError(f"{path} has no {name!r}: it was written by a run without one")
        engine.load(path / name)
        if "optimizer" not in wanted and (path / name / "optimizer.safetensors").exists():
            engine.forget()


def _manifest(folder: Path) -> Json:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {"format": 1, "files": {str(p.relative_to(folder)): [p.stat().st_size, _digest(p)] for p in files}}


def _digest(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
