"""The needs of the real run, from its config alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from whet.config.describe import size
from whet.config.learns import Learns
from whet.config.load import Loaded
from whet.config.plan import Plan
from whet.config.schema import Config, OptimizerConfig
from whet.rehearsal.findings import Finding, needs

FLOPS_PER_S = 4e14
"""Assumed speed of one large GPU in bfloat16 training: 40 % of an H100's 989 TFLOP/s."""

DEVICES = {
    "verl-ppo": ("trainer.nnodes", "trainer.n_gpus_per_node"),
    "skyrl": ("trainer.placement.policy_num_nodes", "trainer.placement.policy_num_gpus_per_node"),
    "trinity": ("cluster.node_num", "cluster.gpu_per_node"),
}
"""Foreign keys whose product is the number of GPUs."""


def predict(loaded: Loaded, planned: tuple[Plan, ...]) -> Iterator[Finding]:
    """Memory, disk and arithmetic of every stage."""
    gpus = devices(loaded)
    for cfg, plan in zip(loaded.stages, planned):
        named = bool(plan.memory)
        count = plan.shape.parameters if plan.shape else None
        count = count or parameters_of_name(cfg.model.path)
        if count is None:
            yield needs(
                f"{plan.name}: size",
                "the model is not available here, and its name does not contain its size",
            )
            continue
        parts = plan.memory if named else _by_count(cfg, plan, count)
        total = sum(parts.values())
        said = "; ".join(f"{size(n)} {what}" for what, n in parts.items())
        spread = (
            f", {size(total // gpus)} on each of {gpus} GPUs if everything is sharded" if gpus > 1 else ""
        )
        guess = (
            ""
            if plan.shape and plan.shape.parameters
            else f" (taking {count / 1e9:.3g}B parameters from the name)"
        )
        yield needs(f"{plan.name}: memory", f"{size(total)} before activations{guess}{spread}: {said}")
        yield needs(f"{plan.name}: work", _work(cfg, plan, count, gpus=gpus))


def devices(loaded: Loaded) -> int:
    """GPUs that a foreign file requests; 1 if it does not set them."""
    if loaded.translation is None:
        return 1
    given = {line.key: line.value for line in loaded.translation.lines}
    out = 1
    for key in DEVICES.get(loaded.translation.dialect, ()):
        value = given.get(key, 1)
        out *= value if isinstance(value, int) else 1
    return out


def parameters_of_name(path: str | None) -> int | None:
    """7B of 'Qwen2.5-7B-Instruct'; None where the name has no such part."""
    found = re.search(r"(?<![\dA-Za-z.])(\d+(?:\.\d+)?)[bB](?![A-Za-z])", Path(path or "").name)
    return int(float(found[1]) * 1e9) if found else None


def _by_count(cfg: Config, plan: Plan, count: int) -> dict[str, int]:
    """Memory in bfloat16, as on GPUs, where only the number of parameters is known. Adapted weights are there twice,
    and adapters are small beside them."""

    def learner(role: str, *, adapters: bool) -> dict[str, int]:
        if adapters:
            return {f"{role} with adapters": 4 * count}
        whole = Learns(base=count, own=count)
        return {f"{role} with gradients and Adam": whole.train_bytes(OptimizerConfig(), "bfloat16")}

    out = learner("policy", adapters=cfg.model.lora is not None)
    if plan.generates:
        out["weights of the rollout engine"] = 2 * count
    out |= dict.fromkeys(plan.references, 2 * count)
    if plan.needs_critic:
        out |= learner("critic", adapters=cfg.critic.lora is not None)
    return out


def _work(cfg: Config, plan: Plan, count: int, *, gpus: int) -> str:
    """At full length: 2 FLOPs a parameter and token forward, 4 backward (arXiv:2001.08361 section 2.1), 2 under
    adapters, where the weights themselves get no gradient."""
    tokens = plan.rollouts_per_step * plan.max_sequence_tokens
    looks = 1 + plan.needs_reference if plan.algorithm.kind == "online" else int(plan.needs_reference)
    learning = 4 if cfg.model.lora else 6
    if plan.needs_critic:
        learning += 4 if cfg.critic.lora else 6
    flops = (
        tokens * count * (plan.passes * learning + 2 * looks + (2 if plan.algorithm.kind == "online" else 0))
    )
    hours = flops / FLOPS_PER_S / 3600 / max(gpus, 1)
    steps = f", {hours * plan.total_steps:.3g} hours for {plan.total_steps} steps" if plan.total_steps else ""
    return (
        f"{plan.rollouts_per_step} rollouts of at most {plan.max_sequence_tokens} tokens per step = {tokens:.3g} "
        f"tokens; at most {flops:.2g} FLOP per step, {60 * hours:.3g} minutes on {gpus} "
        f"GPU{'s' if gpus > 1 else ''} at {FLOPS_PER_S / 1e12:.0f} TFLOP/s each{steps}; "
        "decoding is slower where it is memory-bound"
    )
