"""Checks of the data and the rewards of a run before training: which would fail, and why."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from whet.config.chosen import Chosen
from whet.config.load import Loaded
from whet.config.schema import Config, EnvironmentConfig, RewardConfig
from whet.config.source_faults import in_words_of, of_source
from whet.config.sources import rewards_by_source, verifiers
from whet.data.recognise import holds_texts, recognised
from whet.data.rows import read_rows
from whet.data.tasks import TaskStream, texts
from whet.data.tokenizer import load_tokenizer
from whet.envs.env import EnvFault, EnvRestarted, EnvStep, World
from whet.envs.hosts import EnvHosts
from whet.envs.several import names, one_of_each
from whet.envs.work import RunWork
from whet.judges import judges_of
from whet.rehearsal.findings import Finding, fails, left_open, works
from whet.rehearsal.shrink import few, real_tokenizer, small_order, stand_in
from whet.rewards.combine import RewardSet, score
from whet.types import Group, Message, Rollout, Task, WhetError, given_tokens

ROWS = 5000
"""Rows of a source that are checked."""
TRIED = 8
"""Tasks that every reward is tried on."""


@dataclass
class Probed:
    """The findings before the trial."""

    findings: list[Finding] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    """Sources that cannot be read, as 'stage/train/0'."""
    broken: set[str] = field(default_factory=set)
    """Rewards that cannot be called."""
    untried: set[str] = field(default_factory=set)
    """Rewards without rows; they may need columns that only the real rows have."""
    worldless: set[str] = field(default_factory=set)
    """Stages whose environment cannot be played."""
    tasks: dict[str, list[Task]] = field(default_factory=dict)
    """A few training tasks of each stage."""


def probe(loaded: Loaded) -> Probed:
    """Read and tokenise every source of every stage; try every reward on real rows."""
    out = Probed()
    read: dict[str, tuple[list[Task], str]] = {}
    for index, (name, cfg) in enumerate(zip(loaded.names, loaded.stages)):
        for part in ("train", "demonstrations", "eval"):
            for n, source in enumerate(getattr(cfg.data, part)):
                known = repr((source, cfg.data.max_prompt_tokens, cfg.data.overlong, holds_texts(cfg, part)))
                if known not in read:
                    read[known] = _source(out, loaded, index, part, n)
                tasks, why = read[known]
                if why:
                    out.lost[f"{name}/{part}/{n}"] = why
                if part == "train":
                    out.tasks.setdefault(name, []).extend(tasks)
    named = verifiers(loaded.stages)
    scored: dict[str, tuple[Config, str, list[Task]]] = {}
    for name, cfg in zip(loaded.names, loaded.stages):
        chosen = rewards_by_source(cfg.data)
        for reward in cfg.rewards:
            known = repr((reward, cfg.rewards[reward]))
            if known not in scored or not scored[known][2]:  # by the rows of the first stage that has some
                own = [t for t in out.tasks.get(name, []) if reward in chosen.get(t.source, cfg.rewards)]
                scored[known] = cfg, reward, own
    for cfg, reward, tasks in scored.values():
        out.findings += _reward(out, cfg, reward, tasks, named)
    for name, cfg in zip(loaded.names, loaded.stages):
        if cfg.rollout.env is not None:
            out.findings += _environment(out, cfg, name, cfg.rollout.env, named)
    return out


# ---------------------------------------------------------------- data


def _source(out: Probed, loaded: Loaded, stage: int, part: str, n: int) -> tuple[list[Task], str]:
    """Read source n of a part of `data` of a stage. Returns its first tasks, and why it cannot be used, or ''."""
    cfg = loaded.stages[stage]
    source = getattr(cfg.data, part)[n]
    what = f"data.{part}[{n}] {source.name or source.path or source.function or ''}".strip()
    real = real_tokenizer(cfg) is not None
    data = cfg.data.model_copy(update={} if real else {"overlong": "filter", "max_prompt_tokens": 2**20})
    try:
        with in_words_of(loaded, stage), of_source(source):
            begin = source.model_copy(update={"limit": few(source.limit, ROWS)})
            begin = recognised(begin, read_rows(begin), texts=holds_texts(cfg, part))
            tokenizer_cfg = (
                cfg.tokenizer if real else cfg.tokenizer.model_copy(update={"build": "bpe", "path": None})
            )
            tokenizer = load_tokenizer(tokenizer_cfg, model_path=cfg.model.path, texts=texts([begin]))
            order = small_order(cfg) if part == "train" else Chosen("sequential", {})
            stream = TaskStream([begin], data, tokenizer=tokenizer, seed=cfg.seed, order=order)
            tasks = stream.next(min(stream.rows_per_epoch, ROWS))
    except WhetError as e:
        out.findings.append(fails(what, str(e)))
        return [], str(e)
    out.findings.append(works(what, _lengths(stream, tasks, real=real, limit=cfg.data.max_prompt_tokens)))
    return tasks[:TRIED], ""


def _lengths(stream: TaskStream, tasks: list[Task], *, real: bool, limit: int) -> str:
    lengths = np.array([len(t.token_ids) for t in tasks])
    left_out = ", ".join(
        f"{count} {name}" for name, count in stream.counts.items() if name not in ("rows", "kept") and count
    )
    said = f"{stream.counts['rows']} rows read, {stream.rows_per_epoch} usable" + (
        f" ({left_out})" if left_out else ""
    )
    if not real:
        return f"{said}; prompts of {lengths.mean():.0f} tokens on average under a stand-in tokenizer"
    p99 = np.percentile(lengths, 99)
    mean, longest = f"{lengths.mean():.0f}", lengths.max()
    return f"{said}; prompts {mean} tokens on average, 99 % within {p99:.0f}, longest {longest} of {limit}"


# ---------------------------------------------------------------- rewards


def _opened(rewards: Mapping[str, RewardConfig], cfg: Config, named: Sequence[str]) -> RewardSet:
    """Rewards with the run's limits. named: the verifiers of the config's sources."""
    return RewardSet.from_config(
        rewards,
        cfg.reward_workers,
        seed=cfg.seed,
        imports=cfg.imports,
        verifiers=named,
        open_judge=judges_of(cfg),
    )


def _reward(
    out: Probed, cfg: Config, name: str, tasks: list[Task], named: Sequence[str]
) -> Iterator[Finding]:
    """Call one reward on possible replies: the answer itself, an empty reply, and nonsense. tasks: of the sources that
    it scores. named: the verifiers of the config's sources."""
    reward = cfg.rewards[name]
    what = f"rewards.{name} ({reward.function or 'a model'})"
    if reward.model is not None and not (Path(reward.model.path).expanduser() / "config.json").is_file():
        out.untried.add(name)
        yield left_open(what, f"{reward.model.path} is not available here, so another reward replaces it")
        return
    try:
        with _opened({name: reward}, cfg, named) as rewards:
            if not tasks:
                out.untried.add(name)
                yield left_open(
                    what, "it loads; there are no rows to call it on, so another reward replaces it"
                )
                return
            started = time.monotonic()
            groups = asyncio.run(score([Group(t, _replies(t)) for t in tasks], rewards))
            took_s = time.monotonic() - started
    except WhetError as e:
        out.broken.add(name)
        yield fails(what, str(e))
        return
    replies = [r for g in groups for r in g.rollouts]
    if errors := [r.error for r in replies if r.error]:
        out.broken.add(name)
        yield fails(what, f"fails on {len(errors)} of {len(replies)} replies: {errors[0]}")
        return
    means = [float(np.mean([g.rollouts[n].reward for g in groups])) for n in range(3)]
    said = "the reference answer as the reply gets {:.3g}, an empty reply {:.3g}, nonsense {:.3g}".format(
        *means
    )
    yield works(
        what, f"{said} (means of {len(groups)} tasks, {1000 * took_s / len(replies):.0f} ms per call)"
    )


# ---------------------------------------------------------------- environments


def _environment(
    out: Probed, cfg: Config, stage: str, env: EnvironmentConfig, named: Sequence[str]
) -> Iterator[Finding]:
    """Play one task, of several environments one of each, with one empty reply. A reward that cannot be called here has
    a stand-in. named: the verifiers of the config's sources."""
    what = f"rollout.env ({env.make})"
    hosts: EnvHosts | None = None
    try:
        hosts = EnvHosts(env, imports=cfg.imports)
        if not (tasks := out.tasks.get(stage, [])):
            yield left_open(what, "it loads; there are no rows to play it on")
            return
        here = {n: stand_in(r) if n in out.broken | out.untried else r for n, r in cfg.rewards.items()}
        with _opened(here, cfg, named) as rewards:
            found = one_of_each(env, tasks)
            if unplayed := ", ".join(name for name in names(env) if name not in found):
                yield left_open(f"{what} {unplayed}", "it loads; there are no rows to play it on")
            for name, task in found.items():
                each = f"{what} {name}".strip()
                told, tools, step = asyncio.run(_turn(hosts, task, cfg, rewards))
                if step.fault is not None:
                    out.worldless.add(stage)
                yield (
                    fails(each, f"fault: {step.fault}")
                    if step.fault
                    else works(each, _answer(told, tools, step))
                )
    except (WhetError, EnvFault, EnvRestarted) as e:
        out.worldless.add(stage)
        yield fails(what, str(e))
    finally:
        if hosts is not None:
            hosts.close()


def _answer(told: list[Message], tools: list[str], step: EnvStep) -> str:
    end = "ends the episode" if step.done else f"is answered with {len(step.messages)} messages"
    named = f"; tools: {', '.join(tools)}" if tools else ""
    return f"{len(told)} messages at first; an empty reply gets {step.reward} and {end}{named}"


async def _turn(
    hosts: EnvHosts, task: Task, cfg: Config, rewards: RewardSet
) -> tuple[list[Message], list[str], EnvStep]:
    """The first messages, the names of the tools, the answer to an empty reply."""

    async def ask(path: object, messages: list[Message], sampling: object) -> Message:
        return Message("assistant", "")

    played = hosts.make(task, World(0, ask, work=RunWork(rewards, cfg).of(task, 0)))
    try:
        async with asyncio.timeout(3 * hosts.cfg.timeout_s + 10 + cfg.rollout.timeout_s):
            told = await played.first()
            return told, [tool.name for tool in played.tools], await played.step(Message("assistant", ""))
    finally:
        await played.close()


def _replies(task: Task) -> tuple[Rollout, ...]:
    answer = task.answer if isinstance(task.answer, str) else str(task.answer)
    return tuple(
        _reply(task, n, text) for n, text in enumerate((answer, "", "\u00e9\u0000 }{ \\boxed{ 1/0 </answer>"))
    )


def _reply(task: Task, index: int, text: str) -> Rollout:
    mask = [*[0] * len(task.token_ids), 1]
    return Rollout.one_strand(
        task=task,
        index=index,
        **given_tokens([*task.token_ids, 0], mask) | {"versions": np.array(mask, np.int32) - 1},
        finish_reason="stop",
        text=text,
    )
