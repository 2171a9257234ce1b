"""Messages to tokens: templates, continuations that never touch history, and the templates that would."""

import re

import pytest
from tokenizers import processors

from encoded import encode_prompt, encode_response
from whet.config.schema import TokenizerConfig
from whet.data.chat import as_prompt, lacking_header, read_template
from whet.data.codec import MessageCodec
from whet.data.tokenizer import load_tokenizer
from whet.types import ConfigError, DataError, Message

LETTERS = "".join(map(chr, range(32, 127))) + "\n"
SYSTEM, USER = Message("system", "be brief"), Message("user", "2+2?")

CHATML = (
    "{% for m in messages %}{{ '<user>' + m.role + '\\n' + m.content + '<eos>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<user>assistant\\n' }}{% endif %}"
)
"""The shape of ChatML: the end token of a turn is followed by a line end that the policy does not sample."""

STRIPS_THOUGHTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=[LETTERS])


def tokens(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_messages_are_rendered_with_the_reply_header(tokenizer):
    text = "<system>be brief<eos><user>2+2?<eos><assistant>"
    assert encode_prompt(tokenizer, (SYSTEM, USER)) == tokens(tokenizer, text)
    assert encode_prompt(tokenizer, (USER,), system="be brief") == tokens(tokenizer, text)
    assert encode_prompt(tokenizer, "2+2?", chat=True) == tokens(tokenizer, "<user>2+2?<eos><assistant>")


@pytest.mark.parametrize(
    ("template", "lacking"),
    [
        (CHATML, ""),
        (CHATML.partition("{% if add")[0], "<user>assistant"),  # the second half was left out
        ("{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"  # Mistral's kind
         "{% else %} {{ m.content }}<eos>{% endif %}{% endfor %}", ""),
        ("{{ raise_exception('no') }}", ""),
        (None, ""),
    ],
)  # fmt: skip
def test_a_template_that_ignores_add_generation_prompt_lacks_the_header_of_a_reply(
    tokenizer, template, lacking, monkeypatch
):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert lacking_header(tokenizer) == lacking


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ '{0.__class__.__mro__}'.format(messages).missing.x }}",
        "{{ cycler.__init__.__globals__.os.mkdir('PLACE') }}",
        "{% for f in [raise_exception] %}{{ f.__globals__['__builtins__']['open']('PLACE', 'w') }}{% endfor %}",
    ],
)
def test_a_chat_template_of_a_model_reaches_nothing_but_the_messages(tokenizer, escape, tmp_path):
    place = tmp_path / "made"
    with pytest.raises(DataError, match="The chat template refuses the messages"):
        encode_prompt(tokenizer, (USER,), template=escape.replace("PLACE", str(place)))
    assert not place.exists()
    (said,) = [Message("user", "{{ 7 * 7 }} {0.__class__}")]
    assert tokenizer.decode(encode_prompt(tokenizer, (said,))).startswith(
        "<user>{{ 7 * 7 }} {0.__class__}<eos>"
    )


def test_plain_text_is_encoded_as_it_is(tokenizer):
    assert tokenizer.decode(encode_prompt(tokenizer, "word> \n")) == "word> \n"


def test_plain_text_gets_the_begin_token_where_the_tokenizer_puts_one_but_no_end_token():
    tokenizer = load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=[LETTERS])
    tokenizer.bos_token = "<system>"
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<system> $A <eos>", special_tokens=[("<system>", bos), ("<eos>", eos)]
    )
    plain = tokens(tokenizer, "ab")
    assert tokenizer("ab")["input_ids"] == [bos, *plain, eos]
    assert encode_prompt(tokenizer, "ab") == [bos, *plain]
    assert encode_prompt(tokenizer, "<system>ab") == [bos, *plain]  # as of a rendered template: no second one
    assert encode_prompt(tokenizer, "") == encode_prompt(tokenizer, "<system>") == [bos]
    assert encode_prompt(tokenizer, (USER,)) == tokens(tokenizer, "<user>2+2?<eos><assistant>")
    assert encode_response(tokenizer, "ab") == [*plain, eos]


def test_chat_false_refuses_what_needs_a_template():
    with pytest.raises(ConfigError, match="a prompt of messages needs"):
        as_prompt((USER,), chat=False)
    with pytest.raises(ConfigError, match="a system message needs"):
        as_prompt("text", chat=False, system="s")
    assert as_prompt("text", chat=False) == "text"


def test_two_system_messages_are_refused():
    with pytest.raises(DataError, match="already has a system message"):
        as_prompt((SYSTEM, USER), system="again")


def test_a_template_comes_from_text_or_a_file(tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text("Q: {{ messages[0].content }} A:")
    for template in ("Q: {{ messages[0].content }} A:", str(tmp_path / "t.jinja")):
        assert encode_prompt(tokenizer, (USER,), template=template) == tokens(tokenizer, "Q: 2+2? A:")
    with pytest.raises(ConfigError, match="neither Jinja text"):
        read_template(str(tmp_path / "other.jinja"))


def test_messages_without_a_template_are_refused_with_the_remedy():
    tokenizer = load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=["a"])
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"no chat template.*tokenizer\.chat_template.*plain text"):
        encode_prompt(tokenizer, (USER,))


def test_a_template_that_refuses_the_messages_is_named(tokenizer):
    with pytest.raises(DataError, match=r"refuses the messages \(system, user\): roles must alternate"):
        encode_prompt(tokenizer, (SYSTEM, USER), template="{{ raise_exception('roles must alternate') }}")


def encode_turn(tokenizer, existing, messages, template=None):
    """What follows a reply whose text is "it is"."""
    kept = tokenizer.chat_template
    try:
        tokenizer.chat_template = template or kept
        conversation = [USER, Message("assistant", "it is"), *messages]
        return MessageCodec(tokenizer).encode_observation(existing, conversation, len(messages))
    finally:
        tokenizer.chat_template = kept


@pytest.mark.parametrize("template", [None, CHATML], ids=["built", "chatml"])
@pytest.mark.parametrize(
    "new", [[Message("user", "and 3+3?")], [Message("tool", "4"), Message("user", "so?")]]
)
def test_a_continuation_equals_tokenising_the_whole_conversation(tokenizer, template, new):
    first = encode_prompt(tokenizer, (SYSTEM, USER), template=template)
    so_far = first + encode_response(tokenizer, "it is 4")
    whole = encode_prompt(tokenizer, (SYSTEM, USER, Message("assistant", "it is 4"), *new), template=template)
    more = encode_turn(tokenizer, so_far, new, template=template)
    assert so_far + more == whole
    again = so_far + more + encode_response(tokenizer, "<think>\nhm\n</think>\n\n6")
    last = encode_turn(tokenizer, again, new, template=template)
    history = (
        SYSTEM,
        USER,
        Message("assistant", "it is 4"),
        *new,
        Message("assistant", "<think>\nhm\n</think>\n\n6"),
    )
    assert again + last == encode_prompt(tokenizer, (*history, *new), template=template)


@pytest.mark.parametrize("template", [None, CHATML], ids=["built", "chatml"])
def test_a_reply_that_was_cut_gets_its_end_token_from_the_continuation(tokenizer, template):
    first = encode_prompt(tokenizer, (USER,), template=template)
    cut = first + encode_response(tokenizer, "it is")[:-1]
    new = [Message("user", "go on")]
    whole = encode_prompt(tokenizer, (USER, Message("assistant", "it is"), *new), template=template)
    assert cut + encode_turn(tokenizer, cut, new, template=template) == whole


def test_history_keeps_its_own_tokens_where_the_tokenizer_would_choose_others():
    texts = ["hello hello hello 2+2?"] * 4
    tokenizer = load_tokenizer(TokenizerConfig(build="bpe", vocab_size=300), model_path=None, texts=texts)
    sampled = [i for letter in "hello" for i in tokens(tokenizer, letter)]
    assert sampled != tokens(tokenizer, "hello")
    so_far = [*encode_prompt(tokenizer, (USER,)), *sampled, tokenizer.eos_token_id]
    both = so_far + encode_turn(tokenizer, so_far, [USER])
    assert tokenizer.decode(both) == "<user>2+2?<eos><assistant>hello<eos><user>2+2?<eos><assistant>"
    assert both[: len(so_far)] == so_far


def test_a_template_that_rewrites_history_is_refused(tokenizer):
    assert encode_turn(tokenizer, [5], [USER], template=STRIPS_THOUGHTS) is not None
    drops = "{{ messages[-1].content }}<assistant>"
    assert encode_turn(tokenizer, [5], [USER], template=drops) is None


def test_a_template_whose_turns_run_together_is_refused():
    tokenizer = load_tokenizer(
        TokenizerConfig(build="bpe", vocab_size=300), model_path=None, texts=["rst rst rst q"] * 4
    )
    glued = "{% for m in messages %}{% if loop.index > 2 %}st{% endif %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match="joins a reply with the text after it"):
        encode_turn(tokenizer, tokens(tokenizer, "r"), [USER], template=glued)


def test_a_turn_without_messages_is_refused(tokenizer):
    with pytest.raises(DataError, match="at least one"):
        encode_turn(tokenizer, [5], [])


def test_a_reply_needs_an_end_token():
    tokenizer = load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=["a"])
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-text token"):
        encode_response(tokenizer, "a")


def test_only_an_end_token_counts_as_the_end_of_a_reply(tokenizer):
    lines = "{% for m in messages %}{{ m.content + '\\n' }}{% endfor %}"
    cut = tokens(tokenizer, "2+2?\nit is\n")
    assert tokenizer.decode(encode_turn(tokenizer, cut, [USER], template=lines)) == "\n2+2?\n"


# ---------------------------------------------------------------- arguments of the template


THINKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{{ style.mood if style is defined }}{% endif %}"
)
"""Says something else where enable_thinking is false, as Qwen3's does."""


def with_arguments(arguments, template=THINKS):
    cfg = TokenizerConfig(build="chars", chat_template=template, chat_template_kwargs=arguments)
    return load_tokenizer(cfg, model_path=None, texts=[LETTERS])


def test_the_templates_variables_have_the_configs_values():
    said = "<user>2+2?<eos><assistant>"
    for arguments, more in (
        ({}, ""),
        ({"enable_thinking": True}, ""),
        ({"enable_thinking": False}, "<think></think>"),
        ({"style": {"mood": 'it\'s "%}" \\n {{x}}'}}, 'it\'s "%}" \\n {{x}}'),
        ({"enable_thinking": False, "style": {"mood": "!"}}, "<think></think>!"),
    ):
        tokenizer = with_arguments(arguments)
        assert tokenizer.decode(encode_prompt(tokenizer, (USER,))) == said + more


def test_later_turns_have_the_values_too():
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'user' %}{{ mark }}{% endif %}<eos>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = with_arguments({"mark": "!"}, template)
    turn = encode_turn(tokenizer, [tokenizer.eos_token_id], [USER])
    assert tokenizer.decode(turn) == "<user>2+2?!<eos><assistant>"


def test_an_argument_is_a_default_that_the_exported_tokenizer_keeps(tmp_path):
    with_arguments({"enable_thinking": False}).save_pretrained(tmp_path)
    again = load_tokenizer(TokenizerConfig(path=str(tmp_path)), model_path=None)
    plain = [{"role": "user", "content": "a"}]
    text = again.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    assert text == "<user>a<eos><assistant><think></think>"
    other = again.apply_chat_template(plain, add_generation_prompt=True, tokenize=False, enable_thinking=True)
    assert other == "<user>a<eos><assistant>"


@pytest.mark.parametrize(
    "template", ["\n  x{{ y }}", "\n{% if y %}\n  {% endif %} z", "  {% if y %}a\n{% endif %}"]
)
def test_arguments_change_nothing_else_in_the_template(template):
    given = with_arguments({"y": 5}, template)
    plain = [{"role": "user", "content": "a"}]
    without = load_tokenizer(
        TokenizerConfig(build="chars", chat_template=template), model_path=None, texts=["a"]
    )
    assert given.apply_chat_template(plain, tokenize=False) == without.apply_chat_template(
        plain, tokenize=False, y=5
    )


def test_an_argument_that_no_template_reads_is_refused():
    """A word of the template is not enough: `role` and `mood` are attributes there, and what a template sets itself
    before it reads it stays what the template says."""
    for name in ("enable_thoughts", "style.mood", "mood", "role", "user"):
        with pytest.raises(
            ConfigError, match=rf"tokenizer.chat_template_kwargs.{re.escape(name)}: the chat template has no"
        ):
            with_arguments({name: "!"})
    with pytest.raises(ConfigError, match="fixed: the chat template has no variable of this name"):
        with_arguments({"fixed": 1}, "{% set fixed = 2 %}{{ fixed }}{{ messages }}")


# ---------------------------------------------------------------- the beginning of a reply


def test_a_reply_goes_on_from_its_prefix(tokenizer):
    (chat,) = [as_prompt((USER,), system="s", reply_prefix="It is ")]
    assert chat == (Message("system", "s"), USER, Message("assistant", "It is "))
    text = "<system>s<eos><user>2+2?<eos><assistant>It is "
    assert tokenizer.decode(encode_prompt(tokenizer, chat)) == text
    assert encode_prompt(tokenizer, chat) == tokens(tokenizer, text)
    assert as_prompt("2+2? ", reply_prefix="It is") == "2+2? It is"
    assert as_prompt("2+2?", chat=True, reply_prefix="A") == (USER, Message("assistant", "A"))
    with pytest.raises(DataError, match="but the source has a `reply_prefix` too"):
        as_prompt(chat, reply_prefix="It")
