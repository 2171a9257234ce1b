"""GSM8K (arXiv:2110.14168) as published, written as parquet in the column layout that verl reads."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from whet.config.schema import SourceConfig
from whet.data.parts import Row
from whet.data.rows import read_rows
from whet.outputs import replacing
from whet.types import DataError

INSTRUCTION = (
    "Think it through step by step, then give the final number on a last line of its own, after ####."
)

_FINAL = re.compile(r"####\s*\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*$")


def convert(folder: Path, out: Path) -> dict[str, int]:
    """folder/{train,test}.jsonl -> out/{train,test}.parquet; the number of rows of each. Raises DataError."""
    out.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split in ("train", "test"):
        rows = read_rows(SourceConfig(path=str(folder / f"{split}.jsonl")))
        made = [verl_row(rows.row(i), split, i, where=rows.where(i)) for i in range(len(rows))]
        _write(pa.Table.from_pylist(made), out / f"{split}.parquet")
        counts[split] = len(made)
    return counts


def _write(table: pa.Table, file: Path) -> None:
    """A file that is there stays until the new one is whole."""
    try:
        with replacing(file) as part:
            pq.write_table(table, part)
    except OSError as e:
        raise DataError(f"{file}: cannot be written: {e.strerror or e}") from e


def verl_row(row: Row, split: str, index: int, *, where: str) -> Row:
    """One published row (question, answer ending in '#### N') in verl's columns."""
    if not all(isinstance(row.get(k), str) for k in ("question", "answer")):
        raise DataError(f"{where}: expected the texts 'question' and 'answer'; columns: {', '.join(row)}.")
    found = _FINAL.search(row["answer"])
    if found is None:
        raise DataError(f"{where}: the answer does not end in '#### ' and a number: {row['answer'][-40:]!r}")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": found[1].replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": row["answer"], "question": row["question"]},
    }
