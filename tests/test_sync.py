"""Weights on their way: what arrives is what was sent, or an error names the tensor and the version."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asking import reply
from tiny import tiny_model
from whet.config.schema import LoraConfig
from whet.models import kernels
from whet.models.lora import adapted, attach, merged, refresh
from whet.rollout.native.engine import NativeEngine
from whet.sync.exchange import Publisher, Receiver, cast, shared, with_adapters
from whet.sync.files import Files
from whet.sync.manifest import (
    DTYPES,
    Manifest,
    Piece,
    checked,
    describe,
    digest_of,
    pieces,
)
from whet.sync.parcels import Letter, Parcels
from whet.sync.transport import Transport, buckets, flatten, split
from whet.types import Receipt, Sampling, WhetError

Named = list[tuple[str, Tensor]]


def some(step: int = 0) -> Named:
    """Three kinds of tensors; only `b` changes with the step."""
    draw = torch.Generator().manual_seed(1)
    return [
        ("a", torch.randn(5, 7, generator=draw)),
        ("b", torch.full((33,), float(step), dtype=torch.bfloat16)),
        ("c", torch.randn((), generator=draw)),
    ]


def fake_store() -> Parcels:
    """An object store as Ray's: whoever puts gets a key, whoever gets may not write."""
    objects: dict[int, np.ndarray] = {}

    def put(value: np.ndarray) -> int:
        value = value.copy()
        value.flags.writeable = False
        objects[len(objects)] = value
        return len(objects) - 1

    return Parcels(put, objects.__getitem__)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "weights", timeout_s=0.2, keep=2, bucket_bytes=150)


@pytest.fixture(params=["files", "object_store"])
def transport(request: pytest.FixtureRequest, files: Files) -> Transport:
    return files if request.param == "files" else fake_store()


def take(
    transport: Transport, version: int, held: Manifest | None = None
) -> tuple[dict[str, Tensor | None], Manifest]:
    """Everything of a version, checked."""
    got: dict[str, Tensor | None] = {}

    def all_of_it() -> Iterator[None]:
        manifest = yield from checked(transport.receive(version, held=held), version, held)
        got[""] = manifest  # type: ignore[assignment]

    for item in all_of_it():
        got[item[0]] = item[1]  # type: ignore[index]
    return got, got.pop("")  # type: ignore[return-value]


# ---------------------------------------------------------------- the contract of a transport


def test_what_is_sent_arrives(transport: Transport) -> None:
    sent = transport.send(4, some())
    got, manifest = take(transport, 4)
    assert manifest == sent == describe(4, some())
    assert list(got) == ["a", "b", "c"]
    for name, tensor in some():
        assert torch.equal(got[name], tensor)  # type: ignore[arg-type]
        assert got[name].dtype == tensor.dtype  # type: ignore[union-attr]


def test_what_all_have_stays_behind(transport: Transport) -> None:
    first = transport.send(1, some(1))
    second = transport.send(2, some(2), held=first.named)
    assert [e.name for e in second.entries if e.sent] == ["b"]
    assert second.digest == describe(2, some(2)).digest != first.digest
    got, manifest = take(transport, 2, first)
    assert got["a"] is None
    assert got["c"] is None
    assert torch.equal(got["b"], some(2)[1][1])  # type: ignore[arg-type]
    assert manifest.digest == second.digest


def test_who_missed_a_version_needs_it_whole(transport: Transport) -> None:
    first = transport.send(1, some())
    transport.send(2, [(n, t + 1) for n, t in some()], held=first.named)
    newer = [(n, t + 5) for n, t in some()]  # of `c` nobody was ever sent this
    third = transport.send(3, [*[(n, t + 1) for n, t in some()[:2]], newer[2]], held=describe(2, newer).named)
    assert [e.name for e in third.entries if e.sent] == ["a", "b"]
    with pytest.raises(WhetError, match=r"version 3: 'c' was not sent.*holds no earlier"):
        take(transport, 3)
    other = describe(2, [(n, t + 1) for n, t in some()])
    with pytest.raises(
        WhetError, match=r"version 3: 'c' was not sent.*different values of it, from version 2"
    ):
        take(transport, 3, other)
    got, _ = take(transport, 3, describe(1, newer))
    assert got["c"] is None  # what counts is what is there, not which version it came with


def test_a_version_that_never_comes(files: Files) -> None:
    with pytest.raises(
        WhetError,
        match=r"version 3.* did not arrive within sync.timeout_s=0.2 s \(since ..:..:..\); none has arrived yet",
    ):
        take(files, 3)
    files.send(2, some())
    with pytest.raises(
        WhetError, match=r"version 3.* did not arrive within sync.timeout_s=0.2 s .*the newest is 2"
    ):
        take(files, 3)


def test_an_old_version_is_gone_and_that_is_said(files: Files) -> None:
    for version in (1, 2, 3):
        files.send(version, some(version))
    take(files, 2)
    with pytest.raises(WhetError, match=r"version 1 is not in .*the newest.* is 3"):
        take(files, 1)


def test_a_trainer_that_went_back_takes_later_versions_away(files: Files) -> None:
    for version in (5, 6, 5):
        files.send(version, some(version))
    assert files.newest() == 5
    files.send(4, some(44))
    assert files.newest() == 4
    assert float(take(files, 4)[0]["b"][0]) == 44  # type: ignore[index]


def test_receipts_come_back(files: Files) -> None:
    assert list(files.receipts()) == []
    for receipt in (
        Receipt("e-1", 1, "x"),
        Receipt("e-2", 1, "", error="no"),
        Receipt("e-1", 2, "y"),
    ):
        files.confirm(receipt)
    assert sorted(files.receipts(), key=lambda r: r.receiver) == [
        Receipt("e-1", 2, "y"),
        Receipt("e-2", 1, "", error="no"),
    ]


# ---------------------------------------------------------------- faults, at every tensor


def tampered(stream: Iterator[Piece], manifest: Manifest, fault: str, at: int) -> Any:
    def pieces_of_it() -> Any:
        for number, (entry, tensor) in enumerate(stream):
            assert tensor is not None
            if number != at:
                yield entry, tensor
            elif fault == "byte":
                raw = tensor.clone().reshape(-1).view(torch.uint8)
                raw[-1] ^= 1
                yield entry, raw.view(tensor.dtype).view(tensor.shape)
            elif fault == "shape":
                yield entry, tensor.reshape(1, *tensor.shape)
            elif fault == "dtype":
                yield entry, tensor.to(torch.float64)
            elif fault == "twice":
                yield entry, tensor
                yield entry, tensor
            elif fault == "stranger":
                yield replace(entry, name="z"), tensor
            elif fault == "another":
                other = tensor + 1
                yield replace(entry, digest=digest_of(other)), other
            else:
                assert fault == "lost"
        return manifest

    return pieces_of_it()


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("lost", "1 of 3 tensors were not received: '{}'"),
        ("byte", "'{}' has different bytes than were sent"),
        ("shape", "'{}' was received as"),
        ("dtype", "'{}' was received as float64"),
        ("twice", "'{}' was received twice"),
        ("stranger", "1 of 3 tensors were not received: '{}'"),
        ("another", "'{}' does not match its manifest"),
    ],
)
def test_a_fault_names_tensor_and_version(fault: str, words: str, at: int) -> None:
    manifest = describe(9, some())
    stream = tampered(pieces(some(), {}), manifest, fault, at)
    with pytest.raises(WhetError, match=r"version 9.*" + words.format("abc"[at])):
        list(checked(stream, 9, None))


def test_a_tensor_too_many_is_found() -> None:
    more = [*some(), ("d", torch.zeros(2))]
    with pytest.raises(WhetError, match="version 9: 'd' does not match its manifest"):
        list(checked(tampered(pieces(more, {}), describe(9, some()), "none", 99), 9, None))


def test_another_version_than_asked_for_is_found() -> None:
    with pytest.raises(WhetError, match=r"version 9 was requested, but version 8 by .* was received"):
        list(checked(tampered(pieces(some(), {}), describe(8, some()), "none", 99), 9, None))


def test_a_manifest_that_was_changed_is_found() -> None:
    value = json.loads(json.dumps(describe(3, some()).to_json()))
    assert Manifest.from_json(value) == describe(3, some())
    for entry in range(3):
        for field in (0, 1, 2, 3):
            hurt = json.loads(json.dumps(value))
            hurt["entries"][entry][field] = [4] if field == 1 else "int8"
            with pytest.raises(WhetError, match="manifest of weights version 3 is damaged"):
                Manifest.from_json(hurt)
    for odd in ({}, {"version": 1}, [], {"entries": 3}, value | {"entries": [[1]]}):
        with pytest.raises(WhetError, match="damaged"):
            Manifest.from_json(odd)


def test_a_letter_that_is_torn() -> None:
    ours, theirs = fake_store(), fake_store()
    theirs.get = ours.get
    ours.bucket_bytes = 150
    ours.send(2, some(2))
    theirs.accept(ours.letter(2))
    take(theirs, 2)
    manifest, parcels = ours.letter(2).manifest, ours.letter(2).parcels
    with pytest.raises(WhetError, match="version 1 is not in the object store"):
        take(theirs, 1)
    assert len(parcels) > 1
    theirs.accept(Letter(manifest, parcels[1:]))
    with pytest.raises(WhetError, match="1 of 3 tensors were not received: 'a'"):
        take(theirs, 2)
    theirs.accept(Letter(manifest, (*parcels, parcels[0])))
    with pytest.raises(WhetError, match="'a' was received twice"):
        take(theirs, 2)
    theirs.accept(Letter(manifest, ((parcels[0][0], parcels[1][1]),)))
    with pytest.raises(WhetError, match=r"a buffer of .* bytes for 'a'"):
        take(theirs, 2)


# ---------------------------------------------------------------- bytes


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 200),
)
def test_any_tensors_survive_flattening_and_bucketing(kinds: list[tuple[str, list[int]]], most: int) -> None:
    tensors = [
        (
            str(i),
            (torch.arange(int(np.prod(shape)) * 8) % 251).to(torch.uint8)[
                : int(np.prod(shape)) * DTYPES[d].itemsize
            ],
        )
        for i, (d, shape) in enumerate(kinds)
    ]
    shaped = [
        (n, t.clone().view(DTYPES[d]).view(shape))
        for (n, t), (d, shape) in zip(tensors, kinds)
        if d != "bool"
    ]
    back: Named = []
    for bucket in buckets(pieces(shaped, {}), most):
        entries = [e for e, _ in bucket]
        sizes = [t.nbytes for _, t in bucket if t is not None]
        assert len(bucket) == 1 or sum(sizes) <= most
        back += zip(
            (e.name for e in entries), split(flatten([t for _, t in bucket if t is not None]), entries)
        )
    assert [n for n, _ in back] == [n for n, _ in shaped]
    for (_, a), (_, b) in zip(back, shaped):
        assert (a.dtype, a.shape, digest_of(a)) == (b.dtype, b.shape, digest_of(b))


def test_a_digest_is_of_bytes_in_row_major_order() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert digest_of(x.t()) == digest_of(x.t().contiguous()) != digest_of(x)
    assert digest_of(torch.tensor(0.0)) != digest_of(torch.tensor(-0.0))
    assert digest_of(x[:, 1:]) == digest_of(x[:, 1:].clone())
    with pytest.raises(WhetError, match="'x' has dtype complex64"):
        describe(0, [("x", torch.zeros(1, dtype=torch.complex64))])


def test_only_floating_point_is_cast() -> None:
    given_ = [("x", torch.tensor([1.00390625])), ("n", torch.tensor([3]))]
    assert dict(cast(given_, torch.bfloat16)) == {
        "x": torch.tensor([1.0], dtype=torch.bfloat16),
        "n": given_[1][1],
    }


# ---------------------------------------------------------------- trainer and engine


def engine_of(module: Any) -> NativeEngine:
    return NativeEngine(module, kernels.load("torch"), end_token_ids=[1], max_context=64)


def parameters(module: Any) -> Named:
    return [(n, p.detach()) for n, p in module.named_parameters()]


def state(module: Any) -> str:
    return describe(0, parameters(module)).digest


def pair(
    transport: Transport, *, whole: bool, module: Any = None, **options: Any
) -> tuple[Publisher, Receiver]:
    said: list[Receipt] = []
    publisher = Publisher(transport, receipts=lambda: said, whole=whole, **options)
    publisher.join("e-1")
    return publisher, Receiver(transport, name="e-1", module=module, confirm=said.append)


def receipt_of(publisher: Publisher) -> Receipt:
    *_, receipt = publisher.receipts()
    return receipt


def settle(publisher: Publisher, receiver: Receiver) -> None:
    """The receiver has confirmed what was sent last: the next version goes by that."""
    version = max(publisher.digests)
    assert receipt_of(publisher) == Receipt("e-1", version, publisher.digests[version])
    publisher.join("e-1", receiver.held)


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_versions_reach_the_engine_and_are_confirmed(transport: Transport, whole: bool, staged: bool) -> None:
    policy, other = tiny_model(seed=1), tiny_model(seed=2)
    engine = engine_of(other)
    publisher, receiver = pair(transport, whole=whole)
    receiver.staged = staged
    moved = []

    async def story() -> None:
        for version in (1, 2, 3):
            manifest = publisher.send(version, parameters(policy))
            receipt = await receiver.load(engine, version)
            assert receipt == Receipt("e-1", version, manifest.digest)
            settle(publisher, receiver)
            assert engine.version == version
            assert state(other) == state(policy)
            moved.append(sum(e.sent for e in manifest.entries))
            with torch.no_grad():
                policy.model.norm.weight.add_(0.5)

    asyncio.run(story())
    count = len(parameters(policy))
    assert moved == ([count] * 3 if whole else [count, 1, 1])


def test_late_and_twice_are_refused_and_the_engine_stays(transport: Transport) -> None:
    policy, other = tiny_model(seed=1), tiny_model(seed=2)
    engine = engine_of(other)
    publisher, receiver = pair(transport, whole=True)

    async def story() -> None:
        publisher.send(2, parameters(policy))
        await receiver.load(engine, 2)
        for version, word in ((1, "late"), (2, "twice")):
            with pytest.raises(
                WhetError, match=f"version {version} for e-1 arrived {word}: version 2 is already loaded"
            ):
                await receiver.load(engine, version)
        await receiver.load(engine, 2, again=True)
        assert engine.version == 2
        await reply(engine, [3, 4], Sampling(max_tokens=2))
        receiver.version = None
        publisher.send(1, parameters(policy))
        await receiver.load(engine, 1)
        assert engine.version == 1

    asyncio.run(story())


def test_a_fault_before_the_engine_leaves_it_and_one_within_stops_it() -> None:
    """Staged: checked first. Streamed: a mix, which nobody samples from until a whole version has come."""
    policy, other = tiny_model(seed=1), tiny_model(seed=2)
    engine, before = engine_of(other), state(other)
    transport = fake_store()
    publisher, receiver = pair(transport, whole=False)

    def torn(version: int) -> None:
        publisher.send(version, parameters(policy))
        letter = transport.letter(version)
        *others, (names, flat) = letter.parcels
        hurt = transport.get(flat).copy()
        hurt[-1] ^= 1
        transport.accept(Letter(letter.manifest, (*others, (names, transport.put(hurt)))))

    async def story() -> None:
        last = parameters(policy)[-1][0]
        torn(1)
        with pytest.raises(WhetError, match=f"version 1: '{last}' has different bytes"):
            await receiver.load(engine, 1)
        assert "different bytes" in receipt_of(publisher).error
        assert state(other) == before
        await reply(engine, [3, 4], Sampling(max_tokens=2))
        receiver.staged = False
        torn(2)
        with pytest.raises(WhetError, match=f"version 2: '{last}' has different bytes"):
            await receiver.load(engine, 2)
        with pytest.raises(WhetError, match="weights are incomplete"):
            await reply(engine, [3, 4], Sampling(max_tokens=2))
        publisher.send(3, parameters(policy))
        await receiver.load(engine, 3)
        settle(publisher, receiver)
        await reply(engine, [3, 4], Sampling(max_tokens=2))

    asyncio.run(story())
    assert state(other) == state(policy)


def test_a_receiver_that_begins_anew_gets_all(transport: Transport) -> None:
    """It lost what it had without a word: what was not sent is still there, with the last version that was whole."""
    policy, other = tiny_model(seed=1), tiny_model(seed=2)
    engine = engine_of(other)
    publisher, receiver = pair(transport, whole=False)

    async def story() -> None:
        publisher.send(1, parameters(policy))
        await receiver.load(engine, 1)
        settle(publisher, receiver)
        for version in (2, 3, 4):
            with torch.no_grad():
                policy.model.norm.weight.add_(0.5)
            sent = publisher.send(version, parameters(policy))
            assert sum(e.sent for e in sent.entries) == 1
            if version < 4:
                await receiver.load(engine, version)
        with torch.no_grad():
            other.model.norm.weight.zero_()
            other.model.embed_tokens.weight.zero_()
        anew = Receiver(transport, name="e-1", confirm=receiver.confirm)
        await anew.load(engine, 4)
        settle(publisher, anew)

    asyncio.run(story())
    assert state(other) == state(policy)


def test_receivers_that_nobody_knows_take_what_they_lack(transport: Transport) -> None:
    """The trainer sends what has changed since the last whole version; one that follows takes that, one that comes
    anew all. When more than half has changed, the next version is whole."""
    policy, other, late = (tiny_model(seed=n) for n in (1, 2, 3))
    publisher, receiver = pair(transport, whole=False)
    publisher.held.clear()
    engine, sent = engine_of(other), []

    async def story() -> None:
        for version in range(1, 7):
            manifest = publisher.send(version, parameters(policy))
            sent.append(sum(e.sent for e in manifest.entries))
            await receiver.load(engine, version)
            await Receiver(transport, name="e-2").load(engine_of(late), version)
            assert state(other) == state(late) == state(policy)
            with torch.no_grad():
                for parameter in policy.parameters() if version == 3 else [policy.model.norm.weight]:
                    parameter.add_(0.25)
        publisher.look()

    asyncio.run(story())
    count = len(parameters(policy))
    assert sent == [count, 1, 1, count, 1, 1]


def test_a_receiver_that_holds_other_weights_is_found_by_its_receipt(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for it; what it says is looked at before the next optimizer step."""
    publisher = Publisher(files, receipts=files.receipts)
    first = publisher.send(1, some(1))
    files.confirm(Receipt("e-1", 1, first.digest))
    files.confirm(Receipt("e-2", 1, "", error="the disk is gone"))
    publisher.look()
    publisher.look()
    assert [r.getMessage() for r in caplog.records] == [
        "weights version 1 was not loaded by e-2: the disk is gone"
    ]
    publisher.send(2, some(2))
    files.confirm(Receipt("e-1", 1, describe(1, some(9)).digest))
    with pytest.raises(
        WhetError, match=r"e-1 confirms weights version 1 with digest .*; version 1 with .* was sent"
    ):
        publisher.look()


@pytest.mark.parametrize(("reached", "call"), [(True, lambda f: f()), (False, lambda f: None)])
def test_a_folder_is_shared_if_each_machine_reads_what_the_other_wrote(
    tmp_path: Path, reached: bool, call: Any
) -> None:
    """A machine that does not reach it gives no answer there."""
    policy: Any = SimpleNamespace(call=call)
    assert shared(policy, tmp_path / "weights") is reached
    assert list((tmp_path / "weights").iterdir()) == []


# ---------------------------------------------------------------- adapters


def with_lora(seed: int = 0, family: str = "qwen3", **lora: Any) -> Any:
    model = tiny_model(family, seed=seed)
    attach(model, LoraConfig(rank=2, **lora), seed=3)
    return model


STACKS: dict[str, Any] = {"family": "qwen3_moe", "targets": ("o_proj", "gate_up_proj", "down_proj")}
LORA: dict[str, dict[str, Any]] = {
    "layers": {},
    "each expert": STACKS,
    "shared by experts": {**STACKS, "experts": "shared"},
}


def learn(model: Any, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted(model).values():
            layer.lora_A.copy_(torch.randn(layer.lora_A.shape, generator=draw))
            layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=draw))
    refresh(model)


@pytest.mark.parametrize("what", LORA)
def test_adapters_travel_alone_and_make_the_trainer_s_weights(transport: Transport, what: str) -> None:
    policy, other = with_lora(**LORA[what]), with_lora(**LORA[what])
    engine = engine_of(other)
    publisher, receiver = pair(transport, whole=False, module=other)
    publisher.join("e-1", receiver.held)

    async def story() -> None:
        for version in (1, 2):
            learn(policy, version)
            manifest = publisher.send(version, with_adapters(policy))
            travelled = {e.name for e in manifest.entries if e.sent}
            assert {n.rpartition(".")[2] for n in travelled} == {
                "lora_A",
                "lora_B",
                "digest of the merged weights",
            }
            await receiver.load(engine, version)
            settle(publisher, receiver)
            assert state(merged(other)) == state(merged(policy))

    asyncio.run(story())


def test_adapters_over_another_base_are_found(transport: Transport) -> None:
    policy, other = with_lora(), with_lora(seed=1)
    engine = engine_of(other)
    publisher, receiver = pair(transport, whole=False, module=other)
    learn(policy, 1)

    async def story() -> None:
        publisher.join(
            "e-1", Receiver(transport, name="x", module=with_lora()).held
        )  # says it has the right one
        publisher.send(1, with_adapters(policy))
        with pytest.raises(
            WhetError,
            match="was not sent because it has not changed, but this receiver holds different values",
        ):
            await receiver.load(engine, 1)
        assert receipt_of(publisher).error.startswith("weights version 1: ")
        publisher.send(1, with_adapters(policy), whole=True)
        await receiver.load(engine, 1)
        settle(publisher, receiver)

    asyncio.run(story())
    assert state(merged(other)) == state(merged(policy))


def test_adapters_of_another_scale_do_not_pass() -> None:
    policy, other = with_lora(), with_lora()
    next(iter(adapted(other).values())).scale *= 2
    engine = engine_of(other)
    publisher, receiver = pair(fake_store(), whole=False, module=other)
    learn(policy, 1)

    async def story() -> None:
        publisher.send(1, with_adapters(policy))
        with pytest.raises(WhetError, match="adapters of e-1 do not reproduce the trainer's weights"):
            await receiver.load(engine, 1)
        with pytest.raises(WhetError, match="weights are incomplete"):
            await reply(engine, [3, 4], Sampling(max_tokens=2))

    asyncio.run(story())
