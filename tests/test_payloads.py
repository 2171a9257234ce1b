"""Nothing that judges a reply runs what is written in it, or in the row: code in all places, and nothing happens."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import jinja2
import pytest
from typer.testing import CliRunner

import payloads
import whet.job
import whet.rewards.code
import whet.rewards.sandbox_fusion
from encoded import with_template
from sandboxes import Sandbox, ended
from test_rewards import group, task
from tiny import RUN
from whet import cli
from whet.config.schema import Config, DataConfig, RewardConfig, RewardWorkersConfig, TokenizerConfig
from whet.config.sources import verifiers
from whet.data.chat import render
from whet.data.templates import strftime_now
from whet.data.tokenizer import load_tokenizer
from whet.guard import sandbox
from whet.guard.jail import Jail, RewardCall
from whet.guard.worker import Guarded
from whet.rewards import builtin, gym
from whet.rewards.combine import RewardSet, score
from whet.rewards.gym_read import READ
from whet.rewards.judge import Asking
from whet.rollout.scripted import ScriptedEngine
from whet.types import ConfigError, DataError, Json, Message, Task

needs_sandbox = pytest.mark.skipif(bool(sandbox.lacking()), reason=f"no sandbox here: {sandbox.lacking()}")

EVALUATE = [name for name in payloads.VERIFIERS if name not in READ]
OTHERS: dict[str, dict[str, Any]] = {
    "exact": {},
    "choice": {},
    "number": {"flexible": True},
    "format": {"pattern": ".*"},
    "overlong": {"max_tokens": 100, "buffer": 20},
    "math": {},
    "rlcr": {},
    "whet.rewards.made_up:coin": {},
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
    with payloads.watching(tmp_path) as watch:
        replies = [text for code in watch.codes.values() for text in payloads.texts(code)]
        answers = {"5": replies, watch.codes["system"]: replies[:4]}
        groups = [group(replace(task(answer), source="math_dapo"), *said) for answer, said in answers.items()]
        judge(groups, {name: RewardConfig(function=name, arguments=given) for name, given in OTHERS.items()})
        assert not watch.fired()


UNHELD: dict[str, dict[str, Any]] = {
    "judge": {"model": "m", "timeout_s": 5},
    "ruler": {"model": "m", "timeout_s": 5},
    "sandbox_fusion": {"timeout_s": 5},
    "code": {"timeout_s": 5, "most_tests": 1},
}
"""Rewards that no sandbox can hold."""


class Echo(Sandbox):
    """A model that says again all that it is asked about, where its rating and its list are read."""

    path = "/v1/chat/completions"

    def answer(self, body: Json) -> Json:
        asked = body["messages"][1]["content"]
        replies = re.findall(r"<reply[^>]*>\n(.*?)\n</reply>", asked, re.DOTALL)
        said = f"{asked}\nRating: {replies[0]}\n[{', '.join(replies)}]"
        return {"choices": [{"message": {"role": "assistant", "content": said}}]}


class Elsewhere(Sandbox):
    """A service that runs its programs on another machine."""

    def answer(self, body: Json) -> Json:
        return ended("Success", run={"status": "Finished", "return_code": 0, "stdout": body["code"]})


def evaluating(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which evaluates every text that it is given."""

    @wraps(function)
    def both(*given: Any, **more: Any) -> Any:
        for value in given:
            for text in value if isinstance(value, list) else [value]:
                with contextlib.suppress(Exception):
                    eval(text)
        return function(*given, **more)

    return both


@needs_sandbox
@pytest.mark.parametrize(("evaluated", "done"), [(False, set()), (True, payloads.ALL)])
@pytest.mark.parametrize("name", UNHELD)
def test_code_is_run_by_no_reward_that_no_sandbox_holds(
    name: str, evaluated: bool, done: Collection[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither that in a reply or a row nor that in a service's answer; all of it by one that evaluates it."""
    if evaluated:
        monkeypatch.setattr(Asking, "messages", evaluating(Asking.messages))
        for module in (whet.rewards.code, whet.rewards.sandbox_fusion):
            monkeypatch.setattr(module, "code_in", evaluating(module.code_in))
    asked: dict[str, type[Sandbox]] = {"judge": Echo, "ruler": Echo, "sandbox_fusion": Elsewhere}
    with payloads.watching(tmp_path) as watch, contextlib.ExitStack() as stack:
        arguments = {**UNHELD[name]}
        service = asked[name]() if name in asked else None
        if service:
            stack.callback(service.stop)
            arguments["url"] = service.url.removesuffix("/chat/completions")
        groups = []
        for code in watch.codes.values():
            tests = {"inputs": [code], "outputs": [code]}
            row = task(tests if name in ("sandbox_fusion", "code") else code, extra={"rubric": [code]})
            groups.append(group(row, *payloads.texts(code), f"```python\n{code}\n```"))
        judged = judge(groups, {"r": RewardConfig(function=name, arguments=arguments)})
        assert watch.fired() == done
    assert service is None or service.asked
    assert not [r.error for r in judged if r.error and "timeout" in r.error]


FREE = "def evaluates(response, task):\n    eval(response)\n    return 1.0\n"


@pytest.fixture(params=["ours", "free"])
def judged_by(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Any], Collection[str]]:
    """Sections of a config whose rewards evaluate replies, confined or as code of the user's own; and what is done."""
    (tmp_path / "free.py").write_text(FREE)
    verified = {
        "function": "reasoning_gym",
        "arguments": {"verifiers": ["string_insertion", "spiral_matrix"]},
    }
    cases: dict[str, tuple[dict[str, Any], Collection[str]]] = {
        "ours": (verified, set()),
        "free": ({"function": f"{tmp_path}/free.py:evaluates"}, payloads.ALL),
    }
    reward, done = cases[request.param]
    return {"rewards": {"r": reward}, "reward_workers": {"max_failure_rate": 1.0, "timeout_s": 60.0}}, done


def asking(code: str, rows: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of data whose prompt is the code: one as it is, one with the code in its metadata, too."""
    *_, poisoned = payloads.poisoned(rows["spiral_matrix"], code)
    for entry in (rows["string_insertion"], poisoned):
        yield {"prompt": code, "answer": str(entry["answer"]), "entry": entry}


@needs_sandbox
def test_code_in_replies_from_a_file_does_nothing_in_an_evaluation(
    judged_by: tuple[dict[str, Any], Collection[str]], rows: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    sections, done = judged_by
    file, replies, out = (tmp_path / name for name in ("judge.yaml", "replies.jsonl", "out.json"))
    file.write_text(json.dumps({**sections, "data": {"eval": [{"path": "unused", "answer": "answer"}]}}))
    with payloads.watching(tmp_path) as watch:
        lines = [
            json.dumps({**row, "responses": [code, f"[{code}]", rf"\boxed{{{code}}}"]})
            for code in watch.codes.values()
            for row in asking(code, rows)
        ]
        replies.write_text("\n".join(lines))
        shown = CliRunner().invoke(
            cli.app, ["eval", str(file), "--offline", str(replies), "-o", str(out)], catch_exceptions=False
        )
        assert shown.exit_code == 0, shown.output
        assert watch.fired() == done
    assert len(json.loads(out.read_text())["replies"]) == 3 * len(lines)
    assert payloads.told([out.read_text(), shown.output]) is bool(done)


@needs_sandbox
def test_code_in_replies_of_the_policy_does_nothing_in_training(
    judged_by: tuple[dict[str, Any], Collection[str]],
    rows: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step and an evaluation with a policy that says its prompt again."""
    sections, done = judged_by

    def echoing(plans: Any, model: Any, ops: Any, *, tokenizer: Any, **more: Any) -> ScriptedEngine:
        end = tokenizer.eos_token_id
        return ScriptedEngine(lambda prompt, sampling, version: [*prompt, end], end_token_ids=[end])

    monkeypatch.setattr(whet.job, "open_engine", echoing)
    with payloads.watching(tmp_path) as watch:
        asked = [row for code in watch.codes.values() for row in asking(code, rows)]
        scratch = {**RUN["model"]["scratch"], "hidden_size": 16, "max_position_embeddings": 1024}
        data = {"max_prompt_tokens": 500, "exclude_eval": False}
        run = whet.train(
            **{
                **RUN,
                **sections,
                "run_dir": str(tmp_path / "run"),
                "model": {"scratch": scratch},
                "data": {**data, "train": [{"rows": asked}], "eval": [{"rows": asked[:3]}]},
                "rollout": {"group_size": 2, "sampling": {"max_tokens": 500}},
                "train": {"steps": 1, "tasks_per_step": len(asked)},
                "eval": {"interval": 1},
            }
        )
        assert run.finished
        assert watch.fired() == done
    said = run.rollouts(1).to_pylist()
    assert {row["text"] for row in said} == {*watch.codes.values()}
    assert payloads.told([str(row) for row in said]) is bool(done)


ROOTS = [
    "strftime_now.__globals__",
    "(strftime_now | attr('__globals__'))",
    "cycler.__init__.__globals__",
    "namespace.__init__.__globals__",
]
"""Ways from what a template is given to Python's builtins."""


def jinja(code: str, root: str) -> str:
    """The code as a template that reaches for it from there."""
    first = "(().__class__.__base__.__subclasses__() | selectattr('__name__', 'equalto', 'BuiltinImporter') | first)"
    code = re.sub(r"\[c for c in .* if .*?\]\[0\]", lambda _: first, code)
    return "{{ " + re.sub(r"__import__|open\(", lambda m: f"{root}.__builtins__.{m[0]}", code) + " }}"


@pytest.mark.parametrize("root", ROOTS)
def test_a_chat_template_reaches_nothing_that_a_code_needs(root: str, tmp_path: Path) -> None:
    """Jinja without a sandbox reaches all of it."""
    tokenizer = load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=["a"])
    messages = [Message("user", "a")]
    with payloads.watching(tmp_path) as watch:
        made = [jinja(code, root) for code in watch.codes.values()]
        for template in made:
            with pytest.raises(DataError, match="The chat template refuses"):
                render(with_template(tokenizer, template), messages)
        assert not watch.fired()
        for template in made:
            with contextlib.suppress(Exception):
                jinja2.Environment().from_string(template).render(strftime_now=strftime_now)
        assert watch.fired() == payloads.ALL


REAL = sorted(path for path in (Path(__file__).parent / "templates").glob("*.jinja"))


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_code_in_a_message_is_text_to_a_chat_template(path: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=["a"])
    with payloads.watching(tmp_path) as watch:
        for code in watch.codes.values():
            for said in (code, jinja(code, ROOTS[0]), f"{{% set a = {code} %}}"):
                messages = [Message("user", said), Message("assistant", said), Message("user", said)]
                assert render(with_template(tokenizer, path.read_text()), messages).count(said) == 3
        assert not watch.fired()


@needs_sandbox
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_code_that_a_verifier_evaluates_can_do_nothing_and_the_verifier_still_judges(every, tmp_path, rows):
    """Each verifier gets one of the codes, or all."""
    with payloads.watching(tmp_path) as watch:
        codes = [*watch.codes.values()]
        attempts = [
            g
            for at, name in enumerate(EVALUATE)
            for code in (codes if every else [codes[at % len(codes)]])
            for g in replies_to(name, rows[name], code)
        ]
        right = [group(task("", extra={"entry": rows["spiral_matrix"]}), rows["spiral_matrix"]["answer"])]
        reward = {"r": RewardConfig(function="reasoning_gym", arguments={"verifiers": EVALUATE})}
        judged = judge(attempts + right, reward)
        assert not watch.fired()
    assert judged[-1].reward == 1.0
    assert not payloads.told([r.error for r in judged])


def test_the_same_code_runs_where_nothing_confines_it(tmp_path, rows):
    """What makes the silence of the others mean something: a reward of the user's own is free."""

    def free(response, task):
        return gym.verifier("string_insertion")(response, task.extra["entry"])

    with payloads.watching(tmp_path) as watch:
        free_group = group(task("", extra={"entry": rows["string_insertion"]}), *watch.codes.values())
        judge([free_group], {"r": RewardConfig(function="free")}, {"r": free})
        assert watch.fired() == payloads.ALL


def evaluates(response: str, task: Task) -> float:
    """What no reward should do."""
    eval(response)
    return 1.0


@needs_sandbox
@pytest.mark.parametrize(("where", "done"), [("builtin", payloads.ALL), ("all", set())])
def test_what_a_file_holds_leaves_a_sandbox_by_no_way(
    where: Literal["builtin", "all"], done: Collection[str], tmp_path: Path
) -> None:
    """Neither by a socket nor in what an exception says; outside a sandbox by each of them."""
    with payloads.watching(tmp_path) as watch:
        guard = RewardWorkersConfig(sandbox=where, timeout_s=60.0)
        with RewardSet.from_config({"r": RewardConfig(function="r")}, guard, {"r": evaluates}) as made:
            (judged,) = asyncio.run(score([group(task(), *watch.codes.values())], made))
        assert watch.fired() == done
    assert payloads.told([r.error for r in judged.rollouts]) is bool(done)


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
                    gym.verifier(name)(reply, row)
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
    data: Any = {
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

    cases: list[tuple[Literal["builtin", "all"], float | None]] = [("builtin", 1.0), ("all", None)]
    for confine, done in cases:
        guard = RewardWorkersConfig(sandbox=confine)
        with RewardSet.from_config({"r": RewardConfig(function="mine")}, guard, {"r": writes}) as made:
            (g,) = asyncio.run(score([group(task(), confine)], made))
        assert g.rollouts[0].reward == done
    assert [path.name for path in tmp_path.iterdir()] == ["builtin"]
    assert "PermissionError" in str(g.rollouts[0].error)


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
        with Jail({"counts": partial(Guarded, counts, once=once)}, timeout_s=60.0, workers=1) as jail:
            asked = [RewardCall(function="counts", arguments='{"value": 1}') for _ in range(3)]
            results = asyncio.run(jail.call_many(asked))
        found[once] = [r.parts["score"] for r in results]
    assert found == {False: [1.0, 2.0, 3.0], True: [1.0, 1.0, 1.0]}


REPLIES = {"response", "completions", "solution_str", "solution_strs"}
"""By these parameters a reward is known (`rewards.bind`)."""
NO_REWARDS = {"whet.rewards.sandbox_fusion:code_in"}
"""Functions of replies that score nothing."""


def judging() -> set[str]:
    """Every public function of `whet.rewards` that takes replies."""
    modules = [import_module(m.name) for m in pkgutil.walk_packages(whet.rewards.__path__, "whet.rewards.")]
    return {
        f"{m.__name__}:{name}"
        for m in modules
        for name, f in vars(m).items()
        if inspect.isfunction(f) and f.__module__ == m.__name__ and not name.startswith("_")
        if REPLIES & {*inspect.signature(f).parameters}
    }


def test_every_reward_that_is_built_in_is_tried_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {*OTHERS, *UNHELD, "reasoning_gym"}
    known = {builtin.BUILTIN.get(name, name) for name in tried} | NO_REWARDS
    assert known >= {*builtin.BUILTIN.values()}
    assert judging() == known
    (tmp_path / "added.py").write_text("async def added(response, task, *, level=1): ...\n")
    monkeypatch.setattr(whet.rewards, "__path__", [*whet.rewards.__path__, str(tmp_path)])
    assert judging() - known == {"whet.rewards.added:added"}
    monkeypatch.delitem(sys.modules, "whet.rewards.added")
    monkeypatch.delattr(whet.rewards, "added")


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
