"""The reference rollout engine: the model's own transformers forward, one request and one token per call.

It is slow and deliberately simple: eager attention, transformers' own cache, the sampler and the random numbers of the
native engine. In float32 the two engines give the same tokens (except where a random number falls between two roundings
of the same probability) and log-probs within 1e-5.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from whet.guard import pulse
from whet.models.torch_ops import bad_logits
from whet.rollout.engine import (
    PARTS,
    Capabilities,
    EngineInputs,
    Health,
    OnTokens,
    Part,
    WeightUpdate,
    own_engine,
)
from whet.rollout.gate import Gate
from whet.rollout.native import sampler
from whet.rollout.native.scoring import as_pairs
from whet.rollout.requests import Decode, StopText, check, check_score, ends_of
from whet.rollout.weights import copy_weights
from whet.seeds import uniforms
from whet.types import (
    Completion,
    Receipt,
    Request,
    Sampling,
    ScoreRequest,
    TokenLogprobs,
    WhetError,
    spans_of,
)


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
    on_tokens: OnTokens | None = None


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
        self.gate = Gate(lambda: self.version)
        self.since, self.requests, self.tokens = time.time(), 0, 0
        self.span: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
        """Around the forward of every token."""

    # -- the seam

    @property
    def can(self) -> Capabilities:
        return own_engine(stop_texts=self.decode is not None, device=self.module.device.type)

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        """See `RolloutEngine`."""
        check(request, vocab=self._vocab, max_context=self.max_context, decodes=self.decode is not None)
        sampling, prompt = request.sampling, list(request.prompt)
        uniform_T = torch.from_numpy(uniforms(sampling.key, len(prompt), sampling.max_tokens))
        reply = Reply(prompt, sampling, uniform_T, on_tokens=on_tokens)
        async with self.gate.passing(request.least_version):
            stopped = await self._sample(reply)
        self.requests += 1
        return Completion(
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
            sample_logprobs=reply.sample_logprobs,
            spans=spans_of(reply.versions),
            finish_reason="stop" if stopped else "length",
        )

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        """See `RolloutEngine`."""
        for request in requests:
            check_score(request, vocab=self._vocab, max_context=self.max_context)
        scored = []
        async with self.gate.passing():
            for request in requests:
                await self.gate.step()
                scored.append(self._scored(request))
        self.requests += len(scored)
        return scored

    async def update_weights(self, update: WeightUpdate) -> Receipt:
        """See `RolloutEngine`; a request in flight keeps its tokens and goes on under the new weights."""
        self.loads += 1
        if update.module is not None:
            self.module = update.module
        else:
            self._copy(update)
        self.version = update.version
        self.gate.updated()
        return Receipt("the engine", update.version)

    async def pause(self, finish: bool) -> None:
        await self.gate.pause(finish)

    async def resume(self) -> None:
        self.gate.resume()

    async def place(self, device: Literal["gpu", "cpu"], what: frozenset[Part] = PARTS) -> None:
        """Nothing to give back: the module is the trainer's, a cache lives as long as its request."""

    async def health(self) -> Health:
        return Health(since=self.since, requests=self.requests, tokens=self.tokens)

    async def close(self) -> None:
        self.gate.close("the rollout engine was closed")

    # -- inside

    @property
    def _vocab(self) -> int:
        return int(self.module.get_output_embeddings().out_features)

    def _copy(self, update: WeightUpdate) -> None:
        try:
            copy_weights(self.module, update.named())
        except Exception as error:  # also of files that tensors are read from
            self.gate.close(f"the engine's weights are incomplete: {error}")
            raise

    async def _sample(self, reply: Reply) -> bool:
        """Token by token to the end; whether it ended by itself."""
        s = reply.sampling
        ends = ends_of(s, self.end_token_ids)
        text = StopText.of(s, self.decode)
        for _ in range(s.max_tokens):
            await self.gate.step()
            with self.span("decode"):
                token = self._next(reply, ends)
            pulse.beat("decoding")
            if reply.on_tokens is not None:
                reply.on_tokens([token])
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
        if not logp_V[token].isfinite():
            raise bad_logits(1)
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
        self.tokens += len(feed)
        ids = torch.tensor([feed], device=self.module.device)
        with as_reference(self.module):
            out = self.module(input_ids=ids, past_key_values=reply.cache, use_cache=True)
        logits_1V = out.logits[:, -1].float()
        if not bool(logits_1V.isfinite().all()):
            raise WhetError(
                "the model's logits are not finite; the policy's weights have most likely diverged"
            )
        return logits_1V

    @torch.no_grad()
    def _scored(self, request: ScoreRequest) -> TokenLogprobs:
        ids_1T = torch.tensor([request.token_ids], device=self.module.device)
        with as_reference(self.module), self.span("score"):
            logits_TV = self.module(input_ids=ids_1T, use_cache=False).logits[0].float()
        logp_AV = (logits_TV[request.start - 1 : -1] / request.temperature).log_softmax(-1)
        logp_A = logp_AV.gather(1, ids_1T[0, request.start :, None])[:, 0]
        self.tokens += len(request.token_ids)
        top = as_pairs(*logp_AV.topk(request.top_k)) if request.top_k else []
        return TokenLogprobs(version=self.version, logprobs=logp_A.tolist(), top=top)


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
