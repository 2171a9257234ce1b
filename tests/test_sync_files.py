"""Weights through a folder, between processes: readers never see half a version, and a kill harms nobody."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from processes import Child
from test_sync import Named, some, take
from whet.sync.files import Files
from whet.sync.manifest import describe
from whet.types import CheckpointError, Receipt, WhetError

HEAD = """
import sys, time
from pathlib import Path
import torch
from whet.sync.files import Files
from whet.sync.manifest import checked
from whet.types import Receipt
def big(version, count=6):
    return [(f"t{i}", torch.full((50_000,), float(version))) for i in range(count)]
root = Path(sys.argv[1])
"""


@pytest.fixture
def started() -> Iterator[list[Child]]:
    children: list[Child] = []
    yield children
    for child in children:
        child.close()


def start(started: list[Child], code: str, root: Path) -> Child:
    started.append(Child(HEAD + textwrap.dedent(code), str(root)))
    return started[-1]


def big(version: int) -> Named:
    return [(f"t{i}", torch.full((50_000,), float(version))) for i in range(6)]


WRITER = """
files = Files(root, keep=3, bucket_bytes=200_000)
for version in range(1, 10_000):
    files.send(version, big(version))
    print(version, flush=True)
"""


def test_another_process_reads_whole_versions_while_this_one_writes(
    started: list[Child], tmp_path: Path
) -> None:
    """The reader takes whatever is newest, again and again; each tensor is of that version, and receipts come back."""
    reader = start(
        started,
        """
        files = Files(root, timeout_s=30)
        seen = 0
        while seen < 25:
            newest = files.newest()
            if newest is None or newest <= seen:
                time.sleep(0.001)
                continue
            stream = checked(files.receive(newest), newest, None)
            numbers = set()
            while True:
                try:
                    numbers |= set(next(stream)[1].unique().tolist())
                except StopIteration as end:
                    manifest = end.value
                    break
            assert numbers == {float(newest)}, numbers
            files.confirm(Receipt("reader", newest, manifest.digest))
            seen = newest
        """,
        tmp_path,
    )
    files = Files(tmp_path, keep=20, bucket_bytes=200_000)
    digests = {}
    for version in range(1, 26):
        digests[version] = files.send(version, big(version)).digest
        time.sleep(0.002)
    reader.said()
    (receipt,) = files.receipts()
    assert receipt == Receipt("reader", 25, digests[25])


def test_a_writer_killed_at_any_moment_leaves_whole_versions(started: list[Child], tmp_path: Path) -> None:
    for trial in range(6):
        root = tmp_path / str(trial)
        writer = start(started, WRITER, root)
        writer.await_line()
        time.sleep(0.003 * trial)
        writer.blow(signal.SIGKILL)
        writer.process.join(30)
        files = Files(root, timeout_s=0.1, keep=3)
        newest = files.newest()
        assert newest is not None
        got, _ = take(files, newest)
        assert {float(t[0]) for t in got.values() if t is not None} == {float(newest)}
        files.tidy()  # the next writer's first act
        assert [p.name for p in root.iterdir() if p.name.startswith(".")] == []
        files.send(newest + 1, big(newest + 1))
        take(files, newest + 1)


def test_a_killed_reader_blocks_nobody(started: list[Child], tmp_path: Path) -> None:
    files = Files(tmp_path, keep=1)
    files.send(1, big(1))
    reader = start(
        started,
        """
        stream = Files(root).receive(1)
        held = [next(stream) for _ in range(2)]
        print("holds", flush=True)
        time.sleep(60)
        """,
        tmp_path,
    )
    assert reader.await_line() == "holds"
    reader.blow(signal.SIGKILL)
    files.send(2, big(2))
    assert files.newest() == 2
    assert [p.name for p in tmp_path.iterdir()] == ["00000002"]


def test_a_folder_that_goes_while_it_is_read_stays_readable_or_is_named(tmp_path: Path) -> None:
    files = Files(tmp_path, keep=1, bucket_bytes=200_000)
    files.send(1, big(1))
    stream = files.receive(1)
    first = next(stream)
    files.send(2, big(2))
    rest = [first, *stream]  # all files were opened at once
    assert {float(t[0]) for _, t in rest if t is not None} == {1.0}
    stream = files.receive(2)
    for path in (tmp_path / "00000002").iterdir():
        path.unlink()
    (tmp_path / "00000002").rmdir()
    with pytest.raises(WhetError, match=r"version 2 in .* did not arrive"):
        next(Files(tmp_path, timeout_s=0.05).receive(2))


def torn(folder: Path, how: str) -> None:
    file = folder / "00001.safetensors"
    data = file.read_bytes()
    if how == "shorter":
        file.write_bytes(data[:-100])
    elif how == "a byte":
        file.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    elif how == "gone":
        file.unlink()
    elif how == "another's":
        save_file({"stranger": torch.zeros(3)}, file)
    elif how == "manifest gone":
        (folder / "manifest.json").unlink()
    elif how == "manifest torn":
        text = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(text[: len(text) // 2])
    else:
        assert how == "manifest of another version"
        value = describe(5, big(2)).to_json()
        (folder / "manifest.json").write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shorter", "cannot be read"),
        ("a byte", "version 2: 't[0-9]' has different bytes"),
        ("gone", "version 2: . of 6 tensors were not received: 't"),
        ("another's", "holds 'stranger', which the manifest does not list"),
        ("manifest gone", "cannot be read.*send this version again"),
        ("manifest torn", "cannot be read.*send this version again"),
        ("manifest of another version", "version 2 was requested, but version 5 by .* was received"),
    ],
)
def test_torn_files_are_found(tmp_path: Path, how: str, words: str) -> None:
    files = Files(tmp_path, bucket_bytes=200_000)
    files.send(2, big(2))
    torn(tmp_path / "00000002", how)
    with pytest.raises(WhetError, match=words):
        take(files, 2)
    files.send(2, big(2))
    take(files, 2)


@pytest.mark.parametrize("how", ["manifest gone", "manifest torn"])
def test_a_writer_that_starts_again_removes_versions_that_cannot_be_read(tmp_path: Path, how: str) -> None:
    """As a power cut may leave them: whatever way the next version goes by, it can be written."""
    files = Files(tmp_path, keep=3, bucket_bytes=200_000)
    whole = files.send(1, big(1))
    for version in (2, 3):
        files.send(version, [*big(1)[:3], *big(version)[3:]], held=whole.named)
    for version in (2, 3):
        torn(tmp_path / f"{version:08d}-changed", how)
    again = Files(tmp_path, keep=3)
    again.tidy()
    again.send(3, big(3))
    take(again, 3)
    take(again, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000001", "00000003"]


def test_a_full_disk_leaves_the_version_before(started: list[Child], tmp_path: Path) -> None:
    """The limit on a file's size stands for the disk's end."""
    files = Files(tmp_path)
    files.send(1, some())
    writer = start(
        started,
        """
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            Files(root).send(2, big(2))
        except Exception as error:
            print(type(error).__name__, error)
        """,
        tmp_path,
    )
    said = writer.said()
    assert said.startswith(CheckpointError.__name__ + " cannot write"), said
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]
    take(files, 1)


def test_a_wait_says_who_wrote_last_and_when(tmp_path: Path) -> None:
    files = Files(tmp_path, timeout_s=0.1)
    files.send(6, some())
    with pytest.raises(
        WhetError, match=rf"version 7 in {tmp_path} did not arrive within sync.timeout_s=0.1 s"
    ) as told:
        take(files, 7)
    assert "the newest is 6, written " in str(told.value)
    assert f"process {os.getpid()} on" in str(told.value)


def test_a_version_that_comes_during_the_wait(started: list[Child], tmp_path: Path) -> None:
    files = Files(tmp_path, timeout_s=30)
    writer = start(started, 'time.sleep(0.5); Files(root).send(1, [("x", torch.ones(3))])', tmp_path)
    got, _ = take(files, 1)
    writer.said()
    assert torch.equal(got["x"], torch.ones(3))  # type: ignore[arg-type]


def test_who_holds_enough_takes_the_changes_and_others_the_whole(tmp_path: Path) -> None:
    files = Files(tmp_path, timeout_s=0.1)
    first = files.send(1, some(1))
    files.send(2, some(2), held=first.named)
    files.send(2, some(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000001", "00000002", "00000002-changed"]
    changes, _ = take(files, 2, first)
    assert [n for n, t in changes.items() if t is not None] == ["b"]
    whole, _ = take(files, 2)
    assert all(t is not None for t in whole.values())
    other, _ = take(files, 2, describe(1, [(n, t + 2) for n, t in some(1)]))
    assert all(t is not None for t in other.values())
    files.send(2, some(7))  # the trainer has gone back and learnt something else
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000001", "00000002"]


def test_tied_tensors_travel_under_both_names(tmp_path: Path) -> None:
    shared = torch.randn(4, 4)
    files = Files(tmp_path)
    files.send(1, [("a", shared), ("b", shared), ("row", shared[1])])
    got, _ = take(files, 1)
    assert torch.equal(got["a"], got["b"])  # type: ignore[arg-type]
    assert torch.equal(got["row"], shared[1])  # type: ignore[arg-type]


def test_a_receiver_s_name_is_a_file_s_name(tmp_path: Path) -> None:
    for name in ("../x", "", ".x", "a/b"):
        with pytest.raises(WhetError, match="cannot be a file name"):
            Files(tmp_path).confirm(Receipt(name, 1, ""))
