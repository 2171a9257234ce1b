"""What both sides of `train.py` share: the model's shape, the batch, the clock and the ceiling. Needs torch and
transformers alone, so that either environment can import it."""

from __future__ import annotations

import random
import resource
import time
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 512},
    "small": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6,
              "num_key_value_heads": 2, "vocab_size": 16_384},
    "qwen2.5-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                     "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936},
    "qwen2.5-1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                     "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151_936},
}  # fmt: skip
"""Qwen2.5's architecture; `small` has 19 million parameters."""

BATCHES: dict[str, dict[str, int]] = {
    "tiny": {"groups": 2, "size": 4, "prompt": 12, "reply": 16, "micro": 64},
    "small": {"groups": 4, "size": 8, "prompt": 128, "reply": 64, "micro": 1536},
    "qwen2.5-0.5b": {"groups": 8, "size": 8, "prompt": 512, "reply": 3584, "micro": 16_384},
    "qwen2.5-1.5b": {"groups": 8, "size": 8, "prompt": 512, "reply": 3584, "micro": 16_384},
}
"""Groups, rollouts of a group, longest prompt and reply in tokens, tokens of a micro-batch."""


def make_case(shape: str, device: str) -> dict[str, Any]:
    """JSON: groups of random tokens. Prompts have 3/4 to all of the longest length, replies 1/8 to all."""
    sizes, draw = BATCHES[shape], random.Random(0)

    def tokens(most: int, least: int) -> list[int]:
        return [draw.randrange(3, SHAPES[shape]["vocab_size"]) for _ in range(draw.randint(least, most))]

    groups = [
        {
            "prompt": tokens(sizes["prompt"], sizes["prompt"] * 3 // 4),
            "replies": [tokens(sizes["reply"], sizes["reply"] // 8) for _ in range(sizes["size"])],
            "advantages": [draw.gauss(0.0, 1.0) for _ in range(sizes["size"])],
        }
        for _ in range(sizes["groups"])
    ]
    return {"shape": shape, "device": device, "groups": groups, "micro_batch_tokens": sizes["micro"]}


def make_model(case: dict[str, Any], dtype: torch.dtype) -> Any:
    """Qwen2ForCausalLM with random weights: the same ones on both sides."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = SHAPES[case["shape"]]
    config = Qwen2Config(**shape, tie_word_embeddings=True, max_position_embeddings=32_768, pad_token_id=0)
    with torch.device(case["device"]):
        model: Any = Qwen2ForCausalLM(config)
        return model.to(dtype)


def now(device: str) -> float:
    """Seconds: of process CPU, so that other work on the machine counts less; on a GPU of the wall, when it is done."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def peak_mb(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ceiling(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a large square product: the best of ten."""
    n = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        start = now(device)
        torch.mm(a, b)
        best = min(best, now(device) - start)
    return 2 * n**3 / best
