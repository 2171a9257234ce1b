"""Packed and cached attention: a float64 double loop, and the same bits whatever the layout, batch and
threads."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from forked import ran
from whet.models import kernels, torch_ops
from whet.models.attention import (
    PAGE,
    CachedAttention,
    KvCache,
    PackedAttention,
    Segments,
    hf_attention,
    register_hf_attention,
)
from whet.models.kernels import Ops
from whet.types import ConfigError

Case = tuple[int, int, int, int | None, float | None]
CASES: list[Case] = [  # query heads, kv heads, head size, window, soft-cap
    (2, 2, 16, None, None),
    (4, 2, 32, 7, None),
    (4, 1, 64, None, 5.0),
    (3, 3, 128, 20, 30.0),
    (4, 2, 48, 16, None),
    (18, 1, 16, None, None),
]


@pytest.fixture(params=["torch", "compiled"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return load(request.param)


def load(kind: str) -> Ops:
    try:
        return kernels.load(kind)  # type: ignore[arg-type]
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def shared(prompt: int, own: list[int], *, groups: int = 1) -> Segments:
    """Each group: a prompt segment and one segment per response, which has the prompt as its prefix."""
    rows: list[tuple[int, int, int, int]] = []
    at = 0
    for _ in range(groups):
        base = at
        rows.append((at, prompt, 0, 0))
        at += prompt
        for length in own:
            rows.append((at, length, base, prompt))
            at += length
    return Segments(*torch.tensor(rows).T)


def keys_of(segments: Segments, s: int) -> Tensor:
    q, n, p, m = (
        int(x[s])
        for x in (segments.q_start_S, segments.q_len_S, segments.prefix_start_S, segments.prefix_len_S)
    )
    return torch.cat((torch.arange(p, p + m), torch.arange(q, q + n)))


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    segments: Segments,
    window: int | None,
    cap: float | None,
) -> Tensor:
    """One query and one head at a time."""
    group = q.shape[1] // k.shape[1]
    out: dict[tuple[int, int], Tensor] = {}
    for s in range(len(segments.q_start_S)):
        index, prefix = keys_of(segments, s), int(segments.prefix_len_S[s])
        for i, h in itertools.product(range(int(segments.q_len_S[s])), range(q.shape[1])):
            token, position = int(segments.q_start_S[s]) + i, prefix + i
            seen = index[max(0, position - window + 1) if window else 0 : position + 1]
            score = k[seen, h // group] @ q[token, h] * q.shape[2] ** -0.5
            if cap:
                score = cap * torch.tanh(score / cap)
            if sinks is None:
                out[token, h] = torch.softmax(score, 0) @ v[seen, h // group]
            else:
                weight = torch.softmax(torch.cat((score, sinks[h : h + 1])), 0)
                out[token, h] = weight[:-1] @ v[seen, h // group]
    return torch.stack([torch.stack([out[n, h] for h in range(q.shape[1])]) for n in range(len(q))])


def test_no_tokens_have_gradients_of_zero(ops: Ops) -> None:
    """Of everything that is given: ranks that have tokens add up the gradients of all."""
    q, k, v = (torch.zeros(0, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.ones(4, requires_grad=True)
    nothing = Segments.of_lengths(torch.zeros(0, dtype=torch.int64))
    out = PackedAttention(nothing, ops)(0, q, k, v, scale=1.0, window=None, softcap=None, sinks=sinks)
    assert out.shape == q.shape
    out.sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in (q, k, v, sinks))


@pytest.mark.parametrize("sunk", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("case", CASES)
def test_against_the_double_loop(ops: Ops, case: Case, sunk: bool) -> None:
    heads, kv_heads, size, window, cap = case
    segments = shared(19, [1, 33, 14])
    n = segments.tokens
    given = [normal(n, heads, size), normal(n, kv_heads, size, seed=1), normal(n, kv_heads, size, seed=2)]
    given += [3 * normal(heads, seed=4)] if sunk else []
    low = [x.float().requires_grad_() for x in given]
    high = [x.float().double().requires_grad_() for x in given]
    q, k, v, *sinks = low
    how = {"scale": size**-0.5, "window": window, "softcap": cap, "sinks": sinks[0] if sunk else None}
    out = ops.attend_packed(q, k, v, segments, **how)  # type: ignore[arg-type]
    want = oracle(*high, *(() if sunk else (None,)), segments=segments, window=window, cap=cap)  # type: ignore[misc]
    weight = normal(n, heads, size, seed=3)
    got = torch.autograd.grad(out, low, weight.float())
    need = torch.autograd.grad(want, high, weight)
    for a, b in zip((out, *got), (want, *need)):
        assert float((a.detach() - b.detach()).abs().max()) < 3e-6 * max(1.0, float(b.detach().abs().max()))


def test_sinks_by_hand(ops: Ops) -> None:
    """One key of score 0 and a sink of log 3: a quarter of the value, far above and below any score, too."""
    q, k, v = torch.zeros(1, 3, 16), torch.ones(1, 1, 16), torch.ones(1, 1, 16)
    sinks = torch.tensor([math.log(3.0), 1e4, -1e4])
    one = Segments.of_lengths(torch.tensor([1]))
    out = ops.attend_packed(q, k, v, one, scale=1.0, window=None, softcap=None, sinks=sinks)
    assert torch.allclose(out[0, :, 0], torch.tensor([0.25, 0.0, 1.0]))
    if ops.name == "compiled":
        with pytest.raises(ValueError, match="one for each head"):
            ops.attend_packed(q, k, v, one, scale=1.0, window=None, softcap=None, sinks=sinks[:2])


@pytest.mark.parametrize("heads", [4, 18])
def test_sinks_as_a_key(heads: int) -> None:
    """What a GPU computes, whose attention knows no sinks: for 2 and for 9 heads of a group, in float64."""
    segments = shared(19, [1, 33])
    n = segments.tokens
    given = [normal(n, h, 16, seed=h) for h in (heads, 2)]
    given += [normal(n, 2, 16, seed=3), normal(heads, seed=4)]

    def computed(by: str) -> list[Tensor]:
        q, k, v, sinks = leaves = [x.clone().requires_grad_() for x in given]
        how = {"scale": 0.25, "window": 20, "softcap": None, "sinks": sinks}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_ops, "fits_sdpa", lambda *_: by == "key")
            out = torch_ops.attend_packed(q, k, v, segments, **how)  # type: ignore[arg-type]
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for one, other in zip(computed("key"), computed("column")):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)


def test_backward_over_many_key_chunks(ops: Ops) -> None:
    """Longer than one backward tile of keys (512), prefix not a multiple of 16, windows across the chunk's
    edge."""
    segments = shared(521, [70])
    n = segments.tokens
    for window, cap in ((None, None), (530, None), (60, 4.0)):
        low = [normal(n, h, 16, seed=h).float().requires_grad_() for h in (2, 1, 3)]
        low[2] = low[2].detach()[:, :1].contiguous().requires_grad_()
        high = [x.detach().double().requires_grad_() for x in low]
        weight = normal(n, 2, 16, seed=7)
        out = ops.attend_packed(*low, segments, scale=0.25, window=window, softcap=cap, sinks=None)
        twin = kernels.load("torch").attend_packed(
            *high, segments, scale=0.25, window=window, softcap=cap, sinks=None
        )
        assert twin.dtype == torch.float64
        got, need = torch.autograd.grad(out, low, weight.float()), torch.autograd.grad(twin, high, weight)
        for a, b in zip((out, *got), (twin, *need)):
            assert float((a.detach() - b.detach()).abs().max()) < 3e-6 * max(
                1.0, float(b.detach().abs().max())
            )


def test_views_need_no_copy(ops: Ops) -> None:
    """q, k, v inside one fused projection, or head-major as transformers has them, give the same bits."""
    segments = shared(5, [20, 9])
    fused = normal(segments.tokens, 8, 32).float()
    views = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    dense = [x.contiguous() for x in views]
    head_major = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in views]
    want = ops.attend_packed(*dense, segments, scale=0.2, window=None, softcap=None, sinks=None)
    for given in (views, head_major):
        assert torch.equal(
            ops.attend_packed(*given, segments, scale=0.2, window=None, softcap=None, sinks=None), want
        )


# ---- the same bits
# ------------------------------------------------------------------------------------------------


def decode_all(
    ops: Ops, q: Tensor, k: Tensor, v: Tensor, *, rows: list[list[int]], share: int, **how: object
) -> Tensor:
    """Every row's queries by CachedAttention, the rows side by side; `rows` holds the packed token of each
    position.

    The first `share` positions (one full page or more) are the same tokens in all rows and lie in shared
    pages.
    """
    kv_heads, size = k.shape[1], k.shape[2]
    pages = 1 + sum(-(-len(row) // PAGE) for row in rows)
    cache = KvCache.allocate(layers=2, pages=pages, kv_heads=kv_heads, head_dim=size, ops=ops)
    free = iter(torch.randperm(pages, generator=torch.Generator().manual_seed(5)).tolist())
    width = max(-(-len(row) // PAGE) for row in rows)
    common = [next(free) for _ in range(share // PAGE)]
    table = torch.full((len(rows), width), -1, dtype=torch.int32)
    for b, row in enumerate(rows):
        mine = common + [next(free) for _ in range(-(-len(row) // PAGE) - len(common))]
        table[b, : len(mine)] = torch.tensor(mine)
    out = torch.full_like(q, torch.nan)
    for position in range(max(map(len, rows))):
        live = [b for b, row in enumerate(rows) if position < len(row)]
        live = live[position % len(live) :] + live[: position % len(live)]  # another order at every step
        token = torch.tensor([rows[b][position] for b in live])
        torch.set_num_threads(2 if position % 16 == 0 else 1)
        attend = CachedAttention(cache, table[live], torch.full((len(live),), position), ops)
        out[token] = attend(1, q[token], k[token], v[token], **how)  # type: ignore[arg-type]
    return out


def prefill_all(ops: Ops, q: Tensor, k: Tensor, v: Tensor, *, rows: list[list[int]], **how: object) -> Tensor:
    """Every row's queries by CachedAttention in parts of random sizes, those of several rows in one call."""
    draw = random.Random(len(q))
    pages = [-(-len(row) // PAGE) for row in rows]
    cache = KvCache.allocate(layers=1, pages=sum(pages), kv_heads=k.shape[1], head_dim=k.shape[2], ops=ops)
    names = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(5)).split(pages)
    table = torch.nn.utils.rnn.pad_sequence(list(names), batch_first=True, padding_value=-1)
    done, out = [0] * len(rows), torch.full_like(q, torch.nan)
    while live := [b for b, row in enumerate(rows) if done[b] < len(row)]:
        draw.shuffle(live)
        part = {
            b: rows[b][done[b] :][: draw.choice([1, 2, 15, 16, 40, 500])] for b in live[: draw.randint(1, 3)]
        }
        queries_B, start_B = (
            torch.tensor(x) for x in ([len(p) for p in part.values()], [done[b] for b in part])
        )
        token = torch.tensor([t for p in part.values() for t in p])
        torch.set_num_threads(draw.choice([1, 2]))
        attend = CachedAttention(cache, table[list(part)], start_B, ops, queries_B=queries_B)
        out[token] = attend(0, q[token], k[token], v[token], **how)  # type: ignore[arg-type]
        for b, tokens in part.items():
            done[b] += len(tokens)
    return out


def same_bits(ops: Ops, cases: list[Case], *, prompt: int, own: list[int]) -> None:
    """Shared segments, separate segments, decode and prefill in parts agree to the bit in every row."""
    segments = shared(prompt, own)
    copies = [keys_of(segments, s) for s in range(len(own) + 1)]
    apart = Segments.of_lengths(torch.tensor([len(c) for c in copies]))
    for (heads, kv_heads, size, window, cap), sunk in itertools.product(cases, (False, True)):
        q, k, v = (
            normal(segments.tokens, h, size, seed=i).float()
            for i, h in enumerate((heads, kv_heads, kv_heads))
        )
        sinks = normal(heads, seed=4).float() if sunk else None
        how = {"scale": size**-0.5, "window": window, "softcap": cap, "sinks": sinks}
        with torch.no_grad():
            torch.set_num_threads(1)
            packed = ops.attend_packed(q, k, v, segments, **how)  # type: ignore[arg-type]
            order = torch.cat(copies)
            alone = ops.attend_packed(q[order], k[order], v[order], apart, **how)  # type: ignore[arg-type]
            assert torch.equal(alone, packed[order]), (
                f"shared and separate differ: {heads, kv_heads, size, window, cap, sunk}"
            )
            torch.set_num_threads(2)
            assert torch.equal(ops.attend_packed(q, k, v, segments, **how), packed)  # type: ignore[arg-type]
            rows = [c.tolist() for c in copies[1:]]
            decoded = decode_all(ops, q, k, v, rows=rows, share=prompt // PAGE * PAGE, **how)
            prefilled = prefill_all(ops, q, k, v, rows=rows, **how)
        assert torch.equal(decoded, packed), (
            f"decode and packed differ: {heads, kv_heads, size, window, cap, sunk}"
        )
        assert torch.equal(prefilled, packed), (
            f"parts and packed differ: {heads, kv_heads, size, window, cap, sunk}"
        )


def test_decode_gives_the_trainers_bits() -> None:
    """By construction of the C kernels, whatever BLAS does."""
    same_bits(load("compiled"), CASES, prompt=37, own=[1, 30, 3, 12])
    same_bits(load("compiled"), [(4, 2, 32, None, None), (2, 1, 64, 100, 20.0)], prompt=300, own=[400, 150])


TWIN_EXACT = """
import os, torch
from test_attention import CASES, same_bits
from whet.models import kernels, torch_ops
if torch.backends.mkl.is_available():
    same_bits(kernels.load("torch"), CASES[:4], prompt=37, own=[1, 30, 3, 12])
    same_bits(kernels.load("torch"), [(4, 2, 32, None, None)], prompt=280, own=[60, 30])
print("done")
"""


def test_twins_give_the_trainers_bits_under_mkl_cbwr() -> None:
    """In a process of its own: MKL reads the variable at its first call. (No soft-cap promise: see twins.)"""
    done = ran(TWIN_EXACT, env=dict(os.environ, MKL_CBWR="AUTO,STRICT", OMP_NUM_THREADS="1"))
    assert done.stdout.strip() == "done", done.stderr[-2000:]


def test_gradients_do_not_know_the_threads() -> None:
    ops = load("compiled")
    segments = shared(40, [30, 7, 50], groups=3)
    given = [normal(segments.tokens, h, 32, seed=h).float() for h in (4, 2)]
    given.append(given[1].flip(0))

    def gradients(threads: int) -> tuple[Tensor, ...]:
        torch.set_num_threads(threads)
        q, k, v = (x.clone().requires_grad_() for x in given)
        out = ops.attend_packed(q, k, v, segments, scale=0.2, window=None, softcap=None, sinks=None)
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    for one, two in zip(gradients(1), gradients(2)):
        assert torch.equal(one, two)


def test_order_of_segments_is_irrelevant(ops: Ops) -> None:
    segments = shared(21, [8, 30, 2])
    order = torch.tensor([2, 0, 3, 1])
    mixed = Segments(
        *(
            x[order]
            for x in (segments.q_start_S, segments.q_len_S, segments.prefix_start_S, segments.prefix_len_S)
        )
    )
    q, k, v = (normal(segments.tokens, 2, 16, seed=s).float().requires_grad_() for s in range(3))
    how = {"scale": 0.25, "window": None, "softcap": None, "sinks": None}
    a, b = (ops.attend_packed(q, k, v, s, **how) for s in (segments, mixed))  # type: ignore[arg-type]
    assert torch.allclose(a, b, atol=1e-6)
    for x, y in zip(*(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (a, b))):
        assert torch.allclose(x, y, atol=1e-5)


# ---- cache
# --------------------------------------------------------------------------------------------------------


def test_prefill_then_decode(ops: Ops) -> None:
    """A packed prompt that filled the cache serves two rollouts: full page shared, last page copied."""
    cache = KvCache.allocate(layers=1, pages=5, kv_heads=2, head_dim=16, ops=ops)
    assert cache.nbytes == 2 * 4 * 5 * 2 * 16 * 16
    prompt, total = 20, 22
    q, k, v = (normal(total, h, 16, seed=s).float() for s, h in enumerate((4, 2, 2)))
    how = {"scale": 0.25, "window": None, "softcap": None, "sinks": None}
    at = torch.arange(prompt)
    prefill = CachedAttention(
        cache, torch.tensor([[3, 1]]), torch.tensor([0]), ops, queries_B=torch.tensor([prompt])
    )
    prefill(0, q[:prompt], k[:prompt], v[:prompt], **how)  # type: ignore[arg-type]
    cache.copy_page(1, 4)
    table = torch.tensor([[3, 1, -1], [3, 4, -1]])
    last = torch.tensor([prompt, prompt + 1])  # the two rollouts' first own tokens
    got = CachedAttention(cache, table, torch.full((2,), prompt), ops)(0, q[last], k[last], v[last], **how)  # type: ignore[arg-type]
    for b in range(2):
        row = torch.cat((at, last[b : b + 1]))
        want = ops.attend_packed(
            q[row], k[row], v[row], Segments.of_lengths(torch.tensor([prompt + 1])), **how
        )[-1]  # type: ignore[arg-type]
        assert torch.allclose(got[b], want, atol=1e-6)
    assert torch.equal(cache.k[0, 1, :, :, :4], cache.k[0, 4, :, :, :4])
    assert not torch.equal(cache.k[0, 1, :, :, 4], cache.k[0, 4, :, :, 4])


def test_cells_that_nobody_wrote_are_not_read() -> None:
    ops = load("compiled")
    cache = KvCache.allocate(layers=1, pages=3, kv_heads=1, head_dim=16, ops=ops)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    x = torch.ones(1, 1, 16)
    out = CachedAttention(cache, torch.tensor([[2]]), torch.tensor([0]), ops)(
        0, x, x, x, scale=1.0, window=None, softcap=None, sinks=None
    )
    assert torch.equal(out, x)


@pytest.mark.parametrize("table", [[[7]], [[-1]], [[0, -1]], [[-1, 0]]])
def test_pages_that_do_not_exist_are_refused(ops: Ops, table: list[list[int]]) -> None:
    cache = KvCache.allocate(layers=1, pages=3, kv_heads=1, head_dim=16, ops=ops)
    with pytest.raises(ValueError, match="page"):
        CachedAttention(cache, torch.tensor(table), torch.tensor([16 * len(table[0]) - 1]), ops)
    queries_B = torch.tensor([16 * len(table[0])])
    with pytest.raises(ValueError, match="page"):
        CachedAttention(cache, torch.tensor(table), torch.tensor([0]), ops, queries_B=queries_B)


def test_a_call_with_more_or_fewer_queries_than_it_says_is_refused() -> None:
    cache = KvCache.allocate(layers=1, pages=3, kv_heads=1, head_dim=16, ops=(ops := load("compiled")))
    x = torch.ones(3, 1, 16)
    for queries_B in (None, torch.tensor([4])):
        how = {"table_BP": torch.tensor([[0]]), "keys_B": torch.tensor([4]), "queries_B": queries_B}
        with pytest.raises(ValueError, match="3 queries, but 1 rows"):
            ops.attend_cached(
                x, cache.k[0], cache.v[0], **how, scale=1.0, window=None, softcap=None, sinks=None
            )


# ---- segments
# -----------------------------------------------------------------------------------------------------


def test_positions() -> None:
    assert shared(3, [2, 0, 1]).position_N.tolist() == [0, 1, 2, 3, 4, 3]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([(0, 3, 0, 0), (2, 2, 0, 0)], "exactly one"),
        ([(0, 3, 0, 0), (4, 2, 0, 0)], "exactly one"),
        ([(0, -1, 0, 0)], "negative"),
        ([(0, 3, 0, 0), (3, 2, 1, 3)], "inside one segment"),
        ([(0, 3, 0, 0), (3, 2, 0, 3), (5, 2, 3, 2)], "inside one segment"),
    ],
)
def test_impossible_segments(rows: list[tuple[int, int, int, int]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Segments(*torch.tensor(rows).T)


def test_tokens_and_segments_must_agree() -> None:
    x = torch.zeros(4, 1, 16)
    with pytest.raises(ValueError, match="5 tokens"):
        load("compiled").attend_packed(
            x, x, x, Segments.of_lengths(torch.tensor([5])), scale=1.0, window=None, softcap=None, sinks=None
        )


# ---- any transformers model
# ---------------------------------------------------------------------------------------


def tiny(family: str) -> torch.nn.Module:
    import transformers

    common = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    }  # fmt: skip
    if family in ("Mistral", "Gemma2"):
        common["sliding_window"] = 8
    config = getattr(transformers, f"{family}Config")(**common)
    torch.manual_seed(0)
    return (
        getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    )


@pytest.mark.parametrize("family", ["Qwen3", "Mistral", "Gemma2"])
def test_transformers_models_run_on_it(family: str) -> None:
    """Packed with a shared prompt = eager, one sequence at a time; decode over the cache = packed."""
    ops = kernels.load("auto")
    model = tiny(family)
    segments = shared(18, [5, 11])
    ids = torch.randint(1, 61, (segments.tokens,), generator=torch.Generator().manual_seed(1))
    copies = [keys_of(segments, s) for s in (1, 2)]
    with torch.no_grad():
        eager = [model(input_ids=ids[c][None]).logits[0] for c in copies]
        model.set_attn_implementation(register_hf_attention())
        cache = KvCache.allocate(layers=2, pages=4, kv_heads=2, head_dim=16, ops=ops)
        position = segments.position_N[None]
        plan = PackedAttention(segments, ops)
        packed = model(input_ids=ids[None], position_ids=position, use_cache=False, plan=plan).logits[0]
        for c, want in zip(copies, eager):
            assert torch.allclose(packed[c], want, atol=3e-5)
        for start, end in ((0, 7), (7, 8), (8, 18)):
            part = CachedAttention(
                cache,
                torch.tensor([[0, 1]]),
                torch.tensor([start]),
                ops,
                queries_B=torch.tensor([end - start]),
            )
            out = model(
                input_ids=ids[None, start:end],
                position_ids=part.position_N[None],
                use_cache=False,
                plan=part,
            ).logits[0]
            assert torch.allclose(out, packed[start:end], atol=3e-5)
        # response 1 once more, token by token; its prompt is in pages 0 and 1
        for i, token in enumerate(copies[0][18:].tolist()):
            step = CachedAttention(cache, torch.tensor([[0, 1]]), torch.tensor([18 + i]), ops)
            out = model(
                input_ids=ids[token].view(1, 1),
                position_ids=torch.tensor([[18 + i]]),
                use_cache=False,
                plan=step,
            ).logits[0, -1]
            assert torch.allclose(out, packed[token], atol=3e-5)


def test_transformers_without_a_plan() -> None:
    x = torch.zeros(1, 1, 2, 16)
    with pytest.raises(ConfigError, match="keyword `plan` of"):
        hf_attention(torch.nn.Module(), x, x, x, None)
    with pytest.raises(ConfigError, match="dropout"):
        hf_attention(torch.nn.Module(), x, x, x, None, plan=lambda *a, **k: x, dropout=0.1)
