"""The seam to whatever a policy acts in. An Env is single-use: made for one rollout, then thrown away; no reset."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from whet.types import Message


@dataclass(frozen=True)
class EnvStep:
    """What the environment answers: messages to append, and whether the episode is over."""

    messages: list[Message] = field(default_factory=list)
    reward: float | None = None
    done: bool = True


class Env(Protocol):
    async def first(self) -> list[Message]: ...

    async def step(self, reply: Message) -> EnvStep: ...
