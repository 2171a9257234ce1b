"""Text of a config file -> plain values, and the line of every key; and back.

YAML by the core rules of version 1.2: true and false are the only booleans (`off` is text), 1e-6 is a number,
12:30 and 2024-01-01 are text; 010 is refused. In a foreign file scalars are what its system reads (`scalars.py`). A key
given twice is refused with both lines. `<<: *name` merges mappings, as in version 1.1, since files of other systems use
it: keys given beside it count, then those of the first mapping.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, time
from pathlib import PurePath

import yaml

from whet.config.keys import Path, dotted
from whet.config.scalars import fits, foreign_scalar, hydra_scalar, scalar
from whet.inputs import MOST_DEPTH, too_deep
from whet.types import ConfigError, Json

YAML_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_BREAKS = re.compile("[\r\x85\u2028\u2029]")
"""PyYAML writes them as they are, and reads them as ends of lines."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_TAGGED = re.compile(r"(&\S+\s+)?!")
_COMMENT = re.compile(r"(^|\s)#")
_MOST_VALUES = 100_000


class _TooManyValues(Exception):
    """Aliases have blown a small file up."""


@dataclass
class Parsed:
    """Plain values, where each stands, and what is wrong."""

    tree: Json = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)
    """(line, text)"""
    unread: set[Path] = field(default_factory=set)
    """Where a value stands that is not what was written."""
    values: int = 0
    """Built so far; a value that an alias repeats counts again."""
    scalar: Callable[[str], Json] = scalar
    """What reads an unquoted scalar; below `whet`, the section of native keys, `scalars.scalar` does."""

    def refuse(self, path: Path, line: int, said: str) -> None:
        """A value is not one that a config can have."""
        self.problems.append((line, f"{dotted(path)}: {said}"))
        self.unread.add(path)


def parse(text: str, *, toml: bool = False, foreign: bool = False) -> Parsed:
    """Read YAML or TOML. What cannot be read at all is the one problem; then the tree is None."""
    return _toml(text) if toml else _yaml(text, foreign_scalar if foreign else scalar)


def parse_override(value: str, *, hydra: bool = False) -> Parsed:
    """Read the value of an override, which is YAML; its scalars may be Hydra's. A comment or a line break in text
    without quotes is refused: YAML would drop the one and join the other, and a shell's quotes do not reach it."""
    parsed = _yaml(value, hydra_scalar if hydra else scalar)
    is_text = not parsed.tree or not isinstance(parsed.tree, dict | list)  # of a comment alone it is {}
    if is_text and not parsed.problems and value[:1] not in tuple("\"'|>&{["):
        for sign, read in ((_COMMENT, "a comment begins at #"), ("\n", "the lines are joined")):
            if re.search(sign, value):
                parsed.problems.append(
                    (1, f"in YAML {read}; if it is text, quote it in the value: key='\"...\"'")
                )
    return parsed


def as_yaml(tree: Mapping[str, Json]) -> str:
    """YAML that `parse` reads as it was. PyYAML alone leaves text unquoted that is a number by version 1.2: 1e3."""
    return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    pass


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        reads_as_it_is = scalar(text) == text
    except ValueError:
        reads_as_it_is = False
    style = '"' if _BREAKS.search(text) else None if reads_as_it_is else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def plain(value: object, path: Path = ()) -> Json:
    """Values from Python as JSON has them: mappings, lists, text, numbers; paths and dates become text."""
    if isinstance(value, str) and not value.isascii() and _SURROGATE.search(value):
        raise ConfigError(f"{dotted(path)}: contains half of a surrogate pair, which is not valid text")
    if isinstance(value, int) and not fits(value):
        raise ConfigError(f"{dotted(path)}: a whole number beyond 64 bits; give it as text if it is text")
    if value is None or isinstance(value, str | int | float):
        return value
    if len(path) > MOST_DEPTH:
        raise ConfigError(f"{dotted(path[:3])}...: {too_deep()}")
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


def _yaml(text: str, read: Callable[[str], Json]) -> Parsed:
    out = Parsed(scalar=read)
    try:
        if too_much := excess(text):
            out.problems.append(too_much)
            return out
        node = yaml.compose(text, Loader=YAML_LOADER)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        said = ", ".join(part for part in (e.problem, e.context) if part)
        if mark and text.splitlines()[mark.line :][:1] and "\t" in text.splitlines()[mark.line]:
            said += "; the line has a tab, and YAML indents with spaces"
        out.problems.append((mark.line + 1 if mark else 1, f"not valid YAML: {said}"))
        return out
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        out.problems.append(
            (line, f"not valid YAML: the character U+{_code(e.character):04X} is not allowed: {e.reason}")
        )
        return out
    except UnicodeEncodeError as e:
        out.problems.append(
            (text.count("\n", 0, e.start) + 1, "not valid text: it contains half of a surrogate pair")
        )
        return out
    try:
        out.tree = {} if node is None else _value(node, (), out, text=text, inside=())
    except _TooManyValues:
        out.tree = None
    return out


def _code(character: str | bytes | int) -> int:
    return character if isinstance(character, int) else ord(character)


def excess(text: str) -> tuple[int, str] | None:
    """(line, what is wrong) of text that nests too deep or holds too much; told from its events, which come one by one,
    before anything is built of them."""
    levels = values = 0
    for event in yaml.parse(text, Loader=YAML_LOADER):
        levels += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        values += isinstance(event, yaml.NodeEvent)
        line = event.start_mark.line + 1 if event.start_mark else 1
        if levels > MOST_DEPTH:
            return line, too_deep()
        if values > 2 * _MOST_VALUES:  # keys are counted, too
            return line, f"more than {_MOST_VALUES} values"
    return None


def _value(node: yaml.Node, path: Path, out: Parsed, *, text: str, inside: tuple[yaml.Node, ...]) -> Json:
    """The plain value of a node; `inside` are the nodes around it, against an alias to one of them."""
    line = node.start_mark.line + 1
    out.lines.setdefault(path, line)
    out.values += 1
    if out.values > _MOST_VALUES:
        out.problems = [
            (line, f"more than {_MOST_VALUES} values; is an alias inside an alias inside an alias?")
        ]
        raise _TooManyValues
    if node in inside:
        out.refuse(path, line, "contains itself through an alias")
        return None
    if _TAGGED.match(text, node.start_mark.index):
        out.refuse(
            path,
            line,
            "YAML tags (!...) are not supported; quote the value if it is text, else leave the tag out",
        )
    inside = (*inside, node)
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, out, text=text, inside=inside)
    if isinstance(node, yaml.SequenceNode):
        return [
            _value(child, (*path, n), out, text=text, inside=inside) for n, child in enumerate(node.value)
        ]
    quoted = isinstance(node, yaml.ScalarNode) and node.style
    try:
        return node.value if quoted else (scalar if path[:1] == ("whet",) else out.scalar)(node.value)
    except ValueError as e:
        out.refuse(path, line, str(e))
        return None


def _mapping(node: yaml.Node, path: Path, out: Parsed, *, text: str, inside: tuple[yaml.Node, ...]) -> Json:
    tree = _merged(node, path, out, text=text, inside=inside)
    first: dict[str, int] = {}
    for key, child in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            out.problems.append((line, f"{dotted(path) or 'the file'}: a key must be text"))
        elif key.value in first:
            where = dotted((*path, key.value))
            out.problems.append(
                (line, f"{where}: given twice, in lines {first[key.value]} and {line}; keep one")
            )
        else:
            first[key.value] = line
            if not _merges(key):
                out.lines[(*path, key.value)] = line
                tree[key.value] = _value(child, (*path, key.value), out, text=text, inside=inside)
    return tree


def _merges(key: yaml.Node) -> bool:
    """The key is `<<`, not quoted."""
    return isinstance(key, yaml.ScalarNode) and key.value == "<<" and not key.style


def _merged(
    node: yaml.Node, path: Path, out: Parsed, *, text: str, inside: tuple[yaml.Node, ...]
) -> dict[str, Json]:
    """What `<<` puts into a mapping, the first of several on top."""
    tree: dict[str, Json] = {}
    for key, given in node.value:
        if not _merges(key):
            continue
        for child in reversed(given.value) if isinstance(given, yaml.SequenceNode) else [given]:
            if isinstance(child, yaml.MappingNode):
                value = _value(child, path, out, text=text, inside=inside)
                tree |= value if isinstance(value, dict) else {}  # None: it contains itself
            else:
                where = dotted((*path, "<<"))
                out.problems.append(
                    (
                        key.start_mark.line + 1,
                        f"{where}: expected an alias of a mapping (*name), or a list of them",
                    )
                )
    return tree


# ---------------------------------------------------------------- TOML

_TABLE = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?")
_PAIR = re.compile(r"\s*([A-Za-z0-9_.\"'\- ]+?)\s*=")


def _toml(text: str) -> Parsed:
    out = Parsed()
    try:
        tree = tomllib.loads(text, parse_float=_toml_float)
    except RecursionError:
        out.problems.append((1, too_deep()))
        return out
    except ValueError as e:  # tomllib's own error is one
        at = re.search(r"line (\d+)", str(e))
        out.problems.append((int(at[1]) if at else text.count("\n") + 1, f"not valid TOML: {e}"))
        return out
    _toml_lines(text, out)
    try:
        out.tree = plain(tree)
    except ConfigError as e:
        out.problems.append((_line_of(str(e).partition(":")[0], out), str(e)))
    return out


def _toml_float(text: str) -> float:
    return float(scalar(text.replace("_", "")) if "n" not in text else text)


def _line_of(key: str, parsed: Parsed) -> int:
    return next((line for path, line in parsed.lines.items() if dotted(path) == key), 1)


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
