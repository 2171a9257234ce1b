"""Attention structure of a packed batch: `Segments`, the plan that every attention path of whet reads.

Shape letters: N packed tokens, S segments. A group that shares its prompt is one segment for the prompt and one for
each response, whose prefix is that prompt: the prompt is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BUCKET_WASTE = 1.5
"""A bucket's padded area is at most this times its real area."""
_BUCKET_SCORES = 1 << 22
"""Scores (query x key, one head) of a bucket, so that a bucket's score tensor stays small."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of a packed batch. All fields [S] int64 on the CPU.

    Segment s asks with packed tokens q_start .. q_start+q_len-1. Its keys are the shared prefix, packed
    tokens prefix_start .. prefix_start+prefix_len-1 (prefix_len may be 0), followed by its own tokens. Query
    i stands at position prefix_len+i and sees the positions up to its own (with a window: 0 <= q_pos - k_pos
    < window). Every packed token is a query of exactly one segment; a prefix lies inside one segment that has
    no prefix.
    """

    q_start_S: Tensor
    q_len_S: Tensor
    prefix_start_S: Tensor
    prefix_len_S: Tensor

    def __post_init__(self) -> None:
        for name in ("q_start_S", "q_len_S", "prefix_start_S", "prefix_len_S"):
            field = getattr(self, name)
            if field.dtype != torch.int64 or field.device.type != "cpu" or field.dim() != 1:
                raise ValueError(
                    f"Segments.{name} must be 1-D int64 on the CPU, got {field.dtype} {field.device}"
                )
            object.__setattr__(self, name, field.contiguous())
        order_S = torch.argsort(self.q_start_S, stable=True)
        start_S, len_S = self.q_start_S[order_S], self.q_len_S[order_S]
        if bool((self.prefix_len_S < 0).any()) or bool((self.q_len_S < 0).any()):
            raise ValueError("Segments: a length is negative")
        if not torch.equal(start_S, torch.cumsum(len_S, 0) - len_S):
            raise ValueError("Segments: every packed token must be a query of exactly one segment")
        _ = self.family_S  # validates the prefixes

    @classmethod
    def of_lengths(cls, length_S: Tensor) -> Segments:
        """Separate sequences, packed one after the other, nothing shared."""
        length_S = length_S.to(torch.int64)
        none_S = torch.zeros_like(length_S)
        return cls(torch.cumsum(length_S, 0) - length_S, length_S, none_S, none_S)

    @property
    def tokens(self) -> int:
        """N, the number of packed tokens."""
        return int(self.q_len_S.sum())

    @cached_property
    def position_N(self) -> Tensor:
        """[N] int64: the position of each packed token in its own sequence."""
        order_S = torch.argsort(self.q_start_S, stable=True)
        base_S = (self.prefix_len_S - self.q_start_S)[order_S]
        return torch.arange(self.tokens) + torch.repeat_interleave(base_S, self.q_len_S[order_S])

    @cached_property
    def family_S(self) -> Tensor:
        """[S] int64: the segment whose keys this one shares (itself where it has no prefix)."""
        own_S = torch.arange(len(self.q_start_S))
        if not bool((self.prefix_len_S > 0).any()):
            return own_S
        real_S = torch.nonzero(self.q_len_S > 0).squeeze(1)
        real_S = real_S[torch.argsort(self.q_start_S[real_S], stable=True)]
        at_S = torch.searchsorted(self.q_start_S[real_S], self.prefix_start_S, right=True) - 1
        root_S = torch.where(self.prefix_len_S > 0, real_S[at_S.clamp(min=0)], own_S)
        inside = (self.prefix_start_S >= self.q_start_S[root_S]) & (
            self.prefix_start_S + self.prefix_len_S <= self.q_start_S[root_S] + self.q_len_S[root_S]
        )
        if bool(((self.prefix_len_S > 0) & ~(inside & (self.prefix_len_S[root_S] == 0))).any()):
            raise ValueError("Segments: a prefix must lie inside one segment that has no prefix itself")
        return root_S

    @cached_property
    def by_family(self) -> tuple[Tensor, Tensor]:
        """(order [S], start [F+1]): segments sorted by family, and where each family starts in that order."""
        order_S = torch.argsort(self.family_S, stable=True)
        _, count_F = torch.unique_consecutive(self.family_S[order_S], return_counts=True)
        start_F = torch.zeros(len(count_F) + 1, dtype=torch.int64)
        start_F[1:] = torch.cumsum(count_F, 0)
        return order_S.contiguous(), start_F

    @cached_property
    def buckets(self) -> tuple[tuple[Bucket, ...], Tensor]:
        """(buckets, row_N): segments of like size padded together, for the PyTorch path; row_N [N] says in
        which row of the concatenated bucket queries each packed token lies."""
        found = tuple(self._bucket(part_S) for part_S in self._cut())
        row_N = torch.empty(self.tokens, dtype=torch.int64)
        base = 0
        for bucket in found:
            rows_BQ = base + torch.arange(bucket.query_BQ.numel()).view_as(bucket.query_BQ)
            row_N[bucket.query_BQ[bucket.live_BQ]] = rows_BQ[bucket.live_BQ]
            base += bucket.query_BQ.numel()
        return found, row_N

    @cached_property
    def _placed(self) -> dict[tuple[str, torch.device], Any]:
        return {}

    def buckets_on(self, device: torch.device) -> tuple[tuple[Bucket, ...], Tensor]:
        """`buckets` on a device: copied once, for all layers and for the backward pass."""
        at = ("buckets", device)
        if at not in self._placed:
            found, row_N = self.buckets
            self._placed[at] = tuple(bucket.to(device) for bucket in found), row_N.to(device)
        placed: tuple[tuple[Bucket, ...], Tensor] = self._placed[at]
        return placed

    def contiguous_on(self, device: torch.device) -> ContiguousSegments:
        """Every segment's keys in one piece, for kernels of variable length; on a device, copied once."""
        at = ("runs", device)
        if at not in self._placed:
            self._placed[at] = self._contiguous(device)
        placed: ContiguousSegments = self._placed[at]
        return placed

    def _contiguous(self, device: torch.device) -> ContiguousSegments:
        query_N = ranges(self.q_start_S, self.q_len_S)
        starts = torch.stack((self.prefix_start_S, self.q_start_S), 1).flatten()
        lens = torch.stack((self.prefix_len_S, self.q_len_S), 1).flatten()
        key_len_S = self.prefix_len_S + self.q_len_S
        return ContiguousSegments(
            query_N=query_N.to(device),
            key_T=ranges(starts, lens).to(device),
            back_N=torch.argsort(query_N).to(device),
            bounds=Bounds.of(self.q_len_S, key_len_S, device),
        )

    def _cut(self) -> Iterator[Tensor]:
        key_S = self.q_len_S + self.prefix_len_S
        order = [s for s in torch.argsort(key_S * (1 << 24) + self.q_len_S).tolist() if self.q_len_S[s] > 0]
        q_len, k_len = self.q_len_S.tolist(), key_S.tolist()
        part: list[int] = []
        real = q_max = 0
        for s in order:
            area = max(q_max, q_len[s]) * k_len[s] * (len(part) + 1)
            fits = area <= _BUCKET_WASTE * (real + q_len[s] * k_len[s]) and area <= _BUCKET_SCORES
            if part and not fits:
                yield torch.tensor(part)
                part, real, q_max = [], 0, 0
            part.append(s)
            real, q_max = real + q_len[s] * k_len[s], max(q_max, q_len[s])
        if part:
            yield torch.tensor(part)

    def _bucket(self, part_B: Tensor) -> Bucket:
        q_len_B1, p_len_B1 = self.q_len_S[part_B, None], self.prefix_len_S[part_B, None]
        q_start_B1, p_start_B1 = self.q_start_S[part_B, None], self.prefix_start_S[part_B, None]
        i_Q = torch.arange(int(q_len_B1.max()))
        t_W = torch.arange(-(-int((q_len_B1 + p_len_B1).max()) // 16) * 16)
        # a dead query row repeats the last live one, so that no row is fully masked (softmax would give NaN)
        i_BQ = torch.minimum(i_Q[None], q_len_B1 - 1)
        t_BW = torch.minimum(t_W[None], p_len_B1 + q_len_B1 - 1)
        return Bucket(
            query_BQ=q_start_B1 + i_BQ,
            live_BQ=i_Q[None] < q_len_B1,
            position_BQ=p_len_B1 + i_BQ,
            key_BW=torch.where(t_BW < p_len_B1, p_start_B1 + t_BW, q_start_B1 + t_BW - p_len_B1),
        )


@dataclass(frozen=True, eq=False)
class Bucket:
    """Segments padded to one shape: B segments, Q query rows, W keys (a multiple of 16)."""

    query_BQ: Tensor
    """Packed token of each query row; rows that are not live repeat the last live one."""
    live_BQ: Tensor
    position_BQ: Tensor
    key_BW: Tensor
    """Packed token of each key, at its position; keys past the end repeat the last one (causality hides
    them)."""

    def to(self, device: torch.device) -> Bucket:
        moved = (x.to(device) for x in (self.query_BQ, self.live_BQ, self.position_BQ, self.key_BW))
        return Bucket(*moved)

    def visible(self, window: int | None) -> Tensor:
        """[B, Q, W] bool: which keys each query sees."""
        at_W = torch.arange(self.key_BW.shape[1], device=self.position_BQ.device)
        back_BQW = self.position_BQ[:, :, None] - at_W
        return (back_BQW >= 0) if window is None else (back_BQW >= 0) & (back_BQW < window)


@dataclass(frozen=True, eq=False)
class Bounds:
    """Where sequences begin and end in packed queries and keys, as kernels of variable length read it."""

    query_S: Tensor
    """[S + 1] int32"""
    key_S: Tensor
    longest: tuple[int, int]
    """Most queries and most keys of a sequence."""

    @staticmethod
    def of(q_len_S: Tensor, key_len_S: Tensor, device: torch.device) -> Bounds:
        """The lengths are on the CPU."""
        query_S, key_S = (
            F.pad(torch.cumsum(length_S, 0), (1, 0)).to(torch.int32).to(device)
            for length_S in (q_len_S, key_len_S)
        )
        return Bounds(query_S, key_S, (int(q_len_S.max()), int(key_len_S.max())))


@dataclass(frozen=True, eq=False)
class ContiguousSegments:
    """Segments with their keys in one piece each: a shared prefix is there once for each segment."""

    query_N: Tensor
    """Packed tokens, segment after segment."""
    key_T: Tensor
    """Packed token of each key."""
    back_N: Tensor
    """Where in the order of `query_N` each packed token is."""
    bounds: Bounds


def ranges(start_S: Tensor, len_S: Tensor) -> Tensor:
    """start_0, start_0+1, ... , start_1, ...: the concatenated ranges."""
    base_S = start_S - (torch.cumsum(len_S, 0) - len_S)
    return torch.arange(int(len_S.sum())) + torch.repeat_interleave(base_S, len_S)
