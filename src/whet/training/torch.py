"""The train engine in plain PyTorch: one process, the module itself, packed sequences.

A step's gradient is a sum over tokens with global weights (`Batch.weight_N`), so how it is cut into
micro-batches changes memory and speed, never the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
from whet.config.schema import Train
from whet.config.sizes import micro_tokens
from whet.models.attention import PackedAttention
from whet.models.divergence import full_kl
from whet.models.dropout import Noise, token_names
from whet.models.forward import decoder
from whet.models.kernels import Ops
from whet.models.logprobs import collisions, token_logprobs
from whet.models.lora import adapted, dropping, learned, merged, refresh
from whet.models.optim import Optimizer
from whet.models.packing import layout
from whet.types import CheckpointError, Metrics, WhetError

MICRO_BATCH = "micro-batch"
"""Span of one micro-batch: from the moment it is dealt out until the next is asked for."""


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
    ) -> None:
        """whole: save the weights under adapters too, for no other place has them. seed: of what adapters drop."""
        self.version, self.whole = 0, whole
        self.module, self.ops, self.cut, self.value_head = model, ops, cut, value_head
        self.decoder = decoder(model, ops)
        self.optimizer = None
        if optimizer is not None:
            self.optimizer = Optimizer(
                self._named(),
                optimizer,
                total_steps=total_steps,
                updates_per_step=updates_per_step,
                hidden=set(_inside(model)),
            )
        self.max_skipped, self.skipped_in_a_row = max_skipped, 0
        self.device = next(model.parameters()).device
        self.seed, self.drops = seed, any(layer.dropout for layer in adapted(model).values())
        self.full_kl: FullKl | None = None
        self.beat: Callable[[str], object] = lambda what: None
        """Called at every micro-batch: the work goes on."""
        self.span: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
        """Around a forward, an update and its parts: what is being done."""

    # -- the seam

    @torch.no_grad()
    def forward(self, batch: Batch, want: Literal["logprobs", "values", "collision"]) -> Tensor:
        if (want == "values") != (self.value_head is not None):
            raise WhetError(f"asked a {'critic' if self.value_head else 'policy'} for {want}")
        parts: list[Tensor] = []
        with self.span(f"forward {want}"):
            for micro in self._micro(batch):
                micro = micro.to(self.device)
                if want == "collision":
                    parts.append(self._collisions(micro))
                    continue
                out = self._outputs(micro, *self._hidden(micro))
                parts.append(out.value_N if out.value_N is not None else out.logp_N)  # type: ignore[arg-type]
            return torch.cat(parts).to(batch.mask_N.device)

    def update(self, batch: Batch, loss: LossFn) -> Metrics:
        assert self.optimizer is not None, "this engine was made without an optimizer"
        self.optimizer.zero_grad()
        sums = Sums()
        with self.span("update"):
            for micro in self._learning(batch):
                hidden_AD, at_A = self._hidden(micro)
                out = self._outputs(micro, hidden_AD, at_A)
                result = loss(micro, out)
                if self.full_kl is not None:
                    result = self.full_kl.added(
                        result, micro, self._full_kl_N(self.full_kl, micro, hidden_AD)
                    )
                total = (result.loss_N * need(micro.weight_N, "batch.weight_N")).sum()
                if total.requires_grad:
                    total.backward()
                sums.add(micro, out, result)
            with self.span("optimizer step"):
                stepped = self._step()
        return {**sums.means(), **stepped}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in merged(self.module).named_parameters():
            yield name, p.detach()

    def save(self, path: Path, *, moments: bool = True) -> None:
        """Write `model.safetensors` and, with an optimizer, `optimizer.safetensors` into the folder `path`.

        Without `moments` the latter has the schedule's place and master weights alone.
        """
        path.mkdir(parents=True, exist_ok=True)
        _write({n: p.detach() for n, p in self._named()}, path / "model.safetensors")
        if self.optimizer is not None:
            # one key: safetensors writes several in random order, and equal runs write equal bytes
            counts = json.dumps({"steps": self.optimizer.step_count, "skipped": self.skipped_in_a_row})
            state = self.optimizer.state()
            kept = {n: t for n, t in state.items() if moments or n.startswith("master.")}
            _write(kept, path / "optimizer.safetensors", {"counts": counts})

    def load(self, path: Path) -> None:
        """Read what `save` wrote, in place. Raises CheckpointError if it is damaged or of another model."""
        found, _ = _read(path / "model.safetensors")
        own = dict(self._named())
        if odd := sorted(n for n in found.keys() | own.keys() if _shape(found, n) != _shape(own, n)):
            raise CheckpointError(
                f"{path}: weights are of another model; they differ in {odd[:3]} ({len(odd)} tensors)"
            )
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(found[name])
        refresh(self.module)
        if self.optimizer is not None:
            state, meta = _read(path / "optimizer.safetensors")
            counts = json.loads(meta["counts"])
            self.optimizer.restore(state, counts["steps"])
            self.skipped_in_a_row = counts["skipped"]

    @torch.no_grad()
    def copy_from(self, other: TorchEngine) -> None:
        """Take another engine's weights, in place."""
        theirs = dict(learned(other.module) if adapted(self.module) else other.weights())
        for name, p in learned(self.module):
            p.copy_(theirs[name])
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

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is saved and, where it requires gradients, trained."""
        yield from self.module.named_parameters() if self.whole else learned(self.module)
        if self.value_head is not None:
            yield from self.value_head.named_parameters(prefix="value_head")

    def _micro(self, batch: Batch) -> Iterator[Batch]:
        cut = self.cut
        tokens, rollouts = cut.max_tokens, cut.max_rollouts
        if not torch.is_grad_enabled() and (cut.forward_tokens or cut.forward_rollouts):
            tokens, rollouts = cut.forward_tokens, cut.forward_rollouts
        for micro in micro_batches(
            batch,
            max_tokens=tokens,
            max_rollouts=rollouts,
            shared=cut.share_prompts,
            whole_groups=cut.whole_groups,
        ):
            self.beat("a micro-batch")
            with self.span(MICRO_BATCH):
                yield micro

    def _learning(self, batch: Batch) -> Iterator[Batch]:
        """Micro-batches to learn from; as long as each is in use, adapters with dropout drop."""
        assert self.optimizer is not None
        key = seeds.key(self.seed, "dropout", self.optimizer.step_count)
        for micro in self._micro(batch):
            micro = micro.to(self.device)
            noise = None
            if self.drops:
                noise = Noise(token_names(micro, layout(micro, share_prompts=self.cut.share_prompts)), key)
            with dropping(self.module, noise):
                yield micro

    def _hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[A, D] the hidden states that predict the sampled tokens, and [A] where in the batch those are."""
        packed = layout(batch, share_prompts=self.cut.share_prompts)
        hidden_UD = self.decoder.hidden(
            packed.token_ids_U,
            packed.position_U,
            PackedAttention(packed.segments, self.ops),
            checkpoint=self.cut.checkpoint and torch.is_grad_enabled(),
        )
        at_A = torch.nonzero(batch.mask_N).flatten()
        return F.embedding(packed.predictor_N[at_A], hidden_UD), at_A

    def _collisions(self, batch: Batch) -> Tensor:
        hidden_AD, at_A = self._hidden(batch)
        sums_A = collisions(hidden_AD, head=self.decoder.head, temperature=self.cut.temperature)
        return _scatter(sums_A, at_A, batch.tokens)

    def _full_kl_N(self, term: FullKl, batch: Batch, hidden_AD: Tensor) -> Tensor:
        with torch.no_grad():
            reference_AD, at_A = term.reference._hidden(batch)
        heads = (self.decoder.head, term.reference.decoder.head)
        kl_A = full_kl(hidden_AD, reference_AD, heads=heads, temperature=self.cut.temperature)
        return _scatter(kl_A, at_A, batch.tokens)

    def _outputs(self, batch: Batch, hidden_AD: Tensor, at_A: Tensor) -> Outputs:
        if self.value_head is not None:
            value_A = self.value_head(hidden_AD).squeeze(-1).float()
            return Outputs(value_N=_scatter(value_A, at_A, batch.tokens))
        logp_A, entropy_A = token_logprobs(
            hidden_AD,
            batch.token_ids_N[at_A],
            head=self.decoder.head,
            ops=self.ops,
            temperature=self.cut.temperature,
            entropy_grad=self.cut.entropy_grad,
        )
        return Outputs(
            logp_N=_scatter(logp_A, at_A, batch.tokens), entropy_N=_scatter(entropy_A, at_A, batch.tokens)
        )

    def _step(self) -> Metrics:
        assert self.optimizer is not None
        lr = self.optimizer.lr
        norm = self.optimizer.clip()
        finite = math.isfinite(norm)
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
        return {"lr": lr, "skipped_steps": float(not finite)} | ({"grad_norm": norm} if finite else {})


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

    def means(self) -> Metrics:
        means = {name: self.sums[name] / n for name, n in self.counts.items()}
        return {"loss": self.loss, **means, **perplexities(means), **self.largest}


def _inside(model: PreTrainedModel) -> Iterator[str]:
    """Names of the matrices between embedding and output layer."""
    ends = [m for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None]
    outer = {id(p) for end in ends for p in end.parameters()}
    yield from (name for name, p in model.named_parameters() if p.ndim > 1 and id(p) not in outer)


def _scatter(x_A: Tensor, at_A: Tensor, n: int) -> Tensor:
    return x_A.new_zeros(n).index_copy(0, at_A, x_A)


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
