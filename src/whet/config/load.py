"""A config file -> `Config`: YAML or TOML, overrides, `${...}`, stages; every problem at once, each with its line.

Later wins: the schema's defaults, the file, `values` from Python, overrides `key.path=value`. Dicts are merged, lists
are replaced. `${...}` (OmegaConf: `${train.steps}`, `${oc.env:VAR,default}`) is resolved once, in the config as
written, defaults included; then each stage is put over the base. A stage that names another recipe
(`algorithm.name`) starts from that recipe alone: the base's other algorithm keys belong to the base's recipe.
Relative paths in a config mean: relative to the directory in which the command runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from whet.config import faults
from whet.config.keys import Path, did_you_mean, dotted, lookup
from whet.config.parse import parse, plain, scalar
from whet.config.schema import Config, Stage
from whet.types import ConfigError, Json

STAGE_SECTIONS = tuple(name for name in Stage.model_fields if name != "name")


@dataclass(frozen=True)
class Loaded:
    """A valid config and where it came from."""

    config: Config
    stages: tuple[Config, ...]
    """The whole config of each stage, with `stages` empty."""
    names: tuple[str, ...]
    """Names of the stages; ('main',) if none are given."""
    file: File | None
    origins: Mapping[Path, str]

    def where(self, key: str) -> str:
        """'file.yaml:12', 'override train.steps=5', or 'default'; of the section around it if it is not given itself."""
        return origin(self.origins, _path(key, self.names)) or "default"


def load(
    path: str | File | None, overrides: Sequence[str] = (), values: Mapping[str, Any] | None = None
) -> Loaded:
    """Read, merge, resolve and validate. Raises one ConfigError that lists every problem."""
    draft = _read(File(path)) if path is not None else Draft()
    if values:
        draft.put((), plain(values), "values")
    for override in overrides:
        draft.override(override)
    for name, info in Config.model_fields.items():
        if isinstance(info.default, str) and "${" in info.default:
            draft.tree.setdefault(name, info.default)
    draft.interpolate()
    config = draft.validate()
    if draft.problems or config is None:
        raise ConfigError(faults.listing(draft.problems, str(path) if path else "the config"))
    names = tuple(stage.name for stage in config.stages) or ("main",)
    return Loaded(config, stage_configs(config), names, File(path) if path else None, draft.origins)


def stage_configs(config: Config) -> tuple[Config, ...]:
    """The whole config of each stage: the base with the stage's keys over it. One, the config itself, without stages."""
    if not config.stages:
        return (config,)
    tree = config.model_dump(mode="json", exclude_unset=True)
    return tuple(_config(stage_tree(tree, stage)) for stage in tree["stages"])


def stage_tree(base: Mapping[str, Json], stage: Mapping[str, Json]) -> dict[str, Json]:
    """Plain values of one stage's whole config."""
    out = {k: v for k, v in base.items() if k != "stages"}
    mine = stage.get("algorithm")
    default = Config.model_fields["algorithm"].get_default(call_default_factory=True).name
    if isinstance(mine, dict) and isinstance(out.get("algorithm", {}), dict):
        inherited = out.get("algorithm", {}).get("name", default)
        if mine.get("name", inherited) != inherited:
            del out["algorithm"]
    return merge(out, {k: v for k, v in stage.items() if k in STAGE_SECTIONS})


def merge(base: Json, over: Json) -> Json:
    """Dicts merged key by key, all else replaced."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return {**base, **{k: merge(base[k], v) if k in base else v for k, v in over.items()}}


def leaves(tree: Json, path: Path = ()) -> Iterator[tuple[Path, Json]]:
    """Every value that is not a filled dict or list, with its path."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    if not items or not tree:
        yield path, tree
    for key, value in items:
        yield from leaves(value, (*path, key))


def origin(origins: Mapping[Path, str], path: Path) -> str:
    """Where a value or the nearest section around it was given; a stage's falls back to the base's. '' if nowhere."""
    for n in range(len(path), 0, -1):
        if path[:n] in origins and not (path[0] == "stages" and n <= 2 < len(path)):
            return origins[path[:n]]
    return origin(origins, path[2:]) if len(path) > 2 and path[0] == "stages" else ""


# ---------------------------------------------------------------- the way from text to Config


def _read(file: File) -> Draft:
    if file.suffix not in (".yaml", ".yml", ".json", ".toml"):
        raise ConfigError(f"{file}: a config is a .yaml, .yml, .json or .toml file.")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file}: cannot read the config: {e}.") from e
    parsed = parse(text, toml=file.suffix == ".toml")
    draft = Draft(problems=[f"{file}:{line}: {said}" for line, said in parsed.problems])
    if parsed.tree is None and parsed.problems:
        raise ConfigError(faults.listing(draft.problems, str(file)))
    if not isinstance(parsed.tree, dict):
        raise ConfigError(f"{file}: a config is a mapping of keys, not {faults.shown(parsed.tree)}.")
    draft.tree = parsed.tree
    draft.origins = {at: f"{file}:{line}" for at, line in parsed.lines.items() if at}
    return draft


def _config(tree: Mapping[str, Json]) -> Config:
    try:
        return Config.model_validate_json(json.dumps(tree))
    except ValidationError as e:
        found = faults.faults(tree, e, lambda at: "")
        raise ConfigError(faults.listing([f.text for f in found], "the config")) from e


@dataclass
class Draft:
    """A config on its way: plain values, where each was given, and the problems so far."""

    tree: dict[str, Json] = field(default_factory=dict)
    origins: dict[Path, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    broken: set[Path] = field(default_factory=set)
    """Paths that already have a problem."""

    def put(self, path: Path, value: Json, source: str) -> None:
        """Merge a value in at a path whose sections exist."""
        if path:
            parent = self.tree
            for part in path[:-1]:
                parent = parent[part]  # type: ignore[index]
            old = parent[path[-1]] if isinstance(parent, list) else parent.get(path[-1])  # type: ignore[call-overload]
            parent[path[-1]] = merge(old, value)  # type: ignore[index]
        else:
            self.tree = merge(self.tree, value)
        for at, _ in leaves(value, path):
            for n in range(len(path) or 1, len(at) + 1):
                if n == len(at) or at[:n] not in self.origins:
                    self.origins[at[:n]] = source

    def override(self, text: str) -> None:
        """Apply `key.path=value`; the value is YAML."""
        source = f"override {text}"
        key, equals, value = text.partition("=")
        if not equals or not key.strip() or key.strip()[0] in "+~-":
            self.problems.append(f"{source}: expected key.path=value, without +, ~ or --")
            return
        parsed = parse(value)
        if parsed.problems:
            self.problems += [f"{source}: {said}" for _, said in parsed.problems]
            return
        names = [s.get("name", "") for s in self.tree.get("stages") or () if isinstance(s, dict)]
        path = _path(key.strip(), names)
        said = self._open(path) or self._shadowed(path)
        if said:
            self.problems.append(f"{source}: {said}")
            return
        self.put(path, None if value.strip() == "" else parsed.tree, source)

    def _open(self, path: Path) -> str:
        """Make the sections on the way to a path; what is wrong with it, or ''."""
        if path[0] == "stages" and len(path) > 1 and not isinstance(path[1], int):
            names = [s["name"] for s in self.tree.get("stages") or () if isinstance(s, dict) and "name" in s]
            return f"there is no stage {path[1]!r}; stages: {', '.join(names) or 'none'}"
        node: Json = self.tree
        for n, part in enumerate(path):
            if isinstance(node, list) and not (isinstance(part, int) and part < len(node)):
                return f"{dotted(path[:n])} has {len(node)} entries, numbered from 0; {part} is not one of them"
            if not isinstance(node, dict | list):
                return f"{dotted(path[:n])} is {faults.shown(node)}, not a section"
            if n == len(path) - 1:
                return ""
            if isinstance(node, dict) and node.get(str(part)) is None:
                if lookup(path[: n + 1]) is None:
                    return f"{dotted(path[: n + 1])}: unknown key{did_you_mean(path[: n + 1])}"
                node[str(part)] = {}
            node = node[part] if isinstance(node, list) else node[str(part)]
        return ""

    def _shadowed(self, path: Path) -> str:
        """Words for an override of the base that every stage puts its own value over."""
        stages = self.tree.get("stages")
        if path[0] == "stages" or not isinstance(stages, list) or not stages:
            return ""
        for stage in stages:
            node: Json = stage
            for part in path:
                if not isinstance(node, dict) or part not in node:
                    return ""
                node = node[part]
        first = f"stages.{stages[0].get('name', 0)}.{'.'.join(map(str, path))}"
        return f"no effect: every stage sets its own {dotted(path)}; write for example {first}=..."

    def interpolate(self) -> None:
        """Replace `${...}` by what it stands for; the schema's defaults can be referred to."""
        if not any(isinstance(v, str) and ("${" in v or v == "???") for _, v in leaves(self.tree)):
            return
        safe = self._parseable(self.tree, ())
        defaults = Config().model_dump(mode="json")
        self.tree = self._resolved(safe, (), OmegaConf.create(merge(defaults, safe)))

    def _parseable(self, value: Json, path: Path) -> Json:
        """The tree without texts that OmegaConf cannot read; one of those would spoil the reading of all."""
        if isinstance(value, dict):
            return {k: self._parseable(v, (*path, k)) for k, v in value.items()}
        if isinstance(value, list):
            return [self._parseable(v, (*path, n)) for n, v in enumerate(value)]
        if isinstance(value, str) and "${" in value:
            try:
                OmegaConf.create({"value": value})
            except OmegaConfBaseException as e:
                self._broken(path, value, e)
                return None
        return value

    def _resolved(self, value: Json, path: Path, node: Any) -> Json:
        if isinstance(value, dict):
            return {k: self._resolved(v, (*path, k), self._get(node, k, (*path, k), v)) for k, v in value.items()}
        if isinstance(value, list):
            return [self._resolved(v, (*path, n), self._get(node, n, (*path, n), v)) for n, v in enumerate(value)]
        return node

    def _get(self, node: Any, key: str | int, path: Path, written: Json) -> Any:
        """A value with `${...}` resolved; sections that were written stay OmegaConf's, to be gone through."""
        if path in self.broken:
            return None
        try:
            value = node[key]
            if isinstance(value, DictConfig | ListConfig) and not isinstance(written, dict | list):
                return OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as e:
            self._broken(path, written, e)
            return None
        return value

    def _broken(self, path: Path, written: Json, error: Exception) -> None:
        self.broken.add(path)
        said = "must be given" if written == "???" else str(error).splitlines()[0].rstrip(".")
        hint = "; write \\${ where the text itself has ${" if "Grammar" in type(error).__name__ else ""
        self.problems.append(f"{self._where(path)}{faults.named(path, self.tree)}: {faults.shown(written)}: {said}{hint}")

    def validate(self) -> Config | None:
        """The Config, or None and the problems: of the base, then those that appear in a stage."""
        config, seen = None, set[tuple[Path, str]]()
        try:
            config = Config.model_validate_json(json.dumps(self.tree))
        except ValidationError as e:
            seen = self._note(self.tree, e, (), seen)
        stages = self.tree.get("stages")
        for n, stage in enumerate(stages if isinstance(stages, list) else ()):
            if isinstance(stage, dict):
                merged = stage_tree(self.tree, stage)
                try:
                    Config.model_validate_json(json.dumps(merged))
                except ValidationError as e:
                    self._note(merged, e, ("stages", n), seen)
        return config

    def _note(
        self, tree: Mapping[str, Json], error: ValidationError, above: Path, seen: set[tuple[Path, str]]
    ) -> set[tuple[Path, str]]:
        """Add the problems of one validation that are not in `seen`; what was found."""
        found = faults.faults(tree, error, lambda at: origin(self.origins, (*above, *at)))
        for fault in found:
            at = (*above, *fault.path)
            if (fault.path, fault.text) in seen or any(at[: len(b)] == b for b in self.broken):
                continue
            self.problems.append(f"{self._where(at)}{faults.named(at, self.tree)}: {fault.text}")
        return {(fault.path, fault.text) for fault in found}

    def _where(self, path: Path) -> str:
        at = origin(self.origins, path)
        return f"{at}: " if at else ""


def _path(key: str, stages: Sequence[str]) -> Path:
    """`data.eval.0.limit`, `data.eval[0].limit` or `stages.sft.train.steps` as a path with numbers for list indexes."""
    parts = [p for p in re.sub(r"\[(\d+)\]", r".\1", key).split(".") if p]
    path: Path = ()
    for part in parts:
        above = lookup(path) if path else None
        if path == ("stages",) and part in stages:
            path = (*path, list(stages).index(part))
        elif above is not None and lookup((*path, "0")) is not None and path[-1] != "rewards" and part.isdigit():
            path = (*path, int(str(scalar(part))))
        else:
            path = (*path, part)
    return path
