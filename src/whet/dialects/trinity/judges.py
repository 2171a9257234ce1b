"""Trinity-RFT's workflows in which another model judges the replies: its first auxiliary model, which the run has or
asks over the network, or one that the workflow names."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from whet.dialects.row import Reference, Values
from whet.dialects.trinity.values import Native, Own, entries, section, text
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
    named: bool = False
    """The workflow's arguments name a server, and not the auxiliary models."""
    low: float | None = None
    """The rating that is worth 0, where it is not the judge's lowest."""


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


RUBRIC_OF_SERVER = replace(RUBRIC, named=True, low=0.0)
NAMES = ("judge_model_name", "judge_api_base_url_env", "judge_api_key_env")
"""Arguments of a workflow that names its judge."""

ANSWER_S = 600.0
"""For an answer over the network, as the client that Trinity asks with."""


def judge(values: Values, kind: TrinityJudge, own: Own, what: str) -> Native:
    """The reward of the judge. An answer that it cannot read counts 0, as in Trinity."""
    models = entries(values, AUXILIARY_MODELS)
    arguments: Native = {"question": kind.question, "temperature": kind.temperature, "unread": 0.0}
    if kind.low is not None:
        arguments["low"] = kind.low
    if kind.named:
        return {"function": kind.function, "arguments": arguments | _named(own, what)}
    path = text(models[0], "model_path") if models else None
    outside = bool(models) and is_outside(models[0])
    if path is None and not outside:
        raise ConfigError(
            f"{AUXILIARY_MODELS}[0].model_path: must be given: the folder of the model that judges."
        )
    first = models[0]
    if (longest := first.get("max_response_tokens")) is not None:
        arguments["max_tokens"] = longest
    if (thinks := first.get("enable_thinking")) is not None:
        arguments["body"] = {"chat_template_kwargs": {"enable_thinking": thinks}}
    if outside:
        return {"function": kind.function, "arguments": arguments | _outside(first)}
    model: Native = {"path": path}
    if (whole := first.get("max_model_len")) is not None:
        model = {**model, "max_tokens": whole}
    return {"function": kind.function, "model": model, "arguments": arguments}


def is_outside(model: Own) -> bool:
    """Whether a model is asked over the network."""
    return bool(model.get("external_model_config.enable"))


def _outside(model: Own) -> Native:
    at, told = f"{AUXILIARY_MODELS}[0].external_model_config", section(model, "external_model_config")
    name = text(told, "model_name")
    if name is None:
        raise ConfigError(f"{at}.model_name: must be given: the name of the model at its server.")
    return _server(name, text(told, "base_url_env"), text(told, "api_key_env"))


def _named(own: Own, what: str) -> Native:
    model, url, key = (text(section(own, "workflow_args"), name) for name in NAMES)
    if model is None:
        raise ConfigError(
            f"{what}.workflow_args: {NAMES[0]} must be given: the name of the model at its server."
        )
    return _server(model, url, key)


def _server(model: str, url: str | None, key: str | None) -> Native:
    """Its address and its key stay in the environment of the run."""
    return {
        "url": Reference(f"${{oc.env:{_variable(url or 'OPENAI_BASE_URL')}}}"),
        "model": model,
        "api_key": Reference(f"${{oc.env:{_variable(key or 'OPENAI_API_KEY')},null}}"),
        "timeout_s": ANSWER_S,
    }


def _variable(name: str) -> str:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
        raise ConfigError(f"of a judge: got {name!r}, expected the name of an environment variable.")
    return name
