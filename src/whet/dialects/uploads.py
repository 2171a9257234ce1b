"""Copies of checkpoints elsewhere, as foreign files name the place."""

from __future__ import annotations

import os
from pathlib import Path

from whet.config.urls import is_remote


def place(path: str) -> str:
    """A place as a URL: what is one already as it is, a folder of this machine as file://. One below a home folder that
    is not known here stays as it is, and is refused as such."""
    path = path if is_remote(path) else os.path.expanduser(path)
    return path if is_remote(path) or path.startswith("~") else Path(path).absolute().as_uri()
