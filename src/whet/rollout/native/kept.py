"""Which rows of `Activations` the tokens in the cache have: page by page, as their keys and values lie. So what finds
its history in the cache finds its activations too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from whet.models.activations import Activations
from whet.models.attention import PAGE, CachedAttention
from whet.models.compiled_step import KeptStep


class KeptPages:
    """Of so many pages."""

    def __init__(self, kept: Activations, pages: int) -> None:
        self.kept = kept
        self.memory = torch.full((pages, PAGE), -1)
        self.number = self.memory.numpy()

    def around(self, forward: Callable[[], Tensor], attend: CachedAttention) -> Tensor:
        """What a forward of new tokens makes; their activations are kept where there is room."""
        place = attend.page_N.numpy(), attend.slot_N.numpy()
        step = self.of_step(len(place[0]))
        attend.kept = step.rows
        hidden_UD = forward()
        kept = step.rows is not None and attend.written
        self.number[place] = np.arange(step.first, step.first + len(place[0])) if kept else -1
        return hidden_UD

    def of_step(self, tokens: int) -> KeptStep:
        """Where the activations of so many new tokens go."""
        start = self.kept.take(tokens)
        if start is None:
            return KeptStep(self.memory, -1, None)
        return KeptStep(self.memory, start, self.kept.at(start, tokens))

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        self.number[target.numpy()] = self.number[source.numpy()]

    def note(self, page_P: Tensor, tokens: Sequence[int]) -> None:
        """A row has these tokens in these pages."""
        if self.kept.on:
            self.kept.note(tokens, self.number[page_P.numpy()].reshape(-1)[: len(tokens)])
