"""What the loader, the rules and the plan say of a config's text, as data that a form is drawn from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from whet.config import memory_estimate, rules, secrets
from whet.config.describe import facts
from whet.config.describe import notes as plan_notes
from whet.config.explain import explain
from whet.config.facts import named
from whet.config.faults import Refused
from whet.config.keys import Path, keys
from whet.config.load import Loaded, load
from whet.config.parse import parse
from whet.config.plan import Plan, missing, plans
from whet.config.recipes import Resolved, choices, resolve
from whet.config.schema import Config
from whet.config.tree import path_of, stage_names, stage_tree
from whet.dialects.recognise import recognise
from whet.dialects.tables import NATIVE
from whet.secrets import redact, redact_tree
from whet.types import ConfigError, Json

_HEAD = re.compile(r"(?P<key>[\w.\[\]-]+)(?: \('.*?'\)(?P<rest>[\w.\[\]-]*))?: ", re.DOTALL)
"""How the text of a problem begins: `data.train[0].path: `, `stages[1] ('rl').train.steps: `."""
_PLACE = re.compile(r".*:(\d+)(?: .*)?")


def checked(text: str, name: str) -> dict[str, Any]:
    """Everything that the page shows of a text. name: of its file, for the messages.

    tree: plain values as written, null if they cannot be read. lines: [path, line] of each key. foreign: the system
    that the text is written for, if it is another one. problems: [{path, line, text}]; the path is null where a
    problem has no key. notes: texts. stages: per stage its name, every value in effect (`resolved`), what is given for
    it (`given`: the base with the stage over it), the settings of its functions, and why keys have no effect
    (`unread`: [key, reason], * for any entry). plan: what `whet plan` prints, null while the config has problems.
    """
    parsed = parse(text)
    tree = parsed.tree if isinstance(parsed.tree, dict) else None
    out: dict[str, Any] = {
        "tree": tree,
        "lines": [[list(path), line] for path, line in parsed.lines.items() if path],
    }
    out |= {"foreign": _foreign(tree), "problems": [], "notes": [], "stages": [], "plan": None}
    try:
        loaded = load(name, dialect=NATIVE, text=text)
        out["stages"] = [_stage(loaded, n) for n in range(len(loaded.stages))]
        out["notes"] += [*loaded.notes, *missing(loaded)]
        out["run_dir"] = loaded.config.run_dir
        planned = plans(loaded, here=False)
        out["plan"] = _plan(planned)
        memory_estimate.check_memory(planned)
    except Refused as e:
        out["problems"] = [_problem(place, said, tree) for place, said in e.problems]
    except ConfigError as e:
        out["problems"] = [_problem("", str(e), tree)]
    return {**redact_tree({key: value for key, value in out.items() if key != "tree"}), "tree": tree}


def explained(key: str) -> dict[str, Any]:
    """What `whet explain KEY` prints. Raises ConfigError for an unknown key."""
    return asdict(explain(key))


def _foreign(tree: Mapping[str, Json] | None) -> str | None:
    try:
        kind = recognise(tree) if tree else NATIVE
    except ConfigError:  # no system knows more of its keys than another one
        return None
    return None if kind == NATIVE else kind


def _problem(place: str, said: str, tree: Mapping[str, Json] | None) -> dict[str, Any]:
    line = _PLACE.fullmatch(place)
    return {"path": _path(said, tree or {}), "line": int(line[1]) if line else None, "text": said}


def _path(said: str, tree: Mapping[str, Json]) -> list[str | int] | None:
    """The key that a problem begins with."""
    head = _HEAD.match(said)
    if head is None:
        return None
    path = path_of(head["key"] + (head["rest"] or ""), stage_names(tree))
    return list(path) if (path[0],) in keys() else None


# ---------------------------------------------------------------- a stage


def _stage(loaded: Loaded, n: int) -> dict[str, Any]:
    cfg, written = loaded.stages[n], dict(loaded.written)
    stages = written.get("stages")
    given = stage_tree(written, stages[n]) if isinstance(stages, list) and stages else written
    out: dict[str, Any] = {"name": loaded.names[n], "given": given, "settings": {}, "unread": []}
    out["resolved"] = secrets.hidden(cfg.model_dump(mode="json"))
    try:
        algorithm = resolve(cfg.algorithm)
    except ConfigError:  # it is among the problems of the plan
        return out
    out["unread"] = [[key, why] for key, why, _ in rules.unused(cfg, algorithm)]
    out["settings"] = {key: {"name": made.name, **made.settings} for key, made in choices(cfg).items()}
    for path, value in _follows(cfg, algorithm):
        section = out["resolved"]
        for part in path[:-1]:
            section = section[part]
        if section[path[-1]] is None:
            section[path[-1]] = value
    return out


def _follows(cfg: Config, algorithm: Resolved) -> Iterator[tuple[Path, Json]]:
    """Keys of the algorithm that follow from its recipe where they are not given."""
    for name, value in named(cfg, algorithm).items():
        if ("algorithm", name) in keys():
            yield ("algorithm", name), value


# ---------------------------------------------------------------- the plan


def _plan(planned: Sequence[Plan]) -> dict[str, Any]:
    """What `whet plan` prints: a column of facts for each stage, and the memory of its processes in bytes."""
    return {
        "stages": [
            {
                "name": plan.name,
                "facts": facts(plan),
                "limit": memory_estimate.limit(plan),
                "memory": [
                    {
                        "process": place.name,
                        "count": place.count,
                        "phases": [
                            {"name": phase.name, "total": phase.total, "parts": phase.parts}
                            for phase in place.phases
                        ],
                    }
                    for place in memory_estimate.places(plan)
                ],
            }
            for plan in planned
        ],
        "notes": [redact(note) for note in plan_notes(planned)],
    }
