"""The interface of rollout engines. Tokens in, tokens and log-probs out; text never becomes tokens here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from whet.types import Completion, Sampling


@dataclass(frozen=True)
class WeightSource:
    """Where new weights come from. Exactly one of the two is set.

    module: the trainer's own module, by reference (same process, same device): nothing is moved.
    tensors: an iterator of (Hugging Face name, tensor), gathered one at a time.
    """

    module: Any = None
    tensors: Iterator[tuple[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class EngineInputs:
    """What an engine in the process of the trainer is made of.

    model: the policy, a transformers module; the engine samples from it by reference until `load_weights`.
    ops: the kernels of the run. end_token_ids: end a reply. decode: tokens to text without special tokens, for stop
    strings. max_context: longest rollout, prompt included, in tokens. max_num_seqs, cache_mb, quantization:
    rollout.max_num_seqs, machine.kv_cache_mb, rollout.quantization. beat: to be called while requests make progress,
    with what is done; without a call the run counts as hanging after machine.watchdog_timeout_s. span: a context for
    each piece of work, for the timeline.
    """

    model: Any
    ops: Any
    end_token_ids: frozenset[int]
    decode: Callable[[list[int]], str]
    max_context: int
    max_num_seqs: int
    cache_mb: int | None
    quantization: Literal["float8", "int8"] | None
    beat: Callable[[str], object]
    span: Callable[[str], AbstractContextManager[None]]


class RolloutEngine(Protocol):
    version: int

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        """Sample one completion of `token_ids`. Many calls run at once; equal prompts share their prefill."""

    async def load_weights(self, source: WeightSource, version: int) -> None:
        """When this returns, every newly sampled token carries `version`."""

    async def pause(self, finish: bool) -> None:
        """Stop sampling: after the requests in flight have finished, or at once, keeping them for `load_weights`."""

    def resume(self) -> None:
        """Continue after `pause` without new weights."""

    async def place(self, device: Literal["gpu", "cpu"]) -> None:
        """Give the accelerator's memory back ('cpu') or take it again ('gpu')."""

    async def close(self) -> None: ...


def missing(engine: object) -> list[str]:
    """What an object lacks to be a `RolloutEngine`."""
    parts = (*RolloutEngine.__annotations__, *vars(RolloutEngine))
    return [part for part in parts if not part.startswith("_") and not hasattr(engine, part)]
