"""The interface of rollout engines. Tokens in, tokens and log-probs out; text never becomes tokens here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from whet.config.schema import ServerConfig
from whet.config.sections.rollout import Quantization
from whet.types import Completion, Receipt, Request, Sampling, ScoreRequest, TokenLogprobs, WhetError

OnTokens = Callable[[list[int]], object]
"""Takes the tokens of one reply as they are sampled: each once, in order, and before `generate` returns. It runs on the
engine's event loop and must return at once; what it raises is raised by `generate`."""

Part = Literal["weights", "cache"]
"""What an engine has on an accelerator."""
PARTS: frozenset[Part] = frozenset({"weights", "cache"})


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """One version of the weights, and where they come from. Exactly one of module, tensors and source is set.

    module: the trainer's own module, by reference (same process, same device): nothing is moved.
    tensors: an iterator of (Hugging Face name, tensor), gathered one at a time; (name, None): it stays as it is.
    source: a train engine in other processes, whose `publish` writes the weights from there. Given to a `Router` alone,
    whose `ship` brings them to the replicas.
    """

    version: int
    module: Any = None
    tensors: Iterator[tuple[str, Any]] | None = None
    source: Any = None

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.module, self.tensors, self.source)) != 1:
            raise WhetError("a WeightUpdate has exactly one of module, tensors and source")

    def named(self) -> Iterator[tuple[str, Any]]:
        """(name, tensor) of either, for engines elsewhere."""
        if self.tensors is not None:
            return self.tensors
        return ((name, parameter.detach()) for name, parameter in self.module.named_parameters())


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can do. A run that needs more is refused before it starts (`rollout.needs`)."""

    logprobs: Literal["always", "unpenalised", "unfiltered", "plain", "never"]
    """`Completion.logprobs`: for every request; for all without a penalty or min_tokens, as of servers that tell
    log-probs from before the filters; only where temperature is all there is to a request's sampling, as of servers
    that tell those of the filtered distribution; only at temperature 1 and greedily, as of servers that do not say
    whether theirs follow the temperature; or never."""
    stop_texts: bool
    """`Sampling.stop`."""
    penalties: bool
    """`Sampling.repetition_penalty`."""
    in_flight_updates: bool
    """`pause(finish=False)` keeps requests, and they go on with the new weights."""
    reproducible: Literal["everywhere", "server", "no"]
    """Equal request, equal weights, equal tokens: on every machine and in any batch; only on the same server; or never
    promised."""
    score_temperatures: bool = True
    """`ScoreRequest.temperature` other than 1."""
    experts: bool = False
    """`Completion.experts`, where the engine was made with `EngineInputs.experts`."""

    def tells_logprobs(self, sampling: Sampling) -> bool:
        """Whether completions that are sampled so have log-probs."""
        if sampling.temperature == 0:
            sampling = replace(sampling, temperature=1.0)  # they are those of the model then
        spoiled = SPOILED.get(self.logprobs)
        return spoiled is not None and all(getattr(sampling, n) == getattr(PLAIN, n) for n in spoiled)


PLAIN = Sampling()
PENALTIES = ("repetition_penalty", "min_tokens")
FILTERS = ("top_k", "top_p", "min_p")
SPOILED: Mapping[str, tuple[str, ...]] = {
    "always": (),
    "unpenalised": PENALTIES,
    "unfiltered": (*PENALTIES, *FILTERS),
    "plain": (*PENALTIES, *FILTERS, "temperature"),
}
"""With which settings other than `PLAIN` the log-probs are unknown."""


def own_engine(*, stop_texts: bool, experts: bool = False, device: str = "cpu") -> Capabilities:
    """What whet's own engines can do; stop texts, where they are given a decoder. On a GPU the products of libraries
    round by the number of rows, so a reply may depend on its batch."""
    return Capabilities(
        logprobs="always",
        stop_texts=stop_texts,
        penalties=True,
        in_flight_updates=True,
        reproducible="everywhere" if device == "cpu" else "no",
        experts=experts,
    )


@dataclass(frozen=True, kw_only=True)
class Health:
    """What a router and a person look at. The counts only grow: an engine that has work and whose counts stay hangs."""

    since: float
    """When it began to serve: seconds since the epoch."""
    requests: int
    """Requests that have ended, scores included."""
    tokens: int
    """Tokens computed so far: read, sampled or scored."""


@dataclass(frozen=True, kw_only=True)
class EngineInputs:
    """What an engine in the process of the trainer is made of.

    model: the policy, a transformers module; the engine samples from it by reference until `update_weights`.
    ops: the kernels of the run. end_token_ids: end a reply. decode: tokens to text without special tokens, for stop
    strings. max_context: longest rollout, prompt included, in tokens. max_num_seqs, cache_mb, quantization:
    rollout.max_num_seqs, machine.kv_cache_mb, rollout.quantization. beat: to be called while requests make progress,
    with what is done; without a call the run counts as hanging after machine.watchdog_timeout_s. span: a context for
    each piece of work, for the timeline. server: rollout.server, of engines in other processes. reply_timeout_s:
    rollout.timeout_s. load_timeout_s: sync.timeout_s. run_dir: where an engine may have a log and a folder of its own.
    home: the run directory of all processes of a run, which is run_dir or above it. asked: this process samples or
    evaluates; else its explorers do that elsewhere, and its engine only counts versions. experts: completions are to
    have the experts of their tokens (train.router_replay). kept: where an engine that computes as the trainer does may
    leave the activations of its tokens (`whet.models.activations.Activations`).
    """

    model: Any
    ops: Any
    end_token_ids: frozenset[int]
    decode: Callable[[list[int]], str]
    max_context: int
    max_num_seqs: int
    cache_mb: int | None
    quantization: Quantization | None
    beat: Callable[[str], object]
    span: Callable[[str], AbstractContextManager[None]]
    server: ServerConfig
    reply_timeout_s: float
    load_timeout_s: float
    run_dir: Path
    home: Path
    asked: bool = True
    experts: bool = False
    kept: Any = None


class RolloutEngine(Protocol):
    @property
    def version(self) -> int:
        """Of the weights that are sampled from."""

    @property
    def can(self) -> Capabilities: ...

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        """Sample one reply. Many calls run at once; equal prompts share their prefill. Cancelling the call aborts the
        request. Raises RequestError for a request that can never be served, WhetError after `close`."""

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        """Log-probs of given tokens, in the order of the requests. Raises as `generate` does."""

    async def update_weights(self, update: WeightUpdate) -> Receipt:
        """When this returns, every newly sampled token carries the update's version, and the engine is not paused.

        Raises WhetError if the weights do not fit. The version then stays; where the engine may hold a mix of both, it
        refuses requests until a full version has been taken.
        """

    async def pause(self, finish: bool) -> None:
        """Stop sampling: after the requests in flight have finished, or at once, keeping them for `update_weights` or
        `resume`. New requests wait."""

    async def resume(self) -> None:
        """Continue after `pause` without new weights."""

    async def place(self, device: Literal["gpu", "cpu"], what: frozenset[Part] = PARTS) -> None:
        """Give the accelerator's memory of these parts back ('cpu') or take it again ('gpu'). Requests wait until all
        parts are there."""

    async def health(self) -> Health:
        """Answered whatever the engine does, as long as its process lives."""

    async def close(self) -> None:
        """Requests in flight fail with WhetError; later ones are refused."""


_FORMERLY = {"update_weights": "load_weights"}
"""Methods that an engine for an earlier version of whet has under another name."""


def missing(engine: object) -> list[str]:
    """What an object lacks to be a `RolloutEngine`."""
    parts = [part for part in vars(RolloutEngine) if not part.startswith("_")]
    lacks = [part for part in parts if not hasattr(engine, part)]
    told = [
        f"{part} (formerly {old})" if (old := _FORMERLY.get(part)) and hasattr(engine, old) else part
        for part in lacks
    ]
    generate = getattr(engine, "generate", None)
    if generate is not None and not (takes(generate, "request") and takes(generate, "request", "on_tokens")):
        told.append("generate(request: whet.types.Request, on_tokens=None)")
    return told


def takes(function: Callable[..., object], *given: str) -> bool:
    """Whether it can be called with so many positional arguments."""
    try:
        inspect.signature(function).bind(*given)
    except TypeError:
        return False
    except ValueError:  # of a class in C, which does not say
        return True
    return True
