"""The train engine in plain PyTorch: one process, the module itself, packed sequences.

A step's gradient is a sum over tokens with global weights (`Batch.weight_N`), so how it is cut into
micro-batches changes memory and speed, never the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from whet.algos.mismatch import mismatch
from whet.algos.segments import need
from whet.batch import Batch, Loss, LossFn, Outputs, micro_batches
from whet.config.schema import Optimizer as OptimizerConfig
from whet.config.schema import Train
from whet.models.attention import PackedAttention
from whet.models.forward import decoder
from whet.models.kernels import Ops
from whet.models.logprobs import token_logprobs
from whet.models.optim import AdamW
from whet.models.packing import layout
from whet.types import CheckpointError, Metrics, WhetError


def micro_tokens(device: str, hidden_size: int) -> int:
    """Default of train.micro_tokens: where larger micro-batches only take more memory.

    On a CPU 2^19 / width (4096 tokens at width 128, 1024 at 512), on CUDA 16384.
    """
    return 16_384 if device == "cuda" else max(512, 2**19 // hidden_size)


@dataclass(frozen=True)
class Cut:
    """How a batch is cut for memory, and what is computed."""

    max_tokens: int | None = 4096
    max_rollouts: int | None = None
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
            share_prompts=train.share_prompts,
            checkpoint=train.gradient_checkpointing,
            whole_groups=whole_groups,
            entropy_grad=entropy_grad,
            temperature=temperature,
        )


class TorchEngine:
    """Policy, reference (no optimizer) or critic (a value head on the decoder)."""

    def __init__(
        self,
        model: PreTrainedModel,
        ops: Ops,
        *,
        cut: Cut,
        value_head: nn.Linear | None = None,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 1,
        max_skipped: int = 10,
    ) -> None:
        self.version = 0
        self.module, self.ops, self.cut, self.value_head = model, ops, cut, value_head
        self.decoder = decoder(model, ops)
        self.optimizer = AdamW(self._named(), optimizer, total_steps=total_steps) if optimizer else None
        self.max_skipped, self.skipped_in_a_row = max_skipped, 0
        self.device = next(model.parameters()).device
        self.beat: Callable[[str], object] = lambda what: None
        """Called at every micro-batch: the work goes on."""

    # -- the seam

    @torch.no_grad()
    def forward(self, batch: Batch, want: Literal["logprobs", "values"]) -> Tensor:
        if (want == "values") != (self.value_head is not None):
            raise WhetError(f"asked a {'critic' if self.value_head else 'policy'} for {want}")
        parts: list[Tensor] = []
        for micro in self._micro(batch):
            out = self._outputs(micro.to(self.device))
            parts.append(out.value_N if out.value_N is not None else out.logp_N)  # type: ignore[arg-type]
        return torch.cat(parts).to(batch.mask_N.device)

    def update(self, batch: Batch, loss: LossFn) -> Metrics:
        assert self.optimizer is not None, "this engine was made without an optimizer"
        self.optimizer.zero_grad()
        sums = Sums()
        for micro in self._micro(batch):
            micro = micro.to(self.device)
            out = self._outputs(micro)
            result = loss(micro, out)
            total = (result.loss_N * need(micro.weight_N, "batch.weight_N")).sum()
            if total.requires_grad:
                total.backward()
            sums.add(micro, out, result)
        return {**sums.means(), **self._step()}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.module.named_parameters():
            yield name, p.detach()

    def save(self, path: Path) -> None:
        """Write `model.safetensors` and, with an optimizer, `optimizer.safetensors` into the folder `path`."""
        path.mkdir(parents=True, exist_ok=True)
        _write({n: p.detach() for n, p in self._named()}, path / "model.safetensors")
        if self.optimizer is not None:
            # one key: safetensors writes several in random order, and equal runs write equal bytes
            counts = json.dumps({"steps": self.optimizer.step_count, "skipped": self.skipped_in_a_row})
            _write(self.optimizer.state(), path / "optimizer.safetensors", {"counts": counts})

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
        if self.optimizer is not None:
            state, meta = _read(path / "optimizer.safetensors")
            counts = json.loads(meta["counts"])
            self.optimizer.restore(state, counts["steps"])
            self.skipped_in_a_row = counts["skipped"]

    @torch.no_grad()
    def copy_from(self, other: TorchEngine) -> None:
        """Take another engine's weights, in place."""
        theirs = dict(other.module.named_parameters())
        for name, p in self.module.named_parameters():
            p.copy_(theirs[name])

    def place(self, device: Literal["gpu", "cpu"]) -> None:
        where = torch.device("cuda" if device == "gpu" else "cpu")
        nn.Module.to(self.module, where)
        if self.value_head is not None:
            self.value_head.to(where)
        self.device = where

    # -- inside

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.module.named_parameters()
        if self.value_head is not None:
            yield from self.value_head.named_parameters(prefix="value_head")

    def _micro(self, batch: Batch) -> Iterator[Batch]:
        cut = self.cut
        for micro in micro_batches(
            batch,
            max_tokens=cut.max_tokens,
            max_rollouts=cut.max_rollouts,
            shared=cut.share_prompts,
            whole_groups=cut.whole_groups,
        ):
            self.beat("a micro-batch")
            yield micro

    def _outputs(self, batch: Batch) -> Outputs:
        packed = layout(batch, share_prompts=self.cut.share_prompts)
        hidden_UD = self.decoder.hidden(
            packed.token_ids_U,
            packed.position_U,
            PackedAttention(packed.segments, self.ops),
            checkpoint=self.cut.checkpoint and torch.is_grad_enabled(),
        )
        at_A = torch.nonzero(batch.mask_N).flatten()
        hidden_AD = F.embedding(packed.predictor_N[at_A], hidden_UD)
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
        return {"loss": self.loss, **means, **self.largest}


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
