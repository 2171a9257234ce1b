"""All rewards of a config on all rollouts of a step, each call in the jail."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

from whet import seeds
from whet.config import schema
from whet.guard.jail import Call, Failure, Jail, Result
from whet.rewards.bind import RewardFunction, bind, pack_rollout, pack_task
from whet.rewards.builtin import BUILTIN
from whet.tables import find, load_object
from whet.types import DataError, Group, Rollout, Task, WhetError


@dataclass(frozen=True, slots=True)
class RewardSet:
    """The rewards of a run: their weights, and the jail they run in (None without rewards)."""

    weights: dict[str, float]
    jail: Jail | None
    seed: int = 0
    max_failure_rate: float = 1.0

    @staticmethod
    def from_config(
        rewards: Mapping[str, schema.Reward],
        guard: schema.Guard,
        objects: Mapping[str, RewardFunction] | None = None,
        *,
        seed: int = 0,
    ) -> RewardSet:
        """Start the jail with all functions loaded. ConfigError if one cannot be loaded or called so.

        `objects` gives functions by the name of their reward, in place of what its `function` names.
        """
        objects = objects or {}
        loaders = {name: partial(_load, name, reward, objects.get(name)) for name, reward in rewards.items()}
        weights = {name: reward.weight for name, reward in rewards.items()}
        jail = None
        if loaders:
            jail = Jail(
                loaders,
                workers=guard.workers,
                timeout_s=guard.timeout_s,
                memory_mb=guard.memory_mb,
                max_output_bytes=guard.max_output_bytes,
            )
        return RewardSet(weights, jail, seed, guard.max_failure_rate)

    def close(self) -> None:
        if self.jail:
            self.jail.close()

    def __enter__(self) -> RewardSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


def _load(name: str, reward: schema.Reward, given: RewardFunction | None) -> Callable[..., object]:
    function = given
    if function is None:
        what = f"reward {name!r}: function"
        table: Mapping[str, str | RewardFunction] = BUILTIN
        found = find(table, reward.function, what=what)
        function = load_object(found, what=what) if isinstance(found, str) else found
    return bind(function, reward.arguments, name=name)


async def score(groups: Sequence[Group], rewards: RewardSet) -> list[Group]:
    """The same groups, each rollout with its reward: the weighted sum of all, with the raw parts by name.

    A dict counts by its "score"; its other entries become parts "name/key". Rollouts that have an error stay
    as they are. The first answer that a reward found in the reply is kept. If any part fails, the rollout is
    unscored: reward None, and `error` says which part and how.
    """
    if rewards.jail is None:
        return list(groups)
    names = list(rewards.weights)
    streams = {name: seeds.key(rewards.seed, "reward", name) for name in names}
    calls = [call for group in groups for call in _calls(group, streams)]
    results = iter(await rewards.jail.call_many(calls))
    return [
        Group(
            g.task,
            tuple(
                _scored(r, {n: next(results) for n in names}, rewards) if not r.error else r
                for r in g.rollouts
            ),
        )
        for g in groups
    ]


def _calls(group: Group, streams: Mapping[str, int]) -> list[Call]:
    task = _encode(group.task)
    return [
        Call(
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
            f"task {task.uid} of {task.source!r} cannot go to a reward: {error}; columns must be JSON values"
        ) from error


def _scored(rollout: Rollout, results: dict[str, Result], rewards: RewardSet) -> Rollout:
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
    answer = next((r.answer for r in results.values() if r.answer is not None), rollout.answer)
    return replace(rollout.scored(total, {**rollout.reward_parts, **parts}), answer=answer)


def check_failures(groups: Sequence[Group], rewards: RewardSet) -> None:
    """WhetError if more than `guard.max_failure_rate` of the rollouts are unscored; names the main cause."""
    errors = [r.error for g in groups for r in g.rollouts if r.error]
    total = sum(len(g.rollouts) for g in groups)
    if errors and len(errors) > rewards.max_failure_rate * total:
        cause, times = Counter(errors).most_common(1)[0]
        raise WhetError(
            f"{len(errors)} of {total} rollouts of this step could not be scored, more than "
            f"guard.max_failure_rate {rewards.max_failure_rate:g} allows. Main cause ({times} times): {cause}"
        )
