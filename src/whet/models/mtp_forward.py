"""The hidden states of layers of multi-token prediction, packed, as `forward` has them of the decoder.

Shape letters: U tokens to compute, H query heads, K key/value heads, D hidden or head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from whet.models.attention import Attend
from whet.models.float8 import recomputed
from whet.models.fused_forward import Family, known_family, layer_of, one_layer, rope
from whet.models.hf_forward import Nobody, recomputed_in
from whet.models.kernels import Ops
from whet.models.mtp import MtpLayer
from whet.models.products import Everywhere, linear
from whet.models.sharded import within


class MtpHidden(Protocol):
    def __call__(
        self, embedded_UD: Tensor, hidden_UD: Tensor, position_U: Tensor, attend: Attend, *, checkpoint: bool
    ) -> Tensor:
        """[U, D] hidden states of one layer, after its last norm. embedded_UD: of the token that it reads at each
        place; hidden_UD: of the layer before."""


def embedding_of(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Token ids [U] to what enters the first layer, [U, D]."""
    embed: Any = model.get_input_embeddings()

    def embedded(token_ids_U: Tensor) -> Tensor:
        h_UD = F.embedding(token_ids_U, embed.weight)
        scale = getattr(embed, "embed_scale", None)
        return h_UD if scale is None else h_UD * scale.to(h_UD.dtype)

    return embedded


def hidden_of(model: PreTrainedModel, layers: Sequence[MtpLayer], ops: Ops) -> list[MtpHidden]:
    """The function of each layer, by reference. Make it before the model is spread over ranks. A model of no known
    family computes by its own modules; it has been set to whet's attention (`forward.decoder`)."""
    family = known_family(model, model.config)
    if family is None:
        return [_modules(model, layer) for layer in layers]
    return [_functional(model, layer, ops, family=family) for layer in layers]


def _functional(model: Any, layer: MtpLayer, ops: Ops, *, family: Family) -> MtpHidden:
    config, rotary = model.config, model.model.rotary_emb
    view = layer_of(layer.module, config.num_hidden_layers, ops=ops, family=family, config=config)
    eps, offset = config.rms_norm_eps, family.offset

    def run(
        embedded_UD: Tensor, hidden_UD: Tensor, *, attend: Attend, cos_UD: Tensor, sin_UD: Tensor
    ) -> Tensor:
        e_UD = ops.rms_norm(embedded_UD, layer.embedding_norm.weight, eps, offset=offset)
        h_UD = ops.rms_norm(hidden_UD, layer.hidden_norm.weight, eps, offset=offset)
        x_UD = _joined(layer, e_UD, h_UD)
        delta_UD, h_UD = one_layer(
            view, None, x_UD, ops=ops, attend=attend, route=None, cos_UD=cos_UD, sin_UD=sin_UD
        )
        return ops.add_rms_norm(delta_UD, h_UD, layer.norm.weight, eps=eps, offset=offset)[0]

    def hidden(
        embedded_UD: Tensor, hidden_UD: Tensor, position_U: Tensor, attend: Attend, *, checkpoint: bool
    ) -> Tensor:
        cos_UD, sin_UD = rope(rotary, position_U)
        step: Callable[..., Tensor] = partial(run, attend=attend, cos_UD=cos_UD, sin_UD=sin_UD)
        if checkpoint:
            step = recomputed(step)
        return within(layer.module, step, embedded_UD, hidden_UD)

    return hidden


def _modules(model: PreTrainedModel, layer: MtpLayer) -> MtpHidden:
    base: Any = model.get_decoder()
    decoder_layer = layer.module.forward  # its own, before ranks put another in its place

    def run(embedded_UD: Tensor, hidden_UD: Tensor, *, attend: Attend, position_U: Tensor) -> Tensor:
        x_1UD = _joined(layer, layer.embedding_norm(embedded_UD), layer.hidden_norm(hidden_UD))[None]
        out = decoder_layer(
            x_1UD,
            position_embeddings=base.rotary_emb(x_1UD, position_U[None]),
            attention_mask=None,
            position_ids=position_U[None],
            past_key_values=None,
            use_cache=False,
            plan=attend,
        )
        states_UD: Tensor = layer.norm((out[0] if isinstance(out, tuple) else out)[0])
        return states_UD

    def hidden(
        embedded_UD: Tensor, hidden_UD: Tensor, position_U: Tensor, attend: Attend, *, checkpoint: bool
    ) -> Tensor:
        nothing = len(position_U) == 0
        # modules cannot compute that, and other ranks may wait for this one in the middle of them
        if nothing:
            embedded_UD, hidden_UD = (F.pad(x, (0, 0, 0, 1)) for x in (embedded_UD, hidden_UD))
            position_U, attend = position_U.new_zeros(1), Nobody(attend)
        step: Callable[..., Tensor] = partial(run, attend=attend, position_U=position_U)
        if checkpoint:
            step = recomputed_in(step, Everywhere)
        with Everywhere():
            states_UD = within(layer.module, step, embedded_UD, hidden_UD)
        return states_UD[:0] if nothing else states_UD

    return hidden


def _joined(layer: MtpLayer, embedded_UD: Tensor, hidden_UD: Tensor) -> Tensor:
    """What enters the decoder layer: the residual stream, which autocast leaves in the dtype of the parameters."""
    both = (hidden_UD, embedded_UD) if layer.names.hidden_first else (embedded_UD, hidden_UD)
    return linear(torch.cat(both, -1), layer.project.weight, None).to(layer.project.weight.dtype)
