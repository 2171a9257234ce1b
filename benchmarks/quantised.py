"""Tokens a second of the embedded engine, with weights as they are and in 8 bits, on this machine.

    python benchmarks/quantised.py [--hidden 896 --ffn 4864 --layers 2 --rows 32 --tokens 32]

Random weights: what is sampled means nothing, how long it takes does. The gap is the mean of |log-prob by the engine -
log-prob by the weights as they are| over the tokens that were sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import torch

from whet import environment

environment.prepare(threads=None, exact=True)

from whet.config.schema import ModelConfig  # noqa: E402
from whet.models import kernels  # noqa: E402
from whet.models.attention import PackedAttention, Segments  # noqa: E402
from whet.models.forward import decoder  # noqa: E402
from whet.models.load import build  # noqa: E402
from whet.models.logprobs import token_logprobs  # noqa: E402
from whet.models.quantised import held  # noqa: E402
from whet.rollout.native.engine import NativeEngine  # noqa: E402
from whet.types import Completion, Request, Sampling  # noqa: E402

VOCAB = 1024
PROMPT = list(range(2, 18))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in {"hidden": 896, "ffn": 4864, "layers": 2, "rows": 32, "tokens": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    scratch = {
        "hidden_size": args.hidden,
        "intermediate_size": args.ffn,
        "layers": args.layers,
        "heads": args.hidden // 64,
        "max_position_embeddings": 4096,
    }
    model = build(
        ModelConfig(scratch=scratch),
        vocab_size=VOCAB,
        eos_token_id=1,
        pad_token_id=0,
        seed=0,
        device=device,
        dtype=dtype,
    ).requires_grad_(False)
    clock = (
        time.perf_counter if device == "cuda" else time.process_time
    )  # on shared cores only the latter repeats
    print(f"{device}, {torch.get_num_threads()} threads, {dtype}; {vars(args)}")
    print(f"{'weights':>10} {'tokens/s':>9} {'matrices MB':>12} {'gap nats':>9}")
    for kind in (None, "float8", "int8"):
        engine = NativeEngine(
            model,
            kernels.load("auto"),
            end_token_ids=[1],
            max_context=256,
            max_num_seqs=args.rows,
            quantization=kind,
        )
        asyncio.run(sample(engine, args.rows, 2))
        start = clock()
        done = asyncio.run(sample(engine, args.rows, args.tokens))
        rate = args.rows * args.tokens / (clock() - start)
        eight = held(engine.module)
        matrices = sum(q.numbers.nbytes + q.scale.nbytes for q in eight.values()) or sum(
            p.nbytes for n, p in model.named_parameters() if "_proj" in n
        )
        print(f"{kind or str(dtype)[6:]:>10} {rate:9.0f} {matrices / 1e6:12.1f} {gap(model, done):9.2g}")


async def sample(engine: NativeEngine, rows: int, tokens: int) -> list[Completion]:
    samplings = (Sampling(key=n, max_tokens=tokens, ignore_eos=True) for n in range(rows))
    asked = (Request(id=str(s.key), session="", prompt=tuple(PROMPT), sampling=s) for s in samplings)
    return list(await asyncio.gather(*map(engine.generate, asked)))


@torch.no_grad()
def gap(model: torch.nn.Module, done: list[Completion]) -> float:
    ops = kernels.load("auto")
    made = decoder(model, ops)  # type: ignore[arg-type]
    device = made.head.linear.weight.device
    off = []
    for c in done[:4]:
        ids = torch.tensor(PROMPT + c.token_ids, device=device)
        segments = Segments.of_lengths(torch.tensor([len(ids)]))
        hidden = made.hidden(ids, segments.position_N.to(device), PackedAttention(segments, ops))
        rows = hidden[len(PROMPT) - 1 : -1]
        logp = token_logprobs(rows, ids[len(PROMPT) :], head=made.head, ops=ops)[0].cpu()
        off.append((logp - torch.tensor(c.logprobs)).abs())
    return float(torch.cat(off).mean())


if __name__ == "__main__":
    main()
