"""Layers of multi-token prediction (MTP): layer k predicts, at each token, the one after the next k tokens.

DeepSeek-V3, arXiv:2412.19437, section 2.2. Layer k joins the norm of the embedding of the k-th next token and the norm
of the hidden state of the layer before (of layer 1: the decoder's, after its last norm) by a projection; a decoder
layer of the model's own kind and a norm follow. Embedding and output layer are the model's. Layer k + 1 reads the state
after that norm, as in Megatron-LM and transformers.

The layers stand in the model under the names that checkpoints of its family have, so whatever goes by names
(optimizers, checkpoints, weight syncs, exports) has them too. A decoder's own forward computes `num_hidden_layers`
layers and never sees them; `mtp_forward` computes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from whet import seeds
from whet.config.mtp import COPIES, COUNT, is_mtp, mtp_of, names_of
from whet.config.schema import ModelConfig
from whet.config.sizes import MOST_LAYERS, Head, heads
from whet.inputs import read_json_object
from whet.types import CheckpointError, ConfigError


@dataclass(frozen=True)
class Names:
    """How a family's checkpoints name what a layer has beside its decoder layer."""

    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    project: str = "eh_proj"
    norm: str = "shared_head.norm"
    hidden_first: bool = False
    """The projection takes the hidden state before the embedding."""
    apart: str | None = None
    """The decoder's list that has the layers. None: they follow its own layers, in the same list, and checkpoints have
    copies of embedding and output layer beside each."""


DEEPSEEK = Names()
"""DeepSeek-V3 and GLM-4.5, and families that no published checkpoint with such layers belongs to."""
MIMO = Names(
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    project="input_proj",
    norm="final_layernorm",
    hidden_first=True,
    apart="mtp_layers",
)
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma", "glm4_moe"), DEEPSEEK),
    "mimo": MIMO,
}
"""Models that can have such layers, by the `model_type` of their config.json."""
SERVED = ("glm4_moe", "mimo")
"""Those of them whose layers vLLM and SGLang know: for others a tensor of such a layer is an error."""


@dataclass(frozen=True)
class MtpLoss:
    """What the layers learn."""

    coef: float
    detach: Literal["nothing", "head", "model"]
    """What does not learn from it beside these layers: nothing, the output layer, or all of the model."""
    distill: bool
    """The policy's distribution at every token, in place of the tokens that the policy learns from."""
    top_k: int | None = None
    """Of that distribution the likeliest tokens alone. None: all."""

    @staticmethod
    def of(model: ModelConfig) -> MtpLoss | None:
        """What a config says; None: its model has no such layers."""
        if (made := mtp_of(model)) is None:
            return None
        said = made.settings
        return MtpLoss(said["coef"], said.get("detach", "model"), made.name == "distill", said.get("top_k"))


@dataclass(frozen=True, eq=False)
class MtpLayer:
    """One layer, by reference: its parameters are read on every call."""

    module: nn.Module
    """The decoder layer; the other modules are inside it."""
    names: Names

    @property
    def embedding_norm(self) -> Any:
        return self.module.get_submodule(self.names.embedding_norm)

    @property
    def hidden_norm(self) -> Any:
        return self.module.get_submodule(self.names.hidden_norm)

    @property
    def project(self) -> Any:
        return self.module.get_submodule(self.names.project)

    @property
    def norm(self) -> Any:
        return self.module.get_submodule(self.names.norm)


def layers_of(model: PreTrainedModel) -> tuple[MtpLayer, ...]:
    """The layers of a model, the nearest first; of most models none."""
    config = model.config.get_text_config()
    names = FAMILIES.get(config.model_type)
    if names is None:
        return ()
    base: Any = model.get_decoder()
    modules = (
        base.layers[config.num_hidden_layers :] if names.apart is None else getattr(base, names.apart, ())
    )
    return tuple(MtpLayer(module, names) for module in modules)


def attach(model: PreTrainedModel, count: int, *, seed: int) -> None:
    """Give a model so many layers with random weights, which depend on `seed` alone. Decoder layers that follow its own
    in the list already (a checkpoint was read with them) are kept, and get what they lack.

    Errors: ConfigError for a family of models whose layers are not known.
    """
    config = model.config.get_text_config()
    base: Any = model.get_decoder()
    names = FAMILIES.get(config.model_type)
    if names is None:
        raise ConfigError(
            f"model.mtp: layers of {config.model_type} are not supported; families that are: {', '.join(FAMILIES)}"
        )
    if names.apart is not None:
        setattr(base, names.apart, nn.ModuleList())
    into = base.layers if names.apart is None else getattr(base, names.apart)
    before = config.num_hidden_layers if names.apart is None else 0
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seeds.key(seed, "mtp"))
        for number in range(before, before + count):
            if number == len(into):
                # its place in the decoder decides what kind of layer it is: the last one's kind
                decoder_layer = type(base.layers[0])(config, config.num_hidden_layers - 1)
                into.append(_initialised(model, decoder_layer))
            _complete(model, into[number], names, norm=type(base.norm))
    setattr(config, COUNT, count)


def _complete(model: PreTrainedModel, layer: nn.Module, names: Names, *, norm: type[nn.Module]) -> None:
    """Put into a decoder layer what only a layer of multi-token prediction has."""
    config = model.config.get_text_config()
    width = config.hidden_size
    made = {
        name: norm(width, eps=config.rms_norm_eps)
        for name in (names.embedding_norm, names.hidden_norm, names.norm)
    } | {names.project: nn.Linear(2 * width, width, bias=False)}
    for name, module in made.items():
        above, _, own = name.rpartition(".")
        if above:
            layer.add_module(above, nn.ModuleDict({own: _initialised(model, module)}))
        else:
            layer.add_module(own, _initialised(model, module))


def _initialised(model: PreTrainedModel, module: nn.Module) -> nn.Module:
    """With first values as the model's own modules have, drawn in float32, in its dtype and on its device."""
    module.apply(model._init_weights)
    for tensor in module.parameters():
        tensor.data = tensor.data.to(model.device, model.dtype)
    return module.eval()


def remove(model: PreTrainedModel) -> None:
    """Take its layers from a model, if it has any."""
    config = model.config.get_text_config()
    base: Any = model.get_decoder()
    for names in {layer.names for layer in layers_of(model)}:
        if names.apart is None:
            base.layers = base.layers[: config.num_hidden_layers]
        else:
            delattr(base, names.apart)
        setattr(config, COUNT, 0)


# ---------------------------------------------------------------- checkpoints


def lengthen(config: PreTrainedConfig, count: int) -> None:
    """Let a config say of so many layers of multi-token prediction that they are decoder layers: then transformers
    reads their decoder layers with the others, stacks of experts too. Below 0: take that back. No change of families
    that have them in a list of their own."""
    sizes = config.get_text_config()
    if count == 0 or FAMILIES.get(sizes.model_type, DEEPSEEK).apart is not None:
        return
    sizes.num_hidden_layers += count
    if kinds := getattr(sizes, "layer_types", None):
        sizes.layer_types = [*kinds, *kinds[-1:] * count][: sizes.num_hidden_layers]


@contextmanager
def counting(model: PreTrainedModel, count: int) -> Iterator[None]:
    """Inside it the model's config says that it has so many layers of multi-token prediction."""
    config = model.config.get_text_config()
    before = getattr(config, COUNT, None)
    if count:
        setattr(config, COUNT, count)
    try:
        yield
    finally:
        if count:
            setattr(config, COUNT, before or 0)


def counted(files: Sequence[Head], layers: int) -> int:
    """How many such layers a folder's files have, whatever its config.json says. layers: those of the decoder."""
    found = [re.search(r"layers\.(\d+)\.", name) for name in _places(files, layers)]
    return len({match[1] for match in found if match is not None})


@torch.no_grad()
def fill(model: PreTrainedModel, folder: Path) -> None:
    """Read the layers from a folder's files. Stacks of experts have other names there: they were read with the decoder.
    Errors: CheckpointError where a tensor is not there, or not of its shape."""
    layers = model.config.get_text_config().num_hidden_layers
    named = {name: p for name, p in model.named_parameters() if is_mtp(name, layers)}
    found = {name: tensor for name, tensor in _tensors(heads(folder), layers) if name in named}
    lacks = sorted(name for name in named.keys() - found.keys() if ".experts." not in name)
    odd = sorted(name for name, tensor in found.items() if tensor.shape != named[name].shape)
    if lacks or odd:
        said = f"{lacks[0]} is missing" if lacks else f"{odd[0]} has the shape {list(found[odd[0]].shape)}"
        raise CheckpointError(
            f"model.path={folder}: {said}: its layers of multi-token prediction are not those of this model; leave out "
            "model.mtp to train without them"
        )
    for name, tensor in found.items():
        named[name].copy_(tensor)


def beside(model: PreTrainedModel, folder: Path | None) -> tuple[dict[str, Tensor], int]:
    """(what an export has beside the tensors of a model, how many layers its config.json then says; 0: nothing new).

    Copies of embedding and output layer, where checkpoints of the family have them; and, of a model without such
    layers, those of the folder that it was read from, unchanged.
    """
    own = layers_of(model)
    if own or folder is None or not (folder / "config.json").is_file():
        return _copies(model, len(own)), len(own)
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", MOST_LAYERS)
    files = heads(folder)
    found = dict(_tensors(files, layers))
    fresh = _copies(model, counted(files, layers))
    said = read_json_object(folder / "config.json", CheckpointError).get(COUNT) if found else 0
    return found | {n: x for n, x in fresh.items() if n in found}, said if type(said) is int else 0


def unserved(model: PreTrainedModel) -> frozenset[str]:
    """Names of parameters that a server of the model does not take."""
    config = model.config.get_text_config()
    if config.model_type in SERVED or not layers_of(model):
        return frozenset()
    return frozenset(name for name, _ in model.named_parameters() if is_mtp(name, config.num_hidden_layers))


def _copies(model: PreTrainedModel, count: int) -> dict[str, Tensor]:
    config = model.config.get_text_config()
    names = FAMILIES.get(config.model_type, DEEPSEEK)
    if names.apart is not None:
        return {}
    shared = (model.get_input_embeddings(), model.get_output_embeddings())
    return {
        f"model.layers.{config.num_hidden_layers + number}.{name}.weight": module.weight.detach().clone()
        for number in range(count)
        for name, module in zip(COPIES, shared)
    }


def _places(files: Sequence[Head], layers: int) -> dict[str, Path]:
    """By name, the files of a folder's tensors of multi-token prediction."""
    every = {name: head.file for head in files for name in head.tensors}
    return {name: every[name] for name in sorted(names_of(every, layers))}


def _tensors(files: Sequence[Head], layers: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors of multi-token prediction in a folder's files."""
    places = _places(files, layers)
    for path in sorted(set(places.values())):
        with safe_open(path, framework="pt") as file:
            yield from ((name, file.get_tensor(name)) for name, at in places.items() if at == path)
