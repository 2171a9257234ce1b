"""Goes through a script as a shell would, and starts nothing: commands of the shell change the state, programs are
written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from whet.dialects.shell import patterns
from whet.dialects.shell.arithmetic import NoNumber, evaluate
from whet.dialects.shell.assign import assign, declare
from whet.dialects.shell.builtins import BUILTINS, Left, Return
from whet.dialects.shell.choose import decide
from whet.dialects.shell.conditions import condition, test, turned
from whet.dialects.shell.expand import Exit, fields, pieces, text
from whet.dialects.shell.external import external
from whet.dialects.shell.grammar import DECLARES, Grammar, parse
from whet.dialects.shell.nodes import (
    Assign,
    Case,
    Command,
    Count,
    For,
    Function,
    Group,
    If,
    Item,
    Let,
    Pipeline,
    Redirect,
    Redirected,
    Simple,
    Substitution,
    Test,
    While,
    Word,
)
from whet.dialects.shell.state import Doubt, Field, Start, State, Status, Written
from whet.types import ConfigError

MOST_DEPTH = 50
"""Of functions, substitutions and compound commands inside one another, while they are gone through."""
MOST_ROUNDS = 1_000
"""Of one loop."""


def run(items: Sequence[Item], state: State) -> None:
    """Go through commands one by one."""
    for item in items:
        if item.background:
            _apart(state, partial(_item, item))
            state.status = 0
        else:
            _item(item, state)


def substitute(state: State, part: Substitution) -> str:
    """What `$(...)` prints, with marks for what is not known."""
    branch = state.fork()
    branch.output = []
    with _deeper(branch, part.line):
        try:
            run(part.body, branch)
        except (Exit, Return, Left) as ended:
            branch.status = ended.status if isinstance(ended, Return) else 1
    state.events += branch.events
    state.inner = branch.status
    made = "".join(branch.output).rstrip("\n")
    state.budget.grow(len(made), part.line)
    return made


@contextmanager
def _deeper(state: State, line: int) -> Iterator[None]:
    state.depth += 1
    if state.depth > MOST_DEPTH:
        raise ConfigError(
            f"line {line}: commands nest deeper than {MOST_DEPTH}; does a function call itself?"
        )
    yield
    state.depth -= 1


def _apart(state: State, inner: Callable[[State], None]) -> Status:
    """Go through commands of which nothing remains but what they start: a subshell, a part of a pipe."""
    branch = state.fork()
    try:
        inner(branch)
        status = branch.status
    except (Exit, Left):
        status = 1
    except Return as ended:
        status = ended.status
    state.events += branch.events
    state.output = branch.output
    state.said = branch.said
    return status


def _item(item: Item, state: State) -> None:
    state.budget.step(item.first.line)
    _pipeline(item.first, state)
    for op, pipeline in item.rest:
        status = state.status
        wanted = op == "&&"
        if isinstance(status, Doubt):
            _maybe(pipeline, status, wanted, state)
        elif (status == 0) == wanted:
            _pipeline(pipeline, state)


def _maybe(pipeline: Pipeline, doubt: Doubt, wanted: bool, state: State) -> None:
    """The right side of `&&` or `||`, where it is not known whether it is reached."""

    def go(branch: State) -> None:
        _pipeline(pipeline, branch)

    def stay(branch: State) -> None:
        pass

    taken = decide(state, doubt, *((go, stay) if wanted else (stay, go)))
    if taken is not None and taken != wanted and doubt.guess is None:
        state.status = int(not taken)


def _pipeline(node: Pipeline, state: State) -> None:
    if len(node.commands) == 1:
        _command(node.commands[0], state)
    else:
        given = None
        kept = state.output
        for n, command in enumerate(node.commands):
            last = n + 1 == len(node.commands)

            def go(
                branch: State, command: Command = command, last: bool = last, given: str | None = given
            ) -> None:
                branch.output = branch.output if last else []
                branch.given = given
                _command(command, branch)

            state.output = kept
            state.status = _apart(state, go)
            given = None if last else "".join(state.output or [])
        state.output = state.output if kept is not None else None
    if node.negated:
        state.status = turned(state.status)


# ---------------------------------------------------------------- compound commands


def _command(node: Command, state: State) -> None:
    if isinstance(node, Simple):
        _simple(node, state)
        return
    with _deeper(state, node.line):
        if isinstance(node, If):
            _if(node, 0, state)
        elif isinstance(node, For):
            _for(node, state)
        elif isinstance(node, While):
            _while(node, state)
        elif isinstance(node, Case):
            _case(node, state)
        elif isinstance(node, Count):
            _count(node, state)
        elif isinstance(node, Function):
            state.functions[node.name] = node.body
            state.status = 0
        elif isinstance(node, Group):
            if node.apart:
                state.status = _apart(state, lambda branch: run(node.body, branch))
            else:
                run(node.body, state)
        elif isinstance(node, Test):
            state.status = condition(node.condition, state)
        elif isinstance(node, Let):
            state.status = _let(node.word, state)
        else:
            _redirected(node, state)


def _redirected(node: Redirected, state: State) -> None:
    output, given = state.output, state.given
    state.output, state.given = _streams(node.redirects, state, node.line)
    _command(node.command, state)
    if state.output is not None and output is not None and state.output is not output:
        output = state.output
    state.output, state.given = output, given


def _if(node: If, n: int, state: State) -> None:
    if n == len(node.clauses):
        state.status = 0
        run(node.otherwise, state)
        return
    test, body = node.clauses[n]
    run(test, state)
    status = state.status
    if isinstance(status, Doubt):
        decide(state, status, lambda branch: run(body, branch), lambda branch: _if(node, n + 1, branch))
    elif status == 0:
        run(body, state)
    else:
        _if(node, n + 1, state)


def _for(node: For, state: State) -> None:
    words = list(state.positional) if node.words is None else fields(node.words, state)
    for word in words:
        state.budget.step(node.line)
        state.set(node.name, word.text)
        if not _round(node.body, state):
            break


def _round(body: Sequence[Item], state: State) -> bool:
    """One round of a loop; False where it is the last."""
    try:
        run(body, state)
    except Left as left:
        if left.levels > 1:
            raise Left(left.levels - 1, left.again) from None
        return left.again
    return True


def _count(node: Count, state: State) -> None:
    _let(node.first, state)
    for _ in range(MOST_ROUNDS):
        status = _let(node.test, state) if node.test.parts else 0
        if isinstance(status, Doubt):
            decide(state, status, lambda branch: _once(node.body, branch), lambda branch: None)
            return
        if status != 0 or not _round(node.body, state):
            return
        _let(node.then, state)
    _endless(node.line, state)


def _once(body: Sequence[Item], state: State) -> None:
    _round(body, state)


def _while(node: While, state: State) -> None:
    for _ in range(MOST_ROUNDS):
        state.budget.step(node.line)
        run(node.condition, state)
        status = turned(state.status) if node.until else state.status
        if isinstance(status, Doubt):
            decide(state, status, lambda branch: _once(node.body, branch), lambda branch: None)
            state.status = 0
            return
        if status != 0:
            state.status = 0
            return
        before = state.fork()
        if not _round(node.body, state):
            return
        if not state.differs(before) and state.given == before.given:
            state.note(node.line, "the loop waits for something outside of the script; it is left")
            return
    _endless(node.line, state)


def _endless(line: int, state: State) -> None:
    if any(isinstance(event, Start) for event in state.events):
        raise Exit(line, "a loop goes on without end")
    raise ConfigError(f"line {line}: the loop takes more than {MOST_ROUNDS} rounds")


def _case(node: Case, state: State) -> None:
    _clauses(node, 0, text(node.word, state), state, False)


def _clauses(node: Case, n: int, subject: str, state: State, through: bool) -> None:
    if n == len(node.clauses):
        return
    words, body, end = node.clauses[n]

    def yes(branch: State) -> None:
        run(body, branch)
        if end in (";&", ";;&"):
            _clauses(node, n + 1, subject, branch, end == ";&")

    status: Status = 0 if through else _fits(words, subject, state)
    if isinstance(status, Doubt):
        decide(state, status, yes, lambda branch: _clauses(node, n + 1, subject, branch, False))
    elif status == 0:
        yes(state)
    else:
        _clauses(node, n + 1, subject, state, False)


def _fits(words: Sequence[Word], subject: str, state: State) -> Status:
    shown = state.unknowns.shown(subject)
    for word in words:
        said = pieces(word, state)
        if said == [("*", False)]:
            return 0
        if not state.unknowns.firm(subject):
            return Doubt(word.line, f"case {state.unknowns.named(subject)}")
        if patterns.matches(patterns.pattern(said), shown):
            return 0
    return 1


def _let(word: Word, state: State) -> Status:
    try:
        number, used = evaluate(text(word, state), state, word.line)
    except NoNumber:
        return 1
    if not all(state.unknowns.firm(each) for each in used):
        return Doubt(word.line, "((...))")
    return int(number == 0)


# ---------------------------------------------------------------- simple commands


def _simple(node: Simple, state: State) -> None:
    state.dropped, state.inner = [], None
    first = node.words[0] if node.words else None
    if isinstance(first, Word) and first.plain in DECLARES:
        state.status = declare(first.plain, node.words[1:], state, node.line)
        return
    words = fields([word for word in node.words if isinstance(word, Word)], state)
    if not words and not state.dropped:
        for each in node.assigns:
            assign(each, state)
        _streams(node.redirects, state, node.line)
        state.status = 0 if state.inner is None else state.inner
        return
    output, given = state.output, state.given
    state.output, state.given = _streams(node.redirects, state, node.line)
    with _deeper(state, node.line), _before(node.assigns, state):
        call(words, node.line, state)
    state.output = None if output is None else state.output if state.output is not None else output
    state.given = given


@contextmanager
def _before(assigns: Sequence[Assign], state: State) -> Iterator[None]:
    """`A=b command`: the variable is there for the command, and exported."""
    old = {each.name: state.variables.get(each.name) for each in assigns}
    for each in assigns:
        assign(each, state)
        state.set(each.name, state.variables[each.name].value, export=True)
    yield
    for name, was in old.items():
        if was is None:
            state.variables.pop(name, None)
        else:
            state.variables[name] = was


def call(words: list[Field], line: int, state: State) -> None:
    """A command with its words: a function, a command of the shell, or a program."""
    state.budget.step(line)
    names = [state.unknowns.shown(word.text) for word in words[:2]]
    while names and names[0] in ("command", "builtin", "exec") and len(words) > 1 and names[1][:1] != "-":
        words = words[1:]
        names = [state.unknowns.shown(word.text) for word in words[:2]]
    name = names[0] if names else ""
    if name in state.functions:
        state.status = _function(state.functions[name], words[1:], line, state)
    elif name in ("[", "test"):
        inner = words[1:-1] if name == "[" else words[1:]
        state.status = test(inner, state, line)
    elif name in DECLARES:
        state.status = _declared(name, words[1:], state, line)
    elif name == "eval":
        _eval(" ".join(word.text for word in words[1:]), [], line, state)
    elif name in BUILTINS:
        state.status = BUILTINS[name](state, words[1:], line)
    else:
        inside = external(words, line, state)
        if inside is not None:
            kept = state.positional
            state.status = _apart(state, lambda branch: _eval(inside[0], inside[1], line, branch))
            state.positional = kept


def _declared(name: str, words: Sequence[Field], state: State, line: int) -> Status:
    """`export` whose name came out of an expansion: its words are whole already."""
    for word in words:
        if word.text[:1] != "-" and "=" in word.text:
            variable, _, value = word.text.partition("=")
            state.set(variable, value, export=name == "export" or None)
    return 0


def _function(body: Command, words: Sequence[Field], line: int, state: State) -> Status:
    positional, returns = state.positional, state.returns
    state.positional, state.returns = list(words), None
    state.frames = [*state.frames, {}]
    try:
        _command(body, state)
        status = state.status
    except Return as ended:
        status = ended.status
    finally:
        for name, was in state.frames[-1].items():
            if was is None:
                state.variables.pop(name, None)
            else:
                state.variables[name] = was
        state.frames = state.frames[:-1]
    doubt = state.returns
    state.positional, state.returns = positional, returns
    return status if doubt is None else Doubt(doubt.line, doubt.what, None)


def _eval(said: str, words: list[Field], line: int, state: State) -> None:
    """Commands that stand in a text: of `eval`, `bash -c`."""
    if not state.unknowns.firm(said):
        state.note(line, f"`{state.unknowns.named(said)[:80]}` is not read: it is not known in full")
        state.status = Doubt(line, "eval")
        return
    if words:
        state.positional = words[1:]
    with _deeper(state, line):
        run(parse(state.unknowns.shown(said), line, state.depth), state)


# ---------------------------------------------------------------- redirections


def _streams(redirects: Sequence[Redirect], state: State, line: int) -> tuple[list[str] | None, str | None]:
    """(where the output is kept, what the input is) of a command with these redirections."""
    output, given = state.output, state.given
    away = False
    for each in redirects:
        if each.document is not None:
            given = _document(each, state)
        elif each.op == "<<<" and each.target:
            given = text(each.target, state) + "\n"
        elif each.op == "<":
            given = None
        elif each.op in (">", ">>", ">|", "&>", "&>>", ">&") and each.fd in (None, 1) and each.target:
            to = text(each.target, state)
            away = to != "1"
            if each.op in (">", ">>") and to and not to.startswith("/dev/"):
                state.events.append(Written(to, line))
    return None if away else output, given


def _document(each: Redirect, state: State) -> str:
    document = each.document
    assert document is not None
    if document.quoted:
        return document.text
    inner = Grammar(document.text, document.line, state.depth)
    return text(Word(tuple(inner.parts("", quoted=True)), document.line), state)
