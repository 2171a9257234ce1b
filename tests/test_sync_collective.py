"""Weights by broadcast between processes: gloo on loopback, and what happens when one of them fails."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Iterator

import pytest
import torch

from processes import Child
from whet.sync.collective import Collective
from whet.sync.manifest import describe
from whet.types import ConfigError, WhetError

HEAD = """
import os, sys, time, torch
from whet.sync.collective import Collective
from whet.sync.manifest import checked, describe
from whet.types import Receipt, WhetError
def big(version, count=6):
    return [(f"t{i}", torch.full((40_000,), float(version))) for i in range(count)]
rank, port, names = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")
end = Collective(names, rank=rank, port=port, timeout_s=float(sys.argv[4]), bucket_bytes=200_000)
def take(version, held=None):
    stream, got = checked(end.receive(version, held=held), version, held), {}
    while True:
        try:
            name, tensor = next(stream)
        except StopIteration as done:
            return got, done.value
        got[name] = tensor
"""

Children = list[Child]


@pytest.fixture
def started() -> Iterator[Children]:
    children: Children = []
    yield children
    for child in children:
        child.close()


def big(version: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"t{i}", torch.full((40_000,), float(version))) for i in range(6)]


def trainer(names: list[str], timeout_s: float) -> Collective:
    return Collective(names, rank=0, timeout_s=timeout_s, bucket_bytes=200_000)


def receiver(started: Children, end: Collective, code: str, *, rank: int = 1) -> None:
    arguments = [str(rank), str(end.port), ",".join(end.names[1:]), "60"]
    started.append(Child(HEAD + textwrap.dedent(code), *arguments))


TAKE_THREE = """
held = None
for version in (1, 2, 3):
    got, manifest = take(version, held)
    came = {n: float(t[0]) for n, t in got.items() if t is not None}
    print(version, sorted(came), set(came.values()))
    print(names[rank - 1], manifest.digest)
    held = manifest
"""


def test_two_receivers_get_every_version(started: Children) -> None:
    """Whole, changes only, whole; and torch's default group stays free for others."""
    end = trainer(["e-1", "e-2"], 60)
    for rank in (1, 2):
        receiver(started, end, TAKE_THREE, rank=rank)
    first = end.send(1, big(1))
    tensors = big(1)
    tensors[2] = ("t2", torch.full((40_000,), 2.0))
    second = end.send(2, tensors, held=first.named)
    third = end.send(3, big(3))
    every = [f"t{i}" for i in range(6)]
    for name, process in zip(end.names[1:], started, strict=True):
        assert process.said().splitlines() == [
            f"1 {every} {{1.0}}", f"{name} {first.digest}", "2 ['t2'] {2.0}", f"{name} {second.digest}",
            f"3 {every} {{3.0}}", f"{name} {third.digest}",
        ]  # fmt: skip
    assert second.digest == describe(0, tensors).digest
    assert not torch.distributed.is_initialized()
    end.close()


def test_beside_a_default_group(started: Children) -> None:
    """Both sides are ranks of another group, and use it between two sends."""
    code = """
    import torch.distributed as dist
    store = dist.TCPStore("127.0.0.1", {port}, is_master=False)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)
    for version in (1, 2):
        take(version)
        x = torch.ones(1)
        dist.all_reduce(x)
        assert float(x) == 2.0
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    end = trainer(["e-1"], 60)
    receiver(started, end, code.format(port=store.port))
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=2)
    try:
        for version in (1, 2):
            end.send(version, big(version))
            x = torch.ones(1)
            torch.distributed.all_reduce(x)
            assert float(x) == 2.0
        started[0].said()
    finally:
        torch.distributed.destroy_process_group()


def test_it_listens_on_loopback_alone() -> None:
    end = trainer(["e-1"], 1)
    with open("/proc/net/tcp") as four, open("/proc/net/tcp6") as six:
        places = [line.split()[1] for line in [*four, *six] if line.split()[3:4] == ["0A"]]
    assert [p for p in places if p.endswith(f":{end.port:04X}")] == [f"0100007F:{end.port:04X}"]


def test_who_never_joins_is_named(started: Children) -> None:
    end = trainer(["e-1", "e-2"], 4)
    receiver(started, end, "take(1)")
    with pytest.raises(
        WhetError, match=r"^e-2 \(rank 2, never connected\) did not join to make a group within 4 s \(since "
    ):
        end.send(1, big(1))
    with pytest.raises(
        WhetError,
        match=r"version 2 cannot be broadcast: e-2 .*open a new group with the receivers that still run",
    ):
        end.send(2, big(2))


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_that_dies_between_two_sends_is_named(started: Children, blow: signal.Signals) -> None:
    end = trainer(["e-1", "e-2"], 60)
    code = """
    take(1)
    time.sleep({wait})
    try:
        take(2)
    except WhetError as error:
        print(error)
    """
    receiver(started, end, code.format(wait=0), rank=1)
    receiver(started, end, code.format(wait=60), rank=2)
    end.send(1, big(1))
    started[1].blow(blow)
    end.timeout_s = 2
    with pytest.raises(
        WhetError, match=r"^e-2 \(rank 2, process \d+ on .*\) did not join to receive weights version 2"
    ):
        end.send(2, big(2))
    assert f"process {started[1].pid}" in (end.broken or "")
    said = started[0].said()  # told at once: its own deadline is 60 s
    assert "the trainer (rank 0" in said
    assert "stopped the broadcast: e-2 (rank 2" in said


@pytest.mark.parametrize("blow", ["os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 19)"])
def test_a_receiver_that_dies_in_the_middle_is_named(started: Children, blow: str) -> None:
    """It takes the first bucket and is killed, or stopped; nobody hangs."""
    end = trainer(["e-1", "e-2"], 60)
    whole = """
    take(1)
    end.timeout_s = 4
    try:
        take(2)
    except WhetError as error:
        print(error)
    """
    receiver(started, end, whole, rank=1)
    receiver(started, end, f"take(1); stream = end.receive(2); next(stream); {blow}", rank=2)
    end.send(1, big(1))
    end.timeout_s = 4
    with pytest.raises(WhetError, match=r"e-2 \(rank 2, process \d+ on"):
        end.send(2, [(f"t{i}", torch.full((400_000,), 1.0)) for i in range(12)])
    assert f"process {started[1].pid}" in (end.broken or "")
    assert "version 2" in started[0].said()


def test_a_trainer_that_dies_is_named(started: Children) -> None:
    master = """
    # rank 0 in a process of its own
    print(end.port, flush=True)
    def slowly():
        yield "a", torch.zeros(60_000)
        yield "b", torch.zeros(60_000)
        yield "c", torch.zeros(60_000)
        os.kill(os.getpid(), 9)
        yield "d", torch.zeros(60_000)
    end.send(1, slowly())
    """
    started.append(Child(HEAD + textwrap.dedent(master), "0", "0", "e-1", "60"))
    port = int(started[0].await_line())
    end = Collective(["e-1"], rank=1, port=port, timeout_s=60)
    with pytest.raises(WhetError, match=r"the trainer.* is unreachable"):
        list(end.receive(1))
    with pytest.raises(WhetError, match="cannot be broadcast: the trainer is unreachable"):
        list(end.receive(1))


def test_a_receiver_that_refuses_takes_the_rest_so_that_others_get_theirs(started: Children) -> None:
    """e-2 asks for another version: its error, and the next version reaches both."""
    end = trainer(["e-1", "e-2"], 60)
    receiver(started, end, "take(5); print(float(take(6)[0]['t0'][0]))", rank=1)
    code = """
    try:
        take(4)
    except WhetError as error:
        print(error)
    print(float(take(6)[0]['t0'][0]))
    """
    receiver(started, end, code, rank=2)
    end.send(5, big(5))
    end.send(6, big(6))
    assert started[0].said() == "6.0\n"
    assert started[1].said() == "weights version 4 was requested, but the trainer sends version 5\n6.0\n"


def test_a_trainer_whose_tensors_fail_lets_the_receivers_go(started: Children) -> None:
    end = trainer(["e-1"], 60)
    receiver(
        started,
        end,
        """
        try:
            take(1)
        except WhetError as error:
            print(error)
        """,
    )

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from big(1)[:3]
        raise RuntimeError("a rank is out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        end.send(1, failing())
    assert (
        "stopped the broadcast: sending version 1 failed: RuntimeError('a rank is out of memory')"
        in started[0].said()
    )


def test_a_version_that_never_comes(started: Children) -> None:
    end = trainer(["e-1"], 60)
    receiver(
        started,
        end,
        """
        take(1)
        end.timeout_s = 1
        try:
            take(2)
        except WhetError as error:
            print(error)
        """,
    )
    end.send(1, big(1))
    said = started[0].said()
    assert "weights version 2 (bucket 0) from the trainer (rank 0, process" in said
    assert "did not arrive within sync.timeout_s=1 s" in said
    assert "the last version that it began to send is 1" in said


def test_what_cannot_be_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="rank 3 of 2 receivers"):
        Collective(["a", "b"], rank=3)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"NCCL weight sync needs a CUDA device.*use device cpu"):
            Collective(["a"], rank=0, device="cuda")
    with pytest.raises(WhetError, match=r"cannot reach the trainer at 127.0.0.1:1 within 0.3 s"):
        Collective(["a"], rank=1, port=1, timeout_s=0.3)
    end = trainer(["a"], 1)
    end.close()
    with pytest.raises(WhetError, match="version 1 cannot be broadcast: the group was closed"):
        end.send(1, big(1))
    with pytest.raises(WhetError, match="was closed"):
        end.newest()
