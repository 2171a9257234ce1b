"""The lean forward of known families: plain functions over the module's own parameters.

Parameters are read from the modules on every call: nothing is copied, nothing goes stale when an optimizer or
a weight sync changes or replaces them.

Shape letters: U tokens to compute, H query heads, K key/value heads, D hidden or head size, X experts, E
experts of a token, T = U x E.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.config.sizes import rope_positions
from whet.guard import pulse
from whet.models.activations import KnownOutputs, LayerOutput
from whet.models.attention import Attend, CachedAttention, PackedAttention
from whet.models.compiled_layers import LayerNumbers, LayerWeights
from whet.models.experts import Experts, by_expert, computed, gate_and_up, weighed
from whet.models.float8 import recomputed
from whet.models.kernels import Ops, table
from whet.models.lora_layers import LoraLinear, LoraStack
from whet.models.products import linear
from whet.models.router import gate_of, note
from whet.models.routing import Route
from whet.models.sharded import is_sharded, within
from whet.models.torch_ops import SWIGLU_ALPHA, SWIGLU_LIMIT, Act, Weighing


@dataclass(frozen=True)
class Family:
    """What the functional forward must know of an architecture beyond what its modules say."""

    architecture: str
    offset: float = 0.0
    """Added to the weight of RMS norms."""
    act: Act = "silu"


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM"),
    "gemma": Family("GemmaForCausalLM", offset=1.0, act="gelu_tanh"),
    "gpt_oss": Family("GptOssForCausalLM", act="swigluoai"),
}
"""By the `model_type` of their config.json."""
_ACTIVATIONS: dict[str, Act] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies are fixed when the model is made."""


def rope_type(config: Any) -> str:
    """The kind of rotary embedding, by its Hugging Face name."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")


def known_family(model: Any, config: Any) -> Family | None:
    """The family, only if every module of the model is what that family's Hugging Face code made."""
    kind = model.config.model_type
    family = FAMILIES.get(kind)
    home = f"transformers.models.{kind}.modeling_{kind}"
    if family is None or (type(model).__module__, type(model).__name__) != (home, family.architecture):
        return None
    fits = (
        _act(config) == family.act
        and rope_type(config) in STATIC_ROPE
        and not getattr(config, "use_bidirectional_attention", None)
        and getattr(config, "is_causal", True)
    )
    return family if fits and all(_untouched(module, home) for module in model.modules()) else None


def _act(config: Any) -> Act | None:
    if config.model_type == "gpt_oss":
        constants = (config.swiglu_alpha, config.swiglu_limit)
        return "swigluoai" if constants == (SWIGLU_ALPHA, SWIGLU_LIMIT) else None
    return _ACTIVATIONS.get(getattr(config, "hidden_act", ""))


def _untouched(module: nn.Module, home: str) -> bool:
    plain = (nn.Linear, nn.Embedding, nn.ModuleList, nn.ModuleDict, nn.SiLU, LoraLinear, LoraStack, Experts)
    own = type(module) in plain or type(module).__module__ in (home, "transformers.activations")
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return own and not hooked and "forward" not in vars(module)


@dataclass(frozen=True)
class _Layer:
    """One decoder layer: its modules, whose parameters are read on every call, and its constants."""

    number: int
    module: nn.Module
    norm_in: Any
    norm_mid: Any
    q: nn.Linear | LoraLinear
    k: nn.Linear | LoraLinear
    v: nn.Linear | LoraLinear
    o: nn.Linear | LoraLinear
    q_norm: Any
    k_norm: Any
    feed_forward: Callable[[Tensor, Route | None, Project], Tensor]
    plain: tuple[Any, ...] | None
    """Its norms and projections in the order of `LayerWeights`, if all projections are linear layers and no more."""
    eps: float
    offset: float
    head_dim: int
    scale: float
    window: int | None


def functional(
    model: Any, ops: Ops, *, family: Family, compile: bool = False
) -> tuple[Callable[..., Tensor], PlainModel | None]:
    """The `Hidden` function (see `forward`) of a model of this family, and what of it is plain, if all is. compile:
    what a layer computes before and after its attention, fused by torch's compiler, which takes the place of the C
    kernels there.

    Of a pipeline, it computes the layers that are in their place when it is called, from hidden states where an earlier
    part gave them (in place of token ids), and the norm where it is in its place (see `pipeline.Stage.running`)."""
    base, config = model.model, model.config
    embed, rotary = base.embed_tokens, RopeTable(base.rotary_emb)
    layer_ops = table("torch") if compile else ops
    layers = [
        layer_of(layer, number, ops=layer_ops, family=family, config=config)
        for number, layer in enumerate(base.layers[: config.num_hidden_layers])
        if hasattr(layer, "self_attn")
    ]
    plain = None
    if layer_ops.cached_layers is not None and layers and all(layer.plain is not None for layer in layers):
        plain = PlainModel(base, layers, rotary, family.act)
    layer_step, wrap = (
        (torch.compile(one_layer, dynamic=True), _outside) if compile else (one_layer, lambda x: x)
    )

    def hidden(
        token_ids_U: Tensor,
        position_U: Tensor,
        attend: Attend,
        *,
        checkpoint: bool = False,
        route: Route | None = None,
    ) -> Tensor:
        # padding_idx is not passed on: in a packed batch the pad token is a token like any other
        begins = not token_ids_U.is_floating_point()
        h_UD = F.embedding(token_ids_U, embed.weight) if begins else token_ids_U
        if family.offset and begins:
            h_UD = h_UD * embed.embed_scale.to(h_UD.dtype)
        cos_UD, sin_UD = rotary(position_U)
        asked = None if route is None else wrap(route)
        step = partial(
            layer_step, ops=layer_ops, attend=wrap(attend), route=asked, cos_UD=cos_UD, sin_UD=sin_UD
        )
        run: Callable[..., tuple[Tensor, Tensor]] = step
        if checkpoint:
            run = recomputed(step)
        delta_UD: Tensor | None = None
        done = _over_cache(plain, h_UD, attend, cos_UD, sin_UD, layer_ops) if plain and begins else None
        if done is not None:
            delta_UD, h_UD = done
        for layer in layers if done is None else ():
            if compile:  # the first time takes long
                pulse.beat("the layers")
            if base.layers[layer.number] is layer.module:
                delta_UD, h_UD = within(layer.module, run, layer, delta_UD, h_UD)
        last = getattr(base.norm, "weight", None)
        if last is None:
            return h_UD if delta_UD is None else h_UD + delta_UD
        if delta_UD is None:
            return ops.rms_norm(h_UD, last, config.rms_norm_eps, offset=family.offset)
        return ops.add_rms_norm(delta_UD, h_UD, last, eps=config.rms_norm_eps, offset=family.offset)[0]

    return hidden, plain


def _outside(asked: Any) -> Any:
    """The same `Attend` or `Route`, which torch's compiler does not look into: what it reads differs in every batch."""
    return torch.compiler.disable(asked.__call__)


def rope(rotary: Any, position_U: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) [U, head_dim] float32 of a static rotary embedding, as transformers computes them."""
    angle_UD = position_U[:, None].float() * rotary.inv_freq.float()
    angle_UD = torch.cat((angle_UD, angle_UD), dim=-1)
    cos_UD, sin_UD = angle_UD.cos(), angle_UD.sin()
    if rotary.attention_scaling != 1.0:
        cos_UD, sin_UD = cos_UD * rotary.attention_scaling, sin_UD * rotary.attention_scaling
    return cos_UD, sin_UD


class RopeTable:
    """`rope` of one rotary embedding. On a CPU from a table of all positions that have been asked for: a decode step of
    a small model would otherwise take 2 % of its time for sines."""

    def __init__(self, rotary: Any) -> None:
        self.rotary = rotary
        self.table = (torch.empty(0), torch.empty(0))
        """(cos, sin) [T, head_dim]. Replaced as one: threads share it."""

    def __call__(self, position_U: Tensor) -> tuple[Tensor, Tensor]:
        if not position_U.is_cpu or not len(position_U):
            return rope(self.rotary, position_U)
        cos_TD, sin_TD = self.until(int(position_U.max()) + 1)
        return cos_TD.index_select(0, position_U), sin_TD.index_select(0, position_U)

    def until(self, positions: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) [T, head_dim], T at least `positions`, on a CPU."""
        table = self.table
        if positions > (known := len(table[0])):
            new = rope(self.rotary, torch.arange(known, rope_positions(positions), device="cpu"))
            table = (torch.cat((table[0], new[0])), torch.cat((table[1], new[1]))) if known else new
            self.table = table
        return table


def layer_of(layer: Any, number: int, *, ops: Ops, family: Family, config: Any) -> _Layer:
    attention = layer.self_attn
    window = getattr(attention, "sliding_window", None)
    if config.model_type == "mistral":
        window = config.sliding_window
    sparse = hasattr(layer.mlp, "experts")
    feed_forward = partial(_mixture, number=number) if sparse else _dense
    return _Layer(
        number=number,
        module=layer,
        norm_in=layer.input_layernorm,
        norm_mid=layer.post_attention_layernorm,
        q=attention.q_proj,
        k=attention.k_proj,
        v=attention.v_proj,
        o=attention.o_proj,
        q_norm=getattr(attention, "q_norm", None),
        k_norm=getattr(attention, "k_norm", None),
        feed_forward=partial(feed_forward, layer.mlp, act=family.act, ops=ops),
        plain=None if sparse else _plain(layer),
        eps=config.rms_norm_eps,
        offset=family.offset,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        window=window,
    )


def _plain(layer: Any) -> tuple[Any, ...] | None:
    """See `_Layer.plain`."""
    attention, mlp = layer.self_attn, layer.mlp
    into = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    after = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if any(type(project) is not nn.Linear for project in (*into, *after)):
        return None
    return layer.input_layernorm, *into, layer.post_attention_layernorm, *after


def one_layer(
    layer: _Layer,
    delta_UD: Tensor | None,
    h_UD: Tensor,
    *,
    ops: Ops,
    attend: Attend,
    route: Route | None,
    cos_UD: Tensor,
    sin_UD: Tensor,
) -> tuple[Tensor, Tensor]:
    """One layer. Takes and returns (what the last block adds, residual): each addition joins a norm."""
    eps, offset = layer.eps, layer.offset
    known = attend.known if isinstance(attend, PackedAttention) else None
    own = partial(_projected, known, layer.number)
    if delta_UD is None:
        x_UD = ops.rms_norm(h_UD, layer.norm_in.weight, eps, offset=offset)
    else:
        x_UD, h_UD = ops.add_rms_norm(delta_UD, h_UD, layer.norm_in.weight, eps=eps, offset=offset)
    q_UHD, k_UKD = (
        ops.norm_rope(
            _heads(own, kind, project, x_UD, layer.head_dim),
            None if norm is None else norm.weight,
            eps,
            cos_ND=cos_UD,
            sin_ND=sin_UD,
        )
        for kind, project, norm in (
            (LayerOutput.Q, layer.q, layer.q_norm),
            (LayerOutput.K, layer.k, layer.k_norm),
        )
    )
    v_UKD = _heads(own, LayerOutput.V, layer.v, x_UD, layer.head_dim)
    sinks_H = getattr(layer.module.self_attn, "sinks", None)
    how = Weighing(scale=layer.scale, window=layer.window, softcap=None, sinks=sinks_H)
    seen_UHD = attend(layer.number, q_UHD, k_UKD, v_UKD, **how)
    delta_UD = own(LayerOutput.O, layer.o, seen_UHD.flatten(1))
    x_UD, h_UD = ops.add_rms_norm(delta_UD, h_UD, layer.norm_mid.weight, eps=eps, offset=offset)
    return layer.feed_forward(x_UD, route, own), h_UD


@dataclass(frozen=True)
class PlainModel:
    """A decoder whose layers have plain matrices and no more. Its parameters are read on every call."""

    base: Any
    """The module with the embedding, the layers and the last norm."""
    layers: list[_Layer]
    rotary: RopeTable
    act: Act

    @property
    def numbers(self) -> LayerNumbers:
        first = self.layers[0]
        return LayerNumbers(first.head_dim, first.scale, first.eps, first.offset, self.act)

    @property
    def windows(self) -> list[int]:
        return [layer.window or 0 for layer in self.layers]

    def weights(self) -> list[LayerWeights] | None:
        """None where a layer is not in its place, or in part on other ranks."""
        modules = self.base.layers
        if any(modules[x.number] is not x.module or is_sharded(x.module) for x in self.layers):
            return None
        return [_weights(layer) for layer in self.layers]


def _over_cache(
    model: PlainModel, h_UD: Tensor, attend: Attend, cos_UD: Tensor, sin_UD: Tensor, ops: Ops
) -> tuple[Tensor, Tensor] | None:
    """All layers at once, without gradient: `one_layer` after `one_layer`. None where the operations do not have it."""
    if ops.cached_layers is None or not isinstance(attend, CachedAttention) or torch.is_grad_enabled():
        return None
    if (weights := model.weights()) is None:
        return None
    done = ops.cached_layers(
        weights, model.windows, model.numbers, h_UD, tokens=attend.tokens, cos_ND=cos_UD, sin_ND=sin_UD
    )
    attend.written = done is not None and attend.kept is not None
    return done


def _weights(layer: _Layer) -> LayerWeights:
    assert layer.plain is not None
    norms = (None if norm is None else _weight(norm) for norm in (layer.q_norm, layer.k_norm))
    biases = (module._parameters["bias"] for module in layer.plain if isinstance(module, nn.Linear))
    return LayerWeights(*map(_weight, layer.plain), *norms, *biases)


def _weight(module: nn.Module) -> Tensor:
    """`module.weight`, past `Module.__getattr__`, which takes 2 % of a small model's decode step. With 8 bits it is no
    parameter."""
    found = module._parameters.get("weight")
    return found if found is not None else module.weight  # type: ignore[return-value]


Linear = nn.Linear | LoraLinear
Project = Callable[[LayerOutput, Linear, Tensor], Tensor]
"""A projection of a layer: which one, its module, its input."""


def _projected(
    known: KnownOutputs | None, number: int, kind: LayerOutput, layer: Linear, x: Tensor
) -> Tensor:
    """See `Project`; of the layer of this number."""
    if isinstance(layer, LoraLinear):
        return layer.forward(x)
    if known is None:
        return linear(x, layer.weight, layer.bias)
    y = linear(x, layer.weight, layer.bias, known=known.given(number, kind))
    known.note(number, kind, y)
    return y


def _heads(own: Project, kind: LayerOutput, layer: Linear, x_UD: Tensor, head_dim: int) -> Tensor:
    return own(kind, layer, x_UD).view(len(x_UD), layer.out_features // head_dim, head_dim)


def _dense(mlp: Any, x_UD: Tensor, route: Route | None, own: Project, *, act: Act, ops: Ops) -> Tensor:
    gate_UF, up_UF = own(LayerOutput.GATE, mlp.gate_proj, x_UD), own(LayerOutput.UP, mlp.up_proj, x_UD)
    return own(LayerOutput.DOWN, mlp.down_proj, ops.glu(gate_UF, up_UF, act=act))


def _mixture(
    block: Any,
    x_UD: Tensor,
    route: Route | None,
    own: Project,
    *,
    number: int,
    act: Act,
    ops: Ops,
) -> Tensor:
    """Mixture of experts: softmax over all experts, the top E of each token, one matrix product per expert.

    Tokens are sorted by expert; E copies of a token are weighed and added in the router's order, row by row,
    so a token's result does not depend on the other tokens of the batch.
    """
    router, experts = gate_of(block), block.experts
    logits_UX = linear(x_UD, router.weight, getattr(router, "bias", None))
    probability_UX = torch.softmax(logits_UX, dim=-1, dtype=torch.float32)
    weight_UE, expert_UE = probability_UX.topk(router.top_k, dim=-1)
    note(router, logits_UX, probability_UX, expert_UE)  # its own choice, whatever the route
    if route is not None:
        expert_UE = route(number, expert_UE)
        weight_UE = probability_UX.gather(1, expert_UE)
    # gpt-oss, which has no such switch: the softmax of the E logits alone, which is the same
    if getattr(router, "norm_topk_prob", True):
        weight_UE = weight_UE / weight_UE.sum(-1, keepdim=True)
    order_T, count_X = by_expert(expert_UE, router.num_experts)
    sorted_TD = F.embedding(order_T // router.top_k, x_UD)

    def glu(wide: Tensor) -> Tensor:
        return ops.glu(*gate_and_up(experts, wide), act=act)

    made_TD = computed(experts, sorted_TD, count_X.tolist(), glu=glu)
    return weighed(made_TD, order_T, weight_UE)
