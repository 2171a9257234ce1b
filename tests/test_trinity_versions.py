"""Trinity-RFT's releases: renamed keys, other defaults, other meanings, and keys that change no number."""

from __future__ import annotations

from typing import Any

import pytest

from whet.config.tree import get, merge
from whet.dialects.match import suggest
from whet.dialects.tables import dialect
from whet.dialects.translate import Translation, translate
from whet.dialects.trinity.values import ACTOR, CRITIC, EXPERIENCES, REF, TASKSET, VERL_TRAINER
from whet.dialects.values import nested
from whet.dialects.versions import VERSIONS
from whet.rewards.trinity import math_dapo_reward
from whet.types import Json, Task

SMALL: dict[str, Json] = {
    "algorithm.algorithm_type": "grpo",
    "algorithm.repeat_times": 4,
    "model.model_path": "m",
    "model.max_prompt_tokens": 8,
    "model.max_response_tokens": 5,
    "buffer.batch_size": 8,
    f"{TASKSET}.path": "words.jsonl",
    "buffer.explorer_input.default_reward_fn_type": "letters.py:share",
}


def read(version: str, given: dict[str, Json] | None = None, **more: Json) -> Translation:
    """A small file with these keys, read as a release."""
    trees = [
        nested({tuple(key.split(".")): v for key, v in one.items()}) for one in (SMALL, given or {}, more)
    ]
    tree: dict[str, Json] = {}
    for each in trees:
        tree = merge(tree, each)
    return translate(tree, dialect("trinity", version), origins={})


def native(version: str, key: str, given: dict[str, Json]) -> Any:
    made = read(version, given)
    assert not made.problems, made.problems
    assert not made.unbuilt, made.unbuilt
    return get(made.tree, tuple(key.split(".")))


COSINE: dict[str, Json] = {"algorithm.optimizer.lr_scheduler_type": "cosine"}


@pytest.mark.parametrize(
    ("key", "given", "by_version"),
    [
        # cosine ends at 0, from 0.5.2 on at a hundredth of lr
        ("train.optimizer.schedule.min_lr_ratio", COSINE, {"0.4.1": None, "0.5.1": None, "0.5.2": 0.01}),
        # Megatron's momentum at first, then torch's SGD, which has none
        (
            "train.optimizer.momentum",
            {"algorithm.optimizer.optimizer_type": "sgd"},
            {"0.4.0": 0.9, "0.4.1": 0.0, "0.6.0": 0.0},
        ),
        ("checkpoint.keep", {"trainer.max_checkpoints_to_keep": 3}, {"0.4.1": 3, "0.6.0": 3}),
        ("checkpoint.keep", {"trainer.max_checkpoints_to_keep": None}, {"0.4.1": 5, "0.5.2": 5}),
        ("checkpoint.keep", {}, {"0.4.0": 5, "0.6.0": None}),
        (
            "algorithm.old_logprobs",
            {"trainer.trainer_config.algorithm.rollout_correction.bypass_mode": False},
            {"0.5.2": "recompute"},
        ),
        ("algorithm.old_logprobs", {"algorithm.bypass_old_logprobs": False}, {"0.6.0": "recompute"}),
        ("train.optimizer.max_grad_norm", {"algorithm.optimizer.clip_grad": 0.5}, {"0.6.0": 0.5}),
        (
            "algorithm.groups.truncated",
            {f"{TASKSET}.default_workflow_type": "math_boxed_workflow"},
            {"0.5.2": None, "0.6.0": "mask"},
        ),
        (
            "rewards.math_dapo_reward.function",
            {f"{TASKSET}.default_reward_fn_type": "math_dapo_reward"},
            {"0.5.2": "math", "0.6.0": "whet.rewards.trinity:math_dapo_reward"},
        ),
        (
            "tokenizer.chat_template_kwargs",
            {"model.enable_thinking": False},
            {"0.5.2": {"enable_thinking": False}},
        ),
        (
            "data.order",
            {f"{TASKSET}.data_selector.selector_type": "shuffle"},
            {"0.4.0": "shuffle", "0.6.0": "shuffle"},
        ),
        ("algorithm.name", {"algorithm.algorithm_type": "dapo"}, {"0.6.0": "grpo"}),
        ("algorithm.kl", {"algorithm.algorithm_type": "dapo"}, {"0.6.0": None}),
        ("mode", {"mode": "colocate"}, {"0.5.0": "both"}),
    ],
)
def test_what_a_key_means_in_each_release(
    key: str, given: dict[str, Json], by_version: dict[str, Json]
) -> None:
    assert {version: native(version, key, given) for version in by_version} == by_version


def test_staleness_admits_one_version_more_from_0_6_0_on() -> None:
    """Step s takes versions from s - 5 on; 0.6.0: from s - 6 on. One of them comes from the interval of 1."""
    given: dict[str, Json] = {
        "synchronizer.sync_style": "trainer_driven",
        "algorithm.sample_strategy": "staleness_control",
        "algorithm.sample_strategy_args.max_staleness": 5,
    }
    assert native("0.5.2", "rollout.max_staleness", given) == 4
    assert native("0.6.0", "rollout.max_staleness", given) == 5


def test_gpus_that_share_a_sequence_are_one_from_0_5_2_on() -> None:
    """9 - 1 = 8 GPUs of the trainer; 4 tasks * 3 replies = 12 do not divide among 8, but among 8 / 4 = 2."""
    given: dict[str, Json] = {
        "cluster.gpu_per_node": 9,
        "trainer.ulysses_sequence_parallel_size": 4,
        "buffer.batch_size": 4,
        "algorithm.repeat_times": 3,
    }
    assert "divisible by the number of GPUs of the trainer, 8" in read("0.5.1", given).problems[0][1]
    assert not read("0.5.2", given).problems


def test_dapos_reward_from_0_6_0_on() -> None:
    assert math_dapo_reward(r"\boxed{7}", Task(uid="t", prompt="?", answer="7", source="s"))["score"] == 1.0
    assert math_dapo_reward(r"\boxed{8}", Task(uid="t", prompt="?", answer="7", source="s"))["score"] == -1.0


def test_a_key_that_nothing_reads_any_more_is_refused() -> None:
    given: dict[str, Json] = {f"{CRITIC}.optim.warmup_style": "cosine"}
    assert not read("0.4.0", given).problems
    ((_, said),) = read("0.4.1", given).problems
    assert "write lr_scheduler_type" in said
    ppo: dict[str, Json] = {
        "algorithm.algorithm_type": "ppo",
        f"{CRITIC}.optim.lr_scheduler_type": "cosine",
    }
    assert native("0.4.1", "critic.optimizer.schedule.type", ppo) == "cosine"


def test_the_flat_veRL_section_of_0_6_0_is_the_nested_one() -> None:
    flat: dict[str, Json] = {
        "trainer.trainer_config.actor.ppo_epochs": 3,
        "trainer.trainer_config.model.enable_gradient_checkpointing": False,
        "trainer.trainer_config.actor.fsdp_config.seed": 7,
        "trainer.trainer_config.rollout.name": "vllm",
        "trainer.trainer_config.critic.fsdp.param_offload": True,
    }
    assert native("0.6.0", "train.update_epochs", flat) == 3
    assert native("0.6.0", "train.gradient_checkpointing", flat) is False
    offloads = {"algorithm.algorithm_type": "ppo", **flat}
    assert native("0.6.0", "train.offload", offloads) == ["critic"]


def test_other_names_in_a_stage() -> None:
    stage: Json = {"stage_name": "one", "algorithm": {"optimizer": {"lr_scheduler_type": "cosine"}}}
    made = read("0.5.2", stages=[stage])
    assert not made.problems
    assert made.tree["stages"][0]["train"]["optimizer"]["schedule"]["type"] == "cosine"


@pytest.mark.parametrize("version", VERSIONS["trinity"])
def test_keys_of_memory_speed_and_placement_are_accepted(version: str) -> None:
    given: dict[str, Json] = {
        "ray_namespace": "mine",
        "trainer.name": "t",
        "trainer.save_strategy": "single_node",
        "explorer.rollout_model.enforce_eager": True,
        "explorer.rollout_model.use_v1": False,
        "explorer.rollout_model.enable_openai_api": True,
        "explorer.rollout_model.weight_sync_buffer_size": 64,
        "model.max_cpu_loras": 3,
        "monitor.detailed_stats": True,
        f"{EXPERIENCES}.max_read_timeout": 77.5,
        f"{ACTOR}.fsdp_config.use_torch_compile": False,
        f"{ACTOR}.profiler.tool": "nsys",
        f"{REF}.fsdp_config.fsdp_size": 2,
        f"{REF}.fsdp_config.reshard_after_forward": False,
        f"{VERL_TRAINER}.balance_batch": False,
        "trainer.trainer_config.reward_model.enable": True,
        "buffer.explorer_output.path": "anywhere",
        "cluster.trainer_gpu_num": 8,
    }
    made = read(version, given)
    assert not made.problems, made.problems
    assert not made.unbuilt, made.unbuilt
    assert made.tree == read(version).tree


def test_a_wrong_kind_of_such_a_value_is_told() -> None:
    made = read(
        "0.4.0", {"explorer.rollout_model.gpu_memory_utilization": 1.5, "explorer.concurrent_mode": "x"}
    )
    assert [text.partition(":")[0] for _, text in made.problems] == [
        "explorer.rollout_model.gpu_memory_utilization",
        "explorer.concurrent_mode",
    ]


def test_keys_of_what_is_switched_off_rest() -> None:
    given: dict[str, Json] = {
        "model.tinker.rank": 16,
        "model.tinker.forward_backward_chunk_bytes": 1,
        "model.tinker.server_loss_fn_config": {"clip_range": 0.2},
        "service.data_juicer.port": 5005,
        "data_processor.task_pipeline.num_process": 8,
        "algorithm.optimizer.lr_decay_style": "cosine",
        f"{ACTOR}.megatron.tensor_model_parallel_size": 4,
        f"{ACTOR}.megatron.of_mine": 4,
        f"{CRITIC}.load_weight": False,
    }
    assert not read("0.4.0", given).unbuilt
    on: dict[str, Json] = {
        "model.tinker.enable": True,
        "data_processor.task_pipeline.operators": [{"name": "x"}],
        "trainer.trainer_strategy": "megatron",
        "algorithm.algorithm_type": "ppo",
    }
    said = " ".join(text for _, text in read("0.4.0", given | on).unbuilt)
    assert [key for key in given if key not in said] == [
        "model.tinker.forward_backward_chunk_bytes",
        "model.tinker.server_loss_fn_config",
        f"{ACTOR}.megatron.tensor_model_parallel_size",
    ]


def test_any_key_of_a_service_that_trains_is_known_but_no_typo() -> None:
    """What such a service is told differs from one to the next, and Trinity's main has more each month."""
    assert not read(
        "0.6.0", {"model.tinker.full_param": True, "model.tinker.sdk_chunk_bytes_cap": 9}
    ).problems
    ((_, said),) = read("0.6.0", {"model.tinker.enabel": True}).problems
    assert said == "model.tinker.enabel: unknown key; did you mean model.tinker.enable?"


def differing(version: str, given: dict[str, Json], *without: str) -> set[str]:
    """Keys beside which the report says what is otherwise than in Trinity."""
    base = {key: value for key, value in SMALL.items() if key not in without}
    tree = nested({tuple(key.split(".")): v for key, v in (base | given).items()})
    made = translate(tree, dialect("trinity", version), origins={})
    assert not made.problems, made.problems
    return {line.key for line in made.lines if line.differs}


def test_what_trinity_puts_in_the_place_of_the_verl_sections_optimizer_is_told() -> None:
    """Until 0.6.0 its own key, given or not; since then the section's."""
    rate, shape = f"{ACTOR}.optim.lr", f"{ACTOR}.optim.lr_warmup_steps"
    for version in VERSIONS["trinity"]:
        told = differing(version, {rate: 2e-6, shape: 3})
        assert {rate, shape} & told == (set() if version == "0.6.0" else {rate, shape}), version
    own: dict[str, Json] = {"algorithm.optimizer.lr": 2e-6, "algorithm.optimizer.lr_warmup_steps": 3}
    assert not {rate, shape} & differing("0.5.2", {rate: 2e-6, shape: 3} | own)
    assert not {rate, shape} & differing("0.5.2", {rate: 1e-6, shape: -1}), "copied"


def test_where_whet_follows_the_document_and_trinitys_code_does_not_is_told() -> None:
    times, template = "algorithm.repeat_times", "model.chat_template_path"
    assert times in differing("0.6.0", {}, times)
    assert times not in differing("0.6.0", {})
    assert times not in differing("0.6.0", {"algorithm.algorithm_type": "ppo"}, times)
    both: dict[str, Json] = {template: "a.jinja", "model.custom_chat_template": "{{ messages }}"}
    assert template in differing("0.6.0", both)
    assert template not in differing("0.6.0", {template: "a.jinja"})


def test_how_the_optimizers_step_is_computed_is_known() -> None:
    own: dict[str, Json] = {"algorithm.optimizer.fused": True, "algorithm.optimizer.foreach": False}
    assert not read("0.6.0", own).problems


def test_names_of_older_files_are_read() -> None:
    older: dict[str, Json] = {
        "trainer.ppo_max_token_len_per_gpu": 64,
        f"{EXPERIENCES}.use_priority_queue": True,
    }
    newer: dict[str, Json] = {
        "trainer.max_token_len_per_gpu": 64,
        f"{EXPERIENCES}.replay_buffer.enable": True,
    }
    style: dict[str, Json] = {"synchronizer.sync_style": "dynamic_by_explorer"}
    one, other = (read("0.4.0", given | style) for given in (older, newer))
    assert one.tree == other.tree
    assert one.tree["buffer"]["replay"]["queue"] is True
    assert one.tree["train"]["micro_batch_tokens"] == 64


def test_a_key_of_the_file_is_meant_before_one_of_its_stages() -> None:
    of = dialect("trinity", "0.6.0")
    for key in ("trainer.ppo_epochs", "explorer.temperature"):
        assert all(each.startswith(key.split(".")[0]) for each in suggest(tuple(key.split(".")), of))


def test_a_section_of_one_example_is_refused_by_name() -> None:
    ((_, said),) = read("0.6.0", {"cod.task_pack_size": 4}).problems
    assert "examples/research_cod" in said


def test_megatrons_sizes_schedule_and_weight_decay() -> None:
    """9 - 1 = 8 GPUs = 2 tensor * 2 pipeline * 2 data-parallel ranks. The warm-up begins where the cosine ends, at
    min_lr_ratio of lr; norms and biases are spared."""
    given: dict[str, Json] = {
        "cluster.gpu_per_node": 9,
        "trainer.trainer_strategy": "megatron",
        f"{ACTOR}.megatron.tensor_model_parallel_size": 2,
        f"{ACTOR}.megatron.pipeline_model_parallel_size": 2,
        "algorithm.optimizer.lr_scheduler_type": "cosine",
        "algorithm.optimizer.min_lr_ratio": 0.25,
        "algorithm.optimizer.lr_warmup_steps": 3,
    }
    assert native("0.5.2", "train.parallel", given) == {"dp_shard": 2, "tp": 2, "pp": 2}
    optimizer = native("0.5.2", "train.optimizer", given)
    assert optimizer["schedule"] == {
        "type": "cosine",
        "unit": "train_step",
        "min_lr_ratio": 0.25,
        "warmup_steps": 3,
        "warmup_ends": "start",
        "warmup_start_ratio": 0.25,
    }
    assert optimizer["decay_all"] is False
    newer = {key.replace(f"{ACTOR}.megatron", "trainer.megatron"): value for key, value in given.items()}
    assert read("0.6.0", newer).tree == read("0.6.0", given).tree
    assert (
        "must divide the 8 of the trainer"
        in read("0.5.2", given | {f"{ACTOR}.megatron.pipeline_model_parallel_size": 3}).problems[0][1]
    )


@pytest.mark.parametrize(
    ("key", "default", "other", "instead"),
    [
        (f"{ACTOR}.grad_clip", 1.0, 0.5, "trainer.grad_clip"),
        (f"{CRITIC}.grad_clip", 1.0, 0.5, "trainer.grad_clip"),
        (f"{VERL_TRAINER}.max_actor_ckpt_to_keep", 5, 2, "trainer.max_checkpoints_to_keep"),
        (f"{ACTOR}.strategy", "fsdp", "megatron", "trainer.trainer_strategy: megatron"),
    ],
)
def test_keys_of_the_verl_section_that_no_longer_count(
    key: str, default: Json, other: Json, instead: str
) -> None:
    """With veRL 0.8 or newer, Trinity 0.6.0 keeps its own value and trains with FSDP."""
    assert not read("0.5.2", {key: other}).problems
    assert not read("0.6.0", {key: default}).problems
    ((_, said),) = read("0.6.0", {key: other}).problems
    assert key in said
    assert instead in said


def test_megatron_trains_where_trinitys_own_key_says_so() -> None:
    """Megatron spares norms and biases of the weight decay, FSDP does not."""
    lr: dict[str, Json] = {"algorithm.optimizer.lr": 1e-5}
    section: dict[str, Json] = {f"{ACTOR}.strategy": "megatron"}
    for version, given, decay_all in (
        ("0.5.2", lr, True),
        ("0.5.2", lr | section, False),
        ("0.6.0", lr, True),
        ("0.6.0", lr | section | {"trainer.trainer_strategy": "megatron"}, False),
    ):
        assert native(version, "train.optimizer.decay_all", given) is decay_all


def test_a_critic_with_an_order_of_its_own() -> None:
    shuffled: dict[str, Json] = {f"{CRITIC}.shuffle": True}
    ppo: dict[str, Json] = {"algorithm.algorithm_type": "ppo"}
    assert not read("0.4.0", shuffled).unbuilt, "grpo has no critic"
    assert "order of its own" in read("0.4.0", shuffled | ppo).unbuilt[0][1]
    assert not read("0.4.0", shuffled | ppo | {f"{ACTOR}.shuffle": True}).unbuilt


def test_null_under_another_name_says_nothing() -> None:
    both: dict[str, Json] = {"algorithm.optimizer.warmup_style": None, **COSINE}
    for given in (both, dict(reversed(both.items()))):
        assert native("0.5.2", "train.optimizer.schedule.type", given) == "cosine"


@pytest.mark.parametrize(("mode", "tasks"), [("train", 96), ("both", 8)])
def test_a_trainer_by_itself_reads_train_batch_size_alone(mode: str, tasks: int) -> None:
    """768 experiences of 8 rollouts a task are 96 tasks. batch_size is the explorers'."""
    size: dict[str, Json] = {"buffer.train_batch_size": 768} if mode == "train" else {}
    made = read("0.5.2", {"mode": mode, "algorithm.repeat_times": 8, **size})
    assert not any("train_batch_size" in text for _, text in (*made.problems, *made.unbuilt))
    assert get(made.tree, ("train", "tasks_per_step")) == tasks


def test_a_run_ends_with_its_last_full_batch() -> None:
    """Trinity reads whole batches of all epochs together: 3 epochs of 7473 rows in batches of 96 are 233 steps."""
    made = read("0.5.2", {"buffer.total_epochs": 3})
    assert get(made.tree, ("train", "drop_last")) == "end"
    assert get(read("0.5.2", {"buffer.total_steps": 3}).tree, ("train", "drop_last")) is None


def told(given: dict[str, Json]) -> list[str]:
    found = read("0.6.0", given)
    return [text for _, text in (*found.problems, *found.unbuilt)]


@pytest.mark.parametrize("key", ["workflow_key", "reward_fn_key"])
def test_a_row_does_not_choose_what_judges_it(key: str) -> None:
    column = f"buffer.explorer_input.taskset.format.{key}"
    (text,) = [text for text in told({column: "kind"}) if column in text]
    assert "A row never selects the code that scores it" in text
    assert not [text for text in told({column: ""}) if column in text]


def test_settings_of_servers_for_workflows_change_nothing() -> None:
    at = "explorer.rollout_model."
    given = {
        at + "enable_history": True, at + "enable_auto_tool_choice": True, at + "tool_call_parser": "hermes",
        at + "reasoning_parser": "qwen3", at + "enable_openai_api": True,
        "buffer.explorer_input.taskset.format.messages_key": "talk",
    }  # fmt: skip
    assert not [text for text in told(given) if any(key in text for key in given)]


def test_experts_of_sampling_train_with_megatron() -> None:
    """From 0.6.0 on; verl's FSDP engine does not read them, and verl's own key is not asked."""
    on: dict[str, Json] = {"algorithm.enable_router_replay": True}
    megatron: dict[str, Json] = {"trainer.trainer_strategy": "megatron"}
    assert native("0.6.0", "train.router_replay", {**on, **megatron}) == "sampled"
    for given in (on, megatron):
        assert "router_replay" not in read("0.6.0", given).tree["train"]
    old = f"{ACTOR}.router_replay.mode"
    assert "algorithm.enable_router_replay" in read("0.6.0", {**megatron, old: "R3"}).problems[0][1]
    assert not read("0.6.0", {**megatron, f"{REF}.router_replay.mode": "R3"}).problems
