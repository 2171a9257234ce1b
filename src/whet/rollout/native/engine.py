"""The embedded rollout engine: continuous batching over a paged KV cache, in the trainer's process, with its weights.

Everything runs on one event loop: `generate` calls wait for futures; one driver task runs prefill and decode steps and
yields to the other coroutines in between. The driver exists only while there are requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from transformers import PreTrainedModel

from whet.models.attention import PAGE
from whet.models.kernels import Ops
from whet.models.lora import merged
from whet.models.quantised import NUMBERS, Kind, check_products, follow, held, quantise
from whet.rollout.engine import EngineInputs, WeightSource
from whet.rollout.native.graphs import Recorder
from whet.rollout.native.pages import Pages
from whet.rollout.native.runner import Runner
from whet.rollout.native.sampler import is_plain
from whet.rollout.native.scheduler import Counts, Request, Scheduler
from whet.rollout.requests import Decode, StopText, check, ends_of
from whet.rollout.weights import copy_weights
from whet.types import Completion, Sampling, WhetError

log = logging.getLogger(__name__)


class NativeEngine:
    """A `RolloutEngine` on the given module, by reference.

    end_token_ids: the model's own end tokens. decode: needed for stop strings only. max_context: the longest rollout,
    prompt included, in tokens. cache_mb: memory of the KV cache; default: `max_num_seqs` rows of `max_context` tokens.
    prefill_tokens: most tokens of histories computed at once; a longer one is computed in parts. recorder: captures
    decode steps; default: CUDA graphs on CUDA, none elsewhere. quantization: sample with a copy of the module's
    matrices in 8 bits, requantised from the weights of every version; all other parameters are the module's own.

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
        recorder: Recorder | None = None,
        quantization: Kind | None = None,
    ) -> None:
        self.version = version
        self.end_token_ids, self.decode, self.max_context = frozenset(end_token_ids), decode, max_context
        self.quantized = quantization is not None
        module = merged(module) if self.quantized else module
        self.runner = Runner(
            module, ops, max_num_seqs=max_num_seqs, columns=max_context, cache_mb=cache_mb, recorder=recorder
        )
        if quantization is not None:
            self._quantise(quantization)
        pages = Pages(self.runner.pages, PAGE)
        self.scheduler = Scheduler(pages, max_num_seqs=max_num_seqs, prefill_tokens=prefill_tokens)
        self.held: list[Request] = []
        """Came while the engine lets the others finish; they wait for the next version."""
        self.holding = False
        self.running = True
        self.placed = True
        self.broken: str | None = None
        """Why no request is served."""
        self.driver: asyncio.Task[None] | None = None
        self.beat: Callable[[str], object] = lambda what: None
        """Called before every prefill and step: the work goes on."""
        self.span: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
        """Around every prefill and every decode step."""

    @property
    def counts(self) -> Counts:
        """Tokens prefilled and found in the cache, and preemptions, since the engine was created."""
        return self.scheduler.counts

    # -- the seam

    @property
    def module(self) -> PreTrainedModel:
        """What is sampled from."""
        return self.runner.module

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        """See `RolloutEngine`. Raises WhetError for a request that can never be served, and after `close`."""
        if self.broken is not None:
            raise WhetError(self.broken)
        check(
            token_ids,
            sampling,
            vocab=self.runner.vocab,
            max_context=self.max_context,
            decodes=self.decode is not None,
        )
        request = self._request(token_ids, sampling)
        self.scheduler.refuse_impossible(request)
        if self.holding:
            self.held.append(request)
        else:
            self.scheduler.add([request])
            self._wake()
        try:
            return await request.result
        except asyncio.CancelledError:
            self._forget(request)
            raise

    async def load_weights(self, source: WeightSource, version: int) -> None:
        """Rows in flight keep their tokens and continue with the new weights; their cache is recomputed.

        Raises WhetError if a tensor is missing, is given twice or does not fit. Then the version stays and, as the
        weights may be a mix, all requests fail until a full set has been loaded.
        """
        if (source.module is None) == (source.tensors is None):
            raise WhetError("a WeightSource has either a module or tensors")
        self._interrupt()
        self.scheduler.pages.forget()
        if source.module is not None and self.quantized:
            follow(self.module, source.module)
        elif source.module is not None:
            self.runner.adopt(source.module)
        else:
            self._copy(source.tensors or ())
        self.version = version
        self.broken = None
        self.resume()

    async def pause(self, finish: bool) -> None:
        """See `RolloutEngine`. New requests wait for `load_weights` or `resume`."""
        self.holding = True
        if finish and self.scheduler.busy:
            self.running = True
            self._wake()
            if self.driver is not None:
                await asyncio.wait([self.driver])
        self.running = False

    def resume(self) -> None:
        """Resume, with the requests that were kept and those that arrived meanwhile."""
        self.holding, self.running = False, True
        self.scheduler.add(self.held)
        self.held = []
        self._wake()

    async def place(self, device: Literal["gpu", "cpu"]) -> None:
        """The cache and the 8-bit weights are the engine's only memory on the accelerator. Rows in flight wait and
        recompute their cache."""
        self.placed = device == "gpu"
        for weights in held(self.module).values():
            weights.to(self.runner.device if self.placed else torch.device("cpu"))
        if self.placed and self.runner.cache is None:
            self.runner.allocate()
            self._wake()
        elif not self.placed:
            self._interrupt()
            self.scheduler.pages.forget()
            self.runner.release()

    async def close(self) -> None:
        """Requests in flight fail; later ones are refused."""
        self._break("the rollout engine was closed")
        if self.driver is not None:
            await asyncio.wait([self.driver])

    # -- inside

    def _quantise(self, kind: Kind) -> None:
        """After the decoder is there: an unknown model is tried as it was before."""
        check_products(self.runner.device, NUMBERS[kind], key="rollout.quantization")
        left = quantise(self.module, kind, experts=self.runner.decoder.path == "functional")
        log.info("sampling from weights in %s: %d matrices", kind, len(held(self.module)))
        if left:
            log.warning(
                "rollout.quantization=%s: %d matrices are not quantised, e.g. %s: their sides are not multiples of 16, "
                "or their modules are of unknown types",
                kind,
                len(left),
                left[0],
            )

    def _request(self, token_ids: list[int], sampling: Sampling) -> Request:
        stop_text = None
        if sampling.stop and self.decode is not None:
            stop_text = StopText(sampling.stop, self.decode)
        return Request(
            prompt=tuple(token_ids),
            sampling=sampling,
            ends=ends_of(sampling, self.end_token_ids),
            plain=is_plain(sampling),
            result=asyncio.get_running_loop().create_future(),
            stop_text=stop_text,
        )

    def _wake(self) -> None:
        if (
            self.running
            and self.placed
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
        while self.running and self.placed and self.scheduler.busy:
            self.beat("decoding")
            waits = self.scheduler.unfinished is not None and not stepped and self.runner.live.requests
            admissions = [] if waits else self.scheduler.admit()
            with self.span("prefill" if admissions else "decode"):
                self._finish(self.runner.prefill(admissions) if admissions else self._step())
            stepped = not admissions
            await asyncio.sleep(0)

    def _step(self) -> list[Request]:
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

    def _finish(self, requests: list[Request]) -> None:
        for request in requests:
            self.scheduler.release(request)
            self._stamp(request)
            if not request.result.done():
                request.result.set_result(request.completion())

    def _stamp(self, request: Request) -> None:
        """What was sampled since the last stamp is of the present version."""
        request.versions += [self.version] * (len(request.token_ids) - len(request.versions))

    def _interrupt(self) -> None:
        """Rows in flight become waiting requests that go on where they were."""
        self.runner.interrupt()
        requests = list(self.scheduler.running)
        for request in requests:
            self._stamp(request)
        self.scheduler.put_back(requests)

    def _forget(self, request: Request) -> None:
        """The caller has gone: its row, or its place in the queue, is free. Nothing to do if it has ended."""
        if request in self.scheduler.running:
            self.runner.drop(request)
            self.scheduler.release(request)
        elif request in self.held:
            self.held.remove(request)
        else:
            self.scheduler.forget(request)

    def _copy(self, tensors: Iterable[tuple[str, object]]) -> None:
        try:
            copy_weights(self.module, tensors)  # type: ignore[arg-type]
        except WhetError as error:
            self._break(f"the engine's weights are incomplete: {error}")
            raise

    def _break(self, reason: str) -> None:
        self.broken = reason
        self._fail(WhetError(reason))

    def _fail(self, error: BaseException) -> None:
        """Everyone who waits gets this error."""
        requests = [*self.scheduler.requests, *self.held]
        self.runner.clear()
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
    )
    engine.beat, engine.span = inputs.beat, inputs.span
    return engine
