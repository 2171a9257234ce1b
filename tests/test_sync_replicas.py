"""Weights to engine replicas: each has what the trainer sent, whoever comes late, dies or hangs in the middle.

A replica is a thread with an engine of its own, which blocks as a process does.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asking import reply
from tiny import tiny_model
from whet.config.schema import Config, LoraConfig
from whet.models import kernels
from whet.models.lora import adapted, attach, merged, refresh
from whet.rollout.engine import Health, WeightUpdate
from whet.rollout.native.engine import NativeEngine
from whet.rollout.replica import Replica
from whet.rollout.router import Router, Shipment
from whet.sync.manifest import Manifest, describe
from whet.sync.parcels import Letter, Parcels
from whet.sync.replicas import Delivery, Inbox, Replicated, Seat, Shipped, Shipper
from whet.types import Receipt, Sampling, WhetError


class Objects:
    """An object store that counts what it is given."""

    def __init__(self) -> None:
        self.there: dict[int, np.ndarray] = {}
        self.bytes = 0

    def put(self, value: np.ndarray) -> int:
        self.bytes += value.nbytes
        self.there[len(self.there)] = value.copy()
        return len(self.there) - 1

    async def fetch(self, references: Iterable[int]) -> list[np.ndarray]:
        return [self.there[r] for r in references]


class One:
    """A replica. before: called with each delivery, in its thread, before it is taken."""

    def __init__(self, objects: Objects, *, lora: bool = False, name: str = "engine") -> None:
        self.module = model(9, lora=lora)
        self.engine = NativeEngine(
            self.module, kernels.load("torch"), end_token_ids=[1], max_context=64, version=-1
        )
        self.inbox = Inbox(self.module, name=name, adapters=lora, put=objects.put)
        self.objects, self.label = objects, name
        self.held: Manifest | None = None
        self.deliveries: list[Delivery] = []
        self.before: Callable[[Delivery], Delivery] = lambda delivery: delivery

    async def deliver(self, delivery: Delivery) -> Receipt:
        self.deliveries.append(delivery)

        def taken() -> Receipt:
            torch.set_num_threads(1)
            return asyncio.run(self.inbox.take(self.engine, self.before(delivery), self.objects.fetch))

        return await asyncio.to_thread(taken)

    async def give(self) -> Letter:
        return self.inbox.give()


class Handle:
    """What a router has of a replica elsewhere."""

    def __init__(self, one: One) -> None:
        self.one, self.version, self.can = one, -1, one.engine.can

    async def update_weights(self, update: WeightUpdate) -> Receipt:
        assert isinstance(update.tensors, Shipped)
        receipt = await update.tensors.to(self.one)
        self.version = update.version
        return receipt

    async def health(self) -> Health:
        return await self.one.engine.health()


def model(seed: int, *, lora: bool) -> Any:
    made = tiny_model(seed=seed)
    if lora:
        attach(made, LoraConfig(rank=2), seed=seed)
    return made


def learn(policy: Any, step: int, *, some: bool = False) -> None:
    """some: one tensor only."""
    draw = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for layer in adapted(policy).values():
            layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=draw))
        for parameter in (
            [] if adapted(policy) else [policy.model.norm.weight] if some else policy.parameters()
        ):
            parameter.add_(torch.randn(parameter.shape, generator=draw))
    refresh(policy)


def state(module: Any) -> str:
    module = merged(module) if adapted(module) else module
    return describe(0, ((n, p.detach()) for n, p in module.named_parameters())).digest


def shipper(objects: Objects, members: list[One], *, lora: bool = False, **sync: Any) -> Shipper:
    tree: dict[str, Any] = {"model": {"lora": {"rank": 2}} if lora else {}, "sync": sync}
    cfg = Config.model_validate(tree)
    out = Shipper(cfg, Parcels(objects.put, objects.there.__getitem__))
    out.members = lambda: list(members)
    if sync.get("method") == "collective":
        out.host = lambda who, machine: "127.0.0.1"
    return out


async def load(shipment: Shipment, replica: Replicated) -> None:
    source = shipment()
    assert isinstance(source.tensors, Shipped)
    await source.tensors.to(replica)


async def load_all(shipment: Shipment, replicas: Iterable[Replicated]) -> list[BaseException | None]:
    return list(await asyncio.gather(*(load(shipment, r) for r in replicas), return_exceptions=True))


def run(story: Any) -> None:
    asyncio.run(asyncio.wait_for(story, 120))


@pytest.mark.parametrize("method", ["object_store", "collective"])
@pytest.mark.parametrize("content", ["full", "delta", "adapters"])
def test_every_version_reaches_every_replica(method: str, content: str) -> None:
    """What has not changed stays behind; who comes late or anew has everything all the same."""
    lora = content == "adapters"
    objects, policy = Objects(), model(1, lora=lora)
    there = [One(objects, lora=lora, name=f"engine-{n}") for n in range(2)]
    out = shipper(objects, there, lora=lora, method=method, content=content)
    travelled: list[int] = []

    async def story() -> None:
        for version in range(1, 5):
            if version == 3:
                there[0] = One(objects, lora=lora, name="engine-0")  # anew
            learn(policy, version, some=True)
            shipment = out.ship(WeightUpdate(version=version, module=policy))
            assert await load_all(shipment, there) == [None, None]
            late = One(objects, lora=lora, name="late")
            await load(shipment, late)
            for one in (*there, late):
                assert state(one.module) == state(policy)
                assert one.engine.version == version
                assert one.held is not None
                await reply(one.engine, [3, 4], Sampling(max_tokens=2))
            travelled.append(sum(e.sent for e in there[1].held.entries))  # type: ignore[union-attr]

    run(story())
    count = len(list(policy.parameters())) + lora
    changed = {"full": count, "delta": 1, "adapters": len(adapted(policy)) + 1}[content]
    anew = changed if method == "object_store" else count  # a broadcast has what any of them lacks
    assert travelled == [count, changed, anew, changed]


def test_a_narrower_dtype_travels_and_is_given_on() -> None:
    objects, policy = Objects(), model(1, lora=False)
    there = [One(objects)]
    out = shipper(objects, there, method="collective", dtype="bfloat16")

    async def story() -> None:
        shipment = out.ship(WeightUpdate(version=1, module=policy))
        late = One(objects)
        assert await load_all(shipment, there) == [None]
        await load(shipment, late)
        for name, parameter in policy.named_parameters():
            for one in (there[0], late):
                assert torch.equal(one.module.get_parameter(name), parameter.bfloat16().float())

    run(story())


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_broadcast_goes_on_without_a_replica_that_is_lost(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is lost in the middle of a version. The others get that version in a group of their own, and the next."""
    caplog.set_level(logging.WARNING)
    objects, policy = Objects(), model(1, lora=False)
    there = [One(objects, name=f"engine-{n}") for n in range(3)]
    out = shipper(objects, there, method="collective", timeout_s=40.0 if how == "dies" else 20.0)
    lost, hold = there[1], threading.Event()

    def struck(delivery: Delivery) -> Delivery:
        if isinstance(delivery, Seat) and delivery.version == 2:
            if how == "dies":
                raise RuntimeError("the process has ended")
            hold.wait(60.0)
        return delivery

    lost.before = struck

    async def story() -> None:
        assert await load_all(out.ship(WeightUpdate(version=1, module=policy)), there) == [None] * 3
        learn(policy, 2)
        errors = await load_all(out.ship(WeightUpdate(version=2, module=policy)), there)
        assert [type(e) for e in errors] == [
            type(None),
            RuntimeError if how == "dies" else WhetError,
            type(None),
        ]
        there.remove(lost)
        learn(policy, 3)
        assert await load_all(out.ship(WeightUpdate(version=3, module=policy)), there) == [None, None]
        hold.set()
        for one in there:
            assert state(one.module) == state(policy)

    run(story())
    assert any("the broadcast is repeated without engine-1" in r.getMessage() for r in caplog.records)


def test_weights_that_no_replica_takes_are_said_once_and_all_of_them_refuse() -> None:
    objects, policy = Objects(), model(1, lora=False)
    there = [One(objects, name=f"engine-{n}") for n in range(2)]
    out = shipper(objects, there, method="collective", timeout_s=20.0)

    def torn() -> Any:
        named = list(policy.named_parameters())
        return ((n, p.detach()) for n, p in named[:-1])

    out.carried = lambda source: torn()  # type: ignore[method-assign]

    async def story() -> None:
        errors = await load_all(out.ship(WeightUpdate(version=1, module=policy)), there)
        assert {str(e) for e in errors} == {
            "weight sync: 1 of 24 parameters were not received: model.norm.weight"
        }
        for one in there:
            with pytest.raises(WhetError, match="weights are incomplete"):
                await reply(one.engine, [3, 4], Sampling(max_tokens=2))

    run(story())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("drop", "tensors were not received"),
        ("wrong", "has different bytes"),
        ("late", "arrived late: version 2 is already loaded"),
    ],
)
def test_a_fault_on_the_way_is_found_before_the_next_step(fault: str, said: str) -> None:
    """`to` ends with it, which the trainer waits for; the engine samples nothing more from a mix."""
    objects, policy = Objects(), model(1, lora=False)
    one = One(objects)
    out = shipper(objects, [one])
    letters: list[Letter] = []

    def hurt(delivery: Delivery) -> Delivery:
        assert isinstance(delivery, Letter)
        letters.append(delivery)
        if delivery.manifest.version < 3:
            return delivery
        if fault == "late":
            return letters[0]
        (_, reference), *_ = delivery.parcels
        if fault == "drop":
            return replace(delivery, parcels=())
        objects.there[reference] = objects.there[reference].copy()
        objects.there[reference][-1] ^= 1
        objects.there[reference][0] ^= 1
        return delivery

    one.before = hurt

    async def story() -> None:
        for version in (1, 2):
            await load(out.ship(WeightUpdate(version=version, module=policy)), one)
            learn(policy, version)
        with pytest.raises(WhetError, match=said):
            await load(out.ship(WeightUpdate(version=3, module=policy)), one)
        assert one.held is None
        if fault != "late":
            with pytest.raises(WhetError, match="weights are incomplete"):
                await reply(one.engine, [3, 4], Sampling(max_tokens=2))

    run(story())


def test_what_is_delivered_twice_is_taken_once_more() -> None:
    """It is sent again for another replica's sake."""
    objects, policy = Objects(), model(1, lora=False)
    one = One(objects)
    out = shipper(objects, [one])

    async def story() -> None:
        shipment = out.ship(WeightUpdate(version=1, module=policy))
        await load(shipment, one)
        await load(shipment, one)
        assert state(one.module) == state(policy)

    run(story())


def test_a_replica_that_confirms_other_weights_is_refused() -> None:
    objects, policy = Objects(), model(1, lora=False)
    one = One(objects)
    out = shipper(objects, [one])
    taken = one.deliver

    async def odd(delivery: Delivery) -> Receipt:
        return replace(await taken(delivery), proof="0" * 32)

    one.deliver = odd  # type: ignore[method-assign]

    async def story() -> None:
        with pytest.raises(
            WhetError, match=r"version 1: engine has \(version, digest\) \(1, '0+'\), but sent was \(1, "
        ):
            await load(out.ship(WeightUpdate(version=1, module=policy)), one)

    run(story())


def test_who_comes_late_takes_a_version_from_one_who_has_it_never_a_mix() -> None:
    """The trainer has learned since: nobody is given that under the old version."""
    objects, policy = Objects(), model(1, lora=False)
    there = [One(objects, name="engine-0")]
    out = shipper(objects, there, method="collective")

    async def story() -> None:
        shipment = out.ship(WeightUpdate(version=1, module=policy))
        await load(shipment, there[0])
        sent = state(policy)
        learn(policy, 2)
        late = One(objects, name="late")
        await load(shipment, late)
        assert state(late.module) == sent
        there.clear()
        with pytest.raises(
            WhetError, match="version 1 is no longer available, because the trainer has updated since"
        ):
            await load(shipment, One(objects, name="later"))

    run(story())


def test_a_replica_that_is_stopped_in_a_broadcast_is_ended_and_the_others_go_on() -> None:
    """Long before sync.timeout_s is over: its process does not respond, so it is killed, and the group breaks."""
    objects, policy = Objects(), model(1, lora=False)
    there = [One(objects, name=f"engine-{n}") for n in range(3)]
    out = shipper(objects, there, method="collective", timeout_s=3600.0)
    killed = threading.Event()

    def struck(delivery: Delivery) -> Delivery:
        if isinstance(delivery, Seat) and delivery.version == 2:
            assert killed.wait(60.0)
            raise RuntimeError("the process has ended")
        return delivery

    there[1].before = struck

    class Stopped(Handle):
        async def health(self) -> Health:
            if self.one is there[1] and self.version == 1:
                await asyncio.sleep(3600)
            return await super().health()

        async def end(self) -> None:
            if self.one is there[1]:
                killed.set()

    handles: list[Any] = [Stopped(one) for one in there]
    replicas = [Replica(one.label, h, end=h.end) for one, h in zip(there, handles)]

    async def story() -> None:
        router = Router(replicas, ship=out.ship, health_timeout_s=0.4, load_s=3600.0, version=-1)
        for version in (1, 2):
            learn(policy, version)
            await router.update_weights(WeightUpdate(version=version, module=policy))
        assert [h.version for h in handles] == [2, 1, 2]
        assert state(there[0].module) == state(there[2].module) == state(policy)
        assert [name for name, _ in router.dropped] == ["engine-1"]
        assert "has not responded" in router.dropped[0][1]
        await router.close()

    run(story())


@pytest.mark.parametrize("kind", [RuntimeError, WhetError])
def test_the_traceback_of_a_replica_that_fails_in_a_sync_stands_in_the_log(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """Once, whatever asks it afterwards. An error of whet's own is complete without one."""
    objects, policy = Objects(), model(1, lora=False)
    there = [One(objects, name=f"engine-{n}") for n in range(2)]

    def struck(delivery: Delivery) -> Delivery:
        raise kind("the engine has lost its memory")

    there[1].before = struck
    handles: list[Any] = [Handle(one) for one in there]
    replicas = [Replica(one.label, handle) for one, handle in zip(there, handles)]

    async def story() -> None:
        router = Router(replicas, ship=shipper(objects, there).ship, version=-1)
        for version in (1, 2):
            learn(policy, version)
            await router.update_weights(WeightUpdate(version=version, module=policy))
        await router.close()

    with caplog.at_level("INFO", "whet"):
        run(story())
    assert f"version 1 could not be loaded: {kind.__name__}: the engine has lost its memory" in caplog.text
    traced = int(kind is RuntimeError)
    assert caplog.text.count("traceback of replica engine-1:") == traced
    assert caplog.text.count('raise kind("the engine has lost its memory")') == traced
