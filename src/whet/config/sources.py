"""Data sources and rewards in a config: problems, and which rewards score which source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from whet.config.chosen import Chosen
from whet.config.engines import NO_STOP, SERVED
from whet.config.evaluation import merged, reward_weights
from whet.config.faults import argument_problems
from whet.config.functions import REWARDS
from whet.config.judges import JUDGES
from whet.config.recipes import elsewhere, kind_of
from whet.config.schema import (
    Config,
    DataConfig,
    RewardConfig,
    RewardModelConfig,
    SamplingConfig,
    SourceConfig,
)
from whet.config.sections.data import GENERATED, RANDOM_TOKENS, REASONING_GYM
from whet.config.sizes import folder_shape
from whet.config.urls import is_remote
from whet.tables import near, unknown
from whet.types import ConfigError, Json

PARTS = ("train", "eval", "demonstrations")


def order_of(data: DataConfig) -> Chosen:
    """The order of the rows of training sources."""
    return elsewhere("data.order", data.order)


def order_of_demonstrations(data: DataConfig) -> Chosen:
    """The same of demonstrations in a mix: nothing tells an order how they went."""
    made = order_of(data)
    return Chosen("shuffle", {}) if made.is_own or made.name == "adaptive" else made


def rewards_by_source(data: DataConfig) -> dict[str, tuple[str, ...]]:
    """The rewards that score a source, by its name; sources without `rewards` are not included."""
    named = [source for part in PARTS for source in getattr(data, part)]
    return {s.name: s.rewards for s in named if s.name is not None and s.rewards is not None}


def verifiers(stages: Sequence[Config]) -> tuple[str, ...]:
    """Names of the reasoning-gym datasets of all stages."""
    sources = [s for cfg in stages for part in PARTS for s in getattr(cfg.data, part)]
    names: list[Json] = []
    for made in (s.arguments for s in sources if s.function == REASONING_GYM):
        task, parts = made.get("task"), made.get("datasets")
        if task != "composite":
            names.append(task)
        elif isinstance(parts, list):
            names += [part.get("name") for part in parts if isinstance(part, dict)]
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))


def source_problems(cfg: Config) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of one stage's sources."""
    for part in PARTS:
        for n, source in enumerate(getattr(cfg.data, part)):
            yield from ((f"data.{part}[{n}]", said) for said in _rows(source))
            if source.function is not None and (wrong := unknown(GENERATED, source.function)):
                yield f"data.{part}[{n}].function", wrong
            if described := GENERATED.get(source.function or ""):
                yield from argument_problems(f"data.{part}[{n}].arguments", described, source.arguments)
            yield from ((f"data.{part}[{n}].arguments", said) for said in _made_up(source))
            yield from ((f"data.{part}[{n}]", said) for said in _columns(source))
            yield from ((f"data.{part}[{n}].prompt", said) for said in _no_prompt(cfg, source, part))
            yield from ((f"data.{part}[{n}].rewards", said) for said in _rewards(cfg, source, part))
    order = order_of(cfg.data).name
    by_difficulty = order in ("easy_first", "hard_first")
    for part in ("train", "demonstrations") if by_difficulty else ():
        for n, source in enumerate(getattr(cfg.data, part)):
            if not source.difficulty:
                at = f"data.{part}[{n}].difficulty"
                yield at, f"data.order={order} needs a column of numbers to sort by; give its name"


def reference_problems(cfg: Config) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of which reference scores which tasks."""
    values = [value for each in cfg.reference.models for value in each.values]
    for n, each in enumerate(cfg.reference.models):
        at = f"reference.models[{n}].values"
        if not each.values:
            yield at, "is empty, so the model scores nothing; give the labels of its tasks"
        for value in each.values:
            if values.count(value) > 1:
                yield at, f"{value!r} is a value of several models, or twice of one; list it once"
    if values and cfg.reference.column is None:
        for n, source in enumerate(cfg.data.train):
            if source.label is None and source.name is not None and source.name not in values:
                yield (
                    f"data.train[{n}].name",
                    f"{source.name!r} is a value of no model of reference.models, so no reference scores its "
                    f"rollouts{near(source.name, values)}; the values: {', '.join(values)}",
                )


def _rows(source: SourceConfig) -> Iterator[str]:
    given = [k for k in ("path", "function", "rows") if getattr(source, k) is not None]
    if len(given) != 1:
        yield f"give exactly one of path, function and rows; given: {', '.join(given) or 'none'}"
    if source.arguments and "function" not in given:
        yield "arguments are for function only; leave them out"
    for key in ("subset", "split"):
        if getattr(source, key) is not None and "path" not in given:
            yield f"{key} is for path only; leave it out"
    if source.path == ():
        yield "path is an empty list; give at least one file"
    if source.split == ():
        yield "split is an empty list; leave it out to read everything"
    if isinstance(source.limit, str) and source.skip and not isinstance(source.skip, str):
        yield f"limit={source.limit} ends at a percentage of all rows; give skip as one, too, as 10%"


def _made_up(source: SourceConfig) -> Iterator[str]:
    """Rows of random tokens have prompts or responses, and the source reads what they have."""
    if source.function != RANDOM_TOKENS:
        return
    asked, replied = (bool(source.arguments.get(name)) for name in ("prompt", "response"))
    if not (asked or replied):
        yield "give the tokens of a prompt, of a response, or both: prompt=512, response=1024"
    elif asked is (source.prompt is None):
        fix = (
            "leave the source's prompt out"
            if asked
            else "set the source's prompt to null, or give prompt=512"
        )
        yield f"prompt={source.arguments.get('prompt', 0)}: {fix}"


def _columns(source: SourceConfig) -> Iterator[str]:
    if source.template is not None and "{prompt}" not in source.template:
        yield f"template {source.template!r} has no {{prompt}}, so every task would be the same; add it"
    twice = (
        {"prompt", "response", "template"} & source.model_fields_set if source.messages is not None else set()
    )
    for key in sorted(twice):
        yield f"messages holds whole conversations with prompt and response; leave {key} out"


def _no_prompt(cfg: Config, source: SourceConfig, part: str) -> Iterator[str]:
    """A source of texts without prompts is learned from, and can do nothing else. Where an environment asks, what it
    asks follows the system message."""
    if source.prompt is not None or source.messages is not None:
        return
    if cfg.rollout.env is not None and (kind_of(cfg.algorithm) == "online" or part == "eval"):
        if source.system_prompt is None and source.system_prompt_column is None:
            yield "is null, so the environment asks; give system_prompt, which its messages follow"
        if source.template is not None:
            yield "is null, so template has no prompt to act on; leave template out"
        if source.reply_prefix is not None:
            yield "is null, so reply_prefix would stand before what the environment asks; leave reply_prefix out"
        return
    if kind_of(cfg.algorithm) not in ("demonstrations", None) and part != "demonstrations":
        yield f"is null, but algorithm.name={cfg.algorithm.name} needs prompts; name the column"
    if part == "eval" and cfg.rewards:
        yield "is null, but the rewards score replies to prompts; leave out rewards, or name the column"
    for key in ("template", "system_prompt", "system_prompt_column", "reply_prefix"):
        if getattr(source, key) is not None:
            yield f"is null, so {key} has no prompt to act on; leave {key} out"


def _rewards(cfg: Config, source: SourceConfig, part: str) -> Iterator[str]:
    """Rewards are selected by the label of a task, so the label must be the name of the source everywhere."""
    if source.rewards is None:
        return
    if not source.rewards and cfg.rollout.env is None:
        yield "is an empty list, so no reward would score this source; leave it out to use all rewards"
    for name in source.rewards:
        if name not in cfg.rewards:
            there = ", ".join(cfg.rewards) or "there are none"
            yield f"'{name}' is not among rewards: {there}{near(name, cfg.rewards)}"
    known = [name for name in source.rewards if name in cfg.rewards]
    if part == "train" and known and not any(cfg.rewards[name].weight for name in known):
        yield "every weight of these rewards is 0, so all rollouts of this source are equal; give one a weight"
    if part == "eval" and known and not reward_weights(cfg).keys() & set(known):
        yield f"none of these rewards is in eval.reward, which scores the replies: {', '.join(reward_weights(cfg))}"
    if source.name is None:
        yield "needs the name of the source, which selects its rewards; give name"
    if source.label is not None:
        yield f"cannot be combined with label={source.label}, which gives rows other names; make one source per label"
    alike = [s for part in PARTS for s in getattr(cfg.data, part) if s.name == source.name]
    if any(s.rewards != source.rewards for s in alike):
        yield f"another source named '{source.name}' has different rewards; rename one of the two"


def sampling_problems(cfg: Config) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of the sampling of single sources. A stage that samples nothing reads none of it."""
    if kind_of(cfg.algorithm) != "online":
        return
    known = [source.name or "" for source in cfg.data.train]
    labelled = "" in known or any(source.label for source in cfg.data.train)
    for name, own in cfg.rollout.sources.items():
        at = f"rollout.sources.{name}"
        if not own.model_fields_set:
            yield at, "is empty; give what differs from rollout.sampling, or leave it out"
        if not labelled and name not in known:
            yield (
                at,
                f"no source of data.train has this name{near(name, known)}; they are: {', '.join(known)}",
            )
        yield from ((f"{at}.{key}", why) for key, why in _sampled_otherwise(cfg, own))


def _sampled_otherwise(cfg: Config, own: SamplingConfig) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of the sampling of one source."""
    shared = cfg.rollout.sampling
    of = merged(shared, own)
    if of.temperature == 0 != shared.temperature:
        yield (
            "temperature",
            "0 is greedy: all rollouts of a task would be equal; set it above 0 (1.0 is usual)",
        )
    if of.max_tokens > shared.max_tokens:
        yield (
            "max_tokens",
            f"{of.max_tokens} is above rollout.sampling.max_tokens={shared.max_tokens}, by which memory is "
            "planned: raise that to the longest reply of any source",
        )
    elif of.max_tokens < of.min_tokens and shared.min_tokens <= shared.max_tokens:
        key = "max_tokens" if "max_tokens" in own.model_fields_set else "min_tokens"
        yield (
            key,
            f"its longest reply ({of.max_tokens} tokens) is less than its shortest ({of.min_tokens}): change one of "
            "them, here or in rollout.sampling",
        )
    if of.ignore_eos:
        ends = (key for key in ("stop", "stop_token_ids") if getattr(own, key))
        yield from ((key, "ignore_eos=true ignores it; leave one of them out") for key in ends)
    if own.stop and cfg.rollout.engine in SERVED:
        yield "stop", NO_STOP.format("rollout")


# ---------------------------------------------------------------- rewards


def reward_problems(cfg: Config) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) in the rewards of one stage."""
    for name, reward in cfg.rewards.items():
        at = f"rewards.{name}"
        if "/" in name:
            yield at, "NAME/KEY is a further number that the reward NAME returns; give it a name without /"
        if name == "env" and cfg.rollout.env is not None:
            yield at, "is what the environment's own reward is called; give it another name"
        if reward.function in JUDGES:
            yield from _judge(at, reward)
        elif (reward.function is None) == (reward.model is None):
            given = "both are given" if reward.function else "neither is given"
            yield at, f"give either function or model.path (a reward model's folder); {given}"
        if reward.function is not None and (wrong := unknown(REWARDS, reward.function)):
            yield f"{at}.function", wrong
        if reward.function is None and reward.arguments:
            yield f"{at}.arguments", "only a function has arguments, and none is given; leave them out"
        if reward.model is not None:
            yield from ((f"{at}.model.{key}", why) for key, why in _reward_model(reward.model))


def _judge(at: str, reward: RewardConfig) -> Iterator[tuple[str, str]]:
    """A language model as judge: a server, or a model of the run."""
    server = [key for key in ("url", "model") if key in reward.arguments]
    if reward.model is None and len(server) < 2:
        yield (
            at,
            f"function={reward.function} needs a model to ask: arguments.url and arguments.model (a server with "
            "OpenAI's interface), or model.path (a folder of a chat model, which runs here)",
        )
    if reward.model is not None:
        try:
            if (folder := Path(reward.model.path).expanduser()).is_dir():
                folder_shape(folder, {})
        except ConfigError as error:
            yield f"{at}.model.path", str(error).removeprefix("model.path: ")
        if server:
            yield (
                f"{at}.arguments.{server[0]}",
                "names a server, but model.path is given, too; give one of the two",
            )
        for key, value in (("input", "text"), ("overlong", "unscored")):
            if getattr(reward.model, key) != value:
                yield (
                    f"{at}.model.{key}",
                    f"a language model as judge reads {key}={value} alone; leave it out",
                )


def _reward_model(model: RewardModelConfig) -> Iterator[tuple[str, str]]:
    if model.input == "tokens":
        for key in ("tokenizer", "chat_template"):
            if getattr(model, key) is not None:
                yield (
                    key,
                    "with input=tokens the model reads the tokens of the policy; leave it out, or set input=text",
                )
    elif wrong := template_problem(model.chat_template):
        yield "chat_template", wrong


def template_problem(template: str | None) -> str:
    """What is wrong with a chat template, given as its text or the path of a file; '' for nothing."""
    if not template or "{" in template or is_remote(template) or Path(template).expanduser().is_file():
        return ""
    return f"'{template}' is neither a file nor a template (it has no Jinja '{{'); give the text or a path"
