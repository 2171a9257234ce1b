"""Self-distillation: rollouts after prompts that also show a successful reply of the group (SDPO, arXiv:2601.20802).

The token ids of a reply are kept; only the prompt before them changes. Shape letters: R rollouts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from whet.batch import Batch, pack
from whet.config.sections.algorithm import RepromptConfig
from whet.data.chat import Prompt, encode_prompts
from whet.data.codec import MessageCodec
from whet.types import DataError, Group, Message, Metrics, Rollout, Strand, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_PLACE = re.compile(r"\{(prompt|solution|feedback|reply)\}")


@dataclass(frozen=True, kw_only=True)
class Reprompter:
    """What the reference sees in place of the rollouts' own prompts."""

    cfg: RepromptConfig
    tokenizer: Tokenizer
    positions: int | None
    """Of the model. None: without a limit."""
    codec: MessageCodec | None = None
    """Reads the thoughts of a reply, where they are left out (`cfg.thoughts`)."""

    def __call__(self, batch: Batch, groups: Sequence[Group]) -> tuple[Batch, Metrics]:
        """The batch of these groups with `reprompted`, and with `count_R` 0 for rollouts that are shown nothing or have
        too long a prompt; and the shares of rollouts and groups that are shown a reply or a text."""
        rollouts = [(g, r) for g in groups for r in g.rollouts]
        shown = [self._shown(g, r) for g, r in rollouts]
        prompts = [prompt for prompt in shown if prompt is not None]
        tasks = [r.task for (_, r), prompt in zip(rollouts, shown) if prompt is not None]
        tools, kwargs = [t.tools for t in tasks], [t.chat_template_kwargs for t in tasks]
        encoded = iter(encode_prompts(self.tokenizer, prompts, tools=tools, kwargs=kwargs))
        new_R = [None if prompt is None else next(encoded) for prompt in shown]
        fits_R = [ids is not None and self._fits(ids, r) for ids, (_, r) in zip(new_R, rollouts)]
        seen = iter(
            _after(r, ids) if fits and ids is not None else r
            for ids, fits, (_, r) in zip(new_R, fits_R, rollouts)
        )
        after = [Group(g.task, tuple(next(seen) for _ in g.rollouts)) for g in groups]
        solved = sum(any(self._succeeds(r) for r in g.rollouts) for g in groups)
        told = {
            "train/reprompted_frac": sum(fits_R) / max(len(rollouts), 1),
            "train/reprompt_overlong": float(len(prompts) - sum(fits_R)),
            "group/success_frac": solved / max(len(groups), 1),
        }
        count_R = torch.tensor(fits_R, dtype=torch.float32)
        return replace(batch, reprompted=pack(after), count_R=count_R), told

    def _succeeds(self, rollout: Rollout) -> bool:
        return rollout.reward is not None and rollout.reward >= self.cfg.success_reward

    def _fits(self, prompt: Sequence[int], rollout: Rollout) -> bool:
        reply = len(rollout.strand.token_ids) - _begin(rollout.strand)
        return len(prompt) <= self.cfg.max_prompt_tokens and (
            self.positions is None or len(prompt) + reply <= self.positions
        )

    def _shown(self, group: Group, rollout: Rollout) -> Prompt | None:
        """The new prompt of a rollout. None: there is nothing to show."""
        found = (
            self._reply(r)
            for r in group.rollouts
            if self._succeeds(r) and (self.cfg.own_success or r.index != rollout.index)
        )
        reply, feedback = next(found, None), self._feedback(rollout.task)
        if reply is None and feedback is None:
            return None
        values = {
            "solution": "" if reply is None else filled(self.cfg.solution_template, {"reply": reply}),
            "feedback": ""
            if feedback is None
            else filled(self.cfg.feedback_template, {"feedback": feedback}),
        }
        return _rewritten(rollout.task, self.cfg.template, values)

    def _reply(self, rollout: Rollout) -> str:
        """What the policy said, with the beginning that its prompt gave."""
        prompt = rollout.task.prompt
        chat = not isinstance(prompt, str) and bool(prompt)
        begun = prompt[-1].content if chat and prompt[-1].role == "assistant" else ""  # type: ignore[union-attr]
        if self.codec is None:
            return begun + rollout.text
        codec = self.codec.of(rollout.task.chat_template_kwargs)
        strand = rollout.strand
        said = strand.token_ids[_begin(strand) :].tolist()
        if said and said[-1] in codec.ends:
            del said[-1]
        return codec.parse_reply(said, rollout.task.tools, begun).content

    def _feedback(self, task: Task) -> str | None:
        """The text of the row's column. DataError for a row without the column, or with another value than a text."""
        column = self.cfg.feedback
        if column is None:
            return None
        if column not in task.extra:
            raise DataError(
                f"Task {task.uid} of source {task.source!r} has no column {column!r} (algorithm.reprompt.feedback); "
                f"further columns of the row: {', '.join(sorted(task.extra)) or 'none'}."
            )
        match task.extra[column]:
            case None:
                return None
            case str() as text:
                return text if text.strip() else None
            case other:
                raise DataError(
                    f"Task {task.uid} of source {task.source!r}: column {column!r} (algorithm.reprompt.feedback) is a "
                    f"{type(other).__name__}, expected a text or null."
                )


def open_reprompter(cfg: RepromptConfig, tokenizer: Tokenizer, *, positions: int | None) -> Reprompter:
    """ConfigError where thoughts are left out and the tokenizer has no chat template, by which they are read."""
    codec = None if cfg.thoughts else MessageCodec(tokenizer)
    return Reprompter(cfg=cfg, tokenizer=tokenizer, positions=positions, codec=codec)


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with values in their places. What a value says is never read as a place."""
    return _PLACE.sub(lambda place: values.get(place[1], place[0]), template)


def _rewritten(task: Task, template: str, values: Mapping[str, str]) -> Prompt:
    """The prompt with the template in place of the last message of the user. DataError where there is none."""
    if isinstance(task.prompt, str):
        return filled(template, {"prompt": task.prompt, **values})
    asked = [n for n, message in enumerate(task.prompt) if message.role == "user"]
    if not asked:
        raise DataError(
            f"Task {task.uid} of source {task.source!r}: its prompt has no message of the user, which "
            "algorithm.reprompt.template would replace."
        )
    at = asked[-1]
    text = filled(template, {"prompt": task.prompt[at].content, **values})
    return (*task.prompt[:at], Message("user", text), *task.prompt[at + 1 :])


def _begin(strand: Strand) -> int:
    """Its first token after the prompt. The first ones of a reply may have no loss (groups.min_shared_prefix), as those
    of the prompt."""
    return strand.turns[0].start if strand.turns else strand.prompt_tokens


def _after(rollout: Rollout, prompt: Sequence[int]) -> Rollout:
    """The rollout's tokens after another prompt."""
    strand, begin, n = rollout.strand, _begin(rollout.strand), len(prompt)
    zeros = np.zeros(n, np.float32)
    moved = Strand(
        token_ids=np.concatenate([np.array(prompt, np.int32), strand.token_ids[begin:]]),
        mask=np.concatenate([np.zeros(n, np.bool_), strand.mask[begin:]]),
        logprobs=np.concatenate([zeros, strand.logprobs[begin:]]),
        sample_logprobs=np.concatenate([zeros, strand.sample_logprobs[begin:]]),
        versions=np.concatenate([np.full(n, -1, np.int32), strand.versions[begin:]]),
    )
    return replace(rollout, strands=(moved,))
