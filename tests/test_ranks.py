"""Ranks: whatever the layout, log-probs, metrics, gradients and weights of one process; and no rank is lost."""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import Started
from test_train_torch import CUT, pg_loss, weighted
from tiny import tiny_model
from whet.algos.recipes import build
from whet.batch import Batch, Loss, Outputs
from whet.config.recipes import RECIPES
from whet.config.schema import AlgorithmConfig, CriticConfig, OptimizerConfig
from whet.guard.line import bound
from whet.models.mesh import Dims
from whet.training.ranks import RankGroup, Ranks
from whet.types import ConfigError, WhetError

SGD = OptimizerConfig(name="sgd", lr=0.02)


def learning() -> dict[str, Any]:
    return {"optimizer": SGD, "total_steps": 4}


@pytest.mark.parametrize("name", RECIPES)
def test_losses_travel(name: str) -> None:
    """What the loop hands to a train engine can be taken to another process."""
    algorithm = build(AlgorithmConfig(name=name), critic=CriticConfig(), max_tokens=8)
    batch = weighted()

    def forward(batch: Batch, want: str) -> torch.Tensor:
        return -torch.ones(batch.tokens)

    loss = algorithm.loss_of(replace(batch, logp_old_N=batch.logp_sample_N), forward, 0.0)  # type: ignore[arg-type]
    assert callable(pickle.loads(pickle.dumps(loss)))
    pickle.dumps(algorithm.value_loss)


def test_dims_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="ep=2 does not divide dp_shard=3"):
        Dims(dp_shard=3, ep=2)
    with pytest.raises(ConfigError, match=r"train\.parallel\.tp=0"):
        Dims(tp=0)
    dims = Dims(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    assert (dims.world, dims.dp) == (16, 4)
    assert [dims.part_of(r) for r in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert dims.part_of(8) == 0


# ---------------------------------------------------------------- ends


def stopped(batch: Batch, out: Outputs) -> Loss:
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return pg_loss(batch, out)


def killed(batch: Batch, out: Outputs) -> Loss:
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return pg_loss(batch, out)


def broken(batch: Batch, out: Outputs) -> Loss:
    raise ZeroDivisionError("a user's loss")


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            killed,
            r"(?s)rank 1 of 2 died \(killed by SIGKILL\) while doing: update policy.*; the same command resumes",
        ),
        (
            stopped,
            r"(?s)^rank 1 of 2 is stopped \(SIGSTOP\) while doing: update policy.*; rank 0 waits for it.*; "
            r"no rank sent a message for 5 s .*\nrank 1: update policy.*it does not answer: it is stopped.*\nrank 0: ",
        ),
        (broken, r"(?s)of 2 failed while doing: update policy.*ZeroDivisionError: a user's loss"),
    ],
)
def test_a_lost_rank_is_named_and_the_others_end(loss: Any, said: str) -> None:
    ranks = Ranks(Dims(dp_replicate=2), timeout_s=60.0)
    many = RankGroup(ranks, "policy", tiny_model(), cut=CUT, **learning())
    ranks.timeout_s = 5.0
    with pytest.raises(WhetError, match=said):
        many.update(weighted(), loss)
    assert all(line.gone() for line in ranks.lines.lines)
    assert not ranks.lines.folder.exists()  # type: ignore[attr-defined]
    with pytest.raises(WhetError, match="closed"):
        many.update(weighted(), pg_loss)


@pytest.mark.parametrize("stops", ["before it reads a message", "while it sends a message"])
def test_a_rank_that_stands_still_in_the_middle_of_a_message_is_named(
    stops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is longer than what the connection holds, so neither end gets on without the other."""
    ranks = Ranks(Dims(dp_replicate=1), timeout_s=60.0)
    line, hear = ranks.lines.lines[0], ranks.hear

    def stop() -> None:
        os.kill(line.process.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
        ranks.timeout_s = 2.0  # what runs has more

    def hear_half(rank: int) -> Any:
        stop()
        bound(line.connection, ranks.timeout_s)
        return hear(rank)

    function: Any = len, b" " * 2**24
    if stops == "before it reads a message":
        stop()
    else:
        function = bytes, 2**24
        monkeypatch.setattr(ranks, "hear", hear_half)
    lost = threading.Timer(40.0, line.kill)
    lost.start()
    with pytest.raises(
        WhetError, match=r"^rank 0 of 1 is stopped \(SIGSTOP\) while doing: call policy; no rank"
    ):
        ranks.ask("call", "policy", partial(*function))
    lost.cancel()
    assert line.gone()


def test_what_ends_a_job_leaves_its_ranks_until_the_run_has_saved() -> None:
    """Slurm and systemd send SIGTERM to all processes of a job."""
    ranks = Ranks(Dims(dp_replicate=1), timeout_s=60.0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(ranks.lines.lines[0].process.pid, number)  # type: ignore[attr-defined]
        assert ranks.ask("call", "policy", partial(int, "3")) == [3]
    ranks.close()


def test_a_loss_that_cannot_travel_is_refused() -> None:
    ranks = Ranks(Dims(dp_replicate=1), timeout_s=60.0)
    many = RankGroup(ranks, "policy", tiny_model(), cut=CUT, **learning())
    with pytest.raises(WhetError, match="must be module-level functions"):
        many.update(weighted(), lambda batch, out: pg_loss(batch, out))
    assert ranks.lines.lines[0].gone()


DRIVER = """
import os, signal
from whet.models.mesh import Dims
from whet.training.ranks import Ranks
ranks = Ranks(Dims(dp_replicate=2), timeout_s=60.0)
print("ranks", *(line.process.pid for line in ranks.lines.lines), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_end_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    driver = Started(code=DRIVER, said=tmp_path / "said")
    assert driver.wait(120) == -signal.SIGKILL, driver.text()
    told = re.search(r"^ranks (\d+) (\d+)$", driver.text(), re.MULTILINE)
    assert told, driver.text()
    pids = told.groups()
    until = time.monotonic() + 20
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
