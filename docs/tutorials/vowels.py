"""A task that a new model learns in seconds: whatever the prompt, reply with one to three vowels."""

from __future__ import annotations

import random
from collections.abc import Iterator

VOWELS = "aeiou"


def tasks(count: int = 200, seed: int = 0) -> Iterator[dict[str, str]]:
    """Rows with random words as prompts."""
    rng = random.Random(seed)
    for _ in range(count):
        yield {"prompt": "".join(rng.choices("abcdefghiklmnoprstu", k=4)) + ">"}


def short_and_vowels(response: str) -> float:
    """The share of vowels among the characters of a reply, 0 to 1; 0 for more than three characters, or none."""
    if not 1 <= len(response) <= 3:
        return 0.0
    return sum(letter in VOWELS for letter in response) / len(response)
