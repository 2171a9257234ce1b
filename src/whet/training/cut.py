"""How a train engine cuts a batch for memory, and what it computes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from transformers import PreTrainedModel

from whet.config.schema import Precision, Train
from whet.config.sizes import micro_tokens


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
    router_aux: float = 0.0
    """Coefficient of the load-balancing term, where there is an optimizer."""

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
            router_aux=train.router_aux_coef,
        )
