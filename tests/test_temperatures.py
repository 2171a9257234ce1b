"""Sources that are sampled at temperatures of their own: the trainer divides each rollout's logits by its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import whet
from test_groups import rewarded
from whet.batch import pack
from whet.trained_models import Temperatures

SOURCES = {"a": {"temperature": 0.5}, "b": {"temperature": 2.0}}
MISMATCH = "train/mismatch_max_nats"


def early(response: str) -> float:
    """The share of letters in the first half of the alphabet."""
    return sum(letter < "n" for letter in response) / 4


def trained(
    run_dir: Path, *overrides: str, sources: Any = SOURCES
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The numbers of each step, and the weights at the end."""
    words = {"path": "tests/data/words.jsonl", "limit": 4}
    whet.train(
        run_dir=str(run_dir),
        model={"scratch": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}},
        tokenizer={"build": "chars"},
        data={"train": [{**words, "name": "a"}, {**words, "name": "b", "skip": 4}]},
        rewards=early,
        algorithm={"kl": {"coef": 0.1}, "entropy_coef": 0.01},
        rollout={"group_size": 4, "sampling": {"max_tokens": 4}, "sources": sources},
        train={
            "steps": 2,
            "tasks_per_step": 4,
            "optimizer": {"name": "sgd", "lr": 1.0, "max_grad_norm": None},
        },
        machine={"device": "cpu"},
        overrides=[*overrides],
    )
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [step for step in steps if "train/loss" in step], load_file(
        run_dir / "export/main/model.safetensors"
    )


def near(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.allclose(one[key], other[key], rtol=1e-4, atol=1e-6) for key in one)


def test_what_is_trained_is_the_distribution_that_was_sampled(tmp_path: Path) -> None:
    """To the bit, without a second forward; by train.temperature all are trained alike, and the log-probs differ."""
    steps, own = trained(tmp_path / "own")
    assert [step[MISMATCH] for step in steps] == [0.0, 0.0]
    assert all(step["train/ratio_max"] == 1.0 for step in steps)
    steps, alike = trained(tmp_path / "alike", "train.temperature=1.0")
    assert all(step[MISMATCH] > 0.01 for step in steps)
    assert not near(own, alike)
    steps, _ = trained(tmp_path / "two", sources={"a": {"temperature": 0.5}})
    assert [step[MISMATCH] for step in steps] == [0.0, 0.0]


def test_one_temperature_of_all_sources_is_that_of_the_run(tmp_path: Path) -> None:
    each = {"temperature": 0.5}
    _, own = trained(tmp_path / "own", sources={"a": each, "b": each})
    _, same = trained(tmp_path / "same", "rollout.sampling.temperature=0.5", sources={})
    assert all(torch.equal(own[key], same[key]) for key in same)


@pytest.mark.parametrize(
    "layout",
    [
        "train.micro_batch_rollouts=1",
        "train.share_prompts=false",
        "train.parallel={dp_replicate: 2}",
        "train.parallel={tp: 2}",
        "train.parallel={cp: 2}",
    ],
)
def test_weights_do_not_depend_on_how_the_work_is_cut(tmp_path: Path, layout: str) -> None:
    _, whole = trained(tmp_path / "whole")
    _, cut = trained(tmp_path / "cut", layout)
    assert near(cut, whole)


def test_demonstrations_and_what_the_reference_reads_have_theirs() -> None:
    groups = [rewarded(1.0, 0.0), rewarded(0.0)]
    groups = [replace(g, task=replace(g.task, source=name)) for g, name in zip(groups, "ab")]
    temperatures = Temperatures({"a": 0.5}, 2.0)
    assert temperatures(pack(groups), groups).temperature_R.tolist() == [0.5, 0.5, 2.0]
    batch = replace(pack(groups), expert_R=torch.tensor([False, True, False]), reprompted=pack(groups))
    own = [replace(groups[0], rollouts=groups[0].rollouts[:1]), groups[1]]
    found = temperatures(batch, own)
    assert found.temperature_R.tolist() == [0.5, 2.0, 2.0]
    assert found.reprompted.temperature_R.tolist() == [0.5, 2.0, 2.0]
