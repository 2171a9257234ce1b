"""Policy losses as the formulas say them: Python floats, one loop over rollouts, one over tokens.

Each takes the sampled tokens of a minibatch as lists, one a rollout, and returns the loss of each token.
`lp` now, `lo` old, `lb` of the engine (log-probs), `a` advantages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Lists = list[list[float]]
INF = math.inf


@dataclass(frozen=True)
class Tokens:
    lp: Lists
    lo: Lists
    lb: Lists
    a: Lists


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def each(tokens: Tokens, f: Callable[[float, float, float, float], float]) -> Lists:
    """f(a, lp, r, r to the engine) at every token."""
    return [
        [
            f(a, lp, math.exp(clamp(lp - lo, -20, 20)), math.exp(clamp(lp - lb, -20, 20)))
            for a, lp, lo, lb in zip(*rows, strict=True)
        ]
        for rows in zip(tokens.a, tokens.lp, tokens.lo, tokens.lb, strict=True)
    ]


def surrogate(a: float, r: float, low: float, high: float) -> float:
    return max(-a * r, -a * clamp(r, 1 - low, 1 + high))


def ppo(
    t: Tokens, low: float, high: float, dual: float | None, delta: float | None, engine: bool = False
) -> Lists:
    def one(a: float, lp: float, r: float, _: float) -> float:
        loss = surrogate(a, r, low, high)
        return min(loss, -dual * a) if dual is not None and a < 0 else loss

    out = each(t, one)
    for i, (lp, lo) in enumerate(zip(t.lp, t.lb if engine else t.lo, strict=True)):
        kl = sum(clamp(y - x, -20, 20) for x, y in zip(lp, lo, strict=True)) / max(len(lp), 1)
        if delta is not None and kl > delta:
            out[i] = [0.0 if a < 0 else x for a, x in zip(t.a[i], out[i], strict=True)]
    return out


def gspo(t: Tokens, low: float, high: float) -> Lists:
    out = []
    for a, lp, lo in zip(t.a, t.lp, t.lo, strict=True):
        d = [clamp(x - y, -1e4, 1e4) for x, y in zip(lp, lo, strict=True)]
        s = math.exp(min(10.0, sum(d) / max(len(d), 1)))
        out.append([surrogate(x, s, low, high) for x in a])
    return out


def self_play(t: Tokens, eta: float) -> Lists:
    """(sum of log-ratios - eta A)^2 at the last token."""
    out = []
    for a, lp, lo in zip(t.a, t.lp, t.lo, strict=True):
        moved = sum(clamp(x - y, -20, 20) for x, y in zip(lp, lo, strict=True))
        gap = moved - eta * sum(a) / max(len(a), 1)
        out.append([0.0] * (len(a) - 1) + [gap * gap] * (len(a) > 0))
    return out


def geo_mean(t: Tokens, low: float, high: float) -> Lists:
    out = []
    for a, lp, lo in zip(t.a, t.lp, t.lo, strict=True):
        total = 0.0
        for x, p, q in zip(a, lp, lo, strict=True):
            d = clamp(p - q, -20, 20)
            sign = (x > 0) - (x < 0)
            total += sign * min(sign * d, sign * clamp(d, -low, high))
        n = max(len(a), 1)
        out.append([-sum(a) / n * math.exp(total / n)] * len(a))
    return out


def cispo(t: Tokens, low: float, high: float, masks: bool, mask: tuple[float, float] | None = None) -> Lists:
    below, above = mask or (low, high)

    def one(a: float, lp: float, r: float, _: float) -> float:
        if masks and ((r > 1 + above and a > 0) or (r < 1 - below and a < 0)):
            return 0.0
        return -clamp(r, 1 - low, 1 + high) * a * lp

    return each(t, one)


def sapo(t: Tokens, pos: float, neg: float, detach: bool) -> Lists:
    def one(a: float, lp: float, r: float, _: float) -> float:
        tau = pos if a > 0 else neg
        gate = 4 / tau / (1 + math.exp(-min(tau * (r - 1), 700)))
        return -a * gate * (lp if detach else 1)

    return each(t, one)


def rollout_is(t: Tokens, low: float, high: float) -> Lists:
    return each(t, lambda a, lp, r, w: -w * a * lp if 1 - low < w < 1 + high else 0.0)


def bernoulli_kl(p: float, q: float) -> float:
    total = 0.0
    for x, y in ((p, q), (1 - p, 1 - q)):
        if x > 0:
            total += x * (math.log(x) - math.log(y)) if y > 0 else INF
    return total


def dppo(t: Tokens, kind: str, low: float, high: float, most: float = 20.0) -> Lists:
    out = []
    for a, lp, lb in zip(t.a, t.lp, t.lb, strict=True):
        row = []
        for x, now, before in zip(a, lp, lb, strict=True):
            p, q = math.exp(now), math.exp(before)
            far = abs(p - q) if kind == "binary_tv" else bernoulli_kl(q, p)
            blocked = (x > 0 and p > q and far > high) or (x < 0 and p < q and far > low)
            row.append(0.0 if blocked else -x * min(math.exp(clamp(now - before, -20, 20)), most))
        out.append(row)
    return out


def softmax_ppo(t: Tokens, e: float) -> Lists:
    return each(t, lambda a, lp, r, _: -a * math.log(r) if 1 / (1 + e) <= r <= 1 + e else 0.0)


def vespo(t: Tokens, pos: tuple[float, float], neg: tuple[float, float]) -> Lists:
    out = []
    for a, lp, lo in zip(t.a, t.lp, t.lo, strict=True):
        log_w = clamp(sum(clamp(x - y, -20, 20) for x, y in zip(lp, lo, strict=True)), math.log(1e-8), 20)
        row = []
        for x, now in zip(a, lp, strict=True):
            k, rate = pos if x >= 0 else neg
            row.append(-(math.exp(log_w) ** k) * math.exp(rate - rate * math.exp(log_w)) * x * now)
        out.append(row)
    return out


def reinforce_is(
    t: Tokens, over: str, low: float, high: float, outside: str, *, normalize: bool = False
) -> Lists:
    weights = []
    for lp, lb in zip(t.lp, t.lb, strict=True):
        d = [clamp(x - y, -20, 20) for x, y in zip(lp, lb, strict=True)]
        whole = sum(d) if over == "sequence" else sum(d) / max(len(d), 1)
        row = []
        for log in d:
            w = 1.0 if over == "none" else math.exp(clamp(log if over == "token" else whole, -20, 20))
            if over != "none" and not low <= w <= high:
                w = clamp(w, low, high) if outside == "truncate" else 0.0
            row.append(w)
        weights.append(row)
    counted = [w for row in weights for w in (row if over == "token" else row[:1])]
    mean = max(math.fsum(counted) / max(len(counted), 1), 1e-8) if normalize else 1.0
    return [
        [-w / mean * x * now for w, x, now in zip(*row, strict=True)]
        for row in zip(weights, t.a, t.lp, strict=True)
    ]


def topr(t: Tokens, threshold: float) -> Lists:
    return each(t, lambda a, lp, r, _: -(min(r, 1.0) if a <= threshold else 1.0) * a * lp)


@dataclass(frozen=True)
class Rec:
    low: float = 0.2
    high: float = 0.2
    mode: str = "none"
    ring_low: float = 0.6
    ring_high: float = 2.0
    weight: str = "none"
    temperature: float = 1.0
    regularizer: str = "none"
    coef: float = 0.0


def rec(t: Tokens, s: Rec) -> Lists:
    out = []
    for a, lp, lo in zip(t.a, t.lp, t.lo, strict=True):
        d = [clamp(x - y, -20, 20) for x, y in zip(lp, lo, strict=True)]
        whole = math.exp(sum(d) / max(len(d), 1))
        row = []
        for x, now, log in zip(a, lp, d, strict=True):
            r = math.exp(log)
            seen = whole if s.mode == "gspo-one-side" else r
            inside = {
                "none": True,
                "two-side": 1 - s.low <= r <= 1 + s.high,
                "one-side": (x >= 0 and seen <= 1 + s.high) or (x <= 0 and seen >= 1 - s.low),
            }
            inside["gspo-one-side"] = inside["one-side"]
            back = (x >= 0 and r <= 1 - s.ring_low) or (x <= 0 and r >= 1 + s.ring_high)
            inside["ring"] = inside["two-side"] or back
            w = {"none": 1.0, "importance_sampling": r, "gspo_importance_sampling": whole}
            w["advantage"] = math.exp(min(x / s.temperature, 20.0))
            loss = -w[s.weight] * x * now if inside[s.mode] else 0.0
            loss += {"none": 0.0, "k2": log * log, "forward-kl": -now}[s.regularizer] * s.coef
            row.append(loss)
        out.append(row)
    return out


def covariances(t: Tokens) -> Lists:
    flat = [(x, y) for a, lp in zip(t.a, t.lp, strict=True) for x, y in zip(a, lp, strict=True)]
    n = max(len(flat), 1)
    mean_a, mean_lp = sum(x for x, _ in flat) / n, sum(y for _, y in flat) / n
    return [
        [(x - mean_a) * (y - mean_lp) for x, y in zip(a, lp, strict=True)]
        for a, lp in zip(t.a, t.lp, strict=True)
    ]


def kl_cov(t: Tokens, ratio: float, coef: float) -> Lists:
    """The tokens' covariances must differ from one another, or luck decides."""
    cov = covariances(t)
    order = sorted((-c, i, j) for i, row in enumerate(cov) for j, c in enumerate(row))
    count = max(1, int(len(order) * ratio))
    picked = {(i, j) for _, i, j in order[:count]}
    out = each(t, lambda a, lp, r, _: -a * r)
    for i, j in picked:
        out[i][j] += coef * abs(clamp(t.lp[i][j] - t.lo[i][j], -20, 20))
    return out


def m2po(t: Tokens, most: float) -> Lists:
    """Algorithm 1 of arXiv:2510.01161: the largest square goes until the mean of the others is small enough. The
    squares must differ from one another, or luck decides."""
    out = each(t, lambda a, lp, r, w: -a * w)
    squares = {}
    for i, rows in enumerate(zip(t.a, t.lp, t.lb, strict=True)):
        for j, (a, lp, lb) in enumerate(zip(*rows, strict=True)):
            d = clamp(lp - lb, -20, 20)
            if (a > 0 and d > 0) or (a < 0 and d < 0):
                squares[i, j] = d * d
    while squares and math.fsum(squares.values()) / len(squares) > most:
        i, j = max(squares, key=lambda at: squares[at])
        del squares[i, j]
        out[i][j] = 0.0
    return out
