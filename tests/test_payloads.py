"""Nothing that judges a reply runs what is written in it, or in the row: code in all places, and nothing happens."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import payloads
import whet.rewards.math
from test_rewards import group, task
from whet.config.schema import Config, DataConfig, RewardConfig, RewardWorkersConfig
from whet.config.sources import verifiers
from whet.guard import sandbox
from whet.guard.jail import Jail, RewardCall
from whet.guard.worker import Guarded
from whet.rewards import answer_line, builtin, gsm8k, gym, tagged, trinity, verl
from whet.rewards.combine import RewardSet, score
from whet.rewards.gym_read import READ
from whet.types import ConfigError

needs_sandbox = pytest.mark.skipif(bool(sandbox.lacking()), reason=f"no sandbox here: {sandbox.lacking()}")

EVALUATE = [name for name in payloads.VERIFIERS if name not in READ]
OTHERS = {
    "exact": {},
    "choice": {},
    "number": {"flexible": True},
    "format": {"pattern": ".*"},
    "overlong": {"max_tokens": 100, "buffer": 20},
    "math": {},
    "whet.rewards.tagged:single_choice": {},
    "whet.rewards.answer_line:direct_math": {},
    "whet.rewards.answer_line:aime": {},
    "whet.rewards.verl:compute_score": {},
    "whet.rewards.gsm8k:gsm8k": {},
    "whet.rewards.trinity:math_reward": {},
    "whet.rewards.trinity:math_boxed_reward": {"with_think": True},
    "whet.rewards.trinity:math_dapo_reward": {},
    "whet.rewards.trinity:format_reward": {},
    "whet.rewards.trinity:countdown_reward": {},
    "whet.rewards.trinity:toolcall_reward": {},
}


def judge(groups, rewards: dict[str, RewardConfig], objects=None) -> list:
    with RewardSet.from_config(rewards, RewardWorkersConfig(timeout_s=60.0), objects) as made:
        return [r for g in asyncio.run(score(groups, made)) for r in g.rollouts]


def replies_to(name: str, entry: dict, code: str):
    """The row as it is with the code as a reply, and the code in the row with the answer as a reply."""
    yield group(task(entry["answer"], extra={"entry": entry}), code, f"[{code}]")
    for row in payloads.poisoned(entry, code):
        yield group(task(row["answer"], extra={"entry": row}), "[1]")


@needs_sandbox
def test_code_in_a_reply_or_a_row_is_run_by_no_reward_that_is_built_in(tmp_path):
    with payloads.listening() as server:
        codes = payloads.codes(tmp_path, server.getsockname()[1])
        replies = [text for code in codes.values() for text in payloads.texts(code)]
        answers = {"5": replies, codes["system"]: replies[:4]}
        groups = [group(replace(task(answer), source="math_dapo"), *said) for answer, said in answers.items()]
        judge(groups, {name: RewardConfig(function=name, arguments=given) for name, given in OTHERS.items()})
        assert not payloads.fired(tmp_path, server)


@needs_sandbox
def test_code_that_a_verifier_evaluates_can_do_nothing_and_the_verifier_still_judges(tmp_path, rows):
    with payloads.listening() as server:
        codes = payloads.codes(tmp_path, server.getsockname()[1])
        attempts = [
            g
            for at, name in enumerate(EVALUATE)
            for g in replies_to(name, rows[name], [*codes.values()][at % len(codes)])
        ]
        right = [group(task("", extra={"entry": rows["spiral_matrix"]}), rows["spiral_matrix"]["answer"])]
        reward = {"r": RewardConfig(function="reasoning_gym", arguments={"verifiers": EVALUATE})}
        judged = judge(attempts + right, reward)
        assert not payloads.fired(tmp_path, server)
    assert judged[-1].reward == 1.0


def test_the_same_code_runs_where_nothing_confines_it(tmp_path, rows):
    """What makes the silence of the others mean something: a reward of the user's own is free."""

    def free(response, task):
        return gym._verifier("string_insertion")(response, task.extra["entry"])

    with payloads.listening() as server:
        codes = payloads.codes(tmp_path, server.getsockname()[1])
        free_group = group(task("", extra={"entry": rows["string_insertion"]}), *codes.values())
        judge([free_group], {"r": RewardConfig(function="free")}, {"r": free})
        assert payloads.fired(tmp_path, server) == set(codes)


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    return payloads.entries(payloads.VERIFIERS)


def compiled(names: list[str], rows: dict, code: str) -> dict[str, float]:
    """How often each verifier has had Python compile the code: as the reply, and in the row."""
    seen: list[str] = []
    sys.addaudithook(lambda event, args: seen.append(name) if event == "compile" and named(args[0]) else None)

    def named(source) -> bool:
        return payloads.MARK in (source.decode() if isinstance(source, bytes) else str(source))

    for name in names:
        for row in (rows[name], *payloads.poisoned(rows[name], code)):
            for reply in (code, f"[{code}]", row["answer"], "[1]"):
                with contextlib.suppress(Exception):
                    gym._verifier(name)(reply, row)
    return {"score": 0.0, **{name: float(seen.count(name)) for name in names}}


def test_the_verifiers_that_were_read_compile_nothing_and_all_others_do(rows, tmp_path):
    code = payloads.codes(tmp_path, 1)["written"]
    arguments = json.dumps({"names": payloads.VERIFIERS, "rows": rows, "code": code})
    with Jail({"compiled": lambda: Guarded(compiled, confined=True)}, timeout_s=300.0) as jail:
        (result,) = asyncio.run(jail.call_many([RewardCall(function="compiled", arguments=arguments)]))
    assert result.failure is None
    found = {name for name, count in result.parts.items() if count}
    assert not found & set(READ)
    if not sandbox.lacking():
        assert found == set(EVALUATE)


def test_what_was_read_is_what_is_installed_and_another_source_is_not_taken_for_it(monkeypatch):
    assert {name: gym.digest(name) for name in READ} == READ
    assert not gym.unread({"verifiers": [*READ]})
    monkeypatch.setitem(READ, "chain_sum", "0" * 16)
    assert gym.unread({"verifiers": ["spell_backward", "chain_sum"]}).startswith("chain_sum of reasoning-gym")


def test_a_verifier_that_may_run_code_is_refused_at_the_start_where_no_sandbox_is(monkeypatch):
    monkeypatch.setattr(sandbox, "lacking", lambda: "no Landlock")
    judge([], {"r": RewardConfig(function="reasoning_gym", arguments={"verifiers": "spell_backward"})})
    with pytest.raises(
        ConfigError,
        match=r"countdown of reasoning-gym .* evaluate text .* this system does not have: no Landlock",
    ):
        judge(
            [], {"r": RewardConfig(function="reasoning_gym", arguments={"verifiers": ["lcm", "countdown"]})}
        )


def test_a_row_never_chooses_its_verifier(rows):
    t = task("", extra={"entry": rows["countdown"]})
    (judged,) = judge(
        [group(t, "1")], {"r": RewardConfig(function="reasoning_gym", arguments={"verifiers": "chain_sum"})}
    )
    assert judged.reward is None
    assert "requests the verifier 'countdown', but the config allows chain_sum" in judged.error
    with pytest.raises(ConfigError, match="the config must list the allowed verifiers"):
        judge([group(t, "1")], {"r": RewardConfig(function="reasoning_gym")})
    with pytest.raises(
        ConfigError, match="'chainsum' is not a verifier of reasoning-gym; did you mean 'chain_sum'"
    ):
        judge([], {"r": RewardConfig(function="reasoning_gym", arguments={"verifiers": "chainsum"})})


def test_the_verifiers_are_those_of_the_sources_that_reasoning_gym_makes():
    mixed = {"task": "composite", "datasets": [{"name": "gcd", "weight": 1}, {"name": "lcm", "weight": 1}]}
    data = {
        "train": ({"function": "reasoning_gym", "arguments": {"task": "chain_sum"}}, {"path": "x"}),
        "eval": ({"function": "reasoning_gym", "arguments": mixed},),
    }
    cfg = Config.model_construct(data=DataConfig(**data))
    assert verifiers([cfg, cfg]) == ("chain_sum", "gcd", "lcm")


@needs_sandbox
def test_a_reward_of_ones_own_is_confined_when_the_config_asks_for_it(tmp_path):
    def writes(response, task):
        (tmp_path / response).touch()
        return 1.0

    for confine, done in (("builtin", 1.0), ("all", None)):
        guard = RewardWorkersConfig(sandbox=confine)
        with RewardSet.from_config({"r": RewardConfig(function="mine")}, guard, {"r": writes}) as made:
            (g,) = asyncio.run(score([group(task(), confine)], made))
        assert g.rollouts[0].reward == done
    assert [path.name for path in tmp_path.iterdir()] == ["builtin"]
    assert "PermissionError" in g.rollouts[0].error


@needs_sandbox
def test_every_reward_that_is_built_in_is_confined_and_what_may_evaluate_ends_with_its_call():
    """Beside the payloads, which find nothing to do in a reward that evaluates nothing today."""
    opened = {}

    def note(loaders, **how):
        opened.update(loaders)

    rewards = {n: RewardConfig(function=n, arguments=given) for n, given in OTHERS.items() if ":" not in n}
    rewards |= {n: RewardConfig(function=n) for n in OTHERS if ":" in n}
    for name, verifier in (("read", "lcm"), ("unread", "countdown")):
        rewards[name] = RewardConfig(function="reasoning_gym", arguments={"verifiers": [verifier]})
    RewardSet.from_config(rewards, RewardWorkersConfig(), open_jail=note)
    made = {name: load() for name, load in opened.items()}
    assert made.keys() == rewards.keys()
    assert all(each.confined for each in made.values())
    assert {name for name, each in made.items() if each.once} == (
        {"unread"} if not sandbox.lacking() else set()
    )


def test_what_a_call_has_changed_is_gone_where_a_process_ends_with_its_call():
    seen = []

    def counts(value):
        seen.append(value)
        return len(seen)

    found = {}
    for once in (False, True):
        with Jail(
            {"counts": lambda once=once: Guarded(counts, once=once)}, timeout_s=60.0, workers=1
        ) as jail:
            asked = [RewardCall(function="counts", arguments='{"value": 1}') for _ in range(3)]
            results = asyncio.run(jail.call_many(asked))
        found[once] = [r.parts["score"] for r in results]
    assert found == {False: [1.0, 2.0, 3.0], True: [1.0, 1.0, 1.0]}


def test_every_reward_that_is_built_in_is_tried_here():
    modules = [answer_line, builtin, gsm8k, whet.rewards.math, tagged, trinity, verl]
    there = {
        f"{m.__name__}:{name}"
        for m in modules
        for name, f in vars(m).items()
        if not name.startswith("_")
        and inspect.isfunction(f)
        and f.__module__ == m.__name__
        and [*inspect.signature(f).parameters][:2] == ["response", "task"]
    }
    assert there == {builtin.BUILTIN.get(name, name) for name in OTHERS}


def test_installed_packages_are_readable_wherever_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install --target FOLDER` leaves each package's metadata there; a folder of somebody's own code has none."""
    installed, own = tmp_path / "installed", tmp_path / "own"
    (installed / "verifiers-1.0.dist-info").mkdir(parents=True)
    (own / "verifiers.egg-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed), str(own)])
    found = sandbox.readable.__wrapped__()
    assert installed in found
    assert not {own, tmp_path} & set(found)
