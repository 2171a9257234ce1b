"""Whether whet can sample from a server: its version, its routes and its settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whet.guard.foreign import said, words
from whet.rollout.http.calls import MOST_VERSION, UNREADABLE, Call, Calls
from whet.rollout.http.routed import EXPERTS, NO_EXPERTS
from whet.rollout.http.versions import VLLM, known
from whet.rollout.requests import RequestError
from whet.types import ConfigError, WhetError

log = logging.getLogger(__name__)

ROUTES: Mapping[str, str] = {
    "/inference/v1/generate": "--tokens-only",
    "/abort_requests": "VLLM_SERVER_DEV_MODE=1",
    "/pause": "VLLM_SERVER_DEV_MODE=1",
    "/resume": "VLLM_SERVER_DEV_MODE=1",
    "/collective_rpc": "VLLM_SERVER_DEV_MODE=1",
    "/update_weight_version": "VLLM_SERVER_DEV_MODE=1",
    "/reset_prefix_cache": "VLLM_SERVER_DEV_MODE=1",
    "/server_info": "VLLM_SERVER_DEV_MODE=1",
}
"""Routes that are used, and how a server is started so that it has them."""
ADAPTER_ROUTES: Mapping[str, str] = {
    "/v1/load_lora_adapter": "--enable-lora, --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
}
"""Routes of rollout.server.lora=adapter."""
FIELDS: Mapping[str, tuple[str, ...]] = {
    "GenerateRequest": ("token_ids", "sampling_params", "cache_salt", "request_id"),
    "GenerateTokensChoice": ("token_ids", "logprobs", "finish_reason", "weight_versions"),
}
"""Fields that must be in the schema of the server."""

VERSION = Call("/version", "for its version", method="GET")
OPENAPI = Call("/openapi.json", "for its routes", method="GET")
INFO = Call("/server_info", "for its settings", method="GET")


@dataclass(frozen=True)
class Detected:
    """What a server said of itself."""

    version: str
    sleeps: bool
    """It can give the memory of an accelerator back."""


async def detect(
    calls: Calls, *, max_context: int, adapters: bool = False, experts: bool = False
) -> Detected:
    """Ask a server what it is. Raises ConfigError, with what to do, where whet cannot sample from it. experts: replies
    are to have them."""
    try:
        version = words(str((await calls.ask(VERSION))["version"]), MOST_VERSION)
        row = known(version)
        if row.state == "refused":
            raise ConfigError(f"{calls.url} is vLLM {version}: {row.says}")
        if row.state == "unseen":
            log.warning("%s is vLLM %s: %s", calls.url, version, row.says)
        openapi = await calls.ask(OPENAPI)
        if lacks := lacking(openapi, adapters=adapters):
            raise ConfigError(f"{calls.url} (vLLM {version}) {lacks}")
        info = await calls.ask(INFO, query={"config_format": "json"})
        whole = info["vllm_config"]
        config = whole["model_config"]
        wrong = unfit(whole, max_context=max_context)
        told = (whole.get("aux_output_config") or {}).get(EXPERTS)
        if experts and told is False:
            wrong = wrong or NO_EXPERTS
        found = Detected(version, sleeps=bool(config.get("enable_sleep_mode")))
    except RequestError as error:
        raise ConfigError(f"{calls.url} does not answer as vLLM does: {error}") from error
    except UNREADABLE as error:
        raise ConfigError(f"{calls.url} does not answer as vLLM does: it lacks {said(error)}") from error
    if wrong:
        raise ConfigError(f"{calls.url} {wrong}")
    return found


def lacking(openapi: Any, *, adapters: bool = False) -> str:
    """What the schema of a server lacks, and what to do; empty: nothing."""
    wanted = {**ROUTES, **(ADAPTER_ROUTES if adapters else {})}
    routes = [route for route in wanted if route not in openapi["paths"]]
    if routes:
        starts = ", ".join(dict.fromkeys(wanted[route] for route in routes))
        return f"has no {', '.join(routes)}; start it with {starts} (docs/backends.md)"
    schemas = openapi["components"]["schemas"]
    without = [
        f"{name}.{field}"
        for name, fields in FIELDS.items()
        for field in fields
        if field not in schemas.get(name, {}).get("properties", {})
    ]
    return f"does not have {', '.join(without)}; use vLLM {VLLM}" if without else ""


def unfit(whole: Mapping[str, Any], *, max_context: int) -> str:
    """What of its settings (`VllmConfig`) whet cannot work with, and what to do; empty: nothing."""
    config = whole["model_config"]
    if config["logprobs_mode"] != "processed_logprobs":
        return (
            f"was started with --logprobs-mode {config['logprobs_mode']}, whose log-probs are not those of the "
            "distribution that is sampled; start it with --logprobs-mode processed_logprobs"
        )
    if config["max_model_len"] <= max_context:
        return (
            f"was started with --max-model-len {config['max_model_len']}, and rollouts have up to {max_context} "
            f"tokens; start it with at least {max_context + 1}"
        )
    if whole.get("speculative_config"):
        return (
            "was started with speculative decoding, whose draft model gets no new weights; start it without"
        )
    if whole.get("watermark_config"):
        return (
            "was started with a watermark, which changes what is sampled and not the log-probs that are told; start it "
            "without --watermark-config"
        )
    return ""


async def reachable(calls: Calls, what: Call = VERSION) -> bool:
    """Whether a server answers at all. what: a call that it answers once it is ready."""
    try:
        await calls.ask(what)
    except WhetError:
        return False
    return True
