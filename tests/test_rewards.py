"""Rewards: what each built-in pays, by hand; how they are bound and weighted; what fails is left unscored."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import reasoning_gym
import torch
from hypothesis import given
from hypothesis import strategies as st

import whet.rewards.math  # noqa: F401  imported here once, or every test's jail would import sympy anew
from whet.buffer import groups
from whet.config.schema import RewardConfig, RewardWorkersConfig
from whet.rewards import builtin
from whet.rewards.bind import bind, pack_rollout, pack_task
from whet.rewards.combine import RewardSet, check_failures, score
from whet.rewards.tagged import answer_in
from whet.track.metrics import summarise
from whet.track.record import RunDirectory
from whet.types import ConfigError, DataError, Group, Message, Rollout, Task, ToolCall, WhetError


def task(answer=None, **more) -> Task:
    return Task(uid=4, source="test", prompt="p", answer=answer, **more)


def rollout(t: Task, text: str, index: int = 0, tokens: int = 3) -> Rollout:
    return Rollout.one_strand(
        task=t,
        index=index,
        token_ids=[0] + [1] * tokens,
        mask=[0] + [1] * tokens,
        logprobs=[0.0] * (tokens + 1),
        sample_logprobs=[0.0] * (tokens + 1),
        versions=[-1] + [0] * tokens,
        finish_reason="stop",
        text=text,
    )


def group(t: Task, *texts: str) -> Group:
    return Group(t, tuple(rollout(t, text, i) for i, text in enumerate(texts)))


def run(groups, rewards: dict[str, RewardConfig], objects=None, **guard):
    with RewardSet.from_config(rewards, RewardWorkersConfig(**guard), objects) as made:
        return asyncio.run(score(groups, made))


def pay(function: str, t: Task, *texts: str, **arguments) -> list:
    rewards = {"r": RewardConfig(function=function, arguments=arguments)}
    (g,) = run([group(t, *texts)], rewards, timeout_s=120.0)  # how fast the machine is does not matter here
    return [r.reward if r.error is None else r.error for r in g.rollouts]


# ---------------------------------------------------------------- built in


def test_exact():
    assert pay("exact", task("Ab"), "Ab", " Ab\n", "ab", "Ab.", "") == [1, 1, 0, 0, 0]
    assert pay("exact", task("Ab"), "aB", "b", ignore_case=True) == [1, 0]
    assert pay("exact", task(12), "12", "12.0") == [1, 0]


@pytest.mark.parametrize("answer", ["C", "c", "(C)", 2, 2.0])
def test_choice(answer):
    right = ["C", "(C)", "c.", "C) because", "The answer is C.", "Answer: (C)", "**Answer: C**"]
    right += [
        r"so \boxed{C}",
        r"\boxed{\text{C}}",
        r"the answer is A, \boxed{C}",
        "answer is B. No, answer is C",
        "The answer is C. The other options are wrong.",
        "The answer is C. This choice answers the question.",
        "The answer is C, for option A is too small.",
        "Answer: C\nThis option is a good one",
        "To answer a question like this, think: option **C** fits",
        "C. The answer isn't A",
    ]
    wrong = [
        "To answer c is hard: the answer is B",
        "The options consider much",
        "",
        "B",
        "Cats are nice",
        "A cat",
        "the answer is B",
        "the answer is Canada",
        r"\boxed{B}, answer: C",
    ]
    assert pay("choice", task(answer), *right) == [1] * len(right)
    assert pay("choice", task(answer), *wrong) == [0] * len(wrong)


def test_a_reply_of_blanks_does_not_hold_a_choice_up():
    """The search took minutes for some hundred blanks."""
    for begin in ("answer is", "answer", r"\boxed{", "(", "option **"):
        assert builtin.choice(begin + " " * 100_000, task("A")) == {"score": 0.0}
    assert answer_in("<answer>" * 100_000) == "<answer>" * 100_000
    assert pay("choice", task("B"), r"\boxed{\textbf{B}}", r"\boxed{ \mathrm{B} }") == [1, 1]  # NeMo-Gym#1844


@pytest.mark.parametrize("answer", ["2", "C.", "C) 4", "", True, 2.5, 26, -1, ["C"]])
def test_an_answer_that_is_no_choice_blames_no_reply(answer):
    with pytest.raises(ValueError, match=r"the answer of task 4 is no choice: .*expected a letter"):
        builtin.choice("the answer is C", task(answer))


def test_an_article_is_no_choice():
    said = ["To answer a question like this, think.", "the answer is a number", "the option I took"]
    assert [builtin.choice(text, task("A")) for text in said] == [{"score": 0.0}] * 3
    assert pay("choice", task("A"), "the answer is a", "option (a) it is", "Option A is right") == [1, 1, 1]


def test_number():
    t = task("1234")
    right = [
        "#### 1234",
        "a\n####1,234.",
        "#### $1,234.00",
        "#### 5 no: #### 1234",
        "#### 1234\nNext: 7",
        "#### +1234",
    ]
    wrong = ["1234", "#### 12345", "#### -1234", "#### x 1234", "#### 1234 #### 5", "", "####"]
    assert pay("number", t, *right) == [1] * len(right)
    assert pay("number", t, *wrong) == [0] * len(wrong)
    assert pay("number", t, "so 7, then 1234.", "1234 or 7", "none", flexible=True) == [1, 0, 0]
    assert pay("number", task("2 + 3 = <<2+3=5>>5\n#### 5"), "#### 5.0", "#### 2") == [1, 0]
    assert pay("number", task(-0.5), "#### -.5", "#### .5") == [1, 0]


@given(st.integers(-(10**30), 10**30), st.integers(0, 3))
def test_number_reads_what_python_writes(n, zeros):
    written = f"{n:,}" + ("." + "0" * zeros if zeros else "")
    assert builtin.number(f"so\n#### {written}", task(str(n))) == {"score": 1.0, "answer": str(n)}
    assert builtin.number(f"so\n#### {n + 1}", task(str(n))) == {"score": 0.0, "answer": str(n + 1)}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r"9{,}500", "9500"),  # opencompass#2647
        (r"9\,500", "9500"),
        ("9\u202f500", "9500"),
        ("1,00,000", "100000"),
        ("72, ", "72"),  # omlx#3484
        ("-$5", "-5"),  # open-instruct#1530
        ("$-5", "-5"),
        (r"\$5", "5"),
        ("\u22125", "-5"),
        ("1/2", "0.5"),  # matchspec#306
        ("-2/6", "-1/3"),
        ("1e-05", "0.00001"),  # an answer that is a float
        ("1e+16", str(10**16)),
    ],
)
def test_a_number_is_read_as_it_is_written(written, value):
    for answer in (value, written):
        right = {"score": 1.0, "answer": value}
        assert builtin.number(f"so\n#### {written}", task(answer)) == right
        assert builtin.number(f"it is {written}", task(answer), flexible=True) == right


def test_what_looks_like_a_number_is_none():
    """Neither a part of a date, a version, a power or a list is one, nor is the sign of a difference."""
    said = ["10/07/2020", "1.2.3", "2^{10}", "1,2", "1/0", "1e9999"]
    assert [builtin.number(f"#### {text}", task("1")) for text in said] == [{"score": 0.0}] * len(said)
    last = {"3-5": "5", "x-5": "5", "(1,2)": "2", "7 on 10/07/2020": "7"}
    found = {text: builtin.number(text, task("0"), flexible=True)["answer"] for text in last}
    assert found == last


def test_math():
    t = task(r"\frac{1}{2}")
    right = [
        r"\boxed{0.5}",
        r"thus $x = \frac12$: \boxed{\frac{2}{4}}",
        r"\boxed{3} no \boxed{1/2}",
        "0.5",
        "$1/2$",
    ]
    wrong = [
        r"\boxed{10^{9000}}",
        r"\boxed{2}",
        r"\boxed{1/2} no \boxed{3}",
        "none",
        "",
        r"\boxed{",
        r"\boxed{\frac{}{}}",
    ]
    assert pay("math", t, *right) == [1] * len(right)
    assert pay("math", t, *wrong) == [0] * len(wrong)
    assert pay("math", t, "0.5", r"\boxed{0.5}", boxed=True) == [0, 1]
    boxes = [
        r"\boxed{\frac{1}{2}} of \{1\}",
        r"\boxed{} 0.5",
        r"\boxed 3 or 0.5",
        r"\boxed{0.5",
    ]
    assert pay("math", t, *boxes, boxed=True) == [1, 0, 0, 0]
    assert pay("math", task(r"\{1, 2\}"), r"so \boxed{\{1, 2\}}.", r"\boxed{\{1\}}", boxed=True) == [1, 0]
    assert pay("math", task("x^2+2x+1"), r"\boxed{(x+1)^2}", r"\boxed{(x+2)^2}") == [1, 0]


def test_math_that_takes_for_ever_is_unscored_and_not_zero():
    (g,) = run(
        [group(task("5"), r"\boxed{10^{10^{10^{10}}}}", r"\boxed{5}")],
        {"m": RewardConfig(function="math")},
        timeout_s=5.0,
    )
    assert g.rollouts[1].reward == 1.0
    assert g.rollouts[0].reward in (0.0, None)


def test_format_by_tags():
    ok = "<think>a\nb</think>\n<answer>c</answer>\n"
    bad = [
        "<think>a</think>",
        "<answer>c</answer><think>a</think>",
        "x" + ok,
        ok + ok,
        "<think>a</think>then<answer>c</answer>",
        "<think><answer></think></answer>",
        "",
    ]
    assert pay("format", task(), ok, *bad, tags=["think", "answer"]) == [1] + [0] * len(bad)


def test_format_by_pattern():
    assert pay("format", task(), "a\nz", "a z!", "", pattern="a.*z") == [1, 0, 0]


def test_overlong_is_eq_13_of_dapo():
    """L_max 100, L_cache 20: R(y) = 0 | ((100 - 20) - y) / 20 | -1, in exact fractions."""

    def oracle(y: int) -> Fraction:
        if y <= 80:
            return Fraction(0)
        return Fraction(80 - y, 20) if y <= 100 else Fraction(-1)

    t = task()
    lengths = [0, 1, 79, 80, 81, 90, 99, 100, 101, 500]
    g = Group(t, tuple(rollout(t, "x", i, tokens=n) for i, n in enumerate(lengths)))
    (out,) = run(
        [g], {"long": RewardConfig(function="overlong", arguments={"max_tokens": 100, "buffer": 20})}
    )
    assert [r.reward for r in out.rollouts] == [float(oracle(n)) for n in lengths]
    assert math.copysign(1.0, out.rollouts[0].reward) == 1.0


def gym_task() -> Task:
    entry = {
        "question": "?",
        "answer": "olleh",
        "metadata": {"source_dataset": "spell_backward", "word": "hello"},
    }
    return task("olleh", extra={"entry": entry})


def test_reasoning_gym_pays_for_exactly_1_only():
    """spell_backward gives an over-long reply five times 1/5, minus 0.2: its own score is 0.8, ours 0."""
    pay_gym = partial(pay, "reasoning_gym", gym_task(), verifiers="spell_backward")
    assert pay_gym("olleh", " olleh\n", "ollehx", "olle", "") == [1, 1, 0, 0, 0]
    raw = pay_gym("olleh", "ollehx", "oxxxx", exact=False)
    assert raw == pytest.approx([1.0, 0.8, 0.2])
    answers = "x<answer>no</answer><answer>olleh</answer>", "olleh"
    assert pay_gym(*answers, pattern="<answer>(.*?)</answer>") == [1, 0]


def test_rows_the_package_makes_are_judged_by_their_own_verifier():
    for name in ("spell_backward", "chain_sum", "leg_counting", "countdown"):
        entry = reasoning_gym.create_dataset(name, size=1, seed=3)[0]
        t = task(entry["answer"], extra={"entry": entry})
        if name == "countdown":
            t = task(extra={"entry": {**entry, "answer": entry["metadata"]["expression"]}})
        assert pay("reasoning_gym", t, t.extra["entry"]["answer"], "wrong", verifiers=name) == [1, 0], name


@pytest.mark.parametrize("name", ["exact", "choice", "number", "math", "reasoning_gym"])
def test_a_task_without_what_the_reward_needs_is_unscored_with_its_number(name):
    arguments = {"verifiers": ["chain_sum"]} if name == "reasoning_gym" else {}
    (error,) = pay(name, task(), "1", **arguments)
    assert error.startswith("reward r: raised ValueError: task 4 of 'test'")


def test_heavy_packages_stay_out_of_the_run():
    assert all(isinstance(place, str) for place in builtin.BUILTIN.values())
    from pathlib import Path

    for module in ("combine", "bind", "builtin"):
        text = (Path(builtin.__file__).parent / f"{module}.py").read_text()
        assert "import sympy" not in text
        assert "math_verify" not in text
        assert "reasoning_gym as" not in text


def test_equal_answers_are_found_in_an_equal_form():
    def answers(function, t, *texts):
        (g,) = run(
            [group(t, *texts)],
            {"f": RewardConfig(function="format", arguments={"pattern": ".*"}), "r": function},
        )
        return [r.answer for r in g.rollouts]

    spelling = RewardConfig(function="reasoning_gym", arguments={"verifiers": ["spell_backward"]})
    number, choice, exact, math = (RewardConfig(function=f) for f in ("number", "choice", "exact", "math"))
    assert answers(number, task("5"), "#### 1,000.50", "#### $1000.5", "#### -0", "5") == [
        "1000.5",
        "1000.5",
        "0",
        None,
    ]
    assert answers(choice, task("A"), "(b)", "answer is B", "no") == ["B", "B", None]
    assert answers(exact, task("x"), " y\n") == ["y"]
    assert answers(math, task("1"), r"\boxed{0.5}", r"so \boxed{\frac{2}{4}}", "?") == ["1/2", "1/2", None]
    assert answers(spelling, gym_task(), " olle\n") == ["olle"]


# ---------------------------------------------------------------- binding


def test_bind_gives_a_function_what_it_asks_for():
    t = Task(
        uid=1,
        source="s",
        prompt=(Message("user", "hi"),),
        answer=[1, {"a": None}],
        extra={"extra_info": {"k": 2}},
    )
    packed, reply = pack_task(t), pack_rollout(rollout(t, "text", tokens=5))
    seen = {}

    def plain(response, task):
        seen["plain"] = (response, task)

    def reordered(task, *, bonus, rollout, response):
        seen["reordered"] = (task.uid, bonus, rollout, response)

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1):
        seen["verl"] = (data_source, solution_str, ground_truth, extra_info, scale)

    async def later(response, task):
        await asyncio.sleep(0)
        return 7.0

    bind(plain, {}, what="reward 'r'")(packed, reply)
    bind(reordered, {"bonus": 3}, what="reward 'r'")(packed, reply)
    bind(compute_score, {"scale": 2}, what="reward 'r'")(packed, reply)
    assert seen["plain"] == ("text", t)
    assert seen["reordered"][:2] == (1, 3)
    assert seen["reordered"][3] == "text"
    told = {"finish_reason": "stop", "tokens": 5, "text": "text", "messages": [], "turns": [], "state": None}
    assert seen["reordered"][2].items() >= told.items()
    info = {"k": 2, "num_turns": 2, "rollout_reward_scores": {}}
    assert seen["verl"] == ("s", "text", [1, {"a": None}], info, 2)
    assert bind(later, {}, what="reward 'r'")(packed, reply) == 7.0


EPISODE = (
    Message("user", "begin"),
    Message("assistant", "", tool_calls=(ToolCall("add", {"x": 1}, "c1"),)),
    Message("tool", "2", tool_call_id="c1", name="add"),
    Message("tool", "3", tool_call_id="c2", name="add"),
    Message("assistant", "three"),
)


def test_a_reward_has_the_episode_at_hand():
    t = Task(uid=1, source="s", prompt=(Message("user", "hi"),), extra={"extra_info": {"k": 2}})
    one = replace(
        rollout(t, "three", tokens=5),
        messages=EPISODE, state={"board": [1, 2]}, stop_reason="done", reward=0.5, reward_parts={"env": 0.5},
    )  # fmt: skip
    packed, reply = pack_task(t), pack_rollout(one)
    seen = {}

    def own(response, rollout):
        seen["own"] = rollout

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        seen["verl"] = extra_info

    def trl(prompts, completions):
        return [float(len(messages)) for messages in completions]

    bind(own, {}, what="reward 'r'")(packed, reply)
    bind(compute_score, {}, what="reward 'r'")(packed, reply)
    assert [m["role"] for m in seen["own"]["messages"]] == ["user", "assistant", "tool", "tool", "assistant"]
    assert seen["own"]["messages"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"x": 1}}
    assert (seen["own"]["state"], seen["own"]["stop_reason"]) == ({"board": [1, 2]}, "done")
    assert (seen["own"]["reward"], seen["own"]["parts"]) == (0.5, {"env": 0.5})
    # the prompt, two replies, one answer of the tools
    assert seen["verl"] == {"k": 2, "board": [1, 2], "num_turns": 4, "rollout_reward_scores": {"env": 0.5}}
    assert bind(trl, {}, what="reward 'r'")(packed, rollouts=[reply, reply]) == {"0": 5.0, "1": 5.0}
    again = groups.decode(groups.encode(Group(t, (one,)))).rollouts[0]
    assert (again.messages, again.state) == (one.messages, one.state)


def test_verls_function_of_batches_gets_a_group(tmp_path):
    file = tmp_path / "batch.py"
    file.write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos, scale=1):\n"
        "    assert data_sources == ['s'] * 3 and ground_truths == ['b'] * 3\n"
        "    assert [info['num_turns'] for info in extra_infos] == [2] * 3\n"
        "    return [{'score': scale * len(s), 'long': float(len(s) > 1)} if s else None for s in solution_strs]\n"
    )
    t = Task(uid=1, source="s", prompt="q", answer="b")
    length = RewardConfig(function=f"{file}:compute_score", arguments={"scale": 2})
    scored = run([group(t, "a", "bb", "")], {"len": length})[0].rollouts
    assert [r.reward for r in scored] == [2.0, 4.0, None]
    assert [r.reward_parts for r in scored] == [
        {"len": 2.0, "len/long": 0.0},
        {"len": 4.0, "len/long": 1.0},
        {},
    ]
    assert scored[2].error == "len gave no value for this reply"


def test_a_reply_that_no_reward_gave_a_value_is_unscored():
    """TRL scores it 0, which penalises it (trl#5773); the value of another reward, or of its environment, counts."""

    def trl(prompts, completions):
        return [None if text == "none" else 1.0 for text in completions]

    (only,) = run([group(task(), "a", "none")], {"trl": RewardConfig(function="object:r")}, {"trl": trl})
    assert [(r.reward, r.error) for r in only.rollouts] == [
        (1.0, None),
        (None, "trl gave no value for this reply"),
    ]
    both = {"trl": RewardConfig(function="object:r"), "exact": RewardConfig(function="exact")}
    (beside,) = run([group(task("none"), "none")], both, {"trl": trl})
    assert [(r.reward, r.reward_parts) for r in beside.rollouts] == [(1.0, {"exact": 1.0})]
    played = replace(rollout(task(), "none"), reward=0.5)
    (played_too,) = run([Group(task(), (played,))], {"trl": RewardConfig(function="object:r")}, {"trl": trl})
    assert [(r.reward, r.error) for r in played_too.rollouts] == [(0.5, None)]


@pytest.mark.parametrize(
    ("function", "arguments", "match"),
    [
        (lambda response, task, ignore_case=False: 0, {"ignore_caes": 1}, "did you mean 'ignore_case'"),
        (lambda reply: 0, {}, r"takes \(reply\); expected \(response, task, ...\)"),
        (lambda *args, **kwargs: 0, {}, r"takes \(\*args, \*\*kwargs\); expected"),
        (lambda response, task: 0, {"response": "x"}, "no argument 'response'.*; it has: none"),
        (lambda response, task, /: 0, {}, "by name"),
    ],
)
def test_bind_refuses_what_could_never_be_called(function, arguments, match):
    with pytest.raises(ConfigError, match=match):
        bind(function, arguments, what="reward 'r'")


class Scorer:
    def __call__(self, response):
        return float(len(response))


def test_a_class_is_refused_and_an_object_of_it_is_a_reward():
    with pytest.raises(ConfigError, match=r"'Scorer'.* is a class; expected a function"):
        run([group(task(), "abc")], {"own": RewardConfig(function="object:own")}, {"own": Scorer})
    (scored,) = run([group(task(), "abc")], {"own": RewardConfig(function="object:own")}, {"own": Scorer()})
    assert [r.reward for r in scored.rollouts] == [3.0]


def test_errors_of_loading_name_the_reward_and_its_function(tmp_path):
    ends = tmp_path / "ends.py"
    ends.write_text("import os\nos._exit(3)\n")
    named = tmp_path / "named.py"
    named.write_text("def f(x): return 1.0\n")
    cases = {
        f"{ends}:f": "ended the process that loads it",
        f"{named}:f": r"takes \(x\); expected",
        f"{tmp_path}/named:f": "no such file: .*did you mean 'named.py'",
    }
    for function, match in cases.items():
        rewards = {"exact": RewardConfig(function="exact"), "own": RewardConfig(function=function)}
        with pytest.raises(ConfigError, match=f"^reward 'own': function '{function}'.*{match}"):
            RewardSet.from_config(rewards, RewardWorkersConfig())
    with pytest.raises(
        ConfigError, match=r"^reward 'own': function '.*<lambda>' \(.*test_rewards.py:\d+\) takes"
    ):
        run([group(task(), "abc")], {"own": RewardConfig(function="object:own")}, {"own": lambda x: 1.0})


def test_errors_of_loading_reach_the_config(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import nothing_of_that_name\ndef reward(response, task): return 1.0\n")
    cases = {
        "exactly": "did you mean 'exact'",
        "whet.rewards.builtin:exakt": "has no 'exakt'.*did you mean 'exact'",
        f"{bad}:reward": "nothing_of_that_name",
        "/nowhere/x.py:reward": "no such file",
    }
    for function, match in cases.items():
        with pytest.raises(ConfigError, match=match):
            RewardSet.from_config({"mine": RewardConfig(function=function)}, RewardWorkersConfig())
    with pytest.raises(ConfigError, match="no argument 'ignorecase'"):
        RewardSet.from_config(
            {"e": RewardConfig(function="exact", arguments={"ignorecase": True})}, RewardWorkersConfig()
        )


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        ("math", {"boxed": "false"}, r"rewards.e.arguments.boxed='false': math takes bool: "),
        ("rlcr", {"weights": [1, 2]}, r"weights=\[1, 2\]: rlcr takes Mapping\[str, float\] \| None: "),
        ("whet.rewards.math:math", {"boxed": 1}, r"boxed=1: whet.rewards.math:math takes bool"),
    ],
)
def test_an_argument_of_a_reward_of_ours_has_its_type(function, arguments, said):
    """Else the text 'false' would count as true."""
    with pytest.raises(ConfigError, match=said):
        RewardSet.from_config(
            {"e": RewardConfig(function=function, arguments=arguments)}, RewardWorkersConfig()
        )


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        ("format", {}, "reward 'e': format needs either `tags`, at least one, or `pattern`"),
        ("format", {"tags": []}, "at least one"),
        ("format", {"pattern": "("}, r"pattern='\(' is not a regular expression: missing \)"),
        (
            "overlong",
            {"max_tokens": 9, "buffer": 10},
            "0 < buffer <= max_tokens; got buffer 10, max_tokens 9",
        ),
        ("rlcr", {"weights": {"acuracy": 1.0}}, "weights: no part 'acuracy'; did you mean 'accuracy'"),
        ("reasoning_gym", {"verifiers": ["ab"], "pattern": "a"}, "pattern='a' has no group"),
        ("reasoning_gym", {"verifiers": [5]}, r"verifiers=\[5\]: reasoning_gym takes Sequence\[str\] \| str"),
        ("whet.rewards.gsm8k:gsm8k", {"last_characters": 0}, r"=0: .*takes int \| None: .*greater than 0"),
        (
            "code",
            {"most_tests": -1},
            r"most_tests=-1: code takes int \| None: Input should be greater than 0",
        ),
        ("code", {"timeout_s": None}, "timeout_s=None: code takes float: Input should be a valid number"),
        ("sandbox_fusion", {"url": "x", "timeout_s": "a"}, "timeout_s='a': sandbox_fusion takes float"),
        ("judge", {"url": "x", "model": "m", "timeout_s": "a"}, "timeout_s='a': a judge takes float"),
        ("judge", {"url": "x", "model": "m", "body": "a"}, "body='a': a judge takes Mapping"),
        ("judge", {"url": "x", "model": "m", "rubric": 5}, "rubric=5: a judge takes "),
        ("ruler", {"url": "x", "model": "m", "question": "{response}"}, r"\{responses\} has"),
    ],
)
def test_arguments_that_could_score_no_reply_are_refused_before_the_run(function, arguments, said):
    rewards = {"e": RewardConfig(function=function, arguments=arguments)}
    with pytest.raises(ConfigError, match=said):
        RewardSet.from_config(rewards, RewardWorkersConfig(timeout_s=100))


# ---------------------------------------------------------------- combining


def test_rewards_are_weighted_and_their_raw_parts_kept():
    def length(response, task):
        return {"score": len(response), "twice": 2 * len(response)}

    rewards = {
        "exact": RewardConfig(function="exact", weight=2.0),
        "length": RewardConfig(function="length", weight=-0.5),
        "watched": RewardConfig(function="exact", weight=0.0),
    }
    groups = [group(task("ab"), "ab", "abcd"), group(task("z"), "z")]
    got = run(groups, rewards, {"length": length}, count=2)
    assert [[r.reward for r in g.rollouts] for g in got] == [[2 - 1.0, -2.0], [2 - 0.5]]
    assert got[0].rollouts[1].reward_parts == {
        "exact": 0.0,
        "length": 4.0,
        "length/twice": 8.0,
        "watched": 0.0,
    }
    assert [g.task for g in got] == [g.task for g in groups]
    assert [r.index for r in got[0].rollouts] == [0, 1]


def test_seconds_of_each_reward_are_added_over_its_calls():
    """Of those that fail, too."""

    def slow(response, task):
        time.sleep(0.1)
        return 1.0

    def hangs(response, task):
        time.sleep(60)

    rewards = {name: RewardConfig(function="exact") for name in ("slow", "hangs")}
    workers = RewardWorkersConfig(count=2, timeout_s=1.0)
    with RewardSet.from_config(rewards, workers, {"slow": slow, "hangs": hangs}) as made:
        asyncio.run(score([group(task("ab"), "ab", "abcd")], replace(made, weights={"slow": 1.0})))
        first = made.timings()
        assert list(first) == ["reward/seconds/slow"]
        assert first["reward/seconds/slow"] >= 2 * 0.1, "of both processes together"
        assert made.timings() == {}, "each is told once"
        (out,) = asyncio.run(score([group(task("ab"), "ab")], made))
        assert out.rollouts[0].error.startswith("reward hangs: timeout")
        assert made.timings()["reward/seconds/hangs"] >= 1.0


def test_a_failed_part_leaves_the_rollout_unscored_and_the_others_alone():
    def touchy(response, task):
        if response == "bad":
            raise ValueError("not this")
        return {"sum": 1.0} if response == "odd" else 1.0

    rewards = {"exact": RewardConfig(function="exact"), "touchy": RewardConfig(function="touchy")}
    t = task("ok")
    gone = rollout(t, "ok", 3).scored(None, {}, "engine: timed out")
    g = Group(t, (*group(t, "ok", "bad", "odd").rollouts, gone))
    (out,) = run([g], rewards, {"touchy": touchy})
    ok, bad, odd, lost = out.rollouts
    assert (ok.reward, ok.error) == (2.0, None)
    assert (bad.reward, bad.reward_parts) == (None, {})
    assert bad.error.startswith("reward touchy: raised ValueError: not this (test_rewards.py:")
    assert odd.error == "reward touchy: bad_value: a dict without 'score': ['sum']"
    assert lost is gone


def test_a_random_reward_is_the_same_again_whatever_else_is_scored():
    def dice(response, task):
        import random

        return random.random()

    rewards = {"dice": RewardConfig(function="dice")}
    first, second = group(task(), "a", "b"), Group(task(), (rollout(task(), "c", 2),))
    whole = run([first, second], rewards, {"dice": dice}, count=2)
    alone = run([second], rewards, {"dice": dice})
    assert whole[1].rollouts[0].reward == alone[0].rollouts[0].reward
    assert len({r.reward for g in whole for r in g.rollouts}) == 3


def test_user_code_is_imported_where_rewards_run_and_not_here(tmp_path, monkeypatch):
    (tmp_path / "whet_test_secret_reward.py").write_text(
        "import os\n"
        f"def reward(response, task, offset=0):\n    return float(os.getpid() != {os.getpid()}) + offset\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    by_module = RewardConfig(function="whet_test_secret_reward:reward")
    by_path = RewardConfig(function=f"{tmp_path}/whet_test_secret_reward.py:reward", arguments={"offset": 1})
    (g,) = run([group(task(), "x")], {"a": by_module, "b": by_path})
    assert g.rollouts[0].reward_parts == {"a": 1.0, "b": 2.0}
    assert not [name for name in sys.modules if "whet_test_secret_reward" in name]


def test_no_rewards_need_no_process():
    groups = [group(task(), "x")]
    with RewardSet.from_config({}, RewardWorkersConfig()) as none:
        assert none.jail is None
        assert asyncio.run(score(groups, none)) == groups


def test_columns_that_are_not_json_are_named():
    with pytest.raises(DataError, match=r"task 4 of 'test'.*bytes"):
        run([group(task(b"raw"), "x")], {"e": RewardConfig(function="exact")})


def test_too_many_failures_end_the_run_with_the_commonest_cause():
    t = task()
    errors = [
        None,
        None,
        "reward a: timeout: no result in 1 s",
        "reward b: raised KeyError: 'k'",
        "reward b: raised KeyError: 'k'",
    ]
    rollouts = tuple(rollout(t, "x", i).scored(None if e else 1.0, {}, e) for i, e in enumerate(errors))
    at = RewardSet({}, None, max_failure_rate=0.6)
    check_failures([Group(t, rollouts)], at, of="this step")
    with pytest.raises(WhetError, match=r"3 of 5 rollouts.*2 times\): reward b: raised KeyError"):
        check_failures([Group(t, rollouts)], RewardSet({}, None, max_failure_rate=0.59), of="this step")


# ---------------------------------------------------------------- what files and float32 cannot hold


class Odd(Exception):
    def __str__(self) -> str:
        return "half a character: \ud83d" + "x" * 1000


def odd(response, task):
    """What the reply asks for."""
    if response == "raises":
        raise Odd
    return {
        "answer": {"score": 1.0, "answer": "\udc80" + "y" * 3000},
        "name": {"score": 1.0, "\ud800": 0.5},
        "twins": {"score": 1.0, "\ud800": 0.5, "\\ud800": 0.25},
        "float32": 1e39,
        "float64": -1e308,
        "int": 1 << 1000,
        "part": {"score": 1.0, "other": 1e308},
        "most": 1e12,
    }[response]


def test_no_text_and_no_number_of_a_reward_ends_the_run_at_its_record(tmp_path):
    """Half a surrogate pair, or a number whose square overflows, came back at every restart."""
    replies = ("raises", "answer", "name", "twins", "float32", "float64", "int", "part", "most")
    (judged,) = run([group(task("a"), *replies)], {"odd": RewardConfig(function="object:odd")}, {"odd": odd})
    by = dict(zip(replies, judged.rollouts))
    assert by["raises"].error.startswith("reward odd: raised Odd: half a character: \\ud83dxxx")
    assert len(by["raises"].error) < 600
    assert by["answer"].answer.startswith("\\udc80yyy")
    assert by["answer"].answer.endswith(" ... (3006 characters)")
    assert by["name"].reward_parts == {"odd": 1.0, "odd/\\ud800": 0.5}
    assert "keys that become equal" in by["twins"].error
    for name, what in {
        "float32": "1e+39; expected a finite number between -1e+12 and 1e+12",
        "float64": "-1e+308;",
        "int": "1.0715086071862673e+301;",
        "part": "1e+308 at 'other';",
    }.items():
        assert by[name].reward is None
        assert by[name].error.startswith(f"reward odd: bad_value: {what}")
    assert by["most"].reward == 1e12
    dumps = {"rollouts": f"{tmp_path}/{{step}}.jsonl", "eval": f"{tmp_path}/{{step}}.parquet"}
    directory = RunDirectory(tmp_path / "run", ["main"], dumps=dumps)
    rollouts = [r for r in judged.rollouts for _ in range(100)]
    directory.log("main", 1, metrics=summarise([Group(judged.task, tuple(rollouts))]), timings={})
    directory.write_rollouts("main", 1, judged.rollouts)
    directory.write_eval("main", 1, judged.rollouts)
    directory.close()
    assert groups.decode(groups.encode(judged)) == judged
    assert torch.tensor([r.reward or 0.0 for r in rollouts]).square().sum().isfinite()


def test_what_is_no_number_beside_a_score_is_left_out():
    """verl's functions return texts there, which it only records; each such rollout was unscored."""
    import numpy as np

    given = {
        "pred": {"score": 0.5, "acc": True, "pred": "42", "why": None, "steps": [1], "ids": np.arange(3)},
        "both": {"score": 1.0, "pred": "1", "answer": "2", "note": np.str_("n")},
        "number": {"score": np.float32(1.0), "pred": 7, "none": np.array([]), "one": np.array([2.0])},
        "list": {"score": 0.0, "answer": ["A", "B"], "inner": {"a": 1}},
        "no score": {"score": "1.0", "acc": 1.0},
        "no value": {"score": None, "acc": 1.0},
        "not finite": {"score": 1.0, "acc": float("nan")},
    }

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return given[solution_str]

    def several(data_sources, solution_strs, ground_truths, extra_infos):
        return [given[text] for text in solution_strs]

    def judged(function, *replies):
        (scored,) = run([group(task(), *replies)], {"r": RewardConfig(function="object:r")}, {"r": function})
        return scored.rollouts

    for function in (compute_score, several):
        pred, both, number, listed = judged(function, "pred", "both", "number", "list")
        assert [r.error for r in (pred, both, number, listed)] == [None] * 4
        assert (pred.reward_parts, pred.answer) == ({"r": 0.5, "r/acc": 1.0}, "42")
        assert (both.reward_parts, both.answer) == ({"r": 1.0}, "2")
        assert (number.reward_parts, number.answer) == ({"r": 1.0, "r/pred": 7.0, "r/one": 2.0}, "7")
        assert (listed.reward_parts, listed.answer) == ({"r": 0.0}, None)
    text, none, nan = judged(compute_score, "no score", "no value", "not finite")
    assert text.error.startswith("reward r: bad_value: the text '1.0' at 'score'; expected a finite number")
    assert none.error.startswith("reward r: bad_value: None (is a `return` missing?) at 'score'")
    assert nan.error.startswith("reward r: bad_value: nan at 'acc'; expected a finite number")
    (text,) = judged(several, "no score")
    assert "the text '1.0' as the score of completion 0; expected a finite number" in text.error


def test_a_batch_of_many_rollouts_has_further_numbers_of_each():
    """The limit of a dict's entries held for all rollouts of a call together: 100 with three each were unscored."""

    def several(data_sources, solution_strs, ground_truths, extra_infos):
        return [{"score": 1.0, "acc": 1.0, "form": 0.5, "pred": text} for text in solution_strs]

    replies = [f"r{n}" for n in range(130)]
    (scored,) = run([group(task(), *replies)], {"r": RewardConfig(function="object:r")}, {"r": several})
    assert {r.error for r in scored.rollouts} == {None}
    assert [r.answer for r in scored.rollouts] == replies
    assert scored.rollouts[129].reward_parts == {"r": 1.0, "r/acc": 1.0, "r/form": 0.5}


def test_a_weighted_sum_that_is_too_large_leaves_the_rollout_unscored():
    weighted = {"big": RewardConfig(function="object:big", weight=1e30)}
    (judged,) = run([group(task("a"), "b")], weighted, {"big": lambda response, task: 1e10})
    assert judged.rollouts[0].reward is None
    assert judged.rollouts[0].error.startswith("rewards: bad_value: 1e+40 as the weighted sum; expected")
