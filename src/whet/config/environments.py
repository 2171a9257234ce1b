"""The environments that a config names: one, or several, of which each row has its own. Without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, ValidationError

from whet.config.faults import argument_problems
from whet.config.recipes import Resolved, kind_of
from whet.config.schema import Config, SourceConfig
from whet.config.sections.base import Positive, Section
from whet.config.sections.rollout import EnvironmentConfig
from whet.tables import near
from whet.types import Json

SEVERAL = "whet.envs.several:make"
"""The environment that consists of others."""
KEY = "rollout.env"
AT = f"{KEY}.arguments"


class MemberConfig(Section):
    """One of several environments."""

    make: str | None = None
    """As rollout.env.make. Default: none; a rollout is one reply, which the rewards score, as in a run without
    environments."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of make, by name."""
    max_turns: Positive | None = None
    """Maximum number of replies, at most rollout.env.max_turns, which is the default."""


class SeveralArguments(Section):
    """`rollout.env.arguments` of SEVERAL."""

    envs: dict[str, MemberConfig]
    """The environments, by name."""
    column: str | None = None
    """Column with the name of each row's environment. Default: the name is that of the row's source, or its label."""
    default: str | None = None
    """Name of the environment of rows without one. Default: such a row is an error."""


@dataclass(frozen=True)
class Played:
    """An environment, and the key of the section that names it."""

    at: str
    make: str
    arguments: Mapping[str, Json] = field(default_factory=dict)


def played(env: EnvironmentConfig) -> list[Played]:
    """What plays: the environment itself, or the members of several. Arguments that SEVERAL refuses count as its
    own."""
    if env.make == SEVERAL:
        try:
            members = SeveralArguments.model_validate(env.arguments).envs
        except ValidationError:
            members = {}
        return [Played(f"{AT}.envs.{name}", m.make, m.arguments) for name, m in members.items() if m.make]
    return [Played(KEY, env.make, env.arguments)]


def problems(cfg: Config, algorithm: Resolved | None) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of several environments. algorithm: None where it cannot be resolved."""
    env = cfg.rollout.env
    if env is None or env.make != SEVERAL:
        return
    if wrong := list(argument_problems(AT, SeveralArguments, env.arguments)):
        yield from wrong
        return
    asked = SeveralArguments.model_validate(env.arguments)
    unscored = _unscored(cfg) if algorithm is None or algorithm.judged else ""
    if not asked.envs:
        yield f"{AT}.envs", "is empty; name at least one environment"
    if asked.default is not None and asked.default not in asked.envs:
        yield f"{AT}.default", f"{asked.default!r} is no name of envs{_known(asked, asked.default)}"
    for name, member in asked.envs.items():
        at = f"{AT}.envs.{name}"
        if member.make == SEVERAL:
            yield f"{at}.make", "an environment of several cannot be several itself; list its members here"
        if member.make is None and member.model_fields_set:
            given = ", ".join(sorted(member.model_fields_set))
            yield (
                at,
                f"has no make, so the first reply ends the rollout, and nothing reads {given}; give make",
            )
        if member.make is None and unscored:
            yield at, f"has no make, so the rewards score its replies, and {unscored}; give rewards, or make"
        if member.max_turns is not None and member.max_turns > env.max_turns:
            yield (
                f"{at}.max_turns",
                f"{member.max_turns} is above {KEY}.max_turns={env.max_turns}, which ends every rollout: raise that",
            )
    if asked.envs:
        yield from _sources(cfg, asked)


def _unscored(cfg: Config) -> str:
    """Why no reward tells a good reply from a bad one; '': one may."""
    if not cfg.rewards:
        return "there are none"
    trains = kind_of(cfg.algorithm) == "online"
    return "every weight is 0" if trains and not any(r.weight for r in cfg.rewards.values()) else ""


def _sources(cfg: Config, asked: SeveralArguments) -> Iterator[tuple[str, str]]:
    """Sources without an environment, where sources have one, and those that nothing scores."""
    if asked.column is not None:
        return
    for part in ("train", "eval") if kind_of(cfg.algorithm) == "online" else ("eval",):
        for n, source in enumerate(getattr(cfg.data, part)):
            at, name = f"data.{part}[{n}]", source.name
            if source.label is not None or name is None:
                continue  # its rows say it, or its file's name does
            member = asked.envs.get(name, asked.envs.get(asked.default or ""))
            if member is None:
                yield (
                    f"{at}.name",
                    f"{name!r} is no name of {AT}.envs, so nothing plays its rows{_known(asked, name)}",
                )
            elif member.make is None:
                yield from ((f"{at}.{key}", why) for key, why in _alone(source))


def _alone(source: SourceConfig) -> Iterator[tuple[str, str]]:
    """What a source whose environment is none cannot have."""
    if source.rewards == ():
        yield "rewards", "is an empty list, and its environment is none, so nothing scores this source"
    if source.prompt is None and source.messages is None:
        yield "prompt", "is null, and its environment is none, so nothing asks; name the column"


def _known(asked: SeveralArguments, name: str) -> str:
    return f"{near(name, asked.envs)}; the names: {', '.join(asked.envs)}"
