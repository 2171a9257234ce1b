"""SkyRL's keys: every one has a status, its own rules hold, data, batches and records are translated."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asked import asked
from whet.config.load import Loaded
from whet.config.load import load as load_config
from whet.config.parse import parse
from whet.dialects.row import Values
from whet.dialects.skyrl import devices, run
from whet.dialects.tables import dialect, parts, table
from whet.dialects.translate import translate
from whet.dialects.values import nested
from whet.dialects.versions import VERSION
from whet.types import ConfigError, Json

pytestmark = pytest.mark.usefixtures("home")

devices, run = map(asked, (devices, run))

HERE = Path(__file__).parent / "dialects"
DOCUMENT = dict(line.split("\t") for line in (HERE / "skyrl.keys.txt").read_text().splitlines())
SKYRL = dialect("skyrl")
ROWS = {row.key: row for row in SKYRL.rows}


def values(version: str = "doc", **given: Json) -> Values:
    """All values of a file of a version that sets these; `__` stands for a dot."""
    rows = {row.key: row for row in table("skyrl", version)}
    written = {k.replace("__", "."): v for k, v in given.items()}
    assert written.keys() <= rows.keys()
    flat = {name: written.get(name, row.default) for name, row in rows.items()}
    limits = {
        "generator.max_input_length": flat["trainer.max_prompt_length"],
        "generator.eval_sampling_params.max_generate_length": flat[
            "generator.sampling_params.max_generate_length"
        ],
    }
    referring = {name: limit for name, limit in limits.items() if "${" in str(flat[name])}
    return flat | referring | {VERSION: version}


def load(name: str, *overrides: str, version: str = "doc") -> Loaded:
    return load_config(HERE / name, overrides, dialect=f"skyrl@{version}")


def refusal(function: Any, version: str = "doc", **given: Json) -> str:
    with pytest.raises(ConfigError) as e:
        function(values(version, **given))
    return str(e.value)


def said(**given: Json) -> str:
    """Everything that is said against a file that sets these."""
    assert {k.replace("__", ".") for k in given} <= ROWS.keys()
    tree = nested({parts(k.replace("__", ".")): v for k, v in given.items()})
    made = translate(tree, SKYRL, origins={})
    return "\n".join(text for _, text in (*made.problems, *made.unbuilt))


# ---------------------------------------------------------------- the table


def test_every_key_of_the_document_has_a_row_with_its_default() -> None:
    assert len(DOCUMENT) == 130
    assert not DOCUMENT.keys() - ROWS.keys()
    sections = {name for name in DOCUMENT if isinstance(ROWS[name].default, dict)}
    assert sections == {
        "trainer.policy.optimizer_config",
        "trainer.policy.fsdp_config",
        "generator.sampling_params",
        "generator.eval_sampling_params",
    }
    for name, text in DOCUMENT.items():
        if name not in sections:
            assert ROWS[name].default == parse(text).tree, name


def test_names_are_unique_and_newer_names_lead_to_rows() -> None:
    assert len(ROWS) == len(SKYRL.rows)
    for new, _ in SKYRL.aliases.values():
        assert new in ROWS or parts(new) in SKYRL.below, new
    assert not SKYRL.aliases.keys() & ROWS.keys()


def test_statuses() -> None:
    counts = Counter(ROWS[name].status for name in DOCUMENT)
    assert counts == {
        "translated": 86,
        "coming": 3,
        "derived": 29,
        "mapped": 12,
    }
    few = sum(row.status in ("inert", "refused") for row in ROWS.values())
    assert few < 0.05 * len(ROWS)
    assert all(row.what for row in ROWS.values() if row.status != "mapped")


def test_every_native_key_that_a_function_gives_is_declared() -> None:
    gae = values(trainer__algorithm__advantage_estimator="gae", trainer__critic__model__path="m")
    dual = values(
        trainer__algorithm__ppo_loss_type="dual_clip",
        trainer__algorithm__grpo_norm_by_std=False,
        trainer__algorithm__advantage_batch_normalize=True,
        generator__model_dtype="float32",
    )
    for row in ROWS.values():
        if row.function and row.status == "translated":
            together = {n.removesuffix(".*") for r in SKYRL.by_function[row.function] for n in r.native}
            given = {key for v in (gae, dual) for key in SKYRL.functions(row.function)(v)}
            assert all(any(key == n or key.startswith(f"{n}.") for n in together) for key in given), row.key


# ---------------------------------------------------------------- batch sizes

ODD: dict[str, Json] = {"trainer__placement__policy_num_gpus_per_node": 7}


def test_batches_that_do_not_divide_evenly_among_ranks_run_as_there() -> None:
    """4 prompts * 5 on 8 ranks are 2 rollouts each, and 4 more: SkyRL rounds, here each step has its 4 prompts."""
    v = values(
        trainer__train_batch_size=16,
        trainer__policy_mini_batch_size=4,
        trainer__micro_train_batch_size_per_gpu=2,
        trainer__placement__policy_num_gpus_per_node=8,
    )
    assert run.batches(v)["train.minibatches"] == 4


def test_batches_by_hand() -> None:
    v = values(
        trainer__train_batch_size=32,
        trainer__policy_mini_batch_size=8,
        trainer__micro_train_batch_size_per_gpu=2,
        trainer__micro_forward_batch_size_per_gpu=4,
        generator__n_samples_per_prompt=4,
    )
    # 8 prompts * 4 = 32 rollouts, on 4 ranks 8 each, in micro-batches of 2
    assert run.batches(v) == {
        "train.tasks_per_step": 32,
        "train.minibatches": 4,
        "train.micro_batch_rollouts": 2,
        "train.forward_micro_batch_rollouts": 4,
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"trainer__train_batch_size": 128},
            "trainer.train_batch_size=128 must be at least trainer.policy_mini",
        ),
        (
            {"trainer__train_batch_size": 1000},
            "trainer.policy_mini_batch_size=256 must divide trainer.train_batch",
        ),
        ({"trainer__placement__policy_num_nodes": 400}, "leaves a rank no rollout"),
        (
            ODD,
            "a rank's mini batch, 182 = ",
        ),
        ({"trainer__micro_train_batch_size_per_gpu": 7}, "must divide the mini batch of a rank, 320 = "),
        ({"trainer__policy__sequence_parallel_size": 3}, "must divide the 4 GPUs of the policy"),
        ({"trainer__train_batch_size": 0}, "trainer.train_batch_size: got 0, expected a whole number >= 1"),
        ({"trainer__micro_forward_batch_size_per_gpu": "x"}, 'got "x", expected a whole number >= 1'),
    ],
)
def test_batches_that_skyrl_refuses(given: dict[str, Json], words: str) -> None:
    assert words in said(**given)


def test_ranks_of_sequence_parallel_groups_count_once() -> None:
    v = values(trainer__placement__policy_num_nodes=2, trainer__policy__sequence_parallel_size=4)
    assert devices.data_parallel(v, "policy") == 2


def test_a_critic_is_checked_only_where_it_learns() -> None:
    odd = {"trainer__critic_mini_batch_size": 300}
    assert run.batches(values(**odd))["train.minibatches"] == 4
    gae = {"trainer__algorithm__advantage_estimator": "gae", "trainer__critic__model__path": "m"}
    assert "trainer.critic_mini_batch_size=300 must divide" in refusal(run.batches, **odd, **gae)
    small = values(trainer__critic_mini_batch_size=128, **gae)
    assert run.batches(small)["critic.minibatches"] == 8


# ---------------------------------------------------------------- placement and engine


def test_placement() -> None:
    devices.check_placement(values())
    eight = {f"trainer__placement__{role}_num_gpus_per_node": 8 for role in ("policy", "ref")}
    assert "the policy's 8 GPUs" in refusal(devices.check_placement, **eight)
    engines = {"generator__num_inference_engines": 2}
    devices.check_placement(values(**eight, **engines))
    alone = engines | {"trainer__placement__policy_num_gpus_per_node": 8}
    assert "the ref has 4 GPUs" in refusal(devices.check_placement, **alone)
    devices.check_placement(values(**alone, trainer__algorithm__use_kl_loss=False))
    apart = alone | {"trainer__placement__colocate_all": False}
    assert "policy_num_gpus_per_node=8 must equal ref_num_gpus_per_node=4" in refusal(
        devices.check_placement, **apart
    )
    devices.check_placement(values(**apart, trainer__placement__colocate_policy_ref=False))


@pytest.mark.parametrize(
    ("all_", "policy_ref", "estimator", "kl", "wanted"),
    [
        (True, True, "gae", True, []),
        (True, False, "gae", True, []),
        (False, True, "gae", True, ["critic"]),
        (False, False, "gae", True, ["critic", "reference"]),
        (False, False, "grpo", True, ["reference"]),
        (False, False, "gae", False, ["critic"]),
        (False, True, "grpo", True, []),
    ],
)
def test_who_has_gpus_of_its_own(
    all_: bool, policy_ref: bool, estimator: str, kl: bool, wanted: list[str]
) -> None:
    found = devices.apart(
        values(
            trainer__placement__colocate_all=all_,
            trainer__placement__colocate_policy_ref=policy_ref,
            trainer__algorithm__advantage_estimator=estimator,
            trainer__algorithm__use_kl_loss=kl,
        )
    )
    assert found.get("train.parallel.separate_ranks", []) == wanted


def test_servers_that_run_already() -> None:
    away: dict[str, Json] = {"generator__run_engines_locally": False}
    old = values(**away, generator__num_inference_engines=2)
    assert run.rollout_engine(old) == {
        "rollout.engine": "vllm",
        "rollout.server.urls": ["http://127.0.0.1:8001"],
    }
    assert "rollout.replicas" not in devices.layout(old)
    assert "give the servers" in refusal(
        run.rollout_engine, **away, generator__remote_inference_engine_urls=[]
    )
    for version in ("train-0.4", "main"):
        urls: dict[str, Json] = {"generator__external_server_urls": ["https://a:1", "b:2"]}
        new = values(version, **away, **urls)
        assert run.rollout_engine(new)["rollout.server.urls"] == ["https://a:1", "http://b:2"]
        assert "rollout.server.proxy" not in run.rollout_engine(new)
        before = run.rollout_engine({**new, "generator.external_proxy_url": "front:80"})
        assert before == {**run.rollout_engine(new), "rollout.server.proxy": "http://front:80"}
        alone = run.rollout_engine(values(version, **away, generator__external_proxy_url="http://front:80"))
        assert alone == {"rollout.engine": "vllm", "rollout.server.urls": ["http://front:80"]}


def test_defaults_in_a_home_that_is_not_there_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without HOME: SkyRL's own defaults are there."""
    monkeypatch.delenv("HOME", raising=False)
    for key in ("trainer.export_path", "trainer.ckpt_path"):
        assert f"{key}: its default, " in said()
        assert "the environment has no variable HOME" in said()
    own = {"trainer__export_path": "here", "trainer__dump_eval_results": True}
    assert "trainer.export_path: its default" not in said(**own)


def test_engines() -> None:
    assert run.rollout_engine(values()) == {
        "rollout.engine": "native",
        "rollout.server.options": {"tensor-parallel-size": 4, "gpu-memory-utilization": 0.8},
    }
    assert run.rollout_engine(values(generator__run_engines_locally=False)) == {
        "rollout.engine": "vllm",
        "rollout.server.urls": ["http://127.0.0.1:8001"],
    }
    remote = {"generator__run_engines_locally": False, "generator__backend": "sglang"}
    urls = {"generator__remote_inference_engine_urls": ["a:8001", "http://b:8002"]}
    assert run.rollout_engine(values(**remote, **urls)) == {
        "rollout.engine": "sglang",
        "rollout.server.urls": ["http://a:8001", "http://b:8002"],
    }
    assert "give the servers" in refusal(
        run.rollout_engine, **remote, generator__remote_inference_engine_urls=[]
    )
    assert "remote engines only" in refusal(run.rollout_engine, generator__backend="sglang")
    assert "expected one of vllm, sglang" in said(generator__backend="hf")
    assert run.check_engine_mode(values(generator__batched=False)) == {}
    blocking = {"generator__async_engine": False, "generator__batched": False}
    assert "needs generator.batched=true" in refusal(run.check_engine_mode, **blocking)
    assert "at most 1" in said(generator__gpu_memory_utilization=1.5)
    assert "expected one of nccl, gloo, delta" in said(generator__weight_sync_backend="mpi")
    assert "must equal trainer.max_prompt_length=512" in refusal(
        run.environment, generator__max_input_length=600
    )
    longer = values(generator__max_input_length=600, generator__max_turns=2)
    run.environment(longer)
    shorter: dict[str, Json] = {"generator__max_input_length": 60, "generator__max_turns": 2}
    assert "must be at least" in refusal(run.environment, **shorter)
    assert not said(generator__override_existing_update_group=True)


def test_dtype_is_the_derived_one_unless_float32_is_asked_for() -> None:
    assert devices.dtype(values()) == {}
    assert devices.dtype(values(generator__model_dtype="float32")) == {"model.dtype": "float32"}
    assert devices.dtype(values(trainer__bf16=False)) == {"model.dtype": "float32"}
    assert "float16 is that of both" in refusal(devices.dtype, generator__model_dtype="float16")
    own = "trainer__policy__fsdp_config__mixed_precision__param_dtype"
    assert "float16 is that of both" in refusal(devices.dtype, **{own: "fp16"})
    half: dict[str, Json] = {own: "fp16", "generator__model_dtype": "float16"}
    assert devices.dtype(values(**half)) == {"model.dtype": "float16"}
    assert "float16 is that of both" in refusal(devices.dtype, **half, trainer__strategy="deepspeed")


# ---------------------------------------------------------------- sampling and data


def test_sampling() -> None:
    given = {"generator__sampling_params__top_k": 20, "generator__sampling_params__max_generate_length": 64}
    assert run.training_sampling(values(**given)) == {
        "rollout.sampling.max_tokens": 64,
        "rollout.sampling.temperature": 1.0,
        "rollout.sampling.top_p": 1.0,
        "rollout.sampling.min_p": 0.0,
        "rollout.sampling.top_k": 20,
    }
    assert run.training_sampling(values())["rollout.sampling.top_k"] == 0
    more = run.training_sampling(values(**{"generator.sampling_params.*": {"stop": ["x"], "min_tokens": 2}}))
    assert (more["rollout.sampling.stop"], more["rollout.sampling.min_tokens"]) == (["x"], 2)
    assert "best_of is handed on to vLLM" in refusal(
        run.training_sampling, **{"generator.sampling_params.*": {"best_of": 2}}
    )
    assert "write -1" in refusal(run.training_sampling, generator__sampling_params__top_k=0)


def test_data() -> None:
    two = values(data__train_data=["a.parquet", "b.parquet"])
    assert run.training_data(two) == {
        "data.train.0.path": ["a.parquet", "b.parquet"],
        "data.train.0.answer": "reward_spec.ground_truth",
        "data.train.0.expect": {
            "env_class": "gsm8k"
        },  # SkyRL would play a row that names another one by that
    }
    mine = values(data__train_data="a.parquet", environment__env_class="mine.py:score")
    assert run.training_data(mine) == {"data.train.0.path": ["a.parquet"]}
    assert run.environment(mine) == {"rewards.score.function": "mine.py:score"}
    assert run.environment(values()) == {"rewards.gsm8k.function": "whet.rewards.gsm8k:gsm8k"}
    assert "expected a list of files" in refusal(run.training_data, data__train_data=[])
    assert "runs what the policy writes" in refusal(run.environment, environment__env_class="rlm")


def test_evaluation() -> None:
    on = run.evaluation(
        values(data__val_data=["v/a.parquet", "v/b.parquet"], trainer__eval_before_train=False)
    )
    assert [on[f"data.eval.{n}.name"] for n in (0, 1)] == ["a", "b"]
    assert (on["eval.interval"], on["eval.at_start"], on["eval.at_end"]) == (5, False, True)
    assert (on["eval.samples"], on["eval.sampling.max_tokens"], on["data.exclude_eval"]) == (1, 1024, False)
    same = run.evaluation(values(data__val_data=["x/a.parquet", "y/a.parquet"]))
    assert [same[f"data.eval.{n}.name"] for n in (0, 1)] == ["x/a.parquet", "y/a.parquet"]
    assert run.evaluation(values(trainer__eval_interval=-1)) == {}
    assert run.evaluation(values(data__val_data=None)) == {}


@pytest.mark.parametrize(
    ("temperature", "environment", "samples"), [(0.0, "gsm8k", 1), (0.6, "gsm8k", 4), (0.0, "search", 4)]
)
def test_of_equal_replies_one_is_sampled(temperature: float, environment: str, samples: int) -> None:
    """Greedy ones, where no environment answers at random: several of them are refused in a file of whet."""
    given = values(
        data__val_data=["b.parquet"],
        environment__env_class=environment,
        generator__eval_n_samples_per_prompt=4,
        generator__eval_sampling_params__temperature=temperature,
    )
    assert run.evaluation(given).get("eval.samples", 4) == samples


# ---------------------------------------------------------------- checkpoints and tracking


@pytest.mark.parametrize(
    ("mode", "native"),
    [("latest", "auto"), (None, "fresh"), ("none", "fresh"), ("from_path", "c/0-main-000010")],
)
def test_resume_modes(mode: str | None, native: str) -> None:
    path = native if mode == "from_path" else None
    given = values(trainer__resume_mode=mode, trainer__resume_path=path)
    assert run.resume(given) == {"checkpoint.resume": native}


def test_resume_that_does_not_fit() -> None:
    assert "needs trainer.resume_path" in refusal(run.resume, trainer__resume_mode="from_path")
    assert "only with trainer.resume_mode=from_path" in refusal(run.resume, trainer__resume_path="c")
    assert "expected null or one of none, latest, from_path" in said(trainer__resume_mode="auto")


def test_checkpoints_exports_and_trackers() -> None:
    assert run.checkpoints(values()) == {"checkpoint.interval": 10, "checkpoint.keep": None}
    few = values(trainer__ckpt_interval=-1, trainer__max_ckpts_to_keep=2)
    assert run.checkpoints(few) == {"checkpoint.interval": 0, "checkpoint.keep": 2}
    assert "must not be 0" in refusal(run.checkpoints, trainer__max_ckpts_to_keep=0)
    assert run.export(values()) == {"checkpoint.export": False}
    exports = values(trainer__hf_save_interval=5, trainer__export_path="out/", trainer__run_name="a")
    assert run.export(exports) == {
        "checkpoint.export": True,
        "checkpoint.export_interval": 5,
        "dirs.export": "out/skyrl/a",
    }
    newer = exports | {VERSION: "0.2"}
    assert run.export(newer)["checkpoint.export_interval"] == [5, "1 epoch"], "and the end of each epoch"
    assert run.trackers(values()) == {"track.trackers": ["wandb", "jsonl"]}
    both = values(trainer__logger=["console", "mlflow", "tensorboard"])
    assert run.trackers(both) == {"track.trackers": ["console", "mlflow", "tensorboard", "jsonl"]}
    assert "coming" in refusal(run.trackers, trainer__logger="vemlp_wandb")
    assert run.dump(values(trainer__dump_data_batch=True, trainer__export_path="out")) == {
        "track.batches_interval": 1,
        "track.dump.batches": "out/dumped_data/global_step_{step}_training_input.parquet",
        "track.dump.eval": "out/dumped_eval/global_step_{step}_eval_results/{source}.jsonl",
    }
    assert run.dump(values(trainer__dump_eval_results=False)) == {}
