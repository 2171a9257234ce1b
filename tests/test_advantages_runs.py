"""Advantages, groups and resampling through the whole program: they learn, they are booked, what is idle is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import whet
from batches import doubles, make_batch, ragged
from test_train_torch import engine, random_groups
from whet.algos.recipes import build
from whet.algos.whitening import of_top_entropy
from whet.batch import pack
from whet.config import schema
from whet.config.load import load
from whet.config.plan import plans
from whet.models.logprobs import OutputHead, collisions
from whet.training.micro_batches import MicroBatchPolicy
from whet.types import ConfigError, WhetError

ROOT = Path(__file__).parents[1]
SETUP: dict[str, Any] = {
    "model": {
        "scratch": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
        }
    },
    "tokenizer": {"build": "chars"},
    "machine": {"threads": 1},
    "track": {"trackers": ["jsonl"]},
    "checkpoint": {"interval": 0, "export": False},
    "data": {"max_prompt_tokens": 8, "train": [{"path": str(ROOT / "tests/data/words.jsonl")}]},
    "rollout": {"group_size": 4, "sampling": {"max_tokens": 5, "ignore_eos": True}},
    "train": {"steps": 14, "tasks_per_step": 8, "optimizer": {"lr": 1e-2}},
}


def share_of_a(response: str, task: whet.Task) -> float:
    return response.count("a") / max(len(response), 1)


def learn(run_dir: Path, algorithm: dict[str, Any], **sections: Any) -> list[dict[str, Any]]:
    result = whet.train(
        rewards=share_of_a, run_dir=str(run_dir), **{**SETUP, "algorithm": algorithm, **sections}
    )
    assert result.finished
    return result.metrics


# ---------------------------------------------------------------- what needs more than rewards learns


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "reinforce_pp"},
        pytest.param({"name": "remax"}, marks=pytest.mark.sweep),
        pytest.param(
            {"name": "opmd", "advantage": {"opmd_baseline": "logavgexp", "tau": 0.5}}, marks=pytest.mark.sweep
        ),
        pytest.param({"name": "raft"}, marks=pytest.mark.sweep),
        {"name": "gigpo", "advantage": {"gamma": 0.95}},
        {"name": "optimal_token_baseline"},
        {"name": "grpo", "resample": "pow", "advantage": {"std_scope": "batch", "rank_penalty": 0.25}},
        {"name": "grpo", "resample": "balance", "groups": {"keep_best": 2, "keep_worst": 1}},
    ],
    ids=lambda a: "-".join(map(str, a.values()))[:40],
)
def test_reward_rises(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    rewards = [m["reward/mean"] for m in learn(tmp_path / "run", algorithm)]
    assert rewards[0] < 0.25, "a new model must not know it yet"
    assert sum(rewards[-3:]) / 3 > 0.5


def test_a_student_comes_nearer_to_its_teacher(tmp_path: Path) -> None:
    learn(tmp_path / "run", {"name": "grpo"}, checkpoint={"interval": 0, "export": True})
    teacher = next((tmp_path / "run").glob("export/*/config.json")).parent
    metrics = learn(
        tmp_path / "student",
        {"name": "distill"},
        reference={"path": str(teacher)},
        rollout={**SETUP["rollout"], "group_size": 2},
    )
    gaps = [m["train/kl_reference_nats"] for m in metrics]
    assert gaps[-1] < 0.5 * gaps[0]
    # No reward was read, yet the student does what the teacher was rewarded for.
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 0.2


# ---------------------------------------------------------------- what is booked


def test_a_greedy_reply_that_fails_takes_its_group_along(tmp_path: Path) -> None:
    def only_variety(response: str, task: whet.Task) -> float:
        if len(set(response)) < 3 and ord(task.answer[0]) % 2:
            raise ValueError("a loop")
        return share_of_a(response, task)

    result = whet.train(
        rewards=only_variety,
        run_dir=str(tmp_path / "run"),
        **{**SETUP, "algorithm": {"name": "remax"}, "train": {**SETUP["train"], "steps": 2}},
        reward_workers={"max_failure_rate": 1.0},
    )
    for m in result.metrics:
        failed = {k: v for k, v in m.items() if k.startswith("ledger/failed/")}
        assert failed["ledger/failed/greedy_reply_rollouts"] > 0
        assert m["ledger/trained_rollouts"] > 0
        assert m["ledger/requested_rollouts"] == m["ledger/trained_rollouts"] + sum(failed.values())


def test_dropped_groups_are_asked_for_again_or_copied(tmp_path: Path) -> None:
    def first_letter(response: str, task: whet.Task) -> float:
        return float(response[:1] in "aeiou")

    def run(refill: str) -> list[dict[str, Any]]:
        sections = {**SETUP, "algorithm": {"name": "dapo", "refill": refill, "max_refills": 50}}
        sections["train"] = {**SETUP["train"], "steps": 2}
        return whet.train(rewards=first_letter, run_dir=str(tmp_path / refill), **sections).metrics

    asked, copied = run("sample"), run("copy")
    for m in asked:
        assert m["ledger/trained_rollouts"] == 32
        assert m["ledger/requested_rollouts"] == 32 + m.get("ledger/rejected/uniform_rollouts", 0)
    for m in copied:
        assert m["ledger/requested_rollouts"] == 32
        assert m["ledger/trained_rollouts"] + m["ledger/rejected/uniform_rollouts"] == 32
        assert 0 < m["ledger/trained_rollouts"] < 32


# ---------------------------------------------------------------- the sum of p^2


def test_collisions_by_hand_and_in_chunks() -> None:
    head = OutputHead(nn.Linear(2, 3, bias=False))
    with torch.no_grad():
        head.linear.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]).log1p())
    # Logits log 2, log 2, 0 -> 2/5, 2/5, 1/5: 9/25. At temperature 1/2: 4/9, 4/9, 1/9: 33/81.
    hidden = torch.tensor([[1.0, 1.0]] * 5)
    torch.testing.assert_close(collisions(hidden, head=head, chunk=2), torch.full((5,), 9 / 25))
    half = collisions(hidden, head=head, temperature=0.5, chunk=3)
    torch.testing.assert_close(half, torch.full((5,), 33 / 81))
    assert collisions(hidden[:0], head=head).shape == (0,)
    assert not half.requires_grad


@pytest.mark.parametrize("cut", [MicroBatchPolicy(), MicroBatchPolicy(max_tokens=20, temperature=0.7)])
def test_the_engine_s_collisions_are_those_of_its_distribution(cut: MicroBatchPolicy) -> None:
    made = engine(cut)
    batch = pack(random_groups())
    got = made.forward(batch, "collision")
    expected = torch.zeros(batch.tokens)
    for row in range(batch.rollouts):
        at = (batch.rollout_N == row).nonzero().flatten()
        logits = made.module(batch.token_ids_N[at][None]).logits[0].double() / cut.temperature
        p = logits.softmax(-1).square().sum(-1).float()
        expected[at[1:]] = p[:-1]
    torch.testing.assert_close(got, torch.where(batch.mask_N, expected, 0.0), rtol=1e-4, atol=1e-6)
    # The chance to sample the same token twice is at least that of the sampled one.
    assert (got >= made.forward(batch, "logprobs").exp().square() - 1e-6)[batch.mask_N].all()


@pytest.mark.parametrize("cut", [MicroBatchPolicy(), MicroBatchPolicy(max_tokens=20, temperature=0.7)])
def test_the_engine_s_entropies_are_those_of_its_distribution(cut: MicroBatchPolicy) -> None:
    made = engine(cut)
    batch = pack(random_groups())
    expected = torch.zeros(batch.tokens)
    for row in range(batch.rollouts):
        at = (batch.rollout_N == row).nonzero().flatten()
        logits = made.module(batch.token_ids_N[at][None]).logits[0].double() / cut.temperature
        expected[at[1:]] = torch.distributions.Categorical(logits=logits).entropy().float()[:-1]
    got = made.forward(batch, "entropy")
    torch.testing.assert_close(got, torch.where(batch.mask_N, expected, 0.0), rtol=1e-4, atol=1e-5)


def test_top_entropy_by_hand() -> None:
    # Five sampled tokens with entropies 3 1 2 | 5 4; a share of 0.4 is int(0.4 * 4) + 1 = 2 of them: 5 and 4.
    batch = make_batch([["paoaa", "paa"]], [1.0, 0.0])
    batch = replace(batch, entropy_N=doubles([0, 3, 9, 1, 2, 0, 5, 4]))
    kept = {0.4: [0, 0, 0, -0.5, -0.5], 0.6: [0.5, 0, 0, -0.5, -0.5], 1.0: [0.5, 0.5, 0.5, -0.5, -0.5]}
    for quantile, expected in kept.items():
        cfg = schema.AlgorithmConfig(name="dr_grpo", top_entropy_quantile=quantile)
        made = build(cfg, critic=schema.CriticConfig(), max_tokens=8)
        adv_N = made.advantage(batch, 0.0).adv_N
        assert adv_N is not None
        assert adv_N[batch.mask_N].tolist() == expected
        assert made.weights(batch, 1)[batch.mask_N].tolist() == [1 / 16] * 5, "the others keep their place"
        assert ("entropy" in made.needs) == (quantile < 1)


@given(seed=st.integers(0, 10_000), quantile=st.floats(0.01, 1.0))
@settings(max_examples=50, deadline=None)
def test_top_entropy_against_sorted_lists(seed: int, quantile: float) -> None:
    batch = ragged(seed)
    rng = torch.Generator().manual_seed(seed)
    entropy = torch.randint(0, 9, (batch.tokens,), generator=rng).double()
    adv = torch.randn(batch.tokens, generator=rng).double() * batch.mask_N
    got = of_top_entropy(adv, entropy, batch.mask_N, quantile=quantile)
    found = sorted(entropy[batch.mask_N].tolist())
    # TRL: at least the quantile 1 - q of all entropies, between two of them the upper one.
    least = found[math.ceil(round((1 - quantile) * (len(found) - 1), 9))]
    kept = [a if e >= least else 0.0 for a, e in zip(adv.tolist(), entropy.tolist(), strict=True)]
    assert got.tolist() == kept


def test_only_a_policy_has_collisions() -> None:
    critic = engine(MicroBatchPolicy())
    critic = replace_head(critic)
    with pytest.raises(WhetError, match="a critic engine does not compute collision"):
        critic.forward(pack(random_groups()), "collision")


def replace_head(made: Any) -> Any:
    made.value_head = nn.Linear(32, 1)
    return made


# ---------------------------------------------------------------- what cannot work, or has no effect

BASE: dict[str, Any] = {
    "model": {
        "scratch": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
        }
    },
    "tokenizer": {"build": "chars", "vocab_size": 50},
    "data": {"train": [{"path": "a.jsonl"}], "max_prompt_tokens": 64},
    "rewards": {"acc": {"function": "exact"}},
    "train": {"steps": 10},
}


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["advantage_clip=[1.0, 0.5]"], "1.0 is above 0.5"),
        (["name=distill"], "no teacher is given"),
        (["groups.keep_best=8"], "keeps all"),
        (["groups.keep_best=5", "groups.keep_worst=3"], "keeps all"),
        (["groups.keep_worst=1"], "compares several"),
        (["groups.uniform.by=[fmt]", "dynamic_sampling=true"], "'fmt' is not among rewards: acc"),
        (["groups.uniform.by=[acc]"], "has no effect: algorithm.dynamic_sampling is false"),
        (["groups.uniform.above=0.0"], "has no effect: algorithm.dynamic_sampling is false"),
        (["groups.uniform.ddof=0"], "has no effect: algorithm.groups.uniform.min_std is not given"),
        (["resample=poww"], r"known: pow, max_min, max_random, balance\Z"),
        (["groups.uniform=a.b:c"], r"'a.b:c' is not known; known: rewards\Z"),
        (["resample={name: max_min, power: 3.0}"], "has no effect: resample=max_min does not read it"),
        (
            ["advantage.normalize_std=false", "advantage.std_floor=0.1"],
            "has no effect: normalize_std is false",
        ),
        (["name=rloo", "advantage.std_ddof=0"], "std_ddof"),
        (["single_rollout=raw"], "single_rollout"),
        (["name=opo", "advantage.rank_penalty=0.1"], "rank_penalty"),
        (["advantage=opmd", "advantage.tau=2.0"], "has no effect: opmd_baseline is mean"),
        (["baseline_shift=-0.2"], "baseline_shift"),
        (["name=sft", "resample=pow"], "resample"),
        (["name=sft", "groups.keep_best=1"], "the replies are in the data"),
        (["name=mix", "resample=pow"], "would also draw the demonstrations"),
        (["name=grpo", "groups.unfinished=sometimes"], "unfinished"),
    ],
)
def test_refused(overrides: list[str], why: str) -> None:
    base = {**BASE, "rewards": {}} if "name=sft" in overrides else BASE
    with pytest.raises(ConfigError, match=why):
        plans(load(None, [f"algorithm.{o}" for o in overrides], base))


def test_groups_are_not_compared_by_a_reward_that_does_not_score_their_source() -> None:
    """The run would end at the first group of that source."""
    data = {"max_prompt_tokens": 64, "train": [{"name": "s", "path": "a.jsonl", "rewards": ["fmt"]}]}
    two = {**BASE, "rewards": {"acc": {"function": "exact"}, "fmt": {"function": "exact"}}, "data": data}
    for by in (
        ["algorithm.name=dapo", "algorithm.groups.uniform.by=[acc]"],
        ["algorithm.advantage={name: gdpo, parts: [acc, fmt/x]}"],
    ):
        with pytest.raises(
            ConfigError, match=r"'acc' does not score source 's' \(data\.train\[0\]\.rewards\)"
        ):
            plans(load(None, by, two))
        assert plans(load(None, [by[-1].replace("acc", "fmt"), *by[:-1]], two))


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.name=remax", "rollout.group_size=1"],
        ["algorithm.name=rloo", "algorithm.advantage.single_rollout=raw", "rollout.group_size=1"],
        ["algorithm.name=raft", "algorithm.groups.min_reward=0.5"],
        ["algorithm.name=dapo", "algorithm.groups.uniform.by=[acc]", "algorithm.groups.uniform.min_std=0.1"],
        ["algorithm.name=dapo", "algorithm.groups={uniform: {by: [acc/x], above: 0.5}}"],
        [
            "algorithm.advantage=opmd",
            "algorithm.advantage.tau=2.0",
            "algorithm.advantage.opmd_baseline=logavgexp",
        ],
        ["algorithm.whiten=population", "algorithm.advantage_clip=[null, 5.0]"],
        ["algorithm.name=distill", "reference.path=teacher"],
    ],
)
def test_accepted(overrides: list[str]) -> None:
    (planned,) = plans(load(None, overrides, BASE))
    assert planned.algorithm.kind == "online"


def test_a_greedy_policy_has_nothing_to_compare_with_its_greedy_reply() -> None:
    overrides = ["algorithm.name=remax", "rollout.sampling.temperature=0.0", "rollout.group_size=1"]
    with pytest.raises(ConfigError, match="as is the baseline reply of advantage=remax"):
        plans(load(None, overrides, BASE))


def test_stages_that_read_data_do_not_refine_it() -> None:
    """Groups of a stage that samples are not those of the stage before it that does not."""
    stages = [{"name": "a", "algorithm": {"name": "sft"}}, {"name": "b"}]
    overrides = ["algorithm.groups.truncated=drop"]
    first, second = plans(load(None, overrides, {**BASE, "stages": stages}))
    assert (first.algorithm.groups.truncated, second.algorithm.groups.truncated) == ("keep", "drop")


def test_a_batch_remembers_its_baselines_and_counts_through_select() -> None:
    groups = random_groups()
    with_baseline = [
        replace(g, rollouts=tuple(replace(r, baseline=float(r.index)) for r in g.rollouts)) for g in groups
    ]
    assert pack(with_baseline).baseline_R.tolist() == [0.0, 1.0, 2.0] * 4
    assert pack([groups[0], with_baseline[1]]).baseline_R is None
