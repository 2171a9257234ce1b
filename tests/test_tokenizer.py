"""Tokenizers: built from the data, read from folders, written and read back."""

import logging
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.config.schema import TokenizerConfig
from whet.data.tokenizer import SPECIAL, load_tokenizer
from whet.types import ConfigError, DataError

TEXTS = ["abc> cba", "x\ny\t z", "né 1,234 <b>"]


def made(kind, texts=TEXTS, **kw):
    return load_tokenizer(TokenizerConfig(build=kind, **kw), model_path=None, texts=texts)


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_chars_has_one_sorted_token_a_character_after_the_special_ones():
    tokenizer = made("chars", ["ba", "ab "])
    assert tokenizer.get_vocab() == {t: i for i, t in enumerate((*SPECIAL, " ", "a", "b"))}
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert encode(tokenizer, "ab é") == [8, 9, 7, 2]


@settings(deadline=None, max_examples=60)
@given(text=st.text(alphabet="abc>x\ny\tz né1,234<", max_size=40))
def test_chars_gives_the_text_back(text):
    tokenizer = made("chars")
    assert tokenizer.decode(encode(tokenizer, text)) == text
    assert len(encode(tokenizer, text)) == len(text)


@settings(deadline=None, max_examples=200)
@given(text=st.text(min_size=1, max_size=40))
def test_chars_counts_the_pieces_that_it_cuts(text):
    core = made("chars", [text, "a"]).backend_tokenizer
    cut = [piece for piece, _ in core.pre_tokenizer.pre_tokenize_str(text)]
    assert core.get_vocab() == {t: i for i, t in enumerate((*SPECIAL, *sorted({*cut, "a"})))}


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=40))
def test_bpe_writes_every_text(text):
    tokenizer = made("bpe", vocab_size=300)
    assert tokenizer.decode(encode(tokenizer, text)) == text
    assert tokenizer.unk_token_id not in encode(tokenizer, text)


def test_bpe_merges_what_is_frequent():
    tokenizer = made("bpe", ["hello hello hello"] * 3, vocab_size=280)
    assert len(encode(tokenizer, "hello")) == 1
    assert len(tokenizer) <= 280


def test_words_keep_white_space_and_rank_by_frequency(caplog):
    tokenizer = made("words", ["the cat, the dog", "the cat"], vocab_size=len(SPECIAL) + 4)
    assert tokenizer.decode(encode(tokenizer, "the cat,the  cat")) == "the cat,the  cat"
    assert encode(tokenizer, "dog") == [tokenizer.unk_token_id]
    assert "1 of 5 words do not fit" in caplog.text


@pytest.mark.parametrize("kind", ["chars", "words", "bpe"])
def test_the_order_of_texts_does_not_matter(kind):
    a, b = made(kind), made(kind, TEXTS[::-1])
    assert a.backend_tokenizer.to_str() == b.backend_tokenizer.to_str()


def test_bpe_is_the_same_in_another_process():
    code = (
        "from whet.config.schema import TokenizerConfig as C; from whet.data.tokenizer import load_tokenizer as l\n"
        f"t = l(C(build='bpe', vocab_size=290), model_path=None, texts={TEXTS + ['abab baba'] * 4!r})\n"
        "print(t.backend_tokenizer.to_str(), end='')"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    here = made("bpe", TEXTS + ["abab baba"] * 4, vocab_size=290).backend_tokenizer.to_str()
    assert here == other


@pytest.mark.parametrize("kind", ["chars", "words", "bpe"])
def test_saved_and_reopened_it_is_equal(kind, tmp_path):
    tokenizer = made(kind)
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(TokenizerConfig(), model_path=str(tmp_path))
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.chat_template == tokenizer.chat_template
    assert again.eos_token_id == tokenizer.eos_token_id
    assert again.pad_token_id == tokenizer.pad_token_id
    text = "<user>abc> x\n<eos><assistant>"
    assert encode(again, text) == encode(tokenizer, text)
    assert again.decode(encode(again, "abc x\n")) == "abc x\n"


def test_path_stands_before_the_models_folder_and_a_template_before_its_own(tmp_path):
    made("chars", ["a"]).save_pretrained(tmp_path / "a")
    made("chars", ["b"]).save_pretrained(tmp_path / "b")
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}!")
    cfg = TokenizerConfig(path=str(tmp_path / "a"), chat_template=str(tmp_path / "t.jinja"))
    tokenizer = load_tokenizer(cfg, model_path=str(tmp_path / "b"))
    assert "a" in tokenizer.get_vocab()
    assert tokenizer.chat_template == "{{ messages[0].content }}!"


def test_too_small_a_vocabulary_and_no_text_are_refused():
    with pytest.raises(ConfigError, match="at least 263"):
        made("bpe", vocab_size=262)
    with pytest.raises(ConfigError, match="at least 8"):
        made("chars", vocab_size=7)
    with pytest.raises(DataError, match="no text"):
        made("chars", [])


def test_bad_folders_are_refused(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    (tmp_path / "tokens").mkdir()
    with pytest.raises(ConfigError, match="did you mean 'tokens'"):
        load_tokenizer(TokenizerConfig(path=str(tmp_path / "token")), model_path=None)
    with pytest.raises(ConfigError, match="Cannot read a tokenizer"):
        load_tokenizer(TokenizerConfig(path=str(tmp_path / "tokens")), model_path=None)
    with pytest.raises(ConfigError, match="No tokenizer: give"):
        load_tokenizer(TokenizerConfig(), model_path=None)
    with pytest.raises(ConfigError, match="not both"):
        load_tokenizer(TokenizerConfig(path="x", build="chars"), model_path=None)


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path):
    tokenizer = made("chars")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no end-of-text token"):
        load_tokenizer(TokenizerConfig(path=str(tmp_path)), model_path=None)


def test_a_run_writes_and_reads_its_files_in_any_locale(tmp_path):
    """Also where a system's own encoding is not UTF-8: the rows, and so the tokenizer and the checkpoint, have more."""
    code = f"""
import whet
from tiny import RUN

tree = {{**RUN, "run_dir": {str(tmp_path / "run")!r}, "checkpoint": {{"interval": 1}}}}
tree["data"] = {{"max_prompt_tokens": 8, "train": [{{"rows": [{{"prompt": "\\u8a9e", "answer": "\\xfc"}}]}}]}}
for steps in (1, 2):
    whet.train(**tree, overrides=[f"train.steps={{steps}}", "train.tasks_per_step=1"])
"""
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = load_tokenizer(TokenizerConfig(path=str(tmp_path / "run" / "export" / "main")), model_path=None)
    assert "語" in made.get_vocab()
