"""Finds, among several processes that wait for one another, the one that all the others wait for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

UNSEEN = "?"
"""State of a process that cannot be looked at."""
_NEAR = 5
"""Frames from the innermost one in which a collective is looked for."""
_COLLECTIVE = ("/torch/distributed/", "/whet/models/collectives.py")
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)


@dataclass(frozen=True)
class Seen:
    """The state of a process that sends no message."""

    doing: str
    state: str
    """As `processes.state` has it, or UNSEEN."""
    stack: str
    """As faulthandler writes it; empty where it wrote none."""

    @property
    def frames(self) -> list[re.Match[str]]:
        """Of its main thread, the innermost first."""
        threads = [
            list(_FRAME.finditer(part)) for part in re.split(r"^(?=\S)", self.stack, flags=re.MULTILINE)
        ]
        main = [frames for frames in threads if frames and frames[-1]["name"] == "<module>"]
        return (main or [frames for frames in threads if frames] or [[]])[-1]

    @property
    def waits(self) -> bool:
        """It stands in a collective: it is another one that does not come."""
        return any(part in frame["file"] for frame in self.frames[:_NEAR] for part in _COLLECTIVE)

    @property
    def where(self) -> str:
        """The innermost function of its main thread, for people."""
        for frame in self.frames[:1]:
            return f" in {frame['name']} ({PurePath(frame['file']).name}:{frame['line']})"
        return ""

    @property
    def trouble(self) -> str | None:
        """Why it cannot run at all, if so."""
        if self.state == UNSEEN:
            return "cannot be reached: its machine, or the actor process on that machine, does not answer"
        return _TROUBLE.get(self.state)


_TROUBLE = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped (by a debugger)",
    "D": "waits in the kernel for a disk or a device",
    "Z": "has ended",
    "": "has ended",
}


def blame(seen: Mapping[int, Seen], since: str, *, kind: str, of: str) -> str:
    """Which process hangs and which ones wait for it, since when; then what each of them does, the culprits first.

    Processes that cannot run are the culprits; else those outside a collective while others are in one. Where all are
    alike, all are named.
    """
    stuck = [n for n, one in seen.items() if one.trouble]
    culprits = stuck or [n for n, one in seen.items() if not one.waits] or list(seen)
    others = [n for n in seen if n not in culprits]
    said = [
        f"{kind} {n} of {of} {seen[n].trouble or 'hangs' + seen[n].where} while doing: {seen[n].doing}"
        for n in culprits
    ]
    said += [f"{kind} {', '.join(map(str, others))} waits for it{seen[others[0]].where}"] if others else []
    told = "".join(f"\n{kind} {n}: {seen[n].doing}\n{seen[n].stack}".rstrip() for n in [*culprits, *others])
    return f"{'; '.join(said)}; {since}{told}"
