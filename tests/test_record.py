"""The run directory and its files: whole or not there, equal bytes for equal runs, cut exactly on resume."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import math
import os
import random
import signal
import socket
import stat
import struct
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from forked import ran
from whet.buffer import files as queue_files
from whet.guard.printed import FIRST_LINE
from whet.guard.processes import state, until
from whet.storage import fetch
from whet.track import files, manifest, record, turn_seconds, written
from whet.track.log import setup_logging
from whet.types import TOKEN_TYPES, CheckpointError, ConfigError, DataError, Message, Rollout, Task, WhetError


def rollout(uid: int, index: int = 0, *, reward: float | None = 1.0) -> Rollout:
    logprob = float(np.float32(-0.1 * (uid + 1)))
    return Rollout.one_strand(
        task=Task(uid=uid, source="spell", prompt="ab>", answer="ba"),
        index=index,
        token_ids=[1, 2, 3, 4],
        mask=[0, 0, 1, 1],
        logprobs=[0.0, 0.0, logprob, -1.5],
        sample_logprobs=[0.0, 0.0, -0.25, -1.5],
        versions=[-1, -1, 7, 7],
        finish_reason="stop",
        text="ba",
        reward=reward,
        reward_parts={} if reward is None else {"z": reward, "a": 0.1},
        error=None if reward is not None else "timeout: 10 s",
    )


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int
) -> None:
    path = tmp_path / "state.json"
    files.write_json(path, {"step": 1})

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(
        WhetError, match=r"cannot write .*state.json: (the disk|your disk|the file|permission)"
    ):
        files.write_json(path, {"step": 2})
    assert json.loads(path.read_text()) == {"step": 1}
    assert names(tmp_path) == ["state.json"]


def test_json_with_nan_is_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"x": 1.0})
    with pytest.raises(ValueError, match="Out of range"):
        files.write_json(tmp_path / "a.json", {"x": math.nan})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1.0}


def test_a_real_size_limit_is_reported_in_words_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    """In a process that may write no more than 4096 bytes a file."""
    code = f"""
import resource, torch
from pathlib import Path
from safetensors.torch import save_file
from whet.track import files
from whet.types import TOKEN_TYPES, CheckpointError, WhetError
root = Path({str(tmp_path)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try: files.write_bytes(root / "big", bytes(100_000))
except WhetError as e: print("BYTES", e)
try:
    with files.atomic_folder(root / "checkpoint") as folder:
        save_file({{"a": torch.zeros(10_000)}}, folder / "a.safetensors")
except CheckpointError as e: print("FOLDER", e)
"""
    done = ran(code)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "BYTES cannot write" in out
    assert "FOLDER cannot write" in out
    assert out.count("larger than the system or a limit") == 2
    assert names(tmp_path) == []


def test_an_atomic_folder_replaces_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "export"
    for content in ("old", "new"):
        with files.atomic_folder(path) as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / content).write_text(content)
            assert folder != path
    assert names(path / "sub") == ["new"]
    assert names(path.parent) == ["export"]


@pytest.mark.parametrize("durable", [True, False])
def test_others_may_read_what_is_in_an_atomic_folder(tmp_path: Path, durable: bool) -> None:
    with files.atomic_folder(tmp_path / "export", durable=durable) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").touch(0o600)  # as safetensors leaves it
    assert stat.S_IMODE((tmp_path / "export/sub/a").stat().st_mode) == 0o644


def fill_and_fail(path: Path, error: BaseException) -> None:
    with files.atomic_folder(path) as folder:
        (folder / "a").write_text("new")
        raise error


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyError("x"), KeyboardInterrupt()])
def test_an_error_in_the_block_leaves_the_old_folder(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "export"
    with files.atomic_folder(path) as folder:
        (folder / "a").write_text("old")
    expected = CheckpointError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        fill_and_fail(path, error)
    assert (path / "a").read_text() == "old"
    assert names(tmp_path) == ["export"]


def test_if_the_second_rename_fails_the_old_folder_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "export"
    with files.atomic_folder(path) as folder:
        (folder / "a").write_text("old")
    real = os.rename

    def rename(src: Path, dst: Path) -> None:
        if ".new-" in str(src):
            raise OSError(errno.EACCES, "no")
        real(src, dst)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CheckpointError, match="permission denied"), files.atomic_folder(path) as folder:
        (folder / "a").write_text("new")
    assert (path / "a").read_text() == "old"
    assert names(tmp_path) == ["export"]


def test_tidy_after_a_kill_at_any_point_of_a_replacement(tmp_path: Path) -> None:
    """Killed while filling, between the renames, and before the old folder was removed."""
    for folder, content in {".a.new-1": "half", ".b.old-2": "old", "c": "new", ".c.old-3": "old"}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x").write_text(content)
    (tmp_path / ".b.new-2").mkdir()
    (tmp_path / ".d.json.new-4").write_text("half")
    files.tidy(tmp_path)
    assert {p.name: (p / "x").read_text() for p in tmp_path.iterdir()} == {"b": "old", "c": "new"}


def test_killing_a_writer_never_leaves_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    code = f"""
import itertools
from pathlib import Path
from whet.track.files import write_json
path = Path({str(path)!r})
for n in itertools.count():
    write_json(path, {{"n": n, "filler": [n] * 20_000}}, durable=False)
    if n == 0: print("ready", flush=True)
"""
    for delay in (0.01, 0.03, 0.05):
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        writer.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(delay)
        writer.kill()
        writer.wait()
        writer.stdout.close()
        value = json.loads(path.read_text())
        assert value["filler"] == [value["n"]] * 20_000


# ---------------------------------------------------------------- the lock


def test_two_runs_in_one_directory(tmp_path: Path) -> None:
    with files.RunLock(tmp_path):
        assert files.holder(tmp_path) is not None
        assert files.is_running(tmp_path) is True
        with pytest.raises(WhetError, match=f"in use by process {os.getpid()} on "):
            files.RunLock(tmp_path)
    assert files.is_running(tmp_path) is False
    files.RunLock(tmp_path).release()


def test_a_lock_that_is_released_twice_is_not_that_of_another_run(tmp_path: Path) -> None:
    first = files.RunLock(tmp_path / "first")
    first.release()
    with files.RunLock(tmp_path / "second"):  # with the same numbers of handles
        first.release()
        assert files.runs_here(tmp_path / "second") == os.getpid()


def test_a_place_that_takes_no_folder_is_not_said_to_be_removed_by_somebody() -> None:
    said = "cannot write /proc/whet-run/lock: there is no such folder: none can be made there, or another process"
    with pytest.raises(WhetError, match=said):
        files.RunLock(Path("/proc/whet-run"))


def test_a_dead_runs_lock_does_not_block_though_its_forked_child_lives(tmp_path: Path) -> None:
    code = f"""
import os, time
from pathlib import Path
from whet.track.files import RunLock
lock = RunLock(Path({str(tmp_path)!r}))
if os.fork() == 0:
    print(os.getpid(), flush=True)
    os.close(1)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    child = int(run.stdout.readline())
    try:
        with pytest.raises(WhetError, match=f"process {run.pid} on"):
            files.RunLock(tmp_path)
        run.kill()
        run.wait()
        assert files.is_running(tmp_path) is False
        os.kill(child, 0)
        files.RunLock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)
        run.stdout.close()


HOLDER = """
import sys
from pathlib import Path
from whet.track.files import RunLock
RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_whose_process_nobody_waited_for_is_not_running(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        run.stdout.readline()
        assert files.is_running(tmp_path) is True
        assert files.runs_here(tmp_path) == run.pid
        run.kill()
        assert until(lambda: state(run.pid) == "Z", 60), "it has ended, and its number is still taken"
        assert files.is_running(tmp_path) is False
        assert files.runs_here(tmp_path) is None


def test_a_run_whose_number_is_another_process_s_by_now_is_not_running(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(f"{os.getpid()} {socket.gethostname()}\n")
    assert files.is_running(tmp_path) is False
    (tmp_path / "lock").write_text(f"{os.getpid()} another-host\n")
    assert files.is_running(tmp_path) is None


def test_who_looks_whether_a_run_lives_keeps_none_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.RunLock(tmp_path).release()
    with files.lock_opened(tmp_path / "lock", os.O_RDONLY) as looking:
        files.lock(looking, fcntl.LOCK_SH)
        with pytest.raises(WhetError, match="in use"):
            files.RunLock(tmp_path)
        monkeypatch.setattr(
            files.time, "sleep", lambda _: [fcntl.flock(handle, fcntl.LOCK_UN) for handle in looking]
        )
        files.RunLock(tmp_path).release()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_lock_file_that_is_deleted_lets_nobody_in(tmp_path: Path, replaced: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "held\n"
        (tmp_path / "lock").unlink()
        if replaced:
            (tmp_path / "lock").write_text("")
        with pytest.raises(WhetError, match="is in use by another process"):
            files.RunLock(tmp_path)
        run.kill()
    files.RunLock(tmp_path).release()


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("kind", ["store", "fetch"])
def test_a_shared_lock_whose_file_is_deleted_lets_nobody_in(
    kind: str, replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_files, "BUSY_S", 0.0)
    monkeypatch.setattr(fetch, "LOCK_S", 0.0)

    def entered() -> AbstractContextManager[object]:
        if kind == "fetch":
            return fetch.alone(tmp_path)
        return queue_files.FilesLog(tmp_path, queue="q").turn()

    with entered():
        (path,) = [*tmp_path.rglob("lock"), *tmp_path.rglob(".lock")]
        path.unlink()
        if replaced:
            path.write_text("")
        with pytest.raises(WhetError, match=r"has held the lock|was locked by another"), entered():
            pass
    with entered():
        pass


# ---------------------------------------------------------------- numbers


def test_numbers_are_read_back_to_the_bit(tmp_path: Path) -> None:
    rng = random.Random(0)
    numbers = {}
    while len(numbers) < 200:
        x = struct.unpack("d", rng.randbytes(8))[0]
        if math.isfinite(x):
            numbers[f"n/{len(numbers)}"] = x
    directory = record.RunDirectory(tmp_path, ["s"])
    directory.log("s", 3, metrics=numbers, timings={})
    [line] = written.read_lines(tmp_path / "metrics.jsonl")
    assert {k: struct.pack("d", v) for k, v in line.items() if k in numbers} == {
        k: struct.pack("d", v) for k, v in numbers.items()
    }
    assert line["stage"] == "s"
    assert line["step"] == 3
    raw = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert list(raw) == sorted(raw)
    assert (tmp_path / "timings.jsonl").read_text() == ""


def test_numbers_that_are_not_finite_are_null_and_counted() -> None:
    line = json.loads(record.line_of("s", 1, {"a/x": math.nan, "a/y": -math.inf, "a/z": 1.0, "a/n": 2}))
    assert line == {
        "a/x": None, "a/y": None, "a/z": 1.0, "a/n": 2, "stage": "s", "step": 1, "track/nonfinite_count": 2,
    }  # fmt: skip
    assert json.loads(record.line_of("s", 1, {"a/t": torch.tensor(0.5)})) == {  # type: ignore[dict-item]
        "a/t": 0.5,
        "stage": "s",
        "step": 1,
    }


def test_a_full_disk_while_logging_is_a_clear_error(tmp_path: Path) -> None:
    directory = record.RunDirectory(tmp_path, ["s"])
    directory.metrics_file = io.FileIO("/dev/full", "a")
    with pytest.raises(WhetError, match=r"metrics.jsonl: the disk is full"):
        directory.log("s", 1, metrics={"a/b": 1.0}, timings={})


@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl"])
@pytest.mark.parametrize(
    ("done", "said"),
    [("removed", "removed it during the write"), ("moved", "removed it"), ("replaced", "was replaced")],
)
def test_no_line_is_written_to_a_file_that_nobody_finds(
    done: str, said: str, name: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    directory = record.RunDirectory(run, ["main"])
    directory.log("main", 1, metrics={"a": 1.0}, timings={"b": 1.0})
    if done == "moved":
        run.rename(tmp_path / "elsewhere")
    else:
        (run / name).unlink()
    if done == "replaced":
        (run / name).write_text("")
    with pytest.raises(WhetError, match=rf"run/(metrics|{name.partition('.')[0]})\.jsonl.*{said}"):
        directory.log("main", 2, metrics={"a": 1.0}, timings={"b": 1.0})
    directory.close()


def test_a_line_of_which_only_a_part_fits_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = record.RunDirectory(tmp_path, ["s"])
    directory.log("s", 1, metrics={"a/b": 1.0}, timings={})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:5]))
    with pytest.raises(WhetError, match="disk is full"):
        directory.log("s", 2, metrics={"a/b": 1.0}, timings={})
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WhetError, match=r"cannot write .*a file stands where a folder is needed"):
        record.RunDirectory(tmp_path / "file" / "run", ["s"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(WhetError, match="permission denied"):
        record.RunDirectory(tmp_path / "run", ["s"])


@pytest.mark.parametrize("stages", [["a/b"], ["../x"], [""], ["a", "a"], [".hidden"]])
def test_stage_names_that_cannot_name_files_are_refused(tmp_path: Path, stages: list[str]) -> None:
    with pytest.raises(ConfigError, match="stage names"):
        record.RunDirectory(tmp_path / "run", stages)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- resume


def write_run(path: Path, places: list[tuple[str, int]]) -> record.RunDirectory:
    directory = record.RunDirectory(path, ["sft-1", "grpo"])
    for stage, step in places:
        write_step(directory, stage, step)
    return directory


def write_step(directory: record.RunDirectory, stage: str, step: int) -> None:
    rollouts = [rollout(step, i, reward=float(i)) for i in range(2)]
    directory.log(stage, step, metrics={"reward/mean": step / 3}, timings={"time/step_s": random.random()})
    directory.write_rollouts(stage, step, rollouts, advantages=[-1.0, 1.0])
    directory.write_eval(stage, step, rollouts)


def contents(path: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
    del found["timings.jsonl"]
    return found


PLACES = [("sft-1", n) for n in range(4)] + [("grpo", n) for n in range(4)]


@pytest.mark.parametrize("at", range(len(PLACES)))
@pytest.mark.parametrize("lost", [0, 1, 7])
def test_a_resumed_record_equals_the_unbroken_one(tmp_path: Path, at: int, lost: int) -> None:
    """Checkpoint after place `at`, killed in the middle of a later line; then resumed and finished."""
    write_run(tmp_path / "whole", PLACES).close()
    write_run(tmp_path / "broken", PLACES).close()
    for name in ("metrics.jsonl", "timings.jsonl"):
        file = tmp_path / "broken" / name
        file.write_bytes(file.read_bytes() + b'{"reward/mean": 0.33333'[: lost * 4])
    (tmp_path / "broken" / "rollouts" / ".grpo-step-000009.parquet.new-x").write_text("half")
    stage, step = PLACES[at]
    resumed = record.RunDirectory(tmp_path / "broken", ["sft-1", "grpo"])
    resumed.truncate_to(["sft-1", "grpo"].index(stage), step)
    kept = [(x["stage"], x["step"]) for x in written.read_lines(tmp_path / "broken" / "timings.jsonl")]
    assert kept == PLACES[: at + 1]
    for place in PLACES[at + 1 :]:
        write_step(resumed, *place)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


def test_what_a_checkpoint_has_of_the_record_does_not_grow_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It names the newest files alone, and counts those before them; what is missing of either is told."""
    monkeypatch.setattr(record, "NAMED", 3)
    places = [("sft-1", n) for n in range(4)] + [("grpo", n) for n in range(4)]
    directory = write_run(tmp_path, places)
    held, path = directory.held(), tmp_path / "checkpoints/1-grpo-000003"
    sizes = {
        f"rollouts/{file}": (tmp_path / "rollouts" / file).stat().st_size
        for file in names(tmp_path / "rollouts")
    }
    sizes |= {f"eval/{file}": (tmp_path / "eval" / file).stat().st_size for file in names(tmp_path / "eval")}
    newest = ["grpo-step-000002.parquet", "grpo-step-000003.parquet"]
    assert set(held["files"]) <= {f"{kind}/{file}" for kind in ("rollouts", "eval") for file in newest}
    assert len(held["files"]) == 3
    older = {name: size for name, size in sizes.items() if name not in held["files"]}
    assert held["older"] == [len(older), sum(older.values())]
    assert json.loads(json.dumps(held)) == held

    def told() -> str:
        caplog.clear()
        record.RunDirectory(tmp_path, ["sft-1", "grpo"]).check(held, path, at=(1, 3))
        return caplog.text

    write_step(directory, "grpo", 4)  # after the checkpoint
    directory.close()
    assert told() == ""
    gone = tmp_path / "rollouts/sft-1-step-000002.parquet"
    data = gone.read_bytes()
    gone.unlink()
    assert f"of the {len(older)} older files that {path} counts" in told()
    assert f"there are {len(older) - 1} (" in told()
    gone.write_bytes(data)
    (tmp_path / "rollouts" / newest[1]).unlink()
    assert f"is incomplete: rollouts/{newest[1]}, which {path} lists" in told()


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 100])
def test_what_a_checkpoint_has_of_the_record_costs_what_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Not what the run has written; and it is what a process that has read the folders would say."""
    monkeypatch.setattr(record, "NAMED", most)
    directory = record.RunDirectory(tmp_path, ["sft-1", "grpo"])
    age, asked = directory.age, list[str]()
    monkeypatch.setattr(directory, "age", lambda name: (asked.append(name), age(name))[1])
    for stage, step in PLACES:
        write_step(directory, stage, step)
        again = record.RunDirectory(tmp_path, ["sft-1", "grpo"])
        by_age = sorted(again.sizes, key=again.age)
        asked.clear()
        held = directory.held()
        assert list(held["files"]) == sorted(by_age[-most:])
        assert held == again.held()
        assert len(asked) <= most + 3


def test_seconds_stand_beside_what_equal_runs_share(tmp_path: Path) -> None:
    """No checkpoint is held to them; a resumed run drops those of later steps."""
    directory = write_run(tmp_path, PLACES)
    before = directory.held()
    timed = replace(rollout(4, 1), seconds=((0.5, 0.125), (2.0, 0.0)))
    for place in PLACES[:6]:
        directory.write_seconds(*place, [timed, rollout(5)])
    directory.write_seconds("grpo", 3, [rollout(5)])
    assert directory.held() == before
    directory.truncate_to(1, 0)
    kept = ["grpo-step-000000.parquet", *(f"sft-1-step-{n:06d}.parquet" for n in range(4))]
    assert names(tmp_path / "seconds") == kept
    assert turn_seconds.read(tmp_path / "seconds/grpo-step-000000.parquet") == {
        (4, 1): [(0.5, 0.125), (2.0, 0.0)]
    }
    (tmp_path / "seconds/grpo-step-000000.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="not a readable parquet file"):
        turn_seconds.read(tmp_path / "seconds/grpo-step-000000.parquet")
    with pytest.raises(DataError, match="is not a file of seconds"):
        turn_seconds.read(next((tmp_path / "rollouts").glob("*.parquet")))


def test_truncating_before_the_first_step_empties_the_record(tmp_path: Path) -> None:
    directory = write_run(tmp_path, PLACES)
    directory.truncate_to(0, -1)
    assert contents(tmp_path) == {"metrics.jsonl": b""}


def test_lines_of_an_unknown_stage_are_not_dropped_in_silence(tmp_path: Path) -> None:
    write_run(tmp_path, PLACES).close()
    other = record.RunDirectory(tmp_path, ["grpo"])
    before = contents(tmp_path)
    with pytest.raises(WhetError, match="stage 'sft-1', but the config has only grpo"):
        other.truncate_to(0, 1)
    assert contents(tmp_path) == before


def test_a_broken_line_in_the_middle_is_reported(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"stage": "s", "step": 1}\n{"st\n{"stage": "s", "step": 3}\n')
    with pytest.raises(DataError, match="line 2 is not JSON"):
        written.read_lines(tmp_path / "metrics.jsonl")


def test_sync_reaches_every_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_run(tmp_path, PLACES[:2])
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    directory.sync()
    files_ = [f"sft-1-step-00000{n}.parquet" for n in (0, 0, 1, 1)]
    assert sorted(synced) == sorted(["metrics.jsonl", "timings.jsonl", "rollouts", "eval", *files_])
    synced.clear()
    directory.sync()
    assert sorted(synced) == ["eval", "metrics.jsonl", "rollouts", "timings.jsonl"]


# ---------------------------------------------------------------- rollouts


def test_rollouts_are_read_back_exactly(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    logprobs = rng.standard_normal(50).astype(np.float32)
    original = Rollout.one_strand(
        task=Task(
            uid=2**62,
            source="s",
            prompt=(Message("system", "be brief"), Message("user", "2+2?")),
            answer={"x": [4]},
        ),
        index=3,
        token_ids=list(range(50)),
        mask=[0] * 10 + [1] * 40,
        logprobs=[float(x) for x in logprobs],
        sample_logprobs=[float(x) for x in logprobs[::-1]],
        versions=[-1] * 10 + [12] * 40,
        finish_reason="length",
        text="four\x00\U0001f600 ",
        reward=0.1,
        reward_parts={"b": 0.3, "a": -math.inf},
        answer="4",
    )
    failed = rollout(5, reward=None)
    path = record.RunDirectory(tmp_path, ["s"]).write_rollouts(
        "s", 12, [original, failed], advantages=[0.2, None]
    )
    assert path.name == "s-step-000012.parquet"
    first, second = written.read_rollouts(path)
    for name in (
        "text",
        "reward",
        "reward_parts",
    ):
        assert first[name] == getattr(original, name), name
    for name in TOKEN_TYPES:
        assert first[name] == getattr(original.strand, name).tolist(), name
    assert first["uid"] == 2**62
    assert first["index"] == 3
    assert first["prompt"] == "system: be brief\nuser: 2+2?"
    assert first["answer"] == {"x": [4]}
    assert first["extracted"] == "4"
    assert first["advantage"] == 0.2
    assert second["reward"] is None
    assert second["error"] == "timeout: 10 s"
    assert second["advantage"] is None
    assert second["reward_parts"] == {}


def test_equal_rollouts_give_equal_bytes_and_different_ones_do_not() -> None:
    rollouts = [rollout(n) for n in range(3)]
    one = record.to_parquet(rollouts, [0.0, 1.0, 2.0])
    assert record.to_parquet([rollout(n) for n in range(3)], [0.0, 1.0, 2.0]) == one
    assert record.to_parquet(rollouts, [0.0, 1.0, 2.5]) != one
    assert len(record.to_parquet([], None)) > 0


def test_a_file_that_is_no_parquet_is_reported(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match=r"x.parquet: not a readable parquet file"):
        written.read_rollouts(tmp_path / "x.parquet")


def test_groups_of_steps_are_listed_by_number_even_with_dashes_in_the_stage(tmp_path: Path) -> None:
    for name in ("a-step-b-step-000002.parquet", "a-step-b-step-1000000.parquet", "junk.parquet"):
        (tmp_path / name).write_text("")
    assert [(s, n) for s, n, _ in written.list_steps(tmp_path)] == [("a-step-b", 2), ("a-step-b", 1000000)]


# ---------------------------------------------------------------- manifest and log


def test_the_manifest_names_versions_and_hashes_and_keeps_every_start(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b"abc")
    directory = record.RunDirectory(tmp_path, ["s"])
    for seed in (1, 2):
        directory.write_manifest(
            manifest.describe(config="a: 1\n", seed=seed, data_files=[tmp_path / "data.jsonl"])
        )
    starts = json.loads((tmp_path / "manifest.json").read_text())["starts"]
    assert [s["seed"] for s in starts] == [1, 2]
    assert starts[0]["packages"]["torch"] == torch.__version__
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert starts[0]["data_sha256"] == {str(tmp_path / "data.jsonl"): abc}
    with pytest.raises(DataError, match=r"nothing\.jsonl"):
        manifest.describe(config="", seed=0, data_files=[tmp_path / "nothing.jsonl"])


def test_secrets_reach_neither_manifest_nor_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_veryverysecret")
    monkeypatch.setenv("WHET_DB_PASSWORD", "opensesame99")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    entry = manifest.describe(config="", seed=0)
    assert entry["environment"]["OMP_NUM_THREADS"] == "1"
    assert entry["environment"]["HF_TOKEN"] == "(redacted)"
    shown: list[str] = []
    setup_logging(tmp_path, level="info", show=shown.append)
    log = logging.getLogger("whet.test")
    log.info("login with %s", "hf_veryverysecret")
    log.debug("not at this level")
    log.warning("half of a letter \ud800, and \x1b]0;owned\x07")
    log.warning("a call hangs\nwhere", extra={FIRST_LINE: True})
    try:
        raise ValueError("bad password opensesame99")
    except ValueError:
        log.exception("reward failed")
    setup_logging(tmp_path, level="error")
    log.info("after")
    text = (tmp_path / "run.log").read_text()
    for place in (json.dumps(entry), text, "\n".join(shown)):
        assert "verysecret" not in place
        assert "opensesame" not in place
    assert "login with <redacted:HF_TOKEN>" in text
    assert "bad password <redacted:WHET_DB_PASSWORD>" in text
    assert "Traceback" in text
    for place in (text, shown[0]):
        assert r"half of a letter \ud800, and \x1b]0;owned\x07" in place, (
            "a line that a file takes and a terminal shows"
        )
    assert "not at this level" not in text
    assert "after" not in text
    assert [line.split(":")[0] for line in shown] == [
        "WARNING whet.test",
        "WARNING whet.test",
        "ERROR whet.test",
    ], "the screen gets warnings and worse"
    assert "a call hangs\nwhere" in text
    assert shown[1] == "WARNING whet.test: a call hangs (more in run.log)"
    for handler in list(logging.getLogger("whet").handlers):
        logging.getLogger("whet").removeHandler(handler)
        handler.close()


def test_saving_tensors_in_an_atomic_folder(tmp_path: Path) -> None:
    with files.atomic_folder(tmp_path / "c") as folder:
        save_file({"a": torch.ones(3)}, folder / "a.safetensors")
    assert names(tmp_path / "c") == ["a.safetensors"]
