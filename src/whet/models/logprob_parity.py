"""Tests at start-up, with the real model on the real machine, whether sampled log-probs equal the trainer's bit for
bit.

Which products round alike depends on the processor and on the build of the linear algebra library, so exactness is
tested and reported, never assumed. Shape letters: N tokens, R rollouts, B live rows, G groups, P pages, T steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from whet import seeds
from whet.batch import Batch
from whet.models.attention import PAGE, CachedAttention, KvCache, PackedAttention
from whet.models.compiled_step import Cells, CompiledStep
from whet.models.forward import Decoder
from whet.models.kernels import Ops
from whet.models.logprobs import logits, token_logprobs
from whet.models.packing import layout

AGAIN = 2
"""Rows that begin again in every step."""


@dataclass(frozen=True)
class ExactReport:
    exact: bool
    tokens: int
    """Log-probs compared, each sampled token twice: with prompts shared and not."""
    mismatches: int
    max_diff: float
    """Nats."""

    def __str__(self) -> str:
        if self.exact:
            return f"exact: all {self.tokens} log-probs compared are equal bit for bit"
        return (
            f"close: {self.mismatches} of {self.tokens} log-probs differ, by at most {self.max_diff:.1e} nats"
        )


@torch.no_grad()
def self_test(
    decoder: Decoder,
    ops: Ops,
    *,
    vocab_size: int,
    seed: int,
    temperature: float = 1.0,
    groups: int = 5,
    group_size: int = 4,
    max_prompt: int = 40,
    long_prompt: int = 270,
    max_response: int = 24,
) -> ExactReport:
    """Sample rollouts step by step, then compute their log-probs as the trainer does, and compare the bits.

    Prompts are random tokens, one of them `long_prompt` long (attention over more than 256 keys takes other
    roads), the others up to `max_prompt`; responses end at random lengths; each decode step runs the live
    rows in a random order, in two parts of random sizes: one in a single call, as the engine does where that
    computes the model (see `compiled_step`), the other operation by operation. Each prompt is computed in three
    parts, the second of one token. In every step two of the rows begin again, as a row that was preempted or the
    next turn of an episode: they keep some of their pages, and compute the rest of their history over them. The
    trainer's side is computed with shared and with separate prompts.
    """
    random = np.random.Generator(np.random.Philox(key=seeds.key(seed, "self-test")))
    prompt_G = random.integers(1, max_prompt + 1, groups)
    prompt_G[-1] = long_prompt
    rollouts = _Rollouts(
        prompts=[torch.from_numpy(random.integers(0, vocab_size, n)) for n in prompt_G],
        group_R=torch.arange(groups).repeat_interleave(group_size),
        response_R=torch.from_numpy(random.integers(1, max_response + 1, groups * group_size)),
    )
    batch = _sample(decoder, ops, rollouts=rollouts, random=random, temperature=temperature)
    assert batch.logp_sample_N is not None
    sampled_A = batch.logp_sample_N[batch.mask_N]
    trained_A = torch.cat(
        [_trained(decoder, ops, batch=batch, share=share, temperature=temperature) for share in (True, False)]
    )
    differs_A = trained_A != sampled_A.repeat(2)
    diff_A = (trained_A - sampled_A.repeat(2)).abs()
    return ExactReport(
        exact=not bool(differs_A.any()),
        tokens=len(differs_A),
        mismatches=int(differs_A.sum()),
        max_diff=float(diff_A.max()),
    )


@dataclass(frozen=True)
class _Rollouts:
    """What is to be sampled."""

    prompts: list[Tensor]
    group_R: Tensor
    response_R: Tensor
    """Tokens to sample."""

    @property
    def prompt_R(self) -> Tensor:
        return torch.tensor([len(p) for p in self.prompts])[self.group_R]


def _sample(
    decoder: Decoder, ops: Ops, *, rollouts: _Rollouts, random: np.random.Generator, temperature: float
) -> Batch:
    """Prefill each prompt once, then decode; a batch with `logp_sample_N`."""
    weight = decoder.head.linear.weight
    device, rows = weight.device, len(rollouts.group_R)
    cache, table_RP = _cache(decoder, ops, rollouts=rollouts, like=weight)
    token_RT = torch.zeros(rows, int(rollouts.response_R.max()), dtype=torch.int64, device=device)
    logp_RT = torch.zeros(token_RT.shape, device=device)

    def draw(rows_B: Tensor, hidden_BD: Tensor, step: int) -> None:
        uniform_B = torch.from_numpy(random.random(len(rows_B))).to(device)
        token_B, logp_B = ops.sample(logits(decoder.head, hidden_BD, temperature), uniform_B)
        token_RT[rows_B, step], logp_RT[rows_B, step] = token_B, logp_B

    def decode(rows_B: Tensor, step: int, *, in_one_call: CompiledStep | None) -> None:
        token_B, table_BP = token_RT[rows_B, step - 1], table_RP[rows_B].to(device)
        length_B = (rollouts.prompt_R[rows_B] + step - 1).to(device)
        made = None
        if in_one_call is not None:
            uniform_B = torch.from_numpy(random.random(len(rows_B)))
            made = _in_one_call(
                in_one_call, token_B, length_B, table_BP, uniform_B=uniform_B, temperature=temperature
            )
        if made is not None:
            token_RT[rows_B, step], logp_RT[rows_B, step] = made
        else:
            attend = CachedAttention(cache, table_BP, length_B, ops)
            draw(rows_B, decoder.hidden(token_B, length_B, attend), step)

    def history(row: int, step: int) -> Tensor:
        return torch.cat((rollouts.prompts[int(rollouts.group_R[row])], token_RT[row, :step].cpu()))

    prompts_RD = _prefill_prompts(
        decoder, ops, rollouts=rollouts, cache=cache, table_RP=table_RP, random=random
    )
    draw(torch.arange(rows), prompts_RD, 0)
    whole = CompiledStep.of(decoder, cache)
    for step in range(1, token_RT.shape[1]):
        live_B = torch.nonzero(rollouts.response_R > step).flatten()
        live_B = live_B[torch.from_numpy(random.permutation(len(live_B)))]
        again_B, live_B = live_B[:AGAIN], live_B[AGAIN:]
        if len(again_B):
            kept_B = torch.tensor(
                [int(random.integers(0, (n - 1) // PAGE + 1)) for n in rollouts.prompt_R[again_B] + step]
            )
            _spoil(cache, table_RP[again_B], kept_B)
            histories = [history(row, step) for row in again_B.tolist()]
            draw(
                again_B,
                _prefill(decoder, ops, cache, table_RP[again_B], histories=histories, start_B=kept_B * PAGE),
                step,
            )
        parts = live_B.tensor_split([int(random.integers(0, len(live_B) + 1))])
        for part_B, in_one_call in zip(parts, (whole, None)):
            if len(part_B):
                decode(part_B, step, in_one_call=in_one_call)
    return _batch(rollouts, token_RT, logp_RT)


def _in_one_call(
    whole: CompiledStep,
    token_B: Tensor,
    length_B: Tensor,
    table_BP: Tensor,
    *,
    uniform_B: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor] | None:
    """(token, log-prob) [B] of the next token of each row; None where it does not compute this model. A row's cell is
    its number, and no token ends it."""
    cell_B, zero_B = torch.arange(len(token_B)), torch.zeros_like(length_B)
    state = torch.stack((zero_B, zero_B - 1, zero_B, cell_B, token_B, length_B))  # as in `runner.LiveRows`
    cells = Cells(uniform_B, torch.empty_like(token_B), *torch.empty(2, len(token_B), dtype=torch.float32))
    done = whole(
        state,
        table_BP.to(torch.int32),
        temperature,
        longest=int(length_B.max()),
        cells=cells,
        ends=torch.zeros(whole.head.linear.out_features, dtype=torch.bool),
    )
    return None if done is None else (cells.token, cells.logp)


def _spoil(cache: KvCache, table_BP: Tensor, kept_B: Tensor) -> None:
    """All pages of these rows but the first kept_B hold what another row may have left there."""
    for pages, kept in zip(table_BP, kept_B.tolist()):
        cache.k[:, pages[kept:]], cache.v[:, pages[kept:]] = 7.0, -3.0


def _cache(decoder: Decoder, ops: Ops, *, rollouts: _Rollouts, like: Tensor) -> tuple[KvCache, Tensor]:
    """Pages of its own for every rollout, and their numbers [R, P] on the CPU; past its end its last page."""
    pages_R = (rollouts.prompt_R + rollouts.response_R + PAGE - 1) // PAGE
    first_R = pages_R.cumsum(0) - pages_R
    cache = KvCache.allocate(
        layers=decoder.layers,
        pages=int(pages_R.sum()),
        kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        ops=ops,
        dtype=like.dtype,
        device=like.device,
    )
    table_RP = first_R[:, None] + torch.arange(int(pages_R.max()))
    return cache, table_RP.minimum((first_R + pages_R - 1)[:, None])


def _prefill(
    decoder: Decoder, ops: Ops, cache: KvCache, table_BP: Tensor, *, histories: list[Tensor], start_B: Tensor
) -> Tensor:
    """[B, D] hidden state of each history's last token; its tokens from start_B on are computed."""
    device = cache.k.device
    queries_B = torch.tensor([len(h) for h in histories]) - start_B
    attend = CachedAttention(cache, table_BP, start_B, ops, queries_B=queries_B)
    token_N = torch.cat([h[start:] for h, start in zip(histories, start_B.tolist())])
    hidden_ND = decoder.hidden(token_N.to(device), attend.position_N.to(device), attend)
    return hidden_ND[(queries_B.cumsum(0) - 1).to(device)]


def _prefill_prompts(
    decoder: Decoder,
    ops: Ops,
    *,
    rollouts: _Rollouts,
    cache: KvCache,
    table_RP: Tensor,
    random: np.random.Generator,
) -> Tensor:
    """[R, D] hidden state of each prompt's last token; keys and values, computed once a group, go into all its rows."""
    first_row_G = torch.searchsorted(rollouts.group_R, torch.arange(len(rollouts.prompts)))
    last_G: list[Tensor] = []
    for prompt, row in zip(rollouts.prompts, first_row_G.tolist()):
        start, cut = 0, int(random.integers(0, len(prompt)))
        for end in (cut, min(cut + 1, len(prompt) - 1), len(prompt)):
            if end > start:
                table = table_RP[row : row + 1]
                hidden = _prefill(
                    decoder, ops, cache, table, histories=[prompt[:end]], start_B=torch.tensor([start])
                )
                start = end
        last_G.append(hidden)
    for row, group in enumerate(rollouts.group_R.tolist()):
        leader = int(first_row_G[group])
        if row != leader:
            for page in range(-(-len(rollouts.prompts[group]) // PAGE)):
                cache.copy_page(int(table_RP[leader, page]), int(table_RP[row, page]))
    return torch.cat(last_G)[rollouts.group_R.to(cache.k.device)]


def _batch(rollouts: _Rollouts, token_RT: Tensor, logp_RT: Tensor) -> Batch:
    rows, device = len(rollouts.group_R), token_RT.device
    length_R = rollouts.prompt_R + rollouts.response_R
    sampled_RT = torch.arange(token_RT.shape[1]) < rollouts.response_R[:, None]
    row_N = torch.arange(rows).repeat_interleave(length_R)
    position_N = torch.arange(len(row_N)) - (length_R.cumsum(0) - length_R)[row_N]
    mask_N = position_N >= rollouts.prompt_R[row_N]
    token_ids_N = torch.empty(len(row_N), dtype=torch.int64)
    token_ids_N[mask_N] = token_RT.cpu()[sampled_RT]
    token_ids_N[~mask_N] = torch.cat([rollouts.prompts[g] for g in rollouts.group_R.tolist()])
    logp_N = torch.zeros(len(row_N))
    logp_N[mask_N] = logp_RT.cpu()[sampled_RT]
    return Batch(
        token_ids_N=token_ids_N,
        mask_N=mask_N,
        segment_N=row_N,
        rollout_N=row_N,
        version_N=torch.zeros_like(row_N),
        logp_sample_N=logp_N,
        length_S=length_R,
        prompt_S=rollouts.prompt_R,
        rollout_S=torch.arange(rows),
        group_R=rollouts.group_R,
        reward_R=torch.zeros(rows),
        stopped_R=torch.zeros(rows, dtype=torch.bool),
    ).to(device)


def _trained(decoder: Decoder, ops: Ops, *, batch: Batch, share: bool, temperature: float) -> Tensor:
    """[A] log-probs of the sampled tokens as the trainer computes them."""
    plan = layout(batch, share_prompts=share)
    hidden_UD = decoder.hidden(plan.token_ids_U, plan.position_U, PackedAttention(plan.segments, ops))
    hidden_AD = F.embedding(plan.predictor_N[batch.mask_N], hidden_UD)
    return token_logprobs(
        hidden_AD, batch.token_ids_N[batch.mask_N], head=decoder.head, ops=ops, temperature=temperature
    )[0]
