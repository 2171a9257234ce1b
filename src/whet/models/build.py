"""Compiles kernels.c on the user's machine, at first use, and loads it with ctypes.

No torch headers: the library takes raw pointers. Threads: it is linked against the very libgomp that torch
has loaded, so that one pool of threads serves both; where torch brings no libgomp, or the compiler is not
gcc, the kernels run on one thread.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path

import torch

_FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
    *("-w", "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"),
)
"""No -ffast-math: it would let the compiler reorder sums, and rows would no longer be computed alike."""
_TIMEOUT_S = 300


class BuildError(Exception):
    """The kernels cannot be built here; the text says why, with the compiler's own words."""


@cache
def library() -> tuple[ctypes.CDLL, str]:
    """(the loaded library, how it was built). Raises BuildError."""
    compiler = _compiler()
    version = _run([compiler, "--version"]).splitlines()[0]
    gomp = _torch_libgomp() if "clang" not in version.lower() else None
    source = resources.files("whet.models").joinpath("kernels.c").read_bytes()
    name = hashlib.sha256(b"\0".join([source, *(s.encode() for s in (*_FLAGS, version, _cpu(), str(gomp)))]))
    target = _cache_dir() / f"kernels-{name.hexdigest()[:20]}.so"
    try:
        if not target.exists():
            _compile(compiler, source, target, gomp=gomp)
        lib = ctypes.CDLL(str(target))
    except OSError as error:
        raise BuildError(f"{target}: {error}") from error
    threads = f"threads of {gomp.name}" if gomp else "one thread"
    return lib, f"{version}, {threads}, {target}"


def _compiler() -> str:
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for name in names:
        if found := shutil.which(name):
            return found
    raise BuildError(f"no C compiler found (looked for {', '.join(names)})")


def _compile(compiler: str, source: bytes, target: Path, *, gomp: Path | None) -> None:
    """Builds in a folder of its own and renames, so that processes that build at once do not meet."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        c, o, so = (Path(folder) / f"kernels.{end}" for end in ("c", "o", "so"))
        c.write_bytes(source)
        openmp = ["-fopenmp"] if gomp else []
        _run([compiler, *_FLAGS, *openmp, "-c", str(c), "-o", str(o)])
        _run([compiler, "-shared", str(o), "-o", str(so), *([str(gomp)] if gomp else []), "-lm"])
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


def _cache_dir() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "whet"
