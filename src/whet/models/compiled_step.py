"""A whole decode step in one call of C, for rows for which temperature is all: the model, the sampler, and what they
write down. A small model's step is otherwise mostly calls: they took a third of it.

What is computed is what `rollout.native.runner` computes operation by operation, by the same kernels in the same order,
so bits are the same.

Letters: B rows, P pages of a row, V vocabulary, D hidden, T positions.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from ctypes import c_float, c_int64, c_void_p
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from whet.models.activations import NewRows
from whet.models.attention import KvCache
from whet.models.compiled import c_library, check_memory
from whet.models.compiled_layers import LayersStruct, check_kept, computes, described, keep
from whet.models.forward import Decoder
from whet.models.fused_forward import PlainModel
from whet.models.logprobs import OutputHead, Temperature
from whet.models.products import multiplies, room
from whet.models.torch_ops import bad_logits


class KeptStep(NamedTuple):
    """What is kept of a step's activations."""

    number: Tensor
    """[pages, PAGE] int64: the number of the row that a token in the cache has, or -1."""
    first: int
    """The number of the step's first row; -1: there is no room."""
    rows: NewRows | None


class Cells(NamedTuple):
    """What is read and written where a row stands, by cell: see `runner.Runner`."""

    uniform: Tensor
    token: Tensor
    logp: Tensor
    sample_logp: Tensor


class _Step(ctypes.Structure):
    """Step of kernels.c."""

    _fields_ = [
        ("layers", LayersStruct),
        *((name, c_void_p) for name in ("embed", "norm", "head", "cos", "sin")),
        *((name, c_int64) for name in ("V", "positions", "pages")),
        *((name, c_void_p) for name in ("state", "table")),
        *((name, c_int64) for name in ("rows", "table_n")),
        *(("heat", c_void_p), ("temperature", c_float)),
        *((name, c_void_p) for name in ("uniform", "token", "logp", "sample_logp", "ends", "number")),
        ("first_number", c_int64),
    ]


class CompiledStep:
    """Of one model over one cache. It holds addresses: weights that are updated in place are seen, and when a parameter
    has moved, everything is looked at again."""

    @classmethod
    def of(cls, decoder: Decoder, cache: KvCache) -> CompiledStep | None:
        """None where no step of it is made in one call."""
        plain, weight = decoder.plain, decoder.head.linear.weight
        if plain is None or weight.device.type != "cpu" or weight.dtype is not torch.float32:
            return None
        return cls(plain, decoder.head, cache)

    def __init__(self, model: PlainModel, head: OutputHead, cache: KvCache) -> None:
        self.model, self.head, self.cache = model, head, cache
        owners = (model.base.embed_tokens, *model.base.layers.modules(), model.base.norm, head.linear)
        self.owned = [module._parameters for module in owners if module._parameters]
        self.addresses: list[int] = []
        self.step: _Step | None = None
        self.fits: Callable[[], Tensor | None] = lambda: None
        """The first kind of the room for activations that was found to fit. By a weak reference: it may be given back
        while the step stays."""
        self.memory: object = None
        """What `step` points to."""

    def __call__(
        self,
        state: Tensor,
        table_BP: Tensor,
        temperature: Temperature,
        *,
        longest: int,
        cells: Cells,
        ends: Tensor,
        kept: Callable[[int], KeptStep] | None = None,
    ) -> list[int] | None:
        """Moves `state` on by a token; returns the rows that end with it. None where C does not compute this model.

        state: [6, B], see `runner.LiveRows`. longest: most tokens a row has in the cache. ends: the end sets.
        kept: where the activations of so many tokens go.
        Errors: WhetError where the logits of a row allow no sample, ValueError for a page that does not exist."""
        step = self._described()
        if step is None:
            return None
        cos_TD, sin_TD = self.model.rotary.until(longest + 1)
        step.cos, step.sin, step.positions = cos_TD.data_ptr(), sin_TD.data_ptr(), len(cos_TD)
        step.state, step.table, step.ends = state.data_ptr(), table_BP.data_ptr(), ends.data_ptr()
        step.rows, step.table_n = table_BP.shape
        step.heat = temperature.data_ptr() if isinstance(temperature, Tensor) else None
        step.temperature = 1.0 if isinstance(temperature, Tensor) else temperature
        step.uniform, step.token, step.logp, step.sample_logp = (x.data_ptr() for x in cells)
        step.layers.cached.threads = torch.get_num_threads()
        step.number, step.layers.kept[0] = None, None
        if kept is not None:
            self._keep(step, kept(step.rows))
        ended_B = room(step.rows, dtype=torch.uint8)
        bad = c_library().whet_decode_step(ctypes.byref(step), ended_B.data_ptr())
        if bad > 0:
            raise bad_logits(bad)
        if bad == -2:
            raise ValueError(
                f"a live row has a token beyond the vocabulary of {step.V}, or a page that is not one of the cache's "
                f"{step.pages}"
            )
        check_memory(bad)
        return np.flatnonzero(ended_B.numpy()).tolist()

    def _keep(self, step: _Step, kept: KeptStep) -> None:
        step.number, step.first_number = kept.number.data_ptr(), kept.first
        step.pages = min(step.pages, len(kept.number))  # the cache has one more, for padded rows
        if kept.rows is None:
            return
        first = kept.rows.kinds[0]
        if first is not self.fits():
            weights = self.model.weights()
            assert weights is not None
            check_kept(kept.rows, weights, step.layers.D, step.layers.cached.heads)
            self.fits = weakref.ref(first)
        keep(step.layers, kept.rows)

    def _described(self) -> _Step | None:
        """What does not change from step to step. None where C does not compute this model, or not now: something asks
        to be told of products."""
        if not multiplies(self.cache.k):
            return None
        addresses = [t.data_ptr() for tensors in self.owned for t in tensors.values() if t is not None]
        if addresses == self.addresses:
            return self.step
        self.addresses, self.step, self.fits = addresses, None, lambda: None
        model, linear, cache = self.model, self.head.linear, self.cache
        weights = model.weights()
        if (
            weights is None
            or model.numbers.offset
            or type(linear) is not nn.Linear
            or linear.bias is not None
        ):
            return None
        own = (model.base.embed_tokens.weight, model.base.norm.weight, linear.weight)
        flat = [t for layer in weights for t in layer if t is not None]
        if not computes((*own, cache.k, cache.v, *model.rotary.until(1), *flat), model.numbers):
            return None
        if own[0].shape != own[2].shape or self.head.scale != 1.0 or self.head.softcap is not None:
            return None
        layers, self.memory = described(weights, model.windows, model.numbers, cache.k, cache.v)
        self.step = _Step(layers, *(t.data_ptr() for t in own), V=len(own[0]), pages=cache.pages)
        return self.step
