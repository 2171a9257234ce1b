"""What sampling has computed of each token, for the backward pass of training with the same weights.

Sampling and training compute a token alike to the bit (ARCHITECTURE.md, section 6). So a layer's products and its
attention, which sampling had to compute, need not be computed again: training takes them from here, recomputes what is
cheap (norms, rotations, the gated unit), and goes backward. No bit of the gradient changes.

An engine that keeps activations writes those of every token that it feeds into rows of one memory, and says which rows
a history has. Training asks for the histories of a packed batch. All is forgotten when the weights change.

Shape letters: L layers, C rows of the memory, W numbers of a kind, N tokens of a call, U packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from whet.models.lazy_memory import lazy_zeros
from whet.models.segments import Segments


class LayerOutput(IntEnum):
    """What is kept of a token in a layer, in the order of kernels.c and of `Shape.layer_outputs`: the result of each
    projection, of attention (SEEN), and the log-sum-exp of its scores (LSE)."""

    Q = 0
    K = 1
    V = 2
    SEEN = 3
    LSE = 4
    O = 5  # noqa: E741
    GATE = 6
    UP = 7
    DOWN = 8


class NewRows(NamedTuple):
    """Rows for new tokens, side by side."""

    kinds: tuple[Tensor, ...]
    """[L, C, W] of each kind."""
    first: int
    tokens: int


class Activations:
    """Of up to `rows` tokens, in float32."""

    def __init__(self, width_of: Sequence[int], *, layers: int, rows: int = 0) -> None:
        self.width_of, self.layers = tuple(width_of), layers
        self.kinds: tuple[Tensor, ...] = ()
        self.on = False
        """Tokens that are computed now will be trained with the same weights."""
        self.first = self.next = 0
        """Numbers of the first row that is known, and of the next one. A number is given once: after `forget` the same
        memory has others."""
        self.known: dict[bytes, np.ndarray] = {}
        """The rows of a history, by its tokens."""
        self.resize(rows)

    def resize(self, rows: int) -> None:
        """Make room for so many tokens, in place of what there was; 0: nothing is kept from here on. Memory that no
        token has reached is not taken.

        Raises MemoryError where there are no addresses for it; then nothing is kept."""
        self.forget()
        self.rows, self.kinds = 0, ()
        if rows:
            shapes = ((self.layers, rows, width) for width in self.width_of)
            self.kinds = tuple(lazy_zeros(shape, dtype=torch.float32) for shape in shapes)
        self.rows = rows

    # -- while sampling

    def take(self, tokens: int) -> int | None:
        """The number of the first of so many rows, which lie side by side. None where they are not to be kept, or there
        is no room."""
        if not self.on or self.next - self.first + tokens > self.rows:
            return None
        start, self.next = self.next, self.next + tokens
        return start

    def at(self, start: int, tokens: int) -> NewRows:
        """Those of so many tokens from this number on, to be written."""
        return NewRows(self.kinds, start - self.first, tokens)

    def note(self, tokens: Sequence[int], number_N: np.ndarray) -> None:
        """A history of these tokens has been computed; these are the numbers of its rows. It is known where all are."""
        if len(tokens) and number_N.min() >= self.first:
            self.known[_key(np.array(tokens))] = number_N - self.first

    def forget(self) -> None:
        """The weights have changed: no row is known."""
        self.first = self.next
        self.known.clear()

    # -- while training

    def find(self, segments: Segments, token_ids_U: Tensor) -> PackedActivations | None:
        """Those of a packed batch. None unless it has tokens, and all are known."""
        if not self.known or not len(token_ids_U):
            return None
        tokens = token_ids_U.numpy()
        rows = np.full(len(tokens), -1)
        columns = (segments.q_start_S, segments.q_len_S, segments.prefix_start_S, segments.prefix_len_S)
        for start, length, prefix, shared in zip(*(x.tolist() for x in columns)):
            pieces = (slice(prefix, prefix + shared), slice(start, start + length))
            found = self.known.get(_key(np.concatenate([tokens[piece] for piece in pieces])))
            if found is not None:
                rows[pieces[0]], rows[pieces[1]] = found[:shared], found[shared:]
        if rows.min() < 0:
            return None
        return PackedActivations(self.kinds, torch.from_numpy(rows))


def _key(tokens: np.ndarray) -> bytes:
    return tokens.astype(np.int64, copy=False).tobytes()


class KnownOutputs(Protocol):
    """Asked by a forward of packed tokens for each result of each layer."""

    def given(self, layer: int, kind: LayerOutput) -> Callable[[], Tensor] | None:
        """What gives the result [U, W]; None: it is to be computed."""

    def note(self, layer: int, kind: LayerOutput, result_UW: Tensor) -> None:
        """It is this."""


@dataclass(frozen=True, eq=False)
class PackedActivations:
    """Those of the tokens of a packed batch, in the place of results."""

    kinds: tuple[Tensor, ...]
    row_U: Tensor

    def of(self, layer: int, kind: LayerOutput) -> Tensor:
        """[U, W], a copy."""
        return self.kinds[kind][layer].index_select(0, self.row_U)

    def given(self, layer: int, kind: LayerOutput) -> Callable[[], Tensor] | None:
        return partial(self.of, layer, kind)

    def note(self, layer: int, kind: LayerOutput, result_UW: Tensor) -> None:
        pass


@dataclass
class Comparison:
    """Results are computed and compared with activations."""

    found: PackedActivations
    differs: float | None = None
    """The largest difference; None: all bits are equal."""

    def given(self, layer: int, kind: LayerOutput) -> Callable[[], Tensor] | None:
        return None

    def note(self, layer: int, kind: LayerOutput, result_UW: Tensor) -> None:
        kept_UW = self.found.of(layer, kind)
        if not torch.equal(kept_UW, result_UW.reshape_as(kept_UW)):
            apart = float((kept_UW - result_UW.reshape_as(kept_UW)).abs().max())
            self.differs = max(apart, self.differs or 0.0)
