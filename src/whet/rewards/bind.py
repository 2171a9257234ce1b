"""From a reward function, however it is written, to a function the jail can call.

Four shapes are known by the names of their parameters: `reward(response, task, ...)`, which may also take
`rollout`; verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`; and two that get all rollouts of
a group at once: TRL's `reward(prompts, completions, ...)`, and that of verl's batch manager,
`compute_score(data_sources, solution_strs, ground_truths, extra_infos)`. Each may take columns of the data by name: the
reference answer as `answer`, and all that `task.extra` holds. A value under `arguments` stands over them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.guard.foreign import number
from whet.tables import near
from whet.types import ConfigError, Json, Rollout, Task

RewardFunction = Callable[..., Any]
"""`(response: str, task: Task, **arguments) -> float | dict`, plain or async. The dict holds "score",
further numbers to be recorded, and under "answer" or "pred" the answer found in the reply."""

_GIVEN = ("response", "task", "rollout")
_GIVEN_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_GIVEN_VERL_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_GIVEN_TRL = ("prompts", "completions")
_SHAPES = {_GIVEN_VERL[1]: _GIVEN_VERL, _GIVEN_VERL_BATCH[1]: _GIVEN_VERL_BATCH, _GIVEN_TRL[1]: _GIVEN_TRL}
"""By the parameter that tells them."""
_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)

BATCH = "batch"
"""Of what a bound function tells about itself: whether it takes all rollouts of a group at once."""


def pack_task(task: Task) -> dict[str, Json]:
    """A task as JSON for `bind` (`Task.from_json` reads it), without its tokens, which no reward needs."""
    return task.to_json() | {"token_ids": ()}


def pack_rollout(rollout: Rollout) -> dict[str, Json]:
    """The data of a rollout that a reward gets beside the text: what is said of it in docs/rewards.md."""
    return {
        "index": rollout.index,
        "finish_reason": rollout.finish_reason,
        "stop_reason": rollout.stop_reason,
        "tokens": rollout.tokens,
        "text": rollout.text,
        "messages": [message.to_json() for message in rollout.messages],
        "turns": [
            {"reward": t.reward, "calls": t.calls, "malformed": t.malformed, "tokens": t.end - t.start}
            for t in rollout.turns
        ],
        "reward": rollout.reward,
        "parts": rollout.reward_parts,
        "state": rollout.state,
    }


def bind(
    function: RewardFunction, arguments: Mapping[str, Json], *, what: str, columns: bool = True
) -> Callable[..., Any]:
    """The function on the packed forms. ConfigError, which begins with `what`, if it does not take the `arguments`.

    `call(task, rollout)` gives its value for one rollout; `call(task, rollouts)` of a function of batches, a dict with
    the values by position. Two ways call nothing: `call()` tells the shape, {"score": 0, BATCH: 0 or 1}; `call(task)`
    raises ConfigError where the task lacks a column that the function needs. columns: parameters may be columns of the
    data.
    """
    if inspect.isclass(function):
        raise ConfigError(
            f"{what} is a class; expected a function: name an object of the class that has __call__, or a function "
            "that calls it. A class of an environment is named by rollout.env.make (SkyRL's env_class: with "
            "generator.max_turns above 1)"
        )
    parameters = inspect.signature(function).parameters
    given = next((shape for told, shape in _SHAPES.items() if told in parameters), _GIVEN)
    batch = given in (_GIVEN_TRL, _GIVEN_VERL_BATCH)
    with_task = batch and not columns  # else `task` is a column like any other
    _check(parameters, given, arguments, what=what, columns=columns, more=("task",) if with_task else ())
    asked = [p for p in parameters.values() if p.kind not in _VARIADIC]
    wanted = {p.name: p.default is p.empty for p in asked if p.name not in (*given, *arguments)}
    every = columns and any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def of_columns(task: Task) -> dict[str, Json]:
        there = {**task.extra, **({} if task.answer is None else {"answer": task.answer})}
        if columns and (lacking := [n for n, needed in wanted.items() if needed and n not in there]):
            raise ConfigError(
                f"{what} needs a value for {', '.join(lacking)}: give it under `arguments`, or a column of "
                f"that name to the data; columns of source {task.source!r}: {', '.join(sorted(there)) or 'none'}"
            )
        return {n: v for n, v in there.items() if n in wanted or (batch and every and n not in given)}

    def call(
        task: dict[str, Json] | None = None,
        rollout: dict[str, Json] | None = None,
        rollouts: Sequence[Json] = (),
    ) -> Any:
        shape = {"score": 0.0, BATCH: float(batch)}
        if task is None:
            return shape
        whole = Task.from_json(task)
        named = of_columns(whole) if columns else {}
        if rollout is None and not rollouts:
            return shape
        if batch:
            passed = (_trl if given is _GIVEN_TRL else _verl_batch)(whole, rollouts, named)
            passed = {key: value for key, value in passed.items() if every or key in parameters}
            passed |= {"task": whole} if with_task and "task" in parameters else {}
            return _by_position(_awaited(function(**{**passed, **arguments})), len(rollouts))
        assert rollout is not None
        values = _verl(whole, rollout) if given is _GIVEN_VERL else (rollout["text"], whole, rollout)
        passed = {key: value for key, value in zip(given, values) if key in parameters}
        return _awaited(function(**named, **passed, **arguments))

    return call


def _awaited(value: Any) -> Any:
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _trl(task: Task, rollouts: Sequence[Json], columns: Mapping[str, Json]) -> dict[str, Json]:
    """What TRL 1.16 passes to a reward: lists with an entry for every completion; of a chat, lists of messages, which
    are all that followed the prompt where tools were called."""
    chat = not isinstance(task.prompt, str)
    prompt = [m.to_json() for m in task.prompt] if chat else task.prompt  # type: ignore[union-attr]
    completions = [
        (r["messages"] or [{"role": "assistant", "content": r["text"]}]) if chat else r["text"]
        for r in rollouts
    ]
    lists = {name: [value] * len(rollouts) for name, value in columns.items()}
    return {**lists, "prompts": [prompt] * len(rollouts), "completions": completions}


def _by_position(values: Any, count: int) -> dict[str, Json]:
    """The values of a batch as a dict: by position, further numbers as "position/name". Of a completion without a value
    (None) there is no entry."""
    if not hasattr(values, "__len__") or isinstance(values, str | Mapping) or len(values) != count:
        got = f"{len(values)} values" if hasattr(values, "__len__") else f"a {type(values).__name__}"
        raise ValueError(f"returned {got} for {count} completions; expected a list with a number for each")
    out: dict[str, Json] = {}
    for n, value in enumerate(values):
        if isinstance(value, Mapping):
            if "score" not in value:
                raise ValueError(f"a dict without 'score' for completion {n}: {sorted(map(str, value))[:5]}")
            out |= {f"{n}/{name}": entry for name, entry in value.items() if name != "score"}
            value = value["score"]
        if value is not None:
            out[str(n)] = number(value, f" as the score of completion {n}")
    return out


def _verl_batch(task: Task, rollouts: Sequence[Json], columns: Mapping[str, Json]) -> dict[str, Json]:
    """What verl 0.9.1 passes with reward_manager=batch; here those of one group."""
    lists = zip(*(_verl(task, rollout) for rollout in rollouts))
    return {**columns, **{name: list(values) for name, values in zip(_GIVEN_VERL_BATCH, lists)}}


def _verl(task: Task, rollout: Mapping[str, Json]) -> tuple[str, str, Json, Json]:
    """What verl 0.9.1 passes. extra_info has what the environment told (verl's extra_fields) and num_turns: the prompt,
    the replies and the answers to them; 2 for a single reply."""
    extra = task.extra.get("extra_info", task.extra)
    if isinstance(extra, dict):
        speakers = [m["role"] == "assistant" for m in rollout["messages"]]
        after = speakers[speakers.index(True) :] if True in speakers else [True]
        turns = 1 + sum(a or b for a, b in zip(after, [True, *after]))
        told = rollout["state"] if isinstance(rollout["state"], dict) else {}
        extra = {**extra, **told, "num_turns": turns, "rollout_reward_scores": rollout["parts"]}
    return task.source, rollout["text"], task.answer, extra


def _check(
    parameters: Mapping[str, inspect.Parameter],
    given: tuple[str, ...],
    arguments: Mapping[str, Json],
    *,
    what: str,
    columns: bool,
    more: tuple[str, ...] = (),
) -> None:
    """Every argument has a parameter; without columns, every parameter without a default has a value. more: what is
    given beside the shape."""
    kinds = {p.kind for p in parameters.values()}
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        raise ConfigError(f"{what}: its arguments are passed by name; remove the '/' from its signature")
    named = [p for p in parameters.values() if p.kind not in _VARIADIC]
    if given[0 if given is _GIVEN else 1] not in parameters:
        raise ConfigError(
            f"{what} takes ({', '.join(map(_written, parameters.values()))}); expected (response, task, ...), "
            f"verl's ({', '.join(_GIVEN_VERL)}) or TRL's (prompts, completions, ...)"
        )
    for key in arguments:
        if key in given or (
            key not in {p.name for p in named} and inspect.Parameter.VAR_KEYWORD not in kinds
        ):
            free = [p.name for p in named if p.name not in given]
            raise ConfigError(
                f"{what} has no argument {key!r}{near(key, free)}; it has: {', '.join(free) or 'none'}"
            )
    missing = [
        p.name
        for p in named
        if p.default is p.empty and p.name not in (*given, *more) and p.name not in arguments
    ]
    if missing and not columns:
        raise ConfigError(f"{what} needs a value for {', '.join(missing)}; give it under `arguments`")


def _written(parameter: inspect.Parameter) -> str:
    """Its name, with the stars that it has in a signature."""
    stars = [parameter.kind is parameter.VAR_KEYWORD, parameter.kind in _VARIADIC]
    return "*" * sum(stars) + parameter.name
