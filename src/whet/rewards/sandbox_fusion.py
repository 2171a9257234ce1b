"""Code in a reply, run against the tests of its row by a SandboxFusion service (github.com/bytedance/SandboxFusion).

Nothing of a reply runs here: its text is sent to the service. What is sent, what is repeated and what a test counts
are as in verl 0.9.1 (`verl/utils/reward_score/sandbox_fusion`), but for one thing: where the service fails, verl counts
the test as not passed; here the rollout is unscored.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
from pydantic import PositiveFloat, PositiveInt

from whet.guard.foreign import words
from whet.rewards.builtin import reference
from whet.rewards.service import post
from whet.types import Json, Task

MARGIN_S = 10.0
"""For the way to the service and back, beside the limits of compiler and program."""
_MOST_TOLD = 300


class ProgramRun(NamedTuple):
    """One run of the program."""

    program: str
    stdin: str | None
    stdout: str | None
    """What it has to print, line ends at the end aside; None: it only has to end well."""


async def sandbox_fusion(
    response: str,
    task: Task,
    *,
    url: str,
    max_concurrent: PositiveInt = 64,
    memory_limit_mb: PositiveInt | None = 1024,
    timeout_s: PositiveFloat = 10,
    language: str = "python",
    most_tests: PositiveInt | None = None,
    sources: Sequence[str] | None = None,
    processes: int = 1,
) -> dict[str, float]:
    """The share of the row's tests that the last code block of the reply passes; 0 without a code block.

    `url`: of the service's run_code. `max_concurrent`: requests at once, of all `processes` together (their number is
    given by the run). `memory_limit_mb`, `timeout_s`: of one run, and of one compilation. `most_tests`: only so many
    of the first tests are run. `sources`: tasks of other sources have the score 0.

    The answer of the row is a mapping, or its JSON text: `inputs` and `outputs`, lists of standard input and expected
    output. With `fn_name` each line of an input is an argument, in JSON, of that function or method of `Solution`. With
    `assert_case`, a list of code that follows the program, inputs and outputs may be absent. Or a list of such tests as
    LiveCodeBench has them: mappings with `input` and `output`, whose `testtype` may be functional, and then `metadata`
    has `func_name`.
    """
    if sources is not None and task.source not in sources:
        return {"score": 0.0}
    if (code := code_in(response, language)) is None:
        return {"score": 0.0}
    checks = checks_of(task, code, language)[:most_tests]
    body: dict[str, Json] = {"compile_timeout": timeout_s, "run_timeout": timeout_s, "language": language}
    body |= {"files": {}, "fetch_files": []}
    body |= {} if memory_limit_mb is None else {"memory_limit_MB": memory_limit_mb}
    room = asyncio.Semaphore(max(1, max_concurrent // processes))
    limit = aiohttp.ClientTimeout(total=2 * timeout_s + MARGIN_S)
    async with aiohttp.ClientSession(timeout=limit) as session:

        async def run(check: ProgramRun) -> str:
            asked = {**body, "code": check.program, "stdin": check.stdin}
            async with room:
                said = await post(session, url, asked, what="the sandbox")
            # an answer holds little but what the program printed, so a program that prints more is wrong
            return "wrong" if said is None else outcome(said, check.stdout)

        outcomes = await asyncio.gather(*map(run, checks))
    compiled = outcomes.index("compile") if "compile" in outcomes else len(outcomes)
    return {"score": outcomes[:compiled].count("passed") / len(outcomes)}


def needs_s(arguments: Mapping[str, Any]) -> float:
    """The longest wait for the answer to one test."""
    return 2 * float(arguments.get("timeout_s", 10)) + MARGIN_S


# ---------------------------------------------------------------- the reply and its row


def code_in(response: str, language: str) -> str | None:
    """The last block that is marked as code of this language; else the first block of all, without the name of a
    language before it. None: the reply has no block."""
    if f"```{language}" in response:
        return response.split(f"```{language}")[-1].split("```")[0]
    blocks = response.split("```")
    if len(blocks) < 2:
        return None
    name, line_end, rest = blocks[1].partition("\n")
    return rest if line_end and name.strip().isalpha() else blocks[1]


def checks_of(task: Task, code: str, language: str, *, named: bool = False) -> list[ProgramRun]:
    """The tests of a row for a program. named: it runs where the names that solutions take for granted are there.
    ValueError where it has none: a score of 0 would penalise the reply."""
    found = reference(task)
    where = f"task {task.uid} of {task.source!r}"
    try:
        found = json.loads(found) if isinstance(found, str) else found
    except ValueError as error:
        raise ValueError(f"{where}: its answer is not JSON: {error}") from None
    found = _of_livecodebench(found) if isinstance(found, list) else found
    asserts = found.get("assert_case") if isinstance(found, dict) else None
    if isinstance(asserts, list):
        found = {"inputs": [""] * len(asserts), "outputs": [None] * len(asserts), **found}
    if not isinstance(found, dict) or not all(isinstance(found.get(k), list) for k in ("inputs", "outputs")):
        raise ValueError(
            f"{where}: its answer has no tests; expected the lists `inputs` and `outputs`, or `assert_case`"
        )
    inputs, outputs = found["inputs"], found["outputs"]
    asserts = [""] * len(inputs) if asserts is None else asserts
    if not inputs or not len(inputs) == len(outputs) == len(asserts):
        raise ValueError(
            f"{where}: {len(inputs)} inputs, {len(outputs)} outputs and {len(asserts)} assert_case; expected as many "
            "of each, and at least one"
        )
    function = found.get("fn_name") if language == "python" else None
    programs = [f"{code}\n\n{each}" for each in asserts]
    return [
        ProgramRun(
            calling(program, function, named=named) if function else program, _text(stdin), _text(stdout)
        )
        for program, stdin, stdout in zip(programs, inputs, outputs)
    ]


def _of_livecodebench(tests: list[Json]) -> Json:
    """The same as lists; None where a test lacks its input or output."""
    if not tests or not all(isinstance(each, dict) and {"input", "output"} <= each.keys() for each in tests):
        return None
    lists = {f"{name}s": [each[name] for each in tests] for name in ("input", "output")}
    if tests[0].get("testtype") != "functional":
        return lists
    more = tests[0].get("metadata")
    more = json.loads(more) if isinstance(more, str) else more
    return lists | {"fn_name": more["func_name"]} if isinstance(more, dict) and "func_name" in more else None


def _text(value: Json) -> str | None:
    return None if value is None else str(value)


_MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json",
)  # fmt: skip
NAMES = "\n".join(
    [f"from {module} import *" for module in (*_MODULES, "builtins", "typing")]
    + [f"import {module}" for module in _MODULES]
)
"""Solutions are written for a place where these are at hand."""
_CALL = """
import json as _json, sys as _sys, traceback as _traceback

def _call():
    text = _sys.stdin.read()
    arguments = [_json.loads(line) for line in text.split("\\n")] if text.strip() else []
    function = globals().get(_NAME)
    if function is None:
        function = getattr(Solution(), _NAME)
    value = function(*arguments)
    plain = value is None or isinstance(value, (bool, dict, list, tuple))
    print(_json.dumps(value) if plain else value)

if __name__ == "__main__":
    try:
        _call()
    except Exception:
        _traceback.print_exc()
"""


def calling(program: str, function: str, *, named: bool = False) -> str:
    """A program that calls a function of this one: arguments from standard input, one a line in JSON; the value to
    standard output, in JSON if it is no number or text. An error there ends it as well, with nothing printed. named:
    without the imports that solutions take for granted."""
    return "\n".join([*([] if named else [NAMES]), program, f"_NAME = {function!r}", _CALL])


# ---------------------------------------------------------------- the service


def outcome(said: Json, expected: str | None) -> str:
    """passed, wrong, or compile (an error of the compiler, which all later tests would have, too). ConnectionError
    where the service says that it has failed, or something that it is not known to say."""
    said = said if isinstance(said, dict) else {}
    status, ran, compiled = said.get("status"), _part(said, "run_result"), _part(said, "compile_result")
    if status == "Success" and ran.get("status") == "Finished":
        printed = str(ran.get("stdout") or "").rstrip("\n")
        return "passed" if expected is None or printed == expected.rstrip("\n") else "wrong"
    if status == "Failed" and _failed(compiled):
        return "compile"
    if status == "Failed" and _failed(ran):
        return "wrong"
    raise ConnectionError(
        f"the sandbox could not run the program: status {status!r}, run {ran.get('status')!r}: "
        f"{words(str(said.get('message', '')), _MOST_TOLD)}"
    )


def _part(said: Mapping[str, Json], name: str) -> Mapping[str, Json]:
    part = said.get(name)
    return part if isinstance(part, dict) else {}


def _failed(part: Mapping[str, Json]) -> bool:
    status = part.get("status")
    return status in ("Error", "TimeLimitExceeded") or (status == "Finished" and part.get("return_code") != 0)
