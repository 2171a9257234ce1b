"""Problems of a stage, and keys that were set but have no effect. This module derives no values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from operator import attrgetter

from whet.config import (
    checks_parallel,
    checks_run,
    deepspeed,
    environments,
    groups,
    mtp,
    rules,
    scratch,
    simulated,
)
from whet.config.chosen import setting_problems
from whet.config.evaluation import (
    all_sampling,
    eval_problems,
    longest_reply,
    longest_rollout,
    observation_tokens,
    writes_replies,
)
from whet.config.faults import by_stage, named
from whet.config.functions import ORDERS, PRIORITIES
from whet.config.keys import Path, dotted, lookup
from whet.config.learning import train_problems
from whet.config.recipes import Problem, Resolved, elsewhere, examined, is_optional
from whet.config.schema import Config, SamplingConfig
from whet.config.sizes import shape
from whet.config.sources import (
    order_of,
    reference_problems,
    reward_problems,
    sampling_problems,
    source_problems,
    template_problem,
)
from whet.config.tree import STAGE_SECTIONS, get, leaves
from whet.types import ConfigError, Json

PRIORITY = "buffer.replay.priority"


def consequences(cfg: Config) -> Iterator[Problem]:
    """What a user should know of the config of one stage: (key, note)."""
    algorithm, _ = examined(cfg.algorithm)
    return rules.notes(cfg, algorithm) if algorithm is not None else iter(())


def hard_problems(cfg: Config) -> list[Problem]:
    """All problems of the config of one stage."""
    algorithm, problems = examined(cfg.algorithm)
    problems += rules.refused(cfg, algorithm)
    problems += [
        *_structure(cfg),
        *_batch(cfg, algorithm),
        *checks_run.problems(cfg),
        *checks_parallel.problems(cfg),
        *deepspeed.problems(cfg),
        *simulated.problems(cfg),
        *reward_problems(cfg),
        *environments.problems(cfg, algorithm),
        *_priority(cfg),
        *setting_problems("data.order", order_of(cfg.data), ORDERS),
    ]
    if algorithm is not None:
        problems += [*_rewards(cfg, algorithm), *groups.problems(cfg, algorithm)]
    return problems


def _priority(cfg: Config) -> Iterator[Problem]:
    """Of groups that are trained on again."""
    replay = cfg.buffer.replay
    if isinstance(replay.cooldown, str) and not replay.queue:
        yield (
            "buffer.replay.cooldown",
            f"{replay.cooldown}: buffer.replay.queue is false, so the step determines which groups are drawn; give a "
            "number of steps",
        )
    yield from setting_problems(PRIORITY, elsewhere(PRIORITY, replay.priority), PRIORITIES)


# ---------------------------------------------------------------- problems


def _structure(cfg: Config) -> Iterator[Problem]:
    """The model, a chat template, sources."""
    if (cfg.model.path is None) != (cfg.model.scratch is None):
        yield from _model(cfg)
    tokenizer = cfg.tokenizer
    if wrong := template_problem(tokenizer.chat_template):
        yield "tokenizer.chat_template", wrong
    if tokenizer.date is not None and not _is_date(tokenizer.date):
        yield "tokenizer.date", f"'{tokenizer.date}' is not a date; expected a date such as 2026-01-31"
    yield from source_problems(cfg)
    yield from sampling_problems(cfg)
    yield from reference_problems(cfg)


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _model(cfg: Config) -> Iterator[Problem]:
    new = cfg.model.scratch is not None
    if wrong := list(mtp.problems(cfg.model)):
        yield from wrong
        return
    if new and (wrong := list(scratch.problems(cfg.model))):
        yield from wrong
        return
    try:
        found = shape(cfg.model, cfg.tokenizer)
    except ConfigError as e:
        key, _, text = str(e).partition(": ")
        yield (key, text) if key.startswith("model.") else ("model.path", str(e))
        return
    yield from stop_tokens(cfg, found.vocab_size if found else None)
    (reply, key), told = longest_reply(cfg), observation_tokens(cfg)
    longest = longest_rollout(cfg)
    if found and found.max_positions and longest > found.max_positions:
        limit = "model.scratch.max_position_embeddings" if new else "the model's max_position_embeddings"
        fix = f"raise {limit} or lower" if new else "lower"
        yield (
            "data.max_prompt_tokens",
            f"{cfg.data.max_prompt_tokens} prompt tokens + {reply} reply tokens ({key}) "
            f"{f'+ {told} tokens of the environment (rollout.env.observation_tokens) ' if told else ''}= {longest}, "
            f"but {limit} is {found.max_positions}; {fix} one of the {'three' if told else 'two'}",
        )


def check_stop_tokens(names: Sequence[str], stages: Sequence[Config], vocab_size: int) -> None:
    """ConfigError for end tokens that this model cannot sample. The plan knows only the maximum size of a tokenizer
    that is built from the data, so this check runs again with the real size."""
    _refuse(names, [list(stop_tokens(cfg, vocab_size)) for cfg in stages])


def _refuse(names: Sequence[str], found: Sequence[Sequence[Problem]]) -> None:
    """ConfigError with the problems of each stage, if there are any."""
    if said := [text for _, text in by_stage(names, found)]:
        raise ConfigError("; ".join(said))


def _sampling_once(
    cfg: Config, read: Callable[[SamplingConfig], object]
) -> Iterator[tuple[str, SamplingConfig]]:
    """Every way of sampling, but for those of which the same is read as of an earlier one: they have it from there."""
    seen: list[object] = []
    for key, sampling in all_sampling(cfg).items():
        if (found := read(sampling)) not in seen:
            seen.append(found)
            yield key, sampling


def stop_tokens(cfg: Config, vocab_size: int | None) -> Iterator[Problem]:
    """End tokens outside the vocabulary. vocab_size: None where it is not known."""
    for key, sampling in _sampling_once(cfg, lambda s: s.stop_token_ids):
        if beyond := [i for i in sampling.stop_token_ids if not 0 <= i < (vocab_size or 2**31)]:
            yield (
                f"{key}.sampling.stop_token_ids",
                f"{', '.join(map(str, beyond))} can never be sampled: the token ids of the vocabulary are 0 to "
                f"{vocab_size - 1 if vocab_size else '...'}; leave it out or correct it",
            )


def check_stop_texts(names: Sequence[str], stages: Sequence[Config], control: Mapping[str, int]) -> None:
    """ConfigError for stop strings with a control token, which the text of a reply never has. control: the ids of
    control tokens, by their text."""
    _refuse(names, [list(_stop_texts(cfg, control)) for cfg in stages])


def _stop_texts(cfg: Config, control: Mapping[str, int]) -> Iterator[Problem]:
    for key, sampling in _sampling_once(cfg, lambda s: s.stop):
        for text in sampling.stop:
            for token, number in control.items():
                if len(token) > 1 and token in text:  # a single character is in the text of other tokens, too
                    yield (
                        f"{key}.sampling.stop",
                        f"{text!r} has the control token {token!r}, and the text of a reply, in which stop strings are "
                        f"looked for, has none: use {key}.sampling.stop_token_ids=[{number}]",
                    )


def _batch(cfg: Config, algorithm: Resolved | None) -> Iterator[Problem]:
    yield from train_problems(cfg, algorithm)
    read = attrgetter("min_tokens", "max_tokens", "ignore_eos", "stop", "stop_token_ids")
    for key, sampling in _sampling_once(cfg, read):
        at = f"{key}.sampling"
        if sampling.min_tokens > sampling.max_tokens:
            yield f"{at}.min_tokens", f"{sampling.min_tokens} is more than max_tokens={sampling.max_tokens}"
        if sampling.ignore_eos and (sampling.stop or sampling.stop_token_ids):
            yield (
                f"{at}.ignore_eos",
                "continues to max_tokens and ignores stop and stop_token_ids; leave these out",
            )


def _rewards(cfg: Config, algorithm: Resolved) -> Iterator[Problem]:
    unjudged = algorithm.kind != "online" or not algorithm.judged or writes_replies(cfg)
    if cfg.rewards or cfg.rollout.env or unjudged:
        yield from eval_problems(cfg)
    reads = algorithm.kind == "online" and algorithm.judged
    if reads and cfg.rewards and not cfg.rollout.env and not any(r.weight for r in cfg.rewards.values()):
        yield (
            "rewards",
            "every weight is 0, so all rollouts have the same reward; give at least one reward a weight",
        )


# ---------------------------------------------------------------- keys without effect


def unused(tree: Mapping[str, Json], stages: Sequence[Config]) -> list[tuple[Path, str]]:
    """Keys set in a config (its plain values) that no stage reads, those of a stage in that stage."""
    rules = [_by_section(idle_keys(cfg)) for cfg in stages]
    given = [{k: v for k, v in stage.items() if k != "name"} for stage in tree.get("stages") or [{}]]
    out: list[tuple[Path, str]] = []
    for n, stage in enumerate(given):
        own = leaves(stage)
        out += [
            (("stages", n, *path), _told(whys[0]))
            for path, value in own
            if (whys := _whys_idle(path, value, rules[n]))
        ]
    for path, value in leaves({k: v for k, v in tree.items() if k != "stages"}):
        heirs = [n for n, stage in enumerate(given) if not _replaced(path, tree, stage)]
        each = [_whys_idle(path, value, rules[n]) for n in heirs]
        if not heirs:
            out.append((path, f"every stage overrides it; leave it out, or write stages.NAME.{dotted(path)}"))
        elif all(each):
            out.append((path, _told(_shared(each) or "; ".join(_by_stage(heirs, each, tree)))))
    return out


def _shared(whys: Sequence[Sequence[str]]) -> str:
    """The first reason of all stages, or ''."""
    return next((why for why in whys[0] if all(why in others for others in whys)), "")


def _by_stage(heirs: Sequence[int], whys: Sequence[Sequence[str]], tree: Json) -> Iterator[str]:
    """The first reason of each stage, with its name."""
    for n, (first, *_) in zip(heirs, whys, strict=True):
        yield f"{named(('stages', n), tree)}: {first}"


def _told(why: str) -> str:
    return f"has no effect: {why}; leave it out"


def _replaced(path: Path, tree: Mapping[str, Json], stage: Mapping[str, Json]) -> bool:
    """Whether a stage overrides a path of the base."""
    if path[0] not in STAGE_SECTIONS:
        return False
    for n in range(1, len(path) + 1):
        mine = get(dict(stage), path[:n])
        if mine is not None and (n == len(path) or not isinstance(mine, dict)):
            return True
    renamed = get(dict(stage), ("algorithm", "name"))
    return path[0] == "algorithm" and renamed not in (None, get(dict(tree), ("algorithm", "name")) or "grpo")


_Idle = tuple[list[str], str, bool]
"""(parts of a key, why nothing reads it, whether its default passes)"""


def idle_keys(cfg: Config) -> Iterator[_Idle]:
    """The keys that nothing reads in one stage; none where the keys of the algorithm contradict each other."""
    algorithm, problems = examined(cfg.algorithm)
    if algorithm is not None and not problems:
        yield from ((key.split("."), why, passes) for key, why, passes in rules.unused(cfg, algorithm))


def _by_section(idle: Iterable[_Idle]) -> dict[str, list[_Idle]]:
    """The same by the first part of each key."""
    out: dict[str, list[_Idle]] = {}
    for one in idle:
        out.setdefault(one[0][0], []).append(one)
    return out


def _is_default(path: Path, value: Json) -> bool:
    """Whether a value is the default of the schema."""
    key = lookup(path)
    return key is not None and bool(value == key.default)


def _whys_idle(path: Path, value: Json, rules: Mapping[str, Sequence[_Idle]]) -> list[str]:
    """Why a set value has no effect, each reason; none: it has one.

    null and empty values pass, except an empty section where the default is no section: it requests the defaults of
    the section.
    """
    if value is None or not path or value == [] or (value == {} and not is_optional(path)):
        return []
    return [
        why
        for parts, why, default_passes in rules.get(str(path[0]), ())
        if len(path) >= len(parts)
        and all(p in ("*", str(at)) for p, at in zip(parts, path))
        and not (default_passes and (value is False or _is_default(path, value)))
    ]
