"""Unquoted scalars: foreign files as OmegaConf reads them, overrides as Hydra does."""

from __future__ import annotations

import math

import pytest
from omegaconf import OmegaConf
from omegaconf.grammar_parser import parse as parse_by_grammar
from omegaconf.grammar_visitor import GrammarVisitor

from whet.config.load import load
from whet.config.parse import parse
from whet.config.scalars import foreign_scalar, hydra_scalar
from whet.dialects.kinds import same
from whet.dialects.style import overridden
from whet.types import ConfigError

ODD = [
    "010", "-010", "+010", "08", "00", "0010", "0", "-0", "07_7", "0o10", "0o8", "0x1F", "0X1F", "+0x1F",
    "-0x1F", "0x_1F", "0b11", "1_000", "1__0", "1_", "_1", "0_8", "1_0.5", "1_000.5", "1._5", "._5", "1:30",
    "1:30.5", "-1:30", "190:20:30", "yes", "no", "on", "off", "Yes", "NO", "y", "n", "true", "True", "TRUE",
    "tRue", "null", "Null", "NULL", "nuLL", "~", "1e5", "1E5", "1e-5", "1e+5", "1.e5", "1.0e5", "1.0e+5",
    ".5", "-.5", "+.5", "5.", "+1", "+1.5", ".5e3", ".5e+3", "0.5e3", "010.5", "1e0_5", "12e03",
    "685_230.15", "1.5.2", "1e", "0x", "0b", ".inf", "-.inf", "+.inf", ".nan", "inf", "-inf", "nan", "NaN",
    "Infinity", "2024-01-01", "2024-01-01T10:00:00", "e5", ".",
]  # fmt: skip


@pytest.mark.parametrize("text", ODD)
def test_a_foreign_file_is_read_as_omegaconf_reads_it(text):
    theirs = OmegaConf.to_container(OmegaConf.create(f"a: {text}"))["a"]
    (ours,) = parse(f"a: {text}", foreign=True).tree.values()
    assert type(ours) is type(theirs)
    assert same(ours, theirs) or (math.isnan(ours) and math.isnan(theirs))


@pytest.mark.parametrize("text", ["99999999999999999999", "9" * 5000, "1e400", "0b" + "1" * 65])
def test_numbers_that_64_bits_do_not_hold_are_refused(text):
    for read in (foreign_scalar, hydra_scalar):
        with pytest.raises(ValueError, match=r"beyond 64|to YAML 1\.1|is text to"):
            read(text)


@pytest.mark.parametrize("text", [text for text in ODD if text not in (".", "~")])
def test_an_override_is_read_as_hydra_reads_it_or_refused(text):
    """OmegaConf's grammar of a value is Hydra's. What it reads as text, and YAML 1.1 as a number or a boolean, is
    refused: the one who wrote it may have meant either."""
    theirs = GrammarVisitor(lambda *_: None, lambda *_, **__: None, set()).visit(
        parse_by_grammar(text, "singleElement", lexer_mode="VALUE_MODE")
    )
    by_yaml = foreign_scalar(text)
    out = overridden({}, {}, [f"a={text}", f"b=[{text}]"])
    if isinstance(theirs, str) and not isinstance(by_yaml, str):
        assert [f"{text} is text to Hydra, and" in said for _, said in out.problems] == [True, True]
        assert out.tree == {}
    else:
        assert type(out.tree["a"]) is type(theirs)
        assert same(out.tree, {"a": theirs, "b": [theirs]}) or math.isnan(theirs)


def test_values_of_a_verl_file_reach_a_function_as_verl_gives_them(tmp_path):
    file = tmp_path / "verl.yaml"
    file.write_text(
        "custom_reward_function: {path: mine.py, name: f, reward_kwargs: {strict: no, least: 1_000, code: 010}}\n"
        "algorithm: {adv_estimator: grpo}\n"
        "data: {train_files: a.parquet, val_files: b.parquet}\n"
        "actor_rollout_ref:\n"
        "  model: {path: m}\n"
        "  actor: {ppo_micro_batch_size_per_gpu: 010}\n"
        "  rollout: {log_prob_micro_batch_size_per_gpu: 8}\n"
        "whet: {run_dir: on}\n"
    )
    (tmp_path / "mine.py").write_text(
        "def f(data_source, solution_str, ground_truth, extra_info, **k): return 0.0\n"
    )
    loaded = load(file, dialect="verl", rehearsal=True)
    (reward,) = loaded.config.rewards.values()
    assert {name: reward.arguments[name] for name in ("strict", "least", "code")} == {
        "strict": False,
        "least": 1000,
        "code": 8,
    }
    assert loaded.translation.foreign["actor_rollout_ref"]["actor"]["ppo_micro_batch_size_per_gpu"] == 8
    assert loaded.config.run_dir == "on"  # the section of native keys is YAML 1.2, as native files are
    with pytest.raises(ConfigError, match="010 is text to Hydra, and 8 to YAML"):
        load(file, ["data.train_batch_size=010"], dialect="verl", rehearsal=True)
