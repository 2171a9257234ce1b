"""The engines that come with whet, by name, read without importing any of them: one row adds one.

An engine of yours is a class or function, named in `rollout.engine` as 'package.module:name' or 'path/to/file.py:name'.
It is called with `EngineInputs` (whet.rollout.engine), and gives a `RolloutEngine` in the process of the trainer, which
may be the client of a server. Its `can` says what it is able to do; a run that needs more is refused at the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whet.config.schema import Config
from whet.tables import unknown


@dataclass(frozen=True)
class EngineRow:
    """What a config may say of an engine."""

    about: str
    at: str
    """What makes it of its inputs, as 'module:name'."""
    served: bool = False
    """It is servers in processes of their own (`rollout.server`)."""
    takes_weights: bool = True
    """A run may train. False: it serves for `whet eval` and `whet generate` by the model that it has."""


ENGINES: Mapping[str, EngineRow] = {
    "native": EngineRow(
        "Embedded, continuous batching, the trainer's weights by reference.",
        "whet.rollout.native.engine:opened",
    ),
    "hf": EngineRow(
        "The forward of transformers, one request at a time: slow, to compare with.", "whet.rollout.hf:opened"
    ),
    "vllm": EngineRow(
        "Servers in processes of their own, over HTTP; new weights go through a folder.",
        "whet.rollout.http.opened:vllm",
        served=True,
    ),
    "sglang": EngineRow(
        "Servers as with vllm, of SGLang; not seen running yet.",
        "whet.rollout.http.opened:sglang",
        served=True,
    ),
    "openai": EngineRow(
        "Any server with OpenAI's interface that returns token ids; takes no weights: for whet eval, whet generate "
        "and train.engine=simulated.",
        "whet.rollout.http.opened:openai",
        served=True,
        takes_weights=False,
    ),
}
TRAIN_ENGINES: Mapping[str, str] = {
    "torch": "FSDP2, and all layouts of `train.parallel`.",
    "deepspeed": "ZeRO, over dp_shard ranks. The numbers of torch up to rounding, and its checkpoints.",
    "simulated": "Nothing is learned and a step waits for some seconds, to measure all the rest.",
}
"""What trains, and what each is. One of yours is named in `train.engine` as rollout engines are, and called as
`whet.training.torch.TorchEngine` is: see `whet.training.chosen`."""
SERVED = tuple(name for name, row in ENGINES.items() if row.served)
NO_STOP = (
    "servers get token ids and have no tokenizer, so they cannot stop at strings: use {}.sampling.stop_token_ids, or "
    "rollout.engine=native"
)
"""Of the strings that end replies of single sources, with the section that has the others."""

NOT_BUILT: Mapping[str, str] = dict.fromkeys(
    ("trtllm", "tensorrt-llm", "tensorrt_llm"),
    "TensorRT-LLM is not supported: whet does not speak its interface; use rollout.engine=vllm, sglang or native",
)
"""Engines of other systems that a config may name, and what to use."""

ONE_FOR_ALL = ("engine", "replicas", "quantization", "server")
"""Keys of `rollout` that stages cannot differ in: one engine serves the whole run."""


def engines_of(cfg: Config) -> int:
    """How many engines a run begins with: replicas, servers, or the one in its process. Each samples
    rollout.max_num_seqs rollouts at once."""
    return max(1, cfg.rollout.replicas, len(cfg.rollout.server.urls))


def unknown_engine(name: str) -> str | None:
    """Why there is no engine of this name, if there is none."""
    return NOT_BUILT.get(name) or unknown(ENGINES, name)


def never_trains(name: str) -> str | None:
    """Why no run can train with an engine, if none can."""
    if name in ENGINES and not ENGINES[name].takes_weights:
        return (
            f"{name} takes no new weights, and every training step makes some (an evaluation in a process beside the "
            "trainer, too): use vllm, sglang or native; `whet eval` can evaluate the model that the server has"
        )
    return None
