"""GRPO with TRL on the CPU, timed. Prints one line of JSON on stdout, everything else on stderr.

    cd benchmarks; PY=../.bench-venv/bin/python
    $PY trl_grpo.py speed --model CASE/model --prompts CASE/prompts.json --steps 5
    $PY trl_grpo.py learn --model EXPORT --prompts WORDS/pool.json --held-out WORDS/held_out.json

TRL is tuned for this machine: fp32 (many CPUs only emulate bf16), no gradient checkpointing, one micro-batch,
beta 0 (no reference model), one iteration (no pass for old log-probs). `--as-shipped` keeps its own defaults
for the first two. Times are seconds of process CPU: with one thread, what the work takes on an idle core.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from reward import digits

PROMPTS, GROUP = 16, 8
"""A step: so many prompts, so many rollouts each."""


class Clock:
    """Seconds of process CPU by part of a step, one row a step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.now: dict[str, float] = defaultdict(float)

    def timed(self, owner: Any, method: str, part: str) -> None:
        """Replace a bound method by one that is timed."""
        inner = getattr(owner, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.now[part] += time.process_time() - start

        setattr(owner, method, wrapped)

    def end_step(self, seconds: float) -> None:
        now, self.now = self.now, defaultdict(float)
        row = {
            "step": seconds,
            "generate": now["generate"],
            "loss_backward": now["training_step"] - now["prepare"],
            "optimizer": now["optimizer"],
            "tokens": now["tokens"],
        }
        row["rest"] = seconds - row["generate"] - row["loss_backward"] - row["optimizer"]
        self.rows.append(row)


def build(args: argparse.Namespace, clock: Clock) -> Any:
    """TRL's trainer on the given model and prompts, with the clock in it."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    rows = json.loads(args.prompts.read_text())

    def reward(
        completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        clock.now["tokens"] += sum(map(len, completion_ids))
        if args.kind == "speed":
            return [digits(text) for text in completions]
        return [float(text == right) for text, right in zip(completions, answer)]

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.process_time()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.before = time.process_time()

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            clock.now["optimizer"] += time.process_time() - self.before

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.end_step(time.process_time() - self.start)

    tuned = {"bf16": args.dtype == "bfloat16", "gradient_checkpointing": False}
    config = GRPOConfig(
        output_dir=args.folder,
        use_cpu=True,
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=PROMPTS * GROUP,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=GROUP,
        max_completion_length=args.max_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        num_iterations=1,
        max_grad_norm=1.0,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **({} if args.as_shipped else tuned),
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Watch()],
        optimizers=optimizer(model, args),
    )
    clock.timed(trainer, "_generate", "generate")
    clock.timed(trainer, "_prepare_inputs", "prepare")
    clock.timed(trainer, "training_step", "training_step")
    return trainer


def optimizer(model: Any, args: argparse.Namespace) -> tuple[Any, Any]:
    """AdamW without weight decay. `learn`: 5 steps of warm-up, then linear to a tenth; `speed`: constant."""
    import torch

    adam = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.0)

    def factor(step: int) -> float:
        if args.kind == "speed":
            return 1.0
        warm = min((step + 1) / 5, 1.0)
        return warm * (1 - 0.9 * max(step - 5, 0) / max(args.steps - 5, 1))

    return adam, torch.optim.lr_scheduler.LambdaLR(adam, factor)


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Mean seconds of a step by part, after the warm-up steps."""
    clock = Clock()
    build(args, clock).train()
    kept = clock.rows[args.warmup :]
    parts = ("step", "generate", "loss_backward", "optimizer", "rest")
    means = {f"{part}_s": sum(row[part] for row in kept) / len(kept) for part in parts}
    tokens = sum(row["tokens"] for row in kept)
    return {
        **means,
        "generated_tokens_per_s": tokens / sum(row["generate"] for row in kept),
        "tokens_per_step": tokens / len(kept),
        "steps": clock.rows,
    }


def learn(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and look at held-out accuracy on the way; the looks are left out of the seconds."""
    from transformers import TrainerCallback

    rows = json.loads(args.held_out.read_text())
    clock = Clock()
    trainer = build(args, clock)
    looks: list[dict[str, float]] = []

    def look(step: int) -> None:
        accuracy = greedy_accuracy(trainer, rows, args.max_tokens)
        looks.append({"step": step, "accuracy": accuracy, "cpu_s": sum(row["step"] for row in clock.rows)})

    class Look(TrainerCallback):
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:  # type: ignore[override]
            if state.global_step % args.eval_every == 0 or state.global_step == args.steps:
                look(state.global_step)

    look(0)
    trainer.add_callback(Look())
    trainer.train()
    return {"held_out": looks, "accuracy": looks[-1]["accuracy"], "cpu_s": looks[-1]["cpu_s"]}


def greedy_accuracy(trainer: Any, rows: list[dict[str, str]], max_tokens: int) -> float:
    """Share of held-out prompts whose greedy reply is the answer, exactly."""
    import torch

    model, tokenizer = trainer.model, trainer.processing_class
    was_training = model.training
    model.eval()
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    with torch.no_grad():
        out = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_tokens,
            do_sample=False,
        )
    model.train(was_training)
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text == row["answer"] for text, row in zip(texts, rows)) / len(rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, tokens, steps, lr in (("speed", 32, 5, 1e-6), ("learn", 7, 300, 3e-4)):
        one = kinds.add_parser(kind)
        one.add_argument("--model", type=Path, required=True, help="Hugging Face folder with a tokenizer")
        one.add_argument("--prompts", type=Path, required=True, help="JSON list of {prompt, answer}")
        one.add_argument("--max-tokens", type=int, default=tokens)
        one.add_argument("--steps", type=int, default=steps)
        one.add_argument("--lr", type=float, default=lr)
        one.add_argument("--threads", type=int, default=1)
        one.add_argument("--seed", type=int, default=0)
        one.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of products")
        one.add_argument("--as-shipped", action="store_true", help="TRL's own bf16 and checkpointing")
    kinds.choices["speed"].add_argument("--warmup", type=int, default=1, help="steps left out of the means")
    kinds.choices["learn"].add_argument("--held-out", type=Path, required=True, help="like --prompts")
    kinds.choices["learn"].add_argument("--eval-every", type=int, default=50)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    threads = str(args.threads)
    os.environ |= {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    start = time.perf_counter()
    with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory(prefix="trl-") as folder:
        args.folder = folder
        found = speed(args) if args.kind == "speed" else learn(args)
    found |= {
        "wall_s": time.perf_counter() - start,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "versions": versions(),
    }
    print(json.dumps(found), flush=True)


def versions() -> dict[str, str]:
    from importlib import metadata

    return {name: metadata.version(name) for name in ("trl", "torch", "transformers")}


if __name__ == "__main__":
    main()
