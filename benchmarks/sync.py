"""What a weight sync costs, by method, content and dtype: from the trainer's new weights to an engine that has them.

    python benchmarks/sync.py [MODEL] [--repeats 3] [--out benchmarks/sync.json]

MODEL: a folder of Hugging Face's, or HIDDENxLAYERS for a model with random weights (default 512x8). Every version is
sent, received, checked tensor by tensor, loaded into an engine of its own, and confirmed. One thread; for collective
the engine is in a process of its own, for the others in this one, where the two ends work one after the other. The
object store is a copy in this process's memory that is read in place, as Ray's is between processes of one machine.
Before each version all weights change (full), those of one layer (delta), or the adapters of rank 8 (adapters; with
them full sends them merged). Seconds are of the clock, the median of the repeats; the ratio is to files, full, auto.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from whet.config.schema import Config, LoraConfig, ModelConfig, SyncConfig
from whet.models import kernels
from whet.models.load import build
from whet.models.lora import adapted, attach, refresh
from whet.rollout.engine import WeightUpdate
from whet.rollout.native.engine import NativeEngine
from whet.sync.exchange import Receiver, publisher_of
from whet.sync.files import Files
from whet.sync.manifest import Manifest
from whet.sync.parcels import Letter, Parcels
from whet.sync.replicas import Delivery, Inbox, Shipped, Shipper
from whet.types import Receipt

DTYPES = ("auto", "bfloat16")
ADAPTERS = LoraConfig(rank=8)


def made(given: str, *, lora: bool) -> PreTrainedModel:
    hidden, x, layers = given.partition("x")
    scratch = x and hidden.isdigit() and layers.isdigit()
    cfg = (
        ModelConfig(
            scratch={
                "hidden_size": int(hidden),
                "num_hidden_layers": int(layers),
                "num_attention_heads": 8,
                "head_dim": 64,
            }
        )
        if scratch
        else ModelConfig(path=given)
    )
    model = build(
        cfg, vocab_size=32000, eos_token_id=1, pad_token_id=0, seed=0, device="cpu", dtype=torch.float32
    )
    if lora:
        attach(model, ADAPTERS, seed=0)
    return model


def engine_of(model: PreTrainedModel) -> NativeEngine:
    return NativeEngine(model, kernels.load("auto"), end_token_ids=[1], max_context=64, version=-1)


@torch.no_grad()
def learn(model: PreTrainedModel, content: str) -> None:
    """Change what a step of training would."""
    if layers := adapted(model):
        for layer in layers.values():
            layer.lora_A.add_(1e-3)
            layer.lora_B.add_(1e-3)
        refresh(model)
        return
    wanted = "layers.0." if content == "delta" else ""
    for name, parameter in model.named_parameters():
        if wanted in name:
            parameter.add_(1e-3)


# ---------------------------------------------------------------- the ways

Sync1 = Callable[[int], int]
"""Bring one version over; returns the bytes that travelled."""


def bytes_sent(manifest: Manifest) -> int:
    sizes = {"float32": 4, "bfloat16": 2, "uint8": 1}
    return sum(int(np.prod(e.shape)) * sizes[e.dtype] for e in manifest.entries if e.sent)


@contextmanager
def same_memory(policy: PreTrainedModel, cfg: Config, model: str) -> Iterator[Sync1]:
    """By reference: nothing moves."""
    engine = engine_of(policy)

    def bring(version: int) -> int:
        asyncio.run(engine.update_weights(WeightUpdate(version=version, module=policy)))
        return 0

    yield bring


@contextmanager
def by_files(policy: PreTrainedModel, cfg: Config, model: str) -> Iterator[Sync1]:
    adapters = publisher_of(cfg, Files(Path(".")))
    theirs = made(model, lora=adapters.adapters)
    engine = engine_of(theirs)
    with tempfile.TemporaryDirectory(prefix="whet-sync-") as folder:
        files = Files(Path(folder), keep=2)
        publisher = publisher_of(cfg, files, receipts=files.receipts)
        receiver = Receiver(
            files,
            name="one",
            module=theirs if adapters.adapters else None,
            confirm=files.confirm,
        )
        shipper = Shipper(cfg, Parcels(lambda value: value, lambda value: value))

        def bring(version: int) -> int:
            sent = publisher.send(version, shipper.carried(WeightUpdate(version=version, module=policy)))
            asyncio.run(receiver.load(engine, version))
            publisher.look()
            return bytes_sent(sent)

        yield bring


@contextmanager
def by_object_store(policy: PreTrainedModel, cfg: Config, model: str) -> Iterator[Sync1]:
    objects: dict[int, np.ndarray] = {}
    names = itertools.count()

    def put(value: np.ndarray) -> int:
        number = next(names)
        objects[number] = value.copy()
        return number

    shipper = Shipper(cfg, Parcels(put, objects.__getitem__))
    theirs = made(model, lora=shipper.letters.adapters)
    one = Here(
        engine_of(theirs), Inbox(theirs, name="one", adapters=shipper.letters.adapters, put=put), objects
    )

    def bring(version: int) -> int:
        shipment = shipper.ship(WeightUpdate(version=version, module=policy))
        asyncio.run(handed(shipment().tensors, one))
        assert one.held is not None
        used = [shipper.store.letter(version), shipper.store.base]
        kept = {reference for letter in used if letter for _, reference in letter.parcels}
        for gone in objects.keys() - kept:
            del objects[gone]
        return bytes_sent(one.held)

    yield bring


@contextmanager
def by_broadcast(policy: PreTrainedModel, cfg: Config, model: str) -> Iterator[Sync1]:
    shipper = Shipper(cfg, Parcels(lambda value: value, lambda value: value))
    shipper.host = lambda members, machine: "127.0.0.1"
    one = There(child())
    one.line.send((model, shipper.letters.adapters))
    one.line.recv()  # its engine is up
    shipper.members = lambda: [one]

    def bring(version: int) -> int:
        asyncio.run(handed(shipper.ship(WeightUpdate(version=version, module=policy))().tensors, one))
        assert one.held is not None
        return bytes_sent(one.held)

    yield bring
    assert shipper.end is not None
    shipper.end.close()


@cache
def child() -> Connection:
    """The line to a process with engines; it ends with this one."""
    near, far = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    context.Process(target=replica, args=(far,), daemon=True).start()
    return near


async def handed(tensors: Any, one: Any) -> None:
    assert isinstance(tensors, Shipped)
    await tensors.to(one)


class Here:
    """A replica in this process."""

    def __init__(self, engine: NativeEngine, inbox: Inbox, objects: dict[int, np.ndarray]) -> None:
        self.engine, self.inbox, self.objects = engine, inbox, objects
        self.label, self.held = "one", None

    async def deliver(self, delivery: Delivery) -> Receipt:
        return await self.inbox.take(self.engine, delivery, self.fetch)

    async def fetch(self, references: Iterable[int]) -> list[np.ndarray]:
        return [self.objects[r] for r in references]


class There:
    """The handle of a replica in another process."""

    def __init__(self, line: Connection) -> None:
        self.line, self.label = line, "one"
        self.held: Manifest | None = None

    async def deliver(self, delivery: Delivery) -> Receipt:
        def ask() -> Receipt:
            self.line.send(delivery)
            answer = self.line.recv()
            assert isinstance(answer, Receipt)
            return answer

        return await asyncio.to_thread(ask)

    async def give(self) -> Letter:
        raise AssertionError("nobody comes late here")


def replica(line: Connection) -> None:
    """In the other process: engines for a model, one after the other, and what each is brought."""
    torch.set_num_threads(1)

    async def fetch(references: Iterable[Any]) -> list[Any]:
        return list(references)

    while True:
        told = line.recv()
        if isinstance(told, tuple):
            model, adapters = told
            module = made(model, lora=adapters)
            engine = engine_of(module)
            inbox = Inbox(module, name="one", adapters=adapters, put=lambda value: value)
            line.send("up")
        else:
            line.send(asyncio.run(inbox.take(engine, told, fetch)))


WAYS = {
    "same memory": same_memory,
    "files": by_files,
    "object_store": by_object_store,
    "collective": by_broadcast,
}

# ---------------------------------------------------------------- measured


def cases() -> Iterator[tuple[str, str, str, bool]]:
    """(method, content, dtype, with adapters)."""
    yield "same memory", "full", "auto", False
    for method in ("files", "object_store", "collective"):
        for dtype in DTYPES:
            yield method, "full", dtype, False
        yield method, "delta", "auto", False
        yield method, "full", "auto", True
        yield method, "adapters", "auto", True


def measured(
    model: str, method: str, content: str, dtype: str, *, lora: bool, repeats: int
) -> dict[str, Any]:
    told: Any = {"content": content, "dtype": dtype, "timeout_s": 120.0}
    sync = SyncConfig(**told, method="collective" if method == "collective" else "auto")
    cfg = Config(sync=sync, model=ModelConfig(lora=ADAPTERS if lora else None))
    policy = made(model, lora=lora)
    seconds, sent = [], 0
    with WAYS[method](policy, cfg, model) as bring:
        bring(0)  # whole, and whatever is made once
        for version in range(1, repeats + 1):
            learn(policy, content)
            began = time.perf_counter()
            sent = bring(version)
            seconds.append(time.perf_counter() - began)
    return {
        "method": method,
        "content": content,
        "dtype": dtype,
        "lora": lora,
        "sent_mb": round(sent / 1e6, 3),
        "seconds": round(statistics.median(seconds), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="512x8")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    size = sum(p.nbytes for p in made(given.model, lora=False).parameters())
    print(f"{given.model}: {size / 1e6:.0f} MB of float32\n")
    rows = []
    for method, content, dtype, lora in cases():
        rows.append(measured(given.model, method, content, dtype, lora=lora, repeats=given.repeats))
        print(f"{method}, {content}, {dtype}, lora={lora}: {rows[-1]['seconds']:.3f} s", flush=True)
    base = next(
        r["seconds"] for r in rows if (r["method"], r["content"], r["dtype"]) == ("files", "full", "auto")
    )
    print("\n| method | content | dtype | LoRA | sent MB | seconds | MB of weights/s | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        row["ratio"] = round(row["seconds"] / base, 3)
        print(
            f"| {row['method']} | {row['content']} | {row['dtype']} | {'rank 8' if row['lora'] else ''} | "
            f"{row['sent_mb']:g} | {row['seconds']:.3f} | {size / 1e6 / row['seconds']:.0f} | {row['ratio']:.2f} |"
        )
    told = {"model": given.model, "weights_mb": round(size / 1e6, 1), "repeats": given.repeats}
    told |= {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1}
    given.out.write_text(json.dumps(told | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
