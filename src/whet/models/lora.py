"""Low-rank adapters: W is replaced by W + s B A, and only A and B are trained (LoRA, arXiv:2106.09685).

An adapted layer keeps that sum beside its own weight, and all code that computes with the layer reads it: the trainer's
forward, the rollout engine, the export. So sampled log-probs equal the trainer's bit for bit, and sampling costs the
same as without adapters. The price is a second copy of the adapted weights, from the first optimizer step on. The
backward pass goes through A and B alone: the gradient of W is never formed.

peft decides which layers get adapters and how they are initialised, and its folder format is read and written. Adapters
are float32, whatever the model's dtype: steps of a usual learning rate are too small for bfloat16.

The matrices of experts lie in stacks, which are adapted as they are: a `LoraStack` beside each, in a module of our own.
Each expert has its A and B, or all experts of a layer share one.

With `fused`, layers that Megatron-LM computes as one (queries, keys and values; gate and up) have one A: the same
parameter in several layers. So the optimizer has it once, its gradient is a sum, and code that goes by a parameter's
identity (copies, ranks, checkpoints) needs to know nothing of it.

Shape letters: U rows, I in features, O out features, K rank.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet import seeds
from whet.config.learns import (
    STACKS,
    every_linear,
    fits,
    fused_as,
    inside_stack,
    is_stack,
    layer_targeted,
    pattern_of,
    ranks_of_stack,
    shares_experts,
    stack_rank,
)
from whet.config.schema import LoraConfig
from whet.inputs import check_regular, read_json_object
from whet.models.dropout import Noise
from whet.models.experts import Experts, is_turned
from whet.models.lora_layers import LoraLinear, LoraStack
from whet.track.files import RUN_DIR, atomic_folder
from whet.types import CheckpointError, ConfigError

_FILE = "adapter_model.safetensors"
_KEEPS_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""peft's `init_lora_weights` that leave the weights under the adapters as they are."""
_TAKES_FROM_BASE = ("pissa", "olora")
"""Those that take the beginning of the adapters from these weights, alike every time."""
_OTHER_SUMS = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "monteclora_config",
    "arrow_config",
    "alora_invocation_tokens",
    "layer_replication",
)
"""peft's settings with which adapters of the same names and shapes are no plain W + s B A of each layer and token."""
_READABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LEARNED = "whet_learned"
"""Where a model with adapters keeps the names of what may learn."""


# ---------------------------------------------------------------- put in


def attach(model: PreTrainedModel, cfg: LoraConfig, *, seed: int, key: str = "model.lora") -> None:
    """Add adapters to a model, in place. From then on only they, and `modules_to_save`, require gradients.

    Their initial values depend on `seed` only; `key` is the section's name, for errors. Errors: ConfigError where a
    name matches nothing, or a layer that cannot have an adapter; CheckpointError for a folder of other adapters.
    """
    # An extra of the package, and slow to import.
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    head = model.get_output_embeddings()
    stacks = _stacks(cfg, model, key)
    asked = _asked(cfg, model, stacks=stacks)
    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seeds.key(seed, "lora"))
        try:
            if asked.targets or not stacks:
                # peft gives the experts of a known family what is asked for layers of their old names, and so takes the
                # adapters of a dense layer of the same name: without a config it takes the layers that it is told
                parts = nn.Module()
                for name, child in model.named_children():
                    parts.add_module(name, child)
                inject_adapter_in_model(_peft(asked), parts)
                for name, child in parts.named_children():
                    model.add_module(name, child)
        except ValueError as error:
            raise ConfigError(f"{key}: {error} Linear layers of the model: {_linear_names(model)}") from error
        for name, module in [(n, m) for n, m in model.named_modules() if isinstance(m, LoraLayer)]:
            model.set_submodule(name, _own(name, module, head=head, dropout=cfg.dropout, key=key))
        if cfg.init == "xavier":  # peft has none
            for layer in adapted(model).values():
                nn.init.xavier_normal_(layer.lora_A)
        for name in stacks:
            _adapt_stack(model, name, cfg, key)
    _check_names(model, cfg, key)
    if cfg.fused:
        _fuse(model, key)
    for whole in _whole(model, cfg.modules_to_save).values():
        whole.requires_grad_(True)
    setattr(model, _LEARNED, frozenset(n for n, p in model.named_parameters() if p.requires_grad))
    if cfg.path is not None:
        _fill(model, Path(cfg.path).expanduser(), cfg, key=key)
    refresh(model)


def _asked(cfg: LoraConfig, model: PreTrainedModel, *, stacks: list[str]) -> LoraConfig:
    """What peft is asked for. Its own all-linear reaches for experts and routers, too, and so do the names of experts:
    then it is told the layers."""
    head = model.get_output_embeddings()
    linear = [name for name, m in model.named_modules() if type(m) is nn.Linear and m is not head]
    if stacks:
        chosen = tuple(name for name in linear if layer_targeted(name, cfg))
        return cfg.model_copy(update={"targets": chosen, "exclude_modules": ()})
    return cfg.model_copy(update={"targets": tuple(linear)}) if every_linear(cfg) else cfg


def _stacks(cfg: LoraConfig, model: PreTrainedModel, key: str) -> list[str]:
    """The stacks of experts that get adapters. Errors: ConfigError where they cannot have these."""
    found = [n for n, _ in model.named_parameters() if is_stack(n) and ranks_of_stack(n, cfg, key)]
    if not found:
        if cfg.experts is not None:
            raise ConfigError(
                f"{key}.experts={cfg.experts}: no experts have adapters; leave it out, or name their matrices "
                f"(gate_up_proj, down_proj) in {key}.targets"
            )
        return found
    if cfg.dropout:
        raise ConfigError(
            f"{key}.dropout={cfg.dropout}: adapters of experts ({found[0]}) have no dropout, as in peft; set it to 0, "
            f"or remove the experts from {key}.targets"
        )
    if cfg.init not in ("default", "gaussian", "xavier", "random"):
        raise ConfigError(
            f"{key}.init={cfg.init}: adapters of experts ({found[0]}) begin by default, gaussian, xavier or random"
        )
    for module in {n.rpartition(".")[0] for n in found}:
        experts = model.get_submodule(module)
        own = {n for n, _ in experts.named_parameters()}
        if own != {"gate_up_proj", "down_proj"} or is_turned(experts):
            raise ConfigError(
                f"{key}.targets: {module} of {type(model).__name__} cannot have adapters; experts need two stacks, "
                "gate_up_proj and down_proj [experts, outputs, inputs]"
            )
    return found


def _adapt_stack(model: PreTrainedModel, name: str, cfg: LoraConfig, key: str) -> None:
    """Put adapters beside a stack, whose A and B begin as those of a layer."""
    at, _, ending = name.rpartition(".")
    experts = model.get_submodule(at)
    if not isinstance(experts, Experts):
        experts = Experts(experts)
        model.set_submodule(at, experts)
    weight_XOI = getattr(experts, ending)
    count, rows, columns = weight_XOI.shape
    rank, times = stack_rank(name, cfg), ranks_of_stack(name, cfg, key)
    alpha = times * (pattern_of(name, cfg.alpha_pattern) or cfg.alpha)
    many = () if shares_experts(cfg) else (count,)
    dtype = torch.promote_types(weight_XOI.dtype, torch.float32)
    a = torch.empty(*many, rank, columns, dtype=dtype, device=weight_XOI.device)
    b = torch.zeros(*many, rows, rank, dtype=dtype, device=weight_XOI.device)
    _BEGIN.get(cfg.init, _uniform)(a)
    if cfg.init == "random":
        _uniform(b)
    scale = alpha / (rank**0.5 if cfg.rslora else rank)
    experts.lora[ending] = LoraStack(experts, ending, a, b, scale=scale)


def _uniform(x: Tensor) -> None:
    """As the weight of a new nn.Linear (Kaiming), by the inputs of the last dim."""
    nn.init.uniform_(x, -(x.shape[-1] ** -0.5), x.shape[-1] ** -0.5)


_BEGIN: dict[str, Callable[[Tensor], Any]] = {
    "gaussian": lambda a: nn.init.normal_(a, std=1 / a.shape[-2]),
    "xavier": lambda a: nn.init.normal_(a, std=(2 / sum(a.shape[-2:])) ** 0.5),
}


def _linear_names(model: PreTrainedModel) -> str:
    """The last parts of the names of linear layers, for people."""
    return ", ".join(
        sorted({name.rpartition(".")[2] for name, m in model.named_modules() if type(m) is nn.Linear})
    )


def _peft(cfg: LoraConfig) -> Any:
    """The section as peft's own configuration."""
    from peft import LoraConfig

    init: Any = {"default": True, "xavier": True, "random": False}.get(cfg.init, cfg.init)
    return LoraConfig(
        r=cfg.rank,
        lora_alpha=cfg.alpha,  # type: ignore[arg-type]  # peft divides; any number does
        use_rslora=cfg.rslora,
        lora_dropout=cfg.dropout,
        target_modules=_as_list(cfg.targets),
        exclude_modules=_as_list(cfg.exclude_modules),
        rank_pattern=dict(cfg.rank_pattern),
        alpha_pattern=dict(cfg.alpha_pattern),
        init_lora_weights=init,
        task_type="CAUSAL_LM",
    )


def _as_list(names: str | tuple[str, ...]) -> str | list[str]:
    return names if isinstance(names, str) else list(names)


def _own(name: str, layer: Any, *, head: nn.Module | None, dropout: float, key: str) -> LoraLinear:
    """peft's layer as ours, with the same tensors."""
    linear = layer.base_layer
    if type(linear) is not nn.Linear or linear is head:
        raise ConfigError(
            f"{key}.targets: {name} cannot have an adapter; use linear layers other than the output layer, or "
            f"train the full module with {key}.modules_to_save"
        )
    dtype = torch.promote_types(linear.weight.dtype, torch.float32)
    a, b = (part["default"].weight.detach().to(dtype) for part in (layer.lora_A, layer.lora_B))
    return LoraLinear(linear, a, b, scale=float(layer.scaling["default"]), dropout=dropout)


def _fuse(model: PreTrainedModel, section: str) -> None:
    """Give layers that are fused the A of the first, and the features that it drops."""
    layers = {name: layer for name, layer in adapted(model).items() if isinstance(layer, LoraLinear)}
    firsts: dict[str, tuple[str, LoraLinear]] = {}
    for name, layer in layers.items():
        at, first = firsts.setdefault(fused_as(name), (name, layer))
        if layer.lora_A.shape != first.lora_A.shape:
            raise ConfigError(
                f"{section}.rank_pattern: {at} and {name} have different ranks, but with fused=true they have one A; "
                "give both the same, or set fused to false"
            )
        layer.lora_A, layer.drops_as = first.lora_A, at
    stacked = any(name.endswith(".gate_up_proj") for name in adapted(model))
    if len(firsts) == len(layers) and not stacked:
        raise ConfigError(
            f"{section}.fused: no two layers with adapters are fused (q_proj, k_proj and v_proj, or gate_proj and "
            "up_proj, of one block); set it to false"
        )


def _check_names(model: PreTrainedModel, cfg: LoraConfig, section: str) -> None:
    """Each pattern has to fit the end of a name (peft only warns), and each module has to be there."""
    for key, patterns in (("rank_pattern", cfg.rank_pattern), ("alpha_pattern", cfg.alpha_pattern)):
        for pattern in patterns:
            if not any(pattern_of(name, {pattern: True}) for name in adapted(model)):
                raise ConfigError(
                    f"{section}.{key}: no layer with an adapter has a name that ends with {pattern!r}"
                )
    linear = [n for n, m in model.named_modules() if type(m) is nn.Linear]
    stacks = [n for n, _ in model.named_parameters() if is_stack(n)]
    names = (*linear, *stacks, *(one for n in stacks for one in inside_stack(n)))
    for ending in () if isinstance(cfg.exclude_modules, str) else cfg.exclude_modules:
        if not any(fits(name, (ending,)) for name in names):
            raise ConfigError(f"{section}.exclude_modules: no linear layer's name ends with {ending!r}")
    for ending in cfg.modules_to_save:
        found = _whole(model, [ending]).values()
        if not any(True for m in found for _ in m.parameters()):
            raise ConfigError(f"{section}.modules_to_save: no module's name ends with {ending!r}")
        if any(adapted(m) for m in found):
            raise ConfigError(
                f"{section}.modules_to_save: {ending!r} has adapters, but a layer either has adapters or is "
                f"trained in full; remove it from this list or from {section}.targets"
            )


def _whole(model: PreTrainedModel, endings: Iterable[str]) -> dict[str, nn.Module]:
    """The modules that learn in full, by name. A tied embedding and output layer learn together: where one is named,
    the other is among them, for peft gives each module that learns weights of its own."""
    ends = tuple(f".{ending}" for ending in endings)
    named = {name for name, _ in model.named_modules() if f".{name}".endswith(ends)}
    learns = {id(p) for name in named for p in model.get_submodule(name).parameters()}
    tied = {
        name
        for name, module in model.named_modules()
        if module in (model.get_input_embeddings(), model.get_output_embeddings())
        and any(id(p) in learns for p in module.parameters())
    }
    return {name: module for name, module in model.named_modules() if name in named | tied}


def _fill(model: PreTrainedModel, folder: Path, cfg: LoraConfig, *, key: str) -> None:
    """Adapters and whole modules from a folder of peft's."""
    try:
        told = read_json_object(folder / "adapter_config.json", CheckpointError)
        check_regular(folder / _FILE, CheckpointError)
        found = load_file(folder / _FILE)
    except Exception as error:  # foreign code reading foreign files: it can fail in any way
        raise CheckpointError(f"{key}.path={folder}: cannot be read: {error}") from error
    ours = {
        "peft_type": "LORA",
        "r": cfg.rank,
        "lora_alpha": cfg.alpha,
        "use_rslora": cfg.rslora,
        "alpha_pattern": _patterns(model, cfg)["alpha_pattern"],
    }
    may_lack = {"peft_type": "LORA", "use_rslora": False, "alpha_pattern": {}}
    theirs = {name: told.get(name, may_lack.get(name)) for name in ours}
    if _resolved(theirs["alpha_pattern"], model, cfg.alpha) == ours["alpha_pattern"]:
        theirs["alpha_pattern"] = ours["alpha_pattern"]
    theirs |= {name: told[name] for name in _OTHER_SUMS if told.get(name)}
    if odd := {name: value for name, value in theirs.items() if name not in ours or value != ours[name]}:
        raise ConfigError(
            f"{key}.path={folder}: its adapters use {str(odd)[:200]}; set the same rank, alpha, rslora and "
            "alpha_pattern; adapter types other than plain LoRA cannot be read"
        )
    _check_base(told.get("init_lora_weights", True), cfg, folder, key)
    if odd_type := sorted(name for name, t in found.items() if t.dtype not in _READABLE):
        raise CheckpointError(
            f"{key}.path={folder}: {odd_type[0]} has dtype {found[odd_type[0]].dtype}, expected float16, bfloat16, "
            "float32 or float64"
        )
    own = {one.name: one for one in _as_peft(model, cfg)}
    shapes = {name: one.value().shape for name, one in own.items()}
    if wrong := sorted(n for n in found.keys() | own.keys() if _shape(found, n) != shapes.get(n)):
        raise CheckpointError(
            f"{key}.path={folder}: the adapters belong to other layers; they differ in {wrong[:3]} ({len(wrong)} "
            "tensors)"
        )
    firsts: dict[int, str] = {}
    for name, one in own.items():
        if not found[name].to(one.parameter).isfinite().all():
            raise CheckpointError(
                f"{key}.path={folder}: {name} has numbers that are not finite in {one.parameter.dtype}; these adapters "
                "are damaged, or were saved by a run that diverged"
            )
        first = firsts.setdefault(id(one.parameter), name)
        if not torch.equal(found[name], found[first]):
            why, how = (
                ("with fused=true they must be equal", "set fused to false")
                if name.endswith(".lora_A.weight")
                else (
                    "this model ties them (tie_word_embeddings)",
                    "merge the adapters into the model with peft, untied, and give that as model.path",
                )
            )
            raise CheckpointError(f"{key}.path={folder}: {name} differs from {first}, but {why}; {how}")
        one.put(found[name])
        if not torch.equal(one.value(), found[name].to(one.parameter)):
            raise CheckpointError(
                f"{key}.path={folder}: {name} differs between experts, but all experts of a layer have one adapter; "
                "set experts to each"
            )


def _check_base(began: object, cfg: LoraConfig, folder: Path, key: str) -> None:
    """Adapters that took a part of the weights under them with their beginning are those of what was left. ConfigError
    where this model's base would be another one. began: peft's `init_lora_weights`."""
    ours = _peft(cfg).init_lora_weights
    if began in _KEEPS_BASE and ours in _KEEPS_BASE:
        return
    if began in _TAKES_FROM_BASE and began == ours:
        return
    how = (
        f"set {key}.init to {began}"
        if began in _TAKES_FROM_BASE
        else f"set {key}.init to default"
        if began in _KEEPS_BASE
        else "convert them with peft (save_pretrained with path_initial_model_for_weight_conversion)"
    )
    raise ConfigError(
        f"{key}.path={folder}: its adapters began by init_lora_weights={str(began)[:60]}, and {key}.init={cfg.init}: "
        f"the weights under them would be other ones; {how}"
    )


def _shape(tensors: Mapping[str, Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None


def adapted(model: nn.Module) -> dict[str, LoraLinear | LoraStack]:
    """What has adapters, by name: linear layers, and stacks of experts."""
    out: dict[str, LoraLinear | LoraStack] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            out[name] = module
        elif isinstance(module, LoraStack):
            experts, _, stack = name.rpartition(".lora.")
            out[f"{experts}.{stack}"] = module
    return out


def adapted_weights(model: nn.Module) -> dict[str, LoraLinear | LoraStack]:
    """The same by the names of the weights that are adapted."""
    layers = adapted(model).items()
    return {n if isinstance(layer, LoraStack) else f"{n}.weight": layer for n, layer in layers}


def refresh(model: nn.Module) -> None:
    """Update all effective weights; to be called whenever parameters have changed."""
    for layer in adapted(model).values():
        layer.refresh()


@contextmanager
def dropping(model: nn.Module, noise: Noise | None) -> Iterator[None]:
    """Inside it, forward and backward passes with gradient drop what the adapters see, each layer by its own noise."""
    layers = {name: layer for name, layer in adapted(model).items() if layer.dropout and noise is not None}
    for name, layer in layers.items():
        layer.noise = None if noise is None else noise.of(layer.drops_as or name)
    try:
        yield
    finally:
        for layer in layers.values():
            layer.noise = None


def learned(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that may be trained: adapters and full modules, or all of them where there are no adapters."""
    names = getattr(model, _LEARNED, None)
    yield from ((n, p) for n, p in model.named_parameters() if names is None or n in names)


# ---------------------------------------------------------------- other models from this one


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy. Parameters that are never trained are shared, not copied: with adapters a copy is about as large
    as they are."""
    own = {id(p) for _, p in learned(model)}
    shared = {id(p): p for p in model.parameters() if id(p) not in own}
    return copy.deepcopy(model, shared).requires_grad_(False)  # type: ignore[arg-type]


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """The model with the adapters' effect in its weights, of the class's own layers. It shares all tensors, so it is to
    be read or copied, and only until the next step."""
    out = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})  # type: ignore[arg-type]
    made = {
        n: layer.weight if layer.effective is None else layer.effective for n, layer in adapted(out).items()
    }
    for name, module in list(out.named_modules()):
        if isinstance(module, LoraLinear):
            linear = nn.Linear(module.in_features, module.out_features, device="meta")
            linear.weight, linear.bias = nn.Parameter(made[name], requires_grad=False), module.bias
            out.set_submodule(name, linear)
        elif isinstance(module, Experts):
            own = module.named_parameters(recurse=False)
            out.set_submodule(name, module.plain({n: made.get(f"{name}.{n}", p) for n, p in own}))
    return out


# ---------------------------------------------------------------- adapters as a folder


def export_adapter(
    model: PreTrainedModel, path: Path, *, cfg: LoraConfig, base: str | None, other: str = RUN_DIR
) -> None:
    """Write only the trained parameters, as a folder that `peft.PeftModel.from_pretrained` opens over the base model.

    base: the location of that model, for the record. other: as for `file_error`.
    """
    layers = adapted(model)
    linear = {name for name, layer in layers.items() if isinstance(layer, LoraLinear)}
    by_weight = set(_by_weight(model))
    told = {
        "targets": tuple(n for n in layers if n in linear - by_weight),
        "exclude_modules": (),
        "dropout": 0.0 if by_weight else cfg.dropout,  # peft has none for what it finds by a parameter's name
        **_patterns(model, cfg),
    }
    config = _peft(cfg.model_copy(update=told))
    parameters = [f"{n}.weight" if n in by_weight else n for n in layers if n in by_weight or n not in linear]
    config.target_parameters = parameters or None
    config.base_model_name_or_path, config.inference_mode = base, True
    config.modules_to_save = list(_whole(model, cfg.modules_to_save)) or None
    with atomic_folder(path, other=other) as folder:
        config.save_pretrained(folder)
        # what is fused or shared stands there for each layer, and safetensors takes no memory twice
        tensors = {
            one.name: one.value().clone(memory_format=torch.contiguous_format) for one in _as_peft(model, cfg)
        }
        save_file(tensors, folder / _FILE, metadata={"format": "pt"})


def _by_weight(model: PreTrainedModel) -> list[str]:
    """Layers with adapters that peft has to be told by the name of their weight: in a model with experts it takes the
    name of a layer such as gate_proj for that of the layer in each expert, which is a part of a stack."""
    inside = {one for name, _ in model.named_parameters() if is_stack(name) for one in inside_stack(name)}
    endings = {name.rpartition(".")[2] for name in inside}
    layers = adapted(model).items()
    return [n for n, x in layers if isinstance(x, LoraLinear) and n.rpartition(".")[2] in endings]


def _patterns(model: PreTrainedModel, cfg: LoraConfig) -> dict[str, dict[str, Any]]:
    """Ranks and alphas of single layers as peft has to be told them, by whole names: peft writes patterns in the order
    of the alphabet, and then takes the first that fits. Those of stacks that replace two layers are twice as large."""
    ranks: dict[str, Any] = {}
    alphas: dict[str, Any] = {}
    for name, at in _peft_names(model).items():
        times = ranks_of_stack(name, cfg) if is_stack(name) else 1
        rank = times * (pattern_of(name, cfg.rank_pattern) or cfg.rank)
        alpha = times * (pattern_of(name, cfg.alpha_pattern) or cfg.alpha)
        ranks |= {re.escape(at): rank} if rank != cfg.rank else {}
        alphas |= {re.escape(at): alpha} if alpha != cfg.alpha else {}
    return {"rank_pattern": ranks, "alpha_pattern": alphas}


def _peft_names(model: PreTrainedModel) -> dict[str, str]:
    """Of all that has adapters: the name that peft compares with patterns."""
    by_weight = set(_by_weight(model))
    return {n: f"{n}.weight" if n in by_weight else n for n in adapted(model)}


def _resolved(patterns: Any, model: PreTrainedModel, usual: Any) -> Any:
    """Patterns of a folder, by whole names as in `_patterns`; as they are where they are no patterns."""
    try:
        found = {at: pattern_of(at, patterns or {}) for at in _peft_names(model).values()}
    except (AttributeError, TypeError, re.error):
        return patterns
    return {re.escape(at): value for at, value in found.items() if value not in (None, usual)}


@dataclass(frozen=True)
class _Told:
    """A parameter as peft writes it. Of experts that is A [X K, I] and B [O, K X], with what they share repeated."""

    name: str
    parameter: nn.Parameter
    experts: int = 0
    """How many a stack has; 0: it is of no stack."""

    def value(self) -> Tensor:
        own = self.parameter.detach()
        if not self.experts:
            return own
        each = own if own.ndim == 3 else own.expand(self.experts, *own.shape)
        return each.permute(1, 2, 0).flatten(1) if self._is_b else each.flatten(0, 1)

    @torch.no_grad()
    def put(self, value: Tensor) -> None:
        if self.experts:
            x = self.experts
            each = value.unflatten(1, (-1, x)).permute(2, 0, 1) if self._is_b else value.unflatten(0, (x, -1))
            value = each if self.parameter.ndim == 3 else each[0]
        self.parameter.copy_(value)

    @property
    def _is_b(self) -> bool:
        return self.name.endswith(".lora_B.weight")


def _as_peft(model: PreTrainedModel, cfg: LoraConfig) -> Iterator[_Told]:
    """Adapters and whole modules by the names that peft writes."""
    layers = adapted(model)
    for name, layer in layers.items():
        at, experts = name, 0
        # peft wraps the experts once for each stack; the last is the outermost
        if isinstance(layer, LoraStack):
            at, _, stack = name.rpartition(".")
            stacks = [n for n in STACKS if f"{at}.{n}" in layers]
            at, experts = at + ".base_layer" * (len(stacks) - 1 - stacks.index(stack)), len(layer.weight)
        yield _Told(f"base_model.model.{at}.lora_A.weight", layer.lora_A, experts)
        yield _Told(f"base_model.model.{at}.lora_B.weight", layer.lora_B, experts)
    for name, module in _whole(model, cfg.modules_to_save).items():
        for own, p in module.named_parameters(prefix=f"base_model.model.{name}"):
            yield _Told(own, p)
