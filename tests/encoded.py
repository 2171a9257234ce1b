"""Prompts as tokens, one at a time, by a tokenizer's own chat template or another one."""

from __future__ import annotations

from copy import copy
from typing import Any

from whet.data.chat import Prompt, as_prompt, encode_prompts, encode_reply, read_template


def with_template(tokenizer: Any, template: str) -> Any:
    """The tokenizer with another chat template: Jinja text, or a file."""
    out = copy(tokenizer)
    out.chat_template = read_template(template)
    return out


def encode_prompt(
    tokenizer: Any,
    prompt: Prompt,
    *,
    chat: bool | None = None,
    template: str | None = None,
    system: str | None = None,
) -> list[int]:
    tokenizer = tokenizer if template is None else with_template(tokenizer, template)
    return encode_prompts(tokenizer, [as_prompt(prompt, chat=chat, system=system)])[0]


def encode_response(tokenizer: Any, text: str) -> list[int]:
    """A reply to a plain text, with its end token."""
    return encode_reply(tokenizer, "", text)
