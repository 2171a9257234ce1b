"""A name for the arithmetic of this process, so that the bits of two machines can be compared.

A run in float32 on a CPU has the same bits wherever `digest` is the same: it is computed from the results of the
products and the kernels on fixed numbers. The manifest keeps it, and a run that resumes on another machine reports
whether it changed.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, partial
from typing import get_args

import torch
import xxhash
from torch import Tensor

from whet.models import elementwise, products
from whet.models.attention import PackedAttention, Segments
from whet.models.kernels import Kind, Ops, load
from whet.models.precision import sum_of_squares
from whet.models.torch_ops import Act
from whet.track.manifest import cpu_name

VERSION = 4
"""Of the arithmetic: raise it with every change of bits, or of what the digest is taken of, and take PORTABLE anew."""
PORTABLE = "b2ad0b0576b8ff0b"
"""The digest on every processor with AVX2 and fused multiply-add, where the kernels are compiled."""
PORTABLE_HALVES = {"bfloat16": "2f10fd19fc0d2a61", "float16": "e3ac4dd4c6321f7c"}
"""The same of half precision, where the products are whet's own, too."""


@dataclass(frozen=True)
class Arithmetic:
    products: str
    """Who multiplies: compiled, onednn, torch."""
    kernels: str
    """What computes between the products: compiled, torch."""
    digest: str

    @property
    def portable(self) -> bool:
        return self.digest == PORTABLE

    def __str__(self) -> str:
        how = f"products {self.products}, kernels {self.kernels}, {self.digest}"
        return f"arithmetic {VERSION}, {_kind(self.portable)} ({how})"


@cache
def arithmetic(ops: Ops) -> Arithmetic:
    """The arithmetic of float32 on this CPU; takes some milliseconds at the first call."""
    return Arithmetic(products.chosen().name, ops.name, _digest(ops))


def facts(
    device: str,
    *,
    kernels: Kind,
    halves: Collection[str] = (),
    torch_products: bool = False,
) -> dict[str, str | None]:
    """What determines the bits of a run's numbers, for the manifest: not the CPU, where the arithmetic is portable; who
    multiplies each of `halves`, the dtypes of half precision that parameters have. torch_products: torch multiplies
    some matrices, as in autocast and in Muon."""
    told: dict[str, str | None] = {"torch": torch.__version__, "machine": platform.machine()}
    if device != "cpu":
        return told | {"device": torch.cuda.get_device_name()}
    ops = load(kernels)
    found = arithmetic(ops)
    told |= {"version": str(VERSION), "kernels": found.kernels, "digest": found.digest}
    told |= {name: products.half_by(getattr(torch, name)) for name in sorted(halves)}
    travels = found.portable and not torch_products and all(portable_half(name, ops) for name in halves)
    return told if travels else told | {"cpu": cpu_name()}


def told(ops: Ops, dtypes: Collection[str]) -> str:
    """For people: whose bits those of float32 are, and those of the dtypes of half precision among these."""
    lines = [f"float32 on this CPU: {arithmetic(ops)}"]
    who = {"tiles": "by the rule of tiles", "float32": "in float32, rounded", "torch": "by torch"}
    for name in sorted({*dtypes} - {"float32"}):
        dtype = getattr(torch, name)
        how = f"products {who[products.half_by(dtype)]}, {_digest(ops, dtype)}"
        lines.append(f"{name} on this CPU: {_kind(portable_half(name, ops))} ({how})")
    return "\n".join(lines)


def _kind(portable: bool) -> str:
    if portable:
        return "the same bits on every CPU with AVX2 and fused multiply-add"
    return "bits of this machine and its libraries"


def portable_half(name: str, ops: Ops) -> bool:
    """Whether numbers of this dtype have the same bits on every CPU with AVX2 and fused multiply-add."""
    dtype = getattr(torch, name)
    return products.half_by(dtype) != "torch" and _digest(ops, dtype) == PORTABLE_HALVES[name]


@torch.no_grad()
def _digest(ops: Ops, dtype: torch.dtype = torch.float32) -> str:
    found = xxhash.xxh3_64()
    for tensor in _results(ops, partial(_numbers, dtype=dtype)):
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _results(ops: Ops, numbers: Callable[..., Tensor]) -> list[Tensor]:
    """Odd sizes, more terms than a chain has, a window and a shared prefix: what could round otherwise."""
    x_ND, w_FD, v_FD = numbers(37, 320), numbers(70, 320), numbers(320) + 1.0
    y_NF = products.linear(x_ND, w_FD)
    normed_ND, sum_ND = ops.add_rms_norm(x_ND, numbers(37, 320) * 3.0, v_FD, eps=1e-6)
    q_NHD, k_NKD = numbers(37, 4, 16) * 4.0, numbers(37, 2, 16) * 4.0
    angle_ND = numbers(37, 16) * 6.0
    turned_NHD = ops.norm_rope(q_NHD, numbers(16) + 1.0, 1e-6, cos_ND=angle_ND, sin_ND=angle_ND * 0.5)
    seen = [
        PackedAttention(_segments(), ops)(
            0, turned_NHD, k_NKD, k_NKD * 0.5, scale=0.25, window=w, softcap=cap, sinks=sinks
        )
        for w, cap, sinks in ((None, None, None), (9, 5.0, None), (9, None, numbers(4)))
    ]
    acts = [ops.glu(numbers(5, 77) * 9.0, numbers(5, 77), act=act) for act in ("silu", "gelu_tanh")]
    logits_AV = numbers(9, 530) * 20.0
    token_A, logp_A = ops.sample(logits_AV, (numbers(9) + 1.0).double() / 2.0)
    logp_A, entropy_A = ops.logprobs(logits_AV, token_A)
    slope_AV = logits_AV.clone()
    ops.logprobs_backward(slope_AV, token_A, logp_A, entropy_A, dlogp_N=logp_A, dentropy_N=entropy_A)
    gradients = [products.product(y_NF.t(), x_ND), products.product(y_NF, w_FD), products.column_sums(y_NF)]
    gradients.append(sum_of_squares([y_NF]))
    if y_NF.dtype is not torch.float32:  # what is rounded hides what it is a sum of
        gradients.append(products.product(y_NF, w_FD, out=products.room(37, 320)))
    own = [y_NF, normed_ND, sum_ND, turned_NHD, *seen, *acts, logp_A, entropy_A, slope_AV, *gradients]
    return [*own, *_with_gradients(ops, numbers), *_stepped(w_FD)]


def _segments() -> Segments:
    """A prompt that two replies share."""
    return Segments(*(torch.tensor(n) for n in ([0, 20, 27], [20, 7, 10], [0, 0, 0], [0, 20, 20])))


@torch.enable_grad()
def _with_gradients(ops: Ops, numbers: Callable[..., Tensor]) -> list[Tensor]:
    """What a layer computes beside its products, forward and backward, and the activations of foreign modules."""
    inputs: list[Tensor] = []

    def of(*shape: int, scale: float = 1.0) -> Tensor:
        inputs.append((numbers(*shape) * scale).requires_grad_())
        return inputs[-1]

    angle_ND = numbers(37, 16) * 6.0
    turned_NHD = ops.norm_rope(of(37, 4, 16), of(16), 1e-6, cos_ND=angle_ND, sin_ND=angle_ND * 0.5)
    keys, values, sinks = of(37, 2, 16, scale=4.0), of(37, 2, 16), of(4)
    seen_NHD = PackedAttention(_segments(), ops)(
        0, turned_NHD, keys, values, scale=0.25, window=9, softcap=None, sinks=sinks
    )
    outputs = [
        *(ops.rms_norm(of(37, 320), of(320), 1e-6, offset=1.0), seen_NHD),
        *ops.add_rms_norm(of(37, 320), of(37, 320, scale=3.0), of(320), eps=1e-6),
        *(ops.glu(of(5, 77, scale=9.0), of(5, 77), act=act) for act in get_args(Act)),
        *(elementwise.activation(of(5, 77, scale=9.0), kind) for kind in get_args(elementwise.Kind)),
    ]
    given = [numbers(*output.shape) for output in outputs]
    return [*(output.detach() for output in outputs), *torch.autograd.grad(outputs, inputs, given)]


def _stepped(w_FD: Tensor) -> list[Tensor]:
    """Two steps of the optimizer that `train.optimizer` means by default, which are torch's own."""
    p_FD = w_FD.clone()
    optimizer = torch.optim.AdamW([p_FD], lr=0.003, weight_decay=0.1, fused=True)
    for step in (1, 2):
        p_FD.grad = p_FD * 0.3 - 0.1 * step
        optimizer.step()
    state = optimizer.state[p_FD]
    return [p_FD, state["exp_avg"], state["exp_avg_sq"]]


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """In [-1, 1), of integers alone, so alike everywhere."""
    count = torch.Size(shape).numel()
    mixed = (torch.arange(1, count + 1, dtype=torch.int64) * 2654435761) % (1 << 24)
    return (mixed.float() / (1 << 23) - 1.0).view(shape).to(dtype)
