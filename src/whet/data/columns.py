"""Which column of a row is what: the fields of a Task, before any token is made."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from itertools import chain, pairwise
from operator import attrgetter
from typing import NamedTuple

from whet.config.schema import SourceConfig
from whet.data.chat import Prompt, as_prompt, as_reply
from whet.data.parts import Row, loads
from whet.types import ConfigError, DataError, Json, Message, Reply, ToolSpec

_ABSENT = object()
_LARGEST = sys.float_info.max

_COLUMNS = (
    "prompt",
    "messages",
    "answer",
    "response",
    "rejected",
    "tools",
    "chat_template_kwargs",
    "desirable",
    "label",
    "system_prompt_column",
)
"""Fields of a source that name a column. `difficulty` may name several."""
_columns_of = attrgetter(*_COLUMNS)

_DEFAULTS = {name: field.default for name, field in SourceConfig.model_fields.items()}

_OPTIONAL = ("enable_thinking",)
"""Names of columns, beside those of the defaults, that may be absent: verl 0.9.1's of thinking in a row."""

PER_ROW = ("label", "system_prompt_column")
"""Those of them that a row may lack though they were named, since the source has a value for such rows."""

MEDIA = {f"<{kind}>": (f"{kind}s", kind) for kind in ("image", "video", "audio")}
"""Places of media in prompts, and the columns that have what stands there, as in the data sets of verl and others."""


class Fields(NamedTuple):
    """A row, read by the column names of its source. A named tuple: one is made of every row, and a frozen dataclass of
    as many fields takes three times as long."""

    prompt: Prompt
    """'': the row has none, and `response` is a whole text."""
    token_ids: tuple[int, ...]
    """The prompt, where the row has its tokens; `prompt` tells them."""
    label: str
    answer: Json
    response: Reply | None
    rejected: Reply | None
    tools: tuple[ToolSpec, ...]
    chat_template_kwargs: dict[str, Json]
    difficulties: tuple[float, ...]
    extra: dict[str, Json]
    """Every column of which nothing, or only a part inside it, was read; and `desirable`, under that name."""
    found: frozenset[str]
    """Which of `PER_ROW` the row has."""


def named(source: SourceConfig) -> dict[str, str]:
    """The columns that `parse` reads, by field."""
    unread = ("prompt", "response") if source.messages is not None else ()
    return {f: c for f, c in zip(_COLUMNS, _columns_of(source)) if c is not None and f not in unread}


def difficulty_columns(source: SourceConfig) -> tuple[str, ...]:
    """The columns that `difficulty` names, the one that is compared first before the others."""
    named = source.difficulty or ()
    return (named,) if isinstance(named, str) else named


def _all_named(source: SourceConfig) -> tuple[str, ...]:
    return (*named(source).values(), *difficulty_columns(source))


def further(source: SourceConfig, columns: Iterable[str]) -> list[str]:
    """Those of the columns that no field takes from a row, and `desirable` where its column is among them: the names in
    `Fields.extra`."""
    there = set(columns)
    label = {"desirable"} if source.desirable.partition(".")[0] in there else set()
    return sorted(there.difference(_all_named(source)) | label)


def has_no_prompts(source: SourceConfig) -> bool:
    """Whether the responses of a source are whole texts."""
    return source.prompt is None and source.messages is None and not is_asked_by_env(source)


def is_asked_by_env(source: SourceConfig) -> bool:
    """Whether the prompt is the system message alone: the environment asks, by the other columns of the row."""
    has_system = source.system_prompt is not None or source.system_prompt_column is not None
    return source.prompt is None and source.messages is None and has_system


def used(source: SourceConfig) -> tuple[str, ...] | None:
    """The columns that `parse` reads, nested ones with those they are in: for reading no more than these. None: all."""
    if is_asked_by_env(source):
        return None
    names = (*_all_named(source), *source.expect, *chain(*MEDIA.values()))
    return tuple(c for n in names for c in dict.fromkeys((n, n.partition(".")[0])))


def parse(row: Row, source: SourceConfig, *, name: str, chat: bool | None, where: str) -> Fields:
    """The fields of one row. Raises DataError that names `where`, the column and what stands in it."""
    if source.template is not None and "{prompt}" not in source.template:
        raise ConfigError(f"Data source {name!r}: its template has no {{prompt}}: {source.template!r}")
    try:
        return _parse(row, source, name=name, chat=chat)
    except DataError as e:
        raise DataError(f"{where}: {e}") from e


def _parse(row: Row, source: SourceConfig, *, name: str, chat: bool | None) -> Fields:
    _check_expected(row, source.expect)
    label, own_system = _own(row, source.label), _own(row, source.system_prompt_column)
    system = source.system_prompt if own_system is None else own_system
    asked: Prompt
    token_ids: tuple[int, ...] = ()
    response: Reply | None
    if source.messages is not None:
        *before, last = _conversation(_required(row, source.messages, "messages"), source.messages)
        asked, response = tuple(before), as_reply(last)
    elif is_asked_by_env(source):
        asked, response = (), None
    elif source.prompt is None:
        asked, response = "", _whole(_required(row, source.response, "response"), source.response)
    else:
        value = _required(row, source.prompt, "prompt")
        token_ids = _prompt_tokens(value, source)
        asked = str(value) if token_ids else prompt_of(value, source.prompt, source.template)
        response = _reply(_optional(row, source, "response"), source.response, asked=asked)
    if asked == () and not system:
        raise DataError("the row has neither a prompt nor a system message, and the source has none for it")
    _refuse_media(row, asked)
    as_it_is = asked == "" or token_ids
    prompt = (
        asked if as_it_is else as_prompt(asked, chat=chat, system=system, reply_prefix=source.reply_prefix)
    )
    columns = _all_named(source)
    return Fields(
        prompt=prompt,
        token_ids=token_ids,
        label=name if label is None else label,
        answer=_optional(row, source, "answer"),
        response=response,
        rejected=_reply(_optional(row, source, "rejected"), source.rejected, asked=asked),
        tools=_tools(_optional(row, source, "tools"), str(source.tools)),
        chat_template_kwargs=_kwargs(
            _optional(row, source, "chat_template_kwargs"), str(source.chat_template_kwargs)
        ),
        difficulties=tuple(_number(row, column) for column in difficulty_columns(source)),
        extra={k: v for k, v in row.items() if k not in columns} | _desirable(row, source),
        found=frozenset(
            f for f, own in (("label", label), ("system_prompt_column", own_system)) if own is not None
        ),
    )


def _check_expected(row: Row, expected: Mapping[str, Json]) -> None:
    for column, value in expected.items():
        given = lookup(row, column)
        is_it = given == value and isinstance(given, bool) == isinstance(value, bool)  # true == 1 in Python
        if not (is_it or given is _ABSENT or given is None):
            raise DataError(
                f"column {column!r} is {given!r}, and the source expects {value!r} (`expect`): put such rows into a "
                "source of their own"
            )


def _refuse_media(row: Row, asked: Prompt) -> None:
    """A prompt with the place of a medium that the row has is never asked without it."""
    text = asked if isinstance(asked, str) else "".join(message.content for message in asked)
    for place, columns in MEDIA.items():
        if place in text and (column := next((name for name in columns if row.get(name)), None)) is not None:
            raise DataError(
                f"column {column!r} holds what {place} in the prompt stands for, and whet trains on text alone: use "
                f"rows of text, or leave the column out to ask with {place} as it stands (`function: FILE.py:NAME`)."
            )


def _desirable(row: Row, source: SourceConfig) -> dict[str, Json]:
    """The label of the row's response, unchanged: only KTO reads it."""
    value = _optional(row, source, "desirable")
    return {} if value is None else {"desirable": value}


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


def column_of(row: Row, column: str) -> Json:
    """The value of a column. LookupError where the row has none of that name."""
    value = lookup(row, column)
    if value is _ABSENT:
        raise LookupError(column)
    return value


# ---------------------------------------------------------------- prompts and replies


def prompt_of(value: Json, column: str, template: str | None) -> Prompt:
    """What a column holds, as a prompt. DataError for what is none."""
    if isinstance(value, str) and value:
        if template is not None:
            return template.replace("{prompt}", value)
        if _is_text_of_messages(value):
            raise DataError(
                f"column {column!r} holds the JSON text of messages; expected the list itself: give it by a function "
                "of yours (`function: FILE.py:NAME`). To ask with the text as it stands, set the source's template to "
                "'{prompt}'."
            )
        return value
    if not isinstance(value, list) or not value:
        raise DataError(
            _wrong(column, value, "a non-empty text or a non-empty list of {role, content} messages")
        )
    if template is not None:
        raise DataError(
            f"column {column!r} holds messages, but the source's template is for plain text; leave it out."
        )
    return tuple(_message(m, column) for m in value)


def _is_text_of_messages(text: str) -> bool:
    if not text.lstrip().startswith("[") or '"role"' not in text or '"content"' not in text:
        return False
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(told) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in told)


def _tokens(value: Json) -> tuple[int, ...]:
    """Token ids in place of a text; () for anything else."""
    plain = isinstance(value, list) and all(type(token) is int for token in value)
    return tuple(value) if plain else ()


def _prompt_tokens(value: Json, source: SourceConfig) -> tuple[int, ...]:
    """The tokens of a prompt that is given as such; what would be put around a text cannot be put around them."""
    found = _tokens(value)
    around = ("template", "system_prompt", "system_prompt_column", "reply_prefix")
    for key in around if found else ():
        if getattr(source, key) is not None:
            raise DataError(
                f"column {source.prompt!r} holds token ids, which {key} cannot be added to; leave it out."
            )
    return found


def _whole(value: Json, column: str) -> str | tuple[int, ...]:
    """A text without a prompt."""
    if tokens := _tokens(value):
        return tokens
    if not isinstance(value, str) or not value:
        raise DataError(
            _wrong(column, value, "a non-empty text, since the source has no prompt (prompt: null)")
        )
    return value


def _conversation(value: Json, column: str) -> list[Message]:
    """Messages that end with a reply to something, no reply following another."""
    if not isinstance(value, list) or not value:
        raise DataError(_wrong(column, value, "a non-empty list of {role, content} messages"))
    messages = [_message(m, column) for m in value]
    roles = [m.role for m in messages]
    if len(roles) < 2 or roles[-1] != "assistant" or ("assistant", "assistant") in pairwise(roles):
        raise DataError(
            f"column {column!r}: the conversation has the roles {', '.join(roles)}; expected messages that end with "
            "an assistant message, and no two assistant messages in a row; for messages that only ask, name the column "
            f"in the source as `prompt: {column}`."
        )
    return messages


_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of what an assistant thought: OpenAI's servers, newer ones, gpt-oss."""
_FROM_SHAREGPT = (
    '{"messages": [{"role": {"human": "user", "gpt": "assistant"}.get(m["from"], m["from"]), "content": m["value"]} '
    'for m in row["conversations"]]}; name it in the source: `function: FILE.py:NAME`, `messages: messages`.'
)
_CALLS = "tool_calls as [{function: {name, arguments}}]"
_TOOLS = "a list of tools, [{type: function, function: {name, description, parameters}}]"
_MESSAGE = ("role", "content", "tool_calls", *_THOUGHTS, "tool_call_id", "name")


def _message(value: Json, column: str) -> Message:
    value = _without_nulls(value)
    calls = isinstance(value, dict) and value.get("tool_calls")
    if calls:
        value = {**value, "content": value.get("content", ""), "tool_calls": _with_arguments(calls, column)}
    if isinstance(value, dict) and "role" not in value and {"from", "value"} <= value.keys():
        raise DataError(
            f"column {column!r} holds messages with `from` and `value` (ShareGPT); expected role and content. Convert "
            f"them in a function that returns the rows: {_FROM_SHAREGPT}"
        )
    if not isinstance(value, dict) or not all(isinstance(value.get(k), str) for k in ("role", "content")):
        raise DataError(_wrong(column, value, "messages whose role and content are text"))
    if more := sorted(k for k in value if k not in _MESSAGE):
        raise DataError(
            f"column {column!r}: a message has {', '.join(more)}; expected {', '.join(_MESSAGE)}."
        )
    if (calls or value.keys() & {*_THOUGHTS}) and value["role"] != "assistant":
        raise DataError(
            f"column {column!r}: a message of {value['role']!r} has calls or reasoning of an assistant."
        )
    thoughts = [value[name] for name in _THOUGHTS if name in value]
    texts = [*thoughts, *(value[name] for name in ("tool_call_id", "name") if name in value)]
    if len(thoughts) > 1 or not all(isinstance(text, str) for text in texts):
        raise DataError(_wrong(column, value, "texts in a message, and reasoning under one name"))
    try:
        return Message.from_json({**value, "reasoning_content": thoughts[0] if thoughts else None})
    except (ValueError, TypeError, LookupError, AttributeError) as e:
        raise DataError(f"{_wrong(column, calls, _CALLS)} ({type(e).__name__}: {str(e)[:100]})") from e


def _with_arguments(calls: Json, column: str) -> Json:
    """Calls with their arguments as values, where they are JSON text."""
    if isinstance(calls, list):
        return [_with_arguments(call, column) for call in calls]
    if isinstance(calls, dict) and isinstance(calls.get("function"), dict):
        return {**calls, "function": _with_arguments(calls["function"], column)}
    text = calls.get("arguments") if isinstance(calls, dict) else None
    if not isinstance(text, str) or not text:
        return calls
    return {**calls, "arguments": _of_text(text, column, _CALLS)}


def _of_text(text: str, column: str, expected: str) -> Json:
    """The value of a JSON text inside a column, by the rules of JSON files."""
    try:
        return loads(text.encode(), "its JSON text")
    except DataError as e:
        raise DataError(f"{_wrong(column, text, expected)} ({e})") from e


def _without_nulls(value: Json) -> Json:
    """Without the entries of maps that are null, as parquet fills them in for what other rows have."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _tools(value: Json, column: str) -> tuple[ToolSpec, ...]:
    """Tools in OpenAI's form, as a list or as its JSON text."""
    if value is None or value == "":
        return ()
    try:
        given = _of_text(value, column, _TOOLS) if isinstance(value, str) else _without_nulls(value)
        if not isinstance(given, list):
            raise TypeError("it is not a list")
        found = tuple(ToolSpec.from_json(tool) for tool in given)
        if not all(isinstance(t.name, str) and isinstance(t.parameters, dict) for t in found):
            raise TypeError("a name is not text, or parameters are not an object")
        return found
    except (ValueError, TypeError, LookupError, AttributeError) as e:
        raise DataError(f"{_wrong(column, value, _TOOLS)} ({e})") from e


def _kwargs(value: Json, column: str) -> dict[str, Json]:
    """Variables of the chat template; a column of anything but maps is one, with the column's name. A null is none, as
    parquet fills in."""
    found: dict[str, Json] = _without_nulls(
        value if isinstance(value, dict) else {column.rpartition(".")[2]: value}
    )
    return found


def _reply(value: Json, column: str, *, asked: Prompt) -> Reply | None:
    """A reply given as text, as tokens, as a message, or as messages that end with it: then the others are the
    prompt's."""
    if value is None or isinstance(value, str):
        return value
    if tokens := _tokens(value):
        return tokens
    several = value if isinstance(value, list) else [value]
    if not several or not all(isinstance(m, dict) for m in several) or several[-1].get("role") != "assistant":
        raise DataError(_wrong(column, value, "text, or messages that end with an assistant message"))
    messages = [_message(m, column) for m in several]
    same = isinstance(asked, tuple) and [m for m in asked if m.role != "system"] == [
        m for m in messages[:-1] if m.role != "system"
    ]
    if len(messages) > 1 and not same:
        raise DataError(
            f"column {column!r}: the messages before the reply differ from the prompt; give the reply only."
        )
    return as_reply(messages[-1])


# ---------------------------------------------------------------- values


def _required(row: Row, column: str, field: str) -> Json:
    value = lookup(row, column)
    if value is _ABSENT:
        raise DataError(
            f"no column {column!r}; columns: {', '.join(_present(row, column)) or 'none'}. Name the column to read in "
            f"the source: `{field}: COLUMN`."
        )
    return value


def _present(row: Row, column: str) -> list[str]:
    """The names that could stand in place of the first part of `column` that is absent."""
    above, _, _ = column.rpartition(".")
    inside = lookup(row, above) if above else row
    return [f"{above}.{k}" if above else k for k in inside] if isinstance(inside, dict) else sorted(row)


def _optional(row: Row, source: SourceConfig, field: str) -> Json:
    """A column that may be absent under its default name, or if none is named; a name of your own must be there."""
    column = getattr(source, field)
    if column is None:
        return None
    if column not in (_DEFAULTS[field], *_OPTIONAL):
        return _required(row, column, field)
    value = lookup(row, column)
    return None if value is _ABSENT else value


def _own(row: Row, column: str | None) -> str | None:
    """The row's own value of an optional column: absent, null or empty means no value."""
    value = None if column is None else lookup(row, column)
    if value is None or value is _ABSENT or value == "":
        return None
    if not isinstance(value, str):
        raise DataError(_wrong(str(column), value, "text"))
    return value


def _number(row: Row, column: str) -> float:
    value = _required(row, column, "difficulty")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # a whole number can be too large for a float; NaN is neither
    if not number or not -_LARGEST <= value <= _LARGEST:
        raise DataError(_wrong(column, value, "a finite number"))
    return float(value)


def _wrong(column: str, value: Json, expected: str) -> str:
    return f"column {column!r} holds {type(value).__name__} {repr(value)[:60]}; expected {expected}."
