"""Checkpoints in parts: each rank writes what it holds, and any layout reads what it needs."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from forked import Started
from swept import except_for
from test_models import retype
from test_train_torch import CUT, pg_loss, weighted
from tiny import LETTERS, tiny_model
from whet import checkpoint
from whet.checkpoint import Keep, Saver
from whet.config.schema import OptimizerConfig
from whet.config.sections.model import LoraConfig
from whet.export import export_checkpoint
from whet.models import kernels
from whet.models.collectives import Peers, SplitDim
from whet.models.lora import attach, learned, refresh
from whet.models.mesh import Dims
from whet.models.regions import Region
from whet.models.tensor_files import assigned, index, opened, part_file, pieces, write
from whet.track.files import write_json
from whet.track.written import read_lines
from whet.training import parts
from whet.training.ranks import RankGroup, Ranks
from whet.training.torch import TorchEngine
from whet.types import CheckpointError

ADAM = OptimizerConfig(lr=1e-3, eps=1e-3)
LAYOUTS = {
    "shard-2": Dims(dp_shard=2),
    "tensor-2": Dims(tp=2),
    "replicate-2": Dims(dp_replicate=2),
    "pipeline-2": Dims(pp=2),
    "expert-2": Dims(dp_shard=2, ep=2),
}
ROOT = Path(__file__).parents[1]
RUN: dict[str, Any] = {
    **LETTERS,
    "train": {"steps": 3, "tasks_per_step": 4, "optimizer": {"lr": 1e-3}, "parallel": {"dp_shard": 2}},
    "checkpoint": {"interval": 1, "export": False},
}
FILES = ("model.safetensors", "optimizer.safetensors")


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Two ranks; each engine says its layout."""
    found = Ranks(Dims(dp_shard=2), timeout_s=120.0)
    yield found
    found.close()


def lora_model(family: str = "qwen2", **lora: Any) -> PreTrainedModel:
    """Its adapters do something."""
    model = tiny_model(family)
    attach(model, LoraConfig(rank=4, **lora), seed=1)
    with torch.no_grad():
        for name, p in learned(model):
            p.add_(0.01 if "lora_B" in name else 0.0)
    refresh(model)
    return model


def alone(make: Any) -> TorchEngine:
    return TorchEngine(make(), kernels.load("auto"), cut=CUT, optimizer=ADAM, total_steps=9, seed=3)


def on(pool: Ranks, make: Any, layout: str = "shard-2") -> RankGroup:
    return RankGroup(
        pool,
        "policy",
        make(),
        cut=CUT,
        sharded=True,
        dims=LAYOUTS[layout],
        optimizer=ADAM,
        total_steps=9,
        seed=3,
    )


def content(folder: Path) -> dict[str, Any]:
    """All that a saved engine has, whichever way it was written."""
    out: dict[str, Any] = {}
    for name in FILES:
        with opened(folder / name) as file:
            out |= {f"{name}/{key}": file.read(key).numpy().tobytes() for key in sorted(file.tensors)}
            out[name] = file.metadata
    return out


MODELS = {
    "moe": lambda: tiny_model("qwen3_moe"),
    "tied": lambda: tiny_model("gemma"),
    "lora": lora_model,
    "moe lora": lambda: lora_model("qwen3_moe", targets=("gate_up_proj", "down_proj"), experts="each"),
    "moe lora shared": lambda: lora_model("qwen3_moe", targets=("q_proj", "down_proj"), experts="shared"),
}


@pytest.mark.parametrize("model", except_for(("moe lora shared", "tied").__contains__, MODELS))
def test_through_all_layouts_and_back_nothing_changes(pool: Ranks, tmp_path: Path, model: str) -> None:
    make = MODELS[model]
    one = alone(make)
    one.update(weighted(0), pg_loss)
    one.save(tmp_path / "whole")
    expected, last = content(tmp_path / "whole"), tmp_path / "whole"
    for name in LAYOUTS:
        if name == "expert-2" and "moe" not in model:
            continue
        many = on(pool, make, name)
        many.load(last)
        last = tmp_path / name
        many.save(last)
        late = many.capture()
        many.update(weighted(1), pg_loss)
        late(tmp_path / f"{name}-late")
        assert content(last) == content(tmp_path / f"{name}-late") == expected, name
        assert not (last / "model.safetensors").exists()
        many.save(tmp_path / f"{name}-next")
        again = on(pool, make, name)
        again.load(tmp_path / "whole")  # the same step from whole files, on the same layout
        again.update(weighted(1), pg_loss)
        again.save(tmp_path / f"{name}-again")
        assert content(tmp_path / f"{name}-next") == content(tmp_path / f"{name}-again") != expected, name
    back = alone(make)
    back.load(last)
    back.save(tmp_path / "back")
    for file in FILES:
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.parametrize("layout", ["shard-2", "tensor-2", "replicate-2", "pipeline-2"])
def test_ranks_share_the_writing(pool: Ranks, tmp_path: Path, layout: str) -> None:
    many = on(pool, tiny_model, layout)
    many.update(weighted(0), pg_loss)
    many.save(tmp_path / "parts")
    for file in FILES:
        sizes = []
        for number in range(2):
            path = tmp_path / "parts" / part_file(file.removesuffix(".safetensors"), number, 2)
            with safe_open(path, "pt") as part:
                sizes.append(sum(part.get_tensor(key).nbytes for key in part.keys()))  # noqa: SIM118
        with opened(tmp_path / "parts" / file) as whole:
            assert sum(sizes) == sum(whole.read(name).nbytes for name in whole.tensors)
        assert max(sizes) < 0.6 * sum(sizes)


def test_a_rank_that_is_killed_while_it_writes_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    with closing(Ranks(Dims(dp_shard=2), timeout_s=120.0)) as pool:
        many = on(pool, tiny_model)
        saver = Saver(tmp_path, keep=Keep(2), background=True)
        state = {"stage": 0, "stage_name": "main", "step": 1}
        saver.save({"policy": many}, state)
        saver.wait()
        late = many.capture()
        stopped = pool.lines.lines[1].process  # type: ignore[attr-defined]
        killer = threading.Thread(target=_kill_when_alone, args=(tmp_path, stopped))
        stopped.send_signal(signal.SIGSTOP)
        killer.start()
        with pytest.raises(CheckpointError, match="rank 1 of 2 died"):
            checkpoint.write(tmp_path, {"policy": late}, state | {"step": 2, "contents": []})
        killer.join()
        saver.close()
    (left,) = checkpoint.all_in(tmp_path)
    assert checkpoint.read_state(left)["step"] == 1
    fresh = alone(tiny_model)
    fresh.load(left / "policy")


def _kill_when_alone(root: Path, process: Any) -> None:
    """As soon as the other rank has begun to write."""
    while not list(root.glob(".*-000002.new-*/policy/model-00001-of-00002.safetensors")):
        time.sleep(0.01)
    process.kill()


# ---------------------------------------------------------------- files


def in_parts(folder: Path, tensors: dict[str, torch.Tensor], regions: list[dict[str, Region]]) -> None:
    """What ranks with these regions write."""
    held = [
        [x for name, region in own.items() for x in pieces(name, of_region(tensors[name], region), region)]
        for own in regions
    ]
    shares = assigned([[piece for piece, _ in own] for own in held])
    folder.mkdir()
    for rank, (own, share) in enumerate(zip(held, shares)):
        write({p.key: x for p, x in own if p in set(share)}, folder / part_file("model", rank, len(held)))
    write_json(folder / "model.parts.json", index("model.safetensors", shares, {"a": "b"}))


def of_region(whole: torch.Tensor, region: Region) -> torch.Tensor:
    out = torch.full(region.here, -1.0)
    for box in region.boxes():
        out[box.here()] = whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.size))]
    return out


@st.composite
def layouts(draw: st.DrawFn) -> list[list[tuple[int, int, int, int]]]:
    """For each rank the cuts (dim, blocks, rank, size) of a tensor [4, 12]."""
    cuts = draw(
        st.lists(
            st.tuples(st.sampled_from([0, 1]), st.sampled_from([1, 2, 3]), st.integers(1, 3)), max_size=2
        )
    )
    cuts = [(dim, 1 if dim == 0 else blocks, size) for dim, blocks, size in cuts][
        : 1 + (len({c[0] for c in cuts}) > 1)
    ]
    return [
        [(dim, blocks, at, size) for (dim, blocks, size), at in zip(cuts, where)]
        for where in product(*(range(size) for _, _, size in cuts))
    ]


@given(layouts(), layouts())
def test_any_cut_is_read_from_any_other(
    tmp_path_factory: pytest.TempPathFactory, written: Any, wanted: Any
) -> None:
    folder = tmp_path_factory.mktemp("cut") / "parts"
    x = torch.arange(48.0).view(4, 12)
    tensors = {"x": x, "steps.x": torch.tensor(3.0)}

    def region(cuts: Any) -> tuple[Region, torch.Tensor]:
        found, part = Region.whole(x.shape), x
        for dim, blocks, rank, size in cuts:
            cut = SplitDim(dim, Peers(rank, size), blocks)
            found, part = cut.kept(found), cut.part(part)
        return found, part

    in_parts(folder, tensors, [{"x": region(cuts)[0], "steps.x": Region.whole(())} for cuts in written])
    with opened(folder / "model.safetensors") as file:
        assert (file.metadata, file.shape("x"), file.read("steps.x").item()) == ({"a": "b"}, (4, 12), 3.0)
        for cuts in wanted:
            found, part = region(cuts)
            assert found.here == tuple(part.shape)
            assert torch.equal(file.read("x", found), part)


def test_a_region_by_hand() -> None:
    gate_and_up = Region.whole((8, 2)).cut(0, [(2, 4), (6, 8)])  # the second half of each of two matrices
    assert gate_and_up.here == (4, 2)
    assert gate_and_up.cut(0, [(1, 3)]).spans == (((3, 4), (6, 7)), ((0, 2),))
    assert [(b.start, b.size, b.at) for b in gate_and_up.boxes()] == [
        ((2, 0), (2, 2), (0, 0)),
        ((6, 0), (2, 2), (2, 0)),
    ]
    assert list(gate_and_up.cut(1, []).boxes()) == []


HALVES = [{"x": Region.whole((4, 2)).cut(0, [half])} for half in ((0, 2), (2, 4))]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint in parts."""
    writers = {"policy": lambda folder: in_parts(folder, {"x": torch.ones(4, 2)}, HALVES)}
    return checkpoint.write(tmp_path, writers, {"stage": 0, "stage_name": "main", "step": 1})


@pytest.mark.parametrize("file", ["model-00002-of-00002.safetensors", "model.parts.json"])
def test_a_part_that_is_missing_or_changed_is_named(saved: Path, file: str) -> None:
    checkpoint.read_state(saved)
    path = saved / "policy" / file
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"policy/{file} has changed"):
        checkpoint.read_state(saved)
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=f"policy/{file} has"):
        checkpoint.read_state(saved)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"policy/{file} is missing"):
        checkpoint.read_state(saved)


@pytest.mark.parametrize(
    ("shape", "size", "said"),
    [
        ([10**12, 2], None, "values of x are missing from its parts"),
        (None, [1, 2], "has the shape .*, its index says"),
    ],
    ids=["a tensor larger than memory", "a part of another size"],
)
def test_sizes_that_an_index_cannot_mean_are_refused_before_memory_is_taken(
    shape: list[int] | None, size: list[int] | None, said: str, saved: Path
) -> None:
    index = saved / "policy/model.parts.json"
    told = json.loads(index.read_text())
    of = told["tensors"]["x"]
    of["shape"] = shape or of["shape"]
    of["parts"][0][2] = size or of["parts"][0][2]
    index.write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=said), opened(saved / "policy/model.safetensors") as found:
        found.read("x")


def test_without_a_manifest_parts_are_checked_too(saved: Path) -> None:
    file = saved / "policy" / "model.safetensors"
    told = json.loads((saved / "policy/model.parts.json").read_text())
    told["tensors"]["x"]["parts"].pop()
    (saved / "policy/model.parts.json").write_text(json.dumps(told))
    with (
        pytest.raises(CheckpointError, match="4 values of x are missing from its parts"),
        opened(file),
    ):
        pass
    (saved / "policy/model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="its part model-00002-of-00002"), opened(file):
        pass
    with pytest.raises(CheckpointError, match="cannot be read"), opened(file.with_name("other.safetensors")):
        pass


ODD = [
    ("X9", 32),
    ("F4", 4),
    ("F6_E2M3", 6),
    ("U64", 64),
    ("I8", 8),
    ("BOOL", 8),
    ("C64", 64),
    ("F8_E4M3", 8),
]
"""Dtypes that a header may name, and bits of a number."""
SPELT = {"I8": "torch.int8", "BOOL": "torch.bool"}
"""As torch calls them."""


@pytest.mark.parametrize(("dtype", "bits"), ODD)
@pytest.mark.parametrize(
    ("file", "name"), list(zip(FILES, ("model.norm.weight", "exp_avg.model.norm.weight")))
)
def test_tensors_of_a_dtype_that_no_checkpoint_has_are_refused(
    file: str, name: str, dtype: str, bits: int, tmp_path: Path
) -> None:
    """By tensor and dtype; a dtype that safetensors does not know, by the dtype."""
    engine = alone(lambda: tiny_model(layers=1))
    engine.update(weighted(), pg_loss)
    engine.save(tmp_path, moments=True)
    engine.load(tmp_path)
    retype(tmp_path / file, name, dtype, bits)
    with pytest.raises(CheckpointError, match=rf"\b({dtype}|{SPELT.get(dtype, dtype)})\b") as caught:
        engine.load(tmp_path)
    assert name in str(caught.value) or dtype == "X9"


@pytest.mark.parametrize(("dtype", "bits"), ODD)
@pytest.mark.parametrize("place", ["index", "part"])
def test_a_part_of_another_dtype_is_refused(place: str, dtype: str, bits: int, saved: Path) -> None:
    """Where the index names a dtype that no tensor has, and where a part has another than its index names."""
    file = saved / "policy/model.safetensors"
    if place == "part":
        retype(saved / "policy/model-00002-of-00002.safetensors", "x@2,0", dtype, bits)
    else:
        told = json.loads((saved / "policy/model.parts.json").read_text())
        told["tensors"]["x"]["dtype"] = dtype
        (saved / "policy/model.parts.json").write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=rf"\b{dtype}\b") as caught, opened(file) as found:
        found.read("x")
    assert re.search(r"\bx\b", str(caught.value).partition(": ")[2]) or dtype == "X9"


def test_ranks_that_do_not_have_it_all_are_found_out() -> None:
    with pytest.raises(CheckpointError, match=r"\['x'\] do not cover the whole tensor \(4 values missing\)"):
        assigned([[piece for piece, _ in pieces("x", torch.ones(2, 2), HALVES[0]["x"])]])


# ---------------------------------------------------------------- runs


def test_a_run_killed_while_ranks_write_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, "checkpoint.sharded=true", "checkpoint.async_save=true")
    until = time.monotonic() + 240
    while not list(run_dir.glob("checkpoints/.*-000002.new-*")):
        assert process.poll() is None, (tmp_path / "run.log").read_text()[-3000:]
        assert time.monotonic() < until
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = checkpoint.newest(run_dir / "checkpoints")
    assert left is not None
    assert checkpoint.read_state(left)["step"] in (1, 2)  # 2: it was whole a moment later
    assert (left / "policy/model.parts.json").is_file()
    export_checkpoint(str(left), to=str(tmp_path / "export"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    with opened(left / "policy/model.safetensors") as file:
        for name, p in model.named_parameters():
            assert torch.equal(p, file.read(name))
    # one process goes on from what two ranks wrote, by the same config
    alone = start(run_dir, "train.parallel.dp_shard=1", "checkpoint.sharded=false")
    assert alone.wait(240) == 0, (tmp_path / "run.log").read_text()[-3000:]
    steps = [line["step"] for line in read_lines(run_dir / "metrics.jsonl") if "train/loss" in line]
    assert steps == [1, 2, 3]
    assert (run_dir / "checkpoints" / "0-main-000003" / "policy" / "model.safetensors").is_file()


def start(run_dir: Path, *overrides: str) -> Started:
    path = run_dir.parent / "config.json"
    path.write_text(json.dumps(RUN))
    log = run_dir.parent / f"{run_dir.name}.log"
    return Started("train", str(path), f"run_dir={run_dir}", *overrides, said=log)


def test_a_rank_that_never_ends_writing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LONGEST_S", 0.0)

    def ask(command: str, *arguments: object, **how: object) -> list[Any]:
        return {"pieces": [{}, {}], "flushed": ["", None]}.get(command, [])

    with pytest.raises(SafetensorError, match=r"ranks \[1\] have not written their parts of .* within 0 s"):
        parts.hold(ask, moments=True, copy=True)(tmp_path)
