"""Tiny models for tests."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from whet.config.schema import Model, Scratch
from whet.models.load import build

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "qwen3_moe")
VOCAB = 61


def tiny_model(family: str = "qwen3", *, seed: int = 0, layers: int = 2, std: float = 0.1) -> PreTrainedModel:
    scratch = Scratch(
        architecture=family,  # type: ignore[arg-type]
        hidden_size=32,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn_size=48,
        experts=4,
        init_std=std,
        sliding_window=8 if family == "mistral" else None,
    )
    return build(
        Model(scratch=scratch),
        vocab_size=VOCAB,
        eos_token_id=1,
        pad_token_id=0,
        seed=seed,
        device="cpu",
        dtype=torch.float32,
    )
