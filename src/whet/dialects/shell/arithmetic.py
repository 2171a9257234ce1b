"""The whole numbers of `$((...))`: 64 bits that wrap, as the shell computes them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from whet.dialects.shell.state import State

_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|[0-9]+#[0-9a-zA-Z]+|[0-9]+)|([A-Za-z_]\w*)(?:\[([^\[\]]*)\])?"
    r"|(<<=|>>=|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),]))",
    re.ASCII,
)
_LEVELS = ["||", "&&", "|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* / %"]
_MOST_DEPTH = 30
_MOST_DIGITS = 20


class NoNumber(Exception):
    """Text that is no arithmetic."""


def evaluate(text: str, state: State, line: int, depth: int = 0) -> tuple[int, list[str]]:
    """(the number, texts it was made of that are not known). NoNumber where it is none."""
    reader = _Reader(text, state, line, depth)
    return reader.whole(), reader.used


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def _divided(a: int, b: int) -> int:
    if b == 0:
        raise NoNumber("division by 0")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_DO: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divided,
    "%": lambda a, b: a - b * _divided(a, b),
    "<<": lambda a, b: a << (b & 63),
    ">>": lambda a, b: a >> (b & 63),
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    ">": lambda a, b: int(a > b),
    ">=": lambda a, b: int(a >= b),
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
}


class _Reader:
    def __init__(self, text: str, state: State, line: int, depth: int) -> None:
        state.budget.step(line)
        if depth > _MOST_DEPTH:
            raise NoNumber("variables that are made of one another without end")
        self.state, self.line, self.depth = state, line, depth
        self.used = [text] if state.unknowns.any(text) else []
        text = state.unknowns.shown(text)
        self.text, self.at = text, 0
        self.tokens: list[tuple[str, str, str, str]] = []
        while self.at < len(text.rstrip()):
            found = _TOKEN.match(text, self.at)
            if found is None:
                raise NoNumber(f"`{text.strip()[:60]}` is no whole-number arithmetic")
            self.tokens.append((found[1] or "", found[2] or "", found[3] or "", found[4] or ""))
            self.at = found.end()
        self.n, self.level, self.skips = 0, 0, 0

    @property
    def op(self) -> str:
        return self.tokens[self.n][3] if self.n < len(self.tokens) else ""

    def whole(self) -> int:
        if not self.tokens:
            return 0
        number = self.comma()
        if self.n < len(self.tokens):
            raise NoNumber(f"`{self.text.strip()[:60]}` is no whole-number arithmetic")
        return number

    def comma(self) -> int:
        number = self.choice()
        while self.op == ",":
            self.n += 1
            number = self.choice()
        return number

    def choice(self) -> int:
        self.level += 1
        if self.level > _MOST_DEPTH:
            raise NoNumber("arithmetic that nests too deep")
        number = self.binary(0)
        if self.op == "?":
            self.n += 1
            yes = self.quiet(not number, self.comma)
            if self.op != ":":
                raise NoNumber("a `?` without its `:`")
            self.n += 1
            no = self.quiet(bool(number), self.choice)
            number = yes if number else no
        self.level -= 1
        return number

    def quiet(self, skip: bool, inner: Callable[[], int]) -> int:
        """Read what is not evaluated: it assigns nothing and divides by nothing."""
        self.skips += skip
        number = inner()
        self.skips -= skip
        return number

    def binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self.power()
        left = self.binary(level + 1)
        while self.op and self.op in _LEVELS[level].split():
            op = self.op
            self.n += 1
            if op in ("&&", "||"):
                right = self.quiet(bool(left) == (op == "||"), lambda: self.binary(level + 1))
                left = int(bool(left and right) if op == "&&" else bool(left or right))
            else:
                right = self.binary(level + 1)
                left = 0 if self.skips else _wrapped(_DO[op](left, right))
        return left

    def power(self) -> int:
        base = self.unary()
        if self.op != "**":
            return base
        self.n += 1
        exponent = self.power()
        if exponent < 0:
            raise NoNumber("a negative exponent")
        return _wrapped(pow(base, exponent, 2**64))

    def unary(self) -> int:
        op = self.op
        if op in ("++", "--"):
            self.n += 1
            return self.change(self.n, 1 if op == "++" else -1, after=True)
        if op and op in "+-!~":
            self.n += 1
            self.level += 1
            if self.level > _MOST_DEPTH:
                raise NoNumber("arithmetic that nests too deep")
            number = self.unary()
            self.level -= 1
            return {"+": number, "-": -number, "!": int(not number), "~": ~number}[op]
        return self.primary()

    def change(self, at: int, by: int, *, after: bool) -> int:
        if at >= len(self.tokens) or not self.tokens[at][1]:
            raise NoNumber("++ and -- want a variable")
        old = self.variable(at)
        self.assign(at, old + by)
        self.n = at + (1 if after else 2)
        return old + by if after else old

    def primary(self) -> int:
        if self.n >= len(self.tokens):
            raise NoNumber(f"`{self.text.strip()[:60]}` ends where a number is expected")
        number, name, _, op = self.tokens[self.n]
        at = self.n
        self.n += 1
        if number:
            return _read(number)
        if op == "(":
            inner = self.comma()
            if self.op != ")":
                raise NoNumber("a `(` without its `)`")
            self.n += 1
            return inner
        if not name:
            raise NoNumber(f"`{op}` stands where a number is expected")
        if self.op in ("++", "--"):
            return self.change(at, 1 if self.op == "++" else -1, after=False)
        if self.op and self.op[-1] == "=" and self.op not in ("==", "!=", "<=", ">="):
            how = self.op[:-1]
            self.n += 1
            right = self.choice()
            made = _wrapped(_DO[how](self.variable(at), right)) if how and not self.skips else right
            self.assign(at, made)
            return made
        return self.variable(at)

    def variable(self, at: int) -> int:
        _, name, index, _ = self.tokens[at]
        text = self.state.get(name)
        variable = self.state.variables.get(name)
        if index and variable and not isinstance(variable.value, str):
            number, used = evaluate(index, self.state, self.line, self.depth + 1)
            self.used += used
            found = variable.value.get(number)
            text = found.text if found else None
        if text is None:
            self.used.append(self.state.unset(name, self.line))
            return 0
        number, used = evaluate(text, self.state, self.line, self.depth + 1)
        self.used += used
        return number

    def assign(self, at: int, number: int) -> None:
        if not self.skips:
            made = self.state.unknowns.derived(str(_wrapped(number)), self.used)
            self.state.set(self.tokens[at][1], made)


def _read(text: str) -> int:
    if len(text) > _MOST_DIGITS + 3:
        raise NoNumber(f"{text[:20]}... is beyond 64 bits")
    try:
        base, mark, digits = text.partition("#")
        if mark:
            return _wrapped(int(digits, int(base)))
        if text[:2] in ("0x", "0X"):
            return _wrapped(int(text, 16))
        return _wrapped(int(text, 8 if text[0] == "0" and len(text) > 1 else 10))
    except ValueError:
        raise NoNumber(f"{text} is no number") from None
