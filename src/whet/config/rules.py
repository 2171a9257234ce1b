"""The table of rules over keys, and what it says of one stage's config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whet.config.conditions import Condition, Rule, met, no, subjects
from whet.config.facts import named
from whet.config.recipes import Resolved, unread_settings
from whet.config.refusal_rules import REFUSED
from whet.config.schema import Config
from whet.config.unused_rules import UNUSED

RULES: tuple[Rule, ...] = (*UNUSED, *REFUSED)


def unused(cfg: Config, algorithm: Resolved) -> Iterator[tuple[str, str, bool]]:
    """(key or section, with * for any name or number; why nothing reads it; whether its default passes) in a stage."""
    yield from ((key, why, False) for key, why in unread_settings(cfg.algorithm))
    known = named(cfg, algorithm)
    for rule in UNUSED:
        if met(rule.when, cfg, known):
            message = _filled(rule, cfg, known)
            yield from ((key, message, rule.default_passes) for key in rule.keys)


def refused(cfg: Config, algorithm: Resolved | None) -> Iterator[tuple[str, str]]:
    """(key, what does not go with it) in a stage. Without an algorithm, rules that look at it are left out."""
    known = named(cfg, algorithm) if algorithm is not None else {}
    for rule in REFUSED:
        unknown = algorithm is None and any(kind == "condition" for kind, _ in subjects(rule.when))
        if not unknown and met(rule.when, cfg, known):
            yield rule.keys[0], _filled(rule, cfg, known)


def _filled(rule: Rule, cfg: Config, known: Mapping[str, Any]) -> str:
    return rule.message.format_map({"cfg": cfg, **known})


def visible_when(path: Sequence[str]) -> Condition | None:
    """When something reads a key: all rules on it and on the sections around it. None: always."""
    above = {".".join(path[:n]) for n in range(1, len(path) + 1)}
    found = [no(rule.when) for rule in UNUSED if above & set(rule.keys)]
    return None if not found else found[0] if len(found) == 1 else {"all": found}
