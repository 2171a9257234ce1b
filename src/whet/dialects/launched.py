"""A launch script as config: the file that its trainer would read, and the overrides put over it, with their places."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.config.faults import shown
from whet.dialects.launch import base_of, is_own, words
from whet.dialects.script import Argument, Launch, read_script
from whet.dialects.tables import FILES, named
from whet.types import ConfigError

_CHOICES = words("choice")
_GROUPS = {name.partition("=")[0] for name in _CHOICES}
_CHOICE = re.compile(r"[+]*(?P<group>[\w/]+)(?P<at>@[\w.]+)?=(?P<name>\w*)")
_FLAG = re.compile(r"--?[A-Za-z]")


@dataclass(frozen=True, kw_only=True)
class Started:
    """What a launch asks for."""

    dialect: str | None
    """The kind of file; None where the keys have to tell."""
    file: Path | None
    """The config file that the trainer reads."""
    text: str | None
    """Its text, where the script itself writes it."""
    overrides: tuple[str, ...]
    places: tuple[str, ...]
    """Where each is written."""
    problems: tuple[tuple[str, str], ...]
    """(place, text)"""
    notes: tuple[str, ...]
    program: str = ""
    """The module that is started, where it is no part of the system: it may add keys of its own."""


def launched(
    script: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    dialect: str | None = None,
    trust: bool = False,
) -> Started:
    """Read a launch script. `dialect` is what the user says the launch is written for. Raises ConfigError."""
    try:
        launch = read_script(script, arguments, environment, trust=trust)
        kind = _kind(launch, dialect)
    except ConfigError as e:
        raise ConfigError(f"{script}: {e}") from e

    def place(word: Argument) -> str:
        return f"{launch.file or script}:{word.line}" if word.line else f"argument {word.text}"

    file, text, base = _file(launch, script)
    base = [*base, *(_torchrun(launch) if kind and kind.startswith("verl-sft") else ())]
    chosen, problems = [(one, place(Argument("", launch.line))) for one in base], []
    overrides: list[tuple[str, str]] = []
    notes = [f"{script}:{line}: {said}" for line, said in launch.notes]
    for word in _own(launch, notes, script):
        choice = _CHOICE.fullmatch(word.text)
        if choice and choice["group"] in _GROUPS and (choice["at"] or "." not in choice["group"]):
            said = _CHOICES.get(f"{choice['group']}={choice['name']}")
            if said is None:
                problems.append((place(word), _unread(word, choice, launch)))
            chosen += [(one, place(word)) for one in said or ()]
        elif choice and choice["at"]:
            problems.append(
                (
                    place(word),
                    f"{word.text}: Hydra's choice of a file is not read; give the keys of it one by one",
                )
            )
        else:
            overrides.append((word.text, place(word)))
    overrides = [*chosen, *overrides]  # a key stands over a file, wherever it is written
    return Started(
        dialect=kind,
        file=file,
        text=text,
        overrides=tuple(text for text, _ in overrides),
        places=tuple(place for _, place in overrides),
        problems=tuple(problems),
        notes=tuple(notes),
        program="" if is_own(launch.module, launch.system) else launch.module,
    )


_SIZES = {"nproc_per_node": "trainer.n_gpus_per_node", "nnodes": "trainer.nnodes"}


def _torchrun(launch: Launch) -> list[str]:
    """torchrun's numbers of processes and machines as keys. verl's SFT trainer runs on these devices and does not read
    its own keys."""
    words = [part for word in launch.others for part in word.text.split("=", 1)]
    options = [word.lstrip("-").replace("-", "_") for word in words]
    pairs = [(_SIZES.get(option), value) for option, value in zip(options, words[1:])]
    return [f"{key}={value}" for key, value in pairs if key and value.isdecimal()]


def _unread(word: Argument, choice: re.Match[str], launch: Launch) -> str:
    """Why a file that Hydra would read is refused."""
    pairs = (each.partition("=") for each in _CHOICES)
    known = ", ".join(name for group, _, name in pairs if group == choice["group"])
    text = f"{word.text}: Hydra's file {shown(choice['name'])} is not read; known: {known}"
    if any(other.text.lstrip("+").startswith("hydra.searchpath=") for other in launch.overrides):
        text += "; the file is of another package (hydra.searchpath), so its values are not known here"
    return text


def _kind(launch: Launch, wanted: str | None) -> str | None:
    """The kind of file by what is started; what the user says wins, and may say a version alone."""
    kind = _by_module(launch)
    if wanted and kind in named(wanted):
        return f"{kind}@{wanted.partition('@')[2]}" if "@" in wanted else kind
    if wanted is None and kind is not None and kind not in FILES and kind not in ("cosmos", "trinity"):
        raise ConfigError(f"line {launch.line}: {launch.module}: a {kind} config is not built yet")
    return wanted or kind


def _by_module(launch: Launch) -> str | None:
    last = launch.module.rpartition(".")[2]
    if launch.system == "verl":
        files = words("file").items()
        return next((kind for kind, (module,) in files if re.fullmatch(module, launch.module)), "verl-ppo")
    if launch.system == "skyrl":
        return "skyrl-sft" if "sft" in last else "skyrl"
    return launch.system or None


def _own(launch: Launch, notes: list[str], script: Path) -> list[Argument]:
    """The overrides, without flags and what follows them."""
    kept: list[Argument] = []
    dropped = ""
    for word in launch.overrides:
        if _FLAG.match(word.text):
            dropped = word.text
            notes.append(
                f"{script}:{word.line or launch.line}: {word.text} is a flag, not a key; it is ignored"
            )
        elif dropped and "=" not in dropped and "=" not in word.text:
            dropped = ""
        elif word.text.strip():
            dropped = ""
            kept.append(word)
    return kept


def _file(launch: Launch, script: Path) -> tuple[Path | None, str | None, list[str]]:
    """(the config file, its text where the script writes it, overrides that say what verl's own file says)"""
    if launch.system in ("cosmos", "trinity"):
        if launch.config_file is None:
            raise ConfigError(
                f"{script}:{launch.line}: {launch.module} has no --config; expected --config FILE"
            )
        file = Path(launch.folder, launch.config_file)
        return file, launch.written.get(str(file)), []
    if launch.system == "skyrl":
        return None, None, [said for part, (said,) in words("entry").items() if part in launch.module]
    name = launch.config_name
    if name is None:
        return None, None, base_of(launch.module)
    name = name.removesuffix(".yaml")
    own = Path(launch.folder, *launch.module.split(".")).parent
    around = dict.fromkeys([Path(launch.folder), script.resolve().parent, own])
    folders = dict.fromkeys([launch.config_path or ".", launch.config_path or "config"])  # Hydra's own custom
    # an absolute folder is the same from everywhere
    tried = list(dict.fromkeys(Path(at, folder, f"{name}.yaml") for at in around for folder in folders))
    for file in tried:
        if file.is_file():
            return file, None, []
    if launch.system == "verl" and name.endswith("megatron_trainer"):
        return None, None, ["defaults=[ppo_megatron_trainer]"]
    if launch.system == "verl" and name in words("whole")["verl"]:
        return None, None, []
    raise ConfigError(
        f"{script}:{launch.line}: there is no config file {name}.yaml here; looked for {', '.join(map(str, tried))}. "
        "Start whet in the folder that the script is started in, or give --config-path"
    )
