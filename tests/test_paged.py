"""Attention over pages in place: what can be known of the kernel without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from whet.models import paged, torch_ops

TRITON = find_spec("triton") is not None
NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def test_shapes_by_hand() -> None:
    """Qwen2.5 0.5B: 14 heads over 2, 64 numbers each; a step has one query a row, a prefill nine of seven heads."""
    queries, step = paged.shapes(7, 64, 2, step=True)
    assert (queries, step["ROWS"], step["WIDE"], step["KEYS"]) == (1, 16, 64, 128)
    queries, prefill = paged.shapes(7, 64, 2, step=False)
    assert (queries, prefill["ROWS"]) == (9, 64)
    for group, size, width in ((1, 256, 4), (8, 96, 2), (64, 128, 4), (3, 40, 2)):
        queries, sizes = paged.shapes(group, size, width, step=False)
        assert sizes["ROWS"] >= queries * group
        assert sizes["WIDE"] >= size
        assert 2 * sizes["KEYS"] * sizes["WIDE"] * width <= 64 << 10, "keys and values of a turn"


def test_a_gpu_takes_it_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors of CUDA without numbers; a capability that lacks means the gathering fallback."""
    monkeypatch.setattr(paged, "lacks", lambda: None)
    assert not paged.fits(torch.zeros(2, 4, 16), torch.zeros(3, 2, 16, 16))
    with FakeTensorMode():
        q, k = torch.zeros(2, 4, 64, device="cuda"), torch.zeros(3, 2, 64, 16, device="cuda")
        assert paged.fits(q, k)
        assert not paged.fits(q, k.bfloat16())
        assert not paged.fits(torch.zeros(2, 4, 512, device="cuda"), k)
        place = {
            "table_BP": torch.zeros(2, 2, dtype=torch.int32, device="cuda"),
            "keys_B": torch.ones(2, dtype=torch.int64, device="cuda"),
        }
        out = torch_ops.attend_cached(q, k, k.mT, **place, scale=0.1, window=None, softcap=2.0, sinks=None)
        assert (out.shape, out.device.type, out.dtype) == (q.shape, "cuda", q.dtype)
        monkeypatch.setattr(paged, "lacks", lambda: "no Triton")
        assert not paged.fits(q, k)


@pytest.mark.skipif(not TRITON, reason="Triton comes with torch's builds for CUDA")
def test_the_kernel_computes_what_the_twin_computes() -> None:
    """In Triton's interpreter, which has to be asked for before Triton is imported."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(("src", "tests"))}
    done = subprocess.run(
        [sys.executable, "tests/paged_case.py"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert float(done.stdout.split()[-1]) < 1e-5


@pytest.mark.skipif(not TRITON, reason="Triton comes with torch's builds for CUDA")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("dtype", "group", "size", "step"),
    [(torch.bfloat16, 7, 64, True), (torch.float16, 6, 128, False), (torch.float32, 1, 256, False)],
)
@pytest.mark.parametrize("split", [0, 2048])
def test_the_kernel_compiles(
    capability: int, dtype: torch.dtype, group: int, size: int, step: bool, split: int
) -> None:
    """To machine code, which needs no GPU, within the shared memory of every GPU from 2020 on."""
    import triton  # type: ignore[import-not-found]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]

    from whet.models import paged_kernel

    _, sizes = paged.shapes(group, size, dtype.itemsize, step=step)
    constants = {**sizes, "STEP": step, "WINDOW": True, "SOFTCAP": True, "SINKS": True, "SPLIT": split}
    numbers = dict.fromkeys(("q_token", "q_head", "k_page", "k_head", "v_page", "v_head"), "i32")
    signature = {
        **dict.fromkeys(("q", "k", "v", "sinks"), NAMES[dtype]),
        **dict.fromkeys(("tops", "weights"), "*fp32"),
        "out": "*fp32" if split else NAMES[dtype],
        "table": "*i32",
        "keys": "*i64",
        "starts": "*i64" if step else "*i32",
        **{"scale": "fp32", "window": "i32", "softcap": "fp32", "table_row": "i32", "blocks": "i32"},
        **numbers,
        **dict.fromkeys(constants, "constexpr"),
    }
    ordered = {name: signature[name] for name in paged_kernel.attend.arg_names}
    source = triton.compiler.ASTSource(paged_kernel.attend, ordered, constexprs=constants)
    made = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 2}
    )
    assert made.asm["cubin"]
    assert made.metadata.shared <= 99 << 10


@pytest.mark.skipif(not TRITON, reason="Triton comes with torch's builds for CUDA")
def test_the_joining_kernel_compiles() -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    from whet.models import paged_kernel

    constants = {"SIZE": 96, "WIDE": 128, "SPLIT": 2048, "SINKS": True}
    signature = {
        **dict.fromkeys(("parts", "tops", "weights"), "*fp32"),
        **{"out": "*bf16", "sinks": "*bf16", "keys": "*i64", "heads": "i32", "splits": "i32"},
        **dict.fromkeys(constants, "constexpr"),
    }
    source = triton.compiler.ASTSource(paged_kernel.join, signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["cubin"]
