"""The step. Read this first: everything else in the package is called from here.

prompts -> rollouts -> rewards -> buffer -> advantages -> loss -> update -> weight sync -> next step, new version
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from whet import seeds
from whet.algos.demonstration import without_experts
from whet.algos.groups import with_baseline
from whet.algos.preference import kl_zero
from whet.algos.segments import sampled_logp_N
from whet.algos.skipping import skip, without_effect
from whet.batch import Batch, among_skipped, computed, pack, select, with_parts
from whet.buffer.rounds import Rounds
from whet.config.schema import Train
from whet.evaluate import accuracy, evaluate
from whet.held_out import held_out
from whet.placement import Jobs, at_once
from whet.rewards.combine import score
from whet.run import Run
from whet.sync.weights import publish
from whet.track.metrics import merge, summarise
from whet.training.passes import passes
from whet.types import Group, Metrics, Stopped, Task, WhetError


async def explore_step(run: Run, at_most: int) -> int:
    """Sample rollouts for as many tasks as the buffer has room for. Returns the number of tasks."""
    # waits here: this is the staleness bound
    n = await run.wait(run.buffer.room(at_most=at_most), "room")
    await explore(run, draw(run, n))
    return n


def draw(run: Run, n: int) -> list[Task]:
    """The next tasks; the buffer counts them as in flight from now on."""
    assert run.engine is not None
    tasks = run.tasks.next(n)
    run.buffer.asked(tasks, run.engine.version)
    return tasks


async def explore(run: Run, tasks: list[Task]) -> None:
    """A group of rollouts of each task, scored, into the buffer."""
    groups = await (play(run, tasks) if run.rounds is None else played_elsewhere(run, run.rounds, tasks))
    await run.buffer.put(groups, asked=len(tasks))  # keeps what can be trained on, books the rest


async def play(run: Run, tasks: list[Task]) -> list[Group]:
    """A group of rollouts of each task, scored."""
    with run.exploring("generate"):
        groups = await run.play(tasks)  # groups of G rollouts, token-exact; each rollout has its deadline
    with run.exploring("reward"):
        groups = await score(groups, run.rewards)  # each call has its deadline
    run.judged(groups)
    if "baseline" in run.algorithm.needs:
        groups = await against_greedy(run, groups)
    return groups


async def played_elsewhere(run: Run, rounds: Rounds, tasks: list[Task]) -> list[Group]:
    """The same, by explorers in separate processes, which follow the trainer's weights."""
    assert run.engine is not None
    asked = rounds.play(tasks, run.engine.version, stopping=run.may_stop)
    groups = await run.come(asked, f"the explorers' groups of weights version {run.engine.version}")
    run.judged(groups)
    return groups


async def against_greedy(run: Run, groups: list[Group]) -> list[Group]:
    """The same rollouts, each with the reward of the greedy reply to its task."""
    with run.exploring("generate"):
        greedy = await run.play_greedy([g.task for g in groups])
    with run.exploring("reward"):
        greedy = await score(greedy, run.rewards)
    run.judged(greedy)
    return [with_baseline(group, one.rollouts[0]) for group, one in zip(groups, greedy)]


async def read_step(run: Run, at_most: int) -> int:
    """Demonstrations and preference pairs: the rollouts are in the data, nothing is sampled."""
    n = await run.wait(run.buffer.room(at_most=at_most), "room")
    with run.phase("read"):
        groups = run.read(run.tasks.next(n))
    await run.buffer.put(groups, asked=n)
    return n


async def train_step(run: Run, *, beside: Coroutine[Any, Any, None] | None = None) -> Metrics:
    """One step's rollouts, one or more optimizer steps, one new version of the policy. beside: sampling that runs
    meanwhile with the weights from before this step, and ends before they change."""
    groups = await run.come(run.buffer.take(run.policy.version), "a step's worth of rollouts")
    if run.out is not None:
        run.out.look()  # explorers that took other weights than were sent are found before this step
    async with run.meanwhile(beside):
        batch, updates, corrected = await run.work(partial(learn, run, groups))
    await run.give_up_stale()
    due = run.sync_due
    await run.wait(
        publish(run.policy, run.engine, through=run.sampler, due=due, finish=not run.interrupts, out=run.out),
        "the weight sync",
        within=run.sync_deadline,
    )
    run.explored_at_sync = run.explored if due else run.explored_at_sync
    # from here engine.version == policy.version, save with rollout.sync_interval > 1
    # frees room: the next tasks may start
    await run.buffer.trained(groups, skipped=[groups[n].task.uid for n in run.skipped])
    run.played = run.buffer.leave()
    return measure(run, without_experts(batch), groups, updates=updates) | corrected


def learn(run: Run, groups: list[Group]) -> tuple[Batch, list[Metrics], Metrics]:
    """The batch as trained on, the metrics of each optimizer step, and those of the off-policy correction."""
    batch = pack(groups) if run.experts is None else run.experts.among(groups)
    if run.algorithm.parts:
        batch = with_parts(batch, groups, run.algorithm.parts)
    corrected: Metrics = {}
    if run.skipping.before_models:  # no model computes rollouts without effect
        batch = judge(run, batch)
        with run.phase("logprobs"):
            batch = look(run, batch)
    else:
        with run.phase("logprobs"):
            batch = look(run, batch)
        batch, corrected = run.algorithm.correct(batch, run.policy.version)
        batch = judge(run, batch)
    with run.phase("update"):
        return batch, update(run, batch), corrected


def judge(run: Run, batch: Batch) -> Batch:
    """The batch with counts, advantages and skipped rollouts. Minibatches are partitioned as if none were skipped."""
    stream = seeds.key(run.cfg.seed, "resample", run.name, run.step)
    batch = run.algorithm.resample(batch, stream, run.buffer.groups_per_step)
    batch = run.algorithm.advantage(batch, run.kl_coef)
    if run.skipping.skips == "nothing":
        return batch
    weight_N = run.algorithm.weights(batch, run.step + 1)
    without_R = without_effect(batch, weight_N, skips=run.skipping.skips)
    return skip(batch, without_R, minibatches(run, batch, run.cfg.train))


def minibatches(run: Run, batch: Batch, train: Train) -> list[Tensor]:
    """Numbers of the rollouts of each optimizer step."""
    return list(passes(batch, train, stream=seeds.key(run.cfg.seed, "minibatches", run.name, run.step)))


def look(run: Run, batch: Batch) -> Batch:
    """Compute old and reference log-probs and values before the step, of all rollouts that are not skipped."""
    asked: Jobs[Tensor] = {}
    seen = computed(batch)
    unknown = batch.logp_sample_N is None  # the engine cannot tell them
    if run.algorithm.kind == "online" and (run.recompute_old or unknown):
        asked["logp_old_N"] = run.policy, partial(run.policy.forward, seen, "logprobs")
    if run.reference is not None:
        asked["logp_ref_N"] = run.reference, partial(run.reference.forward, seen, "logprobs")
    if "collision" in run.algorithm.needs:
        asked["collision_N"] = run.policy, partial(run.policy.forward, seen, "collision")
    if run.critic is not None:
        asked["value_N"] = run.critic, partial(run.critic.forward, seen, "values")
    said = {name: among_skipped(batch, x_N) for name, x_N in at_once(asked).items()}
    if run.algorithm.kind == "online" and "logp_old_N" not in said:
        said["logp_old_N"] = sampled_logp_N(batch)
    if "value_N" in said:
        said["value_N"] = run.value_scale.restored(said["value_N"], batch.mask_N)
    if run.reference is not None and "kl_zero" in run.algorithm.needs:
        said["kl_zero_R"] = kl_zero(batch, policy=run.policy.forward, reference=run.reference.forward)
    return replace(batch, **said)


def update(run: Run, batch: Batch) -> list[Metrics]:
    """Every optimizer step of the policy and of the critic: the policy's first, or both at once on separate ranks.
    While the critic warms up, the policy waits."""
    jobs: Jobs[list[Metrics]] = {}
    if run.step >= run.plan.critic_warmup_steps:
        parts = minibatches(run, batch, run.cfg.train)
        jobs["policy"] = run.policy, lambda: [update_policy(run, select(batch, rows)) for rows in parts]
    if run.critic is not None and run.plan.critic is not None:
        own = without_experts(batch)
        dealt = minibatches(run, own, run.plan.critic)
        jobs["critic"] = run.critic, lambda: [update_critic(run, select(own, rows)) for rows in dealt]
    done = at_once(jobs)
    if "policy" in done:
        run.note_skipped(batch, parts, done["policy"])
    else:
        run.note_skipped(own, dealt, done["critic"])
    return [numbers for steps in done.values() for numbers in steps]


def update_policy(run: Run, minibatch: Batch) -> Metrics:
    """One optimizer step of the policy. Denominators count the whole minibatch, skipped rollouts included."""
    algorithm = run.algorithm
    weighted = replace(minibatch, weight_N=algorithm.weights(minibatch, run.step + 1))
    loss = algorithm.loss_of(weighted, run.policy.forward)  # sees the whole minibatch before it is split
    return {f"train/{k}": v for k, v in run.policy.update(computed(weighted), loss).items()}


def update_critic(run: Run, minibatch: Batch) -> Metrics:
    """One optimizer step of the critic."""
    algorithm = run.algorithm
    assert run.critic is not None
    assert algorithm.value_loss is not None
    weighted = replace(run.value_scale.normalized(minibatch), weight_N=algorithm.value_weights(minibatch))
    return {f"critic/{k}": v for k, v in run.critic.update(weighted, algorithm.value_loss).items()}


def measure(run: Run, batch: Batch, groups: list[Group], *, updates: list[Metrics]) -> Metrics:
    """The metrics of the step, over all sampled rollouts. The engine's and the trainer's log-probs are compared
    before the weights change: in the first update."""
    first = {k: v for k, v in updates[0].items() if "/mismatch_" in k}
    run.watch_mismatch(first)
    return summarise(run.played) | merge(updates) | first | run.after_step(batch, groups)


# ---------------------------------------------------------------- modes


async def synchronous(run: Run) -> Metrics:
    """On-policy: explore until a step is full, then train."""
    await fill(run, steps=1)
    return await train_step(run)


async def overlapped(run: Run) -> Metrics:
    """Train while the rollouts of later steps are sampled. The weights that sample a task follow from the step alone,
    not from timing: the run is the same on every machine, and after every resume."""
    ahead, left = run.cfg.rollout.max_staleness, run.plan.steps - run.step
    await fill(run, steps=min(ahead, left))
    return await train_step(run, beside=fill(run, steps=min(ahead, left - 1)))


async def asynchronous(run: Run) -> Metrics:
    """Train on the groups that are finished first; explorers sample whenever there is room. No step waits for the last
    rollout."""
    run.explorers.start(left=run.plan.steps - run.step)
    run.buffer.begin(run.policy.version)
    while not run.buffer.ready:
        await run.wait(
            run.buffer.news(run.buffer.changes),
            "a group of rollouts",
            within=run.group_deadline,
        )
        if run.buffer.unused > run.cfg.algorithm.max_refills * run.buffer.groups_per_step:
            raise unfilled(run, run.buffer.unused + run.buffer.there)
        run.buffer.begin(run.policy.version)
    return await train_step(run)


async def train_only(run: Run) -> Metrics:
    """Explorers are separate processes and put groups into the store whenever there is room; see `apart`."""
    return await train_step(run)


async def fill(run: Run, steps: int) -> None:
    """Explore until exactly so many steps' worth of groups wait."""
    ask = explore_step if run.algorithm.kind == "online" else read_step
    run.buffer.begin(run.policy.version)
    if under_way := run.explorers.pop_again():
        await explore(run, under_way)
    goal = (steps - 1) * run.buffer.groups_per_step + run.buffer.fresh_per_step
    asked = 0
    while run.buffer.there < goal:
        if asked >= (1 + run.cfg.algorithm.max_refills) * steps * run.buffer.groups_per_step:
            raise unfilled(run, asked)
        asked += await ask(run, min(run.plan.tasks_per_step, goal - run.buffer.there))


def unfilled(run: Run, asked: int) -> WhetError:
    """The error for too many groups without effect on the gradient."""
    return WhetError(
        f"step {run.step + 1} could not be filled: of {asked} tasks only {len(run.buffer.waiting)} gave a "
        f"group that can be trained on, but {run.buffer.groups_per_step} are needed. Groups with equal rewards "
        "have no gradient: use easier or harder tasks, a larger rollout.group_size, or set "
        "algorithm.dynamic_sampling=false"
    )


MODES = {
    "synchronous": synchronous,
    "overlapped": overlapped,
    "asynchronous": asynchronous,
    "train": train_only,
}


async def steps(run: Run) -> AsyncIterator[Metrics]:
    """The stage's remaining steps. A yielded step has been recorded, and evaluated and saved if due."""
    step = MODES[run.plan.mode]
    if run.step == 0 and run.cfg.eval.at_start and not run.stopping and not run.resumed:
        await evaluation(run)
    while run.step < run.plan.steps and not run.stopping:
        try:
            with run.profiler.step(run.step + 1):
                metrics = await step(run)
        except Stopped:
            with run.phase("save"):
                run.save()
            return
        run.step += 1
        run.reset_reference()
        run.record_step(metrics)
        if run.eval_due:
            await evaluation(run)
        if run.export_due:
            run.export()
        if run.checkpoint_due:
            with run.phase("save"):
                run.save()
        yield metrics


async def evaluation(run: Run) -> None:
    """Evaluate the current policy on held-out tasks and record the result."""
    metrics: Metrics = {}
    replies: list[Group] = []
    with run.phase("evaluate"):
        if run.plan.judges:
            replies = await evaluate(run.ask, run.eval_tasks, run.rewards, cfg=run.cfg)
            metrics |= accuracy(replies, success=run.cfg.eval.success)
        if run.eval_given:
            metrics |= held_out(run.policy, run.eval_given, run.algorithm, look=partial(look, run))
    if metrics:
        run.record_eval(metrics, replies)
