"""Optimizers that need whole tensors, and training in 16 bits, on ranks: the steps of one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grid import BIG, Layout, Way, error, group, pair, started
from swept import except_for
from test_router_loss import assert_close
from test_train_torch import CUT, pg_loss, random_groups, weighted
from tiny import tiny_model
from whet.batch import Batch, Loss, Outputs, pack
from whet.config.schema import OptimizerConfig
from whet.config.sections.precision import PrecisionConfig
from whet.models import kernels
from whet.models.lora import learned
from whet.models.mesh import Dims
from whet.models.precision import LossScale
from whet.training.ranks import Ranks
from whet.training.torch import TorchEngine
from whet.types import CheckpointError, Group

MUON = OptimizerConfig(name="muon", lr=0.01, weight_decay=0.1, param_groups={"mlp": {"lr_factor": 0.5}})  # type: ignore[dict-item]
INT8 = OptimizerConfig(state_dtype="int8", lr=1e-3, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5)
SHARD, TENSOR, CONTEXT = Layout(Dims(dp_shard=2)), Layout(Dims(tp=2)), Layout(Dims(cp=2))
CASES: dict[str, tuple[Layout, str, OptimizerConfig]] = {
    "muon": (SHARD, "qwen3_moe", MUON),
    "muon, parts of rows": (TENSOR, "qwen3", MUON),
    "int8": (SHARD, "qwen3", INT8),
    "bfloat16": (SHARD, "qwen3", INT8.model_copy(update={"state_dtype": "bfloat16"})),
    "bfloat16, parts of rows": (TENSOR, "qwen3", INT8.model_copy(update={"state_dtype": "bfloat16"})),
    "int8, parts of rows, decay in the gradient": (TENSOR, "gemma", INT8.model_copy(update={"name": "adam"})),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = started(2)
    yield pool
    pool.close()


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in learned(engine.module)}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_one_process(ranks: Ranks, tmp_path: Path, case: str) -> None:
    """And either goes on from what the other has saved."""
    layout, family, optimizer = CASES[case]
    how: dict[str, Any] = {"optimizer": optimizer, "total_steps": 6, "seed": 3}
    one, many = pair(ranks, layout, Way(CUT), model=tiny_model(family), **how)
    for _ in range(2):
        one.update(weighted(), pg_loss)
        many.update(weighted(), pg_loss)
    assert_close(weights(many), weights(one), 2e-5)
    many.save(tmp_path / "many")
    other = TorchEngine(tiny_model(family, seed=5), one.ops, cut=CUT, **how)
    other.load(tmp_path / "many")
    one.save(tmp_path / "one")
    many.load(tmp_path / "one")
    for engine in (one, many, other):
        engine.update(weighted(), pg_loss)
    assert_close(weights(many), weights(one), 2e-5)
    assert_close(weights(other), weights(one), 2e-5)


def masters(engine: Any, path: Path) -> dict[str, torch.Tensor]:
    engine.save(path)
    return {n: x for n, x in load_file(path / "optimizer.safetensors").items() if n.startswith("master.")}


def off(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    a, b = (torch.cat([x[n].flatten().double() for n in sorted(expected)]) for x in (found, expected))
    return error(a, b)


@pytest.mark.parametrize(("layout", "reduce"), [(CONTEXT, None), (SHARD, None), (SHARD, "float32")], ids=str)
def test_gradients_in_bfloat16_are_as_near_as_in_one_process(
    ranks: Ranks, tmp_path: Path, layout: Layout, reduce: Any
) -> None:
    """Near to those in float32."""
    exact = TorchEngine(tiny_model(), kernels.load("auto"), cut=CUT, optimizer=BIG)
    before = {f"master.{n}": p.bfloat16().float() for n, p in exact.module.named_parameters()}
    with torch.no_grad():
        for n, p in exact.module.named_parameters():
            p.copy_(before[f"master.{n}"])
    exact.update(weighted(), pg_loss)
    target = {f"master.{n}": before[f"master.{n}"] - p.detach() for n, p in exact.module.named_parameters()}
    cut = replace(CUT, max_rollouts=3, precision=PrecisionConfig(reduce=reduce))
    one, many = pair(ranks, layout, Way(cut), model=tiny_model().bfloat16(), optimizer=BIG, total_steps=1)
    errors = []
    for name, engine in (("one", one), ("many", many)):
        engine.update(weighted(), pg_loss)
        found = masters(engine, tmp_path / name)
        errors.append(off({n: before[n] - x for n, x in found.items()}, target))
    assert errors[0] < 0.03
    assert errors[1] < 1.25 * errors[0]


def faint(batch: Batch, out: Outputs) -> Loss:
    """The first rank's rollout counts 512 times what any other's does."""
    assert out.logp_N is not None
    return Loss(-out.logp_N * (2.0**-9 if torch.distributed.get_rank() else 1.0))


def test_gradients_of_ranks_are_added_up_in_float32(tmp_path: Path) -> None:
    """With precision.reduce. The same rollout on each of four ranks: g + 3/512 g is 0.6% more than g. bfloat16 has
    steps of 0.4% to 0.8%, so a sum in it loses what it is given bit by bit; rounded once, it is right on the whole."""
    rollout = random_groups(count=1)[0].rollouts[2]
    batch = pack([Group(rollout.task, (rollout,))] * 4)
    batch = replace(batch, weight_N=batch.mask_N.float())
    cut = replace(CUT, precision=PrecisionConfig(reduce="float32"))
    model, sgd = tiny_model().bfloat16(), OptimizerConfig(name="sgd", lr=1.0, max_grad_norm=None)
    before = {f"master.{n}": p.detach().float() for n, p in model.named_parameters()}
    pool = started(4)
    steps = []
    for dims in (Dims(dp_replicate=4), Dims(dp_shard=4)):  # copies add up float32 whatever the key says
        many = group(pool, Layout(dims), Way(cut), model=model, optimizer=sgd, total_steps=1)
        many.update(batch, faint)
        found = masters(many, tmp_path / str(dims.dp_shard))
        steps.append(torch.cat([(before[n] - found[n]).flatten() for n in sorted(found)]))
    pool.close()
    wanted, found_P = steps
    large = wanted.abs() > 1e-3 * wanted.abs().max()
    assert float((found_P[large] / wanted[large]).mean()) == pytest.approx(1.0, abs=1e-3)


def test_float16_on_ranks_scales_skips_and_learns_as_one_process(ranks: Ranks, tmp_path: Path) -> None:
    cut = replace(CUT, precision=PrecisionConfig(loss_scale=2.0**24))
    optimizer = OptimizerConfig(lr=1e-3, eps=1e-3)
    model = tiny_model().half()
    one, many = pair(ranks, SHARD, Way(cut), model=model, optimizer=optimizer, max_skipped=40)
    before = {f"master.{n}": p.detach().float() for n, p in one.module.named_parameters()}
    told = [[engine.update(weighted(), pg_loss) for _ in range(10)] for engine in (one, many)]
    assert all(told[n][0]["skipped_steps"] == 1.0 and told[n][-1]["skipped_steps"] == 0.0 for n in (0, 1))
    scales = [[seen["loss_scale"] for seen in said] for said in told]
    assert scales[0][:3] == scales[1][:3] == [2.0**24, 2.0**23, 2.0**22]
    moves = [
        {n: x - before[n] for n, x in masters(engine, tmp_path / name).items()}
        for name, engine in (("one", one), ("many", many))
    ]
    assert off(moves[1], moves[0]) < 0.1


@pytest.mark.parametrize("half", [0, 1])
def test_one_float16_stage_of_a_pipeline_gives_the_loss_of_all_its_scale(
    ranks: Ranks, tmp_path: Path, half: int
) -> None:
    """What learns on the other stage is float32, or nothing: the last stage scales, each divides."""
    model = tiny_model().half()
    for name, p in model.named_parameters():
        p.requires_grad_(f"layers.{half}." in name)
    cut = replace(CUT, precision=PrecisionConfig(loss_scale=1024.0))
    one, many = pair(ranks, Layout(Dims(pp=2)), Way(cut), model=model, optimizer=INT8, total_steps=2)
    told = [engine.update(weighted(), pg_loss) for engine in (one, many)]
    assert told[1]["loss_scale"] == told[0]["loss_scale"] == 1024.0
    assert told[1]["grad_norm"] == pytest.approx(told[0]["grad_norm"], rel=1e-3)
    many.save(tmp_path)  # rank 0 writes the counts
    one.load(tmp_path)
    assert one.optimizer.loss_scale == LossScale(1024.0, held=1)  # type: ignore[union-attr]


def test_weights_that_rest_on_the_host_learn_the_same(ranks: Ranks) -> None:
    """On a CPU there is nowhere to go, but FSDP's parts take its road to the host and back."""
    how: dict[str, Any] = {"optimizer": MUON, "total_steps": 2, "rests": True}
    for layout in (SHARD, TENSOR):
        one, many = pair(ranks, layout, Way(CUT), model=tiny_model(), **how)
        for engine in (one, many):
            engine.update(weighted(), pg_loss)
        assert_close(weights(many), weights(one), 2e-5)


def gone(path: Path) -> None:
    path.unlink()


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def odd_counts(path: Path) -> None:
    """Whole, but what it says is none of what is expected."""
    save_file(load_file(path), path, {"counts": "[1]"})


def odd_shapes(path: Path) -> None:
    save_file({name: torch.zeros(()) for name in load_file(path)}, path.with_name("model.safetensors"))


@pytest.mark.parametrize("damage", except_for(odd_shapes.__eq__, [gone, cut_short, odd_counts, odd_shapes]))
def test_a_damaged_checkpoint_is_the_same_clear_error_on_ranks(tmp_path: Path, damage: Any) -> None:
    pool = started(2)
    try:
        one, many = pair(pool, SHARD, Way(CUT), model=tiny_model(), optimizer=BIG, total_steps=2)
        one.update(weighted(), pg_loss)
        one.save(tmp_path)
        damage(tmp_path / "optimizer.safetensors")
        for engine in (one, many):
            with pytest.raises(CheckpointError) as found:
                engine.load(tmp_path)
            assert str(tmp_path) in str(found.value)
            assert "Traceback" not in str(found.value)
    finally:
        pool.close()
