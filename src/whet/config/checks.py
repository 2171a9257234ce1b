"""What cannot work in a stage, and keys that were set but can have no effect. Nothing is decided here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path as File

from whet.config.keys import Path, dotted
from whet.config.recipes import RECIPES, Resolved, resolve
from whet.config.schema import Algorithm, Config, SamplingConfig, Schedule, Source
from whet.config.sizes import shape
from whet.config.tree import STAGE_SECTIONS, get, leaves
from whet.types import ConfigError, Json

Problem = tuple[str, str]
"""(key, what is wrong with it)."""

GROUP_BASELINES = ("grpo", "rloo")
"""Advantages that compare a rollout with the others of its group."""


def hard_problems(cfg: Config) -> list[Problem]:
    """All that cannot work in the config of one stage."""
    algorithm, problems = _algorithm(cfg.algorithm)
    problems += [*_structure(cfg), *_batch(cfg)]
    if algorithm is not None:
        problems += [*_learning(cfg, algorithm), *_rewards(cfg, algorithm)]
    return problems


def _algorithm(cfg: Algorithm) -> tuple[Resolved | None, list[Problem]]:
    """The algorithm; where its keys do not fit together, the recipe alone, so that other checks can go on."""
    try:
        return resolve(cfg), []
    except ConfigError as e:
        at = re.match(r"algorithm[.\w]*", str(e))
        text = str(e)[at.end() :].lstrip(":= ") if at else str(e)
        recipe = resolve(Algorithm(name=cfg.name)) if cfg.name in RECIPES else None
        return recipe, [(at[0] if at else "algorithm", text.rstrip("."))]


def evaluates(cfg: Config) -> bool:
    """Whether a stage ever evaluates."""
    return bool(cfg.data.eval) and (cfg.eval.every > 0 or cfg.eval.at_start or cfg.eval.at_end)


def eval_sampling(cfg: Config) -> SamplingConfig:
    """Greedy with the training limits, and the keys of `eval.sampling` over it."""
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    mine = cfg.eval.sampling
    given = {key: getattr(mine, key) for key in mine.model_fields_set} if mine else {}
    return cfg.rollout.sampling.model_copy(update=greedy | given)


# ---------------------------------------------------------------- what cannot work


def _structure(cfg: Config) -> Iterator[Problem]:
    """Models, tokenizer, sources: what is there once and only once."""
    if (cfg.model.path is None) == (cfg.model.scratch is None):
        given = "both are given" if cfg.model.path else "neither is given"
        yield "model", f"give either path (a Hugging Face folder) or scratch (a new model); {given}"
    else:
        yield from _model(cfg)
    tokenizer = cfg.tokenizer
    if tokenizer.path and tokenizer.build:
        yield "tokenizer", "give path or build, not both"
    if tokenizer.build and cfg.model.path:
        yield "tokenizer.build", "the model of model.path knows its own tokens only; leave build out"
    if not (tokenizer.path or tokenizer.build or cfg.model.path):
        yield (
            "tokenizer",
            "a model from scratch brings none: give tokenizer.build (chars, words, bpe) or tokenizer.path",
        )
    template = tokenizer.chat_template
    if template and "{" not in template and not File(template).expanduser().is_file():
        yield (
            "tokenizer.chat_template",
            f"'{template}' is no file here and holds no Jinja '{{'; give the text or a path",
        )
    if not cfg.data.train:
        yield "data.train", "give at least one source of training tasks"
    for part in ("train", "eval"):
        for n, source in enumerate(getattr(cfg.data, part)):
            yield from ((f"data.{part}[{n}]", said) for said in _source(source))


def _source(source: Source) -> Iterator[str]:
    given = [k for k in ("path", "reasoning_gym", "function", "rows") if getattr(source, k) is not None]
    if len(given) != 1:
        yield f"give exactly one of path, reasoning_gym, function and rows; given: {', '.join(given) or 'none'}"
    if source.arguments and "function" not in given:
        yield "arguments are for function only; leave them out"
    if source.template is not None and "{prompt}" not in source.template:
        yield f"template {source.template!r} has no {{prompt}} in it, so every task would be the same"
    if source.path == ():
        yield "path is an empty list"


def _model(cfg: Config) -> Iterator[Problem]:
    s = cfg.model.scratch
    if s is not None:
        kv_heads = s.kv_heads or s.heads
        if s.heads % kv_heads:
            good = ", ".join(str(d) for d in range(1, s.heads + 1) if s.heads % d == 0)
            yield "model.scratch.kv_heads", f"{kv_heads} does not divide heads={s.heads}; these do: {good}"
        if s.head_dim is None and s.hidden_size % s.heads:
            yield (
                "model.scratch",
                f"heads={s.heads} does not divide hidden_size={s.hidden_size}; give head_dim",
            )
        head_dim = s.head_dim or s.hidden_size // s.heads
        if head_dim % 2:
            yield (
                "model.scratch.head_dim",
                f"{head_dim} is odd; rotary positions turn pairs, so it must be even",
            )
        if s.architecture == "qwen3_moe" and s.experts_per_token > s.experts:
            yield "model.scratch.experts_per_token", f"{s.experts_per_token} is more than experts={s.experts}"
    try:
        found = shape(cfg.model, cfg.tokenizer)
    except ConfigError as e:
        key, _, text = str(e).partition(": ")
        yield (key, text) if key.startswith("model.") else ("model.path", str(e))
        return
    reply = max(cfg.rollout.sampling.max_tokens, eval_sampling(cfg).max_tokens if evaluates(cfg) else 0)
    longest = cfg.data.max_prompt_tokens + reply
    if found and found.max_positions and longest > found.max_positions:
        limit = "model.scratch.max_positions" if s else "the model's max_position_embeddings"
        fix = f"raise {limit} or lower" if s else "lower"
        yield (
            "data.max_prompt_tokens",
            f"{cfg.data.max_prompt_tokens} prompt tokens + {reply} reply tokens (sampling.max_tokens) = "
            f"{longest}, but "
            f"{limit} is {found.max_positions}; {fix} one of the two",
        )


def _batch(cfg: Config) -> Iterator[Problem]:
    t = cfg.train
    if (t.steps is None) == (t.epochs is None):
        given = (
            "both are given (put null for the one that a stage inherits)" if t.steps else "neither is given"
        )
        yield "train.steps", f"give train.steps or train.epochs; {given}"
    if t.micro_tokens and t.micro_rollouts:
        yield "train.micro_tokens", "give train.micro_tokens or train.micro_rollouts, not both"
    if t.tasks_per_step % t.minibatches:
        parts = _nearest(t.minibatches, lambda m: t.tasks_per_step % m == 0)
        tasks = _nearest(t.tasks_per_step, lambda n: n % t.minibatches == 0)
        yield (
            "train.minibatches",
            f"{t.minibatches} does not divide train.tasks_per_step={t.tasks_per_step}; nearest that work: "
            f"train.minibatches={parts}, or train.tasks_per_step={tasks}",
        )
    yield from _schedule(cfg.train.optimizer.schedule, "train")
    yield from _schedule(cfg.critic.optimizer.schedule, "critic")
    for key, sampling in (("rollout", cfg.rollout.sampling), ("eval", eval_sampling(cfg))):
        at = f"{key}.sampling"
        if sampling.min_tokens > sampling.max_tokens:
            yield f"{at}.min_tokens", f"{sampling.min_tokens} is more than max_tokens={sampling.max_tokens}"
        if sampling.ignore_eos and (sampling.stop or sampling.stop_token_ids):
            yield (
                f"{at}.ignore_eos",
                "goes on to max_tokens whatever is sampled; leave out stop and stop_token_ids",
            )


def _schedule(s: Schedule, owner: str) -> Iterator[Problem]:
    if s.warmup_steps is not None and s.warmup_fraction:
        at = f"{owner}.optimizer.schedule"
        yield f"{at}.warmup_steps", "give warmup_steps or warmup_fraction, not both"


def _nearest(wanted: int, works: Callable[[int], bool]) -> str:
    """The next number below and above that works, as 'a or b'."""
    below = next((n for n in range(wanted - 1, 0, -1) if works(n)), None)
    above = next((n for n in range(wanted + 1, 2 * wanted + 1) if works(n)), None)
    return " or ".join(str(n) for n in (below, above) if n is not None)


def _learning(cfg: Config, algorithm: Resolved) -> Iterator[Problem]:
    if algorithm.kind != "online":
        return
    size, name = cfg.rollout.group_size, algorithm.advantage
    if size == 1 and name in GROUP_BASELINES:
        yield (
            "rollout.group_size",
            f"1 leaves advantage={name} nothing to compare a rollout with, every advantage would be 0: set "
            "it to 2 or more (8 is usual), or use algorithm.name=reinforce or ppo",
        )
    if size == 1 and algorithm.drop_uniform_groups:
        yield (
            "algorithm.drop_uniform_groups",
            "drops every group of one rollout: raise rollout.group_size or set it false",
        )
    if size > 1 and cfg.rollout.sampling.temperature == 0:
        yield (
            "rollout.sampling.temperature",
            f"0 is greedy: all {size} rollouts of a task would be the same; set it above 0 (1.0 is usual)",
        )
    updates = cfg.train.minibatches * cfg.train.passes
    if algorithm.loss == "reinforce" and updates > 1:
        yield (
            "algorithm.loss",
            f"reinforce has no ratio to the policy that sampled, so it is right for one optimizer step a batch, and "
            f"train.minibatches={cfg.train.minibatches} x train.passes={cfg.train.passes} make {updates}; set "
            "algorithm.loss=ppo, or both to 1",
        )
    if algorithm.needs_critic and cfg.train.steps and cfg.critic.warmup_steps >= cfg.train.steps:
        yield (
            "critic.warmup_steps",
            f"{cfg.critic.warmup_steps} steps for the critic alone leave none of train.steps="
            f"{cfg.train.steps} to the policy",
        )


def _rewards(cfg: Config, algorithm: Resolved) -> Iterator[Problem]:
    if not cfg.rewards and algorithm.kind == "online":
        yield (
            "rewards",
            f"algorithm.name={algorithm.name} needs rewards: give one, e.g. rewards.answer.function=exact",
        )
    elif not cfg.rewards and evaluates(cfg):
        yield "rewards", "evaluation judges replies by rewards: give at least one, or leave data.eval out"
    if cfg.eval.reward is not None and cfg.eval.reward not in cfg.rewards:
        yield (
            "eval.reward",
            f"'{cfg.eval.reward}' is not among rewards: {', '.join(cfg.rewards) or 'there are none'}",
        )
    if cfg.machine.exact == "on" and cfg.rollout.engine != "native":
        yield (
            "machine.exact",
            f"on needs rollout.engine=native; {cfg.rollout.engine} computes in another order",
        )
    if cfg.rewards and algorithm.kind == "online" and not any(r.weight for r in cfg.rewards.values()):
        yield "rewards", "every weight is 0, so no rollout can be better than another; give one a weight"
    if evaluates(cfg) and cfg.eval.samples > 1 and eval_sampling(cfg).temperature == 0:
        yield (
            "eval.samples",
            f"{cfg.eval.samples} greedy replies to a task are all the same; set eval.sampling.temperature, "
            "or eval.samples to 1",
        )
    if cfg.data.eval and not evaluates(cfg):
        yield "data.eval", "is never used: eval.every is 0 and at_start and at_end are false"


# ---------------------------------------------------------------- what has no effect

Rule = tuple[str, str]
"""(key or section, with * for any name or number; why nothing reads it)."""


def unused(tree: Mapping[str, Json], stages: Sequence[Config]) -> list[tuple[Path, str]]:
    """Keys set in a config (its plain values) that no stage reads, those of a stage in that stage."""
    idle = [dict(_idle(cfg)) for cfg in stages]
    given = [{k: v for k, v in stage.items() if k != "name"} for stage in tree.get("stages") or [{}]]
    out: list[tuple[Path, str]] = []
    for n, stage in enumerate(given):
        own = leaves(stage)
        out += [
            (("stages", n, *path), why) for path, value in own if (why := _why_idle(path, value, idle[n]))
        ]
    for path, value in leaves({k: v for k, v in tree.items() if k != "stages"}):
        heirs = [n for n, stage in enumerate(given) if not _replaced(path, tree, stage)]
        whys = [_why_idle(path, value, idle[n]) for n in heirs]
        if not heirs:
            out.append(
                (path, f"every stage puts its own over it; leave it out, or write stages.NAME.{dotted(path)}")
            )
        elif all(whys):
            out.append((path, whys[0]))
    return out


def _replaced(path: Path, tree: Mapping[str, Json], stage: Mapping[str, Json]) -> bool:
    """Whether a stage puts its own value over a path of the base."""
    if path[0] not in STAGE_SECTIONS:
        return False
    for n in range(1, len(path) + 1):
        mine = get(dict(stage), path[:n])
        if mine is not None and (n == len(path) or not isinstance(mine, dict)):
            return True
    renamed = get(dict(stage), ("algorithm", "name"))
    return path[0] == "algorithm" and renamed not in (None, get(dict(tree), ("algorithm", "name")) or "grpo")


def _why_idle(path: Path, value: Json, rules: Mapping[str, str]) -> str:
    """Why a set value has no effect, or ''. null and empty sections say nothing and are left alone."""
    if value is None or value in ({}, []) or not path:
        return ""
    for pattern, why in rules.items():
        parts = pattern.split(".")
        if len(path) >= len(parts) and all(p in ("*", str(at)) for p, at in zip(parts, path)):
            return f"has no effect: {why}; leave it out"
    return ""


def _idle(cfg: Config) -> Iterator[Rule]:
    """Keys that nothing reads in this stage."""
    algorithm, problems = _algorithm(cfg.algorithm)
    if algorithm is None or problems:
        return
    online, looks = algorithm.kind == "online", evaluates(cfg)
    if not algorithm.needs_critic:
        yield "critic", f"algorithm.name={algorithm.name} (advantage={algorithm.advantage}) has no critic"
    if not algorithm.needs_reference:
        yield "reference", "no reference is needed: algorithm.kl.coef is 0 and the loss is not dpo"
    if algorithm.kl.coef == 0:
        for key in ("place", "estimator", "horizon"):
            yield f"algorithm.kl.{key}", "algorithm.kl.coef is 0"
    if not online:
        yield from _idle_offline(algorithm.kind, looks=looks)
    if algorithm.kind != "preferences":
        yield "data.train.*.rejected", "only preferences (dpo) read it"
    if online:
        yield "data.train.*.response", "only demonstrations (sft) and preferences (dpo) read it"
    if not looks:
        yield "eval", "there is nothing to evaluate: data.eval is empty or evaluation is off"
        yield "data.exclude_eval", "data.eval is empty or evaluation is off"
    if len(cfg.data.train) == 1:
        yield "data.train.*.weight", "there is one source, so there is nothing to mix"
    for column in ("response", "rejected", "weight"):
        yield f"data.eval.*.{column}", "evaluation asks every row once, by its prompt"
    yield from _idle_sizes(cfg)


def _idle_offline(kind: str, *, looks: bool) -> Iterator[Rule]:
    """Keys that nothing reads where the replies come from the data."""
    yield "rollout.group_size", f"the replies are in the data ({kind})"
    yield "track.rollouts_every", f"no rollouts are sampled ({kind})"
    for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        yield f"rollout.sampling.{key}", f"nothing is sampled in training ({kind})"
    if not looks:
        for section in ("rewards", "guard"):
            yield section, f"nothing is judged: {kind}, and no evaluation"
        for key in ("engine", "max_batch"):
            yield f"rollout.{key}", f"nothing is sampled: {kind}, and no evaluation"
        for key in ("min_tokens", "stop", "stop_token_ids", "ignore_eos"):
            yield f"rollout.sampling.{key}", f"nothing is sampled: {kind}, and no evaluation"
        yield "machine.kv_cache_mb", "no rollout engine is needed"


def _idle_sizes(cfg: Config) -> Iterator[Rule]:
    scratch = cfg.model.scratch
    if not cfg.tokenizer.build:
        yield "tokenizer.vocab_size", "only a tokenizer that is built (tokenizer.build) has a size to choose"
    if scratch and scratch.architecture != "qwen3_moe":
        for key in ("experts", "experts_per_token"):
            yield f"model.scratch.{key}", f"{scratch.architecture} has no experts"
    if scratch and scratch.architecture != "mistral":
        yield "model.scratch.sliding_window", f"{scratch.architecture} has no window (mistral has)"
    if cfg.rollout.engine != "native":
        why = f"rollout.engine={cfg.rollout.engine} has no cache of its own to size"
        yield "machine.kv_cache_mb", why
    for owner in ("train", "critic"):
        schedule: Schedule = getattr(cfg, owner).optimizer.schedule
        at = f"{owner}.optimizer.schedule"
        if schedule.kind != "wsd":
            yield f"{at}.decay_fraction", f"only kind=wsd decays at the end, this is {schedule.kind}"
        if schedule.kind == "constant":
            yield f"{at}.min_factor", "a constant schedule does not end lower"
