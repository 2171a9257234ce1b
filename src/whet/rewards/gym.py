"""The verifiers of reasoning-gym. Imported only where rewards run.

A row names its verifier, and some verifiers evaluate their input as code: the reply, or the row. So only verifiers that
the config lists may score, and only those whose source was reviewed (`gym_read`) are assumed to evaluate nothing.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import reasoning_gym as gym
from reasoning_gym.factory import DATASETS

from whet.rewards.builtin import Verdict, compiled, verdict
from whet.rewards.gym_read import READ
from whet.tables import near
from whet.types import ConfigError, Json, Task

_PACKAGE = "reasoning_gym"
_NO_PART = ("coaching", "data", "version_manager")
"""Parts of it that verifiers import but do not score with: curricula, and what tasks are made of."""


def reasoning_gym(
    response: str,
    task: Task,
    *,
    verifiers: Sequence[str] | str = (),
    exact: bool = True,
    pattern: str | None = None,
) -> Verdict:
    """The score that the task's own verifier gives the reply; the task's row is `task.extra["entry"]`.

    `verifiers`: names of the reasoning-gym datasets whose verifiers may score; a task with another verifier has no
    score. Default: those of the config's own reasoning-gym sources. `exact`: a score of exactly 1 counts as 1, all else
    as 0, because some verifiers pay nearly 1 for wrong replies (spell_backward: the right letters with more behind
    them). `pattern`: a regular expression whose first group, at its last match, is the answer; without a match the
    reply holds none. Default: the whole reply.
    """
    entry = task.extra.get("entry")
    if not isinstance(entry, dict):
        raise ValueError(
            f"task {task.uid} of {task.source!r} is not from reasoning-gym: it has no extra['entry']"
        )
    name = entry["metadata"]["source_dataset"]
    if name not in _named(verifiers):
        raise ValueError(
            f"task {task.uid} of {task.source!r} requests the verifier {str(name)[:60]!r}, but the config allows "
            f"{', '.join(_named(verifiers))}; to allow it, list it in the reward's `arguments`, verifiers"
        )
    found = [response] if pattern is None else [m.group(1) for m in re.finditer(pattern, response, re.DOTALL)]
    answer = found[-1].strip() if found else None
    score = verifier(name)(answer, entry)
    return {**verdict(score == 1.0, answer), **({} if exact else {"score": float(score)})}


def check_pattern(arguments: Mapping[str, Json]) -> None:
    """ConfigError for a `pattern` that is no regular expression, or has no group for the answer."""
    pattern = arguments.get("pattern")
    if pattern is not None and not compiled("pattern", pattern).groups:
        raise ConfigError(f"pattern={pattern!r} has no group; put the answer into parentheses")


def _named(verifiers: Sequence[str] | str) -> tuple[str, ...]:
    return (verifiers,) if isinstance(verifiers, str) else tuple(verifiers)


@cache
def verifier(name: str) -> Callable[[str | None, dict[str, Any]], float]:
    """That of a dataset of reasoning-gym, by its name."""
    return gym.get_score_answer_fn(name)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- what was read


def unread(arguments: Mapping[str, Json]) -> str:
    """Which of the verifiers may run code that they find in text, in words; '' if none. ConfigError on unknown ones."""
    names = _named(arguments.get("verifiers", ()))
    if not names:
        raise ConfigError(
            "the config must list the allowed verifiers, because no data source is made by reasoning-gym; list "
            "them, as in `arguments: {verifiers: [spell_backward]}`"
        )
    for name in names:
        if name not in DATASETS or name == "composite":
            raise ConfigError(
                f"verifiers: {name!r} is not a verifier of reasoning-gym{near(name, DATASETS)}; for a composite, "
                "list the verifiers of its datasets"
            )
    strangers = [name for name in names if name not in READ or digest(name) != READ[name]]
    if not strangers:
        return ""
    return (
        f"{', '.join(strangers)} of reasoning-gym {version('reasoning-gym')} may evaluate text as code: "
        "they were not reviewed in this version"
    )


@cache
def digest(name: str) -> str:
    """Of the source that a verifier consists of: the files of its class, of its bases, and what they import."""
    found: dict[str, bytes] = {}
    todo = [base.__module__ for base in DATASETS[name][0].__mro__]
    while todo:
        module = todo.pop()
        file = _file(module)
        if file is not None and module not in found:
            found[module] = file.read_bytes()
            if file.name != "__init__.py":  # a folder's own file imports all that is in it
                todo += _imported(module, file)
    text = b"".join(b"%s\n%s\n" % (module.encode(), found[module]) for module in sorted(found))
    return hashlib.sha256(text).hexdigest()[:16]


def _file(module: str) -> Path | None:
    """Source of a module that may score; None for other modules, and for a name that is not a module."""
    package, _, place = module.partition(".")
    if package != _PACKAGE or not place or place.partition(".")[0] in _NO_PART:
        return None
    at = Path(gym.__file__).parent.joinpath(*place.split("."))
    return next((file for file in (at.with_suffix(".py"), at / "__init__.py") if file.is_file()), None)


@cache
def _imported(module: str, file: Path) -> tuple[str, ...]:
    """Modules that it names, wherever in its text, and what may be modules."""
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name(
                "." * node.level + (node.module or ""), module.rpartition(".")[0]
            )
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(found)
