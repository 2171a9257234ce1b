"""Messages and text to token ids. Text becomes tokens once: a later turn adds tokens and changes none."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from datetime import date
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2.exceptions import TemplateError

from whet.data.templates import CUT, MARK, rendered, variables
from whet.data.timed import decoded, encoded
from whet.inputs import MOST_CONFIG_BYTES, read_text
from whet.types import ConfigError, DataError, Json, Message, Reply, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Prompt = str | tuple[Message, ...]
"""Chat messages (the chat template is applied) or plain text (it is not)."""


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


_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", *_TOKENS)
"""Variables that `render` gives."""


Templates = str | dict[str, str]
"""A tokenizer's chat template, or several by name."""


def with_arguments(
    templates: Templates, arguments: Mapping[str, Json], *, key: str = "tokenizer.chat_template_kwargs"
) -> Templates:
    """The template with `arguments` as default values of its variables; of several each with those that it uses.

    They become part of it, so that every prompt and every later turn is rendered with them. key: what errors call
    them. ConfigError for a name that no template uses.
    """
    several = {"default": templates} if isinstance(templates, str) else templates
    out = dict(several)
    for name, value in reversed([*arguments.items()]):
        using = [n for n, jinja in several.items() if name in variables(jinja)]
        if not using:
            raise ConfigError(
                f"{key}.{name}: the chat template has no variable of this name, so the key would have no effect; leave "
                "it out or correct it."
            )
        out |= {n: _default(name, value, key) + out[n] for n in using}
    return out["default"] if isinstance(templates, str) else out


def _default(name: str, value: Json, key: str) -> str:
    if name in _GIVEN:
        raise ConfigError(
            f"{key}: {name} is set by the run itself, so the key would have no effect; leave it out."
        )
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
        if prompt and prompt[0].role == "system":
            raise DataError(
                "The prompt already has a system message, but the source has a `system_prompt` too; leave one out."
            )
        prompt = (Message("system", system), *prompt)
    if reply_prefix:
        if prompt[-1].role == "assistant":
            raise DataError(
                "The prompt already ends with the start of a reply, but the source has a `reply_prefix` too; leave "
                "one out."
            )
        prompt = (*prompt, Message("assistant", reply_prefix))
    return prompt


def with_kwargs(tokenizer: Tokenizer, kwargs: Mapping[str, Json]) -> Tokenizer:
    """The tokenizer with a task's variables of the chat template; the task's count before those of the run.

    DataError for a tokenizer without a template, and for a name that the template does not use.
    """
    return (
        _with_kwargs(tokenizer, json.dumps(tokenizer.chat_template), json.dumps(kwargs))
        if kwargs
        else tokenizer
    )


@lru_cache(64)
def _with_kwargs(tokenizer: Tokenizer, template: str, kwargs: str) -> Tokenizer:
    """template: the tokenizer's own as JSON, so that another one is not taken for it."""
    if not (jinja := json.loads(template)):
        raise DataError("The row has chat_template_kwargs, but the tokenizer has no chat template.")
    out = copy(tokenizer)
    try:
        out.chat_template = with_arguments(jinja, json.loads(kwargs), key="chat_template_kwargs")
    except ConfigError as e:
        raise DataError(str(e)) from e
    return out


def control_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    """Control tokens by their text: those that the tokenizer names (bos_token ...), and all that its files add as
    special, as Llama 3's headers and Phi's roles, which `all_special_tokens` leaves out."""
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids)
    return _with_added(tokenizer, len(tokenizer), tuple(named))


@lru_cache(64)
def _with_added(tokenizer: Tokenizer, size: int, named: tuple[tuple[str, int], ...]) -> Mapping[str, int]:
    """size: its tokens, so that one with more is not taken for it."""
    added = {str(t.content): i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    return added | dict(named)


def encode_prompts(
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    tools: Sequence[Sequence[ToolSpec]] = (),
    kwargs: Sequence[Mapping[str, Json]] = (),
) -> list[list[int]]:
    """The tokens that a reply to each prompt follows. tools, kwargs: of each prompt, see `with_kwargs`.

    Messages: rendered with the header of the assistant's turn, then encoded as they stand. A last message of the
    assistant is the beginning of the reply: it follows the header and is not closed. Plain text: encoded as it
    stands, after a begin-of-text token where the tokenizer itself would put one; a text that begins with its own, as a
    rendered template does, gets no second one.
    """
    control = control_tokens(tokenizer)
    told = zip(prompts, tools or [()] * len(prompts), kwargs or [{}] * len(prompts), strict=True)
    texts = []
    for prompt, specs, own in told:
        if isinstance(prompt, str):
            if specs or own:
                raise DataError(
                    "The prompt is plain text, but the row has tools or chat_template_kwargs, which only a chat "
                    "template reads: set data.chat to true, or the source's `tools` and `chat_template_kwargs` to null."
                )
            texts.append(prompt)
            continue
        _check_told(tokenizer, specs)
        texts.append(lead(with_kwargs(tokenizer, own), neutral(control, prompt), tools=specs))
    ids = encode_rendered(tokenizer, texts)
    opening = [i for i in tokenizer("")["input_ids"] if i == tokenizer.bos_token_id][:1]
    bare = [isinstance(p, str) and x[:1] != opening for p, x in zip(prompts, ids)]
    return [opening + x if without else x for x, without in zip(ids, bare)]


def _check_told(tokenizer: Tokenizer, tools: Sequence[ToolSpec]) -> None:
    """DataError where the policy would not read what the row's tools are."""
    if tools and not re.search(r"\btools\b", template_of(tokenizer, tools=True) or ""):
        raise DataError(
            "The row has tools, but the chat template does not render tools: use one that does "
            "(tokenizer.chat_template), or set the source's `tools` to null."
        )


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Texts as is: nothing is added before or after."""
    if not texts:
        return []
    ids_alone = {"return_attention_mask": False, "return_token_type_ids": False}
    found = encoded(tokenizer, texts, add_special_tokens=False, verbose=False, **ids_alone)
    ids: list[list[int]] = found["input_ids"]
    return ids


def parted(control: Collection[str], value: Json) -> Json:
    """A JSON value with the texts of control tokens in it parted."""
    pattern = _any_of(tuple(control))

    def part(found: re.Match[str]) -> str:
        text = found.group()
        return text * 2 if text == CUT else f"{text[0]}{CUT}{text[1:]}"

    def safe(value: Json) -> Json:
        if isinstance(value, str):
            return pattern.sub(part, value)
        if isinstance(value, dict):
            return {safe(key): safe(entry) for key, entry in value.items()}
        return [safe(entry) for entry in value] if isinstance(value, list) else value

    return safe(value)


@lru_cache(64)
def _any_of(control: tuple[str, ...]) -> re.Pattern[str]:
    several = sorted((text for text in control if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, (*several, CUT))))


def neutral(control: Collection[str], messages: Sequence[Message], *, replies: bool = True) -> list[Message]:
    """The messages with the texts of control tokens in them parted: what a message says never becomes one. The text
    stays as it is (`encode_rendered`). The beginning of a reply at the end is the user's own, and so is every reply
    with `replies` false: their control tokens stay."""

    def one(message: Message, *, last: bool) -> Message:
        if message.role == "assistant" and (last or not replies):
            return replace(message, content=message.content.replace(CUT, CUT * 2))
        role = {"role": message.role}  # the template's own word
        return Message.from_json(parted(control, message.to_json()) | role)

    return [one(message, last=n == len(messages)) for n, message in enumerate(messages, 1)]


def rest_of(rendered: str, begin: str) -> str | None:
    """What follows the text `begin` in a rendered template. None where it begins otherwise."""
    pieces = _pieces(rendered)
    for n, piece in enumerate(pieces):
        if len(begin) < len(piece) or n == len(pieces) - 1:
            rest = [piece[len(begin) :], *pieces[n + 1 :]]
            return CUT.join(p.replace(CUT, CUT * 2) for p in rest) if piece.startswith(begin) else None
        if not begin.startswith(piece):
            return None
        begin = begin[len(piece) :]
    return None


def _pieces(rendered: str) -> list[str]:
    """The text between the cuts."""
    return [p.replace(CUT * 2, CUT) for p in re.split(f"(?<!{CUT}){CUT}(?!{CUT})", rendered)]


def encode_rendered(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """`encode_texts` of rendered templates, whose messages were made `neutral`."""
    if not any(CUT in text for text in texts):
        return encode_texts(tokenizer, texts)
    parted = [*map(_pieces, texts)]
    begun = encode_texts(tokenizer, [first for first, *_ in parted])
    more = iter(_continued(tokenizer, [piece for _, *rest in parted for piece in rest]))
    return [[*first, *(t for _ in rest for t in next(more))] for first, (_, *rest) in zip(begun, parted)]


def _continued(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """`encode_texts` of what follows other text: without the space that some tokenizers put before each text
    (Llama 2)."""
    plain, (mark, one, both) = (
        encode_texts(tokenizer, texts),
        encode_texts(tokenizer, [CUT, "a", f"{CUT}a"]),
    )
    if both == [*mark, *one]:
        return plain
    after = encode_texts(tokenizer, [CUT + text for text in texts])
    return [ids[len(mark) :] if ids[: len(mark)] == mark else alone for ids, alone in zip(after, plain)]


def end_of_reply(tokenizer: Tokenizer, prompt: Prompt, ends: Collection[int]) -> int:
    """The token that ends a demonstration: in a chat the one that the template writes after a reply, as in the earlier
    turns of a conversation, if it is one of `ends`, which end the model's own replies; else the end-of-text token."""
    written = (
        None if isinstance(prompt, str) else _written_end(tokenizer, json.dumps(tokenizer.chat_template))
    )
    end = written if written in ends else tokenizer.eos_token_id
    if end is None:
        raise ConfigError("The tokenizer has no end-of-text token (eos_token), so a reply could not end.")
    return end


@lru_cache(64)
def _written_end(tokenizer: Tokenizer, template: str) -> int | None:
    """The first token of what the template writes after a reply. template: the tokenizer's own as JSON, so that
    another one is not taken for it."""
    try:
        ids = encode_texts(tokenizer, [_closing(tokenizer)])[0]
    except DataError:  # a template that refuses such a short conversation
        return None
    return ids[0] if ids else None


def encode_reply(
    tokenizer: Tokenizer,
    prompt: Prompt,
    reply: Reply,
    tools: Sequence[ToolSpec] = (),
    *,
    ends: Collection[int] = (),
) -> list[int]:
    """A reply to a prompt as the policy would have sampled it, which may have calls and reasoning, with its end token;
    given tokens as they are. ends: see `end_of_reply`."""
    if isinstance(reply, tuple):
        return list(reply)
    text = reply_text(tokenizer, prompt, reply, tools)
    ids = (encode_texts if isinstance(reply, str) else encode_rendered)(tokenizer, [text])[0]
    return [*ids, end_of_reply(tokenizer, prompt, ends)]


def reply_text(tokenizer: Tokenizer, prompt: Prompt, reply: Reply, tools: Sequence[ToolSpec] = ()) -> str:
    """A reply as the policy would write it, without its end. Of a message with calls or reasoning: what the chat
    template writes after the header of the reply. DataError for a template that does not, or leaves a part out."""
    if isinstance(reply, tuple):
        return decoded(tokenizer, reply)
    if isinstance(reply, str):
        return reply
    if isinstance(prompt, str) or prompt[-1].role == "assistant":
        raise DataError(
            "The reply has tool calls or reasoning, which only the chat template can render: use a prompt of "
            "messages, and no reply_prefix."
        )
    control = control_tokens(tokenizer)
    safe = neutral(control, [*prompt, reply], replies=False)
    before, whole = (
        lead(tokenizer, safe[:-1], tools=tools),
        render(tokenizer, safe, tools=tools, header=False),
    )
    if not whole.startswith(before):
        raise DataError(
            "The chat template does not place a reply with tool calls or reasoning right after the header of a reply. "
            "A policy trained on such a reply would be sampled from a different prompt.\n  header:   "
            f"{before[-60:]!r}\n  rendered: {whole[max(0, len(before) - 60) : len(before) + 40]!r}"
        )
    rest, closing = whole[len(before) :], _closing(tokenizer)
    if lost := _lost(tokenizer, safe, tools, whole):
        raise DataError(
            f"The chat template leaves out the {lost} of the reply, so it would not be learned: use a template that "
            "writes it (tokenizer.chat_template), write it into the content as the policy should, or leave it out."
        )
    ends = (closing, *sorted(control, key=len, reverse=True))
    return next((rest[: -len(end)] for end in ends if end and rest.endswith(end)), rest)


def _lost(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[ToolSpec], rendered: str
) -> str | None:
    """What of a last reply its template leaves out: without it the same is rendered."""
    *before, reply = messages
    parts = {
        "reasoning": replace(reply, reasoning=None) if reply.reasoning else reply,
        "tool calls": replace(reply, tool_calls=()),
    }
    for name, without in parts.items():
        try:
            same = without != reply and render(tokenizer, [*before, without], tools=tools, header=False)
        except DataError:  # a template may refuse a reply that says nothing
            continue
        if same == rendered:
            return name
    return None


def lacking_header(tokenizer: Tokenizer) -> str:
    """What the template writes between a question and its reply, where it writes it for no reply that is still to come:
    it ignores `add_generation_prompt`. '' for every other template, and without one."""
    asked = [Message("user", "q")]
    try:
        before = render(tokenizer, asked)
        if before != render(tokenizer, asked, header=False):
            return ""
        whole = render(tokenizer, [*asked, Message("assistant", MARK)], header=False)
    except (ConfigError, DataError):  # no template, or one that refuses such a short conversation
        return ""
    return whole.removeprefix(before).partition(MARK)[0].strip() if whole.startswith(before) else ""


def _closing(tokenizer: Tokenizer) -> str:
    """What the template writes after a reply that ends a conversation."""
    said = render(tokenizer, [Message("user", "q"), Message("assistant", MARK)], header=False)
    return said.rpartition(MARK)[2]


def encode_whole(tokenizer: Tokenizer, texts: Sequence[Reply]) -> list[list[int]]:
    """Texts without prompts: each encoded as a plain-text prompt, with the end-of-text token after it if its own last
    token is another one (as TRL 1.16 for language modeling). Given tokens stay as they are."""
    end = [end_of_reply(tokenizer, "", ())]
    written = iter(encode_prompts(tokenizer, [text for text in texts if isinstance(text, str)]))
    whole = [(list(text), []) if isinstance(text, tuple) else (next(written), end) for text in texts]
    return [ids if ids[-1:] == last else [*ids, *last] for ids, last in whole]


def encode_history(
    tokenizer: Tokenizer, prompt: Sequence[Message], tools: Sequence[ToolSpec] = ()
) -> tuple[list[int], list[int]]:
    """`encode_prompts` of a conversation, and which of its tokens are replies (1) with their end tokens.

    Each reply is tokenised by itself after what the policy would have been given at that point, so the tokens are
    those of a rollout of several turns, and their text is exactly what the template makes of the conversation. That
    needs a template that only appends: DataError for one that rewrites what came before or does not end a reply
    with a special token. White space around a reply goes if the template drops it.
    """
    _check_told(tokenizer, tools)
    control = control_tokens(tokenizer)
    safe = neutral(control, prompt, replies=False)
    replies = [i for i, m in enumerate(prompt[:-1]) if m.role == "assistant"]
    leads = [lead(tokenizer, safe[:i], tools=tools) for i in (*replies, len(safe))]
    texts = [reply_text(tokenizer, tuple(prompt[:i]), as_reply(safe[i]), tools) for i in replies]
    heads = [_head(before, after, text) for text, (before, after) in zip(texts, pairwise(leads))]
    said = [head[len(before) :] for before, head in zip(leads, heads)]
    told = [leads[0], *(after[len(head) :] for head, after in zip(heads, leads[1:]))]
    told_ids, said_ids = encode_rendered(tokenizer, told), encode_rendered(tokenizer, said)
    token_ids, mask = list(told_ids[0]), [0] * len(told_ids[0])
    for reply, after in zip(said_ids, told_ids[1:]):
        if after[0] not in control.values():
            raise DataError(
                "The chat template has no end token after a reply, so a policy trained on it could not end a reply: "
                "add one in tokenizer.chat_template, or train on the last reply only (data.learn_turns)."
            )
        token_ids += [*reply, *after]
        mask += [1] * (len(reply) + 1) + [0] * (len(after) - 1)
    return token_ids, mask


def as_reply(message: Message) -> str | Message:
    """A reply that is more than its text stays a message: the chat template says how it is written."""
    return message if message.tool_calls or message.reasoning is not None else message.content


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


def lead(tokenizer: Tokenizer, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()) -> str:
    """The text that the reply follows: a last message of the assistant is its beginning."""
    if messages and messages[-1].role == "assistant":
        return render(tokenizer, messages[:-1], tools=tools) + messages[-1].content
    return render(tokenizer, messages, tools=tools)


_DAY = "whet_day"


def set_day(tokenizer: Tokenizer, day: date) -> None:
    """From now on its chat template is told that this is today, wherever it is rendered: a run goes on for days."""
    setattr(tokenizer, _DAY, day)


def template_of(tokenizer: Tokenizer, *, tools: bool = False) -> str | None:
    """Its own chat template: of several the one named default, or tool_use where there are tools (as transformers)."""
    jinja = tokenizer.chat_template
    if isinstance(jinja, dict):
        jinja = jinja.get("tool_use" if tools and "tool_use" in jinja else "default")
    return jinja if isinstance(jinja, str) else None


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[ToolSpec] = (),
    header: bool = True,
) -> str:
    """The conversation as text; header: ending with the header of the assistant's turn."""
    jinja = template_of(tokenizer, tools=bool(tools))
    if jinja is None:
        raise ConfigError(
            f"The tokenizer {tokenizer.name_or_path!r} has no chat template, but the prompt is a list of "
            "chat messages. Give a template in tokenizer.chat_template (Jinja text or a file), or give prompts as "
            "plain text."
        )
    plain = [_with_aliases(m.to_json()) for m in messages]
    told = [tool.to_json() for tool in tools] or None
    given: dict[str, Json] = {
        **tokenizer.special_tokens_map,
        "messages": plain,
        "tools": told,
        "documents": None,
    }
    write = partial(rendered, jinja, day=getattr(tokenizer, _DAY, None), add_generation_prompt=header)
    try:
        text = write(**given)
        text.encode()  # half a surrogate pair is no text
    except Exception as e:  # a template is foreign code: it can fail in any way
        roles = ", ".join(m.role for m in messages[:6]) + (", ..." if len(messages) > 6 else "")
        raise DataError(f"The chat template refuses the messages ({roles}): {_said(e)}") from e
    for role in sorted({m.role for m in messages} - ROLES):
        if "role" in jinja and not _knows(role, text, write, given):
            raise DataError(
                f"The chat template does not know the role {role!r}: it leaves such messages out, or writes them as "
                f"those of another role. Expected {', '.join(ROLE_NAMES)}; rename it in the data, or give a template "
                "that writes it (tokenizer.chat_template)."
            )
    return text


ROLE_NAMES = ("system", "user", "assistant", "tool")
"""The roles that templates are written for."""
ROLES = frozenset(ROLE_NAMES)


def _knows(role: str, text: str, write: Callable[..., str], given: Mapping[str, Json]) -> bool:
    """Whether a template that makes `text` of messages with such a role writes the role's name, or makes another text
    of messages with a role that no template knows."""
    other = "whet7role"
    messages = [m | {"role": other} if m["role"] == role else m for m in given["messages"]]
    try:
        unknown = write(**{**given, "messages": messages})
    except Exception:  # noqa: BLE001  a template is foreign code; with this role it did not fail
        return True
    return unknown != text


def _with_aliases(message: dict[str, Json]) -> dict[str, Json]:
    """A message with another name for what was thought, which gpt-oss's template reads (as transformers 5.23)."""
    thought = message.get("reasoning_content")
    return message if thought is None else message | {"thinking": thought}


def _said(error: Exception) -> str:
    """What went wrong in a template, and in which line of it."""
    at = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
    line = getattr(error, "lineno", None) or (at[-1] if at else None)
    text = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return f"{text[:500]} (line {line} of the template)" if line else text[:500]
