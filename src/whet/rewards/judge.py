"""A language model as judge: it rates each reply (`judge`), or compares all replies to a task (`ruler`).

The judge is a server with OpenAI's interface, which these functions ask, or a model of the run (`rewards.NAME.model`),
which `whet.judges` asks the same questions. Comparing is RULER's way (OpenPipe's ART, 2025); rating by a rubric is
RaR-Implicit's (Rubrics as Rewards, arXiv:2507.17746). A reply may try to talk to the judge: it stands between marks,
and nothing in it is a part of a template, but no judge is safe from what it reads.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import aiohttp
from pydantic import PositiveFloat

from whet.config.urls import address_problems
from whet.guard.foreign import words
from whet.rewards.service import BUSY, post
from whet.tables import check_types, near
from whet.types import ConfigError, Json, Message, Task

_SYSTEM = (
    "You judge replies of a language model. Read the task, the reply, and what a good reply has to meet where that is "
    "given. Weigh briefly how well the reply does, then end with one line: Rating: NUMBER, a number from {low} "
    "(it meets nothing) to {high} (it meets everything)."
)
_SYSTEM_OF_ALL = (
    "You judge replies of language models. Read the task and the {count} replies to it. Compare them with each other: "
    "briefly weigh how well each one does, then end with one line, a list in brackets with a number from {low} "
    "(useless) to {high} (as good as can be) for each reply, in their order: [first, ..., last]."
)
_MOST_TOLD = 200
_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)"
_RATING = re.compile(
    rf"(?:rating|score)(?:[\s*]{{0,4}}\([^()]{{0,40}}\))?-?\W{{0,4}}?\s*({_NUMBER})(?![\d.]*\d)|\[\[\s*({_NUMBER})\s*\]\]",
    re.IGNORECASE,
)
"""As few marks as possible stand before the number, so that its sign and its point are its own; but a scale in
parentheses may, which is no rating."""
_LIST = re.compile(rf"\[\s*{_NUMBER}(?:\s*,\s*{_NUMBER})*\s*,?\s*\]")
_FIELD = re.compile(r"\{(prompt|response|responses|answer|rubric|count|low|high)\}")


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How a judge is asked, and what its answers are worth: arguments of both functions."""

    system: str | None = None
    """The system message, a template as `question` is. Default: what to do, and the line that is read."""
    question: str | None = None
    """A template of the user's message: {prompt}, {answer}, {rubric}, {count}, {low}, {high} and {response}, or
    {responses} where replies are compared. Default: task, reference answer and rubric where there are any, replies."""
    rubric: str | list[Json] | None = None
    """What a good reply has to meet: text, or a list of texts or of mappings with `description` and `weight`. Default:
    the row's column `rubric`, if it has one."""
    low: float = 1.0
    high: float = 10.0
    """The scale of the judge: `low` is the score 0, `high` the score 1."""
    unread: float | None = None
    """The score where no rating can be read in the judge's answer. None: the rollout is unscored."""
    max_tokens: int = 1024
    """Of the judge's answer; a model of the run has less where the question leaves less room."""
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.high < math.inf:
            raise ConfigError(f"low={self.low}, high={self.high}: expected two numbers, low below high")
        if self.max_tokens < 1 or self.temperature < 0:
            raise ConfigError("expected max_tokens >= 1 and temperature >= 0")

    def messages(self, task: Task, replies: Sequence[str], *, together: bool) -> tuple[Message, Message]:
        """The question about a reply, or about all."""
        rubric = listed(task.extra.get("rubric") if self.rubric is None else self.rubric)
        answer = "" if task.answer is None else str(task.answer)
        numbered = [f'<reply number="{n}">\n{reply}\n</reply>' for n, reply in enumerate(replies, 1)]
        values = {
            "prompt": as_text(task.prompt),
            "answer": answer,
            "rubric": rubric,
            "count": str(len(replies)),
            "low": f"{self.low:g}",
            "high": f"{self.high:g}",
            **({"responses": "\n\n".join(numbered)} if together else {"response": replies[0]}),
        }
        parts = [f"<task>\n{values['prompt']}\n</task>"]
        parts += [f"<reference>\n{answer}\n</reference>"] if answer else []
        parts += [f"<rubric>\n{rubric}\n</rubric>"] if rubric else []
        parts += numbered if together else [f"<reply>\n{replies[0]}\n</reply>"]
        system = self.system or (_SYSTEM_OF_ALL if together else _SYSTEM)
        user = "\n\n".join(parts) if self.question is None else filled(self.question, values)
        return Message("system", filled(system, values)), Message("user", user)

    def scores(self, said: str, count: int, *, together: bool, cut: bool = False) -> list[dict[str, float]]:
        """What the judge's answer gives each reply, from 0 to 1: its last rating, or its last list, of which numbers
        beyond the scale count as its ends. cut: the answer ended at its limit of tokens, so that none is its last:
        "Rating: 10" may be "Rating: 1", or what it weighs a verdict. ValueError where nothing can be read, unless
        `unread` is given."""
        found = None if cut else self._compared(said, count) if together else self._rated(said)
        told = self.unread is not None
        if found is not None:
            return [{"score": score, **({"read": 1.0} if told else {})} for score in found]
        if self.unread is None:
            if cut:
                raise ValueError(
                    f"the judge's answer was cut at its limit of tokens, max_tokens={self.max_tokens} or the room of "
                    f"its context; give it more, or ask for shorter answers: {words(said[-_MOST_TOLD:], _MOST_TOLD)!r}"
                )
            wanted = (
                f"a list of {count} numbers"
                if together
                else f"'Rating: NUMBER' from {self.low:g} to {self.high:g}"
            )
            raise ValueError(
                f"the judge's answer does not end with {wanted}: {words(said[-_MOST_TOLD:], _MOST_TOLD)!r}"
            )
        return [{"score": self.unread, "read": 0.0}] * count

    def _rated(self, said: str) -> list[float] | None:
        found = _RATING.findall(said)
        rating = float(found[-1][0] or found[-1][1]) if found else math.nan
        return [self._share(rating)] if self.low <= rating <= self.high else None

    def _compared(self, said: str, count: int) -> list[float] | None:
        lists = [[float(x) for x in re.findall(_NUMBER, each)] for each in _LIST.findall(said)]
        if not lists or len(lists[-1]) != count:
            return None
        return [self._share(min(max(x, self.low), self.high)) for x in lists[-1]]

    def _share(self, rating: float) -> float:
        return (rating - self.low) / (self.high - self.low)


ASKING = frozenset(each.name for each in fields(Asking))


def asking(together: bool, arguments: Mapping[str, Json]) -> Asking:
    """Of a function's arguments; where replies are compared the scale is from 0 to 1 by default. ConfigError for an
    argument that it does not have."""
    if unknown := sorted(arguments.keys() - ASKING):
        raise ConfigError(
            f"no argument {unknown[0]!r}{near(unknown[0], ASKING)}; it has: {', '.join(sorted(ASKING))}"
        )
    own = "responses" if together else "response"
    for name in ("system", "question"):
        for field in _FIELD.findall(str(arguments.get(name) or "")):
            if field.startswith("response") and field != own:
                raise ConfigError(f"{name}: {{{field}}} has no value here, {{{own}}} has")
    check_types(Asking, arguments, key="arguments", name="a judge")
    scale: dict[str, Any] = {"low": 0.0, "high": 1.0} if together else {}
    return Asking(**{**scale, **arguments})


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with its fields, none of which is looked for in what is put in."""
    return _FIELD.sub(lambda match: values[match[1]], template)


def listed(rubric: Json) -> str:
    """A rubric as text."""
    if rubric is None or isinstance(rubric, str):
        return rubric or ""
    if not isinstance(rubric, list):
        raise ValueError(f"the rubric is {type(rubric).__name__}, expected text or a list")
    lines = []
    for each in rubric:
        if isinstance(each, dict):
            weight = "" if each.get("weight") is None else f" (weight {each['weight']})"
            each = f"{each.get('description', '')}{weight}"
        lines.append(f"- {each}")
    return "\n".join(lines)


def as_text(prompt: str | tuple[Message, ...]) -> str:
    """A conversation without its system message; a single message without its role."""
    if isinstance(prompt, str):
        return prompt
    told = [m for m in prompt if m.role != "system"]
    if len(told) == 1:
        return told[0].content
    return "\n\n".join(f"{m.role}: {m.content}" for m in told)


# ---------------------------------------------------------------- a server


async def judge(response: str, task: Task, *, url: str, model: str, **arguments: Any) -> dict[str, float]:
    """The rating of the reply by a model, from 0 to 1.

    `url`: of a server with OpenAI's interface, up to /v1. `model`: its name there. `api_key`: sent as its bearer token.
    `timeout_s` (60): for an answer, with two repetitions where the server is busy. `body`: what else a request has, as
    chat_template_kwargs. Further arguments: see `Asking`. As many questions are asked at once as there are processes
    (reward_workers.count).
    """
    how, server = _parted(False, arguments)
    question = how.messages(task, [response], together=False)
    said, cut = await _asked(question, how, url=url, model=model, **server)
    return how.scores(said, 1, together=False, cut=cut)[0]


async def ruler(
    completions: Sequence[Json], task: Task, *, url: str, model: str, **arguments: Any
) -> list[dict[str, float]]:
    """The scores, from 0 to 1, of all replies to a task, which a model compares. Arguments as of `judge`; the scale is
    from 0 to 1."""
    how, server = _parted(True, arguments)
    replies = [reply_in(completion) for completion in completions]
    question = how.messages(task, replies, together=True)
    said, cut = await _asked(question, how, url=url, model=model, **server)
    return how.scores(said, len(replies), together=True, cut=cut)


def reply_in(completion: Json) -> str:
    """The text of a completion: of a conversation, what the policy said in it."""
    if isinstance(completion, str):
        return completion
    return "\n\n".join(str(m.get("content") or "") for m in completion if m.get("role") == "assistant")


def check_judge(arguments: Mapping[str, Any], *, together: bool = False) -> None:
    """ConfigError for an argument that `judge` does not have, or that cannot work."""
    _, server = _parted(together, {n: value for n, value in arguments.items() if n not in ("url", "model")})
    for said in address_problems(str(arguments.get("url", "")), token=server.get("api_key") is not None):
        raise ConfigError(f"url: {said}")


def check_ruler(arguments: Mapping[str, Any]) -> None:
    """The same for `ruler`."""
    check_judge(arguments, together=True)


def needs_s(arguments: Mapping[str, Any]) -> float:
    """The longest wait for an answer."""
    return float(arguments.get("timeout_s", _TIMEOUT_S)) + _MARGIN_S


_TIMEOUT_S = 60.0
_MARGIN_S = 1.0
_SERVER = ("api_key", "timeout_s", "body")


def _parted(together: bool, arguments: Mapping[str, Any]) -> tuple[Asking, dict[str, Any]]:
    """How it is asked, and whom."""
    server = {name: arguments[name] for name in _SERVER if name in arguments}
    check_types(_asked, server, key="arguments", name="a judge")
    return asking(together, {name: value for name, value in arguments.items() if name not in server}), server


async def _asked(
    question: Sequence[Message],
    how: Asking,
    *,
    url: str,
    model: str,
    api_key: str | None = None,
    timeout_s: PositiveFloat = _TIMEOUT_S,
    body: Mapping[str, Json] | None = None,
) -> tuple[str, bool]:
    """The judge's answer, and whether it was cut. ConnectionError where it gives none."""
    where = f"{url.rstrip('/')}/chat/completions"
    asked = {"model": model, "max_tokens": how.max_tokens, "temperature": how.temperature, **(body or {})}
    asked |= {"messages": [m.to_json() for m in question]}
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    limit = aiohttp.ClientTimeout(total=timeout_s)  # its own ends a request after 300 s
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession(timeout=limit) as session:
            said = await post(
                session, where, asked, what="the judge", headers=headers, again=BUSY, within_s=timeout_s
            )
    except TimeoutError:
        raise ConnectionError(f"the judge at {where} has not answered within {timeout_s:g} s") from None
    try:
        choice: Any = said["choices"][0]  # type: ignore[index, call-overload]
        return str(choice["message"]["content"] or ""), choice.get("finish_reason") == "length"
    except (AttributeError, TypeError, KeyError, IndexError):
        raise ConnectionError(
            f"the judge at {where} answered without choices: {words(str(said), _MOST_TOLD)}"
        ) from None
