"""Reading of a run's records. A disk or a user may have changed them: a file that no run writes raises an error.

The returned values are checked: lines have their stage and step, numbers are numbers, rows have all columns. Only the
last line may be truncated, by a kill, and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from whet.config.parse import parse
from whet.config.tree import STAGE as STAGE
from whet.data.parquet import read_parquet, read_schema
from whet.inputs import (
    MOST_CONFIG_BYTES,
    MOST_JSON_BYTES,
    MOST_RECORD_BYTES,
    check_regular,
    parse_json,
    read_bytes,
    read_text,
)
from whet.types import DataError, Json, Message

ROLLOUTS = pa.schema(
    [
        ("uid", pa.int64()),
        ("index", pa.int32()),
        ("source", pa.string()),
        ("prompt", pa.string()),
        ("answer", pa.string()),
        ("text", pa.string()),
        ("extracted", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("advantage", pa.float64()),
        ("finish_reason", pa.string()),
        ("stop_reason", pa.string()),
        ("error", pa.string()),
        ("turns", pa.string()),
        ("messages", pa.string()),
        ("state", pa.string()),
        ("strand_tokens", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.int8())),
        ("logprobs", pa.list_(pa.float32())),
        ("sample_logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
    ]
)
"""Columns of a rollout file. `prompt` is for people: messages as 'role: content' lines; the exact prompt is
in `token_ids`, where `mask` is 0. The lists of tokens are those of all strands of a rollout, one after the other;
`strand_tokens` are their lengths. `turns` are its replies as JSON, each with the number of its strand, the place of its
tokens there and what is known of it (`types.Turn`). `messages`, as JSON, are what was said in an episode after the
prompt, `state` what its environment told rewards. `answer` is the task's, as JSON; `extracted` is what a reward took
from the reply. `advantage` is the mean over the sampled tokens."""

_MAY_BE_NULL = ("extracted", "reward", "advantage", "stop_reason", "error")
_PER_TOKEN = ("token_ids", "mask", "logprobs", "sample_logprobs", "versions")


def _without(schema: pa.Schema, *names: str) -> pa.Schema:
    return pa.schema([field for field in schema if field.name not in names])


_EARLIER = (
    _without(ROLLOUTS, "messages", "state"),
    _without(ROLLOUTS, "messages", "state", "stop_reason", "turns"),
    _without(ROLLOUTS, "messages", "state", "stop_reason", "turns", "strand_tokens"),
)
"""Of earlier files, which this release reads: without messages, without turns, or with one strand a rollout."""
_BY = "; is the file from another program, or damaged?"


# ---------------------------------------------------------------- lines


def read_lines(path: Path) -> list[dict[str, Json]]:
    """The lines of metrics.jsonl or timings.jsonl, null as NaN; without a truncated last line."""
    if not path.exists():
        return []
    check_regular(path, DataError, most=MOST_RECORD_BYTES)
    return _numbers(lines(path), path)


def read_more(path: Path, start: int, first: int) -> tuple[list[dict[str, Json]], int]:
    """`read_lines` from byte `start` on, which is line `first`; and the byte after the last whole line."""
    check_regular(path, DataError, most=start + MOST_RECORD_BYTES)
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    return _numbers(parsed(whole, path, first), path, first), start + len(whole)


def _numbers(
    found: Iterator[tuple[bytes, dict[str, Json]]], path: Path, first: int = 1
) -> list[dict[str, Json]]:
    out = []
    for number, (_, line) in enumerate(found, start=first):
        numbers = {k: math.nan if v is None else v for k, v in line.items()}
        if odd := [k for k, v in numbers.items() if k not in ("stage", "step") and not _is_number(v)]:
            raise DataError(
                f"{path} line {number}: {odd[0][:100]!r} is {str(line[odd[0]])[:60]!r}, expected a number{_BY}"
            )
        out.append(numbers)
    return out


def lines(path: Path, most: int | None = None) -> Iterator[tuple[bytes, dict[str, Json]]]:
    """(bytes, parsed) of each whole line, in the first `most` bytes; only the last may be broken, else the file was
    tampered with."""
    check_regular(path, DataError)
    return parsed(path.read_bytes()[:most], path)


def parsed(data: bytes, path: Path, first: int = 1) -> Iterator[tuple[bytes, dict[str, Json]]]:
    """`lines` of what was read from a file, from line `first` on."""
    raw = data.splitlines(keepends=True)
    for number, line in enumerate(raw, start=first):
        try:
            value = parse_json(line, "", DataError)
        except DataError as e:
            if number == first + len(raw) - 1 and not line.endswith(b"\n"):
                return
            raise DataError(f"{path} line {number} is not JSON{str(e).removeprefix(': not JSON')}") from e
        if not isinstance(value, dict) or not _is_place(value.get("stage"), value.get("step")):
            raise DataError(f"{path} line {number} does not name its stage and step{_BY}")
        if line.endswith(b"\n"):
            yield line, value


def _is_place(stage: Json, step: Json) -> bool:
    named = isinstance(stage, str) and STAGE.fullmatch(stage) is not None
    return named and type(step) is int and 0 <= step < 2**63


def _is_number(value: Json) -> bool:
    """One that a float can hold; NaN is one."""
    return type(value) is float or (type(value) is int and abs(value) < 2**64)


# ---------------------------------------------------------------- rollouts


def read_table(path: Path, columns: Collection[str] | None = None) -> pa.Table:
    """A rollout or evaluation file with the columns of `ROLLOUTS`, or these of them: an earlier file, too. The values
    are those of the file; `rows_of` checks them."""
    schema = read_schema(path)
    if not any(schema.equals(known) for known in (ROLLOUTS, *_EARLIER)):
        odd = [f.name for f in ROLLOUTS if f not in list(schema)] or ["more columns than a run writes"]
        raise DataError(f"{path} is not a file of rollouts: {', '.join(odd)}{_BY}")
    wanted = [name for name in ROLLOUTS.names if columns is None or name in columns]
    absent = [name for name in wanted if name not in schema.names]
    needs = {"token_ids"} if "strand_tokens" in absent else set()
    table = read_parquet(path, {*wanted, *needs} - {*absent})
    arrays = [_as_earlier(name, table) if name in absent else table[name] for name in wanted]
    return pa.table(arrays, schema=pa.schema([ROLLOUTS.field(name) for name in wanted]))


def _as_earlier(name: str, table: pa.Table) -> pa.Array:
    """A column that an earlier file does not have."""
    kind, rows = ROLLOUTS.field(name).type, table.num_rows
    if name == "strand_tokens":
        lengths = pc.fill_null(pc.list_value_length(table["token_ids"]), 0).combine_chunks()
        return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32)), lengths, type=kind)
    return pa.array([{"messages": "[]", "turns": "[]", "state": "null"}.get(name)] * rows, kind)


def read_rollouts(path: Path) -> list[dict[str, Json]]:
    """The rows of a rollout or evaluation file; `answer` parsed and `reward_parts` a dict."""
    return rows_of(read_table(path), path)


def rows_of(table: pa.Table, path: Path, *, first: int = 0) -> list[dict[str, Json]]:
    """Rows of `read_table` as `read_rollouts` gives them; they begin with row `first` of the file."""
    try:
        rows: list[dict[str, Json]] = table.to_pylist(maps_as_pydicts="strict")
    except (KeyError, ValueError) as e:  # a map has a key twice, or none
        raise DataError(f"{path}: reward_parts cannot be read: {e}") from e
    for number, row in enumerate(rows, start=first + 1):
        lists = [row[name] for name in _PER_TOKEN]
        empty = [name for name, value in row.items() if value is None and name not in _MAY_BE_NULL]
        empty += [name for name, values in zip(_PER_TOKEN, lists) if values is not None and None in values]
        if empty or None in row["reward_parts"].values():
            raise DataError(f"{path}, row {number}: {(empty or ['reward_parts'])[0]} is null{_BY}")
        if len(set(map(len, lists))) > 1:
            raise DataError(f"{path}, row {number}: {', '.join(_PER_TOKEN)} differ in length{_BY}")
        if None in row["strand_tokens"] or sum(row["strand_tokens"]) != len(row["token_ids"]):
            raise DataError(f"{path}, row {number}: strand_tokens does not add up to its tokens{_BY}")
        for name in ("answer", "turns", "messages", "state"):
            where = f"{path}, row {number}, {name}"
            row[name] = parse_json(row[name].encode(), where, DataError, constants=True)
        for name, known in (("turns", _is_turn), ("messages", _is_message)):
            if not isinstance(row[name], list) or not all(map(known, row[name])):
                raise DataError(f"{path}, row {number}: {name} is not a list of {name}{_BY}")
    return rows


def _is_turn(value: Json) -> bool:
    return isinstance(value, dict) and all(type(value.get(place, 0)) is int for place in ("start", "end"))


def _is_message(value: Json) -> bool:
    try:
        message = Message.from_json(value)
    except (ValueError, TypeError, LookupError, AttributeError):
        return False
    texts = (message.role, message.content, message.reasoning or "")
    return all(isinstance(text, str) for text in texts)


def list_steps(folder: Path) -> list[tuple[str, int, Path]]:
    """(stage, step, path) of the rollout files in a folder, by stage and step. Files of other names are no run's."""
    found = []
    for path in folder.glob("*.parquet"):
        stage, mark, step = path.stem.rpartition("-step-")
        if mark and step.isascii() and step.isdigit() and _is_place(stage, int(step)):
            found.append((stage, int(step), path))
    return sorted(found)


# ---------------------------------------------------------------- config and manifest


def read_config(run_dir: Path) -> dict[str, Json]:
    """config.yaml as plain values, {} where there is none. Stages are mappings, and so are the sections that are
    shown."""
    path = run_dir / "config.yaml"
    if not path.exists():
        return {}
    found = parse(read_text(path, DataError, most=MOST_CONFIG_BYTES))
    for line, said in found.problems:
        raise DataError(f"{path}:{line}: {said}")
    return _config(found.tree, str(path))


def _config(tree: Json, where: str) -> dict[str, Json]:
    if not isinstance(tree, dict):
        raise DataError(f"{where}: expected the sections of a config{_BY}")
    out = {k: v for k, v in tree.items() if v is not None}
    for name in ("model", "algorithm", "eval", "rollout", "checkpoint"):
        if not isinstance(out.get(name, {}), dict):
            raise DataError(f"{where}: {name} is {str(out[name])[:60]!r}, expected a section{_BY}")
    stages = out.get("stages", [])
    if not isinstance(stages, list):
        raise DataError(f"{where}: stages is {str(stages)[:60]!r}, expected a list{_BY}")
    return {**out, "stages": [_config(stage, f"{where}: stages[{n}]") for n, stage in enumerate(stages)]}


def read_manifest(run_dir: Path) -> dict[str, Json]:
    """manifest.json, {} where there is none: `starts`, each an object, and `changes`, each with all its entries."""
    path = run_dir / "manifest.json"
    if not path.exists():
        return {}
    text = read_bytes(path, DataError, most=MOST_JSON_BYTES)
    try:
        found = parse_json(text, str(path), DataError)
    except DataError as e:
        raise DataError(f"{e if text else f'{path} is empty'}{_MOVE}") from e
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected a JSON object{_MOVE}")
    for name, entry in (("starts", _is_start), ("changes", _is_change)):
        values = found.get(name, [])
        if not isinstance(values, list) or (name == "starts" and name in found and not values):
            raise DataError(f"{path}: {name} is {str(values)[:60]!r}, expected a list{_MOVE}")
        for number, value in enumerate(values):
            if not entry(value):
                raise DataError(
                    f"{path}: {name}[{number}] is {str(value)[:60]!r}, which no run writes{_MOVE}"
                )
    return found


_MOVE = f"{_BY} Put a copy of it back, or move it away: the run goes on without the record of its starts"


_MAPS = ("packages", "code_sha256", "data_sha256", "arithmetic", "environment")
"""Entries of a start that are objects; an earlier one has not all of them."""


def _is_start(value: Json) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name, {}), dict) for name in _MAPS)


def _is_change(value: Json) -> bool:
    if not isinstance(value, dict) or not {"key", "kind", "old", "new"} <= value.keys():
        return False
    texts = isinstance(value["key"], str) and isinstance(value["kind"], str)
    return texts and _is_place(value.get("stage"), value.get("step"))
