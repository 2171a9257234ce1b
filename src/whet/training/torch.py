"""The train engine in plain PyTorch: one process, the module itself, packed sequences.

A step's gradient is a sum over tokens with global weights (`Batch.weight_N`), so the split into micro-batches changes
memory and speed, never the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet import seeds
from whet.algos.distillation import beside
from whet.algos.segments import need
from whet.batch import Batch, Loss, LossFn, Outputs
from whet.config.schema import OptimizerConfig
from whet.models.attention import PackedAttention
from whet.models.context_parallel import Share
from whet.models.divergence import divergence
from whet.models.dropout import Noise, token_names
from whet.models.float8 import check as check_float8
from whet.models.kernels import Ops
from whet.models.logprobs import OF_LOGITS, Temperature, token_logprobs
from whet.models.lora import adapted, dropping, learned, merged, refresh
from whet.models.offload import kept_on_host
from whet.models.optim import Optimizer, inner_matrices, saved_counts
from whet.models.packing import layout, spread
from whet.models.parallel import Parallel
from whet.models.precision import computing
from whet.models.published import Adapter, Send, merging, parts_first, weights_of, write_own
from whet.models.router import RouterTerms, gates, hook, uses
from whet.models.routing import GivenRoute, Route, RouteRecorder, Routes
from whet.models.sharded import Alone, DataParallel, local, within
from whet.models.tensor_files import Piece, opened, pieces, write
from whet.models.zero import Zero, ZeroOptimizer
from whet.track.files import reading
from whet.training.balance import Dealt, deal, together
from whet.training.engine import FullKl, TrainEngine, Want
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.mixing import mix
from whet.training.mtp import MtpTerm
from whet.training.optimizer_step import step_or_skip
from whet.training.reuse import Reuse
from whet.training.sums import Sums
from whet.types import CheckpointError, Metrics, WhetError

T = TypeVar("T")

MICRO_BATCH = "micro-batch"
"""Span of one micro-batch: from the moment it is dealt out until the next is asked for."""
OPTIMIZER_STEP = "optimizer step"
"""Span in an update."""


class TorchEngine:
    """Policy, reference (no optimizer) or critic (a value head on the decoder)."""

    def __init__(
        self,
        model: PreTrainedModel,
        ops: Ops,
        *,
        cut: MicroBatchPolicy,
        value_head: nn.Linear | None = None,
        whole: bool = False,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 1,
        updates_per_step: int = 1,
        max_skipped: int = 10,
        seed: int = 0,
        rests: bool = False,
        across: Alone | DataParallel | Zero | None = None,
        parallel: Parallel | None = None,
        make_optimizer: Callable[..., Optimizer | ZeroOptimizer] = Optimizer,
    ) -> None:
        """whole: save the weights under adapters too, for no other place has them. seed: of what adapters drop.
        rests: the weights lie in the host's memory but for a forward or an update. across: the ranks that it is spread
        over, with their `make_optimizer`; then every method is called on all of them. parallel: what is done here."""
        self.across, self.parallel = across or Alone(), parallel or Parallel()
        self.version, self.whole, self.apart = 0, whole, False
        self.machine: str | None = None
        self.module, self.ops, self.cut, self.value_head = model, ops, cut, value_head
        self.decoder = self.parallel.decoder(model, ops, compile=cut.compile)
        self.routers = gates(model)
        self.balance = self._balance() if optimizer and (cut.router_aux or cut.router_z) else None
        self.mtp = (
            MtpTerm(model, ops, cut, self.decoder.head, self.across.add) if optimizer and cut.mtp else None
        )
        inside = set(inner_matrices(model))
        head = value_head.named_parameters("value_head") if value_head else ()
        self.device = self.home = next(model.parameters()).device  # parameters may then rest on the host
        functional, wide = self.decoder.path == "functional", cut.precision.reduce is not None
        self.across.place(model, functional=functional, sums_wide=wide)
        self.optimizer: Optimizer | ZeroOptimizer | None = None
        if optimizer is not None:
            self.optimizer = make_optimizer(
                self.across.own(self._named()),
                optimizer,
                total_steps=total_steps,
                updates_per_step=updates_per_step,
                hidden=inside,
                precision=cut.precision,
                offload="optimizer" in cut.offload,
                across=self.across,
                others=self.parallel.learning | {n: p.dtype for n, p in head},
            )
        if self.mtp is not None and isinstance(self.optimizer, Optimizer):
            self.optimizer.apart = self.mtp.apart
        self.max_skipped, self.skipped_in_a_row, self.rests = max_skipped, 0, rests
        if cut.precision.float8 is not None:
            check_float8(self.device)
        if rests:
            self.place("cpu")
        self.seed, self.drops = seed, any(layer.dropout for layer in adapted(model).values())
        self.full_kl: FullKl | None = None
        self.reuse: Reuse | None = None
        """What sampling with the same weights has left; None: nothing."""
        self.beat: Callable[[str], object] = lambda what: None
        """Called at every micro-batch: the work goes on."""
        self.span: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
        """Around a forward, an update and its parts: what is being done."""

    # -- the seam

    @property
    def structure(self) -> PreTrainedModel:
        return self.module

    def forward(self, batch: Batch, want: Want) -> Tensor:
        dealt = deal(batch, 1, self.cut.limits(learns=False))
        return together(batch, dealt, [self.forward_parts(dealt[0], want)])

    @torch.no_grad()
    def forward_parts(self, dealt: Dealt, want: Want) -> list[Tensor]:
        """The answers for each micro-batch."""
        if (want == "values") != (self.value_head is not None):
            raise WhetError(f"a {'critic' if self.value_head else 'policy'} engine does not compute {want}")
        parts: list[Tensor] = []
        said = partial(self._said, want)
        if want in OF_LOGITS:
            said = partial(self._of_logits, OF_LOGITS[want])
        with self.span(f"forward {want}"), self._awake():
            if want == "routed":
                parts = self._recorded(dealt)
            elif self.parallel.stage is not None:
                self._flow(
                    dealt, lambda at, micro, hidden_AD, at_A: parts.append(said(micro, hidden_AD, at_A))
                )
            else:
                for micro in self._micro(dealt):
                    parts.append(within(self.module, self._alone, said, micro.to(self.device)))
            self.across.done(self.module)
            return parts

    def update(self, batch: Batch, loss: LossFn) -> Metrics:
        sums, stepped = self.update_sums(deal(batch, 1, self.cut.limits(learns=True))[0], loss)
        return {**sums.means(), **stepped}

    def update_sums(self, dealt: Dealt, loss: LossFn) -> tuple[Sums, Metrics]:
        """`update`, with the statistics of what was seen here and the numbers of the optimizer step."""
        assert self.optimizer is not None, "this engine was made without an optimizer"
        self.optimizer.zero_grad()
        sums = Sums()
        with self.span("update"), self._awake():
            if self.balance is not None:
                self._count_choices(self.balance, dealt)
            if self.mtp is not None:
                self.mtp.begin(dealt.micros, self.device)
            if self.parallel.stage is not None:
                self._learn_in_flow(dealt, loss, sums)
            else:
                for number, micro in enumerate(self._learning(dealt)):
                    total, out, result = within(self.module, self._alone, self._losses, micro, loss)
                    if total.requires_grad:
                        self.optimizer.backward(total, last=number + 1 == len(dealt.micros))
                    if number < dealt.real:
                        sums.add(micro, out, result)
            with self.span(OPTIMIZER_STEP):
                stepped = self._step()
        for term in (self.balance, self.mtp):
            stepped = stepped if term is None else {**stepped, **term.metrics()}
        return sums, stepped

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        model = merged(self.module) if adapted(self.module) else self.module
        yield from ((name, p.detach()) for name, p in model.named_parameters())

    def publish(self, send: Send[T], *, there: bool = False) -> T:
        return send(weights_of(self.module))

    def write_weights(self, folder: Path) -> None:
        write_own(folder, weights_of(self.module))

    def call(self, function: Callable[[], T]) -> T:
        return function()

    def publish_parts(self, send: Send[T], adapters: Mapping[str, Adapter]) -> T | None:
        """`publish`, on every rank; the one that writes calls `send`. adapters: those of the whole model."""
        named = ((n, p.detach()) for n, p in self.module.named_parameters())
        gathered = self.across.gathered(parts_first(named, adapters))
        if not self.across.writes:
            for _ in gathered:
                pass
            return None
        return send(merging(self._told(gathered), adapters))

    def save(self, path: Path, *, moments: bool = True) -> None:
        """Write `model.safetensors` and, with an optimizer, `optimizer.safetensors` into the folder `path`.

        Without `moments` the latter has the schedule's place and master weights alone. One rank writes, file by file.
        """
        path.mkdir(parents=True, exist_ok=True)
        for file, named, metadata in self.files(moments=moments):
            tensors = {name: t.cpu() for name, t in self.across.gathered(named) if self.across.writes}
            if self.across.writes:
                write(tensors, path / file, metadata)
            tensors.clear()  # before those of the next file are gathered

    def capture(self, *, moments: bool = True) -> Callable[[Path], None]:
        """What `save` does, in two parts: a copy of all of it in the host's memory now, and the function that writes
        the copy. Between the two the engine may go on."""
        copied = [
            (file, {n: t.to("cpu", copy=True) for n, t in self.across.gathered(named)}, metadata)
            for file, named, metadata in self.files(moments=moments)
        ]

        def written(path: Path) -> None:
            path.mkdir(parents=True, exist_ok=True)
            for file, tensors, metadata in copied:
                write(tensors, path / file, metadata)

        return written

    def load(self, path: Path) -> None:
        """Read the files of `save`, in place. Raises CheckpointError if they are damaged or belong to another model."""
        own = dict(self._named())
        with opened(path / "model.safetensors") as file:
            with reading(file.path):  # its shapes may be any
                regions = {n: self.across.region(n, file.shape(n)) for n in own.keys() & file.tensors.keys()}
            if whole := sorted(n for n in regions if not file.dtype(n).is_floating_point):
                raise CheckpointError(f"{path}: {whole[0]} is of dtype {file.dtype(whole[0])}, no weight's")
            strange = {n for n in file.tensors.keys() - own.keys() if not self.parallel.elsewhere(n)}
            odd = {n for n, p in own.items() if n not in regions or regions[n].here != self.across.here(p)}
            odd |= strange
            if odd:
                raise CheckpointError(
                    f"{path}: weights belong to another model; they differ in {sorted(odd)[:3]} ({len(odd)} tensors)"
                )
            for name, p in own.items():
                self.across.put(name, p, file.read(name, regions[name]))
        refresh(self.module)
        if self.optimizer is not None:
            self._load_moments(self.optimizer, path / "optimizer.safetensors")

    def _load_moments(self, optimizer: Optimizer | ZeroOptimizer, path: Path) -> None:
        """What lies here of the optimizer's state, read slice by slice."""
        with opened(path) as file:
            with reading(file.path):
                steps, skipped, scale = saved_counts(file)
                own = [name for name in file.tensors if name.partition(".")[2] in optimizer.parameters]
                regions = {name: self.across.region(name, file.shape(name)) for name in own}
            state = {name: file.read(name, region) for name, region in regions.items()}
        optimizer.restore(state, steps, loss_scale=scale)
        self.skipped_in_a_row = skipped

    def pieces(self, *, moments: bool) -> dict[str, tuple[list[Piece], dict[str, str] | None]]:
        """What lies here of all that `save` writes: the pieces of each file, and its metadata."""
        return {
            file: ([piece for piece, _ in self._pieces(named)], metadata)
            for file, named, metadata in self.files(moments=moments)
        }

    def take(self, mine: Mapping[str, Collection[Piece]], *, moments: bool) -> dict[str, dict[str, Tensor]]:
        """These pieces of each file, by the names that they have in a file of parts; views, where they lie."""
        chosen = {file: set(pieces) for file, pieces in mine.items()}
        return {
            file: {piece.key: x for piece, x in self._pieces(named) if piece in chosen[file]}
            for file, named, _ in self.files(moments=moments)
        }

    @torch.no_grad()
    def copy_from(self, other: TrainEngine, share: float = 1.0) -> None:
        """Take another engine's weights, or this share of them, in place."""
        theirs = dict(learned(other.module) if adapted(self.module) else other.weights())
        across = other.across if isinstance(other, TorchEngine) else Alone()  # ranks give whole weights
        for name, p in learned(self.module):
            own, key = self.across.get(name, p), seeds.key("mix", name, other.version)
            self.across.put(name, p, mix(own, across.get(name, theirs[name]), share, key=key))
        refresh(self.module)

    def forget(self) -> None:
        """Reset the optimizer's moments; its schedule continues."""
        assert self.optimizer is not None, "this engine was made without an optimizer"
        self.optimizer.forget()

    def place(self, device: Literal["gpu", "cpu"]) -> None:
        self.device = self.home if device == "gpu" else torch.device("cpu")
        nn.Module.to(self.module, self.device)
        if self.value_head is not None:
            self.value_head.to(self.device)

    # -- inside

    def _told(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            self.beat(f"publish {name}")
            yield name, tensor

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Weights that rest are on the GPU while it lasts. After it torch keeps nothing that a server could have."""
        if self.rests:
            self.place("gpu")
        try:
            yield
        finally:
            if self.rests:
                self.place("cpu")
            if self.cut.colocated:
                torch.cuda.empty_cache()

    def files(
        self, *, moments: bool
    ) -> Iterator[tuple[str, Iterable[tuple[str, Tensor]], dict[str, str] | None]]:
        """What is saved: (file, its tensors by name, its metadata)."""
        yield "model.safetensors", ((n, p.detach()) for n, p in self._named()), None
        if self.optimizer is not None:
            # one key: safetensors writes several in random order, and equal runs write equal bytes
            counts = json.dumps({**self.optimizer.counts(), "skipped": self.skipped_in_a_row})
            state = self.optimizer.state()
            kept = ((n, t) for n, t in state.items() if moments or n.startswith("master."))
            yield "optimizer.safetensors", kept, {"counts": counts}

    def _pieces(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[Piece, Tensor]]:
        for name, tensor in named:
            region = self.across.region(name, self.across.shape(name, tensor))
            yield from pieces(name, local(tensor), region)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is saved and, where it requires gradients, trained."""
        yield from self.module.named_parameters() if self.whole else learned(self.module)
        if self.value_head is not None and self.parallel.ends:
            yield from self.value_head.named_parameters(prefix="value_head")

    def _micro(self, dealt: Dealt) -> Iterator[Batch]:
        for micro in dealt.micros:
            self.beat("a micro-batch")
            with self.span(MICRO_BATCH):
                yield micro

    def _learning(self, dealt: Dealt) -> Iterator[Batch]:
        """Micro-batches to learn from; as long as each is in use, adapters with dropout drop."""
        for micro in self._micro(dealt):
            micro = micro.to(self.device)
            with self._dropping(micro):
                yield micro

    def _dropping(self, micro: Batch) -> AbstractContextManager[None]:
        """What must hold in a micro-batch's forward and backward: adapters with dropout drop."""
        if not self.drops or self.optimizer is None or not torch.is_grad_enabled():
            return nullcontext()
        key = seeds.key(self.seed, "dropout", self.optimizer.step_count)
        share = self._share(micro)
        name_T = token_names(micro, share.packed)[share.span]
        # a rank without tokens may compute one in their place: see `hf_forward.modules`
        return dropping(self.module, Noise(name_T if len(name_T) else name_T.new_zeros(1), key))

    def _hidden(self, share: Share, x_TD: Tensor | None = None, route: Route | None = None) -> Tensor:
        """[T, D] hidden states of this rank's tokens: those of the running part of a pipeline, made of the states
        of the part before."""
        if self.cut.replays and share.routed_TLE is not None:
            route = GivenRoute(share.routed_TLE)

        known = None if self.reuse is None else self.reuse.of(share.packed)

        def forward() -> Tensor:
            with self._computing():
                return self.decoder.hidden(
                    share.token_ids_T if x_TD is None else x_TD,
                    share.position_T,
                    share.attend(PackedAttention(share.packed.segments, self.ops, known)),
                    checkpoint=self.cut.checkpoint and torch.is_grad_enabled(),
                    route=route,
                )

        if self.balance is None or self.optimizer is None:
            return forward()
        scaled = self.optimizer.scaled
        return self.balance.around(forward, lambda: uses(share.packed)[share.span], scaled=scaled)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Inside it layers are computed: in what dtypes, and where what backward needs of them waits."""
        host = kept_on_host(self.module) if "activations" in self.cut.offload else nullcontext()
        with host, computing(self.cut.precision, self.device, self.routers):
            yield

    def _balance(self) -> RouterTerms:
        if self.decoder.path == "modules":
            hook(self.module, answered=self.cut.replays and self.cut.router_aux > 0)
        parallel = self.parallel
        return RouterTerms(
            self.module,
            self.cut.router_aux,
            each=self.cut.router_aux_each,
            z=self.cut.router_z,
            over=(parallel.cp.add, self.across.add),
            stages=parallel.pp.add,
            alike=parallel.tp.size,
        )

    @torch.no_grad()
    def _count_choices(self, balance: RouterTerms, dealt: Dealt) -> None:
        """How many tokens the whole minibatch has, and what routers choose in it where a term reads that."""
        shares = map(self._share, dealt.micros)
        tokens = sum((uses(share.packed)[share.span].sum() for share in shares), torch.zeros(()))
        balance.begin(tokens.to(self.device))
        if not balance.coef:
            return
        with balance.counting():
            if self.parallel.stage is not None:
                self._flow(dealt, lambda at, micro, hidden_AD, at_A: hidden_AD)
            else:
                for micro in self._micro(dealt):
                    within(
                        self.module,
                        self._alone,
                        lambda micro, hidden_AD, at_A: hidden_AD,
                        micro.to(self.device),
                    )
        self.across.done(self.module)

    def _share(self, batch: Batch) -> Share:
        """This rank's tokens."""
        whole = self.mtp is not None and self.mtp.loss.distill and torch.is_grad_enabled()
        return self.parallel.share(layout(batch, share_prompts=self.cut.share_prompts, whole=whole))

    def _alone(self, last: Callable[..., T], batch: Batch, *more: Any) -> T:
        """last(batch, hidden_AD, at_A, *more), see `Share.predicting`, after all layers."""
        share = self._share(batch)
        hidden_TD = self._hidden(share)
        if self.mtp is not None and self.optimizer is not None and torch.is_grad_enabled():
            hidden_TD = self.mtp.around(
                batch, share.packed, hidden_TD, self._computing, self.optimizer.scaled
            )
        return last(batch, *share.predicting(batch.mask_N, hidden_TD), *more)

    def _flow(
        self,
        dealt: Dealt,
        last: Callable[[int, Batch, Tensor, Tensor], object],
        after: Callable[[], object] = lambda: None,
        routes: Sequence[Route] = (),
    ) -> None:
        """Take the micro-batches through a pipeline. last(number, micro-batch, hidden_AD, at_A), as `Share.predicting`
        has them, is called on its last rank, and gives what to go backward from. after: called after each backward.
        routes: of each micro-batch."""
        stage = self.parallel.stage
        assert stage is not None
        micros = [micro.to(self.device) for micro in self._micro(dealt)]
        shares = [self._share(micro) for micro in micros]

        def piece(at: int, part: int, x_TD: Tensor | None) -> object:
            with stage.running(part):
                hidden_TD = self._hidden(shares[at], x_TD, routes[at] if routes else None)
            if part < stage.parts - 1:
                return hidden_TD.clone() if hidden_TD._is_view() else hidden_TD  # FSDP2 wants no view
            return last(at, micros[at], *shares[at].predicting(micros[at].mask_N, hidden_TD))

        def step(at: int, part: int, x_TD: Tensor | None) -> Any:
            self.beat(f"part {part} of a micro-batch")
            return within(self.module, piece, at, part, x_TD)

        shapes = [(len(share.token_ids_T), stage.width) for share in shares]
        stage.run(shapes, step, device=self.device, around=lambda at: self._dropping(micros[at]), after=after)

    def _learn_in_flow(self, dealt: Dealt, loss: LossFn, sums: Sums) -> None:
        """`update_sums` with pipeline parallelism, up to the step; statistics are the last rank's."""
        optimizer = self.optimizer
        assert optimizer is not None
        reference: list[Tensor] = []
        if self.full_kl is not None:
            reference = self.full_kl.reference.flow_hidden(dealt.of_reference)

        def last(at: int, micro: Batch, hidden_AD: Tensor, at_A: Tensor) -> Tensor:
            total, out, result = self._losses(micro, hidden_AD, at_A, loss, *reference[at : at + 1])
            if at < dealt.real:
                sums.add(micro, out, result)
            return optimizer.scaled(total)

        self._flow(dealt, last, optimizer.after_backward)

    @torch.no_grad()
    def flow_hidden(self, dealt: Dealt) -> list[Tensor]:
        """[A, D] of each micro-batch, on the last rank of a pipeline: see `Share.predicting`."""
        out: list[Tensor] = []
        with self._awake():
            self._flow(dealt, lambda at, micro, hidden_AD, at_A: out.append(hidden_AD))
            self.across.done(self.module)
        return out

    def _said(self, want: Want, batch: Batch, hidden_AD: Tensor, at_A: Tensor) -> Tensor:
        """[N] log-probs, entropies or values."""
        out = self._outputs(batch, hidden_AD, at_A)
        return need({"entropy": out.entropy_N, "values": out.value_N}.get(want, out.logp_N), f"the {want}")

    def _losses(
        self, batch: Batch, hidden_AD: Tensor, at_A: Tensor, loss: LossFn, reference_AD: Tensor | None = None
    ) -> tuple[Tensor, Outputs, Loss]:
        """What a micro-batch adds to the loss, what was said of it, and the loss of its tokens. reference_AD: the
        reference's hidden states, where it has been asked for them before."""
        out = self._outputs(batch, hidden_AD, at_A)
        result = loss(batch, out)
        if self.full_kl is not None:
            term, other = self.full_kl, self.full_kl.reference
            kl_N = within(other.module, self._full_kl_N, term, batch, hidden_AD, at_A, reference_AD)
            result = beside(result, batch, kl_N, coef=term.coef)
        return (result.loss_N * need(batch.weight_N, "batch.weight_N")).sum(), out, result

    def _recorded(self, dealt: Dealt) -> list[Tensor]:
        """[N, L, E] the experts that routers choose, of each micro-batch; of a pipeline, on its last rank."""
        micros = tuple(replace(micro, routed_NLE=None).to(self.device) for micro in dealt.micros)
        dealt = replace(dealt, micros=micros)
        recorders = [RouteRecorder(Routes.of(self.module)) for _ in dealt.micros]
        if (stage := self.parallel.stage) is not None:
            self._flow(dealt, lambda at, micro, hidden_AD, at_A: hidden_AD, routes=recorders)
        found: list[Tensor] = []
        for micro, recorder in zip(self._micro(dealt), recorders):
            share = self._share(micro)
            if stage is None:
                within(self.module, self._hidden, share, None, recorder)
            own_TLE = recorder.recorded(len(share.token_ids_T) if stage is not None else None, self.device)
            found.append(spread(share.packed, share.gathered(own_TLE, self.parallel.pp)))
        return found if stage is None or stage.last else []

    def _of_logits(
        self, compute: Callable[..., Tensor], batch: Batch, hidden_AD: Tensor, at_A: Tensor
    ) -> Tensor:
        targets_A, head = batch.token_ids_N[at_A], self.decoder.head
        found_A = compute(hidden_AD, targets_A, head=head, temperature=self._temperature(batch, at_A))
        return self._spread(found_A, at_A, batch.tokens)

    def _full_kl_N(
        self, term: FullKl, batch: Batch, hidden_AD: Tensor, at_A: Tensor, reference_AD: Tensor | None
    ) -> Tensor:
        other = term.reference
        if reference_AD is None:
            with torch.no_grad():
                reference_AD = other._alone(lambda batch, hidden_AD, at_A: hidden_AD, batch.of_reference)
        heads = (self.decoder.head, other.decoder.head)
        kl_A = divergence(
            hidden_AD, reference_AD, heads=heads, of=term.of, temperature=self._temperature(batch, at_A)
        )
        return self._spread(kl_A, at_A, batch.tokens)

    def _outputs(self, batch: Batch, hidden_AD: Tensor, at_A: Tensor) -> Outputs:
        if self.value_head is not None:
            value_A = self.value_head(hidden_AD).squeeze(-1).float()
            return Outputs(value_N=self._spread(value_A, at_A, batch.tokens))
        logp_A, entropy_A = token_logprobs(
            hidden_AD,
            batch.token_ids_N[at_A],
            head=self.decoder.head,
            ops=self.ops,
            temperature=self._temperature(batch, at_A),
            entropy_grad=self.cut.entropy_grad,
        )
        return Outputs(
            logp_N=self._spread(logp_A, at_A, batch.tokens),
            entropy_N=self._spread(entropy_A, at_A, batch.tokens),
        )

    def _temperature(self, batch: Batch, at_A: Tensor) -> Temperature:
        """Of the rows whose tokens these are."""
        own_R = batch.temperature_R
        return self.cut.temperature if own_R is None else own_R[batch.rollout_N[at_A]]

    def _spread(self, x_A: Tensor, at_A: Tensor, n: int) -> Tensor:
        """[N] numbers of sampled tokens, 0 elsewhere; all ranks' of them."""
        return self.parallel.merged(x_A.new_zeros(n).index_copy(0, at_A, x_A))

    def _step(self) -> Metrics:
        assert self.optimizer is not None
        self.skipped_in_a_row, stepped = step_or_skip(
            self.optimizer, in_a_row=self.skipped_in_a_row, most=self.max_skipped
        )
        if not self.skipped_in_a_row:
            refresh(self.module)
        if self.reuse is not None:
            self.reuse.stepped()
        return stepped
