"""Explorers of a run that die or hang are replaced; over lines of this process, so nothing of Ray is started."""

from __future__ import annotations

import asyncio
import logging
import pickle
import re
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from whet.cluster import explorer, explorers
from whet.cluster.explorers import Crew, beside, patience_of
from whet.config.load import Loaded, load
from whet.guard.watch import START, Watch
from whet.types import WhetError

TREE: dict[str, Any] = {
    "mode": "train",
    "model": {"scratch": {"hidden_size": 16}},
    "tokenizer": {"build": "chars"},
    "data": {"train": [{"rows": [{"prompt": "a", "answer": "b"}]}]},
    "rewards": {"a": {"function": "format", "arguments": {"pattern": "a"}}},
    "rollout": {"schedule": "async", "timeout_s": 30.0},
    "sync": {"timeout_s": 40.0},
    "buffer": {"url": "sqlite:///a.db"},
    "cluster": {"explorers": 1},
}
Play = Callable[[Connection, Loaded], object]


class Line:
    """An explorer that a function plays, in a thread."""

    address, gpu = "here", 0

    def __init__(self, play: Play) -> None:
        self.connection, theirs = Pipe()
        self.killed = False
        threading.Thread(target=self._play, args=(play, theirs), daemon=True).start()

    def _play(self, play: Play, theirs: Connection) -> None:
        play(theirs, pickle.loads(theirs.recv_bytes()))

    def died(self) -> str | None:
        return "killed by SIGKILL"

    def state(self) -> str:
        return "T"

    def dump(self) -> None: ...

    def stack(self) -> str:
        return "File here, in never_comes_back"

    def hang_up(self) -> None:
        self.connection.close()

    def gone(self) -> bool:
        return True

    def kill(self) -> None:
        self.killed = True


class Lines:
    host, near = "here", True

    def __init__(self, *plays: Play) -> None:
        self.plays = list(plays)
        self.ever = [Line(self.plays.pop(0))]

    @property
    def lines(self) -> list[Line]:
        return self.ever[-1:]

    def carried(self, path: Path) -> AbstractContextManager[list[str]]:
        raise NotImplementedError

    def again(self, number: int) -> Line:
        self.ever[-1].hang_up()
        self.ever[-1].kill()
        self.ever.append(Line(self.plays.pop(0)))
        return self.ever[-1]

    def close(self) -> None: ...


def says(*what: object) -> Play:
    """It says this, then nothing more, and keeps the line."""

    def play(theirs: Connection, loaded: Loaded) -> None:
        for said in what:
            theirs.send_bytes(pickle.dumps(said))
        kept.append(theirs)

    return play


kept: list[Connection] = []
DONE = says(("beat", ("exploring", 0.1)), ("done", None))


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (
            says(("beat", ("exploring", 1.0))),
            r"it is stopped \(SIGSTOP\); no heartbeat for 0.3 s; .*in: exploring",
        ),
        (says(), r"it is stopped .*no heartbeat for 0.3 s; the last one was sent in: its start"),
        (
            says(("beat", ("exploring", 99.0)), ("beat", ("taking weights", 100.5))),
            r"no progress for 100 s, in: taking weights",
        ),
        (says(("failed", "no trainer")), "no trainer"),
        (lambda theirs, loaded: theirs.close(), "killed by SIGKILL"),
    ],
)
def test_an_explorer_that_hangs_is_replaced_and_told(
    first: Play, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One that only loads its model may take as long as it says that it lives."""
    lines = Lines(first, says(("beat", (START, 999.0)), ("done", None)))
    with caplog.at_level(logging.INFO):
        crew = Crew(load(None, (), TREE), lines, restarts=1, patience_s=100.0, silence_s=0.3)
        for watching in crew.watching:
            watching.join(20)
    assert [line.killed for line in lines.ever] == [True, False]
    lost = [r.getMessage() for r in caplog.records if "explorer-0 lost" in r.getMessage()]
    assert len(lost) == 1
    assert re.search(told, lost[0]), lost
    assert ("never_comes_back" in lost[0]) == bool(re.search("no (heartbeat|progress) for", told)), (
        "with its stack"
    )
    assert "explorer-0 is exploring again" in caplog.text
    assert "explorer-0 ended with the trainer" in caplog.text
    assert not crew.lost.done()


def test_when_no_explorer_is_left_the_run_ends_and_nobody_lives_on() -> None:
    lines = Lines(says(), says())
    crew = Crew(load(None, (), TREE), lines, restarts=1, patience_s=100.0, silence_s=0.1)
    with pytest.raises(
        WhetError, match=r"no explorer is left.*cluster.restarts=1 times; .*no heartbeat.*start$"
    ):
        crew.lost.result(20)
    assert [line.killed for line in lines.ever] == [True, True]


def test_an_explorer_that_is_lost_after_the_end_of_the_run_is_told_in_its_thread_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who waited for the run no longer waits for the explorers; the thread that watches one ended in a traceback."""
    monkeypatch.setattr(explorers, "SETTLE_S", 0.0)
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    crew = Crew(load(None, (), TREE), Lines(says()), restarts=0, patience_s=100.0, silence_s=0.3)

    async def main() -> None:
        pass

    asyncio.run(beside(crew, main()))
    for watching in crew.watching:
        watching.join(20)
    assert isinstance(crew.lost.exception(0), WhetError)
    assert not failed


def test_patience_follows_from_the_config() -> None:
    assert patience_of(load(None, (), TREE).config) == 100.0
    assert patience_of(load(None, ("rollout.timeout_s=400",), TREE).config) == 460.0


def test_an_explorer_says_what_it_does_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer, "BEAT_S", 0.01)
    ours, theirs = Pipe()
    gone_on = threading.Event()

    def explore(loaded: str, *, watched: Callable[[Watch], object]) -> None:
        assert loaded == "config"
        with Watch() as watch:
            watched(watch)
            watch.beat("exploring")
            assert gone_on.wait(20)
        raise WhetError("no trainer")

    living = threading.Thread(target=explorer.serve, args=(theirs, explore), daemon=True)
    living.start()
    ours.send_bytes(pickle.dumps("config"))
    until, said = time.monotonic() + 60, ("beat", (START, 0.0))
    while (said[1][0] == START or said[1][1] < 0.05) and time.monotonic() < until:
        said = pickle.loads(ours.recv_bytes())
    assert said[0] == "beat"
    assert said[1][0] == "exploring"
    assert said[1][1] >= 0.05
    gone_on.set()
    while (said := pickle.loads(ours.recv_bytes()))[0] == "beat":
        pass
    assert said == ("failed", "no trainer")
    ours.close()
    living.join(20)
    assert not living.is_alive()
