"""DeepSpeed's ZeRO in the place of FSDP2: a model's parameters, gradients and optimizer state over its ranks.

DeepSpeed wraps whet's own model and torch's optimizer, and decides where tensors lie and when they are gathered. What
is computed stays whet's (docs/decisions/038-deepspeed-behind-the-seam.md): DeepSpeed takes the mean of the ranks'
gradients, so a loss is multiplied by their number, and the gradient is the sum that it is everywhere else.

deepspeed is imported by ranks alone, and only where a stage asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from whet.config.schema import OptimizerConfig, PrecisionConfig
from whet.environment import quiet_deepspeed
from whet.models.lora import adapted
from whet.models.optim import STATE, Optimizer, blank
from whet.models.regions import Region
from whet.models.sharded import called, no_part
from whet.types import CheckpointError, Json, WhetError

_NO_LEAVES: Json = {"classes": [], "names": [], "name_suffixes": []}


def _group_copies(config: Json, *, learns: bool) -> None:
    """Make the group of ranks that hold a copy of each other's shards (hpZ), for a model that does not learn and is the
    first one: DeepSpeed 0.19.8 makes it for optimizers alone, and looks for a method that its engine does not have."""
    from deepspeed.utils import groups

    size = config["zero_optimization"].get("zero_hpz_partition_size") or 1
    if not learns and size > 1 and groups._get_zero_param_intra_parallel_group() is None:
        groups._create_zero_param_parallel_group(size)


class Zero:
    """The parameters of one model on one rank. Make one for each engine; every method is called on all ranks."""

    def __init__(self, config: Json, *, learns: bool, device: str, gpu: int = 0) -> None:
        """config: of `deepspeed.initialize`. learns: the engine has an optimizer. device: cpu or cuda. gpu: which of
        the GPUs that this rank sees is its own."""
        import torch.distributed as dist

        prepare(device, gpu)
        self.config, self.learns = config, learns
        self.stage: int = config["zero_optimization"]["stage"]
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.writes = self.rank == 0
        self.parameters: dict[str, nn.Parameter] = {}
        self.functional = False
        self.engine: Any = None
        """DeepSpeed's; None where nothing is cut and nothing learns."""

    def place(self, model: PreTrainedModel, *, functional: bool, sums_wide: bool = False) -> None:
        """See `DataParallel.place`. A model that learns is cut by `begin`, when its optimizer is made."""
        for p in model.parameters():
            p.data = p.data.clone(memory_format=torch.contiguous_format)
        self.model, self.functional = model, functional
        self.parameters = dict(model.named_parameters())
        if self.stage == 3 and not self.learns:
            self.begin({}, None)

    def begin(self, others: Mapping[str, nn.Parameter], inner: torch.optim.Optimizer | None) -> None:
        """Hand the model to DeepSpeed. others: parameters that learn outside of it. inner: applies the gradients."""
        import deepspeed

        self.parameters |= others
        if len(dtypes := {p.dtype for p in self.parameters.values()}) > 1:
            raise WhetError(
                f"DeepSpeed keeps one dtype for all parameters of a model, which has {sorted(map(str, dtypes))}; use "
                "train.engine=torch, or a model.dtype that is that of all"
            )
        root = _Root(self.model, others.values())
        config = self.config
        if self.functional:  # blocks of experts are called by nobody, so none gathers for itself
            config = {
                **config,
                "zero_optimization": {**config["zero_optimization"], "leaf_module": _NO_LEAVES},
            }
        _group_copies(config, learns=inner is not None)
        self.engine, *_ = deepspeed.initialize(model=root, optimizer=inner, config=config)
        if self.stage == 3:
            self._register(root)
        called(self.model, self.engine)

    def _register(self, root: nn.Module) -> None:
        """Tell DeepSpeed what functions read that are no module's forward: whet's decoder a layer's parameters, all of
        a layer at once, and the rest wherever the model is at work."""
        import deepspeed

        register = deepspeed.zero.register_external_parameter

        for layer in adapted(self.model).values():
            layer.keeps, layer.effective = False, None
        blocks = [m for m in self.model.get_decoder().modules() if isinstance(m, GradientCheckpointingLayer)]
        for block in blocks if self.functional else ():
            called(block)
            for p in block.parameters():
                register(block, p)
        inside = {id(p) for block in blocks for p in block.parameters()}
        for p in self.parameters.values():
            if id(p) not in inside:
                register(root, p)

    # -- what lies here

    def own(self, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
        yield from named

    def gathered(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by their names, one at a time, on all ranks: of weights (`NAME`), masters (`master.NAME`) and
        moments (`exp_avg.NAME` ...). Of what is given, numbers alone are read."""
        for name, tensor in named:
            yield name, tensor if no_part(name, tensor) else self._whole(name)

    def _whole(self, name: str) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if name in self.parameters:
            return self.get(name, self.parameters[name])
        key, _, of = name.partition(".")
        p = self.parameters[of]
        if key == "master":
            return safe_get_full_fp32_param(p).detach()  # type: ignore[no-any-return]
        return safe_get_full_optimizer_state(p, key).detach()  # type: ignore[no-any-return]

    def get(self, name: str, p: Tensor) -> Tensor:
        """The whole of a parameter."""
        import deepspeed

        p = self.parameters[name]
        if self.engine is None or self.stage < 3:
            return p.detach()
        with deepspeed.zero.GatheredParameters([p]):
            return p.detach().clone()

    @torch.no_grad()
    def put(self, name: str, p: Tensor, x: Tensor) -> None:
        """Give a whole parameter other values, and its master with it."""
        import deepspeed

        p = self.parameters[name]
        if self.engine is None or self.stage < 3:
            p.copy_(x)
        else:
            with deepspeed.zero.GatheredParameters([p], modifier_rank=0):
                p.copy_(x)
            if self.learns:
                self.engine.optimizer.invalidate_secondary_tensor()
        if self.learns and p.requires_grad:
            self.put_state(f"master.{name}", x)

    def put_state(self, name: str, x: Tensor) -> None:
        """Give a master or a moment of a parameter other values."""
        from deepspeed import utils

        key, _, of = name.partition(".")
        p: Any = self.parameters[of]
        x, how = x.to(p.device, torch.float32), "full"
        if self.stage == 3 and x.numel() % self.ranks:
            # DeepSpeed fills such a tensor up, but its function for whole ones reads beyond their end
            size, how = p.ds_tensor.numel(), "local"
            x = F.pad(x.flatten(), (0, size * self.ranks - x.numel()))[size * self.rank :][:size]
        if key == "master":
            getattr(utils, f"safe_set_{how}_fp32_param")(p, x)
        else:
            getattr(utils, f"safe_set_{how}_optimizer_state")(p, x, key)

    def here(self, p: Tensor) -> torch.Size:
        return getattr(p, "ds_shape", p.shape)

    def shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        of = self.parameters.get(name, self.parameters.get(name.partition(".")[2]))
        return tuple(tensor.shape if of is None or no_part(name, tensor) else self.here(of))

    def region(self, name: str, shape: Sequence[int]) -> Region:
        return Region.whole(shape)

    def add(self, x: Tensor) -> Tensor:
        import torch.distributed as dist

        dist.all_reduce(x)
        return x

    def done(self, model: nn.Module) -> None:
        """After passes without gradient: free what they have gathered."""
        if self.engine is not None and self.stage == 3:
            self.engine.empty_partition_cache()


class ZeroOptimizer:
    """What `Optimizer` is, where DeepSpeed applies the gradients: its schedule and groups, with torch's optimizer on
    the parts that DeepSpeed keeps in float32."""

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
        across: Zero,
        others: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """See `Optimizer`."""
        self.across, self.loss_scale = across, None
        # its schedule, groups and counts; the masters are DeepSpeed's
        own = (precision or PrecisionConfig()).model_copy(update={"master_weights": False})
        self.plain = Optimizer(
            named,
            cfg,
            total_steps=total_steps,
            updates_per_step=updates_per_step,
            precision=own,
            others=others,
        )
        self.parameters = self.plain.parameters
        inner = self.plain.inner[0]
        outside = {n: p for n, p in self.parameters.items() if n not in across.parameters}
        across.begin(outside, inner)  # type: ignore[arg-type]
        self.engine, self.inner = across.engine, inner
        self.half = next(iter(self.parameters.values())).dtype != torch.float32
        self.keys = {} if cfg.name == "sgd" and not cfg.momentum else STATE[type(inner)]
        self._prime()

    def _prime(self) -> None:
        """Moments of zeros, as torch makes them at the first step, so that there is something to read and write."""
        zero = self.engine.optimizer
        parts = (
            zero.fp32_partitioned_groups_flat
            if self.across.stage == 3
            else zero.single_partition_of_fp32_groups
        )
        for part in parts:
            state = blank(self.inner, part)
            self.inner.state[part] = {key: torch.zeros_like(x) for key, x in state.items()}
        if self.across.stage < 3:
            zero._lazy_init_hp_params_optimizer_state()

    @property
    def lr(self) -> float:
        return self.plain.lr

    @property
    def step_count(self) -> int:
        return self.plain.step_count

    def zero_grad(self) -> None:
        """DeepSpeed has done it after the last step."""

    def backward(self, total: Tensor, *, last: bool = False) -> None:
        """See `Optimizer.backward`. DeepSpeed adds gradients up over the ranks after the last micro-batch, or as they
        come."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(self.scaled(total), scale_wrt_gas=False)

    def after_backward(self) -> None:
        """DeepSpeed has taken the gradients over, in its hooks."""

    def scaled(self, total: Tensor) -> Tensor:
        """DeepSpeed divides by the number of ranks: the result is the sum over them."""
        return total * self.across.ranks

    def clip(self) -> float:
        """The norm of the gradient before clipping. DeepSpeed clips and applies gradients in one call, or drops those
        whose norm is not finite: all of it is done here, and `step` or `skip` counts it."""
        self.plain.on_schedule()
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def step(self) -> None:
        self.plain.step_count += 1

    def skip(self) -> None:
        self.plain.skip()

    @torch.no_grad()
    def forget(self) -> None:
        """See `Optimizer.forget`."""
        for name in self.state():
            key, _, of = name.partition(".")
            if key not in ("steps", "master"):
                self.across.put_state(name, torch.zeros(self.across.here(self.parameters[of])))
        self._set_steps(0.0)

    def state(self) -> dict[str, Tensor]:
        """The names of `Optimizer.state`. Numbers are there; for the rest see `Zero.gathered`."""
        out: dict[str, Tensor] = {}
        steps = self._steps()
        for name, p in self.parameters.items():
            for key in self.keys:
                out[f"{key}.{name}"] = steps.clone() if key == "steps" else p
            if self.half:
                out[f"master.{name}"] = p
        return out

    def counts(self) -> dict[str, Any]:
        return self.plain.counts()

    @torch.no_grad()
    def restore(
        self, tensors: dict[str, Tensor], step_count: int, *, loss_scale: tuple[float, int] | None = None
    ) -> None:
        """Continue from what `state` and `counts` of any optimizer of this kind have given. Moments that are not there
        are those of a beginning. Errors: CheckpointError."""
        self.plain.step_count = step_count
        steps = {float(tensors.get(f"steps.{name}", 0.0)) for name in self.parameters if "steps" in self.keys}
        if len(steps) > 1:
            raise CheckpointError(
                f"optimizer state: parameters with {sorted(map(int, steps))} updates in one checkpoint, but DeepSpeed "
                "counts those of all parameters together; resume with train.engine=torch"
            )
        for name in self.state():
            key, _, of = name.partition(".")
            shape = self.across.here(self.parameters[of])
            found = tensors.get(name)
            if key == "steps":
                continue
            if found is None and key != "master":
                found = torch.zeros(shape)
            if found is None or found.shape != shape:
                raise CheckpointError(
                    f"optimizer state {name!r}: expected shape {tuple(shape)}, "
                    f"found {'nothing' if found is None else tuple(found.shape)}; the checkpoint belongs to another "
                    "model"
                )
            self.across.put_state(name, found)
        self._set_steps(max(steps, default=0.0))

    def _steps(self) -> Tensor:
        """Updates so far, which are those of every part."""
        for state in self.inner.state.values():
            if "step" in state:
                return state["step"].detach().cpu()
        return torch.zeros(())

    def _set_steps(self, steps: float) -> None:
        for state in self.inner.state.values():
            if "step" in state:
                state["step"].fill_(steps)


class _Root(nn.Module):
    """What DeepSpeed holds: the model, and parameters that learn outside of it. A call is `sharded.within`."""

    def __init__(self, model: nn.Module, others: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.model = model
        self.others = nn.ParameterList(others)

    def forward(self, function: Any, *args: Any) -> Any:
        return function(*args)


def prepare(device: str, gpu: int) -> None:
    """Have DeepSpeed compute on this device and join the process group that is there. Of a process of its own."""
    import logging
    import warnings

    import torch.distributed as dist

    # of names that DeepSpeed calls and torch 2.13 renames: nothing that a reader could mend
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    os.environ["DS_ACCELERATOR"] = device
    os.environ["LOCAL_RANK"] = str(gpu)  # `deepspeed.initialize` makes this GPU the current one
    with quiet_deepspeed():
        import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # its all-reduce over shared memory would be compiled at the first start, for a minute; gloo does the same
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)
