"""Playing groups: flat rollouts, seeds, turns, and what happens when an engine or an environment fails."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from codecs_numbers import Numbers
from jumping import go
from whet.buffer import groups
from whet.config.schema import RolloutConfig, SamplingConfig
from whet.envs.env import EnvStep, World, as_step
from whet.rollout.episode import play_groups, sampling_by_source, to_sampling
from whet.rollout.limits import EpisodeLimits
from whet.rollout.pace import Pace
from whet.rollout.scripted import ScriptedEngine
from whet.seeds import rollout_key
from whet.types import Completion, Group, Message, Rollout, Sampling, Task, Turn, VersionSpan

T = TypeVar("T")
END = 1


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work, 20)

    return go(bounded())


def _task(n: int) -> Task:
    prompt = (Message("user", f"{50 + n} {60 + n}"),)
    return Task(uid=10 + n, source="s", prompt=prompt, token_ids=(50 + n, 60 + n))


def tasks(count: int) -> list[Task]:
    return [_task(i) for i in range(count)]


def decode(token_ids: list[int]) -> str:
    return " ".join(map(str, token_ids))


async def play(
    engine: ScriptedEngine, count: int = 1, sources: Sequence[str] = (), **options: Any
) -> list[Group]:
    defaults: dict[str, Any] = {
        "group_size": 2,
        "sampling": Sampling(max_tokens=6),
        "seed": 3,
        "purpose": "train",
        "decode": decode,
        "end_token_ids": [END],
        "timeout_s": 5.0,
    }
    asked = [replace(task, source=name) for task, name in zip(tasks(count), sources or ["s"] * count)]
    return await play_groups(engine, asked, **{**defaults, **options})


def one(engine: ScriptedEngine, **options: Any) -> Rollout:
    return run(play(engine, group_size=1, **options))[0].rollouts[0]


def flat(r: Rollout) -> None:
    """What holds for every rollout."""
    n = len(r.strand.token_ids)
    assert (
        n
        == len(r.strand.mask)
        == len(r.strand.logprobs)
        == len(r.strand.sample_logprobs)
        == len(r.strand.versions)
    )
    for mask, logp, sample_logp, version in zip(
        r.strand.mask, r.strand.logprobs, r.strand.sample_logprobs, r.strand.versions
    ):
        assert mask in (0, 1)
        assert mask or (logp, sample_logp, version) == (0.0, 0.0, -1)
        assert not mask or version >= 0


# ---------------------------------------------------------------- one reply


def test_a_reply_becomes_a_flat_rollout() -> None:
    said = Completion(
        token_ids=[7, 8, END],
        logprobs=[-0.5, -0.25, -1.0],
        sample_logprobs=[-0.4, -0.2, -0.9],
        spans=(VersionSpan(4, 0, 2), VersionSpan(5, 2, 3)),
        finish_reason="stop",
    )
    r = one(ScriptedEngine(lambda *_: said))
    assert r == Rollout.one_strand(
        task=tasks(1)[0],
        index=0,
        token_ids=[50, 60, 7, 8, END],
        mask=[0, 0, 1, 1, 1],
        logprobs=[0.0, 0.0, -0.5, -0.25, -1.0],
        sample_logprobs=[0.0, 0.0, -0.4, -0.2, -0.9],
        versions=[-1, -1, 4, 4, 5],
        finish_reason="stop",
        text="7 8",
        turns=(Turn(2, 5, "stop"),),
    )


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ({"logprobs": [-0.5, -0.25]}, "its tokens and log-probs differ in number"),
        ({"logprobs": [-0.5, -0.25, -1.0, 0.0]}, "its tokens and log-probs differ in number"),
        ({"sample_logprobs": [-0.5]}, "its tokens and log-probs differ in number"),
        ({"logprobs": [-0.5, math.inf, -1.0]}, "a log-prob that is not finite"),
        ({"spans": ()}, "its versions are of the tokens [], it sampled 3"),
        (
            {"spans": (VersionSpan(4, 0, 5), VersionSpan(4, 5, 1), VersionSpan(4, 1, 3))},
            "its versions are of",
        ),
        ({"spans": (VersionSpan(4, 0, 3.0),)}, "its versions are of the tokens [(0, 3.0)], it sampled 3"),
        ({"token_ids": [7, 8, 100]}, "it sampled the token 100; the vocabulary is 0 to 99"),
        ({"token_ids": [7, 8, 2**40]}, "it sampled the token 1099511627776; the vocabulary is 0 to 99"),
        ({"token_ids": [7, -1, 9]}, "it sampled the token -1; the vocabulary is 0 to 99"),
        ({"token_ids": [7, True, 9]}, "it sampled the token True; the vocabulary is 0 to 99"),
        ({"token_ids": []}, "it sampled 0 tokens; expected a list of 1 to 8"),
        ({"token_ids": [7] * 9}, "it sampled 9 tokens; expected a list of 1 to 8"),
        ({"finish_reason": "eos"}, "it ended with finish_reason='eos'; expected 'stop' or 'length'"),
        ({"token_ids": "789"}, "it sampled a str of tokens; expected a list of 1 to 8"),
    ],
)
def test_a_reply_that_no_engine_can_give_is_an_error_of_its_rollout(lie: dict[str, Any], said: str) -> None:
    """An engine of a user's own: nothing else stands between it and training."""
    whole: dict[str, Any] = {
        "token_ids": [7, 8, 9],
        "logprobs": [-0.5, -0.25, -1.0],
        "sample_logprobs": [-0.5, -0.25, -1.0],
        "spans": (VersionSpan(4, 0, 3),),
        "finish_reason": "length",
    }
    how = {"sampling": Sampling(max_tokens=8), "vocab": 100}
    assert one(ScriptedEngine(lambda *_: Completion(**whole)), **how).error is None
    r = one(ScriptedEngine(lambda *_: Completion(**{**whole, **lie})), **how)
    assert said in (r.error or "")
    assert (r.finish_reason, r.tokens) == ("abort", 0)


@pytest.mark.parametrize(
    ("tokens", "options", "text"),
    [
        ([7, END], {}, "7"),
        ([7, 9], {"stop_token_ids": (9,)}, "7"),
        ([7, END, 9], {"ignore_eos": True}, f"7 {END} 9"),
        ([7, 8, 9, 10], {"max_tokens": 3}, "7 8 9"),
        ([END], {}, ""),
    ],
)
def test_only_the_end_token_that_ended_it_is_left_out_of_the_text(
    tokens: list[int], options: dict[str, Any], text: str
) -> None:
    engine = ScriptedEngine(lambda *_: tokens, end_token_ids=[END])
    r = one(engine, sampling=replace(Sampling(max_tokens=len(tokens)), **options))
    assert r.text == text
    assert r.strand.token_ids[2:].tolist() == tokens[: r.tokens]


def test_tokens_of_a_stop_string_stay_in_the_text() -> None:
    engine = ScriptedEngine(lambda *_: [7, 8, 9], end_token_ids=[END], decode=decode)
    r = one(engine, sampling=Sampling(max_tokens=6, stop=("8",)))
    assert (r.text, r.finish_reason) == ("7 8", "stop")


def test_a_source_is_sampled_in_its_own_way() -> None:
    """Length and stop strings follow the task's source, each with all else of the shared sampling."""
    cfg = RolloutConfig.model_validate_json(
        """{"sampling": {"max_tokens": 5, "temperature": 0.5, "stop": ["9"]},
            "sources": {"brief": {"max_tokens": 2}, "open": {"stop": []}}}"""
    )
    engine = ScriptedEngine(lambda *_: [7, 8, 9, 7, 7, 7], end_token_ids=[END], decode=decode)
    names = ("brief", "open", "other")
    played = play(engine, 3, names, sampling=to_sampling(cfg.sampling), by_source=sampling_by_source(cfg))
    assert [group.rollouts[0].text for group in run(played)] == ["7 8", "7 8 9 7 7", "7 8 9"]
    assert {call.sampling.temperature for call in engine.calls} == {0.5}


def test_groups_come_in_order_with_a_key_each() -> None:
    async def say(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        await asyncio.sleep(random.Random(sampling.key).random() * 0.02)  # answers come back in another order
        return [token_ids[0], sampling.key % 40 + 2]

    engine = ScriptedEngine(say, end_token_ids=[END])
    groups = run(play(engine, 5, group_size=3))
    assert [g.task for g in groups] == tasks(5)
    for group in groups:
        assert [r.index for r in group.rollouts] == [0, 1, 2]
        for r in group.rollouts:
            flat(r)
            key = rollout_key(3, group.task.uid, r.index, purpose="train")
            assert r.strand.token_ids[2:].tolist() == [group.task.token_ids[0], key % 40 + 2]
    assert len({c.sampling.key for c in engine.calls}) == 15
    other = ScriptedEngine(say, end_token_ids=[END])
    run(play(other, 5, group_size=3, purpose="eval"))
    assert not {c.sampling.key for c in engine.calls} & {c.sampling.key for c in other.calls}


def test_all_rollouts_are_asked_at_once() -> None:
    waiting = 0
    everyone: asyncio.Event

    async def say(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        nonlocal waiting
        waiting += 1
        if waiting == 12:
            everyone.set()
        await everyone.wait()  # hangs unless all twelve are there
        return [5]

    async def story() -> list[Group]:
        nonlocal everyone
        everyone = asyncio.Event()
        return await play(ScriptedEngine(say), 4, group_size=3)

    assert all(r.error is None for g in run(story()) for r in g.rollouts)


# ---------------------------------------------------------------- failures


def test_one_that_hangs_or_raises_aborts_alone() -> None:
    async def say(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        if token_ids[0] == 51:
            await asyncio.sleep(3600)
        if token_ids[0] == 52:
            raise RuntimeError("out of cheese")
        if token_ids[0] == 53:
            raise TimeoutError("the engine's own")
        return [5, END]

    groups = run(play(ScriptedEngine(say, end_token_ids=[END]), 5, timeout_s=0.05))
    for group in groups:
        for r in group.rollouts:
            flat(r)
    reasons = [{r.finish_reason for r in g.rollouts} for g in groups]
    assert reasons == [{"stop"}, {"abort"}, {"abort"}, {"abort"}, {"stop"}]
    errors = [g.rollouts[0].error for g in groups]
    assert errors[0] is errors[4] is None
    assert errors[1] == "not finished within rollout.timeout_s=0.05"
    assert errors[2].startswith("RuntimeError: out of cheese (test_episode.py:")
    assert errors[3].startswith("TimeoutError: the engine's own (test_episode.py:")
    assert groups[1].rollouts[0].strand.token_ids.tolist() == [51, 61]
    assert groups[1].rollouts[0].tokens == 0


def test_a_timeout_cancels_the_request() -> None:
    cancelled = []

    async def say(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(sampling.key)
            raise
        return []

    run(play(ScriptedEngine(say), 1, timeout_s=0.02))
    assert len(cancelled) == 2


def test_cancelling_the_play_is_not_an_abort() -> None:
    async def say(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        await asyncio.sleep(3600)
        return []

    async def story() -> None:
        playing = asyncio.create_task(play(ScriptedEngine(say), 3))
        await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    run(story())


@pytest.mark.parametrize("leave", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes_through(leave: type[BaseException]) -> None:
    def say(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        raise leave

    with pytest.raises(leave):
        run(play(ScriptedEngine(say)))


def test_a_request_the_engine_refuses_is_an_abort_with_its_words() -> None:
    r = one(ScriptedEngine(lambda *_: [5], max_context=5))
    assert r.finish_reason == "abort"
    assert r.error is not None
    assert r.error.startswith("RequestError: a prompt of 2 tokens with max_tokens=6 exceeds")


# ---------------------------------------------------------------- environments


class Countdown:
    """Answers `n` times, gives 0.5 each time, then is done."""

    made = 0

    def __init__(self, n: int, fail_at: int | None = None) -> None:
        Countdown.made += 1
        self.left, self.fail_at = n, fail_at
        self.heard: list[Message] = []

    async def first(self) -> list[Message]:
        return [Message("user", "100")]

    async def step(self, reply: Message) -> EnvStep:
        self.heard.append(reply)
        if len(self.heard) == self.fail_at:
            raise ValueError("the world ended")
        self.left -= 1
        return EnvStep([Message("user", f"{200 + self.left} 300")], reward=0.5, done=self.left == 0)


def count_up(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
    return [token_ids[-1] + 1, END]


def test_turns_append_and_never_rewrite() -> None:
    envs: list[Countdown] = []

    def make(task: Task, world: World) -> Countdown:
        envs.append(Countdown(3))
        return envs[-1]

    engine = ScriptedEngine(count_up, end_token_ids=[END])
    r = one(engine, make_env=make, codec=Numbers())
    flat(r)
    #                p   p   o    a    a    o    o    a    a    o    o    a    a
    assert r.strand.token_ids.tolist() == [50, 60, 100, 101, END, 202, 300, 301, END, 201, 300, 301, END]
    assert r.strand.mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert [c.token_ids for c in engine.calls] == [r.strand.token_ids[:n].tolist() for n in (3, 7, 11)]
    assert [c.sampling.max_tokens for c in engine.calls] == [6, 4, 2]  # the limit is the rollout's
    assert len({c.sampling.key for c in engine.calls}) == 1
    assert envs[0].heard == [Message("assistant", t) for t in ("101", "301", "301")]
    assert [m.content for m in r.messages] == ["100", "101", "202 300", "301", "201 300", "301"]
    assert r.text == "101 301 301"
    assert (r.reward, r.reward_parts, r.finish_reason) == (1.5, {"env": 1.5}, "stop")
    assert r.turns == tuple(Turn(start, start + 2, "stop", 0.5) for start in (3, 7, 11))


def test_each_turn_has_the_seconds_of_its_reply_and_of_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that only they move: a reply takes 1 s for each token that it follows, an answer 0.25, 0.5 ... s."""
    now = [100.0]
    monkeypatch.setattr("whet.rollout.episode.time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        now[0] += len(token_ids)
        return count_up(token_ids, sampling, version)

    class Slow(Countdown):
        async def step(self, reply: Message) -> EnvStep:
            now[0] += 0.25 * (len(self.heard) + 1)
            return await super().step(reply)

    engine = ScriptedEngine(slow, end_token_ids=[END])
    timed = one(engine, make_env=lambda t, world: Slow(3), codec=Numbers())
    assert timed.seconds == ((3.0, 0.25), (7.0, 0.5), (11.0, 0.75))
    failed = one(engine, make_env=lambda t, world: Slow(3, fail_at=2), codec=Numbers())
    assert failed.seconds == ((3.0, 0.25), (7.0, 0.5)), "of the turn that failed, too"
    plain = one(
        ScriptedEngine(count_up, end_token_ids=[END]), make_env=lambda t, w: Countdown(3), codec=Numbers()
    )
    assert plain == timed, "seconds are no part of what is compared"
    group = Group(timed.task, (timed,))
    assert groups.decode(groups.encode(group)).rollouts[0].seconds == (), "nor of what is stored"


def test_the_state_that_an_environment_tells_last_is_the_rollouts() -> None:
    class Board(Countdown):
        async def step(self, reply: Message) -> EnvStep:
            state = {"heard": len(self.heard) + 1} if len(self.heard) < 2 else None
            return replace(await super().step(reply), state=state)

    engine = ScriptedEngine(count_up, end_token_ids=[END])
    r = one(engine, make_env=lambda t, world: Board(3), codec=Numbers())
    assert (len(r.turns), r.state) == (3, {"heard": 2})


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (object(), "not a JSON value"),
        (float("nan"), "not a JSON value"),
        ("x" * 2**20, "characters; at most"),
    ],
)
def test_a_state_that_is_no_small_json_value_is_refused(state: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"EnvStep.state: .*{said}"):
        as_step(EnvStep(state=state))


def test_every_rollout_has_its_own_environment() -> None:
    Countdown.made = 0
    groups = run(
        play(
            ScriptedEngine(count_up, end_token_ids=[END]),
            3,
            group_size=4,
            make_env=lambda task, world: Countdown(1),
            codec=Numbers(),
        )
    )
    assert Countdown.made == 12
    assert {r.reward for g in groups for r in g.rollouts} == {0.5}


def test_setting_the_world_up_does_not_count_for_the_episode() -> None:
    """Its limit is 0.5 s: making the world takes longer and is no fault, an answer that takes longer is one."""

    class Waits(Countdown):
        def __init__(self, first_s: float, step_s: float) -> None:
            super().__init__(1)
            self.first_s, self.step_s = first_s, step_s

        async def first(self) -> list[Message]:
            await asyncio.sleep(self.first_s)
            return await super().first()

        async def step(self, reply: Message) -> EnvStep:
            await asyncio.sleep(self.step_s)
            return await super().step(reply)

    def played(first_s: float, step_s: float, setup_s: float) -> Rollout:
        return one(
            ScriptedEngine(count_up, end_token_ids=[END]),
            make_env=lambda task, world: Waits(first_s, step_s),
            codec=Numbers(),
            limits=EpisodeLimits(setup_s=setup_s),
            timeout_s=0.5,
        )

    assert played(0.7, 0.0, setup_s=60.0).error is None
    late = played(0.0, 0.7, setup_s=60.0)
    assert (late.stop_reason, late.error) == (
        "time",
        "not finished within rollout.timeout_s=0.5 (after turn 1)",
    )
    assert played(60.0, 0.0, setup_s=0.0).stop_reason == "time", "the set-up has a limit, too"


def test_turns_and_tokens_are_bounded() -> None:
    engine = ScriptedEngine(count_up, end_token_ids=[END])
    r = one(
        engine,
        make_env=lambda t, world: Countdown(99),
        codec=Numbers(),
        limits=EpisodeLimits(max_turns=4),
        sampling=Sampling(max_tokens=50),
    )
    assert (len(engine.calls), r.finish_reason, r.tokens) == (4, "length", 8)
    engine = ScriptedEngine(count_up, end_token_ids=[END])
    r = one(engine, make_env=lambda t, world: Countdown(99), codec=Numbers(), sampling=Sampling(max_tokens=5))
    assert (r.finish_reason, r.tokens) == ("length", 5)
    assert r.strand.mask[-1] == 1  # nothing is appended that nobody will answer


def test_an_environment_that_fails_keeps_the_finished_turns() -> None:
    r = one(
        ScriptedEngine(count_up, end_token_ids=[END]),
        make_env=lambda t, world: Countdown(9, fail_at=2),
        codec=Numbers(),
    )
    flat(r)
    assert r.finish_reason == "abort"
    assert r.error is not None
    assert r.error.startswith("ValueError: the world ended (test_episode.py:")
    assert r.error.endswith(" (after turn 2)")
    assert (r.tokens, r.text, r.reward, r.reward_parts) == (4, "101 301", None, {})


def test_the_traceback_of_an_environment_stands_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    pace = Pace(timeout_s=5.0)
    with caplog.at_level("INFO", "whet"):
        for _ in range(2):
            one(
                ScriptedEngine(count_up, end_token_ids=[END]),
                make_env=lambda t, world: Countdown(9, fail_at=2),
                codec=Numbers(),
                pace=pace,
            )
    assert caplog.text.count("aborted: ValueError: the world ended") == 2
    assert caplog.text.count('raise ValueError("the world ended")') == 1


def test_the_traceback_of_an_engine_stands_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    """Of each place that raises, however many rollouts it ends; a refusal is complete without one."""

    def say(token_ids: list[int], sampling: Sampling, version: int) -> list[int]:
        if token_ids[0] == 50:
            raise RuntimeError("out of cheese")
        raise RuntimeError("out of bread")

    with caplog.at_level("INFO", "whet"):
        run(play(ScriptedEngine(say), 2, group_size=3))
        one(ScriptedEngine(lambda *_: [5], max_context=5))
    assert caplog.text.count("aborted: RuntimeError: out of") == 6
    assert caplog.text.count('raise RuntimeError("out of cheese")') == 1
    assert caplog.text.count('raise RuntimeError("out of bread")') == 1
    assert caplog.text.count("aborted: RequestError: ") == 1
    assert caplog.text.count("Traceback (most recent call last)") == 2


class Excess(Countdown):
    """Pays more than a float32 holds, then raises what no file can hold."""

    async def step(self, reply: Message) -> EnvStep:
        if self.left == 1:
            return EnvStep(reward=1e39)
        raise ValueError("\ud83d" + "x" * 1000)


@pytest.mark.parametrize(
    ("turns", "said"),
    [(1, "ValueError: 1e+39 as EnvStep.reward; expected a"), (2, "ValueError: \\ud83dxxx")],
)
def test_what_an_environment_says_is_made_fit_to_be_written_down(turns: int, said: str) -> None:
    engine = ScriptedEngine(count_up, end_token_ids=[END])
    r = one(engine, make_env=lambda t, world: Excess(turns), codec=Numbers())
    assert r.reward is None
    assert r.error is not None
    assert r.error.startswith(said)
    assert len(r.error) < 500


def test_an_environment_needs_an_encoder() -> None:
    with pytest.raises(ValueError, match="codec"):
        one(ScriptedEngine(count_up), make_env=lambda t, world: Countdown(1))


# ---------------------------------------------------------------- config


def test_every_sampling_key_reaches_the_engine() -> None:
    values: dict[str, Any] = {
        "repetition_penalty": 1.1,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ("a",),
        "stop_token_ids": (4,),
        "ignore_eos": True,
    }
    assert set(values) == set(SamplingConfig.model_fields) == {f.name for f in fields(Sampling)} - {"key"}
    assert to_sampling(SamplingConfig(**values)) == Sampling(**values)
    assert to_sampling(SamplingConfig()) == Sampling()
