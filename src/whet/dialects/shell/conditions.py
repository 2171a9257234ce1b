"""`[ ]` and `[[ ]]`: a status where all that is compared is known, a doubt where it is not."""

from __future__ import annotations

from collections.abc import Sequence

from whet.dialects.shell import patterns
from whet.dialects.shell.arithmetic import NoNumber, evaluate
from whet.dialects.shell.expand import pieces, text
from whet.dialects.shell.nodes import Condition, Word
from whet.dialects.shell.state import Doubt, Field, State, Status

_FILES = set("fdesrwxLhbcpSgukGON")
_NUMBERS = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_TEXTS = {"==", "=", "!=", "<", ">"}


def turned(status: Status) -> Status:
    """The status behind `!`."""
    if isinstance(status, Doubt):
        what = status.what.removeprefix("! ") if status.what.startswith("! ") else f"! {status.what}"
        return Doubt(status.line, what, None if status.guess is None else not status.guess)
    return int(status == 0)


def both(first: Status, second: Status) -> Status:
    """The status of `&&` where both sides are only asked."""
    if first == 0:
        return second
    if isinstance(first, int) or (isinstance(second, int) and second != 0):
        return first if isinstance(first, int) else second
    if isinstance(second, int) or first.guess is False:
        return first
    return second if first.guess else Doubt(first.line, first.what)


def condition(node: Condition, state: State) -> Status:
    """`[[ ... ]]`."""
    state.budget.step(node.line)
    inner = [part for part in node.parts if isinstance(part, Condition)]
    if node.op == "!":
        return turned(condition(inner[0], state))
    if node.op in ("&&", "||"):
        over = node.op == "||"
        status: Status = 1 if over else 0
        for part in inner:
            made = condition(part, state)
            status = turned(both(turned(status), turned(made))) if over else both(status, made)
            if status == (0 if over else 1):
                break
        return status
    words = [part for part in node.parts if isinstance(part, Word)]
    if len(words) == 1:
        return _unary(node.op, text(words[0], state), state, node.line)
    left = text(words[0], state)
    if node.op in ("==", "=", "!="):
        right = text(words[1], state)
        return _alike(node.op, left, right, state, node.line, pieces(words[1], state))
    return _binary(node.op, left, text(words[1], state), state, node.line, arithmetic=True)


def test(fields: Sequence[Field], state: State, line: int) -> Status:
    """`[ ... ]`, with `-a` and `-o`."""
    said = [field.text for field in fields]
    for op in ("-o", "-a"):
        if op in said[1:-1] and len(said) > 3:
            at = said.index(op, 1)
            first, second = test(fields[:at], state, line), test(fields[at + 1 :], state, line)
            return both(first, second) if op == "-a" else turned(both(turned(first), turned(second)))
    if said[:1] == ["!"] and len(said) > 1:
        return turned(test(fields[1:], state, line))
    if len(said) > 2 and said[0] in ("(", "\\(") and said[-1] in (")", "\\)"):
        return test(fields[1:-1], state, line)
    if not said:
        return 1
    if len(said) == 1:
        return _unary("-n", said[0], state, line)
    if len(said) == 2:
        return _unary(said[0], said[1], state, line)
    if len(said) == 3 and said[1] in ("=", "==", "!="):
        return _alike(said[1], said[0], said[2], state, line, None)
    return _binary(said[1], said[0], said[2], state, line) if len(said) == 3 else 2


def _unary(op: str, value: str, state: State, line: int) -> Status:
    named = state.unknowns.named(value)
    doubt = Doubt(line, f"{op} {named}")
    if op in ("-z", "-n"):
        found = state.unknowns.of(value)
        if any(u.kind == "granted" for u in found):
            empty = False
        elif state.unknowns.firm(value) or state.unknowns.shown(value):
            empty = state.unknowns.shown(value) == ""
        else:
            return doubt
        return int(empty != (op == "-z"))
    if op == "-v":
        return int(state.get(value.partition("[")[0]) is None)
    if op == "-t":
        return Doubt(line, doubt.what, False)
    if len(op) == 2 and op[1] in _FILES:
        path = state.unknowns.shown(value)
        if state.unknowns.firm(value) and path and state.exists(path):
            return 0
        return 1 if value == "" else Doubt(line, f"{op} {named}", False)
    return doubt


def _alike(
    op: str, left: str, right: str, state: State, line: int, pattern: list[tuple[str, bool]] | None
) -> Status:
    known = state.unknowns.firm(left) and state.unknowns.firm(right)
    if not known and left != right:
        return Doubt(line, f"{state.unknowns.named(left)} {op} {state.unknowns.named(right)}")
    shown = state.unknowns.shown(left)
    if pattern is None:
        same = shown == state.unknowns.shown(right)
    else:
        same = left == right or patterns.matches(patterns.pattern(pattern), shown)
    return int(same == (op == "!="))


def _binary(op: str, left: str, right: str, state: State, line: int, *, arithmetic: bool = False) -> Status:
    doubt = Doubt(line, f"{state.unknowns.named(left)} {op} {state.unknowns.named(right)}")
    if not (state.unknowns.firm(left) and state.unknowns.firm(right)):
        return doubt
    left, right = state.unknowns.shown(left), state.unknowns.shown(right)
    if op in ("<", ">"):
        return int(not (left < right if op == "<" else left > right))
    if op not in _NUMBERS:
        return doubt
    try:
        if not arithmetic:
            return int(not _NUMBERS[op](int(left.strip()[:25]), int(right.strip()[:25])))
        (a, used), (b, more) = evaluate(left, state, line), evaluate(right, state, line)
    except (ValueError, NoNumber):
        return 2
    if not all(state.unknowns.firm(each) for each in used + more):
        return doubt
    return int(not _NUMBERS[op](a, b))
