"""A device that computes on the CPU and tells where the host waits for it, and where a tensor was left on the host.

Inside `accelerator()`, tensors made on `DEVICE` are `Far`: they have numbers, which lie in CPU tensors that only the
dispatch mode reads. So a whole training step runs, with its real control flow. What a GPU would do silently (wait for a
value, copy numbers of the host) is written down with the line of the package that asked; what it would refuse (a tensor
of the host among its own) raises `LeftOnHost` with that line.

The device is `meta`. Where torch is built for CUDA and there is no GPU it is `cuda`, so that the code takes the ways
that it takes on a GPU, but for the backward pass, which asks the driver.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import whet
from whet.models import torch_ops

CUDA = torch.version.cuda is not None and not torch.cuda.is_available()
"""torch is built for CUDA, and there is no GPU."""
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("meta")
PACKAGE = str(Path(whet.__file__).parent)
WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class LeftOnHost(RuntimeError):
    """A tensor of the host where all others are on the device."""


class Far(Tensor):
    """A tensor on the device."""

    near: Tensor
    """Its numbers."""

    @staticmethod
    def __new__(cls, near: Tensor) -> Far:
        made: Far = Tensor._make_wrapper_subclass(
            cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device=DEVICE
        )
        made.near = near
        return made

    is_cuda = True  # type: ignore[assignment]
    """So that the package takes the ways that it takes on a GPU."""

    def data_ptr(self) -> int:
        return self.near.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Far({self.near!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of Accelerator")


class Accelerator(TorchDispatchMode):
    """waits: how often the host waited for the device, by the place that made it; copies: how often numbers of the
    host went to the device. A place is `file.py:function`, its line is in `lines`."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.copies, self.lines = Counter[str](), Counter[str](), dict[str, str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        far = [x for x in given if isinstance(x, Far)]
        target = kwargs.get("device")
        makes = target is not None and torch.device(target).type == DEVICE.type
        if not far and not makes:
            return func(*args, **kwargs)
        if func not in COPIES:
            self._together(func, args, given, far)
        goes = bool(far)
        if func is torch.ops.aten._to_copy.default and target is not None:
            goes = makes
            if makes != bool(far):
                self._note(self.copies if makes else self.waits, func)
        elif func is torch.ops.aten.copy_.default and len(far) == 1:
            goes = isinstance(args[0], Far)
            self._note(self.copies if goes else self.waits, func)
        elif _waits(func, args):
            self._note(self.waits, func)
        return self._computed(func, args, kwargs, far, goes=goes or (makes and not far))

    def _computed(self, func: Any, args: Any, kwargs: Any, far: list[Far], *, goes: bool) -> Any:
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        flat, spec = tree_flatten((args, kwargs))
        near_args, near_kwargs = tree_unflatten([x.near if isinstance(x, Far) else x for x in flat], spec)
        own = {id(x.near): x for x in far}
        out = KERNELS.get(func.name(), func)(*near_args, **near_kwargs)
        if torch.Tag.inplace_view in func.tags:  # `squeeze_`: the tensor itself has another shape
            with torch._C._DisableTorchDispatch():
                func(*args, **kwargs)
        if not goes:
            return out
        return tree_map(lambda x: _wrapped(x, own) if isinstance(x, Tensor) else x, out)

    def _together(self, func: Any, args: Any, given: list[Tensor], far: list[Far]) -> None:
        """All tensors are on the device; pointwise operations take single numbers from the host, as CUDA's do."""
        host = [x for x in given if not isinstance(x, Far)]
        if empty := [x for x in host if x.device.type == DEVICE.type]:
            raise LeftOnHost(
                f"{self._line()[1]}: {func} got a list of numbers ({len(empty)}); make it a tensor"
            )
        if func in INDEXING:  # numbers that say where, of the host, are copied without a word
            if any(x is not None and not isinstance(x, Far) for x in args[1]):
                self._note(self.copies, func)
            host = [x for x in (args[0], *args[2:3]) if not isinstance(x, Far) and x.dim()]
        elif torch.Tag.pointwise in func.tags or func in (torch.ops.aten.fill_.Tensor,):
            host = [x for x in host if x.dim()]
        if host and far:
            what = ", ".join(f"{x.dtype}{list(x.shape)}" for x in host)
            raise LeftOnHost(f"{self._line()[1]}: {func} got {what} of the host beside tensors of the device")

    def _note(self, counter: Counter[str], func: Any) -> None:
        place, line = self._line()
        counter[place] += 1
        self.lines[place] = f"{line} ({func})"

    def _line(self) -> tuple[str, str]:
        """(file.py:function, file.py:line) of the innermost frame of the package."""
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None:
            return "outside", "outside of the package"
        file, line = Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix(), frame.f_lineno
        while (
            frame.f_code.co_name.startswith("<") and frame.f_back is not None
        ):  # a comprehension is of its function
            frame = frame.f_back
        return f"{file}:{frame.f_code.co_name}", f"{file}:{line}"


if CUDA:  # what torch looks for before it asks the driver for a device
    Accelerator._mode_key = torch._C._TorchDispatchModeKey.FAKE  # type: ignore[attr-defined]


def _attend_pages(
    q_NHD: Tensor, k_pages: Tensor, v_pages: Tensor, table_BP: Tensor, keys_B: Tensor, *rest: Any
) -> Tensor:
    """`paged.attend_pages` by the operations it stands for."""
    starts, _, scale, window, softcap, sinks = rest
    queries_B = None if starts is None else starts.diff().long()
    keys_B = keys_B if starts is None else keys_B.diff().long()
    how: Any = {"scale": scale, "window": window or None, "softcap": softcap or None, "sinks": sinks}
    place = {"table_BP": table_BP, "keys_B": keys_B, "queries_B": queries_B}
    with torch._C._DisableTorchDispatch():
        return torch_ops.attend_cached(q_NHD, k_pages, v_pages, **place, **how)


def _varlen_attn(q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, q_S: Tensor, k_S: Tensor, *rest: Any) -> Any:
    """torch's attention of variable length: the queries of each sequence are its last tokens."""
    _, _, _, scale, (back, _), *_ = rest
    parts = []
    for (a, b), (c, d) in zip(pairwise(q_S.tolist()), pairwise(k_S.tolist())):
        away = torch.arange(d - c - (b - a), d - c)[:, None] - torch.arange(d - c)
        mask = (away >= 0) & (away <= (back if back >= 0 else d))
        q, k, v = (x.transpose(0, 1) for x in (q_NHD[a:b], k_NKD[c:d], v_NKD[c:d]))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        parts.append(seen.transpose(0, 1))
    return torch.cat(parts), q_NHD.new_empty(0), q_NHD.new_empty(0)


def _varlen_attn_backward(
    grad_NHD: Tensor, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Of `_varlen_attn`, written out: here is no autograd."""
    _, _, q_S, k_S, _, _, _, _, scale, (back, _) = rest
    made = [torch.zeros_like(x, dtype=torch.float32) for x in (q_NHD, k_NKD, v_NKD)]
    group = q_NHD.shape[1] // k_NKD.shape[1]
    for (a, b), (c, d) in zip(pairwise(q_S.tolist()), pairwise(k_S.tolist())):
        away = torch.arange(d - c - (b - a), d - c)[:, None] - torch.arange(d - c)
        hidden = (away < 0) | (away > (back if back >= 0 else d))
        q, dy = (x[a:b].transpose(0, 1).float() for x in (q_NHD, grad_NHD))
        k, v = (x[c:d].transpose(0, 1).float().repeat_interleave(group, 0) for x in (k_NKD, v_NKD))
        p = (q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        dp = dy @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        made[0][a:b] = (ds @ k).transpose(0, 1)
        for into, each in zip(made[1:], (ds.mT @ q, p.mT @ dy)):
            into[c:d] += each.unflatten(0, (-1, group)).sum(1).transpose(0, 1)
    return tuple(x.to(q_NHD.dtype) for x in made)


def _wide_mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`torch.mm` whose sums are not rounded to the factors' dtype."""
    return a.to(dtype) @ b.to(dtype)


KERNELS = {
    "aten::mm.dtype": _wide_mm,
    "whet::attend_pages": _attend_pages,
    "torch_attn::_varlen_attn": _varlen_attn,
    "torch_attn::_varlen_attn_backward": _varlen_attn_backward,
}
"""What is not computed on a CPU."""


def _wrapped(x: Tensor, own: dict[int, Far]) -> Far:
    """What an operation gave: the tensor that it wrote into, or a new one."""
    found = own.get(id(x))
    return Far(x) if found is None else found


def _waits(func: Any, args: Any) -> bool:
    if func in INDEXING:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return not WAITING.isdisjoint(func.tags)


class Numbers(TorchFunctionMode):
    """`torch.tensor` of Python numbers on the device: made on the host and copied, as for a GPU. For `meta` torch would
    forget the numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func is not torch.tensor or device is None or torch.device(device).type != DEVICE.type:
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)


@contextmanager
def accelerator() -> Iterator[Accelerator]:
    """Inside it, `DEVICE` computes."""
    if CUDA:
        torch._C._ensureCUDADeviceGuardSet()
    capability = mock.patch("torch.cuda.get_device_capability", return_value=(9, 0))
    kernel = mock.patch("whet.models.paged.lacks", return_value=None)
    draws = mock.patch("torch.Generator", lambda device="cpu", make=torch.Generator: make())
    with capability, kernel, draws, Numbers(), Accelerator() as mode:
        yield mode


def moved(module: nn.Module) -> nn.Module:
    """The module, with its parameters and buffers on the device."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(Far(p.detach().clone()), requires_grad=p.requires_grad)
                part._parameters[name] = made[id(p)]
        for name, b in part._buffers.items():
            if b is not None:
                part._buffers[name] = Far(b)
    return module


def near(x: Tensor) -> Tensor:
    """The numbers of a tensor of the device, for a test to compare."""
    return x.near if isinstance(x, Far) else x
