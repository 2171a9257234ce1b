"""Tools and interactions that were written for verl, as an environment. Their classes run as they are.

`rollout.env.make: whet.envs.verl_tools:tools` with the arguments of `VerlArguments`; what a file of verl says about
turns is translated to it. As verl 0.9.1's tool agent; with `instances: episode` as the SGLang rollouts of verl 0.4 to
0.6, which make a tool once for a rollout. verl itself is needed only where a class imports it.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import yaml
from pydantic import model_validator

from whet.config.code import class_place
from whet.config.environments import AT
from whet.config.interpolate import interpolate
from whet.config.sections.base import Above0, Positive, Section
from whet.envs.arguments import section
from whet.envs.calls import together
from whet.envs.env import MOST_TEXT, EnvFault, EnvStep, World
from whet.envs.schemas import check_name, spec_of
from whet.envs.tool_env import Answer, not_there, result_messages
from whet.envs.tools import Side, check_distinct, error_text, fit
from whet.guard.foreign import describe, number
from whet.tables import load_module, load_object
from whet.types import ConfigError, Json, Message, StopReason, Task, ToolCall, ToolSpec

log = logging.getLogger(__name__)

SINGLE = "single_turn_agent"
"""verl's name for one reply without tools."""
Agent = Literal["tool_agent", "single_turn_agent"]


class VerlArguments(Section):
    """`rollout.env.arguments`."""

    tool_config: str | None = None
    """verl's YAML file of tools: `tools`, a list of class_name, config and tool_schema."""
    function_tools: str | None = None
    """A Python file whose functions are tools: those with verl's decorator `function_tool`, or, where the file does not
    import it, all public ones."""
    interaction_config: str | None = None
    """verl's YAML file of interactions: `interaction`, a list of name, class_name and config. The row says which one in
    extra_info.interaction_kwargs.name."""
    instances: Literal["call", "episode"] = "call"
    """How long a tool's instance lives: from create to release."""
    default_agent: Agent = "tool_agent"
    """How a row without a column agent_name is played."""
    max_turns: Positive | None = None
    """Replies of a rollout; the calls of the last one do not run. None: rollout.env.max_turns alone counts."""
    max_interactions: Positive | None = None
    """Answers of an interaction in a rollout. None: no limit."""
    max_parallel_calls: Positive | None = 1
    """Calls of one reply that run; the others get no answer, as in verl. None: all."""
    result_chars: Positive | None = 256
    """Characters of a result that the policy is told. None: all."""
    cut: Side = "middle"
    """Where a longer result is cut: left (its beginning is lost), middle or right (its end is lost). verl's `left`
    keeps the left part, so it is `right` here."""
    call_timeout_s: Above0 = 300.0
    """Longest time of a call."""

    @model_validator(mode="after")
    def _named(self) -> VerlArguments:
        if self.default_agent != SINGLE and not self.sources:
            raise ConfigError(
                f"{AT} of whet.envs.verl_tools:tools names no tool; expected tool_config, function_tools or "
                "interaction_config"
            )
        return self

    @property
    def sources(self) -> list[str]:
        """The files that are named."""
        named = (self.tool_config, self.function_tools, self.interaction_config)
        return [path for path in named if path is not None]


class Schema(dict[str, Any]):
    """A section of a YAML file whose keys are attributes, too: the shape of verl's OpenAIFunctionToolSchema."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        value = self[name]
        return Schema(value) if isinstance(value, dict) else value

    def model_dump(self, **how: object) -> dict[str, Any]:
        """As pydantic's: plain dicts."""
        return dict(self)


@dataclass(frozen=True)
class VerlTool:
    """A tool of verl's: an object with create, execute, calc_reward and release, or a function."""

    spec: ToolSpec
    thing: Any
    is_function: bool = False


@dataclass(frozen=True)
class VerlAnswer(Answer):
    """With what the tool gives for the call."""

    reward: float = 0.0


class VerlEnv:
    """The environment of one rollout."""

    def __init__(self, task: Task, world: World, asked: VerlArguments) -> None:
        """Raises EnvFault for a row that names an agent or an interaction that is not there."""
        info = task.extra.get("extra_info")
        info = info if isinstance(info, dict) else {}
        self.asked, self.world = asked, world
        self.agent = task.extra.get("agent_name", asked.default_agent)
        if self.agent not in get_args(Agent):
            raise EnvFault(
                f"agent_name={self.agent!r} in the row; expected one of {', '.join(get_args(Agent))}"
            )
        if self.agent == SINGLE and "agent_name" not in task.extra and asked.sources:
            tell_of_rows()
        self.named = {} if self.agent == SINGLE else _selected(asked, info)
        self.tools = [tool.spec for tool in self.named.values()]
        """What the policy is told of."""
        prompt = task.prompt if not isinstance(task.prompt, str) else (Message("user", task.prompt),)
        self.data = SimpleNamespace(
            messages=[{"role": m.role, "content": m.content} for m in prompt],
            tools_kwargs=info.get("tools_kwargs") or {},
            interaction_kwargs=info.get("interaction_kwargs") or {},
            request_id=f"{world.key:016x}",
            extra_fields={}, metrics={}, tool_rewards=[], turn_scores=[], user_turns=0, assistant_turns=0,
            image_data=None, video_data=None,
        )  # fmt: skip
        """verl's AgentData, which a tool may read and keep things in."""
        self.interaction = None if self.agent == SINGLE else _interaction(asked, self.data.interaction_kwargs)
        self._open: list[VerlTool] = []
        """Those with an instance of this rollout."""

    async def first(self) -> list[Message]:
        """Make what lives as long as the rollout."""
        if self.interaction is not None:
            kwargs = self.data.interaction_kwargs
            await self._own(partial(self.interaction.start_interaction, self.data.request_id, **kwargs))
        if self.asked.instances == "episode":
            for tool in self.named.values():
                if not tool.is_function:
                    kwargs = self._kwargs(tool, "create_kwargs")
                    await self._own(partial(tool.thing.create, self.data.request_id, **kwargs))
                    self._open.append(tool)
        return []

    async def step(self, reply: Message) -> EnvStep:
        """The results of its calls, or what the interaction says to a reply without calls."""
        self.data.assistant_turns += 1
        self.data.messages.append({"role": "assistant", "content": reply.content})
        calls = reply.tool_calls[: self.asked.max_parallel_calls] if self.agent != SINGLE else ()
        talks = self.interaction is not None and not calls
        spent = (
            self.asked.max_interactions is not None and self.data.user_turns >= self.asked.max_interactions
        )
        if not calls and (not talks or spent):
            stop: StopReason | None = "malformed" if reply.malformed else "turns" if talks else None
            return await self._ended(reply, stop)
        if self.asked.max_turns is not None and self.world.turn >= self.asked.max_turns:
            return await self._ended(reply, "turns")
        if talks:
            return await self._talk(reply)
        most = MOST_TEXT // (2 * len(calls))
        answers = await together(self._answer(call, most) for call in calls)
        self.data.messages += [{"role": "tool", "content": answer.text} for answer in answers]
        self.data.tool_rewards += [answer.reward for answer in answers]
        messages = result_messages(calls, answers)
        return EnvStep(messages, parts=self._parts(reply, answers), done=False, state=self._state())

    async def close(self) -> None:
        """Release what lives as long as the rollout."""
        for tool in self._open:
            kwargs = self._kwargs(tool, "release_kwargs")
            await self._own(partial(tool.thing.release, self.data.request_id, **kwargs))
        finalize = getattr(self.interaction, "finalize_interaction", None)
        if finalize is not None:
            own = (self.data.request_id,) if inspect.signature(finalize).parameters else ()
            await self._own(partial(finalize, *own))

    # -- one reply

    async def _ended(self, reply: Message, stop: StopReason | None) -> EnvStep:
        parts = self._parts(reply, ())
        for tool in self._open:
            kwargs = self._kwargs(tool, "calc_reward_kwargs")
            value = await self._own(partial(tool.thing.calc_reward, self.data.request_id, **kwargs))
            parts[f"reward/{tool.spec.name}"] = number(value, f" as calc_reward of {tool.spec.name}")
        return EnvStep(parts=parts, done=True, stop=stop, state=self._state())

    async def _talk(self, reply: Message) -> EnvStep:
        assert self.interaction is not None
        self.data.user_turns += 1
        kwargs = self.data.interaction_kwargs
        answers, messages = self.interaction.generate_response, list(self.data.messages)
        done, said, score, _ = await self._own(partial(answers, self.data.request_id, messages, **kwargs))
        parts = self._parts(reply, ())
        if score is not None:
            self.data.turn_scores.append(number(score, " as the score of generate_response"))
            parts["turn_scores"] = self.data.turn_scores[-1]
        if done:
            return EnvStep(parts=parts, done=True, state=self._state())
        self.data.messages.append({"role": "user", "content": said})
        return EnvStep([Message("user", said)], parts=parts, done=False, state=self._state())

    def _state(self) -> dict[str, Any]:
        """What verl adds to a reward function's extra_info."""
        scores = {"turn_scores": list(self.data.turn_scores), "tool_rewards": list(self.data.tool_rewards)}
        return {**self.data.extra_fields, **scores}

    def _parts(self, reply: Message, answers: Sequence[VerlAnswer]) -> dict[str, float]:
        names = [call.name for call in reply.tool_calls]
        counts = {
            "calls": len(names),
            "calls_failed": sum(answer.failed for answer in answers),
            "results_cut": sum(answer.cut for answer in answers),
            "malformed": reply.malformed is not None,
            "tool_rewards": sum(answer.reward for answer in answers),
            **{f"calls/{name}": names.count(name) for name in self.named},
        }
        return {name: float(value) for name, value in counts.items()} if self.tools else {}

    async def _answer(self, call: ToolCall, most: int) -> VerlAnswer:
        """most: characters of its result, where the arguments name no limit."""
        tool, limit_s = self.named.get(call.name), self.asked.call_timeout_s
        if tool is None:
            return VerlAnswer(not_there(call.name, self.named))
        if tool.is_function:
            work, is_async = partial(tool.thing, **call.arguments), inspect.iscoroutinefunction(tool.thing)
        else:
            own, made = self._kwargs(tool, "execute_kwargs"), self._kwargs(tool, "create_kwargs")
            work, is_async = partial(self._run, tool.thing, call.arguments, own, made), True
        outcome = await self.world.run(work, limit_s, is_async=is_async)
        if outcome.late:
            return VerlAnswer(f"Error: timeout: {call.name} took more than {limit_s:g} s")
        if isinstance(outcome.error, EnvFault):
            raise outcome.error
        if outcome.error is not None:
            return VerlAnswer(error_text(outcome.error))
        try:
            said, reward = _result(outcome.value)
        except EnvFault:
            raise
        except Exception as error:  # noqa: BLE001  a value is foreign code, too: its methods
            return VerlAnswer(error_text(error))
        text, cut = fit(said, self.asked.result_chars or most, self.asked.cut)
        return VerlAnswer(text, failed=False, cut=cut, reward=reward)

    async def _run(
        self, thing: Any, arguments: dict[str, Json], own: dict[str, Json], made: dict[str, Json]
    ) -> Any:
        """What `execute` returns. The arguments are not held against the schema: verl's tools do that themselves."""
        if self.asked.instances == "episode":
            return await thing.execute(self.data.request_id, arguments, **own)
        created = await thing.create(create_kwargs=made)
        instance = created[0] if isinstance(created, tuple) else created
        try:
            data = {"agent_data": self.data} if _takes(thing.execute, "agent_data") else {}
            return await thing.execute(instance, arguments, **data)
        finally:
            await thing.release(instance)

    def _kwargs(self, tool: VerlTool, name: str) -> dict[str, Json]:
        """What the row gives a method of a tool: extra_info.tools_kwargs. Arrow fills in null where rows differ."""
        given = (self.data.tools_kwargs.get(tool.spec.name) or {}).get(name) or {}
        return {key: value for key, value in given.items() if value is not None}

    async def _own(self, work: Callable[[], Any]) -> Any:
        """What a method returns that is no call of the policy. EnvFault if it fails."""
        outcome = await self.world.run(work, self.asked.call_timeout_s, is_async=True)
        if outcome.late:
            raise EnvFault(f"a method of verl's classes took more than {self.asked.call_timeout_s:g} s")
        if outcome.error is not None:
            raise EnvFault(f"a method of verl's classes raised {describe(outcome.error)}") from outcome.error
        return outcome.value


@cache
def tell_of_rows() -> None:
    """Once for each process: verl says nothing, and a run without a call follows."""
    log.warning(
        "rows without a column agent_name are played in one turn, without tools (default_agent=%s, as verl's "
        "actor_rollout_ref.rollout.agent.default_agent_loop)",
        SINGLE,
    )


def _takes(method: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(method).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _result(value: Any) -> tuple[str, float]:
    """(text, reward) of what a tool returns: (response, reward, metrics), shorter, or a response alone; a response is
    verl's ToolResponse, a text, or a value that becomes JSON. EnvFault for images: the policy reads text."""
    response, reward = (
        (value[0], value[1] if len(value) > 1 else None) if isinstance(value, tuple) else (value, None)
    )
    if getattr(response, "image", None) or getattr(response, "video", None):
        raise EnvFault("a tool returned an image or a video; the policy reads text")
    said = getattr(response, "text", response)
    if isinstance(said, dict):
        said = json.dumps(said, ensure_ascii=False)
    return "" if said is None else str(said), number(reward or 0.0, " as the reward of a tool")


def _selected(asked: VerlArguments, info: Mapping[str, Json]) -> dict[str, VerlTool]:
    """The tools of a row: with an instance for the rollout those in its tools_kwargs, else those in its tool_selection,
    else all."""
    named = tools_of(asked.tool_config, asked.function_tools)
    if asked.instances == "episode":
        chosen = info.get("tools_kwargs") or {}
        return {name: tool for name, tool in named.items() if chosen.get(name) is not None}
    wanted = info.get("tool_selection")
    return {name: named[name] for name in wanted if name in named} if wanted else dict(named)


def _interaction(asked: VerlArguments, kwargs: Mapping[str, Json]) -> Any:
    """The interaction that a row names; None without any. EnvFault for a name that is not there."""
    if asked.interaction_config is None:
        return None
    there = interactions_of(asked.interaction_config)
    name = kwargs.get("name", "gsm8k" if asked.instances == "episode" else None)
    if name is None and asked.instances == "episode":
        return None
    if name not in there:
        raise EnvFault(
            f"extra_info.interaction_kwargs.name={name!r} in the row; expected one of {', '.join(there)}"
        )
    return there[name]


# ---------------------------------------------------------------- from files

_METHODS = ("create", "execute", "release")
"""What is called of a tool."""


@cache
def tools_of(config: str | None, functions: str | None) -> dict[str, VerlTool]:
    """The tools of two files by name. They are made once for each process. ConfigError for a file that is none."""
    found = [*(_tool(entry, config) for entry in _entries(config, "tools")), *_functions(functions)]
    names = [tool.spec.name for tool in found]
    check_distinct(names)
    for name in names:
        check_name(name)
    return dict(zip(names, found))


@cache
def interactions_of(config: str) -> dict[str, Any]:
    """The interactions of a file by name. ConfigError for a file that is none."""
    found: dict[str, Any] = {}
    for entry in _entries(config, "interaction"):
        simple = entry["class_name"].replace(":", ".").rpartition(".")[2]
        name = entry.get("name") or (simple.removesuffix("Interaction") or simple).lower()
        if name in found:
            raise ConfigError(f"{config}: two interactions have the name {name!r}; give each one of its own")
        found[name] = _made(entry, config, config={**(entry.get("config") or {}), "name": name})
    return found


def _entries(path: str | None, section: str) -> list[dict[str, Any]]:
    """The entries of verl's YAML file, references resolved."""
    if path is None:
        return []
    try:
        tree = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    entries = tree.get(section) if isinstance(tree, dict) else None
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "class_name" in e for e in entries):
        raise ConfigError(f"{path}: expected a list {section!r} of sections with class_name and config")
    resolved, wrong = interpolate({section: entries}, {})
    if wrong:
        raise ConfigError(f"{path}: {'; '.join(wrong.values())}")
    found: list[dict[str, Any]] = resolved[section]
    return found


def _loaded(entry: Mapping[str, Any], path: str | None) -> Callable[..., Any]:
    """The class of an entry: package.module.Class, as verl has it, or path/to/file.py:Class."""
    return load_object(class_place(str(entry["class_name"])), what=f"{path}: class_name")


def _made(entry: Mapping[str, Any], path: str | None, **given: Any) -> Any:
    """An object of the class of an entry. ConfigError names the file and the class."""
    made = _loaded(entry, path)
    try:
        return made(**given)
    except Exception as error:  # code of the user's
        raise ConfigError(
            f"{path}: {entry['class_name']} with {', '.join(given)} raised {describe(error)}"
        ) from error


def _tool(entry: Mapping[str, Any], path: str | None) -> VerlTool:
    config = dict(entry.get("config") or {})
    if (kind := config.get("type", "native")) != "native":
        raise ConfigError(
            f"{entry['class_name']}: config.type={kind}; expected native. For tools of MCP servers write "
            "rollout.env.make=whet.envs.tool_env:tools with the argument mcp (docs/tools.md)"
        )
    _loaded(entry, path)
    given = entry.get("tool_schema")
    schemas = sys.modules.get("verl.tools.schemas")  # the module of the class has imported it, if it needs it
    schema = None
    if given is not None:
        schema = schemas.OpenAIFunctionToolSchema.model_validate(given) if schemas else Schema(given)
    thing = _made(entry, path, config=config, tool_schema=schema)
    if lacking := [method for method in _METHODS if not callable(getattr(thing, method, None))]:
        raise ConfigError(
            f"{path}: {entry['class_name']} has no {', '.join(lacking)}; expected the methods of verl's BaseTool: "
            f"{', '.join(_METHODS)}"
        )
    told = getattr(thing, "tool_schema", None) or getattr(thing, "get_openai_tool_schema", lambda: None)()
    if told is None:
        raise ConfigError(
            f"{path}: {entry['class_name']} has no tool_schema; give it in the file, or a method get_openai_tool_schema"
        )
    return VerlTool(_spec(told), thing)


def _spec(schema: Any) -> ToolSpec:
    try:
        return ToolSpec.from_json(schema.model_dump(exclude_unset=True, exclude_none=True))
    except (TypeError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"tool_schema: {error}; expected type and function, with name and parameters"
        ) from error


def _functions(path: str | None) -> list[VerlTool]:
    """The functions of a file: those that verl's decorator has registered, or all public ones."""
    if path is None:
        return []
    try:
        module = load_module(Path(path).expanduser())
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(f"function_tools {path}: cannot be loaded: {error}") from error
    registry = getattr(sys.modules.get("verl.tools.function_tool"), "FUNCTION_TOOL_REGISTRY", {})
    own = [entry for entry in registry.values() if entry.fn.__module__ == module.__name__]
    if own:
        return [VerlTool(_spec(entry.tool_schema), entry.fn, is_function=True) for entry in own]
    public = [f for name, f in vars(module).items() if inspect.isfunction(f) and not name.startswith("_")]
    found = [
        VerlTool(spec_of(function), function, is_function=True)
        for function in public
        if function.__module__ == module.__name__
    ]
    if not found:
        raise ConfigError(f"function_tools {path}: it has no public function")
    return found


# ---------------------------------------------------------------- the factory


class VerlEnvs:
    """Makes environments with the tools that files of verl name. `tools` is the one there is: a `Factory`."""

    def __call__(self, task: Task, world: World, **arguments: Json) -> VerlEnv:
        """The environment of one rollout."""
        return VerlEnv(task, world, section(VerlArguments, arguments))

    def prepare(self, arguments: Mapping[str, Json]) -> None:
        """Load everything. ConfigError for arguments that cannot be."""
        asked = section(VerlArguments, arguments)
        tools_of(asked.tool_config, asked.function_tools)
        if asked.interaction_config is not None:
            interactions_of(asked.interaction_config)


tools = VerlEnvs()
