"""Critic and reference with ranks of their own: the numbers of one place, at the same time, and no rank is lost."""

from __future__ import annotations

import filecmp
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from test_ranks_run import BASE, given
from test_train_torch import CUT, pg_loss, weighted
from tiny import tiny_model
from whet.api import train
from whet.batch import Batch, Loss, Outputs
from whet.config import checks_parallel
from whet.config.memory_estimate import places
from whet.config.plan import plans
from whet.config.schema import OptimizerConfig
from whet.config.sections.parallel import ParallelConfig
from whet.guard.line import Local, end
from whet.learner import Learner
from whet.models import kernels
from whet.models.mesh import Dims
from whet.placement import Jobs, run_concurrently
from whet.track.written import read_lines
from whet.training.ranks import RankGroup, Ranks
from whet.training.torch import TorchEngine
from whet.types import ConfigError, Metrics, WhetError

LEARNS: dict[str, Any] = {"optimizer": OptimizerConfig(name="sgd", lr=0.02), "total_steps": 4}


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[RankGroup, RankGroup]]:
    """A policy that learns and a reference of other weights, in a process each."""
    pools = [Ranks(Dims(), whose=whose, timeout_s=120.0) for whose in ("", "critic")]
    yield (
        RankGroup(pools[0], "policy", tiny_model(), cut=CUT, **LEARNS),
        RankGroup(pools[1], "reference", tiny_model(seed=9).requires_grad_(False), cut=CUT),
    )
    for pool in pools:
        pool.close()


# ---------------------------------------------------------------- at once


def test_models_in_different_processes_work_at_the_same_time(two: tuple[RankGroup, RankGroup]) -> None:
    """Each waits for the other in the midst of its job."""
    policy, reference = two
    here = TorchEngine(tiny_model(), kernels.load("auto"), cut=CUT)
    met, threads = threading.Barrier(3), dict[str, int]()

    def job(name: str) -> str:
        met.wait(60)
        threads[name] = threading.get_ident()
        return f"of {name}"

    jobs: Jobs[str] = {
        name: (model, lambda name=name: job(name))  # type: ignore[misc,dict-item]
        for name, model in {"reference": reference, "here": here, "policy": policy}.items()
    }
    assert list(run_concurrently(jobs).items()) == [
        (name, f"of {name}") for name in ("reference", "here", "policy")
    ]
    assert threads["here"] == threading.get_ident(), "what computes here stays in its thread"
    assert run_concurrently({}) == {}


def test_models_in_one_place_take_turns(two: tuple[RankGroup, RankGroup]) -> None:
    turns: list[int] = []
    assert run_concurrently(
        {str(n): (two[0], lambda n=n: turns.append(n)) for n in range(3)}
    ) == dict.fromkeys("012")  # type: ignore[misc,dict-item]
    assert turns == [0, 1, 2]


def test_weights_travel_between_processes(two: tuple[RankGroup, RankGroup]) -> None:
    policy, reference = two
    policy.update(weighted(), pg_loss)
    before = reference.forward(weighted(), "logprobs")
    reference.copy_from(policy)
    said, wanted = (each.forward(weighted(), "logprobs") for each in (reference, policy))
    assert not torch.equal(before, wanted)
    assert torch.equal(said, wanted)
    here = TorchEngine(tiny_model(seed=4), kernels.load("auto"), cut=CUT)
    between = TorchEngine(tiny_model(), kernels.load("auto"), cut=CUT)
    between.copy_from(policy)
    for each in (reference, between):
        each.copy_from(here, 0.25)
    said, wanted = (each.forward(weighted(), "logprobs") for each in (reference, between))
    torch.testing.assert_close(said, wanted, rtol=1e-5, atol=1e-6)
    reference.copy_from(here)
    assert torch.equal(reference.forward(weighted(), "logprobs"), here.forward(weighted(), "logprobs"))


def killed(batch: Batch, out: Outputs) -> Loss:
    os.kill(os.getpid(), signal.SIGKILL)
    return pg_loss(batch, out)


def asleep(batch: Batch, out: Outputs) -> Loss:
    time.sleep(600)
    return pg_loss(batch, out)


def test_a_dead_rank_of_one_model_ends_the_wait_for_the_others(two: tuple[RankGroup, RankGroup]) -> None:
    """The last that these two are asked."""
    pools = [each.ranks for each in two]
    policy, critic = two[0], RankGroup(pools[1], "policy", tiny_model(), cut=CUT, **LEARNS)
    with pytest.raises(
        WhetError, match=r"rank 0 of 1 of the critic died \(killed by SIGKILL\) while doing: up"
    ):
        run_concurrently({
            "policy": (policy, lambda: policy.update(weighted(), asleep)),  # type: ignore[dict-item]
            "critic": (critic, lambda: critic.update(weighted(), killed)),  # type: ignore[dict-item]
        })  # fmt: skip
    assert all(line.gone() for pool in pools for line in pool.lines.lines)


# ---------------------------------------------------------------- runs


def ended(run_dir: Path, *overrides: str) -> None:
    cfg = {key: value for key, value in BASE.items() if key != "rewards"}
    train(overrides=[f"run_dir={run_dir}", *overrides], rewards=letters, **cfg)


def letters(response: str, task: Any) -> float:
    return float(len(set(response) & set(task.answer)))


def test_a_run_with_models_apart_writes_what_it_writes_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, both updates, a reference that becomes the policy, checkpoints; though the critic's rank is killed in the
    third step, and the run goes on with all models in one place."""
    how = ["train.steps=3", "reference.reset_interval=1", "critic.minibatches=4"]
    ended(tmp_path / "together", *how)
    how += ["profile.steps=[1]", "train.parallel.separate_ranks=[critic,reference]"]
    learn, pids = Learner.update_critic, list[int]()

    def killing(learner: Learner, part: Batch) -> Metrics:
        if learner.ranks:
            assert threading.current_thread() is not threading.main_thread(), "the policy learns there"
        if learner.context.monitor.step == 2 and not pids:
            pids.extend(line.process.pid for ranks in learner.ranks.values() for line in ranks.lines.lines)  # type: ignore[attr-defined]
            os.kill(pids[0], signal.SIGKILL)
        return learn(learner, part)

    monkeypatch.setattr(Learner, "update_critic", killing)
    with pytest.raises(
        WhetError, match=r"rank 0 of 1 of the critic died \(killed by SIGKILL\) while doing: update"
    ):
        ended(tmp_path / "apart", *how)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    ended(tmp_path / "apart", *how[:-1])
    last = "checkpoints/0-main-000003"
    same = ["metrics.jsonl", "export/main/model.safetensors", f"{last}/reference/model.safetensors"]
    same += [
        f"{last}/{role}/{f}.safetensors" for role in ("policy", "critic") for f in ("model", "optimizer")
    ]
    _, different, missing = filecmp.cmpfiles(tmp_path / "together", tmp_path / "apart", same, shallow=False)
    assert (different, missing) == ([], [])
    timings = read_lines(tmp_path / "apart/timings.jsonl")[1]
    assert timings["memory/critic_rank_0_peak_mb"] > 0 < timings["memory/reference_rank_0_peak_mb"]
    assert timings["speed/tokens_per_rank_s"] == pytest.approx(timings["speed/tokens_per_s"] / 3)
    written = {p.name for p in (tmp_path / "apart/profile").iterdir()}
    assert written == {
        f"main{who}-step-000001.json.gz" for who in ("", "-critic-rank-0", "-reference-rank-0")
    }


# ---------------------------------------------------------------- what is asked for


KL_FULL = ["algorithm.kl.estimator=full"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["algorithm.name=grpo", "critic={}", "train.parallel.separate_ranks=[critic]"],
            "critic: this stage has no critic",
        ),
        (
            ["algorithm.kl.coef=0", "train.parallel.separate_ranks=[reference]"],
            "reference: this stage has no reference",
        ),
        (
            [*KL_FULL, "train.parallel.separate_ranks=[reference]"],
            "reads the reference in every micro-batch of the policy",
        ),
        (["train.parallel.separate_ranks=[critic,critic]"], "critic is listed twice"),
        (["train.parallel.separate_ranks=[policy]"], "critic"),
        (["train.parallel.separate_ranks=[critic]", "train.parallel.dp_shard=-1"], "dp_shard=-1"),
        (
            ["train.parallel.separate_ranks=[critic]", "profile.steps=[1]", "profile.ranks=[1]"],
            "1 does not exist: a model has 1 ranks",
        ),
    ],
)
def test_what_cannot_be_apart_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plans(given(*overrides))


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_of_a_model_apart_is_counted_where_it_is(ranks: int) -> None:
    def phases(*apart: str) -> dict[str, tuple[int, set[str]]]:
        (plan,) = plans(
            given(f"train.parallel.dp_shard={ranks}", f"train.parallel.separate_ranks=[{','.join(apart)}]")
        )
        return {p.name: (p.count, {name for phase in p.phases for name in phase.parts}) for p in places(plan)}

    together, apart = phases(), phases("critic", "reference")
    trainer = "each rank" if ranks > 1 else "this process"
    models = {"policy", "critic", "reference"}
    assert together[trainer][1] & models == models
    assert apart[trainer][1] & models == {"policy"}
    for name in ("critic", "reference"):
        assert apart[f"each rank of the {name}"][0] == ranks
        assert apart[f"each rank of the {name}"][1] & models == {name}


def test_gpus_of_each_group_follow_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    p = ParallelConfig(dp_shard=2, tp=2, separate_ranks=("reference", "critic"))
    assert checks_parallel.ranks_of(p) == {"policy": 4, "critic": 4, "reference": 4}
    assert [checks_parallel.first_gpu(p, group) for group in checks_parallel.ranks_of(p)] == [0, 4, 8]
    alone = ParallelConfig(separate_ranks=("critic",))
    assert checks_parallel.ranks_of(alone) == {"critic": 1}
    assert checks_parallel.first_gpu(alone, "critic") == 1, "the run's own process has the first"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    said = r"4 ranks of the critic \(train.parallel.separate_ranks\) need one GPU each, beside 4 for other"
    with pytest.raises(ConfigError, match=said):
        Ranks(Dims(dp_shard=4), whose="critic", first_gpu=4, device="cuda")
    lines = Local(2, 1, module="whet.training.rank", first_gpu=4)
    try:
        assert [line.gpu for line in lines.lines] == [4, 5]
    finally:
        end(lines)
