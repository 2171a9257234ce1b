"""The memory of a stage as `whet plan` tells it, and the refusal of what cannot fit."""

from __future__ import annotations

from collections.abc import Sequence

from whet.config import memory
from whet.config.derived import Plan
from whet.config.hardware import cuda_bytes, ram_bytes
from whet.config.memory import Lengths, Model, Phase, Setting
from whet.config.sizes import in_words, micro_tokens
from whet.types import ConfigError


def phases(plan: Plan) -> list[Phase]:
    """The phases of a step; [] where the model's size is not known."""
    if plan.shape is None or plan.learns is None or not plan.shape.vocab_size:
        return []
    setting = Setting(shape=plan.shape, dtype=plan.dtype, compiled=plan.compiled and plan.dtype == "float32")
    lengths = _lengths(plan)
    tokens = plan.rollouts_per_step * (lengths.prompt + lengths.reply)
    cache, sampling = _sampling(plan, setting, lengths) if plan.generates else (0, 0)
    return memory.phases(
        _models(plan, setting, lengths),
        cache=cache,
        sampling=sampling,
        rollouts=tokens * memory.ROLLOUT_BYTES,
        rewards=plan.reward_models,
    )


def _lengths(plan: Plan) -> Lengths:
    """The reply at its longest, and of the prompt what a limit on both together leaves."""
    total = plan.total_tokens or plan.prompt_tokens + plan.train_reply_tokens
    reply = min(plan.train_reply_tokens, total - 1)
    return Lengths(prompt=min(plan.prompt_tokens, total - reply), reply=reply, group=plan.group_size)


def _models(plan: Plan, setting: Setting, lengths: Lengths) -> list[Model]:
    assert plan.learns is not None
    rollouts = plan.rollouts_per_minibatch
    default = micro_tokens(plan.device, setting.shape.hidden)
    pairs = plan.algorithm.kind == "preferences"
    cut = memory.cut(plan.train, lengths, rollouts=rollouts, default_tokens=default, whole_groups=pairs)
    forward = memory.forward_cut(plan.train, cut, lengths, rollouts=plan.rollouts_per_step)
    out = [
        memory.learner(
            "policy", plan.learns, plan.train, setting=setting, cut=cut, forward=forward, head=True
        )
    ]
    for name, weights in plan.copies.items():
        out.append(Model(name=name, weights=weights, setting=setting, cut=cut, forward=forward))
    if plan.critic is not None and plan.critic_learns is not None:
        rollouts = plan.rollouts_per_step // plan.critic.minibatches
        cut = memory.cut(plan.critic, lengths, rollouts=rollouts, default_tokens=default, whole_groups=False)
        forward = memory.forward_cut(plan.critic, cut, lengths, rollouts=plan.rollouts_per_step)
        out.append(
            memory.learner(
                "critic",
                plan.critic_learns,
                plan.critic,
                setting=setting,
                cut=cut,
                forward=forward,
                head=False,
            )
        )
    return out


def _sampling(plan: Plan, setting: Setting, lengths: Lengths) -> tuple[int, int]:
    """(KV cache, what prefill and decoding take beside it)."""
    assert plan.kv_cache_bytes is not None
    asked = plan.own_tasks_per_step * plan.group_size if plan.algorithm.kind == "online" else 0
    rows = plan.max_batch if plan.judges else min(plan.max_batch, asked)
    cache = plan.kv_cache_bytes
    if plan.device == "cpu":  # pages that are never written to take no memory
        own = memory.touched_cache(setting.shape, lengths, rows=min(rows, asked), dtype=plan.dtype)
        evaluated = Lengths(prompt=lengths.prompt, reply=plan.reply_tokens, group=1)
        judged = memory.touched_cache(setting.shape, evaluated, rows=rows, dtype=plan.dtype)
        cache = min(cache, max(own, judged if plan.judges else 0))
    return cache, memory.sampling_bytes(setting, prompt=lengths.prompt, rows=rows)


# ---------------------------------------------------------------- whether it fits


def limit(plan: Plan) -> int:
    """Bytes that the stage may take of the device it trains on."""
    if plan.memory_mb is not None:
        return plan.memory_mb << 20
    if plan.device == "cuda":
        return cuda_bytes() or ram_bytes()
    return ram_bytes() - memory.LIBRARIES


def check_memory(plans: Sequence[Plan]) -> None:
    """ConfigError with the largest contributors and what to change, if a stage cannot fit into the machine."""
    said = [text for plan in plans if (text := _too_large(plan))]
    if said:
        raise ConfigError("\n".join(said))


def _too_large(plan: Plan) -> str:
    found = phases(plan)
    if not found:
        return ""
    worst, most = memory.largest(found), limit(plan)
    if worst.total <= most:
        return ""
    parts = sorted(worst.parts.items(), key=lambda item: -item[1])[:4]
    told = ", ".join(f"{name} {in_words(count)}" for name, count in parts if count)
    change = "; or ".join(memory.advice(worst.parts))
    where = "machine.memory_mb" if plan.memory_mb else "the GPU" if plan.device == "cuda" else "this machine"
    return (
        f"stage '{plan.name}' takes up to {in_words(worst.total)} ({worst.name}), and {where} has {in_words(most)}: "
        f"{told}. Smaller: {change}. machine.memory_mb sets another limit"
    )
