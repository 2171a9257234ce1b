"""A whole step away from the CPU (see `accelerator`): it computes what it does there, leaves nothing on the host, and
makes the host wait only where that is written down here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from accelerator import CUDA, DEVICE, Accelerator, LeftOnHost, accelerator, moved, near
from asking import reply
from test_native import ask, mixed_jobs, run
from test_native_graphs import Strict
from test_train_contract import ADAM
from test_train_torch import CUT, pg_loss, weighted
from tiny import tiny_model
from whet.models import kernels
from whet.models.kernels import Ops
from whet.models.packing import layout
from whet.rollout.engine import WeightUpdate
from whet.rollout.native.engine import NativeEngine
from whet.training.torch import TorchEngine
from whet.types import Completion, Sampling

STEP = {"rollout/native/runner.py:ended": 1}
"""Where the host waits in a decode step: it learns which rows end."""
SAMPLING = {
    "rollout/native/runner.py:ended",
    "rollout/native/runner.py:_take_out",
    "rollout/native/runner.py:_on_host",  # what rows have sampled, when some end
}
UPDATE = {
    "models/packing.py:layout",  # once for each micro-batch: what is computed, and which tokens predict
    "models/packing.py:_segments",
    "models/packing.py:_prompt_owner",
    "models/context_parallel.py:predicted",
    "training/sums.py:add",  # statistics of each micro-batch
    "training/sums.py:_take",
    "training/balance.py:together",
    "models/optim.py:_clipped",  # once for each optimizer step: is the gradient finite?
}


def native(module: Any, ops: Ops, **options: Any) -> NativeEngine:
    """Where there is no GPU nothing can be captured for one."""
    options = {"recorder": Strict() if CUDA else None} | options
    return NativeEngine(module, ops, end_token_ids=[1], max_context=100, max_num_seqs=8, **options)


def plain_steps(e: NativeEngine, device: Accelerator) -> list[tuple[Counter[str], Counter[str]]]:
    """(waits, copies) of each decode step in which no row ended; filled as the engine runs."""
    seen: list[tuple[Counter[str], Counter[str]]] = []
    step = e.runner.step

    def noted() -> Any:
        before = device.waits.copy(), device.copies.copy()
        ended = step()
        if not ended:
            seen.append((device.waits - before[0], device.copies - before[1]))
        return ended

    e.runner.step = noted  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(("recorder", "dtype"), [(None, torch.float32), (Strict, torch.bfloat16)])
def test_a_decode_step_waits_once_and_says_what_a_cpu_says(recorder: Any, dtype: torch.dtype) -> None:
    """Rows of all kinds of sampling, prefills, pages that are added, rows that end."""
    ops, jobs = kernels.load("torch"), mixed_jobs(10)
    options = {} if recorder is None else {"recorder": recorder()}
    wanted = run(ask(native(tiny_model().to(dtype), ops), jobs))  # type: ignore[arg-type]
    with accelerator() as device:
        e = native(moved(tiny_model().to(dtype)), ops, **options)  # type: ignore[arg-type]
        seen = plain_steps(e, device)
        said = run(ask(e, jobs))
    assert len(seen) >= 10
    assert all((waits, copies) == (STEP, Counter()) for waits, copies in seen), device.lines
    assert device.waits.keys() <= SAMPLING, device.lines
    if dtype == torch.float32:
        assert [x.token_ids for x in said] == [x.token_ids for x in wanted]
        for mine, theirs in zip(said, wanted):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_stop_strings_and_long_nuclei_are_all_that_asks_more() -> None:
    """A stop string needs the text; a top-p that the 1024 likeliest tokens do not reach needs a sort."""
    with accelerator() as device:
        e = native(moved(tiny_model()), kernels.load("torch"), decode=lambda ids: "ab"[ids[-1] % 2])  # type: ignore[arg-type]
        run(
            ask(
                e,
                [([5, 6], Sampling(stop=("abba",), max_tokens=8)), ([7], Sampling(top_p=0.9, max_tokens=8))],
            )
        )
    assert device.waits.keys() - SAMPLING == {"rollout/native/runner.py:_met"}


# ---------------------------------------------------------------- the test of the test


def planted(ops: Ops, extra: Callable[[Tensor], object]) -> Ops:
    """With something more in the first norm of a forward."""

    def rms_norm(x: Tensor, *more: Any, **how: Any) -> Tensor:
        found = extra(x)
        y = ops.rms_norm(x, *more, **how)
        return y + found if isinstance(found, Tensor) else y

    return replace(ops, rms_norm=rms_norm)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool((x > 1e9).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.ones(1).to(x.device),
    ],
    ids=["item", "tolist", "bool", "nonzero", "mask", "upload"],
)
def test_a_planted_read_is_found_with_its_line(read: Callable[[Tensor], object]) -> None:
    ops = planted(kernels.load("torch"), lambda x: None if read(x) is None else 0)
    with accelerator() as device:
        e = native(moved(tiny_model()), ops)  # type: ignore[arg-type]
        e.runner.fixed = None  # a capture would refuse the model, which then runs like this
        seen = plain_steps(e, device)
        run(ask(e, [([5, 6, 7], Sampling(max_tokens=6, ignore_eos=True))]))
    place = "models/fused_forward.py:one_layer"
    assert seen
    assert all(waits[place] + copies[place] == 1 for waits, copies in seen)
    assert device.lines[place].startswith("models/fused_forward.py:")


def test_a_planted_tensor_of_the_host_is_refused_with_its_line() -> None:
    ops = planted(kernels.load("torch"), lambda x: torch.zeros(32))
    with accelerator(), pytest.raises(LeftOnHost, match=r"^models/\w+\.py:\d+: aten\.add.* of the host"):
        run(reply(native(moved(tiny_model()), ops, recorder=Strict()), [5, 6], Sampling(max_tokens=4)))  # type: ignore[arg-type]


# ---------------------------------------------------------------- the whole step


Told = tuple[list[Completion], Tensor, list[dict[str, float]], list[Completion]]


def whole_step(module: Any, ops: Ops, *, other: Any) -> Told:
    """Sample, log-probs, loss, backward, two optimizer steps, weights to an engine, sample."""
    trainer = TorchEngine(
        module, ops, cut=CUT, optimizer=ADAM.model_copy(update={"implementation": "foreach"}), total_steps=4
    )
    engine = native(module, ops)
    jobs = [([5, 6, 7 + n % 2], Sampling(key=n, max_tokens=9)) for n in range(6)]
    first = run(ask(engine, jobs))
    batch = weighted()
    logp_N = trainer.forward(batch, "logprobs")
    told = [trainer.update(weighted(seed), pg_loss) for seed in (0, 1)]
    engine_elsewhere = native(other, ops)
    run(engine_elsewhere.update_weights(WeightUpdate(version=1, tensors=trainer.weights())))
    return first, near(logp_N), told, run(ask(engine_elsewhere, jobs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_log_probs_of_packed_tokens(dtype: torch.dtype) -> None:
    """In half precision on CUDA by torch's attention of variable length, else bucket by bucket."""
    ops, batch = kernels.load("torch"), weighted()
    wanted = TorchEngine(tiny_model().to(dtype), ops, cut=CUT).forward(batch, "logprobs")  # type: ignore[arg-type]
    with accelerator() as device:
        logp_N = TorchEngine(moved(tiny_model().to(dtype)), ops, cut=CUT).forward(batch, "logprobs")  # type: ignore[arg-type]
    assert torch.allclose(near(logp_N), wanted, atol=1e-5 if dtype == torch.float32 else 0.05)
    assert device.waits.keys() <= UPDATE, device.lines


@pytest.mark.skipif(CUDA, reason="the backward pass of tensors of CUDA asks the driver")
def test_a_whole_step_is_that_of_a_cpu_and_waits_where_it_is_written() -> None:
    ops = kernels.load("torch")
    wanted = whole_step(tiny_model(), ops, other=tiny_model(seed=9))
    with accelerator() as device:
        told = whole_step(moved(tiny_model()), ops, other=moved(tiny_model(seed=9)))
    assert torch.allclose(told[1], wanted[1], atol=1e-5)
    for mine, theirs in zip(told[2], wanted[2]):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    for at in (0, 3):
        assert [x.token_ids for x in told[at]] == [x.token_ids for x in wanted[at]]
    assert device.waits.keys() <= SAMPLING | UPDATE, device.lines


@pytest.mark.parametrize("experts", [False, True])
def test_what_a_micro_batch_computes_is_asked_for_twice(experts: bool) -> None:
    """Is a first token sampled? How many tokens are computed? Whatever is known of these tokens."""
    batch = weighted()
    routed_NLE = torch.zeros(batch.tokens, 2, 2, dtype=torch.uint8) if experts else None
    with accelerator() as device:
        layout(replace(batch, routed_NLE=routed_NLE).to(DEVICE), share_prompts=False)
    assert device.waits["models/packing.py:layout"] == 2


@pytest.mark.skipif(CUDA, reason="the backward pass of tensors of CUDA asks the driver")
def test_no_layer_waits_or_copies() -> None:
    """An update of four layers asks no more of the host than one of two."""
    found = []
    for layers in (2, 4):
        with accelerator() as device:
            trainer = TorchEngine(
                moved(tiny_model(layers=layers)),  # type: ignore[arg-type]
                kernels.load("torch"),
                cut=CUT,
                optimizer=ADAM.model_copy(update={"implementation": "foreach"}),
            )
            trainer.update(weighted(), pg_loss)
        found.append((device.waits, device.copies))
    assert found[0] == found[1]
