"""A tokenizer from a local folder, or built from the data: of characters, words, or byte pairs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Core

from whet.config.schema import TokenizerConfig
from whet.config.urls import hub_hint
from whet.data.chat import read_template, set_day, template_of, with_arguments
from whet.data.templates import asks_for_date
from whet.data.timed import encoded
from whet.data.tokenizer_files import check_files
from whet.tables import near
from whet.types import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

log = logging.getLogger(__name__)

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
ROLES = ("<system>", "<user>", "<assistant>", "<tool>")
SPECIAL = (PAD, EOS, UNK, *ROLES)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}'
    "{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Chat template of built tokenizers: the role's token, the text, calls as JSON, the end token; nothing earlier changes.
It tells of no tools."""


def load_tokenizer(
    cfg: TokenizerConfig,
    *,
    model_path: str | None,
    texts: Iterable[str] = (),
    built: Path | None = None,
    day: date | None = None,
) -> PreTrainedTokenizerFast:
    """The run's tokenizer: from `cfg.path`, or built, or else the model's folder; never from the network.

    texts: what a built tokenizer is made from; read only then. built: the file in which a checkpoint has the tokenizer
    that was built (`write_built`); it is read in place of the texts, which may be others by now. day: on which the run
    began; None: today. Raises ConfigError.
    """
    if cfg.build is not None and cfg.path is not None:
        raise ConfigError("Give tokenizer.path or tokenizer.build, not both.")
    if cfg.build is None:
        tokenizer = _load(cfg.path or model_path)
    elif built is not None:
        tokenizer = _with_special(_read(built))
    else:
        tokenizer = build(cfg.build, cfg.vocab_size, texts)
    if cfg.chat_template is not None:
        tokenizer.chat_template = read_template(cfg.chat_template)
    if cfg.chat_template_kwargs:
        if not tokenizer.chat_template:
            raise ConfigError(
                "tokenizer.chat_template_kwargs: the tokenizer has no chat template, so they would have no effect."
            )
        tokenizer.chat_template = with_arguments(tokenizer.chat_template, cfg.chat_template_kwargs)
    today = date.fromisoformat(cfg.date) if cfg.date else day or datetime.now(UTC).date()
    if asks_for_date(template_of(tokenizer) or ""):
        log.info("chat template: its current date is %s (tokenizer.date)", today)
    elif cfg.date is not None:
        raise ConfigError(
            "tokenizer.date: the chat template does not ask for the date (strftime_now), so the key would have no "
            "effect; leave it out. A template with a variable of its own takes tokenizer.chat_template_kwargs."
        )
    set_day(tokenizer, today)
    return tokenizer


def _load(folder: str | None) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if folder is None:
        raise ConfigError(
            "No tokenizer: give tokenizer.path, tokenizer.build (chars, words, bpe) or model.path."
        )
    path = Path(folder).expanduser()
    if not path.is_dir():
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(
            f"No folder {path} (model.path or tokenizer.path){near(path.name, names)}. Models are read from "
            f"local folders only; download the model first{hub_hint(str(path)) or '.'}"
        )
    check_files(path)
    try:
        # tokenizer.json says all; AutoTokenizer would put a family's own splitting over a tokenizer built from data
        kind = PreTrainedTokenizerFast if (path / "tokenizer.json").is_file() else AutoTokenizer
        tokenizer = kind.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        # what is wrong with it shows here, not in the first prompt
        encoded(tokenizer, ["a", ""], add_special_tokens=False)
        _ = len(tokenizer), tokenizer.all_special_ids, tokenizer.eos_token_id, tokenizer.unk_token_id
    except Exception as e:  # foreign code reading foreign files: it can fail in any way
        told = str(e) if isinstance(e, OSError | ValueError) else f"{type(e).__name__}: {e}"
        raise ConfigError(f"Cannot read a tokenizer from {path}: {told}") from e
    except BaseException as e:
        if type(e).__name__ != "PanicException":  # of the tokenizers package, whose code is Rust
            raise
        raise ConfigError(f"Cannot read a tokenizer from {path}: {e}") from e
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(
            f"{path} has a {type(tokenizer).__name__}; expected a fast tokenizer (tokenizer.json)."
        )
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # made up from the config alone
        raise ConfigError(f"{path} has no tokenizer (tokenizer.json); copy it there, or give tokenizer.path.")
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"The tokenizer in {path} has no end-of-text token (eos_token), so a reply could not end."
        )
    return tokenizer


def build(kind: str, vocab_size: int, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer made from `texts`; the same texts in any order give the same one.

    chars and words keep the most frequent ones where more than `vocab_size` are found; the rest become <unk>.
    """
    return _with_special(BUILDERS[kind](vocab_size, texts))


def write_built(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Write the vocabulary and rules of a built tokenizer, from which `load_tokenizer` makes it again."""
    file.write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")  # type: ignore[attr-defined]


def _read(file: Path) -> Core:
    check_files(file.parent)
    try:
        return Core.from_file(str(file))
    except Exception as e:  # of the tokenizers package, which raises nothing more special
        raise ConfigError(f"Cannot read the tokenizer of a checkpoint, {file}: {e}") from e


def _with_special(core: Core) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        extra_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _chars(vocab_size: int, texts: Iterable[str]) -> Core:
    cut = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    # a text is its characters already: to have them cut costs ten times as much
    return _table(cut, Counter(chain.from_iterable(texts)), vocab_size=vocab_size, what="characters")


def _words(vocab_size: int, texts: Iterable[str]) -> Core:
    cut = pre_tokenizers.Split(Regex(r"\s|\w+|[^\w\s]"), "isolated")
    counts = Counter(piece for text in texts for piece, _ in cut.pre_tokenize_str(text))
    return _table(cut, counts, vocab_size=vocab_size, what="words")


def _table(cut: pre_tokenizers.Split, counts: Counter[str], *, vocab_size: int, what: str) -> Core:
    """Cut a text into pieces and look them up. White space is a piece too, so decoding gives the text
    back. counts: how often each piece occurs.
    """
    room = vocab_size - len(SPECIAL)
    if not counts or room < 1:
        raise _cannot_build(what, vocab_size, len(SPECIAL) + 1, empty=not counts)
    ranked = sorted(counts, key=lambda piece: (-counts[piece], piece))
    if len(ranked) > room:
        lost = sum(counts[p] for p in ranked[room:])
        log.warning(
            "tokenizer: %d of %d %s do not fit vocab_size=%d; %d of %d occurrences become %s",
            len(ranked) - room, len(ranked), what, vocab_size, lost, sum(counts.values()), UNK,
        )  # fmt: skip
    vocab = {piece: i for i, piece in enumerate((*SPECIAL, *sorted(ranked[:room])))}
    core = Core(models.WordLevel(vocab, unk_token=UNK))
    core.pre_tokenizer = cut
    core.decoder = decoders.Fuse()
    return core


def _bpe(vocab_size: int, texts: Iterable[str]) -> Core:
    """Byte-level byte-pair encoding: every text can be written, <unk> never occurs."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found = sorted(texts)
    if not found or vocab_size < len(alphabet) + len(SPECIAL):
        raise _cannot_build("byte pairs", vocab_size, len(alphabet) + len(SPECIAL), empty=not found)
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    core.train_from_iterator(found, trainer)
    return core


def _cannot_build(what: str, vocab_size: int, least: int, *, empty: bool) -> DataError | ConfigError:
    if empty:
        return DataError("Cannot build a tokenizer: the training data has no text.")
    return ConfigError(
        f"tokenizer.vocab_size={vocab_size} is too small for a tokenizer of {what}; expected at least {least}."
    )


BUILDERS: dict[str, Callable[[int, Iterable[str]], Core]] = {"chars": _chars, "words": _words, "bpe": _bpe}
