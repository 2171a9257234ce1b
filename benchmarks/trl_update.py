"""TRL's side of `train.py`: GRPOTrainer's own training step and optimizer step over a batch that is given.

    .bench-venv/bin/python benchmarks/trl_update.py --case case.json [--updates 3] [--checkpoint]

Generating and scoring are taken out: the trainer is handed the padded batch that they would have made of these
rollouts. Micro-batches have about as many tokens as whet's. One line of JSON on stdout, the first update left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def padded(case: dict[str, Any]) -> dict[str, Any]:
    """The batch as TRL has it: prompts padded on the left, replies on the right, to the longest."""
    import torch

    rows = [
        (group["prompt"], reply, advantage)
        for group in case["groups"]
        for reply, advantage in zip(group["replies"], group["advantages"])
    ]
    prompt = max(len(p) for p, _, _ in rows)
    longest = max(len(r) for _, r, _ in rows)
    return {
        "prompt_ids": torch.tensor([[0] * (prompt - len(p)) + p for p, _, _ in rows]),
        "prompt_mask": torch.tensor([[0] * (prompt - len(p)) + [1] * len(p) for p, _, _ in rows]),
        "completion_ids": torch.tensor([r + [0] * (longest - len(r)) for _, r, _ in rows]),
        "completion_mask": torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for _, r, _ in rows]),
        "advantages": torch.tensor([a for _, _, a in rows]),
        "num_items_in_batch": torch.tensor(sum(len(r) for _, r, _ in rows)),
    }


def tokenizer() -> Any:
    """The trainer wants one; nothing is tokenized with it but its own data set, whose words it does not know."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def run(args: argparse.Namespace, case: dict[str, Any], folder: str) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from train_case import ceiling, make_model, now, peak_mb
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    device = case["device"]
    batch = {name: x.to(device) for name, x in padded(case).items()}
    rows, width = len(batch["advantages"]), batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]
    at_once = max(case["micro_batch_tokens"] // width, 1)
    while rows % at_once:
        at_once -= 1
    half = torch.bfloat16 if device == "cuda" else torch.float32
    peak_flops, imported = ceiling(device, half), peak_mb(device)
    seconds: list[float] = []
    logged: list[dict[str, float]] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = now(device)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(now(device) - self.start)

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:  # type: ignore[override]
            logged.append(logs)

    config = GRPOConfig(
        output_dir=folder,
        use_cpu=device == "cpu",
        bf16=device == "cuda",
        gradient_checkpointing=args.checkpoint,
        max_steps=args.updates,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=rows // at_once,
        steps_per_generation=rows // at_once,
        num_generations=len(case["groups"][0]["replies"]),
        max_completion_length=batch["completion_ids"].shape[1],
        beta=0.0,
        num_iterations=1,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=make_model(case, torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": str(n)} for n in range(args.updates * rows)]),
        processing_class=tokenizer(),
        callbacks=[Watch()],
    )
    calls = 0

    def prepare(_: Any) -> dict[str, Any]:
        nonlocal calls
        at = slice(calls % (rows // at_once) * at_once, calls % (rows // at_once) * at_once + at_once)
        calls += 1
        return {name: x[at] if x.ndim else x for name, x in batch.items()}

    trainer._prepare_inputs = prepare
    trainer.train()
    return {
        "seconds": seconds[1:],
        "grad_norm": next(float(logs["grad_norm"]) for logs in logged if "grad_norm" in logs),
        "peak_mb": peak_mb(device),
        "growth_mb": peak_mb(device) - imported,
        "ceiling": max(peak_flops, ceiling(device, half)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checkpoint", action="store_true", help="TRL's gradient checkpointing")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    import torch

    torch.set_num_threads(args.threads)
    with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory(prefix="trl-") as folder:
        found = run(args, json.loads(args.case.read_text()), folder)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
