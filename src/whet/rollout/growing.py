"""A strand of tokens that is being sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from whet.types import Completion, ExpertIds, Strand, Turn


@dataclass
class Growing:
    """A strand in the making."""

    token_ids: list[int]
    key: int
    """Of its random numbers."""
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sample_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    experts: ExpertIds | None = None
    """Of the tokens that the engine has computed so far, each as it was computed first."""

    def __post_init__(self) -> None:
        self._fill(len(self.token_ids))

    def add_observation(self, token_ids: list[int]) -> None:
        """Tokens that the policy did not sample."""
        self.token_ids += token_ids
        self._fill(len(token_ids))

    def add_completion(self, completion: Completion) -> None:
        """Tokens that it did."""
        self.token_ids += completion.token_ids
        self.mask += [1] * len(completion.token_ids)
        unknown = [math.nan] * len(completion.token_ids)
        self.logprobs += unknown if completion.logprobs is None else completion.logprobs
        self.sample_logprobs += unknown if completion.sample_logprobs is None else completion.sample_logprobs
        self.versions += completion.versions
        if completion.experts is not None:
            before = completion.experts[:0] if self.experts is None else self.experts
            self.experts = np.concatenate((before, completion.experts[len(before) :]))
        end = len(self.token_ids)
        self.turns.append(Turn(end - len(completion.token_ids), end, completion.finish_reason))

    def _fill(self, count: int) -> None:
        self.mask += [0] * count
        self.logprobs += [0.0] * count
        self.sample_logprobs += [0.0] * count
        self.versions += [-1] * count

    def strand(self) -> Strand:
        return Strand(
            token_ids=np.array(self.token_ids, np.int32),
            mask=np.array(self.mask, np.bool_),
            logprobs=np.array(self.logprobs, np.float32),
            sample_logprobs=np.array(self.sample_logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            turns=tuple(self.turns),
            experts=self._experts(),
        )

    def _experts(self) -> ExpertIds | None:
        """`Strand.experts`."""
        if self.experts is None:
            return None
        rest = np.zeros(
            (len(self.token_ids) - len(self.experts), *self.experts.shape[1:]), self.experts.dtype
        )
        return np.concatenate((self.experts, rest))
