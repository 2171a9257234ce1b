"""verl's training engines: which keys of optimizers, sizes and memory each one reads, with numbers worked by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from whet.config import schema
from whet.config.schedules import factor
from whet.dialects.tables import dialect
from whet.dialects.translate import Translation, translate
from whet.types import Json

A, R, REF = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
OPT = A + "optim."

FITS: dict[str, Json] = {
    "algorithm.adv_estimator": "grpo",
    A + "ppo_micro_batch_size_per_gpu": 1,
    R + "log_prob_micro_batch_size_per_gpu": 8,
    R + "n": 8,
}
SFT: dict[str, Json] = {
    "model.path": "m",
    "data.max_token_len_per_gpu": 4096,
    "trainer.n_gpus_per_node": 8,
}


def made(given: Mapping[str, Json], *, version: str = "main", kind: str = "verl-ppo") -> Translation:
    """A file with these dotted keys beside those that every file needs."""
    tree: dict[str, Json] = {}
    for key, value in {**(FITS if kind == "verl-ppo" else SFT), **given}.items():
        *above, last = key.split(".")
        around = tree
        for part in above:
            around = around.setdefault(part, {})
        around[last] = value
    return translate(tree, dialect(kind, version), origins={})


def train(given: Mapping[str, Json], **how: str) -> dict[str, Json]:
    found = made(given, **how)
    assert found.problems == found.unbuilt == ()
    section: dict[str, Json] = found.tree["train"]
    return section


def told(given: Mapping[str, Json], **how: str) -> str:
    found = made(given, **how)
    return " ".join(text for _, text in (*found.problems, *found.unbuilt))


def factors(optimizer: Mapping[str, Json], *steps: int) -> list[float]:
    """Of the learning rate in these steps of ten."""
    schedule = schema.ScheduleConfig(**optimizer["schedule"])
    assert schedule.unit == "train_step"
    return [round(factor(schedule, step, 10), 12) for step in steps]


VEOMNI: dict[str, Json] = {"model_engine": "veomni"}
TITAN: dict[str, Json] = {"model_engine": "torchtitan", A + "torchtitan.data_parallel_shard_size": -1}

# ---------------------------------------------------------------- routers

MOE = A + "megatron.override_transformer_config.moe_"


def routers(given: Mapping[str, Json], **how: str) -> dict[str, Json]:
    return {k: v for k, v in train(given, **how).items() if k.startswith("router_")}


def test_megatrons_load_balancing_counts_where_its_kind_is_given() -> None:
    """verl sets the kind to none, so a coefficient alone changes nothing; the z-loss has no kind."""
    megatron: dict[str, Json] = {"model_engine": "megatron"}
    coefs: dict[str, Json] = {MOE + "aux_loss_coeff": 0.01, MOE + "z_loss_coeff": 0.001}
    assert routers({**megatron, MOE + "aux_loss_coeff": 0.01}) == {}
    assert routers({**megatron, **coefs}) == {"router_z_loss_coef": 0.001}
    kind = MOE + "router_load_balancing_type"
    for one in ("aux_loss", "global_aux_loss"):
        assert routers({**megatron, **coefs, kind: one}) == {
            "router_z_loss_coef": 0.001,
            "router_aux_loss_coef": 0.01,
            "router_aux_loss_scope": "layer",
        }
    for off in ({kind: "none", **coefs}, {kind: "seq_aux_loss", MOE + "aux_loss_coeff": 0}):
        assert "router_aux_loss_coef" not in routers({**megatron, **off})
    assert routers({**coefs, kind: "aux_loss"}) == {}, "FSDP reads none of it"
    for more, said in (
        ({kind: "seq_aux_loss", **coefs}, "load balancing within each sequence is coming"),
        ({kind: "sinkhorn"}, "Sinkhorn's algorithm"),
        ({kind: "most"}, "expected one of aux_loss"),
        ({**coefs, A + "megatron.use_mbridge": False}, "write moe_router_load_balancing_type"),
        ({MOE + "router_bias_update_rate": 0.001}, "biases of experts that follow their load"),
    ):
        assert said in told({**megatron, **more})


def test_what_is_a_models_own_of_its_routers_is_accepted() -> None:
    """As hy_v3's script: its bias of the choice, which stays as it is."""
    given: dict[str, Json] = {
        "model_engine": "megatron",
        MOE + "router_enable_expert_bias": True,
        MOE + "router_bias_update_rate": 0,
        MOE + "router_load_balancing_type": "none",
        MOE + "router_score_function": "sigmoid",
        MOE + "router_dtype": "fp32",
    }
    assert routers(given) == {}


def test_routers_of_supervised_fine_tuning_have_the_same_terms() -> None:
    at = "engine.override_transformer_config.moe_"
    given: dict[str, Json] = {"engine.strategy": "megatron", at + "z_loss_coeff": 0.001}
    assert routers(given, kind="verl-sft") == {"router_z_loss_coef": 0.001}


REPLAY = "router_replay.mode"
TOLD: dict[str, Json] = {R + "enable_rollout_routing_replay": True}


@pytest.mark.parametrize(
    ("version", "at", "more"),
    [
        ("0.7.0", "", {}),
        ("0.7.1", "", {}),
        ("0.7.1", "megatron.", {"trainer.use_legacy_worker_impl": "disable"}),
        ("0.8.0", "megatron.", {}),
        ("main", "megatron.", {}),
    ],
)
def test_experts_are_replayed_as_the_workers_of_the_release_read_it(
    version: str, at: str, more: dict[str, Json]
) -> None:
    megatron = {"model_engine": "megatron", **more}
    key = A + at + REPLAY
    assert routers({**megatron, **TOLD, key: "R3"}, version=version) == {"router_replay": "sampled"}
    assert routers({**megatron, key: "R2"}, version=version) == {"router_replay": "old"}
    assert routers({**megatron, **TOLD}, version=version) == {}, "told, and not read"
    assert routers({key: "R3"}, version=version) == {}, "FSDP replays nothing"
    for wrong, said in (
        ({key: "R3"}, "R3 needs actor_rollout_ref.rollout.enable_rollout_routing_replay=True"),
        ({key: "R2", **TOLD}, "R2 does not go with"),
        ({key: "R2", "algorithm.rollout_correction.bypass_mode": True}, "bypass_mode=True leaves out"),
        ({key: "R4"}, "one of disabled, R2, R3"),
    ):
        assert said in told({**megatron, **wrong}, version=version)


def test_sections_of_which_no_worker_reads_the_mode() -> None:
    """The policy's own since 0.8.0, those of reference and critic always."""
    megatron: dict[str, Json] = {"model_engine": "megatron"}
    for key in (A, REF, REF + "megatron.", A + "fsdp_config.", "critic.megatron."):
        assert routers({**megatron, **TOLD, key + REPLAY: "R3"}) == {}, key


def test_megatron_lite_replays_what_sampled() -> None:
    """As verl_mlite/engine/mlite_engine.py: R3 needs the experts of every rollout, and there is no R2."""
    lite: dict[str, Json] = {A + "strategy": "mlite"}
    key = A + "engine.router_replay_mode"
    assert routers({**lite, **TOLD, key: "R3"}, version="0.9.0") == {"router_replay": "sampled"}
    assert "R3 needs actor_rollout_ref.rollout" in told({**lite, key: "R3"}, version="0.9.0")
    assert "one of disabled, R3" in told({**lite, key: "R2"}, version="0.9.0")


def test_veomni_replays_what_was_recorded_or_replies_alone() -> None:
    key = A + "veomni." + REPLAY
    assert routers({**VEOMNI, key: "R2"}) == {"router_replay": "old"}
    assert "experts of replies alone" in told({**VEOMNI, **TOLD, key: "R3"})


# ---------------------------------------------------------------- adapters


def test_megatrons_adapters_are_those_of_fused_layers() -> None:
    at = "actor_rollout_ref.model.lora."
    on: dict[str, Json] = {"model_engine": "megatron", at + "rank": 4}
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = {"rank": 4, "alpha": 32.0, "targets": every, "init": "xavier", "fused": True, "dropout": 0.0}
    assert made(on).tree["model"]["lora"] == lora
    canonical: dict[str, Json] = {
        **on,
        at + "type": "canonical_lora",
        at + "target_modules": ["linear_q", "linear_fc1_up"],
        at + "lora_A_init_method": "kaiming",
    }
    found = made(canonical).tree["model"]["lora"]
    assert (found["targets"], found["init"], "fused" in found) == (["q_proj", "up_proj"], "default", False)
    for more, said in (
        (
            {EP: 8, at + "dropout": 0.1},
            "expert_model_parallel_size=8: dropout of experts' adapters is coming",
        ),
        (
            {EP: 8, **canonical},
            "experts whose gate and up have adapters of their own (canonical_lora) are coming",
        ),
        ({at + "normalize_moe_lora": True}, "normalize_moe_lora"),
        ({at + "type": "dora"}, "dora is coming"),
        ({at + "type": "canonical_lora"}, "expected all-linear, or a list of Megatron-LM's names: linear_q,"),
        ({at + "lora_A_init_method": "zero"}, "gradients are always 0"),
        ({"actor_rollout_ref.model.lora_rank": 4}, "keep one"),
        ({at + "dropout_position": "post"}, "dropout_position"),
        ({"model_engine": "dp"}, "write actor_rollout_ref.model.lora_rank"),
    ):
        assert said in told({**on, **more})


EP = A + "megatron.expert_model_parallel_size"


def test_megatrons_adapters_of_experts_are_shared_unless_the_file_says_otherwise() -> None:
    """share_expert_adapters is Megatron-Bridge's key, which verl hands on since 0.9.0; without grouped products each
    expert is a layer of its own there."""
    at = "actor_rollout_ref.model.lora."
    on: dict[str, Json] = {"model_engine": "megatron", at + "rank": 4, EP: 8}
    grouped = A + "megatron.override_transformer_config.moe_grouped_gemm"
    for more, experts in (
        ({}, "shared"),
        ({at + "share_expert_adapters": False}, "each"),
        ({grouped: False}, "each"),
        ({at + "target_modules": ["linear_fc2"]}, "shared"),
        ({at + "target_modules": ["linear_qkv", "linear_proj"]}, None),
        ({EP: 1}, None),
        ({EP: 1, at + "share_expert_adapters": False}, "each"),
    ):
        assert made({**on, **more}).tree["model"]["lora"].get("experts") == experts, more


def test_stacks_that_peft_adapts_are_targets() -> None:
    at = "actor_rollout_ref.model."
    stacks: dict[str, Json] = {at + "lora_rank": 4, at + "target_parameters": ["mlp.experts.down_proj"]}
    assert made(stacks).tree["model"]["lora"]["targets"] == ["all-linear", "mlp.experts.down_proj"]
    named = made({**stacks, at + "target_modules": ["q_proj"]}).tree["model"]["lora"]
    assert named["targets"] == ["q_proj", "mlp.experts.down_proj"]
    assert "an expression" in told({**stacks, at + "target_modules": ".*proj"})


def test_adapters_to_begin_with_say_their_rank_themselves(tmp_path: Path) -> None:
    """verl gives their folder to peft, which reads nothing else; examples/tuning/lora gives no lora_rank."""
    at = "actor_rollout_ref.model."
    said = {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(said), encoding="utf-8")
    lora = made({at + "lora_adapter_path": str(tmp_path), at + "lora_alpha": 16}).tree["model"]["lora"]
    assert lora == {"rank": 8, "alpha": 32, "targets": ["q_proj", "v_proj"], "path": str(tmp_path)}
    assert "no such folder here" in told({at + "lora_adapter_path": "elsewhere"})
    elsewhere = made({at + "lora_adapter_path": "elsewhere", at + "lora_rank": 4}).tree["model"]["lora"]
    assert (elsewhere["rank"], elsewhere["path"]) == (4, "elsewhere")


def test_a_models_own_settings_may_be_said_to_megatron() -> None:
    at = A + "megatron.override_transformer_config."
    own: dict[str, Json] = {"normalization": "RMSNorm", "swiglu": True, "multi_latent_attention": True}
    on: dict[str, Json] = {"model_engine": "megatron"}
    off: dict[str, Json] = {"dsa_indexer_loss_coeff": 0.0, "dsa_indexer_use_sparse_loss": True}
    assert train({**on, **{at + key: value for key, value in {**own, **off}.items()}}) == train(on)
    assert "normalization" in told({**on, at + "normalization": "LayerNorm"})
    assert "losses of the indexers" in told({**on, at + "dsa_indexer_loss_coeff": 0.1})


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (A + "model_engine", "Give model_engine=megatron"),
        (R + "single_turn_response_length", "Give data.max_response_length"),
        ("trainer.remote_anyscale_upload", "Give trainer.default_hdfs_dir"),
        (A + "clip_cov_ratio", "Give actor_rollout_ref.actor.policy_loss.clip_cov_ratio"),
        ("reward_model.reward_kwargs.weights", "Write its sum as a function"),
    ],
)
def test_keys_of_scripts_that_no_verl_reads_are_refused_with_what_to_give(key: str, said: str) -> None:
    assert said in told({key: True})
    unread: dict[str, Json] = {"data.min_response_length": 8, "reward_model.model.type": "discriminative"}
    assert made(unread).tree == made({}).tree, "nobody reads them, and Hydra takes them"
    section: dict[str, Json] = {"reward_model._target_": "verl.workers.config.RewardModelConfig"}
    assert made(section, version="0.6.1").problems == ()


def test_what_is_excluded_is_one_expression_or_names() -> None:
    at = "actor_rollout_ref.model."
    for given in (".*visual.*", ["up_proj"]):
        found = made({at + "lora_rank": 4, at + "exclude_modules": given}).tree["model"]["lora"]
        assert found["exclude_modules"] == given
    assert "exclude_modules" not in made({at + "lora_rank": 4}).tree["model"]["lora"]
    assert "lora" not in made({at + "exclude_modules": ".*visual.*"}).tree["model"], "there are no adapters"


# ---------------------------------------------------------------- schedules


def test_veomni_warms_up_from_lr_start_and_its_cosine_ends_at_lr_min() -> None:
    rates: dict[str, Json] = {OPT + "lr": 1e-5, OPT + "lr_start": 2e-6, OPT + "lr_min": 1e-6}
    given = {**VEOMNI, **rates, OPT + "lr_warmup_steps_ratio": 0.2}
    # two steps from 0.2 to 1; half of the cosine is done in step 2 + 8/2, and its floor is 0.1
    assert factors(train(given)["optimizer"], 0, 1, 2, 6) == [0.2, 0.6, 1.0, 0.55]
    constant = train({**given, OPT + "lr_scheduler_type": "constant"})["optimizer"]
    assert factors(constant, 0, 1, 2, 9) == [0.2, 0.6, 1.0, 1.0]
    short = {**given, OPT + "lr_decay_ratio": 0.6, "trainer.total_training_steps": 10}
    assert factors(train(short)["optimizer"], 2, 4, 7) == [1.0, 0.55, 0.1], "done in step 6"
    assert "give trainer.total_training_steps" in told({**given, OPT + "lr_decay_ratio": 0.6})


def test_torchtitan_warms_up_to_the_peak_and_decays_by_its_own_shapes() -> None:
    given = {**TITAN, OPT + "lr_warmup_steps": 2, OPT + "min_lr_factor": 0.2}
    assert factors(train(given)["optimizer"], 0, 1, 2, 3, 6) == [0.5, 1.0, 1.0, 0.9, 0.6]
    cosine = train({**given, OPT + "decay_type": "cosine"})["optimizer"]
    assert factors(cosine, 0, 2, 6) == [0.5, 1.0, 0.6]
    root = train({**given, OPT + "decay_type": "sqrt"})["optimizer"]
    assert factors(root, 1, 2, 4) == [1.0, 1.0, 0.6], "1 - sqrt(2/8) = 0.5 of what is above 0.2"
    adam = train({**TITAN, OPT + "name": "Adam", OPT + "eps": 1e-6})["optimizer"]
    assert (adam["name"], adam["eps"], adam["decay_all"]) == ("adam", 1e-6, True)


def test_automodel_has_megatrons_schedule_with_shares_of_the_rate() -> None:
    given: dict[str, Json] = {"engine.strategy": "automodel", "optim.lr_warmup_steps": 2}
    own = train(given, kind="verl-sft")["optimizer"]
    assert factors(own, 0, 1, 2, 6) == [0.1, 0.55, 1.0, 0.505], "from 0.1, down to 0.01"
    other = {
        **given,
        "optim.lr_scheduler_type": "linear",
        "optim.min_lr_ratio": 0.2,
        "optim.init_lr_ratio": 0.0,
    }
    assert factors(train(other, kind="verl-sft")["optimizer"], 0, 1, 2, 6) == [0.0, 0.5, 1.0, 0.6]


def test_moments_in_bfloat16_are_read_where_verls_engine_reads_their_dtypes() -> None:
    """Megatron-LM's precision-aware optimizer (verl 0.9.0), and the FusedAdam that Automodel may have."""
    both: dict[str, Json] = {OPT + "exp_avg_dtype": "bf16", OPT + "exp_avg_sq_dtype": "bf16"}
    aware = {"model_engine": "megatron", OPT + "use_precision_aware_optimizer": True}
    assert train({**aware, **both})["optimizer"]["state_dtype"] == "bfloat16"
    for given in ({**aware}, {**both, "model_engine": "megatron"}):
        assert "state_dtype" not in train(given)["optimizer"]
    assert "moments of two dtypes" in told({**aware, **both, OPT + "exp_avg_sq_dtype": "fp32"})
    fused: dict[str, Json] = {
        "engine.strategy": "automodel",
        "engine.model_dtype": "bf16",
        "optim.optimizer": "FusedAdam",
        "optim.exp_avg_dtype": "bf16",
        "optim.exp_avg_sq_dtype": "torch.bfloat16",
    }
    own = train(fused, kind="verl-sft")
    assert (own["optimizer"]["state_dtype"], own["precision"]["master_weights"]) == ("bfloat16", False)
    kept = train(
        {**fused, "optim.master_weights": True, "optim.store_param_remainders": True}, kind="verl-sft"
    )
    assert kept.get("precision", {}).get("master_weights") is None
    assert "AdamW has no such option" in told({**fused, "optim.optimizer": "AdamW"}, kind="verl-sft")


LITE: dict[str, Json] = {A + "strategy": "mlite"}


def test_megatron_lites_decay_is_megatrons_but_for_the_exponential_one() -> None:
    given = {**LITE, OPT + "lr": 1.0, OPT + "lr_warmup_steps": 2, OPT + "min_lr": 0.2}
    linear = train({**given, OPT + "lr_decay_style": "linear"})["optimizer"]
    assert factors(linear, 0, 1, 2, 6) == [0.0, 0.5, 1.0, 0.6]
    assert linear["decay_all"] is False, "norms and biases have no weight decay"
    stable = {**given, OPT + "lr_decay_style": "wsd", OPT + "lr_wsd_decay_steps": 4}
    falls = train({**stable, OPT + "lr_wsd_decay_style": "linear"})["optimizer"]
    assert factors(falls, 6, 8, 9) == [1.0, 0.6, 0.4]
    to_zero = train({**stable, OPT + "min_lr": 0.0})["optimizer"]
    assert factors(to_zero, 6, 7, 8, 9) == [1.0, 0.75, 0.5, 0.25], "its exponential decay to 0 is a line"
    never = train({**stable, OPT + "lr_wsd_decay_steps": None})["optimizer"]
    assert factors(never, 2, 9) == [1.0, 1.0]
    assert "lr_wsd_decay_style=exponential with" in told(stable), "by the same factor in each step"
    assert "expected one of" in told({**given, OPT + "lr_decay_style": "inverse_square_root"})


def test_the_default_schedule_is_the_engines() -> None:
    kinds = {
        name: train({"model_engine": name, **more})["optimizer"]["schedule"]["type"]
        for name, more in {"dp": {}, "megatron": {}, "veomni": {}, "torchtitan": TITAN}.items()
    }
    assert kinds == {"dp": "constant", "megatron": "constant", "veomni": "cosine", "torchtitan": "linear"}
    turbo, fsdp = (train({A + "strategy": name}) for name in ("fsdp_turbo", "fsdp2"))
    assert turbo == fsdp


def test_a_key_of_another_engines_optimizer_is_refused() -> None:
    assert f"{OPT}lr_min=1e-07 is a key of veomni, not of fsdp" in told({OPT + "lr_min": 1e-7})
    assert f"{OPT}eps=1e-06 is a key of torchtitan, not of veomni" in told({**VEOMNI, OPT + "eps": 1e-6})
    assert "automodel, not of fsdp" in told({"optim.init_lr_ratio": 0.5}, kind="verl-sft")


def test_the_newer_name_of_a_schedule_must_not_contradict_the_older() -> None:
    both: dict[str, Json] = {OPT + "lr_scheduler_type": "cosine", OPT + "warmup_style": "constant"}
    assert "lr_scheduler_type=cosine and" in told(both)
    assert train({OPT + "warmup_style": "cosine"}) == train({OPT + "lr_scheduler_type": "cosine"})


# ---------------------------------------------------------------- devices and memory


def test_veomnis_sizes() -> None:
    at = A + "veomni."
    given = {**VEOMNI, at + "ulysses_parallel_size": 2, at + "fsdp_size": 2, at + "expert_parallel_size": 2}
    assert train(given)["parallel"] == {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "ep": 2}
    budget: dict[str, Json] = {A + "use_dynamic_bsz": True, A + "ppo_max_token_len_per_gpu": 2000}
    assert train({**given, **budget})["micro_batch_tokens"] == 4000, "a budget for each of the two"


def test_torchtitans_sizes() -> None:
    at = A + "torchtitan."
    sizes = {at + f"{name}_parallel_size": 2 for name in ("tensor", "context")}
    budget: dict[str, Json] = {A + "use_dynamic_bsz": True, A + "ppo_max_token_len_per_gpu": 2000}
    found = train({**TITAN, **sizes, **budget, at + "data_parallel_replicate_size": 2})
    assert found["parallel"] == {"dp_replicate": 2, "tp": 2, "cp": 2}
    assert found["micro_batch_tokens"] == 4000, "there the ranks of tp have a budget each"
    said = told({**TITAN, at + "data_parallel_shard_size": 4})
    assert f"{at}data_parallel_shard_size=4 must make the 8 data-parallel ranks" in said


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tensor_model": 8, "expert_model": 8}, {"tp": 8}),
        ({"tensor_model": 2, "expert_model": 8}, {"tp": 2, "dp_shard": 4, "ep": 4}),
        ({"tensor_model": 2, "context": 2, "expert_model": 8}, {"tp": 2, "cp": 2, "dp_shard": 2, "ep": 2}),
        ({"expert_model": 4}, {"dp_shard": 8, "ep": 4}),
    ],
)
def test_megatrons_experts_lie_over_the_ranks_of_tp_too(
    sizes: dict[str, int], expected: dict[str, int]
) -> None:
    """Its ep takes ranks of tp, cp and dp; here those of tp hold a part of each expert, and ep is of dp_shard."""
    ppo: dict[str, Json] = {f"{A}megatron.{kind}_parallel_size": size for kind, size in sizes.items()}
    assert train({"model_engine": "megatron", **ppo})["parallel"] == expected
    sft: dict[str, Json] = {f"engine.{kind}_parallel_size": size for kind, size in sizes.items()}
    assert train({"engine.strategy": "megatron", **sft}, kind="verl-sft")["parallel"] == expected


def test_megatron_lites_sizes_and_what_it_offloads() -> None:
    at = A + "engine."
    sizes: dict[str, Json] = {at + "pp": 2, at + "vpp": 2, at + "cp": 2, at + "ep": 2}
    budget: dict[str, Json] = {A + "use_dynamic_bsz": True, A + "ppo_max_token_len_per_gpu": 2000}
    found = train({**LITE, **sizes, **budget})
    assert found["parallel"] == {"pp": 2, "pipeline_chunks": 2, "dp_shard": 2, "cp": 2, "ep": 2}
    assert found["micro_batch_tokens"] == 4000, "a budget for each of the two that share a sequence"
    rests: dict[str, Json] = {at + f"{name}_offload": True for name in ("param", "optimizer", "grad")}
    assert train({**LITE, **rests})["offload"] == ["optimizer", "policy"]
    kl = train({**LITE, A + "use_kl_loss": True})["offload"]
    assert kl == ["reference"], "Megatron Lite's reference is offloaded unless a file says otherwise"
    wide = train({"engine.strategy": "mlite", "engine.dtype": "float32"}, kind="verl-sft")
    assert wide == train({"engine.strategy": "mlite"}, kind="verl-sft"), "it reads no dtype"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("impl_cfg.use_thd", False, "Megatron Lite refuses false, too"),
        ("impl_cfg.optimizer", "sgd", "expected one of dist_opt, fsdp2"),
        ("impl_cfg.lora", {"rank": 8}, "Megatron Lite's own options"),
        ("impl_cfg.router_aux_loss_coef", 0.01, "load-balancing terms as Megatron Lite scales them"),
        ("router_aux_loss_coef", 0.01, "load-balancing terms as Megatron Lite scales them"),
        ("load_hf_weights", False, "training that begins with random weights"),
        ("resync_format", "fp8", "weights of the engine in another format than the policy's"),
    ],
)
def test_what_megatron_lite_does_and_whet_does_not(key: str, value: Json, said: str) -> None:
    assert said in told({**LITE, A + "engine." + key: value})
    if key.startswith(("impl_cfg", "router_aux", "load")):
        assert said in told({"engine.strategy": "mlite", "engine." + key: value}, kind="verl-sft")


def test_sizes_of_supervised_fine_tuning() -> None:
    def found(strategy: str, **sizes: int) -> Json:
        given = {f"engine.{name}": size for name, size in sizes.items()}
        return train({"engine.strategy": strategy, **given}, kind="verl-sft")["parallel"]

    assert found("automodel", tp_size=2, ep_size=2, dp_replicate_size=2) == {
        "tp": 2, "dp_replicate": 2, "dp_shard": 2, "ep": 2,
    }  # fmt: skip
    assert found("veomni", ulysses_parallel_size=4) == {"dp_shard": 2, "cp": 4}
    assert found("mlite", tp=2, pp=2, ep=2) == {"tp": 2, "pp": 2, "dp_shard": 2, "ep": 2}
    assert found("torchtitan", pipeline_parallel_size=2, data_parallel_shard_size=4) == {
        "pp": 2,
        "dp_shard": 4,
    }


def test_weights_in_bfloat16_and_offloaded_state() -> None:
    assert "precision" not in train(VEOMNI)
    assert train({**VEOMNI, A + "veomni.mixed_precision": False})["precision"] == {"master_weights": False}
    narrow = {"engine.strategy": "veomni", "engine.mixed_precision": False}
    assert train(narrow, kind="verl-sft")["precision"] == {"master_weights": False}
    assert train({**VEOMNI, A + "veomni.enable_fsdp_offload": True})["offload"] == ["optimizer", "policy"]
    offloaded: dict[str, Json] = {**TITAN, A + "torchtitan.param_offload": True, A + "use_kl_loss": True}
    assert train(offloaded)["offload"] == ["policy"]
    both = train({**offloaded, REF + "torchtitan.param_offload": True})
    assert both["offload"] == ["reference", "policy"]


def test_a_group_of_fsdp_that_is_a_part_of_a_sequences_devices_becomes_one_of_all_ranks() -> None:
    given: dict[str, Json] = {
        "trainer.n_gpus_per_node": 12,
        "data.train_batch_size": 96,
        A + "ppo_mini_batch_size": 96,
        A + "ulysses_sequence_parallel_size": 4,
        "actor_rollout_ref.model.use_remove_padding": True,
        A + "fsdp_config.fsdp_size": 2,
    }
    found = train(given)["parallel"]
    assert (found["dp_shard"], found["cp"]) == (3, 4), "2 divides 12 devices, though not 3 ranks"
    alone = {**given, "trainer.n_gpus_per_node": 3, A + "ulysses_sequence_parallel_size": 1}
    alone[R + "tensor_model_parallel_size"] = 1
    assert "must divide the 3 data-parallel ranks" in told(alone)


# ---------------------------------------------------------------- values as verl reads them


@pytest.mark.parametrize("role", ["", "fsdp_config."])
def test_the_references_budget_counts_the_ranks_that_it_shares_with_the_actor(role: str) -> None:
    given: dict[str, Json] = {
        A + "use_kl_loss": True,
        A + "use_dynamic_bsz": True,
        A + role + "ulysses_sequence_parallel_size": 8,
        A + "ppo_max_token_len_per_gpu": 128,
        R + "log_prob_max_token_len_per_gpu": 128,
        REF + "log_prob_max_token_len_per_gpu": 128,
        "actor_rollout_ref.model.use_remove_padding": True,
    }
    assert train(given)["forward_micro_batch_tokens"] == 1024
    own = {**given, REF + "fsdp_config.ulysses_sequence_parallel_size": 4}
    assert f"{REF}log_prob_max_token_len_per_gpu=128 * 4 ranks" in told(own)


def test_a_quoted_list_of_numbers_is_the_list() -> None:
    for text in ("[0.9,0.95]", "(0.9, 0.95)"):
        assert train({OPT + "betas": text})["optimizer"]["betas"] == [0.9, 0.95]
    strange = made({OPT + "betas": "[0.9;0.95]"}).tree["train"]["optimizer"]["betas"]
    assert strange == "[0.9;0.95]", "left to the check of the native key"


def test_an_empty_folder_is_the_default_one() -> None:
    given: dict[str, Json] = {"trainer.project_name": "p", "trainer.experiment_name": "e"}
    assert made({**given, "trainer.default_local_dir": ""}).tree["run_dir"] == "checkpoints/p/e"


def test_a_threshold_is_needed_only_with_its_weights() -> None:
    at = "algorithm.rollout_correction.rollout_is"
    assert told({at: None, at + "_threshold": None}) == ""
    assert f"{at}_threshold: got null, expected the bound of" in told({at: "token", at + "_threshold": None})


STREAMED: dict[str, Json] = {
    "data.train_batch_size": 0,
    "actor_rollout_ref.hybrid_engine": False,
    "rollout.total_rollout_steps": 1000,
}
"""verl's fully asynchronous trainer."""


def test_the_fully_asynchronous_trainer_uses_all_rows_of_an_epoch() -> None:
    streamed = STREAMED
    assert train({})["drop_last"] is True
    assert train(streamed)["drop_last"] == "end"
    # its length is that of its rollouts: verl overwrites the trainer's number of steps with it
    assert train({**streamed, "trainer.total_training_steps": 7})["steps"] == train(streamed)["steps"] != 7


@pytest.mark.parametrize(
    ("every", "threshold", "ahead"),
    [(1, 0.0, None), (4, 0.0, 0), (4, 0.1, 1), (4, 0.5, 2), (10, 0.1, 1), (16, 0.6, 10), (1, 1.0, 1)],
)
def test_so_many_rollouts_may_be_asked_of_the_weights_of_a_sync(
    every: int, threshold: float, ahead: int | None
) -> None:
    """verl 0.9.1 asks int(B * (threshold + 1) * every) tasks between two syncs: steps that begin with the next weights
    take what is more than `every` steps' worth. 0.1 of 10 steps is one step, though 1.1 * 10 is above 11 in floating
    point; with one step and no threshold nothing is ahead of anything (its on-policy mode)."""
    given = {
        **STREAMED,
        "async_training.trigger_parameter_sync_step": every,
        "async_training.staleness_threshold": threshold,
    }
    rollout = made(given).tree["rollout"]
    keys = ("schedule", "sync_interval", "max_staleness")
    expected = {} if ahead is None else dict(zip(keys, ("async", every, ahead)))
    assert {key: rollout[key] for key in keys if key in rollout} == expected


def test_the_fully_asynchronous_trainer_counts_profiles_in_syncs_and_ends_with_whole_steps() -> None:
    given = {**STREAMED, "async_training.trigger_parameter_sync_step": 3}
    profiled = {**given, "global_profiler.tool": "torch", "global_profiler.steps": [1, 3]}
    assert made(profiled).tree["profile"]["steps"] == [1, 2, 3, 7, 8, 9]
    assert "rollout.total_rollout_steps=7 fills no step of" in told(
        {**given, "rollout.total_rollout_steps": 7}
    )


def test_engines_of_the_fully_asynchronous_trainer_are_not_told_the_number_of_steps() -> None:
    """They start before it is counted (verl 0.6.1 to 0.9.1): without a number of their own a share of it is no step, a
    cosine has no end, and Megatron's scheduler does not start."""
    warm = {**STREAMED, OPT + "lr_warmup_steps": -1, OPT + "lr_warmup_steps_ratio": 0.1}
    assert "warmup_steps" not in train(warm)["optimizer"]["schedule"]
    cosine = {**warm, OPT + "lr_scheduler_type": "cosine"}
    assert "optim.total_training_steps=-1: verl's fully asynchronous trainer does not tell" in told(cosine)
    schedule = train({**cosine, OPT + "total_training_steps": 40, "trainer.total_training_steps": 7})[
        "optimizer"
    ]
    assert (schedule["schedule"]["total_steps"], schedule["schedule"]["warmup_steps"]) == (40, 0.1)
    megatron = {**warm, "model_engine": "megatron"}
    assert "optim.lr_decay_steps=null: verl's fully asynchronous trainer does not tell Megatron" in told(
        megatron
    )
    assert train({**megatron, OPT + "lr_decay_steps": 50})["optimizer"]["schedule"]["warmup_steps"] == 0.1


def test_options_of_engines_that_change_no_number_are_accepted_and_others_are_named() -> None:
    vllm, megatron = R + "engine_kwargs.vllm.", A + "megatron.override_transformer_config."
    free: dict[str, Json] = {
        vllm + "compilation_config.cudagraph_mode": "FULL_DECODE_ONLY",
        vllm + "max_model_len": 4096,
        "model_engine": "megatron",
        megatron + "recompute_num_layers": 1,
        megatron + "moe_permute_fusion": True,
        megatron + "fp8": False,
        OPT + "override_optimizer_config.optimizer_cpu_offload": True,
    }
    assert told(free) == ""
    assert "training in float8" in told({"model_engine": "megatron", megatron + "fp8": "e4m3"})
    assert "biases of experts that follow their load" in told(
        {"model_engine": "megatron", megatron + "moe_router_bias_update_rate": 0.001}
    )
    adam8: dict[str, Json] = {OPT + "override_optimizer_config.bf16_stochastic_round": True}
    assert "optimizers of other packages" in told(adam8)


def test_an_option_that_only_the_engine_knows_is_given_to_that_engine() -> None:
    """Of the engine that rollout.name names: verl reads engine_kwargs of no other. One server takes the devices."""

    def rollout(given: dict[str, Json]) -> dict[str, Json]:
        found = made({"trainer.n_gpus_per_node": 8, **given})
        assert not found.problems
        return {k: found.tree["rollout"].get(k) for k in ("engine", "server", "replicas")}

    placed = {"tensor-parallel-size": 2, "data-parallel-size": 4, "gpu-memory-utilization": 0.5}
    embedded = rollout({R + "name": "vllm", R + "engine_kwargs.vllm.max_model_len": 4096})
    assert (embedded["engine"], embedded["server"]) == ("native", {"options": placed, "sleep": True})
    assert embedded["replicas"]
    vllm = {R + "engine_kwargs.vllm.kv_cache_dtype": "fp8", R + "engine_kwargs.vllm.swap_space": 4}
    options: dict[str, Json] = {"options": placed | {"kv_cache_dtype": "fp8"}, "sleep": True}
    assert rollout(vllm) == {"engine": "vllm", "server": options, "replicas": None}
    placed = {"tp-size": 2, "dp-size": 4, "mem-fraction-static": 0.5}
    other = {"options": placed, "sleep": True}
    assert rollout({**vllm, R + "name": "sglang"}) == embedded | {"server": other}
    for name in ("sglang", "sglang_async"):
        sglang = {R + "name": name, R + "engine_kwargs.sglang.rl_on_policy_target": "fsdp"}
        options = {"options": placed | {"rl_on_policy_target": "fsdp"}, "sleep": True}
        assert rollout(sglang) == {"engine": "sglang", "server": options, "replicas": None}
