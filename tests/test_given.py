"""Rows that are given from Python: lists, tables, datasets; and a run that reads the same rows when it resumes."""

import json

import pandas as pd
import pyarrow as pa
import pytest

import whet
from test_data import nested_rows
from whet.data.given import taken
from whet.types import CheckpointError, ConfigError, DataError

ROWS = [{"prompt": f"{w}>", "answer": w[::-1], "level": n} for n, w in enumerate(("ab", "ba", "cab", "bc"))]


class Dataset:
    """What a dataset with a length and items is."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, n):
        return ROWS[n]


@pytest.mark.parametrize("make", [list, pd.DataFrame, pa.Table.from_pylist, lambda rows: Dataset(), tuple])
def test_equal_rows_of_any_kind_are_the_same_file(make, tmp_path):
    sections, found = taken({"data": {"train": make(ROWS)}, "seed": 1})
    assert sections == {"data": {"train": [{"name": "train", "path": found[0].mark}]}, "seed": 1}
    found[0].write(tmp_path)
    assert found[0].name == taken({"data": ROWS})[1][0].name
    lines = found[0].file(tmp_path).read_text().splitlines()
    assert [json.loads(line) for line in lines] == ROWS


def test_sources_stay_and_rows_may_stand_among_them():
    sources = [{"path": "tasks.jsonl", "prompt": "question"}, {"rows": ROWS}]
    assert taken({"data": {"train": sources, "order": "sequential"}}) == (
        {"data": {"train": sources, "order": "sequential"}},
        [],
    )
    sections, found = taken({"data": {"train": [sources[0], ROWS, pd.DataFrame(ROWS[:1])]}})
    assert [s["path"] for s in sections["data"]["train"]] == ["tasks.jsonl", *(given.mark for given in found)]
    assert [s.get("name") for s in sections["data"]["train"]] == [None, "train", "train-2"]
    stages = taken({"stages": [{"name": "rl", "data": {"eval": ROWS}}]})[0]["stages"]
    assert stages[0]["data"]["eval"][0]["name"] == "eval"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (7, "data.train: got a int; expected a path, a source"),
        (nested_rows(), "data.train, row 1: lists and mappings nest more than 50 levels deep"),
        (pd.DataFrame([]), "data.train: has no rows; give at least one"),
        (
            [{"prompt": "a", "points": [{"1": 0.5}, {1: 0.5}]}],
            "data.train, row 1: has the key 1; expected str: a file would have it as text",
        ),
        (
            [{"prompt": {1, 2}}],
            "data.train, row 1: Object of type set is not JSON serializable; rows hold dict",
        ),
        (
            pd.DataFrame([["p", "a", "b"]], columns=["prompt", "x", "x"]),
            "pandas table .* Duplicate column names",
        ),
        (
            pd.DataFrame([{"prompt": "p", "x": 1}, {"prompt": "q", "x": "s"}]),
            "Could not convert 's'.* column x",
        ),
        (pa.table([pa.array(["p"]), pa.array(["q"])], names=["x", "x"]), "two columns of one name"),
        ([{"prompt": "p"}, {"prompt": float("nan")}], "data.train, row 2: Out of range float values"),
        (
            [{"path": "a.png", "question": "q", "answer": "a"}],
            r"data.train, entry 1: a dict with 'path' is a source .* no key 'question'.* pyarrow.Table.from_pylist",
        ),
        (
            [{"path": "a.jsonl", "promt": "q"}],
            "no key 'promt'; did you mean 'prompt'[?] If the entries are rows",
        ),
    ],
)
def test_what_is_no_rows_is_refused(data, said):
    with pytest.raises(ConfigError, match=said):
        taken({"data": data})


SCRATCH = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
SMALL = {
    "model": {"scratch": SCRATCH},
    "tokenizer": {"build": "chars"},
    "rollout": {"group_size": 2, "sampling": {"max_tokens": 4}},
}


def test_a_resumed_run_reads_the_rows_it_began_with(tmp_path):
    def train(rows, steps):
        return whet.train(
            data={"train": rows, "max_prompt_tokens": 16},
            rewards=lambda response, level: float(level),
            algorithm={"name": "grpo"},
            train={"steps": steps, "tasks_per_step": 2},
            run_dir=str(tmp_path / "run"),
            **SMALL,
        )

    assert len(train(ROWS, 1).metrics) == 1
    assert len(train(pd.DataFrame(ROWS), 2).metrics) == 2
    assert len(list((tmp_path / "run" / "data").iterdir())) == 1
    with pytest.raises(CheckpointError, match=r"data.train\[0\].path"):
        train(ROWS[:3], 3)


@pytest.mark.parametrize(
    ("rows", "error", "said"),
    [
        (
            [*ROWS, {"prompt": "a" * 20, "level": 1}],
            DataError,
            "line 5: its prompt has 20 tokens, the limit is 16",
        ),
        ([{"prompt": "ab"}], ConfigError, "reward 'reward': function .* needs a value for level"),
    ],
)
def test_what_is_wrong_with_the_data_of_a_later_stage_is_told_before_the_first(rows, error, said, tmp_path):
    stages = [
        {
            "name": "sft",
            "algorithm": {"name": "sft"},
            "data": {"train": [{"prompt": "ab", "response": "ba"}]},
        },
        {"name": "rl", "algorithm": {"name": "grpo"}, "data": {"train": rows}},
    ]
    with pytest.raises(error, match=said):
        whet.train(
            stages=stages,
            data={"max_prompt_tokens": 16},
            rewards=lambda response, level: float(level),
            train={"steps": 1, "tasks_per_step": 1},
            run_dir=str(tmp_path / "run"),
            **SMALL,
        )
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()
