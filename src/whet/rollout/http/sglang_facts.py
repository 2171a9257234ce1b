"""Whether whet can sample from an SGLang server: its version, its routes and its settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whet.guard.foreign import said, words
from whet.rollout.engine import Part
from whet.rollout.http.calls import MOST_VERSION, UNREADABLE, Call, Calls
from whet.rollout.http.routed import EXPERTS, NO_EXPERTS
from whet.rollout.http.versions import known
from whet.rollout.requests import RequestError
from whet.types import ConfigError

log = logging.getLogger(__name__)

INFO = Call("/server_info", "for its version and settings", method="GET")
MODEL = Call("/model_info", "for its model", method="GET")

TAGS: dict[Part, str] = {"weights": "weights", "cache": "kv_cache"}
"""In the order in which memory is taken; it is given back in the other one."""
ASLEEP = "asleep: "
"""Begins the name that whet gives to the weights of a server whose memory it has given back; the parts follow."""

ROOM = 8
"""A server takes prompts of up to 7 tokens less than its --context-length, and a reply ends 2 before it."""


@dataclass(frozen=True, kw_only=True)
class ServerSetting:
    """A setting that whet cannot work with, and the values that it can."""

    name: str
    fits: tuple[Any, ...]
    why: str


SETTINGS: tuple[ServerSetting, ...] = (
    ServerSetting(
        name="speculative_algorithm",
        fits=(None,),
        why="speculative decoding, whose draft model gets no new weights; start it without",
    ),
    ServerSetting(
        name="disaggregation_mode",
        fits=(None, "null"),
        why="prefill and decoding apart; give one server that does both",
    ),
    ServerSetting(
        name="preferred_sampling_params",
        fits=(None, "", {}),
        why="sampling settings of its own beside those of a request; start it without",
    ),
    ServerSetting(
        name="enable_watermark",
        fits=(None, False),
        why="a watermark, which changes what is sampled and not the log-probs that are told; start it without",
    ),
    ServerSetting(
        name="enable_metrics",
        fits=(True,),
        why="no counts by which a server that hangs is found; start it with --enable-metrics",
    ),
)
"""Fields of /server_info, which are those of SGLang's `ServerArgs`."""


@dataclass(frozen=True)
class Facts:
    """What a server said of itself."""

    version: str
    deterministic: bool
    """It samples by the seed of a request."""
    parts: frozenset[Part]
    """Of which it can give the memory back, and has them again as they were."""
    away: frozenset[Part] = frozenset()
    """Of which a run that ended has given the memory back."""


async def detect(calls: Calls, *, max_context: int, experts: bool = False) -> Facts:
    """Ask a server what it is. Raises ConfigError, with what to do, where whet cannot sample from it. experts: replies
    are to have them."""
    try:
        info = await calls.ask(INFO)
        version = words(str(info["version"]), MOST_VERSION)
        row = known(version, "sglang")
        if row.state == "refused":
            raise ConfigError(f"{calls.url} is SGLang {version}: {row.says}")
        if row.state == "unseen":
            log.warning("%s is SGLang %s: %s", calls.url, version, row.says)
        model = await calls.ask(MODEL)
        wrong = unfit(info, generates=model["is_generation"], max_context=max_context)
        if experts and info.get(EXPERTS) is False:
            wrong = wrong or NO_EXPERTS
    except RequestError as error:
        raise ConfigError(f"{calls.url} does not answer as SGLang does: {error}") from error
    except UNREADABLE as error:
        raise ConfigError(f"{calls.url} does not answer as SGLang does: it lacks {said(error)}") from error
    if wrong:
        raise ConfigError(f"{calls.url} {wrong}")
    parts: set[Part] = set()
    if info.get("enable_memory_saver"):
        parts.add("cache")
        if info.get("enable_weights_cpu_backup"):
            parts.add("weights")
    asleep, _, tags = str(model.get("weight_version")).partition(ASLEEP)
    away = frozenset(part for part, tag in TAGS.items() if not asleep and tag in tags.split())
    return Facts(version, bool(info.get("enable_deterministic_inference")), frozenset(parts), away)


def unfit(info: Mapping[str, Any], *, generates: bool, max_context: int) -> str:
    """What of its settings whet cannot work with, and what to do; empty: nothing."""
    if not generates:
        return "has a model that does not generate (embeddings, rewards); give one with the policy"
    if info["max_req_input_len"] <= max_context:
        return (
            f"takes prompts of less than {info['max_req_input_len']} tokens, and rollouts have up to {max_context}: "
            f"start it with --context-length {max_context + ROOM} or more, and room for as many tokens in its cache "
            "(--mem-fraction-static)"
        )
    for setting in SETTINGS:
        if info.get(setting.name) not in setting.fits:
            return f"was started with {setting.name}={info.get(setting.name)}: {setting.why}"
    return ""
