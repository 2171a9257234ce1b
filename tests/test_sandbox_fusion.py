"""Programs that a SandboxFusion service runs: what it is asked, what a test counts, what is left unscored."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from sandboxes import ended, sandbox
from test_rewards import group, pay, run, task
from whet.config.load import load
from whet.config.schema import RewardConfig
from whet.rewards import sandbox_fusion as module
from whet.rewards import service as service_module
from whet.rewards.sandbox_fusion import checks_of, code_in, outcome, sandbox_fusion
from whet.types import ConfigError, Task

DOUBLE = "Sure:\n```python\nprint(2 * int(input()))\n```\nDone."
TWO = {"inputs": ["1\n", "4"], "outputs": ["2", "8\n"]}
FINISHED = {"status": "Finished", "return_code": 0, "stdout": "2\n"}


def scored(service: Any, answer: Any, reply: str = DOUBLE, **arguments: Any) -> float:
    return asyncio.run(sandbox_fusion(reply, task(answer), url=service.url, **arguments))["score"]


def test_the_share_of_passed_tests() -> None:
    with sandbox() as service:
        assert scored(service, TWO) == 1.0
        assert scored(service, json.dumps(TWO)) == 1.0
        assert scored(service, {"inputs": ["1", "2", "3", "x"], "outputs": ["2", "4", "7", ""]}) == 0.5
        assert scored(service, TWO, "```python\nprint(2)\n```") == 0.5
        assert scored(service, TWO, "```python\nraise SystemExit(3)\n```") == 0.0


def test_what_the_service_is_asked() -> None:
    """As verl 0.9.1 asks it."""
    with sandbox() as service:
        scored(service, TWO, max_concurrent=1, memory_limit_mb=512, timeout_s=7)
        scored(service, {"inputs": [5], "outputs": [10]}, memory_limit_mb=None)
    first = {"compile_timeout": 7, "run_timeout": 7, "memory_limit_MB": 512, "language": "python"}
    first |= {"files": {}, "fetch_files": [], "stdin": "1\n", "code": "\nprint(2 * int(input()))\n\n\n"}
    assert service.asked[0] == first
    assert service.asked[1] == {**first, "stdin": "4"}
    assert "memory_limit_MB" not in service.asked[2]
    assert (service.asked[2]["stdin"], service.asked[2]["run_timeout"]) == ("5", 10)


FUNCTION = "```python\ndef total(a, b):\n    return {}\n```"
METHOD = "```python\nclass Solution:\n    def total(self, a, b):\n        return {}\n```"


@pytest.mark.parametrize("form", [FUNCTION, METHOD], ids=["function", "method"])
@pytest.mark.parametrize(
    ("value", "printed", "score"),
    [
        ("a + b", "3", 1.0),
        ("[a, b]", "[1, 2]", 1.0),
        ("a < b", "true", 1.0),
        ("None", "null", 1.0),
        ("str(a)", "1", 1.0),
        ("sqrt(a) + len(defaultdict(int))", "1.0", 1.0),  # solutions expect these names
        ("a / 0", "3", 0.0),
        ("a / 0", "", 1.0),  # an error prints nothing, and ends like a value
    ],
)
def test_functions_are_called_with_the_lines_of_the_input(
    form: str, value: str, printed: str, score: float
) -> None:
    with sandbox() as service:
        answer = {"fn_name": "total", "inputs": ["1\n2"], "outputs": [printed]}
        assert scored(service, answer, form.format(value)) == score


def test_assertions_follow_the_program() -> None:
    with sandbox() as service:
        answer = {"assert_case": ["assert f(1) == 2", "assert f(1) == 3", "print(f(0))"]}
        assert scored(service, answer, "```\ndef f(x):\n    return x + 1\n```") == pytest.approx(2 / 3)


def test_only_the_first_tests_are_run() -> None:
    with sandbox() as service:
        answer = {"inputs": ["1"] * 5, "outputs": ["2", "2", "3", "3", "3"]}
        assert scored(service, answer, most_tests=3) == pytest.approx(2 / 3)
        assert len(service.asked) == 3


def test_sources_of_others_are_left_to_others() -> None:
    with sandbox() as service:
        assert scored(service, None, sources=["apps"]) == 0.0
        assert scored(service, TWO, sources=["test"]) == 1.0
    assert len(service.asked) == 2


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("```python\na\n```", "\na\n"),
        ("```python\na\n``` then ```python\nb\n```", "\nb\n"),
        ("```\na\n```", "\na\n"),  # the name of a language is letters
        ("```cpp\na\n```", "a\n"),
        ("```c++\na\n```", "c++\na\n"),
        ("```one\n``` ```two\n```", ""),
        ("``` a ```", " a "),
        ("```py", "py"),
        ("a = 1", None),
        ("", None),
    ],
)
def test_the_code_of_a_reply(reply: str, code: str | None) -> None:
    assert code_in(reply, "python") == code


def test_a_reply_without_code_is_wrong_and_nobody_is_asked() -> None:
    with sandbox() as service:
        assert scored(service, TWO, "print(2)") == 0.0
        assert not service.asked


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "has no answer"),
        ("[", "its answer is not JSON"),
        ({"inputs": ["1"]}, "expected the lists `inputs` and `outputs`"),
        ("[1]", "expected the lists"),
        ({"inputs": [], "outputs": []}, "0 inputs, 0 outputs and 0 assert_case"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs, 0 outputs and 1 assert_case"),
        ({"inputs": ["1"], "outputs": ["2"], "assert_case": ["a", "b"]}, "2 assert_case"),
    ],
)
def test_a_row_without_tests_has_no_score(answer: Any, said: str) -> None:
    with pytest.raises(ValueError, match=r"task 4 of 'test'") as e:
        checks_of(task(answer), "", "python")
    assert said in str(e.value)


def test_what_a_compiler_refuses_fails_all_later_tests() -> None:
    refused = ended("Failed", compile_={"status": "Error"})
    with sandbox(ended("Success", run=FINISHED), refused, ended("Success", run=FINISHED)) as service:
        answer = {"inputs": ["1"] * 3, "outputs": ["2"] * 3}
        assert scored(service, answer, max_concurrent=1) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (ended("Success", run=FINISHED), "passed"),
        (ended("Success", run={**FINISHED, "stdout": None}), "wrong"),
        (ended("Failed", run={"status": "TimeLimitExceeded"}), "wrong"),
        (ended("Failed", run={"status": "Error"}), "wrong"),
        (ended("Failed", run={"status": "Finished", "return_code": 1}), "wrong"),
        (ended("Failed", compile_={"status": "TimeLimitExceeded"}), "compile"),
        (ended("Failed", compile_={"status": "Finished", "return_code": 2}, run=FINISHED), "compile"),
        (
            ended("Failed", compile_={"status": "Finished", "return_code": 0}, run={"status": "Error"}),
            "wrong",
        ),
    ],
)
def test_what_an_answer_means(said: Any, what: str) -> None:
    assert outcome(said, "2") == what


@pytest.mark.parametrize(
    "said",
    [
        ended("SandboxError"),
        ended("Failed"),
        ended("Success", run={"status": "Error"}),
        ended("New"),
        [],
        None,
    ],
)
def test_what_is_no_verdict_on_the_program_is_no_score(said: Any) -> None:
    with pytest.raises(ConnectionError, match="the sandbox could not run the program"):
        outcome(said, "2")


# ---------------------------------------------------------------- a service that fails


def status(number: int, text: str = "no") -> Any:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=number, text=text)

    return handler


def test_a_gateway_that_times_out_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(service_module.asyncio, "sleep", sleep)
    one = {"inputs": ["1"], "outputs": ["2"]}
    with sandbox(status(504), status(504), ended("Success", run=FINISHED)) as service:
        assert scored(service, one) == 1.0
    assert [pause for pause in pauses if pause >= 1] == [1, 2]
    with sandbox(*[status(504)] * 3) as service, pytest.raises(ConnectionError, match="504"):
        scored(service, one)


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (status(500, "out of pods"), "answered 500 Internal Server Error: out of pods"),
        (status(401), "answered 401 Unauthorized"),
        (status(200, "<html>"), "did not answer with JSON"),
    ],
)
def test_errors_of_the_service(handler: Any, said: str) -> None:
    with sandbox(handler) as service, pytest.raises(ConnectionError) as e:
        scored(service, TWO)
    assert said in str(e.value)
    assert service.url in str(e.value)


def test_a_service_that_does_not_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    monkeypatch.setattr(module, "MARGIN_S", 0.1)
    with sandbox(never) as service, pytest.raises(ConnectionError, match=r"within 0\.3 s"):
        scored(service, TWO, timeout_s=0.1, max_concurrent=1)


def test_a_program_that_prints_without_end_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        said = web.StreamResponse()
        await said.prepare(request)
        while True:
            await said.write(b" " * 65536)

    monkeypatch.setattr(service_module, "MOST_ANSWER", 1 << 20)
    with sandbox(endless) as service:
        assert scored(service, {"inputs": ["1"], "outputs": ["2"]}) == 0.0


def test_requests_at_once() -> None:
    answer = {"inputs": ["1"] * 12, "outputs": ["2"] * 12}
    with sandbox() as service:
        assert scored(service, answer, max_concurrent=8, processes=4) == 1.0
        assert service.most == 2


# ---------------------------------------------------------------- in a run


def test_a_reward_process_asks_the_service() -> None:
    with sandbox() as service:
        asked = pay("sandbox_fusion", task(TWO), DOUBLE, "```\nprint(2)\n```", "none", url=service.url)
    assert asked == [1.0, 0.5, 0.0]


def test_without_a_service_a_rollout_is_unscored_and_secrets_stay_secret() -> None:
    with sandbox() as service:
        gone = f"{service.url}?api_key=hunter2-hunter2"
    (error,) = pay("sandbox_fusion", task(TWO), DOUBLE, url=gone)
    assert "cannot reach the sandbox at http://127.0.0.1:" in error
    assert "hunter2" not in error
    assert "api_key=<redacted" in error


def test_a_run_has_time_for_an_answer_and_may_ask() -> None:
    reward = {"code": RewardConfig(function="sandbox_fusion", arguments={"url": "http://x", "timeout_s": 20})}
    with pytest.raises(
        ConfigError, match=r"may take 50 s, .* reward_workers.timeout_s=10: raise it to 50 or more"
    ):
        run([], reward)
    with pytest.raises(ConfigError, match=r"reward_workers\.sandbox=all forbids"):
        run([], reward, timeout_s=50.0, sandbox="all")
    assert run([group(task(TWO))], reward, timeout_s=50.0)


# ---------------------------------------------------------------- verl's files

URL = "reward_model.sandbox_fusion.url=http://box/run_code"


def of_verl(*more: str, at: str = "0.5.0") -> dict[str, RewardConfig]:
    given = (
        "data.train_files=a.parquet",
        "actor_rollout_ref.model.path=m",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    )
    loaded = load(None, [*given, *more], dialect=f"verl-ppo@{at}", rehearsal=True)
    if "code" in loaded.config.rewards:
        workers = loaded.config.reward_workers
        assert (workers.count, workers.timeout_s) == (4, 300.0)
    return loaded.config.rewards


@pytest.mark.usefixtures("home")
def test_verls_sandbox_judges_programs_and_the_rest_is_judged_as_before() -> None:
    found = of_verl(URL, "reward_model.sandbox_fusion.max_concurrent=16")
    code = found["code"].arguments
    assert code == {
        "url": "http://box/run_code",
        "max_concurrent": 16,
        "memory_limit_mb": 1024,
        "most_tests": 10,
        "sources": ["codecontests", "apps", "codeforces", "taco"],
    }
    assert found["score"].arguments == {"elsewhere": code["sources"]}
    assert (found["score"].weight, found["code"].weight) == (1.0, 1.0)
    later = of_verl("reward.sandbox_fusion.url=http://box/run_code", at="0.9.0")
    assert later["code"].arguments == {**code, "max_concurrent": 64}


@pytest.mark.usefixtures("home")
def test_verl_0_4_0_sends_no_limit_of_memory() -> None:
    found = of_verl(URL, at="0.4.0")
    assert found["code"].arguments["memory_limit_mb"] is None
    assert found["score"].arguments["gsm8k_characters"] is None


@pytest.mark.usefixtures("home")
def test_a_function_of_yours_leaves_verls_sandbox_out() -> None:
    mine = ("custom_reward_function.path=mine.py", "custom_reward_function.name=f")
    assert list(of_verl(URL, *mine)) == ["score"]
    assert list(of_verl()) == ["score"]


@pytest.mark.usefixtures("home")
def test_the_two_rewards_of_a_verl_file_make_verls_score() -> None:
    with sandbox() as service:
        found = of_verl(f"reward_model.sandbox_fusion.url={service.url}")
        programs = Task(
            uid=0, source="taco", prompt="p", answer={"inputs": ["1"] * 11, "outputs": ["2"] * 11}
        )
        sums = Task(uid=1, source="openai/gsm8k", prompt="p", answer="5")
        groups = [group(programs, DOUBLE, "none"), group(sums, "#### 5", "#### 6")]
        scores = run(groups, found, timeout_s=120.0)
    assert [[r.reward for r in g.rollouts] for g in scores] == [[1.0, 0.0], [1.0, 0.0]]
    assert len(service.asked) == 10
