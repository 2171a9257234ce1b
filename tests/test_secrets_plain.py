"""What only looks like a secret stays as it is, and what earlier releases masked changes no run that resumes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from whet import secrets
from whet.config.resuming import changes, fingerprint
from whet.config.schema import Config
from whet.config.secrets import dump, for_people, learn, left_out
from whet.types import Json

PLAIN: dict[str, Any] = {
    "numbers of tokens in a URL": "http://judge:8000/v1?max_tokens=4096&token_limit=131072&n_tokens=12345678",
    "token that ends a reply, in a URL": "http://judge:8000/v1?stop_token=%3C%2Fs%3E",
    "columns in a URL": "https://data/x?primary_key=uid&sort_key=name_2024&keyword=math&key=question",
    "names that contain one": "https://site/x?monkey=capuchin1&keyboard=qwertz105&author=Jones2024",
    "no value": "hf://datasets/openai/gsm8k?token=none",
    "tables as JSON": '{"max_tokens": 40960000, "eos_token": "<|im_end|>", "pad_token": "PAD_151643"}',
    "numbers of tokens": "max_tokens: 16384000 max_tokens=1_000_000 --max-num-batched-tokens 13107200",
    "special tokens": ["--eos-token", "<|endoftext2|>", "--pad-token", "PAD_151643", "--eos-token-id", "15164300"],
    "files": ["--token-file", "/data/token/x1/tokens_2024.bin", "--ssl-key-file=/etc/ssl/server1.pem"],
    "columns": "select * from t where primary_key=order_id_2024 order by sort_key=question_2024",
    "words": "Basic arithmetic1: basic grade-8-maths, the bearer of-2024-bonds; author: Smith2024x",
    "settings": {
        "pass_rate": 0.5, "pass_k": 8, "password_length": 8, "pass_threshold": "0.25", "maxTokens": "16384000",
        "tokens_path": "/data/tokens/x1.bin", "sortKey": "question_2024", "image_token_name": "image_token_0001",
        "auth": "none", "auth_type": "basic", "api_key_env": "OPENAI_API_KEY_2", "keywords": ["a12345678"],
        "token_budget": "16384000", "reward_fn_key": "data_source_2", "private_key_path": "/etc/x",
        "tokenizer": "org/model-2024",
    },
}  # fmt: skip


def reward(arguments: Any) -> dict[str, Json]:
    return {"rewards": {"a": {"function": "mine:reward", "arguments": arguments}}}


@pytest.mark.parametrize("how", PLAIN)
def test_what_looks_like_a_secret_stays_as_it_is(how: str) -> None:
    """In the config, and everywhere else: what is taken for a secret is struck from every text of the run."""
    tree = reward({"given": PLAIN[how]})
    cfg = Config.model_validate_json(json.dumps(tree))
    before = secrets.known()
    learn(tree)
    assert secrets.known() == before
    assert dump(cfg)["rewards"]["a"]["arguments"]["given"] == PLAIN[how]
    assert for_people(cfg, tree) == tree
    assert left_out(cfg) == []


SECRET: dict[str, Any] = {
    "in a URL": "http://judge/v1?token=ab12&max_tokens=4096",
    "letters alone": "http://judge/v1?access_token=abcdefghij",
    "key of a URL": "http://judge/v1?key=AIza-3c9f0061",
    "camel case": {"accessToken": "abcd0062efgh", "maxTokens": 5},
    "key beside its file": {"private_key": "abcd0063efgh", "private_key_path": "/etc/x"},
    "new token": {"new_access_token": "abcd0064efgh", "INPUT_TOKEN": "abcd0065efgh"},
    "user and password": "curl -H 'Authorization: Basic bWU6YWJjZDAwNjY='",
    "bearer": "the header is Bearer abcd0067efgh",
    "lower case": "authorization=bearer abcd0068efgh-and-more",
}


@pytest.mark.parametrize("how", SECRET)
def test_what_is_one_is_hidden(how: str) -> None:
    """The control: beside what is none."""
    cfg = Config.model_validate_json(json.dumps(reward({"given": SECRET[how]})))
    shown = json.dumps(dump(cfg))
    for secret in ("ab12", "abcdefghij", "3c9f00", "abcd00", "bWU6YWJjZDAwNjY="):
        assert secret not in shown
    assert "***" in shown


EARLIER: dict[str, tuple[Json, Json]] = {
    "parameter of a URL": ({"u": "http://j/v1?max_tokens=***&n=1"}, {"u": "http://j/v1?max_tokens=4096&n=1"}),
    "number": ({"pass_rate": "***"}, {"pass_rate": 0.5}),
    "below a table": ({"a": [{"sort_key": "***"}]}, {"a": [{"sort_key": "question_2024"}]}),
    "text": ({"t": "max_tokens=*** and so on"}, {"t": "max_tokens=16384000 and so on"}),
    "plain then, masked now": ({"c": ["--api-key", "sk-12345678"]}, {"c": ["--api-key", "sk-00345678"]}),
    "known to the other process": ({"a": {"t": "it is <redacted:X_TOKEN>"}}, {"a": {"t": "it is abcd0069"}}),
}
"""Arguments as a checkpoint has them, and as they are given now."""


@pytest.mark.parametrize("how", EARLIER)
def test_a_run_resumes_from_a_checkpoint_that_hid_more_or_less(how: str) -> None:
    old, new = (reward(each) for each in EARLIER[how])
    assert changes(old, fingerprint(Config.model_validate_json(json.dumps(new)))) == []


OTHERS: dict[str, tuple[Json, Json]] = {
    "beside what was hidden": (
        {"u": "http://j/v1?max_tokens=***&n=1"},
        {"u": "http://j/v1?max_tokens=4096&n=2"},
    ),
    "plain then and now": ({"u": "http://j/v1?max_tokens=2048"}, {"u": "http://j/v1?max_tokens=4096"}),
    "asterisks of a text": ({"t": "a *** b"}, {"t": "a word b"}),
    "one less": ({"sort_key": "***", "n": 1}, {"sort_key": "question_2024"}),
    "of another kind": ({"sort_key": "***"}, {"sort_key": ["question_2024"]}),
    "after the gap": ({"t": "<redacted:X> a"}, {"t": "abcd0070 b"}),
}


@pytest.mark.parametrize("how", OTHERS)
def test_another_setting_is_a_change(how: str) -> None:
    old, new = (reward(each) for each in OTHERS[how])
    assert [c.key for c in changes(old, fingerprint(Config.model_validate_json(json.dumps(new))))] == [
        "rewards.a.arguments"
    ]


def test_a_variable_that_earlier_releases_hid_is_no_change() -> None:
    def tree(limit: str) -> dict[str, Json]:
        mcp = {"command": ["server"], "env": {"TOKEN_LIMIT": limit}}
        return {"rollout": {"env": {"make": "tools", "arguments": {"mcp": mcp}}}}

    assert changes(tree("***"), fingerprint(Config.model_validate(tree("4096")))) == []


def test_a_mask_of_an_earlier_release_starts_no_run() -> None:
    """A config.yaml in which it stands for a value that is needed."""
    given = {"u": "http://j/v1?max_tokens=***", "t": "max_tokens=***", "sort_key": "***"}
    assert len(left_out(Config.model_validate_json(json.dumps(reward(given))))) == 3
