"""Files of -o on a full disk: what was there stays, and nothing half-written is left."""

from __future__ import annotations

import os
import resource
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from whet import notices
from whet.data import gsm8k
from whet.types import ConfigError, DataError

GSM8K = Path(__file__).parent / "data" / "gsm8k"


@contextmanager
def full_disk(most: int) -> Iterator[None]:
    """No file may have more bytes than `most`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    file = tmp_path / "new" / "config.yaml"
    notices.write(file, "old\n")
    file.chmod(0o600)
    with full_disk(1000), pytest.raises(ConfigError, match=r"cannot write .*config.yaml: File too large"):
        notices.write(file, "x" * 2000)
    assert file.read_text() == "old\n"
    notices.write(file, "x" * 2000)
    assert file.read_text() == "x" * 2000
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [*file.parent.iterdir()] == [file]


def test_a_dash_is_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    notices.write(Path("-"), "new\n")
    assert capsys.readouterr().out == "new\n"
    assert not [*tmp_path.iterdir()]


def test_a_link_stays_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    notices.write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    notices.write(tmp_path / "pipe", "new")
    reader.join(10)
    assert found == ["new"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "pipe", "real"]


def test_data_on_a_full_disk(tmp_path: Path) -> None:
    gsm8k.convert(GSM8K, tmp_path)
    before = (tmp_path / "train.parquet").read_bytes()
    with full_disk(1000), pytest.raises(DataError, match=r"train.parquet: cannot be written: .*too large"):
        gsm8k.convert(GSM8K, tmp_path)
    assert (tmp_path / "train.parquet").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["test.parquet", "train.parquet"]
