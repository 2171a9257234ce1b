"""Problems of dtypes, offload and compilation on the device that a stage trains on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from whet.config.checks_parallel import world
from whet.config.derived import Plan
from whet.config.schema import Config

Problem = tuple[str, str]


def problems(cfg: Config) -> Iterator[Problem]:
    """(key, what is wrong with it) in one stage's config, on any device."""
    train, p = cfg.train, cfg.train.precision
    if p.reduce and not p.master_weights:
        yield (
            "train.precision.reduce",
            "sums gradients for float32 master weights, but master_weights=false keeps none; leave one of the two out",
        )
    float16 = cfg.model.dtype == "float16"
    if float16 and not p.master_weights:
        yield (
            "train.precision.master_weights",
            "false: model.dtype=float16 needs float32 master weights, because gradients are unscaled in float32; use "
            "bfloat16, or set it to true",
        )
    if p.compute and (cfg.model.lora or cfg.critic.lora):
        yield (
            "train.precision.compute",
            "adapters compute in the dtype of the base weights; set model.dtype instead",
        )
    if p.float8 and (cfg.model.lora or cfg.critic.lora):
        yield (
            "train.precision.float8",
            "it is not faster for adapters, which are small, and it rounds them; leave it out",
        )
    if p.float8 and train.compile:
        yield "train.precision.float8", "torch.compile does not support it; leave one of the two out"
    other = {"precision.compute": p.compute, "precision.float8": p.float8, "compile": train.compile}
    if cfg.machine.logprob_parity == "on" and (
        key := next((key for key, given in other.items() if given), None)
    ):
        yield (
            f"train.{key}",
            "makes trained log-probs differ from sampled ones, but machine.logprob_parity=on requires equal ones",
        )
    if cfg.machine.logprob_parity == "on" and cfg.rollout.quantization:
        yield (
            "rollout.quantization",
            "makes sampled log-probs differ from trained ones, but machine.logprob_parity=on requires equal ones",
        )
    if "policy" in train.offload and world(train.parallel) == 1:
        yield (
            "train.offload",
            "policy: in one process rollouts are sampled from the same weights; leave it out, or train on ranks "
            "(train.parallel)",
        )
    full = cfg.algorithm.kl.estimator == "full"
    if "reference" in train.offload and full:
        yield (
            "train.offload",
            "reference: algorithm.kl.estimator=full reads the reference in every micro-batch; leave it out",
        )


def misfits(plan: Plan) -> Iterator[Problem]:
    """(key, what is wrong with it) on the device, for the models of the stage."""
    train, p = plan.train, plan.train.precision
    if train.offload and plan.device == "cpu":
        yield "train.offload", "frees memory of a GPU, but this stage trains on the CPU; leave it out"
    there = {"critic": plan.needs_critic, "reference": plan.needs_reference}
    for name, used in there.items():
        if name in train.offload and not used:
            yield (
                "train.offload",
                f"{name}: this stage has no {name} (algorithm.name={plan.algorithm.name}); leave it out",
            )
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
    if train.router_aux_loss_coef and plan.shape is not None and not plan.shape.experts:
        yield (
            "train.router_aux_loss_coef",
            "balances the routers of a mixture of experts, but this model has none; set it to 0",
        )
    if train.compile and (missing := _no_compiler(plan.device)):
        yield "train.compile", f"{missing}; leave it out"


def _no_compiler(device: str) -> str | None:
    """The compiler that torch.compile needs and this machine lacks; on CUDA torch includes Triton."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    if device == "cuda" or any(shutil.which(name) for name in names):
        return None
    return f"needs a C++ compiler, but this machine has none (searched for {', '.join(names)})"
