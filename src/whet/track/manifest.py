"""Program, machine and inputs of a start: one entry of manifest.json."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from whet import secrets
from whet.secrets import is_secret
from whet.types import DataError, Json


def describe(
    *,
    config: str,
    seed: int,
    data_files: Sequence[Path] = (),
    code: Mapping[str, str] = MappingProxyType({}),
    bits: Mapping[str, Json] = MappingProxyType({}),
) -> dict[str, Json]:
    """One entry of manifest.json: what ran, where, on what. `config` is the text of config.yaml; code: digests of the
    user's (`config.code.digests`); bits: what decides those of its numbers (`models.arithmetic.facts`)."""
    return {
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "config_sha256": hashlib.sha256(config.encode()).hexdigest(),
        "seed": seed,
        "data_sha256": {str(path): file_sha256(path) for path in data_files},
        "code_sha256": dict(code),
        "packages": dict(package_versions()),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "arithmetic": dict(bits),
        "cores": os.cpu_count(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "environment": redact({k: v for k, v in sorted(os.environ.items()) if k.startswith(_ENVIRONMENT)}),
    }


def arithmetic(entry: Mapping[str, Json]) -> dict[str, Json]:
    """What decides the bits of a start's numbers: its `arithmetic`, or what it knows of CPU and torch."""
    own = entry.get("arithmetic")
    return own or {"cpu": entry.get("cpu"), "torch": (entry.get("packages") or {}).get("torch")}


def other_arithmetic(before: Mapping[str, Json], now: Mapping[str, Json]) -> str | None:
    """A message on how the arithmetic of two starts differs; None: no known difference."""
    was, is_ = arithmetic(before), arithmetic(now)
    # digests of two versions are of other numbers
    known = was.keys() - ({"digest"} if was.get("version") != is_.get("version") else set())
    told = [
        f"{name} {was[name]!r} -> {is_[name]!r}" for name in is_ if name in known and was[name] != is_[name]
    ]
    if not told:
        return None
    return (
        f"this machine computes differently from the previous start: {', '.join(told)}. From here on the bits of its "
        "results may differ from those of a run on the earlier machine; nothing else differs"
    )


def other_data(before: Mapping[str, Json], now: Mapping[str, Json]) -> list[str]:
    """The data files of a start that an earlier one had with other bytes."""
    was, here = (each.get("data_sha256") or {} for each in (before, now))
    return [file for file, digest in here.items() if was.get(file, digest) != digest]


_ENVIRONMENT = (
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH",
    "CUDA_",
    "HF_",
    "TOKENIZERS_",
    "WHET_",
    "PYTHONHASHSEED",
)


def redact(environment: Mapping[str, str]) -> dict[str, str]:
    """The same without the values of names that look like secrets, and without known secrets elsewhere."""
    return {k: "(redacted)" if is_secret(k) else secrets.redact(v) for k, v in environment.items()}


def file_sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise DataError(f"cannot read {path}: {e.strerror or e}") from e


@cache
def package_versions() -> Mapping[str, str]:
    """Versions of whet and of its installed dependencies, as the process found them."""
    found = {}
    try:
        needs = metadata.requires("whet") or []
    except metadata.PackageNotFoundError:  # from its source folder, not installed
        return {}
    for asked in ["whet", *needs]:
        name = re.split(r"[^A-Za-z0-9_.-]", asked, maxsplit=1)[0]
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return dict(sorted(found.items()))


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()
