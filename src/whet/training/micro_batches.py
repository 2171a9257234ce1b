"""How a train engine splits a batch to bound memory, and what it computes for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedModel

from whet.config.schema import PrecisionConfig, TrainConfig
from whet.config.sizes import micro_batch_tokens
from whet.models.mtp import MtpLoss
from whet.training.work import BatchFlops, work_of


@dataclass(frozen=True)
class MicroBatchLimits:
    """How large a micro-batch may be. What is longer by itself makes one of its own."""

    max_tokens: int | None = None
    """To compute."""
    max_rollouts: int | None = None
    """Given, it is what counts."""
    shared: bool = False
    """Rollouts of a group have one prompt between them."""
    whole_groups: bool = False
    """Groups are never cut."""
    work: BatchFlops | None = None
    """What is made equal is the arithmetic of this model; None: tokens."""


@dataclass(frozen=True)
class MicroBatchPolicy:
    """How a batch is split to bound memory, and what is computed."""

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
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    offload: tuple[str, ...] = ()
    """train.offload: what goes to the host while it is not needed."""
    compile: bool = False
    router_aux: float = 0.0
    """Coefficient of the load-balancing term, where there is an optimizer."""
    router_aux_each: bool = False
    """The term is each layer's own."""
    router_z: float = 0.0
    """Coefficient of the routers' z term."""
    mtp: MtpLoss | None = None
    """What layers of multi-token prediction learn, where there is an optimizer."""
    replays: bool = False
    """Tokens are computed with the experts that the batch has of them (`Batch.routed_NLE`)."""
    work: BatchFlops | None = None
    """The model's arithmetic, by which micro-batches and ranks are made equal; None: by tokens."""
    colocated: bool = False
    """The accelerator's memory is a server's while nothing is computed (rollout.server.sleep)."""

    def limits(self, *, learns: bool) -> MicroBatchLimits:
        """Of a micro-batch with gradients or without."""
        tokens, rollouts = self.max_tokens, self.max_rollouts
        if not learns and (self.forward_tokens or self.forward_rollouts):
            tokens, rollouts = self.forward_tokens, self.forward_rollouts
        return MicroBatchLimits(
            max_tokens=tokens,
            max_rollouts=rollouts,
            shared=self.share_prompts,
            whole_groups=self.whole_groups,
            work=self.work,
        )

    @staticmethod
    def of(
        train: TrainConfig,
        model: PreTrainedModel,
        *,
        whole_groups: bool,
        entropy_grad: bool,
        temperature: float,
        critic: bool = False,
        colocated: bool = False,
        mtp: MtpLoss | None = None,
    ) -> MicroBatchPolicy:
        width = model.config.get_text_config().hidden_size
        tokens = train.micro_batch_tokens or micro_batch_tokens(model.device.type, width)
        return MicroBatchPolicy(
            max_tokens=None if train.micro_batch_rollouts else tokens,
            max_rollouts=train.micro_batch_rollouts,
            forward_tokens=train.forward_micro_batch_tokens,
            forward_rollouts=train.forward_micro_batch_rollouts,
            share_prompts=train.share_prompts,
            checkpoint=train.gradient_checkpointing,
            whole_groups=whole_groups,
            entropy_grad=entropy_grad,
            temperature=temperature,
            precision=train.precision,
            offload=train.offload,
            compile=train.compile,
            router_aux=train.router_aux_loss_coef,
            router_aux_each=train.router_aux_loss_scope == "layer",
            router_z=train.router_z_loss_coef,
            mtp=mtp,
            replays=train.router_replay != "none",
            work=work_of(model, output=not critic),
            colocated=colocated,
        )
