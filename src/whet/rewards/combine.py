"""All rewards of a config on all rollouts of a step: functions in the jail, then models here."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Protocol

from whet import seeds
from whet.config import schema
from whet.config.secrets import learn
from whet.guard import pulse, sandbox
from whet.guard.foreign import number
from whet.guard.imports import import_all
from whet.guard.jail import CallResult, Failure, Jail, RewardCall
from whet.guard.printed import Printed
from whet.guard.worker import Guarded
from whet.rewards.bind import RewardFunction, bind, pack_rollout, pack_task
from whet.rewards.builtin import BUILTIN, EXECUTES
from whet.rewards.model import ModelReward
from whet.tables import find, load_object
from whet.types import ConfigError, DataError, Group, Rollout, Task, WhetError

_OURS = "whet."
"""Prefix of the modules of built-in rewards: they score model output, often with third-party libraries."""


class Judge(Protocol):
    """Runs the functions: a `Jail`, or a substitute."""

    async def call_many(self, calls: Sequence[RewardCall]) -> list[CallResult]: ...
    def close(self) -> None: ...


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
    printed: Printed = field(default_factory=Printed)
    """What the functions print, for the log."""

    def of(self, task: Task) -> list[str]:
        """The rewards that score replies to a task."""
        return [name for name in self.weights if name in self.by_source.get(task.source, self.weights)]

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
    ) -> RewardSet:
        """Start the jail with all functions loaded. ConfigError if one cannot be loaded or called with its arguments.

        Models are left on disk until `load_models` or the first score: the jail forks before torch is there.
        `imports`: code of the user's that is imported there before them. `verifiers`: those of reasoning-gym that may
        judge, where the reward's `arguments` do not say; see `config.sources.verifiers`.
        `objects` gives functions by the name of their reward, in place of what its `function` names.
        `open_jail` takes what `Jail` takes.
        """
        objects = objects or {}
        models = {n: ModelReward(n, r.model, device) for n, r in rewards.items() if r.model is not None}
        loaders = {
            n: partial(_load, n, r, objects.get(n), verifiers, workers.sandbox)
            for n, r in rewards.items()
            if n not in models
        }
        weights = {name: reward.weight for name, reward in rewards.items()}
        jail = None
        if loaders:
            jail = open_jail(
                loaders,
                workers=workers.count,
                timeout_s=workers.timeout_s,
                memory_mb=workers.memory_mb,
                max_output_bytes=workers.max_output_bytes,
                prepare=partial(_prepare, workers.env, imports),
            )
        return RewardSet(weights, jail, seed, workers.max_failure_rate, models=models)

    def load_models(self) -> None:
        """Read the models' weights. ConfigError or CheckpointError names the reward and its folder."""
        for model in self.models.values():
            model.load()

    def close(self) -> None:
        if self.jail:
            self.jail.close()
        self.printed.close()

    def __enter__(self) -> RewardSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
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
    confine: str,
) -> Guarded:
    """The function, and what its process may do. ConfigError if it needs a sandbox, and this system has none."""
    learn({"rewards": {name: {"arguments": reward.arguments}}})
    what, spec = f"reward {name!r}: function", reward.function or ""
    place = "" if given else spec if ":" in spec else find(BUILTIN, spec, what=what)
    arguments, executes = reward.arguments, ""
    if place in EXECUTES:
        arguments = {"verifiers": list(verifiers), **arguments}
        try:
            executes = load_object(EXECUTES[place], what=what)(arguments)
        except ConfigError as error:
            raise ConfigError(f"reward {name!r}: {error}") from None
    call = bind(given or load_object(place, what=what), arguments, name=name)
    asked = "reward_workers.sandbox=all" if confine == "all" else executes
    if asked and (why := sandbox.lacking()):
        raise ConfigError(
            f"reward {name!r}: {asked}; so it may run only in a sandbox, which this system does not have: {why}"
        )
    return Guarded(call, confined=bool(asked) or place.startswith(_OURS), once=bool(executes))


async def score(groups: Sequence[Group], rewards: RewardSet) -> list[Group]:
    """The same groups, each rollout with its reward: the weighted sum of all rewards of its task's source, with the
    raw parts by name.

    A dict counts by its "score"; its other entries become parts "name/key". Rollouts that have an error stay
    as they are. The first answer that a reward found in the reply is kept. If any part fails, the rollout is
    unscored: reward None, and `error` says which part and how.
    """
    if not rewards.weights:
        return list(groups)
    streams = {n: seeds.key(rewards.seed, "reward", n) for n in rewards.weights if n not in rewards.models}
    calls = [
        call
        for g in groups
        for call in _calls(g, {n: streams[n] for n in rewards.of(g.task) if n in streams})
    ]
    results = iter(await rewards.jail.call_many(calls) if rewards.jail else ())
    return [Group(g.task, tuple([await _judged(r, results, rewards) for r in g.rollouts])) for g in groups]


async def _judged(rollout: Rollout, results: Iterator[CallResult], rewards: RewardSet) -> Rollout:
    """A rollout with the next results of the jail and of the models."""
    if rollout.error:
        return rollout
    found: dict[str, CallResult] = {}
    for name in rewards.of(rollout.task):
        if name in rewards.models:
            await asyncio.sleep(0)  # a model holds the process: between two rollouts others may go on
            found[name] = rewards.models[name].score(rollout)
            pulse.beat("scoring")
        else:
            found[name] = result = next(results)
            rewards.printed.take(f"reward {name!r}", result.output, dropped_bytes=result.dropped_bytes)
    return _scored(rollout, found, rewards)


def _calls(group: Group, streams: Mapping[str, int]) -> list[RewardCall]:
    task = _encode(group.task)
    return [
        RewardCall(
            function=name,
            arguments=f'{{"task":{task},"rollout":{rollout}}}',
            key=seeds.key(stream, r.task.uid, r.index),
        )
        for r in group.rollouts
        if not r.error
        for rollout in [json.dumps(pack_rollout(r))]
        for name, stream in streams.items()
    ]


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
    answer = next((r.answer for r in results.values() if r.answer is not None), rollout.answer)
    return replace(rollout.scored(total, {**rollout.reward_parts, **parts}), answer=answer)


def check_failures(groups: Sequence[Group], rewards: RewardSet) -> None:
    """WhetError if more than `reward_workers.max_failure_rate` of the rollouts are unscored; names the main cause."""
    errors = [r.error for g in groups for r in g.rollouts if r.error]
    total = sum(len(g.rollouts) for g in groups)
    if errors and len(errors) > rewards.max_failure_rate * total:
        cause, times = Counter(errors).most_common(1)[0]
        raise WhetError(
            f"{len(errors)} of {total} rollouts of this step are unscored, more than "
            f"reward_workers.max_failure_rate {rewards.max_failure_rate:g} allows. Main cause ({times} times): {cause}"
        )
