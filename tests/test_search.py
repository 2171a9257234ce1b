"""The search over documents: exactly the documents that it should find, in one order, whatever the query is."""

from __future__ import annotations

import json
import math
import os
import random
import re
import resource
import signal
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whet.data import parquet
from whet.envs import search as search_module
from whet.envs.arguments import section
from whet.envs.search import Documents, build, connect, search, search_texts, search_tool
from whet.guard.nursery import fork
from whet.types import ConfigError, DataError

ROWS = [
    {"id": "b", "title": "Cats", "text": "The cat sat on the mat."},
    {"id": "a", "title": "Dogs", "text": "The dog sat."},
    {"id": 3, "title": None, "text": "Zürich is a city; Ärger is not."},
    {"id": 20, "text": 'NEAR the river OR a "quoted" AND thing*'},
    {"id": "c", "text": "The dog sat.", "title": "Dogs"},
]


def documents(folder: Path, rows: list[dict[str, Any]] = ROWS, **over: Any) -> Documents:
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build.cache_clear()
    return Documents(path=str(path), folder=str(folder / "index"), **over)


def ids(index: Path, query: str, k: int = 10) -> list[str]:
    return [name for name, _, _ in search(index, query, k)]


def test_words_find_their_documents(tmp_path: Path) -> None:
    index = build(documents(tmp_path))
    assert search(index, "cat", 10) == [("b", "Cats", "The cat sat on the mat.")]
    assert ids(index, "dogs") == ["a", "c"]  # equal documents: the smaller id first
    assert ids(index, "CITY zurich") == ["3"]
    assert ids(index, "river") == ["20"]
    assert ids(index, "sat", 2) == ["a", "c"]  # shorter documents first
    assert ids(index, "elephant") == []


@pytest.mark.parametrize(
    "query",
    [
        '"', '"cat', "cat OR", "NEAR(", "NEAR(cat dog, 2)", "title:cat", "-cat", "ca*", "cat AND NOT cat", "^cat", "",
        "{title id}: cat", "'; DROP TABLE documents; --", "\0cat", "cat\ud800", "(", "+", "cat + cat", "🐈", "%s", "?1",
    ],
)  # fmt: skip
def test_the_syntax_of_fts5_is_only_words(tmp_path: Path, query: str) -> None:
    index = build(documents(tmp_path))
    words = {word.lower() for word in re.findall(r"\w+", query)}
    wanted = {
        str(row["id"])
        for row in ROWS
        if words & set(re.findall(r"\w+", f"{row.get('title') or ''} {row['text']}".lower()))
    }
    assert set(ids(index, query)) == wanted
    assert ids(index, "cat") == ["b"]


def test_the_order_is_that_of_bm25_by_hand(tmp_path: Path) -> None:
    """BM25 with k1 = 1.2 and b = 0.75, over title and text together, as SQLite computes it."""
    rng = random.Random(0)
    rows = [{"id": n, "text": " ".join(rng.choices("abcdefgh", k=rng.randrange(1, 12)))} for n in range(60)]
    index = build(documents(tmp_path, rows))
    tokens = {row["id"]: row["text"].split() for row in rows}
    mean = sum(map(len, tokens.values())) / len(tokens)

    def score(name: int, query: list[str]) -> float:
        total = 0.0
        for word in query:
            having = sum(word in words for words in tokens.values())
            weight = max(math.log((len(rows) - having + 0.5) / (having + 0.5)), 1e-6)
            times = tokens[name].count(word)
            total += weight * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * len(tokens[name]) / mean))
        return total

    for query in (["a"], ["b", "c"], ["d", "e", "f"]):
        found = [int(name) for name in ids(index, " ".join(query), 60)]
        wanted = [n for n in tokens if set(tokens[n]) & set(query)]
        assert sorted(found) == sorted(wanted)
        scores = [round(score(n, query), 9) for n in found]
        assert scores == sorted(scores, reverse=True)
        for (n, of_n), (m, of_m) in zip(zip(found, scores), list(zip(found, scores))[1:]):
            assert of_n > of_m or n < m


def test_an_index_is_built_once_and_by_what_is_in_it(tmp_path: Path) -> None:
    asked = documents(tmp_path)
    index = build(asked)
    before = index.stat()
    build.cache_clear()
    assert build(asked) == index
    assert index.stat().st_mtime_ns == before.st_mtime_ns
    other = build(documents(tmp_path, ROWS[:2]))
    assert other != index
    assert ids(other, "city") == []
    assert ids(index, "city") == ["3"]
    assert sorted(path.suffix for path in (tmp_path / "index").iterdir()) == [".sqlite", ".sqlite"]


def test_the_same_documents_in_parquet_are_the_same_index_of_another_name(tmp_path: Path) -> None:
    rows = [{**row, "id": str(row["id"]), "title": row.get("title")} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet", row_group_size=2)
    lines = build(documents(tmp_path, rows))
    columns = build(Documents(path=str(tmp_path / "d.parquet"), folder=str(tmp_path / "index")))
    for query in ("the", "sat cat", "zürich"):
        assert search(lines, query, 10) == search(columns, query, 10)


def test_many_may_build_at_once_and_each_reads_a_whole_index(tmp_path: Path) -> None:
    asked = documents(tmp_path, [{"text": f"word{n % 7} all"} for n in range(2000)])
    found: list[int] = []

    def work() -> None:
        found.append(len(search(build.__wrapped__(asked), "word3", 5000)))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [len(range(3, 2000, 7))] * 6
    assert len(list((tmp_path / "index").iterdir())) == 1


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    for rows, said in [
        ([{"id": 1, "text": "a"}, {"id": 1, "text": "b"}], "line 2: the id 1 occurs twice"),
        ([{"id": "1", "text": 5}], "line 1: column 'text' is int"),
        ([{"title": "x"}], "column 'text' is NoneType"),
        ([{"text": "x", "title": 3}], "'title' is int"),
        ([{"id": 1.5, "text": "x"}], "id is float; expected a text or an integer"),
        ([["text"]], "line 1: a row must be an object with named columns"),
    ]:
        with pytest.raises(DataError, match=said):
            build(documents(tmp_path, rows))  # type: ignore[arg-type]
        assert list((tmp_path / "index").iterdir()) == []
    with pytest.raises(DataError, match="cannot read"):
        build(Documents(path=str(tmp_path / "none.jsonl"), folder=str(tmp_path / "index")))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text"\n', "line 2: not JSON"),
        ("a.jsonl", b'{"text": "\xff"}\n', "line 1: not UTF-8 text: 'utf-8' codec"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: column text holds half of a surrogate pair"),
        ("a.jsonl", b'{"text": ' + b"[" * 9**5 + b"]" * 9**5 + b"}\n", "nest more than 50 levels deep"),
        ("a.parquet", b"PAR1, but no more", "not a readable parquet file"),
        ("a.jsonl", None, "is a FIFO"),
    ],
)
def test_documents_are_read_within_the_limits_of_data(
    name: str, content: bytes | None, said: str, tmp_path: Path
) -> None:
    if content is None:
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        build(Documents(path=str(tmp_path / name), folder=str(tmp_path / "index")))
    assert not [*tmp_path.glob("index/*")]


def test_what_a_killed_process_has_built_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = documents(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(
            search_module, "_write", lambda new, _: (new.touch(), os.kill(os.getpid(), signal.SIGKILL))
        )
        os.waitpid(fork(lambda: build(given)), 0)
    assert [path for path in (tmp_path / "index").rglob("*") if path.is_file()]
    index = build(given)
    assert [*(tmp_path / "index").iterdir()] == [index]


def test_an_index_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("a file")
    with pytest.raises(DataError, match=r"cannot be written to .*/index: .*File exists.*search.folder"):
        build(documents(tmp_path))
    (tmp_path / "index").unlink()
    text = "".join(f"{random.random()} " for _ in range(20_000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    asked = documents(tmp_path, [{"text": text}])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python has it, unless a library changes it
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        with pytest.raises(DataError, match=r"cannot be written to .*/index: .*search.folder"):
            build(asked)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "index").iterdir()) == []


def test_of_a_parquet_file_only_the_columns_of_documents_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ROOM", 2**20)
    more = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int32()), pa.array(["x" * 50_000]))
    table = pa.table({"id": range(3000), "text": [f"word{n}" for n in range(3000)], "more": more})
    file = tmp_path / "a.parquet"
    pq.write_table(table, file, store_schema=False)
    asked = Documents(path=str(file), folder=str(tmp_path / "index"))
    assert ids(build(asked), "word7") == ["7"]
    with pytest.raises(DataError, match=r"its rows take more than .* MiB in memory"):
        build(asked.model_copy(update={"text": "more"}))


def test_nobody_writes_to_an_index(tmp_path: Path) -> None:
    index = build(documents(tmp_path))
    connection = connect(index)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM documents")
    connection.close()
    os.chmod(index, 0o400)
    os.chmod(index.parent, 0o500)
    try:
        assert ids(index, "cat") == ["b"]
    finally:
        os.chmod(index.parent, 0o700)


def test_the_policy_is_told_of_the_best_ones(tmp_path: Path) -> None:
    asked = documents(tmp_path, results=1, most_results=4, document_chars=8)
    tool = search_tool(asked)
    assert tool.spec.parameters["required"] == ["query"]
    assert tool.call({"query": "sat"}) == ["[a] Dogs: The dog "]
    assert tool.call({"query": "zurich river", "k": 4}) == ["[3] Zürich i", "[20] NEAR the"]
    assert tool.wrong({"query": "sat", "k": 5}) == "argument 'k' is 5; expected at most 4"
    assert tool.wrong({"query": "sat", "k": 0}) == "argument 'k' is 0; expected at least 1"
    assert search_texts(asked, "elephant") == ["No document has any of these words."]


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"results": 0}, "results: got 0, expected a whole number >= 1"),
        ({"results": 11}, "results=11 is more than most_results=10"),
        ({"path": "x.csv"}, r"path='x.csv'; expected a file that ends in .jsonl or .parquet"),
        ({"name": "a b"}, "expected a name"),
    ],
)
def test_what_cannot_be_is_refused(over: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        section(Documents, {"path": "x.jsonl", **over})
