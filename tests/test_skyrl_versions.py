"""SkyRL's releases: a file is read as one of them, by its names, defaults and meanings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asked import asked
from test_skyrl import refusal, values
from whet.config.load import Loaded
from whet.config.load import load as load_config
from whet.dialects.row import NotSupportedYet
from whet.dialects.skyrl import devices, learn, optimizers, run
from whet.dialects.tables import version_of
from whet.types import ConfigError, Json

devices, learn, optimizers, run = map(asked, (devices, learn, optimizers, run))

A = "trainer__algorithm__"


def load(folder: Path, tree: Json, *overrides: str, dialect: str = "skyrl") -> Loaded:
    file = folder / "file.json"
    file.write_text(json.dumps(tree))
    return load_config(file, overrides, dialect=dialect)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")


# ---------------------------------------------------------------- which one


@pytest.mark.parametrize(
    ("keys", "version"),
    [
        (["trainer.epochs"], "doc"),
        (["trainer.num_warmup_steps", "trainer.algorithm.ppo_loss_type"], "doc"),
        (["trainer.algorithm.policy_loss_type", "trainer.algorithm.use_kl_estimator_k3"], "train-0.3"),
        (["trainer.algorithm.policy_loss_type", "generator.num_inference_engines"], "train-0.4"),
        (["trainer.algorithm.policy_loss_type", "generator.inference_engine.num_engines"], "main"),
        (["generator.inference_engine.remote_urls"], "0.2"),
    ],
)
def test_a_version_is_known_by_the_names_of_keys(keys: list[str], version: str) -> None:
    assert version_of("skyrl", keys) == version


def test_a_renamed_key_is_one_key(tmp_path: Path) -> None:
    older = {"generator": {"num_inference_engines": 1, "inference_engine_tensor_parallel_size": 8}}
    newer = {"generator": {"inference_engine": {"num_engines": 1, "tensor_parallel_size": 8}}}
    eight = {"placement": {f"{role}_num_gpus_per_node": 8 for role in ("policy", "ref")}}
    both = [
        load(tmp_path, {**tree, "trainer": {**eight, "logger": "console"}}, dialect="skyrl@0.2")
        for tree in (older, newer)
    ]
    assert both[0].config == both[1].config
    (note,) = [line.note for line in both[0].translation.lines if "num_inference" in line.key]
    assert note.startswith("skyrl 0.2 does not have it (until 0.1)")


# ---------------------------------------------------------------- defaults


def test_defaults_are_those_of_the_version() -> None:
    gpus = [
        values(v)["trainer.placement.policy_num_gpus_per_node"] for v in ("doc", "train-0.3", "train-0.4")
    ]
    assert gpus == [4, 4, 1]
    assert (
        learn.policy_loss(values("0.3", **{A + "ppo_loss_type": "cispo"}))["algorithm.loss.clip_high"] == 5.0
    )
    assert (
        learn.policy_loss(values("main", **{A + "ppo_loss_type": "cispo"}))["algorithm.loss.clip_high"] == 4.0
    )


def test_evaluation_samples_by_the_version(tmp_path: Path) -> None:
    def sampling(version: str, given: Json = None) -> tuple[float, int]:
        eval_ = {} if given is None else {"eval_sampling_params": given}
        tree = {"generator": {"sampling_params": {"max_generate_length": 64}, **eval_}}
        logger = {"trainer": {"logger": "console"}}
        found = load(tmp_path, {**tree, **logger}, dialect=f"skyrl@{version}").config.eval.sampling
        assert found is not None
        return found.temperature, found.max_tokens

    assert sampling("doc") == (1.0, 64)
    assert sampling("train-0.1") == sampling("train-0.4", {"top_p": 0.9}) == (0.0, 64)
    assert sampling("0.1") == (0.0, 64), "a section that is left out"
    assert sampling("0.1", {"top_p": 0.9}) == (1.0, 1024), "a section given in part has defaults of its own"


# ---------------------------------------------------------------- meanings


def test_the_kl_may_be_in_the_reward() -> None:
    in_reward: dict[str, Json] = {A + "use_kl_loss": False, A + "use_kl_in_reward": True}
    assert learn.kl(values("train-0.3", **in_reward))["algorithm.reward_kl.coef"] == 0.001


def test_a_mean_over_tokens_of_micro_batches_of_one_is_one_over_sequences() -> None:
    """Losses 1, 1 | 4 of two sequences: each alone (1 + 4) / 2 = 2.5, together (1 + 1 + 4) / 3 = 2."""
    losses = [[1.0, 1.0], [4.0]]
    alone = sum(sum(one) / len(one) for one in losses) / len(losses)
    together = sum(map(sum, losses)) / sum(map(len, losses))
    assert (alone, together) == (2.5, 2.0)
    modes = {
        (v, micro): learn.reduction(values(v, trainer__micro_train_batch_size_per_gpu=micro))
        for v in ("train-0.1", "0.1", "0.2")
        for micro in (1, 2)
    }
    by_sequence = [
        key for key, mode in modes.items() if mode["algorithm.loss_agg_mode"] == "seq-mean-token-mean"
    ]
    assert by_sequence == [("train-0.1", 1), ("0.1", 1)]
    assert learn.reduction(values("doc"))["algorithm.loss_agg_mode"] == "seq-mean-token-mean"
    legacy = learn.reduction(values("0.2", **{A + "loss_reduction": "token_mean_legacy"}))
    assert legacy["algorithm.loss_agg_mode"] == "seq-mean-token-mean"


def test_max_seq_len_was_overwritten_and_must_be_given_now() -> None:
    norm: dict[str, Json] = {A + "loss_reduction": "seq_mean_token_sum_norm"}
    given = {
        v: learn.reduction(values(v, **norm, **{A + "max_seq_len": 9})) for v in ("train-0.4", "0.1", "main")
    }
    assert [found["algorithm.norm_tokens"] for found in given.values()] == [512 + 1024, 9, 9]
    assert learn.reduction(values("0.1", **norm))["algorithm.norm_tokens"] == 512 + 1024
    assert "must be given" in refusal(learn.reduction, version="0.2", **norm)


@pytest.mark.parametrize("version", ["doc", "train-0.3", "main"])
def test_a_schedule_ends_with_the_run_in_every_release(version: str) -> None:
    """Until train-0.4 SkyRL itself had its end too early, with several optimizer steps a training step."""
    falling = values(version, trainer__policy__optimizer_config__scheduler="cosine")
    found = optimizers.policy_optimizer(falling)
    assert found["train.optimizer.schedule.type"] == "cosine"
    assert "train.optimizer.schedule.total_steps" not in found


@pytest.mark.parametrize("version", ["doc", "train-0.3", "0.1", "main"])
def test_the_kl_of_the_loss_counts_in_every_release(version: str) -> None:
    """From train-0.1 to 0.1 SkyRL itself computed it without a gradient."""
    given = values(version, trainer__algorithm__use_kl_loss=True, trainer__algorithm__kl_loss_coef=0.01)
    assert learn.kl(given)["algorithm.kl.coef"] == 0.01


def test_what_masks_leave_out_counts_in_averages_from_02_on() -> None:
    mask: dict[str, Json] = {A + "off_policy_correction__sequence_mask_metric": "product"}
    denominators = [
        learn.correction(values(v, **mask))["algorithm.correction.denominator"]
        for v in ("train-0.4", "0.1", "0.2")
    ]
    assert denominators == ["kept", "kept", "all"]
    outliers: dict[str, Json] = {A + "off_policy_correction__outlier_token_is_threshold_low": 0.1}
    assert learn.correction(values("train-0.4", **outliers)) == {}, "read with another correction alone"
    assert "algorithm.correction.reject" in learn.correction(values("0.1", **outliers))


@pytest.mark.parametrize("version", ["train-0.2", "0.1", "main"])
def test_a_repetition_penalty_is_read_in_every_release(version: str) -> None:
    """From 0.1 on SkyRL itself loses it on the way to the engine."""
    given = values(version, generator__sampling_params__repetition_penalty=1.2)
    assert run.training_sampling(given)["rollout.sampling.repetition_penalty"] == 1.2


@pytest.mark.parametrize("version", ["train-0.4", "0.1", "main"])
def test_an_evaluation_takes_no_parameter_of_training(version: str) -> None:
    """Natively it has what training has, where it says nothing; SkyRL's two sections share nothing."""
    at = "generator__sampling_params__"
    kwargs = {"min_tokens": 3, "ignore_eos": True, "stop_token_ids": [7]}
    trained: dict[str, Json] = {f"{at}stop": ["</x>"], f"{at}additional_kwargs": kwargs}
    told = run.evaluation(values(version, data__val_data=["b.parquet"], **trained))
    names = ("stop", "stop_token_ids", "min_tokens", "ignore_eos")
    assert [told[f"eval.sampling.{name}"] for name in names] == [[], [], 0, False]
    own: dict[str, Json] = {"generator__eval_sampling_params__stop": ["</y>"]}
    told = run.evaluation(values(version, data__val_data=["b.parquet"], **trained, **own))
    assert [told[f"eval.sampling.{name}"] for name in names] == [["</y>"], [], 0, False]
    assert "eval.sampling.stop" not in run.evaluation(values(version, data__val_data=["b.parquet"]))


def test_normalised_rewards_checkpoints_and_engines_by_version() -> None:
    gae: dict[str, Json] = {A + "advantage_estimator": "gae", "trainer__critic__model__path": "m"}
    assert [optimizers.critic(values(v, **gae))["critic.normalize_decay"] for v in ("doc", "train-0.1")] == [
        0.99,
        None,
    ]
    assert [run.checkpoints(values(v))["checkpoint.interval"] for v in ("0.1", "0.2")] == [
        10,
        [10, "1 epoch"],
    ]
    assert "remote engines only" in refusal(run.rollout_engine, generator__backend="sglang")
    assert run.rollout_engine(values("train-0.1", generator__backend="sglang"))


# ---------------------------------------------------------------- Megatron, DeepSpeed, asynchronous


def test_megatron_is_a_layout() -> None:
    at = "trainer__policy__megatron_config__"
    given = {
        "trainer__strategy": "megatron",
        "trainer__placement__colocate_all": False,
        "trainer__placement__policy_num_gpus_per_node": 16,
        "trainer__placement__ref_num_gpus_per_node": 16,
        at + "tensor_model_parallel_size": 2,
        at + "pipeline_model_parallel_size": 2,
        at + "expert_model_parallel_size": 4,
    }
    v = values("main", **given)
    assert devices.layout(v) == {
        "train.parallel.pp": 2,
        "train.parallel.tp": 2,
        "train.parallel.dp_shard": 4,
        "train.parallel.ep": 4,
    }
    made = optimizers.policy_optimizer(
        values("0.2", **given, trainer__policy__optimizer_config__adam_betas=[0.8, 0.9])
    )
    assert made["train.optimizer.betas"] == [0.9, 0.999], "its own until 0.3"
    assert "train.optimizer.decay_all" not in made
    frozen = optimizers.policy_optimizer(values("main", **given, **{at + "freeze_moe_router": True}))
    assert frozen["train.trainable"] == {r"mlp\.gate\.": False}
    given_lora = {**given, "trainer__policy__model__lora__rank": 8}
    assert optimizers.policy_lora(values("main", **given_lora))["model.lora.experts"] == "shared"
    apart = values("main", **given_lora, **{at + "moe_grouped_gemm": False})
    assert optimizers.policy_lora(apart)["model.lora.experts"] == "each"
    canonical = {**given_lora, at + "lora_config__lora_type": "canonical_lora"}
    with pytest.raises(
        NotSupportedYet, match=r"expert_model_parallel_size=4: .*\(canonical_lora\) are coming"
    ):
        optimizers.policy_lora(values("main", **canonical))
    with pytest.raises(NotSupportedYet, match="dropout of experts' adapters is coming"):
        optimizers.policy_lora(values("main", **given_lora, trainer__policy__model__lora__dropout=0.1))
    assert "constant_with_warmup alone" in refusal(
        optimizers.policy_optimizer,
        version="main",
        **given,
        trainer__policy__optimizer_config__scheduler="cosine",
    )


def test_adapters_leave_out_what_is_excluded_and_begin_as_peft_or_megatron_does() -> None:
    at = "trainer__policy__model__lora__"
    on: dict[str, Json] = {f"{at}rank": 8}
    assert "model.lora.exclude_modules" not in optimizers.policy_lora(values("main", **on))
    made = optimizers.policy_lora(values("main", **on, **{f"{at}exclude_modules": ".*visual.*"}))
    assert made["model.lora.exclude_modules"] == ".*visual.*"
    assert made["model.lora.init"] == "default"
    pissa = optimizers.policy_lora(values("main", **on, **{f"{at}init_method": "pissa"}))
    assert pissa["model.lora.init"] == "pissa"
    megatron: dict[str, Json] = {
        **on,
        "trainer__strategy": "megatron",
        "trainer__policy__megatron_config__lora_config__lora_type": "canonical_lora",
    }
    made = optimizers.policy_lora(values("main", **megatron, **{f"{at}init_method": "xavier"}))
    assert made["model.lora.init"] == "xavier"
    for key, value, said in (
        ("init_method", "zero", "gradients are always 0"),
        ("init_method", "normal", "coming"),
        ("init_method", "gaussian", "expected one of kaiming, xavier, normal"),
        ("exclude_modules", ["up_proj"], "list the layers in target_modules"),
    ):
        more: dict[str, Json] = {f"{at}{key}": value}
        assert said in refusal(optimizers.policy_lora, version="main", **megatron, **more)


def test_frozen_experts_are_rounded_as_those_of_the_checkpoint_that_is_served() -> None:
    """As run_megatron_dapo_qwen3.6_35b_a3b_lora_int4_qat.sh."""
    at = "trainer__policy__model__"
    lora: dict[str, Json] = {"trainer__strategy": "megatron", f"{at}lora__rank": 8, f"{at}path": "int4"}
    on = {**lora, f"{at}fake_int4_qat__enabled": True}
    base = {f"{at}fake_int4_qat__bf16_base_path": "base"}
    kimi = {f"{at}fake_int4_qat__scale_divisor": 7.0, f"{at}fake_int4_qat__q_min": -7.0}
    assert optimizers.policy_weights(values("main", **lora)) == {"model.path": "int4"}
    rounded = {"model.path": "int4", "model.expert_grid": "int4_rtn"}
    assert optimizers.policy_weights(values("main", **on)) == rounded
    assert optimizers.policy_weights(values("main", **on, **base, **kimi)) == {
        "model.path": "base",
        "model.expert_grid": "int4_kimi",
    }
    for given, said in (
        ({**lora, **base}, "an engine with weights in 4 bits beside a trainer of others"),
        ({**on, f"{at}fake_int4_qat__q_min": -7.0}, "with 7.5 and -8, or with 7 and -7"),
        ({**on, f"{at}fake_int4_qat__group_size": 128}, "group_size=128"),
        ({**on, f"{at}lora__rank": 0}, "it rounds frozen weights"),
        ({**on, "trainer__strategy": "fsdp"}, "needs trainer.strategy=megatron"),
    ):
        assert said in refusal(optimizers.policy_weights, version="main", **given)
    assert optimizers.policy_weights(values("train-0.4", **{f"{at}path": "m"})) == {"model.path": "m"}


def test_megatrons_adapters_are_those_of_fused_layers() -> None:
    at = "trainer__policy__model__lora__"
    kind = "trainer__policy__megatron_config__lora_config__lora_type"
    on: dict[str, Json] = {f"{at}rank": 8, "trainer__strategy": "megatron"}
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    made = optimizers.policy_lora(values("main", **on))
    assert (made["model.lora.fused"], made["model.lora.targets"]) == (True, every), "lora is the default"
    canonical = optimizers.policy_lora(values("main", **on, **{kind: "canonical_lora"}))
    assert canonical["model.lora.targets"] == every
    assert "model.lora.fused" not in canonical
    some: dict[str, Json] = {f"{at}target_modules": ["linear_qkv", "linear_fc2"]}
    assert optimizers.policy_lora(values("main", **on, **some))["model.lora.targets"] == [
        *every[:3],
        every[6],
    ]
    one: dict[str, Json] = {f"{at}target_modules": ["linear_proj"]}
    assert "model.lora.fused" not in optimizers.policy_lora(values("main", **on, **one)), "one layer"
    assert "model.lora.fused" not in optimizers.policy_lora(
        values("main", **{**on, "trainer__strategy": "fsdp"})
    )
    for key, value in (("target_modules", ["q_proj"]), ("target_modules", "linear_qkv")):
        more: dict[str, Json] = {f"{at}{key}": value}
        assert "expected all-linear, or a list of Megatron-LM's names" in refusal(
            optimizers.policy_lora, version="main", **on, **more
        )
    experts: dict[str, Json] = {
        **on,
        "trainer__policy__megatron_config__expert_model_parallel_size": 2,
        f"{at}target_modules": ["linear_qkv", "linear_proj"],
    }
    assert optimizers.policy_lora(values("main", **experts))["model.lora.targets"] == every[:4]


def test_megatrons_router_terms_are_each_layers() -> None:
    at = "trainer__policy__megatron_config__moe_"
    megatron: dict[str, Json] = {"trainer__strategy": "megatron", f"{at}aux_loss_coeff": 0.01}
    on: dict[str, Json] = {**megatron, f"{at}router_load_balancing_type": "aux_loss"}
    assert optimizers.routers(values("main", **on)) == {
        "train.router_aux_loss_coef": 0.01,
        "train.router_aux_loss_scope": "layer",
    }
    assert optimizers.routers(values("main", **megatron)) == {}, "none by default"
    assert optimizers.routers(values("main", **{**on, "trainer__strategy": "fsdp"})) == {}
    said = refusal(
        optimizers.routers, version="main", **{**on, f"{at}router_load_balancing_type": "seq_aux_loss"}
    )
    assert "within each sequence" in said


@pytest.mark.parametrize("version", ["0.2", "main"])
def test_experts_are_replayed_where_engine_and_trainer_have_it_both(version: str) -> None:
    asked, told = (
        "trainer__policy__megatron_config__moe_enable_routing_replay",
        "generator__inference_engine__enable_return_routed_experts",
    )
    replay = learn.router_replay
    megatron: dict[str, Json] = {"trainer__strategy": "megatron"}
    both = {**megatron, asked: True, told: True}
    assert replay(values(version, **both)) == {"train.router_replay": "sampled"}
    assert replay(values(version, **megatron)) == {}
    assert replay(values(version, trainer__strategy="fsdp", **{asked: True})) == {}, "FSDP does not read it"
    for wrong, said in (
        ({**both, told: False}, "which gives the experts"),
        ({**both, asked: False}, "which reads them"),
        ({**both, "trainer__strategy": "fsdp"}, "needs trainer.strategy=megatron"),
        ({**both, "generator__step_wise_trajectories": True}, "does not go with"),
    ):
        assert said in refusal(replay, version=version, **wrong)


def test_deepspeed_clips_by_its_own_norm_where_none_is_given() -> None:
    given: dict[str, Json] = {
        "trainer__strategy": "deepspeed",
        "deepspeed_config__train__gradient_clipping": 3.0,
        "trainer__policy__optimizer_config__max_grad_norm": 0,
    }
    assert optimizers.policy_optimizer(values(**given))["train.optimizer.max_grad_norm"] == 3.0


def test_an_asynchronous_run_is_the_free_schedule() -> None:
    given: dict[str, Json] = {"trainer__fully_async__enabled": True}
    assert run.ahead(values("main", **given)) == {"rollout.schedule": "async", "rollout.max_staleness": 4}
    full = values(
        "main", **given, **{A + "zero_variance_filter": True}, trainer__fully_async__sample_full_batch=True
    )
    assert learn.groups(full) == {"algorithm.dynamic_sampling": True}
    assert run.ahead(values("main")) == {}


def test_a_run_of_simulated_steps_trains_nothing_and_sends_no_weights_to_servers_of_others() -> None:
    at = "trainer__fully_async__"
    given: dict[str, Json] = {
        f"{at}enabled": True,
        f"{at}simulate_training": True,
        f"{at}simulate_training_step_seconds": 5,
    }
    several: dict[str, Json] = {
        "trainer__placement__policy_num_gpus_per_node": 4,
        "trainer__placement__ref_num_gpus_per_node": 4,
        "trainer__placement__colocate_all": False,
    }
    arguments = {"step_s": 5.0, "sync_s": 0.0}
    found = devices.simulated(values("main", **given))
    assert found == {"train.engine": "simulated", "train.engine_arguments": arguments}
    assert devices.layout(values("main", **given, **several)).get("train.parallel.dp_shard", 1) == 1
    assert devices.layout(values("main", **several))["train.parallel.dp_shard"] == 4
    assert not devices.is_simulated(values("main", **{f"{at}simulate_training": True}))
    servers: dict[str, Json] = {
        "generator__run_engines_locally": False, "generator__external_server_urls": ["http://a:1", "http://b:1"],
    }  # fmt: skip
    named = {"rollout.engine": "openai", "rollout.server.urls": ["http://a:1", "http://b:1"]}
    assert run.rollout_engine(values("main", **given, **servers)) == named
    proxied = values("main", **given, **servers, generator__external_proxy_url="http://p:1")
    assert run.rollout_engine(proxied) == {"rollout.engine": "openai", "rollout.server.urls": ["http://p:1"]}


# ---------------------------------------------------------------- keys that rest, and keys of memory


@pytest.mark.parametrize(
    ("version", "key", "value"),
    [
        ("main", "trainer.policy.megatron_config.transformer_config_kwargs", {"num_layers": 3}),
        ("main", "trainer.policy.megatron_config.mtp_num_layers", 1),
        ("main", "generator.inference_engine.external_server_urls", ["http://127.0.0.1:1"]),
        ("main", "trainer.policy.model.lora.exclude_modules", ["lm_head"]),
        ("main", "generator.step_wise_trajectories", True),
        ("train-0.3", "deepspeed_config.train.zero_optimization.zero_quantized_weights", True),
        ("main", "generator.inference_engine.engine_init_kwargs", {"max_model_len": 4096}),
        ("main", "generator.inference_engine.enforce_eager", True),
        ("main", "trainer.critic.sequence_parallel_size", 2),
        ("main", "trainer.ref.fsdp_config.fsdp_size", 2),
        ("main", "generator.inference_engine.offload_kv_for_weight_sync", True),
        ("main", "trainer.logprobs_chunk_size", None),
    ],
)
def test_keys_that_rest_and_keys_of_memory_change_nothing(
    version: str, key: str, value: Json, tmp_path: Path
) -> None:
    plain = {"trainer": {"logger": "console"}}
    with_it, without = (
        load(tmp_path, plain, *more, dialect=f"skyrl@{version}").config
        for more in ([f"{key}={json.dumps(value)}"], [])
    )
    assert with_it == without


def test_a_filter_that_would_change_numbers_is_refused(tmp_path: Path) -> None:
    filtered = "trainer.algorithm.zero_variance_filter=true"
    plain = {"trainer": {"logger": "console", "algorithm": {"use_kl_loss": False}}}
    with pytest.raises(ConfigError, match="zero_variance_filter"):
        load(tmp_path, plain, filtered, dialect="skyrl@main")
    by_sequence = [filtered, "trainer.algorithm.loss_reduction=sequence_mean"]
    assert load(tmp_path, plain, *by_sequence, dialect="skyrl@main")


def test_the_penalty_of_long_replies_of_dapo() -> None:
    given: dict[str, Json] = {A + "overlong_buffer_len": 256, A + "overlong_buffer_penalty_factor": 0.5}
    assert run.environment(values("main", **given)) == {
        "rewards.gsm8k.function": "whet.rewards.gsm8k:gsm8k",
        "rewards.overlong.function": "overlong",
        "rewards.overlong.weight": 0.5,
        "rewards.overlong.arguments": {"max_tokens": 1024, "buffer": 256},
        "eval.reward": "gsm8k",
    }


def test_long_prompts_are_left_out() -> None:
    kept = {v: run.prompt_limit(values(v))["data.overlong"] for v in ("doc", "train-0.1", "0.3", "main")}
    assert kept == {"doc": "truncate_left", "train-0.1": "filter", "0.3": "filter", "main": "filter"}
