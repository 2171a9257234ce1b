"""Threads of products: none is waited for in a process that was forked after them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import hostile
from forked import said
from whet.guard import line
from whet.guard.jail import Jail, RewardCall


def after_threads(where: str) -> None:
    import torch

    def compute() -> None:
        torch.set_num_threads(2)
        hostile.product(0.0)

    def load():
        if where == "as it is loaded":
            compute()
        return hostile.product

    if where == "in the run":
        compute()
    with Jail({"product": load}, timeout_s=10.0, memory_mb=2000) as jail:
        call = RewardCall(function="product", arguments=json.dumps({"value": 1.0}), key=0)
        print(asyncio.run(jail.call_many([call]))[0].parts)


@pytest.mark.parametrize("where", ["in the run", "as it is loaded"])
def test_a_reward_computes_with_torch_after_threads_had(where: str) -> None:
    assert said(after_threads, where, timeout_s=30.0) == "{'score': 1.0, 'threads': 1.0}\n"


def test_a_process_at_the_end_of_a_line_has_the_threads_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch takes MKL_NUM_THREADS where both are set: that of a run is the number of cores."""
    started: list[dict[str, str]] = []

    def start(command: object, *, env: dict[str, str], **others: object) -> SimpleNamespace:
        started.append(env)
        return SimpleNamespace(pid=0)

    monkeypatch.setenv("MKL_NUM_THREADS", "8")
    monkeypatch.setattr(line.subprocess, "Popen", start)
    line.LocalLine("whet.envs.host", 0, folder=tmp_path, threads=1).hang_up()
    assert [(env["OMP_NUM_THREADS"], env["MKL_NUM_THREADS"]) for env in started] == [("1", "1")]
