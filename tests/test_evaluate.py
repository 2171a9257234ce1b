"""mean@k, pass@n, maj@k, best@n, worst@n and std@k by hand and against every choice of replies; who is asked how."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from whet import evaluation as module
from whet.cli import app
from whet.config.evaluation import (
    EvalSampling,
    asked,
    eval_problems,
    eval_sampling,
    reply_tokens,
    reward_weights,
)
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import Config, RewardConfig
from whet.evaluation import accuracy, best_of, check_sources, commonest, doublings, evaluate, pass_at, shown
from whet.rewards.combine import RewardSet
from whet.track.accuracy import by_source, parted
from whet.types import ConfigError, Group, Json, Rollout, Task, WhetError


def reply(answer: str, reward: float | None) -> Rollout:
    return Rollout.one_strand(
        task=Task(uid=0, source="a", prompt=""), index=0, token_ids=[1, 2], mask=[0, 1], logprobs=[0.0, 0.0],
        sample_logprobs=[0.0, 0.0], versions=[-1, 0], finish_reason="stop", text=answer, reward=reward,
        error=None if reward is not None else "reward r: raised",
    )  # fmt: skip


def group(source: str, *replies: Rollout) -> Group:
    return Group(Task(uid=0, source=source, prompt=""), replies)


# ---------------------------------------------------------------- numbers


def test_by_hand() -> None:
    groups = [
        group("a", reply("7", 1.0), reply("7", 1.0), reply("8", 0.0), reply("9", 0.0)),  # majority 7: right
        group("a", reply("3", 0.0), reply("3", 0.0), reply("4", 1.0), reply("5", None)),  # majority 3: wrong
        group("b", reply("1", 0.0), reply("1", 0.0), reply("1", 0.0), reply("1", 0.0)),
    ]
    m = accuracy(groups, success=1.0)
    assert m["eval/a/mean@4"] == 3 / 8
    assert m["eval/a/pass@4"] == 1.0
    # of the 6 pairs, without a passing reply: 1 of the first task (8, 9), 3 of the second
    assert m["eval/a/pass@2"] == pytest.approx((5 / 6 + 3 / 6) / 2, abs=1e-15)
    assert m["eval/a/maj@4"] == 0.5
    assert m["eval/a/unscored"] == 1
    assert m["eval/a/reward_mean"] == pytest.approx(3 / 7)
    # the second task has three scored replies: 0, 0, 1; two of its three pairs hold the 1, none is all 1
    assert m["eval/a/best@2"] == pytest.approx((5 / 6 + 2 / 3) / 2, abs=1e-15)
    assert m["eval/a/worst@2"] == pytest.approx((1 / 6 + 0) / 2, abs=1e-15)
    assert (m["eval/a/best@4"], m["eval/a/worst@4"], m["eval/a/std@4"]) == (
        1.0,
        0.0,
        0.5,
    )  # the first task alone
    assert (m["eval/b/mean@4"], m["eval/b/pass@4"], m["eval/b/maj@4"]) == (0, 0, 0)
    assert m["eval/all/mean@4"] == m["eval/accuracy"] == 3 / 12
    assert m["eval/all/pass@4"] == pytest.approx(2 / 3)
    assert m["eval/all/tasks"] == 3


def test_every_part_of_the_rewards_is_a_metric() -> None:
    """Of scored replies, where it has a value: a reward of weight 0 is a metric of the user's."""
    right = replace(reply("7", 1.0), reward_parts={"right": 1.0, "form/tags": 0.25})
    wrong, lost = replace(reply("8", 0.0), reward_parts={"right": 0.0}), reply("9", None)
    metrics = accuracy([group("org/a", right, wrong), group("b", wrong, lost)], success=1.0)
    parts = {name: number for name, number in metrics.items() if "/part/" in name}
    assert parts == {
        "eval/org/a/part/right_mean": 0.5, "eval/org/a/part/form/tags_mean": 0.25, "eval/b/part/right_mean": 0.0,
        "eval/all/part/right_mean": pytest.approx(1 / 3), "eval/all/part/form/tags_mean": 0.25,
    }  # fmt: skip
    assert parted("eval/org/a/part/form/tags_mean") == ("org/a", "part/form/tags_mean")
    assert (parted("eval/org/a/mean@2"), parted("eval/accuracy")) == (("org/a", "mean@2"), ("", "accuracy"))
    table = by_source(metrics)
    assert [str(column.header) for column in table.columns] == ["", "b", "org/a", "all"]


def test_a_source_is_printed_as_it_is_called() -> None:
    console = Console(file=io.StringIO())
    console.print(by_source({"eval/[/INST]/mean@1": 0.5, "eval/[red]/part/[bold]_mean": 1.0}))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines == [["[/INST]", "[red]"], ["mean@1", "0.5"], ["part/[bold]_mean", "1"]]


def test_a_file_of_numbers_is_json_whatever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"stage": "sft", "step": 1, "eval/a/loss_nats": 800.0, "eval/a/perplexity": math.inf}
    monkeypatch.setattr("whet.bench.evaluate", lambda *_, **__: [found])
    done = CliRunner().invoke(app, ["eval", str(tmp_path), "-o", str(tmp_path / "numbers.json")])
    assert done.exit_code == 0, done.output
    numbers = json.loads((tmp_path / "numbers.json").read_text(), parse_constant=pytest.fail)
    assert numbers == [found | {"eval/a/perplexity": None}]


def test_one_source_has_no_all_and_one_reply_no_majority() -> None:
    m = accuracy([group("a", reply("x", 1.0))], success=1.0)
    assert m["eval/a/mean@1"] == m["eval/accuracy"] == 1.0
    assert not [k for k in m if "all" in k or k.split("/")[-1].startswith(("pass@", "maj@", "best@", "std@"))]


def test_sources_with_other_numbers_of_replies_share_the_smaller_k() -> None:
    """A task counts once over all, however many replies it has; pass@2 of four replies is exact."""
    four = group("a", reply("7", 1.0), reply("8", 0.0), reply("8", 0.0), reply("8", 0.0))
    two = group("b", reply("1", 1.0), reply("2", 1.0))
    m = accuracy([four, two], success=1.0)
    assert m["eval/a/mean@4"] == 1 / 4
    assert m["eval/all/mean@2"] == m["eval/accuracy"] == (1 / 4 + 1) / 2
    assert m["eval/all/pass@2"] == (1 / 2 + 1) / 2
    assert m["eval/all/maj@2"] == 1.0  # of the first two replies of each, the first of equals
    assert "eval/all/mean@4" not in m
    assert "eval/all/pass@4" not in m


def test_nothing_scored_leaves_no_best_and_no_worst() -> None:
    m = accuracy([group("a", reply("x", None), reply("y", None))], success=1.0)
    assert (m["eval/a/mean@2"], m["eval/a/pass@2"], m["eval/a/unscored"]) == (0, 0, 2)
    assert not [k for k in m if "best@" in k or "worst@" in k or "std@" in k]


def test_success_is_exact() -> None:
    assert accuracy([group("a", reply("x", 0.9999999999999999))], success=1.0)["eval/accuracy"] == 0.0
    assert accuracy([group("a", reply("x", 0.25))], success=0.25)["eval/accuracy"] == 1.0


def test_the_first_of_equally_common_answers_counts() -> None:
    a, b = reply("a", 1.0), reply("b", 0.0)
    assert commonest([b, a]) is b
    assert commonest([b, a, a]) is a
    assert commonest([reply(" a", 0.0), b, b, a]) is not b


@pytest.mark.parametrize(("k", "ns"), [(1, []), (2, [2]), (3, [2, 3]), (5, [2, 4, 5]), (16, [2, 4, 8, 16])])
def test_which_n_are_given(k: int, ns: list[int]) -> None:
    assert doublings(k) == ns


rewards_of_a_task = st.lists(st.integers(-8, 8).map(lambda x: x / 4), min_size=1, max_size=8)


@given(rewards_of_a_task, st.data())
def test_against_every_choice_of_replies(rewards: list[float], data: st.DataObject) -> None:
    """The closed forms are the means over all C(N, n) subsets, worked out one by one in fractions."""
    n = data.draw(st.integers(1, len(rewards)))
    subsets = list(itertools.combinations(rewards, n))

    def mean(values: list[float]) -> float:
        return float(sum(map(Fraction, values)) / len(values))

    assert best_of(n, rewards) == pytest.approx(mean([max(s) for s in subsets]), abs=1e-12)
    assert -best_of(n, [-x for x in rewards]) == pytest.approx(mean([min(s) for s in subsets]), abs=1e-12)
    passed = sum(x >= 0.5 for x in rewards)
    some = mean([float(any(x >= 0.5 for x in s)) for s in subsets])
    assert pass_at(n, passed=passed, replies=len(rewards)) == pytest.approx(some, abs=1e-12)


@given(st.lists(rewards_of_a_task, min_size=1, max_size=4))
def test_laws(tasks: list[list[float]]) -> None:
    """worst <= mean <= best, both monotone in n; std as Python's own; order of the replies is no matter."""
    k = min(map(len, tasks))
    tasks = [t[:k] for t in tasks]
    m = accuracy([group("a", *(reply(str(x), x) for x in t)) for t in tasks], success=0.5)
    back = accuracy([group("a", *(reply(str(x), x) for x in reversed(t))) for t in tasks], success=0.5)
    names = [name for name in m if "maj@" not in name]
    assert [m[n] for n in names] == pytest.approx([back[n] for n in names], abs=1e-12)
    best = [m["eval/a/reward_mean"], *(m[f"eval/a/best@{n}"] for n in doublings(k))]
    worst = [m["eval/a/reward_mean"], *(m[f"eval/a/worst@{n}"] for n in doublings(k))]
    assert all(b >= a - 1e-12 for a, b in itertools.pairwise(best))
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(worst))
    if k > 1:
        assert m[f"eval/a/std@{k}"] == pytest.approx(
            statistics.fmean(map(statistics.pstdev, tasks)), abs=1e-12
        )
        assert m[f"eval/a/best@{k}"] == pytest.approx(statistics.fmean(map(max, tasks)), abs=1e-12)


def test_hundreds_of_replies_are_no_matter() -> None:
    assert pass_at(512, passed=1, replies=1024) == 0.5
    assert best_of(512, [0.0] * 1023 + [1.0]) == pytest.approx(0.5, abs=1e-12)
    assert math.isfinite(best_of(1000, [float(i) for i in range(2000)]))


# ---------------------------------------------------------------- who is asked how, judged by what

BASE: dict[str, Json] = {
    "model": {
        "scratch": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        }
    },
    "tokenizer": {"build": "chars"},
    "data": {
        "train": [{"rows": [{"prompt": "a", "answer": "b"}], "name": "toy"}],
        "eval": [
            {"rows": [{"prompt": "c", "answer": "d"}], "name": "x"},
            {"rows": [{"prompt": "e"}], "name": "y"},
        ],
    },
    "train": {"steps": 2},
    "rewards": {"right": {"function": "exact"}, "long": {"function": "module:f", "weight": 0.5}},
}


def config(*overrides: str) -> Config:
    loaded = load(None, overrides, BASE)
    plans(loaded)
    return loaded.config


def test_a_source_may_be_asked_in_its_own_way() -> None:
    cfg = config(
        "rollout.sampling.top_k=5", "rollout.sampling.max_tokens=7", "eval.samples=2", "eval.sampling.temperature=0.5",
        "eval.sources.x.samples=8", "eval.sources.x.sampling.max_tokens=9",
    )  # fmt: skip
    usual, own = asked(cfg, "y"), asked(cfg, "x")
    assert (usual.samples, usual.sampling) == (2, eval_sampling(cfg))
    assert (usual.sampling.temperature, usual.sampling.top_k, usual.sampling.max_tokens) == (0.5, 0, 7)
    assert (own.samples, own.sampling.temperature, own.sampling.max_tokens) == (8, 0.5, 9)
    assert reply_tokens(cfg) == 9  # the engine must be able to hold it
    assert plans(load(None, ["eval.sources.x.sampling.max_tokens=900"], BASE))[0].reply_tokens == 900


def test_greedy_episodes_of_one_task_may_differ() -> None:
    """By what the environment answers."""
    plain = load(None, ["eval.samples=2"], BASE).config
    played = load(None, ["eval.samples=2", "rollout.env.make=agent.py:make"], BASE).config
    assert "eval.samples" in dict(eval_problems(plain))
    assert "eval.samples" not in dict(eval_problems(played))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "eval.sources.z.samples=2",
            r"eval\.sources\.z: no source of data\.eval has this name; they are: x, y",
        ),
        (
            "eval.sources.x.samples=2",
            r"eval\.sources\.x\.samples: 2 greedy replies to a task are all the same",
        ),
        (
            "eval.sources.x.sampling.min_tokens=999",
            r"eval\.sources\.x\.sampling\.min_tokens: 999 is more than",
        ),
        ("eval.reward=rihgt", r"'rihgt' is not among rewards: right, long; did you mean 'right'"),
        ("eval.reward={right: 0.0}", "every weight is 0"),
        ("eval.reward={}", "names no reward"),
        (
            "data.eval.0.rewards=[long] eval.reward=right",
            r"data\.eval\[0\]\.rewards: none of these rewards is in eval.reward, .*: right",
        ),
        ("eval.offline=true", "only `whet eval` reads it, training does not"),
        ("data.eval.0.response=answer", "only stages that train on given replies read it"),
    ],
)
def test_what_cannot_work_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(*override.split(" ") if "rewards" in override else [override])


def test_a_label_that_no_row_has_is_refused_when_the_rows_are_known() -> None:
    tasks = [Task(uid=0, source="gsm8k", prompt="")]
    check_sources(["gsm8k"], tasks)
    with pytest.raises(ConfigError, match=r"no held-out task has the source 'gsmk8'; did you mean 'gsm8k'"):
        check_sources(["gsmk8"], tasks)


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (["all", "b"], "'all', and the numbers over all sources are called so"),
        (["a", "a/part"], "'a/part', and eval/SOURCE/part/NAME is a part"),
        (["a/part/b"], "'a/part/b', and eval/SOURCE/part/NAME is a part"),
    ],
)
def test_a_label_whose_numbers_would_have_the_names_of_others_is_refused(
    sources: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_sources([], [Task(uid=n, source=source, prompt="") for n, source in enumerate(sources)])


def test_other_labels_have_numbers_of_their_own() -> None:
    """A single source may be called all: it is all. No number of one source replaces another's."""
    check_sources([], [Task(uid=0, source="all", prompt="")])
    names = ["part", "part/a", "a/parts", "accuracy", "samples", "a/all", "all/a", "a/b/c", "a/b"]
    check_sources([], [Task(uid=0, source=name, prompt="") for name in names])
    right = replace(reply("x", 1.0), reward_parts={"tokens": 9.0, "mean@1": 9.0})
    metrics = accuracy([group(name, right) for name in names], success=1.0)
    of_one = accuracy([group("a", right)], success=1.0)
    assert len(metrics) == (len(of_one) - 1) * (len(names) + 1) + 1
    assert {parted(key)[0] for key in metrics} == {*names, "all", ""}


def test_what_judges() -> None:
    assert reward_weights(config()) == {"right": 1.0, "long": 0.5}
    assert reward_weights(config("eval.reward=long")) == {"long": 1.0}
    assert reward_weights(config("eval.reward={right: 0.25, long: 2.0}")) == {"right": 0.25, "long": 2.0}


def length(response: str, task: Task) -> float:
    return float(len(response))


def broken(response: str, task: Task) -> float:
    raise RuntimeError("must not be called")


def run_evaluation(
    cfg: Config, tasks: list[Task], judged_by: Callable[[str, Task], float] = length
) -> tuple[list[Group], list[tuple[EvalSampling, list[int]]]]:
    """Every reply to a task is its uid as text; and what was asked together."""
    calls: list[tuple[EvalSampling, list[int]]] = []

    async def ask(members: list[Task], how: EvalSampling) -> list[Group]:
        calls.append((how, [t.uid for t in members]))
        return [
            Group(t, tuple(_rollout(t, index) for index in range(how.samples))) for t in members
        ]  # fmt: skip

    rewards = {"long": RewardConfig(function="object:long"), "bad": RewardConfig(function="object:bad")}
    with RewardSet.from_config(rewards, cfg.reward_workers, {"long": judged_by, "bad": broken}) as judge:
        return asyncio.run(evaluate(ask, tasks, judge, cfg=cfg)), calls


def _rollout(task: Task, index: int) -> Rollout:
    return Rollout.one_strand(
        task=task, index=index, token_ids=[1], mask=[1], logprobs=[0.0], sample_logprobs=[0.0], versions=[0],
        finish_reason="stop", text="x" * task.uid,
    )  # fmt: skip


def test_tasks_asked_alike_go_together_and_come_back_in_order() -> None:
    cfg = Config.model_validate(
        {"eval": {"reward": {"long": 2.0}, "sources": {"b": {"samples": 3}}}, "rollout": {"max_num_seqs": 6}}
    )
    tasks = [Task(uid=uid, source="b" if uid % 2 else "a", prompt="") for uid in range(10)]
    groups, calls = run_evaluation(cfg, tasks)
    assert [g.task.uid for g in groups] == list(range(10))
    assert [(how.samples, uids) for how, uids in calls] == [
        (1, [0, 2, 4, 6, 8]), (3, [1, 3]), (3, [5, 7]), (3, [9]),
    ]  # fmt: skip
    # judged by that reward alone: the broken one is not called, so nothing is unscored
    assert [[r.reward for r in g.rollouts] for g in groups] == [
        [2.0 * uid] * (3 if uid % 2 else 1) for uid in range(10)
    ]
    assert {name for g in groups for r in g.rollouts for name in r.reward_parts} == {"long"}


@pytest.mark.parametrize(("failing", "unscored"), [({3}, 3), ({3, 4, 5}, 9)])
def test_failures_are_counted_over_the_whole_evaluation_and_not_over_what_is_asked_at_once(
    failing: set[int], unscored: int
) -> None:
    cfg = Config.model_validate(
        {"eval": {"reward": "long", "samples": 3}, "reward_workers": {"max_failure_rate": 0.1},
         "rollout": {"max_num_seqs": 3}}
    )  # fmt: skip

    def fails(response: str, task: Task) -> float:
        if task.uid in failing:
            raise RuntimeError("cannot read this answer")
        return 1.0

    tasks = [Task(uid=uid, source="a", prompt="") for uid in range(20)]
    if unscored > 6:
        with pytest.raises(WhetError, match=r"9 of 60 rollouts .* are unscored, .*cannot read this answer"):
            run_evaluation(cfg, tasks, fails)
    else:
        groups, calls = run_evaluation(cfg, tasks, fails)
        assert len(calls) == len(tasks)
        assert sum(r.reward is None for g in groups for r in g.rollouts) == unscored


def test_every_engine_has_tasks_at_the_same_time() -> None:
    tasks = [Task(uid=uid, source="a", prompt="") for uid in range(10)]
    for rollout, sizes in (
        ({}, [2] * 5),
        ({"replicas": 2}, [4, 4, 2]),
        ({"engine": "vllm", "server": {"urls": ("http://127.0.0.1:1", "http://127.0.0.1:2")}}, [4, 4, 2]),
    ):
        cfg = Config.model_validate(
            {"eval": {"reward": "long", "samples": 3}, "rollout": {"max_num_seqs": 6, **rollout}}
        )
        assert [len(uids) for _, uids in run_evaluation(cfg, tasks)[1]] == sizes, rollout


def test_shown_samples_are_the_same_tasks_every_time() -> None:
    tasks = [Task(uid=uid, source="a", prompt="p") for uid in range(20)]
    groups = [Group(t, (_rollout(t, 0), _rollout(t, 1))) for t in tasks]
    first = shown(groups, count=5, seed=1)
    assert shown(groups, count=5, seed=1) == first
    assert len({row["uid"] for row in first}) == 5
    assert [row["uid"] for row in first] == sorted(row["uid"] for row in first)
    assert {row["uid"] for row in shown(groups, count=5, seed=2)} != {row["uid"] for row in first}
    assert [row["uid"] for row in shown(groups, count=3, seed=1)] == [
        u
        for u in (row["uid"] for row in first)
        if u in {row["uid"] for row in shown(groups, count=3, seed=1)}
    ]
    assert first[0] == {
        "uid": first[0]["uid"], "source": "a", "prompt": "p", "reply": "x" * first[0]["uid"], "answer": None,
        "extracted": None, "reward": None,
    }  # fmt: skip
    assert len(shown(groups, count=100, seed=1)) == 20


def test_the_module_needs_no_torch() -> None:
    import subprocess
    import sys

    code = f"import sys, {module.__name__}; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
    )
