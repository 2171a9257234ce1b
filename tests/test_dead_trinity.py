"""No key of Trinity-RFT's that is said to be read is dead: another value changes the native config, or is refused."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest

from whet.config.tree import merge
from whet.dialects.row import Row
from whet.dialects.tables import dialect, parts
from whet.dialects.translate import Translation, translate
from whet.dialects.trinity.stages import inherited
from whet.dialects.trinity.values import (
    ACTOR,
    CRITIC,
    EVAL_TASKSETS,
    EXPERIENCES,
    MODEL,
    REF,
    TASKSET,
    TASKSETS,
    VERL_TRAINER,
)
from whet.types import Json

Tree = dict[str, Any]

STAGE = "stages[]."


def put(tree: Tree, key: str, value: Json) -> Tree:
    """The tree with a value at a row's name; lists have one entry, names of the user's are `sft_dataset`."""
    out: Any = copy.deepcopy(tree)
    at, cut = out, parts(key)
    for part, after in zip(cut, (*cut[1:], None)):
        name = 0 if part == "[]" else "sft_dataset" if part == "<name>" else part
        if after is None:
            at[name] = value
        elif isinstance(name, int):
            at = at[name]
        else:
            at = at.setdefault(name, [{}] if after == "[]" else {})
    return out  # type: ignore[no-any-return]


def base(**given: Json) -> Tree:
    """A small file that explores and trains."""
    tree: Tree = {
        "algorithm": {"algorithm_type": "grpo"},
        "model": {"model_path": "m", "max_prompt_tokens": 8, "max_response_tokens": 5},
        "buffer": {
            "batch_size": 8,
            "explorer_input": {
                "taskset": {"path": "words"},
                "eval_tasksets": [{"name": "held_out", "path": "held_out"}],
                "default_reward_fn_type": "letters.py:share",
            },
        },
    }
    for key, value in given.items():
        tree = put(tree, key, value)
    return tree


def of_file(kind: str, **given: Json) -> Tree:
    """A small file that learns from given replies."""
    tree = base(**given)
    tree["mode"] = "train"
    tree["algorithm"]["algorithm_type"] = kind
    tree["buffer"] |= {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"path": "replies"}}}
    return tree


PPO = base(**{"algorithm.algorithm_type": "ppo"})
SFT = of_file("sft")
DPO = of_file("dpo")
PLAIN = put(SFT, f"{EXPERIENCES}.format.prompt_type", "plaintext")
MIX = base(**{"algorithm.algorithm_type": "mix"})
MIX["algorithm"]["repeat_times"] = 1
MIX["buffer"] |= {
    "batch_size": 4,
    "train_batch_size": 8,
    "trainer_input": {"auxiliary_buffers": {"sft_dataset": {"path": "replies"}}},
}
AUXILIARY = "buffer.trainer_input.auxiliary_buffers.<name>"
MIX_PLAIN = put(MIX, f"{AUXILIARY}.format.prompt_type", "plaintext")
TEACHER: Json = [{"model_path": "big"}]
DISTILL = base(**{"algorithm.algorithm_type": "on_policy_distill", "explorer.auxiliary_models": TEACHER})
RULER = put(
    base(**{"explorer.auxiliary_models": TEACHER}), f"{TASKSET}.default_workflow_type", "math_ruler_workflow"
)
_OUTSIDE = "external_model_config"
SERVED = put(RULER, "explorer.auxiliary_models", [{"model_path": "t", _OUTSIDE: {"model_name": "big"}}])
OUTSIDE = put(
    RULER,
    "explorer.auxiliary_models",
    [{"model_path": "t", _OUTSIDE: {"enable": True, "model_name": "big"}}],
)
ROLLOUTS = base(**{"trainer.use_dynamic_bsz": False})
PPO_ROLLOUTS = put(PPO, "trainer.use_dynamic_bsz", False)
COSINE = base(**{"algorithm.optimizer.warmup_style": "cosine"})
PPO_COSINE = put(PPO, f"{CRITIC}.optim.warmup_style", "cosine")
BOXED = base()
BOXED["buffer"]["explorer_input"] |= {"default_reward_fn_type": "math_boxed_reward"}
FILTERED = base(**{"data_processor.experience_pipeline.operators": [{"name": "reward_filter"}]})
PENALTY = put(PPO, "algorithm.kl_penalty_fn", "k1")
FILTERS = "data_processor.experience_pipeline.operators"
RATIO = "lr_warmup_steps_ratio"

EXPLORES = base(**{"mode": "explore", f"{EXPERIENCES}.path": "sqlite:///meet.db"})
REPLAYS = base(
    **{
        "mode": "train",
        f"{EXPERIENCES}.path": "sqlite:///meet.db",
        f"{EXPERIENCES}.replay_buffer": {"enable": True, "priority_fn": "decay_limit_randomization"},
    }
)
ADAPTS = base(**{"explorer.dynamic_timeout.enable": True})

EIGHT = base(**{"cluster.gpu_per_node": 9})

MEGATRON = base(**{"cluster.gpu_per_node": 9, "trainer.trainer_strategy": "megatron"})

MTP = f"{MODEL}.mtp"
LEARNS = put(put(MEGATRON, f"{MTP}.enable", True), f"{MTP}.enable_train", True)

SELECTOR = f"{TASKSET}.task_selector"
BY_DIFFICULTY = put(
    put(base(), f"{SELECTOR}.selector_type", "difficulty_based"),
    f"{SELECTOR}.feature_keys",
    ["weak", "strong"],
)

CONTEXTS: dict[str, Tree] = {
    f"{MTP}.enable": put(MEGATRON, f"{MTP}.enable_train", True),
    f"{MTP}.enable_train": put(MEGATRON, f"{MTP}.enable", True),
    **{f"{MTP}.{key}": LEARNS for key in ("detach_encoder", "mtp_loss_scaling_factor")},
    "algorithm.enable_router_replay": MEGATRON,
    **{
        f"{ACTOR}.megatron.{key}": MEGATRON
        for key in (
            *(
                f"{size}_parallel_size"
                for size in ("tensor_model", "pipeline_model", "context", "expert_model")
            ),
            "param_offload",
            "optimizer_offload",
        )
    },
    "explorer.name": EXPLORES,
    "synchronizer.sync_timeout": EXPLORES,
    "explorer.dynamic_timeout.ratio": ADAPTS,
    f"{EXPERIENCES}.capacity": REPLAYS,
    **{
        f"{EXPERIENCES}.replay_buffer.{key}": REPLAYS
        for key in ("enable", "reuse_cooldown_time", "priority_fn", "priority_fn_args.*")
    },
    f"{FILTERS}[].name": FILTERED,
    f"{FILTERS}[].args": FILTERED,
    f"{FILTERS}[].args.*": FILTERED,
    "algorithm.kl_penalty_fn": PPO,
    "algorithm.kl_penalty_fn_args.*": PENALTY,
    "algorithm.sample_strategy_args.*": MIX,
    "algorithm.optimizer.min_lr_ratio": COSINE,
    f"{ACTOR}.optim.min_lr_ratio": COSINE,
    "model.critic_model_path": PPO,
    "buffer.trainer_input.auxiliary_buffers": MIX,
    **{f"{AUXILIARY}.{key}": MIX for key in ("name", "storage_type", "path", "split", "subset_name")},
    f"{AUXILIARY}.format.prompt_type": MIX,
    f"{AUXILIARY}.format.messages_key": MIX,
    f"{AUXILIARY}.format.tools_key": MIX,
    f"{AUXILIARY}.format.enable_concatenated_multi_turn": MIX,
    f"{EXPERIENCES}.format.chosen_key": DPO,
    f"{EXPERIENCES}.format.rejected_key": DPO,
    f"{EXPERIENCES}.format.prompt_type": SFT,
    f"{EXPERIENCES}.format.messages_key": SFT,
    f"{EXPERIENCES}.format.tools_key": SFT,
    f"{EXPERIENCES}.format.enable_concatenated_multi_turn": SFT,
    f"{EXPERIENCES}.format.chat_template": SFT,
    **{f"{EXPERIENCES}.{key}": SFT for key in ("name", "path", "split", "subset_name")},
    f"{TASKSET}.workflow_args": BOXED,
    f"{EVAL_TASKSETS}[].workflow_args": BOXED,
    "explorer.auxiliary_models": DISTILL,
    "explorer.auxiliary_models[].model_path": DISTILL,
    **{
        f"explorer.auxiliary_models[].{key}": RULER
        for key in ("max_model_len", "max_response_tokens", "enable_thinking")
    },
    f"explorer.auxiliary_models[].{_OUTSIDE}.enable": SERVED,
    **{
        f"explorer.auxiliary_models[].{_OUTSIDE}.{key}": OUTSIDE
        for key in ("base_url_env", "api_key_env", "model_name")
    },
    f"{ACTOR}.ppo_micro_batch_size": ROLLOUTS,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": ROLLOUTS,
    f"{REF}.log_prob_micro_batch_size": ROLLOUTS,
    f"{REF}.log_prob_micro_batch_size_per_gpu": ROLLOUTS,
    f"{CRITIC}.ppo_micro_batch_size_per_gpu": PPO_ROLLOUTS,
    f"{CRITIC}.forward_micro_batch_size_per_gpu": PPO_ROLLOUTS,
    f"{CRITIC}.ppo_micro_batch_size": PPO_ROLLOUTS,
    f"{CRITIC}.forward_micro_batch_size": PPO_ROLLOUTS,
    f"{EXPERIENCES}.data_selector.selector_type": SFT,
    f"{EXPERIENCES}.data_selector.seed": put(SFT, f"{EXPERIENCES}.data_selector.selector_type", "shuffle"),
    f"{EXPERIENCES}.data_selector.feature_keys": SFT,
    f"{EXPERIENCES}.data_selector.kwargs.*": SFT,
    f"{TASKSET}.task_selector.kwargs": BY_DIFFICULTY,
    f"{TASKSET}.task_selector.kwargs.*": BY_DIFFICULTY,
    f"{CRITIC}.optim.min_lr_ratio": PPO_COSINE,
    f"{VERL_TRAINER}.max_critic_ckpt_to_keep": PPO,
    "monitor.monitor_args.*": base(**{"monitor.monitor_type": "swanlab"}),
    "monitor.monitor_args.base_url": base(**{"monitor.monitor_type": "wandb"}),
    "monitor.monitor_args.uri": base(**{"monitor.monitor_type": "mlflow"}),
    "trainer.max_token_len_per_gpu": base(),
    **dict.fromkeys(
        ("trainer.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.fsdp_size", "cluster.node_num"),
        EIGHT,
    ),
    **{f"{at}.ulysses_sequence_parallel_size": EIGHT for at in (ACTOR, REF)},
    f"{CRITIC}.ulysses_sequence_parallel_size": put(
        put(EIGHT, "algorithm.algorithm_type", "ppo"), "algorithm.repeat_times", 8
    ),
    f"{CRITIC}.model.fsdp_config.offload_policy": PPO,
    **{
        f"model.lora_configs[].{key}": base(**{"model.lora_configs": [{"lora_rank": 4}]})
        for key in ("path", "lora_rank", "lora_alpha", "target_modules", "exclude_modules")
    },
}
"""Files in which a key means something, where the small file is not one."""

REPLACED: dict[str, Json] = {
    f"{SELECTOR}.kwargs.*": {"tau": 0.5},
    f"{EXPERIENCES}.data_selector.kwargs.*": {"tau": 0.5},
    f"{EXPERIENCES}.replay_buffer.enable": False,
    f"{EXPERIENCES}.replay_buffer.reuse_cooldown_time": 2.5,
    f"{EXPERIENCES}.replay_buffer.priority_fn": "linear_decay",
    f"{EXPERIENCES}.replay_buffer.priority_fn_args.*": {"sigma": 0.5},
    "cluster.node_num": 2,
    "cluster.gpu_per_node": 5,
    "cluster.ray_address": "10.0.0.1:6379",
    f"{ACTOR}.fsdp_config.fsdp_size": 2,
    "trainer.ulysses_sequence_parallel_size": 2,
    **{f"{at}.ulysses_sequence_parallel_size": 2 for at in (ACTOR, REF, CRITIC)},
    "mode": "train",
    "algorithm.algorithm_type": "rloo",
    "algorithm.advantage_fn": "opmd",
    "algorithm.kl_penalty_fn": "k1",
    "algorithm.kl_loss_fn": "k3",
    "algorithm.entropy_loss_fn": "mix",
    "algorithm.advantage_fn_args.*": {"rank_penalty": 0.5},
    "algorithm.policy_loss_fn": "topr",
    "algorithm.policy_loss_fn_args.*": {"clip_range": 0.3},
    "algorithm.loss_agg_mode": "seq-mean-token-mean",
    "algorithm.kl_penalty_fn_args.*": {"kl_coef": 0.5},
    "algorithm.kl_loss_fn_args.*": {"kl_coef": 0.5},
    "algorithm.entropy_loss_fn_args.*": {"entropy_coef": 0.5},
    "algorithm.sample_strategy_args.*": {"expert_data_ratio": 0.25},
    "algorithm.optimizer.betas": [0.5, 0.6],
    "algorithm.optimizer.optimizer_type": "sgd",
    "model.lora_configs": [{"lora_rank": 4}],
    "algorithm.optimizer.warmup_style": "cosine",
    f"{FILTERS}": [{"name": "reward_filter"}],
    f"{FILTERS}[].name": "reward_std_filter",
    f"{FILTERS}[].args": {"threshold": 0.5},
    f"{FILTERS}[].args.*": {"threshold": 0.5},
    "model.rope_scaling": {"rope_type": "yarn"},
    "model.max_model_len": 12,
    "explorer.env_vars": {"A": "b"},
    "explorer.auxiliary_models": [{"model_path": "other"}],
    "trainer.save_hf_checkpoint": "never",
    "trainer.max_token_len_per_gpu": 999,
    "monitor.monitor_type": "wandb",
    "monitor.monitor_args.*": {"mode": "offline"},
    "explorer.rollout_model.extra_engine_args.*": {"kv_cache_dtype": "fp8"},
    "log.level": "ERROR",
    EVAL_TASKSETS: [],
    f"{TASKSET}.repeat_times": 3,
    f"{TASKSET}.task_selector.selector_type": "shuffle",
    f"{TASKSET}.task_selector.feature_keys": ["rate"],
    f"{TASKSET}.workflow_args": {"with_think": True},
    f"{TASKSET}.reward_fn_args": {"times": 2},
    f"{TASKSET}.default_workflow_type": "email_search_workflow",
    f"{TASKSET}.default_reward_fn_type": "math_reward",
    f"{EVAL_TASKSETS}[].workflow_args": {"with_think": True},
    f"{EVAL_TASKSETS}[].reward_fn_args": {"times": 2},
    f"{EVAL_TASKSETS}[].default_workflow_type": "email_search_workflow",
    f"{EVAL_TASKSETS}[].default_reward_fn_type": "math_reward",
    "buffer.explorer_input.default_workflow_type": "email_search_workflow",
    "buffer.explorer_input.default_eval_workflow_type": "email_search_workflow",
    "buffer.explorer_input.default_reward_fn_type": "math_reward",
    f"{TASKSET}.storage_type": "sql",
    f"{EVAL_TASKSETS}[].storage_type": "sql",
    f"{EXPERIENCES}.storage_type": "sql",
    f"{AUXILIARY}.storage_type": "sql",
    f"{EXPERIENCES}.format.prompt_type": "plaintext",
    f"{AUXILIARY}.format.prompt_type": "plaintext",
    "buffer.trainer_input.auxiliary_buffers": {"sft_dataset": {"path": "others"}},
    f"{VERL_TRAINER}.resume_mode": "disable",
    "trainer.trainer_config.actor_rollout_ref.model.override_config": {"a": 1},
    f"{CRITIC}.model.override_config": {"a": 1},
    f"{ACTOR}.optim.betas": [0.5, 0.6],
    f"{CRITIC}.optim.betas": [0.5, 0.6],
    f"{ACTOR}.optim.warmup_style": "cosine",
    f"{CRITIC}.optim.warmup_style": "cosine",
    f"{ACTOR}.checkpoint.load_contents": ["model", "extra"],
    f"{ACTOR}.checkpoint.save_contents": ["model", "extra"],
    "data_processor.experience_pipeline.save_input": False,
    "explorer.rollout_model.enable_thinking": False,
    f"{CRITIC}.forward_micro_batch_size_per_gpu": 2,
    f"{CRITIC}.forward_micro_batch_size": 2,
    f"{EXPERIENCES}.data_selector.selector_type": "shuffle",
    f"{EXPERIENCES}.data_selector.feature_keys": ["rate"],
}
"""Other values than `another` finds."""


def listed(key: str) -> str:
    """A key of taskset as that of the first of tasksets."""
    return key.replace(f"{TASKSET}.", f"{TASKSETS}[].")


def in_a_list(tree: Tree) -> Tree:
    """The file with its taskset as the only one of tasksets."""
    tree = copy.deepcopy(tree)
    explores = tree["buffer"]["explorer_input"]
    explores["tasksets"] = [explores.pop("taskset")]
    return tree


REPLACED |= {listed(key): value for key, value in REPLACED.items()}
REPLACED[TASKSETS] = [{"path": "words"}, {"path": "others"}]
CONTEXTS |= {listed(key): in_a_list(tree) for key, tree in CONTEXTS.items() if key.startswith(f"{TASKSET}.")}

ROWS = [row for row in dialect("trinity").rows if row.status in ("mapped", "translated")]


def is_section(row: Row) -> bool:
    of = dialect("trinity")
    return parts(row.key) in of.below and row.key not in REPLACED


def another(row: Row) -> Json:
    """Another value of the right kind."""
    name, default = row.key, row.default
    if name in REPLACED:
        return REPLACED[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 3
    if isinstance(default, float):
        return 0.5
    if default is None and any(word in name for word in NUMBERS):
        return 0.5 if RATIO in name or "min_lr" in name or "temperature" in name or "top_p" in name else 30
    if default is None and "use_dynamic_bsz" in name:
        return False
    return "other"


NUMBERS = (
    *(
        "steps",
        "times",
        "batch_size",
        "tokens",
        "max_token_len",
        "max_model_len",
        "rope_theta",
        "top_k",
        "top_p",
    ),
    *("temperature", "epochs", "ratio"),
)


FILES: dict[str, Tree] = {
    "": base(),
    "ppo": PPO,
    "plain": PLAIN,
    "mix_plain": MIX_PLAIN,
    "tasksets": in_a_list(base()),
}


def context_of(name: str) -> Tree:
    return CONTEXTS[name] if name in CONTEXTS else FILES[name]


def context(row: Row) -> str:
    """The name of a small file in which the key means something."""
    if row.key in CONTEXTS:
        return row.key
    if row.key.startswith((f"{CRITIC}.", f"{VERL_TRAINER}.critic")):
        return "ppo"
    if row.key.startswith(f"{EXPERIENCES}.format."):
        return "plain"
    if row.key.startswith(TASKSETS):
        return "tasksets"
    return "mix_plain" if row.key.startswith(f"{AUXILIARY}.format.") else ""


def read(tree: Tree) -> Translation:
    return translate(tree, dialect("trinity"), origins={})


def told(made: Translation, name: str) -> bool:
    """Whether a refusal names the key, or the entry of a list that it stands in."""
    wanted = name.replace("[]", "[0]").replace("<name>", "sft_dataset").removesuffix(".*")
    said = " ".join(text for _, text in (*made.problems, *made.unbuilt))
    return wanted in said


def named(row: Row) -> str:
    return row.key


OF_FILES = [row for row in ROWS if not row.key.startswith("stages") and not is_section(row)]
OF_STAGES = [row for row in ROWS if row.key.startswith(STAGE) and not is_section(row)]


@pytest.mark.parametrize("row", OF_FILES, ids=named)
def test_another_value_changes_the_config_or_is_refused(row: Row) -> None:
    check(row)


def test_what_a_stage_gives_reaches_the_row_of_the_file() -> None:
    """A stage is translated as a file of its own, so its keys are as alive as that file's."""
    of, small = dialect("trinity"), base()
    for row in OF_STAGES:
        name = row.key.removeprefix(STAGE)
        if name in ("stage_name", "mode", "algorithm.algorithm_type"):
            continue
        own = of.row(name)
        assert own is not None
        assert own.status in ("mapped", "translated"), row.key
        value = another(own)
        stage = with_value({}, name, value)
        assert inherited(small, stage | {"stage_name": "first"}) == merge(small, stage), row.key


@functools.cache
def alone(name: str) -> Translation:
    """The file of a context as it is."""
    made = read(context_of(name))
    assert not made.problems, made.problems
    assert not made.unbuilt, made.unbuilt
    return made


def check(row: Row) -> None:
    before, value = alone(context(row)), another(row)
    after = read(with_value(context_of(context(row)), row.key, value))
    assert not [text for _, text in after.problems if "unknown key" in text]
    if after.problems or after.unbuilt:
        assert told(after, row.key), (row.key, value, after.problems, after.unbuilt)
    else:
        assert after.tree != before.tree, f"{row.key}={value!r} changes nothing"


def with_value(tree: Tree, name: str, value: Json) -> Tree:
    """The file with a value at a key; of an open section the keys that stand in it."""
    if not name.endswith(".*"):
        return put(tree, name, value)
    for key, inner in value.items():
        tree = put(tree, f"{name.removesuffix('.*')}.{key}", inner)
    return tree
