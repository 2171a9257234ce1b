"""verl's keys by release: renamed ones, changed defaults, changed meanings, features that are switched off."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from whet.config import schema
from whet.config.schedules import factor
from whet.dialects.tables import dialect, version_of
from whet.dialects.translate import Translation, translate
from whet.types import Json

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


def made(given: Mapping[str, Json], version: str, kind: str = "verl-ppo") -> Translation:
    """A file with these dotted keys, as a release reads it."""
    tree: dict[str, Json] = {}
    for key, value in given.items():
        *above, last = key.split(".")
        around = tree
        for part in above:
            around = around.setdefault(part, {})
        around[last] = value
    return translate(tree, dialect(kind, version), origins={})


def told(given: Mapping[str, Json], version: str, kind: str = "verl-ppo") -> list[str]:
    found = made(given, version, kind)
    return [text for _, text in (*found.problems, *found.unbuilt)]


FITS: dict[str, Json] = {
    A + "ppo_micro_batch_size_per_gpu": 8,
    R + "log_prob_micro_batch_size_per_gpu": 8,
    "critic.ppo_micro_batch_size_per_gpu": 8,
}
"""What newer releases leave open."""


def test_renamed_keys_mean_the_same() -> None:
    own = {"path": "mine.py", "name": "f", "reward_kwargs": {"a": 1}}
    older = made({**FITS, "custom_reward_function": own}, "0.6.0")
    newer = made({**FITS, "reward.custom_reward_function": own}, "0.9.0")
    assert older.tree["rewards"] == newer.tree["rewards"]
    prime = made({**FITS, "reward.reward_manager.name": "prime"}, "0.8.0")
    assert prime.tree["reward_workers"] == {"count": 4, "timeout_s": 300.0}
    buffer = {"enable": True, "len": 8, "penalty_factor": 0.5}
    for key, version in (
        ("reward_model.overlong_buffer", "0.4.0"),
        ("reward.reward_kwargs.overlong_buffer_cfg", "0.9.0"),
    ):
        dapo = {**FITS, "reward_model.reward_manager": "dapo", key: buffer}
        assert made(dapo, version).tree["rewards"]["overlong"]["weight"] == 0.5
    assert made({**FITS, "critic.fsdp.param_offload": True}, "0.8.0").tree["train"]["offload"] == ["critic"]


@pytest.mark.parametrize(
    ("given", "version"),
    [
        ({"reward_manager": {"source": "importlib", "module": {"path": "mine.py", "name": "Mine"}}}, "0.7.0"),
        ({"reward.reward_manager": {"source": "importlib", "module": {"path": "mine.py"}}}, "0.9.1"),
    ],
)
def test_who_has_a_reward_manager_is_told_what_to_write(given: Mapping[str, Json], version: str) -> None:
    (said,) = told({**FITS, **given}, version)
    assert 'reward_manager.source: got "importlib"' in said
    assert "custom_reward_function.path" in said
    assert "natively rewards.NAME.function" in said


def test_a_default_is_that_of_the_release() -> None:
    for version in ("0.4.0", "0.5.0"):
        assert made(FITS, version).tree["train"]["gradient_checkpointing"] is True
        assert "interval" not in made(FITS, version).tree["eval"], "test_freq is -1"
    assert "Please set at least one of" in " ".join(told({}, "0.5.0"))
    megatron: dict[str, Json] = {**FITS, A + "strategy": "megatron", "critic.strategy": "megatron"}
    megatron[A + "optim.clip_grad"] = 1.0
    kinds = {version: _schedule(megatron, version).type for version in ("0.4.1", "0.5.0")}
    assert kinds == {"0.4.1": "linear", "0.5.0": "constant"}


def _schedule(given: Mapping[str, Json], version: str) -> schema.ScheduleConfig:
    return schema.ScheduleConfig(**made(given, version).tree["train"]["optimizer"]["schedule"])


@pytest.mark.parametrize(
    ("version", "mode"),
    [("0.4.0", "token-sum-norm"), ("0.7.0", "token-sum-norm"), ("0.7.1", "seq-mean-token-sum-norm")],
)
def test_the_norm_divides_by_the_rollouts_since_0_7_1(version: str, mode: str) -> None:
    """Two rollouts of 3 and 5 tokens with a loss of 1 each, 10 tokens at most: 8 / 10, later 8 / 2 / 10."""
    given = {**FITS, A + "loss_agg_mode": "seq-mean-token-sum-norm", "data.max_response_length": 10}
    found = made(given, version).tree["algorithm"]
    assert (found["loss_agg_mode"], found["norm_tokens"]) == (mode, 10)
    weight = {"token-sum-norm": 1 / 10, "seq-mean-token-sum-norm": 1 / 2 / 10}[mode]
    assert (3 + 5) * weight == pytest.approx(0.8 if mode == "token-sum-norm" else 0.4)


def test_no_warm_up_steps_mean_the_ratio_since_0_8_0() -> None:
    given = {**FITS, A + "optim.lr_warmup_steps": 0, A + "optim.lr_warmup_steps_ratio": 0.5}
    older, newer = _schedule(given, "0.7.1"), _schedule(given, "0.8.0")
    assert [factor(older, step, 4) for step in range(4)] == [1.0, 1.0, 1.0, 1.0]
    assert [factor(newer, step, 4) for step in range(4)] == [0.0, 0.5, 1.0, 1.0]
    shifted = _schedule({**given, A + "optim.zero_indexed_step": False}, "0.8.0")
    assert [factor(shifted, step, 4) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


def test_gradients_are_clipped_by_the_optimizers_key_since_0_8_0() -> None:
    given = {**FITS, A + "grad_clip": 0.5, A + "optim.clip_grad": 0.25}
    clips = {v: made(given, v).tree["train"]["optimizer"]["max_grad_norm"] for v in ("0.7.1", "0.8.0")}
    assert clips == {"0.7.1": 0.5, "0.8.0": 0.25}


def test_off_policy_correction_by_release() -> None:
    grpo: dict[str, Json] = {**FITS, "algorithm.adv_estimator": "grpo", R + "n": 2}

    def correction(version: str, **given: Json) -> Json:
        at = {f"algorithm.{key}": value for key, value in given.items()}
        assert told({**grpo, **at}, version) == []
        return made({**grpo, **at}, version).tree["algorithm"]["correction"]

    veto = {"statistic": "ratio", "over": "max", "low": 1e-4}
    first = correction("0.6.0", rollout_is=True, rollout_is_threshold=2.0, rollout_is_mode="mask")
    assert first == {
        "weight": {"name": "token", "low": 0.5, "high": 2.0, "outside": "mask"},
        "reject": [veto],
    }
    second = correction("0.7.0", rollout_correction={"rollout_rs": "geometric", "rollout_rs_threshold": 4.0})
    assert second == {"reject": [{"statistic": "ratio", "over": "mean", "high": 4.0, "low": 0.25}]}
    bounded = {"rollout_is": "token", "rollout_is_threshold": "0.5_5"}
    third = correction("0.8.0", rollout_correction=bounded)
    weight = {"name": "token", "low": 0.5, "high": 5.0, "outside": "mask", "normalize": False}
    assert third == {"weight": weight, "denominator": "all"}
    rejects = {**bounded, "rollout_rs": "token_k2", "rollout_rs_threshold": "0.1"}
    fourth = correction("0.8.0", rollout_correction=rejects)
    assert fourth == {"weight": weight, "reject": [{"statistic": "k2", "over": "token", "high": 0.1}]}


def test_the_return_of_reinforce_plus_plus_crosses_turns_since_0_9() -> None:
    def resets(version: str, turns: bool) -> Json:
        given = {**FITS, "algorithm.adv_estimator": "reinforce_plus_plus", R + "multi_turn.enable": turns}
        advantage = made(given, version).tree["algorithm"]["advantage"]
        return isinstance(advantage, dict) and advantage.get("reset_at_turns", False)

    releases = ("0.4.0", "0.8.0", "0.9.0", "main")
    assert [resets(version, True) for version in releases] == [True, True, False, False]
    assert not resets("0.8.0", False)


def test_the_asynchronous_trainers() -> None:
    apart: dict[str, Json] = {
        **FITS,
        "actor_rollout_ref.hybrid_engine": False,
        "algorithm.adv_estimator": "grpo",
        "rollout.nnodes": 1,
        "rollout.n_gpus_per_node": 4,
        R + "n": 8,
    }
    one_off = made(apart, "0.7.0").tree["rollout"]
    assert (one_off["max_staleness"], one_off["replicas"]) == (1, 2)
    fully = {
        **apart,
        "data.train_batch_size": 0,
        A + "ppo_mini_batch_size": 32,
        "async_training.require_batches": 2,
        "async_training.trigger_parameter_sync_step": 4,
        "async_training.staleness_threshold": 0.5,
        "rollout.total_rollout_steps": 6400,
    }
    assert told(fully, "0.7.1") == []
    tree = made(fully, "0.7.1").tree
    # a step is 2 * 32 tasks, so 6400 tasks are 100 steps; of each version 1.5 * 4 steps may be asked for: 4, and 2 more
    assert (tree["train"]["tasks_per_step"], tree["train"]["minibatches"], tree["train"]["steps"]) == (
        64,
        2,
        100,
    )
    rollout = tree["rollout"]
    assert (rollout["schedule"], rollout["sync_interval"], rollout["max_staleness"]) == ("async", 4, 2)
    assert tree["algorithm"]["old_logprobs"] == "sampled"
    # validations and checkpoints are counted in syncs, of 4 steps each
    often = made(
        {**fully, "trainer.test_freq": 5, "trainer.save_freq": 2, "data.val_files": "held.parquet"}, "0.7.1"
    ).tree
    assert (often["eval"]["interval"], often["checkpoint"]["interval"]) == (20, 8)


@pytest.mark.parametrize("version", ["0.9.0", "main", "0.9.1"])
def test_separate_async_moves_the_rate_with_each_mini_batch(version: str) -> None:
    """trainer_base.py: the schedule has total_training_steps * parameter_sync_step steps, one for each local update."""
    given: dict[str, Json] = {
        **FITS,
        "actor_rollout_ref.hybrid_engine": False,
        "trainer.v1.trainer_mode": "separate_async",
        "trainer.v1.separate_async.parameter_sync_step": 4,
        "data.train_batch_size": 64,
        "algorithm.adv_estimator": "grpo",
        A + "ppo_mini_batch_size": 16,
        A + "ppo_micro_batch_size_per_gpu": 2,
        A + "optim.lr_warmup_steps": 10,
        "trainer.total_training_steps": 25,
    }
    tree = made(given, version).tree
    schedule = tree["train"]["optimizer"]["schedule"]
    assert (tree["train"]["minibatches"], tree["train"]["steps"]) == (4, 25)
    assert (schedule["unit"], schedule["warmup_steps"], schedule["total_steps"]) == (
        "optimizer_step",
        10,
        100,
    )
    refused = told({**given, A + "ppo_epochs": 2}, version)
    assert any("ppo_epochs=2 with trainer.v1.trainer_mode=separate_async" in text for text in refused)


def test_the_trainer_that_is_a_step_ahead_compares_with_what_was_sampled() -> None:
    ahead: dict[str, Json] = {**FITS, "actor_rollout_ref.hybrid_engine": False}
    old = {v: made(ahead, v).tree["algorithm"].get("old_logprobs") for v in ("0.6.1", "0.7.0", "main")}
    assert old == {"0.6.1": None, "0.7.0": "sampled", "main": "sampled"}
    given = {**ahead, "algorithm.rollout_correction.bypass_mode": False}
    assert made(given, "main").tree["algorithm"].get("old_logprobs") is None


def test_a_cosine_warms_up_from_0_since_0_6_0() -> None:
    given: dict[str, Json] = {
        **FITS,
        A + "optim.warmup_style": "cosine",
        A + "optim.min_lr_ratio": 0.2,
        A + "optim.lr_warmup_steps": 10,
    }
    starts = {
        v: made(given, v).tree["train"]["optimizer"]["schedule"].get("warmup_start_ratio", 0.0)
        for v in ("0.4.0", "0.5.0", "0.6.0", "main")
    }
    assert starts == {"0.4.0": 0.2, "0.5.0": 0.2, "0.6.0": 0.0, "main": 0.0}


def test_supervised_fine_tuning_over_engines() -> None:
    given: dict[str, Json] = {
        "model.path": "m",
        "optim.lr_scheduler_type": "cosine",
        "optim.lr_warmup_steps_ratio": 0.1,
        "optim.min_lr_ratio": 0.2,
        "data.messages_key": "talk",
        "data.max_token_len_per_gpu": 4096,
        "engine.ulysses_sequence_parallel_size": 1,
    }
    assert told(given, "0.9.0", "verl-sft") == []
    tree = made(given, "0.9.0", "verl-sft").tree
    assert (tree["model"]["path"], tree["train"]["micro_batch_tokens"]) == ("m", 4096)
    assert tree["data"]["train"][0]["messages"] == "talk"
    assert "order" not in tree["data"], "its trainers shuffle"
    schedule = tree["train"]["optimizer"]["schedule"]
    assert (schedule["type"], schedule["min_lr_ratio"], schedule["warmup_steps"]) == ("cosine", 0.2, 0.1)


@pytest.mark.parametrize(
    "given",
    [
        {R + "multi_turn": {"max_assistant_turns": 3, "format": "qwen"}},
        {"distillation": {"n_gpus_per_node": 4}},
        {A + "fsdp_config.qat": {"mode": "w8a8"}},
        {"actor_rollout_ref.model.mtp": {"detach_encoder": True, "mtp_loss_scaling_factor": 0.3}},
        {"reward.reward_model.rollout": {"name": "vllm"}},
        {A + "megatron.override_transformer_config": {"moe_aux_loss_coeff": 0.1}},
    ],
)
def test_keys_of_a_feature_that_is_off_rest(given: dict[str, Json]) -> None:
    assert told({**FITS, **given}, "0.9.0") == []


@pytest.mark.parametrize(
    ("given", "area"),
    [
        ({R + "agent.default_agent_loop": "swe_agent"}, "or an environment of yours"),
        ({"distillation.enabled": True}, "must have the model_path of a teacher"),
        ({A + "fsdp_config.qat.enable": True}, "quantised training"),
        ({"critic.model.mtp.enable": True}, "multi-token prediction of a critic"),
        ({A + "strategy": "mindspeed"}, "coming, not built yet"),
    ],
)
def test_a_feature_that_is_not_there_is_named(given: dict[str, Json], area: str) -> None:
    assert area in " ".join(told({**FITS, **given}, "0.9.0"))


def test_keys_that_change_memory_or_speed_alone_are_accepted() -> None:
    given: dict[str, Json] = {
        R + "mode": "async",
        R + "enforce_eager": False,
        R + "free_cache_engine": False,
        R + "checkpoint_engine.backend": "nccl",
        R + "agent.num_workers": 4,
        R + "prometheus.enable": True,
        A + "use_torch_compile": False,
        A + "fsdp_config.use_orig_params": True,
        A + "profiler.enable": True,
        "transfer_queue.enable": True,
        "actor_rollout_ref.nccl_timeout": 7200,
        "ray_kwargs.ray_init.num_cpus": 4,
    }
    assert told({**FITS, **given}, "0.9.0") == []


def test_a_release_is_known_by_its_keys() -> None:
    assert version_of("verl-ppo", ["data.train_files"]) == "0.4.0"
    assert version_of("verl-ppo", ["data.train_files", "skip.<name>.enable"]) == "0.9.1"
    assert version_of("verl-ppo", ["algorithm.rollout_is_mode"]) == "0.6.0"
    for newer_name in (
        "critic.fsdp.param_offload",
        "reward.custom_reward_function.path",
        "reward.num_workers",
    ):
        assert version_of("verl-ppo", ["data.train_files", newer_name]) == "0.9.1"
    assert version_of("verl-ppo", ["data.train_files", "reward_manager.name"]) == "0.7.0"
    assert version_of("verl-ppo", ["data.train_files", "trainer.profile_steps"]) == "0.4.0"


def test_0_9_1_is_read_with_its_own_keys() -> None:
    given: dict[str, Json] = {
        **FITS,
        A + "fsdp_config.use_no_sync_for_gradient_accumulation": True,
        R + "router_config_path": "router.yaml",
        "actor_rollout_ref.model.lora.dtype": None,
        "distillation.distillation_loss._target_": "verl.workers.config.DistillationLossConfig",
        "trainer.checkpoint_callback_class": None,
    }
    assert told(given, "0.9.1") == []
    assert version_of("verl-ppo", ["trainer.checkpoint_callback_class"]) == "0.9.1"
    assert version_of("verl-ppo", ["data.train_files"], "verl@0.9.1") == "0.9.1"
    asks = {**FITS, "trainer.checkpoint_callback_class": "mine.Callback"}
    assert "coming, not built yet" in " ".join(told(asks, "0.9.1"))
    # formulas of 0.9.1: gspo honours loss_agg_mode
    gspo = {**FITS, A + "policy_loss.loss_mode": "gspo", A + "loss_agg_mode": "token-mean"}
    modes = {v: made(gspo, v).tree["algorithm"]["loss_agg_mode"] for v in ("0.9.0", "main", "0.9.1")}
    assert modes == {"0.9.0": "seq-mean-token-mean", "main": "seq-mean-token-mean", "0.9.1": "token-mean"}


@pytest.mark.parametrize(
    ("version", "given", "rejects"),
    [
        ("0.6.1", {}, False),  # the statistics of the tests are metrics there
        ("0.6.1", {"use_policy_gradient": True}, True),
        ("0.7.0", {}, True),
        ("0.7.1", {}, True),
        ("0.9.0", {"loss_type": "reinforce"}, True),
    ],
)
def test_bypass_mode_rejects_by_the_policy_that_learns(
    version: str, given: dict[str, Json], rejects: bool
) -> None:
    test = {"rollout_rs": "token" if version in ("0.6.1", "0.7.0") else "token_k1", "rollout_rs_threshold": 2}
    keys = {"bypass_mode": True, **test, **given}
    found = made({**FITS, **{f"algorithm.rollout_correction.{key}": x for key, x in keys.items()}}, version)
    told = found.tree["algorithm"].get("correction", {})
    assert told == (
        {
            "reject": [{"statistic": "ratio", "over": "token", "low": 0.5, "high": 2}],
            "reject_policy": "current",
        }
        if rejects
        else {}
    )


def test_groups_are_filtered_by_the_whole_reward_since_0_9_1() -> None:
    """There `metric` is reward where it is not said, and the newer trainer has no number of generations."""
    filters: dict[str, Json] = {**FITS, R + "n": 4, "algorithm.adv_estimator": "grpo"}
    filters["algorithm.filter_groups"] = {"enable": True, "max_num_gen_batches": 10}
    newer, older = made(filters, "0.9.1").tree["algorithm"], told(filters, "0.9.0")
    assert newer["dynamic_sampling"] is True
    assert newer["max_refills"] == 1_000_000
    assert "groups" not in newer, "the whole reward is what native groups are compared by"
    assert [text for text in older if "filter_groups.metric: got null, expected one of acc" in text]
    files = made({**filters, "trainer.use_v1": False}, "0.9.1").tree["algorithm"]
    assert files["max_refills"] == 9


def test_supervised_fine_tuning_over_engines_splits_by_tokens_since_0_7_0() -> None:
    given: dict[str, Json] = {"model.path": "m", "data.train_batch_size": 64}
    assert made(given, "0.7.0", "verl-sft").tree["train"]["micro_batch_tokens"] == 8192
    shared: dict[str, Json] = {"ulysses_sequence_parallel_size": 2, "use_remove_padding": True}
    shared["data.max_token_len_per_gpu"] = 1000
    found = made(given | shared, "0.7.0", "verl-sft").tree["train"]
    assert (found["parallel"]["cp"], found["micro_batch_tokens"]) == (2, 2000), "a budget for each of the two"


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"custom_reward_function": {"path": "mine.py", "reward_kwargs": "a"}}, "verl-ppo", "reward_kwargs"),
        ({R + "nnodes": 2, R + "n_gpus_per_node": None}, "verl-ppo", "n_gpus_per_node: got null"),
        *(
            ({"model": {"path": "m", "strategy": "megatron"}, f"engine.{kind}_parallel_size": 0}, "verl-sft", kind)
            for kind in ("tensor_model", "pipeline_model", "context", "expert_model")
        ),
    ],
)  # fmt: skip
def test_values_that_mean_nothing_are_refused_by_their_key(
    given: dict[str, Json], kind: str, said: str
) -> None:
    assert [text for text in told(given, "0.9.1", kind) if said in text]


def test_null_under_an_old_name_says_nothing_where_the_new_one_is_given() -> None:
    """verl's own document has both since 0.7.1."""
    old, new = "reward_model.rollout.", "reward.reward_model.rollout."
    known = {
        "dtype": "float32",
        "load_format": "auto",
        "prompt_length": 2048,
        "disaggregation.enabled": False,
    }
    reward = {
        "reward.reward_model.enable": True,
        "reward.reward_model.model_path": "rm",
        new + "name": "vllm",
    }
    given = {**FITS, **reward, **{new + key: value for key, value in known.items()}}
    nulls = {old + key: None for key in ("name", "dtype", "load_format", "prompt_length")}
    assert (
        made({**nulls, **given}, "0.9.1").tree
        == made(given, "0.9.1").tree
        == made({**given, **nulls}, "0.9.1").tree
    )
    assert made(given, "0.9.1").tree["rewards"]["rm"]["model"]["dtype"] == "float32"
    assert told({**nulls, **given}, "0.9.1") == told({**given, **nulls}, "0.9.1") == []
    (said,) = told({**FITS, **reward, old + "dtype": None}, "0.9.1")
    assert "got null, expected one of bfloat16" in said


def test_a_value_that_must_be_given_need_not_be_where_nothing_reads_it() -> None:
    rest = {**FITS, "reward.reward_model.rollout.name": "???"}
    assert told(rest, "0.9.1") == []
    assert told({**rest, R + "name": "???"}, "0.9.1") == [f"{R}name: must be given"]


@pytest.mark.parametrize("kind", ["verl-ppo", "verl-sft"])
def test_null_in_the_place_of_a_section_says_nothing(kind: str) -> None:
    small: dict[str, Json] = FITS if kind == "verl-ppo" else {"model.path": "m"}
    keys = ("data.apply_chat_template_kwargs", "critic.model.override_config")[: 2 if small is FITS else 1]
    nothing = made({**small, **dict.fromkeys(keys)}, "0.9.1", kind)
    assert not nothing.problems
    assert nothing.tree == made({**small, **{key: {} for key in keys}}, "0.9.1", kind).tree
