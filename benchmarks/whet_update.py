"""whet's side of `train.py`: `TorchEngine.update` over a batch that is given, or the log-probs of one output layer.

    python benchmarks/whet_update.py update --case case.json [--variant padded] [--updates 3]
    python benchmarks/whet_update.py logprobs --how chunked [--rows 4096]

Variants: `whet` as it comes, and with one thing of it undone. One line of JSON on stdout, the first update left out.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from whet import environment


@dataclass(frozen=True)
class Variant:
    packed: bool = True
    """False: every rollout takes as many tokens as the longest prompt and the longest reply have."""
    shared: bool = True
    logits_kept: int | None = None
    """Up to so many logits of a micro-batch are kept for the backward pass. None: as whet has it, 2^24."""
    checkpoint: bool = False
    compile: bool = False


VARIANTS = {
    "whet": Variant(),
    "prompts not shared": Variant(shared=False),
    "padded": Variant(packed=False, shared=False),
    "logits in chunks": Variant(logits_kept=0),
    "logits kept": Variant(logits_kept=1 << 62),
    "checkpointed": Variant(checkpoint=True),
    "compiled": Variant(compile=True),
}


def batch_of(case: dict[str, Any], variant: Variant) -> Any:
    """The case as a Batch. Padding is tokens that are computed as sampled ones are and count nothing."""
    import torch

    from whet.batch import Batch

    rows = [
        (number, group["prompt"], reply, advantage)
        for number, group in enumerate(case["groups"])
        for reply, advantage in zip(group["replies"], group["advantages"])
    ]
    widest = max(len(p) for _, p, _, _ in rows) + max(len(r) for _, _, r, _ in rows)
    pad_R = [0 if variant.packed else widest - len(p) - len(r) for _, p, r, _ in rows]

    def spread(prompt: Any, reply: Any, padding: Any) -> Any:
        parts = ([prompt] * len(p) + [reply] * len(r) + [padding] * n for (_, p, r, _), n in zip(rows, pad_R))
        return torch.tensor([x for part in parts for x in part])

    length_R = torch.tensor([len(p) + len(r) + n for (_, p, r, _), n in zip(rows, pad_R)])
    rollout_R = torch.arange(len(rows))
    rollout_N = torch.repeat_interleave(rollout_R, length_R)
    mask_N = spread(False, True, True)
    counts_N = spread(0.0, 1.0, 0.0)
    tokens = [t for (_, p, r, _), n in zip(rows, pad_R) for t in [*p, *r, *[0] * n]]
    return Batch(
        token_ids_N=torch.tensor(tokens),
        mask_N=mask_N,
        segment_N=rollout_N,
        rollout_N=rollout_N,
        version_N=torch.where(mask_N, 0, -1),
        logp_sample_N=torch.zeros(len(tokens)),
        length_S=length_R,
        prompt_S=torch.tensor([len(p) for _, p, _, _ in rows]),
        rollout_S=rollout_R,
        group_R=torch.tensor([number for number, _, _, _ in rows]),
        reward_R=torch.zeros(len(rows)),
        stopped_R=torch.ones(len(rows), dtype=torch.bool),
        adv_N=torch.tensor([a for _, _, _, a in rows])[rollout_N] * counts_N,
        weight_N=counts_N / counts_N.sum(),
    )


def engine_of(case: dict[str, Any], variant: Variant, dtype: Any) -> Any:
    from train_case import make_model

    from whet.config.schema import OptimizerConfig
    from whet.models import kernels
    from whet.training.micro_batches import MicroBatchPolicy
    from whet.training.torch import TorchEngine

    return TorchEngine(
        make_model(case, dtype),
        kernels.load("auto"),
        cut=MicroBatchPolicy(
            max_tokens=case["micro_batch_tokens"],
            share_prompts=variant.shared,
            checkpoint=variant.checkpoint,
            compile=variant.compile,
        ),
        optimizer=OptimizerConfig(lr=1e-6),
        total_steps=100,
    )


def update(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from train_case import ceiling, now, peak_mb

    from whet.algos.clipped import ppo
    from whet.models import logprobs
    from whet.training.work import batch_flops, work_of

    case, variant = json.loads(args.case.read_text()), VARIANTS[args.variant]
    device = case["device"]
    if variant.logits_kept is not None:
        logprobs.KEEP = variant.logits_kept
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    peak_flops, imported = ceiling(device, dtype), peak_mb(device)
    engine = engine_of(case, variant, dtype)
    batch = batch_of(case, variant)
    old_N = engine.forward(batch, "logprobs")
    batch = replace(batch, logp_old_N=old_N, logp_sample_N=old_N)
    loss = partial(ppo, clip_low=0.2, clip_high=0.2, dual_clip=None)
    seconds, norms = [], []
    for _ in range(args.updates):
        start = now(device)
        norms.append(engine.update(batch, loss)["grad_norm"])
        seconds.append(now(device) - start)
    plain = batch_of(case, Variant())
    work = work_of(engine.module, output=True)
    return {
        "seconds": seconds[1:],
        "grad_norm": norms[0],
        "peak_mb": peak_mb(device),
        "growth_mb": peak_mb(device) - imported,
        "ceiling": max(peak_flops, ceiling(device, dtype)),
        "tokens": plain.tokens,
        "sampled": int(plain.mask_N.sum()),
        "parameters": engine.module.num_parameters(),
        "flops_shared": batch_flops(work, plain, shared=True),
        "flops_separate": batch_flops(work, plain, shared=False),
    }


def logprob_step(args: argparse.Namespace) -> dict[str, Any]:
    """Peak memory and seconds of log-probs and entropies of `rows` tokens, forward and backward, beyond what any way
    of doing it holds: the layer, the hidden states and the gradients of both."""
    import torch
    from torch import nn
    from train_case import now, peak_mb

    from whet.models import kernels
    from whet.models.logprobs import OutputHead, token_logprobs

    device, vocabulary = args.device, 151_936
    width, dtype = (1536, torch.bfloat16) if device == "cuda" else (128, torch.float32)
    ops = kernels.load("auto")
    linear = nn.Linear(width, vocabulary, bias=False, device=device, dtype=dtype)
    hidden = torch.randn(args.rows, width, device=device, dtype=dtype, requires_grad=True)
    target = torch.randint(vocabulary, (args.rows,), device=device)
    with torch.no_grad():  # libraries and buffers that are made once
        token_logprobs(hidden[:64], target[:64], head=OutputHead(linear), ops=ops)
    before, start = peak_mb(device), now(device)
    if args.how == "chunked":
        logp, entropy = token_logprobs(hidden, target, head=OutputHead(linear), ops=ops)
    else:
        every = linear(hidden).float().log_softmax(-1)
        logp = every.gather(1, target[:, None]).squeeze(1)
        with torch.no_grad():
            entropy = -torch.stack([(row.exp() * row).sum() for row in every.split(64)]).sum()
    logp.sum().backward()
    taken = now(device) - start
    gradients = sum(x.numel() * x.element_size() for x in (linear.weight, hidden)) / 2**20
    return {
        "rows": args.rows,
        "vocabulary": vocabulary,
        "peak_mb": peak_mb(device) - before - gradients,
        "logits_mb": args.rows * vocabulary * 4 / 2**20,
        "seconds": [taken],
        "logp": float(logp.detach().mean()),
        "entropy": float(entropy.detach().sum()) / args.rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("update")
    one.add_argument("--case", type=Path, required=True)
    one.add_argument("--variant", choices=list(VARIANTS), default="whet")
    one.add_argument("--updates", type=int, default=3)
    two = kinds.add_parser("logprobs")
    two.add_argument("--how", choices=["chunked", "kept"], default="chunked")
    two.add_argument("--rows", type=int, default=4096)
    two.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    for each in (one, two):
        each.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    environment.prepare(args.threads, True)
    environment.keep_memory()
    import torch

    torch.set_num_threads(args.threads)
    print(json.dumps(update(args) if args.kind == "update" else logprob_step(args)), flush=True)


if __name__ == "__main__":
    main()
