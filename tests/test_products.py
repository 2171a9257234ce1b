"""Matrix products: the law of their bits, by a naive oracle; rows, threads, places, strides, vectors change nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from whet.config import hardware
from whet.models import build, kernels, products
from whet.models.arithmetic import PORTABLE, arithmetic
from whet.models.products import HALF, Everywhere, column_sums, lawful, lawful_tiles, linear, product

FUSED = platform.machine() not in ("x86_64", "AMD64") or "fma" in hardware._cpu_flags()
COMPILED = pytest.mark.skipif(
    products.chosen().name != "compiled" or not FUSED,
    reason="no C compiler, or a processor without fused multiply-add",
)
WIDENED = patch.multiple(
    products, half_by=lambda dtype: "float32" if dtype in HALF else "torch", rounds=lambda dtype: False
)
"""As on a CPU that does not multiply half precision itself."""
SIZES = st.sampled_from((1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 33, 48, 70))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def strided(x: Tensor, turned: bool) -> Tensor:
    return x.t().contiguous().t() if turned else x


def law(a: Tensor, b: Tensor) -> Tensor:
    """By the rule of their dtype, not rounded."""
    return lawful_tiles(a, b) if a.dtype is torch.bfloat16 else lawful(a.float(), b.float())


@COMPILED
@settings(max_examples=40)
@given(SIZES, SIZES, st.sampled_from((1, 3, 8, 64, 255, 256, 257, 300, 600)), st.tuples(*[st.booleans()] * 4))
def test_every_element_is_what_the_law_says(
    rows: int, columns: int, terms: int, how: tuple[bool, ...]
) -> None:
    a, b, before = numbers(rows, terms), numbers(terms, columns, seed=1), numbers(rows, columns, seed=2)
    out = strided(before.clone(), how[2])
    product(strided(a, how[0]), strided(b, how[1]), out=out, add=how[3])
    wanted = lawful(a, b)
    if how[3]:  # each chain is added to what is there
        wanted = before
        for start in range(0, terms, products.TERMS):
            at = slice(start, start + products.TERMS)
            wanted = wanted + lawful(a[:, at], b[at])
    assert torch.equal(out, wanted)


@COMPILED
@WIDENED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("terms", [1, 7, 8, 9, 255, 264, 520])
def test_very_few_rows_and_very_few_columns_keep_the_law(terms: int, dtype: torch.dtype) -> None:
    """Their columns are turned in registers: every remainder of eight, both ways round, from any memory."""
    few, many = numbers(7, terms).to(dtype), numbers(41, terms + 3, seed=1).to(dtype)[:, :terms]
    wanted = law(few, many.t())
    multiply = products.chosen().multiply
    for n in range(1, 8):
        for of in (1, 7, 8, 9, 16, 17, 24, 41):
            out, turned, added = torch.empty(n, of), torch.empty(of, n), torch.ones(n, of)
            multiply(few[:n], many[:of].t(), out, False)
            multiply(many[:of], few[:n].t(), turned, False)
            multiply(few[:n].t().contiguous().t(), many[:of].t(), added, True)
            assert torch.equal(out, wanted[:n, :of])
            assert torch.equal(turned, out.t())
            if dtype is torch.bfloat16:
                assert torch.equal(added, lawful_tiles(many[:of], few[:n].t(), torch.ones(of, n)).t())
            elif terms <= products.TERMS:
                assert torch.equal(added, 1 + out)


@COMPILED
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_large_product_is_the_sum_of_its_chains_and_its_columns_stand_alone(
    turned: bool, threads: int
) -> None:
    """More columns than are packed at a time, and more chains than share a strip's sums."""
    a, b = strided(numbers(420, 1100), turned), strided(numbers(1100, 830, seed=1), turned)
    wanted = torch.zeros(420, 830)
    for start in range(0, 1100, products.TERMS):
        at = slice(start, start + products.TERMS)
        for left in range(0, 830, 100):
            column = slice(left, left + 100)
            product(a[:, at], b[at, column], out=wanted[:, column], add=start > 0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(product(a, b), wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not products.chosen().lawful, reason="nothing here keeps the law")
@pytest.mark.parametrize("shape", [(384, 128), (128, 512), (70, 1030), (1100, 320), (5, 40)])
def test_a_row_has_the_same_bits_among_any_others_and_on_any_number_of_threads(
    shape: tuple[int, int],
) -> None:
    weight, x = numbers(*shape), numbers(300, shape[1], seed=1)
    whole, threads = linear(x, weight), torch.get_num_threads()
    for rows in (1, 2, 3, 4, 8, 12, 100, 300):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(rows))[:rows]
        assert torch.equal(linear(x[order], weight), whole[order])
    try:
        torch.set_num_threads(3)
        assert torch.equal(linear(x, weight), whole)
    finally:
        torch.set_num_threads(threads)


@COMPILED
def test_onednn_gives_the_same_bits_where_it_is_taken_for_the_compiled_ones() -> None:
    if not products._obeys(products._onednn):
        pytest.skip("oneDNN's products do not keep the law here, so they are never taken")
    for rows, columns, terms in ((1, 384, 128), (50, 70, 700), (300, 128, 512), (50, 1, 700), (1, 1, 33)):
        a, b = numbers(rows, terms), numbers(columns, terms, seed=1)
        found = torch.empty(rows, columns)
        products._onednn(a, b.t(), found, False)
        assert torch.equal(found, linear(a, b))


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_gradients_are_those_of_float64(dims: int, biased: bool, dtype: torch.dtype, bound: float) -> None:
    """By whom this CPU multiplies."""
    shape = (4, 9, 64)[-dims:]
    given = [numbers(*shape), numbers(33, 64, seed=1), numbers(33, seed=2) if biased else None]
    given = [None if t is None else t.to(dtype) for t in given]
    found, wanted = [], []
    for cast, multiply, out in ((dtype, linear, found), (torch.float64, F.linear, wanted)):
        leaves = [None if t is None else t.to(cast, copy=True).requires_grad_() for t in given]
        y = multiply(*leaves)
        slope = torch.arange(y.numel(), dtype=torch.float64).view_as(y).cos().to(dtype)  # as it is rounded
        y.backward(slope.to(cast))
        out += [y.detach().double(), *(t.grad.double() for t in leaves if t is not None)]
    for one, two in zip(found, wanted):
        torch.testing.assert_close(one, two, rtol=bound, atol=bound)


def test_gradients_that_nobody_needs_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(products, "product", lambda *a, **k: made.append("product") or product(*a, **k))
    x, weight = numbers(5, 20), numbers(33, 20, seed=1).requires_grad_()
    linear(x, weight).sum().backward()
    assert made == ["product"]
    assert weight.grad is not None


def test_nothing_and_one_come_out_as_they_must() -> None:
    assert linear(torch.zeros(0, 20), numbers(33, 20)).shape == (0, 33)
    assert torch.equal(linear(torch.zeros(3, 0), torch.zeros(4, 0), torch.ones(4)), torch.ones(3, 4))
    assert torch.equal(
        product(torch.zeros(2, 0), torch.zeros(0, 3), out=torch.ones(2, 3), add=True), torch.ones(2, 3)
    )
    assert torch.equal(column_sums(torch.zeros(0, 3)), torch.zeros(3))
    with pytest.raises(ValueError, match=r"x is \(2, 5\), the weight \(3, 4\)"):
        linear(torch.zeros(2, 5), torch.zeros(3, 4))


def test_column_sums_are_exact_sums_and_the_row_of_ones() -> None:
    x = numbers(700, 1030)
    torch.testing.assert_close(column_sums(x).double(), x.double().sum(0), rtol=1e-5, atol=1e-4)
    if products.chosen().lawful:
        assert torch.equal(column_sums(x), product(torch.ones(1, 700), x).squeeze(0))
        assert torch.equal(column_sums(x[:, 5:40]), column_sums(x)[5:40])


def test_nan_and_infinity_stay_in_their_rows() -> None:
    x, weight = numbers(20, 40), numbers(30, 40, seed=1)
    clean = linear(x, weight)
    x[3, 5], x[7, 0] = float("nan"), float("inf")
    found = linear(x, weight)
    rest = [i for i in range(20) if i not in (3, 7)]
    assert torch.equal(found[rest], clean[rest])
    assert found[3].isnan().all()
    assert not found[7].isfinite().any()


def test_modules_that_are_not_ours_multiply_by_the_same_law() -> None:
    layer, x = nn.Linear(40, 30), numbers(2, 9, 40)
    with Everywhere():
        inside = layer(x)
    assert torch.equal(inside, linear(x, layer.weight, layer.bias))
    inside.sum().backward()
    assert layer.weight.grad is not None


def test_modules_that_are_not_ours_may_call_torch_in_all_its_ways() -> None:
    x, weight, bias, out = numbers(9, 40), numbers(30, 40, seed=1), numbers(30, seed=2), torch.zeros(9, 40)
    with Everywhere():
        named = F.linear(input=x, weight=weight, bias=bias)
        vector = F.linear(x, weight[0])
        given = torch.tanh(x, out=out)
    assert torch.equal(named, linear(x, weight, bias))
    assert torch.equal(vector, F.linear(x, weight[0]))
    assert given is out
    assert torch.equal(out, x.tanh())


@COMPILED
@WIDENED
@pytest.mark.parametrize("turned", [False, True])
def test_a_large_product_of_bfloat16_is_that_of_its_parts(turned: bool) -> None:
    """Blocks of rows and of columns, several panels, on threads of their own; what is added to is read once."""
    a, b = (
        strided(numbers(110, 600), turned).bfloat16(),
        strided(numbers(600, 830, seed=1), turned).bfloat16(),
    )
    wanted = torch.cat([lawful_tiles(a, part) for part in b.split(200, 1)], 1)
    multiply, threads = products.chosen().multiply, torch.get_num_threads()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            found, more = torch.empty(110, 830), torch.empty(830, 110).t()
            multiply(a, b, found, False)
            multiply(a[:, :64], b[:64], more, False)
            multiply(a[:, 64:], b[64:], more, True)
            assert torch.equal(found, wanted)
            assert torch.equal(more, wanted)
    finally:
        torch.set_num_threads(threads)


@COMPILED
@WIDENED
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="numbers are flushed on x86 alone")
def test_bfloat16_below_the_smallest_normal_number_is_0_and_nothing_else_is() -> None:
    """As tiles have it: what is read, what is summed; and the process rounds afterwards as before."""
    small, ones = torch.tensor([[2.0**-130, 1.0], [2.0**-126, 0.0]]).bfloat16(), torch.ones(2, 20).bfloat16()
    for rows in (small, small.repeat(10, 1)):
        found, added = torch.empty(len(rows), 20), torch.full((len(rows), 20), 2.0**-130)
        products.chosen().multiply(rows, ones, found, False)
        assert found[:2, 0].tolist() == [1.0, 2.0**-126]
        products.chosen().multiply(torch.zeros_like(rows), ones, added, True)
        assert not added.any()
    assert (torch.tensor(2.0**-126) / 16).item() == 2.0**-130
    assert product(small.float(), ones.float())[1, 0] / 16 == 2.0**-130


@COMPILED
@settings(max_examples=30)
@given(
    SIZES,
    SIZES,
    st.sampled_from((1, 3, 64, 256, 257, 300, 600)),
    st.sampled_from(("rows", "columns", "neither")),
    st.sampled_from(HALF),
)
def test_half_precision_is_the_law_of_the_same_numbers_rounded_once(
    rows: int, columns: int, terms: int, dense: str, dtype: torch.dtype
) -> None:
    a, b = numbers(rows, terms).to(dtype), numbers(terms, columns, seed=1).to(dtype)
    wanted = law(a, b)
    if dense == "neither":
        a, b = a.repeat_interleave(2, 1)[:, ::2], b.repeat_interleave(2, 1)[:, ::2]
    else:
        a, b = strided(a, dense == "columns"), strided(b, dense == "columns")
    with WIDENED:
        assert torch.equal(product(a, b), wanted.to(dtype))
        assert torch.equal(product(a, b, out=torch.empty(rows, columns)), wanted), "not rounded at all"
        assert torch.equal(linear(a, b.t()), wanted.to(dtype))


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_where_there_is_no_compiler(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    if not products._obeys(products._onednn):
        pytest.skip("oneDNN's products do not keep the law here, so they are never taken")
    x, weight = numbers(50, 300).to(dtype), numbers(70, 300, seed=1).to(dtype)
    other = products.Products("onednn", True, "", products._onednn)
    monkeypatch.setattr(products, "chosen", lambda: other)
    with WIDENED:
        assert torch.equal(linear(x, weight), lawful(x.float(), weight.float().t()).to(dtype))


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_in_half_precision_are_rounded_once(dtype: torch.dtype) -> None:
    given = [t.to(dtype) for t in (numbers(4, 9, 20), numbers(33, 20, seed=1), numbers(33, seed=2))]
    found, wanted = [], []
    with WIDENED:
        for cast, multiply, out in ((dtype, linear, found), (torch.float64, F.linear, wanted)):
            leaves = [t.to(cast, copy=True).requires_grad_() for t in given]
            y = multiply(*leaves)
            dy = numbers(*y.shape, seed=3).to(dtype).to(cast)
            out += [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    for one, two in zip(found, wanted):
        assert one.dtype == dtype
        torch.testing.assert_close(
            one.double(), two, rtol=torch.finfo(dtype).eps, atol=1e-2 * torch.finfo(dtype).eps
        )


@pytest.mark.parametrize(
    ("flags", "rows_agree", "widened"),
    [("fma avx512f", True, True), ("fma avx512_bf16", True, False), ("fma amx_bf16", False, True)],
)
def test_a_cpu_that_multiplies_bfloat16_itself_does_if_its_rows_agree(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    flags: str,
    rows_agree: bool,
    widened: bool,
) -> None:
    def by_place(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.float(), weight.float()) + (len(x) > 3) * 1e-3

    monkeypatch.setattr(hardware, "_cpu_flags", lambda: frozenset(flags.split()))
    here = SimpleNamespace(
        linear=by_place if not rows_agree else lambda x, w: lawful(x.float(), w.float().t())
    )
    monkeypatch.setattr(products, "F", here)
    monkeypatch.setattr(products, "rounds", lambda dtype: False)
    half_by, rule = products._half_by.__wrapped__, products._by_rule(torch.bfloat16)
    assert half_by(torch.bfloat16, False) == (rule if widened else "torch")
    assert ("multiplies bfloat16 itself" in caplog.text) == (not rows_agree), "slower than it could be"
    assert half_by(torch.bfloat16, True) == rule, "asked for"
    assert half_by(torch.float16, False) == "float32", "which neither of these multiplies"
    assert half_by(torch.float64, True) == "torch"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_torchs(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(products, "half_by", lambda _: "torch")
    x, weight = numbers(5, 20).to(dtype), numbers(33, 20, seed=1).to(dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert torch.equal(product(x, weight.t()), x @ weight.t())


@COMPILED
def test_the_digest_is_the_one_of_all_processors_with_fused_multiply_add() -> None:
    """But where torch computes without AVX, whose AdamW rounds otherwise."""
    without_avx = torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    assert (arithmetic(kernels.load("compiled")).digest == PORTABLE) is not without_avx
    assert arithmetic(kernels.load("torch")).digest != PORTABLE


@COMPILED
def test_the_products_of_a_process_are_chosen_by_one_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that asks for them while they are tested would begin the test anew, some hundred times."""
    tested: list[object] = []
    obeys = products._obeys
    monkeypatch.setattr(products, "_obeys", lambda multiply: tested.append(multiply) or obeys(multiply))
    for cached in (products.chosen, products.rounds, products._half_by):
        cached.cache_clear()
    assert products.chosen().lawful
    assert len(tested) == 1


SAY = """
from whet.models import kernels
from whet.models.arithmetic import arithmetic
found = arithmetic(kernels.load("auto"))
print(found.products, found.kernels, found.digest)
"""


def said(tmp_path: Path, **environment: str) -> list[str]:
    given = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-W", "ignore", "-c", SAY]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.split()


@COMPILED
@pytest.mark.parametrize("width", [4, pytest.param(16, marks=pytest.mark.sweep)])
def test_bits_do_not_depend_on_the_width_of_the_processors_vectors(tmp_path: Path, width: int) -> None:
    """CC is a command with arguments here."""
    env = shutil.which("env")
    assert env is not None
    compiler = f"{env} {' '.join(build._compiler())}"
    narrow = {"CC": f"{compiler} -DWHET_WIDTH={width}"}
    assert said(tmp_path, **narrow, ATEN_CPU_CAPABILITY="avx2") == ["compiled", "compiled", PORTABLE]
    assert len(list(tmp_path.glob("whet/kernels-*.so"))) == 1


@COMPILED
@pytest.mark.long
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="of x86 alone")
def test_kernels_are_built_for_a_processor_without_avx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", " ".join([*build._compiler(), "-mno-avx"]))
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-O0"))  # quick
    assert "kernels-" in build.library.__wrapped__()[1]


def test_without_a_compiler_products_are_onednns_or_torchs(tmp_path: Path) -> None:
    who, between, digest = said(tmp_path, CC="none")
    assert (who in ("onednn", "torch"), between) == (True, "torch")
    assert digest != PORTABLE
    assert not list(tmp_path.glob("whet/*"))


def test_without_a_home_libraries_are_kept_where_only_this_user_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = build.cache_dir()
    assert folder == tmp_path / f"whet-{os.getuid()}"
    assert folder.stat().st_mode & 0o077 == 0
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="is not a private folder of this user"):
        build.cache_dir()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="is not a private folder of this user"):
        build.cache_dir()


@COMPILED
@pytest.mark.parametrize("how", ["folder", "above", "file", "link", "pipe"])
def test_no_library_that_others_may_have_written_is_loaded(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is known to everyone. What lies there is no library: whoever loads it gets an error."""
    shared = tmp_path / "shared" / "whet"
    shared.mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared.parent))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-O0"))  # quick, and another name
    find = build.library.__wrapped__
    planted = Path(find()[1].rpartition(", ")[2])
    assert planted.parent == shared
    planted.chmod(0o755)
    mine = planted.rename(tmp_path / "mine.so")
    if how == "link":
        planted.symlink_to(mine)
    elif how == "pipe":
        os.mkfifo(planted, 0o700)
    else:
        planted.write_bytes(b"planted")
        planted.chmod(0o777 if how == "file" else 0o700)
    shared.chmod(0o777 if how == "folder" else 0o700)
    shared.parent.chmod(0o777 if how == "above" else 0o700)
    if how == "folder":  # it can be taken back, but not what was put there meanwhile by others
        os.chmod(planted, 0o777)
    found = Path(find()[1].rpartition(", ")[2])
    assert found.read_bytes().startswith(b"\x7fELF")
    assert found.lstat().st_mode & 0o022 == 0
    assert found.parent == (tmp_path / f"whet-{os.getuid()}" if how == "above" else shared)
    assert shared.stat().st_mode & 0o022 == 0 or how == "above"


@COMPILED
def test_a_library_in_a_cache_that_cannot_be_written_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = Path(build.library()[1].rpartition(", ")[2])
    folder = tmp_path / "home/whet"
    folder.mkdir(parents=True)
    shutil.copy(built, folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(build.os, "access", lambda path, mode: mode != os.W_OK)  # root may write all
    monkeypatch.setattr(build, "_compile", lambda *_, **__: pytest.fail("it was built already"))
    assert build.library.__wrapped__()[1].endswith(f", {folder / built.name}")
    assert build._place("other.so") == tmp_path / f"whet-{os.getuid()}" / "other.so"


@pytest.mark.parametrize("rows", [12, 24, 48])
def test_rows_of_memory_that_lie_in_one_another(rows: int) -> None:
    """An expanded gradient, say. AddressSanitizer (`variants.py`) sees whether more is read than there is."""
    generator = torch.Generator().manual_seed(5)
    v_I, b_KJ = torch.randn(rows, generator=generator), torch.randn(300, 12, generator=generator)
    a_IK = v_I.expand(300, rows).t()
    assert torch.equal(products.product(a_IK, b_KJ), products.product(a_IK.contiguous(), b_KJ))
