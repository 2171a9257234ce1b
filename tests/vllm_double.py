"""`vllm serve` as far as a run needs it: the double of `servers`, as a program.

It takes the arguments of `vllm serve`, and prints its process, and what a log may not keep: its token.
"""

from __future__ import annotations

import os
import sys
import threading

import torch
from transformers import AutoModelForCausalLM

from servers import VllmServer
from whet.models import kernels
from whet.rollout.native.engine import NativeEngine


def main() -> None:
    serve, folder, *options = sys.argv[1:]
    assert serve == "serve"
    given = dict(zip(options, [*options[1:], ""]))
    print(f"its process is {os.getpid()}", flush=True)
    print(f"the token is {os.environ['VLLM_API_KEY']}", flush=True)
    print(f"another one is {os.environ.get('HF_TOKEN')}", flush=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, given["--dtype"]))
    engine = NativeEngine(
        model.requires_grad_(False),
        kernels.load("auto"),
        end_token_ids=[],
        max_context=int(given["--max-model-len"]) - 1,
    )
    VllmServer(engine, port=int(given["--port"]))
    threading.Event().wait()


SERVE = "from vllm_double import main; main()"
"""The code of the program: see `programs`."""
