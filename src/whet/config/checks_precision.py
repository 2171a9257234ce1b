"""Problems of dtypes, offload and compilation on the device that a stage trains on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from whet.config.derived import Plan
from whet.config.recipes import Problem


def misfits(plan: Plan) -> Iterator[Problem]:
    """(key, what is wrong with it) on the device, for the models of the stage."""
    train, p = plan.train, plan.train.precision
    if train.offload and plan.device == "cpu":
        yield "train.offload", "frees memory of a GPU, but this stage trains on the CPU; leave it out"
    if p.compute and plan.dtype != "float32":
        yield (
            "train.precision.compute",
            f"is for float32 parameters, but the parameters are {plan.dtype} and already compute in it; set "
            "model.dtype=float32, or leave it out",
        )
    only_half = {"reduce": p.reduce is not None, "master_weights": not p.master_weights}
    for name, given in only_half.items():
        if given and plan.dtype == "float32":
            yield (
                f"train.precision.{name}",
                "has no effect: parameters are float32; set model.dtype, or leave it out",
            )
        elif given and plan.learns is not None and not plan.learns.own:
            yield f"train.precision.{name}", "has no effect: adapters are always float32; leave it out"
    off = {"router_aux_loss_coef": 0, "router_z_loss_coef": 0, "router_replay": "none"}
    for name, nothing in off.items():
        if getattr(train, name) == nothing or plan.shape is None or plan.shape.experts:
            continue
        yield (
            f"train.{name}",
            "has no effect: it is for the routers of a mixture of experts, but this model has none; set it to "
            f"{nothing}",
        )
    if train.compile and (missing := _no_compiler(plan.device)):
        yield "train.compile", f"{missing}; leave it out"


def _no_compiler(device: str) -> str | None:
    """The compiler that torch.compile needs and this machine lacks; on CUDA torch includes Triton."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    if device == "cuda" or any(shutil.which(name) for name in names):
        return None
    return f"needs a C++ compiler, but this machine has none (searched for {', '.join(names)})"
