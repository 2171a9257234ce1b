"""The operations of GPUs: what can be known of their kernels without one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from whet.models import compiled, kernels, paged, torch_ops, triton_ops

TRITON = find_spec("triton") is not None
only_with_triton = pytest.mark.skipif(not TRITON, reason="Triton comes with torch's builds for CUDA")


def test_a_gpu_takes_them_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors of CUDA without numbers. A tensor that is more than its memory goes to the fallback."""
    monkeypatch.setattr(paged, "lacks", lambda: None)
    here = torch.zeros(2, 8)
    assert not triton_ops.fits(here)
    with FakeTensorMode():
        assert not triton_ops.fits(torch.zeros(2, 8, device="cuda")), "no plain tensor: it has no numbers"

    class There:
        """What `fits` reads of a tensor."""

        is_cuda, dtype = True, torch.bfloat16

    monkeypatch.setattr(triton_ops, "Tensor", There)
    there: Any = There()
    assert triton_ops.fits(there)
    there.dtype = torch.float64
    assert not triton_ops.fits(there)
    there.dtype = torch.float32
    monkeypatch.setattr(paged, "lacks", lambda: "no Triton")
    assert not triton_ops.fits(there)


def test_what_is_not_of_the_host_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every function of the CPU's table but attention hands what it does not take to the GPU's."""
    seen: list[str] = []
    for name in (
        "rms_norm",
        "add_rms_norm",
        "norm_rope",
        "glu",
        "logprobs",
        "logprobs_backward",
        "sample",
        "write_kv",
    ):
        monkeypatch.setattr(triton_ops, name, lambda *a, _name=name, **k: seen.append(_name))
    x_ND, at_N = torch.zeros(2, 8, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    x_NHD, w_D = torch.zeros(2, 1, 8, device="meta"), torch.zeros(8, device="meta")
    compiled.rms_norm(x_ND, w_D, 1e-6)
    compiled.add_rms_norm(x_ND, x_ND, w_D, 1e-6)
    compiled.norm_rope(x_NHD, w_D, 1e-6, x_ND, x_ND)
    compiled.glu(x_ND, x_ND, act="silu")
    compiled.logprobs(x_ND, at_N)
    compiled.logprobs_backward(x_ND, at_N, x_ND[:, 0], x_ND[:, 0], x_ND[:, 0], None)
    compiled.sample(x_ND, at_N)
    compiled.write_kv(x_NHD, x_NHD, x_NHD, v_NKD=x_NHD, page_N=at_N, slot_N=at_N)
    assert len(seen) == 8


def test_a_run_says_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, gpu = replace(kernels.load("torch"), name="compiled", reason="gcc 12"), torch.device("cuda")
    assert kernels.used(ops, torch.device("cpu")) == "compiled (gcc 12)"
    monkeypatch.setattr(paged, "lacks", lambda: None)
    assert kernels.used(ops, gpu) == "Triton, on the GPU"
    monkeypatch.setattr(paged, "lacks", lambda: "Triton needs a C compiler")
    assert kernels.used(ops, gpu) == "torch, on the GPU (Triton needs a C compiler)"
    assert "asked for" in kernels.used(kernels.load("torch"), gpu)


@only_with_triton
def test_the_kernels_compute_what_formulas_in_float64_compute() -> None:
    """`test_kernels` in Triton's interpreter, which has to be asked for before Triton is imported."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(("src", "tests"))}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/test_kernels.py",
        "-k",
        "triton",
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:]
    assert done.stdout.count(".") >= 60


POINTERS = {"top", "mass", "tilt", "lse", "logp", "entropy", "dlogp", "dentropy", "cos", "sin", "part"}
INDICES = {"targets", "token", "pages", "slots"}
FLOATS = {"eps", "offset"}
DATA = {
    *("x", "residual", "weight", "out", "total", "dy", "more", "dx", "z", "k", "v", "k_pages", "v_pages"),
    *("gate", "up", "dout", "dgate", "dup"),
}
NUMBERS: dict[torch.dtype, str] = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
SIZES = {
    "norm": {"ADD": True, "WIDE": 4096},
    "norm_backward": {"ADD": True, "WEIGHT": True, "WIDE": 4096},
    "turn": {"NORM": True, "HEADS": 16, "HALF": 64},
    "turn_backward": {"NORM": True, "HEADS": 16, "HALF": 64},
    "glu": {"ACT": 2, "BLOCK": 1024},
    "glu_backward": {"ACT": 1, "BLOCK": 1024},
    "blocks": {"BLOCK": 4096},
    "logprobs": {"COUNT": 64},
    "logprobs_backward": {"ENTROPY": True, "BLOCK": 4096},
    "pick": {"COUNT": 64, "BLOCK": 4096},
    "write_kv": {"PAGE": 16, "HEADS": 8, "WIDE": 128},
}


@only_with_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", list(SIZES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_compile(name: str, capability: int, dtype: torch.dtype) -> None:
    """To machine code, which needs no GPU."""
    import triton  # type: ignore[import-not-found]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]

    from whet.models import triton_kernels

    kernel: Any = getattr(triton_kernels, name)
    constants = SIZES[name]
    of_logits = name in ("blocks", "logprobs", "logprobs_backward", "pick")
    signature = {}
    for each in kernel.arg_names:
        if each in constants:
            signature[each] = "constexpr"
        elif each in POINTERS:
            signature[each] = "*fp32"
        elif each in INDICES:
            signature[each] = "*i64"
        elif each == "uniform":
            signature[each] = "*fp64"
        elif each in FLOATS:
            signature[each] = "fp32"
        elif each in DATA:
            signature[each] = "*fp32" if of_logits else NUMBERS[dtype]
        else:
            signature[each] = "i32"
    made = triton.compile(
        triton.compiler.ASTSource(kernel, signature, constexprs=constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 8},
    )
    assert made.asm["cubin"]
    assert made.metadata.shared <= 99 << 10


def test_blocks_cover_a_vocabulary() -> None:
    assert [triton_ops.next_power(n) for n in (0, 1, 2, 3, 64, 65, 151936 // 4096 + 1)] == [
        1,
        1,
        2,
        4,
        64,
        128,
        64,
    ]
    assert torch_ops.attend_packed is triton_ops.attend_packed
