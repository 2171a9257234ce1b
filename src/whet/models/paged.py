"""Attention over the pages of the cache where they lie, on a GPU: nothing is gathered for a decoded token.

The kernel is Triton's, which torch's builds for CUDA bring along: `varlen_attn` of torch 2.13, which has a block table,
computes neither float32 nor soft-caps. It takes the cache as it is, pages of 16 tokens
with keys transposed. A row's sums are in an order of its own length alone, so a token depends on no other row.

Without Triton the fallback copies the keys and values of every row for every token (`torch_ops`); a run says so at its
start. In the tests the kernel is compared in Triton's interpreter and compiled for three generations of GPUs
(`tests/test_paged.py`); `make check-gpu` runs it.
Letters as in `torch_ops`.
"""

from __future__ import annotations

import os
import shutil
from functools import cache
from typing import Any

import torch
from torch import Tensor

from whet.models.segments import Bounds
from whet.tables import is_installed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256
"""Largest size of a head."""
BLOCK = 64
"""Rows (query x head) of a program in a prefill, at most; a product of matrices has 16 at least."""
PAGE = 16
"""Tokens of a cache page: one vector of keys."""
SPLIT = 2048
"""Keys of a program in a decode step, at most: a few long rows fill a GPU, too."""


@cache
def lacks() -> str | None:
    """Why pages are not read in place on this machine's GPUs; None: they are."""
    if not is_installed("triton"):
        return "Triton is not installed (torch's builds for CUDA bring it along)"
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        return "Triton needs a C compiler (gcc or clang) to start kernels"
    return None


def fits(q_NHD: Tensor, k_pages: Tensor) -> bool:
    """Whether the kernel computes this."""
    fine = q_NHD.is_cuda and q_NHD.dtype == k_pages.dtype and q_NHD.dtype in DTYPES
    return fine and q_NHD.shape[2] <= WIDEST and lacks() is None


def _attend_pages(
    q_NHD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table_BP: Tensor,
    keys_B: Tensor,
    starts: Tensor | None,
    longest: int,
    scale: float,
    window: int,
    softcap: float,
    sinks_H: Tensor | None,
) -> Tensor:
    """Runs the kernel `attend`, and `join` where a decode step has rows of more than SPLIT keys. q_NHD is contiguous,
    as are the pages of one layer. starts: [B + 1] int32, where each row's queries begin, at most `longest` each, and
    keys_B is [B + 1], where its keys begin; None: one query each. window, softcap: 0 where there is none."""
    from whet.models import paged_kernel as kernels  # here: it needs Triton

    out = torch.empty_like(q_NHD)
    heads, kv_heads, rows, size = q_NHD.shape[1], k_pages.shape[1], len(table_BP), q_NHD.shape[2]
    queries, sizes = shapes(heads // kv_heads, size, q_NHD.element_size(), step=starts is None)
    blocks = -(-longest // queries)
    splits = -(-table_BP.shape[1] * PAGE // SPLIT) if starts is None else 1
    sinks = q_NHD if sinks_H is None else sinks_H
    into, tops, weights = out, out, out
    if splits > 1:
        into = q_NHD.new_empty(rows, heads, splits, size, dtype=torch.float32)
        tops, weights = (into.new_empty(rows, heads, splits) for _ in range(2))
    kernels.attend[(rows * blocks, kv_heads, splits)](
        q_NHD,
        k_pages,
        v_pages,
        into,
        table_BP,
        keys_B,
        keys_B if starts is None else starts,
        sinks,
        tops,
        weights,
        scale,
        window,
        softcap,
        *q_NHD.stride()[:2],
        *k_pages.stride()[:2],
        *v_pages.stride()[:2],
        table_BP.stride(0),
        blocks,
        **sizes,
        STEP=starts is None,
        WINDOW=window > 0,
        SOFTCAP=softcap > 0.0,
        SINKS=sinks_H is not None,
        SPLIT=SPLIT if splits > 1 else 0,
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        kernels.join[(rows, heads)](
            into,
            tops,
            weights,
            out,
            keys_B,
            sinks,
            heads,
            splits,
            SIZE=size,
            WIDE=sizes["WIDE"],
            SPLIT=SPLIT,
            SINKS=sinks_H is not None,
            num_warps=1,
        )
    return out


attend_pages = torch.library.custom_op(
    "whet::attend_pages", _attend_pages, mutates_args=(), device_types="cuda"
)
"""For tensors that are more than their memory, which a dispatch mode or a fake computes otherwise."""


@attend_pages.register_fake
def _like(q_NHD: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(q_NHD)


def attended(
    q_NHD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    table_BP: Tensor,
    keys_B: Tensor,
    bounds: Bounds | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`torch_ops.attend_cached`, where `fits`. bounds: of a prefill; None: one query a row."""
    starts, longest = None, 1
    if bounds is not None:
        starts, keys_B, longest = bounds.query_S, bounds.key_S, bounds.longest[0]
    place = (table_BP.to(q_NHD.device), keys_B.to(q_NHD.device))
    weighing = (scale, window or 0, softcap or 0.0, None if sinks is None else sinks.detach().contiguous())
    attend: Any = _attend_pages if type(q_NHD) is Tensor else attend_pages  # an operator costs 40 us a call
    found: Tensor = attend(q_NHD.contiguous(), k_pages, v_pages, *place, starts, longest, *weighing)
    return found


def shapes(group: int, size: int, width: int, *, step: bool) -> tuple[int, dict[str, int]]:
    """(queries of a program, its constants) for heads of `size` numbers of `width` bytes; step: one query a row.

    What a program keeps in shared memory stays below 99 KiB, the least of the GPUs from 2020 on.
    """
    wide = max(16, 1 << (size - 1).bit_length())
    line = wide * width
    rows = BLOCK if line <= 256 else BLOCK // 2 if line <= 512 else 16
    keys = 64 if line <= 256 else 32 if line <= 512 else 16
    queries = 1 if step else max(1, rows // group)
    return queries, {
        "GROUP": group,
        "SIZE": size,
        "WIDE": wide,
        "ROWS": max(16, 1 << (queries * group - 1).bit_length()),
        "QUERIES": queries,
        # measured on an H100, heads of 128 numbers in bfloat16: 128 keys at a time read 1.86 TB/s, 64 read 1.21
        "KEYS": 2 * keys if step else keys,
        "PAGE": PAGE,
    }
