"""Rollouts as the pages show them: columns of summaries, one rollout whole, a group, a search."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from whet.config.tree import leaves
from whet.data.timed import decoded
from whet.track import turn_seconds
from whet.track.overview import setting
from whet.track.record import SECONDS
from whet.track.written import read_table, rows_of
from whet.types import DataError, Json, Message
from whet.view.batches import per_token
from whet.view.runs import commands
from whet.view.source import Ask, NotThere, Shown, finite, tried

SHORT = 80
"""Characters of a prompt and a reply in a summary."""
SHORT_ERROR = 160
MOST_HITS = 5000
"""Of a search."""
PIECE_WINDOW = 16
"""Tokens that are decoded together to find the text of one: a character may have several."""

_READ = (
    "uid", "index", "source", "prompt", "text", "reward", "advantage", "finish_reason", "stop_reason", "error",
    "turns", "mask",
)  # fmt: skip


# ---------------------------------------------------------------- summaries


def summaries(path: Path) -> pa.Table:
    """A row for each rollout of a file, with what a list shows of it."""
    table = read_table(path, _READ).combine_chunks()
    turns = [_of_turns(text, path) for text in table["turns"].to_pylist()]
    return pa.table(
        {
            "row": pa.array(range(table.num_rows), pa.int32()),
            "uid": table["uid"],
            "index": table["index"],
            "source": table["source"],
            "reward": _no_nan(table["reward"]),
            "advantage": _no_nan(table["advantage"]),
            "tokens": sampled(table["mask"]),
            "turns": pa.array([n for n, _, _ in turns], pa.int32()),
            "finish_reason": table["finish_reason"],
            "stop_reason": table["stop_reason"],
            "calls": pa.array([n for _, n, _ in turns], pa.int32()),
            "malformed": pa.array([n for _, _, n in turns], pa.int32()),
            "fault": pc.utf8_slice_codeunits(table["error"], 0, SHORT_ERROR),
            "prompt": pc.utf8_slice_codeunits(table["prompt"], 0, SHORT),
            "text": pc.utf8_slice_codeunits(table["text"], 0, SHORT),
            "group_reward_mean": _group_means(table["uid"], table["reward"]),
        }
    )


def _of_turns(text: str | None, path: Path) -> tuple[int, int | None, int | None]:
    """Turns of a rollout; its calls and its malformed replies, None where there are no tools."""
    if text is None or text == "[]":
        return 0, None, None
    try:
        turns = json.loads(text)  # of each rollout of a run: `parse_json` is many times slower
    except (ValueError, RecursionError) as e:
        raise DataError(f"{path}: turns is not JSON: {e}") from e
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(
            f"{path}: turns is not a list of turns; is the file from another program, or damaged?"
        )
    calls = [n for turn in turns if isinstance(n := turn.get("calls"), int)]
    if not calls:
        return len(turns), None, None
    return len(turns), min(sum(calls), 2**31 - 1), sum(turn.get("malformed") is not None for turn in turns)


def flat(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """(values of all rows, where each row begins and the last ends) of a column of lists; a null is 0, or NaN."""
    lists = column.combine_chunks()
    values = lists.flatten()
    if not pa.types.is_floating(values.type):
        values = pc.fill_null(values, pa.scalar(0).cast(values.type))
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return values.to_numpy(zero_copy_only=False), np.concatenate([[0], np.cumsum(lengths)])


def sampled(mask: pa.ChunkedArray) -> pa.Array:
    """Sampled tokens of each rollout."""
    values, ends = flat(mask)
    sums = np.concatenate([[0], np.cumsum(values != 0, dtype=np.int64)])
    return pa.array(sums[ends[1:]] - sums[ends[:-1]], pa.int64())


def _no_nan(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.if_else(pc.is_finite(column), column, pa.scalar(None, column.type))


def _group_means(uid: pa.ChunkedArray, reward: pa.ChunkedArray) -> pa.Array:
    """For each rollout the mean reward of the scored ones of its task; None if there is none."""
    rewards = pc.cast(reward, pa.float64()).to_numpy(zero_copy_only=False)
    _, group = np.unique(pc.fill_null(uid, -1).to_numpy(), return_inverse=True)
    scored = np.isfinite(rewards)
    count = np.bincount(group[scored], minlength=group.max(initial=-1) + 1)
    total = np.bincount(group[scored], rewards[scored], minlength=len(count))
    means = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
    return pa.array(means[group], from_pandas=True)


def columns_of(table: pa.Table) -> dict[str, Json]:
    """A table as JSON by column; texts that are often the same as values and codes."""
    return {name: _column(table[name]) for name in table.column_names}


def _column(column: pa.ChunkedArray) -> Json:
    if not pa.types.is_string(column.type):
        return column.to_pylist()
    encoded = column.combine_chunks().dictionary_encode()
    if len(encoded.dictionary) > len(column) / 2:
        return column.to_pylist()
    return {"values": encoded.dictionary.to_pylist(), "codes": pc.fill_null(encoded.indices, -1).to_pylist()}


def listed(ask: Ask) -> Json:
    """Summaries of one step, or of all steps of all stages."""
    run = ask.run
    if ask.get("files") == "all":
        return all_summaries(run)
    stage, step = ask.stage, ask.number("step")
    table = run.kept(summaries, run.file(stage, step, ask.folder))
    return {"stage": stage, "step": step, "columns": columns_of(table)}


def all_summaries(run: Shown, steps: Mapping[str, Collection[int]] | None = None) -> Json:
    """Summaries of all stages, of all their steps or of these."""
    tables, problems = [], list[str]()
    tried(problems, run.look, None)
    tried(problems, lambda: run.lines("metrics.jsonl"), None)
    for stage, step, path in run.files():
        if steps is not None and step not in steps.get(stage, ()):
            continue
        if (table := tried(problems, partial(run.kept, summaries, path), None)) is None:
            continue
        place = {"stage": pa.array([stage] * len(table)), "step": pa.array([step] * len(table), pa.int64())}
        tables.append(pa.table({**place, **{name: table[name] for name in table.column_names}}))
    columns = columns_of(pa.concat_tables(tables)) if tables else {}
    if columns:
        columns["step"] = _codes(columns["step"])
    return {"columns": columns, "problems": problems}


def _codes(values: list[Json]) -> Json:
    known = {value: code for code, value in enumerate(dict.fromkeys(values))}
    return {"values": list(known), "codes": [known[value] for value in values]}


# ---------------------------------------------------------------- one rollout


def rollout(ask: Ask) -> Json:
    """One rollout whole."""
    run, stage, step, row = ask.run, ask.stage, ask.number("step"), ask.number("row")
    path = run.file(stage, step, ask.folder)
    table = run.table(path)
    if row >= table.num_rows:
        raise NotThere(f"{path} has rows 0 to {table.num_rows - 1}, no row {row}")
    return whole(run, stage, step, [row], table, path)[0]


def group(ask: Ask) -> Json:
    """The rollouts of one task in a step."""
    run, stage, step, uid = ask.run, ask.stage, ask.number("step"), ask.number("uid")
    path = run.file(stage, step, ask.folder)
    table = run.table(path)
    places = _rows_of_task(table, uid)
    if not places:
        raise NotThere(f"{path} has no rollout of task {uid}")
    rows = whole(run, stage, step, places, table, path)
    return {"rows": rows, "note": _note(run, stage, step, rows)}


def _rows_of_task(table: pa.Table, uid: int) -> list[int]:
    return np.flatnonzero(pc.fill_null(table["uid"], -1).to_numpy() == uid).tolist()


def _note(run: Shown, stage: str, step: int, rows: Sequence[dict[str, Json]]) -> str:
    """What the record knows of rollouts of the step that it does not have."""
    asked = setting(run.config, stage, ("rollout", "group_size"))
    said = [f"{len(rows)} rollouts of this task are in the record of the step"]
    if isinstance(asked, int) and asked != len(rows):
        said[0] += f"; rollout.group_size is {asked}"
    if failed := sum(row["error"] is not None for row in rows):
        has = "has" if failed == 1 else "have"
        said.append(f"{failed} {has} no reward, because of a fault: counted, and not trained on")
    lines = [x for x in run.lines("metrics.jsonl") if (x["stage"], x["step"]) == (stage, step)]
    dropped = {
        name.removeprefix("ledger/rejected/").removesuffix("_rollouts"): n
        for line in lines
        for name, n in line.items()
        if name.startswith("ledger/rejected/") and n
    }
    if dropped:
        reasons = ", ".join(f"{reason} {n:.0f}" for reason, n in sorted(dropped.items()))
        said.append(
            f"dropped in this step, of all tasks: {reasons}; those that were finished are in the record, without an "
            "advantage"
        )
    return ". ".join(said) + "."


def whole(
    run: Shown, stage: str, step: int, places: Sequence[int], table: pa.Table, path: Path
) -> list[dict[str, Json]]:
    """Rows of a file with all their columns, what a token says, and what else the pages show."""
    tokenizer, out, folder = run.tokenizer, [], path.parent.name
    groups: dict[int, Json] = {}
    for place in places:
        row = rows_of(table.slice(place, 1), path, first=place)[0]
        uid = row["uid"]
        if uid not in groups:
            groups[uid] = _group_of(table, uid)
        out.append(
            {
                "stage": stage,
                "step": step,
                "row": place,
                "rows": table.num_rows,
                **row,
                **(per_token(run, stage, step, row) if folder == "rollouts" else {}),
                "seconds": _seconds(run, stage, step, row) if folder == "rollouts" else None,
                "group": groups[uid],
                "pieces": _strand_pieces(row, tokenizer) if tokenizer is not None else None,
                "commands": commands(run, stage, step, uid, row["index"]),
            }
        )
    return out


def _seconds(run: Shown, stage: str, step: int, row: Mapping[str, Json]) -> Json:
    """Of each reply of a rollout: sampled, environment. None where the record has none that can be read."""
    try:
        told = run.kept(turn_seconds.read, run.file(stage, step, SECONDS)).get((row["uid"], row["index"]))
    except (DataError, NotThere):
        return None
    return None if told is None else [[finite(one) for one in pair] for pair in told]


def _group_of(table: pa.Table, uid: int) -> Json:
    rows = _rows_of_task(table, uid)
    some = table.select(["reward", "index"]).take(rows)
    return {"rows": rows, "rewards": some["reward"].to_pylist(), "indices": some["index"].to_pylist()}


def _strand_pieces(row: dict[str, Any], tokenizer: Tokenizer) -> list[list[str]]:
    ends = list(accumulate(row["strand_tokens"]))
    return [pieces(row["token_ids"][end - n : end], tokenizer) for end, n in zip(ends, row["strand_tokens"])]


def pieces(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """The text of each token; joined they are the text of all.

    A character whose bytes are in several tokens is given to the last of them. Tokens below 0 stand for no text. Of
    more than `PIECE_WINDOW` tokens that are no text at all, the characters in their place may be others.
    """
    out: list[str] = []
    begun = 0
    """First token whose text is not given yet."""
    context = 0
    """Where decoding begins: what precedes a token may change its text (a blank at the start)."""
    for place, token in enumerate(token_ids):
        if token < 0:
            out.append("")
            begun = context = place + 1
            continue
        before = decoded(tokenizer, token_ids[context:begun], skip_special_tokens=False)
        now = decoded(tokenizer, token_ids[context : place + 1], skip_special_tokens=False)
        if now.endswith("\ufffd") and place + 1 - begun < PIECE_WINDOW and place + 1 < len(token_ids):
            out.append("")
            continue
        out.append(now[len(before) :])
        context, begun = begun, place + 1
    return out


# ---------------------------------------------------------------- search


def search(ask: Ask) -> Json:
    """Rollouts with a text in their prompt, reply or messages, whatever the case of its letters; and the files
    that cannot be searched, as problems."""
    run, text, problems = ask.run, ask.text("q"), list[str]()
    step = ask.number("step") if ask.get("step") else None
    hits: list[Json] = []
    for stage, number, path in run.files(stage=ask.stage if ask.get("stage") else None):
        if step in (None, number):
            found = np.flatnonzero(tried(problems, partial(_matches, path, text), np.zeros(0, bool)))
            hits += [[stage, number, int(row)] for row in found[: MOST_HITS + 1 - len(hits)]]
        if len(hits) > MOST_HITS:
            return {"hits": hits[:MOST_HITS], "complete": False, "problems": problems}
    return {"hits": hits, "complete": True, "problems": problems}


def _matches(path: Path, text: str) -> np.ndarray:
    table = read_table(path, ("prompt", "text", "messages"))
    written = json.dumps(text, ensure_ascii=False)[1:-1]  # messages are JSON
    found = _has(table["prompt"], text) | _has(table["text"], text)
    perhaps = np.flatnonzero(~found & _has(table["messages"], written))  # or in the names of JSON's fields
    messages = table["messages"].take(perhaps).to_pylist()
    found[perhaps] = _has(pa.array([_said(one, path) for one in messages], pa.string()), text)
    return found


def _has(texts: pa.Array | pa.ChunkedArray, text: str) -> np.ndarray:
    hit = pc.match_substring(texts, text.encode("utf-8", "replace").decode(), ignore_case=True)
    return pc.fill_null(hit, False).to_numpy(zero_copy_only=False)


def _said(written: str, path: Path) -> str:
    """What messages say: thoughts, contents, calls with their arguments, and whose result it is."""
    said: list[str | None] = []
    try:
        for m in map(Message.from_json, json.loads(written)):
            said += [m.reasoning, m.content, m.name, m.tool_call_id, m.malformed]
            for call in m.tool_calls:
                said += [
                    call.name,
                    *(str(one) for at, value in leaves(call.arguments) for one in (*at, value)),
                ]
        return "\n".join(filter(None, said))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as e:
        raise DataError(f"{path}: messages is not a list of messages: {e}; is it damaged?") from e
