"""What is fuzzed: each reader with its good inputs, made on the spot, and what it is asked to read."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from encoded import encode_prompt, with_template
from fuzz import checkpoints, replies, runs, servers
from fuzz.case import Case, Fuzzer
from fuzz.mutate import as_json, changed, containers, damaged
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import DataConfig, ModelConfig, SourceConfig, TokenizerConfig
from whet.data.chat import render
from whet.data.tasks import TaskStream
from whet.data.tokenizer import load_tokenizer
from whet.models.load import build, export
from whet.types import Message

ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------- config


WRITTEN = {
    "examples": (".yaml", ".toml", ".sh"),
    "docs/tutorials": (".yaml",),
    "tests/dialects": (".yaml", ".toml"),
    "tests/peers/files": (".yaml", ".toml"),
}
"""Where config files lie, of what kinds; the scripts of tutorials start no foreign trainer."""
TYPED = ("examples/first_run.yaml", "examples/gsm8k.yaml", "examples/async_ray.yaml")
"""Those in which every number has to be one."""


@cache
def configs() -> dict[str, bytes]:
    """Every example and every file of a dialect, by its path in the repository."""
    found = [p for folder, kinds in WRITTEN.items() for p in (ROOT / folder).rglob("*") if p.suffix in kinds]
    return {p.relative_to(ROOT).as_posix(): p.read_bytes() for p in sorted(found)}


def _config(random: Random) -> Case:
    name = random.choice(sorted(configs()))
    text = configs()[name]
    if not name.endswith(".yaml") or random.random() < 0.5:
        return Case({"config" + Path(name).suffix: damaged(random, text)}, "config" + Path(name).suffix)
    tree = yaml.safe_load(text)
    if name in TYPED and random.random() < 0.3:
        return Case({"config.yaml": as_json(_mistyped(random, tree))}, "config.yaml", wrong=True)
    return Case({"config.yaml": as_json(changed(random, tree))}, "config.yaml")


def _mistyped(random: Random, tree: Any) -> Any:
    """A number's place taken by text or a list."""
    tree = json.loads(json.dumps(tree))
    numbers = [(h, k) for h, k in containers(tree) if type(h[k]) in (int, float) and isinstance(h, dict)]
    holder, key = random.choice(
        [
            at
            for at in numbers
            if at[1]
            in (
                "steps",
                "seed",
                "group_size",
                "tasks_per_step",
                "hidden_size",
                "layers",
                "heads",
                "max_prompt_tokens",
            )
        ]
    )
    holder[key] = random.choice(("banana", [1], {"a": 1}, True))
    return tree


def _read_config(folder: Path) -> object:
    return plans(load(next(folder.iterdir())))


# ---------------------------------------------------------------- data


@cache
def tokenizer() -> Any:
    texts = ["".join(map(chr, range(32, 127)))]
    return load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=texts)


@cache
def rows() -> list[dict[str, Any]]:
    plain = [json.loads(line) for line in (ROOT / "tests/data/words.jsonl").read_text().splitlines()[:6]]
    chats = [
        {"prompt": [{"role": "user", "content": "a"}], "answer": n, "response": "b", "more": {"x": [n, 0.5]}}
        for n in range(3)
    ]
    return [{**row, "number": n + 1} for n, row in enumerate([*plain, *chats])]


WRONG_PROMPTS = (5, None, [], {}, "", True, ["a"], [{"role": "user"}])
WRONG_TEXTS = ('"x": NaN', '"x": [-Infinity]', '"prompt": "c"', '"x": {"a": 1, "a": 1}', '"x": 1e999')
"""Of members of a row."""


def _data(random: Random) -> Case:
    kind = random.choice(("jsonl", "jsonl", "json", "csv", "parquet"))
    name = f"data.{kind}"
    if kind in ("jsonl", "json") and random.random() < 0.2:
        row = {**rows()[2], "prompt": random.choice(WRONG_PROMPTS)}
        if random.random() < 0.5:
            data = _table(kind, [*rows()[:2], row])
        else:
            data = _table(kind, rows()[:3]).replace(
                b"{", b"{" + random.choice(WRONG_TEXTS).encode() + b", ", 1
            )
        return Case({name: data}, name, wrong=True)
    if kind == "parquet":
        return Case({name: _parquet(random)}, name)
    made = changed(random, rows()) if random.random() < 0.5 else rows()[:6]
    data = _table(kind, made)
    return Case({name: data if made != rows()[:6] else damaged(random, data)}, name)


def _parquet(random: Random) -> bytes:
    """Bytes damaged, other values in any nesting, or few bytes that stand for many."""
    how = random.random()
    if how < 0.5:
        return damaged(random, _table("parquet", rows()[:6]))
    if how < 0.99:
        try:
            return _table("parquet", changed(random, rows()[random.choice((0, 6)) :]))
        except (pa.ArrowException, AttributeError, TypeError, ValueError, OverflowError):
            return damaged(random, _table("parquet", rows()[:6]))
    return random.choice((_one_text_many_times, _one_list_of_nothing))()


@cache
def _one_text_many_times() -> bytes:
    return _in_parquet(
        pa.DictionaryArray.from_arrays(pa.array([0] * 10**6, pa.int32()), pa.array(["x" * 10**4]))
    )


@cache
def _one_list_of_nothing() -> bytes:
    return _in_parquet(pa.ListArray.from_arrays(pa.array([0, 10**8], pa.int32()), pa.nulls(10**8, pa.int8())))


def _in_parquet(column: pa.Array) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": column}), sink, store_schema=False)
    return bytes(sink.getvalue().to_pybytes())


def _table(kind: str, made: list[Any]) -> bytes:
    if kind == "jsonl":
        return b"\n".join(map(as_json, made))
    if kind == "json":
        return as_json(made)
    if kind == "parquet":
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(made), sink)
        return sink.getvalue().to_pybytes()
    plain = [r if isinstance(r, dict) else {} for r in made]
    return "\n".join(
        [
            "prompt,answer,difficulty",
            *(f'"{r.get("prompt")}",{r.get("answer")},{n}' for n, r in enumerate(plain)),
        ]
    ).encode("utf-8", "replace")


def _read_data(folder: Path) -> object:
    source = SourceConfig(path=str(next(folder.iterdir())), name="data")
    stream = TaskStream(
        [source],
        DataConfig(train=(source,), max_prompt_tokens=100_000),
        tokenizer=tokenizer(),
        seed=0,
        max_response_tokens=100_000,
    )
    return stream.next(3)


# ---------------------------------------------------------------- model folder


@cache
def model_folder() -> dict[str, bytes]:
    from tiny import tiny_model

    folder = Path(mkdtemp(prefix="whet-fuzz-"))
    words = load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=["abcdefgh <>"])
    export(tiny_model(layers=1), words, folder / "m")
    files = {p.name: p.read_bytes() for p in (folder / "m").iterdir()}
    shutil.rmtree(folder)
    return files


def _model(random: Random) -> Case:
    name = random.choice(
        (
            "config.json",
            "config.json",
            "tokenizer.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "model.safetensors",
            "generation_config.json",
        )
    )
    if name == "tokenizer.json" and random.random() < 0.1:
        return Case({**model_folder(), name: _with_expression(random)}, name)
    return Case({**model_folder(), name: _damaged_file(random, name, model_folder()[name])}, name)


EXPRESSIONS = (
    "(a+)+$",
    "(a|a)*b",
    "(?:a*)*c",
    "a{1,99999}",
    "(",
    "",
    "[\\s\\S]",
    "\\p{Han}",
    "(?=a)",
    "((((a*)*)*)*)*$",
)


def _with_expression(random: Random) -> bytes:
    """A tokenizer that cuts or replaces by an expression of its own."""
    tree, pattern = json.loads(model_folder()["tokenizer.json"]), {"Regex": random.choice(EXPRESSIONS)}
    if random.random() < 0.5:
        tree["normalizer"] = {
            "type": "Replace",
            "pattern": pattern,
            "content": random.choice(("", "a", "aa")),
        }
    else:
        tree["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return as_json(tree)


def _damaged_file(random: Random, name: str, data: bytes) -> bytes:
    if name.endswith(".json") and random.random() < 0.75:
        return as_json(changed(random, json.loads(data)))
    if name.endswith(".safetensors") and random.random() < 0.75:
        size = int.from_bytes(data[:8], "little")
        head = as_json(changed(random, json.loads(data[8 : 8 + size])))
        length = random.choice((len(head), len(head), len(head), 0, 2**40, 2**63, len(head) - 1))
        return length.to_bytes(8, "little") + head + data[8 + size :]
    if name.endswith(".safetensors"):  # the head, not the numbers: any number may be right
        return damaged(random, data[:2000]) + data[2000:]
    return damaged(random, data)


def _read_model(folder: Path) -> object:
    found = load_tokenizer(TokenizerConfig(), model_path=str(folder))
    text = "abc" + "a" * 40 + "b"
    encode_prompt(found, (Message("user", text),)) if found.chat_template else encode_prompt(found, text)
    return build(
        ModelConfig(path=str(folder)),
        vocab_size=len(found),
        eos_token_id=1,
        pad_token_id=0,
        seed=0,
        device="cpu",
        dtype=torch.float32,
    )


# ---------------------------------------------------------------- checkpoint


def _checkpoint(random: Random) -> Case:
    return checkpoints.make(random, _damaged_file)


# ---------------------------------------------------------------- template

MADE_UP = """
{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}
=====
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
=====
{% set ns = namespace(n=0, s='') %}
{% for m in messages if m.role != 'system' %}{% set ns.n = ns.n + 1 %}{% set ns.s = ns.s ~ m.content %}{% endfor %}
{{ ns.s * ns.n }}
=====
{% macro f(x, n) %}{% if n > 0 %}{{ f(x ~ x, n - 1) }}{% else %}{{ x }}{% endif %}{% endmacro %}{{ f('a', 3) }}
=====
{{ messages | map(attribute='content') | join(', ') | replace('h', 'hh') | indent(2) | center(40) }}
{{ '%5d' % 3 }}{{ messages | tojson(indent=2) }}
=====
{% for x in range(10) %}{% for y in range(x + 10) %}{{ loop.index ** 2 }}{% endfor %}{% endfor %}
""".strip().split("\n=====\n")
REAL = [p.read_text() for p in sorted((ROOT / "tests/templates").glob("*.jinja"))]
"""Templates that the tests have, each as those of some family."""
NUMBERS = ("0", "-1", "3", "99999", "99999", "9999999999", "1e9")
TOKENS = (
    "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}",
    "{% endfor %}",
    "{{ messages }}",
    "* 99999999",
    "** 999999",
    "| list",
    "~",
    "+",
    "9" * 12,
    "| join",
    ".replace('a', 'aa' * 9999)",
    "{% set ns.s = ns.s ~ ns.s %}",
    "{{ f(f, f) }}",
    "(",
    ")",
    "[",
    "]",
    "{{",
    "}}",
    "{%",
    "%}",
    "loop(messages)",
    "recursive",
    "self",
    ".__class__",
    "| attr('x')",
    "messages[99]",
    "none",
    "'",
    '"',
    "\\",
    "| tojson(indent=99999999)",
    ".ljust(999999999)",
    "|sum",
    "-1",
    "{% include 'x' %}",
    "{% call f() %}",
    "{% raw %}",
    "ns",
)


def _template(random: Random) -> Case:
    text = random.choice(random.choice((MADE_UP, REAL)))
    for _ in range(random.choice((1, 1, 2, 3, 5))):
        how = random.random()
        if how < 0.2:
            text = re.sub(r"\d+", lambda _: random.choice(NUMBERS), text)
        elif how < 0.4:
            text = damaged(random, text.encode()).decode("utf-8", "replace")
        else:
            at = random.randrange(len(text) + 1)
            text = text[:at] + random.choice(TOKENS) + text[at + random.choice((0, 0, 1, 4)) :]
    return Case({"template": text.encode()}, "template")


def _read_template(folder: Path) -> object:
    messages = [
        Message("system", "s"),
        Message("user", "hello {{ x }}"),
        Message("assistant", "<think>a</think>b"),
    ]
    return render(with_template(tokenizer(), str(folder / "template")), messages)


FUZZERS: dict[str, Fuzzer] = {
    "config": Fuzzer(_config, _read_config),
    "data": Fuzzer(_data, _read_data),
    "model": Fuzzer(_model, _read_model),
    "checkpoint": Fuzzer(_checkpoint, checkpoints.read),
    "template": Fuzzer(_template, _read_template),
    "reply": Fuzzer(replies.make_reply, replies.read),
    "run": Fuzzer(lambda random: runs.make_run(random, _damaged_file), runs.read_run),
    "adapter": Fuzzer(lambda random: runs.make_adapter(random, _damaged_file), runs.read_adapter),
    "judge": Fuzzer(lambda random: runs.make_judge(random, _damaged_file), runs.read_judge),
    "server": Fuzzer(servers.make_server, servers.read_server),
}
