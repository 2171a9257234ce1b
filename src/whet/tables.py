"""The plugin system: a name is a key of a table, or points to user code."""

from __future__ import annotations

import contextlib
import csv
import difflib
import functools
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar, cast, get_type_hints

from whet.types import ConfigError, Json, WhetError

T = TypeVar("T")

_WHET = str(Path(__file__).parent) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = "-packages" + os.sep

_USER = "whet_user_"
"""Begins the names of modules that are files of the user's."""

_OWN = "'package.module:name' or 'path/to/file.py:name'"
_FORM = re.compile(r"(.+?)(?:::?|(?<=\.py)\.)(\w+)(?:\(\))?")
"""Of a name of the user's: the place and the name in it. Other tools write 'file.py::name', 'file.py.name'
and 'file.py:name()'."""
_NO_NAME = "a file alone does not say which function; expected {}:NAME"


def find(table: Mapping[str, T], name: str, *, what: str) -> T:
    """The entry `name` of a table, or the object at `package.module:name` or `path/to/file.py:name`.

    Raises ConfigError that names the near misses.
    """
    if name in table:
        return table[name]
    if wrong := unknown(table, name):
        raise ConfigError(f"{what} {wrong}")
    return cast(T, load_object(name, what=what, asked=True))


def unknown(table: Mapping[str, object], name: str) -> str | None:
    """What is wrong with a name that is neither in the table nor one of the user's."""
    if name in table:
        return None
    form = _FORM.fullmatch(name)
    if form and name != (meant := ":".join(form.groups())):
        return f"{name!r}: expected {meant!r}"
    place, _, own = name.rpartition(":")
    if place and own:
        return None
    if name.endswith(".py"):
        return f"{name!r}: {_NO_NAME.format(name)}"
    if not table:
        return f"{name!r}: expected {_OWN}"
    return not_known(name, table, own=True)


def not_known(name: str, table: Iterable[str], *, own: bool = False) -> str:
    """What is said of a name that a table does not have. own: one of the user's could be given, too."""
    names = list(table)
    said = f"{name!r} is not known{near(name, names)}; known: {', '.join(names)}"
    return f"{said}, or your own as {_OWN}" if own else said


def near(name: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' or an empty text."""
    hits = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(h) for h in hits)}?" if hits else ""


def check_settings(
    function: Callable[..., object],
    settings: Collection[str],
    *,
    key: str,
    name: str,
    given: int = 0,
    also: Iterable[str] = (),
) -> None:
    """ConfigError for settings that a function of the user's does not have, and for those that it needs and lacks.

    given: positional arguments that it gets beside them; also: names that it may ask for.
    """
    parameters = list(inspect.signature(function).parameters.values())[given:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    own = {p.name: p for p in parameters if p.name not in set(also)}
    if unknown := [setting for setting in settings if setting not in own]:
        has = ", ".join(own) or "none"
        raise ConfigError(f"{key}.{unknown[0]}: {name!r} has no such setting; it has: {has}")
    if lacking := [setting for setting, p in own.items() if p.default is p.empty and setting not in settings]:
        raise ConfigError(f"{key}.{lacking[0]}: {name!r} needs a value; give one")


def as_annotated(value: Json, hint: Any, *, key: str, name: str) -> Any:
    """The value of a setting of `name` as the annotation of its parameter says; ConfigError where it is another."""
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    try:
        return TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
    except PydanticUserError as e:
        raise ConfigError(
            f"{key}={value!r}: {name} takes {_written(hint)}, which a config cannot hold. Annotate the setting as a "
            "number, a text, a bool, or a list or dict of these."
        ) from e
    except ValidationError as e:
        raise ConfigError(f"{key}={value!r}: {name} takes {_written(hint)}: {e.errors()[0]['msg']}.") from e


def annotations_of(function: Callable[..., object]) -> dict[str, Any]:
    """The annotations of a user's function by parameter. One that names what only type checkers import is left out."""
    inner: Any = function.func if isinstance(function, functools.partial) else function
    inner = inspect.unwrap(inner) if inspect.isroutine(inner) else type(inner).__call__
    names = getattr(inner, "__globals__", {})
    found: dict[str, Any] = {}
    for each, annotation in getattr(inner, "__annotations__", {}).items():
        alone = SimpleNamespace(__annotations__={each: annotation})
        with contextlib.suppress(NameError, AttributeError, TypeError, SyntaxError):
            found |= get_type_hints(alone, globalns=names, include_extras=True)
    return found


def _written(hint: Any) -> str:
    """An annotation, for people: its types alone. The message of a limit says the limit."""
    if isinstance(hint, type):
        return hint.__name__
    text = re.sub(r"\b(?:typing|collections\.abc)\.", "", str(hint))
    text = re.sub(r"\bAnnotated\[(\w+), [^\]]*\]", r"\1", text)
    return re.sub(r"\bOptional\[(\w+)\]", r"\1 | None", text)


def check_types(
    function: Callable[..., object], arguments: Mapping[str, Json], *, key: str, name: str
) -> None:
    """ConfigError for an argument of another type than the function of ours has it, or beyond a limit in its
    annotation."""
    hints = get_type_hints(function, include_extras=True)
    for each, value in arguments.items():
        as_annotated(value, hints.get(each, Any), key=f"{key}.{each}", name=name)


def raised_at(error: BaseException) -> tuple[str, int] | None:
    """The file and the line of the user's that raised it: the innermost outside of whet, Python, packages and code
    without a file (a dataclass's methods); else the innermost outside of whet and Python; else the innermost."""
    trace = error.__traceback__
    places: list[tuple[str, int]] = []
    while trace is not None:
        places.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    foreign = [at for at in places if is_foreign(at[0])]
    own = [at for at in foreign if _PACKAGES not in at[0] and at[0] != "<string>"]
    return next((found[-1] for found in (own, foreign, places) if found), None)


def is_foreign(file: str) -> bool:
    """Whether a file is neither whet's nor Python's own."""
    inside = file.startswith(_PYTHON) and _PACKAGES not in file
    return not inside and not file.startswith((_WHET, "<frozen "))


def at_line(error: BaseException) -> str:
    """' (/place/file.py:3)', the line of the user's that raised it; '' where no line of the user's ran."""
    at = raised_at(error)
    return f" ({at[0]}:{at[1]})" if at and is_foreign(at[0]) else ""


def load_object(spec: str, *, what: str, asked: bool = False) -> Callable:  # type: ignore[type-arg]
    """The object that 'package.module:name' or 'path/to/file.py:name' points to. asked: a class, too, has to say which
    parameters it takes."""
    if wrong := unknown({}, spec):
        raise ConfigError(f"{what} {wrong}")
    place, _, name = spec.rpartition(":")
    try:
        module = load_place(place)
    except (ImportError, OSError, SyntaxError) as e:
        raise ConfigError(f"{what} {spec!r}: cannot load {place!r}: {e}{at_line(e)}") from e
    except WhetError:
        raise
    except (Exception, SystemExit) as e:  # code of the user's: it can fail in any way, or end the program
        raise ConfigError(
            f"{what} {spec!r}: importing {place!r} raised {type(e).__name__}: {e}{at_line(e)}"
        ) from e
    if not hasattr(module, name):
        raise ConfigError(f"{what} {spec!r}: {place!r} has no {name!r}{near(name, dir(module))}")
    found = getattr(module, name)
    if not callable(found):
        raise ConfigError(f"{what} {spec!r} is {found!r}; expected a function or class")
    if asked or not isinstance(found, type):
        try:
            inspect.signature(found)
        except ValueError as e:  # of one in C, as max and dict: nobody can tell what it takes
            raise ConfigError(
                f"{what} {spec!r} does not say which parameters it takes; give a function of yours that calls it"
            ) from e
    return found


def loaded_files() -> list[str]:
    """User files that have been loaded; another process needs them to find their functions by name."""
    modules = [m for name, m in sys.modules.items() if name.startswith(_USER)]
    return [m.__file__ for m in modules if m.__file__ is not None]


def is_installed(package: str) -> bool:
    """Whether there is a package of this name. A folder without code is none, as a tracker leaves one of its own name
    in the working directory, which Python would import as an empty package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and (spec.origin is not None or spec.submodule_search_locations is None)


def load_place(place: str) -> ModuleType:
    """The module of the user's, or of ours, at 'package.module' or 'path/to/file.py'."""
    if place.endswith(".py") or os.sep in place:
        return load_module(Path(place))
    if place.partition(".")[0] != __package__:
        _find_here()
    return importlib.import_module(place)


def _find_here() -> None:
    """Code of the user's finds modules in the working directory, behind all others. `python -m whet` has it in its path
    by itself; the script `whet` has not."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


def load_module(path: Path) -> ModuleType:
    path = path.resolve()
    name = _USER + "".join(c if c.isalnum() else "_" for c in str(path))
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise OSError(f"no such file: {path}{near(path.name, beside)}")
    if path.suffix != ".py":
        raise OSError(f"{path} is not a Python file; expected a name that ends in .py")
    loader = importlib.util.spec_from_file_location(name, path)
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    sys.modules[name] = module
    _find_here()
    try:
        loader.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ImportError):
            error.msg = f"{error}{_advice(error, path.parent)}"
        raise
    return module


def _advice(error: ImportError, folder: Path) -> str:
    """How a file in the folder finds the modules beside it, where it does not; else nothing."""
    if "relative import" in str(error):
        return f"; name the file by its module ('package.module:name'), or import by name with PYTHONPATH={folder}"
    beside = folder / (error.name or "").partition(".")[0]
    there = error.name and (beside.is_dir() or beside.with_suffix(".py").is_file())
    return (
        f"; it is in {folder}: add this folder to PYTHONPATH" if there and str(folder) not in sys.path else ""
    )


def lines(package: str, name: str) -> tuple[dict[str, str], ...]:
    """The lines of a tab-separated file of ours by column. Empty lines and those that begin with `#` are left out."""
    text = files(package).joinpath(name).read_text(encoding="utf-8")
    told = (line for line in text.splitlines() if line and not line.startswith("#"))
    return tuple(csv.DictReader(told, delimiter="\t", quoting=csv.QUOTE_NONE))
