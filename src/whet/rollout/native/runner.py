"""The tensors of the native engine: prefill and decode over the paged cache, one call a step for all live rows.

Letters: B live rows, S distinct prompts of a prefill, U their tokens, P pages of a row, V vocabulary, D hidden,
C columns (tokens a row may sample). A live row has a slot, its place in the buffers of what was sampled, and stands
at a cell of them: slot * C + tokens sampled since it was let in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from whet.models.attention import PAGE, CachedAttention, KvCache, PackedAttention, Segments
from whet.models.forward import decoder
from whet.models.kernels import Ops
from whet.models.logprobs import logits
from whet.rollout.native import sampler
from whet.rollout.native.scheduler import Admission, Request
from whet.rollout.native.sampler import Filters
from whet.seeds import uniform_table

SLOT, CELL, LAST, LENGTH, TOKEN, ENDS = range(6)
"""Rows of `Rows.state`: slot; cell of the next token; cell of the last one allowed; tokens in the cache; token to feed
next; where the end set starts in the flat table of end sets."""


@dataclass(frozen=True)
class Rows:
    """B live rows, compact; `state` is advanced in place, everything else holds until rows come or go."""

    requests: list[Request]
    state: Tensor
    """[6, B] int64, see SLOT..ENDS."""
    temperature: float | Tensor
    """One for all rows, or [B, 1]. 1 where a row is greedy."""
    special: Special | None
    watched: list[int]
    """Rows with stop strings."""

    def __len__(self) -> int:
        return len(self.requests)


@dataclass(frozen=True)
class Special:
    """The rows for which temperature is not all: E of the B."""

    at_E: Tensor
    filters: Filters
    first_E: Tensor
    """Cell from which on end tokens are allowed."""
    penalised: bool


def rows_of(requests: list[Request], state: Tensor, columns: int) -> Rows:
    """Live rows with the parameters of their requests as tensors."""
    device = state.device
    heat = [r.sampling.temperature or 1.0 for r in requests]
    special = [i for i, r in enumerate(requests) if not sampler.is_plain(r.sampling)]
    extra = None
    if special:
        samplings = [requests[i].sampling for i in special]
        at_E = torch.tensor(special, device=device)
        missing = [s.min_tokens - len(requests[i].token_ids) for i, s in zip(special, samplings)]
        first_E = state[SLOT, at_E] * columns + torch.tensor(missing, device=device)
        penalised = any(s.repetition_penalty != 1.0 for s in samplings)
        extra = Special(at_E, Filters.of(samplings, device), first_E, penalised)
    return Rows(
        requests=requests,
        state=state,
        temperature=heat[0] if len(set(heat)) == 1 else torch.tensor(heat, device=device)[:, None],
        special=extra,
        watched=[i for i, r in enumerate(requests) if r.stop_text is not None],
    )


class Runner:
    """Weights, cache, and everything that is sampled but not yet handed out."""

    def __init__(self, module: nn.Module, ops: Ops, *, max_batch: int, pages: int, max_context: int) -> None:
        self.ops, self.pages, self.columns = ops, pages, max_context
        self.adopt(module)
        weight = next(module.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.vocab = module.get_output_embeddings().weight.shape[0]
        self.allocate()
        cells = max_batch * max_context
        self.uniform = torch.empty(cells, dtype=torch.float64, device=self.device)
        self.token = torch.empty(cells, dtype=torch.int64, device=self.device)
        self.logp = torch.empty(cells, device=self.device)
        self.sample_logp = torch.empty(cells, device=self.device)
        self.table = torch.zeros(max_batch, -(-max_context // PAGE), dtype=torch.int32, device=self.device)
        self.seen_SV: Tensor | None = None
        self.free = list(range(max_batch - 1, -1, -1))
        self.end_sets: dict[frozenset[int], int] = {}
        self.end_table = torch.zeros(0, dtype=torch.bool, device=self.device)
        self.live = self._rows([], torch.zeros(6, 0, dtype=torch.int64, device=self.device))
        self.table_BP = self.table[:0]
