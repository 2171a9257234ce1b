"""The peers' own default files: whet knows every key of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from whet.dialects.match import read
from whet.dialects.tables import dialect
from whet.dialects.versions import version_named
from whet.prove import cosmos, skyrl, trinity
from whet.prove.peers import theirs
from whet.types import Json


def _verl() -> Iterator[tuple[str, str, Json]]:
    """All files that verl generates, and what its SFT trainer composes."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    folder = Path(theirs("verl", "verl.trainer:__file__")).parent / "config"
    for file in sorted(folder.glob("_generated_*.yaml")):
        yield file.name, "verl-ppo", OmegaConf.to_container(OmegaConf.load(file))
    with initialize_config_dir(str(folder), version_base=None):
        for name, kind in (("sft_trainer_engine", "verl-sft"), ("evaluation", "verl-eval")):
            yield name, kind, OmegaConf.to_container(compose(name))
    for name in ("fully_async_policy/config/fully_async", "one_step_off_policy/config/one_step_off"):
        file = folder.parents[1] / "experimental" / f"{name}_ppo_trainer.yaml"
        tree = OmegaConf.to_container(OmegaConf.load(file))
        yield file.name, "verl-ppo", {key: tree[key] for key in tree.keys() - {"hydra", "defaults"}}


def _skyrl() -> Iterator[tuple[str, str, Json]]:
    yield "SkyRLTrainConfig", "skyrl", skyrl.known()
    yield "SFTConfig", "skyrl-sft", dataclasses.asdict(theirs("skyrl", "skyrl.train.config:SFTConfig")())


def _trinity() -> Iterator[tuple[str, str, Json]]:
    yield "Config", "trinity", trinity.known()


def _cosmos() -> Iterator[tuple[str, str, Json]]:
    tree: Any = cosmos.known()
    yield "Config for GRPO", "cosmos-grpo", tree
    policy = theirs("cosmos", "cosmos_rl.policy.config:SFTDataConfig")(type="sft").model_dump(mode="json")
    yield "Config for SFT", "cosmos-sft", tree | {"train": tree["train"] | {"train_policy": policy}}


FILES = {"verl": _verl, "skyrl": _skyrl, "trinity": _trinity, "cosmos": _cosmos}
"""Peer -> (name, kind of file, keys)."""


def unknown(peer: str, read_as: str) -> list[str]:
    """`file: key` of every key that the release does not have in whet's tables."""
    out = []
    for name, kind, tree in FILES[peer]():
        assert isinstance(tree, Mapping)
        of = dialect(kind, version_named(peer, read_as.partition("@")[2]))
        out += [
            f"{name}: {'.'.join(map(str, one.path))}"
            for one in read(dict(tree), of)
            if one.row is None and not one.is_section
        ]
    return out
