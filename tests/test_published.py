"""Weights that ranks write themselves: what arrives is what the driver would have sent, and it never has them."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import shutil
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forked import FORKS
from swept import except_for
from test_sync_replicas import Objects, One, load, load_all, run, shipper, state
from test_train_torch import CUT, pg_loss, weighted
from tiny import tiny_model
from whet.config.schema import LoraConfig, ModelConfig, OptimizerConfig
from whet.environment import give_memory_back
from whet.models import kernels
from whet.models.load import build
from whet.models.lora import adapted, attach
from whet.models.mesh import Dims
from whet.models.published import weights_of
from whet.rollout.engine import WeightUpdate
from whet.rollout.native.engine import NativeEngine
from whet.sync.exchange import Publisher, carried
from whet.sync.files import Files
from whet.sync.manifest import Manifest, TensorEntry, describe
from whet.sync.replicas import Inbox, Seat, WrittenVersion
from whet.sync.scratch import scratch
from whet.sync.transport import flatten
from whet.training.ranks import RankGroup, Ranks
from whet.training.torch import TorchEngine
from whet.types import Receipt, WhetError

SGD = OptimizerConfig(name="sgd", lr=0.5)


def policy_model(*, lora: bool, fused: bool = False) -> Any:
    model = tiny_model()
    if lora:
        targets: Any = ("q_proj", "k_proj", "v_proj") if fused else "all-linear"
        attach(model, LoraConfig(rank=2, targets=targets, fused=fused), seed=1)
    return model


def group_of(ranks: Ranks, *, lora: bool = False, fused: bool = False) -> RankGroup:
    model = policy_model(lora=lora, fused=fused)
    return RankGroup(ranks, "policy", model, cut=CUT, optimizer=SGD, total_steps=8)


@pytest.fixture(scope="module", params=["dp_shard", "dp_replicate", "tp", "pp"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(Dims(**{request.param: 2}), timeout_s=60.0)
    yield made
    made.close()


@pytest.fixture
def shards() -> Iterator[Ranks]:
    made = Ranks(Dims(dp_shard=2), timeout_s=60.0)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("lora", "fused", "adapters"),
    [(False, False, False), (True, False, False), (True, True, False), (True, True, True)],
)
def test_ranks_write_what_the_driver_would_send(
    ranks: Ranks, tmp_path: Path, lora: bool, fused: bool, adapters: bool
) -> None:
    """In full, merged and with adapters apart, over every kind of layout; the driver's own copy stays as it was."""
    policy = group_of(ranks, lora=lora, fused=fused)
    publisher = Publisher(Files(tmp_path), whole=not adapters, adapters=adapters)
    for version in (1, 2):
        policy.update(weighted(seed=version), pg_loss)
        policy.version = version
        before = describe(0, policy.structure.named_parameters()).digest
        sent = publisher.publish(policy)
        assert describe(0, policy.structure.named_parameters()).digest == before
        assert str(os.getpid()) not in sent.by
        assert sent.digest == describe(0, carried(weights_of(policy.module), adapters=adapters)).digest
        arrived = {entry.name: tensor for entry, tensor in Files(tmp_path).receive(version)}
        assert all(x is not None for x in arrived.values())
    travelled = [e.name for e in sent.entries if e.sent]
    assert len(travelled) < len(sent.entries) if adapters else len(travelled) == len(sent.entries)


def test_one_process_publishes_by_reference() -> None:
    engine = TorchEngine(policy_model(lora=False), kernels.load("torch"), cut=CUT)
    own = {p.data_ptr() for p in engine.module.parameters()}
    assert engine.publish(lambda weights: {w.own.data_ptr() for w in weights}) == own


@pytest.mark.parametrize("lora", [False, True])
def test_the_driver_has_no_weights_while_ranks_train(shards: Ranks, tmp_path: Path, lora: bool) -> None:
    """From the first update on; asked for its module it has what one process has learned, and may train on."""
    home = tmp_path / "policy"
    lean = RankGroup(
        shards, "policy", policy_model(lora=lora), cut=CUT, optimizer=SGD, total_steps=8, home=home
    )
    kept = TorchEngine(policy_model(lora=lora), kernels.load("auto"), cut=CUT, optimizer=SGD, total_steps=8)
    publisher = Publisher(Files(tmp_path / "weights"))
    for version in (1, 2):
        for engine in (lean, kept):
            engine.update(weighted(seed=version), pg_loss)
        lean.version = version
        assert memory_of(lean.structure) <= 4 * len(list(lean.structure.parameters()))
        assert all(p.isnan().all() for p in lean.structure.parameters()), "a value that is read is no old one"
        sent = publisher.publish(lean)
        assert memory_of(lean.structure) <= 4 * len(list(lean.structure.parameters()))
        assert sent.digest == describe(0, carried(weights_of(lean.module), adapters=False)).digest
        assert not home.exists()
    expected = dict(kept.module.named_parameters())
    for name, p in lean.module.named_parameters():
        torch.testing.assert_close(p, expected[name], rtol=1e-4, atol=1e-5)
        assert p.requires_grad == expected[name].requires_grad
        with torch.no_grad():
            p.add_(1.0)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("kept", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_the_driver_s_memory_is_less_than_the_model_while_versions_are_published(
    shards: Ranks, tmp_path: Path, kept: bool
) -> None:
    """Measured, over several versions. kept: with the copy that a driver has which samples itself, the limit fails."""
    before = anonymous_bytes()
    scratch = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "head_dim": 64}
    model = build(
        ModelConfig(scratch=scratch), vocab_size=64, eos_token_id=1, pad_token_id=0, seed=0, device="cpu",
        dtype=torch.float32,
    )  # fmt: skip
    size = sum(p.nbytes for p in model.parameters())
    home = None if kept else tmp_path / "policy"
    policy = RankGroup(shards, "policy", model, cut=CUT, optimizer=SGD, total_steps=8, home=home)
    publisher, most = Publisher(Files(tmp_path / "weights")), 0
    for version in (1, 2, 3):
        policy.update(weighted(seed=version), pg_loss)
        policy.version = version
        publisher.publish(policy)
        most = max(most, anonymous_bytes() - before)
    assert (most < size / 2) is not kept
    assert len({publisher.digests[v] for v in (1, 2, 3)}) == 3


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    gc.collect()
    give_memory_back()
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("RssAnon")))


def memory_of(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers that training changes."""
    effective = [x for layer in adapted(model).values() if (x := layer.effective) is not None]
    return sum(x.untyped_storage().nbytes() for x in (*model.parameters(), *effective))


# ---------------------------------------------------------------- replicas


class Staged:
    """A `Staging` whose files the policy's own process reads; what comes of it lies among the objects."""

    machine: str | None = None

    def __init__(self, path: Path, policy: RankGroup, objects: Objects) -> None:
        self.path, self.policy, self.objects = path, policy, objects
        path.mkdir()

    def put(self, version: int, names: Sequence[str]) -> int:
        number = len(self.objects.there)
        self.objects.there[number] = self.policy.call(partial(flat_of, self.path, version, tuple(names)))
        return number

    def close(self) -> None:
        shutil.rmtree(self.path)


def flat_of(folder: Path, version: int, names: Sequence[str]) -> Any:
    found = {entry.name: tensor for entry, tensor in Files(folder).receive(version) if tensor is not None}
    return flatten([found[name] for name in names]).numpy()


def apart(policy: RankGroup) -> Any:
    """All of a policy on ranks but its `module`: nothing may ask for that."""
    return SimpleNamespace(
        version=policy.version,
        apart=policy.apart,
        machine=policy.machine,
        structure=policy.structure,
        publish=policy.publish,
        call=policy.call,
    )


@pytest.mark.parametrize("method", ["object_store", "collective"])
@pytest.mark.parametrize("content", [pytest.param("full", marks=pytest.mark.sweep), "adapters"])
def test_replicas_get_versions_that_the_driver_never_has(
    shards: Ranks, tmp_path: Path, method: str, content: str
) -> None:
    """Those of this machine map the files; a broadcast starts in a rank; one on another machine gets a letter, whose
    bytes no function of this process reads or puts into the store."""
    lora = content == "adapters"
    policy, objects = group_of(shards, lora=lora), Objects()
    there = [One(objects, lora=lora, name=f"engine-{n}") for n in range(2)]
    out = shipper(objects, there, lora=lora, method=method, content=content)
    out.stage = lambda machine, size: Staged(tmp_path / "staged", policy, objects)
    out.near = lambda replica, machine: replica is not far

    async def story() -> None:
        source = apart(policy)
        for version in (1, 2, 3):
            policy.update(weighted(seed=version), pg_loss)
            policy.version = source.version = version
            shipment = out.ship(WeightUpdate(version=version, source=source))
            assert await load_all(shipment, there) == [None, None]
            late = One(objects, lora=lora, name="late")
            await load(shipment, late)
            await load(shipment, far)
            assert objects.bytes == 0 or method == "collective", (
                "a replica gives what it has to one that is late"
            )
            for one in (*there, late, far):
                assert state(one.module) == state(policy.module)
                assert one.engine.version == version
            assert out.end is None or out.end.group is None, "this process never joins the group"

    far = One(objects, lora=lora, name="far")
    run(story())
    kinds = {type(delivery) for delivery in there[0].deliveries}
    assert kinds == {Seat if method == "collective" else WrittenVersion}
    assert (tmp_path / "staged").is_dir()
    out.close()
    assert not (tmp_path / "staged").exists()


class Other:
    """A replica in a process of its own. Objects are files there."""

    def __init__(self, model: Any) -> None:
        ours, theirs = Pipe()
        self.process, self.connection = FORKS.Process(target=sample, args=(theirs, model)), ours
        self.process.start()
        self.label, self.held = "engine-0", None

    async def deliver(self, delivery: Any) -> Receipt:
        def asked() -> Any:
            self.connection.send(delivery)
            return self.connection.recv()

        return await asyncio.to_thread(asked)


def sample(connection: Any, model: Any) -> None:
    torch.set_num_threads(1)
    engine = NativeEngine(model, kernels.load("torch"), end_token_ids=[1], max_context=64, version=-1)
    inbox = Inbox(model, name="engine-0", adapters=False, put=np.asarray)

    async def fetched(references: Iterable[Path]) -> list[Any]:
        return [np.load(path) for path in references]

    while (delivery := connection.recv()) is not None:
        connection.send(asyncio.run(inbox.take(engine, delivery, fetched)))


class InFiles(Staged):
    """The policy's process writes what it reads into files."""

    def put(self, version: int, names: Sequence[str]) -> Any:
        path = self.path / f"{version}-{names[0]}.npy"
        self.policy.call(partial(save_flat, path, version, tuple(names)))
        return path


def save_flat(path: Path, version: int, names: Sequence[str]) -> None:
    np.save(path, flat_of(path.parent, version, names))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "how",
    except_for(
        ("collective", "from the driver").__contains__,
        ["files", "object_store", "collective", "from the driver"],
    ),
)
def test_no_byte_of_a_version_of_ranks_is_in_the_driver_s_memory(
    shards: Ranks, tmp_path: Path, how: str
) -> None:
    """The most that it had in memory at once, mapped files included, grows by less than a quarter of the model. The
    control sends the driver's own module."""
    scratch = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "head_dim": 64}
    model = build(
        ModelConfig(scratch=scratch), vocab_size=64, eos_token_id=1, pad_token_id=0, seed=0, device="cpu",
        dtype=torch.float32,
    )  # fmt: skip
    size = sum(p.nbytes for p in model.parameters())
    policy = RankGroup(shards, "policy", model, cut=CUT, optimizer=SGD, total_steps=8)
    objects = Objects()
    replica: Any = Other(model)
    out = shipper(objects, [replica], method="auto" if how in ("files", "object_store") else "collective")
    out.stage = lambda machine, size: InFiles(tmp_path / "staged", policy, objects)
    out.near = lambda replica, machine: how == "files"

    async def story() -> None:
        for version in (1, 2):
            policy.update(weighted(seed=version), pg_loss)
            policy.version = version
            source = {"module": policy.module} if how == "from the driver" else {"source": apart(policy)}
            before = resident_from_now_on()
            await load(out.ship(WeightUpdate(version=version, **source)), replica)
            assert (resident_peak() - before < size / 4) is (how != "from the driver")
            assert replica.held is not None

    try:
        run(story())
        replica.connection.send(None)
    finally:
        out.close()
        replica.process.kill()


def resident_from_now_on() -> int:
    """Let the peak begin anew. Returns what is in memory now."""
    gc.collect()
    give_memory_back()
    Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()


def resident_peak() -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM")))


def test_a_replica_that_dies_while_it_reads_harms_nobody(shards: Ranks, tmp_path: Path) -> None:
    policy, objects = group_of(shards), Objects()
    there = [One(objects, name=f"engine-{n}") for n in range(2)]
    out = shipper(objects, there)
    out.stage = lambda machine, size: Staged(tmp_path / "staged", policy, objects)
    out.near = lambda replica, machine: True

    def die(delivery: Any) -> Any:
        raise RuntimeError("the process has ended")

    async def story() -> None:
        policy.version = 1
        there[0].before = die
        shipment = out.ship(WeightUpdate(version=1, source=apart(policy)))
        lost, fine = await load_all(shipment, there)
        assert isinstance(lost, RuntimeError)
        assert fine is None
        anew = One(objects, name="engine-0")
        await load(shipment, anew)
        assert state(anew.module) == state(policy.module)

    run(story())
    out.close()


@pytest.mark.parametrize("dies_at", [1, 2])
def test_a_replica_that_dies_in_a_broadcast_of_ranks_harms_nobody(
    shards: Ranks, tmp_path: Path, dies_at: int
) -> None:
    """Before it has joined, or with all bytes. The others get the version in another group, from the same rank."""
    policy, objects = group_of(shards), Objects()
    there = [One(objects, name=f"engine-{n}") for n in range(3)]
    lost, *others = there
    out = shipper(objects, there, method="collective", timeout_s=30.0)
    out.stage = lambda machine, size: Staged(tmp_path / "staged", policy, objects)
    taken = lost.deliver

    async def dies(delivery: Any) -> Receipt:
        if delivery.version < dies_at or dies_at == 2:
            receipt = await taken(delivery)
        if delivery.version == dies_at:
            raise RuntimeError("the process has ended")
        return receipt

    lost.deliver = dies  # type: ignore[method-assign]

    async def story() -> None:
        source = apart(policy)
        for version in (1, 2, 3):
            policy.update(weighted(seed=version), pg_loss)
            policy.version = source.version = version
            told = await load_all(out.ship(WeightUpdate(version=version, source=source)), list(there))
            assert [type(error) for error in told if error] == [RuntimeError] * (version == dies_at)
            if version == dies_at:
                there.remove(lost)
            for one in others:
                assert state(one.module) == state(policy.module)
                assert one.engine.version == version

    run(story())
    out.close()


# ---------------------------------------------------------------- faults


class Dying(Files):
    """Its process is killed in the middle of a version."""

    def send(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        held: Mapping[str, TensorEntry] | None = None,
    ) -> Manifest:
        def some() -> Iterator[tuple[str, Tensor]]:
            for number, one in enumerate(tensors):
                if number == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield one

        return super().send(version, some(), held=held)


class Small(Files):
    """Its process may write no file of more than 4 KiB."""

    def send(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        held: Mapping[str, TensorEntry] | None = None,
    ) -> Manifest:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return super().send(version, tensors, held=held)


def test_a_rank_that_is_killed_while_it_writes_leaves_no_half_version(shards: Ranks, tmp_path: Path) -> None:
    policy = group_of(shards)
    policy.version = 1
    first = Publisher(Files(tmp_path)).publish(policy)
    policy.version = 2
    with pytest.raises(
        WhetError, match=r"rank 0 of 2 died \(killed by SIGKILL\) while doing: publish policy"
    ):
        Publisher(Dying(tmp_path, bucket_bytes=1024)).publish(policy)
    files = Files(tmp_path, timeout_s=0.0)
    assert files.newest() == 1
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")], "it had begun"
    with pytest.raises(WhetError, match="version 2"):
        list(files.receive(2))
    files.tidy()
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]
    came = [(entry.name, tensor) for entry, tensor in files.receive(1) if tensor is not None]
    assert describe(1, came).digest == first.digest


def test_a_folder_without_room_is_named_with_the_size(shards: Ranks, tmp_path: Path) -> None:
    policy = group_of(shards)
    policy.version = 1
    with pytest.raises(WhetError, match=rf"{tmp_path}.*version 1: .* MiB had been written, .* MiB are free"):
        Publisher(Small(tmp_path)).publish(policy)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- the folder


def test_a_folder_in_memory_goes_with_its_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In memory where there is room. What a killed process left is removed by the next (tests/test_temporary.py)."""
    caplog.set_level(logging.INFO)
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    memory.mkdir()
    (memory / "whet-weights-abcd1234").mkdir(mode=0o700)
    living, other = (scratch(disk, size=1, memory=memory) for _ in range(2))
    assert sorted(memory.iterdir()) == sorted([living.path, other.path])
    for one in (living, other, other):
        one.close()
    assert not list(memory.iterdir())
    full = scratch(disk, size=1 << 60, memory=memory)
    assert full.path.parent == disk
    assert "they go through" in caplog.text
    full.close()
    assert not list(disk.iterdir())
