"""Assignments: `A=1`, `A+=(x y)`, `export`, `declare`, `local`, `readonly`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from whet.dialects.shell.arithmetic import NoNumber, evaluate
from whet.dialects.shell.expand import fields, number, text
from whet.dialects.shell.nodes import Assign, Word
from whet.dialects.shell.state import Field, State, Status, Variable

_PAIR = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL | re.ASCII)


def assign(node: Assign, state: State) -> None:
    """Give a variable its value."""
    state.budget.step(node.line)
    old = state.variables.get(node.name)
    if not isinstance(node.value, Word):
        state.set(node.name, _array(node, old, state))
        return
    value = text(node.value, state, value=True)
    if node.index is None:
        put(node.name, value, node.append, state, node.line)
        return
    held = _held(old)
    key = _key(node.index, old, state)
    before = held.get(key)
    made = (before.text if before and node.append else "") + value
    state.set(node.name, _sorted({**held, key: Field(made, node.line)}))


def put(name: str, value: str, append: bool, state: State, line: int) -> None:
    """`name=value` or `name+=value`."""
    old = state.variables.get(name)
    if old and old.whole:
        try:
            made, used = evaluate(f"{old.text or 0}+({value})" if append else value, state, line)
            value, append = state.unknowns.derived(str(made), used), False
        except NoNumber as e:
            value = state.refused(line, f"{name} is a number: {e}")
    if append:
        value = (state.get(name) or "") + value
        state.budget.grow(len(value), line)
    state.set(name, value)


def _array(node: Assign, old: Variable | None, state: State) -> Mapping[int | str, Field]:
    held = _held(old) if node.append else {}
    at = max((key for key in held if isinstance(key, int)), default=-1) + 1
    assert not isinstance(node.value, Word)
    dropped = len(state.dropped)
    for key, word in node.value:
        if key is not None:
            where = _key(key, old, state)
            held[where] = Field(text(word, state, value=True), word.line)
            at = where + 1 if isinstance(where, int) else at
            continue
        for made in fields([word], state):
            held[at] = made
            at += 1
    for variable, where in state.dropped[dropped:]:
        state.note(where, f"${variable} is not set: the word is left out of {node.name}")
    return _sorted(held)


def _held(old: Variable | None) -> dict[int | str, Field]:
    if old is None:
        return {}
    return {0: Field(old.value, 0)} if isinstance(old.value, str) else dict(old.value)


def _sorted(held: dict[int | str, Field]) -> dict[int | str, Field]:
    """By index, as the shell gives them; text keys in the order they came."""
    keys = list(held)
    if any(isinstance(key, str) for key in keys) or all(a < b for a, b in pairwise(keys)):  # type: ignore[operator]
        return held
    return dict(sorted(held.items()))


def _key(index: Word, old: Variable | None, state: State) -> int | str:
    if old and old.keyed:
        return state.unknowns.shown(text(index, state))
    at = number(index, state)
    if at < 0 and old and not isinstance(old.value, str):
        at += max((k for k in old.value if isinstance(k, int)), default=-1) + 1
    return at


def declare(name: str, words: Sequence[Word | Assign], state: State, line: int) -> Status:
    """`export`, `declare`, `typeset`, `local`, `readonly`, with whatever stands behind them."""
    flags = ""
    made: list[Assign | Field] = []
    for word in words:
        if isinstance(word, Assign):
            made.append(word)
            continue
        for field in fields([word], state):
            if field.text[:1] == "-" and not made:
                flags += field.text[1:]
            elif field.text[:1] != "+":
                made.append(field)
    if "n" in flags and name != "export":
        state.note(line, f"`{name} -n`, a name for another variable, is not understood")
        return 1
    if flags.strip("-") in ("p", "f", "F"):
        return 0
    here = name == "local" or (name in ("declare", "typeset") and "g" not in flags)
    for each in made:
        target = each.name if isinstance(each, Assign) else each.text.partition("=")[0].rstrip("+")
        _declare(target, each, flags, here, name == "export" or "x" in flags, state, line)
    return 0


def _declare(
    name: str, what: Assign | Field, flags: str, here: bool, export: bool, state: State, line: int
) -> None:
    outer = state.variables.get(name)
    if here:
        state.hide(name)
    kept = state.variables.get(name)
    if "A" in flags or "a" in flags or "i" in flags:
        base = kept or Variable({} if "i" not in flags else "")
        state.variables[name] = replace(base, keyed="A" in flags, whole="i" in flags)
    if isinstance(what, Assign):
        if here and outer is not None and kept is None and what.append and name not in state.variables:
            state.variables[name] = outer
        assign(what, state)
    elif pair := _PAIR.fullmatch(what.text):
        put(name, pair[3], pair[2] == "+", state, line)
    elif here and name not in state.variables:
        return
    if export and name in state.variables:
        state.variables[name] = replace(state.variables[name], exported="n" not in flags)
