"""Pipeline parallelism: layers are spread over ranks, micro-batches of any lengths flow through them.

The layers are cut into ranks x chunks parts of neighbours. Rank r has parts r, r + ranks, ... (with one chunk the
1F1B schedule, PipeDream-Flush, arXiv:2006.09503; with several the interleaved one, arXiv:2104.04473). The first part
begins with the embedding, the last ends with norm and output layer. What the loss is, the caller says: it is called
on the last part alone. All ranks know all micro-batches, so they know the shapes of what they will receive.

An absent module stands for every layer of another rank: it passes on what it gets, so names, numbers and the model's
own forward stay as they are. A part computes what those layers compute in one process, and gradients are added up in
the order of micro-batches, so a pipeline changes no bit of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from whet.models.collectives import Peers
from whet.models.fused_forward import Family, known_family
from whet.types import ConfigError


class Absent(nn.Module):
    """Stands for a module that another rank has."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


@dataclass(frozen=True)
class Action:
    """One thing that a rank does: a micro-batch forward or backward through one of its parts."""

    kind: Literal["forward", "backward"]
    micro: int
    part: int


@dataclass(frozen=True, eq=False)
class PipelineStage:
    """What a rank has of the layers, and its neighbours."""

    peers: Peers
    chunks: int
    base: Any
    """The decoder; while a part is run, the layers of other parts are absent."""
    views: Mapping[int, nn.ModuleList]
    """The layers as this rank's parts see them, by the part's number."""
    norm: nn.Module
    owners: Mapping[str, int]
    """The rank whose copy of a parameter counts, for all parameters of the whole model, in its order."""
    learning: dict[str, torch.dtype]
    """Those of all ranks that require gradients, with their dtypes."""
    family: Family
    width: int
    """Size of the hidden states."""
    dtype: torch.dtype
    """Theirs."""
    tied: Mapping[str, Peers]
    """The embedding where it is the output layer, too: first and last rank have it, and each a part of its gradient."""
    lines: Mapping[tuple[str, bool], dist.ProcessGroup]
    """Groups by what travels (forward: hidden states; backward: gradients) and whether from the last rank to the first
    or back (of several chunks), so that none waits for another."""

    @property
    def parts(self) -> int:
        return self.peers.size * self.chunks

    @property
    def last(self) -> bool:
        """Whether this rank has norm and output layer."""
        return self.peers.rank == self.peers.size - 1

    def copies(self, name: str) -> bool:
        """Whether another rank's copy of the parameter counts."""
        return self.owners[name] != self.peers.rank if name in self.owners else False

    @contextmanager
    def running(self, part: int) -> Iterator[None]:
        """Inside it, the decoder is this part of itself."""
        layers, self.base.layers = self.base.layers, self.views[part]
        self.base.norm = self.norm if part == self.parts - 1 else Absent()
        try:
            yield
        finally:
            self.base.layers, self.base.norm = layers, self.norm

    def run(
        self,
        shapes: Sequence[tuple[int, ...]],
        step: Callable[[int, int, Tensor | None], Tensor],
        *,
        device: torch.device,
        around: Callable[[int], AbstractContextManager[None]] = lambda micro: nullcontext(),
        after: Callable[[], object] = lambda: None,
    ) -> None:
        """Take all micro-batches through the layers, and back where gradients are enabled.

        shapes: of each micro-batch's hidden states on this rank. step(micro, part, x): what the part makes of the
        hidden states x of the part before (None for part 0); for the last part the number to go backward from
        (anything, without gradients). It is to run the decoder inside `running(part)`. around: what must hold during
        a micro-batch's forward and backward. after: called after each backward."""
        learning = torch.is_grad_enabled()
        post = _Post(self, shapes, self.dtype, device)
        kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        order = schedule(self.peers.size, self.chunks, len(shapes), learning=learning)[self.peers.rank]
        for action in order:
            at = (action.micro, action.part)
            with around(action.micro):
                if action.kind == "backward":
                    self._back(post, at, *kept.pop(at))
                    after()
                    continue
                x = None if action.part == 0 else post.receive("forward", *at).requires_grad_(learning)
                out = step(action.micro, action.part, x)
                if action.part < self.parts - 1:
                    post.send("forward", out.detach(), action.micro, action.part + 1)
                if learning:
                    kept[at] = (x, out)
        post.close()

    def _back(self, post: _Post, at: tuple[int, int], x: Tensor | None, out: Tensor) -> None:
        micro, part = at
        if part == self.parts - 1:
            if out.requires_grad:
                out.backward()
        else:
            slope = post.receive("backward", micro, part)
            if out.requires_grad:
                torch.autograd.backward(out, slope)
        if x is not None:
            post.send("backward", torch.zeros_like(x) if x.grad is None else x.grad, micro, part - 1)

    def gathered(
        self, named: Iterable[tuple[str, Tensor]], device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """The named tensors of all ranks, one at a time, on every rank: each in turn shows what it has. Of copies, that
        of the owner. A name is a parameter's, or ends with it (`exp_avg.NAME`). To be run to its end by all."""
        for rank in range(self.peers.size):
            if rank == self.peers.rank:
                for name, tensor in named:
                    if not (self.copies(name) or self.copies(name.partition(".")[2])):
                        self._tell((name, tensor.dtype, tuple(tensor.shape)), rank)
                        dist.broadcast(tensor.to(device).contiguous(), group=self.peers.group, group_src=rank)
                        yield name, tensor
                self._tell(None, rank)
            else:
                while (told := self._tell(None, rank)) is not None:
                    name, dtype, shape = told
                    tensor = torch.empty(shape, dtype=dtype, device=device)
                    dist.broadcast(tensor, group=self.peers.group, group_src=rank)
                    yield name, tensor

    def _tell(self, said: Any, rank: int) -> Any:
        """What that rank says, on all."""
        box = [said]
        dist.broadcast_object_list(box, group=self.peers.group, group_src=rank)
        return box[0]


class _Post:
    """Hidden states and gradients between neighbours. What is sent is kept until `close`."""

    def __init__(
        self,
        stage: PipelineStage,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.stage, self.shapes, self.dtype, self.device = stage, shapes, dtype, device
        self.sent: list[tuple[dist.Work | None, Tensor]] = []

    def _tag(self, micro: int, part: int) -> int:
        return micro * self.stage.parts + part

    def send(self, kind: Literal["forward", "backward"], x: Tensor, micro: int, part: int) -> None:
        """To the rank that has the part."""
        group, peer = self._line(kind, part), part % self.stage.peers.size
        x = x.contiguous()
        self.sent.append((dist.isend(x, group=group, group_dst=peer, tag=self._tag(micro, part)), x))

    def receive(self, kind: Literal["forward", "backward"], micro: int, part: int) -> Tensor:
        """What was sent to this part: forward from the part before, backward from the one after."""
        peer = (part + (1 if kind == "backward" else -1)) % self.stage.peers.size
        x = torch.empty(self.shapes[micro], dtype=self.dtype, device=self.device)
        dist.recv(x, group=self._line(kind, part), group_src=peer, tag=self._tag(micro, part))
        return x

    def _line(self, kind: Literal["forward", "backward"], part: int) -> dist.ProcessGroup:
        """What travels to this part."""
        border = part if kind == "forward" else part + 1
        return self.stage.lines[kind, border % self.stage.peers.size == 0]

    def close(self) -> None:
        for work, _ in self.sent:
            if work is not None:
                work.wait()
        self.sent.clear()


def apply(model: PreTrainedModel, mesh: DeviceMesh, *, chunks: int = 1) -> PipelineStage:
    """Keep this rank's layers, in place. mesh: the full one, of which `pp` is the first dim.

    Errors: ConfigError where the model's family is not supported, or it has fewer layers than parts.
    """
    peers = Peers.of(mesh["pp"])
    config, base = model.config.get_text_config(), model.get_decoder()
    parts, layers = peers.size * chunks, list(base.layers)
    family = known_family(model, config)
    if family is None:
        raise ConfigError(
            f"pipeline parallelism does not support {type(model).__name__}; set train.parallel.pp=1"
        )
    if len(layers) < parts:
        raise ConfigError(
            f"train.parallel.pp: {len(layers)} layers cannot be divided into {parts} parts (pp * pipeline_chunks); "
            "choose a smaller pp or fewer chunks"
        )
    spans = [Peers(part, parts).span(len(layers)) for part in range(parts)]
    part_of = [part for part, span in enumerate(spans) for _ in range(len(layers))[span]]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = [n for n, p in model.named_parameters() if p is embedding.weight and p is head.weight]
    owners = {
        name: _owner(name, embedding=embedding, model=model, part_of=part_of) % peers.size
        for name, _ in model.named_parameters()
    }
    learning = {n: p.dtype for n, p in model.named_parameters() if p.requires_grad}
    dtype: torch.dtype = next(embedding.parameters()).dtype
    first, last = peers.rank == 0, peers.rank == peers.size - 1
    own = {part: spans[part] for part in range(parts) if part % peers.size == peers.rank}
    views = {
        part: nn.ModuleList(
            [layer if i in range(len(layers))[span] else Absent() for i, layer in enumerate(layers)]
        )
        for part, span in own.items()
    }
    base.layers = nn.ModuleList([layer if part_of[i] in own else Absent() for i, layer in enumerate(layers)])
    if not (first or (last and tied)):
        _leave(model, embedding)
    if not last:
        _leave(model, base.norm)
        _leave(model, head)
    lines, ends = _lines(mesh)
    both = dict.fromkeys(tied, Peers(int(last), 2, ends)) if first or last else {}
    width = config.hidden_size
    return PipelineStage(
        peers, chunks, base, views, base.norm, owners, learning, family, width, dtype, both, lines
    )


def _owner(name: str, *, embedding: nn.Module, model: nn.Module, part_of: list[int]) -> int:
    """The part that a parameter belongs to: of its layer; the first, if it is the embedding's; else the last."""
    if found := re.search(r"\blayers\.(\d+)\.", name):
        return part_of[int(found[1])]
    return 0 if model.get_submodule(name.rpartition(".")[0]) is embedding else len(set(part_of)) - 1


def _leave(model: nn.Module, module: nn.Module) -> None:
    model.set_submodule(next(n for n, m in model.named_modules() if m is module), Absent())


@cache
def _lines(mesh: DeviceMesh) -> tuple[dict[tuple[str, bool], dist.ProcessGroup], dist.ProcessGroup | None]:
    """This rank's `PipelineStage.lines`, and the group of first and last rank (of its line, if it is one of them).
    Every rank has to make the groups of all; they serve all models of a mesh."""
    mine: dict[tuple[str, bool], dist.ProcessGroup] = {}
    mine_ends = None
    for line in mesh.mesh.flatten(1).t().tolist():
        lines = {
            (kind, wraps): dist.new_group(line) for kind in ("forward", "backward") for wraps in (False, True)
        }
        ends = dist.new_group([line[0], line[-1]])
        if dist.get_rank() in line:
            mine, mine_ends = lines, ends
    return mine, mine_ends


# ---------------------------------------------------------------- schedule


@lru_cache(maxsize=64)
def schedule(ranks: int, chunks: int, micros: int, *, learning: bool) -> list[list[Action]]:
    """What each rank does, in order: found by playing it through, a tick an action.

    A rank goes backward whenever it can, forward otherwise, and then through the micro-batches in rounds of `ranks`,
    all of a round through one part before the next part. It holds at most so many micro-batches between forward and
    backward as reach the loss before its first gradient comes back: with one chunk `ranks - rank` (1F1B)."""
    parts = ranks * chunks
    done: set[Action] = set()
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    todo = [_todo(rank, ranks=ranks, chunks=chunks, micros=micros) for rank in range(ranks)]
    total = parts * micros * (2 if learning else 1)
    while sum(map(len, orders)) < total:
        now: list[Action] = []
        for rank in range(ranks):
            holds = (ranks - rank) if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1
            action = _next(todo[rank], done, parts=parts, limit=holds if learning else None)
            if action is not None:
                now.append(action)
                orders[rank].append(action)
        assert now, (
            f"pipeline schedule: no rank can continue: {ranks} ranks, {chunks} chunks, {micros} micro-batches"
        )
        done.update(now)
    return orders


def _todo(rank: int, *, ranks: int, chunks: int, micros: int) -> list[tuple[int, int]]:
    """(micro, part) of a rank in the order of their forwards."""
    own = [(micro, chunk * ranks + rank) for micro in range(micros) for chunk in range(chunks)]
    return sorted(own, key=lambda at: (at[0] // ranks, at[1], at[0] % ranks))


def _next(todo: list[tuple[int, int]], done: set[Action], *, parts: int, limit: int | None) -> Action | None:
    """What a rank does now; None: it waits. limit: of what it holds; None: nothing goes backward."""
    open_ = [at for at in todo if Action("forward", *at) in done and Action("backward", *at) not in done]
    if limit is not None:
        ready = [
            (micro, part)
            for micro, part in open_
            if part == parts - 1 or Action("backward", micro, part + 1) in done
        ]
        if ready:
            return Action("backward", *min(ready, key=lambda at: (at[0], -at[1])))
        if len(open_) >= limit:
            return None
    waiting = next((at for at in todo if Action("forward", *at) not in done), None)
    if waiting is None:
        return None
    micro, part = waiting
    return Action("forward", *waiting) if part == 0 or Action("forward", micro, part - 1) in done else None
