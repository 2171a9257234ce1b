"""No key of SkyRL's that is mapped or translated is dead: another value changes the native config, or is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from whet.config import hardware
from whet.config.load import load
from whet.config.schema import Config
from whet.dialects import here
from whet.dialects.tables import table
from whet.dialects.versions import VERSIONS, covers
from whet.types import ConfigError, Json

FILE = Path(__file__).parent / "dialects" / "skyrl_document.yaml"
A, P = "trainer.algorithm", "trainer.placement"

FILES = {version: table("skyrl", version) for version in VERSIONS["skyrl"]}
NEWEST = {
    row.key: version
    for version, rows in FILES.items()
    for row in rows
    if covers(row, version, VERSIONS["skyrl"])
}
NEWEST |= {
    **dict.fromkeys((f"{A}.normalize_reward", f"{A}.use_kl_estimator_k3", f"{A}.use_abs_kl"), "doc"),
    "generator.backend": "doc",
    **{f"generator.{kind}sampling_params.repetition_penalty": "train-0.4" for kind in ("", "eval_")},
}
"""Key -> the newest version that has it, and in which it counts."""
ROWS = {
    row.key: row
    for version, rows in FILES.items()
    for row in rows
    if NEWEST.get(row.key, "main") == version and row.status in ("mapped", "translated")
}

GAE = [f"{A}.advantage_estimator=gae", "trainer.critic.model.path=m"]
REWARD_KL = [f"{A}.use_kl_loss=false", f"{A}.use_kl_in_reward=true"]
OFF = f"{A}.off_policy_correction"
MEGATRON = "trainer.policy.megatron_config"
MEGATRON_RUN = ["trainer.strategy=megatron", f"{P}.colocate_all=false", f"{P}.colocate_policy_ref=false"]
EIGHT = [f"{P}.policy_num_gpus_per_node=8"]
PROFILER = "trainer.policy.torch_profiler_config"
ASYNC = "trainer.fully_async.enabled=true"
SIMULATED = "trainer.fully_async.simulate_training"

QAT = [*MEGATRON_RUN, "trainer.policy.model.lora.rank=8"]

TURNS = ["environment.env_class=search", "generator.max_turns=3", "generator.max_input_length=4096"]

CONTEXTS: dict[str, list[str]] = {
    "generator.inference_engine_expert_parallel_size": ["whet.rollout.engine=vllm"],
    "generator.inference_engine_pipeline_parallel_size": [
        "whet.rollout.engine=vllm",
        "trainer.placement.colocate_all=false",
    ],
    **dict.fromkeys(("generator.max_turns", "generator.max_input_length", "environment.skyrl_gym"), TURNS),
    "generator.use_conversation_multi_turn": TURNS,
    "generator.step_wise_trajectories": [*TURNS, "generator.use_conversation_multi_turn=true"],
    "generator.append_eos_token_after_stop_str_in_multi_turn": [
        *TURNS,
        "generator.use_conversation_multi_turn=true",
        'generator.sampling_params.stop=["x"]',
    ],
    "generator.remote_inference_engine_urls": ["generator.run_engines_locally=false"],
    "generator.external_server_urls": [
        "generator.run_engines_locally=false",
        "generator.remote_inference_engine_urls=[b:8001]",
    ],
    "generator.external_proxy_url": [
        "generator.run_engines_locally=false",
        "generator.external_server_urls=[b:8001]",
    ],
    "trainer.arctic_rl.optimizer_betas": [
        "trainer.override_entrypoint=integrations.arctic_rl.entrypoint",
        f"{A}.use_kl_loss=false",
    ],
    "trainer.arctic_rl.lr_warmup_ratio": [
        "trainer.override_entrypoint=integrations.arctic_rl.entrypoint",
        f"{A}.use_kl_loss=false",
    ],
    "trainer.policy.model.fake_int4_qat": [*QAT, "trainer.policy.model.fake_int4_qat.enabled=true"],
    "trainer.policy.model.fake_int4_qat.enabled": QAT,
    "trainer.critic": GAE,
    f"{A}.value_": GAE,
    f"{A}.normalize_reward": GAE,
    f"{A}.lambd": GAE,
    f"{A}.gamma": GAE,
    f"{A}.use_kl_in_reward": [f"{A}.use_kl_loss=false"],
    f"{A}.use_abs_kl": [f"{A}.use_kl_estimator_k3=false"],
    f"{A}.kl_ctrl": [*REWARD_KL, f"{A}.kl_ctrl.type=adaptive"],
    f"{A}.kl_ctrl.type": REWARD_KL,
    f"{A}.clip_ratio_c": [f"{A}.ppo_loss_type=dual_clip"],
    **{
        f"{A}.{loss}.": [f"{A}.ppo_loss_type={loss}"]
        for loss in ("cispo", "sapo", "clip_cov", "kl_cov", "dppo")
    },
    f"{A}.entropy_loss_coef": [f"{A}.use_entropy_loss=true"],
    f"{A}.use_tis": [f"{A}.tis_imp_ratio_cap=2.0"],
    f"{A}.tis_imp_ratio_cap": [f"{A}.use_tis=true", f"{A}.tis_imp_ratio_cap=2.0"],
    f"{A}.dynamic_sampling.max": [f"{A}.dynamic_sampling.type=filter"],
    f"{OFF}.token_tis": [f"{OFF}.tis_ratio_type=token"],
    f"{OFF}.sequence_tis": [f"{OFF}.tis_ratio_type=sequence"],
    f"{OFF}.geo": [f"{OFF}.sequence_mask_metric=geometric"],
    f"{OFF}.product": [f"{OFF}.sequence_mask_metric=product"],
    "trainer.ref.model_config_kwargs": ["trainer.ref.model.path=m"],
    "trainer.resume_path": ["trainer.resume_mode=from_path", "trainer.resume_path=c"],
    "trainer.export_path": ["trainer.hf_save_interval=5"],
    "trainer.target_modules": ["trainer.policy.model.lora.rank=8"],
    "trainer.policy.model.lora.": ["trainer.policy.model.lora.rank=8"],
    "trainer.critic.model.lora.": [*GAE, "trainer.critic.model.lora.rank=8"],
    "trainer.policy.model.lora.rank": [],
    "trainer.critic.model.lora.rank": GAE,
    "trainer.policy.fsdp_config.cpu_offload": [f"{P}.colocate_all=false"],
    "trainer.critic.fsdp_config.cpu_offload": GAE,
    f"{P}.colocate_all": GAE,
    f"{P}.colocate_policy_ref": [f"{P}.colocate_all=false"],
    "trainer.placement.policy_num": [f"{P}.colocate_all=false", f"{P}.colocate_policy_ref=false"],
    "trainer.micro_": ["generator.n_samples_per_prompt=8"],
    "deepspeed_config.train.gradient_clipping": [*GAE, "trainer.strategy=deepspeed"],
    "deepspeed_config.train.zero_optimization": ["trainer.strategy=deepspeed"],
    f"{A}.dynamic_sampling.min": [
        f"{A}.dynamic_sampling.type=replace",
        f"{A}.dynamic_sampling.min_replace_ratio=0",
    ],
    f"{MEGATRON}.": [*MEGATRON_RUN, *EIGHT],
    f"{MEGATRON}.mtp_": [*MEGATRON_RUN, "trainer.mtp.enabled=true"],
    "trainer.mtp.enabled": MEGATRON_RUN,
    "trainer.mtp.loss_weight": [*MEGATRON_RUN, "trainer.mtp.enabled=true"],
    "trainer.mtp.num_speculative_tokens": ["whet.rollout.engine=vllm", "trainer.mtp.enabled=true"],
    f"{MEGATRON}.moe_aux_loss_coeff": [
        *MEGATRON_RUN,
        *EIGHT,
        f"{MEGATRON}.moe_router_load_balancing_type=aux_loss",
    ],
    f"{MEGATRON}.moe_router_load_balancing_type": [
        *MEGATRON_RUN,
        *EIGHT,
        f"{MEGATRON}.moe_aux_loss_coeff=0.5",
    ],
    f"{MEGATRON}.moe_grouped_gemm": [
        *MEGATRON_RUN,
        *EIGHT,
        "trainer.policy.model.lora.rank=8",
        f"{MEGATRON}.expert_model_parallel_size=2",
    ],
    f"{MEGATRON}.lora_config": [
        *MEGATRON_RUN,
        "trainer.policy.model.lora.rank=8",
        f"{MEGATRON}.lora_config.lora_type=canonical_lora",
    ],
    f"{MEGATRON}.optimizer_config_kwargs.optimizer_cpu_offload": [
        *MEGATRON_RUN,
        "trainer.policy.optimizer_config.offload_after_step=false",
    ],
    f"{PROFILER}.": [f"{PROFILER}.enable=true", f"{PROFILER}.repeat=2", f"{PROFILER}.save_path=traces"],
    f"{PROFILER}.enable": [],
    "trainer.fully_async.max": [ASYNC],
    "trainer.fully_async.simulate_training": [ASYNC],
    "trainer.fully_async.simulate_training_step_seconds": [ASYNC, f"{SIMULATED}=true"],
    "trainer.fully_async.simulate_weight_sync_seconds": [ASYNC, f"{SIMULATED}=true"],
    f"{A}.overlong_buffer_penalty": [f"{A}.overlong_buffer_len=64"],
    "trainer.fully_async.sample": [
        ASYNC,
        f"{A}.zero_variance_filter=true",
        f"{A}.loss_reduction=sequence_mean",
        f"{A}.use_kl_loss=false",
    ],
    "generator.chat_template.source": [
        "generator.chat_template.name_or_path=t.jinja",
        "generator.chat_template.source=file",
    ],
    f"{A}.kl_estimator_type": [f"{A}.use_kl_estimator_k3=false"],
    "generator.chat_template.name": ["generator.chat_template.source=file"],
    f"{A}.max_seq_len": [f"{A}.loss_reduction=seq_mean_token_sum_norm", f"{A}.max_seq_len=9"],
    "generator.inference_engine_data": [f"{P}.colocate_all=false"],
}
"""By the beginning of a key, the longest that fits: what must be on for it to be read."""

OTHERS: dict[str, Json] = {
    "generator.max_turns": 4,
    "generator.max_input_length": 5000,
    "generator.use_conversation_multi_turn": True,
    "environment.skyrl_gym.*": {"search": {"topk": 3}},
    "deepspeed_config.train.gradient_clipping": 2.0,
    "deepspeed_config.train.zero_optimization.*": {"allgather_bucket_size": 5},
    "generator.chat_template.name_or_path": "t.jinja",
    "generator.chat_template.source": "name",
    "generator.chat_template_kwargs": {"enable_thinking": False},
    "trainer.rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "trainer.rope_theta": 5.0,
    f"{MEGATRON}.model_config_kwargs": {"rope_theta": 5.0},
    f"{MEGATRON}.lora_config.lora_type": "lora",
    f"{MEGATRON}.moe_router_load_balancing_type": "aux_loss",
    f"{MEGATRON}.mtp_num_layers": 2,
    f"{MEGATRON}.mtp_loss_topk": 64,
    "trainer.policy.fsdp_config.mixed_precision.param_dtype": "fp32",
    **{f"generator.{kind}.stop": ["x"] for kind in ("sampling_params", "eval_sampling_params")},
    **{
        f"generator.{kind}.additional_kwargs": {"min_tokens": 2}
        for kind in ("sampling_params", "eval_sampling_params")
    },
    f"{PROFILER}.ranks": [0, 1],
    f"{PROFILER}.save_path": "elsewhere",
    "trainer.max_training_steps": 7,
    f"{A}.overlong_buffer_len": 64,
    "trainer.max_tokens_per_microbatch": 4096,
    "trainer.tags": ["a"],
    "trainer.num_logger_eval_samples": 4,
    f"{A}.dynamic_sampling.min_replace_ratio": 0.5,
    "data.train_data": ["other.parquet"],
    "data.val_data": ["other.parquet"],
    "environment.env_class": "mine.py:score",
    "trainer.policy_mini_batch_size": 512,
    "trainer.critic_mini_batch_size": 512,
    "trainer.micro_train_batch_size_per_gpu": 2,
    "trainer.num_warmup_steps": 3,
    "trainer.policy.fsdp_config": {"fsdp_size": 2},
    "trainer.policy.fsdp_config.fsdp_size": 2,
    "generator.num_inference_engines": 2,
    "trainer.policy.optimizer_config": {"lr": 2e-6},
    "trainer.policy.optimizer_config.adam_betas": [0.9, 0.95],
    "trainer.policy.optimizer_config.num_warmup_steps": 3,
    "trainer.policy.optimizer_config.scheduler": "linear",
    "trainer.critic.optimizer_config.adam_betas": [0.9, 0.95],
    "trainer.critic.optimizer_config.num_warmup_steps": 3,
    "trainer.critic.optimizer_config.scheduler": "linear",
    "trainer.policy.model_config_kwargs": {"rope_theta": 5.0},
    "trainer.critic.model_config_kwargs": {"rope_theta": 5.0},
    "trainer.ref.model_config_kwargs": {"rope_theta": 5.0},
    "trainer.ref.model.path": "m",
    "trainer.critic.model.path": "other",
    "trainer.resume_mode": None,
    "trainer.resume_path": "other",
    "trainer.max_ckpts_to_keep": 2,
    "trainer.hf_save_interval": 5,
    "trainer.logger": "tensorboard",
    f"{A}.advantage_estimator": "rloo",
    f"{A}.gamma": 0.9,
    f"{A}.lambd": 0.9,
    f"{A}.ppo_loss_type": "dual_clip",
    f"{A}.loss_reduction": "sequence_mean",
    "trainer.ref.fsdp_config.cpu_offload": False,
    f"{PROFILER}.repeat": 3,
    **{f"generator.{kind}sampling_params.repetition_penalty": 1.2 for kind in ("", "eval_")},
    f"{A}.kl_estimator_type": "k2",
    f"{A}.kl_ctrl.type": "adaptive",
    f"{A}.temperature": 0.7,
    f"{A}.tis_imp_ratio_cap": 3.0,
    f"{A}.max_seq_len": 99,
    f"{A}.dynamic_sampling.type": "filter",
    f"{A}.kl_cov.kl_cov_frac": 0.3,
    f"{A}.cispo.cispo_anchor": "rollout",
    f"{A}.dppo.dppo_type": "binary_kl",
    f"{OFF}.tis_ratio_type": "token",
    f"{OFF}.sequence_mask_metric": "product",
    **{
        f"{OFF}.{name}_is_threshold_{end}": 0.5
        for name in ("outlier_token", "token_mask")
        for end in ("low", "high")
    },
    "trainer.target_modules": ["q_proj"],
    **{f"trainer.{role}.model.lora.target_modules": ["q_proj"] for role in ("policy", "critic")},
    **{f"trainer.{role}.model.lora.exclude_modules": ["q_proj"] for role in ("policy", "critic")},
    **{f"trainer.{role}.model.lora.init_method": "gaussian" for role in ("policy", "critic")},
    **{f"trainer.{role}.model.lora.dropout": 0.5 for role in ("policy", "critic")},
    "generator.model_dtype": "float32",
    "generator.engine_init_kwargs.quantization": "fp8",
    "generator.engine_init_kwargs.*": {"kv_cache_dtype": "fp8"},
    "generator.remote_inference_engine_urls": ["a:8001"],
    "generator.external_server_urls": ["http://a:8001"],
    "generator.external_proxy_url": "front:80",
    "trainer.policy.model.fake_int4_qat.bf16_base_path": "base",
    "trainer.arctic_rl.optimizer_betas": [0.9, 0.95],
    "trainer.num_dummy_steps": 3,
    "generator.backend": "sglang",
    "generator.eval_sampling_params.max_generate_length": 64,
    "generator.sampling_params": {"temperature": 0.5},
    "generator.eval_sampling_params": {"temperature": 0.5},
    **{f"generator.{kind}.top_p": 0.5 for kind in ("sampling_params", "eval_sampling_params")},
    **{f"generator.{kind}.min_p": 0.1 for kind in ("sampling_params", "eval_sampling_params")},
    **{f"generator.{kind}.top_k": 5 for kind in ("sampling_params", "eval_sampling_params")},
    **{f"generator.{kind}.*": {"stop": ["x"]} for kind in ("sampling_params", "eval_sampling_params")},
}
"""Another value, where none of its kind follows from the default."""


def another(name: str) -> Json:
    default = ROWS[name].default
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(default, bool):
        return not default
    assert isinstance(default, str | int | float), f"{name}: give another value in OTHERS"
    return f"{default}x" if isinstance(default, str) else 2 * default + (default == 0)


def override(name: str, value: Json) -> str:
    if name.endswith(".*"):
        assert isinstance(value, dict)
        ((inner, value),) = value.items()
        name = f"{name.removesuffix('*')}{inner}"
    return f"{name}={json.dumps(value)}"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.setattr(hardware, "cuda_count", lambda: 64)
    monkeypatch.setattr(here, "is_installed", lambda name: True)


@pytest.mark.parametrize("name", ROWS)
def test_another_value_changes_the_native_config_or_is_refused_by_name(name: str) -> None:
    context = CONTEXTS.get(max(filter(name.startswith, CONTEXTS), key=len, default=""), [])
    as_version = f"skyrl@{NEWEST.get(name, 'main')}"
    changed = outcome([*context, override(name, another(name))], as_version, refused=name)
    assert changed != unchanged(tuple(context), as_version)


@functools.cache
def unchanged(context: tuple[str, ...], as_version: str) -> Config:
    return load(FILE, list(context), dialect=as_version).config


def outcome(overrides: list[str], as_version: str, *, refused: str) -> Config | None:
    """The native config; None if it is refused, and then the message must name the key."""
    try:
        return load(FILE, overrides, dialect=as_version).config
    except ConfigError as e:
        said = str(e)
    assert refused in said
    return None


def test_contexts_and_values_are_of_keys_that_there_are() -> None:
    assert OTHERS.keys() <= ROWS.keys()
    assert all(any(name.startswith(start) for name in ROWS) for start in CONTEXTS)
