"""When something hangs, the log has the stacks of every process of the run; what never comes back is ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from processes import Child
from whet import disaggregated
from whet.guard import stacks
from whet.guard.jail import Jail, RewardCall
from whet.guard.line import LocalLine
from whet.guard.processes import process, state
from whet.guard.watch import wait
from whet.track.files import RunLock
from whet.types import WhetError

BESIDE = """
import sys, time
from pathlib import Path
from whet.guard import stacks

def deep_inside():
    print("there", flush=True)
    time.sleep(3600)

with stacks.kept(Path(sys.argv[1]), "explorer-one"):
    deep_inside()
"""
RUN = """
from pathlib import Path
from whet.guard import stacks

def deep_inside(connection):
    connection.send_bytes(b"there")
    connection.poll(None)

def serve(connection):
    with stacks.kept(Path(connection.recv_bytes().decode()), "explorer-one"):
        deep_inside(connection)
"""
HANGS = """
import time
from whet.guard.watch import Watch

def never_comes_back():
    Watch(quiet_s=0.1, limit_s=0.5).beat("the update")
    print("there", flush=True)
    time.sleep(3600)

never_comes_back()
"""


@pytest.fixture
def children() -> Iterator[Callable[..., Child]]:
    made: list[Child] = []

    def start(code: str, *arguments: str) -> Child:
        made.append(Child(code, *arguments))
        made[-1].await_line()
        return made[-1]

    yield start
    for child in made:
        child.close()


def until(reached: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < end, "not reached in time"
        time.sleep(0.01)


def test_every_process_of_a_run_says_where_it_is(tmp_path: Path, children: Callable[..., Child]) -> None:
    """A stopped one cannot, and that is said; a dead one is no more asked, and leaves nothing in the end."""
    child = children(BESIDE, str(tmp_path))
    with stacks.kept(tmp_path, "trainer"):
        said = stacks.everyone()
        assert f"process {child.pid}, explorer-one:" in said
        assert "in deep_inside" in said, "the other's"
        assert "test_every_process_of_a_run_says_where_it_is" in said, "this one's"
        assert stacks.others().count("in deep_inside") == 1, "what it said before is not said again"
        child.blow(signal.SIGSTOP)
        until(lambda: state(child.pid) == "T")
        assert "it does not answer: it is stopped, by SIGSTOP" in stacks.others()
        child.blow(signal.SIGKILL)
        child.process.join(30)
        assert stacks.others() == ""
    with stacks.kept(tmp_path, "trainer"):
        assert len(list((tmp_path / "stacks" / socket.gethostname()).iterdir())) == 1, (
            "the dead one's is gone"
        )
    assert list(tmp_path.iterdir()) == []


def test_a_process_at_the_end_of_a_line_is_asked_through_its_own_file(tmp_path: Path) -> None:
    with stacks.kept(tmp_path, "trainer"):
        line = LocalLine("whet.rewards.host", 3, folder=tmp_path, threads=1)
        until(lambda: "host-3" in stacks.others())
        said = stacks.others()
        assert f"process {line.process.pid}, host-3:" in said
        assert "in recv_bytes" in said or "in serve" in said or "import" in said
        line.kill()
        assert stacks.others() == ""


def test_a_file_in_the_working_directory_takes_the_place_of_no_module_of_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("whet.guard.line.subprocess", subprocess)  # an interpreter of its own
    with stacks.kept(tmp_path, "trainer"):
        line = LocalLine("whet.rewards.host", 3, folder=tmp_path, threads=1)
        until(lambda: line.gone() or "host-3" in stacks.others())
        assert not line.gone()
        line.kill()


STARTS = """
import sys, threading, time
from pathlib import Path
from whet.guard.line import LocalLine

folder, made = Path(sys.argv[1]), []
def start():
    made.append(LocalLine("whet.rewards.host", 0, folder=folder, threads=1))
    while not (folder / "stack-0").exists():  # it has begun, and knows whose end is its own
        time.sleep(0.01)
if sys.argv[2] == "main":
    start()
else:
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
print(made[0].process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("thread", ["main", "another"])
def test_a_stopped_process_ends_with_the_process_that_started_it_and_not_with_the_thread(
    tmp_path: Path, thread: str
) -> None:
    child = Child(STARTS, str(tmp_path), thread)
    try:
        pid = int(child.await_line())
        assert state(pid) not in ("", "Z"), "it does not end with the thread"
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state(pid) == "T")
    finally:
        child.close()
    until(lambda: state(pid) in ("", "Z"))


def test_a_process_that_starts_slowly_says_where_and_leaves_signals_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module is imported last: until its file is there, the signal would end it, and is not sent."""
    (tmp_path / "slow_to_start.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("whet.guard.line.subprocess", subprocess)  # an interpreter of its own
    line = LocalLine("slow_to_start", 0, folder=tmp_path, threads=1)
    try:
        line.dump()
        assert "it does not answer: it" in line.stack()
        until(lambda: (tmp_path / "stack-0").exists())
        line.process.send_signal(signal.SIGTERM)
        until(lambda: line.dump() or 'slow_to_start.py", line 2 in <module>' in line.stack())
        assert not line.gone()
    finally:
        line.hang_up()
        line.kill()


def test_what_a_process_leaves_that_is_killed_as_it_begins_to_listen(
    tmp_path: Path, children: Callable[..., Child]
) -> None:
    """While it lives it is not asked, for the signal would end it; then its file goes."""
    child = children("print('there', flush=True); import time; time.sleep(3600)")
    with stacks.kept(tmp_path, "trainer"):
        pid, began = process(child.pid)
        (tmp_path / "stacks" / socket.gethostname() / f".new.{pid}.{began}").touch()
        assert stacks.others() == ""
        assert child.process.is_alive()
        child.blow(signal.SIGKILL)
        child.process.join(60)
    assert not (tmp_path / "stacks").exists()


def test_a_process_that_ends_while_it_is_looked_up_does_not_end_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward process removes its file as it ends, which may be between any two looks at it."""
    there = Path.exists

    def ends(path: Path, **how: Any) -> bool:
        found = there(path, **how)
        if path.name.startswith("reward."):
            path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "exists", ends)
    with stacks.kept(tmp_path, "run"):
        (Path(stacks.folder() or "") / "reward.4194305.1").touch()
        assert stacks.everyone()


def test_no_process_is_asked_that_does_not_expect_it(tmp_path: Path, children: Callable[..., Child]) -> None:
    """SIGUSR1 ends a process that has no handler: another one that got the number of a dead one is left alone."""
    child = children("print('there', flush=True); import time; time.sleep(3600)")
    with stacks.kept(tmp_path, "trainer"):
        (tmp_path / "stacks" / socket.gethostname() / f"explorer.{child.pid}.17").touch()
        assert stacks.others() == ""
    assert child.process.is_alive()


def test_rewards_say_where_they_are_in_the_report_of_a_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def slow_reward() -> float:
        end = time.monotonic() + 30
        while not (tmp_path / "go").exists() and time.monotonic() < end:
            time.sleep(0.01)
        return 1.0

    async def story() -> None:
        asking = asyncio.ensure_future(jail.call_many([RewardCall(function="slow", arguments="{}")]))
        with pytest.raises(WhetError, match=r"the step waited 1 s for a reward and timed out"):
            await wait(asyncio.shield(asking), owner="the step", what="a reward", timeout_s=1.0, report_s=0.5)
        (tmp_path / "go").touch()
        assert (await asking)[0].parts == {"score": 1.0}

    with (
        stacks.kept(tmp_path, "trainer"),
        caplog.at_level(logging.WARNING),
        Jail({"slow": lambda: slow_reward}, timeout_s=60) as jail,
    ):
        asyncio.run(story())
    said = "\n".join(r.getMessage() for r in caplog.records)
    assert "waiting for a reward by the step since" in said
    assert "in slow_reward" in said
    for who in ("reward-keeper", "reward-nursery", "reward"):
        assert f", {who}:" in said


def test_a_call_that_never_comes_back_ends_the_process(children: Callable[..., Child]) -> None:
    child = children(HANGS)
    child.process.join(60)
    assert child.process.exitcode == 1


def test_time_in_which_the_process_was_stopped_does_not_count(children: Callable[..., Child]) -> None:
    child = children(HANGS.replace("0.5", "2.0").replace("3600", "0.5") + "time.sleep(0.5)\n")
    child.blow(signal.SIGSTOP)
    time.sleep(2.5)
    child.blow(signal.SIGCONT)
    child.process.join(60)
    assert child.process.exitcode == 0


def test_without_a_run_nothing_is_written(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    stacks.listen("nobody")
    assert stacks.folder() is None
    assert signal.getsignal(signal.SIGUSR1) == before
    with stacks.kept(tmp_path, "trainer"):
        assert stacks.folder() == str(tmp_path / "stacks" / socket.gethostname())
        os.kill(os.getpid(), signal.SIGUSR1)  # a person asks
        [file] = Path(str(stacks.folder())).iterdir()
        assert "test_without_a_run_nothing_is_written" in file.read_text()


def test_an_explorer_says_that_it_waits_for_its_trainer_and_not_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disaggregated, "REPORT_S", 0.01)
    cfg = SimpleNamespace(
        sync=SimpleNamespace(timeout_s=0.05), buffer=SimpleNamespace(explorer_name="one"), rollout=None
    )
    weights: Any = SimpleNamespace(
        context=SimpleNamespace(cfg=cfg, name="main"),
        engine=SimpleNamespace(version=7),
        transport=SimpleNamespace(root=tmp_path / "weights"),
    )
    idle = disaggregated.Idle(weights)

    def look_later(seen: object, *, busy: bool) -> None:
        time.sleep(0.06)
        idle.look(seen, busy=busy)

    idle.look((0, 7), busy=False)
    with RunLock(tmp_path), caplog.at_level(logging.WARNING):
        look_later((0, 7), busy=False)  # a long step: the trainer lives
    assert (
        "explorer 'one' has waited 0 s for the trainer to take rollouts of stage 'main', since weights"
        in caplog.text
    )
    assert "version 7: it runs" in caplog.text
    look_later((0, 7), busy=True)
    look_later((0, 8), busy=False)
    with pytest.raises(
        WhetError, match=r"its process is dead. Restart the trainer, .* sync.timeout_s=0.05 is exceeded"
    ):
        look_later((0, 8), busy=False)


def test_processes_on_other_machines_are_asked_at_once_and_do_not_keep_a_report() -> None:
    """One answers, one cannot be asked, one never answers; then none is there any more."""
    left: list[float] = []

    def never(within_s: float) -> str:
        left.append(within_s)
        raise TimeoutError("not within its time")

    def unreachable() -> Callable[[float], str]:
        raise ConnectionError("its machine is gone")

    stacks.reach("rank there", lambda: lambda within_s: "File there, in its\x1b[31m loss")
    stacks.reach("engine there", unreachable)
    stacks.reach("explorer there", lambda: never)
    said = stacks.everyone()
    assert "rank there:\nFile there, in its?[31m loss\n" in said
    assert "engine there:\n(it does not answer: ConnectionError: its machine is gone)\n" in said
    assert "explorer there:\n(it does not answer: TimeoutError: not within its time)\n" in said
    assert 0 <= left[0] <= stacks.FAR_S
    for who in ("rank there", "engine there", "explorer there"):
        stacks.lose(who)
    assert list(stacks.far()) == [""]


def test_a_process_at_the_end_of_a_line_that_is_a_run_itself_writes_into_one_file(tmp_path: Path) -> None:
    """An explorer is asked by who has started it, and as one of its run."""
    (tmp_path / "as_a_run.py").write_text(RUN)
    (tmp_path / "run").mkdir()
    with stacks.kept(tmp_path / "run", "trainer"):
        sys.path.insert(0, str(tmp_path))
        try:
            line = LocalLine("as_a_run", 0, folder=tmp_path, threads=1)
        finally:
            sys.path.remove(str(tmp_path))
        try:
            line.connection.send_bytes(str(tmp_path / "run").encode())
            assert line.connection.recv_bytes() == b"there"
            with patch.object(os, "kill", wraps=os.kill) as asked:
                said = stacks.others()
            assert asked.call_count == 1, "it would write twice, perhaps"
            assert f"process {line.process.pid}, as_a_run-0:" in said
            assert f"process {line.process.pid}, explorer-one:" in said
            assert said.count("in deep_inside") == 2
            line.dump()
            until(lambda: line.stack().count("in deep_inside") == 2)
        finally:
            line.hang_up()
            line.kill()
