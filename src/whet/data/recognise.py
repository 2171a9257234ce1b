"""Which columns a source uses where the user names none: recognised by the names that published datasets have.

The first row decides for all rows. A column of a default name (`prompt`, `response`, `rejected`, `answer`) is always
the one that is read; other names stand in for what is absent. Names and forms are those of TRL 1.16 (dataset formats),
`question` and `answer` those of GSM8K. Under SFT a `text` alone is a response without a prompt, as TRL's language
modeling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from whet.config.faults import EachStage
from whet.config.load import Loaded
from whet.config.recipes import kind_of
from whet.config.schema import Config, SourceConfig
from whet.config.source_faults import in_words_of, of_source
from whet.data.files import is_here
from whet.data.parts import Row, SourceRows
from whet.data.rows import read_rows
from whet.types import DataError, Json

CONVERSATIONS = ("messages",)
"""Columns of a whole conversation."""
PROMPTS = ("question", "text")
"""Columns that stand in for `prompt`."""
REPLIES = ("completion", "chosen")
"""Columns that stand in for `response`."""
_READ = ("prompt", "messages", "response", "rejected", "answer", "desirable")


def with_columns(
    loaded: Loaded, *, plan: bool = False, parts: Sequence[str] = ("train", "demonstrations", "eval")
) -> tuple[Loaded, list[str]]:
    """The run with the columns of every source named in its stages, and what was recognised, for people.

    parts: of the section `data` that are read. plan: only data that is here is read, and no function of the user's is
    called.
    """
    known: dict[tuple[str, bool], tuple[SourceConfig, str]] = {}

    def one(source: SourceConfig, texts: bool) -> SourceConfig:
        unread = plan and (source.path is None or not is_here(source.path))
        if unread or names_columns(source):
            return source
        key = source.model_dump_json(exclude_unset=True), texts
        if key not in known:
            with of_source(source):
                rows = read_rows(source.model_copy(update={"skip": 0, "limit": 1}))
                read = recognised(source, rows, texts=texts)
            known[key] = read, told(source, read, rows)
        return known[key][0]

    def every(cfg: Config) -> Config:
        given = {part: getattr(cfg.data, part) for part in parts}
        read = {
            part: tuple(one(source, holds_texts(cfg, part)) for source in sources)
            for part, sources in given.items()
        }
        changed = {part: sources for part, sources in read.items() if sources != given[part]}
        return cfg.model_copy(update={"data": cfg.data.model_copy(update=changed)}) if changed else cfg

    stages = []
    with EachStage(loaded.names) as stage:
        for n, cfg in enumerate(loaded.stages):
            with stage(n), in_words_of(loaded, n):
                stages.append(every(cfg))
    return replace(loaded, stages=tuple(stages)), [said for _, said in known.values() if said]


def names_columns(source: SourceConfig) -> bool:
    """Whether the user names the columns to read."""
    given = source.model_fields_set
    return "messages" in given or {"prompt", "response"} <= given


def holds_texts(cfg: Config, part: str) -> bool:
    """Whether rows of a part of `data` may be texts without prompts: SFT learns them, and replies to them are not
    scored."""
    return kind_of(cfg.algorithm) == "demonstrations" and not (part == "eval" and cfg.rewards)


def recognised(source: SourceConfig, rows: SourceRows, *, texts: bool = False) -> SourceConfig:
    """The source with the columns named that its first row has. DataError where several columns could be meant.

    texts: its rows may be texts without prompts.
    """
    if names_columns(source):
        return source
    row = rows.row(0)
    given = source.model_fields_set & set(_READ)
    if texts and _is_whole_text(row, source):
        return source.model_copy(update={"prompt": None, "response": "text"})
    found = _found(row, given, where=rows.where(0), texts=texts)
    update = {field: column for field, column in found.items() if field not in given}
    return source.model_copy(update=update) if update else source


def told(source: SourceConfig, read: SourceConfig, rows: SourceRows) -> str:
    """The columns that were recognised, for people: 'messages from chosen, rejected'; '' where none had to be."""
    changed = [f for f in _READ if getattr(source, f) != getattr(read, f)]
    if not changed:
        return ""
    chosen = ", ".join(
        f"no {field}" if (column := getattr(read, field)) is None else f"{field} from column {column!r}"
        for field in changed
    )
    return f"data source {rows.name}: {chosen} (of {', '.join(sorted(rows.row(0)))}); name columns to read others"


def _found(row: Row, given: set[str], *, where: str, texts: bool) -> dict[str, str]:
    """Names of columns by field, for the fields whose default column is absent or holds a part of another. Messages
    that end with a question are a prompt, unless replies are learned (texts)."""
    reply = _one(row, "response", REPLIES, where=where) if "response" not in given else None
    if "prompt" not in given and _holds_prompt(row, reply):
        return {"messages": str(reply)}
    if "prompt" in given or "prompt" in row:
        out = {}
    elif conversation := [c for c in CONVERSATIONS if c in row]:
        if others := [c for c in ("response", *PROMPTS, *REPLIES) if c in row]:
            raise DataError(_ambiguous(row, [*conversation, *others], where))
        ends = _is_conversation(row[conversation[0]], least=1) and row[conversation[0]][-1].get("role")
        return {"prompt" if ends in ("user", "tool") and not texts else "messages": conversation[0]}
    else:
        asked = _one(row, "prompt", PROMPTS, where=where)
        out = {} if asked is None else {"prompt": asked}
    if reply is None and out.get("prompt") == "question" and isinstance(row.get("answer"), str):
        reply = "answer"
    if reply is not None and "response" not in row:
        out["response"] = reply
    if reply == "completion" and "desirable" not in row and isinstance(row.get("label"), bool):
        out["desirable"] = "label"
    return out


def _one(row: Row, default: str, others: Sequence[str], *, where: str) -> str | None:
    """The column of the default name, or the only one of the others."""
    if default in row:
        return default
    there = [c for c in others if c in row]
    if len(there) > 1:
        raise DataError(_ambiguous(row, there, where))
    return there[0] if there else None


def _ambiguous(row: Row, columns: Sequence[str], where: str) -> str:
    return (
        f"{where}: the columns {', '.join(columns)} could all be the prompt or the reply; name those to read in the "
        "source: `prompt` and `response` (`rejected`), or `messages` for whole conversations. Columns: "
        f"{', '.join(sorted(row))}."
    )


def _holds_prompt(row: Row, reply: str | None) -> bool:
    """Whether a reply's column holds the whole conversation, and nothing else says what its prompt is: there is no
    prompt (TRL's implicit prompts), or it is the text of the conversation's last question."""
    value: Json = row.get(reply) if reply is not None else []
    if not _is_conversation(value):
        return False
    if not any(c in row for c in ("prompt", *PROMPTS)):
        return True
    asked = row.get("prompt")
    return isinstance(asked, str) and value[-2].get("content") == asked


def _is_whole_text(row: Row, source: SourceConfig) -> bool:
    """Whether a row is a text to learn as a whole: nothing else in it is a prompt or a reply, nor is one named."""
    others = ("prompt", "response", "question", "answer", *CONVERSATIONS, *REPLIES)
    given = source.model_fields_set
    named = "response" in given or ("prompt" in given and source.prompt is not None)
    return not named and "text" in row and not any(c in row for c in others)


def _is_conversation(value: Json, least: int = 2) -> bool:
    return isinstance(value, list) and len(value) >= least and all(isinstance(m, Mapping) for m in value)
