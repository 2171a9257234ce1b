"""The prompts of SDPO's teacher: TRL's builder gets the same replies, rewards and templates as whet's `Reprompter`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from peers.table import Row
from whet.batch import pack
from whet.config.schema import RepromptConfig, TokenizerConfig
from whet.data.chat import encode_prompts
from whet.data.reprompt import open_reprompter
from whet.data.tokenizer import load_tokenizer
from whet.prove.cases import Case
from whet.prove.numbers import Numbers
from whet.prove.peers import theirs
from whet.types import Group, Json, Message, Rollout, Task

BUILDER = "trl.experimental.sdpo.sdpo_trainer:SuccessfulRolloutTeacherContextBuilder"
SIZE = 4
"""Rollouts of a group."""
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<say>{% endif %}"
DEFAULTS = (
    "use_successful_as_teacher", "environment_feedback_only_without_solution", "remove_thinking_from_demonstration",
    "include_environment_feedback", "max_reprompt_len", "reprompt_template", "solution_template", "feedback_template",
)  # fmt: skip
"""Settings of TRL that the rows do not change. Whet's templates are its own defaults, too."""


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    letters = "".join(map(chr, range(32, 127))) + "\n"
    return load_tokenizer(
        TokenizerConfig(build="chars", chat_template=CHAT), model_path=None, texts=[letters]
    )


def groups(case: Case, *, chat: bool) -> list[Group]:
    """Six groups of random replies with rewards 0, 1/2 and 1; in half of the tasks with a hint."""
    rng, found = np.random.default_rng(case.seed), []
    for uid in range(6):
        text = f"task {uid}"
        prompt = (Message("system", "be brief"), Message("user", text)) if chat else text
        hint = f"hint {uid}" if uid % 2 else None
        ids = encode_prompts(tokenizer(), [prompt])[0]
        task = Task(uid=uid, source="s", prompt=prompt, token_ids=tuple(ids), extra={"hint": hint})
        replies = ["".join(rng.choice(list("abc {}"), rng.integers(1, 6))) for _ in range(SIZE)]
        found.append(Group(task, tuple(_rollout(task, n, text, rng) for n, text in enumerate(replies))))
    return found


def _rollout(task: Task, index: int, text: str, rng: np.random.Generator) -> Rollout:
    reply = tokenizer()(text, add_special_tokens=False)["input_ids"]
    n, m = len(task.token_ids), len(reply)
    zeros = [0.0] * (n + m)
    return Rollout.one_strand(
        task=task,
        index=index,
        token_ids=[*task.token_ids, *reply],
        mask=[0] * n + [1] * m,
        logprobs=zeros,
        sample_logprobs=zeros,
        versions=[-1] * n + [0] * m,
        finish_reason="stop",
        text=text,
        reward=float(rng.choice([0.0, 0.5, 1.0], p=[0.6, 0.2, 0.2])),
    )


def build(made: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """TRL's inputs of the teacher, of rows that count, and which do."""
    rollouts = [r for g in groups(case, chat=bool(keys["chat"])) for r in g.rollouts]
    replies = [torch.tensor(r.strand.token_ids[r.strand.mask].tolist()) for r in rollouts]
    pad = tokenizer().pad_token_id
    ids = torch.nn.utils.rnn.pad_sequence(replies, batch_first=True, padding_value=pad)
    exists = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in replies], batch_first=True)
    prompts = [r.task.prompt if isinstance(r.task.prompt, str) else _plain(r.task.prompt) for r in rollouts]
    rewards = torch.tensor([r.reward for r in rollouts])
    trainer = _trainer(keys)
    hints = [r.task.extra["hint"] for r in rollouts]
    output = {"completion_ids": ids, "completion_mask": exists}
    found = made(trainer).build(output, prompts, rewards, hints)
    counts_R = found["self_distillation_mask"]
    kept = found["teacher_attention_mask"].bool() & (counts_R[:, None] > 0)
    return {"counts": counts_R.double(), "tokens": found["teacher_input_ids"][kept].double()}


def _plain(messages: tuple[Message, ...]) -> list[dict[str, Json]]:
    return [{"role": m.role, "content": m.content} for m in messages]


def _trainer(keys: Mapping[str, Json]) -> Any:
    """A stand-in for TRL's trainer on one device, with the defaults of its config."""
    fields = theirs("trl", "trl.experimental.sdpo.sdpo_config:SDPOConfig").__dataclass_fields__
    args = {name: fields[name].default for name in DEFAULTS}

    def tokenized(prompts: list[Any]) -> list[list[int]]:
        said = [
            p if isinstance(p, str) else tuple(Message(m["role"], m["content"]) for m in p) for p in prompts
        ]
        return encode_prompts(tokenizer(), said)

    return SimpleNamespace(
        args=SimpleNamespace(**args | dict(keys)),
        accelerator=SimpleNamespace(
            device="cpu", process_index=0, gather=lambda x: x, pad_across_processes=lambda x, **how: x
        ),
        model=SimpleNamespace(training=True),
        num_generations=SIZE,
        _tokenizer=tokenizer(),
        processing_class=tokenizer(),
        _tokenize_prompts_untruncated=tokenized,
    )


def ours(row: Row, case: Case) -> Numbers:
    """Whet's tokens that the reference computes, of rollouts that count, and which do."""
    found = groups(case, chat=bool(row.keys["chat"]))
    reprompt = open_reprompter(RepromptConfig(**dict(row.native or {})), tokenizer(), positions=None)
    batch, _ = reprompt(pack(found), found)
    assert batch.count_R is not None
    seen = batch.of_reference
    kept_N = (batch.count_R > 0)[seen.rollout_N]
    return {"counts": batch.count_R.double(), "tokens": seen.token_ids_N[kept_N].double()}


def prompts(keys: Mapping[str, Json], native: Mapping[str, Json], *, chat: bool) -> Row:
    told = {"success_reward_threshold": 1.0, "dont_reprompt_on_self_success": True, **keys}
    return Row(
        peer="trl",
        what=", ".join(
            ["prompts of SDPO's teacher", "chat" if chat else "text", *(f"{k}={v}" for k, v in keys.items())]
        ),
        theirs=BUILDER,
        call=build,
        ours=ours,
        keys={**told, "chat": chat},
        native=native,
        covers=("loss gkd",),
        kinds=("one turn",),
    )


ROWS = (
    *(prompts({}, {}, chat=chat) for chat in (False, True)),
    prompts({"dont_reprompt_on_self_success": False}, {"own_success": True}, chat=True),
    prompts({"success_reward_threshold": 0.5}, {"success_reward": 0.5}, chat=False),
    prompts({"include_environment_feedback": True}, {"feedback": "hint"}, chat=True),
)
