"""Section about the servers of an engine that runs in processes of its own."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from whet.config.sections.base import Above0, Count, Section


class ServerConfig(Section):
    """The inference servers of rollout.engine=vllm or sglang: those that run already (urls), or one that whet starts on
    this machine and that ends with the run. Of engine=openai: those that run already. `whet doctor` shows what is
    installed and supported."""

    urls: tuple[str, ...] = ()
    """Addresses of running servers, such as http://host:8000. Each is a replica: requests are distributed over them,
    and those of a server that dies or hangs are sent to the others. Start them with the options that docs/backends.md
    lists. Each explorer (mode=explore), and a trainer beside it that evaluates, needs servers of its own. Default: whet
    starts one server for each process that samples."""
    proxy: str | None = None
    """Address of a proxy (load balancer, router) before the servers of `urls`, which lists all that it leads to.
    Replies are asked of it; weights are given to each server itself, and proved there before a reply of their version
    is asked for. The servers are one replica: while weights change none samples, and if one is lost, all are asked
    again."""
    token: str | None = None
    """Token of the servers (--api-key), best as a reference: ${oc.env:NAME}. Default: no token."""
    model: str | None = None
    """engine=openai: name of the model that is asked for, of those that the server lists. Default: the only one."""
    command: str | None = None
    """Executable of the server that whet starts. Default: vllm or sglang in the environment of `whet engine install`,
    else on PATH."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the server that whet starts, passed to it unchanged: {tensor-parallel-size: 2} is
    --tensor-parallel-size 2. true: an option without a value; false: its --no- form (sglang: left out); a list: several
    values; a table: JSON. Options that whet sets itself are refused."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the server that whet starts, in addition to those of whet."""
    weights_dir: str | None = None
    """Folder of this run alone, through which new weights pass to the servers, which read it under the same path;
    explorers have a folder each in it. Default: run_dir/engine. On Linux a folder in /dev/shm is memory."""
    lora: Literal["merge", "adapter"] = "merge"
    """How a model with adapters (model.lora) reaches the servers. merge: all its weights, with the effect of the
    adapters. adapter: the adapters alone, which a server loads while it runs and computes beside the weights that it
    started with: a version is small, and each token costs more."""
    sleep: bool = False
    """The servers share the accelerator with the trainer, in turn (colocated): they sleep while a step is computed, and
    wake up before they are given its weights. Asleep they keep no cache, and their weights in the host's memory (vLLM's
    level 1). What the trainer needs beside them while they sample is up to train.offload. A server that whet starts is
    started so that it can; one that cannot is refused."""
    canary_bound: Above0 | None = None
    """Largest mean difference between the log-probs of trainer and server after a weight sync, over fixed prompts, in
    nats per token. Above it the step stops, because the server does not have the weights of the trainer. Default: 0.001
    for models in float32, 0.05 in half precision."""
    timeout_s: Above0 = 60.0
    """Longest wait for a server to answer anything but a reply, and to make progress on the replies that it samples. A
    server that exceeds it is dropped, and its requests are sent again."""
    start_timeout_s: Above0 = 600.0
    """Longest wait for a server that whet starts, and for the restart of one when none is left."""
    restarts: Count = 3
    """How often a server that died or hangs is restarted; with urls: how often whet checks again whether it is back."""
