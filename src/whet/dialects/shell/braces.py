"""`{a,b}` and `{1..4}`: one word written for several, before anything else in it is expanded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from whet.dialects.shell.nodes import Literal, Part, Word
from whet.dialects.shell.state import Budget
from whet.types import ConfigError

_RANGE = re.compile(r"(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?|([a-zA-Z])\.\.([a-zA-Z])")
_MOST = 1_000
"""Braces of one word, and words made of it."""


def braced(word: Word, budget: Budget) -> list[tuple[Part, ...]]:
    """The words that a word is written for; most often itself."""
    opening = sum(p.text.count("{") for p in word.parts if isinstance(p, Literal) and not p.quoted)
    if not opening:
        return [word.parts]
    if opening > _MOST:
        raise ConfigError(f"line {word.line}: a word with more than {_MOST} braces")
    made = [_merged(parts) for parts in _written(_atoms(word.parts), word.line, budget)]
    return made if made != [()] else [word.parts]


def _atoms(parts: Sequence[Part]) -> list[Part]:
    """With literals cut into characters where they are not quoted."""
    atoms: list[Part] = []
    for part in parts:
        bare = isinstance(part, Literal) and not part.quoted
        atoms += [Literal(c, False) for c in part.text] if bare and isinstance(part, Literal) else [part]
    return atoms


def _merged(atoms: Sequence[Part]) -> tuple[Part, ...]:
    out: list[Part] = []
    for atom in atoms:
        last = out[-1] if out else None
        bare = isinstance(atom, Literal) and not atom.quoted
        if bare and isinstance(last, Literal) and not last.quoted and isinstance(atom, Literal):
            out[-1] = Literal(last.text + atom.text, False)
        else:
            out.append(atom)
    return tuple(out)


def _is(atom: Part, c: str) -> bool:
    return isinstance(atom, Literal) and not atom.quoted and atom.text == c


def _written(atoms: list[Part], line: int, budget: Budget) -> list[list[Part]]:
    for begin, end, commas in _pairs(atoms):
        inside = atoms[begin + 1 : end]
        if commas:
            cuts = [begin, *commas, end]
            pieces = [atoms[a + 1 : b] for a, b in pairwise(cuts)]
            choices = [made for piece in pieces for made in _written(piece, line, budget)]
        elif (counted := _counted(inside)) is not None:
            choices = [[Literal(text, True)] for text in counted]
        else:
            continue
        rest = _written(atoms[end + 1 :], line, budget)
        if len(choices) * len(rest) > _MOST:
            raise ConfigError(f"line {line}: braces that stand for more than {_MOST} words")
        for _ in range(len(choices) * len(rest)):
            budget.step(line)
        return [atoms[:begin] + choice + after for choice in choices for after in rest]
    return [atoms]


def _pairs(atoms: Sequence[Part]) -> list[tuple[int, int, list[int]]]:
    """(where it opens, where it closes, commas of its own) of each brace, in order."""
    open_at: list[tuple[int, list[int]]] = []
    found = []
    for n, atom in enumerate(atoms):
        if _is(atom, "{"):
            open_at.append((n, []))
        elif _is(atom, ",") and open_at:
            open_at[-1][1].append(n)
        elif _is(atom, "}") and open_at:
            begin, commas = open_at.pop()
            found.append((begin, n, commas))
    return sorted(found)


def _counted(inside: Sequence[Part]) -> list[str] | None:
    if not all(isinstance(atom, Literal) and not atom.quoted for atom in inside):
        return None
    said = _RANGE.fullmatch("".join(atom.text for atom in inside if isinstance(atom, Literal)))
    if said is None:
        return None
    if said[4]:
        low, high = ord(said[4]), ord(said[5])
        return [chr(n) for n in (range(low, high + 1) if low <= high else range(low, high - 1, -1))]
    low, high, by = int(said[1]), int(said[2]), abs(int(said[3] or 1)) or 1
    if abs(high - low) // by > _MOST:
        raise ConfigError(f"{{{said[0]}}} stands for more than {_MOST} words")
    padded = any(re.match(r"-?0\d", said[n]) for n in (1, 2))
    width = max(len(said[1]), len(said[2])) if padded else 0
    numbers = range(low, high + 1, by) if low <= high else range(low, high - 1, -by)
    return [f"{n:0{width}d}" for n in numbers]
