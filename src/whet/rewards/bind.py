"""From a reward function, however it is written, to a function the jail can call.

Two shapes are known by the names of their parameters: `reward(response, task, ...)`, which may also take
`rollout`, and verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from whet.tables import near
from whet.types import ConfigError, Json, Message, Rollout, Task

RewardFunction = Callable[..., Any]
"""`(response: str, task: Task, **arguments) -> float | dict`, plain or async. The dict holds "score",
further numbers to be recorded, and under "answer", as text, the answer found in the reply."""

_GIVEN = ("response", "task", "rollout")
_GIVEN_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


def pack_task(task: Task) -> dict[str, Json]:
    """A task as JSON for `bind`, without its tokens, which no reward needs."""
    prompt = task.prompt if isinstance(task.prompt, str) else [[m.role, m.content] for m in task.prompt]
    return {
        "uid": task.uid,
        "source": task.source,
        "prompt": prompt,
        "answer": task.answer,
        "response": task.response,
        "rejected": task.rejected,
        "extra": task.extra,
    }


def unpack_task(task: dict[str, Json]) -> Task:
    """What `pack_task` has packed."""
    prompt = task["prompt"]
    if not isinstance(prompt, str):
        prompt = tuple(Message(*m) for m in prompt)
    return Task(**{**task, "prompt": prompt})


def pack_rollout(rollout: Rollout) -> dict[str, Json]:
    """The data of a rollout that a reward gets beside the text."""
    return {"finish_reason": rollout.finish_reason, "tokens": rollout.tokens, "text": rollout.text}


def bind(function: RewardFunction, arguments: Mapping[str, Json], *, name: str) -> Callable[..., Any]:
    """`call(task, rollout)` on the packed forms. ConfigError if `function` does not take the `arguments`."""
    parameters = inspect.signature(function).parameters
    verl = "solution_str" in parameters
    given = _GIVEN_VERL if verl else _GIVEN
    _check(parameters, given, arguments, name)

    def call(task: dict[str, Json], rollout: dict[str, Json]) -> Any:
        whole = unpack_task(task)
        values = _verl(whole, rollout["text"]) if verl else (rollout["text"], whole, rollout)
        passed = {key: value for key, value in zip(given, values) if key in parameters}
        value = function(**passed, **arguments)
        return asyncio.run(value) if inspect.iscoroutine(value) else value

    return call


def _verl(task: Task, text: str) -> tuple[str, str, Json, Json]:
    return task.source, text, task.answer, task.extra.get("extra_info", task.extra)


def _check(
    parameters: Mapping[str, inspect.Parameter],
    given: tuple[str, ...],
    arguments: Mapping[str, Json],
    name: str,
) -> None:
    """Every argument has a parameter, every parameter without a default has a value."""
    kinds = {p.kind for p in parameters.values()}
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        raise ConfigError(
            f"reward {name!r}: its arguments are passed by name; remove the '/' from its signature"
        )
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = [p for p in parameters.values() if p.kind not in variadic]
    if given[0 if given is _GIVEN else 1] not in parameters:
        raise ConfigError(
            f"reward {name!r} takes ({', '.join(parameters)}); expected (response, task, ...) "
            f"or verl's ({', '.join(_GIVEN_VERL)})"
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
    if missing:
        raise ConfigError(
            f"reward {name!r} needs a value for {', '.join(missing)}; give it under `arguments`"
        )
