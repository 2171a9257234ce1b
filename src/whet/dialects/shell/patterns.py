"""The shell's patterns (`*`, `?`, `[a-z]`), matched in a time bounded by pattern times text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whet.types import ConfigError

MOST_WORK = 2_000_000
"""Characters compared for one pattern."""
_CLASSES: dict[str, Callable[[str], bool]] = {
    "alpha": str.isalpha,
    "digit": str.isdigit,
    "alnum": str.isalnum,
    "upper": str.isupper,
    "lower": str.islower,
    "space": str.isspace,
    "punct": lambda c: c.isprintable() and not c.isalnum() and c != " ",
}


@dataclass(frozen=True, slots=True)
class Any:
    """`?`, and `*` where `many`."""

    many: bool


@dataclass(frozen=True, slots=True)
class OneOf:
    """`[...]`"""

    negated: bool
    ranges: tuple[tuple[str, str], ...]
    names: tuple[str, ...]

    def holds(self, character: str) -> bool:
        found = any(low <= character <= high for low, high in self.ranges)
        return (found or any(_CLASSES[name](character) for name in self.names)) != self.negated


Token = str | Any | OneOf


def pattern(pieces: Sequence[tuple[str, bool]]) -> tuple[Token, ...]:
    """Tokens of text in pieces (text, whether it was quoted: then it stands for itself)."""
    characters = [(c, quoted) for text, quoted in pieces for c in text]
    tokens: list[Token] = []
    at = 0
    while at < len(characters):
        c, quoted = characters[at]
        at += 1
        if quoted or c not in "*?[":
            tokens.append(c)
        elif c == "[" and (found := _one_of(characters, at)):
            at, token = found
            tokens.append(token)
        elif c == "[":
            tokens.append(c)
        elif not (c == "*" and tokens and tokens[-1] == Any(True)):
            tokens.append(Any(c == "*"))
    return tuple(tokens)


def _one_of(characters: Sequence[tuple[str, bool]], at: int) -> tuple[int, OneOf] | None:
    """(where it ends, the token) of what stands behind `[`; None where it is not closed."""
    negated = at < len(characters) and characters[at] in (("!", False), ("^", False))
    at += negated
    begun = at
    ranges: list[tuple[str, str]] = []
    names: list[str] = []
    while at < len(characters):
        c, quoted = characters[at]
        if c == "]" and not quoted and at > begun:
            return at + 1, OneOf(negated, tuple(ranges), tuple(names))
        rest = "".join(x for x, _ in characters[at : at + 12])
        if rest.startswith("[:") and (name := rest[2:].partition(":]")[0]) in _CLASSES:
            names.append(name)
            at += len(name) + 4
        elif rest[1:2] == "-" and len(rest) > 2 and rest[2] != "]":
            ranges.append((c, rest[2]))
            at += 3
        else:
            ranges.append((c, c))
            at += 1
    return None


def matches(tokens: Sequence[Token], text: str) -> bool:
    """Whether the pattern is the whole text."""
    return len(text) in ends(tokens, text)


def ends(tokens: Sequence[Token], text: str) -> set[int]:
    """The lengths of what the pattern matches at the beginning of the text: all places in it go along at once."""
    if (len(tokens) + 1) * (len(text) + 1) > MOST_WORK:
        raise ConfigError(
            f"a pattern of {len(tokens)} characters over a text of {len(text)} is too much work"
        )
    alive, found = _over_stars(tokens, {0}), set()
    for n, c in enumerate(text):
        if len(tokens) in alive:
            found.add(n)
        after = set()
        for at in alive:
            if at < len(tokens) and _holds(tokens[at], c):
                after.add(at if tokens[at] == Any(True) else at + 1)
        alive = _over_stars(tokens, after)
        if not alive:
            return found
    return found | ({len(text)} if len(tokens) in alive else set())


def _over_stars(tokens: Sequence[Token], places: set[int]) -> set[int]:
    reached = set(places)
    for at in places:
        while at < len(tokens) and tokens[at] == Any(True):
            at += 1
            reached.add(at)
    return reached


def _holds(token: Token, c: str) -> bool:
    if isinstance(token, str):
        return token == c
    return isinstance(token, Any) or token.holds(c)


def without_prefix(tokens: Sequence[Token], text: str, longest: bool) -> str:
    """`${text#pattern}`, `##` where `longest`."""
    found = ends(tokens, text)
    return text[max(found) if longest else min(found) :] if found else text


def without_suffix(tokens: Sequence[Token], text: str, longest: bool) -> str:
    """`${text%pattern}`, `%%` where `longest`."""
    return without_prefix(tokens[::-1], text[::-1], longest)[::-1]


def replaced(tokens: Sequence[Token], text: str, new: str, op: str) -> str:
    """`${text/pattern/new}`; `op` is `/`, `//`, `/#` (at the beginning) or `/%` (at the end)."""
    if not tokens and op in ("/", "//"):
        return text
    if op == "/%":
        at = min((n for n in range(len(text) + 1) if matches(tokens, text[n:])), default=None)
        return text if at is None else text[:at] + new
    if len(text) * len(new) > 2 * MOST_WORK and op == "//":
        raise ConfigError(f"text of {len(new)} characters put all over one of {len(text)} is too much")
    if op in ("/", "//") and all(isinstance(token, str) for token in tokens):
        return text.replace("".join(map(str, tokens)), new, 1 if op == "/" else -1)
    out, at = [], 0
    if len(text) * (len(text) + 1) * (len(tokens) + 1) > 2 * MOST_WORK and op != "/#":
        raise ConfigError(f"a pattern replaced in a text of {len(text)} characters is too much work")
    while at < len(text) or (at == 0 and op == "/#"):
        found = max(ends(tokens, text[at:]), default=0)
        if found or (op == "/#" and not tokens):
            out.append(new)
            at += found
            if op != "//":
                break
        elif op == "/#":
            break
        else:
            out.append(text[at])
            at += 1
    return "".join(out) + text[at:]
