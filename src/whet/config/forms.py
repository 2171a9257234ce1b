"""The schema of a config as JSON schema (draft 2020-12), with all that a form needs beside types: `whet schema`.

Every section stands where it is used, without references, because the same section is read under other conditions in
another place. Added to each key: `title`; `x-unit`; `x-level` (beginner, expert); `x-visible-when`, the condition
under which something reads it (`conditions` says how to read one); `x-choices` for open names; `x-short`, the key
whose value a text in place of a section is. Added to the whole: `x-conditions`, what the named conditions mean;
`x-constraints`, rules over several keys with the error's text: the condition that is refused, or overrides that break
the rule; `x-notes`, conditions that are allowed and have a consequence.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from whet.config import engines, functions, hints, trackers
from whet.config.conditions import subjects
from whet.config.constraints import CONSTRAINTS, Constraint, error
from whet.config.engines import EngineRow
from whet.config.facts import NAMED
from whet.config.keys import TABLES, Key, keys, lookup
from whet.config.keys import settings as keys_of_settings
from whet.config.recipes import RECIPES
from whet.config.resuming import RESUME
from whet.config.rules import NOTED, REFUSED, RULES, Rule, visible_when
from whet.config.schema import Config, Section
from whet.config.shorthand import SOURCES, short_for
from whet.config.trackers import TrackerRow
from whet.config.tree import STAGE_SECTIONS
from whet.types import Json

Node = dict[str, Any]
Path = tuple[str, ...]

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> Node:
    """The whole schema."""
    raw = Config.model_json_schema()
    out = _written(raw, (), raw["$defs"])
    return {
        "$schema": DRAFT,
        **out,
        "title": "whet",
        "x-conditions": {name: {"meaning": meaning} for name, meaning in _conditions().items()},
        "x-constraints": [
            *(_judged(rule, "refused-when", "error") for rule in REFUSED),
            *map(_constraint, CONSTRAINTS),
        ],
        "x-notes": [_judged(rule, "noted-when", "note") for rule in NOTED],
    }


def _conditions() -> dict[str, str]:
    """What every named condition means: those of `NAMED`, and settings of an advantage or a loss that rules look at."""
    read = {name for rule in RULES for kind, name in subjects(rule.when) if kind == "condition"}
    settings = {name: name.rpartition(".") for name in sorted(read - NAMED.keys())}
    return {
        **{name: meaning for name, (meaning, _) in NAMED.items()},
        **{
            name: f"Setting {setting} of algorithm.{part}, given or not; null where {part} has no such setting."
            for name, (part, _, setting) in settings.items()
        },
    }


def _judged(rule: Rule, when: str, text: str) -> Node:
    """A rule that a form can judge itself. In its text `{key}` and `{condition}` stand for values."""
    looked_at = dict.fromkeys(name for kind, name in subjects(rule.when) if kind == "key")
    return {
        "keys": list(dict.fromkeys([*rule.keys, *looked_at])),
        when: rule.when,
        text: rule.message.replace("{cfg.", "{"),
    }


def _constraint(rule: Constraint) -> Node:
    return {"keys": list(rule.keys), "broken-by": list(rule.broken), "error": error(rule)}


def _written(node: Mapping[str, Any], path: Path, defs: Mapping[str, Any]) -> Node:
    """A node of pydantic's schema with its references written out and every key inside it described."""
    if "$ref" in node:
        named = defs[node["$ref"].rpartition("/")[2]]
        return _written({**named, **{k: v for k, v in node.items() if k != "$ref"}}, path, defs)
    out = dict(node)
    out.pop("$defs", None)
    for several in ("anyOf", "oneOf"):
        if several in node:
            out[several] = [_written(part, path, defs) for part in node[several]]
    if "properties" in node:
        out["properties"] = {
            name: _shortened(
                _described(_written(inner, (*path, name), defs), keys()[(*path, name)]), (*path, name)
            )
            | _chosen_from(".".join((*path, name)))
            for name, inner in node["properties"].items()
        }
    if "propertyNames" in node:  # a table with fixed names is shown as a section
        entry, names = out["additionalProperties"], out.pop("propertyNames")["enum"]
        given = [key for name in names if (key := lookup((*path, name)))]
        out["properties"] = {key.path[-1]: _described(entry, replace(key, required=True)) for key in given}
        out["additionalProperties"] = False
    for entries in ("items", "additionalProperties"):
        if isinstance(out.get(entries), dict):
            inner = (*path, "*") if (*path, "*") in keys() else path
            out[entries] = _shortened(_written(node[entries], inner, defs), inner)
    return out


def _shortened(node: Node, path: Path) -> Node:
    """A node with the short forms that the loader takes (`shorthand`): a text in place of a section, with `x-short`,
    the key whose value it is; one source in place of a list of them."""
    path = path[2:] if path[:2] == ("stages", "*") else path
    if path in SOURCES:
        whole = {k: v for k, v in node.items() if k not in ("type", "items")}
        return {**whole, "anyOf": [{"type": "array", "items": node["items"]}, node["items"]]}
    short = short_for(path)
    return node if short is None else {**node, "type": ["object", "string"], "x-short": short}


def _described(node: Node, key: Key) -> Node:
    """A key's node with what a form needs."""
    name = ".".join(key.path)
    out = {**node, "title": hints.title(key.path[-1]), "description": " ".join(key.description.split())}
    if not key.required and (key.section is None or key.default in (None, (), {})):
        out["default"] = json.loads(json.dumps(key.default))
    extra = {
        "x-unit": hints.unit(name),
        "x-visible-when": visible_when(key.path),
        "x-section": key.path[-1]
        if key.path[:2] == ("stages", "*") and key.path[-1] in STAGE_SECTIONS
        else None,
    }
    out |= {label: value for label, value in extra.items() if value is not None}
    return out | ({} if key.section else {"x-level": hints.level(name)})


def _chosen_from(name: str) -> Node:
    """The names that an open key knows."""
    known = _choices().get(name)
    return {"x-choices": known, "examples": [choice["name"] for choice in known]} if known else {}


# ---------------------------------------------------------------- open names


_SET = ("kind", "advantage", "loss", "loss_agg_mode", "expert_loss", "whiten", "dynamic_sampling")
"""Fields of a recipe beside its settings."""


def _recipes() -> list[Json]:
    """What algorithm.name may be, and what each sets: enough to know every named condition's value."""
    return [
        {
            "name": name,
            "about": row.note,
            "source": row.source,
            "sets": {
                **{key: getattr(row, key) for key in _SET},
                **row.settings,
            },
        }
        for name, row in RECIPES.items()
    ]


def _settings(section: type[Section], at: Path) -> Json:
    """The settings of a function, described as keys are."""
    made = section.model_json_schema().get("properties", {})
    return {
        name: _described(
            node,
            replace(
                keys_of_settings()[(*at, name)],
                default=section.model_fields[name].default,
            ),
        )
        for name, node in made.items()
    }


def _functions(at: Path, table: Mapping[str, functions.Function]) -> list[Json]:
    return [
        {
            "name": name,
            "about": row.about,
            "settings": _settings(row.settings, at),
            "needs": sorted(row.needs),
        }
        for name, row in table.items()
    ]


def _abouts(table: Mapping[str, functions.Function | EngineRow | TrackerRow]) -> dict[str, str]:
    return {name: row.about for name, row in table.items()}


OPEN_NAMES: Mapping[str, Mapping[str, str]] = {
    "rewards.*.function": _abouts(functions.REWARDS),
    "rollout.engine": _abouts(engines.ENGINES),
    "train.engine": engines.TRAIN_ENGINES,
    "track.trackers": _abouts(trackers.TRACKERS),
    "checkpoint.resume": RESUME,
}
"""Keys that know names without being limited to them, and what each name is."""


@functools.cache
def _choices() -> dict[str, list[Json]]:
    """The names that each open key knows."""
    return {
        "algorithm.name": _recipes(),
        **{".".join(map(str, at)): _functions(tuple(map(str, at)), table) for at, table in TABLES.items()},
        **{
            key: [{"name": name, "about": about} for name, about in known.items()]
            for key, known in OPEN_NAMES.items()
        },
    }
