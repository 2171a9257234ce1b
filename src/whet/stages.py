"""The stages of a run, one after the other: each is opened from its config, resumed, run, exported."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from whet.algos.recipes import build as build_algorithm
from whet.config.evaluation import evaluates
from whet.config.faults import EachStage, of_stage
from whet.config.groups import experts_per_step, sampled_tasks
from whet.config.memory_estimate import out_of_memory, reused_tokens
from whet.config.plan import Plan, tasks_of
from whet.config.plan import plan as make_plan
from whet.config.recipes import resolve
from whet.config.resuming import fingerprint
from whet.config.simulated import simulated
from whet.config.source_faults import in_words_of
from whet.context import Context
from whet.data.chat import lacking_header
from whet.data.demonstrations import Demonstrations, open_demonstrations
from whet.data.tasks import TaskStream, eval_tasks, learned_turns
from whet.evaluation import check_sources, judging
from whet.explorer import Explorer, open_explorer, replay_of
from whet.guard.printed import CONSOLE
from whet.job import Job, Models, Opening
from whet.learner import Learner, Sampled, open_learner, reprompter
from whet.loop import steps
from whet.placement import open_ranks
from whet.recorder import check_metrics, open_recorder
from whet.rewards.combine import RewardSet, check_columns
from whet.rollout.engine import WeightUpdate
from whet.rollout.episode import sampling_by_source
from whet.rollout.native.engine import NativeEngine
from whet.simulated_learner import open_simulated
from whet.stage import Stage
from whet.track.monitor import Monitor
from whet.track.timeline import OPEN_STAGE, START_UP, STEPS
from whet.trained_models import ReferenceChoice, check_models
from whet.training.profile import Profiler
from whet.training.reuse import Reuse
from whet.training.torch import TorchEngine
from whet.types import ConfigError, Json, Task, WhetError
from whet.weights import Weights, open_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageEnd:
    """What a stage leaves to the next one, beside the model."""

    version: int = 0
    exact: bool = True
    """No step has found sampled log-probs that differ from the trainer's."""


async def run_all(job: Job, start: Path | None, state: Json, *, ahead: bool = True) -> None:
    """Run every stage from the checkpoint `start` (None: from the beginning) to the end, or until a stop is requested.

    state: the result of `checkpoint.read_state` for `start`. ahead: check the models of all stages first: what is wrong
    with those of the last one is told now, not after the stages before it.
    """
    first = state["stage"] if start else 0
    timeline, ended = job.records.directory.timeline, StageEnd(exact=job.models.exact)
    timeline.at = job.loaded.names[first], state["step"] if start else 0
    timeline.since(timeline.opened_ns, START_UP, STEPS)
    try:
        with EachStage(job.loaded.names) as stage:
            for index in job.begun if ahead else ():
                with stage(index):
                    check(job, job.begun[index])
        for index in range(first, len(job.loaded.stages)):
            checked = ahead and index == first
            ended = await run_stage(job, index, ended, start=start, state=state, checked=checked)
            start = None
            if job.records.stop.requested:
                return
    finally:
        await job.close()


async def run_stage(
    job: Job, index: int, before: StageEnd, *, start: Path | None, state: Json, checked: bool
) -> StageEnd:
    """One stage, from its beginning or from a checkpoint; its models and optimizers end with it. checked: its models
    were just now; an earlier stage may have changed the folders of those of a later one."""
    try:
        with of_stage(job.loaded.names, index):
            return await _run_stage(job, index, before, start=start, state=state, checked=checked)
    except (RuntimeError, MemoryError, WhetError) as error:
        if not ran_out(error):
            raise
        name = f"stages.{job.loaded.names[index]}." if job.loaded.config.stages else ""
        raise WhetError(out_of_memory(job.plans[index], name, str(error))) from error


async def _run_stage(
    job: Job, index: int, before: StageEnd, *, start: Path | None, state: Json, checked: bool
) -> StageEnd:
    timeline, done = job.records.directory.timeline, None
    timeline.at = job.loaded.names[index], state["step"] if start else 0
    with ExitStack() as ranks:  # they end with the stage, also where it cannot begin
        with timeline.span(OPEN_STAGE, STEPS):
            await give_back(job.models, job.plans[index])
            begun = job.begun.pop(index, None) or await begin(job, index)
            begun.context.monitor.begin()
            if not checked:
                check(job, begun)
            tell(begun, job.tokenizer)
            stage, profiler = open_stage(job, begun, before, ranks)
            if start is not None:
                done = stage.restore(start, state, changed=job.change)
        learner, saver = stage.learner, job.records.saver
        job.models.environments.at(index, done or 0)
        job.records.display.stage(index, done=done or 0, steps=stage.context.plan.steps)
        stage.explorer.tell("code", dict(job.loaded.code))
        stage.explorer.tell("lease_s", stage.context.cfg.buffer.lease_s)
        if not stage.ended:
            stage.explorer.tell("finished", None)  # as it was said of a stage that has more steps now
        stage.explorer.tell("began", await stage.weights.begin(resumed=start is not None))
        try:
            async for _ in steps(stage, done, profiled=profiler.step):
                pass
            job.models.policy.keep(learner.policy)  # what ranks have learned outlives them
            if learner.ranks:
                saver.wait()  # they may still be writing
            profiler.close()
            if not stage.context.stopping:
                stage.explorer.ledger.check_learned()
            if stage.ended:
                stage.explorer.tell("stopped_early", stage.recorder.ended_early())
                stage.explorer.tell("finished", stage.context.plan.steps)
        finally:
            await stage.close()
            if learner.ranks:
                saver.settle()
    if stage.context.cfg.checkpoint.export and not job.records.stop.requested:
        stage.recorder.export(stage.context.plan.steps, final=True)
    return StageEnd(learner.version, learner.exact)


OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "can't allocate memory", "not enough memory")
"""Messages of allocators: CUDA's, the CPU's, and those that ranks pass on."""


def ran_out(error: Exception) -> bool:
    """Whether an error is an allocator's, here or in a rank; errors of rewards do not count."""
    said = f"{type(error).__name__}: {error}"
    foreign = isinstance(error, WhetError) and not said.startswith("WhetError: rank ")
    return isinstance(error, MemoryError) or (not foreign and any(words in said for words in OUT_OF_MEMORY))


# ---------------------------------------------------------------- one stage


NO_TEMPLATE = (
    "the prompts of {sources} are plain text, so the model's chat template is not applied to them. To apply it: "
    "data.chat=true, or a system_prompt of the source, or prompts that are lists of messages. data.chat=false keeps "
    "them plain without this note"
)


NO_HEADER = (
    "the chat template writes {header!r} before a reply in a conversation, but not after a prompt that waits for one "
    "(it ignores add_generation_prompt), so replies are sampled and learned without it. If the model expects it, add "
    "it to the template (tokenizer.chat_template): {{% if add_generation_prompt %}}...{{% endif %}}"
)


@dataclass(frozen=True)
class Begun:
    """What a stage is opened from: its data is read."""

    context: Context
    tasks: TaskStream
    held_out: list[Task]
    demonstrations: Demonstrations | None
    """Of a mix, for the process that trains."""
    drawn: int
    """Tasks that a step draws."""


async def read_ahead(job: Opening, indices: Iterable[int]) -> dict[int, Any]:
    """The data of these stages, as `begin` gives it; with mode=eval, as `begin_evaluation` does. What is wrong with
    that of the last one is told now, before models are read and not after the stages before it."""
    found: dict[int, Any] = {}
    with EachStage(job.loaded.names) as stage:
        for index in indices:
            if stage.failed and job.loaded.stages[index].data != job.loaded.stages[index - 1].data:
                break  # reading it may take long, and would not show the same error
            with stage(index):
                evaluates_alone = job.loaded.config.mode == "eval"
                found[index] = begin_evaluation(job, index) if evaluates_alone else await begin(job, index)
    return found


def begin_evaluation(job: Opening, index: int) -> tuple[Context, list[Task]]:
    """Read the held-out data of a stage, and no other: what it learned from may be gone."""
    cfg, name = job.loaded.stages[index], job.loaded.names[index]
    records = job.records
    algorithm = build_algorithm(cfg.algorithm, critic=cfg.critic, max_tokens=cfg.rollout.sampling.max_tokens)
    records.display.phase("read data")
    turns = learned_turns(cfg.data, algorithm.kind)
    tokenizer = job.tokenizer
    longest = None  # of held-out replies: where one may not be too long, its row is named
    if algorithm.kind != "online" and evaluates(cfg) and cfg.data.overlong == "error":
        longest = cfg.rollout.sampling.max_tokens
    held_out = []
    if cfg.data.eval:
        with in_words_of(job.loaded, index):
            held_out = eval_tasks(
                cfg.data.eval, cfg.data, tokenizer=tokenizer, turns=turns, max_response_tokens=longest
            )
    check_sources(cfg.eval.sources, held_out)
    monitor = Monitor(name, records.display, records.watch, records.directory.timeline)
    return Context(cfg, job.plans[index], name, index, algorithm, monitor, records.stop), held_out


async def begin(job: Opening, index: int) -> Begun:
    """Read the data of a stage. The process that trains finds what is wrong with it, too."""
    context, held_out = begin_evaluation(job, index)
    cfg, name, algorithm = context.cfg, context.name, context.algorithm
    tokenizer, turns = job.tokenizer, learned_turns(cfg.data, algorithm.kind)
    parts = resolve(cfg.algorithm)
    drawn = sampled_tasks(cfg.train.tasks_per_step - experts_per_step(cfg, parts), parts)
    with in_words_of(job.loaded, index):
        tasks = TaskStream(
            cfg.data.train,
            cfg.data,
            tokenizer=tokenizer,
            seed=cfg.seed,
            exclude=held_out if cfg.data.exclude_eval else (),
            max_response_tokens=None if algorithm.kind == "online" else cfg.rollout.sampling.max_tokens,
            multiple_of=drawn if cfg.train.drop_last is True else 1,
            turns=turns,
            learned=None if algorithm.kind == "online" else algorithm.kind,
            ends=job.ends,
        )
        if algorithm.kind == "online" and (unknown := tasks.unknown(cfg.rollout.sources)):
            raise ConfigError(f"rollout.sources.{unknown[0]}: no row of data.train has this source")
        plan = make_plan(cfg, rows=tasks.rows_per_epoch, name=name)
        context, demonstrations = replace(context, plan=plan), None
        if cfg.mode != "explore":
            demonstrations = open_demonstrations(cfg, tokenizer, ends=job.ends, held_out=held_out)
            await check_rows(context, tasks, held_out, job.rewards[index])
    return Begun(context, tasks, held_out, demonstrations, drawn)


def tell(begun: Begun, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log what the data of a stage is, and how far the stage goes through it."""
    context, tasks = begun.context, begun.tasks
    cfg, name, steps = context.cfg, context.name, context.plan.steps
    log.info("stage %s: %s", name, ", ".join(f"{k} {v}" for k, v in tasks.counts.items()))
    if cfg.model.path and cfg.data.chat is None and tokenizer.chat_template and (plain := tasks.plain_text()):
        log.warning("stage %s: %s", name, NO_TEMPLATE.format(sources=", ".join(plain)), extra={CONSOLE: True})
    if tasks.has_chats and (header := lacking_header(tokenizer)):
        log.warning("stage %s: %s", name, NO_HEADER.format(header=header), extra={CONSOLE: True})
    rows, epochs, reached = tasks.rows_per_epoch, cfg.train.epochs, steps * begun.drawn
    if epochs and reached != (wanted := tasks_of(rows, epochs)):
        asked = f"{epochs:g} epochs of {rows} rows are {float(wanted):g} tasks"
        log.info("stage %s: %s; %d steps of %d are %d", name, asked, steps, begun.drawn, reached)
    if len(passes := tasks.passes(reached)) > 1:
        told = ", ".join(f"{source} {times:.3g}" for source, times in passes.items())
        log.info("stage %s: times that %d tasks pass through each source: %s", name, reached, told)


async def check_rows(
    context: Context, tasks: TaskStream, held_out: Sequence[Task], rewards: RewardSet
) -> None:
    """Find what a stage would end at a later step with: names that rows or evaluations do not have."""
    cfg, algorithm = context.cfg, context.algorithm
    if algorithm.kind == "online":
        await check_columns(tasks.widest, rewards)
    if context.plan.evaluates:
        await check_columns(held_out, judging(cfg, rewards))
        check_metrics(context, held_out, rewards)
    replay_of(cfg, context.plan)
    if simulated(cfg.train) is None and algorithm.needs_reference and cfg.reference.models:
        choose = ReferenceChoice.of(cfg.reference)
        for task in tasks.each() if cfg.reference.column else tasks.widest:
            choose.number(task)


def check(job: Job, begun: Begun) -> None:
    """Find what a stage cannot begin with beside its data: models, and the user's code."""
    context = begun.context
    if simulated(context.cfg.train) is None:
        check_models(context, job.models)
        reprompter(context, job.models)


def open_stage(job: Job, begun: Begun, before: StageEnd, stack: ExitStack) -> tuple[Stage, Profiler]:
    """The four parts of a stage. The policy starts from what the stage before left in the model. Ranks end with the
    stack."""
    context, models, records = begun.context, job.models, job.records
    rewards, given = job.rewards[context.index], fingerprint(job.loaded.as_given)
    ranks = open_ranks(models, context.cfg, context.plan, records.display)
    for each in ranks.values():
        stack.callback(each.close)
    profiler = Profiler(
        context.cfg.profile,
        records.directory.path / "profile",
        stage=context.name,
        device=models.model.device,
        tell=(lambda *what: [each.ask(*what) for each in ranks.values()]) if ranks else None,
    )
    context.monitor.profiled = profiler.range
    explorer = open_explorer(context, models, begun.tasks, rewards, fingerprint=given)
    replay = explorer.buffer.replay
    how = simulated(context.cfg.train)
    reused = None if replay is None else lambda: explorer.buffer.reused
    exact = models.exact and before.exact
    learner: Learner
    if how is not None:
        learner = open_simulated(context, models, how, exact=exact, reused=reused)
    else:
        learner = open_learner(
            context, models, ranks=ranks, demonstrations=begun.demonstrations, exact=exact, reused=reused
        )
    learner.policy.version = before.version
    share_activations(context, models, explorer, learner)
    weights = open_weights(context, models, learner.policy, records.directory.path, ranks=ranks)
    models.place.clear()
    learner.sampled = how_sampled(context, weights, replays=replay is not None)
    return Stage(
        context, explorer, learner, weights, open_recorder(context, job, learner, begun.held_out)
    ), profiler


async def give_back(models: Models, plan: Plan) -> None:
    """Free what the stage before has left to the engine, its copy of the policy and its KV cache, before models and
    optimizers are made. A stage that samples nothing has no cache."""
    engine = models.engine
    if isinstance(engine, NativeEngine):
        if not engine.quantized:
            await engine.update_weights(WeightUpdate(version=engine.version, module=models.model))
        await engine.place("cpu", frozenset({"cache"}))
        if plan.generates:
            await engine.place("gpu", frozenset({"cache"}))


def share_activations(context: Context, models: Models, explorer: Explorer, learner: Learner) -> None:
    """Where sampling and training are one computation, the update begins with what sampling has computed. The room is
    the stage's own: what the one before has kept is freed."""
    engine, policy, rows = models.engine, learner.policy, reused_tokens(context.plan)
    if not isinstance(engine, NativeEngine) or (kept := engine.kept) is None:
        return
    kept.resize(0)
    if not (rows and learner.exact and isinstance(policy, TorchEngine)):
        return
    try:
        kept.resize(rows)
    except MemoryError as error:  # of addresses (ulimit -v): the memory itself is taken as tokens come
        log.warning("the update computes again what sampling has computed: %s", error)
        return
    explorer.keeping = engine.keeping
    policy.reuse = learner.reuse = Reuse(kept, policy.decoder, policy.ops)


def how_sampled(context: Context, weights: Weights, *, replays: bool) -> Sampled:
    """Whether rollouts come from the distribution that is trained."""
    cfg = context.cfg
    in_turn = context.plan.mode == "synchronous" and weights.sampler is None
    cast = weights.out is not None and weights.out.dtype is not None
    temperatures = {
        cfg.rollout.sampling.temperature,
        *(s.temperature for s in sampling_by_source(cfg.rollout).values()),
    }
    return Sampled(
        older=not in_turn or cast or replays,
        same_temperature=cfg.train.temperature is None or temperatures == {cfg.train.temperature},
    )
