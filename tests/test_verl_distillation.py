"""verl's distillation from a teacher: what it is here."""

from __future__ import annotations

from typing import Any

import pytest

from asked import asked
from test_verl import A, R, refusal, values
from whet.dialects.row import NotSupportedYet
from whet.dialects.verl import algorithm, distillation
from whet.types import ConfigError, Json

algorithm, distillation = map(asked, (algorithm, distillation))

D = "distillation.distillation_loss."
ON: dict[str, Json] = {
    "distillation.enabled": True,
    "distillation.teacher_models.*": {"teacher_model": {"model_path": "org/teacher"}},
    "algorithm.adv_estimator": "grpo",
    D + "use_task_rewards": False,
}


def native(**given: Any) -> dict[str, Json]:
    v = values({**ON, **{D + key: value for key, value in given.items()}})
    parts = (
        algorithm.advantage,
        algorithm.loss,
        algorithm.kl,
        algorithm.discount,
        algorithm.correction,
        distillation.teacher,
    )
    return {key: value for part in parts for key, value in part(v).items()}


def test_the_policy_gradient_has_minus_the_divergence_as_advantage_and_its_own_clip() -> None:
    assert native(loss_mode="k1", use_policy_gradient=True, loss_max_clamp=10.0, clip_ratio_high=0.3) == {
        "algorithm.name": "distill",
        "algorithm.advantage.distill_estimator": "k1",
        "algorithm.advantage_clip": [-10.0, 10.0],
        "algorithm.loss.clip_low": 0.2,
        "algorithm.loss.clip_high": 0.3,
        "algorithm.loss.dual_clip": 3.0,
        "reference.path": "org/teacher",
    }


def test_without_it_the_divergence_is_the_loss() -> None:
    assert native() == {
        "algorithm.name": "gkd",
        "algorithm.loss.divergence": "low_var_kl",
        "algorithm.loss.max_divergence": None,
        "reference.path": "org/teacher",
    }
    found = native(loss_mode="forward_kl_topk", topk=64, log_prob_min_clamp=-10.0, loss_max_clamp=10.0)
    assert found == {
        "algorithm.name": "gkd",
        "algorithm.loss.divergence": "forward_topk",
        "algorithm.loss.top_k": 64,
        "algorithm.loss.min_logprob": -10.0,
        "algorithm.loss.max_divergence": 10.0,
        "reference.path": "org/teacher",
    }


def test_beside_rewards_the_divergence_is_a_kl_in_the_loss() -> None:
    found = native(use_task_rewards=True, loss_mode="k3", distillation_loss_coef=0.5, loss_max_clamp=10.0)
    assert found["algorithm.name"] == "reinforce"  # of one response
    assert found["algorithm.loss"] == "ppo"
    assert (found["algorithm.kl.coef"], found["algorithm.kl.estimator"]) == (0.5, "low_var_kl")
    assert found["reference.path"] == "org/teacher"


def test_one_teacher_of_another_name_takes_the_place_of_the_first() -> None:
    models = {"teacher_model": {"model_path": "a"}, "gsm8k": {"key": "openai/gsm8k", "model_path": "b"}}
    v = values({**ON, "distillation.teacher_models.*": models})
    assert distillation.teacher(v)["reference.path"] == "b"


TWO: dict[str, Json] = {
    "teacher_model": {"model_path": None},
    "gsm8k": {"key": "openai/gsm8k", "model_path": "a", "num_replicas": 1},
    "geo3k": {"key": "hiyouga/geometry3k", "model_path": "b", "num_replicas": 1},
}
"""Those of examples/on_policy_distillation_trainer/run_qwen3_8b_mopd_fsdp.sh."""


def test_several_teachers_are_references_that_the_label_of_a_row_chooses() -> None:
    given: dict[str, Json] = {**ON, "distillation.teacher_models.*": TWO}
    models = [
        {"path": "a", "values": ["openai/gsm8k"]},
        {"path": "b", "values": ["hiyouga/geometry3k"]},
    ]
    assert distillation.teacher(values(given)) == {"reference.models": models}, "data_source is the label"
    other = values(given | {"distillation.teacher_key": "ability"})
    assert distillation.teacher(other) == {"reference.models": models, "reference.column": "ability"}
    beside = values(given | {D + "use_task_rewards": True})
    assert distillation.teacher(beside)["reference.models"] == models
    assert distillation.teacher(beside)["algorithm.kl.coef"] == 1.0


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({D + "loss_mode": "k1", D + "use_task_rewards": True}, "needs use_policy_gradient=True"),
        ({D + "use_policy_gradient": True, D + "use_task_rewards": True}, "beside one of a teacher"),
        ({D + "loss_mode": "forward_kl_topk", D + "use_task_rewards": True}, "beside rewards"),
        ({D + "loss_mode": "k2", D + "loss_max_clamp": 1.0, D + "use_task_rewards": True}, "a bound"),
        ({R + "temperature": 0.7}, "at another temperature"),
        ({A + "entropy_coeff": 0.1}, "has no effect"),
        ({"algorithm.adv_estimator": "gae"}, "no effect on the policy"),
        ({"distillation.teacher_models.*": {}}, "must have the model_path"),
        (
            {"distillation.teacher_models.*": {"a": {"model_path": "a"}, "b": {"model_path": "b"}}},
            "teacher_models.a: must have the key",
        ),
        (
            {"distillation.teacher_models.*": {n: {"model_path": n, "key": "x"} for n in "ab"}},
            "a, b have the same key",
        ),
        (
            {"distillation.teacher_models.*": TWO, D + "loss_mode": "forward_kl_topk"},
            "from one of several teachers",
        ),
        ({D + "use_task_rewards": True, A + "use_kl_loss": True}, "beside a KL to a reference"),
    ],
)
def test_what_is_not_there_is_refused_by_its_name(given: dict[str, Json], why: str) -> None:
    assert why in refusal(distillation.teacher, {**ON, **given})


def test_many_tokens_as_an_advantage_are_refused() -> None:
    given = {D + "loss_mode": "forward_kl_topk", D + "use_policy_gradient": True}
    with pytest.raises(NotSupportedYet, match="as the advantage of the sampled one"):
        algorithm.advantage(values({**ON, **given}))


def test_tokens_that_are_left_out_of_a_divergence_are_refused() -> None:
    rejects = {
        "algorithm.rollout_correction.rollout_rs": "token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold": "2.0",
    }
    with pytest.raises(ConfigError, match="leaving tokens out of a divergence"):
        algorithm.correction(values({**ON, **rejects}))
