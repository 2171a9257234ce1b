"""Messages and text to token ids. Text becomes tokens once: a later turn adds tokens and changes none."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2.exceptions import TemplateError

from whet.data.templates import rendered
from whet.data.timed import encoded
from whet.inputs import MOST_CONFIG_BYTES, read_text
from whet.types import ConfigError, DataError, Json, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Prompt = str | tuple[Message, ...]
"""Chat messages (the chat template is applied) or plain text (it is not)."""

_QUESTION = Message("user", "q")
_REPLY = "<think>\nt\n</think>\n\nr"
"""A reply with a thought: templates that strip thoughts from earlier turns show themselves on it."""


def read_template(value: str) -> str:
    """A chat template given as Jinja text, or as the path of a file that holds it."""
    if "{" in value:
        return value
    path = Path(value).expanduser()
    if not path.exists():
        raise ConfigError(
            f"tokenizer.chat_template {value!r} is neither Jinja text (no '{{' in it) nor a file."
        )
    return read_text(path, ConfigError, most=MOST_CONFIG_BYTES)


def with_arguments(template: str, arguments: Mapping[str, Json]) -> str:
    """The template with `arguments` as default values of its variables.

    They become part of it, so that every prompt and every later turn is rendered with them. ConfigError for a
    name that the template does not use.
    """
    for name in arguments:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ConfigError(
                f"tokenizer.chat_template_kwargs.{name}: the chat template has no variable of this name, so the key "
                "would have no effect; leave it out or correct it."
            )
    return "".join(map(_default, arguments.items())) + template


def _default(argument: tuple[str, Json]) -> str:
    name, value = argument
    if not name.isidentifier():
        raise ConfigError(f"tokenizer.chat_template_kwargs: {name!r} is not a valid name of a variable.")
    # Jinja writes numbers, texts, lists, maps, True and None as Python does, and drops the line end after a block
    return f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif %}}\n"


def as_prompt(
    prompt: Prompt, *, chat: bool | None = None, system: str | None = None, reply_prefix: str | None = None
) -> Prompt:
    """Decide between chat and plain text (None: messages yes, text no); put the system message first.

    reply_prefix: the beginning of the reply. In a chat it becomes a last message of the assistant, which the reply
    continues.
    """
    if chat is False and (system is not None or not isinstance(prompt, str)):
        given = "a system message" if isinstance(prompt, str) else "a prompt of messages"
        raise ConfigError(f"data.chat is false, but {given} needs the chat template; leave out data.chat.")
    if isinstance(prompt, str):
        if not chat and system is None:
            return prompt + (reply_prefix or "")
        prompt = (Message("user", prompt),)
    if system is not None:
        if prompt[0].role == "system":
            raise DataError(
                "The prompt already has a system message, but the source has a `system_prompt` too; leave one out."
            )
        prompt = (Message("system", system), *prompt)
    if reply_prefix:
        if prompt[-1].role == "assistant":
            raise DataError(
                "The prompt already ends with the beginning of a reply, but the source has a `reply_prefix` too; "
                "leave one out."
            )
        prompt = (*prompt, Message("assistant", reply_prefix))
    return prompt


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt,
    *,
    chat: bool | None = None,
    template: str | None = None,
    system: str | None = None,
) -> list[int]:
    """The tokens that a reply follows. `template`: Jinja text or a file; default: the tokenizer's own."""
    return encode_prompts(tokenizer, [as_prompt(prompt, chat=chat, system=system)], template=template)[0]


def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], *, template: str | None = None
) -> list[list[int]]:
    """`encode_prompt` for many at once.

    Messages: rendered with the header of the assistant's turn, then encoded as they stand. A last message of the
    assistant is the beginning of the reply: it follows the header and is not closed. Plain text: encoded as it
    stands, after a begin-of-text token where the tokenizer itself would put one.
    """
    texts = [p if isinstance(p, str) else _lead(tokenizer, p, template=template) for p in prompts]
    ids = encode_texts(tokenizer, texts)
    opening = [i for i in tokenizer("")["input_ids"] if i == tokenizer.bos_token_id][:1]
    return [opening + x if isinstance(p, str) else x for p, x in zip(prompts, ids)]


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Texts as is: nothing is added before or after."""
    if not texts:
        return []
    found = encoded(tokenizer, texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    ids: list[list[int]] = found["input_ids"]
    return ids


def encode_response(tokenizer: Tokenizer, text: str) -> list[int]:
    """A demonstration as the policy would have sampled it: its tokens and the end-of-text token."""
    if tokenizer.eos_token_id is None:
        raise ConfigError("The tokenizer has no end-of-text token (eos_token), so a reply could not end.")
    return [*encode_texts(tokenizer, [text])[0], tokenizer.eos_token_id]


def encode_whole(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Texts without prompts: each encoded as a plain-text prompt, with the end-of-text token after it if its own last
    token is another one (as TRL 1.16 for language modeling)."""
    end = encode_response(tokenizer, "")
    return [ids if ids[-1:] == end else [*ids, *end] for ids in encode_prompts(tokenizer, texts)]


def encode_history(tokenizer: Tokenizer, prompt: Sequence[Message]) -> tuple[list[int], list[int]]:
    """`encode_prompt` of a conversation, and which of its tokens are replies (1) with their end tokens.

    Each reply is tokenised by itself after what the policy would have been given at that point, so the tokens are
    those of a rollout of several turns, and their text is exactly what the template makes of the conversation. That
    needs a template that only appends: DataError for one that rewrites what came before or does not end a reply
    with a special token. White space around a reply goes if the template drops it.
    """
    replies = [i for i, m in enumerate(prompt[:-1]) if m.role == "assistant"]
    leads = [_lead(tokenizer, prompt[:i]) for i in (*replies, len(prompt))]
    heads = [_head(before, after, prompt[i].content) for i, (before, after) in zip(replies, pairwise(leads))]
    said = [head[len(before) :] for before, head in zip(leads, heads)]
    told = [leads[0], *(after[len(head) :] for head, after in zip(heads, leads[1:]))]
    told_ids, said_ids = encode_texts(tokenizer, told), encode_texts(tokenizer, said)
    token_ids, mask = list(told_ids[0]), [0] * len(told_ids[0])
    for reply, after in zip(said_ids, told_ids[1:]):
        if after[0] not in tokenizer.all_special_ids:
            raise DataError(
                "The chat template has no end token after a reply, so a policy trained on it could not end a reply: "
                "add one in tokenizer.chat_template, or train on the last reply only (data.learn_turns)."
            )
        token_ids += [*reply, *after]
        mask += [1] * (len(reply) + 1) + [0] * (len(after) - 1)
    return token_ids, mask


def _head(before: str, after: str, reply: str) -> str:
    """The beginning of `after` that ends with the reply to `before`."""
    for text in (reply, reply.strip()):
        if after.startswith(before + text) and len(after) > len(before + text):
            return before + text
    raise DataError(
        "The chat template rewrites earlier turns (it strips thoughts or changes a reply once another turn follows), "
        "so its replies cannot all be trained on in one sequence. Give a template that does not change earlier turns "
        "(tokenizer.chat_template), or train on the last reply only (data.learn_turns).\n  given:    "
        f"{(before + reply)[-80:]!r}\n  rendered: {after[max(0, len(before) - 40) : len(before) + 40]!r}"
    )


def _lead(tokenizer: Tokenizer, messages: Sequence[Message], *, template: str | None = None) -> str:
    """The text that the reply follows: a last message of the assistant is its beginning."""
    if messages and messages[-1].role == "assistant":
        return render(tokenizer, messages[:-1], template=template) + messages[-1].content
    return render(tokenizer, messages, template=template)


def encode_turn(
    tokenizer: Tokenizer, existing: Sequence[int], messages: Sequence[Message], *, template: str | None = None
) -> list[int]:
    """The tokens of new messages and the next reply's header, to follow `existing`, which ends with a reply.

    Fixed-base difference: a short conversation is rendered up to the end of its reply and again with
    `messages` after it; what the second has more is the continuation, so the real history is never tokenised
    again. The end-of-turn token is left out where the reply sampled it, and put in where the reply was cut.
    Raises DataError for a template under which this is wrong because it rewrites earlier turns.
    """
    if not messages:
        raise DataError("A turn needs at least one new message.")
    head = render(tokenizer, [_QUESTION], template=template) + _REPLY
    full = render(tokenizer, [_QUESTION, Message("assistant", _REPLY), *messages], template=template)
    if not full.startswith(head):
        raise DataError(
            "The chat template rewrites earlier turns (it strips thoughts or changes a reply once another "
            "turn follows), so the tokens of a conversation would differ from the sampled tokens. Give "
            f"a template that does not change earlier turns: tokenizer.chat_template.\n  sampled:  {head!r}\n  "
            f"rendered: {full[: len(head) + 20]!r}"
        )
    head_ids, full_ids = encode_texts(tokenizer, [head, full])
    if full_ids[: len(head_ids)] != head_ids:
        raise DataError(
            "The chat template joins a reply with the text after it (its last token would change): "
            "add an end token after the reply in tokenizer.chat_template."
        )
    new = full_ids[len(head_ids) :]
    ended = bool(existing) and existing[-1] == new[0] and new[0] in tokenizer.all_special_ids
    return new[1:] if ended else new


class MessageCodec:
    """Chat messages to the tokens of a rollout and back, by the tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """A whole conversation, up to where the policy speaks."""
        return encode_prompts(self.tokenizer, [tuple(messages)])[0]

    def encode_observation(self, existing: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """New messages after `existing`, which ends with a reply, up to where the policy speaks again."""
        return encode_turn(self.tokenizer, existing, messages)

    def parse_reply(self, token_ids: Sequence[int]) -> Message:
        """A sampled reply; special tokens are no part of its text."""
        return Message("assistant", str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True)))

    def check_template(self) -> None:
        """ConfigError for a tokenizer without a template, DataError for a template that rewrites earlier turns."""
        self.encode_observation((), [_QUESTION])


def render(tokenizer: Tokenizer, messages: Sequence[Message], *, template: str | None = None) -> str:
    """The conversation as text, ending with the header of the assistant's turn."""
    jinja = read_template(template) if template is not None else tokenizer.chat_template
    if isinstance(jinja, dict):
        jinja = jinja.get("default")
    if not isinstance(jinja, str):
        raise ConfigError(
            f"The tokenizer {tokenizer.name_or_path!r} has no chat template, but the prompt is a list of "
            "chat messages. Give a template in tokenizer.chat_template (Jinja text or a file), or give prompts as "
            "plain text."
        )
    plain = [{"role": m.role, "content": m.content} for m in messages]
    given = {**tokenizer.special_tokens_map, "messages": plain, "tools": None, "documents": None}
    try:
        text = rendered(jinja, **given, add_generation_prompt=True)
        text.encode()  # half a surrogate pair is no text
    except Exception as e:  # a template is foreign code: it can fail in any way
        roles = ", ".join(m.role for m in messages[:6]) + (", ..." if len(messages) > 6 else "")
        raise DataError(f"The chat template refuses the messages ({roles}): {_said(e)}") from e
    return text


def _said(error: Exception) -> str:
    """What went wrong in a template, and in which line of it."""
    at = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
    line = getattr(error, "lineno", None) or (at[-1] if at else None)
    text = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return f"{text[:500]} (line {line} of the template)" if line else text[:500]
