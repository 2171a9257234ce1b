"""The self-test says 'exact' where it is so, and notices one bit."""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Literal
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tiny import FAMILIES, FEW, VOCAB, tiny_model
from whet import environment
from whet.models import kernels, products, torch_ops
from whet.models.forward import decoder
from whet.models.logprob_parity import ExactReport, self_test

OPS = kernels.load("torch")
USUAL, SWEEP = ("auto", torch.bfloat16), pytest.mark.sweep

RUN = """
import json
from whet import environment
environment.prepare(1, True)
import torch
assert torch.get_num_threads() == 1
from test_forward import foreign, shaken
from tiny import FAMILIES
from whet.config.schema import ModelConfig
from whet.models import kernels
from whet.models.logprob_parity import self_test
from whet.models.forward import decoder
from whet.models.load import build

def make(kind):
    if kind == "gemma2":
        return foreign(kind, vocab_size=101, intermediate_size=96, final_logit_softcapping=3.0)
    scratch = dict(
        name=kind, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, initializer_range=0.1,
    )
    if kind in ("mistral", "gpt_oss"):
        scratch["sliding_window"] = 8
    return build(
        ModelConfig(scratch=scratch), vocab_size=101, eos_token_id=1, pad_token_id=0, seed=0, device="cpu",
        dtype=torch.float32,
    )

out = {}
for name in ("torch", "auto"):
    ops = kernels.load(name)
    for kind in (*FAMILIES, "gemma2"):
        report = self_test(decoder(shaken(make(kind)), ops), ops, vocab_size=101, seed=1, temperature=0.9)
        out[f"{kind}/{name}"] = (report.exact, report.tokens, report.mismatches)
print(json.dumps(out))
"""


@pytest.mark.skipif(not products.chosen().lawful, reason="nothing here keeps the law of the products")
@pytest.mark.parametrize(
    ("family", "kind", "dtype"),
    [
        pytest.param(*case, marks=() if case[0] in ("qwen3", "qwen3_moe") or case[1:] == USUAL else SWEEP)
        for case in itertools.product(FAMILIES, ("torch", "auto"), (torch.bfloat16, torch.float16))
    ],
)
def test_half_precision_is_exact(family: str, kind: Literal["torch", "auto"], dtype: torch.dtype) -> None:
    """As on a CPU that does not multiply it itself; tiny models, whose feed-forward widths are multiples of 16."""
    if kind == "torch" and not attention_agrees():
        pytest.skip(
            "rows of torch's products do not agree here, and the attention of the twins is made of them"
        )
    ops, threads = kernels.load(kind), torch.get_num_threads()
    try:
        torch.set_num_threads(1 if kind == "torch" else 2)
        with patch.object(
            products, "half_by", lambda dtype: "float32" if dtype in products.HALF else "torch"
        ):
            module = tiny_model(family).to(dtype)  # type: ignore[arg-type]
            report = self_test(decoder(module, ops), ops, vocab_size=VOCAB, seed=1, temperature=0.9)
            assert report.exact, report
    finally:
        torch.set_num_threads(threads)


def attention_agrees() -> bool:
    """Scores of heads of 16 with few and many keys, and the sums over as many."""
    generator = torch.Generator().manual_seed(3)
    for inner, columns in ((16, 16), (16, 128), (128, 16)):
        a, b = (torch.randn(2, *size, generator=generator) for size in ((65, inner), (inner, columns)))
        whole = torch_ops.batched_product(a, b)
        if any(
            not torch.equal(torch_ops.batched_product(a[:, :n], b), whole[:, :n])
            for n in (1, 2, 3, 4, 5, 7, 16, 33)
        ):
            return False
    return True


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="row-independent products need MKL")
def test_every_family_is_exact_in_the_prepared_environment() -> None:
    """In a process of its own, for MKL and OpenMP read their environment once.

    Feed-forward widths are multiples of 32, and there is one thread: else torch's own SiLU rounds by a row's place in
    the batch, at the end of each thread's share.
    """
    environment = {k: v for k, v in os.environ.items() if k != "MKL_CBWR"}
    environment["PYTHONPATH"] = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout.splitlines()[-1])
    assert len(reports) == 2 * (len(FAMILIES) + 1)
    assert [name for name, (exact, _, _) in reports.items() if not exact] == []
    assert all(tokens > 300 and mismatches == 0 for _, tokens, mismatches in reports.values())


@pytest.mark.parametrize("kind", FEW)
def test_sampler_and_trainer_agree_to_rounding_in_any_environment(kind: str) -> None:
    report = self_test(decoder(tiny_model(kind), OPS), OPS, vocab_size=VOCAB, seed=3)
    assert report.tokens > 300
    assert report.max_diff < 1e-5
    assert report.exact == (report.mismatches == 0)


def _one_bit_up(logits_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    token_B, logp_B = OPS.sample(logits_BV, uniform_B)
    return token_B, torch.nextafter(logp_B, torch.zeros(()))


def test_one_bit_is_noticed() -> None:
    model = tiny_model()
    before = self_test(decoder(model, OPS), OPS, vocab_size=VOCAB, seed=0)
    ops = replace(OPS, sample=_one_bit_up)
    report = self_test(decoder(model, ops), ops, vocab_size=VOCAB, seed=0)
    assert not report.exact
    assert report.tokens == before.tokens
    assert report.mismatches > report.tokens - before.mismatches - 1
    assert 0 < report.max_diff < 1e-5
    assert str(report).startswith(f"close: {report.mismatches} of {report.tokens}")


def test_stale_cache_is_noticed() -> None:
    """A decode step whose keys are not written must show, far beyond rounding."""

    def forget(*args: object, **kwargs: object) -> None: ...

    ops = replace(OPS, write_kv=forget, cached_layers=None)
    report = self_test(decoder(tiny_model(), ops), ops, vocab_size=VOCAB, seed=0)
    assert not report.exact
    assert report.max_diff > 1e-3


def test_nan_is_a_mismatch_not_a_match() -> None:
    def broken(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        logp_N, entropy_N = OPS.logprobs(logits_NV, targets_N)
        return logp_N * torch.nan, entropy_N

    ops = replace(OPS, logprobs=broken)
    report = self_test(decoder(tiny_model(), ops), ops, vocab_size=VOCAB, seed=0)
    assert report.mismatches == report.tokens


def test_no_garbage_is_searched_around_imports_alone() -> None:
    for on in (True, False, True):
        (gc.enable if on else gc.disable)()
        with environment.importing():
            assert not gc.isenabled()
        assert gc.isenabled() == on


def test_words() -> None:
    assert str(ExactReport(True, 12, 0, 0.0)) == "exact: all 12 log-probs compared are equal bit for bit"
    assert str(ExactReport(False, 12, 3, 9.5e-7)) == (
        "close: 3 of 12 log-probs differ, by at most 9.5e-07 nats"
    )
