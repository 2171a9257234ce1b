"""The rollout engines that come with whet, by name, read without importing any of them: one row adds one.

An engine of yours is a class or function, named in `rollout.engine` as 'package.module:name' or 'path/to/file.py:name'.
It is called with `EngineInputs` (whet.rollout.engine), and gives a `RolloutEngine` in the process of the trainer, which
may be the client of a server. Its `can` says what it is able to do; a run that needs more is refused at the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineRow:
    """What a config may say of an engine."""

    about: str
    at: str
    """What makes it of its inputs, as 'module:name'."""


ENGINES: Mapping[str, EngineRow] = {
    "native": EngineRow(
        "Embedded, continuous batching, the trainer's weights by reference.",
        "whet.rollout.native.engine:opened",
    ),
    "hf": EngineRow(
        "The forward of transformers, one request at a time: slow, to compare with.", "whet.rollout.hf:opened"
    ),
}
