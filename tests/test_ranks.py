"""Ranks: whatever the layout, log-probs, metrics, gradients and weights of one process; and no rank is lost."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from test_train_torch import CUT, pg_loss, weighted
from tiny import tiny_model
from whet.algos.critic import value_loss
from whet.algos.recipes import build
from whet.batch import Batch, Loss, Outputs
from whet.config.parts.lora import Lora
from whet.config.recipes import RECIPES
from whet.config.schema import Algorithm, Critic, Optimizer
from whet.models import kernels
from whet.models.load import value_head
from whet.models.lora import attach, learned, refresh
from whet.models.mesh import Dims
from whet.models.sharded import Sharding
from whet.training.balance import balanced, deal
from whet.training.ranks import RankGroup, Ranks
from whet.training.torch import Cut, FullKl, TorchEngine
from whet.types import ConfigError, WhetError

LAYOUTS = {
    "replicate-2": (Dims(dp_replicate=2), Sharding()),
    "shard-2": (Dims(dp_shard=2), Sharding(reshard=False, prefetch=0)),
    "shard-4": (Dims(dp_shard=4), Sharding(min_parameters=10_000)),
    "hybrid-2x2": (Dims(dp_replicate=2, dp_shard=2), Sharding()),
    "tensor-2": (Dims(tp=2), Sharding()),
    "context-2": (Dims(cp=2), Sharding()),
    "shard-tensor-2x2": (Dims(dp_shard=2, tp=2), Sharding()),
    "replicate-context-2x2": (Dims(dp_replicate=2, cp=2), Sharding()),
}
BIG = Optimizer(kind="sgd", lr=1024.0, grad_clip=None)
SGD = Optimizer(kind="sgd", lr=0.02, momentum=0.9, grad_clip=None)


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    dims, sharding = LAYOUTS[request.param]
    pool = Ranks(dims, sharding=sharding, timeout_s=60.0)
    yield pool
    pool.close()


def lora_model(dropout: float = 0.0) -> PreTrainedModel:
    model = tiny_model("qwen2")
    attach(model, Lora(rank=4, dropout=dropout), seed=1)
    gen = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in learned(model):
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=gen) * 0.1)
    refresh(model)
    return model


def pair(
    ranks: Ranks, model: PreTrainedModel, *, cut: Cut = CUT, role: str = "policy", **arguments: Any
) -> tuple[TorchEngine, RankGroup]:
    """The same engine in this process and on the ranks."""
    head = arguments.pop("value_head", None)
    with_head = {"value_head": copy.deepcopy(head)} if head is not None else {}
    one = TorchEngine(copy.deepcopy(model), kernels.load("auto"), cut=cut, **with_head, **arguments)
    return one, RankGroup(
        ranks, role, model, cut=cut, **({"value_head": head} if head is not None else {}), **arguments
    )


def learning(**arguments: Any) -> dict[str, Any]:
    return {"optimizer": SGD, "total_steps": 4, "seed": 3, **arguments}


def gradients(engine: Any, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of the step that a large learning rate has just taken: what the parameters moved by."""
    return {n: (before[n] - p.detach()) / BIG.lr for n, p in learned(engine.module)}


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12))


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    worst = max(a, key=lambda name: far(a[name], b[name]))
    assert far(a[worst], b[worst]) <= tolerance, worst


CASES: dict[str, tuple[Any, Cut]] = {
    "qwen3": (tiny_model, replace(CUT, max_tokens=25)),
    "unshared": (tiny_model, replace(CUT, share_prompts=False, max_tokens=40)),
    "checkpointing": (tiny_model, replace(CUT, checkpoint=True)),
    "moe": (lambda: tiny_model("qwen3_moe"), replace(CUT, max_rollouts=2)),
    "tied": (lambda: tiny_model("gemma"), CUT),
    "lora": (lora_model, replace(CUT, max_tokens=30)),
    "dropout": (lambda: lora_model(0.3), replace(CUT, checkpoint=True)),
}
FEW = ("moe", "lora")
"""Those of four ranks: on two cores they are slow."""


def test_any_layout_learns_the_same(ranks: Ranks) -> None:
    """One test for all cases, so that the processes of a layout start once."""
    for case in CASES if ranks.dims.world == 2 else FEW:
        learns_the_same(ranks, case)


def learns_the_same(ranks: Ranks, case: str) -> None:
    make, cut = CASES[case]
    model, batch = make(), weighted()
    before = {n: p.detach().clone() for n, p in learned(model)}
    one, many = pair(ranks, make(), cut=cut, **learning(optimizer=BIG))
    assert many.update(batch, pg_loss) == pytest.approx(one.update(batch, pg_loss), rel=2e-6, abs=1e-9)
    assert_close(gradients(many, before), gradients(one, before), 4e-6)
    one, many = pair(ranks, model, cut=cut, **learning())
    for want in ("logprobs", "collision"):
        torch.testing.assert_close(many.forward(batch, want), one.forward(batch, want), rtol=1e-5, atol=2e-6)  # type: ignore[arg-type]
    for seed in range(3):
        batch = weighted(seed)
        assert many.update(batch, pg_loss) == pytest.approx(one.update(batch, pg_loss), rel=2e-6, abs=1e-9)
    assert_close(dict(many.weights()), dict(one.weights()), 2e-6)


def test_a_critic_with_its_head(ranks: Ranks) -> None:
    head = value_head(32, 0)
    one, many = pair(ranks, tiny_model(), role="critic", value_head=head, whole=True, **learning())
    batch = weighted()
    batch = replace(batch, return_N=batch.adv_N, value_N=one.forward(batch, "values"))
    torch.testing.assert_close(many.forward(batch, "values"), batch.value_N, rtol=1e-5, atol=2e-6)
    for _ in range(2):
        assert many.update(batch, clipped_values) == pytest.approx(
            one.update(batch, clipped_values), rel=2e-6
        )
    torch.testing.assert_close(
        many.forward(batch, "values"), one.forward(batch, "values"), rtol=1e-5, atol=5e-6
    )


def clipped_values(batch: Batch, out: Outputs) -> Loss:
    return value_loss(batch, out, clip=0.5)


def test_a_reference_and_the_kl_over_the_whole_vocabulary(ranks: Ranks) -> None:
    one, many = pair(ranks, tiny_model(), **learning())
    far_one, far_many = pair(ranks, tiny_model(seed=9).requires_grad_(False), role="reference")
    one.full_kl, many.full_kl = FullKl(0.3, far_one), FullKl(0.3, far_many)  # type: ignore[arg-type]
    for seed in range(2):
        batch = weighted(seed)
        assert many.update(batch, pg_loss) == pytest.approx(one.update(batch, pg_loss), rel=3e-6)
    far_many.copy_from(many)
    torch.testing.assert_close(
        far_many.forward(batch, "logprobs"), many.forward(batch, "logprobs"), rtol=0, atol=0
    )


@pytest.mark.parametrize("make", [tiny_model, lora_model])
def test_any_layout_goes_on_from_any_checkpoint(ranks: Ranks, tmp_path: Path, make: Any) -> None:
    adam = Optimizer(lr=1e-3, eps=1e-3)
    one, many = pair(ranks, make(), **learning(optimizer=adam))
    many.update(weighted(0), pg_loss)
    many.save(tmp_path / "many")
    many.capture()(tmp_path / "captured")
    one.load(tmp_path / "many")  # ranks -> one process
    assert_close(dict(one.weights()), dict(many.weights()), 0.0)
    one.save(tmp_path / "one")
    for file in ("model.safetensors", "optimizer.safetensors"):
        written = (tmp_path / "many" / file).read_bytes()
        assert (
            written == (tmp_path / "one" / file).read_bytes() == (tmp_path / "captured" / file).read_bytes()
        )
    fresh = RankGroup(ranks, "policy", make(), cut=CUT, **learning(optimizer=adam))
    fresh.load(tmp_path / "one")  # one process -> ranks
    for seed in (1, 2):
        expected = one.update(weighted(seed), pg_loss)
        assert fresh.update(weighted(seed), pg_loss) == pytest.approx(expected, rel=2e-6, abs=1e-9)
    assert_close(dict(fresh.weights()), dict(one.weights()), 2e-6)


def test_a_step_that_is_not_finite_is_skipped_by_all(ranks: Ranks) -> None:
    _, many = pair(ranks, tiny_model(), **learning())
    before = {n: p.clone() for n, p in many.weights()}
    batch = weighted()
    assert batch.adv_N is not None
    numbers = many.update(
        replace(batch, adv_N=torch.where(batch.row_N == 2, torch.inf, batch.adv_N)), pg_loss
    )
    assert numbers["skipped_steps"] == 1.0
    assert "grad_norm" not in numbers
    assert_close(dict(many.weights()), before, 0.0)


# ---------------------------------------------------------------- dealt out


def test_differencing_by_hand() -> None:
    # 8-7=1, 6-5=1, 4-1=3, 3-1=2: Karmarkar and Karp's own example ends two apart
    parts = balanced([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_each_item_in_one_part_and_no_part_far_off(costs: list[int], parts: int) -> None:
    found = balanced(costs, parts)
    assert sorted(i for part in found for i in part) == list(range(len(costs)))
    sums = [sum(costs[i] for i in part) for part in found]
    assert max(sums) - min(sums) <= max(costs, default=0)


@given(st.integers(0, 50), st.integers(1, 6), st.integers(5, 60), st.booleans(), st.booleans())
def test_every_rollout_is_dealt_once_in_equal_numbers_of_micro_batches(
    seed: int, parts: int, tokens: int, shared: bool, whole: bool
) -> None:
    batch = weighted(seed)
    dealt = deal(batch, parts, max_tokens=tokens, max_rollouts=None, shared=shared, whole_groups=whole)
    assert len({len(d.micros) for d in dealt}) == 1
    rows = torch.cat([r for d in dealt for r in d.rows])
    assert rows.sort().values.tolist() == list(range(batch.rollouts))
    for d in dealt:
        assert all((m.weight_N == 0).all() for m in d.micros[d.real :])  # type: ignore[union-attr]
        for micro, r in zip(d.micros, d.rows):
            assert micro.token_ids_N.tolist() == batch.token_ids_N[torch.isin(batch.row_N, r)].tolist()
    if whole:
        groups = [set(batch.group_R[r].tolist()) for d in dealt for r in d.rows]
        assert sum(len(g) for g in groups) == len(set().union(*groups))


@pytest.mark.parametrize("name", RECIPES)
def test_losses_travel(name: str) -> None:
    """What the loop hands to a train engine can be taken to another process."""
    algorithm = build(Algorithm(name=name), critic=Critic(), max_tokens=8)
    batch = weighted()

    def forward(batch: Batch, want: str) -> torch.Tensor:
        return -torch.ones(batch.tokens)

    loss = algorithm.loss_of(replace(batch, logp_old_N=batch.logp_sample_N), forward)  # type: ignore[arg-type]
    assert callable(pickle.loads(pickle.dumps(loss)))
    pickle.dumps(algorithm.value_loss)


def test_dims_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="ep=2 does not divide dp_shard=3"):
        Dims(dp_shard=3, ep=2)
    with pytest.raises(ConfigError, match=r"train\.parallel\.tp=0"):
        Dims(tp=0)
    dims = Dims(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    assert (dims.world, dims.dp) == (16, 4)
    assert [dims.part_of(r) for r in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert dims.part_of(8) == 0


# ---------------------------------------------------------------- ends


def sleepy(batch: Batch, out: Outputs) -> Loss:
    if torch.distributed.get_rank() == 1:
        time.sleep(60)
    return pg_loss(batch, out)


def killed(batch: Batch, out: Outputs) -> Loss:
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return pg_loss(batch, out)


def broken(batch: Batch, out: Outputs) -> Loss:
    raise ZeroDivisionError("a user's loss")


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (killed, r"(?s)rank 1 of 2 died \(killed by SIGKILL\) while doing: update policy"),
        (sleepy, r"(?s)have said nothing for 5 s.*rank 1: update policy.*in sleepy"),
        (broken, r"(?s)of 2 failed while doing: update policy.*ZeroDivisionError: a user's loss"),
    ],
)
def test_a_lost_rank_is_named_and_the_others_end(loss: Any, said: str) -> None:
    ranks = Ranks(Dims(dp_replicate=2), timeout_s=60.0)
    many = RankGroup(ranks, "policy", tiny_model(), cut=CUT, **learning())
    ranks.timeout_s = 5.0
    with pytest.raises(WhetError, match=said):
        many.update(weighted(), loss)
    assert all(p.poll() is not None for p in ranks.processes)
    assert not ranks.folder.exists()
    with pytest.raises(WhetError, match="closed"):
        many.update(weighted(), pg_loss)


def test_a_loss_that_cannot_travel_is_refused() -> None:
    ranks = Ranks(Dims(dp_replicate=1), timeout_s=60.0)
    many = RankGroup(ranks, "policy", tiny_model(), cut=CUT, **learning())
    with pytest.raises(WhetError, match="must be functions of a module"):
        many.update(weighted(), lambda batch, out: pg_loss(batch, out))
    assert ranks.processes[0].poll() is not None


DRIVER = """
import os, signal, sys, torch
sys.path[:0] = [{tests!r}]
from tiny import tiny_model
from whet.models.mesh import Dims
from whet.training.ranks import Ranks
ranks = Ranks(Dims(dp_replicate=2), timeout_s=60.0)
print(*(p.pid for p in ranks.processes), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_end_with_a_driver_that_is_killed() -> None:
    code = DRIVER.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    until = time.monotonic() + 20
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
