"""Messages and text to token ids. Text becomes tokens once: a later turn adds tokens and changes none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2.exceptions import TemplateError

from whet.types import ConfigError, DataError, Message

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
    if not path.is_file():
        raise ConfigError(
            f"tokenizer.chat_template {value!r} is neither Jinja text (no '{{' in it) nor a file."
        )
    return path.read_text(encoding="utf-8")


def as_prompt(prompt: Prompt, *, chat: bool | None = None, system: str | None = None) -> Prompt:
    """Decide between chat and plain text (None: messages yes, text no); put the system message first."""
    if chat is False and (system is not None or not isinstance(prompt, str)):
        given = "a system message" if isinstance(prompt, str) else "a prompt of messages"
        raise ConfigError(f"data.chat is false, but {given} needs the chat template: drop data.chat.")
    if isinstance(prompt, str):
        if not chat and system is None:
            return prompt
        prompt = (Message("user", prompt),)
    if system is None:
        return prompt
    if prompt[0].role == "system":
        raise DataError(
            "The prompt has a system message of its own, and the source's `system` would be a second one."
        )
    return (Message("system", system), *prompt)


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

    Messages: rendered with the header of the assistant's turn, then encoded as they stand. Plain text:
    encoded as it stands, after a begin-of-text token where the tokenizer itself would put one.
    """
    texts = [p if isinstance(p, str) else render(tokenizer, p, template=template) for p in prompts]
    ids = encode_texts(tokenizer, texts)
    opening = [i for i in tokenizer("")["input_ids"] if i == tokenizer.bos_token_id][:1]
    return [opening + x if isinstance(p, str) else x for p, x in zip(prompts, ids)]


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Texts as they stand: nothing put before or after."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return encoded["input_ids"]


def encode_response(tokenizer: Tokenizer, text: str) -> list[int]:
    """A demonstration as the policy would have sampled it: its tokens and the end-of-text token."""
    if tokenizer.eos_token_id is None:
        raise ConfigError("The tokenizer has no end-of-text token (eos_token): a reply could not end.")
    return [*encode_texts(tokenizer, [text])[0], tokenizer.eos_token_id]


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
            "turn follows), so the tokens of a conversation would not be the ones that were sampled. Give "
            f"a template that leaves them as they are: tokenizer.chat_template.\n  sampled:  {head!r}\n  "
            f"rendered: {full[: len(head) + 20]!r}"
        )
    head_ids, full_ids = encode_texts(tokenizer, [head, full])
    if full_ids[: len(head_ids)] != head_ids:
        raise DataError(
            "The chat template lets a reply run into the text after it (its last token would become "
            "another one): put an end token after the reply in tokenizer.chat_template."
        )
    new = full_ids[len(head_ids) :]
    ended = bool(existing) and existing[-1] == new[0] and new[0] in tokenizer.all_special_ids
    return new[1:] if ended else new


def render(tokenizer: Tokenizer, messages: Sequence[Message], *, template: str | None = None) -> str:
    """The conversation as text, ending with the header of the assistant's turn."""
    jinja = read_template(template) if template is not None else tokenizer.chat_template
    if jinja is None:
        raise ConfigError(
            f"The tokenizer {tokenizer.name_or_path!r} has no chat template, and the prompt is chat "
            "messages. Give one in tokenizer.chat_template (Jinja text or a file), or give prompts as "
            "plain text."
        )
    plain = [{"role": m.role, "content": m.content} for m in messages]
    try:
        text = tokenizer.apply_chat_template(
            plain, chat_template=jinja, add_generation_prompt=True, tokenize=False
        )
    except TemplateError as e:
        roles = ", ".join(m.role for m in messages)
        raise DataError(f"The chat template refuses the messages ({roles}): {e}") from e
    assert isinstance(text, str)
    return text
