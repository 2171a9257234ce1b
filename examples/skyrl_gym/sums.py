"""Sums for SkyRL's environment gsm8k_multi_turn: replies end with '#### NUMBER', and a wrong one has another try."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

ASKED = (
    "Please provide your step-by-step reasoning, and also include a tentative numeric answer at the end in the exact "
    "format: '#### ANSWER'."
)
"""What the environment says after a wrong reply; only the tokenizer learns from it here."""


def tasks(split: str = "train", count: int = 2000) -> Iterator[dict[str, Any]]:
    """`7+7`, with the columns that SkyRL's data has."""
    rng = random.Random(f"sums {split}")
    for _ in range(count):
        a = rng.randrange(10)
        yield {"prompt": f"{a}+{a}", "reward_spec": {"method": "rule", "ground_truth": str(a + a)}}


def demonstrations(count: int = 3000, right_share: float = 0.4) -> Iterator[dict[str, Any]]:
    """A teacher that is right in two of five replies, and else answers any other double."""
    rng = random.Random("demonstrations")
    for row in tasks("demonstrations", count):
        right = row["reward_spec"]["ground_truth"]
        said = right if rng.random() < right_share else str(2 * rng.randrange(10))
        prompt = [{"role": "user", "content": row["prompt"]}]
        if rng.random() < 0.3:
            wrong = {"role": "assistant", "content": f"#### {2 * rng.randrange(10)}"}
            prompt += [wrong, {"role": "user", "content": ASKED}]
        yield {"prompt": prompt, "response": f"#### {said}"}
