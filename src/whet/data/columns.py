"""Which column of a row is what: the fields of a Task, before any token is made."""

from __future__ import annotations

from dataclasses import dataclass

from whet.config.schema import Source
from whet.data.chat import Prompt, as_prompt
from whet.data.parts import Row
from whet.types import ConfigError, DataError, Json, Message

_ABSENT = object()


@dataclass(frozen=True)
class Fields:
    """A row, read by the column names of its source."""

    prompt: Prompt
    label: str
    answer: Json
    response: str | None
    rejected: str | None
    extra: dict[str, Json]
    """Every column of which nothing, or only a part inside it, was read."""


def used(source: Source) -> tuple[str, ...]:
    """The columns that `parse` reads: for reading no more than these."""
    names = [getattr(source, f) for f in ("prompt", "answer", "response", "rejected", "label")]
    return tuple(c for n in names if n is not None for c in dict.fromkeys((n, n.partition(".")[0])))


def parse(row: Row, source: Source, *, name: str, chat: bool | None, where: str) -> Fields:
    """The fields of one row. Raises DataError that names `where`, the column and what stands in it."""
    if source.template is not None and "{prompt}" not in source.template:
        raise ConfigError(f"Data source {name!r}: its template has no {{prompt}} in it: {source.template!r}")
    label = name if source.label is None else _text(row, source.label, where=where)
    value = _required(row, source.prompt, where=where)
    try:
        prompt = as_prompt(_prompt(value, source), chat=chat, system=source.system)
    except DataError as e:
        raise DataError(f"{where}: {e}") from e
    whole = {source.prompt, source.answer, source.response, source.rejected, source.label}
    return Fields(
        prompt=prompt,
        label=label,
        answer=_optional(row, source, "answer", where=where),
        response=_optional_text(row, source, "response", where=where),
        rejected=_optional_text(row, source, "rejected", where=where),
        extra={k: v for k, v in row.items() if k not in whole},
    )


def lookup(row: Row, column: str) -> Json:
    """The value of a column, or `_ABSENT`; `a.b` is the column of that name, or else entry b of column a."""
    if column in row:
        return row[column]
    value: Json = row
    for part in column.split("."):
        if not isinstance(value, dict) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _prompt(value: Json, source: Source) -> Prompt:
    if isinstance(value, str) and value:
        return value if source.template is None else source.template.replace("{prompt}", value)
    if not isinstance(value, list) or not value:
        raise DataError(
            _wrong(source.prompt, value, "a text or a list of {role, content} messages, not empty")
        )
    if source.template is not None:
        raise DataError(f"column {source.prompt!r} holds messages; the source's template is for plain text.")
    return tuple(_message(m, source.prompt) for m in value)


def _message(value: Json, column: str) -> Message:
    if not isinstance(value, dict) or not all(isinstance(value.get(k), str) for k in ("role", "content")):
        raise DataError(_wrong(column, value, "messages whose role and content are text"))
    if more := sorted(k for k, v in value.items() if v is not None and k not in ("role", "content")):
        raise DataError(
            f"column {column!r}: a message has {', '.join(more)}; only role and content can be used."
        )
    return Message(value["role"], value["content"])


def _required(row: Row, column: str, *, where: str) -> Json:
    value = lookup(row, column)
    if value is _ABSENT:
        raise DataError(
            f"{where}: no column {column!r}; there are: {', '.join(_columns(row, column)) or 'none'}."
        )
    return value


def _columns(row: Row, column: str) -> list[str]:
    """The names that could stand in place of the first part of `column` that is absent."""
    above, _, _ = column.rpartition(".")
    inside = lookup(row, above) if above else row
    return [f"{above}.{k}" if above else k for k in inside] if isinstance(inside, dict) else sorted(row)


def _optional(row: Row, source: Source, field: str, *, where: str) -> Json:
    """A column that may be absent under its default name; a name of your own must be there."""
    column = getattr(source, field)
    if column != Source.model_fields[field].default:
        return _required(row, column, where=where)
    value = lookup(row, column)
    return None if value is _ABSENT else value


def _optional_text(row: Row, source: Source, field: str, *, where: str) -> str | None:
    value = _optional(row, source, field, where=where)
    if value is not None and not isinstance(value, str):
        raise DataError(f"{where}: {_wrong(getattr(source, field), value, 'text')}")
    return value


def _text(row: Row, column: str, *, where: str) -> str:
    value = _required(row, column, where=where)
    if not isinstance(value, str):
        raise DataError(f"{where}: {_wrong(column, value, 'text')}")
    return value


def _wrong(column: str, value: Json, expected: str) -> str:
    return f"column {column!r} holds {type(value).__name__} {repr(value)[:60]}; expected {expected}."
