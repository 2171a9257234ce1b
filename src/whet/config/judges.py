"""Rewards whose judge is a language model: which functions ask one, and how large one is that the run has itself."""

from __future__ import annotations

from pathlib import Path

from whet.config.schema import RewardConfig, RewardModelConfig
from whet.config.sizes import Shape, cache_dtype, folder_shape

JUDGES = {"judge": False, "ruler": True}
"""Built-in functions (`whet.rewards.judge`), and whether each compares the replies to a task."""
CONTEXTS = 4
"""The judge's cache holds so many questions of full length; shorter ones, more."""
_POSITIONS = 4096
"""Of a model whose config.json does not say it."""


def is_judge(reward: RewardConfig) -> bool:
    """Whether its judge is a model of the run."""
    return reward.model is not None and reward.function in JUDGES


def longest(model: RewardModelConfig, shape: Shape) -> int:
    """Tokens of a question and its answer, at most."""
    return model.max_tokens or shape.max_positions or _POSITIONS


def cache_bytes(model: RewardModelConfig, *, device: str, dtype: str) -> int:
    """Of the judge's KV cache. dtype: of its weights."""
    shape = folder_shape(Path(model.path).expanduser(), {})
    return shape.kv_bytes(rows=CONTEXTS, tokens=longest(model, shape), dtype=cache_dtype(device, dtype))
