"""`whet convert FILE --prove`: every check of one file, by the installed package of its system."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whet.config.load import Loaded
from whet.config.plan import plans
from whet.config.screen import show
from whet.dialects.translate import Translation
from whet.dialects.versions import VERSIONS
from whet.prove import cosmos, cosmos_sft, peers, skyrl, skyrl_sft, trinity, verl, verl_sft
from whet.prove.checks import (
    DIFFERS,
    GOOD,
    NOT_COMPARED,
    Check,
    Compared,
    File,
    absent,
    compared,
    table,
    without,
)
from whet.types import ConfigError, Json


@dataclass(frozen=True, kw_only=True)
class System:
    """How the files of one kind are held against their system."""

    peer: str
    known: Callable[[], Json]
    """All keys of the installed release, as a tree."""
    configured: Callable[[Mapping[str, Json]], Any]
    """The peer's own config of a file's tree."""
    checks: Callable[[Any, File], Iterator[Check]]
    stages: Callable[[Any], Sequence[Any]] = lambda config: (config,)
    """The configs of the stages of such a config."""


SYSTEMS = {
    kind: System(peer=peer, known=of.known, configured=of.configured, checks=of.checks)
    for kind, peer, of in (
        ("verl-ppo", "verl", verl),
        ("verl-sft", "verl", verl_sft),
        ("skyrl", "skyrl", skyrl),
        ("skyrl-sft", "skyrl", skyrl_sft),
        ("cosmos-grpo", "cosmos", cosmos),
        ("cosmos-sft", "cosmos", cosmos_sft),
    )
} | {
    "trinity": System(
        peer="trinity",
        known=trinity.known,
        configured=trinity.configured,
        checks=trinity.checks,
        stages=trinity.stages,
    )
}
"""By the name of a dialect."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """All rows."""

    title: str
    results: tuple[Compared, ...]

    @property
    def holds(self) -> bool:
        """Whether every row is equal, or differs as whet says."""
        return all(result.status in GOOD for result in self.results)


def require(kind: str) -> str:
    """The peer of a kind of file, installed. Raises ConfigError with the command that installs it."""
    if kind not in SYSTEMS:
        raise ConfigError(f"--prove: expected a file of {', '.join(SYSTEMS)}; this one is {kind}")
    peer = SYSTEMS[kind].peer
    if peers.version(peer) is None:
        package, newest = peers.PACKAGES[peer], peers.NEWEST[peer]
        raise ConfigError(
            f"--prove compares with the code of {package}, which is not installed in the environment that runs whet. "
            f"Install it, without its engines: {sys.executable} -m pip install --no-deps {package}=={newest} (the "
            "table names what else its code imports)"
        )
    return peer


def release(loaded: Loaded) -> str | None:
    """How to read a file as the installed release of its system: `verl@0.9.1`; as before, where whet does not read that
    release. Raises ConfigError where the package is not installed."""
    if loaded.translation is None:
        return None
    kind = loaded.translation.dialect
    peer = require(kind)
    version = peers.version(peer) or ""
    known = [each for each in VERSIONS[peer] if version == each or version.startswith(f"{each}.")]
    return f"{kind}@{known[-1] if known else loaded.translation.version}"


def printed(loaded: Loaded) -> bool:
    """Print the table of a file. Whether all of it holds."""
    proof = prove(loaded)
    show(table(proof.title, proof.results))
    return proof.holds


def prove(loaded: Loaded) -> Proof:
    """Hold a translated file against its system's own code. Raises ConfigError where the package is not installed."""
    made = loaded.translation
    if made is None:
        raise ConfigError(f"--prove: {loaded.file} is a native file; expected one of another system")
    peer = require(made.dialect)
    title = f"{loaded.file}: read as {peer} {made.version}, compared with {peers.PACKAGES[peer]} {peers.version(peer)}"
    with _quiet():
        results = tuple(_results(SYSTEMS[made.dialect], made, _files(loaded)))
    return Proof(title=title, results=results)


def _files(loaded: Loaded) -> dict[str, File]:
    """Each stage, by its name."""
    return {name: _file(loaded, number) for number, name in enumerate(loaded.names)}


def _file(loaded: Loaded, number: int) -> File:
    @functools.cache
    def steps(rows: int) -> int:
        total = plans(loaded, here=False, rows={loaded.names[number]: rows})[number].total_steps
        assert total is not None
        return total

    return File(config=loaded.stages[number], plan=plans(loaded, here=False)[number], steps=steps)


def _results(system: System, made: Translation, files: Mapping[str, File]) -> Iterator[Compared]:
    """The rows of all stages, one stage after the other; of several each row has its stage's name."""
    told = {line.key: line.differs for line in made.lines if line.differs}
    tree = made.foreign
    package = f"{peers.PACKAGES[system.peer]} {peers.version(system.peer)}"
    try:
        peers.prepared(system.peer)
        unknown = list(absent(dict(tree), system.known()))
        stages = system.stages(system.configured(without(tree, unknown)))
    except Exception as e:  # noqa: BLE001  (the peer's code may raise anything)
        yield Compared(what="all", status=NOT_COMPARED, told=f"{package} raised {type(e).__name__}: {e}")
        return
    if read := [key for key in unknown if _counts(key, made)]:
        yield Compared(what="keys", status=NOT_COMPARED, told=f"{package} does not have {_listed(read)}")
    if len(stages) != len(files):
        yield Compared(what="stages", status=DIFFERS, theirs=str(len(stages)), ours=str(len(files)))
        return
    for (name, file), theirs in zip(files.items(), stages, strict=True):
        of = f"{name}: " if len(files) > 1 else ""
        for result in _of_stage(system, theirs, file, told, package):
            yield replace(result, what=of + result.what)


def _counts(key: str, made: Translation) -> bool:
    """Whether a key, or one below it, has a say in whet's config; of a key without a line that is not known."""
    of = [line for line in made.lines if line.key == key or line.key.startswith(f"{key}.")]
    return not of or any(line.native for line in of)


def _of_stage(
    system: System, theirs: Any, file: File, told: Mapping[str, str], package: str
) -> Iterator[Compared]:
    try:
        checks = list(system.checks(theirs, file))
    except Exception as e:  # noqa: BLE001  (the peer's code may raise anything)
        yield Compared(what="all", status=NOT_COMPARED, told=f"{package} raised {type(e).__name__}: {e}")
        return
    for check in checks:
        yield compared(check, told)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the peer prints, warns of and logs."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)
