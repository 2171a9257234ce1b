"""Two ways a script may go on, where what decides it is not run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from whet.dialects.shell.builtins import Left, Return
from whet.dialects.shell.expand import Exit
from whet.dialects.shell.state import Doubt, Note, Start, State

Way = Callable[[State], None]
Ended = Exit | Return | Left | None


def attempt(way: Way, state: State) -> tuple[State, Ended]:
    """Go a way in a copy of the state: (the copy, how it left)."""
    branch = state.fork()
    try:
        way(branch)
    except (Exit, Return, Left) as ended:
        return branch, ended
    return branch, None


def decide(state: State, doubt: Doubt, yes: Way, no: Way) -> bool | None:
    """Go both ways, and on with the one that is taken; joined, where neither is more likely.

    A way that ends the script is not taken; one that leaves a loop is. Returns the way: yes, no, or None for both."""
    ways = {True: attempt(yes, state), False: attempt(no, state)}
    ranks = {taken: _rank(ended) for taken, (_, ended) in ways.items()}
    if ranks[True] != ranks[False]:
        taken = ranks[True] > ranks[False]
        if isinstance(ways[not taken][1], Return):
            ways[taken][0].returns = doubt
        elif isinstance(ways[not taken][1], Exit):
            ended = "the script would end otherwise"
            _note(ways[taken][0], doubt, taken, ended)
        return _go(state, ways, taken)
    if doubt.guess is not None:
        if _matters(ways[True][0], ways[False][0]):
            _note(ways[doubt.guess][0], doubt, doubt.guess, "")
        return _go(state, ways, doubt.guess)
    starts = {taken: _starts(way) for taken, (way, _) in ways.items()}
    if bool(starts[True]) != bool(starts[False]):
        taken = bool(starts[True])
        _note(ways[taken][0], doubt, taken, "a trainer is started only then")
        return _go(state, ways, taken)
    _both(state, doubt, ways)
    return None


def _both(state: State, doubt: Doubt, ways: dict[bool, tuple[State, Ended]]) -> None:
    (yes, ended), (no, other) = ways[True], ways[False]
    starts = _starts(yes), _starts(no)
    events = [*yes.events, *no.events]
    if starts[0] and starts[0][-1].texts != starts[1][-1].texts:
        last = max(n for n, event in enumerate(events) if isinstance(event, Start))
        why = f"`{doubt.what}` in line {doubt.line} decides whether it is this or line {starts[0][-1].line}"
        events[last] = replace(starts[1][-1], doubt=why)
    no.join(yes, doubt)
    no.events = events
    state.adopt(no)
    state.status = yes.status if yes.status == no.status else Doubt(doubt.line, doubt.what)
    if isinstance(ended, Return) and isinstance(other, Return):
        raise Return(ended.status if ended.status == other.status else Doubt(doubt.line, doubt.what))
    if other is not None:
        raise other


def _go(state: State, ways: dict[bool, tuple[State, Ended]], taken: bool) -> bool:
    way, ended = ways[taken]
    left = _starts(ways[not taken][0])
    if left and not _starts(way):
        way.events = [*left, *way.events]
    state.adopt(way)
    if ended is not None:
        raise ended
    return taken


def _rank(ended: Ended) -> int:
    if isinstance(ended, Left) and not ended.again:
        return 3
    return 2 if ended is None else 1 if not isinstance(ended, Exit) else 0


def _starts(state: State) -> list[Start]:
    return [event for event in state.events if isinstance(event, Start)]


def _matters(one: State, other: State) -> bool:
    return one.differs(other) or bool(_starts(one)) or bool(_starts(other))


def _note(state: State, doubt: Doubt, taken: bool, why: str) -> None:
    said = f"`{doubt.what}` is not known here; it is taken to {'succeed' if taken else 'fail'}"
    state.events.insert(0, Note(doubt.line, said + (f", for {why}" if why else "")))
