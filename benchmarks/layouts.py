"""The grid of layouts: every number of an engine on ranks against one process, as the largest relative error of a cell.

    OMP_NUM_THREADS=1 python benchmarks/layouts.py            # all that layouts.json beside it lacks, into it
    OMP_NUM_THREADS=1 python benchmarks/layouts.py --world 2  # of two ranks only

A cell of the first table: a policy in float32, an update whose gradients are compared one by one, three more steps, and
what they end in. Its numbers are the largest error of any gradient, of any metric, of any weight after the steps; an
error is the norm of the difference by the norm expected, of a metric by its size (at least 1e-3). The second: log-probs
and values without gradient, a critic, a reference with the divergence over the whole vocabulary, and a checkpoint that
was written on the layout, read by one process, and the other way round. The row "one process" is how far its float32
gradient is from the float64 one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from whet.environment import prepare  # noqa: E402

prepare(None, exact=True)

import torch  # noqa: E402

import grid  # noqa: E402

Cell = dict[str, tuple[float, str]]


def measured(world: int, *, known: Container[str]) -> Iterator[tuple[str, dict[str, Cell]]]:
    """Errors by layout, then by what was done. known: names that are left out."""
    ranks = grid.started(world)
    try:
        for name, layout in grid.layouts_of(world):
            if name in known:
                continue
            cells = row(ranks, layout)
            print(
                name, {kind: f"{max(e for e, _ in c.values()):.0e}" for kind, c in cells.items()}, flush=True
            )
            yield name, cells
        if (name := f"one after the other, {world} ranks") in known:
            return
        with tempfile.TemporaryDirectory() as folder:
            dense = [layout for _, layout in grid.layouts_of(world) if layout == grid.Layout(layout.dims)]
            errors, note = grid.worst()
            grid.handed_on(ranks, dense, grid.WAYS["shared prompts"], note, folder=Path(folder))
        yield name, {"handed on": errors}
    finally:
        ranks.close()


def row(ranks: Any, layout: grid.Layout) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for name, way in grid.WAYS.items():
        cells[name], note = grid.worst()
        grid.policy(ranks, layout, way, note)
    usual = grid.WAYS["shared prompts"]
    for kind in (grid.critic, grid.reference):
        cells[kind.__name__], note = grid.worst()
        kind(ranks, layout, usual, note)
    cells["resumed"], note = grid.worst()
    with tempfile.TemporaryDirectory() as folder:
        grid.resumed(ranks, layout, usual, note, folder=Path(folder))
    return cells


def table(found: dict[str, dict[str, Cell]], kinds: list[str]) -> str:
    """Markdown: a row a layout, a column a kind: gradients / metrics / weights, or the largest of all."""
    lines = ["| layout | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for name, cells in found.items():
        if any(kind in cells for kind in kinds):
            lines.append(f"| {name} | " + " | ".join(_cell(cells.get(kind)) for kind in kinds) + " |")
    return "\n".join(lines)


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    named = [cell[what][0] for what in ("gradients", "metrics", "weights") if what in cell]
    return " / ".join(f"{e:.0e}" if e else "0" for e in named)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, choices=(2, 4))
    parser.add_argument(
        "--show", action="store_true", help="print what layouts.json has, and measure nothing"
    )
    asked = parser.parse_args()
    world = asked.world
    if asked.show:
        show(json.loads((HERE / "layouts.json").read_text()))
        return
    torch.set_num_threads(1)
    path = HERE / "layouts.json"
    found: dict[str, dict[str, Cell]] = json.loads(path.read_text()) if path.exists() else {}
    if "one process" not in found:
        found["one process"] = {name: {"gradients": (rounding(way), "")} for name, way in grid.WAYS.items()}
    for size in (2, 4) if world is None else (world,):
        for name, cells in measured(size, known=found):
            found[name] = cells
            path.write_text(json.dumps(found, indent=1) + "\n")
    show(found)


def rounding(way: grid.Way) -> float:
    """Of one process, the larger of both families."""
    return max(grid.own_rounding(grid.Layout(grid.Dims(), family=f), way) for f in ("qwen3", grid.MOE))


def show(found: dict[str, dict[str, Cell]]) -> None:
    """Both tables."""
    print(table(found, list(grid.WAYS)))
    print()
    rest = {name: cells for name, cells in found.items() if name != "one process"}
    print(table(rest, ["critic", "reference", "resumed", "handed on"]))


if __name__ == "__main__":
    main()
