"""What a GPU does with real shapes: decode against the memory's bandwidth, an update against the products' ceiling,
memory against the plan, seconds of a weight sync.

    python benchmarks/gpu.py                          Qwen2.5 0.5B and 1.5B, on CUDA, some minutes
    python benchmarks/gpu.py --device cpu --shapes tiny     a trial, seconds

Weights are random: what is sampled means nothing, how long it takes does. The floor of a decode step is the bytes that
it has to read, the matrices once and the keys and values of every row, over the measured bandwidth of a copy (which
reads and writes). MFU is the arithmetic that the update needs over what the largest product reached. The functions are
also rows of `check_gpu.py`. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu_case import Case, Numbers
from train_case import BATCHES, SHAPES, ceiling, make_case, make_model

ROWS = {"tiny": 8}
"""Rows that decode at once; 256 where nothing is said."""
TOKENS = {"tiny": (16, 16)}
"""(prompt, reply) of each row; 256 and 256 where nothing is said."""


def clock(case: Case) -> float:
    """Seconds, when all work is done."""
    import torch

    if case.gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def dtype_of(case: Case) -> Any:
    import torch

    return torch.bfloat16 if case.gpu else torch.float32


def ceilings(case: Case) -> Numbers:
    """Bytes/s of a copy, read and written, and FLOP/s of a product."""
    return {
        "copy_gb_per_s": bandwidth(case) / 1e9,
        "product_tflop_per_s": ceiling(case.device, dtype_of(case)) / 1e12,
    }


def bandwidth(case: Case) -> float:
    import torch

    source = torch.zeros((1 << 30) if case.gpu else (1 << 26), dtype=torch.uint8, device=case.device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(5):
        start = clock(case)
        target.copy_(source)
        best = min(best, clock(case) - start)
    return 2 * source.nbytes / best


def decode(case: Case, shape: str) -> Numbers:
    """Tokens/s of the native engine, and how much of the floor's speed that is."""
    from whet.models import kernels
    from whet.rollout.native.engine import NativeEngine

    rows, (prompt, reply) = ROWS.get(shape, 256), TOKENS.get(shape, (256, 256))
    model = _model(case, shape).requires_grad_(False)
    engine = NativeEngine(
        model, kernels.load("auto"), end_token_ids=[1], max_context=prompt + reply, max_num_seqs=rows
    )
    asyncio.run(_sample(engine, rows, prompt, 4, SHAPES[shape]["vocab_size"]))  # graphs, kernels
    start = clock(case)
    asyncio.run(_sample(engine, rows, prompt, 1, SHAPES[shape]["vocab_size"]))
    middle = clock(case)
    asyncio.run(_sample(engine, rows, prompt, reply, SHAPES[shape]["vocab_size"]))
    seconds = clock(case) - middle - (middle - start)
    cache = engine.runner.cache
    assert cache is not None
    token_bytes = cache.nbytes / cache.pages / 16
    read = _matrices(model) + rows * (prompt + reply / 2) * token_bytes
    floor = read / bandwidth(case) * (reply - 1)
    return {
        "rows": rows,
        "tokens_per_s": rows * (reply - 1) / seconds,
        "of_floor": floor / seconds,
        "ms_per_step": seconds / (reply - 1) * 1e3,
        "prefill_tokens_per_s": rows * prompt / (middle - start),
        "graphs": len(engine.runner.fixed.graphs) if engine.runner.fixed is not None else 0,
    }


async def _sample(engine: Any, rows: int, prompt: int, reply: int, vocab: int) -> None:
    from whet.types import Request, Sampling

    await engine.pause(finish=False)
    engine.scheduler.pages.forget()  # every prompt is computed
    await engine.resume()
    requests = (
        Request(
            id=f"{n}",
            session=f"{n}",
            prompt=tuple(3 + (n * 977 + i * 31) % (vocab - 3) for i in range(prompt)),
            sampling=Sampling(key=n, max_tokens=reply, ignore_eos=True),
        )
        for n in range(rows)
    )
    await asyncio.gather(*map(engine.generate, requests))


def _matrices(model: Any) -> int:
    """Bytes of the parameters that a decode step reads; a tied embedding once, as the output layer."""
    return sum(p.nbytes for p in model.parameters())


def _model(case: Case, shape: str) -> Any:
    return make_model({"shape": shape, "device": case.device}, dtype_of(case))


def update(case: Case, shape: str) -> Numbers:
    """MFU of forward, backward and optimizer step over a batch, and the peak of memory."""
    import torch
    from whet_update import VARIANTS, batch_of, engine_of

    from whet.algos.clipped import ppo
    from whet.training.work import batch_flops, work_of

    given = make_case(shape, case.device)
    name = "checkpointed" if case.gpu else "whet"
    trainer, batch = engine_of(given, VARIANTS[name], dtype_of(case)), batch_of(given, VARIANTS[name])
    if case.gpu:
        torch.cuda.reset_peak_memory_stats()
    old_N = trainer.forward(batch, "logprobs")
    batch = replace(batch, logp_old_N=old_N, logp_sample_N=old_N)
    loss, seconds = partial(ppo, clip_low=0.2, clip_high=0.2, dual_clip=None), []
    for _ in range(3):
        start = clock(case)
        trainer.update(batch, loss)
        seconds.append(clock(case) - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if case.gpu else None
    flops = batch_flops(work_of(trainer.module, output=True), batch, shared=True)
    top = ceiling(case.device, dtype_of(case))
    return {
        "tokens": batch.tokens,
        "seconds": min(seconds[1:]),
        "tokens_per_s": batch.tokens / min(seconds[1:]),
        "mfu": flops / min(seconds[1:]) / top,
        "peak_gib": peak,
        "predicted_gib": predicted(case, shape),
    }


def predicted(case: Case, shape: str) -> float:
    """What `whet plan` says of the largest phase of such a run here, in GiB."""
    from whet.config.load import load
    from whet.config.memory_estimate import phases
    from whet.config.plan import plans

    sizes, batch = SHAPES[shape], BATCHES[shape]
    tree = {
        "model": {
            "scratch": {"name": "qwen2", "max_position_embeddings": batch["prompt"] + batch["reply"],
                        **{k: v for k, v in sizes.items() if k != "vocab_size"}},
            "overrides": {"vocab_size": sizes["vocab_size"]}, "dtype": "bfloat16" if case.gpu else "float32",
        },
        "tokenizer": {"build": "chars", "vocab_size": sizes["vocab_size"]},
        "data": {"max_prompt_tokens": batch["prompt"], "train": [{"rows": [{"prompt": "a", "answer": "a"}]}]},
        "rewards": {"right": {"function": "exact"}},
        "rollout": {"group_size": batch["size"], "sampling": {"max_tokens": batch["reply"]}},
        "train": {"steps": 1, "tasks_per_step": batch["groups"], "micro_batch_tokens": batch["micro"],
                  "gradient_checkpointing": case.gpu, "optimizer": {"lr": 1e-6}},
    }  # fmt: skip
    (plan,) = plans(load(None, (), tree))
    return max(p.total for p in phases(plan)) / 2**30


def weight_sync(case: Case, shape: str) -> Numbers:
    """Seconds until an engine has the trainer's weights: copied on the device, and through files."""
    from whet.models import kernels
    from whet.rollout.engine import WeightUpdate
    from whet.rollout.native.engine import NativeEngine
    from whet.sync.files import Files

    trainer, other = _model(case, shape), _model(case, shape)
    engine = NativeEngine(other, kernels.load("auto"), end_token_ids=[1], max_context=64, max_num_seqs=1)
    named = [(n, p.detach()) for n, p in trainer.named_parameters()]
    found: Numbers = {"gib": sum(p.nbytes for _, p in named) / 2**30}
    for version in (1, 2):
        start = clock(case)
        asyncio.run(engine.update_weights(WeightUpdate(version=version, tensors=iter(named))))
        found["copied_s"] = clock(case) - start
    with tempfile.TemporaryDirectory() as folder:
        transport = Files(Path(folder))
        start = clock(case)
        transport.send(1, named)
        came = ((entry.name, tensor) for entry, tensor in transport.receive(1))
        asyncio.run(engine.update_weights(WeightUpdate(version=3, tensors=came)))
        found["files_s"] = clock(case) - start
    return found


def free(case: Case) -> None:
    """Give back what the last measurement held."""
    import torch

    gc.collect()
    if case.gpu:
        torch.cuda.empty_cache()


def measured(shapes: list[str]) -> dict[str, tuple[int, Any]]:
    """Name: (seconds it may take, what it does), as in `gpu_checks.CHECKS`."""
    rows: dict[str, tuple[int, Any]] = {"ceilings": (60, ceilings)}
    for shape in shapes:
        for name, work in (("decode", decode), ("update", update), ("weight sync", weight_sync)):
            rows[f"{name}, {shape}"] = (120, partial(work, shape=shape))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qwen2.5-0.5b", "qwen2.5-1.5b"])
    args = parser.parse_args()
    case = Case(args.device, small=args.device == "cpu")
    for name, (_, work) in measured(args.shapes).items():
        print(json.dumps({"name": name, **work(case)}), flush=True)
        free(case)


if __name__ == "__main__":
    main()
