"""Low-rank adapters: W is replaced by W + s B A, and only A and B are trained (LoRA, arXiv:2106.09685).

An adapted layer keeps that sum beside its own weight, and all code that computes with the layer reads it: the trainer's
forward, the rollout engine, the export. So sampled log-probs equal the trainer's bit for bit, and sampling costs the
same as without adapters. The price is a second copy of the adapted weights, from the first optimizer step on. The
backward pass goes through A and B alone: the gradient of W is never formed.

peft decides which layers get adapters and how they are initialised, and its folder format is read and written. Adapters
are float32, whatever the model's dtype: steps of a usual learning rate are too small for bfloat16.

With `fused`, layers that Megatron-LM computes as one (queries, keys and values; gate and up) have one A: the same
parameter in several layers. So the optimizer has it once, its gradient is a sum, and code that goes by a parameter's
identity (copies, ranks, checkpoints) needs to know nothing of it.

Shape letters: U rows, I in features, O out features, K rank.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from whet import seeds
from whet.config.learns import fused_as
from whet.config.schema import LoraConfig
from whet.inputs import check_regular, read_json_object
from whet.models.dropout import Noise
from whet.models.products import column_sums, linear, product
from whet.track.files import atomic_folder
from whet.types import CheckpointError, ConfigError

_FILE = "adapter_model.safetensors"
_LEARNED = "whet_learned"
"""Where a model with adapters keeps the names of what may learn."""


class LoraLinear(nn.Module):
    """A linear layer with an adapter. `refresh` it whenever weight, A or B have changed."""

    effective: Tensor | None

    def __init__(
        self, linear: nn.Linear, a_KI: Tensor, b_OK: Tensor, *, scale: float, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale, self.dropout = scale, dropout
        self.first = 0
        """Number of the first feature of the input, where this rank has the weight's columns from there."""
        self.drops_as = ""
        """The name by which its input is dropped, where that is another layer's."""
        self.noise: Noise | None = None
        """While it is given, the adapter's input is dropped by it: see `dropping`."""
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A, self.lora_B = nn.Parameter(a_KI), nn.Parameter(b_OK)
        self.keeps = True
        """Keep W + s B A. Not where W is gathered for a moment only: then W x and s B A x are added."""
        self.register_buffer("effective", None, persistent=False)
        """W + s B A, at one address for as long as the layer lives; None where B is 0: then it is W itself."""

    def forward(self, x: Tensor) -> Tensor:
        weight_OI = self.weight if self.effective is None else self.effective
        noise = self.noise if torch.is_grad_enabled() else None
        if noise is not None or not self.keeps:
            a_KI, b_OK = self.lora_A.to(x.dtype), self.lora_B.to(x.dtype)
            seen = x if noise is None else noise.drop(x, self.dropout, first=self.first)
            low_UK = linear(seen, a_KI)
            return linear(x, self.weight, self.bias) + self.scale * linear(low_UK, b_OK)
        if not torch.is_grad_enabled():
            return linear(x, weight_OI, self.bias)
        return _Adapted.apply(x, weight_OI, self.bias, self.lora_A, self.lora_B, self.scale)

    @torch.no_grad()
    def refresh(self) -> None:
        if not self.keeps:
            return
        if self.effective is None:
            if not self.lora_B.any():
                return
            self.effective = torch.empty_like(self.weight)
        self.effective.copy_(_sum(self.weight, self.lora_A, self.lora_B, self.scale))


def _sum(weight_OI: Tensor, a_KI: Tensor, b_OK: Tensor, scale: float) -> Tensor:
    """W + s B A, in the dtype of B."""
    return product(b_OK, a_KI).mul_(scale).add_(weight_OI.to(b_OK.dtype))


@torch.no_grad()
def effect(weight_OI: Tensor, a_KI: Tensor, b_OK: Tensor, scale: float) -> Tensor:
    """The effective weight of a layer with these tensors: equal, bit for bit, to what `LoraLinear.refresh` keeps."""
    return _sum(weight_OI, a_KI, b_OK, scale).to(weight_OI.dtype) if b_OK.any() else weight_OI


class _Adapted(torch.autograd.Function):
    """x W'^T + b with W' = W + s B A given: dA = s B^T dy^T x and dB = s dy^T x A^T, by way of [U, K]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        a_KI: Tensor,
        b_OK: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_OI, a_KI, b_OK)
        ctx.scale = scale
        return linear(x, weight_OI.detach(), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI, a_KI, b_OK = ctx.saved_tensors
        needs_x, _, needs_bias, needs_a, needs_b, _ = ctx.needs_input_grad
        x_UI, dy_UO = x.flatten(0, -2), dy.flatten(0, -2)
        dx = product(dy_UO, weight_OI).view(x.shape) if needs_x else None
        da_KI = db_OK = None
        if needs_a:
            da_KI = product(product(dy_UO, b_OK.to(dy.dtype)).t(), x_UI).to(a_KI.dtype).mul_(ctx.scale)
        if needs_b:
            db_OK = product(dy_UO.t(), product(x_UI, a_KI.to(x.dtype).t())).to(b_OK.dtype).mul_(ctx.scale)
        return dx, None, column_sums(dy_UO) if needs_bias else None, da_KI, db_OK, None


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
    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seeds.key(seed, "lora"))
        try:
            inject_adapter_in_model(_peft(cfg, _targets(cfg, model)), model)
        except ValueError as error:
            raise ConfigError(f"{key}: {error} Linear layers of the model: {_linear_names(model)}") from error
        del model.peft_config  # transformers would refuse to write the model
        for name, module in [(n, m) for n, m in model.named_modules() if isinstance(m, LoraLayer)]:
            model.set_submodule(name, _own(name, module, head=head, dropout=cfg.dropout, key=key))
        if cfg.init == "xavier":  # peft has none
            for layer in adapted(model).values():
                nn.init.xavier_normal_(layer.lora_A)
    _check_names(model, cfg, key)
    if cfg.fused:
        _fuse(model, key)
    for whole in _whole(model, cfg.modules_to_save).values():
        whole.requires_grad_(True)
    setattr(model, _LEARNED, frozenset(n for n, p in model.named_parameters() if p.requires_grad))
    if cfg.path is not None:
        _fill(model, Path(cfg.path).expanduser(), cfg, key=key)
    refresh(model)


def _targets(cfg: LoraConfig, model: PreTrainedModel) -> list[str] | str:
    """What gets adapters, as peft takes it. Its own all-linear reaches for experts and routers, too."""
    if cfg.targets != "all-linear":
        return cfg.targets if isinstance(cfg.targets, str) else list(cfg.targets)
    head = model.get_output_embeddings()
    return [name for name, m in model.named_modules() if type(m) is nn.Linear and m is not head]


def _linear_names(model: PreTrainedModel) -> str:
    """The last parts of the names of linear layers, for people."""
    return ", ".join(
        sorted({name.rpartition(".")[2] for name, m in model.named_modules() if type(m) is nn.Linear})
    )


def _peft(cfg: LoraConfig, targets: list[str] | str) -> Any:
    """The section as peft's own configuration."""
    from peft import LoraConfig

    if cfg.init == "pissa" and cfg.pissa_iterations:
        init: Any = f"pissa_niter_{cfg.pissa_iterations}"
    else:
        init = {"default": True, "xavier": True, "random": False}.get(cfg.init, cfg.init)
    return LoraConfig(
        r=cfg.rank,
        lora_alpha=cfg.alpha,  # type: ignore[arg-type]  # peft divides; any number does
        use_rslora=cfg.rslora,
        lora_dropout=cfg.dropout,
        target_modules=targets,
        exclude_modules=exclude if isinstance(exclude := cfg.exclude_modules, str) else list(exclude),
        rank_pattern=dict(cfg.rank_pattern),
        alpha_pattern=dict(cfg.alpha_pattern),
        init_lora_weights=init,
        task_type="CAUSAL_LM",
    )


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
    firsts: dict[str, tuple[str, LoraLinear]] = {}
    for name, layer in adapted(model).items():
        at, first = firsts.setdefault(fused_as(name), (name, layer))
        if layer.lora_A.shape != first.lora_A.shape:
            raise ConfigError(
                f"{section}.rank_pattern: {at} and {name} have different ranks, but with fused=true they have one A; "
                "give both the same, or set fused to false"
            )
        layer.lora_A, layer.drops_as = first.lora_A, at
    if len(firsts) == len(adapted(model)):
        raise ConfigError(
            f"{section}.fused: no two layers with adapters are fused (q_proj, k_proj and v_proj, or gate_proj and "
            "up_proj, of one block); set it to false"
        )


def _check_names(model: PreTrainedModel, cfg: LoraConfig, section: str) -> None:
    """Each pattern has to fit the end of a name (peft only warns), and each module has to be there."""
    for key, patterns in (("rank_pattern", cfg.rank_pattern), ("alpha_pattern", cfg.alpha_pattern)):
        for pattern in patterns:
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in adapted(model)):
                raise ConfigError(
                    f"{section}.{key}: no layer with an adapter has a name that ends with {pattern!r}"
                )
    for ending in () if isinstance(cfg.exclude_modules, str) else cfg.exclude_modules:
        if not any(f".{n}".endswith(f".{ending}") for n, m in model.named_modules() if type(m) is nn.Linear):
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
    """The modules that learn in full, by name."""
    ends = tuple(f".{ending}" for ending in endings)
    return {name: module for name, module in model.named_modules() if f".{name}".endswith(ends)}


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
        "alpha_pattern": dict(cfg.alpha_pattern),
        "use_dora": False,
    }
    may_lack = {"peft_type": "LORA", "use_rslora": False, "alpha_pattern": {}, "use_dora": False}
    theirs = {name: told.get(name, may_lack.get(name)) for name in ours}
    if odd := {name: theirs[name] for name, value in ours.items() if theirs[name] != value}:
        raise ConfigError(
            f"{key}.path={folder}: its adapters use {str(odd)[:200]}; set the same rank, alpha, rslora and "
            "alpha_pattern; adapter types other than LoRA cannot be read"
        )
    if odd_type := sorted(name for name, t in found.items() if not t.dtype.is_floating_point):
        raise CheckpointError(
            f"{key}.path={folder}: {odd_type[0]} has dtype {found[odd_type[0]].dtype}, expected a floating-point dtype"
        )
    own = dict(_as_peft(model, cfg))
    if wrong := sorted(n for n in found.keys() | own.keys() if _shape(found, n) != _shape(own, n)):
        raise CheckpointError(
            f"{key}.path={folder}: the adapters belong to other layers; they differ in {wrong[:3]} ({len(wrong)} "
            "tensors)"
        )
    firsts: dict[int, str] = {}
    with torch.no_grad():
        for name, p in own.items():
            first = firsts.setdefault(id(p), name)
            if not torch.equal(found[name], found[first]):
                raise CheckpointError(
                    f"{key}.path={folder}: {name} differs from {first}, but with fused=true they must be equal; set "
                    "fused to false"
                )
            p.copy_(found[name])


def _shape(tensors: Mapping[str, Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None


def adapted(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers with adapters, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


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
    for name, layer in adapted(out).items():
        linear = nn.Linear(layer.in_features, layer.out_features, device="meta")
        weight_OI = layer.weight if layer.effective is None else layer.effective
        linear.weight, linear.bias = nn.Parameter(weight_OI, requires_grad=False), layer.bias
        out.set_submodule(name, linear)
    return out


# ---------------------------------------------------------------- adapters as a folder


def export_adapter(model: PreTrainedModel, path: Path, *, cfg: LoraConfig, base: str | None) -> None:
    """Write only the trained parameters, as a folder that `peft.PeftModel.from_pretrained` opens over the base model.

    base: the location of that model, for the record.
    """
    config = _peft(cfg.model_copy(update={"exclude_modules": ()}), list(adapted(model)))
    config.base_model_name_or_path, config.inference_mode = base, True
    config.modules_to_save = list(_whole(model, cfg.modules_to_save)) or None
    with atomic_folder(path) as folder:
        config.save_pretrained(folder)
        # what is fused stands there for each layer, and safetensors takes no memory twice
        tensors = {
            name: p.detach().clone(memory_format=torch.contiguous_format) for name, p in _as_peft(model, cfg)
        }
        save_file(tensors, folder / _FILE, metadata={"format": "pt"})


def _as_peft(model: PreTrainedModel, cfg: LoraConfig) -> Iterator[tuple[str, nn.Parameter]]:
    """Adapters and whole modules by the names that peft writes."""
    for name, layer in adapted(model).items():
        yield f"base_model.model.{name}.lora_A.weight", layer.lora_A
        yield f"base_model.model.{name}.lora_B.weight", layer.lora_B
    for name, module in _whole(model, cfg.modules_to_save).items():
        yield from module.named_parameters(prefix=f"base_model.model.{name}")
