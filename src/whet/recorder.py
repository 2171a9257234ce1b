"""The part of a stage that measures and writes down: numbers, rollouts, evaluations, checkpoints, exports."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from whet.checkpoint import Saver
from whet.config.evaluation import EvalSampling, asked, evaluates, judges
from whet.config.resuming import fingerprint
from whet.config.schema import Config
from whet.context import Context
from whet.data.replies import reader
from whet.data.tasks import learned_tokens, reply_limit
from whet.early_stopping import early_stopping_of, should_stop, values_of
from whet.envs.opened import Environments
from whet.eval_loss import LIKELIHOOD, eval_loss, given
from whet.evaluation import Ask, accuracy, evaluate, judging, shown
from whet.explorer import player
from whet.guard.printed import CONSOLE
from whet.job import Job, Models
from whet.learner import Learned, Learner
from whet.models.exports import write_export
from whet.placement import trainers
from whet.rewards.combine import RewardSet
from whet.rollout.episode import to_sampling
from whet.secrets import redact_tree
from whet.seeds import key
from whet.storage.uploads import Uploads
from whet.track.batches import to_table
from whet.track.display import Display
from whet.track.dumps import training_samples
from whet.track.learning import LONGEST, signs
from whet.track.metrics import summarise
from whet.track.record import RunDirectory
from whet.track.trackers import ShowsRollouts, ShowsText, Tracker, naming
from whet.track.written import read_lines
from whet.training.engine import TrainEngine
from whet.training.ranks import Ranks
from whet.training.throughput import Meter
from whet.types import ConfigError, Group, Json, Metrics, Reply, Rollout, Task, given_tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOut:
    """What the policy is evaluated on."""

    tasks: Sequence[Task]
    ask: Ask
    """Samples replies to tasks."""
    rewards: RewardSet
    loss: Callable[[], Metrics] | None
    """On given replies, if the stage trains on given replies."""


@dataclass
class Recorder:
    """Of one stage."""

    context: Context
    directory: RunDirectory
    trackers: Sequence[Tracker]
    display: Display
    held_out: HeldOut
    saver: Saver
    uploads: Uploads
    gather: Callable[[], object]
    """Take what ranks have learned, to be exported."""
    write_export: Callable[[Path], None]
    """Write the policy as a Hugging Face folder."""
    fingerprint: Json
    """The part of the config that a checkpoint stores."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Digests of the user's code (`config.code.digests`)."""
    environments: Environments = field(default_factory=Environments)
    """They count what became of their processes, and have a journal."""
    ranks: Mapping[str, Ranks] = field(default_factory=dict)
    meter: Meter | None = None
    recent: deque[Metrics] = field(default_factory=lambda: deque(maxlen=LONGEST))
    """The numbers of the last steps, in which `learning.signs` are looked for."""
    told: set[str] = field(default_factory=set)
    """Names of the signs that were told."""
    metrics_so_far: Callable[[], Sequence[Json]] = list
    """The lines of metrics.jsonl."""
    looked: list[float] | None = None
    """The values that early stopping looks at; None before the first evaluation of this start."""
    stopped_early: bool = False
    """The evaluations have stopped improving (train.early_stopping): the last step is the stage's last."""
    scored: tuple[int, float | None] = (-1, None)
    """The last step that was evaluated, and its number of checkpoint.keep_best."""

    # -- one step

    def record(self, done: int, played: Sequence[Group], learned: Learned, accounts: Metrics) -> Metrics:
        """One line of numbers, and every rollout that was played if they are due. played: all groups that have left
        with this step, trained on or not. accounts: of the ledger. Returns the numbers."""
        cfg, name = self.context.cfg.track, self.context.name
        if self.context.due(done, cfg.batches_interval):
            table = to_table(learned.batch, learned.logp_N, learned.terms)
            self.directory.write_batch(name, done, table)
        rollouts = [r for g in played for r in g.rollouts]
        if self.context.algorithm.kind != "online":
            if done == 1:  # one example of what is trained on: the other rows are those of the data
                self.directory.write_rollouts(name, done, rollouts)
        elif self.context.due(done, cfg.rollouts_interval):
            mean = _advantages(learned)
            advantages = [mean.get((r.task.uid, r.index)) for r in rollouts]
            self.directory.write_rollouts(name, done, rollouts, advantages=advantages)
            self._show_rollouts(done, rollouts, advantages)
            if self.context.cfg.rollout.env is not None:
                self.directory.write_seconds(name, done, rollouts)
        metrics = summarise(played) | learned.metrics | accounts
        timings = self._timings(int(metrics.get("rollout/tokens_sum", 0)), learned.flops)
        self._log(done, metrics, timings)
        self.display.step(metrics, timings)
        waits = self.context.plan.mode == "synchronous"  # else rewards are scored beside the update
        self._tell_signs(done, metrics | timings if waits else metrics)
        self.directory.timeline.flush()
        self.environments.at(self.context.index, done, ahead=self._ahead)
        return metrics

    @property
    def _ahead(self) -> int:
        """How many steps before a step a rollout may have begun that is under way in it: an older one is dropped."""
        cfg = self.context.cfg.rollout
        return cfg.max_staleness + cfg.sync_interval - 1

    def _show_rollouts(
        self, done: int, rollouts: Sequence[Rollout], advantages: Sequence[float | None]
    ) -> None:
        """Some of them, to trackers that take them."""
        if count := self.context.cfg.track.log_samples:
            stream = key(self.context.cfg.seed, "rollouts", "shown", self.context.name, done)
            rows = training_samples(rollouts, advantages, count=count, stream=stream)
            for tracker in self.trackers:
                if isinstance(tracker, ShowsRollouts):
                    with naming(tracker, self.context.name, done):
                        tracker.show_rollouts(self.context.name, done, rows)

    def _tell_signs(self, done: int, metrics: Metrics) -> None:
        """Say, once each, what shows that nothing is learned, or slowly."""
        self.recent.append(metrics)
        for sign in signs(list(self.recent)):
            if sign.name not in self.told:
                self.told.add(sign.name)
                log.warning(
                    "step %d of %s: %s: %s", done, self.context.name, sign.name, sign, extra={CONSOLE: True}
                )

    def _timings(self, tokens: int, flops: float) -> Metrics:
        """Seconds, memory and rates of the step."""
        out, seconds = self.context.monitor.timings()
        step = out["time/step_s"]
        for ranks in self.ranks.values():
            whose = f"{ranks.whose}_" if ranks.whose else ""
            for rank, peaks in enumerate(ranks.ask("peaks")):
                out |= {f"memory/{whose}rank_{rank}_{name}": value for name, value in peaks.items()}
        if self.ranks:
            out["speed/tokens_per_rank_s"] = tokens / step / trainers(self.ranks)
        out |= {"speed/tokens_per_s": tokens / step} | self.environments.timings()
        out |= self.held_out.rewards.timings()
        if self.meter is not None and seconds.get("update"):
            out["speed/mfu"] = flops / seconds["update"] / self.meter.peak
            out["speed/tokens_per_device_s"] = tokens / step / self.meter.devices
        if generating := seconds.get("generate"):
            out["speed/generated_tokens_per_s"] = tokens / generating
        return out

    def _log(self, done: int, metrics: Metrics, timings: Metrics) -> None:
        for tracker in self.trackers:
            with naming(tracker, self.context.name, done):
                tracker.log(self.context.name, done, metrics=metrics, timings=timings)

    # -- evaluation

    def evaluation_due(self, done: int) -> bool:
        cfg = self.context.cfg.eval
        ends = done == self.context.plan.steps
        return (cfg.at_end and ends) or self.context.due(done, cfg.interval)

    async def evaluate(self, done: int) -> None:
        """Evaluate the current policy on held-out tasks and record the result."""
        held, cfg = self.held_out, self.context.cfg
        metrics, replies = Metrics(), list[Group]()
        with self.context.monitor.phase("evaluate"):
            if self.context.plan.judges:
                replies = await evaluate(held.ask, held.tasks, held.rewards, cfg=cfg)
                metrics |= accuracy(replies, success=cfg.eval.success)
            if held.loss is not None:
                metrics |= held.loss()
        if metrics:
            self._record_evaluation(done, metrics, replies)

    def _record_evaluation(self, done: int, metrics: Metrics, groups: Sequence[Group]) -> None:
        """Held-out metrics, with every sampled reply; some are shown."""
        cfg, name = self.context.cfg, self.context.name
        if (best := cfg.checkpoint.keep_best) is not None:
            self.scored = done, value_of(metrics, best.metric, BEST)
        if groups:
            replies = [r for g in groups for r in g.rollouts]
            self.directory.write_eval(name, done, replies, numbers=metrics)
        if cfg.eval.log_samples:
            rows = shown(groups, count=cfg.eval.log_samples, seed=cfg.seed)
            self.directory.write_samples(name, done, rows)
            for tracker in self.trackers:
                if isinstance(tracker, ShowsText):
                    with naming(tracker, name, done):
                        tracker.show(name, done, rows)
        self._log(done, metrics, self.context.monitor.evaluation_timings())
        self.display.evaluated(done, metrics)
        self._look_back(done, metrics)

    def _look_back(self, done: int, metrics: Metrics) -> None:
        """Whether the stage ends with this evaluation."""
        cfg = self.context.cfg.train.early_stopping
        if cfg is None:
            return
        value = value_of(metrics, cfg.metric, EARLY)
        if self.looked is None:  # the record is read once: it grows with the run
            self.looked = values_of(self.metrics_so_far(), cfg.metric, stage=self.context.name, until=done)
        else:
            self.looked.append(value)
        if done and should_stop(self.looked, cfg):
            self.stopped_early = True
            said = f"{cfg.metric} has not improved in {cfg.patience} evaluations: the stage ends after step {done}"
            self.display.message(f"{said} (train.early_stopping)")

    # -- checkpoints and exports

    def checkpoint_due(self, done: int) -> bool:
        cfg = self.context.cfg.checkpoint
        due = self.context.due(done, cfg.interval)
        best = self.saver.is_best(self._score(done), at=(self.context.index, done))
        return self.context.stopping or self.ended(done) or due or best

    def ended(self, done: int) -> bool:
        """Whether the stage is over after `done` steps."""
        return done >= self.context.plan.steps or self.stopped_early

    def _score(self, done: int) -> float | None:
        """The score that selects the best checkpoints, if this step was evaluated."""
        step, score = self.scored
        return score if step == done else None

    def save(self, done: int, engines: Mapping[str, TrainEngine], state: Callable[[], Json]) -> None:
        """Save the whole run: its models, and the state of the other parts. Records are synced to disk first."""
        with self.context.monitor.phase("save"):
            self.directory.sync()
            self.saver.wait()  # what is kept for the checkpoint before the last may go once the last is on the disk
            self.saver.save(engines, self.state(done) | state())
            self.environments.saved(self.saver.oldest, ahead=self._ahead)

    def export_due(self, done: int) -> bool:
        """The last step's is the stage's own, which `run_stage` writes."""
        cfg = self.context.cfg.checkpoint
        last = self.ended(done) and cfg.export
        return self.context.due(done, cfg.export_interval) and not last

    def export(self, done: int, *, final: bool = False) -> None:
        """The policy as a Hugging Face folder: `export/STAGE` at the end of the stage, else with the step's number.
        At the end what ranks have learned has been taken, and they have ended."""
        name = self.context.name if final else f"{self.context.name}-step-{done:06d}"
        with self.context.monitor.phase("export"):
            if not final:
                self.gather()
            self.write_export(self.directory.path / "export" / name)
        self.uploads.export(self.directory.path / "export" / name)

    def state(self, done: int) -> dict[str, Json]:
        return {
            "stage": self.context.index,
            "stage_name": self.context.name,
            "step": done,
            "steps": self.context.plan.steps,
            "done": self.ended(done),
            "stopped_early": self.ended_early(),
            "score": self._score(done),
            "config": redact_tree(self.fingerprint),
            "code": dict(self.code),
            "record": self.directory.held(),
        }

    def restore(self, state: Json) -> None:
        self.scored = state["step"], state.get("score")
        before = state.get("stopped_early")
        self.stopped_early = before is not None and before == early_stopping_of(self.context.cfg)

    def ended_early(self) -> Json:
        """The settings that ended the stage before its last step; with others it goes on. None: it did not end so."""
        return early_stopping_of(self.context.cfg) if self.stopped_early else None


BEST, EARLY = "checkpoint.keep_best.metric", "train.early_stopping.metric"


def value_of(metrics: Metrics, name: str, key: str) -> float:
    """The metric that a key names. ConfigError if the evaluation does not have it."""
    if name not in metrics:
        raise ConfigError(f"{key}={name}: the evaluation has only {', '.join(metrics)}")
    return metrics[name]


def check_metrics(context: Context, tasks: Sequence[Task], rewards: RewardSet) -> None:
    """ConfigError for a metric that no evaluation of the stage will have, as far as names are known before the first:
    further parts are the rewards' own, and the losses of pairs and labels have statistics of their own."""
    cfg, kind = context.cfg, context.algorithm.kind
    named = [(BEST, cfg.checkpoint.keep_best), (EARLY, cfg.train.early_stopping)]
    if not any(each for _, each in named):
        return
    judge = judging(cfg, rewards)
    by_source = {task.source: task for task in tasks}
    metrics: Metrics = {}
    if context.plan.judges:
        metrics = accuracy([_unanswered(cfg, task, judge) for task in by_source.values()], success=1.0)
    sets = [f"eval/{name}/" for name in (*by_source, *(["all"] if len(by_source) > 1 else []))]
    if kind == "demonstrations":
        metrics |= {f"{at}{name}": 0.0 for at in sets for name in LIKELIHOOD}
    further = tuple(at if kind in ("preferences", "labels") else f"{at}part/" for at in sets)
    for told, each in named:
        if each is not None and not each.metric.startswith(further):
            value_of(metrics, each.metric, told)


def _unanswered(cfg: Config, task: Task, judge: RewardSet) -> Group:
    """A task with as many replies as an evaluation has of it, all empty."""
    parts = dict.fromkeys(judge.of(task), 0.0)
    empty = Rollout.one_strand(task=task, index=0, **given_tokens([], []), finish_reason="stop", text="")
    return Group(task, (empty.scored(0.0, parts),) * asked(cfg, task.source).samples)


def _advantages(learned: Learned) -> dict[tuple[int, int], float]:
    """Mean advantage of each trained rollout, by (task uid, index); none where training is simulated."""
    batch = learned.batch
    if batch.adv_N is None:
        return {}
    length_R = batch.sum_R(torch.ones_like(batch.adv_N)).clamp(min=1)
    names = [(r.task.uid, r.index) for g in learned.groups for r in g.rollouts]
    return dict(zip(names, (batch.sum_R(batch.adv_N) / length_R).tolist()))


# ---------------------------------------------------------------- opened from the config


def open_recorder(context: Context, job: Job, learner: Learner, tasks: list[Task]) -> Recorder:
    """tasks: the held-out ones."""
    records, models, rewards = job.records, job.models, job.rewards[context.index]
    replies = held_out_replies(context, models, tasks)
    look = learner.compute_logprobs_and_values
    loss = partial(eval_loss, learner.policy, replies, context.algorithm, look=look) if replies else None
    return Recorder(
        context=context,
        directory=records.directory,
        trackers=records.trackers,
        display=records.display,
        held_out=HeldOut(tasks, _asker(context, models, rewards), rewards, loss),
        saver=records.saver,
        uploads=records.uploads,
        gather=partial(models.policy.keep, learner.policy),
        write_export=partial(_export, context.cfg, models),
        fingerprint=fingerprint(job.loaded.as_given),
        code=job.loaded.code,
        environments=models.environments,
        metrics_so_far=partial(read_lines, records.directory.path / "metrics.jsonl"),
        ranks=learner.ranks,
        meter=learner.meter,
    )


def _asker(context: Context, models: Models, rewards: RewardSet) -> Ask:
    """Plays held-out tasks, each way of asking with its own sampling."""
    playing = partial(
        player, models, context.cfg, rewards, purpose="eval", extra=context.monitor.sampled_beside_replies
    )

    async def ask(tasks: list[Task], how: EvalSampling) -> list[Group]:
        return await playing(to_sampling(how.sampling), size=how.samples)(tasks)

    return ask


def held_out_replies(context: Context, models: Models, tasks: list[Task]) -> list[Group]:
    """Given replies of held-out tasks, as groups; none if the stage does not train on given replies."""
    cfg, kind = context.cfg, context.algorithm.kind
    limit, drops = cfg.rollout.sampling.max_tokens, cfg.data.overlong == "filter"
    if kind == "online" or not evaluates(cfg):
        return []

    def fits(task: Task, reply: Reply) -> bool:
        longest = reply_limit(task, limit, cfg.data.max_total_tokens)
        return not drops or len(learned_tokens(task, reply, models.tokenizer)) <= longest

    read = reader(cfg, kind, models.tokenizer, ends=models.ends)
    groups = read(given(tasks, kind, judged=judges(cfg), fits=fits))
    ended = [r.finish_reason for group in groups for r in group.rollouts]
    if cut := ended.count("length"):
        log.warning("held-out replies: %d of %d are too long and are cut", cut, len(ended))
    return groups


def _export(cfg: Config, models: Models, path: Path) -> None:
    """Write the policy as it was last gathered."""
    job = partial(write_export, cfg, models.policy.maker(), models.tokenizer, path.absolute())
    models.place.do(job, what=f"export {path.name}")
