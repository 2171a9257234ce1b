"""What is skipped goes through no model: counted at the model's door, in whole steps and whole runs."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import whet
from sections import algorithm as section
from test_learning import SETUP, learn
from test_train_torch import assert_near, pg_loss, random_groups, weighted
from tiny import tiny_model
from whet.algos.recipes import build
from whet.algos.skipping import skipping
from whet.batch import Batch, computed
from whet.cli import app
from whet.config import schema
from whet.config.functions import LOSSES
from whet.config.recipes import resolve
from whet.context import Context
from whet.learner import Learner
from whet.models import kernels
from whet.models.mesh import Dims
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.ranks import RankGroup, Ranks
from whet.training.torch import TorchEngine
from whet.types import Group, Metrics, Rollout

CUT = MicroBatchPolicy(entropy_grad=True, share_prompts=False, max_tokens=60)


class Door:
    """A policy or reference that counts the tokens that go through its decoder, and keeps each step's gradients."""

    def __init__(self, *, learns: bool = True, optimizer: schema.OptimizerConfig | None = None) -> None:
        chosen = optimizer or schema.OptimizerConfig(name="adamw", lr=1e-3, weight_decay=0.1)
        how: dict[str, Any] = {"optimizer": chosen, "total_steps": 8} if learns else {}
        self.engine = TorchEngine(tiny_model(), kernels.load("auto"), cut=CUT, **how)
        self.tokens, self.gradients = 0, []
        hidden = self.engine.decoder.hidden

        def counted(token_ids: Tensor, *args: Any, **more: Any) -> Tensor:
            self.tokens += len(token_ids)
            return hidden(token_ids, *args, **more)

        self.engine.decoder = replace(self.engine.decoder, hidden=counted)
        if self.engine.optimizer is not None:
            self.clip, self.engine.optimizer.clip = self.engine.optimizer.clip, self.look  # type: ignore[method-assign]

    def look(self) -> float:
        named = self.engine.module.named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        return self.clip()


def rewarded(uniform: set[int]) -> list[Group]:
    """Six groups of three; in the uniform ones all rewards are 1."""
    groups = random_groups(count=6)
    return [
        Group(g.task, tuple(replace(r, reward=1.0 if n in uniform else r.reward) for r in g.rollouts))
        for n, g in enumerate(groups)
    ]


def learner(policy: Door, *, skip: bool, reference: Door | None = None, **keys: Any) -> Learner:
    """A learner around this policy."""
    train = schema.TrainConfig.model_validate({"skip_zero_weight": skip, **keys.pop("train", {})})
    cfg = schema.AlgorithmConfig.model_validate(section(**keys))
    algorithm, resolved = build(cfg, critic=schema.CriticConfig(), max_tokens=8), resolve(cfg)
    config: Any = SimpleNamespace(train=train, seed=0, critic=schema.CriticConfig())
    plan: Any = SimpleNamespace(algorithm=resolved, critic=None, critic_warmup_steps=0, own_tasks_per_step=6)
    monitor: Any = SimpleNamespace(phase=lambda name: nullcontext())
    stop: Any = SimpleNamespace(requested=False)
    context = Context(config, plan, "stage", 0, algorithm, monitor, stop)
    return Learner(
        context, policy.engine, (reference.engine,) if reference else (), None, skipping=skipping(resolved, train),
        exact=False, kl_coef=algorithm.kl_coef,
    )  # fmt: skip


def learn_step(learner: Learner, groups: list[Group]) -> tuple[Batch, list[Metrics]]:
    """The batch of one step, and the metrics of each optimizer step."""
    batch, _ = learner.prepared(0, groups)
    return batch, learner.update(0, batch)[0]


def both(uniform: set[int], **keys: Any) -> tuple[tuple[Door, Batch], tuple[Door, Batch]]:
    """A step with skipping and one without."""
    out = []
    for skip in (True, False):
        door = Door()
        out.append((door, learn_step(learner(door, skip=skip, **keys), rewarded(uniform))[0]))
    return out[0], out[1]


def needed(rollout: Rollout) -> int:
    """Tokens that predict a sampled one, or stand before one that does."""
    return max(n for n, m in enumerate(rollout.strand.mask) if m)


PARTS = {"train": {"minibatches": 3, "update_epochs": 2}}
SKIPPING = [name for name, row in LOSSES.items() if row.skips == "no advantage"]


@pytest.mark.parametrize(
    ("uniform", "keys"),
    [
        ({1, 4}, {}),
        ({0, 1, 2, 5}, PARTS),
        ({0, 1, 2, 3, 4, 5}, PARTS),
        ({0, 1, 2, 3, 4, 5}, {"train": {"minibatches": 2, "update_epochs": 2, "shuffle_minibatches": True}}),
        ({0, 1, 2}, {"loss": "cispo", "loss_agg_mode": "token-mean"}),
        ({0, 1, 2}, {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.2, "advantage": "rloo"}),
        ({0, 3}, {"correction": {"weight": {"name": "token", "high": 2.0}}}),
        ({0, 3}, {"name": "optimal_token_baseline"}),
        ({0, 3, 4}, {"name": "gigpo", **PARTS}),
        *(pytest.param({0, 3, 4}, {"loss": n, **PARTS}, marks=pytest.mark.sweep) for n in SKIPPING),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else None,
)
def test_gradients_moments_and_weights_are_those_of_all_rollouts(
    uniform: set[int], keys: dict[str, Any]
) -> None:
    (one, batch), (all_of_it, whole) = both(uniform, **keys)
    assert len(one.gradients) == len(all_of_it.gradients) > 0
    for mine, theirs in zip(one.gradients, all_of_it.gradients, strict=True):
        assert_near(mine, theirs, 2e-5)
    assert one.engine.optimizer is not None
    assert all_of_it.engine.optimizer is not None
    moments, wanted = one.engine.optimizer.state(), all_of_it.engine.optimizer.state()
    assert_near({n: x.float() for n, x in moments.items()}, {n: x.float() for n, x in wanted.items()}, 4e-5)
    assert one.engine.optimizer.counts() == all_of_it.engine.optimizer.counts()
    assert torch.equal(batch.adv_N, whole.adv_N)  # type: ignore[arg-type]
    assert batch.skipped_R is not None
    assert whole.skipped_R is None


def test_a_step_that_teaches_nothing_decays_the_weights_all_the_same() -> None:
    """A gradient of 0 and no gradient are two things: the optimizer moves by moments and weight decay."""
    (one, _), (all_of_it, _) = both(set(range(6)), **PARTS)
    assert all(not g.any() for step in one.gradients for g in step.values())
    assert one.gradients[0].keys() == dict(one.engine.module.named_parameters()).keys()
    before = dict(tiny_model().named_parameters())
    for (name, mine), (_, theirs) in zip(
        one.engine.module.named_parameters(), all_of_it.engine.module.named_parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine, before[name]) == (mine.ndim == 1), "matrices decay"


def test_what_is_skipped_costs_nothing() -> None:
    """Two of six groups teach: the tokens of those alone go through policy and update, each once."""
    door, groups = Door(), rewarded({0, 1, 3, 5})
    batch, updates = learn_step(learner(door, skip=True), groups)
    # of three rewards 0, 1, 2 the middle one has advantage 0, too
    tokens = sum(needed(r) for n in (2, 4) for r in groups[n].rollouts if r.reward != 1.0)
    assert batch.skipped_R is not None
    assert int((~batch.skipped_R).sum()) == 4
    assert door.tokens == 2 * tokens, "old log-probs, and the update"
    assert len(updates) == 1


def test_reference_and_old_log_probs_of_masked_rollouts_cost_nothing() -> None:
    """With a KL in the loss a uniform group teaches; what counts 0 times does not."""
    policy, reference = Door(), Door(learns=False)
    groups = rewarded({0, 1})
    cut_short = replace(groups[3].rollouts[0], finish_reason="length")
    groups[3] = Group(groups[3].task, (cut_short, *groups[3].rollouts[1:]))
    keys = {"kl": {"coef": 0.1}, "groups": {"truncated": "mask"}}
    batch, _ = learn_step(learner(policy, skip=True, reference=reference, **keys), groups)
    tokens = sum(needed(r) for g in groups for r in g.rollouts) - needed(cut_short)
    assert batch.logp_ref_N is not None
    assert reference.tokens == tokens
    assert policy.tokens == 2 * tokens
    assert batch.skipped_R is not None
    gone_N = batch.mask_N & batch.skipped_R[batch.rollout_N]
    assert torch.equal(batch.logp_ref_N.isnan(), gone_N)


def test_every_optimizer_step_compares_with_the_engine() -> None:
    door = Door()
    batch, updates = learn_step(learner(door, skip=True, **PARTS), rewarded(set(range(6))))
    assert len(updates) == 6
    assert all(m["train/mismatch_mean_nats"] > 0 and m["train/grad_norm"] == 0 for m in updates)
    assert batch.skipped_R is not None
    assert int((~batch.skipped_R).sum()) == 3, "one a minibatch, the same in both passes"


# ---------------------------------------------------------------- ranks


def test_ranks_that_have_nothing_left_keep_step() -> None:
    """One rollout for two ranks: forward and update are those of one process."""
    batch = weighted()
    one_left = computed(replace(batch, skipped_R=torch.arange(batch.rollouts) != 4))
    assert one_left.rollouts == 1
    optimizer = schema.OptimizerConfig(name="sgd", lr=0.02)
    alone = TorchEngine(tiny_model(), kernels.load("auto"), cut=CUT, optimizer=optimizer, total_steps=4)
    ranks = Ranks(Dims(dp_shard=2), timeout_s=60.0)
    try:
        many = RankGroup(ranks, "policy", tiny_model(), cut=CUT, optimizer=optimizer, total_steps=4)
        said = [e.forward(one_left, "logprobs") for e in (alone, many)]
        torch.testing.assert_close(said[0], said[1], rtol=1e-5, atol=1e-5)
        told = [e.update(one_left, pg_loss) for e in (alone, many)]
        assert told[0] == pytest.approx(told[1], rel=1e-4, abs=1e-6)
        weights = [{n: p.detach() for n, p in e.module.named_parameters()} for e in (alone, many)]
        assert_near(weights[1], weights[0], 1e-5)
    finally:
        ranks.close()


# ---------------------------------------------------------------- whole runs


def sometimes(response: str, task: whet.Task) -> float:
    """0 for every reply to a task of an even length: such groups are uniform."""
    return 0.0 if len(str(task.answer)) % 2 == 0 else response.count("a") / max(len(response), 1)


RUN: dict[str, Any] = {
    **SETUP,
    "data": {"max_prompt_tokens": 8, "train": [{"path": str(Path(__file__).parent / "data/words.jsonl")}]},
    "rollout": {"group_size": 4, "sampling": {"max_tokens": 5, "ignore_eos": True}},
    "train": {"steps": 3, "tasks_per_step": 8, "minibatches": 2, "optimizer": {"lr": 1e-2}},
    "algorithm": {"name": "grpo", "old_logprobs": "recompute"},
    "track": {"trackers": ["jsonl"], "batches_interval": 1},
}


def test_a_run_with_uniform_groups_is_written_down_and_shown(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = whet.train(rewards=sometimes, run_dir=str(run_dir), **RUN)
    assert result.finished
    for step, line in enumerate(result.metrics, start=1):
        share = line["train/skipped_rollouts_frac"]
        assert 0.1 < share < 1
        assert line["train/mismatch_mean_nats"] >= 0
        assert line["ledger/trained_rollouts"] == line["rollout/count"] == 32
        (file,) = run_dir.glob(f"batches/*-{step:06d}.parquet")
        rows = pq.read_table(file).to_pylist()
        assert sum(row["skipped_R"] for row in rows) / len(rows) == share
        for row in rows:
            sampled = [x for x, m in zip(row["logp_old_N"], row["mask_N"], strict=True) if m]
            assert all((x is None) == row["skipped_R"] for x in sampled)
            assert None not in row["logp_sample_N"]
    shown = CliRunner().invoke(app, ["show", str(run_dir)])
    assert shown.exit_code == 0, shown.output


def test_what_reads_every_rollout_is_told_in_the_log(tmp_path: Path) -> None:
    steps = {"steps": 1, "tasks_per_step": 4, "optimizer": {"lr": 1e-2}}
    (line,) = learn(tmp_path, {"name": "grpo", "entropy_coef": 0.01}, train=steps)
    assert line["train/skipped_rollouts_frac"] == 0
    told = [x for x in (tmp_path / "run/run.log").read_text().splitlines() if "weight in the gradient" in x]
    assert len(told) == 1
    assert "rollouts without advantage are not skipped: algorithm.entropy_coef is on" in told[0]
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])["train/loss"] != 0
