"""What every config file of the examples and of the dialects' tests resolves to, defaults filled in, as it was kept.

A rebuilding that changes no meaning changes none of these files. `python tests/test_golden.py` writes them anew: read
the difference, and say in the commit why it is meant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import whet
from tiny import RUN
from whet.config import hardware, load
from whet.config.functions import ADVANTAGES, LOSSES
from whet.config.recipes import RECIPES
from whet.config.schema import Config
from whet.dialects import idle
from whet.types import ConfigError

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).parent / "golden" / "translations"
FILES = [
    path.relative_to(ROOT)
    for folder in ("examples", "examples/*", "tests/dialects", "tests/resume")
    for path in sorted(ROOT.glob(f"{folder}/*"))
    if path.suffix in (".yaml", ".toml")
]
ENVIRONMENT = {
    "HOME": "/home/user",
    **dict.fromkeys(("MODEL", "MODEL_PATH", "VERL_TEST", "WORK"), "/given"),
    **{
        f"TRINITY_{name}": "/given"
        for name in ("CHECKPOINT_ROOT_DIR", "DATASET_PATH", "SFT_DATASET_PATH", "TASKSET_PATH")
    },
    "REWARD": "/given/reward.py:score",
}
DATASET = "train.train_policy.dataset.name"


def resolved(path: Path) -> str:
    """The leaves of each stage's config that are not the schema's default; of a file that is refused, what is said."""
    given = (f"{DATASET}=here/rows.jsonl",) if path.name in ("cosmos_letters.toml", "cosmos_sft.toml") else ()
    try:
        loaded = load.load(path, given, rehearsal=True)
    except ConfigError as e:
        return yaml.safe_dump({"refused": str(e).splitlines()}, width=110)
    stages = dict(zip(loaded.names, (config.model_dump(mode="json") for config in loaded.stages)))
    defaults = Config().model_dump(mode="json")
    told = {name: changed(tree, defaults) for name, tree in stages.items()}
    return yaml.safe_dump(told, sort_keys=True, allow_unicode=True, width=110)


def changed(value: Any, default: Any) -> Any:
    """The leaves that are not the default's, in their sections."""
    if not isinstance(value, dict) or not isinstance(default, dict):
        return value
    return {key: changed(each, default.get(key)) for key, each in value.items() if each != default.get(key)}


def as_on_any_machine(patch: pytest.MonkeyPatch) -> None:
    """No GPU, no tracker of others, and an environment that is nobody's."""
    patch.chdir(ROOT)
    patch.setattr(hardware, "cuda_count", lambda: 0)
    patch.setattr(idle, "is_installed", lambda name: False)
    for name, value in ENVIRONMENT.items():
        patch.setenv(name, value)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_resolves_to_what_was_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_any_machine(monkeypatch)
    assert resolved(path) == (KEPT / f"{path.name}.yaml").read_text(encoding="utf-8")


def test_the_defaults_are_what_was_kept() -> None:
    assert defaults() == (KEPT / "defaults.yaml").read_text(encoding="utf-8")
    assert settings() == (KEPT / "settings.yaml").read_text(encoding="utf-8")


def test_nothing_is_kept_of_what_is_gone() -> None:
    assert {path.name for path in KEPT.iterdir()} == {
        "defaults.yaml",
        "settings.yaml",
        *(f"{path.name}.yaml" for path in FILES),
    }


def test_the_comparison_of_two_commits_finds_each_kind_of_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `make golden` compares are numbers, rows and tensors; a run with another seed has others of each."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "golden"))
    import compare  # type: ignore[import-not-found]

    found = []
    for seed in (1, 1, 2):
        out = tmp_path / str(len(found))
        whet.train(**(RUN | {"seed": seed, "run_dir": str(out), "checkpoint": {"export": True}}))
        found.append(dict(compare.decoded(out)))
    base, again, other = found
    assert compare.differences(base, again) == []
    kinds = {text.partition(": ")[2].partition(" ")[0] for text in compare.differences(base, other)}
    assert kinds == {"metric", "column", "tensor"}
    lost = dict(list(base.items())[1:])
    assert [text.partition(":")[0] for text in compare.differences(base, lost)] == ["gone"]
    assert [text.partition(":")[0] for text in compare.differences(lost, base)] == ["new"]


def defaults() -> str:
    """Every native key with its default."""
    return yaml.safe_dump(Config().model_dump(mode="json"), sort_keys=True, width=110)


def settings() -> str:
    """Every setting of every advantage and loss with its default, and what each recipe has in place of it."""
    tables = {"advantage": ADVANTAGES, "loss": LOSSES}
    told: Any = {
        part: {name: row.settings().model_dump() for name, row in table.items()}
        for part, table in tables.items()
    }
    recipes = {name: dict(row.settings) for name, row in RECIPES.items() if row.settings}
    return yaml.safe_dump({**told, "recipes": recipes}, sort_keys=True, width=110)


def keep() -> None:
    """Write all of them anew."""
    with pytest.MonkeyPatch.context() as patch:
        as_on_any_machine(patch)
        (KEPT / "defaults.yaml").write_text(defaults(), encoding="utf-8")
        (KEPT / "settings.yaml").write_text(settings(), encoding="utf-8")
        for path in FILES:
            (KEPT / f"{path.name}.yaml").write_text(resolved(path), encoding="utf-8")


if __name__ == "__main__":
    keep()
