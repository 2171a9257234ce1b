"""Several training tasksets of Trinity-RFT, and its orders by several columns: what they are here."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

import whet
from test_trinity import EVALS, SIZES, folder, grpo, metrics, translated, values  # noqa: F401 (folder: a fixture)
from whet.config.parse import parse
from whet.config.schema import DataConfig, SourceConfig, TokenizerConfig
from whet.data.tasks import TaskStream
from whet.data.tokenizer import load_tokenizer
from whet.dialects.row import NotSupportedYet
from whet.dialects.rules import function
from whet.dialects.tables import dialect
from whet.dialects.translate import translate
from whet.dialects.trinity import algorithm, data, rewards, trainer
from whet.dialects.trinity.values import TASKSET, TASKSETS
from whet.dialects.versions import VERSION
from whet.types import ConfigError, Json

EASY = "offline_easy2hard"


def sets(*own: dict[str, Json], **more: Json) -> dict[str, Json]:
    """A file with these tasksets."""
    general = {"buffer__explorer_input__default_reward_fn_type": "letters.py:share"}
    return grpo(**{TASKSETS: list(own), **general, **SIZES, **more})


OWN: dict[str, Json] = {"buffer.explorer_input.default_reward_fn_type": "letters.py:share"}
A: dict[str, Json] = {"path": "a.jsonl"}
B: dict[str, Json] = {"path": "b.jsonl"}


def orders(told: dict[str, Json]) -> dict[str, Json]:
    """The order and the mixing of a translation."""
    parts = ("data.order", "data.seed", "data.mixing")
    return {k: v for k, v in told.items() if k.startswith(parts) or k.endswith(".difficulty")}


# ---------------------------------------------------------------- several tasksets


def test_each_taskset_is_a_source_of_its_own() -> None:
    form = {"prompt_key": "question", "response_key": "truth", "system_prompt": "Count."}
    told = data.tasks(sets(A, {"name": "m", "path": "org/set", "split": "test", "format": form}))
    assert {k: v for k, v in told.items() if k.startswith("data.train.")} == {
        "data.train.0.name": "taskset_0",
        "data.train.0.path": "a.jsonl",
        "data.train.0.prompt": "prompt",
        "data.train.0.answer": "response",
        "data.train.1.name": "m",
        "data.train.1.path": "org/set",
        "data.train.1.split": "test",
        "data.train.1.prompt": "question",
        "data.train.1.answer": "truth",
        "data.train.1.system_prompt": "Count.",
    }
    assert orders(told) == {"data.mixing": "proportional", "data.order": "sequential", "data.seed": 42}


def test_a_list_of_one_is_the_taskset() -> None:
    own = {
        "path": "a.jsonl",
        "format": {"response_key": "answer"},
        "rollout_args": {"temperature": 0.5, "max_tokens": 7},
        "task_selector": {
            "selector_type": "difficulty_based",
            "feature_keys": ["w", "s"],
            "kwargs": {"m": 4},
        },
        "default_workflow_type": "math_boxed_workflow",
        "workflow_args": {"with_think": True},
    }
    tree = lambda part: {  # noqa: E731
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "model": {"model_path": "m", "max_prompt_tokens": 8, "max_response_tokens": 9},
        "buffer": {"batch_size": 8, "total_steps": 30, "explorer_input": part},
    }
    alone, listed = translated(tree({"taskset": own})), translated(tree({"tasksets": [own]}))
    assert not alone.problems
    assert not listed.problems
    assert listed.tree == alone.tree
    assert "mixing" not in listed.tree["data"]
    assert listed.tree["rollout"]["sampling"]["max_tokens"] == 7


def test_each_taskset_has_its_own_rewards() -> None:
    """What only one has does not score the other; what only evaluation has is measured."""
    maths = {**B, "default_reward_fn_type": "math_reward"}
    dapo = {"path": "c.jsonl", "default_reward_fn_type": "math_dapo_reward"}
    told = rewards.rewards(sets(A, maths, **{EVALS: [dapo]}))
    assert told["rewards.share"] == {"function": "letters.py:share"}
    assert told["rewards.math_reward"] == {"function": "whet.rewards.trinity:math_reward"}
    assert told["rewards.math_dapo_reward"]["weight"] == 0.0
    assert told["eval.reward"] == {"math_dapo_reward": 1.0}
    assert (told["data.train.0.rewards"], told["data.train.1.rewards"]) == (["share"], ["math_reward"])
    assert told["data.eval.0.rewards"] == ["math_dapo_reward"]
    both = rewards.rewards(sets(A, maths))
    assert "eval.reward" not in both
    assert (both["data.train.0.rewards"], both["data.train.1.rewards"]) == (["share"], ["math_reward"])
    assert set(rewards.rewards(sets(A, B))) == {"rewards.share"}
    thinks = {**B, "default_workflow_type": "math_boxed_workflow"}
    own = {**thinks, "path": "c.jsonl", "workflow_args": {"with_think": True}}
    two = rewards.rewards(sets({**thinks, "default_reward_fn_type": "math_boxed_reward"}, own | {
        "default_reward_fn_type": "math_boxed_reward"
    }))  # fmt: skip
    assert (two["data.train.0.rewards"], two["data.train.1.rewards"]) == (
        ["math_boxed_reward"],
        ["math_boxed_reward_2"],
    )


def test_the_general_workflow_of_evaluation_is_not_that_of_tasksets() -> None:
    general = {"buffer.explorer_input.default_eval_workflow_type": "math_boxed_workflow"}
    told = data.tasks(sets(A, B, **general, **{EVALS: [{"path": "c.jsonl"}]}))
    assert "data.train.1.system_prompt" not in told


def test_plain_prompts_beside_chats() -> None:
    boxed = {
        **B,
        "default_workflow_type": "math_boxed_workflow",
        "default_reward_fn_type": "accuracy_reward",
        "workflow_args": {"use_base": True},
    }
    told = data.tasks(sets({**A, "format": {"system_prompt": "Solve it."}}, boxed))
    assert "data.chat" not in told
    assert told["data.train.1.template"].startswith("System:")
    with pytest.raises(NotSupportedYet, match=r"tasksets\[0\].format.system_prompt: none, beside a taskset"):
        data.tasks(sets(A, boxed))


def test_tasksets_share_their_distribution_and_have_lengths_of_their_own() -> None:
    """null and the value that it stands for are the same."""
    args = {"temperature": 0.7, "max_tokens": 20}
    told = sets({**A, "rollout_args": args}, {**B, "rollout_args": {"temperature": 0.7, "top_p": 1.0}})
    assert data.sampling(told)["rollout.sampling.temperature"] == 0.7
    assert data.token_limits(told)["rollout.sampling.max_tokens"] == 20
    assert "rollout.sources" not in data.sampling(told)
    assert data.sampling(sets(A, B, model__temperature=0.3))["rollout.sampling.temperature"] == 0.3
    for key, value, off in (("temperature", 0.7, 1.0), ("top_k", 5, 0), ("top_p", 0.9, 1.0)):
        told = data.sampling(sets(A, {**B, "rollout_args": {key: value}}))
        assert told["rollout.sources"] == {"taskset_1": {key: value}}
        told = data.sampling(
            sets({**A, "rollout_args": {key: value}}, {**B, "rollout_args": {"max_tokens": 3}})
        )
        assert told[f"rollout.sampling.{key}"] == value
        assert told["rollout.sources"]["taskset_1"] == {"max_tokens": 3, key: off}
    for first, second, most, own in (
        (None, 3, 20, {"taskset_1": 3}),
        (7, None, 20, {"taskset_0": 7}),
        (30, 3, 30, {"taskset_1": 3}),
    ):
        told = sets(
            {**A, "rollout_args": {"max_tokens": first}}, {**B, "rollout_args": {"max_tokens": second}}
        )
        assert data.token_limits(told)["rollout.sampling.max_tokens"] == most
        assert data.sampling(told)["rollout.sources"] == {n: {"max_tokens": k} for n, k in own.items()}


def test_the_trainer_divides_by_one_temperature() -> None:
    """Before 0.6.0 that of the first taskset, since then model.temperature, whatever the tasksets have."""
    warm, cold = {**A, "rollout_args": {"temperature": 1.2}}, {**B, "rollout_args": {"temperature": 0.7}}

    def trained(version: str, *of: Any, **more: Any) -> Any:
        return data.sampling(sets(*of, **more) | {VERSION: version}).get("train.temperature")

    for version in ("0.5.2", "0.6.0"):
        assert trained(version, A, B) is None
        assert trained(version, A, B, model__temperature=0.7) is None
    assert trained("0.5.2", warm, cold) == 1.2
    assert trained("0.5.2", warm, warm) is None
    assert trained("0.6.0", warm, warm) == 1.0
    assert trained("0.6.0", warm, cold, model__temperature=0.9) == 0.9
    assert trained("0.6.0", warm, mode="explore") is None
    assert trained("0.6.0", A, model__temperature=0.9, algorithm__algorithm_type="sft") == 0.9
    assert trained("0.6.0", warm, algorithm__algorithm_type="sft") is None


def test_the_penalty_of_the_model_holds_in_evaluations_too() -> None:
    """The model that is asked has it, and no taskset another one."""
    held = [
        {"name": "held", "path": "h.jsonl"},
        {"name": "cold", "path": "c.jsonl", "rollout_args": {"top_k": 7}},
    ]
    told = data.evaluation(sets(A, model__repetition_penalty=1.2, **{EVALS: held}))
    assert told["eval.sampling.repetition_penalty"] == 1.2
    assert "repetition_penalty" not in told["eval.sources"]["cold"]["sampling"]
    assert "eval.sampling.repetition_penalty" not in data.evaluation(sets(A, **{EVALS: held}))
    assert data.evaluation(sets(A, model__repetition_penalty=1.2)) == {}


def test_evaluations_have_lengths_of_their_own() -> None:
    """Each has its taskset's, else the model's (20), whatever training has (30)."""
    held, brief = {"name": "held", "path": "h.jsonl"}, {"name": "brief", "path": "b.jsonl"}
    brief["rollout_args"] = {"max_tokens": 30}
    told = data.evaluation(sets({**A, "rollout_args": {"max_tokens": 30}}, **{EVALS: [held, brief]}))
    assert told["eval.sampling.max_tokens"] == 20
    assert told["eval.sources"]["brief"]["sampling"]["max_tokens"] == 30
    told = data.evaluation(sets({**A, "rollout_args": {"max_tokens": 30}}, **{EVALS: [brief, held]}))
    assert told["eval.sampling.max_tokens"] == 30
    assert told["eval.sources"]["held"]["sampling"]["max_tokens"] == 20


def test_evaluations_of_one_name_are_sampled_alike() -> None:
    held, warm = {"name": "held", "path": "h.jsonl"}, {"rollout_args": {"temperature": 0.2}}
    assert "eval.sources" not in data.evaluation(sets(A, **{EVALS: [held, held]}))
    other = {"name": "other", "path": "o.jsonl", "repeat_times": 4}
    told = data.evaluation(sets(A, **{EVALS: [held, other, other]}))
    assert told["eval.sources"] == {"other": {"samples": 4}}
    for one, two in (({"repeat_times": 2}, {}), ({}, {"repeat_times": 2}), ({}, warm), (warm, {})):
        with pytest.raises(ConfigError, match=r"eval_tasksets\[1\].name: held is also the name of another"):
            data.evaluation(sets(A, **{EVALS: [held | one, held | two]}))


def test_tasksets_have_their_own_environments_where_one_does_not_play_them_all() -> None:
    """Two alike share one; two lakes of other arguments are two. Trinity counts the tokens of a lake's replies
    together, of a sudoku's each: that is refused."""
    lake = {"default_workflow_type": "frozen_lake_workflow"}
    bare = {"buffer__explorer_input__default_reward_fn_type": None}
    told = rewards.rewards(sets({**A, **lake}, {**B, **lake}, **bare))
    assert told["rollout.env.make"] == "whet.envs.frozen_lake:make"
    told = rewards.rewards(
        sets(
            {**A, **lake, "name": "a"},
            {**B, **lake, "name": "b", "workflow_args": {"agent_max_steps": 3}},
            **bare,
        )
    )
    first, second = told["rollout.env.arguments"]["envs"].values()
    assert (first["arguments"], "max_turns" in first) == ({"steps": 10}, False)
    assert (second["arguments"], second["max_turns"]) == ({"steps": 3}, 3)
    with pytest.raises(NotSupportedYet, match=r"tasksets\[0\].*its limit of 10240 tokens"):
        rewards.rewards(sets({**A, **lake}, {**B, "default_workflow_type": "sudoku_workflow"}, **bare))


def test_truncated_replies_are_masked_for_all_tasksets_or_none() -> None:
    boxed = {"default_workflow_type": "math_boxed_workflow"}

    def told(*own: dict[str, Json], version: str) -> tuple[Json, str]:
        explores = {"tasksets": list(own), "default_reward_fn_type": "accuracy_reward"}
        made = translated(
            {
                "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
                "model": {"model_path": "m", "max_prompt_tokens": 8, "max_response_tokens": 9},
                "buffer": {"batch_size": 8, "explorer_input": explores},
            },
            version,
        )
        groups = made.tree.get("algorithm", {}).get("groups", {})
        return groups.get("truncated"), " ".join(text for _, text in (*made.problems, *made.unbuilt))

    assert told({**A, **boxed}, {**B, **boxed}, version="0.6.0") == ("mask", "")
    assert told(A, B, version="0.6.0") == (None, "")
    assert told({**A, **boxed}, B, version="0.5.2") == (None, "")
    assert (
        f"{TASKSETS}[1].default_workflow_type: beside math_boxed"
        in told({**A, **boxed}, B, version="0.6.0")[1]
    )


def test_taskset_and_tasksets_exclude_each_other() -> None:
    for key, value in (("path", "t.jsonl"), ("default_workflow_type", "math_workflow"), ("split", "test")):
        with pytest.raises(ConfigError) as e:
            data.tasks(sets(A, **{f"{TASKSET}.{key}": value}))
        assert f"{TASKSET}.{key}: given beside {TASKSETS}, which stands in place of taskset" in str(e.value)
    assert data.tasks(sets(A, **{f"{TASKSET}.split": "train"}))  # its default says nothing
    with pytest.raises(ConfigError, match=r"tasksets\[1\].path: must be given"):
        data.tasks(sets(A, {"name": "b"}))
    with pytest.raises(ConfigError, match=r"tasksets\[1\].repeat_times: 3 is not algorithm.repeat_times = 8"):
        data.tasks(sets(A, {**B, "repeat_times": 3}, algorithm__repeat_times=8))


# ---------------------------------------------------------------- their orders


def chosen(kind: str, *columns: str, **more: Json) -> dict[str, Json]:
    return {"task_selector": {"selector_type": kind, "feature_keys": list(columns), **more}}


def test_tasksets_share_an_order_but_for_its_columns() -> None:
    two = data.tasks(sets({**A, **chosen("shuffle", seed=5)}, {**B, **chosen("shuffle", seed=5)}))
    assert orders(two) == {"data.mixing": "proportional", "data.order": "shuffle", "data.seed": 5}
    easy = data.tasks(sets({**A, **chosen(EASY, "p", "q")}, {**B, **chosen(EASY, "r")}))
    assert orders(easy) == {
        "data.mixing": "proportional",
        "data.order": "hard_first",
        "data.seed": 42,
        "data.train.0.difficulty": ["p", "q"],
        "data.train.1.difficulty": "r",
    }
    rates = chosen("difficulty_based", "w", "s", kwargs={"tau": 0.5})
    learns = sets({**A, **rates}, {**B, **rates})
    told = data.tasks(learns)
    assert (told["data.order"], told["data.order.temperature"], told["data.order.columns"]) == (
        "adaptive",
        0.5,
        ["w", "s"],
    )
    calculator = {"data_processor.experience_pipeline.operators": [{"name": "pass_rate_calculator"}]}
    assert algorithm.operators(learns | calculator) == {}
    plain = data.tasks(sets({**A, **chosen("sequential", seed=1)}, {**B, **chosen("sequential", seed=2)}))
    assert plain["data.order"] == "sequential", "which reads no seed"


def test_a_trainer_by_itself_may_have_no_taskset() -> None:
    """Its explorers draw the tasks. With sync_style fixed they are told by the trainer, which has to have them then."""
    alone = grpo(
        mode="train", trainer__total_steps=4, synchronizer__sync_style="dynamic_by_explorer", **SIZES
    )
    assert data.tasks(alone) == rewards.rewards(alone) == {}
    assert function("trinity", "data.run_length")(alone) == {"train.steps": 4}
    with pytest.raises(
        ConfigError, match=r"trainer\.total_steps: must be given with mode: train without a taskset"
    ):
        function("trinity", "data.run_length")({**alone, "trainer.total_steps": None})
    fixed = {**alone, "synchronizer.sync_style": "fixed"}
    with pytest.raises(
        NotSupportedYet, match=r"taskset\.path: mode: train .* sync_style: fixed.*explorer_input"
    ):
        data.tasks(fixed)
    assert "data.train.0.path" in data.tasks({**fixed, f"{TASKSET}.path": "a.jsonl"} | OWN)


def test_a_bench_needs_no_taskset_of_training() -> None:
    """What only evaluates has the weights of its own rewards."""
    held = [
        {"name": n, "path": f"{n}.jsonl", "default_reward_fn_type": f"math_{n}reward"} for n in ("", "boxed_")
    ]
    bench = grpo(mode="bench", **{"buffer.explorer_input.eval_tasksets": held}, **SIZES)
    assert data.tasks(bench) == {"data.chat": True}
    told = rewards.rewards(bench)
    assert "weight" not in told["rewards.math_reward"]
    assert told["eval.reward"] == {"math_reward": 1.0, "math_boxed_reward": 1.0}
    with pytest.raises(ConfigError, match=r"taskset\.path: must be given"):
        data.tasks(grpo(mode="both", **SIZES) | OWN)


def test_a_setting_of_the_selector_comes_from_its_own_line() -> None:
    file = parse(
        "buffer:\n  explorer_input:\n    taskset:\n      path: a.jsonl\n      task_selector:\n"
        "        selector_type: difficulty_based\n        feature_keys: [w, s]\n"
        "        kwargs:\n          m: 8\n          tau: x\n"
    )
    origins = {path: f"f:{line}" for path, line in file.lines.items()}
    made = translate(file.tree, dialect("trinity"), origins=origins).origins
    at = f"{TASKSET}.task_selector"
    assert made[("data", "order", "temperature")] == f"f:10 {at}.kwargs.tau"
    assert made[("data", "order", "evidence")] == f"f:9 {at}.kwargs.m"
    assert made[("data", "order")] == f"f:6 {at}.selector_type"
    assert made[("data", "order", "columns")] == f"f:7 {at}.feature_keys"


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (chosen("shuffle"), {}, "another order"),
        (chosen("shuffle", seed=1), chosen("shuffle", seed=2), "another order, with other settings or another seed"),
        (chosen(EASY, "p"), chosen("shuffle"), "another order"),
        (
            chosen("difficulty_based", "w", "s"),
            chosen("difficulty_based", "w", "t"),
            "another order, with other settings",
        ),
        (chosen("random"), chosen("random"), "selector_type: random with several tasksets"),
    ],
)  # fmt: skip
def test_what_tasksets_cannot_have_each_for_itself(first: Json, second: Json, says: str) -> None:
    with pytest.raises(NotSupportedYet, match=r"tasksets\[[01]\].task_selector") as e:
        data.tasks(sets({**A, **first}, {**B, **second}))
    assert says in str(e.value)


def test_an_order_by_several_columns() -> None:
    at, path = f"{TASKSET}.task_selector", {f"{TASKSET}.path": "t.jsonl"}
    easy = {**path, f"{at}.selector_type": EASY}
    told = data.tasks(grpo(**easy, **{f"{at}.feature_keys": ["p", "q", "r"]}))
    assert (told["data.order"], told["data.train.0.difficulty"]) == ("hard_first", ["p", "q", "r"])
    for kind in ("random", "shuffle", "sequential"):
        with pytest.raises(ConfigError, match=f"feature_keys: has no effect with selector_type: {kind}"):
            data.tasks(grpo(**path, **{f"{at}.selector_type": kind, f"{at}.feature_keys": ["p"]}))
    for nothing in ([], "p"):
        with pytest.raises(ConfigError, match=r"feature_keys: got .*, expected columns of numbers"):
            data.tasks(grpo(**easy, **{f"{at}.feature_keys": nothing}))


@drawn(features=st.lists(st.tuples(*[st.integers(0, 2)] * 2), min_size=1, max_size=10))
def test_rows_come_as_trinity_sorts_them(features: list[tuple[int, int]]) -> None:
    """Trinity sorts (first feature, second feature, place in the file) and turns the list around. Rows of the same
    features are in any order here."""
    theirs = [place for *_, place in sorted((*f, n) for n, f in enumerate(features))[::-1]]
    rows = tuple({"prompt": f"{n}", "p": p, "q": q} for n, (p, q) in enumerate(features))
    cfg = DataConfig(train=(SourceConfig(rows=rows, name="a", difficulty=("p", "q")),), order="hard_first")
    tokenizer = load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=["0123456789"])
    ours = TaskStream(cfg.train, cfg, tokenizer=tokenizer, seed=0).next(len(rows))
    assert [features[int(t.prompt)] for t in ours] == [features[n] for n in theirs]


# ---------------------------------------------------------------- lists inside lists


def test_lists_in_entries_are_kept_whole() -> None:
    """Names of layers, and the rows of a board, are lists in entries of lists."""
    layers = [{"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["o_proj"]}]
    told = trainer.lora(values(model__lora_configs=layers))
    assert told["model.lora.targets"] == ["q_proj", "v_proj"]
    assert told["model.lora.exclude_modules"] == ["o_proj"]
    zero = trainer.lora(values(model__lora_configs=[{"lora_rank": 0, "lora_alpha": 0, "path": "None"}]))
    assert (zero["model.lora.rank"], zero["model.lora.alpha"]) == (0, 0), "refused by their native names"
    none = trainer.lora(values(model__lora_configs=[{"lora_rank": None, "target_modules": []}]))
    assert (none["model.lora.rank"], none["model.lora.targets"]) == (32, [])
    board = {"default_workflow_type": "frozen_lake_workflow", "workflow_args": {"desc": ["PG", "__"]}}
    bare = {"buffer__explorer_input__default_reward_fn_type": None}
    played = rewards.rewards(sets({**A, **board}, **bare, **{EVALS: [{"path": "c.jsonl", **board}]}))
    assert played["rollout.env.arguments"]["board"] == ["PG", "__"]


def test_sections_in_arguments_are_kept_whole() -> None:
    """Arguments of a reward or a workflow may be tables, whose keys may have dots in them."""
    weights = {"format": 1.0, "brier": 0.5}
    told = rewards.rewards(
        sets({**A, "default_reward_fn_type": "rlcr_reward", "reward_fn_args": {"weights": weights}})
    )
    assert told["rewards.rlcr_reward"]["arguments"] == {"weights": weights}
    own: dict[str, Json] = {"table": {"x.y": 1, "z": {"k": [2, {"a": 3}]}}, "empty": {}}
    mine = {**B, "default_reward_fn_type": "mine.py:own", "reward_fn_args": own}
    told = rewards.rewards(sets(A, **{EVALS: [mine]}))
    assert told["rewards.own"]["arguments"] == own


# ---------------------------------------------------------------- a whole run

FILE = """
project: p
name: two
checkpoint_root_dir: .
algorithm: {algorithm_type: grpo, repeat_times: 2}
model: {model_path: FOLDER, max_prompt_tokens: 8, max_response_tokens: 4}
buffer:
  batch_size: 5
  total_epochs: 3
  explorer_input:
    default_reward_fn_type: "own.py:short"
    tasksets:
      - name: few
        path: few.jsonl
        task_selector: {selector_type: offline_easy2hard, feature_keys: [p, q]}
      - name: many
        path: many.jsonl
        default_reward_fn_type: "own.py:long"
        data_selector: {selector_type: offline_easy2hard, feature_keys: [r]}
explorer: {runner_per_model: 8}
trainer: {save_interval: 0, save_hf_checkpoint: never}
monitor: {monitor_type: tensorboard}
log: {level: WARNING}
"""


def test_a_file_of_two_tasksets_trains(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """3 and 5 tasks, 3 epochs, 5 tasks a step: Trinity takes floor(24 / 5) = 4 steps, and leaves 4 draws. Each
    taskset is drawn 3 and 5 times in every 8 draws, in its own order, and has its own reward."""
    monkeypatch.chdir(tmp_path)
    Path("file.yaml").write_text(FILE.replace("FOLDER", str(folder)))
    Path("own.py").write_text(
        "def short(response, **kw):\n    return 0.25\ndef long(response, **kw):\n    return 0.75\n"
    )
    few = [
        {"prompt": f"b{c}", "response": "b", "p": p, "q": q}
        for c, p, q in (("b", 1, 2), ("c", 1, 3), ("d", 4, 0))
    ]
    many = [{"prompt": f"e{c}", "response": "b", "r": r} for c, r in zip("bcdea", (2, 5, 1, 4, 3))]
    for name, rows in (("few", few), ("many", many)):
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    whet.train("file.yaml", machine={"threads": 1}, track={"trackers": ["jsonl"]})
    run = tmp_path / "p" / "two"
    assert len([line for line in metrics(run) if "train/loss" in line]) == 4
    played: dict[int, tuple[str, str, float]] = {}
    for file in sorted((run / "rollouts").glob("*.parquet")):
        for row in pq.read_table(file, columns=["uid", "source", "prompt", "reward"]).to_pylist():
            played[row["uid"]] = (row["source"], row["prompt"], row["reward"])
    assert sorted(played) == list(range(20))
    for epoch in range(2):
        now = [played[uid] for uid in range(8 * epoch, 8 * epoch + 8)]
        assert Counter(source for source, _, _ in now) == {"few": 3, "many": 5}
        for source, order in (("few", ["bd", "bc", "bb"]), ("many", ["ec", "ee", "ea", "eb", "ed"])):
            drawn = [next(w for w in order if w in prompt) for label, prompt, _ in now if label == source]
            assert drawn == order
    assert {(source, reward) for source, _, reward in played.values()} == {("few", 0.25), ("many", 0.75)}
