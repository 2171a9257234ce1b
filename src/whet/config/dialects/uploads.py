"""Copies of checkpoints elsewhere, as foreign files name the place."""

from __future__ import annotations

from pathlib import Path

from whet.config.urls import is_remote


def place(path: str) -> str:
    """A place as a URL: what is one already as it is, a folder of this machine as file://."""
    return path if is_remote(path) else Path(path).expanduser().absolute().as_uri()
