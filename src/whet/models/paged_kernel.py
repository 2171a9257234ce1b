"""The Triton kernel of `paged`. It is imported only where there is Triton."""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scores(  # type: ignore[no-untyped-def]
    x, k_DK, back, there, scale, window, softcap, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr
):
    """[ROWS, KEYS] of queries x and keys, -inf where a query does not see a key."""
    score = tl.dot(x, k_DK.to(x.dtype), input_precision="ieee") * scale
    if SOFTCAP:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)  # tanh
    visible = (back >= 0) & there[None, :]
    if WINDOW:
        visible = visible & (back < window)
    return tl.where(visible, score, float("-inf"))


@triton.jit(do_not_specialize=["table_row", "blocks", "window"])  # type: ignore[untyped-decorator, unused-ignore]
def attend(  # type: ignore[no-untyped-def]
    q, k, v, out, table, keys, starts, sinks, tops, weights, scale, window, softcap,
    q_token, q_head, k_page, k_head, v_page, v_head, table_row, blocks,
    GROUP: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program: some queries of one row, in the group of heads that share one key/value head.

    Keys come KEYS at a time, with the softmax kept running (Milakov and Gimelshein 2018, arXiv:1805.02867), so a row's
    numbers are added up in an order that depends on its own length alone. STEP: one query a row; keys [B] are how many
    it sees, else [B + 1] where those of each row begin. SPLIT: a program takes the part of so many keys that its third
    number says, for `join` (as Flash-Decoding does: Dao et al. 2023); 0: all of them.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    if STEP:
        row, at, begin, asked = block, 0, block, 1
        total = tl.load(keys + row).to(tl.int32)
    else:
        row = block // blocks
        at = (block % blocks) * QUERIES
        begin = tl.load(starts + row)
        asked = tl.load(starts + row + 1) - begin
        total = tl.load(keys + row + 1) - tl.load(keys + row)
    if at < asked:
        m = tl.arange(0, ROWS)
        d = tl.arange(0, WIDE)
        query = at + m // GROUP
        live = (m < QUERIES * GROUP) & (query < asked)
        place = total - asked + query
        q_at = (begin + query).to(tl.int64) * q_token + (head * GROUP + m % GROUP) * q_head
        cells = live[:, None] & (d < SIZE)[None, :]
        x = tl.load(q + q_at[:, None] + d[None, :], mask=cells, other=0.0)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        seen = tl.zeros([ROWS, WIDE], tl.float32)
        last = tl.minimum(total, total - asked + at + QUERIES)
        low = 0
        if WINDOW:
            low = tl.maximum(total - asked + at - window + 1, 0) // KEYS * KEYS
        if SPLIT:
            low = tl.maximum(low, tl.program_id(2) * SPLIT)
            last = tl.minimum(last, tl.program_id(2) * SPLIT + SPLIT)
        for start in range(low, last, KEYS):
            key = start + tl.arange(0, KEYS)
            there = key < last
            page = tl.load(table + row * table_row + key // PAGE, mask=there, other=0).to(tl.int64)
            slot = key % PAGE
            k_at = page * k_page + head * k_head + slot
            k_DK = tl.load(
                k + k_at[None, :] + d[:, None] * PAGE, mask=there[None, :] & (d < SIZE)[:, None], other=0.0
            )
            back = place[:, None] - key[None, :]
            score = _scores(x, k_DK, back, there, scale, window, softcap, WINDOW, SOFTCAP)
            higher = tl.maximum(top, tl.max(score, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
            p = tl.exp(score - base[:, None])
            shrink = tl.exp(top - base)
            v_at = page * v_page + head * v_head + slot * SIZE
            v_KD = tl.load(
                v + v_at[:, None] + d[None, :], mask=there[:, None] & (d < SIZE)[None, :], other=0.0
            )
            weight = weight * shrink + tl.sum(p, 1)
            seen = seen * shrink[:, None] + tl.dot(p.to(v_KD.dtype), v_KD, input_precision="ieee")
            top = higher
        if SPLIT:
            part = (q_at // SIZE) * tl.num_programs(2) + tl.program_id(2)
            tl.store(tops + part, top, mask=live)
            tl.store(weights + part, weight, mask=live)
            tl.store(out + part[:, None] * SIZE + d[None, :], seen, mask=cells)
        else:
            if SINKS:
                sink = tl.load(sinks + head * GROUP + m % GROUP).to(tl.float32)
                higher = tl.maximum(top, sink)
                shrink = tl.exp(top - higher)
                weight = weight * shrink + tl.exp(sink - higher)
                seen = seen * shrink[:, None]
            seen = seen / tl.where(weight == 0.0, 1.0, weight)[:, None]
            tl.store(out + q_at[:, None] + d[None, :], seen.to(x.dtype), mask=cells)


@triton.jit(do_not_specialize=["splits"])  # type: ignore[untyped-decorator, unused-ignore]
def join(  # type: ignore[no-untyped-def]
    parts, tops, weights, out, keys, sinks, heads, splits,
    SIZE: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One head of one row from its parts, the first one first. Of a single part with keys, its bits are `attend`'s."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, WIDE)
    first = (row * heads + head) * splits
    top = float("-inf")
    weight = 0.0
    seen = tl.zeros([WIDE], tl.float32)
    for n in range(0, tl.cdiv(tl.load(keys + row).to(tl.int32), SPLIT)):
        own = tl.load(tops + first + n)
        higher = tl.maximum(top, own)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        before, now = tl.exp(top - base), tl.exp(own - base)
        part = tl.load(parts + (first + n) * SIZE + d, mask=d < SIZE, other=0.0)
        weight = weight * before + tl.load(weights + first + n) * now
        seen = seen * before + part * now
        top = higher
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        higher = tl.maximum(top, sink)
        shrink = tl.exp(top - higher)
        weight = weight * shrink + tl.exp(sink - higher)
        seen = seen * shrink
    seen = seen / tl.where(weight == 0.0, 1.0, weight)
    tl.store(out + (row * heads + head) * SIZE + d, seen.to(out.dtype.element_ty), mask=d < SIZE)
