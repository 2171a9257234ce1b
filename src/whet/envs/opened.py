"""The environments of a run, by the sections of the config that describe them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.config.schema import Config
from whet.data.codec import MessageCodec
from whet.envs.env import Env, EnvBroken, MakeEnv, World
from whet.envs.hosts import EnvHosts
from whet.envs.journal import Journal
from whet.envs.journaled import Counts, about, journaled, promise
from whet.envs.several import has_env
from whet.envs.work import RunWork
from whet.rewards.combine import RewardSet
from whet.types import Metrics, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


log = logging.getLogger(__name__)

MOST_ALONE = 16
"""Episodes at once that are played in hosts of their own. Each that ran code when its host ended gets one; if the host
ended for lack of memory, as many hosts as it had episodes would need more."""


class FewAtOnce:
    """Entered by so many at once; the others wait in a queue."""

    def __init__(self, most: int) -> None:
        self.entered = 0
        """So far."""
        self._room = asyncio.Semaphore(most)

    async def __aenter__(self) -> None:
        await self._room.acquire()
        self.entered += 1

    async def __aexit__(self, *_: object) -> None:
        self._room.release()


def silent(task: Task, world: World) -> Env:
    """In the place of an environment that must not be asked. Raises EnvBroken."""
    raise EnvBroken(
        f"the journal has no answer to what rollout {world.index} of task {task.uid} asks its environment. A run keeps "
        "the answers since its oldest checkpoint, and repeats no rollout that failed by a fault or a time limit. `whet "
        "replay --play` asks the environment itself"
    )


class Environments:
    """Hosts that have been started; stages with equal sections share them. Close it with the run."""

    def __init__(self, journal: Path | None = None, *, told_by: Mapping[str, str] | None = None) -> None:
        """journal: the folder of this process's journal. None: it keeps none. told_by: of a run that is replayed,
        the digests of its code by file: environments then answer what the journal has, and are never asked. None: they
        are asked."""
        self._folder = journal
        self._told_by = told_by
        self.journal: Journal | None = None
        """Opened with the first environment."""
        self._place = 0, 0
        self._counts: Counts = Counts()
        self._about: dict[str, str] = {}
        """Of what the hosts have loaded; a file may change while they run."""
        self.hosts: dict[str, EnvHosts] = {}
        """Those of each environment, by its section of the config."""
        self._work: RunWork | None = None
        """Of the stage that was asked for last."""
        self._told = Counter[str]()
        self._said: set[str] = set()
        """What was logged of chat templates."""
        self.alone = FewAtOnce(MOST_ALONE)

    def arguments(
        self,
        cfg: Config,
        tokenizer: PreTrainedTokenizerBase,
        ends: Collection[int],
        rewards: RewardSet | None = None,
        *,
        repeated: bool = False,
    ) -> dict[str, Any]:
        """What `play_groups` gets for a stage; nothing for a stage without an environment.

        ends: the model's end tokens. rewards: for environments that ask for scores. repeated: the same tasks are played
        again after later steps. What the chat template does to a conversation, and what of the environment's answers a
        resume repeats, is logged. ConfigError for an environment that cannot be loaded, or a tokenizer without a chat
        template; DataError for a template that refuses a second turn.
        """
        env = cfg.rollout.env
        if env is None:
            return {}
        calls = None if env.tool_format == "auto" else env.tool_format
        codec = MessageCodec(tokenizer, ends=ends, history=env.history, calls=calls)
        for said in codec.check_template().said(codec.history):
            self._say("chat template: %s", said)
        self._say("resume: %s", promise(cfg))
        known = env.model_dump_json()
        if known not in self._about:
            self._about[known] = about(cfg, self._told_by or {})
            if self._told_by is None:
                self.hosts[known] = EnvHosts(env, imports=cfg.imports)
        make: MakeEnv = silent if self._told_by is not None else self.hosts[known].make
        if self._folder is not None:
            if self.journal is None:
                self.journal = Journal(self._folder)
                self.journal.at(*self._place)
            what = self._about[known]
            make = journaled(make, self.journal, what, counts=self._counts, repeated=repeated)
        if self._work is None or self._work.rewards is not rewards:
            self._work = RunWork(rewards, cfg, self._counts)
        return {
            "make_env": make,
            "make_work": self._work.of,
            "codec": codec,
            "has_env": has_env(env),
            "alone": self.alone,
        }

    def _say(self, form: str, said: str) -> None:
        """Log it once."""
        if said not in self._said:
            log.info(form, said)
        self._said.add(said)

    def at(self, stage: int, step: int, *, ahead: int | None = None) -> None:
        """What is played from here on comes after `step` steps of a stage. ahead: how many steps before a rollout may
        have begun that is under way; None: it is not known, and every answer stays at hand."""
        self._place = stage, step
        if self.journal is not None:
            self.journal.at(stage, step)
            if ahead is not None:
                self.journal.over(stage, step - ahead)

    def saved(self, oldest: Callable[[], tuple[int, int] | None], *, ahead: int) -> None:
        """A checkpoint was saved. oldest: gives stage and step of the oldest one that there is. ahead: how many steps
        before a checkpoint a rollout may have begun that is under way in it."""
        if self.journal is not None and (place := oldest()) is not None:
            self.drop(place[0], place[1] - ahead)

    def drop(self, stage: int, step: int) -> None:
        """What was played before `step` steps of a stage were done is not played again."""
        if self.journal is not None:
            self.journal.drop(stage, step)

    @property
    def restarts(self) -> int:
        """Episodes that began anew so far because their host was lost."""
        return sum(hosts.restarted for hosts in self.hosts.values())

    def timings(self) -> Metrics:
        """Since the last call: hosts that were replaced, episodes that began anew because of that, answers that came
        from the journal, those that the journal had for another question, and what environments asked of the run.
        Nothing for a run without an environment."""
        if not self.hosts:
            return {}
        total = Counter[str]()
        for hosts in self.hosts.values():
            total += Counter({"host_restarts": hosts.restarts, "restarts": hosts.restarted})
        new, self._told = total - self._told, total
        counted = {
            f"env/{name}_count": float(self._counts.pop(name, 0))
            for name in ("replayed", "asked_anew", "scores", "programs")
        }
        return {f"env/{name}_count": float(new[name]) for name in ("host_restarts", "restarts")} | counted

    def close(self) -> None:
        """End all hosts."""
        for hosts in self.hosts.values():
            hosts.close()
        self.hosts.clear()
        self._about.clear()
        if self.journal is not None:
            self.journal.close()
