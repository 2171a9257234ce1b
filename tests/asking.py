"""Requests to rollout engines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from whet.rollout.engine import OnTokens, RolloutEngine
from whet.types import Completion, Request, Sampling

_numbers = count()


def request(prompt: Sequence[int], sampling: Sampling | None = None, **more: Any) -> Request:
    """One of a session of its own."""
    number = next(_numbers)
    own = {"id": f"request-{number}", "session": f"session-{number}"}
    return Request(prompt=tuple(prompt), sampling=sampling or Sampling(), **{**own, **more})


async def reply(
    engine: RolloutEngine,
    prompt: Sequence[int],
    sampling: Sampling | None = None,
    *,
    on_tokens: OnTokens | None = None,
    **more: Any,
) -> Completion:
    return await engine.generate(request(prompt, sampling, **more), on_tokens)
