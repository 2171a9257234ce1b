"""The reference rollout engine: the model's own transformers forward, one request and one token per call.

It is slow and deliberately simple: eager attention, transformers' own cache, the sampler and the random numbers of the
native engine. In float32 the two engines give the same tokens (except where a random number falls between two roundings
of the same probability) and log-probs within 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from whet.guard import pulse
from whet.rollout.engine import EngineInputs, WeightSource
from whet.rollout.gate import Gate
from whet.rollout.native import sampler
from whet.rollout.requests import Decode, StopText, check, ends_of
from whet.rollout.weights import copy_weights
from whet.seeds import uniforms
from whet.types import Completion, Sampling, WhetError


@dataclass(eq=False)
class Reply:
    """One request and what has been sampled for it."""

    prompt: list[int]
    sampling: Sampling
    uniform_T: Tensor
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sample_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cache: DynamicCache | None = None
    cache_load: int = -1
    """Number of the weights the cache was computed with."""


class HfEngine:
    """A `RolloutEngine` on a transformers module, by reference. Arguments as for `NativeEngine`."""

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        end_token_ids: Collection[int],
        max_context: int,
        decode: Decode | None = None,
        version: int = 0,
    ) -> None:
        self.module, self.version, self.decode, self.max_context = module, version, decode, max_context
        self.end_token_ids = frozenset(end_token_ids)
        self.loads = 0
        self.gate = Gate()
        self.span: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
        """Around the forward of every token."""

    # -- the seam

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        """See `RolloutEngine`. Raises WhetError for a request that can never be served, and after `close`."""
        vocab = self.module.get_output_embeddings().out_features
        decodes = self.decode is not None
        check(token_ids, sampling, vocab=vocab, max_context=self.max_context, decodes=decodes)
        uniform_T = torch.from_numpy(uniforms(sampling.key, len(token_ids), sampling.max_tokens))
        reply = Reply(list(token_ids), sampling, uniform_T)
        async with self.gate.passing():
            stopped = await self._sample(reply)
        return Completion(
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
            sample_logprobs=reply.sample_logprobs,
            versions=reply.versions,
            finish_reason="stop" if stopped else "length",
        )

    async def load_weights(self, source: WeightSource, version: int) -> None:
        """See `RolloutEngine`; a request in flight keeps its tokens and goes on under the new weights."""
        if (source.module is None) == (source.tensors is None):
            raise WhetError("a WeightSource has either a module or tensors")
        self.loads += 1
        if source.module is not None:
            self.module = source.module
        else:
            self._copy(source)
        self.version = version
        self.gate.closed = None
        self.gate.resume()

    async def pause(self, finish: bool) -> None:
        await self.gate.pause(finish)

    def resume(self) -> None:
        """Go on without new weights."""
        self.gate.resume()

    async def place(self, device: Literal["gpu", "cpu"]) -> None:
        """Nothing to give back: the module is the trainer's, a cache lives as long as its request."""

    async def close(self) -> None:
        self.gate.close("the rollout engine was closed")

    # -- inside

    def _copy(self, source: WeightSource) -> None:
        try:
            copy_weights(self.module, source.tensors or ())
        except WhetError as error:
            self.gate.close(f"the engine's weights are incomplete: {error}")
            raise

    async def _sample(self, reply: Reply) -> bool:
        """Token by token to the end; whether it ended by itself."""
        s = reply.sampling
        ends = ends_of(s, self.end_token_ids)
        text = StopText(s.stop, self.decode) if s.stop and self.decode is not None else None
        for _ in range(s.max_tokens):
            await self.gate.step()
            with self.span("decode"):
                token = self._next(reply, ends)
            pulse.beat("decoding")
            if token in ends or (text is not None and text.push(token)):
                return True
        return False

    @torch.no_grad()
    def _next(self, reply: Reply, ends: frozenset[int]) -> int:
        """Sample one token and write it down."""
        s, count = reply.sampling, len(reply.token_ids)
        raw_1V = self._logits(reply)
        banned_1V, seen_1V = torch.zeros(2, 1, raw_1V.shape[1], dtype=torch.bool, device=raw_1V.device)
        banned_1V[:, list(ends) if count < s.min_tokens else []] = True
        seen_1V[:, reply.prompt + reply.token_ids] = True
        filters = sampler.Filters.of([s], raw_1V.device)
        picked_1V = sampler.filtered(raw_1V, filters, seen_BV=seen_1V, banned_BV=banned_1V)
        uniform_1 = reply.uniform_T[count : count + 1].to(raw_1V.device)
        token_1, sample_logp_1 = sampler.pick(picked_1V, filters, uniform_1)
        logp_V = (raw_1V / filters.temperature_B[:, None]).log_softmax(-1)[0]
        token = int(token_1)
        reply.token_ids.append(token)
        reply.logprobs.append(float(logp_V[token]))
        reply.sample_logprobs.append(float(sample_logp_1))
        reply.versions.append(self.version)
        return token

    def _logits(self, reply: Reply) -> Tensor:
        """[1, V] float32 after the last token. After new weights the cache is computed anew."""
        tokens = [*reply.prompt, *reply.token_ids]
        if reply.cache is None or reply.cache_load != self.loads:
            reply.cache, reply.cache_load = DynamicCache(config=self.module.config), self.loads
            feed = tokens
        else:
            feed = tokens[-1:]
        ids = torch.tensor([feed], device=self.module.device)
        with as_reference(self.module):
            out = self.module(input_ids=ids, past_key_values=reply.cache, use_cache=True)
        logits_1V = out.logits[:, -1].float()
        if not bool(logits_1V.isfinite().all()):
            raise WhetError(
                "the model's logits are not finite; the policy's weights have most likely diverged"
            )
        return logits_1V


@contextmanager
def as_reference(module: PreTrainedModel) -> Iterator[None]:
    """Eager attention and no dropout; afterwards the module is as its owner left it."""
    attention, training = module.config._attn_implementation, module.training
    module.set_attn_implementation("eager")
    module.eval()
    try:
        yield
    finally:
        module.set_attn_implementation(attention)
        module.train(training)


def opened(inputs: EngineInputs) -> HfEngine:
    """`rollout.engine: hf`."""
    engine = HfEngine(
        inputs.model,
        end_token_ids=inputs.end_token_ids,
        decode=inputs.decode,
        max_context=inputs.max_context,
    )
    engine.span = inputs.span
    return engine
