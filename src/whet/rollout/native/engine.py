"""The embedded rollout engine: continuous batching over a paged KV cache, in the trainer's process, with its weights.

Everything runs on one event loop: `generate` calls wait for futures; one driver task runs prefill and decode steps and
yields to the other coroutines in between. The driver exists only while there are requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from transformers import PreTrainedModel

from whet.config.sections.rollout import Quantization
from whet.models.activations import Activations
from whet.models.attention import PAGE
from whet.models.kernels import Ops
from whet.models.lora import merged
from whet.models.quantised import BLOCK, NUMBERS, SIDE, check_products, follow, held, quantise
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
from whet.rollout.gate import News
from whet.rollout.native.graphs import GraphRecorder
from whet.rollout.native.pages import Pages
from whet.rollout.native.runner import Runner
from whet.rollout.native.sampler import is_plain
from whet.rollout.native.scheduler import Counts, Generation, Scheduler
from whet.rollout.native.scoring import packs, scored
from whet.rollout.requests import Decode, StopText, Stream, check, check_score, ends_of
from whet.rollout.weights import copy_weights
from whet.types import Completion, Receipt, Request, ScoreRequest, TokenLogprobs, WhetError

log = logging.getLogger(__name__)

CLOSED = "the rollout engine was closed"


class NativeEngine:
    """A `RolloutEngine` on the given module, by reference.

    end_token_ids: the model's own end tokens. decode: needed for stop strings only. max_context: the longest rollout,
    prompt included, in tokens. cache_mb: memory of the KV cache; default: `max_num_seqs` rows of `max_context` tokens.
    prefill_tokens: most tokens of histories computed at once; a longer one is computed in parts. recorder: captures
    decode steps; default: CUDA graphs on CUDA, none elsewhere. quantization: sample with a copy of the module's
    matrices in 8 bits, requantised from the weights of every version; all other parameters are the module's own.
    experts: completions have the experts of their tokens. kept: where the activations of its tokens stay.

    Raises ConfigError where the device does not support such matrix products, or the model has no such matrices.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        ops: Ops,
        *,
        end_token_ids: Collection[int],
        max_context: int,
        max_num_seqs: int = 256,
        cache_mb: int | None = None,
        prefill_tokens: int = 4096,
        decode: Decode | None = None,
        version: int = 0,
        recorder: GraphRecorder | None = None,
        quantization: Quantization | None = None,
        experts: bool = False,
        kept: Activations | None = None,
    ) -> None:
        self.version = version
        self.end_token_ids, self.decode, self.max_context = frozenset(end_token_ids), decode, max_context
        self.quantized = quantization is not None
        module = merged(module) if self.quantized else module
        self.runner = Runner(
            module,
            ops,
            max_num_seqs=max_num_seqs,
            columns=max_context,
            cache_mb=cache_mb,
            recorder=recorder,
            experts=experts,
            kept=kept,
        )
        if quantization is not None:
            self._quantise(quantization)
        pages = Pages(self.runner.pages, PAGE)
        self.scheduler = Scheduler(pages, max_num_seqs=max_num_seqs, prefill_tokens=prefill_tokens)
        self.held: list[Generation] = []
        """Came while the engine lets the others finish; they wait for the next version."""
        self.holding = False
        self.running = True
        self.away: frozenset[Part] = frozenset()
        """What is not on the accelerator."""
        self.broken: str | None = None
        """Why no request is served."""
        self.closed = False
        self.driver: asyncio.Task[None] | None = None
        self.streams: dict[Generation, Stream] = {}
        """Of the requests whose tokens are given to a consumer as they are sampled."""
        self.news = News()
        """Other weights are here, or requests are served again, or never will be."""
        self.since, self.requests, self.tokens = time.time(), 0, 0
        self.beat: Callable[[str], object] = lambda what: None
        """Called before every prefill and step: the work goes on."""
        self.span: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
        """Around every prefill and every decode step."""

    @property
    def counts(self) -> Counts:
        """Tokens prefilled and found in the cache, and preemptions, since the engine was created."""
        return self.scheduler.counts

    @property
    def kept(self) -> Activations | None:
        """Where activations are kept for training; None: nowhere."""
        return None if self.runner.kept is None else self.runner.kept.kept

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside it the activations of all tokens are kept: training follows with the same weights. No row may be live
        at its start."""
        assert self.kept is not None
        self.scheduler.pages.forget()  # what an evaluation has left in the cache has no activations
        self.kept.forget()
        self.kept.on = True
        try:
            yield
        finally:
            self.kept.on = False

    # -- the seam

    @property
    def module(self) -> PreTrainedModel:
        """What is sampled from."""
        return self.runner.module

    @property
    def can(self) -> Capabilities:
        device = self.runner.device.type
        return own_engine(stop_texts=self.decode is not None, experts=True, device=device)

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        """See `RolloutEngine`."""
        self._refuse_broken()
        decodes = self.decode is not None
        check(request, vocab=self.runner.vocab, max_context=self.max_context, decodes=decodes)
        row = self._row(request)
        self.scheduler.refuse_impossible(row)
        least = request.least_version
        if least is not None:
            await self.news.until(lambda: self._reached(least))
        if on_tokens is not None:
            self.streams[row] = Stream(on_tokens)
        if self.holding:
            self.held.append(row)
        else:
            self.scheduler.add([row])
            self._wake()
        try:
            return await row.result
        except asyncio.CancelledError:
            self._forget(row)
            raise
        finally:
            self.streams.pop(row, None)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        """See `RolloutEngine`. Where sampling and training agree to the bit, so do these and the trainer's."""
        for request in requests:
            check_score(request, vocab=self.runner.vocab, max_context=self.max_context)
        found: list[TokenLogprobs] = []
        for pack in packs(requests, self.scheduler.prefill_tokens):
            await asyncio.sleep(0)
            await self.news.until(self._serves)
            self.beat("scoring")
            with self.span("score"):
                found += scored(self.runner.decoder, self.runner.ops, pack, version=self.version)
            self.tokens += sum(len(r.token_ids) for r in pack)
        self.requests += len(requests)
        return found

    async def update_weights(self, update: WeightUpdate) -> Receipt:
        """Rows in flight keep their tokens and continue with the new weights; their cache is recomputed.

        Raises WhetError if a tensor is missing, is given twice or does not fit, and what reading one raises. Then the
        version stays and, as the weights may be a mix, all requests fail until a full set has been loaded.
        """
        if self.closed:
            raise WhetError(CLOSED)
        self._interrupt()
        self.scheduler.pages.forget()
        if update.module is None or self.quantized:
            self._copy(update)
        else:
            self.runner.adopt(update.module)
        self.version = update.version
        self.broken = None
        await self.resume()
        return Receipt("the engine", update.version)

    async def pause(self, finish: bool) -> None:
        """See `RolloutEngine`. New requests wait for `update_weights` or `resume`."""
        self.holding = True
        if finish and self.scheduler.busy:
            self.running = True
            self._wake()
            if self.driver is not None:
                await asyncio.wait([self.driver])
        self.running = not self.holding  # it may have been resumed meanwhile

    async def resume(self) -> None:
        """Resume, with the requests that were kept and those that arrived meanwhile."""
        self.holding, self.running = False, True
        self.scheduler.add(self.held)
        self.held = []
        self._wake()
        self.news.tell()

    async def place(self, device: Literal["gpu", "cpu"], what: frozenset[Part] = PARTS) -> None:
        """The cache and the quantised weights are the engine's only memory on the accelerator. Rows in flight wait and
        recompute their cache."""
        here = device == "gpu"
        self.away = self.away - what if here else self.away | what
        if "weights" in what:
            for weights in held(self.module).values():
                weights.to(self.runner.device if here else torch.device("cpu"))
        if "cache" in what and not here:
            self._interrupt()
            self.scheduler.pages.forget()
            self.runner.release()
        elif "cache" in what and self.runner.cache is None:
            self.runner.allocate()
        self._wake()
        self.news.tell()

    async def health(self) -> Health:
        """May be asked from another thread."""
        return Health(since=self.since, requests=self.requests, tokens=self.tokens)

    async def close(self) -> None:
        """Requests in flight fail; later ones are refused."""
        self.closed = True
        self._break(CLOSED)
        if self.driver is not None:
            await asyncio.wait([self.driver])

    # -- inside

    def _quantise(self, kind: Quantization) -> None:
        """After the decoder is there: an unknown model is tried as it was before."""
        if kind in NUMBERS:
            check_products(self.runner.device, NUMBERS[kind], key="rollout.quantization")
        left = quantise(self.module, kind, experts=self.runner.decoder.path == "functional")
        log.info("sampling from weights in %s: %d matrices", kind, len(held(self.module)))
        if left:
            log.warning(
                "rollout.quantization=%s: %d matrices are not quantised, e.g. %s: their sides are not multiples of %d, "
                "or their modules are of unknown types",
                kind,
                len(left),
                left[0],
                SIDE if kind in NUMBERS else BLOCK,
            )

    def _refuse_broken(self) -> None:
        if self.broken is not None:
            raise WhetError(self.broken)

    def _reached(self, version: int) -> bool:
        self._refuse_broken()
        return self.version >= version

    def _serves(self) -> bool:
        """The weights are here, and nobody is about to change them."""
        self._refuse_broken()
        return self.running and not self.holding and not self.away

    def _row(self, request: Request) -> Generation:
        sampling = request.sampling
        return Generation(
            prompt=request.prompt,
            sampling=sampling,
            ends=ends_of(sampling, self.end_token_ids),
            plain=is_plain(sampling),
            result=asyncio.get_running_loop().create_future(),
            stop_text=StopText.of(sampling, self.decode),
        )

    def _wake(self) -> None:
        if (
            self.running
            and not self.away
            and self.scheduler.busy
            and (self.driver is None or self.driver.done())
        ):
            self.driver = asyncio.get_running_loop().create_task(self._drive())
            self.driver.add_done_callback(self._driven)

    async def _drive(self) -> None:
        """Prefills as long as anyone can be let in, else a step, until there is no work. Between the parts of a long
        history live rows go on."""
        await asyncio.sleep(0)  # a whole step's requests arrive before the first prefill
        stepped = True
        while self.running and not self.away and self.scheduler.busy:
            self.beat("decoding")
            waits = self.scheduler.unfinished is not None and not stepped and self.runner.live.requests
            admissions = [] if waits else self.scheduler.admit()
            fed = sum(a.end - a.start for a in admissions) or len(self.runner.live.requests)
            with self.span("prefill" if admissions else "decode"):
                self._finish(self.runner.prefill(admissions) if admissions else self._step())
            stepped = not admissions
            self.tokens += fed
            if self.streams:
                self._stream()
            await asyncio.sleep(0)

    def _step(self) -> list[Generation]:
        """One more token for every live row that has a page for it. Returns the requests that have ended with it."""
        while (request := self.scheduler.excess()) is not None:
            self.runner.drop(request)
            self._stamp(request)
            self.scheduler.preempt(request)
        self.runner.extend(self.scheduler.grow())
        return self.runner.step()

    def _driven(self, driver: asyncio.Task[None]) -> None:
        """The driver has ended. Its error, if any, is the error of everyone who waits: nobody waits for
        ever."""
        error = None if driver.cancelled() else driver.exception()
        if error is not None:
            self._fail(error)

    def _stream(self) -> None:
        """Give the consumers what the live rows have sampled."""
        for row, count, token in self.runner.newest():
            if (stream := self.streams.get(row)) is not None:
                self._given(row, stream.next, count, token)

    def _given(self, row: Generation, give: Callable[..., None], *what: object) -> None:
        """Call a consumer; its error is its own request's."""
        try:
            give(*what)
        except Exception as error:  # noqa: BLE001  foreign code
            self._forget(row)
            if not row.result.done():
                row.result.set_exception(error)

    def _finish(self, requests: list[Generation]) -> None:
        for request in requests:
            self.scheduler.release(request)
            self._stamp(request)
            self.requests += 1
            if (stream := self.streams.get(request)) is not None:
                self._given(request, stream.upto, request.token_ids)
            if not request.result.done():
                request.result.set_result(request.completion())

    def _stamp(self, request: Generation) -> None:
        """What was sampled since the last stamp is of the present version."""
        request.versions += [self.version] * (len(request.token_ids) - len(request.versions))

    def _interrupt(self) -> None:
        """Rows in flight become waiting requests that go on where they were."""
        self.runner.interrupt()
        requests = list(self.scheduler.running)
        for request in requests:
            self._stamp(request)
        self.scheduler.put_back(requests)

    def _forget(self, request: Generation) -> None:
        """The caller has gone: its row, or its place in the queue, is free. Nothing to do if it has ended."""
        if request in self.scheduler.running:
            self.runner.drop(request)
            self.scheduler.release(request)
        elif request in self.held:
            self.held.remove(request)
        else:
            self.scheduler.forget(request)

    def _copy(self, update: WeightUpdate) -> None:
        try:
            if update.module is None:
                copy_weights(self.module, update.named())
            else:
                follow(self.module, update.module)
        except Exception as error:  # also of files that tensors are read from
            self._break(f"the engine's weights are incomplete: {error}")
            raise

    def _break(self, reason: str) -> None:
        self.broken = reason
        self._fail(WhetError(reason))
        self.news.tell()

    def _fail(self, error: BaseException) -> None:
        """Everyone who waits gets this error."""
        requests = [*self.scheduler.requests, *self.held]
        self.runner.clear(again=not self.closed)
        self.scheduler.clear()
        self.held = []
        for request in requests:
            if not request.result.done():
                request.result.set_exception(error)


def opened(inputs: EngineInputs) -> NativeEngine:
    """`rollout.engine: native`."""
    engine = NativeEngine(
        inputs.model,
        inputs.ops,
        end_token_ids=inputs.end_token_ids,
        decode=inputs.decode,
        max_num_seqs=inputs.max_num_seqs,
        max_context=inputs.max_context,
        cache_mb=inputs.cache_mb,
        quantization=inputs.quantization,
        experts=inputs.experts,
        kept=inputs.kept,
    )
    engine.beat, engine.span = inputs.beat, inputs.span
    return engine
