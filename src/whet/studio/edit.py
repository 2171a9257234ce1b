"""Edits of a YAML text by the places of its nodes: one key changes, and comments and order stay.

An edit is a cut at the positions that PyYAML's marks give. What the text then says is read again and held against the
plain values with the same change. Where a cut does not give these (an alias, a text over several lines in an odd
place), the section at the top level that holds the key is written anew, without its comments; and if that is not
enough, the whole text. So an edit never changes another key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

import yaml

from whet.config.keys import TABLES, Path, dotted, lookup
from whet.config.parse import YAML_LOADER, parse
from whet.config.shorthand import SOURCES, expanded, short_for
from whet.config.tree import get
from whet.dialects.convert import scalar
from whet.types import ConfigError, Json


@dataclass(frozen=True)
class Edited:
    """A text after an edit."""

    text: str
    rewritten: str = ""
    """The section that was written anew, '.' for the whole text; '' where a cut was enough."""


class _NoCut(Exception):
    """The edit cannot be made in the text as it stands."""


def set_key(text: str, path: Path, value: Json, written: str = "") -> Edited:
    """The text with a value at a path. An index one past the end of a list adds an entry.

    written: how a single value is to stand there, where that reads as the value. Short forms on the way become
    sections: `model: PATH` with model.dtype is `model: {path: PATH, dtype: ...}`. Raises ConfigError if the
    text is no YAML, or where the path leads into something else.
    """
    tree = _read(text)
    path, value = _opened(tree, path, value)
    if _is_there(tree, path) and _same(get(tree, path), value):
        return Edited(text)
    wanted = _put(tree, path, value)
    return _made(text, wanted, path, lambda: _set(text, path, value, _source(value, written)))


def remove_key(text: str, path: Path) -> Edited:
    """The text without what stands at a path; nothing changes if nothing does. A section that is empty then goes, too,
    unless an empty one asks for something (`lora: {}`). Raises ConfigError if the text is no YAML."""
    tree = _read(text)
    if not path or not _is_there(tree, path):
        return Edited(text)
    while len(path) > 1 and len(get(tree, path[:-1])) == 1 and not _asks(path[:-1]):
        path = path[:-1]
    wanted = _take(tree, path)
    return _made(text, wanted, path, lambda: _remove(text, path))


def rename_key(text: str, path: Path, name: str) -> Edited:
    """The text with another name for a key whose name the user chose. Raises ConfigError if the name is taken."""
    tree = _read(text)
    if not _is_there(tree, path) or not isinstance(path[-1], str):
        raise ConfigError(f"{dotted(path)}: nothing is there to rename")
    if name == path[-1]:
        return Edited(text)
    around = get(tree, path[:-1])
    if not name or name in around:
        raise ConfigError(f"{dotted(path)}: the new name {name!r} is {'taken' if name else 'empty'}")
    wanted = _put_whole(
        tree, path[:-1], {name if key == path[-1] else key: one for key, one in around.items()}
    )
    key, _ = _find(text, path)
    cut = text[: key.start_mark.index] + scalar(name) + text[key.end_mark.index :] if key else text
    return _made(text, wanted, path, lambda: cut)


# ---------------------------------------------------------------- what is wanted, as plain values


def _read(text: str) -> Any:
    found = parse(text)
    if found.problems or not isinstance(found.tree, dict):
        line, said = (found.problems or [(1, "a config is a mapping of keys")])[0]
        raise ConfigError(f"line {line}: {said}")
    return found.tree


def _is_there(tree: Any, path: Path) -> bool:
    around = get(tree, path[:-1])
    last = path[-1]
    if isinstance(last, int):
        return isinstance(around, list) and last < len(around)
    return isinstance(around, dict) and last in around


def _asks(path: Path) -> bool:
    """Whether an empty section at a path says something: it is null until it is given, or an entry."""
    key = lookup(path)
    return isinstance(path[-1], int) or key is None or key.required or key.default is None


def _opened(tree: Any, path: Path, value: Json) -> tuple[Path, Json]:
    """The path to write at, and what: a short form on the way is written as a section."""
    for n in range(1, len(path)):
        at = path[:n]
        now, base = get(tree, at), at[2:] if at[:1] == ("stages",) else at
        if base in SOURCES and isinstance(now, str | dict):
            return at, _put({"": expanded(now, base)}, ("", *path[n:]), value)[""]
        if base in TABLES and (now is None or isinstance(now, str)):
            return at, _put({} if now is None else {"name": now}, path[n:], value)
        if isinstance(now, str) and (short := short_for(base)) is not None:
            section = get(expanded({str(base[0]): now}), base) if len(base) == 1 else {short: now}
            return at, _put(section, path[n:], value)
    return path, value


def _put(tree: Any, path: Path, value: Json) -> Any:
    """A copy of plain values with one of them at a path."""
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(first, int):
        entries = list(tree) if isinstance(tree, list) else [] if tree is None else None
        if entries is None or first > len(entries):
            raise ConfigError(f"{dotted(path)}: there is no such entry, and none before it")
        entries[first:] = [
            _put(entries[first] if first < len(entries) else None, rest, value),
            *entries[first + 1 :],
        ]
        return entries
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{first}: cannot be set inside of a single value or a list")
    return {**(tree or {}), first: _put((tree or {}).get(first), rest, value)}


def _put_whole(tree: Any, path: Path, value: Any) -> Any:
    return _put(tree, path, value) if path else value


def _take(tree: Any, path: Path) -> Any:
    if len(path) == 1:
        if isinstance(tree, list):
            return [one for n, one in enumerate(tree) if n != path[0]]
        return {key: one for key, one in tree.items() if key != path[0]}
    if isinstance(tree, list):
        return [_take(one, path[1:]) if n == path[0] else one for n, one in enumerate(tree)]
    return {key: _take(one, path[1:]) if key == path[0] else one for key, one in tree.items()}


# ---------------------------------------------------------------- the cut, and what stands in for it


def _made(text: str, wanted: Any, path: Path, cut: Any) -> Edited:
    """The smallest change of the text after which it says what is wanted; `rewritten` tells of a larger one."""
    top = path[:1]

    def section() -> str:
        return _set(text, top, wanted[top[0]], "") if top[0] in wanted else _remove(text, top)

    for make, rewritten in ((cut, ""), (section, str(top[0]))):
        try:
            made = make()
            if _says(made, wanted):
                return Edited(made, rewritten=rewritten)
        except (_NoCut, yaml.YAMLError):  # it cannot be cut there: the next larger change can
            continue
    return Edited("".join(f"{line}\n" for line in _block(wanted, 0)), rewritten=".")


def _says(text: str, wanted: Any) -> bool:
    found = parse(text)
    return not found.problems and _same(found.tree, wanted)


def _same(one: Any, other: Any) -> bool:
    """Equal, the kinds of values and the order of keys too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other or (one != one and other != other)


def _source(value: Json, written: str) -> str:
    """What the user wrote, if it may stand in the text as it is: on one line, without a comment, the same value."""
    written = written.strip()
    plain = not isinstance(value, dict | list | str) and written.isprintable() and " #" not in written
    return written if written and plain and _same(parse(written).tree, value) else ""


def _compose(text: str) -> yaml.Node | None:
    return yaml.compose(text, Loader=YAML_LOADER)


def _find(text: str, path: Path) -> tuple[yaml.Node | None, yaml.Node | None]:
    """(node of the key, node of the value) at a path; None where there is none."""
    key, node = None, _compose(text)
    for part in path:
        key, node = _child(node, part)
        if node is None:
            return None, None
    return key, node


def _child(node: yaml.Node | None, part: str | int) -> tuple[yaml.Node | None, yaml.Node | None]:
    if isinstance(node, yaml.SequenceNode):
        inside = isinstance(part, int) and part < len(node.value)
        found = (None, node.value[part]) if inside else (None, None)
    elif isinstance(node, yaml.MappingNode):
        found = next(((k, v) for k, v in node.value if k.value == part), (None, None))
    else:
        found = None, None
    if found[1] is not None and found[1].start_mark.index < node.start_mark.index:  # type: ignore[union-attr]
        raise _NoCut  # an alias: the node stands elsewhere
    return found


def _set(text: str, path: Path, value: Json, written: str) -> str:
    """The text with a value at a path, by one cut."""
    root = _compose(text)
    if root is None:
        return _after(text, len(text), _block(_nested(path, value), 0, written))
    key, node, depth = None, root, 0
    while depth < len(path):
        inner_key, inner = _child(node, path[depth])
        if inner is None:
            break
        key, node, depth = inner_key, inner, depth + 1
    if depth == len(path):
        return _replaced(text, key, node, value, written)
    rest = path[depth:]
    new = _nested(rest[1:], value)
    if isinstance(node, yaml.MappingNode | yaml.SequenceNode) and node.flow_style:
        entry = _flow(new, written if len(rest) == 1 else "")
        if isinstance(node, yaml.MappingNode):
            entry = f"{scalar(rest[0])}: {entry}"
        return _into_flow(text, node, entry)
    if isinstance(node, yaml.MappingNode):
        indent = node.value[0][0].start_mark.column
        lines = _block({rest[0]: new}, indent, written)
        return _after(text, _end(text, node), lines)
    if isinstance(node, yaml.SequenceNode):
        return _after(text, _end(text, node), _block([new], _dash(text, node.value[0])[1]))
    if key is None or not isinstance(rest[0], str):
        raise _NoCut
    if _content(text, node):  # null, written out
        return _replaced(text, key, node, _nested(rest, value), "")
    indent = key.start_mark.column + 2
    return _after(text, node.start_mark.index, _block(_nested(rest, value), indent, written))


def _replaced(text: str, key: yaml.Node | None, node: yaml.Node, value: Json, written: str) -> str:
    """Another value in the place of a node."""
    if key is not None and node.start_mark.index < key.end_mark.index:
        raise _NoCut
    start, end = node.start_mark.index, _end(text, node)
    sections = isinstance(value, dict) and value and key is not None and not _in_flow(text, node, key)
    if sections and key is not None:
        indent = key.start_mark.column
        lines = "".join(f"\n{line}" for line in _block(value, indent + 2))
        return text[: key.end_mark.index] + ":" + lines + text[end:]
    new = _flow(value, written)
    if key is not None and (start == end or _on_another_line(text, key, node)):
        return text[: key.end_mark.index] + f": {new}" + text[max(end, _colon(text, key)) :]
    return text[:start] + new + text[end:]


def _colon(text: str, key: yaml.Node) -> int:
    return text.index(":", key.end_mark.index) + 1


def _on_another_line(text: str, key: yaml.Node, node: yaml.Node) -> bool:
    return "\n" in text[key.end_mark.index : node.start_mark.index]


def _in_flow(text: str, node: yaml.Node, key: yaml.Node) -> bool:
    """Whether a key stands inside of braces on its line: a section of lines cannot follow it."""
    head = text[text.rfind("\n", 0, key.start_mark.index) + 1 : key.start_mark.index]
    return bool(head.replace("-", "").strip())


def _remove(text: str, path: Path) -> str:
    """The text without what stands at a path, by one cut."""
    key, node = _find(text, path)
    _, around = _find(text, path[:-1])
    assert node is not None
    assert isinstance(around, yaml.MappingNode | yaml.SequenceNode)
    first = key or node
    if around.flow_style:
        return _out_of_flow(text, around, first, node)
    end = _end(text, node)
    start = first.start_mark.index if key else _dash(text, node)[0]
    if len(around.value) == 1:
        if len(path) == 1:
            return text[: _line_start(text, start)] + text[_line_end(text, end) :]
        above, _ = _find(text, path[:-1])
        empty = "{}" if isinstance(around, yaml.MappingNode) else "[]"
        begin = _colon(text, above) if above else around.start_mark.index
        return text[:begin] + (" " if above else "") + empty + text[end:]
    head = text[_line_start(text, start) : start]
    if head.strip():  # after a dash: the next key takes its place
        keys = [k.start_mark.index for k, _ in around.value] if key else [
            _dash(text, one)[0] for one in around.value]  # fmt: skip
        return text[:start] + text[keys[keys.index(start) + 1] :]
    return text[: _line_start(text, start)] + text[_line_end(text, end) :]


def _out_of_flow(text: str, around: yaml.Node, first: yaml.Node, node: yaml.Node) -> str:
    pairs = around.value if isinstance(around, yaml.MappingNode) else [(one, one) for one in around.value]
    entries = [(head.start_mark.index, _end(text, tail)) for head, tail in pairs]
    n = entries.index((first.start_mark.index, _end(text, node)))
    if n + 1 < len(entries):
        return text[: entries[n][0]] + text[entries[n + 1][0] :]
    return text[: entries[n - 1][1] if n else around.start_mark.index + 1] + text[entries[n][1] :]


def _into_flow(text: str, node: yaml.Node, entry: str) -> str:
    end = node.end_mark.index - 1
    if not node.value:
        return text[: node.start_mark.index + 1] + entry + text[end:]
    last = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
    at = _end(text, last)
    return text[:at] + f", {entry}" + text[at:]


# ---------------------------------------------------------------- places


def _end(text: str, node: yaml.Node) -> int:
    """Where the text of a node ends. The marks of blocks lie behind comments and blank lines that follow."""
    if isinstance(node, yaml.MappingNode | yaml.SequenceNode) and not node.flow_style and node.value:
        last = node.value[-1]
        if isinstance(node, yaml.SequenceNode):
            return max(_end(text, last), _dash(text, last)[0] + 1)
        return max(_end(text, last[1]), _colon(text, last[0]))
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        return node.start_mark.index + len(text[node.start_mark.index : node.end_mark.index].rstrip())
    return int(node.end_mark.index)


def _content(text: str, node: yaml.Node) -> bool:
    return text[node.start_mark.index : node.end_mark.index].strip() != ""


def _dash(text: str, entry: yaml.Node) -> tuple[int, int]:
    """(index, column) of the dash before an entry of a list."""
    at = text.rfind("-", 0, max(entry.start_mark.index, 1))
    if at < 0 or text[at + 1 : entry.start_mark.index].strip():
        raise _NoCut
    return at, at - _line_start(text, at)


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _line_end(text: str, at: int) -> int:
    """Behind the end of the line: its comment belongs to it."""
    end = text.find("\n", at)
    rest = text[at : len(text) if end < 0 else end].strip()
    if rest and not rest.startswith("#"):
        raise _NoCut
    return len(text) if end < 0 else end + 1


def _after(text: str, at: int, lines: list[str]) -> str:
    """The text with more lines after the line of a place."""
    end = _line_end(text, at)
    head = text[:end]
    if head and not head.endswith("\n"):
        head += "\n"
    return head + "".join(f"{line}\n" for line in lines) + text[end:]


# ---------------------------------------------------------------- values as text


def _nested(path: Path, value: Json) -> Json:
    """The value inside of sections and lists."""
    for part in reversed(path):
        value = [value] if isinstance(part, int) else {part: value}
    return value


def _flow(value: Json, written: str = "") -> str:
    """A value on one line."""
    if written:
        return written
    if isinstance(value, dict):
        return "{" + ", ".join(f"{scalar(key)}: {_flow(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _quoted(value)


def _quoted(value: Json) -> str:
    """A single value; text with what braces and lists end with in quotes."""
    if isinstance(value, float) and not isfinite(value):
        return ".nan" if value != value else ".inf" if value > 0 else "-.inf"
    said = scalar(value)
    return scalar([value])[1:-1] if isinstance(value, str) and set(said) & set("{},[]:#") else said


def _block(value: Json, indent: int, written: str = "") -> list[str]:
    """A value as lines: sections with a key on each, lists of sections with a dash, all else on one line."""
    return [f"{' ' * indent}{line}" for line in _lines(value, written)]


def _lines(value: Json, written: str = "") -> Iterator[str]:
    """written: how the one single value stands there, where sections around it are all that is new."""
    if isinstance(value, dict):
        for key, one in value.items():
            if isinstance(one, dict) and one:
                yield f"{scalar(key)}:"
                yield from (f"  {line}" for line in _lines(one, written))
            elif isinstance(one, list) and any(isinstance(entry, dict) and entry for entry in one):
                yield f"{scalar(key)}:"
                yield from (f"  {line}" for line in _lines(one))
            else:
                yield f"{scalar(key)}: {_flow(one, written)}"
    elif isinstance(value, list):
        for entry in value:
            inner = list(_lines(entry)) if isinstance(entry, dict) and entry else [_flow(entry)]
            yield from (f"{'- ' if n == 0 else '  '}{line}" for n, line in enumerate(inner))
    else:
        yield _flow(value, written)
