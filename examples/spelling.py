"""Data of the demo: spell a word backwards; the demonstrations mostly copy the word instead.

Words of 3 to 5 letters from reasoning-gym's `spell_backward`, in lower case. Three sets share no word:
held-out (the same for every seed), demonstrations, and the pool for RL. 60 % of the demonstrations are wrong
on purpose: SFT learns this error, RL with the verifier's 0/1 score unlearns it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from whet import seeds

TASK = "spell_backward"
HELD_OUT, HELD_OUT_SEED = 256, 777
DEMONSTRATIONS, POOL = 6000, 3900


def words(split: str, *, seed: int = 0, count: int | None = None) -> list[dict[str, Any]]:
    """Rows {prompt 'word>', answer, reasoning_gym, entry} of 'held_out' or 'pool'; count: only the first
    `count` rows.
    """
    entries = {"held_out": _held_out, "pool": lambda: _training(seed)[DEMONSTRATIONS:]}[split]()
    return [_row(word, entry) for word, entry in entries[:count]]


def demonstrations(
    *, count: int = DEMONSTRATIONS, seed: int = 0, right_share: float = 0.4
) -> list[dict[str, Any]]:
    """`words` with a response: the word reversed with probability right_share, else copied, drawn once per
    word.
    """
    if not 0 < count <= DEMONSTRATIONS:
        raise ValueError(f"count={count}: there are {DEMONSTRATIONS} demonstrations")
    right = seeds.uniforms(seeds.key(seed, "demonstrations"), 0, count) < right_share
    return [
        {**_row(word, entry), "response": word[::-1] if ok else word}
        for (word, entry), ok in zip(_training(seed), right)
    ]


def _row(word: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": f"{word}>", "answer": word[::-1], "reasoning_gym": TASK, "entry": entry}


def _held_out() -> list[tuple[str, dict[str, Any]]]:
    return list(itertools.islice(_distinct(HELD_OUT_SEED), HELD_OUT))


def _training(seed: int) -> list[tuple[str, dict[str, Any]]]:
    """The demonstrations' words, then the pool's."""
    held_out = {word for word, _ in _held_out()}
    fresh = (found for found in _distinct(1_000_000 * (seed + 1)) if found[0] not in held_out)
    return list(itertools.islice(fresh, DEMONSTRATIONS + POOL))


def _distinct(seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(word, entry) in the order that reasoning-gym draws them, each word once."""
    import reasoning_gym  # a second; ranks and reward processes, which draw no words, import this file, too

    seen: set[str] = set()
    for entry in reasoning_gym.create_dataset(
        TASK, min_word_len=3, max_word_len=5, seed=seed, size=1_000_000
    ):
        word = entry["metadata"]["word"].lower()
        if word not in seen:
            seen.add(word)
            yield word, _plain(entry)


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """The part of an entry that the verifier reads; the rest holds tuples, which JSON has not."""
    return {"question": entry["question"], "answer": entry["answer"], "metadata": {"source_dataset": TASK}}
