"""What a weight sync costs, by method and size: from the first tensor to the receiver's checked last one.

    python benchmarks/sync.py [--mb 40 400] [--repeats 3]

One thread; sender and receiver are two processes for collective and two objects in one process for the others (their
work is serial there: what is sent first is fetched afterwards). Seconds are of the process's CPU, which other work
disturbs less; for collective of the clock. float32 tensors of 4 MB. The best of the repeats.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from whet.sync.collective import Collective
from whet.sync.files import Files
from whet.sync.manifest import Manifest, checked, describe
from whet.sync.parcels import in_memory, in_store
from whet.sync.transport import Transport

Named = list[tuple[str, Tensor]]


def weights(mb: int) -> Named:
    draw = torch.Generator().manual_seed(0)
    return [(f"layer.{i}", torch.randn(1 << 20, generator=draw)) for i in range(max(1, mb * 10**6 >> 22))]


def size(tensors: Named) -> float:
    return sum(t.nbytes for _, t in tensors) / 1e6


def drain(transport: Transport, version: int, held: Manifest | None = None) -> None:
    for _ in checked(transport.receive(version, held=held), version, held):
        pass


def best(
    work: Callable[[int], object], repeats: int, clock: Callable[[], float] = time.process_time
) -> float:
    times = []
    for version in range(1, repeats + 1):
        began = clock()
        work(version)
        times.append(clock() - began)
    return min(times)


def in_one_process(transport: Transport, tensors: Named, repeats: int) -> tuple[float, float, float]:
    """(send, receive, send where nothing has changed) in seconds."""
    send = best(lambda version: transport.send(version, tensors), repeats)
    receive = best(lambda _: drain(transport, repeats), repeats)
    held = describe(repeats, tensors)
    same = best(lambda version: transport.send(repeats + version, tensors, held=held.named), repeats)
    return send, receive, same


def follow(port: int, repeats: int) -> None:
    torch.set_num_threads(1)
    end = Collective(["e"], rank=1, port=port, timeout_s=120)
    held = None
    for version in range(2 * repeats + 1):
        stream = checked(end.receive(version, held=held), version, held)
        while True:
            try:
                next(stream)
            except StopIteration as done:
                held = done.value
                break


def between_two(tensors: Named, repeats: int) -> tuple[float, float]:
    """(whole, nothing has changed) in seconds until the receiver has checked all."""
    end = Collective(["e"], rank=0, timeout_s=120)
    process = multiprocessing.get_context("spawn").Process(target=follow, args=(end.port, repeats))
    process.start()
    manifest = end.send(0, tensors[:1])  # the group is made
    whole = best(lambda version: end.send(version, tensors), repeats, time.perf_counter)
    held = describe(0, tensors).named
    same = best(lambda version: end.send(repeats + version, tensors, held=held), repeats, time.perf_counter)
    assert manifest.version == 0
    process.join(60)
    return whole, same


def table(mb: int, repeats: int) -> None:
    tensors = weights(mb)
    total = size(tensors)
    digest = best(lambda _: describe(0, tensors), repeats)
    print(
        f"\n{total:.0f} MB in {len(tensors)} tensors; digests alone {digest:.3f} s ({total / digest:.0f} MB/s)\n"
    )
    print("| method | send s | receive s | both MB/s | send, nothing changed s |")
    print("|---|---|---|---|---|")
    folder = Path(tempfile.mkdtemp(prefix="whet-sync-"))
    objects: dict[int, np.ndarray] = {}
    names = itertools.count()

    def put(value: np.ndarray) -> int:
        objects[next(names)] = value.copy()  # as a store in shared memory does
        return max(objects)

    methods: dict[str, Transport] = {
        "memory, by reference": in_memory(keep=1),
        "memory, copied": in_memory(copy=True, keep=1),
        "object store (copy)": in_store(put, objects.__getitem__, keep=1),
        "files": Files(folder, keep=2),
    }
    try:
        for name, transport in methods.items():
            send, receive, same = in_one_process(transport, tensors, repeats)
            print(
                f"| {name} | {send:.3f} | {receive:.3f} | {total / (send + receive):.0f} | {same:.3f} |",
                flush=True,
            )
            transport.close()
            objects.clear()
    finally:
        shutil.rmtree(folder)
    whole, same = between_two(tensors, repeats)
    print(
        f"| collective (gloo, 2 processes) | {whole:.3f} | in it | {total / whole:.0f} | {same:.3f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, nargs="+", default=[40, 400])
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for mb in given.mb:
        table(mb, given.repeats)


if __name__ == "__main__":
    main()
