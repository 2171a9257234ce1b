"""Text of a config file -> plain values, and the line of every key.

YAML by the core rules of version 1.2: true and false are the only booleans (`off` is text), 1e-6 is a number,
010 is ten, 12:30 and 2024-01-01 are text. A key given twice is refused with both lines.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, time
from pathlib import PurePath

import yaml

from whet.config.keys import Path, dotted
from whet.types import ConfigError, Json

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_TAGGED = re.compile(r"(&\S+\s+)?!")
_MOST_VALUES = 100_000


@dataclass
class Parsed:
    """Plain values, where each stands, and what is wrong."""

    tree: Json = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)
    """(line, text)"""


def parse(text: str, *, toml: bool = False) -> Parsed:
    """Read YAML or TOML. What cannot be read at all is the one problem; then the tree is None."""
    return _toml(text) if toml else _yaml(text)


def scalar(text: str) -> Json:
    """An unquoted YAML scalar by the core rules: null, boolean, number, or the text itself."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def plain(value: object, path: Path = ()) -> Json:
    """Values from Python as JSON has them: mappings, lists, text, numbers; paths and dates become text."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v, (*path, str(k))) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, (*path, n)) for n, v in enumerate(value)]
    if isinstance(value, PurePath | date | time):
        return str(value)
    raise ConfigError(
        f"{dotted(path)}: got a {type(value).__name__}; a config holds mappings, lists, text, numbers, "
        "booleans and None."
    )


# ---------------------------------------------------------------- YAML


def _yaml(text: str) -> Parsed:
    out = Parsed()
    try:
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        said = ", ".join(part for part in (e.problem, e.context) if part)
        if mark and text.splitlines()[mark.line :][:1] and "\t" in text.splitlines()[mark.line]:
            said += "; the line has a tab, and YAML indents with spaces"
        out.problems.append((mark.line + 1 if mark else 1, f"not valid YAML: {said}"))
        return out
    except yaml.YAMLError as e:
        out.problems.append((1, f"not valid YAML: {e}"))
        return out
    out.tree = {} if node is None else _value(node, (), out, text=text, inside=())
    return out


def _value(node: yaml.Node, path: Path, out: Parsed, *, text: str, inside: tuple[yaml.Node, ...]) -> Json:
    """The plain value of a node; `inside` are the nodes around it, against an alias to one of them."""
    line = node.start_mark.line + 1
    out.lines.setdefault(path, line)
    if len(out.lines) > _MOST_VALUES:
        raise ConfigError(
            f"line {line}: more than {_MOST_VALUES} values; is an alias inside an alias inside an alias?"
        )
    if node in inside:
        out.problems.append((line, f"{dotted(path)}: contains itself through an alias"))
        return None
    if _TAGGED.match(text, node.start_mark.index):
        out.problems.append(
            (line, f"{dotted(path)}: tags (!...) are not used; quote what is text, nothing else")
        )
    inside = (*inside, node)
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, out, text=text, inside=inside)
    if isinstance(node, yaml.SequenceNode):
        return [
            _value(child, (*path, n), out, text=text, inside=inside) for n, child in enumerate(node.value)
        ]
    quoted = isinstance(node, yaml.ScalarNode) and node.style
    return node.value if quoted else scalar(node.value)


def _mapping(node: yaml.Node, path: Path, out: Parsed, *, text: str, inside: tuple[yaml.Node, ...]) -> Json:
    tree: dict[str, Json] = {}
    first: dict[str, int] = {}
    for key, child in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            out.problems.append((line, f"{dotted(path) or 'the file'}: a key must be text"))
        elif key.value == "<<":
            out.problems.append(
                (line, "<<: merging is not in YAML 1.2; use ${section} or a stage, which inherits")
            )
        elif key.value in first:
            where = dotted((*path, key.value))
            out.problems.append(
                (line, f"{where}: given twice, in lines {first[key.value]} and {line}; keep one")
            )
        else:
            first[key.value] = line
            out.lines[(*path, key.value)] = line
            tree[key.value] = _value(child, (*path, key.value), out, text=text, inside=inside)
    return tree


# ---------------------------------------------------------------- TOML

_TABLE = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?")
_PAIR = re.compile(r"\s*([A-Za-z0-9_.\"'\- ]+?)\s*=")


def _toml(text: str) -> Parsed:
    out = Parsed()
    try:
        out.tree = plain(tomllib.loads(text))
    except tomllib.TOMLDecodeError as e:
        at = re.search(r"line (\d+)", str(e))
        out.problems.append((int(at[1]) if at else text.count("\n") + 1, f"not valid TOML: {e}"))
        return out
    _toml_lines(text, out)
    return out


def _toml_lines(text: str, out: Parsed) -> None:
    """tomllib tells no lines: they are read off the table heads and `key =`; the first place found counts."""
    table: Path = ()
    counts: dict[Path, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if head := _TABLE.fullmatch(line):
            table = _in_lists(_names(head[2]), counts)
            if head[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            out.lines.setdefault(table, number)
        elif pair := _PAIR.match(line):
            names = _names(pair[1])
            for n in range(1, len(names) + 1):
                out.lines.setdefault((*table, *names[:n]), number)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in text.split("."))


def _in_lists(names: tuple[str, ...], counts: Mapping[Path, int]) -> Path:
    """A table's path with the index of the newest entry after every list of tables above it."""
    path: Path = ()
    for n, name in enumerate(names):
        path = (*path, name)
        if n < len(names) - 1 and path in counts:
            path = (*path, counts[path])
    return path
