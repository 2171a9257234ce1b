"""The experts of the tokens in the cache, where `NativeEngine` is asked for them: page by page, as their keys and
values are, so what finds its history in the cache finds its experts too.

Shape letters: U tokens of a forward, L layers, E experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from whet.models.attention import PAGE, CachedAttention, PackedAttention, Segments
from whet.models.forward import Decoder
from whet.models.kernels import Ops
from whet.models.routing import RouteRecorder, Routes
from whet.types import ExpertIds


@torch.no_grad()
def recordable(decoder: Decoder, ops: Ops, routes: Routes) -> Routes:
    """The routes, after a forward that has recorded some. ConfigError where routers do not choose as `routes` says."""
    device = decoder.head.linear.weight.device
    segments, recorder = Segments.of_lengths(torch.tensor([2])), RouteRecorder(routes)
    token_U, position_U = torch.tensor([0, 1], device=device), segments.position_N.to(device)
    decoder.hidden(token_U, position_U, PackedAttention(segments, ops), route=recorder)
    recorder.recorded()
    return routes


class RoutedPages:
    """Of so many pages."""

    def __init__(self, routes: Routes, pages: int, device: torch.device) -> None:
        self.routes = routes
        self.ids = torch.zeros(pages, PAGE, routes.layers, routes.experts, dtype=routes.dtype, device=device)

    def around(self, forward: Callable[..., Tensor], attend: CachedAttention) -> Tensor:
        """What a forward of new tokens makes; their experts are kept in their places."""
        recorder = RouteRecorder(self.routes)
        hidden_UD = forward(route=recorder)
        self.ids[attend.page_N, attend.slot_N] = recorder.recorded()
        return hidden_UD

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        self.ids[target] = self.ids[source]

    def of(self, pages: Sequence[int], start: int, end: int) -> ExpertIds:
        """[end - start, L, E] of a row's tokens from `start` on, before `end`."""
        first = start // PAGE
        page_P = torch.tensor(pages[first : -(-end // PAGE)], dtype=torch.int64, device=self.ids.device)
        ids: ExpertIds = self.ids[page_P].flatten(0, 1).cpu().numpy()
        return np.ascontiguousarray(ids[start - first * PAGE : end - first * PAGE])
