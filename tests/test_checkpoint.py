"""Checkpoints on a bad day: killed, torn, on a full disk, written in the background; and which of them stay."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import whet
from forked import Started, ran
from test_checkpoint_options import CONFIG, LAST, WEIGHTS, refused, same, steps_of
from tiny import tiny_model
from whet import checkpoint
from whet.checkpoint import Keep, Saver
from whet.config.schema import OptimizerConfig
from whet.models import kernels, tensor_files
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import CheckpointError, WhetError

ROOT = Path(__file__).parents[1]
EVALUATED = {
    **CONFIG,
    "data": {**CONFIG["data"], "eval": [{"path": "tests/data/held_out.jsonl"}], "exclude_eval": False},
    "eval": {"interval": 1},
    "train": {**CONFIG["train"], "steps": 6},
}


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def train(run_dir: Path, *overrides: str, **more: Any) -> Path:
    whet.train(overrides=[f"run_dir={run_dir}", *overrides], **{**CONFIG, **more})
    return run_dir


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("unbroken") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        train(path, "checkpoint.keep=null")
    return path


def engine() -> TorchEngine:
    return TorchEngine(
        tiny_model(), kernels.load("torch"), cut=MicroBatchPolicy(), optimizer=OptimizerConfig(lr=0.1)
    )


def place(step: int, **more: Any) -> dict[str, Any]:
    return {"stage": 0, "stage_name": "main", "step": step, **more}


# ---------------------------------------------------------------- which stay


@given(
    scores=st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0, float("nan")]), min_size=1, max_size=8),
    newest=st.none() | st.integers(1, 4),
    best=st.integers(0, 3),
    smallest=st.booleans(),
)
def test_the_newest_and_the_best_stay(
    scores: list[float | None], newest: int | None, best: int, smallest: bool
) -> None:
    names = {f"0-main-{n:06d}": s for n, s in enumerate(scores, start=1)}
    keep = Keep(newest, best=best, smallest=smallest)
    gone = keep.dropped(list(names), lambda asked: {name: names[name] for name in asked})
    assert list(names)[-1] not in gone
    real = [(s if smallest else -s, name) for name, s in names.items() if s is not None and s == s]
    wanted = {name for _, name in sorted(real)[:best]}
    assert set(keep.best_of(names)) == wanted
    assert set(gone) == set(list(names)[:-newest] if newest else ()) - wanted


@pytest.mark.parametrize(("goal", "pick"), [("max", max), ("min", min)])
def test_a_run_keeps_the_best_of_its_evaluations(tmp_path: Path, goal: str, pick: Callable[..., Any]) -> None:
    """Though checkpoints are otherwise written at the end alone."""
    metric = "eval/held_out/reward_mean"
    keys = ("checkpoint.interval=0", "checkpoint.keep=1", f"checkpoint.keep_best.metric={metric}")
    run_dir = train(tmp_path / "run", *keys, f"checkpoint.keep_best.goal={goal}", **EVALUATED)
    judged = {line["step"]: line[metric] for line in whet.Result(run_dir, True).metrics if metric in line}
    assert len(set(judged.values())) > 2
    after = {step: value for step, value in judged.items() if step > 0}
    best = next(step for step, value in after.items() if value == pick(after.values()))
    assert steps_of(run_dir) == sorted({best, 6})
    assert checkpoint.score_of(run_dir / f"checkpoints/0-main-{best:06d}") == judged[best]


@pytest.mark.parametrize(
    ("keep", "most"), [(Keep(), 0), (Keep(2), 0), (Keep(None, best=2), 1), (Keep(2, best=2), 1)]
)
def test_a_save_reads_no_score_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: Keep, most: int
) -> None:
    """A run that keeps all its checkpoints would read each of them with every save and every evaluation."""
    read: Counter[str] = Counter()
    score_of = checkpoint.score_of
    monkeypatch.setattr(checkpoint, "score_of", lambda path: (read.update([path.name]), score_of(path))[1])
    saver = Saver(tmp_path, keep=keep)
    for step in range(1, 9):
        saver.is_best(float(step % 3), at=(0, step))
        saver.save({}, place(step, score=float(step % 3)))
    assert max(read.values(), default=0) <= most
    assert saver.best() == ["0-main-000002", "0-main-000005"][: keep.best]


def test_a_number_that_no_evaluation_writes_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=r"keep_best.metric=eval/accurcy: the evaluation has only eval/"):
        train(tmp_path / "run", "checkpoint.keep_best.metric=eval/accurcy", **EVALUATED)


def test_the_best_of_nothing_is_refused() -> None:
    assert "has no effect: nothing is evaluated" in refused("checkpoint.keep_best.count=2")


def test_the_checkpoint_that_was_named_to_go_on_from_stays(unbroken: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(unbroken, run_dir)
    named = run_dir / "checkpoints/0-main-000001"
    train(run_dir, f"checkpoint.resume={named}", "checkpoint.keep=1")
    assert steps_of(run_dir) == [1, 3]
    same(unbroken, run_dir, "metrics.jsonl", WEIGHTS)


# ---------------------------------------------------------------- in the background


def test_a_run_that_saves_in_the_background_is_the_same_run(unbroken: Path, tmp_path: Path) -> None:
    run_dir = train(tmp_path / "run", "checkpoint.async_save=true", "checkpoint.keep=null")
    names = [str(p.relative_to(unbroken)) for p in (unbroken / "checkpoints").rglob("*") if p.is_file()]
    same(unbroken, run_dir, "metrics.jsonl", *names)


def test_what_is_written_is_the_state_of_its_moment(tmp_path: Path) -> None:
    trained, go = engine(), threading.Event()
    saver = Saver(tmp_path, keep=Keep(), background=True)
    write = checkpoint.write
    held = dict(trained.module.named_parameters())
    before = {name: p.detach().clone() for name, p in held.items()}
    state = place(1, buffer=[1, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write", lambda *a: (go.wait(30), write(*a))[1])
        saver.save({"policy": trained}, state)
        with torch.no_grad():
            for p in held.values():
                p.add_(1.0)
        state["buffer"].append(3)
        go.set()
        saver.wait()
    found = load_file(tmp_path / "0-main-000001/policy/model.safetensors")
    assert all(torch.equal(found[name], before[name]) for name in before)
    assert checkpoint.read_state(tmp_path / "0-main-000001")["buffer"] == [1, 2]
    saver.close()


def test_a_failure_is_raised_at_the_next_save_or_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = threading.Event()

    def full(*args: Any) -> Path:
        called.set()
        raise CheckpointError("the disk is full")

    saver = Saver(tmp_path, keep=Keep(), background=True)
    saver.save({}, place(1))
    saver.wait()
    write = checkpoint.write
    monkeypatch.setattr(checkpoint, "write", full)
    saver.save({}, place(2))
    assert called.wait(30)
    monkeypatch.setattr(checkpoint, "write", write)
    with pytest.raises(CheckpointError, match="disk is full"):
        saver.save({}, place(3))
    saver.save({}, place(4))
    saver.wait()
    assert [p.name[-1] for p in checkpoint.all_in(tmp_path)] == ["1", "4"]
    saver.close()
    monkeypatch.setattr(checkpoint, "write", full)
    with pytest.raises(CheckpointError, match="disk is full"):
        train(tmp_path / "run", "checkpoint.async_save=true", "checkpoint.interval=0")


SLOW = """
import time
import whet.models.tensor_files as files
real = files.save_file
def slow(tensors, path, metadata=None):
    real(tensors, path, metadata=metadata)
    time.sleep(0.4)
files.save_file = slow
from whet.cli import main
main()
"""


@pytest.fixture
def started() -> Iterator[list[Started]]:
    processes: list[Started] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_killed_while_it_saves_in_the_background_it_goes_on_from_the_one_before(
    unbroken: Path, tmp_path: Path, started: list[Started]
) -> None:
    run_dir, config = tmp_path / "run", tmp_path / "config.yaml"
    own = {"run_dir": str(run_dir), "checkpoint": {**CONFIG["checkpoint"], "async_save": True, "keep": None}}
    config.write_text(yaml.safe_dump({**CONFIG, **own}))
    process = Started("train", str(config), code=SLOW)
    started.append(process)
    root, until = run_dir / "checkpoints", time.monotonic() + 90
    while not list(root.glob(".0-main-000002.new-*/policy/model.safetensors")):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.005)
    lines = (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [p.name for p in checkpoint.all_in(root)] == ["0-main-000001"]
    assert checkpoint.read_state(root / "0-main-000001")["step"] == 1
    assert lines >= 2, "the second step had been written down"
    train(run_dir, "checkpoint.async_save=true", "checkpoint.keep=null")
    names = [str(p.relative_to(unbroken)) for p in (unbroken / "checkpoints").rglob("*") if p.is_file()]
    same(unbroken, run_dir, "metrics.jsonl", *names)
    assert not list(root.glob(".*")), "nothing half-done is left"


# ---------------------------------------------------------------- full disks and torn writes


class Disk:
    """Counts every operation that changes the disk, and acts at the n-th."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, act: Callable[[], None]) -> None:
        self.at, self.act, self.calls = at, act, 0
        self.busy = False
        for owner, name in (
            (os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (shutil, "rmtree"),
            (tensor_files, "save_file"), (os, "fdopen"), (os, "fchmod"),
        ):  # fmt: skip
            patch.setattr(owner, name, self.counted(getattr(owner, name)))

    def counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if not self.busy:
                self.calls += 1
                if self.calls == self.at:
                    self.busy = True  # what mends is not disturbed again
                    self.act()
            return real(*args, **more)

        return call


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def attempt(root: Path, trained: TorchEngine, at: int, act: Callable[[], None]) -> int:
    """Save step 2 over a disk that acts at its n-th operation; how many there were."""
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, at, act)
        Saver(root, keep=Keep(2)).save({"policy": trained}, place(2))
    return disk.calls


def test_a_disk_that_is_full_at_any_operation_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    trained = engine()
    count = attempt(tmp_path / "count", trained, 0, full)
    assert count > 12
    for at in range(1, count + 1):
        root = tmp_path / str(at)
        Saver(root, keep=Keep(2)).save({"policy": trained}, place(1))
        with suppress(CheckpointError):  # some operations are not missed
            attempt(root, trained, at, full)
        names = [p.name for p in checkpoint.all_in(root)]
        assert names[0] == "0-main-000001", at
        for path in checkpoint.all_in(root):
            assert checkpoint.read_state(path)["step"] == int(path.name[-1]), at
        left = checkpoint.newest(root)
        assert left is not None
        assert not list(root.glob(".*")), at
        attempt(root, trained, 0, full)
        assert [p.name for p in checkpoint.all_in(root)] == ["0-main-000001", "0-main-000002"], at


@pytest.mark.parametrize("at", [3, 6, 10])
def test_a_full_disk_is_named(tmp_path: Path, at: int) -> None:
    with pytest.raises(CheckpointError, match="the disk is full; free space there, or give another run_dir"):
        attempt(tmp_path, engine(), at, full)


def test_a_kill_at_any_operation_leaves_whole_checkpoints_alone(tmp_path: Path) -> None:
    """Over one of the same name, too: then either the old or the new is there, or comes back."""
    trained = engine()
    count = attempt(tmp_path / "count", trained, 0, full)
    for at in range(1, count + 1, 2):
        root = tmp_path / str(at)
        for step in (1, 2):
            Saver(root, keep=Keep(2)).save({"policy": trained}, place(step))
        child = os.fork()
        if child == 0:
            try:
                attempt(root, trained, at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert checkpoint.newest(root) == root / "0-main-000002", at
        assert [checkpoint.read_state(p)["step"] for p in checkpoint.all_in(root)] == [1, 2], at
        assert not list(root.glob(".*")), at


LIMITED = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, "tests")
from test_checkpoint import engine, place
from whet import checkpoint
from whet.checkpoint import Keep, Saver
root = Path(sys.argv[1])
trained = engine()
Saver(root, keep=Keep(2)).save({"policy": trained}, place(1))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit in (5000, 10):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        Saver(root, keep=Keep(2)).save({"policy": trained}, place(2))
    except checkpoint.CheckpointError as e:
        print(e, file=sys.stderr)
"""


def test_the_kernel_refuses_to_write_on(tmp_path: Path) -> None:
    done = ran(LIMITED, str(tmp_path / "c"))
    assert done.stderr.count("larger than the system or a limit (ulimit -f) allows") == 2, done.stderr
    assert [p.name for p in checkpoint.all_in(tmp_path / "c")] == ["0-main-000001"]
    assert checkpoint.read_state(tmp_path / "c/0-main-000001")["step"] == 1
    assert not list((tmp_path / "c").glob(".*"))


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_every_torn_file_is_found_before_anything_is_loaded(
    unbroken: Path, tmp_path: Path, damage: str
) -> None:
    whole = unbroken / LAST
    for name in sorted(str(p.relative_to(whole)) for p in whole.rglob("*") if p.is_file()):
        path = tmp_path / name.replace("/", "-") / whole.name
        shutil.copytree(whole, path)
        file = path / name
        data = file.read_bytes()
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(
                data[: len(data) // 2]
                + (b"" if damage == "cut" else bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
            )
        if name == "manifest.json" and damage == "flipped":
            continue  # a bit of white space may differ
        with pytest.raises(CheckpointError):
            checkpoint.read_state(path)


def test_groups_of_a_state_lie_beside_it_and_damage_to_them_is_named(tmp_path: Path) -> None:
    waiting = {"waiting": [b"one", {"group": b"two"}], "steps": 3}
    state = {"stage": 0, "stage_name": "main", "step": 1, "buffer": waiting}
    path = checkpoint.write(tmp_path, {}, state)
    assert checkpoint.read_state(path) == state
    assert b"one" not in (path / "state.json").read_bytes()
    (path / "groups.arrow").write_bytes((path / "groups.arrow").read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"groups\.arrow has 200 bytes"):
        checkpoint.read_state(path)
    (path / "manifest.json").write_text(json.dumps(checkpoint.manifest(path)))
    with pytest.raises(CheckpointError, match=r"groups\.arrow cannot be read"):
        checkpoint.read_state(path)
    (path / "groups.arrow").unlink()
    (path / "manifest.json").write_text(json.dumps(checkpoint.manifest(path)))
    with pytest.raises(CheckpointError, match=r"groups\.arrow cannot be read"):
        checkpoint.read_state(path)


def test_the_checkpoint_before_a_damaged_one_is_that_of_the_run_s_order(tmp_path: Path) -> None:
    for name in ("1-early-000009", "2-main-000010", "10-late-000001", "2-main-1000000"):
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=r"resume=\S*/1-early-000009 resumes from the previous"):
        checkpoint.read_state(tmp_path / "2-main-000010")
    with pytest.raises(CheckpointError, match=r"resume=\S*/2-main-1000000 resumes from the previous"):
        checkpoint.read_state(tmp_path / "10-late-000001")


def test_a_checkpoint_is_removed_in_one_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes beside the run read its checkpoints meanwhile: they find one whole or not at all."""
    trained, removed = engine(), []
    real = shutil.rmtree

    def looked(path: Path, *given: Any, **more: Any) -> None:
        removed.append([p.name for p in checkpoint.all_in(tmp_path)])
        real(path, *given, **more)

    Saver(tmp_path, keep=Keep(1)).save({"policy": trained}, place(1))
    monkeypatch.setattr(shutil, "rmtree", looked)
    Saver(tmp_path, keep=Keep(1)).save({"policy": trained}, place(2))
    assert removed[-1] == ["0-main-000002"]
    assert [p.name for p in tmp_path.iterdir()] == ["0-main-000002"]


@pytest.mark.parametrize("copies", [1, 2])
def test_the_tokenizer_of_a_run_beside_is_had_though_its_checkpoints_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    """The run saves and prunes between the look at its checkpoints and the copy."""
    root, copy = tmp_path / "checkpoints", shutil.copyfile

    def saved(step: int) -> Path:
        path = root / f"0-main-{step:06d}"
        path.mkdir(parents=True)
        (path / checkpoint.TOKENIZER).write_text(f"of step {step}")
        return path

    def meanwhile(source: Path, target: Path) -> Path:
        if (step := int(source.parent.name[-6:])) < copies:
            shutil.rmtree(source.parent)
            saved(step + 1)
        return Path(copy(source, target))

    assert checkpoint.own_tokenizer(root, tmp_path) is None, "nothing is saved yet"
    saved(1)
    monkeypatch.setattr(shutil, "copyfile", meanwhile)
    own = checkpoint.own_tokenizer(root, tmp_path)
    assert own is not None
    assert (own.parent, own.read_text()) == (tmp_path, f"of step {copies}")
    (root / f"0-main-{copies:06d}" / checkpoint.TOKENIZER).unlink()
    assert checkpoint.own_tokenizer(root, tmp_path) is None, "its run has built none"
