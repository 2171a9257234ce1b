"""SkyRL's keys of algorithm, optimizers and critic: what each native setting is, by hand and against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from asked import asked
from test_skyrl import load, refusal, said, values
from whet.config import schema
from whet.config.recipes import resolve
from whet.config.schedules import factor
from whet.dialects.row import NotSupportedYet
from whet.dialects.skyrl import learn, optimizers
from whet.dialects.typed import choices
from whet.types import ConfigError, Json

learn, optimizers = map(asked, (learn, optimizers))

# ---------------------------------------------------------------- algorithm

KL = "trainer__algorithm__"


@pytest.mark.parametrize(
    ("given", "section", "estimator"),
    [
        ({}, "kl", "k3"),
        ({KL + "use_abs_kl": True}, "kl", "k3"),  # k3 is never negative
        ({KL + "use_abs_kl": True, KL + "use_kl_estimator_k3": False}, "kl", "abs"),
        ({KL + "use_kl_estimator_k3": False}, "kl", "k1"),
        ({KL + "use_kl_in_reward": True, KL + "use_kl_loss": False}, "reward_kl", "k3"),
        ({KL + "kl_estimator_type": "k2"}, "kl", "k2"),
    ],
)
def test_kl(given: dict[str, Json], section: str, estimator: str) -> None:
    assert learn.kl(values(**given)) == {
        f"algorithm.{section}.coef": 0.001,
        f"algorithm.{section}.estimator": estimator,
    }


def test_kl_off_and_kl_twice() -> None:
    assert learn.kl(values(trainer__algorithm__use_kl_loss=False)) == {}
    assert learn.kl(values(trainer__algorithm__kl_loss_coef=0)) == {}
    assert "exclude each other" in refusal(learn.kl, trainer__algorithm__use_kl_in_reward=True)
    assert "expected a number >= 0" in said(trainer__algorithm__kl_loss_coef=-0.1)


def test_advantages() -> None:
    assert learn.advantages(values()) == {"algorithm.name": "grpo"}
    settings: dict[str, Json] = {
        KL + "lambd": 0.95,
        KL + "gamma": 0.9,
        KL + "advantage_batch_normalize": True,
    }
    whitened = {"algorithm.whiten": "population"}
    assert learn.advantages(values(**settings)) == {"algorithm.name": "grpo", **whitened}
    gae = values(**settings, **{KL + "advantage_estimator": "gae"}, trainer__critic__model__path="m")
    assert learn.advantages(gae) == {
        "algorithm.name": "ppo",
        "algorithm.advantage.gamma": 0.9,
        "algorithm.advantage.lam": 0.95,
        **whitened,
    }
    assert (
        learn.advantages(values(**{KL + "grpo_norm_by_std": False}))["algorithm.advantage.normalize_std"]
        is False
    )
    plus_plus: dict[str, Json] = {KL + "advantage_estimator": "reinforce++"}
    assert learn.advantages(values(**plus_plus)) == {
        "algorithm.name": "reinforce_pp",
        "algorithm.advantage.gamma": 1.0,
    }
    several = learn.advantages(values(**plus_plus, generator__max_turns=2))
    assert several["algorithm.advantage.reset_at_turns"] is True
    twice = learn.advantages(values(**plus_plus, **{KL + "advantage_batch_normalize": True}))
    assert twice == {"algorithm.name": "reinforce", "algorithm.advantage.gamma": 1.0, **whitened}
    assert learn.advantages(values(**{KL + "advantage_estimator": "maxrl"})) == {"algorithm.name": "maxrl"}
    assert "expected one of grpo, gae" in said(**{KL + "advantage_estimator": "gra"})


def test_losses_and_reductions() -> None:
    plain = {"algorithm.loss": "ppo", "algorithm.loss.clip_low": 0.2, "algorithm.loss.clip_high": 0.2}
    assert learn.policy_loss(values(trainer__algorithm__clip_ratio_c=4.0)) == plain
    dual: dict[str, Json] = {KL + "ppo_loss_type": "dual_clip", KL + "clip_ratio_c": 4.0}
    assert learn.policy_loss(values(**dual)) == plain | {"algorithm.loss.dual_clip": 4.0}
    gspo = learn.policy_loss(values(**{KL + "ppo_loss_type": "gspo"}))
    assert gspo == plain | {"algorithm.loss": "gspo", "algorithm.loss.gspo_form": "token"}
    cispo = values(**{KL + "ppo_loss_type": "cispo", KL + "cispo__cispo_eps_clip_low": 0})
    assert learn.policy_loss(cispo) == {
        "algorithm.loss": "cispo",
        "algorithm.loss.clip_low": 1e-12,
        "algorithm.loss.clip_high": 5,
    }
    assert torch.tensor(1 - 1e-12, dtype=torch.float32) == 1
    kl_cov = values(**{KL + "ppo_loss_type": "kl_cov"})
    assert learn.policy_loss(kl_cov)["algorithm.loss.kl_cov_ratio"] == 0.2
    assert "expected one of regular, dual_clip" in said(**{KL + "ppo_loss_type": "vanilla"})


def test_losses_that_skyrl_sums_over_tokens_are_refused() -> None:
    """Whatever loss_reduction says: cross_entropy in every version that has it, importance_sampling before 0.2."""
    imitates: dict[str, Json] = {KL + "ppo_loss_type": "cross_entropy"}
    weighs: dict[str, Json] = {KL + "ppo_loss_type": "importance_sampling"}
    versions = [("doc", imitates), ("0.3", imitates), ("train-0.4", weighs), ("0.1", weighs)]
    for version, given in versions:
        with pytest.raises(NotSupportedYet, match="is a sum over tokens in this version of SkyRL"):
            learn.policy_loss(values(version, **given))
    assert learn.policy_loss(values("0.2", **weighs)) == {"algorithm.loss": "importance_sampling"}
    assert learn.reduction(values()) == {"algorithm.loss_agg_mode": "seq-mean-token-mean"}
    assert learn.reduction(values(**{KL + "loss_reduction": "seq_mean_token_sum_norm"})) == {
        "algorithm.loss_agg_mode": "seq-mean-token-sum-norm",
        "algorithm.norm_tokens": 512 + 1024,
    }
    legacy = {KL + "loss_reduction": "token_mean_legacy"}
    assert learn.reduction(values(**legacy, trainer__micro_train_batch_size_per_gpu=2)) == {
        "algorithm.loss_agg_mode": "token-mean",
        "algorithm.mean_over_rollouts": 2,
    }


def test_every_loss_and_estimator_makes_a_config_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    at = "trainer.algorithm"
    pairs = [(loss, "grpo") for loss in choices("skyrl", "loss")] + [
        ("regular", name) for name in choices("skyrl", "estimator")
    ]
    needs = {
        "gae": ["trainer.critic.model.path=m"],
        "no_op": [f"{at}.use_kl_in_reward=true", f"{at}.use_kl_loss=false", "trainer.ref.model.path=teacher"],
    }
    for loss, estimator in pairs:
        chosen = [f"{at}.ppo_loss_type={loss}", f"{at}.advantage_estimator={estimator}"]
        resolved = resolve(load("skyrl_document.yaml", *chosen, *needs.get(estimator, ())).config.algorithm)
        assert (resolved.loss, resolved.name) == (
            choices("skyrl", "loss")[loss],
            choices("skyrl", "estimator")[estimator],
        )


OFF = KL + "off_policy_correction__"


def test_corrections() -> None:
    """By the document of SkyRL's off-policy correction: caps 2 and 5, geometric 0.99 to 1.01, product 0.5 to 2."""
    at = "algorithm.correction"
    assert learn.correction(values()) == {}
    token = learn.correction(values(**{OFF + "tis_ratio_type": "token"}))
    assert token == {f"{at}.weight": "token", f"{at}.weight.high": 2.0, f"{at}.denominator": "all"}
    sequence = learn.correction(values(**{OFF + "tis_ratio_type": "sequence"}))
    assert (sequence[f"{at}.weight"], sequence[f"{at}.weight.high"]) == ("sequence", 5.0)
    old = learn.correction(values(**{KL + "use_tis": True, KL + "tis_imp_ratio_cap": 3.0}))
    assert old == dict(token) | {f"{at}.weight.high": 3.0}
    masks = values(
        **{
            OFF + "sequence_mask_metric": "geometric",
            OFF + "outlier_token_is_threshold_low": 1e-4,
            OFF + "token_mask_is_threshold_low": 0.5,
            OFF + "token_mask_is_threshold_high": 9.0,
        }
    )
    assert learn.correction(masks)[f"{at}.reject"] == [
        {"over": "mean", "low": 0.99, "high": 1.01},
        {"over": "max", "low": 1e-4},
        {"over": "token", "low": 0.5, "high": 9.0},
    ]
    assert "tis_imp_ratio_cap > 0" in refusal(learn.correction, **{KL + "use_tis": True})
    both: dict[str, Json] = {KL + "use_tis": True, OFF + "tis_ratio_type": "token"}
    assert "are the same setting" in refusal(learn.correction, **both)
    for end in ("low", "high"):
        one = refusal(learn.correction, **{f"{OFF}token_mask_is_threshold_{end}": 2.0})
        assert "masks no token where only one" in one


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov", "cross_entropy", "importance_sampling"])
@pytest.mark.parametrize("key", ["tis_ratio_type", "outlier_token_is_threshold_high"])
def test_losses_that_read_no_correction(loss: str, key: str) -> None:
    given = {KL + "ppo_loss_type": loss, OFF + key: "token" if key == "tis_ratio_type" else 9.0}
    assert f"{loss} reads no off-policy correction" in refusal(learn.correction, **given)
    assert learn.correction(values(**{KL + "ppo_loss_type": loss})) == {}


def test_until_train_0_4_the_loss_of_ppo_alone_is_corrected() -> None:
    tis: dict[str, Json] = {KL + "use_tis": True, KL + "tis_imp_ratio_cap": 3.0}
    gspo = {**tis, KL + "ppo_loss_type": "gspo"}
    assert learn.correction(values("train-0.4", **gspo))["algorithm.correction.weight.high"] == 3.0
    assert learn.correction(values("train-0.3", **tis))["algorithm.correction.weight.high"] == 3.0
    with pytest.raises(ConfigError, match="gspo reads no off-policy correction"):
        learn.correction(values("train-0.3", **gspo))


def test_groups_and_entropy() -> None:
    zero, mask = {"generator__zero_reward_on_non_stop": True}, {"generator__apply_overlong_filtering": True}
    assert learn.groups(values()) == {}
    assert learn.groups(values(**zero)) == {"algorithm.groups.truncated": "zero"}
    assert learn.groups(values(**mask)) == {"algorithm.groups.truncated": "mask"}
    with pytest.raises(NotSupportedYet):
        learn.groups(values(**zero, **mask))
    dynamic = KL + "dynamic_sampling__"
    filtered = learn.groups(values(**{dynamic + "type": "filter"}))
    assert filtered == {"algorithm.dynamic_sampling": True, "algorithm.max_refills": 29}
    with pytest.raises(NotSupportedYet):
        learn.groups(values(**{dynamic + "type": "replace"}))
    assert learn.entropy(values()) == {}
    assert learn.entropy(values(**{KL + "use_entropy_loss": True})) == {
        "algorithm.entropy_coef": 0.01,
        "algorithm.entropy_agg_mode": "token-mean",
    }


def test_an_adaptive_kl_and_a_reference_by_epochs() -> None:
    adaptive: dict[str, Json] = {KL + "kl_ctrl__type": "adaptive", KL + "kl_ctrl__kl_target": 0.2}
    in_reward: dict[str, Json] = {KL + "use_kl_in_reward": True, KL + "use_kl_loss": False}
    assert learn.kl(values(**adaptive)) == learn.kl(values())
    steered = learn.kl(values(**adaptive, **in_reward))
    assert (steered["algorithm.reward_kl.target"], steered["algorithm.reward_kl.horizon"]) == (0.2, 10000)
    by_epoch: dict[str, Json] = {"trainer__update_ref_every_epoch": True}
    assert learn.reference(values(**by_epoch)) == {"reference.reset_interval": "1 epoch"}
    assert learn.reference(values(**by_epoch, **{KL + "use_kl_loss": False})) == {}


# ---------------------------------------------------------------- optimizers and critic


def test_optimizers() -> None:
    terms = {
        "train.optimizer.lr": 1e-6,
        "train.optimizer.betas": [0.9, 0.999],
        "train.optimizer.weight_decay": 0.01,
    }
    assert optimizers.policy_optimizer(values(trainer__num_warmup_steps=7)) == {
        **terms,
        "train.optimizer.max_grad_norm": 1.0,
        "train.optimizer.decay_all": True,
        "train.optimizer.schedule.type": "constant",
        "train.optimizer.schedule.warmup_steps": 7,
        "train.optimizer.schedule.warmup_ends": "start",
    }
    own = values(
        trainer__num_warmup_steps=7,
        trainer__policy__optimizer_config__num_warmup_steps=3,
        trainer__policy__optimizer_config__max_grad_norm=-1,
        trainer__policy__optimizer_config__scheduler="cosine",
        trainer__policy__optimizer_config__weight_decay=0.0,
    )
    assert optimizers.policy_optimizer(own) == {
        **terms,
        "train.optimizer.weight_decay": 0.0,
        "train.optimizer.max_grad_norm": None,
        "train.optimizer.schedule.type": "cosine",
        "train.optimizer.schedule.warmup_steps": 3,
        "train.optimizer.schedule.warmup_ends": "start",
    }


@pytest.mark.parametrize("name", ["cosine_with_min_lr", "warmup_stable_decay", "reduce_lr_on_plateau"])
def test_schedules_that_no_run_of_skyrl_begins_with_are_refused(name: str) -> None:
    """They need arguments that SkyRL does not pass: get_scheduler or its first step raises."""
    given = "trainer__policy__optimizer_config__scheduler"
    with pytest.raises(ConfigError, match="SkyRL stops there, too"):
        optimizers.policy_optimizer(values(**{given: name}))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-5)
    with pytest.raises((ValueError, TypeError)):
        get_scheduler(name, optimizer, num_warmup_steps=4, num_training_steps=30).step()


def test_schedules_are_those_of_transformers() -> None:
    """Step by step, 30 optimizer steps, 4 of them warm-up."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    for name in (
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
    ):
        given = "trainer__policy__optimizer_config__"
        made = optimizers.policy_optimizer(
            values(**{given + "scheduler": name, given + "num_warmup_steps": 4, given + "lr": 1e-5})
        )
        start = "train.optimizer.schedule."
        ours = schema.ScheduleConfig(
            **{k.removeprefix(start): v for k, v in made.items() if k.startswith(start)}
        )
        optimizer = torch.optim.AdamW([parameter], lr=1e-5)
        theirs = get_scheduler(name, optimizer, num_warmup_steps=4, num_training_steps=30)
        for step in range(30):
            assert 1e-5 * factor(ours, step, 30) == pytest.approx(
                theirs.get_last_lr()[0], rel=1e-9, abs=1e-18
            )
            optimizer.step()
            theirs.step()
    no_warmup = values(**{given + "scheduler": "inverse_sqrt"})
    with pytest.raises(NotSupportedYet):
        optimizers.policy_optimizer(no_warmup)


def test_critic() -> None:
    learning: dict[str, Json] = {
        "trainer__algorithm__value_clip": None,
        "trainer__critic__optimizer_config__lr": 3e-6,
        "trainer__num_warmup_steps": 5,
    }
    assert optimizers.critic(values(**learning)) == {}
    gae: dict[str, Json] = {KL + "advantage_estimator": "gae", "trainer__critic__model__path": "m"}
    assert "must be given" in refusal(optimizers.critic, **gae | {"trainer__critic__model__path": None})
    assert optimizers.critic(values(**learning, **gae)) == {
        "critic.path": "m",
        "critic.head": "value_head",
        "critic.value_clip": None,
        "critic.loss_agg_mode": "seq-mean-token-mean",
        "critic.normalize_decay": 0.99,
        "critic.optimizer.lr": 3e-6,
        "critic.optimizer.betas": [0.9, 0.999],
        "critic.optimizer.weight_decay": 0.01,
        "critic.optimizer.max_grad_norm": 1.0,
        "critic.optimizer.decay_all": True,
        "critic.optimizer.schedule.type": "constant",
        "critic.optimizer.schedule.warmup_steps": 5,
        "critic.optimizer.schedule.warmup_ends": "start",
    }
    constants = values(**gae, trainer__algorithm__normalize_reward=False)
    assert optimizers.critic(constants)["critic.normalize_decay"] is None
