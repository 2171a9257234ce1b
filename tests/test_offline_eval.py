"""Replies from a file, judged without a model: by hand, with files that are wrong, and from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whet.bench import judge_file, replies_in
from whet.config.load import Loaded, load
from whet.config.plan import plans
from whet.config.schema import SourceConfig
from whet.offline import Judged, check, judge, read
from whet.rewards.combine import RewardSet
from whet.types import ConfigError, DataError, Json, Task, WhetError

ROWS: list[dict[str, Json]] = [
    {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "2+3?"}],
        "responses": ["#### 5", "#### 6"],
        "reward_model": {"style": "rule", "ground_truth": "5"},
    },
    {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "responses": ["#### 5", "four"],
        "reward_model": {"style": "rule", "ground_truth": "4"},
    },
    {
        "data_source": "math",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "responses": ["#### 2", "#### 2"],
        "reward_model": {"style": "rule", "ground_truth": "2"},
    },
]
VERL = {"answer": "reward_model.ground_truth", "label": "data_source"}
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's signature: the number after the hashes, half of it where the source is math."""
    if "raise" in solution_str:
        raise RuntimeError("asked to")
    right = solution_str.rpartition("#### ")[2] == ground_truth
    return right * (0.5 if data_source == "math" else 1.0)
'''


def parquet(path: Path, rows: list[dict[str, Json]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def config(path: Path, tmp_path: Path, *overrides: str) -> Loaded:
    (tmp_path / "reward.py").write_text(REWARD)
    values = {
        "rewards": {"score": {"function": f"{tmp_path}/reward.py:compute_score"}},
        "data": {"eval": [{"path": str(path), **VERL}]},
        "eval": {"offline": True},
    }
    return load(None, overrides, values)


def judged(loaded: Loaded) -> Judged:
    check(loaded, whole=True)
    with RewardSet.from_config(loaded.config.rewards, loaded.config.reward_workers) as rewards:
        return judge(loaded.config, rewards)


def test_by_hand(tmp_path: Path) -> None:
    out = judged(config(parquet(tmp_path / "r.parquet", ROWS), tmp_path))
    # gsm8k: rewards 1, 0 and 0, 0; math: 0.5, 0.5, which is no pass
    assert out.metrics == {
        "eval/gsm8k/mean@2": 0.25, "eval/gsm8k/pass@2": 0.5, "eval/gsm8k/maj@2": 0.5, "eval/gsm8k/best@2": 0.5,
        "eval/gsm8k/worst@2": 0.0, "eval/gsm8k/std@2": 0.25, "eval/gsm8k/reward_mean": 0.25,
        "eval/gsm8k/tasks": 2.0, "eval/gsm8k/unscored": 0.0,
        "eval/math/mean@2": 0.0, "eval/math/pass@2": 0.0, "eval/math/maj@2": 0.0, "eval/math/best@2": 0.5,
        "eval/math/worst@2": 0.5, "eval/math/std@2": 0.0, "eval/math/reward_mean": 0.5,
        "eval/math/tasks": 1.0, "eval/math/unscored": 0.0,
        "eval/all/mean@2": 1 / 6, "eval/all/pass@2": 1 / 3, "eval/all/maj@2": 1 / 3, "eval/all/best@2": 0.5,
        "eval/all/worst@2": 1 / 6, "eval/all/std@2": 1 / 6, "eval/all/reward_mean": 1 / 3,
        "eval/all/tasks": 3.0, "eval/all/unscored": 0.0,
        "eval/gsm8k/part/score_mean": 0.25, "eval/math/part/score_mean": 0.5, "eval/all/part/score_mean": 1 / 3,
        "eval/accuracy": 1 / 6,
    }  # fmt: skip
    assert [(row["row"], row["index"], row["source"], row["reward"]) for row in out.rows] == [
        (0, 0, "gsm8k", 1.0), (0, 1, "gsm8k", 0.0), (1, 0, "gsm8k", 0.0), (1, 1, "gsm8k", 0.0),
        (2, 0, "math", 0.5), (2, 1, "math", 0.5),
    ]  # fmt: skip


def test_success_and_the_judging_reward_are_read(tmp_path: Path) -> None:
    path = parquet(tmp_path / "r.parquet", ROWS)
    assert judged(config(path, tmp_path, "eval.success=0.5")).metrics["eval/math/mean@2"] == 1.0
    two = ["rewards.form.function=exact", "eval.reward={score: 2.0}"]
    assert judged(config(path, tmp_path, *two)).metrics["eval/math/reward_mean"] == 1.0


def test_parquet_and_jsonl_give_the_same(tmp_path: Path) -> None:
    lines = tmp_path / "r.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    a, b = (judged(config(p, tmp_path)) for p in (lines, parquet(tmp_path / "r.parquet", ROWS)))
    assert a == b


def test_a_reply_that_cannot_be_scored_is_counted(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "responses": ["#### 5", "raise"]}, *ROWS[1:]]
    out = judged(config(parquet(tmp_path / "r.parquet", rows), tmp_path))
    assert (out.metrics["eval/gsm8k/unscored"], out.metrics["eval/gsm8k/mean@2"]) == (1, 0.25)
    assert "RuntimeError: asked to" in out.rows[1]["error"]
    with pytest.raises(WhetError, match=r"1 of 6 rollouts of data.eval are unscored"):
        judged(config(tmp_path / "r.parquet", tmp_path, "reward_workers.max_failure_rate=0.1"))


def test_replies_of_one_row_may_be_a_text_and_their_number_may_differ(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    rows = [{**ROWS[0], "responses": "#### 5"}, {**ROWS[1], "responses": ["#### 4", "#### 4", "#### 5"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [len(g.rollouts) for g in read([SourceConfig(path=str(path), **VERL)])] == [1, 3]
    assert judged(config(path, tmp_path)).metrics["eval/gsm8k/mean@1"] == pytest.approx((1 + 2 / 3) / 2)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"responses": []},
            r"line 2: column 'responses' holds list \[\]; expected a reply as text",
        ),
        ({"responses": ["a", 3]}, r"line 2: column 'responses' holds list \['a', 3\]"),
        ({"responses": None}, r"line 2: column 'responses' holds NoneType None"),
        ({"reply": "a"}, r"line 2: no column 'response'; there are: data_source, prompt, reply"),
    ],
)
def test_rows_that_cannot_be_read_are_named(tmp_path: Path, row: dict[str, Json], said: str) -> None:
    path = tmp_path / "r.jsonl"
    rest = {k: v for k, v in ROWS[1].items() if k != "responses"}
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({**rest, **row}) + "\n")
    with pytest.raises(DataError, match=said):
        judged(config(path, tmp_path))


def test_what_is_missing_or_idle_is_refused(tmp_path: Path) -> None:
    for given, problems in (
        ([], ("eval.offline: name the file", "whet eval runs/run", "rewards: rewards score the replies")),
        (
            ["eval.offline=true", "data.eval=r.jsonl"],
            ("train.steps: has no effect", "eval.samples: has no effect"),
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            check(load(None, ["train.steps=3", "eval.samples=2", *given], {}), whole=True)
        assert all(said in str(caught.value) for said in problems)
        assert bool(given) == ("has no effect" in str(caught.value))
    loaded = config(tmp_path / "r.parquet", tmp_path, "eval.reward=other")
    with pytest.raises(ConfigError, match=r"eval\.reward: 'other' is not among rewards: score"):
        check(loaded, whole=True)
    with pytest.raises(ConfigError, match="overlong counts tokens"):
        check(config(tmp_path / "r", tmp_path, "rewards.o.function=overlong"), whole=True)


def test_a_plan_names_the_command_of_a_file_that_only_evaluates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to train: run `whet eval the config`"):
        plans(config(tmp_path / "r.parquet", tmp_path))


def test_a_training_config_may_be_used_with_a_file(tmp_path: Path) -> None:
    """`--offline FILE` has the columns of the config's own held-out source."""
    own = {"data": {"eval": [{"path": "held_out.jsonl", "limit": 3, "answer": "number", "name": "numbers"}]}}
    training = load(None, ["train.steps=3", "rewards.answer.function=exact"], own)
    given = replies_in(tmp_path / "r.jsonl", training.config)
    assert given["data"] == {"eval": [{"path": f"{tmp_path}/r.jsonl", "answer": "number", "name": "numbers"}]}
    check(load(None, ["train.steps=3", "rewards.answer.function=exact"], given), whole=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prompt", "question"),
        ("response", "reply"),
        ("answer", "solution"),
        ("label", "kind"),
        ("template", "Add: {prompt}"),
        ("system_prompt", "Add."),
        ("skip", 1),
        ("limit", 1),
    ],
)
def test_what_a_source_says_of_its_rows_counts_for_replies(key: str, value: Json) -> None:
    """Rewards see the task of each row and its replies."""
    rows = tuple(
        {
            "prompt": f"{n}+1=",
            "question": f"1+{n}=",
            "response": str(n + 1),
            "reply": str(n + 2),
            "answer": str(n + 1),
            "solution": str(n + 2),
            "kind": "sums",
        }
        for n in range(2)
    )

    def seen(**given: Json) -> list[tuple[Task, list[str]]]:
        source = SourceConfig.model_validate({"rows": rows, **given})
        return [(group.task, [r.text for r in group.rollouts]) for group in read([source])]

    assert seen(**{key: value}) != seen() == seen()


def test_the_column_of_replies_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "reply": ["2", "3"], "answer": "2"}]
    values = {"data": {"eval": [{"rows": rows, "response": "reply"}]}, "eval": {"offline": True}}
    found = judge_file(load(None, ["rewards.is.function=exact"], values), whole=True)
    assert found.metrics["eval/rows/mean@2"] == 0.5


def test_sources_are_scored_by_their_own_rewards(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "response": ["2", "3"], "answer": "2"}]
    sources = [
        {"rows": rows, "name": name, "rewards": [reward]} for name, reward in (("a", "is"), ("b", "has"))
    ]
    rewards = {"is": {"function": "exact"}, "has": {"function": "format", "arguments": {"pattern": "[23]"}}}
    values = {"data": {"eval": sources}, "eval": {"offline": True}, "rewards": rewards}
    found = judge_file(load(None, (), values), whole=True)
    assert (found.metrics["eval/a/mean@2"], found.metrics["eval/b/mean@2"]) == (0.5, 1.0)
    assert [row["row"] for row in found.rows] == [0, 0, 1, 1]


def test_a_label_all_beside_others_is_refused(tmp_path: Path) -> None:
    """Its numbers were replaced by those over all sources."""
    rows = [{**ROWS[0], "data_source": "all"}, ROWS[-1]]
    with pytest.raises(ConfigError, match="the source 'all', and the numbers over all sources are called so"):
        judged(config(parquet(tmp_path / "r.parquet", rows), tmp_path))


def test_from_the_command_line_without_torch(tmp_path: Path) -> None:
    """The config names the rewards, --offline the file; the numbers are printed and written as JSON."""
    path = parquet(tmp_path / "r.parquet", ROWS)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "judge.yaml").write_text(
        f"rewards: {{score: {{function: '{tmp_path}/reward.py:compute_score'}}}}\n"
        f"data: {{eval: {{path: unused, answer: reward_model.ground_truth, label: data_source}}}}\n"
    )
    line = [
        "eval",
        f"{tmp_path}/judge.yaml",
        "eval.success=0.5",
        "--offline",
        str(path),
        "-o",
        f"{tmp_path}/out.json",
    ]
    code = f"import sys; from whet.cli import main; sys.argv = ['whet', *{line!r}]\n"
    code += "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
    code += "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    shown = [line.split() for line in done.stdout.splitlines()]
    assert shown[0] == ["gsm8k", "math", "all"]
    assert shown[1] == ["mean@2", "0.25", "1", "0.5"]
    assert shown[-1] == ["[]"]
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["metrics"]["eval/math/reward_mean"] == 0.5
    assert len(written["replies"]) == 6
