"""Programs of replies, run on this machine: what a test counts, what they may do, what is left unscored."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import payloads
from test_rewards import group, run, task
from whet.config.schema import RewardConfig
from whet.guard import sandbox
from whet.rewards import code as module
from whet.rewards.code import code, equal
from whet.types import ConfigError

needs_sandbox = pytest.mark.skipif(bool(sandbox.lacking()), reason=sandbox.lacking())
TWO = {"inputs": ["1\n", "4"], "outputs": ["2", "8\n"]}
DOUBLE = "print(2 * int(input()))"


def judged(program: str, answer: Any, **settings: Any) -> dict[str, float]:
    return asyncio.run(code(f"Sure:\n```python\n{program}\n```\nDone.", task(answer), **settings))


@needs_sandbox
def test_the_share_of_passed_tests() -> None:
    assert judged(DOUBLE, TWO) == judged(DOUBLE, json.dumps(TWO)) == {"score": 1.0}
    assert judged("print(2)", TWO) == {"score": 0.5}
    assert judged("print(2)", TWO, partial=False) == {"score": 0.0}
    assert judged("print(2)", TWO, most_tests=1, partial=False) == {"score": 1.0}
    assert judged(f"if __name__ == '__main__':\n    {DOUBLE}\n    exit()", TWO) == {"score": 1.0}
    assert judged("a / 0", TWO) == judged("raise SystemExit(3)", TWO) == {"score": 0.0, "ended/error": 2.0}
    assert asyncio.run(code("no code", task(TWO))) == {"score": 0.0}
    assert judged(DOUBLE, TWO, sources=["apps"]) == {"score": 0.0}
    last = f"```python\nprint(0)\n```\nBetter:\n```py\n{DOUBLE}\n```"
    assert asyncio.run(code(last, task(TWO), block="last")) == {"score": 1.0}
    assert asyncio.run(code(last, task(TWO))) == {"score": 0.0}


@needs_sandbox
def test_functions_methods_and_assertions() -> None:
    called = {"fn_name": "total", "inputs": ["4\n2", "9\n1"], "outputs": ["[4.0]", "[4.0]"]}
    assert judged("def total(a, b):\n    return (sqrt(a) + b,)", called) == {"score": 1.0}
    tests = [
        {"input": "4\n2", "output": '{"x": 6}', "testtype": "functional", "metadata": {"func_name": "total"}}
    ]
    assert judged("class Solution:\n    def total(self, a, b):\n        return {'x': a + b}", tests) == {
        "score": 1.0
    }
    told = json.dumps([{**tests[0], "metadata": json.dumps(tests[0]["metadata"])}])
    assert judged("from __future__ import annotations\ndef total(a, b): return {'x': a + b}", told) == {
        "score": 1.0
    }
    assert judged(
        "from __future__ import annotations\nprint(gcd(4, 6))", {"inputs": [""], "outputs": ["2"]}
    ) == {"score": 1.0}
    with pytest.raises(ValueError, match="has no tests"):
        judged("1", [{**tests[0], "metadata": {}}])
    asserts = {"assert_case": ["assert f(1) == 2", "assert f(1) == 3"]}
    assert judged("def f(x):\n    return x + 1", asserts) == {"score": 0.5, "ended/error": 1.0}
    # who leaves before the assertions has not met them
    assert judged("exit()", asserts) == {"score": 0.0, "ended/exit": 2.0}
    assert judged("import os\nos._exit(0)", asserts) == {"score": 0.0, "ended/error": 2.0}


@needs_sandbox
def test_limits_end_a_program_and_nothing_is_left() -> None:
    assert judged("while True: pass", TWO, timeout_s=0.3) == {"score": 0.0, "ended/time": 2.0}
    # the first that fails is the last where all have to pass
    assert judged("while True: pass", TWO, timeout_s=0.3, partial=False) == {"score": 0.0, "ended/time": 1.0}
    forever = "import os\nos.close(1)\nwhile True: pass"
    assert judged(forever, TWO, timeout_s=0.3, most_tests=1) == {"score": 0.0, "ended/time": 1.0}
    assert judged("while True: print('x' * 9999)", TWO, most_tests=1) == {"score": 0.0, "ended/printed": 1.0}
    # what waits in sockets is the kernel's memory, beside the program's
    sockets = "import socket\nkept = [socket.socketpair() for _ in range(200)]"
    for hog in ("bytearray(1 << 30)", sockets):
        assert judged(hog, TWO, most_tests=1, memory_mb=512) == {"score": 0.0, "ended/error": 1.0}


@needs_sandbox
@pytest.mark.parametrize(
    "attempt",
    [
        "open({home!r}).read()",
        "open({target!r}, 'w')",
        "import os; os.fork()",
        "import os; os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['true'])",
        "import socket; socket.create_connection(('127.0.0.1', {port}))",
        "import os; os.kill(os.getppid(), 9)",
        "open('/proc/' + str(__import__('os').getppid()) + '/environ').read()",
    ],
)
def test_a_program_does_nothing_but_compute(attempt: str, tmp_path: Path) -> None:
    """A program that may do it would pass."""
    place, secret = tmp_path / "place", tmp_path / "secret"
    place.mkdir()
    secret.write_text("there")
    with payloads.listening() as server:
        names = {"home": str(secret), "target": str(place / "new"), "port": server.getsockname()[1]}
        tests = {"inputs": [""], "outputs": ["done"]}
        assert judged(attempt.format(**names) + "\nprint('done')", tests) == {
            "score": 0.0,
            "ended/error": 1.0,
        }
        assert judged("print('done')", tests) == {"score": 1.0}
        assert not payloads.fired(place, server)


@needs_sandbox
def test_a_run_s_environment_is_not_the_program_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    shown = judged("import os\nprint('JUDGE_KEY' in os.environ)", {"inputs": [""], "outputs": ["False"]})
    assert shown == {"score": 1.0}


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1\n2\n", "1\n2", True),
        (" 1 \n2", "1\n2", True),
        ("1 2", "1\n2", True),
        ("0.3333333", "0.33333330001", True),
        ("0.3334", "0.3333", False),
        ("1", "1.0", True),
        ("10000001", "10000002", False),
        ("nan", "inf", False),
        ("True", "1", False),
        ('{"b": 1, "a": [2]}', '{"a":[2],"b":1}', True),
        ("true", "1", False),
        ("", "0", False),
    ],
)
def test_equal_outputs(printed: str, expected: str, same: bool) -> None:
    assert equal(printed, expected) is same


@needs_sandbox
def test_in_a_run_a_reward_beside_others() -> None:
    """In a reward process; a row without tests leaves its rollout unscored."""
    rewards = {"c": RewardConfig(function="code")}
    right, wrong = f"```python\n{DOUBLE}\n```", "```python\nprint(0)\n```"
    scored, unscored = run([group(task(TWO), right, wrong), group(task("4"), right)], rewards, timeout_s=120)
    assert [r.reward for r in scored.rollouts] == [1.0, 0.0]
    assert unscored.rollouts[0].reward is None
    assert "has no tests" in str(unscored.rollouts[0].error)


def test_what_cannot_work_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = {"c": RewardConfig(function="code")}
    with pytest.raises(ConfigError, match=r"may take 70 s, but .*timeout_s=10: raise it to 70"):
        run([], rewards)
    with pytest.raises(ConfigError, match="sandbox=all forbids"):
        run([], rewards, timeout_s=120, sandbox="all")
    monkeypatch.setattr(sandbox, "lacking", lambda: "no Landlock")
    with pytest.raises(
        ConfigError, match=r"runs the code of replies; so it may run only in a sandbox.*no Landlock"
    ):
        run([], rewards, timeout_s=120)
    with pytest.raises(OSError, match="only in a sandbox: no Landlock"):
        asyncio.run(module.code("```python\n1\n```", task(TWO)))
