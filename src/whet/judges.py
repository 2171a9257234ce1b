"""Judges that are models of the run: a chat model, whose own engine answers the questions of `whet.rewards.judge`.

Its answers depend on the question alone: neither other rollouts nor an interruption change them (on a CPU, to the bit).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet import seeds
from whet.config import schema
from whet.config.judges import JUDGES, cache_bytes, longest
from whet.config.sizes import folder_shape
from whet.data.timed import decoded
from whet.guard import pulse
from whet.guard.jail import CallResult, Failure
from whet.rewards.combine import OpenJudge
from whet.rewards.judge import Asking, asking
from whet.types import ConfigError, DataError, Group, Request, Sampling, Task, WhetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from whet.rollout.native.engine import NativeEngine

MOST_AT_ONCE = 64
"""Questions in the engine; it takes as many as its cache holds."""

Place = tuple[int, int]
"""A rollout: number of its group, and its number there."""


@dataclass(frozen=True)
class _Question:
    """Replies to a task that are judged in one question."""

    task: Task
    replies: tuple[str, ...]
    places: tuple[Place, ...]
    key: int


@dataclass(frozen=True)
class JudgeModel:
    """A reward whose judge is a model; its weights are read at `load`, or else at the first question."""

    name: str
    cfg: schema.RewardModelConfig
    asking: Asking
    together: bool
    """It compares the replies to a task."""
    kwargs: Mapping[str, Any]
    """Variables of its chat template."""
    seed: int
    machine: schema.MachineConfig

    @cached_property
    def loaded(self) -> tuple[PreTrainedTokenizerFast, NativeEngine]:
        try:
            return _load(self.cfg, self.machine)
        except WhetError as error:
            raise type(error)(f"rewards.{self.name}.model: {error}") from error

    def load(self, day: date | None = None) -> None:
        """Read the weights now. day: as in `load_tokenizer`. ConfigError or CheckpointError names the key and the
        folder."""
        from whet.data.chat import set_day

        tokenizer, _ = self.loaded
        if day is not None:
            set_day(tokenizer, day)

    async def score(self, groups: Mapping[int, Group]) -> dict[Place, CallResult]:
        """The results of the rollouts that have no error, by their places."""
        questions = [q for at, group in groups.items() for q in self._questions(at, group)]
        answered = await asyncio.gather(*map(self._answered, questions))
        return {place: result for found in answered for place, result in found.items()}

    def _questions(self, at: int, group: Group) -> list[_Question]:
        whole = [(n, rollout) for n, rollout in enumerate(group.rollouts) if not rollout.error]
        parts = [whole] if self.together and whole else [[one] for one in whole]
        return [
            _Question(
                group.task,
                tuple(r.text for _, r in part),
                tuple((at, n) for n, _ in part),
                seeds.key(self.seed, "reward", self.name, group.task.uid, part[0][1].index),
            )
            for part in parts
        ]

    async def _answered(self, question: _Question) -> dict[Place, CallResult]:
        try:
            found = await self._asked(question)
        except (ValueError, DataError) as error:
            failure = CallResult(failure=Failure("bad_value", str(error)))
            return dict.fromkeys(question.places, failure)
        return {place: CallResult(parts=parts) for place, parts in zip(question.places, found)}

    async def _asked(self, question: _Question) -> list[dict[str, float]]:
        """The scores of the replies. ValueError or DataError for a row that makes no question, a question that is too
        long, and an answer in which nothing can be read."""
        from whet.data.chat import encode_prompts

        tokenizer, engine = self.loaded
        messages = self.asking.messages(question.task, question.replies, together=self.together)
        (prompt,) = encode_prompts(tokenizer, [messages], kwargs=[self.kwargs])
        room = engine.max_context - len(prompt)
        if room < 1:
            raise ValueError(
                f"the judge's question has {len(prompt)} tokens, no room for an answer in {engine.max_context}"
            )
        sampling = Sampling(
            temperature=self.asking.temperature,
            max_tokens=min(self.asking.max_tokens, room),
            key=question.key,
        )
        name = f"judge-{self.name}-{question.key}"
        done = await engine.generate(Request(id=name, session=name, prompt=tuple(prompt), sampling=sampling))
        pulse.beat("scoring")
        said = decoded(tokenizer, done.token_ids, skip_special_tokens=True)
        cut = done.finish_reason == "length"
        return self.asking.scores(said, len(question.places), together=self.together, cut=cut)


def judges_of(cfg: schema.Config) -> OpenJudge:
    """What makes the judges of a config."""
    return partial(opened, machine=cfg.machine)


def opened(name: str, reward: schema.RewardConfig, seed: int, *, machine: schema.MachineConfig) -> JudgeModel:
    """The judge of a reward that has a function and a model. ConfigError for arguments that it does not have."""
    assert reward.model is not None
    arguments = dict(reward.arguments)
    body = arguments.pop("body", {})
    together = JUDGES[reward.function or ""]
    try:
        if not isinstance(body, dict) or body.keys() - {"chat_template_kwargs"}:
            raise ConfigError("body: of a model of the run it has chat_template_kwargs alone")
        how = asking(together, arguments)
    except ConfigError as error:
        raise ConfigError(f"rewards.{name}.arguments: {error}") from None
    return JudgeModel(
        name, reward.model, how, together, body.get("chat_template_kwargs") or {}, seed, machine
    )


def _load(
    cfg: schema.RewardModelConfig, machine: schema.MachineConfig
) -> tuple[PreTrainedTokenizerFast, NativeEngine]:
    import torch

    from whet.data.chat import read_template
    from whet.data.tokenizer import load_tokenizer
    from whet.models import kernels
    from whet.models.load import build, end_tokens
    from whet.rollout.native.engine import NativeEngine

    path = Path(cfg.path).expanduser()
    tokenizer = load_tokenizer(schema.TokenizerConfig(path=cfg.tokenizer), model_path=str(path))
    if cfg.chat_template is not None:
        tokenizer.chat_template = read_template(cfg.chat_template)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"path={path}: its tokenizer has no chat template; give chat_template (Jinja text or a file)"
        )
    device = machine.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = cfg.dtype or ("float32" if device == "cpu" else "bfloat16")
    module = build(
        schema.ModelConfig(path=str(path)),
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=0,
        device=device,
        dtype=getattr(torch, dtype),
    ).requires_grad_(False)
    shape = folder_shape(path, {})
    most = longest(cfg, shape)
    if shape.max_positions and most > shape.max_positions:
        raise ConfigError(
            f"max_tokens={most}: {path} has {shape.max_positions} positions; give at most {shape.max_positions}"
        )
    engine = NativeEngine(
        module,
        kernels.load(machine.kernels),
        end_token_ids=end_tokens(module, tokenizer),
        max_context=most,
        max_num_seqs=MOST_AT_ONCE,
        cache_mb=-(-cache_bytes(cfg, device=device, dtype=dtype) >> 20),
    )
    return tokenizer, engine
