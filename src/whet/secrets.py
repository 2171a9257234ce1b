"""Secrets that this process knows, and their removal from texts.

Secrets come from the config (`config.secrets`), from the environment, and from the process that started this one
(`guard.line`). Text of foreign code (exceptions, output of a reward) passes through `redact` on entry, errors where
they are created, and all printed or logged text on output; so no file, store or tracker gets a secret.

A value of fewer than SHORTEST characters is not removed from texts, because it would remove parts of words. Where its
place is known (a key of the config), it is hidden whatever its length.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import threading
import traceback
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from html import escape
from types import TracebackType
from typing import Any
from urllib.parse import quote, quote_plus

SHORTEST = 6
"""Characters of a secret that a config names as such."""
SHORTEST_GUESSED = 8
"""Of one that only the name of an environment variable tells."""

MASK = "***"
"""Stands where a secret was, in config.yaml and in everything else that is made of a config."""

_SURE = (
    r"SECRET(?!AR)|PASSW|PASSPHRASE|CREDENTIAL|BEARER|AUTH(?!OR(?!I[SZ])|ENTICI)|DSN$|CONNECTION_?STRING"
    r"|(^|_)(PWD|PASS|SAS|PAT)($|_)|(API|ACCESS|PRIVATE|SIGNING|ENCRYPTION|ACCOUNT)[_-]?KEY|(^|[_-])COOKIES?$"
)
_LIKELY = r"TOKEN(?!IZ)|(?<!SSL)(?<!MON)(?<!TUR)(?<!HOC)(?<!WHIS)KEY(?!WORD|BOARD|FRAME|POINT|STROKE)"
_MASKED = (
    r"SECRET|PASS|CREDENTIAL|BEARER|AUTH|DSN$|CONNECTION_?STRING|(^|_)(PWD|SAS|PAT)($|_)|COOKIE|TOKEN|KEY"
)
_OTHER = r"""
    (^|_)(RATE|RATIO|THRESHOLD|K|LEN|LENGTH|LIMIT|BUDGET|COUNT|SIZE|WEIGHT|PENALTY|COLUMN|FIELD|NAME|ENV|PATH|FILE|DIR
        |FOLDER|TYPE|MODE|METHOD|FORMAT|STRATEGY|REQUIRED|ENABLED|TIMEOUT|SHARING)S?$
    | TOKENS?_(IDS|PER_\w+)$
    | (^|_)(PAD|EOS|BOS|UNK|SEP|CLS|MASK|STOP|SPECIAL|BEGIN|END|THINK|IMAGE|VIDEO|AUDIO)_?TOKENS?(_ID)?$
    | (^|_)((MAX|MIN|NUM|N|TOTAL)_(\w+_)?|NEW_|PROMPT_|RESPONSE_|INPUT_|OUTPUT_|BATCHED_)TOKENS$
    | (^|_)(SORT|PRIMARY|FOREIGN|GROUP|JOIN|UNIQUE|INDEX|PROMPT|RESPONSE|QUESTION|ANSWER|LABEL|COLUMN|TEXT|MESSAGES?
        |REWARD|FN)_?KEYS?$
"""
"""Names that are about a secret, or of another thing: max_tokens, eos_token, sort_key, pass_rate, key_file."""
_sure = re.compile(_SURE, re.IGNORECASE)
_likely = re.compile(_LIKELY, re.IGNORECASE)
_masked = re.compile(_MASKED, re.IGNORECASE)
_other = re.compile(_OTHER, re.VERBOSE | re.IGNORECASE)
_NO_VALUES = frozenset(
    ("none", "null", "true", "false", "yes", "no", "basic", "bearer", "default", "anonymous")
)
"""What stands at such a name and is no secret, whatever its case."""
_LOOK = {"TOKEN": r"[\w./+=:~-]{8,}", "KEY": r"(?=.*\d)[\w./+=:~-]{8,}"}
"""What a value looks like that is meant by such a name, and not a special token or the key of a column."""
_URL = re.compile(
    r"(?P<head>://)(?:(?P<user>[^/?#@:\s]*)(?P<colon>:(?!\d*(?:[/?#\s]|$))(?P<password>[^\s@]*(?:@[^\s@/?#]*)*))?(?=@))?"
    r"|(?P<query>[?&;](?P<name>[\w.-]+)=)(?P<value>[^&;#\s]*)"
)
_WORDS = re.compile(
    r"""(?<![\w.-])(?:
    (?P<option>--?[A-Za-z][\w-]*)\s+(?!-) | (?P<set>-{0,2}[A-Za-z][\w.-]*)= | (?P<header>[A-Za-z][\w-]*)["']?:\s*
    | (?P<scheme>Bearer|Basic)\s+
    )(?:(?:Bearer|Basic)\s+)?["']?(?P<value>[^\s"',;&{}<>()\[\]]+)""",
    re.VERBOSE | re.IGNORECASE,
)
"""--NAME VALUE, NAME=VALUE, NAME: VALUE, Bearer VALUE: parts of commands, headers and connection strings."""
_LONE = re.compile(r"(?=.*\d)\S{8,}")
"""What a value looks like that stands in a sentence and is none of its words."""
_NAMELESS = re.compile(r"(?=.*\d)[\w.~%+=-]{16,}")
"""A user of a URL that is rather a token."""


def is_secret(name: str) -> bool:
    """Whether an environment variable of this name looks like it holds a secret."""
    return is_sure(name) or _guessed(name) is not None


def is_sure(name: str) -> bool:
    """Whether a name marks a secret whatever the value looks like."""
    return _sure.search(name) is not None and not _is_other(name)


def may_be_masked(name: str) -> bool:
    """Whether a mask at this name may stand for a secret: earlier releases took more names for one."""
    return _masked.search(name) is not None


def _guessed(name: str) -> str | None:
    """TOKEN or KEY, where a name has it and means a secret by it."""
    found = _likely.search(name)
    return None if found is None or _is_other(name) else found[0].upper()


def _is_other(name: str) -> bool:
    """maxTokens and max-tokens are max_tokens."""
    return _other.search(re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-.\s]", "_", name)) is not None


def is_none(value: str) -> bool:
    """Whether a value is no secret, whatever it stands at."""
    return value.lower() in _NO_VALUES


def holds_secret(name: str, value: str) -> bool:
    """Whether an argument holds a secret: 'api_key' does, 'stop_token: </answer>' and 'key: question' do not."""
    if is_none(value):
        return False
    if is_sure(name):
        return True
    found = _guessed(name)
    return found is not None and re.fullmatch(_LOOK[found], value) is not None


def _in_a_url(name: str, value: str) -> bool:
    """The same of a parameter: of fewer characters, too, and in the code of URLs."""
    if not value or is_none(value):
        return False
    if is_sure(name) or name.lower() in ("sig", "signature", "pwd"):
        return True
    found, is_number = _guessed(name), re.fullmatch(r"[\d.,]+", value) is not None
    return found is not None and not is_number and not (found == "KEY" and value.isalpha())


def in_urls(text: str) -> Iterator[tuple[int, int]]:
    """Where secrets stand in the URLs of a text: passwords, tokens in the place of a user, parameters."""
    if "://" not in text:
        return
    for m in _URL.finditer(text):
        if m["query"]:
            if _in_a_url(m["name"], m["value"]) or (m["value"] == MASK and may_be_masked(m["name"])):
                yield m.span("value")
            continue
        if m["user"] and _NAMELESS.fullmatch(m["user"]):
            yield m.span("user")
        if m["password"]:
            yield m.span("password")


def in_words(text: str) -> Iterator[tuple[int, int]]:
    """Where secrets, or masks of them, stand in a text that names them: a command, a header, a connection string, a
    table as JSON."""
    for m in _WORDS.finditer(text):
        name, value = (m["option"] or m["set"] or m["header"] or "").lstrip("-"), m["value"]
        if value == MASK:
            found = bool(m["scheme"]) or may_be_masked(name)
        elif m["scheme"]:
            found = _of_a_scheme(m["scheme"], value)
        elif m["header"]:
            found = _LONE.fullmatch(value) is not None and holds_secret(name, value)
        else:
            found = len(value) >= SHORTEST and "$" not in value and holds_secret(name, value)
        if found:
            yield m.span("value")


def _of_a_scheme(scheme: str, value: str) -> bool:
    """Whether what follows Bearer or Basic is a secret, and not the next word of a sentence."""
    if scheme.lower() == "bearer":
        return (_LONE if scheme == "Bearer" else _NAMELESS).fullmatch(value) is not None
    try:
        return b":" in base64.b64decode(value, validate=True)  # a user and a password
    except ValueError:
        return False


def without(text: str, mask: str, *, words: bool = False) -> str:
    """The same with the secrets of its URLs replaced. words: those that it names, too."""
    for start, end in reversed(parts(text, words=words)):
        text = text[:start] + mask + text[end:]
    return text


def parts(text: str, *, words: bool) -> list[tuple[int, int]]:
    """Where the secrets of `in_urls` are, and those of `in_words` if asked for; in their order, none twice."""
    found: list[tuple[int, int]] = []
    for start, end in sorted([*in_urls(text), *(in_words(text) if words else ())]):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


# ---------------------------------------------------------------- what is known

REDACTED = re.compile(r"<redacted:[^>]*>")
"""What `redact` puts in the place of a secret."""

_known: dict[str, str] = {}
"""Names by value."""
_forms: dict[str, str] = {}
"""Names by every form that a value may take in a text."""
_compiled: tuple[re.Pattern[str], list[str], int] | None = None
"""A pattern of all forms, these in their order, and the length of the longest."""


def learn(name: str, value: str) -> None:
    """From now on `redact` replaces this value, in whatever form it comes, by <redacted:NAME>."""
    if len(value) < SHORTEST or value in _known or "<redacted:" in value or "${" in value:
        return
    _known[value] = name
    _scheme, _, token = value.partition(" ")  # Bearer TOKEN
    cookies = (each.partition("=")[2] for each in value.split(";"))
    pieces = (piece.strip() for piece in (*value.splitlines(), token, *cookies))
    for piece in {value, *filter(may_be_secret, pieces)}:
        for form in forms(piece):
            _forms.setdefault(form, name)


def guess(name: str, value: str) -> None:
    """Learn a value that only its name marks as a secret, if it may be one."""
    if may_be_secret(value):
        learn(name, value)


def may_be_secret(value: str) -> bool:
    """Whether a value is more than a word, a number, or a path that is there."""
    is_word = value.isalpha() and len(value) < 2 * SHORTEST_GUESSED
    is_number = re.fullmatch(r"[\d.,:\s]+", value) is not None
    return len(value) >= SHORTEST_GUESSED and not is_word and not is_number and not _is_path(value)


def _is_path(value: str) -> bool:
    """A folder or file that is there, or the end of one that is not yet."""
    return value.startswith("/") and os.path.isdir(os.path.dirname(value)) and os.path.dirname(value) != "/"


def learn_environment(env: Mapping[str, str] | None = None) -> None:
    """Learn secret variables, and what secrets URLs in the others have. None: of this process."""
    for name, value in (os.environ if env is None else env).items():
        if is_secret(name):
            guess(name, value)
        learn_urls(name, value)


def learn_urls(name: str, text: str) -> None:
    """Learn the secrets of the URLs in a text."""
    for start, end in in_urls(text):
        learn(name, text[start:end])


def learn_overrides(texts: Iterable[str]) -> None:
    """Learn the secrets of `key.path=value`, be it a value that a config can have or not."""
    for text in texts:
        key, _, value = (part.strip().strip("'\"") for part in text.partition("="))
        name = re.split(r"[.\[\]]", key)[-1]
        if holds_secret(name, value) or (".env." in key and is_secret(name)):
            learn(key, value)
        for start, end in parts(value, words=True):
            learn(key, value[start:end])


def known() -> dict[str, str]:
    """All that is known, names by value: for a process that this one starts, and nobody else."""
    return dict(_known)


def learn_all(names: Mapping[str, str]) -> None:
    """What `known` says elsewhere."""
    for value, name in names.items():
        learn(name, value)


def forms(value: str) -> set[str]:
    """How a text may quote a value: as it is, escaped for a URL, JSON, Python or HTML, in base64 and hex, reversed."""
    raw = value.encode("utf-8", "surrogateescape")
    urls = {quote(raw), quote(raw, safe=""), quote_plus(raw)}
    found = {value, value[::-1], raw.hex(), raw.hex().upper(), escape(value), repr(value)[1:-1]}
    found |= urls | {re.sub("%..", lambda m: m[0].lower(), url) for url in urls}
    found |= {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    for before in range(3):  # it may begin at any of the three bytes that four characters stand for
        text = base64.b64encode(b"\0" * before + raw).decode()
        inner = text[-(-before * 8 // 6) : (before + len(raw)) * 8 // 6]
        found |= {inner, inner.replace("+", "-").replace("/", "_")}
    return {form for form in found if len(form) >= SHORTEST}


def redact(text: str) -> str:
    """The same with every secret that is known replaced by <redacted:NAME>."""
    return _looked_for()[0].sub(lambda m: f"<redacted:{_forms[m[0]]}>", text) if _forms else text


def _looked_for() -> tuple[re.Pattern[str], list[str], int]:
    """Compiled again where another thread has learned more meanwhile."""
    global _compiled
    compiled = _compiled
    if compiled is None or len(compiled[1]) < len(_forms):
        longest_first = sorted(_forms, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)))
        compiled = _compiled = pattern, sorted(longest_first), len(longest_first[0])
    return compiled


def _unfinished(text: str) -> int:
    """Where the longest end of a text is with which a longer secret begins; the length of the text if there is none."""
    if not _forms:
        return len(text)
    pattern, forms, longest = _looked_for()
    for at in range(max(0, len(text) - longest + 1), len(text)):
        after = bisect_right(forms, text[at:])
        begins = after < len(forms) and forms[after].startswith(text[at:])
        if begins and not any(m.start() < at < m.end() for m in pattern.finditer(text)):
            return at
    return len(text)


def redact_tree(tree: Any) -> Any:
    """Plain values with all their texts redacted, keys too."""
    if isinstance(tree, dict):
        return {redact(k) if isinstance(k, str) else k: redact_tree(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [redact_tree(v) for v in tree]
    return redact(tree) if isinstance(tree, str) else tree


# ---------------------------------------------------------------- what is printed


class _Redacting:
    """A stream that prints no secret, and escapes what its encoding does not have: half of what is printed was written
    by others, and no character of it ends a run."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._held: list[str] = []
        """An end of what was written with which a secret begins: the next write may complete it. The end of a line and
        a flush let it go. Of several threads that write at once, each may leave one; each is taken in one operation."""
        self._bytes: _RedactingBytes | None = None

    def write(self, text: Any) -> int:
        new = self._text(text)
        said = self._taken() + new
        at = len(said) if said.endswith("\n") else _unfinished(said)
        self._held += [said[at:]] if at < len(said) else []
        self._put(redact(said[:at]))
        return len(text)

    def _taken(self) -> str:
        taken = ""
        with suppress(IndexError):  # another thread may take the rest
            while self._held:
                taken += self._held.pop(0)
        return taken

    def _text(self, written: Any) -> str:
        if not isinstance(written, str):
            raise TypeError(f"a stream of text takes str, not {type(written).__name__}")
        return written

    def _put(self, said: str) -> None:
        try:
            self._stream.write(said)
        except UnicodeEncodeError as e:
            self._stream.write(said.encode(e.encoding, "backslashreplace").decode(e.encoding))

    def release(self) -> None:
        """Write what is held."""
        if held := self._taken():
            self._put(redact(held))
        if self._bytes is not None:
            self._bytes.release()

    def flush(self) -> None:
        self.release()
        self._stream.flush()

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    @property
    def buffer(self) -> Any:
        if self._bytes is None:
            self._bytes = _RedactingBytes(self._stream.buffer)
        return self._bytes

    def __iter__(self) -> Any:
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _RedactingBytes(_Redacting):
    """The same of a stream of bytes."""

    def _text(self, written: Any) -> str:
        return bytes(written).decode("utf-8", "surrogateescape")

    def _put(self, said: str) -> None:
        self._stream.write(said.encode("utf-8", "surrogateescape"))


def guard_output() -> None:
    """For the rest of this process: learn the environment's secrets, and print none, in tracebacks neither."""
    learn_environment()
    sys.stdout, sys.stderr = redacting(sys.stdout), redacting(sys.stderr)


def redacting(stream: Any) -> Any:
    """The same stream, which prints no secret."""
    return stream if stream is None or isinstance(stream, _Redacting) else _Redacting(stream)


_counting = threading.Lock()
_blocks = 0
_before: tuple[Any, Any] = (None, None)
"""Standard output and error before the first of the blocks that are open."""


@contextmanager
def guarded_output() -> Generator[None]:
    """The same, as long as the block runs; the traceback of what it raises is shown later, by the interpreter. Where
    runs of several threads overlap, until the last of them ends."""
    global _blocks, _before
    with _counting:
        if not _blocks:
            _before = sys.stdout, sys.stderr
        guard_output()
        _blocks += 1
    try:
        yield
    except BaseException:
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _show
        raise
    finally:
        with _counting:
            _blocks -= 1
            if not _blocks:
                sys.stdout, sys.stderr = _bare(sys.stdout, _before[0]), _bare(sys.stderr, _before[1])


def _bare(stream: Any, before: Any) -> Any:
    """A stream that was not guarded before, as it was."""
    if not isinstance(stream, _Redacting) or isinstance(before, _Redacting):
        return stream
    while isinstance(stream, _Redacting):
        stream.release()
        stream = stream._stream
    return stream


@contextmanager
def guarded_recorders() -> Generator[None]:
    """Foreign code inside may record what is printed, by a `write` of its own in a guarded stream or by a stream of its
    own in its place: what comes later reaches it without secrets."""
    before = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = _guarded(sys.stdout, before[0]), _guarded(sys.stderr, before[1])


def _guarded(stream: Any, before: Any) -> Any:
    under = getattr(before, "rich_proxied_file", before)  # at a terminal `before` may be the live display's
    recorded = stream is not before or "write" in getattr(stream, "__dict__", {})
    return _Redacting(stream) if isinstance(under, _Redacting) and recorded and stream is not None else stream


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))
