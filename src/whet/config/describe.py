"""The plan of a run as a table, printed by `whet plan FILE`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from whet.config import memory_estimate
from whet.config.derived import Plan
from whet.config.evaluation import trains
from whet.config.hardware import elsewhere, has_tiles, multiplies_half
from whet.config.memory import largest
from whet.config.simulated import simulated
from whet.config.sizes import in_words as size

if TYPE_CHECKING:
    from rich.console import RenderableType


def describe(plans: Sequence[Plan]) -> RenderableType:
    """One column per stage: steps, batch arithmetic, models, memory, disk."""
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
    """The rows of one stage, by label."""
    if not trains(plan.cfg):
        return _facts_of_replies(plan)
    known = plan.total_steps is not None
    a = plan.algorithm
    return {
        "algorithm": f"{a.name}: advantage {a.advantage}, loss {a.loss}, {a.loss_agg_mode}",
        "source": a.source,
        "steps": f"{plan.steps}" if known else _unknown_steps(plan.train.steps),
        "batch": arithmetic(plan),
        "optimizer steps": _optimizer_steps(plan) if known else f"{plan.updates_per_step} per step",
        "longest": f"{plan.cfg.data.max_prompt_tokens} prompt + {plan.reply_tokens} reply tokens"
        + (f", {plan.total_tokens} together" if plan.total_tokens else ""),
        "models": "policy"
        if simulated(plan.train)
        else ", ".join(["policy", *plan.references] + ["critic"] * plan.needs_critic),
        "parameters": _count(plan),
        "evaluation": _evaluation(plan),
        "memory": _memory(plan),
        "KV cache": _kv_cache(plan),
        "disk": _disk(plan),
        "machine": _machine(plan),
    }


def _unknown_steps(given: int | None) -> str:
    """Where the epochs end is not known; they end at the given steps at the latest."""
    epochs = "epochs x rows / tasks per step; a run counts the rows when it reads them"
    return epochs if given is None else f"at most {given}: {epochs}"


def _facts_of_replies(plan: Plan) -> dict[str, str]:
    """Those of `whet generate`, and of `whet eval` of a model as it is: nothing is trained."""
    samples, out = plan.cfg.eval.samples, plan.cfg.track.dump.get("replies")
    return {
        "replies": f"{samples} to each row of data.eval, {_evaluation(plan)}"
        + (f"; to {out}" if out else ""),
        "longest": f"{plan.cfg.data.max_prompt_tokens} prompt + {plan.reply_tokens} reply tokens",
        "parameters": _count(plan),
        "memory": _memory(plan),
        "KV cache": _kv_cache(plan),
        "machine": _machine(plan),
    }


_WIDE = 256
"""Hidden size above which matrix products take most of a step."""


def _machine(plan: Plan) -> str:
    told = f"{plan.threads} CPU threads, {plan.dtype}" + (" (bfloat16 on CUDA)" if plan.dtype_open else "")
    if (other := elsewhere()) is not None and plan.device != "cpu":
        return f"{other.count} x {other.gpus} GPUs of {size(other.gpu_bytes)}, as given, {plan.dtype}"
    if plan.device != "cpu":
        return told
    wide = plan.shape is not None and plan.shape.hidden >= _WIDE
    computed = plan.train.precision.compute
    if computed and not multiplies_half(computed):
        return f"{told}; train.precision.compute={computed} is slower than float32: this CPU has no instructions for it"
    if plan.dtype != "float32" and not multiplies_half(plan.dtype):
        return f"{told}, computed in float32 and rounded: this CPU has no instructions for it"
    if plan.dtype != "float32" and plan.cfg.machine.kernels == "compiled" and not has_tiles(plan.dtype):
        return f"{told}, computed in float32 and rounded, as machine.kernels=compiled says"
    if plan.dtype == "float32" and wide and not computed and multiplies_half("bfloat16"):
        return f"{told}; model.dtype=bfloat16 would be faster: this CPU has instructions for it"
    return told


def arithmetic(plan: Plan) -> str:
    """'16 tasks x 8 = 128 rollouts, 1 minibatch of 128'."""
    size = plan.group_size
    what = {"online": "rollouts", "demonstrations": "demonstrations"}.get(plan.algorithm.kind, "replies")
    own, drawn = plan.own_tasks_per_step, plan.sampled_tasks_per_step
    start = f"{own} {what}" if size == 1 else f"{own} tasks x {size} = {own * size} {what}"
    if drawn > own:
        start += f" of {drawn} tasks"
    if plan.experts_per_step:
        start += f" and {plan.experts_per_step} demonstrations"
    out = f"{start}, {_many(plan.minibatches, 'minibatch')} of {plan.rollouts_per_minibatch}"
    if plan.passes > 1:
        out += f", {plan.passes} update epochs"
    critic = plan.critic
    if critic and (critic.minibatches, critic.update_epochs) != (plan.minibatches, plan.passes):
        out += f"; critic {_many(critic.minibatches, 'minibatch')}, {_many(critic.update_epochs, 'update epoch')}"
    return out


def _optimizer_steps(plan: Plan) -> str:
    if (how := simulated(plan.train)) is not None:
        return f"none: each training step waits {how.step_s:g} s (train.engine=simulated)"
    steps = plan.steps - plan.critic_warmup_steps
    learning = (
        f"({plan.steps} - {plan.critic_warmup_steps} of critic warm-up)"
        if plan.critic_warmup_steps
        else f"{steps}"
    )
    parts = (
        f"{learning} steps x {_many(plan.minibatches, 'minibatch')} x {_many(plan.passes, 'update epoch')}"
    )
    parts = f"lr {plan.optimizer.lr:g}, {parts}"
    unit = "training steps " if plan.optimizer.schedule.unit == "train_step" else ""
    warm = f", the first {plan.warmup_steps} {unit}warm up" if plan.warmup_steps else ""
    return f"{parts} = {plan.optimizer_steps}{warm}"


def _count(plan: Plan) -> str:
    count = plan.shape.parameters if plan.shape else None
    if count is None:
        return "not known until the model" + (" and its tokenizer exist" if plan.shape else " exists")
    at_most = "at most " if plan.vocab_is_bound else ""
    learns = plan.learns
    if learns is None or learns.learned == learns.base:
        return f"{at_most}{count:,}"
    adapters = f" and {learns.adapters:,} in adapters" if learns.adapters else ""
    return f"{at_most}{count:,}{adapters}; {learns.learned:,} trained"


def _evaluation(plan: Plan) -> str:
    if not plan.evaluates:
        return "none"
    if not plan.judges:
        return "the loss of the given replies"
    s = plan.eval_sampling
    how = "greedy" if s.temperature == 0 else f"temperature {s.temperature:g}"
    return f"{how}, at most {s.max_tokens} tokens"


def _memory(plan: Plan) -> str:
    found = memory_estimate.phases(plan)
    if not found:
        return "not known"
    most = largest(found)
    told = [f"at most {size(most.total)} of {size(memory_estimate.limit(plan))}, in the {most.name}"]
    told += [f"  {size(n)} {k}" for k, n in sorted(most.parts.items(), key=lambda item: -item[1]) if n]
    peaks = {phase.name: max(p.total for p in found if p.name == phase.name) for phase in found}
    others = ", ".join(f"{name} {size(total)}" for name, total in peaks.items() if name != most.name)
    kept = (
        ["a process keeps memory that it frees, so it may take up to half more"]
        if plan.device == "cpu"
        else []
    )
    return "\n".join([*told, *([others] if others else []), *_others(plan), *kept])


def _others(plan: Plan) -> list[str]:
    """Ranks and replicas, one line each."""
    return [
        f"{place.name} of {place.count}: at most {size(place.most.total)}, in the {place.most.name} ("
        + ", ".join(
            f"{size(n)} {k}" for k, n in sorted(place.most.parts.items(), key=lambda x: -x[1])[:4] if n
        )
        + ")"
        for place in memory_estimate.places(plan)[1:]
    ]


def _kv_cache(plan: Plan) -> str:
    total = plan.kv_cache_bytes
    if not plan.generates:
        return "none: nothing is sampled"
    if plan.cfg.machine.kv_cache_mb is not None:
        return f"{size(plan.cfg.machine.kv_cache_mb * 2**20)} (machine.kv_cache_mb)"
    rows = f"{plan.cfg.rollout.max_num_seqs} rows x {plan.max_sequence_tokens} tokens in pages of 16"
    return rows if total is None else f"{rows} = {size(total)}"


def _disk(plan: Plan) -> str:
    if plan.checkpoint_bytes is None:
        return f"{plan.cfg.checkpoint.keep or 'all'} checkpoints kept"
    if plan.cfg.checkpoint.keep is None:
        return f"every checkpoint kept, {size(plan.checkpoint_bytes)} each"
    whole = plan.cfg.checkpoint.keep * plan.checkpoint_bytes
    kept = f"{_many(plan.cfg.checkpoint.keep, 'checkpoint')} kept x {size(plan.checkpoint_bytes)} = {size(whole)}"
    return f"{kept}, and one being written"


def notes(plans: Sequence[Plan]) -> list[str]:
    """Notes below the table: values that are not known, and warnings."""
    out = []
    if plans[0].shape is None:
        out.append("model.path: no such folder on this machine, so sizes are not known.")
    if any(p.total_steps is None and trains(p.cfg) for p in plans):
        out.append("train.epochs: the number of steps is known after the rows are read.")
    out += [
        f"{p.name}: the warm-up of {p.warmup_steps} steps is longer than the stage ({p.schedule_steps} steps): the "
        "learning rate never reaches its peak."
        for p in plans
        if p.total_steps is not None and p.warmup_steps > p.schedule_steps
    ]
    return out


def _many(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}{'es' if what.endswith(('s', 'tch')) else 's'}"
