"""Ranks: whatever the layout, log-probs, metrics, gradients and weights of one process. The whole grid is measured by
`benchmarks/layouts.py`; here each layout stands with one way to train, on processes that start once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import grid
from grid import LAYOUTS, WAYS, Layout, Way
from test_reprompt import two_prompts
from test_train_torch import pg_loss, weighted
from whet.algos.distillation import Divergence, TopK
from whet.models import kernels
from whet.models.mesh import Dims
from whet.models.sharded import Sharding
from whet.training.engine import FullKl
from whet.training.ranks import Ranks
from whet.training.torch import TorchEngine
from whet.types import CheckpointError

DROPPING = replace(WAYS["LoRA"], cut=replace(WAYS["LoRA"].cut, checkpoint=True))
TIED = replace(LAYOUTS["pp 2"], family="gemma")
POLICIES: list[tuple[Layout, Way]] = [
    (LAYOUTS["dp_replicate 2"], WAYS["by tokens"]),
    (
        Layout(Dims(dp_shard=2), family="gemma", sharding=Sharding(reshard=False, prefetch=0)),
        WAYS["checkpointing"],
    ),
    (replace(LAYOUTS["dp_shard 2"], family=grid.MOE), WAYS["by rollouts"]),
    (LAYOUTS["tp 2"], DROPPING),
    (LAYOUTS["cp 2"], WAYS["offload"]),
    (TIED, WAYS["by rollouts"]),
    (LAYOUTS["pp 2 interleaved"], DROPPING),
    (LAYOUTS["ep 2"], WAYS["checkpointing"]),
    (LAYOUTS["ep 2"], grid.EACH),
    (LAYOUTS["ep 2"], grid.SHARED),
    (replace(LAYOUTS["dp_shard 2"], family=grid.MOE), grid.EACH),
    (Layout(Dims(dp_shard=4), sharding=Sharding(min_parameters=10_000)), WAYS["shared prompts"]),
    (LAYOUTS["dp_shard 2 x tp 2"], WAYS["LoRA"]),
    (LAYOUTS["cp 2 x pp 2"], WAYS["shared prompts"]),
    (LAYOUTS["pp 2 x ep 2"], WAYS["LoRA"]),
    (LAYOUTS["dp_shard 4 x ep 2"], grid.EACH),
    (LAYOUTS["dp_shard 4 x ep 2"], grid.SHARED),
    (LAYOUTS["dp_replicate 2 x ep 2"], grid.EACH),
    (LAYOUTS["pp 2 x ep 2"], grid.SHARED),
]
ROUNDING = {"gradients": 3e-6, "metrics": 3e-6, "weights": 1e-6, "log-probs": 2e-6, "read back": 0.0}
"""Of float32: one process is as far from float64 (grid.own_rounding)."""


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.sweep)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    pool = grid.started(request.param)
    yield pool
    pool.close()


def assert_small(errors: dict[str, tuple[float, str]], at: object) -> None:
    assert errors
    assert all(e <= ROUNDING[what] for what, (e, _) in errors.items()), (at, errors)


def test_any_layout_learns_the_same(ranks: Ranks) -> None:
    for layout, way in POLICIES:
        if layout.dims.world == ranks.dims.world:
            errors, note = grid.worst()
            grid.policy(ranks, layout, way, note)
            assert_small(errors, layout)
            if layout.dims == Dims(pp=2):  # the same sums in the same order
                assert errors["log-probs"] == (0.0, "")


CRITICS = ("dp_shard 2", "pp 2", "tp 2 x pp 2")
REFERENCES = ("tp 2", "pp 2 interleaved", "dp_shard 2 x pp 2")


@pytest.mark.parametrize(
    ("what", "names"),
    [(grid.critic, CRITICS), pytest.param(grid.reference, REFERENCES, marks=pytest.mark.sweep)],
)
def test_critics_and_references(ranks: Ranks, what: grid.Compared, names: tuple[str, ...]) -> None:
    for name in names:
        if LAYOUTS[name].dims.world == ranks.dims.world:
            errors, note = grid.worst()
            what(ranks, LAYOUTS[name], WAYS["shared prompts"], note)
            assert_small(errors, name)


def test_a_step_on_each_layout_from_the_checkpoint_of_another(ranks: Ranks, tmp_path: Path) -> None:
    for family in ("qwen3", grid.MOE):
        layouts = [
            each for _, each in grid.layouts_of(ranks.dims.world) if each == Layout(each.dims, family=family)
        ]
        errors, note = grid.worst()
        grid.handed_on(ranks, layouts, WAYS["shared prompts"], note, folder=tmp_path / family)
        assert_small(errors, family)


@pytest.mark.parametrize(("name", "way"), [("dp_shard 2", "LoRA"), ("pp 2 x ep 2", "shared prompts")])
def test_files_are_those_of_one_process(ranks: Ranks, tmp_path: Path, name: str, way: str) -> None:
    layout = LAYOUTS[name]
    if layout.dims.world == ranks.dims.world:
        errors, note = grid.worst()
        grid.resumed(ranks, layout, WAYS[way], note, folder=tmp_path)
        assert_small(errors, name)


@pytest.mark.parametrize("name", ["cp 2", "tp 2 x cp 2", "cp 2 x ep 2"])
def test_a_rank_may_have_no_tokens_of_a_micro_batch(ranks: Ranks, name: str) -> None:
    layout, way = (
        LAYOUTS[name],
        replace(DROPPING, cut=replace(DROPPING.cut, max_rollouts=1, share_prompts=False)),
    )
    if layout.dims.world != ranks.dims.world:
        return
    one, many = grid.pair(ranks, layout, way, model=grid.model_of(layout, way), **grid.learning())
    errors, note = grid.worst()
    for batch in (weighted(3), weighted(5)):
        assert int(batch.length_S.min()) == 2  # of which one predicts, and is computed
        grid.note_metrics(note, many.update(batch, pg_loss), one.update(batch, pg_loss))
    assert_small(errors, name)


@pytest.mark.parametrize("name", ["dp_shard 2", "pp 2", "cp 2"])
def test_rollouts_of_several_strands_learn_the_same_on_ranks(ranks: Ranks, name: str) -> None:
    layout, way = LAYOUTS[name], WAYS["shared prompts"]
    if layout.dims.world != ranks.dims.world:
        return
    one, many = grid.pair(ranks, layout, way, model=grid.model_of(layout, way), **grid.learning())
    batch = weighted(3, strands=True)
    assert batch.segments > batch.rollouts
    theirs, mine = (engine.forward(batch, "logprobs") for engine in (many, one))
    torch.testing.assert_close(theirs, mine, rtol=1e-5, atol=1e-5)
    assert many.update(batch, pg_loss) == pytest.approx(one.update(batch, pg_loss), rel=1e-4, abs=1e-5)
    for (name, theirs), (_, mine) in zip(many.weights(), one.weights(), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", ["dp_shard 2", "pp 2", "tp 2"])
def test_a_reference_with_other_prompts_teaches_the_same_on_ranks(ranks: Ranks, name: str) -> None:
    layout, way = LAYOUTS[name], WAYS["shared prompts"]
    if layout.dims.world != ranks.dims.world:
        return
    one, many = grid.pair(ranks, layout, way, model=grid.model_of(layout, way), **grid.learning())
    far = grid.model_of(layout, way, seed=9).requires_grad_(False)
    far_one, far_many = grid.pair(ranks, layout, way, model=far, role="reference")
    for engine, reference in ((one, far_one), (many, far_many)):
        engine.full_kl = FullKl(0.3, reference, Divergence(0.5, TopK(4, "policy", "tail")))  # type: ignore[arg-type]
    errors, note = grid.worst()
    for seed in range(2):
        batch = two_prompts(seed)
        said = (each.forward(batch.of_reference, "logprobs") for each in (far_many, far_one))
        note("log-probs", grid.error(*said))
        grid.note_metrics(note, many.update(batch, pg_loss), one.update(batch, pg_loss))
    grid.note_tensors(note, "weights", dict(many.weights()), dict(one.weights()))
    assert_small(errors, name)


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("way", ["shared prompts", "offload"])
def test_a_stage_of_which_nothing_learns(ranks: Ranks, frozen: int, way: str, tmp_path: Path) -> None:
    """train.trainable may leave one rank of a pipeline nothing; the gradient that is clipped is that of the other."""
    if ranks.dims.world != 2:
        return
    layout, how = LAYOUTS["pp 2"], WAYS[way]
    model = grid.model_of(layout, how)
    for name, p in model.named_parameters():
        p.requires_grad_(("embed_tokens" in name or "layers.0." in name) == bool(frozen))
    clips = grid.learning(optimizer=grid.SGD.model_copy(update={"max_grad_norm": 0.01}))
    one, many = grid.pair(ranks, layout, how, model=model, **clips)
    errors, note = grid.worst()
    for seed in range(2):
        numbers = one.update(weighted(seed), pg_loss)
        assert numbers["grad_norm"] > 0.01
        grid.note_metrics(note, many.update(weighted(seed), pg_loss), numbers)
    many.save(tmp_path)
    one.load(tmp_path)
    grid.note_tensors(note, "weights", dict(many.weights()), dict(one.weights()))
    assert_small(errors, layout)


@pytest.mark.parametrize("name", ["dp_shard 2", "pp 2", "tp 2", "dp_replicate 2 x ep 2"])
def test_a_step_that_is_not_finite_is_skipped_by_all(ranks: Ranks, name: str) -> None:
    layout, way = LAYOUTS[name], WAYS["shared prompts"]
    if layout.dims.world != ranks.dims.world:
        return
    many = grid.group(ranks, layout, way, model=grid.model_of(layout, way), **grid.learning())
    before = {n: p.clone() for n, p in many.weights()}
    batch = weighted()
    assert batch.adv_N is not None
    adv_N = torch.where(batch.rollout_N == 2, torch.inf, batch.adv_N)
    numbers = many.update(replace(batch, adv_N=adv_N), pg_loss)
    assert numbers["skipped_steps"] == 1.0
    assert "grad_norm" not in numbers
    for name, p in many.weights():
        torch.testing.assert_close(p, before[name], rtol=0, atol=0)


def test_weights_of_another_model_are_refused_by_every_stage(ranks: Ranks, tmp_path: Path) -> None:
    """The last one: it ends the processes."""
    way = WAYS["shared prompts"]
    engine = TorchEngine(grid.model_of(Layout(Dims(), layers=3), way), kernels.load("auto"), cut=way.cut)
    engine.save(tmp_path)
    layout = LAYOUTS["pp 2" if ranks.dims.world == 2 else "cp 2 x pp 2"]
    many = grid.group(ranks, layout, way, model=grid.model_of(layout, way))
    with pytest.raises(CheckpointError, match=r"layers\.2"):
        many.load(tmp_path)
