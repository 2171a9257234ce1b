"""Cosmos-RL files as a whole: what is refused, and runs that equal their native twins bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import whet
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import ModelConfig, TokenizerConfig
from whet.data.tokenizer import load_tokenizer
from whet.models.load import build, export
from whet.types import ConfigError

ROOT = Path(__file__).parents[1]
FILES = ROOT / "tests/dialects"
WORDS = ROOT / "tests/data/words.jsonl"
POLICY = "train.train_policy."


def test_a_file_for_many_gpus_is_read_and_products_in_4_bits_are_refused() -> None:
    config = load(FILES / "cosmos_64_gpus.toml").config
    assert config.rollout.quantization == "float8"
    assert (
        load(FILES / "cosmos_64_gpus.toml", ["rollout.quantization=none"]).config.rollout.quantization is None
    )
    with pytest.raises(ConfigError, match=r"train\.fp4\.enable_fp4.* cannot train with products in 4 bits"):
        load(FILES / "cosmos_64_gpus.toml", ["train.fp4.enable_fp4=true"])
    assert (config.algorithm.name, config.rollout.group_size, config.train.tasks_per_step) == (
        "gspo",
        16,
        128,
    )
    assert (config.seed, config.data.seed, config.checkpoint.export_interval) == (42, None, 30000)


def test_the_example_is_right() -> None:
    (stage,) = plans(load(ROOT / "examples/from_cosmos.toml"), rows={"main": 3900})
    assert (stage.steps, stage.tasks_per_step, stage.group_size) == (40, 16, 8), "before the end of the epoch"
    assert (stage.warmup_steps, stage.cfg.data.max_prompt_tokens, stage.reply_tokens) == (4, 22, 7)
    assert stage.max_sequence_tokens == 23


def test_names_of_older_versions_are_read_and_typos_are_not() -> None:
    with pytest.raises(ConfigError) as refused:
        load(
            FILES / "cosmos_sft.toml",
            [
                "+train.validation_step=3",
                "+train.enable_validation=true",
                "train.optm_ir=1",
                "train.optm_lr=2e-6",
            ],
        )
    assert "did you mean train.optm_lr?" in str(refused.value)
    assert str(refused.value).count("unknown key") == 1, "the other names are known"
    sections = [
        "+train.validation_step=3",
        "+train.enable_validation=true",
        "+train.train_policy.dataset.name=a.jsonl",
    ]
    assert load(FILES / "cosmos_sft.toml", sections).config.eval.interval == 3


def model_folder(folder: Path, kind: str) -> Path:
    """A tiny model with a tokenizer of letters."""
    texts = ["abcdefghijklmnopqrstuvwxyz>"]
    tokenizer = load_tokenizer(TokenizerConfig(build=kind), model_path=None, texts=texts)  # type: ignore[arg-type]
    scratch = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }
    model = build(
        ModelConfig(scratch=scratch), vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, seed=1, device="cpu", dtype=torch.float32,
    )  # fmt: skip
    export(model, tokenizer, folder)
    return folder


def metrics(run_dir: Path) -> bytes:
    return (run_dir / "metrics.jsonl").read_bytes()


def native_twin(tmp_path: Path, model: Path, reward: str, train: dict[str, Any]) -> Any:
    """What cosmos_letters.toml is in native keys, but for its steps."""
    return whet.train(
        run_dir=str(tmp_path / "native"), name="foreign", seed=3,
        model={"path": str(model), "dtype": "float32"},
        data={
            "max_prompt_tokens": 12, "max_total_tokens": 13, "overlong": "filter", "train": [{"path": str(WORDS)}],
        },
        algorithm={
            "name": "grpo", "loss_agg_mode": "seq-mean-token-mean", "loss": {"clip_high": 0.28, "dual_clip": 3.0},
            "advantage": {"std_ddof": 0}, "kl": {"coef": 0.001},
        },
        rewards={"share_of_a": {"function": reward}},
        rollout={"group_size": 4, "sampling": {"max_tokens": 5}},
        train=train,
        checkpoint={"interval": 0, "export": False}, machine={"threads": 1},
    )  # fmt: skip


def test_an_rl_file_learns_and_equals_its_native_twin_bit_for_bit(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", "chars")
    reward = f"{FILES / 'letters.py'}:share_of_a"
    whet.train(
        FILES / "cosmos_letters.toml",
        overrides=[
            f"policy.model_name_or_path={model}", f"train.output_dir={tmp_path / 'foreign'}", "+train.timestamp=first",
            f"train.train_policy.dataset.name={WORDS}", f"train.train_policy.reward_function={reward}",
            "whet.machine.threads=1",
        ],
    )  # fmt: skip
    native = native_twin(
        tmp_path, model, reward,
        train={
            "steps": 12, "tasks_per_step": 8, "minibatches": 2, "update_epochs": 2, "micro_batch_rollouts": 8,
            "optimizer": {
                "lr": 1e-2,
                "schedule": {
                    "type": "wsd", "unit": "train_step", "warmup_steps": 3, "warmup_ends": "peak",
                    "decay_steps": None, "min_lr_ratio": 0.5,
                },
            },
        },
    )  # fmt: skip
    assert metrics(tmp_path / "foreign/first") == metrics(tmp_path / "native")
    paid = [m["reward/mean"] for m in native.metrics]
    assert paid[-1] > paid[0] + 0.3


def test_steps_over_halves_of_groups_learn_and_equal_their_native_twin(tmp_path: Path) -> None:
    """6 of 4 rollouts a prompt are 3 prompts in 2 optimizer steps; the rollouts of the second prompt are in both."""
    model = model_folder(tmp_path / "model", "chars")
    reward = f"{FILES / 'letters.py'}:share_of_a"
    whet.train(
        FILES / "cosmos_letters.toml",
        overrides=[
            f"policy.model_name_or_path={model}", f"train.output_dir={tmp_path / 'foreign'}", "+train.timestamp=first",
            f"train.train_policy.dataset.name={WORDS}", f"train.train_policy.reward_function={reward}",
            "train.train_batch_per_replica=6", "policy.parallelism.dp_shard_size=1", f"{POLICY}mini_batch=3",
            f"{POLICY}batch_size_per_optimize=0", f"{POLICY}mu_iterations=1", f"{POLICY}on_policy=false",
            "+train.train_policy.allowed_outdated_steps=0", "train.max_num_steps=8", "whet.machine.threads=1",
        ],
    )  # fmt: skip
    native = native_twin(
        tmp_path, model, reward,
        train={
            "steps": 4, "tasks_per_step": 3, "minibatches": 2, "micro_batch_rollouts": 3,
            "optimizer": {
                "lr": 1e-2,
                "schedule": {
                    "type": "wsd", "warmup_steps": 3, "warmup_ends": "peak", "decay_steps": None, "min_lr_ratio": 0.5,
                },
            },
        },
    )  # fmt: skip
    assert metrics(tmp_path / "foreign/first") == metrics(tmp_path / "native")
    assert [m["ledger/trained_rollouts"] for m in native.metrics] == [12] * 4
    assert native.metrics[0]["train/lr"] == pytest.approx(1e-2 * (1 / 3 + 2 / 3) / 2), (
        "two steps of the warm-up"
    )


def _chat(row: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]


def test_an_sft_file_learns_and_equals_its_native_twin_bit_for_bit(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", "chars")
    chats = tmp_path / "chats.jsonl"
    rows = [json.loads(line) for line in WORDS.read_text().splitlines()]
    chats.write_text("".join(json.dumps({"conversation": _chat(row)}) + "\n" for row in rows))
    whet.train(
        FILES / "cosmos_sft.toml",
        overrides=[
            f"policy.model_name_or_path={model}", f"train.output_dir={tmp_path / 'foreign'}",
            f"train.train_policy.dataset.name={chats}", "whet.machine.threads=1",
            "validation.enable=true", "validation.freq=5", "+train.train_policy.dataset.test_size=4",
        ],
    )  # fmt: skip
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(
        "".join(json.dumps({"prompt": _chat(r)[:1], "response": r["response"]}) + "\n" for r in rows)
    )
    native = whet.train(
        run_dir=str(tmp_path / "native"), model={"path": str(model), "dtype": "float32"},
        data={
            "max_prompt_tokens": 24, "max_total_tokens": 24, "overlong": "filter", "exclude_eval": False,
            "train": [{"name": "chats", "path": str(pairs), "limit": -4}],
            "eval": [{"name": "chats", "path": str(pairs), "skip": -4}],
        },
        eval={"interval": 5, "at_start": False},
        algorithm={"name": "sft"}, rollout={"sampling": {"max_tokens": 24}},
        train={
            "steps": 15, "tasks_per_step": 16, "micro_batch_rollouts": 4,
            "optimizer": {
                "lr": 1e-2, "eps": 1e-6, "max_grad_norm": None,
                "schedule": {"unit": "train_step", "warmup_steps": 3, "warmup_ends": "peak"},
            },
        },
        checkpoint={"interval": 0, "export": False}, machine={"threads": 1},
    )  # fmt: skip
    (foreign,) = (tmp_path / "foreign").iterdir()  # named after the moment of its start
    assert metrics(foreign) == metrics(tmp_path / "native")
    assert [m["step"] for m in native.metrics if "eval/chats/loss_nats" in m] == [5, 10, 15]
    losses = [m["train/loss"] for m in native.metrics if "train/loss" in m]
    assert losses[-1] < 0.8 * losses[0]
