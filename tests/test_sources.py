"""Where rows come from: splits, subsets, dataset classes; columns that rows may lack; the rewards of a source."""

import asyncio
import json
import re
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.api import reward_sets, train
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import DataConfig, RewardConfig, RewardWorkersConfig, SourceConfig, TokenizerConfig
from whet.config.sources import rewards_by_source, verifiers
from whet.data.rows import read_rows
from whet.data.tasks import TaskStream, demonstration, eval_tasks
from whet.data.tokenizer import load_tokenizer
from whet.dialects.typed import rows_of_split
from whet.rewards.combine import RewardSet, score
from whet.types import ConfigError, DataError, Group, Message, Rollout, Task

HERE = str(Path(__file__))


@pytest.fixture(scope="module")
def tokenizer():
    letters = "".join(map(chr, range(32, 127)))
    return load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=[letters])


def saved(path, *prompts):
    """A file of rows; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": p} for p in prompts]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def read(path, **kw):
    rows = read_rows(SourceConfig(path=str(path), **kw))
    return [r["prompt"] for r in rows.slice(0, len(rows))]


# ---------------------------------------------------------------- splits and subsets


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (("train-00000-of-00002.parquet", "train-00001-of-00002.parquet"), ("test-00000-of-00001.parquet",)),
        (("data/train-0.parquet", "data/train-1.parquet"), ("data/test-0.parquet",)),
        (("data/train/0.jsonl", "data/train/1.jsonl"), ("data/test/0.jsonl",)),
        (("train/0.jsonl", "train/1.jsonl"), ("test/0.jsonl",)),
        (("gsm8k_train_a.jsonl", "gsm8k_train_b.jsonl"), ("gsm8k.test.jsonl",)),
        (("a.Train.jsonl", "b.Train.jsonl"), ("Test.jsonl",)),
    ],
)
def test_a_split_is_the_files_that_have_its_name(train, test, tmp_path):
    folder = tmp_path / "d"
    for n, name in enumerate(train):
        saved(folder / name, f"t{n}")
    saved(folder / test[0], "x")
    (folder / "train.txt").write_text("not data")
    assert read(folder, split="train") == ["t0", "t1"]
    assert read(folder, split="test") == ["x"]
    assert read(folder, split=("test", "train")) == ["x", "t0", "t1"]
    assert read(folder, split=("test", "train"), limit=2) == ["x", "t0"]
    with pytest.raises(DataError, match="has no file or folder of the split 'validation'; its files: "):
        read(folder, split="validation")


def test_files_that_name_no_split_are_training_data(tmp_path):
    saved(tmp_path / "d" / "b.jsonl", "b")
    saved(tmp_path / "d" / "a.jsonl", "a")
    assert read(tmp_path / "d", split="train") == ["a", "b"]
    saved(tmp_path / "d" / "dev.jsonl", "c")
    with pytest.raises(
        DataError, match=r"no file or folder of the split 'train'; its files: a\.jsonl, b\.jsonl, dev"
    ):
        read(tmp_path / "d", split="train")
    # a word, not a part of one
    saved(tmp_path / "e" / "training.jsonl", "x")
    saved(tmp_path / "e" / "test.jsonl", "y")
    with pytest.raises(DataError, match="the split 'train'"):
        read(tmp_path / "e", split="train")


def test_a_subset_is_a_folder_in_the_folder(tmp_path):
    saved(tmp_path / "d" / "main" / "train.parquet", "m")
    saved(tmp_path / "d" / "main" / "test.parquet", "n")
    saved(tmp_path / "d" / "socratic" / "train.parquet", "s")
    assert read(tmp_path / "d", subset="main", split="train") == ["m"]
    assert read(tmp_path / "d", subset="socratic") == ["s"]
    assert read(tmp_path / "d", subset="main") == ["n", "m"]
    with pytest.raises(
        DataError, match=r"has no subset 'mian'; did you mean 'main'\?; its folders: main, socratic"
    ):
        read(tmp_path / "d", subset="mian")


def test_saved_splits_by_name(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"train": ["a", "b"], "test": ["c"]}
    made = {k: datasets.Dataset.from_list([{"prompt": p} for p in v], split=k) for k, v in rows.items()}
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "dd"))
    assert read(tmp_path / "dd", split="train") == ["a", "b"]
    assert read(tmp_path / "dd", split=("test", "train")) == ["c", "a", "b"]
    with pytest.raises(DataError, match=r"has no split 'trian'; did you mean 'train'\?; it has: test, train"):
        read(tmp_path / "dd", split="trian")
    made["test"].save_to_disk(str(tmp_path / "one"))
    assert read(tmp_path / "one", split="test") == ["c"]
    with pytest.raises(DataError, match="has no split 'train'; it has: test"):
        read(tmp_path / "one", split="train")


def test_what_a_split_cannot_be(tmp_path):
    saved(tmp_path / "d" / "train.jsonl", "a")
    with pytest.raises(
        DataError, match=r"train.jsonl is a single file, but subset and split select in a folder"
    ):
        read(tmp_path / "d" / "train.jsonl", split="train")
    with pytest.raises(DataError, match=r"split 'train\[:10%\]': expected a name; .* `limit`"):
        read(tmp_path / "d", split="train[:10%]")
    with pytest.raises(DataError, match=r"split '\.\./x': expected a name"):
        read(tmp_path / "d", split="../x")


def test_the_id_of_a_hub_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split in (None, "train"):
        with pytest.raises(
            DataError, match=r"gsm8k' is a dataset of a hub: whet downloads nothing.*save_to_disk"
        ):
            read("openai/gsm8k", split=split)
    with pytest.raises(DataError) as plain:
        read("openai/train.parquet")
    assert "hub" not in str(plain.value)


# ---------------------------------------------------------------- parts of a source


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_window_of_the_rows_by_hand(kind, tmp_path):
    """Ten rows in files of 3, 3 and 4."""
    for n, at in enumerate((range(3), range(3, 6), range(6, 10))):
        saved(tmp_path / "d" / f"{n}.{kind}", *(str(i) for i in at))
    window = [
        ({}, "0123456789"),
        ({"skip": 4}, "456789"),
        ({"skip": 4, "limit": 3}, "456"),
        ({"skip": 3, "limit": 99}, "3456789"),
        ({"limit": 0.25}, "01"),
        ({"skip": 0.25}, "23456789"),
        ({"skip": 0.5, "limit": 0.25}, "56"),
        ({"skip": 2, "limit": 0.01}, "2"),
        ({"skip": 0.99}, "9"),
    ]
    for kw, expected in window:
        assert "".join(read(tmp_path / "d", **kw)) == expected
    rows = read_rows(SourceConfig(path=str(tmp_path / "d"), skip=4, limit=3))
    unit = "row" if kind == "parquet" else "line"
    assert [rows.where(i) for i in range(3)] == [
        f"{tmp_path}/d/1.{kind}, {unit} 2", f"{tmp_path}/d/1.{kind}, {unit} 3", f"{tmp_path}/d/2.{kind}, {unit} 1",
    ]  # fmt: skip
    assert [rows.row(i)["prompt"] for i in range(3)] == ["4", "5", "6"]


@given(rows=st.integers(2, 30), share=st.floats(0.001, 0.999))
def test_a_share_parts_the_rows_in_two(rows, share):
    given_rows = tuple({"prompt": str(i)} for i in range(rows))
    held = read_rows(SourceConfig(rows=given_rows, limit=share))
    rest = read_rows(SourceConfig(rows=given_rows, skip=share))
    assert held.slice(0, len(held)) + rest.slice(0, len(rest)) == list(given_rows)
    assert min(len(held), len(rest)) >= 1
    assert abs(len(held) - share * rows) <= 1


def test_a_share_is_the_decimal_that_was_given():
    rows = tuple({"prompt": str(i)} for i in range(100))
    assert len(read_rows(SourceConfig(rows=rows, limit=0.29))) == 29  # 0.29 * 100 is 28.999999999999996


@given(rows=st.integers(2, 30), held=st.integers(1, 30))
def test_negative_numbers_count_from_the_end_as_in_a_slice(rows, held):
    given_rows = tuple({"prompt": str(i)} for i in range(rows))
    last = read_rows(SourceConfig(rows=given_rows, skip=-held))
    assert last.slice(0, len(last)) == list(given_rows[-held:])
    if held < rows:
        others = read_rows(SourceConfig(rows=given_rows, limit=-held))
        assert others.slice(0, len(others)) == list(given_rows[:-held])
        both = read_rows(SourceConfig(rows=given_rows, skip=-held - 1, limit=-held))
        assert both.slice(0, len(both)) == [given_rows[-held - 1]]


@given(
    rows=st.integers(1, 400),
    low=st.one_of(st.none(), st.integers(-99, 99)),
    high=st.one_of(st.none(), st.integers(-99, 99)),
)
def test_a_part_in_percent_is_that_of_the_datasets_library(rows, low, high):
    text = f"train[{'' if low is None else f'{low}%'}:{'' if high is None else f'{high}%'}]"
    instruction = pytest.importorskip("datasets").ReadInstruction
    theirs = instruction.from_spec(text).to_absolute({"train": rows})[0]
    expected = list(range(theirs.from_, theirs.to))
    try:
        part = rows_of_split(text, "key")
    except ConfigError:
        assert (low or 0) % 100 >= (100 if high is None else high % 100), text
        return
    del part["split"]
    source = SourceConfig(rows=tuple({"prompt": str(n)} for n in range(rows)), **part)
    if not expected:
        with pytest.raises(DataError, match="is empty"):
            read_rows(source)
        return
    found = read_rows(source)
    assert [int(found.row(n)["prompt"]) for n in range(len(found))] == expected


def test_a_limit_in_percent_follows_no_number_of_rows():
    with pytest.raises(ConfigError, match=r"limit=10% ends at a percentage of all rows; give skip as one"):
        plans(
            load(
                None,
                (),
                {**BASE, "data": {"train": [{"rows": [{"prompt": "a"}], "skip": 5, "limit": "10%"}]}},
            )
        )


def test_nothing_left_is_said():
    with pytest.raises(DataError, match=r"is empty: no rows in data.rows but the 2 that skip=5 leaves out"):
        read_rows(SourceConfig(rows=({"prompt": "a"}, {"prompt": "b"}), skip=5))
    with pytest.raises(DataError, match=r"is empty: no rows in data.rows but the 1 that skip=0.5 leaves out"):
        read_rows(SourceConfig(rows=({"prompt": "a"},), skip=0.5))
    with pytest.raises(DataError, match=r"but the 1 that skip=0, limit=-2 leaves out"):
        read_rows(SourceConfig(rows=({"prompt": "a"},), limit=-2))


# ---------------------------------------------------------------- dataset classes


class Indexed:
    """What a map-style dataset is: a length, and rows by number; past the end there is nothing."""

    def __init__(self, n=2, key="prompt"):
        self.n, self.key, self.asked = n, key, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if not 0 <= i < self.n:
            raise KeyError(f"asked for {i} of {self.n}")
        return {self.key: f"p{i}"}


class Iterated:
    def __iter__(self):
        return ({"prompt": f"p{i}"} for i in range(2))


class Tokenised(Indexed):
    def __getitem__(self, i):
        return {"input_ids": [1, 2], "attention_mask": [1, 1]}


class NeedsTokenizer(Indexed):
    def __init__(self, data_files, tokenizer):
        super().__init__()


class Bare:
    pass


def test_a_dataset_class_is_called_and_read_by_number_or_by_iteration():
    for name in ("Indexed", "Iterated"):
        rows = read_rows(SourceConfig(function=f"{HERE}:{name}"))
        assert (rows.name, rows.slice(0, 9)) == (name, [{"prompt": "p0"}, {"prompt": "p1"}])
    source = SourceConfig(function=f"{HERE}:Indexed", arguments={"n": 10**9, "key": "q"}, limit=3)
    assert read_rows(source).slice(0, 9) == [{"q": "p0"}, {"q": "p1"}, {"q": "p2"}]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "Tokenised",
            r"class .*:Tokenised, row 1: the row holds tokens \(input_ids\).*give the text, as `prompt`",
        ),
        (
            "NeedsTokenizer",
            r"raised TypeError: .*'data_files' and 'tokenizer'.*The function gets only `arguments`",
        ),
        ("Bare", "expected an iterable of rows .*, or an object with __len__ and __getitem__"),
    ],
)
def test_classes_that_give_something_else_are_told_what_is_expected(name, says):
    with pytest.raises(DataError, match=says):
        read_rows(SourceConfig(function=f"{HERE}:{name}"))


# ---------------------------------------------------------------- columns that rows may lack


def tasks_of(tokenizer, *rows, n=None, **kw):
    data = DataConfig(train=(SourceConfig(rows=rows, **{"name": "mine", **kw}),), order="sequential")
    stream = TaskStream(data.train, data, tokenizer=tokenizer, seed=0, max_response_tokens=20)
    return stream.next(n or len(rows))


def test_rows_without_a_label_have_the_sources(tokenizer):
    rows = (
        {"prompt": "a", "from": "x"},
        {"prompt": "b"},
        {"prompt": "c", "from": None},
        {"prompt": "d", "from": ""},
    )
    assert [t.source for t in tasks_of(tokenizer, *rows, label="from")] == ["x", "mine", "mine", "mine"]
    with pytest.raises(
        DataError, match=r"'mine': no row has a text in column 'form' \(label\); .*: from, prompt"
    ):
        tasks_of(tokenizer, *rows, label="form")


def test_a_rows_own_system_message_stands_over_the_sources(tokenizer):
    rows = ({"prompt": "a", "sys": "own"}, {"prompt": "b"}, {"prompt": "c", "sys": None})
    given = [t.prompt for t in tasks_of(tokenizer, *rows, system_prompt_column="sys", system_prompt="all")]
    assert [p[0] for p in given] == [Message("system", s) for s in ("own", "all", "all")]
    given = [t.prompt for t in tasks_of(tokenizer, *rows, system_prompt_column="sys")]
    assert given == [(Message("system", "own"), Message("user", "a")), "b", "c"]
    with pytest.raises(DataError, match=r"no row has a text in column 'system' \(system_prompt_column\)"):
        tasks_of(tokenizer, *rows, system_prompt_column="system")
    with pytest.raises(DataError, match="row 1: column 'sys' holds int 3; expected text"):
        tasks_of(tokenizer, {"prompt": "a", "sys": 3}, system_prompt_column="sys")


def test_the_beginning_of_the_reply_is_given_and_not_learned(tokenizer):
    row = {"prompt": [{"role": "user", "content": "q"}], "response": "4"}
    (task,) = tasks_of(tokenizer, row, reply_prefix="It is ")
    r = demonstration(task, tokenizer, 9)
    assert tokenizer.decode(r.strand.token_ids) == "<user>q<eos><assistant>It is 4<eos>"
    assert tokenizer.decode([t for t, on in zip(r.strand.token_ids, r.strand.mask) if on]) == "4<eos>"
    (plain,) = tasks_of(tokenizer, {"prompt": "q? "}, reply_prefix="It is ")
    assert tokenizer.decode(plain.token_ids) == plain.prompt == "q? It is "


def test_a_prefix_does_not_hide_a_held_out_prompt(tokenizer):
    rows = tuple({"prompt": [{"role": "user", "content": c}]} for c in "ab")
    held = eval_tasks([SourceConfig(rows=rows[:1])], DataConfig(), tokenizer=tokenizer)
    source = SourceConfig(rows=rows, reply_prefix="So")
    stream = TaskStream([source], DataConfig(), tokenizer=tokenizer, seed=0, exclude=held)
    assert (stream.counts["held_out"], stream.counts["kept"]) == (1, 1)


# ---------------------------------------------------------------- rewards of a source


def length(response, task):
    return float(len(response))


def never(response, task):
    raise AssertionError("not asked")


def played(source, *texts):
    task = Task(uid=len(source), source=source, prompt="p", answer="ab")
    made = [
        Rollout.one_strand(
            task=task, index=i, token_ids=[0, 1], mask=[0, 1], logprobs=[0.0, 0.0], sample_logprobs=[0.0, 0.0],
            versions=[-1, 0], finish_reason="stop", text=text,
        )
        for i, text in enumerate(texts)
    ]  # fmt: skip
    return Group(task, tuple(made))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"task": "gcd"}, ("gcd",)),
        ({"task": "composite", "datasets": [{"name": "gcd"}, {"name": "lcm"}]}, ("gcd", "lcm")),
        ({"task": "composite", "datasets": [{"name": ["gcd"]}, "lcm", {}]}, ()),
        ({"task": "composite", "datasets": 3}, ()),
        ({}, ()),
    ],
)
def test_the_verifiers_of_sources_are_found_and_what_names_none_is_left_to_the_source(arguments, names):
    source = {"function": "reasoning_gym", "arguments": arguments}
    values = {"model": {"scratch": "qwen3"}, "tokenizer": {"build": "chars"}, "data": {"train": [source]}}
    assert verifiers([load(None, (), values).config]) == names


def test_a_source_is_judged_by_its_own_rewards():
    rewards = {
        "exact": RewardConfig(function="exact"),
        "long": RewardConfig(function=f"{HERE}:length", weight=0.5),
    }
    train = SourceConfig(name="a", rewards=("long",)), SourceConfig(name="b")
    data = DataConfig(train=train, eval=(SourceConfig(name="c", rewards=("exact",)),))
    with RewardSet.from_config(rewards, RewardWorkersConfig()) as every:
        made = replace(every, by_source=rewards_by_source(data))
        groups = [played("a", "ab", "x"), played("b", "ab"), played("cc", "ab"), played("c", "abc", "ab")]
        a, b, cc, c = asyncio.run(score(groups, made))
    assert [(r.reward, r.reward_parts) for r in a.rollouts] == [(1.0, {"long": 2.0}), (0.5, {"long": 1.0})]
    assert [(r.reward, r.reward_parts) for r in b.rollouts] == [(2.0, {"exact": 1.0, "long": 2.0})]
    assert [r.reward for r in cc.rollouts] == [2.0]
    assert [(r.reward, r.reward_parts) for r in c.rollouts] == [(0.0, {"exact": 0.0}), (1.0, {"exact": 1.0})]


def test_a_reward_that_does_not_judge_a_source_is_not_called():
    rewards = {"exact": RewardConfig(function="exact"), "never": RewardConfig(function=f"{HERE}:never")}
    with RewardSet.from_config(rewards, RewardWorkersConfig()) as every:
        made = replace(every, by_source={"a": ("exact",)})
        a, b = asyncio.run(score([played("a", "ab"), played("b", "ab")], made))
    assert a.rollouts[0].reward == 1.0
    assert "not asked" in str(b.rollouts[0].error)


BASE = {
    "model": {"scratch": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}},
    "tokenizer": {"build": "chars"},
    "rewards": {
        "acc": {"function": "exact"},
        "num": {"function": "number"},
        "zero": {"function": "exact", "weight": 0},
    },
    "train": {"steps": 1},
}


NAMED = {"path": "a", "name": "s", "rewards": ["acc"]}


@pytest.mark.parametrize(
    ("source", "more", "says"),
    [
        (
            {**NAMED, "rewards": ["ac"]},
            {},
            "rewards: 'ac' is not among rewards: acc, num, zero; did you mean 'acc'",
        ),
        ({**NAMED, "rewards": []}, {}, "rewards: is an empty list"),
        ({**NAMED, "name": None}, {}, "rewards: needs the name of the source"),
        ({**NAMED, "label": "x"}, {}, "rewards: cannot be combined with label=x"),
        ({**NAMED, "rewards": ["zero"]}, {}, "rewards: every weight of these rewards is 0"),
        (
            NAMED,
            {"data.eval": [{"path": "b", "name": "s"}]},
            "rewards: another source named 's' has different rewards",
        ),
        (
            NAMED,
            {"algorithm": {"name": "sft"}},
            "rewards[0]: has no effect: the replies of training are in the data",
        ),
        ({"function": "m:f", "split": "train"}, {}, ": split is for path only"),
        ({"rows": [{"prompt": "a"}], "subset": "x"}, {}, ": subset is for path only"),
        ({"path": "a", "split": []}, {}, ": split is an empty list"),
        (
            {"path": "a", "messages": "m", "prompt": "p"},
            {},
            ": messages holds whole conversations with prompt and ",
        ),
        ({"path": "a", "messages": "m", "template": "{prompt}"}, {}, "leave template out"),
    ],
)
def test_sources_that_cannot_work(source, more, says):
    said = refused(source, more)
    assert says in said
    assert "data.train[0]" in said


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"data.learn_turns": "all"}, "data.learn_turns: has no effect: only demonstrations (sft)"),
        (
            {"data.max_total_tokens": 9},
            "data.max_total_tokens: 9 leaves no token for a reply after a prompt of max_prompt_tokens=1024",
        ),
        ({"data.max_total_tokens": 1}, "data.max_total_tokens"),
        (
            {"data.eval": [{"path": "b", "name": "e", "rewards": ["num"]}], "eval": {"reward": "acc"}},
            "data.eval[0].rewards: none of these rewards is in eval.reward, which scores the replies: acc",
        ),
    ],
)
def test_data_that_says_what_nothing_reads(more, says):
    said = refused({"path": "a"}, more)
    assert says in said
    assert said.startswith("1 problem ")


def refused(source, more):
    sections = {k: v for k, v in more.items() if not k.startswith("data.")}
    data = {k.removeprefix("data."): v for k, v in more.items() if k.startswith("data.")}
    with pytest.raises(ConfigError) as caught:
        plans(load(None, (), {**BASE, **sections, "data": {"train": [source], **data}}))
    return str(caught.value)


def test_a_reward_that_would_take_the_place_of_other_parts_is_refused():
    exact = {"function": "exact"}
    assert "rewards.a/b: NAME/KEY is a further number" in refused(
        {"path": "a"}, {"rewards": {"a": exact, "a/b": exact}}
    )
    played = {"rollout": {"env": {"make": "m:f"}}, "rewards": {"env": exact}}
    assert "rewards.env: is what the environment's own reward is called" in refused({"path": "a"}, played)
    alone = {**BASE, "rewards": {"env": exact}, "data": {"train": [{"path": "a"}]}}
    assert plans(load(None, (), alone))  # without an environment it is a name like others


def test_a_total_limit_makes_room_for_short_positions():
    """Of demonstrations, prompt and reply together have to fit; each by itself may have the whole."""
    sections = {
        **BASE,
        "algorithm": {"name": "sft"},
        "data": {"train": [{"path": "a"}], "max_prompt_tokens": 512},
    }
    sections["model"] = {"scratch": {**BASE["model"]["scratch"], "max_position_embeddings": 512}}
    sections["rollout"] = {"sampling": {"max_tokens": 512}}
    del sections["rewards"]
    with pytest.raises(ConfigError, match=r"= 1024, but model\.scratch\.max_position_embeddings is 512"):
        plans(load(None, (), sections))
    assert plans(load(None, ("data.max_total_tokens=512",), sections))


def test_what_a_source_with_everything_reads(tmp_path, tokenizer):
    """Columns that are not asked for stay in Arrow."""
    row = {
        "m": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}],
        "x": {"y": "s"},
        "d": 2,
        "z": 1,
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    source = SourceConfig(
        path=str(tmp_path / "a.parquet"), messages="m", system_prompt_column="x.y", difficulty="d"
    )
    data = DataConfig(train=(source,), order="easy_first")
    (task,) = islice(TaskStream(data.train, data, tokenizer=tokenizer, seed=0).next(1), 1)
    assert task.prompt == (Message("system", "s"), Message("user", "q"))
    assert (task.response, task.extra) == ("r", {"x": {"y": "s"}, "z": 1})


def test_every_stage_has_the_rewards_of_its_own_sources():
    first = [{"path": "a", "name": "s", "rewards": ["acc"]}, {"path": "b", "name": "t"}]
    stages = [{"name": "one"}, {"name": "two", "data": {"train": [{"path": "a", "name": "s"}]}}]
    loaded = load(None, (), {**BASE, "data": {"train": first}, "stages": stages})
    with ExitStack() as stack:
        one, two = reward_sets(loaded, {}, stack)
        assert one.jail is two.jail
        told = {name: one.of(Task(uid=0, source=name, prompt="p")) for name in "st"}
        assert told == {"s": ["acc"], "t": ["acc", "num", "zero"]}
        assert two.of(Task(uid=0, source="s", prompt="p")) == ["acc", "num", "zero"]


# ---------------------------------------------------------------- sampling of a source


@pytest.mark.parametrize(
    ("sources", "more", "said"),
    [
        (
            {"b": {"max_tokens": 2}},
            {},
            "rollout.sources.b: no source of data.train has this name; they are: a",
        ),
        ({"a": {}}, {}, "rollout.sources.a: is empty; give what differs from rollout.sampling"),
        (
            {"a": {"max_tokens": 9}},
            {},
            "9 is above rollout.sampling.max_tokens=8, by which memory is planned",
        ),
        (
            {"a": {"stop": ["x"]}},
            {"ignore_eos": True},
            "rollout.sources.a.stop: .*ignore_eos=true ignores it",
        ),
        (
            {"a": {"stop_token_ids": [3], "ignore_eos": True}},
            {},
            "a.stop_token_ids: ignore_eos=true ignores it",
        ),
        (
            {"a": {"max_tokens": 4}},
            {"min_tokens": 5},
            r"a.max_tokens: its longest reply \(4 tokens\) is less than",
        ),
        ({"a": {"min_tokens": 9}}, {}, r"a.min_tokens: its longest reply \(8 tokens\) is less than .* \(9\)"),
        (
            {"a": {"temperature": 0}},
            {},
            "a.temperature: 0 is greedy: all rollouts of a task would be equal",
        ),
    ],
)
def test_what_a_source_cannot_be_sampled_by(sources, more, said):
    config = {
        "model": {"scratch": {}},
        "tokenizer": {"build": "chars"},
        "data": {"train": [{"name": "a", "rows": [{"prompt": "p", "answer": "q"}]}]},
        "rewards": {"right": {"function": "exact"}},
        "rollout": {"sampling": {"max_tokens": 8, **more}},
        "train": {"steps": 1},
    }
    assert len(plans(load(None, (), config))) == 1
    config["rollout"]["sources"] = sources
    with pytest.raises(ConfigError, match=said):
        plans(load(None, (), config))


def test_a_server_that_cannot_stop_at_strings_is_asked_for_none():
    """It would get requests without them, and every reply would go on."""
    config = {**BASE, "data": {"train": [{"name": "a", "path": "a"}], "eval": [{"name": "e", "path": "b"}]}}
    stops = {
        "rollout.sources.a.stop": {"rollout": {"sources": {"a": {"stop": ["x"]}}}},
        "eval.sources.e.sampling.stop": {"eval": {"sources": {"e": {"sampling": {"stop": ["x"]}}}}},
    }
    for key, section in stops.items():
        assert plans(load(None, (), {**config, **section}))
        said = rf"{re.escape(key)}: servers get token ids .* cannot stop at strings"
        with pytest.raises(ConfigError, match=said):
            plans(load(None, ("rollout.engine=vllm",), {**config, **section}))


def test_rows_that_nothing_scores_are_unscored_and_not_0():
    """`rewards: []` leaves them to an environment, and none has played these."""
    with RewardSet.from_config({"exact": RewardConfig(function="exact")}, RewardWorkersConfig()) as every:
        made = replace(every, by_source={"a": ()})
        left = played("a", "x")
        by_world = replace(left, rollouts=tuple(replace(r, reward=0.5) for r in left.rollouts))
        a, b = asyncio.run(score([left, by_world], made))
    assert a.rollouts[0].reward is None
    assert "no reward scores source 'a'" in str(a.rollouts[0].error)
    assert b.rollouts[0].reward == 0.5


def test_sampling_of_a_source_that_no_row_has_is_found_when_the_data_is_read(tmp_path, tokenizer):
    """Its name is that of its file, or stands in a column."""
    rows = [{"prompt": "p", "kind": kind} for kind in ("x", "y")]
    (tmp_path / "named.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for label, there in ((None, ["named"]), ("kind", ["x", "y"])):
        data = DataConfig(train=(SourceConfig(path=str(tmp_path / "named.jsonl"), label=label),))
        stream = TaskStream(data.train, data, tokenizer=tokenizer, seed=0)
        assert stream.unknown(there) == []
        assert stream.unknown([*there, "other"]) == ["other"]
    config = {
        **BASE,
        "run_dir": str(tmp_path / "run"),
        "data": {"train": [{"path": str(tmp_path / "named.jsonl")}]},
        "rollout": {"sources": {"other": {"max_tokens": 2}}},
    }
    with pytest.raises(ConfigError, match=r"rollout\.sources\.other: no row of data\.train has this source"):
        train(**config)
