"""Language models as judges: what they are asked, what is read in their answers, servers and models of the run."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import whet
from sandboxes import Handler, Sandbox
from test_rewards import group, pay, run, task
from tiny import RUN
from whet import train
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import RewardConfig, RewardWorkersConfig, TokenizerConfig
from whet.data.tokenizer import build, load_tokenizer
from whet.judges import judges_of
from whet.rewards import judge as module
from whet.rewards.combine import RewardSet, score
from whet.rewards.judge import Asking, asking
from whet.types import ConfigError, Group, Json, Message, Task

RATE, COMPARE = asking(False, {}), asking(True, {})


# ---------------------------------------------------------------- questions


def test_the_question_about_a_reply() -> None:
    asked = task("4", extra={"rubric": [{"description": "is right", "weight": 5}, "is short"]})
    system, user = RATE.messages(asked, ["it is {answer}"], together=False)
    assert system.role == "system"
    assert "from 1 (it meets nothing) to 10 (it meets everything)" in system.content
    assert user.content == (
        "<task>\np\n</task>\n\n<reference>\n4\n</reference>\n\n<rubric>\n- is right (weight 5)\n- is short\n</rubric>"
        "\n\n<reply>\nit is {answer}\n</reply>"
    )
    _, bare = RATE.messages(task(), ["x"], together=False)
    assert bare.content == "<task>\np\n</task>\n\n<reply>\nx\n</reply>"


def test_the_question_about_all_replies() -> None:
    system, user = COMPARE.messages(task(), ["x", "y"], together=True)
    assert "the 2 replies" in system.content
    assert "from 0 (useless) to 1 (as good" in system.content
    assert user.content.endswith('<reply number="1">\nx\n</reply>\n\n<reply number="2">\ny\n</reply>')


def test_a_template_of_your_own_has_its_fields_filled_once() -> None:
    """What a reply says is never looked at for fields."""
    how = Asking(question="{prompt}|{response}|{answer}|{rubric}|{low}..{high}|{other}", rubric="R", high=5)
    _, user = how.messages(task("A"), ["{answer}{prompt}"], together=False)
    assert user.content == "p|{answer}{prompt}|A|R|1..5|{other}"


def test_a_conversation_is_shown_without_its_system_message() -> None:
    chat = (Message("system", "s"), Message("user", "a"))
    assert module.as_text(chat) == "a"
    more = (*chat, Message("assistant", "b"), Message("user", "c"))
    assert module.as_text(more) == "user: a\n\nassistant: b\n\nuser: c"


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Rating: -3", 0.2),
        ("**Rating:** -5", 0.0),
        ("Score = -.5", 0.45),
        ("Rating: .5", 0.55),
        ("Rating - 3", 0.8),
    ]
    + [
        ("Rating-3", 0.8),
        ("Rating: +3", 0.8),
        ("Rating: - 3", 0.8),
        ("rate [[-3]]", 0.2),
        ("Rating: -6", None),
        ("Rating (-5 to 5): 4", 0.9),
        ("**Rating** (1-10): -5", 0.0),
    ],
)
def test_a_rating_keeps_its_sign_and_its_point(said: str, expected: float | None) -> None:
    both = Asking(low=-5, high=5, unread=-1.0)
    assert both.scores(said, 1, together=False)[0]["score"] == pytest.approx(
        -1 if expected is None else expected
    )


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Good.\nRating: 10", 1.0),
        ("Rating: 3 at first, but then\n**Rating:** 5.5", 0.5),
        ('```json\n{"rating": 1}\n```', 0.0),
        ("Score = 4/10", 3 / 9),
        ("so [[7]]", 6 / 9),
        ("Rating: 11", None),
        ("Rating: 0.5", None),
        ("I rate it well", None),
        ("", None),
    ],
)
def test_a_rating_by_hand(said: str, expected: float | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="does not end with 'Rating: NUMBER' from 1 to 10"):
            RATE.scores(said, 1, together=False)
        assert Asking(unread=0.25).scores(said, 1, together=False) == [{"score": 0.25, "read": 0.0}]
    else:
        assert RATE.scores(said, 1, together=False) == [{"score": pytest.approx(expected)}]
        assert Asking(unread=0.0).scores(said, 1, together=False)[0]["read"] == 1.0


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("[1] is bad, [2] better.\n[0.25, 1]", [0.25, 1.0]),
        ("[ -3 , 7, ]", [0.0, 1.0]),
        ("[0.1, 0.2, 0.3]", None),
        ("[[0.5, 0.5]]", [0.5, 0.5]),
        ("[first, last]", None),
        ("[__import__('os').system('true'), 1]", None),
    ],
)
def test_a_list_by_hand(said: str, expected: list[float] | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="a list of 2 numbers"):
            COMPARE.scores(said, 2, together=True)
        assert (
            asking(True, {"unread": 0.0}).scores(said, 2, together=True) == [{"score": 0.0, "read": 0.0}] * 2
        )
    else:
        assert [s["score"] for s in COMPARE.scores(said, 2, together=True)] == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"low": 3, "high": 3}, "low below high"),
        ({"max_tokens": 0}, "max_tokens >= 1"),
        ({"high": "ten"}, "arguments.high='ten': a judge takes float: "),
        (
            {"question": "{prompt} {responses}"},
            r"question: \{responses\} has no value here, \{response\} has",
        ),
        ({"qestion": "?"}, "did you mean 'question'"),
    ],
)
def test_arguments_that_no_judge_has(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asking(False, arguments)


# ---------------------------------------------------------------- a server


class Server(Sandbox):
    """A server with OpenAI's interface. It says how long the last reply is, or each of them."""

    path = "/v1/chat/completions"

    def answer(self, body: Json) -> Json:
        user = body["messages"][1]["content"]
        lengths = [len(reply) for reply in re.findall(r"<reply[^>]*>\n(.*?)\n</reply>", user, re.DOTALL)]
        said = (
            f"[{', '.join(f'{n / 10:g}' for n in lengths)}]"
            if "number=" in user
            else f"Rating: {lengths[-1]}"
        )
        return {"choices": [{"message": {"role": "assistant", "content": said}}]}


@contextmanager
def server(*answers: Json | Handler) -> Iterator[Server]:
    made = Server(*answers)
    made.url = made.url.removesuffix("/chat/completions")
    try:
        yield made
    finally:
        made.stop()


def test_a_reward_process_asks_the_server() -> None:
    with server() as s:
        rated = pay(
            "judge",
            task(),
            "a",
            "abcd",
            "",
            url=s.url,
            model="m",
            api_key="k-1234567890",
            body={"top_p": 0.5},
        )
        compared = pay("ruler", task("4"), "a", "abcd", url=f"{s.url}/", model="m", timeout_s=5)
    assert rated[:2] == pytest.approx([0.0, 3 / 9])
    assert "does not end with 'Rating: NUMBER'" in rated[2]
    assert compared == pytest.approx([0.1, 0.4])
    assert len(s.asked) == 4, "one question for each reply, and one for all"
    assert {k: s.asked[0][k] for k in ("model", "max_tokens", "temperature", "top_p")} == {
        "model": "m", "max_tokens": 1024, "temperature": 0.0, "top_p": 0.5,
    }  # fmt: skip
    assert "<reference>\n4" in s.asked[3]["messages"][1]["content"]


def test_a_judge_has_the_time_that_its_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp's own limit of 300 s, made shorter here, ends no question."""
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.05))

    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(0.3)
        return web.json_response({"choices": [{"message": {"content": "Rating: 10"}}]})

    with server(slow) as s:
        assert pay("judge", task(), "a", url=s.url, model="m", timeout_s=30) == [1.0]


def test_a_busy_server_is_asked_again_and_a_broken_one_leaves_unscored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def busy(_: web.Request) -> web.Response:
        return web.Response(status=429)

    async def at_once(_: float) -> None:
        return None

    monkeypatch.setattr(module.asyncio, "sleep", at_once)
    with server(busy) as s:
        found = asyncio.run(module.judge("abc", task(), url=s.url, model="m"))
    assert found == {"score": pytest.approx(2 / 9)}
    with server({"error": "no such model"}) as s:
        (error,) = pay("judge", task(), "abc", url=s.url, model="m")
    assert "answered without choices: {'error': 'no such model'}" in error
    (error,) = pay("ruler", task(), "abc", url=s.url, model="m")
    assert "cannot reach the judge at http://127.0.0.1:" in error


def test_a_server_that_is_busy_for_as_long_as_there_is_time_is_told_as_busy() -> None:
    """It answers: that the time does not suffice for another attempt is no silence."""

    async def busy(_: web.Request) -> web.Response:
        return web.Response(status=500, text="no worker is free")

    with server(busy, busy, busy) as s:
        (error,) = pay("judge", task(), "abc", url=s.url, model="m", timeout_s=0.9)
        assert len(s.asked) == 1
    assert "answered 500 Internal Server Error: no worker is free" in error


@pytest.mark.parametrize("status", [301, 308])
def test_a_judge_that_points_elsewhere_is_not_followed(status: int) -> None:
    """The question went on to another host, or as a GET without it."""

    async def moved(_: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": f"{other.url}/chat/completions"})

    with server() as other, server(moved) as s:
        (error,) = pay("judge", task(), "abc", url=s.url, model="m")
        assert not other.asked
    assert f"answered {status}" in error
    assert f"points to {other.url}/chat/completions, which is not followed" in error


def test_a_judge_is_asked_through_the_proxy_of_the_environment_and_never_with_netrc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key beside an entry of ~/.netrc for its host failed; without one, the password of that entry was sent."""
    netrc = tmp_path / "netrc"
    netrc.write_text("default login me password secret-of-netrc\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    heard: list[tuple[str, str | None]] = []

    async def rates(request: web.Request) -> web.Response:
        heard.append((request.host, request.headers.get("Authorization")))
        return web.json_response({"choices": [{"message": {"content": "Rating: 10"}}]})

    def judged(url: str, **arguments: Any) -> dict[str, float]:
        return asyncio.run(module.judge("abc", task(), url=url, model="m", **arguments))

    with server(*[rates] * 4) as s:
        assert judged(s.url, api_key="k-1234567890") == judged(s.url) == {"score": 1.0}
        assert [sent for _, sent in heard] == ["Bearer k-1234567890", None]
        monkeypatch.setenv("http_proxy", s.url.removesuffix("/v1"))
        assert judged("http://judge.invalid/v1") == {"score": 1.0}
        assert heard[-1][0] == "judge.invalid"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert judged(s.url) == {"score": 1.0}
        assert heard[-1][0].startswith("127.0.0.1:")


@pytest.mark.parametrize("url", ["http://[/v1", "http://me:pw@127.0.0.1:1/v1"])
def test_an_address_that_cannot_be_asked_is_named(url: str) -> None:
    with pytest.raises(ConnectionError, match="cannot reach the judge at http"):
        asyncio.run(module.judge("abc", task(), url=url, model="m", api_key="k-1234567890"))


def test_an_answer_that_was_cut_is_not_read() -> None:
    """The end of "Rating: 10" was lost, and the best reply had the worst score."""

    def cut(said: str) -> Json:
        return {"choices": [{"message": {"content": said}, "finish_reason": "length"}]}

    with server(*[cut("Rating: 1")] * 2, cut("[0.2, 0.4], or rather")) as s:
        (error,) = pay("judge", task(), "abc", url=s.url, model="m", max_tokens=7)
        assert "the judge's answer was cut at its limit of tokens, max_tokens=7" in error
        found = asyncio.run(module.judge("abc", task(), url=s.url, model="m", unread=0.25))
        assert found == {"score": 0.25, "read": 0.0}
        assert "was cut" in pay("ruler", task(), "a", "b", url=s.url, model="m")[0]


async def hangs(request: web.Request) -> web.Response:
    """No answer as long as somebody waits for it."""
    while request.transport is not None:
        await asyncio.sleep(0.05)
    return web.Response()


async def drips(request: web.Request) -> web.StreamResponse:
    """An answer that has no end: each of its pieces comes in time."""
    made = web.StreamResponse()
    await made.prepare(request)
    with suppress(ConnectionError):
        while True:
            await made.write(b" ")
            await asyncio.sleep(0.05)
    return made


def test_a_run_goes_on_beside_a_judge_that_does_not_answer(tmp_path: Path) -> None:
    """Three replies are unscored, with the reason; the others are judged."""
    with server(hangs, drips, hangs) as s:
        arguments = {"url": s.url, "model": "m", "timeout_s": 3, "unread": 0.0}
        changed = {
            "rewards": {"r": {"function": "judge", "arguments": arguments}},
            "rollout": {**RUN["rollout"], "group_size": 4},
            "train": {**RUN["train"], "steps": 2},
        }
        train(**RUN | changed, run_dir=str(tmp_path / "run"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert [row.get("ledger/failed/reward_r_rollouts", 0) for row in rows] == [3, 0]
    every = whet.load_run(tmp_path / "run").rollouts(1).to_pylist()
    unscored = [row for row in every if row["reward"] is None]
    assert len(unscored) == 3
    assert all("has not answered within 3 s" in row["error"] for row in unscored)


def test_the_key_of_a_server_is_never_told() -> None:
    async def tells(request: web.Request) -> web.Response:
        return web.Response(status=403, text=f"you sent {request.headers['Authorization']}")

    with server(tells) as s:
        (error,) = pay("judge", task(), "abc", url=s.url, model="m", api_key="hunter2-hunter2")
    assert "answered 403" in error
    assert "hunter2" not in error


def test_what_is_wrong_is_said_before_the_run() -> None:
    def refused(function: str, timeout_s: float = 61.0, **arguments: Any) -> str:
        with pytest.raises(ConfigError) as e:
            run([], {"r": RewardConfig(function=function, arguments=arguments)}, timeout_s=timeout_s)
        return str(e.value)

    assert "needs a value for url, model" in refused("judge")
    assert "did you mean 'rubric'" in refused("ruler", url="http://x", model="m", rubrik="?")
    assert "may take 61 s" in refused("judge", timeout_s=10.0, url="http://x", model="m")
    assert "'x:80': expected an address such as http://host:8000" in refused("judge", url="x:80", model="m")
    both = refused("ruler", url="http://me:hidden-pw@x", model="m", api_key="k-1234567890")
    assert "a user name, and there is a token" in both
    assert "hidden-pw" not in both


# ---------------------------------------------------------------- a model of the run


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model with random weights."""
    path = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = build("chars", 400, ["".join(map(chr, range(32, 127))) + "\n"])
    tokenizer.chat_template = CHAT
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def judged(groups: list[Group], reward: dict[str, Any]) -> list[Group]:
    cfg = load(None, [], {"machine": {"device": "cpu"}, "rewards": {"r": reward}, **BASE}).config
    with RewardSet.from_config(cfg.rewards, RewardWorkersConfig(), open_judge=judges_of(cfg)) as made:
        return asyncio.run(score(groups, made))


BASE: dict[str, Any] = {
    "model": {"scratch": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}},
    "tokenizer": {"build": "chars"},
    "data": {"train": [{"path": "tests/data/words.jsonl"}], "max_prompt_tokens": 8},
    "rollout": {"group_size": 2, "sampling": {"max_tokens": 4}},
    "train": {"steps": 2, "tasks_per_step": 2},
    "track": {"trackers": ["jsonl"]},
}


@pytest.mark.parametrize("function", ["judge", "ruler"])
def test_a_model_of_the_run_answers_as_transformers_does(
    chat_model: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedily, whatever else it is asked; the questions are those of a server."""
    said: list[str] = []
    read = Asking.scores

    def noted(self: Asking, answer: str, count: int, *, together: bool, cut: bool) -> list[dict[str, float]]:
        said.append(answer)
        assert cut, "this model ends no answer"
        return read(self, answer, count, together=together, cut=cut)

    monkeypatch.setattr(Asking, "scores", noted)
    groups = [group(task("4"), "a", "b + c"), group(Task(uid=5, source="t", prompt="Why?"), "no", "yes")]
    arguments = {"max_tokens": 24, "unread": 0.25}
    found = judged(groups, {"function": function, "arguments": arguments, "model": {"path": str(chat_model)}})
    together = function == "ruler"
    how = asking(together, arguments)
    asked = [
        how.messages(g.task, texts, together=together)
        for g in groups
        for texts in ([[r.text for r in g.rollouts]] if together else [[r.text] for r in g.rollouts])
    ]
    tokenizer = load_tokenizer(TokenizerConfig(path=str(chat_model)), model_path=None)
    model = AutoModelForCausalLM.from_pretrained(chat_model)
    expected = []
    for messages in asked:
        text = "".join(f"<{m.role}>{m.content}" for m in messages) + ">"
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        out = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        expected.append(tokenizer.decode(out, skip_special_tokens=True))
    assert sorted(said) == sorted(expected)
    rewards = [(r.reward, r.reward_parts) for g in found for r in g.rollouts]
    assert rewards == [(0.25, {"r": 0.25, "r/read": 0.0})] * 4


def test_what_a_model_cannot_be_asked(chat_model: Path, tmp_path: Path) -> None:
    reward = {
        "function": "judge",
        "arguments": {"max_tokens": 8},
        "model": {"path": str(chat_model), "max_tokens": 40},
    }
    (found,) = judged([group(task(), "a")], reward)
    assert "question has" in str(found.rollouts[0].error)
    assert "no room for an answer in 40" in str(found.rollouts[0].error)
    (odd,) = judged(
        [group(task(extra={"rubric": {"a": 1}}), "a")], {**reward, "model": {"path": str(chat_model)}}
    )
    assert "the rubric is dict, expected text or a list" in str(odd.rollouts[0].error)
    with pytest.raises(ConfigError, match=r"rewards\.r\.model: max_tokens=2000: .* has 1024 positions"):
        judged([group(task(), "a")], {**reward, "model": {"path": str(chat_model), "max_tokens": 2000}})
    empty = {"r": {**reward, "model": {"path": str(tmp_path)}}}
    (tmp_path / "adapter_config.json").write_text("{}")
    said = "holds no config.json; it has adapters alone: merge them, or name them in model.lora.path"
    with pytest.raises(ConfigError, match=rf"rewards\.r\.model\.path: {tmp_path} {said}"):
        plans(load(None, [], {**BASE, "rewards": empty}))
    with pytest.raises(
        ConfigError, match=r"rewards\.r\.arguments: no argument 'rubrik'; did you mean 'rubric'"
    ):
        judged([], {**reward, "arguments": {"rubrik": "x"}})


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ({"function": "judge"}, r"rewards\.r: function=judge needs a model to ask"),
        ({"function": "judge", "arguments": {"url": "http://x"}}, "needs a model to ask"),
        (
            {"function": "ruler", "arguments": {"url": "http://x", "model": "m"}, "model": {"path": "p"}},
            r"rewards\.r\.arguments\.url: names a server, but model\.path is given",
        ),
        (
            {"function": "ruler", "model": {"path": "p", "input": "tokens"}},
            r"model\.input: .* input=text alone",
        ),
    ],
)
def test_configs_that_are_refused(reward: dict[str, Any], words: str) -> None:
    loaded = load(None, [], {**BASE, "rewards": {"r": reward}})
    with pytest.raises(ConfigError, match=words):
        plans(loaded)


def test_a_run_with_a_judge(chat_model: Path, tmp_path: Path) -> None:
    """Every rollout has the judge's parts; its memory is in the plan."""
    reward = {
        "function": "ruler",
        "arguments": {"unread": 0.5, "max_tokens": 16},
        "model": {"path": str(chat_model)},
    }
    config = {**BASE, "rewards": {"r": reward}, "run_dir": str(tmp_path / "run")}
    (plan,) = plans(load(None, [], config))
    pages = 4 * 1024 // 16
    assert plan.reward_models["reward model r"] > pages * 16 * 2 * 2 * 16 * 4
    train(**config)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["reward/part/r/read_mean"] for row in rows] == [0.0, 0.0]
