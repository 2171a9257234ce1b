"""All rewards of a config on all rollouts of a step: functions in the jail, then models here."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from typing import Any, Protocol

from whet import seeds
from whet.config import schema
from whet.config.judges import is_judge
from whet.config.secrets import learn
from whet.guard import pulse, sandbox
from whet.guard.foreign import number
from whet.guard.imports import import_all
from whet.guard.jail import CallResult, Failure, Jail, RewardCall
from whet.guard.printed import Printed
from whet.guard.worker import Guarded
from whet.rewards.bind import BATCH, RewardFunction, bind, pack_rollout, pack_task
from whet.rewards.builtin import BUILTIN, CHECKS, EXECUTES, UNCONFINED, Unconfined
from whet.rewards.model import ModelReward
from whet.tables import check_types, find, load_object
from whet.types import ConfigError, DataError, Group, Metrics, Rollout, Task, WhetError

MOST_AT_ONCE = 128
"""Rollouts of a group that a function of batches gets at once."""
_OURS = "whet."
"""Prefix of the modules of built-in rewards: they score model output, often with third-party libraries."""


class Judge(Protocol):
    """Runs the functions: a `Jail`, or a substitute."""

    async def call_many(self, calls: Sequence[RewardCall]) -> list[CallResult]: ...
    def close(self) -> None: ...


class ModelJudge(Protocol):
    """A language model of the run that is asked about replies (`whet.judges`)."""

    def load(self, day: date | None = None) -> None: ...
    async def score(self, groups: Mapping[int, Group]) -> dict[tuple[int, int], CallResult]: ...


OpenJudge = Callable[[str, schema.RewardConfig, int], ModelJudge]
"""(name, reward, seed)"""


@dataclass(frozen=True, slots=True)
class RewardSet:
    """The rewards of a run: their weights, the jail that functions run in (None without any), and the models."""

    weights: dict[str, float]
    jail: Judge | None
    seed: int = 0
    max_failure_rate: float = 1.0
    by_source: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the rewards that score a source; all rewards if the source is not listed."""
    models: Mapping[str, ModelReward] = field(default_factory=dict)
    """The rewards that are models, by name."""
    judges: Mapping[str, ModelJudge] = field(default_factory=dict)
    """Those that ask a language model of the run."""
    printed: Printed = field(default_factory=Printed)
    """What the functions print, for the log."""
    batched: dict[str, bool] = field(default_factory=dict)
    """Whether a function takes all rollouts of a group at once; filled as it is asked."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of each reward since `timings` was asked."""

    def of(self, task: Task) -> list[str]:
        """The rewards that score replies to a task."""
        return [name for name in self.weights if name in self.by_source.get(task.source, self.weights)]

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the time of a reward."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - begin

    def timings(self) -> Metrics:
        """Seconds of the calls of each reward that was asked since the last call, added over processes."""
        spent = {f"reward/seconds/{name}": seconds for name, seconds in self.seconds.items()}
        self.seconds.clear()
        return spent

    @staticmethod
    def from_config(
        rewards: Mapping[str, schema.RewardConfig],
        workers: schema.RewardWorkersConfig,
        objects: Mapping[str, RewardFunction] | None = None,
        *,
        seed: int = 0,
        imports: Sequence[str] = (),
        verifiers: Sequence[str] = (),
        device: str = "auto",
        open_jail: Callable[..., Judge] = Jail,
        open_judge: OpenJudge | None = None,
    ) -> RewardSet:
        """Start the jail with all functions loaded. ConfigError if one cannot be loaded or called with its arguments.

        Models are left on disk until `load_models` or the first score: the jail forks before torch is there.
        `imports`: code of the user's that is imported there before them. `verifiers`: those of reasoning-gym that may
        judge, where the reward's `arguments` do not say; see `config.sources.verifiers`.
        `objects` gives functions by the name of their reward, in place of what its `function` names.
        `open_jail` takes what `Jail` takes. `open_judge` makes the judges that are models; without one there may be
        none.
        """
        objects = objects or {}
        asked = {n: r for n, r in rewards.items() if is_judge(r)}
        if asked and open_judge is None:
            raise ConfigError(f"rewards.{next(iter(asked))}.model: no language model can be asked here")
        judges = {n: open_judge(n, r, seed) for n, r in asked.items()} if open_judge else {}
        models = {
            n: ModelReward(n, r.model, device)
            for n, r in rewards.items()
            if r.model is not None and n not in judges
        }
        loaders = {
            n: partial(_load, n, r, objects.get(n), verifiers, workers)
            for n, r in rewards.items()
            if n not in models and n not in judges
        }
        weights = {name: reward.weight for name, reward in rewards.items()}
        jail = None
        if loaders:
            jail = open_jail(
                loaders,
                workers=workers.count,
                timeout_s=workers.timeout_s,
                memory_mb=workers.memory_mb,
                prepare=partial(_prepare, workers.env, imports),
                titles={n: _title(n, rewards[n], objects.get(n)) for n in loaders},
            )
        return RewardSet(weights, jail, seed, workers.max_failure_rate, models=models, judges=judges)

    def load_models(self, day: date | None = None) -> None:
        """Read the models' weights. day: as in `load_tokenizer`. ConfigError or CheckpointError names the reward and
        its folder."""
        for model in self.models.values():
            model.load(day)
        for judge in self.judges.values():
            judge.load(day)

    def close(self) -> None:
        if self.jail:
            self.jail.close()
        self.printed.close()

    def __enter__(self) -> RewardSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _prepare(env: Mapping[str, str], imports: Sequence[str]) -> None:
    """What reward processes begin with."""
    os.environ.update(env)
    learn({"reward_workers": {"env": dict(env)}})
    import_all(imports)


def _load(
    name: str,
    reward: schema.RewardConfig,
    given: RewardFunction | None,
    verifiers: Sequence[str],
    workers: schema.RewardWorkersConfig,
) -> Guarded:
    """The function, and what its process may do. ConfigError if its arguments cannot work; if it needs a sandbox, and
    this system has none; if no sandbox can hold it, and one has to, or it has not the time that it may need."""
    learn({"rewards": {name: {"arguments": reward.arguments}}})
    what, spec = f"reward {name!r}: function", reward.function or ""
    place = "" if given else spec if ":" in spec else find(BUILTIN, spec, what=what)
    function = given or load_object(place, what=what)
    ours, unconfined = place.startswith(_OURS), UNCONFINED.get(place)
    if ours:
        check_types(function, reward.arguments, key=f"rewards.{name}.arguments", name=spec)
    arguments = {
        **({"verifiers": list(verifiers)} if place in EXECUTES else {}),
        **reward.arguments,
        **({"processes": workers.count} if unconfined and unconfined.shared else {}),
    }
    call = bind(function, arguments, what=_title(name, reward, given), columns=not ours)

    def told(by: str) -> Any:
        """What a function of the arguments says."""
        try:
            return load_object(by, what=what)(arguments)
        except ConfigError as error:
            raise ConfigError(f"reward {name!r}: {error}") from None

    if place in CHECKS:
        told(CHECKS[place])
    executes = told(EXECUTES[place]) if place in EXECUTES else ""
    if unconfined:
        _check_unconfined(name, unconfined, told(unconfined.needs_s), workers)
    asked = "reward_workers.sandbox=all" if workers.sandbox == "all" else executes
    runs = "it runs the code of replies" if unconfined and unconfined.sandboxes else ""
    if (asked or runs) and (why := sandbox.lacking()):
        raise ConfigError(
            f"reward {name!r}: {asked or runs}; so it may run only in a sandbox, which this system does not have: {why}"
        )
    return Guarded(call, confined=bool(asked) or (ours and not unconfined), once=bool(executes))


def _title(name: str, reward: schema.RewardConfig, given: RewardFunction | None) -> str:
    """What errors call a reward: its name and its function, which for one from Python has the place of its text."""
    if given is None:
        return f"reward {name!r}: function {reward.function!r}"
    bare = inspect.unwrap(given)
    code = getattr(bare, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"reward {name!r}: function {getattr(bare, '__qualname__', type(bare).__name__)!r}{where}"


def _check_unconfined(
    name: str, unconfined: Unconfined, longest_s: float, workers: schema.RewardWorkersConfig
) -> None:
    """ConfigError if a reward that no sandbox can hold is kept from what it does."""
    if workers.sandbox == "all":
        raise ConfigError(
            f"reward {name!r} {unconfined.does}, which reward_workers.sandbox=all forbids; set it to builtin"
        )
    if workers.timeout_s < longest_s:
        raise ConfigError(
            f"reward {name!r} {unconfined.does} and may take {longest_s:g} s, but a call ends after "
            f"reward_workers.timeout_s={workers.timeout_s:g}: raise it to {longest_s:g} or more"
        )


async def score(groups: Sequence[Group], rewards: RewardSet) -> list[Group]:
    """The same groups, each rollout with its reward: the weighted sum of all rewards of its task's source, with the
    raw parts by name.

    A dict counts by its "score"; its other numbers become parts "name/key". Rollouts that have an error stay
    as they are. The first answer that a reward found in the reply is kept. If any part fails, the rollout is
    unscored: reward None, and `error` says which part and how.
    """
    if not rewards.weights:
        return list(groups)
    here = {*rewards.models, *rewards.judges}
    streams = {n: seeds.key(rewards.seed, "reward", n) for n in rewards.weights if n not in here}
    await _ask_shapes(groups, rewards, streams)
    calls = [call for at, g in enumerate(groups) for call in _calls(at, g, rewards, streams)]
    results = await rewards.jail.call_many([c.call for c in calls]) if rewards.jail else []
    found: dict[tuple[int, int], dict[str, CallResult]] = {}
    for call, result in zip(calls, results):
        rewards.seconds[call.call.function] += result.seconds
        printed = f"reward {call.call.function!r}"
        rewards.printed.take(printed, result.output, dropped_bytes=result.dropped_bytes)
        for position, place in enumerate(call.places):
            if (own := _of_position(result, position) if call.batch else result) is not None:
                found.setdefault(place, {})[call.call.function] = own
    for name, judge in rewards.judges.items():
        asked = {at: g for at, g in enumerate(groups) if name in rewards.of(g.task)}
        with rewards.timed(name):
            answered = await judge.score(asked)
        for place, result in answered.items():
            found.setdefault(place, {})[name] = result
    return [
        Group(
            g.task,
            tuple([await _judged(r, found.get((at, n), {}), rewards) for n, r in enumerate(g.rollouts)]),
        )
        for at, g in enumerate(groups)
    ]


async def _ask_shapes(groups: Sequence[Group], rewards: RewardSet, functions: Mapping[str, int]) -> None:
    """Ask each function once whether it takes batches."""
    asked = {n for g in groups for n in rewards.of(g.task)}
    unknown = [n for n in functions if n in asked and n not in rewards.batched]
    if not unknown or rewards.jail is None:
        return
    calls = [RewardCall(function=n, arguments="{}") for n in unknown]
    for name, result in zip(unknown, await rewards.jail.call_many(calls)):
        if result.failure is None:  # a process that died says nothing: it is asked again
            rewards.batched[name] = result.parts.get(BATCH, 0.0) == 1.0


async def check_columns(tasks: Iterable[Task], rewards: RewardSet) -> None:
    """ConfigError where a function needs a column that none of the tasks of a source has.

    Asked of all tasks, before any is scored: what single rows lack leaves their rollouts unscored, whichever of them
    comes first, in a resumed run as in any other."""
    widest: dict[str, Task] = {}
    for task in tasks:
        known = widest.setdefault(task.source, replace(task, prompt="", extra={}))
        known.extra.update(dict.fromkeys(task.extra))
        if known.answer is None and task.answer is not None:
            widest[task.source] = replace(known, answer=task.answer)
    here = {*rewards.models, *rewards.judges}
    asked = [(n, t) for t in widest.values() for n in rewards.of(t) if n not in here]
    if not asked or rewards.jail is None:
        return
    calls = [RewardCall(function=n, arguments=f'{{"task":{_encode(t)}}}') for n, t in asked]
    for result in await rewards.jail.call_many(calls):
        kind, _, detail = (result.failure.detail if result.failure else "").partition(": ")
        if kind == ConfigError.__name__:
            raise ConfigError(detail.rpartition(" (")[0] or detail)


async def _judged(rollout: Rollout, found: dict[str, CallResult], rewards: RewardSet) -> Rollout:
    """A rollout with the results of its functions and of the models. Functions without a result had no value."""
    if rollout.error:
        return rollout
    own: dict[str, CallResult] = {}
    names = rewards.of(rollout.task)
    for name in names:
        if name in rewards.models:
            await asyncio.sleep(0)  # a model holds the process: between two rollouts others may go on
            with rewards.timed(name):
                own[name] = rewards.models[name].score(rollout)
            pulse.beat("scoring")
        elif name in found:
            own[name] = found[name]
    if not own and rollout.reward is None:
        why = f"no reward scores source {rollout.task.source!r}, and no environment played this row"
        if names:
            why = f"{', '.join(names)} gave no value for this reply"
        return rollout.scored(None, {}, why)
    return _scored(rollout, own, rewards)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call, and the rollouts that its result is for: group and position."""

    call: RewardCall
    places: Sequence[tuple[int, int]]
    batch: bool


def _calls(at: int, group: Group, rewards: RewardSet, streams: Mapping[str, int]) -> Iterator[_Call]:
    """The calls for one group, number `at`."""
    task, uid = _encode(group.task), group.task.uid
    packed = {n: json.dumps(pack_rollout(r)) for n, r in enumerate(group.rollouts) if not r.error}
    index = {n: r.index for n, r in enumerate(group.rollouts)}
    names = [n for n in rewards.of(group.task) if n in streams]
    together = [n for n in names if rewards.batched.get(n)]
    for n, rollout in packed.items():
        for name in names:
            if name not in together:
                arguments = f'{{"task":{task},"rollout":{rollout}}}'
                call = RewardCall(
                    function=name, arguments=arguments, key=seeds.key(streams[name], uid, index[n])
                )
                yield _Call(call, [(at, n)], False)
    for name in together:
        for begin in range(0, len(packed), MOST_AT_ONCE):
            some = list(packed)[begin : begin + MOST_AT_ONCE]
            arguments = f'{{"task":{task},"rollouts":[{",".join(packed[n] for n in some)}]}}'
            key = seeds.key(streams[name], uid, index[some[0]])
            yield _Call(
                RewardCall(function=name, arguments=arguments, key=key), [(at, n) for n in some], True
            )


def _of_position(result: CallResult, position: int) -> CallResult | None:
    """The result for one rollout of a batch: a failure is everyone's. None: the function gave it no value."""
    if result.failure is not None:
        return result
    own, more = str(position), f"{position}/"
    if own not in result.parts:
        return None
    further = {name.removeprefix(more): v for name, v in result.parts.items() if name.startswith(more)}
    own_answer = result.answers.get(f"{more}answer")
    answers = {} if own_answer is None else {"answer": own_answer}
    return CallResult(parts={"score": result.parts[own], **further}, answers=answers)


def _encode(task: Task) -> str:
    try:
        return json.dumps(pack_task(task))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"task {task.uid} of {task.source!r} cannot be sent to a reward: {error}; columns must be JSON values"
        ) from error


def _scored(rollout: Rollout, results: dict[str, CallResult], rewards: RewardSet) -> Rollout:
    parts: dict[str, float] = {}
    total = rollout.reward or 0.0  # an environment's own
    for name, result in results.items():
        failure = result.failure
        if failure is None and "score" not in result.parts:
            failure = Failure("bad_value", f"a dict without 'score': {sorted(result.parts)[:5]}")
        if failure is not None:
            return rollout.scored(None, {}, f"reward {name}: {failure}")
        parts |= {name if key == "score" else f"{name}/{key}": value for key, value in result.parts.items()}
        total += rewards.weights[name] * result.parts["score"]
    try:
        total = number(total, " as the weighted sum")
    except ValueError as error:
        return rollout.scored(None, {}, f"rewards: bad_value: {error}")
    found = (r.answers["answer"] for r in results.values() if "answer" in r.answers)
    answer = next(found, rollout.answer)
    return replace(rollout.scored(total, {**rollout.reward_parts, **parts}), answer=answer)


def check_failures(groups: Sequence[Group], rewards: RewardSet, *, of: str) -> None:
    """WhetError if more than `reward_workers.max_failure_rate` of the rollouts are unscored; names the main cause.

    of: what has sampled them."""
    errors = [r.error for g in groups for r in g.rollouts if r.error]
    total = sum(len(g.rollouts) for g in groups)
    if errors and len(errors) > rewards.max_failure_rate * total:
        cause, times = Counter(errors).most_common(1)[0]
        raise WhetError(
            f"{len(errors)} of {total} rollouts of {of} are unscored, more than "
            f"reward_workers.max_failure_rate {rewards.max_failure_rate:g} allows. Main cause ({times} times): {cause}"
        )
