"""A config file -> `Config`: YAML or TOML, overrides, `${...}`, stages; all problems in one error, with their lines.

In increasing precedence: defaults of the schema, the file, `values` from Python, overrides `key.path=value`. Dicts are
merged, lists are replaced. `${...}` (OmegaConf: `${train.steps}`, `${oc.env:VAR,default}`) is resolved once,
in the config as written, defaults included; then each stage is merged over the base. A stage with another
recipe (`algorithm.name`) starts from that recipe alone: the other algorithm keys of the base belong to its recipe.

A file of another system (`dialects`) is recognised by its keys and translated; overrides then have the style of that
system. Native keys can override it: below `whet:` in the file, or `whet.key.path=value`.
Relative paths in a config are relative to the working directory of the command.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from whet.arguments import expect_overrides
from whet.config import hardware, keys, secrets, tree
from whet.config.checks import consequences
from whet.config.checks import unused as unused_keys
from whet.config.derived import with_lr
from whet.config.draft import Draft
from whet.config.faults import Refused, faults, named, shown
from whet.config.parse import parse, plain
from whet.config.schema import Config
from whet.dialects.here import fitted
from whet.dialects.idle import at_hand, idle, noted, without
from whet.dialects.launched import launched
from whet.dialects.match import given_keys
from whet.dialects.recognise import recognise
from whet.dialects.style import overridden
from whet.dialects.tables import NATIVE, base_of, dialect, other_end, version_of
from whet.dialects.translate import Translation, translate
from whet.inputs import MOST_CONFIG_BYTES, MOST_DEPTH, read_text
from whet.secrets import learn_overrides
from whet.tables import near
from whet.types import ConfigError, Json

Unused = Literal["refuse", "warn"]
SUFFIXES = (".yaml", ".yml", ".json", ".toml")
SCRIPT = ".sh"
_ENDINGS = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"


@dataclass(frozen=True)
class Loaded:
    """A valid config and its origin."""

    config: Config
    stages: tuple[Config, ...]
    """The whole config of each stage, with `stages` empty."""
    names: tuple[str, ...]
    """Names of the stages; ('main',) if none are given."""
    file: Path | None
    origins: Mapping[keys.Path, str]
    written: Mapping[str, Json] = field(default_factory=dict)
    """Native keys as given, with references; of a translated file, the keys that are read."""
    translation: Translation | None = None
    """The translation of the keys of a foreign file."""
    notes: tuple[str, ...] = ()
    """Keys that were left out, since nothing reads them, and why; what was taken for granted in a launch script."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Digests of the user's code by file (`config.code.digests`), once a run starts."""
    day: date | None = None
    """The day on which the run began, once it starts: what chat templates are told is today."""
    tokenizer: Path | None = None
    """The file of the checkpoint with the tokenizer that the run has built; None: none was built yet."""
    given: Config | None = None
    """The config before remote paths were replaced by local copies; None: it has no remote paths."""

    @property
    def as_given(self) -> Config:
        """The config for config.yaml: with the paths as given."""
        return self.given or self.config

    def where(self, key: str) -> str:
        """'file.yaml:12', 'override train.steps=5', 'values' or ''; the place of its section if the key is not given.

        The place of a translated key includes the foreign key: 'file.yaml:12 actor_rollout_ref.actor.optim.lr'.
        """
        return tree.origin(self.origins, tree.path_of(key, self.names))


def load(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    dialect: str | None = None,
    *,
    rehearsal: bool = False,
    here: bool = True,
    unused: Unused = "refuse",
    trust_script: bool = False,
    text: str | None = None,
) -> Loaded:
    """Read, translate, merge, resolve and validate. Raises one ConfigError that lists every problem.

    dialect: what the file is written for (native, verl, skyrl, cosmos, trinity; verl@0.9 is a version); recognised if
    not given.
    here: a foreign file is fitted to this machine, its devices and packages; else it keeps its own layout and trackers,
    unless machines are said (`hardware.as_if`), which then count.
    unused: keys that nothing reads are an error of the plan ('refuse'), or left out with a note each ('warn'). Where an
    override names another algorithm, those of the file are left out in any case.
    rehearsal: engines and features that are not built yet are no problem; they stay in `translation.unbuilt`.
    trust_script: the shell of a launch script runs without a sandbox. text: what to read in place of the file.

    A launch script (.sh) is config, too: `overrides` are then its arguments, but for those that begin with `whet.`.
    """
    _check_arguments(overrides, unused)
    draft, notes, program = Draft(), tuple[str, ...](), ""
    if path is not None and Path(path).suffix == SCRIPT:
        draft, dialect, notes, program = _launched(Path(path), overrides, dialect, trust=trust_script)
        overrides = [text for text in overrides if text.startswith("whet.")]
    elif path is not None:
        draft = _read(Path(path), text)
    _check_keys(overrides)
    what = str(path or "the config")
    secrets.learn(draft.tree, everywhere=True)
    learn_overrides(overrides)
    kind = recognise(draft.tree or overridden({}, {}, overrides).tree, dialect)
    translation = None
    if kind != NATIVE:
        if path is not None and Path(path).suffix != SCRIPT:
            draft = _read(Path(path), text, foreign=True)
        draft, translation = _translated(draft, kind, overrides, dialect, here=here)
        draft.problems += () if rehearsal else translation.unbuilt
        what += f", a {kind} file"
        if draft.problems:
            draft.problems += _of_the_program(program, draft.problems)
            raise Refused(draft.problems, what)
        overrides = [text.removeprefix("whet.") for text in overrides if text.startswith("whet.")]
    else:
        draft.expand()
    if values:
        # Whatever its value: a misspelt argument of `whet.train` may be a function.
        unknown = [name for name in values if keys.lookup((name,)) is None]
        draft.problems += [("values", f"{name}: unknown key{keys.did_you_mean((name,))}") for name in unknown]
        draft.put((), plain({name: v for name, v in values.items() if name not in unknown}), "values")
    for override in overrides:
        draft.override(override)
    if translation is not None and not draft.problems:
        translation = fitted(draft, translation, layout=here or hardware.elsewhere() is not None)
    written, config = draft.tree, _finished(draft)
    if translation is not None:
        translated = translation
        written, config, unread = _left_out(
            draft, written, config, lambda found: idle(found, stage_configs(found), translated)
        )
        translation = noted(translated, unread)
    if unused == "warn" or _switches_algorithm(overrides):
        before, keep = written, unused != "warn"
        written, config, unread = _left_out(
            draft, written, config, lambda found: _idle_keys(found, draft.origins, keep_given=keep)
        )
        notes += tuple(
            f"{named(path, before)}: {why.replace('; leave it out', '')}" for path, why in unread.items()
        )
    if draft.problems or config is None:
        raise Refused(draft.problems, what)
    return Loaded(
        config=config,
        stages=stage_configs(config),
        names=stage_names(config),
        file=Path(path) if path is not None else None,
        origins=draft.origins,
        written=written,
        translation=translation,
        notes=(*notes, *_consequences(config)),
    )


def _left_out(
    draft: Draft,
    written: dict[str, Json],
    config: Config | None,
    find: Callable[[Config], Mapping[keys.Path, str]],
) -> tuple[dict[str, Json], Config | None, dict[keys.Path, str]]:
    """(what is written, the config of it, the keys that nothing reads and why), without these. Found again until there
    are none: an optional section that is empty now may be read by nothing, too."""
    gone: dict[keys.Path, str] = {}
    while config is not None and not draft.problems:
        unread = find(config)
        rest = without(written, unread)
        if rest == written:
            break
        gone |= {path: why for path, why in unread.items() if not any(at[: len(path)] == path for at in gone)}
        draft.tree = written = rest
        config = _finished(draft)
    return written, config, gone


def _idle_keys(config: Config, origins: Mapping[keys.Path, str], *, keep_given: bool) -> dict[keys.Path, str]:
    """The keys that no stage reads, and why. keep_given: but for those of the call."""
    given = config.model_dump(mode="json", exclude_unset=True)
    found = unused_keys(given, stage_configs(config))
    return {path: why for path, why in found if not (keep_given and is_of_call(tree.origin(origins, path)))}


def is_of_call(place: str) -> bool:
    """Whether an origin is the call, not a file: its values, its overrides, or the arguments of a launch script."""
    return place == "values" or place.startswith(("override ", "argument "))


def _check_arguments(overrides: Sequence[str], unused: str) -> None:
    """What a caller of `whet.train` may give instead. Raises ConfigError."""
    expect_overrides(overrides)
    if unused not in get_args(Unused):
        raise ConfigError(f"unused: got {unused!r}; expected one of {', '.join(get_args(Unused))}")


def _check_keys(overrides: Sequence[str]) -> None:
    """ConfigError for a key that is nested too deep to be looked up."""
    if any(len(re.findall(r"[.[]", text.partition("=")[0])) > MOST_DEPTH for text in overrides):
        raise ConfigError(
            f"overrides: a key has more than {MOST_DEPTH} parts; expected key.path=value, such as train.steps=5"
        )


def _consequences(config: Config) -> Iterable[str]:
    """Notes on combinations that are allowed, once for all stages."""
    found = (each for cfg in stage_configs(config) for each in consequences(cfg))
    return dict.fromkeys(f"{key}: {text}" for key, text in found)


def _switches_algorithm(overrides: Sequence[str]) -> bool:
    """Whether an override names another algorithm: keys of the file that only its own algorithm reads then rest."""
    keys_set = {text.partition("=")[0].strip() for text in overrides}
    return any(key.removesuffix(".name").rpartition(".")[2] == "algorithm" for key in keys_set)


def _finished(draft: Draft) -> Config | None:
    """Resolve the references, those in the schema's defaults too, and validate."""
    for name, info in Config.model_fields.items():
        if isinstance(info.default, str) and "${" in info.default:
            draft.tree = {name: info.default, **draft.tree}
    secrets.learn(draft.tree)
    written = draft.tree
    draft.interpolate()
    secrets.learn(draft.tree)
    secrets.learn_references(written, draft.tree)
    draft.find_homes()
    draft.find_places()
    config = draft.validate()
    if config is not None:
        draft.find_infinite()
    return config


def _translated(
    draft: Draft, kind: str, overrides: Sequence[str], wanted: str | None, *, here: bool
) -> tuple[Draft, Translation]:
    """A foreign file in native keys, overridden by its section of native keys."""
    theirs = [text for text in overrides if not text.startswith("whet.")]
    foreign = overridden(draft.tree, draft.origins, theirs)
    native = foreign.tree.pop("whet", {})
    keys = given_keys(foreign.tree, dialect(kind))
    version, base = version_of(kind, keys, wanted), base_of(kind, foreign.tree)
    made = translate(foreign.tree, dialect(kind, version, base), origins=foreign.origins)
    if "@" not in (wanted or "") and (other := other_end(kind, keys, version)):
        again = translate(foreign.tree, dialect(kind, other, base), origins=foreign.origins)
        made = replace(made, otherwise=(other, tree.differing(made.tree, again.tree)))
    made = at_hand(made) if here else made
    out = Draft(
        tree=made.tree,
        origins=dict(made.origins),
        problems=[*draft.problems, *foreign.problems, *foreign.left_out(dialect(kind)), *made.problems],
    )
    if isinstance(native, dict):
        out.put((), native, "")
        out.origins |= {at[1:]: place for at, place in foreign.origins.items() if at[0] == "whet" and at[1:]}
    else:
        out.problems.append((foreign.origins[("whet",)], "whet: expected a section of native keys"))
    return out, made


def learn_secrets(loaded: Loaded) -> None:
    """Register the secrets of a config that another process loaded."""
    resolved = loaded.as_given.model_dump(mode="json", exclude_unset=True)
    secrets.learn(resolved)
    secrets.learn_references(loaded.written, resolved)


def stage_names(config: Config) -> tuple[str, ...]:
    """Names of the stages; ('main',) if none are given."""
    return tuple(stage.name for stage in config.stages) or ("main",)


def stage_configs(config: Config) -> tuple[Config, ...]:
    """The whole config of each stage: the base, overridden by the stage; without stages the config itself. Its learning
    rate is given, or that of its method."""
    if not config.stages:
        return (with_lr(config),)
    base = config.model_dump(mode="json", exclude_unset=True)
    return tuple(with_lr(_stage(base, n, stage)) for n, stage in enumerate(base["stages"]))


def _stage(base: dict[str, Json], number: int, stage: dict[str, Json]) -> Config:
    merged = tree.stage_tree(base, stage)
    try:
        return Config.model_validate_json(json.dumps(merged))
    except ValidationError as e:
        said = [("", f"{named(('stages', number, *f.path), base)}: {f.text}") for f in faults(merged, e)]
        raise Refused(said, "the config") from e


def _launched(
    script: Path, overrides: Sequence[str], wanted: str | None, *, trust: bool
) -> tuple[Draft, str, tuple[str, ...], str]:
    """(the foreign tree that a launch script stands for, its kind of file, notes, a program that may add keys)"""
    arguments = [text for text in overrides if not text.startswith("whet.")]
    learn_overrides(arguments)
    started = launched(script, arguments, os.environ, dialect=wanted, trust=trust)
    draft = _read(started.file, started.text, foreign=True) if started.file else Draft()
    made = overridden(draft.tree, draft.origins, started.overrides, started.places)
    kind = recognise(made.tree, started.dialect)
    if kind == NATIVE:
        raise ConfigError(
            f"{script}: the system of this launch script is not recognised; give it: --dialect verl, skyrl, cosmos or "
            "trinity"
        )
    version = (started.dialect or "").partition("@")[2]
    problems = [*draft.problems, *started.problems, *made.problems, *made.left_out(dialect(kind))]
    return (
        Draft(tree=made.tree, origins=made.origins, problems=problems),
        f"{kind}@{version}" if version else kind,
        started.notes,
        started.program,
    )


def _of_the_program(program: str, problems: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """What to say about unknown keys where the program that a script starts may define keys of its own."""
    if not program or not any(": unknown key" in text for _, text in problems):
        return []
    return [
        (
            "",
            f"{program}, which the script starts, may define keys of its own; its code is not read. Remove its own "
            "keys from the script, and do what they change in a function of yours (a reward, a loss, an advantage)",
        )
    ]


def _check_is_file(file: Path) -> None:
    """ConfigError where there is a folder, or nothing, at the path of a config."""
    if file.is_dir():
        raise ConfigError(
            f"{file} is a folder; expected a config file ({_ENDINGS}) or a launch script ({SCRIPT})"
        )
    if not file.exists() and not file.is_symlink():
        beside = file.parent.iterdir() if file.parent.is_dir() else ()
        configs = sorted(each.name for each in beside if each.suffix in (*SUFFIXES, SCRIPT))
        raise ConfigError(f"{file}: cannot be read: No such file{near(file.name, configs)}")


def _read(file: Path, text: str | None = None, *, foreign: bool = False) -> Draft:
    """The draft of a file, with the line of every key. `text`: content to use instead of that of the file. foreign:
    another system's program reads its scalars."""
    if text is None:
        _check_is_file(file)
    if file.suffix not in SUFFIXES:
        raise ConfigError(
            f"{file}: the name of a config file ends in {_ENDINGS}, that of a launch script in {SCRIPT}; rename it."
        )
    if text is None:
        text = read_text(file, ConfigError, most=MOST_CONFIG_BYTES)
    parsed = parse(text, toml=file.suffix == ".toml", foreign=foreign)
    problems = [(f"{file}:{line}", said) for line, said in parsed.problems]
    if not isinstance(parsed.tree, dict):
        problems = problems or [(f"{file}:1", f"a config is a mapping of keys, got {shown(parsed.tree)}")]
        raise Refused(problems, str(file))
    origins = {at: f"{file}:{line}" for at, line in parsed.lines.items() if at}
    return Draft(tree=parsed.tree, origins=origins, problems=problems, broken=parsed.unread)
