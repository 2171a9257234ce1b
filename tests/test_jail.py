"""The jail against the zoo: every hostile call gets its own failure, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import multiprocessing
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hostile
from whet import secrets
from whet.guard import confine, nursery
from whet.guard.jail import Failure, Jail, RewardCall
from whet.guard.output import OutputPipe
from whet.guard.processes import state
from whet.types import ConfigError, WhetError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the full jail needs Linux")


def loading(value: Any) -> Callable[[], Any]:
    return lambda: value


def make(*functions, **limits):
    limits = {"timeout_s": 30.0, "memory_mb": 400, "max_output_bytes": 1000, **limits}
    return Jail({f.__name__: loading(f) for f in (hostile.innocent, *functions)}, **limits)


def calls(*names, **more):
    return [
        RewardCall(
            function=getattr(n, "__name__", n), arguments=json.dumps({"value": float(i)}), key=i, **more
        )
        for i, n in enumerate(names)
    ]


def ask(jail, *names, **more):
    return asyncio.run(jail.call_many(calls(*names, **more)))


def below() -> set[int]:
    return confine.descendants(os.getpid())


def eventually(condition, within_s: float = 30.0) -> bool:
    end = time.monotonic() + within_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def daemons() -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if hostile.MARK in (folder / "cmdline").read_text():
                found.append(folder.name)
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = below()
    yield
    assert eventually(lambda: below() <= before)
    assert eventually(lambda: not daemons())


BOMBS = {hostile.tree_bomb, hostile.big_fork_bomb}
"""They fill a machine with processes, for seconds; the whole zoo at once has them, too, and here is `fork_bomb`."""


@pytest.mark.parametrize(
    "beast",
    [pytest.param(f, marks=[pytest.mark.sweep] if f in BOMBS else []) for f in hostile.ZOO],
    ids=lambda f: f.__name__,
)
def test_a_beast_gets_its_failure_and_its_neighbours_get_their_values(beast):
    kind, detail = hostile.ZOO[beast]
    asked = calls("innocent", beast, "innocent")
    if kind == "timeout":
        asked[1] = replace(asked[1], timeout_s=0.4)  # it never ends; the others may be slow
    with make(beast) as jail:
        first, bad, last = asyncio.run(jail.call_many(asked))
    assert (first.parts, last.parts) == ({"score": 0.0}, {"score": 2.0})
    assert bad.failure is not None
    assert bad.failure.kind == kind
    assert detail in bad.failure.detail
    assert len(bad.failure.detail) < 600
    assert bad.parts == {}


@pytest.mark.parametrize("beast", hostile.MESSY, ids=lambda f: f.__name__)
def test_the_mess_a_call_leaves_is_gone_before_the_next(beast):
    with make(beast, hostile.surroundings, timeout_s=30.0) as jail:
        _, messy, after, again = ask(jail, "surroundings", beast, "surroundings", "surroundings")
        clean = ask(jail, "surroundings", "innocent", "surroundings", "surroundings")[2:]
        assert messy.parts == {"score": 1.0}
        assert [after.parts, again.parts] == [c.parts for c in clean]
        assert after.parts["folder"] == after.parts["environment"] == after.parts["threads"] == 1.0
        assert after.parts["sum"] == after.parts["handlers"] == 1.0
        assert after.output == again.output == "still heard\n"
        assert not daemons()


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [1, 3])
def test_the_whole_zoo_at_once_and_every_innocent_value_is_that_of_a_clean_run(workers):
    beasts = [f for f in hostile.ZOO if hostile.ZOO[f][0] != "timeout"] + hostile.MESSY
    names = [n for beast in beasts for n in ("stochastic", beast)] + ["stochastic"]
    with make(hostile.stochastic, workers=workers) as clean:
        want = ask(clean, *["stochastic"] * len(names))[::2]
    with make(hostile.stochastic, *beasts, workers=workers, timeout_s=30.0) as jail:
        got = ask(jail, *names)
    assert [r.parts for r in got[::2]] == [r.parts for r in want]
    assert len({r.parts["score"] for r in want}) == len(want)
    for beast, result in zip(beasts, got[1::2], strict=True):
        assert (result.failure.kind if result.failure else None) == hostile.ZOO.get(beast, (None,))[0], beast


def test_output_is_kept_up_to_the_limit_and_the_rest_is_counted():
    with make(hostile.prints_100_mb, timeout_s=20.0) as jail:
        _, loud = ask(jail, "innocent", hostile.prints_100_mb)
    assert loud.output == "x" * 1000
    assert loud.dropped_bytes == 100 * (2**20 + 1) - 1000


def misses(value):
    raise KeyError(f"no {value}")


def refuses(value):
    raise WhetError("told in words")


def test_the_first_traceback_of_each_place_is_printed():
    with make(misses, refuses, max_output_bytes=4000) as jail:
        first, again, other = ask(jail, misses, misses, refuses)
    assert re.match(
        rf"Traceback \(most recent call last\):\n  File \"{re.escape(__file__)}\", line \d+", first.output
    )
    assert 'raise KeyError(f"no {value}")\n' in first.output
    assert first.output.endswith("KeyError: 'no 0.0'\n")
    assert [again.failure.kind, again.output] == ["raised", ""]
    assert [other.failure.kind, other.output] == ["raised", ""]


def test_who_meets_a_hoarders_full_memory_is_run_again_in_a_new_process():
    with make(hostile.hoards, memory_mb=300, timeout_s=30.0) as jail:
        results = ask(jail, *[hostile.hoards] * 20)
    assert [r.parts.get("score") for r in results] == [float(i) for i in range(20)]


def test_a_limit_that_is_too_small_for_the_process_itself_is_named():
    """numpy loads its random numbers only where they are seeded, before the call."""
    code = """
import json, numpy
from whet.guard import confine, worker
confine.limit(1)
print(json.dumps(worker.run(lambda: 1.0, b"[7, {}]", memory_mb=1, tell=print)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    kind, detail = json.loads(done.stdout)["failure"]
    assert kind == "memory"
    assert re.fullmatch(r"before the call: .*; reward_workers.memory_mb=1 may be too small", detail), detail


def test_a_reward_that_leaks_files_goes_on_in_new_processes():
    with make(hostile.leaks_files, timeout_s=30.0) as jail:
        results = ask(jail, *[hostile.leaks_files] * 30)
    assert [r.parts.get("score") for r in results] == [float(i) for i in range(30)]


def ends_what_it_forked(value: float) -> float:
    """As code does that gives a computation so much time: start, terminate, join."""
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=time.sleep, args=(1000,)) for _ in range(8)]
    for child in children:
        child.start()
        child.terminate()
    for child in children:
        child.join()
    return float(sum(child.exitcode == -signal.SIGTERM for child in children))


def computes_in_a_pool(value: float) -> float:
    with multiprocessing.get_context("fork").Pool(3) as pool:  # which terminates its processes in the end
        return float(sum(pool.map(abs, [1, -2])))


def test_a_reward_may_end_the_processes_that_it_forks() -> None:
    with make(ends_what_it_forked, computes_in_a_pool) as jail:
        results = ask(jail, *[ends_what_it_forked, computes_in_a_pool] * 3)
    assert [r.parts.get("score") for r in results] == [8.0, 3.0] * 3


def fills_the_disk() -> None:
    with open("/dev/full", "w") as file:
        file.write("x")


def has_no_thread() -> None:
    threading.stack_size(2**46)  # more than any process may have
    threading.Thread(target=print).start()


def raises(number: int) -> Callable[[], None]:
    def short() -> None:
        raise OSError(number, os.strerror(number))

    return short


def within(short: Callable[[], None]) -> Callable[[], None]:
    def deeper() -> None:
        try:
            short()
        except OSError as error:
            raise ValueError("it could not be done") from error

    return deeper


@pytest.mark.parametrize(
    ("short", "fresh"),
    [
        pytest.param(fills_the_disk, True, id="ENOSPC"),
        pytest.param(has_no_thread, True, id="a thread"),
        pytest.param(raises(errno.EDQUOT), True, id="EDQUOT"),
        pytest.param(raises(errno.EAGAIN), True, id="EAGAIN"),
        pytest.param(raises(errno.ENFILE), True, id="ENFILE"),
        pytest.param(within(raises(errno.EAGAIN)), True, id="EAGAIN as a cause"),
        pytest.param(raises(errno.EPERM), False, id="EPERM"),
        pytest.param(within(raises(errno.EPERM)), False, id="EPERM as a cause"),
    ],
)
def test_who_lacks_what_earlier_calls_have_used_up_is_run_again_in_a_new_process(
    short: Callable[[], None], fresh: bool
) -> None:
    """Errors of other kinds are no reason for that."""

    def scarce(value: float, served: list[float] = []) -> dict[str, float]:  # noqa: B006
        served.append(value)
        if len(served) > 1:
            short()
        return {"score": value, "pid": os.getpid()}

    with make(scarce) as jail:
        results = ask(jail, *[scarce] * 4)
    given = [r.parts.get("score") for r in results]
    assert given == ([0.0, 1.0, 2.0, 3.0] if fresh else [0.0, None, None, None])
    assert len({r.parts["pid"] for r in results if r.parts}) == (4 if fresh else 1)
    assert {r.failure.kind for r in results if r.failure} == (set() if fresh else {"raised"})


def test_a_process_with_many_files_left_open_is_replaced_before_they_run_out():
    """After 256 of them: no call has failed for want of files."""

    def leaks(value, kept=[]):  # noqa: B006
        kept += [open(os.devnull) for _ in range(200)]  # noqa: SIM115
        return {"score": os.getpid()}

    with make(leaks, workers=1) as jail:
        results = ask(jail, *[leaks] * 4)
    assert len({r.parts["score"] for r in results}) == 2, "two calls each"


def test_what_a_reward_changes_in_its_process_reaches_no_other_reward_and_no_later_call():
    def looks(value):
        return {"score": sum([value]), "json": float(sys.modules["json"] is json)}

    def patches(value):
        found = looks(value)
        hostile.patches_what_all_use(value)
        return found

    with make(patches, looks) as jail:
        results = ask(jail, "looks", "patches", "patches", "looks", "innocent", "patches")
    assert [r.parts["score"] for r in results] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(r.parts.get("json", 1.0) == 1.0 for r in results)


def test_what_a_reward_writes_reaches_neither_the_terminal_nor_a_file_of_the_run(tmp_path):
    """Whichever numbers of files it inherits: it holds none that it could write to."""
    theirs, ours = pty.openpty()
    with (tmp_path / "metrics.jsonl").open("w") as file:
        os.set_inheritable(ours, True)
        with make(hostile.scribbles_on_channels, hostile.speaks_to_the_terminal) as jail:
            ask(jail, hostile.scribbles_on_channels, hostile.speaks_to_the_terminal)
        assert file.tell() == os.fstat(file.fileno()).st_size == 0
    os.set_blocking(theirs, False)
    with pytest.raises(BlockingIOError):
        os.read(theirs, 1)
    os.close(theirs)
    os.close(ours)


def test_what_a_reward_printed_is_kept_as_text_that_commands_no_terminal():
    with make(hostile.speaks_to_the_terminal) as jail:
        result = ask(jail, hostile.speaks_to_the_terminal)[0]
    printed, _, traceback = result.output.partition("Traceback (most recent call last):\n")
    assert printed == "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202e\\rstep 9 reward 1.000\n\n"
    assert traceback
    assert all(line.isprintable() for line in traceback.splitlines())


def test_values_of_many_kinds_of_number_are_taken():
    import numpy as np

    kinds = {
        "yes": True,
        "whole": 3,
        "f32": np.float32(0.5),
        "i64": np.int64(-2),
        "truth": np.bool_(False),
        "array": np.array([2.5]),
        "tree": {"score": np.float16(1.5), "part": True},
    }
    with Jail({name: loading(loading(v)) for name, v in kinds.items()}) as jail:
        results = asyncio.run(jail.call_many([RewardCall(function=n, arguments="{}") for n in kinds]))
    expected = [1.0, 3.0, 0.5, -2.0, 0.0, 2.5]
    assert [r.parts for r in results] == [{"score": x} for x in expected] + [{"score": 1.5, "part": 1.0}]


def test_equal_keys_give_equal_random_numbers():
    with make(hostile.stochastic) as jail:
        twice = [RewardCall(function="stochastic", arguments='{"value": 0}', key=k) for k in (7, 8, 7)]
        a, b, c = asyncio.run(jail.call_many(twice))
    assert a.parts == c.parts
    assert a.parts["score"] != b.parts["score"]
    assert a.parts["numpy"] != b.parts["numpy"]


def test_a_worker_cannot_signal_the_processes_that_guard_it():
    def assassin(value):
        os.kill(-1, signal.SIGCONT)
        os.kill(os.getppid(), signal.SIGKILL)

    landlocked = subprocess.run(
        [sys.executable, "-c", "from whet.guard import sandbox; print(sandbox.scope_signals())"],
        capture_output=True,
        text=True,
        check=True,
    )
    if landlocked.stdout.strip() != "True":
        pytest.skip("this kernel cannot scope signals (Landlock ABI 6, Linux 6.12)")
    witness = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    witness.send_signal(signal.SIGSTOP)
    assert eventually(lambda: state_of(witness.pid) == "T")
    with make(assassin) as jail:
        nursery = nursery_of(jail)
        failed, after = ask(jail, assassin, "innocent")
        assert nursery_of(jail) == nursery
    assert failed.failure is not None
    assert failed.failure.detail.startswith("PermissionError")
    assert after.parts == {"score": 1.0}
    assert state_of(witness.pid) == "T"
    witness.kill()
    witness.wait()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def nursery_of(jail: Jail) -> int:
    found: list[int] = []

    def there() -> bool:
        found[:] = confine.children(jail.keeper)  # looked at once: it may be killed and replaced meanwhile
        return bool(found)

    assert eventually(there)
    return min(found)


def nap(value):
    time.sleep(0.02)
    return value


def test_a_nursery_that_is_killed_is_replaced_and_no_result_is_lost():
    with make(nap, workers=2, timeout_s=30.0) as jail:

        async def murder():
            under_way = asyncio.ensure_future(jail.call_many(calls(*[nap] * 40)))
            for _ in range(3):
                await asyncio.sleep(0.1)
                victim = nursery_of(jail)
                os.kill(victim, signal.SIGKILL)
                while nursery_of(jail) == victim:
                    await asyncio.sleep(0.005)
            return await under_way

        results = asyncio.run(murder())
        assert [r.parts for r in results] == [{"score": float(i)} for i in range(40)]
        os.kill(nursery_of(jail), signal.SIGKILL)  # while nothing is under way
        assert ask(jail, "innocent")[0].parts == {"score": 0.0}


def test_a_keeper_that_is_killed_ends_the_run_and_says_how_it_goes_on():
    with make(nap) as jail:
        assert ask(jail, nap)[0].parts == {"score": 0.0}
        os.kill(jail.keeper, signal.SIGKILL)
        asked = (ask(jail, nap) for _ in range(10))
        with pytest.raises(WhetError, match="guard the rewards ended; the same command resumes the run"):
            list(asked)


STOPPED = """
import os, signal, sys
from whet.guard import nursery
number = signal.Signals[sys.argv[1]]
signal.signal(number, signal.default_int_handler)
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), number))
try:
    nursery.fork(lambda: None)
except KeyboardInterrupt:
    print("stopped")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_within_a_fork_is_not_lost(name: str) -> None:
    """Python drops what is raised there: the run went on to its end."""
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, name], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "stopped\n", done.stderr


def test_a_stopped_nursery_is_noticed_and_replaced():
    with make(nap, patience_s=2.0) as jail:
        os.kill(nursery_of(jail), signal.SIGSTOP)
        assert [r.parts["score"] for r in ask(jail, nap, nap)] == [0.0, 1.0]


def test_a_stopped_keeper_that_is_needed_is_told_as_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.guard.jail.CONNECT_S", 0.5)
    with make(nap, patience_s=2.0) as jail:
        ask(jail, nap)  # or the nursery may be stopped before it dies with its keeper
        for pid in (jail.keeper, nursery_of(jail)):
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(
            WhetError, match=r"guard the rewards are stopped \(SIGSTOP\).*same command resumes"
        ):
            ask(jail, nap)


@pytest.mark.parametrize("both", [False, True])
def test_nobody_outlives_a_killed_run_though_the_keeper_was_stopped(both):
    ours, theirs = multiprocessing.Pipe()

    def run():
        jail = make(nap)
        ask(jail, nap)
        theirs.send((jail.keeper, nursery_of(jail)))
        time.sleep(100)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    keeper, nursery = ours.recv()
    stopped = (keeper, nursery)[: 1 + both]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    assert eventually(lambda: {state_of(pid) for pid in stopped} == {"T"})
    process.kill()
    process.join()
    assert eventually(lambda: {state(pid) for pid in (keeper, nursery)} <= {"", "Z"})


def test_nobody_outlives_a_killed_keeper_though_all_were_stopped():
    """Of the processes of a jail it is the one that would end them."""
    with make(nap) as jail:
        ask(jail, nap)
        nursery = nursery_of(jail)
        (worker,) = confine.children(nursery)
        for pid in (worker, nursery):
            os.kill(pid, signal.SIGSTOP)
        assert eventually(lambda: {state(pid) for pid in (worker, nursery)} == {"T"})
        os.kill(jail.keeper, signal.SIGKILL)
        assert eventually(lambda: {state(pid) for pid in (worker, nursery)} <= {"", "Z"})


def test_the_call_that_kills_the_nursery_whenever_it_runs_is_found(tmp_path):
    """A worker asks an accomplice outside to do the killing; on an older kernel it could do it itself."""
    wish = tmp_path / "wish"

    def killer(value):
        wish.write_text(str(os.getppid()))
        time.sleep(20)  # until it is done

    async def serve(jail, names):
        under_way = asyncio.ensure_future(jail.call_many(calls(*names)))
        while not under_way.done():
            await asyncio.sleep(0.005)
            if wish.exists() and (pid := wish.read_text()):
                wish.unlink()
                os.kill(int(pid), signal.SIGKILL)
        return under_way.result()

    with make(killer, nap, workers=2, timeout_s=30.0) as jail:
        results = asyncio.run(serve(jail, [nap, nap, nap, killer, nap, nap, killer, nap]))
    blamed = [i for i, r in enumerate(results) if r.failure]
    assert blamed == [3, 6]
    assert "guards" in results[3].failure.detail
    assert [r.parts["score"] for i, r in enumerate(results) if i not in blamed] == [
        0.0,
        1.0,
        2.0,
        4.0,
        5.0,
        7.0,
    ]


def test_calls_of_several_tasks_run_side_by_side_and_a_cancelled_one_harms_nobody():
    async def crowd(jail):
        lost = asyncio.ensure_future(jail.call_many(calls(*[nap] * 5)))
        await asyncio.sleep(0.03)
        lost.cancel()
        many = await asyncio.gather(*(jail.call_many(calls(nap, "innocent")) for _ in range(10)))
        return [[r.parts["score"] for r in results] for results in many]

    with make(nap, workers=2, timeout_s=30.0) as jail:
        assert asyncio.run(crowd(jail)) == [[0.0, 1.0]] * 10


def test_a_jail_serves_one_event_loop_after_another_even_after_a_cut():
    async def cut(jail):
        await asyncio.wait_for(jail.call_many(calls(hostile.sleeps, timeout_s=1.0)), 0.05)

    with make(hostile.sleeps) as jail:
        with pytest.raises(TimeoutError):
            asyncio.run(cut(jail))
        assert ask(jail, "innocent")[0].parts == {"score": 0.0}


def test_close_ends_everything_and_says_so():
    async def close_under_way(jail):
        under_way = asyncio.ensure_future(jail.call_many(calls(hostile.sleeps)))
        await asyncio.sleep(0.05)
        jail.close()
        jail.close()
        with pytest.raises(WhetError, match="closed"):
            await under_way

    others = below()
    jail = make(hostile.sleeps, timeout_s=100.0)
    before = below() - others
    assert before
    asyncio.run(close_under_way(jail))
    assert not below() & before
    with pytest.raises(WhetError, match="closed"):
        ask(jail, "innocent")


@pytest.mark.parametrize("levels", [20, 900, 100_000])
def test_an_answer_that_nests_is_none_before_the_run_reads_it(levels):
    body = b'{"parts": {"score": ' + b"[" * levels + b"]" * levels + b"}}"
    w: Any = SimpleNamespace(calls=[SimpleNamespace(number=1)])
    with pytest.raises(ValueError, match="nested too deeply"):
        nursery.read_reply(1, body, w)


def test_the_exits_of_what_rewards_have_left_behind_are_forgotten(tmp_path, monkeypatch):
    """They would become as many as the run is long, and the number of one of them another worker's."""
    monkeypatch.setattr(confine, "sweep", lambda spare, exits: exits.update({1 << 23: 0}))
    limits = nursery.WorkerLimits(workers=2, memory_mb=64, max_output_bytes=64)
    run, ours = socket.socketpair()
    guard = nursery.Nursery(run, [], limits, str(tmp_path))
    workers = [
        nursery.Worker(
            (1 << 22) + n, 0, socket.socket(), OutputPipe(os.open(os.devnull, os.O_RDONLY), 64, b"mark")
        )
        for n in range(3)
    ]
    guard.workers, guard.exits = list(workers), {w.pid: -9 for w in workers}
    guard.end(workers[0])
    assert guard.exits == {w.pid: -9 for w in workers[1:]}
    for w in workers[1:]:
        guard.end(w)
    assert guard.exits == {}
    guard.selector.close()
    run.close()
    ours.close()


def test_a_system_that_cannot_fork_is_refused(monkeypatch):
    monkeypatch.delattr(os, "fork")
    with pytest.raises(ConfigError, match="this system has no fork; use Linux, macOS or WSL"):
        make()


def test_an_unknown_function_is_refused():
    with make() as jail, pytest.raises(WhetError, match="no function 'nobody'; it has innocent"):
        ask(jail, "nobody")


def load_raises():
    raise RuntimeError("cannot import this")


def load_exits():
    os._exit(7)


@pytest.mark.parametrize(
    ("loader", "match"),
    [
        (load_raises, "'mine'.*RuntimeError: cannot import this"),
        (load_exits, "^reward 'mine' ended the process that loads it"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_a_config_error(loader, match):
    with pytest.raises(ConfigError, match=match):
        Jail({"mine": loader})


ORPHAN_SCRIPT = """
import asyncio, os, sys, time
sys.path.insert(0, {tests!r})
import hostile
from whet.guard.jail import Jail, RewardCall

def main():
    jail = Jail({{f.__name__: (lambda f=f: f) for f in (hostile.sleeps, linger)}}, timeout_s=100.0)
    if os.fork() == 0:
        time.sleep(100)   # a child of the run that lives on, with copies of its sockets
        os._exit(0)
    calls = [RewardCall(function=name, arguments='{{"value": 1}}') for name in ("linger", "sleeps")]
    asyncio.run(jail.call_many(calls))

def linger(value):
    hostile.leaves_a_daemon(value)
    print(1)
    time.sleep(100)

main()
"""


def test_kill_9_of_the_run_leaves_no_process(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(ORPHAN_SCRIPT.format(tests=str(Path(__file__).parent)))
    run = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    try:
        assert eventually(daemons)
        family = confine.descendants(run.pid)
        assert len(family) >= 4
        run.kill()
        run.wait()

        def jailed() -> set[int]:
            return {pid for pid in family if b"\0" in _cmdline(pid) and _parent_group(pid) != run.pid}

        assert eventually(lambda: not jailed())
        assert any(_parent_group(pid) == run.pid for pid in family), "the child of the run is still there"
    finally:
        os.killpg(run.pid, signal.SIGKILL)


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _parent_group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return -1


def test_failures_read_well():
    assert str(Failure("raised", "ValueError: x (a.py:1)")) == "raised ValueError: x (a.py:1)"
    assert str(Failure("timeout", "no result in 3 s")) == "timeout: no result in 3 s"


def test_garbage_of_the_run_is_none_of_the_processes_that_are_forked_from_it() -> None:
    """Its finalizers wait for threads that a fork does not have: those of torch's process groups, for one."""
    run = os.getpid()

    class Group:
        own: object

        def __del__(self) -> None:
            if os.getpid() != run:
                time.sleep(60)

    gc.collect()
    gc.disable()
    try:
        group = Group()
        group.own = group
        del group  # garbage that nobody has collected
        pid = nursery.fork(lambda: gc.collect() and None)
    finally:
        gc.enable()
    ended, deadline = (0, 0), time.monotonic() + 30
    while ended[0] == 0 and time.monotonic() < deadline:
        ended = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert ended == (pid, 0)


def test_a_fork_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper and its nursery are there; for a worker there is no memory, until there is some."""
    real, depth, room = os.fork, [0], tmp_path / "room"

    def fork() -> int:
        if depth[0] == 2 and not room.exists():
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        pid = real()
        depth[0] += not pid
        return pid

    monkeypatch.setattr(os, "fork", fork)
    with make(workers=2) as jail:
        for result in ask(jail, "innocent", "innocent", "innocent"):
            assert result.failure == Failure(
                "crashed", "no process can be started for it: [Errno 12] Cannot allocate memory"
            )
        room.touch()
        assert [r.failure for r in ask(jail, "innocent", "innocent")] == [None, None]


def leaves_files(value: float) -> float:
    """What it leaves in the folder for temporary files is named in its output."""
    _, path = tempfile.mkstemp()
    by_a_program = subprocess.run(["mktemp"], capture_output=True, text=True, check=True)
    print(path, by_a_program.stdout.strip())
    return 1.0


def leaves_files_and_ends(value: float) -> float:
    _, path = tempfile.mkstemp()
    print(path, flush=True)
    os._exit(3)


def test_temporary_files_are_removed_with_their_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with make(leaves_files, leaves_files_and_ends) as jail:
        ended, alive = ask(jail, leaves_files_and_ends, leaves_files)
        (gone,), left = (Path(line) for line in ended.output.split()), alive.output.split()
        assert gone.is_relative_to(tmp_path)
        assert eventually(lambda: not gone.exists())
        assert len(left) == 2
        assert all(Path(file).is_relative_to(tmp_path) and Path(file).exists() for file in left)
    assert eventually(lambda: not any(tmp_path.iterdir()))


@pytest.mark.parametrize("whose", ["the worker's", "all"])
def test_who_cleans_up_temporary_folders_breaks_no_reward(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with make(leaves_files) as jail:
        for _ in range(3):
            (done,) = ask(jail, leaves_files)
            assert done.failure is None, done
            own = Path(done.output.split()[0]).parent
            shutil.rmtree(own if whose == "the worker's" else own.parent)
    assert eventually(lambda: not any(tmp_path.iterdir()))


def test_no_folder_stays_where_the_run_ends_between_two_forkservers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    real, sent = socket.send_fds, []

    def send_fds(*given: Any) -> int:
        if sent:
            raise BrokenPipeError
        sent.append(given)
        return real(*given)

    monkeypatch.setattr(socket, "send_fds", send_fds)
    with make() as jail:
        assert any(tmp_path.iterdir())
        os.kill(nursery_of(jail), signal.SIGKILL)
        assert eventually(lambda: state(jail.keeper) in ("", "Z"))
    assert not any(tmp_path.iterdir())


def writes_past_python(value: float) -> float:
    """By the numbers of the files, and by a program."""
    secret = os.environ["SERVICE_TOKEN"]
    os.write(1, f"one {secret}\n".encode())
    os.write(2, f"two {secret}\n".encode())
    subprocess.run(["sh", "-c", "echo three $SERVICE_TOKEN; echo four $SERVICE_TOKEN >&2"], check=True)
    return 1.0


def test_what_is_written_past_python_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "hunter2-hunter2")
    secrets.learn_environment()
    with make(writes_past_python) as jail:
        (result,) = ask(jail, writes_past_python)
    struck = "<redacted:SERVICE_TOKEN>"
    assert result.output.split() == ["one", struck, "two", struck, "three", struck, "four", struck]


def test_a_run_that_ends_before_it_gets_a_channel_leaves_no_forkserver() -> None:
    """Its file of stacks would stay in the run directory, too."""
    run, control = socket.socketpair()
    limits = nursery.WorkerLimits(workers=1, memory_mb=400, max_output_bytes=1000)

    def gone(*_: Any) -> None:
        raise BrokenPipeError

    def keeper() -> None:
        socket.send_fds = gone  # type: ignore[assignment]  # in the fork alone
        with contextlib.suppress(BrokenPipeError):
            nursery.keep(control, os.getppid(), loaders={}, limits=limits, prepare=lambda: None)
        assert not confine.descendants(os.getpid())

    assert os.waitpid(nursery.fork(keeper), 0)[1] == 0
    run.close()
    control.close()
