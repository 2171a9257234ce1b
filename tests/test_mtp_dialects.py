"""Layers of multi-token prediction in files of verl, SkyRL and Trinity-RFT."""

from __future__ import annotations

from pathlib import Path

import pytest

from whet.config import hardware
from whet.config.load import Loaded, load
from whet.dialects import here
from whet.dialects.megatron import drafting, drafting_of_vllm
from whet.types import ConfigError, Json

HERE = Path(__file__).parent / "dialects"
FILES = {name: HERE / f"{name}_mtp.yaml" for name in ("verl", "skyrl", "trinity")}
AT = "actor_rollout_ref.model.mtp"
TRINITY = f"trainer.trainer_config.{AT}"


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VERL_TEST", "MODEL", "MODEL_PATH", "WORK"):
        monkeypatch.setenv(name, "/given")
    monkeypatch.setenv("REWARD", "/given/reward.py:score")
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.setattr(hardware, "cuda_count", lambda: 8)
    monkeypatch.setattr(here, "is_installed", lambda name: True)


def read(name: str, *overrides: str) -> Loaded:
    return load(FILES[name], overrides)


def learned(name: str, *overrides: str) -> Json:
    return read(name, *overrides).config.model.mtp


def lines(run: Loaded) -> str:
    assert run.translation is not None
    return str(run.translation.lines)


def test_what_they_learn() -> None:
    assert learned("verl") == {"name": "cross_entropy", "coef": 0.2, "detach": "model"}
    assert learned("verl", f"{AT}.detach_encoder=false") == {
        "name": "cross_entropy",
        "coef": 0.2,
        "detach": "nothing",
    }
    assert learned("skyrl") == {"name": "distill", "coef": 0.2, "top_k": 256}
    assert learned("skyrl", "trainer.policy.megatron_config={mtp_num_layers: 2}") == {
        "name": "distill",
        "coef": 0.2,
        "layers": 2,
        "top_k": 256,
    }
    assert learned("trinity") == {"name": "cross_entropy", "coef": 0.3, "detach": "nothing"}


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("verl", f"{AT}.enable=false"),
        ("verl", f"{AT}.enable_train=false"),
        ("verl", f"{AT}.mtp_loss_scaling_factor=0"),
        ("skyrl", "trainer.mtp.enabled=false"),
        ("skyrl", "trainer.mtp.loss_weight=0"),
        ("trinity", f"{TRINITY}.enable=false"),
        ("trinity", f"{TRINITY}.enable_train=false"),
    ],
)
def test_layers_that_do_not_learn_are_not_in_the_model(name: str, override: str) -> None:
    assert learned(name, override) is None


def test_only_megatron_trains_them() -> None:
    strategy = "actor_rollout_ref.actor.strategy=fsdp"
    run = read("verl", strategy, "~actor_rollout_ref.actor.megatron")
    assert run.config.model.mtp is None
    assert learned("skyrl", "trainer.strategy=fsdp2", "~trainer.policy.megatron_config") is None


def test_all_devices_are_data_parallel_ranks() -> None:
    for name, count in (("verl", 8), ("skyrl", 2), ("trinity", 6)):
        sizes = read(name).config.train.parallel
        assert (sizes.dp_shard, sizes.dp_replicate, sizes.tp, sizes.cp, sizes.pp) == (count, 1, 1, 1, 1)
    sizes = read("verl", f"{AT}.enable_train=false").config.train.parallel
    assert (sizes.tp, sizes.cp, sizes.pp) == (2, 2, 2)


def test_a_server_drafts_with_them() -> None:
    options = read("verl", "whet.rollout.engine=sglang").config.rollout.server.options
    assert {name: value for name, value in options.items() if "speculative" in name} == {
        "speculative-algorithm": "EAGLE",
        "speculative-num-steps": 2,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": 4,
    }
    vllm = ("whet.rollout.engine=vllm", "actor_rollout_ref.rollout.name=vllm")
    options = read("verl", *vllm).config.rollout.server.options
    assert options["speculative-config"] == {"method": "mtp", "num_speculative_tokens": 1}
    assert (
        "speculative-config"
        not in read("verl", *vllm, f"{AT}.enable_rollout=false").config.rollout.server.options
    )
    options = read("skyrl", "whet.rollout.engine=vllm").config.rollout.server.options
    assert options["speculative-config"] == {"method": "mtp", "num_speculative_tokens": 2}
    own = "generator.inference_engine.speculative_config={method: ngram}"
    assert (
        "speculative-config"
        not in read("skyrl", "whet.rollout.engine=vllm", own).config.rollout.server.options
    )


def test_a_file_s_own_options_of_drafting_count() -> None:
    assert drafting_of_vllm("mtp", 1, {"num_speculative_tokens": 3, "method": None}) == {
        "speculative-config": {"method": "mtp", "num_speculative_tokens": 3}
    }
    assert drafting({"m.enable": False, "m.enable_rollout": True}, "m", "vllm") == {}


def test_the_embedded_engine_does_not_speculate_and_says_so() -> None:
    run = read("verl")
    assert run.config.rollout.server.options == {}
    assert f"{AT}.enable_rollout" in lines(run)


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("verl", [f"{AT}.mtp_loss_scaling_factor=-1"], "mtp_loss_scaling_factor=-1"),
        ("verl", ["critic.model.mtp.enable=true"], "layers of multi-token prediction of a critic"),
        ("verl", [f"{AT}.num_layers=2"], "unknown key"),
        (
            "verl",
            ["actor_rollout_ref.actor.strategy=mlite", "actor_rollout_ref.actor.megatron={}"],
            "enable_train=True with strategy=mlite is coming",
        ),
        (
            "skyrl",
            ["trainer.policy.megatron_config.mtp_num_layers=0"],
            "mtp_num_layers=0, which switches the layers off",
        ),
        (
            "skyrl",
            ["trainer.policy.megatron_config={context_parallel_size: 2}"],
            "context_parallel_size=2: trainer.mtp.enabled=true does not support it",
        ),
        (
            "skyrl",
            ["trainer.policy.megatron_config={pipeline_model_parallel_size: 2}"],
            "pipeline_model_parallel_size=2: trainer.mtp.enabled=true does not support it",
        ),
    ],
)
def test_refusals(name: str, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as e:
        read(name, *overrides)
    assert said in str(e.value)


@pytest.mark.parametrize(("name", "said"), [("verl", "Megatron-LM takes"), ("skyrl", "SkyRL takes")])
def test_what_differs_is_told(name: str, said: str) -> None:
    told = str(read(name).translation)
    assert f"{said} the mean of each micro-batch" in told
