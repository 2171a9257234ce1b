"""The train engine in plain PyTorch: one process, the module itself, packed sequences.

A step's gradient is a sum over tokens with global weights (`Batch.weight_N`), so how it is cut into
micro-batches changes memory and speed, never the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from whet import seeds
from whet.algos.mismatch import mismatch, perplexities
from whet.algos.segments import need
from whet.batch import Batch, Loss, LossFn, Outputs, micro_batches
from whet.config.schema import Optimizer as OptimizerConfig
from whet.config.schema import Precision, Train
from whet.config.sizes import micro_tokens
from whet.models.attention import PackedAttention
from whet.models.divergence import full_kl
from whet.models.dropout import Noise, token_names
from whet.models.kernels import Ops
from whet.models.logprobs import collisions, token_logprobs
from whet.models.lora import adapted, dropping, learned, merged, refresh
from whet.models.offload import kept_on_host
from whet.models.optim import Optimizer
from whet.models.packing import layout
from whet.models.parallel import Parallel
from whet.models.precision import compute_dtype, computing
from whet.models.sharded import Alone, DataParallel, local, within
from whet.training.balance import Dealt
from whet.types import CheckpointError, Metrics, WhetError

MICRO_BATCH = "micro-batch"
"""Span of one micro-batch: from the moment it is dealt out until the next is asked for."""


class Limits(TypedDict):
    """How large a micro-batch may be: arguments of `batch.micro_batches`."""

    max_tokens: int | None
    max_rollouts: int | None
    shared: bool
    whole_groups: bool


@dataclass(frozen=True)
class Cut:
    """How a batch is cut for memory, and what is computed."""

    max_tokens: int | None = 4096
    max_rollouts: int | None = None
    """Given, it is what counts."""
    forward_tokens: int | None = None
    forward_rollouts: int | None = None
    """Without gradient; neither given: as with."""
    share_prompts: bool = True
    checkpoint: bool = False
    whole_groups: bool = False
    entropy_grad: bool = False
    temperature: float = 1.0
    precision: Precision = field(default_factory=Precision)
    offload: tuple[str, ...] = ()
    """train.offload: what goes to the host while it is not needed."""
    compile: bool = False

    def limits(self, *, learns: bool) -> Limits:
        """What `micro_batches` asks for, with gradients or without."""
        tokens, rollouts = self.max_tokens, self.max_rollouts
        if not learns and (self.forward_tokens or self.forward_rollouts):
            tokens, rollouts = self.forward_tokens, self.forward_rollouts
        return Limits(
            max_tokens=tokens,
            max_rollouts=rollouts,
            shared=self.share_prompts,
            whole_groups=self.whole_groups,
        )

    @staticmethod
    def of(
        train: Train, model: PreTrainedModel, *, whole_groups: bool, entropy_grad: bool, temperature: float
    ) -> Cut:
        width = model.config.get_text_config().hidden_size
        tokens = train.micro_tokens or micro_tokens(model.device.type, width)
        return Cut(
            max_tokens=None if train.micro_rollouts else tokens,
            max_rollouts=train.micro_rollouts,
            forward_tokens=train.micro_tokens_forward,
            forward_rollouts=train.micro_rollouts_forward,
            share_prompts=train.share_prompts,
            checkpoint=train.gradient_checkpointing,
            whole_groups=whole_groups,
            entropy_grad=entropy_grad,
            temperature=temperature,
            precision=train.precision,
            offload=train.offload,
            compile=train.compile,
        )


@dataclass(frozen=True)
class FullKl:
    """A term of the loss: coef times the KL to the reference over the whole vocabulary, at the policy's own tokens."""

    coef: float
    reference: TorchEngine

    def added(self, result: Loss, batch: Batch, kl_N: Tensor) -> Loss:
        if batch.expert_R is not None:
            kl_N = torch.where(batch.expert_R[batch.row_N], 0.0, kl_N)
        return Loss(result.loss_N + self.coef * kl_N, {**result.stats, "kl_ref_nats": kl_N.detach()})


class TorchEngine:
    """Policy, reference (no optimizer) or critic (a value head on the decoder)."""

    def __init__(
        self,
        model: PreTrainedModel,
        ops: Ops,
        *,
        cut: Cut,
        value_head: nn.Linear | None = None,
        whole: bool = False,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 1,
        updates_per_step: int = 1,
        max_skipped: int = 10,
        seed: int = 0,
        rests: bool = False,
        across: Alone | DataParallel | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        """whole: save the weights under adapters too, for no other place has them. seed: of what adapters drop.
        rests: the weights lie in the host's memory but for a forward or an update. across: the ranks that it is spread
        over; then every method is called on all of them. parallel: what of each forward is done here."""
        self.across, self.parallel = across or Alone(), parallel or Parallel()
        self.version, self.whole = 0, whole
        self.module, self.ops, self.cut, self.value_head = model, ops, cut, value_head
        self.decoder = self.parallel.decoder(model, ops, compile=cut.compile)
        inside = set(_inside(model))
        self.across.place(model, functional=self.decoder.path == "functional")
        self.optimizer = None
        if optimizer is not None:
            self.optimizer = Optimizer(
                self.across.own(self._named()),
                optimizer,
                total_steps=total_steps,
                updates_per_step=updates_per_step,
                hidden=inside,
                precision=cut.precision,
                offload="optimizer" in cut.offload,
                across=self.across,
            )
        self.max_skipped, self.skipped_in_a_row = max_skipped, 0
        self.device = next(model.parameters()).device
        self.rests = rests
        if rests:
            self.place("cpu")
        self.seed, self.drops = seed, any(layer.dropout for layer in adapted(model).values())
        self.full_kl: FullKl | None = None
        self.beat: Callable[[str], object] = lambda what: None
        """Called at every micro-batch: the work goes on."""
        self.span: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
        """Around a forward, an update and its parts: what is being done."""

    # -- the seam

    def forward(self, batch: Batch, want: Literal["logprobs", "values", "collision"]) -> Tensor:
        return torch.cat(self.forward_parts(batch, want)).to(batch.mask_N.device)

    @torch.no_grad()
    def forward_parts(
        self, batch: Batch | Dealt, want: Literal["logprobs", "values", "collision"]
    ) -> list[Tensor]:
        """The answers for each micro-batch."""
        if (want == "values") != (self.value_head is not None):
            raise WhetError(f"asked a {'critic' if self.value_head else 'policy'} for {want}")
        parts: list[Tensor] = []
        with self.span(f"forward {want}"), self._awake():
            for micro in self._micro(batch):
                said = self._collisions if want == "collision" else self._said
                parts.append(within(self.module, said, micro.to(self.device)))
            self.across.done(self.module)
            return parts

    def update(self, batch: Batch, loss: LossFn) -> Metrics:
        sums, stepped = self.update_sums(batch, loss)
        return {**sums.means(), **stepped}

    def update_sums(self, batch: Batch | Dealt, loss: LossFn) -> tuple[Sums, Metrics]:
        """`update`, with the statistics of what was seen here and the numbers of the optimizer step."""
        assert self.optimizer is not None, "this engine was made without an optimizer"
        self.optimizer.zero_grad()
        sums = Sums()
        with self.span("update"), self._awake():
            for number, micro in enumerate(self._learning(batch)):
                total, out, result = within(self.module, self._losses, micro, loss)
                if total.requires_grad:
                    self.optimizer.backward(total)
                if not isinstance(batch, Dealt) or number < batch.real:
                    sums.add(micro, out, result)
            with self.span("optimizer step"):
                stepped = self._step()
        return sums, stepped

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        model = merged(self.module) if adapted(self.module) else self.module
        for name, p in model.named_parameters():
            yield name, p.detach()

    def save(self, path: Path, *, moments: bool = True) -> None:
        """Write `model.safetensors` and, with an optimizer, `optimizer.safetensors` into the folder `path`.

        Without `moments` the latter has the schedule's place and master weights alone.
        """
        path.mkdir(parents=True, exist_ok=True)
        for name, named, metadata in self.files(moments=moments):
            self._write(named, path / name, metadata)

    def capture(self, *, moments: bool = True) -> Callable[[Path], None]:
        """What `save` does, in two parts: a copy of all of it in the host's memory now, and the function that writes
        the copy. Between the two the engine may go on."""
        copied = [
            (file, {n: t.to("cpu", copy=True) for n, t in self.across.whole(named)}, metadata)
            for file, named, metadata in self.files(moments=moments)
        ]

        def write(path: Path) -> None:
            path.mkdir(parents=True, exist_ok=True)
            for file, tensors, metadata in copied:
                _write(tensors, path / file, metadata)

        return write

    def load(self, path: Path) -> None:
        """Read what `save` wrote, in place. Raises CheckpointError if it is damaged or of another model."""
        found, _ = _read(path / "model.safetensors")
        own = dict(self._named())
        parts = {name: self.across.part(name, tensor) for name, tensor in found.items()}
        here = {name: local(p) for name, p in own.items()}
        if odd := sorted(n for n in parts.keys() | here.keys() if _shape(parts, n) != _shape(here, n)):
            raise CheckpointError(
                f"{path}: weights are of another model; they differ in {odd[:3]} ({len(odd)} tensors)"
            )
        with torch.no_grad():
            for name, p in here.items():
                p.copy_(parts[name])
        refresh(self.module)
        if self.optimizer is not None:
            state, meta = _read(path / "optimizer.safetensors")
            counts = json.loads(meta["counts"])
            state = {name: self.across.part(name, tensor) for name, tensor in state.items()}
            self.optimizer.restore(state, counts["steps"], loss_scale=counts.get("loss_scale"))
            self.skipped_in_a_row = counts["skipped"]

    @torch.no_grad()
    def copy_from(self, other: TorchEngine) -> None:
        """Take another engine's weights, in place."""
        theirs = dict(learned(other.module) if adapted(self.module) else other.weights())
        for name, p in learned(self.module):
            local(p).copy_(local(theirs[name]))
        refresh(self.module)

    def forget(self) -> None:
        """Begin the optimizer's moments anew; its schedule goes on."""
        assert self.optimizer is not None, "this engine was made without an optimizer"
        self.optimizer.forget()

    def place(self, device: Literal["gpu", "cpu"]) -> None:
        where = torch.device("cuda" if device == "gpu" else "cpu")
        nn.Module.to(self.module, where)
        if self.value_head is not None:
            self.value_head.to(where)
        self.device = where

    # -- inside

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Weights that rest are on the GPU while it lasts."""
        if self.rests:
            self.place("gpu")
        try:
            yield
        finally:
            if self.rests:
                self.place("cpu")

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

    def _write(
        self, named: Iterable[tuple[str, Tensor]], path: Path, metadata: dict[str, str] | None = None
    ) -> None:
        """Whole tensors, gathered one at a time; one rank writes."""
        tensors = {name: t for name, t in self.across.whole(named) if self.across.writes}
        if self.across.writes:
            _write({name: t.cpu() for name, t in tensors.items()}, path, metadata)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is saved and, where it requires gradients, trained."""
        yield from self.module.named_parameters() if self.whole else learned(self.module)
        if self.value_head is not None:
            yield from self.value_head.named_parameters(prefix="value_head")

    def _micro(self, batch: Batch | Dealt) -> Iterator[Batch]:
        learns = torch.is_grad_enabled()
        if isinstance(batch, Dealt):
            micros: Iterable[Batch] = batch.micros
        else:
            micros = micro_batches(batch, **self.cut.limits(learns=learns))
        for micro in micros:
            self.beat("a micro-batch")
            with self.span(MICRO_BATCH):
                yield micro

    def _learning(self, batch: Batch | Dealt) -> Iterator[Batch]:
        """Micro-batches to learn from; as long as each is in use, adapters with dropout drop."""
        assert self.optimizer is not None
        key = seeds.key(self.seed, "dropout", self.optimizer.step_count)
        for micro in self._micro(batch):
            micro = micro.to(self.device)
            noise = None
            if self.drops:
                packed = layout(micro, share_prompts=self.cut.share_prompts)
                noise = Noise(token_names(micro, packed)[self.parallel.share(packed).span], key)
            with dropping(self.module, noise):
                yield micro

    def _hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[A, D] the hidden states that predict the sampled tokens (with cp those of this rank), and [A] where in the
        batch those are."""
        packed = layout(batch, share_prompts=self.cut.share_prompts)
        share = self.parallel.share(packed)
        host = kept_on_host(self.module) if "activations" in self.cut.offload else nullcontext()
        with host, computing(self.device, compute_dtype(self.cut.precision)):
            hidden_TD = self.decoder.hidden(
                share.token_ids_T,
                share.position_T,
                share.attend(PackedAttention(packed.segments, self.ops)),
                checkpoint=self.cut.checkpoint and torch.is_grad_enabled(),
            )
        at_A, row_A = share.predicted(batch.mask_N)
        return F.embedding(row_A, hidden_TD), at_A

    def _said(self, batch: Batch) -> Tensor:
        """[N] log-probs, or values."""
        out = self._outputs(batch, *self._hidden(batch))
        return out.value_N if out.value_N is not None else need(out.logp_N, "outputs.logp_N")

    def _losses(self, batch: Batch, loss: LossFn) -> tuple[Tensor, Outputs, Loss]:
        """What a micro-batch adds to the loss, what was said of it, and the loss of its tokens."""
        hidden_AD, at_A = self._hidden(batch)
        out = self._outputs(batch, hidden_AD, at_A)
        result = loss(batch, out)
        if self.full_kl is not None:
            kl_N = within(self.full_kl.reference.module, self._full_kl_N, self.full_kl, batch, hidden_AD)
            result = self.full_kl.added(result, batch, kl_N)
        return (result.loss_N * need(batch.weight_N, "batch.weight_N")).sum(), out, result

    def _collisions(self, batch: Batch) -> Tensor:
        hidden_AD, at_A = self._hidden(batch)
        sums_A = collisions(hidden_AD, head=self.decoder.head, temperature=self.cut.temperature)
        return self._spread(sums_A, at_A, batch.tokens)

    def _full_kl_N(self, term: FullKl, batch: Batch, hidden_AD: Tensor) -> Tensor:
        with torch.no_grad():
            reference_AD, at_A = term.reference._hidden(batch)
        heads = (self.decoder.head, term.reference.decoder.head)
        kl_A = full_kl(hidden_AD, reference_AD, heads=heads, temperature=self.cut.temperature)
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
            temperature=self.cut.temperature,
            entropy_grad=self.cut.entropy_grad,
        )
        return Outputs(
            logp_N=self._spread(logp_A, at_A, batch.tokens),
            entropy_N=self._spread(entropy_A, at_A, batch.tokens),
        )

    def _spread(self, x_A: Tensor, at_A: Tensor, n: int) -> Tensor:
        """[N] numbers of sampled tokens, 0 elsewhere; all ranks' of them."""
        return self.parallel.merged(x_A.new_zeros(n).index_copy(0, at_A, x_A))

    def _step(self) -> Metrics:
        assert self.optimizer is not None
        lr = self.optimizer.lr
        norm = self.optimizer.clip()
        finite, scaled = math.isfinite(norm), {}
        if (scale := self.optimizer.loss_scale) is not None:
            scaled = {"loss_scale": scale.scale}
            scale.after(finite)
        if finite:
            self.optimizer.step()
            refresh(self.module)
            self.skipped_in_a_row = 0
        else:
            self.optimizer.skip()
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row > self.max_skipped:
                raise WhetError(
                    f"the gradient was not finite in {self.skipped_in_a_row} optimizer steps in a row; "
                    "lower train.optimizer.lr, or look at the rewards of the last rollouts"
                )
        self.optimizer.zero_grad()
        return {"lr": lr, "skipped_steps": float(not finite), **scaled} | (
            {"grad_norm": norm} if finite else {}
        )


class Sums:
    """Means (of names with `max`, maxima) of loss statistics over a whole minibatch, however it was cut: sums and
    counts, divided once."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.largest: dict[str, float] = {}

    @torch.no_grad()
    def add(self, batch: Batch, out: Outputs, result: Loss) -> None:
        self.loss += float((result.loss_N * need(batch.weight_N, "batch.weight_N")).sum(dtype=torch.float64))
        for name, x in result.stats.items():
            self._take(name, x[batch.mask_N] if len(x) == batch.tokens else x)
        if out.logp_N is not None:
            at_M = torch.nonzero(batch.mask_N & (batch.version_N >= 0)).flatten()
            for name, x in mismatch(out.logp_N[at_M], batch.logp_sample_N[at_M]).items():
                self._take(name, x)

    def _take(self, name: str, x: Tensor) -> None:
        if len(x) == 0:
            return
        if "max" in name.split("_"):
            self.largest[name] = max(self.largest.get(name, -math.inf), float(x.max()))
        else:
            self.sums[name] = self.sums.get(name, 0.0) + float(x.sum(dtype=torch.float64))
            self.counts[name] = self.counts.get(name, 0) + len(x)

    def join(self, other: Sums) -> None:
        """Take in what another rank has seen."""
        self.loss += other.loss
        for name, x in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + x
            self.counts[name] = self.counts.get(name, 0) + other.counts[name]
        for name, x in other.largest.items():
            self.largest[name] = max(self.largest.get(name, -math.inf), x)

    def means(self) -> Metrics:
        means = {name: self.sums[name] / n for name, n in self.counts.items()}
        return {"loss": self.loss, **means, **perplexities(means), **self.largest}


def _inside(model: PreTrainedModel) -> Iterator[str]:
    """Names of the matrices between embedding and output layer."""
    ends = [m for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None]
    outer = {id(p) for end in ends for p in end.parameters()}
    yield from (name for name, p in model.named_parameters() if p.ndim > 1 and id(p) not in outer)


def _shape(tensors: Mapping[str, Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as f:
            return {name: f.get_tensor(name) for name in f.keys()}, f.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as e:
        raise CheckpointError(
            f"{path}: cannot be read ({e}); the checkpoint is damaged, use an older one"
        ) from e


def _write(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata=metadata)
