"""Trinity-RFT's `stages`: each is a file of its own, the global one with the stage's keys put over it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from whet.config.engines import ONE_FOR_ALL
from whet.config.faults import shown
from whet.config.keys import dotted
from whet.config.sections.rollout import RolloutConfig
from whet.config.tree import STAGE_SECTIONS, get, leaves, merge
from whet.dialects.match import read
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.tables import Dialect, dialect
from whet.dialects.translate import Translation, translate
from whet.dialects.trinity.values import PRESETS
from whet.dialects.versions import VERSION
from whet.types import ConfigError, Json

DEFAULT_ALGORITHM = "ppo"


def stages(values: Values) -> Mapping[str, Json]:
    """Every stage's own native sections. A key that a stage leaves out is the global one's, as the document says;
    Trinity's code replaces whole sections."""
    given = [stage for stage in values["stages"] or [] if isinstance(stage, dict)]
    if not given:
        return {}
    of = dialect("trinity", values.get(VERSION, ""))
    whole = whole_file(values, of)
    alone = translate(whole, of, origins={})
    told = _told(values, alone, of)
    is_whole = told.isdisjoint(text for _, text in alone.problems)
    problems: list[str] = []
    unbuilt: list[str] = []
    trees: list[dict[str, Json]] = []
    engine: dict[str, Json] | None = None
    leaves = tuple(f"{row.key}." for row in of.rows)
    for n, stage in enumerate(given):
        file = inherited(whole, stage)
        done = translate(file, of, origins={})
        # the reading of the whole file tells unknown keys, but for those below a key that has a value
        new = [text for _, text in done.problems if text not in told]
        said = [text for text in new if "unknown key" not in text or text.startswith(leaves)]
        said += [] if stage.get("stage_name") else ["stage_name: must be given."]
        trees.append(done.tree)
        own = _engine(file, done.tree)
        engine = own if engine is None else engine
        said += _own_way(alone.tree, done.tree, _fed(stage, of)) if is_whole else []
        keys = {dotted(found.path) for found in read(stage, of)}
        problems += [_in_stage(n, text, keys) for text in said]
        unbuilt += [_in_stage(n, text, keys) for _, text in done.unbuilt if text not in told]
        unbuilt += [f"stages[{n}]: {text}" for text in _another(engine, own)]
    if problems:
        raise ConfigError("; ".join(problems + unbuilt))
    if unbuilt:
        raise NotSupportedYet("; ".join(unbuilt))
    out: dict[str, Json] = {f"rollout.{key}": value for key, value in (engine or {}).items()}
    for n, (stage, tree) in enumerate(zip(given, trees)):
        out[f"stages.{n}.name"] = stage["stage_name"]
        out |= {f"stages.{n}.{key}": value for key, value in tree.items() if key in STAGE_SECTIONS}
    return out


def _engine(file: Mapping[str, Json], tree: dict[str, Json]) -> dict[str, Json] | None:
    """What a stage says of the engine, which serves the whole run, taken out of its tree; None where nothing is
    sampled."""
    own = {key: value for key in ONE_FOR_ALL if (value := tree.get("rollout", {}).pop(key, None)) is not None}
    section = file.get("algorithm") or {}
    kind = section.get("algorithm_type", DEFAULT_ALGORITHM) if isinstance(section, dict) else None
    # what is no name of an algorithm, the translation has refused
    preset = PRESETS.get(kind) if isinstance(kind, str) else None
    return own if preset is not None and preset.kind == "online" else None


def _another(engine: Mapping[str, Json] | None, own: Mapping[str, Json] | None) -> list[str]:
    """What a stage asks for that the engine of the stages before does not have. The embedded engine has no servers."""
    if engine is None or own is None:
        return []
    default = RolloutConfig().model_dump(mode="json")
    asked = {key: (own.get(key, default[key]), engine.get(key, default[key])) for key in ONE_FOR_ALL}
    return [
        f"it asks for rollout.{key}={shown(mine)}, a stage before for {shown(theirs)}; engines that change between "
        "stages are coming, not built yet."
        for key, (mine, theirs) in asked.items()
        if mine != theirs and (key != "server" or "engine" in own)
    ]


def _in_stage(n: int, text: str, keys: Collection[str]) -> str:
    """What is said of a stage's file. keys: those that the stage gives itself, whose place is in the stage."""
    return f"stages[{n}]{'.' if text.partition(':')[0] in keys else ': '}{text}"


def _fed(stage: Mapping[str, Json], of: Dialect) -> set[str]:
    """The native keys that the keys of a stage feed."""
    return {native for found in read(stage, of) if found.row is not None for native in found.row.native}


def _own_way(alone: Mapping[str, Json], tree: Mapping[str, Json], fed: set[str]) -> list[str]:
    """What a stage asks for that is one for all; also where it asks for what is the default here."""
    shared, base = ({k: v for k, v in one.items() if k not in STAGE_SECTIONS} for one in (tree, dict(alone)))
    gone = {dotted(path) for path, _ in leaves(base) if get(shared, path) is None}
    unset = sorted(key for key in gone if any(f"{key}.".startswith(f"{native}.") for native in fed))
    return [
        f"it asks for {dotted(path)}={shown(value)}, which is one for all stages."
        for path, value in leaves(shared)
        if get(base, path) != value
    ] + [f"it asks for the default of {key}, which is one for all stages." for key in unset]


def inherited(whole: Mapping[str, Json], stage: Mapping[str, Json]) -> dict[str, Json]:
    """The file of one stage. One with another algorithm_type inherits the optimizer, not the other's functions."""
    own = {key: value for key, value in stage.items() if key != "stage_name" and value is not None}
    before = dict(whole.get("algorithm") or {})
    kind = (own.get("algorithm") or {}).get("algorithm_type")
    if kind not in (None, before.get("algorithm_type", DEFAULT_ALGORITHM)):
        before = {key: value for key, value in before.items() if key == "optimizer"}
    merged: dict[str, Json] = merge({**whole, "algorithm": before}, own)
    return merged


def whole_file(values: Values, of: Dialect) -> dict[str, Json]:
    """The global file again, as a tree of all that is not its default."""
    out: dict[str, Json] = {}
    for row in of.rows:
        if row.key in values and values[row.key] != row.default and not row.key.startswith("stages"):
            *above, last = row.key.split(".")
            inner: Json = values[row.key] if last == "*" else {last: values[row.key]}
            for part in reversed(above):
                inner = {part: inner}
            out = merge(out, inner)
    return out


def _told(values: Values, alone: Translation, of: Dialect) -> set[str]:
    """What is wrong with the global file by itself: the stages need not say it again."""
    found = {text for _, text in (*alone.problems, *alone.unbuilt)}
    rows = {text: of.row(text.partition(":")[0]) for text in found}
    said = {text for text, row in rows.items() if row is None or row.function not in of.of_stages}
    for function in of.by_function.keys() - of.of_stages - {"stages.stages"}:
        try:
            of.functions(function)(values)
        except ConfigError as e:  # it may name a key of a function that is asked for each stage
            said.add(str(e))
    return said & found
