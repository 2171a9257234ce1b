"""Correction, two KLs at once, the critic's scale and the reference's reset, through `whet.train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from test_learning import learn
from test_train_torch import pg_loss, weighted
from tiny import tiny_model
from whet.config.schema import OptimizerConfig, ScheduleConfig
from whet.models import kernels
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.mixing import mix
from whet.training.torch import TorchEngine
from whet.types import ConfigError

OPS = kernels.load("auto")

STEPS: dict[str, Any] = {"steps": 2, "tasks_per_step": 4, "optimizer": {"lr": 1e-2}}


def test_on_policy_every_weight_is_1(tmp_path: Path) -> None:
    correction = {
        "weight": {"name": "token", "high": 2.0, "normalize": True},
        "reject": [{"over": "mean", "low": 0.99, "high": 1.01}],
    }
    plain = learn(tmp_path / "plain", {"name": "grpo"}, train=STEPS)
    corrected = learn(tmp_path / "corrected", {"name": "grpo", "correction": correction}, train=STEPS)
    for with_it, without in zip(corrected, plain, strict=True):
        assert with_it["correction/weight_mean"] == pytest.approx(1, abs=1e-6)
        assert with_it["correction/ess_frac"] == pytest.approx(1, abs=1e-6)
        assert with_it["correction/rejected_frac"] == with_it["correction/outside_frac"] == 0
        assert with_it["correction/staleness_mean"] == 0
        assert with_it["train/loss"] == pytest.approx(without["train/loss"], abs=1e-5)
        assert "correction/weight_mean" not in without


def test_what_is_rejected_teaches_nothing(tmp_path: Path) -> None:
    correction = {"reject": [{"low": 2.0}]}  # no token is that much likelier to the trainer
    algorithm = {"name": "grpo", "correction": correction, "kl": {"coef": 0.1}, "entropy_coef": 0.1}
    for line in learn(tmp_path, algorithm, train=STEPS):
        assert line["correction/rejected_frac"] == 1
        assert line["train/loss"] == line["train/grad_norm"] == 0
        assert line["train/mismatch_perplexity_ratio"] == pytest.approx(1, abs=1e-5)
        assert line["train/mismatch_engine_perplexity"] > 1


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "ppo", "correction": {"reject": [{"high": 1.02}], "reject_policy": "current"}},
        {"loss": {"name": "reinforce_is", "weight_over": "sequence", "weight_normalize": True}},
    ],
    ids=["reject_policy=current", "weight_normalize"],
)
def test_what_the_policy_that_learns_decides_does_not_depend_on_the_micro_batches(
    tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    def run(name: str, **train: Any) -> list[dict[str, Any]]:
        whole = {**algorithm, "old_logprobs": "sampled"}
        return learn(tmp_path / name, whole, train=STEPS | {"update_epochs": 3} | train)

    one, many = run("one"), run("many", micro_batch_rollouts=1)
    for a, b in zip(one, many, strict=True):
        if "weight_normalize" in str(algorithm):
            assert a["train/importance_weight"] == pytest.approx(1, abs=0.05), (
                "the mean over tokens, not over rollouts"
            )
            assert a["train/importance_weight"] == pytest.approx(b["train/importance_weight"], rel=1e-5)
        else:
            assert 0 < a["train/rejected_frac"] < 2 / 3, "nothing in the first of the three epochs"
            assert a["train/rejected_frac"] == b["train/rejected_frac"]
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-3)
        assert "correction/rejected_frac" not in a


def test_two_kls_at_once(tmp_path: Path) -> None:
    algorithm = {
        "name": "grpo",
        "kl": {"coef": 0.1, "estimator": "corrected_k3"},
        "reward_kl": {"coef": 0.2, "target": 0.01, "horizon": 100},
    }
    lines = learn(tmp_path, algorithm, train=STEPS | {"steps": 3})
    assert all("train/kl_loss_nats" in line for line in lines), "the term in the loss"
    weights = [line["train/kl_coef"] for line in lines]
    assert weights[0] == 0.2
    assert weights[1] == pytest.approx(0.2 * (1 - 0.2 * 16 / 100)), (
        "no KL at first: 20% over 16 of 100 rollouts"
    )


def test_a_critic_in_units_of_its_returns_learns(tmp_path: Path) -> None:
    lines = learn(
        tmp_path,
        {"name": "ppo"},
        train={"steps": 30, "tasks_per_step": 8, "optimizer": {"lr": 1e-2}},
        critic={"normalize_decay": 0.9, "loss_agg_mode": "seq-mean-token-mean", "optimizer": {"lr": 1e-2}},
    )
    assert (lines[0]["critic/scale_mean"], lines[0]["critic/scale_std"]) == (0.0, 1.0), "nothing seen yet"
    assert lines[1]["critic/scale_mean"] == pytest.approx(lines[0]["reward/mean"], abs=0.02)
    assert lines[-1]["critic/scale_std"] < 1
    assert sum(line["reward/mean"] for line in lines[-3:]) / 3 > 0.7


def test_reset_of_the_reference_may_begin_the_optimizer_anew(tmp_path: Path) -> None:
    def losses(name: str, **reference: Any) -> list[float]:
        algorithm = {"name": "grpo", "kl": {"coef": 0.01}}
        train = STEPS | {"steps": 4}
        return [m["train/loss"] for m in learn(tmp_path / name, algorithm, train=train, reference=reference)]

    kept, anew = losses("kept", reset_interval=2), losses("anew", reset_interval=2, reset_optimizer=True)
    assert kept[:3] == anew[:3], "the same until a step was taken with other moments"
    assert kept[3] != anew[3]


def test_a_soft_reference_by_hand() -> None:
    own, other = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 2.0])
    assert mix(own, other, 0.6, key=0).tolist() == pytest.approx([2.2, 0.4])
    assert mix(own, other, 1.0, key=0) is other


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_soft_reference_in_half_precision_follows_small_steps(dtype: torch.dtype, sign: int) -> None:
    """Rounded to the nearest, a twentieth of a difference of two of the dtype's steps would move no weight, ever."""
    step = 2 * torch.finfo(dtype).eps
    own, other = (torch.full((8192,), x, dtype=dtype) for x in (sign * 1.0, sign * (1.0 + step)))
    for version in range(20):
        own = mix(own, other, 0.05, key=version)
        left = float((other.double() - own.double()).mean()) / (sign * step)
        assert left == pytest.approx(0.95 ** (version + 1), abs=0.03)
    assert own.dtype == dtype
    assert torch.equal(mix(other, other, 0.05, key=0), other), "nothing to round"


def test_the_rounding_of_a_soft_reference_follows_from_the_version() -> None:
    def mixed(version: int) -> torch.Tensor:
        policy, reference = (
            TorchEngine(tiny_model(seed=n).bfloat16(), OPS, cut=MicroBatchPolicy()) for n in range(2)
        )
        policy.version = version
        reference.copy_from(policy, 0.05)
        return torch.cat([p.flatten() for _, p in reference.weights()])

    assert torch.equal(mixed(1), mixed(1))
    assert not torch.equal(mixed(1), mixed(2))


def test_a_soft_reference_stays_behind_and_a_stopped_run_goes_on_with_it(tmp_path: Path) -> None:
    def run(name: str, steps: int, **reference: Any) -> list[dict[str, Any]]:
        return learn(
            tmp_path / name,
            {"name": "grpo", "kl": {"coef": 0.01}},
            train=STEPS | {"steps": steps},
            reference={"reset_interval": 1, **reference},
            checkpoint={"interval": 1, "export": False},
        )

    soft = run("soft", 6, mixup_alpha=0.5)
    for steps in (3, 6):
        run("parted", steps, mixup_alpha=0.5)
    one, other = (tmp_path / name / "run" / "metrics.jsonl" for name in ("soft", "parted"))
    assert one.read_bytes() == other.read_bytes()
    copied = run("copied", 6)
    assert [m["train/kl_reference_nats"] for m in copied] == [0.0] * 6, "the policy itself, before every step"
    assert abs(soft[1]["train/kl_reference_nats"]) > 0


def test_a_forgotten_optimizer_steps_as_a_new_one_at_its_place_in_the_schedule() -> None:
    def engine(seed: int) -> TorchEngine:
        optimizer = OptimizerConfig(lr=1e-2, schedule=ScheduleConfig(type="linear"))
        return TorchEngine(
            tiny_model(seed=seed), OPS, cut=MicroBatchPolicy(), optimizer=optimizer, total_steps=4
        )

    batch = weighted()
    old, new = engine(0), engine(1)
    assert old.optimizer is not None
    assert new.optimizer is not None
    for _ in range(2):
        old.update(batch, pg_loss)
    new.copy_from(old)
    new.optimizer.step_count = 2
    old.forget()
    assert old.optimizer.step_count == 2
    assert old.optimizer.state() == {}
    a, b = old.update(batch, pg_loss), new.update(batch, pg_loss)
    assert a == b
    assert a["lr"] == pytest.approx(0.5e-2), "half of four steps are done"
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(old.weights(), new.weights(), strict=True))


def test_a_reset_that_never_comes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reference\.reset_optimizer.*reset_interval is 0"):
        learn(tmp_path, {"name": "grpo", "kl": {"coef": 0.1}}, reference={"reset_optimizer": True})
