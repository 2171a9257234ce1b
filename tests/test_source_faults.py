"""Errors of rows of a translated file name the keys of that file."""

from __future__ import annotations

from pathlib import Path

import pytest

from whet.bench import judge_file, replies_in
from whet.config.load import load
from whet.config.source_faults import in_words_of, of_source
from whet.data.recognise import with_columns
from whet.data.tasks import all_texts
from whet.rehearsal.probe import probe
from whet.types import ConfigError, DataError

VERL, SKYRL = "examples/from_verl.yaml", "examples/from_skyrl.yaml"


def read(file: str, *overrides: str) -> None:
    loaded, _ = with_columns(load(file, overrides))
    list(all_texts(loaded))


def said(file: str, *overrides: str) -> str:
    """The error of reading the rows of a file."""
    with pytest.raises((ConfigError, DataError)) as raised:
        read(file, *overrides)
    return str(raised.value)


@pytest.mark.parametrize(
    ("file", "override", "told"),
    [
        (VERL, "data.prompt_key=question", "In a verl-ppo file `prompt` is data.prompt_key."),
        (
            "examples/from_cosmos.toml",
            "train.train_policy.prompt_column_name=q",
            "is train.train_policy.prompt_column_name.",
        ),
        (
            "examples/from_trinity.yaml",
            "buffer.explorer_input.taskset.format.prompt_key=q",
            "`prompt` is buffer.explorer_input.taskset.format.prompt_key.",
        ),
    ],
)
def test_a_column_that_no_row_has_is_named_by_the_key_of_its_file(
    file: str, override: str, told: str
) -> None:
    found = said(file, override)
    assert f"no column {override.partition('=')[2]!r}" in found
    assert found.endswith(told)


def test_a_column_that_the_other_system_has_no_key_for_is_named_by_the_native_key(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"asked": "a", "data_source": "words", "reward_model": {"ground_truth": "a"}}\n')
    found = said(SKYRL, f"data.train_data=['{rows}']")
    assert found.endswith("`prompt` is whet.data.train.0.prompt.")


@pytest.mark.parametrize(
    ("overrides", "text", "told"),
    [
        ([], "(limit)", "`limit` is data.train_max_samples."),
        (["data.filter_overlong_prompts=true"], "data.overlong", "is data.filter_overlong_prompts."),
        (["whet.data.overlong=filter"], "data.overlong", "data.overlong is whet.data.overlong."),
    ],
)
def test_a_key_that_has_another_value_here_is_named_by_the_key_that_it_comes_from(
    overrides: list[str], text: str, told: str
) -> None:
    """-1 rows are null here; no override under whet's own name stands in between."""
    loaded = load(VERL, overrides)
    source = loaded.stages[0].data.train[0]
    with pytest.raises(DataError) as raised, in_words_of(loaded, 0), of_source(source):
        raise DataError(f"no rows: {text}")
    assert str(raised.value).endswith(told)


def test_a_class_of_rows_that_fails_is_named_by_the_key_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def rows(data_files):\n    raise ValueError('none')\n")
    given = f"data.custom_cls.path={tmp_path / 'mine.py'}"
    for name, what in (("rows", "raised ValueError: none"), ("row", "has no 'row'")):
        found = said(VERL, given, f"data.custom_cls.name={name}")
        assert what in found
        assert found.endswith(f"The rows come from override {given}.")


@pytest.mark.parametrize(
    "value", ["/none/a.parquet", "[/none/a.parquet]", "[/none/a.parquet,/none/b.parquet]"]
)
def test_rows_of_an_override_come_from_it_be_it_a_list_or_not(value: str) -> None:
    for file, key in ((VERL, "data.train_files"), (SKYRL, "data.train_data")):
        given = f"{key}={value}"
        assert said(file, given).endswith(f"The rows come from override {given}.")


def test_a_list_of_an_override_counts_above_the_file_under_another_name_of_the_key() -> None:
    found = said(SKYRL, given := "train_data=[/none/a.parquet]")
    assert found == f"No such data file: /none. The rows come from override {given}."


def test_a_rehearsal_names_the_key_of_the_file() -> None:
    found = [finding.said for finding in probe(load(VERL, ["data.prompt_key=question"])).findings]
    assert sum(text.endswith("In a verl-ppo file `prompt` is data.prompt_key.") for text in found) == 2


def test_scores_of_a_file_of_replies_name_the_key_of_the_config(tmp_path: Path) -> None:
    rows = tmp_path / "replies.jsonl"
    rows.write_text('{"question": "a", "responses": ["b"], "data_source": "words"}\n')
    with pytest.raises(DataError, match=r"In a verl-ppo file `prompt` is data\.prompt_key\.$"):
        judge_file(load(VERL, values=replies_in(rows, load(VERL).config)), whole=False)


def test_a_native_file_has_its_own_words_alone(tmp_path: Path) -> None:
    found = said("examples/first_run.yaml", "stages.sft.data.train=[{path: examples/words.jsonl, prompt: q}]")
    assert found.endswith("in the source: `prompt: COLUMN`.")
