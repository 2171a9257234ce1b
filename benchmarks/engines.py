"""Rollout engines on the same model, prompts and machine: tokens per second, time to the first token, weight sync.

    python benchmarks/engines.py --vllm VLLM [--size demo --size small] [--repeats 3] [--out FILE]

VLLM: the executable that `whet engine install vllm` makes. Models have random weights in float32. Engines take turns,
repeat after repeat, so that other work on the machine meets all of them; a ratio is to `native` in the same repeat, and
what is printed is the median of the repeats. Each engine has one thread for products (a vLLM server has other threads
and processes beside it). Temperature 1, no end token: every reply has its full length. `hf` samples one request at a
time, so it gets a quarter of the prompts. Rows of other sizes stay in the file (default benchmarks/engines.json).

tokens/s: sampled tokens by seconds of the clock, all requests at once. CPU tokens/s: by seconds of the processor, of
this process, and for `vllm` of its server, too (which takes some while it is idle: `idle_cpu`). First token: of a
single request to an idle engine, in milliseconds; for `transformers` by its own record. Sync: from new weights in the
module of the trainer to an engine that has them, in seconds; for `vllm` with files and canary. The continuous batching
of transformers (`generate_batch`) samples from a module in this process, so its sync is a copy of every tensor.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet import environment

environment.prepare(threads=1, exact=True)

import torch  # noqa: E402  after the environment
from transformers import GenerationConfig, PreTrainedModel  # noqa: E402
from transformers.generation import ContinuousBatchingConfig  # noqa: E402

from whet import seeds  # noqa: E402
from whet.config.engines import ENGINES  # noqa: E402
from whet.config.schema import ModelConfig, ServerConfig  # noqa: E402
from whet.models import kernels  # noqa: E402
from whet.models.load import build  # noqa: E402
from whet.rollout.engine import EngineInputs, RolloutEngine, WeightUpdate  # noqa: E402
from whet.tables import load_object  # noqa: E402
from whet.types import Request, Sampling  # noqa: E402

Prompts = Sequence[tuple[int, ...]]

IDLE_S = 5.0


@dataclass(frozen=True)
class Size:
    """A model and its work."""

    scratch: dict[str, int]
    vocab: int
    requests: int
    prompt: int
    """Tokens of each."""
    reply: int


SIZES: Mapping[str, Size] = {
    "demo": Size(
        {"hidden_size": 128, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
         "intermediate_size": 384, "max_position_embeddings": 512},
        vocab=32, requests=128, prompt=12, reply=32,
    ),
    "small": Size(
        {"hidden_size": 768, "num_hidden_layers": 12,
         "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
         "intermediate_size": 2048, "max_position_embeddings": 512},
        vocab=32000, requests=32, prompt=64, reply=32,
    ),
}  # fmt: skip
"""The model of examples/first_run.yaml, and one of a tenth of a billion parameters."""


def made(size: Size) -> PreTrainedModel:
    how: Any = {"eos_token_id": 1, "pad_token_id": 0, "device": "cpu", "dtype": torch.float32}
    return build(ModelConfig(scratch=size.scratch), vocab_size=size.vocab, seed=0, **how).requires_grad_(
        False
    )


def prompts(size: Size, count: int, name: str) -> Prompts:
    """Random tokens; other ones for each name, so that no cache has them."""
    return [
        tuple(int(u * size.vocab) for u in seeds.uniforms(seeds.key(0, name, n), 0, size.prompt))
        for n in range(count)
    ]


def with_children() -> float:
    """CPU seconds of this process and all its descendants that live."""
    rows = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        rows[int(path.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    own = {os.getpid()}
    while more := {pid for pid, (parent, _) in rows.items() if parent in own} - own:
        own |= more
    return sum(rows[pid][1] for pid in own) / os.sysconf("SC_CLK_TCK")


def idle_cpu() -> float:
    """CPUs that this process and its descendants take while nobody asks them anything."""
    began, cpu = time.perf_counter(), with_children()
    time.sleep(IDLE_S)
    return (with_children() - cpu) / (time.perf_counter() - began)


# ---------------------------------------------------------------- the engines


@dataclass(frozen=True)
class Side:
    """One engine. replies: samples so many tokens for each prompt; returns the number of tokens. first: seconds to the
    first token of a prompt. sync: takes the module's weights under this version."""

    replies: Callable[[Prompts, int], int]
    first: Callable[[tuple[int, ...]], float]
    sync: Callable[[int], object]
    share: int = 1
    """One of so many prompts is asked."""
    cpu: Callable[[], float] = time.process_time
    """CPU seconds so far."""


class Loop:
    """One event loop for everything that is asked of an engine."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def __call__(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)


def seam(engine: RolloutEngine, model: PreTrainedModel, loop: Loop, **more: Any) -> Side:
    """A `RolloutEngine`."""

    def request(prompt: tuple[int, ...], reply: int) -> Request:
        name = str(time.perf_counter_ns())
        sampling = Sampling(key=seeds.key(0, name), max_tokens=reply, ignore_eos=True)
        return Request(id=name, session=name, prompt=prompt, sampling=sampling)

    async def all_of(asked: Prompts, reply: int) -> int:
        done = await asyncio.gather(*(engine.generate(request(p, reply)) for p in asked))
        return sum(len(d.token_ids) for d in done)

    def first(prompt: tuple[int, ...]) -> float:
        came: list[float] = []
        began = time.perf_counter()
        loop(engine.generate(request(prompt, 2), lambda tokens: came.append(time.perf_counter())))
        return came[0] - began

    def sync(version: int) -> None:
        loop(engine.update_weights(WeightUpdate(version=version, module=model)))

    return Side(lambda asked, reply: loop(all_of(asked, reply)), first, sync, **more)


def batched(model: PreTrainedModel, size: Size) -> Side:
    """transformers' continuous batching, over a copy of the module."""
    own: Any = copy.deepcopy(model)
    own.set_attn_implementation("sdpa")
    longest = size.prompt + size.reply
    pages = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=size.requests * -(-longest // 32) + 8,
        max_batch_tokens=max(512, size.requests * 4),
        return_logprobs=True,
    )

    def ask(asked: Prompts, reply: int) -> list[Any]:
        how = GenerationConfig(
            max_new_tokens=reply, do_sample=True, temperature=1.0, eos_token_id=-1, pad_token_id=0
        )
        found = own.generate_batch(
            [list(p) for p in asked], how, pages, record_timestamps=True, persistent_manager=True, warmup=False
        )  # fmt: skip
        return list(found.values())

    def first(prompt: tuple[int, ...]) -> float:
        (one,) = ask([prompt], 2)
        return float(one.timestamps[0] - one.created_time)

    @torch.no_grad()
    def sync(version: int) -> None:
        for mine, theirs in zip(own.parameters(), model.parameters()):
            mine.copy_(theirs)

    return Side(lambda asked, reply: sum(len(o.generated_tokens) for o in ask(asked, reply)), first, sync)


def inputs(model: PreTrainedModel, size: Size, folder: Path, vllm: Path) -> EngineInputs:
    server = ServerConfig(
        command=str(vllm), options={"enforce-eager": True}, env={"OMP_NUM_THREADS": "1"}, canary_bound=1e-3
    )
    return EngineInputs(
        model=model,
        ops=kernels.load("auto"),
        end_token_ids=frozenset(),
        decode=str,
        max_context=256,
        max_num_seqs=size.requests,
        cache_mb=None,
        quantization=None,
        beat=lambda what: None,
        span=lambda name: nullcontext(),
        server=server,
        reply_timeout_s=600.0,
        load_timeout_s=600.0,
        run_dir=folder,
        home=folder,
    )


@contextmanager
def sides(size: Size, vllm: Path | None) -> Iterator[Mapping[str, Side]]:
    """All engines of one model."""
    model, loop = made(size), Loop()
    with ExitStack() as after:
        folder = Path(after.enter_context(tempfile.TemporaryDirectory(prefix="whet-engines-")))
        given = inputs(model, size, folder, vllm or Path("vllm"))

        def opened(name: str) -> RolloutEngine:
            engine: RolloutEngine = load_object(ENGINES[name].at, what="engine")(given)
            after.callback(lambda: loop(engine.close()))
            return engine

        found = {
            "native": seam(opened("native"), model, loop),
            "hf": seam(opened("hf"), model, loop, share=4),
            "transformers": batched(model, size),
        }
        if vllm is not None:
            found["vllm"] = seam(opened("vllm"), model, loop, cpu=with_children)
        yield found


# ---------------------------------------------------------------- measured


def measured(side: Side, size: Size, repeat: int) -> dict[str, float]:
    """One repeat of one engine."""
    asked = prompts(size, size.requests // side.share, f"repeat-{repeat}")
    began, cpu = time.perf_counter(), side.cpu()
    tokens = side.replies(asked, size.reply)
    seconds, cpu = time.perf_counter() - began, side.cpu() - cpu
    assert tokens == len(asked) * size.reply
    firsts = [side.first(prompt) for prompt in prompts(size, 5, f"first-{repeat}")]
    began = time.perf_counter()
    side.sync(repeat + 2)
    return {
        "tokens_per_s": tokens / seconds,
        "cpu_tokens_per_s": tokens / cpu,
        "first_token_ms": 1e3 * statistics.median(firsts),
        "sync_s": time.perf_counter() - began,
        "load": os.getloadavg()[0],
    }


def rows(name: str, vllm: Path | None, repeats: int) -> Iterator[dict[str, Any]]:
    """Every engine's medians over the repeats."""
    size = SIZES[name]
    with sides(size, vllm) as there:
        found: dict[str, list[dict[str, float]]] = {engine: [] for engine in there}
        for engine, side in there.items():  # what is compiled or allocated once
            side.sync(1)
            side.replies(prompts(size, size.requests // side.share, "warm-up"), size.reply)
            print(f"{name}: {engine} is warm", flush=True)
        idle = round(idle_cpu(), 2)
        print(f"{name}: CPUs taken while nobody asks: {idle}", flush=True)
        for repeat in range(repeats):
            for engine, side in there.items():
                found[engine].append(measured(side, size, repeat))
                print(f"{name} {repeat} {engine}: {found[engine][-1]}", flush=True)
        for engine, all_of in found.items():
            row = {key: statistics.median(one[key] for one in all_of) for key in all_of[0]}
            ratios = {
                key: [one[key] / own[key] for one, own in zip(all_of, found["native"])]
                for key in ("tokens_per_s", "cpu_tokens_per_s")
            }
            yield {
                "size": name,
                "engine": engine,
                "repeats": repeats,
                "idle_cpu": idle,
                **{key: float(f"{value:.3g}") for key, value in row.items()},
                **{f"{key}_of_native": round(statistics.median(r), 3) for key, r in ratios.items()},
                **{
                    f"{key}_of_native_range": [round(min(r), 3), round(max(r), 3)]
                    for key, r in ratios.items()
                },
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, help="executable; default: without vLLM")
    parser.add_argument("--size", action="append", choices=list(SIZES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    found = [row for name in given.size or SIZES for row in rows(name, given.vllm, given.repeats)]
    print("\n| model | engine | tokens/s | of native | CPU tokens/s | of native | first token ms | sync s |")
    print("|---|---|---|---|---|---|---|---|")
    for row in found:
        cells = [row["size"], row["engine"]]
        for key in ("tokens_per_s", "cpu_tokens_per_s"):
            low, high = row[f"{key}_of_native_range"]
            cells += [f"{row[key]:g}", f"{row[f'{key}_of_native']:.3g} ({low:.3g}-{high:.3g})"]
        print(f"| {' | '.join(cells)} | {row['first_token_ms']:g} | {row['sync_s']:g} |")
    told = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "threads": 1}
    told |= {"torch": torch.__version__}
    before = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    others = [row for row in before if row["size"] not in (given.size or SIZES)]
    given.out.write_text(json.dumps(told | {"rows": [*others, *found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
