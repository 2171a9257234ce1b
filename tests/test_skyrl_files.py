"""SkyRL files as they are: they load in old and newer names, and a run equals the native one to the bit."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import whet
from whet import cli
from whet.config import schema
from whet.config.load import Loaded
from whet.config.load import load as load_config
from whet.config.parse import parse
from whet.config.plan import plans
from whet.config.tree import leaves
from whet.data.tokenizer import load_tokenizer
from whet.dialects.tables import table
from whet.models.load import build, export
from whet.types import ConfigError

pytestmark = pytest.mark.usefixtures("home")

HERE = Path(__file__).parent / "dialects"
ROWS = {row.key: row for row in table("skyrl")}


def load(name: str, *overrides: str) -> Loaded:
    return load_config(HERE / name, overrides, dialect="skyrl")


def test_the_document_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    whole = load("skyrl_document.yaml").config
    assert whole.data.train[0].path == ("/home/user/data/gsm8k/train.parquet",)
    assert whole.run_dir == "/home/user/ckpts/"
    assert (whole.train.tasks_per_step, whole.train.minibatches, whole.rollout.group_size) == (1024, 4, 5)
    assert whole.eval.sampling is not None
    assert whole.eval.sampling.temperature == 1.0
    tree = parse((HERE / "skyrl_document.yaml").read_text()).tree
    given = {".".join(map(str, path)) for path, value in leaves(tree) if not isinstance(path[-1], int)}
    assert given | {"trainer.strategy"} <= ROWS.keys()


def test_a_ppo_file_in_newer_names() -> None:
    loaded = load("skyrl_gsm8k_ppo.yaml")
    cfg = loaded.config
    plans(loaded)
    assert (cfg.algorithm.name, cfg.algorithm.advantage["lam"], cfg.algorithm.loss["dual_clip"]) == (
        "ppo",
        0.95,
        3.0,
    )
    assert (cfg.algorithm.kl.coef, cfg.algorithm.reward_kl.estimator) == (0.0, "k1")
    assert cfg.algorithm.loss_agg_mode == "token-mean"
    assert (cfg.critic.path, cfg.critic.value_clip, cfg.critic.optimizer.lr) == ("models/chat", None, 5e-6)
    assert cfg.critic.optimizer.schedule == schema.ScheduleConfig(
        type="cosine", warmup_steps=20, warmup_ends="start"
    )
    assert cfg.train.optimizer.schedule.warmup_steps == 10
    assert cfg.train.optimizer.max_grad_norm is None
    assert (cfg.train.minibatches, cfg.train.micro_batch_rollouts, cfg.rollout.sampling.top_k) == (2, 8, 50)
    assert cfg.checkpoint == schema.CheckpointConfig(interval=0, keep=3, resume="fresh", export=False)
    assert cfg.track.trackers == ("console", "tensorboard", "jsonl")


@pytest.mark.parametrize(
    "override",
    [
        "defaults=[_self_, {deepspeed_config@deepspeed_config.train: train}, "
        "{deepspeed_config@deepspeed_config.eval: eval}]",
        "deepspeed_config.train={zero_optimization: {stage: 3, overlap_comm: false}, bf16: {enabled: true}}",
        "trainer.sequence_parallel_backend=ulysses",
        "trainer.gradient_checkpointing_use_reentrant=true",
        "trainer.flash_attn=false",
        "trainer.use_sample_packing=false",
        "trainer.ref.fsdp_config.cpu_offload=false",
        "trainer.reward.model.path=null",
        "trainer.algorithm.kl_target=null",
        "trainer.algorithm.normalize_reward=false",
        "trainer.policy.use_torch_compile=true",
        "trainer.critic.optimizer_config.lr=1e-4",
        "generator.vllm_v1_disable_multiproc=false",
        "generator.batched=false",
        "environment.skyrl_gym={max_env_workers: 4, text2sql: {db_path: sql}}",
    ],
)
def test_what_changes_nothing_is_accepted(override: str) -> None:
    with_it, without = (load("skyrl_document.yaml", *more).config for more in ([override], []))
    assert with_it == without


def test_servers_that_run_already_are_given_by_their_addresses() -> None:
    """Of a whole file; the number of engines is that of the addresses."""
    urls = 'generator.remote_inference_engine_urls=["a:1","b:2"]'
    cfg = load("skyrl_gsm8k_ppo.yaml", "generator.run_engines_locally=false", urls).config
    assert (cfg.rollout.engine, cfg.rollout.server.urls) == ("vllm", ("http://a:1", "http://b:2"))
    assert cfg.rollout.replicas == 0


@pytest.mark.parametrize("override", ["trainer.algorithm.zero_variance_filter=true"])
def test_what_is_not_built_is_refused_by_name(override: str) -> None:
    with pytest.raises(ConfigError, match="coming") as e:
        load("skyrl_gsm8k_ppo.yaml", override)
    assert override.partition("=")[0] in str(e.value)


@pytest.mark.parametrize("override", ["trainer.reward.model.path=judge", "trainer.use_orm_score=true"])
def test_a_reward_model_is_given_natively(override: str) -> None:
    """SkyRL's reward workers never ran, so there is nothing that the keys could mean."""
    with pytest.raises(ConfigError, match=r"rewards\.NAME\.model\.path") as e:
        load("skyrl_gsm8k_ppo.yaml", override)
    assert override.partition("=")[0] in str(e.value)


REWARD = "def score(response, task):\n    return response.count('a') / max(len(response), 1)\n"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny chat model, chat rows in SkyRL's layout and a reward."""
    for name, letters in (("words", "abcdefgh"), ("held_out", "ijk")):
        rows = [
            {
                "data_source": "letters",
                "prompt": [{"role": "user", "content": letter * n}],
                "env_class": "letters",
                "reward_spec": {"method": "rule", "ground_truth": letter},
            }
            for letter in letters
            for n in (1, 2, 3, 4)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    tokenizer = load_tokenizer(schema.TokenizerConfig(build="chars"), model_path=None, texts=["abcdefghijk"])
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
    for name, value in (
        ("WORK", tmp_path),
        ("MODEL", tmp_path / "model"),
        ("REWARD", f"{tmp_path}/reward.py:score"),
    ):
        monkeypatch.setenv(name, str(value))
    return tmp_path


def test_a_run_equals_the_native_one_to_the_bit(work: Path) -> None:
    native: dict[str, Any] = {
        "seed": 42,
        "model": {"path": str(work / "model")},
        "data": {
            "max_prompt_tokens": 12,
            "overlong": "truncate_left",
            "exclude_eval": False,
            "train": [{"path": str(work / "words.jsonl")}],
            "eval": [{"path": str(work / "held_out.jsonl")}],
        },
        "algorithm": {
            "name": "grpo",
            "loss_agg_mode": "seq-mean-token-mean",
            "loss": {"clip_high": 0.28},
            "kl": {"coef": 0.01, "estimator": "k3"},
        },
        "rewards": {"score": {"function": f"{work}/reward.py:score"}},
        "rollout": {"group_size": 4, "max_num_seqs": 64, "sampling": {"max_tokens": 5}},
        "train": {
            "epochs": 4,
            "tasks_per_step": 8,
            "minibatches": 2,
            "micro_batch_rollouts": 8,
            "optimizer": {"lr": 1e-2, "max_grad_norm": 0.5},
        },
        "eval": {"interval": 10},
        "checkpoint": {"interval": 0, "export": False},
        "run_dir": str(work / "native"),
    }
    here = whet.train(HERE / "skyrl_letters.yaml")
    there = whet.train(**native)
    assert here.finished
    assert here.run_dir == work / "ckpts"
    lines = [(run / "metrics.jsonl").read_bytes() for run in (here.run_dir, there.run_dir)]
    assert lines[0] == lines[1]
    dumped = work / "exports/dumped_eval"
    assert sorted(p.name for p in dumped.iterdir()) == [f"global_step_{n}_eval_results" for n in (0, 10, 16)]
    replies, [numbers] = (
        [
            json.loads(line)
            for line in (dumped / "global_step_10_eval_results" / name).read_text().splitlines()
        ]
        for name in ("held_out.jsonl", "aggregated_results.jsonl")
    )
    assert {row["source"] for row in replies} == {"held_out"}
    score = sum(row["score"] for row in replies) / len(replies)
    assert [numbers["step"], score] == [10, pytest.approx(numbers["eval/held_out/reward_mean"])]
    rewards = [line["reward/mean"] for line in here.metrics if "reward/mean" in line]
    assert len(rewards) == 4 * 32 // 8
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_a_file_with_deepspeed_is_converted_and_trained_by_it(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two ranks, which the file as it is would have on GPUs alone; the numbers are those of one process. The norm of
    DeepSpeed's own section clips, as the file gives no other."""
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    file = str(HERE / "skyrl_letters.yaml")
    zero = [
        "trainer.strategy=deepspeed",
        "trainer.policy.optimizer_config.max_grad_norm=0",
        "deepspeed_config.train.gradient_clipping=0.1",
        "deepspeed_config.train.zero_optimization.stage=2",
        "deepspeed_config.train.zero_optimization.offload_optimizer.device=cpu",
        "deepspeed_config.train.zero_optimization.reduce_bucket_size=1000",
    ]
    done = CliRunner().invoke(cli.app, ["convert", file, *zero, "-o", str(work / "native.yaml")])
    assert done.exit_code == 0, done.output
    train = parse((work / "native.yaml").read_text()).tree["train"]
    assert (train["engine"], train["parallel"], train["optimizer"]["max_grad_norm"]) == (
        "deepspeed",
        {"dp_shard": 2},
        0.1,
    )
    assert train["engine_arguments"]["zero_optimization"]["reduce_bucket_size"] == 1000
    few = ["train.epochs=1", "rollout.replicas=0", f"run_dir={work}/zero"]
    here = whet.train(work / "native.yaml", overrides=few)
    norm = "trainer.policy.optimizer_config.max_grad_norm=0.1"
    there = whet.train(HERE / "skyrl_letters.yaml", overrides=["trainer.epochs=1", norm])
    for key in ("train/grad_norm", "train/loss", "reward/mean"):
        mine, theirs = ([line[key] for line in run.metrics if key in line] for run in (here, there))
        assert len(mine) == 4
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5), key


def test_a_critic_learns_beside_the_policy(work: Path) -> None:
    ppo = [
        "trainer.algorithm.advantage_estimator=gae",
        f"trainer.critic.model.path={work}/model",
        "trainer.critic_mini_batch_size=4",
        "trainer.placement.critic_num_gpus_per_node=2",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.algorithm.use_kl_in_reward=true",
        "trainer.epochs=1",
        "trainer.eval_interval=-1",
    ]
    result = whet.train(HERE / "skyrl_letters.yaml", overrides=ppo)
    assert [line["step"] for line in result.metrics] == [1, 2, 3, 4]
    assert all(line["critic/lr"] == 5e-6 and line["train/kl_coef"] == 0.01 for line in result.metrics)


FEW = ["trainer.eval_interval=-1", "trainer.epochs=2"]


OWN = """
import torch


def score(batch, *, reward_N):
    score_R = batch.sum_R(reward_N.double())
    return torch.where(batch.mask_N, score_R[batch.rollout_N], 0.0).to(reward_N.dtype), None
"""


def test_an_advantage_of_ones_own_trains_in_place_of_a_registered_name(work: Path) -> None:
    """The function is whet's advantage `reward`, so both runs have the same gradients."""
    (work / "own.py").write_text(OWN)
    own = f"trainer.algorithm.advantage_estimator={work}/own.py:score"
    runs = [
        whet.train(
            HERE / "skyrl_letters.yaml",
            overrides=[
                "trainer.eval_interval=-1",
                "trainer.epochs=1",
                f"trainer.ckpt_path={work}/{n}",
                asked,
            ],
        )
        for n, asked in enumerate((own, "whet.algorithm.advantage=reward"))
    ]
    first, second = ([line["train/grad_norm"] for line in run.metrics] for run in runs)
    assert len(first) == 4
    assert first == second


def test_the_reference_becomes_the_policy_at_the_end_of_every_epoch(work: Path) -> None:
    result = whet.train(HERE / "skyrl_letters.yaml", overrides=[*FEW, "trainer.update_ref_every_epoch=true"])
    far = [line["train/kl_reference_nats"] != 0 for line in result.metrics]
    assert far == [False, True, True, True, False, True, True, True]  # 32 tasks are 4 steps of 8


def test_a_value_head_of_the_checkpoint_is_read(work: Path) -> None:
    """The same backbone with a head that says 3.0 everywhere: the first values are 3, the loss is about 3^2 / 2."""
    critic = work / "critic"
    shutil.copytree(work / "model", critic)
    tensors = load_file(critic / "model.safetensors")
    head = {"value_head.weight": torch.zeros(1, 32), "value_head.bias": torch.full((1,), 3.0)}
    save_file(tensors | head, critic / "model.safetensors", metadata={"format": "pt"})
    ppo = [
        *FEW,
        "trainer.algorithm.advantage_estimator=gae",
        "trainer.placement.critic_num_gpus_per_node=2",
        "trainer.critic_mini_batch_size=8",
        "trainer.algorithm.normalize_reward=false",
        "trainer.epochs=1",
    ]
    losses = []
    for n, path in enumerate((critic, work / "model")):
        mine = [f"trainer.critic.model.path={path}", f"trainer.ckpt_path={work}/{n}"]
        losses.append(
            whet.train(HERE / "skyrl_letters.yaml", overrides=[*ppo, *mine]).metrics[0]["critic/loss"]
        )
    assert 2 <= losses[0] <= 4.5
    assert losses[1] < 0.5


def test_zero_reward_on_non_stop_and_dumps_and_exports(work: Path) -> None:
    more = [
        *FEW,
        "trainer.epochs=1",
        "generator.zero_reward_on_non_stop=true",
        "trainer.dump_data_batch=true",
        "trainer.hf_save_interval=2",
        f"trainer.export_path={work}/exports",
        "trainer.run_name=few",
    ]
    result = whet.train(HERE / "skyrl_letters.yaml", overrides=more)
    assert len(list((result.run_dir / "batches").glob("*.parquet"))) == 4
    dumped = sorted(p.name for p in (work / "exports/dumped_data").iterdir())
    assert dumped == [f"global_step_{step}_training_input.parquet" for step in (1, 2, 3, 4)]
    assert sorted(p.name for p in (work / "exports" / "skyrl" / "few").glob("main*")) == [
        "main",
        "main-step-000002",
    ]
    for file in (result.run_dir / "rollouts").glob("*.parquet"):
        rows = pq.read_table(file).to_pylist()
        ended = [row["finish_reason"] == "stop" for row in rows]
        assert not all(ended)
        reward = torch.tensor([row["reward"] * e for row, e in zip(rows, ended)], dtype=torch.float64)
        group = reward.view(-1, 4)
        expected = (group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-6)
        assert [row["advantage"] for row in rows] == pytest.approx(expected.flatten().tolist(), abs=1e-5)


def test_a_trial_of_whole_contexts_samples_full_replies_to_made_up_prompts(tmp_path: Path) -> None:
    """As SkyRL's run_full_ctx.sh, whose entry point has 5 steps of its own."""
    script = tmp_path / "run.sh"
    script.write_text(
        "uv run -m examples.train_scripts.full_context.main_full_ctx trainer.policy.model.path=m "
        "trainer.train_batch_size=8 trainer.policy_mini_batch_size=8 trainer.max_prompt_length=64 trainer.epochs=20 "
        "generator.sampling_params.max_generate_length=32 environment.env_class=bird trainer.resume_mode=latest "
        "trainer.eval_interval=1 trainer.ckpt_interval=1 trainer.hf_save_interval=1 $@\n"
    )
    cfg = load_config(script, here=False).config
    (source,) = cfg.data.train
    assert (source.function, source.arguments) == ("random_tokens", {"rows": 8, "prompt": 64})
    assert (cfg.train.steps, cfg.train.epochs, cfg.data.eval) == (5, None, ())
    assert (cfg.rollout.sampling.ignore_eos, cfg.rollout.sampling.max_tokens) == (True, 32)
    assert [reward.function for reward in cfg.rewards.values()] == ["whet.rewards.made_up:coin"]
    assert (cfg.checkpoint.interval, cfg.checkpoint.export, cfg.checkpoint.resume) == (0, False, "fresh")
    assert load_config(script, ["trainer.num_dummy_steps=2"], here=False).config.train.steps == 2


ARCTIC = (
    "trainer.override_entrypoint=integrations.arctic_rl.entrypoint",
    "trainer.algorithm.use_kl_loss=false",
    "trainer.train_batch_size=64",
)


def arctic(folder: Path, *overrides: str) -> schema.Config:
    path = folder / "file.yaml"
    path.write_text("trainer: {policy: {model: {path: m}}}\n")
    return load_config(path, [*ARCTIC, *overrides], dialect="skyrl@main", here=False).config


def test_arctic_rl_makes_one_optimizer_step_of_a_batch_with_betas_of_its_own(tmp_path: Path) -> None:
    """As run_gsm8k_grpo_4gpu.sh, whose mini batch of 4 no rank could share."""
    placed = ("zero_stage=3", "colocate=true", "speculative_model=draft", "vllm_max_num_batched_tokens=4096")
    given = [f"trainer.arctic_rl.{key}" for key in (*placed, "optimizer_betas=[0.9, 0.95]")]
    cfg = arctic(tmp_path, "trainer.policy_mini_batch_size=4", *given)
    assert (cfg.train.tasks_per_step, cfg.train.minibatches) == (64, 1)
    assert cfg.train.optimizer.betas == (0.9, 0.95)
    assert arctic(tmp_path).train.optimizer.betas == (0.9, 0.999)
    warm = arctic(
        tmp_path, "trainer.arctic_rl.lr_warmup_ratio=0.05", "trainer.epochs=1"
    ).train.optimizer.schedule
    assert (warm.type, warm.warmup_steps, warm.warmup_ends) == ("constant", 50, "start"), (
        "of 1000, in any run"
    )
    assert (
        arctic(tmp_path, "trainer.arctic_rl.lr_warmup_ratio=0.0015").train.optimizer.schedule.warmup_steps
        == 2
    )
    without = [key for key in given if "betas" not in key]
    assert arctic(tmp_path, *without) == arctic(tmp_path), "memory, speed and placement change nothing"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.algorithm.use_kl_loss=true", "ArcticRL has no reference"),
        ("trainer.update_epochs_per_batch=2", "set it to 1"),
        ("trainer.policy.model.lora.rank=8", "ArcticRL reads no adapters"),
        ("trainer.algorithm.loss_reduction=sequence_mean", "whose mean is over tokens"),
        ("trainer.algorithm.policy_loss_type=gspo", "whose loss is regular"),
        ("trainer.policy.optimizer_config.num_warmup_steps=3", "whose rate is constant"),
        ("generator.sampling_params.temperature=0.7", "with ArcticRL is coming"),
        ("trainer.arctic_rl.lr_scheduler_type=cosine", "schedules of the server"),
        ("trainer.arctic_rl.vllm_config={quantization: fp8}", "options of ArcticRL's inference"),
        ("trainer.arctic_rl.torch_autocast_enabled=true", "autocast of DeepSpeed"),
    ],
)
def test_what_arctic_rl_does_not_read_or_does_otherwise_is_refused(
    override: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as e:
        arctic(tmp_path, override)
    assert said in str(e.value)


@pytest.mark.parametrize(
    ("key", "feature"),
    [
        ("generator.rate_limit.enabled=true", "Write an environment"),
        ("generator.miniswe_config_path=a.yaml", "Write an environment"),
        ("harbor_trial_config.trials_dir=there", "Write an environment"),
        ("trainer.arctic_rl.shape=2", "ArcticRL's own options"),
    ],
)
def test_keys_of_skyrls_examples_are_refused_by_their_feature(key: str, feature: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("trainer: {policy: {model: {path: m}}}\n")
    with pytest.raises(ConfigError) as e:
        load_config(path, [key], dialect="skyrl@main")
    assert feature in str(e.value)
    assert "unknown key" not in str(e.value)
