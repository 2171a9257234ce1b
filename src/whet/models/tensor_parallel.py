"""Tensor parallelism: every matrix of a layer is cut over the ranks, in the manner of Megatron-LM (arXiv:1909.08053).

Queries, keys, values, gate and up keep some of their rows (whole heads), output and down the columns that fit, so a
block (attention, feed-forward) computes a part of its result and the ranks' parts are summed. Hooks do that around
the module's own forward: the input is `copied`, the output `summed`. Hidden states and the norms between blocks are
alike on all ranks. What is inside a block and not cut (head norms, router, one side of an adapter) gets a part of its
gradient on every rank: `partial`, to be summed before the optimizer. The vocabulary of embedding and output layer is
cut, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.models.collectives import Peers, SplitDim, copied, summed
from whet.models.lora import adapted
from whet.models.lora_layers import LoraLinear, LoraStack
from whet.models.vocabulary import Vocabulary, VocabularyEmbedding, VocabularyHead
from whet.types import ConfigError

BLOCKS = ("self_attn", "mlp")
"""Parts of a decoder layer whose inputs are copied and whose outputs are summed."""
_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_COLUMNS = ("o_proj", "down_proj")
_EXPERTS = {"gate_up_proj": (1, 2), "down_proj": (2, 1)}
"""Stacked experts [X, rows, columns]: dim that is cut, matrices in it."""
_REPLICATED = ("gate", "shared_expert_gate")
"""Modules inside a block that every rank has whole."""
_HEAD_NORMS = ("q_norm", "k_norm")
"""Those too, if they norm each head by itself."""


@dataclass(frozen=True)
class Parts:
    """What a step of making a model parallel did to its parameters."""

    cuts: dict[str, SplitDim] = field(default_factory=dict)
    """How parameters were cut, by name."""
    partial: frozenset[str] = frozenset()
    """Those that are not cut and get a part of their gradient on every rank: sum it over the ranks."""


def apply(model: PreTrainedModel, peers: Peers) -> Parts:
    """Cut the model in place: parameters keep their names and become this rank's part. Put adapters in before.

    Errors: ConfigError where heads or widths do not divide, or a block has a part that is not known.
    """
    if peers.size == 1:
        return Parts()
    _check(model, peers)
    cuts: dict[str, SplitDim] = {}
    partial: set[str] = set()
    for block_name, block in _blocks(model):
        inside = dict(_cuts(block, block_name, peers))
        partial |= {f"{block_name}.{name}" for name, _ in block.named_parameters()} - inside.keys()
        cuts |= inside
        block.register_forward_pre_hook(_copy_input(peers), with_kwargs=True)
        block.register_forward_hook(_sum_output(peers))
    cuts |= _vocabulary(model, peers)
    named = dict(model.named_parameters())
    for name, cut in cuts.items():
        if name in named:
            named[name].data = cut.part(named[name].data)
    _sizes(model, peers)
    return Parts({name: cut for name, cut in cuts.items() if name in named}, frozenset(partial))


def _check(model: PreTrainedModel, peers: Peers) -> None:
    config = model.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    sizes = [("attention heads", config.num_attention_heads), ("key/value heads", kv_heads)]
    for name in ("intermediate_size", "moe_intermediate_size"):
        size = getattr(config, name, None) or []  # hunyuan_v1_moe: a list, one of each layer
        sizes += [(name, n) for n in (size if isinstance(size, list) else [size])]
    for what, size in sizes:
        if size % peers.size:
            raise ConfigError(
                f"train.parallel.tp={peers.size} does not divide the {size} {what}; every rank needs the same number: "
                "choose another tp (cp also spreads attention, and repeats key/value heads where it has to)"
            )


def _blocks(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The blocks of all layers that this rank has, by name."""
    blocks = [(n, m) for n, m in model.named_modules() if n.rpartition(".")[2] in BLOCKS]
    if not blocks:
        raise ConfigError(
            f"{type(model).__name__}: tensor parallelism supports layers made of {' and '.join(BLOCKS)}; "
            "set train.parallel.tp=1"
        )
    yield from blocks


def _cuts(block: nn.Module, block_name: str, peers: Peers) -> Iterator[tuple[str, SplitDim]]:
    """How the parameters of a block are cut. Those that every rank has whole are left out."""
    for name, module in block.named_modules():
        own = dict(module.named_parameters(recurse=False))
        at, ending = f"{block_name}.{name}".rstrip("."), name.rpartition(".")[2]
        if not own or ending in _REPLICATED:
            continue
        if ending in _HEAD_NORMS and all(p.shape == (block.head_dim,) for p in own.values()):
            continue
        if ending == "experts" and own.keys() == _EXPERTS.keys():
            yield from ((f"{at}.{p}", SplitDim(dim, peers, n)) for p, (dim, n) in _EXPERTS.items())
        elif isinstance(module, LoraStack):  # B has the rows of the stack, A its columns
            dim, n = _EXPERTS[ending]
            cut = "lora_B" if dim == 1 else "lora_A"
            yield f"{at}.{cut}", SplitDim(own[cut].ndim - 3 + dim, peers, n)
        elif ending in _ROWS:
            yield from ((f"{at}.{p}", SplitDim(0, peers)) for p in own if p != "lora_A")
        elif ending in _COLUMNS and "bias" not in own:
            yield from ((f"{at}.{p}", SplitDim(1, peers)) for p in own if p != "lora_B")
        else:
            raise ConfigError(
                f"tensor parallelism cannot partition {at} ({', '.join(own)}); set train.parallel.tp=1"
            )


def _vocabulary(model: PreTrainedModel, peers: Peers) -> dict[str, SplitDim]:
    """Exchange embedding and output layer, as far as this rank has them, for parts of a vocabulary."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    cuts: dict[str, SplitDim] = {}
    if isinstance(embedding, nn.Embedding):
        new = VocabularyEmbedding(embedding, Vocabulary(len(embedding.weight), peers))
        cuts |= _exchange(model, embedding, new, peers)
    if isinstance(head, nn.Linear):
        cuts |= _exchange(model, head, VocabularyHead(head, Vocabulary(len(head.weight), peers)), peers)
    return cuts


def _exchange(model: nn.Module, old: nn.Module, new: nn.Module, peers: Peers) -> dict[str, SplitDim]:
    name = next(n for n, m in model.named_modules() if m is old)
    model.set_submodule(name, new)
    return {f"{name}.{p}": SplitDim(0, peers) for p, _ in new.named_parameters()}


def _sizes(model: PreTrainedModel, peers: Peers) -> None:
    """Let layers say how large they are now, and adapters which columns they have."""
    for module in model.modules():
        if isinstance(module, nn.Linear | LoraLinear | VocabularyHead):
            module.out_features = module.weight.shape[0]
            if isinstance(module, LoraLinear):
                module.first = (
                    peers.span(module.in_features).start if module.weight.shape[1] < module.in_features else 0
                )
            module.in_features = module.weight.shape[1]
    for layer in adapted(model).values():
        layer.effective = None
        layer.refresh()


def _copy_input(peers: Peers) -> Any:
    def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (copied(args[0], peers), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": copied(kwargs["hidden_states"], peers)}

    return hook


def _sum_output(peers: Peers) -> Any:
    def hook(block: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        if isinstance(out, Tensor):
            return summed(out, peers)
        return (summed(out[0], peers), *out[1:])

    return hook
