"""The plot of a run: reward and held-out accuracy over its steps, or the loss if there is neither."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whet.track.files import write_bytes
from whet.track.metrics import HELD_OUT, LOSS, REWARD, reward_of_step
from whet.track.written import read_lines
from whet.types import WhetError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, FAINT = "#1f2430", "#6b7280", "#e5e7eb"
REWARD_COLOUR, HELD_OUT_COLOUR = "#2f6fde", "#d9480f"

Point = tuple[int, float]
"""(step counted over all stages, value)"""


@dataclass
class Series:
    """The data of the plot. `stages` are (name, first step, last step), counted over all stages.

    `reward` and `loss` by stage: a stage's curve does not run on from the one before.
    """

    reward: dict[str, list[Point]] = field(default_factory=dict)
    loss: dict[str, list[Point]] = field(default_factory=dict)
    held_out: list[Point] = field(default_factory=list)
    stages: list[tuple[str, int, int]] = field(default_factory=list)


def series(run_dir: Path) -> Series:
    """The two curves of a run, its stages laid end to end."""
    out = Series()
    last: dict[str, int] = {}
    lines = read_lines(run_dir / "metrics.jsonl")
    for line in lines:
        last[line["stage"]] = max(last.get(line["stage"], 0), line["step"])
    start: dict[str, int] = {}
    at = 0
    for stage, steps in last.items():
        start[stage] = at
        out.stages.append((stage, at, at + steps))
        at += steps
    for line in lines:
        step = start[line["stage"]] + line["step"]
        if (reward := reward_of_step(line)) is not None:
            out.reward.setdefault(line["stage"], []).append((step, reward))
        if LOSS in line:
            out.loss.setdefault(line["stage"], []).append((step, line[LOSS]))
        if HELD_OUT in line:
            out.held_out.append((step, line[HELD_OUT]))
    return out


def plot(run_dir: Path) -> Path:
    """Draw `curve.png` into the run directory. Raises WhetError if there is nothing to draw."""
    found = series(run_dir)
    if not (found.reward or found.held_out or found.loss):
        raise WhetError(
            f"{run_dir}/metrics.jsonl has none of the metrics {REWARD}, {HELD_OUT} and {LOSS} to draw"
        )
    picture = io.BytesIO()
    figure(found).savefig(picture, format="png", facecolor="white")
    path = run_dir / "curve.png"
    write_bytes(path, picture.getvalue())
    return path


def figure(found: Series) -> Figure:
    """One panel if rewards are shares too; else rewards have their own, above held-out accuracy."""
    import matplotlib
    from matplotlib.figure import Figure

    rewards = [value for points in found.reward.values() for _, value in points]
    are_shares = all(-0.05 <= value <= 1.05 for value in rewards)
    rows = 1 if are_shares or not found.held_out else 2
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK}):
        figure = Figure(figsize=(8, 4.2 if rows == 1 else 6), dpi=160, layout="tight")
        axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
        if rewards or found.held_out:
            _draw(axes[0], found.reward, label="reward in training")
        else:
            _draw(axes[0], found.loss, label="loss")
        _draw_held_out(axes[-1], found.held_out)
        for axis in axes:
            _style(axis, found)
        if found.held_out:
            axes[-1].set_ylim(-0.02, 1.05)
        axes[-1].set_xlabel("training step", color=GREY)
        _name_stages(axes[0], found)
    return figure


def _draw(axis: Axes, by_stage: Mapping[str, Sequence[Point]], *, label: str) -> None:
    for number, points in enumerate(by_stage.values()):
        steps, numbers = zip(*points)
        axis.plot(steps, numbers, color=REWARD_COLOUR, alpha=0.25, linewidth=1)
        name = None if number else label
        axis.plot(steps, smooth(numbers), color=REWARD_COLOUR, linewidth=2, label=name)


def _draw_held_out(axis: Axes, points: Sequence[Point]) -> None:
    if not points:
        return
    steps, shares = zip(*points)
    axis.plot(
        steps, shares, color=HELD_OUT_COLOUR, linewidth=2, marker="o", markersize=5,
        markeredgecolor="white", markeredgewidth=1, label="held-out accuracy", zorder=5,
    )  # fmt: skip
    step, share = points[-1]
    axis.annotate(
        f"{share:.3f}", (step, share), xytext=(7, 0), textcoords="offset points",
        color=HELD_OUT_COLOUR, va="center", fontweight="bold", annotation_clip=False,
    )  # fmt: skip


def smooth(values: Sequence[float]) -> np.ndarray:
    """Centred running mean over a twentieth of the curve (at least 3 points), narrower at both ends; NaN where one of
    them is. By running sums: the work grows with the curve alone."""
    numbers, at = np.asarray(values, dtype=np.float64), np.arange(len(values))
    lost = np.isnan(numbers)
    sums, losses = (np.concatenate([[0.0], np.cumsum(x)]) for x in (np.where(lost, 0.0, numbers), lost))
    reach = np.minimum(max(len(values) // 40, 1), np.minimum(at, at[::-1]))
    first, last = at - reach, at + reach + 1
    return np.where(losses[last] > losses[first], np.nan, (sums[last] - sums[first]) / (last - first))


def _style(axis: Axes, found: Series) -> None:
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(FAINT)
    axis.grid(axis="y", color=FAINT, linewidth=0.8)
    axis.tick_params(colors=GREY, length=0)
    axis.set_axisbelow(True)
    first, last = found.stages[0][1], found.stages[-1][2]
    pad = 0.01 * max(last - first, 10)
    # not of the points alone: a run may begin in the middle of a stage
    axis.set_xlim(first - pad, last + pad)
    for _, first, _ in found.stages[1:]:
        axis.axvline(first, color=GREY, linewidth=1, linestyle=(0, (2, 3)))
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="best", frameon=False, labelcolor=INK)


def _name_stages(axis: Axes, found: Series) -> None:
    for name, first, last in found.stages:
        axis.annotate(
            name, ((first + last) / 2, 1), xycoords=("data", "axes fraction"), xytext=(0, 6),
            textcoords="offset points", ha="center", color=GREY, fontweight="bold",
        )  # fmt: skip
