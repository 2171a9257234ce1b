"""Versions of inference servers that were seen with whet, or are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from whet.types import ConfigError

VLLM = "0.32.0"
"""The version that `whet engine install vllm` installs."""
SGLANG = "0.5.23"
"""The version that `whet engine install sglang` installs."""


@dataclass(frozen=True)
class Known:
    """What is known of some versions of a server."""

    versions: str
    state: Literal["seen", "refused", "unseen"]
    says: str


VERSIONS: tuple[Known, ...] = (
    Known("~=0.32.0", "seen", "passes the contract suite of whet (on a CPU, docs/backends.md)"),
    Known(
        "<0.32",
        "refused",
        "whet needs the versions of the weights in each reply, which 0.32 was the first tested version to have; "
        "install it: whet engine install vllm",
    ),
    Known(
        "~=0.33.0",
        "unseen",
        "not seen running with whet: its interface was read in the source of 0.33.0; each weight sync is proved",
    ),
    Known("", "unseen", "not tested with whet; its routes and fields are checked at the start"),
)
"""The first line that has a version counts; "" has all, with candidates of releases, which none of the others has."""

SGLANG_VERSIONS: tuple[Known, ...] = (
    Known(
        "<0.5.21",
        "refused",
        "whet needs the versions of the weights in each reply, which are there since 0.5.19, and a cache that can be "
        "emptied while requests wait, since 0.5.21; install 0.5.23: whet engine install sglang",
    ),
    Known(
        "",
        "unseen",
        "no SGLang has been seen running with whet: its interface was read in the source of 0.5.21 to 0.5.23; each "
        "weight sync is proved",
    ),
)
"""Source: SGLang's `srt/utils/weight_versions.py` (not in 0.5.18, there in 0.5.19), and `Scheduler.flush_cache`, which
in 0.5.20 does nothing while requests wait, and in 0.5.21 does it in a pause."""

OF: Mapping[str, tuple[str, tuple[Known, ...]]] = {
    "vllm": ("vLLM", VERSIONS),
    "sglang": ("SGLang", SGLANG_VERSIONS),
}
"""By engine: what people call it, and its versions."""


def known(version: str, engine: str = "vllm") -> Known:
    """What is known of a version. Raises ConfigError for a text that is none."""
    title, rows = OF[engine]
    try:
        parsed = Version(version)
    except InvalidVersion as error:
        raise ConfigError(
            f"the server says that it is {title} {version!r}, which is not a version"
        ) from error
    for row in rows:
        if SpecifierSet(row.versions).contains(Version(parsed.public), prereleases=True):
            return row
    raise AssertionError("the last line has every other version")
