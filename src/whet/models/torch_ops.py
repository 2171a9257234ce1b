"""PyTorch fallbacks of the C kernels: the same functions in plain torch operations, any device, any float dtype.

They are the reference that the kernels are tested against, the fallback where no compiler is available, and the
implementation on CUDA. On CPU the attention fallbacks keep whet's exactness rules: explicit products in place of SDPA,
key width a multiple of 16, P@V summed over fixed blocks of 256 keys, at least four query rows, so that with
MKL_CBWR=AUTO,STRICT a token's result is the same in a packed batch and in a decode step. One property they cannot
guarantee: torch computes the last elements of a thread's share of a tensor with a scalar exp or tanh that rounds
differently, so the activation (and a soft-cap) is row-invariant only with one thread, or shares that end with a row.

Shape letters: N packed tokens, B live rows, H query heads, K key/value heads, D head size (or a row's width), F
feed-forward width, V vocabulary, W keys, P pages of a row.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, Literal, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from whet.models import paged
from whet.models.paged import PAGE
from whet.models.segments import Bounds, Bucket, Segments
from whet.types import WhetError

_FLASH_WIDEST = 256
"""Largest size of a head in flash attention; it is a multiple of 8."""
_LANES = 32
"""Numbers that torch's elementwise functions take at a time: two vectors of AVX-512, or a divisor of it."""
_PV_BLOCK = 256
"""A last block of more than half of it is padded: MKL adds 144 to 240 terms in another order than 16 to 128 or 256."""

try:  # torch >= 2.10
    from torch.nn.attention.varlen import varlen_attn

    _VARLEN = frozenset(inspect.signature(varlen_attn).parameters)
except ImportError:
    _VARLEN = frozenset()


Act = Literal["silu", "gelu_tanh", "swigluoai"]
"""What becomes of gate and up. swigluoai: gpt-oss's, by the name that vLLM gives it."""
ACTS: dict[Act, int] = {"silu": 0, "gelu_tanh": 1, "swigluoai": 2}
"""Their numbers in kernels."""
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


class Weighing(TypedDict):
    """How a layer of a model weighs its keys; all kinds of attention pass it on."""

    scale: float
    """Factor of query x key."""
    window: int | None
    """A token attends to so many of the last keys, its own among them. None: to all."""
    softcap: float | None
    """cap * tanh(score / cap) in place of a score."""
    sinks: Tensor | None
    """[H] a score of each query head that takes part in its softmax and weighs no value (Xiao et al. 2023,
    arXiv:2309.17453; learned in gpt-oss). It is neither scaled nor capped."""


def _wide(x: Tensor) -> Tensor:
    """Half precision is computed in fp32; fp32 and fp64 stay what they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _half_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Of the KV cache of a model of this dtype: on a CPU float32, as its attention computes."""
    return torch.float32 if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16) else dtype


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (offset + weight) over the last dimension (Gemma: offset 1)."""
    x = _wide(x_ND)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * (_wide(weight_D) + offset)).to(x_ND.dtype)


def add_rms_norm(
    x_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    sum_ND = x_ND + residual_ND
    return rms_norm(sum_ND, weight_D, eps, offset=offset), sum_ND


def norm_rope(
    x_NHD: Tensor,
    weight_D: Tensor | None,
    eps: float,
    cos_ND: Tensor,
    sin_ND: Tensor,
    *,
    offset: float = 0.0,
) -> Tensor:
    """RMS norm of every head (skipped where weight is None), then rotate-half rotary embedding."""
    x = x_NHD if weight_D is None else rms_norm(x_NHD, weight_D, eps, offset=offset)
    x = _wide(x)
    low, high = x.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (x * cos_ND[:, None, :] + turned * sin_ND[:, None, :]).to(x_NHD.dtype)


def glu(gate_NF: Tensor, up_NF: Tensor, *, act: Act) -> Tensor:
    """act(gate) * up; swigluoai: (up' + 1) * gate' sigmoid(1.702 gate') of gate' = min(gate, 7), up' in [-7, 7]."""
    gate, up = (gate_NF.float(), up_NF.float()) if _half_on_cpu(gate_NF) else (gate_NF, up_NF)
    if act == "swigluoai":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (gate * torch.sigmoid(_rows_apart(SWIGLU_ALPHA * gate)) * (up + 1)).to(gate_NF.dtype)
    if gate.device.type == "cpu" and not torch.compiler.is_compiling():
        return (_RowByRow.apply(gate, act) * up).to(gate_NF.dtype)
    return ((F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")) * up).to(gate_NF.dtype)


class _RowByRow(Function):
    """silu or gelu_tanh whose bits depend on the row alone, forward and backward, and not on how its input lies."""

    @staticmethod
    def forward(ctx: Any, x_NF: Tensor, act: Act) -> Tensor:
        ctx.act = act
        ctx.save_for_backward(x_NF)
        x_NF = _rows_apart(x_NF)
        return F.silu(x_NF) if act == "silu" else F.gelu(x_NF, approximate="tanh")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NF: Tensor) -> tuple[Tensor, None]:
        x_NF = _rows_apart(ctx.saved_tensors[0])
        if ctx.act == "silu":
            return torch.ops.aten.silu_backward(dy_NF, x_NF), None
        return torch.ops.aten.gelu_backward(dy_NF, x_NF, approximate="tanh"), None


def _rows_apart(x_NF: Tensor) -> Tensor:
    """On a CPU torch takes rows that lie end to end for one, and the vectors of its activations run from one into the
    next: which numbers are left for the scalar ones at the end depends on the number of rows. So rows of another width
    than whole vectors are laid apart."""
    width = x_NF.shape[-1]
    if x_NF.device.type != "cpu" or width % _LANES == 0 or not x_NF.is_contiguous():
        return x_NF
    return F.pad(x_NF, (0, _LANES))[..., :width]


def logprobs(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """(log-prob of the target [N], entropy [N] in nats) of softmax(logits)."""
    # log_softmax works row by row whatever the number of rows and threads; logsumexp and sum may split one
    # row
    logp_NV = torch.log_softmax(logits_NV, dim=-1)
    entropy_N = torch.special.entr(logp_NV.exp()).sum(-1)
    return logp_NV.gather(1, targets_N[:, None]).squeeze(1), entropy_N


def logprobs_backward(
    logits_NV: Tensor,
    targets_N: Tensor,
    logp_N: Tensor,
    entropy_N: Tensor,
    dlogp_N: Tensor,
    dentropy_N: Tensor | None,
) -> None:
    """Overwrites logits with their gradient: p * (-dentropy * (log p + H) - dlogp), + dlogp at the target."""
    at_N1 = targets_N[:, None]
    lse_N1 = logits_NV.gather(1, at_N1) - logp_N[:, None]
    logp_NV = logits_NV.sub_(lse_N1)
    p_NV = logp_NV.exp()
    if dentropy_N is None:
        torch.mul(p_NV, -dlogp_N[:, None], out=logits_NV)
    else:
        logp_NV.masked_fill_(p_NV == 0, 0.0)  # p log p is 0 at p = 0, not NaN
        logp_NV.add_(entropy_N[:, None]).mul_(-dentropy_N[:, None]).sub_(dlogp_N[:, None]).mul_(p_NV)
    logits_NV.scatter_add_(1, at_N1, dlogp_N[:, None].to(logits_NV.dtype))


def sample(logits_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """(token [B] int64, its log-prob [B]) by inverse CDF of softmax(logits) at uniform [B] float64 in [0, 1).

    A token of probability 0 is never drawn. The log-prob is bitwise that of `logprobs`. Where the logits of a row allow
    no sample, it raises `bad_logits` on a CPU; elsewhere asking would make the host wait for the device, and the row's
    log-prob is NaN.
    """
    logp_BV = torch.log_softmax(logits_BV, dim=-1)
    cumulative_BV = torch.cumsum(logp_BV.exp(), dim=-1, dtype=torch.float64)
    total_B1 = cumulative_BV[:, -1:].contiguous()
    if total_B1.device.type == "cpu" and not bool(torch.isfinite(total_B1).all()):
        raise bad_logits(int((~torch.isfinite(total_B1)).sum()))
    token_B1 = torch.searchsorted(cumulative_BV, uniform_B[:, None] * total_B1, right=True)
    # u * total may round up to total: the first token that reaches the total is the last that can be drawn
    token_B1 = torch.minimum(token_B1, torch.searchsorted(cumulative_BV, total_B1))
    token_B1 = token_B1.clamp_(max=logits_BV.shape[1] - 1)  # of NaN, none is found
    return token_B1.squeeze(1), logp_BV.gather(1, token_B1).squeeze(1)


def bad_logits(rows: int) -> WhetError:
    """The error of both samplers for rows whose logits allow no sample."""
    return WhetError(
        f"cannot sample: in {rows} row(s) the logits are NaN, +inf or all -inf; the policy's weights have "
        "most likely diverged (check grad_norm and the learning rate)"
    )


def attend_packed(
    q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, segments: Segments, **how: Unpack[Weighing]
) -> Tensor:
    """Causal attention of a packed batch; `Segments` defines which tokens each token attends to.

    On CUDA in half precision without a soft-cap and sinks it is torch's `varlen_attn`, else SDPA per bucket; on CPU
    the explicit products of the module's docstring, of float32.
    """
    if _half_on_cpu(q_NHD):
        q, k, v = q_NHD.float(), k_NKD.float(), v_NKD.float()
        return attend_packed(q, k, v, segments, **how).to(q_NHD.dtype)
    if not len(q_NHD):  # gradients of 0 for all that is given: ranks that have tokens wait for this one's
        given = (k_NKD, v_NKD, how["sinks"])
        return q_NHD + sum(x[:0].sum() for x in given if x is not None)
    if fits_varlen(q_NHD, how):
        return _attend_varlen(q_NHD, k_NKD, v_NKD, segments, how)
    buckets, row_N = segments.buckets_on(q_NHD.device)
    parts = [_attend_bucket(q_NHD, k_NKD, v_NKD, bucket, how) for bucket in buckets]
    return F.embedding(row_N, torch.cat(parts)).view_as(q_NHD)


def _attend_bucket(q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, bucket: Bucket, how: Weighing) -> Tensor:
    """[B*Q, H*D]: attention of one bucket, rows in the bucket's order."""
    heads, size, kv_heads = q_NHD.shape[1], q_NHD.shape[2], k_NKD.shape[1]
    key_BW, query_BQ, visible = bucket.key_BW, bucket.query_BQ, bucket.visible(how["window"])
    batch, rows = query_BQ.shape
    # gathering with embedding makes the backward one index-add a bucket instead of one slice a segment
    q = F.embedding(query_BQ, q_NHD.reshape(-1, heads * size)).view(batch, rows, kv_heads, -1, size)
    k = F.embedding(key_BW, k_NKD.reshape(-1, kv_heads * size)).view(batch, -1, kv_heads, size)
    v = (
        F.embedding(key_BW, v_NKD.reshape(-1, kv_heads * size))
        .view(batch, -1, kv_heads, size)
        .transpose(1, 2)
    )
    group = heads // kv_heads
    q = q.permute(0, 2, 1, 3, 4).reshape(batch, kv_heads, rows * group, size)
    mask = visible.repeat_interleave(group, dim=1)[:, None]
    if fits_sdpa(q, how):
        out = sdpa(q, k.transpose(1, 2), v, mask, how)
    else:
        out = _weigh(q, k.permute(0, 2, 3, 1).contiguous(), v.contiguous(), mask, how)
    return out.view(batch, kv_heads, rows, group, size).transpose(1, 2).reshape(batch * rows, heads * size)


def _weigh(q_BKMD: Tensor, k_BKDW: Tensor, v_BKWD: Tensor, mask: Tensor, how: Weighing) -> Tensor:
    """softmax(q k / cap ...) v in the exact order: one softmax over W keys, P@V over blocks of 256 keys.

    M rows: queries times the heads of a group, which vary faster.
    """
    score, cap = batched_product(q_BKMD * how["scale"], k_BKDW), how["softcap"]
    if cap is not None:
        score = cap * torch.tanh(score / cap)
    score = _wide(score.masked_fill(~mask, -torch.inf))
    if (sinks := how["sinks"]) is None:
        p = torch.softmax(score, dim=-1).to(q_BKMD.dtype)
    else:
        p = _softmax_with(sinks.to(score.dtype), score).to(q_BKMD.dtype)
    spare = -p.shape[-1] % _PV_BLOCK
    if 0 < spare < _PV_BLOCK // 2:
        p, v_BKWD = F.pad(p, (0, spare)), F.pad(v_BKWD, (0, 0, 0, spare))
    blocks = zip(p.split(_PV_BLOCK, dim=-1), v_BKWD.split(_PV_BLOCK, dim=-2))
    out = torch.zeros(())
    for i, (p_block, v_block) in enumerate(blocks):
        part = batched_product(p_block, v_block)
        out = part if i == 0 else out + part
    return out


def _softmax_with(sinks_H: Tensor, score_BKMW: Tensor) -> Tensor:
    """[B, K, M, W]: of the keys' scores and, in each row, its head's sink."""
    kv_heads, rows = score_BKMW.shape[1:3]
    sink_KM = sinks_H.view(kv_heads, -1).repeat(1, rows * kv_heads // len(sinks_H))
    # before the keys, and 16 places, of which it takes one: so each key keeps its lane of a vector whatever W is
    first = F.pad(sink_KM[..., None], (0, PAGE - 1), value=-torch.inf).expand(len(score_BKMW), -1, -1, -1)
    return torch.softmax(torch.cat((first, score_BKMW), -1), dim=-1)[..., PAGE:].contiguous()


_SMALL = 400
"""torch multiplies batches of matrices of less than so many scalar products by a loop of its own, which rounds
differently from BLAS (ATen, `bmm`)."""


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, each row with the same bits however many rows a has: padded to what goes through BLAS, and to 4 rows, as
    MKL takes other roads for fewer (on Intel for a single one, on AMD for up to 3)."""
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    enough = max(4, -(-_SMALL // (inner * columns)))
    if rows < enough:
        a = F.pad(a, (0, 0, 0, enough - rows))
    return torch.matmul(a, b)[..., :rows, :]


def fits_varlen(q: Tensor, how: Weighing) -> bool:
    """Whether torch's variable-length attention computes this: flash attention, on GPUs of 2020 and later."""
    half = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    fits = (
        half
        and q.shape[-1] <= _FLASH_WIDEST
        and q.shape[-1] % 8 == 0
        and how["softcap"] is how["sinks"] is None
    )
    return fits and {"window_size", "scale", "enable_gqa"} <= _VARLEN and has_flash(q.device.index)


def fits_sdpa(q: Tensor, how: Weighing) -> bool:
    """Whether torch's scaled_dot_product_attention computes this. On a CPU its rows do not agree."""
    return q.is_cuda and how["softcap"] is None


def sdpa(q_BKMD: Tensor, k_BKWD: Tensor, v_BKWD: Tensor, mask: Tensor, how: Weighing) -> Tensor:
    """scaled_dot_product_attention of M rows: queries times the heads of a group, which vary faster.

    It knows no sinks, so these are a key whose value is 0. Queries and keys get more numbers, one for each head of the
    group: a query has a 1 at its head's, the sinks' key the sinks there, other keys have zeros. Sixteen places are put
    before the keys, of which it takes one, as kernels want a mask of aligned rows.
    """
    scale, sinks, size = how["scale"], how["sinks"], q_BKMD.shape[-1]
    if sinks is None:
        return F.scaled_dot_product_attention(q_BKMD, k_BKWD, v_BKWD, attn_mask=mask, scale=scale)
    (batch, kv_heads, rows, _), group = q_BKMD.shape, len(sinks) // k_BKWD.shape[1]
    more = -(-group // 8) * 8
    own = torch.eye(group, more, dtype=q_BKMD.dtype, device=q_BKMD.device).repeat(rows // group, 1)
    q = torch.cat((q_BKMD, own.expand(batch, kv_heads, -1, -1)), -1)
    sink = F.pad(sinks.view(kv_heads, 1, group) / scale, (size, more - group, 0, PAGE - 1)).to(k_BKWD.dtype)
    k = torch.cat((sink.expand(batch, -1, -1, -1), F.pad(k_BKWD, (0, more))), 2)
    v = F.pad(v_BKWD, (0, more, PAGE, 0))
    first = torch.arange(PAGE, device=mask.device).eq(0).expand(*mask.shape[:-1], -1)
    mask = torch.cat((first, mask), -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[..., :size]


@cache
def has_flash(gpu: int | None) -> bool:
    """Whether torch has flash attention for this GPU: one of 2020 or later."""
    return torch.cuda.get_device_capability(gpu) >= (8, 0)


def _attend_varlen(q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, segments: Segments, how: Weighing) -> Tensor:
    """Shared prefixes are gathered once per segment."""
    runs = segments.contiguous_on(q_NHD.device)
    out = _varlen(q_NHD[runs.query_N], k_NKD[runs.key_T], v_NKD[runs.key_T], runs.bounds, how)
    return out[runs.back_N]


def _varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, how: Weighing) -> Tensor:
    """torch's variable-length flash attention: the queries of each sequence are its last tokens."""
    back = -1 if how["window"] is None else how["window"] - 1
    options: dict[str, Any] = {"scale": how["scale"], "window_size": (back, 0), "enable_gqa": True}
    if "num_splits" in _VARLEN:
        options["num_splits"] = 1  # batch-invariant, by its documentation
    out: Tensor = varlen_attn(q, k, v, bounds.query_S, bounds.key_S, *bounds.longest, **options)  # type: ignore[assignment]
    return out


def write_kv(
    k_pages: Tensor, v_pages: Tensor, k_NKD: Tensor, *, v_NKD: Tensor, page_N: Tensor, slot_N: Tensor
) -> None:
    """Stores keys and values of N tokens in one layer's pages: k [pages, K, D, 16], v [pages, K, 16, D]."""
    k_pages[page_N, :, :, slot_N] = k_NKD.to(k_pages.dtype)
    v_pages[page_N, :, slot_N] = v_NKD.to(v_pages.dtype)


def attend_cached(
    q_NHD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    table_BP: Tensor,
    keys_B: Tensor,
    queries_B: Tensor | None = None,
    bounds: Bounds | None = None,
    **how: Unpack[Weighing],
) -> Tensor:
    """Attention over the pages that each row's table names (no gradient).

    queries_B: [B] int64 on the CPU, how many queries each row has, the rows' queries one after the other in q; None:
    one each, a decode step. The last query of row b sees its first keys_B[b] keys, each one before it one key less.
    bounds: those of queries_B and keys_B on the device, for all layers; None: made here.
    The table's width is the width of a decode step's work: cut it to the longest row. On CUDA pages are read where they
    lie (`paged`); the fallback gathers them.
    """
    if queries_B is not None and q_NHD.is_cuda:
        bounds = bounds or Bounds.of(queries_B, keys_B, q_NHD.device)
    if paged.fits(q_NHD, k_pages):
        return paged.attended(q_NHD, k_pages, v_pages, table_BP=table_BP, keys_B=keys_B, bounds=bounds, **how)
    if queries_B is None:
        return _attend_step(q_NHD, k_pages, v_pages, table_BP, keys_B, how)
    queries, keys = queries_B.tolist(), keys_B.tolist()
    pages_b = [row[: -(-seen // PAGE)] for row, seen in zip(table_BP.to(q_NHD.device, torch.int64), keys)]
    if bounds is not None and fits_varlen(q_NHD, how):
        k, v = (_token_rows(x, pages_b, keys) for x in (k_pages.transpose(2, 3), v_pages))
        return _varlen(q_NHD, k, v, bounds, how)
    rows = zip(q_NHD.split(queries), pages_b, keys)
    return torch.cat([_attend_row(q, k_pages[pages], v_pages[pages], seen, how) for q, pages, seen in rows])


def _token_rows(x_pages: Tensor, pages_b: list[Tensor], keys: list[int]) -> Tensor:
    """[keys of all rows, K, D] of one layer's [pages, K, 16, D]."""
    return torch.cat(
        [x_pages[pages].transpose(1, 2).flatten(0, 1)[:seen] for pages, seen in zip(pages_b, keys)]
    )


def _seen(back: Tensor, window: int | None) -> Tensor:
    """Whether a token attends to a key so many positions back."""
    return (back >= 0) if window is None else (back >= 0) & (back < window)


def _attend_step(
    q_BHD: Tensor, k_pages: Tensor, v_pages: Tensor, table_BP: Tensor, keys_B: Tensor, how: Weighing
) -> Tensor:
    """One query a row."""
    batch, heads, size = q_BHD.shape
    kv_heads = k_pages.shape[1]
    pages_BP = table_BP.to(q_BHD.device, torch.int64).clamp(min=0)
    k = k_pages[pages_BP].permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, size, -1)
    v = v_pages[pages_BP].permute(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, size)
    back_BW = keys_B[:, None].to(q_BHD.device) - 1 - torch.arange(k.shape[-1], device=q_BHD.device)
    q = q_BHD.to(k.dtype).reshape(batch, kv_heads, -1, size)
    out = _weigh(q, k, v, _seen(back_BW, how["window"])[:, None, None], how)
    return out.reshape(batch, heads, size).to(q_BHD.dtype)


_ROW_SCORES = 1 << 22
"""Scores (query x key, one head) of a row that are computed at once."""


def _attend_row(q_NHD: Tensor, k_pages: Tensor, v_pages: Tensor, keys: int, how: Weighing) -> Tensor:
    """The queries of one row over its own pages, in parts of bounded size."""
    heads, size, kv_heads = q_NHD.shape[1], q_NHD.shape[2], k_pages.shape[1]
    k = k_pages.permute(1, 2, 0, 3).reshape(1, kv_heads, size, -1)
    v = v_pages.permute(1, 0, 2, 3).reshape(1, kv_heads, -1, size)
    at_W = torch.arange(k.shape[-1], device=q_NHD.device)
    out, position = [], keys - len(q_NHD)
    for part in q_NHD.split(max(1, _ROW_SCORES // len(at_W))):
        back = torch.arange(position, position + len(part), device=q_NHD.device)[:, None] - at_W
        position += len(part)
        mask = _seen(back, how["window"]).repeat_interleave(heads // kv_heads, dim=0)
        q = (
            part.to(k.dtype)
            .view(len(part), kv_heads, -1, size)
            .transpose(0, 1)
            .reshape(1, kv_heads, -1, size)
        )
        if fits_sdpa(q, how):
            seen = sdpa(q, k.transpose(2, 3), v, mask, how)
        else:
            seen = _weigh(q, k, v, mask, how)
        seen = seen.view(kv_heads, len(part), -1, size).transpose(0, 1)
        out.append(seen.reshape(part.shape).to(q_NHD.dtype))
    return torch.cat(out)
