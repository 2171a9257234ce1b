"""Learning rate and weight decay: numbers by hand, and the formulas of each framework, written out again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.config.schedules import factor, position, warmup_steps, weight_decay
from whet.config.schema import OptimizerConfig, ScheduleConfig


def curve(schedule: ScheduleConfig, total: int, steps: range | None = None) -> list[float]:
    return [factor(schedule, s, total) for s in steps or range(total + 1)]


# ---------------------------------------------------------------- by hand


def test_constant() -> None:
    assert curve(ScheduleConfig(), 3) == [1.0, 1.0, 1.0, 1.0]


def test_linear() -> None:
    schedule = ScheduleConfig(type="linear", warmup_steps=2, min_lr_ratio=0.1)
    assert curve(schedule, 6) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.775, 0.55, 0.325, 0.1])


def test_cosine() -> None:
    half = math.sqrt(0.5)
    want = [1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0]
    assert curve(ScheduleConfig(type="cosine"), 4) == pytest.approx(want)


def test_cosine_with_a_whole_wave_comes_back() -> None:
    assert curve(ScheduleConfig(type="cosine", num_cycles=1.0, min_lr_ratio=0.2), 4) == pytest.approx(
        [1, 0.6, 0.2, 0.6, 1]
    )


def test_inverse_sqrt() -> None:
    schedule = ScheduleConfig(type="inverse_sqrt", warmup_steps=4, warmup_ends="start", min_lr_ratio=0.45)
    assert curve(schedule, 40, range(5)) == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert factor(schedule, 16, 40) == pytest.approx(0.5), "sqrt(4/16)"
    assert factor(schedule, 36, 40) == pytest.approx(0.45), "sqrt(4/36) is below the floor"
    bare = ScheduleConfig(type="inverse_sqrt")
    assert curve(bare, 40, range(5)) == pytest.approx([1, 1, math.sqrt(1 / 2), math.sqrt(1 / 3), 0.5])


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        ("linear", [1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [1.0, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4, 0.0]),
        ("exponential", [1.0, 2 * 0.5**0.25 - 1, math.sqrt(2) - 1, 2 * 0.5**0.75 - 1, 0.0]),
        ("minus_sqrt", [1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0]),
    ],
)
def test_wsd_is_flat_then_falls(shape: str, want: list[float]) -> None:
    schedule = ScheduleConfig(type="wsd", decay_steps=4, decay_type=shape, min_lr_ratio=0.5)  # type: ignore[arg-type]
    assert curve(schedule, 10) == pytest.approx([1.0] * 6 + [0.5 + 0.5 * g for g in want])


def test_the_length_of_a_decay_as_a_fraction_of_all_steps() -> None:
    schedule = ScheduleConfig(
        type="wsd", warmup_steps=5, warmup_ends="peak", decay_steps=0.45, min_lr_ratio=0.2
    )
    assert curve(schedule, 10, range(5, 11)) == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2]), (
        "floor(4.5) steps"
    )


def test_the_decay_takes_no_more_than_the_warm_up_leaves() -> None:
    schedule = ScheduleConfig(type="wsd", decay_steps=None, warmup_steps=4, warmup_ends="peak")
    assert curve(schedule, 8) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


@pytest.mark.parametrize(
    ("ends", "want"),
    [
        ("neither", [0.2, 0.4, 0.6, 0.8, 1.0]),
        ("start", [0.0, 0.25, 0.5, 0.75, 1.0]),
        ("peak", [0.25, 0.5, 0.75, 1.0, 1.0]),
        ("both", [0.0, 1 / 3, 2 / 3, 1.0, 1.0]),
    ],
)
@pytest.mark.parametrize("start", [0.0, 0.4])
def test_the_ends_of_the_warm_up(ends: str, want: list[float], start: float) -> None:
    schedule = ScheduleConfig(warmup_steps=4, warmup_ends=ends, warmup_start_ratio=start)  # type: ignore[arg-type]
    assert curve(schedule, 9, range(5)) == pytest.approx([start + (1 - start) * w for w in want])


def test_a_warm_up_of_one_step_that_is_both_ends_is_at_the_peak() -> None:
    assert factor(ScheduleConfig(warmup_steps=1, warmup_ends="both"), 0, 5) == 1.0


def test_a_schedule_may_end_before_the_stage_and_counts_its_fractions_by_its_own_length() -> None:
    schedule = ScheduleConfig(type="linear", total_steps=5, warmup_steps=0.2, min_lr_ratio=0.1)
    assert warmup_steps(schedule, 100) == 1
    assert curve(schedule, 8) == pytest.approx([0.5, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1, 0.1])
    assert [warmup_steps(ScheduleConfig(warmup_steps=n), 100) for n in (0, 0.2, 0.999, 1)] == [0, 20, 99, 1]


def test_the_unit_is_the_optimizer_step_or_the_training_step() -> None:
    every, training = ScheduleConfig(), ScheduleConfig(unit="train_step")
    assert [position(every, n, updates_per_step=3) for n in range(5)] == [0, 1, 2, 3, 4]
    assert [position(training, n, updates_per_step=3) for n in range(7)] == [0, 0, 0, 1, 1, 1, 2]


def test_weight_decay_goes_to_its_end() -> None:
    def ramp(shape: str, end: float | None, steps: range) -> list[float]:
        schedule = ScheduleConfig(weight_decay_end=end, weight_decay_type=shape)  # type: ignore[arg-type]
        return [weight_decay(OptimizerConfig(weight_decay=0.1, schedule=schedule), s, 4) for s in steps]

    assert ramp("linear", None, range(3)) == [0.1, 0.1, 0.1]
    assert ramp("linear", 0.5, range(7)) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])
    assert ramp("linear", 0.0, range(5)) == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0])
    half = math.sqrt(0.5)
    want = [0.1, 0.1 + 0.2 * (1 - half), 0.3, 0.1 + 0.2 * (1 + half), 0.5]
    assert ramp("cosine", 0.5, range(5)) == pytest.approx(want)


# ---------------------------------------------------------------- each framework's own formula


def verl_cosine(s: int, *, W: int, N: int, f: float, c: float) -> float:
    if s < W:
        return f + (1 - f) * s / max(1, W)
    p = (s - W) / max(1, N - W)
    return max(f, (1 - f) / 2 * math.cos(2 * math.pi * c * p) + (1 + f) / 2)


def verl_wsd(s: int, *, W: int, N: int, f: float, c: float, ratio: float) -> float:
    stable = math.floor(ratio * (N - W))
    decay = N - W - stable
    if s < W:
        return s / max(1, W)
    if s < W + stable:
        return 1.0
    if s < N:
        q = (s - W - stable) / max(1, decay)
        return (1 - f) * max(0.0, (1 + math.cos(2 * math.pi * c * q)) / 2) + f
    return f


def megatron(s: int, *, style: str, W: int, D: int, K: int, lr: float, init: float, low: float) -> float:
    if W > 0 and s <= W:
        return init + (lr - init) * s / W
    if style == "constant":
        return lr
    if s > D:
        return low
    if style == "inverse-square-root":
        return max(low, lr * math.sqrt(max(W, 1)) / math.sqrt(max(s, 1)))
    if style in ("linear", "cosine"):
        p = (s - W) / (D - W)
        coef = 1 - p if style == "linear" else 0.5 * (math.cos(math.pi * p) + 1)
    elif s <= D - K:
        coef = 1.0
    else:
        q = (s - (D - K)) / K
        coef = {
            "WSD linear": 1 - q,
            "WSD cosine": 0.5 * (math.cos(math.pi * q) + 1),
            "WSD exponential": 2 * 0.5**q - 1,
            "WSD minus_sqrt": 1 - math.sqrt(q),
        }[style]
    return low + coef * (lr - low)


def cosmos(k: int, *, w: int, d: int, T: int, shape: str, f: float) -> float:
    stable = T + 1 - w - d
    if k < w:
        return (k + 1) / w
    if k < w + stable:
        return 1.0
    p = (k + 1 - w - stable) / d
    g = {"linear": 1 - p, "sqrt": 1 - math.sqrt(p), "cosine": (1 + math.cos(math.pi * p)) / 2}[shape]
    return f + (1 - f) * g


LENGTHS = st.integers(2, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1)))
FACTORS = st.sampled_from([0.0, 0.1, 0.5, 1.0])


def agree(schedule: ScheduleConfig, total: int, want: list[float]) -> None:
    assert [factor(schedule, s, total) for s in range(len(want))] == pytest.approx(want, abs=1e-12)


@given(LENGTHS, FACTORS, st.sampled_from([0.5, 1.0, 1.5, 0.25]))
def test_verl_cosine(lengths: tuple[int, int], f: float, c: float) -> None:
    N, W = lengths
    ours = ScheduleConfig(
        type="cosine", warmup_steps=W, warmup_ends="start", warmup_start_ratio=f, min_lr_ratio=f, num_cycles=c
    )
    agree(ours, N, [verl_cosine(s, W=W, N=N, f=f, c=c) for s in range(N)])


@given(LENGTHS, FACTORS, st.sampled_from([0.5, 1.0]), st.sampled_from([0.9, 0.5]))
def test_verl_wsd(lengths: tuple[int, int], f: float, c: float, ratio: float) -> None:
    N, W = lengths
    decay = N - W - math.floor(ratio * (N - W))
    ours = ScheduleConfig(
        type="wsd",
        warmup_steps=W,
        warmup_ends="start",
        decay_steps=decay,
        decay_type="cosine",
        num_cycles=c,
        min_lr_ratio=f,
    )
    agree(ours, N, [verl_wsd(s, W=W, N=N, f=f, c=c, ratio=ratio) for s in range(N)])


STYLES = {
    "constant": {"type": "constant"},
    "linear": {"type": "linear"},
    "cosine": {"type": "cosine"},
    "inverse-square-root": {"type": "inverse_sqrt"},
    "WSD linear": {"type": "wsd", "decay_type": "linear"},
    "WSD cosine": {"type": "wsd", "decay_type": "cosine"},
    "WSD exponential": {"type": "wsd", "decay_type": "exponential"},
    "WSD minus_sqrt": {"type": "wsd", "decay_type": "minus_sqrt"},
}


@pytest.mark.parametrize("style", STYLES)
@given(LENGTHS, st.data())
def test_megatron(style: str, lengths: tuple[int, int], data: st.DataObject) -> None:
    """Rates are absolute there; the stage may go on after lr_decay_steps."""
    D, W = lengths
    K = data.draw(st.integers(1, D - W))
    lr, low, init = 2e-3, data.draw(FACTORS) * 2e-3, data.draw(FACTORS) * 2e-3
    ours = ScheduleConfig(
        **STYLES[style], warmup_steps=W, warmup_ends="start", warmup_start_ratio=init / lr, min_lr_ratio=low / lr,
        total_steps=D, decay_steps=K,
    )  # fmt: skip
    want = [megatron(s, style=style, W=W, D=D, K=K, lr=lr, init=init, low=low) / lr for s in range(D + 5)]
    agree(ours, D + 5, want)


@given(LENGTHS, FACTORS, st.sampled_from(["linear", "sqrt", "cosine"]), st.data())
def test_cosmos(lengths: tuple[int, int], f: float, shape: str, data: st.DataObject) -> None:
    T, w = lengths
    d = data.draw(st.integers(1, T - w))
    ours = ScheduleConfig(
        type="wsd", warmup_steps=w, warmup_ends="peak", decay_steps=d, min_lr_ratio=f,
        decay_type="minus_sqrt" if shape == "sqrt" else shape,  # type: ignore[arg-type]
    )  # fmt: skip
    agree(ours, T, [cosmos(k, w=w, d=d, T=T, shape=shape, f=f) for k in range(T)])


@given(LENGTHS)
def test_constant_with_warmup_of_transformers(lengths: tuple[int, int]) -> None:
    """SkyRL's; verl's constant too."""
    N, W = lengths
    ours = ScheduleConfig(warmup_steps=W, warmup_ends="start")
    agree(ours, N, [s / max(1, W) if s < W else 1.0 for s in range(N)])


@given(
    st.sampled_from(["constant", "linear", "cosine", "inverse_sqrt", "wsd"]),
    st.sampled_from(["neither", "start", "peak", "both"]),
    st.integers(0, 70),
    st.integers(1, 60),
    FACTORS,
    FACTORS,
)
def test_every_factor_is_between_floor_and_peak(
    kind: str, ends: str, warmup: int, total: int, low: float, start: float
) -> None:
    """Also where the warm-up is longer than the stage, and after its end."""
    ours = ScheduleConfig(
        type=kind, warmup_steps=warmup, warmup_ends=ends, warmup_start_ratio=start, min_lr_ratio=low  # type: ignore[arg-type]
    )  # fmt: skip
    for step in range(total + 20):
        least = start if step < warmup else low
        assert least - 1e-12 <= factor(ours, step, total) <= 1.0 + 1e-12
