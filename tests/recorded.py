"""Tiny recorded runs, and records with one bit changed."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import whet
from tiny import RUN

MODEL = {"scratch": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}}
RECORDS = {"checkpoint": {"interval": 2, "keep": None, "export": False}, "track": {"trackers": ["jsonl"]}}


def trained(run_dir: Path, **sections: Any) -> Path:
    """A run of `tiny.RUN` with these sections put over it, and a checkpoint after every second step."""
    tree = {**RUN, **RECORDS, "model": MODEL, "run_dir": str(run_dir)}
    tree |= {name: {**tree[name], **value} if isinstance(value, dict) and name in tree else value
             for name, value in sections.items()}  # fmt: skip
    assert whet.train(**tree).finished
    return run_dir


def copied(run_dir: Path, to: Path) -> Path:
    shutil.copytree(run_dir, to)
    return to


def digest(run_dir: Path) -> dict[str, str]:
    """Every file by its content, every folder by its time."""
    return {
        str(p.relative_to(run_dir)): hashlib.sha256(p.read_bytes()).hexdigest()
        if p.is_file()
        else str(p.stat().st_mtime_ns)
        for p in [run_dir, *run_dir.rglob("*")]
    }


def flipped(value: float, kind: str) -> float:
    """The number with its lowest bit changed. kind: f (float32) or d (float64)."""
    number = {"f": "I", "d": "Q"}[kind]
    (bits,) = struct.unpack(f"<{number}", struct.pack(f"<{kind}", value))
    (other,) = struct.unpack(f"<{kind}", struct.pack(f"<{number}", bits ^ 1))
    return float(other)


def edit(path: Path, row: int, field: str, place: int | None, change: Any) -> tuple[Any, Any]:
    """Change one value of a parquet file in place: old and new value."""
    table = pq.read_table(path)
    values = table[field].to_pylist()
    if place is None:
        old = values[row]
        values[row] = new = change(old)
    else:
        old = values[row][place]
        values[row][place] = change(old)
        new = values[row][place]
    at = table.schema.get_field_index(field)
    table = table.set_column(at, table.schema.field(field), pa.array(values, table.schema.field(field).type))
    pq.write_table(table, path)
    return old, new


def edit_metric(run_dir: Path, step: int, name: str, change: Any, stage: str = "main") -> tuple[float, float]:
    """Change one number of a line of metrics.jsonl: old and new value."""
    file = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    (line,) = (x for x in lines if (x["stage"], x["step"]) == (stage, step) and name in x)
    old, line[name] = line[name], change(line[name])
    file.write_text("".join(json.dumps(x, sort_keys=True) + "\n" for x in lines))
    return old, line[name]


def sampled(path: Path, row: int) -> list[int]:
    """Places of the sampled tokens of a rollout."""
    mask = pq.read_table(path)["mask"].to_pylist()[row]
    return [n for n, on in enumerate(mask) if on]
