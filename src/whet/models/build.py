"""Compiles the C kernels on the user's machine, at first use, and loads them with ctypes.

No torch headers: the library takes raw pointers. Threads: it is linked against the very libgomp that torch
has loaded, so that one pool of threads serves both; where torch brings no libgomp, or the compiler is not
gcc, the kernels run on one thread.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path

import torch

from whet.guard.temporary import OwnFolder
from whet.track.files import is_private, own_folder

_SOURCES = ("kernels.c", "products.c", "products_bf16.c")
_HEADERS = ("vectors.h",)
_FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-w", "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"),
)
"""No -ffast-math: it would let the compiler reorder sums, and rows would no longer be computed alike. No contraction:
where a product and a sum are rounded once is written in the sources, and no compiler's choice."""
_TIMEOUT_S = 300


class BuildError(Exception):
    """The kernels cannot be built here; the text gives the reason, with the compiler's output."""


@cache
def library() -> tuple[ctypes.CDLL, str]:
    """(the loaded library, how it was built). Raises BuildError."""
    compiler = _compiler()
    version = _run([*compiler, "--version"]).splitlines()[0]
    gomp = _torch_libgomp() if "clang" not in version.lower() else None
    folder = resources.files("whet.models")
    sources = {name: folder.joinpath(name).read_bytes() for name in (*_SOURCES, *_HEADERS)}
    stated = (*_FLAGS, *compiler, version, _cpu(), str(gomp))
    name = hashlib.sha256(b"\0".join([*sources.values(), *(s.encode() for s in stated)]))
    try:
        target = _place(f"kernels-{name.hexdigest()[:20]}.so")
        if not is_private(target):
            _compile(compiler, sources, target, gomp=gomp)
        lib = ctypes.CDLL(str(target))
    except OSError as error:
        raise BuildError(str(error)) from error
    threads = f"threads of {gomp.name}" if gomp else "one thread"
    return lib, f"{version}, {threads}, {target}"


def if_built() -> ctypes.CDLL | None:
    """The library, or None where it cannot be built."""
    try:
        return library()[0]
    except BuildError:
        return None


def _compiler() -> list[str]:
    """The command; $CC may be one with arguments ("ccache gcc"), or "none"."""
    given = shlex.split(os.environ.get("CC", ""))
    if given == ["none"]:
        raise BuildError("CC=none")
    for command in [given] if given else [["cc"], ["gcc"], ["clang"]]:
        if found := shutil.which(command[0]):
            return [found, *command[1:]]
    raise BuildError(f"no C compiler found (tried {given[0] if given else 'cc, gcc, clang'})")


def _compile(compiler: list[str], sources: dict[str, bytes], target: Path, *, gomp: Path | None) -> None:
    """Builds in a folder of its own and renames, so that processes that build at once do not meet."""
    with OwnFolder("build", target.parent) as folder:
        for name, text in sources.items():
            (folder / name).write_bytes(text)
        objects = []
        for name in _SOURCES:
            objects.append(str(folder / name.replace(".c", ".o")))
            openmp = ["-fopenmp"] if gomp else []
            _run([*compiler, *_FLAGS, *openmp, "-c", str(folder / name), "-o", objects[-1]])
        so = folder / "kernels.so"
        _run([*compiler, "-shared", *objects, "-o", str(so), *([str(gomp)] if gomp else []), "-lm"])
        so.chmod(0o755)  # whatever the umask: what others may write to is not loaded
        os.replace(so, target)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout)[-2000:].strip()}")
    return done.stdout


def _torch_libgomp() -> Path | None:
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return found[0] if found else None


def _cpu() -> str:
    """What -march=native depends on: a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(
        [platform.machine(), platform.processor(), *sorted({x for x in lines if x.startswith(wanted)})]
    )


def _place(name: str) -> Path:
    """Where a library is, or will be: one in the home's cache is used there, even if nothing can be written to it."""
    home = _home_cache()
    if home is not None and is_private(home / name):
        return home / name
    return cache_dir() / name


def cache_dir() -> Path:
    """A folder of this user's, where libraries are kept: what lies in it is loaded as code.

    $XDG_CACHE_HOME/whet or ~/.cache/whet; where there is no home folder, none that can be written, or one that others
    can change, one of this user's in the folder for temporary files (`library` says which was taken). Raises OSError
    where that one is not this user's alone.
    """
    home = _home_cache()
    if home is not None and os.access(home, os.W_OK):
        return home
    return own_folder(Path(tempfile.gettempdir()) / f"whet-{os.getuid()}")


def _home_cache() -> Path | None:
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(given) if given else Path.home() / ".cache") / "whet"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = folder.resolve()
        if (seen := folder.stat()).st_uid == os.getuid() and seen.st_mode & 0o022:
            folder.chmod(seen.st_mode & 0o755)
    except (RuntimeError, OSError):  # RuntimeError: no $HOME, and no entry in the list of users
        return None
    return folder if is_private(folder) else None
