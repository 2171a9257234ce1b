"""What a real vLLM server answered, and whether another answer has its shape.

`record` asks a server one of everything that whet asks, and gives the requests with their answers, which
tests/data/vllm-VERSION.json keeps. The double in `servers` fills these answers in; `differences` holds new ones against
them.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "data"
Json = Any

BODY = {"token_ids": [5, 9, 2, 33], "cache_salt": "salt"}
SAMPLING = {
    "n": 1,
    "max_tokens": 4,
    "temperature": 0.7,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "seed": 7,
    "logprobs": 0,
    "ignore_eos": True,
    "stop_token_ids": [1],
}
ASKED: dict[str, tuple[str, str, Json]] = {
    "version": ("GET", "/version", None),
    "server_info": ("GET", "/server_info?config_format=json", None),
    "label": ("POST", "/update_weight_version", {"new_version": "3"}),
    "generate": ("POST", "/inference/v1/generate", {**BODY, "request_id": "a", "sampling_params": SAMPLING}),
    "stream": (
        "POST",
        "/inference/v1/generate",
        {**BODY, "request_id": "b", "sampling_params": SAMPLING, "stream": True},
    ),
    "score": (
        "POST",
        "/inference/v1/generate",
        {**BODY, "request_id": "c", "sampling_params": {"max_tokens": 1, "prompt_logprobs": 2}},
    ),
    "too_long": (
        "POST",
        "/inference/v1/generate",
        {"request_id": "d", "token_ids": [3] * 128, "sampling_params": SAMPLING},
    ),
    "lost_folder": (
        "POST",
        "/collective_rpc",
        {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere/at/all"}},
    ),
    "pause": ("POST", "/pause?mode=keep", None),
    "reset": ("POST", "/reset_prefix_cache?reset_running_requests=true", None),
    "resume": ("POST", "/resume", None),
    "abort": ("POST", "/abort_requests", {"request_ids": ["generate-tokens-a"]}),
    "sleep": ("POST", "/sleep?level=1&mode=keep", None),
    "wake_weights": ("POST", "/wake_up?tags=weights", None),
    "wake_cache": ("POST", "/wake_up?tags=kv_cache", None),
    "metrics": ("GET", "/metrics", None),
    "openapi": ("GET", "/openapi.json", None),
}
KEPT_INFO = (
    "logprobs_mode",
    "max_model_len",
    "enable_sleep_mode",
    "dtype",
    "max_logprobs",
    "skip_tokenizer_init",
)
KEPT_METRICS = ("vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")


def record(url: str) -> Json:
    """By name: method, path, body, status, and the answer as text or as its JSON."""
    return {
        name: {"method": method, "path": path, "body": body} | ask(url, method, path, body, name)
        for name, (method, path, body) in ASKED.items()
    }


def ask(url: str, method: str, path: str, body: Json, name: str) -> Json:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url + path, data=data, method=method, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as said:
            status, text = said.status, said.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    return {"status": status, "answer": kept(name, text)}


def kept(name: str, text: str) -> Json:
    """Answers of hundreds of kilobytes are cut to what whet reads."""
    if name == "metrics":
        return "".join(f"{line}\n" for line in text.splitlines() if line.startswith(KEPT_METRICS))
    if name == "stream":
        return text
    answer = json.loads(text)
    if name == "server_info":
        model = answer["vllm_config"]["model_config"]
        speculative = answer["vllm_config"].get("speculative_config")
        config = {key: model[key] for key in KEPT_INFO}
        return {"vllm_config": {"model_config": config, "speculative_config": speculative}}
    if name == "openapi":
        from whet.rollout.http.supported import FIELDS, ROUTES

        fields = {
            schema: {
                "properties": {name: {} for name in answer["components"]["schemas"][schema]["properties"]}
            }
            for schema in FIELDS
        }
        paths = {path: {} for path in answer["paths"] if path in ROUTES}
        return {"paths": paths, "components": {"schemas": fields}}
    return answer


def read(version: str = "0.32.0") -> Json:
    """What was recorded of a version."""
    return json.loads((DATA / f"vllm-{version}.json").read_text())


def differences(ours: Json, theirs: Json, at: str = "") -> list[str]:
    """Where an answer lacks a field of another, or has a value of another kind. Further fields do no harm, and a list
    or a table by token ids may be of any length."""
    if ours is None or theirs is None:
        return []
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if all(key.isdigit() for key in (*ours, *theirs)):
            pairs = zip(ours.values(), theirs.values())
            return [d for a, b in list(pairs)[:1] for d in differences(a, b, f"{at}.*")]
        missing = [f"{at}.{key} is not there" for key in ours if key not in theirs]
        return missing + [
            d for key in ours if key in theirs for d in differences(ours[key], theirs[key], f"{at}.{key}")
        ]
    if isinstance(ours, list) and isinstance(theirs, list):
        pairs = [(a, b) for a, b in zip(ours, theirs) if a is not None and b is not None]
        return [d for a, b in pairs[:1] for d in differences(a, b, f"{at}[]")]
    kinds = [float if isinstance(v, int) and not isinstance(v, bool) else type(v) for v in (ours, theirs)]
    return [] if kinds[0] is kinds[1] else [f"{at} is {kinds[1].__name__}, not {kinds[0].__name__}"]
