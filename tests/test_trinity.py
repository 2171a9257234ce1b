"""The Trinity-RFT dialect: every key of its document has a status, its arithmetic is Trinity's, its files run."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import whet
from whet.config.dialects import trinity_algorithm as learn
from whet.config.dialects import trinity_data as data
from whet.config.dialects import trinity_run as run
from whet.config.dialects import trinity_trainer as trainer
from whet.config.dialects.tables import dialect
from whet.config.dialects.translate import Translation, translate
from whet.config.dialects.trinity import TRINITY, TRINITY_VERL
from whet.config.dialects.trinity_values import ACTOR, CRITIC, MODEL, REF, TASKSET, VERL_TRAINER
from whet.config.load import load
from whet.config.parse import parse
from whet.config.plan import plans
from whet.config.schema import Model, Scratch, Tokenizer
from whet.data.tokenizer import load_tokenizer
from whet.models.load import build, export
from whet.types import ConfigError, Json

HERE = Path(__file__).parent
FILES = HERE / "dialects"
PLAIN_CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def values(**given: Json) -> dict[str, Json]:
    """The document's defaults, with values put over them; `__` stands for a dot."""
    out = {row.name: row.default for row in (*TRINITY, *TRINITY_VERL)}
    for name, value in given.items():
        name = name.replace("__", ".")
        assert name in out, name
        out[name] = value
    return out


def grpo(**given: Json) -> dict[str, Json]:
    return values(**{"algorithm__algorithm_type": "grpo", **given})


def translated(tree: dict[str, Json]) -> Translation:
    return translate(tree, dialect("trinity"), origins={})


# ---------------------------------------------------------------- the table


def names(file: str) -> list[str]:
    lines = (FILES / f"{file}.keys.txt").read_text().splitlines()
    return [line.partition("\t")[0] for line in lines]


def test_every_key_of_the_document_has_a_row_and_a_reason() -> None:
    for file, table, count in (("trinity", TRINITY, 216), ("trinity_verl", TRINITY_VERL, 96)):
        known = {row.name: row for row in table}
        assert len(known) == len(table), "no key twice"
        assert len(names(file)) == count
        assert not set(names(file)) - known.keys()
        assert all(row.reason for row in table if row.status != "mapped")


def test_few_keys_are_inert_and_none_is_refused() -> None:
    for file, table in (("trinity", TRINITY), ("trinity_verl", TRINITY_VERL)):
        known = {row.name: row.status for row in table}
        counts = Counter(known[name] for name in names(file))
        assert counts["refused"] == 0
        assert counts["inert"] < 0.05 * len(names(file)), counts


# ---------------------------------------------------------------- batch sizes and lengths


def test_a_step_explores_tasks_times_repeats() -> None:
    want = {"train.tasks_per_step": 32, "rollout.group_size": 8}
    for size in (None, 256):
        given = grpo(buffer__batch_size=32, algorithm__repeat_times=8, buffer__train_batch_size=size)
        assert data.batch(given) == want
    with pytest.raises(ConfigError, match=r"buffer.train_batch_size: 96 is not .* 32 \* 8 = 256"):
        data.batch(grpo(buffer__batch_size=32, algorithm__repeat_times=8, buffer__train_batch_size=96))


def test_a_preset_says_how_often_a_task_is_repeated() -> None:
    assert data.batch(grpo(buffer__batch_size=3))["rollout.group_size"] == 2
    assert data.batch(values(buffer__batch_size=3))["rollout.group_size"] == 1, "ppo, the default algorithm"


def test_a_file_of_replies_is_read_by_train_batch_size() -> None:
    given = values(algorithm__algorithm_type="sft", buffer__train_batch_size=64)
    assert data.batch(given) == {"train.tasks_per_step": 64}
    with pytest.raises(ConfigError, match=r"buffer\.train_batch_size: dpo needs it"):
        data.batch(values(algorithm__algorithm_type="dpo"))


@pytest.mark.parametrize(
    ("gpus", "engines", "good"), [(8, 4, True), (8, 5, False), (2, 2, True), (7, 1, True)]
)
def test_the_gpus_left_to_the_trainer_divide_its_batch(gpus: int, engines: int, good: bool) -> None:
    """256 experiences: 8 - 4 = 4 divide them, 8 - 5 = 3 do not; none left says nothing; 7 - 1 = 6 do not divide 256."""
    given = grpo(
        buffer__batch_size=32 if gpus != 7 else 36,
        algorithm__repeat_times=8,
        cluster__node_num=1,
        cluster__gpu_per_node=gpus,
        explorer__rollout_model__engine_num=engines,
    )
    if good:
        assert data.batch(given)["rollout.group_size"] == 8
    else:
        with pytest.raises(
            ConfigError, match="256 must be divisible by the number of GPUs of the trainer, 3"
        ):
            data.batch(given)


def test_the_smaller_number_of_steps_ends_a_run() -> None:
    assert data.length(values(buffer__total_epochs=20)) == {"train.epochs": 20}
    assert data.length(values(buffer__total_steps=100)) == {"train.steps": 100}
    assert data.length(values(buffer__total_steps=100, trainer__total_steps=30)) == {"train.steps": 30}


@pytest.mark.parametrize(
    ("whole", "prompt", "response", "want"),
    [
        (20480, 4096, 16384, (4096, 16384)),
        (None, 10, 20, (10, 20)),
        (100, 30, None, (30, 70)),
        (100, None, 30, (70, 30)),
        (101, None, None, (50, 51)),
        (100, 10, 20, (10, 20)),
    ],
)
def test_prompt_and_reply_share_the_models_length(
    whole: int | None, prompt: int | None, response: int | None, want: tuple[int, int]
) -> None:
    given = values(
        model__max_model_len=whole, model__max_prompt_tokens=prompt, model__max_response_tokens=response
    )
    assert data.limits(given) == want


@pytest.mark.parametrize(
    ("whole", "prompt", "response"), [(None, 5, None), (None, None, None), (9, 5, 5), (5, 5, None)]
)
def test_lengths_that_do_not_fit_are_refused(
    whole: int | None, prompt: int | None, response: int | None
) -> None:
    given = values(
        model__max_model_len=whole, model__max_prompt_tokens=prompt, model__max_response_tokens=response
    )
    with pytest.raises(ConfigError, match=r"model\.max_model_len"):
        data.limits(given)


def test_a_prompt_that_trinity_would_cut_is_left_out() -> None:
    sizes: dict[str, Json] = {"model__max_prompt_tokens": 10, "model__max_response_tokens": 20}
    assert data.token_limits(grpo(**sizes))["data.overlong"] == "filter"
    assert data.token_limits(grpo(**sizes, model__enable_prompt_truncation=False))["data.overlong"] == "error"
    own = data.token_limits(grpo(**sizes, **{f"{TASKSET}.rollout_args.max_tokens": 7}))
    assert own["rollout.sampling.max_tokens"] == 7


# ---------------------------------------------------------------- algorithms


def test_grpo_is_trinitys() -> None:
    given = grpo()
    assert learn.advantage(given) == {
        "algorithm.name": "grpo",
        "algorithm.advantage": "grpo",
        "algorithm.std_epsilon": 1e-6,
    }
    assert learn.policy_loss(given) == {
        "algorithm.aggregation": "token-mean",
        "algorithm.loss": "ppo",
        "algorithm.clip_low": 0.2,
        "algorithm.clip_high": 0.2,
        "algorithm.dual_clip": 3.0,
    }
    assert learn.kl(given) == {
        "algorithm.kl.place": "loss",
        "algorithm.kl.coef": 0.001,
        "algorithm.kl.estimator": "k2",
    }
    assert learn.entropy(given) == {}


def test_arguments_of_functions() -> None:
    given = grpo(
        **{
            "algorithm.policy_loss_fn_args.*": {"clip_range_low": 0.1, "clip_range_high": 0.3},
            "algorithm.entropy_loss_fn_args.*": {"entropy_coef": 0.01},
            "algorithm.advantage_fn_args.*": {"epsilon": 1e-4},
            "algorithm.kl_loss_fn": "low_var_kl",
            "algorithm.kl_loss_fn_args.*": {"kl_coef": 0.04},
        }
    )
    loss = learn.policy_loss(given)
    assert (loss["algorithm.clip_low"], loss["algorithm.clip_high"]) == (0.1, 0.3)
    assert learn.entropy(given) == {"algorithm.entropy_coef": 0.01}
    assert learn.advantage(given)["algorithm.std_epsilon"] == 1e-4
    assert learn.kl(given)["algorithm.kl.coef"] == 0.04
    assert learn.kl(given)["algorithm.kl.estimator"] == "k3"
    with pytest.raises(
        ConfigError, match=r"advantage_fn_args.epsilom: no such argument; did you mean 'epsilon'"
    ):
        learn.advantage(grpo(**{"algorithm.advantage_fn_args.*": {"epsilom": 1}}))


def test_advantages_by_another_name() -> None:
    assert learn.advantage(grpo(algorithm__advantage_fn="opmd"))["algorithm.normalize_std"] is False
    plus = learn.advantage(values(algorithm__algorithm_type="reinforceplusplus"))
    assert plus == {
        "algorithm.name": "reinforce",
        "algorithm.advantage": "reinforce",
        "algorithm.whiten": True,
        "algorithm.gamma": 1.0,
    }
    assert learn.advantage(values())["algorithm.lam"] == 1.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"algorithm__algorithm_type": "opmd"}, "opmd is coming"),
        ({"algorithm__algorithm_type": "grop"}, "did you mean 'grpo'"),
        ({"algorithm__advantage_fn": "ppo", "algorithm__algorithm_type": "grpo"}, "needs a critic"),
        ({"algorithm__advantage_fn": "asymre"}, "asymre is coming"),
        (
            {"algorithm.advantage_fn_args.*": {"std_threshold": 0.1}, "algorithm__algorithm_type": "grpo"},
            "std_threshold",
        ),
    ],
)
def test_what_is_not_built_is_named(given: dict[str, Json], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        learn.advantage(values(**given))


def test_kl_in_the_rewards_where_it_has_an_effect() -> None:
    penalty: dict[str, Json] = {
        "algorithm__kl_penalty_fn": "k1",
        "algorithm.kl_penalty_fn_args.*": {
            "kl_coef": 0.1,
            "adaptive": True,
            "target_kl": 0.05,
            "horizon": 100,
        },
    }
    assert learn.kl(values(**penalty, algorithm__kl_loss_fn="none")) == {
        "algorithm.kl.place": "reward",
        "algorithm.kl.coef": 0.1,
        "algorithm.kl.estimator": "k1",
        "algorithm.kl.target": 0.05,
        "algorithm.kl.horizon": 100,
    }
    with pytest.raises(ConfigError, match="both at once are coming"):
        learn.kl(values(**penalty))
    with pytest.raises(ConfigError, match="has no effect with algorithm_type grpo"):
        learn.kl(grpo(**penalty, algorithm__kl_loss_fn="none"))


def test_dpo_has_one_kl() -> None:
    dpo = {"algorithm__algorithm_type": "dpo"}
    assert learn.kl(values(**dpo)) == {}
    assert learn.policy_loss(values(**dpo)) == {"algorithm.beta": 0.1, "algorithm.label_smoothing": 0.0}
    with pytest.raises(ConfigError, match="holds its own KL"):
        learn.kl(values(**dpo, algorithm__kl_loss_fn="k2"))


# ---------------------------------------------------------------- optimizers, memory, checkpoints


def test_the_policys_optimizer_comes_from_either_section() -> None:
    of_algorithm = learn.optimizer(values(algorithm__optimizer__lr=5e-6, trainer__grad_clip=0.5))
    of_verl = learn.optimizer(values(**{f"{ACTOR}.optim.lr": 5e-6, f"{ACTOR}.grad_clip": 0.5}))
    assert of_algorithm == of_verl
    assert of_algorithm["train.optimizer.lr"] == 5e-6
    assert of_algorithm["train.optimizer.weight_decay"] == 0.01
    assert of_algorithm["train.optimizer.grad_clip"] == 0.5
    with pytest.raises(ConfigError, match="these are one setting"):
        learn.optimizer(values(algorithm__optimizer__lr=5e-6, **{f"{ACTOR}.optim.lr": 4e-6}))


def test_warm_up_in_optimizer_steps() -> None:
    ratio = learn.optimizer(values(**{f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1}))
    assert ratio["train.optimizer.schedule.warmup_fraction"] == 0.1
    steps = learn.optimizer(values(algorithm__optimizer__lr_warmup_steps=5, **{f"{ACTOR}.ppo_epochs": 3}))
    assert steps["train.optimizer.schedule.warmup_steps"] == 15
    cosine = learn.optimizer(
        values(algorithm__optimizer__warmup_style="cosine", **{f"{ACTOR}.optim.min_lr_ratio": 0.2})
    )
    assert cosine["train.optimizer.schedule.kind"] == "cosine"
    assert cosine["train.optimizer.schedule.min_factor"] == 0.2


def test_the_critic_starts_as_the_policy_unless_it_has_a_folder() -> None:
    same = trainer.critic(values(model__model_path="m", model__critic_model_path="m", trainer__grad_clip=0.3))
    assert "critic.path" not in same
    assert same["critic.optimizer"]["grad_clip"] == 0.3
    assert same["critic.optimizer"]["lr"] == 1e-5
    assert same["critic.clip_value"] == 0.5
    assert trainer.critic(values(model__model_path="m", model__critic_model_path="v"))["critic.path"] == "v"
    with pytest.raises(ConfigError, match="would hold every value"):
        trainer.critic(values(**{f"{CRITIC}.cliprange_value": 0.0}))


def test_one_budget_for_all_models() -> None:
    """The trainer's holds twice max_model_len = 2 * 30 at least; the smallest counts, the critic's in ppo alone."""
    sizes: dict[str, Json] = {"model__max_prompt_tokens": 10, "model__max_response_tokens": 20}
    assert trainer.micro(grpo(**sizes)) == {"train.micro_tokens": 60}
    assert trainer.micro(grpo(**sizes, trainer__max_token_len_per_gpu=500)) == {"train.micro_tokens": 500}
    assert trainer.micro(grpo(**sizes, trainer__max_token_len_per_gpu=40)) == {"train.micro_tokens": 60}
    small = {f"{REF}.log_prob_max_token_len_per_gpu": 50}
    assert trainer.micro(grpo(**sizes, **small)) == {"train.micro_tokens": 50}
    small = {f"{CRITIC}.ppo_max_token_len_per_gpu": 45}
    assert trainer.micro(grpo(**sizes, **small)) == {"train.micro_tokens": 60}
    assert trainer.micro(values(**sizes, **small)) == {"train.micro_tokens": 45}
    by_rollouts: dict[str, Json] = {
        "trainer__use_dynamic_bsz": False,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3,
    }
    assert trainer.micro(grpo(**by_rollouts)) == {"train.micro_rollouts": 3}
    assert trainer.micro(values(**by_rollouts, algorithm__algorithm_type="dpo")) == {
        "train.micro_rollouts": 6
    }


def test_checkpoints() -> None:
    assert trainer.resume(values()) == {"checkpoint.resume": "auto"}
    assert trainer.resume(values(continue_from_checkpoint=False)) == {"checkpoint.resume": "never"}
    assert trainer.resume(values(**{f"{VERL_TRAINER}.resume_mode": "disable"})) == {
        "checkpoint.resume": "never"
    }
    at = {f"{VERL_TRAINER}.resume_mode": "resume_path", f"{VERL_TRAINER}.resume_from_path": "runs/x/3"}
    assert trainer.resume(values(**at)) == {"checkpoint.resume": "runs/x/3"}
    assert trainer.keep(values()) == {"checkpoint.keep": 5}
    assert trainer.keep(values(**{f"{VERL_TRAINER}.remove_previous_ckpt_in_save": True})) == {
        "checkpoint.keep": 1
    }
    with pytest.raises(ConfigError, match="a checkpoint holds both"):
        trainer.keep(values(**{f"{VERL_TRAINER}.max_actor_ckpt_to_keep": 2}))
    assert trainer.export(values(trainer__save_hf_checkpoint="never")) == {"checkpoint.export": False}


def test_run_and_model() -> None:
    assert run.run(values(checkpoint_root_dir="c", project="p", name="n")) == {
        "name": "n",
        "run_dir": "c/p/n",
    }
    over = run.model(
        values(model__model_path="m", model__rope_theta=1e6, **{f"{MODEL}.override_config": {"a": 1}})
    )
    assert over == {"model.path": "m", "model.overrides": {"a": 1, "rope_theta": 1e6}}
    both = values(model__custom_chat_template="{{x}}", model__chat_template_path="t.jinja")
    assert run.chat_template(both) == {"tokenizer.chat_template": "t.jinja"}
    none = values(model__custom_chat_template="None", model__chat_template_path="None")
    assert run.chat_template(none) == {}
    assert run.at_once(grpo(explorer__rollout_model__engine_num=2, algorithm__repeat_times=8)) == {
        "rollout.max_batch": 128
    }


@pytest.mark.parametrize(
    "given",
    [
        {"sync_interval": 10},
        {"sync_offset": 1},
        {"sync_style": "dynamic_by_explorer"},
        {"sync_style": "fixd"},
    ],
)
def test_an_explorer_that_runs_ahead_is_coming(given: dict[str, Json]) -> None:
    assert run.synchronizer(grpo()) == {}
    with pytest.raises(ConfigError, match=r"synchronizer\.sync_"):
        run.synchronizer(grpo(**{f"synchronizer__{key}": value for key, value in given.items()}))


@pytest.mark.parametrize(
    ("mode", "algorithm", "good"),
    [
        ("both", "grpo", True),
        ("train", "sft", True),
        ("both", "dpo", False),
        ("train", "grpo", False),
        ("explore", "grpo", False),
        ("bench", "grpo", False),
    ],
)
def test_modes(mode: str, algorithm: str, good: bool) -> None:
    given = values(mode=mode, algorithm__algorithm_type=algorithm)
    if good:
        assert data.mode(given) == {}
    else:
        with pytest.raises(ConfigError, match=r"^mode: "):
            data.mode(given)


# ---------------------------------------------------------------- data and rewards


def test_a_split_is_found_in_a_folder(tmp_path: Path) -> None:
    for name in ("gsm8k_train.jsonl", "test-00000.parquet", "contest.json", "notes.txt"):
        (tmp_path / name).touch()
    assert data.split_files(str(tmp_path), "train") == [str(tmp_path / "gsm8k_train.jsonl")]
    assert data.split_files(str(tmp_path), "test") == [str(tmp_path / "test-00000.parquet")]
    with pytest.raises(ConfigError, match="has no file of 'dev'"):
        data.split_files(str(tmp_path), "dev")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/words.csv").touch()
    assert data.split_files(str(tmp_path), "train", "plain") == [str(tmp_path / "plain/words.csv")]
    assert data.split_files("org/name", "train") == "org/name"
    with pytest.raises(ConfigError, match="whose only split is train"):
        data.split_files(str(tmp_path / "plain/words.csv"), "test")


def test_rewards_by_name_or_file() -> None:
    given = grpo(buffer__explorer_input__default_reward_fn_type="math_boxed_reward")
    assert data.rewards(given) == {
        "rewards.math_boxed_reward": {"function": "math", "arguments": {"boxed": True}}
    }
    own = {f"{TASKSET}.default_reward_fn_type": "my/games.py:countdown"}
    assert data.rewards(grpo(**own)) == {"rewards.countdown": {"function": "my/games.py:countdown"}}
    workflow = grpo(buffer__explorer_input__default_workflow_type="math_boxed_workflow")
    assert data.rewards(workflow) == data.rewards(given)
    with pytest.raises(ConfigError, match="countdown_reward is coming"):
        data.rewards(grpo(buffer__explorer_input__default_reward_fn_type="countdown_reward"))
    with pytest.raises(ConfigError, match="must be given"):
        data.rewards(grpo())


def test_evaluation_tasksets() -> None:
    sets = [
        {
            "path": "a.jsonl",
            "repeat_times": 4,
            "default_reward_fn_type": "accuracy_reward",
            "rollout_args": {"temperature": 0.1},
        },
        {
            "path": "b.jsonl",
            "repeat_times": 4,
            "default_reward_fn_type": "accuracy_reward",
            "rollout_args": {"temperature": 0.1},
        },
    ]
    given = grpo(
        buffer__explorer_input__default_reward_fn_type="my.py:f",
        buffer__explorer_input__eval_tasksets=sets,
        explorer__eval_interval=7,
    )
    told = data.evaluation(given)
    assert told["eval.every"] == 7
    assert told["eval.samples"] == 4
    assert told["eval.sampling.temperature"] == 0.1
    assert told["eval.reward"] == "accuracy_reward"
    assert [told[f"data.eval.{n}.name"] for n in (0, 1)] == ["eval_taskset_0", "eval_taskset_1"]
    assert told["data.eval.0.answer"] == "response"
    assert data.rewards(given)["rewards.accuracy_reward"] == {"function": "math", "weight": 0.0}
    sets[1]["repeat_times"] = 2
    with pytest.raises(ConfigError, match="repeat_times: 4, 2"):
        data.evaluation(given)


# ---------------------------------------------------------------- stages


def small(**more: Json) -> dict[str, Json]:
    """A file of the sizes below, as a tree."""
    return {
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "optimizer": {"lr": 1e-2}},
        "model": {"model_path": "m", "max_prompt_tokens": 8, "max_response_tokens": 5},
        "buffer": {
            "batch_size": 8,
            "total_steps": 30,
            "explorer_input": {
                "taskset": {"path": "words.jsonl", "format": {"response_key": "answer"}},
                "default_reward_fn_type": "letters.py:share",
            },
        },
        **more,
    }


def test_a_stage_inherits_key_by_key() -> None:
    form = {"prompt_type": "plaintext"}
    buffer = {
        "train_batch_size": 16,
        "trainer_input": {"experience_buffer": {"path": "sft.jsonl", "format": form}},
    }
    sft = {"stage_name": "sft", "mode": "train", "algorithm": {"algorithm_type": "sft"}, "buffer": buffer}
    done = translated(small(stages=[sft, {"stage_name": "rl", "algorithm": {"repeat_times": 2}}]))
    assert not done.problems
    first, second = done.tree["stages"]
    assert first["name"] == "sft"
    assert first["algorithm"]["name"] == "sft"
    assert first["train"]["tasks_per_step"] == 16
    assert first["train"]["steps"] == 30
    assert first["train"]["optimizer"]["lr"] == 1e-2, (
        "the global algorithm.optimizer, though the stage has an algorithm"
    )
    assert first["data"]["train"][0]["path"] == "sft.jsonl"
    assert second["algorithm"]["name"] == "grpo"
    assert second["rollout"]["group_size"] == 2
    assert second["train"]["tasks_per_step"] == 8
    assert "algorithm" not in done.tree
    assert done.tree["model"] == {"path": "m"}


def test_a_stage_may_not_change_what_is_one_for_all() -> None:
    stages = [{"stage_name": "a"}, {"stage_name": "b", "trainer": {"save_interval": 5}}]
    (problem,) = translated(small(stages=stages)).problems
    assert "stages[1]: it asks for checkpoint.every=5" in problem[1]
    (problem,) = translated(small(stages=[{"stage_name": "a", "buffer": {"batchsize": 5}}])).problems
    assert "did you mean stages[].buffer.batch_size" in problem[1]
    (problem,) = translated(small(stages=[{"mode": "train"}])).problems
    assert "stages[0]: mode: train with grpo" in problem[1]
    assert "stages[0]: stage_name: must be given" in problem[1]


def test_a_stage_with_another_algorithm_does_not_inherit_its_functions() -> None:
    tree = small()
    tree["algorithm"] |= {"advantage_fn": "opmd", "kl_loss_fn_args": {"kl_coef": 0.5}}
    ppo = {"stage_name": "ppo", "algorithm": {"algorithm_type": "ppo"}}
    done = translated({**tree, "stages": [{"stage_name": "grpo"}, ppo]})
    assert not done.problems
    first, second = done.tree["stages"]
    assert first["algorithm"]["normalize_std"] is False
    assert first["algorithm"]["kl"]["coef"] == 0.5
    assert second["algorithm"]["kl"]["coef"] == 0.001
    assert second["critic"]["optimizer"]["lr"] == 1e-5
    assert second["train"]["optimizer"]["lr"] == 1e-2


# ---------------------------------------------------------------- whole files


def test_the_documents_blocks_load_and_say_what_is_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL_PATH", "TRINITY_TASKSET_PATH", "TRINITY_SFT_DATASET_PATH", "TRINITY_DATASET_PATH"):
        monkeypatch.setenv(name, f"some/{name.lower()}")
    whole = parse((FILES / "trinity_document.yaml").read_text()).tree
    assert isinstance(whole, dict)
    stages = whole.pop("stages")
    one = [text for _, text in translated(whole).problems]
    assert not [text for text in one if "unknown key" in text]
    assert not [text for text in one if "your_api_key" in text], "secrets are not shown"
    assert {
        text.partition(":")[0] for text in one if not text.startswith(SERVICES)
    } == OF_THE_RUN | OF_TRAINING
    *shared, of_stages = [text for _, text in translated({**whole, "stages": stages}).problems]
    assert {text.partition(":")[0] for text in shared if not text.startswith(SERVICES)} == OF_THE_RUN
    first, second = (re.findall(rf"stages\[{n}\]: ([\w.]+): ", of_stages) for n in (0, 1))
    assert set(first) == {"buffer.trainer_input.experience_buffer.format.prompt_type"}
    assert set(second) == OF_TRAINING


SERVICES = ("service.", "data_processor.", "buffer.trainer_input.auxiliary_buffers.")
OF_THE_RUN = {
    "monitor.monitor_type",
    "monitor.monitor_args.base_url",
    "monitor.monitor_args.api_key",
    "explorer.auxiliary_models",
    "explorer.auxiliary_models[0].model_path",
}
OF_TRAINING = {
    "algorithm.advantage_fn",
    "buffer.explorer_input.default_reward_fn_type",
    "buffer.explorer_input.taskset.default_reward_fn_type",
    "buffer.train_batch_size",
    "buffer.trainer_input.experience_buffer.path",
    "synchronizer.sync_interval",
}
"""The document pairs grpo with the advantage of ppo, which needs a critic, and its 256 experiences do not divide
among the 8 - 1 GPUs of its trainer; the rest is coming."""


def test_the_documents_verl_section_changes_nothing() -> None:
    tree = parse((FILES / "trinity_verl_section.yaml").read_text()).tree
    plain = translated(small())
    assert not plain.problems
    whole = translated(small(trainer={"trainer_config": tree}))
    assert not whole.problems
    assert strip(whole.tree) == strip(plain.tree)


def strip(tree: dict[str, Any]) -> dict[str, Any]:
    """A translated tree as the schema fills it."""
    from whet.config.schema import Config

    return Config.model_validate_json(json.dumps(tree)).model_dump()


# ---------------------------------------------------------------- running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Hugging Face model with a tokenizer of letters and a plain chat template."""
    path = tmp_path_factory.mktemp("trinity") / "model"
    tokenizer = load_tokenizer(Tokenizer(build="chars"), model_path=None, texts=["abcde>"])
    tokenizer.chat_template = PLAIN_CHAT
    sizes = Scratch(hidden_size=32, layers=1, heads=2, ffn_size=64, max_positions=64)
    model = build(
        Model(scratch=sizes),
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=0,
        device="cpu",
        dtype=torch.float32,
    )
    export(model, tokenizer, path)
    return path


def metrics(run_dir: Path) -> list[dict[str, Json]]:
    return whet.Result(run_dir, finished=True).metrics


def test_a_trinity_file_learns_as_the_native_file_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_PATH", str(folder))
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    monkeypatch.chdir(HERE.parent)
    whet.train(FILES / "trinity_letters.yaml", machine={"threads": 1}, track={"trackers": ["jsonl"]})
    whet.train(
        FILES / "trinity_letters.native.yaml",
        run_dir=str(tmp_path / "native"),
        model={"path": str(folder)},
        machine={"threads": 1},
    )
    foreign, native = (metrics(tmp_path / at) for at in ("Trinity-RFT/letters", "native"))
    assert foreign == native
    rewards = [line["reward/mean"] for line in foreign if "reward/mean" in line]
    assert sum(rewards[:3]) / 3 < 0.3, "a new model must not know it yet"
    assert sum(rewards[-3:]) / 3 > 0.7


def test_stages_run_one_after_the_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_PATH", str(folder))
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    monkeypatch.chdir(HERE.parent)
    whet.train(FILES / "trinity_stages.yaml", machine={"threads": 1}, track={"trackers": ["jsonl"]})
    lines = metrics(tmp_path / "Trinity-RFT/two_stages")
    by_stage = {name: [line for line in lines if line["stage"] == name] for name in ("sft_warmup", "rft")}
    assert [len(found) for found in by_stage.values()] == [6, 4]
    assert by_stage["sft_warmup"][-1]["train/loss"] < by_stage["sft_warmup"][0]["train/loss"]


def test_the_example_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE.parent)
    (plan,) = plans(load("examples/from_trinity.yaml"))
    assert (plan.tasks_per_step, plan.group_size) == (16, 8)
