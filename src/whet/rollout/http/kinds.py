"""The kinds of servers that `opened` opens: how each is asked, and how each is started."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from whet.guard.line import LOOPBACK
from whet.rollout.engine import Capabilities, EngineInputs
from whet.rollout.http.calls import Call, Calls
from whet.rollout.http.openai import MODELS, OpenAIApi
from whet.rollout.http.process import arguments
from whet.rollout.http.published import RANKS, Folder, largest_rank
from whet.rollout.http.routed import OPTION, routes_of
from whet.rollout.http.served import HttpEngine
from whet.rollout.http.sglang import CAN as SGLANG_CAN
from whet.rollout.http.sglang import SglangApi
from whet.rollout.http.sglang_facts import MODEL, ROOM
from whet.rollout.http.supported import VERSION
from whet.rollout.http.vllm import CAN, CAN_WITH_ADAPTERS, VllmApi


@dataclass(frozen=True, kw_only=True)
class Starting:
    """What a server is started with. model: a folder that transformers reads. secret: a file for what is no argument,
    since other users see the arguments of a process; it is removed once the server answers."""

    executable: str
    port: int
    model: Path
    dtype: str
    inputs: EngineInputs
    token: str | None
    secret: Path


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of server. name: of rollout.engine, and of the executable. ready: a call that it answers once it serves.
    command: None: it is never started. env: of a process that is started, unless the user has set them; fixed: in any
    case, with its token."""

    name: str
    title: str
    ready: Call
    engine: Callable[[EngineInputs, Folder, Calls], HttpEngine]
    can: Callable[[bool], Capabilities] | None = None
    """What it is able to do, before one is asked, with adapters (true) or without; None: nothing trains with it."""
    command: Callable[[Starting], list[str]] | None = None
    env: Callable[[], Mapping[str, str]] = dict
    fixed: Callable[[str | None], Mapping[str, str]] = lambda token: {}
    lora_env: Mapping[str, str] = field(default_factory=dict)
    """Of a process that is given adapters."""


def _vocab(inputs: EngineInputs) -> int:
    return int(inputs.model.get_output_embeddings().out_features)


def _serves(of: type[VllmApi | SglangApi], inputs: EngineInputs, folder: Folder, calls: Calls) -> HttpEngine:
    """An engine whose weights a server takes from the folder."""
    api = of(
        calls,
        folder,
        max_context=inputs.max_context,
        end_token_ids=inputs.end_token_ids,
        routes=routes_of(inputs),
    )
    return HttpEngine(api, calls, vocab=_vocab(inputs), max_context=inputs.max_context)


# ---------------------------------------------------------------- vLLM

ENV = {
    "VLLM_SERVER_DEV_MODE": "1",  # pause, new weights and versions are routes of it
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
CPU_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""GiB of cache; and threads are not bound to cores that the trainer uses, too."""


def _vllm_command(start: Starting) -> list[str]:
    own = {
        "host": LOOPBACK,
        "port": start.port,
        "dtype": start.dtype,
        # to score a whole context, one token is sampled after it
        "max-model-len": start.inputs.max_context + 1,
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
    }
    flags = [text for name, value in own.items() for text in (f"--{name}", str(value))]
    given = {"max-num-seqs": start.inputs.max_num_seqs, **start.inputs.server.options}
    if start.inputs.experts:
        given = {OPTION: True, **given}
    if start.inputs.server.lora == "adapter":
        rank = next(r for r in RANKS if r >= largest_rank(start.inputs.model))
        given = {"enable-lora": True, "max-lora-rank": rank, **given}
    if start.inputs.server.sleep:
        given = {"enable-sleep-mode": True, **given}
    return [start.executable, "serve", str(start.model), *flags, "--tokens-only", *arguments(given)]


VLLM = Kind(
    name="vllm",
    title="vLLM",
    ready=VERSION,
    engine=partial(_serves, VllmApi),
    can=lambda adapters: CAN_WITH_ADAPTERS if adapters else CAN,
    command=_vllm_command,
    env=lambda: ENV if torch.cuda.is_available() else ENV | CPU_ENV,
    fixed=lambda token: {"VLLM_SERVER_DEV_MODE": "1"} | ({} if token is None else {"VLLM_API_KEY": token}),
    lora_env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
)

# ---------------------------------------------------------------- SGLang

SGLANG_OPTIONS = (
    "host", "port", "model", "model-path", "model-type", "dtype", "context-length", "skip-tokenizer-init",
    "enable-metrics", "load-format", "api-key", "admin-api-key", "config", "speculative-algorithm",
    "preferred-sampling-params", "disaggregation-mode",
)  # fmt: skip
"""Options of sglang serve that whet sets, or that its protocol rules out."""
SGLANG_ENV = {
    "HF_HUB_OFFLINE": "1",
    # the context has a margin (`ROOM`) beyond the model's own positions, which no rollout reaches
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
}


def _sglang_command(start: Starting) -> list[str]:
    own = {
        "model-type": "llm",
        "model-path": start.model,
        "host": LOOPBACK,
        "port": start.port,
        "dtype": start.dtype,
        "context-length": start.inputs.max_context + ROOM,
    }
    flags = [text for name, value in own.items() for text in (f"--{name}", str(value))]
    given = {"max-running-requests": start.inputs.max_num_seqs, **start.inputs.server.options}
    if start.inputs.experts:
        given = {OPTION: True, **given}
    if start.inputs.server.sleep:
        given = {"enable-memory-saver": True, "enable-weights-cpu-backup": True, **given}
    options = arguments(given, own=SGLANG_OPTIONS, negates=False)
    token = []
    if start.token is not None:  # it has no environment variable for it
        start.secret.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(start.secret, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"api-key": start.token}, file)
        token = ["--config", str(start.secret)]
    return [start.executable, "serve", *flags, "--skip-tokenizer-init", "--enable-metrics", *token, *options]


SGLANG = Kind(
    name="sglang",
    title="SGLang",
    ready=MODEL,
    engine=partial(_serves, SglangApi),
    can=lambda adapters: SGLANG_CAN,
    command=_sglang_command,
    env=lambda: SGLANG_ENV,
    fixed=lambda token: {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"},  # 1: log-probs from before the temperature
)

# ---------------------------------------------------------------- OpenAI's interface


def _openai(inputs: EngineInputs, folder: Folder, calls: Calls) -> HttpEngine:
    api = OpenAIApi(
        calls,
        model=inputs.model,
        ops=inputs.ops,
        canary=folder.canary,
        end_token_ids=inputs.end_token_ids,
        asked=inputs.server.model,
    )
    return HttpEngine(api, calls, vocab=_vocab(inputs), max_context=inputs.max_context)


OPENAI = Kind(name="openai", title="OpenAI-compatible", ready=MODELS, engine=_openai)
