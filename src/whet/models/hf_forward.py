"""Every other Hugging Face causal language model: its own modules around whet's attention.

transformers' attention interface hands each layer's queries, keys and values to `attention.hf_attention`, which passes
them to the plan. Nothing is assumed: a probe compares with the model's own forward first.

Shape letters: U tokens to compute, V vocabulary, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from whet.guard import pulse
from whet.models.attention import Attend, PackedAttention, register_hf_attention
from whet.models.experts import mixed
from whet.models.float8 import recomputed
from whet.models.fused_forward import STATIC_ROPE, rope_type
from whet.models.kernels import Ops
from whet.models.logprobs import OutputHead, logits
from whet.models.products import Everywhere
from whet.models.router import watching
from whet.models.routing import Route, asking, layer_number
from whet.models.segments import Segments
from whet.models.torch_ops import Weighing
from whet.types import ConfigError

_LONGEST_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the longest sequence of a call."""


def modules(model: PreTrainedModel, config: Any, *, compile: bool = False) -> Callable[..., Tensor]:
    """The `Hidden` function (see `forward`) of any model. Sets the model to whet's attention. compile: its layers."""
    if changing := [kind for kind in _rope_types(config) if kind in _LONGEST_DEPENDENT]:
        raise ConfigError(
            f"{type(model).__name__}: rope_type '{changing[0]}' depends on the longest sequence of a "
            "call, so packed and decoded log-probs would differ; override rope_parameters with one of "
            f"{', '.join(STATIC_ROPE)}"
        )
    if getattr(config, "attention_chunk_size", None):
        raise ConfigError(
            f"{type(model).__name__}: chunked attention (attention_chunk_size) is not supported"
        )
    register_hf_attention()
    model.set_attn_implementation("whet")
    if model.device.type == "cpu":
        register_hf_experts()
        model.set_experts_implementation("whet")
    base = model.get_decoder()
    products = nullcontext if compile else Everywhere
    blocks = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
    forwards = [_compiled(block.forward) if compile else block.forward for block in blocks]

    def hidden(
        token_ids_U: Tensor,
        position_U: Tensor,
        attend: Attend,
        *,
        checkpoint: bool = False,
        route: Route | None = None,
    ) -> Tensor:
        nothing = len(token_ids_U) == 0
        # modules cannot compute that, and other ranks may wait for this one in the middle of them
        if nothing:
            token_ids_U, position_U = (
                token_ids_U.new_zeros(1, *token_ids_U.shape[1:]),
                position_U.new_zeros(1),
            )
            attend, route = Nobody(attend), None
        run = forwards
        if route is not None:
            run = [asking(f, route, layer_number(block)) for f, block in zip(run, blocks)]
        if checkpoint:
            run = [recomputed_in(f, products) for f in run]
        with _in_place(blocks, run), products(), watching() if nothing else nullcontext():
            out = base(
                # a later part of a pipeline begins with the hidden states of the part before
                **{"inputs_embeds" if token_ids_U.is_floating_point() else "input_ids": token_ids_U[None]},
                position_ids=position_U[None],
                attention_mask=None,
                use_cache=False,
                plan=attend,
            )
        states_UD: Tensor = out.last_hidden_state[0]
        return states_UD[:0] if nothing else states_UD

    return hidden


def _rope_types(config: Any) -> list[str]:
    """The kinds of rotary embedding: of the whole model, or of each type of layer that has its own."""
    parameters = getattr(config, "rope_parameters", None) or {}
    apart = [each for each in parameters.values() if isinstance(each, dict)]
    return [each.get("rope_type", "default") for each in apart] or [rope_type(config)]


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    run = torch.compile(forward, dynamic=True)

    def heard(*arguments: Any, **named: Any) -> Any:
        pulse.beat("the layers")  # the first time takes long
        return run(*arguments, **named)

    return heard


@dataclass(frozen=True)
class Nobody:
    """Attention of no tokens at all, called with one that nobody asked for."""

    inner: Attend

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, **how: Unpack[Weighing]
    ) -> Tensor:
        out_NHD = self.inner(layer, q_NHD[:0], k_NKD[:0], v_NKD[:0], **how)
        return torch.cat((out_NHD, q_NHD.new_zeros(1, *out_NHD.shape[1:])))


def recomputed_in(
    forward: Callable[..., Any], products: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    """`recomputed` within these products. (transformers' own switch needs train(), hence dropout.)"""

    def run(*args: Any, **kwargs: Any) -> Any:
        with products():  # the second time nothing else is around it
            return forward(*args, **kwargs)

    return recomputed(run)


@contextmanager
def _in_place(blocks: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Let these modules compute by other functions while it lasts: others share them."""
    before = [vars(block).get("forward") for block in blocks]
    for block, forward in zip(blocks, forwards):
        block.forward = forward
    try:
        yield
    finally:
        for block, own in zip(blocks, before):
            if own is None:
                del block.forward
            else:
                block.forward = own


def register_hf_experts() -> None:
    """Makes `experts_implementation="whet"` known to transformers; safe to call again."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("whet", mixed)


@torch.no_grad()
def probe(
    model: PreTrainedModel, hidden: Callable[..., Tensor], *, head: OutputHead, ops: Ops
) -> tuple[int, int, int]:
    """(layers, kv_heads, head_dim) as seen in use; two packed sequences must give the model's own logits.

    Catches whatever an unknown architecture may do beside attention (state-space layers,
    position biases, scaled logits) instead of training something else silently.
    """
    device = head.linear.weight.device
    lengths = (23, 9)
    ids_U = torch.arange(7, 7 + sum(lengths), device=device) % head.size
    segments = Segments.of_lengths(torch.tensor(lengths))
    attend = _Recorder(PackedAttention(segments, ops))
    own_experts = model.config._experts_implementation
    try:
        ours_UV = logits(head, hidden(ids_U, segments.position_N.to(device), attend), 1.0)
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")
        theirs_UV = torch.cat(
            [model(input_ids=part[None], use_cache=False).logits[0] for part in ids_U.split(lengths)]
        )
    except (torch.OutOfMemoryError, ConfigError):
        raise
    except Exception as error:  # foreign code with a foreign config: it can fail in any way
        raise ConfigError(
            f"{type(model).__name__} cannot compute the logits of two short sequences: {type(error).__name__}: "
            f"{error}. Check the settings of its config.json"
        ) from error
    model.set_attn_implementation("whet")
    model.set_experts_implementation(own_experts)
    apart_U = (ours_UV - theirs_UV.float()).abs().amax(1) / theirs_UV.float().std().clamp(min=1e-6)
    # in half precision routers choose other experts where two are about as good, of some tokens
    whole = head.linear.weight.dtype == torch.float32
    off, allowed = float(apart_U.quantile(1.0 if whole else 0.75)), 1e-3 if whole else 0.2
    if not off <= allowed or len(attend.shapes) != 1:
        raise ConfigError(
            f"{type(model).__name__} cannot be packed: its logits differ from its own forward by {off:.2g} "
            f"standard deviations (allowed {allowed:g}), its keys have shapes {sorted(attend.shapes)}. "
            "It uses a feature that packed attention does not support; choose a decoder-only model with causal "
            "softmax attention"
        )
    _check_window(model, attend.windows)
    return max(attend.seen) + 1, *attend.shapes.pop()


def _check_window(model: PreTrainedModel, told: set[int | None]) -> None:
    """ConfigError where a window is in the model's masks alone, which attention here does not read: sequences as short
    as those of the probe never reach it."""
    config = model.config.get_text_config()
    window, longest = (
        getattr(config, name, None) or 0 for name in ("sliding_window", "max_position_embeddings")
    )
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if 0 < window < (longest or math.inf) and "sliding_attention" in kinds and told == {None}:
        raise ConfigError(
            f"{type(model).__name__} cannot be packed: its layers do not say that they attend to the last "
            f"sliding_window={window} tokens alone; override sliding_window with null, so that they attend to all"
        )


class _Recorder:
    """Attention that notes what it was called with."""

    def __init__(self, inner: Attend) -> None:
        self.inner = inner
        self.seen: set[int] = set()
        self.shapes: set[tuple[int, int]] = set()
        self.windows: set[int | None] = set()

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, **how: Unpack[Weighing]
    ) -> Tensor:
        if k_NKD.shape != v_NKD.shape:
            raise ConfigError(
                f"layer {layer} has keys of size {k_NKD.shape[-1]} and values of size {v_NKD.shape[-1]}: "
                "multi-head latent attention is not supported"
            )
        if layer in self.seen:
            raise ConfigError(
                f"the model cannot be sampled: layer {layer} attends more than once to a token, but a cache has room "
                "for the keys of one time; choose a model whose layers attend once"
            )
        self.seen.add(layer)
        self.shapes.add((k_NKD.shape[1], k_NKD.shape[2]))
        self.windows.add(how["window"])
        return self.inner(layer, q_NHD, k_NKD, v_NKD, **how)
