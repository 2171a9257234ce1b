"""The timeline: whole JSON whatever ends a run, cut exactly on resume, and numbers that add up."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

import whet
from whet.api import train
from whet.commands_runs import show as show_command
from whet.track import time_report, timeline
from whet.track.record import RunDirectory
from whet.track.timeline import EXPLORING, SAMPLING, STEPS, WAITS, Span, SpanReader, Timeline, read
from whet.types import ConfigError, DataError, WhetError

MS = 1_000_000


@pytest.fixture
def tick(monkeypatch):
    """A clock that stands still until told: tick(ms)."""
    now = [5 * MS]

    def move(ms: float) -> None:
        now[0] += round(ms * MS)

    monkeypatch.setattr(timeline, "clock", lambda: now[0])
    return move


def span(name: str, lane: str, start_ms: float, length_ms: float, **more) -> Span:
    given = {"kind": "work", "stage": "s", "step": 1, "busy_ns": round(length_ms * MS), **more}
    return Span(
        name=name,
        lane=lane,
        start_ns=round(start_ms * MS),
        end_ns=round((start_ms + length_ms) * MS),
        **given,
    )


def filled(path: Path, steps: range, stage: str = "s") -> Timeline:
    line = Timeline(path)
    for step in steps:
        line.at = stage, step
        with line.span("generate", STEPS), line.span("decode", SAMPLING):
            pass
        line.flush()
    return line


# ---------------------------------------------------------------- noted


def test_spans_are_chrome_events_with_their_step_and_length(tmp_path, tick):
    line = Timeline(tmp_path / "t.json")
    line.at = "rl", 3
    with line.span("generate", STEPS):
        tick(2)
        with line.span("the weight sync", WAITS):
            tick(0.5)
    line.close()
    events = json.loads((tmp_path / "t.json").read_text())
    heads = [(e["name"], e["args"]["name"].split(" (")[0]) for e in events if e["ph"] == "M"]
    assert heads == [("process_name", "start 1"), ("thread_name", WAITS), ("thread_name", STEPS)]
    wait, phase = (e for e in events if e["ph"] == "X")
    assert (phase["name"], phase["cat"], phase["dur"], phase["args"]) == (
        "generate", "phase", 2500, {"stage": "rl", "step": 3},
    )  # fmt: skip
    assert (wait["cat"], wait["dur"], wait["ts"] - phase["ts"]) == ("wait", 500, 2000)
    assert wait["tid"] != phase["tid"]


def test_a_span_is_written_whatever_ends_it_and_keeps_the_step_it_began_in(tmp_path):
    line = Timeline(tmp_path / "t.json")
    line.at = "s", 1

    def fail() -> None:
        with line.span("update", STEPS):
            line.at = "s", 2
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    line.close()
    assert [(s.name, s.step) for s in read(tmp_path / "t.json")] == [("update", 1)]


def test_a_span_in_a_span_is_a_part_on_lanes_of_work_only(tmp_path):
    line = Timeline(tmp_path / "t.json")
    engine = line.spans_of("policy", skip="micro-batch")
    with line.span("outer", STEPS), line.span("inner", STEPS):
        with engine("update"), engine("micro-batch"), engine("optimizer step"):
            pass
        with engine("forward"):
            pass
    line.close()
    kinds = {s.name: s.kind for s in read(tmp_path / "t.json")}
    assert kinds == {
        "inner": "phase", "outer": "phase", "update": "work", "optimizer step": "part", "forward": "work",
    }  # fmt: skip


def test_pieces_that_follow_closely_become_one_span_that_knows_its_gaps(tmp_path, tick):
    line = Timeline(tmp_path / "t.json")
    for name, gap_ms in [("prefill", 0), ("decode", 0), ("decode", 0.5), ("decode", 0.9), ("decode", 1.1)]:
        tick(gap_ms)
        with line.piece(name, SAMPLING):
            tick(3)
    line.close()
    found = [(s.name, s.pieces, s.end_ns - s.start_ns, s.busy_ns) for s in read(tmp_path / "t.json")]
    assert found == [
        ("prefill", 1, 3 * MS, 3 * MS),
        ("decode", 3, 10_400_000, 9 * MS),
        ("decode", 1, 3 * MS, 3 * MS),
    ]


def test_pieces_are_not_joined_over_a_flush(tmp_path, tick):
    line = Timeline(tmp_path / "t.json")
    for _ in range(2):
        with line.piece("decode", SAMPLING):
            tick(1)
        line.flush()
    assert [s.pieces for s in read(tmp_path / "t.json")] == [1, 1]


# ---------------------------------------------------------------- written


def test_the_file_is_whole_json_after_every_write(tmp_path):
    line = Timeline(tmp_path / "t.json")
    for step in range(1, 5):
        line.at = "stäge", step
        with line.span('a "quoted"\nname', STEPS):
            pass
        line.flush()
        events = json.loads((tmp_path / "t.json").read_text())
        assert [e["args"]["step"] for e in events if e["ph"] == "X"] == list(range(1, step + 1))


def test_a_write_cut_short_anywhere_loses_only_itself(tmp_path):
    path = tmp_path / "t.json"
    line = filled(path, range(1, 3))
    before = len(path.read_bytes()) - len(b"\n]\n")
    filled_up = filled_bytes(line, path)
    for cut in range(before, len(filled_up) + 1):
        path.write_bytes(filled_up[:cut])
        steps = [s.step for s in read(path)]
        assert steps[:4] == [1, 1, 2, 2]
        assert set(steps[4:]) <= {3}
    assert steps[4:] == [3, 3]


def test_of_a_timeline_that_grows_only_what_is_new_is_read(tmp_path):
    path = tmp_path / "t.json"
    line = filled(path, range(1, 3))
    reader = SpanReader()
    found = reader.read(path)
    old = path.read_bytes()
    whole = filled_bytes(line, path)
    for cut in range(len(old) - len(b"\n]\n"), len(whole) + 1):  # a write that is being made
        path.write_bytes(b"?" * reader.end + whole[reader.end : cut])
        found = reader.read(path)
        assert [s.step for s in found[:4]] == [1, 1, 2, 2]
    path.write_bytes(whole)
    assert found == read(path)
    assert reader.read(path) == found


def test_a_fault_in_what_is_new_is_told_with_its_line_each_time(tmp_path):
    path = tmp_path / "t.json"
    filled(path, range(1, 3)).close()
    reader = SpanReader()
    reader.read(path)
    number = path.read_bytes().count(b"\n")  # the bracket's line
    path.write_bytes(path.read_bytes().replace(b"\n]\n", b',\n{"ph": "?"}\n]\n'))
    for _ in range(2):
        with pytest.raises(DataError, match=f"t.json line {number} is not an event"):
            reader.read(path)


def filled_bytes(line: Timeline, path: Path) -> bytes:
    line.at = "s", 3
    with line.span("generate", STEPS), line.span("decode", SAMPLING):
        pass
    line.close()
    return path.read_bytes()


def test_a_start_goes_on_in_a_file_that_a_kill_cut_short(tmp_path):
    path = tmp_path / "t.json"
    filled(path, range(1, 4)).close()
    path.write_bytes(path.read_bytes()[:-30])
    filled(path, range(9, 10)).close()
    json.loads(path.read_text())
    found = read(path)
    assert [s.step for s in found] == [1, 1, 2, 2, 3, 9, 9]
    assert [s.process for s in found] == [1] * 5 + [2] * 2


def test_a_full_disk_leaves_whole_json(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    line = filled(path, range(1, 3))
    real, calls = os.pwrite, []

    def short(handle: int, data: bytes, at: int) -> int:
        calls.append(at)
        return real(handle, data[:20] if len(calls) == 1 else data, at)

    monkeypatch.setattr(os, "pwrite", short)
    with line.span("update", STEPS):
        pass
    with pytest.raises(WhetError, match=r"t\.json: the disk is full"):
        line.flush()
    assert len(json.loads(path.read_text())) == 7
    assert len(read(path)) == 4


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("[\n{broken\n{}\n]\n")
    with pytest.raises(DataError, match="line 2 is not JSON"):
        read(path)
    path.write_text("[\n3\n]\n")
    with pytest.raises(DataError, match="line 2 is not an event"):
        read(path)


KILLED = """
import sys
from pathlib import Path
from whet.track.timeline import Timeline
line, step = Timeline(Path(sys.argv[1])), 0
while True:
    step += 1
    line.at = "s", step
    for n in range(200):
        with line.span("x" * 100, "steps"):
            pass
    line.flush()
    if step == 3:
        print("go", flush=True)
"""


def test_a_run_killed_at_any_moment_leaves_what_its_steps_wrote(tmp_path):
    path = tmp_path / "t.json"
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            os.kill(child.pid, signal.SIGKILL)
    found = Counter((s.process, s.step) for s in read(path))
    assert {process for process, _ in found} == {1, 2, 3}
    for process in (1, 2, 3):
        steps = [n for (p, n) in found if p == process]
        assert len(steps) >= 3
        assert all(found[process, n] == 200 for n in steps[:-1])


# ---------------------------------------------------------------- resumed


def test_a_resumed_run_forgets_what_was_later_than_its_checkpoint(tmp_path):
    first = RunDirectory(tmp_path, ["sft", "rl"])
    for stage, step in [("sft", 1), ("sft", 2), ("rl", 0), ("rl", 1), ("rl", 2)]:
        first.timeline.at = stage, step
        with first.timeline.span("update", STEPS):
            pass
    first.close()
    again = RunDirectory(tmp_path, ["sft", "rl"])
    again.truncate_to(1, 1)
    again.timeline.at = "rl", 2
    with again.timeline.span("update", STEPS):
        pass
    again.close()
    found = [(s.process, s.stage, s.step) for s in read(tmp_path / "timeline.json")]
    assert found == [(1, "sft", 1), (1, "sft", 2), (1, "rl", 0), (1, "rl", 1), (2, "rl", 2)]
    fresh = RunDirectory(tmp_path, ["sft", "rl"])
    fresh.truncate_to(0, -1)
    assert not (tmp_path / "timeline.json").exists()
    fresh.close()


def test_a_run_resumes_in_a_timeline_of_any_size(tmp_path, monkeypatch):
    """Of many processes and weeks it is larger than what is read for people, and than memory for its events."""
    path = tmp_path / "timeline.json"
    first = RunDirectory(tmp_path, ["s"])
    for step in range(1, 301):
        first.timeline.at = "s", step
        for _ in range(4):
            with first.timeline.span("x" * 100, STEPS):
                pass
        first.timeline.flush()
    first.close()
    monkeypatch.setattr(timeline, "MOST_RECORD_BYTES", 1000)
    tracemalloc.start()
    again = Timeline(path)
    again.keep(lambda stage, step: step <= 290)
    again.at = "s", 291
    with again.span("update", STEPS):
        pass
    again.close()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < path.stat().st_size / 4
    with pytest.raises(DataError, match="more than"):
        read(path)
    monkeypatch.undo()
    found = read(path)
    assert Counter(s.step for s in found) == {**dict.fromkeys(range(1, 291), 4), 291: 1}
    assert (found[0].process, found[-1].process) == (1, 2)


def test_an_error_in_the_file_system_is_one_of_the_run(tmp_path, monkeypatch):
    line = Timeline(tmp_path / "t.json")
    with line.span("update", STEPS):
        pass

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(WhetError, match="read-only"):
        line.flush()


# ---------------------------------------------------------------- measured


def test_where_the_time_went_by_hand():
    spans = [
        span("start-up", STEPS, 0, 100, kind="phase", step=0),
        span("generate", STEPS, 100, 40, kind="phase"),
        span("decode", SAMPLING, 100, 40, busy_ns=30 * MS, pieces=7),
        span("update", STEPS, 150, 20, kind="phase"),
        span("update", "policy", 152, 16),
        span("optimizer step", "policy", 160, 8, kind="part"),
        span("room", WAITS, 170, 10, kind="wait", step=2),
        span("generate", STEPS, 180, 80, kind="phase", step=2),
        span("decode", SAMPLING, 180, 60, step=2),
        span("update", STEPS, 260, 40, kind="phase", step=2),
        span("update", "policy", 260, 40, step=2),
    ]
    (stage,) = time_report.measure(spans)
    assert (stage.stage, stage.steps) == ("s", 2)
    assert stage.seconds == pytest.approx(0.300)
    # after start-up 200 ms, of which 30 + 16 + 60 + 40 computed
    assert stage.bubble == pytest.approx(1 - 146 / 200)
    assert stage.other_s == pytest.approx(0.010)
    by_name = {(x.kind, x.name): x for x in stage.spent}
    generate = by_name["phase", "generate"]
    assert (generate.seconds, generate.share) == pytest.approx((0.120, 0.4))
    assert (generate.median_s, generate.max_s) == pytest.approx((0.060, 0.080))
    assert by_name["work", "decode"].pieces == 8
    assert by_name["wait", "room"].seconds == pytest.approx(0.010)


def test_what_no_phase_claims_where_sampling_lies_beside_training():
    spans = [
        span("update", STEPS, 0, 40, kind="phase"),
        span("generate", EXPLORING, 0, 70, kind="phase"),
        span("a group of rollouts", WAITS, 60, 20, kind="wait"),
        span("update", STEPS, 90, 10, kind="phase", step=2),
    ]
    (stage,) = time_report.measure(spans)
    assert (stage.seconds, stage.other_s) == pytest.approx((0.100, 0.010)), "from 80 to 90 ms"


def test_time_between_two_starts_is_nobodys():
    spans = [
        span("update", STEPS, 0, 10, kind="phase", process=1),
        span("update", "policy", 0, 5, process=1),
        span("update", STEPS, 90_000, 30, kind="phase", process=2, step=2),
        span("update", "policy", 90_010, 20, process=2, step=2),
    ]
    (stage,) = time_report.measure(spans)
    assert stage.seconds == pytest.approx(0.040)
    assert stage.bubble == pytest.approx(1 - 25 / 40)


def test_steps_may_end_in_the_same_microsecond():
    spans = [span("update", STEPS, 0, 10, kind="phase", step=step) for step in (1, 2)]
    spans += [span("update", STEPS, 10, 10, kind="phase", step=3), span("update", "policy", 0, 5)]
    (stage,) = time_report.measure(spans)
    assert (stage.steps, stage.bubble) == (3, pytest.approx(0.75))


@pytest.mark.parametrize(
    ("spans", "covered_ms"),
    [
        ([], 0),
        ([(0, 10, 10), (10, 10, 10)], 20),
        ([(0, 10, 10), (5, 10, 10)], 15),
        ([(0, 10, 5), (0, 10, 10)], 10),
        ([(0, 10, 2), (0, 10, 3)], 5),
        ([(0, 20, 10), (10, 10, 10)], 15),
        ([(3, 0, 0)], 0),
    ],
)
def test_covered_time(spans, covered_ms):
    given = [span("x", str(n), a, length, busy_ns=busy * MS) for n, (a, length, busy) in enumerate(spans)]
    assert time_report.covered_ns(given) == pytest.approx(covered_ms * MS)


# ---------------------------------------------------------------- a run

TINY = {
    "model": {
        "scratch": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
        }
    },
    "tokenizer": {"build": "chars"},
    "data": {
        "train": [{"rows": [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]}],
        "max_prompt_tokens": 32,
    },
    "rollout": {"group_size": 2, "sampling": {"max_tokens": 4}},
    "algorithm": {"name": "grpo", "kl": {"coef": 0.1}},
    "train": {"steps": 3, "tasks_per_step": 4, "micro_batch_rollouts": 2},
    "track": {"trackers": ["jsonl"]},
    "checkpoint": {"export": False},
}


def reward(response: str, task: object) -> float:
    return float(len(response) % 2)


def names_of(run_dir: Path) -> Counter[tuple[str, str]]:
    return Counter((s.lane, s.name) for s in read(run_dir / "timeline.json"))


def test_other_processes_fill_the_bubble(tmp_path):
    """The trainer is open at 10 ms and computes from 10 to 20 of 110 ms; an explorer beside it from 0 to 40, half of
    the time; a bench from 90 to 200. Each is there from its first span on."""
    trainer = [
        span(timeline.OPEN_STAGE, STEPS, 0, 10, kind="phase"),
        span("update", "policy", 10, 10),
        span("update", STEPS, 10, 100, kind="phase"),
    ]
    explorer = [span("decode", SAMPLING, 0, 40, busy_ns=20 * MS)]
    bench = [span("decode", SAMPLING, 90, 110)]
    (alone,) = time_report.measure(trainer)
    (stage,) = time_report.measure(trainer, beside={"one": explorer, "bench": bench})
    assert alone.bubble == alone.still == pytest.approx(1 - 10 / 100)
    assert stage.still == pytest.approx(1 - (10 + 20 / 2 + 20) / 100)
    assert stage.bubble == pytest.approx(1 - (10 + 30 / 2 + 20) / (100 + 30 + 20))


def test_every_process_of_a_run_is_shown(tmp_path, capsys):
    for place in (".", "explorers/one", "bench"):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        filled(tmp_path / place / "timeline.json", range(1, 3)).close()
    show_command(tmp_path, timeline=True)
    out = capsys.readouterr().out
    assert [word in out for word in ("process one", "process bench")] == [True, True]


def test_a_run_writes_what_it_did(tmp_path):
    train(rewards=reward, run_dir=str(tmp_path / "run"), **TINY)
    found = names_of(tmp_path / "run")
    for expected in [
        *((STEPS, name) for name in ("generate", "reward", "logprobs", "update")),
        *((WAITS, name) for name in ("room", "a step's worth of rollouts", "the weight sync")),
        ("policy", "update"),
        ("policy", "optimizer step"),
        ("reference", "forward logprobs"),
    ]:
        assert found[expected] == 3, expected
    assert found[STEPS, "start-up"] == found[STEPS, "open stage"] == found[STEPS, "save"] == 1
    assert found[SAMPLING, "prefill"] >= 3
    assert found[SAMPLING, "decode"] >= 3
    assert ("policy", "micro-batch") not in found
    (stage,) = time_report.measure(read(tmp_path / "run/timeline.json"))
    assert stage.steps == 3
    assert 0 < stage.bubble < 1
    assert not any("timeline" in name for name in whet.api.Result(tmp_path / "run", True).metrics[0])

    more = {**TINY, "track": {**TINY["track"], "micro_batches": True}}
    train(rewards=reward, run_dir=str(tmp_path / "fine"), **more)
    fine = names_of(tmp_path / "fine")
    assert fine["policy", "micro-batch"] == 3 * 4
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("run", "fine")]
    assert metrics[0] == metrics[1], "what is measured changes nothing"


def test_show_prints_it_and_refuses_what_does_not_go_together(tmp_path, capsys):
    filled(tmp_path / "timeline.json", range(1, 4)).close()
    show_command(tmp_path, timeline=True)
    out = capsys.readouterr().out
    assert "bubble" in out
    assert "generate" in out
    with pytest.raises(ConfigError, match="leave out --step"):
        show_command(tmp_path, step=1, timeline=True)
    with pytest.raises(DataError, match=r"no timeline\.json"):
        show_command(tmp_path / "nowhere", timeline=True)
    for alone in ({"stage": "main"}, {"task": 0}, {"tokens": True}, {"limit": 1}):
        with pytest.raises(ConfigError, match="give --step N too"):
            show_command(tmp_path, **alone)
