"""Digests of the user's code that a config names: rewards, environments, data functions, losses and the like.

Code decides results as data does, but a config has only its name. Files are read as text and never run: what runs in
workers is not imported by the process that starts them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os
import pkgutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import yaml

from whet.config.keys import Path as At
from whet.config.keys import dotted
from whet.config.recipes import with_settings
from whet.config.schema import Config
from whet.config.secrets import dump
from whet.config.tree import leaves
from whet.tables import near
from whet.types import Json

_PLAYED = ("rollout.env", "rollout.env.arguments.envs.*")
"""The sections that name an environment: one, or each of several (`config.environments`)."""


def _played(*keys: str) -> tuple[str, ...]:
    return tuple(f"{section}.{key}" for section in _PLAYED for key in keys)


_FILES = tuple(f"arguments.{name}" for name in ("tool_config", "interaction_config", "function_tools"))

ENVIRONMENT = " ".join(_played("make", "arguments.functions.*", "arguments.tool_class"))
"""The keys that name the code of which an environment consists."""

NAMES = " ".join(
    (
        "imports.* rewards.*.function data.*.*.function rollout.engine train.engine",
        ENVIRONMENT,
        *_played(*_FILES, "arguments.env", "arguments.say", "arguments.act"),
        "buffer.replay.priority.name data.order.name data.order.class_path",
        "algorithm.advantage.name algorithm.loss.name algorithm.mix.loss.name algorithm.correction.weight.name",
    )
)
"""The keys whose values may name code of the user's which decides results."""

TRACKERS = "track.trackers.*"
"""The same of code that changes no result."""

WHOLE = ("imports.*", *_played(*_FILES))
"""Those of NAMES whose values are modules or files, without a name in them."""

GIVEN = "object:"
"""Begins the name of a function that was given from Python."""

_OURS = "whet"
_YAML = (".yaml", ".yml")
_INSTALLED = ("site-packages", "dist-packages")


def digests(
    stages: Sequence[Config], given: Mapping[str, Callable[..., Any]], keys: str = NAMES
) -> dict[str, str]:
    """The user's code by its file: 16 digits of the file's SHA-256, or name and version of an installed package.

    stages: the whole config of each. given: functions from Python, by the names of their rewards. keys: those whose
    values are looked at. A file counts with
    the files of the user's that it imports. A function of a script or notebook counts with its own lines only: the
    other lines are not its code.
    """
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for cfg in stages for name in named(cfg, keys)):
        if name.startswith(GIVEN):
            found |= _given(name, given.get(name.removeprefix(GIVEN)))
        elif path := _file(name):
            found |= _digests(path)
    return dict(sorted(found.items()))


def named(cfg: Config, keys: str = NAMES) -> Iterator[str]:
    """The code that a config names, as it names it."""
    return (name for _, name in _named(cfg, keys))


def absent(stages: Sequence[Config]) -> list[str]:
    """What is to be said of each file of the user's code that is not there, by its key: a run would end for it."""
    told: dict[str, None] = {}
    for key, name in (found for cfg in stages for found in _named(cfg, f"{NAMES} {TRACKERS}")):
        place = Path(name.rpartition(":")[0] or name)
        if place.suffix in (".py", *_YAML) and not place.is_file():
            beside = [path.name for path in place.parent.glob(f"*{place.suffix}")]
            told[f"{key}={name}: no such file on this machine{near(place.name, beside)}"] = None
    return list(told)


def _named(cfg: Config, keys: str) -> Iterator[tuple[str, str]]:
    """(key, code that it names)"""
    tree = with_settings(dump(cfg))
    for pattern in keys.split():
        for path, value in _at(tree, pattern.split(".")):
            if isinstance(value, str) and (":" in value or pattern in WHOLE):
                yield dotted(path), value


def _at(tree: Json, path: Sequence[str], above: At = ()) -> Iterator[tuple[At, Json]]:
    """The values at a path with their places. A star in it stands for every index and every name."""
    if not path:
        yield above, tree
    elif path[0] == "*" and isinstance(tree, dict | list):
        for at, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _at(value, path[1:], (*above, at))
    elif isinstance(tree, dict) and path[0] in tree:
        yield from _at(tree[path[0]], path[1:], (*above, path[0]))


# ---------------------------------------------------------------- files


def _file(name: str) -> Path | None:
    """The file of 'path/to/file.py:name' or 'package.module:name', or a YAML file that names classes. None: whet's own,
    or there is none."""
    place = name.rpartition(":")[0] or name
    if place.endswith((".py", *_YAML)):
        return Path(place).resolve() if Path(place).is_file() else None
    return None if place.partition(".")[0] == _OURS else module_file(place)


def module_file(module: str) -> Path | None:
    """The file that a module would be imported from. No package on the way is imported."""
    top, *inner = module.split(".")
    found = (finder.find_spec(top, None) for finder in sys.meta_path)
    spec = next((spec for spec in found if spec is not None), None)
    if spec is None:
        spec = PathFinder.find_spec(top, [os.getcwd()])  # as `tables.load_place` finds it
    name = top
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = _inside(name, list(spec.submodule_search_locations))
    origin = None if spec is None else spec.origin
    return Path(origin).resolve() if origin and Path(origin).is_file() else None


def _inside(name: str, places: Sequence[str]) -> ModuleSpec | None:
    """A module or package below a package with these folders. Python's own finder of paths would need the package
    imported where folders have no __init__.py."""
    for finder in sys.meta_path:
        if finder is not PathFinder and (spec := finder.find_spec(name, places)) is not None:
            return spec
    folders: list[str] = []
    for importer in map(pkgutil.get_importer, places):
        spec = None if importer is None else importer.find_spec(name)
        if spec is not None and spec.loader is not None:
            return spec
        folders += (spec and spec.submodule_search_locations) or ()
    if not folders:
        return None
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = folders
    return spec


def _digests(path: Path) -> dict[str, str]:
    """Of a file and of those of the user's that it imports, by their paths below the working directory."""
    found: dict[str, str] = {}
    ahead, seen = [path], {path}
    while ahead:
        path = ahead.pop()
        if version := _package(path):
            found[version.partition(" ")[0]] = version
            continue
        text = path.read_bytes()
        found[_shown(path)] = f"{hashlib.sha256(text).hexdigest()[:16]}"
        fresh = [each for each in _imports(path, text) if each not in seen and _is_users(each)]
        seen.update(fresh)
        ahead += fresh
    return found


def _imports(path: Path, text: bytes) -> Iterator[Path]:
    """The files that a Python file imports, as far as its text tells; of a YAML file those of the classes in it."""
    if path.suffix in _YAML:
        yield from _classes(text)
        return
    for level, module, names in _statements(text):
        if level:
            folder = path.parents[level - 1] if level <= len(path.parents) else path.parent
            inner = folder.joinpath(*module.split("."))
            places = [inner, *(inner / name for name in names)]
            yield from (f for p in places for f in (p.with_suffix(".py"), p / "__init__.py") if f.is_file())
        elif module.partition(".")[0] != _OURS:
            modules = [module, *(f"{module}.{name}" for name in names)]
            yield from (found for each in modules if (found := module_file(each)) is not None)


@functools.lru_cache(maxsize=64)  # a process that trains again and again reads the same files
def _statements(text: bytes) -> Sequence[tuple[int, str, tuple[str, ...]]]:
    """(level, module, names) of each import in a Python file; none of `import module`."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ()  # who loads it says so
    found: list[tuple[int, str, tuple[str, ...]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(0, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or "", tuple(alias.name for alias in node.names)))
    return found


def _classes(text: bytes) -> Iterator[Path]:
    """The files of all `class_name` in a YAML file of verl's tools (envs/verl_tools.py)."""
    try:
        found = [*leaves(yaml.safe_load(text))]
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        return  # who loads it says so
    for path, value in found:
        if path[-1:] == ("class_name",) and isinstance(value, str) and (file := _file(class_place(value))):
            yield file


def class_place(name: str) -> str:
    """'package.module:Class' of package.module.Class, as verl names classes; another form as it is.

    A module that is not found is a file below the working directory, as it is for `python -m`.
    """
    if ":" in name:
        return name
    module, _, inner = name.rpartition(".")
    file = f"{module.replace('.', '/')}.py"
    return f"{module if module_file(module) or not Path(file).is_file() else file}:{inner}"


def _is_users(path: Path) -> bool:
    """Neither Python's own, nor of an installed package, nor whet's."""
    inside = any(path.is_relative_to(root) for root in _roots())
    return path.suffix == ".py" and not inside and not set(_INSTALLED) & set(path.parts)


@functools.cache
def _roots() -> Sequence[Path]:
    """The folders of Python's modules and of whet's."""
    python = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return [*(Path(p).resolve() for p in python), Path(__file__).resolve().parents[1]]


def _package(path: Path) -> str | None:
    """'name version' of the installed package that a file belongs to."""
    for n, part in enumerate(path.parts[:-1]):
        if part in _INSTALLED:
            top = path.parts[n + 1].removesuffix(".py")
            names = _distributions().get(top)
            return f"{names[0]} {metadata.version(names[0])}" if names else None
    return None


_distributions = functools.cache(metadata.packages_distributions)


def _shown(path: Path) -> str:
    here = Path.cwd().resolve()
    return os.fspath(path.relative_to(here) if path.is_relative_to(here) else path)


# ---------------------------------------------------------------- functions from Python


def _given(name: str, function: Callable[..., Any] | None) -> dict[str, str]:
    """Of a function that was given from Python: its own lines and what it holds, by the name of its reward; and its
    file, where that is a module."""
    if function is None:
        return {}
    held, function = _held(function)
    bare = inspect.unwrap(function)
    code = bare if inspect.isroutine(bare) or inspect.isclass(bare) else type(bare)
    try:
        path = Path(inspect.getsourcefile(code) or "")
        if path.is_relative_to(Path(__file__).parents[1]):
            return {}
        files = _digests(path.resolve()) if code.__module__ != "__main__" and path.is_file() else {}
        text = inspect.getsource(code)
    except (OSError, TypeError):
        return {name: "no source"}  # typed into an interpreter: nothing can be compared
    return {name: f"{hashlib.sha256(f'{text}{held}'.encode()).hexdigest()[:16]}", **files}


def _held(function: Callable[..., Any]) -> tuple[list[str], Callable[..., Any]]:
    """The plain values that a function was made with, as text, and the function without its partial arguments: closures
    of one text may differ in them. Objects count by their kind alone: their text may be another one in each process."""
    held: list[Any] = []
    while isinstance(function, functools.partial):
        held += [*function.args, *sorted(function.keywords.items())]
        function = function.func
    held += getattr(function, "__defaults__", None) or ()
    held += sorted((getattr(function, "__kwdefaults__", None) or {}).items())
    for cell in getattr(function, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:
            held.append(None)  # a name that has no value yet
    return [_plain(value) for value in held], function


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_plain, value))})"
    return repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
