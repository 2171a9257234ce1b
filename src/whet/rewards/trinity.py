"""The rewards that Trinity-RFT brings along, each the sum of its parts, as there."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from whet.rewards.builtin import Verdict, reference
from whet.rewards.math import math
from whet.rewards.tagged import answer_in
from whet.types import Json, Task

_FORM = 0.1
"""What the right form adds, and a wrong one takes away."""
_THINK_AND_ANSWER = (
    re.compile("<think>"),
    re.compile(r"</think>\s*+<answer>"),
    re.compile(r"</answer>[^\S\n]*+$", re.MULTILINE),
)
_TAGS_IN_LINES = (
    re.compile(r"\A<think>\n"),
    re.compile(r"\n</think>\n<answer>\n"),
    re.compile(r"\n</answer>$", re.MULTILINE),
)
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def math_reward(response: str, task: Task) -> Verdict:
    """1 for the right result, of <answer> where there is one; 0.1 more if the reply ends in <think>...</think> and
    <answer>...</answer>, else 0.1 less.
    """
    judged = math(answer_in(response), task)
    return _sum(judged, _FORM if _in_order(response, _THINK_AND_ANSWER) else -_FORM)


def math_boxed_reward(
    response: str, task: Task, *, with_think: bool = False, format_score_coef: float = 0.1
) -> Verdict:
    r"""1 if the last \boxed{} is right. with_think: format_score_coef less unless there is one <think>...</think>."""
    judged = math(response, task, boxed=True)
    form = -format_score_coef if with_think and not _thinks(response) else 0.0
    return _sum(judged, form)


def math_dapo_reward(response: str, task: Task) -> Verdict:
    """1 for the right result, else -1, as from 0.6.0 on; before, it was the plain reward `math`."""
    judged = math(response, task)
    return {**judged, "score": 1.0 if float(judged["score"]) >= 0.5 else -1.0}


def format_reward(response: str, task: Task) -> float:
    """0.1 if the reply begins with <think>, and <answer> follows, each tag in a line of its own; else -0.1."""
    return _FORM if _in_order(response, _TAGS_IN_LINES) else -_FORM


def countdown_reward(response: str, task: Task) -> float:
    """The answer is {"target": 24, "numbers": [...]}, also as text. 1 if the last <answer> of the last line uses every
    number once and makes the target, 0.1 if it does not, 0 without one.
    """
    wanted = reference(task)
    wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
    if not isinstance(wanted, dict) or not {"target", "numbers"} <= wanted.keys():
        raise ValueError(f"the answer of task {task.uid} needs a target and numbers: {str(wanted)[:60]!r}")
    found = _last("answer", response.split("\n")[-1])
    if found is None:
        return 0.0
    try:
        used = sorted(map(int, re.findall(r"\d+", found)))
    except ValueError:  # more digits than Python reads
        return _FORM
    value = _value(found.strip()) if used == sorted(wanted["numbers"]) else None
    return 1.0 if value is not None and abs(value - Fraction(str(wanted["target"]))) < 1e-5 else _FORM


def toolcall_reward(response: str, task: Task) -> float:
    """1 if the calls of the last <tool_call> are those of the answer, in any order, after one <think>...</think>; else
    0 (Tool-N1, arXiv:2505.00024). The answer is a list of {name, arguments}, also as JSON text.
    """
    wanted = reference(task)
    wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
    if not isinstance(wanted, list) or not all(map(_is_call, wanted)):
        raise ValueError(f"the answer of task {task.uid} is no list of calls: {str(wanted)[:60]!r}")
    found = _last("tool_call", response)
    marks = [response.count(mark) for mark in ("<think>", "</think>")]
    if found is None or marks != [1, 1] or response.find("</think>") > response.find("<tool_call>"):
        return 0.0
    calls = _json(found)
    calls = _json(calls) if isinstance(calls, str) else calls
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        return 0.0
    return float(sorted(map(_call, calls)) == sorted(map(_call, wanted)))


def _json(text: str) -> Json:
    """What a text says as JSON; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_call(value: Json) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and "arguments" in value


def _call(call: dict[str, Json]) -> tuple[str, str]:
    return call["name"], json.dumps(call["arguments"], sort_keys=True)


def _sum(judged: Verdict, form: float) -> Verdict:
    accuracy = float(judged["score"])
    return {**judged, "score": accuracy + form, "accuracy": accuracy, "format_score": form}


def _in_order(text: str, patterns: Sequence[re.Pattern[str]]) -> bool:
    """Whether one is found after the other. In one expression, a reply that repeats its tags would take hours."""
    at = 0
    for pattern in patterns:
        if (found := pattern.search(text, at)) is None:
            return False
        at = found.end()
    return True


def _last(tag: str, text: str) -> str | None:
    """What stands in the last <tag>...</tag>; None without one. The search for an expression begins again at each tag,
    so a reply that repeats its tags would take seconds."""
    begin = f"<{tag}>"
    inside = [part.partition(begin)[2] for part in text.split(f"</{tag}>")[:-1] if begin in part]
    return inside[-1] if inside else None


def _thinks(text: str) -> bool:
    """One <think> and one </think>, in this order."""
    counts = text.count("<think>"), text.count("</think>")
    return counts == (1, 1) and text.index("<think>") < text.index("</think>")


def _value(expression: str) -> Fraction | None:
    """The exact value of an expression of numbers, + - * / and brackets; None for anything else."""
    try:
        return _evaluated(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluated(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _evaluated(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    raise ValueError(f"not arithmetic: {type(node).__name__}")
