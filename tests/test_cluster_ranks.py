"""Trainer ranks, reward hosts and explorers in a cluster: two nodes of Ray on this machine, started once.

The driver stands on the first node, which has room for nothing, so all that works for it is on another one: it shares
no file with it, as far as it knows.
"""

from __future__ import annotations

import copy
import filecmp
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster

import whet
from far_losses import killed, sleepy
from forked import Started
from ray_workers import interpreter
from test_apart import tree as apart_tree
from test_driver_memory import MATRIX_BYTES, trained
from test_lanes import picture
from test_train_torch import CUT, pg_loss, weighted
from tiny import tiny_model
from whet.cluster.nodes import connect, disconnect
from whet.cluster.parts import rank_lines
from whet.cluster.staging import RayStaging
from whet.config.load import load
from whet.config.schema import OptimizerConfig
from whet.guard import stacks
from whet.guard.processes import process
from whet.models.mesh import Dims
from whet.sync.exchange import Publisher, shared
from whet.sync.files import Files
from whet.sync.transport import split
from whet.track.files import holder
from whet.track.timeline import Timeline
from whet.training.ranks import RankGroup, Ranks
from whet.types import WhetError

TESTS = Path(__file__).parent
TWO = Dims(dp_replicate=2)
LEARNING: dict[str, Any] = {"optimizer": OptimizerConfig(name="sgd", lr=0.02), "total_steps": 4, "seed": 3}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        interpreter(tmp_path_factory.mktemp("python")) as python,
        two_nodes(100 << 20, str(python)) as address,
    ):
        connect(address, None)
        yield address


@contextmanager
def two_nodes(store: int, python: str = sys.executable) -> Iterator[str]:
    """Each has an object store of so many bytes. python: their interpreter."""
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": store}
    with ExitStack() as ends:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", python)
            ground = Cluster(initialize_head=True, head_node_args=head)
            ends.callback(ground.shutdown)
            ground.add_node(num_cpus=4, object_store_memory=store)
        ends.callback(disconnect)
        yield str(ground.address)


def lines(address: str, model: Any) -> Any:
    values = {
        "model": {"scratch": {"hidden_size": 16}},
        "train": {"parallel": {"dp_replicate": 2}},
        "cluster": {"ranks": True, "address": address, "start_timeout_s": 300},
        "data": {"train": [{"rows": [{"prompt": "a", "answer": "b"}]}]},
        "rewards": {"a": {"function": "format", "arguments": {"pattern": "a"}}},
        "tokenizer": {"build": "chars"},
    }
    return rank_lines(load(None, (), values).config, model)


def alive(who: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [each for each in who if process(each[0]) == each]


def members(ranks: Ranks) -> list[tuple[int, int]]:
    """Processes of the ranks, and of the actors beside them."""
    return [who for line in ranks.lines.lines for who in (line.where.process, line.where.actor)]  # type: ignore[attr-defined]


def until(reached: Callable[[], object], what: str, within_s: float = 120.0) -> None:
    end = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.1)


# ---------------------------------------------------------------- ranks


def test_far_ranks_are_local_ranks_to_the_bit(address: str, tmp_path: Path) -> None:
    """A step, the log-probs, the files they save and read, weights for explorers. Then one is killed: it is named, and
    all end."""
    model = tiny_model()
    here = Ranks(TWO, timeout_s=120.0)
    far = Ranks(TWO, timeout_s=120.0, open_lines=lines(address, model))
    assert not far.lines.near
    timeline = Timeline(tmp_path / "timeline.json")
    far.show_on(timeline, micro_batches=True)
    one, two = (RankGroup(r, "policy", copy.deepcopy(model), cut=CUT, **LEARNING) for r in (here, far))
    batch = weighted()
    said = [group.update(batch, pg_loss) for group in (one, two)]
    assert said[0] == said[1]
    assert torch.equal(one.forward(batch, "logprobs"), two.forward(batch, "logprobs"))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one.weights(), two.weights(), strict=True))
    for group, name in ((one, "one"), (two, "two")):
        group.save(tmp_path / name)
        group.update(batch, pg_loss)
        group.load(tmp_path / "one")
    same = filecmp.cmpfiles(tmp_path / "one", tmp_path / "two", os.listdir(tmp_path / "one"), shallow=False)
    assert same[0]
    assert same[1:] == ([], [])
    assert torch.equal(one.forward(batch, "logprobs"), two.forward(batch, "logprobs"))
    assert shared(two, tmp_path)  # this is one machine, so a rank of "another" one writes its weights itself
    written = Publisher(Files(tmp_path / "weights"), there=True).publish(two)
    assert written.by.startswith(f"process {far.lines.lines[0].where.process[0]} on")  # type: ignore[attr-defined]
    assert Publisher(Files(tmp_path / "near")).publish(two).digest == written.digest
    here.close()
    for lane in far.lanes:  # this is one machine, and its clock is one
        assert lane.trip_ns is not None
        assert abs(lane.ahead_ns) <= lane.trip_ns / 2 + 1
    timeline.close()
    drawn = picture(tmp_path / "timeline.json")
    assert sorted(drawn) == ["rank 0", "rank 1"]
    done = {f"policy {what}" for what in ("update", "save", "load a checkpoint", "micro-batch")}
    assert all({*done, "wait for a command"} <= {s.name for s in spans} for spans in drawn.values())
    there = members(far)
    with pytest.raises(WhetError, match=r"rank 1 of 2 died \(killed by SIGKILL\) while doing: update policy"):
        two.update(batch, killed)
    until(lambda: not alive(there), "the end of all")


@pytest.mark.parametrize("how", ["hangs", pytest.param("its actor is killed", marks=pytest.mark.sweep)])
def test_a_far_rank_that_is_lost_is_named(address: str, how: str) -> None:
    """With where it is, if it hangs."""
    model = tiny_model()
    ranks = Ranks(TWO, timeout_s=120.0, open_lines=lines(address, model))
    group = RankGroup(ranks, "policy", model, cut=CUT, **LEARNING)
    there = members(ranks)
    told = stacks.everyone()  # of processes on another machine, through the actors beside them
    for number, line in enumerate(ranks.lines.lines):
        assert f"process {line.where.process[0]}, rank-{number}:\n" in told  # type: ignore[attr-defined]
    assert told.count("in recv_bytes") >= 2
    if how == "hangs":
        ranks.timeout_s = 3.0
        loss = sleepy
        said = r"(?s)^rank 1 of 2 hangs in sleepy .*; rank 0 waits for it in .*no rank sent a message for 3 s.* sleepy"
    else:
        os.kill(ranks.lines.lines[1].where.actor[0], signal.SIGKILL)  # type: ignore[attr-defined]
        loss, said = pg_loss, "rank 1 of 2 died .lost with"
    with pytest.raises(WhetError, match=said):
        group.update(weighted(), loss)
    until(lambda: not alive(there), "the end of all")
    assert list(stacks.far()) == [""]


DRIVER = """
import os, signal
from test_cluster_ranks import TWO, connect, lines, members
from tiny import tiny_model
from whet.training.ranks import Ranks
connect({address!r}, None)
ranks = Ranks(TWO, timeout_s=60.0, open_lines=lines({address!r}, tiny_model()))
print(members(ranks), flush=True)
os.kill(members(ranks)[0][0], signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_far_ranks_end_with_a_driver_that_is_killed(address: str, tmp_path: Path) -> None:
    """One of them is stopped and can hear nothing."""
    driver = Started(code=DRIVER.format(address=address), said=tmp_path / "said")
    assert driver.wait(200) == -signal.SIGKILL, driver.text()
    there = [tuple(map(int, pair)) for pair in re.findall(r"\((\d+), (\d+)\)", driver.text())]
    assert len(there) == 4
    until(lambda: not alive(there), "the end of all")  # type: ignore[arg-type]


# ---------------------------------------------------------------- their weights


@pytest.mark.parametrize("far", [False, True])
def test_a_process_beside_the_ranks_puts_their_weights_into_the_store(
    address: str, tmp_path: Path, far: bool
) -> None:
    """Ranks of either machine; the reference alone is here. What cannot be read is said, and who is killed replaced."""
    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    machine = next(name for name, has in nodes.items() if has.get("CPU")) if far else None
    staging = RayStaging(machine, 1 << 20, disk=tmp_path, timeout_s=60)
    model = tiny_model()
    written = Files(staging.path).send(1, model.named_parameters())
    names = [entry.name for entry in written.entries]
    flat = ray.get(staging.put(1, names))
    assert all(map(torch.equal, split(torch.from_numpy(flat.copy()), written.entries), model.parameters()))
    with pytest.raises(WhetError, match=r"version 2 could not be read: .*did not arrive"):
        staging.put(2, names)
    who = ray.get(staging.actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(who, signal.SIGSTOP)
    staging.timeout_s = 0.1
    with pytest.raises(WhetError, match=r"version 1 was not read within sync\.timeout_s=0\.1"):
        staging.put(1, names)
    os.kill(who, signal.SIGCONT)
    staging.timeout_s = 60
    ray.kill(staging.actor)
    while Path(f"/proc/{who}").exists():  # Ray does not wait for its end, and it may read meanwhile
        time.sleep(0.01)
    with pytest.raises(WhetError, match="version 1: the process that reads it has ended"):
        staging.put(1, names)
    assert far or ray.get(staging.put(1, names)).nbytes == flat.nbytes
    staging.close()
    assert far or not staging.path.exists()


@pytest.mark.sweep  # a minute of one core each
@pytest.mark.parametrize("ranks", [False, True])
def test_a_model_larger_than_the_driver_s_memory_reaches_a_replica_on_another_machine(
    address: str, tmp_path: Path, ranks: bool
) -> None:
    """By the object store from ranks that are beside the driver, by files from ranks that are beside the replica."""
    disconnect()
    with two_nodes(800 << 20) as large:
        done = trained(tmp_path, address=large, ranks=ranks)
    log = (tmp_path / "run" / "run.log").read_text()
    assert done.returncode == 0, done.stdout[-3000:] + log[-3000:]
    assert (tmp_path / "run/export/main/model.safetensors").stat().st_size > 2 * MATRIX_BYTES
    connect(address, None)


# ---------------------------------------------------------------- whole runs


def start(folder: Path, tree: dict[str, Any]) -> Started:
    folder.mkdir(exist_ok=True)
    (folder / "given.yaml").write_text(yaml.safe_dump({**tree, "run_dir": str(folder / "run")}))
    return Started("train", str(folder / "given.yaml"), said=folder / "said")


def finish(run: Started, folder: Path, within_s: float = 300.0) -> list[dict[str, Any]]:
    try:
        assert run.wait(within_s) == 0, (folder / "said").read_text()[-3000:]
    finally:
        run.kill()
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def test_ranks_replicas_and_rewards_in_the_cluster_change_no_number(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model is in the driver's process; what is trained comes back as files."""
    disconnect()  # one driver at a time has this room
    tree: dict[str, Any] = {
        "seed": 3,
        "model": {
            "scratch": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
        },
        "tokenizer": {"build": "chars"},
        "data": {"max_prompt_tokens": 16, "train": [{"path": str(TESTS / "data/words.jsonl")}]},
        "rewards": {"shared": {"function": f"{TESTS}/resume/rewards.py:shared_letters"}},
        "rollout": {"group_size": 4, "sampling": {"max_tokens": 6}},
        "train": {
            "steps": 2,
            "tasks_per_step": 4,
            "optimizer": {"lr": 1e-2},
            "parallel": {"dp_replicate": 2},
        },
        "track": {"trackers": ["jsonl"]},
        "machine": {"threads": 2},
    }
    far = {"address": address, "ranks": True, "reward_hosts": 1, "start_timeout_s": 200.0}
    sampled = {"rollout": {**tree["rollout"], "replicas": 1}, "cluster": far}
    lines = finish(start(tmp_path / "far", tree | sampled), tmp_path / "far")
    assert whet.train(**tree, run_dir=str(tmp_path / "near/run")).metrics == lines
    one, other = [tmp_path / who / "run/export/main/model.safetensors" for who in ("near", "far")]
    assert filecmp.cmp(one, other, shallow=False)
    assert not (tmp_path / "far/run/models").exists()


@pytest.mark.sweep
def test_a_killed_explorer_is_replaced_under_its_name(address: str, tmp_path: Path) -> None:
    disconnect()
    sections = {"mode": "train", "cluster": {"address": address, "explorers": 2, "start_timeout_s": 200.0}}
    tree = apart_tree(tmp_path, **sections) | {"sync": {"timeout_s": 200.0}}
    tree["train"]["steps"] = 40
    run = start(tmp_path, tree)
    log = tmp_path / "run/run.log"
    until(lambda: explorers_of(tmp_path), "an explorer", 300.0)
    os.kill(explorers_of(tmp_path)[0][0], signal.SIGKILL)
    until(lambda: re.search(r"explorer-\d lost: killed by SIGKILL", log.read_text()), "its end is seen", 60.0)
    lines = finish(run, tmp_path)
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, 41))
    until(lambda: not explorers_of(tmp_path), "the end of all")
    assert {p.name for p in (tmp_path / "run/explorers").iterdir()} == {"explorer-0", "explorer-1"}


def explorers_of(folder: Path) -> list[tuple[int, int]]:
    """The explorers' processes that live: those that hold the locks of their folders."""
    held = [holder(folder / "run/explorers" / name) for name in ("explorer-0", "explorer-1")]
    found = [process(pid) for pid, _ in filter(None, held)]
    return [who for who in found if who[1]]
