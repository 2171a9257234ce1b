"""Measured numbers on pages are those of the files that the benchmarks wrote."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def page(name: str) -> str:
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


def measured(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / name).read_text(encoding="utf-8"))


def rounded(x: float) -> str:
    """One digit, as 2e-6."""
    digit, power = f"{x:.0e}".split("e")
    return f"{digit}e{int(power)}"


def test_errors_of_layouts() -> None:
    layouts = {name: cases for name, cases in measured("layouts.json").items() if not name.startswith("one ")}
    errors: dict[str, list[float]] = {"gradients": [], "weights": [], "critic": []}
    for cases in layouts.values():
        for case, found in cases.items():
            for what in {"gradients", "weights"} & found.keys():
                errors["critic" if case == "critic" else what].append(found[what][0])
    gradient, weight, critic = (rounded(max(errors[what])) for what in errors)
    assert (
        f"Over {len(layouts)} layouts the largest relative error is {gradient} for a gradient, {weight} for a weight "
        f"after three steps, and {critic} for a weight of the critic"
    ) in page("scaling.md")


def test_seconds_of_syncs() -> None:
    rows = [row for row in measured("sync.json")["rows"] if row["dtype"] == "auto" and not row["lora"]]
    s = {(row["method"], row["content"]): f"{row['seconds']:.2f}" for row in rows}
    assert (
        f"a sync took {s['files', 'full']} s by files and {s['collective', 'full']} s by collectives; "
        f"{s['files', 'delta']} and {s['collective', 'delta']} s if one layer of eight has changed"
    ) in page("scaling.md")


def test_signals_of_the_kills() -> None:
    found = measured("kills.json")
    assert not found["wrong"]
    text, seconds = page("resume.md"), [hit["seconds"] for hit in found["hits"]]
    assert f"sent {len(seconds)} signals (SIGKILL and SIGSTOP)" in text
    assert f"median {median(seconds):.1f}, longest {max(seconds):.0f} " in text


def test_speeds_of_schedules() -> None:
    text = page("schedules.md")
    for row in measured("async.json")["schedules"]:
        if row["schedule"] != "asynchronous 1":
            name, share = (
                row["schedule"].replace("synchronous 0", "synchronous"),
                row["of bound"].replace("%", " %"),
            )
            assert f"| {row['sigma']} | {name} | {row['s/step']:.3f} | {share} | {row['x in turn']} |" in text


SPEEDS = sorted(path.name for path in (ROOT / "benchmarks").glob("results*.json"))


def lines(name: str) -> list[str]:
    return (ROOT / name).read_text(encoding="utf-8").splitlines()


def parts(side: dict[str, float], update_s: float) -> str:
    return f"{side['generate_s']:.3f} + {update_s:.3f} + {side['rest_s']:.3f}"


@pytest.mark.parametrize("name", SPEEDS)
def test_steps_against_trl(name: str) -> None:
    """Every case has its row, or is told in the text; docs/performance.md has its ratio."""
    rows, text = lines("benchmarks/README.md"), " ".join(" ".join(lines("benchmarks/README.md")).split())
    for case in measured(name):
        whet, trl, faster = case["whet"], case["trl"], f"{case['faster']:.2f}"
        low, high = (f"{end:.2f}" for end in case["faster_range"])
        cells = [
            f" {whet['step_s']:.3f} | {parts(whet, whet['update_s'])} |",
            f" {trl['step_s']:.3f} | {parts(trl, trl['loss_backward_s'] + trl['optimizer_s'])} |",
            f" {whet['peak_rss_mb']:,.0f} | {trl['step_s']:.3f} |",
            f" {trl['peak_rss_mb']:,.0f} | **{faster}x**",
        ]
        if "floor_s" in case:
            floor = f"{case['floor_s']:.3f} ({case['gflops']:.0f}, {case['fastest_products']})"
            cells.append(f"| {floor} | {whet['step_s'] / case['floor_s']:.2f} |")
        found = [row for row in rows if row.startswith(f"| {case['case']}") and cells[0] in row]
        if not found:
            assert f"{case['case']} {whet['step_s']:.3f} s" in text, case["case"]
            assert f"{faster} ({low}-{high}) times" in text, case["case"]
            continue
        assert [cell for cell in cells if cell not in found[0]] == [], found[0]
        assert low == high or f"({low}-{high})" in found[0] or f"{low} to {high}" in text, found[0]


@pytest.mark.parametrize(
    "name", [name for name in SPEEDS if name not in ("results.json", "results_bfloat16.json")]
)
def test_ratios_to_trl_by_machine(name: str) -> None:
    (row,) = (line for line in lines("docs/performance.md") if f"`benchmarks/{name}`" in line)
    found = {case["case"]: f"{case['faster']:.2f}" for case in measured(name) if case["dtype"] == "float32"}
    ratios = [found.get(case, "") for case in ("S/32", "M/32", "L/32", "S/128", "M/128")]
    assert [cell.strip() for cell in row.split("|")[2:7]] == ratios


def test_steps_of_the_first_table() -> None:
    rows = lines("docs/performance.md")
    for case in measured("results.json"):
        whet, trl = case["whet"], case["trl"]
        memory = f"{whet['peak_rss_mb']:,.0f} | {trl['peak_rss_mb']:,.0f}"
        times = f"{whet['step_s']:.3f} | {trl['step_s']:.3f} | {case['faster']:.2f}x"
        assert f"| {case['case']} | {times} | {memory} |" in rows
