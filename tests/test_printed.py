"""What rewards and environments print reaches run.log, bounded and counted, and the console at first."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from whet import secrets
from whet.envs import host
from whet.guard import printed
from whet.guard.jail import Jail, RewardCall
from whet.guard.printed import Printed
from whet.track.log import close_logging, setup_logging


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def log(tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    """run.log and what the console shows."""
    shown: list[str] = []
    setup_logging(tmp_path, level="info", show=shown.append)
    yield tmp_path / "run.log", shown
    close_logging()


def said(path: Path) -> list[str]:
    """The messages of run.log, without time, level and logger."""
    return [line.split(": ", 1)[1] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("at", [0, printed.LINE - 11, host.LINE - 31])
def test_a_line_is_never_cut_in_the_middle_of_a_secret(at: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    secrets.learn("TEST_TOKEN", "swordfish-42-swordfish")
    out = Printed()
    lines = host.PrintedLines(lambda _, line, cut: out.take("r", line, dropped_bytes=cut))
    for where in (lines.write, partial(out.take, "s")):
        where("x" * at + "swordfish-42-swordfish" + "y" * 5000 + "\n")
    assert "xx" in caplog.text or at == 0
    assert "sword" not in caplog.text


def test_lines_reach_the_log_and_the_first_ones_the_console(log: tuple[Path, list[str]]) -> None:
    path, shown = log
    out = Printed()
    for n in range(printed.FIRST_LINES + 2):
        out.take("reward 'r'", f"line {n}\n")
    out.take("reward 's'", "one\ntwo")
    note = "reward 'r': what it prints from here on is only in run.log"
    first = [f"reward 'r': line {n}" for n in range(printed.FIRST_LINES)]
    assert shown == [*first, note, "reward 's': one", "reward 's': two"]
    assert said(path) == [
        *first, note, "reward 'r': line 10", "reward 'r': line 11", "reward 's': one", "reward 's': two"
    ]  # fmt: skip


def test_what_is_too_much_in_a_time_is_counted_and_told_once(log: tuple[Path, list[str]]) -> None:
    path, _ = log
    clock = Clock()
    out = Printed(clock=clock)
    out.take("r", "x\n" * (printed.MOST_LINES + 3), dropped_bytes=1000)
    assert len(said(path)) == printed.MOST_LINES + 1  # with the note on the console
    clock.now = printed.PERIOD_S
    out.take("r", "again\n")
    assert said(path)[-2:] == ["r printed 1006 bytes more, which are not in this log", "r: again"]
    out.close()
    assert said(path)[-1] == "r: again"  # nothing new was left out


def test_a_line_without_end_is_cut_and_the_log_stays_small_whatever_is_printed(
    log: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = log
    out = Printed()
    out.take("r", "y" * 50_000)
    out.close()
    assert said(path) == [
        "r: " + "y" * printed.LINE,
        f"r printed {50_000 - printed.LINE} bytes more, which are not in this log",
    ]
    monkeypatch.setattr(printed, "MOST_IN_ALL", 3 * printed.LINE)
    clock = Clock()
    other = Printed(clock=clock)
    before = path.stat().st_size
    for _ in range(1000):
        clock.now += printed.PERIOD_S
        other.take("s", "z" * 1_000_000 + "\n")
    grown = path.stat().st_size - before
    assert grown < 3 * printed.LINE + 1000 * 200  # a line of counting in each period


def test_a_chatterbox_costs_its_worker_no_time_and_every_byte_is_counted() -> None:
    """Ten gigabytes through the pipe would take longer than the call has."""

    def load():
        def loud(task: int) -> float:
            line = "x" * 10_000_000
            for _ in range(1000):
                print(line)
            return 1.0

        return loud

    with Jail({"f": load}, timeout_s=30.0, max_output_bytes=1000) as jail:
        first, second = asyncio.run(jail.call_many([RewardCall(function="f", arguments='{"task": 1}')] * 2))
    for result in (first, second):
        assert result.failure is None
        assert result.output == "x" * 1000
        assert len(result.output) + result.dropped_bytes == 1000 * 10_000_001


def test_an_environment_host_says_lines_in_time_and_counts_the_rest() -> None:
    heard: list[tuple[object, ...]] = []
    clock = Clock()
    out = host.PrintedLines(lambda *what: heard.append(what), clock=clock)
    out.write("a\nbeginning")
    out.write(" and end\n")
    assert heard == [("said", "a", 0), ("said", "beginning and end", 0)]
    heard.clear()
    for _ in range(100):
        out.write("x" * 10_000)  # no end of a line: what is longer than a line is counted, not kept
    assert heard == []
    assert len(out.line) == host.LINE
    clock.now = host.PERIOD_S
    out.write("\nback\n")
    _, lines, cuts = zip(*heard)
    assert lines == ("x" * host.LINE, "back")
    assert cuts == (1_000_000 - host.LINE, 0)
    heard.clear()
    out.write("no end")
    out.end()
    assert heard == [("said", "no end", 0)]


def test_bytes_are_counted_not_characters(log: tuple[Path, list[str]]) -> None:
    path, _ = log
    out = Printed()
    lines = host.PrintedLines(lambda _, line, cut: out.take("r", line, dropped_bytes=cut))
    lines.write("語" * (host.LINE + 10) + "\n")
    out.take("r", "語" * (printed.LINE + 20))
    out.take("r", f"{'語' * printed.LINE}\n" * 2)
    out.close()
    assert (
        said(path)[-1]
        == f"r printed {3 * (10 + 20) + 2 * (3 * printed.LINE + 1)} bytes more, which are not in this log"
    )


def test_a_program_may_be_given_what_an_environment_prints_to(capfd: pytest.CaptureFixture[str]) -> None:
    """The mcp package gives a server's errors to sys.stderr."""
    output = host.PrintedLines(lambda *what: None)
    subprocess.run([sys.executable, "-c", "print('x')"], stdout=output, check=True)
    assert capfd.readouterr().out == "x\n"


def test_a_warning_is_shown_with_its_level_and_a_printed_line_without(log: tuple[Path, list[str]]) -> None:
    _, shown = log
    logging.getLogger("whet.x").warning("careful")
    logging.getLogger("whet.x").info("not shown")
    Printed().take("r", "hello")
    assert shown == ["WARNING whet.x: careful", "r: hello"]
