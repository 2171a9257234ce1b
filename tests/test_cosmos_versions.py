"""What a Cosmos-RL file means in each release: defaults, formulas and rules that changed, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from whet.config.load import load
from whet.config.schedules import factor
from whet.config.schema import ScheduleConfig
from whet.dialects import versions
from whet.dialects.cosmos.run import seed
from whet.dialects.cosmos.steps import schedule
from whet.dialects.recognise import recognise
from whet.dialects.report import summary
from whet.dialects.rules import function
from whet.dialects.tables import dialect, other_end, version_of
from whet.dialects.translate import Translation, translate
from whet.dialects.values import nested

checkpoint = function("cosmos", "run.checkpoint")
sync = function("cosmos", "run.sync")
batch = function("cosmos", "steps.batch")
optimizer = function("cosmos", "steps.optimizer")
run_length = function("cosmos", "steps.run_length")

POLICY, SCHEDULE = "train.train_policy.", "train.optimizer.schedule."


def values(version: str, kind: str = "grpo", **given: Any) -> dict[str, Any]:
    """A file's values in a version; `p_on_policy` is train.train_policy.on_policy, `t_seed` train.seed."""
    out: dict[str, Any] = {row.key: row.default for row in dialect(f"cosmos-{kind}", version).rows}
    out |= {"train.train_batch_per_replica": 16} if kind == "grpo" else {}
    for name, value in given.items():
        key = {"p": POLICY, "t": "train.", "c": "train.ckpt."}[name[0]] + name[2:]
        assert key in out, key
        out[key] = value
    return out | {versions.VERSION: version}


def made(version: str, given: dict[str, Any], kind: str = "grpo") -> Translation:
    tree = nested({tuple(key.split(".")): value for key, value in given.items()})
    return translate(tree, dialect(f"cosmos-{kind}", version), origins={})


def said(version: str, given: dict[str, Any], kind: str = "grpo") -> list[str]:
    """What is said against these keys."""
    found = made(version, given, kind)
    return [text for _, text in (*found.problems, *found.unbuilt) if any(key in text for key in given)]


@pytest.mark.parametrize(
    ("key", "version", "before", "since"),
    [
        (POLICY + "max_retry_for_on_policy", "0.4.0", 10, -1),
        (POLICY + "outdated_rollout_fetch_batch_size", "0.3.9", 1, 0),
        ("rollout.parallelism.dp_shard_size", "0.3.8", -1, 1),
        ("distillation.mini_batch", "0.4.1", 2, 1),
        ("policy.diffusers.dtype", "0.4.2", "float16", "float32"),
    ],
)
def test_defaults_that_changed(key: str, version: str, before: Any, since: Any) -> None:
    all_of_them = versions.VERSIONS["cosmos"]
    last = all_of_them[all_of_them.index(version) - 1]
    assert [values(each)[key] for each in (last, version)] == [before, since]


def test_a_file_is_read_as_a_release_that_has_its_keys() -> None:
    assert version_of("cosmos-grpo", ["train.optm_lr"]) == "0.3.6"
    assert version_of("cosmos-grpo", ["train.optm_warmup_start_factor"]) == "0.4.7"
    assert version_of("cosmos-grpo", [POLICY + "remote_reward.enabled"]) == "0.4.1", "gone in 0.4.2"
    assert version_of("cosmos-grpo", ["train.optm_lr"], "cosmos@0.3.8") == "0.3.8"


@pytest.mark.parametrize(
    ("version", "rates"),
    [
        ("0.3.6", [0.25, 0.5, 0.75, 1, 1]),
        ("0.4.1", [0.25, 0.5, 0.75, 1, 1]),
        ("0.4.2", [0, 1 / 3, 2 / 3, 1, 1]),
    ],
)
def test_the_first_step_of_a_warm_up_has_no_rate_from_0_4_2_on(version: str, rates: list[float]) -> None:
    given = values(version, t_optm_warmup_steps=4, t_max_num_steps=10)
    native = ScheduleConfig(**{key.removeprefix(SCHEDULE): value for key, value in schedule(given).items()})
    assert [factor(native, step, 10) for step in range(5)] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("version", "kind", "at_the_end"),
    [
        ("0.3.6", "grpo", 0.5),
        ("0.3.7", "grpo", 0.5),
        ("0.4.0", "grpo", 0.5),
        ("0.4.1", "grpo", 0.5),
        ("0.4.0", "sft", 0.5),
    ],
)
def test_a_decay_ends_with_the_run_in_every_release(version: str, kind: str, at_the_end: float) -> None:
    """The last two of ten steps decay: 1 - (k + 1 - 9) / 2 in step k, from 0. RL jobs of Cosmos 0.3.7 to 0.4.0
    themselves never reached it."""
    given = values(
        version,
        kind,
        t_optm_warmup_steps=0,
        t_optm_decay_ratio=0.2,
        t_optm_decay_type="linear",
        t_max_num_steps=10,
    )
    native = ScheduleConfig(**{key.removeprefix(SCHEDULE): value for key, value in schedule(given).items()})
    assert factor(native, 9, 10) == pytest.approx(at_the_end, abs=1e-4)


def test_a_share_is_of_the_runs_own_steps_in_every_release() -> None:
    """From 0.3.7 to 0.4.0 Cosmos itself took it of a million."""
    for version in ("0.3.6", "0.4.0", "0.4.1"):
        found = schedule(values(version, t_optm_warmup_steps=0.1))
        assert found[SCHEDULE + "warmup_steps"] == 0.1
        assert SCHEDULE + "total_steps" not in found


def test_epsilon_reaches_adam_in_every_release() -> None:
    """Cosmos itself lost it on the way before 0.4.0."""
    given = {"t_epsilon": 1e-3}
    assert [optimizer(values(v, **given))["train.optimizer.eps"] for v in ("0.3.9", "0.4.0")] == [1e-3, 1e-3]


def test_rates_by_module() -> None:
    out = optimizer(values("0.4.2", t_optm_lr={"global": 1e-6, "model.embed": 2e-6, "model.layers.3": 0.0}))
    assert out["train.optimizer.lr"] == 1e-6
    assert list(out["train.optimizer.param_groups"].items()) == [
        (r"^model\.layers\.3(\.|$)", {"lr_factor": 0.0}),
        (r"^model\.embed(\.|$)", {"lr_factor": 2.0}),
    ]
    for wrong in ({"model.embed": 1e-6}, {"global": 0.0, "a": 1e-6}, {"global": "x"}):
        assert said("0.4.2", {"train.optm_lr": wrong})
    written = made("0.4.2", {"train.optm_lr": {"global": 1e-6, "model.embed": 2e-6}})
    assert written.tree["train"]["optimizer"]["param_groups"] == {r"^model\.embed(\.|$)": {"lr_factor": 2.0}}


@pytest.mark.parametrize(
    ("version", "every", "ahead"),
    [("0.3.6", 1, 4), ("0.3.6", 3, 4), ("0.3.9", 1, 4), ("0.4.0", 1, 4), ("0.4.0", 3, 2), ("0.4.0", 9, 0)],
)
def test_how_far_rollouts_are_ahead(version: str, every: int, ahead: int) -> None:
    """From 0.4.0 on the four steps bound the age of the weights: with syncs every 3 steps it is 2 + (3 - 1)."""
    given = values(version, t_sync_weight_interval=every, p_allowed_outdated_steps=4)
    limit = {"rollout.schedule": "async"} if ahead else {}
    assert sync(given) == {"rollout.sync_interval": every, "rollout.max_staleness": ahead} | limit


def test_seeds_of_the_data() -> None:
    assert seed(values("0.3.9", t_seed=5)) == {"seed": 5}
    assert seed(values("0.4.0", t_seed=5)) == {"seed": 5, "data.seed": 0}
    assert seed(values("0.4.0", t_seed=-5, p_dataloader_seed=3)) == {"seed": 42, "data.seed": 3}


@pytest.mark.parametrize(
    ("version", "kind", "saves", "exports"),
    [
        ("0.3.6", "sft", False, False),
        ("0.3.7", "sft", False, True),
        ("0.4.2", "sft", False, False),
        ("0.4.1", "grpo", True, False),
        ("0.4.2", "grpo", True, True),
    ],
)
def test_the_last_step_is_exported(version: str, kind: str, saves: bool, exports: bool) -> None:
    """With export_safetensors=false."""
    given = values(version, kind, c_enable_checkpoint=saves, c_export_safetensors=False)
    assert checkpoint(given)["checkpoint.export"] is exports
    assert checkpoint(given).get("checkpoint.export_interval", 0) == 0


def test_an_sft_job_leaves_out_the_last_rows_of_an_epoch_from_0_3_9_on() -> None:
    found = [batch(values(v, "sft"))["train.drop_last"] for v in ("0.3.8", "0.3.9")]
    assert found == [False, True]
    kept = {"p_dataloader_drop_last": False}
    assert batch(values("0.3.9", "sft", **kept))["train.drop_last"] is False
    in_pipelines = [
        batch(values(v, "sft", **kept) | {"policy.parallelism.pp_size": 2})["train.drop_last"]
        for v in ("0.4.2", "0.4.3")
    ]
    assert in_pipelines == [False, True]


def test_advantages_are_bounded_for_diffusion_models_alone() -> None:
    given = {POLICY + "advantage_low": -1.0, POLICY + "advantage_high": 1.0}
    assert not said("0.4.0", given)
    assert "advantage_low" not in made("0.4.0", given).tree["algorithm"]


# ---------------------------------------------------------------- what is accepted


@pytest.mark.parametrize(
    "given",
    [
        {
            "rollout.enforce_eager": False,
            "rollout.gpu_memory_utilization": 0.3,
            "rollout.enable_chunked_prefill": True,
        },
        {"rollout.mode": "async", "rollout.async_config.max_concurrent_requests": 64},
        {"rollout.prefetch_rollout": True, "rollout.async_r2r_sync": "generation"},
        {
            "train.coalesce_weight_sync": True,
            "train.force_use_hf": True,
            "train.signal_to_handle": ["SIGTERM"],
        },
        {
            POLICY + "balance_dp_token": True,
            POLICY + "rollout_as_token_ids": True,
            "train.sequence_packing": True,
        },
        {"policy.parallelism.pp_schedule": "GPipe", "policy.parallelism.pp_layers_per_stage": 4},
        {"redis": "12800", "eth_ips": "10.0.0.1", "validation.batch_size": 999},
        {"distillation.param_dtype": "float32", "distillation.batch_size_per_replica": 2},
        {"vla.num_envs": 8, "policy.diffusers.sample.num_steps": 10, POLICY + "remote_reward.scale": 2.0},
        {
            "rollout.multi_turn_config.max_assistant_turns": 1000,
            "rollout.multi_turn_config.enable_tools": True,
        },
    ],
)
def test_memory_speed_and_features_that_are_off_are_accepted(given: dict[str, Any]) -> None:
    assert said("0.4.4", given) == []
    wrong = {key: {"a": [1]} for key in given}
    assert len(said("0.4.4", wrong)) == len(wrong), "but a value of another kind is refused"


@pytest.mark.parametrize(
    ("key", "value", "around", "words"),
    [
        ("distillation.param_dtype", "float32", {"distillation.enable": True}, "a teacher of another dtype"),
        (POLICY + "bypass_reward", True, {}, "nothing is learned"),
        ("policy.is_diffusers", True, {}, "diffusion models"),
        (POLICY + "use_remote_reward", True, {}, "reward models' own layouts"),
        ("train.non_text", True, {}, "images and video"),
        ("rollout.backend", "vla", {}, "vision-language-action models"),
        ("train.logprob_dtype", "bfloat16", {}, "expected one of float32"),
        (POLICY + "algo", "ppo", {}, "algorithms of your own"),
    ],
)
def test_what_is_not_built_says_so(key: str, value: Any, around: dict[str, Any], words: str) -> None:
    assert any(words in text for text in said("0.4.4", around | {key: value}))


def test_a_file_of_a_world_model_is_recognised_by_what_says_something() -> None:
    """verl's SFT trainer has a `model.tokenizer`, too, which it fills in itself: a key of any value tells nothing."""
    world: dict[str, Any] = {"tokenizer": {}, "net": {"num_blocks": 36}}
    assert recognise({"model": world, "model_parallel": {"context_parallel_size": 8}}) == "cosmos-grpo"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {POLICY + "trainer_type": "diffusion_nft", POLICY + "reward_function": []},
            "trainer_type=diffusion_nft",
        ),
        ({"rollout.backend": "vla", "vla.num_envs": 8}, "rollout.backend=vla"),
        ({"policy.is_diffusers": True, POLICY + "dataset.name": ""}, "policy.is_diffusers=true"),
        ({POLICY + "trainer_type": "gym_pg", "env.max_steps": 9}, "trainer_type=gym_pg"),
        ({"model_parallel.context_parallel_size": 2, "job.name": "a"}, "--wfm-mode"),
    ],
)
def test_a_file_for_other_models_is_refused_for_that_alone(given: dict[str, Any], words: str) -> None:
    found = made("0.4.4", {"train.non_text": True} | given)
    ((_, text),) = found.problems
    assert words in text
    assert "models" in text
    assert not found.unbuilt


def test_rewards_rest_where_a_teacher_judges() -> None:
    given = {POLICY + "bypass_reward": True, "distillation.enable": True}
    assert said("0.4.4", given) == []


def test_slips_of_official_files_are_read() -> None:
    found = made(
        "0.4.4", {"policy.model_gradient_checkpointig": False, "distillation.model_max_length": 1024}
    )
    assert not [text for _, text in found.problems if "unknown" in text]
    assert found.tree["train"]["gradient_checkpointing"] is False


def test_an_rl_job_counts_whole_steps_of_all_epochs_and_an_sft_job_those_of_each() -> None:
    assert run_length(values("0.4.4"))["train.drop_last"] == "end"
    assert "train.drop_last" not in run_length(values("0.4.4", "sft"))


def test_a_file_whose_keys_tell_no_release_says_what_depends_on_it() -> None:
    """The warm-up of 3 steps begins at 1/3 of the rate in 0.3.6 and at 0 in 0.4.4."""
    file = Path(__file__).parent / "dialects/cosmos_letters.toml"
    rows = ["train.train_policy.dataset.name=rows.jsonl"]
    made = load(file, rows, here=False).translation
    assert made is not None
    assert made.version == "0.3.6"
    assert made.otherwise[0] == "0.4.7"
    assert "train.optimizer.schedule.warmup_ends" in made.otherwise[1]
    assert "its keys do not determine the release; read as 0.4.7 it would differ in" in summary(made)
    for said in ("cosmos@0.3.6", "cosmos-grpo@0.4.7"):
        told = load(file, rows, dialect=said, here=False).translation
        assert told is not None
        assert told.version == said.partition("@")[2]
        assert "do not determine" not in summary(told)


def test_the_other_end_of_the_releases_that_fit_is_the_farthest() -> None:
    assert other_end("cosmos-grpo", ["train.optm_lr"], "0.3.6") == "0.4.7"
    assert other_end("cosmos-grpo", ["train.optm_warmup_start_factor"], "0.4.7") == "0.4.2"
    assert other_end("cosmos-grpo", [POLICY + "remote_reward.enabled"], "0.4.1") == "0.4.0"
    assert other_end("cosmos-grpo", ["train.prefetch_payloads"], "0.4.7") == "", "no other release has it"


TURNS = "rollout.multi_turn_config."


def test_several_turns_have_tools_of_this_file_or_none() -> None:
    given = {TURNS + "enable": True, TURNS + "enable_tools": True, TURNS + "max_assistant_turns": 3}
    tree = made("0.4.4", {**given, "policy.model_max_length": 900}).tree
    assert tree["rollout"]["env"] == {
        "make": "whet.envs.tool_env:tools", "max_turns": 3, "max_tokens_per": "turn", "observation_tokens": 900,
        "history": "template",
    }  # fmt: skip
    assert tree["data"]["chat"] is True
    assert "env" not in made("0.4.4", {**given, TURNS + "enable": False}).tree["rollout"]
    file = Path(__file__).parent / "dialects" / "cosmos_tools.toml"
    env = load(file, rehearsal=True).config.rollout.env
    assert env is not None
    assert (env.arguments, env.max_turns) == ({"functions": ["tests/dialects/tools/functions.py:add"]}, 4)
    for key, value in (("add_generation_prompt", False), ("continue_final_message", True)):
        (text,) = said("0.4.4", {TURNS + "enable": True, TURNS + key: value})
        assert "always" in text
        assert said("0.4.4", {TURNS + key: value}) == [], "where there is one turn, nothing reads it"
