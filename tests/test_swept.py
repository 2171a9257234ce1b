"""Which cases `make test` keeps of a test that has more than it has the time for."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import swept
import times

HERE = Path(__file__).parent


def items(cases: int, test: str = "test_it", *marks: pytest.Mark) -> list[Any]:
    """Stand-ins for what pytest collects of one parametrised test."""

    def item(n: int) -> SimpleNamespace:
        own = list(marks)
        return SimpleNamespace(
            path=HERE / "test_here.py",
            originalname=test,
            name=f"{test}[{n}]",
            own=own,
            get_closest_marker=lambda name: next((m for m in own if m.name == name), None),
            add_marker=lambda mark: own.append(mark.mark),
        )

    return [item(n) for n in range(cases)]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cases.tsv"
    path.write_text("file\ttest\tcases\tlong\ntest_here.py\ttest_it\t3\t\ntest_here.py\ttest_slow\t3\tlong\n")
    monkeypatch.setattr(swept, "CASES", path)
    monkeypatch.setattr(times, "CASES", path)
    return path


def left(found: list[Any]) -> set[str]:
    return {item.name for item in found if not item.own}


def test_the_same_cases_stay_in_any_order_and_most_of_them_beside_new_ones(table: Path) -> None:
    cases = items(20)
    swept.sample(cases)
    assert len(left(cases)) == 3
    backwards = items(20)[::-1]
    swept.sample(backwards)
    assert left(backwards) == left(cases)
    more = items(21)
    swept.sample(more)
    assert len(left(more) & left(cases)) >= 2


def test_what_the_table_does_not_name_stays_and_a_mark_of_its_own_counts_for_nothing(table: Path) -> None:
    other, marked, free = items(5, "test_other"), items(5, "test_it", pytest.mark.sweep.mark), items(5)
    swept.sample([*other, *marked, *free])
    assert len(left(other)) == 5
    assert [len(item.own) for item in marked] == [1] * 5
    assert len(left(free)) == 3


def test_the_cases_of_a_long_test_are_for_the_long_tests_or_the_sweep(table: Path) -> None:
    cases = items(20, "test_slow")
    swept.sample(cases)
    assert sorted(mark.name for item in cases for mark in item.own) == ["long"] * 3 + ["sweep"] * 17


def test_every_row_of_the_table_is_a_test() -> None:
    rows = [*swept.rows(), *([file, test, "", ""] for file, test in times.ONE_OF_A_KIND)]
    for file in {file for file, *_ in rows}:
        names = {f.name for f in ast.walk(ast.parse((HERE / file).read_text())) if hasattr(f, "name")}
        assert {test for own, test, *_ in rows if own == file} <= names, file


def test_one_of_a_kind_is_no_long_test() -> None:
    assert not {(file, test) for file, test, _, long in swept.rows() if long} & times.ONE_OF_A_KIND


def test_what_is_kept_of_many_seconds_and_what_is_long(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 cases of 0.5 s: the root of 200 x 0.25 are 7 s, 14 cases, 8.4 s on the clock; one of 8 s stays;
    2 cases of 0.05 s, too; 100 of 0.03 s become 33, a second's, which wait little; one that only waits is long, but for
    one of its kind."""
    lines = ["test_a.py\ttest_many\t400\t0.5\t0.6"] * 2
    lines += ["test_a.py\ttest_one\t1\t8.0\t9.0", "test_a.py\ttest_short\t2\t0.05\t0.1"]
    lines += ["test_b.py\ttest_some\t100\t0.03\t0.04", "test_b.py\ttest_waits\t1\t0.1\t4.0"]
    lines += ["test_b.py\ttest_kill\t1\t0.1\t4.0"]
    folder = tmp_path / "times"
    folder.mkdir()
    (folder / "1.tsv").write_text("\n".join(lines[:2]) + "\n")
    (folder / "2.tsv").write_text("\n".join(lines[2:]) + "\n")
    monkeypatch.setattr(times, "ONE_OF_A_KIND", {("test_b.py", "test_kill")})
    times.main(folder)
    assert table.read_text().splitlines() == [
        "file\ttest\tcases\tlong",
        "test_a.py\ttest_many\t14\tlong",
        "test_a.py\ttest_one\t1\tlong",
        "test_b.py\ttest_some\t33\t",
        "test_b.py\ttest_waits\t1\tlong",
    ]
