"""Measured numbers on pages are those of the files that the benchmarks wrote."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

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
