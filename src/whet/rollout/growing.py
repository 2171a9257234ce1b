"""A strand of tokens that is being sampled."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from math import nan

import numpy as np

from whet.types import Completion, ExpertIds, Strand, Turn

NOT_SAMPLED, SAMPLED = array("b", [0]), array("b", [1])
ZERO, UNKNOWN = array("f", [0.0]), array("f", [nan])
NO_VERSION = array("i", [-1])


class Growing:
    """A strand in the making: 17 bytes a token, as in `Strand`, so that long conversations may wait for their turns."""

    def __init__(self, token_ids: Iterable[int], key: int) -> None:
        self.key = key
        """Of its random numbers."""
        self.token_ids = array("i")
        self.mask = array("b")
        self.logprobs = array("f")
        self.sample_logprobs = array("f")
        self.versions = array("i")
        self.sampled = 0
        """Tokens that the policy has sampled: the sum of the mask."""
        self.turns: list[Turn] = []
        self.experts: ExpertIds | None = None
        """Of the tokens that the engine has computed so far, each as it was computed first."""
        self.add_observation(token_ids)

    def add_observation(self, token_ids: Iterable[int]) -> None:
        """Tokens that the policy did not sample."""
        start = len(self.token_ids)
        self.token_ids.extend(token_ids)
        count = len(self.token_ids) - start
        self.mask.extend(NOT_SAMPLED * count)
        self.logprobs.extend(ZERO * count)
        self.sample_logprobs.extend(ZERO * count)
        self.versions.extend(NO_VERSION * count)

    def add_completion(self, completion: Completion) -> None:
        """Tokens that it did."""
        count = len(completion.token_ids)
        self.token_ids.extend(completion.token_ids)
        self.mask.extend(SAMPLED * count)
        self.logprobs.extend(UNKNOWN * count if completion.logprobs is None else completion.logprobs)
        told = completion.sample_logprobs
        self.sample_logprobs.extend(UNKNOWN * count if told is None else told)
        self.versions.extend(completion.versions)
        self.sampled += count
        if completion.experts is not None:
            before = completion.experts[:0] if self.experts is None else self.experts
            self.experts = np.concatenate((before, completion.experts[len(before) :]))
        end = len(self.token_ids)
        self.turns.append(Turn(end - count, end, completion.finish_reason))

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
