"""Runs a function on several ranks of torch.distributed (gloo), each a process of its own, with a deadline."""

from __future__ import annotations

import faulthandler
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forked import FORKS
from whet.environment import prepare


def spawn(function: Callable[..., Any], ranks: int, *args: Any, deadline_s: float = 540.0) -> list[Any]:
    """What function(*args) returns on each rank. Raises AssertionError with the first failure's traceback; a rank that
    hangs shows its stack on stderr first. The function and the arguments have to be picklable."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [FORKS.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            FORKS.Process(
                target=_rank,
                args=(function, rank, ranks, args),
                kwargs={"folder": folder, "to": to, "limit_s": deadline_s},
            )
            for rank, (_, to) in enumerate(pipes)
        ]
        for process, (_, to) in zip(processes, pipes):
            process.start()
            to.close()
        try:
            found = _collect([here for here, _ in pipes], deadline_s + 10.0)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [found[rank] for rank in range(ranks)]


def _collect(pipes: list[Connection], deadline_s: float) -> dict[int, Any]:
    found: dict[int, Any] = {}
    while len(found) < len(pipes):
        ready = wait([p for rank, p in enumerate(pipes) if rank not in found], deadline_s)
        assert ready, f"ranks {sorted(set(range(len(pipes))) - found.keys())} said nothing in {deadline_s} s"
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                fine, found[rank] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                fine, found[rank] = False, "its process died"
            assert fine, f"rank {rank}: {found[rank]}"
    return found


def _rank(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    args: tuple[Any, ...],
    *,
    folder: str,
    to: Connection,
    limit_s: float,
) -> None:
    faulthandler.dump_traceback_later(limit_s, exit=True)
    try:
        prepare(None, exact=True)
        torch.set_num_threads(1)
        store = dist.FileStore(str(Path(folder) / "store"), ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=limit_s)
        )
        out = function(*args)
        dist.barrier()
        to.send((True, out))
    except BaseException:
        to.send((False, traceback.format_exc()))
        raise
