"""What a row of the comparison is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from whet.prove.cases import KINDS, Case
from whet.prove.numbers import Numbers
from whet.types import Json

ONE_TURN = ("one turn", "a group of one", "far apart")
FULL = tuple(kind for kind in KINDS if kind != "an empty reply")
"""All but empty replies, which whet counts nowhere and most peers count."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A function of a peer, and what whet makes of the same settings."""

    peer: str
    what: str
    theirs: str
    """`module:function` or `module:Class` of the peer; it is imported, never copied."""
    call: Callable[[Any, Case, Mapping[str, Json]], Numbers]
    """Their numbers: the imported object, the case, `keys`."""
    ours: Callable[[Row, Case], Numbers]
    """Whet's numbers."""
    keys: Mapping[str, Json] = field(default_factory=dict)
    """Settings, by the peer's own names in a config file: whet gets what its translation makes of them."""
    native: Mapping[str, Json] | None = None
    """Settings of whet's `algorithm`, where the peer has no config file (TRL) or whet does not read this key yet."""
    covers: tuple[str, ...]
    """Rows of docs/algorithms.md: 'advantage grpo', 'loss ppo', 'aggregation token-mean', 'kl k1' ..."""
    kinds: tuple[str, ...] = FULL
    only: tuple[str, ...] = ()
    """Names of the numbers that are compared; () for all."""
    tolerance: float = 1e-9
    """Largest difference, relative to the larger of 1 and their number."""
    differs: str = ""
    """Why the numbers differ, and where that is documented. The row fails where they do not."""
    issue: str = ""
    """What is known about a difference that is a mistake. The row fails until it is mended."""
