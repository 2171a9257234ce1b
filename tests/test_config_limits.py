"""No text of a config crashes, hangs or fills the memory: each ends in a ConfigError that names file and line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from whet.config.load import load
from whet.types import ConfigError

LAUGHS = "\n".join(
    [f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 9)}]" if n else "k0: &k0 [lol]" for n in range(12)]
)
CHAIN = (
    "run_dir: ${rewards.k0}\nrewards:\n"
    + "\n".join(f"  k{n}: '{f'${{rewards.k{n + 1}}}' * 3}'" for n in range(12))
    + "\n  k12: x"
)
MERGES = "a0: &a0 {b: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{','.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 20)
)
"""No mapping has more than one key, but reading them all takes 9^19 steps."""
RELATIVE = "rewards:\n" + "\n".join(f"  k{n}: '{f'${{.k{n + 1}}}' * 3}'" for n in range(12)) + "\n  k12: x"

TEXTS: dict[str, tuple[str | bytes, str]] = {
    "brackets": ("seed: 1\na: " + "[" * 100_000, r"c.yaml:2: lists and mappings nest more than 50 levels deep"),
    "braces": ("{a: " * 100_000, r"c.yaml:1: lists and mappings nest"),
    "dashes": ("- " * 100_000, r"c.yaml:1: lists and mappings nest"),
    "indents": ("\n".join(" " * n + "a:" for n in range(500)), r"c.yaml:\d+: lists and mappings nest"),
    "an alias bomb": (LAUGHS, r"c.yaml:\d+: more than 100000 values"),
    "a long list": ("a: [" + "1, " * 300_000 + "]", r"c.yaml:1: more than 100000 values"),
    "an alias to itself": ("a: &a [*a]", r"c.yaml:1: a\[0\]: contains itself"),
    "merges that multiply": (MERGES, r"c.yaml:\d+: more than 100000 values"),
    "a key given twice": ("seed: 1\nseed: 2", r"c.yaml:2: seed: given twice, in lines 1 and 2"),
    "a whole number of many digits": ("train:\n  steps: " + "9" * 5000, r"c.yaml:2: train.steps: 9+\.\.\. is a whole"),
    "a whole number beyond 64 bits": ("seed: 99999999999999999999", r"c.yaml:1: seed: .*beyond 64 bits"),
    "a hexadecimal number of many digits": ("seed: 0x" + "f" * 9999, r"c.yaml:1: seed: .*beyond 64 bits"),
    "a float beyond 64 bits": ("seed: 1e999999", r"c.yaml:1: seed: 1e999999 is beyond 64-bit floating point"),
    "a quoted number of many digits": (f"seed: '{'9' * 5000}'", r'c.yaml:1: seed: got "9+\.\.\., expected'),
    "NUL": ("seed: 1\na: \0", r"c.yaml:2: .*U\+0000 is not allowed"),
    "half of a surrogate pair": ('a: "\\ud800"', r"c.yaml:1: not valid YAML"),
    "UTF-16": ("seed: 1".encode("utf-16"), r"c.yaml:1: not UTF-8 text"),
    "Latin-1": ("seed: 1\nrun_dir: f\u00fcr".encode("latin-1"), r"c.yaml:2: not UTF-8 text"),
    "binary garbage": (bytes(range(128)) * 10, r"c.yaml:1: not valid YAML"),
    "nothing but a text": ("hello", r"c.yaml:1: a config is a mapping of keys"),
    "two documents": ("a: 1\n---\nb: 2", r"c.yaml:2: not valid YAML: but found another document"),
    "a large file": (b"#" * (5 * 2**20), r"c.yaml has more than 4 MiB"),
    "references to references": (CHAIN, r"c.yaml:1: run_dir: .*refers to nested references"),
    "relative references": (RELATIVE, r"c.yaml:2: rewards.k0: .*refers to nested references"),
    "nested references": (
        "run_dir: " + "${oc.env:X," * 300 + "a" + "}" * 300,
        r"c.yaml:1: run_dir: .*nested too deeply",
    ),
    "many references": ("".join(f"k{n}: ${{seed}}\n" for n in range(3000)), "the first of 3001 references"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_what_yaml_cannot_mean_is_refused_at_its_line(name: str, tmp_path: Path) -> None:
    text, says = TEXTS[name]
    file = tmp_path / "c.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=says) as caught:
        load(file)
    # Each problem names the file: how deep a machine's temporary folder lies does not count.
    assert len(str(caught.value).replace(str(file), file.name)) < 25_000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a = " + "[" * 5000, r"c.toml:\d+: (lists and mappings nest|not valid TOML)"),
        ("a = " + "[" * 200 + "]" * 200, r"c.toml:1: a.*: lists and mappings nest more than 50 levels deep"),
        ("seed = 1\n[train]\nsteps = " + "9" * 50, r"c.toml:3: train.steps: a whole number beyond 64 bits"),
        ("seed = " + "9" * 5000, r"c.toml:1: not valid TOML"),
        ("seed = 1e9999", r"c.toml:1: not valid TOML: 1e9999 is beyond 64-bit floating point"),
        ("seed = \0", r"c.toml:1: not valid TOML"),
    ],
)
def test_what_toml_cannot_mean_is_refused_at_its_line(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load(file)


def test_a_config_is_a_regular_file(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.yaml"
    os.mkfifo(fifo)
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    (tmp_path / "folder.yaml").mkdir()
    for name, says in (
        ("fifo.yaml", r"is a FIFO"),
        ("zero.yaml", "is a device"),
        ("folder.yaml", "is a folder"),
        ("none.yaml", "cannot be read: No such file"),
    ):
        with pytest.raises(ConfigError, match=rf"{name}:? {says}"):
            load(tmp_path / name)


@pytest.mark.parametrize(("name", "text"), [("c.yaml", b"seeed: 1"), ("c.toml", b"seeed = 1")])
def test_a_byte_order_mark_is_no_part_of_the_first_key(name: str, text: bytes, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(b"\xef\xbb\xbf" + text)
    with pytest.raises(ConfigError, match=rf"{name}:1: seeed: unknown key; did you mean seed"):
        load(file)


def test_an_override_is_read_within_the_same_limits() -> None:
    for value, says in (
        ("[" * 100_000, "nest more than 50 levels"),
        ("9" * 5000, "beyond 64 bits"),
        ("\udcff", "half of a surrogate pair"),
    ):
        with pytest.raises(ConfigError, match=says):
            load(None, [f"run_dir={value}"])


@pytest.mark.parametrize("dialect", ["native", "verl"])
@pytest.mark.parametrize("override", ["seed={}", "trainer.n_gpus_per_node={}", "{}=1", "{}", "+{}=1"])
@pytest.mark.parametrize("long", ["9" * 5000, "[" * 100_000, "x" * 100_000])
def test_what_is_said_of_a_long_override_is_short(long: str, override: str, dialect: str) -> None:
    with pytest.raises(ConfigError) as told:
        load(None, [override.format(long)], dialect=dialect)
    assert len(str(told.value)) < 1500


@pytest.mark.parametrize("dialect", ["native", "verl"])
@pytest.mark.parametrize("key", ["x." * 50_000, "data.train" + "[0]" * 50_000])
def test_a_key_of_many_parts_is_refused_before_it_is_looked_up(key: str, dialect: str) -> None:
    """Which took minutes."""
    with pytest.raises(ConfigError, match="a key has more than 50 parts"):
        load(None, [f"{key}=1"], dialect=dialect)


def test_a_long_override_is_shortened_without_a_part_of_a_secret() -> None:
    secret = "sk-of-a-long-override-0001"
    with pytest.raises(ConfigError, match=r"override seed=x+<redacted:.*\.\.\.") as told:
        load(None, [f"reward_workers.env={{JUDGE_KEY: {secret}}}", f"seed={'x' * 170}{secret}{'x' * 200}"])
    assert "sk-of" not in str(told.value)
    with pytest.raises(ConfigError, match=r"override seed=\{api_key: <redacted:[^>]*>\}: "):
        load(None, [f"seed={{api_key: {secret * 9}}}"])


@pytest.mark.parametrize("value", ["9" * 5000, "!!python/name:os.system", "!own 3"])
def test_a_value_that_cannot_be_read_is_told_once(value: str, tmp_path: Path) -> None:
    """Not that of what stands in its place, too."""
    file = tmp_path / "c.yaml"
    file.write_text(f"seed: {value}\n")
    with pytest.raises(ConfigError, match="1 problem in "):
        load(file)


def test_values_from_python_are_read_within_the_same_limits() -> None:
    endless: list[object] = []
    endless.append(endless)
    for value, says in (
        (10**5000, "beyond 64 bits"),
        (endless, "nest more than 50 levels"),
        ("\ud800", "surrogate"),
    ):
        with pytest.raises(ConfigError, match=says):
            load(None, [], {"seed": value})


@pytest.mark.parametrize(
    "key", ["model.path", "tokenizer.path", "tokenizer.chat_template", "run_dir", "checkpoint.resume"]
)
def test_a_path_that_no_system_call_takes_is_refused_by_its_key(key: str) -> None:
    for wrong, why in (("b" * 300, "File name too long"), ('"x\\0y"', "embedded null byte")):
        with pytest.raises(ConfigError, match=rf"{key}: .* cannot be accessed: {why}; give another path"):
            load(None, [f"{key}={wrong}"])


@pytest.mark.parametrize(
    "override",
    ["run_dir={}", "checkpoint.resume={}", "model.path={}", "tokenizer.path={}", "data.train=[{path: {}}]",
     "data.eval=[{path: [a.jsonl, {}]}]"],
)  # fmt: skip
def test_an_empty_path_is_not_the_working_directory(override: str) -> None:
    """As an unset variable of a shell gives it."""
    with pytest.raises(ConfigError, match=r"(path|path\[1\]|run_dir|resume): the path is empty; give one"):
        load(None, [override.replace("{}", '""')])


def test_an_empty_argument_of_other_code_is_no_path() -> None:
    loaded = load(None, ['data.train=[{function: "rows.py:rows", arguments: {path: ""}}]'])
    assert loaded.config.data.train[0].arguments == {"path": ""}


def test_a_path_in_a_list_is_refused_by_its_place() -> None:
    with pytest.raises(ConfigError, match=r"data.train\[0\].path\[1\]: .* File name too long"):
        load(None, ["data.train=[{path: [a.jsonl, " + "b" * 300 + "]}]"])
