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
from typer.testing import CliRunner

from whet import cli, notices
from whet.data import gsm8k
from whet.export import refuse_other_files
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


def test_where_no_file_can_be_put_it_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    for place, said in (
        (tmp_path / "file/new.json", "Not a directory|File exists"),
        (Path("/proc/new.json"), "No such file or directory|Permission denied"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(ConfigError, match=f"cannot write {place}: ({said}); give another file"):
            notices.check_output(place)
    for fine in (None, Path("-"), Path("/dev/null"), tmp_path / "file", tmp_path / "new/a.json"):
        notices.check_output(fine)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "new"]
    with pytest.raises(
        ConfigError, match=r"-o /proc/new: no folder can be written there \(.*\); give another one"
    ):
        refuse_other_files("/proc/new")


@pytest.mark.parametrize("words", [("eval", "absent.yaml"), ("rehearse", "absent.yaml")])
def test_a_command_that_takes_long_looks_at_its_output_first(words: tuple[str, ...], tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.app, [*words, "-o", str(tmp_path)])
    assert isinstance(done.exception, ConfigError)
    assert "Is a directory" in str(done.exception)


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
