"""The checks of `check_gpu.py` that compare numbers: each is a function of a `Case` and returns what it saw.

A check raises `Failed` with the number that was out of bounds, and `Skipped` with the reason where the device cannot
have it. On a CPU the same functions run at small size, so that they are known to run.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_case import ROOT, Case, Failed, Numbers, Skipped, needs_gpu, within
from gpu_operations import attention_over_pages, operations, packed_attention, vocabulary

# ---------------------------------------------------------------- the machine


def machine(case: Case) -> Numbers:
    """What there is, and whether it is what whet pins."""
    import platform

    import torch
    import transformers

    from whet.models import paged

    pin = next(d for d in _pins() if d.startswith("torch=="))
    found: Numbers = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pinned": pin,
        "as_pinned": torch.__version__.split("+")[0] == pin.removeprefix("torch=="),
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "pages_in_place": paged.lacks() or "yes",
    }
    if case.gpu:
        about = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": about.name,
            "memory_gib": round(about.total_memory / 2**30, 1),
            "capability": f"{about.major}.{about.minor}",
        }
    return found


def _pins() -> list[str]:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [str(x) for x in project["dependencies"]]


# ---------------------------------------------------------------- the loop


def loop(case: Case, dtype: str, *, loss_bound: float, reward_bound: float) -> Numbers:
    """examples/first_run.yaml, shortened: losses and rewards of the device's run against the CPU's."""
    sft, rl = (4, 2) if case.small else (60, 10)
    with tempfile.TemporaryDirectory() as folder:
        cpu = _trained("cpu", "float32", Path(folder) / "cpu", sft, rl)
        here = _trained(case.device, dtype, Path(folder) / "device", sft, rl)
    found: Numbers = {
        "steps": f"{sft} + {rl}",
        "log_prob_match_max_nats": max(_all(here, "mismatch_max"), default=0.0),
    }
    for name, bound, stage in (("loss", loss_bound, "sft"), ("reward", reward_bound, "rl")):
        mine, theirs = _series(here, stage, name), _series(cpu, stage, name)
        if len(mine) != len(theirs) or not mine:
            raise Failed(f"{stage}: {len(mine)} of {len(theirs)} steps have a {name}")
        found[f"{name}_difference"] = within(
            f"the largest difference of {stage}'s {name}",
            max(abs(a - b) for a, b in zip(mine, theirs)),
            bound,
        )
    return found


def _trained(device: str, dtype: str, run_dir: Path, sft: int, rl: int) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    command = [
        sys.executable, "-m", "whet", "train", "examples/first_run.yaml", f"run_dir={run_dir}",
        f"machine.device={device}", f"model.dtype={dtype}", "checkpoint.export=false", "track.trackers=[jsonl]",
        f"stages.sft.train.steps={sft}", "stages.sft.train.optimizer.schedule.warmup_steps=2",
        f"stages.rl.train.steps={rl}", "stages.rl.train.optimizer.schedule.warmup_steps=1",
        "stages.sft.eval.interval=1000", "stages.rl.eval.interval=1000",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"whet train on {device} in {dtype}: {(done.stderr or done.stdout).strip()[-600:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _series(lines: list[dict[str, Any]], stage: str, name: str) -> list[float]:
    key = {"loss": "train/loss", "reward": "reward/mean"}[name]
    return [float(x[key]) for x in lines if x.get("stage") == stage and key in x]


def _all(lines: list[dict[str, Any]], part: str) -> list[float]:
    return [float(v) for x in lines for k, v in x.items() if part in k and isinstance(v, float)]


# ---------------------------------------------------------------- the engine


def model(case: Case, dtype: str, *, device: str | None = None, seed: int = 0) -> Any:
    """Qwen3, 4 layers, random weights: the same numbers on every device."""
    import torch

    from whet.config.schema import ModelConfig
    from whet.models.load import build

    scratch = {
        "hidden_size": 64 if case.small else 512,
        "num_hidden_layers": 2 if case.small else 4,
        "num_attention_heads": 4 if case.small else 8,
        "num_key_value_heads": 2,
        "head_dim": 16 if case.small else 64,
        "intermediate_size": 96 if case.small else 1536,
        "initializer_range": 0.1,
    }
    made = build(
        ModelConfig(scratch=scratch),
        vocab_size=512,
        eos_token_id=1,
        pad_token_id=0,
        seed=seed,
        device="cpu",
        dtype=torch.float32,
    )
    moved: Any = made
    return moved.to(device or case.device, getattr(torch, dtype))


def sampled(
    module: Any, *, rows: int = 12, tokens: int = 40, temperature: float = 1.0, **options: Any
) -> list[Any]:
    """Replies of the native engine to random prompts."""
    from whet.models import kernels
    from whet.rollout.native.engine import NativeEngine
    from whet.types import Request, Sampling

    engine = NativeEngine(
        module, kernels.load("auto"), end_token_ids=[1], max_context=200, max_num_seqs=rows, **options
    )

    async def story() -> list[Any]:
        asked = (
            Request(
                id=str(n),
                session=str(n),
                prompt=tuple(3 + (7 * n + i) % 500 for i in range(5 + 9 * n)),
                sampling=Sampling(key=n, max_tokens=tokens, temperature=temperature, ignore_eos=True),
            )
            for n in range(rows)
        )
        return list(await asyncio.gather(*map(engine.generate, asked)))

    done = asyncio.run(story())
    sampled.last = engine  # type: ignore[attr-defined]
    return done


def scored(module: Any, replies: list[Any]) -> list[Any]:
    """The trainer's log-probs of what was sampled."""
    import torch

    from whet.models import kernels
    from whet.models.attention import PackedAttention, Segments
    from whet.models.forward import decoder
    from whet.models.logprobs import token_logprobs

    ops, found = kernels.load("auto"), []
    made = decoder(module, ops)
    device = made.head.linear.weight.device
    for n, reply in enumerate(replies):
        prompt = [3 + (7 * n + i) % 500 for i in range(5 + 9 * n)]
        ids = torch.tensor([*prompt, *reply.token_ids])
        segments = Segments.of_lengths(torch.tensor([len(ids)]))
        with torch.no_grad():
            hidden = made.hidden(
                ids.to(device), segments.position_N.to(device), PackedAttention(segments, ops)
            )
            rows = hidden[len(prompt) - 1 : -1].contiguous()
            targets = ids[len(prompt) :].to(device)
            found.append(token_logprobs(rows, targets, head=made.head, ops=ops)[0].float().cpu())
    return found


def engine(case: Case, dtype: str) -> Numbers:
    """What the engine samples on the device: log-probs against a CPU's in float32, and the tokens."""
    import torch

    here = sampled(model(case, dtype))
    exact = scored(model(case, "float32", device="cpu"), here)
    off = torch.cat([(torch.tensor(r.logprobs) - e).abs() for r, e in zip(here, exact)])
    there = sampled(model(case, "float32", device="cpu"))
    same = [a == b for x, y in zip(here, there) for a, b in zip(x.token_ids, y.token_ids)]
    bounds = (1e-3, 1e-4) if dtype == "float32" else (1.0, 0.1)
    return {
        "largest_nats": within("the largest difference of a log-prob", float(off.max()), bounds[0]),
        "mean_nats": within("the mean difference of a log-prob", float(off.mean()), bounds[1]),
        "equal_tokens": sum(same) / len(same),
    }


def engine_and_trainer(case: Case, dtype: str) -> Numbers:
    """Log-probs when sampled against the trainer's, both on the device: what a run reports as its match."""
    import torch

    module = model(case, dtype)
    here = sampled(module)
    theirs = scored(module, here)
    off = torch.cat([(torch.tensor(r.logprobs) - e).abs() for r, e in zip(here, theirs)])
    return {
        "largest_nats": within(
            "the largest difference", float(off.max()), 1e-3 if dtype == "float32" else 0.5
        ),
        "mean_nats": float(off.mean()),
        "exact": bool((off == 0).all()),
    }


def graphs(case: Case) -> Numbers:
    """With CUDA graphs and launched kernel by kernel: the same tokens and bits; and graphs are there at all."""
    needs_gpu(case, "capturing a graph")
    from whet.rollout.native import runner

    module = model(case, "bfloat16")
    captured = sampled(module)
    fixed = sampled.last.runner.fixed  # type: ignore[attr-defined]
    if fixed is None:
        raise Failed("the engine gave up graphs; its log says which operation cannot be captured")
    count, before = len(fixed.graphs), runner.CudaGraphs
    runner.CudaGraphs = lambda device: None  # type: ignore[assignment, misc, return-value]
    try:
        launched = sampled(module)
    finally:
        runner.CudaGraphs = before  # type: ignore[misc]
    if [x.token_ids for x in captured] != [x.token_ids for x in launched]:
        raise Failed("tokens differ between graphs and single launches")
    off = max(abs(a - b) for x, y in zip(captured, launched) for a, b in zip(x.logprobs, y.logprobs))
    return {"graphs": count, "largest_nats": within("the largest difference of a log-prob", off, 1e-3)}


def alone_or_together(case: Case, dtype: str) -> Numbers:
    """Whether a reply depends on its batch (on a CPU it does not; on a GPU nothing is promised)."""
    module = model(case, dtype)
    many, few = sampled(module), sampled(module, rows=3)
    same = [a == b for x, y in zip(many, few) for a, b in zip(x.token_ids, y.token_ids)]
    off = [abs(a - b) for x, y in zip(many, few) for a, b in zip(x.logprobs, y.logprobs)]
    return {"equal_tokens": sum(same) / len(same), "largest_nats": max(off)}


def quantised(case: Case, kind: str) -> Numbers:
    """Sampling from 8-bit weights: log-probs against those of the weights as they are."""
    import torch

    from whet.types import ConfigError

    module = model(case, "bfloat16" if case.gpu else "float32")
    try:
        here = sampled(module, quantization=kind)
    except ConfigError as error:
        raise Skipped(str(error)) from error
    off = torch.cat([(torch.tensor(r.logprobs) - e).abs() for r, e in zip(here, scored(module, here))])
    return {"mean_nats": within("the mean difference of a log-prob", float(off.mean()), 0.5)}


# ---------------------------------------------------------------- training


def batch(case: Case) -> Any:
    """Two groups of four random rollouts, with weights and advantages."""
    import random

    from whet_update import Variant, batch_of

    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, 500) for _ in range(count)]

    groups = [
        {
            "prompt": tokens(24),
            "replies": [tokens(draw.randint(8, 40)) for _ in range(4)],
            "advantages": [draw.gauss(0.0, 1.0) for _ in range(4)],
        }
        for _ in range(2)
    ]
    return batch_of({"groups": groups}, Variant())


def loss(given: Any, out: Any) -> Any:
    from whet.batch import Loss

    return Loss(-out.logp_N * given.adv_N - 0.01 * out.entropy_N)


def updated(
    case: Case, module: Any, *, steps: int = 3, optimizer: Any = None, **cut: Any
) -> tuple[list[Any], Any]:
    """(metrics of each update, engine)."""
    from whet.config.schema import OptimizerConfig
    from whet.models import kernels
    from whet.training.micro_batches import MicroBatchPolicy
    from whet.training.torch import TorchEngine

    trainer = TorchEngine(
        module,
        kernels.load("auto"),
        cut=MicroBatchPolicy(entropy_grad=True, **cut),
        optimizer=OptimizerConfig(lr=1e-3, **(optimizer or {})),
        total_steps=10,
    )
    return [trainer.update(batch(case), loss) for _ in range(steps)], trainer


def training(case: Case, *, bound: float, dtype: str = "float32", **how: Any) -> Numbers:
    """Norm and loss of three updates on the device against a CPU's in float32, without what is checked."""
    theirs, _ = updated(case, model(case, "float32", device="cpu"))
    mine, trainer = updated(case, model(case, dtype), **how)
    found: Numbers = {}
    for key in ("grad_norm", "loss"):
        off = max(abs(a[key] - b[key]) / (abs(b[key]) + 1.0) for a, b in zip(mine, theirs))
        found[key] = within(f"the relative difference of {key}", off, bound)
    if trainer.optimizer is not None:
        state = trainer.optimizer.state()
        found["optimizer_mib"] = sum(x.nbytes for x in state.values()) / 2**20
    return found


def one_rank(case: Case, *, zero: int | None = None) -> Numbers:
    """Ranks at world size 1 (NCCL on a GPU): the update of one process. zero: DeepSpeed shards, at this stage."""
    from importlib.util import find_spec

    from whet.config.deepspeed import INSTALL, engine_config
    from whet.config.schema import OptimizerConfig, TrainConfig
    from whet.models.mesh import Dims
    from whet.training.micro_batches import MicroBatchPolicy
    from whet.training.ranks import RankGroup, Ranks

    how: dict[str, Any] = {"optimizer": OptimizerConfig(lr=1e-3)}
    if zero is not None:
        if find_spec("deepspeed") is None:
            raise Skipped(f"deepspeed is not installed; {INSTALL}")
        train = TrainConfig(engine_arguments={"zero_optimization": {"stage": zero}})
        how["deepspeed"] = engine_config(train, how["optimizer"], "float32")
    theirs, _ = updated(case, model(case, "float32"), steps=2)
    ranks = Ranks(Dims(), device=case.device, timeout_s=120.0)
    try:
        group = RankGroup(
            ranks,
            "policy",
            model(case, "float32", device="cpu"),
            cut=MicroBatchPolicy(entropy_grad=True),
            total_steps=10,
            **how,
        )
        mine = [group.update(batch(case), loss) for _ in range(2)]
    finally:
        ranks.close()
    off = max(abs(a["grad_norm"] - b["grad_norm"]) for a, b in zip(mine, theirs))
    return {"grad_norm": within("the difference of the gradient's norm", off, 1e-3)}


def contract(case: Case, file: str, chosen: str) -> Numbers:
    """A contract suite, with its models on the device."""
    import os

    command = [sys.executable, "-m", "pytest", f"tests/{file}", "-q", "-k", chosen, "-p", "no:cacheprovider"]
    env = os.environ | {"WHET_TEST_DEVICE": case.device, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    lines = [x for x in done.stdout.strip().splitlines() if x.strip()]
    if done.returncode:
        failed = [x for x in lines if x.startswith(("FAILED", "ERROR"))]
        raise Failed("; ".join(failed[:6]) or (done.stderr or done.stdout).strip()[-400:])
    return {"passed": sum(x.count(".") for x in lines if set(x.split()[0]) <= set(".sxFE"))}


CHECKS: dict[str, tuple[int, Callable[[Case], Numbers]]] = {
    "machine": (60, machine),
    "operations, float32": (60, lambda c: operations(c, dtype="float32")),
    "operations, bfloat16": (60, lambda c: operations(c, dtype="bfloat16")),
    "vocabulary": (60, vocabulary),
    "attention over pages, float32": (90, lambda c: attention_over_pages(c, dtype="float32")),
    "attention over pages, bfloat16": (90, lambda c: attention_over_pages(c, dtype="bfloat16")),
    "attention of packed batches": (60, packed_attention),
    "engine, float32": (90, lambda c: engine(c, "float32")),
    "engine, bfloat16": (90, lambda c: engine(c, "bfloat16")),
    "engine against trainer, float32": (60, lambda c: engine_and_trainer(c, "float32")),
    "engine against trainer, bfloat16": (60, lambda c: engine_and_trainer(c, "bfloat16")),
    "CUDA graphs": (90, graphs),
    "alone or together": (60, lambda c: alone_or_together(c, "bfloat16" if c.gpu else "float32")),
    "8-bit rollouts, float8": (60, lambda c: quantised(c, "float8")),
    "8-bit rollouts, int8": (60, lambda c: quantised(c, "int8")),
    "update, float32": (60, lambda c: training(c, bound=1e-3)),
    "update, bfloat16": (60, lambda c: training(c, bound=0.1, dtype="bfloat16")),
    "8-bit optimizer": (60, lambda c: training(c, bound=0.05, optimizer={"state_dtype": "int8"})),
    "offload": (60, lambda c: training(c, bound=1e-3, offload=("optimizer", "activations"))),
    "checkpointed": (60, lambda c: training(c, bound=1e-3, checkpoint=True)),
    "compiled": (180, lambda c: training(c, bound=1e-2, compile=True)),
    "one rank (NCCL)": (120, one_rank),
    "one rank, DeepSpeed 2": (120, lambda c: one_rank(c, zero=2)),
    "one rank, DeepSpeed 3": (120, lambda c: one_rank(c, zero=3)),
    "the loop, float32": (
        150, lambda c: loop(c, "float32", loss_bound=1e-2, reward_bound=0.2),
    ),
    "the loop, bfloat16": (
        150, lambda c: loop(c, "bfloat16", loss_bound=0.3, reward_bound=0.4),
    ),
    "contract of engines": (
        150, lambda c: contract(c, "test_rollout_contract.py", "native and not to_the_bit and not vllm"),
    ),
    "contract of trainers": (
        120, lambda c: contract(c, "test_train_contract.py", "this"),
    ),
}  # fmt: skip
"""Name: (seconds it may take, what it does)."""
