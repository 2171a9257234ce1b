"""Whole verl files: the document loads, a run equals the native one to the bit, SFT and evaluation files run."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import whet
from whet.cli import app
from whet.config import schema
from whet.config.load import load
from whet.config.parse import parse
from whet.config.plan import plans
from whet.data.tokenizer import load_tokenizer
from whet.dialects.tables import dialect
from whet.dialects.translate import translate
from whet.models.load import build, export
from whet.types import Json

HERE = Path(__file__).parent / "dialects"


def problems(name: str, kind: str = "verl-ppo") -> list[str]:
    tree = parse((HERE / name).read_text(encoding="utf-8")).tree
    made = translate(tree, dialect(kind), origins={})
    return [text for _, text in (*made.problems, *made.unbuilt)]


def test_the_document_loads() -> None:
    assert problems("verl_document.yaml") == []
    assert problems("verl_document_zh.yaml") == []
    assert problems("verl_document_sft.yaml", "verl-sft") == []
    assert problems("verl_document_eval.yaml", "verl-eval") == []


def test_a_file_for_an_evaluation_alone_converts() -> None:
    """There is nothing to plan, since nothing is trained; `whet eval` reads what is written."""
    done = CliRunner().invoke(app, ["convert", str(HERE / "verl_document_eval.yaml")])
    assert done.exit_code == 0, done.output
    assert "offline: " in done.output


def test_a_file_for_64_gpus_with_megatron_is_translated_whole() -> None:
    assert problems("verl_64_gpus.yaml") == []


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model and data in verl's columns."""
    monkeypatch.setenv("VERL_TEST", str(tmp_path))
    monkeypatch.chdir(HERE.parent.parent)
    rows = [json.loads(line) for line in Path("tests/data/words.jsonl").read_text().splitlines()[:32]]
    made = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": n},
        }
        for n, row in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(made[:24]), tmp_path / "train.parquet")
    pq.write_table(pa.Table.from_pylist(made[24:]), tmp_path / "test.parquet")
    tokenizer = load_tokenizer(schema.TokenizerConfig(build="chars"), model_path=None, texts=["abcdefgh>"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
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
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    export(model, tokenizer, tmp_path / "model")
    return tmp_path


def test_a_run_equals_the_native_one_to_the_bit(work: Path) -> None:
    mine = whet.train(HERE / "verl_letters.yaml")
    native = whet.train(HERE / "verl_letters.native.yaml")
    rewards = [m["reward/mean"] for m in mine.metrics if "reward/mean" in m]
    assert len(rewards) == 15
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3]), "it learns"
    assert (work / "run/metrics.jsonl").read_bytes() == (work / "native/metrics.jsonl").read_bytes()
    assert mine.finished
    assert native.finished


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
        "+reward_model.strategy=fsdp2",
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.load_format=dummy_megatron",
        "critic.optim.lr=3e-4",
        "trainer.n_gpus_per_node=2",
        "ray_init.num_cpus=8",
    ],
)
def test_what_changes_nothing_is_accepted(work: Path, override: str) -> None:
    plain, changed = (load(HERE / "verl_letters.yaml", o) for o in ((), (override,)))
    assert plain.config == changed.config


def test_a_critic_learns_beside_the_policy(work: Path) -> None:
    overrides = (
        "algorithm.adv_estimator=gae",
        "algorithm.lam=0.95",
        f"critic.model.path={work}/model",
        "critic.optim.lr=1e-3",
        "trainer.critic_warmup=2",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "critic.ppo_micro_batch_size_per_gpu=2",
    )
    loaded = load(HERE / "verl_letters.yaml", overrides)
    assert plans(loaded)[0].needs_critic
    config = loaded.config
    assert (config.algorithm.name, config.algorithm.advantage["lam"], config.critic.micro_batch_rollouts) == (
        "ppo",
        0.95,
        2,
    )
    assert (config.critic.optimizer.lr, config.critic.warmup_steps, config.train.steps) == (1e-3, 1, 2)
    assert (config.critic.path, config.critic.optimizer.weight_decay) == (f"{work}/model", 0.01)


SFT = {
    "data.train_batch_size": 8,
    "data.micro_batch_size_per_gpu": 8,
    "data.max_length": 24,
    "optim.lr": 1e-2,
    "trainer.n_gpus_per_node": 1,
    "trainer.logger": "console",
}


def sft(work: Path, **more: Json) -> list[str]:
    """Overrides of a small SFT file."""
    given = {
        **SFT,
        "trainer.default_local_dir": f"{work}/sft",
        "data.train_files": f"{work}/sft.jsonl",
        "data.val_files": f"{work}/held_out.jsonl",
        **more,
    }
    return [f"{key}={json.dumps(value)}" for key, value in given.items()]


def test_an_sft_file(work: Path) -> None:
    given = sft(work, **{"model.partial_pretrain": f"{work}/model", "trainer.total_epochs": 3})
    loaded = load(None, (*given, "data.prompt_key=q", "trainer.test_freq=5"), dialect="verl-sft")
    config, optimizer = loaded.config, loaded.config.train.optimizer
    assert (config.algorithm.name, config.data.chat, config.data.train[0].prompt) == ("sft", True, "q")
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (1e-2, (0.9, 0.95), 0.01)
    assert (optimizer.schedule.type, optimizer.schedule.warmup_steps) == ("cosine", 0.1)
    assert (config.train.tasks_per_step, config.train.micro_batch_rollouts, config.train.epochs) == (8, 8, 3)
    assert (config.model.dtype, config.seed, config.run_dir) == ("float32", 1, f"{work}/sft")
    assert (config.data.max_total_tokens, config.eval.interval, config.data.eval[0].prompt) == (24, 5, "q")
    assert plans(loaded, rows={"main": 30})[0].steps == 9, "3 full batches of 8 in each of 3 epochs"


SCRATCH = """
whet:
  model:
    path: null
    scratch:
      {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 64,
       max_position_embeddings: 64}
  tokenizer: {build: chars}
"""


def spelled(path: Path, rows: list[dict[str, Json]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_an_sft_file_trains_a_model_from_scratch(work: Path) -> None:
    rows: list[dict[str, Json]] = [{"question": f"say {c}", "answer": c * 3} for c in "abcdefgh" * 4]
    spelled(work / "sft.jsonl", rows)
    spelled(work / "held_out.jsonl", rows[:8])
    (work / "sft.yaml").write_text(
        "optim: {lr_scheduler: wsd}\ntrainer: {total_epochs: 8, test_freq: 10}\n" + SCRATCH
    )
    result = whet.train(work / "sft.yaml", overrides=sft(work))
    losses = [line["eval/held_out/loss_nats"] for line in result.metrics if "eval/held_out/loss_nats" in line]
    assert len(losses) == 4, "steps 10, 20, 30 and the last, 32"
    assert losses[-1] < 0.2 * losses[0]
    assert (work / "sft/export/main/model.safetensors").is_file()


def test_an_sft_file_of_conversations_trains_a_model_from_scratch(work: Path) -> None:
    def turns(c: str) -> list[Json]:
        said = [("user", f"say {c}"), ("assistant", c * 2), ("user", "more"), ("assistant", c * 4)]
        return [{"role": role, "content": text} for role, text in said]

    spelled(work / "sft.jsonl", [{"messages": turns(c)} for c in "abcdefgh" * 4])
    file = "data: {multiturn: {enable: true, messages_key: messages}}\ntrainer: {total_training_steps: 12}\n"
    (work / "turns.yaml").write_text(file + SCRATCH)
    given = sft(
        work,
        **{"data.max_length": 64, "data.val_files": None, "trainer.default_local_dir": f"{work}/turns"},
    )
    result = whet.train(work / "turns.yaml", overrides=given)
    losses = [line["train/loss"] for line in result.metrics]
    assert len(losses) == 12
    assert losses[-1] < 0.7 * losses[0]


REPLIES: list[dict[str, Json]] = [
    {
        "data_source": source,
        "prompt": [{"role": "user", "content": "2+3?"}],
        "responses": replies,
        "reward_model": {"style": "rule", "ground_truth": "5"},
    }
    for source, replies in (
        ("openai/gsm8k", ["#### 5", "#### 6"]),
        ("openai/gsm8k", ["#### 5", "#### 5"]),
        ("math_dapo", ["Answer: 5", "5"]),
    )
]


def judged(file: Path, *overrides: str) -> dict[str, float]:
    """The numbers of `whet eval FILE`."""
    out = file.with_suffix(".json")
    done = CliRunner().invoke(app, ["eval", str(file), *overrides, "-o", str(out)])
    assert done.exit_code == 0, done.output
    numbers: dict[str, float] = json.loads(out.read_text())["metrics"]
    return numbers


def test_an_evaluation_file_is_judged_without_a_model(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(REPLIES), tmp_path / "r.parquet")
    (tmp_path / "e.yaml").write_text(
        f"data: {{path: {tmp_path}/r.parquet, prompt_key: prompt, response_key: responses}}\n"
        "custom_reward_function: {path: null, name: compute_score}\nray_init: {num_cpus: 4}\n"
    )
    numbers = judged(tmp_path / "e.yaml")
    # verl's table by source: gsm8k 1, 0, 1, 1; math_dapo 1 and -1
    assert numbers["eval/openai/gsm8k/reward_mean"] == 0.75
    assert numbers["eval/math_dapo/reward_mean"] == 0.0


def test_an_evaluation_file_with_a_function_and_columns_of_yours(tmp_path: Path) -> None:
    names = {"responses": "out", "data_source": "kind", "reward_model": "truth"}
    rows = [{names.get(key, key): value for key, value in row.items()} for row in REPLIES]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet")
    (tmp_path / "mine.py").write_text(
        "def mine(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 2.0 * (ground_truth in solution_str)\n"
    )
    (tmp_path / "e.yaml").write_text(f"data: {{path: {tmp_path}/r.parquet}}\n")
    columns = ("data.response_key=out", "data.data_source_key=kind", "data.reward_model_key=truth")
    mine = (f"custom_reward_function.path={tmp_path}/mine.py", "custom_reward_function.name=mine")
    numbers = judged(tmp_path / "e.yaml", *columns, *mine, "--dialect", "verl-eval")
    assert numbers["eval/openai/gsm8k/reward_mean"] == 1.5
    assert numbers["eval/math_dapo/reward_mean"] == 2.0


def test_a_generation_file_is_known_for_what_it_is() -> None:
    given = ("data.path=a.parquet", "data.n_samples=8", "rollout.temperature=0.6", "model.path=m")
    loaded = load(None, given, dialect="verl")
    assert loaded.translation is not None
    assert loaded.translation.dialect == "verl-generation"
    assert loaded.config.eval.samples == 8


def test_the_example_is_a_valid_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE.parent.parent)
    loaded = load("examples/from_verl.yaml")
    assert loaded.translation is not None
    assert loaded.translation.dialect == "verl-ppo"
    assert plans(loaded, rows={"main": 124})[0].steps == 70, "7 full batches of 16 in each of 10 epochs"


ENDS = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
TALK = """
class EchoInteraction:
    def __init__(self, config):
        self.said = config["said"]

    async def start_interaction(self, instance_id=None, **kwargs):
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        return False, self.said, float(len(messages)), {}

    async def finalize_interaction(self, instance_id, **kwargs):
        pass
"""


def test_an_interaction_of_verl_plays_in_a_run(work: Path) -> None:
    """At most 3 replies and 24 tokens after the prompt, sampled and said; the interaction says two tokens."""
    (work / "talk.py").write_text(TALK)
    entry = {"class_name": f"{work}/talk.py:EchoInteraction", "config": {"said": "ab"}}
    (work / "talk.yaml").write_text(json.dumps({"interaction": [entry]}))
    rows = pq.read_table(work / "train.parquet").to_pylist()
    for row in rows:
        row["extra_info"]["interaction_kwargs"] = {"name": "echo"}
    pq.write_table(pa.Table.from_pylist(rows), work / "train.parquet")
    at = "actor_rollout_ref.rollout."
    overrides = [
        "data.max_response_length=24", "trainer.total_training_steps=2", "trainer.test_freq=-1", f"{at}mode=async",
        f"{at}ignore_eos=False", f"{at}agent.default_agent_loop=tool_agent", f"{at}multi_turn.enable=True",
        f"{at}multi_turn.max_assistant_turns=3", f"{at}multi_turn.interaction_config_path={work}/talk.yaml",
        "trainer.val_before_train=False", f"whet.tokenizer.chat_template={json.dumps(ENDS)}",
    ]  # fmt: skip
    done = whet.train(HERE / "verl_letters.yaml", overrides=overrides)
    assert done.finished
    (first, *_) = sorted((work / "run" / "rollouts").glob("*.parquet"))
    found = pq.read_table(first).to_pylist()
    for row in found:
        turns = json.loads(row["turns"])
        told = sum(not sampled for sampled in row["mask"]) - turns[0]["start"]
        assert told == 2 * (len(turns) - 1), "two tokens after each reply but the last"
        assert len(row["mask"]) - turns[0]["start"] <= 24
        assert row["stop_reason"] in ("turns", "tokens", "context")
    most = max(found, key=lambda row: len(json.loads(row["turns"])))
    assert len(json.loads(most["turns"])) == 3
    assert dict(most["reward_parts"])["env/turn_scores"] == 2 + 4, "it has heard two messages, then four"
