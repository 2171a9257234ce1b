"""The decode step at fixed shapes, so that CUDA replays it as one graph instead of launching every kernel.

The live rows are padded to a bucket of rows and a bucket of page-table width; their inputs are copied into
buffers that stay where they are, and one graph per pair of buckets is captured when it is first needed.
Captured is the model up to its hidden states; output layer and sampler stay outside: the sampler has to ask
whether the logits are finite, and [B, V] logits a graph would be much memory. A graph holds addresses:
weights that are updated in place are seen, and when a parameter has moved all graphs are dropped.

What can be captured is found out, not listed: every warm-up runs under `NoHostReads`, so a model whose
forward needs the host (a mixture of experts that counts its tokens) is refused with the operation's name, and
its rows take the step of variable shapes. Capture itself needs a CUDA device (`make check-gpu`); everything else
is tested on a CPU.

Letters: B live rows, P pages of a row, D hidden.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from whet.models.attention import CachedAttention, KvCache
from whet.models.forward import Decoder
from whet.models.kernels import Ops
from whet.models.quantised import Quantised, held
from whet.types import WhetError

MOST_GRAPHS = 64
"""Graphs kept; the one unused for longest goes first."""
WARM_UPS = 2
"""Runs before a capture, so that libraries have made their handles and workspaces."""

aten = torch.ops.aten


class CannotCapture(WhetError):
    """The words say which operation a graph cannot hold."""


class GraphRecorder(Protocol):
    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A function that does the same work on the same memory and returns the tensor that it fills.

        Raises CannotCapture."""


class CudaGraphs:
    """A `GraphRecorder`: graphs that share one memory pool. Safe, as they never run at the same time and none
    reads what another left there."""

    def __init__(self, device: torch.device) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream), NoHostReads():
            for _ in range(WARM_UPS):
                work()
        current.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer context puts the stream back if the end of a capture fails, which the inner does not.
            # thread_local: a trainer in another thread may take memory meanwhile.
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"),
            ):
                out = work()
        except RuntimeError as error:
            raise CannotCapture(f"the capture failed: {error}") from error

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class NoHostReads(TorchDispatchMode):
    """Inside it, an operation that makes the host wait for the device raises CannotCapture, on any device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _waits(func, args, kwargs):
            raise CannotCapture(f"{func} synchronizes the host with the device")
        return func(*args, **kwargs)


_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func in _INDEXING:  # by a mask its result has as many rows as the mask is true; by numbers it is fixed
        given = [index for index in args[1] if index is not None]
        return any(i.dtype in (torch.bool, torch.uint8) or i.device != args[0].device for i in given)
    if func is aten._to_copy.default:
        target = kwargs.get("device")
        return target is not None and torch.device(target).type != args[0].device.type
    if func is aten.copy_.default:
        return bool(args[0].device != args[1].device)
    # lift_fresh: a tensor made of Python numbers, copied from the host
    return func is aten.lift_fresh.default or not _WAITING.isdisjoint(func.tags)


class FixedShapeStep:
    """Hidden states of a decode step, in buckets. It lives as long as its decoder and its cache.

    scratch: the page that padded rows write into, no rollout's own; they stand at its first slot and see
    only themselves. max_num_seqs, max_pages: most rows, and most pages of a row.
    """

    def __init__(
        self,
        module: nn.Module,
        decoder: Decoder,
        cache: KvCache,
        *,
        ops: Ops,
        recorder: GraphRecorder,
        scratch: int,
        max_num_seqs: int,
        max_pages: int,
    ) -> None:
        self.decoder, self.cache, self.ops = decoder, cache, ops
        self.recorder, self.scratch = recorder, scratch
        self.row_buckets, self.page_buckets = row_buckets(max_num_seqs), page_buckets(max_pages)
        device = cache.k.device
        self.fed_2B = torch.zeros(2, max_num_seqs, dtype=torch.int64, device=device)
        self.table_BP = torch.zeros(max_num_seqs, max_pages, dtype=torch.int32, device=device)
        self.graphs: dict[tuple[int, int], Callable[[], Tensor]] = {}
        """By (rows, pages), the last used last."""
        self.module = module
        self.owned = [d for m in module.modules() for d in (m._parameters, m._buffers) if d]
        self.quantised: list[Quantised] = []
        self.addresses = self._addresses()

    def __call__(self, fed_2B: Tensor, table_BP: Tensor) -> Tensor:
        """[B, D] for [2, B] (token to feed, tokens in the cache); overwritten by a later call.

        table_BP: the pages of each row, wide enough for the longest. Raises CannotCapture.
        """
        if not self.graphs:
            self.quantised = list(held(self.module).values())
        addresses = self._addresses()
        if addresses != self.addresses:
            self.graphs.clear()
            self.addresses = addresses
        count, width = table_BP.shape
        rows, pages = _bucket(self.row_buckets, count), _bucket(self.page_buckets, width)
        self.fed_2B[:, :count] = fed_2B
        self.fed_2B[:, count:rows] = 0
        self.table_BP[:count, :width] = table_BP
        self.table_BP[count:rows, 0] = self.scratch
        return self._replay(rows, pages)()[:count]

    def _replay(self, rows: int, pages: int) -> Callable[[], Tensor]:
        replay = self.graphs.pop((rows, pages), None)
        if replay is None:
            replay = self.recorder.capture(partial(self.work, rows, pages))
        self.graphs[rows, pages] = replay
        if len(self.graphs) > MOST_GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        return replay

    def work(self, rows: int, pages: int) -> Tensor:
        """[rows, D]: what is captured, on the buffers as they are."""
        token_B, length_B = self.fed_2B[:, :rows]
        attend = CachedAttention(self.cache, self.table_BP[:rows, :pages], length_B, self.ops)
        return self.decoder.hidden(token_B, length_B, attend)

    def _addresses(self) -> list[int]:
        own = [t.data_ptr() for tensors in self.owned for t in tensors.values() if t is not None]
        return own + [t.data_ptr() for weights in self.quantised for t in (weights.numbers, weights.scale)]


def row_buckets(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... up to and with `most`: above 16, a third of padding at most."""
    sizes = [1, 2, 4, 8, *(step << power for power in range(3, most.bit_length()) for step in (2, 3))]
    return [size for size in sizes if size < most] + [most]


def page_buckets(most: int) -> list[int]:
    """Powers of two up to and with `most`."""
    return [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]


def _bucket(buckets: list[int], count: int) -> int:
    """The smallest that holds so many."""
    return buckets[bisect_left(buckets, count)]
