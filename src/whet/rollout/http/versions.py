"""Versions of vLLM that were seen with whet, or are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from whet.types import ConfigError

VLLM = "0.32.0"
"""The version that `whet engine install vllm` installs."""


@dataclass(frozen=True)
class Known:
    """What is known of some versions of vLLM."""

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
    Known("!=0.32.*", "unseen", "not tested with whet; its routes and fields are checked at the start"),
)
"""The first line that has a version counts."""


def known(version: str) -> Known:
    """What is known of a version. Raises ConfigError for a text that is none."""
    try:
        parsed = Version(version)
    except InvalidVersion as error:
        raise ConfigError(f"the server says that it is vLLM {version!r}, which is not a version") from error
    for row in VERSIONS:
        if SpecifierSet(row.versions).contains(Version(parsed.public), prereleases=True):
            return row
    raise AssertionError("the last line has every other version")
