"""A host of environments that never stops asking, and records of a run that are no files or have no end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import test_env_zoo as zoo
from test_show import make
from whet.checkpoint import glance, read_state
from whet.config.schema import EnvironmentConfig
from whet.envs import hosts
from whet.envs.hosts import EnvHosts
from whet.track.files import holder
from whet.track.overview import tokenizer_of
from whet.track.run_paths import run_of
from whet.track.timeline import read as read_timeline
from whet.track.turn_seconds import read as read_seconds
from whet.track.written import read_config, read_lines, read_manifest, read_more
from whet.types import WhetError
from whet.view.source import Shown, count_rows

# ---------------------------------------------------------------- a host that floods


def test_a_host_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it stays within the limit, and a message beside it reaches one that reads."""
    monkeypatch.setattr(hosts, "MOST_UNREAD", 10_000)
    ours, theirs = Pipe()
    place = hosts.HostProcess(SimpleNamespace(connection=ours), "", alone=False)  # type: ignore[arg-type]
    place.send("reply", 1, 1, "x" * 20_000)
    assert not theirs.poll(), "one message may be longer"
    for _ in range(100):
        place.send("refused", 1, 2, "y" * 1000)
    assert place.outbox.qsize() == 1
    with pytest.raises(EOFError):
        theirs.recv_bytes()
    ours.close()
    theirs.close()


def test_what_a_host_reads_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "MOST_UNREAD", 10_000)
    ours, theirs = Pipe()
    place = hosts.HostProcess(SimpleNamespace(connection=ours), "", alone=False)  # type: ignore[arg-type]
    for _ in range(5):
        for _ in range(5):
            place.send("refused", 1, 2, "y" * 1000)
        place.outbox.put(None)
        place.write()
        assert [len(theirs.recv_bytes()) > 1000 for _ in range(5)] == [True] * 5
    assert place.unread == 0
    ours.close()
    theirs.close()


FLOODS = """
import gc, json
from multiprocessing.connection import Connection

def floods(env):
    for line in gc.get_objects():
        if isinstance(line, Connection) and not line.closed:
            for _ in range(5000):
                line.send_bytes(b'["beat"]')
"""


def test_a_host_is_heard_no_faster_than_the_run_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[int] = [0]
    told: list[int] = []
    call_soon = asyncio.BaseEventLoop.call_soon_threadsafe

    def telling(
        loop: asyncio.BaseEventLoop, what: Callable[..., object], *arguments: Any, **more: Any
    ) -> Any:
        if threading.current_thread().name != "whet-env-host":
            return call_soon(loop, what, *arguments, **more)

        def hearing(*given: Any) -> None:
            waiting[0] -= 1
            what(*given)

        waiting[0] += 1
        told.append(waiting[0])
        return call_soon(loop, hearing, *arguments, **more)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", telling)
    monkeypatch.setattr(hosts, "MOST_UNHEARD", 8)
    (tmp_path / "zoo.py").write_text(f"{zoo.ZOO}\n{FLOODS}")
    made = EnvHosts(
        EnvironmentConfig(make=f"{tmp_path}/zoo.py:Zoo", arguments={"how": "floods"}, timeout_s=60.0)
    )
    try:
        found = zoo.play(made)
    finally:
        made.close()
    assert {uid for uid in zoo.OTHERS if found[uid].error} == set()
    assert len(told) > 5000
    assert max(told) <= 8 * made.cfg.hosts + 50, "those of a loop that is over, and the ends of hosts"


# ---------------------------------------------------------------- records that are no files

READ: dict[str, tuple[str, Callable[[Path], object]]] = {
    "lock": ("lock", lambda path: holder(path.parent)),
    "metrics": ("metrics.jsonl", lambda path: read_more(path, 0, 1)),
    "metrics as a whole": ("metrics.jsonl", read_lines),
    "metrics of the viewer": ("metrics.jsonl", lambda path: Shown(0, path.parent).lines(path.name)),
    "config": ("config.yaml", lambda path: read_config(path.parent)),
    "manifest": ("manifest.json", lambda path: read_manifest(path.parent)),
    "timeline": ("timeline.json", read_timeline),
    "rows": ("rollouts/s-step-000001.parquet", count_rows),
    "seconds": ("seconds/s-step-000001.parquet", read_seconds),
    "tokenizer": ("export/s/tokenizer.json", lambda path: tokenizer_of(path.parents[1])),
    "state": ("checkpoints/0-s-000001/state.json", lambda path: glance(path.parents[1])),
    "list of a checkpoint": ("checkpoints/0-s-000001/manifest.json", lambda path: read_state(path.parent)),
    "owner": ("checkpoints/.whet-run", lambda path: run_of(path.parent / "0-s-000001")),
}
"""The records that are read of any run, and what reads them."""


ENDLESS = (
    "lock",
    "metrics",
    "metrics as a whole",
    "metrics of the viewer",
    "config",
    "manifest",
    "timeline",
    "tokenizer",
)
"""Those of them that may be huge: parquet is read from its end, and a checkpoint has the sizes of its files."""


def read_all(how: str, folder: Path) -> None:
    """In a process of its own, which SIGALRM ends where one waits. Each may only end with an error that whet says."""
    for what, (name, reads) in READ.items():
        if how == "sparse" and what not in ENDLESS:
            continue
        path = folder / what.replace(" ", "-") / name
        path.parent.mkdir(parents=True)
        if how == "pipe":
            os.mkfifo(path)
        elif how == "device":
            path.symlink_to("/dev/zero")
        else:
            with path.open("wb") as file:
                file.truncate(2**41)
        print(what, flush=True)
        signal.alarm(60)
        with suppress(WhetError):
            reads(path)
        signal.alarm(0)
    print("all")


@pytest.mark.parametrize("how", ["pipe", "device", "sparse"])
def test_a_record_that_is_no_file_or_has_no_end_is_an_error(how: str, tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; import test_untrusted_floods as t;"
        "resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30)); t.read_all(sys.argv[1], Path(sys.argv[2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, how, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        timeout=600,
        capture_output=True,
        check=False,
    )
    said = done.stdout.decode().split("\n")
    assert said[-2:] == ["all", ""], f"the last one: {said[-2:]}; {done.stderr.decode()[-2000:]}"


def test_the_records_of_a_run_are_read_as_before(tmp_path: Path) -> None:
    make(tmp_path / "run").close()
    for what, (name, reads) in READ.items():
        if (tmp_path / "run" / name).is_file():
            assert reads(tmp_path / "run" / name) is not None, what
