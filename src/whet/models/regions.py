"""The part of a full tensor on a rank, as intervals of its dims: numbers only, no tensor is touched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

Span = tuple[int, int]
"""From (with), to (without)."""
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A region in one piece."""

    start: Sizes
    """Where it begins in the whole tensor."""
    size: Sizes
    at: Sizes
    """Where it begins in the region, as that lies on its rank."""

    @property
    def numbers(self) -> int:
        return prod(self.size)

    def here(self) -> tuple[slice, ...]:
        """It, in what lies on the rank."""
        return tuple(slice(a, a + n) for a, n in zip(self.at, self.size))

    def meets(self, start: Sequence[int], size: Sequence[int]) -> Box | None:
        """What this box of a region has in common with another box of the whole tensor; None: nothing."""
        low = tuple(max(a, b) for a, b in zip(self.start, start))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, start, size))
        if any(a >= b for a, b in zip(low, high)):
            return None
        at = tuple(x + a - b for x, a, b in zip(self.at, low, self.start))
        return Box(low, tuple(b - a for a, b in zip(low, high)), at)


@dataclass(frozen=True)
class Region:
    """A part of a tensor: of each dim some intervals, which lie on the rank one after the other."""

    shape: Sizes
    """Of the whole tensor."""
    spans: tuple[tuple[Span, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        return cls(tuple(shape), tuple(((0, n),) for n in shape))

    @property
    def here(self) -> Sizes:
        """The shape of the part."""
        return tuple(sum(b - a for a, b in spans) for spans in self.spans)

    def cut(self, dim: int, keep: Sequence[Span]) -> Region:
        """What is left if of one dim, as it lies here, these intervals are kept."""
        left = tuple(span for a, b in keep for span in _between(self.spans[dim], a, b))
        return Region(self.shape, (*self.spans[:dim], left, *self.spans[dim + 1 :]))

    def boxes(self) -> Iterator[Box]:
        """Its pieces; none where nothing is left."""
        placed = [list(_placed(spans)) for spans in self.spans]
        for chosen in product(*placed):
            yield Box(
                tuple(a for a, _, _ in chosen),
                tuple(b - a for a, b, _ in chosen),
                tuple(at for _, _, at in chosen),
            )


def _between(spans: Sequence[Span], low: int, high: int) -> Iterator[Span]:
    """The intervals that lie from `low` to `high` when all lie one after the other."""
    for a, b, at in _placed(spans):
        first, last = max(low, at), min(high, at + b - a)
        if first < last:
            yield a + first - at, a + last - at


def _placed(spans: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
    """(from, to, where it begins here)"""
    at = 0
    for a, b in spans:
        if a < b:
            yield a, b, at
        at += b - a
