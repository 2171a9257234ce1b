"""Words -> text: parameters, quotes, braces, tildes and the splitting into fields. What is not known stays marked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from whet.dialects.shell import patterns
from whet.dialects.shell.arithmetic import NoNumber, evaluate
from whet.dialects.shell.braces import braced
from whet.dialects.shell.nodes import Arithmetic, Literal, Parameter, Part, Process, Substitution, Word
from whet.dialects.shell.state import Doubt, Field, State, Unknown

_MOST_DEPTH = 50
_ASSIGNED = re.compile(r"[A-Za-z_]\w*\+?=", re.ASCII)
_CHANGES: dict[str, Callable[[str], str]] = {
    "^^": lambda text: text.upper(),
    ",,": lambda text: text.lower(),
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}
_OF_THIS_MACHINE = {"RANDOM", "SECONDS", "HOSTNAME", "UID", "EUID", "PPID", "LINENO", "BASHPID", "OSTYPE"}


class Exit(Exception):
    """The script ends."""

    def __init__(self, line: int, why: str) -> None:
        self.line, self.why = line, why


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text of a part of a word; `split`: where blanks in it end a field."""

    text: str
    quoted: bool
    split: bool


@dataclass(frozen=True, slots=True)
class Many:
    """`"$@"` and `"${A[@]}"`: as many fields as it has elements."""

    elements: tuple[Field, ...]
    quoted: bool


def text(word: Word, state: State, *, value: bool = False) -> str:
    """A word as one text: of a redirection, of a `case`, and with `value` of an assignment."""
    return _joined(_chunks(_with_home(word.parts, state, word.line, value), state), state)


def pieces(word: Word, state: State) -> list[tuple[str, bool]]:
    """A pattern: (text, whether it is quoted)."""
    found = []
    for chunk in _chunks(_with_home(word.parts, state, word.line, False), state):
        said = chunk.text if isinstance(chunk, Chunk) else " ".join(e.text for e in chunk.elements)
        found.append((state.unknowns.shown(said), chunk.quoted))
    return found


def number(word: Word, state: State) -> int:
    """An arithmetic word as a number, for indexes and slices; 0 where it is none."""
    try:
        return evaluate(text(word, state), state, word.line)[0]
    except NoNumber:
        return 0


def arithmetic(word: Word, state: State) -> str:
    """An arithmetic word as text."""
    try:
        made, used = evaluate(text(word, state), state, word.line)
    except NoNumber as e:
        return state.refused(word.line, f"$((...)): {e}")
    return state.unknowns.derived(str(made), used)


def fields(words: Sequence[Word], state: State) -> list[Field]:
    """The words of a command, as the command gets them."""
    found: list[Field] = []
    for word in words:
        for parts in braced(word, state.budget):
            for made in _fields(parts, word.line, state):
                state.budget.step(word.line)
                state.budget.grow(len(made.text), word.line)
                found.append(made)
    return found


def _fields(parts: Sequence[Part], line: int, state: State) -> list[Field]:
    chunks = list(_chunks(_with_home(parts, state, line, False), state))
    found = _split(chunks, line, state)
    bare = all(isinstance(chunk, Chunk) and chunk.split for chunk in chunks)
    if bare and "nounset" not in state.options:
        found = [field for field in found if not _dropped(field.text, line, state)]
    globs = any(isinstance(c, Chunk) and not c.quoted and ("*" in c.text or "?" in c.text) for c in chunks)
    if globs and not any("=" in f.text for f in found):
        why = "which files match is not looked up"
        return [
            Field(state.unknowns.mark(Unknown("refused", state.unknowns.shown(f.text), line, why)), line)
            for f in found
        ]
    return found


def _dropped(text: str, line: int, state: State) -> bool:
    """Whether a field is nothing but unset variables: the shell makes none of it."""
    unknown = state.unknowns.of(text) if state.unknowns.any(text) else []
    if not unknown or len(unknown) < len(text) or any(u.kind != "unset" or u.shown for u in unknown):
        return False
    state.dropped += [(u.name, line) for u in unknown]
    return True


def _split(chunks: Sequence[Chunk | Many], line: int, state: State) -> list[Field]:
    """Cut at the characters of IFS what is not quoted."""
    cutter = _Cutter(line, *_separators(state))
    for chunk in chunks:
        if isinstance(chunk, Chunk) and chunk.split:
            cutter.split(chunk.text)
        elif isinstance(chunk, Chunk):
            cutter.add(chunk.text)
        else:
            for n, element in enumerate(chunk.elements):
                if n:
                    cutter.end()
                if cutter.now is None and len(chunks) == 1:
                    cutter.line = element.line
                if chunk.quoted:
                    cutter.add(element.text)
                else:
                    cutter.split(element.text)
    cutter.end()
    return cutter.found


class _Cutter:
    """Makes fields of texts that come one behind the other."""

    def __init__(self, line: int, blank: str, sharp: str) -> None:
        self.line, self.blank, self.sharp = line, blank, sharp
        self.found: list[Field] = []
        self.now: str | None = None
        self.after_blank = False

    def add(self, text: str) -> None:
        self.now = (self.now or "") + text
        self.after_blank = False

    def end(self) -> None:
        if self.now is not None:
            self.found.append(Field(self.now, self.line))
        self.now = None

    def split(self, text: str) -> None:
        """Blanks end a field; any other separator ends one even where it is empty."""
        separators = self.blank + self.sharp
        for piece in re.split(f"([{re.escape(separators)}])", text) if separators else [text]:
            if piece and piece in self.blank:
                self.after_blank = self.after_blank or self.now is not None
                self.end()
            elif piece and piece in self.sharp:
                if self.now is None and not self.after_blank:
                    self.now = ""
                self.end()
                self.after_blank = False
            elif piece:
                self.add(piece)


def _separators(state: State) -> tuple[str, str]:
    found = state.variables.get("IFS")
    ifs = " \t\n" if found is None else state.unknowns.shown(found.text or "")
    return "".join(c for c in ifs if c in " \t\n"), "".join(c for c in ifs if c not in " \t\n")


def _joined(chunks: Iterator[Chunk | Many], state: State) -> str:
    made = "".join(
        c.text if isinstance(c, Chunk) else " ".join(element.text for element in c.elements) for c in chunks
    )
    state.budget.grow(len(made), 0)
    return made


def _with_home(parts: Sequence[Part], state: State, line: int, value: bool) -> Sequence[Part]:
    """With `~` written out where it stands for HOME."""
    if not any(isinstance(p, Literal) and not p.quoted and p.text.endswith("~") for p in parts):
        return parts
    out = list(parts)
    first = parts[0]
    if isinstance(first, Literal) and not first.quoted and _ASSIGNED.match(first.text):
        value = True
    for n, part in enumerate(parts):
        before, after = (parts[n - 1] if n else None), (parts[n + 1] if n + 1 < len(parts) else None)
        if not isinstance(part, Literal) or part.quoted or not _opens(after, value):
            continue
        begins = n == 0 or (value and isinstance(before, Literal) and before.text.endswith(":"))
        if (begins and part.text == "~") or (n == 0 and _ASSIGNED.fullmatch(part.text[:-1])):
            home = state.get("HOME")
            home = state.unset("HOME", line) if home is None else home
            out[n] = Literal(part.text[:-1] + home, True)
    return out


def _opens(part: Part | None, value: bool) -> bool:
    """Whether a path, or nothing, follows the `~`."""
    if part is None:
        return True
    return isinstance(part, Literal) and not part.quoted and part.text[:1] in ("/:" if value else "/")


# ---------------------------------------------------------------- parts


def _chunks(parts: Sequence[Part], state: State, *, inner: bool = False) -> Iterator[Chunk | Many]:
    """`inner`: of a word inside `${...}`, whose text is split like that of a variable."""
    for part in parts:
        if isinstance(part, Literal):
            yield Chunk(part.text, part.quoted, inner and not part.quoted)
        elif isinstance(part, Arithmetic):
            yield Chunk(arithmetic(part.word, state), part.quoted, not part.quoted)
        elif isinstance(part, Substitution):
            state.budget.step(part.line)
            yield Chunk(state.substitute(state, part), part.quoted, not part.quoted)
        elif isinstance(part, Process):
            yield Chunk(state.refused(part.line, f"`{part.source[:60]}` is not run"), False, False)
        else:
            state.budget.step(part.line)
            yield from _parameter(part, state)


def _parameter(part: Parameter, state: State) -> Iterator[Chunk | Many]:
    if part.name[0] == "!" and len(part.name) > 1:
        pointer = _value(Parameter(part.name[1:], part.line, part.quoted), state)
        target = state.unknowns.shown(pointer) if isinstance(pointer, str) else ""
        name, _, index = target.partition("[")
        if not re.fullmatch(r"\w+|[@*#]", name):
            yield Chunk(state.unset(part.name[1:], part.line), part.quoted, not part.quoted)
            return
        at = Word((Literal(index.rstrip("]"), False),), part.line) if index else part.index
        part = replace(part, name=name, index=at)
    value = _value(part, state)
    if part.op == "length":
        size = len(value) if isinstance(value, list) else len(state.unknowns.shown(value or ""))
        sources = [] if isinstance(value, list) else [value or ""]
        yield Chunk(state.unknowns.derived(str(size), sources), part.quoted, not part.quoted)
        return
    if part.op in ("-", ":-", "=", ":=", "+", ":+", "?", ":?"):
        yield from _default(part, value, state)
        return
    if value is None:
        value = state.unset(part.name, part.line)
    elif part.op:
        value = _operated(part, value, state)
    yield from _yielded(part, value, state)


def _yielded(part: Parameter, value: str | list[Field], state: State) -> Iterator[Chunk | Many]:
    held = len(value) if isinstance(value, str) else sum(len(element.text) for element in value)
    state.budget.grow(held, part.line)
    if isinstance(value, str):
        yield Chunk(value, part.quoted, not part.quoted)
    elif part.quoted and "*" in (part.name, part.index.plain if part.index else ""):
        found = state.variables.get("IFS")
        between = " " if found is None else (found.text or "")[:1]
        yield Chunk(between.join(element.text for element in value), True, False)
    else:
        yield Many(tuple(value), part.quoted)


def _value(part: Parameter, state: State) -> str | list[Field] | None:
    """What a parameter holds; None where it is unset."""
    name, index = part.name, part.index.plain if part.index else None
    if name in "@*":
        return list(state.positional)
    if name == "BASH_SOURCE" and name not in state.variables:
        return state.name
    if name.isdigit() or name in "#?$!-":
        return _special(name, part.line, state)
    variable = state.variables.get(name)
    if part.op == "keys":
        keys = variable.value if variable and isinstance(variable.value, Mapping) else [0] if variable else []
        return [Field(str(key), part.line) for key in keys]
    if index in ("@", "*"):
        if variable is None:
            return []
        value = variable.value
        return [Field(value, part.line)] if isinstance(value, str) else list(value.values())
    if name == "PWD" and variable is None:
        return state.cwd
    if variable is None and name in _OF_THIS_MACHINE:
        return state.granted("0", part.line, f"${name} of the machine that runs the script")
    if variable is None or part.index is None:
        return variable.text if variable else None
    if isinstance(variable.value, str):
        return variable.value if number(part.index, state) == 0 else None
    return _element(variable.value, part.index, state)


def _element(value: Mapping[int | str, Field], index: Word, state: State) -> str | None:
    if any(isinstance(key, str) for key in value):
        found = value.get(state.unknowns.shown(text(index, state)))
        return found.text if found else None
    at = number(index, state)
    keys = list(value)
    found = value.get(at if at >= 0 or not keys else int(keys[-1]) + 1 + at)
    return found.text if found else None


def _special(name: str, line: int, state: State) -> str | None:
    if name == "0":
        return state.name
    if name == "#":
        return str(len(state.positional))
    if name == "?":
        status = state.status
        if isinstance(status, Doubt):
            return state.granted("0", line, f"the status of `{status.what}`, which is not run")
        return str(status)
    if name == "-":
        return ""
    if not name.isdigit():
        return state.granted("1", line, f"${name}, the number of a process")
    at = int(name[:9]) - 1
    return state.positional[at].text if at < len(state.positional) else None


def _default(part: Parameter, value: str | list[Field] | None, state: State) -> Iterator[Chunk | Many]:
    word = part.word or Word((), part.line)
    if isinstance(value, list):
        there = bool(value) and (part.op[0] != ":" or any(e.text for e in value))
    elif part.op[0] == ":":
        there = value is not None and (not state.unknowns.firm(value) or state.unknowns.shown(value) != "")
    else:
        there = value is not None
    op = part.op[-1]
    if there if op == "+" else not there:
        state.depth += 1
        if state.depth > _MOST_DEPTH:
            raise Exit(part.line, "values that are made of one another nest too deep")
        if op in "=?":
            said = text(word, state, value=True)
            if op == "?":
                why = state.unknowns.shown(said) or "parameter null or not set"
                raise Exit(part.line, f"{part.name}: {why}; give it as {part.name}=value before the script")
            state.set(part.name, said)
            yield from _yielded(part, said, state)
        else:
            parts = _with_home(word.parts, state, part.line, False)
            for chunk in _chunks(parts, state, inner=not part.quoted):
                if isinstance(chunk, Many):
                    yield chunk
                else:
                    split = chunk.split and not part.quoted
                    yield Chunk(chunk.text, chunk.quoted or part.quoted, split)
            if part.quoted and not parts:
                yield Chunk("", True, False)
        state.depth -= 1
    elif op == "+":
        yield Chunk("", part.quoted, not part.quoted)
    else:
        yield from _yielded(part, "" if value is None else value, state)


def _operated(part: Parameter, value: str | list[Field], state: State) -> str | list[Field]:
    """The value after an operator of `${...}`; of each element, where it is a list."""
    if part.op == "keys":
        return value
    if part.op == ":":
        return _slice(part, value, state)
    if isinstance(value, list):
        return [Field(_changed(part, element.text, state), element.line) for element in value]
    return _changed(part, value, state)


def _changed(part: Parameter, value: str, state: State) -> str:
    word = part.word or Word((), part.line)
    op = part.op
    if op == "@" or (op in _CHANGES and word.parts):
        return state.refused(part.line, f"${{{part.name}{op}...}} is not understood")
    shown = state.unknowns.shown(value)
    if op in _CHANGES:
        made = _CHANGES[op](shown)
    else:
        tokens = patterns.pattern(pieces(word, state))
        if op[0] == "#":
            made = patterns.without_prefix(tokens, shown, op == "##")
        elif op[0] == "%":
            made = patterns.without_suffix(tokens, shown, op == "%%")
        else:
            new = text(part.other, state) if part.other else ""
            made = patterns.replaced(tokens, shown, new, op)
            state.budget.grow(len(made), part.line)
            return state.unknowns.derived(made, [value]) if value != shown else made
    return state.unknowns.derived(made, [value])


def _slice(part: Parameter, value: str | list[Field], state: State) -> str | list[Field]:
    begin = number(part.word or Word((), part.line), state)
    length = number(part.other, state) if part.other else None
    if isinstance(value, list):
        whole = [Field(state.name, part.line), *value] if part.name in "@*" else value
        begin = max(begin + len(whole), 0) if begin < 0 else begin
        return whole[begin : None if length is None else begin + max(length, 0)]
    shown = state.unknowns.shown(value)
    begin = begin + len(shown) if begin < 0 else begin
    if begin < 0:
        return ""
    end = len(shown) if length is None else begin + length if length >= 0 else len(shown) + length
    return state.unknowns.derived(shown[begin:end], [value])
