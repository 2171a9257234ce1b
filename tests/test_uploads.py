"""Copies in other places: made beside the run, tried again, never half, thinned there as told."""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import whet
from fake_hub import Hub
from forked import Started
from remote_places import SECRET
from test_checkpoint_options import CONFIG, same
from test_storage import Dying
from whet import checkpoint
from whet.checkpoint import Keep, Saver
from whet.storage import fetch, hub, stores, uploads
from whet.storage.manifests import MANIFEST, manifest
from whet.storage.uploads import Uploads
from whet.track.files import atomic_folder

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(uploads, "PAUSES_S", (0.01, 0.01))


def train(run_dir: Path, *overrides: str) -> Path:
    whet.train(overrides=[f"run_dir={run_dir}", *overrides], **CONFIG)
    return run_dir


def made(root: Path, step: int, score: float | None = None) -> Path:
    state = {"stage": 0, "stage_name": "main", "step": step, "score": score}
    Saver(root, keep=Keep()).save({}, state)
    return root / f"0-main-{step:06d}"


@pytest.fixture
def there(tmp_path: Path) -> tuple[Path, str]:
    """A mounted folder: where it is, and its URL."""
    return tmp_path / "there", f"file://{tmp_path}/there"


class Faulty:
    """`stores.send` that fails while told so, and waits while told so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails, self.calls, self.go = False, 0, threading.Event()
        self.go.set()
        self._send = stores.send
        monkeypatch.setattr(stores, "send", self.send)

    def send(self, *args: Any) -> None:
        self.calls += 1
        assert self.go.wait(30)
        if self.fails:
            raise OSError(f"no route to {SECRET}")
        self._send(*args)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Faulty:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return Faulty(monkeypatch)


# ---------------------------------------------------------------- copied


def test_a_run_leaves_its_checkpoints_and_exports_in_s3_and_another_goes_on_from_there(
    s3: Any, tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole", "checkpoint.keep=null")
    to = ("checkpoint.upload_to=[s3://pail/run]", "checkpoint.upload_exports_to=[s3://pail/models]")
    first = train(tmp_path / "first", "checkpoint.export=true", *to)
    for name in ("0-main-000001", "0-main-000002", "0-main-000003"):
        assert stores.said("s3://pail/run", name) == manifest(whole / "checkpoints" / name) | {"format": 1}
    same(whole, first, "metrics.jsonl")
    assert json.loads(s3.cat_file(f"pail/models/main/{MANIFEST}")) == manifest(first / "export/main")
    for url in ("s3://pail/run/0-main-000002", "s3://pail/run"):
        if url.endswith("run"):
            stores.remove(url, "0-main-000003")
        again = train(tmp_path / url[-6:].replace("/", "-"), f"checkpoint.resume={url}")
        same(whole, again, "checkpoints/0-main-000003/policy/model.safetensors")
        last = (whole / "metrics.jsonl").read_bytes().splitlines()[-1:]
        assert (again / "metrics.jsonl").read_bytes().splitlines() == last
    s3.rm_file(f"pail/run/0-main-000002/{MANIFEST}")
    with pytest.raises(whet.types.CheckpointError, match="is not a complete checkpoint"):
        train(tmp_path / "half", "checkpoint.resume=s3://pail/run/0-main-000002")
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_the_hub_gets_checkpoints_as_folders_and_the_newest_export_at_its_root(
    own_hub: Hub,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = tmp_path / "config.yaml"
    to = {
        "upload_to": ["hf://org/saved"],
        "upload_exports_to": ["hf://org/tiny"],
        "export": True,
        "export_interval": 2,
    }
    own = {
        "checkpoint": {"interval": 1, "keep": None, "upload": 2, **to},
        "run_dir": str(tmp_path / "run"),
    }
    config.write_text(yaml.safe_dump({**CONFIG, **own}))
    own_hub.failing = 1
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-m", "whet.cli", "train", str(config)],
        capture_output=True, text=True, timeout=200, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "run/run.log").read_text()
    assert "retrying" in log
    assert "NOT UPLOADED" not in log
    assert "hf_veryverysecret" not in log + done.stdout + done.stderr
    assert {name.partition("/")[0] for name in own_hub.files("org/saved")} == {
        "0-main-000002",
        "0-main-000003",
    }
    final = tmp_path / "run/export/main"
    files = own_hub.files("org/tiny")
    assert set(files) == {p.name for p in final.iterdir()} | {MANIFEST}
    assert all(files[p.name] == p.read_bytes() for p in final.iterdir())
    assert len(own_hub.commits["org/tiny"]) == 2, "one commit each"


# ---------------------------------------------------------------- beside the run


def test_saving_never_waits_for_a_copy(faulty: Faulty, tmp_path: Path, there: tuple[Path, str]) -> None:
    faulty.go.clear()
    copies = Uploads([there[1]])
    saver = Saver(tmp_path / "c", keep=Keep(1), after=copies.checkpoint, spare=copies.spare)
    for step in (1, 2, 3):
        saver.save({}, {"stage": 0, "stage_name": "main", "step": step})
    names = [p.name for p in checkpoint.all_in(tmp_path / "c")]
    assert names == [f"0-main-00000{n}" for n in (1, 2, 3)], "what waits stays"
    assert not there[0].exists()
    faulty.go.set()
    assert copies.finish() == []
    saver.tidy()
    assert [p.name for p in checkpoint.all_in(tmp_path / "c")] == names[-1:]
    assert stores.children(there[1]) == names


def test_what_fails_is_said_and_tried_again_with_the_next(
    faulty: Faulty, tmp_path: Path, there: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "whet")
    copies = Uploads([there[1]])
    faulty.fails = True
    copies.checkpoint(made(tmp_path / "c", 1))
    until = time.monotonic() + 30
    while "with the next" not in caplog.text:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert faulty.calls == 3
    assert "<redacted:AWS_SECRET_ACCESS_KEY>" in caplog.text
    assert SECRET not in caplog.text
    faulty.fails = False
    copies.checkpoint(made(tmp_path / "c", 2))
    assert copies.finish() == []
    assert stores.children(there[1]) == ["0-main-000001", "0-main-000002"]


def test_the_end_waits_no_longer_than_its_deadline_and_the_same_command_sends_the_rest(
    tmp_path: Path, there: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = Faulty(monkeypatch)
    faulty.fails = True
    to = f"checkpoint.upload_to=[{there[1]}]"
    run_dir = train(tmp_path / "run", to)
    log = (run_dir / "run.log").read_text()
    # an older one may still wait, too: how many do depends on how fast they fail
    assert re.search(r"NOT UPLOADED: .*0-main-000002 to file://.*0-main-000003 to file://", log)
    assert stores.children(there[1]) == []
    faulty.fails = False
    before = (run_dir / "metrics.jsonl").read_bytes()
    train(run_dir, to)
    assert stores.children(there[1])[-2:] == ["0-main-000002", "0-main-000003"]
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    calls = faulty.calls
    train(run_dir, to)
    assert faulty.calls == calls, "what is there is not sent again"
    copies = Uploads([there[1] + "/slow"])
    faulty.go.clear()
    copies.checkpoint(run_dir / "checkpoints/0-main-000003")
    assert copies.finish(0.05) == [f"0-main-000003 to {there[1]}/slow"]
    faulty.go.set()


def test_a_queue_that_grows_leaves_out_the_oldest_and_says_so(
    faulty: Faulty, tmp_path: Path, there: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    faulty.go.clear()
    copies = Uploads([there[1]])
    paths = [made(tmp_path / "c", step) for step in range(1, 8)]
    copies.checkpoint(paths[0])
    until = time.monotonic() + 30
    while not faulty.calls:
        assert time.monotonic() < until
        time.sleep(0.01)
    for path in paths[1:]:
        copies.checkpoint(path)
    assert len(copies.spare()) == 1 + uploads.MOST_WAITING
    faulty.go.set()
    assert copies.finish() == []
    assert stores.children(there[1]) == [f"0-main-00000{n}" for n in (1, 4, 5, 6, 7)]
    assert caplog.text.count("fall behind") == 2


def test_what_failed_goes_before_what_waits(
    tmp_path: Path, there: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    works: queue.Queue[bool] = queue.Queue()
    tried: list[int] = []
    send = stores.send

    def asked(folder: Path, *more: Any) -> None:
        tried.append(int(folder.name[-1]))
        if not works.get(timeout=30):
            raise OSError("no route")
        send(folder, *more)

    def until_tried(n: int) -> None:
        until = time.monotonic() + 30
        while len(tried) < n:
            assert time.monotonic() < until
            time.sleep(0.01)

    monkeypatch.setattr(stores, "send", asked)
    monkeypatch.setattr(uploads, "PAUSES_S", ())
    copies = Uploads([there[1]])
    paths = [made(tmp_path / "c", step) for step in (1, 2, 3, 4)]
    for path in paths[:3]:
        copies.checkpoint(path)
    works.put(False)
    until_tried(2)
    copies.checkpoint(paths[3])  # while the second is made, the first has failed and the third waits
    for _ in range(4):
        works.put(True)
    assert copies.finish() == []
    assert tried == [1, 2, 1, 3, 4]


def test_a_folder_that_is_gone_is_no_reason_to_wait(
    tmp_path: Path, there: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    copies = Uploads([there[1]])
    copies.checkpoint(tmp_path / "c/0-main-000001")
    assert copies.finish() == []
    assert "the folder no longer exists" in caplog.text


def written(folder: Path, text: str) -> Path:
    """An export, in the place of an earlier one; both are of one size."""
    with atomic_folder(folder) as new:
        (new / "config.json").write_text(text)
    return folder


@pytest.mark.parametrize("when", ["while it is read", "when it has been read"])
def test_a_folder_that_is_replaced_while_it_is_copied_is_copied_again(
    when: str, tmp_path: Path, there: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    send, log, seen = stores.send, uploads.log.info, list[str]()
    copies = Uploads(exports_to=[there[1]])

    def replaced(now: str) -> None:
        seen.append(now)
        if seen.count(when) == 1 and now == when:
            copies.export(written(tmp_path / "main", "two"))

    def sends(*args: Any) -> None:
        replaced("while it is read")
        send(*args)

    def logs(*args: Any) -> None:
        log(*args)
        replaced("when it has been read")

    monkeypatch.setattr(stores, "send", sends)
    monkeypatch.setattr(uploads.log, "info", logs)
    copies.export(written(tmp_path / "main", "one"))
    assert copies.finish() == []
    assert (there[0] / "main/config.json").read_text() == "two"
    assert stores.said(there[1], "main") == manifest(tmp_path / "main")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"files": 1}', "[" * 100_000, "\udcff"])
def test_a_damaged_manifest_there_is_a_copy_to_be_made_again(
    text: str, tmp_path: Path, there: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    path = made(tmp_path / "c", 1)
    for _ in range(2):
        copies = Uploads([there[1]])
        copies.checkpoint(path)
        assert copies.finish() == []
        found = there[0] / path.name / MANIFEST
        assert json.loads(found.read_text()) == json.loads((path / MANIFEST).read_text())
        found.write_text(text, errors="surrogateescape")
    assert "the folder counts as incomplete" in caplog.text


def test_a_copy_whose_process_ended_after_its_manifest_is_whole_and_tidied_by_the_next_start(
    tmp_path: Path, there: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(tmp_path / "here", 1)
    changes = len(manifest(path)["files"]) + 2  # a listing of what is sent, and the manifest
    dying = Dying(stores.connect(there[1])[0], changes)
    with monkeypatch.context() as patched:
        patched.setattr(stores, "connect", lambda url, real=stores.connect: (dying, real(url)[1]))
        with pytest.raises(OSError, match="the line is dead"):
            stores.send(path, there[1], path.name, json.loads((path / MANIFEST).read_text()))
    copied = there[0] / path.name
    left = {p.name for p in copied.iterdir()} - {p.name for p in path.iterdir()}
    assert len(left) == 1, "the last change was not made"
    fetched = fetch.fetch(fetch.newest_checkpoint(there[1]), tmp_path / "fetched")
    assert checkpoint.read_state(fetched)["step"] == 1
    again = Uploads([there[1]])
    again.missing([path], [])
    assert again.finish() == []
    assert {p.name for p in copied.iterdir()} == {p.name for p in path.iterdir()}


# ---------------------------------------------------------------- thinned there


def test_the_last_alone(tmp_path: Path, there: tuple[Path, str]) -> None:
    to = [f"checkpoint.upload_to=[{there[1]}]", f"checkpoint.upload_exports_to=[{there[1]}/models]"]
    train(
        tmp_path / "run",
        *to,
        "checkpoint.upload=last",
        "checkpoint.export=true",
        "checkpoint.export_interval=1",
    )
    assert stores.children(there[1]) == ["0-main-000003"]
    assert stores.children(f"{there[1]}/models") == ["main"]


def test_a_folder_that_is_removed_while_it_is_sent_leaves_nothing_there(
    tmp_path: Path, there: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run keeps fewer than it uploads: what it sent of one that has gone would stay for ever, of nobody."""
    send = stores.send

    def removing(folder: Path, url: str, name: str, manifest: Any) -> None:
        send(folder, url, name, manifest)
        if name.endswith("1"):
            shutil.rmtree(folder)

    monkeypatch.setattr(stores, "send", removing)
    copies = Uploads([there[1]], keep=1)
    for step in (1, 2):
        copies.checkpoint(made(tmp_path / "c", step))
    assert copies.finish() == []
    assert stores.children(there[1]) == ["0-main-000002"]


def test_an_export_that_is_removed_while_it_is_sent_takes_nothing_else_of_the_hub_along(
    own_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands at the root of the repository, where the user's own files are."""
    own_hub.commits["org/policy"] = [{"README.md": b"mine"}]
    export = tmp_path / "main"
    export.mkdir()
    (export / "config.json").write_text("{}")
    send = hub.send

    def removing(folder: Path, url: str, name: str, manifest: Any) -> None:
        send(folder, url, name, manifest)
        shutil.rmtree(folder)

    monkeypatch.setattr(hub, "send", removing)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    copies = Uploads(exports_to=["hf://org/policy"])
    copies.export(export)
    copies.finish()
    assert own_hub.files("org/policy")["README.md"] == b"mine"
    assert len(own_hub.commits["org/policy"]) == 2, "the user's, and the export's: none that removes a folder"


def test_as_many_stay_there_as_told_and_the_best(tmp_path: Path, there: tuple[Path, str]) -> None:
    saver = Saver(tmp_path / "c", keep=Keep(2, best=1))
    copies = Uploads([there[1]], keep=1, best=saver.best)
    for step, score in enumerate((0.1, 0.9, 0.3, 0.2), start=1):
        saver.save({}, {"stage": 0, "stage_name": "main", "step": step, "score": score})
        copies.checkpoint(checkpoint.all_in(tmp_path / "c")[-1])
    assert copies.finish() == []
    assert stores.children(there[1]) == ["0-main-000002", "0-main-000004"]
    assert [p.name[-1] for p in checkpoint.all_in(tmp_path / "c")] == ["2", "3", "4"]


def test_a_run_that_goes_back_leaves_there_what_it_left_and_says_so(
    tmp_path: Path, there: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    record = tmp_path / "uploads.json"
    copies = Uploads([there[1]], record=record)
    for step in (1, 2, 5):
        copies.checkpoint(made(tmp_path / "c", step))
    copies.finish()
    shutil.rmtree(tmp_path / "c/0-main-000005")
    again = Uploads([there[1]], record=record, keep=1)
    again.checkpoint(made(tmp_path / "c", 3))
    again.finish()
    assert stores.children(there[1]) == ["0-main-000003", "0-main-000005"]
    assert f"{there[1]} holds 0-main-000005, from before this run resumed" in caplog.text


@pytest.mark.parametrize("keep", [None, 1])
def test_a_restart_removes_nothing_there(keep: int | None, tmp_path: Path, there: tuple[Path, str]) -> None:
    """The older best is offered again first; all that is later there, but no longer here, was taken for left behind."""
    saver = Saver(tmp_path / "c", keep=Keep(1, best=1))
    first = Uploads([there[1]], record=tmp_path / "uploads.json")
    for step, score in enumerate((0.1, 0.9, 0.3, 0.2), start=1):
        saver.save({}, {"stage": 0, "stage_name": "main", "step": step, "score": score})
        first.checkpoint(checkpoint.all_in(tmp_path / "c")[-1])
        assert first.finish() == []
        first = Uploads([there[1]], record=tmp_path / "uploads.json")
    assert [p.name[-1] for p in checkpoint.all_in(tmp_path / "c")] == ["2", "4"]
    names = stores.children(there[1])
    assert [name[-1] for name in names] == ["1", "2", "3", "4"]
    again = Uploads([there[1]], keep=keep, best=saver.best, record=tmp_path / "uploads.json")
    again.missing(checkpoint.all_in(tmp_path / "c"), [])
    assert again.finish() == []
    assert stores.children(there[1]) == names


@pytest.mark.parametrize(("keep", "lost", "sent"), [(None, 0, 0), (None, 8, 8), (2, 0, 0), (2, 1, 1)])
def test_a_restart_looks_at_all_that_are_here(
    keep: int | None,
    lost: int,
    sent: int,
    tmp_path: Path,
    there: tuple[Path, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """More than may wait while the run saves: none is skipped, and what `keep` has removed there is not sent again."""
    first = Uploads([there[1]], record=tmp_path / "uploads.json", keep=keep)
    for step in range(1, 13):
        first.checkpoint(made(tmp_path / "c", step))
        assert first.finish() == []
        first = Uploads([there[1]], record=tmp_path / "uploads.json", keep=keep)
    names = stores.children(there[1])
    assert len(names) == (keep or 12)
    for name in names[:lost]:
        stores.remove(there[1], name)
    caplog.set_level(logging.INFO)
    again = Uploads([there[1]], record=tmp_path / "uploads.json", keep=keep)
    again.missing(checkpoint.all_in(tmp_path / "c"), [])
    assert again.finish() == []
    assert stores.children(there[1]) == names
    assert caplog.text.count("uploaded ") == sent
    assert "fall behind" not in caplog.text


def test_only_copies_that_the_run_made_itself_are_ever_removed(
    tmp_path: Path, there: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    other = Uploads([there[1]])
    other.checkpoint(made(tmp_path / "other", 1))
    other.finish()
    record = tmp_path / "uploads.json"
    for step in (2, 3, 4):
        copies = Uploads([there[1]], keep=1, record=record)
        copies.checkpoint(made(tmp_path / "c", step))
        copies.finish()
        if step == 3:  # somebody else's now stands where this run's was
            stores.send(
                other_one := made(tmp_path / "other", 3, 0.5), there[1], other_one.name, manifest(other_one)
            )
    assert stores.children(there[1]) == ["0-main-000001", "0-main-000003", "0-main-000004"]
    assert "0-main-000003 is not what this run uploaded" in caplog.text
    assert list(json.loads(record.read_text())[there[1]]) == ["0-main-000004"]
    record.write_text("[1")
    copies = Uploads([there[1]], keep=1, record=record)
    copies.checkpoint(made(tmp_path / "c", 5))
    copies.finish()
    assert "0-main-000004" in stores.children(there[1]), "what is forgotten stays"


def test_a_checkpoint_of_another_run_is_not_replaced(
    tmp_path: Path, there: tuple[Path, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "PAUSES_S", ())
    other = Uploads([there[1]], record=tmp_path / "other.json")
    theirs = made(tmp_path / "other", 1)
    other.checkpoint(theirs)
    assert other.finish() == []
    copies = Uploads([there[1]], record=tmp_path / "uploads.json")
    copies.checkpoint(made(tmp_path / "c", 1, 0.5))
    copies.checkpoint(made(tmp_path / "c", 2, 0.5))
    assert copies.finish() == [f"0-main-000001 to {there[1]}"]
    assert "0-main-000001 is there already, from another run, and is not replaced" in caplog.text
    assert stores.said(there[1], "0-main-000001") == manifest(theirs)
    assert stores.children(there[1]) == ["0-main-000001", "0-main-000002"]
    shutil.rmtree(tmp_path / "c")
    again = Uploads([there[1]], record=tmp_path / "uploads.json")
    again.checkpoint(mine := made(tmp_path / "c", 2, 0.25))
    assert again.finish() == [], "what the run itself copied is replaced"
    assert stores.said(there[1], "0-main-000002") == manifest(mine)


# ---------------------------------------------------------------- killed


@pytest.fixture
def killed() -> Iterator[list[Started]]:
    started: list[Started] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


SLOW = """
import sys, time
from whet.storage import stores
real = stores.connect
class Slow:
    def __init__(self, fs): self.fs = fs
    def __getattr__(self, name):
        if name == "put_file":
            time.sleep(0.2)
        return getattr(self.fs, name)
stores.connect = lambda url: (Slow(real(url)[0]), real(url)[1])
from whet.cli import main
main()
"""


def test_a_run_killed_while_it_copies_sends_what_is_missing_when_it_goes_on(
    tmp_path: Path, there: tuple[Path, str], killed: list[Started]
) -> None:
    config, run_dir = tmp_path / "config.yaml", tmp_path / "run"
    own = {
        "checkpoint": {"interval": 1, "keep": 3, "export": False, "upload_to": [there[1]]},
        "run_dir": str(run_dir),
    }
    config.write_text(yaml.safe_dump({**CONFIG, **own}))
    process = Started("train", str(config), code=SLOW)
    killed.append(process)
    until = time.monotonic() + 90
    while not list(there[0].glob("0-*/policy/*")):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert stores.children(there[1]) == [], "half a copy is none"
    train(run_dir, "checkpoint.keep=3", f"checkpoint.upload_to=[{there[1]}]")
    assert stores.children(there[1]) == ["0-main-000001", "0-main-000002", "0-main-000003"]
    for name in stores.children(there[1]):
        assert checkpoint.read_state(there[0] / name)["step"] == int(name[-1])
