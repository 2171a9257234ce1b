"""A program that a script would start: what it prints, whether it matters, and whether it may be the trainer."""

from __future__ import annotations

from collections.abc import Sequence

from whet.dialects.launch import Inside, unwrapped
from whet.dialects.shell import programs
from whet.dialects.shell.state import Doubt, Field, Start, State, Unknown


def external(words: Sequence[Field], line: int, state: State) -> tuple[str, list[Field]] | None:
    """Write a program down. The text of commands that it would be given to run, and their words, where there are."""
    dropped = "".join(f"${name} " for name, _ in state.dropped)
    shown = [state.unknowns.shown(word.text) for word in words]
    if state.dropped and (not shown or shown[0][:1] == "-" or "=" in shown[0]):
        words = [*_missing(state, line, "-" if not shown else shown[0]), *words]
        shown = [state.unknowns.shown(word.text) for word in words]
    found = unwrapped(shown)
    if isinstance(found, Inside):
        return shown[found.at], list(words[found.at + 1 :])
    said = " ".join([dropped.strip(), *shown[:6]]).strip()[:100]
    name = shown[found.name].rpartition("/")[2] if found.name < len(shown) else ""
    args = [word.text for word in words[found.name + 1 :]]
    if name in ("command", "type") and args[:1] in (["-v"], ["-p"], ["-P"]):
        name, args = "which", args[1:]
    if found.starts:
        for variable, where in state.dropped:
            state.note(where, f"${variable} is not set: the word is left out")
        state.events.append(Start(tuple(words), line, state.environment()))
    elif name == "bash" or name == "sh" or name.endswith(".sh"):
        state.note(line, f"`{said}` is another script, which is not read")
    elif name not in programs.HARMLESS and not (name.startswith("python") and args[:1] == ["-c"]):
        state.note(line, f"`{said}` is not run")
    state.status = programs.status(name, shown[found.name + 1 :], said, line)
    if found.starts and isinstance(state.status, Doubt) and state.status.guess is None:
        state.status = Doubt(line, said, True if not name.startswith("python") or "-c" not in args else None)
    if state.output is not None:
        made = programs.output(name, args, state, line)
        if made is None:
            made = state.refused(line, f"what `{said}` prints is not known: it is not run")
        state.output.append(made)
    return None


def _missing(state: State, line: int, first: str) -> list[Field]:
    """For a command whose name is an unset variable: what is started would be in it, whatever that is."""
    stand_ins = ["python3"] if first[:1] == "-" else ["python3", "trainer.py"]
    name = state.dropped[0][0]
    marks = [Unknown("unset", shown, line, f"${name} is not set", name) for shown in stand_ins]
    return [Field(state.unknowns.mark(mark), line) for mark in marks]
