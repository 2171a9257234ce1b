"""A critic's value head, read from a checkpoint by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny import VOCAB, tiny_model
from whet.config.plan import plans
from whet.config.schema import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    DataConfig,
    ModelConfig,
    RewardConfig,
    SourceConfig,
    TokenizerConfig,
    TrainConfig,
)
from whet.models.load import build, export, value_head
from whet.types import CheckpointError, ConfigError

WEIGHT, BIAS = torch.arange(32.0)[None] / 32, torch.tensor([0.5])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A value model as others save it: no output layer, but a head called v."""
    export(tiny_model("qwen2"), None, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != "lm_head.weight"}
    save_file(tensors | {"v.weight": WEIGHT, "v.bias": BIAS}, file, metadata={"format": "pt"})
    return tmp_path / "m"


def backbone(folder: Path, head: str | None) -> None:
    build(
        ModelConfig(path=str(folder)),
        vocab_size=VOCAB,
        eos_token_id=1,
        pad_token_id=0,
        seed=0,
        device="cpu",
        dtype=torch.float32,
        head=head,
    )


def test_it_is_read_with_the_backbone(folder: Path) -> None:
    head = value_head(32, 0, path=str(folder), name="v")
    assert torch.equal(head.weight, WEIGHT)
    assert torch.equal(head.bias, BIAS)
    backbone(folder, "v")
    with pytest.raises(CheckpointError, match=r"unexpected: v\.bias, v\.weight"):
        backbone(folder, None)
    with pytest.raises(CheckpointError, match=r"unexpected: v\.bias, v\.weight"):
        backbone(folder, "score")


def test_weights_without_it_get_the_new_one(folder: Path) -> None:
    fresh, other = value_head(32, 0), value_head(32, 0, path=str(folder), name="score")
    assert torch.equal(fresh.weight, other.weight)
    assert not torch.equal(fresh.weight, value_head(32, 1).weight)


def test_a_head_of_another_shape_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"v\.weight is \[1, 32\], .* \[1, 16\]"):
        value_head(16, 0, path=str(folder), name="v")


def test_a_head_without_a_path_is_refused() -> None:
    config = Config(
        model=ModelConfig(scratch={}),
        tokenizer=TokenizerConfig(build="chars"),
        data=DataConfig(train=(SourceConfig(rows=({"prompt": "a"},)),)),
        rewards={"exact": RewardConfig(function="exact")},
        algorithm=AlgorithmConfig(name="ppo"),
        train=TrainConfig(steps=1),
        critic=CriticConfig(head="v"),
    )
    with pytest.raises(ConfigError, match=r"critic\.head: has no effect: critic\.path is null"):
        plans(config)
