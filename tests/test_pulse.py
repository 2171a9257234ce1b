"""Whatever takes long says that it gets on; what says nothing for machine.watchdog_timeout_s is ended."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import whet
from asking import reply
from fuzz.readers import tokenizer
from test_reward_model import rollout
from tiny import tiny_model
from whet import api
from whet.config.load import load
from whet.config.schema import DataConfig, SourceConfig
from whet.data import prepare
from whet.data.tasks import TaskStream, texts
from whet.guard import pulse
from whet.guard.jail import CallResult, Jail, RewardCall
from whet.guard.processes import until
from whet.guard.watch import Watch
from whet.models import kernels
from whet.models.tensor_files import opened, write
from whet.rewards.combine import RewardSet, score
from whet.rollout.hf import HfEngine
from whet.rollout.native.engine import NativeEngine
from whet.storage.manifests import digest
from whet.storage.stores import send
from whet.sync import relay
from whet.sync.relay import Relay
from whet.types import Group, Sampling, ScoreRequest

ROOT = Path(__file__).parents[1]
JUDGED = """
import asyncio, sys, time
from whet.guard.jail import Jail, RewardCall
from whet.guard.watch import Watch

def judge(n):
    time.sleep(float(sys.argv[1]))
    return 1.0

with Jail({"judge": lambda: judge}, timeout_s=60.0) as jail, Watch(quiet_s=0.4, limit_s=float(sys.argv[3])):
    calls = [RewardCall(function="judge", arguments='{"n": 0}') for _ in range(int(sys.argv[2]))]
    print(sum(r.parts["score"] for r in asyncio.run(jail.call_many(calls))))
"""


@pytest.fixture
def heard() -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()
    with pulse.heard_by(lambda what: found.update([what])):
        yield found


def judged(seconds: float, calls: int, *, limit_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", JUDGED, str(seconds), str(calls), str(limit_s)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_slow_judge_that_gets_on_is_no_hang() -> None:
    """It takes more than the limit for all, and less for each."""
    done = judged(0.1, 30, limit_s=2.0)
    assert (done.returncode, done.stdout.strip()) == (0, "30.0"), done.stderr


def test_a_judge_that_is_stuck_ends_the_run_which_names_the_key() -> None:
    done = judged(50.0, 1, limit_s=0.8)
    assert done.returncode == 1
    assert "hangs and is ended; run the same command again to resume from the last checkpoint" in done.stderr
    assert "If it was only slow, raise machine.watchdog_timeout_s, which is 0.8" in done.stderr


def one(n: int) -> float:
    return float(n)


def test_every_score_is_heard(heard: Counter[str]) -> None:
    with Jail({"one": lambda: one}) as jail:
        asyncio.run(jail.call_many([RewardCall(function="one", arguments=f'{{"n": {n}}}') for n in range(5)]))
    assert heard["scoring"] == 5


def test_every_score_of_a_reward_model_is_heard(heard: Counter[str]) -> None:
    model: Any = SimpleNamespace(score=lambda rollout: CallResult(parts={"score": 1.0}))
    rollouts = tuple(rollout("1+2=", "3", index) for index in range(3))
    rewards = RewardSet({"rm": 1.0}, None, models={"rm": model})
    asyncio.run(score([Group(rollouts[0].task, rollouts)], rewards))
    assert heard["scoring"] == 3


def test_rows_that_are_tokenised_are_heard(heard: Counter[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(prepare, "BATCH_ROWS", 10)
    source = SourceConfig(path="tests/data/words.jsonl", name="words", limit=25)
    TaskStream([source], DataConfig(train=(source,)), tokenizer=tokenizer(), seed=0)
    assert heard["reading words"] == 3


def test_every_token_of_the_reference_engine_is_heard(heard: Counter[str]) -> None:
    engine = HfEngine(tiny_model(layers=1), end_token_ids=[], max_context=32)
    asyncio.run(reply(engine, [5, 6, 7], Sampling(max_tokens=4, key=1, ignore_eos=True)))
    assert heard["decoding"] == 4


def test_every_piece_of_work_of_the_native_engine_is_heard() -> None:
    engine = NativeEngine(tiny_model(layers=1), kernels.load("auto"), end_token_ids=[], max_context=32)
    told = Counter[str]()
    engine.beat = lambda what: told.update([what])

    async def work() -> None:
        await reply(engine, [5, 6, 7], Sampling(max_tokens=4, key=1, ignore_eos=True))
        await engine.score([ScoreRequest(token_ids=(5, 9, 3), start=1)])

    asyncio.run(work())
    assert told["decoding"] >= 4
    assert told["scoring"] == 1


def test_files_that_are_digested_and_sent_are_heard(heard: Counter[str], tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    files = [tmp_path / "saved" / name for name in "ab"]
    for file in files:
        file.write_text(file.name)
    manifest = {"files": {file.name: [1, digest(file)] for file in files}}
    send(tmp_path / "saved", f"file://{tmp_path}/there", "step", manifest)
    assert heard == {f"{what} {name}": 1 for what in ("the SHA-256 of", "uploading") for name in "ab"}


def test_a_broadcast_is_heard_while_it_lasts(
    heard: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def send(self, version: int, *_: Any, **__: Any) -> str:
            assert until(lambda: heard[f"the broadcast of weights version {version}"] >= 2, within_s=30.0)
            return "sent"

    monkeypatch.setattr(relay, "BEAT_S", 0.01)
    monkeypatch.setattr(relay, "Collective", Slow)
    end: Any = SimpleNamespace(names=("policy",), host="", port=0, device=torch.device("cpu"), timeout_s=1.0)
    policy: Any = SimpleNamespace(call=lambda function: function())
    assert Relay(end, policy, tmp_path).send(3, ()) == "sent"


def test_rows_and_tensors_are_heard(heard: Counter[str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    assert list(texts([SourceConfig(path="tests/data/words.jsonl")]))
    write({"a": torch.zeros(3), "b": torch.zeros(2)}, tmp_path / "some.safetensors")
    with opened(tmp_path / "some.safetensors") as file:
        assert [len(file.read(name)) for name in "ab"] == [3, 2]
    assert heard["reading words"] == 1
    assert heard["writing some.safetensors"] == 2
    assert heard["reading some.safetensors"] == 2


def test_a_watch_hears_what_is_said_while_it_watches() -> None:
    with Watch() as watch:
        pulse.beat("the work")
        assert watch.last()[0] == "the work"
    pulse.beat("more")
    assert watch.last()[0] == "the work"


def test_the_watch_waits_longer_than_any_single_wait_may_take() -> None:
    """A judge that may take two hours is ended by its own time-out, which costs one score and not the run."""
    tree = {"tokenizer": {"build": "chars"}, "model": {"scratch": {}}, "train": {"steps": 1}}
    tree |= {"data": {"train": [{"path": "x.jsonl"}]}, "rewards": {"r": {"function": "exact"}}}
    assert api.watchdog_timeout_s(load(None, (), tree)) == 3600.0
    assert api.watchdog_timeout_s(load(None, ("machine.watchdog_timeout_s=9000",), tree)) == 9000.0
    assert api.watchdog_timeout_s(load(None, ("reward_workers.timeout_s=7200",), tree)) > 7200.0
    assert api.watchdog_timeout_s(load(None, ("rollout.timeout_s=7200", "rollout.retries=1"), tree)) > 14400.0


@pytest.mark.parametrize("engine", ["hf", "native"])
def test_a_whole_run_is_heard_in_all_that_it_does(engine: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    found: Counter[str] = Counter()
    limits: set[float] = set()

    def beat(watch: Watch, what: str) -> None:
        found.update([what.split(" ")[0]])
        limits.add(watch.limit_s)

    monkeypatch.setattr(Watch, "beat", beat)
    whet.train(
        run_dir=str(tmp_path / "run"),
        model={
            "scratch": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 32,
                "max_position_embeddings": 32,
            }
        },
        tokenizer={"build": "chars"},
        data={
            "max_prompt_tokens": 8,
            "train": [{"path": "tests/data/words.jsonl"}],
            "eval": [{"path": "tests/data/held_out.jsonl", "limit": 3}],
        },
        rewards={"letters": {"function": "tests/resume/rewards.py:shared_letters"}},
        rollout={"engine": engine, "group_size": 2, "sampling": {"max_tokens": 4}},
        train={"steps": 1, "tasks_per_step": 2},
        eval={"interval": 1},
        machine={"threads": 1, "watchdog_timeout_s": 9000},
        track={"trackers": ["jsonl"]},
    )
    assert limits == {9000.0}
    always = {"reading", "load", "decoding", "scoring", "a", "evaluate", "writing", "save", "export"}
    assert set(found) >= always | ({"the"} if engine == "hf" else set())
    assert found["decoding"] > 4
    assert found["scoring"] >= 4 + 3
