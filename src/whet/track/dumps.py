"""Rollouts, evaluations and batches once more, for other programs: at paths of the user's, as JSON lines or parquet.

A path is a template: {step} stands for the step, {stage} for the stage's name, and {source} makes a file for each
source. Its suffix sets the format. Rows have verl's names: input, output, gts,
score, step, and the parts of the reward, each by its own name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from whet.seeds import permutation
from whet.types import Json, Message, Metrics, Rollout

SOURCE = "{source}"
TOTAL = "aggregated_results"
"""Stands for {source} in the path of an evaluation's numbers."""

Row = dict[str, Json]


def files(
    template: str, *, stage: str, step: int, rows: Sequence[Row], numbers: Metrics | None = None
) -> Iterator[tuple[Path, bytes]]:
    """(path, content) of each file of a step. `numbers`, of an evaluation, make one of their own beside {source}."""
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(_plain(str(row["source"])) if SOURCE in template else "", []).append(row)
    if SOURCE in template and numbers is not None:
        parts.setdefault(TOTAL, []).append({"step": step, "stage": stage, **numbers})
    for source, own in parts.items():
        path = _path(template.replace(SOURCE, source), stage, step)
        yield path, encoded(own, path.suffix)


def batch_file(template: str, *, stage: str, step: int, table: pa.Table) -> tuple[Path, bytes]:
    """(path, content) of the training data of a step: a row for each rollout (`batches.to_table`)."""
    path = _path(template, stage, step)
    return path, parquet_bytes(table) if path.suffix == ".parquet" else encoded(
        table.to_pylist(), path.suffix
    )


def _path(template: str, stage: str, step: int) -> Path:
    return Path(template.replace("{stage}", stage).replace("{step}", str(step))).expanduser()


def is_named(path: Path, template: str, stage: str, step: int) -> bool:
    """Whether this is a file of a step that the template names, of whatever source."""
    named = str(_path(template.replace(SOURCE, "\0"), stage, step).absolute())
    source = r"(?!\.{1,2}(?:/|$))[\w.-]+"
    return re.fullmatch(source.join(map(re.escape, named.split("\0"))), str(path)) is not None


def encoded(rows: Sequence[Row], suffix: str) -> bytes:
    """Rows as the bytes of a .jsonl or .parquet file. A number that is not finite is null, as JSON has none."""
    finite = finite_json(rows)
    if suffix == ".jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in finite).encode()
    columns = {key: [row.get(key) for row in finite] for key in dict.fromkeys(k for row in rows for k in row)}
    return parquet_bytes(pa.table({key: _flat(values) for key, values in columns.items()}))


def parquet_bytes(table: pa.Table) -> bytes:
    """A table as the bytes of a parquet file; equal tables give equal bytes."""
    sink = pa.BufferOutputStream()
    # tokens and log-probs repeat too little for dictionaries: 1.2 million take 0.09 s instead of 0.23, 8 % fewer bytes
    pq.write_table(table, sink, compression="zstd", use_dictionary=False)
    return sink.getvalue().to_pybytes()


def rows_of(
    rollouts: Sequence[Rollout], *, stage: str, step: int, advantages: Sequence[float | None] | None = None
) -> list[Row]:
    """A row for each rollout, in the order given."""
    out = []
    for n, rollout in enumerate(rollouts):
        task = rollout.task
        row: Row = {
            "input": prompt_text(task.prompt),
            "output": rollout.text,
            "gts": json.loads(json.dumps(task.answer, ensure_ascii=False, default=str)),
            "score": rollout.reward,
            "step": step,
            "stage": stage,
            "source": task.source,
            "uid": task.uid,
            "index": rollout.index,
            "finish_reason": rollout.finish_reason,
            **({} if advantages is None else {"advantage": advantages[n]}),
        }
        parts = sorted(rollout.reward_parts.items())
        out.append(row | {key if key not in row else f"reward_{key}": value for key, value in parts})
    return out


def sample_row(rollout: Rollout) -> Row:
    """A rollout for users, in a table of a tracker."""
    task = rollout.task
    return {
        "uid": task.uid,
        "source": task.source,
        "prompt": prompt_text(task.prompt),
        "reply": rollout.text,
        "answer": task.answer,
        "extracted": rollout.answer,
        "reward": rollout.reward,
    }


def training_samples(
    rollouts: Sequence[Rollout], advantages: Sequence[float | None], *, count: int, stream: int
) -> list[Row]:
    """At most `count` rollouts of a step, in their order. The random stream (`seeds.key`) alone selects them."""
    chosen = permutation(stream, len(rollouts))[:count]
    return [
        {
            **sample_row(rollouts[n]),
            "index": rollouts[n].index,
            "advantage": advantages[n],
            "finish_reason": rollouts[n].finish_reason,
        }
        for n in sorted(chosen.tolist())
    ]


def prompt_text(prompt: str | Sequence[Message]) -> str:
    """A prompt for users: plain text as is, messages as 'role: content'."""
    return prompt if isinstance(prompt, str) else "\n".join(f"{m.role}: {m.said}" for m in prompt)


def _plain(source: str) -> str:
    """A source's label as a part of a path. `..` and an empty text are labels, too, and lead to no other folder."""
    return re.sub(r"[^\w.-]|^\.{0,2}\Z", "_", source)


def finite_json(value: Json) -> Json:
    """The same with null in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): finite_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(values: Sequence[Json]) -> pa.Array:
    """A column of one type: values of several, or of none that a table has (an integer of 30 digits), as JSON."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {str} or kinds <= {int, float} or kinds <= {bool}:
        with suppress(OverflowError, pa.ArrowInvalid):
            return pa.array(values)
    return pa.array([value if value is None else json.dumps(value, ensure_ascii=False) for value in values])
