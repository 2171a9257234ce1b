"""DeepSpeed as a train engine: its numbers against those of one process, its files, and what its config may say.

Two ranks start once for all of it; tests/test_train_contract.py has the whole contract, stage by stage (`make
test-backends`)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import grid
from grid import WAYS, Layout
from test_ranks_grid import ROUNDING
from test_train_torch import pg_loss, weighted
from whet.batch import Batch, Loss, Outputs
from whet.config import checks_run, deepspeed
from whet.config.load import load
from whet.config.plan import plans
from whet.config.sections.precision import PrecisionConfig
from whet.models.load import value_head
from whet.models.mesh import Dims
from whet.training.engine import TrainEngine
from whet.training.ranks import Ranks
from whet.types import ConfigError, Json

CUT = {"stage3_param_persistence_threshold": 0}
"""DeepSpeed leaves small tensors whole; those of a tiny model are all small."""
CPU = {"device": "cpu"}
ZERO: dict[str, Json] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3, **CUT},
    "stage 3, small tensors whole": {"stage": 3},
    "stage 1, optimizer on the host": {"stage": 1, "offload_optimizer": CPU},
    "stage 2, optimizer on the host": {"stage": 2, "offload_optimizer": CPU},
    "stage 3, all on the host": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, **CUT},
    "stage 3, hpZ": {"stage": 3, "zero_hpz_partition_size": 2, **CUT},
    "stage 3, overlapped": {"stage": 3, "overlap_comm": True, **CUT},
}


def layout(name: str, **more: Any) -> Layout:
    return Layout(Dims(dp_shard=2), zero=ZERO[name], **more)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    ranks = grid.started(2)
    try:
        yield ranks
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        (layout("stage 1"), "by tokens"),
        (layout("stage 2"), "LoRA"),
        pytest.param(layout("stage 3"), "checkpointing", marks=pytest.mark.sweep),
        (layout("stage 3, all on the host", family=grid.MOE), "by rollouts"),
        pytest.param(layout("stage 3, small tensors whole"), "LoRA", marks=pytest.mark.sweep),
        (layout("stage 2, optimizer on the host"), "shared prompts"),
        (layout("stage 3, hpZ"), "shared prompts"),
    ],
    ids=lambda each: "" if isinstance(each, Layout) else each,
)
def test_log_probs_gradients_and_three_steps_are_those_of_one_process(
    ranks: Ranks, shape: Layout, way: str
) -> None:
    """Several micro-batches; the third of three steps is clipped, as all are."""
    errors, note = grid.worst()
    grid.policy(ranks, shape, WAYS[way], note)
    assert all(e <= ROUNDING[what] for what, (e, _) in errors.items()), errors


HALF = 0.02
"""Of how far weights have moved in three steps in bfloat16, whose own rounding is 0.004 of a number."""


@pytest.mark.parametrize(
    ("name", "reduce"),
    [
        ("stage 1", None),
        ("stage 3", "float32"),
        pytest.param("stage 2", "float32", marks=pytest.mark.sweep),
        pytest.param("stage 3", None, marks=pytest.mark.sweep),
        pytest.param("stage 2, optimizer on the host", None, marks=pytest.mark.sweep),
        pytest.param("stage 3, all on the host", "float32", marks=pytest.mark.sweep),
    ],
)
def test_in_bfloat16_it_is_as_near_to_float32_as_torch_is(
    ranks: Ranks, tmp_path: Path, name: str, reduce: Any
) -> None:
    """What is compared is how far the float32 master weights have moved."""
    cut = replace(WAYS["by tokens"].cut, precision=PrecisionConfig(reduce=reduce))
    way = grid.Way(cut, dtype=torch.bfloat16)
    model = grid.model_of(layout(name), way)
    start = {n: p.detach().float() for n, p in model.named_parameters()}
    exact, _ = grid.pair(ranks, layout(name), WAYS["by tokens"], model=model.float(), **grid.learning())
    one, many = grid.pair(ranks, layout(name), way, model=model.to(torch.bfloat16), **grid.learning())  # type: ignore[arg-type]
    assert torch.equal(many.forward(weighted(), "logprobs"), one.forward(weighted(), "logprobs"))
    for seed in range(grid.STEPS):
        numbers = [engine.update(weighted(seed), pg_loss)["grad_norm"] for engine in (exact, one, many)]
        assert numbers[1:] == pytest.approx([numbers[0]] * 2, rel=HALF)
    far = flat(start, {n: p.detach() for n, p in exact.module.named_parameters()})
    torch_, zero = (flat(start, masters(engine, tmp_path / str(n))) for n, engine in enumerate((one, many)))
    assert grid.error(zero, torch_) <= HALF
    assert grid.error(zero, far) <= 1.1 * grid.error(torch_, far) + 1e-3


def masters(engine: TrainEngine, folder: Path) -> dict[str, torch.Tensor]:
    engine.save(folder)
    found = load_file(folder / "optimizer.safetensors")
    return {n.removeprefix("master."): x for n, x in found.items() if n.startswith("master.")}


def flat(start: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([(now[n] - x).flatten() for n, x in start.items()])


def test_files_in_bfloat16_are_those_of_one_process(ranks: Ranks, tmp_path: Path) -> None:
    errors, note = grid.worst()
    grid.resumed(ranks, layout("stage 3"), grid.Way(dtype=torch.bfloat16), note, folder=tmp_path)
    assert all(e <= HALF for e, _ in errors.values()), errors


def at_home(batch: Batch, out: Outputs) -> Loss:
    """Of a rank: DeepSpeed computes on the rank's own device."""
    assert os.environ["LOCAL_RANK"] == str(torch.distributed.get_rank())
    return pg_loss(batch, out)


def test_each_rank_computes_on_its_own_device(ranks: Ranks) -> None:
    """`deepspeed.initialize` makes the GPU of LOCAL_RANK the current one."""
    way = WAYS["shared prompts"]
    many = grid.group(
        ranks, layout("stage 2"), way, model=grid.model_of(layout("stage 2"), way), **grid.learning()
    )
    assert many.update(weighted(), at_home)["grad_norm"] > 0


@pytest.mark.parametrize("name", ["stage 2", "stage 3"])
def test_what_is_beside_the_model_learns_too(ranks: Ranks, name: str) -> None:
    errors, note = grid.worst()
    grid.critic(ranks, layout(name), WAYS["shared prompts"], note)
    assert all(e <= ROUNDING[what] for what, (e, _) in errors.items()), errors


@pytest.mark.parametrize(
    ("name", "way"),
    [("stage 1", "shared prompts"), ("stage 3", "LoRA"), ("stage 3, all on the host", "by tokens")],
)
def test_files_are_those_of_one_process(ranks: Ranks, tmp_path: Path, name: str, way: str) -> None:
    """To the byte; and either goes on from what the other has saved."""
    errors, note = grid.worst()
    grid.resumed(ranks, layout(name), WAYS[way], note, folder=tmp_path)
    assert all(e <= ROUNDING[what] for what, (e, _) in errors.items()), errors


def test_a_tensor_that_the_ranks_do_not_divide_is_read_back(ranks: Ranks, tmp_path: Path) -> None:
    """The bias of a value head: one number."""
    way, head = WAYS["shared prompts"], value_head(32, 0)
    how = grid.learning(value_head=head, whole=True, optimizer=grid.ADAM)
    model = grid.model_of(layout("stage 3"), way)
    one, many = grid.pair(ranks, layout("stage 3"), way, model=model, role="critic", **how)
    batch = replace(weighted(), return_N=weighted().adv_N, value_N=one.forward(weighted(), "values"))
    one.update(batch, grid.clipped_values)
    one.save(tmp_path / "one")
    many.load(tmp_path / "one")
    many.save(tmp_path / "many")
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "many" / file).read_bytes()
    errors, note = grid.worst()
    grid.note_metrics(note, many.update(batch, grid.clipped_values), one.update(batch, grid.clipped_values))
    assert all(e <= ROUNDING[what] for what, (e, _) in errors.items()), errors


@pytest.mark.parametrize("family", ["qwen3", pytest.param(grid.MOE, marks=pytest.mark.sweep)])
def test_a_step_on_each_from_the_checkpoint_of_another(ranks: Ranks, tmp_path: Path, family: str) -> None:
    chain = [
        layout("stage 3", family=family),
        Layout(Dims(tp=2), family=family),
        layout("stage 1", family=family),
    ]
    errors, note = grid.worst()
    grid.handed_on(ranks, chain, WAYS["shared prompts"], note, folder=tmp_path)
    assert all(e <= ROUNDING[what] for what, (e, _) in errors.items()), errors


@pytest.mark.parametrize("name", ["stage 2", "stage 3"])
def test_a_step_that_is_not_finite_is_skipped(ranks: Ranks, name: str) -> None:
    way, how = WAYS["shared prompts"], grid.learning(optimizer=grid.ADAM)
    one, many = grid.pair(ranks, layout(name), way, model=grid.model_of(layout(name), way), **how)
    batch = weighted()
    assert batch.adv_N is not None
    bad = replace(batch, adv_N=torch.where(batch.rollout_N == 2, torch.inf, batch.adv_N))
    for engine in (one, many):
        engine.update(weighted(1), pg_loss)
        numbers = engine.update(bad, pg_loss)
        assert numbers["skipped_steps"] == 1.0
        assert "grad_norm" not in numbers
    errors, note = grid.worst()
    grid.note_metrics(note, many.update(weighted(2), pg_loss), one.update(weighted(2), pg_loss))
    grid.note_tensors(note, "weights", dict(many.weights()), dict(one.weights()))
    assert all(e <= ROUNDING[what] for what, (e, _) in errors.items()), errors


@pytest.mark.parametrize("name", ["stage 2", "stage 3"])
def test_a_reference_takes_a_share_of_the_policy(ranks: Ranks, name: str) -> None:
    way = WAYS["shared prompts"]
    one, many = grid.pair(ranks, layout(name), way, model=grid.model_of(layout(name), way), **grid.learning())
    far = grid.model_of(layout(name), way, seed=9).requires_grad_(False)
    far_one, far_many = grid.pair(ranks, layout(name), way, model=far, role="reference")
    for reference, policy in ((far_one, one), (far_many, many)):
        reference.copy_from(policy, 0.25)
    found, expected = (far.forward(weighted(), "entropy") for far in (far_many, far_one))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- what a config may say

BASE: Json = {
    "model": {"scratch": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}},
    "tokenizer": {"build": "chars"},
    "data": {"max_prompt_tokens": 16, "train": [{"path": "tests/data/words.jsonl"}]},
    "rewards": {"letters": {"function": "tests/resume/rewards.py:shared_letters"}},
    "rollout": {"group_size": 4},
    "train": {
        "steps": 2,
        "tasks_per_step": 8,
        "minibatches": 2,
        "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95], "max_grad_norm": 0.5},
        "engine": "deepspeed",
        "parallel": {"dp_shard": 2},
    },
}


AT = "train.engine_arguments.zero_optimization"


def given(config: Json | str, *overrides: str) -> Any:
    train = {**BASE["train"], "engine_arguments": config}
    return load(None, overrides, {**BASE, "train": train})


def test_a_file_that_nests_too_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=f"train.engine_arguments: {path}: lists and mappings nest"):
        plans(given(str(path)))


def test_what_is_equal_or_auto_passes_and_the_rest_is_passed_on(tmp_path: Path) -> None:
    """As a file of transformers' Trainer has it, and with this run's numbers."""
    file = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": "auto"}},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "amp": {"enabled": False},
        "bf16": {"enabled": "auto"},
        "sequence_parallel_size": 1,
        "wall_clock_breakdown": True,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "sub_group_size": 1000,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu"},
        },
    }
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(file))
    for config in (file, str(path)):
        cfg = given(config).stages[0]
        plans(given(config))
        made = deepspeed.engine_config(cfg.train, cfg.train.optimizer, "bfloat16")
        assert made["zero_optimization"] == {
            "stage": 3, "sub_group_size": 1000, "overlap_comm": True, "offload_optimizer": {"device": "cpu"},
        }  # fmt: skip
        assert (made["gradient_clipping"], made["bf16"]["enabled"], made["wall_clock_breakdown"]) == (
            0.5,
            True,
            True,
        )
        assert made["gradient_accumulation_steps"] == made["train_micro_batch_size_per_gpu"] == 1
        assert not {"optimizer", "train_batch_size", "fp16"} & made.keys()
    reference = deepspeed.engine_config(cfg.train, None, "float32")
    assert (reference["gradient_clipping"], reference["bf16"]["enabled"]) == (0.0, False)


@pytest.mark.parametrize(
    ("config", "overrides", "said"),
    [
        ({"train_batch_size": 32}, [], "train_batch_size=32 contradicts the run, which has 16"),
        ({"train_micro_batch_size_per_gpu": 4}, [], "train_micro_batch_size_per_gpu=4.*micro_batch_rollouts"),
        ({"gradient_accumulation_steps": 3}, ["train.micro_batch_rollouts=4"], "accumulation_steps=3.*which has 2"),
        ({"gradient_clipping": 1.0}, [], "gradient_clipping=1.0.*0.5"),
        ({"optimizer": {"type": "Lamb"}}, [], "optimizer.type=\"Lamb\""),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}, ["train.optimizer.name=adam"], "optimizer.params.lr"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, [], "use train.gradient_checkpointing"),
        ({"communication_data_type": "bf16"}, ["train.precision.reduce=float32"], "which has \"fp32\""),
        ({}, ["train.precision.reduce=float32", f"{AT}.stage=1"], f"use {AT}.stage=2"),
        ({"scheduler": {"type": "WarmupLR"}}, [], "scheduler is not passed on: use train.optimizer.schedule"),
        ({"fp16": {"enabled": True}}, [], "fp16 is not passed on"),
        ({"bf16": {"enabled": True}}, ["model.dtype=float32"], "bf16.enabled=true"),
        ({"zero_optimization": {"stage": 0}}, [], "stage 0 shards nothing"),
        ({}, [f"{AT}.stage=1", f"{AT}.offload_param.device=cpu"], "cpu needs stage 3"),
        ({}, [f"{AT}.offload_param.device=gpu"], "expected none, cpu, nvme"),
        ({}, [f"{AT}.offload_optimizer.device=nvme"], "nvme_path"),
        ({}, [f"{AT}.stage=2", f"{AT}.zero_hpz_partition_size=2"], "stage 2 does not shard"),
        ({"compile": True}, [], "compile is not passed on: use train.engine=torch with train.compile"),
        ({"sparse_gradients": True}, [], "sparse_gradients is not passed on"),
        ({"sequence_parallel_size": 2}, [], "sequence_parallel_size is not passed on"),
        ({}, [f"{AT}.zenflow=true"], "zero_optimization.zenflow is not passed on"),
        ({}, [f"{AT}.ignore_unused_parameters=false"], "ignore_unused_parameters is not passed on"),
        ({"bfloat16": {"enabled": True}}, ["model.dtype=float32"], "bfloat16.enabled=true"),
        ({"zero_optimization": 3}, [], "zero_optimization=3: expected a table of keys"),
        ({"bf16": True}, [], "bf16=true: expected a table of keys"),
        ({}, [f"{AT}.offload_optimizer=cpu"], "offload_optimizer=\"cpu\": expected a table of keys"),
        ({}, [f"{AT}.stage=true"], "true: expected 1, 2 or 3"),
        ("no/such.json", [], "no/such.json: cannot be read"),
        ({}, ["train.parallel.dp_shard=1"], "dp_shard is 1"),
        ({}, ["train.parallel.tp=2"], "DeepSpeed shards over dp_shard alone"),
        ({}, ["train.optimizer.name=muon"], "needs whole matrices"),
        ({}, ["checkpoint.sharded=true"], "one rank writes whole tensors"),
        ({}, ["train.offload=[optimizer]"], "offload_optimizer and offload_param of train.engine_arguments"),
        ({}, ["model.dtype=float16"], "the scale of the loss"),
        ({}, ["train.engine=torch", f"{AT}.stage=2"], "train.engine is torch"),
    ],
)  # fmt: skip
def test_what_contradicts_the_run_is_refused_by_name(config: Any, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plans(given(config, *overrides))


def other(value: Any) -> Any:
    """Of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value}x"
    return [0.5, 0.5] if isinstance(value, list) else value + 1


def nested(key: str, value: Any) -> Json:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


KEYS = deepspeed.run_values(given({}, "train.micro_batch_rollouts=4").stages[0])


@pytest.mark.parametrize("key", KEYS)
def test_each_key_that_whet_sets_may_say_the_same_and_nothing_else(key: str) -> None:
    value, of = KEYS[key]
    for same in (value, "auto"):
        plans(given(nested(key, same), "train.micro_batch_rollouts=4"))
    with pytest.raises(
        ConfigError, match=rf"{re.escape(key)}=.* contradicts the run, which has .*{re.escape(of)}"
    ):
        plans(given(nested(key, other(value)), "train.micro_batch_rollouts=4"))


def test_where_it_is_not_installed_the_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = dict(deepspeed.not_installed(given({}).stages[0]))
    assert "pip install 'whet[deepspeed]'" in told["train.engine"]
    assert told.items() <= dict(checks_run.not_installed(given({}).stages[0])).items()
