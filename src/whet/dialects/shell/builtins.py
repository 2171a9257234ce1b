"""Commands of the shell itself that change what is known. Each takes the state, its words and its line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whet.dialects.shell import programs
from whet.dialects.shell.arithmetic import NoNumber, evaluate
from whet.dialects.shell.expand import Exit
from whet.dialects.shell.state import Doubt, Field, State, Status

_LAST_LINES = 3
"""Of what a script said before it ended: why it did."""
_OPTIONS = {"a": "allexport", "u": "nounset"}
"""Of `set`: those that change what is read here."""


class Left(Exception):
    """`break` and `continue`: `levels` loops are left, the last of them goes on where `again`."""

    def __init__(self, levels: int, again: bool) -> None:
        self.levels, self.again = levels, again


class Return(Exception):
    """A function, or a file that was read, ends."""

    def __init__(self, status: Status) -> None:
        self.status = status


def _exit(state: State, fields: Sequence[Field], line: int) -> Status:
    said = " | ".join(state.unknowns.named(state.said).splitlines()[-_LAST_LINES:])
    raise Exit(line, "the script ends here" + (f", after it says `{said[-300:]}`" if said else ""))


def _return(state: State, fields: Sequence[Field], line: int) -> Status:
    raise Return(_number(fields, state, state.status))


def _number(fields: Sequence[Field], state: State, otherwise: Status) -> Status:
    if not fields:
        return otherwise
    said = fields[0].text
    return int(said) % 256 if said.isdecimal() and len(said) < 10 else Doubt(fields[0].line, said)


def _leave(again: bool) -> Callable[[State, Sequence[Field], int], Status]:
    def leave(state: State, fields: Sequence[Field], line: int) -> Status:
        levels = _number(fields, state, 1)
        raise Left(levels if isinstance(levels, int) and levels else 1, again)

    return leave


def _shift(state: State, fields: Sequence[Field], line: int) -> Status:
    by = _number(fields, state, 1)
    if not isinstance(by, int) or by > len(state.positional):
        return 1
    state.positional = state.positional[by:]
    return 0


def _set(state: State, fields: Sequence[Field], line: int) -> Status:
    words = list(fields)
    while words and words[0].text[:1] in ("-", "+") and len(words[0].text) > 1:
        said = words.pop(0).text
        if said == "--":
            state.positional = words
            return 0
        names = [_OPTIONS[c] for c in said[1:] if c in _OPTIONS]
        if "o" in said[1:] and words:
            names.append(words.pop(0).text)
        state.options = state.options.union(names) if said[0] == "-" else state.options.difference(names)
    if words:
        state.positional = words
    return 0


def _unset(state: State, fields: Sequence[Field], line: int) -> Status:
    for field in fields:
        name, _, index = field.text.partition("[")
        held = state.variables.get(name)
        if index and held and not isinstance(held.value, str):
            left = {k: v for k, v in held.value.items() if str(k) != index.rstrip("]").strip("'\"")}
            state.set(name, left)
        elif field.text[:1] != "-":
            state.variables.pop(name, None)
            state.functions.pop(name, None)
    return 0


def _cd(state: State, fields: Sequence[Field], line: int) -> Status:
    words = [field.text for field in fields if field.text not in ("--", "-P", "-L")]
    if words and words[0] == "-":
        target = state.get("OLDPWD") or state.cwd
    else:
        target = words[0] if words else state.get("HOME") or state.unset("HOME", line)
    state.set("OLDPWD", state.cwd)
    shown = state.unknowns.shown(target)
    cwd = programs.joined(state.unknowns.shown(state.cwd), shown)
    state.cwd = state.unknowns.derived(cwd, [target] if shown[:1] == "/" else [target, state.cwd])
    state.variables.pop("PWD", None)
    return 0


def _let(state: State, fields: Sequence[Field], line: int) -> Status:
    number = 0
    for field in fields:
        try:
            number, used = evaluate(field.text, state, line)
        except NoNumber:
            return 1
        if any(not state.unknowns.firm(text) for text in used):
            return Doubt(line, f"let {field.text}")
    return int(number == 0)


def _read(state: State, fields: Sequence[Field], line: int) -> Status:
    """`read` of a here-string; of anything else the variables are not known."""
    words, array, between = [field.text for field in fields], None, None
    names = []
    while words:
        word = words.pop(0)
        if word[:1] == "-" and len(word) > 1:
            letter = word[-1]
            if letter in "adnNptui" and words:
                value = words.pop(0)
                array = value if letter == "a" else array
                between = value if letter == "d" else between
        else:
            names.append(word)
    names = names or ([] if array else ["REPLY"])
    if state.given is None:
        mark = state.refused(line, "`read` takes it from a file or a person")
        for name in [*names, *([array] if array else [])]:
            state.set(name, {0: Field(mark, line)} if name == array else mark)
        return Doubt(line, "read")
    text = state.given if between is not None else state.given.partition("\n")[0]
    state.given = "" if between is not None else state.given.partition("\n")[2]
    found = _pieces(text.strip("\n"), state, 0 if array else len(names))
    if array:
        state.set(array, {n: Field(piece, line) for n, piece in enumerate(found)})
    for n, name in enumerate(names):
        state.set(name, found[n] if n < len(found) else "")
    return int(not text)


def _pieces(text: str, state: State, most: int) -> list[str]:
    """Cut by IFS into `most` pieces, the last of which keeps the rest; 0: all."""
    ifs = state.shown("IFS") if "IFS" in state.variables else " \t\n"
    blank = "".join(c for c in ifs if c in " \t\n")
    found: list[str] = []
    text = text.strip(blank) if blank else text
    now = ""
    for n, c in enumerate(text):
        if c not in ifs:
            now += c
        elif most and len(found) == most - 1:
            return [*found, text[n - len(now) :]]
        elif c not in blank or now:
            found.append(now)
            now = ""
    return [*found, now] if now else found


def _mapfile(state: State, fields: Sequence[Field], line: int) -> Status:
    names = [field.text for field in fields if field.text[:1] != "-"]
    name = names[-1] if names else "MAPFILE"
    if state.given is None:
        state.set(name, {0: Field(state.refused(line, "mapfile takes it from a command or a file"), line)})
        return Doubt(line, "mapfile")
    state.set(name, {n: Field(row, line) for n, row in enumerate(state.given.splitlines())})
    return 0


def _getopts(state: State, fields: Sequence[Field], line: int) -> Status:
    """`getopts`, one letter in a word of its own or with its value behind it."""
    if len(fields) < 2:
        return 2
    letters, name = fields[0].text, fields[1].text
    at = int(state.shown("OPTIND") or 1)
    words = fields[2:] or state.positional
    if at > len(words) or words[at - 1].text[:1] != "-" or words[at - 1].text in ("-", "--"):
        state.set("OPTIND", str(at))
        state.set(name, "?")
        return 1
    said = words[at - 1].text
    letter, rest = said[1], said[2:]
    known = letter in letters.replace(":", "")
    if known and f"{letter}:" in letters:
        state.set("OPTARG", rest or (words[at].text if at < len(words) else ""))
        at += 1 if rest else 2
    elif rest:
        state.note(line, f"getopts: `{said}` holds more than one letter, which is not understood")
        at += 1
    else:
        at += 1
    state.set(name, letter if known else "?")
    state.set("OPTIND", str(at))
    return 0


def _printf(state: State, fields: Sequence[Field], line: int) -> Status:
    words = [field.text for field in fields]
    if words[:1] == ["-v"] and len(words) > 2:
        state.set(words[1], programs.printf(words[2:], state, line))
        return 0
    made = programs.printf(words[1:] if words[:1] == ["--"] else words, state, line)
    return _says(state, made, line)


def _echo(state: State, fields: Sequence[Field], line: int) -> Status:
    return _says(state, programs.output("echo", [f.text for f in fields], state, line) or "", line)


def _says(state: State, made: str, line: int) -> Status:
    state.said = f"{state.said}\n{made.strip()}".strip()[-1000:]
    state.budget.grow(len(made), line)
    if state.output is not None:
        state.output.append(made)
    return 0


def _source(state: State, fields: Sequence[Field], line: int) -> Status:
    path = state.unknowns.named(fields[0].text) if fields else "?"
    state.note(line, f"`source {path}` is not read: what it sets is not known")
    state.sourced.append(line)
    return Doubt(line, f"source {path}", True)


def _nothing(state: State, fields: Sequence[Field], line: int) -> Status:
    return 0


BUILTINS: dict[str, Callable[[State, Sequence[Field], int], Status]] = {
    "exit": _exit,
    "return": _return,
    "break": _leave(again=False),
    "continue": _leave(again=True),
    "shift": _shift,
    "set": _set,
    "unset": _unset,
    "cd": _cd,
    "pushd": _cd,
    "let": _let,
    "read": _read,
    "mapfile": _mapfile,
    "readarray": _mapfile,
    "getopts": _getopts,
    "printf": _printf,
    "echo": _echo,
    "source": _source,
    ".": _source,
}
for _name in (":", "trap", "wait", "shopt", "hash", "umask", "jobs", "disown", "popd", "alias", "ulimit"):
    BUILTINS[_name] = _nothing
