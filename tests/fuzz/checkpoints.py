"""The checkpoint fuzzer: every kind of file in a checkpoint damaged, and what is read held against what the files say.

Half of the cases have a manifest that was made anew after the damage, so that it is no longer the checksum that speaks,
but whoever reads the file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import pyarrow as pa
import torch
from safetensors.torch import load_file
from torch import Tensor

from fuzz.case import Case
from whet import checkpoint
from whet.buffer.buffer import Buffer
from whet.buffer.groups import encode
from whet.config.schema import DataConfig, OptimizerConfig, SourceConfig
from whet.data.tasks import TaskStream
from whet.guard.ledger import Ledger
from whet.models import kernels, tensor_files
from whet.models.regions import Region
from whet.models.tensor_files import Piece
from whet.track.files import reading
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.optimizer_step import step_or_skip
from whet.training.torch import TorchEngine
from whet.types import Group, Rollout, Task

ROOT = Path(__file__).parents[2]
STATE, GROUPS, MANIFEST = "state.json", "groups.arrow", "manifest.json"
MODEL, MOMENTS = "policy/model.safetensors", "policy/optimizer.safetensors"


@cache
def engine() -> TorchEngine:
    """With moments of one step."""
    from tiny import tiny_model

    out = TorchEngine(
        tiny_model(layers=1),
        kernels.load("torch"),
        cut=MicroBatchPolicy(),
        optimizer=OptimizerConfig(lr=0.1),
        total_steps=4,
    )
    generator = torch.Generator().manual_seed(0)
    for p in out.module.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    assert out.optimizer is not None
    step_or_skip(out.optimizer, in_a_row=0, most=1)
    return out


def stream() -> TaskStream:
    from fuzz.readers import tokenizer

    source = SourceConfig(path=str(ROOT / "tests/data/words.jsonl"), name="words")
    return TaskStream(
        [source],
        DataConfig(train=(source,), max_prompt_tokens=1000),
        tokenizer=tokenizer(),
        seed=0,
        max_response_tokens=9,
    )


def buffer() -> Buffer:
    return Buffer(groups_per_step=1, group_size=2, max_staleness=1, reject=lambda _: None, ledger=Ledger())


def _state() -> dict[str, Any]:
    tasks, waiting = stream(), buffer()
    first, second = tasks.next(2)
    waiting.restore(
        {
            "waiting": [encode(Group(first, tuple(_rollout(first, n) for n in range(2))))],
            "dropped": [1],
            "steps": 1,
            "replay": None,
        }
        | {"under_way": [json.loads(json.dumps(_plain(second)))]}
    )
    ledger = Ledger({"sampled": 4, "trained": 4}, {"sampled": 2})
    held = {"metrics.jsonl": {"lines": 1, "bytes": 9, "sha256": "0" * 64}, "files": {"rollouts/a.parquet": 9}}
    return {
        "stage": 0,
        "stage_name": "main",
        "step": 1,
        "contents": ["model", "optimizer"],
        "score": 0.5,
        "tasks": tasks.state(),
        "buffer": waiting.state(),
        "ledger": ledger.state(),
        "record": held,
    }


def _plain(task: Task) -> dict[str, Any]:
    return {name: getattr(task, name) for name in Task.__slots__}


def _rollout(task: Task, index: int) -> Rollout:
    return Rollout.one_strand(
        task=task,
        index=index,
        token_ids=[*task.token_ids, 1],
        mask=[0] * len(task.token_ids) + [1],
        logprobs=[0.0] * len(task.token_ids) + [-0.5],
        sample_logprobs=[0.0] * len(task.token_ids) + [-0.25],
        versions=[-1] * len(task.token_ids) + [0],
        finish_reason="stop",
        text="a",
        reward=0.5 * index,
    )


@cache
def files() -> dict[str, bytes]:
    """A checkpoint whose tensors are in whole files."""
    folder = Path(mkdtemp(prefix="whet-fuzz-"))
    made = checkpoint.write(
        folder, {"policy": lambda path: engine().save(path, moments=True)}, checkpoint.copied(_state())
    )
    found = {str(p.relative_to(made)): p.read_bytes() for p in made.rglob("*") if p.is_file()}
    shutil.rmtree(folder)
    return found


@cache
def tensors(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and its metadata."""
    folder = Path(mkdtemp(prefix="whet-fuzz-"))
    (folder / "a").write_bytes(files()[name])
    with tensor_files.opened(folder / "a") as file:
        found = {key: file.read(key) for key in file.tensors}, file.metadata
    shutil.rmtree(folder)
    return found


@cache
def files_in_parts() -> dict[str, bytes]:
    """The same checkpoint as two ranks write it: what can be halved is."""
    folder = Path(mkdtemp(prefix="whet-fuzz-"))
    (folder / "policy").mkdir()
    for name in (MODEL, MOMENTS):
        own: list[dict[Piece, Tensor]] = [{}, {}]
        for key, tensor in tensors(name)[0].items():
            for n, (piece, part) in enumerate(_halves(key, tensor)):
                own[n][piece] = part
        stem = Path(name).stem
        for n, some in enumerate(own):
            tensor_files.write(
                {piece.key: part for piece, part in some.items()},
                folder / "policy" / tensor_files.part_file(stem, n, 2),
            )
        said = tensor_files.index(Path(name).name, [list(some) for some in own], tensors(name)[1])
        (folder / "policy" / tensor_files.index_file(Path(name).name)).write_text(json.dumps(said))
    for name in (STATE, GROUPS):
        (folder / name).write_bytes(files()[name])
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    shutil.rmtree(folder)
    return sealed(found)


def _halves(key: str, tensor: Tensor) -> list[tuple[Piece, Tensor]]:
    if not tensor.dim() or len(tensor) < 2:
        return list(tensor_files.pieces(key, tensor, Region.whole(tuple(tensor.shape))))
    half, shape = len(tensor) // 2, tuple(tensor.shape)
    cuts = [(0, tensor[:half]), (half, tensor[half:])]
    return [
        (Piece(key, tensor.dtype, shape, (at, *(0,) * (len(shape) - 1)), tuple(part.shape)), part)
        for at, part in cuts
    ]


def sealed(found: dict[str, bytes]) -> dict[str, bytes]:
    """With a manifest that fits."""
    listed = {n: [len(data), hashlib.sha256(data).hexdigest()] for n, data in found.items() if n != MANIFEST}
    return {**found, MANIFEST: json.dumps({"format": 1, "files": dict(sorted(listed.items()))}).encode()}


def make(random: Random, damage: Callable[[Random, str, bytes], bytes]) -> Case:
    good = random.choice((files, files, files_in_parts))()
    name = random.choice(sorted(good))
    after = _flipped(random, good[name]) if random.random() < 0.3 else damage(random, name, good[name])
    found = {**good, name: after}
    if name != MANIFEST and random.random() < 0.5:
        return Case(sealed(found), name)
    return Case(found, name, wrong=name != MANIFEST and after != good[name])


def _flipped(random: Random, data: bytes) -> bytes:
    """One bit, wherever: as long as before."""
    at, bit = random.randrange(len(data)), 1 << random.randrange(8)
    return data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]


class ReadAsSomethingElse(AssertionError):
    """What was read is not what the files say."""


def read(folder: Path) -> object:
    """As a run that goes on does. What is read must be what the files say, to an eye of their own; and where the files
    are as they were written, what was written."""
    state = checkpoint.read_state(folder)
    checkpoint.check_contents(folder, state, ["model", "optimizer"])
    checkpoint.load(folder, {"policy": engine()})
    tasks, waiting = stream(), buffer()
    with reading(folder / STATE):
        tasks.restore(state["tasks"])
        waiting.restore(state["buffer"])
        ledger = Ledger.from_state(state["ledger"])
    rows = pa.ipc.open_file(folder / GROUPS).read_all()["group"].to_pylist()
    _same("state", state, _with_groups(json.loads((folder / STATE).read_bytes()), rows))
    if all((folder / name).read_bytes() == files()[name] for name in (STATE, GROUPS)):
        _same("state", state, _state())
        _same("tasks", tasks.state(), state["tasks"])
        _same("ledger", ledger.state(), state["ledger"])
        _same("buffer", waiting.state(), state["buffer"])
    _same_tensors(dict(engine().module.named_parameters()), folder, MODEL)
    assert engine().optimizer is not None
    _same_tensors(engine().optimizer.state(), folder, MOMENTS)
    return state


def _with_groups(value: Any, rows: list[bytes]) -> Any:
    if isinstance(value, dict) and list(value) == ["group in groups.arrow"]:
        return rows[value["group in groups.arrow"]]
    if isinstance(value, dict):
        return {key: _with_groups(each, rows) for key, each in value.items()}
    return [_with_groups(each, rows) for each in value] if isinstance(value, list) else value


def _same(what: str, found: Any, expected: Any) -> None:
    if json.dumps(found, sort_keys=True, default=bytes.hex) != json.dumps(
        expected, sort_keys=True, default=bytes.hex
    ):
        raise ReadAsSomethingElse(what)


def _same_tensors(found: dict[str, Any], folder: Path, name: str) -> None:
    """Against the file itself where it is whole; against what was written where its parts are."""
    if (folder / name).exists():
        expected = load_file(folder / name)
    elif all(
        (folder / n).read_bytes() == data for n, data in files_in_parts().items() if n.startswith(name[:-12])
    ):
        expected = tensors(name)[0]
    else:
        return
    for key, tensor in found.items():
        if not torch.equal(tensor.detach().nan_to_num(), expected[key].to(tensor.dtype).nan_to_num()):
            raise ReadAsSomethingElse(f"{name}: {key}")
