"""Products of bfloat16: the law of tiles (AMX) by a naive oracle, with tiles or without; any rows, places, strides,
threads; models."""

from __future__ import annotations

import itertools
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiny import FAMILIES, VOCAB, tiny_model
from whet.models import build, kernels, products
from whet.models.forward import decoder
from whet.models.logprob_parity import self_test
from whet.models.products import lawful_tiles, linear, product

TILES = pytest.mark.skipif(products._by_rule(torch.bfloat16) != "tiles", reason="nothing keeps the law here")
AMX = pytest.mark.skipif(not products.rounds(torch.bfloat16), reason="no tiles for bfloat16 here")
SIZES = st.sampled_from((1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 70, 257, 300))


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the CPU multiplies bfloat16 in another way."""
    monkeypatch.setattr(products, "_own_halves", True)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def laid(x: Tensor, how: int) -> Tensor:
    """The same numbers: rows dense, columns dense, or neither."""
    return (x.contiguous(), x.t().contiguous().t(), x.repeat_interleave(2, 1)[:, ::2])[how]


LAID = st.integers(0, 2)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@TILES
@settings(max_examples=60)
@given(SIZES, SIZES, st.sampled_from((1, 2, 31, 32, 33, 64, 96, 200, 1056)), st.tuples(LAID, LAID, LAID))
def test_every_element_is_what_the_law_says(
    rows: int, columns: int, terms: int, how: tuple[int, int, int]
) -> None:
    a, b = numbers(rows, terms), numbers(terms, columns, seed=1)
    before = numbers(rows, columns, seed=2).float()
    left, right = laid(a, how[0]), laid(b, how[1])
    wanted = lawful_tiles(a, b)
    assert torch.equal(product(left, right), wanted.bfloat16())
    half, whole, more = (laid(t, how[2]) for t in (before.bfloat16(), before.clone(), before.clone()))
    assert torch.equal(product(left, right, out=half), wanted.bfloat16())
    assert torch.equal(product(left, right, out=whole), wanted), "not rounded at all"
    assert torch.equal(product(left, right, out=more, add=True), lawful_tiles(a, b, before))


@TILES
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(384, 128), (128, 512), (70, 1030), (1100, 320), (5, 40)])
def test_a_row_has_the_same_bits_among_any_others_and_on_any_number_of_threads(
    shape: tuple[int, int], threads: int
) -> None:
    weight, x, before = numbers(*shape), numbers(600, shape[1], seed=1), torch.get_num_threads()
    whole = linear(x, weight)
    try:
        torch.set_num_threads(threads)
        for rows in (1, 2, 3, 16, 17, 100, 600):
            order = torch.randperm(600, generator=torch.Generator().manual_seed(rows))[:rows]
            assert torch.equal(linear(x[order], weight), whole[order])
    finally:
        torch.set_num_threads(before)


@TILES
def test_what_is_beside_the_operands_in_memory_is_not_read_into_them() -> None:
    """Tiles are whole: the rows and terms that a last one has too many would turn NaN into everything."""
    around = torch.full((80, 200), torch.nan).bfloat16()
    around[3:36, 5:69], around[40:57, 5:69] = numbers(33, 64), numbers(17, 64, seed=1)
    a, b = around[3:36, 5:69], around[40:57, 5:69]
    out = torch.full((40, 30), 7.0)
    product(a, b.t(), out=out[2:35, 4:21])
    assert torch.equal(out[2:35, 4:21], lawful_tiles(a, b.t()))
    out[2:35, 4:21] = 7.0
    assert bool((out == 7.0).all()), "nothing else is written"


@TILES
@pytest.mark.parametrize("step", [0, 8, 32, 33, 64])
@pytest.mark.parametrize("terms", [32, 64, 96])
def test_rows_may_overlap_in_memory(step: int, terms: int) -> None:
    """As windows over a row do: 32 is the distance of rows in a packed tile, too."""
    rows, b = torch.as_strided(numbers(8000), (64, terms), (step, 1)), numbers(terms, 40, seed=1)
    wanted = lawful_tiles(rows, b).bfloat16()
    assert torch.equal(product(rows, b), wanted)
    assert torch.equal(product(b.t(), rows.t()), wanted.t())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_of_no_terms_is_0(dtype: torch.dtype) -> None:
    """The gradient of an expert that saw no token."""
    product(numbers(300, 64).to(dtype), numbers(64, 300).to(dtype))  # leaves its numbers on the stack
    none = torch.empty(40, 0, dtype=dtype)
    assert not product(none, none.t()).any()
    assert torch.equal(product(none, none.t(), out=torch.ones(40, 40), add=True), torch.ones(40, 40))
    x, weight = (numbers(n, 64).to(dtype).requires_grad_() for n in (0, 48))
    linear(x, weight).sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()
    assert product(none.t(), none).shape == (0, 0)


@pytest.mark.parametrize("pair", itertools.product(DTYPES, DTYPES), ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_results_of_any_dtype_are_written_and_nothing_beside_them(
    pair: tuple[torch.dtype, torch.dtype], add: bool
) -> None:
    given, kept = pair
    around = torch.full((8000,), 0.5, dtype=kept)
    out = around[2000:3600].view(40, 40)
    a, b = numbers(40, 64), numbers(64, 40, seed=1)
    assert product(a.to(given), b.to(given), out=out, add=add) is out
    exact = a.double() @ b.double() + 0.5 * add
    torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=2**-5)
    assert bool((around[:2000] == 0.5).all())
    assert bool((around[3600:] == 0.5).all())


def test_sizes_that_do_not_fit_are_refused() -> None:
    """Pointers have no sizes: what would be read lies behind the tensor."""
    for b, out in ((numbers(63, 40), None), (numbers(64, 40), torch.empty(40, 39))):
        with pytest.raises(
            ValueError, match=r"product: \(40, 64\) times .* expected \[I, K\] times \[K, J\]"
        ):
            product(numbers(40, 64), b, out=out)


@AMX
@pytest.mark.parametrize("level", ["-Os", "-O1", "-O2"])
def test_tiles_are_the_same_however_little_the_compiler_does(level: str, tmp_path: Path) -> None:
    """gcc takes the instructions of tiles to read less memory than they do. A process that read it would be killed."""
    source, made = resources.files("whet.models").joinpath("products_bf16.c"), tmp_path / "tiles.so"
    flags = [*build._FLAGS, level, "-shared", str(source), "-o", str(made)]
    subprocess.run([*build._compiler(), *flags], check=True, timeout=60)
    code = """
import sys
from array import array
from ctypes import CDLL, c_int64, c_void_p
lib, n = CDLL(sys.argv[1]), [c_int64(x) for x in (50, 1, 1, 50, 40, 1)]
ones, out = array("H", [0x3f80] * 2000), array("f", [7.0] * 1600)
a, b = (c_void_p(x.buffer_info()[0]) for x in (ones, out))
assert lib.whet_tiles()
for add in (0, 1):
    assert not lib.whet_product_bf16(a, *n[:2], a, *n[2:4], b, *n[4:], *map(c_int64, (40, 40, 50)), 0, add, 1)
assert set(out) == {100.0}, set(out)
"""
    subprocess.run([sys.executable, "-c", code, str(made)], check=True, timeout=60)


@TILES
def test_numbers_that_are_not_finite_stay_in_their_row_and_round_as_torchs() -> None:
    x, weight = numbers(40, 64), numbers(48, 64, seed=1)
    clean = linear(x, weight)
    x[7, 3], x[9, 5], weight[:, 5] = torch.nan, torch.inf, weight[:, 5].abs()
    clean = linear(torch.cat([x[:7], x[8:9], x[10:]]), weight)
    found = linear(x, weight)
    assert bool(found[7].isnan().all())
    assert bool((found[9] == torch.inf).all())
    assert torch.equal(torch.cat([found[:7], found[8:9], found[10:]]), clean)
    ties = torch.tensor([[1 + 2**-8], [1 + 3 * 2**-8], [-1 - 2**-8], [3.39e38]])
    pair = torch.stack(
        [ties[:, 0].bfloat16().float(), ties[:, 0] - ties[:, 0].bfloat16().float()], 1
    ).bfloat16()
    assert torch.equal(product(pair, torch.ones(2, 1).bfloat16()), ties.bfloat16()), "to even, or to infinity"


@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_exact_in_the_bfloat16_of_this_cpu(family: str) -> None:
    ops = kernels.load("compiled" if products.chosen().name == "compiled" else "auto")
    if products.half_by(torch.bfloat16) == "torch" or not products.chosen().lawful:
        pytest.skip("torch multiplies bfloat16 here, or nothing keeps the law")
    module = tiny_model(family).to(torch.bfloat16)
    report = self_test(decoder(module, ops), ops, vocab_size=VOCAB, seed=1, temperature=0.9)
    assert report.exact, report
