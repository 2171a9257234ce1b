"""Explorers in processes of their own, each with vLLM servers of its own; the servers are doubles."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

import whet
from programs import programs
from servers import SglangServer, VllmServer
from serving import digits_model
from test_apart import Processes
from test_http_keys import inputs
from test_rollout_contract import LIMIT, module
from tiny import RUN
from vllm_double import SERVE
from whet.buffer.stores import open_store
from whet.models import kernels
from whet.rollout.engine import WeightUpdate
from whet.rollout.http.opened import Opener, vllm
from whet.rollout.native.engine import NativeEngine
from whet.types import ConfigError, Request, Sampling, WhetError

STEPS = 6


def sections(folder: Path, **rollout: Any) -> dict[str, Any]:
    own = {"engine": "vllm", "server": {"command": str(folder / "vllm"), "token": "open sesame"}}
    return {
        "rollout": {"group_size": 4, "sampling": {"max_tokens": 8}, **own, **rollout},
        "train": {"steps": STEPS, "tasks_per_step": 4, "optimizer": {"lr": 1e-2}},
        "data": {"train": [{"rows": [{"prompt": f"copy {n}", "answer": "ab"[n % 2]} for n in range(8)]}]},
        "eval": {},
        "checkpoint": {"interval": 2, "export": False},
        "track": {"trackers": ["jsonl"], "rollouts_interval": 1},
        "machine": {"logprob_parity": "off", "threads": 1},
    }


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def sampled_by(folder: Path) -> dict[int, set[int]]:
    """The versions of the tokens that each step has trained on."""
    found = {}
    for path in (folder / "run/rollouts").glob("main-*"):
        rows = pq.read_table(path).to_pylist()
        step = int(re.findall(r"step-(\d+)", path.name)[0])
        found[step] = {v for row in rows for v, own in zip(row["versions"], row["mask"]) if own}
    return found


def test_explorers_with_servers_of_their_own_keep_the_rounds(tmp_path: Path) -> None:
    """The step alone determines which weights sample which task; one explorer is killed."""
    apart = Processes(tmp_path, **sections(tmp_path))
    with programs(tmp_path, vllm=SERVE), closing(apart):
        for name in ("train", "one", "two"):
            apart.start(name)
        apart.until(lambda: apart.steps >= 2, within=240)
        apart.kill("one")
        apart.start("one")
        ends = [apart.ends(name) for name in ("train", "one", "two")]
        assert ends == [0, 0, 0], {n: apart.said(n) for n in ("train", "one", "two")}
    steps = metrics(tmp_path)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(step["train/mismatch_max_nats"] < 1e-4 for step in steps)
    assert sampled_by(tmp_path) == {step: {step - 1} for step in range(1, STEPS + 1)}
    run = tmp_path / "run"
    assert not (run / "engine.log").exists()  # the trainer asks nobody
    logs = [(run / "explorers" / name / "run.log").read_text() for name in ("one", "two")]
    proved = [
        [int(v) for v in re.findall(r"weights version (\d+): loaded by .* proved in", log)] for log in logs
    ]
    assert all(found == sorted(found) for found in proved)
    assert len({v for found in proved for v in found}) > 1, "one may come when the other has done all"
    assert all("canary_mean" in log for log, found in zip(logs, proved) if found)
    store = open_store(f"sqlite:///{tmp_path}/groups.db", queue="apart/main", order="arrival")
    store.check()
    ledger = store.ledger()
    assert ledger["asked"] == ledger["delivered"]
    store.close()


def test_asynchronous_rollouts_go_on_through_a_sync_of_sglang(tmp_path: Path) -> None:
    """The server is given, and a kind of its own."""
    digits_model(0, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").requires_grad_(False)
    server = SglangServer(NativeEngine(model, kernels.load("auto"), end_token_ids=[], max_context=LIMIT))
    asynchronous = {"max_staleness": 2, "schedule": "async", "partial_rollout": True}
    given = sections(tmp_path, engine="sglang", server={"urls": [server.url]}, **asynchronous) | {
        "model": {"path": str(tmp_path / "model")},
        "tokenizer": {},
        "data": {
            "train": [{"rows": [{"prompt": f"{n}{n}", "answer": "1"} for n in range(8)]}],
            "max_prompt_tokens": 4,
        },
        "rewards": {"digits": {"function": "format", "arguments": {"pattern": ".*[0-4].*"}}},
    }
    apart = Processes(tmp_path, **given)
    apart.start("train")
    apart.start("one")
    try:
        apart.until(lambda: apart.steps == STEPS)
        assert [apart.ends(name) for name in ("train", "one")] == [0, 0], apart.said("one")
    finally:
        apart.close()
        server.stop()
    steps = metrics(tmp_path)
    assert len(steps) == STEPS
    assert all(step["rollout/failed_count"] == 0 for step in steps)
    for step, versions in sampled_by(tmp_path).items():
        assert versions <= {step - 3, step - 2, step - 1}


def test_a_given_server_belongs_to_one_process_of_a_run(tmp_path: Path) -> None:
    server = VllmServer(NativeEngine(module(), kernels.load("auto"), end_token_ids=[], max_context=LIMIT))
    try:
        router = vllm(inputs(tmp_path, urls=(server.url,)))
        with pytest.raises(ConfigError, match=r"process \d+ on .* of this run has http://127"):
            vllm(inputs(tmp_path, urls=("http://127.0.0.1:9", server.url)))
        for folder in (tmp_path / "another run", tmp_path):
            asyncio.run(vllm(inputs(folder, urls=(server.url,))).close())
            asyncio.run(router.close())
        with pytest.raises(WhetError, match="does not answer"):
            vllm(inputs(tmp_path, urls=("http://127.0.0.1:9",), timeout_s=0.1))
        with pytest.raises(WhetError, match="does not answer"):  # and not: it is taken
            vllm(inputs(tmp_path, urls=("http://127.0.0.1:9",), timeout_s=0.1))
    finally:
        server.stop()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_ctrl_c_ends_a_run_that_waits_for_its_first_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    """It said that it stops after this step, and waited for as long as rollout.server.start_timeout_s says."""

    async def asked(*given: object) -> bool:
        os.kill(os.getpid(), number)
        return False

    monkeypatch.setattr("whet.rollout.http.opened.reachable", asked)
    server = {"urls": ["http://127.0.0.1:9"], "timeout_s": 2}
    own = {
        "rollout": {**RUN["rollout"], "engine": "vllm", "server": server},
        "run_dir": str(tmp_path / "run"),
    }
    with pytest.raises(KeyboardInterrupt):
        whet.train(**{**RUN, **own, "track": {"trackers": ["console", "jsonl"]}})
    assert "after this step" not in "".join(capfd.readouterr())


def test_processes_of_a_run_have_folders_of_their_own_for_weights(tmp_path: Path) -> None:
    own = inputs(tmp_path, weights_dir=str(tmp_path / "fast"))
    own = replace(own, run_dir=tmp_path / "explorers" / "one")
    assert Opener(own).folder.root == tmp_path / "fast" / "explorers" / "one"


def test_a_trainer_that_asks_nobody_starts_no_server(tmp_path: Path) -> None:
    given = inputs(tmp_path, command=str(tmp_path / "missing"))
    engine = vllm(replace(given, asked=False))

    async def story() -> None:
        receipt = await engine.update_weights(WeightUpdate(version=7, module=module()))
        assert (receipt.version, engine.version) == (7, 7)
        request = Request(id="a", session="a", prompt=(5,), sampling=Sampling())
        with pytest.raises(WhetError, match="its explorers do"):
            await engine.generate(request)

    asyncio.run(story())
