"""docs/cli.md and docs/python.md, made from the commands' help and from docstrings: `python -m whet.reference docs`."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import typer
from typer.main import get_command

from whet import cli

PUBLIC = {
    "whet": (
        "train",
        "evaluate",
        "generate",
        "load_run",
        "Result",
        "Run",
        "Task",
        "Message",
        "Rollout",
        "Completion",
        "Sampling",
    )
    + ("ScriptedEngine", "WhetError", "ConfigError", "DataError", "CheckpointError"),
    "whet.types": ("ToolSpec", "ToolCall", "Strand", "Turn", "StopReason", "FinishReason"),
    "whet.envs.env": ("Env", "EnvStep", "EnvFault", "World", "ReplyScore"),
    "whet.guard.program": ("ProgramOutcome",),
    "whet.envs.tools": ("ToolError", "Priced"),
}
"""What the page of the Python interface describes, by module, in its order."""

CLI_INTRO = """\
# Commands

Generated from the help of the commands by `python -m whet.reference docs`; `whet COMMAND --help` prints the same.

`python -m whet` is the same as `whet`. Exit codes: 0 success; 1 the run, a rehearsal or a proof failed; 2 a config or
an argument is wrong and nothing was run; 130 stopped by Ctrl-C or SIGTERM: the same command resumes the run.
"""
NAMED = re.compile(r"([a-z_]+(?:, [a-z_]+)*): ")
"""The start of a docstring's line about parameters."""

PYTHON_INTRO = """\
# Python

Generated from docstrings by `python -m whet.reference docs`. Names of the first section are imported from `whet`
itself: `import whet; whet.train(...)`. `import whet` does not import torch; names that need it import it at first use.
"""


def cli_page() -> str:
    """A section for each command: usage, help, arguments, options and examples."""
    parts = [CLI_INTRO]
    for path, command in _commands(get_command(cli.app), ("whet",)):
        parts += [f"## {' '.join(path)}\n", *_command(path, command)]
    return "\n".join(parts)


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that can be run, with the words that call it."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    for name, below in (inner or {}).items():
        yield from _commands(below, (*path, name))


def _command(path: tuple[str, ...], command: Any) -> Iterator[str]:
    parameters = [p for p in command.params if p.name != "help"]
    arguments = [_argument(p) for p in parameters if p.param_type_name == "argument"]
    yield f"```text\n{' '.join([*path, '[OPTIONS]', *arguments])}\n```\n"
    text, examples = _parted(inspect.cleandoc(command.help or ""))
    yield f"{text}\n"
    if examples:
        yield "```sh\n" + "\n".join(examples) + "\n```\n"
    if parameters:
        context = typer.Context(command, info_name=path[-1])
        rows = [
            (_argument(p), p.help)
            if p.required and p.param_type_name == "argument"
            else p.get_help_record(context)
            for p in parameters
        ]
        yield "| argument or option | meaning |\n|---|---|"
        yield "\n".join(f"| `{_cell(name)}` | {_cell(text or '')} |" for name, text in rows) + "\n"


def _parted(help_text: str) -> tuple[str, list[str]]:
    """A command's help without its examples, and the examples."""
    lines = [line for line in help_text.splitlines() if line.strip() != "\b"]
    examples = [line.removeprefix("Example: ") for line in lines if line.startswith("Example: ")]
    return "\n".join(line for line in lines if not line.startswith("Example: ")).strip(), examples


def _argument(parameter: Any) -> str:
    """An argument as the usage line has it."""
    name = parameter.metavar or parameter.name.upper()
    return f"{name if parameter.required else f'[{name}]'}{'...' if parameter.nargs == -1 else ''}"


def python_page() -> str:
    """A section for each module of PUBLIC: signature, docstring and fields of each of its names."""
    parts = [PYTHON_INTRO]
    for module, names in PUBLIC.items():
        parts.append(f"## {module}\n")
        home = importlib.import_module(module)
        said = _texts_under(ast.parse(inspect.getsource(home)).body)
        for name in names:
            parts += [f"### {name}\n", *_described(name, getattr(home, name), said.get(name, ""))]
    return "\n".join(parts)


def _described(name: str, value: Any, said: str) -> Iterator[str]:
    """said: the text under the name in its module, for what has no docstring."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):  # Literal["stop", "length", ...]
        yield f"One of {_code(', '.join(value.__args__))}.\n\n{said}\n"
        return
    plain = inspect.isclass(value) and (issubclass(value, Exception) or Protocol in value.__mro__)
    if not plain:
        yield f"```python\n{_signature(name, value)}\n```\n"
    yield f"{_prose(inspect.getdoc(value) or '')}\n"
    if is_dataclass(value):
        texts = _said_of_fields(value)
        rows = [
            f"| `{f.name}` | `{_cell(_type(f.type))}` | {_cell(texts.get(f.name, ''))} |"
            for f in fields(value)
        ]
        yield "| field | type | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    if inspect.isclass(value) and not issubclass(value, Exception):
        for method, function in _methods(value):
            told = _prose(inspect.getdoc(function) or "")
            yield f"```python\n{_signature(method, function)}\n```\n\n{told}\n"


def _methods(kind: type) -> list[tuple[str, Any]]:
    """Public methods and properties with a docstring, in the order in which they are written."""
    found = []
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function) and inspect.getdoc(function):
            found.append((name, member if isinstance(member, property) else function))
    return found


def _signature(name: str, value: Any) -> str:
    """As it is written in a call; a long one has a line for each parameter. `self` and `cls` are left out."""
    if isinstance(value, property):
        return f"{name}: {_type(value.fget.__annotations__.get('return', ''))}"
    parameters = [p for p in inspect.signature(value).parameters.values() if p.name not in ("self", "cls")]
    each = [_parameter(p) for p in parameters]
    first = next((n for n, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), None)
    if first is not None and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        each.insert(first, "*")
    returned = "" if inspect.isclass(value) else value.__annotations__.get("return", "")
    end = f") -> {_type(returned)}" if returned else ")"
    line = f"{name}({', '.join(each)}{end}"
    return line if len(line) <= 90 else f"{name}(\n" + "".join(f"    {one},\n" for one in each) + end


def _parameter(parameter: inspect.Parameter) -> str:
    """`name: type = default`; `...` is a default that is made anew for each call."""
    stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
    typed = "" if parameter.annotation is parameter.empty else f": {_type(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return f"{stars}{parameter.name}{typed}"
    default = repr(parameter.default)
    if isinstance(parameter.default, frozenset):  # whose order differs between processes
        default = "{" + ", ".join(sorted(map(repr, parameter.default))) + "}"
    return f"{parameter.name}{typed} = {'...' if default.startswith('<') else default}"


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _said_of_fields(kind: Any) -> dict[str, str]:
    """The text under each field of a dataclass, which Python does not keep: from its source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    return _texts_under(tree.body if isinstance(tree, ast.ClassDef) else [])


def _texts_under(body: Sequence[ast.stmt]) -> dict[str, str]:
    """Assigned names with the string that follows them."""
    found = {}
    for before, after in pairwise(body):
        target = getattr(before, "target", None) or (getattr(before, "targets", None) or [None])[0]
        if (
            isinstance(target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[target.id] = " ".join(str(after.value.value).split())
    return found


def _prose(text: str) -> str:
    """A docstring as Markdown: `name: meaning` is an item of a list, an indented example stays as it is."""
    blocks = []
    for block in text.split("\n\n"):
        lines = block.splitlines()
        cut = next((n for n, line in enumerate(lines) if line.startswith("    ")), len(lines))
        paragraphs: list[str] = []
        for line in lines[:cut]:
            if named := NAMED.match(line):
                paragraphs.append(f"- {_code(named[1])}: {_escaped(line[named.end() :])}")
            elif line.startswith(("Raises ", "Errors: ")) or not paragraphs:
                paragraphs.append(_escaped(line))
            else:
                inner = "  " if paragraphs[-1].startswith("- ") else ""
                paragraphs[-1] += f"\n{inner}{_escaped(line)}"
        blocks += paragraphs
        if cut < len(lines):
            end = next((n for n in range(cut, len(lines)) if not lines[n].startswith("    ")), len(lines))
            blocks.append("```text\n" + textwrap.dedent("\n".join(lines[cut:end])) + "\n```")
            blocks.append(_prose("\n".join(lines[end:])))
    return "\n\n".join(block for block in blocks if block)


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def _escaped(text: str) -> str:
    """`**name`, `_` and `<name>` are no markup, except between backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    plain = [re.sub(r"([*<_])", r"\\\1", part) if n % 2 == 0 else part for n, part in enumerate(parts)]
    return "".join(plain)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PAGES = {"cli.md": cli_page, "python.md": python_page}
"""Generated pages of the reference, by file name."""

if __name__ == "__main__":
    for page, made in PAGES.items():
        (Path(sys.argv[1]) / page).write_text(made(), encoding="utf-8")
