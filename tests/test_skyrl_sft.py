"""SkyRL's SFT file, which SkyRL itself makes an RL config of: it is recognised, translated and runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import whet
from asked import asked
from whet.config import schema
from whet.config.load import Loaded
from whet.config.load import load as load_config
from whet.data.tokenizer import load_tokenizer
from whet.dialects.recognise import recognise
from whet.dialects.row import NotSupportedYet
from whet.dialects.skyrl import sft
from whet.dialects.tables import table
from whet.dialects.values import nested
from whet.dialects.versions import VERSION
from whet.models.load import build, export
from whet.types import ConfigError, Json

sft = asked(sft)


def values(version: str = "main", **given: Json) -> dict[str, Json]:
    """All values of a file of a version that sets these; `__` stands for a dot."""
    rows = {row.key: row.default for row in table("skyrl-sft", version)}
    written = {k.replace("__", "."): v for k, v in given.items()}
    assert written.keys() <= rows.keys()
    return {**rows, **written, VERSION: version}


FILE = {
    "strategy": "fsdp",
    "model": {"path": "model"},
    "train_datasets": ["rows.jsonl"],
    "train_dataset_splits": ["train[:16]"],
    "num_steps": 3,
    "batch_size": 4,
    "max_length": 32,
    "ckpt_path": "ckpts",
}


def load(folder: Path, tree: Json, *overrides: str) -> Loaded:
    file = folder / "sft.json"
    file.write_text(json.dumps(tree))
    return load_config(file, overrides, dialect="skyrl")


def test_a_file_is_recognised_and_translated(tmp_path: Path) -> None:
    assert recognise(FILE) == recognise(FILE, "skyrl") == "skyrl-sft"
    cfg = load(tmp_path, FILE).config
    assert (cfg.algorithm.name, cfg.model.path, cfg.run_dir) == ("sft", "model", "ckpts")
    assert (cfg.data.train[0].path, cfg.data.train[0].messages) == ("rows.jsonl", "messages")
    assert (cfg.data.train[0].split, cfg.data.train[0].limit, cfg.data.learn_turns) == (None, 16, "last")
    assert (cfg.train.steps, cfg.train.tasks_per_step, cfg.train.micro_batch_rollouts) == (3, 4, 2)
    assert (cfg.data.max_total_tokens, cfg.data.overlong) == (32, "truncate_right")
    assert (cfg.train.optimizer.lr, cfg.train.optimizer.decay_all) == (1e-6, True)


def test_lengths_and_steps_by_the_version() -> None:
    assert sft.lengths(values("0.2"))["data.max_total_tokens"] == 512
    assert sft.lengths(values("0.3"))["data.overlong"] == "error"
    assert sft.steps(values("0.2", num_epochs=None)) == {"train.steps": 10}
    assert sft.steps(values("0.3")) == {"train.epochs": 1}
    assert sft.steps(values("0.3", num_steps=9, max_training_steps=4)) == {"train.steps": 4}


def test_a_sum_of_splits_is_read_in_its_order() -> None:
    found = sft.training_data(values(train_datasets=["a"], train_dataset_splits=["train+test"]))
    assert found["data.train.0.split"] == ["train", "test"]


def test_a_trial_trains_on_one_batch_of_made_up_rows(tmp_path: Path) -> None:
    """As SkyRL's run_sft_dummy_fsdp.sh; what it evaluates and saves is not there."""
    trial = {
        **{key: FILE[key] for key in ("strategy", "model", "batch_size", "max_length", "ckpt_path")},
        "dummy_run_full_ctx": True,
        "dummy_run_max_steps": 7,
        "num_steps": 3,
        "ckpt_interval": 1,
        "hf_save_interval": 1,
        "eval_datasets": ["rows.jsonl"],
        "eval_interval": 1,
    }
    cfg = load(tmp_path, trial).config
    (source,) = cfg.data.train
    assert (source.function, source.prompt) == ("random_tokens", None)
    assert source.arguments == {"rows": 4, "response": 32}
    assert (cfg.train.steps, cfg.train.epochs, cfg.train.tasks_per_step, cfg.data.eval) == (7, None, 4, ())
    assert (cfg.checkpoint.interval, cfg.checkpoint.export, cfg.checkpoint.resume) == (0, False, "fresh")
    with pytest.raises(ConfigError, match="dummy_run_full_ctx=true needs max_length"):
        sft.training_data(values(dummy_run_full_ctx=True))


@pytest.mark.parametrize("text", ["train[-500:100]", "train[-120%:]", "train[:10]+test", "train[5%:100]"])
def test_parts_of_splits_that_no_source_can_take_are_refused(text: str) -> None:
    with pytest.raises(NotSupportedYet, match="train_dataset_splits"):
        sft.training_data(values(train_datasets=["a"], train_dataset_splits=[text]))


@pytest.mark.parametrize("version", ["0.3", "main"])
def test_errors_name_keys_that_the_release_has(version: str) -> None:
    has = {row.key for row in table("skyrl-sft", version)}
    none = {"dataset_name": "a", "dataset_split": None}
    cases = [
        (sft.evaluation, {"eval_interval": 5}, "eval_datasets" if version == "main" else "eval_dataset_name"),
        (sft.evaluation, {"eval_dataset_name": "a", "eval_dataset_split": "a[5:3]"}, "eval_dataset_split"),
        (sft.training_data, {"dataset_name": "a", "dataset_split": "a[5:3]"}, "dataset_split"),
        (sft.training_data, none, "dataset_split"),
    ]
    for asked_for, given, key in cases:
        with pytest.raises(ConfigError, match=rf"\b{key}\b"):
            asked_for(values(version, **given))
        assert key in has


@pytest.mark.parametrize(
    "text",
    [
        "train[5:3]",
        "train[5:5]",
        "train[:0]",
        "train[-2:-5]",
        "train[80%:20%]",
        "train[:0%]",
        "train[:150%]",
        "train[100%:]",
    ],
)
def test_parts_of_splits_without_rows_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="takes no rows"):
        sft.training_data(values(train_datasets=["a"], train_dataset_splits=[text]))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("train", {"split": "train"}),
        ("train[:100]", {"split": "train", "limit": 100}),
        ("train[20:100]", {"split": "train", "skip": 20, "limit": 80}),
        ("train[95%:]", {"split": "train", "skip": "95%"}),
        ("train[5%:15%]", {"split": "train", "skip": "5%", "limit": "10%"}),
        ("train[:100%]", {"split": "train"}),
        ("train[-500:]", {"split": "train", "skip": -500}),
        ("train[-20%:]", {"split": "train", "skip": "-20%"}),
        ("train[-20%:-10%]", {"split": "train", "skip": "-20%", "limit": "-10%"}),
        ("train[-20%:90%]", {"split": "train", "skip": "-20%", "limit": "10%"}),
        ("train[-100%:30%]", {"split": "train", "limit": "30%"}),
        ("train[:-500]", {"split": "train", "limit": -500}),
        ("train[10:-500]", {"split": "train", "skip": 10, "limit": -500}),
        ("train[-500:-100]", {"split": "train", "skip": -500, "limit": -100}),
    ],
)
def test_splits(text: str, part: dict[str, Json]) -> None:
    found = sft.training_data(values(train_datasets=["a"], train_dataset_splits=[text]))
    mine = {
        key.removeprefix("data.train.0."): value
        for key, value in found.items()
        if key.startswith("data.train.0.")
    }
    assert {key: value for key, value in mine.items() if key in ("split", "skip", "limit")} == part


def test_several_datasets_and_older_names() -> None:
    two = values(
        train_datasets=["a", "b"], train_dataset_splits=["train", "train"], train_dataset_weights=[0.7, 0.3]
    )
    found = sft.training_data(two)
    assert [found[f"data.train.{n}.weight"] for n in (0, 1)] == [0.7, 0.3]
    assert sft.training_data(values(dataset_name="a", dataset_split="test"))["data.train.0.split"] == "test"
    evaluated = sft.evaluation(values(eval_dataset_name="org/a", eval_interval=5, eval_dataset_split="test"))
    assert (evaluated["data.eval.0.path"], evaluated["data.eval.0.name"]) == ("org/a", "org_a")
    assert evaluated["eval.interval"] == 5


def test_the_layout_is_that_of_the_policy() -> None:
    """Four GPUs, two by two for tensors and pipelines: one data-parallel rank."""
    assert sft.layout(values()) == {"train.parallel.tp": 2, "train.parallel.pp": 2}
    assert sft.layout(values(strategy="fsdp")) == {"train.parallel.dp_shard": 4}
    with pytest.raises(
        ConfigError, match=r"^megatron_config\.tensor_model.* 3 GPUs of the policy \(placement\.num"
    ):
        sft.layout(values(placement__num_gpus_per_node=3))


def test_float16_needs_no_engine() -> None:
    assert sft.dtype(values(strategy="fsdp", fsdp_config__mixed_precision__param_dtype="fp16")) == {
        "model.dtype": "float16"
    }


def test_adapters_are_those_of_fused_layers_with_megatron() -> None:
    plain = sft.lora(values(strategy="fsdp", model__lora__rank=8))
    assert plain["model.lora.rank"] == 8
    assert "model.lora.fused" not in plain
    assert sft.lora(values(model__lora__rank=8))["model.lora.fused"] is True
    spread = sft.lora(values(model__lora__rank=8, megatron_config__expert_model_parallel_size=2))
    assert (spread["model.lora.fused"], spread["model.lora.experts"]) == (True, "shared")


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"messages": [{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b" * n}]}
        for n in range(1, 9)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tokenizer = load_tokenizer(schema.TokenizerConfig(build="chars"), model_path=None, texts=["ab"])
    model = build(
        schema.ModelConfig(
            scratch={
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "max_position_embeddings": 64,
            }
        ),
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=0,
        device="cpu",
        dtype=torch.float32,
    )
    export(model, tokenizer, tmp_path / "model")
    tree = {**FILE, "train_dataset_splits": ["train"], "optimizer_config": {"lr": 1e-2}}
    file = tmp_path / "sft.json"
    file.write_text(json.dumps(nested({(key,): value for key, value in tree.items()})))
    result = whet.train(file)
    losses = [line["train/loss"] for line in result.metrics]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_a_sampler_of_the_users_chooses_the_rows(tmp_path: Path) -> None:
    own = {"sampler": "custom", "sampler_class_path": "pack.mod.Cls", "sampler_kwargs": {"lengths": [3, 4]}}
    assert load(tmp_path, FILE | own).config.data.order == {
        "name": "whet.data.samplers:sampler",
        "class_path": "pack.mod:Cls",
        "arguments": {"lengths": [3, 4]},
    }
    with pytest.raises(ConfigError, match=r"sampler_class_path: got null, expected package.module.Class"):
        load(tmp_path, FILE | {"sampler": "custom"})
    two = {"train_datasets": ["a.jsonl", "b.jsonl"], "train_dataset_splits": ["train", "train"]}
    with pytest.raises(ConfigError, match="sampler=custom over 2 train_datasets is coming"):
        load(tmp_path, FILE | own | two)
