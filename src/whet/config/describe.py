"""The plan of a run as a table: what `whet plan FILE` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from whet.config.derived import Plan

if TYPE_CHECKING:
    from rich.console import RenderableType


def describe(plans: Sequence[Plan]) -> RenderableType:
    """A column a stage: steps, batch arithmetic written out, models, memory, disk."""
    # Every run imports this file; only `whet plan` needs rich's tables.
    from rich.console import Group
    from rich.table import Table

    table = Table(title="Plan", title_justify="left", show_lines=False, pad_edge=False)
    table.add_column("")
    for plan in plans:
        table.add_column(plan.name, overflow="fold")
    columns = [facts(plan) for plan in plans]
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns))
    return Group(table, *notes(plans))


def facts(plan: Plan) -> dict[str, str]:
    """One stage in words, by label."""
    known = plan.total_steps is not None
    a = plan.algorithm
    return {
        "algorithm": f"{a.name}: advantage {a.advantage}, loss {a.loss}, {a.aggregation}",
        "source": a.source,
        "steps": f"{plan.steps}" if known else "epochs x rows / tasks per step; the rows are not read yet",
        "batch": arithmetic(plan),
        "optimizer steps": _optimizer_steps(plan) if known else f"{plan.updates_per_step} a step",
        "longest": f"{plan.prompt_tokens} prompt + {plan.reply_tokens} reply tokens",
        "models": ", ".join(
            ["policy"] + ["reference"] * plan.needs_reference + ["critic"] * plan.needs_critic
        ),
        "parameters": _count(plan),
        "evaluation": _evaluation(plan),
        "memory": _memory(plan),
        "KV cache": _kv_cache(plan),
        "disk": _disk(plan),
        "machine": f"{plan.threads} CPU threads, {plan.dtype}"
        + (" (bfloat16 on CUDA)" if plan.dtype_open else ""),
    }


def arithmetic(plan: Plan) -> str:
    """'16 tasks x 8 = 128 rollouts, 1 minibatch of 128'."""
    tasks, size = plan.tasks_per_step, plan.group_size
    what = {"online": "rollouts", "demonstrations": "demonstrations", "preferences": "replies"}[
        plan.algorithm.kind
    ]
    start = f"{tasks} {what}" if size == 1 else f"{tasks} tasks x {size} = {plan.rollouts_per_step} {what}"
    out = f"{start}, {_many(plan.minibatches, 'minibatch')} of {plan.rollouts_per_minibatch}"
    return out if plan.passes == 1 else f"{out}, {plan.passes} passes"


def _optimizer_steps(plan: Plan) -> str:
    steps = plan.steps - plan.critic_warmup_steps
    learning = (
        f"({plan.steps} - {plan.critic_warmup_steps} of critic warm-up)"
        if plan.critic_warmup_steps
        else f"{steps}"
    )
    parts = f"{learning} steps x {_many(plan.minibatches, 'minibatch')} x {_many(plan.passes, 'pass')}"
    warm = f", the first {plan.warmup_steps} warm up" if plan.warmup_steps else ""
    return f"{parts} = {plan.optimizer_steps}{warm}"


def _count(plan: Plan) -> str:
    count = plan.shape.parameters if plan.shape else None
    if count is None:
        return "not known before the model" + (" and its tokenizer are" if plan.shape else " is") + " there"
    at_most = "at most " if plan.vocab_is_bound else ""
    return f"{at_most}{count:,}"


def _evaluation(plan: Plan) -> str:
    if not plan.evaluates:
        return "none"
    s = plan.eval_sampling
    how = "greedy" if s.temperature == 0 else f"temperature {s.temperature:g}"
    return f"{how}, at most {s.max_tokens} tokens"


def _memory(plan: Plan) -> str:
    parts = plan.memory
    if not parts:
        return "not known"
    return "\n".join(
        [f"{size(sum(parts.values()))}, and activations", *(f"  {size(n)} {k}" for k, n in parts.items())]
    )


def _kv_cache(plan: Plan) -> str:
    total = plan.kv_cache_bytes
    if not plan.generates:
        return "none: nothing is sampled"
    if plan.kv_cache_mb is not None:
        return f"{size(plan.kv_cache_mb * 2**20)} (machine.kv_cache_mb)"
    rows = f"{plan.max_batch} rows x {plan.max_sequence_tokens} tokens in pages of 16"
    return rows if total is None else f"{rows} = {size(total)}"


def _disk(plan: Plan) -> str:
    if plan.checkpoint_bytes is None:
        return f"{plan.keep} checkpoints kept"
    whole = plan.keep * plan.checkpoint_bytes
    kept = f"{_many(plan.keep, 'checkpoint')} kept x {size(plan.checkpoint_bytes)} = {size(whole)}"
    return f"{kept}, and one in writing"


def notes(plans: Sequence[Plan]) -> list[str]:
    """What the table leaves open."""
    out = []
    if plans[0].shape is None:
        out.append("model.path: no such folder on this machine, so sizes are not known.")
    if any(p.total_steps is None for p in plans):
        out.append("train.epochs: the number of steps is known once the rows are read.")
    return out


def size(count: int) -> str:
    """Bytes as people say them: '1.5 GiB'."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 999.5 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"


def _many(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}{'es' if what.endswith(('s', 'ch')) else 's'}"
