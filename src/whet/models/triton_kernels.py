"""The Triton kernels of `triton_ops`. It is imported only where there is Triton.

A row is one program's, or a block of a row is: no sum depends on what else is in the batch. Sums are in float32, those
over the blocks of a vocabulary in float64.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

jit: Any = triton.jit
counted: Any = partial(triton.jit, do_not_specialize=["rows", "tokens", "each"])
"""Of a kernel that is told how many rows there are: not compiled anew for each number."""


@jit
def norm(x, residual, weight, out, total, width, eps, offset, ADD: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row: out = x * rsqrt(mean(x^2) + eps) * (offset + weight). ADD: x + residual in the place of x, to total."""
    row = tl.program_id(0).to(tl.int64) * width
    d = tl.arange(0, WIDE)
    there = d < width
    given = tl.load(x + row + d, mask=there, other=0.0)
    if ADD:
        more = tl.load(residual + row + d, mask=there, other=0.0)
        given = (given.to(tl.float32) + more.to(tl.float32)).to(given.dtype)
        tl.store(total + row + d, given, mask=there)
    wide = given.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    factor = tl.load(weight + d, mask=there, other=0.0).to(tl.float32) + offset
    tl.store(out + row + d, (wide * scale * factor).to(given.dtype), mask=there)


@counted()
def norm_backward(  # type: ignore[no-untyped-def]
    x, weight, dy, more, dx, part, rows, width, eps, offset, each,
    ADD: tl.constexpr, WEIGHT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`each` rows: dx, to which ADD adds more; WEIGHT: the sum of dweight over them is a row of part."""
    first = tl.program_id(0) * each
    d = tl.arange(0, WIDE)
    there = d < width
    factor = tl.load(weight + d, mask=there, other=0.0).to(tl.float32) + offset
    sums = tl.zeros([WIDE], tl.float32)
    begin = first.to(tl.int64) * width + d
    for row in range(0, tl.minimum(each, rows - first)):
        at = begin + row * width
        given = tl.load(x + at, mask=there, other=0.0)
        wide = given.to(tl.float32)
        slope = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
        unit = wide * scale
        pull = slope * factor
        found = scale * (pull - unit * (tl.sum(pull * unit, 0) / width))
        if ADD:
            found += tl.load(more + at, mask=there, other=0.0).to(tl.float32)
        tl.store(dx + at, found.to(given.dtype), mask=there)
        sums += slope * unit
    if WEIGHT:
        tl.store(part + tl.program_id(0).to(tl.int64) * width + d, sums, mask=there)


@jit
def turn(  # type: ignore[no-untyped-def]
    x, weight, cos, sin, out, heads, half, eps, offset, x_token, x_head,
    NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: the RMS norm of each (NORM), then the rotary embedding of its two halves."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, HALF)
    cells = (h < heads)[:, None] & (d < half)[None, :]
    at = x + token * x_token + h[:, None] * x_head + d[None, :]
    low = tl.load(at, mask=cells, other=0.0)
    high = tl.load(at + half, mask=cells, other=0.0)
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        square = tl.sum(wide_low * wide_low, 1) + tl.sum(wide_high * wide_high, 1)
        scale = tl.rsqrt(square / (2 * half) + eps)[:, None]
        factor_low = tl.load(weight + d, mask=d < half, other=0.0).to(tl.float32) + offset
        factor_high = tl.load(weight + half + d, mask=d < half, other=0.0).to(tl.float32) + offset
        wide_low = (wide_low * scale * factor_low[None, :]).to(low.dtype).to(tl.float32)
        wide_high = (wide_high * scale * factor_high[None, :]).to(low.dtype).to(tl.float32)
    angle = token * 2 * half + d
    cos_low = tl.load(cos + angle, mask=d < half, other=0.0)[None, :]
    cos_high = tl.load(cos + angle + half, mask=d < half, other=0.0)[None, :]
    sin_low = tl.load(sin + angle, mask=d < half, other=0.0)[None, :]
    sin_high = tl.load(sin + angle + half, mask=d < half, other=0.0)[None, :]
    to = out + (token * heads + h[:, None]) * 2 * half + d[None, :]
    tl.store(to, (wide_low * cos_low - wide_high * sin_low).to(low.dtype), mask=cells)
    tl.store(to + half, (wide_high * cos_high + wide_low * sin_high).to(low.dtype), mask=cells)


@counted()
def turn_backward(  # type: ignore[no-untyped-def]
    x, weight, cos, sin, dy, dx, part, tokens, heads, half, eps, offset, x_token, x_head, each,
    NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Some heads of `each` tokens: dx; NORM: the sum of dweight over them is a row of part."""
    first = tl.program_id(0) * each
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, HALF)
    inside = d < half
    cells = (h < heads)[:, None] & inside[None, :]
    factor_low = tl.zeros([HALF], tl.float32)
    factor_high = tl.zeros([HALF], tl.float32)
    if NORM:
        factor_low = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32) + offset
        factor_high = tl.load(weight + half + d, mask=inside, other=0.0).to(tl.float32) + offset
    sums_low = tl.zeros([HALF], tl.float32)
    sums_high = tl.zeros([HALF], tl.float32)
    for place in range(0, tl.minimum(each, tokens - first)):
        token = first.to(tl.int64) + place
        angle = token * 2 * half + d
        cos_low = tl.load(cos + angle, mask=inside, other=0.0)[None, :]
        cos_high = tl.load(cos + angle + half, mask=inside, other=0.0)[None, :]
        sin_low = tl.load(sin + angle, mask=inside, other=0.0)[None, :]
        sin_high = tl.load(sin + angle + half, mask=inside, other=0.0)[None, :]
        to = (token * heads + h[:, None]) * 2 * half + d[None, :]
        given = tl.load(dy + to, mask=cells, other=0.0)
        dy_low = given.to(tl.float32)
        dy_high = tl.load(dy + to + half, mask=cells, other=0.0).to(tl.float32)
        d_low = dy_low * cos_low + dy_high * sin_high
        d_high = dy_high * cos_high - dy_low * sin_low
        if NORM:
            at = x + token * x_token + h[:, None] * x_head + d[None, :]
            low = tl.load(at, mask=cells, other=0.0).to(tl.float32)
            high = tl.load(at + half, mask=cells, other=0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * half) + eps)[:, None]
            low *= scale
            high *= scale
            pull_low = d_low * factor_low[None, :]
            pull_high = d_high * factor_high[None, :]
            mean = ((tl.sum(pull_low * low, 1) + tl.sum(pull_high * high, 1)) / (2 * half))[:, None]
            sums_low += tl.sum(d_low * low, 0)
            sums_high += tl.sum(d_high * high, 0)
            d_low = scale * (pull_low - low * mean)
            d_high = scale * (pull_high - high * mean)
        tl.store(dx + to, d_low.to(given.dtype), mask=cells)
        tl.store(dx + to + half, d_high.to(given.dtype), mask=cells)
    if NORM:
        row = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * 2 * half
        tl.store(part + row + d, sums_low, mask=inside)
        tl.store(part + row + half + d, sums_high, mask=inside)


@jit
def _act(g, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """(act(g), its slope): 0 silu, 1 gelu_tanh, 2 gpt-oss's of a g that is cut already."""
    if ACT == 1:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        tanh = 2.0 * tl.sigmoid(2.0 * inner) - 1.0
        value = 0.5 * g * (1.0 + tanh)
        rise = 0.7978845608028654 * (1.0 + 0.134145 * g * g)
        slope = 0.5 * (1.0 + tanh) + 0.5 * g * (1.0 - tanh * tanh) * rise
    else:
        steep = 1.702 if ACT == 2 else 1.0
        s = tl.sigmoid(steep * g)
        value = g * s
        slope = s * (1.0 + steep * g * (1.0 - s))
    return value, slope


@jit
def glu(gate, up, out, width, gate_row, up_row, ACT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = f < width
    given = tl.load(gate + row * gate_row + f, mask=there, other=0.0)
    g = given.to(tl.float32)
    u = tl.load(up + row * up_row + f, mask=there, other=0.0).to(tl.float32)
    if ACT == 2:
        g = tl.minimum(g, 7.0)
        u = tl.minimum(tl.maximum(u, -7.0), 7.0) + 1.0
    value, _ = _act(g, ACT)
    tl.store(out + row * width + f, (value * u).to(given.dtype), mask=there)


@jit
def glu_backward(  # type: ignore[no-untyped-def]
    gate, up, dout, dgate, dup, width, gate_row, up_row, ACT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = f < width
    given = tl.load(gate + row * gate_row + f, mask=there, other=0.0)
    g = given.to(tl.float32)
    u = tl.load(up + row * up_row + f, mask=there, other=0.0).to(tl.float32)
    d = tl.load(dout + row * width + f, mask=there, other=0.0).to(tl.float32)
    pass_gate, pass_up = d, d
    if ACT == 2:
        pass_gate = tl.where(g <= 7.0, d, 0.0)
        pass_up = tl.where((u >= -7.0) & (u <= 7.0), d, 0.0)
        g = tl.minimum(g, 7.0)
        u = tl.minimum(tl.maximum(u, -7.0), 7.0) + 1.0
    value, slope = _act(g, ACT)
    tl.store(dgate + row * width + f, (pass_gate * u * slope).to(given.dtype), mask=there)
    tl.store(dup + row * width + f, (pass_up * value).to(given.dtype), mask=there)


@jit
def blocks(z, top, mass, tilt, size, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of one block of a row of logits: the largest m, the sum of e = exp(z - m), and that of e * (z - m)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = block * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(z + row * size + v, mask=v < size, other=float("-inf"))
    most = tl.max(given, 0)
    far = given - tl.where(most == float("-inf"), 0.0, most)
    e = tl.exp(far)
    at = row * count + block
    tl.store(top + at, most)
    tl.store(mass + at, tl.sum(e, 0))
    tl.store(tilt + at, tl.sum(tl.where(e == 0.0, 0.0, e * far), 0))


@jit
def _whole(top, mass, at, there):  # type: ignore[no-untyped-def]
    """(largest logit of the row, of each block its own less that, its factor, its share of the total), in float64."""
    own = tl.load(top + at, mask=there, other=float("-inf"))
    most = tl.max(own, 0)
    fall = tl.where(own == float("-inf"), 0.0, own - most)
    factor = tl.where(own == float("-inf"), 0.0, tl.exp(fall)).to(tl.float64)
    return most, fall, factor, tl.load(mass + at, mask=there, other=0.0).to(tl.float64) * factor


@jit
def logprobs(z, targets, top, mass, tilt, logp, entropy, size, count, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row, from its blocks: the log-prob of its target, and its entropy."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, COUNT)
    there = b < count
    at = row * count + b
    most, fall, factor, share = _whole(top, mass, at, there)
    total = tl.sum(share, 0)
    target = tl.load(targets + row)
    own = tl.load(z + row * size + target, mask=(target >= 0) & (target < size), other=float("nan"))
    tl.store(logp + row, ((own - most).to(tl.float64) - tl.log(total)).to(tl.float32))
    lean = tl.load(tilt + at, mask=there, other=0.0).to(tl.float64) * factor + share * fall.to(tl.float64)
    tl.store(entropy + row, (tl.log(total) - tl.sum(lean, 0) / total).to(tl.float32))


@jit
def logprobs_backward(  # type: ignore[no-untyped-def]
    z, targets, lse, entropy, dlogp, dentropy, size, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    """One block of a row, in place: p * (-dentropy * (log p + H) - dlogp), + dlogp at the target."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = v < size
    given = tl.load(z + row * size + v, mask=there, other=float("-inf"))
    low = given - tl.load(lse + row)
    p = tl.exp(low)
    pull = tl.load(dlogp + row)
    slope = -pull * p
    if ENTROPY:
        more = tl.load(dentropy + row) * (low + tl.load(entropy + row))
        slope -= tl.where(p == 0.0, 0.0, p * more)
    slope += tl.where(v == tl.load(targets + row), pull, 0.0)
    tl.store(z + row * size + v, slope, mask=there)


@jit
def pick(z, uniform, top, mass, token, logp, size, count, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row, from its blocks: the first token at which the sum of probabilities passes uniform * total."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, COUNT)
    there = b < count
    most, _, factor, share = _whole(top, mass, row * count + b, there)
    total = tl.sum(share, 0)
    aim = tl.load(uniform + row) * total
    # rounding may leave none: then it is the last block, and the last token, of some mass
    last = tl.max(tl.where(there & (share > 0.0), b, 0), 0)
    sums = tl.cumsum(share, 0)
    block = tl.minimum(tl.sum((there & (sums <= aim)).to(tl.int32), 0), last)
    before = tl.sum(tl.where(b < block, share, 0.0), 0)
    base = tl.load(top + row * count + block)
    v = block * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(z + row * size + v, mask=v < size, other=float("-inf"))
    p = tl.exp(given - tl.where(base == float("-inf"), 0.0, base)).to(tl.float64)
    p *= tl.sum(tl.where(b == block, factor, 0.0), 0)
    passed = (before + tl.cumsum(p, 0) > aim) & (p > 0.0)
    first = tl.min(tl.where(passed, v, 2147483647), 0)
    first = tl.minimum(first, tl.max(tl.where(p > 0.0, v, 0), 0))
    own = tl.load(z + row * size + first)
    tl.store(token + row, first.to(tl.int64))
    tl.store(logp + row, ((own - most).to(tl.float64) - tl.log(total)).to(tl.float32))


@jit
def write_kv(  # type: ignore[no-untyped-def]
    k_pages, v_pages, k, v, pages, slots, heads, size, k_token, k_head, v_token, v_head,
    k_page, v_page, PAGE: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One token's keys, one beside the other 16 of its page, and values, in a row."""
    token = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDE)[None, :]
    cells = (h < heads) & (d < size)
    page = tl.load(pages + token).to(tl.int64)
    slot = tl.load(slots + token)
    key = tl.load(k + token * k_token + h * k_head + d, mask=cells, other=0.0)
    value = tl.load(v + token * v_token + h * v_head + d, mask=cells, other=0.0)
    tl.store(k_pages + page * k_page + (h * size + d) * PAGE + slot, key, mask=cells)
    tl.store(v_pages + page * v_page + (h * PAGE + slot) * size + d, value, mask=cells)
