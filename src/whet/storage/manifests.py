"""Completeness of folders: each file by size and SHA-256, and the names of checkpoints."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from whet.config.tree import STAGE
from whet.guard import pulse
from whet.inputs import parse_json
from whet.types import DataError, Json

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
"""Lists every other file of its folder. Written last, so a folder without one is no whole one."""

FORMAT = 1
"""Of a listing of files."""

_NAME = re.compile(rf"(\d+)-({STAGE.pattern})-(\d{{6,}})")


def place_of(name: str) -> tuple[int, int] | None:
    """(number of the stage, step) in a checkpoint's name; None for other names."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[3])) if found else None


def oldest_first(names: Iterable[str]) -> list[str]:
    """The names that are checkpoints', in the run's order."""
    placed = [(place, name) for name in names if (place := place_of(name)) is not None]
    return [name for _, name in sorted(placed)]


def manifest(folder: Path) -> Json:
    """Size and digest of each file of a folder, its own manifest left out."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)
    return {
        "format": FORMAT,
        "files": {str(p.relative_to(folder)): [p.stat().st_size, digest(p)] for p in files},
    }


def parsed(text: bytes, where: str) -> Json:
    """The manifest found at `where`. None for a damaged one, with a warning: the folder is not complete."""
    try:
        found = parse_json(text, where, DataError)
        if isinstance(found, dict) and isinstance(found.get("files"), dict):
            return found
        log.warning("%s lists no files; the folder counts as incomplete", where)
    except DataError as e:
        log.warning("%s; the folder counts as incomplete", e)
    return None


def digest(path: Path) -> str:
    pulse.beat(f"the SHA-256 of {path.name}")
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
