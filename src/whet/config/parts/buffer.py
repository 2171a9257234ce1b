"""The sections about what stands between exploring and training."""

from __future__ import annotations

from typing import Literal

from whet.config.parts.base import Above0, Section


class Buffer(Section):
    """Where scored groups wait for the trainer."""

    url: str = "memory"
    """memory: in the trainer's process. For explorers and a trainer of their own: sqlite:///PATH (processes of one
    machine), files:///PATH (a folder that all machines see) or postgresql://USER@HOST:PORT/DATABASE (the password in
    PGPASSWORD). Three slashes before a path from the working directory, four before one from the root."""
    order: Literal["arrival", "newest", "task"] = "arrival"
    """What is trained on first: what came first; what came last; or the task that was asked first, waiting for it."""
    lease_s: Above0 = 300.0
    """Seconds after which an explorer that has not been heard of is given up and its tasks are asked of others."""
    explorer: str = "explorer"
    """Name of this explorer; every explorer of a run has its own. One that begins anew under its name goes on at once
    with the tasks it had."""
