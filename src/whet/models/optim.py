"""Optimizers with their schedule.

Parameters that are not float32 get a float32 master copy: at learning rates of RL (1e-6) a bfloat16 weight would not
change at all (its steps are 2^-8 of its size).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.config.learns import is_matrix
from whet.config.schedules import factor, position, weight_decay
from whet.config.schema import OptimizerConfig, PrecisionConfig
from whet.models.muon import Muon
from whet.models.narrow_adam import Adam8, Adam16, NarrowAdam
from whet.models.precision import loss_scale
from whet.models.sharded import Alone, DataParallel, Wholes
from whet.models.tensor_files import TensorFile
from whet.types import CheckpointError, ConfigError, WhetError

_ADAM = {"steps": "step", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_MOMENTUM = {"momentum_buffer": "momentum_buffer"}
STATE: dict[type[Any], dict[str, str]] = {
    torch.optim.AdamW: _ADAM,
    torch.optim.Adam: _ADAM,
    torch.optim.SGD: _MOMENTUM,
    Muon: _MOMENTUM,
    Adam16: _ADAM,
    Adam8: _ADAM | {"exp_avg_scale": "exp_avg_scale", "exp_avg_sq_scale": "exp_avg_sq_scale"},
}
"""What each keeps of a parameter: the name in a checkpoint, and the optimizer's own."""

Inner = Muon | NarrowAdam | torch.optim.Optimizer


class Optimizer:
    """One or two of the published optimizers over named parameters, with master weights, clipping and the schedule."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        cfg: OptimizerConfig,
        *,
        total_steps: int,
        updates_per_step: int = 1,
        hidden: Collection[str] = (),
        precision: PrecisionConfig | None = None,
        offload: bool = False,
        across: Alone | DataParallel | None = None,
        others: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """total_steps: optimizer steps of the stage; updates_per_step: those of one training step. hidden: matrices
        between embedding and output, which muon takes. offload: moments and masters lie in the host's memory but for
        the step. across: the ranks that gradients are added up over. others: dtypes of parameters that learn on
        other ranks alone, by name. Errors: ConfigError for a group without parameters."""
        self.across, others = across or Alone(), others or {}
        precision = precision or PrecisionConfig()
        self.cfg, self.total_steps, self.updates_per_step = cfg, total_steps, updates_per_step
        self.offload, self.sums_wide = offload, precision.reduce is not None
        self.step_count = 0
        self.apart: Collection[str] = ()
        """Parameters whose gradient is clipped by its own norm, which is not in the norm of the others."""
        self.parameters = {name: p for name, p in named if p.requires_grad}
        self.masters = {
            name: p
            if p.dtype == torch.float32 or not precision.master_weights
            else nn.Parameter(p.detach().float())
            for name, p in self.parameters.items()
        }
        self.wide: dict[str, Tensor] = {}
        """Float32 gradients of parameters with a master, until the step."""
        self.loss_scale = loss_scale(
            precision, {*others.values(), *(p.dtype for p in self.parameters.values())}
        )
        inside = {n: p for n, p in self.masters.items() if cfg.name == "muon" and n in hidden}
        rest = {n: p for n, p in self.masters.items() if n not in inside}
        wholes = Wholes(self.across, {p: name for name, p in self.masters.items()})
        self.inner: list[Inner] = [*_muon(inside, cfg, wholes), *_torch(rest, cfg, wholes)]
        self.owner = {p: inner for inner in self.inner for g in inner.param_groups for p in g["params"]}
        if odd := [
            at for at in cfg.param_groups if not any(re.search(at, name) for name in (*self.masters, *others))
        ]:
            raise ConfigError(
                f"optimizer.param_groups: {odd[0]!r} occurs in no name of a trainable parameter"
            )

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.cfg.lr * factor(self.cfg.schedule, self._at(self.step_count), self._at(self.total_steps))

    @property
    def weight_decay(self) -> float:
        """Weight decay of the next step."""
        return weight_decay(self.cfg, self._at(self.step_count), self._at(self.total_steps))

    def _at(self, updates: int) -> int:
        return position(self.cfg.schedule, updates, updates_per_step=self.updates_per_step)

    def zero_grad(self) -> None:
        self.wide.clear()
        for p in self.parameters.values():
            p.grad = None

    def backward(self, total: Tensor, *, last: bool = False) -> None:
        """Add a micro-batch's gradients, times the scale of the loss, to those that are there. last: a step follows."""
        self.scaled(total).backward()
        self.after_backward()

    def scaled(self, total: Tensor) -> Tensor:
        """What to go backward from."""
        return total if self.loss_scale is None else total * self.loss_scale.scale

    def after_backward(self) -> None:
        if self.sums_wide:
            self.across.collect(self.parameters)
            self._widen()

    def _widen(self) -> None:
        """Move gradients of parameters with a master to float32."""
        for name, p in self.parameters.items():
            if p.grad is not None and self.masters[name] is not p:
                before = self.wide.get(name)
                self.wide[name] = p.grad.float() if before is None else before.add_(p.grad)
                p.grad = None

    @torch.no_grad()
    def clip(self) -> float:
        """Divide gradients by the scale of the loss and clip their norm, in place; returns the norm before clipping."""
        self.across.collect(self.parameters)
        self._widen()
        self.across.add_up(self.parameters, self.wide)
        by_name = {n: p.grad for n, p in self.parameters.items() if p.grad is not None} | self.wide
        grads = list(by_name.values())
        if self.loss_scale is not None and grads:
            torch._foreach_mul_(grads, 1.0 / self.loss_scale.scale)
        value = self._clipped({n: g for n, g in by_name.items() if n not in self.apart})
        alone = self._clipped({n: by_name[n] for n in by_name if n in self.apart}) if self.apart else 0.0
        return value if math.isfinite(alone) else alone

    def _clipped(self, by_name: Mapping[str, Tensor]) -> float:
        """The norm of these gradients, which are then clipped."""
        value, most = float(self.across.norm(by_name)), self.cfg.max_grad_norm
        # what is too large may be of other ranks alone
        if by_name and most is not None and math.isfinite(value) and value > most:
            torch._foreach_mul_(list(by_name.values()), most / (value + 1e-6))
        return value

    @torch.no_grad()
    def step(self) -> None:
        """Apply the gradients; `clip` has divided them by the scale of the loss, where there is one."""
        self._widen()
        if self.offload and self.parameters:
            self.place(next(iter(self.parameters.values())).device)
        for name, grad in self.wide.items():
            self.masters[name].grad = grad
        self.wide.clear()
        self.on_schedule()
        for inner in self.inner:
            inner.step()
        for name, p in self.parameters.items():
            if self.masters[name] is not p:
                p.copy_(self.masters[name])
                self.masters[name].grad = None
        self.step_count += 1
        if self.offload:
            self.place(torch.device("cpu"))

    def on_schedule(self) -> None:
        """Set learning rate and weight decay of the next step."""
        for inner in self.inner:
            for group in inner.param_groups:
                group["lr"] = self.lr * group["lr_factor"]
                group["weight_decay"] = self.weight_decay if group["decay"] is None else group["decay"]

    def place(self, device: torch.device) -> None:
        """Move moments and master weights."""
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.data = master.data.to(device)
        for inner in self.inner:
            for state in inner.state.values():
                moves = {key: x for key, x in state.items() if isinstance(x, Tensor) and x.ndim}
                state.update({key: x.to(device) for key, x in moves.items()})

    def skip(self) -> None:
        """Count a step without applying it: the schedule continues, moments and weights stay."""
        self.step_count += 1

    def forget(self) -> None:
        """Drop the moments and restart their bias correction; weights and schedule stay."""
        for inner in self.inner:
            inner.state.clear()

    def state(self) -> dict[str, Tensor]:
        """Flat tensors: `exp_avg.NAME`, `momentum_buffer.NAME` ..., and `master.NAME` where there is one."""
        out: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            found, keys = self._state_of(master)
            for key, own in keys.items():
                if found.get(own) is not None:
                    out[f"{key}.{name}"] = found[own].detach()
            if master is not self.parameters[name]:
                out[f"master.{name}"] = master.detach()
        return out

    def counts(self) -> dict[str, Any]:
        """What `restore` needs beside the tensors: JSON."""
        scale = (
            {} if self.loss_scale is None else {"loss_scale": [self.loss_scale.scale, self.loss_scale.held]}
        )
        return {"steps": self.step_count, **scale}

    @torch.no_grad()
    def restore(
        self, tensors: dict[str, Tensor], step_count: int, *, loss_scale: tuple[float, int] | None = None
    ) -> None:
        """Continue from the results of `state` and `counts`."""
        self.step_count = step_count
        if self.loss_scale is not None and loss_scale is not None:
            self.loss_scale.scale, self.loss_scale.held = loss_scale
        moved = {key.partition(".")[2] for key in tensors if not key.startswith("master.")}
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.copy_(_wanted(tensors, f"master.{name}", master))
            found, keys = self._state_of(master)
            if name in moved:
                begins = blank(self.owner[master], master)
                for key, own in keys.items():
                    if own in begins:
                        found[own] = _wanted(tensors, f"{key}.{name}", begins[own]).clone()
            elif moved and isinstance(self.owner[master], torch.optim.SGD):
                # frozen until now. torch's fused step wants the buffers of all parameters, or of none
                found["momentum_buffer"] = torch.zeros_like(master)

    def _state_of(self, master: nn.Parameter) -> tuple[dict[str, Any], dict[str, str]]:
        """What is kept of a parameter (nothing before its first step), and how that is called."""
        inner = self.owner[master]
        return inner.state[master], STATE[type(inner)]


def blank(inner: Inner, p: nn.Parameter) -> dict[str, Tensor]:
    """State of the shapes and dtypes that a parameter's has."""
    if isinstance(inner, NarrowAdam):
        return inner.blank(p)
    # only a fused step reads the count on the device; another would make the host wait for it, tensor by tensor
    count = p.new_zeros(()) if getattr(inner, "defaults", {}).get("fused") else torch.zeros(())
    return {own: count.float() if own == "step" else p for own in STATE[type(inner)].values()}


def _muon(named: Mapping[str, nn.Parameter], cfg: OptimizerConfig, wholes: Wholes) -> Iterator[Muon]:
    if named:
        yield Muon(_groups(named, cfg), momentum=_or(cfg.momentum, 0.95), wholes=wholes)


def _torch(
    named: Mapping[str, nn.Parameter], cfg: OptimizerConfig, wholes: Wholes
) -> Iterator[NarrowAdam | torch.optim.Optimizer]:
    groups = _groups(named, cfg)
    if not groups:
        return
    if cfg.state_dtype != "float32":
        narrow = Adam8 if cfg.state_dtype == "int8" else Adam16
        yield narrow(groups, betas=cfg.betas, eps=cfg.eps, decoupled=cfg.name == "adamw", wholes=wholes)
        return
    way = cfg.implementation
    if (
        way == "fused"
        and cfg.name == "sgd"
        and any(p.is_cpu and p.dtype.itemsize < 4 for p in named.values())
    ):
        way = "foreach"  # torch 2.13 on a CPU: a fused step of half precision moves some numbers twice as far
    how = {"fused": way == "fused", "foreach": way == "foreach"}
    if cfg.name == "sgd":
        yield torch.optim.SGD(groups, lr=cfg.lr, momentum=_or(cfg.momentum, 0.0), **how)
    else:
        kind = torch.optim.Adam if cfg.name == "adam" else torch.optim.AdamW
        yield kind(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, **how)


def _or(given: float | None, default: float) -> float:
    return default if given is None else given


def _groups(named: Mapping[str, nn.Parameter], cfg: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameters by the terms they share: factor of the learning rate, weight decay (None: the schedule's)."""
    by_terms: dict[tuple[float, float | None], list[nn.Parameter]] = {}
    for name, p in named.items():
        by_terms.setdefault(_terms(name, p, cfg), []).append(p)
    return [{"params": ps, "lr_factor": f, "decay": decay} for (f, decay), ps in by_terms.items()]


def _terms(name: str, p: nn.Parameter, cfg: OptimizerConfig) -> tuple[float, float | None]:
    """(factor, weight decay; None: the schedule's) of one parameter, by the first group that fits."""
    group = next((g for at, g in cfg.param_groups.items() if re.search(at, name)), None)
    usual = None if is_matrix(name, p.shape) or cfg.decay_all else 0.0
    if group is None:
        return 1.0, usual
    return group.lr_factor, usual if group.weight_decay is None else group.weight_decay


def _wanted(tensors: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    found = tensors.get(name)
    if found is None or found.shape != like.shape:
        raise CheckpointError(
            f"optimizer state {name!r}: expected shape {tuple(like.shape)}, "
            f"found {'nothing' if found is None else tuple(found.shape)}; the checkpoint belongs to another model"
        )
    if found.dtype.is_floating_point != like.dtype.is_floating_point:
        raise CheckpointError(f"optimizer state {name!r}: expected dtype {like.dtype}, found {found.dtype}")
    return found.to(like.device, like.dtype)


def inner_matrices(model: PreTrainedModel) -> Iterator[str]:
    """Names of the matrices between embedding and output layer."""
    ends = [m for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None]
    outer = {id(p) for end in ends for p in end.parameters()}
    yield from (n for n, p in model.named_parameters() if is_matrix(n, p.shape) and id(p) not in outer)


def not_finite(step: int, norm: float, times: int, most: int) -> WhetError:
    """What ends a run whose gradient was not finite in more than `most` optimizer steps in a row."""
    return WhetError(
        f"optimizer step {step}: the norm of the gradient is {norm}. It was not finite in {times} optimizer steps in a "
        f"row, and train.max_skipped_steps is {most}; resume from an older checkpoint with a lower train.optimizer.lr, "
        "or check the rewards of the last rollouts, and what an advantage, a loss or a weight of your own returns"
    )


def saved_counts(file: TensorFile) -> tuple[int, int, tuple[float, int] | None]:
    """Optimizer steps, how many of them were skipped last, and the loss scale with the steps it has held."""
    counts = json.loads(file.metadata["counts"])
    if odd := [key for key in ("steps", "skipped") if type(counts[key]) is not int]:
        raise CheckpointError(
            f"{file.path}: its count of {odd[0]} is {counts[odd[0]]!r}, expected a whole number"
        )
    if (given := counts.get("loss_scale")) is None:
        return counts["steps"], counts["skipped"], None
    scale, held = given
    return counts["steps"], counts["skipped"], (float(scale), int(held))
