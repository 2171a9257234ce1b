"""RL post-training for language models, from a laptop CPU to a cluster, on one code path."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.api import Result, train
    from whet.bench import evaluate
    from whet.generation import generate
    from whet.rollout.scripted import ScriptedEngine
    from whet.track.run import Run, load_run
    from whet.types import (
        CheckpointError,
        Completion,
        ConfigError,
        DataError,
        Message,
        Rollout,
        Sampling,
        Task,
        WhetError,
    )

__all__ = [
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DataError",
    "Message",
    "Result",
    "Rollout",
    "Run",
    "Sampling",
    "ScriptedEngine",
    "Task",
    "WhetError",
    "evaluate",
    "generate",
    "load_run",
    "train",
]

_HOME = {
    "evaluate": "whet.bench",
    "generate": "whet.generation",
    "load_run": "whet.track.run",
    "train": "whet.api",
    "Result": "whet.api",
    "Run": "whet.track.run",
    "ScriptedEngine": "whet.rollout.scripted",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: `whet --help` needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module 'whet' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME.get(name, "whet.types")), name)
