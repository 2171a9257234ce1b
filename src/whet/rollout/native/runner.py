"""The tensors of the native engine: prefill, and one decode step for all live rows, over the paged cache.

Letters: B live rows, E rows with filters, S slots, U the tokens of a prefill, P pages of a row, V
vocabulary, D hidden, C columns: the most tokens a row may sample. A live row has a slot, its place in the
buffers of what was sampled, and stands at a cell of them: slot * C + tokens sampled since it was let in.

On CPU a step has as many rows as are live. On CUDA its model part runs at fixed shapes, captured in graphs
(see `graphs`); a model that cannot be captured runs as on CPU, and the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from whet.models import paged
from whet.models.activations import Activations
from whet.models.attention import PAGE, CachedAttention, KvCache
from whet.models.compiled_step import Cells, CompiledStep
from whet.models.forward import Decoder, decoder
from whet.models.kernels import Ops
from whet.models.logprobs import logits
from whet.models.routing import Routes
from whet.models.torch_ops import bad_logits, cache_dtype
from whet.rollout.native import sampler
from whet.rollout.native.graphs import CannotCapture, CudaGraphs, FixedShapeStep, GraphRecorder
from whet.rollout.native.kept import KeptPages
from whet.rollout.native.routed import RoutedPages, recordable
from whet.rollout.native.sampler import Filters
from whet.rollout.native.scheduler import Admission, Generation, LiveRow
from whet.seeds import uniform_table
from whet.types import WhetError

log = logging.getLogger(__name__)

SLOT, LAST, ENDS, CELL, TOKEN, LENGTH = range(6)
"""Rows of `LiveRows.state`: its slot; the last cell it may fill; where its end set starts in `Runner.end_table`;
the cell to fill next; the token to feed next; tokens in the cache."""


@dataclass(frozen=True)
class Special:
    """The E of B rows for which temperature is not all."""

    at_E: Tensor
    filters: Filters
    first_E: Tensor
    """Cell from which on end tokens may be sampled."""
    penalised: bool


@dataclass(frozen=True)
class LiveRows:
    """B live rows, compact. `state` moves on in place; the rest holds until rows come or go."""

    requests: list[Generation]
    state: Tensor
    """[6, B] int64, see SLOT ... LENGTH."""
    temperature: float | Tensor
    """One for all, or [B]; 1 for greedy rows."""
    special: Special | None
    watched: list[int]
    """Rows with stop strings."""


def make_rows(requests: list[Generation], state: Tensor, *, columns: int) -> LiveRows:
    """The rows of these requests, [6, B] state."""
    heat = [r.sampling.temperature or 1.0 for r in requests]
    filtered = [i for i, r in enumerate(requests) if not r.plain]
    return LiveRows(
        requests=requests,
        state=state,
        temperature=heat[0]
        if len(set(heat)) == 1
        else torch.tensor(heat, dtype=torch.float32, device=state.device),
        special=_special(requests, filtered, state=state, columns=columns) if filtered else None,
        watched=[i for i, r in enumerate(requests) if r.stop_text is not None],
    )


def _special(requests: list[Generation], at: list[int], *, state: Tensor, columns: int) -> Special:
    samplings = [requests[i].sampling for i in at]
    at_E = torch.tensor(at, device=state.device)
    missing = [s.min_tokens - len(requests[i].token_ids) for i, s in zip(at, samplings)]
    return Special(
        at_E=at_E,
        filters=Filters.of(samplings, state.device),
        first_E=state[SLOT, at_E] * columns + torch.tensor(missing, device=state.device),
        penalised=any(s.repetition_penalty != 1.0 for s in samplings),
    )


class Runner:
    """Weights, cache, live rows, and what they have sampled.

    cache_mb: None: all rows at their longest. recorder: None: CUDA graphs on CUDA, variable shapes elsewhere.
    experts: the experts of all tokens are kept; such steps are no graphs.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        ops: Ops,
        *,
        max_num_seqs: int,
        columns: int,
        cache_mb: int | None,
        recorder: GraphRecorder | None = None,
        experts: bool = False,
        kept: Activations | None = None,
    ) -> None:
        self.ops, self.columns = ops, columns
        self.module, self.decoder = module, decoder(module, ops)
        self.routes = recordable(self.decoder, ops, Routes.of(module)) if experts else None
        self.pages = max_num_seqs * -(-columns // PAGE)
        if cache_mb is not None:
            self.pages = min(self.pages, (cache_mb << 20) // self.page_bytes)
        if self.pages < 1:
            raise WhetError(f"cache_mb={cache_mb} is less than one page of {self.page_bytes} bytes; raise it")
        self.device = self.decoder.head.linear.weight.device
        self.vocab = self.decoder.head.linear.out_features
        self.table_SP = torch.zeros(max_num_seqs, -(-columns // PAGE), dtype=torch.int32, device=self.device)
        if self.device.type == "cuda" and (why := paged.lacks()) is not None:
            log.warning("each decoded token copies the keys and values of its row: %s", why)
        self.recorder = recorder
        if experts:
            self.recorder = None
        elif recorder is None and self.device.type == "cuda":
            self.recorder = CudaGraphs(self.device)
        self.cache: KvCache | None = None
        self.routed: RoutedPages | None = None
        self.kept = None if kept is None else KeptPages(kept, self.pages)
        self.fixed: FixedShapeStep | None = None
        self.compiled: CompiledStep | None = None
        cells = max_num_seqs * columns
        self.uniform = torch.empty(cells, dtype=torch.float64, device=self.device)
        self.token = torch.empty(cells, dtype=torch.int64, device=self.device)
        self.logp = torch.empty(cells, device=self.device)
        self.sample_logp = torch.empty(cells, device=self.device)
        self.seen_SV: Tensor | None = None
        self.end_sets: dict[frozenset[int], int] = {}
        self.end_table = torch.zeros(0, dtype=torch.bool, device=self.device)
        self.clear()
        self.allocate()

    # -- memory and weights

    @property
    def page_bytes(self) -> int:
        """Memory of one page of the cache, all layers."""
        d, weight = self.decoder, self.decoder.head.linear.weight
        return (
            2 * d.layers * d.kv_heads * d.head_dim * PAGE * cache_dtype(weight.dtype, weight.device).itemsize
        )

    def allocate(self) -> None:
        """Take memory for the cache: the scheduler's pages, and one for padded rows to write into."""
        d = self.decoder
        self.cache = KvCache.allocate(
            layers=d.layers,
            pages=self.pages + 1,
            kv_heads=d.kv_heads,
            head_dim=d.head_dim,
            ops=self.ops,
            dtype=d.head.linear.weight.dtype,
            device=self.device,
        )
        if self.routes is not None:
            self.routed = RoutedPages(self.routes, self.pages, self.device)
        self._fix_shapes()

    def release(self) -> None:
        """Give the memory of the cache and the graphs back. No row may be live."""
        self.cache = self.fixed = self.compiled = self.routed = None

    def _fix_shapes(self) -> None:
        """Steps of this decoder on this cache, if they are captured at all, or made in one call."""
        self.fixed = self.compiled = None
        if self.cache is None:
            return
        if self.recorder is not None:
            self.fixed = FixedShapeStep(
                self.module,
                self.decoder,
                self.cache,
                ops=self.ops,
                recorder=self.recorder,
                scratch=self.pages,
                max_num_seqs=self.table_SP.shape[0],
                max_pages=self.table_SP.shape[1],
            )
        elif self.routes is None:
            self.compiled = CompiledStep.of(self.decoder, self.cache)

    def adopt(self, module: PreTrainedModel) -> None:
        """Sample from this module from now on. No row may be live."""
        if module is self.module:
            return
        new = decoder(module, self.ops)
        if _shape(new) != _shape(self.decoder):
            raise WhetError(
                f"the new module's layers, heads, head size and vocabulary are {_shape(new)}, but the engine was "
                f"built for {_shape(self.decoder)}; create a new engine"
            )
        self.module, self.decoder = module, new
        self._fix_shapes()

    # -- rows

    def clear(self, *, again: bool = True) -> None:
        """Forget all live rows and what they left in the cache: after weights that diverged that may be NaN,
        and a key that is masked counts 0 * v. again: with a cache for new ones."""
        if self.cache is not None:
            self.release()
            if again:
                self.allocate()
        self.free = list(range(len(self.table_SP) - 1, -1, -1))
        self.slots: dict[Generation, int] = {}
        """Of the live rows."""
        self._go_on([], torch.zeros(6, 0, dtype=torch.int64, device=self.device), 0)

    def interrupt(self) -> None:
        """Take all live rows out; the requests know what they have sampled so far."""
        self._take_out(range(len(self.live.requests)))

    def drop(self, request: Generation) -> None:
        """Take one row out, if it is live."""
        if request in self.slots:
            self._take_out([self.live.requests.index(request)])

    def extend(self, rows: list[LiveRow]) -> None:
        """These live rows have one more page, the last of theirs."""
        if rows:
            what = [[self.slots[row.request], len(row.pages) - 1, row.pages[-1]] for row in rows]
            slot_B, at_B, page_B = torch.tensor(what, device=self.device).T
            self.table_SP[slot_B, at_B] = page_B.to(torch.int32)
            self._lay_out_tables()

    @torch.no_grad()
    def prefill(self, admissions: list[Admission]) -> list[Generation]:
        """Compute these parts of histories. Of those that are whole now, sample the first token of their requests.

        Returns the requests that have ended with it.
        """
        assert self.cache is not None
        pages = [torch.tensor(a.rows[0].pages, dtype=torch.int32) for a in admissions]
        start, end = torch.tensor([(a.start, a.end) for a in admissions]).T
        table = torch.nn.utils.rnn.pad_sequence(pages, batch_first=True)
        attend = CachedAttention(self.cache, table, start, self.ops, queries_B=end - start)
        token_U = torch.from_numpy(np.concatenate([np.array(a.history[a.start : a.end]) for a in admissions]))
        hidden_UD = self._over_cache(token_U.to(self.device), attend.position_N.to(self.device), attend)
        whole = [a for a in admissions if a.whole]
        if not whole:
            return []
        self._copy_last_pages(whole)
        rows = self._let_in(whole)
        last = (end - start).cumsum(0) - 1
        members = torch.tensor([len(a.rows) if a.whole else 0 for a in admissions])
        last_B = last.repeat_interleave(members).to(self.device)
        done = self._advance(rows, hidden_UD.index_select(0, last_B))
        longest = max(self.longest, *(len(a.history) for a in whole))
        self._go_on(self.live.requests + rows.requests, torch.cat((self.live.state, rows.state), 1), longest)
        before = len(self.live.requests) - len(rows.requests)
        return self._take_out([before + i for i in done])

    @torch.no_grad()
    def step(self) -> list[Generation]:
        """One more token for every live row. Returns the requests that have ended with it."""
        rows, done = self.live, self._in_one_call()
        if done is None:
            hidden_BD = self._hidden(rows.state[TOKEN:], self.table_BP[:, : self.longest // PAGE + 1])
            rows.state[LENGTH] += 1
            done = self._advance(rows, hidden_BD)
        self.longest += 1
        return self._take_out(done)

    def newest(self) -> list[tuple[Generation, int, int]]:
        """Of each live row: its request, how many tokens that has sampled by now, and the last of them."""
        slots, _, _, cells, tokens, _ = self.live.state.tolist()
        return [
            (request, len(request.token_ids) + cell - slot * self.columns, token)
            for request, slot, cell, token in zip(self.live.requests, slots, cells, tokens)
        ]

    # -- inside

    def _in_one_call(self) -> list[int] | None:
        """The rows that end with the next token of each, which is written down. None where that takes several calls."""
        rows = self.live
        if self.compiled is None or rows.special is not None:
            return None
        done = self.compiled(
            rows.state,
            self.table_BP,
            rows.temperature,
            longest=self.longest,
            cells=Cells(self.uniform, self.token, self.logp, self.sample_logp),
            ends=self.end_table,
            kept=None if self.kept is None else self.kept.of_step,
        )
        if done is None or not rows.watched:
            return done
        return sorted({*done, *self._met(rows, rows.state[TOKEN])})

    def _hidden(self, fed_2B: Tensor, table_BP: Tensor) -> Tensor:
        """[B, D] for [2, B] (token to feed, tokens in the cache)."""
        assert self.cache is not None
        if self.fixed is not None:
            try:
                return self.fixed(fed_2B, table_BP)
            except CannotCapture as error:
                log.warning("decode steps are launched kernel by kernel, not as CUDA graphs: %s", error)
                self.fixed = self.recorder = None
        token_B, length_B = fed_2B
        return self._over_cache(token_B, length_B, CachedAttention(self.cache, table_BP, length_B, self.ops))

    def _over_cache(self, token_U: Tensor, position_U: Tensor, attend: CachedAttention) -> Tensor:
        """[U, D]; the tokens' keys, values and, if asked for, experts are in the cache then."""
        forward = partial(self.decoder.hidden, token_U, position_U, attend)
        if self.kept is not None:
            return self.kept.around(forward, attend)
        return forward() if self.routed is None else self.routed.around(forward, attend)

    def _copy_last_pages(self, admissions: Iterable[Admission]) -> None:
        """The page that a history fills in part is copied: each row goes on writing into its own."""
        assert self.cache is not None
        parts = [(a.rows, len(a.history) // PAGE) for a in admissions if len(a.history) % PAGE]
        source = [rows[0].pages[at] for rows, at in parts for _ in rows[1:]]
        target = [row.pages[at] for rows, at in parts for row in rows[1:]]
        if target:
            src, dst = torch.tensor([source, target], device=self.device)
            self.cache.copy_page(src, dst)  # type: ignore[arg-type]
            for other in (self.routed, self.kept):
                if other is not None:
                    other.copy_pages(src, dst)

    def _let_in(self, admissions: list[Admission]) -> LiveRows:
        """Slots, page tables and random numbers for the requests."""
        columns: list[tuple[int, ...]] = []
        uniform_SC = self.uniform.view(-1, self.columns)
        for a in admissions:
            requests = [row.request for row in a.rows]
            left = [r.sampling.max_tokens - len(r.token_ids) for r in requests]
            slots = [self.free.pop() for _ in requests]
            self.slots |= zip(requests, slots)
            numbers = uniform_table([r.sampling.key for r in requests], len(a.history), max(left))
            slot_S = torch.tensor(slots, device=self.device)
            uniform_SC[slot_S, : max(left)] = torch.from_numpy(numbers).to(self.device)
            width = max(len(row.pages) for row in a.rows)
            table = [row.pages + [0] * (width - len(row.pages)) for row in a.rows]
            self.table_SP[slot_S, :width] = torch.tensor(table, dtype=torch.int32, device=self.device)
            for slot, r, count in zip(slots, requests, left):
                first = slot * self.columns
                columns.append((slot, first + count - 1, self._end_set(r.ends), first, 0, len(a.history)))
                if r.sampling.repetition_penalty != 1.0:
                    self._see(slot, a.history)
        requests = [row.request for a in admissions for row in a.rows]
        state = torch.tensor(columns, device=self.device).T.contiguous()
        return make_rows(requests, state, columns=self.columns)

    def _end_set(self, ends: frozenset[int]) -> int:
        """Where this set's [V] bools start in `end_table`."""
        if ends not in self.end_sets:
            self.end_sets[ends] = len(self.end_table)
            flags_V = torch.zeros(self.vocab, dtype=torch.bool)
            flags_V[[t for t in ends if t < self.vocab]] = True
            self.end_table = torch.cat((self.end_table, flags_V.to(self.device)))
        return self.end_sets[ends]

    def _see(self, slot: int, history: Sequence[int]) -> None:
        if self.seen_SV is None:
            self.seen_SV = torch.zeros(len(self.table_SP), self.vocab, dtype=torch.bool, device=self.device)
        self.seen_SV[slot] = False
        self.seen_SV[slot, torch.tensor(history, device=self.device)] = True

    def _advance(self, rows: LiveRows, hidden_BD: Tensor) -> list[int]:
        """Sample the next token of each row and write it down. Returns the rows that end with it."""
        token_B, logp_B, sample_logp_B = self._choose(rows, hidden_BD)
        _, last_B, ends_B, cell_B, fed_B, _ = rows.state.unbind()
        self.token.index_copy_(0, cell_B, token_B)
        self.logp.index_copy_(0, cell_B, logp_B)
        self.sample_logp.index_copy_(0, cell_B, sample_logp_B)
        done_B = self.end_table.index_select(0, ends_B + token_B).logical_or_(cell_B == last_B)
        fed_B.copy_(token_B)
        cell_B += 1
        met = self._met(rows, token_B) if rows.watched else set()
        return sorted(met.union(ended(done_B, logp_B)))

    def _met(self, rows: LiveRows, token_B: Tensor) -> set[int]:
        """The rows whose stop string is complete with this token; the host has to read it."""
        tokens = token_B.tolist()
        texts = {i: rows.requests[i].stop_text for i in rows.watched}
        return {i for i, text in texts.items() if text is not None and text.push(tokens[i])}

    def _choose(self, rows: LiveRows, hidden_BD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(token, log-prob at the row's temperature, log-prob in the distribution sampled from), [B] each."""
        uniform_B = self.uniform.index_select(0, rows.state[CELL])
        head, temperature = self.decoder.head, rows.temperature
        if rows.special is None:
            token_B, logp_B = self.ops.sample(logits(head, hidden_BD, temperature), uniform_B)
            return token_B, logp_B, logp_B
        raw_BV = logits(head, hidden_BD, 1.0)
        scaled_BV = raw_BV / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
        token_B, logp_B = self.ops.sample(scaled_BV, uniform_B)
        at_E = rows.special.at_E
        token_E, sample_logp_E = self._filtered(rows, raw_BV[at_E], uniform_B[at_E])
        token_B[at_E] = token_E
        logp_B[at_E] = self.ops.logprobs(scaled_BV[at_E], token_E)[0]
        return token_B, logp_B, logp_B.index_copy(0, at_E, sample_logp_E)

    def _filtered(self, rows: LiveRows, raw_EV: Tensor, uniform_E: Tensor) -> tuple[Tensor, Tensor]:
        """Token and its log-prob after the filters, for the rows that have some."""
        special = rows.special
        assert special is not None
        state_6E = rows.state.index_select(1, special.at_E)
        early_E = state_6E[CELL] < special.first_E
        ends_EV = self.end_table.view(-1, self.vocab)[state_6E[ENDS] // self.vocab]
        seen_EV = torch.zeros_like(ends_EV)
        if special.penalised:
            assert self.seen_SV is not None
            seen_EV = self.seen_SV[state_6E[SLOT]]
        picked_EV = sampler.filtered(
            raw_EV, special.filters, seen_BV=seen_EV, banned_BV=ends_EV & early_E[:, None]
        )
        token_E, logp_E = sampler.pick(picked_EV, special.filters, uniform_E)
        if special.penalised:
            assert self.seen_SV is not None
            self.seen_SV[state_6E[SLOT], token_E] = True
        return token_E, logp_E

    def _take_out(self, at: Sequence[int]) -> list[Generation]:
        """Hand what these rows have sampled to their requests, and go on without them."""
        if not at:
            return []
        rows = self.live
        slots, _, _, cells, _, lengths = rows.state.tolist()
        spans = [slice(slots[i] * self.columns, cells[i]) for i in at]
        said = [_on_host(x, spans) for x in (self.token, self.logp, self.sample_logp)]
        for i, tokens, logps, sample_logps in zip(at, *said):
            request = rows.requests[i]
            request.token_ids += tokens
            request.logprobs += logps
            request.sample_logprobs += sample_logps
            if self.routed is not None:
                pages = self.table_SP[self.slots[request]].tolist()
                request.experts.append(self.routed.of(pages, request.routed, lengths[i]))
            if self.kept is not None:
                self.kept.note(self.table_SP[self.slots[request]], request.history[: lengths[i]])
            self.free.append(self.slots.pop(request))
        gone = set(at)
        keep = [i for i in range(len(rows.requests)) if i not in gone]
        kept = torch.tensor(keep, dtype=torch.int64, device=self.device)
        longest = max((lengths[i] for i in keep), default=0)
        self._go_on([rows.requests[i] for i in keep], rows.state.index_select(1, kept), longest)
        return [rows.requests[i] for i in at]

    def _go_on(self, requests: list[Generation], state: Tensor, longest: int) -> None:
        """These are the live rows from now on."""
        self.live = make_rows(requests, state, columns=self.columns)
        self._lay_out_tables()
        self.longest = longest
        """Most tokens a live row has in the cache; known to the host, so that no step has to ask."""

    def _lay_out_tables(self) -> None:
        """The page table of each live row, [B, P]."""
        width = max((r.cached for r in self.live.requests), default=0) // PAGE + 1
        self.table_BP = self.table_SP[:, :width].index_select(0, self.live.state[SLOT])


def ended(done_B: Tensor, logp_B: Tensor) -> list[int]:
    """The rows that have ended: all that the host asks of the device in a step.

    Raises WhetError where a row's log-prob is not finite, as its logits allowed no sample."""
    if logp_B.is_cpu:  # numpy's calls take a fraction of torch's on so few numbers
        ends = np.flatnonzero(done_B.numpy()).tolist()
        bad = len(logp_B) - int(np.count_nonzero(np.isfinite(logp_B.numpy())))
    else:
        codes = done_B.to(torch.int8).masked_fill(~logp_B.isfinite(), 2).tolist()
        bad, ends = codes.count(2), [i for i, code in enumerate(codes) if code]
    if bad:
        raise bad_logits(bad)
    return ends


def _on_host(x: Tensor, spans: list[slice]) -> list[list[Any]]:
    """The numbers of each span."""
    if x.is_cpu:
        numbers = x.numpy()
        return [numbers[span].tolist() for span in spans]
    parts = [x[span] for span in spans]
    return [part.tolist() for part in torch.cat(parts).cpu().split([len(part) for part in parts])]


def _shape(d: Decoder) -> tuple[int, int, int, int]:
    return d.layers, d.kv_heads, d.head_dim, d.head.linear.out_features
