"""No secret that a run is given stands in what it leaves behind or prints, whoever says it."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import json
import os
import pickle
import re
import shutil
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from matplotlib.image import imsave

from codecs_numbers import Numbers
from recorded import edit
from searching import files, needles, seen
from tiny import tiny_model
from whet import cli, secrets
from whet.buffer.stores import Scored, open_store
from whet.cluster import engines
from whet.config.load import load
from whet.config.plan import plans
from whet.config.resuming import changes, fingerprint
from whet.config.schema import Config
from whet.config.secrets import by_environment, dump, for_people, learn, left_out
from whet.data.tokenizer import build
from whet.types import ConfigError, Message, Sampling, Task, WhetError

ROOT = Path(__file__).parents[1]
MINE = "tests/secretive.py"

PLANTED = {
    "reward_workers.env": "sk-judge/one+0001",
    "reward_workers.env of a plain name": "https://hooks.example/T0001/B0002",
    "argument by oc.env": "ref-3c9f0003",
    "argument by oc.env of a plain key": "hdr-3c9f0004",
    "plain api_key": 'pl"ain 0005 kéy',
    "userinfo of a URL": "user-pw-0006",
    "token in the place of a user": "ghp_abcdefgh000007",
    "parameter of a URL": "q-3c9f0008",
    "password in buffer.url": "dbpw-0009",
    "sslpassword in buffer.url": "sslpw-0010",
    "header": "bearer-3c9f0011",
    "list of keys": "list-3c9f0012",
    "below credentials": "deep-3c9f0013",
    "password that is a number": "2026001499",
    "tracker": "http-pw-0015",
    "override": "over-3c9f0016",
    "environment variable printed at import": "imp-3c9f0017",
    "proxy in the environment": "proxy-pw-0018",
    "HF_TOKEN": "hf_3c9f0019abcd",
    "AWS_SECRET_ACCESS_KEY": "aws/3c9f+0020",
    "user's loss": "loss-3c9f0021",
    "encoded by a reward": "enc-3c9f0022/+?",
    "cut in the midst": "cut-3c9f0023-cut-3c9f0023",
}

STORE = f"://me:{PLANTED['password in buffer.url']}@127.0.0.1:1/db?sslpassword={PLANTED['sslpassword in buffer.url']}"

VARIABLES = {
    "JUDGE_KEY": PLANTED["reward_workers.env"],
    "MY_TOKEN": PLANTED["argument by oc.env"],
    "HEADER_TOKEN": PLANTED["argument by oc.env of a plain key"],
    "SAID_AT_IMPORT_TOKEN": PLANTED["environment variable printed at import"],
    "EXAMPLE_PROXY": f"http://me:{PLANTED['proxy in the environment']}@proxy:3128",
    "HF_TOKEN": PLANTED["HF_TOKEN"],
    "AWS_SECRET_ACCESS_KEY": PLANTED["AWS_SECRET_ACCESS_KEY"],
    "LOSS_TOKEN": PLANTED["user's loss"],
}


def config(run_dir: Path, **over: Any) -> dict[str, Any]:
    quoting = f"{MINE}:quoting"
    return {
        "run_dir": str(run_dir),
        "model": {
            "scratch": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 32,
                "max_position_embeddings": 32,
            }
        },
        "tokenizer": {"build": "chars"},
        "imports": [MINE],
        "data": {
            "max_prompt_tokens": 8,
            "exclude_eval": False,
            "train": [
                {"path": "tests/data/words.jsonl", "name": "told"},
                {"path": "tests/data/words.jsonl", "name": "refused"},
            ],
            "eval": [{"path": "tests/data/words.jsonl", "limit": 2}],
        },
        "rewards": {
            "telling": {"function": f"{MINE}:telling"},
            "judging": {"function": f"{MINE}:judging", "weight": 0.0},
            "quoting": {
                "function": quoting,
                "arguments": {
                    "api_key": "${oc.env:MY_TOKEN}",
                    "header": "Bearer ${oc.env:HEADER_TOKEN}",
                    "url": f"https://me:{PLANTED['userinfo of a URL']}@judge/v1?q=1",
                },
            },
            "plain": {
                "function": quoting,
                "arguments": {
                    "api_key": PLANTED["plain api_key"],
                    "url": f"https://{PLANTED['token in the place of a user']}@judge/v1",
                    "hook": f"https://judge/v1?access_token={PLANTED['parameter of a URL']}&x=1",
                    "headers": {"Authorization": f"Bearer {PLANTED['header']}"},
                },
            },
            "deep": {
                "function": quoting,
                "arguments": {
                    "api_keys": [PLANTED["list of keys"]],
                    "credentials": {"who": "somebody", "what": PLANTED["below credentials"]},
                    "password": int(PLANTED["password that is a number"]),
                },
            },
            "over": {"function": quoting, "arguments": {}},
            "encoding": {
                "function": f"{MINE}:encoding",
                "arguments": {"api_key": PLANTED["encoded by a reward"]},
            },
            "cutting": {"function": f"{MINE}:cutting", "arguments": {"api_key": PLANTED["cut in the midst"]}},
        },
        "reward_workers": {
            "env": {
                "JUDGE_KEY": "${oc.env:JUDGE_KEY}",
                "PLAIN": PLANTED["reward_workers.env of a plain name"],
            },
            "max_failure_rate": 1.0,
        },
        "rollout": {"group_size": 2, "sampling": {"max_tokens": 4}},
        "train": {"steps": 2, "tasks_per_step": 4, "optimizer": {"lr": 1e-2}},
        "eval": {"interval": 1, "log_samples": 2},
        "checkpoint": {"interval": 1},
        "machine": {"threads": 1},
        "track": {
            "trackers": ["console", "jsonl", "tensorboard"],
            "log_level": "debug",
            "batches_interval": 1,
            "dump": {"rollouts": f"{run_dir}/dumped/{{stage}}-{{step}}.parquet"},
        },
    } | over


Whet = Callable[..., int]


@pytest.fixture
def whet(monkeypatch: pytest.MonkeyPatch) -> Whet:
    """`whet(...)`: the command line in this process, with the variables that hold secrets. Returns the exit code."""
    monkeypatch.chdir(ROOT)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["whet", *arguments])
            patch.setattr(sys, "stdout", sys.stdout)
            patch.setattr(sys, "stderr", sys.stderr)
            try:
                cli.main()
            except SystemExit as end:
                code = int(end.code or 0)
            except Exception:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                code = 1
            assert PLANTED["override"] not in str(sys.argv), "trackers write it down"
        return code

    return run


def write(path: Path, tree: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(tree, allow_unicode=True))
    return str(path)


OVERRIDE = f"rewards.over.arguments.api_key={PLANTED['override']}"


@pytest.fixture
def half(tmp_path: Path) -> dict[str, Any]:
    """A config whose rewards judge one source each, so that a step has both scored and refused rollouts."""
    tree = config(tmp_path / "run")
    others = [name for name in tree["rewards"] if name != "telling"]
    told, refused = tree["data"]["train"]
    tree["data"]["train"] = [told | {"rewards": ["telling"]}, refused | {"rewards": others}]
    return tree


def test_no_secret_stands_in_what_a_run_leaves_or_prints(
    whet: Whet, half: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = write(tmp_path / "given.yaml", half)
    assert whet("train", given, OVERRIDE) == 0, capfd.readouterr()
    for arguments in (("show", str(tmp_path / "run")), ("show", str(tmp_path / "run"), "--step", "1")):
        assert whet(*arguments) == 0
    printed = capfd.readouterr()
    places = files(tmp_path / "run") | {"stdout": printed.out.encode(), "stderr": printed.err.encode()}
    kinds = {Path(place).suffix for place in places}
    assert kinds >= {".yaml", ".json", ".jsonl", ".parquet", ".log", ".png", ".safetensors"}
    assert any(b"<redacted:" in data for name, data in places.items() if name not in ("stdout", "stderr"))
    assert "imported with <redacted:SAID_AT_IMPORT_TOKEN>" in printed.out
    assert "imported with <redacted:SAID_AT_IMPORT_TOKEN>" in printed.err
    assert seen(places, PLANTED) == [], f"{len(places)} places"


def test_no_secret_stands_in_what_the_commands_about_a_run_print(
    whet: Whet,
    half: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that keeps references alone, so that they can go on from it, and one whose record says a secret."""
    monkeypatch.setenv("PLAIN", PLANTED["reward_workers.env of a plain name"])
    monkeypatch.setenv("CODED", PLANTED["encoded by a reward"])
    monkeypatch.setenv("CUT", PLANTED["cut in the midst"])
    rewards = half["rewards"]
    for name in ("plain", "deep", "over"):
        del rewards[name]
    half["data"]["train"][1]["rewards"] = [name for name in rewards if name != "telling"]
    del rewards["quoting"]["arguments"]["url"]
    rewards["encoding"]["arguments"]["api_key"] = "${oc.env:CODED}"
    rewards["cutting"]["arguments"]["api_key"] = "${oc.env:CUT}"
    half["reward_workers"]["env"]["PLAIN"] = "${oc.env:PLAIN}"
    given, run, other, out = (tmp_path / name for name in ("given.yaml", "run", "other", "out"))
    assert whet("train", write(given, half)) == 0, capfd.readouterr()
    shutil.copytree(run, other)
    for step in (1, 2):
        file = other / f"rollouts/main-step-{step:06d}.parquet"
        edit(file, 0, "text", None, lambda text: text + VARIABLES["HF_TOKEN"])
    out.mkdir()
    capfd.readouterr()
    said: dict[str, str] = {}
    commands: list[tuple[Any, ...]] = [
        ("diff", run, other),
        ("replay", run, "--step", 2),
        ("replay", other, "--step", 2, "--rollout", 0),
        ("generate", given, "-o", out / "of_a_config.jsonl"),
        ("generate", run, "-o", out / "of_a_run.jsonl"),
        ("doctor",),
    ]
    for command in commands:
        code = whet(*map(str, command))
        printed = capfd.readouterr()
        said[str(command)] = printed.out + printed.err
        assert code == (other in command), printed
    assert sum("<redacted:HF_TOKEN>" in text for text in said.values()) == 2, "what the two records differ in"
    assert len([*out.glob("*.jsonl")]) == 2
    places = files(out) | files(run) | {name: text.encode() for name, text in said.items()}
    assert seen(places, PLANTED) == []


@pytest.mark.parametrize("how", ["loss", "rows", "data path", "override", "type", "yaml", "check", "store"])
def test_no_secret_stands_in_the_words_of_a_run_that_fails(
    how: str, whet: Whet, half: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    half["rewards"] = {"format": {"function": "format", "arguments": {"pattern": "a"}}}
    half["data"]["train"] = [{"path": "tests/data/words.jsonl"}]
    key = PLANTED["plain api_key"]
    overrides = []
    if how == "loss":
        half["algorithm"] = {"loss": f"{MINE}:loss", "dynamic_sampling": False}
    elif how == "rows":
        half["data"]["train"] = [{"function": f"{MINE}:rows", "arguments": {"api_key": key}}]
    elif how == "data path":
        half["data"]["train"] = [{"path": f"s3://AKID:{PLANTED['userinfo of a URL']}@pail/x"}]
    elif how == "override":
        overrides = [f"rewards.none.of.these.api_key={PLANTED['override']}", OVERRIDE + "]"]
    elif how == "type":
        half["reward_workers"]["env"] = [{"api_key": key + "x" * 60}]
    elif how == "check":
        half["mode"], half["buffer"] = "train", {"url": f"oracle{STORE}"}
    elif how == "store":
        half["mode"], half["buffer"] = "train", {"url": f"postgresql{STORE}"}
    given = write(tmp_path / "given.yaml", half)
    if how == "yaml":
        Path(given).write_text(f"rewards: {{a: {{arguments: {{api_key: {PLANTED['override']}\n x: [")
    assert whet("train", given, *overrides) in (1, 2)
    printed = capfd.readouterr()
    assert "whet: " in printed.err or "Error" in printed.err
    run = files(tmp_path / "run") if (tmp_path / "run").exists() else {}
    places = run | {"stdout": printed.out.encode(), "stderr": printed.err.encode()}
    assert seen(places, PLANTED) == [], printed.err


@pytest.mark.parametrize("value", [84736251, 8473625.1, ["8473-6251"], {"a": ["8473-6251"]}], ids=str)
def test_a_variable_of_the_wrong_kind_is_refused_without_its_value(
    value: Any, whet: Whet, half: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A password of digits, and a token in a list."""
    half["reward_workers"]["env"] = {"DB_PASSWORD": value}
    assert whet("plan", write(tmp_path / "given.yaml", half)) == 2
    printed = capfd.readouterr()
    assert "reward_workers.env.DB_PASSWORD" in printed.err
    assert "8473" not in printed.err + printed.out


def test_a_run_goes_on_with_another_key_and_not_with_another_setting(
    whet: Whet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)

    def printed(tree: Any = None, **variables: str) -> Any:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            return fingerprint(load(None, [OVERRIDE], tree or config(tmp_path)).config)

    saved = json.loads(json.dumps(secrets.redact_tree(printed())))
    assert seen({"state": json.dumps(saved).encode()}, PLANTED) == []
    assert changes(saved, printed()) == []
    assert changes(saved, printed(MY_TOKEN="another-3c9f", HEADER_TOKEN="another-3c9e")) == []
    other = config(tmp_path) | {"seed": 5}
    other["rewards"]["quoting"]["arguments"]["more"] = 1
    assert sorted(c.key for c in changes(saved, printed(other))) == ["rewards.quoting.arguments", "seed"]


def test_a_config_keeps_its_references_and_can_be_read_again(
    whet: Whet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    loaded = load(None, [OVERRIDE], config(tmp_path))
    text = yaml.safe_dump(for_people(loaded.config, loaded.written), allow_unicode=True)
    assert seen({"config.yaml": text.encode()}, PLANTED) == []
    again = yaml.safe_load(text)
    assert again["reward_workers"]["env"]["JUDGE_KEY"] == "${oc.env:JUDGE_KEY}"
    assert again["rewards"]["quoting"]["arguments"]["api_key"] == "${oc.env:MY_TOKEN}"
    assert again["rewards"]["quoting"]["arguments"]["header"] == "Bearer ${oc.env:HEADER_TOKEN}"
    assert again["rewards"]["deep"]["arguments"]["credentials"] == {"who": "***", "what": "***"}
    with pytest.raises(ConfigError) as caught:
        plans(load(None, (), again))
    for key in (
        "rewards.over.arguments.api_key",
        "rewards.deep.arguments.password",
        "reward_workers.env.PLAIN",
    ):
        assert key in str(caught.value), "what was left out is not given to a reward as it stands"
    assert "rewards.quoting.arguments.api_key" not in str(caught.value)


BESIDE = {
    "token of servers": "tok-3c9f0030",
    "variable of servers": "srv-3c9f0031",
    "option of servers": "opt-3c9f0032",
    "password in an address of servers": "url-3c9f0033",
    "variable of an MCP server": "mcp-3c9f0034",
    "variable of an MCP server of a plain name": "https://hooks.example/3c9f0035",
    "argument of an environment": "env-3c9f0036",
    "option that is a table": "tab-3c9f0037",
}
"""What processes beside a run are given: inference servers, tools."""


def beside(mcp: Any) -> dict[str, Any]:
    server = {
        "token": BESIDE["token of servers"],
        "urls": [f"http://me:{BESIDE['password in an address of servers']}@127.0.0.1:8000"],
        "env": {"HF_TOKEN": BESIDE["variable of servers"], "VLLM_LOGGING_LEVEL": "DEBUG_MORE"},
        "options": {
            "api-key": BESIDE["option of servers"],
            "hf-overrides": {"auth": BESIDE["option that is a table"]},
            "max-num-batched-tokens": 4096,
        },
    }
    arguments = {
        "functions": ["examples/tools.py:f"],
        "api_key": BESIDE["argument of an environment"],
        "mcp": mcp,
    }
    return {"rollout": {"engine": "vllm", "server": server, "env": {"make": "tools", "arguments": arguments}}}


@pytest.mark.parametrize("listed", [False, True])
def test_what_servers_and_tools_are_given_is_known_and_written_nowhere(listed: bool) -> None:
    env = {
        "GITHUB_TOKEN": BESIDE["variable of an MCP server"],
        "PLACE": BESIDE["variable of an MCP server of a plain name"],
    }
    mcp: dict[str, Any] = {"command": ["server"], "env": env}
    tree = beside([mcp] if listed else mcp)
    cfg = Config.model_validate_json(json.dumps(tree))
    learn(tree)
    written: dict[str, Any] = {
        "dump": dump(cfg),
        "config.yaml": for_people(cfg, tree),
        "file": by_environment(tree)[0],
        "checkpoint": fingerprint(cfg),
    }
    places = {name: json.dumps(each).encode() for name, each in written.items()}
    assert seen(places, BESIDE) == []
    told = [value for value in BESIDE.values() if secrets.redact(f"it is {value}") == f"it is {value}"]
    assert not told
    assert written["dump"]["rollout"]["server"]["env"]["VLLM_LOGGING_LEVEL"] == "DEBUG_MORE"
    assert written["dump"]["rollout"]["server"]["options"]["max-num-batched-tokens"] == 4096
    again = Config.model_validate_json(places["config.yaml"])
    for key in (
        "rollout.server.token",
        "rollout.server.env.HF_TOKEN",
        "rollout.server.options.api-key",
        "PLACE",
    ):
        assert any(key in name for name in left_out(again)), key


def in_a_reward(arguments: Any) -> dict[str, Any]:
    return {"rewards": {"a": {"function": f"{MINE}:quoting", "arguments": arguments}}}


def in_a_command(*words: str) -> dict[str, Any]:
    return {"rollout": {"env": {"make": "tools", "arguments": {"mcp": {"command": ["server", *words]}}}}}


HIDDEN = "sk-3c9f0050-a1b2"
FORMS: dict[str, dict[str, Any]] = {
    "option of a command": in_a_command("--verbose", "--api-key", HIDDEN),
    "option with a sign": in_a_command(f"--token={HIDDEN}"),
    "variable of a command": in_a_command("env", f"GITHUB_TOKEN={HIDDEN}", "node"),
    "command as a text": in_a_reward({"run": f"curl -s --password {HIDDEN} http://judge/v1"}),
    "header in a text": in_a_reward({"run": f"curl -H 'Authorization: Bearer {HIDDEN}' http://judge/v1"}),
    "pair": in_a_reward({"headers": [["Accept", "text/plain"], ["Authorization", f"Bearer {HIDDEN}"]]}),
    "name and value": in_a_reward({"env": [{"name": "API_KEY", "value": HIDDEN}]}),
    "table as JSON": in_a_reward({"options": json.dumps({"api_key": HIDDEN, "n": 1})}),
    "connection string": in_a_reward({"place": f"host=db user=me password={HIDDEN}"}),
    "cookie": in_a_reward({"headers": {"Cookie": f"lang=en; session={HIDDEN}"}}),
    "order of mine": {"data": {"order": {"name": "mine:Order", "api_key": HIDDEN}}},
    "loss of mine": {"algorithm": {"loss": {"name": "mine:loss", "api_key": HIDDEN}}},
    "order of a stage": {
        "stages": [{"name": "s", "data": {"order": {"name": "mine:Order", "api_key": HIDDEN}}}]
    },
}
"""Where a secret stands that has no key of its own."""


@pytest.mark.parametrize("how", FORMS)
def test_a_secret_is_known_by_what_stands_before_it(how: str) -> None:
    tree = FORMS[how]
    cfg = Config.model_validate_json(json.dumps(tree))
    learn(tree)
    assert HIDDEN not in secrets.redact(f"it is {HIDDEN}")
    shown = for_people(cfg, tree)
    assert HIDDEN not in json.dumps([dump(cfg), shown, by_environment(tree)[0], fingerprint(cfg)])
    assert left_out(Config.model_validate_json(json.dumps(shown))), "config.yaml alone starts no run"
    assert HIDDEN in json.dumps(by_environment(tree)[1])


ARGUMENTS: list[Any] = [
    {"system": "Give the key: value pairs, and the password: it is a word. Token: one at a time."},
    {"pattern": r"answer=(\d{8,})", "stop": ["</answer>", "--"], "columns": ["token", "final_answer"]},
    {"command": ["server", "--max-tokens", "4096", "--tokenizer", "gpt2-large-v2", "--key-column=question"]},
    {"fields": ["password", "username"], "body": {"name": "temperature", "value": "0.123456789"}},
    {"curl": "curl --retry 3 --key-type rsa http://judge:8000/v1?n=4096"},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_what_is_no_secret_stays_as_it_is(arguments: Any) -> None:
    cfg = Config.model_validate_json(json.dumps(in_a_reward(arguments)))
    assert dump(cfg)["rewards"]["a"]["arguments"] == arguments
    assert left_out(cfg) == []


def test_settings_of_what_is_built_in_are_none() -> None:
    """Words such as token are their own."""
    loss = {"name": "reinforce_is", "weight_over": "sequence", "token_name": "sequence_of_1"}
    cfg = Config.model_validate_json(json.dumps({"algorithm": {"loss": loss}}))
    assert dump(cfg)["algorithm"]["loss"] == loss


def test_a_file_for_another_process_refers_to_its_environment() -> None:
    tree: dict[str, Any] = {
        "reward_workers": {"env": {"JUDGE_KEY": "sk-3c9f0001", "PLACE": "here"}},
        "rewards": {"a": {"arguments": {"api_key": "sk-3c9f0002", "url": "https://u:pw-0003@h/x", "n": 1}}},
    }
    lent, variables = by_environment(tree)
    assert "3c9f" not in json.dumps(lent)
    assert "pw-0003" not in json.dumps(lent)
    assert lent["rewards"]["a"]["arguments"]["n"] == 1
    assert set(variables.values()) == {"sk-3c9f0001", "here", "sk-3c9f0002", "https://u:pw-0003@h/x"}
    assert tree["reward_workers"]["env"]["JUDGE_KEY"] == "sk-3c9f0001", "the tree stays as it was"


def test_an_environments_exception_and_its_group_in_a_store(tmp_path: Path) -> None:
    from whet.rollout.episode import play_groups
    from whet.rollout.scripted import ScriptedEngine

    learn({"reward_workers": {"env": {"JUDGE_KEY": PLANTED["reward_workers.env"]}}})

    class Broken:
        async def first(self) -> list[Message]:
            raise RuntimeError(f"no entry with {PLANTED['reward_workers.env']}")

        async def step(self, message: Message) -> Any:
            raise NotImplementedError

        async def close(self) -> None:
            pass

    task = Task(uid=0, source="s", prompt="a", token_ids=(1, 2), answer="b")
    played = play_groups(
        ScriptedEngine(lambda *_: []), [task], group_size=1, sampling=Sampling(max_tokens=4), seed=0, purpose="t",
        decode=str, end_token_ids=[0], timeout_s=5.0, make_env=lambda task, world: Broken(),
        codec=Numbers(),
    )  # fmt: skip
    (group,) = asyncio.run(played)
    error = group.rollouts[0].error
    assert error is not None
    assert error.startswith("RuntimeError: no entry with <redacted:reward_workers.env.JUDGE_KEY> (")
    for kind in ("sqlite", "files"):
        store = open_store(f"{kind}:///{tmp_path}/{kind}", queue="q", order="arrival")
        (place,) = store.reserve("e", 1, capacity=4, rollouts=1, lease_s=60.0)
        store.put([Scored(place, group)])
    places = files(tmp_path)
    assert any(b"redacted" in data for data in places.values())
    assert seen(places, PLANTED) == []


TRACKERS = {"wandb": "Wandb", "swanlab": "SwanLab", "trackio": "Trackio", "mlflow": "Mlflow"}


@pytest.mark.parametrize("redacted", [True, False])
@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_is_sent_no_secret(
    name: str, redacted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A double of the package notes all that it is told; it is told secrets where nothing strikes them."""
    from whet.track import remote
    from whet.track.record import RunDirectory
    from whet.track.sinks import Sinks

    for variable, value in VARIABLES.items():
        monkeypatch.setenv(variable, value)
    package = MagicMock()
    package.MlflowClient.return_value.search_runs.return_value = []
    monkeypatch.setitem(sys.modules, name, package)
    tree = config(tmp_path, buffer={"url": f"postgresql{STORE}"})
    tree["track"]["arguments"] = {"mlflow": {"tracking_uri": f"http://me:{PLANTED['tracker']}@tracker/api"}}
    cfg = load(None, [OVERRIDE], tree).config
    if not redacted:
        monkeypatch.setattr(remote, "dump", lambda cfg: cfg.model_dump(mode="json"))
        monkeypatch.setattr(remote, "redact_tree", lambda tree: tree)
    record = RunDirectory(tmp_path, ["main"])
    getattr(remote, TRACKERS[name])(Sinks(cfg, record, None))
    record.close()
    told = json.dumps([(call.args, call.kwargs) for call in package.mock_calls], default=str)
    assert "hidden_size" in told
    assert bool(seen({"told": told.encode()}, PLANTED)) is not redacted
    assert ("***" in told) is redacted


def test_a_rank_prints_none_of_the_drivers_secrets(capfd: pytest.CaptureFixture[str]) -> None:
    from secretive import printing
    from test_train_torch import CUT, weighted
    from tiny import tiny_model
    from whet.config.schema import OptimizerConfig
    from whet.models.mesh import Dims
    from whet.training.ranks import RankGroup, Ranks

    os.environ["LOSS_TOKEN"] = PLANTED["user's loss"]
    secrets.learn("rewards.a.arguments.api_key", "sk-of-the-config-1234")
    try:
        ranks = Ranks(Dims(dp_replicate=1), timeout_s=60.0)
        sgd = OptimizerConfig(name="sgd", lr=0.02)
        many = RankGroup(ranks, "policy", tiny_model(), cut=CUT, optimizer=sgd, total_steps=4)
        with pytest.raises(WhetError, match=r"ZeroDivisionError: <redacted:rewards\.a\.arguments\.api_key>"):
            many.update(weighted(), printing)
    finally:
        os.environ.pop("LOSS_TOKEN")
    said = capfd.readouterr().err
    assert "<redacted:LOSS_TOKEN> <redacted:rewards.a.arguments.api_key>" in said
    assert seen({"stderr": said.encode()}, PLANTED | {"known": "sk-of-the-config-1234"}) == []


# ---------------------------------------------------------------- what is a secret


@pytest.mark.parametrize(
    ("url", "hidden"),
    [
        ("postgresql://me:geheim@host/db?x=1", "postgresql://me:***@host/db?x=1"),
        ("https://judge/v1?api_key=abc&n=1#top", "https://judge/v1?api_key=***&n=1#top"),
        ("https://ghp_abcdefgh000007@host/x", "https://***@host/x"),
        ("redis://:p@ss:w@host:1/0", "redis://:***@host:1/0"),
        ("s3://AKIDVERYSECRETID1:a/b+c@pail/x", "s3://***:***@pail/x"),
        ("http://host:8000/mail@b?sslkey=/a", "http://host:8000/mail@b?sslkey=/a"),
        ("https://git@host/x", "https://git@host/x"),
        ("hf://org/name@revision", "hf://org/name@revision"),
    ],
)
def test_secrets_of_urls(url: str, hidden: str) -> None:
    assert secrets.without(url, "***") == hidden


@pytest.mark.parametrize(
    ("name", "value", "is_one"),
    [
        ("api_key", "x", True),
        ("apiKey", "x", True),
        ("Authorization", "Bearer x", True),
        ("token", "hf_abcdefgh", True),
        ("key", "sk-12345678", True),
        ("key", "final_answer", False),
        ("stop_token", "</answer>", False),
        ("tokenizer", "gpt2-large", False),
        ("author", "somebody", False),
        ("max_tokens", "12", False),
    ],
)
def test_arguments_that_are_secrets(name: str, value: str, is_one: bool) -> None:
    assert secrets.holds_secret(name, value) is is_one


@pytest.mark.parametrize(
    ("name", "value"),
    [("RAY_AUTH_MODE", "disabled"), ("GPG_KEY", "12345678"), ("HF_TOKEN", "short1"), ("X", "sk-3c9f0001")],
)
def test_variables_that_are_none(name: str, value: str) -> None:
    secrets.learn_environment({name: value})
    assert secrets.redact(f"it is {value}") == f"it is {value}"


def test_data_is_not_taken_for_settings() -> None:
    rows = [{"prompt": "a", "api_key": "sk-3c9f0001", "url": "https://u:password@h/"}]
    cfg = load(None, (), {"data": {"train": [{"rows": rows}]}, "tokenizer": {"build": "chars"}}).config
    assert dump(cfg)["data"]["train"][0]["rows"] == rows


# ---------------------------------------------------------------- the search itself

NEEDLE = "n33dle/of+the-search"


def _sqlite(text: str, folder: Path) -> bytes:
    with sqlite3.connect(folder / "db") as db:
        db.execute("create table t (a text)")
        db.execute("insert into t values (?)", (text,))
    return (folder / "db").read_bytes()


def _png(text: str, folder: Path) -> bytes:
    imsave(folder / "p.png", [[0.0, 1.0]], metadata={"Description": text})
    return (folder / "p.png").read_bytes()


def _written(write: Callable[[Any], Any]) -> bytes:
    out = io.BytesIO()
    write(out)
    return out.getvalue()


def _zip(text: str, out: Any) -> None:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inner.txt", text)


def _arrow(text: str, out: Any) -> None:
    table = pa.table({"a": [text]})
    with pa.ipc.new_stream(out, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_table(table)


FORMATS: dict[str, Callable[[str, Path], bytes]] = {
    "text": lambda text, folder: text.encode(),
    "jsonl": lambda text, folder: json.dumps({"a": text}).encode(),
    "gz": lambda text, folder: gzip.compress(text.encode()),
    "zip": lambda text, folder: _written(lambda out: _zip(text, out)),
    "parquet": lambda text, folder: _written(
        lambda out: pq.write_table(pa.table({"a": [text]}), out, compression="zstd")
    ),
    "arrow": lambda text, folder: _written(lambda out: _arrow(text, out)),
    "sqlite": _sqlite,
    "png": _png,
}


@pytest.mark.parametrize("kind", FORMATS)
def test_the_search_finds_what_is_planted(kind: str, tmp_path: Path) -> None:
    """The control: whatever the format and the code."""
    for needle in needles(NEEDLE):
        (tmp_path / "db").unlink(missing_ok=True)
        data = FORMATS[kind](f"before {needle.decode()} after", tmp_path)
        assert seen({"file": data}, {"it": NEEDLE}) == [("file", "it")], needle
    (tmp_path / "db").unlink(missing_ok=True)
    assert seen({"file": FORMATS[kind]("nothing", tmp_path)}, {"it": NEEDLE}) == []


def test_every_form_that_the_search_knows_is_struck() -> None:
    secrets.learn("it", NEEDLE)
    for n in range(3):
        code = base64.b64encode(b"x" * n + NEEDLE.encode() + b"y")
        assert seen({"code": code}, {"it": NEEDLE})
        assert "<redacted:it>" in secrets.redact(code.decode())
        assert seen({"code": secrets.redact(code.decode()).encode()}, {"it": NEEDLE}) == []
    for form in (NEEDLE, NEEDLE[::-1], quote(NEEDLE, safe=""), NEEDLE.encode().hex()):
        assert secrets.redact(f"a {form} b") == "a <redacted:it> b"


def test_a_programs_own_traceback_after_a_run_has_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run called from Python prints as long as it runs; what it raises is shown by the interpreter."""
    secrets.learn("it", NEEDLE)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    before = sys.stderr

    def run() -> None:
        with secrets.guarded_output():
            print("within", NEEDLE, file=sys.stderr)
            sys.stderr.buffer.write(f"bytes {NEEDLE}\n".encode())
            raise ZeroDivisionError(NEEDLE)

    with pytest.raises(ZeroDivisionError) as caught:
        run()
    assert sys.stderr is before
    sys.excepthook(caught.type, caught.value, caught.tb)
    said = capsys.readouterr().err
    assert "within <redacted:it>" in said
    assert "bytes <redacted:it>" in said
    assert "ZeroDivisionError: <redacted:it>" in said
    assert NEEDLE not in said


ENGINE = """
import pickle, sys
from whet.cluster import engines
spec = pickle.loads(sys.stdin.buffer.read())
engines.guarded(spec)
print(sys.argv[1])
print(sys.argv[1], file=sys.stderr)
raise RuntimeError(sys.argv[1])
"""


def test_an_engine_elsewhere_prints_none_of_the_configs_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray starts one: with what it is made from, and an environment of its own."""
    monkeypatch.setattr(engines, "node_id", lambda: "here")  # Ray itself is not asked
    key = "sk-9f8e7d6c5b4a3f2e1d0c"
    cfg = Config.model_validate({"rollout": {"replicas": 1}})
    secrets.learn("rewards.judge.arguments.api_key", key)
    spec = engines.spec_of(
        [MagicMock(max_sequence_tokens=8, **{"cfg.rollout.max_num_seqs": 2})],
        tiny_model(layers=1),
        cfg=cfg,
        tokenizer=build("chars", 61, ["abc"]),
        threads=1,
    )
    assert key not in repr(spec)
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, key],
        input=pickle.dumps(spec),
        env={k: v for k, v in os.environ.items() if key not in v},
        capture_output=True,
        check=False,
    )
    said = (done.stdout + done.stderr).decode()
    assert said.count("<redacted:rewards.judge.arguments.api_key>") == 3, said
    assert key not in said


def test_where_runs_overlap_the_output_is_guarded_until_the_last_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs in threads: which one ends first is not known."""
    monkeypatch.setenv("OVERLAP_TOKEN", "s3cret-of-two-runs")
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    first, second = secrets.guarded_output(), secrets.guarded_output()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    print("s3cret-of-two-runs")
    second.__exit__(None, None, None)
    assert sys.stdout is out
    assert out.getvalue() == "<redacted:OVERLAP_TOKEN>\n"


@pytest.mark.parametrize("ended_by", ["\n", "flush", "end of the run"])
def test_a_secret_that_is_printed_in_pieces_is_struck(monkeypatch: pytest.MonkeyPatch, ended_by: str) -> None:
    """One may begin as another one does, and may be in the middle of what is written."""
    secrets.learn("it", "sk-12ab34cd")
    secrets.learn("longer", "sk-12ab34cd-ef56")
    for text, expected in (
        ("key sk-12ab34cd", "key <redacted:it>"),
        ("key sk-12ab34cd-ef56 sk-12ab34cd-e", "key <redacted:longer> <redacted:it>-e"),
        ("sk-12ab sk-", "sk-12ab sk-"),
    ):
        for size in range(1, len(text) + 1):
            raw = io.BytesIO()
            monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="utf-8", write_through=True))
            with secrets.guarded_output():
                for at in range(0, len(text), size):
                    print(text[at : at + size], end="")
                if ended_by == "\n":
                    print()
                elif ended_by == "flush":
                    print(end="", flush=True)
                    assert raw.getvalue().decode() == expected
            assert raw.getvalue().decode().rstrip("\n") == expected, size


def test_bytes_that_are_printed_in_pieces_are_struck_and_what_begins_no_secret_is_not_held() -> None:
    secrets.learn("it", "sk-12ab34cd")
    raw = io.BytesIO()
    stream = secrets.redacting(io.TextIOWrapper(raw, encoding="utf-8", write_through=True))
    stream.buffer.write(b"\xff sk-12")
    assert raw.getvalue() == b"\xff "
    stream.buffer.write(b"ab34cd, sk-12")
    stream.flush()
    assert raw.getvalue() == b"\xff <redacted:it>, sk-12"
    stream.write("sk-12ab\n")
    stream.write("12 %")
    assert raw.getvalue().endswith(b"sk-12ab\n12 %")


def test_what_several_threads_print_at_once_is_all_there() -> None:
    secrets.learn("it", "sk-12ab34cd")
    raw = io.StringIO()
    stream = secrets.redacting(raw)

    class Interrupted(str):
        """While it is written, another thread writes."""

        def __radd__(self, before: str) -> str:
            stream.write("s")
            return before + str(self)

    stream.write(Interrupted("sk"))
    stream.flush()
    assert raw.getvalue() == "ssk"


def test_a_secret_that_is_learned_while_another_thread_prints_is_struck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secrets.learn("first", "sk-12ab34cd")
    compile_now = re.compile

    def compiled(pattern: str) -> re.Pattern[str]:
        secrets.learn("second", "pk-56ef78ab")  # by another thread
        return compile_now(pattern)

    with monkeypatch.context() as patch:
        patch.setattr(re, "compile", compiled)
        assert secrets.redact("sk-12ab34cd") == "<redacted:first>"
    assert secrets.redact("sk-12ab34cd pk-56ef78ab") == "<redacted:first> <redacted:second>"
