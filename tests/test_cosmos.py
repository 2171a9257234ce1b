"""Cosmos-RL files: every key has a row, the functions by hand, and a run that equals its native twin bit for bit."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from whet.config.schedules import factor
from whet.config.schema import ScheduleConfig, SourceConfig
from whet.data.rows import read_rows
from whet.dialects import versions
from whet.dialects.cosmos.data import REWARDS, data
from whet.dialects.cosmos.run import place, resume, seed, trackers
from whet.dialects.cosmos.steps import schedule, steps_together
from whet.dialects.cosmos.values import texts, weights
from whet.dialects.kinds import understood
from whet.dialects.row import NotSupportedYet
from whet.dialects.rules import function
from whet.dialects.tables import dialect, parts, table
from whet.dialects.translate import Translation, translate
from whet.dialects.values import nested
from whet.rewards.answer_line import direct_math
from whet.rewards.builtin import format
from whet.rewards.tagged import single_choice
from whet.types import ConfigError, Task

dtype = function("cosmos", "model.dtype")
offload = function("cosmos", "model.offload")
chat = function("cosmos", "run.chat")
trained_temperature = function("cosmos", "run.trained_temperature")
rewards = function("cosmos", "data.rewards")
validation = function("cosmos", "data.validation")
checkpoint = function("cosmos", "run.checkpoint")
sampling = function("cosmos", "run.sampling")
sync = function("cosmos", "run.sync")
uploads = function("cosmos", "run.uploads")
lengths = function("cosmos", "run.lengths")
batch = function("cosmos", "steps.batch")
length = function("cosmos", "steps.run_length")
optimizer = function("cosmos", "steps.optimizer")

ROOT = Path(__file__).parents[1]
FILES = ROOT / "tests/dialects"
WORDS, HELD_OUT = ROOT / "tests/data/words.jsonl", ROOT / "tests/data/held_out.jsonl"
POLICY, MESH, SCHEDULE = "train.train_policy.", "policy.parallelism.", "train.optimizer.schedule."
SHORT = {"p": POLICY, "m": MESH, "t": "train.", "r": "rollout.", "v": "validation.", "c": "train.ckpt."}


def values(kind: str = "grpo", **given: Any) -> dict[str, Any]:
    """A file's values, a step of one whole group; `p_mini_batch=4` is train.train_policy.mini_batch=4, and so on (see
    SHORT)."""
    out = {row.key: row.default for row in dialect(f"cosmos-{kind}").rows}
    out |= {"train.train_batch_per_replica": 16} if kind == "grpo" else {}
    out |= {POLICY + "dataset.name": "a.jsonl", POLICY + "prompt_column_name": "q"} if kind == "grpo" else {}
    for name, value in given.items():
        short, _, rest = name.partition("_")
        key = SHORT[short] + rest.replace("__", ".")
        assert key in out, key
        out[key] = value
    return out


def made(kind: str, given: dict[str, Any], version: str = "") -> Translation:
    """The translation of a file of these keys, read as a version."""
    tree = nested({tuple(key.split(".")): value for key, value in given.items()})
    return translate(tree, dialect(f"cosmos-{kind}", version), origins={})


def refused(kind: str, key: str, value: Any, version: str = "", **around: Any) -> str:
    """What is said against a value of a key, by that key."""
    found = made(kind, {**around, key: value}, version)
    return "\n".join(text for _, text in (*found.problems, *found.unbuilt) if key in text)


# ---------------------------------------------------------------- the tables


def document(kind: str) -> dict[str, str]:
    lines = (FILES / f"cosmos-{kind}.keys.txt").read_text().splitlines()
    return dict(line.split("\t") for line in lines)


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_every_key_of_the_document_has_one_row_with_its_default(kind: str) -> None:
    rows = {row.key: row for row in table(f"cosmos-{kind}")}
    assert len(rows) == len(table(f"cosmos-{kind}"))
    sections = {name for name in document(kind) if parts(name) in dialect(f"cosmos-{kind}").below}
    told = document(kind).keys() - (sections - rows.keys())
    assert told <= rows.keys()
    off = {name for name in told if not _reads_as(document(kind)[name], rows[name].default)}
    adapters = {row.key for row in rows.values() if row.key.startswith("policy.lora.")}
    assert off <= adapters, "defaults of policy.lora count only where it stands"


def _reads_as(text: str, default: Any) -> bool:
    if text in ("see children", "(required)") or text.startswith("GrpoConfig"):
        return default in (None, "sft")
    if text in ("None", "null", "true", "false"):
        return default is {"None": None, "null": None, "true": True, "false": False}[text]
    if isinstance(default, str):
        return text == (default or '""')
    return default == json.loads(text.partition(" -> ")[0])


def test_few_keys_are_inert_or_refused_and_each_says_why() -> None:
    rows = [row for kind in ("grpo", "sft") for row in table(f"cosmos-{kind}") if row.key in document(kind)]
    count = Counter(row.status for row in rows)
    assert (count.total(), count["unknown"]) == (196, 0)
    assert count["inert"] + count["refused"] <= 0.05 * 196
    assert all(row.what or row.status == "mapped" for row in rows)


# ---------------------------------------------------------------- batches


def test_a_step_is_the_responses_of_all_replicas_in_whole_groups() -> None:
    given = values(t_train_batch_per_replica=64, m_n_init_replicas=2, m_dp_shard_size=4, p_mini_batch=4)
    ranks = {"train.parallel.dp_replicate": 2, "train.parallel.dp_shard": 4}
    sizes = {"train.tasks_per_step": 8, "train.minibatches": 1, "train.micro_batch_rollouts": 4}
    assert batch(given) == sizes | ranks
    chunks = values(
        t_train_batch_per_replica=64, m_dp_shard_size=4, p_batch_size_per_optimize=8, p_mini_batch=4
    )
    assert batch(chunks)["train.minibatches"] == 2, "16 responses of a rank, 8 in each optimizer step"
    assert batch(values(t_train_batch_per_replica=32, m_dp_shard_size=-1))["train.tasks_per_step"] == 2
    budget = values(t_train_batch_per_replica=32, p_max_token_len_per_mini_batch=1000, m_cp_size=2)
    assert batch(budget)["train.micro_batch_tokens"] == 2000
    assert "train.micro_batch_rollouts" not in batch(budget)
    whole = values(t_train_batch_per_replica=32, p_mini_batch=0)
    assert batch(whole)["train.micro_batch_rollouts"] == 32
    assert batch(values("sft", m_dp_shard_size=4, m_dp_replicate_size=2)) == {
        "train.tasks_per_step": 64, "train.micro_batch_rollouts": 2, "train.drop_last": False, **ranks,
    }  # fmt: skip


def test_steps_over_parts_of_groups_are_optimizer_steps_of_whole_ones() -> None:
    """16 rollouts a prompt: 8 responses are half a group, two such steps one here; 24 are 3 groups in two steps."""
    parts = {8: (2, 1, 2), 2: (8, 1, 8), 24: (2, 3, 2), 12: (4, 3, 4), 32: (1, 2, 1)}
    for responses, (together, tasks, minibatches) in parts.items():
        given = values(t_train_batch_per_replica=responses)
        sizes = batch(given)
        assert steps_together(given) == together
        assert (sizes["train.tasks_per_step"], sizes["train.minibatches"]) == (tasks, minibatches)
        assert tasks * 16 == responses * together
    half = values(
        t_train_batch_per_replica=8,
        t_max_num_steps=100,
        c_save_freq=25,
        c_enable_checkpoint=True,
        t_optm_warmup_steps=20,
    )
    assert length(half)["train.steps"] == 50
    assert schedule(half)[SCHEDULE + "unit"] == "optimizer_step"
    assert schedule(half)[SCHEDULE + "warmup_steps"] == 20
    assert checkpoint(half)["checkpoint.interval"] == 13
    assert sync(half) == {
        "rollout.sync_interval": 1,
        "rollout.max_staleness": 2,
        "rollout.schedule": "async",
    }
    replicas = values(t_train_batch_per_replica=8, m_n_init_replicas=2)
    assert batch(replicas)["train.minibatches"] == 1


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"p_on_policy": True}, "on_policy"),
        ({"p_mu_iterations": 2}, "mu_iterations"),
        ({"p_batch_size_per_optimize": 4}, "batch_size_per_optimize"),
        ({"p_reference_reset_interval": 5}, "reference_reset_interval"),
        ({"t_max_num_steps": 7}, "max_num_steps"),
    ],
)
def test_what_would_end_inside_a_group_is_coming(given: dict[str, Any], key: str) -> None:
    with pytest.raises(NotSupportedYet, match=rf"2 steps over parts of groups.*{key}"):
        batch(values(t_train_batch_per_replica=8, **given))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (values(t_train_batch_per_replica=48, m_dp_shard_size=5), r"dp_shard_size\*mini_batch=5\*2"),
        (values(t_train_batch_per_replica=32, m_dp_shard_size=0), "dp_shard_size=0"),
        (values(t_train_batch_per_replica=32, m_dp_replicate_size=2), "dp_replicate_size must be 1"),
        (values(t_train_batch_per_replica=32, p_batch_size_per_optimize=12), "batch_size_per_optimize=12"),
        (values(t_train_batch_per_replica=8) | {"mode": "colocated"}, "Cosmos refuses it"),
        (values(p_mini_batch=4, t_train_batch_per_replica=18), "divisible by"),
        (values("sft", p_mini_batch=3), "divisible by train.train_policy.mini_batch=3"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_in_cosmos_words(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        batch(given)


def test_unequal_optimizer_steps_are_not_built_yet() -> None:
    with pytest.raises(NotSupportedYet, match="unequal"):
        batch(values(t_train_batch_per_replica=32, p_batch_size_per_optimize=12))


# ---------------------------------------------------------------- learning rate


def multiplier(step: int, total: int, given: dict[str, Any]) -> float:
    """Cosmos's own: warm-up of w steps, a plateau, a decay of d steps (its LR schedule, step from 0)."""
    warm, share = given["train.optm_warmup_steps"], given["train.optm_decay_ratio"]
    w = min(int(warm * total) if isinstance(warm, float) and warm <= 1 else int(warm), total)
    d = total - w if share is None else min(round(share * total), total - w)
    stable, start = total + 1 - w - d, given["train.optm_warmup_start_factor"]
    if step < w and given[versions.VERSION] == "0.3.6":
        return (step + 1) / w
    if step < w:
        return start + (1 - start) * step / (w - 1) if w > 1 else 1.0
    if step < w + stable or given["train.optm_decay_type"] in (None, "none"):
        return 1.0
    p, floor = (step + 1 - w - stable) / d, given["train.optm_min_lr_factor"]
    shape = {"linear": 1 - p, "sqrt": 1 - math.sqrt(p), "cosine": (1 + math.cos(math.pi * p)) / 2}
    return floor + (1 - floor) * shape[given["train.optm_decay_type"]]


@pytest.mark.parametrize("warm", [0, 1, 4, 30, 0.25, 1.0, 2.5])
@pytest.mark.parametrize("share", [None, 0.0, 0.02, 0.3, 0.45, 1.0])
@pytest.mark.parametrize("kind", [None, "none", "linear", "sqrt", "cosine"])
@pytest.mark.parametrize(("version", "start"), [("0.3.6", 0.0), ("0.4.2", 0.0), ("0.4.2", 0.3)])
def test_the_learning_rate_is_cosmos_own_at_every_step(
    warm: float, share: float | None, kind: str | None, version: str, start: float
) -> None:
    total = 20
    given = values(
        t_max_num_steps=total, t_optm_warmup_steps=warm, t_optm_decay_ratio=share, t_optm_decay_type=kind,
        t_optm_min_lr_factor=0.1, t_optm_warmup_start_factor=start,
    ) | {versions.VERSION: version}  # fmt: skip
    native = ScheduleConfig(**{key.removeprefix(SCHEDULE): value for key, value in schedule(given).items()})
    assert native.unit == "train_step", "it moves once a training step, whatever its optimizer steps are"
    for step in range(total):
        assert factor(native, step, total) == pytest.approx(multiplier(step, total, given), abs=1e-12), step


def test_a_run_of_unknown_length_keeps_its_fractions() -> None:
    flat = {SCHEDULE + "type": "constant", SCHEDULE + "unit": "train_step", SCHEDULE + "warmup_ends": "peak"}
    assert schedule(values(t_optm_warmup_steps=0.1)) == flat | {SCHEDULE + "warmup_steps": 0.1}
    assert schedule(values(t_optm_warmup_steps=7, t_max_num_steps=5)) == flat | {SCHEDULE + "warmup_steps": 5}
    assert "give a share below 1" in str(refused("grpo", "train.optm_warmup_steps", 1.0))
    decay = values(t_optm_decay_type="linear", t_optm_decay_ratio=0.4)
    assert schedule(decay)[SCHEDULE + "decay_steps"] == 0.4
    assert refused("grpo", "train.optm_decay_type", "exponential")


def test_length_and_optimizer() -> None:
    whole = {"train.epochs": 3, "train.drop_last": "end"}
    assert length(values(t_epoch=3)) == whole
    assert length(values(t_epoch=3, t_max_num_steps=7)) == whole | {"train.steps": 7}
    at = "train.optimizer."
    assert optimizer(values(t_optm_lr=[2e-6], t_optm_grad_norm_clip=0.0)) == {
        at + "name": "adamw", at + "state_dtype": "float32", at + "implementation": "fused", at + "lr": 2e-6,
        at + "eps": 1e-6, at + "decay_all": True, at + "max_grad_norm": None,
    }  # fmt: skip
    assert optimizer(values(t_optm_name="Adam"))[at + "name"] == "adam"
    small = optimizer(values(t_optm_name="Adam8bit", t_optm_impl="for-loop"))
    assert [small[at + key] for key in ("name", "state_dtype", "implementation")] == [
        "adam",
        "int8",
        "for-loop",
    ]
    with pytest.raises(NotSupportedYet, match="optm_"):
        optimizer(values(t_optm_lr=[1e-6, 1e-5]))
    assert refused("grpo", "train.optm_name", "Muon")
    assert refused("grpo", "train.max_num_steps", 0)


def test_weight_syncs_and_what_the_trainer_divides_by() -> None:
    at, limit = "rollout.", {"rollout.schedule": "async"}
    assert (
        sync(values(t_sync_weight_interval=3)) == {at + "sync_interval": 3, at + "max_staleness": 4} | limit
    )
    outdated = sync(values(p_allowed_outdated_steps=2))
    assert outdated == {at + "sync_interval": 1, at + "max_staleness": 2} | limit
    in_turn = {at + "sync_interval": 1, at + "max_staleness": 0}
    assert sync(values() | {POLICY + "on_policy": True}) == in_turn
    assert sync(values() | {"mode": "colocated"}) == in_turn | {at + "server.sleep": True}
    assert refused("grpo", POLICY + "allowed_outdated_steps", -1)
    assert sync(values("sft", t_sync_weight_interval=3)) == {}
    with pytest.raises(ConfigError, match="on_policy"):
        sync(values(t_sync_weight_interval=3, p_on_policy=True))
    assert trained_temperature(values(p_temperature=0.9)) == {"train.temperature": 0.9}
    assert trained_temperature(values(p_temperature=0.0)) == {"train.temperature": 1.0}, "divided by nothing"


# ---------------------------------------------------------------- data, rewards, validation


def test_a_data_set_is_a_file_a_folder_or_a_function(tmp_path: Path) -> None:
    at, order = "data.train.0.", {"data.order": "shuffle"}
    file = values(p_dataset__name="x/a.parquet", p_response_column_name="a")
    assert data(file) == order | {at + "path": "x/a.parquet", at + "prompt": "q", at + "answer": "a"}
    assert data(file | {POLICY + "dataloader_shuffle": False})["data.order"] == "sequential"
    folder = values(p_dataset__name="gsm8k", p_dataset__subset="main", p_dataset__split=["train", "test"])
    assert data(folder) == order | {
        at + "path": "gsm8k", at + "subset": "main", at + "split": ["train", "test"], at + "prompt": "q",
    }  # fmt: skip
    part = data(values(p_dataset__name="gsm8k", p_dataset__split="train[:10%]"))
    assert (part["data.train.0.split"], part["data.train.0.limit"]) == ("train", "10%")
    with pytest.raises(NotSupportedYet, match="sums of parts of splits"):
        data(values(p_dataset__name="gsm8k", p_dataset__split=["train[:10%]", "test"]))
    with pytest.raises(NotSupportedYet, match="validation would take a part"):
        data(values("sft", p_dataset__name="chats", p_dataset__split="train[:10%]", v_enable=True))
    function = values(p_dataset__name="a.py:rows", p_dataset__split="pool", p_prompt_column_name="")
    function["custom"] = {"count": 3}
    assert data(function) == order | {
        at + "function": "a.py:rows", at + "arguments": {"count": 3, "split": "pool"},
    }  # fmt: skip
    for name in ("a.py", "a.py.rows", "a.py::rows"):
        with pytest.raises(ConfigError, match=r"train_policy.dataset.name: .*expected '?a.py:"):
            data(values(p_dataset__name=name))
    for name in ("/home/u/.pyenv/rows.jsonl", "x.python/rows", "org/my.pyset", "rows.py.jsonl"):
        assert data(values(p_dataset__name=name, p_dataset__split="train"))[at + "path"] == name
    for wrong in ({"p_dataset__name": ""}, {"p_prompt_column_name": ""}, {"p_dataset__split": "test"}):
        with pytest.raises(ConfigError, match="train_policy"):
            data(values(**wrong))


def test_the_split_of_a_folder_is_found_as_file_or_folder(tmp_path: Path) -> None:
    (tmp_path / "main" / "test").mkdir(parents=True)
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test/a"):
        (tmp_path / "main" / f"{name}.jsonl").write_text('{"q": "1"}\n')
    found = values(
        p_dataset__name=str(tmp_path), p_dataset__subset="main", p_dataset__split=["train", "test"]
    )
    at = "data.train.0."
    source = {key.removeprefix(at): value for key, value in data(found).items() if key.startswith(at)}
    assert len(read_rows(SourceConfig.model_validate_json(json.dumps(source)))) == 3


def test_rewards_are_weighted_and_the_length_penalty_works() -> None:
    given = values(
        p_reward_function={"gsm8k": 0.9, "lib/mine.py:score": 2}, p_overlong_reward__enable_overlong_penalty=True,
        p_overlong_reward__buffer_length=8, p_overlong_reward__penalty_factor=0.5, r_max_response_length=32,
    )  # fmt: skip
    assert rewards(given) == {
        "rewards.gsm8k.function": "whet.rewards.gsm8k:gsm8k", "rewards.gsm8k.weight": 0.9,
        "rewards.score.function": "lib/mine.py:score", "rewards.score.weight": 2.0,
        "rewards.overlong.function": "overlong", "rewards.overlong.weight": 0.5,
        "rewards.overlong.arguments": {"max_tokens": 32, "buffer": 8},
    }  # fmt: skip
    names = values(p_reward_function=["a", "b"])
    assert weights(names, POLICY + "reward_function") == {"a": 1.0, "b": 1.0}
    assert rewards(values())["rewards.single_choice.weight"] == 1.0
    with pytest.raises(ConfigError, match="buffer_length=4096"):
        rewards(values(p_overlong_reward__enable_overlong_penalty=True))
    for wrong in ([], "indirect_math"):
        with pytest.raises(ConfigError, match="reward"):
            rewards(values(p_reward_function=wrong))


def test_single_choice_compares_what_stands_in_the_tags() -> None:
    def paid(reply: str, answer: str) -> float:
        return single_choice(reply, Task(uid=0, source="t", prompt="p", answer=answer))["score"]  # type: ignore[return-value]

    assert paid("<think>x</think> <answer> B </answer> <answer>C</answer>", "<answer>b</answer>") == 1
    assert paid(" b\n", "B") == 1, "without tags the whole text"
    assert paid("<answer>BC</answer>", "B") == 0


@pytest.mark.parametrize(
    ("reply", "paid"),
    [
        ("x\nAnswer: $5$.", 1),
        ("Answer: 5\nAnswer: 6", -1),
        ("Answer: 10/2\nso", 1),
        ("5", -1),
        ("Answer:\n5", -1),
    ],
)
def test_direct_math_reads_the_last_answer_line(reply: str, paid: float) -> None:
    assert direct_math(reply, Task(uid=0, source="t", prompt="p", answer="5"))["score"] == paid


@pytest.mark.parametrize(
    ("reply", "paid"),
    [
        ("<think>a\nb</think>\n\n<answer>c</answer>", 1),
        ("<think>a</think>\n<answer>c</answer>", 0),
        ("<think>a<think>b</think>\n\n<answer>c</answer>", 0),
        ("<think>a</think>\n\n<answer>c</answer><|end|>", 0),
    ],
)
def test_format_is_cosmos_form(reply: str, paid: float) -> None:
    arguments = REWARDS["format"]["arguments"]
    assert format(reply, Task(uid=0, source="t", prompt="p"), **arguments) == paid


def test_validation_is_evaluation_with_sampling_of_its_own() -> None:
    assert validation(values()) == {}
    given = values(
        v_enable=True, v_freq=5, v_dataset__name="b.jsonl", v_temperature=0.6, v_top_k=None, v_n_generation=4,
        v_reward_function="lib/mine.py:score", r_sampling_config__top_k=7, r_sampling_config__top_p=0.9,
    )  # fmt: skip
    out = validation(given)
    assert (out["data.eval.0.path"], out["data.eval.0.prompt"], out["eval.interval"]) == ("b.jsonl", "q", 5)
    assert [out[f"eval.sampling.{k}"] for k in ("temperature", "top_k", "top_p", "max_tokens")] == [
        0.6,
        7,
        0.9,
        2048,
    ]
    judge = {"score": 1.0}
    assert (out["eval.samples"], out["eval.reward"], out["eval.at_start"]) == (4, judge, False)
    assert rewards(given)["rewards.score.weight"] == 0.0, "validation alone reads it"
    greedy = values(
        v_enable=True, v_dataset__name="b.jsonl", v_n_generation=4
    )  # temperature 0 is its default
    assert (validation(greedy)["eval.samples"], validation(greedy)["eval.sampling.temperature"]) == (1, 0.0)
    several = values(v_enable=True, v_dataset__name="b.jsonl", v_reward_function={"format": 1, "gsm8k": 2})
    assert validation(several)["eval.reward"] == {"format": 1.0, "gsm8k": 2.0}
    own = values(v_enable=True, v_dataset__name="b.jsonl", v_reward_function=["single_choice"])
    assert "eval.reward" not in validation(own), "the same sum as training's"
    for wrong in ({"v_dataset__name": ""}, {"v_freq": 0}):
        with pytest.raises(ConfigError, match="validation"):
            validation(values(v_enable=True, **{"v_dataset__name": "b.jsonl"} | wrong))


@pytest.mark.parametrize(
    ("kind", "size", "kept"),
    [("sft", None, 0.75), ("sft", 0.2, 0.8), ("sft", 3, -3), ("grpo", 3, -3), ("sft", 0.0, -1)],
)
def test_validation_without_a_set_of_its_own_takes_the_last_rows_of_training(
    kind: str, size: float | None, kept: float
) -> None:
    """A float is a share, an int a number; 1 and 1.0 are not the same, 0 is one row."""
    given = values(kind, v_enable=True, p_dataset__name="a.jsonl", p_dataset__test_size=size)
    trained, asked = data(given), validation(given)
    assert (trained["data.train.0.limit"], asked["data.eval.0.skip"]) == (kept, kept)
    assert asked["data.eval.0.path"] == "a.jsonl"
    for on in ({"validation.enable": False}, {"validation.dataset.name": "b.jsonl"}):
        assert "data.train.0.limit" not in data(given | on), "nothing is held out"


def test_of_a_script_s_data_set_the_first_rows_are_held_out() -> None:
    for size, skip in ((None, 0.1), (3, 3)):
        given = values("sft", v_enable=True, p_dataset__name="a.py:rows", p_dataset__test_size=size)
        assert data(given)["data.train.0.skip"] == validation(given)["data.eval.0.limit"] == skip


def test_rl_jobs_hold_out_rows_by_themselves_from_0_4_0_on() -> None:
    given = values(v_enable=True)
    with pytest.raises(ConfigError, match=r"validation\.dataset\.name is empty"):
        validation(given)
    assert "data.train.0.limit" not in data(given)
    assert validation(given | {versions.VERSION: "0.4.0"})["data.eval.0.skip"] == 0.75


def test_sizes_of_what_is_held_out() -> None:
    on = {"validation.enable": True, POLICY + "dataset.name": "a.jsonl"}
    for wrong in (1.0, 1.5, -1, "x"):
        assert refused("sft", POLICY + "dataset.test_size", wrong, **on)
    few = values(v_enable=True, v_dataset__name="b.jsonl", v_dataset__test_size=5)
    assert validation(few)["data.eval.0.limit"] == 5


def test_sft_validation_measures_the_loss_and_samples_nothing() -> None:
    given = values(
        "sft", v_enable=True, v_freq=4, v_dataset__name="b.jsonl", p_conversation_column_name="chat"
    )
    assert validation(given) == {
        "data.eval.0.path": "b.jsonl", "data.eval.0.messages": "chat",
        "data.exclude_eval": False, "eval.interval": 4, "eval.at_start": False,
    }  # fmt: skip


def test_conversations_are_read_whole() -> None:
    at, order = "data.train.0.", {"data.order": "shuffle"}
    file = values("sft", p_dataset__name="a.jsonl", p_system_prompt="s")
    assert data(file) == order | {
        at + "path": "a.jsonl", at + "messages": "conversations", at + "system_prompt": "s",
    }  # fmt: skip
    function = values("sft", p_dataset__name="a.py:rows", p_conversation_column_name="")
    assert data(function) == order | {at + "function": "a.py:rows"}, "rows of prompt and response"


# ---------------------------------------------------------------- model, files


def test_model_lengths_and_seed() -> None:
    summed = {"train.precision.master_weights": True, "train.precision.reduce": "float32"}
    assert dtype(values()) == {"model.dtype": "bfloat16"} | summed
    assert dtype(values(t_param_dtype="float16")) == {"model.dtype": "float16"} | summed
    assert dtype(values(t_master_dtype="bfloat16"))["train.precision.master_weights"] is False
    assert offload(values(t_activation_offload=True)) == {"train.offload": ["activations"]}
    assert offload(values()) == {"train.offload": []}
    for dtypes in ({}, {"train.param_dtype": "float16"}):
        for same in (None, "float32", dtypes.get("train.param_dtype", "bfloat16")):
            assert not refused("grpo", "train.transfer_dtype", same, **dtypes), (
                "rollouts compute in their own"
            )
    total = {"data.max_total_tokens": 4096, "data.overlong": "filter"}
    assert lengths(values()) == total | {"data.max_prompt_tokens": 4095, "rollout.sampling.max_tokens": 2048}
    assert lengths(values("sft", r_max_response_length=9999)) == total | {
        "data.overlong": "truncate_right", "data.max_prompt_tokens": 4096, "rollout.sampling.max_tokens": 4096,
    }  # fmt: skip
    seeds = (
        ({}, {"seed": 0}),
        ({"t_deterministic": True}, {"seed": 42}),
        ({"r_seed": 7}, {"seed": 7}),
        ({"t_seed": 0, "t_deterministic": True}, {"seed": 0}),
        ({"t_seed": 1, "r_seed": 2}, {"seed": 2, "data.seed": 1}),
    )
    assert [seed(values(**given)) for given, _ in seeds] == [wanted for _, wanted in seeds]
    with pytest.raises(NotSupportedYet):
        dtype(values(t_param_dtype="float16", t_master_dtype="bfloat16"))
    for key, wrong in (
        ("train.transfer_dtype", "float16"),
        ("train.param_dtype", "float64"),
        ("rollout.max_response_length", 0),
        ("rollout.backend", "sglang"),
        ("rollout.gpu_memory_utilization", 1.5),
    ):
        assert refused("grpo", key, wrong)
    for given in ({"c_upload_s3": True}, {"c_upload_hf": True}, {"c_upload_s3": "all"}):
        with pytest.raises(ConfigError):
            uploads(values(**given))
    turns = values(
        r_multi_turn_config__custom_chat_template_path="a.jinja", r_multi_turn_config__enable_thinking=True
    )
    assert chat(turns) == {
        "tokenizer.chat_template": "a.jinja", "tokenizer.chat_template_kwargs": {"enable_thinking": True},
    }  # fmt: skip
    assert chat(values()) == {}, "the template's own default"
    assert sampling(values())["rollout.sampling.top_k"] == 0
    assert sampling(values("sft")) == {}
    assert uploads(values(c_s3_bucket="b")) == {}
    assert uploads(values(c_s3_bucket="b", c_upload_s3="final", c_upload_hf=True, c_hf_repo_name="o/n")) == {
        "checkpoint.upload_to": ["s3://b/outputs/checkpoints"],
        "checkpoint.upload_exports_to": ["s3://b/outputs/exports", "hf://o/n"],
        "checkpoint.upload": "last",
    }


def test_files_and_trackers() -> None:
    given = values(t_output_dir="./out/a", t_timestamp="2024")
    given["logging.experiment_name"] = "None"
    assert place(given) == {"name": "a", "track.project": "cosmos_rl", "run_dir": "out/a/2024"}
    given |= {"logging.experiment_name": "try", "train.timestamp": ""}
    assert place(given) == {"name": "try", "track.project": "cosmos_rl", "run_dir": "out/a/{time}"}
    assert [resume(values(t_resume=r))["checkpoint.resume"] for r in (True, False, "x/y")] == [
        "auto",
        "never",
        "x/y",
    ]
    assert checkpoint(values()) == {"checkpoint.interval": 0, "checkpoint.export": False}
    assert checkpoint(values(c_enable_checkpoint=True, c_max_keep=-1)) == {
        "checkpoint.interval": 20, "checkpoint.keep": None, "checkpoint.export": True, "checkpoint.export_interval": 20,
        "checkpoint.async_save": True,
    }  # fmt: skip
    weights_only = values(
        c_enable_checkpoint=True, c_export_safetensors=False, c_save_freq_in_epoch=2, c_save_mode="sync"
    )
    assert checkpoint(weights_only) == {
        "checkpoint.interval": "2 epochs", "checkpoint.keep": 5, "checkpoint.export": False,
        "checkpoint.export_interval": 0, "checkpoint.async_save": False,
    }  # fmt: skip
    weights_only["train.ckpt.export_safetensors"] = True
    assert checkpoint(weights_only)["checkpoint.export_interval"] == "2 epochs"
    assert refused("grpo", "train.ckpt.save_mode", "later")
    for wrong in ({"c_max_keep": 0}, {"c_save_freq": 0}):
        with pytest.raises(ConfigError, match=r"train\.ckpt"):
            checkpoint(values(c_enable_checkpoint=True, **wrong))
    given["logging.logger"] = ["Console", "wandb"]
    assert trackers(given) == {"track.trackers": ["jsonl", "console", "wandb"]}
    with pytest.raises(ConfigError, match="'wandbb' is not known"):
        trackers(given | {"logging.logger": ["wandbb"]})


# ---------------------------------------------------------------- values of the wrong kind


@pytest.mark.parametrize(
    "wrong", [None, "x", "", [], {}, [1], {"a": "b"}, -1, 0, 1.5, True, 10**30], ids=repr
)
@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_no_value_of_any_key_breaks_the_translation(kind: str, wrong: Any) -> None:
    """It is translated, or refused by its type or with a ConfigError; every key in turn, with validation on as well."""
    of = dialect(f"cosmos-{kind}")
    functions = [of.functions(name) for name in of.by_function]
    base = values(kind, t_max_num_steps=10, t_optm_decay_type="linear", t_train_batch_per_replica=32)
    refused = 0
    for row in of.rows:
        value, problem = understood(wrong, row, default=row.default, nulls=())
        refused += bool(problem)
        for more in ({}, {"validation.enable": True, "validation.dataset.name": "b.jsonl"}):
            for each in () if problem else functions:
                try:
                    assert isinstance(each({**base, **more, row.key: value}), dict)
                except ConfigError:
                    refused += 1
    assert refused > 50 or wrong in (0, True)


def test_readers_of_values() -> None:
    assert texts({"k": ["a", ""]}, "k") == ["a"]
    assert texts({"k": None}, "k") == []
    with pytest.raises(ConfigError, match="expected a name"):
        weights({"k": [1]}, "k")
