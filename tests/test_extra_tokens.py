"""Every sampled token is counted: in a rollout, or as extra (`rollout/extra_tokens_sum`)."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

import whet
from codecs_numbers import Numbers
from tiny import RUN
from whet import disaggregated
from whet.disaggregated import follow
from whet.envs.env import EnvRestarted, EnvStep, World
from whet.explorer import Explorer
from whet.rollout.engine import OnTokens
from whet.rollout.episode import play_groups
from whet.rollout.limits import EpisodeLimits
from whet.rollout.scripted import ScriptedEngine
from whet.track.monitor import Monitor
from whet.types import Completion, Group, Message, Request, Sampling, Task

END = 1
NUMBERS = Message("user", "200 300")
HELD_OUT = [{"prompt": word, "answer": word} for word in ("ab", "cd", "ef")]
TASK = Task(uid=0, source="s", prompt=(NUMBERS,), token_ids=(200, 300))


class Counting(ScriptedEngine):
    """An engine that counts what it gives away."""

    given = 0

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        done = await super().generate(request, on_tokens)
        self.given += len(done.token_ids)
        return done


class Faulty:
    """Asks the policy beside the conversation, rewrites its history, fails, and loses its host, all by chance."""

    def __init__(self, random: Random, world: World) -> None:
        self.random, self.world = random, world

    async def first(self) -> list[Message]:
        return [NUMBERS]

    async def step(self, reply: Message) -> EnvStep:
        await asyncio.sleep(0)
        chance = self.random.random()
        if chance < 0.2:
            await self.world.chat([NUMBERS])
        if chance < 0.1:
            raise EnvRestarted("its host ended", suspect=False)
        if chance < 0.3:
            raise ValueError("a fault")
        history = [Message("user", f"{self.random.randrange(50, 90)}")] if chance < 0.5 else None
        return EnvStep([NUMBERS], history=history, reward=0.5, done=chance > 0.8)

    async def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_sampled_is_in_a_rollout_or_extra(seed: int, cancelled: bool) -> None:
    """Whatever fails, is retried, begins anew, forks, or is given up."""
    random, extra = Random(seed), list[int]()

    async def say(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        await asyncio.sleep(0)
        return [*(random.randrange(2, 99) for _ in range(random.randrange(4))), END]

    engine = Counting(say, end_token_ids=[END])

    async def story() -> int:
        playing = asyncio.ensure_future(
            play_groups(
                engine, [replace(TASK, uid=uid) for uid in range(3)], group_size=3,
                sampling=Sampling(max_tokens=60), seed=seed, purpose="train", decode=str, end_token_ids=[END],
                timeout_s=60.0, retries=2, codec=Numbers(), limits=EpisodeLimits(max_turns=6),
                make_env=lambda task, world: Faulty(random, world), extra=extra.append,
            )
        )  # fmt: skip
        for _ in range(random.randrange(30, 60)) if cancelled else ():
            await asyncio.sleep(0)
        if cancelled:
            playing.cancel()
        try:
            return sum(group.tokens for group in await playing)
        except asyncio.CancelledError:
            return 0

    kept = asyncio.run(story())
    assert engine.given == kept + sum(extra)
    assert len(extra) == 1
    assert engine.given > 0
    assert cancelled or extra[0] > 0 or seed not in range(3), "something was retried"


@pytest.mark.parametrize("scored", [0, 1])
def test_rollouts_that_are_given_up_while_others_are_scored_are_extra(
    scored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of remax: while they are, or their greedy replies are."""
    engine, calls, waits = Counting(lambda *_: [7, END], end_token_ids=[END]), list[int](), asyncio.Event()

    async def score(groups: list[Group], rewards: object) -> list[Group]:
        calls.append(len(groups))
        if len(calls) > scored:
            waits.set()
            await asyncio.Event().wait()
        return groups

    monkeypatch.setattr("whet.explorer.score", score)
    monkeypatch.setattr(Monitor, "phase", lambda self, name: nullcontext())
    explorer, double = object.__new__(Explorer), cast(Any, None)
    monitor = Monitor("s", double, double, double)
    remax = SimpleNamespace(needs={"baseline"})
    plan = SimpleNamespace(mode="synchronous")
    explorer.context = cast(Any, SimpleNamespace(monitor=monitor, algorithm=remax, plan=plan))
    explorer.rewards, explorer.checks_failures = double, False
    playing = partial(
        play_groups, engine, sampling=Sampling(max_tokens=6), seed=0, purpose="train", decode=str,
        end_token_ids=[END], timeout_s=60.0, extra=monitor.sampled_beside,
    )  # fmt: skip
    explorer.play, explorer.play_greedy = partial(playing, group_size=2), partial(playing, group_size=1)

    async def story() -> None:
        played = asyncio.ensure_future(explorer.played([TASK]))
        await asyncio.wait_for(waits.wait(), 60)
        played.cancel()
        with pytest.raises(asyncio.CancelledError):
            await played

    asyncio.run(story())
    assert monitor.extra_tokens == engine.given == 4 + 2 * scored


@pytest.mark.parametrize(
    ("tokens", "restarts", "said"),
    [
        (0, 0, ""),
        (12, 0, "; 12 sampled tokens are in none of them"),
        (0, 2, "; 2 episodes began anew, as the hosts of their environments were lost"),
    ],
)
def test_an_explorer_in_a_process_of_its_own_tells_them_at_its_end(
    tokens: int, restarts: int, said: str
) -> None:
    """The trainer writes the metrics, and has no account of what its explorers sampled in vain or began anew."""
    messages, double = list[str](), cast(Any, None)
    display = SimpleNamespace(phase=lambda name: None, message=messages.append)
    monitor = Monitor("rl", cast(Any, display), double, double)
    monitor.sampled_beside(tokens)
    explorer = SimpleNamespace(
        context=SimpleNamespace(monitor=monitor, stopping=True, name="rl"), restarts=lambda: restarts
    )
    queue = SimpleNamespace(count=3)
    weights = cast(Any, SimpleNamespace(transport=SimpleNamespace(root=Path("run/weights"))))
    asyncio.run(follow(cast(Any, explorer), cast(Any, queue), weights, code={}, at=lambda version: None))
    assert messages == [f"explored 3 groups of stage 'rl'{said}"]


def test_an_explorer_that_may_be_killed_has_told_them_before(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, double = list[str](), cast(Any, None)
    display = SimpleNamespace(phase=lambda name: None, message=messages.append)
    watch = SimpleNamespace(beat=lambda what: None)
    monitor = Monitor("rl", cast(Any, display), cast(Any, watch), double)
    monitor.sampled_beside(12)
    monkeypatch.setattr(disaggregated, "SAY_S", -1.0)
    monkeypatch.setattr(disaggregated, "LOOK_S", 0.0)
    monkeypatch.setattr(disaggregated, "Idle", lambda weights: SimpleNamespace(look=lambda done, busy: None))

    class UntilTold(SimpleNamespace):
        @property
        def stopping(self) -> bool:
            return bool(messages)

    explorer = SimpleNamespace(
        context=UntilTold(monitor=monitor, name="rl"),
        in_flight=SimpleNamespace(playing=()),
        restarts=lambda: 0,
    )
    queue = SimpleNamespace(count=3, broken=None, store=SimpleNamespace(noted=lambda name: None))
    weights = cast(Any, SimpleNamespace(newer=lambda: None, receiver=SimpleNamespace(version=2)))
    asyncio.run(follow(cast(Any, explorer), cast(Any, queue), weights, code={}, at=lambda version: None))
    assert messages[0].startswith("3 groups, ")
    assert messages[0].endswith("weights version 2; 12 sampled tokens are in none of them")


MINE = '''
import json
from whet.envs.env import EnvStep
from whet.rollout.scripted import ScriptedEngine
from whet.types import Message

class Counting(ScriptedEngine):
    async def generate(self, request, on_tokens=None):
        done = await super().generate(request, on_tokens)
        with open("{given}", "a", encoding="utf-8") as file:
            file.write(json.dumps(len(done.token_ids)) + "\\n")
        return done

def counting(inputs):
    """Says its own prompt again, by as many tokens as its key says."""
    return Counting(
        lambda prompt, sampling, version: prompt[-1:] * (1 + sampling.key % 3),
        end_token_ids=inputs.end_token_ids, max_context=inputs.max_context, decode=inputs.decode,
    )

class Fails:
    """The first attempt at every second rollout."""
    def __init__(self, task, world):
        self.fails = world.attempt == 0 and world.index % 2 == 0
    async def first(self):
        return []
    async def step(self, reply):
        if self.fails:
            raise ValueError("once")
        return EnvStep(reward=float(len(reply.content)), done=True)
'''


def test_the_tokens_of_a_run_add_up(tmp_path: Path) -> None:
    """Those of its rollouts and evaluations, of failed attempts, and of greedy replies are all that the engine gave."""
    mine, given = tmp_path / "mine.py", tmp_path / "given"
    mine.write_text(MINE.replace("{given}", str(given)))
    own: dict[str, Any] = {
        "algorithm": {"name": "remax"},
        "rollout": {
            **RUN["rollout"],
            "engine": f"{mine}:counting",
            "env": {"make": f"{mine}:Fails", "observation_tokens": 16},
            "retries": 1,
        },
        "rewards": {},
        "train": {"steps": 2, "tasks_per_step": 4},
        "data": {**RUN["data"], "max_prompt_tokens": 64, "eval": [{"rows": HELD_OUT, "name": "held"}]},
        "eval": {"at_start": False},
        "model": {"scratch": {**RUN["model"]["scratch"], "max_position_embeddings": 128}},
    }
    run = whet.train(**{**RUN, **own}, run_dir=str(tmp_path / "run"))
    (judged,) = (line for line in run.metrics if "eval/accuracy" in line)
    kept = sum(line.get("rollout/tokens_sum", 0) for line in run.metrics)
    kept += round(judged["eval/held/tokens_mean"] * len(HELD_OUT))
    lines = (tmp_path / "run/timings.jsonl").read_text().splitlines()
    timings = [json.loads(line) for line in lines]
    extra = [line["rollout/extra_tokens_sum"] for line in timings if "time/step_s" in line]
    assert len(extra) == 2
    extra += [line["eval/extra_tokens_sum"] for line in timings if "time/evaluate_s" in line]
    assert len(extra) == 3
    assert min(extra) > 0
    assert kept + sum(extra) == sum(map(int, given.read_text().split()))
