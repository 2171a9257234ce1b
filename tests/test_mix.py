"""Demonstrations among own rollouts, and a teacher: how a step is put together, what is refused, what is learned."""

from __future__ import annotations

import filecmp
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import whet
from forked import Started
from whet.batch import Batch, pack, select, split
from whet.config.describe import arithmetic
from whet.config.load import load
from whet.config.plan import Plan, plans
from whet.data.demonstrations import mark, spread
from whet.types import ConfigError, Group, Rollout, Task

ROOT = Path(__file__).parents[1]
SCRATCH = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
TASKS = [{"prompt": f"{c}>"} for c in "abcdefgh"]
ALL_A = [{"prompt": f"{c}>", "response": "aaaa"} for c in "abcdefgh"]
SETUP: dict[str, Any] = {
    "model": {"scratch": SCRATCH},
    "tokenizer": {"build": "chars"},
    "machine": {"threads": 1},
    "track": {"trackers": ["jsonl"]},
    "checkpoint": {"interval": 0, "export": False},
    "rollout": {"group_size": 4, "sampling": {"max_tokens": 5}},
    "data": {
        "max_prompt_tokens": 8,
        "train": [{"rows": TASKS}],
        "demonstrations": [{"name": "masters", "rows": ALL_A}],
    },
    "rewards": {"length": {"function": "exact"}},
}


def mix(**values: Any) -> dict[str, Any]:
    train = {"steps": 30, "tasks_per_step": 8, "optimizer": {"lr": 5e-3}}
    return SETUP | {"algorithm": {"name": "mix"}, "train": train} | values


def planned(overrides: list[str], **values: Any) -> Plan:
    return plans(load(None, overrides, mix(**values)))[0]


def groups(number: int, *, version: int) -> list[Group]:
    """Groups of one rollout, each with its number as its only prompt token."""
    out = []
    for i in range(number):
        task = Task(uid=i, source="test", prompt="")
        rollout = Rollout.one_strand(
            task=task, index=0, token_ids=[i, 1], mask=[0, 1], logprobs=[0.0, 0.0], sample_logprobs=[0.0, 0.0],
            versions=[-1, version], finish_reason="stop", reward=0.0,
        )  # fmt: skip
        out.append(Group(task, (rollout,)))
    return out


# ---------------------------------------------------------------- a step, put together


def test_demonstrations_are_spread_by_hand() -> None:
    mine, given_ = groups(5, version=0), groups(3, version=-1)
    batch = mark(pack(spread(mine, given_)))
    assert batch.expert_R is not None
    # Places 8 / 3 apart, each part in its order.
    assert batch.expert_R.int().tolist() == [0, 0, 1, 0, 0, 1, 0, 1]
    assert batch.token_ids_N[batch.start_S].tolist() == [0, 1, 0, 2, 3, 1, 4, 2]


@settings(deadline=None)
@given(own=st.integers(1, 40), given_=st.integers(1, 40), parts=st.integers(1, 8))
def test_every_minibatch_has_its_share(own: int, given_: int, parts: int) -> None:
    total = own + given_
    if total % parts:
        return
    batch = mark(pack(spread(groups(own, version=3), groups(given_, version=-1))))
    assert batch.expert_R is not None
    assert int(batch.expert_R.sum()) == given_
    for part in (select(batch, rows) for rows in split(batch, parts)):
        assert part.expert_R is not None
        assert abs(int(part.expert_R.sum()) - given_ / parts) < 1
        if min(own, given_) >= parts:
            assert 0 < int(part.expert_R.sum()) < part.rollouts


@pytest.mark.parametrize(
    ("tasks", "ratio", "experts"), [(8, 0.5, 4), (8, 0.3, 3), (30, 0.1, 3), (40, 0.2, 8), (10, 0.01, 1)]
)
def test_how_many_demonstrations_a_step_has(tasks: int, ratio: float, experts: int) -> None:
    plan = planned([f"train.tasks_per_step={tasks}", f"algorithm.mix.demonstration_ratio={ratio}"])
    assert plan.experts_per_step == experts
    assert plan.own_tasks_per_step == tasks - experts
    assert plan.rollouts_per_step == 4 * (tasks - experts) + experts
    told = f"{tasks - experts} tasks x 4 = {4 * (tasks - experts)} rollouts and {experts} demonstrations"
    assert arithmetic(plan).startswith(told)


def test_epochs_count_the_tasks_that_are_asked() -> None:
    loaded = load(None, ["train.epochs=3", "train.steps=null"], mix())
    assert plans(loaded, rows={"main": 8})[0].steps == 6  # 24 tasks, 4 a step


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "data.demonstrations=[]",
            "data.demonstrations: is empty, but algorithm.name=mix mixes demonstrations",
        ),
        ("algorithm.mix.demonstration_ratio=0.95", "needs at least one of both"),
        ("algorithm.mix.demonstration_ratio=1.0", "> 0 and < 1"),
        ("algorithm.mix.mu=0.0", "would have no weight"),
        ("algorithm.mix.mu_schedule.decay_steps=5", "decay_steps: has no effect"),
        ("algorithm.loss.phi_cutoff=0.5", "no effect"),
        ("algorithm.name=grpo", r"data.demonstrations\[0\].name: has no effect"),
        ("data.demonstrations.0.weight=2.0", "nothing is mixed"),
        ("data.demonstrations.0.rejected=worse", "only prompt and response are read"),
        ("data.demonstrations.0.path=x.jsonl", "exactly one of path"),
    ],
)
def test_what_cannot_work_or_has_no_effect_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planned([override])


def test_minibatches_need_both_and_keep_them() -> None:
    with pytest.raises(ConfigError, match=r"each of train\.minibatches=4 needs at least one of both"):
        planned(["train.minibatches=4", "algorithm.mix.demonstration_ratio=0.25"])
    with pytest.raises(ConfigError, match="shuffling would undo"):
        planned(["train.minibatches=2", "train.update_epochs=2", "train.shuffle_minibatches=true"])
    assert planned(["train.minibatches=4"]).experts_per_step == 4
    with pytest.raises(ConfigError, match=r"critic\.minibatches: 5, but .* 4 are demonstrations.*at most 4"):
        planned(["algorithm.advantage=gae", "critic.minibatches=5"])


def test_only_what_samples_can_mix() -> None:
    values = mix(algorithm={"name": "sft", "mix": {"mu": 0.2}})
    with pytest.raises(ConfigError, match=r"algorithm\.mix\.mu: has no effect: the replies are in the data"):
        plans(load(None, [], values))


def test_every_online_recipe_can_mix() -> None:
    values = {"name": "dapo", "mix": {"loss": {"name": "sft_phi", "phi_cutoff": 0.5}}}
    assert planned([], algorithm=values).experts_per_step == 4


DISTILL: dict[str, Any] = {"data": {"max_prompt_tokens": 8, "train": [{"rows": TASKS}]}, "rewards": {}}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("reference.path=null", "give the folder of the teacher"),
        ("reference.reset_interval=3", "would replace the teacher"),
        ("algorithm.dynamic_sampling=true", "every group is uniform"),
    ],
)
def test_a_student_needs_its_teacher(override: str, said: str) -> None:
    values = mix(**DISTILL, algorithm={"name": "distill"}, reference={"path": "teacher"})
    with pytest.raises(ConfigError, match=said):
        plans(load(None, [override], values))


# ---------------------------------------------------------------- learning


def no_reward(response: str, task: whet.Task) -> float:
    return 0.0


def share_of_b(response: str, task: whet.Task) -> float:
    return response.count("b") / max(len(response), 1)


def run(tmp_path: Path, *, rewards: Any, **values: Any) -> list[dict[str, Any]]:
    sections = {k: v for k, v in mix(**values).items() if k != "rewards"}
    return whet.train(rewards=rewards, run_dir=str(tmp_path / "run"), **sections).metrics


@pytest.mark.parametrize("name", [pytest.param("mix", marks=pytest.mark.sweep), "mix_chord"])
def test_demonstrations_are_learned_where_rewards_say_nothing(tmp_path: Path, name: str) -> None:
    algorithm = {"name": name, "mix": {"mu": 0.9}}
    metrics = run(tmp_path, rewards=no_reward, algorithm=algorithm)
    assert metrics[0]["train/expert_nll_nats"] > 2
    assert metrics[-1]["train/expert_nll_nats"] < 0.5 * metrics[0]["train/expert_nll_nats"]
    assert metrics[0]["train/mu"] == 0.9
    assert metrics[0]["reward/scored_count"] == 16, (
        "demonstrations are not among the rollouts that are judged"
    )


def test_the_arithmetic_of_an_update_has_its_demonstrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor | None] = []

    class Counts:
        peak, devices = 1.0, 1

        def flops(self, batch: Batch, *, policy_learns: bool) -> float:
            seen.append(batch.expert_R)
            return 1.0

    monkeypatch.setattr("whet.learner.meter_of", lambda *_, **__: Counts())
    run(tmp_path, rewards=no_reward, train=mix()["train"] | {"steps": 1})
    (expert_R,) = seen
    assert expert_R is not None
    assert 0 < expert_R.sum() < len(expert_R)


@pytest.mark.parametrize("name", ["mix", pytest.param("mix_chord", marks=pytest.mark.sweep)])
def test_rewards_are_learned_beside_demonstrations(tmp_path: Path, name: str) -> None:
    metrics = run(
        tmp_path, rewards=share_of_b, algorithm={"name": name}, train=mix()["train"] | {"steps": 40}
    )
    assert sum(m["reward/mean"] for m in metrics[:3]) / 3 < 0.3
    assert sum(m["reward/mean"] for m in metrics[-3:]) / 3 > 0.7


def test_the_weight_is_in_the_metrics_and_in_the_loss(tmp_path: Path) -> None:
    """No reward, so the loss is mu times the cross entropy of the demonstrations."""
    algorithm = {
        "name": "mix",
        "mix": {"mu": 0.8, "mu_schedule": {"warmup_steps": 2, "decay_steps": 2, "valley": 0.2}},
    }
    train = {"steps": 5, "tasks_per_step": 8, "optimizer": {"lr": 1e-3}}
    metrics = run(tmp_path, rewards=no_reward, algorithm=algorithm, train=train)
    assert [m["train/mu"] for m in metrics] == pytest.approx([0.4, 0.8, 0.5, 0.2, 0.2])
    for m in metrics:
        assert m["train/loss"] == pytest.approx(m["train/mu"] * m["train/expert_nll_nats"], rel=1e-5)


def test_several_minibatches_and_a_critic(tmp_path: Path) -> None:
    """A critic, whitening, an entropy bonus and several optimizer steps; the engine's log-probs still agree."""
    algorithm = {"name": "ppo", "mix": {"demonstration_ratio": 0.5, "mu": 0.3}, "entropy_coef": 0.001}
    train = {
        "steps": 12,
        "tasks_per_step": 8,
        "minibatches": 2,
        "update_epochs": 2,
        "optimizer": {"lr": 5e-3},
    }
    critic = {"optimizer": {"lr": 1e-2}}
    metrics = run(tmp_path, rewards=share_of_b, algorithm=algorithm, train=train, critic=critic)
    assert metrics[-1]["train/expert_nll_nats"] < metrics[0]["train/expert_nll_nats"]
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"]
    assert all(m["train/mismatch_max_nats"] < 1e-4 for m in metrics), "demonstrations were never sampled"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model that has learned to write a's."""
    folder = tmp_path_factory.mktemp("teacher")
    data = {"max_prompt_tokens": 8, "train": [{"rows": ALL_A}]}
    sft = SETUP | {"data": data, "algorithm": {"name": "sft"}, "checkpoint": {"interval": 0, "export": True}}
    del sft["rewards"]
    sft["rollout"] = {"sampling": {"max_tokens": 5}}
    train = {"steps": 25, "tasks_per_step": 8, "optimizer": {"lr": 5e-3}}
    whet.train(run_dir=str(folder), **sft | {"train": train})
    return str(folder / "export" / "main")


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "distill"},
        pytest.param(
            {"name": "gkd", "loss": {"divergence": "jsd_topk", "top_k": 2}}, marks=pytest.mark.sweep
        ),
        pytest.param({"name": "gkd"}, marks=pytest.mark.sweep),
        pytest.param(
            {"name": "gkd", "loss": {"divergence": "forward_topk", "top_k": 3}}, marks=pytest.mark.sweep
        ),
        pytest.param({"name": "gkd", "loss": {"divergence": "jsd"}}, marks=pytest.mark.sweep),
    ],
)
def test_a_student_learns_from_its_teacher_on_its_own_replies(
    teacher: str, tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    student = SETUP | DISTILL | {"algorithm": algorithm, "reference": {"path": teacher}, "seed": 7}
    train = {"steps": 60, "tasks_per_step": 8, "optimizer": {"lr": 3e-3}}
    student |= {"tokenizer": {"path": teacher}, "train": train}
    metrics = whet.train(run_dir=str(tmp_path), **student).metrics
    # Mean over the student's own tokens of log student - log teacher: the reverse KL a token.
    first, last = (
        sum(m["train/kl_reference_nats"] for m in part) / 5 for part in (metrics[:5], metrics[-5:])
    )
    assert first > 1.0
    assert last < 0.3 * first


# ---------------------------------------------------------------- going on


def resumable(run_dir: Path) -> dict[str, Any]:
    words = str(ROOT / "tests/data/words.jsonl")
    algorithm = {
        "name": "mix_chord",
        "mix": {"mu": 0.5, "mu_schedule": {"warmup_steps": 4, "decay_steps": 9, "valley": 0.1}},
    }
    return mix(
        run_dir=str(run_dir),
        data={"max_prompt_tokens": 8, "train": [{"path": words}], "demonstrations": [{"path": words}]},
        algorithm=algorithm,
        rewards={"letters": {"function": f"{ROOT}/tests/resume/rewards.py:shared_letters"}},
        rollout={"group_size": 4, "sampling": {"max_tokens": 8}},
        train={"steps": 14, "tasks_per_step": 6, "minibatches": 2, "optimizer": {"lr": 2e-3}},
        checkpoint={"interval": 2, "export": False},
    )


def start(run_dir: Path) -> Started:
    config = run_dir.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(resumable(run_dir)))
    return Started("train", str(config))


def test_a_killed_mix_goes_on_to_the_same_end(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whet.train(**resumable(whole))
    process = start(broken)
    metrics, deadline = broken / "metrics.jsonl", time.monotonic() + 60
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 5:
        assert process.poll() is None, "it ended before the kill"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert metrics.read_bytes().count(b"\n") < 14
    whet.train(**resumable(broken))
    names = sorted(str(p.relative_to(whole)) for p in whole.rglob("*.safetensors"))
    assert names
    assert filecmp.cmpfiles(whole, broken, ["metrics.jsonl", *names], shallow=False)[1:] == ([], [])
