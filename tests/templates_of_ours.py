"""Chat templates of our own, one for each thing that templates do to a history, with a tokenizer for each.

They are short and made for tests; the families that behave alike are named beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from talks import DAY, Subject
from whet.data.calls import THINKING, ReplyForm, Thinking
from whet.data.chat import set_day
from whet.types import Message

FOLDER = Path(__file__).parent / "templates"

CHATML = ("<|turn|>", "<|over|>")
THINK = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
SEEK = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>", "<|begin_of_text|>")
INST = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")

QWEN = THINKING["<think>"]


@dataclass(frozen=True)
class OurTemplate:
    """A chat template, and what is true of it."""

    name: str
    """Of its file."""
    behaviour: str
    special: tuple[str, ...]
    """Its special tokens, in the order of their ids, from 1 (0 is <pad>)."""
    ends: tuple[str, ...]
    """Tokens that end a reply; the first is the tokenizer's eos_token."""
    form: ReplyForm
    markers: tuple[str, ...] = ()
    """Added tokens that are not special: those around thoughts and calls, as in most families."""
    bos: str | None = None
    opens: bool = False
    """The header of a reply opens a thought."""
    keeps_on_user: bool = True
    """A reply with a thought is rendered as it was sampled once the user has spoken again."""
    keeps_on_tool: bool = True
    """The same of a reply with a call, once the tool has answered."""
    end_in_history: str | None = None
    """The token in place of a reply's end token in a history, where that is another one; "" where there is none."""
    system: bool = True
    """It has a system role."""
    parallel: bool = True
    """A reply may have several calls."""
    beside: bool = True
    """A reply may have content beside a call."""

    @property
    def text(self) -> str:
        return (FOLDER / f"{self.name}.jinja").read_text()


TEMPLATES: tuple[OurTemplate, ...] = (
    OurTemplate(
        "append", "appends alone, tools and thoughts too (Qwen2.5; Qwen3 in a tool cycle)",
        CHATML, ("<|over|>",), ReplyForm("hermes", QWEN), (*THINK, *CALL),
    ),
    OurTemplate(
        "strips_thoughts", "a later message of the user removes earlier thoughts; results merge (Qwen3)",
        CHATML, ("<|over|>",), ReplyForm("hermes", QWEN), (*THINK, *CALL), keeps_on_user=False,
    ),
    OurTemplate(
        "keeps_thoughts", "keeps every thought, and the header opens one (DeepSeek's calls)",
        SEEK, ("<｜end▁of▁sentence｜>",), ReplyForm("deepseek", Thinking(*THINK, "", "")), THINK,
        bos="<｜begin▁of▁sentence｜>", opens=True,
    ),
    OurTemplate(
        "keep_switch", "removes earlier thoughts unless preserve_thinking (Qwen3.6)",
        CHATML, ("<|over|>",), ReplyForm("hermes", QWEN), (*THINK, *CALL), keeps_on_user=False,
    ),
    OurTemplate(
        "next_opener", "a reply's end token is the opener of the next role (GLM-4.5)",
        ("<|head|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"), ReplyForm("glm"), CALL, end_in_history="",
    ),
    OurTemplate(
        "harmony", "another end token in the history, and thoughts go once there is a final answer (gpt-oss)",
        HARMONY, ("<|return|>", "<|call|>"), ReplyForm("gpt_oss"), keeps_on_user=False, end_in_history="<|end|>",
    ),
    OurTemplate(
        "date", "the date is in the system part (Llama 3, gpt-oss); calls are plain JSON",
        CHATML, ("<|over|>",), ReplyForm("json"), parallel=False, beside=False,
    ),
    OurTemplate(
        "tools_in_user", "tools are in the first turn of the user, one raw JSON call a turn (Llama 3)",
        LLAMA, ("<|eot_id|>",), ReplyForm("llama3"), bos="<|begin_of_text|>", parallel=False,
    ),
    OurTemplate(
        "inst", "no system role and no header of a reply (Mistral)",
        ("<s>", "</s>", *INST, "[TOOL_CALLS]"), ("</s>",), ReplyForm("mistral"), bos="<s>", system=False,
    ),
    OurTemplate(
        "xml_calls", "XML calls, and the header opens a thought (Qwen3.5)",
        CHATML, ("<|over|>",), ReplyForm("qwen3_coder", QWEN), (*THINK, *CALL), opens=True,
    ),
    OurTemplate(
        "drops_results", "silently drops what tools answer, and the system message (many, with images of tools)",
        CHATML, ("<|over|>",), ReplyForm("hermes"), CALL, system=False,
    ),
    OurTemplate(
        "renames_results", "a call's id that is used again renames an old result (Inkling)",
        ("<s>", "</s>", *INST, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]"), ("</s>",),
        ReplyForm("mistral_v11"), bos="<s>",
    ),
)  # fmt: skip

PROSE = "The tool told the policy what the weather is in Paris and in New York today: 21 degrees and a little rain. "


def _byte_pairs(special: list[str]) -> Tokenizer:
    """Byte-level byte pairs with a few merges (Qwen, Llama 3, DeepSeek, gpt-oss)."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(special) + 60,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator([PROSE], trainer)
    return core


def _pieces(special: list[str]) -> Tokenizer:
    """Pieces of the likeliest split, and bytes for what has none (as sentencepiece makes them; Gemma)."""
    words = sorted({"▁" + word.strip(".,:") for word in PROSE.split()} | {"ing", "er", "ti", "▁t", "in", "▁"})
    letters = sorted(set(PROSE) | set("{}[]<>|/\\\"':,._-=()#") - {" "})
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = [(token, 0.0) for token in (*special, "<unk>")] + [(byte, -30.0) for byte in octets]
    vocab += [(piece, -2.0 - n / 100) for n, piece in enumerate(words)]
    vocab += [(letter, -9.0) for letter in letters if letter != " " and letter not in words]
    core = Tokenizer(models.Unigram(vocab, unk_id=len(special), byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return core


def _spaced(special: list[str]) -> Tokenizer:
    """The same with a space before each text, which decoding takes away (Llama 2, Mistral before v3)."""
    core = _pieces(special)
    core.normalizer = None
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return core


KINDS = {"byte pairs": _byte_pairs, "pieces": _pieces, "spaced": _spaced}
"""Kinds of tokenizers."""


@cache
def our_tokenizer(template: OurTemplate, kind: str = "byte pairs") -> PreTrainedTokenizerFast:
    """A tokenizer with the template's tokens; the same on every machine."""
    core = KINDS[kind](["<pad>", *template.special])
    core.add_tokens([AddedToken(marker, normalized=False) for marker in template.markers])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token=template.ends[0],
        bos_token=template.bos,
        extra_special_tokens=[t for t in template.special if t not in (template.ends[0], template.bos)],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template.text
    set_day(tokenizer, DAY.date())
    return tokenizer


def our_subject(template: OurTemplate, kind: str) -> Subject:
    """The template for a talk."""

    def end_of(reply: Message) -> str:
        if template.name == "next_opener":
            return "<|observation|>" if reply.tool_calls else "<|user|>"
        return "<|call|>" if template.form.channels and reply.tool_calls else template.ends[0]

    return Subject(
        name=f"{template.name}, {kind}",
        tokenizer=our_tokenizer(template, kind),
        form=template.form,
        ends=template.ends,
        end_of=end_of,
        opens=template.opens,
        system=template.system,
        parallel=template.parallel,
        beside=template.beside,
        appends=template.keeps_on_user and template.keeps_on_tool and template.end_in_history in (None, ""),
        exact=kind != "spaced",
    )
