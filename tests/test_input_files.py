"""Data files and model folders that are not what they should be end in an error that names the file, and soon."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fuzz.readers import model_folder
from whet import inputs
from whet.config.schema import ModelConfig, SourceConfig, TokenizerConfig
from whet.data import files, parquet, timed
from whet.data.chat import encode_texts
from whet.data.columns import parse
from whet.data.rows import read_rows
from whet.data.tokenizer import load_tokenizer
from whet.models.load import build
from whet.types import CheckpointError, ConfigError, DataError


def test_a_data_file_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.jsonl")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    for name, says in (("fifo.jsonl", "is a FIFO"), ("zero.json", "is a device")):
        with pytest.raises(DataError, match=rf"{name} {says}.*expected a file"):
            read_rows(SourceConfig(path=str(tmp_path / name)))


def test_a_line_without_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_ROW_BYTES", 2**20)
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n' + b" " * 2**21)
    with pytest.raises(DataError, match=r"a.jsonl, line 2: has more than 1 MiB"):
        read_rows(SourceConfig(path=str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"prompt": ' + "[" * 60 + "]" * 60 + "}", "line 1: lists and mappings nest more than 50 levels"),
        ('{"answer": 1e999}', "line 1: a number is too large for 64-bit"),
        ('{"answer": ' + "9" * 5000 + "}", "line 1: not JSON: Exceeds the limit"),
        ('{"answer": NaN}', "line 1: not JSON: NaN is not a JSON value; write null, or leave it out"),
        ('{"x": [1, -Infinity]}', "line 1: not JSON: -Infinity is not a JSON value"),
        ('{"answer": 1, "answer": 2}', "line 1: not JSON: the key 'answer' is given twice in one object"),
        ('{"x": {"a": 1, "b": 2, "a": 1}}', "line 1: not JSON: the key 'a' is given twice"),
    ],
)
def test_rows_are_read_within_limits(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(DataError, match=says):
        read_rows(SourceConfig(path=str(tmp_path / "a.jsonl")))


def test_a_key_that_is_given_twice_is_found_without_comparing_all_with_all() -> None:
    """A line may have a million keys, the last one twice."""
    compared = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    names = [*map(str, range(2000)), "1999"]
    with pytest.raises(ValueError, match="'1999' is given twice"):
        # json makes plain texts of keys, whose comparisons nobody can count
        inputs._object([(Name(name), None) for name in names])
    assert compared < 10 * len(names)


def test_half_of_a_surrogate_pair_in_the_bytes_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a\xed\xa0\x80"}')
    with pytest.raises(
        DataError, match=r"line 1: not UTF-8 text: .utf-8. codec can.t decode byte 0xed in position 13"
    ):
        read_rows(SourceConfig(path=str(tmp_path / "a.jsonl")))


LONG = pa.DictionaryArray.from_arrays(pa.array([0] * 5_000, pa.int32()), pa.array(["x" * 10_000]))
NULLS = pa.ListArray.from_arrays(pa.array([0, 10_000_000], pa.int32()), pa.nulls(10_000_000, pa.int8()))


@pytest.mark.parametrize("name", ["prompt", "prompt.text"])
@pytest.mark.parametrize("column", [LONG, NULLS], ids=["one text many times", "one list of nothing"])
def test_a_small_parquet_file_does_not_fill_the_memory(
    column: pa.Array, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    by_batches = pq.ParquetFile.iter_batches

    def batches(self: pq.ParquetFile, rows: int, **how: Any) -> Any:
        asked.append(rows)
        return by_batches(self, rows, **how)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", batches)
    monkeypatch.setattr(parquet, "ROOM", 2**24)
    pq.write_table(pa.table({name: column}), tmp_path / "a.parquet", store_schema=False)
    assert (tmp_path / "a.parquet").stat().st_size < 1000
    with pytest.raises(
        DataError, match=r"a.parquet: its rows take more than 16 MiB in memory, \d+ times the file"
    ):
        read_rows(SourceConfig(path=str(tmp_path / "a.parquet")))
    assert max(asked, default=0) <= 2**24 // 10_000  # no more rows at once than there is room for


def test_of_a_parquet_file_no_more_groups_are_kept_than_have_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"prompt": [*"abcdefgh"]}), tmp_path / "a.parquet", row_group_size=2)
    asked: list[int] = []
    by_batches = pq.ParquetFile.iter_batches

    def batches(self: pq.ParquetFile, rows: int, **how: Any) -> Any:
        asked.extend(how["row_groups"])
        return by_batches(self, rows, **how)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", batches)
    rows = read_rows(SourceConfig(path=str(tmp_path / "a.parquet"), limit=3))
    assert [row["prompt"] for row in rows.slice(0, len(rows))] == ["a", "b", "c"]
    assert asked == [0, 1]
    assert len(read_rows(SourceConfig(path=str(tmp_path / "a.parquet"), limit=99))) == 8


def test_a_parquet_file_without_any_column_that_is_read_tells_which_it_has(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: has none of the columns id, text; columns: prompt"):
        parquet.read_parquet(tmp_path / "a.parquet", ["id", "text"])


def test_a_parquet_file_whose_schema_was_changed_does_not_end_the_process(tmp_path: Path) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": ["a", "b"]}), sink, store_schema=False)
    optional, required = b"%\x02\x18\x06prompt", b"%\x00\x18\x06prompt"
    data = bytes(sink.getvalue().to_pybytes())
    assert optional in data
    (tmp_path / "a.parquet").write_bytes(data.replace(optional, required))
    with pytest.raises(
        DataError, match=r"a.parquet: not a readable parquet file: .*size mismatch.*\. If it was damaged"
    ):
        read_rows(SourceConfig(path=str(tmp_path / "a.parquet")))


def test_a_row_of_a_parquet_file_is_not_larger_than_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MOST_ROW_BYTES", 2**20)
    rows = [{"prompt": "a"}, {"prompt": "b" * 2**21}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match=r"a.parquet, row 2 of row group 0: has more than 1 MiB; is it a single row"
    ):
        read_rows(SourceConfig(path=str(tmp_path / "a.parquet")))


@pytest.mark.parametrize("inside", [False, True], ids=["a column", "lists"])
def test_a_row_is_not_larger_because_of_the_dictionary_that_it_shares(
    inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MOST_ROW_BYTES", 2**20)
    texts = [f"{n:050000}" for n in range(50)]
    x = pa.array([[t] for t in texts], pa.list_(pa.dictionary(pa.int32(), pa.string()))) if inside else texts
    column = x if inside else pa.array(texts).dictionary_encode()
    pq.write_table(pa.table({"prompt": texts, "x": column}), tmp_path / "a.parquet")
    found = read_rows(SourceConfig(path=str(tmp_path / "a.parquet")))
    assert found.row(49) == {"prompt": texts[49], "x": [texts[49]] if inside else texts[49]}
    many = pa.DictionaryArray.from_arrays(pa.array([0] * 30, pa.int32()), pa.array(["x" * 50_000]))
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 30], pa.int32()), many)
    pq.write_table(pa.table({"prompt": ["a", "b"], "x": lists}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet, row 2 of row group 0: has more than 1 MiB"):
        read_rows(SourceConfig(path=str(tmp_path / "a.parquet")))


def test_a_dictionary_is_not_written_out_to_look_for_strange_numbers(tmp_path: Path) -> None:
    """3000 rows of a text of a million characters: more than an array of texts can hold."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int32()), pa.array(["x" * 10**6]))
    pq.write_table(pa.table({"prompt": ["a"] * 3000, "x": column}), tmp_path / "a.parquet")
    assert len(read_rows(SourceConfig(path=str(tmp_path / "a.parquet")))) == 3000


@pytest.mark.parametrize("coded", [False, True], ids=["texts", "a dictionary"])
def test_a_compressed_stream_is_not_written_out(coded: bool, tmp_path: Path) -> None:
    """30 MB of text, as some hundred bytes in a folder of the `datasets` package."""
    datasets = pytest.importorskip("datasets", reason="the extra datasets is not installed")
    datasets.Dataset.from_dict({"prompt": ["a"]}).save_to_disk(tmp_path / "d")
    assert read_rows(SourceConfig(path=str(tmp_path / "d"))).row(0) == {"prompt": "a"}
    (file,) = (tmp_path / "d").glob("*.arrow")
    texts = pa.array(["x" * 10**7, "x" * 10**7, "y" * 10**7])
    batch = pa.record_batch({"prompt": texts.dictionary_encode() if coded else texts})
    for compression in ("zstd", "lz4"):
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_stream(file, batch.schema, options=options) as out:
            out.write_batch(batch)
        with pytest.raises(
            DataError, match=r"\.arrow: its columns are compressed, or .* so a small file could fill"
        ):
            read_rows(SourceConfig(path=str(tmp_path / "d")))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match=r"\.arrow: not a readable Arrow stream"):
        read_rows(SourceConfig(path=str(tmp_path / "d")))
    (tmp_path / "d" / "state.json").write_text('{"_data_files": [{"filename": "../other.arrow"}]}')
    with pytest.raises(DataError, match=r"_data_files has '../other.arrow'; expected names of files in"):
        read_rows(SourceConfig(path=str(tmp_path / "d")))


@pytest.mark.parametrize("inside", [False, True], ids=["a column", "lists"])
@pytest.mark.parametrize("shared", ["dictionary", "views"])
def test_a_stream_whose_rows_share_their_texts_is_not_written_out(
    shared: str, inside: bool, tmp_path: Path
) -> None:
    """3 GB of text, as 1 MB in a folder of the `datasets` package."""
    datasets = pytest.importorskip("datasets", reason="the extra datasets is not installed")
    datasets.Dataset.from_dict({"prompt": ["a"]}).save_to_disk(tmp_path / "d")
    (file,) = (tmp_path / "d").glob("*.arrow")
    rows, text = 3000, b"x" * 10**6
    if shared == "views":
        views = struct.pack("<i4sii", len(text), text[:4], 0, 0) * rows
        buffers = [None, pa.py_buffer(views), pa.py_buffer(text)]
        column = pa.Array.from_buffers(pa.string_view(), rows, buffers)
    else:
        column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text.decode()]))
    if inside:
        column = pa.ListArray.from_arrays(pa.array([0, rows], pa.int32()), column)
    batch = pa.record_batch({"prompt": column})
    with pa.ipc.new_stream(file, batch.schema) as out:
        out.write_batch(batch)
    with pytest.raises(DataError, match=r"\.arrow: .* their rows share values .* save it as parquet"):
        read_rows(SourceConfig(path=str(tmp_path / "d")))


def test_a_struct_with_two_fields_of_a_name_is_refused(tmp_path: Path) -> None:
    twice = pa.StructArray.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["x", "x"])
    pq.write_table(pa.table({"prompt": ["a"], "answer": [[]], "z": twice}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"column 'z' holds a struct in which two fields have the name 'x'"):
        read_rows(SourceConfig(path=str(tmp_path / "a.parquet")))


def test_rows_of_many_groups_and_batches_are_those_that_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MOST_ROWS", 7)
    rows = [{"prompt": [{"role": "user", "content": str(n)}], "answer": n} for n in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=20)
    found = read_rows(SourceConfig(path=str(tmp_path / "a.parquet")))
    assert found.slice(0, 50) == rows


def test_a_parquet_file_without_the_rows_that_it_promises_is_refused(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet", store_schema=False
    )
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    at = data.index(b"prompt") + len(b"prompt")
    while data[at : at + 2] != b"\x16\x00":  # num_rows, a number of 64 bits: 0
        at += 1
    data[at + 1] = 2 * 9
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(
        DataError, match=r"a.parquet: has 0 rows, but its metadata lists 9; copy the file again"
    ):
        read_rows(SourceConfig(path=str(tmp_path / "a.parquet")))


@pytest.mark.parametrize(
    ("values", "kind", "path"),
    [
        ([0.5, None, float("nan")], pa.float64(), "x"),
        ([1.0, 2.0, float("inf")], pa.float16(), "x"),
        ([[1.0], [], [0.0, float("-inf")]], pa.list_(pa.float32()), "x.1"),
        ([{"a": 1.0}, None, {"a": float("nan")}], pa.struct({"a": pa.float64()}), "x.a"),
        ([1.0, 1.0, float("nan")], pa.dictionary(pa.int32(), pa.float64()), "x"),
    ],
)
def test_numbers_that_json_has_not_are_refused_in_every_format(
    values: list[Any], kind: pa.DataType, path: str, tmp_path: Path
) -> None:
    table = pa.table({"prompt": ["a", "b", "c"], "x": pa.array(values, kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    with pytest.raises(
        DataError, match=rf"a.parquet, row 3: column {path} holds -?(nan|inf), which is not a JSON"
    ):
        read_rows(SourceConfig(path=str(tmp_path / "a.parquet")))
    pq.write_table(table.slice(0, 2), tmp_path / "a.parquet")
    assert len(read_rows(SourceConfig(path=str(tmp_path / "a.parquet")))) == 2


def test_rows_of_the_config_are_looked_at_too() -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "x": [float("nan")]}]
    with pytest.raises(DataError, match=r"data.rows, row 2: column x.0 holds nan, which is not a JSON value"):
        read_rows(SourceConfig(rows=tuple(rows)))


def test_a_difficulty_too_large_for_a_float_is_named() -> None:
    source = SourceConfig(path="a.jsonl", difficulty="hard")
    with pytest.raises(
        DataError, match=r"a.jsonl, line 1: column 'hard' holds int .*expected a finite number"
    ):
        parse({"prompt": "a", "hard": 10**400}, source, name="a", chat=None, where="a.jsonl, line 1")


# ---------------------------------------------------------------- model folders


def folder(tmp_path: Path, name: str, change: Callable[[Any], object]) -> Path:
    """A good model folder with one JSON file changed."""
    for file, data in model_folder().items():
        (tmp_path / file).write_bytes(data)
    tree = json.loads(model_folder()[name])
    change(tree)
    (tmp_path / name).write_text(json.dumps(tree))
    return tmp_path


BOMB = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("tokenizer.json", {"normalizer": {"type": "Sequence", "normalizers": [BOMB] * 4}}, "one character into 1e.12"),
        ("tokenizer.json", {"normalizer": {**BOMB, "pattern": {"Regex": ""}}}, "turn one character into"),
        ("tokenizer.json", {"decoder": {"type": "Sequence", "decoders": [BOMB, BOMB]}}, "its decoder can turn"),
        ("tokenizer.json", {"added_tokens": [{"id": 10**12, "content": "x"}]}, "an added token has the id 1000"),
        ("tokenizer.json", {"model": None}, "Cannot read a tokenizer"),
        ("tokenizer_config.json", {"model_max_length": "null"}, "Cannot read a tokenizer"),
        ("tokenizer_config.json", {"unk_token": ""}, "Cannot read a tokenizer.*RecursionError"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_is_damaged_or_does_harm_is_refused(
    name: str, change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = folder(tmp_path, name, lambda tree: tree.update(change))
    if change == {"unk_token": ""}:
        config = path / "tokenizer_config.json"
        config.write_text('{"extra_special_tokens": ["<s>"], "unk_token": ""}')
    with pytest.raises(ConfigError, match=says):
        load_tokenizer(TokenizerConfig(), model_path=str(path))


TRIES = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            ("a" * 22 + "b") * 8,
            r"has not finished after 0 s with 1 texts, the longest of 184 characters",
        ),
        ("a" * 40 + "b", "failed: .*retry-limit.*An expression in its tokenizer.json"),
    ],
)
@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer"])
def test_an_expression_that_tries_too_many_ways_is_named(
    place: str, text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = (
        TRIES if place == "pre_tokenizer" else {"type": "Replace", "pattern": TRIES["pattern"], "content": ""}
    )
    path = folder(tmp_path, "tokenizer.json", lambda tree: tree.update({place: step}))
    found = load_tokenizer(TokenizerConfig(), model_path=str(path))
    if "not finished" in says:
        monkeypatch.setattr(timed, "PATIENCE_S", 0.05)
    with pytest.raises(ConfigError, match=rf"The tokenizer '{path}' {says}"):
        encode_texts(found, [text])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab_size": 10**8}, r"asks for about 3.2e\+09 parameters, the files hold"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000, expected a whole number from 1 to"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000, expected a whole number from 1 to 10000",
        ),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1, expected a whole number"),
        ({"hidden_size": "32"}, "hidden_size is '32', expected a whole number"),
        ({"pad_token_id": 9999}, "cannot load it: AssertionError"),
    ],
)
def test_a_config_json_of_another_or_no_model_is_refused_before_memory_is_taken(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = folder(tmp_path, "config.json", lambda tree: tree.update(change))
    with pytest.raises((ConfigError, CheckpointError), match=says):
        build(
            ModelConfig(path=str(path)),
            vocab_size=5,
            eos_token_id=1,
            pad_token_id=0,
            seed=0,
            device="cpu",
            dtype=torch.float32,
        )
