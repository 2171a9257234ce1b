"""The stages of a run, one after the other: each is built from its config, resumed, run, exported."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from whet import seeds
from whet.algos.groups import refine, uninformative
from whet.algos.recipes import Algorithm
from whet.algos.recipes import build as build_algorithm
from whet.algos.skipping import skipping
from whet.buffer.buffer import Buffer
from whet.buffer.priority import priority
from whet.buffer.queue import TrainerQueue
from whet.buffer.replay import Replay
from whet.buffer.rounds import Rounds
from whet.buffer.stores import open_store
from whet.config.evaluation import Asked, evaluates, judges
from whet.config.footprint import out_of_memory
from whet.config.mixing import experts_per_step
from whet.config.plan import Plan
from whet.config.plan import plan as make_plan
from whet.config.recipes import Resolved, resolve
from whet.config.resuming import fingerprint, played_by
from whet.config.schema import Config
from whet.data.chat import encode_response
from whet.data.experts import Experts
from whet.data.tasks import (
    TaskStream,
    demonstration,
    eval_tasks,
    labelled,
    learned_turns,
    preference_pair,
    reply_limit,
)
from whet.evaluate import Ask, check_sources
from whet.explorers import Explorers
from whet.guard.ledger import Ledger
from whet.held_out import given
from whet.loop import draw, explore, steps
from whet.models.exports import writer
from whet.models.load import build as build_model
from whet.models.load import value_head
from whet.models.lora import attach, merged, twin
from whet.models.trainable import choose
from whet.placement import engine_of, open_ranks
from whet.rollout.episode import Pace, play_groups, to_sampling
from whet.run import Run, StopFlag
from whet.shared import Shared, decoder_of, end_tokens
from whet.sync.exchange import Publisher, publisher_of
from whet.sync.files import Files
from whet.sync.weights import sync
from whet.track.timeline import OPEN_STAGE, START_UP, STEPS, Kind
from whet.training.cut import Cut
from whet.training.profile import Profiler
from whet.training.ranks import RankGroup, Ranks
from whet.training.throughput import meter_of
from whet.training.torch import MICRO_BATCH, FullKl, TorchEngine
from whet.types import Group, Json, Sampling, Task, WhetError

log = logging.getLogger(__name__)


async def run_all(shared: Shared, start: Path | None, state: Json) -> None:
    """Run every stage from the checkpoint `start` (None: from the beginning) to the end, or until a stop is requested.

    state: the result of `checkpoint.read_state` for `start`.
    """
    first = state["stage"] if start else 0
    timeline = shared.directory.timeline
    timeline.at = shared.loaded.names[first], state["step"] if start else 0
    timeline.since(timeline.opened_ns, START_UP, STEPS)
    try:
        for index in range(first, len(shared.loaded.stages)):
            await run_stage(shared, index, start=start, state=state)
            start = None
            if shared.stop.requested:
                return
    finally:
        shared.environments.close()
        if shared.engine is not None:
            await shared.engine.close()


async def run_stage(shared: Shared, index: int, *, start: Path | None, state: Json) -> None:
    """One stage, from its beginning or from a checkpoint; its models and optimizers end with it."""
    try:
        await _run_stage(shared, index, start=start, state=state)
    except (RuntimeError, MemoryError, WhetError) as error:
        if not ran_out(error):
            raise
        name = f"stages.{shared.loaded.names[index]}." if shared.loaded.config.stages else ""
        raise WhetError(out_of_memory(shared.plans[index], name, str(error))) from error


async def _run_stage(shared: Shared, index: int, *, start: Path | None, state: Json) -> None:
    timeline = shared.directory.timeline
    timeline.at = shared.loaded.names[index], state["step"] if start else 0
    with timeline.span(OPEN_STAGE, STEPS):
        run = open_stage(shared, index)
        if start is not None:
            run.restore(start, state, changed=shared.change)
    shared.display.stage(index, done=run.step, steps=run.plan.steps)
    if start is None or run.sampler is None:
        sampled, first = run.policy, sync(run.policy, run.engine, through=run.sampler, out=run.out)
    else:  # the sampler stands at the last sync, the policy has moved on
        sampled, first = run.sampler, sync(run.sampler, run.engine, out=run.out)
    await run.wait(first, "the first weight sync", within=run.sync_deadline)
    run.tell("began", sampled.version)
    try:
        async for _ in steps(run):
            pass
        _ = run.policy.module  # what ranks have learned comes home
        if run.ranks:
            run.saver.wait()  # they may still be writing
        run.profiler.close()
        if not run.stopping:
            run.ledger.check_learned()
        if run.ends:
            run.tell("finished", run.policy.version)
    finally:
        await run.close()
        if run.ranks:
            run.saver.settle()
        for ranks in run.ranks.values():
            ranks.close()
    shared.version, shared.exact = run.policy.version, run.exact
    if run.cfg.checkpoint.export and not shared.stop.requested:
        run.export(final=True)


OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "can't allocate memory", "not enough memory")
"""Messages of allocators: CUDA's, the CPU's, and those that ranks pass on."""


def ran_out(error: Exception) -> bool:
    """Whether an error is an allocator's, here or in a rank; errors of rewards do not count."""
    said = f"{type(error).__name__}: {error}"
    foreign = isinstance(error, WhetError) and not said.startswith("WhetError: rank ")
    return isinstance(error, MemoryError) or (not foreign and any(words in said for words in OUT_OF_MEMORY))


# ---------------------------------------------------------------- one stage


def open_stage(shared: Shared, index: int, *, explores: bool = False) -> Run:
    """The live parts of one stage. The policy starts from what the stage before left in the shared module. explores:
    nothing is trained in this process, so there are no optimizer, reference and critic."""
    cfg, name = shared.loaded.stages[index], shared.loaded.names[index]
    tokenizer = shared.tokenizer
    algorithm = build_algorithm(cfg.algorithm, critic=cfg.critic, max_tokens=cfg.rollout.sampling.max_tokens)
    experts = experts_per_step(cfg, resolve(cfg.algorithm))
    shared.display.phase("read data")
    turns = learned_turns(cfg.data, algorithm.kind)
    held_out = eval_tasks(cfg.data.eval, cfg.data, tokenizer=tokenizer, turns=turns) if cfg.data.eval else []
    check_sources(cfg.eval.sources, held_out)
    stream = TaskStream(
        cfg.data.train,
        cfg.data,
        tokenizer=tokenizer,
        seed=cfg.seed,
        exclude=held_out if cfg.data.exclude_eval else (),
        max_response_tokens=None if algorithm.kind == "online" else cfg.rollout.sampling.max_tokens,
        multiple_of=cfg.train.tasks_per_step - experts if cfg.train.drop_last is True else 1,
        turns=turns,
    )
    log.info("stage %s: %s", name, ", ".join(f"{k} {v}" for k, v in stream.counts.items()))
    plan = make_plan(cfg, rows=stream.rows_per_epoch, name=name)
    ledger = Ledger()
    ranks = {} if explores else open_ranks(shared, cfg, plan)
    if explores:
        cut = _cut(shared, cfg, algorithm)
        policy = TorchEngine(shared.model.requires_grad_(False), shared.ops, cut=cut)
    else:
        policy = _policy(shared, cfg, plan, algorithm, ranks=ranks)
    trains = not explores
    run = Run(
        cfg=cfg,
        plan=plan,
        name=name,
        index=index,
        tasks=stream,
        eval_tasks=held_out,
        eval_given=held_out_replies(cfg, algorithm, held_out, tokenizer=tokenizer),
        play=_player(
            shared,
            cfg,
            to_sampling(cfg.rollout.sampling),
            size=cfg.rollout.group_size,
            purpose=f"train/{name}",
            pace=Pace(cfg.rollout.timeout_s, cfg.rollout.timeout_factor),
        ),
        play_greedy=_player(
            shared,
            cfg,
            replace(to_sampling(cfg.rollout.sampling), temperature=0.0),
            size=1,
            purpose=f"train/{name}/greedy",
        ),
        ask=_asker(shared, cfg),
        read=reader(cfg, algorithm, tokenizer),
        experts=_experts(cfg, algorithm, tokenizer, count=experts, held_out=held_out),
        rewards=shared.rewards[index],
        buffer=_buffer(cfg, plan, ledger, shared.stop),
        ledger=ledger,
        algorithm=algorithm,
        skipping=skipping(plan.algorithm, cfg.train),
        policy=policy,
        reference=_reference(shared, cfg, policy, ranks=ranks)
        if algorithm.needs_reference and trains
        else None,
        critic=_critic(shared, cfg, plan, ranks=ranks) if algorithm.needs_critic and trains else None,
        ranks=ranks,
        engine=shared.engine,
        sampler=shared.sampler,
        exact=shared.exact,
        env_timings=shared.environments.timings,
        profiler=_profiler(shared, cfg, name, ranks=ranks),
        write_export=partial(_export, policy, writer(cfg, shared.model, shared.tokenizer)),
        saver=shared.saver,
        uploads=shared.uploads,
        directory=shared.directory,
        trackers=shared.trackers,
        display=shared.display,
        stop=shared.stop,
        watch=shared.watch,
        fingerprint=fingerprint(shared.loaded.as_given),
        kl_coef=algorithm.kl_coef,
    )
    if cfg.mode == "train" and algorithm.kind == "online":
        _meet_explorers(run)
    run.explorers = Explorers(run.buffer, partial(draw, run), partial(explore, run))
    policy.version = shared.version
    _join(run, shared, trains=trains)
    return run


def _meet_explorers(run: Run) -> None:
    """Where explorers in separate processes get weights from and, with the deterministic schedule, their tasks."""
    cfg = run.cfg
    run.out = _publisher(cfg, run.directory.path)
    if run.plan.mode != "train":
        store = open_store(cfg.buffer.url, queue=queue_name(cfg, run.name), order=cfg.buffer.order)
        run.rounds = Rounds(store)
        run.rounds.claim(played_by(run.fingerprint))


def _profiler(shared: Shared, cfg: Config, name: str, *, ranks: Mapping[str, Ranks]) -> Profiler:
    """Of the stage `name`."""

    def tell(*what: object) -> None:
        for each in ranks.values():
            each.ask(*what)  # type: ignore[arg-type]

    return Profiler(
        cfg.profile,
        shared.directory.path / "profile",
        stage=name,
        device=shared.model.device,
        tell=tell if ranks else None,
    )


def _join(run: Run, shared: Shared, *, trains: bool) -> None:
    """Tell the models of each other, and of who watches them. trains: not a process that only explores."""
    if run.algorithm.full_kl_coef and run.reference is not None:
        run.policy.full_kl = FullKl(run.algorithm.full_kl_coef, run.reference, run.algorithm.top_k)
    if trains and run.skipping.why:
        log.info("stage %s: rollouts whose weight in the gradient is 0: %s", run.name, run.skipping.why)
    if trains:
        run.meter = meter_of(
            run.policy, run.critic, train=run.cfg.train, of_critic=run.plan.critic, devices=run.trainers
        )
    skip = None if run.cfg.track.micro_batches else MICRO_BATCH
    for lane, trained in (("policy", run.policy), ("reference", run.reference), ("critic", run.critic)):
        if trained is not None:
            trained.beat = shared.watch.beat
            kind: Kind = "asked" if isinstance(trained, RankGroup) else "work"
            trained.span = shared.directory.timeline.spans_of(lane, skip=skip, kind=kind)
    for ranks in run.ranks.values():
        ranks.show_on(shared.directory.timeline, micro_batches=run.cfg.track.micro_batches)


def _buffer(cfg: Config, plan: Plan, ledger: Ledger, stop: StopFlag) -> Buffer:
    if plan.mode == "train":
        store = open_store(cfg.buffer.url, queue=queue_name(cfg, plan.name), order=cfg.buffer.order)
        # it answers to everything that is asked of a Buffer where groups come from elsewhere
        return cast(
            Buffer,
            TrainerQueue(
                store,
                groups_per_step=plan.own_tasks_per_step,
                max_staleness=cfg.rollout.max_staleness + cfg.rollout.sync_interval - 1,
                ledger=ledger,
                stopping=lambda: stop.requested,
                replay=_replay(cfg, plan),
            ),
        )
    return Buffer(
        groups_per_step=plan.own_tasks_per_step,
        group_size=plan.group_size,
        max_staleness=cfg.rollout.max_staleness + cfg.rollout.sync_interval - 1,
        spare=cfg.rollout.spare_tasks if plan.mode == "asynchronous" else 0,
        **grouping(cfg, plan),
        replay=_replay(cfg, plan),
        share=None if cfg.buffer.replay.queue else cfg.buffer.replay.share,
        copies=plan.algorithm.refill == "copy",
        ledger=ledger,
    )


def _replay(cfg: Config, plan: Plan) -> Replay | None:
    """Groups that are trained on again, if a share of a step is replayed, or fresh and used groups share one queue."""
    wanted = cfg.buffer.replay
    if not (wanted.share or wanted.queue) or plan.algorithm.kind != "online":
        return None
    settings = {"decay": wanted.decay, "use_limit": wanted.use_limit, "sigma": wanted.sigma}
    return Replay(
        capacity=wanted.capacity,
        priority=priority(wanted.priority, settings),
        cooldown_steps=wanted.cooldown_steps,
        cooldown_s=wanted.cooldown_s,
        max_staleness=wanted.max_staleness,
        fresh_staleness=cfg.rollout.max_staleness + cfg.rollout.sync_interval - 1,
        seed=seeds.key(cfg.seed, "replay", plan.name),
    )


def grouping(cfg: Config, plan: Plan) -> dict[str, Any]:
    """How a buffer turns scored groups into training groups."""
    weights = {name: reward.weight for name, reward in cfg.rewards.items()}
    return {
        "refine": partial(refine, cfg=plan.algorithm.groups),
        "reject": partial(rejection, algorithm=plan.algorithm, weights=weights),
    }


def queue_name(cfg: Config, stage: str) -> str:
    """What the groups of a stage are found by in a store that several runs may use."""
    return f"{cfg.name}/{stage}"


def _publisher(cfg: Config, run_dir: Path) -> Publisher:
    """Where explorers in separate processes get the weights from."""
    files = Files(run_dir / "weights", timeout_s=cfg.sync.timeout_s, keep=cfg.sync.keep)
    files.tidy()
    return publisher_of(cfg, files)


def _export(policy: TorchEngine, write: Callable[[Path], None], path: Path) -> None:
    """Write the policy as it now is: where ranks train, it has to come home first."""
    _ = policy.module
    write(path)


def _cut(shared: Shared, cfg: Config, algorithm: Algorithm) -> Cut:
    """How the policy's batches are split."""
    return Cut.of(
        cfg.train,
        shared.model,
        whole_groups=algorithm.whole_groups,
        entropy_grad=algorithm.entropy_grad,
        temperature=trained_temperature(cfg, algorithm),
    )


def _policy(
    shared: Shared, cfg: Config, plan: Plan, algorithm: Algorithm, *, ranks: Mapping[str, Ranks]
) -> TorchEngine:
    choose(shared.model, cfg.train.trainable)
    return engine_of(
        shared,
        cfg,
        "policy",
        shared.model,
        ranks=ranks,
        cut=_cut(shared, cfg, algorithm),
        optimizer=cfg.train.optimizer,
        total_steps=plan.optimizer_steps,
        updates_per_step=plan.updates_per_step,
        max_skipped=cfg.train.max_skipped_steps,
        seed=seeds.key(cfg.seed, "policy", plan.name),
        rests="policy" in cfg.train.offload,
    )


def _reference(
    shared: Shared, cfg: Config, policy: TorchEngine, *, ranks: Mapping[str, Ranks]
) -> TorchEngine:
    """Frozen: from its folder, or a copy of the current policy."""
    path, overrides = cfg.reference.path, cfg.reference.overrides
    model = twin(shared.model) if path is None else _model_at(shared, cfg, path, overrides=overrides)
    rests = "reference" in cfg.train.offload
    model = model.requires_grad_(False)
    return engine_of(shared, cfg, "reference", model, ranks=ranks, cut=policy.cut, rests=rests)


def _critic(shared: Shared, cfg: Config, plan: Plan, *, ranks: Mapping[str, Ranks]) -> TorchEngine:
    train = plan.critic
    assert train is not None, "planned without a critic"
    path, name = cfg.critic.path, cfg.critic.head
    if path is None:
        model = copy.deepcopy(merged(shared.model)).requires_grad_(True)
    else:
        model = _model_at(shared, cfg, path, overrides=cfg.critic.overrides, head=name)
    if cfg.critic.lora is not None:
        attach(model, cfg.critic.lora, seed=seeds.key(cfg.seed, "critic"), key="critic.lora")
    head = value_head(model.config.hidden_size, cfg.seed, path=path, name=name).to(model.device, model.dtype)
    cut = Cut.of(train, model, whole_groups=False, entropy_grad=False, temperature=1.0, critic=True)
    return engine_of(
        shared,
        cfg,
        "critic",
        model,
        ranks=ranks,
        cut=cut,
        value_head=head,
        whole=path is None,
        optimizer=train.optimizer,
        total_steps=plan.critic_optimizer_steps,
        updates_per_step=plan.critic_updates_per_step,
        max_skipped=cfg.train.max_skipped_steps,
        seed=seeds.key(cfg.seed, "critic", plan.name),
        rests="critic" in cfg.train.offload,
    )


def _model_at(
    shared: Shared,
    cfg: Config,
    path: str,
    *,
    overrides: dict[str, Any] | None,
    head: str | None = None,
) -> PreTrainedModel:
    """The model of a folder. overrides: of its config.json; None: the policy's. head: name of a value head that the
    folder may hold.
    """
    own = {"path": path, "scratch": None} | ({} if overrides is None else {"overrides": overrides})
    return build_model(
        cfg.model.model_copy(update=own),
        vocab_size=len(shared.tokenizer),
        eos_token_id=shared.tokenizer.eos_token_id,
        pad_token_id=shared.tokenizer.pad_token_id,
        seed=cfg.seed,
        device=shared.model.device,
        dtype=shared.model.dtype,
        head=head,
    )


def _player(
    shared: Shared, cfg: Config, sampling: Sampling, *, size: int, purpose: str, pace: Pace | None = None
) -> Callable:  # type: ignore[type-arg]
    return partial(
        play_groups,
        shared.engine,  # type: ignore[arg-type]  # None: nothing is ever sampled, nor played
        group_size=size,
        sampling=sampling,
        seed=cfg.seed,
        purpose=purpose,
        decode=decoder_of(shared.tokenizer),
        end_token_ids=end_tokens(shared.model, shared.tokenizer),
        timeout_s=cfg.rollout.timeout_s,
        pace=pace,
        retries=cfg.rollout.retries,
        max_total_tokens=cfg.data.max_total_tokens,
        **shared.environments.arguments(cfg, shared.tokenizer),
    )


def _asker(shared: Shared, cfg: Config) -> Ask:
    """Plays held-out tasks, each way of asking with its own sampling."""

    async def ask(tasks: list[Task], how: Asked) -> list[Group]:
        play = _player(shared, cfg, to_sampling(how.sampling), size=how.samples, purpose="eval")
        return await play(tasks)

    return ask


def held_out_replies(
    cfg: Config, algorithm: Algorithm, tasks: list[Task], *, tokenizer: PreTrainedTokenizerBase
) -> list[Group]:
    """Given replies of held-out tasks, as groups; none if the stage does not train on given replies."""
    limit, drops = cfg.rollout.sampling.max_tokens, cfg.data.overlong == "filter"
    if algorithm.kind == "online" or not evaluates(cfg):
        return []

    def fits(task: Task, text: str) -> bool:
        longest = reply_limit(task, limit, cfg.data.max_total_tokens)
        return not drops or len(encode_response(tokenizer, text)) <= longest

    return reader(cfg, algorithm, tokenizer)(given(tasks, algorithm.kind, judged=judges(cfg), fits=fits))


def trained_temperature(cfg: Config, algorithm: Algorithm) -> float:
    """What the trainer divides logits by: the sampling temperature; 1 where nothing was sampled (or greedily)."""
    sampled = cfg.rollout.sampling.temperature if algorithm.kind == "online" else 1.0
    return cfg.train.temperature or sampled or 1.0


def reader(
    cfg: Config, algorithm: Algorithm, tokenizer: PreTrainedTokenizerBase
) -> Callable[[list[Task]], list[Group]]:
    """Tasks with given replies, as groups: a demonstration, labelled or not, or a chosen and a rejected reply."""
    limit, most = cfg.rollout.sampling.max_tokens, cfg.data.max_total_tokens
    overlong = cfg.data.overlong
    turns = learned_turns(cfg.data, algorithm.kind)

    def read(tasks: list[Task]) -> list[Group]:
        if algorithm.kind == "preferences":
            return [
                Group(t, preference_pair(t, tokenizer, limit, overlong=overlong, max_total_tokens=most))
                for t in tasks
            ]
        replies = [
            demonstration(t, tokenizer, limit, overlong=overlong, max_total_tokens=most, turns=turns)
            for t in tasks
        ]
        if algorithm.kind == "labels":
            replies = [labelled(r) for r in replies]
        return [Group(t, (r,)) for t, r in zip(tasks, replies)]

    return read


def _experts(
    cfg: Config, algorithm: Algorithm, tokenizer: PreTrainedTokenizerBase, *, count: int, held_out: list[Task]
) -> Experts | None:
    """The demonstrations of a mix, in their own order; None without a mix."""
    if count == 0:
        return None
    data = cfg.data.model_copy(update={"train": cfg.data.demonstrations})
    sft = replace(algorithm, kind="demonstrations")
    stream = TaskStream(
        data.train,
        data,
        tokenizer=tokenizer,
        seed=seeds.key(cfg.seed, "expert"),
        exclude=held_out if data.exclude_eval else (),
        max_response_tokens=cfg.rollout.sampling.max_tokens,
        turns=learned_turns(data, sft.kind),
    )
    log.info("demonstrations: %s", ", ".join(f"{k} {v}" for k, v in stream.counts.items()))
    read = reader(cfg.model_copy(update={"data": data}), sft, tokenizer)
    return Experts(stream=stream, read=read, per_step=count)


def rejection(group: Group, *, algorithm: Resolved, weights: Mapping[str, float]) -> str | None:
    """Why a group is not trained on: rewards all equal, with dynamic sampling, or too close; or, after failures, a
    single rollout is left although rollouts of a group are compared. weights: of the rewards by name."""
    if len(group.rollouts) == 1 and (algorithm.compares or algorithm.pairs):
        return "alone"
    return uninformative(group, algorithm.groups, drop_uniform=algorithm.dynamic_sampling, weights=weights)
