"""The run directory: everything a run writes, and how it is read back.

    config.yaml      the config as resolved       manifest.json    versions, machine, hashes of each start; changes
    metrics.jsonl    what equal runs share        timings.jsonl    what differs: seconds, rates, memory
    rollouts/STAGE-step-000012.parquet            eval/STAGE-step-000012.parquet
    batches/STAGE-step-000012.parquet             checkpoints/    export/
    seconds/STAGE-step-000012.parquet             of each turn with an environment; like timings.jsonl
    run.log          tensorboard/STAGE/           lock             pid and host of the run
    timeline.json    what was done when (`whet show RUN --timeline`)
    journal/         what environments have answered since the oldest checkpoint (`envs.journal`)
    dumps.jsonl      files that were written elsewhere (track.dump), by step and SHA-256
    uploads.json     checkpoints that were copied elsewhere (checkpoint.upload_to)

Two runs with equal config and seed write equal bytes into metrics.jsonl, rollouts/ and eval/, so `cmp` proves
that a resumed run is the unbroken one. JSON has no NaN: a number that is not finite is written as null and
counted in the same line, in `track/nonfinite_count`.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from whet.track import turn_seconds
from whet.track.dumps import batch_file, files, is_named, parquet_bytes, prompt_text, rows_of
from whet.track.files import (
    drop_unfinished,
    file_error,
    not_linked,
    sync_path,
    tidy,
    write_bytes,
    write_json,
    write_text,
)
from whet.track.timeline import Timeline
from whet.track.written import ROLLOUTS, STAGE, lines, list_steps, parsed, read_manifest
from whet.types import TOKEN_TYPES, ConfigError, DataError, Json, Metrics, Rollout, Turn, WhetError

log = logging.getLogger(__name__)

NONFINITE = "track/nonfinite_count"

METRICS = "metrics.jsonl"

DUMPS = "dumps.jsonl"

STEPS = ("rollouts", "eval", "batches")
"""Folders with a file for each step that was written down."""
SECONDS = "seconds"
"""The same for seconds, in which equal runs differ: no checkpoint is held to them."""
NAMED = 1000
"""Newest files of steps whose names and sizes a checkpoint has; of older ones it has the number and the bytes."""


class RunDirectory:
    """Writes a run's record. Open it under the run's lock; one per process.

    `stages` are the names of the run's stages in order: resuming needs to know what is later than what. `dumps` are the
    path templates of what is written elsewhere, too, by `rollouts`, `eval` and `batches`.
    """

    def __init__(self, path: Path, stages: Sequence[str], *, dumps: Mapping[str, str] | None = None) -> None:
        bad = [s for s in stages if not STAGE.fullmatch(s)]
        if bad or len(set(stages)) != len(stages):
            raise ConfigError(
                f"stage names {list(stages)}: each must occur once and consist of letters, digits, "
                "'_', '.' and '-', because file names contain them"
            )
        self.path = path
        self.stages = tuple(stages)
        self._dumps = dict(dumps or {})
        for kind, template in self._dumps.items():
            if len(stages) > 1 and "{stage}" not in template:
                raise ConfigError(
                    f"track.dump.{kind}={template!r}: add {{stage}}, or each stage overwrites the previous one"
                )
        self._unsynced: list[Path] = []
        self._unsynced_dumps: list[Path] = []
        try:
            for folder in (path, path / "rollouts", path / "eval"):
                folder.mkdir(parents=True, exist_ok=True)
            for folder in (path, path / "export", *self._folders()):
                tidy(folder)
            if (path / DUMPS).exists():
                drop_unfinished(Path(line["path"]) for line in _dumped(path) if self._is_named(line))
            self._begin_account()
            self.metrics_file = io.FileIO(path / METRICS, "a", opener=not_linked)
            self._timings = io.FileIO(path / "timings.jsonl", "a", opener=not_linked)
        except OSError as e:
            raise file_error(e, path) from e
        self.timeline = Timeline(path / "timeline.json")
        self._held_bytes: int | None = None
        """Bytes of metrics.jsonl that the checkpoint of a resume counts; None: all."""
        self._put_off: list[Callable[[], object]] | None = None
        """What a run that resumes changes here, until its checkpoint has been taken."""

    @property
    def identity(self) -> str:
        """A unique name that stays when the run resumes: made of the first start in manifest.json,
        or of the path where no starts are written down (evaluation of a run)."""
        started = self._manifest().get("starts")
        first = started[0] if started else str(self.path.resolve())
        return hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:21]

    def write_config(self, text: str) -> None:
        """config.yaml, as resolved."""
        write_text(self.path / "config.yaml", text)

    @property
    def last_start(self) -> dict[str, Json]:
        """The last start in manifest.json; empty before the first."""
        starts = self._manifest().get("starts")
        return dict(starts[-1]) if starts else {}

    def write_manifest(self, entry: Mapping[str, Json]) -> None:
        """Add one start of the run (`describe`) to manifest.json; earlier starts stay."""
        before = self._manifest()
        write_json(
            self.path / "manifest.json", {**before, "starts": [*before.get("starts", []), dict(entry)]}
        )

    def resume(self) -> None:
        """The run resumes, and may be refused yet: until `resumed`, what is to be changed is put off."""
        self._put_off = []

    def once_resumed(self, change: Callable[[], object]) -> None:
        """Change something of the run: now, or once the checkpoint has been taken."""
        if self._put_off is None:
            change()
        else:
            self._put_off.append(change)

    def resumed(self) -> None:
        """The checkpoint has been taken."""
        changes, self._put_off = self._put_off or [], None
        for change in changes:
            change()

    def write_changes(
        self, rows: Sequence[Mapping[str, Json]], *, since: tuple[int, int] | None = None
    ) -> None:
        """Add to manifest.json the changes of a resumed run (`history.row`). Branches at `since`, number of the
        stage and step, or later have gone with what was written after it."""
        before = self._manifest()
        old = before.get("changes", [])
        gone = [
            r for r in old if since and r["kind"] == "branch" and self._place(r["stage"], r["step"]) >= since
        ]
        kept = [r for r in old if r not in gone]
        if rows or kept != old:
            changes = [*kept, *map(dict, rows)]
            write_json(self.path / "manifest.json", {**before, "changes": changes})

    def _manifest(self) -> dict[str, Json]:
        return read_manifest(self.path)

    def log(self, stage: str, step: int, *, metrics: Metrics, timings: Metrics) -> None:
        """One line in metrics.jsonl and, if there are any timings, one in timings.jsonl.

        Only numbers that equal runs share belong in `metrics`; seconds, rates and memory are `timings`.
        """
        line = line_of(stage, step, metrics)
        _append(self.metrics_file.fileno(), self.path / METRICS, line)
        self._account(line)
        if timings:
            _append(self._timings.fileno(), self.path / "timings.jsonl", line_of(stage, step, timings))

    def write_rollouts(
        self,
        stage: str,
        step: int,
        rollouts: Sequence[Rollout],
        *,
        advantages: Sequence[float | None] | None = None,
    ) -> Path:
        """Every rollout of a training step, in the order given, and the advantage each was trained with."""
        if template := self._dumps.get("rollouts"):
            rows = rows_of(rollouts, stage=stage, step=step, advantages=advantages)
            self._dump(stage, step, files(template, stage=stage, step=step, rows=rows))
        return self._write("rollouts", stage, step, to_parquet(rollouts, advantages))

    def write_seconds(self, stage: str, step: int, rollouts: Sequence[Rollout]) -> None:
        """How long each turn of the rollouts of a step was sampled, and how long its environment took. Nothing where no
        rollout has told: other processes have sampled them, or a checkpoint had them."""
        table = turn_seconds.to_table(rollouts)
        if not table.num_rows:
            return
        path = self.path / SECONDS / file_name(stage, step)
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as e:
            raise file_error(e, path) from e
        write_bytes(path, parquet_bytes(table), durable=False)
        self._unsynced.append(path)

    def write_eval(
        self, stage: str, step: int, rollouts: Sequence[Rollout], *, numbers: Metrics | None = None
    ) -> Path:
        """Every reply of an evaluation; its numbers, for a dump that has a file for each source."""
        if template := self._dumps.get("eval"):
            rows = rows_of(rollouts, stage=stage, step=step)
            self._dump(stage, step, files(template, stage=stage, step=step, rows=rows, numbers=numbers))
        return self._write("eval", stage, step, to_parquet(rollouts, None))

    def write_samples(self, stage: str, step: int, rows: Sequence[Mapping[str, Json]]) -> Path:
        """Some replies of an evaluation, a line of JSON each, for people."""
        path = (self.path / "eval" / file_name(stage, step)).with_suffix(".jsonl")
        text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        write_bytes(path, text.encode(), durable=False)
        self._unsynced.append(path)
        return path

    def write_batch(self, stage: str, step: int, table: pa.Table) -> Path:
        """The training data of a step, token by token (`batches.to_table`)."""
        try:
            (self.path / "batches").mkdir(exist_ok=True)
        except OSError as e:
            raise file_error(e, self.path / "batches") from e
        if template := self._dumps.get("batches"):
            self._dump(stage, step, [batch_file(template, stage=stage, step=step, table=table)])
        return self._write("batches", stage, step, parquet_bytes(table))

    def _dump(self, stage: str, step: int, made: Iterable[tuple[Path, bytes]]) -> None:
        """Files at paths of the user. dumps.jsonl lists them first: a resumed run deletes later files, but only those
        that it wrote itself."""
        for path, data in made:
            line = {"stage": stage, "step": step, "path": str(path.absolute()), "sha256": _digest(data)}
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with io.FileIO(self.path / DUMPS, "a", opener=not_linked) as ledger:
                    _append(ledger.fileno(), self.path / DUMPS, json.dumps(line).encode() + b"\n")
            except OSError as e:
                raise file_error(e, path) from e
            write_bytes(path, data, durable=False)
            self._unsynced.append(self.path / DUMPS)
            self._unsynced_dumps.append(path)

    def _write(self, folder: str, stage: str, step: int, data: bytes) -> Path:
        path = self.path / folder / file_name(stage, step)
        write_bytes(path, data, durable=False)
        self._unsynced.append(path)
        self.sizes[f"{folder}/{path.name}"] = len(data)
        return path

    # -- what a checkpoint is told of the record, and holds it to

    def _begin_account(self) -> None:
        """Of what is there: lines, bytes and SHA-256 of metrics.jsonl, and the size of each step's files."""
        metrics = self.path / METRICS
        self._sha, self._bytes, self._line_count = hashlib.sha256(), 0, 0
        if metrics.is_file():
            self._account(metrics.read_bytes())
        there = {
            f"{folder.name}/{path.name}": path.stat().st_size
            for folder in self._folders()
            if folder.name != SECONDS
            for _, _, path in list_steps(folder)
        }
        self.sizes = {name: there[name] for name in sorted(there, key=self.age)}
        """Of the files of steps, in the order in which they were written."""

    def _account(self, data: bytes) -> None:
        self._sha.update(data)
        self._bytes += len(data)
        self._line_count += data.count(b"\n")

    def held(self) -> Json:
        """The state of the record, for a checkpoint: a run that resumes from it must find the same state."""
        # they stand in the order in which they were written: only those of one step may be in another order
        last = sorted(islice(reversed(self.sizes), NAMED + len(STEPS)), key=self.age)[-NAMED:]
        files = {name: self.sizes[name] for name in sorted(last)}
        older = [len(self.sizes) - len(files), sum(self.sizes.values()) - sum(files.values())]
        return {
            METRICS: {"lines": self._line_count, "bytes": self._bytes, "sha256": self._sha.hexdigest()},
            "files": files,
            "older": older,
        }

    def age(self, name: str) -> tuple[int, int, str]:
        """Orders files of steps, the oldest first."""
        stage, _, step = Path(name).stem.rpartition("-step-")
        return self.stages.index(stage) if stage in self.stages else -1, int(step), name

    def check(self, held: Json, checkpoint: Path, *, at: tuple[int, int]) -> None:
        """Compare the record with what it held when a checkpoint was written. at: stage and step of it. WhetError if
        metrics.jsonl does not begin with the lines of then. `truncate_to` drops those that came after them; if they are
        of the same steps the log says so, and which files are missing."""
        wanted, data = held[METRICS], (self.path / METRICS).read_bytes()
        begin, after = data[: wanted["bytes"]], data[wanted["bytes"] :]
        if hashlib.sha256(begin).hexdigest() != wanted["sha256"]:
            count = data.count(b"\n")
            now = "other lines" if count >= wanted["lines"] else count
            raise WhetError(
                f"{self.path / METRICS} is damaged: when {checkpoint} was written it began with {wanted['lines']} "
                f"lines, now it has {now}, so a resumed run would have a gap in its record. Restore the file, or "
                f"resume in another run_dir with checkpoint.resume={checkpoint}"
            )
        self._held_bytes = len(begin)
        places = (self._place(line["stage"], line["step"]) for _, line in parsed(after, self.path / METRICS))
        if doubled := sum(place <= at for place in places):
            log.warning("%s: %d lines of steps that it already has are dropped", self.path / METRICS, doubled)
        self._tell_missing(held["files"], checkpoint, older=held.get("older", [0, 0]))

    def _tell_missing(self, files: Mapping[str, int], checkpoint: Path, *, older: Sequence[int]) -> None:
        """older: number and bytes of the files before those that are named."""
        first = min(map(self.age, files), default=None)
        before = [size for name, size in self.sizes.items() if first is not None and self.age(name) < first]
        if any(older) and [len(before), sum(before)] != list(older):
            log.warning(
                "the record of this run is incomplete: of the %d older files that %s counts (%d bytes) there are %d "
                "(%d bytes); the run continues without them",
                older[0], checkpoint, older[1], len(before), sum(before),
            )  # fmt: skip
        there = {n: (self.path / n).stat().st_size for n in files if (self.path / n).is_file()}
        if gone := [name for name, size in files.items() if there.get(name) != size]:
            log.warning(
                "the record of this run is incomplete: %s%s, which %s lists, are missing or have another size; "
                "the run continues without them",
                ", ".join(gone[:3]),
                f" and {len(gone) - 3} more" if len(gone) > 3 else "",
                checkpoint,
            )

    def sync(self) -> None:
        """Bring all that was written onto the disk. Call before a checkpoint, which relies on it."""
        try:
            os.fsync(self.metrics_file.fileno())
            os.fsync(self._timings.fileno())
            self.timeline.sync()
            for path in dict.fromkeys(self._unsynced):
                sync_path(path)
            for path in self._unsynced_dumps:
                with suppress(FileNotFoundError):  # the program that it is for may have taken it
                    sync_path(path)
            for folder in self._folders():
                sync_path(folder)
        except OSError as e:
            raise file_error(e, self.path) from e
        self._unsynced.clear()
        self._unsynced_dumps.clear()

    def truncate_to(self, stage_index: int, step: int) -> None:
        """Drop what is later than a checkpoint made after `step` of a stage, and a line cut short by a kill.

        What stands at that very step stays, so save after the step's evaluation. (0, -1) drops everything.
        """
        limit = (stage_index, step)
        late = [
            path
            for folder in self._folders()
            for stage, at, path in list_steps(folder)
            if self._place(stage, at) > limit
        ]
        metrics = self._kept(METRICS, limit, most=self._held_bytes)
        timings = self._kept("timings.jsonl", limit)
        for path in late:
            path.unlink()
            self.sizes.pop(f"{path.parent.name}/{path.name}", None)
            path.with_suffix(".jsonl").unlink(missing_ok=True)
        self._truncate_dumps(limit)
        self.metrics_file = self._rewrite(self.metrics_file, METRICS, metrics)
        self._timings = self._rewrite(self._timings, "timings.jsonl", timings)
        self.timeline.keep(lambda stage, at: self._place(stage, at) <= limit)
        self._begin_account()

    def _truncate_dumps(self, limit: tuple[int, int]) -> None:
        """Delete the dumps that are later, unless something else has been written over them, or they lie where the
        config that is given now names none: the record may come from elsewhere, and name any file of this user."""
        if not (self.path / DUMPS).exists():
            return
        late = [line for line in _dumped(self.path) if self._place(line["stage"], line["step"]) > limit]
        there = [line for line in late if Path(line["path"]).is_file()]
        for line in there:
            path = Path(line["path"])
            if self._is_named(line) and _digest(path.read_bytes()) == line["sha256"]:
                path.unlink()
        if left := [line["path"] for line in there if not self._is_named(line)]:
            log.warning(
                "%s lists %d files of later steps that track.dump does not name (%s); they stay",
                self.path / DUMPS, len(left), left[0],
            )  # fmt: skip
        write_bytes(self.path / DUMPS, self._kept(DUMPS, limit))

    def _is_named(self, line: Mapping[str, Json]) -> bool:
        """Whether a line of dumps.jsonl is of a file that this run writes."""
        path, stage, step = Path(line["path"]), line["stage"], line["step"]
        return any(is_named(path, template, stage, step) for template in self._dumps.values())

    def _kept(self, name: str, limit: tuple[int, int], *, most: int | None = None) -> bytes:
        """The lines of a file that are not later, among its first `most` bytes."""
        there = lines(self.path / name, most)
        return b"".join(raw for raw, line in there if self._place(line["stage"], line["step"]) <= limit)

    def _rewrite(self, file: io.FileIO, name: str, data: bytes) -> io.FileIO:
        write_bytes(self.path / name, data)
        file.close()
        return io.FileIO(self.path / name, "a", opener=not_linked)

    def _place(self, stage: str, step: int) -> tuple[int, int]:
        if stage not in self.stages:
            raise WhetError(
                f"{self.path} holds a stage {stage!r}, but the config has only {', '.join(self.stages)}; "
                "resume with the config it was made with, or give another run_dir"
            )
        return self.stages.index(stage), step

    def _folders(self) -> list[Path]:
        """Where files of single steps lie."""
        return [folder for name in (*STEPS, SECONDS) if (folder := self.path / name).is_dir()]

    def close(self) -> None:
        """Close the files. Safe to call twice."""
        self.metrics_file.close()
        self._timings.close()
        self.timeline.close(write=self._put_off is None)


def line_of(stage: str, step: int, numbers: Metrics) -> bytes:
    """One line of JSON with sorted keys. Floats are written by repr, so they are read back to the bit."""
    plain = {k: v if isinstance(v, int) else float(v) for k, v in numbers.items()}
    finite: dict[str, Json] = {k: v if math.isfinite(v) else None for k, v in plain.items()}
    lost = sum(v is None for v in finite.values())
    if lost:
        finite[NONFINITE] = lost
    return json.dumps({**finite, "stage": stage, "step": step}, sort_keys=True).encode() + b"\n"


def to_parquet(rollouts: Sequence[Rollout], advantages: Sequence[float | None] | None) -> bytes:
    """Rollouts as the bytes of a parquet file; equal rollouts give equal bytes."""
    tasks = [r.task for r in rollouts]
    columns: dict[str, list[Json]] = {
        "uid": [t.uid for t in tasks],
        "source": [t.source for t in tasks],
        "prompt": [prompt_text(t.prompt) for t in tasks],
        "answer": [_as_json(t.answer) for t in tasks],
        "extracted": [r.answer for r in rollouts],
        "reward_parts": [sorted(r.reward_parts.items()) for r in rollouts],
        "advantage": list(advantages) if advantages is not None else [None] * len(rollouts),
    }
    columns["messages"] = [_as_json([m.to_json() for m in r.messages]) for r in rollouts]
    columns["state"] = [_as_json(r.state) for r in rollouts]
    columns["turns"] = [json.dumps(_turns(r)) for r in rollouts]
    columns["strand_tokens"] = [[len(s.token_ids) for s in r.strands] for r in rollouts]
    for name in TOKEN_TYPES:
        columns[name] = [np.concatenate([getattr(s, name) for s in r.strands]) for r in rollouts]
    for name in ROLLOUTS.names:
        if name not in columns:
            columns[name] = [getattr(r, name) for r in rollouts]
    arrays = [_column(columns[field.name], field.type) for field in ROLLOUTS]
    return parquet_bytes(pa.table(arrays, schema=ROLLOUTS))


def _as_json(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


_TURN = tuple(field.name for field in fields(Turn))


def _turns(rollout: Rollout) -> list[Json]:
    """The replies of a rollout, with the numbers of their strands."""
    return [
        {"strand": n, **{name: getattr(turn, name) for name in _TURN}}
        for n, strand in enumerate(rollout.strands)
        for turn in strand.turns
    ]


def _column(values: list[Json], kind: pa.DataType) -> pa.Array:
    """An Arrow array; lists of numbers go through one flat numpy array, which is ten times faster."""
    if not pa.types.is_list(kind):
        return pa.array(values, type=kind)
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    dtype = kind.value_type.to_pandas_dtype()
    flat = np.concatenate([np.empty(0, dtype), *values], dtype=dtype)  # type: ignore[arg-type]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), type=kind)


def file_name(stage: str, step: int) -> str:
    return f"{stage}-step-{step:06d}.parquet"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _append(handle: int, path: Path, data: bytes) -> None:
    """Append a whole line or nothing: a part written before an error is taken back. WhetError, too, where `path` is not
    the file of `handle` any more: nobody would ever find the line."""
    before = os.fstat(handle).st_size
    try:
        if os.write(handle, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False)):
            raise WhetError(
                f"{path} was replaced by another file while the run was writing it; leave the run directory alone "
                "until the run has ended, then put the file back, or give another run_dir"
            )
    except OSError as e:
        with suppress(OSError):
            os.ftruncate(handle, before)
        raise file_error(e, path) from e


def _dumped(run_dir: Path) -> Iterator[dict[str, Json]]:
    """The lines of dumps.jsonl."""
    for _, line in lines(run_dir / DUMPS):
        if not isinstance(line.get("path"), str) or not isinstance(line.get("sha256"), str):
            raise DataError(
                f"{run_dir / DUMPS}: {str(line)[:100]} does not name a file and its SHA-256; is it damaged?"
            )
        yield line
