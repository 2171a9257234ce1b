"""Code in a reply, run against the tests of its row on this machine, in a sandbox (`guard.program`)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from whet.guard.program import ProgramOutcome, Programs, longest_s, run
from whet.rewards.sandbox_fusion import NAMES, ProgramRun, checks_of, code_in
from whet.types import Task

MOST_TESTS = 10
_NEAR = {"rel_tol": 1e-5, "abs_tol": 1e-8}
"""How near two numbers with a fraction have to be, as numpy.allclose and verl 0.9.1 (`prime_code`)."""


async def code(
    response: str,
    task: Task,
    *,
    timeout_s: PositiveFloat = 5,
    memory_mb: PositiveInt = 1024,
    most_tests: PositiveInt | None = MOST_TESTS,
    partial: bool = True,
    block: Literal["python", "last"] = "python",
    sources: Sequence[str] | None = None,
) -> dict[str, float]:
    """The share of the row's tests that the code in the reply passes; 0 without a code block. Python alone.

    `timeout_s`, `memory_mb`: of one test; `memory_mb` is address space, Python's own included. `most_tests`: only so
    many of the first tests are run, as verl 0.9.1 does (`prime_code`); null: all. `partial`: false gives 1 if all of
    them pass, else 0. `block`: python, the last that is marked so, else the first; last, whatever it is marked as.
    `sources`: tasks of other sources have the score 0.

    The tests are those of `sandbox_fusion`. Outputs are equal if their lines are, but for white space around them, if
    they are the same value in JSON, or if their words are the same, where numbers with a fraction may differ by a part
    in 10^5. A part `ended/REASON` counts the programs that did not end well: error, time, printed (more than 1 MiB),
    exit (before the assertions that follow it). OSError where this system has no sandbox: the rollout is unscored.
    """
    if sources is not None and task.source not in sources:
        return {"score": 0.0}
    found = code_in(response, "python") if block == "python" else _last_block(response)
    if found is None:
        return {"score": 0.0}
    checks = checks_of(task, found, "python", named=True)[:most_tests]
    ran = await run(
        Programs(
            runs=[(check.program, check.stdin or "") for check in checks],
            seconds=timeout_s,
            memory_mb=memory_mb,
            stops=not partial,
            before=NAMES,
        )
    )
    passed = sum(map(passes, ran, checks))
    reasons = [each.ended for each, check in zip(ran, checks) if each.ended not in _fine(check)]
    parts = {f"ended/{reason}": float(reasons.count(reason)) for reason in sorted(set(reasons))}
    return {"score": passed / len(checks) if partial else float(passed == len(checks)), **parts}


def _last_block(response: str) -> str | None:
    blocks = re.findall(r"```\w*\n(.*?)```", response, re.DOTALL)
    return blocks[-1] if blocks else None


def needs_s(arguments: Mapping[str, Any]) -> float:
    """The longest wait for the tests of one reply; for one test where there is no limit to their number."""
    return longest_s(int(arguments.get("most_tests", MOST_TESTS) or 1), float(arguments.get("timeout_s", 5)))


def _fine(check: ProgramRun) -> tuple[str, ...]:
    """How it may end. A program that leaves before its assertions has not met them."""
    return ("well",) if check.stdout is None else ("well", "exit")


def passes(ran: ProgramOutcome, check: ProgramRun) -> bool:
    if ran.ended not in _fine(check):
        return False
    return check.stdout is None or equal(ran.printed, check.stdout)


def equal(printed: str, expected: str) -> bool:
    """Whether an output is the expected one."""
    one, other = ([line.strip() for line in text.strip().split("\n")] for text in (printed, expected))
    return one == other or _as_values(printed, expected) or _as_words(printed.split(), expected.split())


def _as_values(printed: str, expected: str) -> bool:
    """Equal as values in JSON: {"a": 1} is {"a":1}."""
    try:
        one, other = (json.dumps(json.loads(text), sort_keys=True) for text in (printed, expected))
    except (ValueError, RecursionError):
        return False
    return one == other


def _as_words(printed: Sequence[str], expected: Sequence[str]) -> bool:
    return len(printed) == len(expected) and all(map(_same_word, printed, expected))


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if not set("0123456789") & set(expected) or not set(".eE") & set(printed + expected):
        return False
    try:
        return math.isclose(float(printed), float(expected), **_NEAR)
    except ValueError:
        return False
