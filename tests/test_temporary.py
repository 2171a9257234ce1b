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
from whet.guard.nursery import fork
from whet.guard.temporary import OwnFolder

MADE = re.compile(r"\b(TemporaryDirectory|mkdtemp)\(")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _held(ready: Path) -> None:
    """A process that has a folder."""
    OwnFolder("a")
    ready.touch()
    time.sleep(300)


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(place: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    pid = fork(partial(_held, ready))
    try:
        while not ready.exists():
            time.sleep(0.01)
        (of_it,) = place.glob("whet-a-*")
        OwnFolder("a").close()
        assert of_it.is_dir(), "its process lives"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    (of_it / "within").write_text("left")
    OwnFolder("b").close()
    assert of_it.is_dir(), "another kind"
    OwnFolder("a").close()
    assert not of_it.exists()


def test_folders_of_the_living_stay_and_end_with_them(place: Path) -> None:
    first, second = OwnFolder("a"), OwnFolder("a")
    assert first.path != second.path
    (first.path / "file").touch()
    first.close()
    first.close()
    assert list(place.glob("whet-a-*")) == [second.path]
    second.close()
    with OwnFolder("a") as path:
        assert path.is_dir()
    assert not list(place.iterdir())


def test_no_folder_is_made_in_a_way_that_leaves_it_behind() -> None:
    """TemporaryDirectory leaves it when its process is killed. `track.files` and the folder of the weights have names
    that `tidy` removes; a launch script is read below this layer, and `prove` is no part of a run."""
    package = Path(whet.__file__).parent
    made = {str(path.relative_to(package)) for path in package.rglob("*.py") if MADE.search(path.read_text())}
    others = {"track/files.py", "sync/exchange.py", "dialects/shell.py", "prove/trinity.py"}
    assert made == {"guard/temporary.py", *others}


def test_what_only_has_the_name_is_left_alone(place: Path) -> None:
    (place / "elsewhere").mkdir()
    (place / "whet-a-link").symlink_to(place / "elsewhere")
    (place / "whet-a-file").touch()
    OwnFolder("a").close()
    assert sorted(path.name for path in place.iterdir()) == ["elsewhere", "whet-a-file", "whet-a-link"]


def test_where_the_file_system_has_no_locks_a_folder_is_made_and_none_is_swept(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(handle: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refused)
    first, second = OwnFolder("a"), OwnFolder("a")
    assert first.path.is_dir()
    assert second.path.is_dir()
    first.close()
    second.close()
    assert not list(place.iterdir())
