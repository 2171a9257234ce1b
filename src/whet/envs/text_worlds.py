"""ALFWorld, ScienceWorld and WebShop as Trinity-RFT plays them (0.4 to 0.6): `rollout.env.make:
whet.envs.text_worlds:alfworld`, `:scienceworld` or `:webshop`, docs/environments.md.

Each needs its own package, which is imported when it is named. The policy writes one `<action>...</action>` a reply, or
every one of `elements`, in this order, and then only an episode whose replies all do so is paid. An episode is blocking
code: all of its calls run in a thread of its own.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from importlib import import_module
from typing import Annotated, Any, Generic, NamedTuple, Protocol, TypeVar

from pydantic import Field, model_validator

from whet.config.environments import AT
from whet.config.sections.base import Positive, Section
from whet.envs.arguments import section
from whet.envs.env import EnvFault, EnvStep, World
from whet.guard.foreign import number
from whet.types import ConfigError, Json, Message, Task

UNFINISHED = -0.1
"""The reward of an episode of ALFWorld or WebShop that its last step does not end."""


class Observed(NamedTuple):
    """What a world says after an action."""

    text: str
    reward: float
    done: bool


class Game(Protocol):
    """One game of a world."""

    def reset(self) -> str: ...

    def step(self, action: str) -> Observed: ...

    def close(self) -> None: ...


class WorldArguments(Section):
    """`rollout.env.arguments`."""

    column: str
    """That of the row that names the game."""
    steps: Positive = 30
    """Replies of an episode."""
    elements: tuple[str, ...] = ()
    """Of a reply, the action among them. Default: the action alone, which may be missing."""
    repeats: Annotated[int, Field(ge=2)] | None = None
    """So many equal actions in a row end the episode without a reward."""
    unfinished: float = 0.0
    """What an episode is paid that its last step does not end."""

    @model_validator(mode="after")
    def _acts(self) -> WorldArguments:
        if self.elements and "action" not in self.elements:
            raise ConfigError(
                f"{AT}.elements={list(self.elements)!r}; expected names, with action among them"
            )
        return self


A = TypeVar("A", bound=WorldArguments)


class TextWorld:
    """The environment of one rollout."""

    def __init__(self, game: Game, asked: WorldArguments) -> None:
        self.game, self.asked, self.left = game, asked, asked.steps
        self.whole = True
        """All replies so far have had all elements."""
        self.actions: list[str] = []

    def first(self) -> list[Message]:
        return [Message("user", f"Observation: {self.game.reset()}")]

    def step(self, reply: Message) -> EnvStep:
        """A reply without an action is the empty action, which the worlds answer."""
        self.left -= 1
        action = self._action(reply.content)
        self.actions.append(action)
        repeats = self.asked.repeats
        last = self.actions[-repeats:] if repeats else []
        if len(last) == repeats and len(set(last)) == 1:
            return EnvStep(reward=0.0, parts={"invalid": float(not action), "finished": 0.0})
        seen = self.game.step(action)
        reward = number(seen.reward, " as the reward of the world") if self.whole else 0.0
        parts = {"invalid": float(not action), "finished": float(seen.done)}
        if seen.done:
            return EnvStep(reward=reward, parts=parts)
        if self.left < 1:
            return EnvStep(reward=reward + self.asked.unfinished, parts=parts, stop="turns")
        return EnvStep([Message("user", f"Observation: {seen.text}")], reward, parts, done=False)

    def _action(self, text: str) -> str:
        elements = self.asked.elements
        if not elements:
            return action_of(text)
        found = elements_of(text, elements)
        self.whole &= all(found)
        return found[elements.index("action")]

    def close(self) -> None:
        self.game.close()


def elements_of(text: str, names: Sequence[str]) -> list[str]:
    """What stands in each element of a reply; '' for all of them where one is missing or out of order. One pass: a
    pattern of so many parts would try all combinations of tags that a reply repeats."""
    found: list[str] = []
    for name in names:
        _, begins, text = text.partition(f"<{name}>")
        inside, ends, text = text.partition(f"</{name}>")
        if not (begins and ends):
            return [""] * len(names)
        found.append(inside.strip())
    return found


def action_of(text: str) -> str:
    """What the first <action> of a reply says; '' without one."""
    found = re.search(r"<action>(.*?)(</action>|$)", text, re.DOTALL)
    return found[1].strip() if found else ""


class TextWorlds(Generic[A]):
    """Makes environments of a world: `rollout.env.make`."""

    def __init__(
        self,
        opened: Callable[[Task, World, Json, A], Game],
        kind: type[A],
        modules: Sequence[str],
        needs: str,
    ) -> None:
        """opened: (task, world, what the column has, arguments) -> game. modules: what it imports; `needs` says how
        they are installed."""
        self.opened, self.kind, self.modules, self.needs = opened, kind, modules, needs

    def __call__(self, task: Task, world: World, **arguments: Json) -> TextWorld:
        """The environment of one rollout. EnvFault for a row without the column."""
        asked = section(self.kind, arguments)
        return TextWorld(self.opened(task, world, _column(task, asked.column), asked), asked)

    def prepare(self, arguments: Mapping[str, Json]) -> None:
        """ConfigError where the package is not there, or for arguments that are none."""
        section(self.kind, arguments)
        try:
            for module in self.modules:
                import_module(module)
        except ImportError as error:
            raise ConfigError(f"rollout.env.make: {self.needs} ({error})") from error


def _column(task: Task, column: str) -> Json:
    if column not in task.extra:
        there = ", ".join(sorted(task.extra)) or "none"
        raise EnvFault(f"task {task.uid} has no column {column!r} ({AT}.column); columns: {there}")
    return task.extra[column]


# ---------------------------------------------------------------- ALFWorld


class Alfworld:
    """A game file of ALFWorld, by TextWorld."""

    def __init__(self, task: Task, world: World, file: Json, asked: WorldArguments) -> None:
        if not isinstance(file, str):
            raise EnvFault(
                f"task {task.uid}: the game is {str(file)[:60]!r}; expected the path of a game file"
            )
        self.env = _textworld(file)

    def reset(self) -> str:
        text, _ = self.env.reset()
        return str(text)

    def step(self, action: str) -> Observed:
        text, reward, done, _ = self.env.step(action)
        if "Nothing happens." in text:
            text = f"{text} Is the action one of the list, and written like it?"
        return Observed(str(text), reward, bool(done))

    def close(self) -> None:
        self.env.close()


_REGISTERING = threading.Lock()


def _textworld(file: str) -> Any:
    """TextWorld's environment of a game. Its registry is one for all threads."""
    import textworld.gym

    with _REGISTERING:
        return textworld.gym.make(registered_game(file))


@cache
def registered_game(file: str) -> str:
    """The name under which TextWorld makes the game of a file."""
    import textworld
    import textworld.gym
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

    infos = textworld.EnvInfos(description=True, inventory=True, admissible_commands=True)
    return str(textworld.gym.register_game(file, infos, wrappers=[AlfredDemangler()]))


class AlfworldArguments(WorldArguments):
    """With what ALFWorld pays."""

    unfinished: float = UNFINISHED


alfworld = TextWorlds(
    Alfworld,
    AlfworldArguments,
    ("alfworld.agents.environment.alfred_tw_env", "textworld.gym"),
    "ALFWorld needs its package and its games: pip install alfworld, then alfworld-download",
)


# ---------------------------------------------------------------- ScienceWorld


class ScienceWorldArguments(WorldArguments):
    """With settings of ScienceWorld's own."""

    simplification: str = "easy"


class ScienceWorld:
    """A task of ScienceWorld: a map, or its JSON text, with task_name, var_num and jar_path. The reward of the episode
    is the highest score that it has had, of 1."""

    def __init__(self, task: Task, world: World, game: Json, asked: ScienceWorldArguments) -> None:
        from scienceworld import ScienceWorldEnv

        game = json.loads(game) if isinstance(game, str) else game
        if not isinstance(game, dict) or not {"task_name", "var_num"} <= game.keys():
            raise EnvFault(f"task {task.uid}: {str(game)[:60]!r}; expected a map with task_name and var_num")
        self.env = ScienceWorldEnv("", game.get("jar_path"), envStepLimit=100)
        self.env.load(game["task_name"], game["var_num"], asked.simplification)
        self.score = self.best = 0.0

    def reset(self) -> str:
        text, _ = self.env.reset()
        return f"The task: {self.env.get_task_description()}\n{text}"

    def step(self, action: str) -> Observed:
        text, reward, done, _ = self.env.step(action)
        self.score += number(reward, " as the reward of ScienceWorld")
        before, self.best = self.best, max(self.best, self.score)
        return Observed(str(text), (self.best - before) / 100.0, bool(done))

    def close(self) -> None:
        self.env.close()


scienceworld = TextWorlds(
    ScienceWorld,
    ScienceWorldArguments,
    ("scienceworld",),
    "ScienceWorld needs its package and Java: pip install scienceworld, and a Java runtime",
)


# ---------------------------------------------------------------- WebShop


class WebShopArguments(WorldArguments):
    """With settings of WebShop's own."""

    steps: Positive = 15
    unfinished: float = UNFINISHED
    num_products: Positive | None = None


class WebShop:
    """A session of WebShop, by its number. All sessions of a host share one shop, which takes gigabytes."""

    def __init__(self, task: Task, world: World, session: Json, asked: WebShopArguments) -> None:
        self.session = _session(task, session)
        shop = _shop(asked.num_products)
        from web_agent_site.envs.web_agent_text_env import WebAgentTextEnv

        prefix = f"{task.uid}-{world.index}-{world.attempt}-{id(self)}-"
        self.env = WebAgentTextEnv(observation_mode="text_rich", server=shop.server, session_prefix=prefix)

    def reset(self) -> str:
        self.env.reset(session=self.session)
        return str(self.env.observation)

    def step(self, action: str) -> Observed:
        if why := refused(action, self.env.get_available_actions()):
            return Observed(why, 0.0, False)
        text, reward, done, _ = self.env.step(action)
        return Observed(str(text), reward if done else 0.0, bool(done))

    def close(self) -> None:
        self.env.server.user_sessions.pop(self.env.session, None)


def refused(action: str, available: Mapping[str, Any]) -> str:
    """Why the shop cannot do an action; '' if it can."""
    name, _, argument = action.removesuffix("]").partition("[")
    argument, buttons = argument.strip().lower(), available["clickables"]
    if name == "search" and not argument:
        return "The search is empty: write search[what to look for]."
    if name == "search":
        return "" if available["has_search_bar"] else "This page has no search: click[back to search] first."
    if name == "click":
        return "" if argument in buttons else f"This page has no such button. It has: {', '.join(buttons)}."
    return "This is no action: write <action>search[words]</action> or <action>click[button]</action>."


def _session(task: Task, value: Json) -> int:
    number_given = int(value) if isinstance(value, str) and value.isdecimal() else value
    if type(number_given) is not int or number_given < 0:
        raise EnvFault(
            f"task {task.uid}: the session is {str(value)[:40]!r}; expected a number of at least 0"
        )
    return number_given


_OPENING = threading.Lock()


def _shop(num_products: int | None) -> Any:
    with _OPENING:
        return opened_shop(num_products)


@lru_cache(maxsize=1)
def opened_shop(num_products: int | None) -> Any:
    """WebShop with its products, which take minutes to read: one for all episodes of this process."""
    from web_agent_site.envs.web_agent_text_env import WebAgentTextEnv

    return WebAgentTextEnv(observation_mode="text_rich", num_products=num_products, human_goals=True)


webshop = TextWorlds(
    WebShop,
    WebShopArguments,
    ("web_agent_site.envs.web_agent_text_env",),
    "WebShop is no package of the index: install web_agent_site from its repository (princeton-nlp/WebShop) with its "
    "setup.sh, which also makes the data",
)
