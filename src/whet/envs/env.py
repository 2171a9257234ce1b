"""The interface to environments. An Env is single-use: created for one rollout, then discarded; no reset."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from whet.types import Message


@dataclass(frozen=True)
class EnvStep:
    """The environment's answer: messages to append, and whether the episode is over."""

    messages: list[Message] = field(default_factory=list)
    reward: float | None = None
    done: bool = True


class Env(Protocol):
    async def first(self) -> list[Message]: ...

    async def step(self, reply: Message) -> EnvStep: ...
