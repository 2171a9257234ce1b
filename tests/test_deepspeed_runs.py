"""Whole runs that DeepSpeed trains: hit in the middle they say so, leave no process, and resume with equal numbers."""

from __future__ import annotations

import filecmp
import importlib.util
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import whet
from forked import Started
from grid import by_deepspeed
from test_cli import assert_gone
from test_ranks import killed, learning
from test_train_torch import CUT, weighted
from tiny import LETTERS, tiny_model
from whet.models.mesh import Dims
from whet.training.ranks import RankGroup, Ranks
from whet.types import Json, WhetError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)

RUN: Json = {
    **LETTERS,
    "algorithm": {"name": "ppo", "kl": {"coef": 0.01}},
    "critic": {"optimizer": {"lr": 1e-3}},
    "train": {
        "steps": 4,
        "tasks_per_step": 4,
        "minibatches": 2,
        "optimizer": {"lr": 1e-3},
        "engine": "deepspeed",
        "parallel": {"dp_shard": 2},
        "engine_arguments": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    },
    "checkpoint": {"interval": 1},
}


def trained(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> whet.Result:
    """To its end, in this process, with ranks that are forked."""
    return whet.train(overrides=[f"run_dir={run_dir}"], **RUN)


def test_a_rank_that_is_killed_is_named_and_the_other_ends() -> None:
    ranks = Ranks(Dims(dp_shard=2), timeout_s=60.0)
    zero = by_deepspeed({"stage": 2}, learning()["optimizer"])
    many = RankGroup(ranks, "policy", tiny_model(), cut=CUT, deepspeed=zero, **learning())
    with pytest.raises(WhetError, match=r"rank 1 of 2 died \(killed by SIGKILL\) while doing: update policy"):
        many.update(weighted(), killed)
    assert all(line.gone() for line in ranks.lines.lines)


# ---------------------------------------------------------------- whole runs


def of_rank(driver: int) -> int:
    """The process of its rank 1 (`forked`)."""
    return next(p.pid for p in psutil.process_iter() if p.name() == f"{driver} rank-1")


def started(run_dir: Path) -> tuple[Started, list[psutil.Process]]:
    """It has trained two steps."""
    path = run_dir.with_suffix(".json")
    path.write_text(json.dumps(RUN))
    process = Started(
        "train",
        str(path),
        f"run_dir={run_dir}",
        "track.trackers=[jsonl, console]",
        said=run_dir.with_suffix(".said"),
    )
    until = time.monotonic() + 240
    while not list(run_dir.glob("checkpoints/*-000002")):
        assert process.poll() is None, process.text()
        assert time.monotonic() < until, "the run does not get on"
        time.sleep(0.005)
    return process, psutil.Process(process.pid).children(recursive=True)


@pytest.mark.sweep  # of one kind: test_ranks_run.py kills a driver, the test above a rank
@pytest.mark.parametrize(
    ("hit", "code", "said"),
    [
        (lambda pid: os.kill(pid, signal.SIGKILL), -signal.SIGKILL, ""),
        (lambda pid: os.kill(of_rank(pid), signal.SIGKILL), 1, r"rank 1 of 2 died (killed by SIGKILL)"),
        (lambda pid: os.killpg(pid, signal.SIGINT), 130, "stopped; saved as"),
    ],
    ids=["driver killed", "rank killed", "Ctrl-C"],
)
def test_hit_in_the_middle_it_goes_on_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hit: Callable[[int], None], code: int, said: str
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    trained(whole, monkeypatch)
    process, children = started(broken)
    hit(process.pid)
    assert (process.wait(60), said in process.text()) == (code, True), process.text()
    assert "Traceback" not in process.text()
    assert_gone(children, within_s=10)
    assert trained(broken, monkeypatch).finished
    last = "checkpoints/0-main-000004"
    same = ["metrics.jsonl", "export/main/model.safetensors"]
    same += [
        f"{last}/{role}/{f}.safetensors" for role in ("policy", "critic") for f in ("model", "optimizer")
    ]
    assert filecmp.cmpfiles(whole, broken, same, shallow=False)[1:] == ([], [])
