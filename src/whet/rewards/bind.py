"""From a reward function, however it is written, to a function the jail can call.

Three shapes are known by the names of their parameters: `reward(response, task, ...)`, which may also take
`rollout`; verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`; and TRL's
`reward(prompts, completions, ...)`, which gets all rollouts of a group at once. Each may take columns of the data by
name: the reference answer as `answer`, and all that `task.extra` holds. A value under `arguments` stands over them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.tables import near
from whet.types import ConfigError, Json, Rollout, Task

RewardFunction = Callable[..., Any]
"""`(response: str, task: Task, **arguments) -> float | dict`, plain or async. The dict holds "score",
further numbers to be recorded, and under "answer", as text, the answer found in the reply."""

_GIVEN = ("response", "task", "rollout")
_GIVEN_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_GIVEN_TRL = ("prompts", "completions")
_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)

BATCH = "batch"
"""Of what a bound function tells about itself: whether it takes all rollouts of a group at once."""


def pack_task(task: Task) -> dict[str, Json]:
    """A task as JSON for `bind`, without its tokens, which no reward needs."""
    return task.to_json() | {"token_ids": ()}


def unpack_task(task: dict[str, Json]) -> Task:
    """What `pack_task` has packed."""
    return Task.from_json(task)


def pack_rollout(rollout: Rollout) -> dict[str, Json]:
    """The data of a rollout that a reward gets beside the text."""
    return {"finish_reason": rollout.finish_reason, "tokens": rollout.tokens, "text": rollout.text}


def bind(
    function: RewardFunction, arguments: Mapping[str, Json], *, name: str, columns: bool = True
) -> Callable[..., Any]:
    """The function on the packed forms. ConfigError if it does not take the `arguments`.

    `call(task, rollout)` gives its value for one rollout; `call(task, rollouts)` of a function of batches, a dict with
    the values by position; `call(task)` alone calls nothing and tells the shape, {"score": 0, BATCH: 0 or 1}, or raises
    ConfigError where the task lacks a column that the function needs. columns: parameters may be columns of the data.
    """
    parameters = inspect.signature(function).parameters
    given = next((shape for shape in (_GIVEN_VERL, _GIVEN_TRL) if shape[1] in parameters), _GIVEN)
    _check(parameters, given, arguments, name=name, columns=columns)
    batch = given is _GIVEN_TRL
    asked = [p for p in parameters.values() if p.kind not in _VARIADIC]
    wanted = {p.name: p.default is p.empty for p in asked if p.name not in (*given, *arguments)}
    every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def of_columns(task: Task) -> dict[str, Json]:
        there = {**task.extra, **({} if task.answer is None else {"answer": task.answer})}
        if columns and (lacking := [n for n, needed in wanted.items() if needed and n not in there]):
            raise ConfigError(
                f"reward {name!r} needs a value for {', '.join(lacking)}: give it under `arguments`, or a column of "
                f"that name to the data; columns of source {task.source!r}: {', '.join(sorted(there)) or 'none'}"
            )
        return {n: v for n, v in there.items() if n in wanted or (batch and every and n not in given)}

    def call(
        task: dict[str, Json], rollout: dict[str, Json] | None = None, rollouts: Sequence[Json] = ()
    ) -> Any:
        whole = unpack_task(task)
        named = of_columns(whole) if columns else {}
        if rollout is None and not rollouts:
            return {"score": 0.0, BATCH: float(batch)}
        if batch:
            passed = _trl(whole, [r["text"] for r in rollouts], named)
            passed = {key: value for key, value in passed.items() if every or key in parameters}
            return _by_position(_awaited(function(**{**passed, **arguments})), len(rollouts))
        assert rollout is not None
        values = _verl(whole, rollout["text"]) if given is _GIVEN_VERL else (rollout["text"], whole, rollout)
        passed = {key: value for key, value in zip(given, values) if key in parameters}
        return _awaited(function(**named, **passed, **arguments))

    return call


def _awaited(value: Any) -> Any:
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _trl(task: Task, texts: Sequence[str], columns: Mapping[str, Json]) -> dict[str, Json]:
    """What TRL 1.16 passes to a reward: lists with an entry for every completion; of a chat, lists of messages."""
    chat = not isinstance(task.prompt, str)
    prompt = [m.to_json() for m in task.prompt] if chat else task.prompt  # type: ignore[union-attr]
    completions = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
    lists = {name: [value] * len(texts) for name, value in columns.items()}
    return {**lists, "prompts": [prompt] * len(texts), "completions": completions}


def _by_position(values: Any, count: int) -> dict[str, Json]:
    """The values of a batch as a dict; of a completion without a value (None) there is no entry."""
    if not hasattr(values, "__len__") or isinstance(values, str | Mapping) or len(values) != count:
        got = f"{len(values)} values" if hasattr(values, "__len__") else f"a {type(values).__name__}"
        raise ValueError(f"returned {got} for {count} completions; expected a list with a number for each")
    return {str(n): value for n, value in enumerate(values) if value is not None}


def _verl(task: Task, text: str) -> tuple[str, str, Json, Json]:
    return task.source, text, task.answer, task.extra.get("extra_info", task.extra)


def _check(
    parameters: Mapping[str, inspect.Parameter],
    given: tuple[str, ...],
    arguments: Mapping[str, Json],
    *,
    name: str,
    columns: bool,
) -> None:
    """Every argument has a parameter; without columns, every parameter without a default has a value."""
    kinds = {p.kind for p in parameters.values()}
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        raise ConfigError(
            f"reward {name!r}: its arguments are passed by name; remove the '/' from its signature"
        )
    named = [p for p in parameters.values() if p.kind not in _VARIADIC]
    if given[0 if given is _GIVEN else 1] not in parameters:
        raise ConfigError(
            f"reward {name!r} takes ({', '.join(parameters)}); expected (response, task, ...), "
            f"verl's ({', '.join(_GIVEN_VERL)}) or TRL's (prompts, completions, ...)"
        )
    for key in arguments:
        if key in given or (
            key not in {p.name for p in named} and inspect.Parameter.VAR_KEYWORD not in kinds
        ):
            free = [p.name for p in named if p.name not in given]
            raise ConfigError(
                f"reward {name!r} has no argument {key!r}{near(key, free)}; it has: {', '.join(free)}"
            )
    missing = [
        p.name for p in named if p.default is p.empty and p.name not in given and p.name not in arguments
    ]
    if missing and not columns:
        raise ConfigError(
            f"reward {name!r} needs a value for {', '.join(missing)}; give it under `arguments`"
        )
