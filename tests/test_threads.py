"""Threads of products: none is waited for in a process that was forked after them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import hostile
from forked import said
from whet import environment
from whet.guard import line
from whet.guard.jail import Jail, RewardCall
from whet.types import ConfigError


def after_threads(where: str) -> None:
    import torch

    def compute() -> None:
        torch.set_num_threads(2)
        hostile.product(0.0)

    def load():
        if "as it is loaded" in where:
            compute()
        return call if "in a call" in where else hostile.product

    def call(value: float) -> dict[str, float]:
        torch.set_num_threads(2)
        return hostile.product(value)

    if "in the run" in where:
        compute()
    with Jail({"product": load}, timeout_s=10.0, memory_mb=2000) as jail:
        one = RewardCall(function="product", arguments=json.dumps({"value": 1.0}), key=0)
        print(asyncio.run(jail.call_many([one]))[0].parts)


@pytest.mark.parametrize(
    "where",
    [
        "in the run",
        "as it is loaded",
        "in the run and as it is loaded",
        "in the run and in a call",
        "as it is loaded and in a call",
    ],
)
def test_a_reward_computes_with_torch_after_threads_had(where: str) -> None:
    assert said(after_threads, where, timeout_s=30.0) == "{'score': 1.0, 'threads': 1.0}\n"


def test_a_limit_of_memory_that_no_run_fits_in_is_refused_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Below it OpenBLAS asks for memory for ever, and others end with errors of their own."""
    monkeypatch.setattr(environment, "os", SimpleNamespace(environ={}))
    limits = {"may": 900_000 << 10}
    monkeypatch.setattr(environment.resource, "getrlimit", lambda kind: (limits["may"], -1))
    with pytest.raises(
        ConfigError, match=r"may have 878 MiB of memory \(ulimit -v\).* takes 1280 MiB; raise the"
    ):
        environment.prepare(1, exact=True)
    for limits["may"] in (1280 << 20, environment.resource.RLIM_INFINITY):
        environment.prepare(1, exact=True)


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
