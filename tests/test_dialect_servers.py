"""How files of other systems spread their engines, as options of a server that stands for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from whet.config import hardware
from whet.config.load import Loaded, load
from whet.dialects.served import fit, placed

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"

FILES: dict[str, tuple[Path, dict[str, Any], dict[str, Any], bool]] = {
    "verl": (
        EXAMPLES / "from_verl.yaml",
        {
            "trainer.n_gpus_per_node": 4,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 32,
            "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
            "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
        },
        {"tensor-parallel-size": 2, "data-parallel-size": 2, "gpu-memory-utilization": 0.6},
        True,
    ),
    "skyrl": (
        EXAMPLES / "from_skyrl.yaml",
        {
            "trainer.placement.policy_num_gpus_per_node": 4,
            "trainer.placement.ref_num_gpus_per_node": 4,
            "trainer.micro_train_batch_size_per_gpu": 32,
            "trainer.micro_forward_batch_size_per_gpu": 32,
            "generator.num_inference_engines": 2,
            "generator.inference_engine_tensor_parallel_size": 2,
        },
        {"tensor-parallel-size": 2, "data-parallel-size": 2, "gpu-memory-utilization": 0.8},
        True,
    ),
    "trinity": (
        EXAMPLES / "from_trinity.yaml",
        {
            "cluster.node_num": 1,
            "cluster.gpu_per_node": 8,
            "explorer.rollout_model.engine_num": 2,
            "explorer.rollout_model.tensor_parallel_size": 2,
        },
        {"tensor-parallel-size": 2, "data-parallel-size": 2, "gpu-memory-utilization": 0.9},
        False,
    ),
    "cosmos": (
        EXAMPLES / "from_cosmos.toml",
        {
            "mode": "colocated",
            "rollout.parallelism.tp_size": 2,
            "rollout.parallelism.pp_size": 2,
            "rollout.parallelism.n_init_replicas": 2,
        },
        {
            "tensor-parallel-size": 2,
            "pipeline-parallel-size": 2,
            "data-parallel-size": 2,
            "gpu-memory-utilization": 0.8,
        },
        True,
    ),
}
"""By system: a file, overrides, options of the server on 8 GPUs, and whether it sleeps while the trainer computes."""
systems = pytest.mark.parametrize("system", FILES)


def loaded(system: str, engine: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    monkeypatch.setattr(hardware, "cuda_count", lambda: gpus)
    file, given, *_ = FILES[system]
    overrides = [f"{key}={value}" for key, value in given.items()]
    return load(file, (*overrides, f"whet.rollout.engine={engine}"))


@systems
def test_a_server_has_the_devices_of_the_file_s_engines(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, options, sleeps = FILES[system]
    server = loaded(system, "vllm", 8, monkeypatch).config.rollout.server
    assert (server.options, server.sleep) == (options, sleeps)


@systems
def test_a_machine_without_gpus_leaves_them_out_and_so_does_the_embedded_engine(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine, gpus in (("vllm", 0), ("native", 8)):
        server = loaded(system, engine, gpus, monkeypatch).config.rollout.server
        assert (server.options, server.sleep) == ({}, False), engine


@systems
def test_fewer_gpus_than_asked_are_shared_out_and_told(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = loaded(system, "vllm", 2, monkeypatch)
    options = run.config.rollout.server.options
    assert options["tensor-parallel-size"] == 2
    assert "data-parallel-size" not in options
    assert run.translation is not None
    assert "data-parallel-size is 1, not 2: it needs GPUs, and this machine has 2" in str(
        run.translation.lines
    )


def test_options_are_spelled_as_the_server_spells_them_and_the_file_s_own_count() -> None:
    sizes: dict[str, Any] = {"tp": 2, "pp": 3, "dp": 4, "ep": 2, "memory": 0.5}
    assert placed("sglang", **sizes) == {
        "rollout.server.options": {
            "tp-size": 2,
            "pp-size": 3,
            "dp-size": 4,
            "ep-size": 2,
            "mem-fraction-static": 0.5,
        }
    }
    assert placed("vllm", ep=8, more={"tensor_parallel_size": 4}, tp=2, sleeps=True) == {
        "rollout.server.options": {"enable-expert-parallel": True, "tensor_parallel_size": 4},
        "rollout.server.sleep": True,
    }
    assert placed("vllm") == {}


@pytest.mark.parametrize(
    ("devices", "here"),
    [(8, {"tp": 4, "dp": 2}), (6, {"tp": 4}), (4, {"tp": 4}), (3, {"tp": 2}), (1, {}), (0, {})],
)
def test_sizes_that_fit(devices: int, here: dict[str, int]) -> None:
    options = {"tensor-parallel-size": 4, "data-parallel-size": 2, "enforce-eager": True}
    for name, value, _ in list(fit(options, devices)):
        if value is None:
            del options[name]
        else:
            options[name] = value
    names = {"tp": "tensor-parallel-size", "dp": "data-parallel-size"}
    assert options == {names[size]: value for size, value in here.items()} | {"enforce-eager": True}
