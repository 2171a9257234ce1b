"""The network between an explorer and its store is cut: between two network namespaces, as between two machines."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from postgres import end_with_parent, server
from whet.buffer.postgres import postgres_log
from whet.buffer.stores import open_store

WORKER = Path(__file__).with_name("store_worker.py")
WITHIN_S = 120.0
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def until(reached: Callable[[], object], what: str) -> None:
    end = time.monotonic() + WITHIN_S
    while not reached():
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.02)


class Link:
    """Another machine, so to speak: `there` begins a command that runs on it; a cable leads to `host` on this one."""

    def __init__(self, holder: int) -> None:
        net = f"10.213.{holder % 250}"
        self.host, self.cable = f"{net}.1", f"whet{holder % 100000}a"
        self.there = ["nsenter", "-t", str(holder), "-n"]
        end = f"whet{holder % 100000}b"
        self._ip("link", "add", self.cable, "type", "veth", "peer", "name", end, "netns", str(holder))
        self._ip("addr", "add", f"{self.host}/30", "dev", self.cable)
        self._ip("link", "set", self.cable, "up")
        for words in (("addr", "add", f"{net}.2/30", "dev", end), ("link", "set", end, "up")):
            self._ip(*words, there=True)
        self.end = end

    def _ip(self, *words: str, there: bool = False) -> None:
        command = [*(self.there if there else []), "ip", *words]
        subprocess.run(command, check=True, capture_output=True)

    def cut(self) -> None:
        self._ip("link", "set", self.end, "down", there=True)

    def mend(self) -> None:
        self._ip("link", "set", self.end, "up", there=True)


@contextmanager
def another_machine() -> Iterator[Link]:
    """Its end is the end of one process; skips the test where there can be none."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        pytest.skip("network namespaces with a cable between them need root, ip, nsenter and unshare")
    holder = subprocess.Popen(
        ["unshare", "-n", "sh", "-c", "echo up; exec sleep 600"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=end_with_parent,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != b"up\n":
            pytest.skip("this machine allows no network namespace")
        try:
            link = Link(holder.pid)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine allows no cable between network namespaces: {error.stderr.decode()}")
        yield link
    finally:
        holder.kill()
        holder.wait()


def test_an_explorer_that_is_cut_off_ends_with_a_word_and_nothing_is_lost(tmp_path: Path) -> None:
    """One explorer beside the store, one across the cable. The cable is cut while both work, and later mended.

    The one that is cut off ends by itself and says whom it heard no more of; the trainer goes on with the other.
    Started again it goes on. Every group is trained on once, and the account of the store balances.
    """
    steps = 60
    running: dict[str, subprocess.Popen[bytes]] = {}
    with another_machine() as link, server(also=link.host) as near:
        patience = "tcp_user_timeout=1500&keepalives_idle=1&keepalives_interval=1&keepalives_count=2&connect_timeout=3"
        patience += "&options=-c%20idle_in_transaction_session_timeout%3D1500"
        far = near.replace("127.0.0.1", link.host) + f"?{patience}"

        def start(name: str, *command: str) -> None:
            with (tmp_path / name).open("ab") as said:
                running[name] = subprocess.Popen(command, stdout=said, stderr=said, env=ENV)

        def said(name: str) -> str:
            return (tmp_path / name).read_text()

        try:
            start("far", *link.there, sys.executable, str(WORKER), "far", far, "q", "0")
            store = open_store(near, queue="q", order="arrival")
            until(
                lambda: store.ledger().get("asked", 0) >= 8 or running["far"].poll(),
                "work of the far one alone",
            )
            assert running["far"].poll() is None, said("far")
            start("near", sys.executable, str(WORKER), "near", near, "q", "0")
            start("train", sys.executable, str(WORKER), "trainer", near, "q", str(steps))
            until(lambda: said("train").count("\n") >= 5, "five steps")
            link.cut()
            assert running.pop("far").wait(WITHIN_S) == 1
            assert "WhetError: the store postgresql://" in said("far")
            before = said("train").count("\n")
            until(lambda: said("train").count("\n") >= min(before + 5, steps), "five more steps without it")
            link.mend()
            start("far", *link.there, sys.executable, str(WORKER), "far", far, "q", "0")
            assert running.pop("train").wait(WITHIN_S) == 0, said("train")
            assert [running.pop(name).wait(WITHIN_S) for name in ("far", "near")] == [0, 0], said("far")
        finally:
            for process in running.values():
                process.kill()
                process.wait()
        store.check()
        assert store.ledger()["trained"] == steps * 4 * 2
        store.close()
    trained = [line.partition(" ") for line in said("train").splitlines()]
    assert [int(step) for step, _, _ in trained] == list(range(1, steps + 1))
    uids = [int(uid) for _, _, them in trained for uid in them.strip("[]").split(",")]
    assert len(uids) == len(set(uids)) == steps * 4


HOLDS = """
import sys, time
from whet.buffer.postgres import postgres_log

with postgres_log(sys.argv[1], queue="q").turn():
    print("in", flush=True)
    time.sleep(600)
"""


def holding(url: str) -> subprocess.Popen[bytes]:
    """A process in the middle of a turn. One that stands still on its way there loses the turn, and ends."""
    for _ in range(20):
        holder = subprocess.Popen([sys.executable, "-c", HOLDS, url], stdout=subprocess.PIPE, env=ENV)
        assert holder.stdout is not None
        if holder.stdout.readline() == b"in\n":
            return holder
        holder.communicate()
    raise AssertionError("no process holds the queue")


def test_one_that_is_cut_off_in_the_middle_of_a_turn_does_not_hold_the_queue() -> None:
    """It holds the queue's lock, and the server hears no more of it; as of a process that is stopped."""
    with server() as url:
        quick = f"{url}?options=-c%20idle_in_transaction_session_timeout%3D1000"
        holder = holding(quick)
        with holder:
            try:
                holder.send_signal(signal.SIGSTOP)
                store = open_store(url, queue="q", order="arrival")
                assert store.reserve("near", 2, capacity=4, rollouts=1, lease_s=60) == [0, 1]
                store.close()
            finally:
                holder.kill()
        log = postgres_log(url, queue="q")
        with log.turn():
            assert log.db is not None
            assert log.db.execute("show idle_in_transaction_session_timeout").fetchone() == ("30s",)
        log.close()
