"""How long each test takes, and how many cases of a test `make test` has the time for.

    make times

`pytest -p times` writes the seconds of a processor that each test took, with the processes that it waited for, to
the folder of WHET_TIMES; `python tests/times.py FOLDER` reads them, writes `cases.tsv` and prints the longest tests. A
test whose cases take T seconds keeps those of sqrt(T x SHARE_S) seconds: the more there are, the smaller their share.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import pytest

from swept import CASES, function_of

SHARE_S = 0.25
"""A test of fewer seconds keeps all its cases."""

_cases: Counter[tuple[str, str]] = Counter()


def pytest_collection_finish(session: pytest.Session) -> None:
    _cases.update(function_of(item) for item in session.items)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Cases that `cases.tsv` left out count, those that have the mark in their file do not."""
    marks = ((item, item.get_closest_marker("sweep")) for item in items)
    _cases.update(function_of(item) for item, mark in marks if mark is not None and mark.args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    start, before = time.perf_counter(), _processor_s()
    result = yield
    file, test = function_of(item)
    seconds = (_processor_s() - before, time.perf_counter() - start)
    line = "\t".join([file, test, str(_cases[file, test]), *(f"{s:.3f}" for s in seconds)])
    with (Path(os.environ["WHET_TIMES"]) / f"{os.getpid()}.tsv").open("a") as out:
        print(line, file=out)
    return result


def _processor_s() -> float:
    """Of this process and of those that it waited for."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in both)


Times = Mapping[tuple[str, str], tuple[int, Sequence[float], Sequence[float]]]
"""By file and test: how many cases there are; seconds of a processor and of the clock of those that ran."""


def read(folder: Path) -> Times:
    cases: dict[tuple[str, str], int] = {}
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for path in folder.glob("*.tsv"):
        for line in path.read_text().splitlines():
            file, test, count, processor, clock = line.split("\t")
            cases[file, test] = int(count)
            seconds[file, test].append((float(processor), float(clock)))
    return {key: (cases[key], *map(list, zip(*found))) for key, found in seconds.items()}  # type: ignore[misc]


def kept(cases: int, case_s: float) -> int:
    """How many cases of that many seconds each stay."""
    all_s = cases * case_s
    return cases if all_s <= SHARE_S else min(cases, max(1, round(math.sqrt(all_s * SHARE_S) / case_s)))


def main(folder: Path) -> None:
    found = read(folder)
    rows = {key: (cases, sum(own) / len(own)) for key, (cases, own, _) in found.items()}
    lines = [f"{file}\t{test}\t{kept(*row)}" for (file, test), row in rows.items() if kept(*row) < row[0]]
    CASES.write_text("\n".join(["file\ttest\tcases", *sorted(lines)]) + "\n")
    took = {key: sum(own) for key, (_, own, _) in found.items()}
    now = {key: row[1] * kept(*row) for key, row in rows.items()}
    print(
        f"{len(found)} tests: {sum(took.values()):.0f} s of a processor, {sum(now.values()):.0f} s with the new table"
    )
    print(f"{'seconds':>8}{'kept':>8}{'clock':>8}{'cases':>7}  test")
    for key in sorted(found, key=lambda key: -now[key])[:60]:
        cases, _, clock = found[key]
        print(f"{took[key]:8.1f}{now[key]:8.1f}{sum(clock):8.1f}{cases:7d}  {' '.join(key)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
