"""Hidden states of packed tokens: one function for training, prefill and decoding of every model.

There are two implementations. Known families run through a lean functional forward over the module's own parameters,
read on every call: nothing is copied, and nothing becomes stale when an optimizer or a weight sync changes them. Every
other model (and a known family that was altered: hooks, quantised layers, foreign adapters) runs through its own
modules, with whet's attention inserted through transformers' attention interface, after a probe has shown that this
computes the same as the model's own forward.

Shape letters: U tokens to compute, H query heads, K key/value heads, D hidden or head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.models import fused_forward, hf_forward
from whet.models.attention import Attend
from whet.models.kernels import Ops
from whet.models.logprobs import OutputHead
from whet.models.routing import Route
from whet.models.vocabulary import VocabularyHead
from whet.types import ConfigError


class Hidden(Protocol):
    def __call__(
        self,
        token_ids_U: Tensor,
        position_U: Tensor,
        attend: Attend,
        *,
        checkpoint: bool = False,
        route: Route | None = None,
    ) -> Tensor:
        """[U, D] hidden states after the final norm. `checkpoint`: recompute each layer in backward. `route`: which
        experts compute each token; None: those that routers choose."""


@dataclass(frozen=True)
class Decoder:
    """A causal language model as whet computes it. Create a new one after changing the module's structure."""

    hidden: Hidden
    head: OutputHead
    path: Literal["functional", "modules"]
    layers: int
    kv_heads: int
    head_dim: int
    plain: fused_forward.PlainModel | None = None
    """The same, for a decode step in one call of C; None: it has more than C computes."""


def decoder(model: PreTrainedModel, ops: Ops, *, compile: bool = False) -> Decoder:
    """The decoder of a Hugging Face causal language model, by reference. compile: its layers, with torch.compile.

    A model of no known family is set to our attention and can no longer be called without a plan; to use it
    by itself again, call `model.set_attn_implementation("sdpa")`.
    Errors: ConfigError where packed tokens cannot be computed, or not as the model itself computes them.
    """
    config = model.config.get_text_config()
    head = output_head(model, config)
    family = fused_forward.known_family(model, config)
    if family is None:
        hidden = hf_forward.modules(model, config)
        seen = hf_forward.probe(model, hidden, head=head, ops=ops)
        return Decoder(hf_forward.modules(model, config, compile=compile), head, "modules", *seen)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    hidden, plain = fused_forward.functional(model, ops, family=family, compile=compile)
    return Decoder(hidden, head, "functional", config.num_hidden_layers, kv_heads, head_dim, plain)


def output_head(model: PreTrainedModel, config: Any) -> OutputHead:
    """The output layer with the family's post-processing: a factor (Cohere), divisor (Granite), cap (Gemma)."""
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear | VocabularyHead):
        raise ConfigError(f"{type(model).__name__} has no linear output layer; use a causal language model")
    if config.model_type in fused_forward.FAMILIES:  # no code of theirs reads such settings, so nor do we
        return OutputHead(linear)
    divisor = getattr(config, "logits_scaling", None) or 1.0
    scale = (getattr(config, "logit_scale", None) or 1.0) / divisor
    return OutputHead(linear, scale=scale, softcap=getattr(config, "final_logit_softcapping", None))
