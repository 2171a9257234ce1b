"""A tokenizer at work, within a limit of time: its expressions come from a file, and may try without end.

They run in code that cannot be interrupted, so the work is done by a thread that is left alone where it takes too long;
the error ends the run, and the thread with it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whet.types import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core
    from transformers import PreTrainedTokenizerBase as Tokenizer

PATIENCE_S = 60.0
"""What any texts may take;"""
LEAST_RATE = 20_000
"""and a second more for so many characters: a usual tokenizer does a hundred times as much."""


def encoded(tokenizer: Tokenizer, texts: Sequence[str], **options: Any) -> dict[str, Any]:
    """tokenizer(texts, **options). Raises ConfigError on a timeout or a failure."""
    done: list[Any] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            done.append(tokenizer(list(texts), **options))
        except BaseException as e:  # noqa: BLE001  # raised below, where somebody waits for it
            failed.append(e)

    limit_s = PATIENCE_S + sum(map(len, texts)) / LEAST_RATE
    thread = threading.Thread(target=work, name="whet-tokenizer", daemon=True)
    thread.start()
    thread.join(limit_s)
    if failed:
        raise _told(tokenizer, failed[0]) from failed[0]
    if not done:
        longest = max(texts, key=len)
        raise ConfigError(
            f"The tokenizer {tokenizer.name_or_path!r} has not finished after {limit_s:.0f} s with {len(texts)} "
            f"texts, the longest of {len(longest)} characters ({longest[:60]!r}): an expression in its tokenizer.json "
            "(normalizer or pre_tokenizer) backtracks too much. Use the file that belongs to the model"
        )
    return done[0]


def decoded(tokenizer: Tokenizer | Core, token_ids: Sequence[int], **options: Any) -> str:
    """tokenizer.decode(token_ids, **options). Raises ConfigError where its code gives up. It needs no limit of time:
    `tokenizer_files` admits no expressions in a decoder."""
    try:
        return str(tokenizer.decode(list(token_ids), **options))
    except BaseException as e:
        if (told := _told(tokenizer, e)) is e:
            raise
        raise told from e


def _told(tokenizer: Tokenizer | Core, error: BaseException) -> BaseException:
    """What its code says in words; PanicException is of the tokenizers package, whose code is Rust."""
    if type(error).__name__ != "PanicException":
        return error
    name = getattr(tokenizer, "name_or_path", "")
    return ConfigError(
        f"The tokenizer{f' {name!r}' if name else ''} failed: {error}. An expression in its tokenizer.json (normalizer "
        "or pre_tokenizer) backtracks too much, or the file is damaged; use the file that belongs to the model"
    )
