"""Frozen experts on the grid of a 4-bit checkpoint: their numbers, and adapters that learn beside them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import whet
from tiny import RUN, tiny_model
from whet.config.learns import is_stack
from whet.models.grid import GRIDS, GROUP, on_grid, put_experts_on
from whet.types import ConfigError

CONVENTIONS = {"int4_rtn": (7.5, -8), "int4_kimi": (7.0, -7)}


def bf16(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(torch.bfloat16))


def by_hand(row: list[float], divisor: float, lowest: int) -> list[float]:
    """One number after the other, in Python's floats, each result rounded to bfloat16."""
    out: list[float] = []
    for at in range(0, len(row), 32):
        group = [bf16(w) for w in row[at : at + 32]]
        scale = bf16(max(abs(w) for w in group) / divisor)
        for w in group:
            ratio = bf16(w / scale) if scale else 0.0
            out.append(bf16(min(max(round(ratio), lowest), 7) * scale))
    return out


@pytest.mark.parametrize("grid", CONVENTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grid_by_hand(grid: str, dtype: torch.dtype) -> None:
    weight = torch.randn(2, 5, 72, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[0, 0, :32], weight[0, 1, 3] = 0.0, 40.0
    found = on_grid(weight, grid)
    assert found.dtype == dtype
    expected = [[by_hand(row, *CONVENTIONS[grid]) for row in matrix] for matrix in weight.double().tolist()]
    assert found.tolist() == expected
    assert (found[0, 0, :32] == 0).all()
    for group in found[..., :64].reshape(-1, GROUP):
        assert len(group.unique()) <= 16


def test_weights_of_a_kimi_checkpoint_stay_as_they_are_and_the_conventions_differ() -> None:
    """The largest number of a group has the code 7, so the scale comes out again."""
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    once = on_grid(weight, "int4_kimi")
    assert torch.equal(on_grid(once, "int4_kimi"), once)
    assert not torch.equal(on_grid(weight, "int4_rtn"), once)
    assert GRIDS == CONVENTIONS


def test_experts_alone_are_rounded() -> None:
    model = tiny_model("qwen3_moe")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    put_experts_on(model, "int4_rtn")
    for name, p in model.named_parameters():
        expected = on_grid(before[name], "int4_rtn") if is_stack(name) else before[name]
        assert torch.equal(p, expected), name
        assert torch.equal(p, before[name]) is not is_stack(name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "qwen3"}, "has no experts"),
        ({}, "give model.lora"),
        ({"modules_to_save": ["experts"]}, "is trained in full"),
    ],
)
def test_what_has_no_frozen_experts_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    tree = mixture()
    if "name" in change:
        del tree["model"]["scratch"]["num_experts"]
        tree["model"]["scratch"]["name"] = change["name"]
        tree["model"]["lora"]["targets"] = ["q_proj"]
    elif change:
        tree["model"]["lora"] |= change
    else:
        del tree["model"]["lora"]
    with pytest.raises(ConfigError, match=said):
        whet.train(run_dir=str(tmp_path), **tree)


def mixture(**model: Any) -> dict[str, Any]:
    tree = copy.deepcopy(RUN)
    tree["model"]["scratch"] |= {"name": "qwen3_moe", "num_experts": 4}
    tree["model"] |= {
        "lora": {"rank": 4, "targets": ["q_proj", "down_proj"]},
        "expert_grid": "int4_rtn",
        **model,
    }
    tree["train"] = {"steps": 4, "tasks_per_step": 4, "optimizer": {"lr": 0.05}}
    return tree


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_samples_with_the_rounded_experts_to_the_bit_and_resumes(tmp_path: Path) -> None:
    """The log-probs of sampling and training are equal; the export has the grid where no adapter acts."""
    whole = mixture(lora={"rank": 4, "targets": ["q_proj"]})
    done = whet.train(run_dir=str(tmp_path / "whole"), **whole)
    rows = [row for row in metrics(tmp_path / "whole") if "train/mismatch_max_nats" in row]
    assert [row["train/mismatch_max_nats"] for row in rows] == [0.0] * 4
    part = copy.deepcopy(whole)
    part["train"]["steps"] = 2
    whet.train(run_dir=str(tmp_path / "part"), **part)
    whet.train(run_dir=str(tmp_path / "part"), **whole)
    assert metrics(tmp_path / "part") == metrics(tmp_path / "whole")
    (export,) = (done.run_dir / "export").iterdir()
    model = AutoModelForCausalLM.from_pretrained(export)
    stacks = {name: p for name, p in model.named_parameters() if is_stack(name)}
    assert stacks
    for name, p in stacks.items():
        for row in p.detach().flatten(0, 1)[:, :32]:
            assert len(row.unique()) <= 16, name


def test_adapters_learn_beside_rounded_experts(tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "response": "cd"}, {"prompt": "ef", "response": "gh"}]
    tree = mixture(lora={"rank": 8, "targets": ["all-linear", "gate_up_proj", "down_proj"]}) | {
        "algorithm": "sft",
        "rewards": {},
        "rollout": {"sampling": {"max_tokens": 4}},
        "data": {"max_prompt_tokens": 8, "train": [{"rows": rows}]},
        "train": {"steps": 60, "tasks_per_step": 2, "optimizer": {"lr": 0.05}},
    }
    tree["model"]["scratch"]["initializer_range"] = 0.3
    whet.train(run_dir=str(tmp_path), **tree)
    losses = [row["train/loss"] for row in metrics(tmp_path) if "train/loss" in row]
    assert losses[-1] < losses[0] / 2
