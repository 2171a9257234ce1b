"""What the learning benchmark found: tables between markers of a document, and two pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learning_cases import STALENESS, Case, Part, cases
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEGIN, END = "<!-- learning.py: begin -->", "<!-- learning.py: end -->"
INK, GREY, FAINT = "#1f2430", "#6b7280", "#dfe3e8"
COLOURS: Mapping[Part, str] = {
    "recipe": "#2f6fde",
    "function": "#0f766e",
    "setting": "#7c3aed",
    "offline": "#d9480f",
}
WORDS = {
    "recipe": "Recipes that learn from their own rollouts",
    "function": "Losses and advantages that are part of no recipe, with the rest of `grpo`",
    "setting": "Settings beside a recipe; `grpo`, where the remarks name no other",
    "offline": "Recipes that learn from given replies",
    "staleness": "GRPO with an engine that gets new weights every so many steps",
}
COLUMNS = 8

Curve = list[tuple[int, float]]
Result = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """All seeds of one case."""

    name: str
    case: Case
    curves: tuple[Curve, ...]
    cpu_s: float
    errors: tuple[str, ...]

    @property
    def before(self) -> float:
        return _mean(c[0][1] for c in self.curves)

    @property
    def after(self) -> list[float]:
        return [c[-1][1] for c in self.curves]

    @property
    def replies(self) -> float:
        return _mean(c[-1][0] for c in self.curves)

    @property
    def beats_start(self) -> bool:
        """In every seed."""
        return bool(self.curves) and not self.errors and all(c[-1][1] > c[0][1] for c in self.curves)


def line(result: Result) -> str:
    """How one run went."""
    head = f"{result['name']}, seed {result['seed']}"
    if "error" in result:
        return f"{head}: {result['error']}"
    first, last = result["curve"][0], result["curve"][-1]
    return f"{head}: {first[1]:.3f} -> {last[1]:.3f} after {last[0]:,} replies, {result['cpu_s']:.1f} CPU s"


def summaries(results: Sequence[Result]) -> list[Summary]:
    """In the order of the cases; those without a result are left out."""
    return [_summary(name, case, mine) for name, case in cases().items() if (mine := _of(results, name))]


def _of(results: Sequence[Result], name: str) -> list[Result]:
    return [r for r in results if r["name"] == name]


def _summary(name: str, case: Case, results: Sequence[Result]) -> Summary:
    ran = [r for r in results if "curve" in r]
    return Summary(
        name=name,
        case=case,
        curves=tuple([(n, y) for n, y in r["curve"]] for r in ran),
        cpu_s=_mean(r["cpu_s"] for r in ran),
        errors=tuple(r["error"] for r in results if "error" in r),
    )


def _mean(numbers: Iterable[float]) -> float:
    found = list(numbers)
    return sum(found) / max(len(found), 1)


def mean_curve(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float], list[float]]:
    """(replies, mean, lowest, highest) over the seeds, evaluation by evaluation. Seeds may differ in their replies
    (groups asked for again), so those are means too."""
    columns = list(zip(*curves))
    replies = [_mean(n for n, _ in column) for column in columns]
    rewards = [[y for _, y in column] for column in columns]
    return replies, [_mean(ys) for ys in rewards], [min(ys) for ys in rewards], [max(ys) for ys in rewards]


# ---------------------------------------------------------------- tables


def tables(found: Sequence[Summary]) -> str:
    """Markdown: a table for every part."""
    out = []
    for part, words in WORDS.items():
        if mine := [s for s in found if s.case.part == part]:
            out += [f"{words}:", "", *_table(mine), ""]
    return "\n".join(out)


def _table(found: Sequence[Summary]) -> Iterator[str]:
    what = "rollouts" if found[0].case.kind == "online" else "replies"
    yield f"| case | before | after, mean | after, lowest seed | {what} | CPU s | remarks |"
    yield "|---|---|---|---|---|---|---|"
    for s in found:
        cells = [f"`{s.name}`", *_numbers(s), "; ".join(_remarks(s))]
        yield "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def _numbers(s: Summary) -> list[str]:
    if not s.curves:
        return [""] * 5
    numbers = [f"{s.before:.2f}", f"{_mean(s.after):.2f}", f"{min(s.after):.2f}"]
    return [*numbers, f"{s.replies:,.0f}", f"{s.cpu_s:.1f}"]


def _remarks(s: Summary) -> Iterator[str]:
    if s.curves and not s.beats_start:
        yield "**not above its start in every seed**"
    if s.case.why:
        yield s.case.why
    for error in s.errors:
        yield f"stopped: {error}"


def put(document: str, text: str) -> str:
    """The document with `text` between the markers."""
    head, _, rest = document.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise ValueError(f"the document has no lines {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{text}\n{END}{tail}"


# ---------------------------------------------------------------- pictures


def grid(found: Sequence[Summary]) -> Figure:
    """A small panel a case: the mean of its seeds and their range, in front of all others."""
    drawn = [s for part in COLOURS for s in found if s.case.part == part and s.curves]
    rows = -(-len(drawn) // COLUMNS)
    figure = Figure(figsize=(1.65 * COLUMNS, 1.3 * rows + 0.5), dpi=110, layout="constrained")
    axes = list(figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flat)
    for axis, summary in zip(axes, drawn):
        for other in drawn:
            if other.case.part == summary.case.part:
                replies, mean, _, _ = mean_curve(other.curves)
                axis.plot(replies, mean, color=FAINT, linewidth=0.6)
        _draw(axis, summary.curves, colour=COLOURS[summary.case.part])
        axis.set_title(summary.name.replace("=", "=\n"), fontsize=7, color=INK, pad=2)
        _plain(axis)
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    figure.supxlabel("replies asked for, or read (orange), in thousands", fontsize=8, color=GREY)
    figure.supylabel("held-out reward", fontsize=8, color=GREY)
    return figure


def staleness(found: Sequence[Summary]) -> Figure:
    """With and without correction, a panel for each staleness."""
    figure = Figure(figsize=(9, 2.9), dpi=130, layout="constrained")
    colours = {False: "#d9480f", True: "#2f6fde"}
    for axis, steps in zip(figure.subplots(1, len(STALENESS), sharey=True), STALENESS):
        for s in found:
            if s.case.part != "staleness" or s.case.staleness != steps or not s.curves:
                continue
            corrected = "correction" in s.case.algorithm
            label = "importance weights, at most 2" if corrected else "no correction"
            _draw(axis, s.curves, colour=colours[corrected], label=label)
        axis.set_title(f"at most {steps} versions behind" if steps else "on-policy", fontsize=9, color=INK)
        axis.set_xlabel("rollouts, thousands", fontsize=8, color=GREY)
        _plain(axis)
    figure.axes[0].set_ylabel("held-out reward", fontsize=8, color=GREY)
    figure.axes[0].legend(fontsize=7, frameon=False, loc="lower right")
    return figure


def _draw(axis: Axes, curves: Sequence[Curve], *, colour: str, label: str = "") -> None:
    replies, mean, low, high = mean_curve(curves)
    axis.fill_between(replies, low, high, color=colour, alpha=0.18, linewidth=0)
    axis.plot(replies, mean, color=colour, linewidth=1.3, label=label)


def _plain(axis: Axes) -> None:
    axis.set_ylim(0, 1.02)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}")
    axis.tick_params(labelsize=6, colors=GREY, length=2)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(FAINT)


def write_all(results: Sequence[Result], *, document: Path) -> None:
    """Tables into the document, pictures into `assets` beside it."""
    found = summaries(results)
    assets = document.parent / "assets"
    assets.mkdir(exist_ok=True)
    grid(found).savefig(assets / "learning.png")
    staleness(found).savefig(assets / "staleness.png")
    text = document.read_text(encoding="utf-8")
    document.write_text(put(text, tables(found)), encoding="utf-8")
