"""The step. Read this first: everything else in the package is called from here.

prompts -> rollouts -> rewards -> buffer -> advantages -> loss -> update -> weight sync -> next step, new version
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

from whet.batch import Batch, pack, split
from whet.evaluate import evaluate
from whet.rewards.combine import check_failures, score
from whet.run import Run
from whet.sync.weights import publish
from whet.track.metrics import merge, summarise
from whet.types import Group, Metrics, WhetError


async def explore_step(run: Run) -> int:
    """Ask the policy: as many tasks as there is room for, a group of rollouts each, scored. Returns how many."""
    # waits here: this is the staleness bound
    n = await run.wait(run.buffer.room(at_most=run.plan.tasks_per_step), "room")
    tasks = run.tasks.next(n)
    with run.phase("generate"):
        groups = await run.play(tasks)  # n groups of G rollouts, token-exact; each rollout has its deadline
    with run.phase("score"):
        groups = await score(groups, run.rewards)  # each call has its deadline
    check_failures(groups, run.rewards)
    run.played += groups
    await run.buffer.put(groups, asked=n)  # keeps what can be trained on, books the rest
    return n


async def read_step(run: Run) -> int:
    """Demonstrations and preference pairs: the rollouts are in the data, nothing is sampled."""
    n = await run.wait(run.buffer.room(at_most=run.plan.tasks_per_step), "room")
    with run.phase("read"):
        groups = run.read(run.tasks.next(n))
    run.played += groups
    await run.buffer.put(groups, asked=n)
    return n


async def train_step(run: Run) -> Metrics:
    """One step's rollouts, one or more optimizer steps, one new version of the policy."""
    groups = await run.wait(run.buffer.take(run.policy.version), "a step's worth of rollouts")
    batch = pack(groups)
    with run.phase("log-probs"):
        batch = look(run, batch)
    batch = run.algorithm.advantage(batch, run.kl_coef)
    updates: list[Metrics] = []
    with run.phase("update"):
        for _ in range(run.cfg.train.passes):
            for minibatch in split(batch, run.cfg.train.minibatches):  # each ends in one optimizer step
                updates.append(update(run, minibatch))
    await run.wait(publish(run.policy, run.engine), "the weight sync")
    # from here engine.version == policy.version
    await run.buffer.trained(groups)  # frees room: the next tasks may start
    return measure(run, batch, groups, updates=updates)


def look(run: Run, batch: Batch) -> Batch:
    """What the models say of the batch before the step: old and reference log-probs, values."""
    if run.algorithm.kind == "online":
        old = run.policy.forward(batch, "logprobs") if run.recompute_old else batch.logp_sample_N
        batch = replace(batch, logp_old_N=old)
    if run.reference is not None:
        batch = replace(batch, logp_ref_N=run.reference.forward(batch, "logprobs"))
    if run.critic is not None:
        batch = replace(batch, value_N=run.critic.forward(batch, "values"))
    return batch


def update(run: Run, minibatch: Batch) -> Metrics:
    """One optimizer step of the policy (and the critic)."""
    out: Metrics = {}
    algorithm = run.algorithm
    if run.critic is not None:
        assert algorithm.value_loss is not None
        weighted = replace(minibatch, weight_N=algorithm.value_weights(minibatch))
        out |= {f"critic/{k}": v for k, v in run.critic.update(weighted, algorithm.value_loss).items()}
        if run.step < run.cfg.critic.warmup_steps:
            return out
    weighted = replace(minibatch, weight_N=algorithm.weights(minibatch))
    return out | {f"train/{k}": v for k, v in run.policy.update(weighted, algorithm.loss).items()}


def measure(run: Run, batch: Batch, groups: list[Group], *, updates: list[Metrics]) -> Metrics:
    """The numbers of the step, over all that was played. The engine's and the trainer's log-probs are compared
    before anything has moved: in the first update."""
    first = {k: v for k, v in updates[0].items() if "/mismatch_" in k}
    run.watch_mismatch(first)
    return summarise(run.played) | merge(updates) | first | run.after_step(batch, groups)


# ---------------------------------------------------------------- modes


async def alternate(run: Run) -> Metrics:
    """On-policy: explore until a step is full, then train."""
    explore = explore_step if run.algorithm.kind == "online" else read_step
    most = (1 + run.cfg.algorithm.max_refills) * run.buffer.groups_per_step
    asked = 0
    while not run.buffer.ready:
        if asked >= most:
            raise WhetError(
                f"step {run.step + 1} could not be filled: of {asked} tasks only {len(run.buffer.waiting)} gave a "
                f"group that can be trained on, and {run.buffer.groups_per_step} are needed. Rewards that are all "
                "equal in a group teach nothing: use easier or harder tasks, a larger rollout.group_size, or set "
                "algorithm.drop_uniform_groups=false"
            )
        asked += await explore(run)
    return await train_step(run)


async def steps(run: Run) -> AsyncIterator[Metrics]:
    """The stage's remaining steps. When one is yielded it has been written down, evaluated and saved, if due."""
    if run.step == 0 and run.cfg.eval.at_start and not run.stopping:
        await evaluation(run)
    while run.step < run.plan.steps and not run.stopping:
        metrics = await alternate(run)
        run.step += 1
        run.reset_reference()
        run.record_step(metrics)
        if run.eval_due:
            await evaluation(run)
        if run.checkpoint_due:
            with run.phase("save"):
                run.save()
        yield metrics


async def evaluation(run: Run) -> None:
    """Held-out accuracy of the present policy, written down."""
    if run.eval_tasks:
        with run.phase("evaluate"):
            metrics, groups = await evaluate(
                run.play_eval,
                run.eval_tasks,
                run.rewards,
                cfg=run.cfg.eval,
                at_once=run.eval_at_once,
            )
        run.record_eval(metrics, groups)
