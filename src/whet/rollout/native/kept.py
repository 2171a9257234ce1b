"""Which rows of `Activations` the tokens in the cache have: page by page, as their keys and values lie. So what finds
its history in the cache finds its activations too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from whet.models.activations import Activations
from whet.models.attention import PAGE, CachedAttention


class KeptPages:
    """Of so many pages."""

    def __init__(self, kept: Activations, pages: int) -> None:
        self.kept = kept
        self.number = torch.full((pages, PAGE), -1)

    def around(self, forward: Callable[[], Tensor], attend: CachedAttention) -> Tensor:
        """What a forward of new tokens makes; their activations are kept where there is room."""
        tokens, number_N = len(attend.page_N), torch.tensor(-1)
        start = self.kept.take(tokens)
        if start is not None:
            attend.kept = self.kept.at(start, tokens)
        hidden_UD = forward()
        if start is not None and attend.written:
            number_N = torch.arange(start, start + tokens)
        self.number[attend.page_N, attend.slot_N] = number_N
        return hidden_UD

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        self.number[target] = self.number[source]

    def note(self, page_P: Tensor, tokens: Sequence[int]) -> None:
        """A row has these tokens in these pages."""
        if self.kept.on:
            number_PS = self.number.numpy()[page_P.numpy()]
            self.kept.note(tokens, number_PS.reshape(-1)[: len(tokens)])
