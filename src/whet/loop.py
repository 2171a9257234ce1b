"""The loop. Read this first: everything else in the package is called from here.

prompts -> rollouts -> rewards -> buffer -> advantages -> loss -> update -> weight sync -> next step, new version

Every mode of a run goes through these lines; the modes differ in how far the explorer samples ahead of the learner
(`explorer.SCHEDULES`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager

from whet.stage import Stage
from whet.types import Metrics, Stopped


async def steps(
    stage: Stage, done: int | None, *, profiled: Callable[[int], AbstractContextManager[None]]
) -> AsyncIterator[Metrics]:
    """The stage's remaining steps: after `done` of a run that was resumed (None: from the beginning). A yielded step
    has been recorded, and evaluated and saved if due. profiled: around each step, by its number."""
    context, recorder = stage.context, stage.recorder
    if done is None and context.cfg.eval.at_start and not context.stopping:
        await recorder.evaluate(0)
    step = done or 0
    while step < context.plan.steps and not context.stopping and not recorder.stopped_early:
        try:
            with profiled(step + 1):
                metrics = await train_step(stage, step)
        except Stopped:  # while it waited for other processes: nothing of the step was trained
            recorder.save(step, stage.engines(), stage.state)
            return
        step += 1
        if recorder.evaluation_due(step):
            await recorder.evaluate(step)
        if recorder.export_due(step):
            recorder.export(step)
        if recorder.checkpoint_due(step):
            recorder.save(step, stage.engines(), stage.state)
        yield metrics


async def train_step(stage: Stage, step: int) -> Metrics:
    """One step's rollouts, one or more optimizer steps, one new version of the policy. step: number of steps done."""
    explorer, learner, weights = stage.explorer, stage.learner, stage.weights
    groups = await explorer.collect(step, learner.version)  # may sample ahead from here on
    weights.check()
    await weights.sleep()  # servers that share the trainer's accelerator
    batch, corrected = await learner.prepare(step, groups)  # packed; log-probs, values, advantages
    learned = await learner.learn(step, batch, groups)  # minibatches, optimizer steps
    proved = await weights.publish(step, explorer)  # a new version, given to the engine
    played = await explorer.trained(groups, learned.skipped, learner.version)  # frees room for the next tasks
    stage.context.monitor.step = step + 1
    learner.reset_reference(step + 1)
    return stage.recorder.record(step + 1, played, learned, corrected | explorer.balance() | proved)
