"""How long each test takes: which ones `make test` has the time for, and how many cases of each.

    make times

`pytest -p times` writes the seconds of a processor that each test took, with the processes that it waited for, and
those of the clock to the folder of WHET_TIMES; `python tests/times.py FOLDER` reads them, writes `cases.tsv` and prints
the longest tests. A test whose cases take T seconds of a processor keeps those of sqrt(T x SHARE_S) seconds, but of
LEAST_S at least: the more there are, the smaller their share. What then takes LONG_S on the clock is for
`make test-long`, but for one test of each kind.
"""

from __future__ import annotations

import math
import os
import resource
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import pytest

from swept import CASES, function_of

SHARE_S, LEAST_S = 0.25, 1.0

LONG_S = 2.5
ONE_OF_A_KIND = frozenset(
    {
        ("test_checkpoint.py", "test_killed_while_it_saves_in_the_background_it_goes_on_from_the_one_before"),
        ("test_cli.py", "test_killed_it_leaves_no_process"),
        ("test_cluster.py", "test_tokens_weights_and_errors_travel"),
        ("test_dead_verl.py", "test_no_key_is_dead"),
        ("test_env_contract.py", "test_an_environment_that_fails_ends_its_own_episode_and_changes_no_other"),
        ("test_jail.py", "test_a_beast_gets_its_failure_and_its_neighbours_get_their_values"),
        ("test_learning.py", "test_reward_rises"),
        ("test_native.py", "test_alone_or_with_fifty_others_in_any_order_bit_for_bit"),
        (
            "test_payloads.py",
            "test_code_that_a_verifier_evaluates_can_do_nothing_and_the_verifier_still_judges",
        ),
        ("test_ranks_grid.py", "test_a_step_on_each_layout_from_the_checkpoint_of_another"),
        ("test_same_run.py", "test_a_file_is_the_native_run_bit_for_bit"),
        ("test_secrets.py", "test_no_secret_stands_in_what_a_run_leaves_or_prints"),
        ("test_stores.py", "test_sigkill_at_every_write_loses_nothing"),
    }
)
"""In `make test` whatever they take: of each promise one test that a whole run, real processes or a kill proves."""
WHOLE = frozenset(
    {
        ("test_dead_cosmos.py", "test_another_value_of_a_key_changes_the_native_config"),
        ("test_dead_skyrl.py", "test_another_value_changes_the_native_config_or_is_refused_by_name"),
        ("test_dead_trinity.py", "test_another_value_changes_the_config_or_is_refused"),
        ("test_dead_verl.py", "test_no_key_is_dead"),
        ("test_golden.py", "test_a_file_resolves_to_what_was_kept"),
    }
)
"""No case of them is left to the sweep: what is kept in a file goes out of date with the next change that nobody
compares, and a key that lost its effect is told by its own case alone."""

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
    left_s = max(LEAST_S, math.sqrt(cases * case_s * SHARE_S))
    return cases if cases * case_s <= left_s else max(1, round(left_s / case_s))


def main(folder: Path) -> None:
    found = read(folder)
    lines, now, quick_s = [], {}, 0.0
    for (file, test), (cases, own, clock) in found.items():
        left = kept(cases, statistics.median(own))  # the first one may pay for what all share
        left = cases if (file, test) in WHOLE else left
        clock_s = left * sum(clock) / len(clock)
        long = clock_s > LONG_S and (file, test) not in ONE_OF_A_KIND
        if left < cases or long:
            lines.append(f"{file}\t{test}\t{left}\t{'long' if long else ''}")
        now[file, test] = left * sum(own) / len(own)
        quick_s += 0.0 if long else clock_s
    CASES.write_text("\n".join(["file\ttest\tcases\tlong", *sorted(lines)]) + "\n")
    took = {key: sum(own) for key, (_, own, _) in found.items()}
    print(
        f"{len(found)} tests: {sum(took.values()):.0f} s of a processor, {sum(now.values()):.0f} s with the new table; "
        f"{quick_s:.0f} s on the clocks of all workers in `make test`"
    )
    print(f"{'seconds':>8}{'kept':>8}{'clock':>8}{'cases':>7}  test")
    for key in sorted(found, key=lambda key: -now[key])[:60]:
        cases, _, clock = found[key]
        print(f"{took[key]:8.1f}{now[key]:8.1f}{sum(clock):8.1f}{cases:7d}  {' '.join(key)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
