"""Make what both sides of the benchmark are given: a model folder and prompts. Needs whet's environment.

    python benchmarks/make_case.py speed --size S --prompt-tokens short --out /tmp/case
    python benchmarks/make_case.py learn --seed 0 --out /tmp/words

`speed` writes `model/` (Qwen3 from scratch, random weights, one token a character, vocabulary 128),
`prompts.json` (rows {prompt, answer}) and `case.json` (what was asked for). `learn` writes `pool.json` and
`held_out.json`, the words of examples/spelling.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import string
from pathlib import Path
from typing import Any

SIZES = {"S": (128, 3), "M": (256, 5), "L": (512, 8)}
"""Name -> (hidden size, layers)."""
VOCABULARY = 128
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
ROWS = 2048


def prompts(tokens: str) -> list[dict[str, str]]:
    """Sums from reasoning-gym as 'a + b - c=', 7 to 24 characters; or, if `tokens` is a number, solved sums
    before an open one, exactly that many characters."""
    import reasoning_gym

    limits = {"max_terms": 5, "min_digits": 1, "max_digits": 3}
    rows: list[dict[str, str]] = []
    before = ""
    for entry in reasoning_gym.create_dataset("chain_sum", size=40 * ROWS, seed=0, **limits):
        prompt = f"{entry['metadata']['expression']}="
        if not 7 <= len(prompt) <= 24:
            continue
        if tokens != "short" and len(before) + len(prompt) < int(tokens):
            before += f"{prompt}{entry['answer']}\n"
            continue
        whole = prompt if tokens == "short" else (before + prompt)[-int(tokens) :]
        rows.append({"prompt": whole, "answer": entry["answer"]})
        before = ""
        if len(rows) == ROWS:
            break
    return rows


def tokenizer() -> Any:
    """One token for each printable ASCII character, filled up to 128."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [PAD, EOS, UNK, *string.printable]
    words += [f"<unused{i}>" for i in range(VOCABULARY - len(words))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNK, clean_up_tokenization_spaces=False
    )


def model(size: str) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers = SIZES[size]
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 64,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            eos_token_id=1,
            bos_token_id=None,
            dtype="float32",
        )
    )


def speed(out: Path, *, size: str, prompt_tokens: str) -> None:
    made = model(size)
    made.save_pretrained(out / "model")
    tokenizer().save_pretrained(out / "model")
    (out / "prompts.json").write_text(json.dumps(prompts(prompt_tokens)))
    case = {"size": size, "prompt_tokens": prompt_tokens, "parameters": made.num_parameters()}
    (out / "case.json").write_text(json.dumps(case))
    print(json.dumps(case))


def learn(out: Path, *, seed: int) -> None:
    path = Path(__file__).parents[1] / "examples" / "spelling.py"
    spec = importlib.util.spec_from_file_location("spelling", path)
    assert spec is not None
    assert spec.loader is not None
    spelling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(spelling)
    for name, split in (("pool", "pool"), ("held_out", "held_out")):
        rows = [{"prompt": r["prompt"], "answer": r["answer"]} for r in spelling.words(split, seed=seed)]
        (out / f"{name}.json").write_text(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("speed", "learn"):
        kinds.add_parser(kind).add_argument("--out", type=Path, required=True)
    kinds.choices["speed"].add_argument("--size", choices=sorted(SIZES), default="S")
    kinds.choices["speed"].add_argument("--prompt-tokens", choices=["short", "512"], default="short")
    kinds.choices["learn"].add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.kind == "speed":
        speed(args.out, size=args.size, prompt_tokens=args.prompt_tokens)
    else:
        learn(args.out, seed=args.seed)


if __name__ == "__main__":
    main()
