"""Rows, the stream of tasks, held-out sets and replies to learn from."""

import csv
import datetime
import importlib.util
import json
import logging
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whet import seeds
from whet.config.schema import DataConfig, SourceConfig, TokenizerConfig
from whet.data import prepare as prepare_module
from whet.data.files import is_here
from whet.data.gsm8k import convert, verl_row
from whet.data.prepare import fit
from whet.data.rows import read_rows
from whet.data.tasks import TaskStream, demonstration, eval_tasks, preference_pair, texts
from whet.data.tokenizer import load_tokenizer
from whet.types import CheckpointError, ConfigError, DataError, Message, WhetError

ROOT = Path(__file__).parent.parent
GSM8K = ROOT / "tests" / "data" / "gsm8k"
HERE = str(Path(__file__))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(
        TokenizerConfig(build="chars"), model_path=None, texts=["".join(map(chr, range(32, 127)))]
    )


def write(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def numbered(tmp_path, name, n, **kw):
    return SourceConfig(
        path=write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{i}", "answer": i} for i in range(n)]),
        **kw,
    )


def stream(tokenizer, *sources, seed=0, exclude=(), max_response_tokens=None, **data):
    return TaskStream(
        sources,
        DataConfig(**data),
        tokenizer=tokenizer,
        seed=seed,
        exclude=exclude,
        max_response_tokens=max_response_tokens,
    )


def prompts(tasks):
    return [t.prompt for t in tasks]


# ---------------------------------------------------------------- rows


ROWS = [
    {"prompt": "a", "answer": "1"},
    {"prompt": 'b, "c"\nd', "answer": "2"},
    {"prompt": "é", "answer": "3"},
]


def make_parquet(path):
    pq.write_table(pa.Table.from_pylist(ROWS), path)


def make_csv(path):
    path.write_text('\ufeffprompt,answer\na,1\n"b, ""c""\nd",2\né,3\n')


FORMATS = {
    "x.parquet": make_parquet,
    "x.jsonl": lambda p: p.write_text("\n".join(json.dumps(r) for r in ROWS) + "\n\n"),
    "x.json": lambda p: p.write_text(json.dumps(ROWS)),
    "y.json": lambda p: p.write_text(json.dumps({"version": 1, "data": ROWS})),
    "x.csv": make_csv,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(name, tmp_path):
    FORMATS[name](tmp_path / name)
    rows = read_rows(SourceConfig(path=str(tmp_path / name)))
    assert rows.name == name.partition(".")[0]
    assert [rows.row(i) for i in range(len(rows))] == ROWS
    assert rows.slice(1, 3) == ROWS[1:]
    limited = read_rows(SourceConfig(path=str(tmp_path / name), limit=2))
    assert limited.slice(0, 9) == ROWS[:2]


def test_a_dataset_folder_in_its_own_order(tmp_path):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS).select([2, 0])
    made.save_to_disk(str(tmp_path / "ds"))
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "dd"))
    assert read_rows(SourceConfig(path=str(tmp_path / "ds"))).slice(0, 9) == [ROWS[2], ROWS[0]]
    assert read_rows(SourceConfig(path=str(tmp_path / "dd" / "train"))).name == "train"
    with pytest.raises(DataError, match="has the splits train; name one"):
        read_rows(SourceConfig(path=str(tmp_path / "dd")))


def test_a_dataset_folder_without_the_package_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r'pip install "whet\[datasets\]"'):
        read_rows(SourceConfig(path=str(tmp_path)))


def test_folders_globs_and_lists_in_a_fixed_order(tmp_path):
    make_parquet(tmp_path / "a.parquet")
    write(tmp_path / "b.jsonl", [{"prompt": "z"}])
    (tmp_path / "notes.txt").write_text("not data")
    for path in (
        str(tmp_path),
        str(tmp_path / "*.[pj]*"),
        (str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")),
    ):
        rows = read_rows(SourceConfig(path=path))
        assert rows.slice(0, 9) == [*ROWS, {"prompt": "z"}]
        assert rows.slice(2, 4) == [ROWS[2], {"prompt": "z"}]
        assert rows.row(3) == {"prompt": "z"}
        assert (rows.where(2), rows.where(3)) == (
            f"{tmp_path}/a.parquet, row 3",
            f"{tmp_path}/b.jsonl, line 1",
        )
    assert len(read_rows(SourceConfig(path=str(tmp_path), limit=3)).parts) == 1
    with pytest.raises(IndexError):
        rows.row(4)


def test_parquet_stays_in_arrow_and_reads_only_the_columns_asked_for(tmp_path):
    make_parquet(tmp_path / "a.parquet")
    rows = read_rows(SourceConfig(path=str(tmp_path / "a.parquet")))
    assert isinstance(rows.parts[0].table, pa.Table)
    assert rows.slice(0, 1, ["answer", "nope"]) == [{"answer": "1"}]
    assert rows.slice(1, 3, ["nope"]) == [{}, {}]


def rows_of_a_function(n=2, bad=None):
    return ({"prompt": f"p{i}", "x": bad} for i in range(n))


def returns_text():
    return "prompt"


def nested_rows(levels=5000):
    value = []
    for _ in range(levels):
        value = [value]
    return [{"prompt": value}]


def test_a_function_gives_rows():
    source = SourceConfig(function=f"{HERE}:rows_of_a_function", arguments={"n": 3}, limit=2)
    rows = read_rows(source)
    assert (rows.name, rows.slice(0, 9)) == (
        "rows_of_a_function",
        [{"prompt": "p0", "x": None}, {"prompt": "p1", "x": None}],
    )


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({1}, "column x holds a set"),
        ([{"y": (1,)}], "column x.0.y holds a tuple"),
        ({2: 1}, "column x has the key 2"),
    ],
)
def test_a_function_that_gives_what_json_has_not_is_refused(bad, says):
    with pytest.raises(DataError, match=rf"row 1: {says}"):
        read_rows(SourceConfig(function=f"{HERE}:rows_of_a_function", arguments={"bad": bad}))


def test_a_function_whose_rows_nest_without_end_is_refused():
    with pytest.raises(DataError, match="nested_rows, row 1: lists and mappings nest more than 50 levels"):
        read_rows(SourceConfig(function=f"{HERE}:nested_rows"))


def test_a_function_that_gives_no_rows_is_refused():
    with pytest.raises(DataError, match="expected an iterable of rows"):
        read_rows(SourceConfig(function=f"{HERE}:returns_text"))
    with pytest.raises(DataError, match="'rows_of_a_function' is empty"):
        read_rows(SourceConfig(function=f"{HERE}:rows_of_a_function", arguments={"n": 0}))
    with pytest.raises(ConfigError, match="did you mean 'returns_text'"):
        read_rows(SourceConfig(function=f"{HERE}:return_text"))


def test_reasoning_gym_rows_carry_what_the_verifier_needs(tokenizer):
    import reasoning_gym

    arguments = {"task": "spell_backward", "size": 4, "seed": 5, "min_word_len": 3, "max_word_len": 5}
    source = SourceConfig(function="reasoning_gym", arguments=arguments)
    tasks = eval_tasks([source], DataConfig(), tokenizer=tokenizer)
    assert tasks == eval_tasks([source], DataConfig(), tokenizer=tokenizer)
    assert [t.source for t in tasks] == ["spell_backward"] * 4
    for task in tasks:
        score = reasoning_gym.get_score_answer_fn(task.extra["reasoning_gym"])
        entry = json.loads(json.dumps(task.extra["entry"]))
        assert task.prompt == entry["question"]
        assert score(task.answer, entry) == 1.0
        assert score(task.answer + "x", entry) < 1.0


@pytest.mark.parametrize(
    ("task", "params", "says"),
    [
        ("spell_backwards", {}, "did you mean 'spell_backward'"),
        ("spell_backward", {"word": 3}, "refuses the arguments"),
        ("spell_backward", {"min_word_len": 5, "max_word_len": 3}, "max_word_len must be"),
        ("arc_agi", {}, "scores an entry differently"),
    ],
)
def test_reasoning_gym_mistakes_are_named(task, params, says):
    with pytest.raises(ConfigError, match=says):
        read_rows(SourceConfig(function="reasoning_gym", arguments={"task": task, "size": 2, **params}))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", '{"prompt": "a"}\n\n{"prompt": \n', "a.jsonl, line 3: not JSON"),
        (
            "a.jsonl",
            '{"prompt": "a"}\n[1]\n',
            r"a.jsonl, line 2: a row must be an object.*found a list \(\[1\]\)",
        ),
        ("a.jsonl", b'{"prompt": "\xff"}\n', "a.jsonl, line 1: not UTF-8 text"),
        (
            "a.jsonl",
            '{"prompt": ["\\ud83d"]}',
            "a.jsonl, line 1: column prompt.0 holds half of a surrogate pair",
        ),
        ("a.jsonl", "[" * 100_000, "a.jsonl, line 1: lists and mappings nest more than 50 levels"),
        ("a.jsonl", "\n", "is empty: no rows in .*a.jsonl"),
        ("a.json", '{"rows": []}', "an object whose 'data' is one; found a dict"),
        ("a.json", "[1]", "a.json, row 1: a row must be"),
        ("a.csv", "prompt,answer\na,1\nb\n", "a.csv, line 3: the number of cells differs from the 2 columns"),
        ("a.csv", "prompt,answer\na,1,2\n", "a.csv, line 2: the number of cells differs"),
        ("a.json", '{"prompt": "a"}\n{"prompt": "b"}\n', r"Extra data at line 2.*name the file \.jsonl"),
        ("a.json", '[{"prompt": "a"},\n{"prompt": }]', "not JSON: Expecting value at line 2, column 12$"),
        ("a.csv", 'prompt,answer\na,"1" x\n', "a.csv, line 2: malformed csv"),
        ("a.csv", "prompt,answer,answer\na,1,2\n", "two columns have the name 'answer'"),
        ("a.csv", b"prompt,answer\ncaf\xe9,1\n", "a.csv: not UTF-8 text.*save it as UTF-8"),
        ("a.parquet", "no", "a.parquet: not a readable parquet file"),
        ("a.txt", "a", "unknown format '.txt'; expected one of .parquet"),
    ],
)
def test_malformed_files_are_named_with_their_line(name, text, says, tmp_path):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=says):
        read_rows(SourceConfig(path=str(tmp_path / name)))


def test_a_parquet_file_with_two_columns_of_one_name_is_refused(tmp_path):
    table = pa.table(
        [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], names=["prompt", "answer", "answer"]
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: two columns have the name 'answer'"):
        read_rows(SourceConfig(path=str(tmp_path / "a.parquet")))


def test_a_cell_of_a_csv_file_may_be_as_long_as_a_line_of_jsonl(tmp_path):
    before = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(
        f"prompt,answer,,\n{'x' * 300_000},1,,\n"
    )  # a spreadsheet's empty columns
    rows = read_rows(SourceConfig(path=str(tmp_path / "a.csv")))
    assert [len(rows.row(0)["prompt"]), rows.row(0)["answer"]] == [300_000, "1"]
    assert csv.field_size_limit() == before


def test_a_recursive_pattern_reads_each_file_once(tmp_path):
    write(tmp_path / "a.jsonl", [{"prompt": "a"}])
    write(tmp_path / "b" / "c.jsonl", [{"prompt": "c"}])
    rows = read_rows(SourceConfig(path=str(tmp_path / "**")))
    assert rows.slice(0, 9) == [{"prompt": "a"}, {"prompt": "c"}]


def test_what_is_said_about_a_dataset_is_no_row_of_it(tmp_path):
    """A folder as it lies on a hub."""
    (tmp_path / "dataset_infos.json").write_text('{"default": {"features": {}}}')
    write(tmp_path / "data" / "0000.jsonl", [{"prompt": "a"}])
    assert read_rows(SourceConfig(path=str(tmp_path), split="train")).slice(0, 9) == [{"prompt": "a"}]
    with pytest.raises(DataError, match=rf"no \.parquet, .* file; give {tmp_path}/data\. If"):
        read_rows(SourceConfig(path=str(tmp_path)))
    write(tmp_path / "a.jsonl", [{"prompt": "b"}])
    assert read_rows(SourceConfig(path=str(tmp_path))).slice(0, 9) == [{"prompt": "b"}]


@pytest.mark.parametrize("text", ["import sys\nsys.exit(3)", "import sys\ndef rows():\n  sys.exit(3)"])
def test_code_that_ends_the_program_is_named(text, tmp_path):
    (tmp_path / "ends.py").write_text(text)
    with pytest.raises(WhetError, match=r"raised SystemExit: 3 \(.*ends\.py:\d\)"):
        read_rows(SourceConfig(function=f"{tmp_path}/ends.py:rows"))


def test_a_file_that_fails_while_it_is_imported_is_named_with_its_line(tmp_path):
    (tmp_path / "fails.py").write_text("\nno_such_name\n")
    with pytest.raises(ConfigError, match=r"importing '.*fails\.py' raised NameError: .*\(.*fails\.py:2\)"):
        read_rows(SourceConfig(function=f"{tmp_path}/fails.py:rows"))


def test_missing_files_are_named_with_near_ones(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.jsonl", [{}])
    with pytest.raises(DataError, match=r"trian.jsonl; did you mean 'train.jsonl'\?"):
        read_rows(SourceConfig(path=str(tmp_path / "data" / "trian.jsonl")))
    with pytest.raises(DataError, match=r"/dat; did you mean 'data'\?"):
        read_rows(SourceConfig(path=str(tmp_path / "dat" / "deeper" / "x.jsonl")))
    with pytest.raises(DataError, match="No such data file"):
        read_rows(SourceConfig(path=str(tmp_path / "*.csv")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no \.parquet"):
        read_rows(SourceConfig(path=str(tmp_path / "empty")))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("{at}/train.jsonl/split", r"No such data file: .*/split; .*train.jsonl is a file"),
        ("~nobody-of-this-name/a.jsonl", "No such data file: ~nobody-of-this-name"),
        ("{at}/" + "a" * 300, "aaa: cannot be read: File name too long"),
        ((), "path is an empty list"),
        ("{at}/saved", "saved has dataset_dict.json, but no folder of a split"),
    ],
)
@pytest.mark.parametrize("split", [None, "train"])
def test_paths_that_lead_nowhere_are_named(path, said, split, tmp_path):
    write(tmp_path / "train.jsonl", [{}])
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").write_text("{}")
    path = path.format(at=tmp_path) if path else path
    with pytest.raises(DataError, match=said if split is None else "."):
        read_rows(SourceConfig(path=path, split=split))
    assert is_here(path) == (path in ((), f"{tmp_path}/saved"))


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "\\ud83d\\ude00"}')
    assert read_rows(SourceConfig(path=str(tmp_path / "a.jsonl"))).row(0) == {"prompt": "\U0001f600"}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (datetime.datetime(2026, 1, 1), "timestamp"),
        (b"x", "binary"),
        ([{"a": datetime.date(2026, 1, 1)}], "date32"),
    ],
)
def test_arrow_columns_that_json_has_not_are_refused_by_name(value, says, tmp_path):
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "when": value}]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=f"column 'when' holds {says}"):
        read_rows(SourceConfig(path=str(tmp_path / "a.parquet")))


def test_a_source_is_exactly_one_thing():
    with pytest.raises(ConfigError, match="given: none"):
        read_rows(SourceConfig())
    with pytest.raises(ConfigError, match="given: path, function"):
        read_rows(SourceConfig(path="a", function="b:c"))


# ---------------------------------------------------------------- columns


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7},
}
VERL_COLUMNS = {"answer": "reward_model.ground_truth", "label": "data_source"}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_nested_columns_of_the_verl_layout(kind, tmp_path, tokenizer):
    path = tmp_path / f"v.{kind}"
    pq.write_table(pa.Table.from_pylist([VERL]), path) if kind == "parquet" else write(path, [VERL])
    (task,) = eval_tasks([SourceConfig(path=str(path), **VERL_COLUMNS)], DataConfig(), tokenizer=tokenizer)
    assert task.prompt == (Message("user", "2+2?"),)
    assert (task.source, task.answer, task.response) == ("openai/gsm8k", "4", None)
    assert task.extra == {k: VERL[k] for k in ("ability", "reward_model", "extra_info")}
    assert tokenizer.decode(task.token_ids) == "<user>2+2?<eos><assistant>"


def test_a_column_whose_name_has_a_dot_stands_before_a_nested_one(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "x", "a.b": "flat", "a": {"b": "nested"}}])
    (task,) = eval_tasks([SourceConfig(path=path, answer="a.b")], DataConfig(), tokenizer=tokenizer)
    assert (task.answer, task.extra) == ("flat", {"a": {"b": "nested"}})


def test_template_and_system(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "{x}"}])
    (plain,) = eval_tasks(
        [SourceConfig(path=path, template="Q {y}: {prompt} A:")], DataConfig(), tokenizer=tokenizer
    )
    assert plain.prompt == tokenizer.decode(plain.token_ids) == "Q {y}: {x} A:"
    (chat,) = eval_tasks([SourceConfig(path=path, system_prompt="s")], DataConfig(), tokenizer=tokenizer)
    assert chat.prompt == (Message("system", "s"), Message("user", "{x}"))
    (forced,) = eval_tasks([SourceConfig(path=path)], DataConfig(chat=True), tokenizer=tokenizer)
    assert forced.prompt == (Message("user", "{x}"),)
    with pytest.raises(ConfigError, match=r"its template has no \{prompt\}"):
        eval_tasks([SourceConfig(path=path, template="Q")], DataConfig(), tokenizer=tokenizer)


def message(**kw):
    return {"prompt": [{"role": "user", "content": "x", **kw}]}


@pytest.mark.parametrize(
    ("row", "source", "says"),
    [
        ({"q": "x", "z": 1}, {}, "line 2: no column 'prompt'; columns: q, z"),
        ({"prompt": "x"}, {"answer": "solution"}, "line 2: no column 'solution'; columns: prompt"),
        (
            {"prompt": "x", "r": {"g": 1}},
            {"answer": "r.truth"},
            "line 2: no column 'r.truth'; columns: r.g",
        ),
        (
            {"prompt": 3},
            {},
            "line 2: column 'prompt' holds int 3; expected a non-empty text or a non-empty list",
        ),
        ({"prompt": None}, {}, "line 2: column 'prompt' holds NoneType None"),
        ({"prompt": ""}, {}, "line 2: column 'prompt' holds str ''"),
        ({"prompt": []}, {}, "line 2: column 'prompt' holds list"),
        ({"prompt": ["x"]}, {}, "line 2: column 'prompt' holds str 'x'; expected messages"),
        (message(content=None), {}, "line 2: column 'prompt' holds dict"),
        (message(tool_calls=[1]), {}, "line 2: .*a message of 'user' has calls or reasoning of an assistant"),
        (
            message(content=[{"type": "image"}]),
            {},
            "line 2: .*expected messages whose role and content are text",
        ),
        (
            {"prompt": "<image>x", "images": ["x.png"]},
            {},
            "line 2: column 'images' holds what <image> in the prompt stands for, and whet trains on text alone",
        ),
        (
            message(content="x<video>") | {"video": "x.mp4"},
            {},
            "line 2: column 'video' holds what <video> in the",
        ),
        (message(), {"template": "{prompt}"}, "line 2: .*the source's template is for plain text"),
        (message(role="system"), {"system_prompt": "s"}, "line 2: .*already has a system message"),
        ({"prompt": "x", "response": 1}, {}, "line 2: column 'response' holds int 1; expected text, or"),
        ({"prompt": "x", "rejected": ["y"]}, {}, "line 2: column 'rejected' holds list"),
        (
            {"prompt": "x", "answer": 1, "s": 2},
            {"label": "s"},
            "line 2: column 's' holds int 2; expected text",
        ),
    ],
)
def test_bad_rows_are_named_with_their_line_and_column(row, source, says, tmp_path, tokenizer):
    good = {"prompt": [{"role": "user", "content": "x"}], "solution": 1, "r": {"truth": 2}, "s": "t"}
    if "template" in source:
        good["prompt"] = "x"
    path = write(tmp_path / "a.jsonl", [good, row])
    with pytest.raises(DataError, match=says):
        stream(tokenizer, SourceConfig(path=path, **source))


def test_a_medium_is_found_where_no_more_columns_are_read_than_are_named(tmp_path, tokenizer):
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist([{"prompt": "<image>x", "response": "a", "image": "x.png"}]), path)
    with pytest.raises(DataError, match="column 'image' holds what <image> in the prompt stands for"):
        TaskStream(
            [SourceConfig(path=path)], DataConfig(), tokenizer=tokenizer, seed=0, learned="demonstrations"
        )


def test_a_medium_without_a_place_in_the_prompt_is_a_column_as_others_and_a_place_without_one_is_text(
    tmp_path, tokenizer
):
    rows = [{"prompt": "x", "images": ["x.png"]}, {"prompt": "x<image>", "images": []}]
    tasks = stream(tokenizer, SourceConfig(path=write(tmp_path / "a.jsonl", rows))).next(2)
    assert sorted((task.prompt, task.extra["images"]) for task in tasks) == [
        ("x", ["x.png"]),
        ("x<image>", []),
    ]


def test_a_bad_row_of_a_parquet_file_is_told_with_all_its_columns(tmp_path, tokenizer):
    """Those that are not read are left in the file; the one that was meant is often among them."""
    for column in ("promt", "prompt"):
        pq.write_table(
            pa.table({column: ["x"], "answer": ["a"], "worse": ["w"]}), tmp_path / f"{column}.parquet"
        )
    with pytest.raises(DataError, match="row 1: no column 'prompt'; columns: promt, answer, worse"):
        stream(tokenizer, SourceConfig(path=str(tmp_path / "promt.parquet")))
    source = SourceConfig(path=str(tmp_path / "prompt.parquet"), response="answer")
    with pytest.raises(DataError, match=r"no rejected reply .*Columns that nothing reads: worse"):
        TaskStream([source], DataConfig(), tokenizer=tokenizer, seed=0, learned="preferences")


def test_an_empty_prompt_of_no_tokens_is_refused(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [message()])
    tokenizer_without_markup = load_tokenizer(
        TokenizerConfig(build="chars", chat_template="{% if false %}{% endif %}"),
        model_path=None,
        texts=["x"],
    )
    with pytest.raises(DataError, match="line 1: the prompt has no tokens"):
        stream(tokenizer_without_markup, SourceConfig(path=path))


# ---------------------------------------------------------------- the stream


def test_every_row_once_an_epoch_in_another_order_each_time(tmp_path, tokenizer):
    tasks = stream(tokenizer, numbered(tmp_path, "a", 7), seed=3)
    first, second = tasks.next(7), tasks.next(7)
    assert [t.uid for t in first + second] == list(range(14))
    assert sorted(prompts(first)) == sorted(prompts(second)) == [f"a{i}" for i in range(7)]
    order = seeds.permutation(seeds.key(3, "shuffle", "a", 1), 7)
    assert [t.answer for t in second] == order.tolist()
    assert prompts(first) != prompts(second)
    assert prompts(stream(tokenizer, numbered(tmp_path, "a", 7), seed=4).next(7)) != prompts(first)
    assert (tasks.epoch, tasks.rows_per_epoch, tasks.drawn) == (2, 7, 14)


def test_without_shuffle_rows_come_in_file_order(tmp_path, tokenizer):
    tasks = stream(tokenizer, numbered(tmp_path, "a", 3), order="sequential")
    assert prompts(tasks.next(5)) == ["a0", "a1", "a2", "a0", "a1"]


def test_resuming_at_every_position_gives_the_same_following_tasks(tmp_path, tokenizer):
    sources = (
        numbered(tmp_path, "a", 3, weight=2.0),
        numbered(tmp_path, "b", 5),
        numbered(tmp_path, "c", 2, weight=0.7),
    )
    unbroken = stream(tokenizer, *sources, seed=9).next(40)
    saved = stream(tokenizer, *sources, seed=9)
    for position in range(30):
        state = json.loads(json.dumps(saved.state()))
        resumed = stream(tokenizer, *sources, seed=9)
        resumed.restore(state)
        assert resumed.next(10) == unbroken[position : position + 10]
        assert saved.next(1) == unbroken[position : position + 1]


def test_the_size_of_the_state_does_not_grow(tmp_path, tokenizer):
    tasks = stream(tokenizer, numbered(tmp_path, "a", 50))
    early = len(json.dumps(tasks.state()))
    tasks.next(99)
    assert len(json.dumps(tasks.state())) <= early + 1


def test_a_state_of_other_data_or_another_seed_is_refused(tmp_path, tokenizer):
    source = numbered(tmp_path, "a", 3)
    state = stream(tokenizer, source).state()
    with pytest.raises(CheckpointError, match="saved with seed 0, but this one has 1"):
        stream(tokenizer, source, seed=1).restore(state)
    with pytest.raises(CheckpointError, match="saved with sources"):
        stream(tokenizer, source, numbered(tmp_path, "b", 2)).restore(state)
    for rows in ([{"prompt": f"a{i}", "answer": 9} for i in range(3)], [{"prompt": "a0", "answer": 0}]):
        write(tmp_path / "a.jsonl", rows)
        with pytest.raises(CheckpointError, match="'a' has changed since the run was saved"):
            stream(tokenizer, source).restore(state)


def test_a_state_of_other_columns_that_rewards_read_is_refused(tmp_path, tokenizer):
    rows = [{"prompt": f"a{i}", "tests": {"in": i}, "of": "x"} for i in range(3)]
    source = SourceConfig(path=str(write(tmp_path / "a.jsonl", rows)), name="a", label="of")
    state = json.loads(json.dumps(stream(tokenizer, source).state()))
    stream(tokenizer, source).restore(state)
    for column, value in (("tests", {"in": 7}), ("of", "y"), ("more", None)):
        write(tmp_path / "a.jsonl", [*rows[:2], {**rows[2], column: value}])
        with pytest.raises(CheckpointError, match="'a' has changed since the run was saved"):
            stream(tokenizer, source).restore(state)
        changed = stream(tokenizer, source).restore(state, changed=True)
        assert [name for name, _, _ in changed] == ["a"]
        before = {**state, "digests": [digest.partition("/")[0] for digest in state["digests"]]}
        stream(tokenizer, source).restore(before)  # an earlier release had no digest of them
        assert stream(tokenizer, source).restore(before, changed=True) == []


def test_demonstrations_with_other_columns_are_the_same(tmp_path, tokenizer):
    """Nothing reads these columns where a reply is imitated."""

    def digest(note: str) -> str:
        source = SourceConfig(rows=({"prompt": "a", "response": "b", "note": note},))
        tasks = TaskStream(
            [source],
            DataConfig(),
            tokenizer=tokenizer,
            seed=0,
            max_response_tokens=8,
            learned="demonstrations",
        )
        return tasks.state()["digests"]

    assert digest("x") == digest("y")


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (0.5, 0.3, 0.2), (5.0, 1.0, 1.0, 0.25)])
def test_shares_hold_at_every_point(weights, tmp_path, tokenizer):
    sources = [numbered(tmp_path, f"s{i}", 2 + i, weight=w) for i, w in enumerate(weights)]
    tasks = stream(tokenizer, *sources).next(200)
    total = sum(Fraction(w) for w in weights)
    for n in range(1, 201):
        counts = Counter(t.source for t in tasks[:n])
        for i, w in enumerate(weights):
            assert abs(counts[f"s{i}"] - Fraction(w) / total * n) < 1.5


def test_the_mix_by_hand(tmp_path, tokenizer):
    sources = numbered(tmp_path, "a", 9, weight=3.0), numbered(tmp_path, "b", 9)
    # Shares 3/4 and 1/4: at draw 0 a lacks .75; 1: .5 each, tie, a; 2: .25 against .75, b; 3: a lacks 1.
    assert "".join(t.source for t in stream(tokenizer, *sources).next(8)) == "aabaaaba"


def test_two_sources_of_one_name_are_refused(tmp_path, tokenizer):
    source = numbered(tmp_path, "a", 2)
    with pytest.raises(ConfigError, match="Two data sources have the name 'a'"):
        stream(tokenizer, source, source)


def test_a_stream_of_no_sources_has_nothing_to_draw(tokenizer):
    """As a trainer's, whose explorers draw the tasks."""
    none = stream(tokenizer)
    assert (none.rows_per_epoch, none.drawn) == (0, 0)
    again = stream(tokenizer)
    assert again.restore(json.loads(json.dumps(none.state()))) == []
    with pytest.raises(ConfigError, match=r"data\.train is empty"):
        none.next(1)


def test_batches_of_rows_do_not_change_what_comes_out(tmp_path, tokenizer, monkeypatch):
    source = numbered(tmp_path, "a", 11)
    whole = stream(tokenizer, source)
    monkeypatch.setattr(prepare_module, "BATCH_ROWS", 4)
    assert stream(tokenizer, source).state() == whole.state()
    assert stream(tokenizer, source).next(11) == whole.next(11)


# ---------------------------------------------------------------- filters


def test_held_out_prompts_are_left_out_and_counted(tmp_path, tokenizer):
    held = SourceConfig(
        path=write(tmp_path / "h.jsonl", [{"prompt": "a1"}, {"prompt": "a3"}]), system_prompt="other"
    )
    rows = [{"prompt": f"a{i}"} for i in range(5)]
    rows += [{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "a3"}]}]
    train = SourceConfig(path=write(tmp_path / "t.jsonl", rows))
    tasks = stream(tokenizer, train, exclude=eval_tasks([held], DataConfig(), tokenizer=tokenizer))
    assert sorted(prompts(tasks.next(3))) == ["a0", "a2", "a4"]
    assert (tasks.counts["rows"], tasks.counts["held_out"], tasks.counts["kept"]) == (6, 3, 3)
    assert tasks.rows_per_epoch == 3


@pytest.mark.parametrize(
    ("rule", "four", "five"),
    [("truncate_left", [4, 5, 6, 7], [3, 4, 5, 6, 7]), ("truncate_right", [1, 2, 3, 4], [1, 2, 3, 4, 5]),
     ("truncate_middle", [1, 2, 6, 7], [1, 2, 5, 6, 7])],
)  # fmt: skip
def test_truncation_by_hand(rule, four, five):
    assert fit([1, 2, 3, 4, 5, 6, 7], 4, rule) == four
    assert fit([1, 2, 3, 4, 5, 6, 7], 5, rule) == five
    assert fit([1, 2], 1, rule) == ([1] if rule == "truncate_right" else [2])


def test_overlong_prompts(tmp_path, tokenizer):
    source = SourceConfig(path=write(tmp_path / "a.jsonl", [{"prompt": "abc"}, {"prompt": "abcdef"}]))
    with pytest.raises(
        DataError, match=r"line 2: its prompt has 6 tokens, the limit is 4.*data.max_prompt_tokens"
    ):
        stream(tokenizer, source, max_prompt_tokens=4)
    filtered = stream(tokenizer, source, max_prompt_tokens=4, overlong="filter")
    assert prompts(filtered.next(2)) == ["abc", "abc"]
    assert filtered.counts["overlong_prompt_dropped"] == 1
    cut = stream(tokenizer, source, max_prompt_tokens=4, overlong="truncate_middle", order="sequential")
    assert [tokenizer.decode(t.token_ids) for t in cut.next(2)] == ["abc", "abef"]
    assert cut.counts["overlong_prompt_cut"] == 1
    assert stream(tokenizer, source, max_prompt_tokens=6).counts["kept"] == 2


def test_a_source_left_empty_says_why(tmp_path, tokenizer):
    source = SourceConfig(
        path=write(tmp_path / "a.jsonl", [{"prompt": "abc"}, {"prompt": "abcdef"}, {"prompt": "abcdeg"}])
    )
    held = eval_tasks([source.model_copy(update={"limit": 1})], DataConfig(), tokenizer=tokenizer)
    with pytest.raises(
        DataError,
        match=r"'a' is empty after filtering: 1 held_out, 0 kept, 2 overlong_prompt_dropped, 3 rows\. "
        r"Prompts of more than 4 tokens, .* raise data\.max_prompt_tokens",
    ):
        stream(tokenizer, source, exclude=held, max_prompt_tokens=4, overlong="filter")


def test_unknown_characters_are_counted_and_logged(tmp_path, tokenizer, caplog):
    caplog.set_level(logging.WARNING)
    source = SourceConfig(
        path=write(tmp_path / "a.jsonl", [{"prompt": "aéü"}, {"prompt": "b", "response": "ñ"}])
    )
    assert stream(tokenizer, source).counts["unknown_tokens"] == 2
    assert "2 unknown_tokens" in caplog.text
    assert stream(tokenizer, source, max_response_tokens=9).counts["unknown_tokens"] == 3


def test_held_out_tasks_are_numbered_in_file_order(tmp_path, tokenizer):
    tasks = eval_tasks(
        [numbered(tmp_path, "a", 3), numbered(tmp_path, "b", 2)], DataConfig(), tokenizer=tokenizer
    )
    assert [(t.uid, t.source, t.prompt) for t in tasks] == [
        (0, "a", "a0"), (1, "a", "a1"), (2, "a", "a2"), (3, "b", "b0"), (4, "b", "b1")
    ]  # fmt: skip


def test_texts_of_the_sources_are_all_a_built_tokenizer_needs(tmp_path):
    rows = [{"prompt": "q", "answer": "w", "response": "e", "rejected": "r"}, {"prompt": "t", "answer": 5}]
    source = SourceConfig(path=write(tmp_path / "a.jsonl", rows), template="[{prompt}]", system_prompt="s")
    assert list(texts([source])) == ["s", "[q]", "w", "e", "r", "s", "[t]"]


# ---------------------------------------------------------------- replies to learn from


@pytest.fixture
def pair(tmp_path, tokenizer):
    path = write(tmp_path / "p.jsonl", [{"prompt": "hi>", "chosen": "yes", "no": "n"}])
    return stream(tokenizer, SourceConfig(path=path, response="chosen", rejected="no")).next(1)[0]


def test_a_demonstration_as_tokens(pair, tokenizer):
    r = demonstration(pair, tokenizer, 4)
    assert tokenizer.decode(r.strand.token_ids) == "hi>yes<eos>"
    assert r.strand.mask.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert r.strand.versions.tolist() == [-1] * 7
    assert r.strand.logprobs.tolist() == r.strand.sample_logprobs.tolist() == [0.0] * 7
    assert (r.finish_reason, r.text, r.reward, r.index) == ("stop", "yes", None, 0)


def test_a_preference_pair(pair, tokenizer):
    chosen, rejected = preference_pair(pair, tokenizer, 4)
    assert (chosen.text, chosen.reward, chosen.index) == ("yes", 1.0, 0)
    assert (rejected.text, rejected.reward, rejected.index) == ("n", 0.0, 1)
    assert tokenizer.decode(rejected.strand.token_ids) == "hi>n<eos>"


def test_a_reply_over_the_limit_is_refused_or_cut(pair, tokenizer):
    with pytest.raises(DataError, match="its response has 4 tokens, the limit is 3"):
        demonstration(pair, tokenizer, 3)
    cut = demonstration(pair, tokenizer, 3, overlong="truncate_left")
    assert tokenizer.decode(cut.strand.token_ids) == "hi>yes"
    assert cut.finish_reason == "length"


def test_a_task_without_a_reply_is_refused(tmp_path, tokenizer):
    task = stream(tokenizer, numbered(tmp_path, "a", 1)).next(1)[0]
    with pytest.raises(DataError, match="Task 0 of source 'a': it has no response to train on"):
        demonstration(task, tokenizer, 9)
    with pytest.raises(DataError, match="has no response"):
        preference_pair(task, tokenizer, 9)


@pytest.mark.parametrize(
    ("learned", "lacks", "says"),
    [
        ("demonstrations", {"response": None}, r"it has no response .*column 'response' is absent or null"),
        (
            "preferences",
            {"rejected": None},
            r"it has no rejected reply .*column 'rejected' is absent or null",
        ),
        ("labels", {"desirable": None}, "it has no label, expected true or false"),
        ("labels", {"desirable": "yes"}, "its label is 'yes', expected true or false"),
    ],
)
def test_a_row_that_cannot_be_learned_is_named_at_the_start(learned, lacks, says, tmp_path, tokenizer):
    """Not at the step that draws it."""
    whole = {"prompt": "a", "response": "b", "rejected": "c", "desirable": True}
    source = SourceConfig(
        path=write(tmp_path / "a.jsonl", [whole, whole | lacks, whole]), desirable="desirable"
    )

    def read(learned):
        return TaskStream([source], DataConfig(), tokenizer=tokenizer, seed=0, learned=learned)

    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: {says}"):
        read(learned)
    assert read(None).counts["kept"] == 3
    if learned != "demonstrations":
        assert read("demonstrations").counts["kept"] == 3


def test_the_stream_looks_at_replies_when_told_their_limit(tmp_path, tokenizer):
    rows = [{"prompt": "a", "response": "123"}, {"prompt": "b", "response": "1234"}]
    rows += [{"prompt": "c", "response": "1", "rejected": "12345"}]
    source = SourceConfig(path=write(tmp_path / "a.jsonl", rows))
    with pytest.raises(
        DataError, match=r"line 2: its response has 5 tokens, the limit is 4.*rollout.sampling.max_tokens"
    ):
        stream(tokenizer, source, max_response_tokens=4)
    filtered = stream(tokenizer, source, max_response_tokens=4, overlong="filter")
    assert prompts(filtered.next(2)) == ["a", "a"]
    assert (filtered.counts["overlong_response_dropped"], filtered.counts["overlong_rejected_dropped"]) == (
        1,
        1,
    )
    cut = stream(tokenizer, source, max_response_tokens=4, overlong="truncate_left")
    assert (cut.counts["overlong_response_cut"], cut.counts["overlong_rejected_cut"]) == (1, 1)
    assert cut.counts["kept"] == 3
    assert stream(tokenizer, source, max_response_tokens=6).counts["kept"] == 3


# ---------------------------------------------------------------- gsm8k, the demo


def test_gsm8k_in_verls_columns(tmp_path, tokenizer):
    assert convert(GSM8K, tmp_path / "out") == {"train": 48, "test": 16}
    test = SourceConfig(path=str(tmp_path / "out" / "test.parquet"), **VERL_COLUMNS)
    tasks = eval_tasks([test], DataConfig(), tokenizer=tokenizer)
    published = [json.loads(line) for line in (GSM8K / "test.jsonl").read_text().splitlines()]
    assert [t.answer for t in tasks[:3]] == ["18", "3", "70000"]
    assert {t.source for t in tasks} == {"openai/gsm8k"}
    for i, (task, row) in enumerate(zip(tasks, published)):
        assert task.prompt[0].content.startswith(row["question"] + "\n")
        assert "####" in task.prompt[0].content
        assert task.extra["extra_info"] == {"split": "test", "index": i, **row}
        assert task.extra["ability"] == "math"


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("x\n#### 1,234", "1234"),
        ("#### -5", "-5"),
        ("#### $2.50 ", "2.50"),
        ("so 3", None),
        ("#### 3 apples", None),
    ],
)
def test_gsm8k_final_numbers(answer, number):
    row = {"question": "q", "answer": answer}
    if number is None:
        with pytest.raises(DataError, match="line 4: the answer does not end in"):
            verl_row(row, "train", 3, where="line 4")
    else:
        assert verl_row(row, "train", 3, where="line 4")["reward_model"]["ground_truth"] == number


def test_gsm8k_rows_without_the_published_columns_are_refused():
    with pytest.raises(DataError, match="line 1: expected the texts 'question' and 'answer'; columns: q"):
        verl_row({"q": "x"}, "train", 0, where="line 1")


@pytest.fixture(scope="module")
def spelling():
    spec = importlib.util.spec_from_file_location("spelling_example", ROOT / "examples" / "spelling.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_demos_three_sets_share_no_prompt(spelling):
    held_out = {r["prompt"] for r in spelling.words("held_out")}
    assert len(held_out) == 256
    assert held_out == {r["prompt"] for r in spelling.words("held_out", seed=5)}
    for seed in (0, 5):
        demos = {r["prompt"] for r in spelling.demonstrations(seed=seed)}
        pool = {r["prompt"] for r in spelling.words("pool", seed=seed)}
        assert (len(demos), len(pool)) == (6000, 3900)
        assert len(demos | pool | held_out) == 6000 + 3900 + 256
        assert all(
            p[:-1].isalpha() and p[:-1].islower() and 3 <= len(p) - 1 <= 5 for p in demos | pool | held_out
        )


def test_the_demos_teacher_is_right_as_often_as_told(spelling):
    rows = spelling.demonstrations(seed=1)
    right = [r["response"] == r["prompt"][-2::-1] for r in rows if r["prompt"][:-1] != r["prompt"][-2::-1]]
    assert all(r["response"] in (r["prompt"][:-1], r["prompt"][-2::-1]) for r in rows)
    assert abs(sum(right) / len(right) - 0.4) < 4 * (0.24 / len(right)) ** 0.5
    assert all(r["response"] == r["answer"] for r in spelling.demonstrations(count=20, right_share=1.0))
    assert all(r["response"] == r["prompt"][:-1] for r in spelling.demonstrations(count=20, right_share=0.0))
    assert spelling.demonstrations(count=20, seed=1) == rows[:20]


def test_the_demos_rows_are_scored_by_the_verifier(spelling, tokenizer):
    import reasoning_gym

    source = SourceConfig(
        function=f"{ROOT}/examples/spelling.py:words", arguments={"split": "held_out", "count": 40}
    )
    for task in eval_tasks([source], DataConfig(), tokenizer=tokenizer):
        score = reasoning_gym.get_score_answer_fn(task.extra["reasoning_gym"])
        assert score(task.prompt[-2::-1], task.extra["entry"]) == 1.0
        assert score(task.answer + "zz", task.extra["entry"]) < 1.0
