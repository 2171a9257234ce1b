"""Tiny models for tests."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from whet.config.schema import ModelConfig
from whet.models.load import build

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "qwen3_moe", "gpt_oss")
SPARSE = ("qwen3_moe", "gpt_oss")
"""Mixtures of experts."""
FEW = [
    each if each in ("qwen3", "qwen3_moe") else pytest.param(each, marks=pytest.mark.sweep)
    for each in FAMILIES
]
"""For what does not depend on the family: one of dense layers and one of experts; the others in the sweep."""
VOCAB = 61
DEVICE = os.environ.get("WHET_TEST_DEVICE", "cpu")
"""Where the models of contract suites are: `make check-gpu` runs these on CUDA."""
LETTERS: dict[str, Any] = {
    "model": {
        "scratch": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
        }
    },
    "tokenizer": {"build": "chars"},
    "data": {"max_prompt_tokens": 16, "train": [{"path": "tests/data/words.jsonl"}]},
    "rewards": {"letters": {"function": "tests/resume/rewards.py:shared_letters"}},
    "rollout": {"group_size": 4, "sampling": {"max_tokens": 6}},
    "track": {"trackers": ["jsonl"]},
    "machine": {"threads": 1},
}
"""A run of a few steps, on ranks or not, but for its section `train`."""
RUN: dict[str, Any] = {
    "model": {
        "scratch": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 32,
        }
    },
    "tokenizer": {"build": "chars"},
    "data": {"max_prompt_tokens": 8, "train": [{"path": "tests/data/words.jsonl"}]},
    "rewards": {"letters": {"function": "tests/resume/rewards.py:shared_letters"}},
    "rollout": {"group_size": 2, "sampling": {"max_tokens": 4}},
    "train": {"steps": 3, "tasks_per_step": 4, "optimizer": {"lr": 1e-2}},
    "machine": {"threads": 1},
    "track": {"trackers": ["jsonl"]},
}
"""A run of a few seconds, from the root of the checkout. Not to be written to."""


def tiny_model(family: str = "qwen3", *, seed: int = 0, layers: int = 2, std: float = 0.1) -> PreTrainedModel:
    scratch = {
        "name": family,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_experts": 4,
        "initializer_range": std,
        "sliding_window": 8 if family in ("mistral", "gpt_oss") else None,
    }
    return build(
        ModelConfig(scratch=scratch),
        vocab_size=VOCAB,
        eos_token_id=1,
        pad_token_id=0,
        seed=seed,
        device=DEVICE,
        dtype=torch.float32,
    )
