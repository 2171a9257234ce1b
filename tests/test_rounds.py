"""A fixed schedule over processes: explorers and trainer apart do, bit for bit, what one process does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.parquet as pq
import pytest

import whet
from test_apart import Processes, tree
from whet.api import run_training
from whet.buffer.buffer import Buffer
from whet.buffer.queue import ExplorerQueue
from whet.buffer.rounds import Rounds
from whet.buffer.stores import Scored, Store, open_store
from whet.config.load import load
from whet.disaggregated import lease
from whet.guard.ledger import Ledger
from whet.replay.run import Replayed, replay
from whet.replay.steps import BEGINNING, read
from whet.types import Group, Rollout, Stopped, Task, WhetError

STEPS = 12
TASKS = [Task(uid=uid, source="a", prompt=f"t{uid}") for uid in range(20)]


def group(uid: int, *, version: int = 0, error: str | None = None) -> Group:
    task = TASKS[uid]
    given: dict[str, Any] = {
        "mask": [1],
        "logprobs": [-0.5],
        "sample_logprobs": [-0.5],
        "versions": [version],
        "finish_reason": "stop",
    }
    return Group(
        task,
        tuple(Rollout.one_strand(task=task, index=i, token_ids=[5], error=error, **given) for i in (0, 1)),
    )


def queue(folder: Path) -> Store:
    return open_store(f"sqlite:///{folder}/q.db", queue="a/main", order="arrival")


def ask(store: Store, owner: str, at_most: int, version: int) -> list[int]:
    return store.reserve(owner, at_most, capacity=1, rollouts=2, lease_s=60.0, version=version)


def explorer(store: Store, version: Callable[[], int]) -> ExplorerQueue:
    """It would reject every group, were that its to do."""
    size = {"groups_per_step": 2, "group_size": 2, "max_staleness": 0, "spare": 0}
    return ExplorerQueue(
        store, owner="one", lease_s=60.0, reject=lambda _: "uniform", version=version, **size
    )


def test_a_round_is_for_who_has_its_weights_and_is_shared(tmp_path: Path) -> None:
    store = queue(tmp_path)
    assert ask(store, "one", 9, 0) == [], "no round is open"
    assert ask(store, "two", 9, 0) == []
    store.begin_round(0, 6, version=0)
    assert ask(store, "one", 9, 1) == [], "other weights"
    assert ask(store, "one", 9, 0) == [0, 1, 2], "its share"
    assert ask(store, "one", 9, 0) == []
    assert ask(store, "two", 2, 0) == [3, 4]
    store.put([Scored(uid, group(uid)) for uid in (0, 1, 2)])
    assert ask(store, "one", 9, 0) == [5], "who is done helps"
    assert store.release("two") == 2
    assert ask(store, "one", 9, 0) == [3, 4], "who is alone has it all"
    store.check()


def test_a_round_is_delivered_whole_and_again_after_a_kill(tmp_path: Path) -> None:
    """A trainer that went back to its checkpoint gets the same rounds, and begins none that is there already."""
    store = queue(tmp_path)
    rounds = Rounds(store)

    async def played(end: Rounds, uids: range, version: int) -> list[int]:
        got = await asyncio.wait_for(end.play([TASKS[u] for u in uids], version), 20)
        return [g.task.uid for g in got]

    async def both(uids: range, version: int) -> list[int]:
        asking = asyncio.ensure_future(played(rounds, uids, version))
        while not (mine := ask(store, "one", 9, version)):
            await asyncio.sleep(0.01)
        for uid in reversed(mine):
            failed = "timeout: 3 s" if uid == 1 else None
            store.put([Scored(uid, group(uid, version=version, error=failed))])
        return await asking

    assert asyncio.run(both(range(3), 0)) == [0, 1, 2], "failed ones, too, in the order of their tasks"
    state = rounds.state()
    assert asyncio.run(both(range(3, 5), 1)) == [3, 4]
    assert store.ledger() == {"asked": 10, "delivered": 10, "pending": 0}
    rounds = Rounds(store)
    rounds.restore(state)
    assert asyncio.run(played(rounds, range(3, 5), 1)) == [3, 4], "from the store"
    assert ask(store, "one", 9, 1) == []
    assert asyncio.run(both(range(5, 6), 2)) == [5]
    for _ in range(2):
        state = rounds.state()
    rounds = Rounds(store)
    rounds.restore(state | {"count": 1})
    with pytest.raises(WhetError, match="resume from that checkpoint"):
        asyncio.run(played(rounds, range(3, 5), 1))


def test_what_another_run_left_in_the_store_is_refused(tmp_path: Path) -> None:
    store = queue(tmp_path)
    store.begin_round(0, 2, version=7)
    store.put([Scored(uid, group(uid, version=7)) for uid in ask(store, "one", 9, 7)])
    with pytest.raises(
        WhetError, match=r"tasks 0 to 1 were requested with weights version 0.*of versions \[7\]"
    ):
        asyncio.run(Rounds(store).play(TASKS[:2], 0))


def test_nobody_waits_for_a_round_once_a_stop_is_asked(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        asyncio.run(Rounds(queue(tmp_path)).play(TASKS[:2], 0, stopping=lambda: True))


def test_a_store_that_was_emptied_goes_on_where_the_run_is(tmp_path: Path) -> None:
    store = queue(tmp_path)
    store.begin_round(40, 42, version=9)
    assert ask(store, "one", 9, 9) == [40, 41]


def test_a_store_with_rounds_of_another_config_is_refused(tmp_path: Path) -> None:
    store = queue(tmp_path)
    Rounds(store).claim({"seed": 1})
    Rounds(store).claim({"seed": 1})
    with pytest.raises(WhetError, match="rounds of a run with another config"):
        Rounds(store).claim({"seed": 2})


def test_other_data_are_found(tmp_path: Path) -> None:
    store = queue(tmp_path)
    store.begin_round(0, 2, version=0)
    ask(store, "one", 9, 0)
    other = group(1)
    task = Task(uid=1, source="a", prompt="t1", token_ids=(9,))
    other = Group(task, tuple(replace(r, task=task) for r in other.rollouts))
    store.put([Scored(0, group(0)), Scored(1, other)])
    with pytest.raises(WhetError, match="their data differs from the trainer's"):
        asyncio.run(Rounds(store).play(TASKS[:2], 0))


def test_tasks_that_are_asked_again_are_progress(tmp_path: Path) -> None:
    store = queue(tmp_path)
    store.begin_round(0, 2, version=0)
    ask(store, "one", 9, 0)
    before = store.progress()
    assert store.progress() == before
    store.renew("one", lease_s=60.0)
    assert store.progress() == before, "to live is none"
    store.release("one")
    ask(store, "two", 9, 0)
    assert store.progress() != before


def test_episodes_of_an_explorer_that_begin_anew_are_progress(tmp_path: Path) -> None:
    """A host of their environment was lost: they have all of their time again, and so has a trainer's wait for them."""
    store = queue(tmp_path)
    end = explorer(store, lambda: 0)
    ask(store, end.owner, 9, 0)
    before = store.progress()
    end.renew(0)
    assert store.progress() == before, "to live is none"
    end.renew(2)
    assert (after := store.progress()) != before
    end.renew(2)
    assert store.progress() == after, "none has begun anew since"
    end.renew(3)
    assert store.progress() != after


def test_an_explorer_tells_them_with_its_lease() -> None:
    told: list[int] = []

    async def story() -> None:
        two, end = asyncio.Event(), SimpleNamespace(lease_s=0.0, fail=pytest.fail)
        loop = asyncio.get_running_loop()

        def renew(restarts: int) -> None:
            told.append(restarts)
            if restarts == 2:
                loop.call_soon_threadsafe(two.set)

        end.renew = renew
        async with lease(cast(Any, end), lambda: len(told)):
            await asyncio.wait_for(two.wait(), 60)

    asyncio.run(story())
    assert told[:3] == [0, 1, 2]


def test_an_explorer_that_leaves_reserves_nothing_more(tmp_path: Path) -> None:
    store = queue(tmp_path)
    end = explorer(store, lambda: 0)
    store.begin_round(0, 2, version=0)
    end.close()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(end.room(2), 0.3))
    assert store.ledger()["pending"] == 0


def test_what_was_booked_for_the_coming_step_keeps_a_stop_waiting() -> None:
    """The step that it belongs to is finished first."""
    buffer = Buffer(
        groups_per_step=1, group_size=2, max_staleness=0, reject=lambda _: "uniform", ledger=Ledger()
    )

    async def rejected() -> None:
        assert buffer.whole
        await buffer.room(1)
        await buffer.put([group(0)], asked=1)

    asyncio.run(rejected())
    assert not buffer.whole
    buffer.leave()
    assert buffer.whole


def test_ctrl_c_in_the_first_round_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tree(tmp_path, mode="train", **sections(ahead=0, every=1))
    gathered = Store.gather

    def interrupted(store: Store, *args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return gathered(store, *args, **kwargs)

    monkeypatch.setattr(Store, "gather", interrupted)
    for _ in range(2):
        assert run_training(load(None, (), given)) == 130
    assert [p.name for p in sorted((tmp_path / "run/checkpoints").iterdir())] == ["0-main-000000"]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0], "evaluated once"


def test_explorers_of_rounds_hand_over_what_they_played(tmp_path: Path) -> None:
    """Nothing is sorted out by an explorer: the trainer does that, as if it had played itself."""
    store, version = queue(tmp_path), [0]
    end = explorer(store, lambda: version[0])

    async def explored() -> list[Group]:
        asking = asyncio.ensure_future(end.room(2))
        store.begin_round(0, 2, version=1)
        await asyncio.sleep(0.1)
        assert not asking.done(), "it has different weights"
        version[0] = 1
        tasks = end.draw(await asking, TASKS.__getitem__)
        await end.put([group(t.uid, version=1) for t in tasks], asked=len(tasks))
        return await Rounds(store).play(TASKS[:2], 1)

    assert [g.task.uid for g in asyncio.run(explored())] == [0, 1]


def outcome(run: Path) -> dict[str, Any]:
    """What a run makes: its numbers, its rollouts, its model."""
    rollouts = [pq.read_table(path).to_pylist() for path in sorted((run / "rollouts").glob("main-*"))]
    return {
        "metrics": (run / "metrics.jsonl").read_bytes(),
        "rollouts": rollouts,
        "model": (run / "export/main/model.safetensors").read_bytes(),
    }


def replayed(run: Path, step: int) -> Replayed:
    """A step of a run with separate explorers, computed again by one process."""
    recorded = read(run)
    return replay(recorded, recorded.step(0, step))


def sections(*, ahead: int, every: int) -> dict[str, Any]:
    sampling = {"group_size": 4, "sampling": {"max_tokens": 8}}
    return {
        "rollout": sampling | {"max_staleness": ahead, "sync_interval": every},
        "train": {"steps": STEPS, "tasks_per_step": 4, "optimizer": {"lr": 1e-2}},
        "checkpoint": {"interval": 3},
        "eval": {"interval": 4, "at_start": True},
        "track": {"trackers": ["jsonl"], "rollouts_interval": 1},
    }


def in_one_process(folder: Path, **given: Any) -> dict[str, Any]:
    whet.train(
        **{key: value for key, value in tree(folder, **given).items() if key not in ("buffer", "sync")}
    )
    return outcome(folder / "run")


@pytest.mark.sweep
def test_on_policy_apart_is_the_run_of_one_process(tmp_path: Path) -> None:
    given = sections(ahead=0, every=1)
    expected = in_one_process(tmp_path / "one", **given)
    apart = Processes(tmp_path, **given)
    try:
        apart.start("train")
        apart.start("one")
        assert [apart.ends(name) for name in ("train", "one")] == [0, 0]
    finally:
        apart.close()
    assert outcome(tmp_path / "run") == expected
    for step, start in ((11, "0-main-000009"), (2, BEGINNING)):
        found = replayed(tmp_path / "run", step)
        assert found.step.start is not None
        assert (found.step.start.name, found.equal) == (start, True), found.compared
        assert {one.field.partition("/")[0] for one in found.compared} == {"rollouts", "metrics"}


def test_ahead_and_apart_and_killed_is_the_run_of_one_process(tmp_path: Path) -> None:
    """To the bit, whoever was faster; with all killed, an explorer killed, and a trainer that was asked to stop."""
    given = sections(ahead=2, every=2)
    expected = in_one_process(tmp_path / "one", **given)
    apart = Processes(tmp_path, **given)
    try:
        for name in ("train", "one", "two"):
            apart.start(name)
        apart.until(lambda: apart.steps >= 4)
        for name in ("train", "one", "two"):  # the checkpoint is of step 3, between two weight syncs
            apart.kill(name)
        for name in ("train", "one", "two"):
            apart.start(name)
        apart.until(lambda: apart.steps >= 6)
        apart.kill("one")
        apart.start("one")
        apart.until(lambda: apart.steps >= 8)
        apart.running["train"].send_signal(signal.SIGINT)
        assert apart.ends("train") in (130, 0)
        apart.start("train")
        assert [apart.ends(name) for name in ("train", "one", "two")] == [0, 0, 0]
    finally:
        apart.close()
    assert outcome(tmp_path / "run") == expected
    store = open_store(f"sqlite:///{tmp_path}/groups.db", queue="apart/main", order="arrival")
    store.check()
    ledger = store.ledger()
    assert ledger["asked"] == ledger["delivered"]
    store.close()
    for step in (5, 11):  # from the beginning, and from a checkpoint between two weight syncs
        found = replayed(tmp_path / "run", step)
        assert found.equal, found.compared
