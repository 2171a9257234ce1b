"""What cannot work in dtypes, offload and compilation, on the device that a stage trains on."""

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
            "sums gradients for float32 masters, and master_weights=false keeps none",
        )
    float16 = cfg.model.dtype == "float16"
    if float16 and not p.master_weights:
        yield (
            "train.precision.master_weights",
            "false: gradients of a scaled loss are divided in float32, so model.dtype=float16 needs its masters; take "
            "bfloat16, or leave it true",
        )
    if p.compute and (cfg.model.lora or cfg.critic.lora):
        yield (
            "train.precision.compute",
            "adapters compute in the dtype of the weights below them; set model.dtype instead",
        )
    if p.float8 and (cfg.model.lora or cfg.critic.lora):
        yield (
            "train.precision.float8",
            "adapters are too small for it to be faster, and it rounds them; leave it out",
        )
    if p.float8 and train.compile:
        yield "train.precision.float8", "torch.compile does not see through it; leave one of the two out"
    other = {"precision.compute": p.compute, "precision.float8": p.float8, "compile": train.compile}
    if cfg.machine.logprob_parity == "on" and (
        key := next((key for key, given in other.items() if given), None)
    ):
        yield (
            f"train.{key}",
            "makes trained log-probs differ from sampled ones, and machine.logprob_parity=on asks for equal ones",
        )
    if cfg.machine.logprob_parity == "on" and cfg.rollout.quantization:
        yield (
            "rollout.quantization",
            "makes sampled log-probs differ from trained ones, and machine.logprob_parity=on asks for equal ones",
        )
    if "policy" in train.offload and world(train.parallel) == 1:
        yield (
            "train.offload",
            "policy: in one process its weights are those that rollouts are sampled from; leave it out, or train on "
            "ranks of their own (train.parallel)",
        )
    full = cfg.algorithm.kl.estimator == "full"
    if "reference" in train.offload and full:
        yield "train.offload", "reference: algorithm.kl.estimator=full reads it in every micro-batch"


def misfits(plan: Plan) -> Iterator[Problem]:
    """(key, what is wrong with it) on the device, for the models there are."""
    train, p = plan.train, plan.train.precision
    if train.offload and plan.device == "cpu":
        yield "train.offload", "frees memory of a GPU, and this stage trains on the CPU; leave it out"
    there = {"critic": plan.needs_critic, "reference": plan.needs_reference}
    for name, used in there.items():
        if name in train.offload and not used:
            yield "train.offload", f"names the {name}, and algorithm.name={plan.algorithm.name} has none"
    if p.compute and plan.dtype != "float32":
        yield (
            "train.precision.compute",
            f"is for float32 parameters, and these are {plan.dtype}, in which they compute already; set "
            "model.dtype=float32, or leave it out",
        )
    only_half = {"reduce": p.reduce is not None, "master_weights": not p.master_weights}
    for name, given in only_half.items():
        if given and plan.dtype == "float32":
            yield (
                f"train.precision.{name}",
                "changes nothing: parameters are float32; set model.dtype, or leave it out",
            )
        elif given and plan.learns is not None and not plan.learns.own:
            yield f"train.precision.{name}", "changes nothing: adapters are float32 always; leave it out"
    if train.router_aux_loss_coef and plan.shape is not None and not plan.shape.experts:
        yield (
            "train.router_aux_loss_coef",
            "balances the routers of a mixture of experts, and this model has none; leave it 0",
        )
    if train.compile and (missing := _no_compiler(plan.device)):
        yield "train.compile", f"{missing}; leave it out"


def _no_compiler(device: str) -> str | None:
    """What torch.compile lacks here; on CUDA torch brings Triton with it."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    if device == "cuda" or any(shutil.which(name) for name in names):
        return None
    return f"needs a C++ compiler, and there is none here (looked for {', '.join(names)})"
