"""Chat templates of our own, one for each thing that templates do to a history, with a tokenizer for each.

They are short and made for tests; the families that behave alike are named beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from whet.data.calls import THINKING, ReplyForm, Thinking

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


@cache
def our_tokenizer(template: OurTemplate) -> PreTrainedTokenizerFast:
    """Byte-level byte pairs with a few merges, and the template's tokens; the same on every machine."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<pad>", *template.special]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(special) + 60,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator([PROSE], trainer)
    core.add_tokens(list(template.markers))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token=template.ends[0],
        bos_token=template.bos,
        extra_special_tokens=[t for t in template.special if t not in (template.ends[0], template.bos)],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template.text
    return tokenizer
