"""Trinity-RFT's workflows in which another model judges the replies: its first auxiliary model."""

from __future__ import annotations

from dataclasses import dataclass

from whet.dialects.row import Values
from whet.dialects.trinity.values import Native, entries, text
from whet.types import ConfigError

AUXILIARY_MODELS = "explorer.auxiliary_models"
LABEL = "judge"
"""The name of its reward."""


@dataclass(frozen=True)
class TrinityJudge:
    """How a workflow asks its judge."""

    function: str
    temperature: float
    question: str


RULER = TrinityJudge(
    "ruler",
    1.0,  # Trinity names none, so its server takes the usual one
    "<task>\n{prompt}\n</task>\n\nEach reply has to think first, inside <think> and </think>, and give its result "
    "inside <answer> and </answer>.\n\n{responses}",
)
RUBRIC = TrinityJudge(
    "judge",
    0.0,
    "<task>\n{prompt}\n</task>\n\n<rubric>\n{rubric}\n</rubric>\n\n<reply>\n{response}\n</reply>",
)


def judge(values: Values, kind: TrinityJudge) -> Native:
    """The reward of the judge. An answer that it cannot read counts 0, as in Trinity."""
    models = entries(values, AUXILIARY_MODELS)
    path = text(models[0], "model_path") if models else None
    if path is None:
        raise ConfigError(
            f"{AUXILIARY_MODELS}[0].model_path: must be given: the folder of the model that judges."
        )
    own = models[0]
    arguments = {"question": kind.question, "temperature": kind.temperature, "unread": 0.0}
    if (longest := own.get("max_response_tokens")) is not None:
        arguments["max_tokens"] = longest
    if (thinks := own.get("enable_thinking")) is not None:
        arguments["body"] = {"chat_template_kwargs": {"enable_thinking": thinks}}
    model: Native = {"path": path}
    if (whole := own.get("max_model_len")) is not None:
        model = {**model, "max_tokens": whole}
    return {"function": kind.function, "model": model, "arguments": arguments}
