"""Memory on a CPU that is taken as it is written, and goes back to the system with its tensor."""

from __future__ import annotations

import math
import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

_LARGE = 4 << 20
"""Bytes from which on a tensor has pages of its own, huge ones where the system has them, as numpy's arrays do."""


def lazy_zeros(shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
    """torch.zeros. A large one takes a page when that is first written. malloc keeps what is freed
    (`environment.keep_memory`), and would write the zeros into all of it at once.

    Raises MemoryError where there are no addresses for it."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate memory: {size >> 20} MB: {error}") from error
    if sys.platform == "linux":  # measured: up to 4 % of a step of a small model
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
