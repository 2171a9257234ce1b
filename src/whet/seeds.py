"""Counter-based randomness: a random number is a pure function of its name.

The uniform number for (run seed, task, rollout index, token position) depends on nothing else, so what is
sampled depends neither on the batch it was sampled in nor on an interruption. Mixing: the splitmix64
finaliser (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195), chained over the parts of the name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """splitmix64 finaliser on one 64-bit number."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key(*parts: int | str) -> int:
    """A 64-bit key for a name, e.g. `key(seed, "shuffle", epoch)`. Order matters; text is hashed with BLAKE2."""
    out = 0
    for part in parts:
        if isinstance(part, str):
            part = int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little")
        out = mix(out ^ (part & _MASK))
    return out


def rollout_key(
    seed: int, task: int, index: int, *, purpose: str = "train", fork: tuple[int, ...] = ()
) -> int:
    """The sampling stream of one rollout. `purpose` keeps evaluation apart from training. fork: names a part of the
    rollout that does not continue its first tokens; (): no fork."""
    return key(seed, purpose, task, index, *fork)


def uniforms(stream: int, start: int, count: int) -> np.ndarray:
    """[count] float64 in [0, 1): the numbers of positions start .. start+count-1 of a stream."""
    return uniform_table(np.array([stream], dtype=np.uint64), start, count)[0]


def uniform_table(streams: np.ndarray | Sequence[int], start: int, count: int) -> np.ndarray:
    """[len(streams), count] float64 in [0, 1); row r is `uniforms(streams[r], start, count)`."""
    streams = np.asarray(streams, dtype=np.uint64)
    with np.errstate(over="ignore"):
        position = np.arange(start, start + count, dtype=np.uint64)
        x = (streams[:, None] ^ position[None, :]) + np.uint64(_GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(stream: int, n: int) -> np.ndarray:
    """[n] int64: a permutation of 0..n-1 that is a pure function of the stream."""
    return np.random.Generator(np.random.Philox(key=stream)).permutation(n)
