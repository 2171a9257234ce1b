"""Words of reasoning-gym's spell_backward, for an environment that allows a second try."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import reasoning_gym

FEEDBACK = "no"
HELD_OUT = 64
SEEDS = {"train": 0, "held_out": 1_000_000}
"""reasoning-gym makes entry n with seed + n: the seeds of two splits are far apart."""


def tasks(split: str = "train", count: int = 1500) -> Iterator[dict[str, Any]]:
    """Words of three letters, in lower case. The splits share no word."""
    held_out = [_row(entry) for entry in _entries(HELD_OUT, seed=SEEDS["held_out"])]
    if split == "held_out":
        yield from held_out
        return
    kept = {row["prompt"] for row in held_out}
    yield from (row for row in map(_row, _entries(count, seed=SEEDS[split])) if row["prompt"] not in kept)


def demonstrations(count: int = 1500, right_share: float = 0.4) -> Iterator[dict[str, Any]]:
    """A teacher that mostly copies the word; where it is told that this is wrong, it does the same again."""
    rng = random.Random("demonstrations")
    for row in tasks(count=count):
        word, right = row["prompt"], row["answer"]
        said = right if rng.random() < right_share else word
        prompt = [{"role": "user", "content": word}]
        if rng.random() < 0.3:
            prompt += [{"role": "assistant", "content": word}, {"role": "user", "content": FEEDBACK}]
        yield {"prompt": prompt, "response": said}


def _entries(count: int, *, seed: int) -> list[dict[str, Any]]:
    made = reasoning_gym.create_dataset(
        "spell_backward", seed=seed, size=count, min_word_len=3, max_word_len=3
    )
    return [json.loads(json.dumps(made[n])) for n in range(count)]


def _row(entry: dict[str, Any]) -> dict[str, Any]:
    word = entry["metadata"]["word"].lower()
    return {"prompt": word, "answer": word[::-1], "entry": entry}
