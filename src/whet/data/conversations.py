"""Rows of whole conversations as demonstrations: the messages before the last are the prompt, the last the reply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from whet.config.schema import Source
from whet.data.columns import lookup
from whet.data.parts import Row, describe
from whet.data.rows import read_rows
from whet.types import DataError, Json


def demonstrations(
    path: str | list[str], *, column: str = "conversations", system: str | None = None
) -> Iterator[Row]:
    """Rows {prompt, response}; `path` as of a data source, `column` holds lists of {role, content}.

    Raises DataError for a conversation that does not end with a reply, or has more than one: all of them would
    have to be learned.
    """
    rows = read_rows(Source(path=path if isinstance(path, str) else tuple(path)))
    for n in range(len(rows)):
        messages = _messages(rows.row(n), column, where=rows.where(n))
        roles = [m["role"] for m in messages]
        if roles.count("assistant") != 1 or roles[-1] != "assistant" or len(roles) < 2:
            raise DataError(
                f"{rows.where(n)}: the conversation has the roles {', '.join(roles)}; expected one assistant, at "
                "the end. Conversations of several replies are coming: cut them into one row a reply."
            )
        opening = [{"role": "system", "content": system}] if system else []
        yield {"prompt": opening + messages[:-1], "response": messages[-1]["content"]}


def _messages(row: Row, column: str, *, where: str) -> list[dict[str, Any]]:
    value = lookup(row, column)
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return value
    found = describe(value) if column in row else f"no such column; there are: {', '.join(sorted(row))}"
    raise DataError(f"{where}: column {column!r}: expected a list of {{role, content}} messages; {found}.")


def _is_message(value: Json) -> bool:
    return isinstance(value, dict) and {"role", "content"} <= value.keys()
