"""A temporary folder goes with its process, killed or not."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

import whet
from whet import notices
from whet.__main__ import main
from whet.guard import leftover
from whet.guard.nursery import fork
from whet.guard.temporary import OwnFolder, sweep_all
from whet.outputs import replacing
from whet.track.files import atomic_folder

MADE = re.compile(r"\b(TemporaryDirectory|mkdtemp)\(")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _held(ready: Path) -> None:
    """A process that has a folder."""
    OwnFolder("hub")
    ready.touch()
    time.sleep(300)


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(place: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    pid = fork(partial(_held, ready))
    try:
        while not ready.exists():
            time.sleep(0.01)
        (of_it,) = place.glob("whet-hub-*")
        OwnFolder("hub").close()
        assert of_it.is_dir(), "its process lives"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    (of_it / "within").write_text("left")
    OwnFolder("index").close()
    assert of_it.is_dir(), "another kind"
    OwnFolder("hub").close()
    assert not of_it.exists()


def test_folders_of_the_living_stay_and_end_with_them(place: Path) -> None:
    first, second = OwnFolder("hub"), OwnFolder("hub")
    assert first.path != second.path
    (first.path / "file").touch()
    first.close()
    first.close()
    assert list(place.glob("whet-hub-*")) == [second.path]
    second.close()
    with OwnFolder("hub") as path:
        assert path.is_dir()
    assert not list(place.iterdir())


def test_no_folder_is_made_in_a_way_that_leaves_it_behind() -> None:
    """TemporaryDirectory leaves it when its process is killed. The folder of the weights has a name
    that `tidy` removes; a launch script is read below this layer, and `prove` is no part of a run."""
    package = Path(whet.__file__).parent
    made = {str(path.relative_to(package)) for path in package.rglob("*.py") if MADE.search(path.read_text())}
    others = {"sync/exchange.py", "dialects/shell.py", "prove/trinity.py"}
    assert made == {"guard/temporary.py", *others}


def test_what_only_has_the_name_is_left_alone(place: Path) -> None:
    (place / "elsewhere").mkdir()
    (place / "whet-hub-linklink").symlink_to(place / "elsewhere")
    (place / "whet-hub-filefile").touch()
    (place / "whet-hub-20260101").mkdir()  # a user's
    (place / "whet-hub-of_mine").mkdir(mode=0o755)
    (place / "whet-hub-mine").mkdir(mode=0o700)
    (place / "whet-0").mkdir(mode=0o700)
    before = sorted(place.iterdir())
    OwnFolder("hub").close()
    sweep_all()
    assert sorted(place.iterdir()) == before


def test_a_command_removes_what_the_killed_have_left_of_any_kind(place: Path) -> None:
    """A rewards' keeper that was killed, a second SIGTERM: whatever was not closed."""
    (place / "whet-rewards-abcd1234").mkdir(mode=0o700)
    (place / "whet-replay-abcd1234").mkdir(mode=0o700)
    with OwnFolder("export") as held, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["whet", "--version"])
        patch.setattr(leftover, "bound", lambda status: None)
        with pytest.raises(SystemExit):
            main()
        assert [*place.iterdir()] == [held]


def _exports(path: Path, ready: Path) -> None:
    """A process that is killed while it writes a folder."""
    with atomic_folder(path) as new:
        (new / "half").touch()
        ready.touch()
        time.sleep(300)


def test_a_folder_half_written_by_a_killed_process_is_removed_by_the_next_that_writes_it(place: Path) -> None:
    ready, path = place / "ready", place / "out" / "model"
    pid = fork(partial(_exports, path, ready))
    try:
        while not ready.exists():
            time.sleep(0.01)
        with atomic_folder(path):
            pass
        assert len([*path.parent.iterdir()]) == 2, "another process is writing"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    path.rename(path.with_name(".model.old-abcd1234"))  # killed between the two renames
    (path.parent / ".model.old-abcd1234.new-1").mkdir()  # of another name
    with atomic_folder(path) as new:
        (new / "whole").touch()
    assert sorted(p.name for p in path.parent.iterdir()) == [".model.old-abcd1234.new-1", "model"]
    assert [p.name for p in path.iterdir()] == ["whole"]
    assert path.stat().st_mode & 0o777 == 0o755


def _writes(path: Path, ready: Path) -> None:
    """A process that is killed while it writes the file of -o."""
    with replacing(path) as part:
        part.write_text("half")
        ready.touch()
        time.sleep(300)


def test_what_a_killed_process_left_of_a_file_is_removed_by_the_next_that_writes_it(place: Path) -> None:
    ready, path = place / "ready", place / "out" / "plan.json"
    path.parent.mkdir()
    pid = fork(partial(_writes, path, ready))
    try:
        while not ready.exists():
            time.sleep(0.01)
        notices.write(path, "first")
        assert len([*path.parent.iterdir()]) == 2, "another process is writing"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    others = [
        path.parent / name for name in (".plan.json.new-1234", ".plan.json.new-of_mine", ".x.new-abcd1234")
    ]
    for other in others:
        other.write_text("a user's")
    notices.write(path.with_name("x.json"), "another file")
    assert len([*path.parent.iterdir()]) == 6, "of another name"
    notices.write(path, "whole")
    assert {*path.parent.iterdir()} == {path, path.with_name("x.json"), *others}
    assert path.read_text() == "whole"


def test_a_file_is_written_where_its_folder_cannot_be_listed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(Path, "iterdir", refused)
    notices.write(place / "out", "whole")
    sweep_all()
    assert os.listdir(place) == ["out"]


def test_where_the_file_system_has_no_locks_a_folder_is_made_and_none_is_swept(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(handle: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refused)
    first, second = OwnFolder("hub"), OwnFolder("hub")
    assert first.path.is_dir()
    assert second.path.is_dir()
    first.close()
    second.close()
    assert not list(place.iterdir())
