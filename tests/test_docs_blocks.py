"""Blocks of the pages: configs load, Python finds what it imports, and commands, options, keys and files exist."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main
import yaml

from whet import cli
from whet.config.keys import lookup
from whet.config.load import load
from whet.config.plan import plans
from whet.config.sections.base import Section
from whet.envs.arguments import section
from whet.types import ConfigError

ROOT = Path(__file__).parents[1]
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks/README.md"})
FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
BASE = {
    "model": {"path": "models/some"},
    "data": {"train": [{"path": "tasks.jsonl"}]},
    "rewards": {"right": "exact"},
    "train": {"steps": 10},
}
"""What a page leaves out of a config of which it shows a part."""


COMMANDS: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCED.finditer(text):
        language = found[1].partition(" ")[0]
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page.relative_to(ROOT).as_posix(), line, language, found[2])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def written_in(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def test_every_block_says_its_language() -> None:
    assert {block.language for block in BLOCKS} == {"sh", "python", "yaml", "json", "text"}


# ---------------------------------------------------------------- configs


def merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: merged(below.get(key), value) for key, value in above.items()}


def env_arguments(make: str, arguments: dict[str, Any]) -> None:
    """Those of an environment of whet, which a run reads only when it starts."""
    module, _, name = make.partition(":")
    if not module.startswith("whet.envs.") or module in ("whet.envs.several", "whet.envs.skyrl_gym"):
        return  # the config's own check reads those of the first; SkyRL's environments have what arguments they like
    home = importlib.import_module(module)
    kinds = [kind for kind in vars(home).values() if isinstance(kind, type) and issubclass(kind, Section)]
    own = [kind for kind in kinds if kind.__module__ == module and kind.__name__.endswith("Arguments")]
    section(getattr(getattr(home, name), "kind", own[0]), arguments)


@pytest.mark.parametrize("block", written_in("yaml"), ids=str)
def test_a_config_loads(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "not-a-real-key")
    monkeypatch.chdir(ROOT)
    config = yaml.safe_load(block.text)
    whole = "model" in config and config.keys() & {"data", "stages"}
    (tmp_path / "config.yaml").write_text(block.text if whole else yaml.safe_dump(merged(BASE, config)))
    loaded = load(tmp_path / "config.yaml")
    assert plans(loaded)
    for stage in loaded.stages:
        if stage.rollout.env:
            env_arguments(stage.rollout.env.make, stage.rollout.env.arguments)


def test_a_config_that_does_not_load_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block("page", 1, "yaml", "reference:\n  models: [{path: models/teacher, values: [code]}]\n")
    with pytest.raises(ConfigError, match="no reference is needed"):
        test_a_config_loads(block, tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="max_cals"):
        env_arguments("whet.envs.tool_env:tools", {"functions": ["a.py:f"], "max_cals": 8})


# ---------------------------------------------------------------- Python


@pytest.mark.parametrize(
    "block", [block for block in written_in("python") if block.page != "docs/python.md"], ids=str
)
def test_python_compiles_and_what_it_imports_is_there(block: Block) -> None:
    """docs/python.md has signatures, and is made from the code."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            assert [each.name for each in node.names if not hasattr(module, each.name)] == []
        elif isinstance(node, ast.Import):
            for each in node.names:
                importlib.import_module(each.name)


# ---------------------------------------------------------------- commands


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of every command on the page: a line of a shell block, or what stands between backticks."""
    text = page.read_text(encoding="utf-8")
    lines = [
        line
        for block in blocks_of(page)
        if block.language == "sh"
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
    quoted = re.findall(r"`([^`]+)`", FENCED.sub("", text))
    for line in [*lines, *(" ".join(part.split()) for part in quoted)]:
        words = re.sub(r"^(\w+=\S+ )+", "", line.strip()).partition(" #")[0].partition(" | ")[0].split()
        if len(words) > 1:
            yield words


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=lambda p: p.name)
def test_commands_on_a_page_name_commands_options_keys_and_files_that_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for words in commands_of(page):
        if words[0] == "make" and re.fullmatch(r"[a-z-]+", words[1]):
            assert words[1] in targets, words
        elif words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), words
        elif words[0] == "whet" and re.match(r"[a-z]", words[1]):
            check_command(words)


def check_command(words: list[str]) -> None:
    command = COMMANDS[words[1]]
    rest = words[2:]
    if inner := getattr(command, "commands", None):
        command, rest = inner[rest[0]], rest[1:]
    native = (
        bool(rest) and (ROOT / rest[0]).is_file() and "/from_" not in rest[0]
    )  # a foreign file has other keys
    options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    for word in rest:
        word = word.strip("[]'\"")
        if word.startswith("-"):
            assert word.partition("=")[0] in options, words
        elif re.match(r"(benchmarks|docs|examples|tests)/", word):
            assert (ROOT / word.partition(":")[0]).exists(), words
        elif "=" in word and native:
            path = tuple(word.partition("=")[0].split("."))
            assert lookup(path[2:] if path[0] == "stages" else path) is not None, words


@pytest.mark.parametrize(
    "line",
    [
        "whet trian a.yaml",
        "whet show RUN --stp 3",
        "whet train examples/gone.yaml",
        "whet plan examples/gsm8k.yaml train.setps=1",
    ],
)
def test_a_command_that_is_not_there_is_found(line: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        check_command(line.split())
