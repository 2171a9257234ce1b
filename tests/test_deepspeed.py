"""DeepSpeed as a train engine: its numbers against those of one process, its files, and what its config may say.

Two ranks start once for all of it; tests/test_train_contract.py has the whole contract, stage by stage (`make
test-backends`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import grid
from grid import WAYS, Layout
from test_ranks_grid import ROUNDING
from test_train_torch import pg_loss, weighted
from whet.config import checks_run, deepspeed
from whet.config.load import load
from whet.config.plan import plans
from whet.models.mesh import Dims
from whet.training.ranks import Ranks
from whet.types import ConfigError, Json

CUT = {"stage3_param_persistence_threshold": 0}
"""DeepSpeed leaves small tensors whole; those of a tiny model are all small."""
CPU = {"device": "cpu"}
ZERO: dict[str, Json] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3, **CUT},
    "stage 3, small tensors whole": {"stage": 3},
    "stage 1, optimizer on the host": {"stage": 1, "offload_optimizer": CPU},
    "stage 2, optimizer on the host": {"stage": 2, "offload_optimizer": CPU},
    "stage 3, all on the host": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, **CUT},
    "stage 3, hpZ": {"stage": 3, "zero_hpz_partition_size": 2, **CUT},
    "stage 3, overlapped": {"stage": 3, "overlap_comm": True, **CUT},
}


def layout(name: str, **more: Any) -> Layout:
    return Layout(Dims(dp_shard=2), zero=ZERO[name], **more)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pytest.importorskip("deepspeed")
    ranks = grid.started(2)
    try:
        yield ranks
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        (layout("stage 1"), "by tokens"),
        (layout("stage 2"), "LoRA"),
        (layout("stage 3"), "checkpointing"),
        (layout("stage 3, all on the host", family=grid.MOE), "by rollouts"),
        (layout("stage 3, small tensors whole"), "LoRA"),
        (layout("stage 2, optimizer on the host"), "shared prompts"),
        (layout("stage 3, hpZ"), "shared prompts"),
    ],
    ids=lambda each: "" if isinstance(each, Layout) else each,
)
def test_log_probs_gradients_and_three_steps_are_those_of_one_process(
    ranks: Ranks, shape: Layout, way: str
) -> None:
    """Several micro-batches; the third of three steps is clipped, as all are."""
    errors, note = grid.worst()
    grid.policy(ranks, shape, WAYS[way], note)
    assert all(e <= ROUNDING[what] for what, (e, _) in errors.items()), errors


@pytest.mark.parametrize("name", ["stage 2", "stage 3"])
def test_what_is_beside_the_model_learns_too(ranks: Ranks, name: str) -> None:
    errors, note = grid.worst()
    grid.critic(ranks, layout(name), WAYS["shared prompts"], note)
    assert all(e <= ROUNDING[what] for what, (e, _) in errors.items()), errors


@pytest.mark.parametrize(
    ("name", "way"), [("stage 1", "shared prompts"), ("stage 3", "LoRA"), ("stage 3, all on the host", "by tokens")]
)
def test_files_are_those_of_one_process(ranks: Ranks, tmp_path: Path, name: str, way: str) -> None:
    """To the byte; and either goes on from what the other has saved."""
    errors, note = grid.worst()
    grid.resumed(ranks, layout(name), WAYS[way], note, folder=tmp_path)
    assert all(e <= ROUNDING[what] for what, (e, _) in errors.items()), errors


@pytest.mark.parametrize("family", ["qwen3", pytest.param(grid.MOE, marks=pytest.mark.sweep)])
def test_a_step_on_each_from_the_checkpoint_of_another(ranks: Ranks, tmp_path: Path, family: str) -> None:
    chain = [layout("stage 3", family=family), Layout(Dims(tp=2), family=family), layout("stage 1", family=family)]
    errors, note = grid.worst()
    grid.handed_on(ranks, chain, WAYS["shared prompts"], note, folder=tmp_path)
    assert all(e <= ROUNDING[what] for what, (e, _) in errors.items()), errors


@pytest.mark.parametrize("name", ["stage 2", "stage 3"])
def test_a_step_that_is_not_finite_is_skipped(ranks: Ranks, name: str) -> None:
    way, how = WAYS["shared prompts"], grid.learning(optimizer=grid.ADAM)
    one, many = grid.pair(ranks, layout(name), way, model=grid.model_of(layout(name), way), **how)
    batch = weighted()
    assert batch.adv_N is not None
    bad = replace(batch, adv_N=torch.where(batch.rollout_N == 2, torch.inf, batch.adv_N))
    for engine in (one, many):
        engine.update(weighted(1), pg_loss)
        numbers = engine.update(bad, pg_loss)
        assert numbers["skipped_steps"] == 1.0
        assert "grad_norm" not in numbers
    errors, note = grid.worst()
    grid.note_metrics(note, many.update(weighted(2), pg_loss), one.update(weighted(2), pg_loss))
    grid.note_tensors(note, "weights", dict(many.weights()), dict(one.weights()))
    assert all(e <= ROUNDING[what] for what, (e, _) in errors.items()), errors


@pytest.mark.parametrize("name", ["stage 2", "stage 3"])
def test_a_reference_takes_a_share_of_the_policy(ranks: Ranks, name: str) -> None:
    way = WAYS["shared prompts"]
    one, many = grid.pair(ranks, layout(name), way, model=grid.model_of(layout(name), way), **grid.learning())
    far = grid.model_of(layout(name), way, seed=9).requires_grad_(False)
    far_one, far_many = grid.pair(ranks, layout(name), way, model=far, role="reference")
    for reference, policy in ((far_one, one), (far_many, many)):
        reference.copy_from(policy, 0.25)
    found, expected = (far.forward(weighted(), "entropy") for far in (far_many, far_one))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
