"""Engines as a run makes them, on a server that is there; and a real vLLM, where WHET_VLLM names one."""

from __future__ import annotations

import asyncio
import atexit
import os
import tempfile
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from whet.config.schema import ModelConfig, TokenizerConfig
from whet.data.tokenizer import load_tokenizer
from whet.models import kernels
from whet.models.load import build, export
from whet.rollout.http.calls import CallLimits, Calls
from whet.rollout.http.canary import Canary
from whet.rollout.http.kinds import CPU_ENV, ENV
from whet.rollout.http.openai import OpenAIApi
from whet.rollout.http.process import ServerProcess, free_port
from whet.rollout.http.published import Folder
from whet.rollout.http.served import HttpEngine, ServerApi
from whet.rollout.http.sglang import SglangApi
from whet.rollout.http.vllm import VllmApi

REAL = os.environ.get("WHET_VLLM")
"""A vllm to run the contract suite on (make test-backends)."""
LIMITS = CallLimits(answer=20.0, load=60.0, reply=60.0)


def vllm_engine(url: str, model: PreTrainedModel, **how: Any) -> HttpEngine:
    """The engine; `open` asks the server what it is."""
    return _engine(VllmApi, url, model, **how)


def sglang_engine(url: str, model: PreTrainedModel, **how: Any) -> HttpEngine:
    """The same of an SGLang."""
    return _engine(SglangApi, url, model, **how)


def openai_engine(url: str, model: PreTrainedModel, *, asked: str | None = None, **how: Any) -> HttpEngine:
    """The same of a server with OpenAI's interface."""

    def api(calls: Calls, folder: Folder, *, max_context: int, end_token_ids: Collection[int]) -> OpenAIApi:
        return OpenAIApi(
            calls,
            model=model,
            ops=folder.ops,
            canary=folder.canary,
            end_token_ids=end_token_ids,
            asked=asked,
        )

    return _engine(api, url, model, **how)


def _engine(
    api: Callable[..., ServerApi],
    url: str,
    model: PreTrainedModel,
    *,
    max_context: int,
    end_token_ids: Collection[int],
    limits: CallLimits = LIMITS,
    adapters: bool = False,
    **more: Any,
) -> HttpEngine:
    calls = Calls(url, limits=limits)
    folder = Folder(
        Path(tempfile.mkdtemp(prefix="whet-test-weights-")),
        model=model,
        ops=kernels.load("auto"),
        canary=Canary(1e-3, max_context),
        adapters=adapters,
    )
    vocab = model.get_output_embeddings().out_features
    made = api(calls, folder, max_context=max_context, end_token_ids=end_token_ids, **more)
    return HttpEngine(made, calls, vocab=vocab, max_context=max_context)


def folder_of(engine: HttpEngine) -> Folder:
    """Where versions pass to its server."""
    assert isinstance(engine.api, VllmApi | SglangApi)
    return engine.api.folder


def digits_model(seed: int, folder: Path) -> None:
    """The folder of a model of digits, with its tokenizer."""
    tokenizer = load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=["0123456789"])
    scratch = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "initializer_range": 0.3}
    model = build(
        ModelConfig(scratch=scratch),
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=seed,
        device="cpu",
        dtype=torch.float32,
    )
    export(model, tokenizer, folder)


class RealServer:
    """vllm serve, as a run starts it, for a model that it is given the weights of later."""

    def __init__(self, model: PreTrainedModel, *, max_context: int, adapters_rank: int = 0) -> None:
        assert REAL is not None
        folder = Path(tempfile.mkdtemp(prefix="whet-test-vllm-"))
        export(model, None, folder / "model")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        options = {
            "host": "127.0.0.1",
            "port": port,
            "dtype": "float32",
            "max-model-len": max_context + 1,
            "max-num-seqs": 64,
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",
        }
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        command = [REAL, "serve", str(folder / "model"), *flags, "--tokens-only", "--enforce-eager"]
        env = ENV | CPU_ENV
        if adapters_rank:
            command += ["--enable-lora", "--max-lora-rank", str(adapters_rank)]
            env = {**env, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
        self.process = ServerProcess(command, env=env, log=folder / "engine.log")
        atexit.register(lambda: asyncio.run(self.process.stop()))
        asyncio.run(self._ready())

    async def _ready(self) -> None:
        calls = Calls(self.url, limits=LIMITS)
        await self.process.ready(calls, timeout_s=300, beat=lambda what: None)
        await calls.close()


@cache
def real_server(make: Callable[[], PreTrainedModel], max_context: int) -> RealServer:
    """One for all tests: it takes half a minute to start."""
    return RealServer(make(), max_context=max_context)
