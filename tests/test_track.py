"""Numbers of a step, trackers, the live display and the curve."""

from __future__ import annotations

import fcntl
import io
import itertools
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import Config, TrackConfig
from whet.guard import pulse
from whet.guard.watch import Watch
from whet.track import curve, display, metrics, report, show
from whet.track.monitor import Monitor
from whet.track.overview import StageNumbers, numbers_of
from whet.track.overview import read as read_run
from whet.track.record import RunDirectory
from whet.track.timeline import Timeline
from whet.track.trackers import first_new_step, open_trackers
from whet.track.written import read_lines
from whet.types import ConfigError, FinishReason, Group, Rollout, Task, WhetError
from whet.view import answers
from whet.view.source import ShownRuns

FIGURE = curve.figure
"""As it is before conftest.py puts an empty one in its place."""


def rollout(
    reward: float | None,
    *,
    tokens: int = 2,
    end: FinishReason = "stop",
    source: str = "a",
    error: str | None = None,
) -> Rollout:
    return Rollout.one_strand(
        task=Task(uid=0, source=source, prompt="p"),
        index=0,
        token_ids=[9] + [5] * tokens,
        mask=[0] + [1] * tokens,
        logprobs=[0.0] * (tokens + 1),
        sample_logprobs=[0.0] * (tokens + 1),
        versions=[-1] + [0] * tokens,
        finish_reason=end,
        reward=reward,
        reward_parts={} if reward is None else {"x": 2 * reward},
        error=error,
    )


def group(*rollouts: Rollout) -> Group:
    return Group(rollouts[0].task, rollouts)


# ---------------------------------------------------------------- numbers


def test_the_summary_of_a_step_worked_by_hand() -> None:
    out = metrics.summarise(
        [
            group(rollout(0.0), rollout(1.0, tokens=6, end="length")),
            group(rollout(1.0, source="b"), rollout(None, source="b", end="abort", error="timeout: 10 s")),
            group(rollout(1.0, source="b"), rollout(1.0, source="b")),
        ]
    )
    expected = {
        "reward/scored_count": 5,
        "reward/mean": 0.8,
        "reward/std": math.sqrt((0.64 + 4 * 0.04) / 5),
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/source/a_count": 2,
        "reward/source/a_mean": 0.5,
        "reward/source/b_count": 3,
        "reward/source/b_mean": 1.0,
        "reward/part/x_count": 5,
        "reward/part/x_mean": 1.6,
        "rollout/count": 6,
        "rollout/tokens_sum": 16,
        "rollout/tokens_mean": 16 / 6,
        "rollout/tokens_max": 6,
        "rollout/finish_stop_frac": 4 / 6,
        "rollout/finish_length_frac": 1 / 6,
        "rollout/finish_abort_frac": 1 / 6,
        "rollout/failed_count": 1,
        "rollout/failed/timeout_count": 1,
        "group/count": 3,
        "group/compared_count": 2,
        "group/zero_std_frac": 0.5,
        "group/reward_std_mean": 0.25,
    }
    assert out == pytest.approx(expected, abs=1e-15)


def test_the_summary_does_not_depend_on_order() -> None:
    groups = [group(*(rollout(0.1 * i * 3**j) for i in range(5))) for j in range(4)]
    first = metrics.summarise(groups)
    for shuffled in itertools.permutations(groups):
        assert metrics.summarise(shuffled) == first


def test_a_uniform_group_of_odd_rewards_counts_as_uniform() -> None:
    """0.1 three times has a mean that is not 0.1 in floating point."""
    assert metrics.summarise([group(*[rollout(0.1)] * 3)])["group/zero_std_frac"] == 1.0


def test_nothing_scored_gives_counts_and_no_invented_mean() -> None:
    lost = replace(rollout(None), error="unscored")
    out = metrics.summarise([group(lost, lost)])
    assert out["reward/scored_count"] == 0
    assert out["rollout/failed_count"] == 2
    assert out["rollout/failed/unscored_count"] == 2
    assert not {"reward/mean", "group/zero_std_frac"} & out.keys()
    assert metrics.summarise([])["rollout/count"] == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("timeout: no answer in 10 s", "timeout"),
        ("reward 'x' took longer than 10.0 s", "reward_x_took_longer_than"),
        ("ValueError: bad\nTraceback", "ValueError"),
        ("\u4e2d\u6587", "other"),
        ("12", "other"),
        (None, "unscored"),
    ],
)
def test_reasons_are_grouped_without_their_numbers(error: str | None, reason: str) -> None:
    assert metrics.reason_of(error) == reason


def test_merging_optimizer_steps() -> None:
    out = metrics.merge(
        [
            {"train/loss": 1.0, "train/skipped_steps": 1.0, "train/mismatch_max_nats": 0.5, "a/x_count": 2},
            {
                "train/loss": 2.0,
                "train/skipped_steps": 1.0,
                "train/mismatch_max_nats": 0.25,
                "a/x_count": 3,
                "b/y": 7.0,
            },
        ]
    )
    assert out == {
        "train/loss": 1.5, "train/skipped_steps": 2.0, "train/mismatch_max_nats": 0.5, "a/x_count": 5,
        "b/y": 7.0,
    }  # fmt: skip
    assert metrics.merge([]) == {}


def test_a_mean_of_nothing_has_a_count_and_no_value() -> None:
    means = {"a/x": metrics.Mean(3.0, 2), "a/y": metrics.Mean.of([])}
    assert metrics.values(means) == {"a/x_mean": 1.5, "a/x_count": 2, "a/y_count": 0}


# ---------------------------------------------------------------- trackers


def tracked(*names: str) -> Config:
    return Config(track=TrackConfig(trackers=names))  # type: ignore[arg-type]


def test_jsonl_is_always_written_and_once(tmp_path: Path) -> None:
    for number, names in enumerate([[], ["console"], ["jsonl", "console", "jsonl"]]):
        directory = RunDirectory(tmp_path / str(number), ["s"])
        trackers = open_trackers(tracked(*names), directory)
        for tracker in trackers:
            tracker.log("s", 1, metrics={"a/b": 0.5}, timings={"time/step_s": 2.0})
            tracker.close()
        assert read_lines(directory.path / "metrics.jsonl") == [{"a/b": 0.5, "stage": "s", "step": 1}]
        assert read_lines(directory.path / "timings.jsonl") == [{"time/step_s": 2.0, "stage": "s", "step": 1}]


def test_an_unknown_tracker_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'tensorbord' is not known; did you mean 'tensorboard'"):
        plans(load(None, ["track.trackers=[tensorbord]"]))


def test_a_missing_tensorboard_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'whet\[tensorboard\]'"):
        open_trackers(tracked("tensorboard"), RunDirectory(tmp_path, ["s"]))


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def run(places: list[tuple[str, int]], value: float, resumed: tuple[int, int] | None) -> None:
        directory = RunDirectory(tmp_path, ["one", "two"])
        tracker = open_trackers(tracked("tensorboard"), directory, resumed=resumed)[1]
        for stage, step in places:
            tracker.log(stage, step, metrics={"reward/mean": value}, timings={"time/step_s": 1.0})
        tracker.close()

    run([("one", n) for n in range(4)] + [("two", n) for n in range(3)], 1.0, None)
    run([("one", n) for n in (2, 3)] + [("two", n) for n in range(3)], 2.0, (0, 1))
    run([("two", 2)], 3.0, (1, 1))
    seen = {}
    for stage in ("one", "two"):
        events = EventAccumulator(str(tmp_path / "tensorboard" / stage))
        events.Reload()
        seen[stage] = [(e.step, e.value) for e in events.Scalars("reward/mean")]
        assert len(events.Scalars("time/step_s")) == len(seen[stage])
    assert seen == {
        "one": [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0)],
        "two": [(0, 2.0), (1, 2.0), (2, 3.0)],
    }


def test_where_a_resumed_run_begins_to_write() -> None:
    assert [first_new_step(stage, (1, 7)) for stage in range(3)] == [None, 8, 0]
    assert [first_new_step(stage, None) for stage in range(2)] == [0, 0]


# ---------------------------------------------------------------- display


STEP = ({"reward/mean": 0.5, "rollout/failed_count": 1}, {"speed/tokens_per_s": 30_400.0})


def test_pairs_show_accuracy_and_margin_and_no_reward() -> None:
    """The rewards of a pair are 1 and 0 in every step."""
    shown, out = plain([("dpo", 1)])
    shown.step({"reward/mean": 0.5, "train/accuracy": 0.75, "train/margin": 0.125, "train/loss": 0.6}, {})
    shown.close()
    assert out.getvalue().startswith("dpo step 1/1  accuracy 0.750  margin 0.125  ")
    assert "reward" not in out.getvalue()


def plain(stages: list[tuple[str, int]]) -> tuple[display.Display, io.StringIO]:
    out = io.StringIO()
    return display.Display(stages, console=Console(file=out, width=40)), out


def test_without_a_terminal_it_is_plain_lines() -> None:
    shown, out = plain([("sft", 2), ("grpo", 300)])
    shown.exactness("exact")
    shown.step({"train/loss": 1.25}, {})
    shown.step({"train/loss": 1.0}, {})
    shown.stage(1, done=100)
    shown.evaluated(100, {"eval/accuracy": 0.25})
    for _ in range(200):
        shown.step(*STEP)
    shown.message("saved [bold]here[/bold] \x1b[2J")
    shown.close()
    shown.close()
    lines = out.getvalue().splitlines()
    assert re.fullmatch(
        r"sft step 1/2  loss 1\.2500  \S+ s/step( +0:00 left)?  log-prob match: exact", lines[0]
    )
    assert lines[1].startswith("sft step 2/2  loss 1.0000")
    assert lines[2] == "grpo step 100/300  held-out 0.250"
    assert lines[3].startswith("grpo step 300/300  reward 0.500  held-out 0.250  30.4k tokens/s")
    assert lines[3].endswith("failed 200  log-prob match: exact")
    assert lines[4] == r"saved [bold]here[/bold] \x1b[2J"
    assert len(lines) == 5
    assert all(c.isprintable() or c == "\n" for c in out.getvalue())


def test_lines_come_every_few_seconds_and_long_phases_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    monkeypatch.setattr(display, "ALIVE_EVERY_S", 0.5)
    shown, out = plain([("grpo", 9)])
    shown.step(*STEP)
    shown.step(*STEP)
    shown.phase("generate")
    end = time.monotonic() + 60
    while "in generate" not in out.getvalue() and time.monotonic() < end:
        time.sleep(0.05)
    shown.close()
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines[:2]] == ["grpo step 1/9", "grpo step 2/9"]
    assert re.fullmatch(r"grpo step 2/9  in generate for \d:\d\d", lines[2])


def test_what_follows_a_phase_is_told_in_the_words_of_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker that hangs after an update is no update."""
    monkeypatch.setattr(display, "ALIVE_EVERY_S", 0.5)
    shown, out = plain([("grpo", 9)])
    with Watch() as watch:
        monitor = Monitor("grpo", shown, watch, Timeline(Path("never written")))
        with monitor.phase("update"):
            pass
        pulse.beat("WandbTracker (track.trackers), step 1")
        end = time.monotonic() + 60
        while "in " not in out.getvalue() and time.monotonic() < end:
            time.sleep(0.05)
        shown.close()
    assert re.fullmatch(
        r"grpo step 0/9  in WandbTracker \(track.trackers\), step 1 for \d:\d\d",
        out.getvalue().splitlines()[0],
    )


def test_a_report_in_a_narrow_terminal_loses_no_digit() -> None:
    shown, out = plain([("s", 1)])
    table = report.columns("stage", "steps", "time", "tokens", "tokens/s", "held-out start", "held-out end")
    table.add_row("main", "1000", "1:02:03", "123.4k", "12345", "0.273", "0.996")
    shown.show(table)
    shown.close()
    assert "…" not in out.getvalue()
    assert all(
        word in out.getvalue() for word in ("1:02:03", "123.4k", "12345", "0.273", "0.996", "tokens/s")
    )


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    shown = display.Display([("s", 1)], quiet=True)
    shown.step(*STEP)
    shown.evaluated(1, {"eval/accuracy": 1.0})
    shown.message("x")
    shown.show("report")
    shown.close()
    assert capsys.readouterr().out == ""


def test_in_a_terminal_it_draws_place_numbers_and_phase() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    shown = display.Display([("sft", 2), ("grpo", 8)], console=console)
    shown.stage(1, done=4)
    shown.exactness("close")
    shown.step(*STEP)
    shown.phase("evaluate")
    shown.evaluated(5, {"eval/accuracy": 0.75})
    view = Console(file=io.StringIO(), width=100)
    with view.capture() as captured:
        view.print(shown.__rich__())
    shown.close()
    head, facts, phase = captured.get().splitlines()
    assert head.startswith("grpo 2/2  ")
    assert "step 5 of 8" in head
    assert "left" in head
    assert "reward 0.500  held-out 0.750  30.4k tokens/s" in facts
    assert facts.rstrip().endswith("failed 1  log-prob match: close")
    assert "evaluate" in phase
    assert "\x1b[?25h" in out.getvalue(), "the cursor is given back"


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_reader_that_goes_away_does_not_end_the_run(kind: str) -> None:
    code = """
import sys, time
from whet.track.display import Display
shown = Display([("grpo", 3)])
shown.message("ready")
sys.stdin.readline()
for _ in range(3):
    shown.phase("generate")
    shown.step({"reward/mean": 0.5}, {})
    shown.evaluated(1, {"eval/accuracy": 1.0})
    time.sleep(0.3)
shown.show("report")
shown.close()
print("FINISHED", file=sys.stderr)
"""
    ours, theirs = os.pipe() if kind == "pipe" else pty.openpty()
    if kind == "terminal":
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    run = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=theirs, stderr=subprocess.PIPE, text=True
    )
    os.close(theirs)
    seen = b""
    while b"ready" not in seen:
        seen += os.read(ours, 1000)
    os.close(ours)
    _, err = run.communicate("go\n", timeout=20)
    assert "FINISHED" in err
    assert "Exception in thread" not in err


def test_text_that_the_terminals_encoding_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    shown = display.Display([("s", 1)])
    shown.message("na\u00efve")
    shown.close()
    sys.stdout.flush()
    assert raw.getvalue() == b"na?ve\n"


# ---------------------------------------------------------------- texts


def test_numbers_for_people() -> None:
    assert [report.count(x) for x in (0, 950, 30_400, 1.2e6, 5e9)] == ["0", "950", "30.4k", "1.2M", "5.0G"]
    assert [report.duration(x) for x in (None, 0.4, 31, 7509)] == ["-", "0:00", "0:31", "2:05:09"]


def test_foreign_text_cannot_command_the_terminal() -> None:
    assert report.printable("a\x1b]0;x\x07\r\x9bb\nc\td\u202e") == r"a\x1b]0;x\x07\r\x9bb" + "\nc\td\\u202e"
    short = report.shorten("ab  \n" * 100, limit=21)
    assert short == "ab ab ab … ab ab ab"
    assert report.shorten(" a \n b ") == "a b"


def test_the_final_report() -> None:
    stage = StageNumbers("grpo", steps=300, seconds=31.0, tokens=184_000, rewards=[], held_out=[0.25, 0.5])
    other = StageNumbers("sft", steps=3, seconds=None, tokens=950, rewards=[], held_out=[])
    example = show.Example(
        prompt="batad>",
        answer="datab",
        before="batad",
        after="[b]datab",
        passed_before=False,
        passed_after=True,
    )
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as captured:
        console.print(show.final_report([stage, other], examples=[example], curve=Path("runs/x/curve.png")))
    lines = [" ".join(line.split()) for line in captured.get().splitlines()]
    assert lines == [
        "stage steps time tokens held-out start held-out end",
        "grpo 300 0:31 184.0k 0.250 0.500",
        "sft 3 - 950 - -",
        "",
        "prompt expected before after",
        "batad> datab batad [b]datab",
        "",
        "curve runs/x/curve.png",
    ]


@pytest.mark.parametrize(("answers", "said"), [((None,), ""), ((None, "7"), "-")])
def test_a_task_without_an_answer_expects_none_in_the_report(
    answers: tuple[str | None, ...], said: str
) -> None:
    examples = [
        show.Example(prompt="p", answer=answer, before="b", after="a", passed_before=True, passed_after=True)
        for answer in answers
    ]
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as captured:
        console.print(show.final_report([], examples=examples, curve=None))
    table = [line.split() for line in captured.get().splitlines()][-len(answers) - 1 :]
    assert table[:2] == [
        ["prompt", *["expected"] * bool(said), "before", "after"],
        ["p", *[said] * bool(said), "b", "a"],
    ]


# ---------------------------------------------------------------- the curve


def write(path: Path, lines: list[tuple[str, int, dict[str, float]]]) -> Path:
    directory = RunDirectory(path, list(dict.fromkeys(stage for stage, _, _ in lines)) or ["s"])
    for stage, step, numbers in lines:
        directory.log(stage, step, metrics=numbers, timings={})
    directory.close()
    return path


def test_stages_are_laid_end_to_end(tmp_path: Path) -> None:
    run = write(
        tmp_path,
        [
            ("sft", 0, {"eval/accuracy": 0.0}),
            ("sft", 1, {"train/loss": 3.0}),
            ("sft", 2, {"train/loss": 2.0}),
            ("grpo", 0, {"eval/accuracy": 0.25}),
            ("grpo", 1, {"reward/mean": 0.5, "train/loss": 0.0}),
            ("grpo", 3, {"reward/mean": 0.75}),
        ],
    )
    found = curve.series(run)
    assert found.stages == [("sft", 0, 2), ("grpo", 2, 5)]
    assert found.held_out == [(0, 0.0), (2, 0.25)]
    assert found.reward == {"grpo": [(3, 0.5), (5, 0.75)]}
    assert found.loss == {"sft": [(1, 3.0), (2, 2.0)], "grpo": [(3, 0.0)]}


def test_rewards_of_given_pairs_are_no_headline(tmp_path: Path) -> None:
    """They are 1 and 0 whatever is learned: the loss is drawn. What a reward has scored has parts."""
    given = {"reward/mean": 0.5, "train/accuracy": 0.75, "train/loss": 0.25}
    scored = {"reward/part/letters_mean": 2.0, "reward/mean": 2.0, "train/accuracy": 0.5, "train/loss": 0.5}
    run = write(tmp_path, [("dpo", 1, given), ("online", 1, scored)])
    found = curve.series(run)
    assert found.reward == {"online": [(2, 2.0)]}
    assert found.loss == {"dpo": [(1, 0.25)], "online": [(2, 0.5)]}
    assert [numbers_of(read_run(run), name).rewards for name in ("dpo", "online")] == [[], [2.0]]
    (line,) = answers.answer(ShownRuns([run]), "api/runs")["runs"]
    assert line["reward"] == 2.0


@pytest.mark.parametrize(
    "numbers",
    [
        {"reward/mean": 0.5},
        {"eval/accuracy": 0.5},
        {"train/loss": 3.0},
        {"reward/mean": -40.0, "eval/accuracy": 0.1},
    ],
)
def test_a_picture_is_drawn_of_whatever_there_is(
    tmp_path: Path, numbers: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve, "figure", FIGURE)
    path = curve.plot(write(tmp_path, [("s", n, numbers) for n in range(1, 4)]))
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24])[0] == 1280


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match="to draw"):
        curve.plot(write(tmp_path, []))


def test_smoothing() -> None:
    assert list(curve.smooth([5.0])) == [5.0]
    assert list(curve.smooth([0.0, 3.0, 0.0, 3.0])) == [0.0, 1.0, 2.0, 3.0]
    assert list(curve.smooth([2.0] * 200)) == [2.0] * 200
    gap = curve.smooth([1.0] * 100 + [math.nan] + [3.0] * 100)
    assert np.flatnonzero(np.isnan(gap)).tolist() == list(range(95, 106))
    assert (gap[:95] == 1.0).all()
    assert (gap[106:] == 3.0).all()


def test_smoothing_reads_a_long_curve_once() -> None:
    """By windows, whose length grows with the curve, a run of 200,000 steps would take a minute to draw."""

    class Read(list[float]):
        count = 0

        def __iter__(self) -> Iterator[float]:
            self.count += len(self)
            return super().__iter__()

        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            self.count += len(found) if isinstance(at, slice) else 1
            return found

    values = Read([0.5] * 2000)
    curve.smooth(values)
    assert values.count <= 2 * len(values)
