"""What foreign files say about devices: memory of the host, ranks; on this machine, in a rehearsal, with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whet.config.dialects import skyrl_rules, verl_rules
from whet.config.dialects.key import Unbuilt
from whet.config.dialects.tables import dialect
from whet.config.load import load
from whet.config.plan import plans
from whet.rehearsal.shrink import check, shrink, what_changed
from whet.types import ConfigError

ACTOR, REF = "actor_rollout_ref.actor.", "actor_rollout_ref.ref."
MODEL, CRITIC = "actor_rollout_ref.model.", "critic.model."
PARAM, OPTIMIZER = "fsdp_config.param_offload", "fsdp_config.optimizer_offload"


def values(kind: str, **given: Any) -> dict[str, Any]:
    out = {row.name: row.default for row in dialect(kind).rows}
    return out | given


def verl(given: dict[str, Any]) -> Any:
    return verl_rules.offloaded(values("verl-ppo") | given)["train.offload"]


def test_verl_models_rest_where_there_are_any() -> None:
    alone = {"algorithm.adv_estimator": "grpo"}
    kl = alone | {ACTOR + "use_kl_loss": True}
    assert verl({}) == []
    assert verl(alone | {ACTOR + PARAM: True}) == [], "rollouts are sampled from the policy"
    assert verl(alone | {ACTOR + OPTIMIZER: True, MODEL + "enable_activation_offload": True}) == [
        "activations",
        "optimizer",
    ]
    for around, there in ((alone, []), (kl, ["reference"]), (kl | {ACTOR + "kl_loss_coef": 0.0}, [])):
        assert verl(around | {REF + PARAM: True}) == there
    assert verl(alone | {CRITIC + PARAM: True}) == []
    assert verl({CRITIC + PARAM: True}) == ["critic"], "gae has one"


def test_policy_and_critic_of_verl_do_it_alike() -> None:
    both = {ACTOR + OPTIMIZER: True, CRITIC + OPTIMIZER: True}
    assert verl(both) == ["optimizer"]
    for key in both:
        with pytest.raises(Unbuilt, match=r"critic\.model\.fsdp_config\.optimizer_offload"):
            verl({key: True})


def test_a_sequence_is_shared_by_the_ranks_of_all_models_of_skyrl() -> None:
    def ranks(given: dict[str, Any]) -> Any:
        return skyrl_rules.sequence_ranks(values("skyrl") | given)["train.parallel.cp"]

    sizes = {f"trainer.{role}.sequence_parallel_size": 2 for role in ("policy", "ref")}
    assert ranks({}) == 1
    assert ranks(sizes) == 2
    with pytest.raises(Unbuilt, match=r"trainer\.ref\.sequence_parallel_size=1"):
        ranks({"trainer.policy.sequence_parallel_size": 2})


@pytest.fixture
def cosmos(tmp_path: Path) -> Path:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n' * 8, encoding="utf-8")
    told = {
        "train": {
            "activation_offload": True,
            "master_dtype": "bfloat16",
            "output_dir": str(tmp_path / "out"),
            "max_num_steps": 3,
            "train_batch_per_replica": 16,
            "train_policy": {
                "type": "grpo",
                "dataset": {"name": str(rows)},
                "prompt_column_name": "prompt",
                "reward_function": ["single_choice"],
                "allowed_outdated_steps": 1,
            },
        },
        "policy": {"model_name_or_path": "Qwen/Qwen2.5-0.5B"},
    }
    file = tmp_path / "job.json"
    file.write_text(json.dumps(told), encoding="utf-8")
    return file


def test_what_this_device_cannot_do_is_refused_by_the_key_of_the_file(cosmos: Path) -> None:
    loaded = load(cosmos, ["whet.machine.device=cpu"])
    with pytest.raises(
        ConfigError, match=r"train\.activation_offload: train\.offload: frees memory of a GPU"
    ):
        plans(loaded)


def test_a_rehearsal_is_one_process_on_this_device(cosmos: Path, tmp_path: Path) -> None:
    loaded = load(cosmos, ["whet.machine.device=cpu"], rehearsal=True)
    plans(loaded, rehearsal=True)
    small = check(shrink(loaded, run_dir=tmp_path / "small", lost={}, broken=set()))
    assert small.train.offload == ()
    assert small.rollout.max_staleness == 1, "what is no matter of devices stays"
    assert any("train.offload" in found.what for found in what_changed(loaded.stages[0]))
