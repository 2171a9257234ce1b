"""Trinity-RFT's dapo_dynamic_sampling: groups that are dropped by the metric accuracy, and not by the shaped reward."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import product
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import whet
from test_trinity import export_tiny, grpo, metrics, translated, tree_of
from whet.config.schema import Config
from whet.dialects.row import NotSupportedYet
from whet.dialects.trinity import algorithm
from whet.dialects.trinity.values import INPUT, TASKSET, TASKSETS
from whet.types import ConfigError, Json

OPERATORS = "data_processor.experience_pipeline.operators"
BY, ABOVE = "algorithm.groups.uniform.by", "algorithm.groups.uniform.above"


def dapo(*others: dict[str, Json], reward: str | None = "math_reward", **args: Json) -> dict[str, Json]:
    """What the operators are, with this reward function."""
    own: dict[str, Json] = {"name": "dapo_dynamic_sampling", "args": args}
    general = {f"{INPUT}.default_reward_fn_type": reward}
    return algorithm.operators(grpo(**{OPERATORS: [own, *others]}, **general))


@pytest.mark.parametrize(
    ("reward", "by"),
    [
        ("accuracy_reward", ["accuracy_reward"]),
        ("math_dapo_reward", ["math_dapo_reward"]),
        ("math_reward", ["math_reward/accuracy"]),
        ("math_boxed_reward", ["math_boxed_reward/accuracy"]),
        ("countdown_reward", None),
        ("format_reward", None),
    ],
)
def test_the_metric_is_the_rewards_accuracy_or_all_of_it(reward: str, by: list[str] | None) -> None:
    """Trinity takes the whole reward where a reward function reports no accuracy."""
    told = dapo(reward=reward)
    assert told == {"algorithm.dynamic_sampling": True, ABOVE: 0.0} | ({BY: by} if by else {})
    assert dapo(reward=reward, correct_threshold=0.5)[ABOVE] == 0.5


def test_the_part_is_that_of_the_tasksets_own_reward() -> None:
    boxed = {"default_reward_fn_type": "math_boxed_reward", "workflow_args": {"with_think": True}}
    pipeline = {OPERATORS: [{"name": "dapo_dynamic_sampling"}]}
    two = [{"path": "a.jsonl", **boxed}, {"path": "b.jsonl", **boxed}]
    two = [{"default_workflow_type": "math_boxed_workflow", **own} for own in two]
    assert algorithm.operators(grpo(**{TASKSETS: two}, **pipeline))[BY] == ["math_boxed_reward/accuracy"]
    other = [two[0], {**two[1], "workflow_args": {}}]
    with pytest.raises(NotSupportedYet, match=r"several rewards.*math_boxed_reward_2/accuracy"):
        algorithm.operators(grpo(**{TASKSETS: other}, **pipeline))


def test_a_world_gives_the_whole_reward() -> None:
    game = {f"{TASKSET}.default_workflow_type": "frozen_lake_workflow"}
    told = algorithm.operators(grpo(**{OPERATORS: [{"name": "dapo_dynamic_sampling"}]}, **game))
    assert told == {"algorithm.dynamic_sampling": True, ABOVE: 0.0}


def test_what_is_refused() -> None:
    for reward in ("rlcr_reward", "own.py:reward"):
        with pytest.raises(NotSupportedYet, match=f"{reward} does not report it here.*whet.algorithm"):
            dapo(reward=reward)
    with pytest.raises(NotSupportedYet, match="metric_key: format_score is coming"):
        dapo(metric_key="format_score")
    with pytest.raises(ConfigError, match="threshold: dapo_dynamic_sampling has no such argument"):
        dapo(threshold=0.5)
    for other in ("reward_filter", "dapo_dynamic_sampling"):
        with pytest.raises(NotSupportedYet, match=f"{other} once more, or after another filter"):
            dapo({"name": other})
    judged: dict[str, Json] = {f"{TASKSET}.default_workflow_type": "math_ruler_workflow"}
    judged |= {"explorer.auxiliary_models": [{"model_path": "judge"}]}
    with pytest.raises(NotSupportedYet, match="a judge gives the reward here"):
        algorithm.operators(grpo(**{OPERATORS: [{"name": "dapo_dynamic_sampling"}]}, **judged))


def test_both_filters_of_groups() -> None:
    pipeline = [{"name": "reward_std_filter"}, {"name": "dapo_dynamic_sampling"}]
    given: dict[str, Json] = {
        "algorithm.algorithm_type": "grpo",
        f"{INPUT}.default_reward_fn_type": "math_reward",
    }
    made = translated(tree_of({**given, OPERATORS: pipeline}))
    groups = Config.model_validate_json(json.dumps(made.tree)).algorithm.groups
    assert groups.uniform == {"min_std": 0.0, "ddof": 0, "above": 0.0, "by": ["math_reward/accuracy"]}


# ---------------------------------------------------------------- a run

FILE = """
project: p
name: dapo
checkpoint_root_dir: .
algorithm: {algorithm_type: dapo, repeat_times: 4}
model: {model_path: FOLDER, max_prompt_tokens: 8, max_response_tokens: 3}
data_processor:
  experience_pipeline:
    operators:
      - name: mask_response_truncated
      - name: dapo_dynamic_sampling
buffer:
  batch_size: 4
  total_steps: 2
  explorer_input:
    default_reward_fn_type: math_dapo_reward
    taskset:
      path: sums.jsonl
      reward_fn_args: {enable_overlong_penalty: true, penalty_factor: 1.0, max_response_length: 3, cache_length: 2}
explorer: {runner_per_model: 8}
trainer: {save_interval: 0, save_hf_checkpoint: never}
monitor: {monitor_type: tensorboard}
log: {level: WARNING}
"""


def test_a_file_trains_on_groups_with_right_and_wrong_replies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The penalty of long replies makes the rewards of many other groups differ, too."""
    monkeypatch.chdir(tmp_path)
    export_tiny(tmp_path / "model", "01>")
    Path("file.yaml").write_text(FILE.replace("FOLDER", str(tmp_path / "model")))
    tasks = [{"prompt": f"{a}{b}", "response": f"{a or 1}"} for a, b in product((0, 1), (0, 1))]
    Path("sums.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    whet.train("file.yaml", machine={"threads": 1}, track={"trackers": ["jsonl"]})
    run = tmp_path / "p" / "dapo"
    counts = {"trained": 0, "left out": 0}
    for file in sorted((run / "rollouts").glob("*.parquet")):
        groups: dict[int, list[dict[str, Json]]] = defaultdict(list)
        for row in pq.read_table(file, columns=["uid", "reward", "reward_parts", "advantage"]).to_pylist():
            groups[row["uid"]].append(row)
        for group in groups.values():
            right = {dict(row["reward_parts"])["math_dapo_reward"] > 0 for row in group}
            trained = {row["advantage"] is not None for row in group}
            assert trained == {len(right) == 2}
            counts["trained"] += right == {True, False}
            counts["left out"] += len(right) == 1 and len({row["reward"] for row in group}) > 1
    assert counts["trained"] == 2 * 4
    assert counts["left out"] > 0, "the shaped reward alone would have kept all"
    rejected = sum(line.get("ledger/rejected/uniform_rollouts", 0) for line in metrics(run))
    assert rejected == 4 * counts["left out"]
