"""What of a config must not be written down: by the names of its keys, in its URLs, and where it comes from.

A secret is best left out of the config: `${oc.env:NAME}` stays as it is in config.yaml, so that file can be used again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from whet import secrets
from whet.config.keys import TABLES, Path, dotted
from whet.config.schema import Config
from whet.config.tree import get, leaves, with_values
from whet.secrets import MASK as MASK
from whet.secrets import is_secret as is_secret
from whet.types import Json

DIGEST = "sha256:"
"""Stands before the digest of a variable that may be one: another value is another config."""

_FREE = ("arguments", "params", "reward_kwargs", "monitor_args")
"""Sections of any keys, which mean what the function makes of them."""
_OF_SERVERS = (("server", "env"), ("server", "options"))
"""Sections of any keys, which mean what an inference server makes of them."""
_SECRET = (("server", "token"),)
"""Keys that hold nothing else."""
_DATA = ("rows",)
"""What is trained on is no setting."""
_REWARDS_ENV = ("reward_workers", "env")
ENVIRONMENTS = (_REWARDS_ENV, ("mcp", "env"))
"""Sections of environment variables of foreign code."""
_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*'?([^,}']+)")


@dataclass
class _Hidden:
    """A walk through a config that takes note of what it hides."""

    variables: str | None = None
    """What to put in the place of variables of reward processes whose names tell nothing. None: they stay."""
    found: list[tuple[Path, str]] = field(default_factory=list)
    """(path, secret)"""

    def of(
        self, value: Json, path: Path = (), *, name: str = "", free: bool = False, sure: bool = False
    ) -> Json:
        """The same, hidden. name: of the key it is below. free: it is below a section of any keys. sure: it is below a
        name that means a secret."""
        if isinstance(value, dict):
            if _end(path) in ENVIRONMENTS:
                return {k: self.variable(v, (*path, k), str(k)) for k, v in value.items()}
            free = free or _of_a_function(path, value)
            told = _named_beside(value) if free else ""
            return {
                k: v if k in _DATA else self.of(v, (*path, k), name=told if told and k == "value" else str(k),
                    free=free or k in _FREE or _end((*path, k)) in _OF_SERVERS,
                    sure=sure or (free and secrets.is_sure(str(k))))
                for k, v in value.items()
            }  # fmt: skip
        if isinstance(value, list | tuple):
            names = _named_by_the_one_before(value) if free else [""] * len(value)
            return [
                self.of(v, (*path, n), name=told or name, free=free, sure=sure)
                for n, (v, told) in enumerate(zip(value, names))
            ]
        if free and isinstance(value, int | float) and not isinstance(value, bool) and sure:
            return self.hide(path, str(value))
        if not isinstance(value, str) or not value:
            return value
        named = free and (secrets.may_be_masked(name) if value == MASK else secrets.holds_secret(name, value))
        if (sure and not secrets.is_none(value)) or named or _end(path) in _SECRET:
            return self.hide(path, value)
        self.found += [(path, value[start:end]) for start, end in secrets.parts(value, words=free)]
        return secrets.without(value, MASK, words=free)

    def variable(self, value: Json, path: Path, name: str) -> Json:
        """Of the reward processes. All of them may be secrets. One that is no text is refused, and shown with that."""
        if secrets.is_secret(name) or (value == MASK and secrets.may_be_masked(name)):
            if isinstance(value, dict):
                return {k: self.variable(v, (*path, k), name) for k, v in value.items()}
            if isinstance(value, list | tuple):
                return [self.variable(v, (*path, n), name) for n, v in enumerate(value)]
            return value if value is None or isinstance(value, bool) else self.hide(path, str(value))
        if not isinstance(value, str):
            return value
        self.found.append((path, value))
        if self.variables is None or not secrets.may_be_secret(value) or value.startswith(DIGEST):
            return secrets.without(value, MASK)
        digest = hashlib.sha256(f"whet reward_workers.env {name}={value}".encode()).hexdigest()
        return self.variables.format(digest=digest)

    def hide(self, path: Path, value: str) -> str:
        self.found.append((path, value))
        return MASK


def _of_a_function(path: Path, value: dict[str, Json]) -> bool:
    """Whether these are settings of a user's function: a table with the name of one, where a config takes such."""
    names = tuple(name for name in path if isinstance(name, str) and name != "stages")
    return names in TABLES and ":" in str(value.get("name", ""))


def _named_beside(value: dict[str, Json]) -> str:
    """The name of the value in {name: api_key, value: ...}; empty where it has none."""
    if not isinstance(value.get("value"), str):
        return ""
    return next((str(value[key]) for key in ("name", "key", "header") if isinstance(value.get(key), str)), "")


def _named_by_the_one_before(values: Sequence[Json]) -> list[str]:
    """The name of each value of a list, from the one before it: an option of a command, or the first of a pair."""
    names = [""] * len(values)
    for n, (name, value) in enumerate(pairwise(values), start=1):
        if not isinstance(name, str) or not isinstance(value, str) or "=" in name:
            continue
        is_pair = (
            len(values) == 2 and secrets.is_sure(name) and (value == MASK or any(map(str.isdigit, value)))
        )
        if name.startswith("-") or is_pair:
            names[n] = name.lstrip("-")
    return names


def _end(path: Path) -> Path:
    """The last two names of a path, whatever lists there are between them."""
    return tuple(name for name in path if isinstance(name, str))[-2:]


def masked_url(url: str) -> str:
    """The same with its passwords struck out, be they before the host or parameters."""
    return secrets.without(url, MASK)


def learn(tree: Json, *, everywhere: bool = False) -> None:
    """Let this process know the secrets of a config, given as plain values. everywhere: it may be another system's."""
    walk = _Hidden()
    walk.of(tree, free=everywhere)
    for path, value in walk.found:
        if value == MASK:
            continue
        if _end(path[:-1]) in ENVIRONMENTS and not secrets.is_secret(str(path[-1])):
            secrets.guess(dotted(path), value)
        else:
            secrets.learn(dotted(path), value)


def learn_references(written: Json, resolved: Json) -> None:
    """The same of what was taken from variables with the name of a secret, whatever key it stands at."""
    for path, text in leaves(written):
        named = _FROM_ENVIRONMENT.findall(text) if isinstance(text, str) else []
        value = get(resolved, path)
        if isinstance(value, str) and any(map(secrets.is_secret, named)):
            secrets.learn(dotted(path), value)


def dump(cfg: Config) -> dict[str, Json]:
    """A config as plain values that may be written down. A changed secret changes nothing in it, another variable of
    the reward processes does."""
    return hidden(cfg.model_dump(mode="json"))


def hidden(tree: dict[str, Json]) -> dict[str, Json]:
    """Plain values of a config without its secrets. What is hidden already stays so."""
    found: dict[str, Json] = _Hidden(variables=DIGEST + "{digest:.16}").of(tree)
    return found


def for_people(cfg: Config, written: Mapping[str, Json]) -> Json:
    """The same for config.yaml: a secret that was given by reference stays that, what else is known is struck out."""
    walk, tree = _Hidden(variables=MASK), cfg.model_dump(mode="json", exclude_unset=True)
    return _referring(secrets.redact_tree(walk.of(tree)), tree, written)


def _referring(shown: Json, tree: Json, written: Json) -> Json:
    """With references as they were written, where something is hidden."""
    if isinstance(shown, dict) and isinstance(written, dict):
        return {k: _referring(v, get(tree, (k,)), written.get(k)) for k, v in shown.items()}
    if isinstance(shown, list) and isinstance(written, list):
        return [_referring(v, t, w) for v, t, w in zip(shown, tree, written, strict=True)]
    is_reference = isinstance(written, str) and _FROM_ENVIRONMENT.search(written) is not None
    return written if is_reference and shown != tree else shown


def left_out(cfg: Config) -> list[str]:
    """Keys at which there is no secret but what stands for one in a run's config.yaml."""
    walk = _Hidden()
    tree = cfg.model_dump(mode="json", exclude_unset=True)
    walk.of(tree)
    struck = [path for path, value in leaves(tree) if isinstance(value, str) and "<redacted:" in value]
    masked = [
        p for p, value in walk.found if value == MASK and p[:1] != ("buffer",) and p[-3:-1] != _REWARDS_ENV
    ]
    return [dotted(path) for path in dict.fromkeys([*masked, *struck])]


def by_environment(tree: dict[str, Json]) -> tuple[dict[str, Json], dict[str, str]]:
    """A config whose secrets are references to variables, and these: what may go into a file for another process."""
    walk = _Hidden()
    walk.of(tree)
    quoted = [
        path for path, value in leaves(tree) if isinstance(value, str) and secrets.redact(value) != value
    ]
    paths = dict.fromkeys([*(path for path, _ in walk.found), *quoted])
    names = {path: f"WHET_SECRET_{number}" for number, path in enumerate(paths)}
    shown = with_values(tree, {path: f"${{oc.env:{name}}}" for path, name in names.items()})
    return shown, {name: str(get(tree, path)) for path, name in names.items()}
