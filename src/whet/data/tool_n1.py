"""Rows of tool calls in the form of Tool-N1 (arXiv:2505.00024) and Trinity-RFT's toolcall_workflow, as prompts.

A row has `raw_system`, `tools` (JSON text of a list of functions), `conversations` (a list of {from, value}) and
`answer`, which the reward `whet.rewards.trinity:toolcall_reward` reads. What asks for the form is in whet's words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from whet.config.schema import SourceConfig
from whet.data.rows import read_rows
from whet.types import DataError, Json

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool"), "tool"),
}
"""`from` of a message, and its role."""
FORM = (
    "\n\nThe functions, one a line:\n<tools>\n{tools}\n</tools>\n\nA reply has two parts, both in one message. First "
    "reason inside <think> and </think>. Then give the calls inside <tool_call> and </tool_call>, as one JSON list "
    'with arguments of the right types, for example:\n<think> both are needed </think> <tool_call> [{{"name": "mail", '
    '"arguments": {{"to": "Bob"}}}}, {{"name": "shop", "arguments": {{"item": "banana"}}}}] </tool_call>'
)


def rows(path: str, split: str | None = None, subset: str | None = None) -> Iterator[dict[str, Json]]:
    """{prompt, answer} of each row of a file or a dataset folder. DataError names a row that has another form."""
    found = read_rows(SourceConfig(path=path, split=split, subset=subset))
    for number in range(len(found)):
        try:
            yield {"prompt": messages(row := found.row(number)), "answer": row["answer"]}
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{found.where(number)}: {error!r:.200}; expected the columns raw_system, tools, conversations and "
                "answer of Tool-N1"
            ) from error


def messages(row: Mapping[str, Json]) -> list[dict[str, Json]]:
    """The prompt of a row: the system message with the functions, and the conversation so far."""
    tools = "\n".join(json.dumps({"type": "function", "function": tool}) for tool in json.loads(row["tools"]))
    said = [{"role": "system", "content": row["raw_system"] + FORM.format(tools=tools)}]
    for message in row["conversations"]:
        called = message["from"] == "function_call"
        text = json.dumps(message["value"]) if called else message["value"]
        said.append({"role": ROLES[message["from"]], "content": text})
    return said
