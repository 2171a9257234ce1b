"""Hidden states of packed tokens: one function for training, prefill and decoding of every model.

Two implementations. Known families run through a lean functional forward over the module's own parameters,
read on every call: nothing is copied, nothing goes stale when an optimizer or a weight sync changes them.
Everything else (and a known family that was altered: adapters, hooks, quantised layers) runs through its own
modules, with our attention put in by transformers' attention interface, after a probe has shown that this
computes the same as the model's own forward.

Shape letters: U tokens to compute, H query heads, K key/value heads, D hidden or head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from whet.models.attention import Attend, PackedAttention, register_hf_attention
from whet.models.kernels import Ops
from whet.models.logprobs import Head, logits
from whet.models.segments import Segments
from whet.types import ConfigError


class Hidden(Protocol):
    def __call__(
        self, token_ids_U: Tensor, position_U: Tensor, attend: Attend, *, checkpoint: bool = False
    ) -> Tensor:
        """[U, D] hidden states after the final norm. `checkpoint`: recompute each layer in the backward pass."""


@dataclass(frozen=True)
class Decoder:
    """A causal language model as whet computes it. Make a new one after changing the module's structure."""

    hidden: Hidden
    head: Head
    path: Literal["functional", "modules"]
    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class _Family:
    """What the functional forward must know of an architecture beyond what its modules say."""

    architecture: str
    offset: float = 0.0
    """Added to the weight of RMS norms."""
    act: Literal["silu", "gelu_tanh"] = "silu"


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM"),
    "mistral": _Family("MistralForCausalLM"),
    "qwen2": _Family("Qwen2ForCausalLM"),
    "qwen3": _Family("Qwen3ForCausalLM"),
    "qwen3_moe": _Family("Qwen3MoeForCausalLM"),
    "gemma": _Family("GemmaForCausalLM", offset=1.0, act="gelu_tanh"),
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies are fixed when the model is made."""
_LONGEST_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the longest sequence of a call."""


def decoder(model: PreTrainedModel, ops: Ops) -> Decoder:
    """The decoder of a Hugging Face causal language model, by reference.

    A model of no known family is set to our attention and can no longer be called without a plan; to use it
    by itself again, call `model.set_attn_implementation("sdpa")`.
    Errors: ConfigError where packed tokens cannot be computed, or not as the model itself computes them.
    """
    config = model.config.get_text_config()
    head = _head(model, config)
    family = _known_family(model, config)
    if family is None:
        hidden = _modules(model, config)
        return Decoder(hidden, head, "modules", *_probe(model, hidden, head=head, ops=ops))
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    hidden = _functional(model, ops, family=family)
    return Decoder(hidden, head, "functional", config.num_hidden_layers, kv_heads, head_dim)


def _head(model: PreTrainedModel, config: Any) -> Head:
    """The output layer with what families put after it: Cohere's factor, Granite's divisor, Gemma's soft-cap."""
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ConfigError(
            f"{type(model).__name__} has no linear output layer; whet trains causal language models"
        )
    divisor = getattr(config, "logits_scaling", None) or 1.0
    scale = (getattr(config, "logit_scale", None) or 1.0) / divisor
    return Head(linear, scale=scale, softcap=getattr(config, "final_logit_softcapping", None))


def _rope_type(config: Any) -> str:
    parameters = getattr(config, "rope_parameters", None) or {}
    return parameters.get("rope_type", "default")


# ---------------------------------------------------------------- known families


def _known_family(model: PreTrainedModel, config: Any) -> _Family | None:
    """The family, only if every module of the model is what that family's Hugging Face code made."""
    kind = model.config.model_type
    family = _FAMILIES.get(kind)
    home = f"transformers.models.{kind}.modeling_{kind}"
    if family is None or (type(model).__module__, type(model).__name__) != (home, family.architecture):
        return None
    fits = (
        _ACTIVATIONS.get(getattr(config, "hidden_act", "")) == family.act
        and _rope_type(config) in _STATIC_ROPE
        and not getattr(config, "use_bidirectional_attention", None)
    )
    return family if fits and all(_untouched(module, home) for module in model.modules()) else None


def _untouched(module: nn.Module, home: str) -> bool:
    own = type(module) in (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU) or type(module).__module__ in (
        home,
        "transformers.activations",
    )
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return own and not hooked and "forward" not in vars(module)


@dataclass(frozen=True)
class _Layer:
    """One decoder layer: its modules, whose parameters are read on every call, and its constants."""

    number: int
    norm_in: nn.Module
    norm_mid: nn.Module
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    feed_forward: Callable[[Tensor], Tensor]
    eps: float
    offset: float
    head_dim: int
    scale: float
    window: int | None


def _functional(model: PreTrainedModel, ops: Ops, *, family: _Family) -> Hidden:
    base, config = model.model, model.config
    embed, rotary = base.embed_tokens, base.rotary_emb
    layers = [
        _layer(layer, number, ops=ops, family=family, config=config)
        for number, layer in enumerate(base.layers[: config.num_hidden_layers])
    ]

    def hidden(
        token_ids_U: Tensor, position_U: Tensor, attend: Attend, *, checkpoint: bool = False
    ) -> Tensor:
        # padding_idx is not passed on: in a packed batch the pad token is a token like any other
        h_UD = F.embedding(token_ids_U, embed.weight)
        if family.offset:
            h_UD = h_UD * embed.embed_scale.to(h_UD.dtype)
        cos_UD, sin_UD = rope(rotary, position_U)
        step = partial(_step, ops=ops, attend=attend, cos_UD=cos_UD, sin_UD=sin_UD)
        delta_UD: Tensor | None = None
        for layer in layers:
            if checkpoint:
                delta_UD, h_UD = recompute(
                    step, layer, delta_UD, h_UD, use_reentrant=False, preserve_rng_state=False
                )
            else:
                delta_UD, h_UD = step(layer, delta_UD, h_UD)
        last = base.norm.weight
        if delta_UD is None:
            return ops.rms_norm(h_UD, last, config.rms_norm_eps, offset=family.offset)
        return ops.add_rms_norm(delta_UD, h_UD, last, eps=config.rms_norm_eps, offset=family.offset)[0]

    return hidden


def rope(rotary: nn.Module, position_U: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) [U, head_dim] float32 of a static rotary embedding, as transformers computes them."""
    angle_UD = position_U[:, None].float() * rotary.inv_freq.float()
    angle_UD = torch.cat((angle_UD, angle_UD), dim=-1)
    cos_UD, sin_UD = angle_UD.cos(), angle_UD.sin()
    if rotary.attention_scaling != 1.0:
        cos_UD, sin_UD = cos_UD * rotary.attention_scaling, sin_UD * rotary.attention_scaling
    return cos_UD, sin_UD


def _layer(layer: nn.Module, number: int, *, ops: Ops, family: _Family, config: Any) -> _Layer:
    attention = layer.self_attn
    window = getattr(attention, "sliding_window", None)
    if config.model_type == "mistral":
        window = config.sliding_window
    feed_forward = _mixture if hasattr(layer.mlp, "experts") else _dense
    return _Layer(
        number=number,
        norm_in=layer.input_layernorm,
        norm_mid=layer.post_attention_layernorm,
        q=attention.q_proj,
        k=attention.k_proj,
        v=attention.v_proj,
        o=attention.o_proj,
        q_norm=getattr(attention, "q_norm", None),
        k_norm=getattr(attention, "k_norm", None),
        feed_forward=partial(feed_forward, layer.mlp, act=family.act, ops=ops),
        eps=config.rms_norm_eps,
        offset=family.offset,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        window=window,
    )


def _step(
    layer: _Layer,
    delta_UD: Tensor | None,
    h_UD: Tensor,
    *,
    ops: Ops,
    attend: Attend,
    cos_UD: Tensor,
    sin_UD: Tensor,
) -> tuple[Tensor, Tensor]:
    """One layer. Takes and returns (what the last block adds, residual), so that each addition joins a norm."""
    eps, offset = layer.eps, layer.offset
    if delta_UD is None:
        x_UD = ops.rms_norm(h_UD, layer.norm_in.weight, eps, offset=offset)
    else:
        x_UD, h_UD = ops.add_rms_norm(delta_UD, h_UD, layer.norm_in.weight, eps=eps, offset=offset)
    shape = (len(x_UD), -1, layer.head_dim)
    q_UHD, k_UKD = (
        ops.norm_rope(
            _linear(project, x_UD).view(shape),
            None if norm is None else norm.weight,
            eps,
            cos_ND=cos_UD,
            sin_ND=sin_UD,
        )
        for project, norm in ((layer.q, layer.q_norm), (layer.k, layer.k_norm))
    )
    v_UKD = _linear(layer.v, x_UD).view(shape)
    seen_UHD = attend(layer.number, q_UHD, k_UKD, v_UKD, scale=layer.scale, window=layer.window, softcap=None)
    delta_UD = _linear(layer.o, seen_UHD.reshape(len(x_UD), -1))
    x_UD, h_UD = ops.add_rms_norm(delta_UD, h_UD, layer.norm_mid.weight, eps=eps, offset=offset)
    return layer.feed_forward(x_UD), h_UD


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def _dense(mlp: nn.Module, x_UD: Tensor, *, act: Literal["silu", "gelu_tanh"], ops: Ops) -> Tensor:
    return _linear(mlp.down_proj, ops.glu(_linear(mlp.gate_proj, x_UD), _linear(mlp.up_proj, x_UD), act=act))


def _mixture(block: nn.Module, x_UD: Tensor, *, act: Literal["silu", "gelu_tanh"], ops: Ops) -> Tensor:
    """Mixture of experts: softmax over all experts, the top E of each token, one matrix product per expert.

    Tokens are sorted by expert; E copies of a token are weighed and added in the router's order, row by row,
    so a token's result does not depend on the other tokens of the batch.
    """
    router, experts = block.gate, block.experts
    probability_UX = torch.softmax(F.linear(x_UD, router.weight), dim=-1, dtype=torch.float32)
    weight_UE, expert_UE = probability_UX.topk(router.top_k, dim=-1)
    if router.norm_topk_prob:
        weight_UE = weight_UE / weight_UE.sum(-1, keepdim=True)
    order_T = expert_UE.flatten().argsort(stable=True)
    count_X = torch.bincount(expert_UE.flatten(), minlength=router.num_experts).tolist()
    sorted_TD = F.embedding(order_T // router.top_k, x_UD)
    parts = [
        F.linear(ops.glu(*F.linear(part, gate_up).chunk(2, dim=-1), act=act), down)
        for part, gate_up, down in zip(
            sorted_TD.split(count_X), experts.gate_up_proj.unbind(), experts.down_proj.unbind()
        )
        if len(part)
    ]
    back_T = torch.empty_like(order_T)
    back_T[order_T] = torch.arange(len(order_T), device=order_T.device)
    out_UED = F.embedding(back_T, torch.cat(parts)).view(*expert_UE.shape, -1)
    return (out_UED * weight_UE.to(out_UED.dtype)[..., None]).sum(1)


# ---------------------------------------------------------------- every other model


def _modules(model: PreTrainedModel, config: Any) -> Hidden:
    """The model's own modules around our attention."""
    if _rope_type(config) in _LONGEST_DEPENDENT:
        raise ConfigError(
            f"{type(model).__name__}: rope_type '{_rope_type(config)}' depends on the longest sequence of a call, so "
            "packed and decoded log-probs would differ; override rope_parameters with one of "
            f"{', '.join(_STATIC_ROPE)}"
        )
    if getattr(config, "attention_chunk_size", None):
        raise ConfigError(
            f"{type(model).__name__}: chunked attention (attention_chunk_size) is not supported"
        )
    register_hf_attention()
    model.set_attn_implementation("whet")
    base = model.get_decoder()
    blocks = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]

    def hidden(
        token_ids_U: Tensor, position_U: Tensor, attend: Attend, *, checkpoint: bool = False
    ) -> Tensor:
        with _recomputed(blocks if checkpoint else ()):
            out = base(
                input_ids=token_ids_U[None],
                position_ids=position_U[None],
                attention_mask=None,
                use_cache=False,
                plan=attend,
            )
        return out.last_hidden_state[0]

    return hidden


@contextmanager
def _recomputed(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Let these modules recompute in backward. Not by transformers' switch: that needs train(), hence dropout."""
    before = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        block.forward = partial(recompute, block.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for block, forward in zip(blocks, before):
            if forward is None:
                del block.forward
            else:
                block.forward = forward


@torch.no_grad()
def _probe(model: PreTrainedModel, hidden: Hidden, *, head: Head, ops: Ops) -> tuple[int, int, int]:
    """(layers, kv_heads, head_dim) as seen in use, if two packed sequences give the logits of the model's own forward.

    Catches whatever an unknown architecture may do beside attention (state-space layers, attention sinks,
    position biases, scaled logits) instead of training something else silently.
    """
    device = head.linear.weight.device
    lengths = (23, 9)
    ids_U = torch.arange(7, 7 + sum(lengths), device=device) % head.linear.out_features
    segments = Segments.of_lengths(torch.tensor(lengths))
    attend = _Recorder(PackedAttention(segments, ops))
    ours_UV = logits(head, hidden(ids_U, segments.position_N.to(device), attend), 1.0)
    model.set_attn_implementation("eager")
    theirs_UV = torch.cat(
        [model(input_ids=part[None], use_cache=False).logits[0] for part in ids_U.split(lengths)]
    )
    model.set_attn_implementation("whet")
    off = float((ours_UV - theirs_UV.float()).abs().max() / theirs_UV.float().std().clamp(min=1e-6))
    allowed = 1e-3 if head.linear.weight.dtype == torch.float32 else 0.2
    if not off <= allowed or len(attend.shapes) != 1:
        raise ConfigError(
            f"{type(model).__name__} cannot be packed: its logits differ from its own forward by {off:.2g} standard "
            f"deviations (allowed {allowed:g}), its layers' keys have shapes {sorted(attend.shapes)}. It uses something "
            "that packed attention cannot express; choose a decoder-only model with causal softmax attention"
        )
    return attend.layers, *attend.shapes.pop()


class _Recorder:
    """Attention that notes what it was called with."""

    def __init__(self, inner: Attend) -> None:
        self.inner = inner
        self.layers = 0
        self.shapes: set[tuple[int, int]] = set()

    def __call__(
        self,
        layer: int,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        if k_NKD.shape != v_NKD.shape:
            raise ConfigError(
                f"layer {layer} has keys of size {k_NKD.shape[-1]} and values of size {v_NKD.shape[-1]}: multi-head "
                "latent attention is not supported"
            )
        self.layers = max(self.layers, layer + 1)
        self.shapes.add((k_NKD.shape[1], k_NKD.shape[2]))
        return self.inner(layer, q_NHD, k_NKD, v_NKD, scale=scale, window=window, softcap=softcap)
